"""Optimizer state on a disk: the very bits of state in memory, and clear errors for files that are not this run's."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from edge.model import optimizers as optimizers_module
from edge.model.optimizer_state import DiskStateStore, Prefetcher, require_room
from edge.model.optimizers import UnitOptimizers
from ringtune.config.optimizers import OPTIMIZERS
from ringtune.errors import IntegrityError, StorageError
from ringtune.job.job import Train
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, write_tensors
from tests.support.slice_memory import mapped_bytes

OF = {"run": "run-1", "node": "a"}
SHAPES = {"w": (40, 30), "b": (30,), "s": ()}

Units = dict[int, dict[str, torch.nn.Parameter]]


def make_units(dtype: torch.dtype = torch.float32) -> Units:
    """Three units with a few tensors each."""
    generator = torch.Generator().manual_seed(0)
    return {
        unit: {
            f"{unit}.{name}": torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for name, shape in SHAPES.items()
        }
        for unit in (-1, 0, 3)
    }


def step(optimizers: UnitOptimizers, units: Units, unit: int, *, leave_out: str = "none") -> None:
    """One update of a unit, whose state is put away then."""
    for name, parameter in units[unit].items():
        if not name.endswith(leave_out):
            parameter.grad = parameter.detach().cos()
    optimizers.prefetch([unit])
    optimizers.update([unit], 0.1)
    optimizers.evict_state([unit])


def on_disk(folder: Path, units: Units, name: str = "adamw", of: Mapping[str, str] = OF) -> UnitOptimizers:
    """Optimizers whose state rests in a folder."""
    optimizers = UnitOptimizers(Train(optimizer=name, weight_decay=0.01), units)
    optimizers.keep_in(DiskStateStore(folder, name, of))
    return optimizers


def mapped(folder: Path) -> bool:
    """Whether a file of the folder is mapped by this process."""
    gc.collect()
    return str(folder) in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_on_disk_gives_the_bits_of_state_in_memory(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Units in turn, one with a tensor that trains later only; nothing is mapped between updates."""
    ours, theirs = make_units(dtype), make_units(dtype)
    disk = on_disk(tmp_path / "moments", ours, name)
    memory = UnitOptimizers(Train(optimizer=name, weight_decay=0.01), theirs)
    for count, unit in enumerate((0, 3, -1, 0, 3, 3, -1, 0)):
        for optimizers, units in ((disk, ours), (memory, theirs)):
            step(optimizers, units, unit, leave_out="b" if count == 0 else "none")
        assert disk.held_bytes == 0
        assert not mapped(tmp_path)
    assert all(torch.equal(ours[unit][name], theirs[unit][name]) for unit in ours for name in ours[unit])
    assert bytes(write_tensors(disk.tensors())) == bytes(write_tensors(memory.tensors()))
    disk.close()
    assert list((tmp_path / "moments").glob("*")) == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_on_disk_is_saved_and_loaded_by_pieces(tmp_path: Path, name: str) -> None:
    """A shard from a disk goes on in memory and on another disk as the run that never stopped; state of before goes."""
    units, others = make_units(), [make_units(), make_units()]
    first = on_disk(tmp_path / "first", units, name)
    targets = [
        on_disk(tmp_path / "second", others[0], name),
        UnitOptimizers(Train(optimizer=name, weight_decay=0.01), others[1]),
    ]
    step(first, units, 0)
    for target, own in zip(targets, others, strict=True):
        step(target, own, 3)
        file = TensorFile(Pieces.of(bytes(write_tensors(first.tensors()))), where="the shard")
        target.make_room(file.infos)
        for full in file.infos:
            target.fill(full, file.tensor(full))
        assert bytes(write_tensors(target.tensors())) == bytes(write_tensors(first.tensors()))
        for unit, parameters in own.items():
            for key, value in parameters.items():
                value.data.copy_(units[unit][key].data)
    step(first, units, 0)
    for target, own in zip(targets, others, strict=True):
        step(target, own, 0)
        assert all(torch.equal(own[0][key], units[0][key]) for key in units[0])
        target.close()
    first.close()


