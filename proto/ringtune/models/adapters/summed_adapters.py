"""The adapters of several users added up: the one adapter that adds what all of them add.

A sum of products of two matrices is the product of these matrices beside each other, so several LoRA adapters of rank r
add up to one whose rank is the sum of theirs, exactly. Its factor is alpha / rank, so alpha grows with it. A sum of
matrices is a matrix: ``linear`` stays as it is. What is no change of a matrix has no sum of this form.

Where users have several kinds of adapters, all are added up to one matrix beside each matrix that any of them changes,
so that the sum is a ``linear``.

Source: ColA, section 4.3 (collaboration).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ringtune.errors import UsageError
from ringtune.models.adapters.adapter_config import AdapterPart, known_configurations, parse_adapter_config
from ringtune.models.adapters.adapter_options import MOST_RANK
from ringtune.models.adapters.auxiliary_config import INTERMEDIATE, LETTERS, LINEAR, OUTPUT
from ringtune.models.adapters.merge_support import merge_refusal, places_of

GROWING: Final = ("r", "alpha")
"""Options that grow with the number of adapters that are added up."""

_DEFAULT: Final = 8


def summed_config(config: str, count: int) -> str:
    """Return the configuration of ``count`` adapters added up.

    Example: two of ``lora[r=4,alpha=16]`` make ``lora[r=8, alpha=32]``.

    Args:
        config: ``adapter.config`` of each.
        count: how many.

    Raises:
        UsageError: they do not add up to an adapter, or to one of a rank that none may have.
    """
    if problem := merge_refusal(config):
        raise UsageError(
            f"adapters of adapter.config = {config!r} can't be added up: {problem}; give one of them with --user"
        )
    return "|".join(_summed(part, count, config) for part in parse_adapter_config(config))


def sum_of_kinds(configs: Sequence[str]) -> str:
    """Return the configuration of adapters of several kinds added up; of one kind see ``summed_config``.

    Example: ``lora`` and ``linear[attn_matrices=['k']]`` make ``linear[attn_matrices=['q', 'k', 'v']]``.

    Args:
        configs: of each adapter; at least one.

    Raises:
        UsageError: one of them does not add up.
    """
    if all(parse_adapter_config(config) == parse_adapter_config(configs[0]) for config in configs):
        return summed_config(configs[0], len(configs))
    for config in configs:
        if problem := merge_refusal(config):
            raise UsageError(
                f"an adapter of {config!r} can't be added to those of other users: {problem}; give one user with --user"
            )
    places = {place for config in configs for place in places_of(config)}
    known = known_configurations()
    parts = [{**known[part.name][1], **part.options} for config in configs for part in parse_adapter_config(config)]
    left_out = set.intersection(*(set(part["leave_out"]) for part in parts))
    letters = [letter for letter, place in LETTERS.items() if place in places]
    options: dict[str, object] = {"attn_matrices": letters} if letters else {"selfattn_lora": False}
    options |= {f"{place}_lora": True for place in (INTERMEDIATE, OUTPUT) if place in places}
    options |= {"leave_out": sorted(left_out)} if left_out else {}
    return f"{LINEAR}[{', '.join(f'{name}={value!r}' for name, value in options.items())}]"


def lora_scale(part: AdapterPart) -> float:
    """The factor of a LoRA's product: alpha / rank."""
    return float(part.options.get("alpha", _DEFAULT)) / int(part.options.get("r", _DEFAULT))


def _summed(part: AdapterPart, count: int, config: str) -> str:
    """Return one method of a configuration, added up."""
    grown = {} if part.name == LINEAR else _grown(part, count, config)
    options = ", ".join(f"{name}={value!r}" for name, value in {**part.options, **grown}.items())
    return f"{part.name}[{options}]" if options else part.name


def _grown(part: AdapterPart, count: int, config: str) -> dict[str, int | float]:
    """Return the options of a LoRA that grow.

    Raises:
        UsageError: to a rank that none may have.
    """
    grown = {name: part.options.get(name, _DEFAULT) * count for name in GROWING}
    if grown["r"] > MOST_RANK:
        raise UsageError(
            f"{count} adapters of adapter.config = {config!r} add up to rank {grown['r']:,}, at most {MOST_RANK:,} is "
            "allowed; give one of them with --user"
        )
    return grown
