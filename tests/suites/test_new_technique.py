"""A technique that nobody knew before needs its record and nothing else: jobs, plans, turns, nodes and reports ask it.

The made-up one is used by runs of the seed 7. It takes notes on the nodes' disks, one turn at a time, with one credit a
link. A key of its own would be a field of ``Job``, and what it changes in a plan one of course or placement: these name
their techniques, so it has none.
"""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import edge.techniques
from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.make_plan import check_inputs, keep_plan, make_plan
from coordinator.planner.planned import Planned
from coordinator.run.report import RunLedger
from coordinator.screen.plan_text import plan_text
from coordinator.screen.progress import report_lines
from edge.techniques.micro_batches import Handler, MicroBatches, OpenItem
from ringtune.costs.model_facts import check_job as check_job_of_model
from ringtune.costs.profile import ModelFacts, NodeFacts, Profile, TimedShape
from ringtune.engine.events import SetTimer
from ringtune.errors import CapacityError, JobError, PlanError, StorageError
from ringtune.job.job import Job
from ringtune.models.families import FAMILIES
from ringtune.run_control import events as rd
from ringtune.run_control.continuation import equal_keys, job_digest
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.course import Course
from ringtune.schedule.placement import CREDITS
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.base import Copies, DiskTerm, Parcel, Shape, Technique
from sim.what_if import change_plan, drop_from_plan
from tests.contract.run_control.test_rounds import trained_rounds
from tests.support.fake_agents import facts, job
from tests.support.plans import make_plan as plan_by_hand
from tests.support.torch_ring import Case, make_carrier, run, write_inputs

SEED, NOTES_BYTES, STEP_BYTES = 7, 5 << 20, 1 << 10


def is_used(plan: Plan) -> bool:
    """Whether a plan takes notes."""
    return plan.course.seed == SEED and plan.placement.credits == 1


def check_job(wanted: Job) -> None:
    """Momentum can't be noted."""
    if wanted.train.seed == SEED and wanted.train.optimizer == "momentum":
        raise JobError("notes and momentum can't go together; change the optimizer")


def check_model(wanted: Job, shape: Shape) -> None:
    """Nobody can note heads that are no even number."""
    if wanted.train.seed == SEED and shape.dimensions.num_heads % 2:
        raise JobError(f"notes are of pairs of heads, the model has {shape.dimensions.num_heads}")


