"""Rows of conversations that are read, and those that are refused, with line and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringtune.errors import DataError
from ringtune.job.job import Data
from ringtune.job.rows import read_rows
from ringtune.models.conversations import Conversation, columns_of, conversation_of
from tests.support.cases import cases

ASK, SAY = {"role": "user", "content": "w1"}, {"role": "assistant", "content": "yes"}
GOOD = {"messages": [ASK, SAY]}


def refused(tmp_path: Path, rows: list[Any], **data: Any) -> str:
    """What is said of a file."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_rows(path, "chat", Data(**data))
    return str(caught.value)


BAD: dict[str, tuple[Any, str]] = {
    "no form": ({"text": "x"}, "it has no conversation; give the row 'messages' or 'conversations' or 'prompt' and"),
    "empty": ({"messages": []}, "column 'messages' has no messages; fill it in or remove the row"),
    "text": ({"messages": "[]"}, "column 'messages' is no list of messages but a str; write .jsonl or .json"),
    "message": ({"messages": ["x"]}, "message 1 of column 'messages' is no object but a str"),
    "role": (
        {"messages": [{"role": "boss", "content": "x"}]},
        "message 1 of column 'messages' has an unknown role; the roles are system, user",
    ),
    "no role": (
        {"messages": [{"content": "x"}]},
        "message 1 of column 'messages' has no role; the roles are system, user",
    ),
    "no answer": ({"messages": [ASK]}, "it has no answer (role 'assistant')"),
    "empty answer": ({"messages": [ASK, {**SAY, "content": " "}]}, "message 2 of column 'messages' is an empty answer"),
    "null answer": ({"messages": [ASK, {**SAY, "content": None}]}, "has a content that is no text but a NoneType"),
    "number": ({"messages": [{**ASK, "content": 7}, SAY]}, "message 1 .* has a content that is no text but a int"),
    "image": (
        {"messages": [{**ASK, "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}, SAY]},
        "message 1 of column 'messages' has a part that is no text; the models here read text: remove the row",
    ),
    "zero": ({"messages": [{**ASK, "content": "a\0"}, SAY]}, "message 1 of column 'messages' has a zero character"),
    "tools": ({**GOOD, "tools": "add"}, "column 'tools' is no list; give a list of JSON schemas"),
    "completion": ({"prompt": "x", "completion": ""}, "column 'completion' is empty"),
    "both kinds": ({"prompt": "x", "completion": [SAY]}, "column 'completion' is not text but a list"),
    "no answer in it": ({"prompt": [ASK, SAY], "completion": [ASK]}, "it has no answer (role 'assistant')"),
    "output": ({"instruction": "x", "output": 3}, "column 'output' is not text but a int; put the text in quotes"),
    "preferences": ({"prompt": "x", "chosen": "a", "rejected": "b"}, "it has preferences (columns 'chosen' and 'rej"),
}


@cases("name", list(BAD))
def test_rows_that_are_no_conversation_are_refused_by_line(name: str, tmp_path: Path) -> None:
    """With what is wrong and what to do."""
    row, message = BAD[name]
    said = refused(tmp_path, [row])
    assert "line 1" in said and all(part in said for part in message.split(" .* ")), said


def test_rows_of_two_forms_are_not_mixed(tmp_path: Path) -> None:
    """The second form is told by its line; texts and messages are two forms, too."""
    rows = [GOOD, {"prompt": "x", "completion": "y"}, GOOD, {"prompt": [ASK], "completion": [SAY]}]
    said = refused(tmp_path, rows)
    assert "2 rows can't be used" in said
    assert "it has prompts and completions as texts, and line 1 has conversations (messages) in line 2" in said
    assert "it has prompts and completions, and line 1 has conversations (messages) in line 4" in said


def test_rows_without_an_answer_may_be_left_out(tmp_path: Path) -> None:
    """As rows with an empty cell are; what is wrong otherwise is refused still."""
    path = tmp_path / "rows.jsonl"
    rows: list[Any] = [GOOD, {"messages": [ASK]}, {"messages": []}, {"messages": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_rows(path, "chat", Data(missing="skip"))
    assert (len(found.rows), sum(found.left_out.values())) == (1, 3)
    assert found.notes == (f"{path} has conversations (messages)",)


def test_users_of_conversations_are_read_from_their_column(tmp_path: Path) -> None:
    """As of any rows; a refused value is not told, as a job may name any column."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**GOOD, "author": name}) + "\n" for name in ("anna", "ben")))
    assert read_rows(path, "chat", Data(user="author")).users == ("anna", "ben")
    told = refused(tmp_path, [{**GOOD, "author": "Not told!"}], user="author")
    assert "no name of a user" in told and "Not told" not in told


def test_messages_keep_what_a_template_may_read() -> None:
    """Tool calls need no content; roles of ShareGPT become those of templates; a prediction ends before the answer."""
    call = {"from": "gpt", "tool_calls": [{"name": "add"}], "role": None, "name": None}
    row: dict[str, object] = {
        "conversations": [{"from": "human", "value": "x"}, call, {"from": "observation", "value": "3"}, SAY]
    }
    found, form = conversation_of((1, row))
    assert isinstance(found, Conversation) and form == "conversations (ShareGPT)"
    messages = json.loads(found.messages)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    asked, _ = conversation_of((1, row), with_answer=False)
    assert isinstance(asked, Conversation) and json.loads(asked.messages) == messages[:3]
    large = {"Instruction": "w1", "OUTPUT": "yes", "Input ": "no", "id": 1}
    assert columns_of(large) == ("Instruction", "OUTPUT", "Input ")
    both = json.dumps([{"role": "user", "content": "w1\n\nno"}, SAY])
    assert conversation_of((1, large)) == (Conversation(both, "", 1), "instructions and outputs (Alpaca)")
    parts: tuple[dict[str, object], ...] = ({"prompt": [ASK]}, {"instruction": "w1"}, {"messages": [ASK]})
    for part in parts:
        wanted = Conversation(json.dumps([ASK]), "", part.keys() != {"messages"})
        assert conversation_of((1, part), with_answer=False)[0] == wanted
