"""Let a language model go on with a text, one token after the other.

Nothing is kept between two tokens, so that a token is computed by the very code of training; n tokens of a text of T
cost n forwards of T tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

NextLogits = Callable[[Sequence[int]], torch.Tensor]


class Sampling(NamedTuple):
    """How the next token is chosen.

    Attributes:
        max_new_tokens: most tokens that are added.
        temperature: 0 = always the likeliest; 1 = as likely as the model says.
        seed: of the draws; another row draws others.
    """

    max_new_tokens: int = 50
    temperature: float = 0.0
    seed: int = 0


def go_on(
    ids: Sequence[int], next_logits: NextLogits, how: Sampling, *, ends: Collection[int], longest: int, row: int = 0
) -> list[int]:
    """Return the tokens that follow; of a prompt that is too long for the model the beginning is left out.

    Args:
        ids: of the prompt, one at least.
        next_logits: computes the logits (V) of the next token.
        how: how it is chosen.
        ends: tokens that end a text; they are not returned.
        longest: tokens that the model takes at most.
        row: index of the row, for its draws.
    """
    draws = torch.Generator().manual_seed((how.seed * 1_000_003 + row) % (1 << 63))
    kept, added = list(ids), list[int]()
    for _ in range(how.max_new_tokens):
        logits_V = next_logits(kept[-longest:])
        token = _choose(logits_V, how.temperature, draws)
        if token in ends:
            break
        kept.append(token)
        added.append(token)
    return added


def _choose(logits_V: torch.Tensor, temperature: float, draws: torch.Generator) -> int:
    if not temperature:
        return int(logits_V.argmax())
    shares_V = torch.softmax(logits_V.double() / temperature, dim=-1)
    return int(torch.multinomial(shares_V, 1, generator=draws))
