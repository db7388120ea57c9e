"""Entry points of all packages: sub-commands, and names of the Python API.

In a checkout the entry points in ``pyproject.toml`` count too: they may be newer than the installed ones, or nothing
may be installed.
"""

from __future__ import annotations

import importlib
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any


def targets_of(group: str) -> dict[str, str]:
    """Find the entry points of a group: name -> ``module:attribute``, sorted by name.

    Those of a checkout take precedence over installed ones.
    """
    targets = {entry.name: entry.value for entry in entry_points(group=group)}
    return dict(sorted((targets | _targets_of_checkout(group)).items()))


def load_target(target: str) -> Any:
    """Import and return the object ``module:attribute``; raises ``ModuleNotFoundError``."""
    module_name, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module_name), attribute)


def _targets_of_checkout(group: str) -> dict[str, str]:
    project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        return {}
    with project.open("rb") as file:
        described = tomllib.load(file).get("project", {})
    if described.get("name") != "ringtune":
        return {}
    groups = described.get("entry-points", {})
    return {str(name): str(target) for name, target in groups.get(group, {}).items()}
