"""Templates that are programs of somebody else: what they may do, and that they end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys

import pytest

from edge.data.chat_template import ChatTemplate, TemplateError
from ringtune.errors import ModelError
from ringtune.models.conversations import TEMPLATES, Conversation

ROW = Conversation(json.dumps([{"role": "user", "content": "cell"}, {"role": "assistant", "content": "y"}]))
ENDLESS = "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='aa') %}{% for _ in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (ENDLESS, TemplateError, "may take 1 s of processor time"),
        (DOUBLED, (ModelError, TemplateError), "stopped|MemoryError"),
        ("{% for _ in range(99999) %}{{ 'a' * 999 }}{% endfor %}", TemplateError, "was stopped: .* and write 32 MiB"),
        ("{{ ''.__class__.__mro__ }}", TemplateError, "SecurityError: access to attribute"),
        ("{% include '/etc/hostname' %}", TemplateError, "TypeError"),
        ("{{ messages.append(1) }}", TemplateError, "SecurityError"),
        ("{% for _ in range(100001) %}{% endfor %}", TemplateError, "OverflowError"),
        ("{{ no.such }}", TemplateError, "UndefinedError: 'no' is undefined"),
        ("{{ '\ud800' }}", TemplateError, "UnicodeEncodeError"),
        ("{{ raise_exception('no such role') }}", TemplateError, "TemplateError: no such role"),
        ("{{ raise_exception('no' ~ messages[0].content) }}", TemplateError, "^TemplateError$"),
        ("{{ messages[0][messages[0].content].y }}", TemplateError, "^UndefinedError$"),
    ],
)
def test_hostile_templates_are_refused_in_bounded_time(text: str, error: type[Exception], message: str) -> None:
    """Neither time nor memory of the caller is at the template's disposal, nor what is told of a row."""
    with pytest.raises(error, match=message):
        ChatTemplate(text, {}, limit_s=1.0 if text == ENDLESS else 30.0).answers([ROW])


def test_rendering_ends_with_its_node() -> None:
    """A killed node leaves no process that renders on."""
    head = {"template": ENDLESS, "variables": {}, "limit_s": 60, "kind": "all"}
    node = (
        "import json, os, subprocess, sys\n"
        "command = [sys.executable, '-P', '-m', 'edge.data.chat_template']\n"
        "render = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)\n"
        f"lines = [json.dumps({{**{head!r}, 'parent': os.getpid()}}), {json.dumps(ROW._asdict())!r}]\n"
        "render.stdin.write('\\n'.join(lines).encode())\n"
        "render.stdin.close()\n"
        "print(render.pid, flush=True)\n"
        "render.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", node], stdout=subprocess.PIPE) as parent:  # noqa: S603 - our own module
        assert parent.stdout is not None
        rendering = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ended, _, _ = select.select([rendering], [], [], 30.0)
    os.close(rendering)
    assert ended


def test_rows_of_all_bunches_are_rendered_in_order() -> None:
    """A failing row is named by its place among all."""
    template = ChatTemplate("{{ raise_exception('no') if messages[0].content == '300' }}{{ messages[0].content }}", {})
    rows = [Conversation(json.dumps([{"role": "user", "content": str(index)}])) for index in range(300)]
    assert [one.text for (one,) in template.whole(rows)] == [str(index) for index in range(300)]
    with pytest.raises(TemplateError, match="TemplateError: no") as caught:
        template.whole([*rows, *[Conversation(json.dumps([{"role": "user", "content": "300"}]))] * 2])
    assert caught.value.row == 300 and "so do 1 more" in str(caught.value)


def test_process_that_does_not_start_is_told_from_a_template_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for a process, or an installation that is broken."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match=r"renders chat templates can't be started \(exit code 1\); free memory"):
        ChatTemplate("x", {}).whole([ROW])
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(ModelError, match=r"renders chat templates can't be started \(No such file"):
        ChatTemplate("x", {}).whole([ROW])


FIRST = "{% if messages[0].role == 'system' %}!{% endif %}"
BODY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>"


@pytest.mark.parametrize(
    ("template", "answers"),
    [(FIRST + BODY + "{% endif %}", ["hi</>", "yes</>"]), (BODY + "<think>{% endif %}", ["hi</>", "yes</>"])],
    ids=["reads the first message", "thinks"],
)
def test_a_first_message_may_be_an_answer(template: str, answers: list[str]) -> None:
    """Also where the template can't render a conversation without messages, and begins an answer with more."""
    roles = {"assistant": "hi", "user": "no", "assistant ": "yes"}
    messages = [{"role": role.strip(), "content": content} for role, content in roles.items()]
    ((found,),) = ChatTemplate(template, {}).answers([Conversation(json.dumps(messages))])
    assert [found.text[start:stop] for start, stop in found.answers] == answers


def test_marks_behind_a_prompt_are_found_where_the_template_begins_an_answer_with_more() -> None:
    """The marks of answers in the prompt are none."""
    marked = (
        BODY.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}") + "<think>{% endif %}"
    )
    messages = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")]
    ((found,),) = ChatTemplate(marked, {}).answers([Conversation(json.dumps(messages), "", 3)])
    assert [found.text[start:stop] for start, stop in found.answers] == ["a"]


def test_prompts_end_where_the_model_answers() -> None:
    """And dates are the same on each day."""
    assert ChatTemplate(TEMPLATES["chatml"], {}).prompts([ROW])[0].endswith("y<|im_end|>\n<|im_start|>assistant\n")
    assert ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).prompts([ROW]) == ["2024-07-26"]
