"""Every key of ``config.json``: carried out as eager transformers does, refused by name, or without a number."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig

from edge.data.tokens import Batch
from edge.model.skeleton import build_skeleton
from ringtune.errors import ModelError
from ringtune.models.families import FAMILIES
from ringtune.models.family import CAUSAL_LM, NO_NUMBER
from ringtune.models.folder import read_config
from ringtune.models.generic_decoders import _KEYS
from tests.support import offload
from tests.support.plain_rows import Ours, Plain
from tests.support.tiny_families import (
    DECODERS,
    ENCODERS,
    HIDDEN,
    IMAGE_SIZE,
    MODEL_TYPES,
    VERSION,
    config_of,
    sizes_of,
    write_family,
)

_SINCE_5 = {
    **dict.fromkeys(MODEL_TYPES, ("tie_last_hidden_states",)),
    **dict.fromkeys(DECODERS[1:], ("rope_parameters", "per_layer_config", "tie_last_hidden_states")),
}
"""Keys that only configuration classes of transformers 5.24 know, beside ``use_bidirectional_attention`` of Gemma."""
_ROPE_FORMS = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
_GEMMA_SINCE_5 = dict.fromkeys(("gemma", "gemma2"), ("use_bidirectional_attention",))
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}
_OTHER: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "n_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "hidden_act": "tanh",
    "hidden_activation": "tanh",
    "activation": "relu",
    "activation_function": "silu",
    "hidden_dropout_prob": 0.3,
    "attention_probs_dropout_prob": 0.3,
    "attention_dropout": 0.3,
    "dropout": 0.3,
    "resid_pdrop": 0.3,
    "embd_pdrop": 0.3,
    "attn_pdrop": 0.3,
    "max_position_embeddings": 48,
    "n_positions": 48,
    "type_vocab_size": 3,
    "initializer_range": 0.2,
    "layer_norm_eps": 0.1,
    "layer_norm_epsilon": 0.1,
    "rms_norm_eps": 0.1,
    "pad_token_id": 3,
    "embedding_size": 24,
    "dim": 2 * HIDDEN,
    "n_embd": 2 * HIDDEN,
    "n_heads": 2,
    "n_head": 2,
    "hidden_dim": 40,
    "n_inner": 40,
    "sinusoidal_pos_embds": True,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "rope_theta": 77.0,
    "rope_local_base_freq": 55.0,
    "rope_scaling": _YARN,
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 3,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "sliding_window_pattern": 3,
    "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 40,
    "final_logit_softcapping": 1.5,
    "attn_logit_softcapping": 1.5,
    "no_rope_layers": [1, 0, 0],
    "no_rope_layer_interval": 3,
    "image_size": 2 * IMAGE_SIZE,
    "patch_size": 6,
    "num_channels": 2,
    "qkv_bias": False,
}
"""Key that is carried out -> another value than in the tiny models."""
_BESIDE = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "no_rope_layer_interval": 2}
"""Values of the tiny models that other keys need to say anything."""
_ALONE = {"num_hidden_layers", "n_layers", "n_layer", "use_sliding_window"}
"""Keys that change alone: the other values of further keys need these as they are."""
_MAY_BE_SILENT = {key for key in _OTHER if "dropout" in key or key.endswith("pdrop")}
_MAY_BE_SILENT |= {"pad_token_id", "max_position_embeddings"}
"""Keys that may change no row: dropout is that of the job, padding is masked, rotary positions have no table."""
_NOT_ALONE = {"model_type", "pooler_output_size"}
"""Keys without a number that can have no other value: the family, and the size of a pooler that is in the file."""
_ANY: dict[str, Any] = {
    **dict.fromkeys(("attn_implementation", "_attn_implementation", "_attn_implementation_internal"), "eager"),
    "hidden_activation": "relu",
    "pooler_act": "relu",
    "classifier_dropout": 0.5,
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "torch_dtype": "float16",
    "dtype": "float16",
    "architectures": ["Other"],
    "label2id": {"a": 0, "b": 1, "c": 2},
    "num_return_sequences": 1,
    "problem_type": "regression",
    "temperature": 3.0,
    "early_stopping": True,
}
"""Key without a number -> another value than any library writes; 3 for all others."""


def _library_keys(model_type: str) -> set[str]:
    """Every key that the configuration class of the installed transformers knows."""
    kind: Any = CONFIG_MAPPING[model_type]
    arguments = {*inspect.signature(kind.__init__).parameters} - {"self", "kwargs"}
    library = sys.modules.get("adapters.wrappers.configuration")  # if it is loaded, it has added its own
    added = getattr(library, "CONFIG_CLASS_KEYS_MAPPING", {}).get(model_type, {})
    aliases = kind.attribute_map.keys() - added.keys()
    keys: set[str] = arguments | kind().to_dict().keys() | PretrainedConfig().to_dict().keys() | aliases
    return keys


def test_every_key_of_the_configuration_class_is_in_one_table() -> None:
    """A key in none would be refused though the library writes it; one in two would mean two things."""
    for model_type in MODEL_TYPES:
        family = FAMILIES[model_type]
        tables = [
            *(family.config_keys.keys(), family.refused.keys(), family.no_number, family.aliases.keys()),
            NO_NUMBER - family.config_keys.keys(),
        ]
        since_5 = {*_SINCE_5[model_type], *_GEMMA_SINCE_5.get(model_type, ())} - {"rope_parameters"}
        known = (_library_keys(model_type) | since_5) - {"rope_parameters"}
        found = {key: sum(key in table for table in tables) for key in known}
        assert found == dict.fromkeys(known, 1), model_type


def _task(model_type: str) -> str:
    """The task whose head is the model's own, if it has one."""
    tasks = FAMILIES[model_type].tasks
    return CAUSAL_LM if CAUSAL_LM in tasks else tasks[0]


