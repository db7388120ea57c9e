"""What a job's ``[memory] activations`` means for a run: VeLoRA's layers in this model, and which blocks keep what."""

from __future__ import annotations

from collections.abc import Sequence

from ringtune.costs.profile import ModelFacts
from ringtune.errors import JobError
from ringtune.jobs.parts.memory import PAPER_LAYERS, VeloraSettings
from ringtune.models.adapters.adapter_config import has_adapter
from ringtune.models.adapters.kept_inputs import KeptInput, taken_together, trained_layers
from ringtune.schedule.extent import Extent
from ringtune.schedule.saving import Velora
from ringtune.schedule.units import Range, Units


def job_velora(settings: VeloraSettings | None, adapter: str, extent: Extent, model: ModelFacts) -> Velora | None:
    """VeLoRA as a job has it, or allows it, in all blocks that may train; None where it says nothing of it.

    Args:
        settings: ``[velora]`` of the job.
        adapter: ``adapter.config`` of the job.
        extent: of the run, which says what may train.
        model: with the inputs that its blocks keep.

    Raises:
        JobError: no such layer trains in this model, or an input has fewer values than there are parts.
    """
    if settings is None:
        return None
    inputs = model.kept_inputs
    check_layers(settings.layers, inputs, adapter)
    layers = taken_together(settings.layers or PAPER_LAYERS, inputs)
    if not layers:
        raise JobError(
            f"VeLoRA has nothing to do with adapter.config = {adapter!r}: no linear layer that trains keeps "
            "its input for itself; set memory.activations = 'recompute' or 'none'"
        )
    narrowest = min(kept.width for kept in inputs if set(kept.layers) & set(layers) and not kept.always_kept)
    if settings.parts > narrowest:
        raise JobError(
            f"velora.parts is {settings.parts}, but an input of {', '.join(layers)} has {narrowest} values; set it to "
            f"at most {narrowest}"
        )
    blocks = trained_blocks(extent, adapter)
    return Velora(blocks=blocks, layers=layers, parts=settings.parts, init=settings.init) if blocks else None


def proposed_velora(adapter: str, extent: Extent, model: ModelFacts) -> Velora | None:
    """VeLoRA with its defaults, for a job that does not ask for it; None where it has nothing to do."""
    try:
        return job_velora(VeloraSettings(), adapter, extent, model)
    except JobError:
        return None


def check_layers(layers: Sequence[str], inputs: Sequence[KeptInput], adapter: str) -> None:
    """Refuse named layers of which this model has none that trains, or whose input stays anyway.

    Raises:
        JobError: names the layer, and those that train, or what keeps its input.
    """
    trained = trained_layers(inputs)
    for layer in layers:
        if layer not in trained:
            raise JobError(
                f"velora.layers has {layer!r}, which does not train in this model with adapter.config = {adapter!r}; "
                f"those that train are {', '.join(trained) or 'none'}"
            )
        if all(kept.always_kept for kept in inputs if layer in kept.layers):
            raise JobError(
                f"velora.layers has {layer!r}, but this model's activation function keeps the input of that layer for "
                "its own backward, so that nothing would be saved; leave it out"
            )


def trained_blocks(extent: Extent, adapter: str) -> tuple[Range, ...]:
    """The blocks that may train in a run and have an adapter, as ranges."""
    trained = (block for block in extent.trainable.within(0, extent.num_blocks) if has_adapter(adapter, block))
    return Units.of(extent.num_blocks, trained).ranges
