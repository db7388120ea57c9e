"""Tests of ``ringtune.run_control.evaluation``: number sums, class counts, entities."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtune.run_control.evaluation import (
    MAX_CLASSES,
    class_figures,
    count_name,
    entities_of,
    entity_figures,
    entity_types,
    is_entity_count,
    matthews,
    name_of,
    number_figures,
    number_sums,
    pair_of,
    rouge_l,
    spearman,
    table_of,
)
from tests.support.cases import cases


def rows_of(seed: int, count: int) -> tuple[list[float], list[float]]:
    """Numbers and predictions that go with them, more or less."""
    rng = random.Random(seed)
    true = [rng.gauss(0.3, 1.0) for _ in range(count)]
    return true, [0.7 * value + rng.gauss(-0.1, 0.5) for value in true]


def test_number_figures_of_several_owners_are_those_of_all_rows() -> None:
    """Pearson and the explained share equal numpy's over the rows together; ranks of two owners are none of all."""
    owners = [rows_of(seed, count) for seed, count in ((1, 10), (2, 57))]
    sums = Counter[str]()
    for true, said in owners:
        sums.update(dict(number_sums(true, said)))
    all_true, all_said = (np.array([value for owner in owners for value in owner[part]]) for part in (0, 1))
    found = number_figures({**sums, "count": 67.0})
    assert found["pearson"] == pytest.approx(np.corrcoef(all_true, all_said)[0, 1], rel=1e-12)
    wanted = 1 - ((all_true - all_said) ** 2).sum() / ((all_true - all_true.mean()) ** 2).sum()
    assert found["r2"] == pytest.approx(wanted, rel=1e-12)
    assert found["counted_rows"] == 67 and "spearman" not in found


def test_spearman_is_told_where_one_owner_has_all_rows() -> None:
    """With rows of a second one, who is too small to send sums, it is not."""
    true, said = rows_of(3, 20)
    sums = dict(number_sums(true, said))
    ranks = np.argsort(np.argsort(np.array([true, said]), axis=1), axis=1)
    assert number_figures({**sums, "count": 20.0})["spearman"] == pytest.approx(
        np.corrcoef(ranks[0], ranks[1])[0, 1], rel=1e-12
    )
    assert "spearman" not in number_figures({**sums, "count": 23.0})


def test_spearman_shares_the_ranks_of_equal_numbers() -> None:
    """1, 2, 2, 3 have the ranks 1, 2.5, 2.5, 4."""
    assert spearman([1, 2, 3], [10, 30, 20]) == pytest.approx(0.5)
    ranks = np.array([[1, 2.5, 2.5, 4], [1, 2, 3, 4]])
    assert spearman([1, 2, 2, 3], [0, 1, 5, 9]) == pytest.approx(np.corrcoef(ranks)[0, 1])
    assert spearman([1, 1], [1, 2]) is None


def test_number_sums_keep_what_is_no_number() -> None:
    """A run that diverged has nothing to correlate."""
    true, said = rows_of(4, 10)
    assert number_sums(true, [*said[1:], math.nan]) == ()
    assert number_figures({"count": 9.0, "absolute_sum": 1.0}) == {}


def test_number_figures_without_spread_are_none() -> None:
    """All numbers, or all predictions, may be the same; rounding is no variance."""
    true, said = rows_of(5, 12)
    same = number_figures({**dict(number_sums([0.1] * 12, said)), "count": 12.0})
    assert (same["pearson"], same["r2"]) == (None, None) and "spearman" not in same
    flat = number_figures({**dict(number_sums(true, [0.3] * 12)), "count": 12.0})
    assert flat["pearson"] is None and flat["r2"] <= 0
    perfect = number_figures({**dict(number_sums(true, true)), "count": 12.0})
    assert perfect["pearson"] == pytest.approx(1.0) and perfect["r2"] == pytest.approx(1.0)


def test_correlations_of_equal_sides_are_one_and_no_more() -> None:
    """Rounding alone gives these three 1 + 2e-16."""
    assert matthews(((1, 0), (0, 3))) == matthews(((1, 0, 0), (0, 1, 0), (0, 0, 1))) == 1.0
    assert spearman([2, 1, 2], [2, 1, 2]) == 1.0


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
    assert (found["counted_rows"], found["matthews"]) == (3, pytest.approx(1 / 2))
    assert found["confusion"] == {"labels": ["a", "b", "c"], "counts": [[1, 1, 0], [0, 1, 0], [0, 0, 0]]}


TRUTHS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60)


