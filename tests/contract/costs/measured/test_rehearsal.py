"""The rehearsal of a job: its steps, and the nodes that had no part in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from ringtune.costs.measured.rehearsal import SKIPPED_ITEMS, rehearsal_of, rehearsal_steps, rehearsed
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.costs.work_times import Work, WorkTable, WorkTime
from ringtune.jobs.job import Job, Model, Privacy, Train, Unfreeze
from ringtune.jobs.operations.settings import OperationsSettings
from ringtune.schedule.methods import method_names
from ringtune.schedule.turns.versions import depth
from tests.support.plans import make_plan
from tests.support.profiles import profile_of

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b", "c"], num_blocks=4)


def slower(node: NodeFacts, ratio: float) -> NodeFacts:
    """A node whose blocks take longer."""
    points = tuple(
        dataclasses.replace(point, median_s=point.median_s * ratio, high_s=point.high_s * ratio)
        if point.work == Work.FORWARD
        else point
        for point in node.work_times
    )
    return dataclasses.replace(node, work_times=points)


def forward_s(node: NodeFacts) -> float:
    """Seconds of a forward of 32 padded tokens."""
    return WorkTable(node.work_times, where=node.node).seconds(Work.FORWARD, 32)


@pytest.mark.parametrize(("num_blocks", "private_blocks"), [(1, 0), (6, 0), (24, 0), (6, 2), (6, 5)])
def test_rehearsal_sees_every_depth(num_blocks: int, private_blocks: int) -> None:
    """The head alone, each depth, and all blocks that may train have steps that count, before the rehearsal is stopped.

    Private blocks never train.
    """
    job = Job(
        model=Model(path="m"), train=Train(rounds=50), unfreeze=Unfreeze(at="auto"),
        privacy=Privacy(private_blocks=private_blocks),
    )  # fmt: skip
    short = rehearsal_of(job, num_blocks)
    assert short.unfreeze is not None and short.train.max_steps is not None and isinstance(short.unfreeze.at, tuple)
    course = make_plan(
        [("a", private_blocks, num_blocks)], ["a"], num_blocks=num_blocks, num_steps=short.train.max_steps,
        unfreeze="at", unfreeze_at=short.unfreeze.at, private_blocks=private_blocks,
    ).course  # fmt: skip
    steps = rehearsal_steps(job, num_blocks)
    seen, most = [depth(course, step) for step in range(SKIPPED_ITEMS, steps)], num_blocks - private_blocks
    assert set(seen) == set(range(1, most + 1))
    assert seen.count(1) >= 6 and seen.count(most) >= 14
    assert short.train.max_steps > steps, "it is stopped before it evaluates"


@pytest.mark.parametrize("method", method_names())
def test_rehearsal_saves_and_evaluates_nothing(method: str) -> None:
    """Whatever the job says of checkpoints and evaluations; the work itself is that of the job."""
    train = {"method": method, "eval_every": 3, "checkpoint_every": 5, "local_iterations": 2}
    job = Job.from_tables({"model": {"path": "m"}, "train": train})
    short = rehearsal_of(job, 6)
    assert (short.train.eval_every, short.train.checkpoint_every, short.train.local_iterations) == (0, 0, 2)
    kept = ("method", "optimizer", "batch_size", "microbatches", "max_length", "dropout")
    assert all(getattr(short.train, name) == getattr(job.train, name) for name in kept)


def test_rehearsed_corrects_nodes_that_hosted_nothing_as_the_others() -> None:
    """Two nodes took twice and three times as long as measured; the third, which had no part, is between them."""
    before = profile_of(PLAN)
    a, b, c = before.nodes
    after = dataclasses.replace(before, nodes=(slower(a, 2.0), slower(b, 3.0), c))
    found = rehearsed(before, after)
    assert found.nodes[:2] == after.nodes[:2]
    assert forward_s(found.nodes[2]) == pytest.approx(2.5 * forward_s(c))
    assert found.nodes[2].block_forward_s == pytest.approx(2.5 * c.block_forward_s)


def test_rehearsed_looks_up_each_node_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each work of each node: a table sorts all points."""
    before = profile_of(PLAN)
    made: list[str] = []

    def table(points: Iterable[WorkTime], *, where: str) -> WorkTable:
        made.append(where)
        return WorkTable(points, where=where)

    monkeypatch.setattr("ringtune.costs.measured.rehearsal.WorkTable", table)
    rehearsed(before, dataclasses.replace(before, nodes=tuple(slower(node, 2.0) for node in before.nodes)))
    assert made == ["node a", "node b", "node c"]


def test_rehearsed_leaves_a_profile_that_nothing_corrected() -> None:
    """A rehearsal that recorded too little changes nothing."""
    before: Profile = profile_of(PLAN)
    assert rehearsed(before, before) == before


def test_rehearsal_runs_whole_blocks() -> None:
    """No scores are gathered for a run that is thrown away; times of parts follow those of whole blocks."""
    operations = OperationsSettings(policy="two-stage", compute=0.6, heads=2, refresh_rounds=3)
    job = Job(model=Model(path="m"), train=Train(rounds=50, microbatches=5, batch_size=5), operations=operations)
    assert rehearsal_of(job, 4).operations == OperationsSettings()
