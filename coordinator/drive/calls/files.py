"""Files on their way to and from a node: they take as long as they do; where one is lost, all go once more."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from ringtune.files.chunks import cut_pieces, write_any_files
from ringtune.files.pieces import FilePieces, Pieces
from ringtune.rpc.repeating.asking import repeated
from ringtune.v1 import control_pb2

T = TypeVar("T")
_PROGRESS_S = 0.2
_AGAIN_S: Final = 3600.0
"""Files whose way began longer ago are not sent again."""


class FileCalls:
    """The calls to one node that carry files.

    Args:
        stub: of the node.
        run_id: of the run.
        node: its name.
        address: ``host:port``.
        lease_s: a node that is silent for so long is lost.
        track: told of each call, so that it can be cancelled.
        over: set when nobody waits any more.
    """

    def __init__(
        self,
        stub: Any,
        run_id: str,
        node: str,
        address: str,
        *,
        lease_s: float,
        track: Callable[[Any], Any],
        over: threading.Event,
    ) -> None:
        self._stub, self._run_id, self._node, self._peer = stub, run_id, node, f"node {node} at {address}"
        self._lease_s, self._track, self._over = lease_s, track, over

    def load(self, files: Mapping[str, Pieces], on_progress: Callable[[], None]) -> None:
        """Send the files of a saved result; a node that gets them twice loads them twice.

        Raises:
            grpc.RpcError: the node does not answer, or refuses them.
        """

        def attempt(hear: Callable[[], None]) -> None:
            chunks = watched(self._chunks(files), _both(hear, on_progress))
            self._track(self._stub.Load.future(chunks)).result()

        self._repeated(attempt)

    def collect(
        self,
        request: control_pb2.CollectRequest,
        folder: Path,
        names: Sequence[str],
        max_bytes: int,
        on_progress: Callable[[], None],
    ) -> dict[str, Pieces]:
        """Fetch a node's results into a folder, and return them by name.

        Raises:
            grpc.RpcError: the node does not answer, or has none.
            IntegrityError: other files came, too much, or damaged ones.
            StorageError: they can't be written here.
        """

        def attempt(hear: Callable[[], None]) -> dict[str, Path]:
            _empty(folder)
            chunks = watched(self._track(self._stub.Collect(request)), _both(hear, on_progress))
            return write_any_files(chunks, folder, names=names, max_bytes=max_bytes, source=f"node {self._node}")

        return {name: FilePieces(path) for name, path in self._repeated(attempt).items()}

    def _repeated(self, attempt: Callable[[Callable[[], None]], T]) -> T:
        return repeated(attempt, peer=self._peer, lease_s=self._lease_s, timeout_s=_AGAIN_S, given_up=self._over)

    def _chunks(self, files: Mapping[str, Pieces]) -> Iterator[control_pb2.LoadChunk]:
        run_id = self._run_id
        for name, content in files.items():
            for chunk in cut_pieces(name, content):
                yield control_pb2.LoadChunk(run_id=run_id, file=chunk)
                run_id = ""  # the first one says it for all


def watched(messages: Iterable[T], on_progress: Callable[[], None]) -> Iterator[T]:
    """Pass messages on, and tell of it now and then."""
    told_s = -math.inf
    for message in messages:
        if time.monotonic() >= told_s + _PROGRESS_S:
            told_s = time.monotonic()
            on_progress()
        yield message


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call


def _empty(folder: Path) -> None:
    """Remove what an attempt before has left."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
