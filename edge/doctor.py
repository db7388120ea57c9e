"""The checks of ``ringtune doctor``, in the order in which they are shown; each gives one line with finding and remedy.

Checked are the machine (system, cores, memory within its control groups, disk, ports, proxies), the installed
packages, a model folder, certificates, and the coordinator's answer. Nothing is started; packages are looked up and
not imported, except torch where there is a CUDA device; of weights only headers are read.
"""

from __future__ import annotations

import enum
import functools
import os
import platform
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import grpc
from packaging.requirements import Requirement

from edge.machine.resources import has_cuda_device, memory_budget
from edge.options import default_name, default_state
from ringtune import __version__
from ringtune.costs.memory_sizes import CONTEXT_BYTES
from ringtune.errors import ConnectionFailedError, RingTuneError, TrustError, UsageError
from ringtune.machine.resources import CGROUP, LIBRARY_BYTES, PROC, memory_limits, usable_cores
from ringtune.models.folder import base_tensors, check_files, classes_of_head, model_dimensions, read_config
from ringtune.models.gguf import folder_of_gguf
from ringtune.quantities import format_bytes, format_seconds
from ringtune.transport.channels import open_channel
from ringtune.transport.credentials import process_credentials, refuse_both, use_credentials, use_credentials_from
from ringtune.transport.endpoints import PROXY_VARIABLES, is_compatible, require_private, split_address
from ringtune.transport.enrollment import coordinator_problem
from ringtune.transport.identity import facts_of, has_identity, is_issued_by, utc
from ringtune.transport.parties import COORDINATOR, coordinator_trust, find_user_trust, node_trust
from ringtune.transport.status import error_of_call
from ringtune.transport.tls import certificate_at, handshake_problem
from ringtune.v1 import control_pb2, control_pb2_grpc

_EXTRAS = {"node": ("node",), "coordinator": ()}
_BINDS = {"node": "127.0.0.1:0", "coordinator": "127.0.0.1:7070"}


def examine(
    role: str, *, model: Path | None, coordinator: str, bind: str, disk: Path, insecure: bool, trust: Path | None = None
) -> list[Check]:
    """Check this machine, and on request a model folder and a coordinator.

    Args:
        role: ``node`` or ``coordinator``; a coordinator needs no torch.
        model: a model folder to check; None = none.
        coordinator: ``host:port`` to ask; empty = none.
        bind: ``host:port`` to try; empty = the role's default.
        disk: folder on the disk to check.
        insecure: whether ``coordinator`` may be another machine, without encryption.
        trust: folder of this machine's identity; None = where the role or this user has it, if at all.

    Raises:
        UsageError: an option makes no sense.
    """
    if role not in _EXTRAS:
        raise UsageError(f"--role {role!r} is not one of {', '.join(_EXTRAS)}")
    refuse_both(trust, insecure=insecure)

    checks = [
        passed("ringtune", __version__),
        check_system(),
        check_python(),
        *check_packages(requirements(), _EXTRAS[role]),
        check_protobuf(),
        passed("cores", f"{usable_cores()} of {os.cpu_count() or 1} usable"),  # by affinity and quota
        check_memory(),
        *([check_device()] if role == "node" else []),
        check_disk(disk.resolve()),
        check_port(bind or _BINDS[role]),
        check_proxies(os.environ),
        check_own(role, trust, insecure=insecure),
    ]
    if model is not None:
        checks += check_model(model)
    if coordinator:
        require_private(coordinator, option="--coordinator", insecure=insecure)
        checks += [*check_other(coordinator), *check_coordinator(coordinator)]
    return checks


class Level(enum.StrEnum):
    """How bad the finding of a check is."""

    PASS = "PASS"  # noqa: S105 - no password
    WARN = "WARN"  # it works, with a drawback
    FAIL = "FAIL"  # it will not work


