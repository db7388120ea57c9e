"""What is left to compute of the last block where only the first tokens of each row are asked for.

Keys and values are of all T tokens, all else of the n that the head reads. In multiplications, of a block of width d
with a feed-forward part of width f::

    all tokens    T (4 d^2 + 2 d f + 2 T d)
    n of them     T 2 d^2 + n (2 d^2 + 2 d f + 2 T d)

With T = 64, n = 1, d = 768 and f = 3072 a sixth is left. Gradients of what enters take as many as the forward.
"""

from __future__ import annotations

from ringtune.costs.profile import ModelFacts
from ringtune.schedule.course import Course


def share_left(asked: int, tokens: float, *, hidden: int, inner: int) -> float:
    """The share of a block's multiplications that are left for so many of the tokens of a row; at most 1.

    Args:
        asked: tokens that are computed, n; 0 = all.
        tokens: of a row, T.
        hidden: width of the hidden state, d.
        inner: width of the feed-forward part, f.
    """
    if not 0 < asked < tokens:
        return 1.0
    keys, others = 2 * hidden, 2 * hidden + 2 * inner + 2 * tokens
    return (keys + others * asked / tokens) / (keys + others)


class TopShare:
    """The share of the last block of a course that is computed.

    Args:
        course: of the run.
        model: of the run.
    """

    def __init__(self, course: Course, model: ModelFacts) -> None:
        self._asked, self._rows = course.top_tokens, course.microbatch_sizes()[0]
        self._hidden, self._inner = model.hidden_size, model.intermediate_size

    def of(self, size: float) -> float:
        """Return the share of a micro-batch of ``size`` padded tokens; 1 where all are computed."""
        return share_left(self._asked, size / self._rows, hidden=self._hidden, inner=self._inner)
