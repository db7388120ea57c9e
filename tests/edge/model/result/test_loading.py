"""A saved adapter comes back into slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ringtune.errors import IntegrityError
from ringtune.files.pieces import Pieces
from ringtune.models.result_files import ADAPTER_FILES, BLOCKS_FILES, result_files
from ringtune.schedule.plan import Plan
from tests.support import hand_ring as ring
from tests.support import tiny
from tests.support.plans import changed

SPLITS = ({"b": (0, 2), "c": (2, 4)}, {"a": (0, 4)}, {"c": (0, 1), "a": (1, 3), "b": (3, 4)})


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model for all tests of this file."""
    return tiny.write_model(tmp_path_factory.mktemp("tiny-model"))


def write(hand: ring.HandRing, folder: Path, names: tuple[str, ...] = ADAPTER_FILES) -> Path:
    """The folder of a ring, as the coordinator merges it."""
    from coordinator.records.result_files import adapter_folder

    folder.mkdir(exist_ok=True)
    files = {node: {name: Pieces.of(part) for name, part in own.items()} for node, own in hand.files().items()}
    for name, content in adapter_folder(files, names).items():
        (folder / name).write_bytes(bytes(content))
    return folder


def make(
    model_folder: Path, folder: Path, slices: dict[str, tuple[int, int]], **overrides: object
) -> tuple[Plan, ring.HandRing]:
    """A ring of two owners over the given slices; it has not trained."""
    job = ring.make_job(model_folder, **overrides)
    datasets = ring.make_datasets(job, model_folder, folder, ("a", "c"), eval_rows=12)
    plan = ring.make_plan(job, datasets, slices)
    return plan, ring.HandRing(plan, job, model_folder, datasets)


@pytest.fixture(scope="module")
def saved(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[float, float, float]]:
    """A trained run's folder, and its evaluation."""
    folder = tmp_path_factory.mktemp("saved")
    _, hand = make(model_folder, folder, SPLITS[0], train__max_steps=8)
    hand.train()
    return write(hand, folder / "adapter"), hand.evaluations[8]


@pytest.mark.parametrize("slices", SPLITS)
def test_loading_gives_the_evaluation_of_the_trained_ring(
    model_folder: Path,
    tmp_path: Path,
    saved: tuple[Path, tuple[float, float, float]],
    slices: dict[str, tuple[int, int]],
) -> None:
    """Whatever the split, a ring that loads the folder counts what the trained one counted, without a step."""
    plan, hand = make(model_folder, tmp_path, slices, train__max_steps=1)
    for node, executor in hand.nodes.items():
        executor.load_saved(saved[0])
        assert node in plan.nodes
    hand.plan = changed(plan, num_steps=0)
    hand.train()
    assert hand.evaluations[0] == pytest.approx(saved[1], rel=1e-12)


def test_loading_fills_the_private_blocks_of_an_owner(model_folder: Path, tmp_path: Path) -> None:
    """Blocks that every owner runs itself get the saved values at each owner."""
    values: dict[str, object] = {"privacy__private_blocks": 1, "train__max_steps": 4}
    split = {"b": (1, 2), "c": (2, 4)}
    _, hand = make(model_folder, tmp_path, split, **values)
    hand.train()
    folder = write(hand, tmp_path / "adapter")
    _, other = make(model_folder, tmp_path, split, **values, train__seed=5)
    for executor in other.nodes.values():
        executor.load_saved(folder)
    for holder in ("a", "c"):
        other.holder = holder
        again = other.tensors()
        assert all(torch.equal(value, again[name]) for name, value in hand.tensors().items())


@pytest.mark.parametrize("config", ["double_seq_bn", "par_bn", "lora", "ia3", "loreft", "linear", "mlp[hidden=8]"])
def test_loading_round_trips_other_adapters(model_folder: Path, tmp_path: Path, config: str) -> None:
    """What one ring saved another ring with other initial values saves again, bit for bit."""
    values = {"adapter__config": config, "model__dtype": "float32", "wire__dtype": "float32", "train__max_steps": 4}
    _, hand = make(model_folder, tmp_path, SPLITS[0], **values)
    hand.train()
    names = result_files("sequence-classification", config)
    folder = write(hand, tmp_path / "adapter", names)
    _, other = make(model_folder, tmp_path, SPLITS[0], **values, train__seed=5)
    other.holder = hand.holder
    for executor in other.nodes.values():
        executor.load_saved(folder)
    again = other.tensors()
    assert all(torch.equal(value, again[name]) for name, value in hand.tensors().items())


