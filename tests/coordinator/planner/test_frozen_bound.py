"""A type of frozen weights that can't fit by its bytes alone is passed over without a search, and nothing else is."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from coordinator.planner.make_plan import make_plan
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.search import choose_plan
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError
from ringtune.job.job import Job
from tests.coordinator.planner.test_draft import LARGE
from tests.support.fake_agents import NO_TIMES, facts, job

BLOCK_BYTES = LARGE.block_bytes


class Counted:
    """How often plans were searched for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        monkeypatch.setattr("coordinator.planner.make_plan.choose_plan", self._count)

    def _count(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return choose_plan(*args, **kwargs)


def chosen(wanted: Job, nodes: dict[str, NodeFacts]) -> tuple[object, ...]:
    """The plan and why other types were passed over, or the refusal."""
    try:
        found = make_plan(wanted, nodes)
    except CapacityError as error:
        return (str(error),)
    assert found.choice is not None
    return found.plan, found.choice.too_large, found.memory_bytes


def ring(draw: random.Random) -> tuple[Job, dict[str, NodeFacts]]:
    """A job and nodes with room for about all, some, or none of the blocks; some own no rows."""
    num_nodes, num_blocks = draw.randint(1, 4), draw.randint(4, 8)
    model = dataclasses.replace(LARGE, num_blocks=num_blocks)
    each_bytes = num_blocks * BLOCK_BYTES / num_nodes
    nodes = {}
    for name in "abcd"[:num_nodes]:
        rows = 10 if name == "a" else draw.choice((0, 10))
        room = round(each_bytes * draw.uniform(0.1, 2.0)) + 1_000_000
        nodes[name] = facts(name, rows=rows, memory_bytes=room, model=model, **NO_TIMES)
    changes = {"privacy__private_blocks": draw.choice((0, 1)), "memory__activations": draw.choice(("none", "auto"))}
    method = draw.choice(("ringada", "all", "single")) if num_nodes == 1 else draw.choice(("ringada", "all"))
    return job(runtime__frozen="auto", train__method=method, **changes), nodes


@pytest.mark.thorough
def test_bound_never_changes_the_choice_and_searches_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many random rings plans, reasons and refusals are those of searching every type."""
    counted, bound = Counted(monkeypatch), MemoryCaps.may_fit
    rings, searches = [ring(random.Random(seed)) for seed in range(60)], []
    answers = []
    for rule in (bound, lambda _: True):
        monkeypatch.setattr(MemoryCaps, "may_fit", rule)
        before = counted.calls
        answers.append([chosen(*each) for each in rings])
        searches.append(counted.calls - before)
    assert answers[0] == answers[1]
    assert len({type(answer[0]) for answer in answers[0]}) == 2, "plans and refusals have to be among them"
    assert searches[0] < 0.7 * searches[1], searches


@pytest.mark.parametrize(("room", "searched"), [(2.0, 1), (0.75, 1), (0.4, 1), (0.1, 0)])
def test_type_that_can_not_fit_is_not_searched(room: float, searched: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for float32, bfloat16, int8 or for nothing: one search at most, and none for a remedy."""
    counted = Counted(monkeypatch)
    memory_bytes = round(room * BLOCK_BYTES * LARGE.num_blocks / 2) + 300_000
    nodes = {name: facts(name, memory_bytes=memory_bytes, model=LARGE, **NO_TIMES) for name in "ab"}
    found = chosen(job(runtime__frozen="auto", memory__activations="auto"), nodes)
    assert counted.calls == searched
    assert len(found) == (3 if searched else 1)


def test_smaller_settings_are_looked_for_only_where_the_last_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type that is passed over needs no remedy: nobody would read it."""
    asked: list[Job] = []

    def remedy(one: Job, _: object) -> str:
        asked.append(one)
        return ""

    monkeypatch.setattr("coordinator.planner.make_plan.memory_remedy", remedy)
    nodes = {name: facts(name, memory_bytes=6_000_000, model=LARGE, **NO_TIMES) for name in "ab"}
    assert len(chosen(job(runtime__frozen="auto"), nodes)) == 3
    assert asked == []
