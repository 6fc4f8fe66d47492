# SPDX-License-Identifier: Apache-2.0
"""Which work a benchmark does: its own recording, the user's trace, or made-up text."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from war_rl.bench.presets import Settings
from war_rl.traces.model import Notes
from war_rl.traces.readers import read_traces
from war_rl.traces.synthetic import SyntheticTokens
from war_rl.traces.tokenise import ChatFormat, Tokenizer
from war_rl.traces.workload import Workload, build_workload, tokenise_traces

PACKAGED = "war_demo.jsonl.gz"
"""The default workload: trajectories of War-RL's own demonstration run (SmolLM2-135M-Instruct, a text game)."""

_FIRST_ORDINARY_TOKEN = 256


def packaged_workload() -> Path:
    """File of the recording that ships with the package; its format is ``war``.

    Raises:
        FileNotFoundError: it was not installed.
    """
    path = Path(str(resources.files("war_rl.bench") / "data" / PACKAGED))
    if not path.is_file():
        raise FileNotFoundError(f"{path}: the packaged workload is missing; give one with --trace FILE --format NAME")
    return path


def load_workload(
    settings: Settings, *, trace: list[str], fmt: str, tokenizer: Tokenizer | None, vocabulary: int, limit: int
) -> Workload:
    """The work of ``settings`` in tokens.

    Args:
        settings: what of the recording is replayed, and how.
        trace: files or folders; empty for the packaged recording.
        fmt: format of ``trace``.
        tokenizer: of the model that replays.
        vocabulary: number of its token ids.
        limit: the model's longest context, which bounds ``settings.max_context``. Unit: tokens.

    Raises:
        ValueError: a trace that cannot be read or replayed; the message says why.
    """
    spec = settings.workload_spec(limit)
    synthetic = SyntheticTokens(min(_FIRST_ORDINARY_TOKEN, vocabulary // 2), vocabulary, settings.seed)
    if settings.source == "no-repeat":
        return build_workload(settings.no_repeat(synthetic), spec)
    notes = Notes()
    traces = read_traces(trace, fmt, notes) if trace else read_traces(packaged_workload(), "war", notes)
    return build_workload(tokenise_traces(traces, tokenizer, synthetic, ChatFormat()), spec, dict(notes))


def load_tokenizer(model: str) -> tuple[Any, int, int]:
    """(tokenizer, number of token ids, longest context) of a model folder or name, from its files alone."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = config.get_text_config()
    return tokenizer, len(tokenizer), int(getattr(text, "max_position_embeddings", 0) or 1 << 20)
