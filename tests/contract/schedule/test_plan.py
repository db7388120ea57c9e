"""The plan as a value: rules, JSON form, digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import PlanError
from ringtune.schedule.plan import Owner, Phase, Plan, Slice
from tests.support.plans import make_plan, random_plan

SLICES = [("a", 0, 2), ("b", 2, 4)]


def test_plan_nodes_are_hosts_in_ring_order_then_other_owners() -> None:
    """An owner that hosts nothing comes after the ring."""
    plan = make_plan([("b", 0, 2), ("a", 2, 4)], ["c", "a"])
    assert plan.nodes == ("b", "a", "c")


def test_plan_slice_of_a_node_without_blocks_is_empty() -> None:
    """An owner that hosts nothing has an empty slice, so nobody needs a special case."""
    plan = make_plan(SLICES, ["c"])
    assert plan.slice_of("b") == Slice(node="b", start=2, stop=4)
    assert plan.slice_of("c").num_blocks == 0
    assert plan.owner("a") is None
    assert plan.owner("c") == Owner(node="c", train_rows=10, eval_rows=3)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(None, (4, 4, 4, 4)), (16, (4, 4, 4, 4)), (7, (2, 2, 2, 1)), (4, (1, 1, 1, 1)), (3, (1, 1, 1)), (1, (1,))],
)
def test_plan_microbatches_share_rows_evenly(rows: int | None, sizes: tuple[int, ...]) -> None:
    """The first micro-batches take the remainder; a very short batch has fewer of them."""
    assert make_plan(SLICES, ["a"], batch_size=16, microbatches=4).microbatch_sizes(rows) == sizes


@given(batch=st.integers(1, 64), parts=st.integers(1, 64), rows=st.integers(1, 64))
def test_plan_microbatches_cover_every_batch(batch: int, parts: int, rows: int) -> None:
    """Sizes add up, differ by one at most, descend, and none is empty."""
    plan = make_plan(SLICES, ["a"], batch_size=batch, microbatches=min(parts, batch))
    rows = min(rows, batch)
    sizes = plan.microbatch_sizes(rows)
    assert sum(sizes) == rows
    assert min(sizes) >= max(1, max(sizes) - 1)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert len(sizes) == min(plan.microbatches, rows)


@pytest.mark.parametrize(("rows", "batches"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_plan_eval_batches_count_a_short_last_one(rows: int, batches: int) -> None:
    """Evaluation passes every row once."""
    plan = make_plan(SLICES, ["a"], eval_rows=rows)
    assert plan.eval_batches(plan.owners[0]) == batches


def test_plan_digest_is_that_of_the_written_form() -> None:
    """A plan keeps its digest through JSON text."""
    plan = make_plan(SLICES, ["c", "a"], private_blocks=0)
    text = json.dumps(plan.to_json())
    assert Plan.from_json(json.loads(text)) == plan
    assert Plan.from_json(json.loads(text)).digest == plan.digest
    assert len(plan.digest) == 64


@pytest.mark.parametrize("seed", range(40))
def test_plan_of_any_shape_survives_json(seed: int) -> None:
    """Whatever the shape of the run, reading what was written gives an equal plan."""
    plan = random_plan(random.Random(seed))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


OTHER: dict[str, Any] = {
    "method": "all",
    "num_blocks": 5,
    "num_steps": 9,
    "local_iterations": 3,
    "every_steps": 3,
    "batch_size": 5,
    "microbatches": 3,
    "max_length": 17,
    "hidden_size": 33,
    "eval_every": 1,
    "checkpoint_every": 1,
    "credits": 3,
    "wire_dtype": "int8",
    "private_blocks": 1,
    "labels": ("neg",),
    "seed": 1,
    "unfreeze": "auto",
    "unfreeze_at": (3,),
    "patience_steps": 21,
    "min_improvement": 0.0,
    "owners": (Owner(node="b", train_rows=10, eval_rows=3), Owner(node="a", train_rows=10, eval_rows=3)),
    "phases": (Phase(slices=(Slice(node="a", start=0, stop=1), Slice(node="b", start=1, stop=4))),),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Plan)])
def test_plan_digest_changes_with_every_field(name: str) -> None:
    """Two parties with equal digests agree on everything."""
    plan = make_plan(SLICES, ["a", "b"])
    changes = {name: OTHER[name]}
    if name == "num_blocks":
        changes["phases"] = (Phase(slices=(Slice(node="a", start=0, stop=2), Slice(node="b", start=2, stop=5))),)
    if name == "private_blocks":
        changes["phases"] = (Phase(slices=(Slice(node="a", start=1, stop=2), Slice(node="b", start=2, stop=4))),)
    if name == "unfreeze_at":
        plan = dataclasses.replace(plan, unfreeze="at")
    assert dataclasses.replace(plan, **changes).digest != plan.digest


def test_plan_of_an_older_version_keeps_its_digest() -> None:
    """A plan that was written before there were other ways to unfreeze reads, with the digest it had."""
    written = make_plan(SLICES, ["a", "b"]).to_json()
    for name in ("unfreeze", "unfreeze_at", "patience_steps", "min_improvement"):
        del written[name]
    fields = {name: value for name, value in written.items() if name != "digest"}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    assert Plan.from_json({**fields, "digest": digest}) == make_plan(SLICES, ["a", "b"])


def test_plan_unfrozen_at_is_the_plan_with_those_steps() -> None:
    """Under auto a turn's decisions make a plan of the form ``at``; equal decisions give one object."""
    plan = make_plan(SLICES, ["a"], unfreeze="auto")
    assert plan.unfrozen_at(()) is plan
    assert plan.unfrozen_at((4, 8)) == make_plan(SLICES, ["a"], unfreeze="at", unfreeze_at=(4, 8))
    assert plan.unfrozen_at((4, 8)) is plan.unfrozen_at((4, 8))


