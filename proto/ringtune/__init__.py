"""The rules of a run, shared by every party: pure Python without torch.

Only ``ringtune.transport`` and the generated stubs in ``ringtune.v1`` talk to grpc.

The names of the Python API are loaded when they are first asked for, from the package that brings them by entry point
in the group ``ringtune.api``; ``__init__.pyi`` says what they are.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0"
__all__ = ["Coordinator", "Run", "connect", "evaluate", "plan", "train", "what_if"]

_GROUP = "ringtune.api"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ringtune' has no attribute {name!r}")
    from ringtune.entry_points import load_target, targets_of

    found = globals()[name] = load_target(targets_of(_GROUP)[name])
    return found


def __dir__() -> list[str]:
    """What a user may want; modules that were imported are none of it."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
