"""Figures of an evaluation (classes, entities, numbers) from counts and sums of all owners, and ROUGE-L of texts.

An owner sends sums over its rows of a whole evaluation; the coordinator adds them up over owners.

Classes: ``class:TRUE:PREDICTED`` with indices of classes counts rows. Example: of 2 rows of class 0, one predicted as
class 1, an owner sends ``class:0:0`` = 1 and ``class:0:1`` = 1.

Entities: ``entity:TYPE:KIND`` with the index of a type counts entities, predicted ones, and predicted ones that are
right, with the same words and type. A tag is ``O``, or ``B-`` or ``I-`` with the type of an entity. ``B-`` begins one;
so does ``I-`` after a word of another type or none. Example: ``B-PER I-PER O I-LOC`` has a person of two words and a
place of one.

Numbers: Pearson's correlation and the share of explained variance follow from sums over all owners. Ranks do not:
Spearman's correlation is reported only where one owner has all rows. Sums of squares lose the digits that a large mean
takes: with a mean a thousand times the spread, six of sixteen.

Source: the CoNLL-2003 shared task, ``conlleval``; Lin 2004, ROUGE: A Package for Automatic Evaluation of Summaries.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

MAX_CLASSES: Final = 100
"""With more classes than this an evaluation has no table of counts."""

MIN_ROWS: Final = 10
"""An owner of fewer evaluation rows counts no classes: a count of one row would be its label."""

_PAIR: Final = re.compile(r"class:(\d{1,3}):(\d{1,3})")

Table = tuple[tuple[int, ...], ...]


def name_of(true: int, predicted: int) -> str:
    """Name the count of rows of class ``true`` that were predicted as class ``predicted``: ``class:0:1``."""
    return f"class:{true}:{predicted}"


def pair_of(name: str) -> tuple[int, int] | None:
    """Parse ``class:TRUE:PREDICTED``; None of any other name."""
    match = _PAIR.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def table_of(values: Mapping[str, float], num_classes: int) -> Table:
    """Build the confusion matrix ``[true][predicted]``; empty where all are 0 or beyond ``MAX_CLASSES``.

    Counts of classes beyond ``num_classes`` are ignored.
    """
    pairs = {pair: round(value) for name, value in values.items() if (pair := pair_of(name)) is not None}
    if not pairs or num_classes > MAX_CLASSES:
        return ()
    indices = range(num_classes)
    table = tuple(tuple(pairs.get((true, predicted), 0) for predicted in indices) for true in indices)
    return table if any(map(any, table)) else ()


def class_figures(table: Table, labels: Sequence[str]) -> dict[str, Any]:
    """Compute precision, recall and F1 of each class, their unweighted means, and Matthews correlation.

    A class without rows and without predictions is left out of the means; 0 / 0 is 0. Example: rows of classes a, a, b
    predicted as a, b, b: a has precision 1, recall 1/2 and F1 2/3, b has 1/2, 1 and 2/3; the correlation is 1/2.

    Returns:
        ``macro_f1``, ``macro_precision``, ``macro_recall``, ``matthews``, the ``counted_rows``, ``classes`` by name,
        and ``confusion``. Rows of owners below ``MIN_ROWS`` are in none of them.
    """
    classes: dict[str, dict[str, float]] = {}
    for index, label in enumerate(labels):
        right, rows, said = table[index][index], sum(table[index]), sum(row[index] for row in table)
        if rows or said:
            precision, recall = share_of(right, said), share_of(right, rows)
            f1 = share_of(2 * right, rows + said)
            classes[label] = {"rows": rows, "predicted": said, "precision": precision, "recall": recall, "f1": f1}
    means = {
        f"macro_{name}": sum(figures[name] for figures in classes.values()) / len(classes)
        for name in ("f1", "precision", "recall")
    }
    means["matthews"] = matthews(table)
    means["counted_rows"] = sum(map(sum, table))
    return {**means, "classes": classes, "confusion": {"labels": list(labels), "counts": [list(row) for row in table]}}


def matthews(table: Table) -> float:
    """Matthews correlation of true and predicted classes, from -1 to 1; 0 where all rows are or get one class.

    Source: Gorodkin, Comparing two K-category assignments by a K-category correlation coefficient; of two classes it is
    the phi coefficient, which GLUE's CoLA is judged by.
    """
    true, said = [sum(row) for row in table], [sum(column) for column in zip(*table, strict=True)]
    rows, right = sum(true), sum(table[index][index] for index in range(len(table)))
    spread = math.sqrt(rows**2 - sum(count**2 for count in true)) * math.sqrt(rows**2 - sum(count**2 for count in said))
    return _correlation(right * rows - sum(map(operator.mul, true, said)), spread) if spread else 0.0


def _correlation(covariance: float, spread: float) -> float:
    """Divide a covariance by the product of both deviations; rounding leads to no more than 1 and no less than -1."""
    return min(1.0, max(-1.0, covariance / spread))


def share_of(part: float, whole: float) -> float:
    """Divide; 0 where ``whole`` is 0."""
    return part / whole if whole else 0.0


TRUE: Final = "true"
PREDICTED: Final = "predicted"
RIGHT: Final = "right"
KINDS: Final = (TRUE, PREDICTED, RIGHT)
OUTSIDE: Final = "O"

_NAME: Final = re.compile(r"entity:(\d{1,3}):(true|predicted|right)")
_TAG: Final = re.compile(r"([BI])-(.+)")


class Entity(NamedTuple):
    """An entity: the words ``[start, stop)`` of a text, of the type ``kind``."""

    kind: str
    start: int
    stop: int


def entity_types(labels: Sequence[str]) -> tuple[str, ...]:
    """List the types of entities in tag names, sorted; none if some tag is no ``O``, ``B-TYPE`` or ``I-TYPE``.

    Example: ``B-PER, I-PER, O`` have the type PER; ``NOUN, VERB`` have none. More than ``MAX_CLASSES`` types are none,
    too.
    """
    matches = [_TAG.fullmatch(label) for label in labels if label != OUTSIDE]
    types = sorted({match[2] for match in matches if match})
    return tuple(types) if all(matches) and len(types) <= MAX_CLASSES else ()


def entities_of(tags: Sequence[str]) -> frozenset[Entity]:
    """Find the entities of a text from the tags of its words."""
    entities: set[Entity] = set()
    kind, start = "", 0
    for index, tag in enumerate([*tags, OUTSIDE]):
        match = _TAG.fullmatch(tag)
        goes_on = match is not None and match[1] == "I" and match[2] == kind
        if goes_on:
            continue
        if kind:
            entities.add(Entity(kind, start, index))
        kind, start = (match[2], index) if match else ("", 0)
    return frozenset(entities)


def count_name(type_index: int, kind: str) -> str:
    """Name the count of entities of a type; ``kind`` is one of ``KINDS``."""
    return f"entity:{type_index}:{kind}"


def is_entity_count(name: str) -> bool:
    """Whether a name is of the form ``entity:TYPE:KIND``."""
    return _NAME.fullmatch(name) is not None


def entity_figures(values: Mapping[str, float], labels: Sequence[str]) -> dict[str, Any]:
    """Compute precision, recall and F1 over all entities, and of each type.

    0 / 0 is 0. Example: of 4 entities 3 were predicted, and 2 of these are right: precision 2/3, recall 1/2, F1 4/7.

    Returns:
        ``entity_f1``, ``entity_precision``, ``entity_recall``, the number of ``entities``, and ``entity_types`` by
        name; empty without counts of entities.
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
            name: {"entities": counted[0], "predicted": counted[1], **_figures(*counted)}
            for name, counted in counts.items()
            if any(counted)
        },
    }


