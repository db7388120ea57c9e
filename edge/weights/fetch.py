"""Fetch a manifest, and contents by digest, from peers in turn; each goes on where the last one stopped.

A stream that brings no bytes for a while is given up and taken up again, at the next source. A source whose bytes do
not have the digest that the manifest says is not asked again. Whatever ends the fetching, partial files stay.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from edge.weights.files import CheckedFile
from edge.weights.retrying import SourceRotation, Wanted, Watch
from ringtune.errors import (
    BusyError,
    ConnectionFailedError,
    DamagedError,
    FrameError,
    IntegrityError,
    ModelError,
    RingTuneError,
)
from ringtune.rpc.connections import open_channel
from ringtune.rpc.statuses import error_of_call
from ringtune.v1 import weights_pb2, weights_pb2_grpc
from ringtune.weights.codec import manifest_from_proto
from ringtune.weights.manifest import CHUNK_BYTES, ModelManifest

_LOG = logging.getLogger(__name__)
_ASK_AGAIN_S = 0.2
_MAX_PIECES = 4096
# What is under way when a connection breaks is lost and comes again: so much, instead of megabytes by default.
_OPTIONS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", CHUNK_BYTES))
_CALL_ERRORS = (grpc.RpcError, grpc.FutureCancelledError, RingTuneError)


class Sources:
    """Peers that may have the model; a context manager that closes the connections.

    Args:
        addresses: ``host:port`` in the order in which they are asked.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(dict.fromkeys(addresses))
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()

    def manifest(self, wanted: Wanted) -> ModelManifest:
        """Get the manifest from the first source that has the model.

        That source is asked first from then on, and sources that refused are not asked again.

        Raises:
            ModelError: no source has the model; says what each answered.
            DeadlineError: sources did not come to know the run in time.
        """
        answers: dict[str, str] = {}
        waiting = list(self.addresses)
        while waiting:
            for address in tuple(waiting):
                wanted.check("the manifest of the model")
                try:
                    manifest = self._ask(address, wanted)
                except _CALL_ERRORS as raised:
                    wanted.check("the manifest of the model")
                    error = _as_error(raised, address)
                    if isinstance(error, FrameError | BusyError):  # it has not heard of the run yet
                        continue
                    answers[address] = str(error)
                    waiting.remove(address)
                else:
                    self._forget(answers, first=address)
                    return manifest
            wanted.stop.wait(_ASK_AGAIN_S if waiting else 0.0)
        said = "; ".join(f"{address}: {answer}" for address, answer in answers.items()) or "nobody was there to ask"
        raise ModelError(f"no node has a copy of the model that this one could fetch ({said})")

    def fetch(self, files: Sequence[CheckedFile], wanted: Wanted) -> int:
        """Fetch what these files still lack, until all are complete.

        Args:
            files: with ``resume`` called.
            wanted: by whom.

        Returns:
            Bytes of content that came.

        Raises:
            IntegrityError: no source is left that sends what its manifest says.
            ConnectionFailedError: no source answers any more.
            DeadlineError: not in time.
            InterruptedRunError: stopped.
            CapacityError: the disk is full.
        """
        came = 0
        sources = SourceRotation(self.addresses)
        for file in files:
            _finish_if_whole(file)
        while missing := [file for file in files if not file.path.is_file()][:_MAX_PIECES]:
            what = f"{missing[0].what} and {len(missing) - 1} more"
            wanted.check(what)
            address, before = sources.address, came
            error: RingTuneError | None = None
            try:
                for got in self._stream(address, missing, wanted):
                    came += got
            except _CALL_ERRORS as raised:
                wanted.check(what)
                error = _as_error(raised, address)
                if isinstance(error, DamagedError):
                    _discard_from(address, files)
            wanted.stop.wait(sources.after(error, what=what, is_further=came > before))
        return came

    # ---- one call -----------------------------------------------------------------------------------

    def _ask(self, address: str, wanted: Wanted) -> ModelManifest:
        """Ask one source for its manifest, without a limit but the deadline: the source hashes its copy first."""
        request = weights_pb2.ManifestRequest(run_id=wanted.run_id)
        call: Any = self._stub(address).Manifest.future(request, timeout=wanted.left_s())
        with Watch(call, wanted, idle_s=math.inf):
            return manifest_from_proto(call.result())

    def _stream(self, address: str, files: Sequence[CheckedFile], wanted: Wanted) -> Iterator[int]:
        """Fetch all missing pieces from one source in one call.

        Yields:
            Bytes of each message, when they are on the disk.
        """
        request = weights_pb2.FetchRequest(
            run_id=wanted.run_id,
            pieces=[weights_pb2.Piece(sha256=bytes.fromhex(file.sha256), offset=file.offset) for file in files],
        )
        call = self._stub(address).Fetch(request, timeout=wanted.left_s())
        last = -1
        with Watch(call, wanted, idle_s=wanted.idle_s) as watch:
            for chunk in call:
                watch.saw_progress()
                if not last <= chunk.piece < len(files) or not 0 < len(chunk.data) <= CHUNK_BYTES:
                    raise DamagedError(f"{address} sends chunks that nobody asked for")
                last = chunk.piece
                file = files[last]
                try:
                    file.write(chunk.data, address)
                    yield len(chunk.data)
                    _finish_if_whole(file, address)
                except IntegrityError as error:
                    raise DamagedError(f"{address}: {error}") from error

    def _stub(self, address: str) -> weights_pb2_grpc.WeightsStub:
        if address not in self._channels:
            self._channels[address] = open_channel(address, _OPTIONS)
        return weights_pb2_grpc.WeightsStub(self._channels[address])

    def _forget(self, refused: dict[str, str], *, first: str) -> None:
        others = [address for address in self.addresses if address not in refused and address != first]
        self.addresses = (first, *others)


def _finish_if_whole(file: CheckedFile, address: str = "") -> None:
    """Put a file in its place if all of it is there.

    A wrong digest is the fault of ``address`` only if all bytes came from there; otherwise the file begins anew.

    Raises:
        IntegrityError: ``address`` sent something else than the manifest says.
    """
    if file.offset < file.nbytes or file.path.is_file():
        return
    origins = set(file.origins)
    try:
        file.finish()
    except IntegrityError as error:
        if origins == {address}:
            raise
        _LOG.warning("%s; it is fetched anew", error)


def _discard_from(address: str, files: Sequence[CheckedFile]) -> None:
    """Discard the partial files that have bytes of a source whose digests are wrong."""
    for file in files:
        if address in file.origins and not file.path.is_file():
            file.discard()


def _as_error(error: Exception, address: str) -> RingTuneError:
    if isinstance(error, RingTuneError):
        return error
    if isinstance(error, grpc.RpcError):
        return error_of_call(error, peer=f"the source {address}")
    return ConnectionFailedError(f"the source {address} brought nothing for too long")
