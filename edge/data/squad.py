"""How SQuAD compares a predicted answer with the right ones: exact match and F1 over words.

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
    """The text as it is compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, answers: Sequence[str]) -> float:
    """1 if the prediction is one of the answers, otherwise 0."""
    return float(any(normalised(predicted) == normalised(answer) for answer in answers))


def f1(predicted: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the words, for the best answer."""
    return max(_f1(normalised(predicted).split(), normalised(answer).split()) for answer in answers)


def _f1(predicted: list[str], answer: list[str]) -> float:
    common = sum((Counter(predicted) & Counter(answer)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(answer)
    return 2 * precision * recall / (precision + recall)
