"""``python -m edge.runtime.inference JOB SAVED DATA``: print a prediction for each row, as a JSON object.

``ringtune predict`` starts it as a process of its own, because commands run without torch. Base model, adapter and head
are computed as in the ring. Rows are read, predicted and printed batch by batch, so that memory does not grow with the
file.

A language model continues a text token by token. Without a KV cache a token is computed by the code of training; n
tokens of a text of T cost n forwards of T tokens each.

B rows of a batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from edge.data.conversations import Conversations
from edge.data.images import ImageExamples, Images
from edge.data.questions import Questions
from edge.data.tagged import TaggedTexts
from edge.data.texts import LabelledTexts, NumberedTexts
from edge.data.tokens import Batch, RowFaultError, Text, check_ids, load_tokenizer, prompt_ids
from edge.machine.libraries import load_libraries
from edge.model.heads import head_output, task_of
from edge.model.owner import head_input, inverse_of
from edge.model.result import load_saved
from edge.model.skeleton import build_skeleton
from edge.model.slice import DTYPES, BlockRunner, materialise
from edge.model.tensor_files import SafetensorsFiles
from ringtune.errors import DataError, ModelError, RingTuneError
from ringtune.job.job import Job, load_job
from ringtune.job.rows import Question, account_of, is_plain_text, task_rows
from ringtune.machine.resources import usable_cores
from ringtune.models.conversations import Conversation
from ringtune.models.family import (
    CAUSAL_LM,
    CHAT,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    LANGUAGE_TASKS,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)
from ringtune.models.folder import CONFIG_FILE, model_dimensions, read_config
from ringtune.schedule.course import AS_COMPUTED
from ringtune.storage.arrow_files import is_arrow
from ringtune.storage.strict import read_json
from ringtune.storage.tables import row_place
from ringtune.storage.text_files import read_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the model, predict and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m edge.runtime.inference", description=__doc__)
    parser.add_argument("job", type=Path, help="job file, with the names of the classes")
    parser.add_argument("saved", type=Path, help="folder of an adapter or model")
    parser.add_argument("data", type=Path, help="rows")
    parser.add_argument("--max-new-tokens", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        job = load_job(given.job)
        load_libraries()
        for line in predictions(job, given):
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:
        return 1
    except RingTuneError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def predictions(job: Job, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield each row with its prediction; ``told`` has notes: unused settings, and the number of cut rows.

    Raises:
        RingTuneError: model or rows can't be used.
    """
    import torch

    torch.set_num_threads(job.runtime.threads or usable_cores())
    sampling = Sampling(max_new_tokens=given.max_new_tokens, temperature=given.temperature, seed=given.seed)
    model = WholeModel(job, given.saved, job.data.labels)
    predictor = PREDICTORS[job.model.task](model, job, sampling)
    if job.model.task in LANGUAGE_TASKS and (note := unused_settings(Path(job.model.path))):
        yield {"told": note}
    rows, first = predictor.rows(given.data), 0
    at_once = (
        1 if job.model.task in LANGUAGE_TASKS else job.train.batch_size
    )  # texts are continued one by one in any case
    while taken := list(itertools.islice(rows, at_once)):
        try:
            found = predictor.predict([value for _, value in taken], first)
        except RowFaultError as error:
            raise DataError(f"{given.data}, row {first + error.row + 1}: {error.what}") from error
        for (row, _), said in zip(taken, found, strict=True):
            yield {"row": dict(row), "predicted": said}
        first += len(taken)
    if predictor.cut_rows:
        yield {"told": f"{predictor.cut_rows:,} of {first:,} rows are longer than a row may be and were cut"}
    if not first:
        raise DataError(f"{given.data} has no rows; give it rows to predict for")


