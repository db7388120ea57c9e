"""Conversations: the forms in which rows have them, their messages, and chat templates for models without one.

A row is one of these, told by its columns:

=====================================  ================================================================
``messages``                           list of ``{"role", "content"}``: system, user, assistant, tool
``conversations``                      ShareGPT: list of ``{"from", "value"}``: system, human, gpt, tool
``prompt``, ``completion``             two texts, or two lists of messages of which the second is learned
``instruction``, ``input``, ``output``  Alpaca: a user's message, with ``input`` below it, and the answer
=====================================  ================================================================

``response`` is read as ``completion`` or ``output``. Two texts are no conversation: the model reads and continues them
as they are, without a template, as trl does. ``tools`` beside messages is passed to the template.

Source: trl 0.24, dataset formats; mlx-lm, LORA.md; FastChat (ShareGPT); Stanford Alpaca.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ringtune.errors import ModelError
from ringtune.models.tokenizer import (
    CLASSES_OF_5,
    SETTINGS_FILE,
    SPECIAL_TOKENS_FILE,
    WHOLE_FILE,
    chat_templates,
    read_settings_table,
    read_tokenizer_settings,
)
from ringtune.storage.strict import nearest
from ringtune.storage.tables import Problem, Record, RowError, checked_text

ASSISTANT: Final = "assistant"
_ROLES: Final[Mapping[str, str]] = {
    **{role: role for role in ("system", "user", ASSISTANT, "tool")},
    "human": "user",
    "gpt": ASSISTANT,
    "function": "tool",
    "observation": "tool",
}
"""Role in a row -> role in a template."""

_FORMS: Final[Mapping[str, tuple[str, ...]]] = {
    "conversations (messages)": ("messages",),
    "conversations (ShareGPT)": ("conversations",),
    "prompts and completions": ("prompt", "completion"),
    "prompts and responses": ("prompt", "response"),
    "instructions and outputs (Alpaca)": ("instruction", "output"),
    "instructions and responses": ("instruction", "response"),
}
"""Form -> the columns that tell it; the last one is the answer, which a prediction does without."""

_BESIDE: Final[Mapping[str, str]] = {"messages": "tools", "conversations": "tools", "instruction": "input"}
"""First column of a form -> a further one, which may be missing."""

PREFERENCES: Final = ("chosen", "rejected")
PREFERENCES_REMEDY: Final = (
    "it has preferences (columns 'chosen' and 'rejected'), and training on them (DPO) is not built; to learn the "
    "chosen answers alone, write rows with 'prompt' and 'completion', or 'messages'"
)


class PlainPair(NamedTuple):
    """A text and its continuation, without roles and template; the completion of a prediction is empty."""

    prompt: str
    completion: str


class Conversation(NamedTuple):
    """Messages of a conversation.

    Attributes:
        messages: JSON of a list of objects with ``role``, ``content`` and what else the row has, such as
            ``tool_calls``.
        tools: JSON of the tools that the template gets; empty without.
        learned_from: index of the first message that may be an answer to learn.
    """

    messages: str
    tools: str = ""
    learned_from: int = 0


def form_of(columns: Collection[str], *, with_answer: bool = True) -> str:
    """Name the form of conversations with these columns, in large or small letters; empty for other tables.

    Example: ``instruction``, ``input`` and ``output`` give "instructions and outputs (Alpaca)".
    """
    for words, needed in _FORMS.items():
        required = needed if with_answer or len(needed) == 1 else needed[:-1]
        if _by_name(columns).keys() >= set(required):
            return words
    return ""


def _by_name(columns: Collection[str]) -> dict[str, str]:
    return {name.strip().lower(): name for name in columns}


def columns_of(columns: Collection[str]) -> tuple[str, ...]:
    """Names of the columns that are read, of all columns of a file; none where it has no conversations."""
    used, named = _FORMS.get(form_of(columns), ()), _by_name(columns)
    return tuple(named[name] for name in (*used, *map(_BESIDE.get, used)) if name in named)


def has_preferences(columns: Collection[str]) -> bool:
    """Whether a table has chosen and rejected answers."""
    return _by_name(columns).keys() >= set(PREFERENCES)


def conversation_of(record: Record, *, with_answer: bool = True) -> tuple[Conversation | PlainPair, str]:
    """Read the conversation of a row, and its form.

    Raises ``RowError`` for a row of no form, an unknown role, a content that is no text, or no answer.
    """
    row = {name.strip().lower(): value for name, value in record[1].items() if value is not None}
    if has_preferences(row):
        raise RowError(Problem("it has a chosen and a rejected answer", "write 'prompt' and 'completion'"))
    form = form_of(row, with_answer=with_answer)
    if not form and form_of(record[1], with_answer=with_answer):
        raise RowError(
            Problem("a part of its conversation is missing", "fill it in or remove the row", is_missing=True)
        )
    if not form:
        known = " or ".join(dict.fromkeys(" and ".join(map(repr, names)) for names in _FORMS.values()))
        raise RowError(Problem("it has no conversation", f"give the row {known}"))
    first, *others = _FORMS[form]
    if first == "prompt" and isinstance(row[first], str):
        completion = _text(row.get(others[0], ""), others[0], may_be_empty=not with_answer)
        return PlainPair(_text(row[first], first), completion if with_answer else ""), f"{form} as texts"
    if others:
        messages, learned_from = _of_two(row, first, others[0], with_answer=with_answer)
    else:
        messages, learned_from = _messages(row[first], first), 0
    answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    if with_answer and not any(index >= learned_from for index in answers):
        raise RowError(Problem("it has no answer (role 'assistant')", "add one or remove the row", is_missing=True))
    if not with_answer and answers and answers[-1] == len(messages) - 1:
        del messages[-1]
    if not messages:
        raise RowError(Problem("it has no message before the answer", "give a question, or remove the row"))
    tools = row.get("tools") if not others else None
    if tools is not None and not isinstance(tools, list):
        raise RowError(Problem("column 'tools' is no list", "give a list of JSON schemas, or leave it out"))
    return Conversation(_json(messages), _json(tools) if tools else "", learned_from), form


def _of_two(row: Mapping[str, Any], first: str, second: str, *, with_answer: bool) -> tuple[list[dict[str, Any]], int]:
    """Read a prompt and its answer: two lists of messages, or the texts of Alpaca."""
    if first == "prompt":
        prompt = _messages(row[first], first)
        return prompt + (_messages(row.get(second), second) if with_answer else []), len(prompt)
    question = _text(row[first], first)
    if isinstance(row.get("input"), str) and row["input"].strip():
        question += "\n\n" + _text(row["input"], "input")
    messages = [{"role": "user", "content": question}]
    if with_answer:
        messages.append({"role": ASSISTANT, "content": _text(row[second], second)})
    return messages, 1


def _messages(value: object, column: str) -> list[dict[str, Any]]:
    where = f"column {column!r}"
    if not isinstance(value, list):
        raise RowError(Problem(f"{where} is no list of messages but a {type(value).__name__}", "write .jsonl or .json"))
    if not value:
        raise RowError(Problem(f"{where} has no messages", "fill it in or remove the row", is_missing=True))
    return [_message(message, f"message {number} of {where}") for number, message in enumerate(value, start=1)]


def _message(message: object, where: str) -> dict[str, Any]:
    """Read a message, with ``from`` and ``value`` as role and content; other keys stay unless they are null."""
    if not isinstance(message, dict):
        raise RowError(Problem(f"{where} is no object but a {type(message).__name__}", "give role and content"))
    values = {key: value for key, value in message.items() if value is not None}
    for key, other in (("role", "from"), ("content", "value")):
        if key not in values and other in values:
            values[key] = values.pop(other)
    role = values.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        said = "an unknown role" if isinstance(role, str) else "no role"
        raise RowError(Problem(f"{where} has {said}", f"the roles are {', '.join(_ROLES)}"))
    may_be_empty = _ROLES[role] != ASSISTANT or bool(values.get("tool_calls"))
    return {
        **values,
        "role": _ROLES[role],
        "content": _content(values.get("content"), where, may_be_empty=may_be_empty),
    }


def _content(value: object, where: str, *, may_be_empty: bool) -> str:
    """Read a text, or the texts of parts joined; images and sounds are refused."""
    parts = value if isinstance(value, list) else ["" if value is None and may_be_empty else value]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if isinstance(text, dict):
            raise RowError(Problem(f"{where} has a part that is no text", "the models here read text: remove the row"))
        if not isinstance(text, str):
            raise RowError(Problem(f"{where} has a content that is no text but a {type(text).__name__}", "give a text"))
        texts.append(checked_text(text, where))
    content = "".join(texts)
    if not may_be_empty and not content.strip():
        raise RowError(Problem(f"{where} is an empty answer", "fill it in or remove the row", is_missing=True))
    return content


def _text(value: object, column: str, *, may_be_empty: bool = False) -> str:
    where = f"column {column!r}"
    if not isinstance(value, str):
        raise RowError(Problem(f"{where} is not text but a {type(value).__name__}", "put the text in quotes"))
    if not may_be_empty and not value.strip():
        raise RowError(Problem(f"{where} is empty", "fill it in or remove the row", is_missing=True))
    return checked_text(value, where)


def _json(value: Sequence[Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


BEGIN: Final = "{{ bos_token if bos_token is defined }}"
_HEAD: Final = (
    "{% if tools or messages | selectattr('tool_calls') | list %}{{ raise_exception('it has no form for tools') }}"
    "{% endif %}" + BEGIN
)
TEMPLATES: Final[Mapping[str, str]] = {
    "chatml": _HEAD
    + "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "zephyr": _HEAD
    + "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "alpaca": _HEAD
    + "{% for message in messages %}{% if message.role == 'assistant' %}### Response:\n{{ message.content }}"
    "{{ eos_token }}\n\n{% elif message.role == 'system' %}{{ message.content }}\n\n{% else %}### "
    "{{ 'Input' if message.role == 'tool' else 'Instruction' }}:\n{{ message.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}",
}
"""Templates for a model without one, by their values of ``data.template``; ``bos_token`` is given where the tokenizer
begins a text with it. ``eos_token`` ends an answer in all but chatml, which is for models that know ``<|im_end|>``.
"""

_NO_TEMPLATE: Final = "the model has no chat template of its own"
_WITHOUT_END: Final = ("BertTokenizer", "PreTrainedTokenizer", *CLASSES_OF_5)
"""Classes of tokenizers that have no ``eos_token`` where their settings name none."""
_CHATML_END: Final = "<|im_end|>"
_MAX_TOKENIZER_BYTES: Final = 1 << 26


def has_chat_template(folder: Path) -> bool:
    """Whether a model folder has a chat template, in one of the three places where transformers reads it."""
    try:
        return bool(chat_templates(folder))
    except ModelError:
        return False  # told when the tokenizer is loaded


def named_template(folder: Path, name: str) -> str:
    """Return one of ``TEMPLATES``, or else of the model's own templates, by its name; raises ``ModelError``."""
    templates = {} if name in TEMPLATES else chat_templates(folder)
    if name not in TEMPLATES and name not in templates:
        has = f"the templates {', '.join(map(repr, templates))}" if templates else "no chat template of its own"
        raise ModelError(
            f"data.template = {name!r}: the model in {folder} has {has}; {nearest(name, (*TEMPLATES, *templates))}"
        )
    return TEMPLATES[name] if name in TEMPLATES else templates[name]


