"""Questions of the sliders: checked, one at a time, with a deadline, and remembered; and what the simulator answers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from coordinator.web.page_state import PageState
from coordinator.web.predictor import answer
from coordinator.web.what_if import MAX_WAITING, SimulatorProcess, check_question, measured_s
from ringtune.costs.memory_sizes import MemorySettings
from ringtune.costs.profile import LinkFacts, Profile
from ringtune.errors import BusyError, DeadlineError, RingTuneError, UsageError, needed
from sim.prediction import memory_bounds
from tests.support import profiles
from tests.support.page_runs import PLAN, metrics, state_of, step_line, trained
from tests.support.plans import make_plan

ECHO = (
    sys.executable,
    "-c",
    "import sys, json\nfor line in sys.stdin: print(json.dumps({'steps': json.loads(line)['steps']}), flush=True)",
)
SILENT = (sys.executable, "-c", "import sys\nfor line in sys.stdin: pass")
GONE = (sys.executable, "-c", "")


def asked(test: Callable[[SimulatorProcess], Awaitable[Any]], command: tuple[str, ...], **options: Any) -> Any:
    """What a test returns that asks about a run that is done."""

    async def run() -> Any:
        asking = SimulatorProcess(state_of(trained()), command=command, **options)
        try:
            return await test(asking)
        finally:
            await asking.close()

    return asyncio.run(run())


def test_check_question_refuses() -> None:
    """Whatever is no factor in range, or no whole number; the message says what is expected."""
    rows: list[object] = [
        None,
        [],
        "x",
        {"unknown": 1},
        {"speeds": 1},
        {"speeds": {"a": "2"}},
        {"speeds": {"a": True}},
        {"speeds": {"a": float("nan")}},
        {"speeds": {"a": 0}},
        {"rates": {"a>b": 1e9}},
        {"rates": {"a>b": 10**400}},
        {"rates": {"x" * 300: 2}},
        {"speeds": {str(index): 2 for index in range(17)}},
        {"microbatches": -1},
        {"microbatches": 1.5},
        {"microbatches": True},
    ]
    for value in rows:
        with pytest.raises(UsageError):
            check_question(value)


def test_check_question_leaves_out_what_changes_nothing() -> None:
    """So that equal questions are equal."""
    assert check_question({"speeds": {"a": 1, "b": 2}}) == {"speeds": {"b": 2.0}, "rates": {}, "microbatches": 0}


def test_asking_remembers_answers() -> None:
    """A slider that goes back and forth asks once; what was measured stands beside."""

    async def test(asking: SimulatorProcess) -> list[dict[str, Any]]:
        first = await asking.ask({})
        await asking.close()
        asking._command = GONE
        return [first, await asking.ask({})]

    assert asked(test, ECHO) == [{"steps": 8, "measured_s": 4.0}] * 2


def test_asking_passes_on_why_the_simulator_has_no_answer() -> None:
    """Such an answer has no steps to measure."""
    refusal = (
        *ECHO[:2],
        "import sys, json\nfor line in sys.stdin: print(json.dumps({'error': 'no room'}), flush=True)",
    )

    async def test(asking: SimulatorProcess) -> dict[str, Any]:
        return await asking.ask({})

    assert asked(test, refusal) == {"error": "no room"}


def test_asking_has_a_deadline() -> None:
    """The process that did not answer is ended, and the next question gets a new one."""

    async def test(asking: SimulatorProcess) -> dict[str, Any]:
        with pytest.raises(DeadlineError, match="has not answered"):
            await asking.ask({})
        asking._command, asking._deadline_s = ECHO, 30.0
        return await asking.ask({})

    assert asked(test, SILENT, deadline_s=0.2)["steps"] == 8


def test_asking_says_when_the_simulator_has_ended() -> None:
    """And does not wait for the deadline."""

    async def test(asking: SimulatorProcess) -> None:
        with pytest.raises(RingTuneError, match="has ended"):
            await asking.ask({})

    asked(test, GONE)


def test_asking_lets_few_wait() -> None:
    """Many questions at once are not queued without end."""

    async def test(asking: SimulatorProcess) -> list[type]:
        questions = [asking.ask({"speeds": {"a": 2 + index}}) for index in range(MAX_WAITING + 3)]
        return [type(found) for found in await asyncio.gather(*questions, return_exceptions=True)]

    found = asked(test, ECHO)
    assert found.count(BusyError) == 3
    assert found.count(dict) == MAX_WAITING


def test_asking_needs_a_plan() -> None:
    """Before there is one it says so."""

    async def run() -> None:
        with pytest.raises(UsageError, match="no plan with measured times yet"):
            await SimulatorProcess(PageState()).ask({})

    asyncio.run(run())


def test_measured_seconds_of_some_steps() -> None:
    """The sum of their seconds; none before they are done, and none of a run that went on from a checkpoint."""
    state = state_of(trained(8))
    assert [measured_s(state, steps) for steps in (1, 8, 9)] == [0.5, 4.0, None]
    resumed = PageState()
    resumed.take(metrics(step_line(5)), None)
    assert measured_s(resumed, 5) is None
    # They grow evenly
    state = PageState()
    for step in range(1, 5001):
        state.take(metrics(step_line(step)), None)
    assert measured_s(state, 2503) == pytest.approx(2503 * 0.5)


def measured() -> Profile:
    """Nodes that take seconds, and links on which a hidden state does, too."""
    pairs = (("a", "b"), ("b", "a"))
    links = tuple(LinkFacts(source=one, target=two, rate_bytes_per_s=1e4, latency_s=0.01) for one, two in pairs)
    return Profile(nodes=tuple(profiles.node(PLAN, name) for name in ("a", "b")), links=links)


def question(**changes: Any) -> dict[str, Any]:
    """A question about the small run."""
    texts = {"plan": json.dumps(PLAN.to_json()), "profile": json.dumps(measured().to_json())}
    return {
        **texts,
        "settings": {},
        "steps": 0,
        "speeds": {},
        "rates": {},
        "microbatches": 0,
        **changes,
    }


def test_predictor_compares_whole_turns_with_and_without_changes() -> None:
    """Without a change twice the same seconds, for all steps."""
    found = answer(question())
    assert found["steps"] == 8
    assert found["before_s"] == found["after_s"] > 0
    # Each change alone, and both together more
    after_s = [
        answer(question(**changes))["after_s"]
        for changes in (
            {},
            {"rates": {"a>b": 0.1}},
            {"speeds": {"a": 0.1}},
            {"rates": {"a>b": 0.1}, "speeds": {"a": 0.1}},
        )
    ]
    assert after_s[0] < after_s[1] < after_s[3]
    assert after_s[0] < after_s[2] < after_s[3]
    # Of five steps that are done with turns of two: four; and the whole run beside
    found = answer(question(steps=5))
    assert found["steps"] == 4
    assert found["whole_before_s"] > found["before_s"]
    # Another number of them is another pipeline
    found = answer(question(microbatches=1))
    assert found["after_s"] != found["before_s"]
    # A hundred thousand steps are predicted by their first ones
    long = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=100_000, every_steps=1000, local_iterations=50)
    found = answer(question(plan=json.dumps(long.to_json()), steps=400))
    assert found["steps"] == 400
    assert "whole_before_s" not in found


def test_predictor_says_what_makes_no_sense() -> None:
    """As an answer, not by ending."""
    rows: list[tuple[dict[str, Any], str]] = [
        ({"speeds": {"zz": 2.0}}, "no node 'zz'"),
        ({"rates": {"b>zz": 2.0}}, "was not measured"),
        ({"microbatches": 99}, "micro-batches do not fit"),
    ]
    for changes, message in rows:
        assert message in answer(question(**changes))["error"]


def test_predictor_counts_the_memory_of_an_audit() -> None:
    """Nodes with room for their parts alone have none for what an audited run keeps and repeats."""
    state = state_of(trained())
    job = needed(state.job, "a run has a job").with_overrides({"recovery.copies": "next"})
    bounds = memory_bounds(PLAN, measured(), MemorySettings.of_job(job))
    tight = tuple(dataclasses.replace(node, memory_bytes=bounds[node.node].total_bytes) for node in measured().nodes)
    state.profile = dataclasses.replace(measured(), nodes=tight)
    errors = []
    for changes in ({}, {"audit.share": 0.5}):
        state.job = job.with_overrides(changes)
        errors.append(answer({**check_question({}), **SimulatorProcess(state)._of_run()}).get("error", ""))
    assert errors[0] == ""
    assert re.search("node a needs .* but has", errors[1])
