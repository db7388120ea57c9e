"""``train.patience_evals`` and ``train.keep_best``: need evaluations to wait for, and change no older digest."""

from __future__ import annotations

import pytest

from ringtune.errors import JobError
from ringtune.job.job import Job, Model, Train
from ringtune.run_control.continuation import changed_keys, job_digest
from tests.support.cases import cases

JOB = Job(model=Model(path="m"))


def test_patience_needs_evaluations_in_between() -> None:
    """Both keys and the remedy are in the message."""
    with pytest.raises(
        JobError, match=r"patience_evals = 2 waits for evaluations, and train\.eval_every = 0 .* set eval"
    ):
        Train(patience_evals=2)
    assert Train(patience_evals=2, eval_every=5).patience_evals == 2


def test_patience_counts_as_a_change_of_the_result() -> None:
    """A run is resumed with the patience that it was begun with."""
    other = JOB.with_overrides({"train.eval_every": 5, "train.patience_evals": 2})
    assert changed_keys(JOB, other) == ("train.eval_every", "train.patience_evals")
    assert job_digest(other) != job_digest(JOB.with_overrides({"train.eval_every": 5}))


@cases(
    ("other", "message"),
    [
        ({"train.eval_every": 0}, r"train\.keep_best = true keeps the best .* train\.eval_every = 0 .* set eval_every"),
        ({"train.method": "hift"}, r"keep_best = true and train\.method = 'hift' can't .* a whole model"),
        ({"offload.mode": "auto"}, r"keep_best = true and offload\.mode = 'auto' can't go together"),
        ({"recovery.owners": "skip"}, r"keep_best = true and recovery\.owners = 'skip' can't go together"),
    ],
)
def test_best_result_is_refused_by_name_where_there_is_none(other: dict[str, object], message: str) -> None:
    """Both keys, the reason and the remedy."""
    with pytest.raises(JobError, match=message):
        JOB.with_overrides({"train.eval_every": 5, "train.keep_best": True} | other)


def test_best_result_counts_as_a_change_of_the_result() -> None:
    """A run is resumed as it was begun; one that keeps none has the digest that it had before there was the key."""
    plain = JOB.with_overrides({"train.eval_every": 5})
    other = plain.with_overrides({"train.keep_best": True})
    assert changed_keys(plain, other) == ("train.keep_best",)
    assert job_digest(other) != job_digest(plain) == job_digest(plain.with_overrides({"train.keep_best": False}))


def test_prompt_of_a_sample_is_for_language_models_and_changes_no_result() -> None:
    """It is the user's own text, and not too long; runs that differ in it may go on with each other."""
    with pytest.raises(JobError, match=r"sample_prompt is for model\.task = 'causal-lm', this job has 'sequence-"):
        JOB.with_overrides({"train.sample_prompt": "Once"})
    for bad in ("x" * 2001, "  "):
        with pytest.raises(JobError, match=r"sample_prompt has [0-9,]+ characters, .* text of at most 2,000"):
            Train(sample_prompt=bad)
    language = JOB.with_overrides({"model.task": "causal-lm"})
    other = language.with_overrides({"train.sample_prompt": "Once"})
    assert job_digest(other) == job_digest(language)
    assert changed_keys(language, other) == ()
