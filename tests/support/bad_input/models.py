"""Model folders: files that are missing, damaged, pointers, of another family, or that name code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.support.bad_input.case import PLAN, TRAIN, Case, Place

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 90868376\n"
CONFIG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no model_type": ({"model_type": None}, ("model_type",)),
    "another family": ({"model_type": "t5"}, ("t5",)),
    "a family that is a number": ({"model_type": 3}, ("model_type",)),
    "code": ({"auto_map": {"AutoModel": "evil.py"}}, ("auto_map",)),
    "a quantizer": ({"quantization_config": {"bits": 4}}, ("quantization_config",)),
    "another attention": ({"attn_implementation": "kernels-community/evil"}, ("attn_implementation",)),
    "hidden_size of text": ({"hidden_size": "32"}, ("hidden_size",)),
    "hidden_size of another model": ({"hidden_size": 64}, ("shape",)),
    "hidden_size 0": ({"hidden_size": 0}, ("hidden_size",)),
    "no blocks": ({"num_hidden_layers": 0}, ("num_hidden_layers",)),
    "more blocks than weights": ({"num_hidden_layers": 9}, ("config.json",)),
    "a million blocks": ({"num_hidden_layers": 1_000_000}, ("config.json", "1,000,000 blocks")),
    "heads that do not divide": ({"num_attention_heads": 5}, ("5",)),
    "negative heads": ({"num_attention_heads": -4}, ("num_attention_heads",)),
    "an unknown activation": ({"hidden_act": "evil"}, ("hidden_act",)),
    "relative positions": ({"position_embedding_type": "relative_key"}, ("position_embedding_type",)),
    "a vocabulary of another size": ({"vocab_size": 77}, ("the embedding 77 rows", "vocab_size")),
    "dropout of text": ({"hidden_dropout_prob": "x"}, ("hidden_dropout_prob",)),
}
FILES: dict[str, tuple[str, str | bytes | None, tuple[str, ...]]] = {
    "no config": ("config.json", None, ("config.json",)),
    "config that is no JSON": ("config.json", "{", ("config.json", "json")),
    "config that is a list": ("config.json", "[]", ("config.json",)),
    "an empty config": ("config.json", "", ("config.json",)),
    "a config of 2 MB": ("config.json", " " * 2_000_000, ("config.json", "bytes")),
    "a config that is a pointer": ("config.json", LFS, ("git lfs pull",)),
    "no weights": ("model.safetensors", None, ("safetensors",)),
    "weights that are a pointer": ("model.safetensors", LFS, ("git lfs pull",)),
    "empty weights": ("model.safetensors", b"", ("model.safetensors",)),
    "weights of zeros": ("model.safetensors", bytes(100), ("model.safetensors",)),
    "a header that is too long": ("model.safetensors", b"\xff" * 16, ("model.safetensors",)),
    "weights that are text": ("model.safetensors", "not weights at all", ("model.safetensors",)),
    "weights that are a pickle": ("model.safetensors", b"\x80\x04\x95" + bytes(40), ("model.safetensors",)),
}
INTEGRITY = (
    "empty weights",
    "weights of zeros",
    "a header that is too long",
    "weights that are text",
    "weights that are a pickle",
)
TOKENIZER: dict[str, tuple[tuple[str, ...], str, str | None, tuple[str, ...]]] = {
    "no tokenizer": (("tokenizer.json", "vocab.txt", "tokenizer_config.json"), "", None, ("tokenizer",)),
    "a tokenizer that is a pointer": (("tokenizer.json",), "tokenizer.json", LFS, ("git lfs pull",)),
    "a tokenizer that is no JSON": (("tokenizer.json",), "tokenizer.json", "{", ("tokenizer",)),
    "a tokenizer that names code": (
        ("tokenizer_config.json",),
        "tokenizer_config.json",
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.py", None]}, "tokenizer_class": "Evil"}),
        ("auto_map",),
    ),
}


def cases() -> list[Case]:
    """All of them."""
    found = [
        Case(name=f"config: {name}", arguments=PLAN, code=5, says=says, prepare=_config(changes))
        for name, (changes, says) in CONFIG.items()
    ]
    found += [
        Case(
            name=f"model: {name}",
            arguments=PLAN,
            code=7 if name in INTEGRITY else 5,
            says=says,
            prepare=_file(file, content),
        )
        for name, (file, content, says) in FILES.items()
    ]
    found += [
        Case(
            name=f"model: {name}",
            arguments=TRAIN,
            code=5,
            says=says,
            prepare=_files(gone, file, content),
            leaves=("out",),
        )
        for name, (gone, file, content, says) in TOKENIZER.items()
    ]
    found.append(Case(name="model: cut short", arguments=PLAN, code=7, says=("model.safetensors",), prepare=_cut))
    found.append(
        Case(name="model: half of a rename", arguments=PLAN, code=5, says=("safetensors",), prepare=_only_pickle)
    )
    return found


def _config(changes: dict[str, Any]) -> Callable[[Place], None]:
    def prepare(place: Place) -> None:
        path = place.own_model() / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) | changes
        place.write("model/config.json", json.dumps({key: value for key, value in config.items() if value is not None}))

    return prepare


def _file(file: str, content: str | bytes | None) -> Callable[[Place], None]:
    return _files((file,), file, content)


def _files(gone: tuple[str, ...], file: str, content: str | bytes | None) -> Callable[[Place], None]:
    def prepare(place: Place) -> None:
        model = place.own_model()
        for name in gone:
            (model / name).unlink(missing_ok=True)
        if content is not None:
            place.write(f"model/{file}", content)

    return prepare


def _cut(place: Place) -> None:
    path = place.own_model() / "model.safetensors"
    place.write("model/model.safetensors", path.read_bytes()[:-1000])


def _only_pickle(place: Place) -> None:
    model = place.own_model()
    (model / "model.safetensors").unlink()
    place.write("model/pytorch_model.bin", b"\x80\x04\x95" + bytes(40))
