"""How large the code is, and how many files name a technique: ``python -m tests.support.code_size``; no test asks."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from typing import Final

from tests.support.sources import ROOT, modules, parsed

TECHNIQUES: Final = {
    "offload": "offload|helper|auxiliary",
    "operations": "operation|subnet|head_group",
    "audit": "audit",
    "VeLoRA": "velora",
    "HiFT": r"hift(?<!shift)",
    "activation cache": "activation_?cache(?!d)",
}
"""Technique -> the words by which identifiers name it, and paths its own files."""


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines, uses or imports."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def main() -> None:
    """Print a line for each count."""
    production = tuple(modules().values())
    for what, paths in (("production", production), ("tests", tuple((ROOT / "tests").rglob("*.py")))):
        lines = sum(len(path.read_bytes().splitlines()) for path in paths)
        packages = len({path.parent for path in paths})
        sys.stdout.write(f"{what}: {lines:,} lines, {len(paths)} files, {packages} packages\n")
    names = {path: set(identifiers(parsed(path))) for path in production}
    for technique, words in TECHNIQUES.items():
        word = re.compile(words, re.IGNORECASE)
        others = [path for path in production if not word.search(path.relative_to(ROOT).as_posix())]
        count = sum(any(map(word.search, names[path])) for path in others)
        sys.stdout.write(f"{technique}: named in {count} files besides its own\n")


if __name__ == "__main__":
    main()
