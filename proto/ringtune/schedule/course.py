"""Course of a run: everything that its result depends on, as a value with a digest.

Nodes carry it out by a :class:`~ringtune.schedule.placement.Placement`, which does not affect the result. Runs with
equal digests of their courses train the same weights, whatever their slices.

Frozen weights may be stored in a smaller type than float32, rounded once: a matrix of 2,048 x 5,632 numbers has 46.1 MB
in float32, 23.1 MB in bfloat16, in int8 11.5 MB with a scale of 4 bytes for each row, and in nf4 5.9 MB with the scales
of its blocks of 64 numbers. With nf4 the matrices outside of blocks are in int8. Vectors (norms, biases) and trained
weights stay float32.

Offload: a helper that updates after every step, from exact pairs, gives the weights of local training, and is part of
the placement only. With an interval of I it adds up the gradients of I steps for each update, and remaining steps at
the end of the run are one more update. With an interval of 4 a run of 10 steps::

    step          0  1  2  3  4  5  6  7  8  9
    updates after             1           2     3

With overlap a host installs the update of a step after the backward of the next step of its turn. It never holds two
versions, and its forwards see all updates except that of the last step; at the end of a turn everything is installed.
The helper computes gradients with its newest weights::

    step            0  1  2  3 | 4  5         a turn of four steps
    forward sees    0  0  1  2 | 4  4

Source: ColA, section 3.2 (adaptation interval) and Algorithm 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from ringtune.errors import PlanError
from ringtune.schedule.batches import BatchStream, num_batches
from ringtune.schedule.methods import Method
from ringtune.schedule.operation_tables import Choice, Operations, OwnerRows, TableOrigin, block_row
from ringtune.schedule.placement import Slice
from ringtune.schedule.run_shape import EQUAL, MAX_COUNT, TURNS, Count, Extent, Owner, check_owners
from ringtune.schedule.saved_activations import VELORA, Velora, check_ranges, in_ranges, merged
from ringtune.schedule.units import EMBEDDING, Range, Units
from ringtune.storage.strict import LATER, Bounds, OneOf, check_fields, json_digest, read_dataclass, to_table

BFLOAT16: Final = "bfloat16"
INT8: Final = "int8"
NF4: Final = "nf4"
FROZEN_DTYPES: Final = (BFLOAT16, INT8, NF4)
GGUF: Final = "gguf"
"""Frozen matrices in the blocks of the model's GGUF file; ``runtime.frozen`` is then ``AS_COMPUTED`` or auto."""
AS_COMPUTED: Final = "float32"
"""``runtime.frozen`` for frozen weights in the type of the computation."""
COMPUTE: Final = (AS_COMPUTED, BFLOAT16)
"""Number types of products (``train.compute``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenWeights:
    """Number type of frozen matrices, and their multiplication.

    Attributes:
        dtype: one of ``FROZEN_DTYPES``, or ``GGUF``.
        native: whether products are computed in bfloat16 with float32 sums; otherwise one matrix at a time is widened
            to float32.
    """

    dtype: Annotated[str, OneOf((*FROZEN_DTYPES, GGUF))]
    native: bool = False

    def __post_init__(self) -> None:
        check_fields(self, where="frozen", error=PlanError)

    def __str__(self) -> str:
        """Write dtype and products: ``bfloat16 native`` or ``int8 widened``."""
        return f"{self.dtype} {'native' if self.native else 'widened'}"


def dtype_of(frozen: FrozenWeights | None) -> str:
    """Return the dtype of frozen weights as in ``runtime.frozen``, which has no own word for those of a GGUF file."""
    return AS_COMPUTED if frozen is None or frozen.dtype == GGUF else frozen.dtype


def name_of(frozen: FrozenWeights | None) -> str:
    """Return dtype and products of frozen weights in words; ``float32`` in the type of the computation."""
    return str(frozen) if frozen is not None else AS_COMPUTED


EXACT: Final = "float32"
PAIRS: Final = (EXACT, BFLOAT16, VELORA)
"""Encodings of pairs on links: in the run's dtype, rounded to 16 bits, or with projections of inputs (``Velora``)."""

