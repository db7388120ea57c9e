"""A node reads only its own tensors, starts from the values of one process, and runs its blocks like the library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from edge.model.slice import Empty
from edge.model.tensor_files import SafetensorsFiles
from edge.runtime.executor import NodeExecutor
from ringtune.costs.model_facts import model_facts
from ringtune.errors import IntegrityError, JobError, ModelError
from ringtune.models.families import FAMILIES
from ringtune.models.folder import INDEX_FILE, WEIGHTS_FILE
from tests.support import hand_ring as ring
from tests.support import reference, tiny

SLICES = {"b": (0, 1), "c": (1, 4)}
CONFIGS = [
    "seq_bn",
    "double_seq_bn",
    "par_bn",
    "scaled_par_bn[reduction_factor=4]",
    "lora[r=4]",
    "ia3",
    "loreft",
    "seq_bn[reduction_factor=4]|lora[r=2]",
    "seq_bn[leave_out=[1,2]]",
]
REFUSED = [
    "prefix_tuning",
    "prompt_tuning",
    "compacter",
    "vera",
    "seq_bn_inv",
    "mam",
    "nonsense",
    "seq_bn[",
    "a/b",
]


@pytest.fixture
def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of all tensors that are read during a test."""
    names: list[str] = []
    original = SafetensorsFiles.read

    def read(self: SafetensorsFiles, name: str, dtype: torch.dtype, *, private: bool) -> torch.Tensor:
        names.append(name)
        return original(self, name, dtype, private=private)

    monkeypatch.setattr(SafetensorsFiles, "read", read)
    return names


def _executor(model_folder: Path, folder: Path, node: str, **overrides: object) -> NodeExecutor:
    job = ring.make_job(model_folder, **overrides)
    datasets = ring.make_datasets(job, model_folder, folder, ("a",))
    plan = ring.make_plan(job, datasets, SLICES)
    return NodeExecutor(plan, node, job, model_folder, datasets.get(node))


@pytest.mark.parametrize("config", CONFIGS)
def test_slice_starts_from_the_values_of_one_process(model_folder: Path, tmp_path: Path, config: str) -> None:
    """Adapters and head before the first step are bit-equal to the library's for the same seed, on every node."""
    job = ring.make_job(model_folder, model__dtype="float32", adapter__config=config, train__seed=7)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, SLICES)
    got = ring.HandRing(plan, job, model_folder, datasets).tensors()
    whole = reference.Trained(model=reference.whole_model(job, plan, model_folder))
    want = {**whole.adapter(), **whole.head()}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.sampled(1)
def test_slice_trains_other_adapters_like_one_process(model_folder: Path, tmp_path: Path, config: str) -> None:
    """Every configuration whose modules sit inside the blocks gives the result of the whole model."""
    # The library's ReFT makes float32 tensors of its own, so it can't run in float64.
    dtype, tolerance = ("float32", 1e-6) if "reft" in config else ("float64", 1e-9)
    job = ring.make_job(
        model_folder, model__dtype=dtype, adapter__config=config, train__max_steps=10, train__microbatches=2
    )
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, SLICES)
    got = ring.HandRing(plan, job, model_folder, datasets).train().tensors()
    trained = reference.train(job, plan, model_folder, datasets)
    want = {**trained.adapter(), **trained.head()}
    assert got.keys() == want.keys()
    assert max(float((got[name] - want[name]).abs().max()) for name in want) <= tolerance


@pytest.mark.parametrize("config", REFUSED)
def test_slice_refuses_adapters_that_cannot_be_split(model_folder: Path, tmp_path: Path, config: str) -> None:
    """A configuration with parts outside the blocks, or an unknown one, is refused by its name in the job."""
    with pytest.raises(JobError, match=r"adapter\.config"):
        _executor(model_folder, tmp_path, "b", adapter__config=config)


def test_slice_refuses_reft_in_float64(model_folder: Path, tmp_path: Path) -> None:
    """The library's ReFT has float32 tensors of its own; better refused than failing in the first step."""
    with pytest.raises(JobError, match="float64"):
        _executor(model_folder, tmp_path, "b", adapter__config="loreft")