def _write(folder: Path, model_type: str, **config: Any) -> Path:
    """A model of three blocks with these values, which stand in its ``config.json`` as they are given."""
    keys = FAMILIES[model_type].config_keys
    config = {key: value for key, value in _BESIDE.items() if key in keys} | config
    write_family(folder, model_type, num_blocks=3, with_decoder=_task(model_type) == CAUSAL_LM, **config)
    _set(folder, **config)
    return folder


def _set(folder: Path, **config: Any) -> None:
    """Write these values into ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


@functools.cache
def _rows(model_type: str) -> list[tuple[torch.Tensor, float]]:
    """What eager transformers computes of the rows of the model of which no key is changed."""
    with tempfile.TemporaryDirectory() as folder:
        plain, batch = _both(_write(Path(folder), model_type), model_type)[1:]
        return [plain.row(batch, row) for row in range(len(batch.mask))]


def _both(folder: Path, model_type: str) -> tuple[Ours, Plain, Batch]:
    """The model in a folder here and in eager transformers, and rows for it."""
    ours = Ours(folder, _task(model_type))
    return ours, Plain(folder, _task(model_type)), ours.batch()


def _cases() -> Iterator[Any]:
    """Every family with each key that is carried out and may have another value, and with all of them at once."""
    for model_type in MODEL_TYPES:
        own = tuple(key for key, spec in FAMILIES[model_type].config_keys.items() if len(spec.choices) != 1)
        yield pytest.param(
            model_type,
            tuple(key for key in own if key not in _ALONE),
            id=f"{model_type}-all",
            marks=pytest.mark.sampled(2),
        )
        for key in own:
            yield pytest.param(model_type, (key,), id=f"{model_type}-{key}", marks=pytest.mark.sampled(2))


@pytest.mark.parametrize(("model_type", "keys"), [*_cases()])
def test_keys_are_carried_out_as_eager_transformers_does(
    tmp_path: Path, model_type: str, keys: tuple[str, ...]
) -> None:
    """Every key alone, and all together, have another value than in the tiny model: same rows, and not its rows."""
    folder = _write(tmp_path, model_type, **{key: _OTHER[key] for key in keys})
    ours, plain, batch = _both(folder, model_type)
    hidden, losses = ours.last(batch)[0], ours.losses(batch)
    before = _rows(model_type)
    changes = False
    for row in range(len(batch.mask)):
        wanted, loss = plain.row(batch, row)
        assert float((hidden[row][batch.mask[row] == 1] - wanted).norm() / wanted.norm()) < 1e-10
        assert losses[row] == pytest.approx(loss, rel=1e-10)
        changes |= not torch.equal(wanted, before[row][0]) or loss != before[row][1]
    assert changes or set(keys) <= _MAY_BE_SILENT


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:Passing .gradient_checkpointing")
def test_a_key_without_a_number_changes_none(tmp_path: Path, model_type: str) -> None:
    """Nothing of it is read here, and with all of them eager transformers computes the same rows."""
    family, folder = FAMILIES[model_type], _write(tmp_path, model_type)
    ours, plain, batch = _both(folder, model_type)
    config, hidden, losses = read_config(folder), ours.last(batch)[0], ours.losses(batch)
    for key in sorted((family.no_number | NO_NUMBER) - family.config_keys.keys() - _NOT_ALONE):
        _set(folder, **{key: _ANY.get(key, 3)})
        assert read_config(folder) == config, key
    if hasattr(transformers, "TokenizersBackend"):
        return  # transformers 5 refuses a number where it wants a truth value
    plain.read_config_again(folder)
    wanted, loss = plain.row(batch, 0)
    assert float((hidden[0] - wanted).norm() / wanted.norm()) < 1e-10
    assert losses[0] == pytest.approx(loss, rel=1e-10)


def test_keys_that_are_not_carried_out_are_refused_by_name(tmp_path: Path) -> None:
    """Keys of each family, values that a key can't have, and keys that nobody knows; null says nothing."""
    for model_type in MODEL_TYPES:
        family = FAMILIES[model_type]
        wrong: dict[str, Any] = {key: {"1": [1]} for key in family.refused}
        wrong |= {key: 0.5 for key, spec in family.config_keys.items() if spec.choices}
        wrong |= {"embedding_multiplier": 12.0, "logits_scaling": 8, "use_qk_norm": True, "norm_type": "rms"}
        wrong |= {} if "partial_rotary_factor" in family.config_keys else {"partial_rotary_factor": 0.5}
        for key, value in wrong.items():
            require_refused(tmp_path, {"model_type": model_type, key: value}, key)
            (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, key: None}))
            assert read_config(tmp_path)["model_type"] == model_type


