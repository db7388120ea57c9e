"""Exactly the bytes that a graph keeps are counted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from edge.techniques.activation_checkpointing import saved_tensors, storage_bytes


def graph_bytes(output: torch.Tensor, parameters: Iterable[torch.Tensor]) -> int:
    """Bytes that the graph behind ``output`` keeps beyond ``parameters``; storages count once."""
    weights = storage_bytes(parameters)
    kept = storage_bytes([*saved_tensors(output), output])
    return sum(size for address, size in kept.items() if address not in weights)


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
