"""What full-parameter training leaves is an ordinary folder of transformers, with every parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from edge.model.result import load_saved, model_tensors, result_files
from ringtune.errors import DivergedError, IntegrityError, ModelError
from ringtune.models.architecture_heads import architecture_head
from ringtune.models.families import FAMILIES
from ringtune.models.family import CAUSAL_LM
from ringtune.models.tokenizer import chat_templates
from tests.support import whole_models as whole
from tests.support.stock_plugged import IN_EAGER, is_plugged
from tests.support.tiny_families import MODEL_TYPES, write_family

CASES = [(model_type, task, "tied") for model_type in MODEL_TYPES for task in FAMILIES[model_type].tasks]
CASES += [(model_type, CAUSAL_LM, "untied") for model_type in MODEL_TYPES if CAUSAL_LM in FAMILIES[model_type].tasks]


def write_base(folder: Path, model_type: str, task: str, ties: str = "tied") -> Path:
    """A tiny base model as such a checkpoint comes."""
    more: dict[str, Any] = {"tie_word_embeddings": ties == "tied"} if task == CAUSAL_LM else {}
    return write_family(folder / "secret-place" / "base", model_type, with_decoder=task == CAUSAL_LM, **more)


def outputs(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits; of a question the start's and the end's."""
    with torch.no_grad():
        found = model.eval()(**inputs)
    both = [found[name] for name in ("logits", "start_logits", "end_logits") if name in found]
    return torch.stack(both)


