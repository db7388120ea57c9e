"""What operation tables change in memory: fewer graphs, the tables themselves, and a pass that gathers scores.

A graph of a block with half of its subnets active keeps all but half of what the subnets keep. A run may count on that
only where it is sure for every batch: with tables that are given, and where lots are drawn under capacities. A run that
gathers scores keeps whole graphs while it does, and the inputs of its linear layers besides.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

from ringtune.costs.profile import ModelFacts
from ringtune.schedule.course import TABLES_AT_ONCE, Course
from ringtune.schedule.operations.choice import Policy
from ringtune.schedule.operations.codes import FULL, block_row, pattern_of, share
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.rows.batches import num_batches
from ringtune.schedule.spreading.choosers import choosers_of, limits_of

SCORE_WORK_BYTES: Final = 2 << 20
"""What reducing a gradient to scores takes besides the gradient: chunks in float64."""

_SCORES_BYTES: Final = 200
_SCORE_BYTES: Final = 64
_NUMBER_BYTES: Final = 40
_MESSAGE_BYTES: Final = 700
"""What Python takes for a block's scores, for one of them and for a number in it, and for a message, all measured."""

_ROW_BYTES: Final = 260
_BATCH_BYTES: Final = 400
"""What Python takes for a row and for a batch besides their codes, measured: texts, tuples, entries of caches."""


