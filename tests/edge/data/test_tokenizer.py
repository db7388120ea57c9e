"""Tokenizers as they were saved: by transformers 4 and 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from edge.data.tokens import load_tokenizer
from ringtune.errors import ModelError

_TEXTS = ("w1 w2", "w3 <x> w4", "", "unheard w0")


def _write(folder: Path, *, first: bool) -> Path:
    """A tokenizer of words, with or without a token before each text, as transformers 4 saves it."""
    words = {word: index for index, word in enumerate(("<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(9))))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - a word
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if first:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=["<x>"], **names).save_pretrained(folder)
    return folder


def _since_5(folder: Path, **settings: Any) -> Path:
    """The settings as transformers 5 writes them; ``tokenizer.json`` is the same."""
    path = folder / "tokenizer_config.json"
    saved = json.loads(path.read_text())
    for key in ("added_tokens_decoder", "additional_special_tokens", "add_bos_token"):
        saved.pop(key, None)
    path.write_text(json.dumps({**saved, "is_local": True, "extra_special_tokens": ["<x>"], **settings}))
    (folder / "special_tokens_map.json").unlink()
    return folder


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers"},
        {"tokenizer_class": "LlamaTokenizer", "backend": "tokenizers"},  # in transformers 4 it would add a first token
        {"tokenizer_class": "TokenizersBackend"},
        {"tokenizer_class": "GPT2Tokenizer"},
    ],
)
def test_tokenizer_of_transformers_5_is_its_own_file(tmp_path: Path, first: bool, settings: dict[str, Any]) -> None:
    """Same ids, same special tokens, whatever class the settings name."""
    old = load_tokenizer(_write(tmp_path / "old", first=first))
    new = load_tokenizer(_since_5(_write(tmp_path / "new", first=first), **settings))
    assert [new(text)["input_ids"] for text in _TEXTS] == [old(text)["input_ids"] for text in _TEXTS]
    assert new("w1")["input_ids"] == ([1, 5] if first else [5])
    assert (new.pad_token_id, new.eos_token_id, new.all_special_ids) == (0, 2, old.all_special_ids)


def test_tokenizer_of_transformers_5_without_its_file_is_refused(tmp_path: Path) -> None:
    """The version, the class and the file are named; fetching it again would give the same."""
    _since_5(_write(tmp_path, first=True), tokenizer_class="PythonBackend")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"saved by transformers 5 .*'PythonBackend'.* without tokenizer\.json"):
        load_tokenizer(tmp_path)
