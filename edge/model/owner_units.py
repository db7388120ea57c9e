"""The trained tensors of an owner: those of the embedding and those of the head, by name.

A head alone trains where blocks have adapters. Where all parameters train, the units of a model are complete::

    embedding   token table, positions, their norm                    wte.weight, embeddings.LayerNorm.bias, ...
    head        last norm, decoder of its own, or a new head          ln_f.weight, lm_head.weight, heads.ringtune.1.bias

A tensor that embedding and head share belongs to the embedding alone. The head then computes with a stand-in, another
parameter on the same memory, so that each of the two has a gradient of its own: whatever the order in which backwards
of head and embedding come, their sum is the same in every bit.

Source: HiFT, section III-A (the embedding is the bottom unit, the head the top one).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from edge.model.heads import HEAD
from edge.model.skeleton import Skeleton, owner_modules
from ringtune.models.family import LM_HEAD
from ringtune.schedule.units import EMBEDDING, head_of

Parameters = dict[str, nn.Parameter]


def owner_units(skeleton: Skeleton, head: nn.Module) -> dict[int, Parameters]:
    """Return the trained parameters of the embedding and of the head, each by name.

    Names are those in the base model, of a decoder ``lm_head.weight``, of a new head ``heads.ringtune.<name>``. Where
    only the head trains, they are those inside the head.

    Args:
        skeleton: of which the owner's parts are real.
        head: the head module of the skeleton.
    """
    top = head_of(len(skeleton.blocks))
    own = {name: value for name, value in head.named_parameters() if value.requires_grad}
    if not skeleton.full_parameters:
        return {EMBEDDING: {}, top: own}
    units: dict[int, Parameters] = {EMBEDDING: {}, top: {}}
    for path, part in owner_modules(skeleton):
        unit = top if path in skeleton.layout.head_paths else EMBEDDING
        units[unit] |= {f"{path}.{name}": value for name, value in part.named_parameters() if value.requires_grad}
    units[top] |= _head(skeleton, head, own)
    return units


def embedding_modules(skeleton: Skeleton) -> tuple[nn.Module, ...]:
    """Return every child of the base model that a hidden state may pass before block 0, dropout included."""
    top = skeleton.layout.blocks_path.partition(".")[0]
    return tuple(child for name, child in skeleton.base.named_children() if name != top)


def tied_table(skeleton: Skeleton, head: nn.Module) -> tuple[nn.Parameter, nn.Parameter] | None:
    """Return the token table that also is the decoder, and the stand-in that the head has; None if none trains so."""
    table = skeleton.model.get_input_embeddings() if skeleton.full_parameters else None
    if not isinstance(table, nn.Embedding):
        return None
    weight = table.get_parameter("weight")
    stand_ins = (value for value in head.parameters() if value.data_ptr() == weight.data_ptr())
    return next(((weight, value) for value in stand_ins), None)


def _head(skeleton: Skeleton, head: nn.Module, own: Mapping[str, nn.Parameter]) -> Parameters:
    """Return the parameters of the head but a tied one, by their names in the whole model."""
    tied = tied_table(skeleton, head)
    decoder = getattr(head, "get_output_embeddings", lambda: None)()
    found: Parameters = {}
    for name, value in own.items():
        if tied is not None and value is tied[1]:
            continue
        is_decoder = decoder is not None and value is decoder.weight
        found[LM_HEAD if is_decoder else f"heads.{HEAD}.{name}"] = value
    return found
