"""Whether a node has room for a heap that keeps what tensors leave.

A heap that keeps freed memory saves page faults, but it is in pieces, and no plan counts them. With little memory a
node does without, so that what the plan says is what it needs.

Source: resident memory of a node alone, MiniLM, 16 x 128 tokens, AdamW: above plan and libraries 10 MiB with a
bottleneck, 262 MiB with LoRA on five matrices, whose graphs were planned with 344 MiB.
"""

from __future__ import annotations

from typing import Final

from ringtune.costs.memory.terms import MemoryEstimate

_PIECES: Final = 2
"""The room for pieces, over what graphs and work space take."""


def has_room_for_heap(needs: MemoryEstimate, memory_bytes: int) -> bool:
    """Whether a node may keep freed memory in its heap: with the pieces it stays within the node's budget.

    Example: 100 MiB of which 40 are activations may become 180 MiB.

    Args:
        needs: what the plan reserves at the node.
        memory_bytes: the node's budget.
    """
    return needs.total_bytes + _PIECES * needs.parts()["activations"] <= memory_bytes
