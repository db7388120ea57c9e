"""Tables redrawn in place on a terminal: progress of a run and of a sweep, and members of a coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self, TypeVar

from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.run.run_text import STEP_KIND, LastStep, figure, trained_at
from coordinator.screen.listing import node_table, nodes_json
from coordinator.screen.progress import LineProgress, run_lines, trained_text
from ringtune import options
from ringtune.errors import InterruptedRunError
from ringtune.quantities import format_bytes
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Units
from ringtune.texts import inert, printable
from ringtune.v1 import control_pb2

Cell = TypeVar("Cell")
_FIRST_PHASE = "starting"


class LiveProgress(LineProgress):
    """Shows a run on a terminal; ``console`` None is the standard output."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[numbers]}", markup=False),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(_FIRST_PHASE, total=None, numbers="")
        self._plan: Plan | None = None
        self._memory_bytes: Mapping[str, int] = {}
        self._initiator = ""
        self._phase = _FIRST_PHASE
        self._last = LastStep()
        self._trained = Units(0)
        self._live = Live(console=self._console, refresh_per_second=5, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop drawing, unless the end is drawn already."""
        self._end("stopped" if any(error) else "done")

    def _end(self, phase: str) -> None:
        """Draw the run for the last time; later notes are below it."""
        if self._live.is_started:
            self.state(phase)
            self._bar.stop_task(self._task)
            self._live.stop()

    def state(self, state: str) -> None:
        """Show the phase as the title of the bar."""
        self._phase = printable(state)
        self._bar.update(self._task, description=self._phase)

    def plan(self, plan: Plan, memory_bytes: Mapping[str, int]) -> None:
        """Show a line for each node from now on."""
        self._plan, self._memory_bytes = plan, memory_bytes
        self._trained = Units(plan.course.num_blocks)
        self._bar.update(self._task, total=plan.course.num_steps)
        for line in run_lines(plan):
            self.note(line)

    def step(self, step: Mapping[str, Any]) -> None:
        """Move the bar and show the loss of the last step; other items are titles of the bar."""
        self._initiator = str(step["initiator"])
        self._bar.update(self._task, description=self._phase if step["kind"] == STEP_KIND else step["kind"])
        if not self._last.take(step):
            return
        if self._plan:
            self._trained = trained_at(self._plan.course, int(step["step"]) - 1, int(step["depth"]))
        numbers = (
            f"round {step['round']}  loss {figure(step['loss'])}  {trained_text(step['depth'], step.get('trains', ''))}"
        )
        self._bar.update(self._task, completed=int(step["step"]), numbers=numbers)

    def report(self, report: Mapping[str, Any]) -> None:
        """Draw the table for the last time, then the totals below it."""
        self._end("done")
        super().report(report)

    def note(self, text: str) -> None:
        """Print a line above the bar, or below it after the end."""
        self._console.print(printable(text), highlight=False, markup=False)

    def _render(self) -> RenderableType:
        if self._plan is None:
            return self._bar
        table = Table(box=None, padding=(0, 2))
        for title in ("node", "blocks", "trains", "rows", "memory"):
            table.add_column(title)
        for node in self._plan.nodes:
            table.add_row(*self._row(self._plan, node))
        return Group(table, self._bar)

    def _row(self, plan: Plan, node: str) -> tuple[RenderableType, ...]:
        piece, owner = plan.slice_of(node), plan.owner(node)
        trains = len(self._trained.within(piece.start, piece.stop).blocks)
        return (
            Text(node, style="bold" if node == self._initiator else ""),
            f"[{piece.start}, {piece.stop})" if piece.num_blocks else "-",
            f"{trains} of {piece.num_blocks}",
            str(owner.train_rows) if owner else "-",
            format_bytes(self._memory_bytes[node]) if node in self._memory_bytes else "",
        )


@contextmanager
def shown_cells(cells: Iterable[Cell], total: int, console: Console | None = None) -> Iterator[Iterable[Cell]]:
    """Show a bar of the finished cells of a sweep and the remaining time, on a terminal only.

    ``total`` is the final number of cells; ``console`` None is the standard error.
    """
    console = console or Console(stderr=True)
    columns = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TextColumn("cells"), bars.TimeRemainingColumn())
    is_shown = console.is_interactive and console.file.isatty()  # FORCE_COLOR makes no file a terminal
    with bars.Progress(*columns, console=console, transient=True, disable=not is_shown) as shown:
        yield shown.track(cells, total=total)


INTERVAL_S: Final = 1.0
NodeSource = Callable[[], Sequence[control_pb2.NodeEntry]]


def watch_nodes(ask: NodeSource, coordinator: str, *, as_json: bool, console: Console | None = None) -> None:
    """List the members once a second, until Ctrl-C.

    ``ask`` lists the members of ``coordinator`` (``host:port``). ``as_json``: a line for each member, no table.

    Raises:
        InterruptedRunError: Ctrl-C.
        RingTuneError: the coordinator does not answer.
    """
    try:
        if as_json:
            while True:
                options.show(nodes_json(ask()), (), as_json=True)
                time.sleep(INTERVAL_S)
        with Live(console=console or Console(), auto_refresh=False) as live:
            while True:
                live.update(Text(inert("\n".join(node_table(ask(), coordinator)))), refresh=True)
                time.sleep(INTERVAL_S)
    except KeyboardInterrupt as error:
        raise InterruptedRunError("stopped by Ctrl-C") from error
