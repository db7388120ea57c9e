"""From facts to a plan, and what is refused on the way."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.make_plan import check_inputs, make_plan
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.planned import Planned
from coordinator.planner.search import choose_plan
from coordinator.run.planning import FirstInspectionDone
from coordinator.screen.plan_text import plan_text
from ringtune.costs.links import with_assumed
from ringtune.costs.profile import NodeFacts, Profile, TimedShape
from ringtune.errors import CapacityError, DataError, ModelError, PlanError
from ringtune.job.job import Job
from ringtune.schedule.course import FROZEN_DTYPES, FrozenWeights
from ringtune.schedule.plan import Plan
from tests.coordinator.run.test_planning import looked
from tests.support.fake_agents import MODEL, NO_TIMES, facts, job


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
    # Slices begin behind the private blocks
    plan = plan_for(job(privacy__private_blocks=2), facts("a"), facts("b"))
    assert slices(plan) == {"a": (2, 3), "b": (3, 4)}
    with pytest.raises(PlanError, match="private_blocks = 4 leaves nothing"):
        plan_for(job(privacy__private_blocks=4), facts("a"))


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


def test_plan_follows_measured_speed_and_no_noise() -> None:
    """A node that is three times as fast hosts three of four blocks."""
    plan = plan_for(job(), facts("a", **times(0.003)), facts("b", **times(0.001)))
    assert slices(plan) == {"a": (0, 1), "b": (1, 4)}
    # Nodes with the same hardware get even slices, whatever a busy moment made of their times
    noisy = facts("a", hardware="x", **times(0.002)), facts("b", hardware="x", **times(0.001))
    assert slices(plan_for(job(), *noisy)) == {"a": (0, 2), "b": (2, 4)}
    # If one node was not measured, all count as equal
    unknown: dict[str, Any] = {"block_forward_s": 0.0, "block_graph_s": 0.0, "block_backward_s": 0.0}
    fast: dict[str, Any] = {"block_graph_s": 1e-6, "block_backward_s": 1e-6}
    assert slices(plan_for(job(), facts("a", **unknown), facts("b", **fast))) == {"a": (0, 2), "b": (2, 4)}


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


def test_plan_moves_blocks_away_from_a_small_node_and_takes_fewer_credits() -> None:
    """A node with room for one block hosts one, embedding and head counted in; at the top it needs more."""
    need = make_plan(job(), {"a": facts("a"), "b": facts("b")}).memory["a"].total_bytes
    plan = plan_for(job(), facts("a", memory_bytes=need - 1), facts("b"))
    assert slices(plan) == {"a": (0, 1), "b": (1, 4)}
    assert plan.placement.credits == 8
    # Where nothing fits with 8 tensors in flight, fewer may do; the other decisions stay
    need = make_plan(job(), {"a": facts("a")}).memory["a"].total_bytes
    made = make_plan(job(), {"a": facts("a", memory_bytes=need - 1)})
    assert made.plan.placement.credits == 4
    assert made.memory["a"].total_bytes < need


def test_plan_that_fits_nowhere_is_refused_with_both_numbers() -> None:
    """The error names a node, what it needs for which blocks, and what it has."""
    small: dict[str, Any] = {"memory_bytes": 15_000, "activation_token_bytes": 20_000}
    with pytest.raises(CapacityError, match=r"node a needs .*KiB.* for blocks \[0, 2\) but has 14.6 KiB, and no other"):
        plan_for(job(), facts("a", **small), facts("b", **small))
    # An owner that hosts no block still needs embedding and head
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


def test_plan_of_an_evaluation_needs_no_room_for_graphs() -> None:
    """Where training does not fit, a run of no steps does: no graph, no moments."""
    wanted = job(unfreeze__every_steps=1)
    needed = make_plan(wanted, {"a": facts("a")}, evaluation_only=True).memory["a"].total_bytes
    small = {"a": facts("a", memory_bytes=needed)}
    with pytest.raises(CapacityError):
        make_plan(wanted, small)
    made = make_plan(wanted, small, evaluation_only=True)
    assert (made.plan.course.num_steps, made.memory["a"].parts()["optimizer"]) == (0, 0)


def test_plan_agrees_on_labels_and_model() -> None:
    """Without labels in the job the classes are the sorted union of what the owners have."""
    plan = plan_for(job(), facts("a", labels=("neg",), eval_labels=("neg",)), facts("b", labels=("pos", "so-so")))
    assert plan.course.labels == ("neg", "pos", "so-so")
    # A class that only evaluation has, a single class, and a class outside the job's list are named
    with pytest.raises(DataError, match="node a has evaluation rows of class 'odd'"):
        plan_for(job(), facts("a", eval_labels=("neg", "odd")))
    with pytest.raises(DataError, match="needs two"):
        plan_for(job(), facts("a", labels=("neg",), eval_labels=()))
    with pytest.raises(DataError, match="node a has training rows of class 'neg'"):
        plan_for(job(data__labels=["pos", "maybe"]), facts("a"))
    # Two digests of the model are two models
    other = dataclasses.replace(MODEL, digest="cd" * 32)
    with pytest.raises(ModelError, match="nodes a and b have different models"):
        plan_for(job(), facts("a"), facts("b", model=other))
    # Somebody has to have rows
    with pytest.raises(DataError, match="no node has training rows"):
        plan_for(job(), facts("a", rows=0))


def test_unlike_versions_of_transformers_are_told_by_node() -> None:
    """Nodes of an older build say nothing of theirs."""
    four, five = "cpu x86_64 AVX2, torch 2.13.0", "cpu aarch64 DEFAULT, torch 2.13.0, transformers 5"
    unlike = {"a": facts("a", numerics=four), "b": facts("b", numerics=five), "c": facts("c", numerics=five)}
    told = "unlike versions of transformers (4 on a, 5 on b and c) differ in the last bits; install one version"
    assert told in make_plan(job(), unlike).note
    alike = {"a": facts("a"), "b": facts("b", numerics=five), "c": facts("c", numerics=five)}
    assert "unlike" not in make_plan(job(), alike).note


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


def test_plan_of_one_machine_is_judged_by_the_simulator_and_even() -> None:
    """Two alike nodes with the assumed links of a machine: the simulator was asked, and even slices stay."""
    nodes = {name: facts(name) for name in "ab"}
    links = with_assumed("ab", {"a": "x", "b": "x"}, ())
    planned = make_plan(job(), nodes, links=links)
    assert planned.choice is not None
    assert planned.choice.best.simulated_s is not None
    assert planned.choice.even
    assert [(piece.node, piece.num_blocks) for piece in planned.plan.placement.slices] == [("a", 2), ("b", 2)]


BF16, INT8, NF4 = (FrozenWeights(dtype=dtype) for dtype in FROZEN_DTYPES)
LARGE = dataclasses.replace(
    MODEL, block_bytes=4_000_000, block_matrix_params=990_000, block_matrix_rows=1_000, largest_matrix_params=10_000
)


def large_nodes(memory_bytes: int = 1 << 30, **changes: Any) -> dict[str, NodeFacts]:
    """Two nodes with blocks of 4 MB in float32."""
    return {name: facts(name, memory_bytes=memory_bytes, model=LARGE, **{**NO_TIMES, **changes}) for name in "ab"}


def planned_frozen(wish: str, memory_bytes: int = 1 << 30, **changes: Any) -> Planned:
    """The plan of a job with this wish."""
    return make_plan(job(runtime__frozen=wish), large_nodes(memory_bytes, **changes))


def min_bytes(wish: str) -> int:
    """What the fuller of the two nodes needs."""
    return max(planned_frozen(wish).memory_bytes.values())


def test_plan_holds_frozen_weights_as_the_job_says() -> None:
    """With room for all, ``auto`` rounds nothing."""
    rows: list[tuple[str, FrozenWeights | None]] = [
        ("float32", None),
        ("bfloat16", BF16),
        ("int8", INT8),
        ("nf4", NF4),
        ("auto", None),
    ]
    for wish, frozen in rows:
        assert planned_frozen(wish).plan.course.frozen == frozen
    # One node that widens lets all widen: no result depends on who hosts what
    for fast, native in [("ab", True), ("a", False), ("", False)]:
        members = {name: dataclasses.replace(each, fast_bfloat16=name in fast) for name, each in large_nodes().items()}
        course = make_plan(job(runtime__frozen="bfloat16"), members).plan.course
        assert course.frozen == FrozenWeights(dtype="bfloat16", native=native)


def test_auto_takes_the_first_type_that_fits() -> None:
    """On nodes that have just enough for one type, it is taken; ``--explain`` says what the larger ones lack."""
    rows: list[tuple[str, FrozenWeights | None]] = [("float32", None), ("bfloat16", BF16), ("int8", INT8), ("nf4", NF4)]
    for fits, frozen in rows:
        found = planned_frozen("auto", min_bytes(fits))
        assert found.plan.course.frozen == frozen
        assert found.choice is not None
        lines = explanation_text(explain(found.choice, found, relative=True))
        told = [line for line in lines if line.startswith("  frozen weights in")]
        assert len(told) == 1
        if frozen is None:
            assert told == ["  frozen weights in float32: they fit unrounded"]
        else:
            assert told[0].startswith(f"  frozen weights in {frozen}: in float32 node ")
            assert "needs" in told[0] and "but has" in told[0]
            assert ("in bfloat16 widened node" in told[0]) is (frozen != BF16)
            assert ("in int8 widened node" in told[0]) is (frozen == NF4)


def test_plan_says_how_frozen_weights_are_held() -> None:
    """One line, and none where they are as computed."""
    found = {wish: planned_frozen(wish) for wish in ("float32", "int8")}
    lines = {
        wish: [line for line in plan_text(each.plan, each.memory, num_steps=0, measured=False) if "frozen" in line]
        for wish, each in found.items()
    }
    assert lines == {
        "float32": [],
        "int8": ["frozen weights in int8, a scale for each row, widened to float32 a matrix at a time"],
    }
    # Only what was chosen has a reason
    named = planned_frozen("bfloat16")
    assert named.choice is not None
    assert explain(named.choice, named, relative=True).frozen == ""
    # The look before the measurement settles the type
    room = min_bytes("bfloat16")
    assert looked(job(runtime__frozen="auto"), large_nodes(room)) == FirstInspectionDone(None, BF16)
    assert looked(job(runtime__frozen="auto"), large_nodes()) == FirstInspectionDone(None, None)


def test_auto_that_fits_with_no_type_is_refused_with_the_smallest() -> None:
    """Both numbers are those of nf4."""
    with pytest.raises(CapacityError) as smallest:
        planned_frozen("nf4", 100_000)
    with pytest.raises(CapacityError) as refused:
        planned_frozen("auto", 100_000)
    assert str(refused.value) == str(smallest.value)


def test_given_plan_with_another_type_is_refused() -> None:
    """The job's type is kept; ``auto`` takes what the plan has."""
    given = GivenPlan(plan=planned_frozen("bfloat16").plan)
    for wish in ("bfloat16", "auto"):
        assert accept_plan(given, job(runtime__frozen=wish), large_nodes()).plan == given.plan
    with pytest.raises(PlanError, match=r"the plan has frozen = bfloat16, the job says float32 \(runtime\.frozen\)"):
        accept_plan(given, job(), large_nodes())


