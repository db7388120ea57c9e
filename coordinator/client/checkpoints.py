"""Checkpoints and best results in a run's folder, and the choice of those that a run can resume from.

::

    DIR/checkpoints/step-<N>.json    a complete checkpoint: the shard of every node with its digest
    DIR/checkpoints/lengths.json     of a run that was made longer: its former lengths
    DIR/checkpoints/nodes/<node>/    with --local: the shards of that node
    DIR/best/<N>/adapter/            the result of step N, with the best evaluation so far (``train.keep_best``)
    DIR/best/<N>/complete            written last: all files of that step are present

When the run is done, its best result is copied to ``DIR/adapter/`` or the like. It also stays in ``best/``, for a run
that is made longer. Older results stay as long as a run may resume from a checkpoint at which they were the best.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from coordinator.run.run_text import is_settled
from ringtune.errors import IntegrityError, JobError, PlanError, UsageError
from ringtune.job.job import Job, parse_job
from ringtune.models.result_files import BEST_FOLDER, RESULT_FOLDERS
from ringtune.run_control.checkpoint import KEPT, CheckpointManifest, Resume, of_one_course
from ringtune.run_control.continuation import (
    LENGTH_KEYS,
    Length,
    changed_keys,
    describe_changes,
    equal_keys,
    longer,
    num_steps_of,
    plan_of_checkpoint,
    with_state_where_asked,
)
from ringtune.schedule.plan import Plan
from ringtune.storage.durable import (
    drop_file,
    is_plain_file,
    move_folder_aside,
    remove_folder,
    remove_partial_files,
    replace_folder,
    storage_errors,
    write_durably,
)
from ringtune.storage.strict import MAX_JSON_BYTES, parse_json, read_given, read_json, regular

_COMPLETE: Final = "complete"


class BestFolder:
    """The best results of one run."""

    def __init__(self, run_folder: Path) -> None:
        self._run, self._folder = run_folder, run_folder / BEST_FOLDER

    def steps(self) -> tuple[int, ...]:
        """List the steps with a folder, complete or not, ascending."""
        names = [entry.name for entry in self._folder.iterdir()] if self._folder.is_dir() else []
        return tuple(sorted(int(name) for name in names if name.isdecimal()))

    def has(self, step: int) -> bool:
        """Whether the result of a step is complete."""
        return (self._folder / str(step) / _COMPLETE).is_file()

    def complete(self, step: int) -> None:
        """Mark the result of a step as complete."""
        write_durably(self._folder / str(step) / _COMPLETE, b"")

    def publish(self, step: int) -> None:
        """Copy the result of a step to the result folders of the run. Raises ``IntegrityError``: it is not complete."""
        if not self.has(step):
            raise IntegrityError(
                f"the run's best result, that of step {step}, is not in {self._folder}; fetch the run into the folder "
                "that it was resumed from"
            )
        for name in RESULT_FOLDERS:
            source, target = self._folder / str(step) / name, self._run / name
            part = target.with_name(target.name + ".part")
            if source.is_dir():
                remove_folder(part)
                with storage_errors(target):
                    shutil.copytree(source, part, copy_function=_copy_durably)
                replace_folder(part, target)

    def rewind_to(self, step: int) -> None:
        """Drop the results of later steps: the run may never repeat them."""
        self._drop(later for later in self.steps() if later > step)

    def prune_before_best(self, manifests: Iterable[CheckpointManifest]) -> None:
        """Drop results older than the best ones of these checkpoints."""
        best_steps = [manifest.evaluations.best_step for manifest in manifests if manifest.evaluations.best is not None]
        self._drop(step for step in self.steps() if best_steps and step < min(best_steps))

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            shutil.rmtree(self._folder / str(step), ignore_errors=True)


def with_best(
    run_folder: Path, manifests: Iterable[CheckpointManifest]
) -> tuple[tuple[CheckpointManifest, ...], tuple[str, ...]]:
    """Return the checkpoints with a complete best result, and the problems of the others."""
    best, usable, problems = BestFolder(run_folder), list[CheckpointManifest](), list[str]()
    for manifest in manifests:
        known = manifest.evaluations
        if known.best is None or best.has(known.best_step):
            usable.append(manifest)
        else:
            lacks = f"{run_folder / BEST_FOLDER / str(known.best_step)}, the best result until then, is not there"
            problems.append(f"{manifest.name} can't be used: {lacks}")
    return tuple(usable), tuple(problems)


def _copy_durably(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    force_to_disk(Path(target))


FOLDER = "checkpoints"
NODES = "nodes"
_LENGTHS = "lengths.json"
_NAME = re.compile(r"step-(\d{1,18})\.json")


class RunCheckpoints:
    """The manifests of one run."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER

    def node_states(self) -> Path:
        """Parent of the local nodes' folders for shards."""
        return self._folder / NODES

    def path(self, step: int) -> Path:
        """Path of the manifest of a step."""
        return self._folder / f"step-{step}.json"

    def steps(self) -> tuple[int, ...]:
        """List the steps with a manifest, newest first."""
        if not self._folder.is_dir():
            return ()
        matches = (_NAME.fullmatch(entry.name) for entry in self._folder.iterdir())
        return tuple(sorted((int(match[1]) for match in matches if match), reverse=True))

    def add(self, manifest: CheckpointManifest) -> None:
        """Write a manifest, which completes the checkpoint; then drop all but the ``KEPT`` newest."""
        move_folder_aside(self.path(manifest.step))
        write_durably(self.path(manifest.step), (json.dumps(manifest.to_json(), indent=1) + "\n").encode())
        for old in self.steps()[KEPT:]:
            drop_file(self.path(old))

    def read(self) -> tuple[tuple[CheckpointManifest, ...], tuple[str, ...]]:
        """Return the readable manifests, newest first, and the problems of the others."""
        readable, damaged = [], []
        for step in self.steps():
            try:
                if not is_plain_file(self.path(step)):
                    raise IntegrityError("a link or folder is in its place")
                manifest = CheckpointManifest.parse(read_given(self.path(step), most_bytes=MAX_JSON_BYTES))
                if manifest.step != step:
                    raise IntegrityError(f"it is of step {manifest.step}")
                readable.append(manifest)
            except (OSError, UnicodeDecodeError, IntegrityError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                damaged.append(f"{self.path(step)} can't be used: {why}")
        return tuple(readable), tuple(damaged)

    def lengths(self) -> tuple[Length, ...]:
        """List the former lengths of a run that was made longer, oldest first.

        Raises ``IntegrityError``: the file is damaged.
        """
        path = self._folder / _LENGTHS
        try:
            return tuple(Length.from_json(value) for value in read_json(path))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, TypeError, IntegrityError) as error:
            raise IntegrityError(f"{path} can't be read ({error}); the run can't be resumed without it") from error

    def add_length(self, length: Length) -> None:
        """Store a former length of the run, before its job is overwritten."""
        if length not in self.lengths():
            lengths = [dataclasses.asdict(entry) for entry in (*self.lengths(), length)]
            write_durably(self._folder / _LENGTHS, json.dumps(lengths).encode())

    def rewind_to(self, step: int) -> None:
        """Delete the manifests after ``step``, from which the run resumes."""
        for newer in self.steps():
            if newer > step:
                drop_file(self.path(newer))
        if self._folder.is_dir():
            remove_partial_files(self._folder)


