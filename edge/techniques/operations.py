"""Scores of subnets for the choice of operations (D2FT), per micro-batch, in items without updates.

Of a whole block all weights count that train with ``adapter.config = "full"``; of a generic family these are its norms,
experts and router too.

With ``ScoredWeights.ADAPTER`` a subnet's score is that of its rows and columns of LoRA, and an equal part of the score
of what belongs to the whole block: LoRA's other factors, and bottlenecks. LoRA's B is zero at the start, so that then
Fisher and gradient magnitude are of B alone, weight magnitude of A alone, and Taylor is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from edge.model.head_groups import WeightSlice, adapter_slices, subnet_slices, subnets_of_block
from edge.model.skeleton import ADAPTER, Skeleton
from ringtune.schedule.actions import Action
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import BlockScores, Score, ScoredWeights
from ringtune.schedule.turns import Item, StepKind
from ringtune.schedule.units import Units

_CHUNK: Final = 1 << 16
"""Numbers reduced at a time, in float64: half a MiB fits in a processor's cache."""


class ScoredSlices(NamedTuple):
    """Scored weights of one block.

    Attributes:
        own: of each subnet.
        shared: of all subnets, each of which has an equal part of their score.
    """

    own: tuple[tuple[WeightSlice, ...], ...]
    shared: tuple[WeightSlice, ...] = ()

    def by_name(self) -> dict[str, list[WeightSlice]]:
        """Group all slices by their parameter."""
        slices: dict[str, list[WeightSlice]] = {}
        for part in (*(part for parts in self.own for part in parts), *self.shared):
            slices.setdefault(part.name, []).append(part)
        return slices


Sums = dict[WeightSlice, dict[Score, torch.Tensor]]
Row = tuple[float, ...]


class ScoreCollector:
    """Collects the scores for a course's choice of operations, at one node.

    Args:
        skeleton: with real hosted blocks.
        course: of the run; without a choice of operations, or scores, nothing is collected.
    """

    def __init__(self, skeleton: Skeleton, course: Course) -> None:
        self._skeleton, self._course = skeleton, course
        self._subnets = course.choice.subnets if course.choice else 1
        self._scores: tuple[Score, ...] = course.choice.scores if course.choice else ()
        self._by_gradient = tuple(score for score in self._scores if score.needs_gradient)
        self._of_adapter = course.choice is not None and course.choice.scored_weights == ScoredWeights.ADAPTER
        self._slices: dict[int, ScoredSlices] = {}
        self._open: dict[tuple[int, int, int], Sums] = {}  # by item, micro-batch and block; until its backward is done
        self._done: dict[int, dict[int, list[BlockScores]]] = {}  # by turn and item
        self._magnitudes: dict[tuple[int, int], Row] = {}

    @contextmanager
    def watched(self, item: Item, action: Action, trained: Units) -> Iterator[None]:
        """Let the trained subnets of a forward's blocks get gradients in its backward, if the item is a score item."""
        places: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            if item.kind is StepKind.SCORE and self._scores:
                for start, stop in trained.ranges_within(action.start, action.stop):
                    for block in range(start, stop):
                        places += self._watch(item, action.micro, block)
            yield
        finally:
            for module, name, parameter in places:
                setattr(module, name, parameter)

    def reduce(self, item: Item, action: Action) -> None:
        """Reduce the sums of a backward's blocks to one number for each score and subnet."""
        keys = ((item.seq, action.micro, block) for block in range(action.start, action.stop))
        sums_of = {key[-1]: sums for key in keys if (sums := self._open.pop(key, None)) is not None}
        rows = iter(
            _read([self._row(block, score, sums_of[block]) for block in sums_of for score in self._by_gradient])
        )
        for block in sums_of:
            values = {score: next(rows) for score in self._by_gradient}
            entry = self._block_scores(item, action.micro, block, values)
            self._done.setdefault(item.turn, {}).setdefault(item.seq, []).append(entry)

    def take(self, turn: int) -> tuple[BlockScores, ...]:
        """Return the scores of a finished turn, and drop them."""
        done = self._done.pop(turn, {})
        self._magnitudes = {key: row for key, row in self._magnitudes.items() if key[0] != turn}
        return tuple(
            scores
            for seq in sorted(done)
            for scores in sorted(done[seq], key=lambda scores: (scores.micro, scores.block))
        )

    def _watch(self, item: Item, micro: int, block: int) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Replace a block's weights by parameters on the same memory; yield the original ones."""
        sums = self._open[item.seq, micro, block] = Sums()
        self._weigh(item.turn, block)
        if not self._by_gradient:
            return
        module = self._skeleton.blocks[block]
        for name, parts in self._slices_of(block).by_name().items():
            path, _, last = name.rpartition(".")
            home, parameter = module.get_submodule(path), module.get_parameter(name)
            stand_in: Any = nn.Parameter(parameter.detach())
            stand_in.register_post_accumulate_grad_hook(_reducer(parts, self._by_gradient, sums))
            setattr(home, last, stand_in)
            yield home, last, parameter

    def _weigh(self, turn: int, block: int) -> None:
        """Sum a block's weight magnitudes once in a turn, in which they do not change."""
        if Score.WEIGHT_MAGNITUDE in self._scores and (turn, block) not in self._magnitudes:
            module, sums = self._skeleton.blocks[block], Sums()
            for name, parts in self._slices_of(block).by_name().items():
                _reduce(module.get_parameter(name).detach(), None, parts, (Score.WEIGHT_MAGNITUDE,), sums)
            (self._magnitudes[turn, block],) = _read([self._row(block, Score.WEIGHT_MAGNITUDE, sums)])

    def _slices_of(self, block: int) -> ScoredSlices:
        if block not in self._slices:
            self._slices[block] = self._subnet_slices(block) if self._subnets > 1 else self._whole_slices(block)
        return self._slices[block]

    def _subnet_slices(self, block: int) -> ScoredSlices:
        module, config = self._skeleton.blocks[block], self._skeleton.base.config
        model_type = self._skeleton.layout.model_type
        subnets = subnets_of_block(module, model_type, config, self._subnets)
        if self._of_adapter:
            return ScoredSlices(*adapter_slices(module, model_type, subnets))
        return ScoredSlices(subnet_slices(module, model_type, subnets))

    def _whole_slices(self, block: int) -> ScoredSlices:
        layout = self._skeleton.layout

        def is_scored(name: str, value: nn.Parameter) -> bool:
            return value.requires_grad if self._of_adapter else f".{ADAPTER}." not in name and layout.trains(name)

        named = self._skeleton.blocks[block].named_parameters()
        scored = [(name, value) for name, value in named if is_scored(name, value)]
        return ScoredSlices((tuple(WeightSlice(name, 0, 0, len(value)) for name, value in scored),))

    def _block_scores(self, item: Item, micro: int, block: int, by_gradient: Mapping[Score, Row]) -> BlockScores:
        return BlockScores(
            owner=item.owner,
            batch_id=self._course.batch_id(item.owner, item.batch),
            micro=micro,
            block=block,
            values=tuple(
                by_gradient[score] if score.needs_gradient else self._magnitudes[item.turn, block]
                for score in self._scores
            ),
        )

    def _row(self, block: int, score: Score, sums: Sums) -> torch.Tensor:
        """Sum the parts of each subnet in a fixed order; one number for each subnet.

        A part without a gradient counts 0, such as an expert without tokens.
        """
        device = next(self._skeleton.blocks[block].parameters()).device
        slices, zero = self._slices_of(block), torch.zeros((), dtype=torch.float64, device=device)

        def total(parts: Sequence[WeightSlice]) -> torch.Tensor:
            terms = (sums[part][score] for part in parts if part in sums)
            return functools.reduce(torch.add, terms, zero)

        return torch.stack([total(parts) for parts in slices.own]) + total(slices.shared) / len(slices.own)


