"""Helpers: named by a job or chosen by the planner, in plans, texts and given plans; those of users; refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.limits import Effort
from coordinator.planner.make_plan import job_draft, keep_plan, make_plan, refuse_if_full
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.planned import Planned, copy_bytes, measured_time
from coordinator.planner.replan import PlacementProposal, placed_without, replanned
from coordinator.planner.what_if import WhatIf
from coordinator.screen.plan_text import plan_text
from ringtune.costs.memory_sizes import MemorySettings, Sizes
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import CapacityError, DataError, JobError, PlanError
from ringtune.job.job import Job
from ringtune.models.kept_inputs import KeptInput
from ringtune.quantities import format_bytes
from ringtune.schedule.access import copy_limit
from ringtune.schedule.course import HelperSettings, Offload
from ringtune.schedule.methods import Single
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import UserRows
from ringtune.schedule.units import Range
from ringtune.techniques.offload import helped, helpers_by_host, helpers_of
from tests.support import offloading
from tests.support.fake_agents import MODEL, facts, job
from tests.support.offloading import LINEAR_PARAMS, LOW_RANK_PARAMS, MEGABIT
from tests.support.plans import changed

ROOM = 400_000_000
QUICK = Effort(judged_actions=0)


def nodes(adapter_params: int, *, bytes_per_s: float, weak_bytes: int = 10**11, strong_bytes: int = ROOM) -> Profile:
    """The weak node owns the rows; the strong one has room for adapters, but for no block with its activations."""
    found = offloading.profile(adapter_params, bytes_per_s=bytes_per_s)
    kept = []
    for one in found.nodes:
        if one.node != "owner":
            is_weak = one.node == "weak"
            kept.append(
                dataclasses.replace(
                    one,
                    train_rows=64 if is_weak else 0,
                    labels=("neg", "pos") if is_weak else (),
                    eval_labels=(),
                    eval_rows=0,
                    memory_bytes=weak_bytes if is_weak else strong_bytes,
                    activation_token_bytes=800_000,
                )
            )
    links = tuple(link for link in found.links if "owner" not in (link.source, link.target))
    return Profile(nodes=tuple(kept), links=links)


def wanted(mode: object = "auto", **changes: object) -> Job:
    """The job of these nodes."""
    of_all = {"train__batch_size": 16, "train__microbatches": 4, "train__max_length": 64, "train__max_steps": 6}
    return job(train__method="all", offload__mode=mode, **{**of_all, **changes})


def planned(profile: Profile, mode: object = "auto", **changes: object) -> Planned:
    """The plan of the job on the nodes of a profile."""
    return make_plan(wanted(mode, **changes), profile.by_name, links=profile.links)


def why(found: Planned) -> str:
    """The explanation of a plan."""
    return "\n".join(explanation_text(explain(found, relative=False)))


def test_auto_goes_without_where_no_helper_can_fit_the_adapters() -> None:
    """As facts without bytes of pairs say; the plan says so, and is that of a job without helpers."""
    near = nodes(LINEAR_PARAMS, bytes_per_s=1e8)
    models = [dataclasses.replace(one.model, pair_token_bytes=0) for one in near.nodes]
    known = [dataclasses.replace(one, model=model) for one, model in zip(near.nodes, models, strict=True)]
    found, off = (planned(Profile(nodes=tuple(known), links=near.links), mode) for mode in ("auto", "off"))
    assert (found.plan, off.left_out) == (off.plan, ())
    assert "offload.mode = 'auto' can't go with this adapter.config in this model" in found.note


def test_auto_takes_a_helper_where_the_job_gets_faster() -> None:
    """Adapters as large as their matrices, on a fast link: predicted with the helper, and faster than without."""
    profile = nodes(LINEAR_PARAMS, bytes_per_s=1e9)
    found = planned(profile)
    assert helpers_by_host(found.plan) == {"weak": "strong"}
    assert found.plan == planned(profile, {"weak": "strong"}).plan
    assert found.helping is not None
    (trial,) = found.helping.trials
    assert trial.is_taken and trial.with_s is not None and trial.without_s is not None
    assert trial.with_s < trial.without_s
    time = measured_time(found, profile, "adamw")
    assert time is not None and (time.steps_s, time.by) == (trial.with_s, "simulator")
    text = why(found)
    assert "strong for weak: " in text and text.count("all steps") >= 2 and ": taken" in text
    assert "fits adapters of weak's [0, 4)" in text


def test_auto_refuses_low_rank_on_a_slow_link() -> None:
    """Both numbers stand beside the refusal, rounded pairs or not."""
    for pairs in ["float32", "bfloat16"]:
        found = planned(nodes(LOW_RANK_PARAMS, bytes_per_s=MEGABIT), offload__pairs=pairs)
        assert not found.plan.placement.helpers and found.plan.course.offload is None
        assert found.helping is not None
        (trial,) = found.helping.trials
        assert trial.with_s is not None and trial.without_s is not None and trial.with_s > trial.without_s
        assert "without: it does not pay" in why(found)


def test_auto_says_of_a_helper_what_it_lacks() -> None:
    """Memory is checked before anything is simulated."""
    profile = nodes(LINEAR_PARAMS, bytes_per_s=1e9)
    small = tuple(
        dataclasses.replace(one, memory_bytes=one.memory_bytes if one.node == "weak" else 10**7)
        for one in profile.nodes
    )
    found = planned(dataclasses.replace(profile, nodes=small))
    assert not found.plan.placement.helpers
    assert "it does not fit: node strong needs " in why(found)
    # What pairs take is not known then
    found = make_plan(wanted(), profile.by_name)
    assert not found.plan.placement.helpers
    assert "no helpers, as links were not measured" in why(found)
    # The plan that auto makes is that without helpers, plus these helpers
    assert helped(planned(profile).plan, {}) == planned(profile, "off").plan


def test_auto_helps_where_nothing_fits_otherwise() -> None:
    """Without a helper the slice does not fit, so one is taken although the link is slow."""

    def short(mode: object, **more: int) -> Planned:
        tight = nodes(LINEAR_PARAMS, bytes_per_s=MEGABIT, strong_bytes=200_000_000, **more)
        return planned(tight, mode, train__max_length=16)

    room = short("off").memory_bytes["weak"] - 10_000_000  # fewer credits save a little too
    assert short({"weak": "strong"}).memory_bytes["weak"] <= room
    with pytest.raises(CapacityError):
        short("off", weak_bytes=room)
    found = short("auto", weak_bytes=room)
    assert helpers_by_host(found.plan) == {"weak": "strong"}
    assert "no split of the blocks fits without a helper" in why(found)
    assert "strong for weak: taken, so that every slice fits" in why(found)
    with pytest.raises(CapacityError):
        short("auto", weak_bytes=10**6)


def test_auto_is_asked_for_by_a_what_if_that_plans_anew() -> None:
    """``offload`` of a what-if is ``offload.mode`` of the job: auto, off, or who helps whom."""
    profile = nodes(LINEAR_PARAMS, bytes_per_s=1e9)
    bare = planned(profile, "off").plan
    question = WhatIf(plan=bare, profile=profile, settings=MemorySettings(), job=wanted("off"))
    for value, helper_of in (("auto", {"weak": "strong"}), ("weak=strong", {"weak": "strong"}), ("off", {})):
        assert helpers_by_host(question.after([f"offload={value}"]).plan) == helper_of
    for users in ("alone", "collaboration"):
        linear = dataclasses.replace(question, job=wanted("off", adapter__config="linear"))
        found = linear.after(["offload=auto", f"users={users}"]).plan.course.offload
        assert found is not None and (found.users, found.merged) == (users, users == "collaboration")
    with pytest.raises(PlanError, match="there is no node 'stron'; did you mean 'strong'"):
        question.after(["offload=weak=stron"])


ANNA, BEN = UserRows(name="anna", train_rows=12), UserRows(name="ben", train_rows=8)


def job_of(mode: Any = "auto", users: str = "alone", **more: Any) -> Job:
    """A job whose users have adapters of their own."""
    return job(offload__mode=mode, offload__users=users, train__method="all", **more)


def of_users(*names: str, **changes: Any) -> dict[str, NodeFacts]:
    """Nodes of which the first owns rows of two users."""
    found = {name: dataclasses.replace(facts(name, rows=0), model=PAIRS, **changes) for name in names}
    owner = dataclasses.replace(facts(names[0]), model=PAIRS, **changes)
    rows = dataclasses.replace(owner, train_rows=20, eval_rows=0, eval_labels=(), users=(ANNA, BEN))
    return {**found, names[0]: rows}


def has_all_helpers(found: Planned) -> bool:
    """Whether every host has a helper."""
    return helpers_by_host(found.plan).keys() == {piece.node for piece in found.plan.placement.hosts}


def test_users_of_nodes_are_in_the_course_and_in_the_memory() -> None:
    """Where the job names the column; otherwise each owner is one user."""
    known = of_users("a", "b")
    with_column = make_plan(job_of(data__user="who"), known).plan
    assert with_column.course.users == ("anna", "ben")
    assert make_plan(job_of(), known).plan.course.users == ("a",)
    nobody = {name: dataclasses.replace(one, users=()) for name, one in known.items()}
    with pytest.raises(DataError, match="the facts have no users of node a; measure anew"):
        make_plan(job_of(data__user="who"), nobody)
    # The search knows what a host of both users' adapters holds, as the check of the plan does
    known, wish = of_users("a", "z"), job_of({"a": "z"}, data__user="who")
    found = make_plan(wish, known)
    caps = MemoryCaps(job_draft(wish, list(known.values()), PAIRS), known)
    searched = caps.estimate_of("a", 0, 4, 0)
    assert searched.parts()["adapters"] == found.memory["a"].parts()["adapters"] == 4 * 2 * PAIRS.adapter_block_bytes
    assert caps.lacking("z", 0, 4, 0) and caps.fits_empty("z")


def test_copies_of_many_users_have_room_for_the_names_of_their_tensors() -> None:
    """20 tensors of 120 bytes each in a file's header, as of LoRA with AdamW at four matrices; else no turn is kept."""
    known, wish = of_users("a", "b"), job_of(data__user="who")
    users = tuple(UserRows(name=f"user-{number}", train_rows=1) for number in range(100))
    known["a"] = dataclasses.replace(known["a"], train_rows=100, users=users)
    course = make_plan(wish, known).plan.course
    values = Sizes.at(course, known["a"], MemorySettings.of_job(wish)).snapshot_bytes
    assert copy_limit(copy_bytes(course, known["a"], wish), 8) >= 8 * (values + 100 * 20 * 120)


