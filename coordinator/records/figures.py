"""Compute what an evaluation is judged by from the sums that owners report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ringtune.rounds.class_counts import class_figures, table_of
from ringtune.rounds.entities import entity_figures
from ringtune.rounds.number_sums import number_figures

_LARGEST_EXPONENT = 700.0


def mean(values: Mapping[str, float], name: str) -> float | None:
    """Quotient ``values[name] / values["count"]``; None if the count is 0 or the quotient is not finite.

    JSON has no NaN, and training may diverge. Example: loss_sum 6 and count 4 are 1.5.
    """
    count = values.get("count", 0.0)
    quotient = values.get(name, 0.0) / count if count else math.nan
    return quotient if math.isfinite(quotient) else None


def figures(values: Mapping[str, float], labels: Sequence[str] = (), max_length: int = 0) -> dict[str, Any]:
    """Compute loss and accuracy from an evaluation's sums, and the further figures of its task.

    ``mse`` and ``mae`` of numbers with those of ``number_figures``, ``perplexity`` of a language model over all its
    ``tokens``, ``f1`` and ``exact_match`` over the ``questions``, as shares, of tags the number of ``words`` and of
    ``cut_words`` that no batch has, and where classes or entities were counted those of ``class_figures`` and
    ``entity_figures``.

    Args:
        values: sums over all owners.
        labels: names of the classes.
        max_length: tokens at which rows were cut, which a perplexity depends on; 0 = not told.
    """
    found: dict[str, Any] = {
        "loss": mean(values, "loss_sum"),
        "accuracy": mean(values, "correct") if "correct" in values else None,
    }
    if "tokens" in values:
        loss = found["loss"]
        found["perplexity"] = math.exp(loss) if loss is not None and loss < _LARGEST_EXPONENT else None
        found |= {"max_length": max_length} if max_length else {}
    if table := table_of(values, len(labels)):
        found |= class_figures(table, labels)
    if "absolute_sum" in values:
        found |= {"mse": found["loss"], "mae": mean(values, "absolute_sum"), **number_figures(values)}
    if "words" in values:
        counted = {name: int(values[name]) for name in ("words", "cut_words") if name in values}
        found |= {**counted, **entity_figures(values, labels)}
    if "questions" in values:
        judged = {**values, "count": values["questions"]}
        found |= {"f1": mean(judged, "f1_sum"), "exact_match": mean(judged, "exact_sum")}
        found["questions"] = int(values["questions"])
    return found
