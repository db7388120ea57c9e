"""HiFT with each optimizer, state on the disk: what a plain loop gives, also from a shard in mid-sweep."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from edge.runtime.executor import NodeExecutor
from ringtune.config.optimizers import OPTIMIZERS
from ringtune.errors import StorageError
from ringtune.run_control import events as rd
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import saves_head
from ringtune.schedule.turns import StartPoint
from ringtune.storage.pieces import Pieces
from tests.suites.test_hift_equals_one_process import ONE, TWO, hift_case, trained_plainly, trained_tensors
from tests.support import hift_reference
from tests.support.resumed import run, same_bits
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, shard_metadata, write_family_inputs

NO_GRADIENT = "attention.self.key.bias"
"""The loss does not depend on it: its gradient is rounding, which Adafactor makes as large as any other."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its rows."""
    return write_family_inputs(tmp_path_factory.mktemp("state"), "bert", "sequence-classification")


def on_disk(case: Case, plan: Plan, folder: Path) -> TorchCarrier:
    """Nodes that keep the state of inactive units in a folder each."""
    carrier = make_carrier(case, plan)
    for node, executor in carrier.executors.items():
        executor.inactive_state.keep_on_disk(folder / node, {"run": folder.name, "node": node})
    return carrier


def held_bytes(executor: NodeExecutor) -> int:
    """Bytes of state in memory."""
    return sum(each.held_bytes for each in executor._hosted.all_optimizers())


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.sampled(1)
def test_hift_with_state_on_disk_equals_one_process_and_goes_on_from_a_shard(
    folder: Path, tmp_path: Path, optimizer: str
) -> None:
    """Six units, two owners: 14 steps; the shard of step 8 is loaded to a disk and to memory, with the same bits."""
    case = hift_case(folder, "bert", owners=("a", "b"), optimizer=optimizer, local_iterations=2, checkpoint_every=8)
    case = dataclasses.replace(case, num_steps=14, eval_every=8)
    plan = case.plan(TWO)
    whole = on_disk(case, plan, tmp_path / "whole")
    saved = next(entry for entry in run(plan, whole, 0).logged if isinstance(entry, rd.LogCheckpoint))
    assert saved.step == 8  # the second sweep has begun at step 6
    wanted = trained_tensors(whole)
    plain = hift_reference.tensors_of(trained_plainly(case).model)
    compared = [name for name in plain if optimizer != "adafactor" or not name.endswith(NO_GRADIENT)]
    assert distance({name: wanted[name] for name in compared}, {name: plain[name] for name in compared}) < 1e-9
    assert [held_bytes(executor) for executor in whole.executors.values()] == [0, 0]
    start = StartPoint.of(plan.course, step=saved.step, holder=saved.holder)
    for carrier in (on_disk(case, plan, tmp_path / "again"), make_carrier(case, plan)):
        for node, executor in carrier.executors.items():
            with_head = saves_head(plan.course, node, saved.holder)
            shard = Pieces.of(whole.shards[saved.step][node])
            executor.load_shard(shard, shard_metadata(node, saved.step), with_head=with_head)
        assert run(plan, carrier, 1, start=start).finish == rd.Finish("", "")
        assert same_bits(trained_tensors(carrier), wanted)
        assert carrier.shards[14] == whole.shards[14]
    for executor in whole.executors.values():
        executor.inactive_state.close()
    assert list((tmp_path / "whole").rglob("*.safetensors")) == []


def test_hift_without_room_for_its_state_does_not_begin(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node took the room after it was counted: the second of two files does not fit, and the first one goes."""
    case = hift_case(folder, "bert")
    carrier, allocate = make_carrier(case, case.plan(ONE)), os.posix_fallocate

    def once(descriptor: int, offset: int, size: int) -> None:
        if len(list(tmp_path.iterdir())) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", once)
    state = carrier.executors["a"].inactive_state
    with pytest.raises(StorageError, match="No space left on device; make room"):
        state.keep_on_disk(tmp_path, {"run": "r", "node": "a"})
    state.close()
    assert list(tmp_path.iterdir()) == []


def test_hift_with_dropped_state_goes_on_from_a_shard(folder: Path) -> None:
    """The head stays active and keeps its state; that of groups is in no shard."""
    case = hift_case(folder, "bert", 'always_active = ["head"]\nstate = "drop"', checkpoint_every=7, local_iterations=7)
    case = dataclasses.replace(case, dtype="float32", num_steps=14, eval_every=0)
    plan = case.plan(ONE)
    whole = make_carrier(case, plan)
    saved = next(entry for entry in run(plan, whole, 0).logged if isinstance(entry, rd.LogCheckpoint))
    carrier = make_carrier(case, plan)
    shard = Pieces.of(whole.shards[saved.step]["a"])
    carrier.executors["a"].load_shard(shard, shard_metadata("a", saved.step), with_head=True)
    start = StartPoint.of(plan.course, step=saved.step, holder=saved.holder)
    assert run(plan, carrier, 1, start=start).finish == rd.Finish("", "")
    assert same_bits(trained_tensors(carrier), trained_tensors(whole))
    assert b"moments/" not in whole.shards[saved.step]["a"]
