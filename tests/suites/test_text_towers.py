"""Models of texts and pictures train as the text model inside them."""

from __future__ import annotations

import ast
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load as torch_values
from safetensors.torch import load_file, save_file

from coordinator.api.arguments import unpickled
from coordinator.api.export import export_run
from coordinator.cli.init_wizard import inspect_model
from edge.model.merge import merged_files
from ringtune.errors import JobError, ModelError, UsageError
from ringtune.job.job import load_job
from ringtune.models import text_towers
from ringtune.models.families import FAMILIES
from ringtune.models.family import CAUSAL_LM, CLASSIFICATION
from ringtune.models.folder import read_config
from ringtune.techniques.initial_adapter import initial_values
from tests.edge.model.test_peft import outputs
from tests.features.feature import ONE, THREE, Feature, Run, Wanted, carry_out, new_folder, one_process
from tests.support import whole_models as whole
from tests.support.tiny_families import VERSION
from tests.support.tiny_towers import LAYOUTS, TOWERS, write_tower
from tests.support.torch_ring import Case, distance, write_family_inputs
from tests.support.whole_models import ALL_MATRICES, lora_run

DESCRIBED = [name for name in TOWERS if not FAMILIES[text_towers.TOWERS[name].family].generic]
SPLITS = {"one": ONE, "three": THREE}


def of_texts(model: Any) -> Any:
    """The part that computes texts: in transformers 5.24 Llama 4's whole class fails at its own output."""
    return model.language_model if model.config.model_type == "llama4" else model


def require_close(model: Any, wanted: torch.Tensor) -> None:
    """The logits of all tokens of two texts, one of them padded, are these."""
    inputs = whole.inputs_of("llama")
    found, is_token = outputs(model.eval(), inputs), inputs["attention_mask"] == 1
    assert float((found - wanted)[is_token].abs().max()) <= 1e-4 * float(wanted.abs().max())


def test_every_tower_has_a_tiny_model() -> None:
    """No row without a test, but those that this transformers has not."""
    towers = text_towers.TOWERS.items()
    assert TOWERS.keys() == {name for name, tower in towers if FAMILIES[tower.family].since <= VERSION}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", TOWERS)
@pytest.mark.sampled(4)
def test_tower_with_its_adapter_is_the_whole_model_with_it(tmp_path: Path, model_type: str, layout: str) -> None:
    """Of a text: by a folder of PEFT for the whole model; the merged model is a text model of the library."""
    import peft

    plain = write_tower(tmp_path / "base", model_type, layout)
    has_experts = not FAMILIES[text_towers.TOWERS[model_type].family].layout.up
    run, skeleton = lora_run(tmp_path, "", CAUSAL_LM, "lora[r=2,alpha=6]" if has_experts else ALL_MATRICES)
    wanted = outputs(whole.as_model(skeleton), whole.inputs_of("llama"))
    assert float((outputs(of_texts(plain), whole.inputs_of("llama")) - wanted).abs().max()) > 1e-2
    export_run(run, tmp_path / "peft", base_model="acme/tiny", form="peft")
    assert 'AutoModelForImageTextToText.from_pretrained("acme/tiny"' in (tmp_path / "peft/README.md").read_text()
    loaded = peft.PeftModel.from_pretrained(plain, str(tmp_path / "peft"))
    require_close(of_texts(loaded.get_base_model()), wanted)
    (tmp_path / "merged").mkdir()
    for name, content in merged_files(load_job(run / "job.toml"), tmp_path / "base", run / "adapter", ()).items():
        (tmp_path / "merged" / name).write_bytes(bytes(content))
    merged = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"))
    assert merged.config.model_type == skeleton.layout.model_type
    require_close(merged, wanted)


def tower_and_text(model_type: str) -> tuple[Path, Path]:
    """Folders with the same rows, of a model of texts and pictures and of the text model inside."""
    folders = new_folder(), new_folder()
    family = text_towers.TOWERS[model_type].family
    for folder in folders:
        write_family_inputs(folder, family, CAUSAL_LM)
        shutil.rmtree(folder / "model")
    whole_one = write_tower(folders[0] / "model", model_type, "since")
    values = text_towers.text_values(json.loads((folders[0] / "model/config.json").read_text()), where="config.json")
    text = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[family](**values))
    prefix = text_towers.class_prefix(family)
    inside = {
        name.replace(prefix, "model.").removeprefix("language_model."): value
        for name, value in whole_one.state_dict().items()
    }
    text.load_state_dict({name: value for name, value in inside.items() if name in text.state_dict()})
    text.save_pretrained(folders[1] / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folders[0] / "model" / name, folders[1] / "model")
    return folders


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("model_type", TOWERS)
@pytest.mark.sampled(2)
def test_lora_of_a_tower_equals_one_process(model_type: str, split: str) -> None:
    """Plain transformers, adapters and autograd on the text model."""
    folder, text = tower_and_text(model_type)

    def of_text(case: Case, run: Run) -> Wanted:
        return one_process(dataclasses.replace(case, folder=text), run)

    changes = {"task": CAUSAL_LM, "adapter": "lora", "microbatches": 2, "owners": ("a", "b"), "num_steps": 4}
    feature = Feature(name=f"towers/{model_type}", changes=changes, folder=lambda: folder, splits=SPLITS)
    run = carry_out(feature, feature.plan_on(split))
    wanted = of_text(feature.case, run)
    assert distance(run.tensors, wanted.tensors) <= (
        1e-6 if model_type in ("gemma3n", "gemma4", "llama4") else 1e-9
    )  # their norms compute in float32
    assert run.losses == pytest.approx(wanted.losses, rel=1e-6)


