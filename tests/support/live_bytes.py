"""Bytes of the tensors that operations make, counted as they run: those alive, and the most at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of results of operations while it is entered.

    Args:
        there: tensors that are there before, which do not count.
        is_counted: whether a result counts.
    """

    def __init__(
        self, there: Iterable[torch.Tensor] = (), is_counted: Callable[[torch.Tensor], bool] = lambda _: True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in there}
        self._there, self._is_counted = there, is_counted
        self.live_bytes = self.peak_bytes = 0

    def peak_of(self, work: Callable[[], Any]) -> tuple[Any, int]:
        """Run some work; return its result, and by how much the live bytes rose at most."""
        self.peak_bytes = before = self.live_bytes
        with self:
            result = work()
        return result, self.peak_bytes - before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, torch.Tensor) and self._is_counted(value):
                self._note(value.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.live_bytes += self._sizes[key]
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)
