"""Activation checkpointing and VeLoRA: ``[memory]`` and ``[velora]`` of a job, and the policy of each slice.

A job names one policy for all slices, or leaves the choice to the planner (``auto``). With ``auto`` a slice keeps
everything if that fits; else it takes the policy with the shortest steps of those that fit::

    velora               projections of inputs of linear layers: little time, but gradients change; only if allowed
    recompute r blocks   the lowest r trained blocks run again, one more forward for each; as few as needed
    both                 projections, and as few blocks as needed run again

The lowest blocks run again because they train at the fewest steps in a run that unfreezes from the top down. The lowest
trained block of the run may be skipped: with adapters its graph begins inside it, so that it frees little.

``costs.activation_costs`` has the bytes and seconds of each policy.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from ringtune.config.sections import Adapter
from ringtune.errors import JobError, PlanError
from ringtune.models.adapter_config import has_adapter, trains_own_weights
from ringtune.models.kept_inputs import KeptInput, paper_layers, trained_layers, with_shared_inputs
from ringtune.quantities import format_bytes
from ringtune.schedule.course import Course
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Extent
from ringtune.schedule.saved_activations import (
    ADAPTER_DOWN,
    DEFAULT_PARTS,
    INITS,
    LAYERS,
    VELORA,
    Velora,
    check_named_once,
    has_layer,
    is_adapter,
    merged,
    ranges_text,
    ranges_to_json,
    within,
)
from ringtune.schedule.units import Range, Units
from ringtune.schedule.versions import ever_trained
from ringtune.storage.strict import Bounds, OneOf, check_fields
from ringtune.techniques.base import ANEW, Shape, Technique

NONE: Final = "none"
RECOMPUTE: Final = "recompute"
BOTH: Final = "both"
POLICIES: Final = (NONE, VELORA, RECOMPUTE, BOTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicePolicy:
    """The activation policy of one slice: blocks that run again for their backward, and those with VeLoRA."""

    recomputed: tuple[Range, ...] = ()
    projected: tuple[Range, ...] = ()

    @staticmethod
    def of(plan: Plan, start: int, stop: int) -> SlicePolicy:
        """Read the policy of blocks [start, stop) from a plan."""
        return SlicePolicy(
            recomputed=within(plan.placement.recompute, start, stop),
            projected=within(plan.course.projected, start, stop),
        )

    @property
    def name(self) -> str:
        """One of ``POLICIES``, even if it holds for some blocks of the slice only."""
        if self.recomputed:
            return BOTH if self.projected else RECOMPUTE
        return VELORA if self.projected else NONE

    @property
    def text(self) -> str:
        """The policy in words: ``blocks [0, 2) run again``; empty where everything is kept."""
        said = [f"blocks {ranges_text(self.recomputed)} run again"] if self.recomputed else []
        said += [f"VeLoRA in blocks {ranges_text(self.projected)}"] if self.projected else []
        return ", ".join(said)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able table."""
        return {
            "policy": self.name,
            "recomputed": ranges_to_json(self.recomputed),
            "projected": ranges_to_json(self.projected),
        }


AUTO: Final = "auto"
ACTIVATIONS: Final = (*POLICIES, AUTO)

MAX_PARTS: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """``[memory]``: how memory is saved.

    Attributes:
        activations: what a block that trains keeps for its backward: everything, VeLoRA's projections, only its input
            to run it again, both, or what makes each slice fit and the step fastest.
    """

    activations: Annotated[str, OneOf(ACTIVATIONS)] = NONE

    def __post_init__(self) -> None:
        check_fields(self, where="memory", error=JobError)


