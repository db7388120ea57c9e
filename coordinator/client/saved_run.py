"""Reader of a run's folder: job, plan, report, result, and the location of the run.

The command that submits a run writes ``run.json`` as soon as the run has its id.

Of users with adapters of their own one is chosen, or the sum of all. In collaboration every row passes that sum, so it
is the default result. Adapters trained alone are for the rows of one user, who must be named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coordinator.client.checkpoints import RunCheckpoints
from ringtune.config.sections import MISSING
from ringtune.errors import DeadlineError, IntegrityError, InvalidInputError, UsageError
from ringtune.hints import hint
from ringtune.ids import check_run_id
from ringtune.job.job import METHOD_SECTIONS, Job, Train, job_of_sum, job_of_user, load_job, result_of, result_of_user
from ringtune.job.rows import input_columns, target_columns
from ringtune.machine.process import exit_error
from ringtune.models.adapter_support import generic_refusal, merge_refusal
from ringtune.models.families import family_named
from ringtune.models.family import CAUSAL_LM, IMAGE_CLASSIFICATION
from ringtune.models.gguf import folder_of_gguf
from ringtune.models.result_files import DESCRIPTIONS, USERS_FOLDER, Result, of_user
from ringtune.schedule.course import COLLABORATION, dtype_of
from ringtune.schedule.methods import method_class
from ringtune.schedule.plan import Plan
from ringtune.storage import strict
from ringtune.storage.durable import write_durably
from ringtune.storage.strict import read_dataclass, read_json
from ringtune.storage.text_files import resolved
from ringtune.techniques import TECHNIQUES
from ringtune.texts import listed

PLACE = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLocation:
    """The coordinator and the command of a run, as in ``run.json``.

    Attributes:
        is_local: whether the coordinator ends with the run.
        pid: process id of the command that submitted it.
        local_nodes: number of nodes that were started for it; 0 = those of the coordinator.
    """

    run_id: str
    coordinator: str
    is_local: bool
    pid: int
    local_nodes: int = 0

    def write(self, folder: Path) -> None:
        """Write ``run.json`` into the run's folder."""
        write_durably(folder / PLACE, (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode())


def read_place(folder: Path) -> RunLocation | None:
    """Read ``run.json``; None if it is missing. Raises ``IntegrityError``: the file is damaged."""
    path = folder / PLACE
    try:
        place = read_dataclass(RunLocation, read_json(path), where="", error=InvalidInputError)
        check_run_id(place.run_id)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InvalidInputError, UsageError) as error:
        raise IntegrityError(f"{path} can't be used ({error}); name the run by its id") from error
    return place


def is_running(pid: int) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:1] != ["Z"]
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """A finished run in its folder.

    Attributes:
        report: totals; empty if the run did not write them.
        saved: folder with the adapter or the model; for users with adapters of their own, the parent of their folders.
        user_share: that of users with adapters here, for the model card: ``one of 3``; empty where none was chosen.
    """

    folder: Path
    job: Job
    plan: Plan
    report: dict[str, Any]
    saved: Path
    user_share: str = ""

    @property
    def result(self) -> Result:
        """The kind and files of the result."""
        return result_of(self.job)

    @property
    def users(self) -> tuple[str, ...]:
        """Users with adapters of their own; empty where all rows trained the same."""
        return self.plan.course.user_sets


