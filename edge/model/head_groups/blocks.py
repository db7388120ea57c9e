"""Run the hosted blocks by patterns; a pattern that leaves a block whole goes the module's own way.

The rules of whole blocks are here. A block of shortcuts only is the identity. One without any full subnet adds what it
computes without a graph, so that the gradient passes it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from edge.model.head_groups.forward import PartialBlock
from edge.model.head_groups.weights import subnets_of_block
from edge.model.skeleton import ADAPTER, Skeleton
from ringtune.schedule.operations.codes import FORWARD_ONLY, FULL, SHORTCUT

Whole = Callable[[torch.Tensor], torch.Tensor]


class HeadGroups:
    """The hosted blocks of a model, each by any number of subnets.

    Args:
        skeleton: after ``materialise``.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._blocks: dict[tuple[int, int], PartialBlock] = {}

    def run(self, index: int, hidden_BTD: torch.Tensor, context: Any, pattern: str, whole: Whole) -> torch.Tensor:
        """Run one block; whether a graph is kept is torch's grad mode.

        Args:
            index: of the block.
            hidden_BTD: (batch rows, tokens, model width) enters it.
            context: what the family's blocks need besides.
            pattern: a code for each subnet; empty = all full.
            whole: runs the whole block.
        """
        if set(pattern) == {SHORTCUT}:
            return hidden_BTD
        if torch.is_grad_enabled() and pattern and FULL not in pattern:
            with torch.no_grad():
                change = self.run(index, hidden_BTD, context, pattern, whole) - hidden_BTD
            return hidden_BTD + change
        if not torch.is_grad_enabled():
            pattern = pattern.replace(FORWARD_ONLY, FULL)
        if set(pattern) <= {FULL}:
            return whole(hidden_BTD)
        return self._block(index, len(pattern)).run(hidden_BTD, context, pattern)

    def _block(self, index: int, count: int) -> PartialBlock:
        if (index, count) not in self._blocks:
            model_type, block = self._skeleton.layout.model_type, self._skeleton.blocks[index]
            subnets = subnets_of_block(block, model_type, self._skeleton.model.config, count)
            self._blocks[index, count] = PartialBlock(block, model_type, subnets, adapter=ADAPTER)
        return self._blocks[index, count]