@dataclass(frozen=True, kw_only=True, slots=True)
class VeloraSettings:
    """``[velora]``: which linear layers keep projections of their inputs, with ``memory.activations`` velora or both.

    Beside ``memory.activations = "auto"`` the section allows the planner to choose VeLoRA, which changes gradients.

    Attributes:
        layers: some of ``query``, ``key``, ``value``, ``attention_out``, ``up``, ``gate``, ``down`` where
            own weights train, all that read the same input being taken with one of them; ``adapter_down`` where an
            adapter does, or of single LoRAs ``adapter_down:down`` and the like, also for ``query``, ``key``, ``value``
            and ``up``. Empty: ``value`` and ``down`` of own weights, ``adapter_down`` of bottlenecks; with LoRA alone
            that at ``down``, and at ``value`` if no other module reads the same tensor; where it has neither, the run
            goes without VeLoRA, and its plan says so.
        parts: sub-tokens of an input; 32 parts of 768 values are sub-tokens of 24. One number of each is kept. 32 if
            neither ``parts`` nor ``values`` is set.
        values: values of a sub-token, in place of ``parts``; 768 values in sub-tokens of 32 are 24 parts.
        init: where the direction comes from on which sub-tokens are projected: their mean in the first micro-batch, in
            all so far, the first singular vector, or the seed.
    """

    layers: Annotated[tuple[str, ...], OneOf(LAYERS)] = ()
    parts: Annotated[int | None, Bounds(ge=1, le=MAX_PARTS)] = None
    values: Annotated[int | None, Bounds(ge=1, le=MAX_PARTS)] = None
    init: Annotated[str, OneOf(INITS)] = INITS[0]

    def __post_init__(self) -> None:
        """Refuse unknown words, layers that are named twice, and sub-tokens by number and by size."""
        check_fields(self, where="velora", error=JobError)
        check_named_once(self.layers, JobError)
        if self.parts is not None and self.values is not None:
            raise JobError(
                f"velora.parts = {self.parts} and velora.values = {self.values} both set the sub-tokens of an input; "
                "remove one of them"
            )
        if self.values is None and self.parts is None:
            object.__setattr__(self, "parts", DEFAULT_PARTS)


def checked(memory: Memory, velora: VeloraSettings | None, adapter: Adapter) -> VeloraSettings | None:
    """Return the VeLoRA settings of a job: the given ones, or the defaults where its policy needs some."""
    if memory.activations in (NONE, RECOMPUTE) and velora is not None:
        raise JobError(
            f"[velora] has settings of memory.activations = '{VELORA}', '{BOTH}' or '{AUTO}', but this job has "
            f"memory.activations = {memory.activations!r}; remove the section or change it"
        )
    if memory.activations in (VELORA, BOTH) and velora is None:
        velora = VeloraSettings()
    if velora is not None:
        is_own = trains_own_weights(adapter.config)
        for layer in velora.layers:
            if is_adapter(layer) == is_own:
                what = "the blocks' own weights train, there is no adapter" if is_own else "only the adapter trains"
                others = [name for name in LAYERS if is_adapter(name) != is_own]
                raise JobError(
                    f"velora.layers has {layer!r}, which does not train with adapter.config = {adapter.config!r}: "
                    f"{what}; name some of {', '.join(others)}"
                )
    return velora


def smaller_settings(memory: Memory) -> Iterator[tuple[str, object]]:
    """Yield ``auto`` for a job with a policy that keeps everything or projections."""
    if memory.activations in (NONE, VELORA):
        yield "memory.activations", AUTO


def sites_that_save_nothing(plan: Plan, nodes: Sequence[Any]) -> list[str]:
    """Warn of layers with VeLoRA whose input is kept in any case, because other modules read it too."""
    velora, texts = plan.course.velora, list[str]()
    if velora is None or not nodes:
        return texts
    for kept in dict.fromkeys(nodes[0].model.all_inputs):
        saved = kept.saved_values(velora, has_dropout=nodes[0].shape.dropout > 0)
        named = [layer for layer in kept.layers if has_layer(velora.layers, layer)]
        others = [layer for layer in kept.layers if layer not in named]
        if saved < 0 and others:
            texts.append(
                f"velora.layers has {', '.join(named)}, but the same {kept.width} values a token are kept for "
                f"{', '.join(others)}: it keeps {-saved} more; add the others, or leave it out"
            )
    return texts