@dataclass(frozen=True, slots=True)
class Check:
    """The finding of one check."""

    level: Level
    name: str
    found: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the check as a JSON object."""
        return {"name": self.name, "level": self.level.value, "found": self.found, "remedy": self.remedy}

    def line(self, width: int) -> str:
        """Write the check as a line; its name is padded to ``width``."""
        advice = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.level}  {self.name:<{width}}  {self.found}{advice}"


passed = functools.partial(Check, Level.PASS)
warned = functools.partial(Check, Level.WARN)
failed = functools.partial(Check, Level.FAIL)


def all_lines(checks: Iterable[Check]) -> list[str]:
    """Write a line for each check, aligned."""
    checks = list(checks)
    width = max((len(check.name) for check in checks), default=0)
    return [check.line(width) for check in checks]


_LITTLE_MEMORY_BYTES = 256 << 20
_NO_MEMORY_BYTES = 32 << 20
_LITTLE_DISK_BYTES = 1 << 30
_NO_DISK_BYTES = 100 << 20
_SYNC_BYTES = 1 << 20
_SLOW_SYNC_S = 1.0
_OLDEST_PYTHON = (3, 11)


def check_system(*, pointer_bytes: int | None = None) -> Check:
    """Check for a 64-bit system, and warn if it is not Linux."""
    bits = 8 * (pointer_bytes or struct.calcsize("P"))
    system = f"{platform.system()} {platform.machine()}, {bits} bit"
    if bits < 64:
        return failed("system", system, "install a 64-bit system; there is no torch for 32 bit")
    if sys.platform != "linux":
        return warned("system", system, "only Linux is tested")
    return passed("system", system)


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Check:
    """Check that Python is 3.11 or newer."""
    version_text = ".".join(str(part) for part in version)
    if version[:2] < _OLDEST_PYTHON:
        return failed("python", version_text, "use Python 3.11 or newer")
    return passed("python", version_text)


def check_memory(*, proc: Path = PROC, cgroup: Path = CGROUP) -> Check:
    """Check the memory that a run may use, below the limits of this process's control groups (version 1 and 2)."""
    budget_bytes = memory_budget(proc=proc, cgroup=cgroup)
    limits = memory_limits(proc=proc, cgroup=cgroup)
    version = 2 if (cgroup / "cgroup.controllers").exists() else 1
    memory = f"{format_bytes(budget_bytes)} for a run beside {format_bytes(LIBRARY_BYTES)} for the libraries"
    if limits:
        tightest = min(limits, key=lambda limit: limit.free_bytes)
        memory += f"; control group v{version} allows {format_bytes(tightest.limit_bytes)}"
    if budget_bytes < _NO_MEMORY_BYTES:
        return failed("memory", memory, "end other programs, or raise the container's limit")
    if budget_bytes < _LITTLE_MEMORY_BYTES:
        return warned("memory", memory, "a small slice fits; 'ringtune plan' says which")
    return passed("memory", memory)


def check_device(*, dev: Path = Path("/dev")) -> Check:
    """Name the accelerator that a node computes on, with its memory; without one it is the processor.

    Torch is loaded only where there is a device of NVIDIA's.
    """
    if not has_cuda_device(dev=dev):
        return passed("device", "cpu, no CUDA device here")
    try:
        import torch
    except ImportError:
        return warned("device", "a CUDA device is here, but no torch", "install the extra node")
    if not torch.cuda.is_available():
        device = f"a CUDA device is here, but torch {torch.__version__} sees none, so that nodes compute on the CPU"
        return warned("device", device, "install the driver, and a torch that was built for CUDA")
    from edge.machine.accelerator import device_memory, multiplies_bfloat16_fast, numerics_of

    memory = device_memory("cuda")
    assert memory is not None  # noqa: S101 - for the type checker
    free = memory.free + CONTEXT_BYTES  # this process has a context too
    bfloat16 = "multiplies bfloat16 fast" if multiplies_bfloat16_fast("cuda") else "bfloat16 is not fast"
    device = f"{numerics_of('cuda')}, {format_bytes(free)} of {format_bytes(memory.total)} free, {bfloat16}"
    if free < CONTEXT_BYTES + _LITTLE_MEMORY_BYTES:
        needs = f"end what uses it (a node takes {format_bytes(CONTEXT_BYTES)} before its slice), or use --device cpu"
        return warned("device", device, needs)
    return passed("device", device)


