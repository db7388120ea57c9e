"""The options of ``ringtune node``, their defaults, and the checks of them before the agent joins."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from platformdirs import user_cache_path, user_state_path

from edge.checkpoint.retention import KEPT, RetentionLimits
from ringtune.errors import CapacityError, DataError, ModelError, RingTuneError, StorageError, UsageError
from ringtune.ids import check_node_name, node_name_from_host
from ringtune.machine.resources import OWN_LIBRARY_BYTES, MemoryLimit, memory_limits
from ringtune.models.folder import base_tensors, check_files, read_config
from ringtune.quantities import format_bytes
from ringtune.storage.durable import make_folder
from ringtune.transport.endpoints import (
    address_towards,
    is_loopback,
    is_wildcard,
    join_address,
    require_private,
    split_address,
    split_addresses,
)

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentOptions:
    """The options of ``ringtune node``.

    Attributes:
        coordinator: ``host:port``; several with commas, of which one answers.
        bind: ``host:port`` to serve at; port 0 = any free one; empty = where the coordinator reaches this machine.
        advertise: ``host`` or ``host:port`` where peers reach this node; empty = found out.
        data: training rows; None = the node is no owner.
        eval_data: evaluation rows; None = those of the job.
        share: which part of the rows is this node's: (index, number of parts).
        threads: compute threads; 0 = as the job says, or all cores.
        memory_bytes: budget for a run; 0 = found out.
        state: folder for this node's parts of checkpoints; None = it can't keep any.
        model: folder that replaces the job's ``model.path``; None = as the job says.
        cache: where weights are kept that this node had to fetch.
        insecure: whether to talk beyond this machine without encryption.
        watch_parent: end when the standard input ends.
        join_s: how long to try to reach the coordinator, seconds.
        trust: folder of this node's identity; None = it speaks plain text.
        is_guest: take part in nothing but the evaluation of the own rows.
        own_coordinator: the owner of the rows runs the coordinator too, so that evaluations hide no counts from it.
        device_nodes: how many nodes of this machine compute on the same device, this one among them.
        kept: how much of finished runs stays in ``state``.
        metrics: ``host:port`` for figures for Prometheus; empty = none.
        metrics_token: file with their token; None = a new one.
        rack: board or switch that the node shares with others; empty = its machine.
    """

    coordinator: str
    name: str
    bind: str = ""
    advertise: str = ""
    data: Path | None = None
    eval_data: Path | None = None
    share: tuple[int, int] = (0, 1)
    threads: int = 0
    device: str = "auto"
    memory_bytes: int = 0
    state: Path | None = None
    model: Path | None = None
    cache: Path = field(default_factory=lambda: default_cache())
    insecure: bool = False
    watch_parent: bool = False
    join_s: float = 30.0
    trust: Path | None = None
    is_guest: bool = False
    own_coordinator: bool = False
    device_nodes: int = 1
    kept: RetentionLimits = KEPT
    metrics: str = ""
    metrics_token: Path | None = None
    rack: str = ""

    def __post_init__(self) -> None:
        """Refuse options that make no sense, and addresses that leave this machine unencrypted without ``insecure``."""
        check_node_name(self.name)
        for option, address in (("--coordinator", self.coordinator), ("--bind", self.bind)):
            if address or option == "--coordinator":
                require_private(address, option=option, insecure=self.insecure)
        self._check_reachable()
        if self.device not in DEVICES:
            raise UsageError(f"--device {self.device!r} is not one of {', '.join(DEVICES)}")
        if self.device_nodes < 1:
            raise UsageError(f"--device-nodes is {self.device_nodes}, it has to be at least 1")
        if self.threads < 0:
            raise UsageError(f"--threads is {self.threads}, it has to be at least 0")
        index, count = self.share
        if not 0 <= index < count:
            raise UsageError(f"--share {index}/{count} has to be I/N with 0 <= I < N, e.g. 0/4")

    def _check_reachable(self) -> None:
        """Refuse to tell a coordinator on another machine an address that only this machine reaches."""
        told = self.advertise or self.bind
        if is_loopback(self.coordinator) or not is_loopback(told if ":" in told else f"{told}:0"):
            return
        option = "--advertise" if self.advertise else "--bind"
        raise UsageError(
            f"{option} {told} can be reached from this machine only, but the coordinator is {self.coordinator}; leave "
            f"{option} out, or give --bind 0.0.0.0:0"
        )


def default_name() -> str:
    """Make a node name from this host's name."""
    return node_name_from_host(socket.gethostname())


