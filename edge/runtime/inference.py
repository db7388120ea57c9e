"""``python -m edge.runtime inference JOB SAVED DATA``: print a prediction for each row, as a JSON object.

``ringtune predict`` starts it as a process of its own, because commands run without torch. Base model, adapter and head
are computed as in the ring. Rows are read, predicted and printed batch by batch, so that memory does not grow with the
file.

A language model continues a text token by token. Blocks keep the keys and values of the tokens before, so that n tokens
after a text of T cost one forward of T tokens and n of one token. Where the text grows beyond the model's longest, each
token costs a forward of the newest tokens.

B rows of a batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import torch

from edge.data.dataset import SOURCES
from edge.data.detokenizer import Detokenizer, Ends, ends_with
from edge.data.images import ImageExamples
from edge.data.prompts import Prompt, PromptReader
from edge.data.tokens import IGNORED, Batch, RowFaultError, Text, check_ids
from edge.machine.libraries import load_libraries
from edge.model.frozen_weights import FrozenFiles
from edge.model.heads import require_largest, task_of, text_logits
from edge.model.key_values import KeyValueCache, most_bytes
from edge.model.owner import head_input, inverse_of
from edge.model.result import load_saved
from edge.model.skeleton import build_skeleton
from edge.model.slice import DTYPES, BlockRunner, materialise
from ringtune.errors import DataError, ModelError
from ringtune.job.job import Job, load_job
from ringtune.job.rows import Question, account_of, task_rows
from ringtune.machine.process import exit_code_of
from ringtune.machine.resources import free_bytes, usable_cores
from ringtune.models.adapter_support import mixed_tokens
from ringtune.models.family import (
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    LANGUAGE_TASKS,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)
from ringtune.models.folder import CONFIG_FILE, model_dimensions, read_config
from ringtune.models.tokenizer import read_settings_table
from ringtune.schedule.course import AS_COMPUTED
from ringtune.storage.arrow_files import is_arrow
from ringtune.techniques.frozen_weights import frozen_choices

_LOGITS_AT_ONCE: Final = 32
"""Tokens with logits in memory at a time."""


def main(arguments: Sequence[str], output: TextIO) -> int:
    """Load the model, predict and write lines; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m edge.runtime inference", description=__doc__)
    parser.add_argument("job", type=Path, help="job file, with the names of the classes")
    parser.add_argument("saved", type=Path, help="folder of an adapter or model")
    parser.add_argument("data", type=Path, help="rows")
    parser.add_argument("--max-new-tokens", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)

    def predict() -> None:
        job = load_job(given.job)
        load_libraries()
        for line in predictions(job, given):
            output.write(json.dumps(line) + "\n")
            output.flush()

    return exit_code_of(predict)


