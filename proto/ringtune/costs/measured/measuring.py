"""What is measured for a job, and in which order: shape, sizes, messages, and who with whom.

Links are measured in rounds of pairs, as in a tournament: within a round a node is in one pair at most, and so is a
machine, because two pairs that share processors would slow each other down.

Source: the circle method for round-robin tournaments (Kirkman 1847).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringtune.costs.profile import ModelFacts, TimedShape
from ringtune.costs.times.seconds import WIRE_ITEM_BYTES
from ringtune.jobs.job import Job
from ringtune.schedule.frozen_weights import FrozenWeights, name_of

_SCALE_BYTES = 4

Pair = tuple[str, str]


class Size(NamedTuple):
    """The size of a micro-batch: rows, and the padded length of each row in tokens."""

    rows: int
    tokens: int


def job_shape(job: Job, *, fixed_tokens: int = 0, subnets: int = 1, frozen: FrozenWeights | None = None) -> TimedShape:
    """The shape that timings for this job belong to: its largest micro-batch, at ``train.max_length`` tokens.

    Args:
        job: batch, micro-batches and longest text.
        fixed_tokens: of every image, whatever ``train.max_length`` is; 0 = texts.
        subnets: of each block, where the job has operations.
        frozen: how frozen weights are held.
    """
    return TimedShape(
        rows=-(-job.train.batch_size // job.train.microbatches),
        tokens=fixed_tokens or job.train.max_length,
        task=job.model.task,
        adapter=job.adapter.config,
        dtype=job.model.dtype,
        wire_dtype=job.wire.dtype,
        optimizer=job.train.optimizer,
        dropout=job.train.dropout,
        subnets=subnets,
        frozen=name_of(frozen),
    )


def timed_sizes(job: Job, *, fixed_tokens: int = 0) -> tuple[Size, ...]:
    """The sizes at which work is timed: the largest micro-batch, and about half of it.

    The half has half the tokens, or half the rows for images, which have one length; it is left out where nothing can
    be halved. Example: 4 rows of 128 tokens are timed at (4, 128) and (4, 64).

    Args:
        job: batch, micro-batches and longest text.
        fixed_tokens: of every image; 0 = texts.
    """
    shape = job_shape(job, fixed_tokens=fixed_tokens)
    whole = Size(shape.rows, shape.tokens)
    half = Size(whole.rows // 2, whole.tokens) if fixed_tokens else Size(whole.rows, whole.tokens // 2)
    return (whole, half) if half.rows and half.tokens else (whole,)


def hidden_bytes(job: Job, model: ModelFacts) -> int:
    """Bytes of the hidden state of the largest micro-batch at full length, with its mask.

    Example: 4 rows of 128 tokens, 384 wide, in float32: 4 * 128 * (4 * 384 + 1) = 786,944.
    """
    shape = job_shape(job, fixed_tokens=model.fixed_tokens)
    scale_bytes = _SCALE_BYTES if job.wire.dtype == "int8" else 0
    token_bytes = model.hidden_size * WIRE_ITEM_BYTES[job.wire.dtype] + scale_bytes + 1
    return shape.rows * shape.tokens * token_bytes


def link_rounds(nodes: Sequence[str], machines: Mapping[str, str]) -> tuple[tuple[Pair, ...], ...]:
    """Pair every two nodes once, in rounds in which no node and no machine is in two pairs.

    Example: four nodes on machines of their own take three rounds of two pairs.

    Args:
        nodes: at least two to have any pair.
        machines: node -> the machine that it is on.

    Returns:
        Rounds; within one no node and no machine is in two pairs.
    """
    rounds: list[tuple[Pair, ...]] = []
    for tournament_round in _tournament(sorted(nodes)):
        rounds += _apart(tournament_round, machines)
    return tuple(rounds)


def _tournament(nodes: Sequence[str]) -> list[list[Pair]]:
    """Pair all nodes in rounds: the first node keeps its seat, the others move on by one a round.

    With an odd number of nodes one rests in each round.
    """
    seats = [*nodes, *([""] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(first, second) for first, second in pairs if first and second])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _apart(pairs: Sequence[Pair], machines: Mapping[str, str]) -> list[tuple[Pair, ...]]:
    """Take a round apart until no machine is in two pairs."""
    rounds: list[list[Pair]] = []
    busy: list[set[str]] = []
    for pair in pairs:
        own = {machines[node] for node in pair}
        for index, others in enumerate(busy):
            if not own & others:
                rounds[index].append(pair)
                others |= own
                break
        else:
            rounds.append([pair])
            busy.append(set(own))
    return [tuple(found) for found in rounds]
