"""Seconds and bytes that helpers add to a run, or save: pairs, weights, and adapters of users.

A pair of a module is its input x and the gradient of its output, for every token, padding included. Modules that read
one tensor send it once: LoRA on query, key and value, unless dropout is between. Example: LoRA on q and v of width 768
sends 768 values of x and two gradients of 768 per token and block, in float32 9,216 bytes; with VeLoRA of all inputs in
32 parts 6,272. LoRA at down sends 3,072 and 768 values, 15,360 bytes; with VeLoRA 3,200.

Sets of adapters of users, of one block:

========================= ==================== ================================ =========================
where                     one set for all      alone                            collaboration
========================= ==================== ================================ =========================
at the host, in modules   the set              a set of each user               none: it is merged
at the helper             the set              a set of each user               a set of each user
back after an update      the set              sets of the users of an update   the sum of all sets
gradients at the helper   of the set           as many sets                     as many sets
========================= ==================== ================================ =========================

The users of an update depend on batches; counted are all users of the owner with most of them, at most one per row, and
with an interval of several steps as many for each step. The sum of linear models is as large as one of them, that of
others at most as large as all together, or as the block. If users have several kinds of adapters, the largest sets
count, and the sum is at most as large as the matrices beside all kinds.

Seconds: an adapter's weights are multiplied with each token once in a forward, and once more for their gradient. With
the share of adapters in all weights of a block, times the block's forward:

- a backward at the host is shorter by that for each block with adapters that a helper trains;
- a fit takes three times that for each block: a forward, the gradient of the weights, the gradient of the hidden
values.

Both are estimates by multiplications: a narrow adapter takes longer than its share. A measured time of fits is used
instead, reading included; as only the job's own kind of adapters is measured, the estimate is used if it is larger and
users have several kinds. A host packs pairs as fast as it encodes hidden states of as many bytes, a helper reads them
as fast as it decodes such, and installing weights takes no time. An update takes its time once for each user that it
may change; rows of several users that run separately cost nothing more.

Source: ColA, section 3 (adaptation data).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from ringtune.costs.profile import KindFacts, ModelFacts, NodeFacts, Work
from ringtune.models.adapter_config import AdapterPart, bottleneck_width, is_all, parse_adapter_config
from ringtune.models.adapter_support import offload_refusal
from ringtune.models.auxiliary_models import AUXILIARY_KINDS, LINEAR
from ringtune.models.family import Family, Widths
from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.course import ALL_INPUTS, ALONE, BFLOAT16, EXACT, Course
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import DEFAULT_PARTS, VELORA, num_subtokens, subtoken_size
from ringtune.schedule.turns import StepKind
from ringtune.techniques.offload import LOSSY, max_changed, sent_pair_token_bytes, unfitted_role

_RELU: Final = "relu"
_NON_LINEARITIES: Final = {"double_seq_bn": "swish"}
"""Bottlenecks without ReLU, if the options name none. Source: adapters 1.3.0, the classes of BnConfig."""

_BFLOAT16_BYTES: Final = 2


class PairWidths(NamedTuple):
    """Values per token that one module sends.

    Attributes:
        inputs: values of x; 0 where another module sends the same x.
        outputs: values of the gradient.
        units: of its ReLU; 0 without one.
        beside: values of the gradients of the other modules that read the x that this one sends.
    """

    inputs: int
    outputs: int
    units: int = 0
    beside: int = 0

    @property
    def is_wide(self) -> bool:
        """Whether x is wider than the gradients that are sent beside it."""
        return self.inputs > self.outputs + self.beside


def pair_widths(config: str, block: int, *, hidden_size: int, widths: Widths, dropout: float) -> tuple[PairWidths, ...]:
    """Return the pairs of the adapter modules of one block."""
    pairs: list[PairWidths] = []
    attention: list[_OfAttention] = []
    for part in parse_adapter_config(config):
        pairs += _of_part(part, block, hidden_size, widths)
        attention += _of_attention(part, block, widths, has_dropout=dropout > 0)
    return (*_attention_pairs(attention, is_merged=widths.merged), *pairs)


class _OfAttention(NamedTuple):
    """A module beside query, key or value: its pair, whether it reads the shared input, and whether it is auxiliary."""

    pair: PairWidths
    shares: bool
    is_auxiliary: bool


def _attention_pairs(modules: Sequence[_OfAttention], *, is_merged: bool) -> Iterator[PairWidths]:
    """Yield the pairs of modules that read the input of the attention; those that share it send it once.

    At a merged matrix for query, key and value all auxiliary models are one module.
    """
    auxiliary = [module.pair for module in modules if module.is_auxiliary]
    if is_merged and auxiliary:
        outputs, units = sum(pair.outputs for pair in auxiliary), sum(pair.units for pair in auxiliary)
        together = PairWidths(auxiliary[0].inputs, outputs, units)
        modules = [*(module for module in modules if not module.is_auxiliary), _OfAttention(together, True, True)]
    shared = sum(module.pair.outputs for module in modules if module.shares)
    has_sent = False
    for pair, shares, _ in modules:
        if shares and has_sent:
            pair = pair._replace(inputs=0)
        elif shares:
            pair, has_sent = pair._replace(beside=shared - pair.outputs), True
        yield pair


def _of_part(part: AdapterPart, block: int, hidden: int, widths: Widths) -> list[PairWidths]:
    """List the pairs of a method, without those beside query, key and value."""
    kind, options = part.kind, part.whole
    if block in options["leave_out"]:
        return []
    if kind == "bottleneck":
        is_relu = options.get("non_linearity", _NON_LINEARITIES.get(part.name, _RELU)) == _RELU
        pair = PairWidths(hidden, hidden, bottleneck_width(options, block, hidden) if is_relu else 0)
        return [pair] * (bool(options["mh_adapter"]) + bool(options["output_adapter"]))
    units = int(options.get("hidden", 0))
    others = [widths.intermediate] if options["intermediate_lora"] else []
    others += [widths.output] if options["output_lora"] else []
    return [PairWidths(*shape, units) for shape in others]


def _of_attention(part: AdapterPart, block: int, widths: Widths, *, has_dropout: bool) -> list[_OfAttention]:
    kind, options = part.kind, part.whole
    if block in options["leave_out"] or not options.get("selfattn_lora"):
        return []
    units, is_auxiliary = int(options.get("hidden", 0)), kind in AUXILIARY_KINDS
    shares = not widths.apart and (is_auxiliary or not has_dropout)  # linear and mlp have no dropout
    by_letter = {"q": widths.query, "k": widths.key, "v": widths.value}
    there = [by_letter[letter] for letter in options["attn_matrices"] if any(by_letter[letter])]
    pairs = [PairWidths(*shape, units) for shape in there]
    if pairs and widths.merged and not is_auxiliary:
        pairs = [PairWidths(pairs[0].inputs, sum(pair.outputs for pair in pairs))]
    return [_OfAttention(pair, shares, is_auxiliary) for pair in pairs]


def pair_token_bytes(
    pairs: Sequence[PairWidths], wire: str, *, value_bytes: int, parts: int = DEFAULT_PARTS, projected: str = ALL_INPUTS
) -> int:
    """Bytes of pairs per token; ``parts`` and ``projected`` inputs are those of VeLoRA."""
    outputs = sum(pair.outputs for pair in pairs)
    signs = sum(-(-pair.units // 8) for pair in pairs) if wire in LOSSY else 0
    if wire == VELORA:
        kept = sum(
            num_subtokens(pair.inputs, min(parts, pair.inputs))
            if projected == ALL_INPUTS or pair.is_wide
            else pair.inputs
            for pair in pairs
            if pair.inputs
        )
        return (kept + outputs) * value_bytes + signs
    values = sum(pair.inputs for pair in pairs) + outputs
    return values * (_BFLOAT16_BYTES if wire == BFLOAT16 else value_bytes) + signs


def with_pairs(
    facts: ModelFacts, job: Any, widths: Sequence[Widths], family: Family, *, value_bytes: int
) -> ModelFacts:
    """Add the bytes of a block's pairs, for the block with most; unchanged where no helper can train the adapters."""
    config, dropout = job.adapter.config, job.train.dropout
    if offload_refusal(config, dropout=dropout, fused=widths[0].merged) or unfitted_role(family, [config]):
        return facts
    blocks = [
        pair_widths(config, at, hidden_size=facts.hidden_size, widths=of_block, dropout=dropout)
        for at, of_block in enumerate(widths)
    ]

    def most(wire: str) -> int:
        return max(
            pair_token_bytes(block, wire, value_bytes=value_bytes, projected=job.offload.projected) for block in blocks
        )

    vectors = [pair_vector_values(block, projected=job.offload.projected) for block in blocks]
    return dataclasses.replace(
        facts,
        pair_vector_values=max(vectors) if job.offload.pairs == VELORA else 0,
        pair_token_bytes=most(EXACT),
        pair_rounded_token_bytes=most(BFLOAT16),
        pair_projected_token_bytes=most(VELORA),
    )


