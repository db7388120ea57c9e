"""Shards: everything that training goes on from, and nothing that does not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from edge.checkpoint import shard_file
from edge.model.optimizers import NamePrefixes, TrainingState, UnitOptimizers
from ringtune.config.optimizers import OPTIMIZERS
from ringtune.errors import IntegrityError
from ringtune.job.job import Train
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, write_tensors

METADATA = {"run_id": "r", "plan_digest": "p", "node": "a", "step": "4"}
Parameters = dict[str, torch.nn.Parameter]


def to_shard(own: Parameters, optimizer: UnitOptimizers | None, head: bytes | None, metadata: dict[str, str]) -> bytes:
    """The content of a shard's file."""
    return bytes(shard_file.to_shard(own, optimizer, None if head is None else Pieces.of(head), metadata))


def load_shard(
    data: bytes,
    own: Parameters,
    optimizer: UnitOptimizers | None,
    metadata: dict[str, str],
    *,
    with_head: bool,
) -> bytes | None:
    """Load the content of a shard's file; return the head in it."""
    head = shard_file.load_shard(Pieces.of(data), own, optimizer, metadata, with_head=with_head)
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
    """Parameters, moments and each tensor's own step count: further steps are those of the run that never stopped."""
    own, other = parameters(0), parameters(1)
    first, second = optimizer_of(own, name), optimizer_of(other, name)
    train(own, first, "1.up")
    train(own, first, "0.up", "1.up")
    train(other, second, "0.up")  # state that has to go
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
    expected = r"moments has 0.up/row_var as torch.float32 \[2, 1\], expected torch.float32 \[3, 1\]"
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


def test_shard_of_equal_state_is_equal_bytes() -> None:
    """What is saved twice has one digest."""
    own = parameters(0)
    optimizer = optimizer_of(own)
    train(own, optimizer, "0.up")
    assert len({to_shard(own, optimizer, b"head", METADATA) for _ in range(8)}) == 1


def test_shard_carries_the_head_only_if_it_is_given() -> None:
    """One owner holds the head; a node without a slice has nothing else."""
    assert load_shard(to_shard({}, None, b"head", METADATA), {}, None, METADATA, with_head=True) == b"head"
    assert load_shard(to_shard({}, None, None, METADATA), {}, None, METADATA, with_head=False) is None


@pytest.mark.parametrize("key", METADATA)
def test_shard_of_something_else_is_refused_by_name(key: str) -> None:
    """Another run, plan, node or step."""
    data = to_shard(parameters(0), None, None, METADATA)
    with pytest.raises(IntegrityError, match=f"of {key} .*, not 'x'"):
        load_shard(data, parameters(0), None, {**METADATA, key: "x"}, with_head=False)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "damaged"),
        (lambda data: b"", "damaged"),
        (lambda data: to_shard(parameters(0, ("0.up",)), None, None, METADATA), "not those of this node's slice"),
        (
            lambda data: to_shard(
                {"0.up": torch.nn.Parameter(torch.ones(3)), "1.up": parameters(0)["1.up"]}, None, None, METADATA
            ),
            r"has 0.up as torch.float32 \[3\], expected",
        ),
    ],
)
def test_shard_that_does_not_fit_changes_nothing(damage: Callable[[bytes], bytes], message: str) -> None:
    """A torn file, another slice or another shape is refused before anything is taken over."""
    own = parameters(1)
    before = {name: value.detach().clone() for name, value in own.items()}
    with pytest.raises(IntegrityError, match=message):
        load_shard(damage(to_shard(parameters(0), None, None, METADATA)), own, None, METADATA, with_head=False)
    assert all(torch.equal(own[name], before[name]) for name in own)


@pytest.mark.parametrize(
    ("head", "with_head", "message"),
    [(None, True, "has no head, but this node held it"), (b"head", False, "has a head, but another node held it")],
)
def test_shard_of_the_holder_of_the_head_has_it(head: bytes | None, with_head: bool, message: str) -> None:
    """The run would go on with an initial head otherwise; nothing is taken over then."""
    own = parameters(1)
    before = {name: value.detach().clone() for name, value in own.items()}
    with pytest.raises(IntegrityError, match=message):
        load_shard(to_shard(parameters(0), None, head, METADATA), own, None, METADATA, with_head=with_head)
    assert all(torch.equal(own[name], before[name]) for name in own)


def test_shard_without_metadata_is_refused() -> None:
    """A safetensors file of somebody else."""
    from safetensors.torch import save

    with pytest.raises(IntegrityError, match="does not say what it is of"):
        load_shard(save({"adapter/0.up": torch.ones(1)}), {}, None, METADATA, with_head=False)


def test_shard_whose_metadata_are_deep_is_refused() -> None:
    """As one that does not say what it is of."""
    deep = bytes(write_tensors({}, metadata={"ringtune": "[" * 100_000}))
    with pytest.raises(IntegrityError, match="does not say what it is of"):
        load_shard(deep, {}, None, METADATA, with_head=False)