def test_times_of_another_type_are_refused_or_called_rough() -> None:
    """Blocks in bfloat16 take other times; ``auto`` takes what it can and says so."""
    shape = TimedShape(rows=1, frozen="bfloat16 widened")
    given = Profile(nodes=tuple(large_nodes(shape=shape).values()))
    with pytest.raises(PlanError, match=r"with frozen weights in bfloat16 widened, the run has them in float32"):
        check_inputs(job(), given)
    assert "predicted times are rough" in make_plan(job(runtime__frozen="auto"), given.by_name).note
    assert "rough" not in make_plan(job(runtime__frozen="bfloat16"), given.by_name).note


def test_refusal_names_the_types_of_frozen_weights_that_would_fit() -> None:
    """Only those: where int8 and nf4 alone would fit, bfloat16 is not named, and where none would, neither is."""
    least = {wish: min_bytes(wish) for wish in ("float32", "bfloat16", "int8", "nf4")}
    every = " or ".join(rf"runtime\.frozen = '{dtype}'" for dtype in FROZEN_DTYPES)
    with pytest.raises(CapacityError, match=rf"{every} would fit; or "):
        planned_frozen("float32", least["bfloat16"])
    with pytest.raises(
        CapacityError, match=r"runtime\.frozen = 'int8' or runtime\.frozen = 'nf4' would fit; or "
    ) as refused:
        planned_frozen("bfloat16", least["int8"])
    assert "'bfloat16'" not in str(refused.value)
    with pytest.raises(CapacityError) as refused:
        planned_frozen("float32", least["nf4"] // 2)
    assert "would fit" not in str(refused.value)


BLOCK_BYTES = LARGE.block_bytes


class Counted:
    """How often plans were searched for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        monkeypatch.setattr("coordinator.planner.make_plan.choose_plan", self._count)

    def _count(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return choose_plan(*args, **kwargs)


def chosen_type(wanted: Job, large_nodes: dict[str, NodeFacts]) -> tuple[object, ...]:
    """The plan and why other types were passed over, or the refusal."""
    try:
        found = make_plan(wanted, large_nodes)
    except CapacityError as error:
        return (str(error),)
    assert found.choice is not None
    return found.plan, found.choice.too_large, found.memory_bytes


def random_nodes(draw: random.Random) -> tuple[Job, dict[str, NodeFacts]]:
    """A job and nodes with room for about all, some, or none of the blocks; some own no rows."""
    num_nodes, num_blocks = draw.randint(1, 4), draw.randint(4, 8)
    model = dataclasses.replace(LARGE, num_blocks=num_blocks)
    each_bytes = num_blocks * BLOCK_BYTES / num_nodes
    large_nodes = {}
    for name in "abcd"[:num_nodes]:
        rows = 10 if name == "a" else draw.choice((0, 10))
        room = round(each_bytes * draw.uniform(0.1, 2.0)) + 1_000_000
        large_nodes[name] = facts(name, rows=rows, memory_bytes=room, model=model, **NO_TIMES)
    changes = {"privacy__private_blocks": draw.choice((0, 1)), "memory__activations": draw.choice(("none", "auto"))}
    method = draw.choice(("ringada", "all", "single")) if num_nodes == 1 else draw.choice(("ringada", "all"))
    return job(runtime__frozen="auto", train__method=method, **changes), large_nodes


@pytest.mark.thorough
def test_bound_never_changes_the_choice_and_searches_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many random rings plans, reasons and refusals are those of searching every type."""
    counted, bound = Counted(monkeypatch), MemoryCaps.may_fit
    rings, searches = [random_nodes(random.Random(seed)) for seed in range(60)], []
    answers = []
    for rule in (bound, lambda _: True):
        monkeypatch.setattr(MemoryCaps, "may_fit", rule)
        before = counted.calls
        answers.append([chosen_type(*each) for each in rings])
        searches.append(counted.calls - before)
    assert answers[0] == answers[1]
    assert len({type(answer[0]) for answer in answers[0]}) == 2, "plans and refusals have to be among them"
    assert searches[0] < 0.7 * searches[1], searches
