"""Phases of a run: one placement for each stretch of depths, with moves between them, against one placement for all.

::

    depth       1    2    3    4         seconds of a step on each candidate, by the simulator
    ring A     1.0  1.6  2.2  2.8
    ring B     1.4  1.5  1.6  1.7        best: A for depth 1, a move, B from depth 2 on

Candidates are the placement chosen for all steps, and the best rings (and stages with several hosts) for stretches of
depths. The sequence with the fewest seconds of steps and moves is found exactly.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from coordinator.planner.draft import Draft, drafts_of
from coordinator.planner.judge import Ranking, simulated_step_times
from coordinator.planner.limits import PlanningClock
from coordinator.planner.local_search import Budget, search_local
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.replicas import ranked_layouts, slices_of_layout
from coordinator.planner.ring_costs import RingCosts, ring_costs
from coordinator.planner.search import slices_of
from ringtune.costs.action_costs import move_s
from ringtune.costs.measurement import numeric_class
from ringtune.costs.memory_estimate import moving_memory
from ringtune.costs.profile import Profile
from ringtune.job.job import Job
from ringtune.schedule.migration import stay_reason
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.versions import unfreezing_steps
from ringtune.techniques.activation_checkpointing import NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One placement of a run that moves.

    Attributes:
        gain_s: seconds that its steps take less than on the best placement for all steps.
    """

    first_step: int
    depth: int
    slices: str
    move_s: float
    gain_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasesReason:
    """The planner's judgement of several placements.

    Attributes:
        fixed_s: seconds of all steps on the best single placement, by the simulator.
        phases: the placements of the best moving run; one, or none, if none is better.
        why_not: why nothing was tried; empty if something was.
    """

    fixed_s: float = 0.0
    moving_s: float = 0.0
    phases: tuple[Phase, ...] = ()
    is_taken: bool = False
    why_not: str = ""

    def lines(self, seconds: Callable[[float], str]) -> list[str]:
        """Write the judgement as lines."""
        if self.why_not:
            return [f"  the run stays on one placement: {self.why_not}"]
        if not self.is_taken:
            return [
                f"  placement.follow: all steps with moves {seconds(self.moving_s)}, not much less than "
                f"{seconds(self.fixed_s)} without, by the simulator"
            ]
        both = f"{seconds(self.moving_s)} with moves, {seconds(self.fixed_s)} without"
        lines = [f"  slices follow the schedule: {both}, by the simulator"]
        for phase in self.phases:
            moved = f", after a move of {seconds(phase.move_s)}" if phase.first_step else ""
            when = f"from step {phase.first_step}, depth {phase.depth}{moved}"
            lines.append(f"    {when}: {phase.slices}; gains {seconds(phase.gain_s)}")
        return [
            *lines,
            "  the figures below are of the plan with one placement for all steps, from which this was made",
        ]


WORTH: Final = 0.98
"""A run moves if steps and moves together take at most this share of the seconds without moves."""

_EVALUATIONS: Final = 3000
_LAYOUTS: Final = 40
_STRETCHES: Final = 4
_MOST: Final = 8
"""Most candidates that are simulated."""


_StepTimes = dict[Plan, dict[int, float]]
"""Placement -> seconds of a step at every depth."""
_MoveTimes = Mapping[tuple[Plan, Plan], float]


def choose_phases(
    plan: Plan, profile: Profile, job: Job, *, helper_of: Mapping[str, str], clock: PlanningClock
) -> tuple[Plan | None, PhasesReason]:
    """Find the best sequence of placements for the depths of a job.

    ``plan`` is the best one with one placement; hosts of others have their helpers by ``helper_of``, host -> helper.

    Returns:
        The plan with several placements, None if it is not enough faster (``WORTH``); and the reasons.
    """
    if why_not := _refusal_reason(plan, job.memory.activations):
        return None, PhasesReason(why_not=why_not)
    draft = dataclasses.replace(drafts_of(plan, job)[0], helper_of=helper_of)
    costs = ring_costs(dataclasses.replace(draft, course=plan.course), profile)
    caps = MemoryCaps(draft, profile.by_name)
    with_replicas = job.may_have_replicas and not plan.placement.helpers
    others = candidates(draft, costs, caps, with_replicas=with_replicas, clock=clock)
    plans = {plan: None} | dict.fromkeys(each for each in others if each.course == plan.course)
    starts, step_s = _starts(plan, costs), _StepTimes()

    def seconds(each: Plan) -> float:
        step_s[each] = simulated_step_times(each, profile, costs)
        return _steps_s(step_s[each], starts)

    ranking = Ranking(seconds, lambda: bool(step_s) and clock.is_over()).judge_all(list(plans)[:_MOST])
    fixed_s, best = ranking.ranked[0]
    moves_s = {(each, other): _moving_s(profile, caps, each, other) for each in step_s for other in step_s}
    moving_s, way = _best_way(step_s, starts, moves_s)
    phases = tuple(_phases(way, starts, step_s, best, moves_s))
    is_taken = len(phases) > 1 and moving_s <= WORTH * fixed_s
    reason = PhasesReason(fixed_s=fixed_s, moving_s=moving_s, phases=phases, is_taken=is_taken)
    return (_moving(way, starts) if is_taken else None), reason


class _TurnsOfDepth(NamedTuple):
    """Consecutive turns that begin at one depth."""

    depth: int
    first_turn: int
    first_step: int
    steps: int


