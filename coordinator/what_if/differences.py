"""Say in what a run after a change is another run, so that only like is compared with like."""

from __future__ import annotations

from coordinator.what_if.what_if import PredictedPlan
from ringtune.jobs.job import Job
from ringtune.schedule.course import Course

_SHOWN = ("num_steps", "batch_size", "microbatches", "max_length", "wire_dtype", "eval_every", "local_iterations")
_PATHS = ("model.path", "data.train", "data.eval")


def is_same_work(before: PredictedPlan, after: PredictedPlan) -> bool:
    """Whether both train as many steps of as many rows at each depth, so that their wall times can be compared."""
    one, other = before.plan.course, after.plan.course
    depths = [[(each.depth, each.steps) for each in found.prediction.depths] for found in (before, after)]
    return (one.batch_size, one.num_steps) == (other.batch_size, other.num_steps) and depths[0] == depths[1]


def course_differences(before: PredictedPlan, after: PredictedPlan) -> dict[str, tuple[str, str]]:
    """Name what of the course is another after the change, with both values.

    Example: ``{"num_steps": ("60", "120")}``.
    """
    one, other = _figures(before.plan.course), _figures(after.plan.course)
    return {name: (one[name], other[name]) for name in one if one[name] != other[name]}


def _figures(course: Course) -> dict[str, str]:
    values = {name: str(getattr(course, name)) for name in _SHOWN}
    owners = ", ".join(f"{owner.node} {owner.train_rows}" for owner in sorted(course.owners, key=lambda one: one.node))
    return {"method": course.method.name, **values, "owners": owners}


def job_differences(run: Job, asked: Job) -> dict[str, tuple[str, str]]:
    """Name the keys in which the job to plan for differs from that of the run, with both values.

    Paths may differ without another meaning.
    """
    one, other = (_keys(job) for job in (run, asked))
    names = [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
    return {name: (one.get(name, "nothing"), other.get(name, "nothing")) for name in names if name not in _PATHS}


def _keys(job: Job) -> dict[str, str]:
    found, section = {}, ""
    for line in job.to_toml().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line:
            key, _, value = line.partition(" = ")
            found[f"{section}.{key}"] = value
    return found


def difference_text(differences: dict[str, tuple[str, str]]) -> str:
    """Write differences on one line: ``num_steps 60 -> 120, batch_size 16 -> 8``."""
    return ", ".join(f"{name} {one} -> {other}" for name, (one, other) in differences.items())
