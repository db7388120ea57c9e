"""The course of a run: everything that its result depends on, as a value with a digest.

Who carries it out is a :class:`~ringtune.schedule.placement.Placement`; no result depends on that. Two parties that
hold courses of equal digests train the same weights, whatever their slices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ringtune.errors import PlanError
from ringtune.files.digests import json_digest
from ringtune.files.strict import read_dataclass
from ringtune.schedule.extent import Extent, Owner, check_owners
from ringtune.schedule.frozen_weights import FrozenWeights
from ringtune.schedule.helping.offload import Offload
from ringtune.schedule.methods import Method, method_from_json
from ringtune.schedule.operations.choice import Choice
from ringtune.schedule.operations.codes import block_row
from ringtune.schedule.operations.origin import TableOrigin
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.owner_turns import EQUAL, TURNS
from ringtune.schedule.placement import Slice
from ringtune.schedule.rows.batches import BatchStream, num_batches
from ringtune.schedule.saving import Velora
from ringtune.schedule.units import EMBEDDING, Range, Units

TABLES_AT_ONCE: Final = 8
"""Chosen tables of which views are kept; turns under way have two at most."""

WIRE_DTYPES: Final = ("float32", "bfloat16", "float16", "int8", "float64")

_MOST: Final = 1 << 31
_MOST_BLOCKS: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Course(Extent):
    """Everything that the result of a run depends on; see also ``Extent``.

    Attributes:
        method: what trains when.
        batch_size: rows of one step.
        microbatches: parts of one batch; at most ``batch_size``.
        max_length: longest sequence in tokens; bounds the shape of every frame.
        hidden_size: width of the hidden state; bounds the shape of every frame.
        eval_every: steps between evaluations (at turn boundaries); 0 = at the end only.
        checkpoint_every: steps between checkpoints (at turn boundaries, and at the end); 0 = none.
        wire_dtype: one of ``WIRE_DTYPES``; hidden states and gradients are rounded to it.
        labels: agreed class names, sorted.
        seed: of the run.
        turns: one of ``owner_turns.TURNS``: whose train turn comes when.
        operations: what each subnet does for each micro-batch; None = everything is full.
        choice: how the run chooses such tables itself; None = it does not. Each turn then carries the table that holds.
        velora: which linear layers keep projections of their input for the backward; None = all keep the input.
        frozen: how the weights that do not train are held; None = in the type of the computation.
        offload: what of helpers changes the result; None = nothing does.
        head_tokens: of each row, from the first on, that the head reads, so that others need not travel; 0 = all.
        trims: whether the last block may leave out what it would compute for other tokens; see ``top_tokens``.
    """

    method: Method
    batch_size: int
    microbatches: int
    max_length: int
    hidden_size: int
    eval_every: int = 0
    checkpoint_every: int = 0
    wire_dtype: str = "float32"
    labels: tuple[str, ...] = ()
    seed: int = 0
    turns: str = EQUAL
    operations: Operations | None = None
    choice: Choice | None = None
    velora: Velora | None = None
    frozen: FrozenWeights | None = None
    offload: Offload | None = None
    head_tokens: int = 0
    trims: bool = False
    _hash: int = field(default=0, init=False, repr=False, compare=False)
    _plain: Course | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse a course that breaks a rule, whatever its placement.

        Raises:
            PlanError: names the field and its value.
        """
        _check(self)
        values = (getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.compare)
        object.__setattr__(self, "_hash", hash(tuple(values)))  # it is in the key of many caches

    def __hash__(self) -> int:
        """The hash of all fields, computed once."""
        return self._hash

    # ---- what may train ---------------------------------------------------------------------------

    @property
    def trainable(self) -> Units:
        """The units that may train: every one where all parameters do."""
        if self.method.full_parameters:
            return Units(self.num_blocks, (Range(EMBEDDING, self.head + 1),))
        return Units(self.num_blocks, (Range(self.frozen_blocks, self.head + 1),))

    # ---- owners and batches -----------------------------------------------------------------------

    def owner(self, node: str) -> Owner | None:
        """The owner entry of ``node``, or None if it has no data."""
        return next((owner for owner in self.owners if owner.node == node), None)

    def sent_tokens(self, boundary: int, tokens: int) -> int:
        """How many of the tokens of a row travel over a boundary: to the head and back those that it reads."""
        return min(tokens, self.head_tokens or tokens) if boundary == self.head else tokens

    @property
    def top_tokens(self) -> int:
        """How many tokens of each row the last block computes, which attends to all of them; 0 = every one.

        Operations and VeLoRA run blocks in ways of their own, which compute all.
        """
        has_own_ways = self.operations or self.choice or self.velora
        return self.head_tokens if self.trims and not has_own_ways else 0

    def microbatch_sizes(self, rows: int | None = None) -> tuple[int, ...]:
        """Rows of each micro-batch of a batch of ``rows``; the first micro-batches take the remainder.

        Example: 10 rows in 4 micro-batches are 3, 3, 2 and 2.

        A short evaluation batch keeps the number of micro-batches unless it has fewer rows.
        """
        return _parts(self.batch_size if rows is None else rows, self.microbatches)

    def batch_rows(self, owner: Owner) -> int:
        """Rows of each training batch of an owner: all its rows where they are fewer than ``batch_size``."""
        return min(self.batch_size, owner.train_rows)

    def eval_batches(self, owner: Owner) -> int:
        """How many evaluation batches one owner has; the last batch may be short."""
        return num_batches(owner.eval_rows, self.batch_size)

    def num_scored(self, owner: Owner) -> int:
        """How many batches of an owner are scored for a choice, from the first of its stream on.

        Whole subnets are pruned by one batch of each owner, and weights are the same for every batch. For everything
        else each batch needs scores of its own.
        """
        choice = self.choice
        if choice is not None and (choice.prunes or not any(score.needs_gradient for score in choice.scores)):
            return 1
        return num_batches(owner.train_rows, self.batch_size)

    def operations_of(self, owner: str, batch: int) -> tuple[str, ...]:
        """What whole blocks do for an owner's batch at this position of its stream; empty = all full.

        Returns:
            For each micro-batch one code for each block; see ``operations.codes.block_code``.
        """
        if self.operations is None:
            return ()
        return tuple(block_row(row, self.subnets) for row in self.subnet_operations_of(owner, batch))

    def subnet_operations_of(self, owner: str, batch: int) -> tuple[str, ...]:
        """The rows of the operation table for an owner's batch at this position of its stream; empty = all full."""
        if self.operations is None:
            return ()
        return self.operations.rows_of(owner, self.batch_id(owner, batch))

    @property
    def subnets(self) -> int:
        """Subnets of each block, in the tables that there are or that the run will choose; 1 without any."""
        speaks = self.operations or self.choice
        return speaks.subnets if speaks else 1

    @property
    def may_skip(self) -> bool:
        """Whether a micro-batch may pass blocks by: there are operation tables, or the run will choose some."""
        return self.operations is not None or self.choice is not None

    @property
    def table_origin(self) -> TableOrigin:
        """What decides which rows a batch id of an operation table means."""
        return TableOrigin(
            seed=self.seed,
            batch_size=self.batch_size,
            microbatches=self.microbatches,
            num_blocks=self.num_blocks,
            owners=tuple(sorted((owner.node, owner.train_rows) for owner in self.owners)),
        )

    def batch_id(self, owner: str, batch: int) -> int:
        """The id of an owner's batch at this position of its stream of training batches."""
        return stream_of(self.plain, owner).batch_id(batch)

    # ---- decisions --------------------------------------------------------------------------------

    @property
    def decides(self) -> bool:
        """Whether the losses of the run decide what trains when (``unfreeze.at = "auto"``).

        Each turn then carries the decisions that hold for it.
        """
        return self.method.patience is not None

    def decided(self, steps: tuple[int, ...], operations: Operations | None = None) -> Course:
        """The course in which the run's decisions are settled.

        Without any decision, this is the course itself. Equal decisions give one object.

        Args:
            steps: more trains from each of them on (``Turn.unfreeze_at``).
            operations: the table that was chosen (``Turn.operations``).

        Raises:
            PlanError: the method leaves nothing to the run, the steps break a rule, the course chooses no tables, or
                the table does not fit it.
        """
        if operations is not None:
            return _with_table(self, steps, operations)
        return _decided(self, steps) if steps else self

    @property
    def plain(self) -> Course:
        """The course without the table that its run has chosen; the course itself if it has none of that kind.

        What no table changes is looked up by this course, so that caches do not keep every table of a long run.
        """
        return self._plain or self

    def soonest(self) -> Course:
        """The course of the earliest decisions possible: no run of this course trains more at any step.

        Where the method leaves nothing to the run, this is the course itself.
        """
        return self.with_method(self.method.soonest(self))

    def with_method(self, method: Method) -> Course:
        """The course with another method and all else as it is; the course itself for its own method."""
        return self if method is self.method else dataclasses.replace(self, method=method)

    def fitted(self, slices: Sequence[Slice]) -> Course:
        """The course on a ring with these slices, of which its method is told (``Method.fitted``).

        Where the method's result does not depend on the ring, this is the course itself.
        """
        return self.with_method(self.method.fitted(slices))

    # ---- files ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Write the course as a JSON-able table.

        What was added later is left out where it says nothing, so that the digests of courses without it last.
        """
        value = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.compare}
        value["method"] = self.method.to_json()
        value |= {name: [one.to_json() for one in value[name]] for name in ("owners", "left_out")}
        if self.turns == EQUAL:
            del value["turns"]
        for name in ("head_tokens", "trims", "left_out"):
            if not value[name]:
                del value[name]
        for name in ("operations", "choice", "velora", "frozen", "offload"):
            if value[name] is None:
                del value[name]
            else:
                value[name] = value[name].to_json()
        return value

    @staticmethod
    def from_json(value: object) -> Course:
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: a field is missing or unknown, or a rule is broken.
        """
        given: dict[str, object] = {"method": None}
        if isinstance(value, Mapping):
            given["method"] = method_from_json(value.get("method"))
            if value.get("operations") is not None:
                given["operations"] = Operations.from_json(value["operations"], where="course.operations")
            if value.get("choice") is not None:
                given["choice"] = Choice.from_json(value["choice"], where="course.choice")
            if value.get("velora") is not None:
                given["velora"] = Velora.from_json(value["velora"], where="course.velora")
            if value.get("offload") is not None:
                given["offload"] = Offload.from_json(value["offload"], where="course.offload")
        return read_dataclass(Course, value, where="course", error=PlanError, given=given)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON form."""
        return json_digest(self.to_json())


@functools.lru_cache(maxsize=1024)
def _parts(rows: int, microbatches: int) -> tuple[int, ...]:
    parts = min(microbatches, rows)
    small, extra = divmod(rows, parts)
    return tuple(small + (1 if index < extra else 0) for index in range(parts))


@functools.lru_cache(maxsize=256)
def _decided(course: Course, steps: tuple[int, ...]) -> Course:
    return course.with_method(course.method.decided(steps))


@functools.lru_cache(maxsize=TABLES_AT_ONCE)
def _with_table(course: Course, steps: tuple[int, ...], operations: Operations) -> Course:
    if course.choice is None:
        raise PlanError("a turn has a table of operations, but the course of its run chooses none")
    plain = course.decided(steps)
    found = dataclasses.replace(plain, operations=operations)
    object.__setattr__(found, "_plain", plain)
    return found


@functools.lru_cache(maxsize=256)
def stream_of(course: Course, node: str) -> BatchStream:
    """An owner's stream of training batches; ``course`` is a plain one."""
    owner = course.owner(node)
    return BatchStream(owner.train_rows if owner else 0, course.batch_size, course.seed, node)


