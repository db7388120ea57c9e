"""Kinds of plans as values, each with a plan for every seed, and their runs on the virtual clock without tensors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.course import Offload
from ringtune.schedule.methods import Everything, Hift, Method, PipeAdapter, RingAda
from ringtune.schedule.methods.base import Patience
from ringtune.schedule.methods.hift import ALWAYS, ORDERS
from ringtune.schedule.placement import ActivationCacheSettings, Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Extent
from ringtune.schedule.saved_activations import merged
from ringtune.schedule.turns import StartPoint, Turn, items
from ringtune.schedule.units import Range, Units
from ringtune.techniques.activation_cache import entry_bytes
from tests.support.choosing import DrawnTables, random_choice
from tests.support.moves import granted, moving_at_random
from tests.support.plans import changed, random_operations, random_plan, random_replicas
from tests.support.recorded_ring import Carrier, RecordedResult, RecordedRing

# ---- methods that are harder than any known one ----------------------------------------------------------


@dataclass(frozen=True)
class Scattered(Method):
    """Each unit that may train does at two of five steps, at least one at every step: the head pauses too."""

    name = "scattered"

    seed: int

    def trained(self, extent: Extent, step: int) -> Units:
        """Drawn anew for each step."""
        rng = random.Random(1000 * self.seed + step)
        chosen = [unit for unit in extent.trainable if rng.random() < 0.4]
        return Units.of(extent.num_blocks, chosen or [rng.choice(list(extent.trainable))])


@dataclass(frozen=True)
class ScatteredFull(Method):
    """Any units train at a step, the embedding too: harder than any groups."""

    name = "scattered-full"
    full_parameters: ClassVar[bool] = True

    seed: int

    def trained(self, extent: Extent, step: int) -> Units:
        """Drawn anew for each step."""
        rng = random.Random(1000 * self.seed + step)
        chosen = [unit for unit in range(-1, extent.num_blocks + 1) if rng.random() < 0.4]
        return Units.of(extent.num_blocks, chosen or [rng.randint(-1, extent.num_blocks)])


# ---- losses without tensors ------------------------------------------------------------------------------


def loss_at(step: int, seed: int) -> float:
    """A loss that falls in stairs, with some noise: any function of the step does."""
    rng = random.Random(f"{seed}/{step}")
    return float(0.9 ** (step // (8 + seed % 5)) + 0.02 * rng.random())


class Losses(Carrier):
    """Gives the head of every train item its loss; messages carry nothing."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self._plan, self._seed = plan, seed
        self._steps: dict[int, int] = {}

    def granted(self, node: str, turn: Turn) -> None:
        """Learn the steps."""
        self._steps |= {item.seq: item.step for item in items(self._plan.course, turn)}

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """A head gives the loss of its step."""
        if action.op is not Op.HEAD:
            return ()
        return (("count", 2.0), ("loss_sum", 2 * loss_at(self._steps[action.seq], self._seed)))


# ---- plans of a seed -------------------------------------------------------------------------------------


def scattered_plan(seed: int) -> Plan:
    """Any ring; every second one with operations."""
    return changed(random_plan(random.Random(seed), with_operations=seed % 2 == 1), method=Scattered(seed))


