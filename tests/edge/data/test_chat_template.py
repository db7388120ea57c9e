"""Templates that are programs of somebody else: what they may do, and that they end."""

from __future__ import annotations

import json
import time

import pytest

from edge.data.chat_template import ChatTemplate, TemplateError
from ringtune.errors import ModelError
from ringtune.models.conversations import TEMPLATES, Conversation

ROW = Conversation(json.dumps([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]))
DOUBLED = "{% set n = namespace(x='aa') %}{% for _ in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}",
            ModelError,
            "may take 0.6 s",
        ),
        (DOUBLED, (ModelError, TemplateError), "stopped|MemoryError"),
        ("{% for _ in range(99999) %}{{ 'a' * 999 }}{% endfor %}", ModelError, "was stopped: .* set data.template"),
        ("{{ ''.__class__.__mro__ }}", TemplateError, "SecurityError: access to attribute"),
        ("{% include '/etc/hostname' %}", TemplateError, "TypeError: no loader"),
        ("{{ messages.append(1) }}", TemplateError, "SecurityError"),
        ("{% for _ in range(100001) %}{% endfor %}", TemplateError, "OverflowError: Range too big"),
        ("{{ no.such }}", TemplateError, "UndefinedError"),
    ],
)
def test_hostile_templates_are_refused_in_bounded_time(text: str, error: type[Exception], message: str) -> None:
    """Neither time nor memory of the caller is at the template's disposal."""
    began = time.monotonic()
    with pytest.raises(error, match=message):
        ChatTemplate(text, {}, limit_s=0.6 if "for" in text else 30.0).answers([ROW])
    assert time.monotonic() - began < 40


def test_rows_of_all_bunches_are_rendered_in_order() -> None:
    """A failing row is named by its place among all."""
    template = ChatTemplate("{{ raise_exception('no') if messages[0].content == '300' }}{{ messages[0].content }}", {})
    rows = [Conversation(json.dumps([{"role": "user", "content": str(index)}])) for index in range(300)]
    assert [one.text for (one,) in template.whole(rows)] == [str(index) for index in range(300)]
    with pytest.raises(TemplateError, match="TemplateError: no") as caught:
        template.whole([*rows, *[Conversation(json.dumps([{"role": "user", "content": "300"}]))] * 2])
    assert caught.value.row == 300 and "so do 1 more" in str(caught.value)


def test_prompts_end_where_the_model_answers() -> None:
    """And dates are the same on each day."""
    assert ChatTemplate(TEMPLATES["chatml"], {}).prompts([ROW])[0].endswith("y<|im_end|>\n<|im_start|>assistant\n")
    assert ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).prompts([ROW]) == ["2024-07-26"]
