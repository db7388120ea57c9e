"""How each task reads rows without targets, and what it says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from edge.data.images import ImageExamples, Images
from edge.data.questions import Question, Questions
from edge.data.tagged import TaggedTexts
from edge.data.texts import LabelledTexts, NumberedTexts, text_columns, text_or_pair
from edge.data.tokens import Text, load_tokenizer
from edge.predicting.generating import Sampling, go_on
from edge.predicting.whole import WholeModel
from ringtune.errors import DataError, ModelError
from ringtune.files.given_files import read_json
from ringtune.files.tables import Record, table_rows, text_of
from ringtune.files.tagged import tagged_rows
from ringtune.jobs.job import Data, Job
from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)
from ringtune.models.tensors import CONFIG_FILE

Row = Mapping[str, Any]


class Predictor(Protocol):
    """What a task does for rows that have no targets."""

    def rows(self, path: Path) -> Iterator[tuple[Row, Any]]:
        """Yield each row as the file has it, and what is predicted for.

        Raises:
            DataError: the file can't be used, or a column is missing.
        """

    def predict(self, inputs: Sequence[Any], first: int) -> list[Row]:
        """Say for each of some rows what is predicted; ``first`` is the index of the first one."""


class _Classes:
    """Names the class of a text or an image, with the probability of each class."""

    def __init__(self, model: WholeModel, labels: Sequence[str]) -> None:
        self._model, self._labels = model, labels

    def named(self, logits_BC: torch.Tensor) -> list[Row]:
        """Turn logits of rows into names and probabilities."""
        shares_BC = torch.softmax(logits_BC.double().cpu(), dim=-1)
        found: list[Row] = []
        for shares_C in shares_BC.tolist():
            best = max(range(len(shares_C)), key=shares_C.__getitem__)
            each = {label: round(share, 6) for label, share in zip(self._labels, shares_C, strict=True)}
            found.append({"predicted": self._labels[best], "probability": each[self._labels[best]], "of_class": each})
        return found


class TextClasses(_Classes):
    """The ``Predictor`` of sequence classification."""

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        super().__init__(model, job.data.labels)
        self._source, self._data = LabelledTexts(job, Path(job.model.path)), job.data

    def rows(self, path: Path) -> Iterator[tuple[Row, Text]]:
        """Yield the rows of a table with their texts."""
        return _texts_of(path, self._data)

    def predict(self, inputs: Sequence[Text], first: int) -> list[Row]:
        """Name the class of each text."""
        examples = self._source.examples(inputs, [""] * len(inputs))
        return self.named(self._model.predict(examples.batch(range(len(inputs)), {})).logits)


class Numbers:
    """The ``Predictor`` of regression: a number for each text, or pair of texts."""

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        self._model, self._data = model, job.data
        self._source = NumberedTexts(job, Path(job.model.path))

    def rows(self, path: Path) -> Iterator[tuple[Row, Text]]:
        """Yield the rows of a table with their texts."""
        return _texts_of(path, self._data)

    def predict(self, inputs: Sequence[Text], first: int) -> list[Row]:
        """Predict the number of each text."""
        examples = self._source.examples(inputs, [0.0] * len(inputs))
        logits_B1 = self._model.predict(examples.batch(range(len(inputs)), {})).logits
        return [{"predicted": value} for value in logits_B1.squeeze(-1).tolist()]


class ImageClasses(_Classes):
    """The ``Predictor`` of image classification: an npz file, or a folder with images at any depth."""

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        super().__init__(model, job.data.labels)
        self._images = Images(job, Path(job.model.path))

    def rows(self, path: Path) -> Iterator[tuple[Row, Any]]:
        """Yield names of files, or indices in an array, with the images."""
        if path.is_dir():
            yield from (({"file": str(file.path.relative_to(path))}, file) for file in self._images.files_in(path))
            return
        yield from (({"row": index}, image) for index, image in enumerate(self._images.images_of(path)))

    def predict(self, inputs: Sequence[Any], first: int) -> list[Row]:
        """Name the class of each image."""
        examples = ImageExamples(inputs, [""] * len(inputs), self._images)
        return self.named(self._model.predict(examples.batch(range(len(inputs)), {})).logits)


class Tags:
    """The ``Predictor`` of token classification: a tag for each word, and none for a word that is cut."""

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        self._model, self._labels = model, job.data.labels
        self._words, self._tags = job.data.words, job.data.tags
        self._source = TaggedTexts(job, Path(job.model.path))

    def rows(self, path: Path) -> Iterator[tuple[Row, tuple[str, ...]]]:
        """Yield the rows of a jsonl or CoNLL file with their words."""
        for row in tagged_rows(path, words=self._words, tags="", known_tags=self._tags):
            yield row.record[1], row.words

    def predict(self, inputs: Sequence[tuple[str, ...]], first: int) -> list[Row]:
        """Name the tag of each word."""
        rows = [self._source.encode(words) for words in inputs]
        batch = self._source.made(rows, [("",) * len(words) for words in inputs]).batch(range(len(rows)), {"": 0})
        found_BT = self._model.predict(batch).logits.argmax(dim=-1)
        said: list[Row] = []
        for words, row, labels_T, found_T in zip(inputs, rows, batch.labels, found_BT, strict=True):
            tags: list[str | None] = [None] * len(words)
            for word, index in zip(row.words, found_T[labels_T == 0].tolist(), strict=True):
                tags[word] = self._labels[index]
            said.append({"predicted": tags})
        return said


class Answers:
    """The ``Predictor`` of question answering: the best span of all windows of a context."""

    _WINDOWS = 16

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        self._model, self._data = model, job.data
        self._source = Questions(job, Path(job.model.path))

    def rows(self, path: Path) -> Iterator[tuple[Row, Question]]:
        """Yield the rows of a table with question and context."""
        names = (self._data.question, self._data.context)
        for record in table_rows(path, {"data.question": names[0], "data.context": names[1]}):
            yield record[1], _question(path, record, names)

    def predict(self, inputs: Sequence[Question], first: int) -> list[Row]:
        """Answer each question; the score is the sum of the logits of the first and the last token."""
        examples = self._source.examples(inputs, ())
        found: dict[int, Row] = {}
        for start in range(0, len(examples), self._WINDOWS):
            batch = examples.batch(range(start, min(start + self._WINDOWS, len(examples))), {})
            output = self._model.predict(batch)
            logits = torch.stack([output.start_logits, output.end_logits], dim=-1)
            for answer in examples.close(batch, logits, first):
                begins, ends = answer.place
                score = round(answer.best[0], 4)
                found[answer.question] = {"predicted": answer.text, "score": score, "start": begins, "stop": ends}
        return [found[index] for index in range(len(inputs))]


class Texts:
    """The ``Predictor`` of a language model: how each text goes on."""

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        self._model, self._column, self._sampling = model, job.data.text, sampling
        self._tokenizer = load_tokenizer(Path(job.model.path))
        self._ends = ends_of_text(Path(job.model.path), self._tokenizer)

    def rows(self, path: Path) -> Iterator[tuple[Row, str]]:
        """Yield the rows of a table with their texts, or the lines of a plain text that are not blank."""
        if path.suffix.lower() == ".txt":
            yield from (({self._column: line}, line) for line in _lines(path))
            return
        for record in table_rows(path, {"data.text": self._column}):
            yield record[1], text_of(path, record, self._column)

    def predict(self, inputs: Sequence[str], first: int) -> list[Row]:
        """Let the model go on with each text."""
        return [self._go_on(text, first + index) for index, text in enumerate(inputs)]

    def _go_on(self, text: str, row: int) -> Row:
        end = self._tokenizer.eos_token_id
        ids = list(self._tokenizer(text, verbose=False)["input_ids"])
        if ids and ids[-1] == end:
            ids.pop()
        if not ids:
            raise DataError(f"row {row + 1} has no token to go on from; give it a text")
        how, longest = self._sampling, self._model.longest
        added = go_on(ids, self._model.next_logits, how, ends=self._ends, longest=longest, row=row)
        whole, before = self._decode(ids + added), self._decode(ids)
        said = whole.removeprefix(before) if whole.startswith(before) else self._decode(added)
        return {"predicted": said, "tokens": len(added)}

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def ends_of_text(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a text, as ``generate`` of transformers finds them.

    Llama 3 has several of them in ``generation_config.json``, of which its tokenizer knows one.

    Args:
        folder: of the model.
        tokenizer: its own, asked where neither ``generation_config.json`` nor ``config.json`` says any.

    Raises:
        ModelError: a file is not readable, or says something that is no token.
    """
    for name in ("generation_config.json", CONFIG_FILE):
        path = folder / name
        try:
            found = read_json(path).get("eos_token_id") if path.is_file() else None
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{path} is not JSON that can be read ({error}); fetch the model again") from error
        ends = [found] if isinstance(found, int) else found
        if ends is not None and not (isinstance(ends, list) and all(type(end) is int for end in ends)):
            raise ModelError(f"{path}: eos_token_id is {found!r}, it has to be a token or a list of them")
        if ends:
            return tuple(ends)
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def _texts_of(path: Path, data: Data) -> Iterator[tuple[Row, Text]]:
    for record in table_rows(path, text_columns(data)):
        yield record[1], text_or_pair(path, record, data)


def _question(path: Path, record: Record, names: tuple[str, str]) -> Question:
    question, context = (text_of(path, record, name) for name in names)
    return Question(question.strip(), context, (), 0, 0)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from (line.rstrip("\n") for line in file if line.strip())
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}; give --data a file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); convert it") from error


PREDICTORS: Mapping[str, type[Any]] = {
    CLASSIFICATION: TextClasses,
    REGRESSION: Numbers,
    TAGGING: Tags,
    QUESTION_ANSWERING: Answers,
    CAUSAL_LM: Texts,
    IMAGE_CLASSIFICATION: ImageClasses,
}
"""The ``Predictor`` of each task."""
