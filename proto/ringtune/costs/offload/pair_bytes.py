"""The bytes that offloading sends: pairs from a host to its helper, and weights back.

A pair of a module is its input x and the gradient of its output, for every token. Modules that read one tensor send it
once: LoRA on query, key and value, unless dropout comes between. Example: LoRA on q and v of width 768 sends 768 values
of x and two gradients of 768 a token and block, in float32 9,216 bytes; with VeLoRA in 32 parts 6,272.

Source: ColA, section 3 (adaptation data); the padding of a batch is sent too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ringtune.models.adapters.adapter_config import (
    AdapterPart,
    block_params,
    bottleneck_width,
    known_configurations,
    parse_adapter_config,
)
from ringtune.models.adapters.auxiliary_config import AUXILIARY_KINDS
from ringtune.models.family import Widths
from ringtune.schedule.helping.offload import EXACT, PAIRS
from ringtune.schedule.saving import DEFAULT_PARTS, num_subtokens, subtoken_size

FLOAT32, BFLOAT16, VELORA = WIRES = PAIRS
"""How pairs travel; ``float32`` means as they are, in the type of the run."""

LOSSY: Final = tuple(wire for wire in WIRES if wire != EXACT)
"""Wires on which x is changed; with it goes a bit for each unit of a ReLU that says whether the host had it on."""

_RELU: Final = "relu"
_NON_LINEARITIES: Final = {"double_seq_bn": "swish"}
"""Bottlenecks whose function is not ReLU, if the options name none. Source: adapters 1.3.0, the classes of BnConfig."""

_BFLOAT16_BYTES: Final = 2


class PairWidths(NamedTuple):
    """What one module sends of a token.

    Attributes:
        inputs: values of x; 0 where another module sends the same x.
        outputs: values of the gradient.
        units: of its ReLU; 0 without one.
    """

    inputs: int
    outputs: int
    units: int = 0

    @property
    def sign_bytes(self) -> int:
        """Bytes of a bit for each unit."""
        return -(-self.units // 8)


def pair_widths(config: str, block: int, *, hidden_size: int, widths: Widths, dropout: float) -> tuple[PairWidths, ...]:
    """The pairs that the adapter modules of one block give.

    Args:
        config: ``adapter.config`` of the job.
        block: which block.
        hidden_size: width of the hidden state.
        widths: of the matrices that LoRA wraps.
        dropout: ``train.dropout``.

    Raises:
        JobError: as ``parse_adapter_config``.
    """
    found: list[PairWidths] = []
    attention: list[_OfAttention] = []
    for part in parse_adapter_config(config):
        found += _of_part(part, block, hidden_size, widths)
        attention += _of_attention(part, block, widths, has_dropout=dropout > 0)
    return (*_attention_pairs(attention, is_merged=widths.merged), *found)


class _OfAttention(NamedTuple):
    """A module beside query, key or value: its pair, whether it reads what others read, and whether it is ours."""

    pair: PairWidths
    shares: bool
    is_auxiliary: bool


def _attention_pairs(found: Sequence[_OfAttention], *, is_merged: bool) -> Iterator[PairWidths]:
    """Yield the pairs of modules that read the input of the attention: those that share it send it once.

    Beside one matrix for query, key and value all auxiliary models are one module.
    """
    auxiliary = [one.pair for one in found if one.is_auxiliary]
    if is_merged and auxiliary:
        together = PairWidths(auxiliary[0].inputs, *(sum(some) for some in list(zip(*auxiliary, strict=True))[1:]))
        found = [*(one for one in found if not one.is_auxiliary), _OfAttention(together, True, True)]
    has_sent = False
    for one in found:
        yield one.pair._replace(inputs=0) if has_sent and one.shares else one.pair
        has_sent |= one.shares


def _of_part(part: AdapterPart, block: int, hidden: int, widths: Widths) -> list[PairWidths]:
    """List the pairs of a method besides those beside query, key and value."""
    kind, defaults = known_configurations()[part.name]
    options = {**defaults, **part.options}
    if block in options["leave_out"]:
        return []
    if kind == "bottleneck":
        is_relu = options.get("non_linearity", _NON_LINEARITIES.get(part.name, _RELU)) == _RELU
        one = PairWidths(hidden, hidden, bottleneck_width(options, block, hidden) if is_relu else 0)
        return [one] * (bool(options["mh_adapter"]) + bool(options["output_adapter"]))
    units = int(options.get("hidden", 0))
    others = [widths.intermediate] if options["intermediate_lora"] else []
    others += [widths.output] if options["output_lora"] else []
    return [PairWidths(*shape, units) for shape in others]


def _of_attention(part: AdapterPart, block: int, widths: Widths, *, has_dropout: bool) -> list[_OfAttention]:
    kind, defaults = known_configurations()[part.name]
    options: Mapping[str, Any] = {**defaults, **part.options}
    if block in options["leave_out"] or not options.get("selfattn_lora"):
        return []
    units, is_auxiliary = int(options.get("hidden", 0)), kind in AUXILIARY_KINDS
    shares = is_auxiliary or not has_dropout  # linear and mlp have no dropout
    by_letter = {"q": widths.query, "k": widths.key, "v": widths.value}
    pairs = [PairWidths(*by_letter[letter], units) for letter in options["attn_matrices"]]
    if pairs and widths.merged and not is_auxiliary:
        pairs = [PairWidths(pairs[0].inputs, sum(pair.outputs for pair in pairs))]
    return [_OfAttention(pair, shares, is_auxiliary) for pair in pairs]


def pair_token_bytes(found: Sequence[PairWidths], wire: str, *, value_bytes: int, parts: int = DEFAULT_PARTS) -> int:
    """Bytes of pairs for one token.

    Args:
        found: from ``pair_widths``.
        wire: one of ``WIRES``.
        value_bytes: of a number of the run.
        parts: of VeLoRA.
    """
    outputs = sum(one.outputs for one in found)
    signs = sum(one.sign_bytes for one in found) if wire in LOSSY else 0
    if wire == VELORA:
        kept = sum(num_subtokens(one.inputs, min(parts, one.inputs)) for one in found if one.inputs)
        return (kept + outputs) * value_bytes + signs
    values = sum(one.inputs for one in found) + outputs
    return values * (_BFLOAT16_BYTES if wire == BFLOAT16 else value_bytes) + signs


def vector_bytes(found: Sequence[PairWidths], wire: str, *, value_bytes: int, parts: int = DEFAULT_PARTS) -> int:
    """Bytes of VeLoRA's vectors, which go with the first pairs of a run and not again."""
    if wire != VELORA:
        return 0
    return sum(subtoken_size(one.inputs, min(parts, one.inputs)) for one in found if one.inputs) * value_bytes


def weight_bytes(
    config: str, block: int, *, hidden_size: int, widths: Widths, num_blocks: int, value_bytes: int
) -> int:
    """Bytes of the weights of one block that come back after each update."""
    return block_params(config, block, hidden_size=hidden_size, widths=widths, num_blocks=num_blocks) * value_bytes
