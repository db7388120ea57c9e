"""Which adapters a technique supports, with the reason of each refusal; and the sum of adapters.

Heads in groups: a block with subnets has its own forward, which computes attention and feed-forward part of the active
subnets only. Norms and bottlenecks are the library's modules, applied once to the whole. LoRA has rows or columns for
each subnet. Refused are adapters that mix subnets inside a matrix.

Merging: only a change of a matrix can be added to the weights of the base model.

Offload: a helper computes the gradient of a module's weights from pairs of inputs and output gradients. Refused are
modules that draw random numbers, or read a tensor that is in no pair.

Sums: n LoRA adapters of rank r have as exact sum one of rank n * r, the products of their matrices side by side. Its
factor is alpha / rank, so alpha grows with the rank. A sum of ``linear`` is a ``linear``. Where users have several
kinds of adapters, the sum is one ``linear`` beside each matrix that any of them changes. Other methods have no sum.

Trimming: in an encoder only attention mixes tokens. So where the head reads the first token only, the last block needs
queries, feed-forward part and norms for that token only, unless a module behind the attention reads several tokens or
draws random numbers.

Source: ColA, section 3, Propositions 1 and 2, and section 4.3 (collaboration).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ringtune.errors import UsageError
from ringtune.models.adapter_config import MAX_RANK, AdapterPart, parse_adapter_config, trains_own_weights, written
from ringtune.models.auxiliary_models import (
    AUXILIARY_KINDS,
    INTERMEDIATE,
    LETTERS,
    LINEAR,
    OUTPUT,
    PLACES,
    places_beside,
)
from ringtune.models.family import Family


def generic_refusal(family: Family, adapter_config: str) -> str:
    """Say why a generic family can't have these adapters; empty if it can."""
    for part in parse_adapter_config(adapter_config):
        kind, options = part.kind, part.whole
        if kind not in family.methods:
            return f"a {family.model_type} takes {' and '.join(family.methods)} only; use lora"
        if kind != "lora":
            continue
        if not family.layout.up and (options["intermediate_lora"] or options["output_lora"]):
            return f"the experts of a {family.model_type} stay frozen; use lora, which is beside its attention"
        if options["selfattn_lora"] and not family.layout.query and "v" not in options["attn_matrices"]:
            return (
                f"queries, keys and values of a {family.model_type} are one matrix, {family.layout.value}, which 'v' "
                "stands for; add it to attn_matrices"
            )
    return ""


_WHOLE_BLOCKS = "or set operations.heads = 0, which takes whole blocks"


def head_group_refusal(adapter_config: str, *, heads: int) -> str:
    """Say why blocks with this adapter can't be computed by head groups; empty if they can.

    ``heads`` are those of one subnet; 0 = a whole block is one subnet, which works with every adapter.
    """
    if not heads:
        return ""
    for part in parse_adapter_config(adapter_config):
        if problem := _head_group_problem(part):
            return (
                f"adapter.config {adapter_config!r} can't be run by head groups (operations.heads = {heads}), as "
                f"{problem}; "
                f"use seq_bn, double_seq_bn or lora, {_WHOLE_BLOCKS}"
            )
    return ""


def subnet_refusal(family: Family, *, dropout: float) -> str:
    """Say why blocks of a family have no subnets smaller than a block; empty if they have."""
    layout, name = family.layout, f"a {family.model_type} block"
    if not family.generic:
        return ""
    if family.divided:
        is_drawn = f"parts of {name} draw other dropout than all of it; set train.dropout = 0, {_WHOLE_BLOCKS}"
        return is_drawn if dropout else ""
    if not layout.query:
        return f"queries, keys and values of {name} are one matrix, {layout.value}; set operations.heads = 0"
    if not layout.up:
        return f"experts of {name} have no heads; set operations.heads = 0"
    return f"{name} can't compute some of its heads alone; set operations.heads = 0"


def _head_group_problem(part: AdapterPart) -> str:
    kind, options = part.kind, part.whole
    if kind == "bottleneck":
        return ""
    if kind == "reft":
        return "ReFT changes what leaves a block, outside of attention and feed-forward part"
    if kind in AUXILIARY_KINDS:
        return "an auxiliary model is not divided among subnets"
    if kind == "mtl_lora":
        return "MTL-LoRA mixes several copies of its second matrix"
    if options["composition_mode"] != "add":
        return "it scales what a matrix gives, and has no part for each subnet"
    if options["use_dora"]:
        return "DoRA takes norms over the whole matrix"
    if options["use_gating"]:
        return "the gate of LoRA depends on the whole matrix"
    return ""