def job_velora(job: Any, extent: Extent, model: Any, settings: VeloraSettings | None = None) -> Velora | None:
    """Return VeLoRA as set in a job, for all blocks that may train; None without settings, such blocks or layers.

    ``settings``: in place of the job's.
    """
    settings, inputs = settings or job.velora, model.all_inputs
    if settings is None:
        return None
    check_layers(settings.layers, inputs, job.adapter.config)
    layers, blocks = _projected_layers(job, settings, model), trained_blocks(extent, job.adapter.config)
    if not (layers and blocks):
        return None
    velora = Velora(
        blocks=blocks, layers=layers, parts=settings.parts or 0, values=settings.values or 0, init=settings.init
    )
    narrowest = min(kept.width for kept in inputs if any(kept.chosen(layers)) and not kept.always_kept)
    if problem := velora.misfit(narrowest, f"an input of {', '.join(layers)}"):
        raise JobError(problem)
    return velora


def unprojected_reason(job: Any, plan: Plan, model: Any) -> str:
    """Say why a job's VeLoRA projects nothing, and what would save memory; empty if it projects, or is not set."""
    inputs, adapter = model.all_inputs, job.adapter.config
    if job.velora is None or not plan.course.num_steps:
        return ""
    if _projected_layers(job, job.velora, model):
        is_helped = plan.placement.helpers and not plan.course.projected
        return "VeLoRA projects nothing: every host of blocks that train has a helper" if is_helped else ""
    if not any(kept.is_adapter and not kept.always_kept for kept in inputs):
        return (
            f"VeLoRA projects nothing with adapter.config = {adapter!r}: no linear layer that trains keeps its input "
            "for itself; memory.activations = 'recompute' saves memory"
        )
    return (
        "VeLoRA projects nothing: without velora.layers it projects LoRA, linear and mlp at down, and at value where "
        f"no other module reads its input, but adapter.config = {adapter!r} has neither"
        + (
            ", as the activation function keeps the input of down anyway"
            if any(kept.always_kept for kept in inputs)
            else "; output_lora=True adds it (in a Llama or Mistral intermediate_lora=True)"
        )
        + f"; velora.layers = ['{ADAPTER_DOWN}'] projects all that is there, at a loss of accuracy"
    )


def _projected_layers(job: Any, settings: VeloraSettings, model: Any) -> tuple[str, ...]:
    """Return the layers of a job, or those of the paper in every kind of block that has them."""
    inputs = model.all_inputs
    if given := with_shared_inputs(settings.layers, inputs):
        return given
    kinds = [
        (paper_layers(kept, has_dropout=job.train.dropout > 0), trained_layers(kept)) for kept in model.block_inputs
    ]
    chosen = {layer for layers, _ in kinds for layer in layers}
    refused = {layer for layers, trained in kinds for layer in trained if layer not in layers}
    return with_shared_inputs(chosen - refused, inputs)


def proposed_velora(job: Any, extent: Extent, model: Any) -> Velora | None:
    """Return VeLoRA with default settings, for a job that does not set it; None where it would save nothing."""
    try:
        return job_velora(job, extent, model, VeloraSettings())
    except JobError:
        return None


def check_layers(layers: Sequence[str], inputs: Sequence[KeptInput], adapter: str) -> None:
    """Refuse layers that do not train in this model, or that keep their input even with VeLoRA; raises ``JobError``."""
    trained = trained_layers(inputs)
    for layer in layers:
        if layer not in trained:
            raise JobError(
                f"velora.layers has {layer!r}, which does not train in this model with adapter.config = {adapter!r}, "
                f"or whose input a matrix without a name keeps; use some of {', '.join(trained) or 'no layers'}"
            )
        if all(kept.always_kept for kept in inputs if any(kept.chosen([layer]))):
            raise JobError(
                f"velora.layers has {layer!r}, but this model's activation function keeps the input of that layer for "
                "its own backward, so that nothing would be saved; leave it out"
            )


