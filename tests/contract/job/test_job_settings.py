"""Settings of a job that belong together: micro-batches, held-out rows, optimizer, patience; the job to begin with."""

from __future__ import annotations

import re

import pytest

from ringtune.errors import JobError
from ringtune.job.job import Job, Model, parse_job
from ringtune.job.job_reference import job_template
from ringtune.job.rows import look_alikes
from ringtune.models.family import TASKS
from ringtune.run_control.continuation import changed_keys, job_digest
from tests.support.cases import cases

JOB = Job(model=Model(path="m"))


@cases(
    ("before", "changes", "keys"),
    [
        ({}, {"data.held_out": 0.2}, ("data.held_out",)),
        ({}, {"train.eval_every": 5, "train.patience_evals": 2}, ("train.eval_every", "train.patience_evals")),
        ({"train.eval_every": 5}, {"train.patience_evals": 2}, ("train.patience_evals",)),
        ({"train.eval_every": 5}, {"train.keep_best": True}, ("train.keep_best",)),
        ({"train.eval_every": 5}, {"train.keep_best": False}, ()),
        ({"model.task": "causal-lm"}, {"train.sample_prompt": "Once"}, ()),
    ],
)
def test_key_that_changes_the_result_changes_the_digest(
    before: dict[str, object], changes: dict[str, object], keys: tuple[str, ...]
) -> None:
    """A run is resumed with the value that it was begun with; the value of before there was the key has no digest."""
    job = JOB.with_overrides(before)
    other = job.with_overrides(changes)
    assert changed_keys(job, other) == keys
    assert (job_digest(other) != job_digest(job)) is bool(keys)


def test_parts_and_values_of_sub_tokens_clear_each_other() -> None:
    """Without either there are 32 parts, with the digest that such jobs had before there were values."""
    parts = JOB.with_overrides({"memory.activations": "velora"})
    assert parts.velora is not None
    assert (parts.velora.parts, parts.velora.values) == (32, None)
    assert job_digest(parts) == "aea9b14d9923d36b4a0f7a66957ff79d902e0c7edc6caba77e7132927e540dc9"
    values = parts.with_overrides({"velora.values": 24})
    assert values.velora is not None
    assert (values.velora.parts, values.velora.values) == (None, 24)
    assert changed_keys(parts, values) == ("velora.parts", "velora.values")
    assert values.with_overrides({"velora.parts": 32}) == parts
    assert parse_job(values.to_toml(), source="test") == values


MODEL = '[model]\npath = "m"\n'


def job(train: str, more: str = "") -> Job:
    """A job with such lines in ``[train]``."""
    return parse_job(f"{MODEL}[train]\n{train}\n{more}", source="test")


def test_auto_microbatches_are_the_planners_choice() -> None:
    """The job has a number to begin with and says that another may be taken; written and read it is the same."""
    found = job('microbatches = "auto"')
    assert (found.train.microbatches, found.placement.microbatches) == (4, "auto")
    assert parse_job(found.to_toml(), source="test") == found
    assert job("microbatches = 4").placement.microbatches == "never"
    assert job('microbatches = "auto"\nbatch_size = 2').train.microbatches == 2, "two rows can't be cut into four"


def test_number_of_microbatches_set_later_is_the_jobs_own() -> None:
    """``--set train.microbatches=2`` beside a job that says auto, and the other way round."""
    free = job('microbatches = "auto"')
    fixed = free.with_overrides({"train.microbatches": 2})
    assert (fixed.train.microbatches, fixed.placement.microbatches) == (2, "never")
    again = fixed.with_overrides({"train.microbatches": "auto"})
    assert (again.train.microbatches, again.placement.microbatches) == (4, "auto")
    assert free.with_overrides({"train.seed": 1}).placement.microbatches == "auto"


def test_job_with_overrides_leaves_the_momentum_behind() -> None:
    """Another optimizer has none; the same one keeps its own."""
    job = JOB.with_overrides({"train.optimizer": "momentum", "train.momentum": 0.5})
    assert JOB.with_overrides({"train.optimizer": "momentum"}).train.momentum == 0.9
    assert job.with_overrides({"train.optimizer": "momentum"}).train.momentum == 0.5
    assert job.with_overrides({"train.optimizer": "adafactor"}).train.momentum is None
    with pytest.raises(JobError, match=r"train\.momentum = 0\.5 has no meaning"):
        job.with_overrides({"train.optimizer": "sgd", "train.momentum": 0.5})