def merge_refusal(config: str) -> str:
    """Say why the result of an ``adapter.config`` can't be merged into the weights; empty if it can."""
    if trains_own_weights(config):
        return "the blocks' own weights trained, there is nothing to merge"
    parts = parse_adapter_config(config)
    problem, name = next(((why, part.name) for part in parts if (why := part_refusal(part))), ("", ""))
    return f"its part {name!r} can't, as {problem}" if problem and len(parts) > 1 else problem


def part_refusal(part: AdapterPart) -> str:
    """Say why one method of a configuration can't be merged into the weights; empty if it can."""
    kind, options = part.kind, part.whole
    if kind == LINEAR:
        return ""
    if kind == "lora" and options["composition_mode"] == "add":
        gated = options["use_gating"] or options["use_dora"]
        return "its gate, or DoRA's norm, is no change of a matrix by itself" if gated else ""
    return "it is no change of matrices"


def peft_refusal(config: str) -> str:
    """Say why PEFT's LoRA can't hold the result of an ``adapter.config``; empty if it can."""
    if trains_own_weights(config):
        return "the blocks' own weights trained"
    first, *more = parse_adapter_config(config)
    kind, options = first.kind, first.whole
    if more:
        return "it has several parts, PEFT's LoRA one"
    if kind != "lora":
        return "it is no LoRA"
    if options["composition_mode"] != "add":
        return "its vectors are at other places than those of PEFT's (IA)3"
    if options["use_dora"]:
        return "its DoRA has other names and shapes than PEFT's"
    return "its gate is none of PEFT's" if options["use_gating"] else ""


def places_of(config: str) -> tuple[str, ...]:
    """Return the matrices of a block that a configuration adds to, in the order of ``PLACES``.

    Example: query and value for ``lora``; none for ``seq_bn``.
    """
    places = {place for part in parse_adapter_config(config) for place in places_of_part(part)}
    return tuple(place for place in PLACES if place in places)


def places_of_part(part: AdapterPart) -> tuple[str, ...]:
    """Return the matrices of a block that one method adds to."""
    return places_beside(part.whole) if "attn_matrices" in part.whole else ()


_ADVICE = "use lora, seq_bn or double_seq_bn"


def offload_refusal(adapter_config: str, *, dropout: float, fused: bool = False) -> str:
    """Say why a helper can't train these adapters exactly; ``fused``: query, key and value are one matrix."""
    if trains_own_weights(adapter_config):
        return f"adapter.config = {adapter_config!r} has no adapter that a helper could fit; {_ADVICE}"
    for part in parse_adapter_config(adapter_config):
        if problem := _offload_problem(part, dropout, fused):
            return f"adapter.config {adapter_config!r} can't be fitted by a helper, as {problem}"
    return ""


def merged_refusal(adapter_config: str, *, dropout: float) -> str:
    """Say why a host can't hold these adapters merged into their matrices; empty if it can."""
    if trains_own_weights(adapter_config):
        return offload_refusal(adapter_config, dropout=dropout)
    for part in parse_adapter_config(adapter_config):
        problem = part_refusal(part)
        if not problem and dropout > 0 and part.kind == "lora":
            problem = f"train.dropout = {dropout} drops a part of its input only"
        if problem:
            return f"adapter {part.name!r} can't be merged into its matrix, as {problem}; set offload.merged = false"
    return ""


def _offload_problem(part: AdapterPart, dropout: float, fused: bool) -> str:
    kind, options = part.kind, part.whole
    if kind == "bottleneck":
        return _bottleneck_problem({"is_parallel": "par_bn" in part.name, **options}, dropout)
    if kind in ("linear", "mlp"):
        return ""
    if kind == "mtl_lora":
        return f"MTL-LoRA mixes several copies of its second matrix; {_ADVICE}"
    if kind != "lora":
        return f"ReFT changes chosen tokens of the hidden state itself; {_ADVICE}"
    if options["composition_mode"] != "add":
        return f"{part.name} scales what a matrix gives, and adds nothing; {_ADVICE}"
    if options["use_dora"]:
        return f"DoRA needs the norms of the base weights, which a helper does not have; {_ADVICE}"
    if options["use_gating"] and fused:
        return "one matrix for query, key and value has a gate for each of them; leave use_gating out"
    if options["use_gating"] and dropout > 0:
        return "its gate reads the input before dropout, the rest reads it after; leave use_gating or train.dropout out"
    return ""