class KeptGraphs(NamedTuple):
    """What the graphs of one item keep at most, for each block.

    Attributes:
        micros: micro-batches for which the block keeps a graph.
        shares: shares of the block's subnets in these graphs, added up over the micro-batches.
        begins: micro-batches for which its graph begins with the block, because the one below it has none.
    """

    micros: tuple[int, ...]
    shares: tuple[float, ...]
    begins: tuple[int, ...]

    def inputs(self, start: int, stop: int, microbatches: int) -> int:
        """Inputs that the graphs of blocks [start, stop) keep at most: one for each run of blocks with a graph.

        Of two neighbours a graph begins with one at most.
        """
        if start >= stop:
            return 0
        found = self.micros[start] + sum(self.begins[start + 1 : stop])
        return min(found, microbatches * -(-(stop - start) // 2))


def subnet_token_bytes(model: ModelFacts, item_bytes: int, *, trains_own_weights: bool) -> float:
    """Bytes of a block's graph per padded token that all its subnets keep together.

    These are queries, keys, values and attention output, and what is as wide as the feed-forward part; norms and
    adapters keep theirs whatever the share. Measured by ``tests/edge/model/test_pattern_sizes.py``.
    """
    inner = (model.inner_kept + trains_own_weights) * model.intermediate_size
    return (4 * (model.attention_width or model.hidden_size) + inner) * item_bytes


def score_token_bytes(model: ModelFacts, item_bytes: int) -> int:
    """Bytes per padded token and block that a graph keeps besides where scores are gathered.

    A linear layer whose weights get a gradient keeps its input. Where own weights train it does so anyway.
    """
    attention = model.attention_width or model.hidden_size
    return (2 * model.hidden_size + attention + model.intermediate_size) * item_bytes


def largest_gradient_bytes(model: ModelFacts, item_bytes: int) -> int:
    """Bytes of the largest gradient of one tensor of a block; some models have queries, keys and values in one."""
    attention = max(3 * model.hidden_size, model.attention_width)
    return max(model.intermediate_size, attention) * model.hidden_size * item_bytes


def gathers_scores(course: Course) -> bool:
    """Whether a run has passes that gather scores, which build the whole graph of every block that may train."""
    return course.choice is not None and bool(course.choice.scores)


def needs_gradients(course: Course) -> bool:
    """Whether the scores of a run need gradients of the weights of its blocks."""
    return course.choice is not None and any(score.needs_gradient for score in course.choice.scores)


@functools.lru_cache(maxsize=64)
def block_scores_bytes(course: Course) -> int:
    """Bytes of one block's scores for all batches, until they are reported; 0 where a run gathers none.

    A node holds them as numbers until the end of a turn, and then as messages that wait to be sent. Example: two
    scores of 6 subnets for 600 batches of 4 micro-batches are 2.8 MB.
    """
    if course.choice is None:
        return 0
    scores, subnets = len(course.choice.scores), course.choice.subnets
    numbers = course.microbatches * (_SCORES_BYTES + scores * (_SCORE_BYTES + subnets * _NUMBER_BYTES))
    message = _MESSAGE_BYTES + 2 * course.microbatches * scores * subnets * 8
    batches = sum(course.num_scored(owner) for owner in course.owners)
    return batches * (numbers + message) if scores else 0


@functools.lru_cache(maxsize=64)
def kept_graphs(course: Course) -> KeptGraphs | None:
    """What graphs of one item keep at most, whatever the batch; None where that may be all of every block."""
    choice = course.choice
    if gathers_scores(course):
        return None
    if choice is not None and choice.tables:
        return _most([_of_table(course, given.operations) for given in choice.tables])
    if choice is not None:
        return _of_capacities(course) if choice.policy == Policy.RANDOM else None
    return _of_table(course, course.operations) if course.operations is not None else None


def _most(each: Sequence[KeptGraphs | None]) -> KeptGraphs | None:
    found = [kept for kept in each if kept is not None]
    if len(found) < len(each):
        return None

    def most(field: int) -> tuple[float, ...]:
        return tuple(map(max, zip(*(kept[field] for kept in found), strict=True)))

    return KeptGraphs(tuple(map(int, most(0))), most(1), tuple(map(int, most(2))))


def _of_table(course: Course, table: Operations) -> KeptGraphs | None:
    """What a table says of every batch of every owner; None if it leaves a batch out, which is all full."""
    if len(table.batches) < sum(num_batches(owner.train_rows, course.batch_size) for owner in course.owners):
        return None
    return _most([_of_rows(rows, course.num_blocks, table.subnets) for rows in {each.rows for each in table.batches}])


def _of_rows(rows: tuple[str, ...], num_blocks: int, subnets: int) -> KeptGraphs:
    codes = [block_row(row, subnets) for row in rows]
    blocks = range(num_blocks)
    micros = tuple(sum(code[block] == FULL for code in codes) for block in blocks)
    shares = tuple(sum(share(pattern_of(row, block, subnets), FULL) for row in rows) for block in blocks)
    begins = tuple(
        sum(code[block] == FULL and (not block or code[block - 1] != FULL) for code in codes) for block in blocks
    )
    return KeptGraphs(micros, shares, begins)


def _of_capacities(course: Course) -> KeptGraphs:
    """What capacities allow each chooser, whichever micro-batches it draws; blocks without one are all full."""
    parts, subnets = course.microbatch_sizes(), course.subnets
    micros, shares = [len(parts)] * course.num_blocks, [float(len(parts))] * course.num_blocks
    for chooser in choosers_of(course):
        limits = limits_of(course, chooser, parts)
        most = min(len(parts), limits.full // min(limits.costs))
        for block in range(chooser.start, chooser.stop):
            if chooser.subnet == 0:
                micros[block], shares[block] = 0, 0.0
            micros[block] = most if subnets == 1 else len(parts) if most else micros[block]
            shares[block] += min(limits.full / max(limits.costs), most) / subnets
    return KeptGraphs(tuple(micros), tuple(shares), tuple(micros))


@functools.lru_cache(maxsize=64)
def tables_bytes(course: Course) -> int:
    """Bytes of the operation tables that every node of a run holds at most; 0 where it has none.

    A row is a text, and so are the operations of whole blocks that are looked up of it. Example: 600 batches of 4
    micro-batches, 12 blocks and 6 subnets are 1.1 MB a table.
    """
    if not course.may_skip:
        return 0
    batches = sum(num_batches(owner.train_rows, course.batch_size) for owner in course.owners)
    row_bytes = _ROW_BYTES + course.num_blocks * (course.subnets + 1)
    return _num_tables(course) * batches * (_BATCH_BYTES + course.microbatches * row_bytes)


def _num_tables(course: Course) -> int:
    choice = course.choice
    if choice is None:
        return 1
    if choice.tables:  # the plan has them all, and a grant brings each once more
        return len(choice.tables) + min(TABLES_AT_ONCE, len(choice.tables))
    every = choice.refresh_steps
    return min(TABLES_AT_ONCE, 1 + (course.num_steps // every if every else 0))
