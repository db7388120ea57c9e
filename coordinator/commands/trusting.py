"""``ringtune coordinator init`` and ``ringtune coordinator token``: make an authority, and invite to it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ringtune import options


def init(trust: options.Trust = None, json: options.Json = False) -> None:
    """Create a certificate authority (CA); from then on every connection uses mutual TLS."""
    import json as json_module

    from coordinator.trust.folder import ADMIN, init_trust
    from ringtune.trust.certificates import fingerprint
    from ringtune.trust.places import coordinator_trust

    folder = trust or coordinator_trust()
    found = fingerprint(init_trust(folder, time.time()).certificate_pem)
    admin = folder / ADMIN.name
    if json:
        told = {"event": "made", "trust": str(folder), "admin": str(admin), "authority_sha256": found}
        typer.echo(json_module.dumps(told))
        return
    typer.echo(f"the certificate authority (CA) is in {folder}; keep this folder secret, and a copy of it")
    typer.echo(f"commands of this user on this machine use {admin}")
    typer.echo("next: 'ringtune coordinator', and for each node 'ringtune coordinator token NAME'")


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The node, or with --role submitter the user.")],
    role: Annotated[str, typer.Option(help="node, or submitter: a user of another machine.")] = "node",
    ttl: Annotated[
        str, typer.Option("--ttl", metavar="TIME", help="How long it may be used, once: e.g. 30m, 24h, 7d.")
    ] = "24h",
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the token into this new file, which only you can read.")
    ] = None,
    trust: options.Trust = None,
    json: options.Json = False,
) -> None:
    """Make a join token for one node or user; whoever has it gets a certificate of that name, once.

    Pass it on in secret, as a file or on standard input.
    """
    import json as json_module

    from coordinator.trust.folder import make_token
    from ringtune.errors import UsageError
    from ringtune.files.durable import check_writable, write_durably
    from ringtune.files.owned import require_absent
    from ringtune.quantities import parse_seconds
    from ringtune.trust.parties import NODE_ROLE, SUBMITTER_ROLE, Party
    from ringtune.trust.places import coordinator_trust

    if role not in (NODE_ROLE, SUBMITTER_ROLE):
        raise UsageError(f"--role {role!r} is not one of {NODE_ROLE}, {SUBMITTER_ROLE}")
    if save is not None:
        require_absent(save)
        check_writable(save)
    ends_unix_s = time.time() + parse_seconds(ttl)
    made = make_token(
        trust or coordinator_trust(), Party("node" if role == NODE_ROLE else "submitter", name), ends_unix_s
    )
    if save is not None:
        write_durably(save, f"{made}\n".encode(), mode=0o600)
    if json:
        told = {"event": "token", "name": name, "role": role, "ends_unix_s": ends_unix_s}
        typer.echo(json_module.dumps(told | ({"file": str(save)} if save else {"token": str(made)})))
    else:
        typer.echo(f"the token of {made.party} is in {save}" if save else str(made))
