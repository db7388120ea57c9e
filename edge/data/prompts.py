"""Prompts of an owner: its rows up to where a language model writes, with the answers to compare with.

Texts are read a second time, as ``ringtune predict`` reads them, so that both write the same from the same row.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from edge.data.conversations import Conversations
from edge.data.tokens import RowFaultError, load_tokenizer, prompt_ids
from ringtune.errors import DataError
from ringtune.job.job import Job
from ringtune.job.rows import Row, account_of, answers_of, is_plain_text, task_rows
from ringtune.models.conversations import ASSISTANT, Conversation, PlainPair, conversation_of
from ringtune.models.family import CHAT
from ringtune.storage.tables import RowError, row_place
from ringtune.storage.text_files import read_text

_ROWS_AT_ONCE: Final = 64


class Prompt(NamedTuple):
    """A row to be continued.

    Attributes:
        answers: texts to compare with; empty where it has none.
        is_conversation: whether what the template puts behind an answer ends the text.
    """

    ids: Sequence[int]
    answers: Sequence[str]
    row: Mapping[str, Any]
    is_conversation: bool


class PackedPrompts(Sequence[Prompt]):
    """Prompts in little memory: their tokens in one array, everything else as JSON; each is made when it is asked for.

    A million prompts of 9 tokens take 90 MiB, as a list 859 MiB.
    """

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._ids, self._rests = array("i"), bytearray()
        self._stops = array("q", [0]), array("q", [0])
        for ids, *rest in prompts:
            self._ids.extend(ids)
            self._rests += json.dumps(rest).encode()
            for stops, of in zip(self._stops, (self._ids, self._rests), strict=True):
                stops.append(len(of))

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt; 0 without any."""
        return max((stop - start for start, stop in itertools.pairwise(self._stops[0])), default=0)

    def __len__(self) -> int:
        return len(self._stops[0]) - 1

    def __getitem__(self, index: Any) -> Any:
        """Return a prompt."""
        number = range(len(self))[index]
        ids, rest = (slice(stops[number], stops[number + 1]) for stops in self._stops)
        answers, row, is_conversation = json.loads(self._rests[rest])
        return Prompt(self._ids[ids].tolist(), tuple(answers), row, is_conversation)


class PromptReader:
    """Reads prompts of a task ``causal-lm`` or ``chat``. ``tokenizer``: of the model."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        self._conversations = Conversations(job, folder) if job.model.task == CHAT else None
        self.tokenizer = self._conversations.tokenizer if self._conversations else load_tokenizer(folder)

    def answer_end(self) -> str:
        """Return the text that ends an answer of a conversation; empty if there is none."""
        return self._conversations.answer_end() if self._conversations else ""

    def all(self, path: Path) -> Iterator[Prompt]:
        """Yield the prompts of a file, with or without answers; raises ``DataError`` for rows that can't be used."""
        if is_plain_text(path):
            for line in read_text(path, self._job.data.encoding)[0].splitlines():
                if line.strip():
                    yield Prompt(self._ids(line), (), {self._job.data.text: line}, is_conversation=False)
            return
        account = account_of(path, self._job.data, is_own=True)
        rows = task_rows(path, self._job.model.task, self._job.data, account, with_targets=False)
        while taken := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            yield from self._encoded(path, taken)
        account.check()

    def answered(self, path: Path, lines: Collection[int], count: int) -> list[Prompt]:
        """Return the first ``count`` prompts, at most, of a file's lines that have an answer; raises ``DataError``."""
        prompts: list[Prompt] = []
        if not is_plain_text(path):
            account = account_of(path, self._job.data)
            rows = task_rows(path, self._job.model.task, self._job.data, account, with_targets=False)
            answered = (row for row in rows if row.record[0] in lines and self._answers(row))
            prompts = list(self._encoded(path, list(itertools.islice(answered, count))))
        if not prompts:
            column = "" if self._job.model.task == CHAT else f" in the column {self._job.data.answer!r} (data.answer)"
            raise DataError(
                f"{path} has no evaluation row with an answer{column} to compare texts with; add answers, or remove "
                "[generation]"
            )
        return prompts

    def _encoded(self, path: Path, rows: Sequence[Row]) -> Iterator[Prompt]:
        try:
            if self._conversations is not None:
                each = self._conversations.prompts([row.value for row in rows])
            else:
                each = [self._ids(row.value) for row in rows]
        except RowFaultError as error:
            raise DataError(f"{row_place(path, rows[error.row].record[0])}: {error.what}") from error
        for row, ids in zip(rows, each, strict=True):
            if not ids:
                raise DataError(f"{row_place(path, row.record[0])} has no token to go on from; give it a text")
            yield Prompt(ids, self._answers(row), row.record[1], isinstance(row.value, Conversation))

    def _ids(self, text: str) -> list[int]:
        return prompt_ids(self.tokenizer, text)

    def _answers(self, row: Row) -> tuple[str, ...]:
        """Return the answers of a row: of a conversation the message of the assistant that ends it."""
        if self._conversations is None:
            return answers_of(row.record[1].get(self._job.data.answer))
        try:
            value, _ = conversation_of(row.record)
        except RowError:
            return ()
        if isinstance(value, PlainPair):
            return answers_of(value.completion)
        last = json.loads(value.messages)[-1]
        return answers_of(last["content"]) if last["role"] == ASSISTANT else ()