def _figures(true: int, predicted: int, right: int) -> dict[str, float]:
    precision, recall = share_of(right, predicted), share_of(right, true)
    return {"f1": share_of(2 * right, true + predicted), "precision": precision, "recall": recall}


_WORD: Final = re.compile(r"\w+")


def rouge_l(said: str, references: Sequence[str]) -> float:
    """Compute ROUGE-L of a text, its F1 with the best of several references: 0 to 1.

    Words are runs of letters, digits and underscores, in lower case, without stemming. Of a text of n words and a
    reference of m with a longest common subsequence of l words, F1 is 2 l / (n + m). Example: "Police kill the gunman"
    for "police killed the gunman." has l = 3 and F1 3/4.
    """
    words = _WORD.findall(said.lower())
    each = [_WORD.findall(reference.lower()) for reference in references]
    return max((share_of(2 * _common(words, other), len(words) + len(other)) for other in each), default=0.0)


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence.

    A bit is 0 where one more word of ``first`` is matched. Source: Hyyrö 2004, Bit-parallel LCS-length computation
    revisited.
    """
    places: dict[str, int] = {}
    for index, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << index
    every = (1 << len(first)) - 1
    bits = every
    for word in second:
        matched = bits & places.get(word, 0)
        bits = (bits + matched | bits - matched) & every
    return len(first) - bits.bit_count()


_ROWS: Final = "numbers"
_OWNERS: Final = "ranked_owners"
_SPEARMAN: Final = "spearman_sum"
_TRUE, _TRUE_SQUARES = "true_sum", "true_squares"
_SAID, _SAID_SQUARES = "predicted_sum", "predicted_squares"
_PRODUCTS: Final = "products_sum"
SIGNED: Final = (_TRUE, _TRUE_SQUARES, _SAID, _SAID_SQUARES, _PRODUCTS, _SPEARMAN)
"""Names of sums that are no counts: they may be negative, or too large for an exact integer."""

_NOTHING: Final = 1e-12
"""A variance below this share of the mean square is rounding."""


def number_sums(true: Sequence[float], predicted: Sequence[float]) -> tuple[tuple[str, float], ...]:
    """Sum an owner's rows as (name, sum) pairs; empty where a prediction is not finite."""
    if not all(map(math.isfinite, predicted)):
        return ()
    sums = {
        _ROWS: float(len(true)),
        _TRUE: math.fsum(true),
        _TRUE_SQUARES: math.fsum(value * value for value in true),
        _SAID: math.fsum(predicted),
        _SAID_SQUARES: math.fsum(value * value for value in predicted),
        _PRODUCTS: math.fsum(first * second for first, second in zip(true, predicted, strict=True)),
        _OWNERS: 1.0,
    }
    rho = spearman(true, predicted)
    return tuple((sums | ({} if rho is None else {_SPEARMAN: rho})).items())


