"""``ringtune.train``: run a job, on local processes or on a running coordinator."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from coordinator.api.asking import make_submission
from coordinator.api.folders import python_words
from coordinator.api.jobs import JobLike, read_job
from coordinator.api.planning import PlannedJob
from coordinator.api.run import Run
from coordinator.api.showing import choose_progress
from coordinator.planner.alternatives import read_choices
from coordinator.planner.given.given_plan import GivenPlan, read_given_plan
from coordinator.predicting.sample import show_sample
from coordinator.run_folder.folder import ASKED, held_for_resume, remove_if_nothing_began
from coordinator.submit.detached import start_in_background
from coordinator.submit.submission import Submission, begin_in_background, follow_run, submit
from ringtune.errors import UsageError
from ringtune.files.durable import write_durably
from ringtune.trust.speaking import speaker, speaking_as

PlanLike: TypeAlias = str | PathLike[str] | PlannedJob | None


def train(
    job: JobLike = None,
    *,
    local: int = 0,
    coordinator: str = "",
    out: str | PathLike[str] | None = None,
    wait: bool = True,
    progress: bool = True,
    resume: bool = False,
    replace: bool = False,
    plan: PlanLike = None,
    profile: str | PathLike[str] | None = None,
    microbatches: str = "",
    wire: str = "",
    nodes: int = 0,
    join_s: float = 60.0,
    insecure: bool = False,
    coordinator_wait_s: float = 300.0,
    **keys: Any,
) -> Run:
    """Train a job as ``ringtune train`` does, and return the run.

    Ctrl-C, in a notebook "interrupt the kernel", ends the run after the turns that are under way, with a checkpoint;
    a second one at once. Only the main thread hears it. ``Run.stop`` does the same from anywhere.

    Example: ``run = ringtune.train("job.toml", local=3, train__rounds=2)``.

    Args:
        job: a job file, a mapping of its sections, or nothing where keywords say it all.
        local: start so many nodes on this machine.
        coordinator: or train on the nodes of this one, ``host:port``.
        out: folder for the run's files; None = a new one, ``run-1``, ``run-2`` and so on.
        wait: whether to follow the run to its end. False = return as soon as it trains; it then goes on by itself, even
            without this process, as with ``--detach``.
        progress: whether it is shown.
        resume: go on with the run in ``out``, from its newest checkpoint.
        replace: put an earlier run's files aside, into ``<out>.replaced-<time>``.
        plan: carry out this plan, the result of ``ringtune.plan`` or a file that it saved.
        profile: file of times that were measured before.
        microbatches: numbers for the planner to choose from in place of the job's, such as ``2,4`` or ``auto``.
        wire: types for the planner to choose from in place of the job's, such as ``float32,bfloat16``.
        nodes: wait until so many nodes have joined the coordinator; 0 = take those that are there.
        join_s: how long to wait for them, in seconds.
        insecure: whether the coordinator may be on another machine, without encryption.
        coordinator_wait_s: how long to wait for a coordinator that is away, in seconds.
        keys: keys of the job, ``train__rounds=5`` for ``train.rounds``; they win over ``job``.

    Raises:
        RingTuneError: the job is wrong, or whatever the run failed with; ``InterruptedRunError`` if it was stopped.
    """
    with python_words():
        _check(local, coordinator, out, nodes, resume, replace, chosen=bool(microbatches or wire), plan=plan)
        if resume and job is None and out is not None:
            job = Path(out) / "job.toml"
        wanted = read_job(job, keys)
        with (
            speaking_as(None if local else speaker()),
            _folder(out) as folder,
            held_for_resume(folder) if resume and wait else contextlib.nullcontext(),
        ):
            submission, notes = make_submission(
                wanted,
                folder,
                local=local,
                coordinator=coordinator,
                insecure=insecure,
                nodes=nodes,
                join_s=join_s,
                replace=replace,
                resume=resume,
                profile=Path(profile) if profile is not None else None,
                plan=_given(plan),
                choices=read_choices(microbatches, wire, batch_size=wanted.train.batch_size),
                coordinator_wait_s=coordinator_wait_s,
            )
            if wait:
                follow_run(
                    submission,
                    folder,
                    notes,
                    how_to_resume=lambda step: _how_to_resume(step, folder),
                    show=lambda: choose_progress(progress),
                    after=lambda shown: show_sample(submission.request.job, folder, shown),
                )
                return Run(folder, insecure=insecure)
            if not local:
                submit(submission, folder)
                return Run(folder, insecure=insecure)
            words = [*_words("--profile", profile), *_words("--microbatches", microbatches), *_words("--wire", wire)]
            return _in_background(submission, folder, words, _given(plan), resume=resume)


def _check(
    local: int,
    coordinator: str,
    out: object,
    nodes: int,
    resume: bool,
    replace: bool,
    *,
    chosen: bool,
    plan: object,
) -> None:
    """Refuse options that make no sense together.

    Raises:
        UsageError: names them.
    """
    if bool(local) == bool(coordinator):
        raise UsageError("give one of local=N, nodes on this machine, and coordinator='HOST:PORT'")
    if nodes and local:
        raise UsageError("nodes= is for coordinator=; local= says how many nodes there are")
    if resume and (replace or out is None):
        raise UsageError("resume=True goes on with the run in out=DIR; replace=True would put it aside")
    if plan is not None and chosen:
        raise UsageError("a plan has its micro-batches and wire dtype; leave out microbatches= and wire=")
    if resume and (plan is not None or chosen):
        raise UsageError("resume=True goes on with the run's own plan; leave out plan=, microbatches= and wire=")


def _given(plan: PlanLike) -> GivenPlan | None:
    if isinstance(plan, PlannedJob):
        return plan.given
    return None if plan is None else read_given_plan(Path(plan))


def _words(option: str, value: object) -> list[str]:
    return [option, str(value)] if value else []


def _how_to_resume(step: int, folder: Path) -> str:
    return f"saved up to step {step}; go on with train(out={str(folder)!r}, resume=True) and the same nodes"


@contextmanager
def _folder(out: str | PathLike[str] | None) -> Iterator[Path]:
    """Give the folder of a run; a new one is removed again if nothing but what was asked came into it."""
    if out is not None:
        yield Path(out)
        return
    folder = _new_folder()
    try:
        yield folder
    except BaseException:
        remove_if_nothing_began(folder)
        raise


def _new_folder() -> Path:
    """Make the first of ``run-1``, ``run-2`` and so on that is not there, in the current folder."""
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            (folder := Path(f"run-{number}")).mkdir()
            return folder
    raise AssertionError


def _in_background(
    submission: Submission, folder: Path, words: list[str], given: GivenPlan | None, *, resume: bool
) -> Run:
    """Start ``ringtune train`` as a process of its own, which has the job from a file in the run's folder.

    Of a run that goes on ``job.toml`` says what it was, so what is asked now stands in another file.
    """
    job = folder / (ASKED if resume else "job.toml")
    begin_in_background(submission, folder, lambda line: None)
    write_durably(job, submission.request.job.to_toml().encode())
    words = ["train", str(job), "--local", str(submission.local), "--out", str(folder), *words]
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        if given is not None:
            path = Path(name) / "plan.json"
            write_durably(path, json.dumps(given.to_json()).encode())
            words += ["--plan", str(path)]
        _, process = start_in_background(folder, [*words, *(["--resume"] if resume else [])])
    run = Run(folder)
    run._left.process = process
    return run
