"""The production code as tests read it: where its files are, and their nodes, parsed once for all searches."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {"ringtune": ROOT / "proto" / "ringtune", **{name: ROOT / name for name in ("edge", "coordinator", "sim")}}


@functools.cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name, without generated code."""
    found = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            if "v1" not in parts:
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def parsed(path: Path) -> ast.Module:
    """The tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))
