"""Count the bytes that a graph keeps for its backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def storage_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each distinct storage under these tensors, by address: a tensor and its view count once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def saved_tensors(output: torch.Tensor) -> list[torch.Tensor]:
    """List every tensor that the graph behind ``output`` keeps, parameters included.

    Walks ``grad_fn``; the generated nodes expose what they keep as ``_saved_*``.
    """
    kept: list[torch.Tensor] = []
    seen: set[object] = set()
    stack: list[object] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                kept += [item for item in (value if isinstance(value, tuple) else (value,)) if torch.is_tensor(item)]
        kept += [item for item in getattr(node, "saved_tensors", ()) if torch.is_tensor(item)]
        stack += [following for following, _ in getattr(node, "next_functions", ())]
    return kept