def test_users_who_changed_are_refused_by_name() -> None:
    """A run goes on, and a given plan is taken, with the same users only."""
    known, wish = of_users("a", "b"), job_of(data__user="who")
    plan = make_plan(wish, known).plan
    assert keep_plan(wish, plan, known).plan == accept_plan(GivenPlan(plan=plan), wish, known).plan == plan
    others = (dataclasses.replace(ANNA, train_rows=11), dataclasses.replace(BEN, train_rows=9))
    changed = {**known, "a": dataclasses.replace(known["a"], users=others)}
    said = r"node a has rows of anna \(11 and 0\), ben \(9 and 0\), the run began with anna \(12 and 0\)"
    with pytest.raises(DataError, match=said):
        keep_plan(wish, plan, changed)
    with pytest.raises(DataError, match="the plan says anna"):
        accept_plan(GivenPlan(plan=plan), wish, changed)


def test_given_plans_have_the_adapters_of_users_that_the_job_wants() -> None:
    """A plan without helpers, or with one set for all, would train something else."""
    known, wish = of_users("a", "b"), job_of()
    for other, said in (
        ("off", "the plan has no helpers"),
        ({"a": "b", "b": "a"}, "the plan has helpers with interval"),
    ):
        plan = make_plan(job(offload__mode=other, train__method="all"), known).plan
        with pytest.raises(PlanError, match=rf"{said}.*, the job says interval 1, pairs in float32, users alone; plan"):
            accept_plan(GivenPlan(plan=plan), wish, known)