def courses(wanted: Job, course: Course, nodes: Sequence[NodeFacts]) -> tuple[Course, ...]:
    """Rows of half the length, where whole ones have no room."""
    short = dataclasses.replace(course, max_length=course.max_length // 2)
    return (course, short) if wanted.train.seed == SEED else (course,)


def smaller_settings(wanted: Job) -> Iterator[tuple[str, object]]:
    """Blocks that run again."""
    if wanted.train.seed == SEED:
        yield "memory.activations", "recompute"


def placed(wanted: Job, plan: Plan) -> Plan:
    """One credit a link."""
    if wanted.train.seed != SEED:
        return plan
    if len(plan.nodes) == 1:
        raise PlanError("one node has nobody to read them; add a node")
    return Plan(plan.course, tuple(dataclasses.replace(one, credits=1) for one in plan.placements))


def check_plan(wanted: Job, plan: Plan, _: ModelFacts) -> None:
    """A given plan takes notes exactly if the job asks for that."""
    if is_used(plan) != (wanted.train.seed == SEED):
        raise PlanError("the plan and the job differ in whether notes are taken; plan anew")


def check_course(wanted: Job, course: Course, _: ModelFacts) -> None:
    """A book has 5,000 pages."""
    if course.seed == SEED and course.num_steps > 5_000:
        raise PlanError(f"a book has 5,000 pages, one for each step, the run has {course.num_steps}")


def check_changes(course: Course, values: Mapping[str, int | str]) -> None:
    """A book is as long as the run."""
    if course.seed == SEED and "num_steps" in values:
        raise PlanError("the book has a page for each step; leave num_steps as it is")


def parcels(plan: Plan, sizes: Any) -> Iterator[Parcel]:
    """All notes together, a mebibyte a step."""
    if is_used(plan):
        what = f"the book of {', '.join(plan.nodes)} has"
        yield Parcel(what, plan.nodes, plan.course.num_steps << 20, "train for fewer steps")


class OneTurn:
    """No turn is granted before the one before it is closed, nor once notes are lost."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.problems: list[str] = []

    def may_grant(self, turn: Turn) -> bool:
        """Whether no turn is open."""
        return not self.open

    def decided(self, turn: Turn) -> Turn:
        """Nothing is decided of a turn."""
        return turn

    def granted(self, turn: Turn) -> None:
        """It is open."""
        self.open.append(turn.index)

    def close(self, turn: Turn) -> None:
        """It is not."""
        self.open.remove(turn.index)

    def lose(self, node: str, problem: str) -> bool:
        """Whether the problem is news."""
        self.problems.append(problem)
        return self.problems.count(problem) == 1


NOTES = Technique(
    name="notes",
    later_keys={"train.seed": SEED},
    equal_values={"data.label": ("label", "l")},
    check_job=check_job,
    check_model=check_model,
    check_course=check_course,
    courses=courses,
    smaller_settings=smaller_settings,
    placed=placed,
    left_out="no notes are taken",
    disk_terms=lambda plan, node: [DiskTerm("notes", NOTES_BYTES, "set train.seed = 0")] if is_used(plan) else [],
    parcels=parcels,
    copies=lambda plan: [Copies("the notes", plan.nodes, "use one pencil")] if is_used(plan) else [],
    course_fields=("max_length",),
    check_plan=check_plan,
    timing_mismatch=lambda course, node: "notes on paper" if node.shape.rows == 99 else "",
    course_lines=lambda course: [f"notes of {course.num_steps} steps"] if course.seed == SEED else [],
    course_notes=lambda course: ["ink fades"] if course.seed == SEED else [],
    training_lines=lambda plan, memory: [f"notes by {len(memory)} nodes"] if is_used(plan) else [],
    helper_lines=lambda plan, traffic, kinds: ["z reads the notes"] if is_used(plan) else [],
    plan_lines=lambda plan: [f"notes on {', '.join(plan.nodes)}"] if is_used(plan) else [],
    table_lines=lambda plan: ["notes of each step"] if is_used(plan) else [],
    notes=lambda plan, nodes: [f"notes of {len(nodes)} nodes stay"] if is_used(plan) else [],
    turn_rule=lambda plan, items_ahead: OneTurn() if is_used(plan) else None,
    totals={"notes": operator.add, "longest_note": max},
    report=lambda plan, steps: {"noted_steps": steps} if is_used(plan) else {},
    report_lines=lambda report: [f"notes: {report['noted_steps']}"] if "noted_steps" in report else [],
    check_changes=check_changes,
    changed=lambda plan, values, nodes: noted(plan) if plan.course.seed == SEED else plan,
    without_node=lambda plan, node, placements: ({"max_length": 4} if is_used(plan) else {}, placements),
)


class Notes:
    """The notes of one node: a line a turn, in a file; node b runs out of paper in turn 1."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._folder: Path | None = None
        self._turns: dict[int, Turn] = {}
        self._is_told = False
        self.figures = {"notes": 0, "longest_note": 0}

    @staticmethod
    def of(plan: Plan, node: str, flows: MicroBatches) -> Notes | None:
        """Those of a node; None where none are taken."""
        return Notes(node) if is_used(plan) else None

    @property
    def handlers(self) -> dict[Op, Handler]:
        """Of keeping, which no other technique of this run does."""
        return {Op.KEEP: self._keep}

    def _keep(self, action: Action, entry: OpenItem) -> tuple[tuple[str, float], ...]:
        return (("noted_step", float(entry.item.step)),)

    def open(self, folder: Path | None, start: StartPoint | None = None, *, problem: str = "") -> None:
        """Begin."""
        self._folder = folder

    def grant(self, turn: Turn) -> None:
        """Note it."""
        self._turns[turn.index] = turn

    def end_turn(self, index: int) -> str:
        """Write a line."""
        turn, lost = self._turns.pop(index), self._node == "b" and index >= 1
        if self._folder is not None and not lost:
            line = f"turn {turn.index} of {turn.owner}"
            with (self._folder / self._node).open("a") as file:
                file.write(f"{line}\n")
            self.figures = {
                "notes": self.figures["notes"] + 1,
                "longest_note": max(self.figures["longest_note"], len(line)),
            }
        is_news, self._is_told = lost and not self._is_told, lost
        return "node b has no paper left" if is_news else ""


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The technique is known while a test runs."""
    monkeypatch.setitem(edge.techniques.TECHNIQUES, NOTES.name, Notes.of)
    TECHNIQUES.append(NOTES)
    yield
    TECHNIQUES.remove(NOTES)


pytestmark = pytest.mark.usefixtures("_registered")


def nodes(*names: str, **changes: Any) -> dict[str, NodeFacts]:
    """Equal nodes that own rows."""
    return {name: facts(name, **changes) for name in names or ("a", "b")}


def planned(wanted: Job, known: dict[str, NodeFacts]) -> Planned:
    """As the planner plans it."""
    return make_plan(wanted, known)


def told(of: Planned) -> str:
    """What a person reads of a plan."""
    return "\n".join(plan_text(of.plan, of.memory, measured=True, note=of.note))


# ---- jobs and plans --------------------------------------------------------------------------------


def test_new_technique_refuses_a_job() -> None:
    """With its own words, in the file and with changed keys."""
    with pytest.raises(JobError, match="notes and momentum can't go together"):
        job(train__seed=SEED, train__optimizer="momentum")
    assert job(train__seed=8, train__optimizer="momentum").train.optimizer == "momentum"


def test_new_technique_refuses_a_job_for_a_model() -> None:
    """In its words, once the model's dimensions are known."""
    config = {"model_type": "bert", **{key: spec.default for key, spec in FAMILIES["bert"].config_keys.items()}}
    odd = config | {"num_attention_heads": 3}
    check_job_of_model(job(train__seed=SEED), config)
    check_job_of_model(job(), odd)
    with pytest.raises(JobError, match="notes are of pairs of heads, the model has 3"):
        check_job_of_model(job(train__seed=SEED), odd)
    with pytest.raises(PlanError, match="a book has 5,000 pages, one for each step, the run has 5001"):
        planned(job(train__seed=SEED, train__max_steps=5_001), nodes())


def test_values_of_a_new_technique_that_give_the_same_bits_may_change() -> None:
    """A run continues with any of them, with no other."""
    jobs = {value: job(train__seed=SEED, data__label=value) for value in ("label", "l", "other")}
    assert equal_keys(jobs["label"], jobs["l"]) == ("data.label",)
    assert equal_keys(jobs["label"], jobs["other"]) == ()


def test_key_of_a_new_technique_changes_no_digest_of_earlier_jobs() -> None:
    """The value that stands for the behaviour before counts for nothing, another does."""
    digests = {seed: job_digest(job(train__seed=seed)) for seed in (SEED, 8)}
    TECHNIQUES.remove(NOTES)
    before = {seed: job_digest(job(train__seed=seed)) for seed in (SEED, 8)}
    TECHNIQUES.append(NOTES)
    assert digests[8] == before[8] and digests[SEED] != before[SEED]


def test_new_technique_is_planned_and_shown_where_a_job_asks_for_it() -> None:
    """Its part of the placement, its lines and its note; a run without it does not mention it."""
    found, without = planned(job(train__seed=SEED), nodes()), planned(job(), nodes())
    assert (found.plan.placement.credits, without.plan.placement.credits) == (1, CREDITS)
    lines = (
        "notes on a, b",
        f"notes of {found.plan.course.num_steps} steps",
        "note: ink fades",
        "notes by 2 nodes",
        "z reads the notes",
        "notes of each step",
        "notes of 2 nodes stay",
    )
    for line in lines:
        assert line in told(found)
    assert "notes" not in told(without) and "ink" not in told(without)


def test_plan_goes_without_a_new_technique_that_it_can_not_have() -> None:
    """The reason is told."""
    found = planned(job(train__seed=SEED), nodes("a"))
    assert not is_used(found.plan)
    assert "no notes are taken: one node has nobody to read them; add a node" in found.note


def test_disk_of_a_new_technique_is_counted() -> None:
    """A plan goes without where a disk has no room; a run that has it is refused, with the remedy."""
    wanted = job(train__seed=SEED)
    whole = planned(wanted, nodes(state_free_bytes=NOTES_BYTES))
    assert is_used(whole.plan)
    short = nodes(state_free_bytes=NOTES_BYTES - 1)
    assert "no notes are taken: node a needs 5.0 MiB" in planned(wanted, short).note
    with pytest.raises(StorageError, match=r"5\.0 MiB of notes\) but .*, or set train\.seed = 0"):
        keep_plan(wanted, whole.plan, short)


def min_bytes(wanted: Job) -> int:
    """The least memory of both nodes with which a job is planned, in steps of a kibibyte, by halving."""

    def fits(memory_bytes: int) -> bool:
        try:
            planned(wanted, nodes(memory_bytes=memory_bytes))
        except CapacityError:
            return False
        return True

    return bisect.bisect_left(range(0, 1 << 24, STEP_BYTES), True, key=fits) * STEP_BYTES


def test_parcels_and_copies_of_a_new_technique_are_checked() -> None:
    """A plan goes without where a link does not take them, or nodes round differently; a plan with them is refused."""
    wanted = job(train__seed=SEED, train__max_steps=40)
    assert is_used(planned(wanted, nodes()).plan)
    long = planned(job(train__seed=SEED, train__max_steps=4000), nodes())
    assert "no notes are taken: the book of a, b has up to 4,000 MiB, a message at most" in long.note
    assert "; train for fewer steps" in long.note
    unlike = nodes("a") | nodes("b", numerics="cpu of another kind")
    assert "would hold copies of the notes" in planned(wanted, unlike).note
    with pytest.raises(PlanError, match=r"would hold copies of the notes, .*, or use one pencil"):
        keep_plan(wanted, planned(wanted, nodes()).plan, unlike)


def test_new_technique_makes_a_run_smaller_where_its_first_way_does_not_fit() -> None:
    """The planner takes the first way that fits, and names a setting where none does."""
    least = min_bytes(job(train__max_length=128))
    wanted = job(train__seed=SEED, train__max_length=128)
    lengths = [planned(wanted, nodes(memory_bytes=size)).plan.course.max_length for size in (least, least - STEP_BYTES)]
    assert lengths == [128, 64]
    with pytest.raises(CapacityError, match=r"memory\.activations = 'recompute' would fit"):
        planned(wanted, nodes(memory_bytes=min_bytes(wanted) - STEP_BYTES))
    with pytest.raises(CapacityError) as refused:
        planned(job(train__max_length=128), nodes(memory_bytes=least - STEP_BYTES))
    assert "recompute" not in str(refused.value)


def test_given_plans_and_times_are_checked_by_a_new_technique() -> None:
    """Both are refused in its words; a given plan may have the shorter rows that it chooses, and no other steps."""
    wanted = job(train__seed=SEED)
    given = planned(wanted, nodes()).plan
    short = Plan(dataclasses.replace(given.course, max_length=given.course.max_length // 2), given.placements)
    for plan in (given, short):
        assert accept_plan(GivenPlan(plan=plan), wanted, nodes()).plan == plan
    longer = Plan(dataclasses.replace(given.course, num_steps=given.course.num_steps + 1), given.placements)
    with pytest.raises(PlanError, match="the plan has num_steps"):
        accept_plan(GivenPlan(plan=longer), wanted, nodes())
    bare = Plan(given.course, tuple(dataclasses.replace(one, credits=CREDITS) for one in given.placements))
    with pytest.raises(PlanError, match="differ in whether notes are taken"):
        accept_plan(GivenPlan(plan=bare), wanted, nodes())
    profile = Profile(nodes=tuple(nodes(shape=TimedShape(rows=99)).values()))
    with pytest.raises(PlanError, match="node a was profiled with notes on paper; measure anew"):
        check_inputs(job(), profile)


def test_what_ifs_ask_a_new_technique() -> None:
    """Whether a change is possible, what else it changes, and what is left without a node."""
    profile = Profile(nodes=tuple(nodes().values()))
    plan, bare = planned(job(train__seed=SEED), nodes()).plan, planned(job(), nodes()).plan
    with pytest.raises(PlanError, match="the book has a page for each step; leave"):
        change_plan(profile, plan, {"num_steps": 2})
    assert change_plan(profile, bare, {"num_steps": 2})[1].course.num_steps == 2
    assert [change_plan(profile, one, {"credits": 5})[1].placement.credits for one in (plan, bare)] == [1, 5]
    assert [drop_from_plan(one, "b").course.max_length for one in (plan, bare)] == [4, bare.course.max_length]


# ---- runs ------------------------------------------------------------------------------------------


def noted(plan: Plan) -> Plan:
    """The plan with notes."""
    course = dataclasses.replace(plan.course, seed=SEED)
    return Plan(course, tuple(dataclasses.replace(one, credits=1) for one in plan.placements))


def granted(plan: Plan) -> list[int]:
    """The turns that are granted as soon as training begins."""
    rounds = RunStateMachine(lambda facts: plan)
    rounds.handle(rd.Started(plan.nodes), 0.0)
    for node in plan.nodes:
        rounds.handle(rd.Inspected(node, None), 0.0)
    commands = [command for node in plan.nodes for command in rounds.handle(rd.Prepared(node), 0.0)]
    return [turn.index for command in commands if isinstance(command, rd.Grant) for turn in command.turns]


def test_turns_are_granted_by_the_rule_of_a_new_technique() -> None:
    """One at a time; what a node reports of it is told once, and a run without the technique has no such rule."""
    plain = plan_by_hand([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=8, local_iterations=2)
    assert (granted(plain)[:2], granted(noted(plain))) == ([0, 1], [0])
    lost = rd.TechniqueFailed("a", "no paper left")
    rounds = trained_rounds(noted(plain))
    answers = [[one for one in rounds.handle(lost, 0.0) if not isinstance(one, SetTimer)] for _ in range(2)]
    assert answers == [[rd.LogTechniqueFailed("a", "no paper left")], []]
    assert not [one for one in trained_rounds(plain).handle(lost, 0.0) if isinstance(one, rd.LogTechniqueFailed)]


def test_nodes_build_a_new_technique_where_a_plan_uses_it(tmp_path: Path) -> None:
    """It hears of turns, carries its action out, and has its figures in the node's totals."""
    case = Case(folder=write_inputs(tmp_path / "inputs"), owners=("a", "b"), num_steps=16, dtype="float32")
    plan = case.plan((("a", 0, 2), ("b", 2, 4)))
    assert make_carrier(case, plan).executors["a"].techniques == {}
    carrier = make_carrier(case, noted(plan))
    for executor in carrier.executors.values():
        (technique,) = executor.techniques.values()
        technique.open(tmp_path)
    result = run(noted(plan), carrier, 0)
    assert result.finish == rd.Finish("", "")
    assert [entry for entry in result.logged if isinstance(entry, rd.LogTechniqueFailed)] == [
        rd.LogTechniqueFailed("b", "node b has no paper left")
    ]
    turns = [entry.turn for entry in result.logged if isinstance(entry, rd.LogTurn)]
    lines = (tmp_path / "a").read_text().splitlines()
    assert lines == [f"turn {turn.index} of {turn.owner}" for turn in turns]
    assert carrier.executors["a"].run_figures.items() >= {"notes": len(turns), "longest_note": len(lines[0])}.items()
    assert carrier.executors["b"].run_figures["notes"] == 1


def test_action_of_a_new_technique_is_carried_out_by_it(tmp_path: Path) -> None:
    """A node whose plan does not use it knows no such action."""
    case = Case(folder=write_inputs(tmp_path / "inputs"), num_steps=4, dtype="float32")
    plain = case.plan((("a", 0, 4),))
    turn = Turn(index=0, kind=StepKind.TRAIN, owner="a", round=0, first_seq=0, num_items=4, first_step=0, first_batch=0)
    action = Action(Op.KEEP, seq=2, micro=0, start=1, stop=2)
    for plan in (noted(plain), plain):
        executor = make_carrier(case, plan).executors["a"]
        executor.grant(turn)
        if plan is plain:
            with pytest.raises(PlanError, match="not a compute action"):
                executor.run(action)
        else:
            assert executor.run(action) == (("noted_step", 2.0),)


def test_totals_of_a_new_technique_are_joined_over_placements() -> None:
    """As its record says; a node that reports a part of them only is refused, and one without has none."""
    ledger = RunLedger(plan_by_hand([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=4), job())
    bare = {"peak_rss_bytes": 9, "hosted_bytes": 8, "cpu_s": 2, "peak_versions": 1, "peak_version_bytes": 0}
    for count, longest in ((3, 20), (4, 15)):
        ledger.add_totals("a", {**bare, "notes": count, "longest_note": longest})
    ledger.add_totals("b", bare)
    report = ledger.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})["nodes"]
    assert (report["a"]["notes"], report["a"]["longest_note"]) == (7, 20)
    assert "notes" not in report["b"]


def test_report_has_the_entries_of_a_new_technique_where_a_plan_uses_it() -> None:
    """With the steps that are done."""
    plain = plan_by_hand([("a", 0, 4)], ["a"], num_steps=4)
    noted_report, plain_report = (
        RunLedger(plan, job()).report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
        for plan in (noted(plain), plain)
    )
    assert noted_report["noted_steps"] == 0 and "noted_steps" not in plain_report
    assert "notes: 0" in report_lines(noted_report) and "notes: 0" not in report_lines(plain_report)
