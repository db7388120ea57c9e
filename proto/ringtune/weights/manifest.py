"""What a model consists of, by digest, and which part of it a node needs.

A node without a copy of the model gets a *manifest* from who has one: every tensor with its type, shape, digest and
a few bytes of its middle, and the small files beside the weights. From it the node builds an outline (a file with
all headers and hardly any bytes) from which planning counts what it counts on a copy, and later fetches the
tensors of its slice, each by its digest.

A manifest comes from a peer, so it is checked here before anybody uses it: names are never paths, sizes follow from
types and shapes, and files have names of a fixed list.

Source: the content-addressed objects of Flower (``supercore/inflatable``).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ringtune.errors import IntegrityError
from ringtune.files.safetensors_header import DTYPE_BYTES
from ringtune.models.families import FAMILIES
from ringtune.models.tensors import CONFIG_FILE, SAMPLE_BYTES, TOKENIZER_FILES, base_name, select_tensors

CHUNK_BYTES = 1 << 16
"""Longest piece of a message. A message counts when it is whole: half a second at 1 Mbit/s, and what a break loses."""

MODEL_FILES = (CONFIG_FILE, *TOKENIZER_FILES)
"""Every file that is ever fetched; all other files of a model folder stay where they are."""

_MAX_FILE_BYTES = 1 << 26
_MAX_TENSORS = 100_000
_MAX_TOTAL_BYTES = 1 << 42
_MAX_NAME = 256
_MAX_DIMENSIONS = 8
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a model.

    Attributes:
        name: as in the model's files.
        dtype: of safetensors, e.g. ``F32``.
        shape: as in the header.
        sha256: of its bytes, hex.
        sample: its bytes at ``sample_start``, at most ``SAMPLE_BYTES``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    sample: bytes

    def __post_init__(self) -> None:
        """Refuse a name, type, shape, digest or sample that no tensor of a model can have."""
        if not 1 <= len(self.name) <= _MAX_NAME or not self.name.isprintable():
            raise IntegrityError(f"the manifest has a tensor with the name {self.name[:80]!r}; ask another source")
        if self.dtype not in DTYPE_BYTES or len(self.shape) > _MAX_DIMENSIONS or any(side < 0 for side in self.shape):
            raise _refused(self.name, f"has type {self.dtype!r} and shape {self.shape}")
        _check_digest(self.name, self.sha256)
        if len(self.sample) != min(self.nbytes, SAMPLE_BYTES):
            raise _refused(self.name, f"has a sample of {len(self.sample)} bytes")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file beside the weights.

    Attributes:
        name: one of ``MODEL_FILES``.
        nbytes: its size.
        sha256: of its bytes, hex.
    """

    name: str
    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Refuse every name that is not in the list, and sizes that no such file has."""
        if self.name not in MODEL_FILES:
            raise IntegrityError(f"the manifest has the file {self.name[:80]!r}, which is never fetched")
        if not 0 <= self.nbytes <= _MAX_FILE_BYTES:
            raise _refused(self.name, f"has {self.nbytes:,} bytes, at most {_MAX_FILE_BYTES:,} are allowed")
        _check_digest(self.name, self.sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelManifest:
    """The manifest of a whole model: all its tensors and small files, by digest.

    Attributes:
        tensors: by name.
        files: by name; ``config.json`` is one of them.
    """

    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        """Refuse names twice or out of order, too many tensors or bytes, no tensors, and no config."""
        if not 1 <= len(self.tensors) <= _MAX_TENSORS:
            raise IntegrityError(f"the manifest has {len(self.tensors):,} tensors; ask another source")
        if sum(tensor.nbytes for tensor in self.tensors) > _MAX_TOTAL_BYTES:
            raise IntegrityError("the manifest claims more bytes than any model has; ask another source")
        for names in ([tensor.name for tensor in self.tensors], [file.name for file in self.files]):
            if names != sorted(set(names)):
                raise IntegrityError("the manifest has a name twice, or out of order; ask another source")
        if CONFIG_FILE not in {file.name for file in self.files}:
            raise IntegrityError(f"the manifest has no {CONFIG_FILE}; ask another source")

    @property
    def digest(self) -> str:
        """SHA-256, hex, over names, types, shapes, sizes and digests: it names the model.

        Samples are not in it.
        """
        rows: list[Any] = [[entry.name, entry.dtype, entry.shape, entry.sha256] for entry in self.tensors]
        rows += [[entry.name, entry.nbytes, entry.sha256] for entry in self.files]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def needed_files(manifest: ModelManifest, *, is_owner: bool) -> tuple[FileEntry, ...]:
    """The files that a node needs: the config, and at an owner also what turns rows into tensors."""
    return tuple(file for file in manifest.files if is_owner or file.name == CONFIG_FILE)


def needed_tensors(
    manifest: ModelManifest,
    config: Mapping[str, Any],
    *,
    blocks: Iterable[int],
    is_owner: bool,
    with_decoder: bool,
    with_unused: bool = False,
) -> tuple[TensorEntry, ...]:
    """The tensors that a node hosts of a model.

    A decoder that is tied to the token table is that table.

    Args:
        manifest: of the model.
        config: from ``read_config``.
        blocks: that the node hosts.
        is_owner: also the embedding and what comes after the last block.
        with_decoder: an owner's head is the pretrained decoder.
        with_unused: also what a file may lack and no head uses, such as a pooler.

    Raises:
        ModelError: a tensor is missing, or has another shape than the config says.
    """
    family = FAMILIES[config["model_type"]]
    found = {base_name(entry.name, family): entry for entry in manifest.tensors}
    names = select_tensors(
        {name: entry.shape for name, entry in found.items()},
        config,
        where="the model that was found",
        blocks=sorted(set(blocks)),
        is_owner=is_owner,
        with_decoder=with_decoder,
    )
    unused = tuple(f"{path}." for path in family.unused_paths) if with_unused else ()
    return tuple(found[name] for name in [*names, *(name for name in found if name.startswith(unused))])


def _check_digest(name: str, digest: str) -> None:
    if not _HEX_DIGEST.fullmatch(digest):
        raise _refused(name, "has no SHA-256")


def _refused(name: str, reason: str) -> IntegrityError:
    return IntegrityError(f"the manifest is not usable: {name!r} {reason}; ask another source")
