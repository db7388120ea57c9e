"""Rules of a run that all parties share, in pure Python without torch; names of the Python API.

Only ``ringtune.transport`` and the generated stubs in ``ringtune.v1`` use grpc.

The names of the API are loaded at their first use, through the entry points of the group ``ringtune.api``;
``__init__.pyi`` declares them.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0"
__all__ = ["Coordinator", "Run", "connect", "evaluate", "measure", "plan", "simulate", "train", "what_if"]

_GROUP = "ringtune.api"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ringtune' has no attribute {name!r}")
    from ringtune.entry_points import load_target, targets_of

    value = globals()[name] = load_target(targets_of(_GROUP)[name])
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
