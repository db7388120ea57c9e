"""``runtime.frozen``: what it goes with, and which types a planner may take."""

from __future__ import annotations

import pytest

from ringtune.errors import JobError
from ringtune.job.job import Job, parse_job
from ringtune.schedule.course import FrozenWeights
from ringtune.techniques.frozen_weights import frozen_choices
from tests.support.cases import cases

BF16, INT8 = FrozenWeights(dtype="bfloat16"), FrozenWeights(dtype="int8")
CHOSEN = '[operations]\npolicy = "{policy}"\nfull = 2\n{more}\n'


def job(text: str = "", *, frozen: str = "float32") -> Job:
    """A job with more lines after ``[model]``."""
    return parse_job(f'[model]\npath = "x"\n{text}\n[runtime]\nfrozen = "{frozen}"\n', source="job.toml")


def choices(one: Job, *, is_native: bool = False) -> tuple[FrozenWeights | None, ...]:
    """What a planner may take for a job."""
    return frozen_choices(one, is_native=is_native)


@cases(
    ("frozen", "wanted"), [("float32", (None,)), ("bfloat16", (BF16,)), ("int8", (INT8,)), ("auto", (None, BF16, INT8))]
)
def test_frozen_choices_are_the_given_one_or_from_exact_to_small(
    frozen: str, wanted: tuple[FrozenWeights | None, ...]
) -> None:
    """A given type is the only choice; ``auto`` rounds no more than it has to."""
    assert choices(job(frozen=frozen)) == wanted


def test_frozen_choices_multiply_natively_where_every_node_can() -> None:
    """All nodes compute alike, so that the result does not depend on who hosts what."""
    assert choices(job(frozen="auto"), is_native=True) == (
        None,
        FrozenWeights(dtype="bfloat16", native=True),
        FrozenWeights(dtype="int8", native=True),
    )


def test_frozen_weights_are_exact_in_float64() -> None:
    """A job in float64 is a check; it has no rounded weights, and ``auto`` takes none."""
    with pytest.raises(JobError, match=r"runtime\.frozen = 'bfloat16' rounds weights that model\.dtype = 'float64'"):
        job('dtype = "float64"', frozen="bfloat16")
    assert choices(job('dtype = "float64"', frozen="auto")) == (None,)


def test_frozen_weights_are_none_where_all_weights_train() -> None:
    """With full parameters nothing is frozen; ``auto`` then has nothing to choose."""
    with pytest.raises(JobError, match=r"runtime\.frozen = 'int8' has no meaning with train\.method = 'hift'"):
        job('[train]\nmethod = "hift"', frozen="int8")
    assert choices(job('[train]\nmethod = "hift"', frozen="auto")) == (None,)


@cases(
    ("policy", "more", "score"),
    [
        ("two-stage", "forward_only = 1", "fisher"),
        ("two-stage", 'backward_score = "taylor"', "taylor"),
        ("joint", "", "fisher"),
        ("magnitude-gradient", "", "gradient-magnitude"),
    ],
)
def test_frozen_weights_without_gradients_are_refused_where_scores_need_them(
    policy: str, more: str, score: str
) -> None:
    """Scores by gradients of the frozen base have no gradients there; ``auto`` then takes float32."""
    text = CHOSEN.format(policy=policy, more=more)
    with pytest.raises(JobError, match=rf"runtime\.frozen = 'int8' holds .* score '{score}'; remove it, or"):
        job(text, frozen="int8")
    assert choices(job(text, frozen="auto")) == (None,)


@cases(
    ("policy", "more"),
    [
        ("two-stage", ""),
        ("joint", 'forward_score = "weight-magnitude"'),
        ("random", "forward_only = 1"),
        ("magnitude", ""),
    ],
)
def test_frozen_weights_go_with_operations_that_need_no_gradient(policy: str, more: str) -> None:
    """Weight magnitudes and lots take no backward."""
    assert choices(job(CHOSEN.format(policy=policy, more=more), frozen="int8")) == (INT8,)


def test_frozen_weights_go_with_scores_of_own_weights_that_train() -> None:
    """With ``adapter.config = "full"`` the scored weights are no frozen ones."""
    text = CHOSEN.format(policy="joint", more="") + '[adapter]\nconfig = "full"\n'
    assert choices(job(text, frozen="int8")) == (INT8,)
