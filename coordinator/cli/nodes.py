"""``ringtune nodes``: list the nodes of a coordinator, show, drain or remove one."""

from __future__ import annotations

from typing import Annotated

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The node.")]


@app.callback(invoke_without_command=True)
def nodes(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="Update the list each second, until Ctrl-C.")] = False,
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """List the nodes of a coordinator."""
    if context.invoked_subcommand is not None:
        return
    from coordinator.client.connection import Connection
    from coordinator.screen.listing import node_table, nodes_json

    with Connection(coordinator, insecure=insecure) as client:
        if watch:
            from coordinator.screen.live_tables import watch_nodes

            watch_nodes(client.nodes, coordinator, as_json=json)
            return
        members = client.nodes()
    options.show(nodes_json(members), node_table(members, coordinator), as_json=json)


@app.command()
def show(
    name: Name,
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Show one node in detail, a line for each property."""
    from coordinator.client.connection import Connection
    from coordinator.screen.listing import node_details, nodes_json
    from ringtune.errors import UsageError

    with Connection(coordinator, insecure=insecure) as client:
        entries = [entry for entry in client.nodes() if entry.joined.node == name]
    if not entries:
        raise UsageError(f"node {name} is no member of this coordinator; 'ringtune nodes' lists them")
    options.show(nodes_json(entries), node_details(entries[0]), as_json=json)


@app.command()
def drain(
    name: Name,
    undo: Annotated[bool, typer.Option("--undo", help="Allow new runs on it again.")] = False,
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Exclude a node from new runs; its present run continues."""
    from coordinator.client.connection import Connection

    with Connection(coordinator, insecure=insecure) as client:
        run_id = client.drain_node(name, undo=undo)
    works = f"; it works on run {run_id} to its end" if run_id else ""
    line = f"node {name} takes part in {'runs again' if undo else f'no new run{works}'}"
    options.show({"event": "undrained" if undo else "drained", "node": name, "run_id": run_id}, [line], as_json=json)


@app.command()
def remove(
    name: Name,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, shown to the node.")] = "",
    role: Annotated[str, typer.Option(help="node, or submitter: a user of another machine.")] = "node",
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Refuse a node or user from now on; a new token lets it join again. Its run treats the node as lost."""
    from coordinator.client.connection import Connection
    from ringtune.errors import UsageError
    from ringtune.transport.parties import NODE_ROLE, SUBMITTER_ROLE

    if role not in (NODE_ROLE, SUBMITTER_ROLE):
        raise UsageError(f"--role {role!r} is not one of {NODE_ROLE}, {SUBMITTER_ROLE}")
    with Connection(coordinator, insecure=insecure) as client:
        reply = client.remove(name, role=role, reason=reason)
    told = {"event": "removed", "role": role, "name": name, "certificates": reply.certificates}
    line = f"{role} {name} is refused from now on ({reply.certificates} certificates are revoked)"
    options.show(told | {"was_member": reply.was_member}, [line], as_json=json)
