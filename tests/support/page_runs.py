"""Events of made-up runs, as a page hears them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from coordinator.web.page_state import PageState
from ringtune.costs.profile import LinkFacts, Profile
from ringtune.schedule.plan import Plan
from ringtune.v1 import control_pb2
from tests.support.fake_agents import facts, job
from tests.support.plans import make_plan
from tests.support.profiles import all_pairs, profile_of

RUN_ID = "r20260102-030405-0a1b2c3d"
PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"])
MEASURED = profile_of(PLAN, links=all_pairs("ab", 1e4, 0.01))
"""Nodes that take seconds, and links on which a hidden state does, too."""


def profile(nodes: Sequence[str] = ("a", "b")) -> Profile:
    """A profile of nodes in a ring, with a link from each to the next one."""
    after = [*nodes[1:], nodes[0]]
    links = [
        LinkFacts(source=one, target=two, rate_bytes_per_s=1e6, latency_s=0.001)
        for one, two in zip(nodes, after, strict=True)
    ]
    return Profile(nodes=tuple(facts(node) for node in nodes), links=tuple(links))


def beginning(
    plan: Plan = PLAN, *, run_id: str = RUN_ID, measured: Profile | None = None
) -> Iterator[control_pb2.RunEvent]:
    """The events of a run until it trains."""
    yield control_pb2.RunEvent(run_id=run_id)
    yield control_pb2.RunEvent(job_toml=job().to_toml())
    yield control_pb2.RunEvent(profile_json=json.dumps((measured or profile()).to_json()))
    yield control_pb2.RunEvent(plan_json=json.dumps(plan.to_json()))
    yield control_pb2.RunEvent(state="training")


def step_line(step: int, **changes: Any) -> dict[str, Any]:
    """The line of metrics of a step: its loss falls, a block more trains after each two steps."""
    line = {
        "kind": "train",
        "step": step,
        "round": 1,
        "initiator": "a",
        "depth": min(4, 1 + (step - 1) // 2),
        "loss": 1.0 + 1.0 / step,
        "accuracy": 0.5,
        "count": 4,
        "lr": 0.001,
        "seconds": 0.5,
        "bytes": {"a>b": 1000, "b>a": 10},
    }
    return {**line, **changes}


def metrics(line: dict[str, Any]) -> control_pb2.RunEvent:
    """A line of metrics as an event."""
    return control_pb2.RunEvent(metrics_json=json.dumps(line))


def progress(line: dict[str, Any]) -> control_pb2.RunEvent:
    """A step as it is told at once."""
    told = {key: value for key, value in line.items() if key not in ("seconds", "bytes")}
    return control_pb2.RunEvent(step_json=json.dumps({"seq": line["step"] - 1, "num_steps": 8, **told}))


def activity(step: int, nodes: Sequence[str] = ("a", "b")) -> control_pb2.RunEvent:
    """What nodes did in a turn that ends with a step: an embedding that ran ahead, each a forward and a backward."""
    spans = [[nodes[0], "E", 0, -1, 0, -20.0, 5.0]]
    spans += [[node, letter, 0, 0, 2, 10.0 * at, 5.0] for node in nodes for at, letter in enumerate("FB")]
    value = {
        "step": step,
        "initiator": nodes[0],
        "seconds": 1.0,
        "nodes": {node: [0.5, 0.25, 0.25] for node in nodes},
        "spans": spans,
        "waits": {node: {nodes[0]: 0.004, f"{nodes[0]}>": 0.001} for node in nodes[1:]},
        "left_out": 0,
    }
    return control_pb2.RunEvent(activity_json=json.dumps(value))


def state_of(events: Iterator[control_pb2.RunEvent] | Sequence[control_pb2.RunEvent]) -> PageState:
    """The state of a page that has heard these events."""
    state = PageState()
    for event in events:
        state.take(event, 1000.0)
    return state


def trained(steps: int = 8) -> Iterator[control_pb2.RunEvent]:
    """A whole run of some steps."""
    yield from beginning()
    for step in range(1, steps + 1):
        yield progress(step_line(step))
        yield metrics(step_line(step))
    yield activity(steps)
    yield control_pb2.RunEvent(done=True)
