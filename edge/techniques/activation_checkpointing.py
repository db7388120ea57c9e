"""Activation checkpointing: a forward keeps a block's graph, or its input, to recompute the block before its backward.

Each range of blocks of an action has its own policy. A ``BlockForward`` has all other inputs of the result: step,
patterns of subnets, version of the weights, VeLoRA's vectors. Dropout is seeded by step, micro-batch and block. So a
recomputed block gives the same bits.

Where only the input is kept, the forward's graph is dropped right after the block, so at most one block's graph exists
at a time. The forward makes a graph nevertheless, so that both runs are the same computation with the same bits. Only
dropout masks are not drawn again.

``PackedMasks`` keeps a bit for each value, 1/32 of the graph's memory for it. For BERT's 16 x 12 attention maps of
128 x 128 the draw is 15 of the 17 ms of a dropout on one core. Below autograd every dropout on the CPU, fused ones
included, is one call of ``bernoulli_``, which is recorded in the first run and replayed in the second.

B batch rows, T tokens, D model width.

Source: Chen et al., Training deep nets with sublinear memory cost (2016).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """Tensors that blocks of one micro-batch keep from forward to backward."""

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Accumulate the gradients of the weights; return that of the input, None where nothing below needs it.

        Called once, with the gradient (B, T, D) of the output; the kept tensors are freed.
        """

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every kept tensor."""


@dataclass(kw_only=True, slots=True)
class BlockForward:
    """Arguments of a forward of one micro-batch through blocks of this node.

    Attributes:
        blocks: runs them.
        mask: (B, T), 1 = token.
        context: of ``FamilyForward.context``.
        trained: units that get a gradient.
        lowest: the lowest such unit.
        train_at: (step, micro-batch) for dropout; None = without.
        patterns: block -> codes of its subnets.
        watched: context around blocks ``[start, stop)`` while the graph of the backward is made.
        version: context around a recomputation, with the weights of the first run.
        projections: VeLoRA's layers; None where inputs are kept whole.
        vectors: VeLoRA's vectors of this micro-batch, after its first run.
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
        """Detach the input of a block; it gets a gradient if a unit below needs one."""
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
        """Recompute one block for its backward."""
        with self.version():
            self.blocks.train_only(block, block + 1, self.trained)
            with self.watched(block, block + 1):
                return self.run(x_BTD, block, block + 1)

    def of_rows(self, rows_R: torch.Tensor, version: Callable[[], AbstractContextManager[None]]) -> BlockForward:
        """Return the forward of some rows of the micro-batch; ``version`` is the context around their recomputation."""
        mask = self.mask[rows_R]
        return dataclasses.replace(self, mask=mask, context=None, version=version, vectors={}, _has_context=False)

    def drop_context(self) -> None:
        """Drop the context; a recomputation makes a new one."""
        self.context, self._has_context = None, False

    def _around(self, block: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.projections is None else self.projections.block(block, self.vectors)


@dataclass(slots=True)
class SavedBlocks:
    """Saved activations of consecutive blocks of one micro-batch, from the bottom up.

    Attributes:
        parts: each the graph of some blocks, or one block to be recomputed.
        forward: of all parts.
    """

    parts: list[SavedActivations]
    forward: BlockForward

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Run the backward of all parts from the top down; each is freed before the next one begins."""
        below: torch.Tensor | None = grad
        while self.parts and below is not None:
            below = self.parts.pop().backward(below)
        self.forward.drop_context()
        return below

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every kept tensor."""
        for part in self.parts:
            yield from part.tensors()


def run_saving(
    forward: BlockForward, hidden: torch.Tensor, start: int, stop: int, placement: Placement
) -> tuple[SavedActivations, torch.Tensor]:
    """Run blocks ``[start, stop)`` by the policy of each; return their saved activations and the last output."""
    parts: list[SavedActivations] = []
    for is_recomputed, group in itertools.groupby(range(start, stop), placement.is_recomputed):
        first, *others = group
        if is_recomputed:
            for block in (first, *others):
                saved, hidden = recompute(forward, hidden, block)
                parts.append(saved)
        else:
            graph, hidden = keep(forward, hidden, first, first + len(others) + 1)
            parts.append(graph)
    forward.drop_context()
    return (parts[0] if len(parts) == 1 else SavedBlocks(parts, forward)), hidden


@dataclass(slots=True)
class SavedGraph:
    """Graph of some blocks, or of the embedding, of one micro-batch.

    Attributes:
        x: leaf that enters the lowest block; None for the embedding.
        y: output of the highest block.
    """

    x: torch.Tensor | None
    y: torch.Tensor

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """See ``SavedActivations.backward``."""
        if self.y.requires_grad:
            torch.autograd.backward([self.y], [grad])
        return None if self.x is None else self.x.grad

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``SavedActivations.tensors``."""
        if self.x is not None:
            yield self.x
        yield from (self.y, *saved_tensors(self.y))


def keep(forward: BlockForward, hidden: torch.Tensor, start: int, stop: int) -> tuple[SavedGraph, torch.Tensor]:
    """Run blocks ``[start, stop)``; return their graph, and the detached output."""
    x = forward.leaf(hidden, start)
    with forward.watched(start, stop):
        y = forward.run(x, start, stop)
    return SavedGraph(x, y), y.detach()


class Recomputed:
    """One block of one micro-batch, recomputed in its backward.

    Args:
        forward: runs the block.
        masks: of its dropout; None without dropout.
    """

    def __init__(self, forward: BlockForward, hidden: torch.Tensor, block: int, masks: PackedMasks | None) -> None:
        self._forward, self._hidden, self._block, self._masks = forward, hidden, block, masks

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Recompute the block and run its backward; see ``SavedActivations.backward``."""
        x = self._forward.leaf(self._hidden, self._block)
        with contextlib.nullcontext() if self._masks is None else self._masks.given():
            y = self._forward.run_again(x, self._block)
        self._masks = None  # freed before the backward
        return SavedGraph(x, y).backward(grad)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``SavedActivations.tensors``; VeLoRA's vectors are included."""
        yield from (self._hidden, self._forward.mask, *self._forward.vectors.values())
        if self._masks is not None:
            yield from self._masks.packed


def recompute(forward: BlockForward, hidden: torch.Tensor, block: int) -> tuple[Recomputed, torch.Tensor]:
    """Run a block; return its saved input, and the detached output."""
    masks = PackedMasks() if forward.has_dropout else None
    with contextlib.nullcontext() if masks is None else masks.drawn():
        y = forward.run(forward.leaf(hidden, block), block, block + 1)
    return Recomputed(forward, hidden, block, masks), y.detach()


_DRAWS: Final = torch.ops.aten.bernoulli_.float
_DRAWS_NOTHING: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""Tagged as a random operation, but without dropout on the CPU."""


class PackedMasks:
    """Dropout masks of one block of one micro-batch, in the order of their draws.

    Attributes:
        packed: a tensor of bytes for each mask, a bit for each value.
    """

    def __init__(self) -> None:
        self.packed: list[torch.Tensor] = []
        self._complete = True

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """Record the masks drawn inside the context; none at all if another random operation runs too."""
        with _MaskRecorder(self):
            yield
        if not self._complete:
            self.packed.clear()

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Replay the masks inside the context, each once; without recorded masks all are drawn."""
        if not self.packed:
            yield
            return
        with _MaskReplay(iter(self.packed)):
            yield

    def keep(self, func: Any, drawn: torch.Tensor) -> None:
        """Record a mask; after a draw of another kind or device the recomputation has to draw all masks."""
        if func is not _DRAWS or drawn.device.type != "cpu":
            self._complete = False
        else:
            self.packed.append(torch.from_numpy(np.packbits(drawn.bool().numpy())))


class _MaskRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, masks: PackedMasks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._masks = masks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and func is not _DRAWS_NOTHING:
            self._masks.keep(func, result)
        return result


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
    bytes_at: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        bytes_at[storage.data_ptr()] = storage.nbytes()
    return bytes_at


def saved_tensors(output: torch.Tensor) -> list[torch.Tensor]:
    """List every tensor that the graph of ``output`` keeps, parameters included.

    Walks ``grad_fn``; generated nodes expose kept tensors as ``_saved_*``.
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