def _check(course: Course) -> None:
    if course.wire_dtype not in WIRE_DTYPES:
        raise PlanError(f"wire dtype {course.wire_dtype!r} is not one of {', '.join(WIRE_DTYPES)}")
    if course.turns not in TURNS:
        raise PlanError(f"turns = {course.turns!r} is not one of {', '.join(TURNS)}")
    for name in ("num_blocks", "local_iterations", "batch_size", "microbatches", "max_length", "hidden_size"):
        _check_at_least(course, name, 1)
    for name in ("num_steps", "eval_every", "checkpoint_every", "frozen_blocks", "head_tokens"):
        _check_at_least(course, name, 0)
    if course.microbatches > course.batch_size:
        raise PlanError(f"{course.microbatches} micro-batches do not fit a batch of {course.batch_size} rows")
    if course.frozen_blocks >= course.num_blocks:
        raise PlanError(f"frozen_blocks is {course.frozen_blocks}, it has to be in [0, {course.num_blocks})")
    check_owners(course.owners, course.left_out)
    course.method.check(course)
    if not course.method.full_parameters and EMBEDDING in course.method.reach(course):
        raise PlanError(f"the method {course.method.name} trains the embedding, but has adapters; no node can do that")
    if course.velora is not None:
        _check_velora(course, course.velora)
    if course.choice is not None:
        _check_choice(course, course.choice)
    if course.operations is not None:
        _check_table(course, course.operations)


