"""``ringtune coordinator``: listen for nodes and jobs."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands import trusting
from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(trusting.init)
app.command()(trusting.token)


@app.callback(invoke_without_command=True)
def coordinator(
    context: typer.Context,
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen at; port 0 = any.")
    ] = "127.0.0.1:7070",
    lease_s: Annotated[
        float,
        typer.Option(
            "--lease", metavar="SECONDS", min=0.1, help="A node that is silent for so long is lost, in seconds."
        ),
    ] = 10.0,
    insecure: options.Insecure = False,
    trust: options.Trust = None,
    join_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            show_default=False,
            help="Port for those who join with a token. Default: the one after the port of --bind.",
        ),
    ] = 0,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where runs are kept until they are fetched. Default: in the user's state folder."
        ),
    ] = None,
    keep_days: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="How long a run stays after it was fetched.")
    ] = 7.0,
    keep_size: Annotated[
        str, typer.Option(metavar="SIZE", help="What all runs may take; one that nobody fetched stays all the same.")
    ] = "10GiB",
    keep_unfetched_days: Annotated[
        float | None,
        typer.Option(metavar="DAYS", min=0, help="How long a run stays that nobody fetches. Default: for ever."),
    ] = None,
    take_up_hours: Annotated[
        float,
        typer.Option(
            "--take-up",
            metavar="HOURS",
            min=0,
            help="Go on by itself with the run that a crash interrupted at most so long ago; 0 = never.",
        ),
    ] = 24.0,
    web: options.Web = "",
    web_token: options.WebToken = None,
    announce: Annotated[
        bool,
        typer.Option("--announce", help="Announce it on the local network though it listens for this machine only."),
    ] = False,
    no_announce: Annotated[
        bool, typer.Option("--no-announce", help="Don't announce it on the local network, though others can reach it.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Listen for nodes and jobs until stopped with Ctrl-C, SIGTERM or SIGHUP; a run is saved before.

    A run goes on when the command that submitted it is gone. Its files are kept here until they are fetched. After a
    crash of the coordinator, the next one with the same --state goes on with the run from its newest checkpoint.
    """
    if context.invoked_subcommand is not None:
        return
    from coordinator.commands.own_trust import authority_of, keeper_of
    from coordinator.kept_runs.kept_runs import KeptRuns, default_folder
    from coordinator.screen.join_hints import reachable_address
    from coordinator.screen.output import make_progress
    from coordinator.server.announcing import announcing
    from coordinator.server.coordinator import Coordinator
    from coordinator.server.ending import Ending
    from coordinator.server.server import CoordinatorServer
    from coordinator.web.at_coordinator import watch
    from coordinator.web.server import PageServer, require_web
    from ringtune.errors import InterruptedRunError, UsageError
    from ringtune.files.owned import keep_files_private
    from ringtune.quantities import parse_bytes
    from ringtune.rpc.addresses import own_host

    keep_files_private()
    if announce and no_announce:
        raise UsageError("--announce and --no-announce exclude each other; give one of them, or none")
    asked = announce or (False if no_announce else None)
    keep_bytes = parse_bytes(keep_size)
    if web:
        require_web()
    keeper = keeper_of(trust, insecure=insecure)
    after = contextlib.ExitStack()

    def keep_runs(coordinator: Coordinator, address: str) -> None:
        """Before the first call is answered: a run that begins is kept, and one that was interrupted taken up."""
        kept = KeptRuns(
            state or default_folder(address),
            keep_days=keep_days,
            keep_bytes=keep_bytes,
            keep_unfetched_days=math.inf if keep_unfetched_days is None else keep_unfetched_days,
        )
        coordinator.kept = after.enter_context(contextlib.closing(kept))
        coordinator.say = first_lines.append
        if web:  # before a run is taken up, so that the page sees all of it
            page = after.enter_context(PageServer(watch(coordinator), web, token_file=web_token))
            first_lines.extend(page.lines())
        coordinator.take_up(within_s=take_up_hours * 3600)

    first_lines: list[str] = []
    with (
        Ending() as ending,
        after,
        CoordinatorServer(
            bind, lease_s=lease_s, insecure=insecure, keeper=keeper, join_port=join_port, before=keep_runs
        ) as server,
    ):
        progress = make_progress(as_json=json, live=False)
        progress.listening(server.address, reachable_address(server.address, own_host()), trust=trust)
        server.coordinator.say = progress.note
        for line in first_lines:
            progress.note(line)
        after.enter_context(
            announcing(server.address, asked=asked, authority_sha256=authority_of(keeper), say=progress.note)
        )
        while not ending.wait():
            server.coordinator.say_who_is_lost()
            if keeper is not None:
                keeper.renew_own(time.time())
        ending.save(server.coordinator)
    if ending.by_ctrl_c:
        raise InterruptedRunError("stopped by Ctrl-C")
