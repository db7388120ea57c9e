"""The result of a run loads into the pretrained model with nothing of ours, and predicts what was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edge.model.auxiliary import load_auxiliary
from ringtune.errors import IntegrityError
from ringtune.schedule.turns import StepKind, items, turn_sequence
from tests.features.catalog import COUNTS
from tests.features.feature import Feature, each, each_technique, run_of
from tests.features.models import (
    ADAPTER,
    AUXILIARY,
    CONFIGS,
    FAMILY,
    INVERTIBLE,
    LORA_LINEAR,
    OWN_WEIGHTS,
    loaded_merged,
    write_result,
)
from tests.support import reference
from tests.support.torch_ring import Case, reference_of

WHOLE = [
    feature
    for feature in ADAPTER
    for config in [feature.changes["adapter"]]
    if config in (AUXILIARY[0], AUXILIARY[1], CONFIGS[7], CONFIGS[8], LORA_LINEAR)
    if not feature.name.startswith("adapter/vit") and not (config == CONFIGS[7] and "gpt2" in feature.name)
]
"""What is added to matrices can be merged into them."""


def logits(feature: Feature, model: Any) -> torch.Tensor:
    """Of the rows of the first evaluation, without padding."""
    plan = feature.plan_on(feature.split)
    turn = next(turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.EVALUATE)
    batch = feature.case.datasets()["a"].batch(plan.course, items(plan.course, turn)[0])
    with torch.no_grad():
        found = reference.outputs_of(model(**reference.inputs_of(model, batch)))
    return found[batch.mask == 1] if feature.case.task == "question-answering" else found


def require_loads(feature: Feature, tmp_path: Path, load: Callable[[Case, Path], Any]) -> Any:
    """Load a result, and compare its logits with those of the whole model that one process trained."""
    folder = write_result(run_of(feature, feature.split), tmp_path / "result")
    plain = load(feature.case, folder).to(getattr(torch, feature.case.dtype)).eval()
    wanted = logits(feature, reference_of(feature.case).model)
    assert float((logits(feature, plain) - wanted).abs().max()) <= (1e-9 if feature in OWN_WEIGHTS else 1e-5)
    return plain


@pytest.mark.promise("8 adapterhub folder")
@each([*FAMILY, *ADAPTER, *OWN_WEIGHTS, *INVERTIBLE], COUNTS)
def test_result_loads_with_nothing_of_ours(feature: Feature, tmp_path: Path) -> None:
    """By the documented lines, with the names of the classes."""
    assert feature.load is not None
    plain = require_loads(feature, tmp_path, feature.load)
    if feature.case.labels and feature not in OWN_WEIGHTS:
        assert tuple(plain.get_labels()) == feature.case.labels


@each(feature for feature in ADAPTER if feature.group == "adapter-mixture")
def test_library_alone_does_not_load_a_mixture(feature: Feature, tmp_path: Path) -> None:
    """One function loads both halves, in the model's type; none of their tensors trains then."""
    from adapters import AutoAdapterModel

    folder = write_result(run_of(feature, feature.split), tmp_path / "result")
    plain = AutoAdapterModel.from_pretrained(str(feature.case.folder / "model")).double()
    with pytest.raises(OSError, match=r"adapter_config\.json"):
        plain.load_adapter(str(folder), use_safetensors=True)
    load_auxiliary(plain, folder)
    own = {name: value for name, value in plain.named_parameters() if ".ringtune." in name}
    assert {value.dtype for value in own.values()} == {torch.float64}
    assert not any(value.requires_grad for value in own.values())
    tensors = load_file(folder / "adapter.safetensors")
    for lost in [name for name in sorted(tensors) if ".adapters." in name or ".loras." in name][:1]:
        tensors[f"{lost}x"] = tensors.pop(lost)
        save_file(tensors, folder / "adapter.safetensors")
        with pytest.raises(IntegrityError, match=f"differ in {lost.partition('.')[2]}"):
            load_auxiliary(AutoAdapterModel.from_pretrained(str(feature.case.folder / "model")), folder)


@each(WHOLE)
def test_merged_result_is_a_model_of_transformers(feature: Feature, tmp_path: Path) -> None:
    """With linear or LoRA in its weights, of GPT-2 in one matrix, and with nothing of ours."""
    require_loads(feature, tmp_path, loaded_merged)


@each_technique([*FAMILY, *OWN_WEIGHTS])
def test_comparison_of_logits_can_fail(feature: Feature) -> None:
    """Negative control: the model before the run has other logits."""
    plan = feature.plan_on(feature.split)
    before = reference.whole_model(feature.case.job, plan, feature.case.folder / "model").eval()
    wanted = reference_of(feature.case).model
    assert float((logits(feature, before) - logits(feature, wanted)).abs().max()) > 1e-3