def find_resume(run_folder: Path, job: Job, note: Callable[[str], None]) -> Resume | None:
    """Find the plan and the checkpoints from which a run can resume; None if it has no checkpoint yet.

    ``job`` is the requested one; ``note`` takes lines for the user.

    Raises:
        UsageError: there is no run, or it is finished.
        JobError: the run is of another job.
        IntegrityError: every manifest, or the plan, is damaged.
        PlanError: the checkpoints are of another plan.
    """
    if not run_folder.is_dir():
        raise UsageError(f"{run_folder} has no run to resume; correct --out, or leave --resume out")
    checkpoints = RunCheckpoints(run_folder)
    lengths = _lengths_before(run_folder / "job.toml", job, checkpoints)
    if not lengths:
        _require_unfinished(run_folder)
    manifests, damaged = checkpoints.read()
    if job.train.keep_best and not job.keeps_best_on_disk:
        manifests, lacking = with_best(run_folder, manifests)
        damaged = (*damaged, *lacking)
    for problem in damaged:
        note(problem)
    if not manifests:
        if damaged:
            raise IntegrityError(f"{'; '.join(damaged)}; no other checkpoint is left, start the run without --resume")
        if (run_folder / "report.json").exists():
            raise UsageError(
                f"the run in {run_folder} has no checkpoint, so it can't be made longer; repeat it: --replace"
            )
        note(f"{run_folder} has no complete checkpoint yet: the run starts from the beginning")
        return None
    stored = _read_plan(run_folder / "plan.json")
    plan = plan_of_checkpoint(job, with_state_where_asked(stored, job), [manifests[0].plan_digest], lengths)
    if plan.course.left_out != stored.course.left_out:
        out = [owner.node for owner in plan.course.owners if stored.course.owner(owner.node) is None]
        back = [owner.node for owner in stored.course.owners if plan.course.owner(owner.node) is None]
        if out:
            rows = f"the rows of {', '.join(out)} were left out: they are needed again"
            note(f"the newest checkpoint is from before {rows}")
        if back:
            note(f"the newest checkpoint is from before {', '.join(back)} came back")
    if plan.course.left_out:  # from before an owner was left out or came back only the newest one is used
        usable = of_one_course(job, plan, manifests, lengths)
        for older in manifests[len(usable) :]:
            note(
                f"the checkpoint of step {older.step} is from before an owner was lost or came back, so it is not used"
            )
        manifests = usable
    if plan.placements != stored.placements:
        where = "on the disks of the nodes" if job.keeps_state_on_disk else "in memory"
        note(f"optimizer state of groups that rest is {where} from here on (hift.state); the result is the same")
    if lengths and num_steps_of(job, plan) != plan.course.num_steps:
        made = longer(plan, job)
        note(f"the run had {plan.course.num_steps} steps and gets {made.course.num_steps}")
        plan, manifests = made, _at_turns(manifests, made, note)
    elif lengths:
        _require_unfinished(run_folder)
    resume = Resume(plan=plan, manifests=manifests, lengths=lengths)
    resume.check(job)
    return resume


