r"""``python -m edge.runtime text_process JOB SAVED PARENT``: continue texts and answer conversations on request.

``ringtune chat`` and ``ringtune serve`` start it as a process of its own, because commands run without torch. Requests
and events are JSON objects, a line each; one request is answered after the other::

    in    {"id": 1, "messages": [...], "max_new_tokens": 200, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "seed": 3,
           "stops": ["\n\n"], "may_forget": true, "seconds": 600}
                                                        a conversation; or "prompt": a text to continue
          {"stop": 1}                                   end answer 1 at its next token
    out   {"ready": {"has_template": true, "longest": 2048, "cache_bytes": 94371840, ...}}
          {"id": 1, "began": {"prompt_tokens": 12, "forgotten": 0}}
          {"id": 1, "piece": "Hel"}                     after each token, and each part of a long text that is read;
                                                        also an empty one, so that who waits knows it, or leaves
          {"id": 1, "ended": {"why": "end" | "length" | "stopped", "tokens": 5}}
          {"id": 1, "refused": "the conversation has 2,100 tokens, ..."}

Where a conversation grows beyond the model's longest text and may be forgotten, the oldest turns are left out, all but
the system message, until a quarter of the text (or what is to be generated) is free. ``forgotten`` counts messages.

The process ends with its input.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import torch

from edge.data.detokenizer import Detokenizer, Ends
from edge.data.tokens import RowFaultError, load_tokenizer, prompt_ids
from edge.machine.libraries import load_libraries
from edge.runtime.answer_ends import answer_ends, conversations_of
from edge.runtime.inference import Sampling, WholeModel, ends_of_text, model_sampling, next_tokens, unused_settings
from ringtune.errors import DataError, RingTuneError
from ringtune.job.job import Job, load_job
from ringtune.machine.process import die_with_parent, exit_code_of, keep_input
from ringtune.machine.resources import usable_cores
from ringtune.models.conversations import Conversation, conversation_of
from ringtune.storage.tables import RowError, checked_text

Request = Mapping[str, Any]
Event = dict[str, Any]
_FREE: Final = 4
"""An answer has at least the longest text divided by so much, if it needs that."""
_LEAST: Final = 64
_AT_ONCE: Final = 256
"""Tokens of a text that are read at once."""
_USED: Final = ("temperature", "do_sample", "top_k", "top_p")


class TextModel:
    """A trained language model that answers requests.

    Attributes:
        ready: facts for who asks: ``has_template``; ``longest`` and ``cache_bytes`` of a text, whose keys and values
            take at most half of the memory that is free, and ``reads``, what the model could read; its own
            ``temperature``; and ``told``, a note on settings that are not used.

    Raises:
        RingTuneError: as ``WholeModel``, or the run learned conversations and its model has no chat template.
    """

    def __init__(self, job: Job, saved: Path) -> None:
        folder = Path(job.model.path)
        self._model = WholeModel(job, saved, ())
        self._tokenizer = load_tokenizer(folder)
        self._sampling = model_sampling(folder)
        self._ends = Ends(ends_of_text(folder, self._tokenizer))
        self._source = conversations_of(job, folder)
        self._answer_ends = answer_ends(folder, self._tokenizer, self._source)
        self._longest = _longest_within(self._model.free_bytes() // 2, self._model)
        remedy = "temperature, top_k, top_p and seed say it all"
        self.ready: Event = {
            "has_template": self._source is not None,
            "longest": self._longest,
            "reads": self._model.longest,
            "cache_bytes": self._model.cache_bytes(self._longest),
            "temperature": self._sampling.temperature,
            "told": unused_settings(folder, remedy=remedy, used=_USED),
        }

    def events(self, request: Request, is_stopped: Callable[[], bool]) -> Iterator[Event]:
        """Yield what happens to a request: ``refused``, or ``began``, pieces, and ``ended``."""
        try:
            ids, forgotten, ends = self._prompt(request)
        except RowError as error:
            yield {"refused": f"{error.problem.what}; {error.problem.remedy}"}
            return
        except (RingTuneError, RowFaultError) as error:
            yield {"refused": str(error)}
            return
        room = self._longest - len(ids)
        yield {"began": {"prompt_tokens": len(ids), "forgotten": forgotten}}
        how = self._how(request, room)
        pieces, num_tokens, why = Detokenizer(self._tokenizer, ids, ends.stops), 0, "end"
        end_s = time.monotonic() + request.get("seconds", math.inf)
        for _ in self._model.read(ids, _AT_ONCE):
            yield {"piece": ""}
            if is_stopped() or time.monotonic() > end_s:
                how = how._replace(max_new_tokens=0)
                break
        is_begun = "prompt" in request  # templates differ in the blank before an answer
        for token in next_tokens(ids, self._model.next_logits, how, ends=ends.tokens, longest=self._longest):
            num_tokens += 1
            piece = pieces.add(token) if is_begun else pieces.add(token).lstrip()
            is_begun = is_begun or bool(piece)
            yield {"piece": piece}
            if pieces.is_ended:
                break
            if is_stopped() or time.monotonic() > end_s:
                why = "stopped" if is_stopped() else "length"
                break
        else:
            why = "length" if num_tokens == how.max_new_tokens else "end"
        if piece := pieces.end() if is_begun else pieces.end().lstrip():
            yield {"piece": piece}
        yield {"ended": {"why": why, "tokens": num_tokens}}

    def _how(self, request: Request, room: int) -> Sampling:
        """Return what the request says of the draws, else what the model says."""
        given = {key: request[key] for key in ("temperature", "top_k", "top_p") if request.get(key) is not None}
        count = min(int(request["max_new_tokens"]), room)
        return self._sampling._replace(max_new_tokens=count, seed=int(request["seed"]), **given)

    def _prompt(self, request: Request) -> tuple[list[int], int, Ends]:
        """Return the tokens of a request that fit, the number of messages left out, and what ends the answer.

        Raises:
            DataError: too long, or empty.
            RowError, RowFaultError, ModelError: the messages are none, the template refuses them, or a token has no
                embedding.
        """
        stops, may_forget = tuple(request.get("stops", ())), bool(request.get("may_forget"))
        needed = min(int(request["max_new_tokens"]), self._longest // _FREE) if may_forget else 1
        most = self._longest - max(needed, 1)
        if "prompt" in request:
            text = checked_text(request["prompt"], "the prompt")
            ids, forgotten, ends = prompt_ids(self._tokenizer, text), 0, self._ends
            ids = ids[-most:] if may_forget else ids
        elif self._source is None:
            raise DataError("the model has no chat template, so that it only continues texts; send a prompt")
        else:
            ids, forgotten = self._conversation(request, most, may_forget=may_forget)
            ends = self._answer_ends
        if not ids:
            raise DataError("the text has no token to go on from; give it a word")
        if len(ids) >= self._longest:
            what = "text" if "prompt" in request else "conversation"
            raise DataError(
                f"the {what} has {len(ids):,} tokens, and the model reads at most {self._longest:,} with its "
                "answer; shorten it"
            )
        self._model.check_ids(ids)
        return ids, forgotten, Ends(ends.tokens, (*ends.stops, *stops))

    def _conversation(self, request: Request, most: int, *, may_forget: bool) -> tuple[list[int], int]:
        """Return the tokens of the newest turns, as many as fit into ``most``, at least one, and what is left out."""
        messages: list[Any] = request["messages"]
        (ids,) = self._encoded([messages])
        if len(ids) <= most or not may_forget:
            return ids, 0
        forgotten, shorter = 0, list(_shorter(messages))
        for kept, ids in zip(shorter, self._encoded(shorter), strict=True):
            forgotten = len(messages) - len(kept)
            if len(ids) <= most:
                break
        return ids, forgotten

    def _encoded(self, several: Sequence[list[Any]]) -> list[list[int]]:
        if self._source is None or not several:
            return []
        rows = [conversation_of((1, {"messages": messages}), with_answer=False)[0] for messages in several]
        return self._source.prompts([row for row in rows if isinstance(row, Conversation)])


def _longest_within(limit_bytes: int, model: WholeModel) -> int:
    """Return the number of tokens of the longest text whose keys and values fit; at least ``_LEAST``."""
    if model.cache_bytes(model.longest) <= limit_bytes:
        return model.longest
    fits = bisect.bisect_right(range(model.longest), limit_bytes, key=model.cache_bytes) - 1
    return min(max(fits, _LEAST), model.longest)


def _shorter(messages: list[Any]) -> Iterator[list[Any]]:
    """Yield the conversation without its oldest turns: one, two, and so on; a turn begins with a user's message."""
    head = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    begins = [at for at, message in enumerate(messages) if message["role"] == "user" and at >= head]
    yield from (messages[:head] + messages[at:] for at in begins[1:])