def read_run(folder: Path, *, needs_result: bool = True) -> SavedRun:
    """Read the folder of a run with a result, or one that has none yet.

    Raises:
        UsageError: the folder is missing, or has no run.
        InvalidInputError: the run has no adapter or model.
        IntegrityError: a file is not readable.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give the --out of a 'ringtune train'")
    missing = [name for name in ("job.toml", "plan.json") if not (folder / name).is_file()]
    if missing:
        raise UsageError(f"{folder} holds no run: {missing[0]} is missing; give the --out of a 'ringtune train'")
    job = load_job(folder / "job.toml")
    plan = Plan.from_json(read_run_file(folder / "plan.json"))
    result, users = result_of(job), plan.course.user_sets
    results = {of_user(user): result_of_user(job, user) for user in users} or {result.folder: result}
    for place, expected in results.items() if needs_result else ():
        if lacking := expected.missing_in(folder / place):
            raise InvalidInputError(f"{folder} has no {place}: {place}/{lacking} is missing; {_resume_hint(folder)}")
    return SavedRun(
        folder=folder,
        job=job,
        plan=plan,
        report=read_report(folder),
        saved=folder / (USERS_FOLDER if users else result.folder),
    )


def _resume_hint(folder: Path) -> str:
    """Say how to finish a run without a result: wait for it, resume it from its newest checkpoint, or repeat it."""
    with contextlib.suppress(IntegrityError):
        if (place := read_place(folder)) and is_running(place.pid):
            return f"the run is under way in process {place.pid}; wait for its end"
    steps = RunCheckpoints(folder).steps()
    if not steps:
        none = "the run has not ended and has no checkpoint yet"
        return f"{none}; if it was stopped, repeat it: {_trains(folder, '--replace')}"
    saved = f"the run has not ended, it is saved up to step {steps[0]}"
    return f"{saved}; if it was stopped, resume it: {_trains(folder, '--resume')}"


def _trains(folder: Path, option: str) -> str:
    """Write the command that trains the run of a folder again, on the nodes of its beginning."""
    words = ("train", str(folder / "job.toml"), "--out", str(folder), option)
    with contextlib.suppress(IntegrityError):
        if place := read_place(folder):
            local = ("--local", str(place.local_nodes)) if place.is_local else ()
            return hint(*words, *local, coordinator="" if place.is_local else place.coordinator)
    return f"{hint(*words)}, with the --local N or --coordinator that it was begun with"


def read_run_file(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a run. Raises ``IntegrityError``: the file is no JSON object."""
    try:
        value = strict.read_json(path)
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} is not readable JSON ({error}); copy the run's folder again") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{path} is not a JSON object; copy the run's folder again")
    return value


_REPORT: Final = {"eval": dict, "nodes": dict, "links": dict, "steps": int, "wall_s": int | float, "version": str}


def require_kinds(table: Mapping[str, Any], kinds: Mapping[str, Any], where: object) -> None:
    """Refuse a table in which a value is not of its class, or classes, or a number is not finite.

    Raises ``IntegrityError``. A number that may be missing may also be none that is finite.
    """
    for name, kind in kinds.items():
        is_endless = kind == int | float and isinstance(table.get(name), float) and not math.isfinite(table[name])
        if name in table and (not isinstance(table[name], kind) or is_endless):
            what = f"{name} is {strict.describe_value(table[name])}"
            raise IntegrityError(f"{where} is damaged: {what}; copy the run's folder again")


def read_report(folder: Path) -> dict[str, Any]:
    """Read ``report.json``, empty if there is none. Raises ``IntegrityError``: it is damaged."""
    path = folder / "report.json"
    report = read_run_file(path) if path.is_file() else {}
    require_kinds(report, _REPORT, path)
    return report


def with_data(
    run: SavedRun, columns: Mapping[str, str], missing: str = "", *, has_references: bool = False
) -> SavedRun:
    """Replace column names (key of ``[data]`` -> name) or the treatment of empty cells, for another file of rows.

    ``missing`` is ``error`` or ``skip``; empty = as in the job. With ``has_references`` the texts of a language model
    are compared with those in a column ``answer``.

    Raises:
        UsageError: the task reads no such column, or ``missing`` is another word.
        JobError: two columns have the same name.
    """
    if missing not in ("", *MISSING):
        raise UsageError(f"--missing is {missing!r}, it has to be one of {', '.join(MISSING)}")
    task, data = run.job.model.task, run.job.data
    known = [key.removeprefix("data.") for key in input_columns(task, data) | target_columns(task, data)]
    known = ["image", "label"] if task == IMAGE_CLASSIFICATION else known
    known += ["answer"] if task == CAUSAL_LM and has_references else []
    for key in columns:
        if key not in known:
            raise UsageError(f"--column {key}=...: this run reads the columns {', '.join(known)}; name one of them")
    changed: dict[str, Any] = {**columns, **({"missing": missing} if missing else {})}
    job = dataclasses.replace(run.job, data=dataclasses.replace(data, **changed))
    return dataclasses.replace(run, job=job)


