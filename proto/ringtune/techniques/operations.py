"""Operations of subnets (D2FT): the section of a job, the choosers, the expected table, and the table of each turn.

``operations.table`` of a job names a file; the job object holds its text, because nodes do not have the file.

A *chooser* is one subnet of one block, or all blocks of a group with one common code. Where scores tie, a chooser
prefers the micro-batches from its ``first`` one on, cyclically. Weight magnitudes are equal for all micro-batches, so
this rule decides there. Example: 6 subnets of one block, 3 of 5 micro-batches full::

    micro-batch   0 1 2 3 4
    subnet 0      1 1 1 3 3     first 0
    subnet 1      1 1 1 3 3     first 0
    subnet 2      3 1 1 1 3     first 1
    subnet 3      3 3 1 1 1     first 2
    subnet 4      1 3 3 1 1     first 3
    subnet 5      1 1 3 3 1     first 4

Each subnet is full equally often, each micro-batch has 3 or 4 full subnets, and those are neighbours (cyclically), so
that their weights are contiguous. Each further block is rotated so that the numbers of full subnets of the
micro-batches are as even as possible, and each further batch begins one micro-batch later.

With ``ties = "together"`` all choosers have the same first micro-batch, as if the items of Algorithm 2 stood in one
order: whole micro-batches are full, and others pass all blocks by, without their messages.

``expected_table`` is assumed by predictions before any scores: as many operations of each kind as the capacities allow,
distributed as by the knapsacks where all scores tie. For a course of three subnets a block that are full for 3 of 5
micro-batches and forward-only for one::

    block     0   1
    micro 0   131 321
    micro 1   112 131
    micro 2   113 112
    micro 3   211 113
    micro 4   321 211

``TurnOperations``: a table holds from the train turn on before which it was chosen (``schedule.turns.table_is_due``);
that turn is granted only when the table is there, and the table is asked for only when every score that counts is
there. So no timing changes the table of a turn. ``check_scores`` refuses scores that a node does not owe.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from ringtune.config.sections import MAX_STEPS, Adapter, Train
from ringtune.errors import ContradictionError, DivergedError, IntegrityError, JobError, PlanError
from ringtune.models.adapter_config import trains_own_weights
from ringtune.models.adapter_support import head_group_refusal, subnet_refusal
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.batches import num_batches
from ringtune.schedule.course import FROZEN_DTYPES, Course
from ringtune.schedule.operation_tables import (
    FORWARD_ONLY,
    FULL,
    SHORTCUT,
    BatchOperations,
    BlockCapacity,
    BlockScores,
    Operations,
    Policy,
    PolicyWord,
    ScheduledTable,
    Score,
    ScoredWeights,
    ScoreWord,
    Subnets,
    TieBreak,
    TieWord,
    WeightsWord,
    pattern_of,
    subnets_of,
    tables_from_json,
    tables_to_json,
)
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn, items, table_is_due
from ringtune.schedule.versions import ever_trained
from ringtune.storage.strict import Bounds, InWords, check_fields, read_given
from ringtune.techniques.base import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationsSettings:
    """``[operations]``: which subnets do what for which micro-batch; full is forward-only where a block does not train.

    Attributes:
        policy: what chooses the operations; standard = everything is full.
        heads: attention heads of one subnet, which has as large a share of the feed-forward rows; 0 = a whole block
            is one subnet.
        by_slice: whether all blocks of a node have the same operations, so that it can be passed by.
        compute: share of what blocks that train cost if everything is full, above 0 and at most 1; how many operations
            are forward-only follows from measured costs, so runs to be repeated give ``full`` and ``forward_only``.
        full: instead of ``compute``: of how many micro-batches of a batch each subnet does forward and backward.
        forward_only: with ``full``: of how many more it does the forward only.
        balance: whether nodes get unequal counts, so that all are busy for the same time in a step.
        backward_score: by what full operations are chosen.
        forward_score: by what forward-only operations are chosen.
        scores: whether scores are of a block's base weights, or of its adapter, which is all that trains with an
            adapter and needs no gradients of frozen weights; those in a small type (runtime.frozen) have none, so that
            scores by gradients are of the adapter there. LoRA has rows of B, or columns of A, for each head; other
            weights of an adapter belong to the whole block, and each of its subnets has an equal share of their score.
        score_scale: with policy joint: what a forward score counts against a backward score, each in parts of its mean.
        ties: which micro-batches a subnet prefers where scores tie: other ones than its neighbours, or the same as all.
        rotate: whether each further pass over an owner's rows prefers the next micro-batch where scores tie, so that
            after ``train.microbatches`` passes all rows were trained on equally often; with policy two-stage or joint.
        refresh_rounds: scores and operations are gathered and chosen anew after so many rounds; 0 = once, at the start.
        table: instead of all other keys: the file ``operations.json`` of a run, whose operations this run repeats. A
            file that a run wrote is refused where seed, batch size, micro-batches, blocks or owners' rows differ; of a
            table without ``origin``, made by hand or taken out of a plan, only owners, numbers and codes are checked.
    """

    policy: PolicyWord = Policy.STANDARD.value
    heads: Annotated[int, Bounds(ge=0)] = 1
    by_slice: bool = False
    compute: Annotated[float | None, Bounds(gt=0, le=1)] = None
    full: Annotated[int | None, Bounds(ge=0), InWords("0 to train.microbatches")] = None
    forward_only: Annotated[
        int | None, Bounds(ge=0), InWords("0 to what operations.full leaves of train.microbatches")
    ] = None
    balance: bool = False
    backward_score: ScoreWord = Score.WEIGHT_MAGNITUDE.value
    forward_score: ScoreWord = Score.FISHER.value
    scores: WeightsWord = ScoredWeights.BASE.value
    score_scale: Annotated[float, Bounds(gt=0, lt=math.inf)] = 1.0
    ties: TieWord = TieBreak.TOGETHER.value
    rotate: bool = True
    refresh_rounds: Annotated[int, Bounds(ge=0, le=MAX_STEPS)] = 0
    table: str = ""

    def __post_init__(self) -> None:
        """Refuse values out of range, and two ways of saying how much is done."""
        check_fields(self, where="operations", error=JobError)
        counts = [name for name in ("full", "forward_only") if getattr(self, name) is not None]
        if self.compute is not None and counts:
            raise JobError(f"operations.compute and operations.{counts[0]} both say how much is done; keep one")
        if self.forward_only is not None and self.full is None:
            raise JobError("operations.forward_only needs operations.full; add it, 0 if nothing shall be full")

    @property
    def is_chosen(self) -> bool:
        """Whether the run chooses its operations: neither given nor all full."""
        return self.policy != Policy.STANDARD

    @property
    def is_any(self) -> bool:
        """Whether operations are chosen or given, so that some may be less than full."""
        return self.is_chosen or bool(self.table)

    def changed(self) -> tuple[str, ...]:
        """List the keys with another value than their default."""
        return tuple(entry.name for entry in fields(self) if getattr(self, entry.name) != entry.default)


def job_subnets(job: Any, model: Any) -> Subnets:
    """Return the subnets of each block; without operations a whole block is one; raises ``JobError``."""
    kv_heads, where = model.num_kv_heads or model.num_heads, f"{job.model.path} ({model.model_type})"
    return _subnets(job, heads=model.num_heads, kv_heads=kv_heads, inner=model.intermediate_size, where=where)


def _subnets(job: Any, *, heads: int, kv_heads: int, inner: int, where: str) -> Subnets:
    given = given_tables(job.operations)
    try:
        if given:
            subnets = Subnets(heads=heads, kv_heads=kv_heads, inner=inner, count=given[0].operations.subnets)
            if problem := head_group_refusal(job.adapter.config, heads=subnets.heads_each if subnets.count > 1 else 0):
                raise JobError(f"operations.table has {subnets.count} subnets a block: {problem}")
            return subnets
        heads_each = job.operations.heads if job.operations.is_chosen and not job.operations.by_slice else 0
        return subnets_of(heads=heads, kv_heads=kv_heads, inner=inner, heads_each=heads_each)
    except PlanError as error:
        what = "operations.table is of another model: " if given else ""
        raise JobError(f"{what}{error}; the model is {where}") from error


def check_model(job: Any, shape: Shape) -> None:
    """Refuse subnets that a model's blocks don't have, or that nothing is known of; raises ``JobError``."""
    operations, tables, family = job.operations, given_tables(job.operations), shape.family
    dimensions, heads = shape.dimensions, shape.dimensions.num_heads
    has_parts = bool(tables and tables[0].operations.subnets > 1) or (
        operations.is_chosen and not operations.by_slice and operations.heads > 0
    )
    if has_parts and (problem := subnet_refusal(family, dropout=job.train.dropout)):
        raise JobError(f"{shape.where}: no [operations] of subnets: {problem}, or a table of whole blocks")
    _subnets(job, heads=heads, kv_heads=dimensions.kv_heads or heads, inner=dimensions.inner, where=shape.where)
    if shape.passes_more and operations.is_any:
        raise JobError(
            f"{shape.where}: a block of this {family.model_type} that is passed by takes no input out of what goes on, "
            "and makes no keys and values for later ones; remove [operations]"
        )


def needs_base_gradients(operations: OperationsSettings, adapter: Adapter) -> bool:
    """Whether operations are chosen by a score of base weights that needs gradients of frozen ones."""
    if operations.scores == ScoredWeights.ADAPTER or trains_own_weights(adapter.config):
        return False
    match operations.policy:
        case Policy.MAGNITUDE_GRADIENT:
            return True
        case Policy.TWO_STAGE | Policy.JOINT:
            counts = operations.policy == Policy.JOINT or operations.full is None or operations.forward_only
            scores = (operations.backward_score, *([operations.forward_score] if counts else []))
            return any(Score(score).needs_gradient for score in scores)
    return False


def operations_of(job: Any) -> OperationsSettings:
    """Return ``[operations]`` as the run carries it out: with scores of adapters where base weights have no gradients.

    Base weights in a small type (``runtime.frozen``) have none.
    """
    settings: OperationsSettings = job.operations
    if job.runtime.frozen in FROZEN_DTYPES and needs_base_gradients(settings, job.adapter):
        return dataclasses.replace(settings, scores=ScoredWeights.ADAPTER.value)
    return settings


_OF_A_CHOICE: Final = ("compute", "full", "by_slice", "balance", "scores", "refresh_rounds")


def check_operations(operations: OperationsSettings, *, adapter: Adapter, train: Train) -> None:
    """Refuse operations that the other sections of a job exclude; raises ``JobError``."""
    if operations.table:
        others = [name for name in operations.changed() if name != "table"]
        if others:
            raise ContradictionError(
                f"operations.table has the operations of an earlier run, operations.{others[0]} would choose others; "
                "remove one of them"
            )
    elif operations.is_chosen:
        _check_budget(operations, train.microbatches)
    elif wanting := [name for name in operations.changed() if name in _OF_A_CHOICE]:
        value = getattr(operations, wanting[0])
        raise ContradictionError(
            f"operations.{wanting[0]} = {str(value).lower()} has no meaning with operations.policy = "
            f"'{operations.policy}', where everything is full; set operations.policy = 'two-stage', or remove it"
        )
    if operations.scores == ScoredWeights.ADAPTER and trains_own_weights(adapter.config):
        raise ContradictionError(
            f"operations.scores = {operations.scores!r} has no meaning with adapter.config = {adapter.config!r}, where "
            "no adapter is and the scored base weights train; remove it, or set adapter.config = 'lora'"
        )
    heads = 0 if operations.by_slice or not operations.is_chosen else operations.heads
    if problem := head_group_refusal(adapter.config, heads=heads):
        raise JobError(problem)


def _check_budget(operations: OperationsSettings, microbatches: int) -> None:
    if operations.compute is None and operations.full is None:
        raise JobError(
            f"operations.policy = '{operations.policy}' needs operations.compute or operations.full, which say how "
            "much is done; add compute = 0.6"
        )
    both = "operations.full" if not operations.forward_only else "operations.full + operations.forward_only"
    done = (operations.full or 0) + (operations.forward_only or 0)
    if done > microbatches:
        raise JobError(
            f"{both} is {done}, a batch has train.microbatches = {microbatches}; lower it or raise train.microbatches"
        )


_MAX_BYTES: Final = 64_000_000
_MAX_TEXT: Final = 3_000_000
"""Limit of characters of tables in a job: job and plan, with the tables each, go to a node in one message of 8 MiB."""

_REMEDY: Final = "give the operations.json of a run, or the operations of its plan.json"


def with_table_read(settings: OperationsSettings, folder: Path) -> OperationsSettings:
    """Replace the file name in ``operations.table``, relative to ``folder``, by the text of the file."""
    if not settings.table or _is_text(settings.table):
        return settings
    try:
        path = (folder / Path(settings.table).expanduser()).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise JobError(f"operations.table = {settings.table!r} is no path: {error}; {_REMEDY}") from error
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise JobError(f"operations.table {path} has more than {_MAX_BYTES:,} bytes; {_REMEDY}")
        text = read_given(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError(f"can't read operations.table {path}: {reason}; {_REMEDY}") from error
    table = json.dumps(tables_to_json(_tables(text, f"operations.table {path}")), separators=(",", ":"))
    if len(table) > _MAX_TEXT:
        raise JobError(
            f"operations.table {path} is {len(table):,} characters of text, a job has room for {_MAX_TEXT:,}; repeat "
            "that run by its own job.toml and --plan with its plan.json, which choose the same tables again"
        )
    return dataclasses.replace(settings, table=table)


def given_tables(settings: OperationsSettings) -> tuple[ScheduledTable, ...]:
    """Parse the tables of a job, each with its first step; empty where the job has none; raises ``JobError``."""
    if not settings.table:
        return ()
    if not _is_text(settings.table):
        raise JobError(f"operations.table = {settings.table!r} was not read; train with 'ringtune train', which does")
    return _tables(settings.table, "operations.table")


def _is_text(table: str) -> bool:
    return table.lstrip().startswith("{")


def _tables(text: str, where: str) -> tuple[ScheduledTable, ...]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobError(f"{where} is not JSON: {error}; {_REMEDY}") from error
    if isinstance(value, dict) and "course" in value:
        raise JobError(f"{where} is a plan; give the operations.json beside it, or the plan itself with --plan")
    try:
        return tables_from_json(value)
    except PlanError as error:
        raise JobError(f"{where}: {str(error).removesuffix('; plan anew')}; {_REMEDY}") from error


_SLACK = 1e-9
"""The share of a row that a capacity may lack by rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chooser:
    """One subnet of one block, or one group of blocks with common operations.

    Attributes:
        subnet: number of the subnet in the block; 0 in a group.
        first: the preferred micro-batch of batch 0 where scores tie.
        capacity: of all its blocks together.
    """

    start: int
    stop: int
    subnet: int
    first: int
    capacity: BlockCapacity

    def order(self, turned: int, microbatches: int) -> list[int]:
        """All micro-batches of a batch in the order of preference where scores tie.

        ``turned`` is the batch's id plus the pass: by so many micro-batches all preferences are later.
        """
        return [(self.first + turned + at) % microbatches for at in range(microbatches)]

    def full_rows(self, share: float = 1.0) -> int:
        """Rows of full operations that C^pf allows; ``share`` is of a whole batch's rows."""
        return whole(self.capacity.full * share, self.capacity.forward + self.capacity.backward)

    def forward_rows(self, share: float = 1.0) -> int:
        """Rows of forward-only operations that C^po allows; ``share`` is of a whole batch's rows."""
        return whole(self.capacity.forward_only * share, self.capacity.forward)