def check_disk(folder: Path) -> Check:
    """Check the room in a folder, and the seconds until a megabyte is safe on its disk."""
    name = "disk"
    try:
        free_bytes = shutil.disk_usage(folder).free
        sync_s = _sync_s(folder)
    except OSError as error:
        return failed(name, f"can't write to {folder}: {error.strerror}", "choose another folder with --disk")
    space = f"{format_bytes(free_bytes)} free in {folder}, 1 MiB is safe after {format_seconds(sync_s)}"
    if free_bytes < _NO_DISK_BYTES:
        return failed(name, space, "make room")
    if free_bytes < _LITTLE_DISK_BYTES:
        return warned(name, space, "make room for models and checkpoints")
    if sync_s > _SLOW_SYNC_S:
        return warned(name, space, "checkpoints will be slow; use a faster medium")
    return passed(name, space)


def _sync_s(folder: Path) -> float:
    with tempfile.TemporaryFile(dir=folder) as file:
        start_s = time.perf_counter()
        file.write(bytes(_SYNC_BYTES))
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - start_s


def check_proxies(environment: Mapping[str, str]) -> Check:
    """Name the variables that set a proxy: what is fetched from a hub goes through it, calls between nodes do not.

    Their values, which may have a password, are not shown.
    """
    names = {name for known in PROXY_VARIABLES for name in (known, known.upper()) if environment.get(name)}
    if not names:
        return passed("proxy", "none set")
    return passed(
        "proxy", f"{', '.join(sorted(names))}: for fetching models from a hub only; nodes are called directly"
    )


def check_port(address: str) -> Check:
    """Check that ``host:port`` can be bound; port 0 stands for any."""
    host, port = split_address(address, option="--bind")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            return failed("port", f"{address}: {error.strerror}", "end what listens there, or choose another --bind")
    return passed("port", f"{address} can be bound")


DISTRIBUTION = "ringtune"

VersionLookup = Callable[[str], str | None]


def requirements() -> tuple[Requirement, ...]:
    """List the requirements of the installed distribution; empty in a checkout that is not installed."""
    try:
        return tuple(map(Requirement, metadata.requires(DISTRIBUTION) or ()))
    except metadata.PackageNotFoundError:
        return ()


