"""Methods and the shape of a run: optimizers, owners, micro-batches, dropout, private blocks, decisions in mid-run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ringtune.run_control import events as rd
from ringtune.schedule.methods import RingAda
from ringtune.schedule.methods.base import Patience
from ringtune.schedule.turns import StepKind
from ringtune.schedule.versions import unfreezing_steps
from tests.features.feature import ONE, PRIVATE, Feature, Run, Tensors, Wanted, inputs, plan_of, planned
from tests.features.plans import Scattered
from tests.support import reference
from tests.support.moves import Slices
from tests.support.plans import changed
from tests.support.stale_reference import train_stale
from tests.support.torch_ring import Case, reference_of

SIX_STEPS: dict[str, Any] = {"num_steps": 6, "checkpoint_every": 4}
"""All blocks train in the last three, of two owners."""
SHAPES: dict[str, dict[str, Any]] = {
    "ringada": {},
    "all": {"method": "all"},
    "one-micro-batch": {"microbatches": 1},
    "four-micro-batches": {"microbatches": 4, "owners": ("a",)},
    "three-owners": {"owners": ("a", "c", "b"), "num_steps": 8},
    "dropout": {"dropout": 0.2},
    "dropout-four-micro-batches": {"dropout": 0.2, "microbatches": 4},
    "constant-rate": {"lr_schedule": "constant", "local_iterations": 3, "num_steps": 7},
}
OPTIMIZERS = [
    Feature(name=f"shape-optimizer/{name}", changes=SIX_STEPS | {"optimizer": name})
    for name in ("adamw", "sgd", "momentum", "adagrad", "adafactor")
]
ROWS = [
    Feature(
        name=f"shape-rows/{turns}",
        changes={
            "owners": ("a", "c", "b"),
            "split": "dirichlet:0.1",
            "turns": turns,
            "microbatches": 4,
            "num_steps": 12,
            "checkpoint_every": 6,
        },
    )
    for turns in ("equal", "rows")
]
"""Owners of whom one has fewer rows than a batch, which has batches of its own size."""
SHAPE = [Feature(name=f"shape/{name}", changes=SIX_STEPS | changes) for name, changes in SHAPES.items()]
DRAWN = min(SHAPE, key=lambda feature: feature.number)
"""The one that the gate has anyway."""
PRIVATE_BLOCKS = [
    Feature(
        name=f"private-blocks/{adapter}",
        changes={"private_blocks": 1, "owners": ("a", "b"), "adapter": adapter},
        splits=PRIVATE,
    )
    for adapter in ("seq_bn", "full")
]
LEFT_OUT = [
    Feature(name="left-out/lora", changes=SIX_STEPS | {"method": "all", "adapter": "lora[r=4,leave_out=[0,2]]"}),
]
"""Blocks without a trained tensor, which copies and shards have too."""
PLAIN = [*SHAPE, *OPTIMIZERS, *ROWS, *PRIVATE_BLOCKS, *LEFT_OUT]
"""What one process trains with plain transformers, and may move and lose nodes."""


def unfreezing_at(case: Case, slices: Slices, steps: tuple[int, ...]) -> Any:
    """The plan with these steps."""
    return changed(plan_of(case, slices), method=RingAda(every_steps=0, at=steps))


@functools.lru_cache(maxsize=8)
def reference_at(case: Case, steps: tuple[int, ...]) -> Tensors:
    """One process that unfreezes at these steps."""
    found = reference.train(case.job, unfreezing_at(case, ONE, steps), case.folder / "model", case.datasets())
    return found.adapter() | found.head()


def of_the_plan(case: Case, run: Run) -> Wanted:
    """One process that sets ``requires_grad`` by the units of the plan's method."""
    found = reference.train(case.job, changed(run.plan, slices=ONE), case.folder / "model", case.datasets())
    return Wanted(tensors=found.adapter() | found.head())


def decided(run: Run) -> tuple[int, ...]:
    """The steps at which blocks began to train, as the run's report has them."""
    turns = [entry.turn for entry in run.logged(rd.LogTurn) if entry.turn.kind is StepKind.TRAIN]
    return unfreezing_steps(run.plan.course.decided(turns[-1].unfreeze_at))


def at_decided_steps(case: Case, run: Run) -> Wanted:
    """One process with the steps that a run has decided by its losses: they are all that it needs to know."""
    assert decided(run), "the run decided nothing"
    return Wanted(tensors=reference_at(case, decided(run)))


