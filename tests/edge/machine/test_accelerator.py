"""What is told and budgeted of an accelerator, and whether it is fast in bfloat16."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.doctor import Level, check_device
from edge.machine.accelerator import (
    capacity_errors,
    device_budget,
    device_memory,
    multiplies_bfloat16_fast,
    numerics_of,
    settle_of,
)
from ringtune.costs.measurement import BFLOAT16_INSTRUCTIONS
from ringtune.costs.memory_sizes import CONTEXT_BYTES
from ringtune.errors import CapacityError


def test_processor_with_instructions_for_bfloat16_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX512 alone computes them by other means, and slowly; the instructions are used by oneDNN."""
    for says, is_fast in (
        *(({name: True}, True) for name in BFLOAT16_INSTRUCTIONS),
        ({"avx512_f": True, "amx_int8": True}, False),
        ({"avx512_bf16": False, "amx_bf16": False}, False),
        ({}, False),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda says=says: says)
        assert multiplies_bfloat16_fast("cpu") is is_fast, says
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not multiplies_bfloat16_fast("cpu")


GIB = 1 << 30
HELD = 64 << 20


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A card of 8 GiB with 6 free, on which this process holds 64 MiB; what was called is noted."""
    done: dict[str, Any] = {"emptied": 0, "reset": 0}
    values: dict[str, Any] = {
        "mem_get_info": (6 * GIB, 8 * GIB),
        "memory_reserved": HELD,
        "max_memory_reserved": 3 * GIB,
        "get_device_name": "NVIDIA T4",
        "get_device_capability": (7, 5),
        "is_initialized": True,
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.update(emptied=done["emptied"] + 1))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: done.update(reset=done["reset"] + 1))
    return done


def test_settling_waits_for_the_very_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second accelerator is synchronised, not the current one; a processor is not."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    settle_of(torch.device("cpu"))()
    assert waited == []
    settle_of(torch.device("cuda", 1))()
    assert waited == [torch.device("cuda", 1)]


@pytest.mark.usefixtures("card")
def test_budget_is_what_host_and_shared_card_both_have() -> None:
    """Each node's part has one context in it, which plans count; the others' are off; the host may have less."""
    for host, sharing, wanted in (
        (64 * GIB, 1, 6 * GIB + HELD + CONTEXT_BYTES),
        (64 * GIB, 2, (6 * GIB + HELD) // 2),
        (64 * GIB, 4, (6 * GIB + HELD - 2 * CONTEXT_BYTES) // 4),
        (64 * GIB, 40, 1 << 20),
        (2 * GIB, 2, 2 * GIB),
    ):
        assert device_budget(host, "cuda", sharing=sharing) == wanted
        assert device_budget(host, "cpu", sharing=sharing) == host
        needs = sharing * (wanted - CONTEXT_BYTES)  # of tensors
        others = (sharing - 1) * CONTEXT_BYTES  # contexts that may still come
        assert wanted == 1 << 20 or needs + others <= 6 * GIB + HELD


@pytest.mark.usefixtures("card")
def test_no_memory_on_the_card_is_an_error_of_capacity() -> None:
    """With what was asked for, what is free, and what can be done; any other error stays as it is."""
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8.00 GiB of which ..."
    with pytest.raises(CapacityError) as caught, capacity_errors("b", "cuda", "F3.0[0,2)"):
        raise torch.OutOfMemoryError(text)
    for part in ("node b", "NVIDIA T4", "F3.0[0,2)", "2.50 GiB", "6,144 MiB of 8,192 MiB are free", "train.batch_size"):
        assert part in str(caught.value)
    with pytest.raises(RuntimeError, match="other"), capacity_errors("b", "cuda", ""):
        raise RuntimeError("other")


@pytest.mark.usefixtures("card")
def test_card_without_room_for_a_context_is_an_error_of_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses it, with an error of another class than the allocator's."""

    def full() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    with pytest.raises(CapacityError, match="no memory for CUDA's context, up to 815 MiB"):
        device_budget(GIB, "cuda")


@pytest.mark.usefixtures("card")
def test_numeric_class_names_device_instructions_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build's tag is of kernels for the card; the same processor with two builds is one class.

    Transformers 4 is not named, as in older profiles.
    """
    monkeypatch.setattr(metadata, "version", {"transformers": "4.57.6"}.__getitem__)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert numerics_of("cuda") == "cuda NVIDIA T4 sm_75, torch 2.11.0+cu130"
    cpu = numerics_of("cpu")
    assert cpu.startswith(f"cpu {platform.machine()} ") and cpu.endswith(", torch 2.11.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    assert numerics_of("cpu") == cpu
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "avx512_bf16": True, "bf16": False})
    assert numerics_of("cpu").endswith(" amx_bf16 avx512_bf16, torch 2.11.0") and numerics_of("cpu") != cpu
    monkeypatch.setattr(metadata, "version", {"transformers": "5.24.0"}.__getitem__)
    assert numerics_of("cpu").endswith(" amx_bf16 avx512_bf16, torch 2.11.0, transformers 5")
    memory = device_memory("cuda")
    assert memory is not None and (memory.total, memory.peak) == (8 * GIB, 3 * GIB)
    assert device_memory("cpu") is None


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("has_file", "sees", "free", "level", "says"),
    [
        (False, False, 0, Level.PASS, "no CUDA device here"),
        (True, False, 0, Level.WARN, "sees none"),
        (True, True, 6 * GIB, Level.PASS, "NVIDIA T4 sm_75"),
        (True, True, 100 << 20, Level.WARN, "of 8,192 MiB free"),
    ],
)
def test_doctor_names_the_device_with_its_memory(
    has_file: bool, sees: bool, free: int, level: Level, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a card that torch can't use, and one that others have filled."""
    if has_file:
        (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 8 * GIB))
    check = check_device(dev=tmp_path)
    assert (check.name, check.level) == ("device", level) and says in check.found
    assert bool(check.remedy) == (level is Level.WARN)
