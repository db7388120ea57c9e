"""What a host waits for from its helper, and when an owner's copies of embedding and head are updated."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.engine import events as ev
from ringtune.schedule.actions import Op, TensorKey
from ringtune.schedule.lowering import credit_boundary
from ringtune.schedule.methods import Hift
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import unit_grad_key
from ringtune.schedule.units import EMBEDDING
from tests.contract.engine.test_node_engine import EngineDriver
from tests.support.plans import changed, make_plan


def driver_of(microbatches: int, *ranges: tuple[int, int], node: str = "b") -> EngineDriver:
    """Host b of [2, 4) for owner c; z fits the adapters of both blocks, or of each by itself."""
    plan = make_plan(
        [("a", 0, 2), ("b", 2, 4)], ["c"], num_steps=6, local_iterations=6, microbatches=microbatches, method="all"
    )
    helpers = tuple(Helper(node="z", start=start, stop=stop) for start, stop in ranges or [(2, 4)])
    return EngineDriver(Plan.of(plan.course, dataclasses.replace(plan.placement, helpers=helpers)), node, grant=1)


def trained(driver: EngineDriver, micro: int) -> None:
    """A micro-batch of step 0 goes up and down through the blocks."""
    driver.arrive("h", 0, micro, 2, "a")
    driver.step(Op.FORWARD, 2, 4)
    driver.arrive("g", 0, micro, 4, "c")
    driver.step(Op.BACKWARD, 2, 4)


def given_up(driver: EngineDriver) -> str:
    """What it says after ``wait_s`` without progress."""
    (failure,) = (found for found in driver.tell(ev.TimerFired("wait"), 500.0) if isinstance(found, ev.Fail))
    assert failure.error == "DeadlineError"
    return failure.message


@pytest.mark.promise("6 every wait ends")
def test_host_names_the_helper_whose_weights_do_not_come() -> None:
    """All pairs are sent, so the host can go on only with the updated adapters."""
    driver = driver_of(1)
    trained(driver, 0)
    driver.step(Op.SHIP, 2, 4)
    assert driver.running is None
    wanted = "node b waited 100 s for the updated adapters of step 0 (train), from block 2 on, from helper z"
    assert given_up(driver) == wanted


@pytest.mark.promise("7 bounded memory")
def test_host_of_a_slow_helper_waits_for_room_and_drops_nothing() -> None:
    """Two micro-batches of pairs may wait at the helper; the third is shipped when one is taken."""
    driver = driver_of(3)
    for micro in (0, 1):
        trained(driver, micro)
        driver.step(Op.SHIP, 2, 4)
    trained(driver, 2)
    assert driver.running is None
    boundary = credit_boundary(driver.engine.plan.course, "c")
    driver.tell(ev.CreditArrived(boundary, "z"))
    driver.step(Op.SHIP, 2, 4)


def test_host_names_the_helper_that_takes_no_pairs() -> None:
    """The message tells what finds no room, and where."""
    driver = driver_of(3)
    for micro in (0, 1, 2):
        trained(driver, micro)
        if micro < 2:
            driver.step(Op.SHIP, 2, 4)
    wanted = "room in the inbox of node z for the pairs of adapters of step 0 (train), micro-batch 2"
    assert given_up(driver) == f"node b waited 100 s for {wanted}"


def test_gradient_that_overtakes_the_pairs_is_taken() -> None:
    """The host below needs no pairs: the owner of the top blocks and an invertible adapter may ship them later."""
    plan = make_plan([("b", 0, 2), ("a", 2, 4)], ["a"], num_steps=6, local_iterations=6, microbatches=1, method="all")
    placement = dataclasses.replace(plan.placement, helpers=(Helper(node="z", start=2, stop=4),))
    driver = EngineDriver(Plan.of(dataclasses.replace(plan.course, invertible=True), placement), "a", grant=1)
    driver.step(Op.EMBED, EMBEDDING, EMBEDDING + 1)
    driver.arrive("h", 0, 0, 2, "b")
    driver.step(Op.FORWARD, 2, 4)
    driver.step(Op.HEAD, 4, 5)
    driver.step(Op.UPDATE, 4, 5)
    driver.step(Op.BACKWARD, 2, 4)
    driver.arrive("g", 0, 0, 0, "b")
    driver.step(Op.SHIP, 2, 4)
    driver.step(Op.BACKWARD, EMBEDDING, EMBEDDING + 1)


def test_host_ends_a_forward_that_helpers_cut_before_another_backward() -> None:
    """As if it were not cut: the owner waits for the hidden state, the gradient waits for nobody."""
    driver = driver_of(2, (2, 3), (3, 4))
    for micro in (0, 1):
        driver.arrive("h", 0, micro, 2, "a")
    driver.step(Op.FORWARD, 2, 3)
    driver.step(Op.FORWARD, 3, 4)
    driver.arrive("g", 0, 0, 4, "c")
    driver.step(Op.FORWARD, 2, 3)
    driver.step(Op.FORWARD, 3, 4)
    driver.step(Op.BACKWARD, 3, 4)


def test_helper_updates_an_upper_range_before_the_pairs_of_the_lower_come() -> None:
    """Its weights are on their way while the host still goes backward; a range waits for all its micro-batches."""
    driver = driver_of(2, (2, 3), (3, 4), node="z")
    for micro, start in ((0, 3), (0, 2), (1, 3)):
        assert driver.running is None
        driver.tell(ev.ParcelArrived(TensorKey("c", 0, micro, start), "b"))
        driver.step(Op.FIT, start, start + 1)
    driver.step(Op.UPDATE, 3, 4)
    assert ev.SendParcel(TensorKey("w", 0, -1, 3), "b") in driver.log
    assert driver.running is None
    driver.tell(ev.ParcelArrived(TensorKey("c", 0, 1, 2), "b"))
    driver.step(Op.FIT, 2, 3)
    driver.step(Op.UPDATE, 2, 3)


HEAD = 4


def owner_driver(method: Hift) -> EngineDriver:
    """Owner b hosts the top blocks; the steps are those of owner a."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=4, local_iterations=4, microbatches=1)
    return EngineDriver(changed(plan, method=method), "b", grant=1)


