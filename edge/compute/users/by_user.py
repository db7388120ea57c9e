"""Forwards in which each row goes through the adapters of its user; the rows of one user are run together.

Attention is within a row, so that rows can be run by themselves. Dropout is seeded for the rows of each user as for a
micro-batch that has no others.

Source: ColA, section 4.3 (users alone, unmerged).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from edge.compute.capturing.captures import Captures
from edge.compute.saving.block_forward import BlockForward, Saved
from edge.compute.users.sets import UserSets
from edge.compute.users.split_rows import OfUser, SplitRows
from edge.model.slice import BlockRunner
from ringtune.schedule.whose_rows.users import RowsOfUser

RunBlocks = Callable[[BlockRunner, torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""Runs blocks with the adapters of one kind: from hidden state, mask and context to what leaves them."""

RunSaving = Callable[[BlockForward, torch.Tensor], tuple[Saved, torch.Tensor]]
"""Runs blocks with a graph: from a forward and what enters to what is kept and what leaves them."""


class ByUser:
    """Runs the blocks of one node by user.

    Args:
        sets: the adapters of all users.
        captures: record the pairs of these blocks.
        runners: of each user, with the kind of adapters that the user has.
    """

    def __init__(self, sets: UserSets, captures: Captures, runners: Mapping[str, BlockRunner]) -> None:
        self._sets, self._captures, self._runners = sets, captures, runners

    def free(
        self,
        rows: tuple[RowsOfUser, ...],
        run: RunBlocks,
        make_context: Callable[[torch.Tensor, torch.Tensor], Any],
        hidden: torch.Tensor,
        mask: torch.Tensor,
        context: Any,
    ) -> torch.Tensor:
        """Run blocks without a graph.

        Args:
            rows: whose they are.
            run: runs some of them.
            make_context: for some of them, from hidden state and mask.
            hidden: (batch rows, tokens, model width).
            mask: (batch rows, tokens).
            context: of all rows.
        """
        if len(rows) == 1:
            user = rows[0][0]
            with self._sets.using(user):
                return run(self._runners[user], hidden, mask, context)
        found = torch.empty_like(hidden)
        for user, positions in rows:
            at = torch.tensor(positions, device=hidden.device)
            own, own_mask = hidden[at], mask[at]
            with self._sets.using(user):
                found[at] = run(self._runners[user], own, own_mask, make_context(own, own_mask))
        return found

    def saving(
        self, rows: tuple[RowsOfUser, ...], run: RunSaving, forward: BlockForward, hidden: torch.Tensor
    ) -> tuple[Saved, torch.Tensor]:
        """Run blocks with a graph.

        Args:
            rows: whose they are.
            run: runs some of them.
            forward: of all rows.
            hidden: (batch rows, tokens, model width), enters the first block.

        Returns:
            What they keep, and what leaves the last of them.
        """
        if len(rows) == 1:
            user = rows[0][0]
            forward.blocks = self._runners[user]
            forward.version = functools.partial(self._version, forward.version, user, None)
            with self._sets.using(user):
                return run(forward, hidden)
        parts: list[OfUser] = []
        found = torch.empty_like(hidden)
        for user, positions in rows:
            at = torch.tensor(positions, device=hidden.device)
            own = forward.of_rows(at, functools.partial(self._version, forward.version, user, positions))
            own.blocks = self._runners[user]
            with self._sets.using(user), self._captures.of_rows(user, positions):
                saved, found[at] = run(own, hidden[at])
            parts.append(OfUser(at, saved))
        return SplitRows(parts), found

    @contextlib.contextmanager
    def _version(
        self,
        version: Callable[[], contextlib.AbstractContextManager[None]],
        user: str,
        positions: tuple[int, ...] | None,
    ) -> Iterator[None]:
        """Open around a second run what was open around the first."""
        recording = contextlib.nullcontext() if positions is None else self._captures.of_rows(user, positions)
        with version(), self._sets.using(user), recording:
            yield
