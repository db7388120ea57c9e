"""The job as a value: defaults, ranges, overrides, and its way through TOML."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import JobError
from ringtune.jobs.job import Adapter, Data, Job, Model, Privacy, Runtime, Train, Unfreeze, Wire, parse_job
from ringtune.jobs.optimizers import OPTIMIZERS
from ringtune.jobs.parts.hift import MOST_UNITS, HiftSettings
from ringtune.jobs.sections import LEAST_TOKENS, LR_SCHEDULES, MODEL_DTYPES, MOST_STEPS
from ringtune.models.family import CLASS_TASKS
from ringtune.schedule.course import WIRE_DTYPES
from ringtune.schedule.methods import Everything, RingAda, method_names
from ringtune.schedule.methods.hift import ALWAYS, ORDERS, STATES

JOB = Job(model=Model(path="models/tiny"))

DEFAULTS = """\
[model]
path = "models/tiny"
task = "sequence-classification"
dtype = "float32"

[data]
train = ""
eval = ""
held_out = 0.0
text = "text"
text_pair = ""
label = "label"
labels = []
words = "words"
tags = "tags"
question = "question"
context = "context"
answer = "answer"
image = "image"
user = ""
missing = "error"
encoding = "auto"
stride = 0
split = "iid"
owners = 0

[adapter]
config = "seq_bn"

[train]
method = "ringada"
optimizer = "adamw"
learning_rate = 0.001
lr_schedule = "constant"
warmup_steps = 0
weight_decay = 0.0
dropout = 0.0
batch_size = 16
microbatches = 4
max_length = 128
local_iterations = 10
turns = "equal"
rounds = 5
eval_every = 0
patience_evals = 0
keep_best = false
sample_prompt = ""
checkpoint_every = 100
seed = 0

[unfreeze]
every_steps = 40

[wire]
dtype = "float32"

[privacy]
private_blocks = 0

[operations]
policy = "standard"
heads = 1
by_slice = false
balance = false
backward_score = "weight-magnitude"
forward_score = "fisher"
score_scale = 1.0
ties = "spread"
refresh_rounds = 0
table = ""

[memory]
activations = "none"

[offload]
mode = "off"
interval = 1
pairs = "float32"
merged = false
overlap = false
users = "joint"

[placement]
replicas = "auto"
follow = "never"
replan = "auto"
microbatches = "never"

[cache]
prefix = "off"
max_bytes = 1073741824
dtype = "float32"

[recovery]
copies = "auto"
owners = "wait"
wait_s = 300.0

