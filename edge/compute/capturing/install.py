"""Put the weights that a helper fitted into their host's adapter modules, after every one of them was looked at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from edge.model.skeleton import ADAPTER, Skeleton
from ringtune.errors import DivergedError, IntegrityError


def install(
    skeleton: Skeleton,
    tensors: Mapping[str, torch.Tensor],
    blocks: Iterable[int],
    *,
    where: str,
    keeps_old: bool = False,
) -> None:
    """Replace the weights of all adapter modules of some blocks.

    In place, a graph that still needs the weights of before fails in its backward; it never goes on with the new ones.

    Args:
        skeleton: of the host.
        tensors: what ``AuxiliaryModels.weights`` gave for these blocks.
        blocks: which ones.
        where: names the tensors in errors.
        keeps_old: put new tensors into the modules, so that graphs under way go back through the weights of before. A
            block that is run again for its backward would run with the new ones all the same.

    Raises:
        IntegrityError: other names, shapes or types than those of the modules; nothing was replaced then.
        DivergedError: numbers that are not finite; nothing was replaced then.
    """
    wanted = adapter_weights(skeleton, blocks)
    check_like(tensors, wanted, where=where)
    with torch.no_grad():
        for name, parameter in wanted.items():
            if keeps_old:
                _put(skeleton, name, tensors[name].to(parameter.device, copy=True))
            else:
                parameter.copy_(tensors[name])


def adapter_weights(skeleton: Skeleton, blocks: Iterable[int]) -> dict[str, nn.Parameter]:
    """Return the weights of all adapter modules of some blocks, by the names that ``BlockRunner`` has for them."""
    return {
        f"{index}.{name}": parameter
        for index in blocks
        for name, parameter in skeleton.blocks[index].named_parameters()
        if f".{ADAPTER}." in name
    }


def copy_of(value: torch.Tensor) -> torch.Tensor:
    """Return a copy; of zeros one that takes memory only where it is written to."""
    detached = value.detach()
    return detached.clone() if bool(detached.any()) else torch.zeros_like(detached)


def _put(skeleton: Skeleton, name: str, value: torch.Tensor) -> None:
    index, _, inside = name.partition(".")
    path, _, last = inside.rpartition(".")
    setattr(skeleton.blocks[int(index)].get_submodule(path), last, nn.Parameter(value, requires_grad=False))


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are finite: of any other number the sum is none, and is a look at each number only once."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def check_like(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Refuse tensors that are not like those that are wanted.

    Args:
        tensors: that came.
        wanted: name -> a tensor of the right shape and type.
        where: names the tensors in errors.

    Raises:
        IntegrityError: names the first one that differs, in name, shape or type.
        DivergedError: names the first one with numbers that are not finite.
    """
    if odd := sorted(tensors.keys() ^ wanted.keys()):
        many = "too much" if odd[0] in tensors else "too little"
        raise IntegrityError(f"{where} has {odd[0]} {many}; host and helper need the same plan and job")
    for name, like in wanted.items():
        came = tensors[name]
        if came.shape != like.shape or came.dtype != like.dtype:
            raise IntegrityError(
                f"{where} has {name} as {came.dtype} {list(came.shape)}, expected {like.dtype} {list(like.shape)}"
            )
        if not _is_finite(came):
            raise DivergedError(f"{where} has {name} with numbers that are not finite")