def require_template(folder: Path, template: str | None) -> None:
    """Refuse a model without the chat template that ``data.template`` names, or without any; raises ``ModelError``."""
    if template is not None:
        named_template(folder, template)
    elif not has_chat_template(folder):
        raise ModelError(
            f"the model in {folder} has no chat template; set data.template to one of "
            f"{', '.join(map(repr, TEMPLATES))}, or give the chat model in place of its base"
        )


def fitting_template(folder: Path) -> tuple[str, str]:
    """Choose one of ``TEMPLATES`` for a model without a template, and say why.

    It is chatml where the tokenizer knows ``<|im_end|>``, or names no token to end an answer with.
    """
    file, settings = folder / WHOLE_FILE, read_tokenizer_settings(folder)
    knows = (
        file.is_file()
        and file.stat().st_size <= _MAX_TOKENIZER_BYTES
        and _CHATML_END in file.read_text(encoding="utf-8", errors="replace")
    )
    kind = str(settings.get("tokenizer_class")).removesuffix("Fast")
    named = settings.get("eos_token") or read_settings_table(folder / SPECIAL_TOKENS_FILE).get("eos_token")
    is_endless = kind in _WITHOUT_END and not named
    more = f", and its {SETTINGS_FILE} names no eos_token, with which the others end an answer"
    return "chatml" if knows or is_endless else "zephyr", _NO_TEMPLATE + (more if is_endless and not knows else "")
