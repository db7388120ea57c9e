"""Tests of ``ringtune.job.job``: job, job file, user adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtune.config.optimizers import OPTIMIZERS
from ringtune.config.sections import LR_SCHEDULES, MAX_STEPS, MIN_TOKENS, MODEL_DTYPES
from ringtune.errors import JobError
from ringtune.job.job import (
    Adapter,
    Data,
    Job,
    Model,
    Privacy,
    Runtime,
    Train,
    Unfreeze,
    Wire,
    config_of,
    job_of_user,
    kinds_of,
    load_job,
    parse_job,
    result_of_user,
)
from ringtune.models.family import CLASS_TASKS
from ringtune.schedule.course import WIRE_DTYPES
from ringtune.schedule.methods import RingAda, method_names
from ringtune.schedule.methods.base import Patience
from ringtune.schedule.methods.hift import ALWAYS, ORDERS, STATES
from ringtune.techniques.full_parameters import MAX_UNITS, HiftSettings
from tests.support.cases import cases

JOB = Job(model=Model(path="models/tiny"))


# TOML has no lone surrogates; everything else a text may hold has to come back.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: bool(text.strip()))
POSITIVE, COUNT, SMALL = st.integers(1, 10**6), st.integers(0, MAX_STEPS), st.integers(0, 1024)
RATE = st.floats(0, 1000, allow_nan=False)


@st.composite
def trains(draw: st.DrawFn) -> Train:
    """Any valid ``[train]``."""
    batch, in_rounds = draw(POSITIVE), draw(st.booleans())
    return Train(
        method=draw(st.sampled_from(tuple(method_names()))),
        optimizer=(optimizer := draw(st.sampled_from(OPTIMIZERS))),
        momentum=draw(st.none() | st.floats(0.001, 0.999)) if optimizer == "momentum" else None,
        learning_rate=draw(RATE),
        lr_schedule=draw(st.sampled_from(LR_SCHEDULES)),
        warmup_steps=(warmup := draw(COUNT)),
        warmup_share=0.0 if warmup else draw(st.floats(0, 0.99)),
        weight_decay=draw(RATE),
        dropout=draw(st.floats(0, 0.99)),
        batch_size=batch,
        microbatches=draw(st.integers(1, batch)),
        max_length=draw(st.integers(MIN_TOKENS, 4096)),
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
        Runtime, threads=SMALL, lease_s=st.floats(0.1, 1e6), wait_s=st.floats(0.1, 1e6), record=st.booleans()
    ),
}


HIFTS = st.builds(
    HiftSettings,
    group_size=st.integers(1, MAX_UNITS),
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


@settings(max_examples=40)
@given(job=jobs())
def test_job_survives_toml(job: Job) -> None:
    """Whatever the job, reading its resolved form gives an equal job."""
    assert parse_job(job.to_toml(), source="job") == job


def test_train_num_steps_counts_all_owners_turns() -> None:
    """Rounds are per owner; max_steps is for the whole run."""
    lengths = (Train(rounds=3, local_iterations=10), Train(max_steps=7))
    assert [train.num_steps([7] * 4) for train in lengths] == [120, 7]


@cases(
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


@cases(
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


@cases("method", ["all", "pipeadapter", "single"])
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


@cases("method", ["all", "pipeadapter", "single"])
def test_job_with_another_method_leaves_the_settings_of_its_own_behind(method: str) -> None:
    """One job file serves a comparison of methods; the way back begins with the defaults."""
    for job in (JOB, JOB.with_overrides({"unfreeze.every_steps": 7}), JOB.with_overrides({"unfreeze.at": "auto"})):
        other = job.with_overrides({"train.method": method})
        assert other.unfreeze is None
        assert "[unfreeze]" not in other.to_toml()
        assert other.with_overrides({"train.method": "ringada"}) == JOB
        assert job.with_overrides({"train.method": "ringada"}) == job


@cases(
    ("text", "found"),
    [
        ("", RingAda(every_steps=40)),
        ("every_steps = 7", RingAda(every_steps=7)),
        ("at = [40, 100]", RingAda(every_steps=0, at=(40, 100))),
        ("at = []", RingAda(every_steps=0, at=())),
        ("at = 'auto'", RingAda(every_steps=0, auto=Patience(patience_steps=20, min_improvement=0.01))),
        (
            "at = 'auto'\npatience_steps = 50\nmin_improvement = 0",
            RingAda(every_steps=0, auto=Patience(patience_steps=50, min_improvement=0.0)),
        ),
    ],
)
def test_job_file_has_three_forms_of_unfreezing(text: str, found: RingAda) -> None:
    """Each becomes a value of the method, and is written back as itself."""
    job = _parse(f"[unfreeze]\n{text}")
    assert job.method == found
    assert parse_job(job.to_toml(), source="job") == job


def _parse(text: str) -> Job:
    return parse_job(f'[model]\npath = "m"\n{text}', source="job.toml")


_VELORA = "[memory]\nactivations = 'velora'\n[velora]\n"


@cases(
    ("text", "message"),
    [
        ("[train]\nxyz = 4", "unknown key 'train.xyz'; known here: batch_size, checkpoint_every,"),
        ("[operations]\npolicy = 'gshard'", "gating networks"),
        ("[trian]\nseed = 4", "unknown key 'trian'; did you mean 'train'?"),
        ("[train]\nseed = 2026-01-01", "train.seed has to be a whole number, but is date"),
        ("[data]\nlabels = ['a', 1]", "data.labels[1] has to be a text, but is the whole number 1"),
        ("[train]\nmax_grad_norm = 1.0", "train.max_grad_norm is not supported: clipping"),
        ("[unfreeze]\nevery_steps = 9\nat = [1]", "unfreeze.every_steps = 9 and unfreeze.at both say when to unfreeze"),
        ("[unfreeze]\nat = 'never'", "unfreeze.at = 'never' is neither a list of steps nor 'auto'"),
        ("[unfreeze]\nat = 40", "unfreeze.at has to be a list or a text, but is the whole number 40"),
        ("[unfreeze]\nat = [1, 'b']", "unfreeze.at[1] has to be a whole number, but is the text 'b'"),
        ("[unfreeze]\nat = [0, 4]", "unfreeze.at is [0, 4], it has to be above 0 and strictly increasing"),
        ("[unfreeze]\nat = [4]\npatience_steps = 9", "unfreeze.patience_steps has a meaning with unfreeze.at = 'auto'"),
        ("[unfreeze]\nmin_improvement = 0.1", "unfreeze.min_improvement has a meaning with unfreeze.at = 'auto' only"),
        ("[data]\nanswer = 'context'", "data.context and data.answer are both column 'context'; they have to differ"),
        ("[data]\nimage = ''", "data.image is empty; give it a value"),
        ("[hift]", "[hift] has settings of train.method = 'hift', but this job has train.method = 'ringada'"),
        ("[train]\nmethod = 'hift'\n[hift]\nalways_active = ['head', 'head']", "hift.always_active has a unit twice"),
        ("[train]\nmethod = 'hift'\n[hift]\nalways_active = 'head'", "the text 'head'; write [\"head\"]"),
        (
            "[adapter]\nconfig = 'seq_bn'\n[train]\nmethod = 'hift'",
            "adapter.config = 'seq_bn' and train.method = 'hift' can't go together: the method trains all parameters",
        ),
        (
            "[train]\nmethod = 'hift'\n[hift]\nalways_active = ['embedding']\n[privacy]\nprivate_blocks = 1",
            "privacy.private_blocks = 1 and hift.always_active with the embedding can't go together",
        ),
        (
            "[train]\nmethod = 'hift'\n[operations]\npolicy = 'two-stage'\ncompute = 0.6",
            "[operations] and train.method = 'hift' can't go together: a subnet that is passed by has no gradient",
        ),
        ("[velora]", "[velora] has settings of memory.activations = 'velora', 'both' or 'auto', but this job has"),
        ("[memory]\nactivations = 'recompute'\n[velora]", "memory.activations = 'recompute'; remove the section or"),
        (f"{_VELORA}layers = ['adapter_down', 'adapter_down']", "velora.layers names a layer twice: adapter_down"),
        (f"{_VELORA}layers = ['adapter_down', 'adapter_down:up']", "includes 'adapter_down:up'; keep one of them"),
        (f"{_VELORA}parts = 32\nvalues = 32", "velora.parts = 32 and velora.values = 32 both set the sub-tokens"),
        (
            f"{_VELORA}layers = ['down']",
            "velora.layers has 'down', which does not train with adapter.config = 'seq_bn'",
        ),
        (
            f"[adapter]\nconfig = 'full'\n{_VELORA}layers = ['adapter_down']",
            "velora.layers has 'adapter_down', which does not train with adapter.config = 'full': the blocks' own",
        ),
        ("[offload]\nmode = 'of'", "offload.mode = 'of' is not one of off, auto; did you mean 'off'?"),
        ("[offload]\nmode = {a = 'a'}", "offload.mode.a = 'a': a node can't help itself; name another one"),
        ("[offload]\nmode = {}", "offload.mode is an empty table; name a helper for a host"),
        ("[offload]\nmode = {a = 3}", "offload.mode.a has to be a text, but is the whole number 3"),
        ("[offload]\nmode = 3", "offload.mode has to be a text or a table, but is the whole number 3"),
        ("[offload]\ninterval = 2", "offload.interval = 2 has no meaning with offload.mode = 'off'"),
        ("[adapter]\nconfig = 'mam'", "adapter.config 'mam' can't be sliced"),
        ("[data]\neval = 'e.csv'\nheld_out = 0.1", "data.eval = 'e.csv' and data.held_out = 0.1 both say what is eval"),
        ("[train]\npatience_evals = 2", "patience_evals = 2 waits for evaluations, and train.eval_every = 0"),
        ("[train]\nkeep_best = true", "train.keep_best = true keeps the best"),
        ("[train]\nwarmup_steps = 5\nwarmup_share = 0.1", "train.warmup_steps = 5 and train.warmup_share = 0.1"),
        (
            "[train]\nsample_prompt = 'Once'",
            "sample_prompt is for a language model (model.task = 'causal",
        ),
        (f"task = 'chat'\n[train]\nsample_prompt = '{'x' * 2001}'", "sample_prompt has 2,001 characters, "),
        ("task = 'chat'\n[train]\nsample_prompt = '  '", "it has to be a text of at most 2,000"),
        ("[recovery]\ncopies = 'none'\nowners = 'skip'", "recovery.owners = 'skip'"),
        ("[recovery]\ncopies = 'none'\n[audit]", "leave recovery.copies = 'none' out"),
        (
            "dtype = 'float64'\n[train]\ncompute = 'bfloat16'",
            "rounds products, which model.dtype = 'float64' wants",
        ),
        (
            "dtype = 'float64'\n[runtime]\nfrozen = 'bfloat16'",
            "runtime.frozen = 'bfloat16' rounds weights that",
        ),
        (
            "[train]\nmethod = 'hift'\n[runtime]\nfrozen = 'int8'",
            "runtime.frozen = 'int8' has no meaning with",
        ),
        ("task = 'regression'\n[generation]", "for model.task = 'causal-lm' or 'chat'"),
        (
            "task = 'chat'\n[generation]\n[adapter]\nconfig = 'loreft'",
            "ReFT changes the first and last tokens of a sequence",
        ),
        ("[train]\nseed = 4\nseed = 5", "not valid TOML"),
        ("a." * 100_000 + "a = 1", "a key has 16 parts or more"),
        ("['a' . " + "'a' . " * 100_000 + "a]", "a key has 16 parts or more"),
        ("'" + "a" * 300 + "'." + "a." * 2_000 + "a = 1", "a key has 16 parts or more"),
        ("train = 3", "unknown key 'model.train'"),
    ],
)
def test_job_file_refuses_by_name(text: str, message: str) -> None:
    """Whatever is misspelt, mistyped, out of range or not built yet: file, key, and what to do."""
    with pytest.raises(JobError) as caught:
        _parse(text)
    assert str(caught.value).startswith("job.toml: ")
    assert message in str(caught.value)


@cases("task", ["question-answering", "causal-lm"])
def test_job_file_refuses_classes_where_there_are_none(task: str) -> None:
    """A key that the task has no use for is an error, not silence."""
    head = f'[model]\npath = "m"\ntask = "{task}"\n'
    assert parse_job(head, source="job.toml").model.task == task
    with pytest.raises(JobError, match=f"data.labels has no meaning for model.task = '{task}'"):
        parse_job(head + "[data]\nlabels = ['a', 'b']", source="job.toml")
    with pytest.raises(JobError, match=f"shares classes out, model.task = '{task}' has none"):
        parse_job(head + "[data]\nsplit = 'dirichlet:1'", source="job.toml")


def test_job_file_takes_names_of_tags() -> None:
    """Texts, each of which has many tags, have no classes to share out."""
    head = '[model]\npath = "m"\ntask = "token-classification"\n[data]\n'
    assert parse_job(head + "labels = ['B-X', 'O']", source="job.toml").data.labels == ("B-X", "O")
    with pytest.raises(JobError, match=r"data\.words and data\.tags are both column 'tags'; they have to differ"):
        parse_job(head + "words = 'tags'", source="job.toml")


@cases(
    ("text", "message"),
    [
        ("", "job.toml: model is missing; add a table [model]"),
        ("[model]", 'job.toml: model.path is missing; add it: path = "..."'),
        ("model = 3", "job.toml: model has to be a table, but is the whole number 3"),
        ("train = 3\n[model]\npath = 'm'", "job.toml: train has to be a table, but is the whole number 3"),
        ("[[train]]\nseed = 1\n[model]\npath = 'm'", "job.toml: train has to be a table, but is a list"),
    ],
)
def test_job_file_refuses_wrong_structure(text: str, message: str) -> None:
    """Sections have to be tables, and ``[model]`` has to be there."""
    with pytest.raises(JobError) as caught:
        parse_job(text, source="job.toml")
    assert str(caught.value) == message


@cases(
    ("model", "train", "wanted"),
    [
        ("../models/m", "train.csv", ("models/m", "jobs/train.csv")),
        ("~/m", "/data/test.csv", ("home/m", "/data/test.csv")),
        ("m", "", ("jobs/m", "")),
    ],
)
def test_load_job_makes_paths_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, train: str, wanted: tuple[str, str]
) -> None:
    """Relative to the file, so that a job starts from any folder; a path that is not given stays not given."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (folder := tmp_path / "jobs").mkdir()
    (folder / "job.toml").write_text(f'[model]\npath = "{model}"\n[data]\ntrain = "{train}"\neval = "{train}"\n')
    monkeypatch.chdir(folder)
    for path in (folder / "job.toml", "job.toml"):
        job = load_job(path)
        assert (job.model.path, job.data.train) == tuple(name and str(tmp_path.resolve() / name) for name in wanted)
        assert job.data.eval == job.data.train


