"""Find the folders of this process's control groups, of both versions, in which the kernel writes their limits.

Source: Linux, Documentation/admin-guide/cgroup-v1/cgroups.rst and cgroup-v2.rst.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")


def group_folders(controller: str, *, proc: Path, cgroup: Path) -> list[Path]:
    """List the folders of this process's groups and those above, innermost first.

    In a container the mount is the group.

    Args:
        controller: ``cpu`` or ``memory``.
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
    """
    groups = {cgroup: "", cgroup / controller: ""}
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            groups |= {cgroup: path, cgroup / "unified": path}
        elif controller in controllers.split(","):
            groups |= {cgroup / controller: path, cgroup / controllers: path}
    folders = []
    for mount, path in groups.items():
        group = mount / path.strip("/")
        folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return folders
