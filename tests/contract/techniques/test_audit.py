"""Which work an audit draws, who repeats it, whom a comparison names, and how soon a wrong number is found."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest

from ringtune.errors import IntegrityError, JobError, PlanError
from ringtune.job.job import Job, Model
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn, turn_sequence
from ringtune.techniques.audit import (
    AuditSettings,
    Cell,
    Compared,
    Trail,
    cells,
    check_plan,
    checked_by,
    checker_of,
    detection,
    draw,
    exchanges,
    judge,
    keys_to_keep,
    micro_order,
    read_trail,
    sum_name,
    tensor_name,
    tolerance,
    way_of,
)
from tests.support.cases import cases
from tests.support.plans import make_plan

PLAN: Final = make_plan(
    [("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 4)],
    ["a", "b", "c", "d"],
    num_steps=4000,
    local_iterations=10,
    microbatches=4,
    method="all",
    train_rows=400,
)
SMALL: Final = make_plan([("a", 0, 2), ("b", 2, 4)], ["o"], microbatches=2, method="all", eval_rows=0)


def first_turn(plan: Plan) -> Turn:
    """The first turn of a plan."""
    return next(turn_sequence(plan.course))


def test_next_host_in_the_ring_repeats_the_work_of_each_host() -> None:
    """Never the host itself; a host that is alone has none, and an owner without blocks neither has nor does any."""
    assert [checker_of(PLAN.placement, node) for node in "abcd"] == ["b", "c", "d", "a"]
    assert [checked_by(PLAN.placement, node) for node in "abcd"] == ["d", "a", "b", "c"]
    assert checker_of(SMALL.placement, "o") == checked_by(SMALL.placement, "o") == ""
    alone = make_plan([("a", 0, 4)], ["o"])
    assert checker_of(alone.placement, "a") == "" and not draw(alone, first_turn(alone), 1.0, random.Random(0))


def test_cells_of_a_turn_are_those_whose_tensors_come_from_others() -> None:
    """Each micro-batch of each item, at each host; none at the owner of the rows, whose loss nobody can repeat."""
    turn = first_turn(SMALL)
    assert cells(SMALL, turn, "a") == (Cell("a", 0, 0), Cell("a", 0, 1), Cell("a", 1, 0), Cell("a", 1, 1))
    assert cells(SMALL, turn, "o") == () and cells(PLAN, first_turn(PLAN), "a") == ()
    cell = Cell("b", 1, 0)
    found = [(one.key, one.peer, one.comes) for one in exchanges(way_of(SMALL, turn, cell), cell)]
    assert found == [
        (TensorKey(Payload.HIDDEN, 1, 0, 2), "a", True),
        (TensorKey(Payload.HIDDEN, 1, 0, 4), "o", False),
        (TensorKey(Payload.GRAD, 1, 0, 4), "o", True),
        (TensorKey(Payload.GRAD, 1, 0, 2), "a", False),
    ]
    kept = keys_to_keep(SMALL, turn, (cell,))
    assert {node: len(keys) for node, keys in kept.items()} == {"a": 2, "o": 2}  # b is not told what is drawn of it


def test_share_of_the_cells_is_drawn_in_the_mean() -> None:
    """2 % of 40 cells are 0.8: none or one; all with share 1; a host's draws say nothing of those of another one."""
    turns = [turn for _, turn in zip(range(400), turn_sequence(PLAN.course), strict=False)]
    source = random.Random(1)
    counts = [
        [cell for cell in draw(PLAN, turn, 0.02, source) if cell.node == "b"] for turn in turns if turn.owner != "b"
    ]
    assert {len(found) for found in counts} == {0, 1}
    assert sum(map(len, counts)) / len(counts) == pytest.approx(0.8, abs=0.05)
    assert {cell.micro for found in counts for cell in found} == {0, 1, 2, 3}
    assert len(draw(SMALL, first_turn(SMALL), 1.0, source)) == 8
    drawn = [
        {(cell.seq, cell.micro): 0 for cell in draw(PLAN, turn, 0.02, source) if cell.node in "bc"} for turn in turns
    ]
    pairs = [tuple(found) for found in drawn if len(found) == 2]
    assert len(pairs) > 100  # b and c at once, seldom the same cell: that would be one entry


def found_after(rng: random.Random, share: float, wrong: float) -> int:
    """Turns until a host is found whose updates are wrong in part of its turns, by what is drawn."""
    for count, turn in enumerate(turn_sequence(PLAN.course), start=1):
        if rng.random() < wrong and any(cell.node == "b" for cell in draw(PLAN, turn, share, rng)):
            return count
    return 1 << 30


def test_host_with_wrong_updates_in_a_twentieth_of_its_turns_is_found_within_100_turns() -> None:
    """100 simulated runs with five wrong turns of other owners each; and wrong turns that are drawn by lot.

    Of 100 turns 5 are wrong in the mean, and a quarter of them the host's own, in which nobody checks it.
    """
    rng = random.Random(3)
    assert detection(0.02, 40, 5) > 0.99 > detection(0.02, 40, 2)
    runs = [sum(any(cell.node == "b" for cell in draw(PLAN, turn, 0.02, rng)) for turn in five) for five in fives(rng)]
    assert sum(found > 0 for found in runs) >= 99
    soon = [found_after(rng, 0.02, 0.05) for _ in range(20)]
    assert sorted(soon)[10] < 60


