"""Adapters of several users at one node: a set of parameters for each user, and forwards of rows of several users.

All sets begin with the modules' values. A change of the set changes the tensors to which the modules refer: nothing is
copied, and a graph's backward uses the tensors of its forward. Users with adapters of another kind have separate
modules.

The rows of one user run together: attention is within a row, so rows are independent. Dropout is seeded for the rows of
each user as for a micro-batch of its own.

Source: ColA, section 4.3 (users alone, unmerged).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from edge.checkpoint.snapshots import block_of
from edge.model.skeleton import Skeleton
from edge.model.slice import BlockRunner
from edge.techniques.activation_checkpointing import BlockForward, SavedActivations
from edge.techniques.offload.pairs import Captures
from edge.techniques.offload.sites import adapter_weights, copy_of, install
from ringtune.errors import IntegrityError
from ringtune.techniques.offload import RowsOfUser


def set_name(user: str, name: str) -> str:
    """Name of a tensor of a user's set: ``anna/3.output.adapters.ringtune.adapter_down.0.weight``."""
    return f"{user}/{name}"


class UserSets:
    """The adapters of each user for some blocks.

    Args:
        kinds: modules of each kind of adapters with its users; the modules hold the set of the first user. Nothing is
            held for a kind without users.
    """

    def __init__(self, kinds: Iterable[tuple[Skeleton, Collection[str]]], blocks: Sequence[int]) -> None:
        self._kinds = [_KindSets(skeleton, blocks, users) for skeleton, users in kinds if users]
        self._of_user = {user: kind for kind in self._kinds for user in kind.sets}

    @property
    def users(self) -> tuple[str, ...]:
        """Names of all users with sets."""
        return tuple(self._of_user)

    @property
    def other_bytes(self) -> int:
        """Bytes of all sets that no module refers to now."""
        others = (tensors for kind in self._kinds for user, tensors in kind.sets.items() if user != kind.used)
        return sum(value.nbytes for tensors in others for value in tensors.values())

    @contextlib.contextmanager
    def using(self, user: str) -> Iterator[None]:
        """Let the modules of a user's kind use the user's set inside the context."""
        before = self._of_user[user].used
        self.use(user)
        try:
            yield
        finally:
            self.use(before)

    def use(self, user: str) -> None:
        """Let the modules of a user's kind use the user's set from now on."""
        self._of_user[user].use(user)

    def of(self, user: str) -> dict[str, nn.Parameter]:
        """Return the set of a user, by block and name."""
        return self._of_user[user].sets[user]

    def parameters(self, blocks: Collection[int]) -> dict[str, nn.Parameter]:
        """Return all sets of some blocks, by user, block and name; see ``set_name``."""
        return {
            set_name(user, name): value
            for user, kind in self._of_user.items()
            for name, value in kind.sets[user].items()
            if block_of(name) in blocks
        }

    def install(self, tensors: Mapping[str, torch.Tensor], blocks: Collection[int], *, where: str) -> None:
        """Replace the sets of some users for some blocks, in place.

        ``tensors`` are whole sets by the names of ``parameters``; ``where`` names them in errors.

        Raises:
            IntegrityError: an unknown user, or other names, shapes or types; nothing was replaced then.
            DivergedError: numbers that are not finite; nothing was replaced then.
        """
        users = {name.partition("/")[0] for name in tensors}
        if odd := sorted(users - self._of_user.keys()):
            raise IntegrityError(f"{where} are of {odd[0]!r}, who is no user of this run; use one plan on all machines")
        parameters = {name: value for name, value in self.parameters(blocks).items() if name.partition("/")[0] in users}
        install(parameters, tensors, where=where)


class _KindSets:
    """The modules of one kind of adapters, and the sets of its users.

    Attributes:
        sets: user -> block and name -> tensor.
        used: user of the set to which the modules refer.
    """

    def __init__(self, skeleton: Skeleton, blocks: Iterable[int], users: Iterable[str]) -> None:
        beside = adapter_weights(skeleton, blocks)
        self._homes = {name: _home(skeleton, name) for name in beside}
        self.sets: dict[str, dict[str, nn.Parameter]] = {}
        for user in users:
            self.sets[user] = (
                beside
                if not self.sets
                else {
                    name: nn.Parameter(copy_of(value), requires_grad=value.requires_grad)
                    for name, value in beside.items()
                }
            )
        self.used = next(iter(self.sets))

    def use(self, user: str) -> None:
        if user != self.used:
            tensors = self.sets[user]
            for name, (module, attribute) in self._homes.items():
                module._parameters[attribute] = tensors[name]
            self.used = user