def test_slice_does_not_touch_the_generator(model_folder: Path, tmp_path: Path) -> None:
    """Building a node leaves torch's generator as it was."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    _executor(model_folder, tmp_path, "a")
    assert torch.equal(torch.get_rng_state(), before)


def test_slice_reads_only_its_own_blocks(model_folder: Path, tmp_path: Path, read_names: list[str]) -> None:
    """A host reads the tensors of its blocks and nothing else."""
    _executor(model_folder, tmp_path, "c")
    with SafetensorsFiles(model_folder) as weights:
        names = [name for name in weights._stored if name.startswith("encoder.layer.") and "layer.0." not in name]
    assert sorted(read_names) == sorted(names)
    assert len(names) == 3 * 16


def test_slice_of_an_owner_reads_only_the_embedding(model_folder: Path, tmp_path: Path, read_names: list[str]) -> None:
    """An owner without a slice reads the embedding; no block, no pooler."""
    _executor(model_folder, tmp_path, "a")
    assert read_names
    assert all(name.startswith("embeddings.") for name in read_names)


def test_slice_hosts_the_bytes_of_its_blocks(model_folder: Path, tmp_path: Path) -> None:
    """hosted_bytes counts real tensors once: three blocks are three times one block, up to nothing else."""
    one = _executor(model_folder, tmp_path, "b").hosted_bytes
    three = _executor(model_folder, tmp_path, "c").hosted_bytes
    assert three == 3 * one
    job = ring.make_job(model_folder)
    whole = reference.whole_model(job, ring.make_plan(job, {"a": _Rows()}, SLICES), model_folder)  # type: ignore[dict-item]
    block = whole.base_model.encoder.layer[0]
    assert one == sum(parameter.nbytes for parameter in block.parameters())


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


class _Rows:
    """Stands for a data set of which only the counts matter."""

    train_rows, eval_rows = 1, 0


def test_slice_has_empty_modules_elsewhere(model_folder: Path, tmp_path: Path) -> None:
    """What is not hosted can't be run by mistake, and blocks keep their absolute index."""
    skeleton = _executor(model_folder, tmp_path, "c")._hosted.skeleton
    assert [isinstance(block, Empty) for block in skeleton.blocks] == [True, False, False, False]
    assert isinstance(skeleton.base.embeddings, Empty)
    assert isinstance(skeleton.base.pooler, Empty)
    assert len(skeleton.model.heads) == 0
    assert not any(parameter.is_meta for parameter in skeleton.model.parameters())


@pytest.mark.parametrize("layout", ["prefix", "legacy", "sharded"])
def test_slice_reads_other_layouts(model_folder: Path, tmp_path: Path, layout: str) -> None:
    """Names with the model's prefix, old LayerNorm names and sharded files give the same blocks."""
    from safetensors.torch import load_file, save_file

    folder = tiny.write_model(tmp_path / "model", prefix=layout == "prefix")
    tensors = load_file(folder / WEIGHTS_FILE)
    if layout == "legacy":
        old = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for name, value in tensors.items()
        }
        save_file(old, folder / WEIGHTS_FILE)
    if layout == "sharded":
        (folder / WEIGHTS_FILE).unlink()
        names = sorted(tensors)
        shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
        for file, part in shards.items():
            save_file({name: tensors[name] for name in part}, folder / file)
        weight_map = {name: file for file, part in shards.items() for name in part}
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    want = _executor(model_folder, tmp_path, "c")._hosted.skeleton.blocks[2].state_dict()
    got = _executor(folder, tmp_path, "c")._hosted.skeleton.blocks[2].state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_slice_refuses_damaged_checkpoints(tmp_path: Path) -> None:
    """A missing tensor, another shape, a cut file and no file at all are told apart."""
    from safetensors.torch import load_file, save_file

    folder = tiny.write_model(tmp_path / "model")
    tensors = load_file(folder / WEIGHTS_FILE)
    name = "encoder.layer.1.output.dense.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, folder / WEIGHTS_FILE)
    with pytest.raises(ModelError, match=f"{name} is missing"):
        _executor(folder, tmp_path, "c")
    _executor(folder, tmp_path, "b")
    save_file({**tensors, name: torch.zeros(3, 3)}, folder / WEIGHTS_FILE)
    with pytest.raises(ModelError, match=r"\[3, 3\]"):
        _executor(folder, tmp_path, "c")
    content = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(content[: len(content) // 2])
    with pytest.raises(IntegrityError, match="damaged"):
        _executor(folder, tmp_path, "c")
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(ModelError, match="safe_serialization"):
        _executor(folder, tmp_path, "c")
