"""Frozen matrices: torch multiplies with them, and a node holds them in few bytes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from edge.model import frozen_weights as held_module
from edge.model.four_bit import FourBit, WideningBuffer, round_to_nf4
from edge.model.frozen_weights import CompactMatrix, FrozenFiles, FrozenMatrix, RowScaled, round_to_int8
from edge.model.tensor_files import SafetensorsFiles
from edge.runtime.executor import NodeExecutor
from edge.techniques.activation_checkpointing import saved_tensors
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.model_facts import model_facts
from ringtune.errors import ModelError
from ringtune.schedule.course import FROZEN_DTYPES, FrozenWeights
from ringtune.storage import pieces
from tests.support import hand_ring as ring
from tests.support import tiny
from tests.support.processes import source_environment
from tests.support.rounded import in_nf4, rounded
from tests.support.slice_memory import PLAIN, is_mapped

ROWS, COLUMNS = 48, 32
WAYS = [(dtype, native) for dtype in FROZEN_DTYPES for native in (False, True)]


def rounded_to_int8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of a matrix, and a scale for each row."""
    numbers, scales = torch.empty_like(matrix, dtype=torch.int8), torch.empty(len(matrix), 1)
    round_to_int8(matrix.clone(), numbers, scales)
    return numbers, scales


def make(dtype: str, *, native: bool = False, room: WideningBuffer | None = None) -> FrozenMatrix:
    """A matrix of random numbers, rounded."""
    numbers = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    found: RowScaled | FourBit = RowScaled(numbers=numbers.bfloat16())
    if dtype == "int8":
        found = RowScaled(**dict(zip(("numbers", "scales"), rounded_to_int8(numbers), strict=True)))
    elif dtype == "nf4":
        found = round_to_nf4([(0, numbers.flatten())], (ROWS, COLUMNS))
    return FrozenMatrix.of(CompactMatrix(found, native=native, room=room or WideningBuffer()))


def linear(matrix: torch.Tensor) -> nn.Linear:
    """A linear layer with this weight, and always the same bias."""
    layer = nn.Linear(COLUMNS, ROWS).requires_grad_(False)
    layer.load_state_dict({"weight": matrix, "bias": torch.arange(float(ROWS))}, assign=True)
    return layer


