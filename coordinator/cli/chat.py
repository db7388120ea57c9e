"""``ringtune chat``: talk to the language model of a run in the terminal."""

from __future__ import annotations

import json as json_module
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ringtune import options
from ringtune.texts import inert

if TYPE_CHECKING:
    from coordinator.web.completions import Answering

MAX_CHARACTERS: Final = 1 << 20


def chat(
    folder: options.RunFolder,
    system: Annotated[
        str, typer.Option("--system", metavar="TEXT", help="System message at the front of the conversation.")
    ] = "",
    model: options.ModelFolder = None,
    user: options.User = "",
    max_new_tokens: options.MaxNewTokens = 512,
    temperature: options.Temperature = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, max=(1 << 31) - 1, help="Random seed of the answers. Default: a new one."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Talk to the language model of a run: each line is a message, and the answer appears token by token.

    /reset begins a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer. Without a terminal each line of the
    input is answered in turn, until Ctrl-C. A model without a chat template continues each line. Without --temperature
    the model's generation_config.json decides. The computation is in one process on this machine.
    """
    import random
    from contextlib import ExitStack

    from coordinator.api.text_process import TextProcess
    from coordinator.client.saved_run import read_run
    from coordinator.screen.progress import WaitNotice

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not json
    chosen = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    how = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": chosen}
    process = TextProcess(read_run(folder), model=model, user=user)
    signal.signal(signal.SIGTERM, _end)
    with ExitStack() as stack:
        with WaitNotice(f"loading the model of {folder}"):
            stack.enter_context(process)
        for line in process.ready.lines():
            options.echo(line, err=True)
        talk = ChatSession(process, how, system, show=_nothing if json else _show)
        for line in _typed() if is_terminal else _piped():
            said = talk.take(line, is_lenient=is_terminal)
            if said is None:
                return
            if json and said:
                options.echo(json_module.dumps({"event": "answer", **said}))


class ChatSession:
    """A conversation, or with a model without template texts that are continued.

    Args:
        how: ``max_new_tokens``, ``temperature`` (None = the model's), and ``seed``, which counts up by answers.
        show: gets the pieces of answers, free of characters that a terminal obeys.

    Attributes:
        messages: so far, as a template takes them.
    """

    def __init__(
        self, process: Answering, how: Mapping[str, Any], system: str, *, show: Callable[[str], object]
    ) -> None:
        from ringtune.errors import UsageError

        self._process, self._how, self._show, self._turns = process, how, show, 0
        self._head = [{"role": "system", "content": system}] if system else []
        if system and not process.ready.has_template:
            raise UsageError("the model has no chat template, so that --system has no place; leave it out")
        self.messages = list(self._head)

    def take(self, line: str, *, is_lenient: bool) -> dict[str, Any] | None:
        """Answer a line, or obey it; return the answer with its counts, nothing for other lines, None at the end.

        Where ``is_lenient``, Ctrl-C stops the answer, which stays in the conversation as far as it went, and a line
        that can not be answered is told, and forgotten; else it raises ``DataError``.
        """
        from ringtune.errors import DataError

        line = line.rstrip("\n")
        if line.strip() in ("/exit", "/quit"):
            return None
        if line.strip() == "/reset":
            self.messages = list(self._head)
            self._tell("a new conversation")
            return {}
        if not line.strip():
            return {}
        if len(line) > MAX_CHARACTERS:
            raise DataError(f"a line has {len(line):,} characters, at most {MAX_CHARACTERS:,} are read; shorten it")
        try:
            return self._answered(line, is_lenient=is_lenient)
        except DataError as error:
            if not is_lenient:
                raise
            self._tell(str(error))
            return {}

    def _answered(self, line: str, *, is_lenient: bool) -> dict[str, Any]:
        from coordinator.api.text_process import without_oldest
        from ringtune.errors import DataError

        question, told, self._turns = {"role": "user", "content": line}, "", self._turns + 1
        what = {"messages": [*self.messages, question]} if self._process.ready.has_template else {"prompt": line}
        seed = (self._how["seed"] + self._turns - 1) % (1 << 31)
        answer: dict[str, Any] = {"text": "", "tokens": 0, "why": "stopped", "forgotten": 0}
        try:
            for event in self._process.answer({**what, **self._how, "seed": seed, "may_forget": True}):
                if "refused" in event:
                    raise DataError(event["refused"])
                if "piece" in event:
                    answer["text"] += event["piece"]
                    self._show(inert(event["piece"]))
                answer |= event.get("began", {}) | event.get("ended", {})
        except KeyboardInterrupt:
            if not is_lenient:
                raise
            told = "stopped"
        self._show("\n")
        if forgotten := answer["forgotten"]:
            self.messages = without_oldest(self.messages, forgotten)
            told = f"the conversation no longer fits: its {forgotten} oldest messages were left out"
        if answer["why"] == "length":
            told = told or "the answer was cut: --max-new-tokens, or the longest text of the model"
        if "messages" in what and answer["text"].strip():
            self.messages += [question, {"role": "assistant", "content": answer["text"].strip()}]
        elif not answer["text"].strip():
            told = told or "the answer is empty: the model's first token was that of the end"
        if told:
            self._tell(told)
        return answer

    def _tell(self, text: str) -> None:
        options.echo(f"({text})", err=True)


def _end(*_: object) -> None:
    """End by SIGTERM like by Ctrl-C at another command: Ctrl-C stops only an answer here."""
    from ringtune.errors import InterruptedRunError

    raise InterruptedRunError("stopped by SIGTERM")


def _nothing(_: str) -> None:
    """Show nothing of an answer that is printed as a whole."""


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _typed() -> Iterator[str]:
    """Yield the lines typed at a terminal; Ctrl-C at the prompt drops the line, Ctrl-D ends."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then edits lines
    options.echo("/reset begins a new conversation, Ctrl-C stops an answer, Ctrl-D ends", err=True)
    while True:
        try:
            yield input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")


def _piped() -> Iterator[str]:
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8", errors="replace")
    yield from sys.stdin
