"""``ringtune train``: run a job on local processes or on a coordinator."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_OF_THE_PLAN = ("--plan", "--microbatches", "--wire")
"""What a run that goes on is not asked: it has its plan."""


@app.command()
def train(
    job: options.JobFile,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the run's files. May be left out with --detach --coordinator."),
    ] = None,
    local: options.Local = 0,
    coordinator: options.CoordinatorOrLocal = "",
    nodes: options.Nodes = 0,
    join_s: options.JoinS = 60.0,
    change: options.Changes = None,
    replace: Annotated[bool, typer.Option("--replace", help="Put an earlier run's files aside.")] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in the folder, from its newest checkpoint; a finished one with more train.rounds.",
        ),
    ] = False,
    profile: options.ProfileFile = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Carry out this plan of 'ringtune plan'; plan nothing.")
    ] = None,
    microbatches: options.MicrobatchChoices = "",
    wire_dtypes: options.WireChoices = "",
    insecure: options.Insecure = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return as soon as the run trains; it goes on by itself, see 'ringtune logs'."),
    ] = False,
    coordinator_wait_s: Annotated[
        float,
        typer.Option(
            "--coordinator-wait",
            metavar="SECONDS",
            min=0,
            help="How long to wait for a coordinator that crashed or can't be reached, and then to go on.",
        ),
    ] = 300.0,
    web: options.Web = "",
    web_token: options.WebToken = None,
    log: Annotated[
        str, typer.Option("--log", metavar="tensorboard", help="Write the metrics to DIR/tensorboard, too.")
    ] = "",
    json: options.Json = False,
) -> None:
    """Train a job; its adapter or model, metrics, report and trace go to a folder.

    Ctrl-C once ends the run after the turns that are under way, with a checkpoint; twice at once. SIGTERM and a closed
    terminal (SIGHUP) count as Ctrl-C: all end with exit code 130. The run can be resumed.
    """
    from coordinator.api.arguments import changed_job
    from coordinator.api.output import make_progress
    from coordinator.api.predict import show_sample
    from coordinator.api.train import follow_run, make_submission, submit_and_leave
    from coordinator.client.run_folder import held_for_resume
    from coordinator.planner.given_plan import read_given_plan
    from coordinator.planner.limits import read_choices
    from ringtune.errors import UsageError

    if bool(local) == bool(coordinator):
        raise UsageError("give one of --local N and --coordinator HOST:PORT")
    if nodes and local:
        raise UsageError("--nodes is for --coordinator; --local says how many nodes there are")
    if replace and resume:
        raise UsageError("--replace puts a run aside and --resume goes on with it; give one of them")
    if plan and (microbatches or wire_dtypes):
        raise UsageError("a plan has its micro-batches and wire dtype; leave out --microbatches and --wire")
    if resume and (plan or microbatches or wire_dtypes):
        raise UsageError("--resume goes on with the run's own plan; leave out --plan, --microbatches and --wire")
    check_extras(web=web, local=local, log=log, detach=detach)
    if out is None and (local or resume or not detach):
        raise UsageError("give --out DIR, the folder for the run's files")
    wanted = changed_job(job, change or [])
    choices = read_choices(microbatches, wire_dtypes, batch_size=wanted.train.batch_size)
    held = held_for_resume(out) if resume and out is not None and not detach else contextlib.nullcontext()
    with held:
        submission, notes = make_submission(
            wanted,
            out,
            local=local,
            coordinator=coordinator,
            insecure=insecure,
            nodes=nodes,
            join_s=join_s,
            replace=replace,
            resume=resume,
            profile=profile,
            plan=read_given_plan(plan) if plan else None,
            choices=choices,
            coordinator_wait_s=coordinator_wait_s,
        )
        submission = dataclasses.replace(submission, web=web, web_token=web_token, log=log)
        if detach:
            submit_and_leave(submission, out, sys.argv[1:], as_json=json)
        elif out is not None:
            follow_run(
                submission,
                out,
                notes,
                how_to_resume=lambda step: how_to_resume(step, _typed(sys.argv[1:], job, out, local)),
                show=lambda: make_progress(as_json=json),
                after=lambda progress: show_sample(submission.request.job, out, progress),
            )


def check_extras(*, web: str, local: int, log: str, detach: bool) -> None:
    """Refuse a page or a log that can't be had, before anything is started.

    Raises:
        UsageError: a page of a coordinator's run, an unknown log, or libraries that are missing.
    """
    from coordinator.client.run_files import require_tensorboard
    from ringtune.errors import UsageError

    if web:
        from coordinator.web.server import require_web

        if not local:
            raise UsageError("--web is for --local; start the coordinator with 'ringtune coordinator --web HOST:PORT'")
        require_web()
    if log:
        require_tensorboard(log)
        if detach and not local:
            raise UsageError("--log is written by the command that follows the run; leave out --detach")


def how_to_resume(step: int, words: Sequence[str]) -> str:
    """Write the line that tells how to resume a run.

    Args:
        step: of its newest checkpoint.
        words: of the 'ringtune train' that began it.
    """
    from ringtune.hints import hint

    more = () if "--resume" in words else ("--resume",)
    kept = [word for word in _without(words, _OF_THE_PLAN) if word != "--replace"]
    return f"saved up to step {step}; go on with: {hint(*kept, *more)}"


def _without(words: Sequence[str], options: Collection[str]) -> Iterator[str]:
    """Yield words without some options and their values, which stand behind a space or ``=``."""
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word in options:
            is_value = True
        elif word.partition("=")[0] not in options:
            yield word


def _typed(words: Sequence[str], job: Path, out: Path, local: int) -> Sequence[str]:
    """The words of ``ringtune train`` that were typed, or would have been if another command trains, as the demo."""
    return words if "train" in words else ("train", str(job), "--local", str(local), "--out", str(out))
