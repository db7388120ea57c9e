"""Merge of the nodes' tensors into safetensors files, by bytes and without torch.

Numbers are not interpreted or held in memory: the merged file is read from the parts on disk as it is sent. Every part
is from another machine, so it is checked before use.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from ringtune.errors import IntegrityError
from ringtune.models.folder import INDEX_FILE, WEIGHTS_FILE, read_headers, shard_name
from ringtune.models.result_files import ADAPTER_FILE, DESCRIPTIONS, Result, block_of, of_user
from ringtune.schedule.placement import Slice
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.storage.tensor_files import TensorFile, TensorPieces, write_tensors

_METADATA: Final = {"format": "pt"}

SHARD_BYTES: Final = 5_000_000_000
"""Limit of one file of a trained model; a larger model is written as several, as by transformers."""


def tensors_of(parts: Mapping[str, Pieces]) -> dict[str, TensorPieces]:
    """Collect the tensors of several safetensors files (content by node) by name, without reading them.

    Raises ``IntegrityError``: a part is broken, or two parts have the same tensor.
    """
    tensors: dict[str, TensorPieces] = {}
    origin: dict[str, str] = {}
    for source, content in sorted(parts.items()):
        file = TensorFile(content, where=f"the result of node {source}")
        for name in file.infos:
            if name in tensors:
                raise IntegrityError(f"nodes {origin[name]} and {source} both sent tensor {name}; one has to own it")
            tensors[name], origin[name] = file.tensor(name), source
    return tensors


def weight_files(tensors: Mapping[str, TensorPieces], *, shard_bytes: int = SHARD_BYTES) -> dict[str, Pieces]:
    """Write the weights of a model: one file, or several with an index above ``shard_bytes``.

    Source: the layout of ``save_pretrained`` of transformers.
    """
    shards: list[dict[str, TensorPieces]] = [{}]
    held = 0
    for name, tensor in sorted(tensors.items()):
        if shards[-1] and held + tensor.data.size_bytes > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.data.size_bytes
    if len(shards) == 1:
        return {WEIGHTS_FILE: write_tensors(tensors, metadata=_METADATA)}
    names = [shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total_bytes = sum(tensor.data.size_bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}
    files = {file: write_tensors(shard, metadata=_METADATA) for file, shard in zip(names, shards, strict=True)}
    return files | {INDEX_FILE: Pieces.of((json.dumps(index, indent=2) + "\n").encode())}


def same_everywhere(files: Iterable[tuple[str, bytes]], *, name: str) -> bytes:
    """Return the content of a file that several nodes sent and that must be equal; raises ``IntegrityError``."""
    sent = sorted(files)
    if not sent:
        raise IntegrityError(f"no node sent {name}")
    first_node, first = sent[0]
    for node, content in sent[1:]:
        if content != first:
            raise IntegrityError(f"nodes {first_node} and {node} sent different {name}; their versions may differ")
    return first


def result_folder(
    files: Mapping[str, Mapping[str, Pieces]], result: Result, *, shard_bytes: int = SHARD_BYTES
) -> dict[str, Pieces]:
    """Merge the files of the nodes (content by file name, by node) to the folder of a run's result.

    ``shard_bytes`` is the limit of one file of a model's weights.

    Returns:
        Content by file name.

    Raises:
        IntegrityError: a file is missing, broken, or not the same everywhere.
    """
    sent = {name for sent_files in files.values() for name in sent_files}
    if not result.is_model:
        return adapter_folder(files, [*result.files, *(name for name in result.more if name in sent)])
    names = [name for name in (*result.files, *result.more) if name != WEIGHTS_FILE]
    folder = adapter_folder(files, [name for name in names if name in result.files or name in sent])
    parts = {node: sent_files[WEIGHTS_FILE] for node, sent_files in files.items() if WEIGHTS_FILE in sent_files}
    if not parts:
        raise IntegrityError(f"no node sent {WEIGHTS_FILE}; use one version on all machines")
    return folder | weight_files(tensors_of(parts), shard_bytes=shard_bytes)


def users_folders(files: Mapping[str, Mapping[str, Pieces]], results: Mapping[str, Result]) -> dict[str, Pieces]:
    """Merge the files of the nodes (content by file name, by node) to one folder for each user.

    Returns:
        Content by path in the run's folder; the common files are in each user's folder.

    Raises:
        IntegrityError: a file is missing, broken, or not the same everywhere; or a user lacks a tensor of the others
            with the same kind of adapter.
    """
    sent = {path for sent_files in files.values() for path in sent_files}
    besides: dict[str, Pieces] = {}
    contents: dict[str, Pieces] = {}
    adapters: dict[str, Mapping[str, TensorPieces]] = {}
    of_kind: dict[tuple[str, bytes], set[str]] = {}
    kinds: dict[str, tuple[str, bytes]] = {}
    for user, result in results.items():
        for name in (*result.files, *(more for more in result.more if more in sent)):
            path = of_user(user, name)
            if name == ADAPTER_FILE:
                adapters[path] = tensors_of({node: given[path] for node, given in files.items() if path in given})
                continue
            source = path if path in sent else name
            besides = besides if source in besides else besides | adapter_folder(files, [source])
            contents[path] = besides[source]
            if name in DESCRIPTIONS:
                kinds[of_user(user, ADAPTER_FILE)] = (name, bytes(contents[path]))
    for path, tensors in adapters.items():
        of_kind.setdefault(kinds[path], set()).update(tensors)
    for path, tensors in adapters.items():
        if lacking := of_kind[kinds[path]] - tensors.keys():
            what = f"{min(lacking)} of {path}" if tensors else path
            raise IntegrityError(f"no node sent {what}; use one version on all machines")
        contents[path] = write_tensors(tensors, metadata=_METADATA)
    return contents


def adapter_folder(files: Mapping[str, Mapping[str, Pieces]], names: Iterable[str]) -> dict[str, Pieces]:
    """Merge the named files of the nodes (content by file name, by node) to the AdapterHub folder of a run.

    Returns:
        Content by file name.

    Raises:
        IntegrityError: a file is missing, broken, or not the same everywhere.
    """
    folder: dict[str, Pieces] = {}
    for name in names:
        by_node = {node: sent[name] for node, sent in files.items() if name in sent}
        if not by_node:
            raise IntegrityError(f"no node sent {name}; use one version on all machines")
        if name.endswith(".safetensors"):
            folder[name] = write_tensors(tensors_of(by_node), metadata=_METADATA)
        else:
            small = [(node, bytes(content)) for node, content in by_node.items()]
            folder[name] = Pieces.of(same_everywhere(small, name=name))
    return folder


def saved_files(folder: Path, result: Result) -> dict[str, Pieces]:
    """Return the files of a result that nodes compute with, by name; a model's weights as one file.

    Raises:
        ModelError: a model's weights are missing, or can't be read.
        IntegrityError: they are damaged.
    """
    if not result.is_model:
        return {name: FilePieces(folder / name) for name in result.loaded}
    tensors = {
        name: TensorPieces(info.dtype, info.shape, FilePieces(path, info.offset, info.nbytes))
        for name, (path, info, _) in read_headers(folder).items()
    }
    return {WEIGHTS_FILE: write_tensors(tensors, metadata=_METADATA)}


def saved_part(
    folder: Path, result: Result, piece: Slice, *, is_owner: bool, private_blocks: int = 0
) -> dict[str, Pieces]:
    """Return the files for one node: of a model the blocks of its slice, and at an owner private ones and the rest.

    Raises ``IntegrityError``: the weights of a model are damaged.
    """
    if not result.is_model:
        return saved_files(folder, result)
    file = TensorFile(FilePieces(folder / WEIGHTS_FILE), where=WEIGHTS_FILE)
    of_owner = (None, *range(private_blocks)) if is_owner else ()
    blocks: tuple[int | None, ...] = (*range(piece.start, piece.stop), *of_owner)
    tensors = {name: file.tensor(name) for name in file.infos if block_of(name) in blocks}
    return {WEIGHTS_FILE: write_tensors(tensors, metadata=_METADATA)}