[runtime]
threads = 0
lease_s = 10.0
wait_s = 300.0
plan_s = 60.0
record = false
frozen = "float32"
"""


def test_job_defaults_are_the_documented_ones() -> None:
    """The whole resolved file of a job that names only a model."""
    assert JOB.to_toml() == DEFAULTS


def test_job_toml_names_max_steps_alone_when_that_is_the_length() -> None:
    """Rounds and max_steps never stand side by side."""
    text = dataclasses.replace(JOB, train=Train(max_steps=7)).to_toml()
    assert "\nmax_steps = 7\n" in text and "\nrounds = " not in text


# TOML has no lone surrogates; everything else a text may hold has to come back.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: bool(text.strip()))
POSITIVE, COUNT, SMALL = st.integers(1, 10**6), st.integers(0, MOST_STEPS), st.integers(0, 1024)
RATE = st.floats(0, 1000, allow_nan=False)


@st.composite
def trains(draw: st.DrawFn) -> Train:
    """Any valid ``[train]``."""
    batch, in_rounds = draw(POSITIVE), draw(st.booleans())
    return Train(
        method=draw(st.sampled_from(method_names())),
        optimizer=(optimizer := draw(st.sampled_from(OPTIMIZERS))),
        momentum=draw(st.none() | st.floats(0.001, 0.999)) if optimizer == "momentum" else None,
        learning_rate=draw(RATE),
        lr_schedule=draw(st.sampled_from(LR_SCHEDULES)),
        warmup_steps=draw(COUNT),
        weight_decay=draw(RATE),
        dropout=draw(st.floats(0, 0.99)),
        batch_size=batch,
        microbatches=draw(st.integers(1, batch)),
        max_length=draw(st.integers(LEAST_TOKENS, 4096)),
        local_iterations=draw(POSITIVE),
        rounds=draw(POSITIVE) if in_rounds else None,
        max_steps=None if in_rounds else draw(POSITIVE),
        eval_every=draw(COUNT),
        checkpoint_every=draw(COUNT),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


UNFREEZINGS = (
    st.builds(Unfreeze, every_steps=POSITIVE)
    | st.builds(Unfreeze, at=st.sets(POSITIVE, max_size=5).map(lambda steps: tuple(sorted(steps))))
    | st.builds(Unfreeze, at=st.just("auto"), patience_steps=POSITIVE, min_improvement=st.floats(0, 0.99))
)
SECTIONS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.builds(Model, path=TEXT, task=st.sampled_from(CLASS_TASKS), dtype=st.sampled_from(MODEL_DTYPES)),
    "data": st.builds(
        Data,
        train=st.text(st.characters(exclude_categories=["Cs"])),
        text=TEXT.map(lambda text: f"t{text}"),
        label=TEXT.map(lambda text: f"l{text}"),
        labels=st.just(()) | st.lists(TEXT, min_size=2, unique=True).map(tuple),
        split=st.sampled_from(["iid", "dirichlet:0.3", "dirichlet:10"]),
        question=TEXT.map(lambda text: f"q{text}"),
        context=TEXT.map(lambda text: f"c{text}"),
        answer=TEXT.map(lambda text: f"a{text}"),
        image=TEXT.map(lambda text: f"i{text}"),
        stride=SMALL,
        owners=SMALL,
    ),
    "adapter": st.builds(Adapter, config=st.sampled_from(["seq_bn", "lora[r=4]|ia3", "lora[attn_matrices=['q','k']]"])),
    "wire": st.builds(Wire, dtype=st.sampled_from(WIRE_DTYPES)),
    "privacy": st.builds(Privacy, private_blocks=SMALL),
    "runtime": st.builds(
        Runtime,
        threads=SMALL,
        lease_s=st.floats(0.1, 1e6),
        wait_s=st.floats(0.1, 1e6),
        record=st.booleans(),
    ),
}


HIFTS = st.builds(
    HiftSettings,
    group_size=st.integers(1, MOST_UNITS),
    order=st.sampled_from(ORDERS),
    always_active=st.lists(st.sampled_from(ALWAYS), unique=True).map(tuple),
    state=st.sampled_from(STATES),
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any valid job; its method has its own settings and no others."""
    train = draw(trains())
    sections = {name: draw(section) for name, section in SECTIONS.items()}
    if train.method == "hift":
        sections |= {"hift": draw(HIFTS), "adapter": Adapter(config="full"), "privacy": Privacy()}
    return Job(train=train, unfreeze=draw(UNFREEZINGS) if train.method == "ringada" else None, **sections)


@given(job=jobs())
def test_job_survives_toml(job: Job) -> None:
    """Whatever the job, reading its resolved form gives an equal job."""
    assert parse_job(job.to_toml(), source="job") == job