def problems(info: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Tensors that a model lacks in the file, and those of another shape."""
    return list(info["missing_keys"]), list(info["mismatched_keys"])


@pytest.mark.promise("8 adapterhub folder")
@pytest.mark.parametrize(("model_type", "task", "ties"), CASES)
@pytest.mark.sampled(2)
def test_whole_model_loads_with_nothing_of_ours(tmp_path: Path, model_type: str, task: str, ties: str) -> None:
    """AutoModel lacks nothing; AutoAdapterModel gives the ring's logits, as does the architecture's own class."""
    import transformers
    from adapters import AutoAdapterModel

    base = write_base(tmp_path, model_type, task, ties)
    folder = whole.write_result(whole.parts(base, task), tmp_path / "model")
    inputs, wanted_model = whole.inputs_of(model_type), whole.whole(base, task)
    wanted = outputs(wanted_model, inputs)
    if model_type != "gemma3_text":  # AutoModel finds no tensor in a Gemma 3 with a head, whoever saved it
        _, info = transformers.AutoModel.from_pretrained(str(folder), output_loading_info=True)
        assert problems(info) == ([], [])
    untrained = whole.whole(base, task, trained=False)
    assert float((outputs(untrained, inputs) - wanted).abs().max()) > 1e-3
    form = architecture_head(model_type, task)
    if not is_plugged(model_type):
        with_head = AutoAdapterModel.from_pretrained(str(folder))
        assert float((outputs(with_head, inputs) - wanted).abs().max()) <= 1e-5
    if form is not None:
        choice = {"attn_implementation": "eager"} if model_type in IN_EAGER else {}
        load = getattr(transformers, form.architecture).from_pretrained
        plain, info = load(str(folder), output_loading_info=True, **choice)
        assert problems(info) == ([], [])
        assert float((outputs(plain, inputs) - wanted).abs().max()) <= 1e-5
    if labels := wanted_model.get_labels():
        found = list(plain.config.id2label.values()) if is_plugged(model_type) else with_head.get_labels()
        assert found == labels


def test_whole_model_has_no_path_of_this_machine(tmp_path: Path) -> None:
    """Neither config nor tokenizer says where the base model was; keys that would run code are gone."""
    base = write_base(tmp_path, "bert", "sequence-classification")
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((base / name).read_text())
        local = {"_name_or_path": str(base), "name_or_path": str(base), "special_tokens_map_file": str(base / "x.json")}
        code = {"auto_map": {"AutoTokenizer": "code.Words"}} if name == "tokenizer_config.json" else {}
        (base / name).write_text(json.dumps({**values, **local, **code}))
    (base / "additional_chat_templates").mkdir()
    for name, text in (("chat_template.jinja", "{{ 1 }}"), ("additional_chat_templates/rag.jinja", "{{ 2 }}")):
        (base / name).write_text(text)
    folder = whole.write_result(whole.parts(base, "sequence-classification"), tmp_path / "model")
    assert chat_templates(folder) == chat_templates(base) == {"default": "{{ 1 }}", "rag": "{{ 2 }}"}
    for path in folder.iterdir():
        assert b"secret-place" not in path.read_bytes(), path.name
        assert b"auto_map" not in path.read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["dtype"] == "float32"
    assert {"model.safetensors", "tokenizer.json", "vocab.txt"} <= {path.name for path in folder.iterdir()}

    (base / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json is not JSON that can be read"):
        whole.write_result(whole.parts(base, "sequence-classification"), tmp_path / "other")


def test_whole_model_of_two_files_has_an_index(tmp_path: Path) -> None:
    """Weights that are too large for one file are in several, each tensor once, and load all the same."""
    import transformers

    base = write_base(tmp_path, "llama", CAUSAL_LM)
    one = whole.write_result(whole.parts(base, CAUSAL_LM), tmp_path / "one")
    many = whole.write_result(whole.parts(base, CAUSAL_LM), tmp_path / "many", shard_bytes=20_000)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert not (many / "model.safetensors").exists()
    found: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = load_file(many / file)
        assert not tensors.keys() & found.keys()
        assert {index["weight_map"][name] for name in tensors} == {file}
        found |= tensors
    wanted = load_file(one / "model.safetensors")
    assert found.keys() == wanted.keys() == index["weight_map"].keys()
    assert all(bool(torch.equal(found[name], wanted[name])) for name in wanted)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(str(many), output_loading_info=True)
    assert problems(info) == ([], [])


def test_whole_model_has_a_tied_tensor_once(tmp_path: Path) -> None:
    """The decoder of a tied language model is the token table, so it is in no part; an untied one is in the owner's."""
    for ties, names in (("tied", set()), ("untied", {"lm_head.weight"})):
        base = write_base(tmp_path / ties, "gpt2", CAUSAL_LM, ties)
        skeleton = whole.hosted(base, CAUSAL_LM, (), is_owner=True)
        found = model_tensors(skeleton, CAUSAL_LM, without_blocks=(), with_owner=True)
        around = {f"transformer.{name}" for name in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")}
        assert found.keys() == around | names


@pytest.mark.parametrize(("model_type", "task"), [("bert", "sequence-classification"), ("llama", CAUSAL_LM)])
def test_whole_model_comes_back_into_slices(tmp_path: Path, model_type: str, task: str) -> None:
    """Nodes with another split, and initial values, have every trained number after they loaded the folder."""
    base = write_base(tmp_path, model_type, task)
    folder = whole.write_result(whole.parts(base, task, dtype="float64"), tmp_path / "model")
    saved = load_file(folder / "model.safetensors")
    for blocks, is_owner in ((range(1), True), (range(1, 4), False)):
        skeleton = whole.hosted(base, task, blocks, is_owner=is_owner, trained=False, dtype="float64")
        load_saved(skeleton, task, folder, with_head=is_owner)
        found = model_tensors(skeleton, task, without_blocks=(), with_owner=is_owner)
        assert found
        assert all(bool(torch.equal(value, saved[name])) for name, value in found.items())


def test_whole_model_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    """A file of another model, or a part of another node, is named with what it lacks."""
    base = write_base(tmp_path, "bert", "sequence-classification")
    low = whole.parts(base, "sequence-classification")["a"]["model.safetensors"]
    (tmp_path / "model.safetensors").write_bytes(bytes(low))
    skeleton = whole.hosted(base, "sequence-classification", range(1, 3), is_owner=False)
    with pytest.raises(IntegrityError, match=r"model\.safetensors lacks bert\.encoder\.layer\.2"):
        load_saved(skeleton, "sequence-classification", tmp_path, with_head=False)


def test_whole_model_that_diverged_is_not_saved(tmp_path: Path) -> None:
    """A number that is not finite is named, and no file is made."""
    base = write_base(tmp_path, "gpt2", CAUSAL_LM)
    skeleton = whole.hosted(base, CAUSAL_LM, range(2), is_owner=False)
    with torch.no_grad():
        skeleton.blocks[1].get_parameter("ln_1.weight")[0] = torch.nan
    with pytest.raises(DivergedError, match=r"transformer\.h\.1\.ln_1\.weight of the model is not finite"):
        result_files(skeleton, CAUSAL_LM, base, without_blocks=(), with_head=False)