SCATTERED = [
    Feature(
        name=f"unfreezing-scattered/{seed}",
        changes={"num_steps": 8, "dropout": 0.1},
        plan=planned(method=Scattered(seed)),
        reference=of_the_plan,
    )
    for seed in range(3)
]
"""Any units train at each step: the head pauses too, and gradients pass blocks that do not train."""
BY_LOSSES = Patience(patience_steps=1, min_improvement=0.5)
"""A turn that does not halve the loss is too little."""
UNFREEZING = [
    Feature(
        name=f"unfreezing/at-{'-'.join(map(str, steps)) or 'none'}",
        changes=SIX_STEPS,
        plan=functools.partial(unfreezing_at, steps=steps),
        reference=lambda case, run: Wanted(tensors=reference_at(case, run.plan.course.method.at)),  # type: ignore[attr-defined]
    )
    for steps in ((), (1, 3, 4))
] + [
    Feature(
        name=f"unfreezing/by-losses-dropout-{dropout}",
        changes={"dropout": dropout, "num_steps": 10, "checkpoint_every": 8, "eval_every": 0},
        plan=planned(method=RingAda(every_steps=0, auto=BY_LOSSES)),
        reference=at_decided_steps,
    )
    for dropout in (0.0, 0.1)
]


PATIENCE = 2


def until_it_stopped(case: Case, run: Run) -> Wanted:
    """One process that has no more steps, where two evaluations in a row were not better."""
    (stop,) = run.logged(rd.LogStop)
    losses = [loss_sum / count for loss_sum, count, _ in run.evaluations.values()]
    ends = [at for at in range(PATIENCE, len(losses)) if min(losses[: at - 1]) <= min(losses[at - 1 : at + 1])]
    assert list(run.evaluations)[ends[0]] == max(run.evaluations) == stop.step < case.num_steps
    assert stop.evaluations.waited == PATIENCE
    found = reference_of(dataclasses.replace(case, num_steps=stop.step))
    return Wanted(tensors=found.adapter() | found.head(), losses=found.losses, evaluations=dict(found.evaluations))


EARLY_STOP = [
    Feature(
        name=f"early-stop/{name}",
        changes={"num_steps": 20, "eval_every": 2, "lr_schedule": "constant", "owners": ("b", "a")} | changes,
        ring=lambda plan, carrier: {"patience_evals": PATIENCE},
        reference=until_it_stopped,
    )
    for name, changes in {"ringada": {}, "all": {"method": "all"}}.items()
]
"""So fast a rate that the held-out loss soon gets worse; a checkpoint knows the evaluations before it."""


@functools.lru_cache(maxsize=32)
def _stale(case: Case, slices: Slices) -> tuple[Tensors, list[float]]:
    return train_stale(case.job, plan_of(case, slices), case.folder / "model", case.datasets())


def stale(case: Case, run: Run) -> Wanted:
    """PipeAdapter's rule written out in one process; it depends on the slices."""
    tensors, losses = _stale(case, tuple((piece.node, piece.start, piece.stop) for piece in run.plan.placement.slices))
    return Wanted(tensors=tensors, losses=losses)


STALE_SPLITS: dict[str, Slices] = {"two": (("b", 0, 2), ("a", 2, 4)), "three": (("a", 0, 1), ("b", 1, 3), ("c", 3, 4))}
STALE_SHAPES: dict[str, tuple[dict[str, Slices], dict[str, Any]]] = {
    "adamw": (STALE_SPLITS, {"dropout": 0.0}),
    "sgd": (STALE_SPLITS, {"optimizer": "sgd", "microbatches": 1}),
    "more-hosts-than-steps-of-a-turn": (
        {"four": (("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 4))},
        {"local_iterations": 3},
    ),
    "empty-slice": ({"empty": (("d", 0, 1), ("b", 1, 1), ("c", 1, 3), ("e", 3, 4))}, {"owners": ("b", "c")}),
    "private-block": (
        {"alone": (("b", 1, 2), ("a", 2, 3), ("d", 3, 4)), "joins": (("a", 1, 2), ("c", 2, 4))},
        {"private_blocks": 1},
    ),
    "lora": (STALE_SPLITS, {"adapter": "lora[r=4]"}),
    "mlp": (STALE_SPLITS, {"adapter": "mlp[hidden=8,alpha=2]"}),
    "full": (STALE_SPLITS, {"adapter": "full"}),
    "loreft": (STALE_SPLITS, {"adapter": "loreft", "dtype": "float32"}),
}
IN_FLIGHT: dict[str, Any] = {"method": "pipeadapter", "num_steps": 8, "local_iterations": 4, "checkpoint_every": 4}
PIPEADAPTER = [
    Feature(
        name=f"pipeadapter/{name}",
        changes=IN_FLIGHT | changes,
        folder=functools.partial(inputs, "bert", "sequence-classification"),
        splits=splits,
        reference=stale,
        bound=1e-5 if "dtype" in changes else 1e-9,
    )
    for name, (splits, changes) in STALE_SHAPES.items()
] + [
    Feature(
        name="pipeadapter/gpt2-full",
        changes=IN_FLIGHT | {"adapter": "full", "task": "causal-lm"},
        folder=functools.partial(inputs, "gpt2", "causal-lm"),
        splits=STALE_SPLITS,
        reference=stale,
    )
]