def test_load_job_says_that_rows_are_no_job(tmp_path: Path) -> None:
    """Whatever is in the file; with the command that makes a job for it."""
    for name, content in (("rows.csv", b"text,label\ngood,pos\n"), ("rows.parquet", b"PAR1\xff\xfe")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            JobError, match=rf"{name} is no job, it ends in \.\w+ as rows do; 'ringtune init --data FILE'"
        ):
            load_job(tmp_path / name)


@cases(
    ("content", "message"),
    [
        (None, "can't read the job file {path}: No such file or directory"),
        (b"\xff\xfe\x00", "can't read the job file {path}: it is not UTF-8 text"),
        (b'[model]\npth = "m"\n', "{path}: unknown key 'model.pth'; did you mean 'path'?"),
    ],
)
def test_load_job_names_the_file_that_can_not_be_used(tmp_path: Path, content: bytes | None, message: str) -> None:
    """With the reason, and the key."""
    path = tmp_path / "job.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert str(caught.value) == message.format(path=path)


def test_job_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """Some editors begin a file with one; it is no part of the first section's name."""
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf" + b'[model]\npath = "m"\n')
    assert load_job(path).model.path == str(tmp_path / "m")


USERS = ("anna", "ben", "carl", "dora")


def job_with(adapters: str, *, users: str = "alone", config: str = "lora", more: str = "") -> Job:
    """A job whose users have adapters of their own."""
    merged = str(users == "collaboration").lower()
    offload = f'[offload]\nmode = "auto"\nusers = "{users}"\nmerged = {merged}\nadapters = {adapters}\n{more}'
    return parse_job(f'[model]\npath = "m"\n[adapter]\nconfig = "{config}"\n{offload}', source="test")