def fives(rng: random.Random) -> list[list[Turn]]:
    """Five turns of others than b for each of 100 runs."""
    turns = [turn for turn in turn_sequence(PLAN.course) if turn.owner != "b"][:100]
    return [rng.sample(turns, 5) for _ in range(100)]


CELL: Final = Cell("b", 1, 0)
IN: Final = tensor_name(TensorKey(Payload.HIDDEN, 1, 0, 2))
OUT: Final = tensor_name(TensorKey(Payload.GRAD, 1, 0, 2))
SUM: Final = sum_name(1, 0)
TRAILS: Final[dict[str, Trail]] = {"a": {IN: "x", OUT: "y"}, "b": {IN: "x", OUT: "y", SUM: "s"}}
RESULTS: Final = {IN: Compared("x"), OUT: Compared("y", "y"), SUM: Compared("s", "s")}


@cases(
    ["trails", "results", "permitted", "named"],
    [
        ({}, {}, 0.0, None),
        ({}, {SUM: Compared("s", "t", 1e-3)}, 0.0, ("b",)),  # computed_otherwise
        ({}, {SUM: Compared("s", "t", 1e-6)}, 2e-5, None),  # within_what_classes_differ
        ({}, {SUM: Compared("s", "t", 1e-3)}, 2e-5, ("b",)),  # beyond_what_classes_differ
        ({}, {SUM: Compared("s", "t", float("nan"))}, 2e-5, ("b",)),  # not_a_number
        ({}, {OUT: Compared("y", "z", 1e-3)}, 0.0, ("b",)),  # sends_another_gradient
        ({}, {SUM: Compared("r", "r")}, 0.0, ("b",)),  # hands_in_another_sum
        ({}, {IN: Compared("w")}, 0.0, ("a",)),  # neighbour_hands_in_another_tensor
        ({"a": {IN: "w", OUT: "y"}}, {}, 0.0, ("b", "a")),  # both_ends_of_a_link_differ
        ({"b": {}}, {}, 0.0, ("b", "a")),  # no_trail
    ],
)
def test_comparison_names_the_node(
    trails: dict[str, Trail], results: dict[str, Compared], permitted: float, named: Any
) -> None:
    """One node, or the two ends of a link of which one lies; what two classes of machines round apart names nobody."""
    found = judge(CELL, {IN: "a", OUT: "a"}, TRAILS | trails, RESULTS | results, permitted)
    assert (found and found.nodes) == named


def test_tolerance_is_zero_within_a_class() -> None:
    """Equal bits on nodes of one class with equally many threads."""
    assert tolerance("float32", ("cpu", 2), ("cpu", 2)) == 0.0
    assert 0 < tolerance("float32", ("cpu", 2), ("cpu", 1)) < 1e-4
    assert tolerance("float64", ("cpu", 2), ("cuda", 2)) < 1e-9


def test_trail_is_read_strictly() -> None:
    """Names to digests, in their order; anything else is refused."""
    assert micro_order(read_trail('{"sum 1.1": "a", "sum 1.0": "b", "sum 11.0": "c"}', "a"), 1) == (1, 0)
    for text in (
        "[",
        "[]",
        '{"a": 1}',
        '{"a": "' + "f" * 65 + '"}',
        "[" * 100_000,
        '{"sum 1.x": "a"}',
        '{"sum 1.9999999999": "a"}',
    ):
        with pytest.raises(IntegrityError, match="node a"):
            read_trail(text, "a")


def job(**keys: object) -> Job:
    """A job with an audit."""
    names = {name.replace("__", "."): value for name, value in keys.items()}
    return Job(model=Model(path="m")).with_overrides({"audit.share": 0.1, **names})


@cases(
    ["keys", "remedy"],
    [
        ({"recovery__copies": "none"}, "recovery.copies"),  # copies
        ({"offload__mode": "auto"}, "offload.mode = 'off'"),  # helpers
        ({"operations__policy": "two-stage"}, "operations.policy"),  # operations
        ({"cache__prefix": "auto"}, "cache.prefix"),  # cache
        ({"memory__activations": "velora"}, "memory.activations"),  # velora
        ({"wire__dtype": "int8"}, "wire.dtype"),  # wire
        ({"audit__share": 0.0}, "audit.share"),
    ],
)
def test_audit_of_what_cannot_be_repeated_is_refused(keys: dict[str, object], remedy: str) -> None:
    """With the key to change."""
    with pytest.raises(JobError, match=remedy):
        job(**keys)


def test_job_without_audit_has_no_section() -> None:
    """It is written as before; with one the share has a default."""
    assert "audit" not in Job(model=Model(path="m")).to_toml()
    assert AuditSettings().share == 0.02 and job().audit == AuditSettings(share=0.1)


def test_plan_with_replicas_is_refused_and_none_is_made() -> None:
    """Sums of several hosts are no work of one."""
    plan = make_plan([("a", 0, 2), ("b", 0, 2), ("c", 2, 4)], ["a"], method="all")
    with pytest.raises(PlanError, match="replicas"):
        check_plan(job(), plan)
    check_plan(job(), PLAN)
    assert not job().may_have_replicas and Job(model=Model(path="m")).may_have_replicas