_SENSELESS: tuple[Any, ...] = ([], {}, "x", "", True, -1, 0, 2**62, 1.5, math.nan, math.inf, [1], [[]], {"a": 1}, None)
_BUILT: tuple[tuple[str, str, Any], ...] = (
    ("phi3", "hidden_act", "softstep"),
    ("glm4_moe", "n_shared_experts", []),
    ("data2vec-text", "max_position_embeddings", 2**62),
    ("roberta", "max_position_embeddings", 2**31),
    ("gpt_oss", "rope_theta", []),
    ("gpt_neo", "attention_types", "x"),
    ("qwen3", "vocab_size", 2**62),
    ("qwen2_moe", "mlp_only_layers", 1.5),
)
"""Values that only the classes of transformers find senseless, each with an exception of its own, and some others."""


def test_senseless_values_are_refused_by_their_file(tmp_path: Path) -> None:
    """Of every family: what is read is planned with, or it is an error of a model; so is what a class makes of it."""
    draw, refused = random.Random(7), list[str]()
    for model_type, family in FAMILIES.items():
        if family.since > VERSION:
            continue
        made = (
            config_of(model_type) if model_type in MODEL_TYPES else CONFIG_MAPPING[model_type](**sizes_of(model_type))
        )
        values = {**made.to_dict(), "model_type": model_type}
        drawn = draw.sample(
            sorted({*values, *family.config_keys, *itertools.chain(*_KEYS.values())} - {"model_type"}), 10
        )
        for key, value in [(key, draw.choice(_SENSELESS)) for key in drawn] + [
            each[1:] for each in _BUILT if each[0] == model_type
        ]:
            (tmp_path / "config.json").write_text(json.dumps({**values, key: value}))
            try:
                config = read_config(tmp_path)
                assert family.dimensions(config).head_width and family.widths(config)
                if (model_type, key, value) in _BUILT:
                    build_skeleton(tmp_path, offload.job_of(tmp_path, "lora"))
            except ModelError as error:
                refused.append(str(error))
            else:
                assert (model_type, key, value) not in _BUILT
    assert len(refused) > 150 and all("config.json" in words for words in refused)


