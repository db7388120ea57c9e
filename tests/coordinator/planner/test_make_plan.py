"""From facts to a plan, and what is refused on the way; a plan or a profile that the user gives."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.plan import plan as plan_for_nodes
from coordinator.api.train import local_ring
from coordinator.client.run_folder import RunFolder
from coordinator.client.submit import Client
from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.given_plan import (
    GivenPlan,
    accept_plan,
    read_given_plan,
    read_profile,
    with_given_times,
)
from coordinator.planner.limits import Choices
from coordinator.planner.make_plan import check_inputs, make_plan
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.planned import Planned
from coordinator.planner.search import choose_plan
from coordinator.run.events import EventSink
from coordinator.run.planning import SizesChecked
from coordinator.run.requests import RunRequest
from coordinator.screen.plan_text import plan_text
from coordinator.screen.progress import Progress
from ringtune import __version__
from ringtune.costs.links import with_assumed
from ringtune.costs.measurement import job_shape
from ringtune.costs.profile import WHOLE_WORKS, LinkFacts, NodeFacts, Profile, TimedShape, Work, WorkTime
from ringtune.errors import CapacityError, DataError, DeadlineError, ModelError, PlanError, RingTuneError, UsageError
from ringtune.job.job import Job
from ringtune.schedule.course import FROZEN_DTYPES, FrozenWeights
from ringtune.schedule.plan import Plan
from tests.coordinator.run.test_planning import checked
from tests.support.cases import cases
from tests.support.fake_agents import MODEL, NO_TIMES, FakeCluster, facts, job


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
        lines = explanation_text(explain(found, relative=True))
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
    assert explain(named, relative=True).frozen == ""
    # The look before the measurement settles the type
    room = min_bytes("bfloat16")
    assert checked(job(runtime__frozen="auto"), large_nodes(room)) == SizesChecked(None, BF16)
    assert checked(job(runtime__frozen="auto"), large_nodes()) == SizesChecked(None, None)


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


def two() -> dict[str, NodeFacts]:
    """The facts of both nodes of the small ring."""
    return {name: facts(name) for name in "ab"}


def given(wanted: Job | None = None, **choices: Any) -> GivenPlan:
    """What ``ringtune plan`` writes for the two nodes."""
    plan = make_plan(wanted or job(), two(), **choices).plan
    return GivenPlan(plan=plan, version=__version__, model_digest=MODEL.digest)


def test_given_plan_is_carried_out_as_it_is() -> None:
    """Micro-batches, wire dtype and slices may be others than the planner would choose now; memory is known."""
    plan = given(microbatches=(4,), wire_dtypes=("bfloat16",)).plan
    moved = [
        dataclasses.replace(piece, start=at, stop=to)
        for piece, at, to in zip(plan.placement.slices, (0, 1), (1, 4), strict=True)
    ]
    plan = Plan.of(plan.course, dataclasses.replace(plan.placement, slices=tuple(moved), credits=1))
    made = accept_plan(GivenPlan(plan=plan), job(), two())
    assert made.plan == plan and sorted(made.memory) == ["a", "b"]
    # PipeAdapter counts the hosts above each block: the job's method is compared as it is on the plan's own ring
    wanted = job(train__method="pipeadapter")
    plan = given(wanted).plan
    slices = tuple(
        dataclasses.replace(piece, start=at, stop=to)
        for piece, at, to in zip(plan.placement.slices, (0, 3), (3, 4), strict=True)
    )
    uneven = Plan.of(plan.course, dataclasses.replace(plan.placement, slices=slices))
    assert uneven.course.method != plan.course.method
    assert accept_plan(GivenPlan(plan=uneven), wanted, two()).plan == uneven


def test_given_plan_without_the_private_blocks_of_the_job_is_refused() -> None:
    """Else a host would get what only owners are to see."""
    wanted = job(privacy__private_blocks=1)
    plan = given(wanted).plan
    lowest, *others = plan.placement.slices
    slices = (dataclasses.replace(lowest, start=0), *others)
    bare = Plan.of(plan.course, dataclasses.replace(plan.placement, private_blocks=0, slices=slices))
    with pytest.raises(PlanError, match="0 private blocks, the job says"):
        accept_plan(GivenPlan(plan=bare), wanted, two())


def test_given_plan_reads_back_from_its_file(tmp_path: Path) -> None:
    """The file of the command, its line, and the bare plan of a run."""
    wanted = given()
    (tmp_path / "file.json").write_text(json.dumps({"event": "plan", **wanted.to_json(), "memory": {}}))
    (tmp_path / "bare.json").write_text(json.dumps(wanted.plan.to_json()))
    assert read_given_plan(tmp_path / "file.json") == wanted
    assert read_given_plan(tmp_path / "bare.json") == GivenPlan(plan=wanted.plan)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't read the plan .*plan.json"),
        ("{", "is not JSON"),
        ("[]", "is no table"),
        ("{}", r"plan schema None is not 2"),
        (json.dumps({**given().to_json(), "version": "0.0.1"}), "made by ringtune 0.0.1, this is"),
        (json.dumps({**given().to_json(), "version": 7}), "have to be text"),
    ],
)
def test_given_plan_that_is_none_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    """The error names the file and the remedy."""
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=message) as caught:
        read_given_plan(path)
    assert str(path) in str(caught.value)


def with_model(nodes: dict[str, NodeFacts], **changes: Any) -> dict[str, NodeFacts]:
    """The nodes with another model."""
    model = dataclasses.replace(MODEL, **changes)
    return {name: dataclasses.replace(node, model=model) for name, node in nodes.items()}


PLANNED = given()
BARE = GivenPlan(plan=PLANNED.plan)
OF_ONE_OWNER = GivenPlan(plan=make_plan(job(), {**two(), "b": facts("b", rows=0)}).plan)
PACKED = dataclasses.replace(PLANNED.plan, course=dataclasses.replace(PLANNED.plan.course, packed=True))
OTHER_NODES = {
    "rows": {**two(), "b": facts("b", rows=11)},
    "names": {"a": facts("a"), "c": facts("c")},
    "memory": {**two(), "a": facts("a", memory_bytes=1)},
    "model": with_model(two(), digest="cd" * 32),
    "width": with_model(two(), hidden_size=2 * MODEL.hidden_size),
}


@cases(
    ("plan", "nodes", "error", "message"),
    [
        (PLANNED, "rows", DataError, "node b has 11 training and 5 evaluation rows, the plan says 10 and 5"),
        (OF_ONE_OWNER, "", DataError, "node b has 10 training and 5 evaluation rows, the plan says 0 and 0"),
        (PLANNED, "names", PlanError, "the plan is for the nodes a, b; b not among a, c: give the same nodes, or"),
        (PLANNED, "model", ModelError, "the plan is for model abab.*, the nodes have cdcd"),
        (BARE, "width", PlanError, r"hidden_size = 8, the job says 16 \(model.path\)"),
        (GivenPlan(plan=PACKED), "", PlanError, r"packed = True, the job says False \(train.packing\)"),
        (PLANNED, "memory", CapacityError, "node a needs .* but has 1 B"),
    ],
)
def test_given_plan_does_not_fit_other_nodes(
    plan: GivenPlan, nodes: str, error: type[RingTuneError], message: str
) -> None:
    """Names, rows, model and memory."""
    with pytest.raises(error, match=message):
        accept_plan(plan, job(), OTHER_NODES.get(nodes, two()))


@cases(
    ("changes", "message"),
    [
        ({"train__batch_size": 8}, r"batch_size = 4, the job says 8 \(train.batch_size\)"),
        ({"train__rounds": 3}, r"the job says 12 \(train.rounds, train.epochs or train.max_steps\)"),
        ({"train__seed": 3}, r"seed = 0, the job says 3"),
        ({"privacy__private_blocks": 1}, "frozen_blocks = 0, the job says 1"),
        ({"unfreeze__every_steps": 3}, r"method = .*, the job says .* \(train\.method, \[unfreeze\]\); change it, or"),
        ({"data__labels": ["neg", "pos", "so"]}, r"labels = .* \(data.labels\)"),
    ],
)
def test_given_plan_does_not_fit_another_job(changes: dict[str, object], message: str) -> None:
    """Every key of the job that the planner does not choose."""
    with pytest.raises(PlanError, match=message):
        accept_plan(PLANNED, job(**changes), two())


def test_resume_of_a_local_ring_with_other_nodes_is_refused_before_any_is_started() -> None:
    """The shards of missing nodes are named, or the owners whose rows would be shared otherwise."""
    begun = make_plan(job(data__train="rows.csv"), {f"node-{number}": facts(f"node-{number}") for number in range(3)})
    nodes, owners = begun.plan.nodes, len(begun.plan.course.all_owners)
    assert (nodes, owners) == (("node-0", "node-1", "node-2"), 3)
    for num_nodes, message in (
        (2, "node-0, node-1, node-2; --local 2 lacks node-2, give the same number"),
        (4, "3 nodes owned data when the run began, --local 4 would share it among 4; give the same number"),
    ):
        ring = local_ring(job(data__train="rows.csv"), num_nodes, Progress(), resumed=begun.plan)
        with pytest.raises(UsageError, match=re.escape(message)), ring:
            pytest.fail("it was started")


# ---- the whole way ---------------------------------------------------------------------------------


def trained_plan(folder: Path, cluster: FakeCluster, *sinks: EventSink, **options: Any) -> Plan:
    """The plan that a run on the cluster says that it carried out."""
    with Client(cluster.server.address) as client, RunFolder(folder) as files:
        client.run(RunRequest(job=job(), join_s=0.5, **options), progress=Progress(), folder=files, sinks=sinks)
    return Plan.from_json(json.loads((folder / "plan.json").read_text()))


def test_run_carries_a_given_plan_out(tmp_path: Path) -> None:
    """Every node prepares that very plan; another member is not asked for, and its rows are named."""
    wanted = given(microbatches=(1,), wire_dtypes=("float16",))
    notes: list[str] = []
    with FakeCluster("a", "b", "c") as cluster:
        found = trained_plan(tmp_path, cluster, lambda event: notes.append(event.note), plan=wanted)
        assert "inspect" not in cluster.agents["c"].log
    assert found == wanted.plan
    assert "not in the given plan, so their rows are not trained on: c" in notes


def test_run_waits_for_the_nodes_of_a_given_plan(tmp_path: Path) -> None:
    """The error says that it is the plan that wants them."""
    with FakeCluster("a") as cluster, pytest.raises(DeadlineError, match="for node b: the given plan is for the nodes"):
        trained_plan(tmp_path, cluster, plan=given())


def test_plan_and_run_decide_alike(tmp_path: Path) -> None:
    """Same facts, same choices: what a run decides is what the planner says beforehand, digest and all."""
    choices = Choices(microbatches=(1, 2, 4), wire_dtypes=("float32", "bfloat16"))
    with FakeCluster("a", "b", agents={"a": {"facts_changes": {"cut_rows": 3}}}) as cluster:
        with Client(cluster.server.address) as client:
            planned, profile, _ = client.plan(job(), num_nodes=2, join_s=0.5, choices=choices)
        trained = trained_plan(tmp_path, cluster, choices=choices)
        shown = plan_for_nodes(job(), coordinator=cluster.server.address, nodes=2, join_s=0.5, explain=True)
    assert shown.why is not None and shown.rows == ("3 rows are longer than train.max_length = 8 tokens and are cut",)
    text = "\n".join(shown.lines())
    assert (text.count("searched "), text.count(shown.rows[0])) == (1, 1)
    here = make_plan(job(), profile.by_name, links=profile.links, **choices._asdict())
    assert planned.digest == trained.digest == here.plan.digest
    assert (trained.course.microbatches, trained.course.wire_dtype) == (1, "float32")  # not the job's 2


SHAPE = job_shape(job())
POINTS = tuple(
    WorkTime(work=work, rows=2, tokens=8, median_s=0.5, low_s=0.4, high_s=0.7, samples=3) for work in WHOLE_WORKS
)
LINK = LinkFacts(source="a", target="b", rate_bytes_per_s=1e6, latency_s=0.1)
BACK = dataclasses.replace(LINK, source="b", target="a")


def measured(name: str, **changes: Any) -> NodeFacts:
    """A node as ``ringtune measure`` writes it."""
    values = {"rows": 3, "shape": SHAPE, "work_times": POINTS, "hardware": "Made-up 3000", **changes}
    return facts(name, **values)


def train(cluster: FakeCluster, folder: Path, profile: Profile, **changes: object) -> Profile:
    """A run with a given profile; gives the one that it leaves."""
    with Client(cluster.server.address) as client, RunFolder(folder) as files:
        client.run(RunRequest(job=job(**changes), num_nodes=2, profile=profile), progress=Progress(), folder=files)
    return read_profile(folder / "profile.json")


def test_given_times_replace_measured_ones_and_nothing_else() -> None:
    """Rows, labels and memory are those of today; links of other nodes are left out."""
    live = {name: facts(name, rows=7, memory_bytes=5, train_tokens=9.0, **NO_TIMES) for name in "ab"}
    other = LinkFacts(source="a", target="z", rate_bytes_per_s=1e6, latency_s=0.1)
    given = Profile(nodes=tuple(measured(name) for name in "abz"), links=(LINK, other))
    found = with_given_times(live, given)
    assert found.links == (LINK,) and [node.node for node in found.nodes] == ["a", "b"]
    expected = dataclasses.replace(
        live["a"],
        block_forward_s=0.001,
        block_graph_s=0.0011,
        block_backward_s=0.0012,
        shape=SHAPE,
        work_times=POINTS,
        hardware="Made-up 3000",
    )
    assert found.by_name["a"] == expected
    # What messages take from computing is not counted a second time in the next plan
    live = {"a": facts("a", **NO_TIMES)}
    for was_recorded in (True, False):
        found = with_given_times(live, Profile(nodes=(measured("a", has_messages=was_recorded),)))
        assert found.by_name["a"].has_messages is was_recorded


def test_run_with_a_given_profile_measures_nothing(tmp_path: Path) -> None:
    """Nodes are asked for rows only; the profile of the run has the given times and links."""
    given = Profile(nodes=(measured("a"), measured("b")), links=(LINK, BACK))
    with FakeCluster("a", "b") as cluster:
        found = train(cluster, tmp_path / "run", given)
        assert not any(agent.inspected.measure for agent in cluster.agents.values())
    assert found.links == (LINK, BACK)
    assert found.by_name["a"].train_rows == 10
    assert found.by_name["b"].work_times[0] == POINTS[0]


def test_run_corrects_the_profile_by_its_own_actions(tmp_path: Path) -> None:
    """The fake nodes take a quarter of a second for each head: eight training steps are enough to say so."""
    given = Profile(nodes=(measured("a"), measured("b")))
    with FakeCluster("a", "b") as cluster:
        found = train(cluster, tmp_path / "run", given, train__rounds=6)
    heads = [point for point in found.by_name["a"].work_times if point.work == Work.HEAD]
    assert heads[-1].median_s == pytest.approx(0.25) and heads[-1].samples >= 12
    assert [point for point in found.by_name["a"].work_times if point.work == Work.FORWARD] == [
        point for point in POINTS if point.work == Work.FORWARD
    ]
    assert json.loads((tmp_path / "run" / "profile.json").read_text())["schema"] == 3


def test_run_refuses_a_profile_of_something_else(tmp_path: Path) -> None:
    """A node that is missing is named, and nothing is trained."""
    with FakeCluster("a", "b") as cluster:
        with pytest.raises(PlanError, match="the profile lacks node b; measure anew"):
            train(cluster, tmp_path / "run", Profile(nodes=(measured("a"),)))
        assert not any("prepare" in agent.log for agent in cluster.agents.values())


@pytest.mark.parametrize("content", ["", "{", '{"schema": 1}', "[]", '{"schema": 2, "nodes": [{"node": "a"}]}'])
def test_profile_file_that_can_not_be_used_is_named(tmp_path: Path, content: str) -> None:
    """With the remedy."""
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(PlanError, match="profile"):
        read_profile(path)
    with pytest.raises(PlanError, match="make it with 'ringtune measure'"):
        read_profile(tmp_path / "absent.json")