def _home(skeleton: Skeleton, name: str) -> tuple[nn.Module, str]:
    index, _, inside = name.partition(".")
    path, _, attribute = inside.rpartition(".")
    return skeleton.blocks[int(index)].get_submodule(path), attribute


RunBlocks = Callable[[BlockRunner, torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""Runs blocks with the adapters of one kind: hidden state, mask, context -> output."""

RunSaving = Callable[[BlockForward, torch.Tensor], tuple[SavedActivations, torch.Tensor]]
"""Runs blocks with a graph: forward, hidden state -> saved activations, output."""


class UserBlockRunner:
    """Runs the blocks of one node by user. ``runners``: of each user, with the user's kind of adapters."""

    def __init__(self, sets: UserSets, captures: Captures, runners: Mapping[str, BlockRunner]) -> None:
        self._sets, self._captures, self._runners = sets, captures, runners

    def free(
        self,
        rows: tuple[RowsOfUser, ...],
        run: RunBlocks,
        blocks: BlockRunner,
        hidden: torch.Tensor,
        mask: torch.Tensor,
        context: Any,
    ) -> torch.Tensor:
        """Run blocks without a graph.

        ``run`` is called with the rows of one user; hidden is (batch rows, tokens, model width), mask (batch rows,
        tokens), and ``context`` that of all rows at ``blocks``, whose modules are of one kind only.
        """
        if len(rows) == 1:
            user = rows[0][0]
            own_blocks = self._runners[user]
            with self._sets.using(user):
                given = context if own_blocks is blocks else own_blocks.context(hidden, mask)
                return run(own_blocks, hidden, mask, given)
        output = torch.empty_like(hidden)
        for user, positions in rows:
            at = torch.tensor(positions, device=hidden.device)
            hidden_rows, own_mask, own_blocks = hidden[at], mask[at], self._runners[user]
            with self._sets.using(user):
                output[at] = run(own_blocks, hidden_rows, own_mask, own_blocks.context(hidden_rows, own_mask))
        return output

    def saving(
        self, rows: tuple[RowsOfUser, ...], run: RunSaving, forward: BlockForward, hidden: torch.Tensor
    ) -> tuple[SavedActivations, torch.Tensor]:
        """Run blocks with a graph; return their saved activations, and the output of the last block.

        ``run`` is called with the rows of one user; hidden (batch rows, tokens, model width) enters the first block.
        """
        if len(rows) == 1:
            user = rows[0][0]
            if forward.blocks is not self._runners[user]:
                forward.drop_context()  # it is of the modules of one kind
                forward.blocks = self._runners[user]
            forward.version = functools.partial(self._version, forward.version, user, None)
            with self._sets.using(user):
                return run(forward, hidden)
        parts: list[tuple[torch.Tensor, SavedActivations]] = []
        output = torch.empty_like(hidden)
        for user, positions in rows:
            at = torch.tensor(positions, device=hidden.device)
            forward_of_user = forward.of_rows(at, functools.partial(self._version, forward.version, user, positions))
            forward_of_user.blocks = self._runners[user]
            with self._sets.using(user), self._captures.of_rows(user, positions):
                saved, output[at] = run(forward_of_user, hidden[at])
            parts.append((at, saved))
        return SplitRows(parts), output

    @contextlib.contextmanager
    def _version(
        self,
        version: Callable[[], contextlib.AbstractContextManager[None]],
        user: str,
        positions: tuple[int, ...] | None,
    ) -> Iterator[None]:
        """Open the contexts of the first run for a recomputation."""
        recording = contextlib.nullcontext() if positions is None else self._captures.of_rows(user, positions)
        with version(), self._sets.using(user), recording:
            yield


class SplitRows:
    """Saved activations of one micro-batch by user, with the positions of the user's rows; every row is in one part."""

    def __init__(self, parts: Sequence[tuple[torch.Tensor, SavedActivations]]) -> None:
        self._parts = list(parts)

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Run the backward of the parts, one after the other; see ``SavedActivations.backward``."""
        gradient: torch.Tensor | None = None
        while self._parts:
            rows, saved = self._parts.pop(0)
            below = saved.backward(grad[rows])
            if below is not None:
                gradient = below.new_empty((len(grad), *below.shape[1:])) if gradient is None else gradient
                gradient[rows] = below
        return gradient

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every kept tensor."""
        for _, saved in self._parts:
            yield from saved.tensors()
