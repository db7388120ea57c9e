"""Head groups: subnets of a block, their weights, and forwards of a block with some of its subnets.

A subnet has the rows of its heads in the matrices of queries, keys and values, its share of rows in the first matrix of
the feed-forward part (and in the gate), and the matching columns in the two output matrices. Norms and the biases of
the output matrices belong to no subnet. Example: BERT of width 384 with 12 subnets; subnet 1 has rows 32 to 63 of
``query``, columns 32 to 63 of ``attention.output.dense``, and rows 128 to 255 of ``intermediate.dense``. Of LoRA it has
the same rows of B, and the same columns of A.

A pattern of full subnets runs the module itself. A block of shortcuts only is the identity. A block without full
subnets adds its output without a graph, so that the gradient passes it unchanged.

With a graph, full subnets are computed together; forward-only ones are computed without a graph, on the detached input.
Both results are summed, with the output bias once, and pass the library's bottlenecks and norms::

    pattern 1132      x ---------> heads 0, 1 ---.
                      x.detach() -> head 3 --------+--> + bias --> bottleneck, residual, norm --> ...

Without a graph, full and forward-only subnets are the same.

Dropout draws the masks of the whole block, in the order of its modules, and a subnet has its part of them: the
probabilities of its heads, its inputs of the output matrices. So a subnet drops the same numbers whatever the others
do. A block without full subnets draws nothing, as a frozen one. On an accelerator a whole block draws in other kernels
than parts of one, which drop other numbers there.

The active subnets of a block are ranges of rows (or columns) of its matrices, with neighbours joined. Each range is one
matrix product that writes into its part of the result, or adds to it, without a copy of the rows. So the graph keeps no
more than that of the whole matrix, for trained and frozen matrices alike.

A block of a generic family runs by its architecture's own forward, in copies of its modules that share all weights.
The copies of attention and feed-forward part compute full subnets and then forward-only ones, each with the rows or
columns of these subnets alone. Norms, rotary tables and factors are the architecture's. There is no dropout.

Measured on one core (x86, 1,024 tokens, widths 384 and 768, 7 of 12 subnets): within 2 % of a product with a matrix cut
out before, for one range and for four. A cut at each call costs up to 2 % too, and the graph would hold the copy.

B batch rows, T tokens, D model width, H heads, W width of a head. Of a product: N rows of the input, I inputs,
O outputs, a active inputs or outputs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from edge.model.adapters.bottleneck import Bottleneck, joined
from edge.model.adapters.lora import beside
from edge.model.families.recorded import copied
from edge.model.frozen_weights import FrozenMatrix, mm_into
from edge.model.skeleton import ADAPTER, Skeleton
from ringtune.models.families import LAYOUTS
from ringtune.models.family import BlockLayout
from ringtune.schedule.operation_tables import FORWARD_ONLY, FULL, SHORTCUT, Subnets


class WeightSlice(NamedTuple):
    """A range of one parameter."""

    name: str
    dimension: int
    start: int
    stop: int


class Matrix(NamedTuple):
    """One matrix of a block that subnets share.

    Attributes:
        has_own_rows: whether a subnet has some of its outputs; otherwise some of its inputs.
        offset: first output of this matrix in a fused one.
        width: of one unit: of a head, or 1 in the feed-forward part.
    """

    module: str
    has_own_rows: bool
    offset: int
    width: int
    is_query: bool
    is_attention: bool

    def unit_range(self, subnets: Subnets, subnet: int) -> tuple[int, int]:
        """Outputs, or inputs, [start, stop) of a subnet."""
        if self.is_attention:
            each = subnets.heads_each if self.is_query else subnets.kv_heads_each
            start, stop = subnet * each, (subnet + 1) * each
        else:
            start, stop = subnets.inner_range(subnet)
        return self.offset + start * self.width, self.offset + stop * self.width


def subnets_of_block(block: nn.Module, model_type: str, config: Any, count: int) -> Subnets:
    """Divide a block of the base model into ``count`` subnets; raises ``PlanError``."""
    layout = LAYOUTS[model_type]
    return subnets_of_config(config, inner=_outputs_and_inputs(block, layout, layout.up)[0], count=count)


def subnets_of_config(config: Any, *, inner: int, count: int) -> Subnets:
    """Divide every block of a model, of inner width ``inner``, into ``count`` subnets; raises ``PlanError``."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return Subnets(heads=heads, kv_heads=kv_heads, inner=inner, count=count)