def trained_blocks(extent: Extent, adapter: str) -> tuple[Range, ...]:
    """Return the blocks that may train in a run and have an adapter, as ranges."""
    trained = (block for block in extent.trainable.within(0, extent.num_blocks) if has_adapter(adapter, block))
    return Units.of(extent.num_blocks, trained).ranges


VELORA_EXTRA: Final = 0.01
"""Share e that VeLoRA adds to a block's work with a graph; measured (docs/figures.md) as 0 within the noise."""

_FORWARD_SHARE: Final = 1 / 3
"""Forward over forward and backward together, if they were not measured."""


class SliceSaving(NamedTuple):
    """How the trained blocks of one slice save activations."""

    start: int = 0
    stop: int = 0
    is_projected: bool = False

    @property
    def recomputed(self) -> int:
        """Number of blocks that run again."""
        return self.stop - self.start


KEEPS_ALL: Final = SliceSaving()

Needs = Callable[[SliceSaving], int]
"""Bytes that a node needs for a slice with this saving."""


def slice_saving(
    activations: str,
    kept: Range,
    needs: Needs,
    facts: Any,
    *,
    may_project: bool = False,
    gain: float = 0.0,
    first_is_small: bool = False,
) -> SliceSaving:
    """Choose how a slice saves activations under a job's policy.

    ``kept`` are the blocks of the slice that keep activations for their backward; ``first_is_small``: the first of them
    keeps less than the others. ``gain`` is that of ``extra_share``.

    Returns:
        With ``auto`` the saving with the least extra time that fits; if none fits, the one that needs least.
    """
    if kept.start >= kept.stop or activations == NONE:
        return KEEPS_ALL
    if activations != AUTO:
        stop = kept.stop if activations in (RECOMPUTE, BOTH) else kept.start
        return SliceSaving(kept.start, stop, activations in (VELORA, BOTH))
    if needs(KEEPS_ALL) <= facts.memory_bytes:
        return KEEPS_ALL
    both = (False, True) if may_project else (False,)
    begins = [kept, *([Range(kept.start + 1, kept.stop)] if first_is_small and kept.stop - kept.start > 1 else [])]
    ways = [_fewest(some, needs, facts.memory_bytes, is_projected=way) for way in both for some in begins]
    fitting = [way for way in ways if needs(way) <= facts.memory_bytes]
    if not fitting:
        return min(ways, key=needs)
    return min(fitting, key=lambda way: (extra_share(way, kept, facts, gain=gain), way.is_projected, way.start))


def extra_share(saving: SliceSaving, kept: Range, facts: Any, *, gain: float = 0.0) -> float:
    """Seconds that a saving adds, over those of the slice's forwards with graph and backwards; below 0 if it is faster.

    Example: 2 of 6 blocks run again and a forward takes a third of both directions: 1/9.

    ``kept`` are the blocks of the slice that keep activations for their backward. ``gain`` is the seconds that VeLoRA
    takes off a backward, over those of a forward (``activation_costs.mean_gain``).
    """
    if kept.start >= kept.stop:
        return 0.0
    both_s = facts.block_graph_s + facts.block_backward_s
    forward = facts.block_graph_s / both_s if both_s > 0 else _FORWARD_SHARE
    projected = VELORA_EXTRA - gain * forward if saving.is_projected else 0.0
    return forward * saving.recomputed / (kept.stop - kept.start) + projected


def _fewest(kept: Range, needs: Needs, has_bytes: int, *, is_projected: bool) -> SliceSaving:
    """Return the saving with the fewest blocks that run again and still fits; with all blocks if none fits."""

    def saving(count: int) -> SliceSaving:
        return SliceSaving(kept.start, kept.start + count, is_projected)

    if needs(saving(0)) <= has_bytes:
        return saving(0)
    few, many = 0, kept.stop - kept.start
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if needs(saving(middle)) <= has_bytes else (middle, many)
    return saving(many)


