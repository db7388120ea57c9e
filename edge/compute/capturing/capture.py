"""Record the pairs of offloaded blocks at their host, which computes gradients of hidden states only.

::

    capture = Capture(skeleton, blocks)                  before BlockRunner, which looks for what trains
    with capture.recording() as pairs:                   forward with a graph
        y = runner.run(x, mask, context, start, stop)
    y.backward(grad)                                     pairs fill
    pairs.take(start, stop)                              go to the helper

Outside of ``recording`` the blocks run as ever. A block that is run again for its backward is recorded in that run:
``recording(pairs)`` is open then, with the pairs of its micro-batch. Its first run may be recorded too, as a graph that
is dropped gives no pair.

Source: ColA, section 3, Algorithm 1.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from edge.compute.capturing.pairs import Pairs, SiteFacts, tap
from edge.compute.capturing.signs import pack
from edge.compute.capturing.sites import Passage, Site, sites_of
from edge.model.auxiliary.modules import is_addition
from edge.model.skeleton import Skeleton


class Capture:
    """Watches the adapter modules of some blocks; the weights of these get no gradient.

    Several micro-batches may be under way, each with pairs of its own. Nothing is held between two recordings. Not
    thread-safe.

    Args:
        skeleton: whose blocks these are.
        blocks: offloaded ones.
        with_signs: see there.
        at: model that runs, where the adapters are inside its matrices and ``skeleton`` has adapters of another kind
            for the same matrices; None = the skeleton's own.

    Raises:
        JobError: an adapter that no helper can fit.

    Attributes:
        inputs: values of a token of x, by the names of the sites that have one of their own.
        with_signs: whether pairs say which units of a ReLU are on, as those need that lose something on the wire.
    """

    def __init__(
        self, skeleton: Skeleton, blocks: Iterable[int], *, with_signs: bool = False, at: Skeleton | None = None
    ) -> None:
        self._names: dict[int, list[tuple[str, str]]] = {}
        self.inputs: dict[str, int] = {}
        self.with_signs = with_signs
        self._handles: list[RemovableHandle] = []
        self._pairs: Pairs | None = None
        self._inputs: dict[str, torch.Tensor] = {}
        self._on: dict[str, list[torch.Tensor]] = {}
        for index in blocks:
            sites = sites_of(skeleton, index)
            self._names[index] = [(site.name, site.source) for site in sites]
            self.inputs |= {site.name: site.inputs for site in sites if site.source == site.name}
            for site in sites:
                site.adapter.requires_grad_(False)
                if at is not None:
                    site.move_to(at.blocks[index], skeleton.blocks[index])
                self._watch(site)

    def pairs(self) -> Pairs:
        """Return pairs for a micro-batch, empty yet."""
        return Pairs(self._names)

    @contextlib.contextmanager
    def recording(self, pairs: Pairs | None = None) -> Iterator[Pairs]:
        """Record forwards with a graph while the context is open.

        Args:
            pairs: of a micro-batch some of whose blocks were recorded before; None = new ones.
        """
        before, self._pairs = self._pairs, self.pairs() if pairs is None else pairs
        try:
            yield self._pairs
        finally:
            self._pairs = before
            self._inputs.clear()
            self._on.clear()

    @contextlib.contextmanager
    def of_rows(self, rows: tuple[int, ...]) -> Iterator[None]:
        """Record some rows of a micro-batch by themselves while the context is open; nothing where nothing is."""
        whole = self._pairs
        if whole is None:
            yield
            return
        with self.recording(whole.of_rows(rows)):
            yield

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, site: Site) -> None:
        """Look at the tensors of a site; the site itself is not kept, so that its weights may go."""
        facts = SiteFacts(site.name, site.source, site.alpha, site.columns)
        self._hook(site.reads, functools.partial(self._read, facts.name))
        for passage in site.signs:
            self._hook(passage, functools.partial(self._sign, facts.name))
        self._hook(site.taps, functools.partial(self._tap, facts))

    def _hook(self, passage: Passage, seen: Any) -> None:
        """Watch a tensor; what leaves a module before anything that is hung behind it, such as a bottleneck."""
        module = passage.module
        if passage.is_output:
            self._handles.append(module.register_forward_hook(lambda _, args, output: _replaced(seen, output)))
            hooks, own = module._forward_hooks, {handle.id for handle in self._handles}
            for key in [key for key, hook in hooks.items() if key not in own and not is_addition(hook)]:
                hooks[key] = hooks.pop(key)
        else:
            self._handles.append(module.register_forward_pre_hook(lambda _, args: _replaced(seen, args)))

    def _read(self, name: str, x: torch.Tensor) -> torch.Tensor | None:
        if self._pairs is not None and torch.is_grad_enabled():
            self._inputs[name] = x
        return None

    def _sign(self, name: str, activated: torch.Tensor) -> torch.Tensor | None:
        if self.with_signs and self._pairs is not None and torch.is_grad_enabled():
            self._on.setdefault(name, []).append(activated.detach() > 0)
        return None

    def _tap(self, facts: SiteFacts, y: torch.Tensor) -> torch.Tensor | None:
        x, is_on = self._inputs.pop(facts.name, None), self._on.pop(facts.name, None)
        if x is None or self._pairs is None:
            return None
        signs = None if is_on is None else pack(torch.cat(is_on, dim=-1))
        return tap(y, x, self._pairs, facts, signs)


def _replaced(seen: Any, values: Any) -> Any:
    """Show the first of some values, and return all with what it shall be instead; None where it stays."""
    first = seen(values[0] if isinstance(values, tuple) else values)
    if first is None:
        return None
    return (first, *values[1:]) if isinstance(values, tuple) else first