class WholeModel:
    """A complete model: embedding, all blocks and the head.

    Args:
        saved: folder of the run's adapter or model.
        labels: names of the classes; empty without.

    Attributes:
        longest: most tokens of a row.

    Raises:
        ModelError: the base model is missing, or another one.
        IntegrityError: ``saved`` is damaged, or of another model.
    """

    def __init__(self, job: Job, saved: Path, labels: Sequence[str]) -> None:
        folder, task, dtype = Path(job.model.path), task_of(job.model.task), DTYPES[job.model.dtype]
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with torch.random.fork_rng(devices=[]):
            skeleton = build_skeleton(folder, job)
            self._head = task.add(skeleton.model, tuple(labels))
        count = len(skeleton.blocks)
        with SafetensorsFiles(folder) as weights:
            materialise(skeleton, weights, blocks=range(count), with_embedding=True, dtype=dtype, device=self._device)
            task.connect(skeleton, self._head, weights)
        self._head.to(device=self._device, dtype=dtype).eval()
        load_saved(skeleton, job.model.task, saved, with_head=True)
        skeleton.model.eval()
        self._inverse = inverse_of(skeleton, self._head)
        self._skeleton, self._blocks = (
            skeleton,
            BlockRunner(skeleton, dropout=0.0, seed=job.train.seed, compute=job.train.compute or AS_COMPUTED),
        )
        self.longest = model_dimensions(read_config(folder)).longest

    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        """Compute the head's output for a batch, on the CPU: with ``logits``, or for questions two of them.

        The numbers are those of an evaluation, which computes the same blocks in the same order.
        """
        batch = batch.to(self._device)
        return head_output(self._head, *self._last(batch))

    @torch.no_grad()
    def next_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Compute the logits (V) of the next token after ``ids``, in float32 on the CPU."""
        ids_BT = torch.tensor([list(ids)], dtype=torch.int64, device=self._device)
        nothing = torch.full_like(ids_BT, -100)
        batch = Batch(ids=ids_BT, mask=torch.ones_like(ids_BT), token_type_ids=torch.zeros_like(ids_BT), labels=nothing)
        last_BTD, _, more = self._last(batch)
        logits_BTV = head_output(self._head, last_BTD[:, -1:], batch, more).logits
        cap = getattr(self._head, "logit_cap", 0.0)
        capped_BTV = cap * torch.tanh(logits_BTV / cap) if cap else logits_BTV
        found: torch.Tensor = capped_BTV[0, -1].float().cpu()
        return found

    def _last(self, batch: Batch) -> tuple[torch.Tensor, Batch, dict[str, Any]]:
        """Run embedding and blocks; return the last hidden state, the batch and keyword arguments of the head."""
        from adapters.context import ForwardContext

        base, family = self._skeleton.base, self._skeleton.family
        check_ids(batch, base)
        with ForwardContext(base, input_ids=batch.ids, attention_mask=batch.mask):
            hidden_BTD = family.embed(base, batch)
        context = self._blocks.context(hidden_BTD, batch.mask)
        hidden_BTD = self._blocks.run(hidden_BTD, batch.mask, context, 0, len(self._skeleton.blocks))
        last_BTD, more = head_input(self._skeleton, self._inverse, hidden_BTD, batch)
        return last_BTD, batch, more


NextLogits = Callable[[Sequence[int]], torch.Tensor]


class Sampling(NamedTuple):
    """Choice of the next token.

    Attributes:
        max_new_tokens: most tokens that are added.
        temperature: 0 = always the likeliest token; 1 = the model's probabilities.
        seed: of the draws, with the row's index.
    """

    max_new_tokens: int = 50
    temperature: float = 0.0
    seed: int = 0


def generate_tokens(
    ids: Sequence[int],
    next_logits: NextLogits,
    how: Sampling,
    *,
    ends: Collection[int],
    longest: int,
    row: int = 0,
    is_end: Callable[[Sequence[int]], bool] = lambda added: False,
) -> list[int]:
    """Return the next tokens; a prompt is cut at its beginning to ``longest`` tokens.

    Args:
        ids: of the prompt, at least one.
        next_logits: computes the logits (V) of the next token.
        how: choice of the token.
        ends: tokens that end a text; they are not returned.
        longest: most tokens of the model.
        row: index of the row, for its draws.
        is_end: whether the new tokens end a text, where no single token says so.
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
        if is_end(added):
            break
    return added


def _choose(logits_V: torch.Tensor, temperature: float, draws: torch.Generator) -> int:
    if not temperature:
        return int(logits_V.argmax())
    shares_V = torch.softmax(logits_V.double() / temperature, dim=-1)
    return int(torch.multinomial(shares_V, 1, generator=draws))


Row = Mapping[str, Any]


class Predictor(Protocol):
    """Inference of one task, for rows without targets.

    Attributes:
        cut_rows: number of rows so far that were too long and cut.
    """

    cut_rows: int

    def rows(self, path: Path) -> Iterator[tuple[Row, Any]]:
        """Yield each row of the file, with the model's input for it.

        Raises:
            DataError: the file can't be used, or a column is missing.
        """

    def predict(self, inputs: Sequence[Any], first: int) -> list[Row]:
        """Return the prediction for each input; ``first`` is the index of the first row."""


class _Classes:
    """Names the class of a text or an image, with the probability of each class."""

    cut_rows = 0

    def __init__(self, model: WholeModel, labels: Sequence[str]) -> None:
        self._model, self._labels = model, labels

    def named(self, logits_BC: torch.Tensor) -> list[Row]:
        """Turn logits (B, C) into names and probabilities."""
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
    """The ``Predictor`` of image classification: npz, Parquet, Arrow, or a folder with images at any depth."""

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        super().__init__(model, job.data.labels)
        self._images = Images(job, Path(job.model.path))

    def rows(self, path: Path) -> Iterator[tuple[Row, Any]]:
        """Yield the images, with the name of the file or the index in the array or table."""
        if is_arrow(path):
            yield from (({"row": number - 1}, image) for number, image in self._images.rows_of(path))
            return
        if path.is_dir():
            yield from (({"file": str(file.path.relative_to(path))}, file) for file in self._images.files_in(path))
            return
        yield from (({"row": index}, image) for index, image in enumerate(self._images.images_of(path)))

    def predict(self, inputs: Sequence[Any], first: int) -> list[Row]:
        """Name the class of each image."""
        examples = ImageExamples(inputs, [""] * len(inputs), self._images)
        return self.named(self._model.predict(examples.batch(range(len(inputs)), {})).logits)