ALL_INPUTS, WIDE = "all", "wide"
PROJECTED: Final = (ALL_INPUTS, WIDE)
"""Inputs that VeLoRA projects in pairs: all, or those that are wider than the gradient beside them."""

JOINT: Final = "joint"
ALONE: Final = "alone"
COLLABORATION: Final = "collaboration"
USERS: Final = (JOINT, ALONE, COLLABORATION)
"""Adapters applied to a row: one common set, its user's own, or the sum of all users' own."""


_MERGING: Final = {
    ALONE: "gives each row the adapters of its user, which are beside the matrix and not inside",
    COLLABORATION: "adds the adapters of all users to one matrix",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HelperSettings:
    """Settings of helpers that affect the result.

    Attributes:
        interval: steps of a block with gradients added up for one update.
        pairs: one of ``PAIRS``.
        merged: whether a host merges the adapters into their matrices, with the rounding of a matrix.
        overlap: whether a host begins the next step of a turn before its helper has updated; see ``Offload.lag``.
        users: one of ``USERS``; the users of rows are in ``techniques.offload``.
        projected: one of ``PROJECTED``; only of pairs with projections.
    """

    interval: Annotated[int, Bounds(ge=1)] = 1
    pairs: Annotated[str, OneOf(PAIRS)] = EXACT
    merged: bool = False
    overlap: bool = False
    users: Annotated[str, OneOf(USERS)] = JOINT
    projected: Annotated[str, LATER, OneOf(PROJECTED)] = ALL_INPUTS

    def __post_init__(self) -> None:
        """Refuse unknown words, an interval below 1, and ``users`` with the wrong ``merged``; raises ``PlanError``."""
        check_fields(self, where="offload", error=PlanError)
        if self.users != JOINT and self.merged != (self.users == COLLABORATION):
            raise PlanError(
                f"offload.users = {self.users!r} {_MERGING[self.users]}; set offload.merged = "
                f"{'false' if self.merged else 'true'}"
            )

    @property
    def has_users(self) -> bool:
        """Whether each user has adapters of their own."""
        return self.users != JOINT

    @property
    def needs_helpers(self) -> bool:
        """Whether a block without a helper would be trained otherwise; an interval is kept by a host as well."""
        return (self.pairs, self.merged, self.overlap, self.users) != (EXACT, False, False, JOINT)

    @property
    def is_exact(self) -> bool:
        """Whether the weights are those of local training."""
        return (self.interval, self.pairs, self.merged, self.overlap, self.users) == (1, EXACT, False, False, JOINT)

    def of_blocks(self, blocks: Iterable[Range]) -> Offload | None:
        """These settings with the blocks that helpers fit; None where that changes no result."""
        ranges = merged(blocks)
        return Offload(blocks=ranges, **dataclasses.asdict(self)) if ranges and not self.is_exact else None


IN_STEP: Final = HelperSettings()
"""Update after every step, from exact pairs, with the host waiting: the weights are those of local training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload(HelperSettings):
    """Everything about helpers that affects the result.

    Attributes:
        blocks: ranges of blocks with adapters that helpers train, ascending.
    """

    blocks: tuple[Range, ...]

    def __post_init__(self) -> None:
        """Refuse invalid ranges, and invalid ``HelperSettings``; raises ``PlanError``."""
        HelperSettings.__post_init__(self)
        check_ranges(self.blocks, where="offload.blocks")
        if not self.blocks:
            raise PlanError("offload.blocks is empty; name blocks, or leave offload out")

    @property
    def helper_settings(self) -> HelperSettings:
        """The settings without the blocks."""
        return HelperSettings(**{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(HelperSettings)})

    def lag(self, unit: int) -> int:
        """Updates that a block's forward does not have yet: 1 with overlap, if a helper trains the block, else 0."""
        return 1 if self.overlap and self.has_block(unit) else 0

    def has_block(self, unit: int) -> bool:
        """Whether a helper trains the adapters of a block; never embedding and head."""
        return in_ranges(unit, self.blocks)

    def updates(self, steps: int, *, is_over: bool) -> int:
        """Number of updates of a block after ``steps`` steps that trained it; ``is_over`` at the end of the run.

        The last step updates what is left of an interval: a block that trains once has to train in all later steps, as
        it does with all methods that go together with helpers, also where operations pass it by.
        """
        whole, rest = divmod(steps, self.interval)
        return whole + (1 if is_over and rest else 0)

    def rate_at(self, step: int, num_steps: int) -> tuple[int, int]:
        """Position of a helper's learning rate: updates before that of ``step``, and updates of the whole run."""
        return step // self.interval, -(-num_steps // self.interval)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Texts that a language model writes at each evaluation; a sequence is a micro-batch of one row.

    Attributes:
        rows: evaluation rows of each owner that are continued, at most.
        max_new_tokens: of each; as many items.
        at_once: sequences of one turn, whose keys and values hosts keep at the same time.
        alone: whether evaluations do nothing else.
    """

    rows: Annotated[int, Bounds(ge=1, le=MAX_COUNT)]
    max_new_tokens: Annotated[int, Bounds(ge=1, le=4096)]
    at_once: Annotated[int, Bounds(ge=1, le=1024)]
    alone: bool = False

    def __post_init__(self) -> None:
        check_fields(self, where="generation", error=PlanError)

    def turns(self, owner: Owner) -> int:
        """Number of an owner's turns at an evaluation: of ``at_once`` sequences each, the last one of the rest."""
        return -(-min(self.rows, owner.eval_rows) // self.at_once)

    def sequences(self, owner: Owner, turn: int) -> range:
        """Return the numbers of the sequences of an owner's turn at an evaluation."""
        return range(turn * self.at_once, min(self.rows, owner.eval_rows, (turn + 1) * self.at_once))

    def is_last(self, batch: int) -> bool:
        """Whether no token follows those of an item's batch."""
        return (batch + 1) % self.max_new_tokens == 0


TABLES_AT_ONCE: Final = 8
"""Courses with chosen tables that are cached; open turns have at most two tables."""

WIRE_DTYPES: Final = ("float32", "bfloat16", "float16", "int8", "float64")

Size = Annotated[int, Bounds(ge=1, le=MAX_COUNT)]
MAX_MICROBATCHES: Final = 1 << 16
"""Most parts of a batch; each is written out in lists of the planner and of nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Course(Extent):
    """Everything that the result of a run depends on; see also ``Extent``.

    Attributes:
        microbatches: parts of one batch; at most ``batch_size``.
        max_length: longest sequence in tokens; bounds the shape of every frame.
        generation: texts that are written at each evaluation; None = none are.
        packed: whether what counts as a training row is a sequence of several rows of the owner.
        hidden_size: width of the hidden state; bounds the shape of every frame, see also ``width``.
        eval_every: steps between evaluations (at turn boundaries); 0 = at the end only.
        checkpoint_every: steps between checkpoints (at turn boundaries, and at the end); 0 = none.
        wire_dtype: one of ``WIRE_DTYPES``; hidden states and gradients are rounded to it.
        turns: one of ``run_shape.TURNS``: order of the owners' turns.
        operations: operation of each subnet for each micro-batch; None = all full.
        choice: settings by which the run chooses such tables; None = it does not. Each turn then carries the current
            table.
        velora: linear layers that keep projections of their input for the backward; None = all keep the input.
        frozen: format of frozen weights; None = the type of the computation.
        head_tokens: first tokens of each row that the head reads; others need not be sent to it. 0 = all.
        trims: whether the last block may compute only these tokens; see ``top_tokens``.
        initial: SHA-256, hex, of the file of initial values (``techniques.initial_adapter``); empty = they are drawn by
            the seed.
        compute: number type of the products of blocks; float32 = the type of the computation.
        entering: values of a token that enter each block and the head, where blocks pass on more than a hidden state;
            empty = ``hidden_size`` everywhere.
        returning: the first ones of these, which have a gradient.
    """

    method: Method
    batch_size: Size
    microbatches: Annotated[int, Bounds(ge=1, le=MAX_MICROBATCHES)]
    max_length: Size
    hidden_size: Size
    eval_every: Count = 0
    checkpoint_every: Count = 0
    wire_dtype: Annotated[str, OneOf(WIRE_DTYPES)] = "float32"
    labels: tuple[str, ...] = ()
    seed: int = 0
    turns: Annotated[str, LATER, OneOf(TURNS)] = EQUAL
    operations: Annotated[Operations | None, LATER] = None
    choice: Annotated[Choice | None, LATER] = None
    velora: Annotated[Velora | None, LATER] = None
    frozen: Annotated[FrozenWeights | None, LATER] = None
    offload: Annotated[Offload | None, LATER] = None
    head_tokens: Annotated[Count, LATER] = 0
    trims: Annotated[bool, LATER] = False
    initial: Annotated[str, LATER] = ""
    packed: Annotated[bool, LATER] = False
    generation: Annotated[Generation | None, LATER] = None
    compute: Annotated[str, LATER, OneOf(COMPUTE)] = AS_COMPUTED
    entering: Annotated[tuple[Size, ...], LATER] = ()
    returning: Annotated[tuple[Size, ...], LATER] = ()
    _hash: int = field(default=0, init=False, repr=False, compare=False)
    _plain: Course | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self, where="", error=PlanError)
        if self.microbatches > self.batch_size:
            raise PlanError(f"{self.microbatches} micro-batches do not fit a batch of {self.batch_size} rows")
        if self.frozen_blocks >= self.num_blocks:
            raise PlanError(f"frozen_blocks is {self.frozen_blocks}, it has to be in [0, {self.num_blocks})")
        check_owners(self.owners, self.left_out)
        self.method.check(self)
        if self.invertible:
            name = self.method.name
            if self.method.full_parameters:
                raise PlanError(
                    f"the method {name} trains all parameters and has no adapters, so no invertible one; plan anew"
                )
            if self.method.in_flight_below(self, self.num_blocks) > 1:
                raise PlanError(
                    f"the method {name} has several items in flight, an invertible adapter has one set of weights; use "
                    "another train.method, or an adapter.config without it"
                )
            if self.offload is not None and self.offload.has_users:
                raise PlanError(
                    "users have adapters of their own, but an invertible adapter is one for all; leave one of them out"
                )
        elif not self.method.full_parameters and EMBEDDING in self.method.reach(self):
            raise PlanError(
                f"the method {self.method.name} trains the embedding, but has adapters; no node can do that"
            )
        widths = (*zip(self.entering, self.returning, strict=False),)
        if {len(self.entering), len(self.returning)} not in ({0}, {self.num_blocks + 1}) or any(
            a < b for a, b in widths
        ):
            raise PlanError(
                f"entering {self.entering} and returning {self.returning} have to be widths for {self.num_blocks} "
                "blocks and the head, gradients no wider than what enters; plan anew"
            )
        if self.velora is not None:
            self.velora.check(num_blocks=self.num_blocks, hidden_size=self.hidden_size)
        if self.choice is not None:
            _check_choice(self, self.choice)
        if self.operations is not None:
            _check_table(self, self.operations)
        values = (getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.compare)
        object.__setattr__(self, "_hash", hash(tuple(values)))  # it is in the key of many caches

    def __hash__(self) -> int:
        return self._hash

    # ---- what may train ---------------------------------------------------------------------------

    @property
    def helper_settings(self) -> HelperSettings:
        """How helpers fit; those of local training where no helper changes the result."""
        return self.offload.helper_settings if self.offload is not None else IN_STEP

    @property
    def rounds_products(self) -> bool:
        """Whether products of blocks are rounded to bfloat16, as a processor's own instructions for it sum."""
        return self.compute == BFLOAT16 or (self.frozen is not None and self.frozen.native)

    @property
    def projected(self) -> tuple[Range, ...]:
        """Blocks with linear layers that keep projections of their input."""
        return self.velora.blocks if self.velora is not None else ()

    @property
    def trainable(self) -> Units:
        """Units that may train: all with ``full_parameters`` and no frozen block, else ``Extent.trainable``."""
        if self.method.full_parameters and not self.frozen_blocks:
            return Units(self.num_blocks, (Range(EMBEDDING, self.head + 1),))
        return self.top(self.num_blocks - self.frozen_blocks)

    # ---- owners and batches -----------------------------------------------------------------------

    def owner(self, node: str) -> Owner | None:
        """Return the owner entry of ``node``; None if it has no data."""
        return next((owner for owner in self.owners if owner.node == node), None)

    @property
    def users(self) -> tuple[str, ...]:
        """The users of a run, in the order of owners and rows; a user with rows at several owners is listed once."""
        return _users(self)

    @property
    def user_sets(self) -> tuple[str, ...]:
        """The users with adapters of their own, also of owners that are left out; none where all train the same."""
        return _user_sets(self) if self.offload is not None and self.offload.has_users else ()

    def sent_tokens(self, boundary: int, tokens: int) -> int:
        """Number of a row's tokens that are sent over a boundary: only ``head_tokens`` to the head and back."""
        return min(tokens, self.head_tokens or tokens) if boundary == self.head else tokens

    def width(self, boundary: int, *, is_gradient: bool = False) -> int:
        """Values of a token that enter a block or the head, or of the gradient that is sent back from there."""
        widths = self.returning if is_gradient else self.entering
        return widths[boundary] if widths else self.hidden_size

    @property
    def widest(self) -> int:
        """Values of a token at the widest boundary."""
        return max(self.entering, default=self.hidden_size)

    @property
    def top_tokens(self) -> int:
        """Tokens of each row that the last block computes, with attention to all of them; 0 = every token.

        With operations or VeLoRA it computes every token.
        """
        has_own_ways = self.operations or self.choice or self.velora
        return self.head_tokens if self.trims and not has_own_ways else 0

    def microbatch_sizes(self, rows: int | None = None) -> tuple[int, ...]:
        """Rows of each micro-batch of a batch of ``rows``; the first micro-batches take the remainder.

        Example: 10 rows in 4 micro-batches are 3, 3, 2 and 2.

        A short evaluation batch has the same number of micro-batches unless it has fewer rows.
        """
        return _parts(self.batch_size if rows is None else rows, self.microbatches)

    def batch_rows(self, owner: Owner) -> int:
        """Rows of each training batch of an owner: all its rows if they are fewer than ``batch_size``."""
        return min(self.batch_size, owner.train_rows)

    def eval_batches(self, owner: Owner) -> int:
        """Number of evaluation batches of an owner; the last one may be short."""
        return num_batches(owner.eval_rows, self.batch_size)

    def num_scored(self, owner: Owner) -> int:
        """Number of an owner's batches, from the first of its stream on, that are scored for a choice.

        Pruning scores one batch of each owner, and weight magnitudes are equal for every batch. Otherwise every batch
        is scored.
        """
        choice = self.choice
        if choice is not None and (choice.prunes or not any(score.needs_gradient for score in choice.scores)):
            return 1
        return num_batches(owner.train_rows, self.batch_size)

    def operations_of(self, owner: str, batch: int) -> tuple[str, ...]:
        """Operations of whole blocks for an owner's batch at this position of its stream; empty = all full."""
        if self.operations is None:
            return ()
        return tuple(block_row(row, self.subnets) for row in self.subnet_operations_of(owner, batch))

    def subnet_operations_of(self, owner: str, batch: int) -> tuple[str, ...]:
        """Rows of the operation table for an owner's batch at this position of its stream; empty = all full."""
        if self.operations is None:
            return ()
        stream = stream_of(self.plain, owner)
        return self.operations.rows_of(owner, stream.batch_id(batch), batch // stream.num_batches)

    @property
    def subnets(self) -> int:
        """Subnets of each block in the given or chosen tables; 1 without tables."""
        speaks = self.operations or self.choice
        return speaks.subnets if speaks else 1

    @property
    def may_skip(self) -> bool:
        """Whether a micro-batch may skip blocks: there are operation tables, or the run will choose some."""
        return self.operations is not None or self.choice is not None

    @property
    def table_origin(self) -> TableOrigin:
        """The fields that determine the rows of a batch id in an operation table."""
        return TableOrigin(
            seed=self.seed,
            batch_size=self.batch_size,
            microbatches=self.microbatches,
            num_blocks=self.num_blocks,
            owners=tuple(sorted(OwnerRows(owner.node, owner.train_rows) for owner in self.owners)),
        )

    def batch_id(self, owner: str, batch: int) -> int:
        """Return the id of an owner's batch at this position of its stream of training batches."""
        return stream_of(self.plain, owner).batch_id(batch)

    # ---- decisions --------------------------------------------------------------------------------

    @property
    def decides(self) -> bool:
        """Whether the run's losses decide what trains (``unfreeze.at = "auto"``); each turn carries decisions."""
        return self.method.patience is not None

    def decided(self, steps: tuple[int, ...], operations: Operations | None = None) -> Course:
        """Return the course with the run's decisions filled in; ``self`` without any. Equal decisions give one object.

        They are ``Turn.unfreeze_at``, at each of which more begins to train, and the table ``Turn.operations``.
        """
        if operations is not None:
            return _with_table(self, steps, operations)
        return _decided(self, steps) if steps else self

    @property
    def plain(self) -> Course:
        """The course without the table that its run has chosen; ``self`` if it has none.

        It is the cache key for everything that no table changes, so that caches do not keep every table of a long run.
        """
        return self._plain or self

    def soonest(self) -> Course:
        """Return the course with the earliest possible decisions: no run of ``self`` trains more at any step.

        It is ``self`` if the method leaves nothing to the run.
        """
        return self.with_method(self.method.soonest(self))

    def with_method(self, method: Method) -> Course:
        """Return the course with another method; ``self`` for its own method."""
        return self if method is self.method else dataclasses.replace(self, method=method)

    def fitted(self, slices: Sequence[Slice]) -> Course:
        """Return the course for a ring with these slices (``Method.fitted``); ``self`` if none of it changes."""
        return self.with_method(self.method.fitted(slices))

    # ---- files ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Write the course as a JSON-compatible table."""
        return to_table(self)

    @staticmethod
    def from_json(value: object) -> Course:
        """Parse the table of ``to_json``; raises ``PlanError`` for a field that is missing, unknown or not valid."""
        return read_dataclass(Course, value, where="course", error=PlanError)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON form."""
        return json_digest(self.to_json())


@functools.lru_cache(maxsize=256)
def _users(course: Course) -> tuple[str, ...]:
    return tuple(dict.fromkeys(user.name for owner in course.owners for user in owner.user_rows))


@functools.lru_cache(maxsize=256)
def _user_sets(course: Course) -> tuple[str, ...]:
    gone = {dropped.owner.node for dropped in course.absent if not dropped.keeps_users}
    owners = (owner for owner in course.all_owners if owner.node not in gone)
    return tuple(dict.fromkeys(user.name for owner in owners for user in owner.user_rows))


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
    decided = dataclasses.replace(plain, operations=operations)
    object.__setattr__(decided, "_plain", plain)
    return decided


@functools.lru_cache(maxsize=256)
def stream_of(course: Course, node: str) -> BatchStream:
    """Return an owner's stream of training batches; ``course`` is a plain one."""
    owner = course.owner(node)
    return BatchStream(owner.train_rows if owner else 0, course.batch_size, course.seed, node)


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
