"""Operation tables (D2FT): operations of subnets for micro-batches, scores, choices, and packed text.

====== ============ =============================================================================================
code   operation    effect for one micro-batch at one subnet
====== ============ =============================================================================================
1      full         forward, and backward where the block trains or passes a gradient on
2      forward-only the subnet contributes to the hidden state, but is no part of the graph: its weights get no
                    gradient, and none passes through it
3      shortcut     the subnet contributes nothing; hidden state and gradient bypass it
====== ============ =============================================================================================

A *pattern* is the codes of one block's subnets for one micro-batch: in ``1132`` two of four subnets are full. A *row*
is the patterns of all blocks, from block 0 on. Text packs five codes in a byte, as base64: a table of 600 batches with
4 micro-batches, 12 blocks and 6 subnets has 172,800 codes, which are 46 kB.

Embedding and head are full for each micro-batch that takes part (``lowering.takes_part``). A table applies to train
items only; evaluations and scores run every block. It is keyed by owner, batch id, and pass over the owner's rows
modulo ``Operations.passes``. ``TableOrigin`` has everything that determines the rows of these batches. For a model of
four blocks with one subnet each and two micro-batches::

    owner a, batch 0:   1131   micro-batch 0 skips block 2
                        1211   micro-batch 1 runs block 1 without a graph

A *subnet* is a group of whole key/value heads with its share of the feed-forward rows. Example: 12 query heads over 6
key/value heads and a feed-forward width of 2048 in 3 subnets: each has 4 query heads, 2 key/value heads, and 683, 683
and 682 rows.

A run that chooses tables gathers scores in a pass without updates; nodes report only numbers. The coordinator solves
the knapsacks. The table is a decision of the run: it holds from the next turn on, and each turn carries it.
``operations.json`` has all chosen tables with their steps, to repeat the run.

Source: D2FT, section II-A (full p_f, forward-only p_o, shortcut p_s, and the residual route past a subnet), II-A.3
(scores), II-B (capacities C^pf and C^po of each subnet's device), III-A (one attention head and one sixth of the
feed-forward network) and IV-B (coarser subnets).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

from ringtune.errors import PlanError
from ringtune.storage.strict import (
    LATER,
    Bounds,
    OneOf,
    check_fields,
    check_keys,
    json_digest,
    read_dataclass,
    read_value,
    to_table,
)

FULL: Final = "1"
FORWARD_ONLY: Final = "2"
SHORTCUT: Final = "3"
CODES: Final = frozenset({FULL, FORWARD_ONLY, SHORTCUT})


def block_code(pattern: str) -> str:
    """Return the operation of a whole block, that of its most active subnet.

    Example: ``2133`` is full, ``2233`` is forward-only, ``3333`` is a shortcut.
    """
    return min(pattern)


@functools.lru_cache(maxsize=4096)
def block_row(row: str, subnets: int) -> str:
    """Return the operations of whole blocks in a row with ``subnets`` subnets a block; see ``block_code``.

    Example: ``1132 3333`` with four subnets is ``13``.
    """
    return row if subnets == 1 else "".join(block_code(row[at : at + subnets]) for at in range(0, len(row), subnets))


def pattern_of(row: str, block: int, subnets: int) -> str:
    """Return the pattern of one block in a row; empty for an empty row, which is all full."""
    return row[block * subnets : (block + 1) * subnets]


@functools.lru_cache(maxsize=4096)
def patterns_of(row: str, start: int, stop: int, subnets: int) -> tuple[str, ...]:
    """Return the patterns of blocks [start, stop) in a row; empty for an empty row, which is all full."""
    return tuple(pattern_of(row, block, subnets) for block in range(start, stop)) if row else ()


def share(pattern: str, code: str) -> float:
    """Share of a pattern's subnets with an operation; in an empty pattern all are full.

    Example: one half of ``1132`` is full.
    """
    return pattern.count(code) / len(pattern) if pattern else float(code == FULL)


_PER_BYTE: Final = 5
_BASE: Final = 3
_FIRST: Final = ord(min(CODES))


def pack(codes: str) -> str:
    """Pack operation codes; equal codes give equal text."""
    content = bytearray()
    for at in range(0, len(codes), _PER_BYTE):
        value = 0
        for code in reversed(codes[at : at + _PER_BYTE]):
            value = value * _BASE + ord(code) - _FIRST
        content.append(value)
    return base64.b64encode(bytes(content)).decode("ascii")


def packed_length(count: int) -> int:
    """Number of characters of ``count`` packed codes."""
    num_bytes = -(-count // _PER_BYTE)
    return 4 * -(-num_bytes // 3)


def unpack(text: str, count: int) -> str:
    """Unpack ``count`` codes; raises ``PlanError`` for a text that is no result of ``pack``."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise PlanError(f"packed operations are not readable: {error}; plan anew") from error
    if len(data) != -(-count // _PER_BYTE) or (data and max(data) >= _BASE**_PER_BYTE):
        raise PlanError(f"packed operations are {len(data)} bytes, which are not {count} codes; plan anew")
    codes = "".join(_FIVE[value] for value in data)
    if codes[count:].strip(min(CODES)):
        raise PlanError(f"packed operations have more than {count} codes; plan anew")
    return codes[:count]


_FIVE: Final = tuple(
    "".join(chr(value // _BASE**at % _BASE + _FIRST) for at in range(_PER_BYTE)) for value in range(_BASE**_PER_BYTE)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subnets:
    """Subnets of one block.

    Attributes:
        kv_heads: key/value heads; ``heads`` where each query head has its own.
        inner: feed-forward rows, the inner width.
    """

    heads: int
    kv_heads: int
    inner: int
    count: int

    def __post_init__(self) -> None:
        """Refuse a number of subnets that does not divide the key/value heads; raises ``PlanError``."""
        if not 1 <= self.count <= self.kv_heads or self.kv_heads % self.count:
            fitting = ", ".join(
                str(self.heads // count) for count in range(self.kv_heads, 0, -1) if not self.kv_heads % count
            )
            raise PlanError(
                f"{self.count} subnets do not divide {self.kv_heads} key/value heads evenly; "
                f"operations.heads can be {fitting}, or 0 for whole blocks"
            )

    @property
    def heads_each(self) -> int:
        """Query heads of one subnet."""
        return self.heads // self.count

    @property
    def kv_heads_each(self) -> int:
        """Key/value heads of one subnet."""
        return self.kv_heads // self.count

    def inner_range(self, subnet: int) -> tuple[int, int]:
        """Return the feed-forward rows [start, stop) of a subnet; the first subnets take the remainder."""
        small, extra = divmod(self.inner, self.count)
        start = subnet * small + min(subnet, extra)
        return start, start + small + (subnet < extra)


def subnets_of(*, heads: int, kv_heads: int, inner: int, heads_each: int) -> Subnets:
    """Return the subnets of blocks with ``heads_each`` query heads a subnet; 0 = a whole block is one subnet."""
    if not heads_each:
        return Subnets(heads=heads, kv_heads=kv_heads, inner=inner, count=1)
    if heads_each < 0 or heads % heads_each:
        fitting = ", ".join(str(size) for size in range(heads // kv_heads, heads + 1) if _fits(heads, kv_heads, size))
        raise PlanError(
            f"operations.heads = {heads_each} does not divide the {heads} heads of a block; it can be {fitting}, or 0 "
            "for whole blocks"
        )
    if not _fits(heads, kv_heads, heads_each):
        raise PlanError(
            f"operations.heads = {heads_each} parts the {heads // kv_heads} query heads of one key/value head; take a "
            f"multiple of {heads // kv_heads} that divides {heads}"
        )
    return Subnets(heads=heads, kv_heads=kv_heads, inner=inner, count=heads // heads_each)


def _fits(heads: int, kv_heads: int, size: int) -> bool:
    return heads % size == 0 and size % (heads // kv_heads) == 0


class BlockScores(NamedTuple):
    """Scores of one block's subnets for one micro-batch: for each of ``Choice.scores`` one number per subnet."""

    owner: str
    batch_id: int
    micro: int
    block: int
    values: tuple[tuple[float, ...], ...]


class OwnerRows(NamedTuple):
    """An owner and its number of training rows."""

    node: str
    train_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOrigin:
    """Values of a run that determine its batches and their micro-batches; ``owners`` are sorted."""

    seed: int
    batch_size: int
    microbatches: int
    num_blocks: int
    owners: tuple[OwnerRows, ...]

    def require(self, run: TableOrigin) -> None:
        """Refuse a run with other batches; raises ``PlanError``."""
        before, now = self._values(), run._values()
        told = [
            f"{name} {before.get(name, 'none')}, not {now.get(name, 'none')}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        if told:
            raise PlanError(f"the table is of a run with {'; '.join(told)}: its batches have other rows")

    def _values(self) -> dict[str, int]:
        numbers = {"seed": self.seed, "batch_size": self.batch_size, "microbatches": self.microbatches}
        owners = {f"train rows of owner {node}": rows for node, rows in self.owners}
        return {**numbers, "num_blocks": self.num_blocks, **owners}

    def to_json(self) -> dict[str, Any]:
        """Write as a JSON-compatible table."""
        return {**to_table(self), "owners": dict(self.owners)}

    @staticmethod
    def from_json(value: object, *, where: str) -> TableOrigin:
        """Parse the table of ``to_json``; raises ``PlanError`` for a field that is missing, unknown or not valid."""
        owners = value.get("owners") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(owners, Mapping):
            raise PlanError(f"{where} has to be an object with owners and their train rows; take another file")
        rows: dict[str, int] = read_value(dict[str, int], owners, where=f"{where}.owners", error=PlanError)
        return read_dataclass(TableOrigin, {**value, "owners": sorted(rows.items())}, where=where, error=PlanError)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOperations:
    """Operations of one batch in one pass: for each micro-batch the codes of all subnets, from block 0 on."""

    owner: str
    batch_id: int
    rows: tuple[str, ...]
    of_pass: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """A table of operations; a batch that is not in it is all full.

    Attributes:
        batches: each batch once for each pass.
        passes: passes over an owner's rows after which its operations repeat; see ``operations.rotate`` of a job.
    """

    batches: tuple[BatchOperations, ...] = ()
    subnets: int = 1
    passes: int = 1
    _hash: int = field(default=0, init=False, repr=False, compare=False)
    _rows: dict[tuple[str, int, int], tuple[str, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Compute the hash once, as a table is in the key of many caches, and index the rows.

        Rows are read for every item. A cache outside would compare whole tables to find equal ones.
        """
        object.__setattr__(self, "_hash", hash((self.batches, self.subnets, self.passes)))
        self._rows.update({(entry.owner, entry.batch_id, entry.of_pass): entry.rows for entry in self.batches})

    def __hash__(self) -> int:
        return self._hash

    def check(self, *, num_blocks: int, microbatches: int, batches: Mapping[str, int]) -> None:
        """Refuse a table that does not fit the blocks, micro-batches, and number of batches of each owner."""
        if self.subnets < 1:
            raise PlanError(f"operations have {self.subnets} subnets a block, it has to be at least 1")
        if not 1 <= self.passes <= microbatches:
            raise PlanError(f"operations repeat after {self.passes} passes, it has to be 1 to {microbatches}")
        length, seen = num_blocks * self.subnets, set()
        for entry in self.batches:
            name = f"operations of batch {entry.batch_id} of owner {entry.owner}"
            if not 0 <= entry.of_pass < self.passes:
                raise PlanError(f"{name} are of pass {entry.of_pass}, passes are 0 to {self.passes - 1}")
            if (entry.owner, entry.batch_id, entry.of_pass) in seen:
                raise PlanError(f"{name} stand twice")
            seen.add((entry.owner, entry.batch_id, entry.of_pass))
            if not 0 <= entry.batch_id < batches.get(entry.owner, 0):
                known = ", ".join(f"{owner} with {count}" for owner, count in batches.items())
                raise PlanError(f"{name} are of no batch of this run, whose owners have batches: {known}")
            if len(entry.rows) != microbatches:
                raise PlanError(f"{name} are for {len(entry.rows)} micro-batches, a batch has {microbatches}")
            for row in entry.rows:
                if len(row) != length or not CODES.issuperset(row):
                    raise PlanError(f"{name} have a row {row!r}, it has to be {length} of {', '.join(sorted(CODES))}")

    def rows_of(self, owner: str, batch_id: int, at_pass: int = 0) -> tuple[str, ...]:
        """Return the rows of one batch in a pass over its owner's rows, counted from 0; empty = all full."""
        return self._rows.get((owner, batch_id, at_pass % self.passes), ())

    # ---- files ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Write as a JSON-compatible table; equal operations of several batches are written once.

        ``rows`` has [micro-batches, codes of each, packed codes], in the order of first use. A batch is [owner, id,
        index in ``rows``], followed by its pass if that is not 0.
        """
        places: dict[tuple[str, ...], int] = {}
        batches = [
            [entry.owner, entry.batch_id, places.setdefault(entry.rows, len(places)), *filter(None, [entry.of_pass])]
            for entry in self.batches
        ]
        rows = [[len(each), len(each[0]) if each else 0, pack("".join(each))] for each in places]
        passes = {"passes": self.passes} if self.passes > 1 else {}
        return {"subnets": self.subnets, **passes, "rows": rows, "batches": batches}

    @staticmethod
    def from_json(value: object, *, where: str = "operations") -> Operations:
        """Parse the table of ``to_json``; raises ``PlanError`` for a field that is missing, unknown or not valid."""
        if not isinstance(value, Mapping):
            raise PlanError(f"{where} has to be a table; plan anew")
        check_keys(value, ("subnets", "passes", "rows", "batches"), where=where, error=PlanError)
        subnets = read_value(int, value.get("subnets"), where=f"{where}.subnets", error=PlanError)
        passes = read_value(int, value.get("passes", 1), where=f"{where}.passes", error=PlanError)
        entries, codes = value.get("batches"), value.get("rows")
        if not isinstance(entries, list):
            raise PlanError(f"{where}.batches has to be a list; plan anew")
        if not isinstance(codes, list):
            raise PlanError(f"{where}.rows has to be a list; plan anew")
        shared: dict[str, str] = {}
        rows = [_rows(each, shared, f"{where}.rows[{at}]") for at, each in enumerate(codes)]
        batches = tuple(_batch(entry, rows, f"{where}.batches[{at}]") for at, entry in enumerate(entries))
        if tuple(dict.fromkeys(entry.rows for entry in batches)) != tuple(rows):
            raise PlanError(f"{where}.rows have to be distinct and in the order in which batches use them; plan anew")
        return Operations(subnets=subnets, passes=passes, batches=batches)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON form."""
        return json_digest(self.to_json())


@functools.lru_cache(maxsize=64)
def block_rows(table: Operations) -> frozenset[tuple[str, str]]:
    """Return every (owner, row of whole blocks) of the table."""
    return frozenset((entry.owner, block_row(row, table.subnets)) for entry in table.batches for row in entry.rows)


def _any_bool(*values: object) -> bool:
    return any(isinstance(value, bool) for value in values)


def _rows(value: object, shared: dict[str, str], where: str) -> tuple[str, ...]:
    match value:
        case [int(count), int(length), str(packed)] if min(count, length) > 0 and not _any_bool(count, length):
            codes = unpack(packed, count * length)
            patterns = (codes[at : at + length] for at in range(0, len(codes), length))
            return tuple(shared.setdefault(row, row) for row in patterns)
    raise PlanError(f"{where} is not [micro-batches, codes of each, packed codes]; plan anew")


def _batch(value: object, rows: Sequence[tuple[str, ...]], where: str) -> BatchOperations:
    match value:
        case [str(owner), int(batch_id), int(at), *rest] if 0 <= at < len(rows) and not _any_bool(batch_id, at):
            match rest:
                case []:
                    return BatchOperations(owner=owner, batch_id=batch_id, rows=rows[at])
                case [int(of_pass)] if of_pass > 0 and not _any_bool(of_pass):
                    return BatchOperations(owner=owner, batch_id=batch_id, rows=rows[at], of_pass=of_pass)
    raise PlanError(
        f"{where} is not [owner, batch id, place in rows], of {len(rows)}, with a pass from 1 on behind it; plan anew"
    )


SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledTable:
    """A table that holds from the train turn that begins at ``step`` on."""

    step: int
    operations: Operations
    origin: Annotated[TableOrigin | None, LATER] = None

    def to_json(self) -> dict[str, Any]:
        """Write as a JSON-compatible table."""
        return to_table(self)

    @staticmethod
    def from_json(value: object, *, where: str = "the table") -> ScheduledTable:
        """Parse the table of ``to_json``; raises ``PlanError`` for a field that is missing, unknown or not valid."""
        if not isinstance(value, Mapping):
            raise PlanError(f"{where} has to be an object with step and operations; take another file")
        return read_dataclass(ScheduledTable, value, where=where, error=PlanError)


def check_tables(tables: Sequence[ScheduledTable]) -> None:
    """Refuse tables that are not of one run, with ``PlanError``: none for step 0, out of order, or other subnets."""
    steps = [table.step for table in tables]
    if steps[:1] != [0] or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise PlanError(f"operation tables have to begin at step 0 and be in order, they are of steps {steps}")
    if len({table.operations.subnets for table in tables}) != 1:
        raise PlanError("operation tables are of different numbers of subnets a block; they have to be of one run")


def table_before(tables: Sequence[ScheduledTable], step: int) -> Operations | None:
    """Return the table in force just before a turn boundary; None if there was none."""
    return next((table.operations for table in reversed(tables) if table.step < step), None)


def tables_to_json(tables: Sequence[ScheduledTable]) -> dict[str, Any]:
    """Return the content of ``operations.json``."""
    return {"schema": SCHEMA, "tables": [table.to_json() for table in tables]}


def tables_text(tables: Sequence[str]) -> str:
    """Return the text of ``operations.json`` for tables in JSON."""
    return f'{{"schema": {SCHEMA}, "tables": [{", ".join(tables)}]}}'


def tables_from_json(value: object) -> tuple[ScheduledTable, ...]:
    """Parse the content of ``operations.json``, or a single bare table; raises ``PlanError``."""
    if not isinstance(value, Mapping):
        raise PlanError("operation tables have to be a JSON object; give the operations.json of a run")
    if "tables" not in value:
        return (ScheduledTable(step=0, operations=Operations.from_json(value)),)
    check_keys(value, ("schema", "tables"), where="", error=PlanError)
    entries = value["tables"]
    if value.get("schema") == SCHEMA and entries == []:
        raise PlanError("operation tables are none: the list has no table; the run has chosen none yet")
    if value.get("schema") != SCHEMA or not isinstance(entries, list):
        raise PlanError(
            f"operation tables of schema {value.get('schema')!r} are not a list of schema {SCHEMA}; use the version "
            "that wrote them"
        )
    tables = tuple(ScheduledTable.from_json(entry, where=f"tables[{at}]") for at, entry in enumerate(entries))
    check_tables(tables)
    return tables


class Score(enum.StrEnum):
    """Value of a subnet for a micro-batch, from its weights w and their gradients g for that micro-batch."""

    FISHER = "fisher"  # sum of g * g
    WEIGHT_MAGNITUDE = "weight-magnitude"  # sum of |w|, the same for every micro-batch
    GRADIENT_MAGNITUDE = "gradient-magnitude"  # sum of |g|
    TAYLOR = "taylor"  # sum of |g * w|

    @property
    def needs_gradient(self) -> bool:
        """Whether the score needs a backward."""
        return self is not Score.WEIGHT_MAGNITUDE


class ScoredWeights(enum.StrEnum):
    """Weights of a block that a score is of."""

    BASE = "base"  # those of the base model, trained or frozen
    ADAPTER = "adapter"  # those that train beside them (D2FT, section II-D)


class Policy(enum.StrEnum):
    """Rule that makes an operation table from scores."""

    STANDARD = "standard"  # everything is full
    TWO_STAGE = "two-stage"  # D2FT, Algorithm 1: full operations first, forward-only ones among the rest
    JOINT = "joint"  # one multiple-choice knapsack over both
    RANDOM = "random"  # each subnet draws by lot, with the same counts
    MAGNITUDE = "magnitude"  # subnets of small weights are passed by for all micro-batches
    MAGNITUDE_GRADIENT = "magnitude-gradient"  # so are subnets of small weights and gradients

    @property
    def is_pruning(self) -> bool:
        """Whether whole subnets are skipped, for all micro-batches until the next choice."""
        return self in (Policy.MAGNITUDE, Policy.MAGNITUDE_GRADIENT)

    @property
    def breaks_ties(self) -> bool:
        """Whether equal scores occur and are decided by ``TieBreak``."""
        return self in (Policy.TWO_STAGE, Policy.JOINT)


UNDEFINED_POLICIES: Final = {
    "gshard": "the paper compares with it, but does not say where the gating networks of a pre-trained model and their "
    "weights come from, how many experts a row takes, and what capacity an expert has"
}
"""Policies that the paper does not describe completely -> missing facts."""


class TieBreak(enum.StrEnum):
    """Preference of a subnet among micro-batches with equal scores, as weight magnitudes always are."""

    SPREAD = "spread"  # other ones than its neighbours, so that each micro-batch has as many full subnets
    TOGETHER = "together"  # the same ones as all others, so that whole micro-batches are full, or pass all blocks by


PolicyWord = Annotated[str, OneOf(tuple(word.value for word in Policy), UNDEFINED_POLICIES)]
ScoreWord = Annotated[str, OneOf(tuple(word.value for word in Score))]
WeightsWord = Annotated[str, OneOf(tuple(word.value for word in ScoredWeights))]
TieWord = Annotated[str, OneOf(tuple(word.value for word in TieBreak))]

PRUNING_STEPS: Final = 16
"""Steps between choices of the pruning policies (D2FT, section III-A)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCapacity:
    """Capacity of each subnet of one block for the micro-batches of one batch.

    Attributes:
        full: for full operations, in seconds or any other measure: C^pf.
        forward_only: for forward-only operations: C^po.
        forward: cost of a forward for one row, c^f.
        backward: cost of a backward for one row, c^b.
    """

    full: float
    forward_only: float
    forward: float
    backward: float

    def __post_init__(self) -> None:
        """Refuse negative or infinite values; convert 0 to 0.0, as JSON reads it, so that digests are equal."""
        for entry in dataclasses.fields(self):
            object.__setattr__(self, entry.name, float(getattr(self, entry.name)))
        values = dataclasses.astuple(self)
        if not all(math.isfinite(value) and value >= 0 for value in values) or self.forward + self.backward <= 0:
            raise PlanError(f"capacities and costs have to be at least 0 and finite, not {list(values)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Settings by which a run chooses its operation tables.

    Attributes:
        capacities: of each block, from block 0 on; a single one holds for all blocks.
        backward_score: a value of ``Score``, by which full operations are chosen.
        forward_score: a value of ``Score``, by which forward-only operations are chosen.
        score_scale: weight of a forward score against a backward score in a joint choice, each divided by its mean over
            the job.
        refresh_steps: a table is chosen anew at the first turn after this number of steps; 0 = once, before training.
        groups: ranges [start, stop) of blocks, ascending; all blocks of one have the same operations, so that their
            host can be skipped. Blocks in none of them have operations of their own.
        rotate: whether each further pass prefers the next micro-batch where scores tie; see ``passes``.
        is_counted: whether capacities are numbers of micro-batches, whatever their rows, so that counts are exact;
            otherwise numbers of rows, which no choice exceeds.
        tables: of another run; they hold from their steps on, and nothing is scored or chosen.
    """

    policy: PolicyWord
    subnets: int
    capacities: tuple[BlockCapacity, ...]
    backward_score: ScoreWord = Score.WEIGHT_MAGNITUDE.value
    forward_score: ScoreWord = Score.FISHER.value
    score_scale: Annotated[float, Bounds(gt=0, lt=math.inf)] = 1.0
    refresh_steps: int = 0
    groups: tuple[tuple[int, ...], ...] = ()
    ties: TieWord = TieBreak.SPREAD.value
    is_counted: bool = False
    rotate: Annotated[bool, LATER] = False
    tables: Annotated[tuple[ScheduledTable, ...], LATER] = ()
    scored_weights: Annotated[WeightsWord, LATER] = ScoredWeights.BASE.value

    def __post_init__(self) -> None:
        """Refuse an unknown policy or score, and numbers out of range."""
        check_fields(self, where="operations", error=PlanError)
        if self.subnets < 1 or self.refresh_steps < 0 or not (self.capacities or self.tables):
            raise PlanError("operations need at least one subnet a block, one capacity, and no negative refresh_steps")
        if self.tables:
            check_tables(self.tables)
        object.__setattr__(self, "score_scale", float(self.score_scale))
        if self.groups and self.subnets != 1:
            raise PlanError(f"operations of groups of blocks have 1 subnet a block, not {self.subnets}")
        at = 0
        for group in self.groups:
            if len(group) != 2 or not at <= group[0] < group[1]:
                raise PlanError(f"operations.groups have {list(group)}, it has to be [start, stop) from {at} on")
            at = group[1]

    @property
    def by_slice(self) -> bool:
        """Whether whole ranges of blocks have the same operations."""
        return bool(self.groups)

    @property
    def prunes(self) -> bool:
        """Whether the policy is a pruning one, and no tables are given."""
        return not self.tables and Policy(self.policy).is_pruning

    @property
    def scores(self) -> tuple[Score, ...]:
        """Scores to be gathered for the policy."""
        if self.tables:
            return ()
        match Policy(self.policy):
            case Policy.STANDARD | Policy.RANDOM:
                return ()
            case Policy.MAGNITUDE:
                return (Score.WEIGHT_MAGNITUDE,)
            case Policy.MAGNITUDE_GRADIENT:
                return (Score.WEIGHT_MAGNITUDE, Score.GRADIENT_MAGNITUDE)
        if self.policy == Policy.TWO_STAGE and not any(each.forward_only for each in self.capacities):
            return (Score(self.backward_score),)
        return tuple(dict.fromkeys((Score(self.backward_score), Score(self.forward_score))))

    def passes(self, microbatches: int) -> int:
        """Passes over an owner's rows after which a chosen table repeats; 1 where no choice is by tie."""
        return microbatches if self.rotate and Policy(self.policy).breaks_ties else 1

    def capacity(self, block: int) -> BlockCapacity:
        """Return the capacity of one block's subnets."""
        return self.capacities[block] if len(self.capacities) > 1 else self.capacities[0]

    # ---- given tables -----------------------------------------------------------------------------

    @staticmethod
    def given(tables: Sequence[ScheduledTable]) -> Choice:
        """Return the choice that repeats the tables of another run."""
        check_tables(tables)
        return Choice(
            policy=Policy.STANDARD.value, subnets=tables[0].operations.subnets, capacities=(), tables=tuple(tables)
        )

    def given_at(self, step: int) -> Operations | None:
        """Return the given table that begins to hold at a step; None if there is none."""
        return next((table.operations for table in self.tables if table.step == step), None)