_ALONE_4: dict[str, Any] = {"hidden_size_per_layer_input": 0}
_E2B: dict[str, Any] = {"hidden_size_per_layer_input": 8}
_NOT_TRUSTED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("phi3", {"hidden_size": None}, "it has none of hidden_size"),
    ("phi3", {"hidden_size": "32"}, "hidden_size is '32', it has to be a whole number"),
    ("phi3", {"num_hidden_layers": 10**9}, "blocks are more than"),
    ("phi3", {"num_key_value_heads": 3}, "4 heads can't share 3"),
    ("phi3", {"rope_scaling": {"rope_type": "dynamic"}}, "depends on the longest text"),
    ("phi3", {"n_layer": 3}, "num_hidden_layers 4 and n_layer 3 are one"),
    ("phi3", {"pad_token_id": "0"}, "pad_token_id is '0', it has to be a whole number"),
    ("phi3", {"tie_word_embeddings": "no"}, "it has to be true or false"),
    ("phi3", {"attn_config": {"kv_n_heads": 0}}, "kv_n_heads is 0, it has to be a whole number above 0"),
    ("phi3", {"expansion_ratio": math.inf}, "expansion_ratio is inf"),
    ("phi3", {"word_embed_proj_dim": [1]}, "word_embed_proj_dim is [1]"),
    ("phi3", {"logits_scaling": "4"}, "logits_scaling is '4', it has to be a number above 0"),
    ("phi3", {"num_local_experts": 1 << 30}, "experts in all blocks are more than"),
    ("phi3", {"auto_map": {"AutoModel": "code.Model"}}, "names code to run"),
    ("phi3", {"_attn_implementation": "owner/kernel"}, "use eager or sdpa"),
    (
        "phi3",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 5e5}}},
        "two bases, 10000.0 and 500000.0",
    ),
    (
        "gemma4_text",
        {**_ALONE_4, "num_kv_shared_layers": 1},
        "transformers computes no model with shared keys and without inputs",
    ),
    ("gemma3", {}, "text_config has to be a table"),
    ("gemma4_text", {**_E2B, "num_kv_shared_layers": 2}, "no block before the last 2 makes keys of full_attention"),
    ("gemma4_text", {**_E2B, "num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, of 4 blocks the first ones"),
    ("gemma4_text", {**_E2B, "num_kv_shared_layers": "2"}, "num_kv_shared_layers is '2', it has to be a whole number"),
    (
        "gemma4_text",
        {**_ALONE_4, "layer_types": ["full_attention"]},
        "layer_types has to name sliding_attention or full_attention",
    ),
    ("gemma3n_text", {"intermediate_size": [48, 48]}, "or one for each block, but is [48, 48]"),
    ("gemma4_text", {**_ALONE_4, "per_layer_config": [1]}, "head_dim has to be a whole number above 0"),
    (
        "gemma4_text",
        {**_ALONE_4, "per_layer_config": {"1": {"head_dim": "8"}}},
        "head_dim has to be a whole number above 0",
    ),
    ("albert", {"inner_group_num": 2}, "inner_group_num is 2: a group of several layers is refused"),
    ("albert", {"num_hidden_groups": 3}, "4 can't be shared by num_hidden_groups 3: each group has as many layers"),
    ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size is refused: a convolution beside block 0"),
    ("deberta-v2", {"pos_att_type": ["c2p", "p2p"]}, "pos_att_type = 'c2p|p2p' is not supported"),
    ("deberta-v2", {"embedding_size": 16}, "embedding_size: not known for model_type 'deberta-v2'"),
    ("deberta-v2", {"relative_attention": False}, "pos_att_type without relative_attention"),
    ("deberta-v2", {"norm_rel_ebd": 1}, "norm_rel_ebd has to be str"),
    ("deberta", {"talking_head": True}, "talking_head: not known for model_type 'deberta'"),
    ("deberta", {"max_relative_positions": -2}, "max_relative_positions is -2"),
    ("mpnet", {"relative_attention_num_buckets": 16}, "it has to be at least 32"),
    ("mpnet", {"is_decoder": True}, "a decoder attends only backwards"),
    ("camembert", {"position_embedding_type": "relative_key"}, "'relative_key' is not supported"),
    ("ernie", {"hidden_size": 30}, "hidden_size 30 can't be shared by 4 heads"),
    ("modernbert", {"num_hidden_layers": "4"}, "num_hidden_layers has to be int"),
    ("modernbert", {"layer_types": ["full_attention"] * 4}, "layer_types: not known"),
    ("modernbert", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling: not known"),
    ("modernbert", {"auto_map": {"AutoModel": "code.Model"}}, "names code to run"),
    ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling = 'max' is not supported"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has to name 4 layers"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types has to name 4 layers"),
    (
        "qwen2",
        {"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False},
        "there is no sliding_window",
    ),
    ("qwen2", {"layer_types": "full_attention"}, "layer_types has to be list"),
    ("qwen3", {"num_key_value_heads": 3}, "4 heads can't share 3"),
    ("qwen3", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling of type 'dynamic'"),
    ("gemma", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling is refused"),
    ("gemma", {"pad_token_id": -1}, "pad_token_id"),
    ("gemma2", {"sliding_window": None}, "sliding_window can't be null"),
    ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "attend backwards only"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has to have 4 values"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ("smollm3", {"pad_token_id": 128004}, "is no row of a table"),
    ("qwen3", {"auto_map": {"AutoModel": "code.Model"}}, "names code to run"),
)
"""Families with values that do not fit together, would change the computation, or have no size to plan with."""


def test_config_of_a_family_is_not_trusted(tmp_path: Path) -> None:
    """What planning needs is checked, with the key; code is never loaded."""
    config = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"vocab_size": 300, "pad_token_id": 0}
    for model_type, values, message in _NOT_TRUSTED:
        sizes = sizes_of(model_type) if model_type in ENCODERS else config
        require_refused(tmp_path, {"model_type": model_type, **sizes, **values}, message)


def require_refused(folder: Path, config: dict[str, Any], message: str) -> None:
    """Read a ``config.json`` that is refused."""
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        read_config(folder)
    assert message in str(caught.value), config


def _since_5(values: dict[str, Any], model_type: str) -> dict[str, Any]:
    """The same config as transformers 5 writes it: rotary positions in one table, or one for each type of layer."""
    old = {key: values.pop(key) for key in _ROPE_FORMS if key in values}
    full = {"rope_type": "default", **(old.get("rope_scaling") or {}), "rope_theta": old["rope_theta"]}
    local = {"rope_type": "default", "rope_theta": old.get("rope_local_base_freq")}
    by_layer = {"full_attention": full, "sliding_attention": local}
    return values | {"rope_parameters": by_layer if model_type == "gemma3_text" else full}


def test_rotary_positions_of_transformers_5_are_those_of_4(tmp_path: Path) -> None:
    """Both forms give one config, or both are refused by the same name."""
    families = [name for name in MODEL_TYPES if "rope_theta" in FAMILIES[name].config_keys]
    scalings = (None, _YARN, {**_LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0})
    for model_type, scaling in itertools.product(families, scalings):
        config: dict[str, Any] = {"model_type": model_type, "rope_theta": 5e5, "rope_scaling": scaling}
        config |= {"rope_local_base_freq": 77.0} if model_type == "gemma3_text" else {}
        forms = (config, _since_5(dict(config), model_type))
        if scaling and "rope_scaling" in FAMILIES[model_type].refused:
            for values in forms:
                require_refused(tmp_path, values, "rope_scaling is refused")
            continue
        read = []
        for values in forms:
            (tmp_path / "config.json").write_text(json.dumps(values))
            read.append(read_config(tmp_path))
        assert read[0] == read[1], (model_type, scaling)
        found = [read[0].get(key) for key in ("rope_theta", "rope_scaling", "rope_local_base_freq")]
        assert found == [5e5, scaling, config.get("rope_local_base_freq")], (model_type, scaling)


def test_forms_of_rotary_positions_that_are_refused(tmp_path: Path) -> None:
    """What can't be carried out is not dropped."""
    for values, message in (
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, "rope_theta is 10000.0, and 500000.0 in rope"),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"full_attention": {}, "rope_theta": 5e5}}, "rope_theta beside full_attention"),
        ({"rope_parameters": {"sliding_attention": _YARN}}, "only rope_theta is supported there"),
        ({"rope_parameters": [1]}, "rope_parameters has to be a table"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "kappa": 3}}, "has kappa, which is not known"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling of type 'longrope' is not supported"),
    ):
        require_refused(tmp_path, {"model_type": "llama", **values}, message)
