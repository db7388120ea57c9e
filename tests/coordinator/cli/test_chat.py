"""``ringtune chat`` in front of answers that a script gives: what is asked, shown, kept, left out and told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from coordinator.api.text_process import Ready
from coordinator.cli.chat import MAX_CHARACTERS, Talk
from ringtune.errors import DataError, UsageError
from tests.support.cases import cases

HOW = {"max_new_tokens": 9, "temperature": None, "seed": 5}


class Script:
    """Answers from a list: pieces, a reason of refusal, or Ctrl-C after the pieces."""

    def __init__(self, *answers: Any, has_template: bool = True, **ended: Any) -> None:
        self.ready = Ready(has_template=has_template, longest=64, reads=64, cache_bytes=0, temperature=0.0, told="")
        self.requests: list[Mapping[str, Any]] = []
        self._answers, self._ended = iter(answers), {"why": "end", "forgotten": 0, **ended}

    def answer(self, request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the events of the next answer."""
        self.requests.append(request)
        pieces = next(self._answers)
        if isinstance(pieces, str):
            yield {"refused": pieces}
            return
        yield {"began": {"prompt_tokens": 3, "forgotten": self._ended["forgotten"]}}
        for piece in pieces:
            if piece is KeyboardInterrupt:
                raise KeyboardInterrupt
            yield {"piece": piece}
        yield {"ended": {"why": self._ended["why"], "tokens": len(pieces)}}


def talk(script: Script, system: str = "") -> tuple[Talk, list[str]]:
    """A conversation, and what it shows."""
    shown: list[str] = []
    return Talk(script, HOW, system, show=shown.append), shown


def asked(user: str, *before: str, system: str = "") -> list[dict[str, str]]:
    """Messages up to a question."""
    head = [{"role": "system", "content": system}] if system else []
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate([*before, user])]
    return head + turns


def test_answers_appear_in_pieces_and_stay_in_the_conversation() -> None:
    """Until it is begun anew, or a command ends it; blank lines ask nothing, and each answer has draws of its own."""
    script = Script(["hel", "lo "], ["yes"], ["no"])
    conversation, shown = talk(script, "be w1")
    found = conversation.take("hi\n", is_lenient=True)
    assert found == {"text": "hello ", "tokens": 2, "why": "end", "forgotten": 0, "prompt_tokens": 3}
    assert shown == ["hel", "lo ", "\n"]
    assert conversation.take("  \n", is_lenient=True) == {}
    conversation.take("and?", is_lenient=True)
    assert conversation.take("/reset", is_lenient=True) == {}
    conversation.take("anew", is_lenient=True)
    assert [request["messages"] for request in script.requests] == [
        asked("hi", system="be w1"),
        asked("and?", "hi", "hello", system="be w1"),
        asked("anew", system="be w1"),
    ]
    assert [request["seed"] for request in script.requests] == [5, 6, 7]
    assert all(request["may_forget"] and request["max_new_tokens"] == 9 for request in script.requests)
    assert conversation.take("/exit", is_lenient=True) is None


def test_stopped_answer_stays_as_far_as_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C before the first piece leaves nothing; a filter ends with it."""
    script = Script(["so ", "far", KeyboardInterrupt], [KeyboardInterrupt], ["x"])
    conversation, _ = talk(script)
    for line in ("one", "two", "three"):
        conversation.take(line, is_lenient=True)
    assert script.requests[-1]["messages"] == asked("three", "one", "so far")
    assert capsys.readouterr().err == "(stopped)\n(stopped)\n"
    with pytest.raises(KeyboardInterrupt):
        talk(Script(["so ", KeyboardInterrupt]))[0].take("one", is_lenient=False)


def test_messages_that_were_left_out_are_told_and_not_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The system message stays; so is an answer that was cut, and an empty one."""
    script = Script(["1"], ["2"], ["3"], [" "], forgotten=2, why="length")
    conversation, _ = talk(script, "be w1")
    conversation.messages += asked("b", "a")[:1] + asked("b", "a")[1:]
    conversation.take("c", is_lenient=True)
    assert conversation.messages == [*asked("c", system="be w1"), {"role": "assistant", "content": "1"}]
    assert capsys.readouterr().err == "(the conversation no longer fits: its 2 oldest messages were left out)\n"
    script = Script(["1"], [" "], why="length")
    conversation, _ = talk(script)
    conversation.take("c", is_lenient=True)
    conversation.take("d", is_lenient=True)
    assert conversation.messages == [*asked("c"), {"role": "assistant", "content": "1"}]
    assert "the answer was cut: --max-new-tokens" in capsys.readouterr().err


def test_line_that_can_not_be_answered_is_forgotten_or_ends_a_filter(capsys: pytest.CaptureFixture[str]) -> None:
    """With the reason; a line without end is not read by the model."""
    script = Script("too long; shorten it", ["x"], "too long; shorten it")
    conversation, _ = talk(script)
    assert conversation.take("a", is_lenient=True) == {}
    assert capsys.readouterr().err == "(too long; shorten it)\n"
    conversation.take("b", is_lenient=True)
    assert script.requests[-1]["messages"] == asked("b")
    with pytest.raises(DataError, match="too long; shorten it"):
        conversation.take("c", is_lenient=False)
    with pytest.raises(DataError, match="a line has 1,048,577 characters"):
        conversation.take("x" * (MAX_CHARACTERS + 1), is_lenient=False)


@cases(
    ("piece", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x9b1m\r\x07", "\\x9b1m\\r\\x07"),
        ("\u202eabc", "\\u202eabc"),
        ("\U0001f468\u200d\U0001f469 é", "\U0001f468\u200d\U0001f469 é"),
    ],
)
def test_terminal_obeys_no_sign_of_an_answer(piece: str, shown: str) -> None:
    """Escape sequences are shown as text; the conversation has them as they are."""
    conversation, found = talk(Script([piece]))
    conversation.take("a", is_lenient=True)
    assert found == [shown, "\n"]
    assert conversation.messages[-1]["content"] == piece.strip()


def test_model_without_template_continues_each_line() -> None:
    """By itself; a system message has no place."""
    script = Script(["a"], ["b"], has_template=False)
    conversation, _ = talk(script)
    for line in ("once upon", " a time"):
        conversation.take(line, is_lenient=True)
    assert [request["prompt"] for request in script.requests] == ["once upon", " a time"]
    with pytest.raises(UsageError, match="no chat template, so that --system"):
        talk(script, "be w1")
