"""Pairs of the adapter modules of offloaded blocks: recorded at the host, and encoded for the helper.

A pair is the input x of an adapter module and the gradient of its output. A *tap* is an identity in the graph: it keeps
x, as the weights' gradient would, and adds x and the gradient to the pairs in its backward. A graph begins at the
lowest tap, so it keeps only x and the tensors for the gradient of the hidden state.

::

    capture = Capture(skeleton, blocks)                  before BlockRunner, which lists what trains
    with capture.recording() as pairs:                   forward with a graph
        y = runner.run(x, mask, context, start, stop)
    y.backward(grad)                                     pairs are filled
    pairs.take(start, stop)                              for the helper

Outside of ``recording`` the blocks run unchanged. A recomputed block is recorded in its recomputation, inside
``recording(pairs)`` with the pairs of its micro-batch; a dropped graph of its first run gives no pair.

``Captures`` has a capture for each kind of users' adapters. A kind's pairs have the rows of its users, so each row is
sent once. The name of a pair begins with its kind (``ringtune.job.job``): ``3.output.adapters.ringtune.x`` of the job's
own, ``1/3.output.adapters.ringtune.x`` of the next.

Pairs and weights travel as safetensors files:

============ ======================================= ==========================================================
wire         of an input x                           of a gradient
============ ======================================= ==========================================================
``float32``  as it is, in the type of the run        as it is
``bfloat16`` rounded                                 rounded
``velora``   ``z``: each sub-token times ``v``       as it is
============ ======================================= ==========================================================

With a rounded or projected x also the bits of each ReLU are sent: ``signs``, which ``Capture`` records on demand.
The gradient itself is sent, never the target ``g(x) - grad``: in 16 bits the difference of two such numbers is lost.
A site's v is computed from the first micro-batch, fixed, and sent as ``v`` with each z. With ``z v`` in place of x all
gradients of a module are approximate, also those behind a non-linearity.

Source: ColA, section 3, Algorithm 1 (adaptation data), and section 4.3 (users choose the architecture of their models);
VeLoRA, section 3.1, for z.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch

from edge.checkpoint.snapshots import block_of
from edge.model.adapters.bottleneck import BottleneckHooks
from edge.model.skeleton import Skeleton
from edge.model.tensor_files import pieces_of, read_tensor
from edge.techniques.offload.sites import ModuleTensor, Site, pack, sites_of
from edge.techniques.velora import Vectors, is_finite_vector, project
from ringtune.errors import IntegrityError, PlanError
from ringtune.job.job import AdapterKind
from ringtune.schedule.course import ALL_INPUTS, BFLOAT16
from ringtune.schedule.saved_activations import DEFAULT_PARTS, VELORA, subtoken_size
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, write_tensors
from ringtune.techniques.offload import RowsOfUser
from ringtune.texts import shown


class SiteFacts(NamedTuple):
    """Attributes of a ``Site`` that pairs need, without its weights."""

    name: str
    source: str
    alpha: float
    columns: torch.Tensor | None


def projected_inputs(kinds: Iterable[tuple[AdapterKind, Iterable[Site]]], projected: str) -> dict[str, int]:
    """Return the width of each x that VeLoRA projects, by the pair's name; ``projected`` is one of ``PROJECTED``."""
    inputs: dict[str, int] = {}
    for kind, sites in kinds:
        sites_of_kind, outputs = list(sites), Counter[str]()
        for site in sites_of_kind:
            outputs[site.source] += site.outputs
        for site in sites_of_kind:
            if site.source == site.name and (projected == ALL_INPUTS or site.inputs > outputs[site.name]):
                inputs[f"{kind.prefix}{site.name}"] = site.inputs
    return inputs