def forward_and_backward(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the gradient of the input."""
    x = x.clone().requires_grad_(True)
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    return y.detach(), gradient


@pytest.mark.parametrize(("dtype", "native"), WAYS)
def test_matrix_in_a_linear_layer_is_that_of_its_numbers(dtype: str, native: bool) -> None:
    """Widened to the bit; natively as near as products in bfloat16 are."""
    matrix, x = make(dtype, native=native), torch.randn(3, 5, COLUMNS)
    found = forward_and_backward(linear(matrix), x)
    for got, want in zip(found, forward_and_backward(linear(matrix.wide()), x), strict=True):
        assert got.dtype is torch.float32
        if native:
            assert 0 < float((got - want).abs().max() / want.abs().max()) < 0.01
        else:
            assert torch.equal(got, want)


@pytest.mark.parametrize(("dtype", "native"), WAYS)
def test_matrix_that_is_too_large_is_multiplied_in_parts(
    monkeypatch: pytest.MonkeyPatch, dtype: str, native: bool
) -> None:
    """Rows that fit the room at a time, forwards and backwards; the room holds no more."""
    room, x = WideningBuffer(), torch.randn(7, COLUMNS)
    matrix = make(dtype, native=native, room=room)
    whole = forward_and_backward(linear(matrix), x)
    room.__init__()  # type: ignore[misc]
    most = 5 * COLUMNS * 4
    monkeypatch.setattr(held_module, "MAX_WIDENED_BYTES", most)
    for got, want in zip(forward_and_backward(linear(matrix), x), whole, strict=True):
        assert float((got - want).norm() / want.norm()) < (0.01 if native else 1e-6)
    if dtype == "nf4":  # whole blocks of 64, their codes, and natively the numbers before they are rounded
        assert room.held_bytes == (10 * COLUMNS * (2 + 2 + 4) if native else 6 * COLUMNS * (4 + 2))
    else:
        assert room.held_bytes == (0 if (dtype, native) == ("bfloat16", True) else most)


def test_matrix_keeps_nothing_else_for_the_backward() -> None:
    """A graph with a frozen matrix holds neither its input nor a widened copy."""
    x = torch.randn(4, COLUMNS, requires_grad=True)
    assert not saved_tensors(linear(make("int8"))(x))


USES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda weight: functional.linear(torch.ones(4, ROWS), torch.t(weight)),
    lambda weight: functional.linear(torch.ones(4, ROWS), torch.transpose(weight, -2, -1), torch.ones(COLUMNS)),
    lambda weight: torch.addmm(torch.ones(COLUMNS), torch.ones(4, ROWS), weight),
    lambda weight: torch.ones(2, 4, ROWS) @ weight,
    lambda weight: functional.embedding(torch.tensor([[0, 7, 7]]), weight),
    lambda weight: torch.linalg.norm(weight + torch.ones(ROWS, COLUMNS), dim=1),
    lambda weight: functional.linear(torch.ones(4, COLUMNS), weight[3:7]),
    lambda weight: torch.ones(4, ROWS) @ weight[:, 2:5],
    lambda weight: torch.ones(4, 3) @ weight.t()[2:5, :],
    lambda weight: torch.stack([weight, weight]).sum(0),
]


@pytest.mark.parametrize("dtype", FROZEN_DTYPES)
def test_matrix_serves_every_use_of_the_libraries(dtype: str) -> None:
    """Linear layers with inputs first, LoRA's transposes, embeddings, DoRA's norms, rows and columns of subnets."""
    matrix = nn.Parameter(make(dtype), requires_grad=False)
    assert isinstance(matrix, FrozenMatrix)
    for number, use in enumerate(USES):
        torch.testing.assert_close(use(matrix), use(matrix.wide()), msg=f"use {number}")


def test_matrix_stays_small_when_its_module_is_converted() -> None:
    """Type and gradients of a module do not reach it; what would change it is refused."""
    layer = linear(make("int8")).to(device="cpu", dtype=torch.float32)
    assert isinstance(layer.weight, FrozenMatrix)
    assert layer.weight.held.numbers.view().dtype is torch.int8
    assert (layer.weight.shape, layer.weight.requires_grad) == ((ROWS, COLUMNS), False)
    assert layer.weight.dtype is torch.float32  # Gemma 3 converts a factor to it
    assert isinstance(layer.weight.detach(), FrozenMatrix)
    with pytest.raises(TypeError, match="zero_ would change a frozen matrix"):
        nn.init.zeros_(layer.weight)
    most = float(layer.weight.held.wide().abs().max())
    assert isinstance(layer.weight.data.clamp_(-most, most), FrozenMatrix)
    with pytest.raises(TypeError, match="clamp_ would change a frozen matrix"):
        layer.weight.data.clamp_(-most, most / 2)


def test_int8_has_a_scale_for_each_row() -> None:
    """The largest magnitude of a row is 127 steps; zeros stay zeros."""
    rows = torch.tensor([[-1.27, 0.5, 0.004], [0.0, 0.0, 0.0], [3e-30, -1e-30, 0.0]])
    numbers, scales = rounded_to_int8(rows)
    assert numbers.tolist() == [[-127, 50, 0], [0, 0, 0], [127, -42, 0]]
    assert scales.flatten().tolist() == pytest.approx([0.01, 0.0, 3e-30 / 127])


@pytest.mark.parametrize("shape", [(37, 33), (300, 130), (3, 64)])
def test_four_bits_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """Blocks of 64 numbers, whatever the width, read in any pieces, and scales in 8 bits; parts are those of the whole.

    A chunk that is widened at once ends within a group of scales.

    A block of zeros and one large number, beside which the other scales are small, are among them.
    """
    monkeypatch.setattr("edge.model.four_bit.CHUNK", 1 << 12)
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)
    matrix[0], matrix[-1, -1] = 0.0, 40.0
    flat, found = matrix.flatten(), []
    for each in (64, 512, 1 << 20):
        numbers = round_to_nf4(((at, flat[at : at + each].clone()) for at in range(0, len(flat), each)), shape)
        found.append(CompactMatrix(numbers, native=False, room=WideningBuffer()))
    wanted = in_nf4(matrix)
    for held in found:
        assert torch.equal(held.wide(), wanted)
        rows, columns = slice(1, shape[0] - 1), slice(5, 31)
        assert torch.equal(held.part(rows, columns).wide(), wanted[rows, columns])
        assert held.part(rows, columns).numbers.shape == (shape[0] - 2, 26)
    error = float((wanted - matrix).norm() / matrix.norm())
    assert 0 < error < 0.2  # of normal numbers 0.09, and more where a scale is beside a far larger one


RATIOS = {"bfloat16": 0.51, "int8": 0.27, "nf4": 0.135}
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
    """Nothing of the blocks is read as float32 but vectors; matrices stay mapped, wherever they begin."""
    folder, asked = in_bfloat16(wide_folder, tmp_path / "bf16"), {}
    original = SafetensorsFiles.read

    def read(self: SafetensorsFiles, name: str, dtype: Any = None, **how: bool) -> torch.Tensor:
        asked[name] = dtype
        return original(self, name, dtype, **how)

    monkeypatch.setattr(SafetensorsFiles, "read", read)
    with FrozenFiles(folder, FrozenWeights(dtype="bfloat16")) as files:
        table = files.read_frozen("embeddings.word_embeddings.weight", torch.float32)
        matrix = files.read_frozen("encoder.layer.0.output.dense.weight", torch.float32, whole=True)
        vector = files.read_frozen("encoder.layer.0.output.dense.bias", torch.float32, whole=True)
    assert list(asked.values()) == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert isinstance(table, FrozenMatrix) and isinstance(matrix, FrozenMatrix) and not isinstance(vector, FrozenMatrix)
    assert all(is_mapped(value.held.numbers.view().data_ptr(), folder) for value in (table, matrix))
    held = [value.held.numbers.view().dtype for value in (table, matrix)]
    assert (*held, vector.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("dtype", "stored"), [("int8", "float32"), ("int8", "bfloat16"), ("nf4", "bfloat16")])
def test_frozen_matrix_is_rounded_a_piece_at_a_time(
    wide_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, stored: str
) -> None:
    """Whole rows or blocks, whatever the size of a piece, give what the whole matrix gives."""
    folder = wide_folder if stored == "float32" else in_bfloat16(wide_folder, tmp_path / "bf16")
    name, found = "encoder.layer.0.intermediate.dense.weight", []
    for size in (pieces.PIECE_BYTES, 5_000):
        monkeypatch.setattr("edge.model.tensor_files.PIECE_BYTES", size)
        with FrozenFiles(folder, FrozenWeights(dtype=dtype)) as files:
            matrix = files.read_frozen(name, torch.float32, whole=True)
            assert isinstance(matrix, FrozenMatrix)
            found.append(matrix.wide())
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], rounded(load_file(folder / "model.safetensors")[name].float(), dtype))


def test_frozen_matrix_refuses_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """However it is held; in int8 one of them would make a whole row so."""
    told = {
        "int8": "tensor bad has numbers that are not finite, which int8 can't hold; fetch the model again",
        "nf4": "tensor bad has numbers that are not finite, which nf4 can't hold; fetch the model again",
        "bfloat16": "tensor bad has numbers that are not finite in bfloat16",
    }
    for value, (dtype, message) in itertools.product((torch.nan, -torch.inf), told.items()):
        matrix = torch.randn(4, 8).half()
        matrix[2, 5] = value
        save_file({"bad": matrix}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with FrozenFiles(tmp_path, FrozenWeights(dtype=dtype)) as files, pytest.raises(ModelError, match=message):
            files.read_frozen("bad", torch.float32, whole=True)


def resident_bytes(folder: Path, *ways: str) -> list[tuple[int, int]]:
    """What a slice of all blocks adds to an idle agent, and its weights by plan, for each way to hold them."""
    command = [sys.executable, "-m", "tests.support.slice_memory", str(folder), "--blocks", "0", "4", "--frozen", *ways]
    done = subprocess.run(  # noqa: S603
        command, env=source_environment(), capture_output=True, text=True, timeout=MEASURE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["is_finite"] for one in found] == [True] * len(ways)
    return [(one["added_anonymous_bytes"] + one["mapped_bytes"], one["planned_bytes"]) for one in found]


@pytest.mark.timeout(MEASURE_S + 60)
@pytest.mark.promise("7 bounded memory")
@pytest.mark.thorough
def test_frozen_weights_save_resident_memory(tmp_path: Path) -> None:
    """Besides its weights a slice adds the same, however they are held: 10 % or 8 MB at most are not as planned.

    Two measurements of one type differ by up to 5 MB; in float32 the weights are 113 MB.
    """
    folder = tiny.write_bert(
        tmp_path / "model", vocab_size=100, hidden_size=768, num_blocks=4, num_heads=12, intermediate_size=3072
    )
    (added, planned), *others = resident_bytes(folder, PLAIN, *FROZEN_DTYPES)
    for dtype, (small, small_planned) in zip(FROZEN_DTYPES, others, strict=True):
        assert small == pytest.approx(small_planned + added - planned, rel=0.10, abs=8e6), dtype