def _check_velora(course: Course, velora: Velora) -> None:
    velora.check(num_blocks=course.num_blocks, hidden_size=course.hidden_size)
    if course.subnets > 1:
        raise PlanError(
            f"velora and operations of {course.subnets} subnets a block don't go together: a layer behind some of the "
            "heads has only a part of its input there, which has no fixed sub-tokens; use operations.heads = 0, which "
            "takes whole blocks, or leave velora out"
        )


def _check_choice(course: Course, choice: Choice) -> None:
    if not choice.tables and len(choice.capacities) not in (1, course.num_blocks):
        raise PlanError(
            f"operations have {len(choice.capacities)} capacities, it has to be one for all or one for each of "
            f"{course.num_blocks} blocks"
        )
    if choice.groups and choice.groups[-1][1] > course.num_blocks:
        raise PlanError(
            f"operations.groups end at block {choice.groups[-1][1]}, the model has {course.num_blocks} blocks"
        )
    for table in choice.tables:
        if table.step % course.local_iterations:
            raise PlanError(
                f"the operation table of step {table.step} is within a turn of {course.local_iterations} steps; it is "
                "of another run"
            )
        if table.origin is not None:
            table.origin.require(course.table_origin)
        _check_table(course, table.operations)


def _check_table(course: Course, operations: Operations) -> None:
    if course.choice is not None and course.choice.subnets != operations.subnets:
        raise PlanError(
            f"a table of {operations.subnets} subnets a block is of another plan, whose blocks have "
            f"{course.choice.subnets}"
        )
    batches = {owner.node: num_batches(owner.train_rows, course.batch_size) for owner in course.owners}
    operations.check(num_blocks=course.num_blocks, microbatches=course.microbatches, batches=batches)


def _check_at_least(course: Course, name: str, least: int) -> None:
    value, most = getattr(course, name), _MOST_BLOCKS if name == "num_blocks" else _MOST
    if value < least:
        raise PlanError(f"{name} is {value}, it has to be at least {least}")
    if value > most:  # a course may come from another machine, and each block is looked at
        raise PlanError(f"{name} is {value}, it has to be at most {most}")
