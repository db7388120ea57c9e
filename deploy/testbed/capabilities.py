"""What this machine can do for a testbed, found out by trying it; what it can't has its reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.testbed import groups
from deploy.testbed.boards import Layout
from deploy.testbed.groups import GroupMounts
from deploy.testbed.network import Shaper
from deploy.testbed.processes import attempt
from ringtune.errors import RingTuneError

# What automake, meson and others take for "skipped".
SKIPPED_EXIT_CODE = 77

_SCRATCH = ("unshare", "--net", "--", "sh", "-c")
_TRIALS = {
    "tbf": "tc qdisc add dev lo root tbf rate 1mbit burst 16k latency 50ms",
    "htb": "tc qdisc add dev lo root handle 1: htb && tc class add dev lo parent 1: classid 1:1 htb rate 1mbit"
    " && tc qdisc add dev lo parent 1:1 bfifo",
    "netem": "tc qdisc add dev lo root netem delay 1ms",
    "bridge": "ip link add br0 type bridge && ip link add p0 type veth peer name p1 && ip link set p0 master br0",
}


class MissingCapability(Exception):  # not a failure: a script skips then
    """This machine can't be a testbed, or not the one that is asked for; says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """One thing that a testbed uses.

    Attributes:
        reason: why it is not here; empty if it is.
    """

    name: str
    use: str
    reason: str
    is_needed: bool = True

    @property
    def is_here(self) -> bool:
        """Whether this machine has it."""
        return not self.reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """All of them.

    Attributes:
        mounts: the control groups, None without.
    """

    found: tuple[Capability, ...]
    mounts: GroupMounts | None

    def reason(self, name: str) -> str:
        """Why a capability is not here; empty if it is."""
        return next(capability.reason for capability in self.found if capability.name == name)

    @property
    def missing(self) -> list[str]:
        """Why no testbed is possible; empty if one is. Without root nothing else could be tried."""
        if self.reason("root"):
            return [f"root: {self.reason('root')}"]
        lacks = [
            f"{capability.name}: {capability.reason}"
            for capability in self.found
            if capability.is_needed and capability.reason
        ]
        if self.reason("tbf") and self.reason("htb"):
            lacks.append(f"tbf and htb: {self.reason('tbf')}")
        return lacks

    def choose(self, layout: Layout) -> tuple[GroupMounts, Shaper]:
        """What to build this layout with; raises ``MissingCapability``."""
        if self.missing or self.mounts is None:
            raise MissingCapability("; ".join(self.missing))
        late = [board.name for board in layout.boards if board.latency_s > 0]
        if late and self.reason("netem"):
            raise MissingCapability(
                f"latency_ms of {', '.join(late)} needs netem: {self.reason('netem')}; set it to 0 to go without"
            )
        return self.mounts, Shaper(rate="htb" if self.reason("tbf") else "tbf", has_delay=not self.reason("netem"))


def find_capabilities() -> Capabilities:
    """Try everything. Leaves nothing behind: the trials are in namespaces that end with their process."""
    is_root = os.geteuid() == 0
    lacks_root = "" if is_root else "the user is not root; use sudo"

    def tried(name: str) -> str:
        return lacks_root or _refusal_reason(_TRIALS[name])

    mounts = _mounts()
    in_groups = mounts if isinstance(mounts, str) else lacks_root or _why_no_group(mounts)
    version = "" if isinstance(mounts, str) else f", version {mounts.version}"
    capabilities = (
        Capability(name="root", use="to make namespaces and groups", reason=lacks_root),
        Capability(name="namespaces", use="ip netns, nsenter", reason=lacks_root or _why_no_namespace()),
        Capability(name="bridge", use="bridge and veth", reason=tried("bridge")),
        Capability(name="tbf", use="rates", reason=tried("tbf"), is_needed=False),
        Capability(name="htb", use="rates, if there is no tbf", reason=tried("htb"), is_needed=False),
        Capability(name="netem", use="latency_ms", reason=tried("netem"), is_needed=False),
        Capability(name="groups", use=f"quotas and memory limits{version}", reason=in_groups),
    )
    return Capabilities(found=capabilities, mounts=None if isinstance(mounts, str) or in_groups else mounts)


def _refusal_reason(script: str) -> str:
    done = attempt((*_SCRATCH, script))
    return "" if done.returncode == 0 else _last_words(done.stderr) or f"exit code {done.returncode}"


def _why_no_namespace() -> str:
    for tool in ("ip", "nsenter"):
        done = attempt((tool, "-V"))
        if done.returncode == 127:
            return _last_words(done.stderr)
    name = f"ringtune-probe-{os.getpid()}"
    done = attempt(("ip", "netns", "add", name))
    if done.returncode == 0:
        done = attempt(("ip", "netns", "del", name))
    return "" if done.returncode == 0 else _last_words(done.stderr)


def _mounts() -> GroupMounts | str:
    try:
        mounts = Path("/proc/mounts").read_text()
    except OSError as error:
        return f"/proc/mounts: {error.strerror}"
    of_version_2 = (line.split(" ")[1] for line in mounts.splitlines() if line.split(" ")[2] == "cgroup2")
    unified = next(map(Path, of_version_2), None)
    controllers = _text(unified / "cgroup.controllers") if unified is not None else ""
    return groups.find_mounts(mounts, controllers=controllers)


def _why_no_group(mounts: GroupMounts) -> str:
    """Make one group, look for its files, remove it."""
    name = f"ringtune-probe-{os.getpid()}"
    made: list[Path] = []
    files_of: dict[Path, tuple[str, ...]] = {mounts.cpu: ("cpu.max", "memory.max")}
    if mounts.version == 1:
        files_of = {mounts.cpu: ("cpu.cfs_quota_us",), mounts.memory: ("memory.limit_in_bytes",)}
    try:
        groups.hand_down(mounts)
        for root in files_of:
            (root / name).mkdir()
            made.append(root / name)
        lacks = [file for root, files in files_of.items() for file in files if not (root / name / file).exists()]
        return f"the kernel has no {', '.join(lacks)}" if lacks else ""
    except OSError as error:
        return f"can't make a group in {error.filename}: {error.strerror}"
    except RingTuneError as error:
        return str(error)
    finally:
        for folder in made:
            folder.rmdir()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _last_words(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].removeprefix("Error: ").rstrip(".")


def describe_capabilities(capabilities: Capabilities, *, write: Callable[[str], object]) -> bool:
    """Write a line for each capability; return whether a testbed is possible."""
    for capability in capabilities.found:
        state = "PASS" if capability.is_here else "FAIL" if capability.is_needed else "LACK"
        write(
            f"{state}  {capability.name:<10}  {capability.use}"
            + (f": {capability.reason}" if capability.reason else "")
        )
    if capabilities.missing:
        write(f"no testbed is possible here: {'; '.join(capabilities.missing)}")
    return not capabilities.missing