def test_best_result_is_by_a_figure_that_the_evaluations_have() -> None:
    """The loss is the default; a job by it is the one of before."""
    keys: dict[str, object] = {"train.eval_every": 5}
    plain = JOB.with_overrides(keys | {"train.keep_best": True})
    assert JOB.with_overrides(keys | {"train.keep_best": "loss"}).to_toml() == plain.to_toml()
    named = JOB.with_overrides(keys | {"train.keep_best": "accuracy"})
    assert parse_job(named.to_toml(), source="job.toml") == named != plain
    for name, said in (
        ("mae", "have loss, accuracy"),
        ("macro_f1", "is no figure of every evaluation; known here: accuracy, "),
        ("acuracy", "is no figure of every evaluation; did you mean 'accuracy'"),
    ):
        with pytest.raises(JobError, match=f"{name}.*{said}"):
            JOB.with_overrides(keys | {"train.keep_best": name})
    numbers = JOB.with_overrides(keys | {"model.task": "regression", "train.keep_best": "mae"})
    assert numbers.train.keep_best == "mae"


def test_keys_of_language_models_are_for_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere they are refused by name; chat has the loss on answers, and jobs of before have the bytes of before."""
    chat = JOB.with_overrides({"model.task": "chat"})
    assert (chat.train.loss_on, chat.data.template) == ("answers", None)
    assert parse_job(chat.to_toml(), source="job") == chat
    for key, value, task in (
        ("train.loss_on", "all", "causal-lm"),
        ("data.template", "chatml", "causal-lm"),
        ("data.append_eos", False, "chat"),
    ):
        with pytest.raises(JobError, match=rf"{key} is for model\.task = .*, this job has '{task}'; remove it"):
            JOB.with_overrides({"model.task": task, key: value})
        assert key.partition(".")[2] not in JOB.to_toml()
    for name in ("../rag", "a b", ""):
        with pytest.raises(JobError, match=r"data\.template .* is no name of a chat template; set one of chatml"):
            chat.with_overrides({"data.template": name})


def test_packing_is_for_rows_that_can_be_side_by_side() -> None:
    """Elsewhere it is refused with the remedy; a resumed run can't change it."""
    chat = JOB.with_overrides({"model.task": "chat"})
    packed = chat.with_overrides({"train.packing": True})
    assert packed.train.packing and job_digest(packed) != job_digest(chat)
    assert changed_keys(chat, packed) == ("train.packing",)
    assert packed.with_overrides({"train.packing": False}) == chat
    assert "packing" not in chat.to_toml()
    for changes, message in (
        (
            {"offload.mode": "auto", "offload.users": "alone", "data.user": "who"},
            r"rows of several users \(data\.user = 'who'\) .* remove one of them",
        ),
        ({"adapter.config": "lora[use_gating=True]"}, r"a gate takes the mean over the tokens .* use seq_bn or lora"),
        ({"adapter.config": "seq_bn|loreft"}, r"ReFT changes the first and last tokens of a sequence.* remove train"),
    ):
        with pytest.raises(JobError, match=message):
            packed.with_overrides(changes)
    with pytest.raises(JobError, match=r"is for model\.task = 'causal-lm' or 'chat', .*; remove it"):
        JOB.with_overrides({"train.packing": True})


def test_look_alikes_differ_in_spaces_and_capitals_only() -> None:
    """Each group once, in order; names that differ otherwise are in none."""
    assert look_alikes(["x", " x", "X", "y", "a b", "a  b", "ab"]) == ((" x", "X", "x"), ("a  b", "a b"))
    assert look_alikes(["neg", "pos"]) == ()


@cases("task", TASKS)
def test_template_has_the_settings_of_hift_to_be_uncommented(task: str) -> None:
    """With the method named, and without what the comment says to remove, they are read."""
    text = job_template(task, model="m", train="t", evaluate="e")
    assert parse_job(text, source="job").method.name == "ringada"
    text = text.replace('method = "ringada"', 'method = "hift"')
    text = re.sub('config = "(seq_bn|lora)"\n', "", text)
    text = re.sub(r"\[unfreeze\].*\n(#.*\n)*every_steps = 40\n", "", text)
    text = text.replace("#   ", "").replace("group_size = 1", "group_size = 3")
    job = parse_job(text, source="job")
    assert (job.method.name, job.hift and job.hift.group_size) == ("hift", 3)
