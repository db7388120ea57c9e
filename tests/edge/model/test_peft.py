"""Folders of PEFT that are written: PEFT loads them as the run's model, and a run can begin from them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load, load_file
from typer.testing import CliRunner

from coordinator.api.arguments import unpickled
from coordinator.api.export import export_run
from edge.model.skeleton import Skeleton
from ringtune import cli
from ringtune.errors import UsageError
from ringtune.job.job import parse_job
from ringtune.models.adapter_config import parse_adapter_config
from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)
from ringtune.models.peft import peft_class
from ringtune.techniques.initial_adapter import initial_values
from tests.support import whole_models as whole
from tests.support.saved_runs import auxiliary_instead, users_instead, write_run
from tests.support.stock_plugged import IN_EAGER
from tests.support.tiny_data import labels_of
from tests.support.tiny_families import DECODERS, MODEL_TYPES
from tests.support.whole_models import ALL_MATRICES, lora_run

SOME = "lora[r=3,alpha=3.5,attn_matrices=['k'],leave_out=[0,2],dropout=0.1]"
FUSED = "lora[r=2,alpha=6,attn_matrices=['q','v']]"
CASES = [
    *((model_type, CLASSIFICATION, ALL_MATRICES) for model_type in MODEL_TYPES if model_type != "vit"),
    *((model_type, CAUSAL_LM, SOME) for model_type in DECODERS),
    *(("vit", IMAGE_CLASSIFICATION, config) for config in (ALL_MATRICES, SOME)),
    ("bert", TAGGING, SOME),
    ("roberta", REGRESSION, FUSED),
    ("electra", QUESTION_ANSWERING, FUSED),
    ("gpt2", TAGGING, FUSED),
    *((model_type, CLASSIFICATION, ALL_MATRICES) for model_type in ("albert", "deberta", "ernie", "mpnet")),
    ("deberta-v2", TAGGING, SOME),
    ("modernbert", QUESTION_ANSWERING, ALL_MATRICES),
    ("lfm2", CAUSAL_LM, ALL_MATRICES),
    ("qwen3_next", CAUSAL_LM, "lora[r=3,alpha=3.5,dropout=0.1]"),
    ("deepseek_v2", CAUSAL_LM, SOME),
]


def base_of(base: Path, model_type: str, task: str) -> Any:
    """The base model in the class that the card names."""
    choices: dict[str, Any] = {"attn_implementation": "eager"} if model_type in IN_EAGER else {}
    outputs = len(labels_of(task)) or (1 if task == REGRESSION else 0)
    if (loader := peft_class(model_type, task)[1]) != "AutoModel" and outputs:
        choices["num_labels"] = outputs
    return getattr(transformers, loader).from_pretrained(str(base), **choices).eval()


def outputs(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits, or the last hidden state where a model has no head."""
    with torch.no_grad():
        found = model(**inputs)
    names = ("logits", "start_logits", "last_hidden_state")
    output: torch.Tensor = next(found[name] for name in names if name in found)
    return output


def model_of(skeleton: Skeleton, task: str) -> Any:
    """The run's model; without its head where no class of transformers has it."""
    has_class = peft_class(skeleton.layout.model_type, task)[1] != "AutoModel"
    return whole.as_model(skeleton) if has_class else skeleton.base


@pytest.mark.parametrize(("model_type", "task", "config"), CASES)
def test_folder_of_peft_is_the_model_of_the_run(tmp_path: Path, model_type: str, task: str, config: str) -> None:
    """PEFT itself loads it into the class of its card, with the run's outputs; the base model has others."""
    import peft

    if model_type == "vit" and hasattr(transformers, "TokenizersBackend"):
        pytest.skip("the modules of a vision transformer have other names in transformers 5, and PEFT asks for them")
    run, skeleton = lora_run(tmp_path, model_type, task, config)
    digests = export_run(run, tmp_path / "out", base_model="acme/tiny", form="peft").sha256
    loader = peft_class(model_type, task)[1]
    assert ("model_head.safetensors" in digests) is (loader == "AutoModel")
    inputs, wanted = whole.inputs_of(model_type), outputs(model_of(skeleton, task), whole.inputs_of(model_type))
    model = base_of(tmp_path / "base", model_type, task)
    assert float((outputs(model, inputs) - wanted).abs().max()) > 1e-2
    found = outputs(peft.PeftModel.from_pretrained(model, str(tmp_path / "out")), inputs)
    assert float((found - wanted).abs().max()) <= 1e-5 * max(1.0, float(wanted.abs().max()))
    card = (tmp_path / "out/README.md").read_text()
    assert f'model = {loader}.from_pretrained("acme/tiny"' in card and "library_name: peft" in card
    described = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "acme/tiny"
    assert described["lora_dropout"] == (0.1 if "dropout" in config else 0.0)


