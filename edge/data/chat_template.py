r"""Chat templates, rendered by jinja2 in a process of their own with limits of time and memory.

A template is a program that came with a model. As in transformers it runs in jinja's immutable sandbox, which reaches
no file and no attribute of Python; but nothing there ends ``{% for %}`` in ``{% for %}``, or a string that doubles.
So each bunch of conversations is rendered by ``python -m edge.data.chat_template``, which has ``LIMIT_S`` seconds of
processor time and ``_MEMORY_BYTES``; what is slower or larger is refused, by the row of a conversation if that is so
alone. Processor time, as a template can't wait, and a busy board is no reason to refuse one; the caller waits
``_WAITS`` times as long.

The answers of a conversation are found by what they add. With U, A the messages of user and assistant:

    render(U A U A)                    <|im_start|>user ... <|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user ...
    render(U) + generation prompt      <|im_start|>user ... <|im_start|>assistant\n
    render(U A)                        <|im_start|>user ... <|im_start|>assistant\nyes<|im_end|>\n
    answer                                                                        [yes<|im_end|>\n)

Where a template shows an answer otherwise once others follow, as Qwen3 drops its thoughts, ``render(U A)``
is no beginning of the whole: such an answer becomes an example of its own, of what the model sees when it gives it. A
template with ``{% generation %}`` says itself what the model writes.

The reason of a template that refuses a conversation goes to the coordinator, and a template can write a row into it. So
it is told where it stands in the template, or is jinja's on a name that does; else only the kind of error.

``strftime_now`` gives one fixed date: the tokens of a row are the same on each day, also after a resume.

Source: transformers 4.57, ``utils/chat_template_utils.py``; trl 0.24, ``SFTTrainer`` (prompt-completion rows).
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from ringtune.errors import ModelError
from ringtune.machine.process import die_with_parent
from ringtune.models.conversations import ASSISTANT, Conversation

LIMIT_S: Final = 60.0
_WAITS: Final = 10
_MEMORY_BYTES: Final = 512 << 20
_WRITTEN_BYTES: Final = 1 << 25
_ROWS_AT_ONCE: Final = 256
_WORK_AT_ONCE: Final = 1 << 22  # characters that are rendered
_REASON_LENGTH: Final = 300
_ON_NAMES: Final = re.compile(
    r"'(\w+)' is undefined|'\w+ object' has no attribute '(\w+)'|\w+ object has no element (\d+)|"
    r"access to attribute '(\w+)' of '\w+' object is unsafe\."
)
_READY: Final = b'{"ready": true}\n'
_NO_PROCESS: Final = "the process that renders chat templates can't be started"
_NO_PROCESS_REMEDY: Final = "free memory, or look after the installation with ringtune doctor"
_ANY_TEXT: Final = "\ufffc"
_TODAY: Final = datetime(2024, 7, 26)

Span = tuple[int, int]


class Rendered(NamedTuple):
    """A rendered conversation, or one of its answers with what precedes it.

    Attributes:
        text: with special tokens written out.
        answers: half-open ranges of characters that the model is to write, with what ends them.
    """

    text: str
    answers: tuple[Span, ...] = ()


class TemplateError(Exception):
    """Conversations that the template can't render: index of the first one, its reason, and how many more."""

    def __init__(self, row: int, reason: str, more: int) -> None:
        super().__init__(f"{reason}{f'; so do {more:,} more' if more else ''}")
        self.row = row


