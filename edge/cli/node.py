"""``ringtune node``: start an agent on this device."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from edge.checkpoint.retention import KEPT, KEPT_SIZE, RetentionLimits
from ringtune import options
from ringtune.errors import RingTuneError
from ringtune.machine.process import guard_outputs, mark_command_process
from ringtune.texts import indented, log_to_stderr

if TYPE_CHECKING:
    from edge.options import AgentOptions

_LOG = logging.getLogger(__name__)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def node(
    coordinator: options.Coordinator = "",
    name: Annotated[
        str,
        typer.Option(
            help="Name of this node: small letters, digits, '.', '-', '_'. Default: its token's, else the host's."
        ),
    ] = "",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Training rows (csv, jsonl, parquet ...): makes this node an owner. They never leave this process.",
        ),
    ] = None,
    eval_data: Annotated[Path | None, typer.Option(metavar="FILE", help="Evaluation rows of this owner.")] = None,
    share: Annotated[
        str, typer.Option(metavar="I/N", help="Take part I of N of the rows, e.g. 0/4; the split follows the job.")
    ] = "0/1",
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Model folder on this device; replaces the job's model.path.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for this node's parts of checkpoints. Default: ~/.local/state/ringtune/NAME."
        ),
    ] = None,
    keep_days: Annotated[
        float, typer.Option(metavar="DAYS", min=0.0, help="Days that checkpoints of a finished run stay in --state.")
    ] = KEPT.days,
    keep_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Disk space for checkpoints of all finished runs in --state.")
    ] = KEPT_SIZE,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for weights from other nodes. Default: the user's cache folder."),
    ] = None,
    device: Annotated[str, typer.Option(help="Compute device: auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Compute threads; 0 = as in the job, or all cores.")] = 0,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for a run, e.g. 512MiB. Default: the free memory.")
    ] = "",
    device_nodes: Annotated[
        int, typer.Option(help="Number of nodes that share this GPU; each takes an equal part of its free memory.")
    ] = 1,
    bind: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address to serve at; port 0 = any. Default: any port, at the address that the coordinator can reach.",
        ),
    ] = "",
    advertise: Annotated[
        str, typer.Option(metavar="HOST[:PORT]", help="Address of this node for other nodes, if not --bind.")
    ] = "",
    metrics: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Serve Prometheus metrics at /metrics; beyond this machine a token is needed."
        ),
    ] = "",
    rack: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Board or switch that this node shares with others: copies of its state are on other racks. "
            "Default: the host of its address.",
        ),
    ] = "",
    web_token: options.WebToken = None,
    insecure: options.Insecure = False,
    trust: options.Trust = None,
    token_file: options.TokenFile = None,
    join_s: options.JoinS = 30.0,
    watch_parent: Annotated[
        bool, typer.Option("--watch-parent", help="End when the standard input ends (for processes of a local run).")
    ] = False,
    guest: Annotated[
        bool, typer.Option("--guest", help="Join for the evaluation of this node's rows only ('ringtune eval' does).")
    ] = False,
    own_coordinator: Annotated[
        bool,
        typer.Option(
            "--own-coordinator",
            help="The owner of the rows also runs the coordinator (local runs): evaluations may count classes of "
            "any number of rows.",
        ),
    ] = False,
    json: options.Json = False,
) -> None:
    """Start an agent: it joins the coordinator, hosts a slice of the model, and stays for further runs.

    Without --coordinator it joins the one on this machine, or the one on the local network that issued its token. Stop
    it with Ctrl-C or SIGTERM; it then leaves in order.
    """
    from edge.agent.node_metrics import require_metrics
    from edge.agent.process import run_agent
    from edge.checkpoint.state_folder import claim_state_folder, require_state_folder
    from edge.cli.enrollment import choose_trust, find_coordinator, resolve_node_name
    from edge.machine.libraries import require_libraries
    from edge.options import AgentOptions, check_start, default_cache, default_state, parse_share
    from ringtune.models.gguf import folder_of_gguf
    from ringtune.quantities import parse_bytes

    logging.getLogger("edge").setLevel(min(logging.INFO, logging.getLogger().level))  # joins and runs are logged
    require_libraries()
    if metrics:
        require_metrics()
    name, token = resolve_node_name(name, trust, token_file, state=state, insecure=insecure)
    state = state or default_state(name)
    require_state_folder(state)
    if not coordinator:
        coordinator, token = find_coordinator(name, trust, token_file, state=state, insecure=insecure, token=token)
    used = choose_trust(
        name,
        trust,
        token_file,
        state=state,
        coordinator=coordinator,
        insecure=insecure,
        is_local=watch_parent,
        join_s=join_s,
        token=token,
    )
    given = AgentOptions(
        coordinator=coordinator,
        name=name,
        state=state,
        bind=bind,
        advertise=advertise,
        data=data,
        eval_data=eval_data,
        share=parse_share(share),
        threads=threads,
        device=device,
        device_nodes=device_nodes,
        memory_bytes=parse_bytes(memory, option="--memory") if memory else 0,
        model=folder_of_gguf(model) if model else None,
        cache=cache or default_cache(),
        insecure=insecure,
        trust=used,
        watch_parent=watch_parent,
        join_s=join_s,
        is_guest=guest,
        own_coordinator=own_coordinator,
        kept=RetentionLimits(days=keep_days, size_bytes=parse_bytes(keep_size, option="--keep-size")),
        metrics=metrics,
        metrics_token=web_token,
        rack=rack,
    )
    if not guest:
        claim_state_folder(state)
    if not watch_parent:  # a local run checks it itself, and names the key of the job
        check_start(given)
        _LOG.info("node %s loads its libraries and joins %s", name, coordinator)
    code = run_agent(given, on_joined=lambda address: _tell_joined(given, address) if json else None)
    if code:
        raise typer.Exit(code)


def _tell_joined(given: AgentOptions, address: str) -> None:
    """Print that the node has joined, for a process that waits for it."""
    import json

    told = {"event": "joined", "node": given.name, "address": address, "coordinator": given.coordinator}
    options.echo(json.dumps(told))


def main() -> int:
    """Run an agent by the arguments of ``python -m edge``; return the exit code."""
    mark_command_process()
    guard_outputs()
    level = os.environ.get("RINGTUNE_LOG", "WARNING").upper()
    log_to_stderr(level)
    try:
        app(prog_name="python -m edge")
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except RingTuneError as error:
        sys.stderr.write(f"error: {indented(str(error))}\n")
        return error.exit_code
    return 0


def end(code: int) -> NoReturn:
    """End this process at once: taking torch's modules apart would cost up to a second of every local run."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