def default_cache() -> Path:
    """Return this user's folder for files that can be fetched again, as this system has it."""
    return user_cache_path("ringtune")


def default_state(name: str) -> Path:
    """Return the folder in which a node keeps its shards by default, as this system has it."""
    return user_state_path("ringtune") / name


def all_states() -> list[Path]:
    """Return the state folders of all nodes that this user had on this machine by default, by name."""
    return sorted(path for path in user_state_path("ringtune").glob("*") if path.is_dir())


def parse_share(text: str) -> tuple[int, int]:
    """Read ``1/4`` as the two numbers 1 and 4; raises ``UsageError``."""
    index, slash, count = text.partition("/")
    if not slash or not index.isdigit() or not count.isdigit():
        raise UsageError(f"--share {text!r} is not I/N, e.g. 0/4 for the first of four parts")
    return int(index), int(count)


def bind_address(options: AgentOptions) -> str:
    """Address to serve at: ``--bind``, else any port of this machine's address on the way to the coordinator.

    With a coordinator at 127.0.0.1 that is 127.0.0.1, with one at 10.0.0.1 it may be 10.0.0.7.

    Raises ``ConnectionFailedError``: there is no way to the coordinator.
    """
    if options.bind:
        return options.bind
    return join_address(_address_towards_coordinator(options), 0)


def _address_towards_coordinator(options: AgentOptions) -> str:
    first = split_addresses(options.coordinator, option="--coordinator")[0]
    return address_towards(*split_address(first, option="--coordinator"))


def advertised_address(options: AgentOptions, port: int) -> str:
    """Address where peers reach this node: ``--advertise``, else the host that is served with its port.

    A bind to all addresses becomes this machine's address on the way to the coordinator: ``--bind 0.0.0.0:0`` that
    got port 4000 is 10.0.0.7:4000.

    Raises ``ConnectionFailedError``: there is no way to the coordinator.
    """
    if options.advertise:
        host, colon, told = options.advertise.rpartition(":")
        return options.advertise if colon and told.isdigit() else f"{options.advertise}:{port}"
    bound = bind_address(options)
    host, _ = split_address(bound, option="--bind")
    if is_wildcard(bound):
        host = _address_towards_coordinator(options)
    return join_address(host, port)


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

    Raises ``CapacityError``: names both figures.
    """
    least = min((limit.limit_bytes for limit in limits), default=OWN_LIBRARY_BYTES)
    if least < OWN_LIBRARY_BYTES:
        raise CapacityError(
            f"the memory limit here (control group) is {format_bytes(least)}, a node's libraries alone need "
            f"{format_bytes(OWN_LIBRARY_BYTES)}, and a run more; raise the limit"
        )


def check_rows(options: AgentOptions) -> None:
    """Refuse files of rows that are missing; raises ``DataError``."""
    for option, rows in (("--data", options.data), ("--eval-data", options.eval_data)):
        if rows is not None and not rows.exists():
            raise DataError(f"{option} {rows} is not there; correct the path")


def check_model(folder: Path) -> None:
    """Refuse a folder that has no model of a known family; of weights only the headers are read.

    Raises ``ModelError``: names the problem.
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
    """Make the folder for shards, and write something there; raises ``StorageError``."""
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"ringtune")
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"--state {folder} can't be written: {reason}; give a folder of this user") from error


def check_cuda(sees_cuda: Callable[[], bool] | None = None) -> None:
    """Refuse ``--device cuda`` where torch sees none; another process asks, as loading torch takes memory for good.

    Raises ``UsageError``: there is none, or torch was built without CUDA.
    """
    if not (sees_cuda or _torch_sees_cuda)():
        raise UsageError("--device cuda, but torch sees no such device here; use --device cpu, or auto")


def _torch_sees_cuda() -> bool:
    command = [sys.executable, "-c", _HAS_CUDA]
    try:
        return subprocess.run(command, timeout=_TORCH_S, check=False).returncode == 0  # noqa: S603 - our own words
    except subprocess.TimeoutExpired:
        return False
