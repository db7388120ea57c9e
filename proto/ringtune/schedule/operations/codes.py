"""The three operations of a subnet for one micro-batch, and what they make of a whole block.

====== ============ =============================================================================================
code   operation    meaning, for one micro-batch at one subnet
====== ============ =============================================================================================
1      full         forward, and backward where the block trains or passes a gradient on
2      forward-only the subnet contributes to the hidden state, but is no part of the graph: its weights get no
                    gradient, and none passes through it
3      shortcut     the subnet contributes nothing; hidden state and gradient go past it
====== ============ =============================================================================================

A *pattern* is the codes of one block's subnets for one micro-batch: in ``1132`` two of four subnets are full. A *row*
is the patterns of all blocks, from block 0 on.

Source: D2FT, section II-A (full p_f, forward-only p_o, shortcut p_s, and the residual route past a subnet).
"""

from __future__ import annotations

import functools
from typing import Final

FULL: Final = "1"
FORWARD_ONLY: Final = "2"
SHORTCUT: Final = "3"
CODES: Final = frozenset({FULL, FORWARD_ONLY, SHORTCUT})


def block_code(pattern: str) -> str:
    """The operation of a whole block: what its most active subnet does.

    Example: ``2133`` is full, ``2233`` is forward-only, ``3333`` is a shortcut.
    """
    return min(pattern)


@functools.lru_cache(maxsize=4096)
def block_row(row: str, subnets: int) -> str:
    """The operations of whole blocks in a row with so many subnets a block; see ``block_code``.

    Example: ``1132 3333`` with four subnets is ``13``.
    """
    return row if subnets == 1 else "".join(block_code(row[at : at + subnets]) for at in range(0, len(row), subnets))


def pattern_of(row: str, block: int, subnets: int) -> str:
    """The pattern of one block in a row; empty for an empty row, which is all full."""
    return row[block * subnets : (block + 1) * subnets]


@functools.lru_cache(maxsize=4096)
def patterns_of(row: str, start: int, stop: int, subnets: int) -> tuple[str, ...]:
    """The patterns of blocks [start, stop) in a row; none for an empty row, which is all full."""
    return tuple(pattern_of(row, block, subnets) for block in range(start, stop)) if row else ()


def share(pattern: str, code: str) -> float:
    """The share of a pattern's subnets with an operation; of an empty pattern all are full.

    Example: of ``1132`` one half is full.
    """
    return pattern.count(code) / len(pattern) if pattern else float(code == FULL)
