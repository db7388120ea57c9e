"""Activation checkpointing: a forward keeps a block's graph, or its input to run it again before its backward.

Each range of blocks of an action has its own policy. A ``BlockForward`` has all that the result depends on besides the
hidden state: step, patterns of operations, the version of the weights, and VeLoRA's vectors. Dropout is seeded by step,
micro-batch and block. So a block that is run again gives the same bits.

Where only the input is kept, the graph of the forward is dropped as soon as the block is through, so that no more than
one block's graph is there at a time, in the forward as in the backward. The forward makes a graph all the same: then
both runs are one computation, and their results the same bits. Only dropout's masks are not drawn again.

``DropoutMasks`` keeps those as a bit for each value. Drawing takes far longer than reading: of a BERT's 16 x 12
attention maps of 128 x 128 it is 15 of the 17 ms of a dropout on one core, and a bit for each value is 1/32 of what the
graph keeps of it. Below autograd, the draw of every dropout on the CPU is one call that fills a tensor with zeros and
ones (``bernoulli_``), the fused ones among them; that call is recorded in the first run, and answered in the second.
Graphs, kernels and bits are those of drawing.

B batch rows, T tokens, D model width.

Source: Chen et al., Training deep nets with sublinear memory cost (2016).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edge.model.slice import BlockRunner
from edge.techniques.velora import Projections, VectorsByLayer
from ringtune.schedule.placement import Placement
from ringtune.schedule.units import Units


class SavedActivations(Protocol):
    """The tensors that blocks of one micro-batch keep from their forward to their backward."""

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Add to the gradients of the weights; return that of the input, None where nothing below needs it.

        It is called once; what is kept is free afterwards.

        Args:
            grad: of the output, (B, T, D).
        """

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that is kept."""


@dataclass(kw_only=True, slots=True)
class BlockForward:
    """A forward of one micro-batch through blocks of this node.

    Attributes:
        blocks: runs them.
        mask: (B, T), 1 = token.
        context: what the blocks need besides the hidden state.
        trained: the units that get a gradient.
        lowest: the lowest unit that gets one.
        train_at: (step, micro-batch) that dropout is drawn at; None = without.
        patterns: block -> operations of its subnets.
        watched: a context around blocks ``[start, stop)`` while the graph is made that the backward uses.
        version: a context around a second run, so that it finds the weights of the first one.
        projections: VeLoRA's layers; None where inputs are kept whole.
        vectors: VeLoRA's vectors of this micro-batch, once a run has used them.
    """

    blocks: BlockRunner
    mask: torch.Tensor
    context: Any
    trained: Units
    lowest: int
    train_at: tuple[int, int] | None
    patterns: Mapping[int, str]
    watched: Callable[[int, int], AbstractContextManager[None]]
    version: Callable[[], AbstractContextManager[None]]
    projections: Projections | None = None
    vectors: VectorsByLayer = field(default_factory=dict)
    _has_context: bool = True

    @property
    def has_dropout(self) -> bool:
        """Whether a run draws dropout masks."""
        return self.train_at is not None and self.blocks.dropout > 0

    def leaf(self, hidden_BTD: torch.Tensor, block: int) -> torch.Tensor:
        """Cut what enters a block off from all before; it gets a gradient if something below needs one."""
        return hidden_BTD.detach().requires_grad_(block > self.lowest)

    def run(self, x_BTD: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Run blocks ``[start, stop)`` with a graph."""
        if not self._has_context:
            with torch.no_grad():
                self.context, self._has_context = self.blocks.context(x_BTD, self.mask), True
        with torch.enable_grad():
            return self.blocks.run(
                x_BTD,
                self.mask,
                self.context,
                start,
                stop,
                train_at=self.train_at,
                patterns=self.patterns,
                around=self._around,
            )

    def run_again(self, x_BTD: torch.Tensor, block: int) -> torch.Tensor:
        """Run one block as the first time, now for its backward."""
        with self.version():
            self.blocks.train_only(block, block + 1, self.trained)
            with self.watched(block, block + 1):
                return self.run(x_BTD, block, block + 1)

    def of_rows(self, rows_R: torch.Tensor, version: Callable[[], AbstractContextManager[None]]) -> BlockForward:
        """Return the forward of some rows of the micro-batch, with what is open around their second run."""
        mask = self.mask[rows_R]
        return dataclasses.replace(self, mask=mask, context=None, version=version, vectors={}, _has_context=False)

    def drop_context(self) -> None:
        """Forget the context until blocks are run again, which make it anew."""
        self.context, self._has_context = None, False

    def _around(self, block: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.projections is None else self.projections.block(block, self.vectors)


@dataclass(slots=True)
class SavedBlocks:
    """The parts that consecutive blocks of one micro-batch keep, from the bottom up.

    Attributes:
        parts: a graph of some blocks, or one block that is run again.
        forward: that made them.
    """

    parts: list[SavedActivations]
    forward: BlockForward

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Go back through all parts, from the top down; each is free before the next one is begun."""
        below: torch.Tensor | None = grad
        while self.parts and below is not None:
            below = self.parts.pop().backward(below)
        self.forward.drop_context()
        return below

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that is kept."""
        for part in self.parts:
            yield from part.tensors()


def run_saving(
    forward: BlockForward, hidden: torch.Tensor, start: int, stop: int, placement: Placement
) -> tuple[SavedActivations, torch.Tensor]:
    """Run blocks ``[start, stop)``.

    Args:
        forward: runs them.
        hidden: enters block ``start``.
        start: first block.
        stop: first block that is not run.
        placement: with the blocks that are run again in backward.

    Returns:
        What they keep, and the output of the last of them.
    """
    parts: list[SavedActivations] = []
    for first, last, is_recomputed in _ranges(start, stop, placement):
        part: SavedActivations
        if is_recomputed:
            part, hidden = recompute(forward, hidden, first)
        else:
            part, hidden = keep(forward, hidden, first, last)
        parts.append(part)
    forward.drop_context()
    return (parts[0] if len(parts) == 1 else SavedBlocks(parts, forward)), hidden


def _ranges(start: int, stop: int, placement: Placement) -> Sequence[tuple[int, int, bool]]:
    """Cut a range of blocks where the policy changes; blocks that are run again stand alone."""
    found: list[tuple[int, int, bool]] = []
    for is_recomputed, group in itertools.groupby(range(start, stop), placement.is_recomputed):
        blocks = list(group)
        if is_recomputed:
            found += [(block, block + 1, True) for block in blocks]
        else:
            found.append((blocks[0], blocks[-1] + 1, False))
    return found


class SavedGraph:
    """The graph of some blocks, or of the embedding, of one micro-batch.

    Args:
        x: leaf that enters the lowest of them; None of the embedding.
        y: leaves the highest.
    """

    def __init__(self, x: torch.Tensor | None, y: torch.Tensor) -> None:
        self._x, self._y = x, y

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """See ``SavedActivations.backward``."""
        if self._y.requires_grad:
            torch.autograd.backward([self._y], [grad])
        return None if self._x is None else self._x.grad

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``SavedActivations.tensors``."""
        if self._x is not None:
            yield self._x
        yield from (self._y, *saved_tensors(self._y))


def keep(forward: BlockForward, hidden: torch.Tensor, start: int, stop: int) -> tuple[SavedGraph, torch.Tensor]:
    """Run blocks ``[start, stop)``; return their graph, and what leaves them, cut off from it."""
    x = forward.leaf(hidden, start)
    with forward.watched(start, stop):
        y = forward.run(x, start, stop)
    return SavedGraph(x, y), y.detach()


class Recomputed:
    """One block of one micro-batch, to be run again.

    Args:
        forward: runs it.
        hidden: enters it.
        block: which one.
        masks: of its dropout; None without.
    """

    def __init__(self, forward: BlockForward, hidden: torch.Tensor, block: int, masks: DropoutMasks | None) -> None:
        self._forward, self._hidden, self._block, self._masks = forward, hidden, block, masks

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Run the block again, and back; see ``SavedActivations.backward``."""
        x = self._forward.leaf(self._hidden, self._block)
        with contextlib.nullcontext() if self._masks is None else self._masks.given():
            y = self._forward.run_again(x, self._block)
        self._masks = None  # their room is free for the backward
        return SavedGraph(x, y).backward(grad)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``SavedActivations.tensors``; VeLoRA's vectors that no layer holds any more are among them."""
        yield from (self._hidden, self._forward.mask, *self._forward.vectors.values())
        if self._masks is not None:
            yield from self._masks.packed


def recompute(forward: BlockForward, hidden: torch.Tensor, block: int) -> tuple[Recomputed, torch.Tensor]:
    """Run a block; return what runs it again, and what leaves it."""
    masks = DropoutMasks() if forward.has_dropout else None
    with contextlib.nullcontext() if masks is None else masks.drawn():
        y = forward.run(forward.leaf(hidden, block), block, block + 1)
    return Recomputed(forward, hidden, block, masks), y.detach()


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
        with _MaskRecorder(self):
            yield
        if not self._complete:
            self.packed.clear()

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Give each mask where it was drawn, once, while the context is open; where none is kept all are drawn."""
        if not self.packed:
            yield
            return
        with _MaskReplay(iter(self.packed)):
            yield

    def keep(self, func: Any, drawn: torch.Tensor) -> None:
        """Keep a mask; a draw of another kind, or elsewhere, means that the second run has to draw too."""
        if func is not _DRAWS or drawn.device.type != "cpu":
            self._complete = False
        else:
            self.packed.append(torch.from_numpy(np.packbits(drawn.bool().numpy())))


class _MaskRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, masks: DropoutMasks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._masks = masks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and func is not _DRAWS_NOTHING:
            self._masks.keep(func, found)
        return found


class _MaskReplay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, masks: Iterator[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._masks = masks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _DRAWS:
            return func(*args, **(kwargs or {}))
        target: torch.Tensor = args[0]
        bits = np.unpackbits(next(self._masks).numpy(), count=target.numel())
        return target.copy_(torch.from_numpy(bits).view(target.shape))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each distinct storage under these tensors, by address: a tensor and its view count once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def saved_tensors(output: torch.Tensor) -> list[torch.Tensor]:
    """List every tensor that the graph behind ``output`` keeps, parameters included.

    Walks ``grad_fn``; the generated nodes expose what they keep as ``_saved_*``.
    """
    kept: list[torch.Tensor] = []
    seen: set[object] = set()
    stack: list[object] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                kept += [item for item in (value if isinstance(value, tuple) else (value,)) if torch.is_tensor(item)]
        kept += [item for item in getattr(node, "saved_tensors", ()) if torch.is_tensor(item)]
        stack += [following for following, _ in getattr(node, "next_functions", ())]
    return kept
