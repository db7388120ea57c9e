"""Tokenizers as they were saved, by transformers 4 and 5, and every key of their settings."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertTokenizer, BertTokenizerFast, GPT2Tokenizer, GPT2TokenizerFast, PreTrainedTokenizerFast

from edge.data.tokens import DOES, Encoder, Text, load_tokenizer
from ringtune.errors import DataError, ModelError
from ringtune.models.tokenizer import CARRIED_OUT, COMPARED, NO_NUMBER, ONLY_SLOW

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
    (folder / "special_tokens_map.json").unlink(missing_ok=True)  # of transformers 4
    return folder


def test_tokenizer_of_transformers_5_is_its_own_file(tmp_path: Path) -> None:
    """Same ids, same special tokens, whatever class the settings name."""
    classes = (
        {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers"},
        {"tokenizer_class": "LlamaTokenizer", "backend": "tokenizers"},  # in transformers 4 it would add a first token
        {"tokenizer_class": "TokenizersBackend"},
        {"tokenizer_class": "GPT2Tokenizer"},
    )
    for first, (number, settings) in itertools.product((True, False), enumerate(classes)):
        old = load_tokenizer(_write(tmp_path / f"old-{first}", first=first))
        new = load_tokenizer(_since_5(_write(tmp_path / f"new-{first}-{number}", first=first), **settings))
        assert [new(text)["input_ids"] for text in _TEXTS] == [old(text)["input_ids"] for text in _TEXTS], settings
        assert new("w1")["input_ids"] == ([1, 5] if first else [5])
        assert (new.pad_token_id, new.eos_token_id, new.all_special_ids) == (0, 2, old.all_special_ids)


def test_tokenizer_of_transformers_5_without_its_file_is_refused(tmp_path: Path) -> None:
    """The version, the class and the file are named; fetching it again would give the same."""
    _since_5(_write(tmp_path, first=True), tokenizer_class="PythonBackend")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"saved by transformers 5 .*'PythonBackend'.* without tokenizer\.json"):
        load_tokenizer(tmp_path)


_IS_5 = hasattr(transformers, "TokenizersBackend")
"""Whether no tokenizer is written in Python: there a key that ``tokenizer.json`` does not carry out is refused."""


def _require_dropped(folder: Path, key: str) -> None:
    with pytest.raises(ModelError, match=f"{key} = .* is not what the tokenizer does"):
        load_tokenizer(folder)


_SENTENCE = "a A \u00e9 b\u4e2d [MASK] b [MASK]"
_BERT = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "A",
    "b",
    "e",
    "\u00e9",
    "\u4e2d",
    "##\u4e2d",
    "[",
    "]",
    "MASK",
    "mask",
)


def _bert(folder: Path, **settings: Any) -> Path:
    """A tokenizer of BERT, with further settings in its file."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(_BERT) + "\n", encoding="utf-8")
    return _set(_saved(BertTokenizerFast, folder), **settings)


def _gpt2(folder: Path, **settings: Any) -> Path:
    """A tokenizer of GPT-2, with further settings in its file."""
    folder.mkdir(exist_ok=True)
    words = ("<|endoftext|>", "a", "\u0120", "\u0120a", "b")
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n\u0120 a\n", encoding="utf-8")
    return _set(_saved(GPT2TokenizerFast, folder), **settings)


