"""Families, tasks and folders with several files: what planning reads of them without torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ringtune.errors import IntegrityError, JobError, ModelError
from ringtune.jobs.job import Job, Model
from ringtune.models.families import FAMILIES
from ringtune.models.family import CAUSAL_LM, LM_HEAD, TASKS
from ringtune.models.folder import base_tensors, check_job, model_facts, read_config
from tests.support.model_folder import bert_shapes, safetensors_bytes, write_model

JOB = Job(model=Model(path="m")).with_overrides({"train.max_length": 16})
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 20,
    "max_position_embeddings": 32,
}


def _llama_shapes(*, decoder: bool) -> dict[str, tuple[int, ...]]:
    """Written out independently of the code under test."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (20, 8), "model.norm.weight": (8,)}
    for block in range(2):
        at = f"model.layers.{block}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (8, 8) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (4, 8) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (12, 8) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (8, 12)}
        shapes |= {f"{at}.{name}.weight": (8,) for name in ("input_layernorm", "post_attention_layernorm")}
    return shapes | ({"lm_head.weight": (20, 8)} if decoder else {})


def _write_llama(folder: Path, *, decoder: bool = True, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(_llama_shapes(decoder=decoder)))
    return folder


def _lm_job() -> Job:
    return JOB.with_overrides({"model.task": CAUSAL_LM})


def test_families_name_every_task_at_least_once() -> None:
    """A task without a model would be a promise that nobody keeps."""
    assert {task for family in FAMILIES.values() for task in family.tasks} == set(TASKS)
    assert list(FAMILIES) == [
        "bert", "roberta", "xlm-roberta", "electra", "distilbert", "gpt2", "llama", "mistral", "vit",
    ]  # fmt: skip


def test_families_of_defaults_have_sizes() -> None:
    """A config that leaves every key out means the library's default model."""
    sizes = {}
    for name, family in FAMILIES.items():
        defaults = {key: spec.default for key, spec in family.config_keys.items()}
        assert family.problem(defaults) == ""
        found = family.sizes(defaults)
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
    }


def test_model_facts_of_a_language_model_count_a_decoder_of_its_own(tmp_path: Path) -> None:
    """An untied decoder is what only an owner holds; a tied one is the token table; neither is trained."""
    apart = model_facts(_write_llama(tmp_path / "a"), _lm_job())
    tied = model_facts(_write_llama(tmp_path / "b", tie_word_embeddings=True), _lm_job())
    assert apart.embedding_bytes - tied.embedding_bytes == 4 * 20 * 8
    assert tied.embedding_bytes == 4 * (20 * 8 + 8)
    for facts in (apart, tied):
        assert (facts.head_bytes, facts.head_class_bytes, facts.head_token_logits) == (0, 0, 20)
        inside = [shape for name, shape in _llama_shapes(decoder=False).items() if "layers.0." in name]
        assert facts.block_bytes == 4 * sum(math.prod(shape) for shape in inside)


def test_model_facts_name_a_missing_decoder(tmp_path: Path) -> None:
    """A base model can be classified with, but has nothing to speak with."""
    folder = _write_llama(tmp_path, decoder=False)
    assert model_facts(folder, JOB).head_token_logits == 0
    with pytest.raises(ModelError, match=f"no tensor '{LM_HEAD}'"):
        model_facts(folder, _lm_job())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_key_value_heads": 3}, "4 heads can't share 3 key-value heads evenly"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling of type 'dynamic' is not supported"),
        ({"head_dim": "2"}, "head_dim has to be int, but is str '2'"),
        ({"intermediate_size": 13}, "intermediate_size"),
        ({"num_key_value_heads": None}, "has shape (4, 8), config.json means (8, 8)"),
        ({"head_dim": 4}, "has shape (8, 8), config.json means (16, 8)"),
        ({"attention_bias": True}, "has no tensor 'layers.0.self_attn.q_proj.bias'"),
        ({"num_hidden_layers": 3}, "has no tensor 'layers.2.self_attn.q_proj.weight'"),
    ],
)
def test_model_facts_refuse_a_config_that_disagrees(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    """Whatever the config claims has to be in the tensors."""
    with pytest.raises(ModelError) as caught:
        model_facts(_write_llama(tmp_path, **config), JOB)
    assert message.replace("intermediate_size", "config.json means (13, 8)") in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "task", "families"),
    [("bert", "causal-lm", "gpt2, llama, mistral"), ("llama", "image-classification", "vit"), ("vit", "causal-lm", "")],
)
def test_check_job_lists_what_is_supported(model_type: str, task: str, families: str) -> None:
    """A head that a family doesn't have: its own tasks, and who has it."""
    family = FAMILIES[model_type]
    config = {"model_type": model_type, **{key: spec.default for key, spec in family.config_keys.items()}}
    with pytest.raises(ModelError, match="has no head for") as caught:
        check_job(JOB.with_overrides({"model.task": task}), config)
    assert ", ".join(family.tasks) in str(caught.value)
    assert families in str(caught.value)


def test_check_job_asks_for_all_tokens_of_an_image() -> None:
    """An image can't be cut as a text can."""
    family = FAMILIES["vit"]
    config = {"model_type": "vit", **{key: spec.default for key, spec in family.config_keys.items()}}
    job = JOB.with_overrides({"model.task": "image-classification"})
    with pytest.raises(JobError, match="an image of this model has 197 tokens; set it to 197"):
        check_job(job, config)
    check_job(job.with_overrides({"train.max_length": 197}), config)


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


@pytest.mark.parametrize(
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


def test_base_tensors_know_old_layer_norm_names(tmp_path: Path) -> None:
    """The first BERT files say gamma and beta."""
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): shape
        for name, shape in bert_shapes(prefix="bert.").items()
    }
    folder = write_model(tmp_path, weights=safetensors_bytes(old))
    assert set(base_tensors(folder, read_config(folder))) == set(bert_shapes())


def test_read_config_keeps_a_null_that_means_something(tmp_path: Path) -> None:
    """Mistral without a window is not Mistral with the default one."""
    for value, expected in ((None, None), (7, 7)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "sliding_window": value}))
        assert read_config(tmp_path)["sliding_window"] == expected
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    assert read_config(tmp_path)["sliding_window"] == 4096
