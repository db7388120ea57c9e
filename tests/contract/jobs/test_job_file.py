"""Reading ``job.toml``: strict about keys and types, helpful about mistakes, paths made absolute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringtune.errors import JobError
from ringtune.jobs.job import Job, Train, load_job, parse_job
from ringtune.schedule.methods import RingAda
from ringtune.schedule.methods.patience import Patience

DOCUMENTED = """
[model]
path = "models/all-MiniLM-L6-v2"   # local folder; nodes without it fetch their tensors from who has it
task = "sequence-classification"
[data]
train = "train.csv"
eval = "test.csv"
text = "text"
label = "label"
labels = ["neg", "pos"]            # optional
split = "dirichlet:0.3"
owners = 4
[adapter]
config = "seq_bn"
[train]
method = "ringada"
optimizer = "adamw"
learning_rate = 1e-3
lr_schedule = "constant"
warmup_steps = 0
weight_decay = 0.0
dropout = 0.0
batch_size = 16
microbatches = 4
max_length = 128
local_iterations = 10
rounds = 5
eval_every = 0
checkpoint_every = 100
seed = 0
[unfreeze]
every_steps = 40
[wire]
dtype = "float32"
[privacy]
private_blocks = 0
[runtime]
threads = 0
lease_s = 10
"""


def test_job_file_as_documented_is_read() -> None:
    """The example of the documentation, key by key."""
    job = parse_job(DOCUMENTED, source="job.toml")
    assert job.data.labels == ("neg", "pos")
    assert job.train == Train(rounds=5, checkpoint_every=100)
    assert job.runtime.lease_s == 10.0
    assert isinstance(job.runtime.lease_s, float)


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nbatchsize = 4", "unknown key 'train.batchsize'; did you mean 'batch_size'?"),
        ("[train]\nxyz = 4", "unknown key 'train.xyz'; known here: batch_size, checkpoint_every,"),
        ("[trian]\nseed = 4", "unknown key 'trian'; did you mean 'train'?"),
        ("[train]\nseed = true", "train.seed has to be a whole number, but is true"),
        ("[train]\nseed = 1.0", "train.seed has to be a whole number, but is the number 1.0"),
        ("[train]\nlearning_rate = '1e-3'", "train.learning_rate has to be a number, but is the text '1e-3'"),
        ("[train]\nlearning_rate = inf", "train.learning_rate has to be a finite number, but is inf"),
        ("[train]\nlearning_rate = nan", "train.learning_rate has to be a finite number, but is nan"),
        ("[train]\nrounds = []", "train.rounds has to be a whole number, but is a list"),
        ("[train]\nmethod = 3", "train.method has to be a text, but is the whole number 3"),
        ("[train]\nseed = 2026-01-01", "train.seed has to be a whole number, but is date"),
        ("[data]\nlabels = 'neg'", "data.labels has to be a list, but is the text 'neg'"),
        ("[data]\nlabels = ['a', 1]", "data.labels[1] has to be a text, but is the whole number 1"),
        ("[runtime]\nrecord = 1", "runtime.record has to be true or false, but is the whole number 1"),
        ("[train]\nbatch_size = 0", "train.batch_size is 0, it has to be at least 1"),
        ("[train]\nrounds = 1\nmax_steps = 1", "both set the length of the run; keep one"),
        ("[train]\nclip_norm = 1.0", "train.clip_norm is not supported: clipping by the global norm needs a sum"),
        ("[train]\nmax_grad_norm = 1.0", "train.max_grad_norm is not supported: clipping"),
        ("[unfreeze]\nevery_steps = 'auto'", "unfreeze.every_steps has to be a whole number, but is the text 'auto'"),
        ("[unfreeze]\nevery_steps = 9\nat = [1]", "unfreeze.every_steps = 9 and unfreeze.at both say when to unfreeze"),
        (
            "[train]\nmethod = 'all'\n[unfreeze]",
            "[unfreeze] has settings of train.method = 'ringada', but this job has",
        ),
        ("[unfreeze]\nat = 'never'", "unfreeze.at = 'never' is neither a list of steps nor 'auto'"),
        ("[unfreeze]\nat = 40", "unfreeze.at has to be a list or a text, but is the whole number 40"),
        ("[unfreeze]\nat = [1, 'b']", "unfreeze.at[1] has to be a whole number, but is the text 'b'"),
        ("[unfreeze]\nat = [0, 4]", "unfreeze.at is [0, 4], it has to be above 0 and strictly increasing"),
        ("[unfreeze]\nat = [4, 4]", "unfreeze.at is [4, 4], it has to be above 0 and strictly increasing"),
        ("[unfreeze]\nat = [4]\npatience_steps = 9", "unfreeze.patience_steps has a meaning with unfreeze.at = 'auto'"),
        ("[unfreeze]\nmin_improvement = 0.1", "unfreeze.min_improvement has a meaning with unfreeze.at = 'auto' only"),
        ("[unfreeze]\nat = 'auto'\npatience_steps = 0", "unfreeze.patience_steps is 0, it has to be at least 1"),
        ("[unfreeze]\nat = 'auto'\nmin_improvement = 1", "unfreeze.min_improvement is 1.0, it has to be in [0, 1)"),
        ("[data]\nquestions = 'q'", "unknown key 'data.questions'; did you mean 'question'?"),
        ("[data]\nanswer = 'context'", "data.context and data.answer are both column 'context'; they have to differ"),
        ("[data]\nimage = ''", "data.image is empty; give it a value"),
        ("[data]\nstride = -1", "data.stride is -1, it has to be at least 0"),
        ("[hift]", "[hift] has settings of train.method = 'hift', but this job has train.method = 'ringada'"),
        ("[train]\nmethod = 'hfit'", "train.method = 'hfit' is not one of"),
        ("[train]\nmethod = 'hift'\n[hift]\ngroup = 1", "unknown key 'hift.group'; did you mean 'group_size'?"),
        ("[train]\nmethod = 'hift'\n[hift]\ngroup_size = 0", "hift.group_size is 0, it has to be at least 1"),
        ("[train]\nmethod = 'hift'\n[hift]\ngroup_size = 9999", "hift.group_size is 9999, it has to be at most"),
        (
            "[train]\nmethod = 'hift'\n[hift]\norder = 'top2bottom'",
            "order = 'top2bottom' is not one of bottom2up,",
        ),
        ("[train]\nmethod = 'hift'\n[hift]\norder = 'top2bottom'", "did you mean 'bottom2up'?"),
        ("[train]\nmethod = 'hift'\n[hift]\nstate = 'disc'", "hift.state = 'disc' is not one of memory, drop, disk"),
        ("[train]\nmethod = 'hift'\n[hift]\nalways_active = ['heads']", "always_active = 'heads' is not one of embedd"),
        ("[train]\nmethod = 'hift'\n[hift]\nalways_active = ['head', 'head']", "hift.always_active has a unit twice"),
        (
            "[adapter]\nconfig = 'seq_bn'\n[train]\nmethod = 'hift'",
            "adapter.config = 'seq_bn' and train.method = 'hift' can't go together: the method trains all parameters",
        ),
        (
            "[train]\nmethod = 'hift'\n[privacy]\nprivate_blocks = 1",
            "privacy.private_blocks = 1 and train.method = 'hift' can't go together",
        ),
        (
            "[train]\nmethod = 'hift'\n[operations]\npolicy = 'two-stage'\ncompute = 0.6",
            "[operations] and train.method = 'hift' can't go together: a subnet that is passed by has no gradient",
        ),
        ("[memory]\ncap = 1", "unknown key 'memory.cap'; known here: activations"),
        ("[memory]\nactivation = 'auto'", "unknown key 'memory.activation'; did you mean 'activations'?"),
        ("[memory]\nactivations = 'recomputed'", "memory.activations = 'recomputed' is not one of none, velora, recom"),
        ("[memory]\nactivations = 'recomputed'", "; did you mean 'recompute'?"),
        ("[memory]\nactivations = true", "memory.activations has to be a text, but is true"),
        ("[velora]", "[velora] has settings of memory.activations = 'velora', 'both' or 'auto', but this job has"),
        ("[memory]\nactivations = 'recompute'\n[velora]", "memory.activations = 'recompute'; remove the section or"),
        (f"{_VELORA}part = 32", "unknown key 'velora.part'; did you mean 'parts'?"),
        (f"{_VELORA}parts = 0", "velora.parts is 0, it has to be at least 1"),
        (f"{_VELORA}parts = 1_048_577", "velora.parts is 1048577, it has to be at most 1,048,576"),
        (f"{_VELORA}parts = 32.0", "velora.parts has to be a whole number, but is the number 32.0"),
        (f"{_VELORA}init = 'mean'", "velora.init = 'mean' is not one of average, running, svd, random"),
        (f"{_VELORA}layers = 'down'", "velora.layers has to be a list, but is the text 'down'"),
        (
            f"{_VELORA}layers = ['values']",
            "velora.layers = 'values' is not one of query, key, value, attention_out, up",
        ),
        (f"{_VELORA}layers = ['values']", "; did you mean 'value'?"),
        (f"{_VELORA}layers = ['adapter_down', 'adapter_down']", "velora.layers names a layer twice: adapter_down"),
        (
            f"{_VELORA}layers = ['down']",
            "velora.layers has 'down', which does not train with adapter.config = 'seq_bn'",
        ),
        (
            f"[adapter]\nconfig = 'full'\n{_VELORA}layers = ['adapter_down']",
            "velora.layers has 'adapter_down', which does not train with adapter.config = 'full': the blocks' own",
        ),
        ("[operations]\npolicy = 'paper'", "operations.policy = 'paper' is not one of standard, two-stage, joint"),
        ("[operations]\nhead = 1", "unknown key 'operations.head'; did you mean 'heads'?"),
        ("[offload]\nmode = 'of'", "offload.mode = 'of' is not one of off, auto; did you mean 'off'?"),
        ("[offload]\nmode = {a = 'a'}", "offload.mode.a = 'a': a node can't help itself; name another one"),
        ("[offload]\nmode = {}", "offload.mode is an empty table; name a helper for a host"),
        ("[offload]\nmode = {a = 3}", "offload.mode.a has to be a text, but is the whole number 3"),
        ("[offload]\nmode = 3", "offload.mode has to be a text or a table, but is the whole number 3"),
        ("[offload]\ninterval = 2", "offload.interval = 2 has no meaning with offload.mode = 'off'"),
        ("[offload]\nmode = 'auto'\ninterval = 0", "offload.interval is 0, it has to be at least 1"),
        ("[offload]\nmode = 'auto'\npairs = 'int8'", "offload.pairs = 'int8' is not one of float32, bfloat16, velora"),
        ("[adapter]\nconfig = 'mam'", "adapter.config 'mam' can't be sliced"),
        ("[train]\nseed = 4\nseed = 5", "not valid TOML"),
        ("train = 3", "unknown key 'model.train'"),
    ],
)
def test_job_file_refuses_by_name(text: str, message: str) -> None:
    """Whatever is misspelt, mistyped, out of range or not built yet: file, key, and what to do."""
    with pytest.raises(JobError) as caught:
        _parse(text)
    assert str(caught.value).startswith("job.toml: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("task", ["question-answering", "causal-lm"])
def test_job_file_refuses_classes_where_there_are_none(task: str) -> None:
    """A key that the task has no use for is an error, not silence."""
    head = f'[model]\npath = "m"\ntask = "{task}"\n'
    assert parse_job(head, source="job.toml").model.task == task
    with pytest.raises(JobError, match=f"data.labels has no meaning for model.task = '{task}'"):
        parse_job(head + "[data]\nlabels = ['a', 'b']", source="job.toml")
    with pytest.raises(JobError, match=f"shares classes out, model.task = '{task}' has none"):
        parse_job(head + "[data]\nsplit = 'dirichlet:1'", source="job.toml")


def test_job_file_takes_names_of_tags_and_shares_no_classes_out() -> None:
    """A text has many tags, so that no share of the rows can have one class more than another."""
    head = '[model]\npath = "m"\ntask = "token-classification"\n[data]\n'
    assert parse_job(head + "labels = ['B-X', 'O']", source="job.toml").data.labels == ("B-X", "O")
    with pytest.raises(JobError, match=r"shares classes out, model\.task = 'token-classification' has none"):
        parse_job(head + "split = 'dirichlet:1'", source="job.toml")
    with pytest.raises(JobError, match=r"data\.words and data\.tags are both column 'tags'; they have to differ"):
        parse_job(head + "words = 'tags'", source="job.toml")


@pytest.mark.parametrize(
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


def test_load_job_makes_paths_absolute_relative_to_the_file(tmp_path: Path) -> None:
    """A job can be started from any folder."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "job.toml").write_text(
        '[model]\npath = "../models/m"\n[data]\ntrain = "train.csv"\neval = "/data/test.csv"\n'
    )
    job = load_job(folder / "job.toml")
    assert job.model.path == str(tmp_path.resolve() / "models" / "m")
    assert job.data.train == str(folder.resolve() / "train.csv")
    assert job.data.eval == "/data/test.csv"


