"""The folder of a run on the submitter's machine: written as events come, never half a file under its name.

::

    DIR/job.toml   plan.json   profile.json   metrics.jsonl   report.json   trace.json
    DIR/adapter/   the AdapterHub folder      DIR/recordings/  if asked for      DIR/logs/  with --local

A file grows as ``NAME.part`` and gets its name when it is complete and its digest is right; ``metrics.jsonl``
alone grows under its own name, a whole line at a time. Paths come from another machine: they are checked.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from ringtune.errors import IntegrityError, UsageError

_OWN_FILES = ("job.toml", "plan.json", "profile.json", "metrics.jsonl", "report.json", "trace.json")
_OWN_FOLDERS = ("adapter", "recordings", "logs")
_PART = ".part"
_PATH = re.compile(r"[a-z0-9][A-Za-z0-9._-]*(/[a-zA-Z0-9][A-Za-z0-9._-]*){0,2}")


class RunFolder:
    """Writes one run's folder.

    Args:
        path: of the folder; made if it is not there.
        replace: whether the files of an earlier run there may be removed; others are never touched.

    Raises:
        UsageError: there is a run already, or something else than a folder.
    """

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        self.path = path
        self._open: dict[str, tuple[BinaryIO, Any]] = {}
        self._prepare(replace)

    def _prepare(self, replace: bool) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            present = sorted(entry.name for entry in self.path.iterdir())
        except OSError as error:
            raise UsageError(f"can't use {self.path} for the run's files: {error.strerror}; choose another") from error
        own = [name for name in present if name.removesuffix(_PART) in _OWN_FILES + _OWN_FOLDERS]
        if own and not replace:
            raise UsageError(
                f"{self.path} already holds a run ({', '.join(own[:3])}); choose another folder or add --replace"
            )
        for name in own:
            entry = self.path / name
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def __enter__(self) -> RunFolder:
        """The folder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close what is open; what is not complete keeps ``.part`` in its name."""
        for file, _ in self._open.values():
            file.close()
        self._open.clear()

    def write_text(self, name: str, text: str) -> None:
        """Write a whole small file at once."""
        target = self._target(name)
        part = target.with_name(target.name + _PART)
        part.write_text(text, encoding="utf-8")
        part.replace(target)

    def write_json(self, name: str, text: str) -> None:
        """Write a JSON document, indented for people.

        Raises:
            IntegrityError: it is no JSON.
        """
        try:
            value = json.loads(text)
        except ValueError as error:
            raise IntegrityError(f"{name} that came is not JSON: {error}; use one version on all machines") from error
        self.write_text(name, json.dumps(value, indent=1) + "\n")

    def add_metrics(self, line: str) -> None:
        """Append a line to ``metrics.jsonl``."""
        with self._target("metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(line.rstrip("\n") + "\n")

    def add_chunk(self, name: str, chunk: bytes, *, last: bool, sha256: str) -> Path | None:
        """Append to a result file.

        Args:
            name: relative path.
            chunk: the next bytes.
            last: whether the file is complete with them.
            sha256: hex digest of the whole file, with the last chunk.

        Returns:
            The path of the file once it is complete.

        Raises:
            IntegrityError: the path leaves the folder, or the digest differs.
        """
        target = self._target(name)
        part = target.with_name(target.name + _PART)
        if name not in self._open:
            self._open[name] = (part.open("wb"), hashlib.sha256())
        file, digest = self._open[name]
        file.write(chunk)
        digest.update(chunk)
        if not last:
            return None
        file.close()
        del self._open[name]
        if digest.hexdigest() != sha256:
            raise IntegrityError(f"{name} arrived damaged: SHA-256 {digest.hexdigest()[:12]}…, sent was {sha256[:12]}…")
        part.replace(target)
        return target

    def _target(self, name: str) -> Path:
        target = self.path / name
        inside = target.resolve().is_relative_to(self.path.resolve())
        if not _PATH.fullmatch(name) or name.endswith(_PART) or not inside:
            raise IntegrityError(f"the coordinator sent a file with the name {name!r}, which is not allowed")
        target.parent.mkdir(parents=True, exist_ok=True)
        return target
