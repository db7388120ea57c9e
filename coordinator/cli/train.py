"""``ringtune train``: run a job on local processes or on a coordinator."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ringtune import options

_OF_THE_PLAN = ("--plan", "--microbatches", "--wire")
"""Options that a resumed run does not take: it has its plan."""


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
    replace: options.Replace = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume the run in the folder from its newest checkpoint; a finished one with more train.rounds.",
        ),
    ] = False,
    profile: options.ProfileFile = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Carry out this plan of 'ringtune plan'.")] = None,
    microbatches: options.MicrobatchChoices = "",
    wire_dtypes: options.WireChoices = "",
    insecure: options.Insecure = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the run trains; it continues by itself, see 'ringtune logs'.")
    ] = False,
    coordinator_wait_s: Annotated[
        float,
        typer.Option(
            "--coordinator-wait",
            metavar="SECONDS",
            min=0,
            help="How long to wait for a coordinator that crashed or can't be reached.",
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

    Ctrl-C once ends the run after the granted turns, with a checkpoint; twice at once. SIGTERM and a closed terminal
    (SIGHUP) count as Ctrl-C: all end with exit code 130. The run can be resumed.
    """
    import contextlib
    import dataclasses
    import tempfile

    from coordinator.api import train as api
    from coordinator.api.arguments import parse_changes, typed
    from coordinator.api.output import make_progress
    from coordinator.client.detached_runs import lines_of_detached
    from ringtune.errors import UsageError

    if replace and resume:
        raise UsageError("--replace moves a run's files away and --resume resumes it; give one of them")
    if out is None and (local or resume or not detach):
        raise UsageError("give --out DIR, the folder for the run's files")
    # of a detached run only the record of where it is driven is written here
    with tempfile.TemporaryDirectory(prefix="ringtune-") if out is None else contextlib.nullcontext(out) as given:
        folder = Path(given)
        face = api.RunDisplay(
            show=lambda: make_progress(as_json=json),
            resume_hint=lambda step: resume_hint(step, _typed(sys.argv[1:], job, folder, local)),
            say=str if json else options.echo,
            words=sys.argv[1:],
        )
        run = typed(api.train)(
            job,
            local=local,
            coordinator=coordinator,
            out=folder,
            wait=not detach,
            progress=face,
            resume=resume,
            replace=replace,
            plan=plan,
            profile=profile,
            microbatches=microbatches,
            wire=wire_dtypes,
            nodes=nodes,
            join_s=join_s,
            insecure=insecure,
            coordinator_wait_s=coordinator_wait_s,
            web=web,
            web_token=web_token,
            log=log,
            **parse_changes(change or []),
        )
        if not detach:
            return
        place = run.place
    told = {"event": "detached", **dataclasses.asdict(place), "out": str(out) if out else ""}
    options.show(told, lines_of_detached(place, out), as_json=json)


def resume_hint(step: int, words: Sequence[str]) -> str:
    """Return the line with the command that resumes a run.

    ``step`` is that of its newest checkpoint, ``words`` the 'ringtune train' that began it.
    """
    from ringtune.hints import hint

    more = () if "--resume" in words else ("--resume",)
    kept = [word for word in _without(words, _OF_THE_PLAN) if word != "--replace"]
    return f"saved up to step {step}; resume with: {hint(*kept, *more)}"


def _without(words: Sequence[str], options: Collection[str]) -> Iterator[str]:
    """Yield words without some options and their values, which follow after a space or ``=``."""
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word in options:
            is_value = True
        elif word.partition("=")[0] not in options:
            yield word


def _typed(words: Sequence[str], job: Path, out: Path, local: int) -> Sequence[str]:
    """Return the typed words of ``ringtune train``, or equivalent ones if another command trains, as the demo."""
    return words if "train" in words else ("train", str(job), "--local", str(local), "--out", str(out))
