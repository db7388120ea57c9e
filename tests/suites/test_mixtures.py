"""Invariants 1 and 8 for configurations in which each matrix has the kind of adapter that the user wants."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.model.auxiliary import load_auxiliary
from edge.model.skeleton import build_skeleton
from ringtune.errors import JobError
from tests.suites.test_adapters import FOUR, inputs, make_case
from tests.suites.test_families import SPLITS, check_result_loads, collected, loaded_merged
from tests.suites.test_helpers_equal_one_process import WAYS, helped, run, with_offload
from tests.suites.test_helpers_equal_one_process import collected as adapters_of
from tests.support.torch_ring import distance, reference_of

LINEAR_MLP = "linear[attn_matrices=['q'],alpha=2.0]|mlp[attn_matrices=['v'],hidden=8]"
LORA_LINEAR = "lora[r=4,attn_matrices=['q'],init_weights='bert']|linear[attn_matrices=['v'],alpha=0.5,output_lora=True]"
FUSED = (
    "linear[attn_matrices=['q']]|mlp[attn_matrices=['v'],hidden=8]|mlp[selfattn_lora=False,output_lora=True,hidden=4]"
)
BY_BLOCK = "seq_bn|linear[leave_out=[0]]|mlp[leave_out=[1,2,3],hidden=8]"
MIXTURES = [
    ("bert", LINEAR_MLP),
    ("bert", LORA_LINEAR),
    ("gpt2", FUSED),
    ("gpt2", LORA_LINEAR),
    ("llama", BY_BLOCK),
]

__all__ = ["inputs"]


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(("model_type", "config"), MIXTURES)
@pytest.mark.sampled(1)
def test_mixture_in_a_ring_equals_one_process(inputs: Any, model_type: str, config: str) -> None:
    """Initial values are those of the parts alone, and every part trains, on four nodes with dropout."""
    case = dataclasses.replace(make_case(inputs, model_type, config), dropout=0.2)
    trained = reference_of(case)
    assert distance(collected(case, FOUR), {**trained.adapter(), **trained.head()}) < 1e-9


@pytest.mark.parametrize(("model_type", "config"), MIXTURES[1:])
def test_mixture_result_loads_into_a_plain_model(inputs: Any, tmp_path: Path, model_type: str, config: str) -> None:
    """One function loads both halves, in the model's type; the library alone finds no adapter that it could load."""
    check_result_loads(make_case(inputs, model_type, config), SPLITS["two"], tmp_path)
    from adapters import AutoAdapterModel

    plain = AutoAdapterModel.from_pretrained(str(inputs(model_type) / "model")).double()
    with pytest.raises(OSError, match=r"adapter_config\.json"):
        plain.load_adapter(str(tmp_path / "result"), use_safetensors=True)
    load_auxiliary(plain, tmp_path / "result")
    own = {name: value for name, value in plain.named_parameters() if ".ringtune." in name}
    assert {value.dtype for value in own.values()} == {torch.float64}
    assert not any(value.requires_grad for value in own.values())


@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
def test_merged_mixture_is_a_model_of_transformers(inputs: Any, tmp_path: Path, model_type: str) -> None:
    """LoRA and linear in its weights, of GPT-2 in one matrix, give the logits of the trained whole model."""
    check_result_loads(make_case(inputs, model_type, LORA_LINEAR), SPLITS["two"], tmp_path, load=loaded_merged)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("model_type", "config", "settings"),
    [
        ("bert", LINEAR_MLP, {}),
        ("gpt2", FUSED, {}),
        ("gpt2", LORA_LINEAR, {}),
        ("bert", LORA_LINEAR, {"merged": True}),
        ("gpt2", LORA_LINEAR, {"merged": True}),
    ],
)
@pytest.mark.sampled(1)
def test_helpers_fit_every_part_of_a_mixture(inputs: Any, model_type: str, config: str, settings: Any) -> None:
    """From the pairs of each matrix by its kind; of one matrix for query, key and value each part has its columns."""
    case = dataclasses.replace(make_case(inputs, model_type, config), method="all")
    plan = with_offload(helped(case, *WAYS["some-of-several-hosts"]), **settings)
    trained = reference_of(case)
    assert distance(adapters_of(plan, run(case, plan)), {**trained.adapter(), **trained.head()}) < 1e-9


def test_mixture_of_one_matrix_with_two_factors_is_refused(inputs: Any) -> None:
    """By each node too, also if nobody planned for this model."""
    case = make_case(inputs, "gpt2", LORA_LINEAR + "|mlp[attn_matrices=['k'],alpha=2.0]")
    with pytest.raises(JobError, match="are one matrix with one alpha; set the same for both"):
        build_skeleton(case.folder / "model", case.job)
