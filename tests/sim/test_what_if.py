"""Tests of ``sim.what_if``: changes, break even."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest

from ringtune.costs.memory_estimate import node_memory
from ringtune.costs.profile import LinkFacts, Profile
from ringtune.errors import PlanError, UsageError
from ringtune.schedule.methods import Everything, RingAda
from ringtune.schedule.migration import stay_reason
from ringtune.schedule.operation_tables import Choice, Operations, ScheduledTable
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Range
from ringtune.techniques.offload import helped
from sim.prediction import predict
from sim.what_if import add_node, change_all, drop_from_plan, drop_from_profile, split_change
from tests.support import plans
from tests.support.cases import cases
from tests.support.moves import moving, moving_at_random
from tests.support.offloading import LINEAR_PARAMS, LOW_RANK_PARAMS, MEGABIT, plan, profile
from tests.support.plans import make_plan
from tests.support.profiles import all_pairs, profile_of, random_profile

PLAN = make_plan([("pi-1", 0, 1), ("pi-2", 1, 3), ("pi.3", 3, 4)], ["pi-1", "pi-2"], batch_size=8)
PROFILE = profile_of(PLAN, links=all_pairs(PLAN.nodes, 1e6, 0.01))


def changed(*changes: str, profile: Profile = PROFILE, plan: Plan = PLAN) -> tuple[Profile, Plan]:
    """The pair with changes."""
    return change_all(profile, plan, changes)


@cases("speed", [0.25, 0.5, 2.0])
def test_changes_of_compute_divide_every_time_of_that_node(speed: float) -> None:
    """Half as fast is twice the time, of every work; other nodes, links and plan stay."""
    profile, plan = changed(f"pi-2.compute={speed}")
    before, after = PROFILE.by_name["pi-2"], profile.by_name["pi-2"]
    assert [time.median_s * speed for time in after.work_times] == [time.median_s for time in before.work_times]
    assert [time.high_s * speed for time in after.work_times] == [time.high_s for time in before.work_times]
    assert after.block_backward_s * speed == before.block_backward_s
    assert after.block_forward_s * speed == before.block_forward_s
    assert [node for node in profile.nodes if node.node != "pi-2"] == [PROFILE.nodes[0], PROFILE.nodes[2]]
    assert (profile.links, plan) == (PROFILE.links, PLAN)


def test_changes_of_compute_are_of_what_an_action_takes_besides_its_work() -> None:
    """Handling and messages take the processor too; the rest that a quota gives does not belong to it."""
    node = dataclasses.replace(PROFILE.nodes[0], handling_s=0.002, message_s_per_byte=1e-8, rested_s=0.3)
    found = node.at_pace(2.0)
    assert (found.handling_s, found.message_s_per_byte, found.rested_s) == (0.004, 2e-8, 0.3)


def test_changes_of_compute_undo_themselves() -> None:
    """Half of twice is what it was, and no change changes nothing."""
    assert changed() == changed("pi-2.compute=2", "pi-2.compute=0.5") == (PROFILE, PLAN)
    assert PROFILE.nodes[0].at_pace(0.25).at_pace(4.0) == PROFILE.nodes[0]


def test_changes_of_compute_everywhere_scale_the_run() -> None:
    """On one machine, where messages take no time, a fleet twice as fast takes half as long."""
    plain = profile_of(PLAN)
    faster, _ = changed("*.compute=2", profile=plain)
    assert predict(PLAN, faster).wall_s == pytest.approx(predict(PLAN, plain).wall_s / 2)


def test_changes_of_compute_are_of_the_whole_processor() -> None:
    """What a byte takes of the processor changes at that node's end of its links only; rates stay."""
    links = tuple(
        dataclasses.replace(link, send_cpu_s_per_byte=4e-9, receive_cpu_s_per_byte=2e-9) for link in PROFILE.links
    )
    profile, _ = changed("pi-2.compute=0.5", profile=dataclasses.replace(PROFILE, links=links))
    for link in profile.links:
        assert link.send_cpu_s_per_byte == (8e-9 if link.source == "pi-2" else 4e-9)
        assert link.receive_cpu_s_per_byte == (4e-9 if link.target == "pi-2" else 2e-9)
        assert link.rate_bytes_per_s == 1e6


