"""Real processes on loopback give the result of one process, and decide what virtual ones decide."""

from __future__ import annotations

import dataclasses
import json
import operator
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.api.arguments import initial_file, with_initial_digest
from coordinator.run.run_text import is_step
from ringtune.job.job import Job
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.actions import Action, Op, Payload, op_of
from ringtune.schedule.operation_tables import ScheduledTable, tables_to_json
from ringtune.schedule.placement import Helper, Placement, Slice
from ringtune.schedule.plan import Plan
from tests.support.cluster import RING, Cluster, Outcome
from tests.support.recorded_ring import RecordedRing
from tests.support.replay import replay
from tests.support.results import datasets_of, largest_difference, reference_of, trained
from tests.support.stale_reference import train_stale

pytestmark = pytest.mark.slow
SETTLE_S = 90.0  # three times as long as a server keeps an idle worker


def assert_trained(ring: Cluster, job: Job, outcome: Outcome) -> list[float]:
    """Adapters and head are those of one process in float64; return its losses."""
    wanted = reference_of(ring, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    return wanted.losses


def losses_of(outcome: Outcome) -> list[float]:
    """The loss of each step."""
    return [line["loss"] for line in sorted(filter(is_step, outcome.metrics), key=lambda line: int(line["step"]))]


def commands_of(lines: list[str]) -> Iterator[tuple[str, list[Any]]]:
    """Each command of a recording with its fields, in order."""
    for line in lines[1:]:
        for name, *fields in json.loads(line)["commands"]:
            yield name, fields


def decisions_of(lines: list[str]) -> list[Action]:
    """What a recording's engine decided, in its order: actions, what it sent to whom, what it took in from whom."""
    found = []
    for name, fields in commands_of(lines):
        match name, fields:
            case "RunAction", [[letter, *rest]]:
                found.append(Action(op_of(letter), *rest))
            case "SendTensor" | "Accept", [[payload, seq, micro, boundary], peer]:
                op = Op.SEND if name == "SendTensor" else Op.RECEIVE
                found.append(Action(op, seq, micro, boundary, 0, peer, payload))
            case "SendHead" | "AcceptHead", [turn, peer]:
                op = Op.SEND if name == "SendHead" else Op.RECEIVE
                found.append(Action(op, 0, -1, turn, 0, peer, Payload.HEAD))
    return found


def versions_seen(decisions: list[Action]) -> Counter[tuple[Action, int, int]]:
    """Each action with each unit that it computes and how often that unit was updated before."""
    updates: Counter[int] = Counter()
    found: Counter[tuple[Action, int, int]] = Counter()
    for action in decisions:
        units = range(action.start, action.stop)
        if action.op is Op.UPDATE:
            updates.update(units)
        elif action.op not in (Op.SEND, Op.RECEIVE):
            found.update((action, unit, updates[unit]) for unit in units)
    return found


def updates_of(decisions: list[Action], head: int, *, apart: bool) -> list[list[Action]]:
    """The updates in their order; if ``apart``, those of the head and those of the slice each for themselves."""
    updates = [action for action in decisions if action.op is Op.UPDATE]
    assert updates
    if not apart:
        return [updates]
    return [[action for action in updates if (action.start == head) == is_head] for is_head in (True, False)]


def assert_decided(outcome: Outcome, *, apart: bool = False) -> None:
    """The engines give the recorded commands again, and decided all that the virtual ones do.

    The same actions and messages, each computed with the same versions of its units, and updates in the same order;
    the order of what does not depend on one another is timing's. In PipeAdapter an owner's head runs ahead of its own
    slice as far as timing lets it, so the updates of head and slice are compared apart there.
    """
    assert outcome.plan is not None
    virtual = RecordedRing(outcome.plan).run()
    for node in outcome.plan.nodes:
        lines = outcome.files[f"recordings/{node}.jsonl"].decode().splitlines()
        assert replay(lines, outcome.plan, node) == len(lines) - 1 > 0
        real, simulated = decisions_of(lines), virtual.order[node]
        assert Counter(real) == Counter(simulated)
        assert versions_seen(real) == versions_seen(simulated)
        head = outcome.plan.course.head
        assert updates_of(real, head, apart=apart) == updates_of(simulated, head, apart=apart)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.promise("5 timing changes nothing")
def test_ring_equals_one_process_and_decides_as_the_simulator_does(ring: Cluster) -> None:
    """Float64, two owners, unfreezing, hand-overs: equal to 1e-9, and each engine's decisions are the virtual ones."""
    job = ring.job(runtime__record=True)
    outcome = ring.run(job, plan=ring.plan_on(job, RING))
    assert losses_of(outcome) == pytest.approx(assert_trained(ring, job, outcome), abs=1e-9)
    assert_decided(outcome)


@pytest.mark.promise("2 right version")
def test_ring_of_pipeadapter_equals_its_rule_in_one_process(ring: Cluster) -> None:
    """Stale on purpose, on real processes: equal to the rule written out, with as many versions as it needs."""
    job = ring.job(
        train__method="pipeadapter",
        train__local_iterations=4,
        train__max_steps=9,
        train__checkpoint_every=4,
        runtime__record=True,
    )
    outcome = ring.run(job, plan=ring.plan_on(job, RING))
    assert outcome.plan is not None
    wanted, losses = train_stale(job, outcome.plan, ring.model, datasets_of(ring, job))
    assert largest_difference(trained(outcome), wanted) < 1e-9
    assert losses_of(outcome) == pytest.approx(losses, abs=1e-9)
    assert_decided(outcome, apart=True)
    stored = [outcome.report["nodes"][node]["peak_versions"] for node, *_ in RING]
    assert stored == [3, 2, 1]
    again = ring.run(job, Resume(plan=outcome.plan, manifests=(outcome.checkpoints[-2],)))
    assert again.resumed_at == 8
    assert largest_difference(trained(again), trained(outcome)) == 0.0, "a resumed run ends with the very bits"


@pytest.mark.promise("1 partition invariance")
def test_processes_move_twice_and_train_what_one_process_trains(ring: Cluster) -> None:
    """A host that comes new borrows the base weights and takes over what was trained; one that leaves only stops."""
    job = ring.job(train__local_iterations=2, train__eval_every=4, runtime__record=True)
    second, third = (("c", 0, 1), ("b", 1, 3), ("a", 3, 4)), (("b", 0, 4),)
    plan = ring.plan_on(job, (("a", 0, 2), ("b", 2, 4)), (2, second), (4, third))
    outcome = ring.run(job, plan=plan)
    assert_trained(ring, job, outcome)
    for node, count in {"a": 3, "b": 3, "c": 1}.items():  # an engine for each placement gives its commands again
        recording = outcome.files[f"recordings/{node}.jsonl"].decode().splitlines()
        assert sum(line.startswith('{"recording"') for line in recording) == count
        assert replay(recording, plan, node) > 10
    moves = outcome.of_kind("move")
    assert [(move["step"], move["placement_number"], move.get("problem")) for move in moves] == [
        (4, 1, None),
        (8, 2, None),
    ]
    assert all(move["seconds"] > 0 for move in moves) and sum(moves[1]["fetched_bytes"].values()) > 0
    numbers = {line["step"]: line["placement_number"] for line in outcome.metrics if is_step(line)}
    assert numbers == {step: (step - 1) // 4 for step in range(1, 13)}
    assert outcome.report["moves"][1]["placement_number"] == 2 and outcome.report["nodes"]["b"]["blocks"] == [0, 4]


@pytest.mark.promise("1 partition invariance")
def test_run_from_a_result_equals_one_process_from_it(ring: Cluster, tmp_path: Path) -> None:
    """Nodes fetch the values from the coordinator, again where they move; head and adapters begin from there."""
    first = ring.run(ring.job(train__max_steps=3))
    for name in ("adapter.safetensors", "adapter_config.json", "model_head.safetensors", "head_config.json"):
        (tmp_path / name).write_bytes(first.files[f"adapter/{name}"])
    job = with_initial_digest(ring.job(adapter__from=str(tmp_path), train__max_steps=6))
    plan = ring.plan_on(job, (("a", 0, 2), ("b", 2, 4)), (1, (("b", 0, 4),)))
    outcome = ring.follow(job, plan=plan, initial=initial_file(job, tmp_path)).wait()
    assert outcome.is_done, outcome.message
    assert losses_of(outcome) == pytest.approx(assert_trained(ring, job, outcome), abs=1e-9)
    assert "adapter.from: the head begins from there too" in outcome.notes
    assert [move["step"] for move in outcome.of_kind("move")] == [3]


@pytest.mark.promise("1 partition invariance")
def test_replicas_as_processes_equal_one_process(ring: Cluster) -> None:
    """Two owners, and a stage on two hosts."""
    job = ring.job()
    plan = ring.plan_on(job, (("a", 0, 1), ("b", 1, 4), ("c", 1, 4)))
    assert_trained(ring, job, ring.run(job, plan=plan))


def test_helper_process_gives_the_bits_of_the_run_without_it(ring: Cluster) -> None:
    """Losses, adapters and head are equal in every bit; what travelled is told by kind, and what c took."""
    job = ring.job(train__max_steps=8, offload__mode="auto")
    alone = job.with_overrides({"offload.mode": "off"})
    planned = ring.planned(alone).plan
    assert planned is not None
    slices = (Slice(node="a", start=0, stop=2), Slice(node="b", start=2, stop=4))
    helpers = tuple(Helper(node="c", start=start, stop=stop) for start, stop in ((0, 1), (1, 2), (2, 4)))
    course = dataclasses.replace(planned.course, offload=None)
    bare = ring.run(alone, plan=Plan.of(course, Placement(slices=slices)))
    found = ring.run(job, plan=Plan.of(course, Placement(slices=slices, helpers=helpers)))
    for name in ("adapter/adapter.safetensors", "adapter/model_head.safetensors"):
        assert found.files[name] == bare.files[name]
    assert losses_of(found) == losses_of(bare)

    links, pairs, weights = (found.report[name] for name in ("links", "pair_links", "helper_weight_links"))
    assert {link: links[link] for link in ("a>c", "b>c")} == pairs  # nothing else goes to c: no hidden states
    assert {link: links[link] for link in ("c>a", "c>b")} == weights
    assert min(pairs.values()) > max(weights.values()) > 0
    fitted = found.report["nodes"]["c"]
    assert 0 < fitted["fit_s"] <= fitted["busy_s"]
    assert fitted["peak_rss_bytes"] > 0 and fitted["blocks"] == [4, 4]
    assert 0 < fitted["hosted_bytes"] < found.report["nodes"]["b"]["hosted_bytes"] / 10  # adapters, no base weights
    assert found.report["offload"]["staleness"] == "none"


def test_ring_that_chooses_operations_is_repeated_with_its_tables(ring: Cluster) -> None:
    """Scores of real gradients: a run that is given the tables and scores nothing ends with the same bits.

    Two owners, turns of three steps, tables at 0 and 6.
    """

    def chosen(outcome: Outcome) -> list[tuple[int, str]]:
        return [(line["step"], line["digest"]) for line in outcome.of_kind("operations")]

    settings: dict[str, object] = {"policy": "two-stage", "heads": 2, "full": 1, "forward_only": 0}
    settings |= {"backward_score": "taylor", "refresh_rounds": 1}
    base = ring.job(train__max_steps=9)
    whole = ring.run(base.with_overrides({f"operations.{name}": value for name, value in settings.items()}))
    (_, first), (step, second) = chosen(whole)
    assert step == 6 and first != second, "the scores of the run change nothing"
    tables = tables_to_json([ScheduledTable.from_json(json.loads(text)) for text in whole.operations])
    given = ring.run(base.with_overrides({"operations.table": json.dumps(tables)}))
    assert chosen(given) == chosen(whole)
    assert largest_difference(trained(given), trained(whole)) == 0.0


def test_ring_agents_keep_nothing_of_a_run(ring: Cluster) -> None:
    """After run upon run an idle agent has the threads, connections and (nearly) the memory that it had before."""
    job = ring.job(train__max_steps=3)
    ring.run(job)
    before = {name: usage(ring, name) for name in ring.names}
    for _ in range(2):
        ring.run(job)
    for name in ring.names:
        threads, files, rss_bytes = before[name]
        # a server keeps a few idle workers, as many as calls once came at a time
        limits = (threads + 2, files, rss_bytes + (24 << 20))
        # gRPC closes sockets and ends workers a moment after the call that used them
        deadline_s = time.monotonic() + SETTLE_S
        while not all(map(operator.le, found := usage(ring, name), limits)):
            assert time.monotonic() < deadline_s, f"{name}: (threads, files, bytes) {found}, at most {limits}"
            time.sleep(0.05)


def usage(ring: Cluster, name: str) -> tuple[int, int, int]:
    """Threads, open files and resident bytes of an agent that has become idle."""
    ring.wait_idle(name)
    process = psutil.Process(ring.agents[name].pid)
    return process.num_threads(), process.num_fds(), process.memory_info().rss
