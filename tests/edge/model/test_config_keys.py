"""Every key of ``config.json``: carried out as eager transformers does, refused by name, or without a number."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from adapters.wrappers.configuration import CONFIG_CLASS_KEYS_MAPPING
from transformers import CONFIG_MAPPING, PretrainedConfig

from ringtune.errors import ModelError
from ringtune.models.families import FAMILIES
from ringtune.models.family import CAUSAL_LM, NO_NUMBER
from ringtune.models.folder import read_config
from tests.support.plain_rows import Ours, Plain
from tests.support.tiny_families import DECODERS, HIDDEN, IMAGE_SIZE, MODEL_TYPES, write_family

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
    "vocab_size": None,  # of the tokenizer
    "hidden_size": 2 * HIDDEN,
    "num_hidden_layers": None,  # given below
    "n_layers": None,
    "n_layer": None,
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
    "use_sliding_window": True,
    "max_window_layers": 2,
    "sliding_window_pattern": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
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
_LISTS = ("layer_types", "no_rope_layers")
"""Keys beside which those from which the library makes them otherwise say nothing."""


def _library_keys(model_type: str) -> set[str]:
    """Every key that the configuration class of the installed transformers knows."""
    kind: Any = CONFIG_MAPPING[model_type]
    arguments = {*inspect.signature(kind.__init__).parameters} - {"self", "kwargs"}
    aliases = (
        kind.attribute_map.keys() - CONFIG_CLASS_KEYS_MAPPING.get(model_type, {}).keys()
    )  # AdapterHub adds its own
    keys: set[str] = arguments | kind().to_dict().keys() | PretrainedConfig().to_dict().keys() | aliases
    return keys


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_key_of_the_configuration_class_is_in_one_table(model_type: str) -> None:
    """A key in none would be refused though the library writes it; one in two would mean two things."""
    family = FAMILIES[model_type]
    tables = [
        *(family.config_keys.keys(), family.refused.keys(), family.no_number, family.aliases.keys()),
        NO_NUMBER - family.config_keys.keys(),
    ]
    since_5 = {*_SINCE_5[model_type], *_GEMMA_SINCE_5.get(model_type, ())} - {"rope_parameters"}
    known = _library_keys(model_type) | since_5
    assert {key: sum(key in table for table in tables) for key in known} == dict.fromkeys(known, 1)


def _changed(model_type: str, *without: str) -> dict[str, Any]:
    """Another value of every key that is carried out, all together, but for some."""
    keys = FAMILIES[model_type].config_keys
    return {
        key: _OTHER[key]
        for key, spec in keys.items()
        if key not in without and not (spec.choices and len(spec.choices) == 1) and _OTHER[key] is not None
    }


def _write(folder: Path, model_type: str, config: dict[str, Any], **more: Any) -> Path:
    """A model of three blocks with these values; ``more`` is added to its ``config.json`` afterwards."""
    lm = CAUSAL_LM in FAMILIES[model_type].tasks
    write_family(folder, model_type, num_blocks=3, with_decoder=lm, **config)
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **config, **more}
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "-"}))
    return folder


_ROUNDS = [(name, ()) for name in MODEL_TYPES] + [
    (name, (key,)) for name in MODEL_TYPES for key in _LISTS if key in FAMILIES[name].config_keys
]


@pytest.mark.parametrize(("model_type", "without"), _ROUNDS)
def test_keys_are_carried_out_as_eager_transformers_does(
    tmp_path: Path, model_type: str, without: tuple[str, ...]
) -> None:
    """All keys have another value than in the default model, and those without a number have any: same rows."""
    family = FAMILIES[model_type]
    nothing: dict[str, Any] = dict.fromkeys(family.no_number, 3)
    nothing |= {key: "relu" for key in ("pooler_act", "hidden_activation") if key in nothing}
    nothing.pop("pooler_output_size", None)  # the file's pooler, which nobody reads, would not fit
    nothing |= {"classifier_dropout": 0.5, "id2label": {"0": "a", "1": "b", "2": "c"}, "use_cache": False}
    nothing |= {"torch_dtype": "float16", "architectures": ["Other"], "output_hidden_states": True, "temperature": 3.0}
    folder = _write(tmp_path, model_type, _changed(model_type, *without), **nothing)
    task = CAUSAL_LM if CAUSAL_LM in family.tasks else family.tasks[0]
    ours, plain = Ours(folder, task), Plain(folder, task)
    batch = ours.batch()
    hidden, losses = ours.last(batch)[0], ours.losses(batch)
    for row in range(len(batch.mask)):
        wanted, loss = plain.row(batch, row)
        assert float((hidden[row][batch.mask[row] == 1] - wanted).norm() / wanted.norm()) < 1e-6
        assert losses[row] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_keys_that_are_not_carried_out_are_refused_by_name(tmp_path: Path, model_type: str) -> None:
    """Keys of the family, values that a key can't have, and keys that nobody knows; null says nothing."""
    family, path = FAMILIES[model_type], tmp_path / "config.json"
    wrong: dict[str, Any] = {key: {"1": [1]} for key in family.refused}
    wrong |= {key: 0.5 for key, spec in family.config_keys.items() if len(spec.choices) == 1}
    wrong |= {"embedding_multiplier": 12.0, "logits_scaling": 8, "use_qk_norm": True, "norm_type": "rms"}
    wrong |= {} if "partial_rotary_factor" in family.config_keys else {"partial_rotary_factor": 0.5}
    for key, value in wrong.items():
        path.write_text(json.dumps({"model_type": model_type, key: value}))
        with pytest.raises(ModelError, match=key):
            read_config(tmp_path)
        path.write_text(json.dumps({"model_type": model_type, key: None}))
        assert read_config(tmp_path)["model_type"] == model_type


