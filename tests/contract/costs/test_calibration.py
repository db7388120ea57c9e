"""Tests of ``ringtune.costs.calibration``: recorded times, link pace."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.calibration import MIN_TIMES, LinkMonitor, RecordedProfile
from ringtune.costs.links import KEPT_SAMPLES
from ringtune.costs.profile import PART_OF, WHOLE_WORKS, LinkFacts, NodeFacts, Profile, Work, WorkTime
from ringtune.models.kept_inputs import KeptInput
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.course import Generation
from ringtune.schedule.methods import Hift
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.turns import StepKind, items, turn_sequence
from ringtune.schedule.units import EMBEDDING, Range
from ringtune.schedule.versions import trained
from sim.ledger import Items
from sim.meter import ProfileTimes
from tests.support.cases import cases
from tests.support.choosing import make_choice
from tests.support.plans import changed, make_plan, random_operations
from tests.support.profiles import TIMES, node, part, point, profile_of
from tests.support.recorded_ring import RecordedRing

UNSIZED = (Work.UPDATE, Work.UPDATE_HEAD, Work.HAND_OVER, Work.SAVE)
PLAN = make_plan(
    [("a", 0, 1), ("b", 1, 4), ("c", 4, 6)],
    ["a", "d"],
    num_blocks=6,
    num_steps=60,
    local_iterations=5,
    every_steps=8,
    microbatches=2,
    batch_size=8,
    max_length=16,
    train_rows=40,
    eval_rows=26,
    eval_every=10,
    checkpoint_every=10,
)

FIRST_TOKENS = changed(PLAN, head_tokens=1, trims=True)
"""The last block computes one token of each row."""


def sized(name: str, factors: dict[Work, float], *, train: float = 0.0, evaluation: float = 0.0) -> NodeFacts:
    """A node whose works cost a second and a hundredth for each padded token, times a factor."""
    points = []
    for work, factor in factors.items():
        sizes = ((0, 0),) if work in UNSIZED else ((4, 16), (4, 8))
        points += [point(work, factor * (1 + rows * tokens / 100), rows=rows, tokens=tokens) for rows, tokens in sizes]
    facts = node(PLAN, name)
    return dataclasses.replace(facts, work_times=tuple(points), train_tokens=train, eval_tokens=evaluation)


def made_up(seed: int, *, lowest: float = 0.8) -> Profile:
    """Any speeds for all kinds of work; the lowest trainable block takes that share of the time of the others."""
    rng, nodes = random.Random(seed), []
    for name, train, evaluation in (("a", 11.0, 7.0), ("b", 0.0, 0.0), ("c", 0.0, 0.0), ("d", 12.5, 16.0)):
        factors = {work: rng.uniform(0.5, 2.0) for work in WHOLE_WORKS}
        factors[Work.GRAPH_LOWEST] = lowest * factors[Work.GRAPH]
        factors[Work.BACKWARD_LOWEST] = lowest * factors[Work.BACKWARD]
        nodes.append(sized(name, factors, train=train, evaluation=evaluation))
    return Profile(nodes=tuple(nodes))


Recorded = list[tuple[str, Action, float]]


def items_of(plan: Plan, costs: CourseCosts) -> Items:
    """All items of a run."""
    items = Items(costs)
    for turn in turn_sequence(plan.course):
        items.granted(turn)
    return items


def virtual_run(plan: Plan, true: Profile) -> Recorded:
    """Every action of a run whose costs are known."""
    costs = CourseCosts.of(plan, true)
    run = RecordedRing(plan, action_s=ProfileTimes(items_of(plan, costs))).run()
    assert run.finish is not None and run.finish.error == ""
    return [(name, span.action, span.end_s - span.start_s) for name, spans in run.spans.items() for span in spans]


def corrected(plan: Plan, prior: Profile, recorded: Recorded) -> Profile:
    """The profile after a run with these actions."""
    found = RecordedProfile(plan.course, prior, recompute=plan.placement.recompute)
    for turn in turn_sequence(plan.course):
        found.granted(turn)
    for name, action, seconds in recorded:
        found.add(name, action, seconds)
    return found.profile()


def predictions(plan: Plan, profile: Profile, recorded: Recorded) -> list[float]:
    """What a profile says of each recorded action."""
    costs = CourseCosts.of(plan, profile)
    times = ProfileTimes(items_of(plan, costs))
    return [times(name, action) for name, action, _ in recorded]


@cases("plan", [PLAN, FIRST_TOKENS])
@cases("seed", range(2))
def test_recorded_profile_predicts_every_action_of_the_run(seed: int, plan: Plan) -> None:
    """The prior knows the form of the costs but no speed; afterwards each action's time is right."""
    recorded = virtual_run(plan, made_up(seed))
    found = corrected(plan, made_up(seed + 100), recorded)
    assert predictions(plan, found, recorded) == pytest.approx([seconds for *_, seconds in recorded], rel=1e-6)


