"""Check what a node was started with, before it joins: later it would fail in the midst of somebody else's run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from edge.agent_options import AgentOptions
from ringtune.errors import CapacityError, DataError, ModelError, RingTuneError, StorageError, UsageError
from ringtune.files.durable import make_folder
from ringtune.machine.memory import OWN_LIBRARY_BYTES, MemoryLimit, memory_limits
from ringtune.models.consistency import check_files
from ringtune.models.folder import base_tensors, read_config
from ringtune.quantities import format_bytes

_TORCH_S = 120.0
_HAS_CUDA = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"


def check_start(options: AgentOptions) -> None:
    """Refuse rows, model, folder, memory and device that can't be used.

    Raises:
        CapacityError: the memory limit of this process is below what the libraries take.
        DataError: a file of rows is not there.
        ModelError: ``--model`` is no folder of a model that can be sliced.
        StorageError: ``--state`` can't be written.
        UsageError: ``--device cuda``, where torch sees no such device.
    """
    check_rows(options)
    check_memory(memory_limits())
    if options.model is not None:
        check_model(options.model)
    if options.state is not None:
        check_state(options.state)
    if options.device == "cuda":
        check_cuda()


def check_memory(limits: Iterable[MemoryLimit]) -> None:
    """Refuse a memory limit below what the libraries take: the kernel would kill the node while it loads them.

    Args:
        limits: of the control groups of this process.

    Raises:
        CapacityError: names both figures.
    """
    least = min((limit.limit_bytes for limit in limits), default=OWN_LIBRARY_BYTES)
    if least < OWN_LIBRARY_BYTES:
        raise CapacityError(
            f"the memory limit here (control group) is {format_bytes(least)}, a node's libraries alone need "
            f"{format_bytes(OWN_LIBRARY_BYTES)}, and a run more; raise the limit"
        )


def check_rows(options: AgentOptions) -> None:
    """Refuse files of rows that are missing.

    Raises:
        DataError: a file of rows is not there.
    """
    for option, rows in (("--data", options.data), ("--eval-data", options.eval_data)):
        if rows is not None and not rows.exists():
            raise DataError(f"{option} {rows} is not there; correct the path")


def check_model(folder: Path) -> None:
    """Refuse a folder that has no model of a known family; of weights only the headers are read.

    Raises:
        ModelError: says what is wrong with it.
    """
    if not folder.is_dir():
        raise ModelError(f"--model {folder} is not there; give the folder with config.json and the weights")
    try:
        config = read_config(folder)
        base_tensors(folder, config)
        check_files(folder, config)
    except RingTuneError as error:
        raise ModelError(f"--model {folder} can't be used: {error}; 'ringtune doctor --model DIR' checks it") from error


def check_state(folder: Path) -> None:
    """Make the folder for shards, and write something there.

    Raises:
        StorageError: it can't be made or written.
    """
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"ringtune")
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"--state {folder} can't be written: {reason}; give a folder of this user") from error


def check_cuda(sees_cuda: Callable[[], bool] | None = None) -> None:
    """Refuse ``--device cuda`` where torch sees none; another process asks, as loading torch takes memory for good.

    Raises:
        UsageError: there is none, or torch was built without CUDA.
    """
    if not (sees_cuda or _torch_sees_cuda)():
        raise UsageError("--device cuda, but torch sees no such device here; use --device cpu, or auto")


def _torch_sees_cuda() -> bool:
    command = [sys.executable, "-c", _HAS_CUDA]
    try:
        return subprocess.run(command, timeout=_TORCH_S, check=False).returncode == 0  # noqa: S603 - our own words
    except subprocess.TimeoutExpired:
        return False
