# SPDX-License-Identifier: Apache-2.0
"""The one list of what War-RL logs: name, unit, meaning, healthy range, and what to do when a value leaves it.

docs/metrics.md is :func:`markdown` written to a file (``make docs``). A name that ends in ``*`` stands for a family.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Metric:
    """One value of a step. ``name`` lacks the ``war/`` or ``war_val/`` in front; ``always``: logged in every step."""

    name: str
    unit: str
    meaning: str
    healthy: str = "any"
    action: str = "nothing"
    always: bool = True


METRICS: tuple[Metric, ...] = (
    Metric(
        "rollout/seconds",
        "s",
        "wall time of the rollout: first trajectory submitted to last one in",
        "steady from step to step",
        "see tail_share, queue_seconds, env/seconds and cache/hit_rate for where it went",
    ),
    Metric(
        "rollout/tokens_per_s",
        "tokens/s",
        "generated tokens over rollout/seconds, all replicas together",
        "not falling while lengths are steady",
        "compare with trainer.rollout=vllm on the same config",
    ),
    Metric(
        "rollout/trajectories",
        "trajectories",
        "trajectories that ended, failed and truncated ones included",
        "batch size x n",
        "look for failed ones",
    ),
    Metric("rollout/trajectories_per_s", "1/s", "trajectories over rollout/seconds"),
    Metric("rollout/turns", "turns", "assistant generations, that is engine requests"),
    Metric("rollout/turns_max", "turns", "turns of the longest trajectory"),
    Metric(
        "rollout/generated_tokens",
        "tokens",
        "tokens the model wrote; compare runs only at equal work (within 5 %)",
    ),
    Metric(
        "rollout/failed",
        "trajectories",
        "trajectories that ended in an error (agent loop, environment, time limit)",
        "0",
        "the log names each with its error",
    ),
    Metric(
        "rollout/truncated",
        "trajectories",
        "trajectories cut by the context or response budget",
        "a few at most",
        "raise data.max_response_length or lower the number of turns",
    ),
    Metric(
        "rollout/turn_errors",
        "turns",
        "turns that ended in an error, those that were placed again and then succeeded included",
        "0",
        "look for a dead or draining replica in the log",
    ),
    Metric(
        "rollout/preemptions",
        "events",
        "requests whose KV cache the engine threw away to make room (vllm:num_preemptions)",
        "0",
        "admit fewer trajectories or give the engine more KV cache",
    ),
    Metric(
        "rollout/tail_seconds",
        "s",
        "time from 90 % to 100 % of the trajectories",
        "small against rollout/seconds",
        "the step waits for its slowest trajectories: drafting should be on there (spec/drafts), see turns_max",
    ),
    Metric("rollout/tail_share", "ratio", "tail_seconds over rollout/seconds", "below 0.3", "as tail_seconds"),
    Metric("rollout/trajectory_seconds_max", "s", "duration of the slowest trajectory"),
    Metric(
        "rollout/queue_seconds",
        "s",
        "time turns were held by the router, summed over turns",
        "near 0 while replicas are not full",
        "replicas are saturated: add KV cache, or see sched/waiting_max",
    ),
    Metric(
        "rollout/unannounced",
        "announcements",
        "announcements of trajectories that the router did not take, and samples that went past War-RL's rollout "
        "function (slime only)",
        "0",
        "the log says which and why, once; docs/slime.md",
        always=False,
    ),
    Metric(
        "time/dispatch_seconds",
        "s",
        "mean trajectory: from the rollout's begin to its own start. All time/* values add up to rollout/seconds",
        "below 0.1 x rollout/seconds",
        "agent-loop workers are too few or busy: raise actor_rollout_ref.rollout.agent.num_workers",
    ),
    Metric(
        "time/admission_seconds",
        "s",
        "mean trajectory: its first turn held by the router until a replica had room",
        "0 while replicas are not full",
        "the replicas' KV cache is the limit: more of it, more replicas, or shorter contexts",
    ),
    Metric(
        "time/queue_seconds",
        "s",
        "mean trajectory: later turns held by the router",
        "near 0",
        "see sched/reason/*: which rule held them",
    ),
    Metric(
        "time/engine_queue_seconds",
        "s",
        "mean trajectory: waiting inside the engine (vllm:request_queue_time_seconds)",
        "near 0",
        "the engine takes fewer requests at once than it is sent: rollout.max_num_seqs, KV cache",
    ),
    Metric(
        "time/prefill_seconds",
        "s",
        "mean trajectory: until the first token of each turn (vllm:request_prefill_time_seconds); 0 where the engine "
        "does not say, then part of decode",
        "below time/decode_seconds",
        "see cache/recomputed_seconds: with a cold cache every turn computes its whole prompt",
    ),
    Metric(
        "time/decode_seconds",
        "s",
        "mean trajectory: the rest of its engine time, decoding and verifying",
        "the largest share",
        "this is where drafting helps: see spec/estimated_speedup and regime/low_share",
    ),
    Metric(
        "time/drafting_seconds",
        "s",
        "mean trajectory: engine time that went into making drafts (estimate: the drafters' share of busy time)",
        "below 0.05 x time/decode_seconds",
        "lower war.spec.ingest_ms or war.spec.memory_mb",
    ),
    Metric(
        "time/env_seconds",
        "s",
        "mean trajectory: in its environment or tools, while it was not generating",
        "small against rollout/seconds",
        "slow environments: raise their concurrency",
    ),
    Metric(
        "time/other_seconds",
        "s",
        "mean trajectory: the rest of its life: agent loop, tokenising, rewards, transport",
        "below 0.1 x rollout/seconds",
        "rewards or tokenising in the agent-loop worker are slow: more workers",
    ),
    Metric(
        "time/idle_tail_seconds",
        "s",
        "mean trajectory: finished, while the step waits for others",
        "below 0.3 x rollout/seconds",
        "as rollout/tail_seconds",
    ),
    Metric(
        "regime/low_share",
        "ratio",
        "replica time with 1 to war.spec.max_running turns running: drafting pays there. low + high + idle = 1",
        "any",
        "nothing: tells how much of the step drafting can reach",
    ),
    Metric(
        "regime/high_share",
        "ratio",
        "replica time with more turns running than war.spec.max_running: saturated, cache and order matter",
    ),
    Metric(
        "regime/idle_share",
        "ratio",
        "replica time without a running turn",
        "below 0.3",
        "waiting for tools (time/env_seconds), for the last trajectories (time/idle_tail_seconds), or imbalance",
    ),
    Metric(
        "replica/tokens_per_s_min",
        "tokens/s",
        "generated tokens over rollout/seconds of the slowest replica",
        "above half of replica/tokens_per_s_max",
        "one replica is far behind: a shared or throttled machine, or it got the long trajectories",
    ),
    Metric("replica/tokens_per_s_max", "tokens/s", "the same of the fastest replica"),
    Metric(
        "replica/busy_share_min",
        "ratio",
        "least share of the rollout in which a replica ran at least one turn",
        "above 0.5",
        "that replica idles: see sched/replica_tokens_max_over_mean",
    ),
    Metric(
        "replica/*",
        "as the name says",
        "tokens_per_s and busy_share of each replica by number (up to 32 replicas)",
        always=False,
    ),
    Metric("cache/prompt_tokens", "tokens", "prompt tokens of all turns; cached_tokens + computed_tokens"),
    Metric("cache/cached_tokens", "tokens", "prompt tokens served from KV blocks a replica still held"),
    Metric("cache/computed_tokens", "tokens", "prompt tokens that were prefilled"),
    Metric(
        "cache/hit_rate",
        "ratio",
        "cached over prompt tokens, turns whose engine reported it",
        "above 0.5 with several turns per trajectory",
        "check sched/sticky_rate and rollout/preemptions; block_size must be small against a prompt",
    ),
    Metric(
        "cache/recomputed_tokens",
        "tokens",
        "prompt tokens that the trajectory's previous turn had computed already, computed again (the unfilled block of "
        "each turn included)",
        "below 0.2 x cache/prompt_tokens",
        "evicted between turns: fewer trajectories at once, more KV cache; or the trajectory moved (sched/migrations)",
    ),
    Metric(
        "cache/recomputed_seconds",
        "s",
        "recomputed_tokens at the step's measured prefill seconds per computed token, summed over turns",
        "small against rollout/seconds x replicas",
        "as recomputed_tokens",
    ),
    Metric(
        "cache/unreported_turns",
        "turns",
        "turns for which the engine gave no cached-token count; they count as computed and not in hit_rate",
        "0",
        "look at rollout/turn_errors",
    ),
    Metric(
        "cache/engine_hit_rate",
        "ratio",
        "vllm:prefix_cache_hits over vllm:prefix_cache_queries",
        "equal to hit_rate",
        "a difference means traffic that is not ours, or a lost record",
        always=False,
    ),
    Metric(
        "spec/drafts",
        "verify steps",
        "request-steps that carried a draft (vllm:spec_decode_num_drafts)",
        "above 0 unless saturated or war.spec.policy=off",
        "check the log for requests whose sampling parameters the verifier does not support",
    ),
    Metric("spec/draft_tokens", "tokens", "tokens proposed (vllm:spec_decode_num_draft_tokens)"),
    Metric("spec/accepted_tokens", "tokens", "draft tokens the verifier kept (vllm:spec_decode_num_accepted_tokens)"),
    Metric(
        "spec/acceptance_rate",
        "ratio",
        "accepted over draft tokens",
        "0.2 to 0.9",
        "low with policy war: raise war.spec.min_token_prob, or use budget; near 1.0: the verifier may be broken",
    ),
    Metric(
        "spec/mean_acceptance_length",
        "tokens",
        "1 + accepted_tokens / drafts: tokens committed per verify step, bonus token included; 1 without drafts",
        "1.3 and more",
        "as acceptance_rate",
    ),
    Metric("spec/wasted_tokens", "tokens", "draft_tokens - accepted_tokens: verified for nothing"),
    Metric(
        "spec/wasted_seconds",
        "s",
        "wasted_tokens x spec/step_per_token_s: engine seconds spent on verifying them, by the step-time model",
        "below spec/saved_seconds",
        "as acceptance_rate",
        always=False,
    ),
    Metric(
        "spec/saved_seconds",
        "s",
        "engine seconds that the same tokens would have cost more without drafts, by the step-time model, less the "
        "time that making drafts took; summed over replicas",
        "above 0 while drafts are made",
        "below 0 drafting costs more than it gives: war.spec.policy=budget, or off",
    ),
    Metric(
        "spec/estimated_speedup",
        "ratio",
        "rollout seconds without drafts, by the step-time model, over rollout/seconds; 1 without drafts",
        "1.0 and more",
        "below 1 drafting costs more than it gives: war.spec.policy=budget, or off. `war-rl bench rollout` measures it",
    ),
    Metric(
        "spec/acceptance_rate_*",
        "ratio",
        "accepted over draft tokens of drafts read from the trajectory's own text, its group's, the same prompt's in "
        "an earlier step (prompt) or anything else in the window; the drafters' own counts",
        "own, group and prompt above window",
        "group near 0: siblings write different text, or the feed does not arrive (spec/feed_lag_s)",
        always=False,
    ),
    Metric(
        "spec/draft_tokens_*", "tokens", "tokens drafted, by whose text they were read from (as above)", always=False
    ),
    Metric(
        "spec/accepted_tokens_*",
        "tokens",
        "tokens accepted, by whose text they were read from (as above)",
        always=False,
    ),
    Metric(
        "spec/propose_seconds",
        "s",
        "time the engines spent on making drafts and taking text in, summed over replicas",
        "below 0.05 x rollout/seconds x replicas",
        "lower war.spec.ingest_ms",
        always=False,
    ),
    Metric(
        "spec/proposer_*",
        "as the value without it",
        "the proposer's own count of a value that the engine counts as well",
        "close to the engine's",
        "a large gap means that drafts were dropped between proposer and verifier",
        always=False,
    ),
    Metric(
        "spec/draft_tokens_fed",
        "tokens",
        "tokens drafted from text that another replica generated and the feed brought",
        "above 0 with groups spread over replicas",
        "see spec/feed_lag_s and spec/feed_errors",
        always=False,
    ),
    Metric(
        "spec/feed_lag_s",
        "s",
        "time from a turn's end to its text being draftable on the slowest replica, last message",
        "below 1",
        "engines too busy to take text in: raise war.spec.ingest_ms",
        always=False,
    ),
    Metric(
        "spec/steps_held_off",
        "engine steps",
        "steps in which nothing was predicted, because no draft could pay or none has paid for a while",
        "near all steps while saturated, few in the tail",
        "compare spec/step_base_s and spec/step_per_token_s with how long the engine's steps take",
        always=False,
    ),
    Metric(
        "spec/steps_unmeasured",
        "engine steps",
        "steps without drafts because the step-time model had not yet seen enough of this machine",
        "16 per replica and run, 0 on CPUs",
        "more: no step was a pure decode step, so none could be measured",
        always=False,
    ),
    Metric("spec/*", "see the drafter", "further counters of the drafters, summed over replicas", always=False),
    Metric(
        "sched/sticky_rate",
        "ratio",
        "turns after a trajectory's first that ran where its previous turn ran; 1 when there is none",
        "1.0 without migrations",
        "see sched/migrations and sched/lost_turns",
    ),
    Metric(
        "sched/replica_tokens_max_over_mean",
        "ratio",
        "load of the busiest replica over the mean: tokens in flight over time as the scheduler sees them, or, for the "
        "stock rollout, tokens computed and generated",
        "1.0 to 1.3",
        "one replica is far behind or gets too much; see the per-replica values",
    ),
    Metric(
        "sched/replica_seconds_max_over_mean",
        "ratio",
        "seconds in which the busiest replica ran at least one turn, over the mean",
        "1.0 to 1.3",
        "a replica idles at the end of the step: see rollout/tail_share",
        always=False,
    ),
    Metric(
        "sched/queue_seconds_p50",
        "s",
        "median time a turn waited in the router until it was placed; _p95 and _max likewise",
        "0 while everything fits",
        "replicas are saturated: more KV cache, or longer steps are the price of not recomputing",
        always=False,
    ),
    Metric("sched/queue_seconds_*", "s", "as queue_seconds_p50", always=False),
    Metric(
        "sched/engine_queue_seconds",
        "s",
        "time that turns waited inside the engines before their first step, summed over turns; left out of the speeds "
        "that the scheduler learns",
        "an engine step per turn",
        "trajectories outgrow what admission expects: lower war.scheduler.admission_fill",
        always=False,
    ),
    Metric("sched/held_turns", "turns", "turns that waited in the router", "0 while everything fits", always=False),
    Metric(
        "sched/router_calls_per_turn",
        "calls",
        "calls to the router's process per turn; the busier it is, the more turns share a call (verl only)",
        "0.5 to 3",
        always=False,
    ),
    Metric(
        "sched/router_message_ms",
        "ms",
        "mean time of a call to the router that waits for no held turn (verl only)",
        "below 5",
        "the router's process or a worker's lacks a core; measure with python -m war_rl.trainers.verl.router_load",
        always=False,
    ),
    Metric("sched/waiting", "turns", "turns waiting in the router when the step was over", "0", always=False),
    Metric("sched/waiting_max", "turns", "most turns waiting in the router at once", always=False),
    Metric(
        "sched/admitted", "trajectories", "trajectories living on a replica when the step was over", "0", always=False
    ),
    Metric("sched/admitted_max", "trajectories", "most trajectories living on replicas at once", always=False),
    Metric(
        "sched/migrations",
        "moves",
        "turns that were placed elsewhere than their trajectory's last one although that replica was there",
        "few",
        "raise war.scheduler.migrate_margin_s, or set migrate_max=0",
        always=False,
    ),
    Metric("sched/migration_seconds", "s", "prefill that those moves cost, as the scheduler prices it", always=False),
    Metric(
        "sched/residency_error",
        "ratio",
        "mean absolute difference of predicted and reported cached tokens, over prompt tokens",
        "below 0.05",
        "the engine's cache is not what the scheduler thinks: block size, capacity, or traffic that is not ours",
        always=False,
    ),
    Metric("sched/residency_*", "tokens", "predicted, reported and absolute difference of cached tokens", always=False),
    Metric(
        "sched/preemptions",
        "events",
        "preemptions that engines reported for this step's turns",
        "0",
        "lower war.scheduler.admission_fill",
        always=False,
    ),
    Metric(
        "sched/reason/*",
        "turns",
        "placements by reason: first (a new trajectory), aged (one that had waited max_wait_s), sticky, migrated, "
        "home_gone, sticky_parallel; other policies have their own",
        always=False,
    ),
    Metric("sched/lost_turns", "turns", "turns whose replica was lost while they ran", "0", always=False),
    Metric("sched/cancelled_turns", "turns", "turns given up by their client", always=False),
    Metric("sched/*", "see the scheduler", "further values of the scheduler for this step", always=False),
    Metric(
        "env/seconds",
        "s",
        "time in environments and tools, summed over trajectories",
        "small against rollout/seconds x trajectories",
        "slow environments: raise their concurrency",
    ),
    Metric(
        "env/seconds_max",
        "s",
        "largest environment time of one trajectory",
        "below rollout/seconds / 2",
        "a hanging environment is cut by war.env.step_timeout_s",
    ),
    Metric(
        "trace/trajectories",
        "trajectories",
        "trajectories of this rollout whose events were written to the trace (war.trace)",
        "above 0 unless war.trace=off",
        "the log says why nothing could be written",
        always=False,
    ),
    Metric(
        "trace/seconds",
        "s",
        "time that writing this rollout's trace took, after it",
        "below 0.01 x rollout/seconds",
        "war.trace=sampled instead of full, or off",
        always=False,
    ),
    Metric(
        "observe/seconds",
        "s",
        "time spent before and after the rollout on reading counters, adding up these values and writing the trace",
        "below 0.01 x rollout/seconds",
        "replicas or agent-loop workers answer slowly; trace/seconds is part of it",
        always=False,
    ),
    Metric(
        "fault/nonfinite_turns",
        "turns",
        "turns whose log-probs were NaN or infinite; their trajectories failed and are not trained on",
        "0",
        "the log names the replica: if it is one of several, look at its device; if it is all, training has diverged",
    ),
    Metric(
        "fault/unrecorded_trajectories",
        "trajectories",
        "trajectories that war.record_trajectories could not write; they are trained on all the same",
        "0",
        "the worker's log says why, once: most often the disk is full",
        always=False,
    ),
    Metric(
        "fault/unwritten_summaries",
        "events",
        "times that summary.json could not be written since the step before; the next one holds everything again",
        "0",
        "room on the disk of the run folder",
        always=False,
    ),
    Metric(
        "fault/replica_lost",
        "replicas",
        "rollout replicas that were dead when the run ended. This and the rest of fault/* end a run: they stand in "
        "summary.json under faults, and are the last thing that is logged",
        "not there",
        "the run's error names each and its cause; trainer.resume_mode=auto goes on from the last checkpoint",
        always=False,
    ),
    Metric("fault/router_lost", "events", "the router died or was started again", "not there", "as above", False),
    Metric(
        "fault/worker_lost",
        "events",
        "an agent-loop worker died, or did not answer for war.fault.worker_timeout_s",
        "not there",
        "as above; memory, or an agent loop that blocks, which the worker's log shows",
        always=False,
    ),
    Metric(
        "fault/checkpoint_failed",
        "events",
        "a checkpoint could not be written",
        "not there",
        "room on the disk; the error names the newest whole checkpoint",
        always=False,
    ),
    Metric(
        "fault/weights_not_finite",
        "events",
        "the engines held weights that are NaN or infinite",
        "not there",
        "training has diverged: a lower learning rate, from a checkpoint before it",
        always=False,
    ),
    Metric(
        "fault/update_stuck",
        "events",
        "a weight update took longer than war.fault.update_timeout_s although every engine lived",
        "not there",
        "the run's error names the replicas without the new weights: look at their devices and logs",
        always=False,
    ),
    Metric(
        "alarm/fired",
        "alarms",
        "alarms of this step (each cause is told once in a run)",
        "0",
        "the log line that starts with [war-rl] ALARM says what is wrong and what to do",
        always=False,
    ),
    Metric(
        "sync/replicas",
        "replicas",
        "replicas that hold the weights of this step, all of them the same (WAR worker group only)",
        "the number of replicas",
        "a replica with other weights stops the run by itself",
        always=False,
    ),
    Metric(
        "sync/weights_changed",
        "ratio",
        "share of the probed weights (layer norms) that the last weight update changed",
        "1.0 while the actor trains",
        "0 with a learning rate above 0: the update did not reach the engines",
        always=False,
    ),
    Metric("sync/weight_sum", "1", "sum of the probed weights as the engines hold them; a fingerprint", always=False),
    Metric(
        "sync/late_turns",
        "turns",
        "turns refused because the replica's weights were not those of their trajectory's step (WAR worker group only)",
        "0",
        "an agent loop asks for turns after its trajectory has ended (a background task); each got an error, none was "
        "trained on",
        always=False,
    ),
    Metric(
        "router/retries",
        "requests",
        "requests that lost their engine and were placed again (slime only, as all of router/ and corpus/)",
        "0",
        "the router's log names the engine; look at its own log",
        always=False,
    ),
    Metric(
        "router/workers_healthy",
        "engines",
        "engines that take turns at the end of the rollout",
        "router/workers",
        "the router's log says which engine is lost and why",
        always=False,
    ),
    Metric("router/no_worker", "requests", "requests answered 503, which slime repeats", "0", "as retries", False),
    Metric(
        "router/client_gone",
        "requests",
        "requests whose client went away before the answer",
        "0 without time limits in custom generate functions",
        always=False,
    ),
    Metric("router/*", "see docs/slime.md", "further values of the HTTP router", always=False),
    Metric(
        "corpus/servers_unsupported",
        "engines",
        "engines that take no n-gram corpora: they draft nothing from finished trajectories",
        "0 where drafting is wanted",
        "corpora_unsupported in the router's /war/stats says why; flags: docs/slime.md",
        always=False,
    ),
    Metric("corpus/loaded_tokens", "tokens", "tokens that engines loaded, summed over engines", always=False),
    Metric(
        "corpus/rejected",
        "corpora",
        "corpora that an engine refused to load, most likely for its token budget",
        "0",
        "lower --corpus-max-tokens or raise --sglang-speculative-ngram-external-corpus-max-tokens",
        always=False,
    ),
    Metric("corpus/*", "see docs/slime.md", "further values of the corpus feed", always=False),
)

STEP_METRIC = "training/global_step"
"""verl's key that W&B draws our values over."""


