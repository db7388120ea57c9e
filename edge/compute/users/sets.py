"""Several sets of parameters for the same adapter modules, of which the modules have one at a time.

All sets begin with the values that the modules have. Changing the set is changing which tensors the modules point at:
nothing is copied, and a graph goes back through the tensors that it was made with. Users whose adapters are of another
kind have modules of their own, which have the sets of these users alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from edge.compute.capturing.install import adapter_weights, check_like, copy_of
from edge.model.skeleton import Skeleton
from ringtune.errors import IntegrityError


def set_name(user: str, name: str) -> str:
    """Return the name of a tensor of a user's set: ``anna/3.output.adapters.ringtune.adapter_down.0.weight``."""
    return f"{user}/{name}"


def block_of(name: str) -> int:
    """Return the block of a tensor of a set, with or without its user."""
    return int(name.rpartition("/")[2].partition(".")[0])


class UserSets:
    """The adapters of each user for some blocks.

    Args:
        kinds: modules of each kind of adapters, with the users who have this kind; the modules have the set of the
            first of them. Of a kind without users nothing is held.
        blocks: with sets.
    """

    def __init__(self, kinds: Iterable[tuple[Skeleton, Collection[str]]], blocks: Sequence[int]) -> None:
        self._kinds = [_Kind(skeleton, blocks, users) for skeleton, users in kinds if users]
        self._of_user = {user: kind for kind in self._kinds for user in kind.sets}

    @property
    def users(self) -> tuple[str, ...]:
        """Whose sets there are."""
        return tuple(self._of_user)

    @property
    def other_bytes(self) -> int:
        """Bytes of all sets but those that modules have."""
        others = (own for kind in self._kinds for user, own in kind.sets.items() if user != kind.used)
        return sum(value.nbytes for own in others for value in own.values())

    @contextlib.contextmanager
    def using(self, user: str) -> Iterator[None]:
        """Let the modules of a user's kind compute with the user's set while the context is open."""
        before = self._of_user[user].used
        self.use(user)
        try:
            yield
        finally:
            self.use(before)

    def use(self, user: str) -> None:
        """Let the modules of a user's kind compute with the user's set from now on."""
        self._of_user[user].use(user)

    def of(self, user: str) -> dict[str, nn.Parameter]:
        """Return the set of a user, by block and name in it."""
        return self._of_user[user].sets[user]

    def of_site(self, user: str, site: str) -> dict[str, torch.Tensor]:
        """Return what a user's set has for one adapter module, by name in it, on the memory of the set."""
        inside = f"{site}."
        own = self.of(user).items()
        return {name.removeprefix(inside): value.detach() for name, value in own if name.startswith(inside)}

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

        Args:
            tensors: whole sets, named as ``parameters`` does.
            blocks: which ones.
            where: names the tensors in errors.

        Raises:
            IntegrityError: an unknown user, or other names, shapes or types; nothing was replaced then.
            DivergedError: numbers that are not finite; nothing was replaced then.
        """
        users = {name.partition("/")[0] for name in tensors}
        if odd := sorted(users - self._of_user.keys()):
            raise IntegrityError(f"{where} are of {odd[0]!r}, who is no user of this run; use one plan on all machines")
        wanted = {name: value for name, value in self.parameters(blocks).items() if name.partition("/")[0] in users}
        check_like(tensors, wanted, where=where)
        with torch.no_grad():
            for name, value in wanted.items():
                value.copy_(tensors[name])


class _Kind:
    """The modules of one kind of adapters, and the sets of the users who have it.

    Attributes:
        sets: by user, by block and name in it.
        used: whose set the modules have.
    """

    def __init__(self, skeleton: Skeleton, blocks: Iterable[int], users: Iterable[str]) -> None:
        beside = adapter_weights(skeleton, blocks)
        self._homes = {name: _home(skeleton, name) for name in beside}
        self.sets: dict[str, dict[str, nn.Parameter]] = {}
        for user in users:
            self.sets[user] = beside if not self.sets else {name: _like(value) for name, value in beside.items()}
        self.used = next(iter(self.sets))

    def use(self, user: str) -> None:
        """Point the modules at the set of a user."""
        if user != self.used:
            own = self.sets[user]
            for name, (module, attribute) in self._homes.items():
                module._parameters[attribute] = own[name]
            self.used = user


def _home(skeleton: Skeleton, name: str) -> tuple[nn.Module, str]:
    index, _, inside = name.partition(".")
    path, _, attribute = inside.rpartition(".")
    return skeleton.blocks[int(index)].get_submodule(path), attribute


def _like(value: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(copy_of(value), requires_grad=value.requires_grad)
