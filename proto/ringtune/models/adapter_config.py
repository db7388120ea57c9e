"""AdapterHub configuration strings, read without the library: names, options, and numbers of weights.

``seq_bn[reduction_factor=8]|lora[r=4]`` is a union of two methods. A configuration is supported if every module that it
adds is inside one block; those that share weights across blocks are refused by name. Besides, a bottleneck may have an
invertible adapter at the embedding (``Invertible``), which owners train.
``full`` is no configuration of AdapterHub: nothing is added, and the weights of the blocks train
(``ringtune.costs.model_facts``). ``linear`` and ``mlp`` are kinds of RingTune (``ringtune.models.auxiliary_models``);
they choose matrices with LoRA's options, and no matrix has two parts of a union.

The library accepts unknown options and wrong values until a module is built or used, in the middle of a run; here they
are refused when the job is read.

Source: adapters 1.3.0, ``parse_adapter_config_string``, ``ADAPTER_CONFIG_MAP``, the module constructors, the fields of
``BnConfig``, ``LoRAConfig``, ``MTLLoRAConfig`` and ``ReftConfig``, and ``Activation_Function_Class``; transformers'
activations without weights.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ringtune.errors import JobError
from ringtune.models.auxiliary_models import AUXILIARY_KINDS, DEFAULTS, LINEAR, MLP, AuxiliaryConfig, check_places
from ringtune.models.family import Widths
from ringtune.storage.strict import nearest

MAX_RANK: Final = 4096
"""Largest rank, factor or width of an adapter."""

NICE: Final = "nice"
"""Coupling of an invertible adapter that adds; GLOW's, which scales too, the library can't run on tokens."""

_ACTIVATIONS = (
    *("relu", "gelu", "swish", "silu", "mish", "tanh", "sigmoid", "leakyrelu", "leaky_relu", "gelu_new", "gelu_fast"),
    *("gelu_python", "gelu_python_tanh", "gelu_10", "gelu_pytorch_tanh", "gelu_accurate", "quick_gelu", "relu2"),
    *("relu6", "linear", "laplace"),
)
_LETTERS = ("q", "k", "v")


class _Rule(NamedTuple):
    """Rule for the value of an option: its description, and a predicate."""

    words: str
    holds: Callable[[Any], bool]


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _one_of(*names: str) -> _Rule:
    return _Rule(f"one of {', '.join(map(repr, names))}", lambda value: value in names)


def _whole(least: int, most: int = MAX_RANK) -> _Rule:
    return _Rule(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def _factor(value: Any) -> bool:
    """Whether a value is a factor, or a table of factors by block with a ``default``."""
    if isinstance(value, Mapping):
        keys_are_good = all(key == "default" or _is_block_name(key) for key in value)
        factors_are_good = all(_factor(item) and not isinstance(item, Mapping) for item in value.values())
        return keys_are_good and factors_are_good and "default" in value
    return _number(value) and 0 < value <= MAX_RANK


def _is_block_name(key: Any) -> bool:
    """Whether a key is a block number as the library writes it: a text without leading zeros."""
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
_BOTTLENECK_RULES: dict[str, _Rule] = {
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
    "inv_adapter": _Rule("None or 'nice'", lambda value: value in (None, NICE)),
    "inv_adapter_reduction_factor": _Rule(
        "None or a number from 1", lambda value: value is None or (_number(value) and 1 <= value <= MAX_RANK)
    ),
}
_LORA_RULES: dict[str, _Rule] = {
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
_AUXILIARY_RULES: dict[str, _Rule] = {name: _LORA_RULES[name] for name in DEFAULTS[LINEAR]}
_REFT_RULES: dict[str, _Rule] = {
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
    "bottleneck": _BOTTLENECK_RULES,
    "lora": _LORA_RULES,
    "mtl_lora": {
        **_LORA_RULES,
        "n_up_projection": _whole(1, 64),
        "task_specific_matrix_type": _one_of("singular_values", "linear"),
        "weights_sharpness": _Rule("a number above 0", lambda value: _number(value) and value > 0),
    },
    "reft": _REFT_RULES,
    LINEAR: _AUXILIARY_RULES,
    MLP: {**_AUXILIARY_RULES, "hidden": _whole(1)},
}


def option_rules(kind: str) -> dict[str, str]:
    """Return the options of a kind of adapter, each with its allowed values in words."""
    return {name: rule.words for name, rule in _RULES[kind].items()}


def check_options(name: str, kind: str, options: Mapping[Any, Any]) -> None:
    """Refuse unknown or wrong options of configuration ``name``, of a key of ``_RULES``; raises ``JobError``."""
    rules = _RULES[kind]
    for option, value in options.items():
        if option not in rules:
            raise JobError(f"adapter.config {name!r} has no option {option!r}; {nearest(str(option), rules)}")
        if not _holds(rules[option], value):
            raise JobError(f"adapter.config {name!r}: {option} is {value!r}, it has to be {rules[option].words}")


def _holds(rule: _Rule, value: Any) -> bool:
    try:
        return rule.holds(value)
    except TypeError:
        return False


FULL: Final = "full"
"""No adapter: the attention and feed-forward weights of the blocks train."""

_BOTTLENECK: dict[str, Any] = {
    "mh_adapter": False,
    "output_adapter": True,
    "reduction_factor": 16,
    "scaling": 1.0,
    "use_gating": False,
    "ln_before": False,
    "ln_after": False,
    "inv_adapter": None,
    "inv_adapter_reduction_factor": None,
    "phm_layer": False,
    "leave_out": [],
    "non_linearity": "relu",
    "original_ln_before": True,
    "original_ln_after": True,
    "is_parallel": False,
    "residual_before_ln": True,
    "adapter_residual_before_ln": False,
}
_DOUBLE = {**_BOTTLENECK, "mh_adapter": True, "non_linearity": "swish", "original_ln_before": False}
_INVERTIBLE = {"inv_adapter": NICE, "inv_adapter_reduction_factor": 2}
_PARALLEL = {**_BOTTLENECK, "reduction_factor": 2, "original_ln_before": False, "is_parallel": True}
_LORA: dict[str, Any] = {
    "selfattn_lora": True,
    "intermediate_lora": False,
    "output_lora": False,
    "r": 8,
    "attn_matrices": ["q", "v"],
    "composition_mode": "add",
    "use_dora": False,
    "use_gating": False,
    "vera_d": None,
    "leave_out": [],
    "alpha": 8,
}
_REFT: dict[str, Any] = {
    "r": 1,
    "tied_weights": False,
    "output_reft": True,
    "layers": "all",
    "prefix_positions": 3,
    "suffix_positions": 0,
    "orthogonality": True,
    "non_linearity": None,
}

CONFIGURATIONS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "seq_bn": ("bottleneck", _BOTTLENECK),
    "double_seq_bn": ("bottleneck", _DOUBLE),
    "seq_bn_inv": ("bottleneck", {**_BOTTLENECK, **_INVERTIBLE}),
    "double_seq_bn_inv": ("bottleneck", {**_DOUBLE, **_INVERTIBLE}),
    "par_bn": ("bottleneck", {**_PARALLEL, "scaling": 4.0}),
    "scaled_par_bn": ("bottleneck", {**_PARALLEL, "scaling": "learned"}),
    "lora": ("lora", _LORA),
    "dora": ("lora", {**_LORA, "use_dora": True}),
    "ia3": (
        "lora",
        {
            **_LORA,
            "intermediate_lora": True,
            "r": 1,
            "alpha": 1,
            "attn_matrices": ["k", "v"],
            "composition_mode": "scale",
        },
    ),
    "mtl_lora": (
        "mtl_lora",
        {**_LORA, "n_up_projection": 1, "task_specific_matrix_type": "singular_values", "weights_sharpness": 0.05},
    ),
    "loreft": ("reft", _REFT),
    "noreft": ("reft", {**_REFT, "orthogonality": False}),
    **{name: (name, DEFAULTS[name]) for name in AUXILIARY_KINDS},
}
"""Configuration -> its kind, and the options that determine size and computation, with their defaults."""
OTHER_NAMES: Final[Mapping[str, str]] = {
    "pfeiffer": "seq_bn",
    "houlsby": "double_seq_bn",
    "parallel": "par_bn",
    "scaled_parallel": "scaled_par_bn",
    "pfeiffer+inv": "seq_bn_inv",
    "houlsby+inv": "double_seq_bn_inv",
}
_SHARED = "it shares weights between blocks, which live on different nodes"
_GLOW = "the library's GLOW coupling cuts texts between tokens, and fails"
_UNSLICED = {
    **dict.fromkeys(("compacter", "compacter++", "vera", "dvora"), _SHARED),
    **dict.fromkeys(("prefix_tuning", "prefix_tuning_flat", "mam", "unipelt"), _SHARED),
    "prompt_tuning": "it adds tokens at the embedding, outside the blocks",
}
_NOT_SAVED = {"direft": "the library does not write down what makes it one"}
REFUSED: Final[Mapping[str, str]] = _UNSLICED | _NOT_SAVED
"""Configurations of the library that are refused -> reason."""
_PART = re.compile(r"(?P<name>[^\[\]|]+)(?:\[(?P<options>.*)\])?")
_LONGEST = 1000


class AdapterPart(NamedTuple):
    """One method of a configuration, with the options that the user set."""

    name: str
    options: dict[str, Any]

    @property
    def kind(self) -> str:
        """Kind of the method, such as ``bottleneck`` or ``lora``."""
        return CONFIGURATIONS[self.name][0]

    @property
    def whole(self) -> dict[str, Any]:
        """The options, with defaults of those that are not set."""
        return {**CONFIGURATIONS[self.name][1], **self.options}


def parse_adapter_config(config: str) -> tuple[AdapterPart, ...]:
    """Parse a configuration string; ``full`` has no parts; raises ``JobError``."""
    if len(config) > _LONGEST:
        raise JobError(f"adapter.config has {len(config)} characters, {_LONGEST} are allowed")
    if trains_own_weights(config):
        return ()
    parts = tuple(_parse_part(text.strip()) for text in config.split("|"))
    names = [part.name for part in parts if part.name not in AUXILIARY_KINDS]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise JobError(f"adapter.config has {twice!r} twice; one method stands once in a configuration")
    if sum(map(_has_invertible, parts)) > 1:
        raise JobError("adapter.config has two invertible adapters, the library would use the first; leave one out")
    named = {block for part in parts for blocks in _named_blocks(part).values() for block in blocks}
    other = next(block for block in range(len(named) + 1) if block not in named)  # stands for all unnamed blocks
    there = named | ({other} if other < max(named, default=1) else set())
    _check_places(parts, sorted(there), is_merged=False)
    return parts


def trains_own_weights(config: str) -> bool:
    """Whether a configuration is ``full``: the weights of the blocks train, and no adapter is added."""
    return config.strip() == FULL


def auxiliary_of(config: str) -> tuple[AuxiliaryConfig, ...]:
    """Return the auxiliary models of a configuration, without its other parts."""
    if all(text.partition("[")[0].strip() not in AUXILIARY_KINDS for text in config.split("|")):
        return ()
    parts = parse_adapter_config(config)
    return tuple(AuxiliaryConfig.of(part.name, part.options) for part in parts if part.name in AUXILIARY_KINDS)


INVERTIBLE: Final = "invertible_adapters"
"""Name of the library's module with invertible adapters, in the base model."""

