# SPDX-License-Identifier: Apache-2.0
"""Readers of recorded trajectories, one module per file format.

A reader is a function ``read(path, notes) -> Iterator[Trace]``. It raises
:class:`~war_rl.traces.model.TraceFormatError` on the first bad line and counts in ``notes`` whatever it left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from war_rl.traces.model import Notes, Trace
from war_rl.traces.readers import lmcache, messages, mooncake, swe_agent, tau_bench, war


@dataclass(frozen=True, slots=True)
class Reader:
    """How one format is read: the function and the file endings looked for when a folder is given."""

    read: Callable[[Path, Notes], Iterator[Trace]]
    endings: tuple[str, ...]


READERS: dict[str, Reader] = {
    "tau-bench": Reader(tau_bench.read, (".json",)),
    "lmcache": Reader(lmcache.read, (".jsonl", ".jsonl.gz")),
    "swe-agent": Reader(swe_agent.read, (".traj",)),
    "messages": Reader(messages.read, (".jsonl", ".jsonl.gz")),
    "mooncake": Reader(mooncake.read, (".jsonl", ".jsonl.gz")),
    "war": Reader(war.read, (".jsonl", ".jsonl.gz")),
}
"""Format name, as typed after ``--format``, to its reader."""


def read_traces(paths: str | Path | Iterable[str | Path], fmt: str, notes: Notes | None = None) -> list[Trace]:
    """All trajectories of some files or folders, in file order (files of a folder sorted by path).

    Args:
        paths: files, or folders that are searched for the format's file endings.
        fmt: a key of :data:`READERS`.
        notes: receives what the reader left out; None discards it.

    Raises:
        ValueError: unknown format, a folder without matching files, or files without a single trajectory.
        FileNotFoundError: a path does not exist.
        TraceFormatError: a line that is not in the format.
    """
    if fmt not in READERS:
        raise ValueError(f"--format {fmt}: not one of {', '.join(READERS)}")
    reader = READERS[fmt]
    notes = notes if notes is not None else Notes()
    wanted = [paths] if isinstance(paths, (str, Path)) else list(paths)
    files = [file for path in wanted for file in _files(Path(path), fmt, reader.endings)]
    traces = [trace for file in files for trace in reader.read(file, notes)]
    if not traces:
        raise ValueError(f"no {fmt} trajectory in {', '.join(map(str, wanted))}")
    return traces


def _files(path: Path, fmt: str, endings: tuple[str, ...]) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(endings))
        if not found:
            raise ValueError(f"{path}: no file ending in {' or '.join(endings)} for --format {fmt}")
        return found
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such trace file")
    return [path]