def main(arguments: Sequence[str], output: TextIO) -> int:
    """Load the model, and answer requests until the input ends; return the exit code."""
    job_file, saved, parent = arguments
    if not die_with_parent(int(parent)):
        return 1

    def write(event: Event) -> None:
        output.write(json.dumps(event) + "\n")
        output.flush()

    def answer() -> None:
        job, own_input = load_job(Path(job_file)), keep_input()
        load_libraries()
        torch.set_num_threads(job.runtime.threads or usable_cores())
        model = TextModel(job, Path(saved))
        write({"ready": model.ready})
        asked = _Requests()
        threading.Thread(target=asked.read, args=(own_input,), name="requests", daemon=True).start()
        while (request := asked.queue.get()) is not None:
            number = int(request["id"])
            for event in model.events(request, lambda number=number: asked.last_stopped >= number):  # type: ignore[misc]
                write({"id": number, **event})

    return exit_code_of(answer)


class _Requests:
    """Requests by increasing number, each sent when the one before has ended.

    Attributes:
        last_stopped: the newest request that was asked to end; all, once the input has ended.
    """

    def __init__(self) -> None:
        self.queue: queue.Queue[Any] = queue.Queue()
        self.last_stopped = -math.inf

    def read(self, own_input: int) -> None:
        """Pass requests on until the input ends."""
        with os.fdopen(own_input, encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                if "stop" in message:
                    self.last_stopped = int(message["stop"])
                else:
                    self.queue.put(message)
        self.last_stopped = math.inf
        self.queue.put(None)
