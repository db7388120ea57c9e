"""Find the folder that a job's ``model.path`` stands for: a folder here, a snapshot in a cache, or one to fetch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

from coordinator.screen.waiting import Waiting
from ringtune.errors import ConnectionFailedError
from ringtune.jobs.job import Job
from ringtune.models.hub import HubId, cached_folder, hub_id

FETCH_S: Final = 1800.0
"""Most seconds that fetching a model may take."""

_SHOWN = 300

Fetch = Callable[[HubId, Path], str]
"""Fetches a model into a cache; returns why it could not, or nothing."""


def hub_cache(environment: Mapping[str, str]) -> Path:
    """The folder of the Hugging Face cache, as its library finds it.

    Args:
        environment: variables of the process.
    """
    if direct := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(direct).expanduser()
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def own_cache() -> Path:
    """The folder into which models are fetched; the library's cache is only read."""
    return user_cache_path("ringtune") / "hub"


def with_model_here(job: Job) -> Job:
    """The job whose ``model.path`` is a folder: an id of a hub is looked up in the cache, or else fetched.

    Raises:
        ConnectionFailedError: as ``model_folder``.
    """
    folder = model_folder(job.model.path)
    return job if str(folder) == job.model.path else job.with_overrides({"model.path": str(folder)})


def model_folder(path: str, *, cache: Path | None = None, own: Path | None = None, fetch: Fetch | None = None) -> Path:
    """Find the folder of a model; a path that exists wins, and no network is asked where a cache has it.

    Args:
        path: of a folder, or the id of a hub.
        cache: folder of the Hugging Face cache, which is only read; None = that of this user.
        own: folder of our own cache, into which is fetched; None = that of this user.
        fetch: fetches what both caches lack; None = with huggingface_hub.

    Raises:
        ConnectionFailedError: the cache lacks it, and it can't be fetched; says how to get it.
    """
    wanted = hub_id(path)
    if wanted is None or Path(path).exists():
        return Path(path)
    cache = cache or hub_cache(os.environ)
    own = own or own_cache()
    found = cached_folder(wanted, cache) or cached_folder(wanted, own)
    problem = "" if found else (fetch or _fetch)(wanted, own)
    found = found or cached_folder(wanted, own)
    if found is None:
        problem = problem or "the hub has no config.json and .safetensors of it"
        raise ConnectionFailedError(_lacks(wanted, cache, problem))
    return found.absolute()


def _fetch(wanted: HubId, cache: Path) -> str:
    command = [sys.executable, "-P", "-m", "coordinator.hub.download", wanted.repository, wanted.revision, str(cache)]
    try:
        with Waiting(f"fetching the model {wanted} from its hub into {cache}"):
            done = subprocess.run(  # noqa: S603 - our own module
                command, capture_output=True, text=True, timeout=FETCH_S, check=False, stdin=subprocess.DEVNULL
            )
    except subprocess.TimeoutExpired:
        return f"it is not there after {FETCH_S:g} s"
    lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    return lines[-1][:_SHOWN] if done.returncode else ""


def _lacks(wanted: HubId, cache: Path, problem: str) -> str:
    revision = f" --revision {wanted.revision}" if str(wanted) != wanted.repository else ""
    return (
        f"model.path = '{wanted}' is no folder here, the Hugging Face cache {cache} lacks it, and it can't be fetched "
        f"({problem}); where there is a network: hf download {wanted.repository}{revision}, or name a folder"
    )