@pytest.mark.parametrize("users", ["alone", "collaboration"])
def test_auto_gives_every_host_a_helper_and_says_so(users: str) -> None:
    """Even without links, where nobody would help otherwise."""
    more = {"offload__merged": True, "adapter__config": "linear"} if users == "collaboration" else {}
    found = make_plan(job_of(users=users, **more), of_users("a", "b", "c"))
    assert has_all_helpers(found) and found.plan.course.offload is not None
    assert found.plan.course.offload.users == users
    text = why(found)
    assert f"offload.users = '{users}', so every host of blocks that may train has one, whether it pays or not" in text
    assert text.count(": taken") == len(found.plan.placement.hosts)


def test_auto_takes_the_fastest_helper_where_each_user_has_adapters() -> None:
    """On a link on which no helper pays, the one whose link is least slow is taken."""
    slow = nodes(LINEAR_PARAMS, bytes_per_s=MEGABIT)
    near = dataclasses.replace(slow.by_name["strong"], node="near", block_graph_s=9.0, memory_bytes=10**9)
    fast = nodes(LINEAR_PARAMS, bytes_per_s=1e8).links
    links = tuple(
        dataclasses.replace(link, source=source, target=target)
        for link in fast
        for source, target in [tuple("near" if one == "strong" else one for one in (link.source, link.target))]
    )
    between = tuple(
        dataclasses.replace(link, source=source, target=target)
        for link in slow.links
        for source, target in [tuple("near" if one == "weak" else one for one in (link.source, link.target))]
    )
    profile = Profile(nodes=(*slow.nodes, near), links=(*slow.links, *links, *between))
    found = make_plan(wanted(offload__users="alone"), profile.by_name, links=profile.links)
    assert found.helping is not None and has_all_helpers(found)
    weak = [one for one in found.helping.trials if one.host == "weak"]
    assert helpers_by_host(found.plan)["weak"] == "near"
    times = {one.helper: one.with_s or 0.0 for one in weak}
    assert times["near"] < times["strong"]
    assert [one.helper for one in weak if one.is_taken] == ["near"]