@cases("again", [((0, 6),), ((1, 3), (4, 5))])
def test_recorded_profile_predicts_a_run_whose_blocks_run_again(again: tuple[tuple[int, int], ...]) -> None:
    """Forwards without graph are known by themselves; the rest stands to each other as it was measured."""
    plan = changed(PLAN, recompute=tuple(Range(*one) for one in again))
    recorded = virtual_run(plan, made_up(3))
    slower = dataclasses.replace(made_up(3), nodes=tuple(twice_as_slow(facts) for facts in made_up(3).nodes))
    found = corrected(plan, slower, recorded)
    assert predictions(plan, found, recorded) == pytest.approx([seconds for *_, seconds in recorded], rel=1e-6)
    assert predictions(plan, slower, recorded)[:9] == pytest.approx([2 * seconds for *_, seconds in recorded[:9]])


def twice_as_slow(facts: NodeFacts) -> NodeFacts:
    """A node whose works all take twice their time."""
    times = ("median_s", "low_s", "high_s")
    points = (dataclasses.replace(at, **{name: 2 * getattr(at, name) for name in times}) for at in facts.work_times)
    return dataclasses.replace(facts, work_times=tuple(points))


def test_recorded_profile_knows_how_much_longer_projections_take() -> None:
    """The time that is noted is that of blocks without them."""
    plan = changed(PLAN, velora=Velora(blocks=(Range(0, 6),), layers=("down",), parts=8))
    recorded = virtual_run(plan, made_up(3))
    found = corrected(plan, made_up(4), recorded)
    assert predictions(plan, found, recorded) == pytest.approx([seconds for *_, seconds in recorded], rel=1e-6)


@cases("again", [(), (Range(0, 6),)])
def test_recorded_profile_knows_how_much_shorter_backwards_of_own_weights_are(again: tuple[Range, ...]) -> None:
    """What projections leave out stands to a backward as forwards were measured to stand to it."""
    plan = changed(PLAN, velora=Velora(blocks=(Range(0, 6),), layers=("down",), parts=8), recompute=again)
    true = dataclasses.replace(made_up(3, lowest=1.0), nodes=tuple(map(own_weights, made_up(3, lowest=1.0).nodes)))
    slower = dataclasses.replace(true, nodes=tuple(map(twice_as_slow, true.nodes)))
    recorded = virtual_run(plan, true)
    found = corrected(plan, slower, recorded)
    assert predictions(plan, found, recorded) == pytest.approx([seconds for *_, seconds in recorded], rel=1e-6)
    without = virtual_run(changed(PLAN, recompute=again), true)
    assert sum(seconds for *_, seconds in recorded) < sum(seconds for *_, seconds in without)


def own_weights(facts: NodeFacts) -> NodeFacts:
    """A node whose blocks train themselves."""
    inputs = (KeptInput(layers=("up",), width=32), KeptInput(layers=("down",), width=128))
    model = dataclasses.replace(facts.model, kept_inputs=inputs, hidden_size=32, intermediate_size=128)
    return dataclasses.replace(facts, model=model)


