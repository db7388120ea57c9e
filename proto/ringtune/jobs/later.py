"""Refuses by name what the design of ``job.toml`` has and no code carries out yet.

Silence would be a lie.
"""

from __future__ import annotations

from collections.abc import Mapping

from ringtune.errors import JobError

_LATER_SECTIONS = ("offload",)
_CLIP_KEYS = ("clip_norm", "max_grad_norm", "clip_grad_norm", "gradient_clipping")


def refuse_unsupported(tables: Mapping[str, object]) -> None:
    """Refuse by name what the design has and this version does not carry out.

    Raises:
        JobError: names the key and what to do.
    """
    for name in _LATER_SECTIONS:
        if name in tables:
            raise JobError(f"section [{name}] is not supported yet; remove it")
    for section, keys in tables.items():
        if isinstance(keys, Mapping):
            for key in keys:
                _refuse_key(f"{section}.{key}")


def _refuse_key(name: str) -> None:
    section, _, key = name.partition(".")
    if section == "train" and key in _CLIP_KEYS:
        raise JobError(
            f"{name} is not supported: clipping by the global norm needs a sum over the ring before each update; "
            "remove it"
        )
