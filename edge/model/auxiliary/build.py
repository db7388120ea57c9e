"""Put auxiliary models into the blocks of a skeleton, and give those of one block their initial values.

The skeleton holds no numbers of them, as a ``linear`` is as large as the matrices it stands beside. A block that a node
hosts gets its values from a generator seeded by run, block and tensor, so they are equal wherever the block lives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator

import torch
from torch import nn

from edge.model.auxiliary.modules import FUSED_PARTS, Delta, make_delta, make_fused_delta, put_beside
from edge.model.layouts import BlockLayout
from ringtune.models.adapters.auxiliary_config import (
    INTERMEDIATE,
    OUTPUT,
    PLACES,
    AuxiliaryConfig,
    check_alphas,
    in_block,
)


def add_auxiliary(
    blocks: nn.ModuleList, layout: BlockLayout, auxiliary: Collection[AuxiliaryConfig], *, name: str
) -> None:
    """Put auxiliary models into all blocks but those that are left out; what trains there already trains on.

    Args:
        blocks: with or without the library's modules; their weights may be placeholders.
        layout: of the family.
        auxiliary: which kinds, and where; of each matrix one (see ``check_places``).
        name: of the adapter; in the names of its tensors.

    Raises:
        JobError: several stand beside one matrix with factors that differ.
    """
    for index, block in enumerate(blocks):
        configs = {place: config for config in in_block(auxiliary, index) for place in config.places}
        for path, places in places_by_module(layout, configs).items():
            matrix = block.get_submodule(path)
            outputs, inputs = _shape_of(matrix, layout)
            if layout.is_merged and places[0] in FUSED_PARTS:
                own = {place: configs[place] for place in places}
                check_alphas(own.values())
                delta: nn.Module = make_fused_delta(own, inputs, outputs)
            else:
                delta = make_delta(configs[places[0]], inputs, outputs)
            put_beside(matrix, delta, name=name, alpha=configs[places[0]].alpha)


def places_by_module(layout: BlockLayout, places: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The module of each matrix inside a block -> the places that it has; three at most where they are one matrix."""
    paths = {
        **{part: getattr(layout, part) for part in FUSED_PARTS},
        INTERMEDIATE: layout.lora_intermediate,
        OUTPUT: layout.lora_output,
    }
    chosen = [place for place in PLACES if place in places]
    modules = dict.fromkeys(paths[place] for place in chosen)
    return {path: tuple(place for place in chosen if paths[place] == path) for path in modules}


def start_auxiliary(block: nn.Module, *, seed: int, index: int) -> None:
    """Give the auxiliary models of one block memory and initial values; a block without any stays as it is.

    Args:
        block: from a skeleton.
        seed: of the run.
        index: of the block.
    """
    for path, delta in deltas_of(block):

        def seeded(name: str, path: str = path) -> torch.Generator:
            digest = hashlib.sha256(f"{seed}/auxiliary/{index}/{path}.{name}".encode()).digest()
            return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))

        delta.start(seeded)


def deltas_of(block: nn.Module) -> Iterator[tuple[str, Delta]]:
    """Yield every auxiliary model in a block, with its path in it; the parts of a fused one each."""
    for path, module in block.named_modules():
        if isinstance(module, Delta):
            yield path, module


def _shape_of(matrix: nn.Module, layout: BlockLayout) -> tuple[int, int]:
    """Outputs and inputs of a matrix."""
    first, second = matrix.get_parameter("weight").shape
    return (second, first) if layout.inputs_first else (first, second)
