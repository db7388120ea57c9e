"""Inputs of a prediction: a plan or a run's folder, a profile, a recorded run, and the times of a real run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coordinator.client.run_files import TablesFile
from coordinator.client.saved_run import read_run_file
from ringtune.costs.measurement import job_shape
from ringtune.costs.memory_sizes import DEFAULT_SETTINGS, MemorySettings
from ringtune.costs.profile import Profile, TimedShape
from ringtune.errors import IntegrityError, InvalidInputError, PlanError, UsageError
from ringtune.job.job import Job, load_job
from ringtune.schedule.operation_tables import ScheduledTable, table_before
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, holder_after
from ringtune.techniques.operations import expected_table
from sim.prediction import Prediction, recorded_shape
from sim.recorded_run import Recording, read_trace

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Inputs of a prediction.

    Attributes:
        run: folder of a run; None if only a plan was given.
        shape: of the batches for which the profile was timed; None = not known.
        move_s: median seconds of the moves that the run has made; None without moves.
    """

    plan: Plan
    profile: Profile
    run: Path | None
    job: Job | None
    shape: TimedShape | None
    settings: MemorySettings
    move_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """Measured seconds and bytes of a real run.

    Attributes:
        sent_bytes: (source, target) -> bytes.
        start: where a resumed run began; None = it did all steps of the plan.
        unfreeze_at: steps at which it unfroze, if the plan leaves that to the run; else None.
        tables: operation tables that it chose, if the plan leaves that to the run.
        stayed: placement numbers to which the run failed to move.
        steps_s: seconds of its steps alone; None in a report of an older version.
    """

    recording: Recording
    sent_bytes: Mapping[tuple[str, str], int]
    start: StartPoint | None
    unfreeze_at: tuple[int, ...] | None = None
    tables: tuple[ScheduledTable, ...] = ()
    stayed: tuple[int, ...] = ()
    steps_s: float | None = None


def read_inputs(plan: Path, profile: Path | None) -> Inputs:
    """Read a plan and a profile.

    Args:
        plan: ``plan.json``, the output of ``ringtune plan --json``, or a run's folder.
        profile: ``profile.json``; None = that of the run.

    Raises:
        UsageError: there is no profile, or no run in the folder.
        IntegrityError: a file is not readable.
        InvalidInputError: a plan or profile breaks a rule; names the file.
    """
    run = plan if plan.is_dir() else None
    plan_file = plan / "plan.json" if run else plan
    profile_file = profile or (plan / "profile.json" if run else None)
    if plan_file.suffix == ".toml":
        raise UsageError(
            f"{plan_file} is a job, a prediction needs a plan with measured times; give the --out of a "
            "'ringtune train', or a plan.json with --profile FILE"
        )
    if not plan.exists():
        raise UsageError(f"{plan} is not there; give plan.json or the --out of a 'ringtune train'")
    if profile_file is None:
        raise UsageError(f"{plan_file} alone has no times; give --profile FILE, or a run's folder, which has one")
    for file, hint in ((plan_file, "plan.json or the --out of a 'ringtune train'"), (profile_file, "--profile FILE")):
        if not file.is_file():
            raise UsageError(f"{file} is not there; give {hint}")
    found_plan, found_profile = read_plan(plan_file), _read(profile_file, Profile.from_json)
    job = load_job(plan / "job.toml") if run and (plan / "job.toml").is_file() else None
    fixed_tokens = max((node.model.fixed_tokens for node in found_profile.nodes), default=0)
    shape = job_shape(job, fixed_tokens=fixed_tokens) if job else recorded_shape(found_profile, found_plan)
    settings = MemorySettings.of_job(job) if job else DEFAULT_SETTINGS
    if not job and shape is not None:
        settings = MemorySettings(shape.optimizer or DEFAULT_SETTINGS.optimizer, shape.dtype or DEFAULT_SETTINGS.dtype)
    moves = _moves(plan / "report.json") if run and found_plan.moves else []
    moves_s = [seconds for _, seconds, problem in moves if not problem]
    return Inputs(
        plan=found_plan,
        profile=found_profile,
        run=run,
        job=job,
        shape=shape,
        settings=settings,
        move_s=statistics.median(moves_s) if moves_s else None,
    )


def _moves(report_file: Path) -> list[tuple[int, float, str]]:
    """Return (placement number, seconds, problem or empty) of each move of a run; empty without a report."""
    entries = read_run_file(report_file).get("moves", []) if report_file.is_file() else []
    try:
        return [(int(entry["to"]), float(entry["seconds"]), str(entry.get("problem", ""))) for entry in entries]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise IntegrityError(f"{report_file}: moves is no list of moves; copy the run's folder again") from error


def read_plan(path: Path) -> Plan:
    """Read a plan from a file, also of ``ringtune plan --json``; raises ``IntegrityError`` or ``InvalidInputError``."""

    def parse(value: dict[str, Any]) -> Plan:
        is_printed = value.get("event") == "plan" and isinstance(value.get("plan"), dict)
        return Plan.from_json(value["plan"] if is_printed else value)

    return _read(path, parse)


