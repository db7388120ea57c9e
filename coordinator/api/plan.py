"""``ringtune.plan``: plan without training, for assumed nodes, those of a profile, or those of a coordinator."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from coordinator.api.arguments import JobLike, for_python, job_here
from coordinator.api.estimates import estimate, estimate_note
from coordinator.planner.explain import Explanation
from coordinator.planner.explain import explain as explained
from coordinator.planner.given_plan import GivenPlan, read_profile, require_plan_place
from coordinator.planner.limits import read_choices
from coordinator.planner.make_plan import check_inputs, make_plan, planned_as
from coordinator.planner.planned import JobTime, guessed_time, measured_time
from coordinator.run.run_text import rows_lines
from coordinator.screen.plan_text import plan_text
from coordinator.screen.progress import WaitNotice
from ringtune import __version__
from ringtune.costs.memory_terms import MemoryEstimate
from ringtune.costs.profile import Profile
from ringtune.errors import RingTuneError, UsageError
from ringtune.job.job import Job
from ringtune.models.family import NAMED_TASKS
from ringtune.models.folder import classes_of_head
from ringtune.quantities import parse_bytes
from ringtune.schedule.plan import Plan
from ringtune.storage.durable import write_durably
from ringtune.texts import printable


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlannedJob:
    """A plan with its memory, seconds and reasons.

    Attributes:
        memory: peak of each node.
        is_measured: whether the profile was measured; else equal nodes are assumed.
        note: estimates in it, and other notes; mostly empty.
        effort: number of layouts searched and seconds; empty if another machine planned.
        time: predicted or guessed; None if neither is possible.
        why: the planner's reasons, if requested.
        rows: sentences on the rows: columns used and unused, rows left out or cut.
    """

    plan: Plan
    memory: Mapping[str, MemoryEstimate]
    profile: Profile
    is_measured: bool
    note: str = ""
    effort: str = ""
    time: JobTime | None = None
    why: Explanation | None = None
    rows: Sequence[str] = ()

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes that the plan reserves on each node, without the libraries."""
        return {node: estimate.total_bytes for node, estimate in self.memory.items()}

    def lines(self, *, at_step: int = 0, num_steps: int = 0) -> list[str]:
        """Return the plan as lines, with a table of all actions of ``num_steps`` steps from ``at_step`` on."""
        lines = plan_text(
            self.plan,
            self.memory,
            at_step=at_step,
            num_steps=num_steps,
            measured=self.is_measured,
            note=self.note,
            effort=self.effort,
            why=self.why,
            time=self.time,
            budgets={node.node: node.memory_bytes for node in self.profile.nodes},
            facts=self.profile.nodes[0],
            rows=self.rows,
        )
        return [printable(line) for line in lines]

    @property
    def given(self) -> GivenPlan:
        """The plan with version and model digest, as a run takes it."""
        return GivenPlan(plan=self.plan, version=__version__, model_digest=self.profile.nodes[0].model.digest)

    def text(self) -> str:
        """Return the plan as one line of JSON, as ``ringtune plan --json`` prints it and ``--save`` writes it."""
        memory = {
            node: {"total_bytes": estimate.total_bytes, **{f"{k}_bytes": v for k, v in estimate.parts().items()}}
            for node, estimate in self.memory.items()
        }
        more = {
            "predicted": self.time.to_json() if self.time is not None else None,
            "note": self.note,
            "rows": self.rows,
            "explanation": self.why.to_json() if self.why is not None else None,
        }
        given = {name: value for name, value in more.items() if value}
        return json.dumps({"event": "plan", **self.given.to_json(), "memory": memory, **given})

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``text`` as dictionaries, lists, numbers and strings."""
        return dict(json.loads(self.text()))

    def save(self, path: str | Path) -> Path:
        """Write a file for ``train(plan=...)`` and ``ringtune train --plan``; return its path.

        Raises:
            UsageError: a file is there that is no earlier plan, or was edited by hand.
            StorageError: it can't be written.
        """
        require_plan_place(Path(path))
        write_durably(Path(path), (self.text() + "\n").encode())
        return Path(path)

    def __repr__(self) -> str:
        return "\n".join(self.lines())


def _classifier_lines(job: Job, num_classes: int) -> list[str]:
    """Say that the classifier in the model folder is not used; empty if there is none, or the folder can't be read."""
    there = 0
    with contextlib.suppress(RingTuneError):
        there = classes_of_head(job.model.path)
    if not there or job.model.task not in NAMED_TASKS:
        return []
    return [
        f"the classifier in {job.model.path}, of {there:,} classes, is not used: a new one is trained for the "
        f"{num_classes:,} classes of the rows"
    ]