def _saved(kind: Any, folder: Path) -> Path:
    """A tokenizer as its class makes it of a vocabulary."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    kind.from_pretrained(str(folder)).save_pretrained(folder)
    return folder


def _set(folder: Path, **settings: Any) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize("key", ["do_lower_case", "strip_accents", "tokenize_chinese_chars"])
def test_a_key_of_a_tokenizer_is_carried_out_as_by_the_slow_one(tmp_path: Path, key: str) -> None:
    """Each alone: ids of the tokenizer of transformers that is written in Python, and other ones than before."""
    before = load_tokenizer(_bert(tmp_path))(_SENTENCE)["input_ids"]
    if _IS_5:
        _require_dropped(_set(tmp_path, **{key: False}), key)
        return
    slow = BertTokenizer.from_pretrained(str(_set(tmp_path, **{key: False})))
    found = load_tokenizer(tmp_path)(_SENTENCE)["input_ids"]
    assert found == slow(_SENTENCE)["input_ids"]
    assert found != before


def test_a_blank_before_a_text_is_added_as_by_the_slow_tokenizer(tmp_path: Path) -> None:
    """Of GPT-2: its first word is one inside a text."""
    before = load_tokenizer(_gpt2(tmp_path))("a a")["input_ids"]
    if _IS_5:
        _require_dropped(_set(tmp_path, add_prefix_space=True), "add_prefix_space")
        return
    slow = GPT2Tokenizer.from_pretrained(str(_set(tmp_path, add_prefix_space=True)))
    assert load_tokenizer(tmp_path)("a a")["input_ids"] == slow("a a")["input_ids"] == [3, 3]
    assert before == [1, 3]


def test_rows_are_cut_on_the_side_of_the_settings(tmp_path: Path) -> None:
    """And have token types only where the settings name them."""
    kept = {"right": ["[CLS]", "a", "a", "[SEP]"], "left": ["[CLS]", "mask", "]", "[SEP]"]}
    for side, tokens in kept.items():
        folder = _bert(tmp_path / side, truncation_side=side, model_input_names=["input_ids"])
        tokenizer = load_tokenizer(folder)
        row = Encoder(tokenizer, ["a a b [ mask ]"], 4)[0]
        assert tokenizer.convert_ids_to_tokens(list(row.ids)) == tokens
        assert "token_type_ids" not in tokenizer("a")


def test_special_tokens_have_the_names_of_the_settings(tmp_path: Path) -> None:
    """Each alone, also one that the vocabulary has not; or they are divided like other texts."""
    for key in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        folder = _bert(tmp_path, **{key: "b"})
        (folder / "special_tokens_map.json").unlink(missing_ok=True)  # it would have the last word
        assert load_tokenizer(folder).convert_tokens_to_ids("b") == getattr(load_tokenizer(folder), f"{key}_id")
    extra = {"additional_special_tokens": ["<x>"]}, {"extra_special_tokens": {"x_token": "<x>"}}
    for settings in extra:
        assert load_tokenizer(_bert(tmp_path, **settings))("<x>")["input_ids"][1:-1] == [len(_BERT)]
    added = json.loads((_bert(tmp_path) / "tokenizer_config.json").read_text()).get("added_tokens_decoder", {})
    added |= {str(len(_BERT)): {"content": "<y>", "special": False}}
    assert load_tokenizer(_bert(tmp_path, added_tokens_decoder=added))("<y>")["input_ids"][1:-1] == [len(_BERT)]
    mask = _BERT.index("[MASK]")
    assert mask in load_tokenizer(_bert(tmp_path))("[MASK]")["input_ids"]
    assert mask not in load_tokenizer(_bert(tmp_path, split_special_tokens=True))("[MASK]")["input_ids"]


def test_a_key_of_a_tokenizer_without_a_number_changes_no_token(tmp_path: Path) -> None:
    """Neither of a row, nor of one that is cut; each alone."""
    saved = json.loads((_bert(tmp_path) / "tokenizer_config.json").read_text())

    def rows(**settings: Any) -> list[Any]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(saved | settings))
        tokenizer = load_tokenizer(tmp_path)
        return [Encoder(tokenizer, [_SENTENCE], length)[0] for length in (64, 4)]

    wanted = rows()
    for key in (*sorted(NO_NUMBER), "image_token"):
        assert rows(**{key: {"padding_side": "left", "image_token": "a"}.get(key, 3)}) == wanted, key


@pytest.mark.parametrize("made", [_bert, _gpt2, _write])
def test_a_key_that_a_tokenizer_drops_is_refused(tmp_path: Path, made: Any) -> None:
    """Whatever its class: either value of each key is what the tokenizer does, or it is refused by its name."""
    made(tmp_path, first=False) if made is _write else made(tmp_path)
    before = (tmp_path / "tokenizer_config.json").read_text()
    for key in (*DOES, *sorted(ONLY_SLOW)):
        taken = []
        for value in (True, False):
            (tmp_path / "tokenizer_config.json").write_text(before)
            try:
                tokenizer = load_tokenizer(_set(tmp_path, **{key: value}))
                taken.append(DOES[key](tokenizer) == value if key in DOES else not value)
            except ModelError as error:
                assert f"{key} = {value!r} is not what the tokenizer does" in str(error)  # noqa: PT017 - either is right
        assert taken in ([True], [True, True]), key


def test_keys_of_a_tokenizer_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    """By their names, if they say anything; each key is in one table."""
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: drop_blanks, lower: not known, and may change tok"):
        load_tokenizer(_bert(tmp_path, drop_blanks=True, lower=0.5, upper=None))
    with pytest.raises(ModelError, match="auto_map is refused"):
        load_tokenizer(_bert(tmp_path, auto_map={"AutoTokenizer": ["a.b", None]}))
    with pytest.raises(ModelError, match=r"tokenizer_file = 'other\.json' is refused: it names a file"):
        load_tokenizer(_bert(tmp_path, tokenizer_file="other.json"))
    assert DOES.keys() == COMPARED
    assert not CARRIED_OUT & NO_NUMBER | (CARRIED_OUT | NO_NUMBER) & (COMPARED | ONLY_SLOW)


@pytest.mark.parametrize("side", ["left", "right"])
def test_text_beyond_the_bound_is_cut_before_it_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """A million characters take up to a gigabyte; rows are those of the whole text, other texts are refused."""
    tokenizer = load_tokenizer(_bert(tmp_path, truncation_side=side))
    texts: list[Text] = ["b a " * 20, ("a b " * 20, "b"), ("a b " * 20, "b b a " * 20), "a" * 80]
    wanted = list(Encoder(tokenizer, texts, 8))
    monkeypatch.setattr("edge.data.tokens.MAX_CHARACTERS", 60)
    encoder = Encoder(tokenizer, texts, 8)
    assert list(encoder) == wanted and encoder.cut_rows == 4
    for encode in (
        functools.partial(tokenizer, "a " * 31),
        functools.partial(tokenizer, ["a"] * 61, is_split_into_words=True),
    ):
        with pytest.raises(DataError, match=r"a text has 6[12] characters, and at most 60 are encoded; divide it"):
            encode()


@pytest.mark.parametrize("names", [None, True, 1])
def test_setting_that_the_first_text_would_fail_at_is_refused(tmp_path: Path, names: object) -> None:
    """The library looks at it once a text is encoded."""
    _bert(tmp_path)
    content = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**content, "model_input_names": names}))
    with pytest.raises(ModelError, match=r"has no tokenizer that can be read .*; fetch the model again"):
        load_tokenizer(tmp_path)


def test_tokenizer_that_panics_is_an_error_without_the_text(tmp_path: Path) -> None:
    """A panic is no ``Exception``: the thread of a call would end without an answer to who waits."""
    folder = _write(tmp_path, first=False)
    content = json.loads((folder / "tokenizer.json").read_text())
    endless = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps({**content, "pre_tokenizer": endless}))
    tokenizer, text = load_tokenizer(folder), "a" * 60 + "!"
    encoder = Encoder(tokenizer, [text], 8)
    for encode in (functools.partial(encoder.__getitem__, 0), functools.partial(tokenizer, ["", text])):
        with pytest.raises(ModelError, match="its tokenizer fails at a text; take the tokenizer") as refused:
            encode()
        assert "aaa" not in str(refused.value)
