"""ReFT: a change of the first and last tokens of each row behind a block.

``h + R^T (f(W h + b) - R h)`` for chosen tokens; the rows of R are orthogonal (loreft) or not (noreft).

The first and last tokens are those by the mask, which a run of blocks sets (``rows_of``). Modules compute, name and
draw their weights as AdapterHub's.

B batch rows, T tokens, D model width, P prefix or suffix tokens.

Source: adapters 1.3.0, ``methods.reft``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from edge.model.adapters.bottleneck import Activation, seed_weights

_run = threading.local()
"""Mask and places of the blocks that this thread runs."""


@contextlib.contextmanager
def rows_of(mask_BT: torch.Tensor) -> Iterator[None]:
    """Let ReFT take first and last tokens by this mask inside the context."""
    before = getattr(_run, "rows", None)
    _run.rows = _Rows(mask_BT)
    try:
        yield
    finally:
        _run.rows = before


def read_mask(base: nn.Module) -> None:
    """Let ReFT in a base model take the mask of each call of the model: ``attention_mask``, or the second argument."""

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _run.rows = _Rows(kwargs.get("attention_mask", args[1] if len(args) > 1 else None))

    def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        _run.rows = None

    base.register_forward_pre_hook(begin, with_kwargs=True)
    base.register_forward_hook(end, always_call=True)


class _Rows:
    """Where the rows of a micro-batch begin and end; blocks share the tensors."""

    def __init__(self, mask_BT: torch.Tensor | None) -> None:
        self._mask_BT = mask_BT
        self._places: dict[tuple[Any, ...], torch.Tensor] = {}

    def places(self, hidden_BTD: torch.Tensor, count: int, *, is_suffix: bool) -> torch.Tensor:
        """Return the places (B, P, D) of the first or last tokens, at most ``count``, for ``gather``.

        A row with fewer tokens has its other places in the padding, which nothing reads.
        """
        key = (count, is_suffix, hidden_BTD.shape)
        if key not in self._places:
            rows, tokens, width = hidden_BTD.shape
            first = last = torch.zeros(rows, dtype=torch.long, device=hidden_BTD.device)
            if self._mask_BT is None:
                last = last + tokens
            else:
                first = self._mask_BT.argmax(1).to(hidden_BTD.device)
                last = first + (self._mask_BT == 1).sum(dim=-1).to(hidden_BTD.device)
            count = min(count, tokens)
            steps = torch.arange(-count, 0) if is_suffix else torch.arange(count)
            steps_P1 = steps.unsqueeze(-1).to(hidden_BTD.device)
            edge_B11 = (last if is_suffix else first).view(-1, 1, 1)
            self._places[key] = (edge_B11 + steps_P1.expand(rows, count, width)) % tokens
        return self._places[key]


class ReftUnit(nn.Module):
    """The change of one kind of tokens."""

    def __init__(self, width: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        seed_weights(options["init_weights_seed"])
        self.learned_source = nn.Linear(width, options["r"])
        self.projection: nn.Module = nn.Linear(width, options["r"], bias=False)
        if options["orthogonality"]:
            self.projection = nn.utils.parametrizations.orthogonal(self.projection)
        self.non_linearity = Activation(options["non_linearity"])
        self.dropout = nn.Dropout(options["dropout"])

    def forward(self, x_BPD: torch.Tensor) -> torch.Tensor:
        """Change the hidden state of chosen tokens."""
        source = self.non_linearity(self.learned_source(x_BPD)) - self.projection(x_BPD)
        weight: Any = self.projection.weight
        changed: torch.Tensor = self.dropout(x_BPD + torch.matmul(source, weight))
        return changed


class Reft(nn.Module):
    """ReFT behind one block, with a unit for the prefix and one for the suffix, or one for both."""

    def __init__(self, width: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._prefix, self._suffix = int(options["prefix_positions"]), int(options["suffix_positions"])
        self._is_tied = options["tied_weights"]
        self.units = nn.ModuleList(ReftUnit(width, options) for _ in range(1 if self._is_tied else 2))

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Change the first and last tokens of a hidden state."""
        rows = getattr(_run, "rows", None) or _Rows(None)
        counts = (self._prefix, self._suffix)
        places = [rows.places(hidden_BTD, count, is_suffix=bool(at)) for at, count in enumerate(counts)]
        parts = [hidden_BTD.gather(1, at_BPD) for at_BPD in places]
        if self._is_tied:
            parts = [torch.cat(parts, dim=1)]
        changed = [unit(part) for unit, part in zip(self.units, parts, strict=True)]
        changed_BPD = torch.cat(changed, dim=1).to(hidden_BTD.dtype)
        each = torch.split(changed_BPD, [at_BPD.shape[1] for at_BPD in places], dim=1)
        for at_BPD, new_BPD in zip(places, each, strict=True):
            if at_BPD.shape[1]:
                hidden_BTD = torch.scatter(hidden_BTD, 1, at_BPD, new_BPD)
        return hidden_BTD

    def changed(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Change the output of a block, of which a tuple has the hidden state first; a forward hook."""
        return self(output) if isinstance(output, torch.Tensor) else (self(output[0]), *output[1:])