class Limits(NamedTuple):
    """The limits of one chooser for one batch, in whole numbers: costs are rows of micro-batches, or 1 each."""

    costs: tuple[int, ...]
    full: int
    forward_only: int


def limits_of(course: Course, chooser: Chooser, sizes: tuple[int, ...]) -> Limits:
    """The limits of a chooser for a batch with micro-batches of ``sizes`` rows.

    A smaller batch has its share by rows, or by micro-batches where these are counted.
    """
    if course.choice is not None and course.choice.is_counted:
        rows = course.batch_size / course.microbatches
        costs, share = (1,) * len(sizes), len(sizes) / course.microbatches / rows
    else:
        costs, share = sizes, sum(sizes) / course.batch_size
    full = chooser.full_rows(share)
    return Limits(costs, max(full, min(costs)) if chooser.capacity.full else full, chooser.forward_rows(share))


def whole(capacity: float, cost: float) -> int:
    """How many whole times a cost fits a capacity, with a tolerance for rounding; 0 at no cost."""
    return math.floor(capacity / cost * (1 + _SLACK) + _SLACK) if cost else 0


@functools.lru_cache(maxsize=16)
def choosers_of(course: Course) -> tuple[Chooser, ...]:
    """List the choosers of a course by block and subnet; empty where tables are given.

    Blocks that never train have none. The number of steps does not matter, so that a longer run has the same ones.
    """
    choice, choosers = course.choice, list[Chooser]()
    if choice is None or choice.tables:
        return ()
    totals = [0] * course.microbatches
    for start, stop in _ranges(course):
        parts = [dataclasses.asdict(choice.capacity(block)) for block in range(start, stop)]
        capacity = BlockCapacity(**{name: math.fsum(part[name] for part in parts) for name in parts[0]})
        chooser = Chooser(start=start, stop=stop, subnet=0, first=0, capacity=capacity)
        limits = limits_of(course, chooser, course.microbatch_sizes())
        full = min(course.microbatches, round(limits.full * course.microbatches / sum(limits.costs)))
        if choice.ties == TieBreak.TOGETHER:
            firsts = [0] * choice.subnets
        else:
            firsts, totals = _firsts(totals, choice.subnets, full)
        choosers += [dataclasses.replace(chooser, subnet=subnet, first=first) for subnet, first in enumerate(firsts)]
    return tuple(choosers)


