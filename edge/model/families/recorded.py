"""Any transformer whose blocks are one list: the model's own forward, with its blocks replaced.

A copy of the base model, which shares all modules, gets other modules in place of its blocks and of those that this
node does not host. So embedding, masks, rotary tables and last norm are computed by the architecture's own code::

    embed      forward(input_ids)      ends at the first block; its input is the hidden state
    context    forward(inputs_embeds)  ends at the last hosted block; the other arguments of each one are kept
    finish     forward(inputs_embeds)  each block returns the given hidden state; what follows them is computed

Where blocks pass on more than one hidden state (``ringtune.models.passed_values``), all of it is the hidden state here.
A block takes its hidden states, keys and values of earlier blocks, and its own input out of one tensor, and returns one
for the next block. Parts are contiguous copies, so that a graph does not keep the whole tensor for a few of its values,
and kernels get what they get in one process.

Of an encoder the embedding is computed with mask and token types, ``context`` leaves it out, and ``finish`` computes
the last norm alone.

The copy is of one call, so that several threads may run one model.

B batch rows, T tokens, D model width, S hidden states side by side, P width of a block's input, V values of a token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from edge.data.tokens import Batch
from edge.model.families import first_of
from edge.model.families.decoders import is_packed, last_token, row_places
from edge.model.key_values import KeyValueCache, cache_argument
from ringtune.models.family import CAUSAL_LM, Family
from ringtune.models.generic_encoders import ALBERT_PROJECTION
from ringtune.models.passed_values import PassedValues

_BEFORE_BLOCKS = ("embeddings", "project_in", ALBERT_PROJECTION)
"""Modules that make what enters the first block: a given hidden state is that already."""
_SHARED: Final = "shared_kv_states"


class _Ended(Exception):  # noqa: N818 - no error: the forward has done its part
    """Ends a forward whose further results are not needed."""


class _TensorOrTuple(torch.Tensor):
    """A hidden state that is also the first entry of a tuple, as some blocks return one; all else is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        return self.as_subclass(torch.Tensor) if index == 0 else None

    def __iter__(self) -> Iterator[Any]:
        return iter((self[0], None))