def matrices(block: nn.Module, model_type: str, subnets: Subnets) -> dict[str, Matrix]:
    """Return the matrices that subnets share, by their field in the layout; ``gate`` only if the family has one."""
    layout = LAYOUTS[model_type]
    width = _outputs_and_inputs(block, layout, layout.attention_out)[1] // subnets.heads
    offset = subnets.heads * width if layout.is_merged else 0
    of_queries = ("query", "attention_out")
    attention = {"query": 0, "key": offset, "value": 2 * offset, "attention_out": 0}
    by_role = {
        role: Matrix(getattr(layout, role), role != "attention_out", at, width, role in of_queries, True)
        for role, at in attention.items()
    }
    inner = [role for role in ("up", "down", "gate") if getattr(layout, role)]
    return by_role | {role: Matrix(getattr(layout, role), role != "down", 0, 1, False, False) for role in inner}


def subnet_slices(block: nn.Module, model_type: str, subnets: Subnets) -> tuple[tuple[WeightSlice, ...], ...]:
    """Return the ranges of base weights and biases of each subnet; together they cover each named parameter."""
    inputs_first = LAYOUTS[model_type].inputs_first
    shared = matrices(block, model_type, subnets).values()
    return tuple(
        tuple(part for matrix in shared for part in _parts(block, matrix, subnets, subnet, inputs_first))
        for subnet in range(subnets.count)
    )


def adapter_slices(
    block: nn.Module, model_type: str, subnets: Subnets
) -> tuple[tuple[tuple[WeightSlice, ...], ...], tuple[WeightSlice, ...]]:
    """Return the ranges of a block's adapter that each subnet has, and the tensors that belong to all of them.

    Together they cover each trainable parameter.
    """
    shared = list(_lora_matrices(block, matrices(block, model_type, subnets)))
    by_subnet = [
        tuple(WeightSlice(name, dimension, *matrix.unit_range(subnets, subnet)) for name, dimension, matrix in shared)
        for subnet in range(subnets.count)
    ]
    divided = {part.name for part in by_subnet[0]}
    rest = (entry for entry in block.named_parameters() if entry[1].requires_grad and entry[0] not in divided)
    return tuple(by_subnet), tuple(WeightSlice(name, 0, 0, len(value)) for name, value in rest)


