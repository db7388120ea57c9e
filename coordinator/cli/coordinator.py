"""``ringtune coordinator``: serve nodes and jobs; ``init`` and ``rotate`` make an authority, ``token`` a join token."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringtune import options
from ringtune.errors import InterruptedRunError, StorageError, UsageError
from ringtune.hints import hint_to_install
from ringtune.transport.credentials import refuse_both, use_credentials
from ringtune.transport.parties import AUTHORITY, coordinator_trust

if TYPE_CHECKING:
    from coordinator.server.certificate_authority import TrustKeeper
    from coordinator.server.database import Database


DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database",
        metavar="URL",
        help="Database with the runs and the register of several coordinators, of which one acts and the others are "
        "standbys: sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME.",
    ),
]


def keeper_of(trust: Path | None, *, insecure: bool, shared: Database | None = None) -> TrustKeeper | None:
    """Make this process speak as the coordinator of a trust folder; without encryption if there is none.

    ``trust`` = None: the default folder, if it exists. ``insecure``: the user asked for no encryption. ``shared``: has
    the register.

    Raises:
        TrustError: the folder has no authority, or can't be used.
        UsageError: both arguments are given.
    """
    refuse_both(trust, insecure=insecure)
    folder = trust or coordinator_trust()
    if insecure or (trust is None and not (folder / AUTHORITY).is_file()):
        use_credentials(None)
        return None
    from coordinator.server.certificate_authority import TrustKeeper

    keeper = TrustKeeper(folder, shared=shared)
    use_credentials(keeper.credentials)
    return keeper


def init(trust: options.Trust = None, json: options.Json = False) -> None:
    """Create a certificate authority (CA); from then on every connection uses mutual TLS."""
    from coordinator.server.certificate_authority import ADMIN, FILE, init_trust
    from ringtune.transport.identity import fingerprint

    folder = trust or coordinator_trust()
    authority = fingerprint(init_trust(folder, time.time()).certificate_pem)
    admin = folder / ADMIN.name
    lines = [
        f"the certificate authority (CA) is in {folder}; keep this folder secret",
        f"save {AUTHORITY} and {FILE} of it elsewhere, again after each removal and 'ringtune coordinator rotate': "
        f"without {AUTHORITY} all nodes and users have to join anew",
        f"commands of this user on this machine use {admin}",
        "next: 'ringtune coordinator', and for each node 'ringtune coordinator token NAME'",
    ]
    told = {"event": "made", "trust": str(folder), "admin": str(admin), "authority_sha256": authority}
    options.show(told, lines, as_json=json)


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The node, or with another --role the user.")],
    role: Annotated[
        str,
        typer.Option(
            help="node; submitter: a user of another machine, with the own runs only; administrator: one with all runs "
            "and the membership."
        ),
    ] = "node",
    ttl: Annotated[
        str, typer.Option("--ttl", metavar="TIME", help="How long the token is valid, e.g. 30m, 24h, 7d.")
    ] = "24h",
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the token into this new file, which only you can read.")
    ] = None,
    trust: options.Trust = None,
    database: DatabaseUrl = "",
    json: options.Json = False,
) -> None:
    """Make a join token for one node or user: it can be exchanged for a certificate of that name, once.

    Pass it on in secret, as a file or on standard input.
    """
    from coordinator.server.certificate_authority import make_token
    from ringtune.quantities import parse_seconds
    from ringtune.storage.durable import check_writable, require_absent, write_durably
    from ringtune.transport.parties import ADMINISTRATOR, NODE_ROLE, SUBMITTER_ROLE, Party

    if role not in (NODE_ROLE, SUBMITTER_ROLE, ADMINISTRATOR):
        raise UsageError(f"--role {role!r} is not one of {NODE_ROLE}, {SUBMITTER_ROLE}, {ADMINISTRATOR}")
    if save is not None:
        require_absent(save)
        check_writable(save)
    party = Party("node" if role == NODE_ROLE else "submitter", name)
    if party.is_guest:
        raise UsageError(
            f"the name {name} is that of a guest, whom only 'ringtune eval RUN --data FILE' invites; give another name"
        )
    ends_unix_s = time.time() + parse_seconds(ttl)
    with open_database(database) if database else contextlib.nullcontext() as shared:
        made = make_token(
            trust or coordinator_trust(), party, ends_unix_s, is_administrator=role == ADMINISTRATOR, shared=shared
        )
    if save is not None:
        write_durably(save, f"{made}\n".encode(), mode=0o600)
    where = {"file": str(save)} if save else {"token": str(made)}
    line = f"the token of {made.party} is in {save}" if save else str(made)
    told = {"event": "token", "name": name, "role": role, "ends_unix_s": ends_unix_s}
    options.show(told | where, [line], as_json=json)


def rotate(
    within: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="How long the old authority is trusted at most, e.g. 1h, 7d; less once all have moved."
        ),
    ] = "7d",
    status: Annotated[
        bool, typer.Option("--status", help="Show how far a rotation is and for whom it waits; begin none.")
    ] = False,
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    json: options.Json = False,
) -> None:
    """Replace the certificate authority of a running coordinator by a new one; runs go on.

    Nodes and users that call within the time get certificates of the new one by themselves.
    """
    from coordinator.client.connection import Connection
    from coordinator.screen.listing import rotation_json, rotation_lines
    from ringtune.quantities import parse_seconds

    within_s = None if status else parse_seconds(within)
    with Connection(coordinator, insecure=False) as client:
        reply = client.rotate(within_s)
    options.show(rotation_json(reply), rotation_lines(reply), as_json=json)


def open_database(url: str, *, lease_s: float = 10.0) -> Database:
    """Open the database of ``--database URL``, without its lease; raises ``UsageError`` or ``StorageError``."""
    try:
        from coordinator.server.database import Database
    except ImportError as error:
        raise UsageError(f"--database needs a library that is missing: {hint_to_install('database')}") from error
    return Database(url, lease_s=lease_s)


def begin_again(why: str, *, is_ending: bool) -> None:
    """Make this process a standby without a call to its nodes: they keep the run for whoever has taken over.

    The command line is executed anew in its place, so that no thread of the former holder continues. A process that was
    told to end, or can't be executed anew, ends.
    """
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
        then = "ends, as it was told to" if is_ending else "begins again as a standby"
        sys.stderr.write(f"this coordinator has lost its lease: {why}; it {then}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    if not is_ending:
        os.environ[_BEGINS_AGAIN] = "1"
        with contextlib.suppress(OSError):
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - our own command line
    os._exit(StorageError.exit_code)


_BEGINS_AGAIN = "RINGTUNE_BEGINS_AGAIN"
"""Variable that says to the new process that its database has answered before, and is to be waited for."""


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(init)
app.command()(token)
app.command()(rotate)


@app.callback(invoke_without_command=True)
def coordinator(
    context: typer.Context,
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen at; port 0 = any.")
    ] = "127.0.0.1:7070",
    lease_s: Annotated[
        float,
        typer.Option(
            "--lease", metavar="SECONDS", min=0.1, help="A node without a heartbeat for so many seconds is lost."
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
            help="Port for joining with a token. Default: the one after the port of --bind.",
        ),
    ] = 0,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for runs until they are fetched. Default: in the user's state folder."
        ),
    ] = None,
    database: DatabaseUrl = "",
    keep_days: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="Days that a fetched run is kept after its end.")
    ] = 7.0,
    keep_size: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Disk space for all runs, with equal shares of users: beyond both, fetched ones of the user are "
            "deleted, and no new one begins.",
        ),
    ] = "10GiB",
    keep_unfetched_days: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS", min=0, help="Days that a run that was not fetched is kept after its end. Default: for ever."
        ),
    ] = None,
    take_up_hours: Annotated[
        float,
        typer.Option(
            "--take-up",
            metavar="HOURS",
            min=0,
            help="Resume the run that a crash interrupted at most so long ago; 0 = never.",
        ),
    ] = 24.0,
    web: options.Web = "",
    web_token: options.WebToken = None,
    announce: Annotated[
        bool,
        typer.Option(
            "--announce", help="Announce the coordinator on the local network even if only this machine can reach it."
        ),
    ] = False,
    no_announce: Annotated[
        bool,
        typer.Option(
            "--no-announce", help="Don't announce the coordinator on the local network even if others can reach it."
        ),
    ] = False,
    json: options.Json = False,
) -> None:
    """Serve nodes and jobs until stopped with Ctrl-C, SIGTERM or SIGHUP; a run is saved before.

    A run continues when the command that submitted it ends. Its files are stored here until they are fetched. After a
    crash of the coordinator, the next one with the same --state resumes the run from the last turn that its nodes have
    copies of, or from its newest checkpoint. With --database a standby does so when the lease (--lease) is over.
    """
    if context.invoked_subcommand is not None:
        return
    from coordinator.api.output import make_progress
    from coordinator.screen.progress import reachable_address
    from coordinator.server.coordinator import Coordinator, ShutdownSignals
    from coordinator.server.run_store import RunStore, copy_runs, default_folder
    from coordinator.server.server import CoordinatorServer, announcing
    from coordinator.web.feeds import watch
    from coordinator.web.server import PageServer, require_web
    from ringtune.quantities import parse_bytes
    from ringtune.storage.durable import keep_files_private
    from ringtune.transport.endpoints import machine_address
    from ringtune.transport.identity import fingerprint

    keep_files_private()
    if announce and no_announce:
        raise UsageError("--announce and --no-announce exclude each other; give one of them, or none")
    announces = announce or (False if no_announce else None)
    keep_bytes = parse_bytes(keep_size, option="--keep-size")
    if web:
        require_web()
    after = contextlib.ExitStack()

    def keep_runs(coordinator: Coordinator, address: str) -> None:
        """Open the store and resume an interrupted run, before the first call is answered."""
        kept = RunStore(
            folder or default_folder(address),
            database=shared,
            keep_days=keep_days,
            keep_bytes=keep_bytes,
            keep_unfetched_days=math.inf if keep_unfetched_days is None else keep_unfetched_days,
        )
        coordinator.kept = after.enter_context(contextlib.closing(kept))
        coordinator.say = first_lines.append
        if web:  # before a run is resumed, so that the page shows all of it
            page = after.enter_context(PageServer(watch(coordinator), web, token_file=web_token))
            first_lines.extend(page.lines())
        coordinator.resume_interrupted(within_s=take_up_hours * 3600)

    first_lines: list[str] = []
    progress = make_progress(as_json=json, live=False)
    folder, shared = state, None
    with ShutdownSignals() as ending, after:
        if database:
            is_patient = bool(os.environ.pop(_BEGINS_AGAIN, ""))
            while shared is None:
                try:
                    shared = after.enter_context(open_database(database, lease_s=lease_s))
                except StorageError as error:
                    if not is_patient or ending.wait():
                        raise
                    progress.note(f"standby: {error}")
        keeper = keeper_of(trust, insecure=insecure, shared=shared)
        if shared is not None:
            from coordinator.server.database import copy_folder, stand_by

            shared.on_lost = lambda why: begin_again(why, is_ending=ending.is_asked)
            folder = after.enter_context(copy_folder(state or default_folder(bind), shared))
            copy = functools.partial(copy_runs, shared, folder)
            problem = keeper.takeover_problem if keeper is not None else str
            if not stand_by(shared, copy, say=progress.note, is_over=ending.wait, problem=problem):
                if ending.by_ctrl_c:
                    raise InterruptedRunError("stopped by Ctrl-C")
                return
        if keeper is not None and (warning := keeper.begin_to_act()):
            progress.note(warning)
        server = after.enter_context(
            CoordinatorServer(
                bind, lease_s=lease_s, insecure=insecure, keeper=keeper, join_port=join_port, before=keep_runs
            )
        )
        progress.listening(server.address, reachable_address(server.address, machine_address()), trust=trust)
        server.coordinator.say = progress.note
        for line in first_lines:
            progress.note(line)
        announced, authority = after.enter_context(contextlib.ExitStack()), None
        while True:
            present = fingerprint(keeper.authority_pem) if keeper is not None else ""
            if authority != (authority := present):  # at the begin, and when it was rotated
                announced.close()
                announced.enter_context(
                    announcing(server.address, asked=announces, authority_sha256=authority, say=progress.note)
                )
                if announces:  # a problem of a later announcement is told, and ends nothing
                    announces = None
            if ending.wait():
                break
            server.coordinator.report_lost_members()
            server.advance_rotation()
            if shared is not None:
                shared.require_lease()
        ending.save(server.coordinator)
    if ending.by_ctrl_c:
        raise InterruptedRunError("stopped by Ctrl-C")
