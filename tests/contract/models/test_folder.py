"""Reading a model folder: what is taken over, what is refused, and the sizes that planning gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringtune.errors import ModelError
from ringtune.models.folder import base_tensors, read_config
from tests.support.model_folder import (
    CONFIG,
    bert_shapes,
    safetensors_bytes,
    write_model,
)


def test_read_config_keeps_allowed_keys_only(tmp_path: Path) -> None:
    """Known keys come with their defaults; anything else in the file is dropped."""
    folder = write_model(tmp_path, config={"architectures": ["BertModel"], "_name_or_path": "x", "torch_dtype": "f"})
    assert read_config(folder) == {
        **CONFIG,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"auto_map": {"AutoModel": "evil--repo.Model"}}, "auto_map is refused: it names code to run"),
        ({"quantization_config": {"quant_method": "x"}}, "quantization_config is refused: it names a quantizer"),
        ({"attn_implementation": "evil/kernel"}, "attn_implementation = 'evil/kernel' is refused"),
        ({"_attn_implementation": "flash_attention_2"}, "_attn_implementation = 'flash_attention_2' is refused"),
        ({"_attn_implementation_internal": "a/b"}, "_attn_implementation_internal = 'a/b' is refused"),
        ({"is_decoder": True}, "is_decoder is refused: a decoder attends only backwards"),
        ({"add_cross_attention": True}, "add_cross_attention is refused"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is refused"),
        ({"model_type": "t5"}, "model_type 't5' is not supported yet; supported: bert, roberta, xlm-roberta, electra,"),
        ({"model_type": ["bert"]}, "model_type ['bert'] is not supported yet"),
        ({"hidden_size": "8"}, "hidden_size has to be int, but is str '8'"),
        ({"hidden_size": True}, "hidden_size has to be int, but is bool True"),
        ({"hidden_size": 0}, "hidden_size is 0, it has to be at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"hidden_size": 9}, "hidden_size 9 can't be shared by 2 heads"),
        ({"layer_norm_eps": float("inf")}, "layer_norm_eps is inf"),
        ({"hidden_dropout_prob": float("nan")}, "hidden_dropout_prob is nan"),
        ({"hidden_act": "os.system"}, "hidden_act = 'os.system' is not supported; supported: gelu,"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key' is not supported"),
    ],
)
def test_read_config_refuses(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    """A config can name code to run; what is not understood is not passed on."""
    with pytest.raises(ModelError) as caught:
        read_config(write_model(tmp_path, config=config))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("attention", ["eager", "sdpa", None])
def test_read_config_accepts_plain_attention(tmp_path: Path, attention: str | None) -> None:
    """The library's own implementations are harmless; the key is dropped all the same."""
    assert "_attn_implementation" not in read_config(write_model(tmp_path, config={"_attn_implementation": attention}))


def test_read_config_takes_a_whole_number_for_a_float(tmp_path: Path) -> None:
    """JSON writers drop the point of 0.0."""
    assert read_config(write_model(tmp_path, config={"hidden_dropout_prob": 0}))["hidden_dropout_prob"] == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has to be a table"),
        ("[" * 100_000, "is not JSON"),
        (" " * 1_000_001, "a config has 1,000,000 at most"),
    ],
)
def test_read_config_refuses_damaged_files(tmp_path: Path, text: str, message: str) -> None:
    """Whatever the bytes are, the answer is an error of the tree."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


def test_read_config_names_a_missing_folder_or_file(tmp_path: Path) -> None:
    """The two ways to get model.path wrong."""
    with pytest.raises(ModelError, match=r"does not exist; model\.path is a folder"):
        read_config(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"can't read .*config\.json: No such file"):
        read_config(tmp_path)


def test_base_tensors_drop_the_prefix_and_what_is_not_the_base(tmp_path: Path) -> None:
    """A file that was saved with a task head gives the same names as a bare one."""
    shapes = {**bert_shapes(prefix="bert."), "classifier.weight": (2, 8)}
    write_model(tmp_path, weights=safetensors_bytes(shapes))
    assert {name: info.shape for name, info in base_tensors(tmp_path, read_config(tmp_path)).items()} == bert_shapes()


def test_base_tensors_may_lack_the_pooler(tmp_path: Path) -> None:
    """The classification head does not need it."""
    write_model(tmp_path, weights=safetensors_bytes(bert_shapes(pooler=False)))
    assert "pooler.dense.weight" not in base_tensors(tmp_path, read_config(tmp_path))


def test_base_tensors_refuse_a_missing_tensor(tmp_path: Path) -> None:
    """An incomplete folder is found before anything is built."""
    shapes = bert_shapes()
    del shapes["encoder.layer.1.output.dense.bias"]
    write_model(tmp_path, weights=safetensors_bytes(shapes))
    with pytest.raises(ModelError, match=r"has no tensor 'encoder\.layer\.1\.output\.dense\.bias'"):
        base_tensors(tmp_path, read_config(tmp_path))


def test_base_tensors_refuse_another_shape(tmp_path: Path) -> None:
    """Config and weights have to belong together."""
    write_model(tmp_path, config={"vocab_size": 21})
    with pytest.raises(ModelError, match=r"shape \(20, 8\), config\.json means \(21, 8\)"):
        base_tensors(tmp_path, read_config(tmp_path))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors.index.json", "is not a readable index"),
        ("pytorch_model.bin", "pickled weights only, which are never opened"),
        ("README.md", "has no model.safetensors; give a folder that has one"),
    ],
)
def test_base_tensors_say_why_there_are_no_weights(tmp_path: Path, file: str, message: str) -> None:
    """Three kinds of folders without one safetensors file."""
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / file).write_text("")
    with pytest.raises(ModelError, match=message):
        base_tensors(tmp_path, read_config(tmp_path))
