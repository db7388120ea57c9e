"""Tests of ``ringtune.models.folder``: folder, consistency, hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.init_wizard import inspect_model
from edge.doctor import check_model as doctor
from edge.options import check_model as start
from ringtune.costs.model_facts import model_facts
from ringtune.errors import ModelError
from ringtune.job.job import Job, Model
from ringtune.models.folder import (
    HubId,
    base_tensors,
    cached_folder,
    check_files,
    hub_id,
    id_of_folder,
    name_of_folder,
    read_config,
)
from tests.support.cases import cases
from tests.support.model_folder import CONFIG, bert_shapes, safetensors_bytes, write_any_family, write_model


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


@cases(
    ("config", "message"),
    [
        ({"auto_map": {"AutoModel": "evil--repo.Model"}}, "auto_map is refused: it names code to run"),
        ({"quantization_config": {"quant_method": "x"}}, "quantization_config is refused: it names a quantizer"),
        (
            {"quantization_config": {"load_in_8bit": True}},
            "to load (of no known kind in 8 bits); give the plain weights",
        ),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "(bitsandbytes in 8 bits)"),
        ({"quantization_config": "gptq"}, "it names a quantizer to load (of no known kind)"),
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
        ({"pad_token_id": CONFIG["vocab_size"]}, "pad_token_id 20 is no row of a table of 20"),
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


MISTRAL = {"model_type": "mistral", "num_key_value_heads": 2}


@cases(
    ("config", "key", "value"),
    [
        # the library's own implementations are harmless; the key is dropped all the same
        *(({"_attn_implementation": attention}, "_attn_implementation", None) for attention in ("eager", "sdpa", None)),
        ({"hidden_dropout_prob": 0}, "hidden_dropout_prob", 0.0),  # JSON writers drop the point of 0.0
        # Mistral without a window is not Mistral with the default one
        (MISTRAL | {"sliding_window": None}, "sliding_window", None),
        (MISTRAL | {"sliding_window": 7}, "sliding_window", 7),
        (MISTRAL, "sliding_window", 4096),
    ],
)
def test_read_config_reads_a_value_as_it_is_meant(
    tmp_path: Path, config: dict[str, Any], key: str, value: object
) -> None:
    """A key that may be null has its default only where it is absent."""
    assert read_config(write_model(tmp_path, config=config)).get(key) == value


@cases(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        (
            '{"model_type": "bert", "rope_scaling": {"factor": 1' + 400 * "0" + "}}",
            "0... is a number beyond 64 bits; fetch",
        ),
        ('{"model_type": "phi", "hidden_size": -9223372036854775809}', "is a number beyond 64 bits; fetch"),
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
    with pytest.raises(ModelError, match=r"does not exist; model.path \(or --model\) is a folder"):
        read_config(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"can't read .*config\.json: No such file"):
        read_config(tmp_path)


def _old_names() -> dict[str, tuple[int, ...]]:
    """The names of the first BERT files."""
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    shapes = bert_shapes(prefix="bert.")
    return {next((name.replace(*end) for end in ends.items() if end[0] in name), name): shapes[name] for name in shapes}


_BUFFERS = {"embeddings.position_ids": (1, 32), "encoder.layer.0.attn.bias": (8, 8), "cls.dense.weight": (8, 8)}


@cases(
    ("stored", "wanted"),
    [
        ({**bert_shapes(prefix="bert."), "classifier.weight": (2, 8)}, bert_shapes()),  # saved with a task head
        ({**_BUFFERS, **bert_shapes()}, bert_shapes()),
        (bert_shapes(pooler=False), bert_shapes(pooler=False)),  # the classification head does not need it
        (_old_names(), bert_shapes()),
    ],
)
def test_base_tensors_are_the_weights_of_the_base_model(
    tmp_path: Path, stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> None:
    """Without the prefix, buffers and heads of a file, under the names of today."""
    write_model(tmp_path, weights=safetensors_bytes(stored))
    assert {name: info.shape for name, info in base_tensors(tmp_path, read_config(tmp_path)).items()} == wanted


@pytest.mark.parametrize(("last", "differ"), [(0, False), (1, True)])
def test_base_tensors_of_one_name_are_equal(tmp_path: Path, last: int, differ: bool) -> None:
    """With and without the prefix of the model: nodes that have the files and nodes that fetch would take either."""
    name = "encoder.layer.1.output.dense.weight"
    content = bytearray(safetensors_bytes(bert_shapes() | {f"bert.{name}": bert_shapes()[name]}))
    content[-1] = last
    write_model(tmp_path, weights=bytes(content))
    if not differ:
        assert name in base_tensors(tmp_path, read_config(tmp_path))
        return
    with pytest.raises(ModelError, match=f"two tensors '{name}' that differ, one of them as '{name}'; save the model"):
        base_tensors(tmp_path, read_config(tmp_path))


@cases(
    ("config", "changes", "message"),
    [
        ({}, {"encoder.layer.1.output.dense.bias": None}, r"has no tensor 'encoder\.layer\.1\.output\.dense\.bias'"),
        ({}, {"encoder.layer.2.own.weight": (8, 8)}, r"has no tensor 'encoder\.layer\.0\.own\.weight'"),  # of one block
        ({"vocab_size": 21}, {}, r"shape \(20, 8\), config\.json means \(21, 8\)"),
        (
            {},
            {"encoder.layer.2.attention.output.dense.weight": (8, 4)},  # no key decides it, but blocks are alike
            r"layer\.2\.attention\.output\.dense\.weight' has shape \(8, 4\), config.json means \(8, 8\)",
        ),
    ],
)
def test_base_tensors_that_config_json_does_not_mean_are_refused(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """Config and weights have to belong together; an incomplete folder is found before anything is built."""
    shapes = {name: shape for name, shape in (bert_shapes() | changes).items() if shape is not None}
    write_model(tmp_path, config=config, weights=safetensors_bytes(shapes))
    with pytest.raises(ModelError, match=message):
        base_tensors(tmp_path, read_config(tmp_path))


@cases(
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
    "a word in place of a number": {"tokenizer.json": {"model": {"vocab": {"a": "x"}}}},
    "a number without end": {"tokenizer.json": _tokenizer(added_tokens=[{"id": 1e999, "content": "x"}])},
    "a token that no text needs": {"tokenizer.json": _tokenizer(added_tokens=[{"id": _ROWS, "content": "<image>"}])},
}


def _write(folder: Path, files: dict[str, Any]) -> Path:
    write_model(folder)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@cases("case", _LONG)
def test_tokenizer_beyond_the_embedding_is_refused_with_both_numbers(tmp_path: Path, case: str) -> None:
    """Wherever the files say that a token is used: words, padding, what is put around every text."""
    files, message = _LONG[case]
    folder = _write(tmp_path, files)
    with pytest.raises(ModelError, match=message) as caught:
        check_files(folder, read_config(folder))
    assert f"the embedding {_ROWS} rows" in str(caught.value) and "resize_token_embeddings" in str(caught.value)
    assert caught.value.exit_code == 5


@cases("case", _FITS)
def test_tokenizer_within_the_embedding_is_taken(tmp_path: Path, case: str) -> None:
    """Also one that knows a token more, which no text has by itself, as in Gemma 3; a damaged file is told later."""
    folder = _write(tmp_path, _FITS[case])
    check_files(folder, read_config(folder))


def test_pipe_in_place_of_a_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for a writer for ever, in ``plan`` and at every node."""
    path = write_model(tmp_path) / "tokenizer.json"
    os.mkfifo(path)
    is_pipe, opened = Path.is_fifo, Path.open

    def watched(self: Path, *given: Any, **more: Any) -> Any:
        return pytest.fail("a pipe is opened") if is_pipe(self) else opened(self, *given, **more)

    monkeypatch.setattr(Path, "open", watched)
    check_files(tmp_path, read_config(tmp_path))


