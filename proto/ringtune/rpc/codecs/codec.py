"""Translates turns and numbers between the messages of the wire and the values of the rules.

Actions travel as words (:mod:`ringtune.schedule.tables.words`). Nothing here trusts its input: what does not read as a
value raises :class:`~ringtune.errors.IntegrityError`.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Mapping
from typing import Final

from ringtune.errors import IntegrityError
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.passage import Passage
from ringtune.schedule.turns.turns import StepKind, Turn
from ringtune.v1 import control_pb2

_NO_TABLES: Final[Mapping[str, Operations]] = types.MappingProxyType({})

# ---- turns -----------------------------------------------------------------------------------------


def turn_to_proto(turn: Turn) -> control_pb2.TurnMessage:
    """Translate a turn into its message; its operation table is named by ``grants.GrantWriter``."""
    return control_pb2.TurnMessage(
        index=turn.index,
        kind=turn.kind.value,
        owner=turn.owner,
        round=turn.round,
        first_seq=turn.first_seq,
        num_items=turn.num_items,
        first_step=turn.first_step,
        first_batch=turn.first_batch,
        unfreeze_at=turn.unfreeze_at,
        enters=[passage.enters for passage in turn.passages],
        keeps=[passage.keeps for passage in turn.passages],
    )


def turn_from_proto(message: control_pb2.TurnMessage, tables: Mapping[str, Operations] = _NO_TABLES) -> Turn:
    """Translate a message into its turn.

    Args:
        message: to translate.
        tables: by digest, that it may name.

    Raises:
        IntegrityError: an unknown kind, no owner, no items, a negative number, unfreezing steps out of order, an
            operation table that did not come, or passages of some items only.
    """
    counts = (message.index, message.round, message.first_seq, message.first_step, message.first_batch)
    steps = tuple(message.unfreeze_at)
    if any(later <= earlier for earlier, later in itertools.pairwise((0, *steps))):
        raise IntegrityError(
            f"turn {message.index} of the grant unfreezes at {list(steps)}; use one version on all machines"
        )
    if not message.owner or message.num_items < 1 or min(counts) < 0:
        raise IntegrityError(f"turn {message.index} of the grant is not readable; use one version on all machines")
    if message.operations and message.operations not in tables:
        raise IntegrityError(
            f"turn {message.index} of the grant has the operation table {message.operations[:12]!r}, which did not "
            "come; use one version on all machines"
        )
    return Turn(
        index=message.index,
        kind=step_kind(message.kind),
        owner=message.owner,
        round=message.round,
        first_seq=message.first_seq,
        num_items=message.num_items,
        first_step=message.first_step,
        first_batch=message.first_batch,
        unfreeze_at=steps,
        operations=tables[message.operations] if message.operations else None,
        passages=_passages(message),
    )


def _passages(message: control_pb2.TurnMessage) -> tuple[Passage, ...]:
    if not len(message.enters) == len(message.keeps) in (0, message.num_items):
        raise IntegrityError(
            f"turn {message.index} of the grant says of {len(message.enters)} items where they enter, and of "
            f"{len(message.keeps)} where they are kept, but has {message.num_items}; use one version on all machines"
        )
    return tuple(map(Passage, message.enters, message.keeps))


def step_kind(text: str) -> StepKind:
    """Read the kind of a turn.

    Raises:
        IntegrityError: there is no such kind.
    """
    try:
        return StepKind(text)
    except ValueError as error:
        known = ", ".join(StepKind)
        raise IntegrityError(f"step kind {text!r} is not one of {known}; use one version on all machines") from error


# ---- numbers ---------------------------------------------------------------------------------------


def numbers_to_proto(values: Iterable[tuple[str, float]]) -> list[control_pb2.Number]:
    """Translate named figures into messages, in the given order."""
    return [control_pb2.Number(name=name, value=value) for name, value in values]


def numbers_from_proto(messages: Iterable[control_pb2.Number]) -> tuple[tuple[str, float], ...]:
    """Translate messages into named figures, in the given order.

    Raises:
        IntegrityError: a figure without a name, or a name that comes twice.
    """
    values = tuple((message.name, message.value) for message in messages)
    names = [name for name, _ in values]
    if "" in names or len(set(names)) != len(names):
        raise IntegrityError(f"figures {names} have no distinct names; use one version on all machines")
    return values