def pair_vector_values(pairs: Sequence[PairWidths], *, projected: str) -> int:
    """Values of VeLoRA's vectors for the pairs of one block: a sub-token of each projected input.

    Example: LoRA at down, which reads 1,536 values in 32 parts, has a vector of 48.
    """
    inputs = (pair.inputs for pair in pairs if pair.inputs and (projected == ALL_INPUTS or pair.is_wide))
    return sum(subtoken_size(width, min(DEFAULT_PARTS, width)) for width in inputs)


class SetBytes(NamedTuple):
    """Bytes of the adapters of one block that a helper trains.

    Attributes:
        hosted: in the modules of the host.
        sent: weights that return after an update.
    """

    hosted: int
    held: int
    sent: int
    gradients: int


def set_bytes(course: Course, model: ModelFacts, *, adapter: str = "") -> SetBytes:
    """Return the bytes of a block's adapters that a helper trains; an empty ``adapter`` may be of any kind."""
    common, users = model.adapter_block_bytes, course.user_sets
    hosted = 0 if course.helper_settings.merged else common
    if not users:
        return SetBytes(hosted, common, common, common)
    of_users = sorted((kind.adapter_block_bytes for kind in kinds_of_users(model, users)), reverse=True)
    changed, held = sum(of_users[: max_changed(course)]), sum(of_users)
    if course.helper_settings.users == ALONE:
        return SetBytes(held, held, changed, changed)
    if model.kinds:
        return SetBytes(0, held, max(of_users[0], model.beside_block_bytes), changed)
    is_linear = bool(adapter) and is_all(adapter, LINEAR)
    return SetBytes(0, held, common if is_linear else min(held, max(common, model.block_bytes)), changed)


