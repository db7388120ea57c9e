"""Families, tasks and folders with several files: what planning reads of them without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringtune.costs.model_facts import model_facts
from ringtune.errors import IntegrityError, ModelError
from ringtune.job.job import Job, Model
from ringtune.models.families import DESCRIBED
from ringtune.models.folder import base_tensors, read_config
from tests.support.cases import cases
from tests.support.model_folder import bert_shapes, safetensors_bytes, write_model

JOB = Job(model=Model(path="m")).with_overrides({"train.max_length": 16})


def test_families_of_defaults_have_sizes() -> None:
    """A config that leaves every key out means the library's default model."""
    sizes = {}
    for name, family in DESCRIBED.items():
        defaults = {key: spec.default for key, spec in family.config_keys.items()}
        assert family.problem(defaults) == ""
        found = family.dimensions(defaults)
        sizes[name] = (found.num_blocks, found.hidden, found.inner, found.longest)
    assert sizes == {
        "bert": (12, 768, 3072, 512),
        "roberta": (12, 768, 3072, 510),
        "xlm-roberta": (12, 768, 3072, 510),
        "electra": (12, 256, 1024, 512),
        "distilbert": (6, 768, 3072, 512),
        "gpt2": (12, 768, 3072, 1024),
        "llama": (32, 4096, 11008, 2048),
        "mistral": (32, 4096, 14336, 131072),
        "vit": (12, 768, 3072, 197),
        "qwen2": (32, 4096, 22016, 32768),
        "qwen3": (32, 4096, 22016, 32768),
        "gemma": (28, 3072, 24576, 8192),
        "gemma2": (26, 2304, 9216, 8192),
        "gemma3_text": (26, 2304, 9216, 131072),
        "smollm3": (36, 2048, 11008, 32768),
    }


def _shard(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    """The tiny BERT in two files."""
    write_model(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(bert_shapes())
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        (folder / file).write_bytes(safetensors_bytes({name: bert_shapes()[name] for name in part}))
    complete = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**complete, **(weight_map or {})}}))
    return folder


def test_base_tensors_of_several_files_are_those_of_one(tmp_path: Path) -> None:
    """Where a tensor lies changes neither sizes nor the digest."""
    one, two = write_model(tmp_path / "one"), _shard(tmp_path / "two")
    tensors = base_tensors(two, read_config(two))
    assert {name: stored.shape for name, stored in tensors.items()} == bert_shapes()
    assert {stored.path.name for stored in tensors.values()} == {"one.safetensors", "two.safetensors"}
    assert model_facts(one, JOB) == model_facts(two, JOB)


@cases(
    ("weight_map", "message"),
    [
        ({"embeddings.LayerNorm.bias": "../secret"}, "names the file '../secret', which is not in the folder"),
        ({"embeddings.LayerNorm.bias": "/etc/passwd"}, "which is not in the folder"),
        ({"embeddings.LayerNorm.bias": ".."}, "which is not in the folder"),
        ({"embeddings.LayerNorm.bias": "three.safetensors"}, "can't read"),
        ({"extra": "one.safetensors"}, "has no tensor 'extra'"),
    ],
)
def test_base_tensors_do_not_trust_the_index(tmp_path: Path, weight_map: dict[str, str], message: str) -> None:
    """It may name files of its folder only, and what it says has to be in them."""
    folder = _shard(tmp_path, weight_map)
    with pytest.raises(ModelError, match=message):
        base_tensors(folder, read_config(folder))


def test_base_tensors_name_the_damaged_file(tmp_path: Path) -> None:
    """One of several files was cut off."""
    folder = _shard(tmp_path)
    content = (folder / "two.safetensors").read_bytes()
    (folder / "two.safetensors").write_bytes(content[:-8])
    with pytest.raises(IntegrityError, match=r"two\.safetensors"):
        base_tensors(folder, read_config(folder))