@cases(("text", "num_bytes"), [("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1000", 1000)])
def test_changes_of_memory_set_the_budget(text: str, num_bytes: int) -> None:
    """In the units that people use."""
    profile, _ = changed(f"pi-1.memory={text}")
    assert [node.memory_bytes for node in profile.nodes] == [num_bytes, 10**9, 10**9]


@cases("text", ["20e6", "20MB", "20MB/s", "20000000", "160Mbit", "160Mbit/s", "0.16Gbit"])
def test_changes_of_a_rate_touch_one_direction(text: str) -> None:
    """Links are directed; quartiles of the old rate go."""
    spread = dataclasses.replace(PROFILE.links[0], rate_low_bytes_per_s=1.0, rate_high_bytes_per_s=2.0)
    start = dataclasses.replace(PROFILE, links=(spread, *PROFILE.links[1:]))
    profile, _ = changed(f"link.pi-1.pi-2.rate={text}", profile=start)
    assert profile.links[0] == LinkFacts(source="pi-1", target="pi-2", rate_bytes_per_s=2e7, latency_s=0.01)
    assert profile.links[1:] == PROFILE.links[1:]


def test_changes_of_a_latency_find_names_with_dots() -> None:
    """``pi-2.pi.3`` can only be one pair."""
    profile, _ = changed("link.pi-2.pi.3.latency=0", "link.pi.3.pi-1.latency=2")
    latencies = {pair: link.latency_s for pair, link in profile.link_by_pair.items() if link.latency_s != 0.01}
    assert latencies == {("pi-2", "pi.3"): 0.0, ("pi.3", "pi-1"): 2.0}


@cases(
    ("pair", "touched"),
    [
        ("*.*", set(PROFILE.link_by_pair)),
        ("pi-1.*", {("pi-1", "pi-2"), ("pi-1", "pi.3")}),
        ("*.pi.3", {("pi-1", "pi.3"), ("pi-2", "pi.3")}),
    ],
)
def test_changes_of_links_take_a_star_for_every_node(pair: str, touched: set[tuple[str, str]]) -> None:
    """All links, all that leave a node, all that enter it."""
    profile, _ = changed(f"link.{pair}.rate=5")
    assert {each for each, link in profile.link_by_pair.items() if link.rate_bytes_per_s == 5} == touched


def test_changes_give_nodes_of_one_machine_links() -> None:
    """A run on one machine can be asked about a network."""
    profile, _ = changed("link.*.*.rate=1e6", "link.pi-1.pi-2.latency=0.5", profile=profile_of(PLAN))
    assert set(profile.link_by_pair) == set(PROFILE.link_by_pair)
    assert profile.link_by_pair["pi-1", "pi-2"].latency_s == 0.5
    assert predict(PLAN, profile).wall_s > predict(PLAN, profile_of(PLAN)).wall_s


@cases(
    ("change", "key", "value"),
    [
        ("microbatches=4", "microbatches", 4),
        ("batch_size=16", "batch_size", 16),
        ("every_steps=7", "method", RingAda(every_steps=7)),
        ("wire_dtype=int8", "wire_dtype", "int8"),
        ("num_steps=3", "num_steps", 3),
        ("local_iterations=1", "local_iterations", 1),
        ("credits=1", "credits", 1),
        ("method=all", "method", Everything()),
        ("eval_every=2", "eval_every", 2),
        ("checkpoint_every=2", "checkpoint_every", 2),
    ],
)
def test_changes_of_the_plan_set_its_keys(change: str, key: str, value: object) -> None:
    """Slices stay; the changed plan is predicted like any other."""
    profile, plan = changed(change)
    assert plan == plans.changed(PLAN, **{key: value})
    assert predict(plan, profile).num_steps == plan.course.num_steps