@settings(max_examples=40)
@given(TRUTHS)
def test_class_counts_agree_with_counting_rows(rows: list[tuple[int, int]]) -> None:
    """F1 of each class from the rows themselves; of a class with hits it is the harmonic mean.

    Matthews correlation is that of the rows' one-hot vectors, whose covariances are added up over classes.
    """
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
    hot = np.eye(4)[np.array(rows)] - np.eye(4)[np.array(rows)].mean(axis=0)
    true, said = hot[:, 0], hot[:, 1]
    norms = np.sqrt((true * true).sum()) * np.sqrt((said * said).sum())
    assert found["matthews"] == pytest.approx((true * said).sum() / norms if norms > 1e-9 else 0.0, abs=1e-9)


def test_class_counts_are_none_where_nobody_counted_or_there_are_too_many() -> None:
    """Other figures are no counts; what is outside of the table does not make it larger."""
    assert table_of({"correct": 3.0, "count": 4.0}, 2) == ()
    assert table_of({"class:0:0": 1.0}, MAX_CLASSES + 1) == ()
    assert table_of({"class:7:0": 1.0, "class:0:1": 2.0}, 2) == ((0, 2), (0, 0))
    assert [pair_of(name) for name in ("class:1:2", "class:1", "class:-1:2", "class:1000:0", "loss")] == [
        (1, 2),
        *[None] * 4,
    ]


LABELS = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")


@cases(
    ("tags", "entities"),
    [
        ("O", set()),
        ("B-PER I-PER O", {("PER", 0, 2)}),
        ("B-PER B-PER", {("PER", 0, 1), ("PER", 1, 2)}),
        ("I-PER I-PER O I-LOC", {("PER", 0, 2), ("LOC", 3, 4)}),
        ("B-PER I-LOC I-LOC B-LOC", {("PER", 0, 1), ("LOC", 1, 3), ("LOC", 3, 4)}),
        ("O I-PER B-PER I-PER", {("PER", 1, 2), ("PER", 2, 4)}),
    ],
)
def test_entities_begin_and_end_as_conlleval_says(tags: str, entities: set[tuple[str, int, int]]) -> None:
    """``I-`` goes on with its own type only, and begins an entity where there is none."""
    assert entities_of(tags.split()) == entities


def test_entity_types_are_of_such_tags_only() -> None:
    """Parts of speech have none, nor has a set in which one tag is of another kind."""
    assert entity_types(LABELS) == ("LOC", "PER")
    assert entity_types(("B-a-b", "O")) == ("a-b",)
    assert entity_types(("NOUN", "VERB")) == entity_types((*LABELS, "X")) == entity_types(("O",)) == ()


def test_entity_figures_follow_from_sums_of_owners() -> None:
    """4 entities, 3 predicted, 2 right; a type that nobody has is not listed."""
    values = {count_name(1, "true"): 4.0, count_name(1, "predicted"): 3.0, count_name(1, "right"): 2.0, "words": 9.0}
    assert list(filter(is_entity_count, values)) == [f"entity:1:{kind}" for kind in ("true", "predicted", "right")]
    found = entity_figures(values, LABELS)
    assert (found["entity_precision"], found["entity_recall"]) == (2 / 3, 1 / 2)
    assert found["entity_f1"] == pytest.approx(4 / 7)
    assert found["entities"] == 4 and list(found["entity_types"]) == ["PER"]
    assert entity_figures({"words": 9.0}, LABELS) == entity_figures(values, ("NOUN", "VERB")) == {}


def longest_common(first: list[str], second: list[str]) -> int:
    """Of all subsequences of the first, the longest that the second has; written out."""
    subsequences = (part for size in range(len(first), 0, -1) for part in itertools.combinations(first, size))

    def is_in_second(part: tuple[str, ...]) -> bool:
        rest = iter(second)
        return all(word in rest for word in part)

    return next((len(part) for part in subsequences if is_in_second(part)), 0)


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abcd"), max_size=8))
@settings(max_examples=60)
def test_rouge_l_is_of_the_longest_common_subsequence(said: list[str], reference: list[str]) -> None:
    """F1 is twice its length by the words of both."""
    wanted = 2 * longest_common(said, reference) / max(1, len(said) + len(reference))
    assert rouge_l(" ".join(said), [" ".join(reference)]) == wanted


def test_rouge_l_of_printed_examples() -> None:
    """Lin 2004, section 3: of two candidates with the same words the one in order wins; the best reference counts."""
    reference = "police killed the gunman"
    assert rouge_l("Police kill the gunman.", [reference]) == 3 / 4
    assert rouge_l("the gunman kill police", [reference]) == 2 / 4
    assert rouge_l("the gunman police killed", [reference, "The gunman, police killed!"]) == 1
    assert rouge_l("", [reference]) == rouge_l("...", ["..."]) == rouge_l("a", []) == 0