class _StandIn(nn.Module):
    """A module in place of a block; attributes that it has not are those of a real block."""

    def __init__(
        self,
        real: nn.Module,
        call: Callable[[torch.Tensor, tuple[Any, ...], dict[str, Any]], Any],
        *,
        may_be_tuple: bool = True,
    ) -> None:
        super().__init__()
        self.__dict__.update(real=real, call=call, kind=_TensorOrTuple if may_be_tuple else torch.Tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the arguments on; the hidden state is the first one, or has a name."""
        hidden_BTD = args[0] if args else kwargs.pop("hidden_states")
        return self.call(hidden_BTD, args[1:], kwargs).as_subclass(self.kind)


class _Absent(nn.Module):
    """A module that this node does not host, or that makes a given hidden state; what it gives else is not used.

    It has a parameter of the hidden state's type, which some architectures take for the model's.
    """

    def __init__(self, given: torch.Tensor | None) -> None:
        super().__init__()
        self.own = None if given is None else nn.Parameter(given.new_empty(0), requires_grad=False)

    def forward(self, *args: Any, inputs_embeds: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
        """Return a hidden state unchanged, and 0 for anything else, such as positions."""
        given = args[0] if args and inputs_embeds is None else inputs_embeds
        return given if isinstance(given, torch.Tensor) and given.is_floating_point() else torch.zeros(())

    def __getitem__(self, index: int) -> _Absent:
        """Return itself for one of a list of modules."""
        return self


class _Arguments(NamedTuple):
    """Arguments of a block besides the hidden state, and how often the block is applied to its own output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    repeats: int = 1
    passed: PassedValues | None = None


class RecordedFamily:
    """The parts of a ``FamilyForward`` of ``ringtune.models.generic_decoders`` and ``generic_encoders``."""

    def __init__(self, family: Family) -> None:
        self._path, self._masked_by_positions, self._last = family.blocks_path, family.packs, family.head_paths
        self._is_encoder = CAUSAL_LM not in family.tasks
        self._shares_weights = family.model_type == "albert"
        self._passed_of = family.passed
        self._known: tuple[Any, PassedValues | None] = (None, None)

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Compute what enters the first block."""
        entering: list[torch.Tensor] = []
        passed, count = self._passed(base), len(self._blocks(base))

        def call(hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
            if not entering:
                entering.append(hidden)
            if passed is not None and passed.inputs:
                entering.append(args[-1])
            if len(entering) in (1, count + 1):
                raise _Ended
            return hidden

        is_new = self._masked_by_positions
        places: dict[str, Any] = {}
        if is_new and batch.positions is not None:
            places = {"position_ids": batch.positions}
        if self._is_encoder and getattr(base.config, "type_vocab_size", False):
            places = {"token_type_ids": batch.token_type_ids}
        # positions of the older architectures count the tokens of the mask; the others' mask would be made in vain
        self._forward(base, {-1: call}, batch.mask, with_mask=not is_new, input_ids=batch.ids, **places)
        return entering[0] if passed is None else pack_embedding(*entering)

    def context(
        self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, cache: KeyValueCache | None = None
    ) -> Mapping[int, _Arguments]:
        """Record the arguments of each hosted block, by its identity."""
        blocks, passed = self._blocks(base), self._passed(base)
        hosted = [index for index, block in enumerate(blocks) if any(True for _ in block.parameters())]
        arguments: dict[int, _Arguments] = {}
        masks = _Masks(base.config, hidden_BTD.dtype)
        repeats = base.config.num_hidden_layers // len(blocks) if self._shares_weights else 1

        def recorder(index: int) -> Any:
            def call(hidden_BTD: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
                named = {key: masks.in_numbers(value) for key, value in kwargs.items()}
                arguments[id(blocks[index])] = _Arguments(args, named, repeats, passed)
                if index == hosted[-1]:
                    raise _Ended
                return hidden_BTD

            return call

        behind: dict[str, Any] = {}
        if cache is not None:
            first = cache.num_tokens
            mask_BT = torch.cat([mask_BT.new_ones(len(mask_BT), first), mask_BT], dim=1)
            places_T = torch.arange(first, mask_BT.shape[1], device=hidden_BTD.device)
            behind = {
                "position_ids": places_T.expand(hidden_BTD.shape[:2]),
                "cache_position": places_T,
                cache_argument(base.__class__): cache.of_hosted(hosted),
                "use_cache": True,
            }
        with torch.no_grad():
            calls = {index: recorder(index) for index in hosted}
            self._forward(base, calls, mask_BT, inputs_embeds=_one_hidden_state(base, passed, hidden_BTD), **behind)
        return arguments

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one block; in a tuple the hidden state is first."""
        arguments = context[id(block)]
        if arguments.passed is not None:
            return run_block(arguments.passed, block, hidden_BTD, *arguments.args, **arguments.kwargs)
        for _ in range(arguments.repeats):
            hidden_BTD = first_of(block(hidden_BTD, *arguments.args, **arguments.kwargs))
        return hidden_BTD

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute what follows the blocks, and the factor that the architecture has at its logits."""
        if self._is_encoder:
            for path in self._last:
                hidden_BTD = base.get_submodule(path)(hidden_BTD)
            is_mean = getattr(base.config, "classifier_pooling", "") == "mean"
            return hidden_BTD, {"cls_output": mean_of_tokens(hidden_BTD, batch.mask)} if is_mean else {}

        passed = self._passed(base)
        hidden = hidden_BTD if passed is None else hidden_states(passed, hidden_BTD, base.config.hidden_size)

        def call(_: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
            return hidden

        one_BTD = _one_hidden_state(base, passed, hidden_BTD)
        output = self._forward(base, {-1: call}, batch.mask, with_mask=False, inputs_embeds=one_BTD)
        last = output[0] * logit_factor(base.config)
        return last, {"cls_output": last_token(last, batch.mask)}

    def _blocks(self, base: Any) -> Any:
        return base.get_submodule(self._path)

    def _passed(self, base: Any) -> PassedValues | None:
        """Return what blocks pass on besides one hidden state, by the model's own config."""
        if self._known[0] is not base.config:
            self._known = (base.config, self._passed_of(base.config.to_dict()))
        return self._known[1]

    def _forward(
        self, base: Any, calls: Mapping[int, Any], mask_BT: torch.Tensor, *, with_mask: bool = True, **inputs: Any
    ) -> Any:
        """Run the forward of a copy of ``base`` whose blocks make these calls; -1 is the call of all blocks."""
        shadow = inner = copied(base)
        *parents, name = self._path.split(".")
        around = [inner]
        for parent in parents:
            inner._modules[parent] = inner = copied(inner._modules[parent])
            around.append(inner)
        blocks = list(inner._modules[name])
        some = next((block for block in blocks if any(True for _ in block.parameters())), blocks[0])
        passed = self._passed(base)
        stand_ins = [
            _StandIn(
                block if any(True for _ in block.parameters()) else some,
                calls.get(index) or calls.get(-1, _pass),
                may_be_tuple=passed is None,
            )
            for index, block in enumerate(blocks)
        ]
        inner._modules[name] = nn.ModuleList(stand_ins)
        for outside in around:
            for key, module in outside._modules.items():
                if type(module).__name__ == "Empty" or (key in _BEFORE_BLOCKS and "inputs_embeds" in inputs):
                    outside._modules[key] = _Absent(inputs.get("inputs_embeds"))
        if passed is not None and passed.inputs and "inputs_embeds" in inputs:
            _without_inputs(shadow, passed, inputs["inputs_embeds"])
        inputs["attention_mask"] = mask_BT if with_mask else None
        if is_packed(mask_BT):
            inputs["attention_mask"], inputs["position_ids"] = None, row_places(mask_BT)[1]
        try:
            return shadow(**(inputs if self._is_encoder else {"use_cache": False, **inputs}))
        except _Ended:
            return None


def _one_hidden_state(base: Any, passed: PassedValues | None, hidden_BTD: torch.Tensor) -> torch.Tensor:
    """Return a hidden state (B, T, D) of those that enter a block; masks and positions follow from its shape."""
    return hidden_BTD if passed is None else hidden_BTD[..., : base.config.hidden_size].contiguous()


class _Masks:
    """Masks of the blocks of one model as numbers of a dtype, each made once for all blocks.

    Torch's attention makes numbers of a mask of booleans in each block, and the block's graph keeps them. Eager
    attention computes its softmax in float32, where float64's smallest number overflows, and may need booleans (MPT).
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._dtype, self._is_fused = dtype, config._attn_implementation == "sdpa"
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity: mask, and the same in numbers

    def in_numbers(self, value: Any) -> Any:
        """Return 0 for True and minus infinity for False, or numbers that float32 has; any other value as it is."""
        if not isinstance(value, torch.Tensor) or value.dim() != 4:
            return value
        if value.dtype == torch.float64:
            return value.clamp(min=torch.finfo(torch.float32).min)
        if value.dtype != torch.bool or not self._is_fused:
            return value
        if id(value) not in self._made:
            numbers = torch.zeros_like(value, dtype=self._dtype).masked_fill_(~value, -math.inf)
            self._made[id(value)] = value, numbers
        return self._made[id(value)][1]


def mean_of_tokens(hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean of the hidden states of each row's tokens, (B, D)."""
    weights_BT1 = mask_BT.unsqueeze(-1).to(hidden_BTD.dtype)
    return (hidden_BTD * weights_BT1).sum(dim=1) / weights_BT1.sum(dim=1)


def _pass(hidden_BTD: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return hidden_BTD


def copied(module: Any) -> Any:
    """Copy a module, not those inside it."""
    shallow = copy.copy(module)
    shallow.__dict__["_modules"] = dict(module._modules)
    return shallow


def logit_factor(config: Any) -> float:
    """Return the factor of a language model's logits; others have such a key without effect, as MPT has."""
    if config.model_type in ("cohere", "cohere2"):
        return float(config.logit_scale)
    has_scaling = config.model_type.startswith(("granite", "minicpm"))
    return 1.0 / float(config.logits_scaling) if has_scaling else 1.0


def pack_embedding(hidden: torch.Tensor, *inputs_BTP: torch.Tensor) -> torch.Tensor:
    """Join hidden states (B, T, D) or (S, B, T, D), and the inputs of all blocks, to what enters block 0."""
    return torch.cat([_beside(hidden), *inputs_BTP], dim=-1)


def hidden_states(passed: PassedValues, packed_BTV: torch.Tensor, width: int) -> torch.Tensor:
    """Return the hidden states of a packed tensor: (B, T, D), or where there are several (S, B, T, D)."""
    hidden = packed_BTV[..., : passed.hidden]
    if passed.hidden == width:
        return hidden.contiguous()
    return torch.stack(torch.split(hidden, width, dim=-1))


def _without_inputs(base: Any, passed: PassedValues, hidden_BTD: torch.Tensor) -> None:
    """Let a copy of the base model, whose blocks are replaced, make no inputs of blocks; they are in the packed tensor.

    The tables for them are at the owner, and need token ids.
    """
    nothing = hidden_BTD.new_zeros(()).expand(*hidden_BTD.shape[:2], passed.num_blocks, passed.inputs)
    base.get_per_layer_inputs = lambda *_, **__: None
    base.project_per_layer_inputs = lambda *_, **__: nothing


def run_block(passed: PassedValues, block: Any, packed_BTV: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run one block on a packed tensor; return that of the next block.

    Of its other arguments the last one of ``args`` is replaced by the block's input, which gets no gradient, and
    ``shared_kv_states`` by the keys and values that it may read.
    """
    at: int = block.layer_idx
    sizes = [passed.hidden, *(keys.values for keys in passed.keys_at(at))]
    with_gradient, inputs = packed_BTV[..., : sum(sizes)], packed_BTV[..., sum(sizes) :].detach()
    hidden, *received = torch.split(with_gradient, sizes, dim=-1)
    kept = {keys.kind: values for keys, values in zip(passed.keys_at(at), received, strict=True)}
    attention = block.self_attn
    shared = {kind: _by_heads(kept[kind], attention.head_dim) for kind in kept if kind == attention.layer_type}
    if passed.inputs:
        args = (*args[:-1], inputs[..., : passed.inputs].contiguous())
    entering = hidden_states(passed, hidden, block.config.hidden_size)
    output = first_of(block(entering, *args, **{**kwargs, _SHARED: shared}))
    for keys in passed.keys_at(at + 1):
        if keys.made_at == at:
            kept[keys.kind] = torch.cat([part.transpose(1, 2).flatten(2) for part in shared[keys.kind]], dim=-1)
    later = [kept[keys.kind] for keys in passed.keys_at(at + 1)]
    return torch.cat([_beside(output), *later, inputs[..., passed.inputs :]], dim=-1)


def _beside(hidden: torch.Tensor) -> torch.Tensor:
    """Put several hidden states (S, B, T, D) beside each other: (B, T, S * D)."""
    return torch.cat(hidden.unbind(), dim=-1) if hidden.dim() == 4 else hidden


def _by_heads(values_BTV: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values (B, heads, T, width)."""
    B, T, _ = values_BTV.shape
    keys, values = (part.reshape(B, T, -1, width).transpose(1, 2) for part in values_BTV.chunk(2, dim=-1))
    return keys, values
