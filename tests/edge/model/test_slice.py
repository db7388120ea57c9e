"""A node reads only its own tensors, whatever their layout, and starts from the values of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from edge.machine.resources import peak_rss_bytes, reset_peak, rss_bytes
from edge.model.skeleton import build_skeleton
from edge.model.slice import Empty
from edge.model.tensor_files import SafetensorsFiles
from edge.runtime.executor import NodeExecutor
from ringtune.costs.model_facts import model_facts
from ringtune.errors import IntegrityError, ModelError
from ringtune.models.families import FAMILIES
from ringtune.models.folder import INDEX_FILE, WEIGHTS_FILE
from tests.support import hand_ring as ring
from tests.support import tiny
from tests.support.slice_memory import is_mapped, mapped_bytes
from tests.support.tiny_families import write_family

SLICES = {"b": (0, 1), "c": (1, 4)}


@pytest.fixture
def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of all tensors that are read during a test."""
    names: list[str] = []
    original = SafetensorsFiles.read

    def read(self: SafetensorsFiles, name: str, dtype: torch.dtype, **how: bool) -> torch.Tensor:
        names.append(name)
        return original(self, name, dtype, **how)

    monkeypatch.setattr(SafetensorsFiles, "read", read)
    return names


def _executor(model_folder: Path, folder: Path, node: str, **overrides: object) -> NodeExecutor:
    job = ring.make_job(model_folder, **overrides)
    datasets = ring.make_datasets(job, model_folder, folder, ("a",))
    plan = ring.make_plan(job, datasets, SLICES)
    return NodeExecutor(plan, node, job, model_folder, datasets.get(node))


def test_slice_reads_and_hosts_only_its_own_blocks(model_folder: Path, tmp_path: Path, read_names: list[str]) -> None:
    """What is not hosted can't be run by mistake, and blocks keep their absolute index; building draws nothing.

    Three blocks are three times the bytes of one, each real tensor counted once.
    """
    torch.manual_seed(3)
    before = torch.get_rng_state()
    executor = _executor(model_folder, tmp_path, "c")
    assert torch.equal(torch.get_rng_state(), before)
    with SafetensorsFiles(model_folder) as weights:
        names = [name for name in weights._stored if name.startswith("encoder.layer.") and "layer.0." not in name]
    assert sorted(read_names) == sorted(names)
    assert len(names) == 3 * 16
    skeleton = executor._hosted.skeleton
    assert [isinstance(block, Empty) for block in skeleton.blocks] == [True, False, False, False]
    assert isinstance(skeleton.base.embeddings, Empty)
    assert isinstance(skeleton.base.pooler, Empty)
    assert len(skeleton.model.heads) == 0
    assert not any(parameter.is_meta for parameter in skeleton.model.parameters())
    one = _executor(model_folder, tmp_path, "b").hosted_bytes
    assert executor.hosted_bytes == 3 * one
    assert one == sum(parameter.nbytes for parameter in skeleton.blocks[1].parameters())


def test_slice_of_an_owner_reads_only_the_embedding(model_folder: Path, tmp_path: Path, read_names: list[str]) -> None:
    """An owner without a slice reads the embedding; no block, no pooler."""
    _executor(model_folder, tmp_path, "a")
    assert read_names
    assert all(name.startswith("embeddings.") for name in read_names)


def test_slice_of_own_weights_hosts_no_more_and_in_memory_of_its_own(model_folder: Path, tmp_path: Path) -> None:
    """Without an adapter a block is its base weights alone; all are private memory, those of the list train."""
    executor = _executor(model_folder, tmp_path, "b", adapter__config="full")
    facts = model_facts(model_folder, ring.make_job(model_folder, adapter__config="full"))
    assert executor.hosted_bytes == facts.block_bytes + facts.adapter_block_bytes
    block = executor._hosted.skeleton.blocks[0]
    trained = {name for name, parameter in block.named_parameters() if parameter.requires_grad}
    assert trained == set(FAMILIES["bert"].subnet_weights)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in block.parameters())
    assert all(parameter.is_contiguous() for parameter in block.parameters())