def _read(rows: Sequence[torch.Tensor]) -> list[Row]:
    """Copy rows of equal lengths from their device, in one transfer."""
    return [tuple(row) for row in torch.stack(list(rows)).tolist()] if rows else []


def _reducer(parts: Sequence[WeightSlice], scores: Sequence[Score], sums: Sums) -> Callable[[torch.Tensor], None]:
    """Make the hook that reduces a tensor's gradient to sums, and frees it."""

    def reduce(tensor: torch.Tensor) -> None:
        gradient, tensor.grad = tensor.grad, None
        if gradient is not None:
            _reduce(tensor.detach(), gradient, parts, scores, sums)

    return reduce


def _reduce(
    weight: torch.Tensor,
    gradient: torch.Tensor | None,
    parts: Sequence[WeightSlice],
    scores: Sequence[Score],
    sums: Sums,
) -> None:
    for part in parts:
        total: dict[Score, torch.Tensor] = {}
        for w, g in zip(_chunks(weight, part), _chunks(weight if gradient is None else gradient, part), strict=True):
            for score in scores:
                value = _sum(score, w, g)
                total[score] = total[score] + value if score in total else value
        sums[part] = total


def _chunks(tensor: torch.Tensor, part: WeightSlice) -> Iterator[torch.Tensor]:
    """Yield a part of a tensor, some rows at a time, in float64."""
    values = tensor.narrow(part.dimension, part.start, part.stop - part.start)
    rows = max(1, _CHUNK * len(values) // max(1, values.numel()))
    for start in range(0, len(values), rows):
        yield values[start : start + rows].double()


def _sum(score: Score, weight: Any, gradient: Any) -> torch.Tensor:
    match score:
        case Score.FISHER:
            values = gradient * gradient
        case Score.WEIGHT_MAGNITUDE:
            values = weight.abs()
        case Score.GRADIENT_MAGNITUDE:
            values = gradient.abs()
        case Score.TAYLOR:
            values = (gradient * weight).abs()
    total: torch.Tensor = values.sum()
    return total
