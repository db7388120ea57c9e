"""The unit vectors that the inputs of linear layers are projected on: where they come from, and how they are kept.

==========  ==================================================================================================
init        the vector v of a layer
==========  ==================================================================================================
average     mean sub-token of the first micro-batch, normalised; then fixed
running     for micro-batch n = 1, 2, ...: the mean over the means of the micro-batches 1 to n, normalised
svd         first right singular vector of the sub-tokens of the first micro-batch; then fixed
random      drawn from the seed of the run and the layer's name, normalised; fixed
==========  ==================================================================================================

Micro-batches are counted at each layer in the order in which they pass it, as far as it trains in them. They pass a
unit in the order of (item, micro-batch), so that no timing and no split of the blocks changes a vector. A vector that
was handed out is never written to: a graph keeps the one that it was made with.

Source: VeLoRA, sections 3.2 and 5.3. The paper does not define its running average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch

from edge.compute.saving.projected import subtokens
from edge.model.dropout import unit_seed
from ringtune.errors import IntegrityError

_COUNT: Final = "/count"


class Vectors:
    """The vectors of some layers.

    Args:
        sizes: layer -> values M of a sub-token.
        init: one of ``ringtune.schedule.saving.INITS``.
        seed: of the run.
    """

    def __init__(self, sizes: Mapping[str, int], *, init: str, seed: int) -> None:
        self._sizes, self._init, self._seed = dict(sizes), init, seed
        self._found: dict[str, torch.Tensor] = {}  # the vector; with a running average the mean, not normalised
        self._counts: dict[str, int] = {}

    def next(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        """Return the vector (M) for the next micro-batch of a layer, whose input is ``x``; it may be made of it."""
        if self._init == "running":
            return self._next_running(layer, x)
        if layer not in self._found:
            self._found[layer] = self._first(layer, x)
        return self._on_device(layer, x)

    def _next_running(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        mean, count = subtokens(x, self._sizes[layer]).mean(0), self._counts.get(layer, 0) + 1
        if layer in self._found:
            before = self._on_device(layer, x)
            mean = before + (mean - before) / count
        self._found[layer], self._counts[layer] = mean, count
        return _unit(mean)

    def _on_device(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        """Return what is held of a layer where its input is; a checkpoint was read elsewhere."""
        if self._found[layer].device != x.device:
            self._found[layer] = self._found[layer].to(x.device)
        return self._found[layer]

    def _first(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        size = self._sizes[layer]
        if self._init == "random":
            generator = torch.Generator().manual_seed(unit_seed(self._seed, 0, 0, f"velora/{layer}"))
            return _unit(torch.randn(size, generator=generator, dtype=torch.float64)).to(x)
        parts = subtokens(x, size)
        return _unit(parts.mean(0)) if self._init == "average" else _principal(parts)

    # ---- checkpoints ------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint needs: for every layer its vector, which is empty before the first micro-batch."""
        found = {layer: self._found.get(layer, torch.zeros(0)) for layer in sorted(self._sizes)}
        if self._init == "running":
            found |= {f"{layer}{_COUNT}": torch.tensor(self._counts.get(layer, 0)) for layer in sorted(self._sizes)}
        return found

    def check(self, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
        """Refuse tensors that ``tensors`` can't have given.

        Raises:
            IntegrityError: tensors of other layers, or of another size.
        """
        if tensors.keys() != self.tensors().keys():
            names = sorted(tensors.keys() ^ self.tensors().keys())
            raise IntegrityError(f"{where} has VeLoRA's vectors of other layers than this node's: {names[0]}")
        for layer, size in self._sizes.items():
            if tuple(tensors[layer].shape) not in {(0,), (size,)}:
                shape = list(tensors[layer].shape)
                raise IntegrityError(f"{where} has VeLoRA's vector of {layer} as {shape}, expected [{size}]")

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all vectors by what ``tensors`` gave, and ``check`` has seen."""
        self._found = {layer: tensors[layer] for layer in self._sizes if tensors[layer].numel()}
        counts = {layer: tensors.get(f"{layer}{_COUNT}") for layer in self._found}
        self._counts = {layer: int(count) for layer, count in counts.items() if count is not None}


def _unit(vector: torch.Tensor) -> torch.Tensor:
    """Scale a vector to length 1; one without direction becomes that of equal values."""
    length = float(vector.norm())
    if not math.isfinite(length) or length == 0:
        return torch.full_like(vector, 1 / math.sqrt(len(vector)))
    return vector / length


def _principal(parts: torch.Tensor) -> torch.Tensor:
    """Return the first right singular vector of some rows, with the sign that makes its sum positive.

    What diverged has none, and gives a vector of equal values: the loss that ends the run says what is wrong.
    """
    squares = (parts.t() @ parts).double()
    if not squares.isfinite().all():
        return _unit(torch.full_like(parts[0], math.nan))
    _, vectors = torch.linalg.eigh(squares)
    first = vectors[:, -1]
    return _unit(first if float(first.sum()) >= 0 else -first).to(parts)
