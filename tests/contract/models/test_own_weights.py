"""Which weights of a block train without an adapter, and which files their result has."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtune.models.families import FAMILIES
from ringtune.models.family import Family
from ringtune.models.own_weights import own_weights
from ringtune.models.result_files import RESULT_FILES, adapter_result, block_of, model_result, result_files


def config_of(family: Family, **values: object) -> dict[str, object]:
    """The family's defaults."""
    return {
        "model_type": family.model_type,
        **{key: spec.default for key, spec in family.config_keys.items()},
        **values,
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_own_weights_leave_norms_and_shared_biases_out(name: str) -> None:
    """What is left of a block are vectors of the hidden width: norms, and the biases of both ways out."""
    family = FAMILIES[name]
    config = config_of(family)
    own, block = own_weights(family, config), family.block_shapes(config)
    left = {name: shape for name, shape in block.items() if name not in own}
    hidden = {name: shape for name, shape in left.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    assert all(shape == (family.dimensions(config).hidden,) for shape in hidden.values())
    assert all(name.endswith(("weight", "bias")) for name in own)
    matrices = {name for name, shape in block.items() if len(shape) == 2}
    assert matrices <= own.keys()


def test_own_weights_of_bert_are_ten() -> None:
    """The example of the docstring."""
    own = own_weights(FAMILIES["bert"], config_of(FAMILIES["bert"], hidden_size=384, intermediate_size=1536))
    assert len(own) == 10
    assert sum(rows * (columns[0] if columns else 1) for rows, *columns in own.values()) == 1_772_160


@pytest.mark.parametrize(
    ("name", "values", "biases"),
    [
        ("vit", {"qkv_bias": False}, {"intermediate.dense.bias"}),
        ("llama", {}, set()),
        (
            "llama",
            {"attention_bias": True, "mlp_bias": True},
            {f"{part}_proj.bias" for part in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")},
        ),
    ],
)
def test_own_weights_have_the_biases_of_the_config(name: str, values: dict[str, object], biases: set[str]) -> None:
    """Some models have no biases, or only some."""
    found = own_weights(FAMILIES[name], config_of(FAMILIES[name], **values))
    assert {name for name in found if name.endswith(".bias")} == biases


def test_result_files_of_own_weights_have_no_adapter() -> None:
    """Blocks take the place of the adapter; the head's files are there where a head trains."""
    head = {"head_config.json", "model_head.safetensors"}
    assert set(result_files("sequence-classification", "full")) == {"blocks.safetensors", *head}
    assert result_files("causal-lm", "full") == ("blocks.safetensors",)
    assert set(result_files("question-answering", "lora")) == {"adapter.safetensors", "adapter_config.json", *head}
    assert set(result_files("causal-lm", "lora")) == {"adapter.safetensors", "adapter_config.json"}
    assert set(result_files("causal-lm", "mlp[hidden=4]")) == {"adapter.safetensors", "adapter.json"}
    assert set(result_files("question-answering", "linear")) == {"adapter.safetensors", "adapter.json", *head}
    any_run = {"blocks.safetensors", "adapter.safetensors", "adapter_config.json", "adapter.json", *head}
    assert any_run == set(RESULT_FILES)


def test_result_of_full_parameters_is_a_whole_model(tmp_path: Path) -> None:
    """Config and weights have to be there; an index stands for weights in several files; a node needs weights only."""
    result = model_result()
    assert (result.folder, result.is_model, result.loaded) == ("model", True, ("model.safetensors",))
    assert result.missing_in(tmp_path) == "config.json"
    (tmp_path / "config.json").touch()
    assert result.missing_in(tmp_path) == "model.safetensors"
    (tmp_path / "model.safetensors.index.json").touch()
    assert result.missing_in(tmp_path) == ""
    adapter = adapter_result("sequence-classification", "lora")
    assert (adapter.folder, adapter.is_model, adapter.loaded) == ("adapter", False, adapter.files)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_block_of_a_tensor_is_read_from_its_name(family: Family) -> None:
    """In every family; a layer of a head is no block."""
    start = family.prefix + family.block_prefix
    assert block_of(f"{start}3.output.dense.weight") == block_of(f"{start}3.x") == 3
    assert [block_of(name) for name in (f"{start}x.w", f"{family.prefix}embeddings.1.w", "heads.ringtune.1.w")] == [
        None,
        None,
        None,
    ]