def test_job_begins_with_a_folder_of_peft_of_the_text_part_alone(tmp_path: Path) -> None:
    """Matrices of the pictures' tower have the same ends of names; LoRA beside them is no LoRA of a block."""
    write_tower(tmp_path / "base", "gemma3")
    run, _ = lora_run(tmp_path, "", CAUSAL_LM, "lora[r=2,alpha=6]")
    export_run(run, tmp_path / "peft", form="peft")
    job = load_job(run / "job.toml").with_overrides({"adapter.from": str(tmp_path / "peft")})
    trained = load_file(run / "adapter" / "adapter.safetensors")
    begun = torch_values(bytes(initial_values(job, unpickled)))
    assert begun.keys() == trained.keys() and all(torch.equal(begun[name], trained[name]) for name in trained)
    path = tmp_path / "peft/adapter_model.safetensors"
    pictures = "base_model.model.model.vision_tower.encoder.layers.9.self_attn.q_proj.lora_A.weight"
    save_file(load_file(path) | {pictures: torch.ones(2, 16)}, path)
    with pytest.raises(JobError, match=r"vision_tower.*no LoRA of a block"):
        initial_values(job, unpickled)


def test_what_is_told_and_refused_of_a_tower(tmp_path: Path) -> None:
    """``ringtune init`` names the text part; PEFT has no class with a head for classes."""
    write_tower(tmp_path / "base", "gemma3")
    found = inspect_model(tmp_path / "base", "base")
    assert found.model_type == "gemma3_text" and CAUSAL_LM in found.tasks
    assert "the text part of a model of texts and pictures: the rest is not read" in found.as_text()
    run, _ = lora_run(tmp_path, "", CLASSIFICATION, ALL_MATRICES)
    with pytest.raises(UsageError, match="base is a model of texts and pictures, which has no head for sequence"):
        export_run(run, tmp_path / "peft", form="peft")
    export_run(run, tmp_path / "out", base_model="acme/tiny")
    card = (tmp_path / "out/README.md").read_text()
    assert 'is of the text part of "acme/tiny"' in card and "library_name: ringtune" in card


def test_card_says_how_transformers_4_loads_the_base_of_5(tmp_path: Path) -> None:
    """Its rotary positions by hand, where it knows the model; it can't, where only transformers 5 does."""
    write_tower(tmp_path / "base", "gemma3")
    run, _ = lora_run(tmp_path, "", CAUSAL_LM, "lora[r=2,alpha=6]")
    path = tmp_path / "base/config.json"
    values = json.loads(path.read_text())
    theta = {"full_attention": 5e5, "sliding_attention": 77.0}
    ropes = {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in theta.items()}}
    text = {key: value for key, value in values["text_config"].items() if not key.startswith("rope_")}
    path.write_text(json.dumps({**values, "text_config": text | ropes}))
    export_run(run, tmp_path / "peft", base_model="acme/tiny", form="peft")
    card = (tmp_path / "peft/README.md").read_text()
    moved = ast.literal_eval(card.partition("config.text_config.update(")[2].partition(")")[0])
    assert moved == {"rope_theta": 5e5, "rope_local_base_freq": 77.0}
    if VERSION == 4:
        config: Any = transformers.AutoConfig.from_pretrained(str(tmp_path / "base"))
        config.text_config.update(moved)
        assert read_config(tmp_path / "base").items() >= moved.items() <= config.text_config.to_dict().items()
    path.write_text(json.dumps({"model_type": "gemma4", "text_config": text | ropes | {"model_type": "gemma4_text"}}))
    export_run(run, tmp_path / "out", base_model="acme/tiny")
    card = (tmp_path / "out/README.md").read_text()
    assert "Transformers 4 has no `gemma4_text`: install `transformers>=5`." in card and "update(" not in card


@pytest.mark.parametrize("model_type", DESCRIBED)
def test_defaults_of_a_tower_are_those_of_its_class(tmp_path: Path, model_type: str) -> None:
    """A config that names nothing but its type."""
    tower = text_towers.TOWERS[model_type]
    values = {"model_type": next(iter(tower.aliases), tower.family)}
    text: Any = transformers.CONFIG_MAPPING[model_type](text_config=dict(values)).get_text_config()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": {}}))
    found = read_config(tmp_path)
    other = {key for key, value in found.items() if value is not None and getattr(text, key, value) != value}
    assert other <= {"model_type", "sliding_window", "pad_token_id"}


@pytest.mark.parametrize(
    "values",
    [{}, {"text_config": "x"}, {"text_config": {"model_type": "t5"}}, {"text_config": {"rope_scaling": 5}}],
)
def test_config_without_a_text_model_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    """By name."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", **values}))
    with pytest.raises(
        ModelError, match=r"text_config has to be a table|'t5' is not supported|rope_scaling has to be dict"
    ):
        read_config(tmp_path)


def test_text_part_without_a_text_model_is_refused(tmp_path: Path) -> None:
    """With the reason, and what to use."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": {}}))
    with pytest.raises(ModelError, match=r"'qwen3_vl_moe' is refused: transformers has no text model.*use a dense one"):
        read_config(tmp_path)
