"""Describe how well each class, tag or kind of entity was told, and which were taken for which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from coordinator.screen.text_table import table_lines
from ringtune.rounds.class_counts import LEAST_ROWS

_MOST_ROWS: Final = 30
_MOST_COLUMNS: Final = 8


def class_lines(found: Mapping[str, Any]) -> list[str]:
    """Write the tables of classes or tags, and of entities; without counts of them there are no lines.

    Args:
        found: figures of an evaluation.
    """
    return [*_class_table(found), *_entity_table(found)]


def _class_table(found: Mapping[str, Any]) -> list[str]:
    """Write a line for each class: precision, recall and F1, and how many of its rows were predicted as what.

    Of many classes only those with the lowest F1 are written, and of more than eight no counts; ``report.json`` has
    all.
    """
    classes, confusion = found.get("classes"), found.get("confusion")
    if not classes or not confusion:
        return []
    labels: list[str] = confusion["labels"]
    shown = sorted(classes, key=lambda label: (classes[label]["f1"], labels.index(label)))[:_MOST_ROWS]
    predicted = labels if len(labels) <= _MOST_COLUMNS else []
    one, many, counted_as = ("tag", "tags", "words") if "words" in found else ("class", "classes", "rows")
    titles = [one, counted_as, "precision", "recall", "F1", *(f"as {label}" for label in predicted)]
    rows = [
        [
            label,
            f"{classes[label]['rows']:,}",
            *(f"{classes[label][name]:.4f}" for name in ("precision", "recall", "f1")),
            *(f"{count:,}" for count in confusion["counts"][labels.index(label)][: len(predicted)]),
        ]
        for label in sorted(shown, key=labels.index)
    ]
    left = len(classes) - len(shown)
    more = [f"and {left} {many} with a higher F1; report.json has them"] if left else []
    counted, rows_of_all = found.get("counted_rows"), found.get("count")
    if counted != rows_of_all:
        more.append(
            f"{many} are counted on {counted:,} of {rows_of_all:,} {counted_as}: an owner of fewer than {LEAST_ROWS} "
            "evaluation rows sends no counts, which could tell its labels"
        )
    return [*(f"  {line}" for line in table_lines(titles, rows)), *more]


def _entity_table(found: Mapping[str, Any]) -> list[str]:
    """Write a line for each type of entities, and one for all: precision, recall and F1."""
    types = found.get("entity_types")
    if not types:
        return []
    of_all = {name: found[f"entity_{name}"] for name in ("precision", "recall", "f1")}
    whole = {**of_all, "entities": found["entities"], "predicted": sum(kind["predicted"] for kind in types.values())}
    shown = [*sorted(types.items(), key=lambda item: -item[1]["entities"])[:_MOST_ROWS], ("all", whole)]
    rows = [
        [
            name,
            *(f"{figures[count]:,}" for count in ("entities", "predicted")),
            *(f"{figures[share]:.4f}" for share in ("precision", "recall", "f1")),
        ]
        for name, figures in shown
    ]
    titles = ["entity", "entities", "predicted", "precision", "recall", "F1"]
    return [f"  {line}" for line in table_lines(titles, rows)]
