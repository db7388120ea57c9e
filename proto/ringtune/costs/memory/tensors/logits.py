"""What the logits of a micro-batch take: a head with many of them computes them in chunks."""

from __future__ import annotations

from typing import Final

MOST_LOGIT_BYTES: Final = 16 << 20
"""What the logits of a micro-batch may take; a head with more takes its tokens in chunks of so many bytes."""
_LOGIT_COPIES = 3


def logits_fit(num_tokens: int, token_logits: int, item_bytes: int) -> bool:
    """Whether a head may compute the logits of so many padded tokens at once.

    Logits computed at once are there three times: as such, as probabilities, and as gradient. Logits of a chunk of
    tokens change in place instead.

    Args:
        num_tokens: of the micro-batch.
        token_logits: numbers for each token; 0 if the head looks at one token of a row.
        item_bytes: of a number.
    """
    return _LOGIT_COPIES * num_tokens * token_logits * item_bytes <= MOST_LOGIT_BYTES


def logits_peak_bytes(num_tokens: int, token_logits: int, item_bytes: int) -> int:
    """Bytes that the logits of a micro-batch of at most so many tokens take at their peak.

    Logits that do not fit (``logits_fit``) are computed in chunks.
    """
    each = token_logits * item_bytes
    return min(_LOGIT_COPIES * num_tokens * each, max(MOST_LOGIT_BYTES, each))
