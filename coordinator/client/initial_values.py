"""Initial values of a run (``adapter.from``): their digest in the job, and their file for the coordinator.

Pickled files of AdapterHub are read by ``edge.model.pickled`` in one process of its own: torch is not loaded here.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ringtune.errors import InvalidInputError
from ringtune.job.job import Job, load_job
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.techniques.initial_adapter import INITIAL_FILE, initial_values, with_digest

_READ_S: Final = 300.0


def with_initial_digest(job: Job, run: Path | None = None) -> Job:
    """Fill in ``adapter.sha256`` of a job with ``adapter.from``; one that is given is checked when the run begins.

    ``run`` is the folder of a run to resume: if that began from the same folder, its values count, as they were then.

    Raises ``RingTuneError``: as ``initial_values``.
    """
    if not job.adapter.from_ or job.adapter.sha256:
        return job
    began = load_job(run / "job.toml").adapter if run is not None and (run / "job.toml").is_file() else job.adapter
    is_same = began.from_ == job.adapter.from_
    changed: Job = with_digest(job, (is_same and began.sha256) or initial_values(job, unpickled).sha256())
    return changed


def initial_file(job: Job, run: Path | None) -> Pieces | None:
    """Return the file of initial values of a job with a digest: of a resumed run's folder, or of ``adapter.from``.

    None without ``adapter.from``.

    Raises:
        JobError: the folder has other values than ``adapter.sha256`` says.
        RingTuneError: as ``initial_values``.
    """
    if not job.adapter.from_:
        return None
    kept = run / INITIAL_FILE if run is not None else None
    if kept is not None and kept.is_file() and FilePieces(kept).sha256() == job.adapter.sha256:
        return FilePieces(kept)
    content = initial_values(job, unpickled)
    with_digest(job, content.sha256())
    return content


def unpickled(paths: Sequence[Path]) -> Sequence[Pieces]:
    """Convert pickled files of tensors to safetensors, each held in memory.

    Raises ``InvalidInputError``: one has anything but tensors, or torch is not installed.
    """
    return _unpickled(tuple((path, path.stat().st_mtime_ns) for path in paths))


@functools.lru_cache(maxsize=2)
def _unpickled(changed_ns: tuple[tuple[Path, int], ...]) -> Sequence[Pieces]:
    named = " and ".join(str(path) for path, _ in changed_ns)
    with tempfile.TemporaryDirectory(prefix="ringtune-") as folder:
        targets = [(path, Path(folder) / f"{number}.safetensors") for number, (path, _) in enumerate(changed_ns)]
        command = [sys.executable, "-P", "-m", "edge.model.pickled", *(str(path) for pair in targets for path in pair)]
        try:
            reader = subprocess.run(command, capture_output=True, text=True, timeout=_READ_S, check=False)  # noqa: S603 - our own module
        except subprocess.TimeoutExpired as error:
            raise InvalidInputError(
                f"{named}: not read within {_READ_S:g} s; save the adapter with use_safetensors=True"
            ) from error
        if reader.returncode:
            reason = (reader.stderr.strip().splitlines() or ["its reader ended without a word"])[-1]
            raise InvalidInputError(
                f"{named} can't be read: {reason.removeprefix('error: ')}; save the adapter with use_safetensors=True"
            )
        return [Pieces.of(target.read_bytes()) for _, target in targets]