def test_users_without_a_helper_are_refused() -> None:
    """One line with both keys and the remedy."""
    with pytest.raises(JobError, match=r"offload.users = 'alone' needs a helper .* node a, the only one .* add a node"):
        make_plan(job_of(), of_users("a"))
    # The bytes of a node, and what every host needs
    with pytest.raises(CapacityError, match=r"node . needs .*; with offload.users = 'alone' every host .* add a node"):
        make_plan(job_of(), of_users("a", "b", memory_bytes=10))
    # Whoever takes a helper away is told which block lacks it
    plan = make_plan(job_of({"a": "b", "b": "a"}), of_users("a", "b")).plan
    with pytest.raises(PlanError, match=r"block . has no helper; give every host one, or set offload.users = 'joint'"):
        helped(plan, {"a": "b"}, HelperSettings(users="alone"))


def test_named_helpers_decide_who_hosts() -> None:
    """A node for which the job names no helper hosts no block that may train, however fast it is."""
    known = of_users("a", "b", "c")
    for host, helper in (("a", "b"), ("b", "a"), ("c", "a")):
        found = make_plan(job_of({host: helper}), known)
        assert [piece.node for piece in found.plan.placement.hosts] == [host]
        assert helpers_by_host(found.plan) == {host: helper}
    everybody = {"a": "b", "b": "a"}
    assert has_all_helpers(make_plan(job_of(everybody), known))
    small = {**known, "c": dataclasses.replace(known["c"], memory_bytes=10)}
    with pytest.raises(
        CapacityError, match=r"node c needs .*, and no other split of the blocks over the nodes with hel"
    ):
        make_plan(job_of({"c": "a"}), small)


PAIRS = dataclasses.replace(MODEL, pair_token_bytes=24, pair_rounded_token_bytes=13, pair_projected_token_bytes=9)


def known_nodes(*names: str) -> dict[str, NodeFacts]:
    """Nodes of which the first owns rows."""
    return {
        name: dataclasses.replace(facts(name, **({} if name == names[0] else {"rows": 0})), model=PAIRS)
        for name in names
    }


def planned_with(mode: Any, *names: str, **more: Any) -> Planned:
    """The plan of a job with this ``offload.mode`` on these nodes."""
    return make_plan(job(offload__mode=mode, **more), known_nodes(*names))


