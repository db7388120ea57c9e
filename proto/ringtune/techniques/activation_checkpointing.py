"""Activation checkpointing and VeLoRA: ``[memory]`` and ``[velora]`` of a job, and the policy of each slice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from ringtune.config.sections import Adapter
from ringtune.errors import JobError
from ringtune.models.adapter_config import trains_own_weights
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import (
    DEFAULT_PARTS,
    INITS,
    LAYERS,
    check_named_once,
    has_layer,
    is_adapter,
    ranges_to_json,
    within,
)
from ringtune.schedule.units import Range
from ringtune.storage.strict import Bounds, OneOf, check_fields
from ringtune.techniques.base import Technique

NONE: Final = "none"
VELORA: Final = "velora"
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
        said = [f"blocks {_ranges(self.recomputed)} run again"] if self.recomputed else []
        said += [f"VeLoRA in blocks {_ranges(self.projected)}"] if self.projected else []
        return ", ".join(said)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able table."""
        return {
            "policy": self.name,
            "recomputed": ranges_to_json(self.recomputed),
            "projected": ranges_to_json(self.projected),
        }


def _ranges(ranges: Iterable[Range]) -> str:
    return ", ".join(f"[{start}, {stop})" for start, stop in ranges)


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
        own = trains_own_weights(adapter.config)
        for layer in velora.layers:
            if is_adapter(layer) == own:
                what = "the blocks' own weights train, there is no adapter" if own else "only the adapter trains"
                others = [one for one in LAYERS if is_adapter(one) != own]
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
    velora, found = plan.course.velora, list[str]()
    if velora is None or not nodes:
        return found
    for kept in dict.fromkeys(sum(nodes[0].model.block_inputs, ())):
        saved = kept.saved_values(velora, has_dropout=nodes[0].shape.dropout > 0)
        named = [layer for layer in kept.layers if has_layer(velora.layers, layer)]
        others = [layer for layer in kept.layers if layer not in named]
        if saved < 0 and others:
            found.append(
                f"velora.layers has {', '.join(named)}, but the same {kept.width} values a token are kept for "
                f"{', '.join(others)}: it keeps {-saved} more; add the others, or leave it out"
            )
    return found


TECHNIQUE: Final = Technique(
    name="activation_checkpointing",
    course_fields=("velora",),
    later_keys={"memory.activations": NONE},
    smaller_settings=lambda job: smaller_settings(job.memory),
    evaluation_sections={"memory": Memory(), "velora": None},  # without a backward no activations are kept
    notes=sites_that_save_nothing,
)
