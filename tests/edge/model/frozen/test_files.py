"""What a node holds of frozen weights: few bytes, as they are on disk where they are so already."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edge.compute.executor import NodeExecutor
from edge.model.frozen.files import FrozenFiles
from edge.model.frozen.matrix import FrozenMatrix
from edge.model.safetensors_files import SafetensorsFiles
from ringtune.costs.facts.model_facts import model_facts
from ringtune.costs.memory.sizes import Sizes
from ringtune.errors import ModelError
from ringtune.files import pieces
from ringtune.schedule.frozen_weights import FROZEN_DTYPES, FrozenWeights
from tests.support import hand_ring as ring
from tests.support import tiny
from tests.support.processes import source_environment
from tests.support.slice_memory import PLAIN

RATIOS = {"bfloat16": 0.51, "int8": 0.27}
SLICES = {"b": (0, 1), "c": (1, 4)}
MEASURE_S = 300
"""How long a measurement may take: five processor seconds, on a machine that does much else."""


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with blocks as wide as the smallest that are in use, and a tokenizer."""
    return tiny.write_model(tmp_path_factory.mktemp("wide"), hidden_size=384, num_heads=12)


def in_bfloat16(folder: Path, target: Path) -> Path:
    """A copy of a model folder whose file has bfloat16."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    tensors = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def executor(folder: Path, rows: Path, node: str, frozen: FrozenWeights | None) -> NodeExecutor:
    """One node of a ring of three, of which the first owns the rows."""
    job = ring.make_job(folder, model__dtype="float32")
    datasets = ring.make_datasets(job, folder, rows, ("a",))
    plan = ring.make_plan(job, datasets, SLICES, hidden_size=384, frozen=frozen)
    return NodeExecutor(plan, node, job, folder, datasets.get(node))


@pytest.mark.parametrize("dtype", FROZEN_DTYPES)
def test_frozen_blocks_take_the_planned_share_of_memory(wide_folder: Path, tmp_path: Path, dtype: str) -> None:
    """A node's frozen blocks in bytes, by what is really held and by the plan: half, and a quarter and a bit."""
    job = ring.make_job(wide_folder, model__dtype="float32")
    facts, frozen = model_facts(wide_folder, job), FrozenWeights(dtype=dtype)
    datasets = ring.make_datasets(job, wide_folder, tmp_path, ("a",))
    held = {}
    for way in (None, frozen):
        node = executor(wide_folder, tmp_path, "c", way)
        course = ring.make_plan(job, datasets, SLICES, hidden_size=384, frozen=way).course
        sizes = Sizes(course, facts, optimizer="adamw", dtype="float32", activation_token_bytes=0)
        held[way] = node.hosted_bytes - 3 * facts.adapter_block_bytes
        assert held[way] == 3 * sizes.block_bytes
    assert held[frozen] / held[None] <= RATIOS[dtype]


@pytest.mark.parametrize("dtype", FROZEN_DTYPES)
def test_frozen_embedding_is_held_small_at_an_owner(wide_folder: Path, tmp_path: Path, dtype: str) -> None:
    """Tables of words, positions and types; norms stay float32."""
    node = executor(wide_folder, tmp_path, "a", FrozenWeights(dtype=dtype))
    weights = list(node._hosted.skeleton.base.embeddings.parameters())
    assert [isinstance(weight, FrozenMatrix) for weight in weights] == [weight.dim() == 2 for weight in weights]
    assert {weight.dtype for weight in weights if weight.dim() == 1} == {torch.float32}