@pytest.mark.parametrize("changes", [{}, {"unfreeze": "at"}, {"unfreeze": "auto", "method": "all"}])
def test_plan_that_settles_unfreezing_refuses_decisions_of_a_turn(changes: dict[str, Any]) -> None:
    """A turn can't overrule the plan."""
    with pytest.raises(PlanError, match="the plan settles that itself"):
        make_plan(SLICES, ["a"], **changes).unfrozen_at((4,))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([("a", 0, 2), ("b", 3, 4)], "gap before block 3 of node b: expected block 2"),
        ([("a", 0, 2), ("b", 1, 4)], "overlap before block 1 of node b: expected block 2"),
        ([("a", 1, 2), ("b", 2, 4)], "gap before block 1 of node a: expected block 0"),
        ([("a", 0, 2), ("b", 2, 3)], "blocks [3, 4) have no host"),
        ([("a", 0, 2), ("b", 2, 6)], "node b hosts [2, 6), the model has 4 blocks"),
        ([("a", 0, 2), ("b", 2, 1)], "node b has the reversed range [2, 1)"),
        ([("a", 0, 2), ("a", 2, 4)], "a node hosts more than one slice: ['a', 'a']"),
        ([], "blocks [0, 4) have no host"),
    ],
)
def test_plan_refuses_slices_that_do_not_cover_the_model(slices: list[tuple[str, int, int]], message: str) -> None:
    """Each block has one host, in ring order."""
    with pytest.raises(PlanError) as caught:
        make_plan(slices, ["a"])
    assert str(caught.value) == message