def test_helpers_named_by_a_job_fit_whole_slices() -> None:
    """Every block of the host's slice that may train has that helper, and the result is that without helpers."""
    without, found = planned_with("off", "a", "b").plan, planned_with({"a": "b"}, "a", "b").plan
    assert found.placement.helpers == tuple(Helper(node="b", start=block, stop=block + 1) for block in range(2))
    assert found.placement.joined_helpers() == (Helper(node="b", start=0, stop=2),)
    assert found.course == without.course
    assert Plan.from_json(found.to_json()) == found
    # Who helps whom, with which blocks, how many bytes, and what that means for the result
    shown = planned_with({"a": "b"}, "a", "b")
    text = "\n".join(plan_text(shown.plan, shown.memory, num_steps=0, measured=False, facts=known_nodes("a")["a"]))
    tokens = shown.plan.course.batch_size * shown.plan.course.max_length
    assert f"b fits the adapters of a's blocks [0, 2): at most {format_bytes(tokens * 2 * 24)} of pairs a step" in text
    assert "the result is that of a run without helpers" in text
    rounded = planned_with({"a": "b"}, "a", "b", offload__interval=2, offload__pairs="bfloat16")
    assert "pairs of adapters have hidden states in them" in text
    text = "\n".join(plan_text(rounded.plan, rounded.memory, num_steps=0, measured=False))
    assert "helpers add up 2 steps for one update; pairs travel rounded to 16 bits: the result is not" in text


def test_helpers_that_change_the_result_are_of_the_course() -> None:
    """With an interval, or pairs that are rounded, another result comes out."""
    found = planned_with({"a": "b"}, "a", "b", offload__interval=3, offload__pairs="bfloat16").plan
    assert found.course.offload == Offload(blocks=(Range(0, 2),), interval=3, pairs="bfloat16")
    found = planned_with(
        {"a": "b"}, "a", "b", offload__overlap=True, offload__merged=True, adapter__config="linear"
    ).plan
    assert found.course.offload == Offload(blocks=(Range(0, 2),), overlap=True, merged=True)
    # Blocks that never train have no helper
    found = planned_with({"a": "b"}, "a", "b", privacy__private_blocks=1).plan
    assert all(helper.start >= 1 for helper in found.placement.helpers)
    assert found.placement.helpers


def test_helpers_of_unknown_names_or_without_need_are_told() -> None:
    """Names are known only when nodes are."""
    with pytest.raises(JobError, match=r"offload.mode.a = 'bb': no node of this run has the name 'bb'; did you mean"):
        planned_with({"a": "bb"}, "a", "bbb")
    with pytest.raises(JobError, match=r"offload.mode.z = 'a': no node of this run has the name 'z'; known here: a, b"):
        planned_with({"z": "a"}, "a", "b")
    # Who was named without need is said with the plan
    found = planned_with({"a": "b"}, "a", "b", train__method="single")
    host = found.plan.placement.hosts[0].node
    if host == "a":
        found = planned_with({"b": "a"}, "a", "b", train__method="single")
    assert not found.plan.placement.helpers
    assert "helpers are left out: offload.mode names some for " in found.note


def test_helpers_of_a_given_plan_are_those_of_the_job() -> None:
    """A plan with other helpers than the job's is refused; with auto any will do, in the job's manner."""
    found, known = planned_with({"a": "b"}, "a", "b").plan, known_nodes("a", "b")
    assert accept_plan(GivenPlan(plan=found), job(offload__mode={"a": "b"}), known).plan == found
    assert accept_plan(GivenPlan(plan=found), job(offload__mode="auto"), known).plan == found
    for other, says in (
        (job(), "offload.mode"),
        (job(offload__mode={"b": "a"}), "offload.mode"),
        (job(offload__mode={"a": "b"}, offload__interval=2), "interval 2"),
    ):
        with pytest.raises(PlanError, match=rf"the plan has .*, the job says {says}"):
            accept_plan(GivenPlan(plan=found), other, known)
    with pytest.raises(PlanError, match=r"helpers with interval 1, .* says interval 2"):
        accept_plan(GivenPlan(plan=found), job(offload__mode="auto", offload__interval=2), known)
    unfitted = dataclasses.replace(PAIRS, pair_token_bytes=0)  # as where the plan is of another adapter.config
    known = {name: dataclasses.replace(one, model=unfitted) for name, one in known.items()}
    with pytest.raises(PlanError, match=r"the plan has helpers, but none can fit this adapter\.config"):
        accept_plan(GivenPlan(plan=found), job(offload__mode="auto"), known)