BAD: list[tuple[type[Any], dict[str, Any], str]] = [
    (Model, {"path": " "}, "model.path is empty; give it a value"),
    (Model, {"path": "x", "dtype": "float16"}, "model.dtype = 'float16' is not one of float32, float64"),
    (Model, {"path": "x", "task": "causal_lm"}, "model.task = 'causal_lm' is not one of sequence-classification"),
    (Data, {"text": "x", "label": "x"}, "data.text and data.label are both column 'x'; they have to differ"),
    (Data, {"text": ""}, "data.text is empty"),
    (Data, {"labels": ("a", "a")}, "data.labels has to be two or more distinct names, not ['a', 'a']"),
    (Data, {"labels": ("a",)}, "data.labels has to be two or more distinct names, not ['a']"),
    (Data, {"split": "dirichlet"}, "data.split is 'dirichlet', it has to be 'iid' or 'dirichlet:ALPHA'"),
    (Data, {"split": "dirichlet:0"}, "with ALPHA above 0"),
    (Data, {"split": "dirichlet:nan"}, "with ALPHA above 0"),
    (Data, {"split": "dirichlet:inf"}, "with ALPHA above 0"),
    (Data, {"owners": -1}, "data.owners is -1, it has to be at least 0"),
    (Adapter, {"config": "seq_bm"}, "adapter.config 'seq_bm' is not known; did you mean 'seq_bn'?"),
    (Train, {"method": "ringado"}, "did you mean 'ringada'?"),
    (
        Train,
        {"optimizer": "adam"},
        "train.optimizer = 'adam' is not one of adamw, sgd, momentum, adagrad, adafactor; did you mean 'adamw'?",
    ),
    (Train, {"optimizer": "adagard"}, "did you mean 'adagrad'?"),
    (Train, {"optimizer": "momentum", "momentum": 1.0}, "train.momentum is 1.0, it has to be in (0, 1)"),
    (Train, {"optimizer": "momentum", "momentum": 0.0}, "without any use 'sgd'"),
    (Train, {"momentum": 0.9}, "train.momentum = 0.9 has no meaning for train.optimizer = 'adamw'; remove it"),
    (Train, {"lr_schedule": "step"}, "train.lr_schedule = 'step' is not one of constant, linear, cosine"),
    (Train, {"learning_rate": -1e-3}, "train.learning_rate is -0.001, it has to be at least 0"),
    (Train, {"learning_rate": float("nan")}, "train.learning_rate is nan"),
    (Train, {"weight_decay": -1.0}, "train.weight_decay is -1.0"),
    (Train, {"dropout": 1.0}, "train.dropout is 1.0, it has to be in [0, 1)"),
    (Train, {"dropout": float("nan")}, "train.dropout is nan"),
    (Train, {"batch_size": 0}, "train.batch_size is 0, it has to be at least 1"),
    (Train, {"microbatches": 17}, "train.microbatches = 17 is more than train.batch_size = 16; lower microbatches"),
    (Train, {"max_length": 0}, "train.max_length is 0"),
    (Train, {"local_iterations": 0}, "train.local_iterations is 0"),
    (Train, {"rounds": 0}, "train.rounds is 0"),
    (Train, {"epochs": 0.0}, "train.epochs is 0.0, it has to be above 0 and at most"),
    (Train, {"epochs": 1.0, "max_steps": 3}, "train.epochs = 1.0 and train.max_steps = 3 both set the length"),
    (Train, {"turns": "row"}, "train.turns = 'row' is not one of equal, rows"),
    (Train, {"max_steps": 0}, "train.max_steps is 0"),
    (Train, {"rounds": 2, "max_steps": 3}, "train.rounds = 2 and train.max_steps = 3 both set the length"),
    (Train, {"seed": -1}, "train.seed is -1"),
    (Train, {"eval_every": -1}, "train.eval_every is -1"),
    (Train, {"checkpoint_every": -1}, "train.checkpoint_every is -1"),
    (Train, {"warmup_steps": -1}, "train.warmup_steps is -1"),
    (Unfreeze, {"every_steps": 0}, "unfreeze.every_steps is 0, it has to be at least 1"),
    (Unfreeze, {"every_steps": 5, "at": "auto"}, "unfreeze.every_steps = 5 and unfreeze.at both say when"),
    (Unfreeze, {"at": (3, 2)}, "unfreeze.at is [3, 2], it has to be above 0 and strictly increasing"),
    (Unfreeze, {"at": "auto", "min_improvement": float("nan")}, "unfreeze.min_improvement is nan"),
    (Wire, {"dtype": "int4"}, "wire.dtype = 'int4' is not one of"),
    (Privacy, {"private_blocks": -1}, "privacy.private_blocks is -1"),
    (Runtime, {"threads": -1}, "runtime.threads is -1"),
    (Runtime, {"lease_s": 0.0}, "runtime.lease_s is 0.0, it has to be at least 0.1"),
    (Runtime, {"wait_s": -1.0}, "runtime.wait_s is -1.0, it has to be at least 0.1"),
]


@pytest.mark.parametrize(("cls", "values", "message"), BAD, ids=lambda part: str(part)[:40])
def test_job_section_refuses_values_out_of_range(cls: type[Any], values: dict[str, Any], message: str) -> None:
    """Each section checks itself, also when code builds it; the message has key, value and bound."""
    with pytest.raises(JobError) as caught:
        cls(**values)
    assert message in str(caught.value)


def test_train_num_steps_counts_all_owners_turns() -> None:
    """Rounds are per owner; max_steps is for the whole run."""
    assert Train(rounds=3, local_iterations=10).num_steps([7] * 4) == 120
    assert Train(max_steps=7).num_steps([7] * 4) == 7
    assert Train().num_steps([7]) == 50


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"),
    [
        (1, [160, 160], 20),  # two owners, ten batches each: one round of ten steps
        (2.5, [160, 160], 60),  # 50 steps are two rounds and a half
        (3, [161, 5], 40),  # eleven batches and one of five rows: 36 steps
        (0.1, [16] * 3, 30),  # no less than a round
        (0.3, [1600], 30),  # exactly: a float's rounding adds no round
    ],
)
def test_train_epochs_are_whole_rounds(epochs: float, rows: list[int], steps: int) -> None:
    """Passes over all rows together, in batches of 16 and turns of 10 steps, rounded up."""
    assert Train(epochs=epochs).num_steps(rows) == steps


