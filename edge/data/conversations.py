"""Conversations as examples of a language model that learns the answers: the task ``chat``.

A conversation is written out by the model's chat template and encoded once, without special tokens of the tokenizer's
own: the template has them, so that none is doubled. A token is a target if it has a character of an answer; what the
template puts behind an answer belongs to it, also where that token pads, because padding is known by the mask. A plain
prompt with a completion is encoded as the tokenizer does with any text, and ends with the end-of-text token.

Rows are cut at ``train.max_length``. An example without a target left is left out, and counted.

Source: trl 0.24, ``SFTTrainer``; transformers 4.57, ``apply_chat_template`` (tokens of an answer by their characters).
"""

from __future__ import annotations

import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from edge.data.chat_template import ChatTemplate, Rendered, Span, TemplateError
from edge.data.examples import Labels, TextExamples
from edge.data.tokens import IGNORED, Padder, RowFaultError, TokenRow, load_tokenizer, prompt_ids
from ringtune.config.sections import ANSWERS
from ringtune.errors import ModelError
from ringtune.job.job import Job
from ringtune.job.rows import Rows, read_rows
from ringtune.models.conversations import (
    ASSISTANT,
    TEMPLATES,
    Conversation,
    PlainPair,
    named_template,
    require_template,
)
from ringtune.models.family import CHAT

_LOG = logging.getLogger(__name__)
BEYOND: Final = "rows whose answers all lie beyond train.max_length"
UNSHOWN: Final = "rows whose answers the chat template does not show"
_ROWS_AT_ONCE: Final = 256
_PROBE: Final = Conversation('[{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]')


class LearnedTokens(NamedTuple):
    """One example. ``tokens``: ids and token types. ``targets``: for each token 1 if it is learned, else 0."""

    tokens: TokenRow
    targets: array[int]