def test_changes_of_the_plan_hold_together() -> None:
    """More micro-batches than rows are allowed if the same question has more rows."""
    assert changed("microbatches=16", "batch_size=16")[1].course.microbatches == 16


def test_changes_of_micro_batches_scale_what_a_forward_keeps() -> None:
    """Half the rows in each keep half, as it is measured for a token; times come from the measured sizes."""
    profile, plan = changed("microbatches=4")
    assert profile == PROFILE
    tokens = PLAN.course.batch_size * PLAN.course.max_length
    assert graph_bytes(PLAN, PROFILE) == [20_000 * tokens / 2] * 3
    assert graph_bytes(plan, profile) == [20_000 * tokens / 4] * 3


def graph_bytes(plan: Plan, profile: Profile) -> list[int]:
    """What one block keeps for the backward of one micro-batch, at every node."""
    return [
        term.each_bytes
        for node in profile.nodes
        for term in node_memory(
            plan, node.node, node.model, optimizer="adamw", activation_token_bytes=node.activation_token_bytes
        ).terms
        if term.what == "block's graph of a micro-batch"
    ]


def test_changes_of_micro_batches_need_times_of_more_sizes() -> None:
    """Where only one size was measured nobody knows the time of another."""
    bare = dataclasses.replace(PROFILE, nodes=tuple(dataclasses.replace(n, work_times=()) for n in PROFILE.nodes))
    with pytest.raises(PlanError, match="node pi-1 has times of micro-batches of 4 rows only, not of 2; measure"):
        changed("microbatches=4", profile=bare)


@cases("key", ["batch_size", "microbatches"])
@cases("subnets", [1, 2])
def test_changes_of_batches_of_operation_tables_are_refused(key: str, subnets: int) -> None:
    """A table by itself, or several: which rows a batch has and how it is parted is not theirs any more."""
    table = Operations(subnets=subnets)
    given = (
        {"operations": table} if subnets == 1 else {"choice": Choice.given([ScheduledTable(step=0, operations=table)])}
    )
    plan = plans.changed(PLAN, **given)
    now = getattr(PLAN.course, key)
    with pytest.raises(PlanError, match=rf"--change {key}={now + 1}: the plan has operation tables .* {key} = {now}"):
        change_all(PROFILE, plan, [f"{key}={now + 1}"])
    assert change_all(PROFILE, plan, [f"{key}={now}"])[1] == plan


@cases(
    ("change", "message"),
    [
        ("pi-9.compute=1", "no node 'pi-9'; did you mean 'pi-"),
        ("pi-1.comput=1", "unknown key 'comput'; did you mean 'compute'?"),
        ("pi-1.compute=0", "it has to be above 0"),
        ("pi-1.compute=-1", "it has to be above 0"),
        ("pi-1.compute=nan", "it has to be a finite number"),
        ("pi-1.compute=inf", "it has to be a finite number"),
        ("pi-1.compute=fast", "'fast' is no number"),
        ("pi-1.memory=0", "it has to be above 0"),
        ("pi-1.memory=-5MiB", "'-5MiB' is not a size; write it like 512MiB"),
        ("link.pi-1.pi-9.rate=1", "no link 'pi-1.pi-9'; did you mean 'pi-1.pi-2'?"),
        ("link.pi-1.rate=1", "no link 'pi-1'"),
        ("link.pi-1.pi-1.rate=1", "no link 'pi-1.pi-1'"),
        ("link.pi-1.pi-2.speed=1", "unknown key 'speed' of a link"),
        ("link.pi-1.pi-2.laten=1", "did you mean 'latency'?"),
        ("link.pi-1.pi-2.rate=0", "it has to be above 0"),
        ("link.pi-1.pi-2.rate=-20e6", "'-20e6' is not a rate; write it like 100Mbit"),
        ("link.pi-1.pi-2.rate=1e999", "it has to be a finite number"),
        ("link.pi-1.pi-2.rate=100Mb", "'100Mb' is not a rate; write it like 100Mbit"),
        ("link.pi-1.pi-2.latency=-0.1", "it has to be at least 0"),
        ("microbatch=2", "unknown key of the plan; did you mean 'microbatches'?"),
        ("microbatches=2.5", "'2.5' is no whole number"),
        ("microbatches=0", "microbatches is 0, it has to be at least 1"),
        ("microbatches=9", "9 micro-batches do not fit a batch of 8 rows"),
        ("wire_dtype=int7", "wire_dtype = 'int7' is not one of"),
        ("method=single", "give --replan JOB"),
        ("method=hift", "the sizes and times of ringada are of other trained weights"),
    ],
)
def test_changes_that_make_no_sense_are_named(change: str, message: str) -> None:
    """What, and which name is nearest."""
    with pytest.raises(PlanError) as caught:
        changed(change)
    assert message in str(caught.value)


