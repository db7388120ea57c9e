"""A text that grows by tokens: pieces of whole characters, up to a text that ends it.

A token may be a part of a character, and its text may depend on the token before it (a blank at its front). So the
newest tokens are decoded twice, without and with the new one, and the difference is the piece::

    tokens      "w1", the first two bytes of "é" + "!"           the last byte
    pieces      "w1"  ""  (the text ends with U+FFFD)            "é!"

A piece is held back while it may be the beginning of a text that ends the whole.

Source: text-generation-inference, ``decode_token``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

_BEFORE: Final = 6
_LONGEST: Final = 4
"""Most tokens of a character: it has at most so many bytes."""
_PENDING: Final = 2 * _LONGEST
"""Most tokens that are held until their text is complete."""
_INCOMPLETE: Final = "\ufffd"


class Detokenizer:
    """The text of tokens behind a prompt, without special tokens.

    Args:
        prompt: tokens before, of which the text is not returned.
        stops: texts that end it; they are not returned.

    Attributes:
        is_ended: whether one of ``stops`` was there.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        # bytes from within a character on would spoil all bytes behind them
        ends = (list(prompt[-size:]) for size in range(_BEFORE, _BEFORE + _LONGEST))
        self._ids = next((ids for ids in ends if not self._decode(ids).startswith(_INCOMPLETE)), [])
        self._start, self._told = 0, len(self._ids)
        self._held = ""
        self.is_ended = False

    def add(self, token: int) -> str:
        """Return the piece that a token makes sure, often empty."""
        self._ids.append(token)
        return self._piece(is_last=len(self._ids) - self._told > _PENDING)

    def end(self) -> str:
        """Return what was held back."""
        last = "" if self.is_ended else self._piece(is_last=True) + self._held
        self._held = ""
        return last

    def _piece(self, *, is_last: bool) -> str:
        if self.is_ended or self._told == len(self._ids):
            return ""
        before, text = self._decode(self._ids[self._start : self._told]), self._decode(self._ids[self._start :])
        if text.endswith(_INCOMPLETE) and not is_last:
            return ""
        told, self._told = self._told, len(self._ids)
        if len(text) > len(before):  # a special token has no text for the next one's blank to depend on
            self._start = told
        return self._before_stops(text[len(before) :])

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _before_stops(self, piece: str) -> str:
        text, self._held = self._held + piece, ""
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_ended = True
            return text[: min(places)]
        beginnings = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        if held := max(beginnings, default=0):
            text, self._held = text[:-held], text[-held:]
        return text


class Ends(NamedTuple):
    """What ends a text. ``tokens``: not returned. ``stops``: texts, not returned."""

    tokens: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()


def ends_with(ends: Ends, tokenizer: Any, text: str) -> Ends:
    """Add a text that ends an answer, as the chat template has it: its first special token, or what is before that."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    special = set(tokenizer.all_special_ids)
    at = next((place for place, token in enumerate(ids) if token in special), len(ids))
    stop = text if at == len(ids) else tokenizer.decode(ids[:at])
    return Ends((*ends.tokens, *ids[at : at + 1]), (*ends.stops, stop) if stop else ends.stops)