def forward(driver: EngineDriver, seq: int) -> None:
    """A micro-batch of owner a goes through the blocks here with a graph, and leaves for its head."""
    driver.arrive("h", seq, 0, 2, "a")
    driver.step(Op.FORWARD, 2, 4)
    assert driver.running is None


def backward(driver: EngineDriver, seq: int) -> None:
    """Its gradient comes back."""
    driver.arrive("g", seq, 0, HEAD, "a")
    driver.step(Op.BACKWARD, 2, 4)


def test_copy_of_the_embedding_waits_while_blocks_keep_graphs() -> None:
    """The next item's forward came before the gradient of the item before."""
    driver = owner_driver(Hift())
    forward(driver, 0)
    backward(driver, 0)
    forward(driver, 1)
    driver.tell(ev.ParcelArrived(unit_grad_key(0, EMBEDDING), "a"))
    assert driver.running is None
    backward(driver, 1)
    driver.step(Op.UPDATE, EMBEDDING, 0)
    assert driver.running is None


@pytest.mark.promise("6 every wait ends")
def test_host_names_the_replica_whose_gradients_do_not_come() -> None:
    """Its own micro-batch is done, so that the update awaits only those of the other host."""
    plan = make_plan([("a", 0, 4), ("b", 0, 4)], ["c"], method="all", num_steps=1, microbatches=2, eval_rows=0)
    driver = EngineDriver(plan, "a")
    driver.arrive("h", 0, 0, 0, "c")
    driver.step(Op.FORWARD, 0, 4)
    driver.arrive("g", 0, 0, 4, "c")
    driver.step(Op.BACKWARD, 0, 4)
    awaited = driver.engine.awaited()
    assert awaited == ("the gradients of step 0 (train), from block 0 on, of the replica on node b", "b")
