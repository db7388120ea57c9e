"""Files of a plan, a profile and a finished run for the commands that predict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from coordinator.run.trace import TraceText
from ringtune import cli
from ringtune.costs.profile import Profile
from ringtune.engine.events import Span
from ringtune.schedule.operation_tables import ScheduledTable, tables_to_json
from ringtune.schedule.plan import Plan
from sim.prediction import Prediction, predict
from tests.support.fake_agents import job
from tests.support.plans import make_plan
from tests.support.profiles import all_pairs, profile_of

PLAN = make_plan(
    [("alice", 0, 2), ("bob", 2, 4)], ["alice", "bob"], num_steps=8, max_length=8, hidden_size=8, eval_rows=3
)
PROFILE = profile_of(PLAN, links=all_pairs(PLAN.nodes, 1e5, 0.01))
MOVE_S = 3.0
"""What each move of a finished run has taken."""

Change = Callable[[dict[str, Any]], None]


def ringtune(*arguments: str | Path) -> Result:
    """Run the command as a user does, in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def asked(*arguments: str | Path) -> dict[str, Any]:
    """The JSON line of an answer."""
    result = ringtune("what-if", *arguments, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def write_json(path: Path, value: dict[str, Any], change: Change | None = None) -> Path:
    """A JSON file, with a change to its content; NaN is written as Python writes it."""
    value = json.loads(json.dumps(value))
    if change is not None:
        change(value)
    path.write_text(json.dumps(value))
    return path


def write_pair(
    folder: Path,
    *,
    plan: Plan = PLAN,
    profile: Profile = PROFILE,
    of_plan: Change | None = None,
    of_profile: Change | None = None,
) -> tuple[Path, Path]:
    """``plan.json`` and ``profile.json``."""
    folder.mkdir(exist_ok=True)
    return (
        write_json(folder / "plan.json", plan.to_json(), of_plan),
        write_json(folder / "profile.json", profile.to_json(), of_profile),
    )


def write_run(
    folder: Path, *, slower: float = 1.0, plan: Plan = PLAN, tables: Sequence[ScheduledTable] = ()
) -> Prediction:
    """The folder of a finished run whose actions took ``slower`` times what the profile says.

    ``tables`` are those that it has chosen.
    """
    write_pair(folder, plan=plan)
    nodes = tuple(node.at_pace(slower) for node in PROFILE.nodes)
    real = predict(plan, dataclasses.replace(PROFILE, nodes=nodes), keep_spans=True, tables=tables, move_s=MOVE_S)
    text = TraceText(plan.nodes, num_blocks=plan.course.num_blocks, started_unix_s=1.7e9)
    spans = "".join(
        text.spans(node, [Span(action, 1.7e9 + start_s, 1.7e9 + end_s)]) for node, action, start_s, end_s in real.spans
    )
    (folder / "trace.json").write_text(text.begin() + spans + text.end())
    links = {f"{link.source}>{link.target}": link.sent_bytes for link in real.links}
    moves = [{"to": one.placement_number, "seconds": MOVE_S} for one in plan.placements[1:]]
    report = {
        "wall_s": 1.0,
        "steps": plan.course.num_steps,
        "steps_s": real.train_s,
        "links": links,
        **({"moves": moves} if moves else {}),
    }
    (folder / "report.json").write_text(json.dumps(report))
    if tables:
        write_json(folder / "operations.json", tables_to_json(tables))
    return real


def tiny_job() -> str:
    """A job that fits the profile, as TOML."""
    return job(train__max_length=8, train__batch_size=4, train__microbatches=2, train__checkpoint_every=0).to_toml()
