"""Helpers: nodes that fit adapters of blocks that another node hosts (ColA). No result depends on who helps.

The host of the blocks does forward and backward, but for the gradients of its adapters: it ships each adapter's input
with the gradient of its output. The helper computes the gradient from these *pairs*, keeps the optimizer state, updates
the adapters and sends them back. Blocks [0, 2) of host a, helper z::

    a | ... B12.0[0,2)  C12.0[0,2)  >c12.0#0@z                              <w12#0@z  U12[0,2)
    z |                                         <c12.0#0@a  A12.0[0,2)  U12[0,2)  >w12#0@a

Source: ColA, section 3.2 and Proposition 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ringtune.errors import PlanError
from ringtune.files.strict import read_dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Helper:
    """A node that fits the adapters of the blocks ``[start, stop)``, which another node hosts."""

    node: str
    start: int
    stop: int

    def has_block(self, block: int) -> bool:
        """Whether the helper fits the adapters of a block."""
        return self.start <= block < self.stop

    @property
    def text(self) -> str:
        """Which blocks the helper fits, in words: ``[2, 4)``."""
        return f"[{self.start}, {self.stop})"


def check_helpers(helpers: Sequence[Helper], slices: Iterable[tuple[str, int, int]]) -> None:
    """Refuse helpers that are not in ascending order, or do not fit the slices.

    Args:
        helpers: of a placement.
        slices: node, first block and one past the last block of every slice.

    Raises:
        PlanError: a range is empty, overlaps the one before, is of several hosts, or its host would help itself.
    """
    at = 0
    hosts = tuple(slices)
    for helper in helpers:
        if not helper.node or helper.start >= helper.stop or helper.start < at:
            raise PlanError(
                f"helper {helper.node!r} has the blocks {helper.text}; helpers need names and ascending ranges that "
                "don't overlap"
            )
        host = next((node for node, start, stop in hosts if start <= helper.start and helper.stop <= stop), "")
        if not host:
            raise PlanError(f"helper {helper.node} has the blocks {helper.text}, which no single node hosts")
        if host == helper.node:
            raise PlanError(f"node {host} hosts the blocks {helper.text}, so it can't be their helper; name another")
        at = helper.stop


def helpers_from_json(value: object, *, where: str) -> tuple[Helper, ...]:
    """Read what ``helpers_to_json`` wrote.

    Raises:
        PlanError: it is no list, or a field is missing or unknown.
    """
    if not isinstance(value, list):
        raise PlanError(f"{where} has to be a list of tables")
    return tuple(read_dataclass(Helper, one, where=f"{where}[{at}]", error=PlanError) for at, one in enumerate(value))


def helpers_to_json(helpers: Iterable[Helper]) -> list[dict[str, Any]]:
    """Write helpers as JSON-able tables."""
    return [dataclasses.asdict(helper) for helper in helpers]