def number_figures(values: Mapping[str, float]) -> dict[str, Any]:
    """Compute correlations from the sums of all owners; one that none reports is 0.

    Returns:
        ``pearson`` and ``r2``, None where all numbers are equal, and their ``counted_rows``; ``spearman`` where one
        owner has all rows that are evaluated. Empty without sums.
    """
    count = values.get(_ROWS, 0.0)
    if not count:
        return {}
    values = {**dict.fromkeys(SIGNED[:-1], 0.0), **values}
    true, said = values[_TRUE] / count, values[_SAID] / count
    true_variance = _variance(values[_TRUE_SQUARES] / count, true)
    said_variance = _variance(values[_SAID_SQUARES] / count, said)
    covariance = values[_PRODUCTS] / count - true * said
    error = (values[_TRUE_SQUARES] - 2 * values[_PRODUCTS] + values[_SAID_SQUARES]) / count
    both = math.sqrt(true_variance) * math.sqrt(said_variance)
    r2 = 1 - max(0.0, error) / true_variance if true_variance else math.nan
    figures: dict[str, Any] = {
        "pearson": _correlation(covariance, both) if both else None,
        "r2": r2 if math.isfinite(r2) else None,
        "counted_rows": round(count),
    }
    if values.get(_OWNERS) == 1 and count == values.get("count") and _SPEARMAN in values:
        figures["spearman"] = values[_SPEARMAN]
    return figures


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Compute Spearman's rank correlation; equal numbers share their mean rank; None where a side is constant.

    Example: 1, 2, 3 and 10, 30, 20 give 0.5.
    """
    try:
        return min(1.0, max(-1.0, statistics.correlation(_ranks(first), _ranks(second))))
    except statistics.StatisticsError:  # also of fewer than two
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    ranks, first = [0.0] * len(values), 0
    for _, equal in itertools.groupby(sorted(range(len(values)), key=values.__getitem__), values.__getitem__):
        places = list(equal)
        for place in places:
            ranks[place] = first + (len(places) - 1) / 2
        first += len(places)
    return ranks


def _variance(mean_square: float, mean: float) -> float:
    variance = mean_square - mean * mean
    return variance if variance > _NOTHING * mean_square else 0.0
