"""A run, by its folder: what it measured, what it left, and how it goes on."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Final

from coordinator.api.evaluate import evaluate
from coordinator.api.following import Left, follow, state_of, stop
from coordinator.api.loss_plot import Plot, draw_losses
from coordinator.api.predict import Rows, predict
from coordinator.api.table import Metrics, Table
from coordinator.records.step_lines import is_step
from coordinator.run_folder.metrics_lines import read_metrics
from coordinator.run_folder.saved_run import read_json, read_run
from ringtune.errors import InvalidInputError, UsageError
from ringtune.jobs.job import Job, load_job
from ringtune.models.result_files import ADAPTER_FOLDER, MODEL_FOLDER
from ringtune.schedule.plan import Plan

_PLAN, _JOB = "plan.json", "job.toml"
STOP_S: Final = 300.0


class Run:
    """A handle to the folder of a run; what it tells is read from there each time.

    ``train`` returns one, and ``Run("my-run")`` is one of any run that has a folder, whoever trained it.

    Args:
        folder: of the run: the ``out`` of ``train``, the ``--out`` of ``ringtune train``.
        insecure: whether its coordinator may be on another machine, without encryption.

    Attributes:
        folder: where the run's files are.

    Raises:
        UsageError: there is no such folder.
    """

    def __init__(self, folder: str | PathLike[str], *, insecure: bool = False) -> None:
        self.folder = Path(folder)
        self._left = Left(self.folder, insecure)
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder} is no folder; give the out= of a train(), or an --out of 'ringtune train'")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def job(self) -> Job:
        """What was asked, with all defaults."""
        return load_job(self._needed(_JOB))

    @property
    def plan(self) -> Plan:
        """What was decided: slices, schedule, owners in order.

        Raises:
            InvalidInputError: there is no plan yet.
        """
        return Plan.from_json(read_json(self._needed(_PLAN)))

    @property
    def report(self) -> dict[str, Any]:
        """The totals of a run that is done; empty before."""
        return self._left.report

    @property
    def metrics(self) -> Metrics:
        """The training steps so far as a table; ``metrics.of("evaluation")`` and others have what else was noted."""
        lines = read_metrics(self.folder)
        return Metrics([line for line in lines if is_step(line)], [line for line in lines if not is_step(line)])

    @property
    def adapter(self) -> Path:
        """The folder of the adapter, as AdapterHub loads it.

        Raises:
            InvalidInputError: the run has not left one yet; says how to go on.
            UsageError: its result is something else; names it.
        """
        run = read_run(self.folder)
        if run.users:
            raise UsageError(f"each user of this run has an adapter; they are in {run.saved}: {', '.join(run.users)}")
        if run.result.folder != ADAPTER_FOLDER:
            raise UsageError("all parameters trained in this run, so it left a whole model; see its 'model'")
        return run.saved

    @property
    def model(self) -> Path:
        """The folder of the model, of a run in which all parameters trained.

        Raises:
            InvalidInputError: the run has not left one yet; says how to go on.
            UsageError: its result is an adapter.
        """
        run = read_run(self.folder)
        if run.users or run.result.folder != MODEL_FOLDER:
            raise UsageError("this run trained adapters, the base model is as it was; see its 'adapter'")
        return run.saved

    @property
    def state(self) -> str:
        """``running``; ``done``, with a report; or ``stopped``: it may have checkpoints to go on from."""
        return state_of(self._left)

    def plot(self) -> Plot:
        """Draw the loss over the steps, with the steps from which more blocks train; needs matplotlib.

        Raises:
            RingTuneError: matplotlib is not installed.
            UsageError: there is no step yet.
        """
        metrics = self.metrics
        return draw_losses(metrics, metrics.of("evaluation"), title=self.folder.name)

    def evaluate(self, data: str | PathLike[str] | None = None, **options: Any) -> dict[str, Any]:
        """Evaluate what the run has trained; see ``ringtune.evaluate``."""
        return evaluate(self, data, **options)

    def predict(self, data: Rows, **options: Any) -> Table:
        """Predict for rows with what the run has trained, as ``ringtune predict`` does: in a process of its own.

        Example: ``run.predict(["a fine film"])["predicted"]``.

        Args:
            data: a file with the columns that the job names, rows as mappings, or texts where the job has one column of
                them; targets may be missing. They stay on this machine.
            options: ``columns``, names of columns by key of ``[data]``, ``{"text": "review"}``, where the file has
                others than the job; ``missing``, ``skip`` or ``error`` for rows with an empty cell; ``save``, a .csv or
                .jsonl to write; ``model``, folder of the base model on this machine; ``user``, whose adapters; and of
                a language model ``max_new_tokens`` (50), ``temperature`` (0 = always the likeliest token) and ``seed``.

        Returns:
            The rows, each with its own columns, ``predicted``, and what else the task says: ``probabilities`` of
            classes, the ``score`` of an answer with its place.

        Raises:
            RingTuneError: whatever it failed with, as the command.
        """
        return predict(self, data, **options)

    def wait(self, *, progress: bool = True) -> Run:
        """Wait for the end of a run that goes on by itself; Ctrl-C ends the waiting, not the run.

        Args:
            progress: whether it is shown.

        Returns:
            The run, which is done.

        Raises:
            RingTuneError: whatever the run ended with; ``InterruptedRunError`` if it was stopped.
        """
        follow(self._left, progress=progress)
        return self

    def stop(self, *, now: bool = False, wait_s: float = STOP_S) -> Run:
        """Stop a run after the turns that are under way, with a checkpoint, and wait until it is over.

        Args:
            now: at once, without a further checkpoint.
            wait_s: how long to wait for its end, in seconds.

        Returns:
            The run; ``train`` with ``resume=True`` goes on with it.

        Raises:
            UsageError: it is not under way.
            DeadlineError: it goes on for longer.
        """
        stop(self._left, now=now, wait_s=wait_s)
        return self

    def _needed(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise InvalidInputError(f"{self.folder} has no {name} yet; its run has not got so far, wait for it")
        return path