@cases(
    ("kind", "op", "seconds", "values"),
    [
        (StepKind.SCORE, Op.BACKWARD, 99.0, {"choice": make_choice(subnets=1)}),
        (StepKind.GENERATE, Op.FORWARD_FREE, 0.0, {"generation": Generation(rows=9, max_new_tokens=9, at_once=2)}),
    ],
)
def test_recorded_profile_takes_no_times_of_scores_and_texts(
    kind: StepKind, op: Op, seconds: float, values: dict[str, Any]
) -> None:
    """Actions of score turns do more than those of steps, and a text that has ended passes blocks in no time."""
    plan, prior = changed(PLAN, **values), made_up(2)
    turn = next(turn for turn in turn_sequence(plan.course) if turn.kind is kind)
    found = RecordedProfile(plan.course, prior)
    found.granted(turn)
    for seq in range(turn.first_seq, turn.end_seq):
        for micro in range(2):
            found.add("b", Action(op, seq, micro, 3, 4), seconds)
    assert found.profile() == prior


def test_recorded_profile_leaves_what_was_seldom_or_never_seen() -> None:
    """Fewer than five of a kind say little: they stay as measured, and so do other nodes and links."""
    prior = profile_of(PLAN, links={("a", "b"): (1e6, 0.1)})
    enough = [("c", Action(Op.BACKWARD, seq, 0, 5, 6), 9.0) for seq in range(MIN_TIMES)]
    assert corrected(PLAN, prior, enough[1:]) == prior
    found = corrected(PLAN, prior, enough)
    assert [name for name in prior.by_name if found.by_name[name] != prior.by_name[name]] == ["c"]
    assert found.links == prior.links


def test_recorded_profile_takes_a_range_apart_as_it_was_measured() -> None:
    """Measured are 4 s and, of the lowest block, 3 s: of 11 s for three blocks 4, 4 and 3 are theirs, of 22 s twice."""
    plan = make_plan([("a", 0, 6)], ["a"], num_blocks=6, method="all", num_steps=40)
    found = corrected(plan, profile_of(plan), [("a", Action(Op.FORWARD, seq, 0, 0, 6), 46.0) for seq in range(8)])
    points = found.by_name["a"]
    assert by_work(points, Work.GRAPH).median_s == pytest.approx(8.0)
    assert by_work(points, Work.GRAPH_LOWEST).median_s == pytest.approx(6.0)
    assert by_work(points, Work.GRAPH).samples == 8


def test_recorded_profile_counts_the_batch_in_the_mean_of_its_embeddings() -> None:
    """The first embedding of an item makes the batch: 3 s and 1 s are two of 2 s."""
    plan = make_plan([("a", 0, 4)], ["a"], num_steps=20, microbatches=2)
    embeds = [("a", Action(Op.EMBED, seq, micro), 3.0 - 2 * micro) for seq in range(6) for micro in range(2)]
    found = by_work(corrected(plan, profile_of(plan), embeds).by_name["a"], Work.EMBED)
    assert (found.median_s, found.low_s, found.high_s, found.samples) == (2.0, 2.0, 2.0, 6)


def test_recorded_profile_ignores_what_belongs_to_no_granted_turn() -> None:
    """A straggler's report after its turn, an unknown node, a clock that went back: nothing breaks, nothing counts."""
    prior = profile_of(PLAN)
    found = RecordedProfile(PLAN.course, prior)
    turn = next(turn_sequence(PLAN.course))
    found.granted(turn)
    for _ in range(MIN_TIMES):
        found.add("stranger", Action(Op.BACKWARD, 0, 0, 5, 6), 1.0)
        found.add("c", Action(Op.BACKWARD, 0, 0, 5, 6), -1.0)
        found.add("c", Action(Op.SEND, 0, 0, 4, 0, "a", "g"), 1.0)
    found.turn_done(turn)
    for _ in range(MIN_TIMES):
        found.add("c", Action(Op.BACKWARD, 0, 0, 5, 6), 1.0)
    assert found.profile() == prior


