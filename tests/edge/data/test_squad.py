"""How answers are compared: SQuAD's rules, and the span that a window predicts."""

from __future__ import annotations

import pytest
import torch

from edge.data.questions import LONGEST_ANSWER, best_span
from edge.data.squad import exact_match, f1, normalised


@pytest.mark.parametrize(
    ("predicted", "answers", "exact", "overlap"),
    [
        ("The  Eiffel Tower!", ["eiffel tower"], 1.0, 1.0),
        ("a cat", ["the cat."], 1.0, 1.0),
        ("in Paris, France", ["Paris"], 0.0, 0.5),
        ("Paris France", ["Rome", "Paris in France"], 0.0, 0.8),
        ("yes yes no", ["yes no no"], 0.0, 2 / 3),
        ("", ["Paris"], 0.0, 0.0),
        ("the", ["Paris"], 0.0, 0.0),
        ("1,000", ["1000"], 1.0, 1.0),
        ("anteater", ["eater"], 0.0, 0.0),
    ],
)
def test_squad_scores_by_hand(predicted: str, answers: list[str], exact: float, overlap: float) -> None:
    """Case, punctuation, articles and spaces don't count; the best of several answers does."""
    assert exact_match(predicted, answers) == exact
    assert f1(predicted, answers) == pytest.approx(overlap)


def test_squad_articles_are_whole_words() -> None:
    """The order matters as in the official script: punctuation goes first, then articles."""
    assert normalised("An a-b theory, The END") == "ab theory end"


def test_best_span_ends_after_it_begins_and_is_short() -> None:
    """Large logits alone are not enough; of equal spans the first one is taken."""
    logits = torch.zeros(50, 2)
    logits[40, 0], logits[3, 1] = 5.0, 5.0
    score, first, last = best_span(logits)
    assert (score, first, last) == (5.0, 0, 3)
    logits[0, 0], logits[LONGEST_ANSWER - 1, 1], logits[LONGEST_ANSWER, 1] = 9.0, 7.0, 8.0
    assert best_span(logits)[1:] == (0, LONGEST_ANSWER - 1)
    assert best_span(torch.zeros(0, 2)) == (-float("inf"), 0, 0)
