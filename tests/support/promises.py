"""What is always true of a run, and the tests that hold it: ``python -m tests.support.promises`` prints both.

A test says which of the eight it holds by ``@pytest.mark.promise("1 partition invariance")``. The marks are read from
the files, without importing them; ``tests/contract/test_sample.py`` compares that with what pytest collects.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROMISES: Final = {
    "1 partition invariance": "The ring gives the adapters and head of one process, for any split.",
    "2 right version": "Each forward sees the version of the weights that the plan names.",
    "3 frozen means free": "Below the lowest trainable block nothing is kept, and no gradient is sent.",
    "4 labels stay": "No message of the ring has labels or token ids.",
    "5 timing changes nothing": "The same seed and plan give the same result, whatever the delays.",
    "6 every wait ends": "Each wait has a deadline, and an error that names what was awaited.",
    "7 bounded memory": "Credits bound what is in flight, and a plan that does not fit is refused.",
    "8 adapterhub folder": "A saved adapter loads into the plain library with nothing of ours.",
}
"""Every promise with one sentence; the numbers are those of the design's list."""

TESTS: Final = Path(__file__).parents[1]


def held_promises() -> dict[str, list[str]]:
    """Promise -> the tests that hold it, as ``file::function``; also promises that nobody knows, if tests name them."""
    found: dict[str, list[str]] = {promise: [] for promise in PROMISES}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for function in ast.parse(text).body if "mark.promise(" in text else ():
            if isinstance(function, ast.FunctionDef):
                for promise in _marks(function):
                    name = f"{path.relative_to(TESTS.parent).as_posix()}::{function.name}"
                    found.setdefault(promise, []).append(name)
    return found


def _marks(function: ast.FunctionDef) -> Iterator[str]:
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
            yield from (str(ast.literal_eval(name)) for name in mark.args)


def main() -> None:
    """Print one block for each promise."""
    for promise, tests in held_promises().items():
        print(f"{promise}: {PROMISES.get(promise, 'no such promise')}")  # noqa: T201
        for test in tests:
            print(f"    {test}")  # noqa: T201
        print()  # noqa: T201


if __name__ == "__main__":
    main()
