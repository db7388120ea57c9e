"""Write one node's part of a checkpoint as a safetensors file: trained tensors and optimizer state.

::

    adapter/<block>.<name>          a trainable tensor of the node's slice
    moments/<block>.<name>/<key>    its optimizer state (AdamW: exp_avg, exp_avg_sq, step), once it was updated
    head                            at the owner that holds it: the head as it is handed over, as bytes

The metadata says which run, plan, node and step it is of. Frozen weights are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from edge.model.optimizers import load_optimizer_tensors, optimizer_tensors
from ringtune.errors import IntegrityError

FORMAT = "ringtune-shard-1"
_ADAPTER, _MOMENTS, _HEAD = "adapter/", "moments/", "head"
_METADATA = "ringtune"

Parameters = Mapping[str, torch.nn.Parameter]


def to_shard(
    parameters: Parameters, optimizer: torch.optim.Optimizer | None, head: bytes | None, metadata: Mapping[str, str]
) -> bytes:
    """Write the file of a node.

    Args:
        parameters: trainable tensors of its slice by name.
        optimizer: over them; None if there are none.
        head: what an owner hands over; None = another node has it.
        metadata: run, plan, node and step.
    """
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {f"{_ADAPTER}{name}": value for name, value in parameters.items()}
    if optimizer is not None:
        state = optimizer_tensors(optimizer, parameters)
        tensors |= {f"{_MOMENTS}{name}": value for name, value in state.items()}
    if head is not None:
        tensors[_HEAD] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    # one entry: the library writes several in an order that changes, and equal shards shall be equal bytes
    return bytes(save(plain, metadata={_METADATA: json.dumps({"format": FORMAT, **metadata}, sort_keys=True)}))


def load_shard(
    data: bytes,
    parameters: Parameters,
    optimizer: torch.optim.Optimizer | None,
    metadata: Mapping[str, str],
    *,
    with_head: bool,
) -> bytes | None:
    """Replace parameters and optimizer state by those of a file of ``to_shard``.

    Args:
        data: the file.
        parameters: as there.
        optimizer: as there.
        metadata: what it has to be of.
        with_head: whether the node held the head then; a shard of it has one, and no other.

    Returns:
        The head, None if another node held it.

    Raises:
        IntegrityError: unreadable, of something else, or its tensors do not fit; nothing was changed then.
    """
    tensors, found = _read(data)
    for key, wanted in {"format": FORMAT, **metadata}.items():
        if found.get(key) != wanted:
            raise IntegrityError(f"the shard is of {key} {found.get(key)!r}, not {wanted!r}")
    head = tensors.pop(_HEAD, None)
    if with_head is not (head is not None):
        raise IntegrityError(
            "the shard has no head, but this node held it at that step"
            if with_head
            else "the shard has a head, but another node held it at that step"
        )
    given = _part(tensors, _ADAPTER)
    state = _part(tensors, _MOMENTS)
    if given.keys() != parameters.keys() or len(given) + len(state) != len(tensors):
        raise IntegrityError(f"the shard has the tensors {sorted(tensors)[:3]}..., not those of this node's slice")
    for name, value in given.items():
        _check_like(name, value, parameters[name])
    for name, value in state.items():
        parameter = parameters.get(name.rpartition("/")[0])
        if parameter is None:
            raise IntegrityError(f"the shard has moments {name} of an unknown tensor")
        if not name.endswith("/step"):
            _check_like(name, value, parameter)
    with torch.no_grad():
        for name, value in given.items():
            parameters[name].copy_(value)
    if optimizer is not None:
        load_optimizer_tensors(optimizer, parameters, state)
    return None if head is None else head.numpy().tobytes()


def _read(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, torch.Tensor] = load(data)
    except SafetensorError as error:
        raise IntegrityError(f"the shard is damaged ({error})") from error
    # the library has checked the header, but gives the metadata of files only
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    try:
        return tensors, dict(json.loads(header["__metadata__"][_METADATA]))
    except (KeyError, ValueError, TypeError) as error:
        raise IntegrityError("the shard does not say what it is of") from error


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _check_like(name: str, value: torch.Tensor, expected: torch.Tensor) -> None:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        raise IntegrityError(
            f"the shard has {name} as {value.dtype} {list(value.shape)}, expected {expected.dtype} "
            f"{list(expected.shape)}"
        )
