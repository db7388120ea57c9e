"""Sections of ``job.toml`` as frozen dataclasses; each checks its own values when it is built."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Final

from ringtune.config.optimizers import MOMENTUM, OPTIMIZERS
from ringtune.errors import JobError
from ringtune.models.adapter_config import parse_adapter_config
from ringtune.models.conversations import TEMPLATES
from ringtune.models.family import MAX_BLOCKS, TASKS
from ringtune.models.tokenizer import TEMPLATE_NAME
from ringtune.schedule.batches import SPLITS, num_batches, split_alpha
from ringtune.schedule.course import AS_COMPUTED, COMPUTE, FROZEN_DTYPES, MAX_MICROBATCHES, WIRE_DTYPES
from ringtune.schedule.methods import method_names
from ringtune.schedule.methods.base import MIN_IMPROVEMENT, PATIENCE_STEPS
from ringtune.schedule.methods.ringada import EVERY_STEPS
from ringtune.schedule.run_shape import EQUAL, TURNS
from ringtune.schedule.turns import BEST_BY
from ringtune.storage.strict import Bounds, InWords, OneOf, check_fields, nearest
from ringtune.storage.text_files import AUTO as AUTO_ENCODING
from ringtune.storage.text_files import is_encoding
from ringtune.texts import shown

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES: Final = 4095
_MAX_NAME_BYTES: Final = 255


def check_path(name: str, path: str) -> None:
    """Refuse a path that no file system accepts; ``name`` is its key, for the message; raises ``JobError``."""
    longest = max(map(_size, path.split("/")))
    if _size(path) > _MAX_BYTES or longest > _MAX_NAME_BYTES:
        raise JobError(f"{name} = {shown(path)} is no path; one has at most {_MAX_BYTES:,} bytes, a name in it 255")


def check_text(name: str, value: str) -> None:
    """Refuse a value that is blank, or too long for a path; arguments and errors as for ``check_path``."""
    if not value.strip():
        raise JobError(f"{name} is empty; give it a value")
    check_path(name, value)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


MODEL_DTYPES = ("float32", "float64")
AUTO = "auto"
FROZEN = (AS_COMPUTED, *FROZEN_DTYPES, AUTO)
LR_SCHEDULES = ("constant", "linear", "cosine")
MAX_STEPS = 1_000_000
"""Most steps of a run; at one step per second, twelve days."""

MAX_TOKENS = 1 << 20
MAX_OWNERS = 4096
MAX_THREADS = 1024
MAX_PROMPT = 2000
MAX_HELD_OUT = 0.9
"""Largest share of the rows that may be held out."""

MIN_TOKENS = 3
"""Fewest tokens of a row: begin token, one token of the text, end token."""

MAX_WAIT_S = 1_000_000
MAX_ROWS = 1 << 31
MAX_SEED = (1 << 63) - 1
Steps = Annotated[int, Bounds(ge=0, le=MAX_STEPS)]
Count = Annotated[int, Bounds(ge=1, le=MAX_STEPS)]
GivenCount = Annotated[int | None, Bounds(ge=1, le=MAX_STEPS)]
Rate = Annotated[float, Bounds(ge=0.0, le=1000.0)]
WaitSeconds = Annotated[float, Bounds(ge=0.1, le=MAX_WAIT_S)]
DEFAULT_ROUNDS = 5
ANSWERS = "answers"
LOSS_ON = (ANSWERS, "all")
"""Values of ``train.loss_on``."""

ERROR, SKIP = "error", "skip"
MISSING = (ERROR, SKIP)
"""Values of ``data.missing``."""
LENGTHS = ("rounds", "epochs", "max_steps")
"""Keys of ``[train]`` that set the length of a run; at most one may be given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """``[model]``: the pretrained model.

    Attributes:
        path: local folder with ``config.json``, ``model.safetensors`` and the tokenizer; or a GGUF file; or
            ``OWNER/NAME`` (with ``@REVISION``) of a model on a hub, read from the Hugging Face cache or downloaded.
        task: kind of task; decides the columns of the rows, the head and the loss.
        dtype: number type of the computation; float64 is for checks.
    """

    path: str
    task: Annotated[str, OneOf(TASKS)] = "sequence-classification"
    dtype: Annotated[str, OneOf(MODEL_DTYPES)] = "float32"

    def __post_init__(self) -> None:
        check_text("model.path", self.path)
        check_fields(self, where="model", error=JobError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """``[data]``: files and columns of the rows, and how ``--local N`` divides the rows among owners.

    Attributes:
        train: file of rows: csv, tsv, jsonl, json, xlsx, parquet or arrow, or a folder of the last two; for images a
            folder per class, npz, parquet or arrow; for causal-lm also plain text; for token-classification also conll.
            Text formats may end in .gz or .zst. Empty: every owner names its own file.
        eval: file of rows for evaluation, in the same formats. Empty: no evaluation, unless an owner names a file.
        held_out: share of the rows of ``train`` that is used for evaluation and not for training, drawn by the seed;
            ignored by owners with an evaluation file of their own.
        text: column of the text.
        text_pair: column of the second text of a sentence pair. Empty: rows have one text.
        label: column of the class name, or for regression of the number; name of the labels' array in an npz file.
        labels: names of classes or tags. Empty: the sorted union of the owners' names.
        words: column of a text's words, a list of texts.
        tags: column of the words' tags, a list of names of the same length.
        question: column of the question.
        context: column of the text that contains the answer.
        answer: column of the answer: a text, a list of texts, or a table with lists ``text`` and ``answer_start``.
        image: name of the images' array in an npz file, or of their column in parquet or arrow.
        template: chat template, for the task chat: one of the model's own by its name, where it has several, or one for
            a model that has none. zephyr and alpaca end an answer with the end-of-text token, chatml with
            ``<|im_end|>``. Not given: the model's own, for rows with tools that of the name ``tool_use`` if there is
            one.
        append_eos: whether rows of causal-lm end with the end-of-text token, so that the model learns where to end;
            blocks of a plain text and rows that are cut do not. true if not given, and filled in when a run begins; a
            run that began without this key continues without these tokens.
        user: column with the name of the row's user, for ``offload.users``. Empty: all rows of a node belong to one
            user, named as the node. Names of users and their numbers of rows leave the node; they are in the plan.
        missing: a row without a value in a column of the task: error = the file is refused; skip = the row is left out
            and counted.
        encoding: encoding of text files, such as ``utf-8`` or ``cp1252``; auto = UTF-16 or UTF-32 by the byte order
            mark, else UTF-8 if every line is valid, else Windows-1252 with a notice.
        stride: tokens that two consecutive windows of a long context share; 0 = a third of ``train.max_length``.
        split: how ``--local N`` divides the rows: iid = evenly at random; dirichlet = each class unevenly, the more so
            the smaller ALPHA.
        owners: number of nodes that own data with ``--local N``; 0 = all.
    """

    train: str = ""
    eval: str = ""
    held_out: Annotated[float, Bounds(ge=0, le=MAX_HELD_OUT)] = 0.0
    text: str = "text"
    text_pair: str = ""
    label: str = "label"
    labels: tuple[str, ...] = ()
    words: str = "words"
    tags: str = "tags"
    question: str = "question"
    context: str = "context"
    answer: str = "answer"
    image: str = "image"
    template: Annotated[str | None, InWords(f"{', '.join(TEMPLATES)}, or a name such as tool_use")] = None
    append_eos: bool | None = None
    user: str = ""
    missing: Annotated[str, OneOf(MISSING)] = ERROR
    encoding: str = AUTO_ENCODING
    stride: Annotated[int, Bounds(ge=0, le=MAX_TOKENS)] = 0
    split: Annotated[str, InWords(SPLITS)] = "iid"
    owners: Annotated[int, Bounds(ge=0, le=MAX_OWNERS)] = 0

    def __post_init__(self) -> None:
        """Refuse blank or equal columns, labels that are equal or only one, an unknown split or encoding."""
        check_fields(self, where="data", error=JobError)
        for names in (("text", "label"), ("image", "label"), ("words", "tags"), ("question", "context", "answer")):
            self._check_columns(names)
        if self.text_pair:
            self._check_columns(("text", "label", "text_pair"))
        check_path("data.train", self.train)
        check_path("data.eval", self.eval)
        if self.held_out and self.eval:
            raise JobError(
                f"data.eval = {self.eval!r} and data.held_out = {self.held_out} both say what is evaluated; keep one"
            )
        if len(set(self.labels)) != len(self.labels) or len(self.labels) == 1:
            raise JobError(f"data.labels has to be two or more distinct names, not {list(self.labels)}")
        if not all(name.strip() for name in self.labels):
            raise JobError(f"data.labels has an empty name: {list(self.labels)}; give every class a name")
        if self.template is not None and not TEMPLATE_NAME.fullmatch(self.template):
            raise JobError(
                f"data.template = {shown(self.template)} is no name of a chat template; set one of "
                f"{', '.join(TEMPLATES)}, or the name of one of the model's own"
            )
        if not is_encoding(self.encoding):
            raise JobError(f"data.encoding = {self.encoding!r} is no encoding; set 'auto', 'utf-8' or 'cp1252', say")
        split_alpha(self.split)

    def _check_columns(self, names: tuple[str, ...]) -> None:
        """Refuse columns of one task that are empty or the same."""
        columns = [getattr(self, name) for name in names]
        for name, column in zip(names, columns, strict=True):
            check_text(f"data.{name}", column)
        for index, column in enumerate(columns):
            if column in columns[:index]:
                raise JobError(
                    f"data.{names[columns.index(column)]} and data.{names[index]} are both column {column!r}; they "
                    "have to differ"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """``[adapter]``: the parameters that train in each block.

    Attributes:
        config: an AdapterHub configuration string, such as ``seq_bn`` or ``seq_bn[reduction_factor=8]``; ``linear`` or
            ``mlp[hidden=128]`` = auxiliary models of RingTune; ``full`` = no adapter: the attention and feed-forward
            weights of the blocks train. With method hift always ``full``, and then all parameters train.
        from_: folder with the initial values of the adapters, of the same ``config``: of a run or its result, of
            AdapterHub, or of PEFT with LoRA. The head begins with the folder's values too, if it is of the same task
            and classes. Empty: new values, drawn by ``train.seed``.
        sha256: digest of the values in ``from``, filled in when a run begins; other values are then refused. It is
            part of the plan.
    """

    config: str = "seq_bn"
    from_: str = ""
    sha256: Annotated[str, InWords("64 hexadecimal digits, or empty")] = ""

    def __post_init__(self) -> None:
        """Refuse an unknown configuration, a path that is none, and a digest that is none or without ``from``."""
        parse_adapter_config(self.config)
        check_path("adapter.from", self.from_)
        if self.sha256 and not _SHA256.fullmatch(self.sha256):
            raise JobError(f"adapter.sha256 = {shown(self.sha256)} is no digest of 64 hexadecimal digits; leave it out")
        if self.sha256 and not self.from_:
            raise JobError("adapter.sha256 is the digest of the values in adapter.from, which is empty; give both")


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """``[train]``: method, optimizer, sizes and length.

    Attributes:
        method: which units train at which step.
        optimizer: rule of the update; momentum is SGD with momentum, adafactor keeps a number per row and per column
            instead of moments.
        learning_rate: peak learning rate, reached after the warm-up.
        lr_schedule: learning rate from its peak to the last step: constant, a straight line to 0, or half a cosine wave
            to 0.
        warmup_steps: steps over which the learning rate rises from 0 to its peak; with method hift, sweeps over all
            groups.
        warmup_share: instead of ``warmup_steps``: share of the run's steps, or sweeps, rounded up.
        momentum: momentum factor, 0.9 if not given. Only with optimizer momentum.
        weight_decay: factor of the weight decay; decoupled with adamw and adafactor, else added to the gradient.
        dropout: probability of every dropout of the model.
        batch_size: rows of one step.
        microbatches: parts of a batch that pass the ring separately; with more of them nodes are idle for less time.
        max_length: longest row in tokens; longer texts are cut. Ignored for image-classification, where the model
            decides.
        packing: whether the training rows of causal-lm and chat are packed into sequences of ``max_length`` tokens at
            most, so that little is padding. Positions begin anew with each row, and a token sees its own row only.
            ``batch_size``, and counts of rows to train on, then are of sequences. false if not given.
        compute: number type in which blocks multiply: bfloat16 rounds both factors and the result of each product, sums
            in float32; weights that train, gradients, moments and the hidden state stay float32. Faster where a
            processor has such products. float32 if not given.
        loss_on: tokens of a conversation that are learned, for the task chat: answers = all answers of the assistant,
            each with the token that ends it; all = every token. answers if not given.
        local_iterations: steps of an owner's turn.
        turns: order of the owners' turns: equal = one turn for each owner in a round; rows = turns in proportion to the
            owners' rows.
        rounds: number of rounds, each of as many turns as there are owners. 5 if none of ``rounds``, ``epochs`` and
            ``max_steps`` is given.
        epochs: number of passes over all owners' rows, rounded up to whole rounds; may be a fraction.
        max_steps: optimizer steps of the whole run.
        eval_every: steps between evaluations; 0 = only at the end.
        patience_evals: the run ends after this many evaluations in a row without a loss below the best one; 0 = the run
            has all its steps. Without evaluation rows it never ends early, and with ``offload.interval`` only with an
            evaluation before which helpers have applied all gradients, unless ``keep_best`` is set.
        keep_best: whether the result is that of the evaluation with the lowest loss instead of the last step; the
            name of another figure, such as ``"accuracy"``, takes the place of the loss, for ``patience_evals`` too.
            Training waits until each evaluation is judged and, if it is the best, its result is stored. Figures that
            need counts of classes or entities are known after the last step only.
        sample_prompt: prompt that the trained language model completes after the run, by at most 40 tokens, greedily.
        checkpoint_every: steps between checkpoints (at turn boundaries, and at the end); 0 = only when interrupted.
        seed: seed of all random choices: division among owners, order of rows, initial values, dropout.
    """

    method: Annotated[str, OneOf(method_names())] = "ringada"
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    momentum: Annotated[float | None, Bounds(gt=0, lt=1, advice="without any use 'sgd'")] = None
    learning_rate: Rate = 1e-3
    lr_schedule: Annotated[str, OneOf(LR_SCHEDULES)] = "constant"
    warmup_steps: Steps = 0
    warmup_share: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    weight_decay: Rate = 0.0
    dropout: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    batch_size: Annotated[int, Bounds(ge=1, le=MAX_ROWS)] = 16
    microbatches: Annotated[int, Bounds(ge=1, le=MAX_MICROBATCHES), InWords("1 to train.batch_size, or 'auto'")] = 4
    max_length: Annotated[int, Bounds(ge=MIN_TOKENS, le=MAX_TOKENS)] = 128
    packing: bool | None = None
    compute: Annotated[str | None, OneOf(COMPUTE)] = None
    loss_on: Annotated[str | None, OneOf(LOSS_ON)] = None
    local_iterations: Count = 10
    turns: Annotated[str, OneOf(TURNS)] = EQUAL
    rounds: GivenCount = None
    epochs: Annotated[float | None, Bounds(gt=0, le=MAX_STEPS)] = None
    max_steps: GivenCount = None
    eval_every: Steps = 0
    patience_evals: Steps = 0
    keep_best: Annotated[bool | str, InWords(f"true, false, loss, {', '.join(BEST_BY)}")] = False
    sample_prompt: str = ""
    checkpoint_every: Steps = 100
    seed: Annotated[int, Bounds(ge=0, le=MAX_SEED)] = 0

    def __post_init__(self) -> None:
        """Refuse values out of range or in conflict; without any of ``LENGTHS`` set ``DEFAULT_ROUNDS`` rounds."""
        check_fields(self, where="train", error=JobError)
        lengths = [f"train.{name} = {value}" for name in LENGTHS if (value := getattr(self, name)) is not None]
        if not lengths:
            object.__setattr__(self, "rounds", DEFAULT_ROUNDS)
        if len(lengths) > 1:
            raise JobError(f"{' and '.join(lengths[:2])} both set the length of the run; keep one")
        if self.optimizer == "momentum":
            object.__setattr__(self, "momentum", MOMENTUM if self.momentum is None else self.momentum)
        elif self.momentum is not None:
            raise JobError(
                f"train.momentum = {self.momentum} has no meaning for train.optimizer = {self.optimizer!r}; remove "
                "it, or use optimizer = 'momentum'"
            )
        if not self.packing:
            object.__setattr__(self, "packing", None)  # jobs of before have the bytes of before
        if self.compute == AS_COMPUTED:
            object.__setattr__(self, "compute", None)
        if self.warmup_steps and self.warmup_share:
            raise JobError(
                f"train.warmup_steps = {self.warmup_steps} and train.warmup_share = {self.warmup_share} both say how "
                "long the learning rate rises; keep one"
            )
        if len(self.sample_prompt) > MAX_PROMPT or (self.sample_prompt and not self.sample_prompt.strip()):
            raise JobError(
                f"train.sample_prompt has {len(self.sample_prompt):,} characters, it has to be a text of at most "
                f"{MAX_PROMPT:,}"
            )
        if self.patience_evals and not self.eval_every:
            raise JobError(
                f"train.patience_evals = {self.patience_evals} waits for evaluations, and train.eval_every = 0 has one "
                "at the end only; set eval_every"
            )
        if self.keep_best == "loss":
            object.__setattr__(self, "keep_best", True)
        if isinstance(self.keep_best, str) and self.keep_best not in BEST_BY:
            raise JobError(
                f"train.keep_best = {self.keep_best!r} is no figure of every evaluation; "
                f"{nearest(self.keep_best, ('loss', *BEST_BY))}"
            )
        if self.keep_best and not self.eval_every:
            raise JobError(
                f"train.keep_best = {str(self.keep_best).lower()} keeps the best of several evaluations, and "
                "train.eval_every = 0 has one at the end only; set eval_every"
            )
        if self.microbatches > self.batch_size:
            raise JobError(
                f"train.microbatches = {self.microbatches} is more than train.batch_size = {self.batch_size}; "
                "lower microbatches or raise batch_size"
            )

    def num_steps(self, rows: Sequence[int]) -> int:
        """Number of optimizer steps of the run, given the number of rows of each owner; raises ``JobError``.

        Example: 5 rounds of 10 steps with 4 owners are 200 steps. With 100 rows each and batches of 16 a pass is 7
        steps an owner; 3 epochs are 84 steps, rounded up to 3 rounds, 120 steps.
        """
        if self.max_steps is not None:
            return self.max_steps
        steps_of_round = self.local_iterations * len(rows)
        if self.epochs is None:
            rounds, length = self.rounds or DEFAULT_ROUNDS, f"train.rounds = {self.rounds}"
        else:
            steps_of_pass = sum(num_batches(count, self.batch_size) for count in rows)
            rounds = math.ceil(Fraction(repr(self.epochs)) * steps_of_pass / steps_of_round)
            length = f"train.epochs = {self.epochs}, which are {rounds} rounds"
        steps = rounds * steps_of_round
        if steps > MAX_STEPS:
            raise JobError(
                f"{length} of train.local_iterations = {self.local_iterations} steps with {len(rows)} owners are "
                f"{steps:,} steps, at most {MAX_STEPS:,} are possible; lower one of them"
            )
        return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """``[wire]``: encoding of the tensors between nodes.

    Attributes:
        dtype: number type in which tensors are sent; a smaller one sends fewer bytes and rounds.
    """

    dtype: Annotated[str, OneOf(WIRE_DTYPES)] = "float32"

    def __post_init__(self) -> None:
        check_fields(self, where="wire", error=JobError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Privacy:
    """``[privacy]``: blocks that stay with the owner besides tokens and labels.

    Attributes:
        private_blocks: number p of frozen blocks ``[0, p)`` that every owner runs itself.
    """

    private_blocks: Annotated[int, Bounds(ge=0, le=MAX_BLOCKS)] = 0

    def __post_init__(self) -> None:
        check_fields(self, where="privacy", error=JobError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """``[runtime]``: threads, time limits and number types of a node.

    Attributes:
        threads: compute threads of a node; 0 = all its cores, or with ``--local N`` its share of them.
        lease_s: a node that is silent for this time is lost, in seconds.
        wait_s: longest time of a node without any progress, in seconds.
        plan_s: longest time of planning, in seconds; after it the best plan so far is used.
        record: whether nodes send their events and commands, for replay.
        frozen: number type in which frozen weights are held; a smaller one takes less memory and rounds them; auto =
            the first of float32, bfloat16, int8, nf4 with which the job fits the nodes. Matrices of a GGUF file stay in
            its blocks with float32 and auto.
    """

    threads: Annotated[int, Bounds(ge=0, le=MAX_THREADS)] = 0
    lease_s: WaitSeconds = 10.0
    wait_s: WaitSeconds = 300.0
    plan_s: Annotated[float, Bounds(ge=0.001, le=MAX_WAIT_S)] = 60.0
    record: bool = False
    frozen: Annotated[str, OneOf(FROZEN)] = AS_COMPUTED

    def __post_init__(self) -> None:
        check_fields(self, where="runtime", error=JobError)


def warmup_steps(train: Train, num_steps: int) -> int:
    """Steps of the warm-up of a run of ``num_steps``; a share is rounded up.

    Example: a share of 0.06 of 320 steps is 20. Source: transformers ``TrainingArguments.get_warmup_steps``.
    """
    return train.warmup_steps or math.ceil(train.warmup_share * num_steps)


def learning_rate(train: Train, step: int, num_steps: int) -> float:
    """Learning rate of the update at ``step``.

    Returns:
        During warm-up ``step / warmup_steps`` of the peak, so 0 at step 0; after it the peak (constant), a straight
        line down to 0 at ``num_steps`` (linear), or half a cosine wave down to 0 (cosine).

    Source: transformers ``get_constant_schedule_with_warmup`` and its linear and cosine siblings.
    """
    warmup = warmup_steps(train, num_steps)
    if step < warmup:
        return train.learning_rate * step / warmup
    if train.lr_schedule == "constant":
        return train.learning_rate
    span = max(1, num_steps - warmup)
    progress = min(1.0, (step - warmup) / span)
    if train.lr_schedule == "linear":
        return train.learning_rate * (1.0 - progress)
    return train.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


AUTO_PLACEMENT: Final = "auto"
MAX_CHOSEN_MICROBATCHES: Final = 16
"""Most micro-batches that the planner chooses; a job may name more."""
NEVER: Final = "never"
AutoOrNever = Annotated[str, OneOf((AUTO_PLACEMENT, NEVER))]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementSettings:
    """``[placement]``: freedoms of the planner when it places blocks on nodes.

    Attributes:
        replicas: several nodes host the same blocks and divide the micro-batches: auto = if that is predicted to be
            faster and all have memory for it; never = no.
        follow: slices change with the unfreezing schedule: auto = if the run is predicted to be faster with these moves
            (where the losses decide the schedule, a move is considered when another block begins to train); never = no.
        replan: the run moves to another placement when nodes or links change their speed: auto = if the predicted gain
            exceeds the cost of the move; never = no.
        microbatches: the planner replaces ``train.microbatches`` by a power of two up to 16: auto = if that is
            predicted to be faster; never = no. ``train.microbatches = "auto"`` means auto.
    """

    replicas: AutoOrNever = AUTO_PLACEMENT
    follow: AutoOrNever = NEVER
    replan: AutoOrNever = AUTO_PLACEMENT
    microbatches: AutoOrNever = NEVER

    def __post_init__(self) -> None:
        check_fields(self, where="placement", error=JobError)


def with_free_microbatches(tables: Mapping[str, object]) -> Mapping[str, object]:
    """Translate ``train.microbatches = "auto"`` of a job's tables to a number and ``placement.microbatches = "auto"``.

    The number is the default, lowered to the number of rows of a batch.
    """
    train, placement, default = tables.get("train"), tables.get("placement", {}), Train()
    if not isinstance(train, Mapping) or not isinstance(placement, Mapping):
        return tables
    if train.get("microbatches") != AUTO_PLACEMENT:
        return tables
    rows = train.get("batch_size", default.batch_size)
    number = min(default.microbatches, rows) if type(rows) is int else default.microbatches
    return {
        **tables,
        "train": {**train, "microbatches": number},
        "placement": {**placement, "microbatches": AUTO_PLACEMENT},
    }


AUTO_COPIES: Final = "auto"
NEXT: Final = "next"
NONE: Final = "none"
WAIT: Final = "wait"
SKIP_OWNER: Final = "skip"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySettings:
    """``[recovery]``: reaction to the loss of a node; it changes the result only if an owner's rows are skipped.

    Attributes:
        copies: which nodes keep, at the end of each turn, a copy of a host's trained state, so that the run continues
            without the host: next = the next host in the ring, on another rack (ringtune node --rack) where that has
            room; none = no node: a lost host ends the run, which can be resumed; auto = next, if the method may move
            and the nodes have memory for it; a number, such as 2 = so many nodes, on other racks where possible: the
            run continues when so many nodes are lost at once. Where all parameters train, copies are of checkpoints, on
            the nodes' disks, from which the run goes on without the host; auto = next, if there are checkpoints and the
            disks have room.
        owners: when an owner of rows is lost: wait = the run waits for it, for at most ``wait_s``, and continues from
            copies when it is back; skip = the run continues from copies without the owner's turns, until it is back.
        wait_s: longest time that the run waits for a node that it can't do without, in seconds: an owner of rows, or a
            node with memory for blocks that fit nowhere else. After it the run ends, and can be resumed. 0 = the run
            ends at once, as it does without copies, and with --local, where no node is started again.
    """

    copies: Annotated[int | str, InWords("auto, next, none, or a number from 1 on")] = AUTO_COPIES
    owners: Annotated[str, OneOf((WAIT, SKIP_OWNER))] = WAIT
    wait_s: Annotated[float, Bounds(ge=0.0, le=MAX_WAIT_S)] = 300.0

    def __post_init__(self) -> None:
        """Refuse other copies, and ``owners = "skip"`` without copies."""
        check_fields(self, where="recovery", error=JobError)
        if isinstance(self.copies, str):
            OneOf((AUTO_COPIES, NEXT, NONE)).check("recovery.copies", self.copies, JobError)
        elif self.copies < 1:
            raise JobError(f"recovery.copies is {self.copies}, it has to be at least 1; or give 'none'")
        if self.owners == SKIP_OWNER and self.copies == NONE:
            raise JobError(
                "recovery.owners = 'skip' goes on from copies, but recovery.copies = 'none' keeps none; leave one out"
            )

    @property
    def needs_copies(self) -> bool:
        """Whether a plan without copies is refused."""
        return self.copies not in (AUTO_COPIES, NONE)

    @property
    def num_copies(self) -> int:
        """The number of copies; 0 = by the name of their place (``Placement.num_copies``)."""
        return self.copies if isinstance(self.copies, int) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfreeze:
    """``[unfreeze]``: steps at which RingAda trains one more block, from the top down.

    Attributes:
        every_steps: one more block after every so many steps; 40 if neither this nor ``at`` is given.
        at: one more block at each of these steps, or ``"auto"``: whenever the loss has stopped improving.
        patience_steps: with ``at = "auto"``: one more block after so many steps without improvement; 20 if not given.
        min_improvement: with ``at = "auto"``: fall of the loss that counts as an improvement, as a share of the best
            loss; 0.01 if not given.
    """

    every_steps: GivenCount = None
    at: Annotated[tuple[int, ...] | str | None, InWords("a list of steps or 'auto'")] = None
    patience_steps: GivenCount = None
    min_improvement: Annotated[float | None, Bounds(ge=0, lt=1)] = None

    def __post_init__(self) -> None:
        """Refuse values out of range, and fill in defaults."""
        check_fields(self, where="unfreeze", error=JobError)
        if self.every_steps is not None and self.at is not None:
            raise JobError(
                f"unfreeze.every_steps = {self.every_steps} and unfreeze.at both say when to unfreeze; keep one"
            )
        if self.every_steps is None and self.at is None:
            object.__setattr__(self, "every_steps", EVERY_STEPS)
        if isinstance(self.at, str):
            if self.at != "auto":
                raise JobError(f"unfreeze.at = {self.at!r} is neither a list of steps nor 'auto'")
            if self.patience_steps is None:
                object.__setattr__(self, "patience_steps", PATIENCE_STEPS)
            if self.min_improvement is None:
                object.__setattr__(self, "min_improvement", MIN_IMPROVEMENT)
            return
        for name in ("patience_steps", "min_improvement"):
            if getattr(self, name) is not None:
                raise JobError(f"unfreeze.{name} has a meaning with unfreeze.at = 'auto' only; remove it")
        if any(later <= earlier for earlier, later in itertools.pairwise((0, *(self.at or ())))):
            raise JobError(f"unfreeze.at is {list(self.at or ())}, it has to be above 0 and strictly increasing")
        if self.at:
            Bounds(le=MAX_STEPS).check("unfreeze.at", self.at[-1], JobError)
