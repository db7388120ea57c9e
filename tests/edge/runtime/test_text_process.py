"""Answers on request: those of ``ringtune predict`` in pieces, what ends them, what is forgotten, what is refused."""

from __future__ import annotations

import itertools
import json
import os
import select
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.data.tokens import load_tokenizer
from edge.runtime import inference, text_process
from edge.runtime.inference import main, next_tokens
from edge.runtime.text_process import TextModel
from ringtune.job.job import load_job
from tests.support import chat_models
from tests.support.tiny_families import write_family

JOB = '[model]\npath = "{model}"\ntask = "chat"\n[train]\nmethod = "hift"\n'
HOW = {"max_new_tokens": 8, "temperature": 0.0, "seed": 0}


def model_in(folder: Path, template: str = chat_models.MISTRAL, **settings: object) -> TextModel:
    """A random Llama with a chat template."""
    longest = settings.pop("max_position_embeddings", 64)
    base = write_family(folder / "base", "llama", num_blocks=2, with_decoder=True, max_position_embeddings=longest)
    chat_models.write_tokenizer(base, template)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **settings}))
    (folder / "job.toml").write_text(JOB.format(model=base), encoding="utf-8")
    return TextModel(load_job(folder / "job.toml"), base)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """One for all tests that change nothing of it."""
    return model_in(tmp_path_factory.mktemp("chat"))


def asked(model: TextModel, **request: Any) -> tuple[str, dict[str, Any]]:
    """The text of an answer, and its counts."""
    first, *pieces, last = list(model.events({**HOW, **request}, lambda: False))
    return "".join(piece["piece"] for piece in pieces), first["began"] | last["ended"]


def refusal(model: TextModel, **request: Any) -> str:
    """Why a request is refused, without any other event."""
    (event,) = model.events({**HOW, **request}, lambda: False)
    return str(event["refused"])