def _since_5(values: dict[str, Any], model_type: str) -> dict[str, Any]:
    """The same config as transformers 5 writes it: rotary positions in one table, or one for each type of layer."""
    old = {key: values.pop(key) for key in _ROPE_FORMS if key in values}
    full = {"rope_type": "default", **(old.get("rope_scaling") or {}), "rope_theta": old["rope_theta"]}
    local = {"rope_type": "default", "rope_theta": old.get("rope_local_base_freq")}
    by_layer = {"full_attention": full, "sliding_attention": local}
    return values | {"rope_parameters": by_layer if model_type == "gemma3_text" else full}


@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if "rope_theta" in FAMILIES[name].config_keys])
@pytest.mark.parametrize("scaling", [None, _YARN, {**_LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0}])
def test_rotary_positions_of_transformers_5_are_those_of_4(
    tmp_path: Path, model_type: str, scaling: dict[str, Any] | None
) -> None:
    """Both forms give one config, or both are refused by the same name."""
    read = []
    config: dict[str, Any] = {"model_type": model_type, "rope_theta": 5e5, "rope_scaling": scaling}
    config |= {"rope_local_base_freq": 77.0} if model_type == "gemma3_text" else {}
    for values in (config, _since_5(dict(config), model_type)):
        (tmp_path / "config.json").write_text(json.dumps(values))
        if scaling and "rope_scaling" in FAMILIES[model_type].refused:
            with pytest.raises(ModelError, match="rope_scaling is refused"):
                read_config(tmp_path)
        else:
            read.append(read_config(tmp_path))
            assert read[-1]["rope_theta"] == 5e5
            assert read[-1].get("rope_scaling") == scaling
            assert read[-1].get("rope_local_base_freq") == config.get("rope_local_base_freq")
    assert read[1:] == read[:1] * (len(read) - 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, "rope_theta is 10000.0, and 500000.0 in rope"),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"full_attention": {}, "rope_theta": 5e5}}, "rope_theta beside full_attention"),
        ({"rope_parameters": {"sliding_attention": _YARN}}, "only rope_theta is supported there"),
        ({"rope_parameters": [1]}, "rope_parameters has to be a table"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "kappa": 3}}, "has kappa, which is not known"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling of type 'longrope' is not supported"),
    ],
)
def test_forms_of_rotary_positions_that_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    """What can't be carried out is not dropped."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **values}))
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)
