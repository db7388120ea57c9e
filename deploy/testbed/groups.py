"""Control groups of the boards: a quota of processor time and a memory limit, in version 1 or 2.

``NAME`` is the testbed's group, ``NAME/board-B`` that of a board, ``NAME/hub`` that of everything on the hub. The
testbed's group has the greatest weight there is: a board gets its quota also when other work fills the machine.
(With the usual weight the whole testbed counts as one process: on two cores with three busy processes
a board of 0.5 cores got 0.13.) What a board can't use of one period, because others hold the processor just then, it
may use in the next one, where the kernel has that (5.14): otherwise shares fall short by some 4 % on a busy machine.

Source: Linux, Documentation/admin-guide/cgroup-v1/{cpuacct,memory}.rst, cgroup-v2.rst, scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.testbed.boards import Board, Layout
from ringtune.errors import DeadlineError, RingTuneError

_POLL_S = 0.02
_HEAVIEST = {1: ("cpu.shares", "262144"), 2: ("cpu.weight", "10000")}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMounts:
    """Where the control groups are.

    Attributes:
        cpu: folder of the controller.
        memory: folder of the controller; the same in version 2.
    """

    version: int
    cpu: Path
    memory: Path

    def folders(self, *parts: str) -> tuple[Path, ...]:
        """The folders of one group: one, or one a controller."""
        return tuple(dict.fromkeys(root.joinpath(*parts) for root in (self.cpu, self.memory)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A file to write.

    Attributes:
        is_optional: whether the kernel may be without it: no swap to limit, no bursts.
    """

    path: Path
    text: str
    is_optional: bool = False


def find_mounts(mounts: str, *, controllers: str) -> GroupMounts | str:
    """Folders of the controllers ``cpu`` and ``memory``, or why there are none.

    ``mounts`` is the text of ``/proc/mounts``, ``controllers`` that of ``cgroup.controllers`` of the version 2
    mount, empty if there is none.
    """
    controller_folders: dict[str, Path] = {}
    unified: Path | None = None
    for line in mounts.splitlines():
        _, folder, kind, options, *_ = line.split(" ")
        if kind == "cgroup2" and unified is None:
            unified = Path(folder)
        elif kind == "cgroup":
            controller_folders |= {name: Path(folder) for name in ("cpu", "memory") if name in options.split(",")}
    if unified is not None and {"cpu", "memory"} <= set(controllers.split()):
        return GroupMounts(version=2, cpu=unified, memory=unified)
    if set(controller_folders) == {"cpu", "memory"}:
        return GroupMounts(version=1, cpu=controller_folders["cpu"], memory=controller_folders["memory"])
    missing = sorted({"cpu", "memory"} - set(controller_folders) - set(controllers.split()))
    return f"no control groups with {' and '.join(missing) or 'both in one version'} are mounted"


def bed_settings(mounts: GroupMounts, name: str) -> list[Setting]:
    """What the testbed's own group needs."""
    file, text = _HEAVIEST[mounts.version]
    settings = [Setting(path=mounts.cpu / name / file, text=text)]
    if mounts.version == 2:
        settings.append(Setting(path=mounts.cpu / name / "cgroup.subtree_control", text="+cpu +memory"))
    return settings


def board_settings(mounts: GroupMounts, layout: Layout, board: Board) -> list[Setting]:
    """The limits of a board."""
    memory = mounts.memory / layout.name / f"board-{board.name}"
    _, *quota = quota_settings(mounts, layout, board)
    return [*quota, *memory_settings(mounts, memory, board.memory_bytes)]


def quota_settings(mounts: GroupMounts, layout: Layout, board: Board) -> list[Setting]:
    """The quota of a board's processor time; first it has no burst, which may not be more than a lower quota."""
    cpu = mounts.cpu / layout.name / f"board-{board.name}"
    period_us = round(layout.cpu_period_s * 1e6)
    quota_us = round(period_us * board.cpu_cores)
    if mounts.version == 2:
        return [
            Setting(path=cpu / "cpu.max.burst", text="0", is_optional=True),
            Setting(path=cpu / "cpu.max", text=f"{quota_us} {period_us}"),
            Setting(path=cpu / "cpu.max.burst", text=f"{quota_us}", is_optional=True),
        ]
    return [
        Setting(path=cpu / "cpu.cfs_burst_us", text="0", is_optional=True),
        Setting(path=cpu / "cpu.cfs_period_us", text=f"{period_us}"),
        Setting(path=cpu / "cpu.cfs_quota_us", text=f"{quota_us}"),
        Setting(path=cpu / "cpu.cfs_burst_us", text=f"{quota_us}", is_optional=True),
    ]