@pytest.mark.promise("7 bounded memory")
def test_mapped_blocks_train_to_the_bits_of_copied_ones(model_folder: Path, tmp_path: Path) -> None:
    """Products of a single token, whose order of sums depends on addresses, too; no mapped page is written."""
    tensors, trained = load_file(model_folder / WEIGHTS_FILE), []
    hidden, mask = torch.linspace(-1, 1, 32).view(1, 1, 32), torch.ones(1, 1, dtype=torch.int64)
    for at in (0, 8):
        folder = Path(shutil.copytree(model_folder, tmp_path / f"at-{at}"))
        tiny.write_at(folder, tensors, at)
        hand = ring.make_ring(folder, tmp_path, SLICES, model__dtype="float32").train()
        runner = hand.nodes["c"]._hosted.blocks
        with torch.no_grad():
            token = runner.run(hidden, mask, runner.context(hidden, mask), *SLICES["c"])
        trained.append(hand.tensors() | {"token": token})
        blocks = [hand.nodes[node]._hosted.skeleton.blocks[first] for node, (first, _) in SLICES.items()]
        matrices = [value for block in blocks for value in block.parameters() if value.dim() > 1]
        frozen = [value for value in matrices if not value.requires_grad]
        assert len(frozen) == 2 * 6
        assert {is_mapped(value.data_ptr(), folder) for value in frozen} == {at == 0}
        assert mapped_bytes(folder) > 0 and mapped_bytes(folder, "Anonymous") == 0
    assert trained[0].keys() == trained[1].keys()
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


@pytest.mark.promise("7 bounded memory")
def test_skeleton_of_gpt2_has_no_masks_of_its_positions(tmp_path: Path) -> None:
    """One of 20,000 positions, which the library makes for each block, takes 400 MB, and its making 800."""
    folder = write_family(tmp_path, "gpt2", num_blocks=2)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"n_positions": 20_000}), encoding="utf-8")
    job = ring.make_job(folder)
    build_skeleton(folder, job)
    reset_peak()
    before = rss_bytes()
    skeleton = build_skeleton(folder, job)
    assert peak_rss_bytes() - before < 100_000_000
    assert not list(skeleton.model.buffers())


def test_slice_reads_other_layouts(model_folder: Path, tmp_path: Path) -> None:
    """Names with the model's prefix, old LayerNorm names and sharded files give the same blocks."""
    tensors = load_file(model_folder / WEIGHTS_FILE)
    prefix, legacy, sharded = (
        tiny.write_model(tmp_path / layout, prefix=layout == "prefix") for layout in ("prefix", "legacy", "sharded")
    )
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    save_file(old, legacy / WEIGHTS_FILE)
    (sharded / WEIGHTS_FILE).unlink()
    shards = {"one.safetensors": sorted(tensors)[::2], "two.safetensors": sorted(tensors)[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, sharded / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    want = _executor(model_folder, tmp_path, "c")._hosted.skeleton.blocks[2].state_dict()
    for folder in (prefix, legacy, sharded):
        got = _executor(folder, tmp_path, "c")._hosted.skeleton.blocks[2].state_dict()
        assert all(torch.equal(got[name], want[name]) for name in want), folder.name


def test_slice_refuses_damaged_checkpoints(model_folder: Path, tmp_path: Path) -> None:
    """A missing tensor, another shape, a cut file and no file at all are told apart."""
    folder, name = tiny.write_model(tmp_path / "model"), "encoder.layer.1.output.dense.weight"
    whole, tensors = (folder / WEIGHTS_FILE).read_bytes(), load_file(model_folder / WEIGHTS_FILE)
    without = save({key: value for key, value in tensors.items() if key != name})
    (folder / WEIGHTS_FILE).write_bytes(without)
    _executor(folder, tmp_path, "b")  # it needs block 0 only
    for content, error, message in (
        (without, ModelError, f"{name} is missing"),
        (save({**tensors, name: torch.zeros(3, 3)}), ModelError, r"\[3, 3\]"),
        (whole[: len(whole) // 2], IntegrityError, "damaged"),
        (None, ModelError, "safe_serialization"),
    ):
        if content is None:
            (folder / WEIGHTS_FILE).unlink()
        else:
            (folder / WEIGHTS_FILE).write_bytes(content)
        with pytest.raises(error, match=message):
            _executor(folder, tmp_path, "c")