def summary_of(metric: Metric) -> str:
    """What W&B's summary keeps of a metric over the steps of a run: ``mean``, ``max`` or ``last``."""
    if metric.name.startswith("sync/"):
        return "last"
    return "max" if metric.name.endswith("_max") or metric.name in ("rollout/failed", "spec/feed_lag_s") else "mean"


PREFIXES = ("war/", "war_val/")


def _bare(name: str) -> str | None:
    return next((name.removeprefix(p) for p in PREFIXES if name.startswith(p)), None)


def undocumented(names: Iterable[str]) -> list[str]:
    """Logged ``war/...`` and ``war_val/...`` names that the registry does not know. Names of others are ignored."""
    bare = [(name, _bare(name)) for name in names]
    return sorted(n for n, b in bare if b is not None and not any(fnmatchcase(b, m.name) for m in METRICS))


def missing(names: Iterable[str], *, validate: bool = False) -> list[str]:
    """Names that every step logs and that are not among ``names``."""
    prefix = PREFIXES[1] if validate else PREFIXES[0]
    return sorted({f"{prefix}{m.name}" for m in METRICS if m.always} - set(names))


def markdown() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Made from `war_rl/metrics_registry.py` by `make docs`; edit there.",
        "",
        "Each training step logs these as `war/<name>`, each validation pass as `war_val/<name>`. Values are those of",
        "one step, never cumulative, summed over replicas. A name that ends in `*` stands for a family.",
    ]
    room = ""
    for metric in METRICS:
        if metric.name.partition("/")[0] != room:
            room = metric.name.partition("/")[0]
            lines += ["", f"## {room}", ""]
            lines += ["| name | unit | meaning | healthy | when it is off |", "|---|---|---|---|---|"]
        cells = (f"`{metric.name}`", metric.unit, metric.meaning, metric.healthy, metric.action)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
