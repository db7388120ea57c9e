"""Extractive question answering: windows of contexts as examples, and exact match and F1 of predicted answers.

A long context becomes several overlapping windows, each after the whole question. The target of a window without the
answer is its first token. The prediction for a question is the best span of all its windows.

Exact match and F1 over words ignore case, punctuation, the articles a, an, the, and extra spaces; the best of several
right answers counts, as in SQuAD.

Source: Devlin et al. 2019, section 4.2 (windows and spans); Rajpurkar et al. 2016, section 6.1, and the official
``evaluate-v1.1.py`` (scores).
"""

from __future__ import annotations

import re
import string
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from edge.data.examples import TextExamples, Values
from edge.data.tokens import Batch, Padder, TokenRow, load_tokenizer
from ringtune.errors import DataError, ModelError
from ringtune.job.job import Job
from ringtune.job.rows import Question, Rows, read_rows
from ringtune.models.family import QUESTION_ANSWERING

LONGEST_ANSWER = 30
"""Most tokens of a predicted answer, as in the official baselines."""

_MIN_CONTEXT = 8


class Window(NamedTuple):
    """One example: the question and a piece of its context.

    Attributes:
        first: position of the context's first token.
        starts: first character of each context token.
        stops: one past the last character of each context token.
        target: positions of the answer's first and last token; (0, 0) if the answer is not in this window.
    """

    tokens: TokenRow
    question: int
    first: int
    starts: array[int]
    stops: array[int]
    target: tuple[int, int]


