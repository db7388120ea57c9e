"""``ringtune plan``: who would host what, what it needs, and what happens when; without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringtune import options
from ringtune.texts import printable

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def plan(
    job: options.JobFile,
    assume: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=4096, help="Plan for N equal nodes that are not there; nothing is started."
        ),
    ] = 0,
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Budget of each assumed node, e.g. 512MiB. Default: N share what is free here."
        ),
    ] = "",
    coordinator: Annotated[str, options.coordinator_option("assume", "memory", "profile")] = "",
    profile: options.ProfileFile = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also say why: times by depth, who is left out, what came second.")
    ] = False,
    microbatches: options.MicrobatchChoices = "",
    wire_dtypes: options.WireChoices = "",
    nodes: options.Nodes = 0,
    join_s: options.JoinS = 60.0,
    table: Annotated[bool, typer.Option("--table", help="Also show what every node does when, with a legend.")] = False,
    at_step: Annotated[int, typer.Option(min=0, help="With --table: its first step.")] = 0,
    steps: Annotated[int, typer.Option(min=1, max=100, help="With --table: how many steps.")] = 1,
    change: options.Changes = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan there, for --plan of 'ringtune train'.")
    ] = None,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Show who would host what, what it needs and how long it would take, without training.

    Without --coordinator nothing is started. With --profile the nodes and links are those that were measured;
    otherwise sizes come from the model's files, nodes are taken as equal, and the time is a rough guess. Where rows
    depend on the tokenizer (question answering, plain text) they are estimated, and the plan says so.
    """
    from coordinator.commands.overrides import changed_job
    from coordinator.planner.alternatives import read_choices
    from coordinator.planner.explaining.plan import explain as explained
    from coordinator.planner.given_plan import GivenPlan
    from coordinator.planner.job_time import guessed_time, measured_time
    from coordinator.planner.make_plan import check_inputs, make_plan, planned_as
    from coordinator.screen.plan_text import plan_json, plan_text
    from ringtune import __version__
    from ringtune.errors import UsageError
    from ringtune.files.durable import check_writable, write_durably
    from ringtune.quantities import parse_bytes

    wanted = changed_job(job, change or [])
    choices = read_choices(microbatches, wire_dtypes, batch_size=wanted.train.batch_size)
    if coordinator and profile:
        raise UsageError("give one of --coordinator and --profile: nodes that are asked, or nodes measured before")
    if (profile or coordinator) and (assume or memory):
        raise UsageError("--assume and --memory are for nodes that are not there; coordinator and profile have some")
    if nodes and not coordinator:
        raise UsageError(f"--nodes is for --coordinator; to plan for equal nodes that are not there: --assume {nodes}")
    if not (profile or coordinator) and max(map(len, choices)) > 1:
        raise UsageError("nothing was measured to choose by; give --profile FILE or --coordinator HOST:PORT")
    if save is not None:
        check_writable(save)
    note = ""
    if profile:
        from coordinator.planner.given_profile import read_profile

        found = read_profile(profile)
        check_inputs(wanted, found)
        planned = make_plan(wanted, found.by_name, links=found.links, **choices._asdict())
    elif coordinator:
        from coordinator.submit.client import Client

        with Client(coordinator, insecure=insecure) as client:
            made, found, note = client.plan(wanted, num_nodes=nodes, join_s=join_s, choices=choices)
        planned = planned_as(wanted, made, found, again=explain, **choices._asdict())
    else:
        from coordinator.estimates.facts import estimated_facts
        from coordinator.estimates.row_counts import estimate_note
        from ringtune.costs.profile import Profile

        assumed = estimated_facts(wanted, assume, memory_bytes=parse_bytes(memory) if memory else 0)
        found = Profile(nodes=tuple(assumed.values()))
        planned = make_plan(wanted, assumed, **choices._asdict())
        note = estimate_note(wanted)
    note = "; ".join(filter(None, (note, planned.note)))
    is_measured, model = bool(coordinator or profile), found.nodes[0].model
    time = (
        measured_time(planned, found, wanted.train.optimizer) if is_measured else guessed_time(planned, wanted, model)
    )
    why = None
    if explain and planned.choice is not None:
        why = explained(
            planned.choice,
            relative=not is_measured,
            plan=planned.plan,
            profile=planned.profile,
            optimizer=wanted.train.optimizer,
            dropout=wanted.train.dropout,
            helping=planned.helping,
            replicas=planned.replicas,
            phases=planned.phases,
        )
    given = GivenPlan(plan=planned.plan, version=__version__, model_digest=model.digest)
    value = plan_json(given, planned.memory, note=note, why=why, time=time)
    if save is not None:
        write_durably(save, (value + "\n").encode())
    if json:
        typer.echo(value)
        return
    is_shown = table or at_step > 0 or steps > 1
    for line in plan_text(
        planned.plan,
        planned.memory,
        at_step=at_step,
        num_steps=steps if is_shown else 0,
        measured=is_measured,
        note=note,
        why=why,
        time=time,
        budgets={node.node: node.memory_bytes for node in found.nodes},
        facts=found.nodes[0],
    ):
        typer.echo(printable(line))
    if save is not None:
        typer.echo(f"the plan is in {save}")
