"""What files of trained blocks have in common, in memory and on the disk: how their tensors and metadata are named."""

from __future__ import annotations

from typing import Final

METADATA: Final = "ringtune"
"""The entry of a file's metadata that says what it is of."""

HEAD: Final = "head"
"""The tensor of a shard that is the head, as bytes."""


def metadata(run_id: str, step: int) -> dict[str, str]:
    """What a file of the end of a turn is of."""
    return {"run": run_id, "step": str(step)}


def block_of(name: str) -> int:
    """The block of a tensor ``adapter/3.attention...``, or of its state; -1 if it is of none."""
    number = name.partition("/")[2].partition(".")[0]
    return int(number) if number.isdecimal() else -1
