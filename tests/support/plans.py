"""Plans for tests: one by hand, any number drawn from a seed, and changes of one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import Any

from ringtune.schedule.course import Course
from ringtune.schedule.methods import Everything, Method, PipeAdapter, RingAda, Single
from ringtune.schedule.methods.base import MIN_IMPROVEMENT, PATIENCE_STEPS, Patience
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import TURNS, Owner
from ringtune.schedule.turns import NOTHING_KNOWN, Item, StepKind, Unfreezing, items, turn_sequence

_OF_PLACEMENT = (
    "slices",
    "private_blocks",
    "credits",
    "placement_number",
    "first_turn",
    "recompute",
    "state_on_disk",
    "helpers",
    "cache",
    "copies",
    "num_copies",
    "racks",
)


def make_method(
    name: str = "ringada",
    *,
    every_steps: int = 2,
    unfreeze: str = "every",
    unfreeze_at: tuple[int, ...] = (),
    patience_steps: int = PATIENCE_STEPS,
    min_improvement: float = MIN_IMPROVEMENT,
) -> Method:
    """A method by its name; the settings count for RingAda only."""
    if name != "ringada":
        return {"all": Everything, "pipeadapter": PipeAdapter, "single": Single}[name]()
    if unfreeze == "every":
        return RingAda(every_steps=every_steps)
    if unfreeze == "at":
        return RingAda(every_steps=0, at=unfreeze_at)
    patience = Patience(patience_steps=patience_steps, min_improvement=min_improvement)
    return RingAda(every_steps=0, auto=patience)


def make_plan(
    slices: Sequence[tuple[str, int, int]],
    owners: Sequence[str],
    *,
    num_blocks: int = 4,
    num_steps: int = 8,
    local_iterations: int = 2,
    every_steps: int = 2,
    microbatches: int = 2,
    batch_size: int = 4,
    method: str | Method = "ringada",
    train_rows: int = 10,
    eval_rows: int = 3,
    eval_every: int = 0,
    checkpoint_every: int = 0,
    credits_per_channel: int = 4,
    private_blocks: int = 0,
    wire_dtype: str = "float32",
    max_length: int = 16,
    hidden_size: int = 32,
    labels: Sequence[str] = ("neg", "pos"),
    seed: int = 0,
    unfreeze: str = "every",
    unfreeze_at: tuple[int, ...] = (),
    patience_steps: int = PATIENCE_STEPS,
    min_improvement: float = MIN_IMPROVEMENT,
    operations: Operations | None = None,
    turns: str = "equal",
) -> Plan:
    """A plan from (node, start, stop) triples in ring order."""
    if isinstance(method, str):
        method = make_method(
            method,
            every_steps=every_steps,
            unfreeze=unfreeze,
            unfreeze_at=unfreeze_at,
            patience_steps=patience_steps,
            min_improvement=min_improvement,
        )
    course = Course(
        method=method,
        num_blocks=num_blocks,
        owners=tuple(Owner(node=owner, train_rows=train_rows, eval_rows=eval_rows) for owner in owners),
        num_steps=num_steps,
        local_iterations=local_iterations,
        batch_size=batch_size,
        microbatches=microbatches,
        max_length=max_length,
        hidden_size=hidden_size,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        wire_dtype=wire_dtype,
        labels=tuple(labels),
        seed=seed,
        frozen_blocks=private_blocks,
        operations=operations,
        turns=turns,
    )
    pieces = tuple(Slice(node=node, start=start, stop=stop) for node, start, stop in slices)
    return Plan.of(course, Placement(slices=pieces, private_blocks=private_blocks, credits=credits_per_channel))


def two_nodes(**changes: object) -> Plan:
    """Owner a hosts block 0, b hosts block 1; no evaluation."""
    values: dict[str, object] = {"num_blocks": 2, "num_steps": 1, "microbatches": 1, "eval_rows": 0, "method": "all"}
    return make_plan([("a", 0, 1), ("b", 1, 2)], ["a"], **{**values, **changes})  # type: ignore[arg-type]


def changed(plan: Plan, **values: Any) -> Plan:
    """The plan with some fields of its course or placement replaced; ``slices`` may be triples."""
    if "slices" in values:
        values["slices"] = tuple(
            piece if isinstance(piece, Slice) else Slice(node=piece[0], start=piece[1], stop=piece[2])
            for piece in values["slices"]
        )
    of_placement = {key: value for key, value in values.items() if key in _OF_PLACEMENT}
    of_course = {key: value for key, value in values.items() if key not in _OF_PLACEMENT}
    if "private_blocks" in of_placement:
        of_course.setdefault("frozen_blocks", of_placement["private_blocks"])
    course = dataclasses.replace(plan.course, **of_course)
    return Plan.of(course, dataclasses.replace(plan.placement, **of_placement))


def train_items(plan: Plan) -> list[Item]:
    """All training items of a run, in order."""
    turns = [turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.TRAIN]
    return [item for turn in turns for item in items(plan.course, turn)]


def random_plan(rng: random.Random, *, with_operations: bool = False) -> Plan:
    """Any shape of run: 1 to 4 hosts, empty slices, owners that host nothing, private blocks, all methods."""
    num_blocks = rng.randint(2, 8)
    num_hosts = rng.randint(1, 4)
    private_blocks = rng.choice([0, 0, 0, 1, 2]) if num_blocks > 2 else 0
    inner = sorted(rng.randint(private_blocks, num_blocks) for _ in range(num_hosts - 1))
    cuts = [private_blocks, *inner, num_blocks]
    names = [f"node-{index}" for index in range(num_hosts + 1)]
    hosts = rng.sample(names, num_hosts)
    plan = make_plan(
        [(hosts[index], cuts[index], cuts[index + 1]) for index in range(num_hosts)],
        rng.sample(names, rng.randint(1, len(names))),
        num_blocks=num_blocks,
        num_steps=rng.randint(1, 20),
        local_iterations=rng.randint(1, 4),
        every_steps=rng.randint(1, 5),
        microbatches=rng.choice([1, 2, 4]),
        method=rng.choice(["ringada", "ringada", "all", "pipeadapter"]),
        eval_rows=rng.choice([0, 3, 9]),
        eval_every=rng.choice([0, 3]),
        checkpoint_every=rng.choice([0, 2, 5]),
        credits_per_channel=rng.choice([1, 2, 4, 8]),
        private_blocks=private_blocks,
    )
    owners = tuple(
        dataclasses.replace(owner, train_rows=rng.choice([1, 3, 10, 10, 17])) for owner in plan.course.owners
    )
    plan = changed(plan, owners=owners, turns=rng.choice(TURNS))
    return changed(plan, operations=random_operations(rng, plan.course)) if with_operations else plan


def random_operations(rng: random.Random, course: Course, *, codes: str = "1123", subnets: int = 1) -> Operations:
    """Other operations for every micro-batch of nearly every batch."""
    length = course.num_blocks * subnets
    entries = []
    for owner in course.owners:
        for batch_id in range(-(-owner.train_rows // course.batch_size)):
            if rng.random() < 0.9:
                rows = ("".join(rng.choice(codes) for _ in range(length)) for _ in range(course.microbatches))
                entries.append(BatchOperations(owner=owner.node, batch_id=batch_id, rows=tuple(rows)))
    return Operations(batches=tuple(entries), subnets=subnets)


def random_replicas(rng: random.Random, *, with_operations: bool = False) -> Plan:
    """Any shape of run with a stage of several hosts: 1 to 3 stages of 1 to 3 hosts with shares of 1 to 3."""
    plan = random_plan(rng, with_operations=with_operations)
    course, private = plan.course, plan.placement.private_blocks
    num_stages = rng.randint(1, min(3, course.num_blocks - private))
    cuts = [private, *sorted(rng.sample(range(private + 1, course.num_blocks), num_stages - 1)), course.num_blocks]
    sizes = [rng.randint(1, 3) for _ in range(num_stages)]
    sizes[rng.randrange(num_stages)] = rng.randint(2, 3)
    names = rng.sample([f"node-{index}" for index in range(10)], sum(sizes))
    pieces = [
        Slice(node=names.pop(), start=cuts[stage], stop=cuts[stage + 1], share=rng.choice([1, 1, 2, 3]))
        for stage, size in enumerate(sizes)
        for _ in range(size)
    ]
    if plan.course.method.name == "pipeadapter":
        plan = changed(plan, method=Everything())
    return changed(
        plan, slices=tuple(pieces), microbatches=rng.choice([1, 2, 4]) if not with_operations else course.microbatches
    )


def unfreezing_after(course: Course, losses: Iterable[float]) -> Unfreezing:
    """The knowledge after train turns with these mean losses, from the first turn on."""
    found = NOTHING_KNOWN
    for loss in losses:
        found = found.after(course, loss)
    return found