class Conversations:
    """The ``Source`` of chat; raises ``ModelError``."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._data, self._folder = job.data, folder
        self._max_length = job.train.max_length
        self._learns_all = job.train.loss_on != ANSWERS
        self.tokenizer = load_tokenizer(folder)
        if not self.tokenizer.is_fast:
            raise ModelError(f"the tokenizer in {folder} has no offsets; add its tokenizer.json")
        self._padder = Padder(self.tokenizer)

    def read(self, path: Path) -> Rows:
        """Read the conversations of a table."""
        return read_rows(path, CHAT, self._data)

    def examples(self, rows: Sequence[Conversation | PlainPair], labels: Sequence[str]) -> TextExamples:
        """Make the examples of these rows; raises ``RowFaultError`` or ``ModelError``.

        A row has one example, more where the template shows an answer otherwise once others follow, or none. Of cut
        rows the answers within ``train.max_length`` are learned.
        """
        of_rows, kept, num_cut, left_out = list[int](), list[LearnedTokens](), 0, Counter[str]()
        for texts in self._texts(rows):
            usable = [example for example in map(self._learned, texts) if any(example.targets)]
            num_cut += bool(usable) and any(len(text.ids) > self._max_length for text in texts)
            if not usable:
                shown = any(start < stop for text in texts for start, stop in text.answers)
                left_out[BEYOND if shown else UNSHOWN] += 1
            of_rows.append(len(usable))
            kept += usable
        more = len(kept) - sum(map(bool, of_rows))
        if more:
            _LOG.info(
                "%d answers are examples of their own: the template shows an answer otherwise when others follow", more
            )
        tokens = [example.tokens for example in kept]
        return TextExamples(tokens, _labels(kept), self._padder, of_rows=of_rows, cut_rows=num_cut, left_out=left_out)

    def prompts(self, rows: Sequence[Conversation | PlainPair]) -> list[list[int]]:
        """Encode rows up to where the model answers; raises as ``examples``."""
        written = self._by_template("prompts", rows)
        return [
            prompt_ids(self.tokenizer, row.prompt)
            if isinstance(row, PlainPair)
            else list(self._encode(next(written))["input_ids"])
            for row in rows
        ]

    def answer_end(self) -> str:
        """Return the text that the template puts behind an answer, without blanks around it; empty if there is none."""
        ((rendered, *_),) = self._by_template("whole", [_PROBE])
        return str(rendered.text).rpartition("ANSWER")[2].strip()

    def _texts(self, rows: Sequence[Conversation | PlainPair]) -> Iterator[list[_Encoded]]:
        """Yield the texts of each row: one, or several where answers need their own."""
        written = self._by_template("whole" if self._learns_all else "answers", rows)
        is_told = False
        for row in rows:
            if isinstance(row, PlainPair):
                yield [self._plain(row)]
                continue
            rendered = next(written)
            if not is_told and _ends_with_answer(rendered[-1].text, row):
                _LOG.warning("the chat template puts nothing behind an answer: the model does not learn where to end")
            is_told = True
            yield [self._written(text) for text in rendered]

    def _by_template(self, kind: str, rows: Sequence[Any]) -> Iterator[Any]:
        """Render the conversations among the rows, those with tools by the template for tools if there is one.

        One part of the rows after the other, so that not all rendered texts are in memory at once.
        """
        all_places = [place for place, row in enumerate(rows) if isinstance(row, Conversation)]
        templates = {
            has_tools: self.template(has_tools=has_tools) for has_tools in {bool(rows[at].tools) for at in all_places}
        }
        for start in range(0, len(all_places), _ROWS_AT_ONCE):
            part = all_places[start : start + _ROWS_AT_ONCE]
            by_place: dict[int, Any] = {}
            for has_tools, template in templates.items():
                places = [place for place in part if bool(rows[place].tools) is has_tools]
                try:
                    made = getattr(template, kind)([rows[place] for place in places])
                except TemplateError as error:
                    done = start + len(part)
                    among = f", of the first {done:,}" if done < len(all_places) else ""
                    what = f"the chat template fails for this conversation ({error}{among})"
                    raise RowFaultError(places[error.row], f"{what}; change it, or set data.template") from error
                by_place |= dict(zip(places, made, strict=True))
            yield from (by_place[place] for place in part)

    def template(self, *, has_tools: bool = False) -> ChatTemplate:
        """Return the template of conversations with or without tools; raises ``ModelError``."""
        tokenizer, name = self.tokenizer, self._data.template
        special = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        if name is not None and name not in TEMPLATES:
            return ChatTemplate(named_template(self._folder, name), special)
        if name is not None:
            if "eos_token" in TEMPLATES[name] and "eos_token" not in special:
                raise ModelError(
                    f"data.template = {name!r} ends answers with the end-of-text token, and the tokenizer in "
                    f"{self._folder} has none; name eos_token in its tokenizer_config.json"
                )
            if tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]:
                special.pop("bos_token", None)
            return ChatTemplate(TEMPLATES[name], special)
        require_template(self._folder, name)
        try:
            return ChatTemplate(tokenizer.get_chat_template(tools=[] if has_tools else None), special)
        except ValueError as error:
            raise ModelError(f"no chat template of {self._folder} can be taken ({error}); set data.template") from error

    def _encode(self, text: str) -> Any:
        return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def _written(self, text: Rendered) -> _Encoded:
        encoding = self._encode(text.text)
        return _Encoded(encoding["input_ids"], encoding["offset_mapping"], text.answers)

    def _plain(self, row: PlainPair) -> _Encoded:
        """Encode prompt and completion as one text; the end-of-text token behind it is learned."""
        text = row.prompt + row.completion
        encoding = self.tokenizer(text, return_offsets_mapping=True, verbose=False)
        ids, places, end = list(encoding["input_ids"]), list(encoding["offset_mapping"]), self.tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids, places = [*ids, end], [*places, (0, 0)]
        if end is not None:
            places[-1] = (len(text), len(text))  # special tokens of the tokenizer's own have no place in the text
        return _Encoded(ids, places, ((0 if self._learns_all else len(row.prompt), len(text) + 1),))

    def _learned(self, text: _Encoded) -> LearnedTokens:
        """Cut to ``max_length``, and find the targets: the first token of a row is none, as nothing precedes it."""
        ids, targets = array("i", text.ids[: self._max_length]), array("b", bytes(min(len(text.ids), self._max_length)))
        answers = iter(text.answers)
        start, stop = next(answers, (0, 0))
        for token, (first, last) in enumerate(text.places[: self._max_length]):
            end = max(last, first + 1)  # some tokenizers give blanks an empty place
            while stop <= first and (following := next(answers, None)):
                start, stop = following
            targets[token] = first < stop and end > start
        if targets:
            targets[0] = 0
        return LearnedTokens(TokenRow(ids, array("i", bytes(ids.itemsize * len(ids)))), targets)


def _ends_with_answer(text: str, conversation: Conversation) -> bool:
    """Whether the text of a conversation that ends with an answer has nothing behind it."""
    last = json.loads(conversation.messages)[-1]
    answer = last["content"].strip()
    return last["role"] == ASSISTANT and bool(answer) and text.rstrip().endswith(answer)


class _Encoded(NamedTuple):
    """A text in tokens. ``places``: first character of each token, and one past its last."""

    ids: Sequence[int]
    places: Sequence[Span]
    answers: Sequence[Span]


def _labels(examples: Sequence[LearnedTokens]) -> Labels:
    """Label each token of an answer with itself."""

    def labels(chosen: Sequence[int], _: Mapping[str, int], ids: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
        made = torch.full_like(ids, IGNORED)
        for row, index in enumerate(chosen):
            learned = torch.tensor(examples[index].targets, dtype=torch.bool)
            made[row, : len(learned)] = ids[row, : len(learned)].masked_fill(~learned, IGNORED)
        return made

    return labels