def test_kinds_are_in_the_order_of_users_after_the_jobs_own() -> None:
    """The job's own kind is the first one; equal configurations are one kind, however they are written."""
    job = job_with('{ anna = "linear", carl = "mlp[hidden=8]", dora = "linear[]" }')
    kinds = kinds_of(job, USERS)
    assert [(kind.number, kind.config, kind.users) for kind in kinds] == [
        (0, "lora", ("ben",)),
        (1, "linear", ("anna", "dora")),
        (2, "mlp[hidden=8]", ("carl",)),
    ]
    assert [kind.prefix for kind in kinds] == ["", "1/", "2/"]


def test_job_and_result_of_a_user_have_the_users_adapter() -> None:
    """And no adapter of another user."""
    job = job_with('{ anna = "linear" }')
    assert (config_of(job, "anna"), config_of(job, "ben")) == ("linear", "lora")
    own = job_of_user(job, "anna")
    assert (own.adapter.config, own.offload.adapters) == ("linear", None)
    assert "adapter.json" in result_of_user(job, "anna").files
    assert "adapter_config.json" in result_of_user(job, "ben").files


def test_user_who_is_none_of_the_run_is_refused() -> None:
    """It names the users."""
    with pytest.raises(JobError, match=r"offload.adapters.zoe: no user .*'zoe'; its users are anna, ben"):
        kinds_of(job_with('{ zoe = "linear" }'), USERS)


@cases(
    ("adapters", "users", "said"),
    [
        ("{ }", "alone", "offload.adapters is an empty table"),
        ('{ anna = "linear" }', "joint", "no meaning with offload.users = 'joint'.*set offload.users = 'alone'"),
        ('{ "An na" = "linear" }', "alone", "user name 'An na' is not allowed"),
        ('{ anna = "ia3" }', "alone", "offload.adapters.anna: adapter.config 'ia3' can't be fitted by a helper"),
        ('{ anna = "liner" }', "alone", "offload.adapters.anna: adapter.config 'liner' is not known"),
        ('{ anna = "full" }', "alone", "offload.adapters.anna: adapter.config = 'full' has no adapter"),
        ('{ anna = "mlp" }', "collaboration", "adapter 'mlp' can't be merged.*offload.users = 'alone'.*adapters.anna"),
        ("{ anna = 3 }", "alone", r"offload.adapters.anna"),
    ],
)
def test_adapters_that_users_can_not_have_are_refused(adapters: str, users: str, said: str) -> None:
    """One line names the key, why, and the remedy."""
    with pytest.raises(JobError, match=said):
        job_with(adapters, users=users)
