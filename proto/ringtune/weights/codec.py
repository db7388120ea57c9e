"""Translates between the messages of the ``Weights`` service and the values of ``ringtune.weights.manifest``."""

from __future__ import annotations

from ringtune.errors import IntegrityError
from ringtune.v1 import weights_pb2
from ringtune.weights.manifest import FileEntry, ModelManifest, TensorEntry

DIGEST_BYTES = 32


def manifest_to_proto(manifest: ModelManifest) -> weights_pb2.ManifestReply:
    """Translate a manifest into its message."""
    return weights_pb2.ManifestReply(
        tensors=[
            weights_pb2.TensorEntry(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                sha256=bytes.fromhex(entry.sha256),
                sample=entry.sample,
            )
            for entry in manifest.tensors
        ],
        files=[
            weights_pb2.FileEntry(name=entry.name, size_bytes=entry.nbytes, sha256=bytes.fromhex(entry.sha256))
            for entry in manifest.files
        ],
    )


def manifest_from_proto(message: weights_pb2.ManifestReply) -> ModelManifest:
    """Translate a message into its manifest.

    Raises:
        IntegrityError: it breaks a rule of ``ringtune.weights.manifest``.
    """
    return ModelManifest(
        tensors=tuple(
            TensorEntry(
                name=entry.name,
                dtype=entry.dtype,
                shape=tuple(entry.shape),
                sha256=entry.sha256.hex(),
                sample=entry.sample,
            )
            for entry in message.tensors
        ),
        files=tuple(
            FileEntry(name=entry.name, nbytes=entry.size_bytes, sha256=entry.sha256.hex()) for entry in message.files
        ),
    )


def pieces_from_proto(message: weights_pb2.FetchRequest) -> tuple[tuple[str, int], ...]:
    """Read the digests that a fetch asks for, each with the offset to begin at.

    Raises:
        IntegrityError: something that is no digest.
    """
    if any(len(piece.sha256) != DIGEST_BYTES for piece in message.pieces):
        raise IntegrityError("a piece that was asked for has no SHA-256; use one version on all machines")
    return tuple((piece.sha256.hex(), piece.offset) for piece in message.pieces)
