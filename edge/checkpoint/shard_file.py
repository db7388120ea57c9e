"""Safetensors file of a shard: trained tensors and optimizer state of one node.

::

    adapter/<block>.<name>          a trainable tensor of the node's slice
    moments/<block>.<name>/<key>    its optimizer state (AdamW: exp_avg, exp_avg_sq, step), once it was updated
    velora/<block>.<name>           VeLoRA's vector of a linear layer, empty before its first micro-batch
    pairs/<block>.<name>            VeLoRA's vector of a pair, at its host, and once it was sent at the helper
    sums/<block>.<name>             gradient sums between two updates
    merged/<block>.<name>           at a helper of users in collaboration: the sum of their adapters, for another host
    head                            at the owner that holds it: the bytes of ``head_blob``

The metadata names run, plan, node and step. Frozen weights are not in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from edge.checkpoint.snapshots import HEAD, METADATA, STATE, write_blocks
from edge.model.optimizers import NamePrefixes, TrainingState, UnitOptimizers
from edge.model.tensor_files import pieces_of, read_tensor
from ringtune.errors import IntegrityError
from ringtune.storage.pieces import Pieces
from ringtune.storage.strict import parse_json
from ringtune.storage.tensor_files import TensorFile, TensorPieces

FORMAT = "ringtune-shard-1"
PREFIXES = NamePrefixes(value="adapter/", state=f"{STATE}/")
VECTORS, PAIRS, SUMS, MERGED = "velora/", "pairs/", "sums/", "merged/"

Parameters = Mapping[str, torch.nn.Parameter]
Tensors = Mapping[str, torch.Tensor]


class ExtraTensors(Protocol):
    """Tensors of a shard besides the trained ones: VeLoRA's vectors, and a helper's gradient sums."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all of them, by name."""

    def check(self, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
        """Refuse tensors with other names or shapes than those of ``tensors()``; raises ``IntegrityError``."""

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all of them."""


class ShardContent(NamedTuple):
    """What a node has for its shard, and loads from one.

    Attributes:
        parameters: trainable tensors of the node's slice, by name.
        optimizers: over ``parameters``; None if there are none.
        besides: further tensors of the shard, by the prefix of their names.
        installed: tensors of the slice that a helper trains, by name.
        where, part: names of file and tensors in errors.
    """

    parameters: Parameters
    optimizers: UnitOptimizers | None
    besides: Mapping[str, ExtraTensors] = MappingProxyType({})
    installed: Tensors = MappingProxyType({})
    where: str = "the shard"
    part: str = "slice"

    def state(self) -> TrainingState:
        """Return the trained tensors with their optimizer state."""
        return TrainingState(
            values={**self.parameters, **self.installed},
            parameters=self.parameters,
            optimizers=self.optimizers,
            prefixes=PREFIXES,
            where=self.where,
            part=self.part,
        )

    def tensors(self) -> dict[str, TensorPieces]:
        """Return all tensors by their names in a shard, read when the pieces are iterated."""
        tensors = self.state().tensors()
        for prefix, more in self.besides.items():
            tensors |= {f"{prefix}/{name}": pieces_of(value) for name, value in more.tensors().items()}
        return tensors

    def write(self, head: Pieces | None, metadata: Mapping[str, str], blocks: Iterable[int] = ()) -> Pieces:
        """Make the shard of a node, which trains ``blocks``; tensors are read when the pieces are iterated.

        ``head`` is the bytes of ``head_blob``; None = another node holds the head. ``metadata`` is run, plan, node and
        step.
        """
        tensors = self.tensors()
        if head is not None:
            tensors[HEAD] = TensorPieces("U8", (head.size_bytes,), head)
        return write_blocks(tensors, blocks, {"format": FORMAT, **metadata})

    def load(self, data: Pieces, metadata: Mapping[str, str], *, with_head: bool) -> Pieces | None:
        """Replace all tensors by those of a shard.

        The shard must have this metadata, and a head exactly if the node held it at that step (``with_head``).

        Returns:
            The bytes of the head; None if another node held it.

        Raises:
            IntegrityError: the shard is unreadable, of another run, or its tensors do not fit; nothing was changed.
        """
        file = TensorFile(data, where=self.where)
        _check_metadata(file, metadata)
        if with_head is not (HEAD in file.infos):
            raise IntegrityError(
                "the shard has no head, but this node held it at that step"
                if with_head
                else "the shard has a head, but another node held it at that step"
            )
        state = self.state()
        given = {prefix: small_tensors(file, f"{prefix}/") for prefix in self.besides}
        state.check(
            file, besides=(HEAD, *(f"{prefix}/{name}" for prefix, tensors in given.items() for name in tensors))
        )
        for prefix, more in self.besides.items():
            more.check(given[prefix], where=self.where)
        for prefix, more in self.besides.items():
            more.load(given[prefix])
        state.load(file)
        return file.tensor(HEAD).data if with_head else None


def small_tensors(file: TensorFile, prefix: str) -> dict[str, torch.Tensor]:
    """Read the tensors with this prefix into memory."""
    return {name.removeprefix(prefix): read_tensor(file.tensor(name)) for name in file.infos if name.startswith(prefix)}


def _check_metadata(file: TensorFile, metadata: Mapping[str, str]) -> None:
    try:
        stored = dict(parse_json(file.metadata[METADATA]))
    except (KeyError, ValueError, TypeError) as error:
        raise IntegrityError("the shard does not say what it is of") from error
    for key, expected in {"format": FORMAT, **metadata}.items():
        if stored.get(key) != expected:
            raise IntegrityError(f"the shard is of {key} {stored.get(key)!r}, not {expected!r}")
