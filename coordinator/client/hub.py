"""Models of a hub: ``python -m coordinator.client.hub OWNER/NAME REVISION CACHE`` fetches one into a cache.

It is a process of its own, so that a network that hangs has a time limit. Only configuration, safetensors and tokenizer
are fetched: no pickled weights, no code. huggingface_hub finds the hub and the user's token; names are checked before
they become paths, and each file against the digest of the hub's listing::

    CACHE/models--OWNER--NAME/fetching/COMMIT/NAME.part   grows; gets its name when size and digest are right
    CACHE/models--OWNER--NAME/snapshots/COMMIT/           gets its name when all files are there
    CACHE/models--OWNER--NAME/refs/REVISION               the commit, written last

A later fetch uses the whole files of an interrupted one.

Source: the documentation of huggingface_hub, "Understand caching"; git-hash-object(1) for small files.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from platformdirs import user_cache_path

from coordinator.screen.progress import WaitNotice
from ringtune.errors import ConnectionFailedError, DeadlineError, IntegrityError, RingTuneError, UsageError
from ringtune.hints import hint_to_install
from ringtune.job.job import Job
from ringtune.models.folder import COMMIT, HubId, cached_folder, hub_id, near_folder, place_of
from ringtune.models.gguf import folder_of_gguf
from ringtune.models.tokenizer import is_template_file
from ringtune.storage.durable import FileLock, make_folder, rename_durably, storage_errors, write_durably
from ringtune.texts import printable

FETCH_S: Final = 1800.0
"""Time limit of a fetch of a model."""

_SHOWN = 600

Fetch = Callable[[HubId, Path], str]
"""Fetches a model into a cache; returns the reason of a failure, empty after success."""


def hub_cache(environment: Mapping[str, str]) -> Path:
    """The folder of the Hugging Face cache, from environment variables as its library finds it."""
    if direct := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(direct).expanduser()
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def with_local_model(job: Job) -> Job:
    """Replace an id of a hub in ``model.path`` by the folder in a cache, after a fetch if need be.

    Raises ``ConnectionFailedError``: see ``model_folder``.
    """
    folder = model_folder(job.model.path)
    return job if str(folder) == job.model.path else job.with_overrides({"model.path": str(folder)})


def model_folder(
    path: str, *, cache: Path | None = None, target: Path | None = None, fetch: Fetch | None = None
) -> Path:
    """Find the folder of a model; an existing path is preferred, and a cached model needs no network.

    Of a GGUF file it is a folder in the cache of this user, with a link to the file.

    Args:
        path: of a folder, or an id of a hub.
        cache: the Hugging Face cache, which is only read; None = that of this user.
        target: our own cache, the target of a fetch; None = that of this user.
        fetch: called where both caches lack the model; None = with huggingface_hub.

    Raises:
        ConnectionFailedError: the caches lack it, and it can't be fetched.
        ModelError, IntegrityError: a GGUF file that can't be trained.
    """
    hub_model = hub_id(path)
    if hub_model is None or Path(path).exists():
        return folder_of_gguf(Path(path))
    cache = cache or hub_cache(os.environ)
    target = target or user_cache_path("ringtune") / "hub"
    folder = cached_folder(hub_model, cache) or cached_folder(hub_model, target)
    problem = "" if folder else (fetch or _fetch_in_process)(hub_model, target)
    folder = folder or cached_folder(hub_model, target)
    if folder is None:
        problem = problem or "the hub has no config.json and .safetensors of it"
        near = near_folder(Path(path))
        revision = f" --revision {hub_model.revision}" if str(hub_model) != hub_model.repository else ""
        raise ConnectionFailedError(
            f"model.path = '{hub_model}' is no folder here{near}, the Hugging Face cache {cache} lacks it, and it "
            f"can't be fetched ({problem}); where there is a network: hf download {hub_model.repository}"
            f"{revision}, or name a folder"
        )
    return folder.absolute()


def _fetch_in_process(hub_model: HubId, cache: Path) -> str:
    command = [
        sys.executable,
        "-P",
        "-m",
        "coordinator.client.hub",
        hub_model.repository,
        hub_model.revision,
        str(cache),
    ]
    try:
        with WaitNotice(f"fetching the model {hub_model} from its hub into {cache}"):
            done = subprocess.run(  # noqa: S603 - our own module
                command, capture_output=True, text=True, timeout=FETCH_S, check=False, stdin=subprocess.DEVNULL
            )
    except subprocess.TimeoutExpired:
        return f"it is not there after {FETCH_S:g} s"
    lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    return printable(lines[-1], most=_SHOWN) if done.returncode else ""


FILES: Final = (
    *("config.json", "generation_config.json", "preprocessor_config.json"),
    *("model.safetensors", "model.safetensors.index.json", "model-*.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "chat_template.jinja",
    *("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model"),
)
"""Patterns of the files that are fetched."""

ANSWER_S: Final = 20.0
"""Time limit for an answer, and for the next bytes of a file."""
WINDOW_S: Final = 60.0
MIN_BYTES: Final = 64 << 10
"""Fewer bytes within ``WINDOW_S`` are no progress."""

_CHUNK_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA1: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")

Get = Callable[[str], AbstractContextManager[Iterable[bytes]]]
"""Opens a file of the commit by its name; yields pieces."""


@dataclass(frozen=True, slots=True)
class HubFile:
    r"""A file in the hub's listing.

    Attributes:
        digest: SHA-256 of a large file; of a small one the git blob id, SHA-1 of ``blob <size>\0`` and the content.
    """

    name: str
    size_bytes: int
    digest: str

    def hasher(self) -> Any:
        """A hash object for the digest, without the file's bytes yet."""
        if _SHA256.fullmatch(self.digest):
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size_bytes, usedforsecurity=False)

    def is_at(self, path: Path) -> bool:
        """Whether the file is at a path, with size and digest."""
        if not path.is_file() or path.stat().st_size != self.size_bytes:
            return False
        hasher = self.hasher()
        with path.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                hasher.update(data)
        return bool(hasher.hexdigest() == self.digest)


