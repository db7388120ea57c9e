"""From facts to a plan, and what is refused on the way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.planner.make_plan import make_plan
from ringtune.costs.links import with_assumed
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError, DataError, ModelError, PlanError
from ringtune.job.job import Job
from ringtune.schedule.plan import Plan
from tests.support.fake_agents import MODEL, facts, job


def plan_for(wanted: Job, *nodes: NodeFacts) -> Plan:
    """The plan for these nodes."""
    return make_plan(wanted, {node.node: node for node in nodes}).plan


def slices(plan: Plan) -> dict[str, tuple[int, int]]:
    """Blocks by node."""
    return {piece.node: (piece.start, piece.stop) for piece in plan.placement.slices}


def test_plan_orders_ring_and_owners_by_name() -> None:
    """Hosts and owners come in the order of their names, whatever the order of the answers."""
    plan = plan_for(job(), facts("c"), facts("a"), facts("b", rows=0))
    assert [piece.node for piece in plan.placement.slices] == ["a", "b", "c"]
    assert [owner.node for owner in plan.course.owners] == ["a", "c"]
    assert plan.course.num_steps == 2 * 2 * 2


def test_plan_of_images_counts_the_tokens_that_an_image_has() -> None:
    """All rows are alike: what a job says about the longest text changes nothing, be it more tokens or fewer."""
    model = dataclasses.replace(MODEL, fixed_tokens=5)
    images = [dataclasses.replace(facts(name), model=model) for name in "ab"]
    found, fewer = (
        make_plan(job(train__max_length=length), {node.node: node for node in images}) for length in (16, 3)
    )
    assert fewer.plan == found.plan
    assert fewer.memory == found.memory
    exact = make_plan(job(train__max_length=5), {name: facts(name) for name in "ab"})
    assert found.plan.course.max_length == exact.plan.course.max_length == 5
    for name, estimate in exact.memory.items():  # images are never padded, so no mask is kept
        masks = sum(term.total_bytes for term in estimate.terms if term.what.startswith("attention mask"))
        assert 0 < masks == estimate.total_bytes - found.memory_bytes[name]


def times(seconds: float) -> dict[str, Any]:
    """A node whose blocks take so long in every direction."""
    return {"block_forward_s": seconds, "block_graph_s": seconds, "block_backward_s": seconds}


def test_plan_follows_measured_speed() -> None:
    """A node that is three times as fast hosts three of four blocks."""
    plan = plan_for(job(), facts("a", **times(0.003)), facts("b", **times(0.001)))
    assert slices(plan) == {"a": (0, 1), "b": (1, 4)}


def test_plan_weighs_what_trains_longest() -> None:
    """Where all blocks train most of the time, a batch waits for a slow node twice, so it is left out; it owns data.

    Without dropout the last block computes one token of each row, which the slow node does soon enough.
    """
    nodes = facts("a", **times(0.003)), facts("b", **times(0.001))
    changes = {"unfreeze__every_steps": 1, "train__rounds": 20}
    plan = plan_for(job(train__dropout=0.1, **changes), *nodes)
    assert slices(plan) == {"b": (0, 4)}
    assert slices(plan_for(job(**changes), *nodes)) == {"b": (0, 3), "a": (3, 4)}
    assert [owner.node for owner in plan.course.owners] == ["a", "b"]


def test_plan_of_equal_machines_ignores_noise() -> None:
    """Nodes with the same hardware get even slices, whatever a busy moment made of their times."""
    noisy = facts("a", hardware="x", **times(0.002)), facts("b", hardware="x", **times(0.001))
    assert slices(plan_for(job(), *noisy)) == {"a": (0, 2), "b": (2, 4)}


def test_plan_without_measurement_is_even() -> None:
    """If one node was not measured, all count as equal."""
    unknown: dict[str, Any] = {"block_forward_s": 0.0, "block_graph_s": 0.0, "block_backward_s": 0.0}
    fast: dict[str, Any] = {"block_graph_s": 1e-6, "block_backward_s": 1e-6}
    assert slices(plan_for(job(), facts("a", **unknown), facts("b", **fast))) == {"a": (0, 2), "b": (2, 4)}


def test_plan_moves_blocks_away_from_a_small_node() -> None:
    """A node with room for one block hosts one, embedding and head counted in; at the top it needs more."""
    need = make_plan(job(), {"a": facts("a"), "b": facts("b")}).memory["a"].total_bytes
    plan = plan_for(job(), facts("a", memory_bytes=need - 1), facts("b"))
    assert slices(plan) == {"a": (0, 1), "b": (1, 4)}
    assert plan.placement.credits == 8


def test_plan_that_fits_nowhere_is_refused_with_both_numbers() -> None:
    """The error names a node, what it needs for which blocks, and what it has."""
    small: dict[str, Any] = {"memory_bytes": 15_000, "activation_token_bytes": 20_000}
    with pytest.raises(CapacityError, match=r"node a needs .*KiB.* for blocks \[0, 2\) but has 14.6 KiB, and no other"):
        plan_for(job(), facts("a", **small), facts("b", **small))


def test_plan_takes_fewer_credits_before_it_gives_up() -> None:
    """Where nothing fits with 8 tensors in flight, fewer may do; the other decisions stay."""
    need = make_plan(job(), {"a": facts("a")}).memory["a"].total_bytes
    made = make_plan(job(), {"a": facts("a", memory_bytes=need - 1)})
    assert made.plan.placement.credits == 4
    assert made.memory["a"].total_bytes < need


def test_plan_refuses_an_owner_without_room_for_its_head() -> None:
    """An owner that hosts no block still needs embedding and head."""
    with pytest.raises(CapacityError, match=r"node a needs .* but has 10 B"):
        plan_for(job(), facts("a", memory_bytes=10), facts("b"))


def test_plan_single_takes_the_fastest_node_with_room() -> None:
    """Method single puts all blocks on one node: the fastest, unless it is too small."""
    fast = times(1e-4)
    single = job(train__method="single")
    assert slices(plan_for(single, facts("a"), facts("b", **fast))) == {"b": (0, 4)}
    assert slices(plan_for(single, facts("a"), facts("b", rows=0, memory_bytes=100, **fast))) == {"a": (0, 4)}
    with pytest.raises(CapacityError, match="no other node has more"):
        plan_for(single, facts("a", memory_bytes=15_000))


def test_plan_of_pipeadapter_has_room_for_an_item_between_two_hosts() -> None:
    """Credits for all micro-batches of a batch, or the ring never fills; other methods keep the default."""
    nodes = (facts("a"), facts("b"))
    wanted: dict[str, Any] = {"train.batch_size": 16, "train.microbatches": 12}
    pipe = plan_for(job().with_overrides({"train.method": "pipeadapter", **wanted}), *nodes)
    other = plan_for(job().with_overrides(wanted), *nodes)
    assert (pipe.placement.credits, other.placement.credits) == (12, 8)


def test_plan_of_pipeadapter_counts_the_versions_of_the_lower_hosts() -> None:
    """The lowest of three nodes keeps graphs of three items: with room for two it hosts fewer blocks."""
    wanted = job(train__dropout=0.1).with_overrides({"train.method": "pipeadapter", "train.local_iterations": 9})
    names = ("a", "b", "c")
    roomy = make_plan(wanted, {name: facts(name) for name in names})
    assert slices(roomy.plan) == {"a": (0, 2), "b": (2, 3), "c": (3, 4)}
    fresh = make_plan(wanted.with_overrides({"train.method": "all"}), {name: facts(name) for name in names})
    need, has = roomy.memory_bytes["a"], fresh.memory_bytes["a"]
    assert need > has
    tight = make_plan(wanted, {"a": facts("a", memory_bytes=need - 1), "b": facts("b"), "c": facts("c")})
    assert slices(tight.plan)["a"] != (0, 2)
    assert tight.memory_bytes["a"] < need


def test_plan_leaves_private_blocks_to_the_owners() -> None:
    """Slices begin behind the private blocks."""
    plan = plan_for(job(privacy__private_blocks=2), facts("a"), facts("b"))
    assert slices(plan) == {"a": (2, 3), "b": (3, 4)}
    with pytest.raises(PlanError, match="private_blocks = 4 leaves nothing"):
        plan_for(job(privacy__private_blocks=4), facts("a"))


def test_plan_of_an_evaluation_needs_no_room_for_graphs() -> None:
    """Where training does not fit, a run of no steps does: no graph, no moments."""
    wanted = job(unfreeze__every_steps=1)
    needed = make_plan(wanted, {"a": facts("a")}, evaluation_only=True).memory["a"].total_bytes
    small = {"a": facts("a", memory_bytes=needed)}
    with pytest.raises(CapacityError):
        make_plan(wanted, small)
    made = make_plan(wanted, small, evaluation_only=True)
    assert (made.plan.course.num_steps, made.memory["a"].parts()["optimizer"]) == (0, 0)


def test_plan_agrees_on_labels() -> None:
    """Without labels in the job the classes are the sorted union of what the owners have."""
    plan = plan_for(job(), facts("a", labels=("neg",), eval_labels=("neg",)), facts("b", labels=("pos", "so-so")))
    assert plan.course.labels == ("neg", "pos", "so-so")


def test_make_plan_unites_the_tags_of_owners_and_refuses_others() -> None:
    """Tags are names as classes are; the message says words, and where to add one."""
    tags = job(**{"model.task": "token-classification"})
    plan = plan_for(
        tags, facts("a", labels=("O",), eval_labels=()), facts("b", labels=("B-X", "O"), eval_labels=("O",))
    )
    assert plan.course.labels == ("B-X", "O")
    with pytest.raises(
        DataError, match=r"node a has evaluation words of tag 'I-X', .* are B-X, O; add it to data\.labels"
    ):
        plan_for(tags, facts("a", labels=("B-X", "O"), eval_labels=("I-X",)))
    with pytest.raises(DataError, match=r"has the tags \['O'\], a classifier needs two; check data\.tags"):
        plan_for(tags, facts("a", labels=("O",), eval_labels=()))


def test_plan_refuses_labels_that_do_not_agree() -> None:
    """A class that only evaluation has, a single class, and a class outside the job's list are named."""
    with pytest.raises(DataError, match="node a has evaluation rows of class 'odd'"):
        plan_for(job(), facts("a", eval_labels=("neg", "odd")))
    with pytest.raises(DataError, match="needs two"):
        plan_for(job(), facts("a", labels=("neg",), eval_labels=()))
    with pytest.raises(DataError, match="node a has training rows of class 'neg'"):
        plan_for(job(data__labels=["pos", "maybe"]), facts("a"))


def test_plan_refuses_nodes_with_different_models() -> None:
    """Two digests of the model are two models."""
    other = dataclasses.replace(MODEL, digest="cd" * 32)
    with pytest.raises(ModelError, match="nodes a and b have different models"):
        plan_for(job(), facts("a"), facts("b", model=other))


def test_plan_needs_an_owner() -> None:
    """Somebody has to have rows."""
    with pytest.raises(DataError, match="no node has training rows"):
        plan_for(job(), facts("a", rows=0))


def test_plan_of_one_machine_is_judged_by_the_simulator_and_even() -> None:
    """Two alike nodes with the assumed links of a machine: the simulator was asked, and even slices stay."""
    nodes = {name: facts(name) for name in "ab"}
    links = with_assumed("ab", {"a": "x", "b": "x"}, ())
    planned = make_plan(job(), nodes, links=links)
    assert planned.choice is not None
    assert planned.choice.best.simulated_s is not None
    assert planned.choice.even
    assert [(piece.node, piece.num_blocks) for piece in planned.plan.placement.slices] == [("a", 2), ("b", 2)]
