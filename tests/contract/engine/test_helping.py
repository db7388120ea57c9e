"""What a host waits for from its helper, and what it says when that does not come."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.engine import events as ev
from ringtune.schedule.actions import Op
from ringtune.schedule.helpers import Helper
from ringtune.schedule.parcels import credit_boundary
from ringtune.schedule.plan import Plan
from tests.contract.engine.test_node_engine import EngineDriver
from tests.support.plans import make_plan


def driver_of(microbatches: int) -> EngineDriver:
    """Host b of [2, 4) for owner c; z fits the adapters of both blocks."""
    plan = make_plan(
        [("a", 0, 2), ("b", 2, 4)], ["c"], num_steps=6, local_iterations=6, microbatches=microbatches, method="all"
    )
    placement = dataclasses.replace(plan.placement, helpers=(Helper(node="z", start=2, stop=4),))
    return EngineDriver(Plan.of(plan.course, placement), "b", grant=1)


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
