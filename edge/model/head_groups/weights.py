"""Which part of a block's base weights is whose: each subnet's rows and columns.

A subnet has the rows of its heads in the matrices of queries, keys and values, the rows of its share in the first
matrix of the feed-forward part (and in the gate), and the columns that belong to them in the two matrices behind.
Norms and the biases of those two are nobody's. Example: BERT of width 384 with 12 subnets; subnet 1 has rows 32 to 63
of ``query``, columns 32 to 63 of ``attention.output.dense``, and rows 128 to 255 of ``intermediate.dense``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from edge.model.layouts import LAYOUTS, BlockLayout
from ringtune.schedule.operations.subnets import Subnets


class WeightSlice(NamedTuple):
    """A part of one parameter.

    Attributes:
        name: of the parameter in its block.
        dimension: along which the part is cut.
        start: first index.
        stop: first index that is no more in it.
    """

    name: str
    dimension: int
    start: int
    stop: int


class Matrix(NamedTuple):
    """One matrix of a block that subnets share.

    Attributes:
        module: its dotted name.
        has_own_rows: whether a subnet has outputs of it, otherwise inputs.
        offset: where the outputs begin that are meant.
        width: what one unit is wide: of a head, or 1 in the feed-forward part.
        is_query: whether its units are query heads.
        is_attention: whether its units are heads.
    """

    module: str
    has_own_rows: bool
    offset: int
    width: int
    is_query: bool
    is_attention: bool

    def unit_range(self, subnets: Subnets, subnet: int) -> tuple[int, int]:
        """The outputs, or inputs, [start, stop) of a subnet."""
        if self.is_attention:
            each = subnets.heads_each if self.is_query else subnets.kv_heads_each
            start, stop = subnet * each, (subnet + 1) * each
        else:
            start, stop = subnets.inner_range(subnet)
        return self.offset + start * self.width, self.offset + stop * self.width


def subnets_of_block(block: nn.Module, model_type: str, config: Any, count: int) -> Subnets:
    """The division of a block into so many subnets.

    Args:
        block: of the base model.
        model_type: its family.
        config: of the base model.
        count: subnets of a block.

    Raises:
        PlanError: so many do not divide the key/value heads.
    """
    layout = LAYOUTS[model_type]
    return subnets_of_config(config, inner=_outputs_and_inputs(block, layout, layout.up)[0], count=count)


def subnets_of_config(config: Any, *, inner: int, count: int) -> Subnets:
    """The division of every block of a model into so many subnets.

    Args:
        config: of the base model.
        inner: width of the feed-forward part.
        count: subnets of a block.

    Raises:
        PlanError: so many do not divide the key/value heads.
    """
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return Subnets(heads=heads, kv_heads=kv_heads, inner=inner, count=count)


def matrices(block: nn.Module, model_type: str, subnets: Subnets) -> dict[str, Matrix]:
    """The matrices that subnets share, by their field in the layout; ``gate`` only where there is one."""
    layout = LAYOUTS[model_type]
    width = _outputs_and_inputs(block, layout, layout.attention_out)[1] // subnets.heads
    offset = subnets.heads * width if layout.is_merged else 0

    def attention(name: str, module: str, at: int) -> Matrix:
        return Matrix(module, name != "attention_out", at, width, name in ("query", "attention_out"), True)

    found = {
        "query": attention("query", layout.query, 0),
        "key": attention("key", layout.key, offset),
        "value": attention("value", layout.value, 2 * offset),
        "attention_out": attention("attention_out", layout.attention_out, 0),
        "up": Matrix(layout.up, True, 0, 1, False, False),
        "down": Matrix(layout.down, False, 0, 1, False, False),
    }
    return found | ({"gate": Matrix(layout.gate, True, 0, 1, False, False)} if layout.gate else {})


def subnet_slices(block: nn.Module, model_type: str, subnets: Subnets) -> tuple[tuple[WeightSlice, ...], ...]:
    """The parts of base weights and biases that are each subnet's own.

    Args:
        block: of the base model, with or without adapters.
        model_type: its family.
        subnets: how the block is divided.

    Returns:
        For each subnet its parts; together they are the whole of every parameter that they name.
    """
    inputs_first = LAYOUTS[model_type].inputs_first
    shared = matrices(block, model_type, subnets).values()
    return tuple(
        tuple(part for matrix in shared for part in _parts(block, matrix, subnets, subnet, inputs_first))
        for subnet in range(subnets.count)
    )


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