def planned_saving(plan: Plan, start: int, stop: int) -> SliceSaving:
    """Return how a plan's slice [start, stop) saves activations.

    Blocks that run again but are not adjacent, as in a plan made by hand, count as if they were.
    """
    policy = SlicePolicy.of(plan, start, stop)
    if policy.name == NONE:
        return KEEPS_ALL
    again = policy.recomputed
    first = again[0].start if again else start
    return SliceSaving(first, first + sum(last - low for low, last in again), bool(policy.projected))


@dataclass(frozen=True, slots=True)
class SavingPolicy:
    """What slices of a job may keep for their backwards.

    Attributes:
        name: ``memory.activations``.
        velora: VeLoRA that ``auto`` may give to slices; None if the course has it already, or no layer can have it.
        may_project: whether ``auto`` may choose it.
    """

    name: str = NONE
    velora: Velora | None = None
    may_project: bool = False

    @staticmethod
    def of(job: Any, course: Course, model: Any) -> tuple[Course, SavingPolicy]:
        """Return the course and the policy of a job; raises ``JobError``.

        ``velora`` and ``both``: the course gets VeLoRA in every block that may train. ``auto``: the policy says how
        slices may have it, but not beside operations or an audit. An evaluation keeps nothing.
        """
        name, velora, course = job.memory.activations, job_velora(job, course, model), keeping_all(course)
        if name == NONE or not course.num_steps:
            return course, SavingPolicy()
        if name != AUTO:
            return dataclasses.replace(course, velora=velora), SavingPolicy(name)
        if job.operations.is_any or job.audit is not None:
            return course, SavingPolicy(name)
        return course, SavingPolicy(name, velora or proposed_velora(job, course, model), velora is not None)

    def projected(self, course: Course) -> Course:
        """Return a course with VeLoRA in every block that can have it; the course itself without a ``velora``."""
        return course if self.velora is None else dataclasses.replace(course, velora=self.velora)

    def placed(
        self, course: Course, hosts: Sequence[Slice], savings: Mapping[str, SliceSaving]
    ) -> tuple[Course, tuple[Range, ...]]:
        """Return a course with the projections of its hosts, and the blocks that run again; ``savings`` by node."""
        again = merged(Range(each.start, each.stop) for each in savings.values() if each.recomputed)
        if self.velora is not None and self.may_project:
            projecting = [piece for piece in hosts if piece.node in savings and savings[piece.node].is_projected]
            blocks = merged(cut for each in projecting for cut in within(self.velora.blocks, each.start, each.stop))
            velora = dataclasses.replace(self.velora, blocks=blocks) if blocks else None
            course = dataclasses.replace(course, velora=velora)
        return course, again


def keeping_all(course: Course) -> Course:
    """Return a course without VeLoRA."""
    return dataclasses.replace(course, velora=None)


def check_model(job: Any, shape: Shape) -> None:
    """Refuse VeLoRA at matrices that a generic family multiplies by something else too; raises ``JobError``."""
    family, twice = shape.family, shape.family.twice
    if not (family.generic and twice) or job.velora is None:
        return
    is_own = trains_own_weights(job.adapter.config)
    kept = (*twice, "value") if is_own else tuple(f"{ADAPTER_DOWN}:{role}" for role in twice)
    if layer := next((layer for layer in job.velora.layers if layer in kept), ""):
        raise JobError(
            f"{shape.where}: velora.layers has {layer!r}, but {' and '.join(twice)} of a {family.model_type} multiply "
            "relative positions too, and keep the input; leave it out"
        )


def without_helped(course: Course, hosts: Iterable[Slice], helped: Collection[str]) -> Course:
    """Return the course with VeLoRA in no block of a host with a helper, which computes no gradients of weights."""
    if course.velora is None or not helped:
        return course
    unhelped = [piece for piece in hosts if piece.node not in helped]
    blocks = merged(part for piece in unhelped for part in within(course.velora.blocks, piece.start, piece.stop))
    return dataclasses.replace(course, velora=dataclasses.replace(course.velora, blocks=blocks) if blocks else None)


