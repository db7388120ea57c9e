"""Shards: everything that training goes on from, and nothing that does not fit."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from edge.checkpoint import shard_file
from edge.model.optimizers import NamePrefixes, TrainingState, UnitOptimizers
from edge.model.tensor_files import pieces_of
from ringtune.config.optimizers import OPTIMIZERS
from ringtune.errors import IntegrityError
from ringtune.job.job import Train
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, write_tensors

METADATA = {"run_id": "r", "plan_digest": "p", "node": "a", "step": "4"}
Parameters = dict[str, torch.nn.Parameter]


def to_shard(own: Parameters, optimizer: UnitOptimizers | None, head: bytes | None, metadata: dict[str, str]) -> bytes:
    """The content of a shard's file."""
    content = shard_file.ShardContent(own, optimizer)
    return bytes(content.write(None if head is None else Pieces.of(head), metadata))


def load_shard(
    data: bytes, own: Parameters, optimizer: UnitOptimizers | None, metadata: dict[str, str], *, with_head: bool
) -> bytes | None:
    """Load the content of a shard's file; return the head in it."""
    head = shard_file.ShardContent(own, optimizer).load(Pieces.of(data), metadata, with_head=with_head)
    return None if head is None else bytes(head)


def parameters(seed: int, names: tuple[str, ...] = ("0.up", "1.up")) -> Parameters:
    """Some trainable tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(3, 2, generator=generator)) for name in names}


def train(own: Parameters, optimizer: UnitOptimizers, *names: str) -> None:
    """One step in which only these tensors have a gradient."""
    for name in names:
        own[name].grad = own[name].detach().sin()
    optimizer.update([0, 1], 0.1)


def optimizer_of(own: Parameters, name: str = "adamw") -> UnitOptimizers:
    """One over them, by blocks."""
    units = {unit: {key: own[key] for key in own if key.startswith(f"{unit}.")} for unit in (0, 1)}
    return UnitOptimizers(Train(optimizer=name), units)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shard_goes_on_with_the_very_bits(name: str) -> None:
    """Parameters, moments and each tensor's own step count; state of a tensor that had no update then is dropped."""
    own, other = parameters(0), parameters(1)
    first, second = optimizer_of(own, name), optimizer_of(other, name)
    train(own, first, "1.up")
    train(own, first, "1.up")
    train(other, second, "0.up")
    assert load_shard(to_shard(own, first, None, METADATA), other, second, METADATA, with_head=False) is None
    for _ in range(3):
        train(own, first, "0.up", "1.up")
        train(other, second, "0.up", "1.up")
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_shard_of_another_optimizer_is_refused() -> None:
    """The shapes of its state may be the same; nothing is taken over."""
    own, other = parameters(0), parameters(1)
    optimizer = optimizer_of(own, "momentum")
    train(own, optimizer, "0.up")
    before = {name: value.detach().clone() for name, value in other.items()}
    target, expected = (
        optimizer_of(other, "adafactor"),
        "has momentum_buffer of 0.up, the optimizer keeps col_var, row_var",
    )
    with pytest.raises(IntegrityError, match=expected):
        load_shard(to_shard(own, optimizer, None, METADATA), other, target, METADATA, with_head=False)
    assert all(torch.equal(other[name], before[name]) for name in other)


def test_shard_with_factored_state_of_another_shape_is_refused() -> None:
    """Rows and columns are those of the parameter."""
    own = {"0.up": torch.nn.Parameter(torch.ones(2, 3)), "1.up": parameters(0)["1.up"]}
    optimizer = optimizer_of(own, "adafactor")
    train(own, optimizer, "0.up")
    state = optimizer.tensors()
    expected = r"moments has 0.up/row_var as F32 \[2, 1\], expected F32 \[3, 1\]"
    target = parameters(1)
    holder = TrainingState(
        values={},
        parameters=target,
        optimizers=optimizer_of(target, "adafactor"),
        prefixes=NamePrefixes(value="value/", state=""),
        where="moments",
        part="slice",
    )
    with pytest.raises(IntegrityError, match=expected):
        holder.check(TensorFile(Pieces.of(bytes(write_tensors(state))), where="moments"))


@pytest.mark.parametrize(
    ("name", "number", "problem"),
    [
        ("adapter/0.up", math.inf, "numbers that are not finite"),
        ("moments/0.up/exp_avg_sq", -1.0, "below zero, or not a number"),
        ("moments/0.up/exp_avg_sq", math.nan, "below zero, or not a number"),
        ("moments/0.up/step", -1.0, "below zero, or not a number"),
        ("moments/0.up/exp_avg", -1.0, ""),
    ],
)
def test_state_with_numbers_that_no_training_has_is_refused(name: str, number: float, problem: str) -> None:
    """This node would diverge with those of another one as if by its own error; a count is no integer."""
    own = parameters(0)
    optimizer = optimizer_of(own)
    train(own, optimizer, "0.up")
    state = shard_file.ShardContent(own, optimizer).state()
    good = state.tensors()

    def file(dtype: torch.dtype) -> TensorFile:
        changed = torch.full(good[name].shape, number).to(dtype)
        return TensorFile(write_tensors(good | {name: pieces_of(changed)}), where="a snapshot")

    shown = name.removeprefix("moments/")
    with pytest.raises(IntegrityError, match=f"the shard has {shown} .*{problem}") if problem else nullcontext():
        state.check(file(torch.float32))
        state.check_numbers(file(torch.float32))
    with pytest.raises(IntegrityError, match="expected F32"):
        state.check(file(torch.int32))


def test_shard_of_equal_state_is_equal_bytes() -> None:
    """What is saved twice has one digest."""
    own = parameters(0)
    optimizer = optimizer_of(own)
    train(own, optimizer, "0.up")
    assert len({to_shard(own, optimizer, b"head", METADATA) for _ in range(8)}) == 1


def test_shard_that_does_not_fit_changes_nothing() -> None:
    """Another run, plan, node or step, a torn file, another slice or shape is refused before anything is taken over.

    So is one that does not say what it is of, and one without the head that this node held: the run would go on with
    an initial head otherwise.
    """
    from safetensors.torch import save

    own = parameters(1)
    before = {name: value.detach().clone() for name, value in own.items()}
    good = to_shard(parameters(0), None, None, METADATA)
    other_slice = to_shard(parameters(0, ("0.up",)), None, None, METADATA)
    misshapen = {"0.up": torch.nn.Parameter(torch.ones(3)), "1.up": parameters(0)["1.up"]}
    for data, metadata, with_head, message in (
        *((good, {**METADATA, key: "x"}, False, f"of {key} .*, not 'x'") for key in METADATA),
        (good[:-1], METADATA, False, "damaged"),
        (b"", METADATA, False, "damaged"),
        (other_slice, METADATA, False, "not those of this node's slice"),
        (to_shard(misshapen, None, None, METADATA), METADATA, False, r"has 0.up as F32 \[3\], expected"),
        (good, METADATA, True, "has no head, but this node held it"),
        (to_shard(parameters(0), None, b"head", METADATA), METADATA, False, "has a head, but another node held it"),
        (save({"adapter/0.up": torch.ones(1)}), METADATA, False, "does not say what it is of"),
        (bytes(write_tensors({}, metadata={"ringtune": "[" * 100_000})), METADATA, False, "does not say what it is of"),
    ):
        with pytest.raises(IntegrityError, match=message):
            load_shard(data, own, None, metadata, with_head=with_head)
        assert all(torch.equal(own[name], before[name]) for name in own), message
