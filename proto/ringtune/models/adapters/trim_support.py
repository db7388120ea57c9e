"""Which runs may leave out what their last block would compute for tokens that the head does not read.

A block of an encoder attends to all tokens and then computes each token by itself. So where the head reads the first
token only, the last block needs queries, feed-forward part and norms for that one. Whatever looks at several tokens
behind the attention, or draws numbers for each, needs all.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringtune.models.adapters.adapter_config import known_configurations, parse_adapter_config
from ringtune.models.family import Family


def may_trim(family: Family, adapter_configs: Iterable[str], *, dropout: float) -> bool:
    """Whether the last block of a family gives the same for the first token if it computes no other.

    Args:
        family: of the model.
        adapter_configs: ``adapter.config`` of the job, and those of users who have others.
        dropout: ``train.dropout`` of the job; it draws other numbers for other shapes.

    Raises:
        JobError: a configuration is refused.
    """
    return family.trims and not dropout and all(map(_is_of_each_token, adapter_configs))


def _is_of_each_token(adapter_config: str) -> bool:
    """Whether adapters look at each token alone: a gate takes a mean, ReFT counts tokens from the end."""
    for part in parse_adapter_config(adapter_config):
        kind, defaults = known_configurations()[part.name]
        options = {**defaults, **part.options}
        if kind == "reft" or options.get("use_gating") or options.get("dropout"):
            return False
    return True