def _read(path: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """Parse the content of a file; an error of its content names the file."""
    value = read_run_file(path)
    try:
        return parse(value)
    except InvalidInputError as error:
        raise type(error)(f"{path}: {error}") from error


def read_recording(trace: Path, plan: Plan) -> tuple[Recording, bool]:
    """Read a recorded run, from which a prediction may draw its times.

    ``trace`` is a ``trace.json`` or a run's folder, ``plan`` the one to be predicted.

    Returns:
        The recording, and whether it is of this very plan (also assumed without a ``plan.json`` beside it).

    Raises:
        UsageError: the folder has no trace.
        IntegrityError: the trace is cut off or damaged; says where.
        PlanError: it is of other nodes, or of micro-batches of another size.
    """
    file = trace / "trace.json" if trace.is_dir() else trace
    if not file.is_file():
        raise UsageError(f"{file} is not there; give a run's folder or its trace.json")
    beside = file.with_name("plan.json")
    recorded = read_plan(beside) if beside.is_file() else None
    recording = read_trace(file, recorded.course.num_blocks if recorded else plan.course.num_blocks)
    if recorded is not None:
        before, now = recorded.course, plan.course
        sizes = [(each.course.microbatch_sizes()[0], each.course.max_length) for each in (recorded, plan)]
        if sizes[0] != sizes[1] or before.num_blocks != now.num_blocks:
            raise PlanError(
                f"{file} is of {before.num_blocks} blocks and micro-batches of {sizes[0][0]} x {sizes[0][1]} tokens, "
                f"the plan has {now.num_blocks} and {sizes[1][0]} x {sizes[1][1]}; its times say nothing about it"
            )
    if not any(node in recording.busy_s for node in plan.nodes):
        raise PlanError(
            f"{file} is of nodes {', '.join(sorted(recording.busy_s))}, the plan has {', '.join(plan.nodes)}"
        )
    return recording, recorded is None or recorded.digest == plan.digest


def read_measured(inputs: Inputs) -> MeasuredRun | None:
    """Read the times of the run in the folder; None without a run, or if it has not ended.

    Raises:
        IntegrityError: trace or report is damaged; says where.
        PlanError: the trace is not of the plan.
    """
    if inputs.run is None:
        return None
    trace, report_file = inputs.run / "trace.json", inputs.run / "report.json"
    if not (trace.is_file() and report_file.is_file()):
        return None
    recording, report = read_trace(trace, inputs.plan.course.num_blocks), read_run_file(report_file)
    left_out = inputs.plan.course.num_steps - recording.num_steps
    if left_out < 0:
        raise PlanError(
            f"{trace} has {recording.num_steps} steps, the plan {inputs.plan.course.num_steps}: they are not of one run"
        )
    steps_s, unfreeze_at = report.get("steps_s"), report.get("unfreeze_at", [])
    _require(steps_s is None or type(steps_s) in (int, float), report_file, "steps_s is no number")
    is_list = isinstance(unfreeze_at, list) and all(type(step) is int for step in unfreeze_at)
    _require(is_list or not inputs.plan.course.decides, report_file, "unfreeze_at is no list of steps")
    tables = TablesFile(inputs.run).read() if inputs.plan.course.choice is not None else ()
    return MeasuredRun(
        recording=recording,
        steps_s=steps_s,
        sent_bytes=_sent_bytes(report.get("links", {}), report_file),
        start=_resumed_at(inputs.plan, left_out, tables) if left_out else None,
        unfreeze_at=tuple(unfreeze_at) if inputs.plan.course.decides else None,
        tables=tables,
        stayed=tuple(placement_number for placement_number, _, problem in _moves(report_file) if problem),
    )


def _resumed_at(plan: Plan, step: int, tables: Sequence[ScheduledTable]) -> StartPoint:
    """Return the point where a run resumed; its trace lacks the first ``step`` steps of the plan."""
    course = plan.course
    operations = table_before(tables, step) or (expected_table(course) if course.choice is not None else None)
    placement_number = plan.after(step).placement.placement_number
    return StartPoint.of(
        course, step=step, holder=holder_after(course, step), operations=operations, placement_number=placement_number
    )


def _require(is_right: bool, path: Path, what: str) -> None:
    if not is_right:
        raise IntegrityError(f"{path}: {what}; copy the run's folder again")


def _sent_bytes(links: object, path: Path) -> dict[tuple[str, str], int]:
    sent_bytes = {}
    for name, num_bytes in links.items() if isinstance(links, dict) else ():
        source, arrow, target = name.partition(">")
        _require(bool(arrow) and isinstance(num_bytes, int), path, f"{json.dumps(name)} is no link with bytes")
        sent_bytes[source, target] = num_bytes
    return sent_bytes


def plan_as_run(plan: Plan, measured: MeasuredRun | None) -> Plan:
    """Return the plan with the unfreezing steps of a measured run, and without placements that it did not reach."""
    if measured is None or (measured.unfreeze_at is None and not measured.stayed):
        return plan
    course = plan.course
    if measured.unfreeze_at is not None:
        course = course.with_method(course.method.decided(measured.unfreeze_at))
    return Plan(
        course, tuple(placement for placement in plan.placements if placement.placement_number not in measured.stayed)
    )


def measured_json(measured: MeasuredRun, predicted: Prediction) -> dict[str, Any]:
    """Return the measured seconds, steps and bytes, and the errors of the predicted seconds.

    ``wall_s`` is from the first action to the last, ``steps_s`` of the steps alone, None if not reported. Example:
    predicted 110 s, measured 100 s is an ``error_share`` of 0.1.
    """
    real_s, steps_s = measured.recording.wall_s, measured.steps_s
    return {
        "wall_s": real_s,
        "error_share": predicted.wall_s / real_s - 1 if real_s else None,
        "steps_s": steps_s,
        "steps_error_share": predicted.train_s / steps_s - 1 if steps_s else None,
        "busy_s": dict(sorted(measured.recording.busy_s.items())),
        "steps": measured.recording.num_steps,
        "sent_bytes": {f"{source}>{target}": count for (source, target), count in sorted(measured.sent_bytes.items())},
    }
