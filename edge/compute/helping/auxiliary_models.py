"""What a helper fits for others: the adapters of some blocks, of each user and kind where users have their own.

Source: ColA, section 3 (auxiliary models), and section 4.3 (several users).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from edge.compute.capturing.sums import AtMatrix, matrices_of
from edge.compute.helping.adapter_modules import AdapterModules
from edge.compute.users.sets import UserSets, set_name
from edge.model.skeleton import Skeleton
from ringtune.errors import IntegrityError
from ringtune.jobs.job import Job
from ringtune.jobs.user_adapters import Kind, job_of, kinds_of
from ringtune.schedule.whose_rows.users import RowsOfUser


class AuxiliaryModels:
    """The adapters of some blocks.

    Args:
        folder: of the model; only its configuration is read.
        job: of the run.
        units: blocks whose adapters are fitted here.
        dtype: of the computation.
        device: of the computation.
        users: that have adapters of their own; none = there is one set for all.

    Raises:
        ModelError: no such folder, or a family that is not supported.
        JobError: adapters that can't be fitted from pairs.
    """

    def __init__(
        self,
        folder: Path,
        job: Job,
        units: range,
        dtype: torch.dtype,
        device: torch.device,
        users: Collection[str] = (),
    ) -> None:
        self.units = units
        wanted = [kind for kind in kinds_of(job, tuple(users)) if kind.users or not users]
        self._kinds: list[tuple[Kind, AdapterModules]] = [
            (kind, AdapterModules(folder, job_of(job, kind.config), units, dtype, device)) for kind in wanted
        ]
        sets = [(modules.skeleton, kind.users) for kind, modules in self._kinds]
        self._sets = UserSets(sets, units) if users else None
        self._places: dict[int, list[AtMatrix]] = {}

    @property
    def skeleton(self) -> Skeleton:
        """The model of the first kind; of its blocks the adapters in ``units`` are real."""
        return self._kinds[0][1].skeleton

    @property
    def held_bytes(self) -> int:
        """Bytes of everything that is held, with the sets of all users."""
        held = sum(modules.held_bytes for _, modules in self._kinds)
        return held + (self._sets.other_bytes if self._sets is not None else 0)

    @property
    def inputs(self) -> dict[str, int]:
        """Values of a token of x, by the names of the pairs that have one of their own."""
        return {
            f"{kind.prefix}{name}": width for kind, modules in self._kinds for name, width in modules.inputs.items()
        }

    def parameters(self, start: int, stop: int) -> dict[str, nn.Parameter]:
        """Return the weights of blocks ``[start, stop)`` by the names that ``BlockRunner`` has for them.

        Those of users have the user before that name; see ``set_name``.
        """
        if self._sets is not None:
            return self._sets.parameters(range(start, stop))
        return self._kinds[0][1].parameters(range(start, stop))

    def weights(self, start: int, stop: int, users: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Return the values of these weights, on the memory of the weights.

        Args:
            start: first block.
            stop: one past the last block.
            users: whose; all of them if there is one set for all.
        """
        wanted = self.parameters(start, stop)
        if self._sets is not None:
            own = {set_name(user, name) for user in users for name in self._sets.of(user)}
            wanted = {name: value for name, value in wanted.items() if name in own}
        return {name: parameter.detach() for name, parameter in wanted.items()}

    def of_user(self, user: str) -> dict[str, torch.Tensor]:
        """Return the weights of a user, by block and name in it."""
        return {} if self._sets is None else dict(self._sets.of(user))

    def sums(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the sums of all users' changes in blocks ``[start, stop)``, as ``MergedMatrices`` takes them."""
        sets = self._sets
        if sets is None:
            return {}
        own = [[sets.of(user) for user in kind.users] for kind, _ in self._kinds]
        skeletons = {at: modules.skeleton for at, (_, modules) in enumerate(self._kinds)}
        found: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for block in range(start, stop):
                if block not in self._places:
                    self._places[block] = matrices_of(skeletons, block)
                for place in self._places[block]:
                    found |= place.sum_of(own)
        return found

    def changing(self, start: int, stop: int) -> tuple[str, ...]:
        """The users whose weights in blocks ``[start, stop)`` have gradients, so that the next update changes them."""
        if self._sets is None:
            return ()
        found = {name for name, value in self.parameters(start, stop).items() if value.grad is not None}
        return tuple(user for user in self._sets.users if any(name.startswith(f"{user}/") for name in found))

    def fit(
        self,
        tensors: Mapping[str, torch.Tensor],
        rows: Sequence[RowsOfUser] = (),
        blocks: Collection[int] | None = None,
    ) -> None:
        """Add the gradient that some pairs give to the gradients of the weights; the pairs are not kept.

        Args:
            tensors: what ``Pairs.take`` gave for some of the blocks here, of one micro-batch.
            rows: whose rows they are, where users have adapters of their own; each set gets the gradient of its rows.
            blocks: that the pairs have to be of; None = those that the pairs name.

        Raises:
            IntegrityError: other names, or shapes that don't belong together; nothing was added then.
        """
        if self._sets is None:
            modules = self._kinds[0][1]
            modules.check(tensors, blocks=blocks)
            modules.fit(tensors)
            return
        parts = [self._part(kind, modules, tensors, rows, blocks) for kind, modules in self._kinds]
        if odd := sorted(tensors.keys() - {f"{kind.prefix}{name}" for kind, _, own, _ in parts for name in own}):
            raise IntegrityError(f"pairs have {odd[0]} too much; host and helper need the same plan and job")
        for _, modules, own, users in parts:
            for user, positions in users:
                self._sets.use(user)
                modules.fit(own, None if len(users) == 1 else positions)

    def _part(
        self,
        kind: Kind,
        modules: AdapterModules,
        tensors: Mapping[str, torch.Tensor],
        rows: Sequence[RowsOfUser],
        blocks: Collection[int] | None,
    ) -> tuple[Kind, AdapterModules, dict[str, torch.Tensor], list[tuple[str, list[int]]]]:
        """Return the pairs of one kind by name, and each user's rows of them, after a look at them."""
        users = [(user, positions) for user, positions in rows if user in kind.users]
        places = {row: at for at, row in enumerate(sorted(row for _, positions in users for row in positions))}
        own = {
            name.removeprefix(kind.prefix): value
            for name, value in tensors.items()
            if name.rpartition("/")[0] == kind.prefix.rstrip("/")
        }
        if bool(own) is not bool(users):
            many = "too little" if users else "too much"
            raise IntegrityError(f"pairs of {kind.config} are {many}; host and helper need the same plan and job")
        modules.check(own, len(places), blocks if users else None)
        return kind, modules, own if users else {}, [(user, [places[row] for row in part]) for user, part in users]
