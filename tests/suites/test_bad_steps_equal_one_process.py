"""Real tensors in which a number is not finite once, or always: the result is that of one process, or there is none."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load

from edge.runtime.executor import NodeExecutor
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.turns import StartPoint
from tests.suites.test_recovery_on_virtual_clock import own_errors, recoveries, ring_of
from tests.support.moves import slices_of
from tests.support.plans import changed
from tests.support.recovering_ring import RecoveringRing
from tests.support.torch_ring import (
    Case,
    TorchCarrier,
    distance,
    holder_of,
    make_executor,
    rebuilt,
    reference_of,
    run,
    same_bits,
    write_inputs,
)

RING = (("c", 0, 1), ("e", 1, 3), ("f", 3, 4))
REPLICAS = (("c", 0, 1), ("e", 1, 3, 1), ("f", 1, 3, 1), ("g", 3, 4))
STEP = 4
Spoiler = Callable[[NodeExecutor, Action], None]


def hidden_state(executor: NodeExecutor, action: Action) -> None:
    """A hidden state gets a NaN, where a block computes it."""
    hidden = executor._flows.of(action).hidden
    assert hidden is not None
    hidden.detach().view(-1)[3] = torch.nan


def upper_gradient(executor: NodeExecutor, action: Action) -> None:
    """The gradient of one weight becomes infinite: nobody else sees it, and nodes above have done their updates."""
    next(grad for value in executor.part.trained.values() if (grad := value.grad) is not None).view(-1)[0] = torch.inf


def head_input(executor: NodeExecutor, action: Action) -> None:
    """The head gets an infinite hidden state: after a tanh its loss is finite, and its gradient is not."""
    hidden = executor._flows.of(action).hidden
    assert hidden is not None
    hidden.view(-1)[0] = torch.inf


class Fault(NamedTuple):
    """A node spoils an action before or after it, and this is then said."""

    node: str
    op: Op
    spoil: Spoiler
    is_before: bool
    says: str


FAULTS: dict[str, Fault] = {
    "activation at the first stage": Fault("c", Op.FORWARD, hidden_state, False, "are NaN or infinite: hidden state"),
    "activation at the middle stage": Fault("e", Op.FORWARD, hidden_state, False, "are NaN or infinite: hidden state"),
    "gradient at the lowest stage": Fault("c", Op.BACKWARD, upper_gradient, False, "the gradient of block 0"),
    "gradient at the highest stage": Fault("f", Op.BACKWARD, upper_gradient, False, "the gradient of block 3"),
    "loss": Fault("a", Op.HEAD, hidden_state, True, "the loss is nan (micro-batch 0, training rows "),
    "gradient of the head": Fault("a", Op.HEAD, head_input, True, "the gradient of the head is not finite"),
}


class Spoiling(TorchCarrier):
    """Spoils one action of each attempt at a step: of the first attempts, or of all."""

    fault = FAULTS["loss"]
    attempts = 0

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """As it is done elsewhere, but for one action."""
        item = self.executors[node]._items[action.seq].item if action.op is not Op.SAVE else None
        fault, is_due = self.fault, self.attempts > 0 and (node, action.op) == (self.fault.node, self.fault.op)
        if not is_due or item is None or item.step != STEP or not item.kind.has_update:
            return super().run(node, action)
        self.attempts -= 1
        if fault.is_before:
            fault.spoil(self.executors[node], action)
        values = super().run(node, action)
        if not fault.is_before:
            fault.spoil(self.executors[node], action)
        return values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("bad"))


def case_of(folder: Path, **values: Any) -> Case:
    """All blocks train by step 4; owners a and d in turns of two steps; a checkpoint every two."""
    wanted = {"owners": ("a", "d"), "local_iterations": 2, "num_steps": 6, "every_steps": 1, "microbatches": 2}
    return Case(folder=folder, **{**wanted, "checkpoint_every": 2, **values})


def spoiled(case: Case, fault: Fault, attempts: int, slices: Any = RING) -> tuple[RecoveringRing, Spoiling]:
    """The run with a fault, on a ring with random times."""
    plan = changed(case.plan((("a", 0, 4),)), slices=slices_of(slices))
    carrier = Spoiling({node: make_executor(case, plan, node) for node in plan.nodes}, case=case, plan=plan)
    carrier.fault, carrier.attempts = fault, attempts
    return ring_of(plan, random.Random(fault.says), carrier=carrier, keeper=carrier), carrier


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.sampled(1)
def test_run_with_one_bad_step_equals_the_undisturbed_run(folder: Path, name: str) -> None:
    """In every bit: nothing of the bad step is left at any node."""
    case = case_of(folder)
    ring, carrier = spoiled(case, FAULTS[name], 1)
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    (recovery,) = recoveries(result)
    assert FAULTS[name].says in recovery.bad_step
    assert f"at step {STEP + 1}, a batch of owner a" in recovery.bad_step
    got = carrier.collected(recovery.part, holder_of(ring.plan, result))
    still, undisturbed = spoiled(case, FAULTS[name], 0)
    whole = undisturbed.collected(still.plan, holder_of(still.plan, still.run()))
    assert same_bits(got, whole)


@pytest.mark.promise("1 partition invariance")
def test_run_with_a_bad_gradient_of_one_replica_equals_one_process(folder: Path) -> None:
    """The one that computed it tells it, in place of sending it to the others, which add it up."""
    case = case_of(folder)
    fault = Fault("f", Op.BACKWARD, upper_gradient, False, "the gradient of block 1 is not finite")
    ring, carrier = spoiled(case, fault, 1, REPLICAS)
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    assert [one.bad_step.partition(":")[0] for one in recoveries(result)] == ["node f"]
    got = carrier.collected(recoveries(result)[-1].part, holder_of(ring.plan, result))
    trained = reference_of(case)
    assert distance(got, trained.adapter() | trained.head()) < 1e-9


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.sampled(1)
def test_run_with_a_step_that_is_always_bad_ends_and_saves_nothing_of_it(folder: Path, name: str) -> None:
    """The error names node, unit, step and rows; what was saved is finite, and a resumed run ends as it should.

    At a node without rows it is that node's own: the run goes on without it, to the result of one process.
    """
    case = case_of(folder)
    ring, carrier = spoiled(case, FAULTS[name], 1000)
    result = ring.run()
    assert result.finish is not None
    if FAULTS[name].node != "a":
        assert result.finish == rd.Finish("", "")
        (told,) = own_errors(result)
        assert told[:2] == (FAULTS[name].node, "DivergedError") and FAULTS[name].says in told.message
        got, wanted = carrier.collected(recoveries(result)[-1].part, holder_of(ring.plan, result)), reference_of(case)
        assert distance(got, wanted.adapter() | wanted.head()) < 1e-9
        return
    assert result.finish.error == "DivergedError"
    for part in (
        FAULTS[name].says,
        f"at step {STEP + 1}, a batch of owner a",
        "training rows ",
        "it happened again",
        "node ",
    ):
        assert part in result.finish.message, result.finish.message
    saved = [entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint)]
    assert saved and saved[-1].step <= STEP
    for shards in carrier.shards.values():
        for shard in shards.values():
            assert all(bool(torch.isfinite(value).all()) for value in load(shard).values())
    again = rebuilt(case, ring.plan, carrier.shards[saved[-1].step], saved[-1])
    start = StartPoint(step=saved[-1].step, holder=saved[-1].holder, unfreezing=saved[-1].unfreezing)
    ended = run(ring.plan, again, 1, start=start)
    assert ended.finish == rd.Finish("", "")
    trained = reference_of(case)
    assert distance(again.collected(ring.plan, holder_of(ring.plan, ended)), trained.adapter() | trained.head()) < 1e-9