class Tags:
    """The ``Predictor`` of token classification: a tag for each word, None for a cut word."""

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
    """The ``Predictor`` of a language model: the continuation of each text."""

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
        """Continue each text."""
        return [self._go_on(text, first + index) for index, text in enumerate(inputs)]

    def _go_on(self, text: str, row: int) -> Row:
        return self._continued(prompt_ids(self._tokenizer, text), row)

    def _continued(self, ids: list[int], row: int, stop: str = "") -> Row:
        """Continue tokens up to an end of text, or to a text ``stop``, which is not returned."""
        if not ids:
            raise DataError(f"row {row + 1} has no token to go on from; give it a text")
        how, longest = self._sampling, self._model.longest
        self.cut_rows += len(ids) > longest
        added = generate_tokens(
            ids,
            self._model.next_logits,
            how,
            ends=self._ends,
            longest=longest,
            row=row,
            is_end=lambda added: bool(stop) and stop in str(self._tokenizer.decode(added)),
        )
        whole, before = self._decode(ids + added), self._decode(ids)
        said = whole.removeprefix(before) if whole.startswith(before) else self._decode(added)
        return {"predicted": said.partition(stop)[0] if stop else said, "tokens": len(added)}

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class ChatAnswers(Texts):
    """The ``Predictor`` of chat: the next answer in each conversation, or the continuation of a plain prompt."""

    _AT_ONCE = 64

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        super().__init__(model, job, sampling)
        self._source = Conversations(job, Path(job.model.path))
        self._stop: str | None = None

    def rows(self, path: Path) -> Iterator[tuple[Row, Any]]:
        """Yield the rows of a table with the tokens before the answer."""
        account = account_of(path, self._job.data, is_own=True)
        rows = task_rows(path, self._job.model.task, self._job.data, account, with_targets=False)
        while taken := list(itertools.islice(rows, self._AT_ONCE)):
            try:
                prompts = self._source.prompts([row.value for row in taken])
            except RowFaultError as error:
                raise DataError(f"{row_place(path, taken[error.row].record[0])}: {error.what}") from error
            for row, ids in zip(taken, prompts, strict=True):
                yield row.record[1], (ids, isinstance(row.value, Conversation))
        account.check()

    def predict(self, inputs: Sequence[Any], first: int) -> list[Row]:
        """Answer each conversation, up to the text that ends an answer."""
        return [
            self._continued(ids, first + index, self._answer_end() if is_conversation else "")
            for index, (ids, is_conversation) in enumerate(inputs)
        ]

    def _answer_end(self) -> str:
        """Return the text that ends an answer, unless it is one token, which then is one of those that end a text."""
        if self._stop is None:
            self._stop = self._source.answer_end()
            ids = self._tokenizer(self._stop, add_special_tokens=False)["input_ids"]
            if len(ids) == 1:
                self._ends, self._stop = (*self._ends, *ids), ""
        return self._stop


def _inputs(path: Path, job: Job) -> Iterator[tuple[Row, Any]]:
    """Yield the rows of a table with their inputs; rows without one are skipped, or refused at the end."""
    account = account_of(path, job.data, is_own=True)
    for row in task_rows(path, job.model.task, job.data, account, with_targets=False):
        yield row.record[1], row.value
    account.check()


def ends_of_text(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a text, as ``generate`` of transformers finds them.

    Llama 3 has several in ``generation_config.json``, of which its tokenizer knows one. The tokenizer is used where
    neither ``generation_config.json`` nor ``config.json`` names any.

    Raises:
        ModelError: a file is not readable, or names no token ids.
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
    """Name the settings of ``generation_config.json`` that would change the choice of tokens and are not used.

    Empty if there are none. Without that file, transformers takes the settings from ``config.json``.

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
"""Keys of ``generation_config.json`` that do not change the choice of the next token.

Source: ``GenerationConfig`` of transformers 4.57.
"""


PREDICTORS: Mapping[str, type[Any]] = {
    CLASSIFICATION: TextClasses,
    REGRESSION: Numbers,
    TAGGING: Tags,
    QUESTION_ANSWERING: Answers,
    CAUSAL_LM: Texts,
    CHAT: ChatAnswers,
    IMAGE_CLASSIFICATION: ImageClasses,
}
"""The ``Predictor`` of each task."""

if __name__ == "__main__":
    sys.exit(main())