def _moving_s(profile: Profile, caps: MemoryCaps, before: Plan, after: Plan) -> float:
    """Seconds of a move; 0 if nothing changes, infinite if a node has no memory for it."""
    if before is after:
        return 0.0
    needs = moving_memory(
        (before.placement, after.placement),
        {node: caps.estimate(before, node) for node in before.nodes},
        {node: caps.estimate(after, node) for node in after.nodes},
    )
    if any(need.total_bytes > caps.facts[node].memory_bytes for node, need in needs.items()):
        return float("inf")
    return move_s(before.placement, after.placement, profile.nodes[0])


def _refusal_reason(plan: Plan, activations: str) -> str:
    if plan.course.decides:
        return "the losses decide what trains when"
    if not unfreezing_steps(plan.course):
        return "the same blocks train at every step"
    if activations != NONE:
        return "memory.activations is decided for slices of their own"
    if plan.course.method.max_hosts == 1:
        return "the method runs all blocks on one node"
    if len(plan.nodes) < 2:
        return "there is one node"
    return stay_reason(plan.course)


def _starts(plan: Plan, costs: RingCosts) -> list[_TurnsOfDepth]:
    """Return the stretches of turns, by the depth of the first step of each turn."""
    course, stretches = plan.course, list[_TurnsOfDepth]()
    turns = range(0, course.num_steps, course.local_iterations)
    steps_at = [(turn, len(course.method.trained(course, step).blocks)) for turn, step in enumerate(turns)]
    for turn, depth in steps_at:
        step = turn * course.local_iterations
        length = min(course.local_iterations, course.num_steps - step)
        depth = min(costs.depths, key=lambda known: abs(known - depth))
        if stretches and stretches[-1].depth == depth:
            stretches[-1] = stretches[-1]._replace(steps=stretches[-1].steps + length)
        else:
            stretches.append(_TurnsOfDepth(depth, turn, step, length))
    return stretches


def _steps_s(step_s: Mapping[int, float], starts: Sequence[_TurnsOfDepth]) -> float:
    return sum(stretch.steps * step_s[stretch.depth] for stretch in starts)


def _best_way(step_s: _StepTimes, starts: Sequence[_TurnsOfDepth], moves_s: _MoveTimes) -> tuple[float, list[Plan]]:
    """Return the least seconds of steps and moves, and the plan for each stretch that gives them."""
    ways = [(_steps_s(seconds_at, starts[:1]), [plan]) for plan, seconds_at in step_s.items()]
    for stretch in starts[1:]:
        ways = [
            min(
                (
                    (seconds + moves_s[way[-1], plan] + stretch.steps * seconds_at[stretch.depth], [*way, plan])
                    for seconds, way in ways
                ),
                key=lambda pair: pair[0],
            )
            for plan, seconds_at in step_s.items()
        ]
    return min(ways, key=lambda pair: pair[0])


def _phases(
    way: Sequence[Plan], starts: Sequence[_TurnsOfDepth], step_s: _StepTimes, fixed: Plan, moves_s: _MoveTimes
) -> Iterator[Phase]:
    before: Plan | None = None
    for plan, pairs in itertools.groupby(zip(way, starts, strict=True), key=lambda pair: pair[0]):
        stretches = [stretch for _, stretch in pairs]
        yield Phase(
            first_step=stretches[0].first_step,
            depth=stretches[0].depth,
            slices=", ".join(f"{piece.node} {piece.text}" for piece in plan.placement.hosts),
            move_s=moves_s[before, plan] if before is not None else 0.0,
            gain_s=_steps_s(step_s[fixed], stretches) - _steps_s(step_s[plan], stretches),
        )
        before = plan


def _moving(way: Sequence[Plan], starts: Sequence[_TurnsOfDepth]) -> Plan:
    """Make the plan with a placement for each phase of a way."""
    placements: list[Placement] = []
    for plan, stretch in zip(way, starts, strict=True):
        if placements and placements[-1].slices == plan.placement.slices:
            continue
        placements.append(
            dataclasses.replace(plan.placement, placement_number=len(placements), first_turn=stretch.first_turn)
        )
    return Plan(way[0].course, tuple(placements))


def candidates(
    draft: Draft, costs: RingCosts, caps: MemoryCaps, *, with_replicas: bool, clock: PlanningClock
) -> Iterator[Plan]:
    """Yield the best placements for stretches of depths that fit the nodes' memory."""
    rooms = [caps.max_blocks(name) for name in costs.names] if with_replicas else ()
    classes = [numeric_class(caps.facts[name], draft.course) for name in costs.names]
    for masked in _masked(costs):
        if clock.is_over():
            return
        budget = Budget(evaluations=_EVALUATIONS, seconds=clock.left_s(), now_s=clock.now_s)
        ring = search_local(
            masked,
            lambda node, *where: caps.lacking(costs.names[node], *where),
            budget,
            max_hosts=draft.course.method.max_hosts,
        ).ring
        if ring is not None:
            yield draft.placed(slices_of(costs, ring))
        layouts = (
            ranked_layouts(masked, lambda nodes, blocks: 0.0, rooms, classes)[:_LAYOUTS]
            if with_replicas and costs.num_micro > 1
            else ()
        )
        fitting = (draft.placed(slices_of_layout(costs, layout)) for _, layout in layouts)
        best = next((plan for plan in fitting if all(caps.holds(plan, node) for node in plan.nodes)), None)
        if best is not None:
            yield best


def _masked(costs: RingCosts) -> Iterator[RingCosts]:
    """Yield the costs with the steps of one stretch of depths alone, for up to ``_STRETCHES`` stretches."""
    depths = costs.depths
    count = min(_STRETCHES, len(depths))
    for at in range(count):
        part_depths = depths[at * len(depths) // count : (at + 1) * len(depths) // count]
        steps = tuple(steps if depth in part_depths else 0 for depth, steps in enumerate(costs.steps_at))
        yield dataclasses.replace(costs, steps_at=steps)