def test_plan_allows_empty_slices_anywhere() -> None:
    """A node in the ring may host nothing."""
    plan = make_plan([("a", 0, 0), ("b", 0, 4), ("c", 4, 4)], ["a"])
    assert [piece.num_blocks for piece in plan.slices] == [0, 4, 0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("method", "magic", "method 'magic' is not one of ringada, all, pipeadapter, single"),
        ("wire_dtype", "int4", "wire dtype 'int4' is not one of"),
        ("num_steps", -1, "num_steps is -1, it has to be at least 0"),
        ("local_iterations", 0, "local_iterations is 0"),
        ("every_steps", 0, "every_steps is 0"),
        ("microbatches", 0, "microbatches is 0"),
        ("microbatches", 5, "5 micro-batches do not fit a batch of 4 rows"),
        ("credits", 0, "credits is 0"),
        ("max_length", 0, "max_length is 0"),
        ("hidden_size", -1, "hidden_size is -1"),
        ("eval_every", -1, "eval_every is -1"),
        ("checkpoint_every", -1, "checkpoint_every is -1"),
        ("private_blocks", 4, "private_blocks is 4, it has to be in [0, 4)"),
        ("private_blocks", -1, "private_blocks is -1"),
        ("owners", (), "owners have to be at least one and distinct, not []"),
        ("owners", (Owner(node="a", train_rows=0),), "owner a has no rows"),
        ("owners", (Owner(node="a", train_rows=1, eval_rows=-1),), "owner a has -1 evaluation rows"),
        ("owners", (Owner(node="a", train_rows=1), Owner(node="a", train_rows=2)), "distinct, not ['a', 'a']"),
        ("unfreeze", "never", "unfreeze 'never' is not one of every, at, auto"),
        ("unfreeze_at", (3,), "unfreeze_at is [3], it has to be empty where unfreeze is 'every'"),
        ("patience_steps", 0, "patience_steps is 0"),
        ("min_improvement", -0.1, "min_improvement is -0.1, it has to be in [0, 1)"),
        ("min_improvement", 1.0, "min_improvement is 1.0"),
        ("phases", (), "exactly one phase for now, this one has 0"),
        ("phases", (Phase(slices=()), Phase(slices=())), "this one has 2"),
    ],
)
def test_plan_refuses_values_out_of_range(field: str, value: object, message: str) -> None:
    """A plan that breaks a rule does not exist."""
    with pytest.raises(PlanError) as caught:
        dataclasses.replace(make_plan(SLICES, ["a"]), **{field: value})  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize("steps", [(0,), (-1, 2), (2, 2), (3, 2)])
def test_plan_refuses_unfreezing_steps_out_of_order(steps: tuple[int, ...]) -> None:
    """The top block trains from step 0; each further one begins later than the one above it."""
    with pytest.raises(PlanError, match="above 0 and strictly increasing"):
        make_plan(SLICES, ["a"], unfreeze="at", unfreeze_at=steps)


def test_plan_refuses_more_unfreezing_steps_than_blocks() -> None:
    """A step at which nothing is left to unfreeze would be ignored; private blocks stay frozen."""
    make_plan(SLICES, ["a"], unfreeze="at", unfreeze_at=(1, 2, 3))
    with pytest.raises(PlanError, match="4 steps, but of 4 blocks no more than 3 can be unfrozen"):
        make_plan(SLICES, ["a"], unfreeze="at", unfreeze_at=(1, 2, 3, 4))
    with pytest.raises(PlanError, match="3 steps, but of 4 blocks, 1 of them private, no more than 2"):
        make_plan([("a", 1, 4)], ["a"], private_blocks=1, unfreeze="at", unfreeze_at=(1, 2, 3))


def _tamper(value: dict[str, Any], path: str, new: object) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(value))
    at: Any = copy
    *parents, last = path.split(".")
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at[last] = new
    return copy


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", 7, "digest does not match"),
        ("owners.0.train_rows", 11, "digest does not match"),
        ("digest", "0" * 64, "digest does not match"),
        ("num_steps", "8", "num_steps has to be a whole number, but is the text '8'"),
        ("num_steps", 8.0, "num_steps has to be a whole number, but is the number 8.0"),
        ("labels", "ab", "labels has to be a list"),
        ("owners.0.rows", 3, "unknown key 'owners[0].rows'; did you mean 'eval_rows'?"),
        ("phases.0.slices.1.stop", None, "phases[0].slices[1].stop has to be a whole number, but is nothing"),
        ("num_step", 3, "unknown key 'num_step'; did you mean 'num_steps'?"),
    ],
)
def test_plan_that_was_tampered_with_is_refused(path: str, value: object, message: str) -> None:
    """Reading is strict, and the digest covers what reading cannot see."""
    written = make_plan(SLICES, ["a"]).to_json()
    with pytest.raises(PlanError) as caught:
        Plan.from_json(_tamper(written, path, value))
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [[], "plan", None, {}])
def test_plan_refuses_what_is_no_plan(value: Any) -> None:
    """Whatever arrives in place of a plan is an error of the tree."""
    with pytest.raises(PlanError):
        Plan.from_json(value)
