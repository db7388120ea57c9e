"""When an owner's copies of embedding and head are updated."""

from __future__ import annotations

from ringtune.engine import events as ev
from ringtune.schedule.actions import Op
from ringtune.schedule.methods import Hift
from ringtune.schedule.stages import unit_grad_key
from ringtune.schedule.units import EMBEDDING
from tests.contract.engine.test_node_engine import EngineDriver
from tests.support.plans import changed, make_plan

HEAD = 4


def driver_of(method: Hift) -> EngineDriver:
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
    driver = driver_of(Hift())
    forward(driver, 0)
    backward(driver, 0)
    forward(driver, 1)
    driver.tell(ev.ParcelArrived(unit_grad_key(0, EMBEDDING), "a"))
    assert driver.running is None
    backward(driver, 1)
    driver.step(Op.UPDATE, EMBEDDING, 0)
    assert driver.running is None


def test_copy_of_the_head_is_updated_while_blocks_keep_graphs() -> None:
    """An own item may wait for it, with graphs that wait for its head."""
    driver = driver_of(Hift(always_active=("head",)))
    forward(driver, 0)
    driver.tell(ev.ParcelArrived(unit_grad_key(0, HEAD), "a"))
    driver.step(Op.UPDATE, HEAD, HEAD + 1)