def evaluation_job(run: SavedRun, data: Path | None, *, model: Path | None = None) -> Job:
    """Make the job of an evaluation from a run's job: its classes, one owner of ``data``, no method settings.

    ``data`` None: every node has its own rows, or those of the run's job. ``model`` replaces the run's folder of the
    model.

    Raises ``JobError``: a value is refused.
    """
    job = run.job
    given: dict[str, Any] = {}
    if data is not None:
        given = {"train": str(resolved(data)), "eval": str(resolved(data)), "held_out": 0.0, "split": "iid"}
    # the user of a row matters in training only
    section = dataclasses.replace(job.data, **given, labels=run.plan.course.labels, owners=0, user="")
    # every method gives the same forward; the plain one asks for no special ring, but knows no full parameters
    method = job.train.method if job.method.full_parameters else Train().method
    train = dataclasses.replace(job.train, method=method, dropout=0.0, checkpoint_every=0, packing=None)
    changed: dict[str, Any] = {
        **dict.fromkeys(name for name in METHOD_SECTIONS if name != method_class(method).section),
        "model": dataclasses.replace(job.model, path=str(folder_of_gguf(model.resolve()))) if model else job.model,
        "data": section,
        "adapter": dataclasses.replace(job.adapter, from_="", sha256=""),  # the result has all values
        "train": train,
        "runtime": dataclasses.replace(job.runtime, record=False, frozen=dtype_of(run.plan.course.frozen)),
        **{name: value for technique in TECHNIQUES for name, value in technique.evaluation_sections.items()},
    }
    return dataclasses.replace(job, **changed)


MERGE_S: Final = 3600.0
"""Deadline, in seconds, of reading, merging and writing a model."""


def check_can_merge(run: SavedRun) -> None:
    """Refuse a run with an adapter that can't be merged into weight matrices; raises ``UsageError``."""
    adapter = run.job.adapter.config
    if run.result.is_model:
        raise UsageError(f"{run.folder} has a whole model, there is nothing to merge; leave --merge out")
    if problem := merge_refusal(adapter):
        raise UsageError(
            f"adapter.config = {adapter!r} can't be merged: {problem}; leave --merge or --format gguf out, "
            "or train linear or lora"
        )


def merge_into(run: SavedRun, target: Path, *options: str) -> None:
    """Write the merged model of a run, without a card, in a process of its own; raises ``RingTuneError``.

    ``options`` are those of ``edge.model.merge``: another base model, one user in place of the sum of all; or the sum
    of the adapters of all users alone, as the folder of one adapter.
    """
    command = [sys.executable, "-P", "-m", "edge.model.merge", str(run.folder), str(target), *options]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command, capture_output=True, text=True, timeout=MERGE_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"the model is not merged after {MERGE_S:g} s; export on a faster disk") from error
    if done.returncode:
        raise exit_error("merging", done.returncode, done.stderr[-4096:], log=target)


_MAX_NAMED: Final = 20


def require_user(run: SavedRun, user: str) -> None:
    """Refuse an unknown user, and an empty one (all adapters) if a user has to be named; raises ``UsageError``."""
    if not run.users:
        if user:
            raise UsageError(
                f"{run.folder} has no adapters of single users, all rows trained the same; leave --user out"
            )
        return
    if user and user not in run.users:
        raise UsageError(f"{run.folder} has no user {user!r}; give --user with one of {listed(run.users, _MAX_NAMED)}")
    if not user and run.plan.course.helper_settings.users != COLLABORATION:
        raise UsageError(
            f"in {run.folder} each user's adapters were trained alone, for that user's rows; give --user with one of "
            f"{listed(run.users, _MAX_NAMED)}"
        )
    if not user:
        summed, first = job_of_sum(run.job, run.users).adapter.config, run.folder / of_user(run.users[0])
        path = next(first / name for name in DESCRIPTIONS if (first / name).is_file())
        family = family_named(read_run_file(path).get("model_type"), where=str(path))
        if family.generic and generic_refusal(family, summed):
            raise UsageError(
                f"in {run.folder} the sum of the adapters of all users is {summed!r}, which a {family.model_type} "
                f"can't have; give one user with --user, of {listed(run.users, _MAX_NAMED)}"
            )


def as_of(run: SavedRun, user: str) -> SavedRun:
    """Return the run of one user's adapters, or of the sum; unchanged without adapters of users.

    The evaluation figures are of all users, so one user's run has none.
    """
    if not run.users:
        return run
    count = f"{len(run.users)} users with adapters of their own"
    if not user:
        job = job_of_sum(run.job, run.users)
        return dataclasses.replace(run, job=job, user_share=f"all {count}, added up")
    report = {name: value for name, value in run.report.items() if name != "eval"}
    job = job_of_user(run.job, user)
    return dataclasses.replace(
        run, job=job, report=report, saved=run.folder / of_user(user), user_share=f"one of {count}"
    )


@contextmanager
def adapter_of(run: SavedRun, user: str) -> Iterator[SavedRun]:
    """Yield the run with the folder of one adapter, valid in the context; ``user`` as ``require_user`` accepts it.

    Raises ``RingTuneError``: the adapters could not be added up.
    """
    if not run.users or user:
        yield as_of(run, user)
        return
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        merge_into(run, Path(name), "--sum")
        yield dataclasses.replace(as_of(run, user), saved=Path(name))
