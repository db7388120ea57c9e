"""Two files of a model folder that do not belong together are refused before anything is built, by every door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.looking.model import look_at_model
from edge.doctor.model_folder import check_model as doctor
from edge.start_checks import check_model as start
from ringtune.costs.facts.model_facts import model_facts
from ringtune.errors import ModelError
from ringtune.jobs.job import Job, Model
from ringtune.models.consistency import check_files
from ringtune.models.folder import read_config
from tests.support.model_folder import CONFIG, bert_shapes, safetensors_bytes, write_model

_ROWS = CONFIG["vocab_size"]
_JOB = Job(model=Model(path="m")).with_overrides({"train.max_length": 16})


def _words(count: int) -> dict[str, int]:
    return {f"w{index}": index for index in range(count)}


def _tokenizer(count: int = _ROWS, **more: Any) -> dict[str, Any]:
    """What ``tokenizer.json`` says of a tokenizer of words."""
    return {"model": {"type": "WordLevel", "vocab": _words(count)}, "added_tokens": [], **more}


_UNIGRAM = {"model": {"type": "Unigram", "vocab": [[f"w{index}", -1.0] for index in range(_ROWS + 1)]}}
_AROUND = {"type": "TemplateProcessing", "special_tokens": {"<s>": {"id": "<s>", "ids": [_ROWS]}}}
_PAIR = {"type": "BertProcessing", "cls": ["[CLS]", 0], "sep": ["[SEP]", _ROWS + 4]}
_ADDED = [{"id": _ROWS, "content": "[PAD]"}]
_LONG: dict[str, tuple[dict[str, Any], str]] = {
    "words": ({"tokenizer.json": _tokenizer(_ROWS + 2)}, "has 22 tokens"),
    "pieces": ({"tokenizer.json": _UNIGRAM}, "has 21 tokens"),
    "padding was added": (
        {"tokenizer.json": _tokenizer(added_tokens=_ADDED), "tokenizer_config.json": {"pad_token": "[PAD]"}},
        "has 21 tokens",
    ),
    "padding is added when it is loaded": (
        {"tokenizer.json": _tokenizer(), "special_tokens_map.json": {"pad_token": {"content": "[PAD]"}}},
        "has 21 tokens",
    ),
    "around texts": ({"tokenizer.json": _tokenizer(post_processor=_AROUND)}, "'<s>' is token 20"),
    "around texts, in a sequence": (
        {"tokenizer.json": _tokenizer(post_processor={"type": "Sequence", "processors": [_PAIR]})},
        r"'\[SEP\]' is token 24",
    ),
    "a list of lines": ({"vocab.txt": "\n".join(_words(_ROWS + 3))}, "has 23 tokens"),
    "a list of names": ({"vocab.json": _words(_ROWS + 1)}, "has 21 tokens"),
}
_FITS: dict[str, dict[str, Any]] = {
    "none": {},
    "as long": {"tokenizer.json": _tokenizer(post_processor=None), "tokenizer_config.json": {"pad_token": "w0"}},
    "shorter": {"vocab.txt": "\n".join(_words(3))},
    "a token that no text needs": {"tokenizer.json": _tokenizer(added_tokens=[{"id": _ROWS, "content": "<image>"}])},
}


def _write(folder: Path, files: dict[str, Any]) -> Path:
    write_model(folder)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("case", _LONG)
def test_tokenizer_beyond_the_embedding_is_refused_with_both_numbers(tmp_path: Path, case: str) -> None:
    """Wherever the files say that a token is used: words, padding, what is put around every text."""
    files, message = _LONG[case]
    folder = _write(tmp_path, files)
    with pytest.raises(ModelError, match=message) as caught:
        check_files(folder, read_config(folder))
    assert f"the embedding {_ROWS} rows" in str(caught.value) and "resize_token_embeddings" in str(caught.value)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("case", _FITS)
def test_tokenizer_within_the_embedding_is_taken(tmp_path: Path, case: str) -> None:
    """Also one that knows a token more, which no text has by itself, as in Gemma 3."""
    folder = _write(tmp_path, _FITS[case])
    check_files(folder, read_config(folder))


def test_every_door_holds_files_against_each_other(tmp_path: Path) -> None:
    """What ``doctor``, ``init``, a node at its start, and ``plan`` and ``train`` look at."""
    folder = _write(tmp_path, _LONG["padding was added"][0])
    said = [check.found for check in doctor(folder) if check.name == "model files"]
    for door in (start, lambda path: look_at_model(path, "m"), lambda path: model_facts(path, _JOB)):
        with pytest.raises(ModelError) as caught:
            door(folder)
        said.append(str(caught.value))
    assert len(said) == 4
    assert all("the tokenizer has 21 tokens, the embedding 20 rows" in text for text in said)


@pytest.mark.parametrize(
    ("preprocessor", "fits"),
    [
        ({"do_resize": True, "size": {"height": 8, "width": 8}}, False),
        ({"do_resize": True, "size": {"height": 12, "width": 12}}, True),
        ({"do_resize": True, "size": 8}, False),
        ({"do_resize": True, "size": {"shortest_edge": 16}, "do_center_crop": True, "crop_size": 8}, False),
        ({"do_resize": True, "size": {"shortest_edge": 16}, "do_center_crop": True, "crop_size": 12}, True),
        ({"do_resize": False, "size": 8}, True),
        ({}, True),
    ],
)
def test_pictures_of_another_size_are_refused(tmp_path: Path, preprocessor: dict[str, Any], fits: bool) -> None:
    """As far as the preprocessor says what size its pictures have."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": 12, "patch_size": 4}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    config = read_config(tmp_path)
    if fits:
        check_files(tmp_path, config)
        return
    with pytest.raises(ModelError, match=r"makes pictures of 8 x 8 pixels, config\.json has image_size 12"):
        check_files(tmp_path, config)


@pytest.mark.parametrize("name", ["classifier.weight", "classifier.out_proj.weight", "score.weight"])
@pytest.mark.parametrize("classes", [2, 3, None])
def test_classes_of_a_head_and_of_the_config_are_one_number(tmp_path: Path, name: str, classes: int | None) -> None:
    """By every door, before a node starts; a config that names no classes says nothing of a head."""
    named = {} if classes is None else {"id2label": {str(index): f"c{index}" for index in range(classes)}}
    weights = safetensors_bytes({**bert_shapes(), name: (3, 8), "classifier.dense.weight": (8, 8)})
    folder = write_model(tmp_path, config=named, weights=weights)
    for door in (start, lambda path: look_at_model(path, "m"), lambda path: model_facts(path, _JOB)):
        if classes == 2:
            with pytest.raises(
                ModelError, match=rf"{name} of model\.safetensors has 3 classes, id2label .* has 2; take"
            ):
                door(folder)
        else:
            door(folder)


def test_padding_beyond_the_table_is_refused(tmp_path: Path) -> None:
    """In every family; transformers would fail in the midst of building it."""
    with pytest.raises(ModelError, match="pad_token_id 20 is no row of a table of 20"):
        read_config(write_model(tmp_path, config={"pad_token_id": _ROWS}))