INVERTIBLE_TENSORS: Final = tuple(
    f"{part}.{at}.{kind}" for part in "FG" for at in (0, 2) for kind in ("weight", "bias")
)
"""Names of its tensors: F and G have a Linear before and after an activation."""


class Invertible(NamedTuple):
    """An invertible adapter at the embedding, of NICE's kind: two coupled bottlenecks, each of half of the channels.

    The halves x1 and x2 of an embedding become y1 = x1 + F(x2) and y2 = x2 + G(y1). Before a language model's decoder
    the same weights compute the inverse: x2 = y2 - G(y1), x1 = y1 - F(x2).

    Attributes:
        factor: width of a half over that of its bottleneck.

    Source: MAD-X, section 2.2.3 (invertible adapters); adapters 1.3.0, ``NICECouplingBlock``.
    """

    factor: float

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors by name for embeddings of a width; F and G are a Linear around an activation."""
        first, second = width // 2, width - width // 2
        shapes: dict[str, tuple[int, ...]] = {}
        for name, inputs, outputs in (("F", second, first), ("G", first, second)):
            inner = int(inputs // self.factor)
            if not inner:
                raise JobError(
                    f"inv_adapter_reduction_factor = {self.factor:g} leaves no channel of {inputs}; lower it"
                )
            shapes |= {f"{name}.0.weight": (inner, inputs), f"{name}.0.bias": (inner,)}
            shapes |= {f"{name}.2.weight": (outputs, inner), f"{name}.2.bias": (outputs,)}
        return shapes


def invertible_of(config: str) -> Invertible | None:
    """Return the invertible adapter of a configuration; None if it has none."""
    parts = (part for part in parse_adapter_config(config) if _has_invertible(part))
    return next((Invertible(part.whole["inv_adapter_reduction_factor"]) for part in parts), None)


def _has_invertible(part: AdapterPart) -> bool:
    return part.kind == "bottleneck" and bool(part.whole["inv_adapter"])


def is_all(config: str, name: str) -> bool:
    """Whether a configuration consists of this method only."""
    return {part.name for part in parse_adapter_config(config)} == {name}


def library_config(config: str) -> str:
    """Return a configuration without its auxiliary models; empty if no other part is left.

    Example: ``lora[r=4]`` for ``lora[r=4]|linear[attn_matrices=['k']]``.
    """
    if not auxiliary_of(config):
        return "" if trains_own_weights(config) else config
    pairs = zip(config.split("|"), parse_adapter_config(config), strict=True)
    return "|".join(text.strip() for text, part in pairs if part.name not in AUXILIARY_KINDS)


def library_problem(config: str) -> str:
    """Say why AdapterHub's library can't load an adapter; empty if it can."""
    parts = parse_adapter_config(library_config(config)) if library_config(config) else ()
    if any(part.options.get("task_specific_matrix_type") == "linear" for part in parts):
        return "it makes no module for task_specific_matrix_type = 'linear'"
    return ""


def is_same_adapter(config: str, other: str) -> bool:
    """Whether two configurations add the same weights with the same computation; dropout and initial values aside."""
    return _effective(config) == _effective(other)


def _effective(config: str) -> list[tuple[str, dict[str, Any]]]:
    """Return kind and options of each part, with defaults filled in."""
    parts = parse_adapter_config(config)
    return [(part.kind, {name: part.whole[name] for name in CONFIGURATIONS[part.name][1]}) for part in parts]


def config_of_library(described: Mapping[str, Any]) -> str:
    """Write the ``config`` of the library's ``adapter_config.json`` as a configuration, without dropout.

    Example: ``lora[r=4]`` for ``{"architecture": "lora", "r": 4, "alpha": 8, ...}``.
    """
    if described.get("architecture") == "union":
        parts = described.get("configs") or []
        return "|".join(config_of_library(part) for part in parts if isinstance(part, Mapping))
    kind = described.get("architecture") or "bottleneck"
    if kind == "bottleneck" and described.get("inv_adapter") not in (None, NICE):
        raise JobError(f"inv_adapter = {described['inv_adapter']!r} can't be run: {_GLOW}; {_ADVICE}")
    if described.get("phm_layer") or described.get("vera_d") is not None:
        raise JobError(f"compacter and vera can't be sliced: {_SHARED}; {_ADVICE}")
    known = {name: defaults for name, (architecture, defaults) in CONFIGURATIONS.items() if architecture == kind}
    if not known:
        raise JobError(f"adapters of architecture {kind!r} are not supported; {_ADVICE}")
    changes = {
        name: {key: described[key] for key, value in defaults.items() if key in described and described[key] != value}
        for name, defaults in known.items()
    }
    name = min(changes, key=lambda name: len(changes[name]))
    return written(name, changes[name])


def written(name: str, options: Mapping[str, Any]) -> str:
    """Write one method of a configuration. Example: ``lora[r=4]``."""
    text = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"{name}[{text}]" if text else name


def has_adapter(config: str, block: int) -> bool:
    """Whether a configuration trains weights in a block: no ``leave_out`` of one of its parts has the block."""
    if trains_own_weights(config):
        return True
    return any(block not in part.options.get("leave_out", ()) for part in parse_adapter_config(config))


def _parse_part(text: str) -> AdapterPart:
    match = _PART.fullmatch(text)
    if match is None:
        raise JobError(f"adapter.config {text!r} is not of the form name[option=value, ...]")
    name = match["name"].strip()
    name = OTHER_NAMES.get(name, name)
    if name == FULL:
        raise JobError(
            f"adapter.config {FULL!r} trains the blocks' own weights; it stands alone, without options and adapters"
        )
    if name in _NOT_SAVED:
        raise JobError(
            f"adapter.config {name!r} is refused: the library does not write down what makes it one, so that a saved "
            "adapter loads as another method; use loreft or noreft"
        )
    if name in _UNSLICED:
        raise JobError(f"adapter.config {name!r} can't be sliced: {_UNSLICED[name]}; {_ADVICE}")
    if name not in CONFIGURATIONS:
        raise JobError(f"adapter.config {name!r} is not known; {nearest(name, (*CONFIGURATIONS, FULL))}")
    options = _read_options(text, match["options"] or "")
    if options.get("inv_adapter") == "glow":
        raise JobError(f"adapter.config {text!r} can't be run: {_GLOW}; set inv_adapter = 'nice'")
    if options.get("phm_layer") or options.get("vera_d") is not None:
        raise JobError(f"adapter.config {text!r} can't be sliced: {_SHARED}; {_ADVICE}")
    check_options(name, CONFIGURATIONS[name][0], options)
    part = AdapterPart(name, options)
    if _has_invertible(part) and not part.whole["inv_adapter_reduction_factor"]:
        raise JobError(f"adapter.config {text!r} has inv_adapter alone; set inv_adapter_reduction_factor = 2 too")
    named = {block for blocks in _named_blocks(part).values() for block in blocks}
    beyond = max(named, default=-1) + 1
    _check_weights(part, sorted({*named, beyond}), 1, Widths.plain(1, 1), beyond + 1)
    return part


def _read_options(text: str, options: str) -> dict[str, Any]:
    """Parse ``option=value, ...``; ``text`` is the whole part, for messages."""
    try:
        table = ast.parse("{" + re.sub(r"(\w+)=", r"'\1':", options) + "}", mode="eval").body
        values = ast.literal_eval(table)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise JobError(
            f"adapter.config {text!r}: the options are not readable; write texts in quotes, as in "
            "lora[attn_matrices=['q','k']]"
        ) from error
    if not isinstance(table, ast.Dict) or not isinstance(values, dict):
        raise JobError(f"adapter.config {text!r}: write options as option=value")
    if len(values) != len(table.keys):
        raise JobError(f"adapter.config {text!r} has an option twice; keep one")
    return values


_ADVICE = "use seq_bn, double_seq_bn, par_bn, lora or ia3"


def adapter_block_params(config: str, *, hidden_size: int, widths: Widths, num_blocks: int) -> int:
    """Number of trainable weights that a configuration adds to a block, the maximum over all blocks.

    Example: ``seq_bn`` at width 384 adds 2 * 384 * 24 + 24 + 384 = 18,840 weights, ``full`` none.
    """
    parts = parse_adapter_config(config)
    for part in parts:
        _check_weights(part, range(num_blocks), hidden_size, widths, num_blocks)
    _check_places(parts, range(num_blocks), is_merged=widths.merged)
    return max(block_params(parts, block, hidden_size, widths, num_blocks) for block in range(num_blocks))


def fullest_block(config: str, *, hidden_size: int, widths: Widths, num_blocks: int, among: Sequence[int] = ()) -> int:
    """Return the block with most added weights, the highest one in a tie; arguments as ``adapter_block_params``.

    With ``leave_out`` other blocks may have none. ``among`` are the blocks to choose from; empty: all.
    """
    parts = parse_adapter_config(config)
    return max(
        among or range(num_blocks),
        key=lambda block: (block_params(parts, block, hidden_size, widths, num_blocks), block),
    )


def block_params(parts: tuple[AdapterPart, ...], block: int, hidden: int, widths: Widths, num_blocks: int) -> int:
    """Number of trainable weights that a configuration adds to one block."""
    return sum(_part_params(part, block, hidden, widths, num_blocks) for part in parts)


def _check_places(parts: Iterable[AdapterPart], blocks: Iterable[int], *, is_merged: bool) -> None:
    check_places([(part.name, part.whole) for part in parts], blocks, is_merged=is_merged)


def _named_blocks(part: AdapterPart) -> dict[str, list[int]]:
    blocks = {name: part.options[name] for name in ("leave_out", "layers") if isinstance(part.options.get(name), list)}
    factors = part.options.get("reduction_factor")
    if isinstance(factors, Mapping):
        blocks["reduction_factor"] = [int(key) for key in factors if key != "default"]
    return blocks


def _check_weights(part: AdapterPart, blocks: Iterable[int], hidden: int, widths: Widths, num_blocks: int) -> None:
    if not any(_part_params(part, block, hidden, widths, num_blocks) for block in blocks):
        raise JobError(
            f"adapter.config {part.name!r} adds no weights to any block, nothing would train; give it blocks and "
            "matrices, or leave it out"
        )


def _part_params(part: AdapterPart, block: int, hidden: int, widths: Widths, num_blocks: int) -> int:
    kind, options = part.kind, part.whole
    for option, named in _named_blocks(part).items():
        beyond = [block for block in named if block >= num_blocks]
        if beyond:
            raise JobError(
                f"adapter.config {part.name!r}: {option} names block {beyond[0]}, the model has the blocks 0 to "
                f"{num_blocks - 1}"
            )
    try:
        if block in options.get("leave_out", ()):
            return 0
        if kind == "bottleneck":
            return _bottleneck_params(options, block, hidden)
        if kind in AUXILIARY_KINDS:
            return sum(math.prod(shape) for shape in AuxiliaryConfig.of(kind, options).shapes(widths).values())
        return _reft_params(options, block, hidden) if kind == "reft" else _lora_params(options, widths, kind)
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise JobError(f"adapter.config {part.name!r} has an option of a wrong kind: {part.options}") from error


def bottleneck_width(options: Mapping[str, Any], block: int, hidden: int) -> int:
    """Width between the two projections of a bottleneck: 24 with factor 16 at width 384."""
    factor = options["reduction_factor"]
    if isinstance(factor, Mapping):
        factor = factor[str(block)] if str(block) in factor else factor["default"]
    return max(1, int(hidden // factor))


def _bottleneck_params(options: Mapping[str, Any], block: int, hidden: int) -> int:
    """Count a bottleneck's weights: projections with biases, gate, scaling, layer norms, at each location."""
    width = bottleneck_width(options, block, hidden)
    size: int = 2 * hidden * width + width + hidden
    size += hidden + 1 if options["use_gating"] else 0
    size += {"learned": 1, "channel": hidden}.get(str(options["scaling"]), 0)
    size += 2 * hidden * (bool(options["ln_before"]) + bool(options["ln_after"]))
    return size * (bool(options["mh_adapter"]) + bool(options["output_adapter"]))


