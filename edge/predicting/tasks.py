"""How each task reads rows without targets, and what it says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from edge.data.images import ImageExamples, Images
from edge.data.questions import Questions
from edge.data.tagged import TaggedTexts
from edge.data.texts import LabelledTexts, NumberedTexts
from edge.data.tokens import Text, load_tokenizer
from edge.predicting.generating import Sampling, go_on
from edge.predicting.whole import WholeModel
from ringtune.errors import DataError, ModelError
from ringtune.files.given_files import read_json
from ringtune.files.text_files import read_text
from ringtune.jobs.job import Job
from ringtune.jobs.rows import Question, account_of, is_plain_text, task_rows
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
    """What a task does for rows that have no targets.

    Attributes:
        cut_rows: how many of the rows so far are longer than the longest row, and were cut.
    """

    cut_rows: int

    def rows(self, path: Path) -> Iterator[tuple[Row, Any]]:
        """Yield each row as the file has it, and what is predicted for.

        Raises:
            DataError: the file can't be used, or a column is missing.
        """

    def predict(self, inputs: Sequence[Any], first: int) -> list[Row]:
        """Say for each of some rows what is predicted; ``first`` is the index of the first one."""


class _Classes:
    """Names the class of a text or an image, with the probability of each class."""

    cut_rows = 0

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
        self._source, self._job = LabelledTexts(job, Path(job.model.path)), job

    def rows(self, path: Path) -> Iterator[tuple[Row, Text]]:
        """Yield the rows of a table with their texts."""
        return _inputs(path, self._job)

    def predict(self, inputs: Sequence[Text], first: int) -> list[Row]:
        """Name the class of each text."""
        examples = self._source.examples(inputs, [""] * len(inputs))
        batch = examples.batch(range(len(inputs)), {})
        self.cut_rows += examples.cut_rows
        return self.named(self._model.predict(batch).logits)


class Numbers:
    """The ``Predictor`` of regression: a number for each text, or pair of texts."""

    cut_rows = 0

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        self._model, self._job = model, job
        self._source = NumberedTexts(job, Path(job.model.path))

    def rows(self, path: Path) -> Iterator[tuple[Row, Text]]:
        """Yield the rows of a table with their texts."""
        return _inputs(path, self._job)

    def predict(self, inputs: Sequence[Text], first: int) -> list[Row]:
        """Predict the number of each text."""
        examples = self._source.examples(inputs, [0.0] * len(inputs))
        batch = examples.batch(range(len(inputs)), {})
        self.cut_rows += examples.cut_rows
        logits_B1 = self._model.predict(batch).logits
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

    cut_rows = 0

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        self._model, self._labels, self._job = model, job.data.labels, job
        self._source = TaggedTexts(job, Path(job.model.path))

    def rows(self, path: Path) -> Iterator[tuple[Row, tuple[str, ...]]]:
        """Yield the rows of a jsonl or CoNLL file with their words."""
        return _inputs(path, self._job)

    def predict(self, inputs: Sequence[tuple[str, ...]], first: int) -> list[Row]:
        """Name the tag of each word."""
        rows = [self._source.encode(words) for words in inputs]
        self.cut_rows += sum(len(row.words) < row.num_words for row in rows)
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
    cut_rows = 0

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        self._model, self._job = model, job
        self._source = Questions(job, Path(job.model.path))

    def rows(self, path: Path) -> Iterator[tuple[Row, Question]]:
        """Yield the rows of a table with question and context."""
        return _inputs(path, self._job)

    def predict(self, inputs: Sequence[Question], first: int) -> list[Row]:
        """Answer each question; the score is the sum of the logits of the first and the last token."""
        examples = self._source.examples(inputs, ())
        self.cut_rows += examples.cut_rows
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

    cut_rows = 0

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        self._model, self._job, self._sampling = model, job, sampling
        self._tokenizer = load_tokenizer(Path(job.model.path))
        self._ends = ends_of_text(Path(job.model.path), self._tokenizer)

    def rows(self, path: Path) -> Iterator[tuple[Row, str]]:
        """Yield the rows of a table with their texts, or the lines of a plain text that are not blank."""
        if not is_plain_text(path):
            return _inputs(path, self._job)
        lines = read_text(path, self._job.data.encoding)[0].splitlines()
        return (({self._job.data.text: line}, line) for line in lines if line.strip())

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
        self.cut_rows += len(ids) > longest
        added = go_on(ids, self._model.next_logits, how, ends=self._ends, longest=longest, row=row)
        whole, before = self._decode(ids + added), self._decode(ids)
        said = whole.removeprefix(before) if whole.startswith(before) else self._decode(added)
        return {"predicted": said, "tokens": len(added)}

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _inputs(path: Path, job: Job) -> Iterator[tuple[Row, Any]]:
    """Yield the rows of a table with what is predicted for; those without it are left out, or refused at the end."""
    account = account_of(path, job.data, is_own=True)
    for row in task_rows(path, job.model.task, job.data, account, with_targets=False):
        yield row.record[1], row.value
    account.check()


def ends_of_text(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a text, as ``generate`` of transformers finds them.

    Llama 3 has several of them in ``generation_config.json``, of which its tokenizer knows one.

    Args:
        folder: of the model.
        tokenizer: its own, asked where neither ``generation_config.json`` nor ``config.json`` says any.

    Raises:
        ModelError: a file is not readable, or says something that is no token.
    """
    for name in (_GENERATION_FILE, CONFIG_FILE):
        found = _settings(folder / name).get("eos_token_id")
        ends = [found] if isinstance(found, int) else found
        if ends is not None and not (isinstance(ends, list) and all(type(end) is int for end in ends)):
            raise ModelError(f"{folder / name}: eos_token_id is {found!r}, it has to be a token or a list of them")
        if ends:
            return tuple(ends)
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def unused_settings(folder: Path) -> str:
    """Tell which settings of ``generation_config.json`` choose tokens, and are not used; empty if there are none.

    Where that file is missing, transformers takes them from ``config.json``.

    Args:
        folder: of the model.

    Raises:
        ModelError: a file is not readable.
    """
    from transformers import GenerationConfig

    path = folder / _GENERATION_FILE
    values, defaults = _settings(path), GenerationConfig().to_dict()
    if not path.is_file():
        path = folder / CONFIG_FILE
        values = {key: value for key, value in _settings(path).items() if key in defaults}
    neutral: tuple[Any, ...] = (None, False, "", [], {})
    said = ", ".join(
        f"{key} = {value!r}"
        for key, value in values.items()
        if key not in _NO_CHOICE and value != defaults.get(key) and value not in neutral
    )
    if not said:
        return ""
    return f"{path.name} of the model has {said}, not used here: --temperature, --seed and --max-new-tokens say it all"


def _settings(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path)) if path.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} is not JSON that can be read ({error}); fetch the model again") from error


_GENERATION_FILE = "generation_config.json"
_NO_CHOICE_NAMES = """
    _from_model_config assistant_confidence_threshold assistant_early_exit assistant_lookbehind bos_token_id
    cache_config cache_implementation compile_config decoder_start_token_id disable_compile eos_token_id is_assistant
    low_memory max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_return_sequences
    output_attentions output_hidden_states output_logits output_scores pad_token_id prefill_chunk_size
    prompt_lookup_num_tokens return_dict_in_generate return_legacy_cache target_lookbehind transformers_version
    use_cache
"""
_NO_CHOICE = frozenset(_NO_CHOICE_NAMES.split())
"""Keys of ``generation_config.json`` that say what is computed how, and not which token is next.

Source: ``GenerationConfig`` of transformers 4.57.
"""


PREDICTORS: Mapping[str, type[Any]] = {
    CLASSIFICATION: TextClasses,
    REGRESSION: Numbers,
    TAGGING: Tags,
    QUESTION_ANSWERING: Answers,
    CAUSAL_LM: Texts,
    IMAGE_CLASSIFICATION: ImageClasses,
}
"""The ``Predictor`` of each task."""
