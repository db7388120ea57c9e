"""Compare a predicted answer with the right ones as SQuAD does: exact match and F1 over words.

Both ignore case, punctuation, the articles a, an, the, and extra spaces; the best of several right answers counts.

Source: Rajpurkar et al. 2016, section 6.1, and the official ``evaluate-v1.1.py``.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Normalise a text before it is compared: "The cat's  hat!" becomes "cats hat"."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, answers: Sequence[str]) -> float:
    """Return 1 if the normalised prediction is one of the normalised answers, otherwise 0."""
    return float(any(normalised(predicted) == normalised(answer) for answer in answers))


def f1(predicted: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the words, for the best answer.

    Example: "red hat" for the answer "hat" has precision 1/2 and recall 1, so 2/3.
    """
    return max(_f1(normalised(predicted).split(), normalised(answer).split()) for answer in answers)


def _f1(predicted: list[str], answer: list[str]) -> float:
    common = sum((Counter(predicted) & Counter(answer)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(answer)
    return 2 * precision * recall / (precision + recall)