def _bottleneck_problem(options: dict[str, object], dropout: float) -> str:
    if options.get("ln_after") and options.get("adapter_residual_before_ln") and not options.get("is_parallel"):
        return "its last norm reads the residual too; leave adapter_residual_before_ln or ln_after out"
    for name in ("use_gating", "ln_after"):
        if options.get(name) and dropout > 0:
            return f"{name} has weights behind the dropout, whose mask stays at the host; leave it or train.dropout out"
    return ""


GROWING: Final = ("r", "alpha")
"""Options of LoRA that are multiplied by the number of adapters in a sum."""


def summed_config(config: str, count: int) -> str:
    """Return the configuration of the sum of ``count`` adapters with this ``adapter.config``.

    Example: two of ``lora[r=4,alpha=16]`` have the sum ``lora[r=8, alpha=32]``. Raises ``UsageError`` if the method has
    no sum, or the rank exceeds ``MAX_RANK``.
    """
    if problem := merge_refusal(config):
        raise UsageError(
            f"adapters of adapter.config = {config!r} can't be added up: {problem}; give one of them with --user"
        )
    return "|".join(_summed(part, count, config) for part in parse_adapter_config(config))


def sum_of_kinds(configs: Sequence[str]) -> str:
    """Return the configuration of the sum of adapters with these configurations, at least one.

    Example: ``lora`` and ``linear[attn_matrices=['k']]`` have the sum ``linear[attn_matrices=['q', 'k', 'v']]``. Equal
    ones are summed by ``summed_config``.
    """
    if all(parse_adapter_config(config) == parse_adapter_config(configs[0]) for config in configs):
        return summed_config(configs[0], len(configs))
    for config in configs:
        if problem := merge_refusal(config):
            raise UsageError(
                f"an adapter of {config!r} can't be added to those of other users: {problem}; give one user with --user"
            )
    places = {place for config in configs for place in places_of(config)}
    parts = [part.whole for config in configs for part in parse_adapter_config(config)]
    left_out = set.intersection(*(set(part["leave_out"]) for part in parts))
    letters = [letter for letter, place in LETTERS.items() if place in places]
    options: dict[str, object] = {"attn_matrices": letters} if letters else {"selfattn_lora": False}
    options |= {f"{place}_lora": True for place in (INTERMEDIATE, OUTPUT) if place in places}
    options |= {"leave_out": sorted(left_out)} if left_out else {}
    return written(LINEAR, options)


def lora_scale(part: AdapterPart) -> float:
    """Factor of a LoRA's product: alpha / rank."""
    return float(part.whole["alpha"]) / int(part.whole["r"])


def _summed(part: AdapterPart, count: int, config: str) -> str:
    if part.name == LINEAR:
        return written(part.name, part.options)
    grown = {name: part.whole[name] * count for name in GROWING}
    if grown["r"] > MAX_RANK:
        raise UsageError(
            f"{count} adapters of adapter.config = {config!r} add up to rank {grown['r']:,}, at most {MAX_RANK:,} is "
            "allowed; give one of them with --user"
        )
    return written(part.name, {**part.options, **grown})


def may_trim(family: Family, adapter_configs: Iterable[str], *, dropout: float) -> bool:
    """Whether the last block may compute the first token only, with the same result for that token.

    With dropout it may not, because other numbers are drawn for other shapes.
    """
    configs = tuple(adapter_configs)
    draws = any(part.whole.get("dropout") for config in configs for part in parse_adapter_config(config))
    return family.trims and not dropout and not draws and not any(map(mixed_tokens, configs))


def mixed_tokens(adapter_config: str) -> str:
    """Say why adapters do not compute each token by itself; empty if they do."""
    for part in parse_adapter_config(adapter_config):
        if part.kind == "reft":
            return "ReFT changes the first and last tokens of a sequence"
        if part.whole.get("use_gating"):
            return "a gate takes the mean over the tokens of a sequence"
    return ""