@cases(
    ("action", "seconds"),
    [
        *((Action(Op.BACKWARD, 0, 0, 5, 6), seconds) for seconds in (float("nan"), float("inf"), -1.0)),
        (Action(Op.BACKWARD, 0, 0, 5, 5), 1.0),
        (Action(Op.FORWARD, 0, 0, 6, 5), 1.0),
        (Action(Op.FORWARD_FREE, 0, 0, 5, 99), 1.0),
        (Action(Op.BACKWARD, 0, 99, 5, 6), 1.0),
        (Action(Op.HEAD, 0, -1, 6, 7), 1.0),
        (Action(Op.EMBED, 0, 99, -1, 0), 1.0),
        (Action(Op.UPDATE, 0, -1, 3, 3), 1.0),
        (Action(Op.UPDATE, 0, -1, 5, 7), 1.0),
        (Action(Op.UPDATE, 0, -1, 5, 99), 1.0),
        (Action(Op.SEND, 0, 99, 4, 0, "a", "g"), 1.0),
    ],
)
def test_recorded_profile_leaves_out_actions_and_times_that_there_are_not(action: Action, seconds: float) -> None:
    """No block, too many, or another micro-batch, and what is no time: a node may report anything."""
    prior = profile_of(PLAN)
    found = RecordedProfile(PLAN.course, prior)
    found.granted(next(turn_sequence(PLAN.course)))
    for _ in range(MIN_TIMES):
        found.add("c", action, seconds)
    assert found.profile() == prior


def by_work(facts: NodeFacts, work: Work) -> WorkTime:
    """The last point of a work: the recorded one, if it was."""
    return [entry for entry in facts.work_times if entry.work == work][-1]


def with_parts(profile: Profile, fixed: float) -> Profile:
    """The profile with times of half of each block's subnets, where all but a fixed share is theirs."""
    nodes = []
    for facts in profile.nodes:
        whole = [entry for entry in facts.work_times if entry.work in PART_OF]
        times = (
            part(
                Work(entry.work),
                (fixed + (1 - fixed) / 2) * entry.median_s,
                share=0.5,
                rows=entry.rows,
                tokens=entry.tokens,
            )
            for entry in whole
        )
        nodes.append(dataclasses.replace(facts, work_times=(*facts.work_times, *times)))
    return Profile(nodes=tuple(nodes))


@cases(("seed", "subnets"), [(0, 1), (1, 4)])
def test_recorded_profile_does_not_take_a_part_of_a_block_for_the_whole(seed: int, subnets: int) -> None:
    """A run with tables, other speeds than measured: afterwards all its actions are right, and so are whole blocks."""
    table = random_operations(
        random.Random(seed), PLAN.course, codes="1123" if subnets == 1 else "113", subnets=subnets
    )
    plan = changed(PLAN, operations=table)
    true, prior = (with_parts(made_up(one), 0.2) for one in (seed, seed + 100))
    recorded = virtual_run(plan, true)
    found = corrected(plan, prior, recorded)
    assert predictions(plan, found, recorded) == pytest.approx([seconds for *_, seconds in recorded], rel=1e-6)
    whole = virtual_run(PLAN, true)
    assert predictions(PLAN, found, whole) == pytest.approx([seconds for *_, seconds in whole], rel=1e-6)


