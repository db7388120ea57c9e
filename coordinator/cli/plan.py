"""``ringtune plan``: show the placement of a job, its memory and its seconds, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringtune import options


def plan(
    job: options.JobFile,
    assume: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=4096, help="Plan for N equal nodes that need not exist; nothing is started."
        ),
    ] = 0,
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Budget of each assumed node, e.g. 512MiB. Default: a share of the free memory here."
        ),
    ] = "",
    coordinator: Annotated[str, options.coordinator_option("assume", "memory", "profile")] = "",
    profile: options.ProfileFile = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also give reasons: times by depth, unused nodes, the second best plan.")
    ] = False,
    microbatches: options.MicrobatchChoices = "",
    wire_dtypes: options.WireChoices = "",
    nodes: options.Nodes = 0,
    join_s: options.JoinS = 60.0,
    table: Annotated[bool, typer.Option("--table", help="Also show the actions of every node, with a legend.")] = False,
    at_step: Annotated[int, typer.Option(min=0, help="With --table: its first step.")] = 0,
    steps: Annotated[int, typer.Option(min=1, max=100, help="With --table: how many steps.")] = 1,
    change: options.Changes = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the plan there, for --plan of 'ringtune train'; replaces only an earlier plan."
        ),
    ] = None,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Show which node hosts which blocks, with memory and predicted time, without training.

    Without --coordinator nothing is started. With --profile nodes and links are those that were measured; otherwise
    sizes are read from the model's files, nodes are assumed equal, and the time is a rough guess. If the number of rows
    depends on the tokenizer (question answering, plain text) it is estimated, and the plan says so.
    """
    from coordinator.api import plan as api
    from coordinator.api.arguments import parse_changes, typed
    from coordinator.planner.given_plan import require_plan_place
    from ringtune.storage.durable import check_writable

    if save is not None:
        require_plan_place(save)
        check_writable(save)
    planned = typed(api.plan)(
        job,
        assume=assume,
        memory=memory,
        coordinator=coordinator,
        profile=profile,
        explain=explain,
        microbatches=microbatches,
        wire=wire_dtypes,
        nodes=nodes,
        join_s=join_s,
        insecure=insecure,
        **parse_changes(change or []),
    )
    if save is not None:
        planned.save(save)
    is_shown = table or at_step > 0 or steps > 1
    lines = planned.lines(at_step=at_step, num_steps=steps if is_shown else 0) if not json else []
    options.show(planned.to_json(), [*lines, *([f"the plan is in {save}"] if save is not None else [])], as_json=json)
