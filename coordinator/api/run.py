"""A handle to a run by its folder: state, metrics, results, evaluation, and a plot of its loss.

::

    a local run        a process of its own writes the folder; its coordinator answers while it lives
    any other run      a coordinator stores it: its events are followed, its files fetched at the end
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from coordinator.api.arguments import RunLike, folder_of, for_python
from coordinator.api.output import Metrics, Plot, Table, choose_progress
from coordinator.api.predict import Rows, predict
from coordinator.client.connection import Connection
from coordinator.client.detached_runs import WHO, fetch_run, kept_record, stop_run
from coordinator.client.follow import show_events
from coordinator.client.run_folder import LOG, read_metrics
from coordinator.client.saved_run import (
    PLACE,
    RunLocation,
    is_running,
    read_place,
    read_report,
    read_run,
    read_run_file,
    with_data,
)
from coordinator.run.run_text import STEP_KIND, is_step
from coordinator.screen.progress import DECISIONS, Progress
from coordinator.server.restart import last_of
from ringtune.errors import ConnectionFailedError, DeadlineError, InvalidInputError, RingTuneError, UsageError
from ringtune.job.job import Job, load_job
from ringtune.machine.process import exit_error
from ringtune.models.result_files import ADAPTER_FOLDER, MODEL_FOLDER
from ringtune.schedule.plan import Plan
from ringtune.transport.credentials import process_credentials, using_credentials

if TYPE_CHECKING:
    import subprocess

_INCHES: Final = (8.0, 4.5)
_SMOOTHED: Final = 10


def draw_losses(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], *, title: str) -> Plot:
    """Draw the loss of each step, its moving mean, evaluations, and a line wherever the depth grows.

    ``steps`` have ``step``, ``loss`` and ``depth``, ``evaluations`` have ``step`` and ``loss``.
    """
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=_INCHES, layout="constrained")
    except ModuleNotFoundError as error:
        raise RingTuneError("plot() needs the package 'matplotlib'; pip install matplotlib") from error
    shown = [row for row in steps if row.get("loss") is not None]
    evaluations = [row for row in evaluations if row.get("loss") is not None]
    if not shown:
        raise UsageError("there is nothing to plot: the run has no step yet")
    plot = figure.subplots()
    numbers, losses = [row["step"] for row in shown], [row["loss"] for row in shown]
    plot.plot(numbers, losses, color="tab:blue", alpha=0.35, linewidth=1.0, label="loss of a step")
    plot.plot(numbers, smoothed(losses), color="tab:blue", label=f"mean of the last {_SMOOTHED} steps")
    if evaluations:
        plot.plot(
            [row["step"] for row in evaluations], [row["loss"] for row in evaluations], "o", color="tab:red",
            label="evaluation",
        )  # fmt: skip
    for step, depth in unfreezings(shown):
        plot.axvline(step, color="grey", linestyle=":", linewidth=1.0)
        plot.annotate(f"depth {depth}", (step, 1.0), xycoords=("data", "axes fraction"), rotation=90, fontsize="small",
                      va="top", ha="right", color="grey")  # fmt: skip
    plot.set_title(title)
    plot.set_xlabel("step")
    plot.set_ylabel("loss")
    plot.xaxis.set_major_locator(importlib.import_module("matplotlib.ticker").MaxNLocator(integer=True))
    plot.legend()
    return Plot(figure, _summary(title, shown, evaluations))


def _summary(title: str, steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> str:
    first, last = steps[0], steps[-1]
    mean = smoothed([row["loss"] for row in steps])[-1]
    lines = [
        f"{title}: loss {first['loss']:.4f} at step {first['step']}, {last['loss']:.4f} at step {last['step']}, "
        f"mean of the last {min(_SMOOTHED, len(steps))} steps {mean:.4f}"
    ]
    if evaluations:
        told = [f"{row['loss']:.4f} at step {row['step']}" for row in evaluations]
        best = min(range(len(told)), key=lambda at: float(evaluations[at]["loss"]))
        more = f", the lowest {told[best]}" if best != len(told) - 1 else ""
        lines.append(f"evaluation: loss {told[-1]}{more}")
    if grown := unfreezings(steps):
        lines.append("more blocks train: " + ", ".join(f"depth {depth} from step {step}" for step, depth in grown))
    return "\n".join(lines)


def unfreezings(steps: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return (step, depth) of each step that trains more blocks than all before it, without the first step."""
    pairs: list[tuple[int, int]] = []
    deepest = steps[0].get("depth", 0) if steps else 0
    for row in steps:
        if row.get("depth", 0) > deepest:
            deepest = row["depth"]
            pairs.append((row["step"], deepest))
    return pairs


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return for each loss the mean of the last ten losses up to it."""
    return [fmean(losses[max(0, index + 1 - _SMOOTHED) : index + 1]) for index in range(len(losses))]


DONE, RUNNING, STOPPED = "done", "running", "stopped"
_POLL_S: Final = 0.2
_UNKNOWN_CODE: Final = 1


@for_python
def evaluate(
    run: RunLike,
    data: str | PathLike[str] | None = None,
    *,
    coordinator: str = "",
    model: str | PathLike[str] | None = None,
    columns: Mapping[str, str] | None = None,
    missing: str = "",
    user: str = "",
    join_s: float = 60.0,
    insecure: bool = False,
    tell: Callable[[str], object] = str,
) -> dict[str, Any]:
    """Evaluate the adapter or model of a run as ``ringtune eval`` does.

    Args:
        run: a run, or its folder.
        data: rows, which stay on this machine. None = ``data.eval`` of the job, or with a coordinator the evaluation
            rows of its nodes.
        coordinator: ``host:port``: evaluate on its nodes; empty = in one process on this machine.
        model: folder of the base model on this machine; None = the job's ``model.path``.
        columns: names of columns by key of ``[data]``, if the file has others than the job.
        missing: ``skip`` leaves rows with an empty cell out, ``error`` refuses them; empty = as in the job.
        user: of the adapters, if each user has their own.
        join_s: seconds for the started process to join.
        insecure: whether the coordinator may be on another machine without encryption.
        tell: gets a line with result, rows and nodes of the evaluation.

    Returns:
        ``count``, ``loss``, ``accuracy`` and further figures of the task.

    Raises:
        RingTuneError: the error of the evaluation.
    """
    from coordinator.api.evaluation import evaluate_alone, evaluate_on_ring, rows_to_evaluate
    from coordinator.client.saved_run import adapter_of, require_user

    folder = folder_of(run)
    saved = with_data(read_run(folder), columns or {}, missing)
    require_user(saved, user)
    rows = rows_to_evaluate(Path(data) if data is not None else None, saved.job.data, on_ring=bool(coordinator))
    base = Path(model) if model is not None else None
    where = f"the nodes of {coordinator}" if coordinator else "this machine"
    of_user = f", user {user}," if user else ""
    theirs = "the rows of the nodes" if coordinator else f"the held-out rows of {saved.job.data.train}"
    tell(f"evaluating {folder}{of_user} on {rows or theirs}, with {where} ...")
    with adapter_of(saved, user) as chosen:
        if not coordinator:
            return evaluate_alone(chosen, rows, join_s=join_s, model=base)
        return evaluate_on_ring(chosen, rows, coordinator, join_s=join_s, model=base, insecure=insecure)


class Run:
    """A handle to the folder of a run, which is read at each access.

    ``train`` returns one; ``Run("my-run")`` is one of any run with a folder, from any machine.

    Args:
        folder: ``out`` of ``train``, ``--out`` of ``ringtune train``.
        insecure: whether its coordinator may be on another machine without encryption.
        process: that trains, if this process has started it.

    Raises:
        UsageError: there is no such folder.
    """

    def __init__(
        self, folder: str | PathLike[str], *, insecure: bool = False, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.folder, self._insecure, self._process = Path(folder), insecure, process
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder} is no folder; give the out= of a train(), or an --out of 'ringtune train'")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def job(self) -> Job:
        """The submitted job, with all defaults."""
        return load_job(self._needed("job.toml"))

    @property
    def plan(self) -> Plan:
        """The plan: slices, schedule, order of owners.

        Raises ``InvalidInputError``: there is no plan yet.
        """
        return Plan.from_json(read_run_file(self._needed("plan.json")))

    @property
    def report(self) -> dict[str, Any]:
        """The totals of a finished run; empty before."""
        return read_report(self.folder)

    @property
    def metrics(self) -> Metrics:
        """The training steps so far; ``metrics.of("evaluation")`` and others are rows of other kinds."""
        lines = read_metrics(self.folder)
        return Metrics([line for line in lines if is_step(line)], [line for line in lines if not is_step(line)])

    @property
    def adapter(self) -> Path:
        """The folder of the adapter, in AdapterHub's format.

        Raises:
            InvalidInputError: there is none yet; says how to resume the run.
            UsageError: the result is something else; names it.
        """
        run = read_run(self.folder)
        if run.users:
            raise UsageError(f"each user of this run has an adapter; they are in {run.saved}: {', '.join(run.users)}")
        if run.result.folder != ADAPTER_FOLDER:
            raise UsageError("all parameters trained in this run, so it left a whole model; see its 'model'")
        return run.saved

    @property
    def model(self) -> Path:
        """The folder of the model, if all parameters trained.

        Raises:
            InvalidInputError: there is none yet; says how to resume the run.
            UsageError: the result is an adapter.
        """
        run = read_run(self.folder)
        if run.users or run.result.folder != MODEL_FOLDER:
            raise UsageError("this run trained adapters, the base model is as it was; see its 'adapter'")
        return run.saved

    @property
    def state(self) -> str:
        """``running``; ``done``, with a report; or ``stopped``, perhaps with checkpoints to resume from.

        Raises ``RingTuneError``: the run's coordinator does not answer.
        """
        if not (self.folder / PLACE).is_file():
            return DONE if self.report else STOPPED
        place = self.place
        if self._is_done(place):
            return DONE
        if place.is_local and not is_running(place.pid):
            return STOPPED
        with self._connected(place) as client:
            if client is None:
                return STOPPED
            status = client.status().run
            return RUNNING if status.run_id == place.run_id and not status.is_over else STOPPED

    @property
    def place(self) -> RunLocation:
        """The process or coordinator that drives the run.

        Raises ``UsageError``: the folder has no record of it.
        """
        place = read_place(self.folder)
        if place is None:
            raise UsageError(f"{self.folder} has no record of where its run is driven; it has not begun, or is old")
        return place

    def plot(self) -> Plot:
        """Draw the loss over the steps, with the steps from which more blocks train; needs matplotlib.

        Raises:
            RingTuneError: matplotlib is not installed.
            UsageError: there is no step yet.
        """
        metrics = self.metrics
        return draw_losses(metrics, metrics.of("evaluation"), title=self.folder.name)

    def evaluate(self, data: str | PathLike[str] | None = None, **options: Any) -> dict[str, Any]:
        """Evaluate the result of the run; see ``ringtune.evaluate``."""
        return evaluate(self, data, **options)

    def predict(self, data: Rows, **options: Any) -> Table:
        """Predict for rows with the result of the run, in a process of its own, as ``ringtune predict`` does.

        Example: ``run.predict(["a fine film"])["predicted"]``.

        Args:
            data: a file with the job's columns, rows as mappings, or texts if the job has one column of them; targets
                may be missing. Rows stay on this machine.
            options: ``columns``, names of columns by key of ``[data]``, ``{"text": "review"}``, if the file has others
                than the job; ``missing``, ``skip`` or ``error`` for rows with an empty cell; ``save``, a .csv or .jsonl
                to write; ``model``, folder of the base model on this machine; ``user``, one of several; and for a
                language model ``max_new_tokens`` (50), ``temperature`` (0 = the likeliest token) and ``seed``.

        Returns:
            The rows, each with its own columns, ``predicted``, and further fields of the task: ``probabilities`` of
                classes, ``score`` and position of an answer.

        Raises:
            RingTuneError: as the command.
        """
        return predict(self, data, **options)

    def wait(self, *, progress: bool = True) -> Run:
        """Wait for the end of a detached run, and return it; Ctrl-C ends the waiting, not the run.

        Raises ``RingTuneError``: the error of the run; ``InterruptedRunError`` if it was stopped.
        """
        if not (self.folder / PLACE).is_file() and self.report:
            return self
        place = self.place
        if not self._is_done(place):
            with choose_progress(progress) as shown:
                (self._follow_process if place.is_local else self._follow_stored)(place, shown)
        return self

    def stop(self, *, now: bool = False, wait_s: float = 300.0) -> Run:
        """Stop this run after the granted turns, with a checkpoint, and wait until it is over; return the run.

        With ``now`` at once, without a further checkpoint; waits ``wait_s`` seconds at most.

        Raises:
            UsageError: it is not running.
            DeadlineError: it has not ended in time.
        """
        place, deadline_s = self.place, time.monotonic() + wait_s
        with self._connected(place) as client:
            if client is None:
                raise UsageError(f"the run in {self.folder} is not under way")
            stop_run(client, place.run_id, now=now, wait_s=wait_s)
            if not place.is_local:
                fetch_run(client, kept_record(client, place.run_id), self.folder, replace=True)
                return self
        while place.pid != os.getpid() and self._code(place) is None:
            if time.monotonic() >= deadline_s:
                raise DeadlineError(
                    f"process {place.pid} of the run in {self.folder} has not ended within {wait_s:g} s"
                )
            time.sleep(_POLL_S)
        return self

    def _is_done(self, place: RunLocation) -> bool:
        """Whether the report in the folder is of this run, and not of one that it resumes."""
        return self.report.get("run_id") == place.run_id

    def _follow_process(self, place: RunLocation, shown: Progress) -> None:
        """Show the new metrics of a local run until its process has ended."""
        plan = self.plan
        shown.plan(plan, {})
        num_shown, code = 0, None
        while code is None:
            code = self._code(place)
            lines = read_metrics(self.folder)
            for line in lines[num_shown:]:
                if line.get("kind") in (STEP_KIND, *DECISIONS):
                    shown.item({"num_steps": plan.course.num_steps, **line})
            num_shown = len(lines)
            if code is None:
                time.sleep(_POLL_S)
        if not self._is_done(place):
            raise exit_error(WHO, code or _UNKNOWN_CODE, log=self.folder / LOG)
        shown.report(self.report)

    def _code(self, place: RunLocation) -> int | None:
        """Exit code of a local run's process; None while it runs; ``_UNKNOWN_CODE`` if another process started it."""
        if self._process is not None:
            return self._process.poll()
        return None if is_running(place.pid) else _UNKNOWN_CODE

    def _follow_stored(self, place: RunLocation, shown: Progress) -> None:
        with self._connected(place) as client:
            if client is None:
                raise ConnectionFailedError(
                    f"coordinator {place.coordinator} does not answer; its run may continue: wait again"
                )
            run_id = last_of(client.records(), place.run_id)
            outcome = show_events(client, run_id, follow=True, progress=shown)
            fetch_run(client, kept_record(client, run_id), self.folder, replace=True)
        if outcome is not None:
            outcome.require_end()

    @contextmanager
    def _connected(self, place: RunLocation) -> Iterator[Connection | None]:
        """Connect to the coordinator of the run; yield None if a local one has ended."""
        with using_credentials(None if place.is_local else process_credentials()):
            try:
                client = Connection(place.coordinator, insecure=None if place.is_local else self._insecure)
            except ConnectionFailedError:
                if not place.is_local:
                    raise
                yield None
                return
            with client:
                yield client

    def _needed(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise InvalidInputError(f"{self.folder} has no {name} yet; its run has not written it so far, wait for it")
        return path
