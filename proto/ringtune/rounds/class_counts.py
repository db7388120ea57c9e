"""Count how often rows of each class were predicted as each class, and compute what follows from these counts.

An owner adds its rows up over a whole evaluation and sends only the sums, each under the name ``class:TRUE:PREDICTED``
with indices of classes. They are added up over owners like all figures of an evaluation. Example: of 2 rows of class 0,
one taken for class 1, it sends ``class:0:0`` = 1 and ``class:0:1`` = 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

MOST_CLASSES: Final = 100
"""Most classes that a table of counts has; with more of them an evaluation has none."""

LEAST_ROWS: Final = 10
"""An owner of fewer evaluation rows counts no classes: a count of one row would be its label."""

_PAIR: Final = re.compile(r"class:(\d{1,3}):(\d{1,3})")

Table = tuple[tuple[int, ...], ...]


def name_of(true: int, predicted: int) -> str:
    """The name under which the rows of a class that were predicted as a class are counted."""
    return f"class:{true}:{predicted}"


def pair_of(name: str) -> tuple[int, int] | None:
    """The true and the predicted class of a name; None of any other name."""
    found = _PAIR.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def table_of(values: Mapping[str, float], num_classes: int) -> Table:
    """The table of counts, a row for each true class; empty where nobody counted, or with too many classes.

    Args:
        values: figures of an evaluation by name; what is outside of the table does not count.
        num_classes: of the run.
    """
    pairs = {pair: round(value) for name, value in values.items() if (pair := pair_of(name)) is not None}
    if not pairs or num_classes > MOST_CLASSES:
        return ()
    indices = range(num_classes)
    return tuple(tuple(pairs.get((true, predicted), 0) for predicted in indices) for true in indices)


def class_figures(table: Table, labels: Sequence[str]) -> dict[str, Any]:
    """Compute precision, recall and F1 of each class and their means, in which every class counts the same.

    A class that no row has, and none was taken for, is left out of the means. A share of nothing is 0. Example: rows
    of classes a, a, b predicted as a, b, b: a has precision 1, recall 1/2 and F1 2/3, b has 1/2, 1 and 2/3.

    Args:
        table: a row for each true class.
        labels: names of the classes.

    Returns:
        ``macro_f1``, ``macro_precision``, ``macro_recall``, the ``counted_rows``, ``classes`` by name, and
        ``confusion``. Rows of owners that counted none are in none of them.
    """
    classes: dict[str, dict[str, float]] = {}
    for index, label in enumerate(labels):
        right, rows, said = table[index][index], sum(table[index]), sum(row[index] for row in table)
        if rows or said:
            precision, recall = share_of(right, said), share_of(right, rows)
            f1 = share_of(2 * right, rows + said)
            classes[label] = {"rows": rows, "predicted": said, "precision": precision, "recall": recall, "f1": f1}
    means = {
        f"macro_{name}": sum(found[name] for found in classes.values()) / len(classes)
        for name in ("f1", "precision", "recall")
    }
    means["counted_rows"] = sum(map(sum, table))
    return {**means, "classes": classes, "confusion": {"labels": list(labels), "counts": [list(row) for row in table]}}


def share_of(part: float, whole: float) -> float:
    """A part of a whole; of nothing 0."""
    return part / whole if whole else 0.0
