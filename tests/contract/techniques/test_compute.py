"""Products in bfloat16: what a job may have beside them, what a course has then, and what is told."""

from __future__ import annotations

import dataclasses
from typing import Any

from ringtune.costs.measurement import job_shape
from ringtune.job.job import Job
from ringtune.run_control.continuation import job_digest
from ringtune.schedule.course import FrozenWeights
from ringtune.schedule.plan import Plan
from ringtune.techniques.compute import TECHNIQUE
from ringtune.techniques.frozen_weights import check_plan, frozen_choices
from tests.support.plans import make_plan
from tests.support.profiles import node

JOB = {"model": {"path": "m"}, "data": {"train": "x"}}


def job(**changes: Any) -> Job:
    """A job with sections changed."""
    return Job.from_tables({**JOB, "train": {"compute": "bfloat16"}, **changes})


def test_job_without_it_is_what_it_was() -> None:
    """Also one that names the default: same digest, same text."""
    plain, named = Job.from_tables(JOB), job(train={"compute": "float32"})
    assert plain == named and plain.to_toml() == named.to_toml() and "compute" not in plain.to_toml()
    assert job_digest(plain) == job_digest(named) != job_digest(job())
    plan = make_plan([("a", 0, 4)], ["a"])
    assert "compute" not in str(plan.to_json())
    assert TECHNIQUE.courses(plain, plan.course, ()) == (plan.course,)


def test_course_has_it_and_frozen_matrices_are_native() -> None:
    """A plan with it is read again; small types are multiplied natively, also on processors that are slow at it."""
    plan = make_plan([("a", 0, 4)], ["a"])
    (course,) = TECHNIQUE.courses(job(), plan.course, ())
    rounded = Plan.of(course, plan.placement)
    assert Plan.from_json(rounded.to_json()) == rounded and course.compute == "bfloat16"
    assert frozen_choices(job(runtime={"frozen": "int8"}), is_native=False) == (
        FrozenWeights(dtype="int8", native=True),
    )
    gguf = frozen_choices(job(), is_native=False, is_gguf=True)
    assert gguf == (FrozenWeights(dtype="gguf", native=True),)
    found = frozen_choices(job(), is_native=False)
    assert found == (FrozenWeights(dtype="bfloat16", native=True),)
    check_plan(job(), Plan.of(dataclasses.replace(course, frozen=found[0]), plan.placement), None)
    choices = frozen_choices(job(runtime={"frozen": "auto"}), is_native=False)
    assert [one.dtype for one in choices if one is not None] == ["bfloat16", "int8", "nf4"] and None not in choices
    assert TECHNIQUE.course_lines(course) == ["products of blocks in bfloat16, sums in float32"]


def test_nodes_are_timed_with_it_and_slow_ones_are_named() -> None:
    """A timing with other products is none of the run."""
    plan = make_plan([("a", 0, 4)], ["a"])
    rounded = Plan.of(TECHNIQUE.courses(job(), plan.course, ())[0], plan.placement)
    timed = dataclasses.replace(node(plan, "a"), shape=job_shape(job()))
    assert TECHNIQUE.timing_mismatch(rounded.course, timed) == ""
    assert "products in bfloat16, the run has them in float32" in TECHNIQUE.timing_mismatch(plan.course, timed)
    assert TECHNIQUE.notes(plan, [timed]) == []
    (note,) = TECHNIQUE.notes(rounded, [timed])
    assert "a has no fast products of it" in note