def test_state_of_an_active_unit_stays_mapped_and_can_be_saved(tmp_path: Path) -> None:
    """A unit that the next step trains too is not put away; what a shard reads of it is the newest."""
    units, others = make_units(), make_units()
    disk, memory = on_disk(tmp_path, units), UnitOptimizers(Train(weight_decay=0.01), others)
    for _ in range(3):
        for optimizers, own in ((disk, units), (memory, others)):
            for parameter in own[0].values():
                parameter.grad = parameter.detach().cos()
            optimizers.update([0], 0.1)
        assert disk.held_bytes == memory.held_bytes > 0
    assert bytes(write_tensors(disk.tensors())) == bytes(write_tensors(memory.tensors()))
    disk.close()
    assert not mapped(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="procfs says what is resident")
def test_state_on_disk_is_resident_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three equal tensors that are updated, no more than the two moments of one have pages when it is done."""
    wide = 1 << 17
    units = {0: {f"0.{index}": torch.nn.Parameter(torch.ones(wide)) for index in range(3)}}
    module: Any = optimizers_module
    disk, update, found = on_disk(tmp_path / "moments", units), module.apply_update, []

    def measured(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
        update(optimizer, learning_rate)
        found.append(mapped_bytes(tmp_path / "moments"))

    monkeypatch.setattr(module, "apply_update", measured)
    for _ in range(2):
        for parameter in units[0].values():
            parameter.grad = parameter.detach().cos()
        disk.update([0], 0.1)
        assert mapped_bytes(tmp_path / "moments") <= 64 * mmap.PAGESIZE  # step counts
    one = 2 * 4 * wide
    assert max(found) >= one
    assert max(found) <= one + 64 * mmap.PAGESIZE
    disk.close()


def test_an_update_by_parts_leaves_gradients_of_later_parts_alone(tmp_path: Path) -> None:
    """They are there until their own part, and free right after it; the optimizer knows all parameters afterwards."""
    units = make_units()
    disk, seen = on_disk(tmp_path, units), []
    keeper = disk._keeper
    parts = keeper.parts

    def watched(unit: int, updated: Any) -> Any:
        for part in parts(unit, updated):
            seen.append([name for name, value in updated.items() if value.grad is not None])
            yield part

    keeper.parts = watched  # type: ignore[method-assign]
    step(disk, units, 0)
    assert seen == [["0.w", "0.b", "0.s"], ["0.b", "0.s"], ["0.s"]]
    assert [id(value) for value in disk._optimizers[0].param_groups[0]["params"]] == [*map(id, units[0].values())]
    disk.close()


def cut_off(path: Path) -> None:
    """Cut a file off."""
    os.truncate(path, path.stat().st_size - 1)


def damage(path: Path) -> None:
    """Change the header."""
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)


def exchange(path: Path) -> None:
    """Put the file of another run there."""
    folder, units = path.parent / "other", make_units()
    step(on_disk(folder, units, of={"run": "run-2", "node": "a"}), units, 0)
    path.write_bytes((folder / path.name).read_bytes())


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut_off, r"moments/0.safetensors is damaged \(10,627 bytes of 10,628\), not of node a, run run-1, unit 0"),
        (damage, "is damaged"),
        (exchange, "is of node a, run run-2, unit 0, not of node a, run run-1, unit 0; nothing but its run may write"),
        (Path.unlink, r"can't be opened \(No such file or directory\); go on from the last checkpoint with --resume"),
    ],
)
def test_state_file_that_is_not_the_runs_is_one_clear_error(tmp_path: Path, harm: Any, message: str) -> None:
    """At the next update, and where a checkpoint reads it; weights are as they were."""
    units = make_units()
    disk = on_disk(tmp_path / "moments", units)
    step(disk, units, 0)
    harm(tmp_path / "moments" / "0.safetensors")
    before = {name: value.detach().clone() for name, value in units[0].items()}
    with pytest.raises(IntegrityError, match=message):
        step(disk, units, 0)
    with pytest.raises(IntegrityError, match=message):
        disk.tensors()
    assert all(torch.equal(value, before[name]) for name, value in units[0].items())
    disk.close()


def test_state_on_a_full_disk_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is taken before anything is mapped, so that no write into a mapping can fail; weights are as they were."""
    units = make_units()
    disk = on_disk(tmp_path / "moments", units)
    step(disk, units, 3)
    before = {name: value.detach().clone() for name, value in units[0].items()}

    def no_room(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(StorageError, match=r"0\.safetensors: No space left on device; make room"):
        step(disk, units, 0)
    assert all(torch.equal(value, before[name]) for name, value in units[0].items())
    assert [path.name for path in (tmp_path / "moments").iterdir()] == ["3.safetensors"]
    step(disk, units, 3)
    disk.close()


def test_state_that_has_no_room_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All units of the node count, to the byte."""
    units = make_units()
    optimizers = UnitOptimizers(Train(), units)
    disk = DiskStateStore(tmp_path / "moments", "adamw", OF)
    needed = sum(disk.file_bytes(unit, parameters) for unit, parameters in units.items())
    sizes = SimpleNamespace(free=needed)
    monkeypatch.setattr("shutil.disk_usage", lambda _: sizes)
    require_room(tmp_path / "moments", [optimizers], OF)
    sizes.free = needed - 1
    with pytest.raises(StorageError, match="node a: the optimizer state of inactive units needs 31") as caught:
        require_room(tmp_path / "moments", [optimizers], OF)
    assert "are free; make room, give another --state, or set hift.state = 'memory'" in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        require_room(tmp_path / "file", [optimizers], OF)
    for unit in units:
        step(on_disk(tmp_path / "moments", units), units, unit)
    assert sum(path.stat().st_size for path in (tmp_path / "moments").iterdir()) == needed


def test_prefetcher_hints_the_whole_file_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte once; a file that is gone is no error, and what is asked after the end is not read."""
    path, asked, is_done = tmp_path / "file", [], threading.Event()
    path.write_bytes(bytes(300_000))

    def advise(_: int, start: int, size: int, advice: int) -> None:
        asked.append((start, size, advice))
        if len(asked) == 3:
            is_done.set()

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr("edge.model.optimizer_state._CLOSE_S", 60.0)
    prefetcher = Prefetcher()
    prefetcher.ask(tmp_path / "gone")
    prefetcher.ask(path)
    assert is_done.wait(30)
    assert prefetcher.close()
    assert asked == [(start, 131_072, os.POSIX_FADV_WILLNEED) for start in (0, 131_072, 262_144)]
    prefetcher.ask(path)
    assert len(asked) == 3


def test_state_takes_its_room_before_training(tmp_path: Path) -> None:
    """What others write meanwhile takes nothing of it."""
    units = make_units()
    keeper = DiskStateStore(tmp_path / "moments", "adamw", OF)
    keeper.reserve(units)
    files = {path.name: path.stat() for path in (tmp_path / "moments").iterdir()}
    wanted = {f"{unit}.safetensors": keeper.file_bytes(unit, values) for unit, values in units.items()}
    assert {name: found.st_size for name, found in files.items()} == wanted
    assert all(512 * found.st_blocks >= found.st_size for found in files.values())
    keeper.close()


def test_state_is_read_ahead_once_before_each_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are interleaved at a node, so that it is asked again and again for what comes next."""
    asked: list[str] = []
    monkeypatch.setattr(Prefetcher, "ask", lambda _, path: asked.append(path.stem))
    units = make_units()
    disk = on_disk(tmp_path / "moments", units)
    for unit in (0, 3):
        step(disk, units, unit)
    for _ in range(4):
        disk.prefetch([0, 3, -1])  # -1 has no state yet
    assert asked == ["0", "3"]
    step(disk, units, 0)
    disk.prefetch([0, 3])
    assert asked == ["0", "3", "0"]
    disk.close()