@pytest.mark.parametrize(
    ("model_type", "config", "again"),
    [
        ("bert", ALL_MATRICES, ALL_MATRICES),
        ("qwen2", SOME, SOME),
        ("llama", ALL_MATRICES, ALL_MATRICES),
        ("electra", SOME, SOME),
        ("deberta-v2", ALL_MATRICES, ALL_MATRICES),
        ("modernbert", "lora[r=4,alpha=8,attn_matrices=['v']]", "lora[r=4,alpha=8,attn_matrices=['v']]"),
        ("gpt2", FUSED, "lora[r=4,alpha=12,attn_matrices=['q','k','v']]"),
    ],
)
def test_run_begins_from_the_folder_that_was_written(tmp_path: Path, model_type: str, config: str, again: str) -> None:
    """Every matrix changes by the same product; the same factors, unless three matrices are one; the head too."""
    run, _ = lora_run(tmp_path, model_type, CLASSIFICATION, config)
    export_run(run, tmp_path / "out", form="peft")
    text = f'[model]\npath = "{tmp_path / "base"}"\n[adapter]\nconfig = "{again}"\nfrom = "{tmp_path / "out"}"\n'
    found = load(bytes(initial_values(parse_job(text, source="test"), unpickled)))
    saved = load_file(run / "adapter/adapter.safetensors")
    head = load_file(run / "adapter/model_head.safetensors")
    assert head and found.keys() == saved.keys() | head.keys()
    assert all(torch.equal(found[name], value) for name, value in head.items())
    if config == again:
        assert all(torch.equal(found[name], value) for name, value in saved.items())
    for name in (name.removesuffix("lora_A") for name in saved if name.endswith("lora_A")):
        one, other = change_of(saved, name, config), change_of(found, name, again)
        torch.testing.assert_close(other[: len(one)] if len(one) == len(other) else other[[0, 2]], one)
        assert len(one) == len(other) or not other[1].any()


def test_run_begins_from_a_folder_with_other_matrices_in_some_blocks(tmp_path: Path) -> None:
    """LFM2 has LoRA beside its convolutions' first matrix where a block has no attention."""
    run, _ = lora_run(tmp_path, "lfm2", CAUSAL_LM, ALL_MATRICES)
    export_run(run, tmp_path / "out", base_model="acme/tiny", form="peft")
    text = f'[model]\npath = "{tmp_path / "base"}"\ntask = "causal-lm"\n[adapter]\nconfig = "{ALL_MATRICES}"\n'
    job = parse_job(f'{text}from = "{tmp_path / "out"}"\n', source="test")
    found, saved = load(bytes(initial_values(job, unpickled))), load_file(run / "adapter/adapter.safetensors")
    assert found.keys() == saved.keys() and all(torch.equal(found[name], value) for name, value in saved.items())
    export_run(run, tmp_path / "adapter", base_model="acme/tiny")
    assert "plug-in interface has no names for" in (tmp_path / "adapter/README.md").read_text()


def change_of(tensors: dict[str, torch.Tensor], name: str, config: str) -> torch.Tensor:
    """Change of each part of a matrix by AdapterHub's LoRA, shape (parts, outputs, inputs)."""
    (part,) = parse_adapter_config(config)
    down, up = tensors[f"{name}lora_A"], tensors[f"{name}lora_B"]
    parts = len(down) // up.shape[1]
    pairs = zip(up.chunk(parts), down.chunk(parts), strict=True)
    return torch.stack([part.options["alpha"] / part.options["r"] * one @ other for one, other in pairs])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("seq_bn", "it is no LoRA; leave --format peft out"),
        ("ia3", "at other places than those of PEFT's .* leave --format peft out"),
        ("dora", "its DoRA has other names and shapes than PEFT's; leave --format peft out"),
        ("lora[use_gating=True]", "its gate is none of PEFT's; leave --format peft out"),
        ("lora|linear[attn_matrices=['k']]", "has several parts, PEFT's LoRA one; write a .* with --merge"),
        ("linear", "it is no LoRA; write a merged model with --merge"),
    ],
)
def test_adapter_that_peft_does_not_hold_is_refused(tmp_path: Path, config: str, message: str) -> None:
    """Before anything is written, with what does hold it."""
    run = write_run(tmp_path / "run")
    if "linear" in config:
        auxiliary_instead(run)
    job = (run / "job.toml").read_text()
    (run / "job.toml").write_text(re.sub(r'\nconfig = ".*"', f'\nconfig = "{config}"', job))
    with pytest.raises(UsageError, match=message):
        export_run(run, tmp_path / "out", form="peft")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--format", "peft", "--merge"], "leave --merge or --format peft out"),
        (["--format", "petf"], "--format 'petf' is not known; did you mean 'peft'?"),
        (["--format", "peft"], "it is no LoRA"),
        (["--format", "gguf"], "is of the task sequence-classification, GGUF is for language models"),
        (["--format", "gguf-lora", "--merge"], "leave --merge or --format gguf-lora out"),
    ],
)
def test_command_refuses_formats_that_do_not_go_together(tmp_path: Path, typed: list[str], message: str) -> None:
    """One line with the remedy; nothing is written."""
    run = write_run(tmp_path / "run")
    shown = CliRunner().invoke(cli.app, ["export", str(run), "--out", str(tmp_path / "out"), *typed])
    assert shown.exit_code == UsageError.exit_code
    assert message in shown.stderr and not (tmp_path / "out").exists()


def test_command_writes_the_adapter_of_a_user_for_peft(tmp_path: Path) -> None:
    """Only theirs, without names and paths; the last line says how it loads."""
    run = write_run(tmp_path / "run")
    users_instead(run, "alone")
    out = tmp_path / "out"
    typed = ["export", str(run), "--out", str(out), "--format", "peft", "--user", "bob"]
    shown = CliRunner().invoke(cli.app, typed)
    assert shown.exit_code == 0, shown.output
    assert f"peft.PeftModel.from_pretrained(model, {str(out)!r})" in shown.stdout.splitlines()[-1]
    tensors = load_file(out / "adapter_model.safetensors")
    name = "base_model.model.bert.encoder.layer.1.attention.self.query.lora_B.weight"
    assert torch.equal(tensors[name], torch.full((8, 2), 2.0))
    assert not (any(word in path.read_bytes() for path in out.iterdir() for word in (b"/srv/carol", b"alice")))