def with_memory(found: dict[str, NodeFacts], **memory_bytes: int) -> dict[str, NodeFacts]:
    """These nodes with these budgets."""
    return {
        name: dataclasses.replace(one, memory_bytes=memory_bytes.get(name, one.memory_bytes))
        for name, one in found.items()
    }


def test_helpers_take_gradients_and_state_off_their_host() -> None:
    """The host holds neither gradients nor moments of adapters, the helper those and the adapters themselves."""
    without, found = (planned_with(mode, "a", "b", train__method="all") for mode in ("off", {"a": "b"}))
    state = 3 * PAIRS.adapter_block_bytes
    before, after = without.memory["a"].parts(), found.memory["a"].parts()
    assert before["optimizer"] - after["optimizer"] == 2 * state
    assert found.memory["b"].parts()["optimizer"] - without.memory["b"].parts()["optimizer"] == 2 * state
    more = found.memory["b"].parts()["adapters"] - without.memory["b"].parts()["adapters"]
    assert more == 2 * PAIRS.adapter_block_bytes
    # A helper that can't hold what it fits is named, with whose blocks these are
    known = known_nodes("a", "b")
    plan = make_plan(job(offload__mode={"a": "b"}), known)
    room = plan.memory_bytes["b"] - 1
    with pytest.raises(CapacityError, match=r"node b needs .* to fit the adapters of a's blocks \[0, 2\) but has"):
        refuse_if_full(job(offload__mode={"a": "b"}), plan.plan, with_memory(known, b=room))


def test_plan_goes_without_helpers_where_none_is_possible_and_says_so() -> None:
    """A helper is for adapters that it can fit, whatever time it would save."""
    profile = nodes(LINEAR_PARAMS, bytes_per_s=1e9)
    found, helping = planned(profile, adapter__config="ia3"), planned(profile)
    assert helping.plan.placement.helpers and not found.plan.placement.helpers
    assert "helpers are left out: offload.mode = 'auto' can't go with the adapter: " in found.note
    assert "ia3 scales what a matrix gives" in found.note
    assert "left out" not in helping.note


@pytest.mark.parametrize("settings", [HelperSettings(), HelperSettings(interval=3), HelperSettings(pairs="bfloat16")])
def test_helper_that_is_back_helps_again_where_the_job_names_it_or_it_pays(settings: HelperSettings) -> None:
    """On the slices of the run, of which the host trains its blocks alone or another helper does meanwhile."""
    profile, began = offloading.profile(LINEAR_PARAMS), {"weak": "strong"}
    part = helped(offloading.plan(), began, settings)
    other = {"weak": "owner"} if settings.needs_helpers else {}
    alone = Plan.of(
        part.course, dataclasses.replace(part.placement, helpers=helpers_of(part.course, part.placement.hosts, other))
    )

    def again(mode: object, profile: Profile = profile, step: int = 1) -> PlacementProposal | None:
        named = wanted(mode)
        return replanned(alone, named, profile, step=step, move_s=1e9, effort=QUICK, began_as=part)

    found = again(began)
    assert found is not None and found.is_worth_it and helpers_by_host(Plan.of(part.course, found.placement)) == began
    assert "strong helps weak, as offload.mode names them" in found.line()
    chosen = again("auto")
    assert chosen is not None and not chosen.is_worth_it, "a move that takes so long pays nowhere"
    gone = again(began, profile.without({"strong"}))
    assert gone is None or not gone.is_worth_it
    assert again(began, step=part.course.num_steps) is None