def kinds_of_users(model: ModelFacts, users: Sequence[str]) -> list[ModelFacts | KindFacts]:
    """Return the sizes of each user's adapters in a block; without users, of the common set."""
    chosen = {user: kind for kind in model.kinds for user in kind.users}
    return [chosen.get(user, model) for user in users] or [model]


def step_traffic(plan: Plan, helper: Helper, facts: NodeFacts) -> tuple[float, float]:
    """Bytes that a helper's blocks send at a step in which all train, and bytes that return at an update.

    Rows count with the longest text of the job; ``facts`` are of any node.
    """
    course, blocks = plan.course, helper.stop - helper.start
    tokens = course.batch_size * course.max_length
    return (
        tokens * blocks * sent_pair_token_bytes(facts.model, course.helper_settings.pairs),
        blocks * set_bytes(course, facts.model, adapter=facts.shape.adapter).sent,
    )


_FIT_FORWARDS: Final = 3
_COMPUTED_BYTES: Final = 4


class WorkSeconds(Protocol):
    """Measured times of one node."""

    def work(self, work: Work, size: float = 0.0) -> float:
        """Seconds of a work; 0 if it was not measured."""


class OffloadCosts:
    """Seconds and bytes of a course in which helpers train adapters; ``facts`` are of any node."""

    def __init__(self, course: Course, facts: NodeFacts, helpers: Sequence[Helper]) -> None:
        model = facts.model
        self._helpers = tuple(helpers)
        self._token_bytes = sent_pair_token_bytes(model, course.helper_settings.pairs)
        self._hidden_bytes = _COMPUTED_BYTES * model.hidden_size
        self._sent_bytes = set_bytes(course, model, adapter=facts.shape.adapter).sent
        self._changed = max_changed(course)
        self._has_kinds = bool(model.kinds)
        largest = max([model.adapter_block_bytes, *(kind.adapter_block_bytes for kind in model.kinds)])
        self._share = largest / max(1, model.block_bytes + largest)

    def action_s(
        self, node: str, action: Action, work_s: float, costs: WorkSeconds, *, size: float, kind: StepKind
    ) -> float:
        """Seconds of an action that takes ``work_s`` without helpers."""
        op, blocks = action.op, action.stop - action.start
        if op is Op.SHIP:
            return blocks * self._packing(size) * costs.work(Work.ENCODE, size)
        if op is Op.FIT:
            return blocks * self.fit_s(costs, size)
        if op is Op.UPDATE and any(helper.has_block(action.start) and helper.node != node for helper in self._helpers):
            return 0.0
        if op is Op.UPDATE and any(helper.node == node and helper.has_block(action.start) for helper in self._helpers):
            return self._changed * work_s
        if op is Op.BACKWARD and kind.has_update:
            helped = sum(
                max(0, min(action.stop, helper.stop) - max(action.start, helper.start)) for helper in self._helpers
            )
            return max(0.0, work_s - helped * self._share * costs.work(Work.FORWARD, size))
        return work_s

    def fit_s(self, costs: WorkSeconds, size: float) -> float:
        """Seconds to read one block's pairs and compute the gradients of its adapters, at a node with these times."""
        measured_s = costs.work(Work.FIT, size)
        if measured_s and not self._has_kinds:
            return measured_s
        read_s = self._packing(size) * costs.work(Work.DECODE, size)
        return max(measured_s, read_s + _FIT_FORWARDS * self._share * costs.work(Work.FORWARD, size))

    def parcel_bytes(self, payload: str, boundary: int, size: float) -> float:
        """Bytes of pairs or weights of the blocks of one helper from ``boundary`` on."""
        blocks = next((helper.stop - boundary for helper in self._helpers if helper.has_block(boundary)), 0)
        return blocks * (size * self._token_bytes if payload == Payload.PAIRS else self._sent_bytes)

    def _packing(self, size: float) -> float:
        """Bytes of one block's pairs over those of a hidden state of the same tokens."""
        return self._token_bytes / self._hidden_bytes if size else 0.0
