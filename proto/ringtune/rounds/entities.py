"""Find the entities that tags of words say, and compute how many were found from counts.

A tag is ``O``, or ``B-`` or ``I-`` with the type of an entity. ``B-`` begins one; so does ``I-`` where no word of that
type is before it. Example: ``B-PER I-PER O I-LOC`` has a person of two words and a place of one. An entity that was
predicted is right if its words and its type are.

An owner adds its rows up over a whole evaluation and sends only the sums, under the names ``entity:TYPE:KIND`` with the
index of a type: how many entities there are, how many were predicted, and how many of these are right.

Source: the CoNLL-2003 shared task, ``conlleval``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ringtune.rounds.class_counts import MOST_CLASSES, share_of

TRUE: Final = "true"
PREDICTED: Final = "predicted"
RIGHT: Final = "right"
KINDS: Final = (TRUE, PREDICTED, RIGHT)
OUTSIDE: Final = "O"

_NAME: Final = re.compile(r"entity:(\d{1,3}):(true|predicted|right)")
_TAG: Final = re.compile(r"([BI])-(.+)")


class Entity(NamedTuple):
    """Words ``[start, stop)`` of a text that are an entity of a type."""

    kind: str
    start: int
    stop: int


def entity_types(labels: Sequence[str]) -> tuple[str, ...]:
    """Sort the types of entities that tags speak of; none if some tag is no ``O``, ``B-TYPE`` or ``I-TYPE``.

    Example: ``B-PER, I-PER, O`` have the type PER; ``NOUN, VERB`` have none.
    """
    found = [_TAG.fullmatch(label) for label in labels if label != OUTSIDE]
    types = sorted({match[2] for match in found if match})
    return tuple(types) if all(found) and len(types) <= MOST_CLASSES else ()


def entities_of(tags: Sequence[str]) -> frozenset[Entity]:
    """Find the entities of a text by the tags of its words."""
    found: set[Entity] = set()
    kind, start = "", 0
    for index, tag in enumerate([*tags, OUTSIDE]):
        match = _TAG.fullmatch(tag)
        goes_on = match is not None and match[1] == "I" and match[2] == kind
        if goes_on:
            continue
        if kind:
            found.add(Entity(kind, start, index))
        kind, start = (match[2], index) if match else ("", 0)
    return frozenset(found)


def count_name(type_index: int, kind: str) -> str:
    """The name under which entities of a type are counted; ``kind`` is one of ``KINDS``."""
    return f"entity:{type_index}:{kind}"


def is_entity_count(name: str) -> bool:
    """Whether a figure of an evaluation counts entities."""
    return _NAME.fullmatch(name) is not None


def entity_figures(values: Mapping[str, float], labels: Sequence[str]) -> dict[str, Any]:
    """Compute precision, recall and F1 over all entities, and of each type.

    A share of nothing is 0. Example: of 4 entities 3 were predicted, and 2 of these are right: precision 2/3, recall
    1/2, F1 4/7.

    Args:
        values: figures of an evaluation by name, summed over all owners.
        labels: names of the tags.

    Returns:
        ``entity_f1``, ``entity_precision``, ``entity_recall``, the number of ``entities``, and ``entity_types`` by
        name; nothing where nobody counted entities.
    """
    types = entity_types(labels)
    if not types or not any(map(is_entity_count, values)):
        return {}
    counts = {
        name: [round(values.get(count_name(index, kind), 0)) for kind in KINDS] for index, name in enumerate(types)
    }
    of_all = [sum(column) for column in zip(*counts.values(), strict=True)]
    return {
        **{f"entity_{name}": value for name, value in _figures(*of_all).items()},
        "entities": of_all[0],
        "entity_types": {
            name: {"entities": found[0], "predicted": found[1], **_figures(*found)}
            for name, found in counts.items()
            if any(found)
        },
    }


def _figures(true: int, predicted: int, right: int) -> dict[str, float]:
    precision, recall = share_of(right, predicted), share_of(right, true)
    return {"f1": share_of(2 * right, true + predicted), "precision": precision, "recall": recall}
