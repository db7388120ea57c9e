"""Keys and values of a text's tokens, kept by decoder blocks, so that one more token costs a forward of one token.

The cache is transformers' own, with a layer for each block of the model, of which only those of hosted blocks fill. A
block with a window of W tokens keeps W - 1 of them. Bytes of a text of T tokens, float32, for each hosted block::

    2 (key, value) x key-value heads x width of a head x 4 x min(T, W - 1)

    SmolLM2-135M, 30 blocks, 3 heads of 64, 2,048 tokens: 90 MiB

With a cache the tokens of a forward follow those that are in it. Rows are neither padded nor packed.

An adapter that changes a token by its place in the text, as ReFT does with the first ones, or by the tokens beside it,
as a gate does, can not be computed for a later token alone: ``ringtune.models.adapter_support.mixed_tokens``.

Source: transformers 4.57 and 5.24, ``cache_utils.DynamicCache``.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ringtune.models.family import Dimensions


class KeyValueCache:
    """Keys and values of one batch; given to ``BlockRunner.context`` of each forward.

    Attributes:
        of_library: the argument of a block.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self.of_library = _empty(config)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that hosted blocks have computed, also those that a window has forgotten."""
        return max((layer.get_seq_length() for layer in self.of_library.layers), default=0)

    def of_hosted(self, hosted: Sequence[int]) -> Any:
        """Return the argument of blocks for a forward of the library, which asks any block how much is kept.

        In place of those of blocks that are not hosted are those of a hosted one, with a window or without as these. A
        hosted block that has computed no tokens of this cache has those of its own text's stretch in another one.
        """
        layers, count = self.of_library.layers, self.num_tokens
        hosted = [index for index in hosted if layers[index].get_seq_length() == count]
        cache = copy.copy(self.of_library)
        cache.layers = [
            layer
            if index in hosted
            else next(
                (layers[other] for other in hosted if layers[other].is_sliding is layer.is_sliding), layers[hosted[0]]
            )
            for index, layer in enumerate(layers)
        ]
        return cache

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values, with memory that a shortened text leaves allocated."""
        tensors = (part for layer in self.of_library.layers for part in (layer.keys, layer.values))
        return sum(part.untyped_storage().nbytes() for part in tensors if part is not None)

    def keep(self, count: int) -> int:
        """Forget all but the first ``count`` tokens; return how many are left: none where a window has forgotten some.

        Nothing is forgotten if there are no more than ``count``.
        """
        if count >= self.num_tokens:
            return self.num_tokens
        forgetful = (layer for layer in self.of_library.layers if layer.is_sliding)
        if count == 0 or any(layer.get_seq_length() >= layer.sliding_window for layer in forgetful):
            self.of_library = _empty(self._config)
            return 0
        for layer in self.of_library.layers:
            if kept := layer.get_seq_length():
                layer.crop(count - kept)  # transformers 5 takes the number to remove alone
        return count


@functools.cache
def cache_argument(kind: Any) -> str:
    """Name of the argument for a cache in the forward of a class of transformers, which has renamed it twice."""
    names = inspect.signature(kind.forward).parameters
    return next(name for name in ("cache", "past_key_values", "past_key_value") if name in names)


def _empty(config: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=config)


def most_bytes(config: Any, dimensions: Dimensions, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of all blocks for one row of ``tokens`` tokens."""
    heads = dimensions.kv_heads or dimensions.num_heads
    each = 2 * heads * dimensions.head_width * dtype.itemsize
    held = (layer.sliding_window - 1 if layer.is_sliding else tokens for layer in _empty(config).layers)
    return sum(each * min(tokens, count) for count in held)
