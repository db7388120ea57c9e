"""The device that computes, as torch reports it: name, memory, numeric class, and whether bfloat16 is fast.

On CUDA a node has two memories. Batches wait in the host's; weights, graphs and gradients are on the device, with a
context of kernel code (``CONTEXT_BYTES``) that no tensor counts. A budget fits into both.

Whether bfloat16 is fast is taken from torch's report of the processor, not from a measurement, because a run's result
depends on it and must be repeatable. It is 4 times as fast on AVX512-BF16. Without such instructions torch computes the
same products more slowly than in float32. A torch without the function (2.9) counts as a processor without the
instructions.

Source: PyTorch, CUDA semantics (asynchronous execution, memory management); torch 2.13, ``torch.cpu.get_capabilities``
and ``torch.cuda.is_bf16_supported``.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Final, NamedTuple

import torch

from ringtune.costs.measurement import BFLOAT16_INSTRUCTIONS
from ringtune.costs.memory_sizes import CONTEXT_BYTES
from ringtune.errors import CapacityError
from ringtune.quantities import format_bytes

_MIN_BYTES: Final = 1 << 20
_FULL: Final = "out of memory"
_ASKED: Final = re.compile(r"[Tt]ried to allocate ([\d.]+ [KMGT]?i?B)")


class DeviceMemory(NamedTuple):
    """Bytes of an accelerator's memory.

    Attributes:
        peak: most that this process had reserved for tensors since the last ``reset_peak``.
    """

    total: int
    free: int
    peak: int


def settle_of(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until ``device`` has finished its work; on a processor it does nothing.

    On an accelerator a call returns once its work is queued. Without the wait an action's time would be that of its
    launch, and unfinished results would be reported as done.
    """
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def device_name(device: str) -> str:
    """Name of an accelerator, such as ``NVIDIA H200``; of a processor ``cpu``."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def device_memory(device: str) -> DeviceMemory | None:
    """Return the memory of an accelerator; None for a processor; raises ``CapacityError``."""
    if device != "cuda":
        return None
    try:
        free, total = torch.cuda.mem_get_info()  # creates a context if there is none
    except RuntimeError as error:
        if _FULL not in str(error):
            raise
        raise CapacityError(
            f"{device_name(device)} has no memory for CUDA's context, up to {format_bytes(CONTEXT_BYTES)}; end other "
            "programs that use it, start fewer nodes on it, or use --device cpu"
        ) from error
    return DeviceMemory(total=total, free=free, peak=torch.cuda.max_memory_reserved())


def numerics_of(device: str) -> str:
    """Return what the last bits of results depend on here; see ``ringtune.costs.measurement``.

    Examples: ``cpu x86_64 AVX2, torch 2.11.0``, ``cpu x86_64 AVX512 avx512_bf16, torch 2.11.0`` and ``cuda NVIDIA H200
    sm_90, torch 2.11.0+cu130``. Instructions that multiply bfloat16 count where products are rounded. The build tag
    counts only on an accelerator, where it names the version of the kernels. Transformers 4 is not named, as it was the
    only one for long: ``cpu x86_64 AVX2, torch 2.13.0, transformers 5``.
    """
    version = str(torch.__version__)
    library = metadata.version("transformers").partition(".")[0]
    last = "" if library == "4" else f", transformers {library}"
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"cuda {device_name(device)} sm_{major}{minor}, torch {version}{last}"
    words = [torch.backends.cpu.get_cpu_capability(), *_bfloat16_instructions()]
    return f"cpu {platform.machine()} {' '.join(words)}, torch {version.partition('+')[0]}{last}"


def device_budget(memory_bytes: int, device: str, *, sharing: int = 1) -> int:
    """Return the bytes that a run may use: the smaller of the host's and the device's.

    The device's part includes this process's context, as plans count one (``ringtune.costs.memory_sizes``). Contexts of
    other processes may not exist yet, and are subtracted. Example: two nodes on a card with 8 GiB free have 4 GiB less
    half a context each.

    ``memory_bytes`` is the host's or the user's limit; ``sharing`` processes compute on the device.
    """
    memory = device_memory(device)
    if memory is None:
        return memory_bytes
    free = memory.free + CONTEXT_BYTES + torch.cuda.memory_reserved() - (sharing - 1) * CONTEXT_BYTES
    return max(_MIN_BYTES, min(memory_bytes, free // sharing))


@contextmanager
def capacity_errors(node: str, device: str, what: object) -> Iterator[None]:
    """Turn torch's error for missing memory on an accelerator into a ``CapacityError``.

    ``what`` is the computation, converted to text only for an error.
    """
    try:
        yield
    except RuntimeError as error:  # errors of the driver and of torch's allocator have different classes
        if _FULL not in str(error):
            raise
        memory, size = device_memory(device), _ASKED.search(str(error))
        free = f"{format_bytes(memory.free)} of {format_bytes(memory.total)} are free" if memory else "less is free"
        held = f", this node holds {format_bytes(memory.peak)}" if memory else ""
        raise CapacityError(
            f"node {node} has no memory on {device_name(device)} for {what}: it needs "
            f"{size[1] if size else 'some'} more, and {free}{held}; end other programs that use the device, lower "
            "train.batch_size or raise train.microbatches, set memory.activations = 'auto', or add a node"
        ) from error


def multiplies_bfloat16_fast(device: str) -> bool:
    """Whether ``device`` (``cpu`` or ``cuda``) has instructions for bfloat16 products that torch uses."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    has_kernels = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_kernels) and bool(_bfloat16_instructions())


def _bfloat16_instructions() -> list[str]:
    say = getattr(torch.cpu, "get_capabilities", dict)
    capabilities: Mapping[str, Any] = say()
    return [name for name in BFLOAT16_INSTRUCTIONS if capabilities.get(name)]
