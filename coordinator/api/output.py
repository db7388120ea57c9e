"""Progress for a terminal, a notebook or a file; tables of rows and plots that functions return."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO, overload

from coordinator.run.run_text import STEP_KIND
from coordinator.screen.progress import JsonProgress, PlainProgress, Progress, evaluating_line, step_line
from coordinator.screen.tables import table_lines
from ringtune.errors import RingTuneError, UsageError
from ringtune.storage.durable import require_own, write_durably
from ringtune.texts import counted, printable


def make_progress(*, as_json: bool, live: bool = True, stream: TextIO | None = None) -> Progress:
    """Make the progress for an output: JSON lines, a redrawn terminal, or plain lines.

    JSON lines with ``as_json``; a terminal is redrawn only if ``live``. Default of ``stream``: the standard output.
    """
    stream = sys.stdout if stream is None else stream
    if as_json:
        return JsonProgress(stream)
    if live and stream.isatty():
        from coordinator.screen.live_tables import LiveProgress

        return LiveProgress()
    return PlainProgress(stream)


def choose_progress(is_shown: bool) -> Progress:
    """Make the progress for the standard output; one that shows nothing unless ``is_shown``."""
    if not is_shown:
        return Progress()
    return NotebookProgress(sys.stdout) if is_notebook() else make_progress(as_json=False)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook; never loads IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookProgress(PlainProgress):
    """Shows a run below a notebook cell: one line of steps that is overwritten, other lines above it.

    A carriage return returns to the start of the line, as on a terminal. There is no HTML, so the saved notebook is
    readable everywhere.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._width = 0

    def step(self, step: Mapping[str, Any]) -> None:
        """Overwrite the line with the newest step, or with the progress of an evaluation."""
        if self._last.take(step):
            self._over(step_line(step))
        elif step["kind"] != STEP_KIND:
            self._over(evaluating_line(step))

    def note(self, text: str) -> None:
        """Write the text on a line of its own; the next step begins a new line."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._width = 0
        super().note(text)

    def _over(self, text: str) -> None:
        line = printable(text)
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = max(self._width, len(line))


_MAX_SHOWN: Final = 20
_HALF: Final = _MAX_SHOWN // 2


class Table(Sequence[Mapping[str, Any]]):
    """Rows in order: ``table["loss"]`` is a column, ``table[0]`` a row, ``table[-10:]`` a table of the last ten rows.

    Each row is a mapping from names of columns to values.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = tuple(rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, in the order of their first occurrence."""
        return tuple(dict.fromkeys(name for row in self._rows for name in row))

    @overload
    def __getitem__(self, key: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> Table: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> Mapping[str, Any] | Table | list[Any]:
        """Return a row by index, a column by name, or the rows of a slice.

        Raises:
            UsageError: no row has this column; names those that exist.
            IndexError: there is no such row.
        """
        if isinstance(key, str):
            if key not in self.columns:
                raise UsageError(f"there is no column {key!r}; there are {', '.join(self.columns) or 'no rows'}")
            return [row.get(key) for row in self._rows]
        return Table(self._rows[key]) if isinstance(key, slice) else self._rows[key]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._rows == other._rows

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if not self._rows:
            return "(no rows)"
        titles = self.columns
        cells = [[_cell(row.get(name)) for name in titles] for row in self._rows]
        if len(cells) > _MAX_SHOWN:
            cells = [*cells[:_HALF], ["..."] * len(titles), *cells[-_HALF:]]
        return "\n".join([*table_lines(titles, cells), f"({counted(len(self._rows), 'row')})"])

    def to_pandas(self) -> Any:
        """Return the rows as a ``pandas.DataFrame``.

        Raises ``RingTuneError``: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError as error:
            raise RingTuneError("to_pandas() needs the package 'pandas'; pip install pandas") from error
        return pandas.DataFrame([dict(row) for row in self._rows], columns=list(self.columns))


class Metrics(Table):
    """The training steps of a run, one row each, and separately its other rows.

    Args:
        others: rows of other kinds, such as ``evaluation`` and ``unfreeze``.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(rows)
        self._others = tuple(others)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the other rows, sorted."""
        return tuple(sorted({str(row["kind"]) for row in self._others}))

    def of(self, kind: str) -> Table:
        """Return the rows of another kind, e.g. ``run.metrics.of("evaluation")``; may be empty."""
        return Table([row for row in self._others if row["kind"] == kind])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_FORMATS: Final = (".png", ".svg")
_DPI: Final = 120
_DRAWN_BY: Final = "Plot of RingTune"
_HEAD_BYTES: Final = 4096


class Plot:
    """A plot that a notebook shows and ``save`` writes.

    Args:
        figure: a ``matplotlib.figure.Figure``, which may be changed.
    """

    def __init__(self, figure: Any, summary: str) -> None:
        self.figure = figure
        self._summary = summary

    def __repr__(self) -> str:
        return f"{self._summary}\n(a picture; save('loss.png') writes it, a notebook shows it)"

    def save(self, path: str | Path) -> Path:
        """Write ``.png`` or ``.svg``; only an earlier plot is replaced. Return the path.

        Raises:
            UsageError: the name has another ending, or something else is there.
            StorageError: it can't be written.
        """
        target = Path(path)
        require_plot_place(target)
        write_durably(target, self._drawn(target.suffix.lower()[1:]))
        return target

    def _repr_png_(self) -> bytes:
        """Return the picture for a notebook."""
        return self._drawn("png")

    def _drawn(self, ending: str) -> bytes:
        picture = io.BytesIO()
        # no date and no random names: the same run gives the same file
        with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": "ringtune", "svg.fonttype": "none"}):
            metadata = {"Date": None, "Creator": _DRAWN_BY} if ending == "svg" else {"Software": _DRAWN_BY}
            self.figure.savefig(picture, format=ending, dpi=_DPI, metadata=metadata)
        return picture.getvalue()


def require_plot_place(path: Path) -> None:
    """Refuse a path that has anything but an earlier plot, recognised by its program's name; raises ``UsageError``."""
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"the picture {path} has to end in {' or '.join(_FORMATS)}")
    require_own(path, "picture drawn by ringtune", _is_drawn_here)


def _is_drawn_here(path: Path) -> bool:
    with path.open("rb") as file:
        return _DRAWN_BY.encode() in file.read(_HEAD_BYTES)