def test_pictures_of_absurdly_many_channels_are_refused(tmp_path: Path) -> None:
    """Before a mean and a deviation are made for each: ``num_channels`` of a config was enough to fill a memory."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "num_channels": 5000}))
    with pytest.raises(ModelError, match="pictures of 5,000 channels are not read; the most are 4,096"):
        check_files(tmp_path, read_config(tmp_path))


_VIT = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4}
_PICTURES: dict[str, tuple[str, str]] = {
    "key": ('{"crop_pct": 0.875}', "preprocessor_config.json: crop_pct = 0.875 is not carried out; prepare"),
    "class": ('{"image_processor_type": "SiglipImageProcessor"}', "'SiglipImageProcessor' is not built"),
    "channels": ('{"image_mean": [0.5]}', "image_mean has to be 3 numbers"),
    "damaged": ("{", "preprocessor_config.json is not readable"),
}
"""Case -> ``preprocessor_config.json`` and what is said of it."""


def words_of_doors(folder: Path, job: Job) -> list[str]:
    """What ``doctor``, ``init``, a node at its start, and ``plan`` and ``train`` say of a folder that they refuse."""
    said = [check.found for check in doctor(folder) if check.name == "model files"]
    for door in (start, lambda path: inspect_model(path, "m"), lambda path: model_facts(path, job)):
        with pytest.raises(ModelError) as caught:
            door(folder)
        said.append(str(caught.value))
    return said


@cases("case", _PICTURES)
def test_every_door_refuses_the_same_steps_of_pictures(tmp_path: Path, case: str) -> None:
    """A key that is not carried out is found before rows are; without it the folder is taken."""
    text, message = _PICTURES[case]
    folder = write_any_family(tmp_path, {**_VIT, "patch_size": 2})
    start(folder)
    (folder / "preprocessor_config.json").write_text(text)
    said = words_of_doors(folder, Job(model=Model(path="m", task="image-classification")))
    assert len(said) == 4 and all(said[0] in line and message in line for line in said)


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tokens": (_LONG["padding was added"][0], "the tokenizer has 21 tokens, the embedding 20 rows"),
    "key": ({"tokenizer_config.json": {"drop_blanks": True}}, "tokenizer_config.json: drop_blanks: not known, and may"),
    "code": ({"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["a.b"]}}}, "auto_map is refused"),
    "file": ({"tokenizer_config.json": {"vocab_file": "/x"}}, "vocab_file = '/x' is refused: it names a file"),
    "pointer": ({"vocab.txt": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"}, "a pointer of Git LFS"),
    "damaged": ({"tokenizer_config.json": "{"}, "tokenizer_config.json is not JSON that can be read"),
    "version": ({"tokenizer_config.json": {"backend": "tokenizers"}}, "without tokenizer.json, which is what is read"),
}
"""Case -> files of a model folder and what is said of it."""


@cases("case", _REFUSED)
def test_every_door_refuses_the_same_folder_with_the_same_words(tmp_path: Path, case: str) -> None:
    """Before rows or a tokenizer are loaded."""
    files, message = _REFUSED[case]
    said = words_of_doors(_write(tmp_path, files), _JOB)
    assert len(said) == 4
    assert all(said[0] in text and message in text for text in said)


@cases(
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


@cases("name", ["classifier.weight", "classifier.out_proj.weight", "score.weight"])
@cases("classes", [2, 3, None])
def test_classes_of_a_head_and_of_the_config_are_one_number(tmp_path: Path, name: str, classes: int | None) -> None:
    """By every door, before a node starts; a config that names no classes says nothing of a head."""
    named = {} if classes is None else {"id2label": {str(index): f"c{index}" for index in range(classes)}}
    weights = safetensors_bytes({**bert_shapes(), name: (3, 8), "classifier.dense.weight": (8, 8)})
    folder = write_model(tmp_path, config=named, weights=weights)
    for door in (start, lambda path: inspect_model(path, "m"), lambda path: model_facts(path, _JOB)):
        if classes == 2:
            with pytest.raises(
                ModelError, match=rf"{name} of model\.safetensors has 3 classes, id2label .* has 2; take"
            ):
                door(folder)
        else:
            door(folder)
    told = [check.found for check in doctor(folder) if check.name == "model classifier"]
    assert told == ["3 classes; a run trains a new one for its rows"]


COMMIT, OTHER = "0123456789" * 4, "ab" * 20
MINI = HubId("acme", "mini-v2")


def write_cache(cache: Path, *, commit: str = COMMIT, revision: str = "main") -> Path:
    """Write a cache that has a small model; return the folder of its snapshot."""
    place = cache / "models--acme--mini-v2"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / revision).write_text(commit)
    return write_model(place / "snapshots" / commit)


@cases(
    ("text", "found"),
    [
        ("acme/mini-v2", MINI),
        ("acme/mini-v2@main", MINI),
        ("acme/mini-v2@v1.0", HubId("acme", "mini-v2", "v1.0")),
        (f"acme/mini-v2@{COMMIT}", HubId("acme", "mini-v2", COMMIT)),
        ("mini-v2", None),
        ("./models/tiny", None),
        ("/srv/models", None),
        ("a/b/c", None),
        ("../x/y", None),
        ("a/..b", None),
        ("a/b..c", None),
        ("a/b@../../etc", None),
        ("a/b@", None),
        ("~/models", None),
    ],
)
def test_hub_id_is_told_from_a_path(text: str, found: HubId | None) -> None:
    """One slash, no dots that climb; a revision stands behind an @."""
    assert hub_id(text) == found


def test_hub_cache_gives_the_snapshot_that_a_revision_names(tmp_path: Path) -> None:
    """A branch by its file, a commit by itself."""
    first, second = write_cache(tmp_path), write_cache(tmp_path, commit=OTHER, revision="v1")
    assert cached_folder(MINI, tmp_path) == first
    assert cached_folder(MINI._replace(revision="v1"), tmp_path) == second
    assert cached_folder(MINI._replace(revision=OTHER), tmp_path) == second
    assert cached_folder(MINI._replace(revision="v2"), tmp_path) is None
    assert cached_folder(MINI._replace(name="other"), tmp_path) is None


@cases("lost", ["config.json", "model.safetensors", "refs"])
def test_hub_cache_lacks_a_model_that_is_not_whole(lost: str, tmp_path: Path) -> None:
    """Other files alone, as pickled weights, are no model; a reference that is no commit names nothing."""
    folder = write_cache(tmp_path)
    if lost == "refs":
        (tmp_path / "models--acme--mini-v2/refs/main").write_text("../../../outside")
    else:
        (folder / lost).rename(folder / "pytorch_model.bin")
    assert cached_folder(MINI, tmp_path) is None


def test_hub_name_of_a_snapshot_is_the_models(tmp_path: Path) -> None:
    """Not its commit; another folder is called what it is called."""
    folder = write_cache(tmp_path)
    assert (id_of_folder(folder), name_of_folder(folder)) == ("acme/mini-v2", "mini-v2")
    assert (id_of_folder(tmp_path / "tiny"), name_of_folder(Path("/snapshots/tiny"))) == ("tiny", "tiny")