def memory_settings(mounts: GroupMounts, folder: Path, limit_bytes: int) -> list[Setting]:
    """The memory limit of a group that has none or a higher one, without swap; reversed where it has a lower one."""
    limit = str(limit_bytes)
    if mounts.version == 2:
        return [
            Setting(path=folder / "memory.max", text=limit),
            Setting(path=folder / "memory.swap.max", text="0", is_optional=True),
        ]
    return [  # in this order: memory and swap together may never be less than memory
        Setting(path=folder / "memory.limit_in_bytes", text=limit),
        Setting(path=folder / "memory.memsw.limit_in_bytes", text=limit, is_optional=True),
    ]


def apply(settings: Iterable[Setting]) -> None:
    """Write the settings; raises ``RingTuneError``."""
    for setting in settings:
        if setting.is_optional and not setting.path.exists():
            continue
        try:
            setting.path.write_text(setting.text)
        except OSError as error:
            raise RingTuneError(f"can't write {setting.text!r} to {setting.path}: {error.strerror}") from error


def hand_down(mounts: GroupMounts) -> None:
    """Version 2: let groups below the mount have the controllers. They stay switched on; systemd has them so anyway."""
    control = mounts.cpu / "cgroup.subtree_control"
    if mounts.version == 2 and not {"cpu", "memory"} <= set(control.read_text().split()):
        apply([Setting(path=control, text="+cpu +memory")])


def times_out_of_memory(mounts: GroupMounts, *parts: str) -> int:
    """How often the kernel killed a process of this group because of its limit."""
    file = "memory.events" if mounts.version == 2 else "memory.oom_control"
    try:
        lines = mounts.memory.joinpath(*parts, file).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupUse:
    """What a group is charged with now.

    Attributes:
        all_bytes: everything, pages of files that may go included.
        kernel_bytes: that the kernel keeps for its processes: page tables, stacks, buffers of sockets.
        mapped_bytes: pages of files that some process has mapped.
    """

    all_bytes: int
    kernel_bytes: int
    mapped_bytes: int


def memory_use(mounts: GroupMounts, *parts: str) -> GroupUse:
    """What a group is charged with; pages of a file are charged to the group that read them first."""
    folder = mounts.memory.joinpath(*parts)
    counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    if mounts.version == 2:
        return GroupUse(
            all_bytes=int((folder / "memory.current").read_text()),
            kernel_bytes=int(counts.get("kernel", 0)),
            mapped_bytes=int(counts.get("file_mapped", 0)),
        )
    kernel = folder / "memory.kmem.usage_in_bytes"
    return GroupUse(
        all_bytes=int((folder / "memory.usage_in_bytes").read_text()),
        kernel_bytes=int(kernel.read_text()) if kernel.exists() else 0,
        mapped_bytes=int(counts["total_mapped_file"]),
    )


def members(folders: Iterable[Path]) -> set[int]:
    """The processes of these groups."""
    process_ids: set[int] = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            process_ids |= {int(line) for line in (folder / "cgroup.procs").read_text().split()}
    return process_ids - {0}


def kill_and_remove(folders: Sequence[Path], *, timeout_s: float) -> None:
    """End whatever runs in these groups and remove them; children stand after their parents.

    Raises:
        DeadlineError: a group does not become empty.
    """
    deadline_s = time.monotonic() + timeout_s
    for folder in reversed(folders):
        while folder.is_dir():
            for pid in members([folder]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                folder.rmdir()
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise DeadlineError(
                        f"control group {folder} is still in use after {timeout_s:g} s ({error.strerror}, processes "
                        f"{sorted(members([folder]))}); repeat 'python -m deploy.testbed clean'"
                    ) from error
                time.sleep(_POLL_S)
