"""Exactly the bytes that a graph keeps are counted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from edge.profiler.works import Bench
from edge.techniques.activation_checkpointing import saved_tensors, storage_bytes
from tests.support import hand_ring as ring


def graph_bytes(output: torch.Tensor, parameters: Iterable[torch.Tensor]) -> int:
    """Bytes that the graph behind ``output`` keeps beyond ``parameters``; storages count once."""
    weights = storage_bytes(parameters)
    kept = storage_bytes([*saved_tensors(output), output])
    return sum(size for address, size in kept.items() if address not in weights)


def test_measure_counts_what_a_graph_keeps() -> None:
    """A tanh of a linear layer keeps its input and its output, each once; weights don't count."""
    layer = torch.nn.Linear(8, 16)
    x = torch.randn(4, 8, requires_grad=True)
    y = torch.tanh(layer(x))
    assert graph_bytes(y, [*layer.parameters()]) == x.nbytes + y.nbytes
    assert graph_bytes(y, [*layer.parameters(), x]) == y.nbytes


def test_measure_agrees_with_saved_tensor_hooks(model_folder: Path) -> None:
    """Walking the graph finds the storages that torch packs."""
    from transformers import AutoModel

    block = AutoModel.from_pretrained(model_folder).encoder.layer[0].train()
    x = torch.randn(3, 7, 32, requires_grad=True)
    packed: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in (*block.parameters(), x)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            packed[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x)[0]
    output = y.untyped_storage()
    packed[output.data_ptr()] = output.nbytes()
    assert graph_bytes(block(x)[0], [*block.parameters(), x]) == sum(packed.values())


def _kept_bytes(bench: Bench) -> float:
    """What a graph of one block keeps for a micro-batch at full size."""
    rows, tokens = bench.sizes[0]
    return bench.activation_token_bytes() * rows * tokens


def test_measure_grows_with_the_micro_batch(model_folder: Path) -> None:
    """Twice the rows keep about twice the bytes; dropout keeps more."""
    small, large, dropped = (
        _kept_bytes(ring.make_bench(model_folder, ring.make_job(model_folder, **changes)))
        for changes in ({"train__microbatches": 2}, {}, {"train__dropout": 0.1})
    )
    assert 1.8 * small < large < 2.2 * small
    assert dropped > large
