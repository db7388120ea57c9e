"""Counts of classes: summed over owners, and what follows from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.rounds.class_counts import MOST_CLASSES, class_figures, name_of, pair_of, table_of

TRUTHS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60)


def test_class_counts_give_precision_recall_and_f1_by_hand() -> None:
    """Rows of a, a, b, predicted as a, b, b; nothing is of class c, which the means leave out."""
    values = {"class:0:0": 1.0, "class:0:1": 1.0, "class:1:1": 1.0, "correct": 2.0}
    table = table_of(values, 3)
    assert table == ((1, 1, 0), (0, 1, 0), (0, 0, 0))
    found = class_figures(table, ("a", "b", "c"))
    assert found["classes"] == {
        "a": {"rows": 2, "predicted": 1, "precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3)},
        "b": {"rows": 1, "predicted": 2, "precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3)},
    }
    assert (found["macro_f1"], found["macro_precision"], found["macro_recall"]) == (pytest.approx(2 / 3), 0.75, 0.75)
    assert found["counted_rows"] == 3
    assert found["confusion"] == {"labels": ["a", "b", "c"], "counts": [[1, 1, 0], [0, 1, 0], [0, 0, 0]]}


def test_class_counts_hold_a_class_against_that_nobody_is_of() -> None:
    """A class that was predicted, and no row has, counts with F1 0 in the mean, as precision 0 of what was said."""
    found = class_figures(((1, 1), (0, 0)), ("a", "b"))
    assert found["classes"]["b"] == {"rows": 0, "predicted": 1, "precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert found["macro_f1"] == pytest.approx((2 / 3) / 2)


@given(TRUTHS)
def test_class_counts_agree_with_counting_rows(rows: list[tuple[int, int]]) -> None:
    """F1 of each class from the rows themselves; of a class with hits it is the harmonic mean."""
    values: dict[str, float] = {}
    for true, said in rows:
        values[name_of(true, said)] = values.get(name_of(true, said), 0.0) + 1
    found = class_figures(table_of(values, 4), ("a", "b", "c", "d"))
    for index, label in enumerate("abcd"):
        hits = sum(pair == (index, index) for pair in rows)
        said, true = sum(pair[1] == index for pair in rows), sum(pair[0] == index for pair in rows)
        assert (label in found["classes"]) == (said + true > 0)
        if hits:
            precision, recall = hits / said, hits / true
            assert found["classes"][label]["f1"] == pytest.approx(2 * precision * recall / (precision + recall))


def test_class_counts_are_none_where_nobody_counted_or_there_are_too_many() -> None:
    """Other figures are no counts; what is outside of the table does not make it larger."""
    assert table_of({"correct": 3.0, "count": 4.0}, 2) == ()
    assert table_of({"class:0:0": 1.0}, MOST_CLASSES + 1) == ()
    assert table_of({"class:7:0": 1.0, "class:0:1": 2.0}, 2) == ((0, 2), (0, 0))
    assert [pair_of(name) for name in ("class:1:2", "class:1", "class:-1:2", "class:1000:0", "loss")] == [
        (1, 2),
        *[None] * 4,
    ]