def predictions(job: Job, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield each row with its prediction; ``told`` has notes: unused settings, and the number of cut rows.

    Raises ``RingTuneError``: model or rows can't be used.
    """
    torch.set_num_threads(job.runtime.threads or usable_cores())
    sampling = Sampling(max_new_tokens=given.max_new_tokens, temperature=given.temperature, seed=given.seed)
    model = WholeModel(job, given.saved, job.data.labels)
    task, folder = job.model.task, Path(job.model.path)
    if task in LANGUAGE_TASKS:
        writer, at_once = TextWriter(model, job, sampling), 1  # texts are continued one by one anyway
        predictor = Predictor(writer.rows, writer.predict)
        if note := unused_settings(folder):
            yield {"told": note}
    else:
        predictor, at_once = PREDICTORS[task](model, job, SOURCES[task](job, folder)), job.train.batch_size
    rows, first, cut_rows = predictor.rows(given.data), 0, 0
    while taken := list(itertools.islice(rows, at_once)):
        try:
            predictions, num_cut = predictor.predict([value for _, value in taken], first)
        except RowFaultError as error:
            raise DataError(f"{given.data}, row {first + error.row + 1}: {error.what}") from error
        for (row, _), said in zip(taken, predictions, strict=True):
            yield {"row": dict(row), "predicted": said}
        first, cut_rows = first + len(taken), cut_rows + num_cut
    if cut_rows:
        yield {"told": f"{cut_rows:,} of {first:,} rows are longer than a row may be and were cut"}
    if not first:
        raise DataError(f"{given.data} has no rows; give it rows to predict for")


class WholeModel:
    """A complete model: embedding, all blocks and the head.

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
        with FrozenFiles(folder, frozen_choices(job, is_native=False)[0]) as weights:
            materialise(skeleton, weights, blocks=range(count), with_embedding=True, dtype=dtype, device=self._device)
            task.connect(skeleton, self._head, weights)
        self._head.to(device=self._device, dtype=dtype).eval()
        load_saved(skeleton, job.model.task, saved, with_head=True)
        skeleton.model.eval()
        self._inverse = inverse_of(skeleton, self._head)
        compute = job.train.compute or AS_COMPUTED
        self._skeleton = skeleton
        self._blocks = BlockRunner(skeleton, dropout=0.0, seed=job.train.seed, compute=compute)
        config = read_config(folder)
        self._dimensions, self._dtype = model_dimensions(config), dtype
        self.longest = self._dimensions.longest
        has_cache = job.model.task in LANGUAGE_TASKS and not mixed_tokens(job.adapter.config)
        has_cache = has_cache and skeleton.layout.takes_cache(config)
        self._cache = KeyValueCache(skeleton.base.config) if has_cache else None
        self._cached: list[int] = []

    def cache_bytes(self, tokens: int) -> int:
        """Most bytes of the keys and values of a text of ``tokens`` tokens; 0 where none are kept."""
        if self._cache is None:
            return 0
        return most_bytes(self._skeleton.base.config, self._dimensions, tokens, self._dtype)

    def free_bytes(self) -> int:
        """Bytes that are free where the model is."""
        return int(torch.cuda.mem_get_info()[0]) if self._device.type == "cuda" else free_bytes()

    @torch.no_grad()
    def predict(self, batch: Batch) -> torch.Tensor:
        """Compute the head's logits for a batch.

        The numbers are those of an evaluation, which computes the same blocks in the same order.
        """
        batch = batch.to(self._device)
        last_BTD, more = self._last(batch)
        logits: torch.Tensor = self._head(last_BTD, **more)
        return require_largest(logits)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse tokens beyond the embedding; raises ``ModelError``."""
        check_ids(torch.tensor(ids), self._skeleton.base)

    @torch.no_grad()
    def next_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Compute the logits (V) of the next token after ``ids``, in float32 on the CPU; as ``last_logits``."""
        return next(self.last_logits(ids, 1))[0]

    @torch.no_grad()
    def last_logits(self, ids: Sequence[int], count: int) -> Iterator[torch.Tensor]:
        """Yield the logits (T, V) of the tokens after the last ``count``, in order, in float32 on the CPU.

        There are those of ``_LOGITS_AT_ONCE`` tokens at a time: all of 4,096 tokens take 2 GB with a vocabulary of
        128,000. Tokens with which the text of the call before began are not computed again.
        """
        kept = self._keep(ids[:-count])
        last_BTD, _ = self._last(text_batch(ids[kept:], kept).to(self._device), self._cache)
        self._cached = list(ids) if self._cache is not None else []
        for part_BTD in torch.split(last_BTD[:, -count:], _LOGITS_AT_ONCE, dim=1):
            yield text_logits(self._head, part_BTD)

    def forget(self) -> None:
        """Compute the next text from its first token on, so that its logits have the same bits after any other text."""
        self._cached = []

    def read(self, ids: Sequence[int], size: int) -> Iterator[int]:
        """Compute the keys and values of a text but for its last tokens, at most ``size``; yield after each ``size``.

        What is not kept is not computed here.
        """
        if self._cache is not None:
            for stop in range(self._common(ids) + size, len(ids), size):
                self.next_logits(ids[:stop])
                yield stop

    def _common(self, ids: Sequence[int]) -> int:
        pairs = zip(self._cached, ids, strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(self._cached), len(ids)))

    def _keep(self, ids: Sequence[int]) -> int:
        """Leave in the cache what it has of these first tokens of a text; return their number."""
        if self._cache is None:
            return 0
        common = self._common(ids)
        self._cached = []  # until the blocks have run: they may fail in between
        return self._cache.keep(common)

    def _last(self, batch: Batch, cache: KeyValueCache | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
        """Run embedding and blocks; return the last hidden state and keyword arguments of the head."""
        base, family = self._skeleton.base, self._skeleton.family
        check_ids(batch.ids, base, batch.token_type_ids)
        hidden_BTD = family.embed(base, batch)
        context = self._blocks.context(hidden_BTD, batch.mask, cache)
        hidden_BTD = self._blocks.run(hidden_BTD, batch.mask, context, 0, len(self._skeleton.blocks))
        return head_input(self._skeleton, self._inverse, hidden_BTD, batch)


def text_batch(ids: Sequence[int], before: int) -> Batch:
    """Make a batch (1, T) without targets of tokens of a text that has ``before`` tokens before them."""
    ids_BT = torch.tensor([list(ids)], dtype=torch.int64)
    return Batch(
        ids=ids_BT,
        mask=torch.ones_like(ids_BT),
        token_type_ids=torch.zeros_like(ids_BT),
        labels=torch.full_like(ids_BT, IGNORED),
        positions=torch.arange(before, before + len(ids))[None],
    )


NextLogits = Callable[[Sequence[int]], torch.Tensor]


class Sampling(NamedTuple):
    """Choice of the next token.

    Attributes:
        temperature: 0 = always the likeliest token; 1 = the model's probabilities.
        seed: of the draws, with the row's index.
        top_p: draw from the likeliest tokens that have this probability together.
    """

    max_new_tokens: int = 50
    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0


def next_tokens(
    ids: Sequence[int], next_logits: NextLogits, how: Sampling, *, ends: Collection[int], longest: int, row: int = 0
) -> Iterator[int]:
    """Yield the tokens after a prompt of at least one, which is cut at its beginning to ``longest`` tokens.

    ``next_logits`` computes the logits (V) of the next token. Tokens in ``ends`` end a text, and are not yielded.
    ``row`` is the index of the row, for its draws.
    """
    draws, kept = seeded(how.seed, row), list(ids)
    for _ in range(how.max_new_tokens):
        logits_V = next_logits(kept[-longest:])
        token = choose(logits_V, how.temperature, draws, top_k=how.top_k, top_p=how.top_p)
        if token in ends:
            return
        kept.append(token)
        yield token


def seeded(seed: int, row: int) -> torch.Generator:
    """Return the generator of a row's draws."""
    return torch.Generator().manual_seed((seed * 1_000_003 + row) % (1 << 63))


def choose(
    logits_V: torch.Tensor, temperature: float, draws: torch.Generator, *, top_k: int = 0, top_p: float = 1.0
) -> int:
    """Choose the next token by its logits; see ``Sampling``."""
    if not temperature:
        return int(logits_V.argmax())
    return int(torch.multinomial(shares_of(logits_V, temperature, top_k, top_p), 1, generator=draws))


def shares_of(logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Return the probability (V) with which each token is drawn.

    Source: transformers 4.57, ``TopKLogitsWarper`` and ``TopPLogitsWarper``, after the temperature.
    """
    scores_V = (logits_V.double() - logits_V.max()) / temperature
    if 0 < top_k < len(scores_V):
        scores_V = scores_V.masked_fill(scores_V < scores_V.topk(top_k).values[-1], -torch.inf)
    if top_p < 1:
        sorted_V, places_V = scores_V.sort()
        is_out_V = sorted_V.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        is_out_V[-1] = False  # the likeliest token stays
        scores_V = scores_V.masked_fill(is_out_V.scatter(0, places_V, is_out_V), -torch.inf)
    return scores_V.softmax(dim=-1)


Row = Mapping[str, Any]


class Predictor(NamedTuple):
    """Inference of one task, for rows without targets.

    Attributes:
        rows: yields each row of a file, with the model's input for it; raises ``DataError``.
        predict: from inputs and the index of the first row, the prediction for each input, and the number of inputs
            that were too long and cut.
    """

    rows: Callable[[Path], Iterator[tuple[Row, Any]]]
    predict: Callable[[Sequence[Any], int], tuple[list[Row], int]]


def table_rows(job: Job, path: Path) -> Iterator[tuple[Row, Any]]:
    """Yield the rows of a table; those without an input are skipped, or refused at the end."""
    account = account_of(path, job.data, is_own=True)
    for row in task_rows(path, job.model.task, job.data, account, with_targets=False):
        yield row.record[1], row.value
    account.check()


def named(logits_BC: torch.Tensor, labels: Sequence[str]) -> list[Row]:
    """Turn logits (B, C) into the names of the likeliest classes, with the probability of each class."""
    shares_BC = torch.softmax(logits_BC.double().cpu(), dim=-1)
    rows: list[Row] = []
    for shares_C in shares_BC.tolist():
        best = max(range(len(shares_C)), key=shares_C.__getitem__)
        each = {label: round(share, 6) for label, share in zip(labels, shares_C, strict=True)}
        rows.append({"predicted": labels[best], "probability": each[labels[best]], "of_class": each})
    return rows


def of_texts(model: WholeModel, job: Job, source: Any) -> Predictor:
    """Sequence classification and regression: a class, or a number, for each text or pair of texts."""
    is_number = job.model.task == REGRESSION

    def predict(inputs: Sequence[Text], first: int) -> tuple[list[Row], int]:
        examples = source.examples(inputs, [0.0 if is_number else ""] * len(inputs))
        logits_BC = model.predict(examples.batch(range(len(inputs)), {}))
        if is_number:
            return [{"predicted": value} for value in logits_BC.squeeze(-1).tolist()], examples.cut_rows
        return named(logits_BC, job.data.labels), examples.cut_rows

    return Predictor(functools.partial(table_rows, job), predict)


def of_images(model: WholeModel, job: Job, source: Any) -> Predictor:
    """Image classification: npz, Parquet, Arrow, or a folder with images at any depth."""

    def rows(path: Path) -> Iterator[tuple[Row, Any]]:
        """Yield the images, with the name of the file or the index in the array or table."""
        if is_arrow(path):
            return (({"row": number - 1}, image) for number, image in source.rows_of(path))
        if path.is_dir():
            return (({"file": str(file.path.relative_to(path))}, file) for file in source.files_in(path))
        return (({"row": index}, image) for index, image in enumerate(source.images_of(path)))

    def predict(inputs: Sequence[Any], first: int) -> tuple[list[Row], int]:
        examples = ImageExamples(inputs, [""] * len(inputs), source)
        return named(model.predict(examples.batch(range(len(inputs)), {})), job.data.labels), 0

    return Predictor(rows, predict)


def of_words(model: WholeModel, job: Job, source: Any) -> Predictor:
    """Token classification: a tag for each word, None for a cut word."""

    def predict(inputs: Sequence[tuple[str, ...]], first: int) -> tuple[list[Row], int]:
        rows = [source.encode(words) for words in inputs]
        batch = source.made(rows, [("",) * len(words) for words in inputs]).batch(range(len(rows)), {"": 0})
        found_BT = model.predict(batch).argmax(dim=-1)
        said: list[Row] = []
        for words, row, labels_T, found_T in zip(inputs, rows, batch.labels, found_BT, strict=True):
            tags: list[str | None] = [None] * len(words)
            for word, index in zip(row.words, found_T[labels_T == 0].tolist(), strict=True):
                tags[word] = job.data.labels[index]
            said.append({"predicted": tags})
        return said, sum(row.num_cut > 0 for row in rows)

    return Predictor(functools.partial(table_rows, job), predict)


_WINDOWS: Final = 16
"""Windows of questions in a batch."""


def of_questions(model: WholeModel, job: Job, source: Any) -> Predictor:
    """Question answering: the best span of all windows of a context, scored by the sum of its ends' logits."""

    def predict(inputs: Sequence[Question], first: int) -> tuple[list[Row], int]:
        examples = source.examples(inputs, ())
        answers: dict[int, Row] = {}
        for start in range(0, len(examples), _WINDOWS):
            batch = examples.batch(range(start, min(start + _WINDOWS, len(examples))), {})
            for answer in examples.scores.close(batch, model.predict(batch), first):
                begins, ends = answer.place
                score = round(answer.best[0], 4)
                answers[answer.question] = {"predicted": answer.text, "score": score, "start": begins, "stop": ends}
        return [answers[index] for index in range(len(inputs))], examples.cut_rows

    return Predictor(functools.partial(table_rows, job), predict)


class TextWriter:
    """Writes the continuation of each text with a language model, and the next answer of a chat."""

    def __init__(self, model: WholeModel, job: Job, sampling: Sampling) -> None:
        folder = Path(job.model.path)
        limits = model_sampling(folder)
        self._model, self._sampling = model, sampling._replace(top_k=limits.top_k, top_p=limits.top_p)
        self._reader = PromptReader(job, folder)
        self._tokenizer = self._reader.tokenizer
        self._ends = Ends(ends_of_text(folder, self._tokenizer))

    def rows(self, path: Path) -> Iterator[tuple[Row, Any]]:
        """Yield the rows of a table, or the lines of a plain text that are not blank, with their prompts."""
        return ((prompt.row, prompt) for prompt in self._reader.all(path))

    def predict(self, inputs: Sequence[Prompt], first: int) -> tuple[list[Row], int]:
        """Continue each text, or answer each conversation up to what ends an answer."""
        said = [
            self._continued(list(prompt.ids), row, self._answer_ends if prompt.is_conversation else self._ends)
            for row, prompt in enumerate(inputs, first)
        ]
        return said, sum(len(prompt.ids) > self._model.longest for prompt in inputs)

    @functools.cached_property
    def _answer_ends(self) -> Ends:
        return ends_with(self._ends, self._tokenizer, self._reader.answer_end())

    def _continued(self, ids: list[int], row: int, ends: Ends) -> Row:
        if not ids:
            raise DataError(f"row {row + 1} has no token to go on from; give it a text")
        how, longest, num_tokens = self._sampling, self._model.longest, 0
        pieces, said = Detokenizer(self._tokenizer, ids, ends.stops), ""
        self._model.forget()
        for token in next_tokens(ids, self._model.next_logits, how, ends=ends.tokens, longest=longest, row=row):
            said, num_tokens = said + pieces.add(token), num_tokens + 1
            if pieces.is_ended:
                break
        return {"predicted": said + pieces.end(), "tokens": num_tokens}


_LIMITS = ("top_k", "top_p")
_OPTIONS = "--temperature, --seed and --max-new-tokens say it all"


def ends_of_text(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a text, as ``generate`` of transformers finds them; raises ``ModelError``.

    Llama 3 has several in ``generation_config.json``, of which its tokenizer knows one. The tokenizer is used where
    neither ``generation_config.json`` nor ``config.json`` names any.
    """
    for name in (_GENERATION_FILE, CONFIG_FILE):
        value = read_settings_table(folder / name).get("eos_token_id")
        ends = [value] if isinstance(value, int) else value
        if ends is not None and not (isinstance(ends, list) and all(type(end) is int for end in ends)):
            raise ModelError(f"{folder / name}: eos_token_id is {value!r}, it has to be a token or a list of them")
        if ends:
            return tuple(ends)
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def model_sampling(folder: Path) -> Sampling:
    """Return how a model wants its tokens drawn: temperature, ``top_k`` and ``top_p`` of ``generation_config.json``.

    Greedy if it does not ask for draws. A file without ``top_k`` has no such limit here; transformers takes 50.

    Raises ``ModelError``: the file is not readable, or a value is not a number in its range.
    """
    path, least, most = folder / _GENERATION_FILE, {"top_k": 0, "top_p": 0.0, "temperature": 0.0}, {"top_p": 1.0}
    values = read_settings_table(path)
    settings: dict[str, float] = {}
    for name, lowest in least.items():
        value = values.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None:
            continue
        if not is_number or not lowest <= value <= most.get(name, sys.maxsize) or (name == "top_k" and value % 1):
            raise ModelError(f"{path}: {name} is {value!r}, which draws no token; correct it, or fetch the model again")
        settings[name] = value
    temperature = settings.get("temperature", 1.0) if values.get("do_sample") is True else 0.0
    return Sampling(temperature=temperature, top_k=int(settings.get("top_k", 0)), top_p=settings.get("top_p", 1.0))


def unused_settings(folder: Path, *, remedy: str = _OPTIONS, used: Collection[str] = _LIMITS) -> str:
    """Name the settings of ``generation_config.json`` that would change the choice of tokens and are not used.

    Empty if there are none. Without that file, transformers takes the settings from ``config.json``.

    Raises ``ModelError``: a file is not readable.
    """
    from transformers import GenerationConfig

    path = folder / _GENERATION_FILE
    values, defaults = read_settings_table(path), {**GenerationConfig().to_dict(), **_DEFAULTS}
    if not path.is_file():
        path, used = folder / CONFIG_FILE, ()
        values = {key: value for key, value in read_settings_table(path).items() if key in defaults}
    neutral: tuple[Any, ...] = (None, False, "", [], {})
    said = ", ".join(
        f"{key} = {value!r}"
        for key, value in values.items()
        if key not in _NO_CHOICE and key not in used and value != defaults.get(key) and value not in neutral
    )
    return f"{path.name} of the model has {said}, not used here: {remedy}" if said else ""


_GENERATION_FILE = "generation_config.json"
_NO_CHOICE_NAMES = """
    _from_model_config assistant_confidence_threshold assistant_early_exit assistant_lookbehind bos_token_id
    cache_config cache_implementation compile_config decoder_start_token_id disable_compile eos_token_id is_assistant
    low_memory max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_return_sequences
    output_attentions output_hidden_states output_logits output_scores pad_token_id prefill_chunk_size
    prompt_lookup_num_tokens return_dict_in_generate return_legacy_cache target_lookbehind transformers_version
    use_cache
"""
_DEFAULTS: Mapping[str, float] = {
    **dict.fromkeys(("encoder_repetition_penalty", "length_penalty", "repetition_penalty"), 1.0),
    **dict.fromkeys(("temperature", "top_p", "typical_p"), 1.0),
    **dict.fromkeys(("num_beam_groups", "num_beams", "num_return_sequences"), 1),
    "max_length": 20,
    "top_k": 50,
}
"""Settings of transformers that change nothing; version 5 does not write them into a new ``GenerationConfig``."""
_NO_CHOICE = frozenset(_NO_CHOICE_NAMES.split())
"""Keys of ``generation_config.json`` that do not change the choice of the next token.

Source: ``GenerationConfig`` of transformers 4.57 and 5.24.
"""


PREDICTORS: Mapping[str, Callable[[WholeModel, Job, Any], Predictor]] = {
    CLASSIFICATION: of_texts,
    REGRESSION: of_texts,
    TAGGING: of_words,
    QUESTION_ANSWERING: of_questions,
    IMAGE_CLASSIFICATION: of_images,
}
"""By task; the last argument is its ``edge.data.examples.Source``."""