def wanted_files(siblings: Iterable[Any]) -> tuple[HubFile, ...]:
    """Choose the files to fetch from a hub's listing; unknown names and all folders but of templates are ignored.

    Raises ``IntegrityError``: a chosen file has no size or digest.
    """
    hub_files = []
    for entry in siblings:
        name = entry.rfilename
        is_known = _NAME.fullmatch(name) and any(fnmatch.fnmatchcase(name, pattern) for pattern in FILES)
        if not (is_known or is_template_file(name)):
            continue
        digest = str(entry.lfs.sha256 if entry.lfs else entry.blob_id)
        kind = _SHA256 if entry.lfs else _SHA1
        if not isinstance(entry.size, int) or entry.size < 0 or not kind.fullmatch(digest):
            raise IntegrityError(f"the hub tells no size and digest of {name}; name a folder that has the model")
        hub_files.append(HubFile(name, entry.size, digest))
    return tuple(sorted(hub_files, key=lambda file: file.name))


def store(hub_model: HubId, commit: str, files: Sequence[HubFile], cache: Path, get: Get) -> Path:
    """Fetch files into the cache; return the folder of the snapshot.

    Raises:
        IntegrityError: the commit is no commit id, or a file has another size or digest.
        DeadlineError: a file arrived too slowly.
        BusyError: another process fetches the model.
    """
    if not COMMIT.fullmatch(commit) or (COMMIT.fullmatch(hub_model.revision) and commit != hub_model.revision):
        raise IntegrityError(f"the hub answers with commit {commit[:60]!r} for {hub_model}")
    place = place_of(hub_model, cache)
    folder, coming = place / "snapshots" / commit, place / "fetching" / commit
    _make_folders(coming, files)
    busy = f"{{holder}} fetches {hub_model} into {place}; wait for its end"
    with FileLock(place / "lock", busy=busy):
        for file in files:
            if not file.is_at(folder / file.name) and not file.is_at(coming / file.name):
                _fetch(file, coming / file.name, get)
        _make_folders(folder, files)
        for file in files:
            if not file.is_at(folder / file.name):
                rename_durably(coming / file.name, folder / file.name)
        write_durably(place / "refs" / hub_model.revision, commit.encode())
        with contextlib.suppress(OSError):
            for part in sorted({coming, *((coming / file.name).parent for file in files)}, reverse=True):
                part.rmdir()
    return folder


def _make_folders(folder: Path, files: Sequence[HubFile]) -> None:
    with storage_errors(folder):
        for part in {folder, *((folder / file.name).parent for file in files)}:
            make_folder(part)


