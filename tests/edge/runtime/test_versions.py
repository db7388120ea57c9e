"""Stored versions of trained tensors: no more than items in flight need, and none without need."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from edge.model.optimizers import UnitOptimizers
from edge.techniques.micro_batches import VersionStore
from ringtune.errors import PlanError
from ringtune.job.job import Train


class Squares(nn.Module):
    """``y = w^2``: its gradient needs the weight of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
        self.frozen = nn.Parameter(torch.zeros(1000), requires_grad=False)

    def forward(self) -> torch.Tensor:
        """One number."""
        return self.w.square()


RATE = 0.1


def make(name: str = "sgd") -> tuple[Squares, UnitOptimizers, VersionStore]:
    """A block, plain SGD over it, and its store."""
    block = Squares()
    train = Train(optimizer=name, weight_decay=0.01 if name == "adamw" else 0.0)
    optimizer = UnitOptimizers(train, {0: {"w": block.w}})
    return block, optimizer, VersionStore([block], optimizer)


def forward(block: Squares, store: VersionStore, seq: int) -> torch.Tensor:
    """An item's forward."""
    store.use(seq)
    return block.forward()


def update(store: VersionStore, optimizer: UnitOptimizers, seq: int, rate: float = RATE) -> None:
    """An item's update, after its backward."""
    store.release(seq)
    optimizer.update([0], rate)


def test_versions_one_item_at_a_time_needs_no_copy() -> None:
    """The very tensor is updated, step after step."""
    block, optimizer, store = make()
    before = block.w
    for seq in range(4):
        torch.autograd.backward(forward(block, store, seq))
        update(store, optimizer, seq)
    assert block.w is before
    assert (store.num_versions, store.peak_versions, store.peak_extra_bytes) == (1, 1, 0)


def test_versions_are_dropped_with_their_last_item() -> None:
    """With three items in flight there are three versions at most, and one is left at the end."""
    block, optimizer, store = make()
    waiting: list[tuple[int, torch.Tensor]] = []
    seen, counted = [], []
    for seq in range(8):
        waiting.append((seq, forward(block, store, seq)))
        seen.append(weakref.ref(block.w))
        if len(waiting) == 3:
            oldest, output = waiting.pop(0)
            torch.autograd.backward(output)
            del output
            update(store, optimizer, oldest, rate=0.01)
            counted.append(store.num_versions)
    while waiting:
        oldest, output = waiting.pop(0)
        torch.autograd.backward(output)
        del output
        update(store, optimizer, oldest, rate=0.01)
    assert counted == [2, 3, 3, 3, 3, 3]
    assert (store.num_versions, store.peak_versions) == (1, 3)
    assert store.peak_extra_bytes == 2 * 8, "frozen tensors are never copied"
    gc.collect()
    assert [reference() is not None for reference in seen[:5]] == [False] * 5


def test_versions_of_a_shared_tensor_stay_shared() -> None:
    """Two modules with one tensor have one after a copy too."""
    one, two = Squares(), Squares()
    two.w = one.w
    optimizer = UnitOptimizers(Train(optimizer="sgd"), {0: {"w": one.w}})
    store = VersionStore([nn.ModuleList([one, two])], optimizer)
    for seq in (0, 1):
        store.use(seq)
    before = one.w
    update(store, optimizer, 0)
    assert one.w is two.w is not before
    assert store.peak_extra_bytes == 8


def test_versions_update_between_micro_batches_of_an_item_is_refused() -> None:
    """All micro-batches of an item use one version."""
    block, optimizer, store = make()
    for seq in (0, 1):
        forward(block, store, seq)
    update(store, optimizer, 0)
    with pytest.raises(PlanError, match="item 1: the weights were updated between two of its micro-batches"):
        store.use(1)
