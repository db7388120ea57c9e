"""Invariants 1 and 8 for every kind of adapter, and that what can't be split is refused with the reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from adapters.configuration import ADAPTER_CONFIG_MAP

from edge.model.skeleton import build_skeleton
from ringtune.config import sections
from ringtune.errors import JobError
from ringtune.models.adapter_config import parse_adapter_config
from tests.suites.test_families import SPLITS, check_result_loads, collected, loaded_merged
from tests.support.torch_ring import Case, distance, reference_of, write_family_inputs

CONFIGS = [
    "double_seq_bn",
    "par_bn",
    "scaled_par_bn[reduction_factor=4]",
    "seq_bn[use_gating=True,ln_before=True]",
    "seq_bn[scaling='channel']",
    "seq_bn[reduction_factor={'1': 8, 'default': 4}]",
    "seq_bn[leave_out=[1,2]]",
    "lora[r=4]",
    "lora[attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True]",
    "lora[use_gating=True]",
    "ia3",
    "dora",
    "mtl_lora",
    "loreft",
    "noreft",
    "loreft[layers=[1,3],suffix_positions=2]",
    "par_bn[reduction_factor=4]|lora[r=2]",
]
AUXILIARY = [
    "linear[alpha=0.5]",
    "linear[attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True,alpha=2]",
    "mlp[hidden=8,alpha=0.5,leave_out=[1]]",
    "mlp[hidden=8,attn_matrices=['k'],intermediate_lora=True,output_lora=True,alpha=2]",
]
SOME = ["double_seq_bn", "scaled_par_bn[reduction_factor=4]", CONFIGS[8], "ia3", "loreft", CONFIGS[-1]]
LIBRARY_FAILS = [("gpt2", "dora"), ("gpt2", "mtl_lora")]
FOUR = (("c", 0, 1), ("a", 1, 2), ("d", 2, 3), ("b", 3, 4))
FAMILIES = {"bert": "sequence-classification", "gpt2": "causal-lm", "llama": "causal-lm", "vit": "image-classification"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that writes the inputs of a family once."""
    folder, written = tmp_path_factory.mktemp("inputs"), {}

    def write(model_type: str) -> Path:
        if model_type not in written:
            task = FAMILIES.get(model_type, "question-answering")
            written[model_type] = write_family_inputs(folder / model_type, model_type, task)
        return written[model_type]

    return write


def make_case(inputs: Any, model_type: str, config: str) -> Case:
    """A short run; ReFT makes float32 tensors of its own, so the library can't run it in float64."""
    dtype = "float32" if "reft" in config else "float64"
    return Case(
        folder=inputs(model_type),
        task=FAMILIES.get(model_type, "question-answering"),
        adapter=config,
        dtype=dtype,
        microbatches=2,
        num_steps=5,
        every_steps=1,
    )


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("model_type", "config"),
    [(name, config) for name in ("bert", "llama") for config in CONFIGS]
    + [(name, config) for name in ("gpt2", "vit") for config in SOME]
    + [(name, config) for name in FAMILIES for config in AUXILIARY],
)
@pytest.mark.sampled(5)
def test_adapter_in_a_ring_equals_one_process(inputs: Any, model_type: str, config: str) -> None:
    """Same initial values, same training."""
    case = make_case(inputs, model_type, config)
    trained = reference_of(case)
    got = collected(case, SPLITS["two"])
    assert distance(got, {**trained.adapter(), **trained.head()}) < (1e-6 if case.dtype == "float32" else 1e-9)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("model_type", "config", "split"),
    [("bert", config, split) for config in AUXILIARY[::2] for split in ("one", "two", "four")]
    + [(name, AUXILIARY[3], "four") for name in ("roberta", "distilbert", "mistral")]
    + [(name, AUXILIARY[1], "four") for name in ("xlm-roberta", "electra")],
)
@pytest.mark.sampled(1)
def test_auxiliary_models_with_dropout_equal_one_process(inputs: Any, model_type: str, config: str, split: str) -> None:
    """On one, two and four nodes, with alpha, micro-batches and dropout, in every family."""
    case = dataclasses.replace(make_case(inputs, model_type, config), dropout=0.2, owners=("a", "b"))
    trained = reference_of(case)
    got = collected(case, {**SPLITS, "four": FOUR}[split])
    assert distance(got, {**trained.adapter(), **trained.head()}) < 1e-9


