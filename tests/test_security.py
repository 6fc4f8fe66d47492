# SPDX-License-Identifier: Apache-2.0
"""What must not be in the package, read from its source: code that runs data that it was given (docs/security.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "war_rl"
MODULES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
CALLS = ("eval", "exec", "compile", "__import__")
METHODS = ("send_pyobj", "recv_pyobj", "read_pickle", "to_pickle", "system", "popen")


def findings(source: str) -> list[str]:
    """What a module does that it must not, as ``line: what``."""
    return [f"{node.lineno}: {what}" for node in ast.walk(ast.parse(source)) if (what := _forbidden(node))]


def _forbidden(node: ast.AST) -> str:
    if isinstance(node, ast.Import):
        return ", ".join(a.name for a in node.names if a.name.partition(".")[0] in MODULES)
    if isinstance(node, ast.ImportFrom):
        return node.module if (node.module or "").partition(".")[0] in MODULES else ""
    if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
        return f"the address {node.value}"
    return _forbidden_call(node) if isinstance(node, ast.Call) else ""


def _forbidden_call(call: ast.Call) -> str:
    name = ast.unparse(call.func)
    keywords = {k.arg: k.value for k in call.keywords}

    def says(keyword: str, value: bool) -> bool:
        given = keywords.get(keyword)
        return isinstance(given, ast.Constant) and given.value is value

    last = name.rpartition(".")[2]
    if name in CALLS or ("." in name and last in METHODS):
        return name
    if name == "torch.load" and not says("weights_only", True):
        return "torch.load without weights_only=True"
    if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
        return name
    for keyword in ("allow_pickle", "trust_remote_code", "shell"):
        if says(keyword, True):
            return f"{keyword}=True"
    return ""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_in_the_package_runs_what_it_was_given_as_data(path: Path) -> None:
    assert findings(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, cloudpickle.x",
        "from pickle import loads",
        "eval('1')",
        "exec(code)",
        "__import__(name)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "socket.recv_pyobj()",
        "pd.read_pickle(path)",
        "AutoTokenizer.from_pretrained(x, trust_remote_code=True)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "site = TCPSite(runner, '0.0.0.0', 80)",
    ],
)
def test_the_check_sees_it(source: str) -> None:
    assert len(findings(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "model.eval()",
        "re.compile(x)",
        "yaml.safe_load(text)",
        "load(path, trust_remote_code=trust_remote_code)",
        "subprocess.run([a, b])",
        "client.send(payload)",
    ],
)
def test_the_check_leaves_alone_what_is_fine(source: str) -> None:
    assert findings(source) == []
