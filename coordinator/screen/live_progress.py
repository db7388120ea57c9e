"""Show progress on a terminal: a bar, the last loss, and a line for each node, redrawn in place."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.screen.progress import SpokenProgress
from coordinator.screen.progress_lines import figure
from ringtune.quantities import format_bytes
from ringtune.schedule.plan import Plan


class LiveProgress(SpokenProgress):
    """Shows a run on a terminal.

    Args:
        console: where; the standard output if not given.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[numbers]}"),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("starting", total=None, numbers="")
        self._plan: Plan | None = None
        self._memory_bytes: Mapping[str, int] = {}
        self._initiator = ""
        self._lowest = 0
        self._live = Live(console=self._console, refresh_per_second=5, get_renderable=self._render)

    def __enter__(self) -> Self:
        """Begin to draw on the terminal."""
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop drawing."""
        self._live.__exit__(kind, error, traceback)

    def state(self, state: str) -> None:
        """Show the phase as the title of the bar."""
        self._bar.update(self._task, description=state)

    def plan(self, plan: Plan, memory_bytes: Mapping[str, int]) -> None:
        """Show a line for each node from now on."""
        self._plan, self._memory_bytes = plan, memory_bytes
        self._lowest = plan.course.num_blocks
        self._bar.update(self._task, total=plan.course.num_steps)

    def step(self, step: Mapping[str, Any]) -> None:
        """Move the bar and show the step's loss."""
        self._initiator = str(step["initiator"])
        loss = figure(step["loss"])
        if step["kind"] == "train":
            if self._plan:
                self._lowest = self._plan.course.num_blocks - int(step["depth"])
            numbers = f"round {step['round']}  loss {loss}  depth {step['depth']}"
            self._bar.update(self._task, completed=int(step["step"]) + 1, numbers=numbers)
        else:
            self._bar.update(self._task, numbers=f"{step['kind']}  loss {loss}")

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, markup=False)

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
        trains = max(0, piece.stop - max(piece.start, self._lowest)) if piece.num_blocks else 0
        return (
            Text(node, style="bold" if node == self._initiator else ""),
            f"[{piece.start}, {piece.stop})" if piece.num_blocks else "-",
            f"{trains} of {piece.num_blocks}",
            str(owner.train_rows) if owner else "-",
            format_bytes(self._memory_bytes[node]) if node in self._memory_bytes else "",
        )