@for_python
def plan(
    job: JobLike = None,
    *,
    assume: int = 0,
    memory: str = "",
    coordinator: str = "",
    profile: str | PathLike[str] | None = None,
    explain: bool = False,
    microbatches: str = "",
    wire: str = "",
    nodes: int = 0,
    join_s: float = 60.0,
    insecure: bool = False,
    **keys: Any,
) -> PlannedJob:
    """Plan a job as ``ringtune plan`` does; ``print()`` of the result shows it.

    Example: ``ringtune.plan("job.toml", assume=3, memory="512MiB", train__batch_size=32)``.

    Args:
        job: a job file, or a mapping of its sections; None if all keys are given as keywords.
        assume: number of equal nodes to assume; 0 = as many as the job has owners.
        memory: budget of each assumed node, such as ``512MiB``; empty = a share of the free memory of this machine.
        coordinator: ``host:port`` of a coordinator with the nodes.
        profile: file of measured times.
        explain: whether to return the reasons too.
        microbatches: numbers for the planner to choose from in place of the job's, such as ``2,4`` or ``auto``.
        wire: types for the planner to choose from in place of the job's, such as ``float32,bfloat16``.
        nodes: number of joined nodes to wait for; 0 = use those that have joined.
        join_s: seconds to wait for them.
        insecure: whether the coordinator may be on another machine without encryption.
        keys: keys of the job, ``train__rounds=5`` for ``train.rounds``; they take precedence over ``job``.

    Raises:
        RingTuneError: the job is invalid, or can't be planned for these nodes.
    """
    to_plan = job_here(job, keys)
    choices = read_choices(microbatches, wire, batch_size=to_plan.train.batch_size)
    if coordinator and profile:
        raise UsageError("give one of --coordinator and --profile: nodes of a coordinator, or nodes measured before")
    if (profile or coordinator) and (assume or memory):
        raise UsageError("--assume and --memory are for nodes that are not there; coordinator and profile have some")
    if nodes and not coordinator:
        raise UsageError(f"--nodes is for --coordinator; to plan for equal nodes that are not there: --assume {nodes}")
    note, rows, told = "", list[str](), tuple[str, ...]()
    if coordinator:
        from coordinator.client.submit import Client

        with Client(coordinator, insecure=insecure) as client, WaitNotice(f"asking {coordinator}") as waiting:
            made, measured, told = client.plan(
                to_plan, progress=waiting, num_nodes=nodes, join_s=join_s, choices=choices
            )
        planned = planned_as(to_plan, made, measured, again=explain, **choices._asdict())
    elif profile:
        measured = read_profile(Path(profile))
        check_inputs(to_plan, measured)
        with WaitNotice("planning"):
            planned = make_plan(to_plan, measured.by_name, links=measured.links, **choices._asdict())
    else:
        if max(map(len, choices)) > 1:
            raise UsageError("nothing was measured to choose by; give --profile FILE or --coordinator HOST:PORT")
        with WaitNotice("reading model and rows"):
            assumed = estimate(to_plan, assume, memory_bytes=parse_bytes(memory, option="--memory") if memory else 0)
        measured, rows, note = Profile(nodes=tuple(assumed.facts.values())), assumed.rows, estimate_note(to_plan)
        with WaitNotice("planning"):
            planned = make_plan(to_plan, assumed.facts, **choices._asdict())
    is_measured, optimizer = bool(coordinator or profile), to_plan.train.optimizer
    if is_measured:
        rows, time = rows_lines(measured.nodes, to_plan.train.max_length), measured_time(planned, measured, optimizer)
        note = "; ".join(line for line in told if line not in (planned.note, *rows))  # the plan says these itself
    else:
        time = guessed_time(planned, to_plan, measured.nodes[0].model)
    reasons = None
    if explain and planned.choice is not None:
        reasons = explained(planned, relative=not is_measured, optimizer=optimizer, dropout=to_plan.train.dropout)
    return PlannedJob(
        plan=planned.plan,
        memory=planned.memory,
        profile=measured,
        is_measured=is_measured,
        note="; ".join(filter(None, (note, planned.note))),
        time=time,
        effort="" if coordinator else planned.effort_line,  # the note has that of the search there
        why=reasons,
        rows=(*rows, *_classifier_lines(to_plan, len(planned.plan.course.labels))),
    )
