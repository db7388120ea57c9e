"""``python -m edge.runtime harness JOB SAVED TASKS [DIR]``: evaluate a language model by lm-eval's tasks.

``ringtune eval --harness`` starts it as a process of its own. It prints JSON lines: ``{"done": n}`` after each request,
and at the end ``{"tasks": {task: {figure: value}}}``. What lm-eval prints goes to the log.

A request is a context and a continuation. It is scored by the log-likelihood of the continuation, the sum over its
tokens, each given all tokens before it::

    tokens     c c c c x x x        context, continuation
    logits       . . . 1 2 3        at the token before each of x
    scored             x x x

A context that does not fit is cut at its beginning. With ``--apply-chat-template`` a context is a conversation in the
template of the run, rendered in this process by transformers, as lm-eval does; else it is as the task writes it. Keys
and values of what two requests in a row have in common, as the choices of one question, are kept.

Source: lm-eval 0.4.13, ``lm_eval.api.model`` (``TemplateLM``), ``lm_eval.utils.get_rolling_token_windows``.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO, TypeVar

import torch

from edge.data.chat_template import ChatTemplate
from edge.data.conversations import Conversations
from edge.data.detokenizer import Detokenizer
from edge.data.tokens import load_tokenizer
from edge.machine.libraries import load_libraries
from edge.runtime.inference import Sampling, WholeModel, ends_of_text, next_tokens
from ringtune.errors import DataError, RingTuneError
from ringtune.job.job import Job, load_job
from ringtune.machine.process import exit_code_of
from ringtune.machine.resources import usable_cores
from ringtune.texts import MAX_NAME, printable

T = TypeVar("T")
APPLY_CHAT_TEMPLATE: Final = "--apply-chat-template"
_MAX_TOKENS: Final = 256
"""Of an answer whose task says nothing."""
_COUNTS: Final = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names for the most tokens of an answer; the first that a task has counts."""


class Likelihood(NamedTuple):
    """Of a continuation: the sum of its tokens' log-probabilities, and whether each is the likeliest."""

    log: float
    is_greedy: bool


class HarnessModel:
    """What lm-eval asks of a model, in terms of texts; ``made`` makes it one of lm-eval's.

    Raises ``ModelError``: with ``is_chat``, the model has no chat template.
    """

    def __init__(self, job: Job, saved: Path, tell: Callable[[], object], *, is_chat: bool = False) -> None:
        super().__init__()
        folder = Path(job.model.path)
        self._model, self._tell = WholeModel(job, saved, ()), tell
        self._tokenizer = load_tokenizer(folder)
        self._ends = ends_of_text(folder, self._tokenizer)
        begin = self._tokenizer.bos_token_id
        self._first = self._ends[0] if begin is None and self._ends else begin
        self._template = Conversations(job, folder).template() if is_chat else ChatTemplate("", {})
        self.tokenizer_name = folder.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template that is applied; empty without one."""
        return self._template.text

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Write messages out, up to an answer to them, or the last one, which continues."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            ((text,), _) = render_jinja_template(
                [chat_history],
                chat_template=self._template.text,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._template.variables,
            )
        except TemplateError as error:
            raise DataError(f"the chat template fails for a context ({error}); set data.template") from error
        return str(text)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Likelihood]:
        """Score the continuation of each request (context, continuation)."""
        return self._each(requests, lambda *texts: self._scored(*self._pair(*texts)))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score each text (text,) as a whole; a long one in windows, as lm-eval does."""

        def score(text: str) -> float:
            ids = self._encode(text)  # as lm-eval: a begin token that the tokenizer adds is scored, too
            return sum(self._scored(*pair).log for pair in _windows(ids, self._begin(), self._model.longest))

        return self._each(requests, score)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context (context, settings) up to one of the texts in ``until``."""
        numbers = itertools.count()
        return self._each(requests, lambda context, settings: self._continued(context, settings, next(numbers)))

    def _each(self, requests: Sequence[Any], answer: Callable[..., T]) -> list[T]:
        answers = []
        for request in requests:
            answers.append(answer(*request.args))
            self._tell()
        return answers

    def _continued(self, context: str, settings: dict[str, Any], number: int) -> str:
        until, longest = settings.get("until") or [], self._model.longest
        most = next((settings[name] for name in _COUNTS if settings.get(name) is not None), _MAX_TOKENS)
        count = min(int(most), longest - 1)
        how = Sampling(
            max_new_tokens=count,
            temperature=0.0 if settings.get("do_sample") is False else float(settings.get("temperature") or 0.0),
            top_k=int(settings.get("top_k") or 0),
            top_p=float(settings.get("top_p") or 1.0),
        )
        if how.temperature < 0:
            raise DataError(f"a task draws with temperature {how.temperature:g}; it has to be at least 0")
        ids = (self._encode(context) or [self._begin()])[count - longest :]
        # lm-eval decodes an answer alone: some tokenizers drop the blank at its front
        pieces, text = Detokenizer(self._tokenizer, (), [until] if isinstance(until, str) else until), ""
        for token in next_tokens(ids, self._model.next_logits, how, ends=self._ends, longest=longest, row=number):
            text += pieces.add(token)
            if pieces.is_ended:
                break
        return text + pieces.end()

    def _begin(self) -> int:
        """Return the token before a text without context."""
        if self._first is None:
            raise DataError("the model has no token that begins or ends a text, so that a text alone can't be scored")
        return int(self._first)

    def _encode(self, text: str, *, special: bool = True) -> list[int]:
        """Encode a text; one that has the begin token already gets no other one."""
        begin = self._tokenizer.bos_token
        has_begin = bool(begin) and text.startswith(begin)
        ids = self._tokenizer(text, add_special_tokens=special and not has_begin, verbose=False)["input_ids"]
        if special and ids and ids[-1] in self._ends and not has_begin:
            return list(ids[:-1])  # some tokenizers end each text
        return list(ids)

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode a context with its continuation; blanks between them belong to the continuation."""
        if not context:
            ids = self._encode(continuation, special=False)
            return (ids[:1], ids[1:]) if ids[:1] == [self._begin()] else ([self._begin()], ids)
        stripped = context.rstrip()
        ids, before = self._encode(context + continuation), self._encode(stripped)
        return before or [self._begin()], ids[len(before) :]

    def _scored(self, before: Sequence[int], ids: Sequence[int]) -> Likelihood:
        if not ids:
            return Likelihood(0.0, is_greedy=True)
        count = min(len(ids), self._model.longest)
        given = [*before, *ids][:-1][-self._model.longest :]
        log, is_greedy, start = 0.0, True, len(ids) - count
        for logits_TV in self._model.last_logits(given, count):
            stop = start + len(logits_TV)
            wanted_T, start = torch.tensor(list(ids[start:stop])), stop
            log += float(logits_TV.double().log_softmax(dim=-1).gather(1, wanted_T[:, None]).sum())
            is_greedy = is_greedy and bool((logits_TV.argmax(dim=-1) == wanted_T).all())
        return Likelihood(log, is_greedy)


