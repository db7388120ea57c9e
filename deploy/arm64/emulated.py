"""An arm64 system in a folder, and how ``ringtune`` of this checkout is run on it.

The system is unpacked, not installed: no second stage, no chroot, no registered binary format. So one process is
emulated and no child of it, which is all that an agent needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
EMULATOR: Final = "qemu-aarch64-static"
TORCH: Final = "torch==2.9.1"
"""The newest torch whose arm64 wheel on the package index is without CUDA (104 MB)."""

_TOOLS: Final = (EMULATOR, "debootstrap", "dpkg-deb", "apt-get")
_PLATFORMS: Final = ("manylinux_2_28_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64")
_OF_TORCH: Final = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
_MIRROR: Final = "$(RELEASE) $(COMPONENT) $(REPO_URI)"
_CODE: Final = "import sys; sys.argv = ['ringtune', *sys.argv[1:]]; from ringtune.cli import main; main()"


class MissingTool(Exception):  # noqa: N818 - not a failure: a script skips then
    """This machine can't emulate a board; says why."""


def require_tools() -> None:
    """Refuse to begin where something is missing; raises ``MissingTool``."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if sys.platform != "linux" or "apt-get" in missing:
        raise MissingTool("this is no Debian, whose packages the board is made of")
    if missing:
        raise MissingTool(f"{', '.join(missing)} missing; apt-get install qemu-user-static debootstrap dpkg")
    if os.geteuid() != 0:
        raise MissingTool("debootstrap needs root; use sudo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """The folders of an emulated board."""

    root: Path
    site: Path

    @staticmethod
    def within(folder: Path) -> Board:
        """Name the folders of a board in ``folder``."""
        return Board(root=folder / "root", site=folder / "site")

    @property
    def python(self) -> Path:
        """The interpreter of the board, by the name that has its version."""
        return max((self.root / "usr/bin").glob("python3.[0-9]*[0-9]"))

    def make(self) -> None:
        """Fetch Debian and the packages, unless they are there; raises ``CalledProcessError``."""
        if not (self.root / "unpacked").is_file():
            shutil.rmtree(self.root, ignore_errors=True)
            self._unpack()
            (self.root / "unpacked").touch()
        if not (self.site / "fetched").is_file():
            shutil.rmtree(self.site, ignore_errors=True)
            self._fetch_packages()
            (self.site / "fetched").touch()

    def _unpack(self) -> None:
        suite, mirror = _suite_and_mirror()
        packages = "--include=python3,ca-certificates"
        call("debootstrap", "--arch=arm64", "--foreign", "--variant=minbase", packages, suite, self.root, mirror)
        for package in sorted((self.root / "var/cache/apt/archives").glob("*.deb")):
            call("dpkg-deb", "-x", package, self.root)

    def _fetch_packages(self) -> None:
        """Fetch wheels: torch by itself, because its list of needs is read as one of this machine's would be."""
        version = self.python.name.removeprefix("python")
        platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        pip += [*platforms, "--python-version", version, "--only-binary=:all:", "--target", str(self.site)]
        call(*pip, "--upgrade", "--no-deps", TORCH)
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        needed = [*project["dependencies"], *project["optional-dependencies"]["node"]]
        call(*pip, "--upgrade", *(each for each in needed if not each.startswith("torch")), *_OF_TORCH)

    def command(self, *words: object) -> list[str]:
        """Write the command that runs ``ringtune`` of this checkout on the board."""
        return [EMULATOR, "-L", str(self.root), str(self.python), "-c", _CODE, *map(str, words)]

    def environment(self) -> dict[str, str]:
        """Variables of a command of the board."""
        paths = (self.site, REPOSITORY / "proto", REPOSITORY)
        libraries = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return {**os.environ, **libraries, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def call(*words: object) -> None:
    """Run a command to its end; raises ``CalledProcessError``."""
    subprocess.run([str(word) for word in words], check=True, stdin=subprocess.DEVNULL)  # noqa: S603 - ours


def _suite_and_mirror() -> tuple[str, str]:
    """Find the Debian of this machine, and where apt fetches it from."""
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text(encoding="utf-8").splitlines() if "=" in line
    )
    suite = release.get("VERSION_CODENAME", "").strip('"')
    words = ["apt-get", "indextargets", "--format", _MIRROR, "Created-By: Packages"]
    told = subprocess.run(words, check=True, capture_output=True, text=True).stdout  # noqa: S603 - no input
    for line in told.splitlines():
        if line.startswith(f"{suite} main ") and release.get("ID") == "debian":
            return suite, line.split()[2]
    raise MissingTool(f"apt names no mirror of Debian {suite or 'of this machine'}, whose arm64 the board is made of")