def test_changes_of_links_that_there_are_none_of_say_how_to_get_them() -> None:
    """A profile of one machine has no links to change."""
    with pytest.raises(PlanError, match=r"has no links, messages take no time; .*link\.\*\.\*\.rate=100Mbit"):
        changed("link.pi-1.pi-2.rate=1", profile=profile_of(PLAN))


@cases("text", ["", "pi-1.compute", "=3", "pi-1.compute="])
def test_split_change_needs_key_and_value(text: str) -> None:
    """A slip of form is about the command line."""
    with pytest.raises(UsageError, match="is not KEY=VALUE"):
        split_change(text)


# ---- members -----------------------------------------------------------------------------------------


@cases(
    ("name", "slices"),
    [
        ("pi-1", [("pi-2", 0, 3), ("pi.3", 3, 4)]),
        ("pi-2", [("pi-1", 0, 3), ("pi.3", 3, 4)]),
        ("pi.3", [("pi-1", 0, 1), ("pi-2", 1, 4)]),
    ],
)
def test_drop_gives_the_blocks_to_the_host_before(name: str, slices: list[tuple[str, int, int]]) -> None:
    """Those of the first host go to the next one; what is left is a valid plan that can be predicted."""
    plan = drop_from_plan(PLAN, name)
    assert [(piece.node, piece.start, piece.stop) for piece in plan.placement.slices] == slices
    assert [owner.node for owner in plan.course.owners] == [node for node in ("pi-1", "pi-2") if node != name]
    assert predict(plan, drop_from_profile(PROFILE, name)).num_steps == PLAN.course.num_steps


def test_drop_passes_over_hosts_without_blocks() -> None:
    """An empty slice inherits nothing while there is a neighbour with blocks, but everything if there is none."""
    plan = make_plan([("a", 0, 2), ("b", 2, 2), ("c", 2, 4)], ["a", "c"])
    assert [(s.node, s.start, s.stop) for s in drop_from_plan(plan, "c").placement.slices] == [("a", 0, 4), ("b", 2, 2)]
    alone = make_plan([("b", 0, 0), ("c", 0, 4)], ["b", "c"])
    assert [(s.node, s.start, s.stop) for s in drop_from_plan(alone, "c").placement.slices] == [("b", 0, 4)]