class ChatTemplate:
    """A template with its variables.

    Args:
        variables: names of special tokens -> their texts.
        limit_s: seconds of processor time for one bunch of conversations.
    """

    def __init__(self, text: str, variables: Mapping[str, str], *, limit_s: float = LIMIT_S) -> None:
        self.text, self.variables = text, dict(variables)
        self._head = {"template": text, "variables": self.variables, "limit_s": limit_s}
        self._limit_s = limit_s

    def answers(self, conversations: Sequence[Conversation]) -> list[list[Rendered]]:
        """Render each conversation with its answers marked: one text, and one for each answer that needs its own.

        Raises:
            TemplateError: the template refuses a conversation, rewrites messages, or takes too long or too much memory
                for it.
            ModelError: the template is none, or its process can't be started.
        """
        return self._rendered(conversations, "answers")

    def prompts(self, conversations: Sequence[Conversation]) -> list[str]:
        """Render each conversation with the beginning of an answer to it; raises as ``answers``."""
        return [texts[0].text for texts in self._rendered(conversations, "prompt")]

    def whole(self, conversations: Sequence[Conversation]) -> list[list[Rendered]]:
        """Render each conversation, all of it marked; raises as ``answers``."""
        return self._rendered(conversations, "all")

    def _rendered(self, conversations: Sequence[Conversation], kind: str) -> list[list[Rendered]]:
        rendered: list[list[Rendered]] = []
        errors: dict[int, str] = {}
        for bunch in _bunches(conversations):
            for line in self._asked(bunch, kind, len(rendered)):
                if "error" in line:
                    errors[len(rendered)] = line["error"]
                rendered.append([Rendered(text, tuple(map(tuple, spans))) for text, spans in line.get("found", ())])
        for row, reason in errors.items():
            raise TemplateError(row, reason, len(errors) - 1)
        return rendered

    def _asked(self, bunch: Sequence[Conversation], kind: str, first: int) -> list[dict[str, Any]]:
        """Return a line for each conversation; one that is too much alone is refused by its row."""
        lines = self._ask(bunch, kind)
        row = len(lines)
        if row == len(bunch):
            return lines
        if len(bunch) == 1 or not self._ask(bunch[row : row + 1], kind):
            raise TemplateError(first + row, f"it was stopped: {self._limits}", 0)
        raise ModelError(f"the chat template was stopped: {self._limits}; set data.template")

    def _ask(self, bunch: Sequence[Conversation], kind: str) -> list[dict[str, Any]]:
        """Return the lines of one process, fewer than conversations where it was stopped."""
        head = {**self._head, "kind": kind, "parent": os.getpid()}
        lines = [json.dumps(head), *(json.dumps(conversation._asdict()) for conversation in bunch)]
        command = [sys.executable, "-P", "-m", "edge.data.chat_template"]
        try:
            done = subprocess.run(  # noqa: S603 - our own module
                command,
                input="\n".join(lines).encode(),
                capture_output=True,
                timeout=_WAITS * self._limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
        except OSError as error:
            raise ModelError(f"{_NO_PROCESS} ({error.strerror}); {_NO_PROCESS_REMEDY}") from error
        else:
            output = done.stdout
            if not output.startswith(_READY):
                said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
                raise ModelError(f"{_NO_PROCESS} ({said[-1][:_REASON_LENGTH]}); {_NO_PROCESS_REMEDY}")
        answers: list[dict[str, Any]] = [json.loads(line) for line in output.split(b"\n")[1:-1]]
        if answers and "refused" in answers[0]:
            raise ModelError(f"the chat template can't be used ({answers[0]['refused']}); set data.template")
        return answers

    @property
    def _limits(self) -> str:
        return (
            f"it may take {self._limit_s:g} s of processor time, {_MEMORY_BYTES >> 20} MiB and write "
            f"{_WRITTEN_BYTES >> 20} MiB for {_ROWS_AT_ONCE} conversations at most"
        )


def _bunches(conversations: Sequence[Conversation]) -> Iterator[list[Conversation]]:
    """Divide conversations; one of n answers is rendered some n times."""
    bunch, work = list[Conversation](), 0
    for conversation in conversations:
        cost = (len(conversation.messages) + len(conversation.tools)) * max(
            1, conversation.messages.count(f'"{ASSISTANT}"')
        )
        if bunch and (len(bunch) == _ROWS_AT_ONCE or work + cost > _WORK_AT_ONCE):
            yield bunch
            bunch, work = [], 0
        bunch.append(conversation)
        work += cost
    if bunch:
        yield bunch


# ---- inside the process -------------------------------------------------------------------------------

Render = Callable[[list[Any], bool], Rendered]
"""Renders messages, with or without the beginning of an answer; marked is what ``{% generation %}`` has around it."""


def main() -> int:
    """Read a template and conversations from standard input, a JSON line each; write what is rendered, in lines."""
    head = json.loads(sys.stdin.readline())
    if not die_with_parent(head["parent"]):
        return 1
    _, most_bytes = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, most_bytes))
    seconds = math.ceil(time.process_time() + head["limit_s"])  # a slow board may take long to start
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    try:
        template, marks = _compiled(head["template"])
    except Exception as error:
        sys.stdout.buffer.write(json.dumps({"refused": _reason(error, str(error))}).encode() + b"\n")
        return 0
    ways = {"answers": _marked, "all": _all_marked, "prompt": _prompt}
    left = _WRITTEN_BYTES
    for line in sys.stdin:
        conversation = Conversation(**json.loads(line))
        tools = json.loads(conversation.tools) if conversation.tools else None

        def render(messages: list[Any], prompt: bool, tools: Any = tools) -> Rendered:
            marks.clear()
            given = {"tools": tools, "documents": None, "add_generation_prompt": prompt, **head["variables"]}
            blocks = marks.blocks = list[str]()
            for block in template.generate(messages=messages, **given):
                blocks.append(block)
            return Rendered("".join(blocks), tuple(marks.spans))

        try:
            texts = ways[head["kind"]](render, json.loads(conversation.messages), conversation.learned_from)
            written = json.dumps({"found": texts}, ensure_ascii=False).encode()
        except Exception as error:
            written = json.dumps({"error": _reason(error, head["template"])}).encode()
        left -= len(written)
        if left < 0:
            return 1
        sys.stdout.buffer.write(written + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _prompt(render: Render, messages: list[Any], _: int) -> list[Rendered]:
    return [render(messages, True)]


def _all_marked(render: Render, messages: list[Any], _: int) -> list[Rendered]:
    text = render(messages, False).text
    return [Rendered(text, ((0, len(text)),))]


def _marked(render: Render, messages: list[Any], learned_from: int) -> list[Rendered]:
    """Mark the answers by what they add; see the docstring of the module."""
    whole = render(messages, False)
    if whole.answers:
        before = render(messages[:learned_from], False).text if learned_from else ""
        first = _common(before, whole.text)
        return [whole._replace(answers=tuple(span for span in whole.answers if span[0] >= first))]
    inside, alone = list[Span](), list[Rendered]()
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT or index < learned_from:
            continue
        after = render(messages[: index + 1], False).text if index + 1 < len(messages) else whole.text
        span = (_start(render, messages[: index + 1], after), len(after))
        if whole.text.startswith(after):
            inside.append(span)
        else:
            alone.append(Rendered(after, (span,)))
    return [*([Rendered(whole.text, tuple(inside))] if inside else []), *alone]


def _start(render: Render, messages: list[Any], after: str) -> int:
    """Return where the last message, an answer, begins in the text ``after``: behind the prompt for it.

    The prompt may be more than the text has, as ``<think>`` before an answer without thoughts: then behind what both
    have in common. Many templates read the first message, and can't render none: then what precedes a first answer is
    what stays with another content.
    """
    *before, answer = messages
    try:
        prompt = render(before, True).text
    except Exception:
        if before:
            raise
        return _common(render([{**answer, "content": _ANY_TEXT}], False).text, after)
    if after.startswith(prompt):
        return len(prompt)
    plain = render(before, False).text
    if not after.startswith(plain):
        raise RewrittenError
    return max(_common(prompt, after), len(plain))


def _common(first: str, second: str) -> int:
    """Length of the beginning that two texts have in common."""
    return len(os.path.commonprefix([first, second]))  # noqa: RUF071 - of texts, not of paths


class RewrittenError(Exception):
    """An answer can't be told apart."""

    def __str__(self) -> str:
        return (
            "it rewrites earlier messages when an answer follows, so that answers can't be told apart; if that is the "
            "system message, write it into the first question"
        )


def _reason(error: Exception, known: str) -> str:
    """Describe an error: the kind alone, where what it says is not in the text ``known`` and may be that of a row."""
    kind, said = type(error).__name__, " ".join(str(error).split())
    if isinstance(error, RewrittenError):
        return said
    on_name = _ON_NAMES.fullmatch(said)
    told = on_name.group(on_name.lastindex or 0) if on_name else said
    return f"{kind}: {said}"[:_REASON_LENGTH] if told and told in " ".join(known.split()) else kind


class _Marks:
    """Ranges of characters inside ``{% generation %}``, of the text that is being rendered."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self.spans: list[Span] = []

    def clear(self) -> None:
        """Begin a text."""
        self.blocks, self.spans = [], []

    def add(self, text: str) -> str:
        """Note a text that follows the blocks so far."""
        start = sum(map(len, self.blocks))
        self.spans.append((start, start + len(text)))
        return text


def _compiled(text: str) -> tuple[Any, _Marks]:
    """Compile a template as transformers does."""
    import jinja2.ext
    import jinja2.sandbox
    from jinja2 import nodes

    marks = _Marks()

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_generated"), [], [], body).set_lineno(line)

        def _generated(self, caller: Callable[[], str]) -> str:
            return marks.add(caller())

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment.from_string(text), marks


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **how: Any) -> str:
    """Write JSON without the escapes of HTML that jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.exceptions.TemplateError(message)


if __name__ == "__main__":
    sys.exit(main())
