"""``ringtune plan``: who would host what, what it needs, and what happens when; without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def plan(
    job: Annotated[Path, typer.Argument(help="The job file (job.toml).")],
    nodes: Annotated[
        int, typer.Option(min=0, help="Plan for so many equal nodes; with --coordinator: wait for so many.")
    ] = 0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Budget of each assumed node, e.g. 512MiB.")] = "",
    coordinator: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Ask the nodes of this coordinator and measure them.")
    ] = "",
    profile: Annotated[
        Path | None, typer.Option(help="Plan for the nodes and links of this profile.json, measured before.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also say why: times by depth, who is left out, what came second.")
    ] = False,
    microbatches: Annotated[
        str, typer.Option(metavar="N,N|auto", help="Let the planner choose one of these in place of the job's.")
    ] = "",
    wire_dtypes: Annotated[
        str,
        typer.Option("--wire", metavar="TYPE,TYPE", help="Let the planner choose one of these in place of the job's."),
    ] = "",
    join_s: Annotated[float, typer.Option(min=0, help="How long to wait for nodes, in seconds.")] = 60.0,
    at_step: Annotated[int, typer.Option(min=0, help="First step of the table of actions.")] = 0,
    steps: Annotated[int, typer.Option(min=0, max=100, help="Steps in the table; 0 = no table.")] = 1,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the job.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow a coordinator on another machine, without encryption.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Show slices, memory and the table of actions of a job, without training.

    Without --coordinator nothing is started. With --profile the nodes and links are those that were measured;
    otherwise sizes come from the model's files, and nodes are taken as equal. Where rows
    depend on the tokenizer (question answering, plain text) they are estimated, and the plan says so.
    """
    from coordinator.commands.overrides import parse_changes
    from coordinator.planner.alternatives import microbatch_choices, wire_choices
    from coordinator.planner.make_plan import check_inputs, make_plan, plan_memory
    from coordinator.screen.plan_text import plan_json, plan_text
    from ringtune.errors import UsageError
    from ringtune.jobs.job import load_job
    from ringtune.quantities import parse_bytes

    note, planned = "", None
    wanted = load_job(job).with_overrides(parse_changes(change or []))
    counts = microbatch_choices(microbatches, wanted.train.batch_size)
    dtypes = wire_choices(wire_dtypes)
    if coordinator and (profile or explain or counts or dtypes):
        raise UsageError("the coordinator decides by itself; give --profile FILE to explain or to choose")
    if profile and (nodes or memory):
        raise UsageError("--nodes and --memory are for assumed nodes; the profile says which there are")
    if profile:
        from coordinator.planner.given_profile import read_profile

        measured = read_profile(profile)
        check_inputs(wanted, measured)
        planned = make_plan(wanted, measured.by_name, links=measured.links, microbatches=counts, wire_dtypes=dtypes)
        made, needs = planned.plan, dict(planned.memory)
    elif coordinator:
        from coordinator.submit.client import Client

        if memory:
            raise UsageError("--memory is for assumed nodes; with --coordinator every node says what it has")
        with Client(coordinator, insecure=insecure) as client:
            made, found = client.plan(wanted, num_nodes=nodes, join_s=join_s)
        needs = plan_memory(wanted, made, found.by_name)
    else:
        from coordinator.estimates.facts import estimated_facts
        from coordinator.estimates.row_counts import estimate_note

        assumed = estimated_facts(wanted, nodes, memory_bytes=parse_bytes(memory) if memory else 0)
        planned = make_plan(wanted, assumed, microbatches=counts, wire_dtypes=dtypes)
        made, needs = planned.plan, dict(planned.memory)
        note = estimate_note(wanted)
    why = None
    if explain and planned is not None and planned.choice is not None:
        from coordinator.planner.explain import explain as explained

        why = explained(planned.choice, relative=not profile)
    if json:
        typer.echo(plan_json(made, needs, note=note, why=why))
        return
    is_measured = bool(coordinator or profile)
    for line in plan_text(made, needs, at_step=at_step, num_steps=steps, measured=is_measured, note=note, why=why):
        typer.echo(line)
