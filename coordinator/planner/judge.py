"""Seconds of a plan by the simulator: the real engines on a virtual clock, for some steps at some depths.

A probe runs steps of one depth and one owner, and measures the seconds between the ends of steps once the ring is full.
Between probed depths the ratio of simulated seconds to the formula's is interpolated, because it changes slowly.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from coordinator.planner.draft import Draft
from coordinator.planner.ring_costs import RingCosts, ring_costs, step_kinds
from coordinator.planner.step_time import Ring, job_s, step_times
from ringtune.costs.action_costs import CourseCosts, all_full, done_of
from ringtune.costs.memory_sizes import MemorySettings
from ringtune.costs.profile import Profile
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.course import Course
from ringtune.schedule.methods import Everything, Method
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Extent, Owner
from ringtune.schedule.turns import Item, StepKind, Turn, scores_are_due, turn_sequence
from ringtune.schedule.units import EMBEDDING, Units
from ringtune.schedule.versions import may_be_stale
from ringtune.techniques.activation_checkpointing import planned_saving
from ringtune.techniques.operations import expected_table
from sim.ledger import Items
from sim.links import MeasuredLinks
from sim.meter import ProfileTimes
from sim.ring import VirtualRing

BURN_IN_STEPS = 4
MEASURED_STEPS = 8
_MAX_DEPTHS, _ROUGH_DEPTHS = 4, 2
_DEPTHS_PROBED, _BURN_IN_PROBED, _MEASURED_PROBED = 6, 3, 6
MAX_AHEAD = 16
"""Most steps after the measured ones: their embeddings and frozen forwards run during the measured steps."""


Option = TypeVar("Option")


class Ranking(Generic[Option]):
    """Options judged one by one until the time is over: the loop of every search by the simulator.

    Args:
        seconds: of an option; None if the time is over, or the simulator's limit is too low.
        is_over: whether the time is over; asked before each option.

    Attributes:
        judged: (seconds, option), in the order in which they were judged.
        is_cut: whether an option was not judged.
    """

    def __init__(self, seconds: Callable[[Option], float | None], is_over: Callable[[], bool] = lambda: False) -> None:
        self.seconds, self.is_over = seconds, is_over
        self.judged: list[tuple[float, Option]] = []
        self.is_cut = False

    def judge(self, option: Option) -> float | None:
        """Judge an option and keep it; return its seconds, or None if it was not judged."""
        seconds = None if self.is_over() else self.seconds(option)
        if seconds is None:
            self.is_cut = True
        else:
            self.judged.append((seconds, option))
        return seconds

    def judge_all(self, options: Iterable[Option]) -> Ranking[Option]:
        """Judge options until one can't be judged; return this ranking."""
        for option in options:
            if self.judge(option) is None:
                break
        return self

    @property
    def ranked(self) -> list[tuple[float, Option]]:
        """The judged options, fastest first; of equals the first judged."""
        return sorted(self.judged, key=lambda pair: pair[0])


class ItemEnds:
    """An observer that notes the end of the last action of every item, up to item ``last`` if given.

    Attributes:
        stop: called at the first head of an item after ``last + 1``: its forward saw the update of ``last + 1``, so
            ``last`` is complete.
    """

    def __init__(self, granted: Items, *, last: int | None = None) -> None:
        self.ends_s: dict[int, float] = {}
        self.stop: Callable[[], None] = lambda: None
        self._items, self._last = granted, math.inf if last is None else last

    def granted(self, turn: Turn) -> None:
        """Add the items of a turn."""
        self._items.granted(turn)

    def ran(self, node: str, action: Action, start_s: float, end_s: float) -> None:
        """Note the end of an action."""
        self.ends_s[action.seq] = end_s
        if action.seq > self._last + 1 and action.op is Op.HEAD:
            self.stop()

    def sent(self, *_: Any, **__: Any) -> None:
        """Ignore a message, and a log command of the coordinator."""

    arrived = accepted = logged = sent


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantMethod(Method):
    """A method that trains ``units`` at every step, for a probe of one kind of step."""

    name = "steady"

    units: Units

    def trained(self, extent: Extent, step: int) -> Units:
        """Return the same units for every step."""
        return self.units

    def updates(self, extent: Extent, unit: int, step: int) -> int:
        """Number of updates before ``step``: ``step`` for a unit that trains, 0 for others."""
        return max(0, step) if unit in self.units else 0