def test_drop_leaves_the_blocks_of_a_stage_to_its_other_hosts() -> None:
    """In every placement; a stage of one host gives its blocks to all hosts of the stage below, or of the one above."""
    first = make_plan([("a", 0, 1), ("d", 1, 6)], ["a", "b", "c"], num_blocks=6, local_iterations=2, method="all")
    plan = moving(first, (2, [("a", 0, 1), ("b", 1, 6, 2), ("c", 1, 6, 1)]))

    def slices(name: str) -> list[list[tuple[str, int, int, int]]]:
        left = drop_from_plan(plan, name)
        return [[(s.node, s.start, s.stop, s.share) for s in one.slices] for one in left.placements]

    assert slices("c") == [[("a", 0, 1, 1), ("d", 1, 6, 1)], [("a", 0, 1, 1), ("b", 1, 6, 1)]]
    assert slices("a") == [[("d", 0, 6, 1)], [("b", 0, 6, 2), ("c", 0, 6, 1)]]
    assert slices("d") == [[("a", 0, 6, 1)], [("a", 0, 1, 1), ("b", 1, 6, 2), ("c", 1, 6, 1)]]


CHANGES = (
    "*.compute=0.5",
    "*.memory=1GB",
    "link.*.*.rate=1e6",
    "link.*.*.latency=0.1",
    "credits=2",
    "microbatches=3",
    "batch_size=5",
    "num_steps=7",
    "local_iterations=3",
    "method=all",
    "method=ringada",
    "method=pipeadapter",
    "method=single",
    "every_steps=2",
    "activations=recompute",
    "activations=none",
    "eval_every=2",
    "checkpoint_every=3",
    "offload=off",
    "wire_dtype=bfloat16",
)
REFUSALS = (
    "--drop [^ ]+: it is the only owner of data",
    "--drop [^ ]+: it hosts all blocks; give --replan JOB",
    "--change method=single: it wants 1 host at most, the plan has [2-4]; give --replan JOB",
    "--change every_steps has no effect: this plan of (all|pipeadapter) does not unfreeze by it",
    "--change link.*: the profile has no links",
    "a run can't move to another placement: the result of pipeadapter depends on the ring",
    "--change (batch_size|microbatches)=[35]: the plan has operation tables of batches",
)


@cases("seed", range(30))
def test_every_plan_answers_every_change_or_says_what_it_refuses(seed: int) -> None:
    """Any hosts, replicas, placements, tables, and owners without blocks; what comes of a change can be predicted."""
    refused: list[str] = []
    rng = random.Random(f"change {seed}")
    plan = plans.random_plan(rng, with_operations=seed % 5 == 0)
    if not stay_reason(plan.course) and rng.random() < 0.6:
        plan = moving_at_random(rng, plan)
    profile = random_profile(plan, rng)
    answers: list[tuple[str, Profile, Plan]] = []
    for name in (*plan.nodes, *CHANGES):
        try:
            if "=" in name:
                answers.append((name, *change_all(profile, plan, [name])))
            else:
                answers.append((name, drop_from_profile(profile, name), drop_from_plan(plan, name)))
        except PlanError as error:
            refused.append(str(error))
    for name, after, changed_plan in answers:
        assert name not in changed_plan.nodes
        assert {one.node for one in after.nodes} >= set(changed_plan.nodes), (seed, name)
        assert len(changed_plan.placements) <= len(plan.placements)
    for _, after, changed_plan in rng.sample(answers, 1):
        assert predict(changed_plan, after).num_steps == changed_plan.course.num_steps
    assert [text for text in refused if not any(re.match(known, text) for known in REFUSALS)] == []


def test_drop_takes_the_links_along() -> None:
    """Nothing in the profile names the node any more."""
    profile = drop_from_profile(PROFILE, "pi-2")
    assert [node.node for node in profile.nodes] == ["pi-1", "pi.3"]
    assert set(profile.link_by_pair) == {("pi-1", "pi.3"), ("pi.3", "pi-1")}


def test_drop_of_what_is_needed_is_refused() -> None:
    """Somebody has to have data and blocks."""
    with pytest.raises(PlanError, match="--drop a: it is the only owner of data"):
        drop_from_plan(make_plan([("a", 0, 4)], ["a"]), "a")
    with pytest.raises(PlanError, match="--drop a: it hosts all blocks; give --replan JOB"):
        drop_from_plan(make_plan([("a", 0, 4)], ["a", "b"]), "a")
    with pytest.raises(PlanError, match="--drop pi-7: the profile has no such node; did you mean 'pi-"):
        drop_from_profile(PROFILE, "pi-7")