class Pairs:
    """Recorded pairs of one micro-batch. ``names``: block -> (name, source) of each of its sites."""

    def __init__(self, names: Mapping[int, Iterable[tuple[str, str]]]) -> None:
        self._names = {index: list(sites) for index, sites in names.items()}
        self._parts: dict[tuple[int, ...], Pairs] = {}
        self._inputs: dict[str, torch.Tensor] = {}
        self._grads: dict[str, torch.Tensor] = {}
        self._signs: dict[str, torch.Tensor] = {}

    def add(self, facts: SiteFacts, x: torch.Tensor, grad: torch.Tensor, signs: torch.Tensor | None = None) -> None:
        """Add x, the gradient of the tapped tensor of a site, and the packed signs.

        Raises ``PlanError``: the site has its pair already, or its x is not that of its source.
        """
        x, grad = _by_token(x), _by_token(grad)
        if facts.name in self._grads:
            raise PlanError(f"{facts.name} gave two pairs for one micro-batch; a backward ran twice")
        first = self._inputs.setdefault(facts.source, x)
        if first.data_ptr() != x.data_ptr():
            raise PlanError(f"{facts.name} does not read the tensor that {facts.source} reads")
        part = grad if facts.columns is None else grad[..., facts.columns]
        self._grads[facts.name] = part if facts.alpha == 1.0 else part * facts.alpha
        if signs is not None:
            self._signs[facts.name] = signs

    def of_rows(self, rows: tuple[int, ...]) -> Pairs:
        """Return the pairs of some rows, recorded separately; ``take`` joins all rows.

        ``rows`` are positions in the micro-batch; each is in at most one part.
        """
        return self._parts.setdefault(rows, Pairs(self._names))

    def take(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the pairs of blocks ``[start, stop)``, and drop them.

        Returns:
            ``3.output.adapters.ringtune.x`` and ``.grad`` of each site, and ``.signs`` where recorded. Of sites with
            the same input only the source has an x. The gradient is that of g(x), (batch rows, tokens, outputs).

        Raises:
            PlanError: a site gave no pair: it had no backward, or its block did not run as a whole.
        """
        if self._parts:
            return _put_together({rows: part.take(start, stop) for rows, part in self._parts.items()})
        pairs: dict[str, torch.Tensor] = {}
        for index in range(start, stop):
            for name, source in self._names.get(index, ()):
                if name not in self._grads:
                    raise PlanError(
                        f"{name} gave no pair; offloaded blocks need a backward, and no operations of parts"
                    )
                if source in self._inputs:
                    pairs[f"{source}.x"] = self._inputs.pop(source)
                pairs[f"{name}.grad"] = self._grads.pop(name)
                if name in self._signs:
                    pairs[f"{name}.signs"] = self._signs.pop(name)
        return pairs

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every held tensor."""
        yield from (*self._inputs.values(), *self._grads.values(), *self._signs.values())
        for part in self._parts.values():
            yield from part.tensors()


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    """Return (rows, tokens, values), also of a tensor with a dimension between rows and tokens."""
    return tensor.flatten(1, -2) if tensor.dim() > 3 else tensor


def _put_together(parts: Mapping[tuple[int, ...], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the pairs of all recorded rows, in the order of the rows."""
    places = {row: place for place, row in enumerate(sorted(row for rows in parts for row in rows))}
    joined: dict[str, torch.Tensor] = {}
    for rows, pairs in parts.items():
        targets = [places[row] for row in rows]
        for name, some in pairs.items():
            whole = joined.setdefault(name, some.new_empty((len(places), *some.shape[1:])))
            whole[targets] = some
    return joined


def tap(
    y: torch.Tensor, x: torch.Tensor, pairs: Pairs, facts: SiteFacts, signs: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``y`` with a backward that adds the pair of a site to ``pairs``.

    x is the input of the adapter; ``signs`` are packed, or None if they are not recorded.
    """
    anchor = torch.empty(0, requires_grad=True)
    tapped: torch.Tensor = _Tap.apply(y, anchor, x.detach(), signs, pairs, facts)  # type: ignore[no-untyped-call]
    return tapped


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, anchor: torch.Tensor, x: torch.Tensor, signs: Any, pairs: Pairs, facts: SiteFacts
    ) -> Any:
        ctx.save_for_backward(x, signs)
        ctx.pairs, ctx.facts = pairs, facts
        return y.detach()  # shares y, and may be changed in place, as OLMo clips it

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, signs = ctx.saved_tensors
        ctx.pairs.add(ctx.facts, x, grads[0], signs)
        return grads[0] if ctx.needs_input_grad[0] else None, None, None, None, None, None


class Capture:
    """Records the pairs of some blocks' adapter modules, whose weights get no gradient.

    Several micro-batches may be open, each with pairs of its own. Nothing is held between two recordings. Not
    thread-safe.

    Args:
        blocks: offloaded ones.
        at: the model that runs, where merged matrices replace the adapters and ``skeleton`` has another kind of
            adapters for the same matrices; None = ``skeleton``.
        with_signs: whether pairs have the signs of ReLUs, which lossy encodings need.

    Attributes:
        sites: of these blocks.

    Raises:
        JobError: an adapter that no helper can fit.
    """

    def __init__(
        self, skeleton: Skeleton, blocks: Iterable[int], *, with_signs: bool = False, at: Skeleton | None = None
    ) -> None:
        self._names: dict[int, list[tuple[str, str]]] = {}
        self.sites: list[Site] = []
        self._with_signs = with_signs
        self._pairs: Pairs | None = None
        self._inputs: dict[str, torch.Tensor] = {}
        self._on: dict[str, list[torch.Tensor]] = {}
        for index in blocks:
            sites = sites_of(skeleton, index)
            self._names[index] = [(site.name, site.source) for site in sites]
            self.sites += sites
            for site in sites:
                site.adapter.requires_grad_(False)
                if at is not None:
                    site.move_to(at.blocks[index], skeleton.blocks[index])
                self._watch(site)

    def pairs(self) -> Pairs:
        """Return empty pairs for a micro-batch."""
        return Pairs(self._names)

    @contextlib.contextmanager
    def recording(self, pairs: Pairs | None = None) -> Iterator[Pairs]:
        """Record forwards with a graph inside the context.

        ``pairs`` are those of a micro-batch with blocks recorded before; None = new ones.
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
        """Record some rows of a micro-batch separately inside the context; does nothing outside of ``recording``."""
        whole = self._pairs
        if whole is None:
            yield
            return
        with self.recording(whole.of_rows(rows)):
            yield

    def _watch(self, site: Site) -> None:
        """Hook the tensors of a site; the site is not referenced, so that its weights may be freed."""
        facts = SiteFacts(site.name, site.source, site.alpha, site.columns)
        self._hook(site.reads, functools.partial(self._read, facts.name))
        for passage in site.signs:
            self._hook(passage, functools.partial(self._sign, facts.name))
        self._hook(site.taps, functools.partial(self._tap, facts))

    def _hook(self, passage: ModuleTensor, seen: Any) -> None:
        """Hook a tensor; the output of a module before the bottleneck behind it."""
        module = passage.module
        if passage.is_output:
            module.register_forward_hook(lambda _, args, output: _replaced(seen, output))
            hooks = module._forward_hooks
            for key in [
                key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), BottleneckHooks)
            ]:
                hooks[key] = hooks.pop(key)
        else:
            module.register_forward_pre_hook(lambda _, args: _replaced(seen, args))

    def _read(self, name: str, x: torch.Tensor) -> torch.Tensor | None:
        if self._pairs is not None and torch.is_grad_enabled():
            self._inputs[name] = x
        return None

    def _sign(self, name: str, activated: torch.Tensor) -> torch.Tensor | None:
        if self._with_signs and self._pairs is not None and torch.is_grad_enabled():
            self._on.setdefault(name, []).append(activated.detach() > 0)
        return None

    def _tap(self, facts: SiteFacts, y: torch.Tensor) -> torch.Tensor | None:
        x, is_on = self._inputs.pop(facts.name, None), self._on.pop(facts.name, None)
        if x is None or self._pairs is None:
            return None
        signs = None if is_on is None else pack(torch.cat(is_on, dim=-1))
        return tap(y, x, self._pairs, facts, signs)


def _replaced(seen: Any, values: Any) -> Any:
    """Call ``seen`` with the first value; return all values with its replacement, or None if it returns None."""
    first = seen(values[0] if isinstance(values, tuple) else values)
    if first is None:
        return None
    return (first, *values[1:]) if isinstance(values, tuple) else first


class Captures:
    """Records the pairs of a host's offloaded blocks, of every kind.

    Args:
        kinds: of the run, each with its capture.
        by_kind: whether rows run by kind; otherwise (merged adapters) all rows run together, and each kind picks the
            recorded rows of its users.
    """

    def __init__(self, kinds: Sequence[tuple[AdapterKind, Capture]], *, by_kind: bool) -> None:
        self._kinds = tuple(kinds)
        self._of_user = {user: (kind, capture) for kind, capture in kinds for user in kind.users}
        self._by_kind = by_kind

    def inputs(self, projected: str) -> dict[str, int]:
        """See ``projected_inputs``."""
        return projected_inputs([(kind, capture.sites) for kind, capture in self._kinds], projected)

    @contextlib.contextmanager
    def recording(self, given: PairsByKind | None, rows: Sequence[RowsOfUser]) -> Iterator[PairsByKind]:
        """Record forwards with a graph inside the context; see ``Capture.recording``.

        ``rows`` are those of each user in the micro-batch; empty with one set for all users.
        """
        pairs = given if given is not None else self._pairs(rows)
        with contextlib.ExitStack() as stack:
            for kind, capture in self._kinds:
                if kind.number in pairs.parts:
                    stack.enter_context(capture.recording(pairs.parts[kind.number].pairs))
            yield pairs

    def of_rows(self, user: str, positions: tuple[int, ...]) -> AbstractContextManager[None]:
        """Record a user's rows of a micro-batch separately inside the context; nothing outside of ``recording``."""
        return self._of_user[user][1].of_rows(positions)

    def _pairs(self, rows: Sequence[RowsOfUser]) -> PairsByKind:
        """Return empty pairs of the kinds that have rows."""
        parts: dict[int, _Part] = {}
        for kind, capture in self._kinds:
            of_kind = [position for user, positions in rows if user in kind.users for position in positions]
            if of_kind or not rows:
                picked = sorted(of_kind) if of_kind and not self._by_kind and len(self._kinds) > 1 else None
                parts[kind.number] = _Part(kind.prefix, capture.pairs(), picked)
        return PairsByKind(parts)


class _Part(NamedTuple):
    """Pairs of one kind, and the recorded rows of its users; None = all rows."""

    prefix: str
    pairs: Pairs
    picked: list[int] | None


class PairsByKind:
    """Recorded pairs of one micro-batch, by index of the kind; only of kinds with rows in it."""

    def __init__(self, parts: Mapping[int, _Part]) -> None:
        self.parts = parts

    def take(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the pairs of blocks ``[start, stop)``, named with the kind's prefix, and drop them."""
        tensors: dict[str, torch.Tensor] = {}
        for prefix, pairs, picked in self.parts.values():
            for name, value in pairs.take(start, stop).items():
                tensors[f"{prefix}{name}"] = value if picked is None else value[picked]
        return tensors

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every held tensor."""
        for part in self.parts.values():
            yield from part.pairs.tensors()


_X: Final = ".x"
_Z: Final = ".z"
_VECTOR: Final = ".v"

Tensors = Mapping[str, torch.Tensor]


class PairWire:
    """Encoder of pairs at a host, or decoder at its helper.

    Args:
        wire: one of ``PAIRS``.
        parts: sub-tokens of an x with ``velora``, see ``ringtune.schedule.saved_activations.Velora``.

    Attributes:
        inputs: width of each x that is projected, by the name of its site.
        vectors: of a host with ``velora``, for checkpoints; otherwise None.
        known: the vectors that a helper was sent, by site.
    """

    def __init__(self, wire: str, inputs: Mapping[str, int], *, parts: int = DEFAULT_PARTS, seed: int = 0) -> None:
        self._wire, self.inputs = wire, dict(inputs)
        self._sizes = {name: subtoken_size(size, min(parts, size)) for name, size in inputs.items()}
        self.vectors = Vectors(self._sizes, init="average", seed=seed) if wire == VELORA else None
        self.known: dict[str, torch.Tensor] = {}

    def learn(self, vectors: Tensors, *, where: str) -> None:
        """Take vectors that another helper was sent; those of sites without projections are ignored.

        Raises ``IntegrityError``: one has another size, or numbers that are not finite.
        """
        known = {site: value for site, value in vectors.items() if site in self.inputs and value.numel()}
        for site, value in known.items():
            if value.shape != (self._sizes[site],) or not is_finite_vector(value):
                raise IntegrityError(f"{where} has a vector of {site} with another size, or impossible numbers")
        self.known |= known

    def encode(self, pairs: Tensors) -> dict[str, torch.Tensor]:
        """Return the encoded pairs; with ``velora`` a projected pair has its vector beside it."""
        if self._wire == BFLOAT16:
            return {
                name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
                for name, tensor in pairs.items()
            }
        encoded: dict[str, torch.Tensor] = {}
        for name, tensor in pairs.items():
            site = name.removesuffix(_X)
            if self.vectors is not None and name.endswith(_X) and site in self.inputs:
                encoded |= self._projected(self.vectors, site, tensor)
            else:
                encoded[name] = tensor
        return encoded

    def num_values(self, sent: Tensors) -> int:
        """Count the numbers of the pairs as decoded, when a projection has many times as many."""
        width = {f"{site}{_Z}": inputs for site, inputs in self.inputs.items()} if self._wire == VELORA else {}
        return sum(
            value.shape[:2].numel() * width[name] if name in width else value.numel() for name, value in sent.items()
        )

    def decode(self, sent: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return pairs for ``AuxiliaryModels.fit``, in the compute ``dtype``; raises ``IntegrityError``."""
        vectors = {name.removesuffix(_VECTOR): value for name, value in sent.items() if name.endswith(_VECTOR)}
        if odd := sorted(site for site, vector in vectors.items() if vector.shape != (self._sizes.get(site, -1),)):
            raise IntegrityError(f"a vector {list(vectors[odd[0]].shape)} of {shown(odd[0])} came, which is none here")
        self.known |= vectors
        decoded: dict[str, torch.Tensor] = {}
        for name, tensor in sent.items():
            if self._wire == VELORA and name.endswith(_Z):
                site = name.removesuffix(_Z)
                decoded[site + _X] = self._rebuilt(site, tensor).to(dtype)
            elif not name.endswith(_VECTOR):
                decoded[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        return decoded

    @torch.no_grad()
    def _projected(self, vectors: Vectors, site: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        vector = vectors.next(site, x)
        return {site + _Z: project(x, vector).view(*x.shape[:2], -1), site + _VECTOR: vector}

    def _rebuilt(self, site: str, z: torch.Tensor) -> torch.Tensor:
        vector, inputs = self.known.get(site), self.inputs.get(site)
        if vector is None or inputs is None:
            raise IntegrityError(f"a projection of {site} came, but not the vector that it was projected on")
        if vector.shape != (self._sizes[site],) or z.dim() != 3 or z.shape[2] != -(-inputs // len(vector)):
            raise IntegrityError(
                f"the projection of {site} is {list(z.shape)} on a vector {list(vector.shape)}, expected one for "
                f"{inputs} inputs in sub-tokens of {self._sizes[site]}"
            )
        return (z.unsqueeze(-1) * vector).flatten(2)[..., :inputs]


class PairVectors:
    """VeLoRA's vectors of a node's pairs: of a host that projects them, and of helpers that were sent them.

    Args:
        host: vectors of the host; None = it has no helpers.
        shown: decoders of the helper.
    """

    def __init__(self, host: Vectors | None, shown: Sequence[PairWire]) -> None:
        self._host, self._shown = host, shown

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the vectors by site; of the host all, empty before the first micro-batch."""
        vectors = {} if self._host is None else self._host.tensors()
        return vectors | {site: value for wire in self._shown for site, value in wire.known.items()}

    def check(self, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
        """Refuse vectors of other sites, or of other sizes than the host's; earlier versions saved none at a helper.

        Raises ``IntegrityError``: sites or sizes differ.
        """
        vectors = {} if self._host is None else self._host.tensors()
        known = vectors.keys() | {site for wire in self._shown for site in wire.inputs}
        if odd := sorted(tensors.keys() - known):
            raise IntegrityError(f"{where} has a vector of {odd[0]}, which is not projected here")
        if self._host is not None:
            self._host.check({name: tensors[name] for name in vectors if name in tensors}, where=where)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all vectors."""
        if self._host is not None:
            self._host.load({name: tensors[name] for name in self._host.tensors()})
        for wire in self._shown:
            wire.learn(tensors, where="the shard")

    def load_blocks(self, tensors: Mapping[str, torch.Tensor], blocks: Collection[int], *, where: str) -> None:
        """Replace the vectors of some blocks by those that their helper was sent; it may not have all yet.

        Raises ``IntegrityError``: sizes differ, numbers are not finite, or a block of this host has none: a new vector
        would change the result.
        """
        if self._host is not None:
            names = [name for name in self._host.tensors() if block_of(name) in blocks]
            shown = {block_of(name) for name in names if name in tensors and tensors[name].numel()}
            if lacking := sorted({block_of(name) for name in names} - shown):
                raise IntegrityError(
                    f"{where} have no vector of the pairs of block {lacking[0]}, which earlier versions did not save "
                    "at a helper; resume the run on its own nodes"
                )
            self._host.load_blocks({name: tensors.get(name, torch.zeros(0)) for name in names}, blocks, where=where)
        for wire in self._shown:
            wire.learn(tensors, where=where)


def to_file(tensors: Tensors, metadata: Mapping[str, str]) -> Pieces:
    """Write encoded pairs or weights as a file with ``metadata``, read when iterated: they must not change before."""
    return write_tensors({name: pieces_of(value) for name, value in tensors.items()}, metadata=metadata)


def from_file(
    data: Pieces, metadata: Mapping[str, str], *, where: str, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Read a file of ``to_file`` with this metadata to ``device``; None = the CPU.

    Memory of ``data`` is freed while it is read; ``where`` names it in errors.

    Raises ``IntegrityError``: the file is unreadable, or of another item or version.
    """
    file = TensorFile(data, where=where)
    for key, expected in metadata.items():
        if file.metadata.get(key) != expected:
            raise IntegrityError(
                f"{where} are of {key} {file.metadata.get(key)!r}, not {expected!r}; use one version on all machines"
            )
    tensors: dict[str, torch.Tensor] = {}
    for name in file.infos:
        tensors[name] = read_tensor(file.tensor(name), device)
        file.release_pages(name)
    return tensors