class Questions:
    """The ``Source`` of question answering.

    Raises:
        ModelError: no tokenizer, or one without the offsets of its tokens.
        DataError: ``train.max_length`` is below 16.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self._data = job.data
        self._max_length = job.train.max_length
        self._stride = job.data.stride or job.train.max_length // 3
        self._tokenizer = load_tokenizer(folder)
        if not self._tokenizer.is_fast:
            raise ModelError(f"the tokenizer in {folder} has no offsets; add its tokenizer.json")
        if self._max_length < 2 * _MIN_CONTEXT:
            raise DataError(f"train.max_length is {self._max_length}; a question with its context needs more")
        self._padder = Padder(self._tokenizer)

    def read(self, path: Path) -> Rows:
        """Read questions with their contexts; questions without an answer in the context are left out and counted."""
        return read_rows(path, QUESTION_ANSWERING, self._data)

    def examples(self, rows: Sequence[Question], labels: Sequence[str]) -> TextExamples:
        """Make the windows of these questions; a question is cut to half a window, a context never."""
        num_cut, windows = 0, list[Window]()
        for index, row in enumerate(rows):
            made, is_cut = self._windows(index, row)
            windows += made
            num_cut += is_cut
        of_rows = [0] * len(rows)
        for window in windows:
            of_rows[window.question] += 1

        def spans(chosen: Sequence[int], *_: object) -> torch.Tensor:
            return torch.tensor([windows[index].target for index in chosen], dtype=torch.int64)

        return TextExamples(
            [window.tokens for window in windows],
            spans,
            self._padder,
            scores=AnswerScores(rows, windows, of_rows),
            of_rows=of_rows,
            cut_rows=num_cut,
            names_examples=True,
        )

    def _windows(self, index: int, row: Question) -> tuple[list[Window], bool]:
        """Make the windows of a question, and return whether the question is cut."""
        tokenizer, limit = self._tokenizer, self._max_length // 2
        question = row.question
        offsets = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        is_cut = len(offsets) > limit
        if is_cut:
            question, offsets = question[: offsets[limit - 1][1]], offsets[:limit]
        room = self._max_length - len(offsets) - tokenizer.num_special_tokens_to_add(pair=True)
        if room < 1:
            raise DataError(f"train.max_length is {self._max_length}; a question has {len(offsets)} tokens")
        encoding = tokenizer(
            question,
            row.context,
            truncation="only_second",
            max_length=self._max_length,
            stride=min(self._stride, room - 1),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        return [_window(encoding, part, index, row) for part in range(len(encoding["input_ids"]))], is_cut


class AnswerScores:
    """The ``Scores`` of question answering. ``of_rows``: number of windows of each question."""

    def __init__(self, questions: Sequence[Question], windows: Sequence[Window], of_rows: Sequence[int]) -> None:
        self._questions, self._windows, self._of_rows = questions, windows, of_rows
        self._open: dict[tuple[int, int], AnswerSpan] = {}

    def add(self, batch: Batch, predictions: torch.Tensor, key: int) -> Values:
        """Score the questions whose last window is in this micro-batch, by logits of start and end (B, T, 2).

        Returns:
            ``questions``, ``exact_sum`` and ``f1_sum`` of the complete questions.
        """
        closed = self.close(batch, predictions, key)
        exact = sum(exact_match(entry.text, self._questions[entry.question].answers) for entry in closed)
        overlap = sum(f1(entry.text, self._questions[entry.question].answers) for entry in closed)
        return (("questions", float(len(closed))), ("exact_sum", float(exact)), ("f1_sum", float(overlap)))

    def close(self, batch: Batch, predictions: torch.Tensor, key: int) -> list[AnswerSpan]:
        """Take the best span of each window; return the questions with all windows seen; arguments as ``add``."""
        if batch.examples is None:
            raise DataError("the batch does not say which windows it has")
        logits = predictions.float().cpu()
        closed: list[AnswerSpan] = []
        for row, index in enumerate(batch.examples.tolist()):
            window = self._windows[index]
            ends = window.first + len(window.starts)
            score, first, last = best_span(logits[row, window.first : ends])
            entry = self._open.setdefault((key, window.question), AnswerSpan(question=window.question))
            place = (window.starts[first], window.stops[last]) if len(window.starts) else (0, 0)
            entry.add((score, -index), place, self._questions[window.question].context)
            if entry.seen == self._of_rows[window.question]:
                closed.append(self._open.pop((key, window.question)))
        return closed

    def forget(self) -> None:
        """Drop the incomplete questions of an unfinished evaluation."""
        self._open.clear()


@dataclass(slots=True)
class AnswerSpan:
    """The best answer to a question over the windows so far; their order does not matter.

    Attributes:
        best: sum of logits, and minus the index of its window.
        place: first character in the context, and one past the last.
    """

    question: int
    seen: int = 0
    text: str = ""
    best: tuple[float, int] = field(default=(-float("inf"), 0))
    place: tuple[int, int] = (0, 0)

    def add(self, score: tuple[float, int], place: tuple[int, int], context: str) -> None:
        """Add the best span of one more window."""
        self.seen += 1
        if score > self.best:
            self.best, self.place, self.text = score, place, context[place[0] : place[1]]


def best_span(logits_T2: torch.Tensor) -> tuple[float, int, int]:
    """Find the span of at most ``LONGEST_ANSWER`` context tokens with the largest sum of start and end logit (T, 2).

    Example: start logits 0, 3 and end logits 5, 0. From 1 to 0 the sum is 8, but that span ends before it starts, so
    the result is the span from 0 to 0 with the sum 5.

    Returns:
        The sum, first and last token; of equal spans the first one.
    """
    tokens = logits_T2.shape[0]
    if not tokens:
        return -float("inf"), 0, 0
    sums = logits_T2[:, None, 0] + logits_T2[None, :, 1]
    allowed = torch.ones(tokens, tokens, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
    best = int(sums.masked_fill(~allowed, -float("inf")).argmax())
    first, last = divmod(best, tokens)
    return float(sums[first, last]), first, last


def _window(encoding: Any, part: int, index: int, row: Question) -> Window:
    ids = array("i", encoding["input_ids"][part])
    types = array("i", encoding["token_type_ids"][part] if "token_type_ids" in encoding else [0] * len(ids))
    places = [token for token, sequence in enumerate(encoding.sequence_ids(part)) if sequence == 1]
    offsets = [encoding["offset_mapping"][part][token] for token in places]
    first = places[0] if places else 0
    return Window(
        tokens=TokenRow(ids, types),
        question=index,
        first=first,
        starts=array("i", [start for start, _ in offsets]),
        stops=array("i", [stop for _, stop in offsets]),
        target=_target(offsets, first, row),
    )


def _target(offsets: Sequence[tuple[int, int]], first: int, row: Question) -> tuple[int, int]:
    """Find the positions of the answer's first and last token; (0, 0) if the window lacks one."""
    begins = [token for token, (start, stop) in enumerate(offsets) if start <= row.start < stop]
    ends = [token for token, (start, stop) in enumerate(offsets) if start < row.stop <= stop]
    return (first + begins[0], first + ends[-1]) if begins and ends else (0, 0)


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Normalise a text for comparison: "The cat's  hat!" becomes "cats hat"."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, answers: Sequence[str]) -> float:
    """Return 1 if the normalised prediction is one of the normalised answers, otherwise 0."""
    return float(any(normalised(predicted) == normalised(answer) for answer in answers))


def f1(predicted: str, answers: Sequence[str]) -> float:
    """F1 of the words for the best of several answers.

    Example: "red hat" for the answer "hat" has precision 1/2 and recall 1, so 2/3.
    """
    return max(_f1(normalised(predicted).split(), normalised(answer).split()) for answer in answers)


def _f1(predicted: list[str], answer: list[str]) -> float:
    common = sum((Counter(predicted) & Counter(answer)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(answer)
    return 2 * precision * recall / (precision + recall)
