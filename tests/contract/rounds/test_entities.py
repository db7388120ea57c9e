"""Entities by the tags of words, and how many were found by counts that owners may send."""

from __future__ import annotations

import pytest

from ringtune.rounds.entities import count_name, entities_of, entity_figures, entity_types, is_entity_count

LABELS = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")


@pytest.mark.parametrize(
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