def _lora_matrices(block: nn.Module, shared: Mapping[str, Matrix]) -> Iterator[tuple[str, int, Matrix]]:
    """Yield the factor of each LoRA that is divided as its matrix: name, dimension and units."""
    for field, matrix in shared.items():
        module: Any = block.get_submodule(matrix.module)
        lora = beside(module, ADAPTER)
        if lora is None:
            continue
        if enabled := getattr(lora, "enable_lora", None):  # a fused matrix, with outputs of the wrapped ones in turn
            at = _ATTENTION.index(field)
            if not enabled[at]:
                continue
            matrix = matrix._replace(offset=sum(enabled[:at]) * (len(lora.lora_ind) // 3))
        factor, dimension = ("lora_B", 0) if matrix.has_own_rows else ("lora_A", 1)
        yield f"{matrix.module}.loras.{ADAPTER}.{factor}", dimension, matrix


def _parts(
    block: nn.Module, matrix: Matrix, subnets: Subnets, subnet: int, inputs_first: bool
) -> Iterator[WeightSlice]:
    start, stop = matrix.unit_range(subnets, subnet)
    yield WeightSlice(f"{matrix.module}.weight", int(matrix.has_own_rows is inputs_first), start, stop)
    if matrix.has_own_rows and block.get_submodule(matrix.module).bias is not None:
        yield WeightSlice(f"{matrix.module}.bias", 0, start, stop)


def _outputs_and_inputs(block: nn.Module, layout: BlockLayout, module: str) -> tuple[int, int]:
    first, second = block.get_parameter(f"{module}.weight").shape
    return (second, first) if layout.inputs_first else (first, second)


Whole = Callable[[torch.Tensor], torch.Tensor]


class HeadGroups:
    """Runs the hosted blocks of a model with any pattern of subnets; make it after ``materialise``.

    Args:
        skeleton: with real hosted blocks.
        dropout: probability in training mode.
    """

    def __init__(self, skeleton: Skeleton, dropout: float = 0.0) -> None:
        self._skeleton, self._dropout = skeleton, dropout
        self._blocks: dict[tuple[int, int], PartialBlock | NarrowedBlock] = {}

    def run(self, index: int, hidden_BTD: torch.Tensor, context: Any, pattern: str, whole: Whole) -> torch.Tensor:
        """Run one block; torch's grad mode decides whether a graph is kept. ``whole`` runs the whole block.

        ``context`` is of ``FamilyForward.context``. ``pattern`` has a code for each subnet; empty = all full.
        """
        if set(pattern) == {SHORTCUT}:
            return hidden_BTD
        if torch.is_grad_enabled() and pattern and FULL not in pattern:
            with torch.no_grad():
                change = self.run(index, hidden_BTD, context, pattern, whole) - hidden_BTD
            return hidden_BTD + change
        if not torch.is_grad_enabled():
            pattern = pattern.replace(FORWARD_ONLY, FULL)
        if set(pattern) <= {FULL}:
            return whole(hidden_BTD)
        return self._block(index, len(pattern)).run(hidden_BTD, context, pattern)

    def _block(self, index: int, count: int) -> PartialBlock | NarrowedBlock:
        if (index, count) not in self._blocks:
            skeleton, block = self._skeleton, self._skeleton.blocks[index]
            subnets = subnets_of_block(block, skeleton.layout.model_type, skeleton.model.config, count)
            partial = PartialBlock(block, skeleton.layout.model_type, subnets, self._dropout)
            is_generic = skeleton.layout.generic
            self._blocks[index, count] = NarrowedBlock(block, partial, skeleton.family) if is_generic else partial
        return self._blocks[index, count]


Active = tuple[int, ...]
"""Computed subnets, ascending."""
_ATTENTION: Final = ("query", "key", "value")
Drop = Callable[[torch.Tensor], torch.Tensor]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values of some heads: (B, H, T, W) each."""


class DropoutMasks:
    """Dropout masks of one run of a block; each is drawn once, for the whole layer.

    Attributes:
        draws: whether there are any.
    """

    def __init__(self, probability: float) -> None:
        self.draws = probability > 0
        self._kept = 1 - probability
        self._drawn: dict[str, torch.Tensor] = {}

    def drop(
        self, place: str, x: torch.Tensor, ranges: Ranges = (), *, dimension: int = -1, whole: int = 0
    ) -> torch.Tensor:
        """Drop numbers of a tensor.

        Args:
            place: name of the mask; the same name has the same mask.
            x: to be dropped.
            ranges: of the layer that are side by side in ``x``; empty = the whole layer.
            dimension: along which they are.
            whole: size of the whole layer along it.
        """
        if not self.draws:
            return x
        if place not in self._drawn:
            shape = list(x.shape)
            shape[dimension] = whole if ranges else shape[dimension]
            self._drawn[place] = x.new_empty(shape).bernoulli_(self._kept).div_(self._kept)
        mask = self._drawn[place]
        if ranges:
            mask = torch.cat([mask.narrow(dimension, start, stop - start) for start, stop in ranges], dimension)
        return x * mask


class PartialBlock:
    """Runs one block by its subnets; weights are read at each run, because an update may replace them.

    Args:
        dropout: probability of every dropout in the block, in training mode.
    """

    def __init__(self, block: nn.Module, model_type: str, subnets: Subnets, dropout: float) -> None:
        self._layout = LAYOUTS[model_type]
        self._attend: Any = ATTEND.get(model_type)  # a generic family computes it by its own forward
        self._subnets, self._block, self._dropout = subnets, block, dropout
        self._masks = DropoutMasks(0.0)
        self._matrices = matrices(block, model_type, subnets)
        inside = {path: module for path, module in block.named_modules() if path}
        paths = {name: getattr(self._layout, name) for name in self._layout.__dataclass_fields__}
        self._modules: dict[str, Any] = {name: inside[path] for name, path in paths.items() if path in inside}

    def run(self, hidden_BTD: torch.Tensor, context: Any, pattern: str) -> torch.Tensor:
        """Run the block; torch's grad mode decides whether a graph is kept.

        ``pattern`` has a code for each subnet, not all shortcuts; with a graph, at least one is full.
        """
        full, free = _computed(pattern)
        self._masks = DropoutMasks(self._dropout if self._block.training else 0.0)

        def attend(x_BTD: torch.Tensor, active: Active, with_bias: bool) -> torch.Tensor:
            return self._attention(x_BTD, active, with_bias, context)

        between = self._sublayer("attention", hidden_BTD, attend, full, free)
        return self._sublayer("feed_forward", between, self._feed_forward, full, free)

    def narrowed(self, path: str, active: Active, with_bias: bool) -> Any:
        """Copy a module inside the block whose matrices have the outputs or inputs of some subnets alone."""
        module = copied(self._block.get_submodule(path))
        for role, matrix in self._matrices.items():
            if matrix.module.startswith(f"{path}."):
                bias: dict[str, Any] = {} if matrix.has_own_rows else {"with_bias": with_bias}
                part: Any = nn.Module()
                compute = self._outputs if matrix.has_own_rows else self._inputs
                part.forward = functools.partial(compute, role, active=active, **bias)
                module._modules[matrix.module.removeprefix(f"{path}.")] = part
        return module

    def changed(self, path: str, output_BTD: torch.Tensor) -> torch.Tensor:
        """Run the bottleneck behind the output matrix of a module, which is among the hooks of the matrix."""
        for matrix in self._matrices.values():
            if matrix.module.startswith(f"{path}.") and not matrix.has_own_rows:
                module: Any = self._block.get_submodule(matrix.module)
                for hook in module._forward_hooks.values():
                    if hook.__self__ is not beside(module, ADAPTER):
                        output_BTD = hook(module, (), output_BTD)
        return output_BTD

    def _sublayer(
        self,
        name: str,
        hidden_BTD: torch.Tensor,
        compute: Callable[[torch.Tensor, Active, bool], torch.Tensor],
        full: Active,
        free: Active,
    ) -> torch.Tensor:
        """Sum the outputs of full and forward-only subnets, and apply bottleneck and norm."""
        norm, adapter = self._modules[f"{name}_norm"], self._bottleneck(name)
        # without the hooks of the bottleneck, which is applied here
        x_BTD = norm.forward(hidden_BTD) if self._layout.norm_first else hidden_BTD
        total = compute(x_BTD, full, True)
        if free:
            with torch.no_grad():
                rest = compute(x_BTD.detach(), free, False)
            total = total + rest
        if dropout := self._modules.get(f"{name}_dropout"):
            total = dropout.forward(total)
        if not self._layout.adds_residual:
            after = None if self._layout.norm_first else norm
            return joined(total, hidden_BTD, after) if adapter is None else adapter.result(total, hidden_BTD, after)
        change = total if adapter is None else adapter.change(total, hidden_BTD, None)
        if last := self._modules.get(f"{name}_last_norm"):
            change = last(change)
        return hidden_BTD + change

    def _bottleneck(self, name: str) -> Bottleneck | None:
        home = self._modules.get(f"{name}_adapter")
        adapter: Bottleneck | None = dict(getattr(home, "adapters", {})).get(ADAPTER)
        return adapter

    def _attention(self, x_BTD: torch.Tensor, active: Active, with_bias: bool, context: Any) -> torch.Tensor:
        heads = self._merged(x_BTD, active) if self._layout.is_merged else self._separate(x_BTD, active)

        def drop(scores_BHTT: torch.Tensor) -> torch.Tensor:
            ranges = _ranges(self._matrices["attention_out"]._replace(width=1), self._subnets, active)
            return self._masks.drop("attention", scores_BHTT, ranges, dimension=1, whole=self._subnets.heads)

        attended = self._attend(self._modules["attention"], heads, context, drop if self._masks.draws else None)
        return self._inputs("attention_out", attended.flatten(2), active, with_bias)

    def _separate(self, x_BTD: torch.Tensor, active: Active) -> Heads:
        """Compute the active heads of queries, keys and values."""
        heads = {name: self._heads(name, self._outputs(name, x_BTD, active)) for name in self._layout.order}
        for name in heads:
            if norm := self._modules.get(f"{name}_norm"):
                heads[name] = norm(heads[name])
        return heads["query"], heads["key"], heads["value"]

    def _merged(self, x_BTD: torch.Tensor, active: Active) -> Heads:
        """Compute them with one fused matrix; its LoRA has separate factors for some of the three."""
        module = self._modules["query"]
        ranges = [_ranges(self._matrices[name], self._subnets, active) for name in _ATTENTION]
        outputs = active_outputs(x_BTD, self._weight(module), module.bias, sum(ranges, ()))
        parts = list(outputs.chunk(3, -1))
        if (lora := beside(module, ADAPTER)) is not None:
            wrapped = [at for at, enabled in enumerate(lora.enable_lora) if enabled]
            dropped = self._masks.drop("query", x_BTD)
            inners = torch.nn.functional.linear(dropped, lora.lora_A).chunk(len(wrapped), -1)
            for before, (at, inner) in enumerate(zip(wrapped, inners, strict=True)):
                rows = self._matrices[_ATTENTION[at]]._replace(offset=before * (len(lora.lora_ind) // 3))
                change = active_outputs(inner, lora.lora_B, None, _ranges(rows, self._subnets, active))
                parts[at] = torch.add(parts[at], change, alpha=lora.scaling)
            # so that no view keeps the fused output
            parts = [part if at in wrapped else part.contiguous() for at, part in enumerate(parts)]
        q, k, v = (self._heads(name, part) for name, part in zip(_ATTENTION, parts, strict=True))
        return q, k, v

    def _heads(self, name: str, outputs_BTa: torch.Tensor) -> torch.Tensor:
        return outputs_BTa.view(*outputs_BTa.shape[:-1], -1, self._matrices[name].width).transpose(1, 2)

    def _feed_forward(self, x_BTD: torch.Tensor, active: Active, with_bias: bool) -> torch.Tensor:
        activation, up = self._modules["activation"], self._outputs("up", x_BTD, active)
        inner = activation(self._outputs("gate", x_BTD, active)) * up if self._layout.gate else activation(up)
        return self._inputs("down", inner, active, with_bias)

    # ---- matrices, with LoRA where there is one ---------------------------------------------------

    def _outputs(self, name: str, x_BTD: torch.Tensor, active: Active) -> torch.Tensor:
        module, matrix = self._modules[name], self._matrices[name]
        outputs = active_outputs(x_BTD, self._weight(module), module.bias, _ranges(matrix, self._subnets, active))
        lora = beside(module, ADAPTER)
        if lora is None:
            return outputs
        inner = torch.nn.functional.linear(self._masks.drop(name, x_BTD), lora.lora_A)
        change = active_outputs(inner, lora.lora_B, None, _ranges(matrix, self._subnets, active))
        return torch.add(outputs, change, alpha=lora.scaling)

    def _inputs(self, name: str, x_BTa: torch.Tensor, active: Active, with_bias: bool) -> torch.Tensor:
        module, ranges = self._modules[name], _ranges(self._matrices[name], self._subnets, active)
        outputs = active_inputs(x_BTa, self._weight(module), module.bias if with_bias else None, ranges)
        lora = beside(module, ADAPTER)
        if lora is None:
            return outputs
        dropped = self._masks.drop(name, x_BTa, ranges, whole=lora.lora_A.shape[1])
        inner = active_inputs(dropped, lora.lora_A, None, ranges)
        return torch.add(outputs, torch.nn.functional.linear(inner, lora.lora_B), alpha=lora.scaling)

    def _weight(self, module: Any) -> torch.Tensor:
        """Return the matrix with a row for each output."""
        weight: torch.Tensor = module.weight
        return weight.t() if self._layout.inputs_first else weight


class NarrowedBlock:
    """Runs one block of a generic family by its subnets, without dropout; modules are copied at each run.

    Args:
        parts: of the block.
        family: runs a block by its own forward.
    """

    def __init__(self, block: nn.Module, parts: PartialBlock, family: Any) -> None:
        self._block, self._parts, self._family = block, parts, family

    def run(self, hidden_BTD: torch.Tensor, context: Any, pattern: str) -> torch.Tensor:
        """Run the block as ``PartialBlock.run``."""
        full, free = _computed(pattern)
        block = copied(self._block)
        for path in ("self_attn", "mlp"):
            module = block._modules[path] = copied(self._block.get_submodule(path))
            module.forward = self._sum(path, full, free)
        output: torch.Tensor = self._family.block(block, hidden_BTD, {id(block): context[id(self._block)]})
        return output

    def _sum(self, path: str, full: Active, free: Active) -> Callable[..., Any]:
        """Make the forward of a module that adds the outputs of forward-only subnets to those of full ones."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            total = self._parts.narrowed(path, full, with_bias=True).forward(*args, **kwargs)
            hidden, *others = total if isinstance(total, tuple) else (total,)
            if free:
                with torch.no_grad():
                    rest = self._parts.narrowed(path, free, with_bias=False).forward(*args, **kwargs)
                hidden = hidden + (rest[0] if isinstance(rest, tuple) else rest)
            hidden = self._parts.changed(path, hidden)
            return (hidden, *others) if isinstance(total, tuple) else hidden

        return forward


def _computed(pattern: str) -> tuple[Active, Active]:
    """Return the subnets that are computed together, and those that are computed without a graph beside them."""
    free: Active = ()
    if torch.is_grad_enabled():
        free = tuple(at for at, code in enumerate(pattern) if code == FORWARD_ONLY)
    return tuple(at for at in range(len(pattern)) if at not in free and pattern[at] != SHORTCUT), free


@functools.lru_cache(maxsize=1024)
def _ranges(matrix: Matrix, subnets: Subnets, active: Active) -> Ranges:
    """Return the outputs, or inputs, of the active subnets, with neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for subnet in active:
        start, stop = matrix.unit_range(subnets, subnet)
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    return tuple(ranges)


Attend = Callable[[Any, Heads, Any, Drop | None], torch.Tensor]


def _encoder(module: Any, heads: Heads, mask: torch.Tensor | None, drop: Drop | None) -> torch.Tensor:
    """Attend as BERT: with an additive mask, a 2-D mask, or none."""
    if mask is not None and mask.dim() == 2:
        mask = (mask != 0)[:, None, None, :]
    if drop is not None:
        return _dropped(heads, mask, drop, is_causal=False)
    return torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)


def _gpt2(module: Any, heads: Heads, context: Any, drop: Drop | None) -> torch.Tensor:
    is_causal = context.mask is None and heads[0].shape[2] > 1
    return _library(module, heads, context.mask, drop, is_causal=is_causal)


def _layered(module: Any, heads: Heads, context: Any, drop: Drop | None) -> torch.Tensor:
    """Attend as a block of its type: rotary positions and a cap on the scores as the module has them."""
    inputs = context.of(module)
    if getattr(module, "use_rope", True):
        heads = _turned(heads, inputs.rotary)
    cap = getattr(module, "attn_logit_softcapping", None)
    choices = {} if cap is None else {"softcap": cap}
    return _library(module, heads, inputs.mask, drop, scaling=module.scaling, **choices)


def _turned(heads: Heads, rotary: Any) -> Heads:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    turn: Any = apply_rotary_pos_emb
    return *turn(*heads[:2], *rotary), heads[2]


def _vit(module: Any, heads: Heads, context: Any, drop: Drop | None) -> torch.Tensor:
    return _library(module, heads, None, drop, is_causal=False, scaling=module.scaling)


def _library(module: Any, heads: Heads, mask: torch.Tensor | None, drop: Drop | None, **choices: Any) -> torch.Tensor:
    """Call the attention function of the module's configuration; returns (B, T, H, W)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = module.config._attn_implementation
    if name == "eager":
        function = importlib.import_module(type(module).__module__).eager_attention_forward
    elif drop is not None:
        return _dropped(heads, mask, drop, **choices)
    else:
        function = ALL_ATTENTION_FUNCTIONS[name]
    attended: torch.Tensor
    attended, scores_BHTT = function(module, *heads, mask, dropout=0.0, **choices)
    return attended if drop is None else _times_values(drop(scores_BHTT), heads[2])


def _dropped(
    heads: Heads, mask: torch.Tensor | None, drop: Drop, *, is_causal: bool = True, scaling: float | None = None
) -> torch.Tensor:
    """Attend with the formula of torch's fused function, and drop scores; returns (B, T, H, W)."""
    q_BHTW, k_BHTW, v_BHTW = heads
    k_BHTW = k_BHTW.repeat_interleave(q_BHTW.shape[1] // k_BHTW.shape[1], 1)
    scores_BHTT = q_BHTW @ k_BHTW.transpose(2, 3) * (scaling or q_BHTW.shape[3] ** -0.5)
    if mask is None and is_causal:
        mask = torch.ones(scores_BHTT.shape[2:], dtype=torch.bool, device=q_BHTW.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores_BHTT = scores_BHTT.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores_BHTT = scores_BHTT + mask
    return _times_values(drop(scores_BHTT.softmax(-1)), v_BHTW)


def _times_values(scores_BHTT: torch.Tensor, v_BHTW: torch.Tensor) -> torch.Tensor:
    v_BHTW = v_BHTW.repeat_interleave(scores_BHTT.shape[1] // v_BHTW.shape[1], 1)
    return (scores_BHTT @ v_BHTW).transpose(1, 2)


ATTEND: Final[Mapping[str, Attend]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "distilbert"), _encoder),
    "gpt2": _gpt2,
    "vit": _vit,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3"), _layered),
}
"""``model_type`` -> (attention module, heads, context, dropout) -> (B, T, H, W)."""

Ranges = tuple[tuple[int, int], ...]


Projection = tuple[torch.Tensor, torch.Tensor]
"""Projections (N, P) of a layer's whole input, with the vector (M) of its sub-tokens, as they are kept."""


def active_outputs(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    ranges: Ranges,
    projection: Projection | None = None,
) -> torch.Tensor:
    """Compute the outputs in ``ranges`` (ascending) of a linear layer, side by side.

    x has any number of leading dimensions; matrix and bias are the whole ones. A torch function mode may give a
    projection, from which the gradient of the matrix is computed then.
    """
    return _product(active_outputs, _ActiveOutputs, (x_NI, weight_OI, bias_O), ranges, projection)


def active_inputs(
    x_Na: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    ranges: Ranges,
    projection: Projection | None = None,
) -> torch.Tensor:
    """Compute a linear layer from the inputs in ``ranges`` (ascending) alone, which stand side by side in x.

    Other arguments as for ``active_outputs``; a projection is of the whole input, with zeros outside of the ranges.
    """
    return _product(active_inputs, _ActiveInputs, (x_Na, weight_OI, bias_O), ranges, projection)


Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Input, whole matrix and whole bias."""


def _product(
    function: Callable[..., torch.Tensor], kind: Any, factors: Factors, ranges: Ranges, projection: Projection | None
) -> torch.Tensor:
    x, weight, bias = factors
    outputs: torch.Tensor
    if weight.requires_grad and has_torch_function((x, weight)):
        outputs = handle_torch_function(function, (x, weight), x, weight, bias, ranges)
    else:
        outputs = kind.apply(rounded(x), rounded(weight), None if bias is None else rounded(bias), ranges, projection)
    return outputs


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a factor of a product in the type of products, which autocast changes; a frozen matrix as it is held."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def whole_inputs(x_Na: torch.Tensor, ranges: Ranges, width: int) -> torch.Tensor:
    """Return inputs that stand side by side at their places among ``width`` ones; the others are zeros."""
    wide = x_Na.new_zeros(*x_Na.shape[:-1], width)
    for (start, stop), part in _range_parts(x_Na, ranges):
        wide[..., start:stop] = part
    return wide


def rebuilt_gradient(sums_OP: torch.Tensor, vector_M: torch.Tensor, width: int) -> torch.Tensor:
    """Return the gradient (O, D) of a matrix of ``width`` inputs from products of gradients and projections."""
    return (sums_OP[:, :, None] * vector_M).flatten(1)[:, :width]


class _ActiveOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, ranges: Ranges, projection: Projection | None) -> Any:
        rows, y = _flat(x), x.new_empty(*x.shape[:-1], _width(ranges))  # no view: OLMo clips it in place
        for (start, stop), part in _range_parts(_flat(y), ranges):
            mm_into(part, rows, weight[start:stop].t(), bias=None if bias is None else bias[start:stop])
        _save(ctx, rows, weight, ranges, projection)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, (rows, vector, weight), ranges = _flat(grads[0]), _saved(ctx), ctx.ranges
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        x_grad = weight_grad = bias_grad = None
        if needs_x:
            x_grad = grad.new_empty(grad.shape[0], weight.shape[1])
            for at, ((start, stop), part) in enumerate(_range_parts(grad, ranges)):
                mm_into(x_grad, part, weight[start:stop], add=at > 0)
            x_grad = x_grad.view(*grads[0].shape[:-1], -1)
        if needs_weight:
            weight_grad = grad.new_zeros(weight.shape[0], rows.shape[1])
            for (start, stop), part in _range_parts(grad, ranges):
                torch.mm(part.t(), rows, out=weight_grad[start:stop])
            weight_grad = weight_grad if vector is None else rebuilt_gradient(weight_grad, vector, weight.shape[1])
        if needs_bias:
            bias_grad = grad.new_zeros(weight.shape[0])
            for (start, stop), part in _range_parts(grad.sum(0), ranges):
                bias_grad[start:stop] = part
        return x_grad, weight_grad, bias_grad, None, None


class _ActiveInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, ranges: Ranges, projection: Projection | None) -> Any:
        rows, y = _flat(x), x.new_empty(*x.shape[:-1], weight.shape[0])
        for at, ((start, stop), part) in enumerate(_range_parts(rows, ranges)):
            mm_into(_flat(y), part, weight[:, start:stop].t(), bias=bias if at == 0 else None, add=at > 0)
        _save(ctx, rows, weight, ranges, projection)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, (rows, vector, weight), ranges = _flat(grads[0]), _saved(ctx), ctx.ranges
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        x_grad = weight_grad = None
        if needs_x:
            x_grad = grad.new_empty(grad.shape[0], _width(ranges))
            for (start, stop), part in _range_parts(x_grad, ranges):
                mm_into(part, grad, weight[:, start:stop])
            x_grad = x_grad.view(*grads[0].shape[:-1], -1)
        if needs_weight:
            weight_grad = torch.zeros_like(weight)
            if vector is None:
                for (start, stop), part in _range_parts(rows, ranges):
                    torch.mm(grad.t(), part, out=weight_grad[:, start:stop])
            else:
                rebuilt = rebuilt_gradient(grad.t() @ rows, vector, weight.shape[1])
                for start, stop in ranges:
                    weight_grad[:, start:stop] = rebuilt[:, start:stop]
        return x_grad, weight_grad, grad.sum(0) if needs_bias else None, None, None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _save(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, ranges: Ranges, projection: Projection | None) -> None:
    """Save for backward what the library's linear layer saves: input or projection only if the matrix trains."""
    is_small = isinstance(weight, FrozenMatrix)
    kept, vector = projection or (rows, None)
    ctx.save_for_backward(kept if ctx.needs_input_grad[1] else None, vector, None if is_small else weight)
    ctx.small, ctx.ranges = weight if is_small else None, ranges


def _saved(ctx: Any) -> tuple[Any, Any, Any]:
    """Return the input, or None, its projection's vector, or None, and the matrix."""
    rows, vector, weight = ctx.saved_tensors
    return rows, vector, weight if ctx.small is None else ctx.small


def _width(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _range_parts(tensor: torch.Tensor, ranges: Ranges) -> Any:
    """Yield each range with its columns of a tensor in which the ranges are side by side."""
    at = 0
    for start, stop in ranges:
        yield (start, stop), tensor[..., at : at + stop - start]
        at += stop - start