def test_velora_is_in_the_blocks_of_hosts_without_a_helper() -> None:
    """A helped host computes no gradients of weights; ``auto`` leaves the helpers out, and no block may be left."""
    made = {
        "adapter__config": "lora[output_lora=True]",
        "memory__activations": "velora",
        "train__method": "all",
        "velora__parts": 8,
    }
    kept = (KeptInput(layers=("adapter_down:down",), width=64, lora=1),)
    known = {
        name: dataclasses.replace(one, model=dataclasses.replace(one.model, kept_inputs=kept))
        for name, one in known_nodes("a", "b").items()
    }

    def blocks(mode: Any) -> tuple[Planned, list[int]]:
        found = make_plan(job(offload__mode=mode, **made), known)
        velora = found.plan.course.velora
        return found, [one for part in velora.blocks for one in range(*part)] if velora else []

    _, every = blocks("off")
    some, own = blocks({"a": "b"})
    helped_blocks = [one.start for one in some.plan.placement.helpers]
    assert helped_blocks and own and sorted(helped_blocks + own) == every
    assert accept_plan(GivenPlan(plan=some.plan), job(offload__mode={"a": "b"}, **made), known).plan == some.plan
    without, same = blocks("auto")
    assert same == every and not without.plan.placement.helpers
    assert "helpers are left out: offload.mode = 'auto' can't go with VeLoRA" in without.note
    both, none = blocks({"a": "b", "b": "a"})
    assert not none and "VeLoRA projects nothing: every host of blocks that train has a helper" in both.note


def test_helpers_whose_pairs_no_link_takes_are_refused_in_planning() -> None:
    """However much memory there is; else a link refuses them in the middle of the run. A given plan too."""
    large = dataclasses.replace(PAIRS, pair_token_bytes=1 << 30)
    roomy = {
        name: dataclasses.replace(one, model=large, memory_bytes=1 << 50) for name, one in known_nodes("a", "b").items()
    }
    wanted = job(offload__mode={"a": "b"})
    with pytest.raises(CapacityError, match=r"the pairs of a's blocks \[0, 1\) for helper b have .*; raise train"):
        make_plan(wanted, roomy)
    with pytest.raises(CapacityError, match="for helper b have"):
        refuse_if_full(wanted, planned_with({"a": "b"}, "a", "b").plan, roomy)


@pytest.mark.parametrize("settings", [HelperSettings(), HelperSettings(interval=3), HelperSettings(pairs="bfloat16")])
def test_host_of_a_lost_helper_gets_another_one_only_where_the_result_needs_it(settings: HelperSettings) -> None:
    """An interval is kept without a helper too; what is rounded on its way to a helper is not."""
    profile = offloading.profile(LINEAR_PARAMS)
    part = helped(offloading.plan(), {"weak": "strong"}, settings)
    placed = placed_without(part, wanted(), profile, {"strong"}, QUICK)
    (host,) = {piece.node for piece in placed.hosts}
    assert {host, *(one.node for one in placed.helpers)} == ({"weak", "owner"} if settings.needs_helpers else {host})
    assert not settings.needs_helpers or [one.start for one in placed.helpers] == [0, 1, 2, 3]
    lonely = dataclasses.replace(part.course, owners=(dataclasses.replace(part.course.owners[0], node="weak"),))
    if settings.needs_helpers:
        with pytest.raises(CapacityError, match="no ring of weak, with a helper for each host, has memory"):
            placed_without(Plan(lonely, part.placements), wanted(), profile, {"strong", "owner"}, QUICK)


def test_host_of_a_lost_helper_gets_another_one_if_nothing_fits_otherwise() -> None:
    """All blocks on one node, which has no memory for the moments of their adapters."""
    profile, part = offloading.profile(LINEAR_PARAMS), changed(offloading.plan(), method=Single())
    alone = placed_without(part, wanted(), profile, {"strong"}, QUICK)
    (host,) = {piece.node for piece in alone.hosts}
    needs = keep_plan(wanted(), Plan.of(part.course, alone), profile.by_name).memory[host].total_bytes
    tight = dataclasses.replace(
        profile, nodes=tuple(dataclasses.replace(one, memory_bytes=needs - 10_000_000) for one in profile.nodes)
    )
    assert not alone.helpers and placed_without(part, wanted(), tight, {"strong"}, QUICK).helpers
