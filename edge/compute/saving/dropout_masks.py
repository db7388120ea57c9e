"""The masks that a block's dropout drew, a bit for each value, so that a second run need not draw them again.

Drawing takes far longer than reading: of a BERT's 16 x 12 attention maps of 128 x 128 it is 15 of the 17 ms of a
dropout on one core, and a bit for each value is 1/32 of what the graph keeps of it. Below autograd, the draw of every
dropout on the CPU is one call that fills a tensor with zeros and ones (``bernoulli_``), the fused ones among them; that
call is watched in the first run, and answered in the second. Graphs, kernels and bits are those of drawing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_DRAWS: Final = torch.ops.aten.bernoulli_.float
_DRAWS_NOTHING: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""It is marked as one that draws, but has no dropout on the CPU."""


class DropoutMasks:
    """The masks of one block of one micro-batch, in the order in which they were drawn.

    Attributes:
        packed: a tensor of bytes for each of them.
    """

    def __init__(self) -> None:
        self.packed: list[torch.Tensor] = []
        self._complete = True

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """Keep what is drawn while the context is open; nothing at all if something else draws numbers too."""
        with _Keeping(self):
            yield
        if not self._complete:
            self.packed.clear()

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Give each mask where it was drawn, once, while the context is open; where none is kept all are drawn."""
        if not self.packed:
            yield
            return
        with _Giving(iter(self.packed)):
            yield

    def keep(self, func: Any, drawn: torch.Tensor) -> None:
        """Keep a mask; a draw of another kind, or elsewhere, means that the second run has to draw too."""
        if func is not _DRAWS or drawn.device.type != "cpu":
            self._complete = False
        else:
            self.packed.append(torch.from_numpy(np.packbits(drawn.bool().numpy())))


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, masks: DropoutMasks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._masks = masks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and func is not _DRAWS_NOTHING:
            self._masks.keep(func, found)
        return found


class _Giving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, masks: Iterator[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._masks = masks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _DRAWS:
            return func(*args, **(kwargs or {}))
        target: torch.Tensor = args[0]
        bits = np.unpackbits(next(self._masks).numpy(), count=target.numel())
        return target.copy_(torch.from_numpy(bits).view(target.shape))