def installed(name: str) -> str | None:
    """Find the version of an installed package; None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(
    needs: Sequence[Requirement], extras: Sequence[str], *, find: VersionLookup = installed
) -> list[Check]:
    """Check each package that is needed with these extras, a line each.

    ``extras`` are besides the packages that are always needed; ``find`` returns the version of a package by name.
    """
    if not needs:
        return [warned("packages", "ringtune is not installed here, only run", "pip install it to check versions")]
    return [_check(need, find(need.name)) for extra in ("", *extras) for need in needs if _is_of(extra, need)]


def _is_of(extra: str, need: Requirement) -> bool:
    """Whether a package is needed because of this extra; the empty one stands for no extra."""
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        return not extra
    return need.marker.evaluate({"extra": extra})


def _check(need: Requirement, version: str | None) -> Check:
    remedy = f"pip install '{need.name}{need.specifier}'"
    if version is None:
        return failed(need.name, "not installed", remedy)
    if not need.specifier.contains(version, prereleases=True):
        return failed(need.name, f"{version}, tested is {need.specifier}", remedy)
    return passed(need.name, version)


def check_protobuf() -> Check:
    """Check that protobuf reads messages with compiled code."""
    from google.protobuf.internal import api_implementation

    kind = str(api_implementation.Type())
    if kind == "python":
        return warned("protobuf code", "pure Python, many times slower", "install a wheel of protobuf for this system")
    return passed("protobuf code", kind)


_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
_IMAGES = ("preprocessor_config.json",)


def check_model(folder: Path) -> list[Check]:
    """Check config, weights and tokenizer of a model folder, a line each; of weights only headers are read."""
    try:
        folder = folder_of_gguf(folder)
        config = read_config(folder)
    except RingTuneError as error:
        return [failed("model config", str(error), "copy the folder again, or choose another model")]
    dimensions = model_dimensions(config)
    blocks = f"{dimensions.num_blocks} blocks of width {dimensions.hidden}"
    checks = [passed("model config", f"{config['model_type']}, {blocks}")]
    try:
        tensors = base_tensors(folder, config)
        total_bytes = sum(stored.info.nbytes for stored in tensors.values())
        checks.append(passed("model weights", f"{len(tensors)} tensors, {format_bytes(total_bytes)}"))
        if classes := classes_of_head(folder):
            checks.append(passed("model classifier", f"{classes} classes; a run trains a new one for its rows"))
    except RingTuneError as error:
        checks.append(failed("model weights", str(error), "copy the folder again; all nodes need the same files"))
    try:
        check_files(folder, config)
    except RingTuneError as error:
        return [*checks, failed("model files", str(error), "copy or save the whole folder again")]
    return [*checks, _tokenizer(folder, has_tokens=dimensions.vocab > 0)]


def _tokenizer(folder: Path, *, has_tokens: bool) -> Check:
    names = _TOKENIZERS if has_tokens else _IMAGES
    present = [name for name in names if (folder / name).is_file()]
    if present:
        return passed("model tokenizer" if has_tokens else "model images", ", ".join(present))
    missing = "a tokenizer" if has_tokens else names[0]
    return warned("model files", f"{folder} has not {missing}", "owners of data need it: copy the whole folder")


_NAME, _ITS_NAME = "certificate", "its certificate"
_REMEDY = "join with a new token of the coordinator, or correct --trust"


def check_own(role: str, trust: Path | None, *, insecure: bool) -> Check:
    """Check the identity of this machine, and speak with it from now on.

    ``trust`` is its folder; None = where the role or this user has it, if at all.
    """
    use_credentials(None)
    try:
        folder = None if insecure else trust or _found(role)
        if folder is None:
            return passed(_NAME, "none: plain text, on this machine or with --insecure")
        facts = use_credentials_from(folder).identity.facts
    except TrustError as error:
        return failed(_NAME, str(error), _REMEDY)
    certificate = f"{facts.party}, until {utc(facts.ends_unix_s)}"
    if time.time() > facts.renew_at_unix_s:
        late = f"it should have been renewed on {utc(facts.renew_at_unix_s)}"
        return warned(_NAME, f"{certificate}; {late}", "let the node run, or a command, while the coordinator runs")
    return passed(_NAME, certificate)


def _found(role: str) -> Path | None:
    """Find the folder of the identity that this machine would use for its role."""
    trust = coordinator_trust() if role == "coordinator" else node_trust(default_state(default_name()))
    return trust if has_identity(trust) else find_user_trust()


def check_other(address: str) -> list[Check]:
    """Check the certificate that a coordinator shows: chain, dates and name; nothing in plain text."""
    who = process_credentials()
    if who is None:
        return []
    try:
        pem = certificate_at(address)
    except ConnectionFailedError as error:
        return [failed(_ITS_NAME, str(error), "correct address and trust folders")]
    problem = (
        coordinator_problem(pem, time.time())
        if any(is_issued_by(pem, authority) for authority in who.identity.authorities)
        else f"is of another authority than {who.identity.party}'s"
    )
    if problem:
        return [failed(_ITS_NAME, f"the certificate of {address} {problem}", "set the clocks, or " + _REMEDY)]
    return [passed(_ITS_NAME, f"of the same authority, until {utc(facts_of(pem).ends_unix_s)}")]


_CALL_S = 5.0
_WHY_S = 5.0
_NUM_CALLS = 3
_MUCH_SKEW_S = 1.0


class Answer(NamedTuple):
    """A coordinator's answer: its version, the seconds that its clock is ahead, and those that the answer took.

    ``rotation`` is that of its authority; None = none is under way.
    """

    version: str
    skew_s: float
    round_trip_s: float
    rotation: control_pb2.RotationStatus | None = None


def check_coordinator(address: str) -> list[Check]:
    """Check connection, version and clock of a coordinator, a line each."""
    channel = open_channel(address, peer=COORDINATOR)
    stub = control_pb2_grpc.CoordinatorStub(channel)
    try:
        answers = [_ask(stub) for _ in range(_NUM_CALLS)]
    except grpc.RpcError as error:
        failure = _failure(stub) or error
        status = failure.code().name if isinstance(failure, grpc.Call) else type(failure).__name__
        why = handshake_problem(str(error_of_call(failure, peer=address)), address, COORDINATOR)
        if why:
            return [failed("coordinator", f"{address} can't be talked to ({status})", why)]
        remedy = "start it with 'ringtune coordinator', check address, firewall and the Wi-Fi's client isolation"
        if process_credentials() is not None:
            remedy += "; it may refuse this certificate: run 'ringtune doctor' there, as its clock may be wrong"
        return [failed("coordinator", f"{address} does not answer ({status})", remedy)]
    finally:
        channel.close()
    return judge(address, min(answers, key=lambda answer: answer.round_trip_s))


def _failure(stub: control_pb2_grpc.CoordinatorStub) -> grpc.RpcError | None:
    """The failure of a call that does not wait for a connection, which says why there is none."""
    try:
        stub.Status(control_pb2.Empty(), timeout=_WHY_S)
    except grpc.RpcError as error:
        return error
    return None


def _ask(stub: control_pb2_grpc.CoordinatorStub) -> Answer:
    start_s, start_unix_s = time.perf_counter(), time.time()
    reply = stub.Status(control_pb2.Empty(), timeout=_CALL_S, wait_for_ready=True)
    took_s = time.perf_counter() - start_s
    rotation = reply.rotation if reply.HasField("rotation") else None
    return Answer(reply.version, reply.now_unix_s - (start_unix_s + took_s / 2), took_s, rotation)


def judge(address: str, answer: Answer) -> list[Check]:
    """Judge a coordinator's answer: same version, a clock within a second and half the round trip, its authority."""
    reached = passed("coordinator", f"{address} answers in {format_seconds(answer.round_trip_s)}")
    versions = f"{answer.version}, here {__version__}"
    version = (
        passed("its version", answer.version)
        if is_compatible(answer.version)
        else failed("its version", versions, "install the same version on both; it takes no others")
    )
    uncertain_s = answer.round_trip_s / 2
    ahead = "ahead" if answer.skew_s > 0 else "behind"
    skew = f"{abs(answer.skew_s):.3f} s {ahead} of this one, give or take {uncertain_s:.3f} s"
    clock = (
        passed("its clock", skew)
        if abs(answer.skew_s) <= _MUCH_SKEW_S + uncertain_s
        else warned("its clock", skew, "set the time of both (timedatectl); the dates in their logs differ")
    )
    return [reached, version, clock, *([_judge_rotation(answer.rotation)] if answer.rotation is not None else [])]


def _judge_rotation(rotation: control_pb2.RotationStatus) -> Check:
    name = "its authority"
    progress = (
        f"{rotation.old_sha256[:_FINGERPRINT]} is replaced by {rotation.new_sha256[:_FINGERPRINT]} "
        f"({rotation.phase}) until {utc(rotation.ends_unix_s)} at most"
    )
    if not rotation.waiting:
        return passed(name, f"{progress}; everybody has a certificate of the new one")
    late = f"{progress}; {rotation.waiting} nodes, users or tokens need the old one"
    return warned(name, late, "let them call before; 'ringtune coordinator rotate --status' names them")


_FINGERPRINT = 16
