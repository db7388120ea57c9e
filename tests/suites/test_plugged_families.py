"""Families that AdapterHub has no class for: the lines that load them, its interface, SmolLM, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.model.skeleton import build_skeleton
from ringtune.errors import JobError
from ringtune.models.folder import read_config
from tests.features.feature import Feature, carry_out, run_of
from tests.features.models import of_family, write_result
from tests.support import reference
from tests.support.tiny_families import write_family
from tests.support.torch_ring import Case, distance, reference_of, write_family_inputs

FIRST_RUN = Path(__file__).parents[2] / "docs" / "start" / "first_run.md"


def short(model_type: str, task: str, adapter: str, **values: Any) -> Feature:
    """A short run of which the parts of the result are kept."""
    arguments = of_family("plugged/short", model_type, task, adapter=adapter, num_steps=3, eval_every=0, **values)
    return Feature(**arguments, load=lambda case, folder: None)


def finished(tmp_path: Path, model_type: str, task: str, adapter: str) -> tuple[Case, Path]:
    """A short run and the folder of its result."""
    feature = short(model_type, task, adapter, dtype="float32", owners=("a",))
    return feature.case, write_result(run_of(feature, feature.split), tmp_path / "got")


def logits_of(model: Any) -> torch.Tensor:
    """Logits of two rows, one of them padded."""
    ids = torch.tensor([[2, 5, 6, 7, 8, 3], [2, 9, 10, 3, 0, 0]])
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids, attention_mask=(ids != 0).long()).logits
    return found[ids != 0] if found.dim() == 3 else found


def page_lines() -> str:
    """The lines of docs/start/first_run.md that load the result of such a model."""
    (lines,) = (
        text
        for text in re.findall(r"```python\n(.*?)```", FIRST_RUN.read_text(encoding="utf-8"), re.S)
        if "interface" in text
    )
    return str(lines)


@pytest.mark.promise("8 adapterhub folder")
@pytest.mark.parametrize(("model_type", "task"), [("qwen3", "causal-lm"), ("gemma2", "sequence-classification")])
def test_page_lines_load_the_result_of_a_plugged_family(tmp_path: Path, model_type: str, task: str) -> None:
    """Exactly those lines, and the changes that the text below them names, give the logits of the trained model."""
    case, folder = finished(tmp_path, model_type, task, "double_seq_bn|lora")
    lines = page_lines().replace("run/adapter", str(folder)).replace("models/base", str(case.folder / "model"))
    if task == "sequence-classification":
        lines = lines.replace("AutoModelForCausalLM", "AutoModelForSequenceClassification")
        lines = lines.replace('/model")', f'/model", num_labels={len(case.labels)})')
    if model_type == "gemma2":
        lines = lines.replace("num_labels=", 'attn_implementation="eager", num_labels=')
    found: dict[str, Any] = {}
    exec(lines, found)  # noqa: S102 - the page's own lines
    wanted = logits_of(reference_of(case).model)
    assert float((logits_of(found["model"]) - wanted).abs().max()) <= 1e-5
    untrained = reference.whole_model(case.job, case.plan((("a", 0, 4),)), case.folder / "model")
    assert float((logits_of(untrained) - wanted).abs().max()) > 1e-3


def test_result_of_qwen_loads_by_the_interface_that_the_library_has(tmp_path: Path) -> None:
    """``adapters.init(model)`` alone, with a bottleneck and LoRA on every matrix."""
    import adapters
    from transformers import AutoModelForCausalLM

    adapter = "seq_bn|lora[attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True]"
    case, folder = finished(tmp_path, "qwen2", "causal-lm", adapter)
    model = AutoModelForCausalLM.from_pretrained(str(case.folder / "model"))
    adapters.init(model)
    model.load_adapter(str(folder), use_safetensors=True, set_active=True)
    assert float((logits_of(model) - logits_of(reference_of(case).model)).abs().max()) <= 1e-5


def test_mixture_equals_one_process_and_loads(tmp_path: Path) -> None:
    """A model of our own beside the last matrix and a bottleneck behind it, as in Llama; both load again."""
    from transformers import AutoModelForCausalLM

    from edge.model.auxiliary import load_auxiliary

    feature = short("qwen3", "causal-lm", "seq_bn|linear[output_lora=True,alpha=0.5]", dtype="float32", owners=("a",))
    run, case, trained = run_of(feature, feature.split), feature.case, reference_of(feature.case)
    assert distance(run.tensors, trained.adapter()) < 1e-6
    folder = write_result(run, tmp_path / "got")
    model = AutoModelForCausalLM.from_pretrained(str(case.folder / "model"))
    assert float((logits_of(load_auxiliary(model, folder)) - logits_of(trained.model)).abs().max()) <= 1e-5


def test_smollm_is_a_llama(tmp_path: Path) -> None:
    """A config with the keys of SmolLM2's, tied, goes the way of Llama and equals one process."""
    folder = write_family_inputs(tmp_path / "inputs", "llama", "causal-lm")
    path = folder / "model" / "config.json"
    more = {"rope_interleaved": False, "is_llama_config": True, "rope_theta": 100000, "transformers.js_config": {}}
    written = json.loads(path.read_text())
    written.pop("rope_parameters", None)  # the form of transformers 5
    path.write_text(json.dumps({**written, **more}))
    assert read_config(folder / "model")["model_type"] == "llama"
    assert read_config(folder / "model")["rope_theta"] == 100000.0
    feature = Feature(name="plugged/smollm", folder=lambda: folder, changes={"task": "causal-lm", "eval_every": 0})
    assert distance(carry_out(feature, feature.plan_on("two")).tensors, reference_of(feature.case).adapter()) < 1e-9


@pytest.mark.parametrize(
    ("adapter", "word"),
    [
        ("mtl_lora", "Qwen3Model: its adapters"),
        ("prefix_tuning", "prefix_tuning"),
        ("seq_bn_inv", "seq_bn_inv"),
    ],
)
def test_adapters_that_the_interface_has_not_are_refused(tmp_path: Path, adapter: str, word: str) -> None:
    """By name, before anything is planned or built."""
    case = Case(folder=tmp_path, task="causal-lm", adapter=adapter)
    write_family(tmp_path / "model", "qwen3", num_blocks=2)
    with pytest.raises(JobError, match=word):
        build_skeleton(tmp_path / "model", case.job)
