"""Scores on the wire: one message for each block of each batch, its numbers as packed float64."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ringtune.errors import IntegrityError, PlanError
from ringtune.schedule.operations.scores import BlockScores
from ringtune.v1 import control_pb2

_BYTES: Final = 8
_MOST_VALUES: Final = 1 << 20  # of one message; below the limit of a channel, whatever a sender says


def scores_to_proto(turn: int, scores: Iterable[BlockScores]) -> Iterator[control_pb2.SubnetScores]:
    """Translate the scores of a turn into messages, by batch and block.

    Raises:
        PlanError: a micro-batch of a block is missing, or has other numbers of scores or subnets than its neighbours.
    """
    ordered = sorted(scores, key=lambda entry: (entry.owner, entry.batch_id, entry.block, entry.micro))
    for (owner, batch_id, block), found in itertools.groupby(
        ordered, key=lambda entry: (entry.owner, entry.batch_id, entry.block)
    ):
        entries = list(found)
        shapes = {tuple(len(values) for values in entry.values) for entry in entries}
        sizes = set(next(iter(shapes)))
        if [entry.micro for entry in entries] != list(range(len(entries))) or len(shapes) != 1 or len(sizes) != 1:
            raise PlanError(
                f"the scores of turn {turn} are not complete for batch {batch_id}, block {block}; please report it"
            )
        numbers = [number for entry in entries for values in entry.values for number in values]
        yield control_pb2.SubnetScores(
            turn=turn,
            owner=owner,
            batch_id=batch_id,
            block=block,
            scores=len(entries[0].values),
            subnets=sizes.pop(),
            values=struct.pack(f"<{len(numbers)}d", *numbers),
        )


def scores_from_proto(message: control_pb2.SubnetScores) -> tuple[BlockScores, ...]:
    """Translate a message into its scores, one entry for each micro-batch; a number may be anything, NaN too.

    Raises:
        IntegrityError: the bytes are not whole micro-batches of so many scores and subnets.
    """
    each, size = message.scores * message.subnets, len(message.values)
    if not each or not size or size % (_BYTES * each) or size > _BYTES * _MOST_VALUES:
        raise IntegrityError(
            f"scores of batch {message.batch_id}, block {message.block} are {size} bytes, which are not "
            f"{message.scores} scores of {message.subnets} subnets; use one version on all machines"
        )
    numbers = struct.unpack(f"<{size // _BYTES}d", message.values)
    return tuple(
        BlockScores(
            owner=message.owner,
            batch_id=message.batch_id,
            micro=micro,
            block=message.block,
            values=_rows(numbers[micro * each : (micro + 1) * each], message.subnets),
        )
        for micro in range(len(numbers) // each)
    )


def _rows(numbers: Sequence[float], subnets: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(numbers[at : at + subnets]) for at in range(0, len(numbers), subnets))
