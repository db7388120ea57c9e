"""Files beside the shards of a run: trained blocks of this node and of others at the ends of turns, and heads.

::

    STATE/<run id>/copy-<step>-<attempt>-<sha256>.safetensors    some blocks, with moments and counts
    STATE/<run id>/head-<step>-<attempt>-<sha256>                the head, as owners hand it over

The attempt is the run that trained them: the run under whose id the folder is, or one that goes on with it. A file's
digest is in its name, so that a damaged one is found out without anybody's word. With a checkpoint a node keeps copies
of others' parts so; when the coordinator is gone, all that it keeps in memory of the ends of turns.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from edge.shards.block_files import HEAD, METADATA, block_of, metadata
from edge.shards.state_folder import RunShards
from ringtune.errors import IntegrityError
from ringtune.files.durable import drop_file, is_plain_file, write_durably
from ringtune.files.pieces import FilePieces, Pieces
from ringtune.files.safetensors_stream import TensorFile, TensorPieces, write_tensors
from ringtune.rounds.whereabouts import SavedPart

_LOG = logging.getLogger(__name__)
_NAME: Final = re.compile(r"(copy|head)-(\d{1,18})-(r[0-9-]{16}[0-9a-f]{8})-([0-9a-f]{64})(?:\.safetensors)?")
_MOST_BLOCKS: Final = 1 << 16
_MOST_STEPS: Final = 8
"""Of so many steps, the newest ones, a node tells what it has: of two checkpoints, and of three ends of turns."""


class _File(NamedTuple):
    """A file by what its name says."""

    path: Path
    is_head: bool
    step: int
    attempt: str
    sha256: str


class SavedParts:
    """The files beside the shards of one run at one node.

    Args:
        shards: of the run.
        node: this node, for messages.
    """

    def __init__(self, shards: RunShards, node: str) -> None:
        self._shards, self._node = shards, node

    # ---- writing ----------------------------------------------------------------------------------

    def write(self, step: int, attempt: str, content: bytes, *, is_head: bool) -> None:
        """Put trained blocks, or the head, on the disk; what is there already is not written again.

        Raises:
            StorageError: no room.
        """
        kind, end = ("head", "") if is_head else ("copy", ".safetensors")
        path = self._shards.folder / f"{kind}-{step}-{attempt}-{hashlib.sha256(content).hexdigest()}{end}"
        if not path.exists():
            write_durably(path, content)

    def drop_before(self, step: int) -> None:
        """Delete the files of steps before ``step``."""
        for file in self._files():
            if file.step < step:
                drop_file(file.path)

    # ---- reading ----------------------------------------------------------------------------------

    def found(self) -> tuple[SavedPart, ...]:
        """List the files of the newest steps that are whole; a damaged one is named in the log, and left out."""
        files = list(self._files())
        newest = sorted({file.step for file in files})[-_MOST_STEPS:]
        return tuple(part for file in files if file.step in newest and (part := self._checked(file)) is not None)

    def _checked(self, file: _File) -> SavedPart | None:
        try:
            if file.is_head:
                self._content(file)
                return SavedPart(file.step, file.attempt, has_head=True)
            return SavedPart(file.step, file.attempt, blocks=tuple(sorted(_blocks(self._tensors(file)))))
        except (IntegrityError, OSError) as error:
            _LOG.warning("node %s: %s", self._node, error)
            return None

    def part(self, step: int, attempt: str, start: int, stop: int, *, sha256: str = "") -> Pieces:
        """Return the blocks ``[start, stop)`` as a file that says attempt and step, read when it is gone through.

        Args:
            step: optimizer steps done.
            attempt: the run that trained them.
            start: first block.
            stop: one past the last block.
            sha256: of the shard that has them; empty = files beside shards.

        Raises:
            IntegrityError: a file is damaged, or some blocks are not there.
        """
        found: dict[str, TensorPieces] = {}
        missing = set(range(start, stop))
        for file in [self._shard(step, sha256)] if sha256 else self._tensor_files(step, attempt):
            taken = missing & _blocks(file)
            found |= {name: file.tensor(name) for name in file.infos if block_of(name) in taken}
            missing -= taken
        if missing:
            raise IntegrityError(
                f"node {self._node} has no whole file with blocks {sorted(missing)} of run {attempt} after step {step}"
            )
        return write_tensors(found, metadata={METADATA: json.dumps(metadata(attempt, step), sort_keys=True)})

    def head(self, step: int, attempt: str, *, sha256: str = "") -> Pieces:
        """Return the head as it was after ``step`` steps; of the shard with this digest, if one is given.

        Raises:
            IntegrityError: it is damaged, or not there.
        """
        if sha256:
            shard = self._shard(step, sha256)
            if HEAD in shard.infos:
                return shard.tensor(HEAD).data
        for file in self._files():
            if file.is_head and (file.step, file.attempt) == (step, attempt):
                return self._content(file)
        raise IntegrityError(f"node {self._node} has no head of run {attempt} after step {step}")

    def _shard(self, step: int, sha256: str) -> TensorFile:
        return TensorFile(self._shards.read(step, sha256, node=self._node), where=str(self._shards.path(step)))

    def _tensor_files(self, step: int, attempt: str) -> Iterator[TensorFile]:
        for file in self._files():
            if not file.is_head and (file.step, file.attempt) == (step, attempt):
                try:
                    yield self._tensors(file)
                except (IntegrityError, OSError) as error:  # another file may have its blocks
                    _LOG.warning("node %s: %s", self._node, error)

    def _tensors(self, file: _File) -> TensorFile:
        return TensorFile(self._content(file), where=str(file.path))

    def _content(self, file: _File) -> Pieces:
        content = FilePieces(file.path)
        if content.sha256() != file.sha256:
            raise IntegrityError(f"{file.path} is damaged (its digest differs), so it is not used")
        return content

    def _files(self) -> Iterator[_File]:
        folder = self._shards.folder
        if folder.is_symlink() or not folder.is_dir():
            return
        for path in sorted(folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and is_plain_file(path):
                yield _File(path, match[1] == "head", int(match[2]), match[3], match[4])


def _blocks(file: TensorFile) -> set[int]:
    return {block for name in file.infos if 0 <= (block := block_of(name)) < _MOST_BLOCKS}
