"""The pairs of one micro-batch: what entered each adapter module, and the gradient of what the module gave.

A *tap* is an identity that autograd sees. It keeps x for its backward, as the weights' own gradient would, and hands x
and the gradient to the pairs when the backward comes by. A graph begins at the lowest tap, as it would at the lowest
weight that trains. So all that a graph keeps is what the gradient of the hidden state needs, and x.

Source: ColA, section 3, Algorithm 1 (adaptation data).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ringtune.errors import PlanError


class SiteFacts(NamedTuple):
    """What pairs need to know of a site; see ``Site``."""

    name: str
    source: str
    alpha: float
    columns: torch.Tensor | None


class Pairs:
    """What was recorded of one micro-batch.

    Args:
        names: block -> (name, source) of each of its sites.
    """

    def __init__(self, names: Mapping[int, Iterable[tuple[str, str]]]) -> None:
        self._names = {index: list(found) for index, found in names.items()}
        self._parts: dict[tuple[int, ...], Pairs] = {}
        self._inputs: dict[str, torch.Tensor] = {}
        self._grads: dict[str, torch.Tensor] = {}
        self._signs: dict[str, torch.Tensor] = {}

    def add(self, facts: SiteFacts, x: torch.Tensor, grad: torch.Tensor, signs: torch.Tensor | None = None) -> None:
        """Take x, the gradient of the tapped tensor of a site, and the units that were on, packed.

        Raises:
            PlanError: the site has its pair already, or its x is not that of its source.
        """
        if facts.name in self._grads:
            raise PlanError(f"{facts.name} gave two pairs for one micro-batch; a backward ran twice")
        first = self._inputs.setdefault(facts.source, x)
        if first.data_ptr() != x.data_ptr():
            raise PlanError(f"{facts.name} does not read the tensor that {facts.source} reads")
        own = grad if facts.columns is None else grad[..., facts.columns]
        self._grads[facts.name] = own if facts.alpha == 1.0 else own * facts.alpha
        if signs is not None:
            self._signs[facts.name] = signs

    def of_rows(self, rows: tuple[int, ...]) -> Pairs:
        """Return the pairs of some rows, which are recorded by themselves; ``take`` puts all rows together.

        Args:
            rows: positions in the micro-batch; each is in one part at most.
        """
        return self._parts.setdefault(rows, Pairs(self._names))

    def take(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Hand out the pairs of blocks ``[start, stop)``, and drop them.

        Returns:
            ``3.output.adapters.ringtune.x`` and ``.grad`` of each site; of sites that read one tensor only the source
            has an x. The gradient is that of g(x), (batch rows, tokens, outputs). ``.signs`` too, where recorded.

        Raises:
            PlanError: a site gave no pair: no backward was there, or its block did not run as a whole.
        """
        if self._parts:
            return _put_together({rows: part.take(start, stop) for rows, part in self._parts.items()})
        found: dict[str, torch.Tensor] = {}
        for index in range(start, stop):
            for name, source in self._names.get(index, ()):
                if name not in self._grads:
                    raise PlanError(
                        f"{name} gave no pair; offloaded blocks need a backward, and no operations of parts"
                    )
                if source in self._inputs:
                    found[f"{source}.x"] = self._inputs.pop(source)
                found[f"{name}.grad"] = self._grads.pop(name)
                if name in self._signs:
                    found[f"{name}.signs"] = self._signs.pop(name)
        return found

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that is held."""
        yield from (*self._inputs.values(), *self._grads.values(), *self._signs.values())
        for part in self._parts.values():
            yield from part.tensors()


def _put_together(parts: Mapping[tuple[int, ...], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the pairs of all rows that were recorded, in the order of the rows."""
    places = {row: place for place, row in enumerate(sorted(row for rows in parts for row in rows))}
    found: dict[str, torch.Tensor] = {}
    for rows, pairs in parts.items():
        own = [places[row] for row in rows]
        for name, some in pairs.items():
            whole = found.setdefault(name, some.new_empty((len(places), *some.shape[1:])))
            whole[own] = some
    return found


def tap(
    y: torch.Tensor, x: torch.Tensor, pairs: Pairs, facts: SiteFacts, signs: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``y``; its backward gives the pair of a site to ``pairs``.

    Args:
        y: the tapped tensor.
        x: enters the adapter.
        pairs: of the micro-batch.
        facts: of the site.
        signs: its units that are on, packed; None = not wanted.
    """
    anchor = torch.empty(0, requires_grad=True)
    found: torch.Tensor = _Tap.apply(y, anchor, x.detach(), signs, pairs, facts)  # type: ignore[no-untyped-call]
    return found


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, anchor: torch.Tensor, x: torch.Tensor, signs: Any, pairs: Pairs, facts: SiteFacts
    ) -> Any:
        ctx.save_for_backward(x, signs)
        ctx.pairs, ctx.facts = pairs, facts
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, signs = ctx.saved_tensors
        ctx.pairs.add(ctx.facts, x, grads[0], signs)
        return grads[0] if ctx.needs_input_grad[0] else None, None, None, None, None, None
