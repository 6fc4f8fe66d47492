# SPDX-License-Identifier: Apache-2.0
"""Does training at temperature 1 learn the same with ``trainer.rollout=war`` as with ``=vllm``?

``recipes/learning_check/run.sh [--steps N] [--seeds 0,1,2]`` trains the tests' tiny model on an easy task, several
seeds under each rollout, compares the rewards of the last third of the steps by a permutation test, and draws the
curves. What is done already is not done again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROLLOUTS = ("war", "vllm")
COLOURS = {"war": "#d62728", "vllm": "#1f77b4"}
Curves = dict[str, dict[str, list[float]]]
"""Mean reward of each step, by rollout and seed."""


def overrides(folder: Path, rollout: str, seed: int, steps: int) -> list[str]:
    """Hydra overrides of one training, below ``folder``: two replicas, 4 prompts x 8 trajectories a step."""
    from tests.support.tiny_run import tiny_overrides

    loops = folder / "loops.yaml"
    loops.write_text("- name: vowels\n  _target_: recipes.learning_check.loop.VowelLoop\n")
    return tiny_overrides(
        folder,
        f"trainer.rollout={rollout}",
        f"trainer.total_training_steps={steps}",
        f"data.train_files={vowel_rows(folder)}",
        f"data.seed={seed}",
        # verl adds the replica's rank.
        f"actor_rollout_ref.rollout.seed={1000 * (seed + 1)}",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.temperature=1.0",
        "actor_rollout_ref.rollout.max_model_len=128",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "war.trace=off",
        "war.progress=off",
    )


def vowel_rows(folder: Path) -> Path:
    """64 prompts; what they say does not matter."""
    import pandas

    words = ("you", "are", "playing", "a", "game", "guess", "the", "number", "between", "one")
    rows = [
        {
            "data_source": "vowels",
            "prompt": [{"role": "user", "content": f"{a} {b}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i, "split": "train"},
            "agent_name": "vowels",
        }
        for i, (a, b) in enumerate(itertools.islice(itertools.product(words, words), 64))
    ]
    path = folder / "vowels.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    return path


def train(folder: Path, rollout: str, seed: int, steps: int) -> dict[str, Any]:
    """Run one training. Returns its reward curve and the drafts it accepted.

    Raises:
        RuntimeError: it failed; names its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "war_rl", "train", *overrides(folder, rollout, seed, steps)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with (folder / "output.log").open("w") as log:
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        raise RuntimeError(f"the training of {rollout}, seed {seed} ended with {code}; see {folder / 'output.log'}")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    metrics = [step["metrics"] for step in summary["steps"]]
    return {
        "rewards": [m["critic/rewards/mean"] for m in metrics],
        "accepted_tokens": sum(m["war/spec/accepted_tokens"] for m in metrics),
        "generated_tokens": sum(m["war/rollout/generated_tokens"] for m in metrics),
        "seconds": [m["timing_s/step"] for m in metrics],
    }


# ---------------------------------------------------------------------- judging


def last_third(curve: Sequence[float]) -> float:
    """Mean reward over the last third of the steps, at least one step."""
    return statistics.fmean(curve[-max(1, len(curve) // 3) :])


def first_tenth(curve: Sequence[float]) -> float:
    """Mean reward over the first tenth of the steps, at least one step."""
    return statistics.fmean(curve[: max(1, len(curve) // 10)])


def permutation_test(one: Sequence[float], other: Sequence[float]) -> float:
    """Exact two-sided p-value of the difference of means: over all ways to deal the values to two sides of these sizes,
    the share with at least this difference."""
    pooled = [*one, *other]
    seen = abs(statistics.fmean(one) - statistics.fmean(other))
    total, count, larger = sum(pooled), 0, 0
    for chosen in itertools.combinations(range(len(pooled)), len(one)):
        mine = sum(pooled[i] for i in chosen)
        difference = abs(mine / len(one) - (total - mine) / len(other))
        count += 1
        # Against rounding: the dealing that was seen must count as itself.
        larger += difference >= seen * (1 - 1e-12)
    return larger / count


def judge(curves: Curves, alpha: float) -> dict[str, Any]:
    """The verdict over all finished trainings.

    ``alpha`` is the error rate: how often two equal rollouts would be called different. With three seeds a side there
    are 20 dealings, so no p-value is below 0.1 and alpha cannot be less.
    """
    ends = {rollout: [last_third(curve) for curve in seeds.values()] for rollout, seeds in curves.items()}
    gains = [last_third(c) - first_tenth(c) for seeds in curves.values() for c in seeds.values()]
    p = permutation_test(ends["war"], ends["vllm"])
    smallest = 2 / len(list(itertools.combinations(range(sum(map(len, ends.values()))), len(ends["war"]))))
    return {
        "mean_reward_last_third": {rollout: statistics.fmean(values) for rollout, values in ends.items()},
        "by_seed": ends,
        "p_value": p,
        "alpha": alpha,
        "smallest_possible_p": smallest,
        "overlap": p > alpha or smallest > alpha,
        "can_tell": smallest <= alpha,
        "smallest_gain": min(gains),
        "learned": min(gains) > 0,
    }


def describe(verdict: Mapping[str, Any]) -> str:
    means = ", ".join(f"{name} {value:.4f}" for name, value in verdict["mean_reward_last_third"].items())
    text = f"mean reward over the last third: {means}; permutation test p = {verdict['p_value']:.3f}"
    if not verdict["can_tell"]:
        return f"{text}: too few seeds to tell anything at alpha = {verdict['alpha']:g}"
    outcome = "no difference" if verdict["overlap"] else "DIFFERENT"
    learned = "all runs learned" if verdict["learned"] else "NOT ALL RUNS LEARNED"
    return f"{text}, error rate {verdict['alpha']:g}: {outcome}; {learned}"


def plot(curves: Curves, path: Path) -> None:
    """One thin line for each seed, a thick one for each rollout's mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for rollout, seeds in curves.items():
        for curve in seeds.values():
            axes.plot(range(1, len(curve) + 1), curve, color=COLOURS[rollout], alpha=0.3, linewidth=1)
        mean = [statistics.fmean(values) for values in zip(*seeds.values(), strict=False)]
        axes.plot(range(1, len(mean) + 1), mean, color=COLOURS[rollout], linewidth=2, label=rollout)
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward (share of vowels)")
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ---------------------------------------------------------------------- command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps of each run (%(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (%(default)s)")
    parser.add_argument("--alpha", type=float, default=0.1, help="error rate of the test (%(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "learning-check")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "results" / "learning-check.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "results" / "learning-check.png")
    args = parser.parse_args(argv)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    done = json.loads(args.json.read_text()) if args.json.is_file() else {}
    runs = done.get("runs", {}) if done.get("steps") == args.steps else {}
    for seed, rollout in itertools.product(seeds, ROLLOUTS):
        name = f"{rollout}-{seed}"
        if name not in runs:
            print(f"training {name}: {args.steps} steps", flush=True)
            runs[name] = train(args.folder / f"{name}-{args.steps}", rollout, seed, args.steps)
            _write(args.json, {"steps": args.steps, "runs": runs})
    curves = {r: {str(s): runs[f"{r}-{s}"]["rewards"] for s in seeds} for r in ROLLOUTS}
    verdict = judge(curves, args.alpha)
    _write(args.json, {"steps": args.steps, "verdict": verdict, "runs": runs})
    plot(curves, args.plot)
    print(describe(verdict))
    return 0 if verdict["overlap"] and verdict["learned"] else 1


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
