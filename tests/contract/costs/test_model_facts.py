"""Tests of ``ringtune.costs.model_facts``: model facts, own weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ringtune.costs.memory_estimate import node_memory
from ringtune.costs.model_facts import check_job, computed_token_bytes, model_facts
from ringtune.costs.profile import NodeFacts
from ringtune.errors import IntegrityError, JobError, ModelError
from ringtune.job.job import Job, Model, job_of_user
from ringtune.models.families import FAMILIES
from ringtune.models.family import CAUSAL_LM
from ringtune.models.result_files import adapter_result, model_result
from tests.support.cases import cases
from tests.support.model_folder import BLOCK_WEIGHTS, CONFIG, OWNER_WEIGHTS, bert_shapes, safetensors_bytes, write_model
from tests.support.plans import make_plan
from tests.support.profiles import node

JOB = Job(model=Model(path="m")).with_overrides({"train.max_length": 32})
SHORT = JOB.with_overrides({"train.max_length": 16})
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


def test_memory_of_own_weights_is_weights_gradients_and_moments(tmp_path: Path) -> None:
    """Two blocks with AdamW: what trains is there four times, what is frozen once, and more is kept for backward."""
    full = JOB.with_overrides({"adapter.config": "full"})
    facts = model_facts(write_model(tmp_path), full)
    plan = make_plan([("a", 0, 1), ("b", 1, 3)], ["a"], num_blocks=3, hidden_size=8, method="all")
    token_bytes = computed_token_bytes(facts, full)
    assert token_bytes == 4 * (4 + 2 + 3 + 2 * 2) * 8
    parts = node_memory(plan, "b", facts, optimizer="adamw", activation_token_bytes=token_bytes).parts()
    assert parts["weights"] == 2 * facts.block_bytes
    assert parts["adapters"] + parts["optimizer"] == 2 * (1 + 1 + 2) * facts.adapter_block_bytes


def test_model_facts_are_in_the_compute_dtype(tmp_path: Path) -> None:
    """A file in half precision is computed in what the job says."""
    write_model(tmp_path, weights=safetensors_bytes(bert_shapes(), dtype="F16"))
    single = model_facts(tmp_path, JOB)
    double = model_facts(tmp_path, JOB.with_overrides({"model.dtype": "float64"}))
    assert single.block_bytes == 4 * BLOCK_WEIGHTS
    for name in ("block_bytes", "embedding_bytes", "head_bytes", "head_class_bytes", "adapter_block_bytes"):
        assert getattr(double, name) == 2 * getattr(single, name)


def test_model_facts_digest_does_not_depend_on_path_or_prefix(tmp_path: Path) -> None:
    """Copies of a model agree, wherever they are."""
    first = model_facts(write_model(tmp_path / "a"), JOB)
    assert model_facts(write_model(tmp_path / "b"), JOB) == first
    prefixed = write_model(tmp_path / "c", weights=safetensors_bytes(bert_shapes(prefix="bert.")))
    assert model_facts(prefixed, JOB).digest == first.digest


@cases(
    ("config", "weights"),
    [
        ({"layer_norm_eps": 1e-5}, None),
        ({}, safetensors_bytes(bert_shapes(), dtype="F16")),
        ({}, safetensors_bytes(bert_shapes(), fill=1)),
        ({}, safetensors_bytes(bert_shapes())[:-1] + b"\1"),
        ({}, safetensors_bytes(bert_shapes(pooler=False))),
    ],
)
def test_model_facts_digest_tells_models_apart(tmp_path: Path, config: dict[str, Any], weights: bytes | None) -> None:
    """Another config, other types, other values or one of them, or other tensors: another digest."""
    first = model_facts(write_model(tmp_path / "a"), JOB)
    assert model_facts(write_model(tmp_path / "b", config=config, weights=weights), JOB).digest != first.digest


@cases(
    ("overrides", "message"),
    [
        ({"train.max_length": 33}, "train.max_length is 33, the model takes 32 tokens at most; lower it"),
        ({"privacy.private_blocks": 3}, "privacy.private_blocks is 3, the model has 3 blocks"),
    ],
)
def test_model_facts_refuse_a_job_that_the_model_cannot_do(
    tmp_path: Path, overrides: dict[str, object], message: str
) -> None:
    """Both numbers and the remedy."""
    with pytest.raises(JobError, match=message):
        model_facts(write_model(tmp_path), JOB.with_overrides(overrides))


def test_model_facts_refuse_damaged_weights(tmp_path: Path) -> None:
    """A copy that was cut off is an integrity error, not a missing tensor."""
    weights = safetensors_bytes(bert_shapes())
    with pytest.raises(IntegrityError, match="its tensors need"):
        model_facts(write_model(tmp_path, weights=weights[:-1]), JOB)


def test_model_facts_read_headers_only(tmp_path: Path) -> None:
    """A config that claims a giant vocabulary is refused by its shape; nothing is allocated for it."""
    huge = json.dumps({**CONFIG, "vocab_size": 10**12})
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(huge)
    with pytest.raises(ModelError, match="means \\(1000000000000, 8\\)"):
        model_facts(tmp_path, JOB)


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


def test_model_facts_name_a_missing_decoder(tmp_path: Path) -> None:
    """A base model can be classified with, but has nothing to speak with."""
    folder = _write_llama(tmp_path, decoder=False)
    assert model_facts(folder, SHORT).head_token_logits == 0
    with pytest.raises(ModelError, match=r"no tensor 'lm_head\.weight'"):
        model_facts(folder, SHORT.with_overrides({"model.task": CAUSAL_LM}))


@cases(
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
        model_facts(_write_llama(tmp_path, **config), SHORT)
    assert message.replace("intermediate_size", "config.json means (13, 8)") in str(caught.value)


@cases(
    ("model_type", "task", "families"),
    [("bert", "causal-lm", "gpt2, llama, mistral"), ("llama", "image-classification", "vit"), ("vit", "causal-lm", "")],
)
def test_check_job_lists_what_is_supported(model_type: str, task: str, families: str) -> None:
    """A head that a family doesn't have: its own tasks, and who has it."""
    family = FAMILIES[model_type]
    config = {"model_type": model_type, **{key: spec.default for key, spec in family.config_keys.items()}}
    with pytest.raises(ModelError, match="has no head for") as caught:
        check_job(SHORT.with_overrides({"model.task": task}), config)
    assert ", ".join(family.tasks) in str(caught.value)
    assert families in str(caught.value)


