"""Show the members of a coordinator again and again: a table that is redrawn in place, or lines of JSON."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from coordinator.screen.listing.node_list import node_lines, node_table
from ringtune.errors import InterruptedRunError
from ringtune.texts import printable
from ringtune.v1 import control_pb2

INTERVAL_S: Final = 1.0
Ask = Callable[[], Sequence[control_pb2.NodeEntry]]


def watch_nodes(
    ask: Ask,
    coordinator: str,
    *,
    as_json: bool,
    console: Console | None = None,
    sleep: Callable[[float], object] = time.sleep,
    times: Iterable[object] = itertools.repeat(None),
) -> None:
    """Ask for the members once a second, and show them.

    Args:
        ask: lists the members.
        coordinator: ``host:port`` of theirs.
        as_json: print a line for each, in place of a table.
        console: where the table is drawn; the standard output if not given.
        sleep: waits so many seconds.
        times: has an entry for each time that they are shown.

    Raises:
        InterruptedRunError: Ctrl-C.
        RingTuneError: the coordinator does not answer any more.
    """
    try:
        if as_json:
            for _ in times:
                for line in node_lines(ask()):
                    typer.echo(line)
                sleep(INTERVAL_S)
            return
        with Live(console=console or Console(), auto_refresh=False) as live:
            for _ in times:
                live.update(Text(printable("\n".join(node_table(ask(), coordinator)))), refresh=True)
                sleep(INTERVAL_S)
    except KeyboardInterrupt as error:
        raise InterruptedRunError("stopped by Ctrl-C") from error
