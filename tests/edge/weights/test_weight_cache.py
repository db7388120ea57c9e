"""The cache of weights on disk: whole files or none, resumable, inside its folder, for one process at a time."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from edge.model.tensor_files import SafetensorsFiles
from edge.weights.weight_cache import CheckedFile, ModelCache, file_header, writing
from ringtune.errors import CapacityError, DeadlineError, IntegrityError, InterruptedRunError, UsageError
from ringtune.models.families import BERT
from ringtune.models.weights_by_digest import FileEntry, ModelManifest, ModelSource, TensorEntry
from ringtune.storage.tensor_files import read_safetensors_header
from tests.support.processes import running_python
from tests.support.weights_parts import write_bert

CONTENT = bytes(range(200))
ENTRY = TensorEntry(name="block.weight", dtype="F32", shape=(5, 10), sha256=hashlib.sha256(CONTENT).hexdigest())
CONFIG = FileEntry(name="config.json", nbytes=2, sha256=hashlib.sha256(b"{}").hexdigest())
MANIFEST = ModelManifest(tensors=(ENTRY,), files=(CONFIG,))


def tensor_file(folder: Path) -> CheckedFile:
    """The file of ``ENTRY``, taken up where it is."""
    file = CheckedFile(
        folder / "x.safetensors", what="tensor x", sha256=ENTRY.sha256, nbytes=200, header=file_header(ENTRY)
    )
    file.resume()
    return file


def test_weights_file_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Another process' object sees the bytes so far; the complete file is a safetensors file of one tensor."""
    first = tensor_file(tmp_path)
    first.write(CONTENT[:70], "a")
    second = tensor_file(tmp_path)
    assert second.offset == 70
    assert not second.is_complete()
    second.write(CONTENT[70:], "a")
    second.finish()
    assert second.is_complete()
    assert b"".join(second.content()) == CONTENT
    info = read_safetensors_header(second.path)["block.weight"]
    assert (info.dtype, info.shape, info.nbytes, info.offset % 64) == ("F32", (5, 10), 200, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_weights_file_with_another_digest_never_gets_its_name(tmp_path: Path) -> None:
    """It is dropped and named; so is a partial file that does not begin as it has to."""
    file = tensor_file(tmp_path)
    file.write(bytes(200), "a")
    with pytest.raises(IntegrityError, match="tensor x"):
        file.finish()
    assert not list(tmp_path.iterdir())
    with pytest.raises(IntegrityError, match="more arrived"):
        file.write(bytes(201), "a")
    (tmp_path / "x.safetensors.part").write_bytes(b"something else")
    assert tensor_file(tmp_path).offset == 0
    (tmp_path / "x.safetensors.part").write_bytes(file_header(ENTRY) + bytes(201))
    assert tensor_file(tmp_path).offset == 0


def test_weights_file_damaged_on_disk_is_removed(tmp_path: Path) -> None:
    """Every use checks the digest again: a torn or changed file counts as missing."""
    for damage, at in (("flip", -1), ("header", 12), ("cut", 0)):
        file = tensor_file(tmp_path)
        file.write(CONTENT, "a")
        file.finish()
        data = bytearray(file.path.read_bytes())
        data[at] ^= damage != "cut"
        file.path.write_bytes(data[:-1] if damage == "cut" else data)
        assert not file.is_complete(), damage
        assert not file.path.exists(), damage


def test_weights_cache_that_is_full_or_closed_says_so(tmp_path: Path) -> None:
    """A full disk keeps what is there; both errors say what to do."""
    with pytest.raises(CapacityError, match="--cache"), writing(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--cache"):
        ModelCache(tmp_path / "file" / "cache", MANIFEST, "m")


def test_weights_cache_refuses_to_begin_what_does_not_fit(tmp_path: Path) -> None:
    """With both numbers."""
    cache = ModelCache(tmp_path, MANIFEST, "m")
    huge = CheckedFile(tmp_path / "x", what="tensor x", sha256=ENTRY.sha256, nbytes=1 << 60)
    with pytest.raises(CapacityError, match=r"need .* are free"):
        cache.require_room([huge])


def test_weights_cache_follows_no_link_out_of_it(tmp_path: Path) -> None:
    """A link that somebody put into the cache is not written through."""
    root, outside = tmp_path / "cache", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "models").symlink_to(outside)
    with pytest.raises(IntegrityError, match="leads out"):
        ModelCache(root, MANIFEST, "m")
    assert not list(outside.iterdir())


def test_weights_cache_publishes_complete_tensors_only(tmp_path: Path) -> None:
    """The loader sees a model folder with an index that grows."""
    source = ModelSource(write_bert(tmp_path / "m"))
    cache = ModelCache(tmp_path / "cache", source.manifest, "m")
    seen = []
    for entry in source.manifest.tensors[:2]:
        file = cache.tensor(entry)
        for _, data in source.read([(entry.sha256, 0)]):
            file.write(data, "a")
        file.finish()
        partial = cache.tensor(source.manifest.tensors[2])
        partial.write(b"x", "a")
        with SafetensorsFiles(cache.publish(())) as weights:
            seen.append([weights.find(tensor.name, BERT) for tensor in source.manifest.tensors])
            assert tuple(weights.read(entry.name).shape) == entry.shape
    names = [entry.name for entry in source.manifest.tensors]
    assert seen == [[name if index <= turn else None for index, name in enumerate(names)] for turn in (0, 1)]


_HOLD = f"""
import sys, threading, time
from pathlib import Path
from edge.weights.weight_cache import ModelCache
from ringtune.models.weights_by_digest import FileEntry, ModelManifest, TensorEntry
cache = ModelCache(Path(sys.argv[1]), {MANIFEST!r}, "m")
with cache.locked(deadline_s=time.monotonic() + 9, stop=threading.Event()):
    print("locked", flush=True)
    threading.Event().wait(600.0)
"""


def test_weights_cache_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    """Others wait until their deadline or until they are stopped; a killed process or a finished fetch has none."""
    cache, stop = ModelCache(tmp_path, MANIFEST, "m"), threading.Event()
    with running_python(_HOLD, tmp_path):
        with pytest.raises(DeadlineError, match="--cache"), cache.locked(deadline_s=time.monotonic() + 0.2, stop=stop):
            pass
        stop.set()
        with pytest.raises(InterruptedRunError), cache.locked(deadline_s=time.monotonic() + 9, stop=stop):
            pass
    for _ in range(2):
        with cache.locked(deadline_s=0.0, stop=threading.Event()):
            pass


def test_weights_cache_takes_no_path_from_a_name(tmp_path: Path) -> None:
    """A model's name that is not harmless is replaced."""
    for name in ("../../evil", "a/b", "", ".", "..", "x" * 200, "a\0b", "-rf"):
        weights = ModelCache(tmp_path, MANIFEST, name).weights
        assert weights == tmp_path / "models" / MANIFEST.sha256 / "weights" / "model", name
    assert ModelCache(tmp_path, MANIFEST, "all-MiniLM-L6-v2").weights.name == "all-MiniLM-L6-v2"