def test_drop_of_a_node_without_a_part_changes_nothing() -> None:
    """A plan that does not use it stays."""
    assert drop_from_plan(PLAN, "pi-9") == PLAN


def test_add_is_a_twin_without_data() -> None:
    """Speed, memory and links of the model; rows and labels of nobody."""
    profile = add_node(PROFILE, "pi-4", "pi-1")
    twin, model = profile.by_name["pi-4"], profile.by_name["pi-1"]
    assert (twin.work_times, twin.memory_bytes) == (model.work_times, model.memory_bytes)
    assert (twin.train_rows, twin.eval_rows, twin.labels, twin.eval_labels) == (0, 0, (), ())
    assert [node.node for node in profile.nodes] == ["pi-1", "pi-2", "pi-4", "pi.3"]
    assert len(profile.links) == 4 * 3


def test_add_joins_the_twins_by_the_models_slower_side() -> None:
    """Between the two the fastest way out and the fastest way in of the model count, with the longer latency."""
    links = {("a", "b"): (50.0, 0.1), ("b", "a"): (20.0, 0.3), ("a", "c"): (80.0, 0.2), ("c", "a"): (30.0, 0.1)}
    plan = make_plan([("a", 0, 4)], ["a", "b", "c"])
    profile = add_node(profile_of(plan, links=links), "d", "a")
    between = profile.link_by_pair["a", "d"]
    assert (between.rate_bytes_per_s, between.latency_s) == (30.0, 0.2)
    assert profile.link_by_pair["d", "b"].rate_bytes_per_s == 50.0
    assert profile.link_by_pair["b", "d"].rate_bytes_per_s == 20.0


def test_add_refuses_taken_and_unknown_names() -> None:
    """A name stands for one node, and the model has to be known."""
    with pytest.raises(PlanError, match="--add pi-2: the profile has a node of that name already"):
        add_node(PROFILE, "pi-2", "pi-1")
    with pytest.raises(PlanError, match="--like pi-8: the profile has no such node; did you mean"):
        add_node(PROFILE, "pi-4", "pi-8")
    with pytest.raises(UsageError, match="node name 'PI 4' is not allowed"):
        add_node(PROFILE, "PI 4", "pi-1")


def test_changes_of_activations_fill_in_which_blocks_run_again() -> None:
    """All that may train, or none; what only a planner can fill in is left to it."""
    _, again = changed("activations=recompute")
    assert again.placement.recompute == (Range(0, 4),)
    assert again.course == PLAN.course
    assert changed("activations=none", plan=again)[1] == PLAN
    assert predict(again, PROFILE).wall_s > predict(PLAN, PROFILE).wall_s
    with pytest.raises(PlanError, match="--change activations=auto: without planning it is 'none' or 'recompute'"):
        changed("activations=auto")


def gained_s(adapter_params: int, bytes_per_s: float) -> float:
    """The seconds that helpers save, by the simulator, at a rate of all links."""
    given = profile(adapter_params, bytes_per_s=bytes_per_s)
    return predict(helped(plan(), {}), given).wall_s - predict(plan(), given).wall_s


def test_helpers_pay_for_linear_adapters_where_links_are_fast() -> None:
    """On slow links the step waits for pairs, on fast ones the weak host has less to compute."""
    assert gained_s(LINEAR_PARAMS, 1e6) < 0 < gained_s(LINEAR_PARAMS, 1e9)


@cases("rate", [MEGABIT / 10, MEGABIT])
def test_helpers_do_not_pay_for_low_rank_on_a_slow_link(rate: float) -> None:
    """Pairs are as large as those of full matrices, but there is next to nothing to compute."""
    assert gained_s(LOW_RANK_PARAMS, rate) < 0
