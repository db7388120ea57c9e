"""Seconds and bytes of helpers, added up by hand."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.costs.profile import LinkFacts, Profile
from ringtune.costs.times.seconds import CourseCosts
from ringtune.costs.work_times import Work
from ringtune.errors import PlanError
from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.helped import helped, helpers_by_host
from ringtune.schedule.helping.offload import Manner
from ringtune.schedule.methods import Everything
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StepKind
from ringtune.schedule.units import Range
from sim.prediction import predict
from tests.support.plans import make_plan
from tests.support.profiles import TIMES, model_of, node, point

PLAN = helped(make_plan([("a", 0, 2), ("b", 2, 4)], ["b"], num_blocks=4), {"a": "z"})
SIZE = 8.0


def profile(plan: Plan = PLAN, *, fit_s: float = 0.0) -> Profile:
    """Nodes whose adapters are half of a block's weights, with pairs of 3 hidden states, and links of 1,000 B/s."""
    model = dataclasses.replace(model_of(plan), adapter_block_bytes=50_000)
    width = 4 * model.hidden_size
    model = dataclasses.replace(model, pair_token_bytes=3 * width, pair_rounded_token_bytes=3 * width // 2)
    times = {**TIMES, Work.ENCODE: 0.1, Work.DECODE: 0.2, Work.HAND_OVER: 0.5}
    more = (point(Work.FIT, fit_s),) if fit_s else ()
    nodes = tuple(
        dataclasses.replace(
            node(plan, name), model=model, work_times=(*(point(work, each) for work, each in times.items()), *more)
        )
        for name in sorted(plan.nodes)
    )
    links = tuple(
        LinkFacts(source=one, target=other, rate_bytes_per_s=1000.0, latency_s=0.0)
        for one in plan.nodes
        for other in plan.nodes
        if one != other
    )
    return Profile(nodes=nodes, links=links)


def costs(plan: Plan = PLAN, *, fit_s: float = 0.0) -> CourseCosts:
    """What the plan costs on these nodes."""
    return CourseCosts.of(plan, profile(plan, fit_s=fit_s))


def seconds(found: CourseCosts, name: str, op: Op, start: int, stop: int) -> float:
    """Seconds of an action of two blocks whose lowest trainable block is below them."""
    return found.action_s(name, Action(op, 0, 0, start, stop), size=SIZE, lowest=-1, kind=StepKind.TRAIN)


def test_offload_moves_gradients_of_weights_from_the_host_to_the_helper() -> None:
    """A forward takes 2 s and half of a block's weights are adapters': 1 s a block less, 3 s a block for a fit."""
    found = costs()
    assert seconds(found, "a", Op.BACKWARD, 0, 2) == pytest.approx(2 * (5.0 - 1.0))
    assert seconds(found, "b", Op.BACKWARD, 2, 4) == pytest.approx(2 * 5.0)
    assert seconds(found, "z", Op.FIT, 0, 2) == pytest.approx(2 * (3.0 + 3 * 0.2))
    assert seconds(found, "a", Op.SHIP, 0, 2) == pytest.approx(2 * 3 * 0.1)
    assert seconds(found, "z", Op.UPDATE, 0, 2) == pytest.approx(2 * 0.5)
    assert seconds(found, "a", Op.UPDATE, 0, 2) == 0.0


def test_costs_of_a_plan_are_on_its_own_nodes_with_its_recomputation_and_optimizer() -> None:
    """A node that the plan has not is none of its costs, and what its placement says counts."""
    more = profile(PLAN)
    more = Profile(nodes=(*more.nodes, dataclasses.replace(more.nodes[0], node="other")), links=more.links)
    found = CourseCosts.of(PLAN, more)
    assert set(found.nodes) == {"a", "b", "z"}
    assert found.head_bytes > CourseCosts.of(PLAN, more, optimizer="sgd").head_bytes
    again = Plan(PLAN.course, (dataclasses.replace(PLAN.placement, recompute=(Range(2, 4),)),))
    saved = CourseCosts.of(again, more)
    assert seconds(saved, "b", Op.BACKWARD, 2, 4) > seconds(found, "b", Op.BACKWARD, 2, 4)


def test_costs_of_a_plan_name_a_helper_that_was_not_measured() -> None:
    """A node that only helps has to be in the profile as well."""
    few = Profile(nodes=tuple(each for each in profile(PLAN).nodes if each.node != "z"))
    with pytest.raises(PlanError, match="the profile lacks node z; measure anew"):
        CourseCosts.of(PLAN, few)


def test_offload_takes_a_measured_fit_where_there_is_one() -> None:
    """The estimate by multiplications is for nodes that nobody measured."""
    assert seconds(costs(fit_s=0.7), "z", Op.FIT, 0, 2) == pytest.approx(2 * 0.7)


def test_offload_parcels_take_bytes_of_their_blocks() -> None:
    """Pairs go by tokens and wire, weights by blocks; a range that begins higher is smaller."""
    placement = dataclasses.replace(PLAN.placement, helpers=PLAN.placement.joined_helpers())
    found, width = costs(Plan.of(PLAN.course, placement)), 4 * PLAN.course.hidden_size
    assert found.message_bytes(Payload.PAIRS, 0, SIZE) == 2 * SIZE * 3 * width
    assert found.message_bytes(Payload.PAIRS, 1, SIZE) == SIZE * 3 * width
    assert found.message_bytes(Payload.WEIGHTS, 0, 0.0) == 2 * 50_000
    assert found.around_message_s("a", "z", Payload.PAIRS, SIZE) == 0.0
    around_s = found.around_message_s("z", "a", Payload.WEIGHTS, 0.0, num_bytes=50_000)
    assert around_s == pytest.approx(0.5 * 50_000 / found.head_bytes)
    rounded = helped(PLAN, helpers_by_host(PLAN), Manner(pairs="bfloat16"))
    assert costs(rounded).message_bytes(Payload.PAIRS, 0, SIZE) == SIZE * 3 * width / 2


def test_offload_without_helpers_costs_what_it_did() -> None:
    """A course without helpers has the very seconds and bytes of before."""
    plain = helped(PLAN, {})
    assert seconds(costs(plain), "a", Op.BACKWARD, 0, 2) == 2 * 5.0
    assert plain.nodes == ("a", "b")


def test_offload_prediction_has_pairs_and_weights_on_the_links() -> None:
    """Every step sends pairs to the helper and gets weights back; the helper is busy although it hosts nothing."""
    plan = helped(
        make_plan([("a", 0, 2), ("b", 2, 4)], ["b"], num_blocks=4, num_steps=3, method=Everything()), {"a": "z"}
    )
    found = predict(plan, profile(plan))
    sent = {(link.source, link.target): link.sent_bytes for link in found.links}
    rows = plan.course.batch_size * plan.course.max_length
    assert sent["a", "z"] == 3 * rows * 2 * 3 * 4 * plan.course.hidden_size
    assert sent["z", "a"] == 3 * 2 * 50_000
    helper = next(each for each in found.nodes if each.node == "z")
    assert helper.busy_by_op_s["A"] > 0 and helper.busy_by_op_s["U"] == pytest.approx(3 * 2 * 0.5)