def check_plan(job: Any, plan: Plan, model: Any) -> None:
    """Refuse a given plan with slices that save activations in another way than the job says.

    With ``auto`` they may recompute any blocks, and have VeLoRA where the job allows it.
    """
    activations, course = job.memory.activations, plan.course
    anew = f"change it, or {ANEW}"
    velora = job_velora(job, course, model)
    if activations == AUTO and course.velora is not None and velora is not None:
        velora = dataclasses.replace(velora, blocks=course.velora.blocks)
    helped = {plan.placement.host_of(helper.start) for helper in plan.placement.helpers}
    all_own = dataclasses.replace(course, offload=None, velora=velora)
    velora = without_helped(all_own, plan.placement.hosts, helped).velora
    if course.velora != velora and not (activations == AUTO and course.velora is None):
        if course.velora is not None and velora is not None and course.velora.layers != velora.layers:
            layers = json.dumps(course.velora.layers)
            raise PlanError(
                f"the plan has velora.layers = {layers}, the job says {json.dumps(velora.layers)}: add "
                f"--set 'velora.layers={layers}', or {ANEW}"
            )
        has = "other settings of VeLoRA" if course.velora and velora else "VeLoRA" if course.velora else "no VeLoRA"
        raise PlanError(f"the plan has {has}, the job says memory.activations = {activations!r} with [velora]; {anew}")
    for piece in plan.placement.hosts if activations != AUTO and course.num_steps else ():
        has = SlicePolicy.of(plan, piece.start, piece.stop).name
        lowest = ever_trained(course).lowest
        if piece.stop > lowest and (has in (RECOMPUTE, BOTH)) != (activations in (RECOMPUTE, BOTH)):
            raise PlanError(
                f"the plan has the policy {has!r} for activations at node {piece.node}, the job says "
                f"memory.activations = {activations!r}; {anew}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceReason:
    """How one slice saves activations, and why.

    Attributes:
        policy: one of ``POLICIES``.
        says: the policy in words; empty if everything is kept.
        keeping_bytes: of the node if everything were kept.
        longer: share by which its forwards and backwards take longer; below 0 if they are shorter.
        projected_bytes: of the node with VeLoRA, if that fits but ``auto`` may not choose it; else 0.
    """

    node: str
    policy: str
    says: str
    needed_bytes: int
    keeping_bytes: int
    budget_bytes: int
    longer: float
    projected_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationsReason:
    """What blocks keep for their backwards, and the bytes that the policy saves.

    Attributes:
        slices: of the hosts in ring order; empty if everything is kept.
        block_bytes: kept by one block of one micro-batch.
        velora_bytes: the same with VeLoRA; 0 where that is not less.
        dropout_bytes: part of ``block_bytes`` that is due to dropout, as the attention kernel is not fused then.
    """

    asked: str
    slices: tuple[SliceReason, ...]
    block_bytes: int
    velora_bytes: int = 0
    dropout_bytes: int = 0

    def lines(self) -> list[str]:
        """Write the reasons as lines."""
        lines = [f"  memory.activations = '{self.asked}':"] if self.slices else []
        width = max((len(each.node) for each in self.slices), default=0)
        lines += [f"    {each.node:<{width}}  {_slice_text(each)}" for each in self.slices]
        whole = format_bytes(self.block_bytes)
        if self.velora_bytes:
            kept, less = format_bytes(self.velora_bytes), 1 - self.velora_bytes / self.block_bytes
            lines.append(f"    VeLoRA keeps {kept} instead of {whole} of each block and micro-batch, {less:.1%} less")
        if self.dropout_bytes:
            lines.append(
                f"    train.dropout = 0 would keep {format_bytes(self.block_bytes - self.dropout_bytes)} instead of "
                f"{whole} of each block and micro-batch, at no cost in time: the attention kernel is fused then and "
                "keeps no probabilities"
            )
        return lines


def explain_activations(plan: Plan, caps: Any, *, dropout: float = 0.0) -> ActivationsReason | None:
    """Explain the policies of a plan, made from the draft of ``caps``.

    Returns:
        None for a plan without hosts or steps, and where all is kept, nothing else was asked for and dropout is 0.
    """
    policy, hosts = caps.draft.saving.name, plan.placement.hosts
    if (policy == NONE and not dropout) or not hosts or not plan.course.num_steps:
        return None
    whole, projected, dropped = caps.block_bytes(hosts[0].node, plan.course.microbatch_sizes()[0], dropout=dropout)
    return ActivationsReason(
        asked=policy,
        slices=tuple(_slice(plan, piece, caps) for piece in hosts) if policy != NONE else (),
        block_bytes=whole,
        velora_bytes=projected if projected < whole else 0,
        dropout_bytes=dropped,
    )


def _slice(plan: Plan, piece: Slice, caps: Any) -> SliceReason:
    node, policy = piece.node, SlicePolicy.of(plan, piece.start, piece.stop)
    saving, facts, asked_policy = planned_saving(plan, piece.start, piece.stop), caps.facts[node], caps.draft.saving
    kept = caps.kept_blocks(piece.start, piece.stop)
    proposed = 0
    if asked_policy.name == AUTO and policy.recomputed and not asked_policy.may_project:
        with_velora = caps.without_recomputing(plan, node, asked_policy.projected(plan.course)).total_bytes
        proposed = with_velora if with_velora <= facts.memory_bytes else 0
    return SliceReason(
        node=node,
        policy=policy.name,
        says=policy.text,
        needed_bytes=caps.estimate(plan, node).total_bytes,
        keeping_bytes=caps.without_recomputing(plan, node, keeping_all(plan.course)).total_bytes,
        budget_bytes=facts.memory_bytes,
        longer=extra_share(saving, kept, facts, gain=caps.projected_gain(node, kept)),
        projected_bytes=proposed,
    )


def _slice_text(each: SliceReason) -> str:
    budget = format_bytes(each.budget_bytes)
    if not each.says:
        return f"keeps everything: {format_bytes(each.needed_bytes)} of {budget}"
    fits = "fits too" if each.keeping_bytes <= each.budget_bytes else "does not fit"
    text = (
        f"{each.says}: {format_bytes(each.needed_bytes)} of {budget}, "
        f"forwards and backwards {abs(each.longer):.0%} {'longer' if each.longer >= 0 else 'shorter'}; "
        f"keeping everything needs {format_bytes(each.keeping_bytes)}, which {fits}"
    )
    if each.projected_bytes:
        text += f"; VeLoRA would do ({format_bytes(each.projected_bytes)}): a section [velora] lets auto choose it"
    return text


def _changed(plan: Plan, values: Mapping[str, int | str], _: Sequence[Any]) -> Plan:
    """Let every trained block keep everything (``activations=none``) or run again (``recompute``)."""
    if (activations := values.get("activations")) is None:
        return plan
    if activations not in (NONE, RECOMPUTE):
        raise PlanError(
            f"--change activations={activations}: without planning it is '{NONE}' or '{RECOMPUTE}'; give --replan JOB"
        )
    course, first = keeping_all(plan.course), plan.placement.private_blocks
    again = course.trainable.ranges_within(first, plan.placement.stop) if activations == RECOMPUTE else ()
    return plan.replaced(course, [dataclasses.replace(placement, recompute=again) for placement in plan.placements])


TECHNIQUE: Final = Technique(
    name="activation_checkpointing",
    course_fields=("velora",),
    later_keys={"memory.activations": NONE},
    smaller_settings=lambda job: smaller_settings(job.memory),
    evaluation_sections={"memory": Memory(), "velora": None},  # without a backward no activations are kept
    check_model=check_model,
    check_plan=check_plan,
    notes=sites_that_save_nothing,
    plan_keys={"activations": "memory.activations"},
    changed=_changed,
)
