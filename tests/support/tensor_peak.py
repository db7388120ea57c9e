"""Bytes of tensors that a computation makes: those alive, and the most at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorPeak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages of all results of operations while it is entered.

    Args:
        there: tensors that are there before, which do not count.
    """

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in there}
        self._there = there
        self.live_bytes = self.peak_bytes = 0

    def peak_of(self, work: Callable[[], Any]) -> tuple[Any, int]:
        """Run some work; return its result, and by how much the live bytes rose at most."""
        self.peak_bytes = before = self.live_bytes
        with self:
            result = work()
        return result, self.peak_bytes - before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves(found):
            if isinstance(value, torch.Tensor) and (key := value.untyped_storage()._cdata) not in self._sizes:
                self._sizes[key] = value.untyped_storage().nbytes()
                self.live_bytes += self._sizes[key]
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(value.untyped_storage(), self._drop, key)
        return found

    def _drop(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)