def hift_plan(seed: int) -> Plan:
    """Any ring, owners and groups; each third plan trains any units instead."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    first = plan.placement.hosts[0]  # takes the blocks that were private
    slices = tuple((piece.node, 0 if piece is first else piece.start, piece.stop) for piece in plan.placement.slices)
    plan = changed(plan, private_blocks=0, slices=slices, method=Hift())
    always = tuple(unit for unit in ALWAYS if rng.random() < 0.3)
    method: Method = Hift(
        group_size=rng.randint(1, 5), order=rng.choice(ORDERS), seed=rng.randint(0, 9), always_active=always
    )
    return changed(plan, method=ScatteredFull(seed) if seed % 3 == 2 else method)


def pipe_plan(rng: random.Random) -> Plan:
    """Any shape of run, with turns long enough to fill the ring."""
    return changed(random_plan(rng), method=PipeAdapter(), local_iterations=rng.randint(1, 7))


def with_helpers(plan: Plan, rng: random.Random, *, interval: int = 1, overlap: bool = False) -> Plan:
    """The plan with helpers for random parts of its slices: other hosts, owners, or nodes that do nothing else."""
    helpers: list[Helper] = []
    for piece in plan.placement.hosts:
        start = max(piece.start, plan.course.frozen_blocks)
        borders = sorted(rng.sample(range(start, piece.stop + 1), min(4, piece.stop + 1 - start)))
        for first, last in itertools.pairwise(borders):
            others = [node for node in (*plan.nodes, "y", "z") if node != piece.node]
            if rng.random() < 0.8:
                helpers.append(Helper(node=rng.choice(others), start=first, stop=last))
    placement = dataclasses.replace(plan.placement, helpers=tuple(helpers))
    course = plan.course
    if (interval > 1 or overlap) and helpers:
        blocks = merged(Range(helper.start, helper.stop) for helper in helpers)
        course = dataclasses.replace(course, offload=Offload(blocks=blocks, interval=interval, overlap=overlap))
    return Plan(course, (placement,))


def helped_plan(seed: int) -> Plan:
    """With helpers; some update helped blocks every few steps only, in some the hosts do not wait.

    Every second one has operations.
    """
    rng = random.Random(seed)
    plan = random_plan(rng)
    while plan.course.method.name == "pipeadapter":
        plan = random_plan(rng)
    plan = with_helpers(plan, rng, interval=rng.choice([1, 1, rng.randint(2, 5)]), overlap=rng.random() < 0.4)
    return changed(plan, operations=random_operations(rng, plan.course)) if seed % 2 else plan


def replica_plan(seed: int) -> Plan:
    """Stages of several hosts; every third plan trains any units, every second one has operations."""
    plan = random_replicas(random.Random(seed), with_operations=seed % 2 == 1)
    return changed(plan, method=Scattered(seed)) if seed % 3 == 0 else plan


def cached_plan(seed: int) -> Plan:
    """Any ring whose rows come again often; every third has room for a few batches only."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    steps = plan.course.local_iterations * rng.randint(8, 20)
    plan = changed(plan, num_steps=steps, eval_every=rng.choice([0, steps // 4]))
    most = 1 << 30
    if seed % 3 == 0:
        placement = changed(plan, cache=ActivationCacheSettings()).placement
        most = 3 * entry_bytes(plan.course, placement, placement.hosts[0].node, plan.course.batch_size)
    return changed(plan, cache=ActivationCacheSettings(max_bytes=most))


def choosing_plan(seed: int) -> Plan:
    """Any shape of run that chooses its tables."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    if rng.random() < 0.3:
        plan = changed(plan, method=RingAda(every_steps=0, auto=Patience(patience_steps=rng.randint(1, 4))))
    return changed(plan, choice=random_choice(rng))


def unfreezing_plan(seed: int) -> Plan:
    """Any shape of run, with a patience that is soon over."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    auto = Patience(patience_steps=rng.randint(1, 4))
    return changed(plan, method=RingAda(every_steps=0, auto=auto), num_steps=rng.randint(15, 60))


def moving_plan(rng: random.Random) -> Plan:
    """Any plan of a method whose result does not depend on the ring, with further placements."""
    plan = random_plan(rng, with_operations=rng.random() < 0.3)
    if plan.course.method.name == "pipeadapter":
        plan = changed(plan, method=Everything())
    if plan.course.operations is None and rng.random() < 0.3:
        plan = changed(plan, choice=random_choice(rng))
    if not plan.course.may_skip and rng.random() < 0.4:
        plan = changed(plan, invertible=True)
    return moving_at_random(rng, plan)


def invertible_plan(seed: int) -> Plan:
    """Any ring with an adapter at the embedding; every third one lets the losses decide when block 0 trains."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    method: Method = RingAda(every_steps=rng.randint(1, 3)) if rng.random() < 0.5 else Everything()
    if seed % 3 == 0:
        method = RingAda(every_steps=0, auto=Patience(patience_steps=rng.randint(1, 4)))
    return changed(plan, method=method, num_steps=rng.randint(15, 40), invertible=True)


# ---- kinds and their runs --------------------------------------------------------------------------------


def ring_of(plan: Plan, rng: random.Random, **ring: Any) -> RecordedRing:
    """A ring in which every node has its own speed, and every action, message and call its own delay."""
    speeds = {node: rng.choice([0.01, 0.1, 1.0, 3.0, 10.0]) for node in plan.nodes}
    times: dict[str, Any] = {
        "action_s": lambda node, action: speeds[node] * rng.random(),
        "message_s": lambda source, target, payload: rng.choice([0.0, 0.1, 2.0, 5.0]) * rng.random(),
        "control_s": lambda node: rng.choice([1.0, 1.0, 1.0, 20.0]) * rng.random(),
        "move_s": lambda move: 5 * rng.random(),
        "items_ahead": rng.choice([1, 4, 16]),
        "chooser": DrawnTables(plan),
        "choose_s": rng.random,
    }
    return RecordedRing(plan, **{**times, **ring})


def run(plan: Plan, rng: random.Random, **ring: Any) -> RecordedResult:
    """The run of such a ring."""
    return ring_of(plan, rng, **ring).run()


@dataclass(frozen=True, kw_only=True)
class PlanKind:
    """Plans of a kind.

    Attributes:
        name: of the kind.
        plan: makes the plan of a seed.
        ring: makes further arguments of ``RecordedRing`` for each run of the plan of a seed.
    """

    name: str
    plan: Callable[[int], Plan]
    ring: Callable[[Plan, int], dict[str, Any]] = lambda plan, seed: {}


class AnyRun:
    """The plan of a kind and a seed, and its run."""

    def __init__(self, kind: PlanKind, seed: int) -> None:
        self.kind, self.seed, self.plan = kind, seed, kind.plan(seed)

    def __repr__(self) -> str:
        return f"{self.kind.name} of seed {self.seed}"

    def again(self, timing: int, **ring: Any) -> RecordedResult:
        """A run of the plan with other delays."""
        return run(self.plan, random.Random(timing), **{**self.kind.ring(self.plan, self.seed), **ring})

    @functools.cached_property
    def result(self) -> RecordedResult:
        """The run that all laws look at."""
        return self.again(self.seed)

    @functools.cached_property
    def turns(self) -> list[Turn]:
        """Its turns, with what they have decided."""
        return granted(self.result)

    @functools.cached_property
    def checkpoints(self) -> list[rd.LogCheckpoint]:
        """The checkpoints that became complete, in order."""
        return [entry for entry in self.result.logged if isinstance(entry, rd.LogCheckpoint)]


def start_of(plan: Plan, saved: rd.LogCheckpoint) -> StartPoint:
    """The point where a run continues after a checkpoint."""
    known = {name: getattr(saved, name) for name in saved._fields if name != "digests"}
    return StartPoint.of(plan.course, **known)


SOON_KNOWN: Final = {"control_s": lambda node: 0.0}
"""What is kept must be known when its next turn is granted."""
KINDS: Final = [
    PlanKind(name="ring", plan=lambda seed: random_plan(random.Random(seed))),
    PlanKind(name="scattered", plan=scattered_plan),
    PlanKind(name="hift", plan=hift_plan),
    PlanKind(name="pipeadapter", plan=lambda seed: pipe_plan(random.Random(seed))),
    PlanKind(name="helpers", plan=helped_plan),
    PlanKind(name="replicas", plan=replica_plan),
    PlanKind(name="cache", plan=cached_plan, ring=lambda plan, seed: SOON_KNOWN),
    PlanKind(
        name="choice",
        plan=choosing_plan,
        ring=lambda plan, seed: {"chooser": DrawnTables(plan, seed), "choose_s": random.Random(seed).random},
    ),
    PlanKind(name="unfreezing", plan=unfreezing_plan, ring=lambda plan, seed: {"carrier": Losses(plan, seed)}),
    PlanKind(name="invertible", plan=invertible_plan, ring=lambda plan, seed: {"carrier": Losses(plan, seed)}),
    PlanKind(name="moves", plan=lambda seed: moving_plan(random.Random(seed))),
]
"""Every kind of plan; all laws hold for each."""