def _fetch(file: HubFile, path: Path, get: Get) -> None:
    part, digest, size_bytes = path.with_name(f"{path.name}.part"), file.hasher(), 0
    with get(file.name) as pieces, storage_errors(path), part.open("wb") as sink:
        for piece in _hurried(pieces, file.name):
            size_bytes += len(piece)
            if size_bytes > file.size_bytes:
                break
            digest.update(piece)
            sink.write(piece)
    if size_bytes != file.size_bytes or digest.hexdigest() != file.digest:
        received = f"{'more than ' * (size_bytes > file.size_bytes)}{min(size_bytes, file.size_bytes):,}"
        raise IntegrityError(
            f"{file.name} arrived with {received} bytes and another digest than in the hub's listing "
            f"({file.size_bytes:,} bytes); nothing of it is used, try again"
        )
    rename_durably(part, path)


def _hurried(pieces: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Pass pieces on while enough bytes arrive."""
    began_s, arrived = time.monotonic(), 0
    for piece in pieces:
        arrived += len(piece)
        if time.monotonic() - began_s > WINDOW_S:
            if arrived < MIN_BYTES:
                raise DeadlineError(
                    f"{name}: {arrived:,} bytes arrived in {WINDOW_S:g} s, which is too slow; try again"
                )
            began_s, arrived = time.monotonic(), 0
        yield piece


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch one model; return the exit code."""
    repository, revision, cache = sys.argv[1:] if arguments is None else arguments
    try:
        _fetch_from_hub(repository, revision, Path(cache))
    except Exception as error:  # of the network, the hub and the disk alike; the last line is shown
        sys.stderr.write(f"{_told(error, repository, revision)}\n")
        return 1
    return 0


_CAUSES: Final = {
    "Timeout": f"the hub {{hub}} did not answer within {ANSWER_S:g} s; try again, or set HF_ENDPOINT to another one",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE forbids to ask the hub {hub}; unset it",
    "GatedRepo": "the hub {hub} gives {model} to who agreed to its terms; agree on its page, and hf auth login",
    "RepositoryNotFound": "the hub {hub} has no {model} for you; correct the name, or hf auth login if it is private",
    "RevisionNotFound": "{model} has no revision {revision} on the hub {hub}; name a branch, a tag or a commit after @",
    **dict.fromkeys(
        ("ConnectionError", "ConnectError"),  # of requests, and of httpx
        "the hub {hub} can't be reached; check network and HTTPS_PROXY, or set HF_ENDPOINT to another one",
    ),
}
"""Part of the name of an exception of huggingface_hub or its libraries -> text with the remedy; the first counts."""


_REFUSED: Final = (401, 403)


def _told(error: Exception, repository: str, revision: str) -> str:
    """Describe an error in a line, with the hub, the model and the remedy where its cause is known."""
    if isinstance(error, RingTuneError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed; {hint_to_install('node')}"
    hub = importlib.import_module("huggingface_hub.constants").ENDPOINT
    causes = [cause for cause in (error, error.__cause__, error.__context__) if cause is not None]
    kinds = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    for name, text in _CAUSES.items():
        if any(name in kind for kind in kinds):
            return text.format(hub=hub, model=repository, revision=revision)
    statuses = (getattr(getattr(cause, "response", None), "status_code", None) for cause in causes)
    status = next(filter(None, statuses), None)
    if status in _REFUSED:
        return (
            f"the hub {hub} refuses access to {repository} ({status}): agree to its licence on its page, and hf auth "
            "login with a token that may read it, or correct HF_TOKEN"
        )
    if status:
        return f"the hub {hub} answers {status} for {repository}; try again later, or set HF_ENDPOINT to another one"
    return f"{type(error).__name__}: {' '.join(str(error).split()) or type(error).__name__}"


def _fetch_from_hub(repository: str, revision: str, cache: Path) -> None:
    library: Any = importlib.import_module("huggingface_hub")
    hub_model = hub_id(f"{repository}@{revision}")
    if hub_model is None:
        raise UsageError(f"{repository}@{revision} is no OWNER/NAME@REVISION")
    info = library.HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=ANSWER_S)
    commit = str(info.sha)

    @contextlib.contextmanager
    def get(name: str) -> Iterator[Iterable[bytes]]:
        url = library.hf_hub_url(repository, name, revision=commit)
        headers = library.utils.build_hf_headers() | {"Accept-Encoding": "identity"}
        with library.utils.get_session().get(url, headers=headers, stream=True, timeout=ANSWER_S) as answer:
            answer.raise_for_status()
            yield answer.iter_content(MIN_BYTES)

    store(hub_model, commit, wanted_files(info.siblings or ()), cache, get)


if __name__ == "__main__":
    sys.exit(main())
