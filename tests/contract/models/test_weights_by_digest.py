"""Manifests: what a model consists of, what a node needs of it, and what is refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringtune.errors import FrameError, IntegrityError, ModelError
from ringtune.models.folder import read_config
from ringtune.models.weights_by_digest import (
    CHUNK_BYTES,
    FileEntry,
    ModelManifest,
    ModelSource,
    Offers,
    TensorEntry,
    agreed_manifest,
    needed_files,
    needed_tensors,
    odd_manifests,
)
from tests.support.cases import cases
from tests.support.model_folder import bert_shapes, safetensors_bytes, write_model

RUN = "r20260101-000000-00000000"
DIGEST = hashlib.sha256(b"x").hexdigest()
CONFIG = FileEntry(name="config.json", nbytes=1, sha256=DIGEST)


def entry(**changes: Any) -> TensorEntry:
    """A tensor of four bytes."""
    values = {"name": "a", "dtype": "F32", "shape": (1,), "sha256": DIGEST, **changes}
    return TensorEntry(**values)


def manifest_of(folder: Path) -> ModelManifest:
    """What a source says about a folder."""
    return ModelSource(folder).manifest


@cases(("with_unused", "parts"), [(False, ("embeddings.",)), (True, ("embeddings.", "pooler."))])
def test_weights_owner_needs_embedding_and_the_pooler_with_full_parameters(
    tmp_path: Path, with_unused: bool, parts: tuple[str, ...]
) -> None:
    """What no head uses travels only where it is a part of the model that the run leaves."""
    folder = write_model(tmp_path / "m")
    found = needed_tensors(
        manifest_of(folder), read_config(folder), blocks=[], is_owner=True, with_decoder=False, with_unused=with_unused
    )
    assert {tensor.name for tensor in found} == {name for name in bert_shapes() if name.startswith(parts)}


def test_weights_files_are_those_of_a_list(tmp_path: Path) -> None:
    """Other files of the folder are not even named; a host gets the config only."""
    folder = write_model(tmp_path / "m")
    (folder / "vocab.txt").write_text("a")
    (folder / "train.csv").write_text("secret")
    (folder / "additional_chat_templates").mkdir()
    for name in ("rag.jinja", "rag.txt", "a b.jinja"):
        (folder / "additional_chat_templates" / name).write_text("a")
    manifest = manifest_of(folder)
    files = ["additional_chat_templates/rag.jinja", "config.json", "tokenizer_config.json", "vocab.txt"]
    assert [file.name for file in manifest.files] == files
    assert [file.name for file in needed_files(manifest, is_owner=False)] == ["config.json"]
    assert needed_files(manifest, is_owner=True) == manifest.files


@cases(
    "changes",
    [
        {"name": ""},
        {"name": "a\nb"},
        {"name": "a" * 257},
        {"dtype": "F31"},
        {"shape": (1,) * 9},
        {"sha256": "../../etc/passwd"},
        {"sha256": DIGEST.upper()},
    ],
)
def test_weights_manifest_entry_is_checked(changes: dict[str, Any]) -> None:
    """Whatever no safetensors file can have."""
    with pytest.raises(IntegrityError):
        entry(**changes)


@cases(
    "name",
    ["../config.json", "/etc/passwd", "modeling.py", "pytorch_model.bin", "", "additional_chat_templates/../x.jinja"],
)
def test_weights_file_names_of_peers_are_refused(name: str) -> None:
    """Only names of the list can come from a peer."""
    with pytest.raises(IntegrityError):
        FileEntry(name=name, nbytes=1, sha256=DIGEST)


def test_weights_manifest_is_checked_as_a_whole() -> None:
    """Names once and in order, a config, tensors, and a size that a model can have."""
    good = ModelManifest(tensors=(entry(), entry(name="b")), files=(CONFIG,))
    assert good.sha256 != ModelManifest(tensors=(entry(),), files=(CONFIG,)).sha256
    huge = entry(shape=(1 << 41,))
    for tensors, files in [
        ((), (CONFIG,)),
        ((entry(),), ()),
        ((entry(), entry()), (CONFIG,)),
        ((entry(name="b"), entry()), (CONFIG,)),
        ((huge,), (CONFIG,)),
    ]:
        with pytest.raises(IntegrityError):
            ModelManifest(tensors=tensors, files=files)


def manifest_with(*names: str) -> ModelManifest:
    """A manifest with these files beside the config."""
    files = (FileEntry(name=name, nbytes=1, sha256=DIGEST) for name in ("config.json", *names))
    return ModelManifest(tensors=(entry(),), files=tuple(sorted(files, key=lambda file: file.name)))


def test_weights_agreement_gives_the_files_of_owners() -> None:
    """A host that has more files than who reads rows with them would change the token ids of nodes without a copy."""
    host, more = manifest_with("tokenizer.json"), manifest_with("added_tokens.json", "tokenizer.json")
    bare = manifest_with()
    manifests = {"a": host, "b": bare, "evil": more}
    assert agreed_manifest(manifests, owners=("a", "b")) is host and not odd_manifests(manifests, owners=("a", "b"))
    assert agreed_manifest({"a": bare, "evil": more}, owners=("a",)) is more  # who else has a tokenizer?
    for owners in ((), ("a", "evil")):
        with pytest.raises(ModelError, match="nodes a and evil have different models: the list of files beside"):
            agreed_manifest(manifests, owners)
    manifests |= {"c": host}
    assert odd_manifests({**manifests, "d": host}).keys() == {"evil"}


def test_weights_agreement_is_on_the_config_of_most() -> None:
    """Else one node with another config makes nodes that fetch its manifest differ from all others."""
    manifest = manifest_with("tokenizer.json")
    for digest in ("0" * 64, "f" * 64):
        other = replace(manifest, files=(replace(CONFIG, sha256=digest), *manifest.files[1:]))
        assert agreed_manifest({"a": manifest, "b": manifest, "evil": other}) is manifest


def test_weights_source_reads_from_an_offset(tmp_path: Path) -> None:
    """The bytes of the file, in pieces of bounded size."""
    data = bytes(range(256)) * (CHUNK_BYTES * 5 // 2 // 256)
    shapes = bert_shapes()
    weights = safetensors_bytes({**shapes, "zz": (len(data) // 4,)})
    folder = write_model(tmp_path / "m", weights=weights[: len(weights) - len(data)] + data)
    source = ModelSource(folder)
    tensor = source.manifest.tensors[-1]
    assert (tensor.name, tensor.sha256) == ("zz", hashlib.sha256(data).hexdigest())
    pieces = list(source.read([(tensor.sha256, 7), (tensor.sha256, len(data))]))
    assert {index for index, _ in pieces} == {0}
    assert max(len(piece) for _, piece in pieces) == CHUNK_BYTES
    assert b"".join(piece for _, piece in pieces) == data[7:]


@cases("asked", [("0" * 64, 0), (None, 1 << 40)])
def test_weights_source_serves_only_what_it_has(tmp_path: Path, asked: tuple[str | None, int]) -> None:
    """Neither an unknown digest nor an offset behind the end."""
    source = ModelSource(write_model(tmp_path / "m"))
    digest = asked[0] or source.manifest.tensors[0].sha256
    with pytest.raises(IntegrityError):
        next(source.read([(digest, asked[1])]))


def test_weights_offers_are_of_known_runs(tmp_path: Path) -> None:
    """An unknown run is asked for again later; a run without a copy here is not."""
    folder = write_model(tmp_path / "m")
    offers = Offers()
    with pytest.raises(FrameError):
        offers.source(RUN)
    offers.put(RUN, None)
    with pytest.raises(ModelError):
        offers.source(RUN)
    offers.put(RUN, folder)
    source = offers.source(RUN)
    assert offers.source(RUN) is source
    offers.put("another", folder)
    assert offers.source("another") is source, "hashed once"
    with pytest.raises(FrameError):
        offers.source(RUN)
    (folder / "model.safetensors").write_bytes(safetensors_bytes({**bert_shapes(), "zz": (1,)}, fill=1))
    assert offers.source("another").manifest.sha256 != source.manifest.sha256, "what is in the folder now"
    offers.drop("another")
    with pytest.raises(FrameError):
        offers.source("another")
