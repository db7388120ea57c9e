"""``ringtune coordinator``: listen for nodes and jobs."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
# Short: the kernel may hand a signal to any thread, and then nothing wakes this one, which runs the handlers.
_WAIT_S = 0.5


@app.command()
def coordinator(
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen at; port 0 = any.")
    ] = "127.0.0.1:7070",
    lease_s: Annotated[
        float, typer.Option("--lease", min=0.1, help="A node that is silent for so long is lost, in seconds.")
    ] = 10.0,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Listen for nodes and jobs until stopped with Ctrl-C or SIGTERM."""
    from coordinator.screen.join_hints import reachable_address
    from coordinator.screen.output import make_progress
    from coordinator.server.server import CoordinatorServer
    from ringtune.rpc.addresses import own_host

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with CoordinatorServer(bind, lease_s=lease_s, insecure=insecure) as server:
        progress = make_progress(as_json=json, live=False)
        progress.listening(server.address, reachable_address(server.address, own_host()))
        while not ended.wait(_WAIT_S):
            pass