@functools.lru_cache(maxsize=256)
def simulated_step_s(
    plan: Plan,
    profile: Profile,
    units: Units,
    *,
    optimizer: str,
    owner: str,
    burn_in: int = BURN_IN_STEPS,
    measured: int = MEASURED_STEPS,
) -> float:
    """Seconds of a step that trains ``units`` on the virtual clock, once the ring is full; raises ``DeadlineError``.

    Where all parameters train it is the mean step of a sweep, whatever ``units`` is, and other owners update their
    copies. Results are cached, so a rough judgement makes the next one cheaper.

    ``owner`` is the initiator of all steps; the ``burn_in`` steps before the ``measured`` ones are not counted.
    """
    course, placement = plan.course, plan.placement
    is_stale, initiator = may_be_stale(course), course.owner(owner)
    has_copies = course.method.full_parameters
    if is_stale:  # whole turns: the ring empties at the end of each
        burn_in = measured = course.local_iterations
    if has_copies:  # a whole sweep
        measured = course.method.period(course)
    interval = course.helper_settings.interval
    if interval <= MAX_AHEAD:
        burn_in, measured = (-(-steps // interval) * interval for steps in (burn_in, measured))
    ahead = 0 if is_stale else -(-placement.credits * (len(placement.slices) + 1) // course.microbatches)
    steps = burn_in + measured + min(ahead, MAX_AHEAD)
    course = dataclasses.replace(
        course,
        method=course.method if is_stale or has_copies else ConstantMethod(units=units),
        owners=(
            Owner(node=owner, train_rows=initiator.train_rows if initiator else course.batch_size),
            *(each for each in course.owners if has_copies and each.node != owner),
        ),
        num_steps=steps,
        local_iterations=measured if is_stale else steps,
        eval_every=0,
        checkpoint_every=0,
        operations=_table_of(course, owner),
        choice=None,
    )
    probe = Plan.of(course, placement)
    costs = CourseCosts.of(probe, profile, optimizer=optimizer)
    granted = Items(costs)
    is_in_order = not (is_stale or has_copies or placement.helpers)
    observer = ItemEnds(granted, last=burn_in + measured - 1 if is_in_order else None)
    run_probe(probe, profile, costs, granted, observer)
    return (observer.ends_s[burn_in + measured - 1] - observer.ends_s[burn_in - 1]) / measured


def run_probe(plan: Plan, profile: Profile, costs: CourseCosts, granted: Items, observer: ItemEnds) -> None:
    """Run a short plan on the virtual clock with the times of a profile; raises ``DeadlineError``."""
    ring = VirtualRing(
        plan,
        action_s=ProfileTimes(granted),
        transport=MeasuredLinks(granted, profile),
        observer=observer,
        idle_gain=costs.idle_gain,
    )
    observer.stop = ring.clock.stop
    ring.run_to_end()


@functools.lru_cache(maxsize=64)
def _table_of(course: Course, owner: str) -> Operations | None:
    """Return the operations of one owner's batches, expected ones if the run chooses them; None if all are full."""
    if not course.may_skip:
        return None
    table = expected_table(course)
    batches = tuple(entry for entry in table.batches if entry.owner == owner)
    return dataclasses.replace(table, batches=batches)


def simulated_job_s(
    plan: Plan,
    profile: Profile,
    costs: RingCosts,
    ring: Ring,
    *,
    max_actions: int,
    is_rough: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> float | None:
    """Seconds of all steps of a job: by the formula, times the ratio of the simulator to it at some probed depths.

    ``ring`` has the slices of ``plan``. ``max_actions`` limits all probes together; ``is_over`` is asked before each
    probed depth. With ``is_rough`` at most two depths are probed, with one owner at each.

    Returns:
        None if ``max_actions`` is too low for one probe, or the time is used up.
    """
    micro = costs.num_micro
    burn_in, measured = max(4, 16 // micro), max(6, 16 // micro)
    has_sweeps = plan.course.method.full_parameters
    measured = plan.course.method.period(plan.course) if has_sweeps else measured
    frozen = max(1, costs.stop - costs.first)
    ahead = min(MAX_AHEAD, -(-plan.placement.credits * (len(ring.nodes) + 1) // micro))
    per_probe = (burn_in + measured + ahead) * micro * (frozen + 3 * len(ring.nodes) + 2)
    num_probes = max_actions // per_probe
    if not num_probes:
        return None
    chosen = _spread(range(len(costs.owners)), 2 if num_probes >= 6 else 1)
    max_depths = _ROUGH_DEPTHS if is_rough else _MAX_DEPTHS
    depths = _spread(costs.depths, 1 if has_sweeps else max(1, min(max_depths, num_probes // len(chosen))))
    kinds, everyone = step_kinds(plan.course), step_times(costs, ring)
    probe = functools.partial(
        simulated_step_s, plan, profile, optimizer=costs.optimizer, burn_in=burn_in, measured=measured
    )
    ratios = {}
    for number, depth in enumerate(depths):
        if is_over():
            return None
        some = _of_owners(costs, [chosen[number % len(chosen)]] if is_rough else chosen)
        owners = [costs.names[owner.node] for owner in some.owners]
        predicted = step_times(some, ring)
        simulated_s = _mean_simulated_s(probe, kinds[depth][1], owners)
        formula_s = predicted[depth]
        if has_sweeps:
            formula_s = sum(costs.steps_at[at] * predicted[at] for at in costs.depths) / sum(costs.steps_at)
        ratios[depth] = simulated_s / formula_s if formula_s else 1.0
    return sum(costs.steps_at[at] * everyone[at] * _between(ratios, at) for at in costs.depths)


def _of_owners(costs: RingCosts, chosen: Sequence[int]) -> RingCosts:
    return dataclasses.replace(
        costs,
        owners=tuple(dataclasses.replace(costs.owners[index], weight=1 / len(chosen)) for index in chosen),
        owner_of={costs.owners[index].node: at for at, index in enumerate(chosen)},
    )


def simulated_steps_s(plan: Plan, profile: Profile, costs: RingCosts, *, max_depths: int = _DEPTHS_PROBED) -> float:
    """Seconds of all steps of a plan by the simulator; see ``simulated_step_times``."""
    times = simulated_step_times(plan, profile, costs, max_depths=max_depths)
    return sum(costs.steps_at[depth] * seconds for depth, seconds in times.items())


def simulated_step_times(
    plan: Plan, profile: Profile, costs: RingCosts, *, max_depths: int = _DEPTHS_PROBED
) -> dict[int, float]:
    """Seconds of a step at every depth by the simulator: some depths are probed, others interpolated linearly.

    Each depth is probed with the first and the last owner; if ``max_depths`` is below ``_DEPTHS_PROBED``, with one of
    them by turns.
    """
    depths, kinds = costs.depths, step_kinds(plan.course)
    probed = sorted({depths[round(at * (len(depths) - 1) / max(1, max_depths - 1))] for at in range(max_depths)})
    names = [costs.names[owner.node] for owner in costs.owners if owner.node >= 0]
    owners = (names[0], names[-1])[: len(names)]
    is_rough = max_depths < _DEPTHS_PROBED
    probe = functools.partial(
        simulated_step_s, plan, profile, optimizer=costs.optimizer, burn_in=_BURN_IN_PROBED, measured=_MEASURED_PROBED
    )
    times = {}
    for number, depth in enumerate(probed):
        some = [owners[number % len(owners)]] if is_rough else owners
        times[depth] = _mean_simulated_s(probe, kinds[depth][1], some)
    return {depth: _between(times, depth) for depth in depths}


def _mean_simulated_s(probe: Callable[..., float], units: Units, owners: Sequence[str]) -> float:
    return sum(probe(units, owner=owner) for owner in owners) / len(owners)


def _spread(values: Sequence[int], most: int) -> list[int]:
    """Return at most ``most`` evenly spaced values, the last one among them: 3 of 0, ..., 8 are 2, 5, 8."""
    if len(values) <= most:
        return list(values)
    return [values[(index + 1) * len(values) // most - 1] for index in range(most)]


def _between(ratios: Mapping[int, float], depth: int) -> float:
    """Interpolate the ratio at ``depth``: linear between two probed depths, constant beyond.

    Example: ratios 1.0 at depth 2 and 1.2 at depth 4 give 1.1 at depth 3 and 1.2 at depth 9.
    """
    below = max((at for at in ratios if at <= depth), default=min(ratios))
    above = min((at for at in ratios if at >= depth), default=max(ratios))
    if below == above:
        return ratios[below]
    share = min(1.0, max(0.0, (depth - below) / (above - below)))
    return ratios[below] + share * (ratios[above] - ratios[below])


def plan_job_s(plan: Plan, profile: Profile, *, optimizer: str) -> float:
    """Predicted seconds of all steps of a plan, without those of scores; raises ``PlanError``.

    By the formula; by the simulator if stages have several hosts, which the formula does not cover.
    """
    placement, draft = plan.placement, dataclasses.replace(Draft.of(plan), settings=MemorySettings(optimizer))
    costs = ring_costs(draft, profile)
    if placement.has_replicas:
        return simulated_steps_s(plan, profile, costs)
    costs = dataclasses.replace(costs, saving=lambda node, start, stop, above: planned_saving(plan, start, stop))
    pieces = [piece for piece in placement.slices if piece.num_blocks]
    nodes = tuple(costs.names.index(piece.node) for piece in pieces)
    return job_s(costs, Ring(nodes=nodes, counts=tuple(piece.num_blocks for piece in pieces)))


def paid_after(plan: Plan, profile: Profile, pass_s: float, *, optimizer: str) -> int | None:
    """Number of steps in which operations save the seconds of one pass of scores; None if they save nothing."""
    all_steps_s = [plan_job_s(each, profile, optimizer=optimizer) for each in (all_full(plan), plan)]
    saved_s = (all_steps_s[0] - all_steps_s[1]) / plan.course.num_steps
    return math.ceil(pass_s / saved_s) if saved_s > 1e-9 * all_steps_s[0] / plan.course.num_steps else None


MAX_BATCHES: Final = 24
"""Simulated batches of all owners together; at least two of each owner."""


def score_passes(course: Course) -> int:
    """Number of times that a run gathers scores."""
    return sum(scores_are_due(course, step) for step in range(0, course.num_steps, course.local_iterations))


def score_pass_s(plan: Plan, profile: Profile, *, optimizer: str) -> float:
    """Predicted seconds of gathering scores once; raises ``DeadlineError`` or ``PlanError``.

    A few batches of each owner are simulated; the result is scaled by the formula's ratio of all batches to these.
    """
    few = _with_few_batches(plan)
    formula_s, few_s = (_by_formula_s(each, profile, optimizer=optimizer) for each in (plan, few))
    return _simulated_s(few, profile, optimizer=optimizer) * (formula_s / few_s if few_s else 1.0)


def _with_few_batches(plan: Plan) -> Plan:
    """Return a plan of one step with so few rows that the pass of scores before it can be simulated."""
    course = plan.course
    rows = course.batch_size * max(2, MAX_BATCHES // len(course.owners))
    owners = tuple(
        dataclasses.replace(owner, train_rows=min(owner.train_rows, rows), eval_rows=0, users=())
        for owner in course.owners
    )
    method = course.method if may_be_stale(course) else Everything()
    few = dataclasses.replace(
        course, method=method, owners=owners, num_steps=1, local_iterations=1, eval_every=0, checkpoint_every=0
    )
    return Plan.of(few, plan.placement)


def _simulated_s(plan: Plan, profile: Profile, *, optimizer: str) -> float:
    """Seconds on the virtual clock until the last batch is scored on all nodes."""
    costs = CourseCosts.of(plan, profile, optimizer=optimizer)
    granted = Items(costs)
    observer = ItemEnds(granted)
    run_probe(plan, profile, costs, granted, observer)
    scored = [turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.SCORE]
    return max(observer.ends_s[seq] for turn in scored for seq in range(turn.first_seq, turn.end_seq))


def _by_formula_s(plan: Plan, profile: Profile, *, optimizer: str) -> float:
    """Seconds of gathering scores once, by the formula.

    There are no updates, so batches follow each other at the pace of the busiest node or uplink; the first one also
    takes the rest of its way.
    """
    costs = CourseCosts.of(plan, profile, optimizer=optimizer)
    uplinks: dict[str, float] = {}
    for link in profile.links:
        uplinks[link.source] = max(uplinks.get(link.source, 0.0), link.rate_bytes_per_s)
    seconds = 0.0
    for owner in plan.course.owners:
        busy, sent = _of_item(plan, owner, costs)
        wires = [sent[node] / uplinks[node] for node in sent if uplinks.get(node)]
        seconds += plan.course.num_scored(owner) * max([*busy.values(), *wires])
        if owner is plan.course.owners[0]:
            seconds += (sum(busy.values()) - max(busy.values())) / plan.course.microbatches
    return seconds


def _of_item(plan: Plan, owner: Owner, costs: CourseCosts) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds that each node computes for one scored batch, and bytes that it sends."""
    course, rows = plan.course, plan.course.batch_rows(owner)
    item = Item(seq=0, kind=StepKind.SCORE, step=0, owner=owner.node, batch=0, rows=rows, turn=0)
    done = done_of(all_full(plan), item, costs)
    busy = {node: each.work_s for node, each in done.items()}
    for size in course.microbatch_sizes(rows):
        tokens = costs.size(owner.node, size, StepKind.SCORE)
        for op, unit in ((Op.EMBED, EMBEDDING), (Op.HEAD, course.head)):
            busy[owner.node] += costs.nodes[owner.node].seconds(
                op, unit, unit + 1, size=tokens, lowest=course.trainable.lowest, kind=StepKind.SCORE
            )
    return busy, {node: each.sent_bytes for node, each in done.items()}
