"""Text towers: the language model inside a model of texts and pictures, which trains as a text model.

``config.json`` of such a model has the tower's keys under ``text_config``; the two older Qwen have them at the top.
For a text without pictures the tower computes what a text family computes: Qwen's three positions of a token are then
one number, so that its rotary tables are the usual ones. Tensors of other towers and of projections are never read.

=======================  ==============================================  =======================================
model                    tensors of the tower in files                   of the class of transformers
=======================  ==============================================  =======================================
saved before 4.52        ``language_model.model.layers.0...``            ``model.language_model.layers.0...``
saved since              ``model.language_model.layers.0...``            the same
Qwen2-VL, Qwen2.5-VL     ``model.layers.0...``                           ``model.language_model.layers.0...``
Llama 4                  ``language_model.model.layers.0...``            the same
=======================  ==============================================  =======================================

Source: the configurations and classes of transformers 4.57 and 5.24, ``_checkpoint_conversion_mapping``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ringtune.errors import ModelError

TEXT_CONFIG: Final = "text_config"
CLASS_PREFIX: Final = "model.language_model."
"""Prefix of most towers' names in the whole model's class of transformers, whose name ``LOADER`` finds."""
LOADER: Final = "AutoModelForImageTextToText"
TEXT_ONLY: Final = ", the text part of a model of texts and pictures: the rest is not read"
"""What is told of such a model."""
_PREFIXES: Final = ("language_model.model.", CLASS_PREFIX, "language_model.")
"""Prefixes of the tower's names in files; the last one is that of the older head."""
_OF_WHOLE: Final = ("quantization_config", "auto_map", "dtype", "torch_dtype", "transformers_version")
"""Keys of the whole model that are also the tower's."""
_OF_PICTURES: Final = ("image_", "video_", "vision_")
_ROPES: Final = ("rope_scaling", "rope_parameters")
_MROPE: Final = ("mrope_section", "mrope_interleaved")
_USUAL: Final = [(key, kind) for key in ("type", "rope_type") for kind in ("mrope", "axial")]


class _Tower(NamedTuple):
    """The tower of a ``model_type``.

    Attributes:
        family: ``model_type`` of its text family where ``text_config`` names none, or one of ``aliases``.
        defaults: keys with another default than the family's.
        is_flat: whether its keys may be those of the whole model.
        class_prefix: of the tower's names in the whole model's class.
    """

    family: str
    aliases: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}
    is_flat: bool = False
    class_prefix: str = CLASS_PREFIX


_QWEN2_VL: Final[Mapping[str, Any]] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_window_layers": 80,
}
_QWEN3_VL: Final[Mapping[str, Any]] = {"max_position_embeddings": 128000, "rope_theta": 5000000.0}
TOWERS: Final[Mapping[str, _Tower]] = {
    "gemma3": _Tower("gemma3_text"),
    "gemma3n": _Tower("gemma3n_text"),
    "gemma4": _Tower("gemma4_text"),
    "llama4": _Tower("llama4_text", class_prefix=_PREFIXES[0]),
    "llava": _Tower("llama"),
    "mistral3": _Tower("mistral"),
    "qwen2_5_vl": _Tower("qwen2", ("qwen2_5_vl_text",), _QWEN2_VL, is_flat=True),
    "qwen2_vl": _Tower("qwen2", ("qwen2_vl_text",), _QWEN2_VL, is_flat=True),
    "qwen3_5": _Tower("qwen3_5_text"),
    "qwen3_5_moe": _Tower("qwen3_5_moe_text"),
    "qwen3_vl": _Tower("qwen3", ("qwen3_vl_text",), _QWEN3_VL),
}
"""``model_type`` of a model of texts and pictures -> its text tower."""
_REFUSED: Final = {
    "qwen3_vl_moe": "transformers has no text model for its experts, which are one transposed tensor in files; use a "
    "dense one (qwen3_vl) or a text model with experts (qwen3_moe)"
}
"""``model_type`` -> why its text tower does not train, and what to do."""


def class_prefix(family: str) -> str:
    """Return the prefix of names in the whole model's class, for a tower of this text family."""
    return next((tower.class_prefix for tower in TOWERS.values() if tower.family == family), CLASS_PREFIX)


def is_tower(values: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` is that of a model of texts and pictures, whose text tower trains."""
    return str(values.get("model_type")) in TOWERS


def text_values(values: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the values of ``config.json`` of a text model; of another one those of its text tower.

    Raises ``ModelError``. Whether the ``model_type`` of ``text_config`` has the job's head is checked with the job.
    """
    model_type = str(values.get("model_type"))
    if model_type in _REFUSED:
        raise ModelError(f"{where}: the text part of model_type {model_type!r} is refused: {_REFUSED[model_type]}")
    if (tower := TOWERS.get(model_type)) is None:
        return dict(values)
    text = values.get(TEXT_CONFIG)
    if text is None and tower.is_flat:
        text = {key: value for key, value in values.items() if key != "model_type"}
    if not isinstance(text, Mapping):
        raise ModelError(f"{where}: {TEXT_CONFIG} has to be a table, but is {text!r}; fetch the model again")
    name = text.get("model_type")
    config = _without_pictures(text)
    ropes = [config[key] for key in _ROPES if isinstance(config.get(key), Mapping)]
    has_theta = any("rope_theta" in rope for rope in ropes)
    config = {key: value for key, value in tower.defaults.items() if not (has_theta and key == "rope_theta")} | config
    config["model_type"] = tower.family if name is None or name in tower.aliases else name
    if "tie_word_embeddings" not in config and "tie_word_embeddings" in values:
        config["tie_word_embeddings"] = values["tie_word_embeddings"]
    return {**{key: values[key] for key in _OF_WHOLE if key in values}, **config}


def _without_pictures(text: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out tokens of pictures, and how a token's three positions, equal in a text, share the rotary tables."""
    config = {key: value for key, value in text.items() if not key.startswith(_OF_PICTURES)}
    for key in _ROPES:
        if isinstance(given := config.get(key), Mapping) and given.keys() & set(_MROPE):
            config[key] = {
                name: "default" if (name, value) in _USUAL else value
                for name, value in given.items()
                if name not in _MROPE
            }
    return config


def tower_name(name: str) -> str:
    """Return a tensor's name in the text model without its prefix; empty if the name has none of a tower's prefixes.

    Example: of ``language_model.model.layers.0.mlp.up_proj.weight`` it is ``layers.0.mlp.up_proj.weight``.
    """
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    return "" if prefix is None else name.removeprefix(prefix)