def _windows(ids: Sequence[int], begin: int, longest: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Divide a text into pieces of ``longest`` tokens, each with as much before it as fits with it, at least one token.

    Example: 0 to 9, longest 4: (begin; 0 to 3), (3; 4 to 7), (5 to 7; 8 and 9).
    """
    for start in range(0, len(ids), longest):
        piece = ids[start : start + longest]
        yield (ids[max(0, start + len(piece) - longest - 1) : start] if start else [begin]), piece


def made(base: type, job: Job, saved: Path, tell: Callable[[], object], *, is_chat: bool) -> Any:
    """Make a model of lm-eval's class ``base``."""
    return type("RingTuneModel", (HarnessModel, base), {"tokenizer_name": ""})(job, saved, tell, is_chat=is_chat)


def results(
    job: Job, saved: Path, tasks: Sequence[str], folder: Path | None, tell: Callable[[], object], *, is_chat: bool
) -> Any:
    """Evaluate on tasks of lm-eval, or of ``folder``; return figures by task; raises ``DataError``."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    model = made(LM, job, saved, tell, is_chat=is_chat)
    manager = TaskManager(include_path=None if folder is None else str(folder))
    if folder is not None:
        os.chdir(folder)  # files that its tasks name
    try:
        evaluated = simple_evaluate(
            model=model, tasks=list(tasks), task_manager=manager, log_samples=False, apply_chat_template=is_chat
        )
        named = evaluated["results"].items()
        return {
            str(name): {str(key): figure(value) for key, value in scores.items() if key != "alias"}
            for name, scores in named
        }
    except RingTuneError:
        raise
    except (Exception, SystemExit) as error:
        what = f"lm-eval: {type(error).__name__}: {error}"
        raise DataError(f"{what}; look whether it knows the tasks ('lm-eval ls tasks'), and has their data") from error


def figure(value: Any) -> float | str | None:
    """Make a figure of lm-eval one of JSON: a number, also of numpy's types, None if it is not finite, or a text."""
    value = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    if isinstance(value, int | float):
        return value if abs(value) <= sys.float_info.max else None
    return printable(str(value), most=MAX_NAME)


def main(arguments: Sequence[str], output: TextIO) -> int:
    """Evaluate and write lines; return the exit code."""
    job_file, saved, tasks, *folder = (word for word in arguments if word != APPLY_CHAT_TEMPLATE)
    is_chat = APPLY_CHAT_TEMPLATE in arguments
    count = 0

    def tell() -> None:
        nonlocal count
        count += 1
        write({"done": count})

    def write(line: dict[str, Any]) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    def evaluate() -> None:
        job = load_job(Path(job_file))
        load_libraries()
        torch.set_num_threads(job.runtime.threads or usable_cores())
        where = Path(folder[0]) if folder else None
        write({"tasks": results(job, Path(saved), tasks.split(","), where, tell, is_chat=is_chat)})

    return exit_code_of(evaluate)