def test_recorded_backward_of_a_group_is_that_of_blocks_that_all_train() -> None:
    """All blocks passed gradients on only; what their weights would have taken is as long as a forward."""
    plan = make_plan([("a", 0, 4)], ["a"], method=Hift(), num_steps=120, eval_rows=0)
    recorded = RecordedProfile(plan.course, profile_of(plan))
    for turn in turn_sequence(plan.course):
        recorded.granted(turn)
        for item in items(plan.course, turn):
            if trained(plan.course, item.kind, item.step).lowest == EMBEDDING:
                for micro in range(2):
                    recorded.add("a", Action(Op.BACKWARD, item.seq, micro, 0, 4), 4 * 5.0 - 4 * 2.0)
                recorded.add("a", Action(Op.UPDATE, item.seq, -1, EMBEDDING, 0), 100.0)
    found = {time.work: time for time in recorded.profile().nodes[0].work_times}
    assert found["backward"].median_s == pytest.approx(5.0)
    assert found["backward"].samples > 3, "it was recorded"
    assert found["update"].median_s == TIMES[Work.UPDATE], "that of the embedding says nothing of a block"


LINK = LinkFacts(source="a", target="b", latency_s=0.01, rate_bytes_per_s=1e6)
NUM_BYTES = 20_000


def watched(rates: Sequence[float], *, messages: int = 8, num_bytes: int = NUM_BYTES) -> LinkMonitor:
    """A watch that has seen a turn for each rate, in bytes per second; 0 is a turn without messages."""
    watch = LinkMonitor([LINK])
    for turn, rate in enumerate(rates):
        for message in range(messages if rate else 0):
            seconds = LINK.latency_s + num_bytes / rate
            watch.add("a", "b", num_bytes, seconds, at_s=1000.0 + 10 * turn + message)
        watch.turn_done({})
    return watch


def test_messages_behind_a_busy_processor_do_not_make_a_link_slow() -> None:
    """The quicker ones say the rate; half of them waited here."""
    watch = watched([1e6] * 3)
    for turn in range(3):
        for message in range(8):
            seconds = LINK.latency_s + NUM_BYTES / 1e6 + 0.5 * (message % 2)
            watch.add("a", "b", NUM_BYTES, seconds, at_s=2000.0 + 10 * turn + message)
        watch.turn_done({})
    assert watch.changed() == {}


def test_a_link_that_lasts_at_a_quarter_of_its_rate_is_told_with_its_ratio() -> None:
    """Two usual turns after the first, then three slow ones; the first turn counts for nothing."""
    slow = [3e5, 1e6, 1e6, 2.5e5, 2.5e5, 2.5e5]
    assert watched(slow[:5]).changed() == {}
    assert watched(slow).changed() == pytest.approx({("a", "b"): 4.0})


def test_turns_with_few_messages_say_nothing() -> None:
    """A change that has begun goes on after turns without any."""
    slow = [1e6, 1e6, 1e6, 2.5e5, 0, 2.5e5, 0, 2.5e5]
    assert watched(slow).changed() == pytest.approx({("a", "b"): 4.0})
    assert watched(slow, messages=3).changed() == {}


def test_messages_of_a_turn_are_bounded_and_those_of_unknown_links_left_out() -> None:
    """A node that reports a million of them takes no memory."""
    watch = LinkMonitor([LINK])
    for message in range(KEPT_SAMPLES + 50):
        watch.add("a", "b", NUM_BYTES, 0.03, at_s=float(message))
    watch.add("b", "a", NUM_BYTES, 0.03, at_s=1.0)
    watch.add("a", "b", NUM_BYTES, float("nan"), at_s=1.0)
    assert sum(len(found) for found in watch._turn.values()) == KEPT_SAMPLES


def test_node_that_joins_is_in_the_profile_with_its_links() -> None:
    """Beside those that were there; its actions can be compared with its times from then on."""
    plan = make_plan([("a", 0, 2), ("c", 2, 4)], ["a"])
    whole = profile_of(plan, links={("a", "c"): (1e8, 1e-3), ("a", "b"): (1e6, 1e-3)}, more=["b"])
    facts, links = whole.by_name["b"], whole.links[1:]
    recorded = RecordedProfile(plan.course, Profile(nodes=whole.without({"b"}).nodes, links=whole.links[:1]))
    assert not recorded.has_node("b")
    recorded.joined(facts, links)
    assert recorded.has_node("b") and recorded.profile() == whole