def said(*texts: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def test_answers_are_those_of_a_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In pieces, behind the prompt of the template, and without the blank before it."""
    model, rows = model_in(tmp_path), [{"messages": row[:1]} for row in chat_models.conversations(3)]
    chat_models.write_conversations(tmp_path / "rows.jsonl", rows)
    words = (str(tmp_path / name) for name in ("job.toml", "base", "rows.jsonl"))
    assert main([*words, "--max-new-tokens", "8"], sys.stdout) == 0
    wanted = [json.loads(line)["predicted"] for line in capsys.readouterr().out.splitlines()]
    found = [asked(model, messages=row["messages"]) for row in rows]
    assert [text for text, _ in found] == [one["predicted"].lstrip() for one in wanted]
    assert [counts["tokens"] for _, counts in found] == [one["tokens"] for one in wanted]
    tokenizer = load_tokenizer(tmp_path / "base")
    lengths = [len(tokenizer.apply_chat_template(row["messages"], return_dict=False)) for row in rows]
    assert [counts["prompt_tokens"] for _, counts in found] == lengths


def test_text_is_continued_up_to_what_ends_it(model: TextModel) -> None:
    """The number of tokens, a text to stop at, or who asked; the same seed draws the same."""
    text, counts = asked(model, prompt="yes")
    assert counts == {"prompt_tokens": 1, "forgotten": 0, "why": "length", "tokens": 8}
    stop = text[2:4]
    assert asked(model, prompt="yes", stops=["never", stop])[0] == text.partition(stop)[0]
    assert asked(model, prompt="yes", stops=[stop])[1]["why"] == "end"
    *_, last = model.events({**HOW, "prompt": "yes"}, lambda: True)
    assert last == {"ended": {"why": "stopped", "tokens": 1}}
    assert asked(model, prompt="yes", max_new_tokens=500)[1]["tokens"] == model.ready["longest"] - 1
    warm = [asked(model, prompt="yes", temperature=2.0, seed=seed)[0] for seed in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]


def test_long_text_is_read_in_parts_and_each_token_is_told(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who leaves meanwhile waits for a part; the answer is that to the whole text, also behind a text that is kept."""
    text = {"prompt": "a b c " * 6}
    whole = asked(model, **text)
    monkeypatch.setattr(text_process, "_AT_ONCE", 4)
    asked(model, prompt="yes")
    assert asked(model, **text) == whole
    asked(model, prompt="yes")
    stopped = list(model.events({**HOW, **text}, lambda: True))
    assert stopped[1:] == [{"piece": ""}, {"ended": {"why": "length", "tokens": 0}}]
    first, *pieces, last = model.events({**HOW, **text}, lambda: False)
    parts = -(-(first["began"]["prompt_tokens"] - 4) // 4) - 1
    assert len(pieces) == parts + last["ended"]["tokens"] and last["ended"]["tokens"] == 8
    assert asked(model, **text) == whole


def test_oldest_turns_are_left_out_where_a_conversation_no_longer_fits(model: TextModel) -> None:
    """The system message stays; what is left is what a shorter conversation gives."""
    system = [{"role": "system", "content": "be w1"}]
    turns = said(*["a b w1"] * 7)
    text, counts = asked(model, messages=system + turns, may_forget=True)
    kept = system + turns[counts["forgotten"] :]
    assert 0 < counts["forgotten"] < 6 and counts["forgotten"] % 2 == 0
    assert (text, counts | {"forgotten": 0}) == asked(model, messages=kept)
    assert counts["prompt_tokens"] + 8 <= model.ready["longest"]
    refused = refusal(model, messages=system + turns)
    assert "tokens, and the model reads at most 64 with its answer; shorten it" in refused
    assert "the conversation has" in refusal(model, messages=said("a b c " * 30), may_forget=True)
    assert asked(model, prompt="a b c " * 30, may_forget=True)[1]["prompt_tokens"] == 56


def test_text_is_as_long_as_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values take half of what is free: key and value of two heads of 8 numbers, in two blocks."""
    monkeypatch.setattr(inference, "free_bytes", lambda: 2 * 70 * (2 * 2 * 2 * 8 * 4) + 100)
    ready = model_in(tmp_path, max_position_embeddings=128).ready
    assert (ready["longest"], ready["reads"], ready["cache_bytes"]) == (70, 128, 70 * 256)


def test_process_answers_line_by_line_and_ends_with_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stop ends the answer that it names, and no other one; what can't be loaded is told by the exit code.

    Nothing but the stop ends the first answer, so that it may be read at any time.
    """
    model_in(tmp_path)

    def tokens(*args: Any, **options: Any) -> Iterator[int]:
        found = next_tokens(*args, **options)
        return found if args[2].max_new_tokens == 8 else itertools.repeat(next(found))

    monkeypatch.setattr(text_process, "next_tokens", tokens)
    (of_process, to_process), (of_test, to_test) = os.pipe(), os.pipe()
    monkeypatch.setattr(text_process, "die_with_parent", bool)
    words = [str(tmp_path / "job.toml"), str(tmp_path / "base"), "1"]
    with os.fdopen(of_process) as stdin, os.fdopen(to_test, "w") as stdout, os.fdopen(of_test) as events:
        monkeypatch.setattr("sys.stdin", stdin)
        process = threading.Thread(target=text_process.main, args=(words, stdout))
        process.start()
        with os.fdopen(to_process, "w") as requests:

            def send(**line: Any) -> None:
                requests.write(json.dumps(line) + "\n")
                requests.flush()

            def ended(number: int) -> Any:
                found = next(one for one in map(json.loads, events) if "ended" in one)
                assert found["id"] == number
                return found["ended"]["why"]

            assert "ready" in json.loads(next(events))
            assert select.select([stdin], [], [], 0)[0] and not os.read(stdin.fileno(), 1)  # as a library finds it
            send(id=1, prompt="yes", **(HOW | {"max_new_tokens": 40, "seconds": 60}))
            assert "piece" in next(one for one in map(json.loads, events) if "began" not in one)
            send(stop=1)
            assert ended(1) == "stopped"
            send(id=2, prompt="yes", **HOW)
            assert ended(2) == "length"
        process.join(60)
        assert not process.is_alive()
    with Path(os.devnull).open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert text_process.main([words[0], str(tmp_path / "no"), words[2]], sys.stdout) == 7
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"messages": []}, "has no messages; fill"),
        ({"messages": "hello"}, "is no list of messages but a str"),
        ({"messages": [{"role": "king", "content": "w1"}]}, "message 1 of column 'messages' has an unknown role"),
        ({"messages": [{"role": "user", "content": "w\0"}]}, "has a zero character; remove it"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "half of a surrogate pair"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "no text"),
        ({"prompt": "w\0"}, "the prompt has a zero character"),
        ({"prompt": ""}, "the text has no token to go on from"),
        ({"prompt": "a" * 64}, "the text has 64 tokens, and the model reads at most 64"),
    ],
)
def test_request_that_can_not_be_answered_is_refused(request_: dict[str, Any], why: str, model: TextModel) -> None:
    """With the reason and a remedy; the next one is answered."""
    assert why in refusal(model, **request_)
    assert asked(model, prompt="yes")[0]


def test_token_without_embedding_is_refused(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tokenizer with more tokens than the model: who asks for one does not end the process."""
    monkeypatch.setattr(model._model._skeleton.base.config, "vocab_size", 100)
    for request in ({"prompt": "yes"}, {"messages": said("yes")}):
        assert "and the embedding of the model has 100 rows" in refusal(model, **request)


def test_template_that_refuses_a_conversation_is_told(tmp_path: Path) -> None:
    """By what it says; other conversations are answered, as the model's own settings have them drawn."""
    model = model_in(tmp_path, chat_models.GEMMA, do_sample=True, temperature=0.5, repetition_penalty=1.3)
    assert model.ready["temperature"] == 0.5
    assert model.ready["told"].startswith("generation_config.json of the model has repetition_penalty = 1.3, not used")
    system = [{"role": "system", "content": "be w1"}]
    assert "System role not supported" in refusal(model, messages=system + said("yes"))
    own = [asked(model, messages=said("yes"), temperature=None, seed=seed)[0] for seed in range(3)]
    assert len(set(own)) > 1 and len({asked(model, messages=said("yes"), seed=seed)[0] for seed in range(2)}) == 1