def _firsts(totals: Sequence[int], subnets: int, full: int) -> tuple[list[int], list[int]]:
    """The ``first`` of each subnet of a block, and the full subnets of each micro-batch up to this block.

    Of all rotations of the block it takes the one with the most even totals, of equal ones the lowest.
    """
    count = len(totals)
    candidates = []
    for turned in range(count):
        firsts = [(turned + subnet * count // subnets) % count for subnet in range(subnets)]
        after = list(totals)
        for first in firsts:
            for micro in range(first, first + full):
                after[micro % count] += 1
        candidates.append((sum(each * each for each in after), turned, firsts, after))
    return min(candidates)[2:]


def _ranges(course: Course) -> list[tuple[int, int]]:
    groups = course.choice.groups if course.choice else ()
    shared = {block: at for at, group in enumerate(groups) for block in range(*group)}
    blocks = [block for block in range(course.num_blocks) if block in course.trainable]
    runs = itertools.groupby(enumerate(blocks), lambda each: (each[1] - each[0], shared.get(each[1], -each[1] - 1)))
    blocks_of_runs = [[block for _, block in run] for _, run in runs]
    return [(run[0], run[-1] + 1) for run in blocks_of_runs]


@functools.lru_cache(maxsize=16)
def expected_table(course: Course) -> Operations:
    """The table of a course, or the one expected before its choice: counts by its capacities, evenly spread.

    For pruning it keeps the expected number of whole subnets, evenly spread over the model. A course without table and
    choice has an empty table: everything is full.
    """
    choice = course.choice
    if course.operations is not None or choice is None:
        return course.operations or Operations()
    if choice.tables:
        return choice.tables[0].operations
    if choice.policy == Policy.STANDARD:
        return Operations(subnets=choice.subnets)
    codes_of = _pruned if Policy(choice.policy).is_pruning else _spread
    batches, passes = [], choice.passes(course.microbatches)
    for owner in course.owners:
        sizes = course.microbatch_sizes(course.batch_rows(owner))
        for batch_id in range(num_batches(owner.train_rows, course.batch_size)):
            for of_pass in range(passes):
                rows = codes_of(course, sizes, (batch_id + of_pass) % course.microbatches)
                batches.append(BatchOperations(owner=owner.node, batch_id=batch_id, rows=rows, of_pass=of_pass))
    return Operations(batches=tuple(batches), subnets=choice.subnets, passes=passes)


def table_rows(course: Course, codes: Iterable[tuple[Chooser, Sequence[str]]]) -> tuple[str, ...]:
    """Write the rows of one batch; choosers and micro-batches without a code are full.

    ``codes`` has for some choosers the operation of each micro-batch.
    """
    subnets = course.choice.subnets if course.choice else 1
    rows = [[FULL] * (course.num_blocks * subnets) for _ in range(course.microbatches)]
    for chooser, codes_of_chooser in codes:
        for block in range(chooser.start, chooser.stop):
            for micro, code in enumerate(codes_of_chooser):
                rows[micro][block * subnets + chooser.subnet] = code
    return tuple("".join(row) for row in rows)


def kept_subnets(course: Course) -> float:
    """The number of subnets that pruning keeps: the capacities as shares of the whole cost.

    Each block of a group counts as one subnet.
    """
    kept = 0.0
    for chooser in choosers_of(course):
        each = chooser.capacity
        share = (each.full + each.forward_only) / ((each.forward + each.backward) * course.batch_size)
        kept += min(1.0, share) * (chooser.stop - chooser.start)
    return kept


@functools.lru_cache(maxsize=1024)
def _spread(course: Course, sizes: tuple[int, ...], turned: int) -> tuple[str, ...]:
    return table_rows(course, [(chooser, _codes(course, chooser, sizes, turned)) for chooser in choosers_of(course)])


def _codes(course: Course, chooser: Chooser, sizes: tuple[int, ...], turned: int) -> list[str]:
    limits, codes = limits_of(course, chooser, sizes), [SHORTCUT] * len(sizes)
    order = chooser.order(turned, len(sizes))
    for code, limit in ((FULL, limits.full), (FORWARD_ONLY, limits.forward_only)):
        rest = [micro for micro in order if codes[micro] == SHORTCUT]
        for at in _taken(tuple(limits.costs[micro] for micro in rest), limit):
            codes[rest[at]] = code
    return codes


@functools.lru_cache(maxsize=1024)
def _taken(costs: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The items that a knapsack takes where all have the same value: as many as fit.

    Of all such choices it is the one without the latest item, then without the next latest, and so on.
    """
    places, needed = [], _most(costs, limit)
    for at in reversed(range(len(costs))):
        if _most(costs[:at], limit) < needed:
            places.append(at)
            limit, needed = limit - costs[at], needed - 1
    return tuple(places)


def _most(costs: Sequence[int], limit: int) -> int:
    return sum(each <= limit for each in itertools.accumulate(sorted(costs)))


@functools.lru_cache(maxsize=16)
def _pruned(course: Course, sizes: tuple[int, ...], _turned: int) -> tuple[str, ...]:
    choosers = choosers_of(course)
    total = sum(chooser.stop - chooser.start for chooser in choosers)
    keep, kept, passed, codes = kept_subnets(course), 0, 0, []
    for chooser in choosers:
        blocks = chooser.stop - chooser.start
        passed += blocks
        fits = kept + blocks <= whole(keep * passed / total, 1)
        kept += blocks if fits else 0
        codes.append((chooser, (FULL if fits else SHORTCUT) * len(sizes)))
    return table_rows(course, codes)


class ScoreKey(NamedTuple):
    """The batch, micro-batch and block of one entry of scores."""

    batch_id: int
    micro: int
    block: int


def score_keys(plan: Plan, turn: Turn, node: str) -> tuple[ScoreKey, ...]:
    """The scores that a node owes at the end of a score turn: each block of its slice that may train, each micro-batch.

    Other turns owe none.
    """
    course, piece = plan.course, plan.slice_of(node)
    if turn.kind is not StepKind.SCORE or course.choice is None:
        return ()
    return tuple(
        sorted(
            ScoreKey(course.batch_id(item.owner, item.batch), micro, block)
            for item in items(course, turn)
            for micro in range(len(course.microbatch_sizes(item.rows)))
            for start, stop in course.trainable.ranges_within(piece.start, piece.stop)
            for block in range(start, stop)
        )
    )


MAX_SCORE: Final = 1e200
"""Largest score of a subnet: a sum over millions of squares of float32 numbers is below 1e90."""


def check_scores(plan: Plan, turn: Turn, node: str, scores: Sequence[BlockScores]) -> None:
    """Refuse scores that are not exactly those that a node owes.

    Raises:
        IntegrityError: of other entries or shapes, or a number that no score has.
        DivergedError: a score that is not finite, as of weights or hidden states that are not.
    """
    choice, owed = plan.course.choice, score_keys(plan, turn, node)
    if not owed and not scores:
        return
    where = f"node {node} reports scores at the end of turn {turn.index} of node {turn.owner}"
    anew = "use one version on all machines"
    others = sorted({entry.owner for entry in scores} - {turn.owner})
    if others:
        raise IntegrityError(f"{where} that are of node {', '.join(others)}; {anew}")
    sent = Counter(ScoreKey(entry.batch_id, entry.micro, entry.block) for entry in scores)
    for problem, keys in (
        ("that it does not owe", sent.keys() - set(owed)),
        ("twice", {key for key, count in sent.items() if count > 1}),
        ("without some that it owes", set(owed) - sent.keys()),
    ):
        if keys:
            first = min(keys)
            entry = f"batch {first.batch_id}, micro-batch {first.micro}, block {first.block}"
            raise IntegrityError(f"{where} {problem}: {len(keys)}, the first is of {entry}; {anew}")
    if choice is None:
        return
    shape = [choice.subnets] * len(choice.scores)
    wrong = next((entry for entry in scores if [len(values) for values in entry.values] != shape), None)
    if wrong is not None:
        raise IntegrityError(
            f"{where} with {[len(values) for values in wrong.values]} numbers for block {wrong.block}, expected are "
            f"{choice.subnets} subnets for each of {len(choice.scores)} scores; {anew}"
        )
    for each in scores:
        for score, values in zip(choice.scores, each.values, strict=True):
            for subnet, value in enumerate(values):
                if not 0 <= value <= MAX_SCORE:
                    kind = IntegrityError if math.isfinite(value) else DivergedError
                    raise kind(
                        f"{where}, and {score} of batch {each.batch_id}, micro-batch {each.micro}, block "
                        f"{each.block}, subnet {subnet} is {value}, not from 0 to {MAX_SCORE:g}; look at the weights "
                        f"of the model and at the rows of {turn.owner}; nothing was trained with it"
                    )


class TurnOperations:
    """The operation tables that one run chooses; raises ``PlanError``."""

    def __init__(self, plan: Plan, start: StartPoint | None) -> None:
        step, self.in_force = (start.step, start.operations) if start else (0, None)
        check_in_force(plan, step, self.in_force)
        self.place(plan)
        self._asked_for: int | None = None
        self._chosen_for: int | None = None
        self._open: dict[int, set[str]] = {}  # score turn -> nodes that have reported scores
        self._scores: list[BlockScores] = []

    def place(self, part: Plan) -> None:
        """Expect scores of the hosts in this placement from now on."""
        self._plan = part

    @property
    def chooses_for(self) -> int | None:
        """The step for which a table is being chosen; None if there is none."""
        return self._asked_for if self._asked_for != self._chosen_for else None

    def may_grant(self, turn: Turn) -> bool:
        """Whether the table for the turn is chosen."""
        step = turn.first_step
        is_chosen = self._chosen_for == step or not table_is_due(self._plan.course, step)
        return turn.kind is not StepKind.TRAIN or is_chosen

    def given(self, turn: Turn) -> Operations | None:
        """Take a given table for a turn into force; None if the run has to choose."""
        choice = self._plan.course.choice
        operations = choice.given_at(turn.first_step) if choice is not None else None
        if operations is not None:
            self._asked_for = self._chosen_for = turn.first_step
            self.in_force = operations
        return operations

    def ask(self, turn: Turn) -> tuple[BlockScores, ...] | None:
        """Begin the choice of a turn's table: return the scores in order; None if some are missing or it has begun."""
        if self._open or self._asked_for == turn.first_step:
            return None
        self._asked_for = turn.first_step
        scores, self._scores = tuple(sorted(self._scores, key=lambda entry: entry[:4])), []
        return scores

    def chosen(self, step: int, operations: Operations) -> bool:
        """Take a chosen table into force; False without effect if none is being chosen for this step."""
        if self.chooses_for != step:
            return False
        self._plan.decided((), operations)
        self._chosen_for, self.in_force = step, operations
        return True

    def decided(self, turn: Turn) -> Turn:
        """Return the turn with its table."""
        if self._plan.course.choice is None:
            return turn
        return dataclasses.replace(turn, operations=self.in_force)

    # ---- scores -----------------------------------------------------------------------------------

    def granted(self, turn: Turn) -> None:
        """Expect scores for a granted score turn; not where it is repeated and its table is chosen."""
        if turn.kind is StepKind.SCORE and turn.first_step != self._chosen_for:
            self._open[turn.index] = set()

    def note(self, node: str, turn: Turn, scores: Sequence[BlockScores]) -> None:
        """Note the scores with which a node ends a turn; a second report of a turn changes nothing."""
        nodes = self._open.get(turn.index)
        if nodes is not None and node in nodes:
            return
        check_scores(self._plan, turn, node, scores)
        if nodes is not None:
            nodes.add(node)
            self._scores += scores

    def close(self, turn: Turn) -> None:
        """Note that every node has done a turn."""
        self._open.pop(turn.index, None)

    def halt(self) -> None:
        """Drop the scores for a table that is not chosen yet: the run goes back, and gathers them once more."""
        self._open, self._scores = {}, []
        self._asked_for = self._chosen_for


def check_in_force(plan: Plan, step: int, operations: Operations | None) -> None:
    """Refuse a table that can't be in force after ``step`` steps; raises ``PlanError``."""
    if plan.course.choice is not None and step and operations is None:
        raise PlanError(f"the checkpoint of step {step} has no table of operations; it is of another run")
    if operations is not None:
        plan.decided((), operations)


def chosen_entry(course: Course, step: int, operations: Operations) -> dict[str, Any]:
    """Return the progress event of a table that holds from ``step`` on.

    It has the table's digest, and the number of operations of each kind for blocks that ever train.
    """
    blocks, subnets = ever_trained(course).blocks, operations.subnets
    rows = [row for batch in operations.batches for row in batch.rows]
    codes = "".join(pattern_of(row, block, subnets) for row in rows for block in blocks)
    kinds = {"full": FULL, "forward_only": FORWARD_ONLY, "shortcut": SHORTCUT}
    counts = {name: codes.count(code) for name, code in kinds.items()}
    return {"kind": "operations", "step": step, "digest": operations.digest, **counts}


def chosen_line(entry: Mapping[str, Any]) -> str:
    """Describe an operation table by its shares of operations for blocks that ever train.

    Example: ``operations chosen after step 0: 60 % full, 0 % forward-only, 40 % skipped``.
    """
    counts = [entry["full"], entry["forward_only"], entry["shortcut"]]
    if not sum(counts):
        return f"operations chosen after step {entry['step']}: all full"
    full, forward_only, skipped = (100 * count / sum(counts) for count in counts)
    shares = f"{full:.0f} % full, {forward_only:.0f} % forward-only, {skipped:.0f} % skipped"
    return f"operations chosen after step {entry['step']}: {shares}"


def choice_lines(plan: Plan) -> list[str]:
    """Describe in a line how a run gets its operations; empty where everything is full."""
    course = plan.course
    if course.choice is None:
        if course.operations is None:
            return []
        batches = len({(entry.owner, entry.batch_id) for entry in course.operations.batches})
        return [f"operations are given, for {batches} batches"]
    choice = course.choice
    if choice.tables:
        return [f"operations are given, {len(choice.tables)} tables, which follow each other"]
    what = f"{choice.subnets} subnets a block" if choice.subnets > 1 else "whole blocks"
    what = "whole slices" if choice.by_slice else what
    scores = " and ".join(choice.scores)
    by = f" by {scores}" if scores else ""
    anew = f", and anew every {choice.refresh_steps} steps" if choice.refresh_steps else ""
    return [f"operations of {what} are chosen by the policy {choice.policy}{by} before training{anew}"]


def operations_lines(plan: Plan, *, max_batches: int = 2) -> list[str]:
    """Write the first batches of a plan's operation table with a legend; says where the table is only assumed.

    Example: ``1132 3333`` is a micro-batch that passes the second of two blocks of four subnets by.
    """
    course = plan.course
    if not course.may_skip:
        return []
    table = expected_table(course)
    assumed = ", assumed until the run has chosen" if course.operations is None else ""
    lines = [f"operations{assumed}: 1 full, 2 forward-only, 3 shortcut; a word for each block, a code for each subnet"]
    for entry in table.batches[:max_batches]:
        lines += _batch(entry, course.num_blocks, table)
    more = len(table.batches) - max_batches
    return [*lines, f"  and {more} more batches"] if more > 0 else lines


def saved_lines(operations: Mapping[str, Any] | None) -> list[str]:
    """Describe done and saved work of operations, from a run's report; empty where everything was full."""
    if not operations:
        return []
    width = max(len(node) for node in operations["nodes"])
    lines = ["operations of its train steps, as shares of all full:"]
    for node, shares in operations["nodes"].items():
        full, forward, skipped = (f"{shares[name]:.0%}" for name in ("full", "forward_only", "skipped"))
        lines.append(f"  {node:<{width}}  {full} full, {forward} forward-only, {skipped} skipped")
    lines += [f"  {name:<{width}}  {_shares(operations[name])}" for name in ("compute", "bytes")]
    scores = operations.get("scores") or {"batches": 0}
    if not scores["batches"]:
        return lines
    on_top = f"{format_seconds(scores['busy_s'])} and {format_bytes(scores['sent_bytes'])} on top"
    steps = f"{format_seconds(operations['compute']['busy_s'])} and {format_bytes(operations['bytes']['sent_bytes'])}"
    return [
        *lines,
        f"  {'scores':<{width}}  {on_top}, measured, for {scores['batches']} batches; the steps took {steps}",
    ]


def _shares(figures: Mapping[str, Any]) -> str:
    """Write the shares: ``62 % measured, 61 % predicted, 60 % by the paper's count``."""
    words = {"measured": "measured", "predicted": "predicted", "paper": "by the paper's count"}
    known = [f"{figures[name]:.0%} {word}" for name, word in words.items() if figures.get(name) is not None]
    if "all_full_s" in figures and figures["all_full_s"] is None:
        known.insert(0, "not measured")
    return ", ".join(known) or "nothing to compare with"


def _batch(entry: BatchOperations, num_blocks: int, table: Operations) -> Iterator[str]:
    in_pass = f", pass {entry.of_pass + 1} of {table.passes}" if table.passes > 1 else ""
    yield f"  owner {entry.owner}, batch {entry.batch_id}{in_pass}"
    for micro, row in enumerate(entry.rows):
        words = " ".join(pattern_of(row, block, table.subnets) for block in range(num_blocks))
        yield f"    micro-batch {micro}  {words}"
