"""Rules of a run that all parties share, in pure Python without torch; names of the Python API.

Only ``ringtune.transport`` and the generated stubs in ``ringtune.v1`` use grpc.

The names of the API are loaded at their first use, through the entry points of the group ``ringtune.api``;
``__init__.pyi`` declares them.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

__version__ = "0.2.0"
__all__ = ["Coordinator", "Run", "connect", "evaluate", "measure", "plan", "simulate", "train", "what_if"]

_GROUP = "ringtune.api"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ringtune' has no attribute {name!r}")
    value = globals()[name] = pkgutil.resolve_name(targets_of(_GROUP)[name])
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def targets_of(group: str) -> dict[str, str]:
    """Find the entry points of a group: name -> ``module:attribute``, sorted by name.

    Those in the ``pyproject.toml`` of a checkout take precedence: they may be newer than the installed ones, or nothing
    may be installed.
    """
    import tomllib
    from importlib.metadata import entry_points

    targets = {entry.name: entry.value for entry in entry_points(group=group)}
    project_file = Path(__file__).parents[2] / "pyproject.toml"
    tables = tomllib.loads(project_file.read_text(encoding="utf-8")) if project_file.is_file() else {}
    project = tables.get("project", {})
    if project.get("name") == "ringtune":
        targets |= project["entry-points"][group]
    return dict(sorted(targets.items()))
