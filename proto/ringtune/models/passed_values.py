"""What the blocks of a model pass on besides one hidden state, as values of a token in one wide tensor.

Blocks of a few small models read more than the hidden state of the block below. Between two blocks, and so between two
nodes, all of it is one tensor, whose width falls from block to block::

    [ hidden state, or several side by side | keys and values that later blocks read | inputs of the blocks to come ]
      <---------------- has a gradient ----------------------------------------->     <----- frozen, no gradient ---->

The inputs are made by the owner, who alone has the token ids: for each block a row of a table, and a projection of the
embedding. Keys and values are those of the last block of each kind of attention before ``num_kv_shared_layers`` blocks,
which have none of their own. What enters the head is the hidden state alone.

Example: Gemma 4 E2B has 35 blocks of width 1,536 with inputs of 256 values. Block 0 gets 1,536 + 35 * 256 = 10,496
values a token, block 20 1,536 + 512 + 1,024 + 15 * 256 = 6,912, and 3,072 of these have a gradient.

Source: ``Gemma4TextModel`` and ``Gemma3nTextModel`` of transformers 5.24.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

Config = Mapping[str, Any]


class SharedKeys(NamedTuple):
    """Keys and values of one block that later blocks read.

    Attributes:
        kind: of attention.
        made_at: the block that makes them.
        last_read: the last block that reads them.
        values: of a token, keys and values together.
    """

    kind: str
    made_at: int
    last_read: int
    values: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PassedValues:
    """Parts of the tensor that enters each block.

    Attributes:
        hidden: values of a token's hidden states, all streams together.
        inputs: values of a token's input of each block; 0 = there are none.
    """

    num_blocks: int
    hidden: int
    inputs: int = 0
    shared: tuple[SharedKeys, ...] = ()

    def keys_at(self, boundary: int) -> tuple[SharedKeys, ...]:
        """Return the keys and values that enter a block or the head."""
        return tuple(keys for keys in self.shared if keys.made_at < boundary <= keys.last_read)

    @property
    def returning(self) -> tuple[int, ...]:
        """Values of a token with a gradient, from block 0 to the head; they are the first ones."""
        return tuple(
            self.hidden + sum(keys.values for keys in self.keys_at(boundary)) for boundary in range(self.num_blocks + 1)
        )

    @property
    def entering(self) -> tuple[int, ...]:
        """Values of a token that enter each block, and the head."""
        return tuple(
            width + (self.num_blocks - boundary) * self.inputs for boundary, width in enumerate(self.returning)
        )


_WINDOW: Final = "sliding_attention"
_FULL: Final = "full_attention"
_INPUTS: Final = 256
_SHARED_3N: Final = 15
_OF_KEYS: Final = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")


def gemma4_passed(config: Config) -> PassedValues | None:
    """Return what blocks of Gemma 4 pass on; None where it is the hidden state alone, as of all but E2B and E4B."""
    count, blocks = int(config["num_hidden_layers"]), config.get("per_layer_config")
    inputs, sharing = config.get("hidden_size_per_layer_input", _INPUTS) or 0, _num_sharing(config)
    if not inputs and not sharing:
        return None
    kinds, values = _gemma4_kinds(config), dict[str, int]()
    heads, width = int(config.get("num_key_value_heads") or 4), int(config.get("head_dim") or _INPUTS)
    for at, kind in enumerate(kinds[: count - sharing]):
        block: Mapping[str, Any] = {}
        if blocks is not None:
            block = blocks.get(str(at), blocks.get(at, {}))
        elif kind == _FULL:
            global_heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
            block = {"head_dim": config.get("global_head_dim", 512), "num_key_value_heads": global_heads or heads}
        values[kind] = 2 * block.get("head_dim", width) * block.get("num_key_value_heads", heads)
    shared = _shared_keys(kinds, sharing, values)
    return PassedValues(num_blocks=count, hidden=int(config["hidden_size"]), inputs=inputs, shared=shared)


def gemma3n_passed(config: Config) -> PassedValues:
    """Return what blocks of Gemma 3n pass on: several hidden states, which each block predicts and corrects (AltUp)."""
    kinds = _gemma3n_kinds(config)
    values = 2 * int(config.get("num_key_value_heads") or 2) * int(config.get("head_dim") or _INPUTS)
    return PassedValues(
        num_blocks=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]) * int(config.get("altup_num_inputs") or 4),
        inputs=int(config.get("hidden_size_per_layer_input") or _INPUTS),
        shared=_shared_keys(kinds, _num_sharing(config, _SHARED_3N), dict.fromkeys(kinds, values)),
    )


def _unread(config: Config, *, default: int) -> tuple[str, ...]:
    """Return prefixes of the keys and values that files have of blocks that read those of others."""
    count = int(config["num_hidden_layers"])
    sharing = range(count - _num_sharing(config, default), count)
    return tuple(f"layers.{block}.self_attn.{name}" for block in sharing for name in _OF_KEYS)


def _num_sharing(config: Config, default: int = 0) -> int:
    count = config.get("num_kv_shared_layers")
    return default if count is None else int(count)


def _gemma4_kinds(config: Config) -> tuple[str, ...]:
    """Return the kind of attention of each block; the last one has no window, whatever the config says."""
    return (*_kinds(config, 6)[:-1], _FULL)


def _gemma3n_kinds(config: Config) -> tuple[str, ...]:
    return _kinds(config, 5)


def _kinds(config: Config, pattern: int) -> tuple[str, ...]:
    """Return ``layer_types``; without them each ``pattern``-th block has no window."""
    count = int(config["num_hidden_layers"])
    return tuple(config.get("layer_types") or (_WINDOW if (at + 1) % pattern else _FULL for at in range(count)))


def _shared_keys(kinds: tuple[str, ...], sharing: int, values: Mapping[str, int]) -> tuple[SharedKeys, ...]:
    """Return the keys and values that the last ``sharing`` blocks read; ``values`` of a token by kind."""
    first = len(kinds) - sharing
    readers = {kind: at for at, kind in enumerate(kinds) if at >= first}
    makers = {kind: at for at, kind in enumerate(kinds) if at < first}
    return tuple(SharedKeys(kind, makers[kind], readers[kind], values[kind]) for kind in sorted(readers))


def _kinds_problem(config: Config, *, kinds_of: Callable[[Config], tuple[str, ...]], default: int) -> str:
    """Say why blocks can't share keys and values, or can't have inputs; empty if they can."""
    count, kinds = config["num_hidden_layers"], config.get("layer_types")
    is_list = kinds is None or (
        isinstance(kinds, list) and len(kinds) == count and {*map(str, kinds)} <= {_WINDOW, _FULL}
    )
    if not is_list:
        return f"layer_types has to name {_WINDOW} or {_FULL} for each of {count} blocks"
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input", "altup_num_inputs", "head_dim"):
        if (value := config.get(key)) is not None and (type(value) is not int or not 0 <= value < 1 << 31):
            return f"{key} is {value!r}, it has to be a whole number from 0 on"
    sharing = _num_sharing(config, default)
    if sharing and config.get("hidden_size_per_layer_input") == 0:
        return "num_kv_shared_layers: transformers computes no model with shared keys and without inputs of blocks"
    if sharing >= count:
        return f"num_kv_shared_layers is {sharing}, of {count} blocks the first ones have to make keys"
    kind_of_block = kinds_of(config)
    if lacking := {*kind_of_block[count - sharing :]} - {*kind_of_block[: count - sharing]}:
        return f"num_kv_shared_layers: no block before the last {sharing} makes keys of {min(lacking)}"
    return ""


gemma4_unread = functools.partial(_unread, default=0)
gemma3n_unread = functools.partial(_unread, default=_SHARED_3N)
gemma4_kinds_problem = functools.partial(_kinds_problem, kinds_of=_gemma4_kinds, default=0)
gemma3n_kinds_problem = functools.partial(_kinds_problem, kinds_of=_gemma3n_kinds, default=_SHARED_3N)