@pytest.mark.parametrize(("model_type", "config"), list(zip(FAMILIES, AUXILIARY, strict=True)))
@pytest.mark.sampled(2)
def test_auxiliary_result_loads_into_a_plain_model(inputs: Any, tmp_path: Path, model_type: str, config: str) -> None:
    """The documented function gives the pretrained model the logits of the trained whole model."""
    check_result_loads(make_case(inputs, model_type, config), SPLITS["two"], tmp_path)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [("bert", AUXILIARY[0]), ("gpt2", AUXILIARY[1]), ("gpt2", "lora[r=4,init_weights='bert']"), ("llama", CONFIGS[8])],
)
@pytest.mark.sampled(2)
def test_merged_result_is_a_model_of_transformers(inputs: Any, tmp_path: Path, model_type: str, config: str) -> None:
    """With linear or LoRA in its weights it gives the logits of the trained whole model, and has nothing of ours."""
    check_result_loads(make_case(inputs, model_type, config), SPLITS["two"], tmp_path, load=loaded_merged)


@pytest.mark.promise("8 adapterhub folder")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.sampled(2)
def test_adapter_result_loads_with_nothing_of_ours(inputs: Any, tmp_path: Path, config: str) -> None:
    """load_adapter into the plain base model gives the logits of the trained whole model."""
    check_result_loads(make_case(inputs, "bert", config), SPLITS["two"], tmp_path)


@pytest.mark.parametrize(("model_type", "config"), LIBRARY_FAILS)
def test_adapter_that_the_library_cannot_run_is_refused(inputs: Any, model_type: str, config: str) -> None:
    """Before anything is measured or trained, with the reason."""
    case = make_case(inputs, model_type, config)
    with pytest.raises(JobError, match=f"'{config}'.*GPT2Model"):
        build_skeleton(case.folder / "model", case.job)


@pytest.mark.parametrize("name", sorted(ADAPTER_CONFIG_MAP))
def test_adapter_names_are_refused_exactly_if_their_parts_are_outside_the_blocks(
    inputs: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What planning refuses by name is what a look at the added tensors refuses; the library's names are all known."""
    try:
        parse_adapter_config(name)
        refused = ""
    except JobError as error:
        refused = str(error)
    monkeypatch.setattr(sections, "parse_adapter_config", lambda text: ())
    # compacter wants widths that its hypercomplex matrices divide
    option = "[reduction_factor=4]" if name.startswith("compacter") else ""
    case = make_case(inputs, "bert", name + option)
    if not refused:
        build_skeleton(case.folder / "model", case.job)
        return
    with pytest.raises(JobError) as caught:
        build_skeleton(case.folder / "model", case.job)
    reasons = ("outside the blocks", "shares a tensor between blocks", "loads as another method")
    assert any(reason in str(caught.value) for reason in reasons)


def test_adapter_of_a_shared_tensor_is_refused(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor that two blocks reach has no single owner, wherever it is registered."""
    from adapters import BertAdapterModel

    original = BertAdapterModel.add_adapter

    def add_adapter(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        blocks = self.bert.encoder.layer
        blocks[2].output.adapters["ringtune"] = blocks[1].output.adapters["ringtune"]

    monkeypatch.setattr(BertAdapterModel, "add_adapter", add_adapter)
    case = make_case(inputs, "bert", "seq_bn")
    with pytest.raises(JobError, match="shares a tensor between blocks"):
        build_skeleton(case.folder / "model", case.job)
