"""Sites, the adapter modules of a block: inputs, gradients, signs of ReLUs, and installation of new weights.

A *site* is one trained module g of a block: the hidden state becomes ``h + alpha * g(x)``. A host records two tensors
of each site, and a helper computes g from the first::

    kind                            x                                   gradient is taken at             alpha
    LoRA                            input of the matrix                 output of the matrix             alpha / r
    LoRA with dropout               output of its dropout               output of the matrix             alpha / r
    LoRA with a gate                input of the matrix                 output of the matrix             1
    bottleneck                      input of the bottleneck             its output                       1
    bottleneck with dropout         input of the bottleneck             input of its dropout             1
    linear, mlp                     input of the matrix                 output of the matrix             alpha

A sum passes its gradient to each term, so the gradient of ``h + alpha * g(x)`` is that of ``alpha * g(x)``. The scaling
of a bottleneck may be learned, and is a part of g.

A new kind of adapter is one more class here and a line in ``_site``.

Signs, a bit for each unit of a ReLU (1 = active), are sent with rounded pairs. From a rounded x a helper would find
other units active near zero. Measured on a bottleneck of 24 units and 1,024 tokens in bfloat16: a thousandth of the
units differs, and the gradient is wrong by 2.7 %; with the host's bits by 0.24 %.

New weights are installed after all of them were checked.

B batch rows, T tokens, H units.

Source: ColA, section 3 (the auxiliary model g_w); ``edge.model.adapters``.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from edge.model.adapters.bottleneck import Bottleneck
from edge.model.adapters.lora import LoRA
from edge.model.auxiliary import FUSED_PARTS, FusedDelta, LinearDelta, MlpDelta, alpha_beside
from edge.model.skeleton import ADAPTER, Skeleton
from edge.model.tensor_files import first_not_finite, kind_of, require_kind
from ringtune.errors import DivergedError, IntegrityError, JobError
from ringtune.models.adapter_support import offload_refusal


class ModuleTensor(NamedTuple):
    """Input or output tensor of a module."""

    module: nn.Module
    is_output: bool


class Site(ABC):
    """One adapter module of a block.

    Attributes:
        name: ``3.output.adapters.ringtune``; the prefix of its weights' names.
        adapter: the module with the weights.
        reads: tensor x.
        taps: tensor with the gradient.
        alpha: constant between g and the hidden state.
        columns: a bool for each tapped value, true where the site adds to it; None = all.
        inputs: width of x.
        outputs: width of g(x).
        source: name of the site with the same x; its own name where no other has it.
        signs: output of each ReLU of g.
        units: total number of their units.
    """

    name: str
    adapter: nn.Module
    reads: ModuleTensor
    taps: ModuleTensor
    alpha: float = 1.0
    columns: torch.Tensor | None = None
    inputs: int
    outputs: int
    source: str
    signs: tuple[ModuleTensor, ...] = ()
    units: int = 0

    @abstractmethod
    def delta(self, x: torch.Tensor, is_on: torch.Tensor | None = None) -> torch.Tensor:
        """Compute g(x), without dropout.

        Args:
            x: (batch rows, tokens, inputs).
            is_on: active units, (batch rows, tokens, units); None = computed from x.
        """

    def path(self, block: nn.Module) -> str:
        """Path in a block of the tapped module, such as the matrix."""
        names = (path for path, module in block.named_modules() if module is self.taps.module)
        return str(next(names))

    def move_to(self, block: nn.Module, source: nn.Module) -> None:
        """Hook the same matrix in a block of another model, for a site of block ``source`` with that matrix's input."""
        matrix = block.get_submodule(self.path(source))
        self.reads, self.taps = self.reads._replace(module=matrix), self.taps._replace(module=matrix)

    def add_gradients(self, x: torch.Tensor, grad: torch.Tensor, is_on: torch.Tensor | None = None) -> None:
        """Accumulate the gradients of the weights of g from the gradient of g(x); other arguments as for ``delta``."""
        with torch.enable_grad():
            torch.autograd.backward([self.delta(x, is_on)], [grad])


