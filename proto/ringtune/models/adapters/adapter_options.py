"""Check the options of an adapter configuration, which the library itself takes without a look.

The library keeps unknown options and wrong values until a module is built or used, on a node and in the middle of a
run; here they are refused where the job is read.

``linear`` and ``mlp`` are our own and have LoRA's options for which matrices, with LoRA's rules.

Source: adapters 1.3.0, the fields of ``BnConfig``, ``LoRAConfig``, ``MTLLoRAConfig`` and ``ReftConfig``, and
``Activation_Function_Class``; of transformers' activations those without weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from ringtune.errors import JobError
from ringtune.files.strict import nearest
from ringtune.models.adapters.auxiliary_config import DEFAULTS, LINEAR, MLP

MOST_RANK: Final = 4096
"""Most rank or factor of an adapter; the widest models have matrices of some thousand."""

_ACTIVATIONS = (
    "relu",
    "gelu",
    "swish",
    "silu",
    "mish",
    "tanh",
    "sigmoid",
    "leakyrelu",
    "leaky_relu",
    "gelu_new",
    "gelu_fast",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_10",
    "gelu_pytorch_tanh",
    "gelu_accurate",
    "quick_gelu",
    "relu2",
    "relu6",
    "linear",
    "laplace",
)
_LETTERS = ("q", "k", "v")


class _Rule:
    """A rule for the value of an option: what it has to be, in words, and whether a value is that."""

    def __init__(self, words: str, holds: Callable[[Any], bool]) -> None:
        self.words = words
        self.holds = holds


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _one_of(*names: str) -> _Rule:
    return _Rule(f"one of {', '.join(map(repr, names))}", lambda value: value in names)


def _whole(least: int, most: int = MOST_RANK) -> _Rule:
    return _Rule(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def _factor(value: Any) -> bool:
    """Whether a value is a factor, or a ``default`` one and some of blocks."""
    if isinstance(value, Mapping):
        keys_are_good = all(key == "default" or _is_block_name(key) for key in value)
        factors_are_good = all(_factor(item) and not isinstance(item, Mapping) for item in value.values())
        return keys_are_good and factors_are_good and "default" in value
    return _number(value) and 0 < value <= MOST_RANK


def _is_block_name(key: Any) -> bool:
    """Whether a key is the number of a block as the library looks it up: a text without leading zeros."""
    return isinstance(key, str) and key.isascii() and key.isdecimal() and key == str(int(key))


_FLAG = _Rule("True or False", lambda value: type(value) is bool)
_SHARE = _Rule("a number from 0 to below 1", lambda value: _number(value) and 0 <= value < 1)
_BLOCKS = _Rule(
    "a list of blocks, counted from 0",
    lambda value: isinstance(value, list) and all(type(block) is int and block >= 0 for block in value),
)
_ALL_OR_BLOCKS = _Rule("'all' or a list of blocks", lambda value: value == "all" or _BLOCKS.holds(value))
_SEED = _Rule("None or a whole number", lambda value: value is None or (type(value) is int and value >= 0))
_ACTIVATION = _one_of(*_ACTIVATIONS)
_BOTTLENECK: dict[str, _Rule] = {
    "mh_adapter": _FLAG,
    "output_adapter": _FLAG,
    "reduction_factor": _Rule(
        "a number above 0, or a table of them by block with a default, as {'default': 16, '3': 8}", _factor
    ),
    "non_linearity": _ACTIVATION,
    "original_ln_before": _FLAG,
    "original_ln_after": _FLAG,
    "ln_before": _FLAG,
    "ln_after": _FLAG,
    "init_weights": _one_of("bert", "mam_adapter", "houlsby"),
    "init_weights_seed": _SEED,
    "is_parallel": _FLAG,
    "scaling": _Rule(
        "a number, 'learned' or 'channel'", lambda value: _number(value) or value in ("learned", "channel")
    ),
    "use_gating": _FLAG,
    "residual_before_ln": _Rule("True, False or 'post_add'", lambda value: type(value) is bool or value == "post_add"),
    "adapter_residual_before_ln": _FLAG,
    "leave_out": _BLOCKS,
    "dropout": _SHARE,
    "stochastic_depth": _SHARE,
}
_LORA: dict[str, _Rule] = {
    "selfattn_lora": _FLAG,
    "intermediate_lora": _FLAG,
    "output_lora": _FLAG,
    "leave_out": _BLOCKS,
    "r": _whole(1),
    "alpha": _Rule("a number above 0", lambda value: _number(value) and 0 < value <= 1e6),
    "dropout": _SHARE,
    "attn_matrices": _Rule(
        f"a list of some of {', '.join(map(repr, _LETTERS))}, each once",
        lambda value: (
            isinstance(value, list) and all(letter in _LETTERS for letter in value) and len(set(value)) == len(value)
        ),
    ),
    "composition_mode": _one_of("add", "scale"),
    "init_weights": _one_of("lora", "bert", "ia3", "vera"),
    "init_weights_seed": _SEED,
    "use_gating": _FLAG,
    "use_dora": _FLAG,
}
_AUXILIARY: dict[str, _Rule] = {name: _LORA[name] for name in DEFAULTS[LINEAR]}
_REFT: dict[str, _Rule] = {
    "layers": _ALL_OR_BLOCKS,
    "prefix_positions": _whole(0),
    "suffix_positions": _whole(0),
    "r": _whole(1),
    "orthogonality": _FLAG,
    "tied_weights": _FLAG,
    "dropout": _SHARE,
    "non_linearity": _Rule("None or an activation", lambda value: value is None or value in _ACTIVATIONS),
    "output_reft": _FLAG,
    "init_weights_seed": _SEED,
}
_RULES: dict[str, dict[str, _Rule]] = {
    "bottleneck": _BOTTLENECK,
    "lora": _LORA,
    "mtl_lora": {
        **_LORA,
        "n_up_projection": _whole(1, 64),
        "task_specific_matrix_type": _one_of("singular_values", "linear"),
        "weights_sharpness": _Rule("a number above 0", lambda value: _number(value) and value > 0),
    },
    "reft": _REFT,
    LINEAR: _AUXILIARY,
    MLP: {**_AUXILIARY, "hidden": _whole(1)},
}


def option_rules(kind: str) -> dict[str, str]:
    """The options of a kind of adapter, each with what it has to be, in words."""
    return {name: rule.words for name, rule in _RULES[kind].items()}


def check_options(name: str, kind: str, options: Mapping[Any, Any]) -> None:
    """Check the options that a user gave.

    Args:
        name: of the configuration, for messages.
        kind: ``bottleneck``, ``lora``, ``mtl_lora``, ``reft``, ``linear`` or ``mlp``.
        options: name -> value.

    Raises:
        JobError: an unknown option, or a value that it can't have.
    """
    rules = _RULES[kind]
    for option, value in options.items():
        if option not in rules:
            raise JobError(f"adapter.config {name!r} has no option {option!r}; {nearest(str(option), rules)}")
        if not _holds(rules[option], value):
            raise JobError(f"adapter.config {name!r}: {option} is {value!r}, it has to be {rules[option].words}")


def _holds(rule: _Rule, value: Any) -> bool:
    """Whether a value is as the rule says; one that can't be compared is not."""
    try:
        return rule.holds(value)
    except TypeError:
        return False