def test_loading_of_own_weights_gives_the_evaluation_of_the_trained_ring(model_folder: Path, tmp_path: Path) -> None:
    """Also on another split and with private blocks, which had been of the slices; norms are the base model's own."""
    values: dict[str, object] = {"adapter__config": "full"}
    _, hand = make(model_folder, tmp_path, SPLITS[0], **values, train__max_steps=8)
    hand.train()
    folder = write(hand, tmp_path / "adapter", BLOCKS_FILES)
    split = {"b": (1, 2), "c": (2, 4)}
    plan, other = make(model_folder, tmp_path, split, **values, privacy__private_blocks=1, train__max_steps=1)
    for executor in other.nodes.values():
        executor.load_saved(folder)
    other.plan = changed(plan, num_steps=0)
    other.train()
    assert other.evaluations[0] == pytest.approx(hand.evaluations[8], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bert.encoder.layer.3.output.LayerNorm.weight", "LayerNorm.weight, which this model has not"),
        ("bert.encoder.layer.3.output.dense.bias", "output.dense.bias, which this model has not"),
        ("bert.embeddings.word_embeddings.weight", "word_embeddings.weight, which this model has not"),
    ],
)
def test_loading_of_own_weights_reaches_nothing_frozen(
    model_folder: Path, tmp_path: Path, name: str, message: str
) -> None:
    """A file with more than what trains is refused by name."""
    from safetensors.torch import load_file, save_file

    _, hand = make(model_folder, tmp_path, SPLITS[0], adapter__config="full")
    folder = write(hand, tmp_path / "adapter", BLOCKS_FILES)
    tensors = load_file(folder / "blocks.safetensors") | {name: torch.zeros(32)}
    save_file(tensors, folder / "blocks.safetensors")
    with pytest.raises(IntegrityError, match=message):
        hand.nodes["c"].load_saved(folder)


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(next(name for name in sorted(tensors) if ".layer.3." in name))


def _rename(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in sorted(tensors) if ".layer.3." in name)
    tensors[name.replace("adapter_down", "other")] = tensors[name].clone()


def _shorten(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in sorted(tensors) if ".layer.3." in name)
    tensors[name] = tensors[name][:1].clone()


def _base(tensors: dict[str, torch.Tensor]) -> None:
    tensors["bert.encoder.layer.3.attention.self.query.weight"] = torch.zeros(32, 32)


def _outside(tensors: dict[str, torch.Tensor]) -> None:
    tensors["bert.embeddings.word_embeddings.weight"] = torch.zeros(3, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, "lacks bert.encoder.layer.3"),
        (_rename, "which this model has not"),
        (_shorten, "of shape"),
        (_base, "query.weight, which this model has not"),
        (_outside, "word_embeddings.weight, which this model has not"),
    ],
)
def test_loading_refuses_what_is_not_this_adapter(
    model_folder: Path,
    tmp_path: Path,
    saved: tuple[Path, tuple[float, float, float]],
    change: Callable[[dict[str, torch.Tensor]], None],
    message: str,
) -> None:
    """Missing, foreign or misshapen tensors are refused by name, and a file never reaches a base weight."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "adapter"
    folder.mkdir()
    for path in saved[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "adapter.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter.safetensors")
    _, hand = make(model_folder, tmp_path, SPLITS[0])
    with pytest.raises(IntegrityError, match=message):
        hand.nodes["c"].load_saved(folder)


def test_loading_refuses_a_truncated_file(
    model_folder: Path, tmp_path: Path, saved: tuple[Path, tuple[float, float, float]]
) -> None:
    """Half a file is damage, named."""
    _, hand = make(model_folder, tmp_path, SPLITS[0])
    content = (saved[0] / "adapter.safetensors").read_bytes()
    (tmp_path / "adapter.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(IntegrityError, match=r"adapter\.safetensors is damaged"):
        hand.nodes["c"].load_saved(tmp_path)
