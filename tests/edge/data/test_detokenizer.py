"""Pieces of a text by tokens: together the text that the tokenizer decodes, each of whole characters."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from edge.data.detokenizer import Detokenizer, Ends, ends_with
from edge.data.tokens import load_tokenizer
from tests.support import chat_models

TEXT = "naïve 東京 \U0001f468\u200d\U0001f469\u200d\U0001f467!  w1\n\nyes é"


def of_bytes() -> Any:
    """A token for each byte, as GPT-2 writes it."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({sign: at for at, sign in enumerate(signs)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def of_blanks() -> Any:
    """Words with their blanks and bytes for all else, as Llama 2 and Gemma write it."""
    words = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"naïve",
        "▁",
        "▁w",
        "1",
        "yes",
        "▁yes",
        "\n",
    ]
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("tokenizer", [of_bytes(), of_blanks()], ids=["bytes", "blanks"])
def test_pieces_are_whole_characters_and_together_the_text(tokenizer: Any) -> None:
    """From any place of the text on, where a prompt may end."""
    ids, num_prompts = tokenizer(TEXT, add_special_tokens=False)["input_ids"], 0
    for place in range(len(TEXT)):
        prompt = tokenizer(TEXT[:place], add_special_tokens=False)["input_ids"]
        if ids[: len(prompt)] != prompt or (place and tokenizer.decode(prompt) != TEXT[:place]):
            continue
        num_prompts += 1
        pieces = Detokenizer(tokenizer, prompt)
        found = [pieces.add(token) for token in ids[len(prompt) :]]
        assert pieces.end() == "" and "\ufffd" not in "".join(found)
        assert "".join(found) == tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]
    assert num_prompts > 10


def test_a_special_token_within_a_text_takes_no_blank_from_the_next() -> None:
    """It has no text itself, and the text of a token depends on the one before."""
    tokenizer = of_blanks()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    (end,), (word,) = (tokenizer.convert_tokens_to_ids([token]) for token in ("</s>", "▁yes"))
    for ends in ([end], [end, end]):
        ids = [word, *ends, word, word, *ends, word]
        pieces = Detokenizer(tokenizer, [])
        assert "".join(map(pieces.add, ids)) == tokenizer.decode(ids, skip_special_tokens=True) == "yes yes yes yes"


@given(st.lists(st.integers(0, 255), max_size=40), st.lists(st.sampled_from(["ab", "b\n", "!"]), max_size=2))
def test_any_tokens_give_their_text_up_to_the_first_stop(ids: list[int], stops: list[str]) -> None:
    """Also bytes that are no characters; nothing behind a stop is given, and nothing before it is lost."""
    tokenizer = of_bytes()
    pieces, found = Detokenizer(tokenizer, [], stops), ""
    for token in ids:
        found += pieces.add(token)
        assert not any(stop in found for stop in stops)
    found += pieces.end()
    whole = tokenizer.decode(ids)
    if not any(stop in whole for stop in stops):
        assert found.replace("\ufffd", "") == whole.replace("\ufffd", "")
    else:
        assert found == min((whole.partition(stop)[0] for stop in stops if stop in whole), key=len)


def test_answer_ends_at_a_special_token_or_a_text(tmp_path: Path) -> None:
    """The first special token of the template's end, and the text before that."""
    tokenizer = load_tokenizer(chat_models.write_tokenizer(tmp_path))
    (end,) = tokenizer("<|im_end|>")["input_ids"]
    begun, random_text = Ends((7,), ("x",)), "".join(random.Random(0).choices("abc", k=9))
    assert ends_with(begun, tokenizer, "<|im_end|>") == Ends((7, end), ("x",))
    assert ends_with(begun, tokenizer, "[]<|im_end|>\n<|eot|>") == Ends((7, end), ("x", "[]"))
    assert ends_with(begun, tokenizer, random_text) == Ends((7,), ("x", random_text))
    assert ends_with(begun, tokenizer, "") == begun