def _lora_params(options: Mapping[str, Any], widths: Widths, kind: str) -> int:
    """Count LoRA's weights: A and B of every matrix, of (IA)3 a vector, and those of DoRA, MTL-LoRA and gates."""
    by_letter = {"q": widths.query, "k": widths.key, "v": widths.value}
    attention = [by_letter[letter] for letter in options["attn_matrices"]] if options["selfattn_lora"] else []
    others = [widths.intermediate] if options["intermediate_lora"] else []
    others += [widths.output] if options["output_lora"] else []
    modules = [attention] if attention and widths.merged else [[shape] for shape in attention]
    modules += [[shape] for shape in others]
    rank, targets = int(options["r"]), sum(target for module in modules for _, target in module)
    sources = sum(source for module in modules for source, _ in module)
    size = rank * targets + (rank * sources if options["composition_mode"] != "scale" else 0)
    size += targets if options["use_dora"] else 0
    size += sum(len(module) * (module[0][0] + 1) for module in modules) if options["use_gating"] else 0
    if kind == "mtl_lora":  # more copies of B with a weight each, and a diagonal or a matrix of the rank
        copies, is_diagonal = int(options["n_up_projection"]), options["task_specific_matrix_type"] != "linear"
        size += (copies - 1) * rank * targets + len(modules) * (copies + (rank if is_diagonal else rank**2))
    return size


def _reft_params(options: Mapping[str, Any], block: int, hidden: int) -> int:
    """Count ReFT's weights in a block: source and projection of rank r; twice, for prefix and suffix, unless tied."""
    has_tokens = options["prefix_positions"] or options["suffix_positions"]
    if not options["output_reft"] or not has_tokens or (options["layers"] != "all" and block not in options["layers"]):
        return 0
    rank = int(options["r"])
    return (2 * hidden * rank + rank) * (1 if options["tied_weights"] else 2)