def test_job_with_overrides_follows_the_rules_of_the_file() -> None:
    """Dotted keys replace values; a whole number does for a float."""
    job = JOB.with_overrides({"train.seed": 3, "data.owners": 2, "train.learning_rate": 1, "data.labels": ["a", "b"]})
    assert (job.train.seed, job.data.owners, job.train.learning_rate) == (3, 2, 1.0)
    assert job.data.labels == ("a", "b")
    assert JOB.train.seed == 0


def test_job_with_overrides_switches_between_rounds_and_max_steps() -> None:
    """Setting one clears the other, because exactly one may stand."""
    by_steps = JOB.with_overrides({"train.max_steps": 7})
    assert (by_steps.train.rounds, by_steps.train.max_steps) == (None, 7)
    by_epochs = by_steps.with_overrides({"train.epochs": 2})
    assert (by_epochs.train.epochs, by_epochs.train.max_steps, by_epochs.train.rounds) == (2.0, None, None)
    by_rounds = by_epochs.with_overrides({"train.rounds": 2})
    assert (by_rounds.train.rounds, by_rounds.train.max_steps) == (2, None)
    with pytest.raises(JobError, match="both set the length"):
        JOB.with_overrides({"train.rounds": 2, "train.max_steps": 7})


def test_job_with_overrides_switches_between_the_forms_of_unfreezing() -> None:
    """Setting one form clears the other with all that belongs to it."""
    auto = JOB.with_overrides({"unfreeze.at": "auto", "unfreeze.patience_steps": 9})
    assert auto.unfreeze == Unfreeze(at="auto", patience_steps=9, min_improvement=0.01)
    assert (given := auto.with_overrides({"unfreeze.at": [3, 5]})).unfreeze == Unfreeze(at=(3, 5))
    assert given.with_overrides({"unfreeze.every_steps": 7}).unfreeze == Unfreeze(every_steps=7)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.sed": 1}, "unknown key 'train.sed'; did you mean 'seed'?"),
        ({"tran.seed": 1}, "unknown key 'tran'; did you mean 'train'?"),
        ({"seed": 1}, "unknown key 'seed'"),
        ({"train.seed": "1"}, "train.seed has to be a whole number, but is the text '1'"),
        ({"train.batch_size": 2}, "train.microbatches = 4 is more than train.batch_size = 2"),
        ({"train.clip_norm": 1.0}, "clipping by the global norm needs a sum over the ring"),
        ({"train.method": "hift", "adapter.config": "lora"}, "adapter.config = 'lora' and train.method = 'hift' can't"),
    ],
)
def test_job_with_overrides_refuses_what_the_file_would(overrides: dict[str, object], message: str) -> None:
    """An override is checked as if it stood in the file."""
    with pytest.raises(JobError) as caught:
        JOB.with_overrides(overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize("method", ["all", "pipeadapter", "single"])
def test_job_with_settings_of_another_method_is_refused(method: str) -> None:
    """Settings that nobody reads would be ignored; both are named. A job that never said them has none."""
    with pytest.raises(JobError) as caught:
        Job(model=Model(path="m"), train=Train(method=method), unfreeze=Unfreeze(every_steps=7))
    assert str(caught.value) == (
        f"[unfreeze] has settings of train.method = 'ringada', but this job has train.method = '{method}'; "
        "remove the section or change the method"
    )
    for job, overrides in (
        (JOB, {"train.method": method, "unfreeze.at": "auto"}),
        (Job(model=Model(path="m"), train=Train(method=method)), {"unfreeze.every_steps": 7}),
    ):
        with pytest.raises(JobError, match=f"train.method = 'ringada', but this job has train.method = '{method}'"):
            job.with_overrides(overrides)


@pytest.mark.parametrize("method", ["all", "pipeadapter", "single"])
def test_job_with_another_method_leaves_the_settings_of_its_own_behind(method: str) -> None:
    """One job file serves a comparison of methods; the way back begins with the defaults."""
    for job in (JOB, JOB.with_overrides({"unfreeze.every_steps": 7}), JOB.with_overrides({"unfreeze.at": "auto"})):
        other = job.with_overrides({"train.method": method})
        assert other.unfreeze is None
        assert "[unfreeze]" not in other.to_toml()
        assert other.with_overrides({"train.method": "ringada"}) == JOB
        assert job.with_overrides({"train.method": "ringada"}) == job


def test_job_method_has_the_settings_of_the_job() -> None:
    """A value for the course; methods without settings are their name."""
    assert JOB.with_overrides({"unfreeze.every_steps": 7}).method == RingAda(every_steps=7)
    assert JOB.with_overrides({"train.method": "all"}).method == Everything()
