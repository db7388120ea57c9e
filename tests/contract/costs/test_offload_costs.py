"""Tests of ``ringtune.costs.offload_costs``: set bytes, seconds, pair bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.memory_estimate import memory_estimate
from ringtune.costs.memory_sizes import MemorySettings, Sizes
from ringtune.costs.memory_terms import Share
from ringtune.costs.offload_costs import SetBytes, pair_token_bytes, pair_widths, set_bytes, step_traffic
from ringtune.costs.profile import KindFacts, LinkFacts, ModelFacts, Profile, Work
from ringtune.errors import JobError, PlanError
from ringtune.models.family import Widths
from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.course import ALONE, BFLOAT16, COLLABORATION, EXACT, Course, HelperSettings
from ringtune.schedule.methods import Everything
from ringtune.schedule.placement import Helper, Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner, UserRows
from ringtune.schedule.saved_activations import VELORA
from ringtune.schedule.turns import StepKind
from ringtune.techniques.offload import check_course, helped, helpers_by_host, max_changed
from sim.prediction import predict
from tests.support.cases import cases
from tests.support.fake_agents import job
from tests.support.plans import changed, make_plan
from tests.support.profiles import TIMES, model_of, node, point

ONE = 1000
TOGETHER: Any = {"users": COLLABORATION, "merged": True}
PLACEMENT = Placement(
    slices=(Slice(node="a", start=0, stop=2), Slice(node="b", start=2, stop=4)),
    helpers=(Helper(node="b", start=0, stop=2), Helper(node="a", start=2, stop=4)),
)


def _owner(name: str, users: int) -> Owner:
    rows = tuple(UserRows(name=f"{name}{index}", train_rows=3) for index in range(users))
    return Owner(node=name, train_rows=3 * users, users=rows)


def _plan(counts: tuple[int, int] = (3, 6), **manner: Any) -> Plan:
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], method="all", batch_size=4, num_steps=12, eval_rows=0)
    plan = changed(plan, owners=(_owner("a", counts[0]), _owner("b", counts[1])))
    return helped(plan, {"a": "b", "b": "a"}, HelperSettings(**manner))


def _model(course: Course, *, block_bytes: int = 50 * ONE) -> ModelFacts:
    return dataclasses.replace(model_of(Plan.of(course, PLACEMENT)), adapter_block_bytes=ONE, block_bytes=block_bytes)


@cases(("counts", "interval", "most"), [((3, 2), 1, 3), ((3, 6), 1, 4), ((3, 6), 2, 8), ((3, 6), 3, 9), ((1, 1), 2, 2)])
def test_update_changes_at_most_a_user_a_row(counts: tuple[int, int], interval: int, most: int) -> None:
    """A batch has four rows; over several steps all users may come."""
    assert max_changed(_plan(counts, users=ALONE, interval=interval).course) == most
    assert max_changed(_plan(counts, interval=interval).course) == 1


def test_sum_is_no_larger_than_the_block_or_of_linear_models_than_one() -> None:
    """However many users there are."""
    course = _plan(**TOGETHER).course
    assert set_bytes(course, _model(course, block_bytes=5 * ONE), adapter="lora[r=64]").sent == 5 * ONE
    assert set_bytes(course, _model(course), adapter="linear[alpha=2.0]").sent == ONE


def test_traffic_of_weights_is_that_of_the_sets_that_change() -> None:
    """Pairs are the same, whoever has adapters."""
    joint, alone = _plan(interval=1), _plan(users=ALONE)
    facts = dataclasses.replace(node(joint, "a"), model=_model(joint.course))
    traffic = [step_traffic(plan, plan.placement.helpers[0], facts) for plan in (joint, alone)]
    assert traffic[0][0] == traffic[1][0]
    assert [weights for _, weights in traffic] == [ONE, 4 * ONE]


@cases(
    ("manner", "hosted", "held"), [({}, 2, 2), ({"merged": True}, 0, 2), ({"users": ALONE}, 18, 18), (TOGETHER, 0, 18)]
)
def test_memory_has_sets_where_they_are(manner: dict[str, Any], hosted: int, held: int) -> None:
    """Node a hosts two helped blocks, and fits two others."""
    plan = _plan(**manner)
    sizes = Sizes(plan.course, _model(plan.course), optimizer="adamw", dtype="float32", activation_token_bytes=10.0)
    terms = {term.what: term for term in memory_estimate(plan.course, Share.of(plan, "a"), sizes).terms}
    own, others = (
        terms.get("adapter of a block that a helper fits"),
        terms["adapter of a block that another node hosts"],
    )
    assert (own.total_bytes if own else 0) == hosted * ONE
    assert others.total_bytes == held * ONE
    moments = terms["gradient and moments of an adapter that is fitted for another node"]
    sets, changing = (9, 4) if manner.get("users") else (1, 1)
    assert moments.total_bytes == 2 * (changing * ONE + sets * 2 * ONE)


def _kind(*users: str, **sizes: float) -> KindFacts:
    values: dict[str, Any] = {
        "adapter_block_bytes": 7 * ONE,
        "adapter_block_factor_bytes": 70,
        "pair_token_bytes": 0,
        "pair_rounded_token_bytes": 0,
        "pair_projected_token_bytes": 0,
        "more_activation_token_bytes": 0.0,
    }
    return KindFacts(config="linear", users=users, **{**values, **sizes})


def test_sets_of_other_kinds_take_what_they_are() -> None:
    """Two of nine users have sets of seven times the size; the largest are taken to change."""
    for manner in ({"users": ALONE}, TOGETHER):
        course = _plan(**manner).course
        model = dataclasses.replace(_model(course), kinds=(_kind("a0", "b5", "zoe"),), beside_block_bytes=9 * ONE)
        alone = manner == {"users": ALONE}
        held, changing = 7 * ONE + 14 * ONE, 14 * ONE + 2 * ONE
        hosted, sent = (held, changing) if alone else (0, 9 * ONE)
        assert set_bytes(course, model) == SetBytes(hosted, held, sent, changing)


def test_pairs_and_activations_are_those_of_the_largest_kind() -> None:
    """Nothing of a kind counts where all users train the same."""
    kind = _kind("a0", pair_token_bytes=10**6, more_activation_token_bytes=500.0)
    for users, more in ((ALONE, 500.0), ("joint", 0.0)):
        plan = _plan(users=users)
        course = plan.course
        model = dataclasses.replace(_model(course), kinds=(kind,))
        profile = dataclasses.replace(node(plan, "a"), model=model, activation_token_bytes=1000.0)
        sizes = Sizes.at(course, profile, MemorySettings("adamw"))
        assert sizes.kept_bytes(1) == 1000.0 + more
        assert sizes.sent_pair_bytes(1) == 10**6


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


def test_costs_of_a_plan_name_a_helper_that_was_not_measured() -> None:
    """A node that only helps has to be in the profile as well."""
    few = Profile(nodes=tuple(each for each in profile(PLAN).nodes if each.node != "z"))
    with pytest.raises(PlanError, match="the profile lacks node z; measure anew"):
        CourseCosts.of(PLAN, few)


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
    rounded = helped(PLAN, helpers_by_host(PLAN), HelperSettings(pairs="bfloat16"))
    assert costs(rounded).message_bytes(Payload.PAIRS, 0, SIZE) == SIZE * 3 * width / 2


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


BASE: dict[str, Any] = {"hidden_size": 768, "widths": Widths.plain(768, 3072)}
FUSED: dict[str, Any] = {"hidden_size": 768, "widths": Widths.plain(768, 3072, merged=True)}


@cases(
    ("config", "dropout", "facts", "values", "signs"),
    [
        ("lora", 0.0, BASE, 768 + 2 * 768, 0),  # q and v read one tensor
        ("lora", 0.1, BASE, 2 * 768 + 2 * 768, 0),  # each drops its own
        ("lora", 0.1, FUSED, 768 + 2 * 768, 0),  # one dropout for all three
        ("lora[attn_matrices=['q','k','v']]", 0.0, BASE, 768 + 3 * 768, 0),
        ("lora[selfattn_lora=False,output_lora=True]", 0.0, BASE, 3072 + 768, 0),
        ("seq_bn", 0.1, BASE, 2 * 768, 6),  # 48 units of ReLU
        ("double_seq_bn", 0.0, BASE, 4 * 768, 0),  # swish
        ("double_seq_bn[non_linearity='relu']", 0.0, BASE, 4 * 768, 12),
        ("mlp[hidden=12]", 0.1, BASE, 3 * 768, 4),
        ("mlp[hidden=12]", 0.1, FUSED, 3 * 768, 3),  # one tensor of bits
        ("linear", 0.1, BASE, 3 * 768, 0),
        ("linear[attn_matrices=['q']]|mlp[attn_matrices=['v'],hidden=12]", 0.0, BASE, 3 * 768, 2),
        ("linear[attn_matrices=['q']]|mlp[attn_matrices=['v'],hidden=12]", 0.0, FUSED, 3 * 768, 2),
        ("mlp[attn_matrices=['q'],hidden=4]|mlp[attn_matrices=['v'],hidden=4]", 0.0, FUSED, 3 * 768, 1),
        ("lora[attn_matrices=['q']]|linear[attn_matrices=['k','v']]", 0.0, BASE, 4 * 768, 0),  # one tensor for all
        ("lora[attn_matrices=['q']]|linear[attn_matrices=['k','v']]", 0.0, FUSED, 4 * 768, 0),
        ("lora[attn_matrices=['q']]|linear[attn_matrices=['k','v']]", 0.1, BASE, 5 * 768, 0),  # LoRA drops its own
        ("lora[attn_matrices=['q']]|linear[attn_matrices=['k','v']]", 0.1, FUSED, 5 * 768, 0),
        ("linear[leave_out=[2,3]]|mlp[leave_out=[0,1],hidden=8]", 0.0, BASE, 3 * 768, 2),  # of block 3
        ("par_bn|lora[intermediate_lora=True]", 0.0, BASE, 2 * 768 + 3 * 768 + 768 + 3072, 48),
    ],
)
def test_pair_bytes_are_those_of_inputs_and_gradients(
    config: str, dropout: float, facts: Any, values: int, signs: int
) -> None:
    """In the type of the run, and in half of float32 with a bit for each unit of a ReLU."""
    found = pair_widths(config, 3, dropout=dropout, **facts)
    assert pair_token_bytes(found, EXACT, value_bytes=4) == 4 * values
    assert pair_token_bytes(found, BFLOAT16, value_bytes=4) == 2 * values + signs


def test_pair_bytes_with_velora_have_a_number_for_each_part() -> None:
    """The example of the module: 32 projections and two gradients."""
    found = pair_widths("lora", 0, dropout=0.0, **BASE)
    assert pair_token_bytes(found, EXACT, value_bytes=4) == 9216
    assert pair_token_bytes(found, VELORA, value_bytes=4) == 6272
    assert pair_token_bytes(found, VELORA, value_bytes=4, projected="wide") == 9216
    down = pair_widths("lora[selfattn_lora=False, output_lora=True]", 0, dropout=0.0, **BASE)
    assert pair_token_bytes(down, EXACT, value_bytes=4) == 15360
    assert pair_token_bytes(down, VELORA, value_bytes=4, projected="wide") == 3200
    # A shared input is compared with all gradients beside it, in whatever order the matrices are named
    few = dataclasses.replace(BASE["widths"], key=(768, 192), value=(768, 192))
    for letters, expected in (
        (["q", "v"], 4 * (768 + 960)),
        (["v", "q"], 4 * (768 + 960)),
        (["k", "v"], 4 * (32 + 384)),
    ):
        found = pair_widths(f"lora[attn_matrices={letters}]", 0, dropout=0.0, hidden_size=768, widths=few)
        assert pair_token_bytes(found, VELORA, value_bytes=4, projected="wide") == expected, letters


def test_projections_that_make_no_pair_smaller_are_refused_with_the_bytes() -> None:
    """Where an input is wider than the gradient beside it, or all are to be projected, they are not."""
    lora = job(adapter__config="lora", offload__mode="auto", offload__pairs="velora")
    model = dataclasses.replace(
        model_of(PLAN), pair_token_bytes=9216, pair_rounded_token_bytes=4608, pair_projected_token_bytes=9216
    )
    with pytest.raises(JobError, match=r"has 9,216 bytes, not fewer than 9,216; .* 'bfloat16' \(4,608 bytes\)"):
        check_course(lora, PLAN.course, model)
    check_course(lora, PLAN.course, dataclasses.replace(model, pair_projected_token_bytes=9215))
    check_course(lora.with_overrides({"offload.projected": "all"}), PLAN.course, model)
    check_course(lora.with_overrides({"offload.pairs": "bfloat16"}), PLAN.course, model)
