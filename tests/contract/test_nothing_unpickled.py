"""Nothing that comes from a file or another machine is ever run as code: the sources have no way to do it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.cases import cases

ROOT = Path(__file__).parents[2]
MODULES = frozenset(
    {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "jsonpickle"}
)
CALLS = frozenset({"eval", "exec", "compile", "__import__"})
METHODS = frozenset({"torch.load", "torch.jit.load", "torch.hub.load", "runpy.run_path", "os.system", "os.popen"})
OPTIONS = frozenset({"allow_pickle", "trust_remote_code", "shell"})


def ways(text: str) -> Iterator[str]:
    """Every way in a source to run what was read."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS | METHODS or name.endswith((".extractall", "multiprocessing.connection.Listener")):
                yield name
            for option in node.keywords:
                is_off = isinstance(option.value, ast.Constant) and option.value.value is False
                if option.arg in OPTIONS and not is_off:
                    yield f"{name}({option.arg}=...)"


def test_sources_have_no_way_to_run_what_they_read() -> None:
    """No unpickling, no evaluating, no code of a model's folder, no shell; numpy's own pickles are off."""
    files = [
        path for folder in ("proto/ringtune", "edge", "coordinator", "sim") for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 200
    found = {str(path.relative_to(ROOT)): list(ways(path.read_text(encoding="utf-8"))) for path in files}
    assert {name: these for name, these in found.items() if these} == {}


def test_numpy_is_always_told_to_take_no_pickles() -> None:
    """``numpy.load`` says so itself: its default may change."""
    for path in (ROOT / "edge").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
                assert "allow_pickle" in [option.arg for option in node.keywords], path


@cases(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(x)",
        "eval(text)",
        "np.load(x, allow_pickle=True)",
        "f(trust_remote_code=given)",
        "archive.extractall(folder)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_search_for_such_ways_finds_them(text: str) -> None:
    """Negative control of the search."""
    assert list(ways(text))


def test_search_lets_other_calls_pass() -> None:
    """What only looks alike is none."""
    assert list(ways("np.load(x, allow_pickle=False)\nre.compile('a')\nmodel.eval()\njson.load(x)")) == []
