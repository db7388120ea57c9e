"""The sum of the changes that several users' adapters make to one matrix, as adapters of one.

========= ============================================================== =====================================
site      the sum                                                        size
========= ============================================================== =====================================
linear    the matrices added up                                          that of one set
low rank  the factors of all users side by side, a product of rank K r   K sets
low rank  where that is larger: the products added up, as one matrix     that of the matrix beside it
========= ============================================================== =====================================

So what a host gets for the users of a block is never larger than the matrices that it is merged into.

Source: ColA, Proposition 2 (parameter merging), for K users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from edge.compute.capturing.sites import LoraSite, Site

CHANGE: Final = "change"
"""The name, behind that of its site, of products that were added up."""

_A, _B = "lora_A", "lora_B"

Tensors = Mapping[str, torch.Tensor]


def is_change(site: Site, users: int) -> bool:
    """Whether the sum of so many users' low-rank adapters is one matrix, as it is smaller than their factors."""
    if not isinstance(site, LoraSite):
        return False
    values = sum(getattr(site.adapter, name).numel() for name in (_A, _B))
    return users > 1 and users * values > site.inputs * site.outputs


def sum_of(site: Site, sets: Sequence[Tensors]) -> dict[str, torch.Tensor]:
    """Return the sum of several sets.

    Args:
        site: with whose adapter all sets go.
        sets: the tensors of this adapter by name in it, such as ``lora_A``; at least one.

    Returns:
        The tensors of the sum by block and name, on memory of their own where there are several sets.
    """
    if len(sets) == 1:
        return {f"{site.name}.{name}": value for name, value in sets[0].items()}
    if not isinstance(site, LoraSite):
        return {f"{site.name}.{name}": _added([own[name] for own in sets]) for name in sets[0]}
    parts = len(sets[0][_A]) // sets[0][_B].shape[1]
    if is_change(site, len(sets)):
        return {f"{site.name}.{CHANGE}": _added([_product(own, parts) for own in sets])}
    low = torch.cat([own[_A].view(parts, -1, own[_A].shape[1]) for own in sets], dim=1)
    return {
        f"{site.name}.{_A}": low.flatten(0, 1),
        f"{site.name}.{_B}": torch.cat([own[_B] for own in sets], dim=1),
    }


def _added(values: Sequence[torch.Tensor]) -> torch.Tensor:
    found = values[0].clone()
    for value in values[1:]:
        found += value
    return found


def _product(own: Tensors, parts: int) -> torch.Tensor:
    """Multiply both factors; query, key and value have rows of their own in each."""
    pairs = zip(own[_A].chunk(parts), own[_B].chunk(parts), strict=True)
    return torch.cat([up @ low for low, up in pairs])
