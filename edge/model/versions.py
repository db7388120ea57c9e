"""Keep the versions of a slice's trained tensors that graphs still need.

Under PipeAdapter a node updates its slice while later items wait for their backward. Autograd needs the very tensors
that a forward used, unchanged: an update in place would make its backward fail, and other values put under the same
tensor (``tensor.data = ...``) would make it silently wrong. So where an update finds the newest version in use by
another item, the modules get fresh tensors first, and those are updated. No copy is made otherwise.

::

    item 0  F ------ B U             both forwards use v0; the update of item 0 makes v1 and leaves v0 to item 1
    item 1    F -------- B U         F of item 2 uses v1; the update of item 1 takes its gradient from v0 to a new v2
    item 2           F ------ B U

Source: RingAda, section IV, baseline PipeAdapter (several stored versions of the adapters).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from edge.model.optimizers.unit_optimizers import UnitOptimizers
from ringtune.errors import PlanError

Version = tuple[nn.Parameter, ...]


class VersionStore:
    """Knows which version of some blocks' trained tensors each item's graphs use.

    Args:
        blocks: their trainable parameters are looked after; those of one block may be shared by its modules.
        optimizers: over these parameters. They always hold the newest version.

    Attributes:
        peak_versions: most versions that were stored at once, the newest included.
    """

    def __init__(self, blocks: Iterable[nn.Module], optimizers: UnitOptimizers) -> None:
        self._places = [
            (module, name)
            for block in blocks
            for module in block.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter.requires_grad
        ]
        self._optimizers = optimizers
        self._newest: Version = tuple(getattr(module, name) for module, name in self._places)
        self._used: dict[int, Version] = {}
        self.peak_versions = 1 if self._places else 0

    @property
    def num_versions(self) -> int:
        """Number of versions that are stored now, the newest included."""
        return len({id(version) for version in (self._newest, *self._used.values())}) if self._places else 0

    @property
    def peak_extra_bytes(self) -> int:
        """Bytes of all versions but the newest, at the time when most were stored."""
        distinct = {id(parameter): parameter.nbytes for parameter in self._newest}
        return max(0, self.peak_versions - 1) * sum(distinct.values())

    def use(self, seq: int) -> None:
        """Keep the newest version, which a forward of this item is about to use, until ``release``.

        Raises:
            PlanError: an earlier micro-batch of the item used another version.
        """
        if not self._places:
            return
        if self._used.setdefault(seq, self._newest) is not self._newest:
            raise PlanError(f"item {seq}: the weights were updated between two of its micro-batches")

    @contextlib.contextmanager
    def at(self, seq: int) -> Iterator[None]:
        """Put the version that an item's forward used back into the modules while the context is open."""
        version = self._used.get(seq, self._newest)
        if version is self._newest:
            yield
            return
        self._put(version)
        try:
            yield
        finally:
            self._put(self._newest)

    def release(self, seq: int) -> None:
        """Move the gradients of an item to the newest version, which may be updated then.

        All backwards of the item have to be done. If another item's graphs use the newest version, the modules get
        fresh tensors first.
        """
        version = self._used.pop(seq, self._newest)
        grads = [parameter.grad for parameter in version]
        for parameter in version:
            parameter.grad = None
        del version  # gone before another one is made
        if any(used is self._newest for used in self._used.values()):
            self._renew()
        for parameter, grad in zip(self._newest, grads, strict=True):
            parameter.grad = grad

    def _renew(self) -> None:
        """Put fresh tensors of the same values into the modules and the optimizers."""
        fresh: dict[int, nn.Parameter] = {}
        for parameter in self._newest:
            if id(parameter) not in fresh:
                fresh[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        self._optimizers.exchange(fresh)
        self._newest = tuple(fresh[id(parameter)] for parameter in self._newest)
        self._put(self._newest)
        self.peak_versions = max(self.peak_versions, self.num_versions)

    def _put(self, version: Version) -> None:
        for (module, name), parameter in zip(self._places, version, strict=True):
            setattr(module, name, parameter)