class LoraSite(Site):
    """LoRA beside one matrix. ``layer``: module of the matrix with its LoRA."""

    def __init__(self, name: str, layer: Any, lora: Any) -> None:
        self.name = self.source = name
        self.adapter = lora
        self.reads, self.taps = ModuleTensor(layer, False), ModuleTensor(layer, True)
        if isinstance(lora.lora_dropout, nn.Dropout):
            self.reads = ModuleTensor(lora.lora_dropout, True)
        self.alpha = 1.0 if lora.use_gating else float(lora.scaling)
        self.inputs, self.outputs = int(lora.lora_A.shape[1]), int(lora.lora_B.shape[0])
        self._lora = lora

    def delta(self, x: torch.Tensor, is_on: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by both matrices; see ``Site.delta``."""
        if self._lora.use_gating:
            gated: torch.Tensor = self._lora(x)
            return gated
        change: torch.Tensor = x @ self._lora.lora_A.t() @ self._lora.lora_B.t()
        return change


class FusedLoraSite(LoraSite):
    """LoRA beside one matrix for query, key and value, with separate factors for some of the three.

    The gradient has only the columns of these.
    """

    def __init__(self, name: str, layer: Any, lora: Any) -> None:
        super().__init__(name, layer, lora)
        self.columns = lora.lora_ind
        self._count = sum(lora.enable_lora)

    def delta(self, x: torch.Tensor, is_on: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by the factors of each part, side by side; see ``Site.delta``."""
        lora, rank = self._lora, self._lora.lora_B.shape[1]
        low = functional.linear(x, lora.lora_A).view(*x.shape[:2], self._count, rank)
        ups = lora.lora_B.view(self._count, -1, rank)
        return torch.einsum("btnr,nor->btno", low, ups).flatten(-2)


class BottleneckSite(Site):
    """A bottleneck, serial or parallel, with its scaling, gate and norms."""

    def __init__(self, name: str, adapter: Any) -> None:
        self.name = self.source = name
        self.adapter = adapter
        self.reads, self.taps = ModuleTensor(adapter, False), ModuleTensor(adapter, True)
        if adapter.dropout.p > 0:
            self.taps = ModuleTensor(adapter.dropout, False)
        self.inputs = self.outputs = int(adapter.input_size)
        if isinstance(adapter.non_linearity.f, nn.ReLU):
            self.signs, self.units = (ModuleTensor(adapter.adapter_up, False),), int(adapter.adapter_up.in_features)

    def delta(self, x: torch.Tensor, is_on: torch.Tensor | None = None) -> torch.Tensor:
        """Run the bottleneck without residual; see ``Site.delta``."""
        activation: Any = self.adapter.non_linearity
        with given(activation, is_on):
            change: torch.Tensor = self.adapter(x)
        return change


class AuxiliarySite(Site):
    """An auxiliary model beside one matrix: ``linear`` or ``mlp``."""

    def __init__(self, name: str, matrix: nn.Module, model: LinearDelta | MlpDelta | FusedDelta, alpha: float) -> None:
        self.name = self.source = name
        self.adapter = model
        self.reads, self.taps = ModuleTensor(matrix, False), ModuleTensor(matrix, True)
        self.alpha = alpha
        self._parts: list[Any] = [model]
        if isinstance(model, FusedDelta):
            self._parts = [model[part] for part in FUSED_PARTS if part in model]
            has_model = torch.tensor([part in model for part in FUSED_PARTS])
            self.columns = has_model.repeat_interleave(model.width)
        ends = [(part, part) if isinstance(part, LinearDelta) else (part.down, part.up) for part in self._parts]
        self.inputs, self.outputs = ends[0][0].in_features, sum(last.out_features for _, last in ends)
        self.signs = tuple(ModuleTensor(part.up, False) for part in self._parts if isinstance(part, MlpDelta))
        self.units = sum(part.up.in_features for part in self._parts if isinstance(part, MlpDelta))

    def delta(self, x: torch.Tensor, is_on: torch.Tensor | None = None) -> torch.Tensor:
        """Run the model, or the models of query, key and value side by side; see ``Site.delta``."""
        if is_on is None or not self.units:
            changes = [part(x) for part in self._parts]
        else:
            widths = [part.up.in_features for part in self._parts if isinstance(part, MlpDelta)]
            signs = iter(torch.split(is_on, widths, dim=-1))
            changes = [
                part.up(part.down(x) * next(signs)) if isinstance(part, MlpDelta) else part(x) for part in self._parts
            ]
        return changes[0] if len(changes) == 1 else torch.cat(changes, dim=-1)

    @torch.no_grad()
    def add_gradients(self, x: torch.Tensor, grad: torch.Tensor, is_on: torch.Tensor | None = None) -> None:
        """See ``Site.add_gradients``; for ``linear`` the product that autograd would compute, without g(x)."""
        if not all(isinstance(part, LinearDelta) for part in self._parts):
            super().add_gradients(x, grad, is_on)
            return
        rows = x.flatten(0, -2)
        for part, rows_of_part in zip(self._parts, grad.flatten(0, -2).chunk(len(self._parts), dim=-1), strict=True):
            gradient = rows_of_part.t().mm(rows).to(part.weight.dtype)
            part.weight.grad = gradient if part.weight.grad is None else part.weight.grad.add_(gradient)


def sites_of(skeleton: Skeleton, index: int) -> list[Site]:
    """List the sites of one block, in the order of its modules; raises ``JobError``."""
    block = skeleton.blocks[index]
    sites = [
        _site(f"{index}.{path}", module, path, block)
        for path, module in block.named_modules()
        if path.split(".")[-1] == ADAPTER
    ]
    layout, modules = skeleton.layout.layout, dict(block.named_modules())
    paths = [path for role in ("query", "key", "value") for path in layout.matrices_of(role)]
    attention = [modules[path] for path in paths if path in modules and not skeleton.layout.apart]
    for at, site in enumerate(sites):
        site.source = next((other.name for other in sites[:at] if _share(other, site, attention)), site.name)
    return sites


def _share(first: Site, second: Site, attention: list[nn.Module]) -> bool:
    """Whether two sites read one tensor without dropout: of one matrix, or of query, key and value."""
    if first.reads.is_output or second.reads.is_output:
        return False
    module, other = first.reads.module, second.reads.module
    return module is other or all(any(each is part for part in attention) for each in (module, other))


def _site(name: str, adapter: Any, path: str, block: nn.Module) -> Site:
    if isinstance(adapter, Bottleneck):
        return BottleneckSite(name, adapter)
    if isinstance(adapter, LinearDelta | MlpDelta | FusedDelta):
        matrix = block.get_submodule(path.removesuffix(f".{ADAPTER}"))
        return AuxiliarySite(name, matrix, adapter, alpha_beside(matrix, ADAPTER))
    if type(adapter) is LoRA and not adapter.use_dora:
        layer = block.get_submodule(path.removesuffix(f".loras.{ADAPTER}"))
        kind = FusedLoraSite if adapter.enable_lora else LoraSite
        return kind(name, layer, adapter)
    raise JobError(
        f"{name} is a {type(adapter).__name__}, which no helper can fit; use lora, seq_bn or double_seq_bn, or leave "
        "[offload] out"
    )


def check_config(config: str, skeleton: Skeleton, *, dropout: float) -> None:
    """Refuse adapters that a helper can't fit; ``config`` is ``adapter.config`` of the job; raises ``JobError``."""
    if problem := offload_refusal(config, dropout=dropout, fused=skeleton.layout.layout.is_merged):
        raise JobError(problem)


def pack(is_on: torch.Tensor) -> torch.Tensor:
    """Pack 8 units of (B, T, H) in a byte, the first one in the lowest bit."""
    missing = -is_on.shape[-1] % 8
    whole = functional.pad(is_on.to(torch.uint8), (0, missing)).unflatten(-1, (-1, 8))  # type: ignore[no-untyped-call]
    packed: torch.Tensor = (whole << torch.arange(8, dtype=torch.uint8, device=is_on.device)).sum(-1, dtype=torch.uint8)
    return packed


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Unpack ``count`` units to (B, T, H) of bool."""
    bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten(-2)[..., :count].bool()


@contextlib.contextmanager
def given(activation: nn.Module, is_on: torch.Tensor | None) -> Iterator[None]:
    """Let an activation function pass exactly these units inside the context; None = no change."""
    if is_on is None:
        yield
        return

    def passed(_: Any, args: tuple[torch.Tensor, ...], __: torch.Tensor) -> torch.Tensor:
        return args[0] * is_on

    handle = activation.register_forward_hook(passed)
    try:
        yield
    finally:
        handle.remove()


def adapter_weights(skeleton: Skeleton, blocks: Iterable[int]) -> dict[str, nn.Parameter]:
    """Return the weights of all adapter modules of some blocks, by the names of ``BlockRunner``."""
    return {
        f"{index}.{name}": parameter
        for index in blocks
        for name, parameter in skeleton.blocks[index].named_parameters()
        if f".{ADAPTER}." in name
    }


def copy_of(value: torch.Tensor) -> torch.Tensor:
    """Return a copy; a copy of zeros takes memory only where it is written."""
    detached = value.detach()
    return detached.clone() if bool(detached.any()) else torch.zeros_like(detached)


def check_like(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Refuse tensors that differ from ``expected`` in names, shapes or types, or are not finite.

    ``where`` names the tensors in errors.

    Raises:
        IntegrityError: names the first tensor that differs.
        DivergedError: names the first tensor that is not finite.
    """
    if odd := sorted(tensors.keys() ^ expected.keys()):
        many = "too much" if odd[0] in tensors else "too little"
        raise IntegrityError(f"{where} has {odd[0]} {many}; host and helper need the same plan and job")
    for name, like in expected.items():
        require_kind(name, kind_of(tensors[name]), kind_of(like), where=where)
    if name := first_not_finite({name: tensors[name] for name in expected}):
        raise DivergedError(f"{where} has {name} with numbers that are not finite")


def install(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Replace ``parameters`` by other tensors in place, once all were checked; errors as for ``check_like``.

    A graph of the old values fails in its backward; it never uses the new ones.
    """
    check_like(tensors, parameters, where=where)
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(tensors[name])