def test_load_job_knows_home_and_keeps_empty_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` is the home folder; a path that is not given stays not given."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "job.toml").write_text('[model]\npath = "~/m"\n')
    job = load_job(str(tmp_path / "job.toml"))
    assert job.model.path == str(tmp_path.resolve() / "home" / "m")
    assert (job.data.train, job.data.eval) == ("", "")


def test_load_job_from_a_relative_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the job itself was named relative to the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('[model]\npath = "m"\n')
    assert load_job("job.toml").model.path == os.path.realpath(tmp_path / "m")


def test_load_job_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Missing file: its name and the reason."""
    with pytest.raises(JobError, match=r"can't read the job file .*nothing\.toml: No such file"):
        load_job(tmp_path / "nothing.toml")


def test_load_job_refuses_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A binary file is no job."""
    (tmp_path / "job.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError, match="it is not UTF-8 text"):
        load_job(tmp_path / "job.toml")


def test_load_job_names_file_and_key(tmp_path: Path) -> None:
    """The message of a bad key begins with the file."""
    path = tmp_path / "job.toml"
    path.write_text('[model]\npth = "m"\n')
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert str(caught.value) == f"{path}: unknown key 'model.pth'; did you mean 'path'?"


def test_job_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """Some editors begin a file with one; it is no part of the first section's name."""
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf" + b'[model]\npath = "m"\n')
    assert load_job(path).model.path == str(tmp_path / "m")