def _lengths_before(path: Path, job: Job, checkpoints: RunCheckpoints) -> tuple[Length, ...]:
    """List the run's former lengths, and the present one if the job asks for another."""
    try:
        before = parse_job(read_given(path), source=str(path))
    except FileNotFoundError:
        return ()  # stopped before anything was decided; a checkpoint has its own digest of the job
    except OSError as error:
        raise IntegrityError(f"can't read {path}: {error.strerror}") from error
    changed = changed_keys(before, job)
    may_change = (*LENGTH_KEYS, *equal_keys(before, job))
    if not set(changed) <= set(may_change):
        changes = describe_changes(before, job, but=may_change)
        raise JobError(
            f"{path} is of another job: {changes}; give the job that the run was started with, or another --out"
        )
    is_longer = not set(changed).isdisjoint(LENGTH_KEYS)
    return (*checkpoints.lengths(), Length.of(before)) if is_longer else checkpoints.lengths()


def _at_turns(
    manifests: tuple[CheckpointManifest, ...], plan: Plan, note: Callable[[str], None]
) -> tuple[CheckpointManifest, ...]:
    """Drop the checkpoint of a last turn that was cut short: the longer run does that turn to its end."""
    length = plan.course.local_iterations
    usable = tuple(manifest for manifest in manifests if manifest.step % length == 0)
    for manifest in manifests:
        if manifest not in usable:
            note(f"the checkpoint of step {manifest.step} is within a turn of {length} steps of the longer run")
    if not usable:
        raise UsageError("no checkpoint is at the end of a turn of the longer run; train it from its start, --replace")
    return usable


def _require_unfinished(run_folder: Path) -> None:
    """Refuse to resume a finished run: its report, trace and adapter would be overwritten.

    The report is the last file of a run, and a resumed run moves it away first.
    """
    if (run_folder / "report.json").exists():
        raise UsageError(
            f"the run in {run_folder} is finished, nothing was changed; its results are there, --replace repeats it"
        )


def _read_plan(path: Path) -> Plan:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} can't be read ({error}); the run can't be resumed without it") from error
    try:
        return Plan.from_json(value)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def cut_metrics(path: Path, step: int) -> None:
    """Delete the lines after the first ``step`` steps, and an incomplete last line, from ``metrics.jsonl``.

    Raises ``StorageError``: the file can't be written; its content is unchanged.
    """
    if not path.exists():
        return
    with storage_errors(path), open(path, "rb", opener=regular) as file:
        lines = file.read().splitlines(keepends=True)
    write_durably(path, b"".join(line for line in lines if _stays(line, step)))


def _stays(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and is_settled(parse_json(line), step)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def force_to_disk(path: Path) -> None:
    """Flush appended content of a file to the disk."""
    if path.exists():
        with storage_errors(path), open(path, "rb", opener=regular) as file:
            os.fsync(file.fileno())