def test_frozen_bfloat16_of_a_file_is_read_without_a_copy(
    wide_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the blocks is read as float32 but vectors, and the token table stays mapped."""
    folder, asked = in_bfloat16(wide_folder, tmp_path / "bf16"), {}
    original = SafetensorsFiles.read

    def read(self: SafetensorsFiles, name: str, dtype: Any = None, *, private: bool = False) -> torch.Tensor:
        asked[name] = (dtype, private)
        return original(self, name, dtype, private=private)

    monkeypatch.setattr(SafetensorsFiles, "read", read)
    with FrozenFiles(folder, FrozenWeights(dtype="bfloat16")) as files:
        table = files.read_frozen("embeddings.word_embeddings.weight", torch.float32)
        matrix = files.read_frozen("encoder.layer.0.output.dense.weight", torch.float32, private=True)
        vector = files.read_frozen("encoder.layer.0.output.dense.bias", torch.float32, private=True)
    assert set(asked.values()) == {(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)}
    assert (table.dtype, matrix.dtype, vector.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert not isinstance(vector, FrozenMatrix)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_frozen_int8_is_rounded_a_piece_at_a_time(
    wide_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str
) -> None:
    """Whole rows, whatever the size of a piece, give what the whole matrix gives."""
    folder = wide_folder if stored == "float32" else in_bfloat16(wide_folder, tmp_path / "bf16")
    name, found = "encoder.layer.0.intermediate.dense.weight", []
    for size in (pieces.PIECE_BYTES, 5_000):
        monkeypatch.setattr("edge.model.safetensors_files.PIECE_BYTES", size)
        with FrozenFiles(folder, FrozenWeights(dtype="int8")) as files:
            matrix = files.read_frozen(name, torch.float32)
            assert isinstance(matrix, FrozenMatrix)
            found.append(matrix.wide())
    assert torch.equal(*found)
    whole = load_file(folder / "model.safetensors")[name].float()
    step = whole.abs().amax(dim=1, keepdim=True) / 127
    assert float(((found[0] - whole).abs() / step).max()) <= 0.5 + 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_frozen_matrix_refuses_numbers_that_are_not_finite(tmp_path: Path, value: float) -> None:
    """However it is held; in int8 one of them would make a whole row so."""
    matrix = torch.randn(4, 8).half()
    matrix[2, 5] = value
    save_file({"bad": matrix}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with FrozenFiles(tmp_path, FrozenWeights(dtype="int8")) as files, pytest.raises(ModelError) as caught:
        files.read_frozen("bad", torch.float32)
    assert "tensor bad has numbers that are not finite, which int8 can't hold; fetch the model again" in str(
        caught.value
    )
    with FrozenFiles(tmp_path, FrozenWeights(dtype="bfloat16")) as files, pytest.raises(ModelError) as caught:
        files.read_frozen("bad", torch.float32)
    assert "tensor bad has numbers that are not finite in bfloat16" in str(caught.value)


def resident_bytes(folder: Path, *ways: str) -> list[tuple[int, int]]:
    """What a slice of all blocks adds to an idle agent, and its weights by plan, for each way to hold them."""
    command = [sys.executable, "-m", "tests.support.slice_memory", str(folder), "--blocks", "0", "4", "--frozen", *ways]
    done = subprocess.run(  # noqa: S603
        command, env=source_environment(), capture_output=True, text=True, timeout=MEASURE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["is_finite"] for one in found] == [True] * len(ways)
    return [(one["added_anonymous_bytes"], one["planned_bytes"]) for one in found]


@pytest.mark.timeout(MEASURE_S + 60)
@pytest.mark.promise("7 bounded memory")
@pytest.mark.thorough
def test_frozen_weights_save_resident_memory(tmp_path: Path) -> None:
    """Besides its weights a slice adds the same, however they are held: 10 % at most are not as planned."""
    folder = tiny.write_bert(
        tmp_path / "model", vocab_size=100, hidden_size=768, num_blocks=4, num_heads=12, intermediate_size=3072
    )
    (added, planned), *others = resident_bytes(folder, PLAIN, *FROZEN_DTYPES)
    for dtype, (small, small_planned) in zip(FROZEN_DTYPES, others, strict=True):
        assert small == pytest.approx(small_planned + added - planned, rel=0.10), dtype