def test_model_facts_of_full_parameters_count_each_tensor_in_its_unit(tmp_path: Path) -> None:
    """All of a block trains, all of the embedding; a new head is that of any job, and nothing is frozen."""
    folder = write_model(tmp_path)
    plain, facts = model_facts(folder, SHORT), model_facts(folder, HIFT)
    assert facts.adapter_block_bytes == 4 * BLOCK_WEIGHTS
    assert facts.embedding_train_bytes == 4 * (OWNER_WEIGHTS - (8 * 8 + 8)), "nobody hosts the pooler"
    assert facts.token_table_bytes == 4 * 20 * 8
    assert (facts.block_bytes, facts.embedding_bytes, facts.is_tied) == (0, 0, False)
    assert (facts.head_bytes, facts.head_class_bytes) == (plain.head_bytes, plain.head_class_bytes)
    assert facts.digest == plain.digest


HIFT = Job.from_tables({"model": {"path": "m"}, "train": {"method": "hift", "max_length": 16}})


@cases("tied", [True, False])
def test_model_facts_of_full_parameters_give_a_decoder_to_its_unit(tmp_path: Path, tied: bool) -> None:
    """A tied decoder is the token table; one of its own belongs to the head, as the last norm always does."""
    folder = _write_llama(tmp_path, tie_word_embeddings=tied)
    facts = model_facts(folder, HIFT.with_overrides({"model.task": CAUSAL_LM}))
    table = 4 * 20 * 8
    assert (facts.embedding_train_bytes, facts.token_table_bytes) == (table, table)
    assert facts.head_bytes == 4 * 8 + (0 if tied else table)
    assert facts.is_tied is tied


def test_model_facts_have_the_sizes_of_the_adapters_that_users_chose(tmp_path: Path) -> None:
    """As those of a job with that adapter; the matrices beside which any kind stands count once, in float32."""
    choice = {"anna": "linear", "ben": "mlp[hidden=4,attn_matrices=['k']]", "carl": "linear"}
    offload = {"mode": "auto", "users": "alone", "adapters": choice}
    job = Job.from_tables({**SHORT.to_tables(), "adapter": {"config": "lora[r=2]"}, "offload": offload})
    facts = model_facts(write_model(tmp_path), job)
    assert [kind.users for kind in facts.kinds] == [("anna", "carl"), ("ben",)]
    for kind in facts.kinds:
        own_job = job_of_user(job, kind.users[0])
        own = model_facts(tmp_path, own_job)
        assert not own.kinds
        assert kind.adapter_block_bytes == own.adapter_block_bytes
        assert kind.pair_token_bytes == own.pair_token_bytes > 0
        more = computed_token_bytes(own, own_job) - computed_token_bytes(facts, job)
        assert kind.more_activation_token_bytes == max(0.0, more)
    assert facts.beside_block_bytes == 3 * 8 * 8 * 4
    assert facts.digest == model_facts(tmp_path, SHORT).digest
    facts_of_node = dataclasses.replace(node(make_plan([("a", 0, 4)], ["a"]), "a"), model=facts)
    assert NodeFacts.from_message(json.loads(json.dumps(facts_of_node.to_message()))) == facts_of_node


def test_result_of_full_parameters_is_a_whole_model(tmp_path: Path) -> None:
    """Config and weights have to be there; an index stands for weights in several files; a node needs weights only."""
    result = model_result()
    assert (result.folder, result.is_model, result.loaded) == ("model", True, ("model.safetensors",))
    assert result.missing_in(tmp_path) == "config.json"
    (tmp_path / "config.json").touch()
    assert result.missing_in(tmp_path) == "model.safetensors"
    (tmp_path / "model.safetensors.index.json").touch()
    assert result.missing_in(tmp_path) == ""
    adapter = adapter_result("sequence-classification", "lora")
    assert (adapter.folder, adapter.is_model, adapter.loaded) == ("adapter", False, adapter.files)
