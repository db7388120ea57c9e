"""A trained language model behind the API of OpenAI, on one machine, to try a result.

::

    GET   /v1/models, /v1/models/NAME   the one model, named as the folder of its run
    POST  /v1/chat/completions          answers a conversation; with "stream": true as server-sent events
    POST  /v1/completions               continues a text

One request is answered at a time; ``MAX_WAITING`` others wait, more get 429. Who leaves ends the answer. Of what the
API knows, that which would change an answer and is not built is refused by its name; the rest is ignored.

On loopback a request needs a name of this machine in ``Host`` and, if it has an ``Origin``, in that: a foreign web page
may point its own name here (DNS rebinding), or send a form. Elsewhere a token is needed.

Source: OpenAI, API reference, chat and completions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.web.app import http_server, json_body
from coordinator.web.server import bound
from ringtune.errors import ConnectionFailedError, RingTuneError
from ringtune.texts import shown
from ringtune.transport.endpoints import is_loopback, join_address, split_address
from ringtune.transport.page_access import Guard

_LOG = logging.getLogger(__name__)
MAX_BODY_BYTES: Final = 1 << 20
MAX_WAITING: Final = 8
QUEUE_S: Final = 60.0
ANSWER_S: Final = 600.0
"""An answer is cut after so many seconds, with ``finish_reason`` length."""
MAX_NEW_TOKENS: Final = 4096
_MAX_STOPS, _MAX_STOP = 4, 256
SEND_S: Final = 20.0
"""All the time that an answer waits for its reader; then it ends."""
_LOOK_S: Final = 0.5
"""Between two looks whether a client that waits has left, so that others can have its place."""
_START_S, _END_S = 60.0, 5.0
_LOGGED: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "audio": (),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Field that would change an answer and is not built -> values that change nothing; null is always one."""


class ProblemError(Exception):
    """A request that is refused.

    Args:
        message: what is wrong, and the remedy.
        status: of HTTP.
        param: the field, if it is about one.
        code: of OpenAI's API.
    """

    def __init__(self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


class Answering(Protocol):
    """What answers requests; see ``coordinator.api.text_process.TextProcess``."""

    @property
    def ready(self) -> Any:
        """Facts of the model."""

    def answer(self, request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the events of a request; closing ends the answer."""


class ReadRequest(NamedTuple):
    """A request that was read.

    Attributes:
        request: for the process.
        has_stream: whether pieces are sent as they come.
        has_usage: whether a stream ends with the counts.
    """

    request: Mapping[str, Any]
    has_stream: bool
    has_usage: bool


def asked_of(body: Any, name: str, *, is_chat: bool, has_template: bool) -> ReadRequest:
    """Read the body of a request for the model ``name``; raises ``ProblemError``."""
    if not isinstance(body, dict):
        raise ProblemError("the body has to be a JSON object")
    given = {key: value for key, value in body.items() if value is not None}
    if (model := given.get("model", name)) != name:
        raise _no_model(shown(model) if isinstance(model, str) else "it", name, param="model")
    for field, values in _NEUTRAL.items():
        if field in given and given[field] not in values:
            raise ProblemError(f"{field} is not built here; leave it out", param=field, code="unsupported_parameter")
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise ProblemError("stream_options has to be an object", param="stream_options")
    limit = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    request = {
        **(_messages(given, has_template=has_template) if is_chat else _prompt(given)),
        "max_new_tokens": _number(given, limit, MAX_NEW_TOKENS if is_chat else 16, 1, 1 << 31, whole=True),
        "temperature": _number(given, "temperature", None, 0, 2),
        "top_p": _number(given, "top_p", None, 0, 1),
        "top_k": _number(given, "top_k", None, 0, 1 << 31, whole=True),
        "seed": _number(given, "seed", random.SystemRandom().randrange(1 << 31), -(1 << 63), 1 << 63, whole=True),
        "stops": _stops(given.get("stop", [])),
        "seconds": ANSWER_S,
    }
    request["max_new_tokens"] = min(request["max_new_tokens"], MAX_NEW_TOKENS)
    request["seed"] %= 1 << 31
    return ReadRequest(request, _flag(given, "stream"), _flag(options, "include_usage"))


def _no_model(model: str, name: str, *, param: str | None = None) -> ProblemError:
    words = f"the model {model} is not here; this server has {name!r}"
    return ProblemError(words, 404, param=param, code="model_not_found")


def _messages(given: Mapping[str, Any], *, has_template: bool) -> dict[str, Any]:
    if not has_template:
        raise ProblemError("the model has no chat template, so that it only continues texts; use /v1/completions")
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ProblemError("messages has to be a list with at least one message", param="messages")
    known = [
        {**entry, "role": "system"} if isinstance(entry, dict) and entry.get("role") == "developer" else entry
        for entry in messages
    ]
    return {"messages": known}


def _prompt(given: Mapping[str, Any]) -> dict[str, Any]:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise ProblemError("prompt has to be one text that is not empty", param="prompt")
    return {"prompt": prompt}


def _number(
    given: Mapping[str, Any], field: str, default: float | None, least: float, most: float, *, whole: bool = False
) -> Any:
    value = given.get(field, default)
    if value is None:
        return None
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise ProblemError(f"{field} has to be {kind} in [{least:,}, {most:,}]", param=field)
    return value


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and 0 < len(stop) <= _MAX_STOP for stop in stops):
        raise ProblemError(f"stop has to be a text of at most {_MAX_STOP} characters, or a list of them", param="stop")
    if len(stops) > _MAX_STOPS:
        raise ProblemError(f"stop has {len(stops)} texts, at most {_MAX_STOPS} are looked for", param="stop")
    return stops


def _flag(given: Mapping[str, Any], field: str) -> bool:
    if not isinstance(value := given.get(field, False), bool):
        raise ProblemError(f"{field} has to be true or false", param=field)
    return value


class Completions:
    """The handlers of the API, for one model.

    Attributes:
        lost: error of the process that answers, once it has ended.
    """

    def __init__(self, process: Answering, name: str) -> None:
        self._process, self._name = process, name
        self._began = int(time.time())
        self._turn, self._waiting = asyncio.Lock(), 0
        self.lost: RingTuneError | None = None

    async def models(self, _: Request) -> Response:
        """List the model."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Describe the model."""
        if (name := request.path_params["name"]) != self._name:
            raise _no_model(shown(name), self._name)
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": self._began, "owned_by": "ringtune"}

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answered(request, _Form(self._name, is_chat=True))

    async def text(self, request: Request) -> Response:
        """Continue a text."""
        return await self._answered(request, _Form(self._name, is_chat=False))

    async def _answered(self, request: Request, form: _Form) -> Response:
        try:
            body = await json_body(request, MAX_BODY_BYTES, "request")
        except HTTPException as error:
            raise ProblemError(error.detail, error.status_code) from error
        template = bool(self._process.ready.has_template)
        question = asked_of(body, self._name, is_chat=form.is_chat, has_template=template)
        answer = await self._begin(question, request)
        try:
            if await request.is_disconnected():
                raise ProblemError("nobody reads the answer")
            first = await answer.next()
            if "refused" in first:
                code = "context_length_exceeded" if "at most" in first["refused"] else None
                raise ProblemError(first["refused"], code=code)
            form.num_prompt = first["began"]["prompt_tokens"]
            if question.has_stream:
                return _Stream(form, answer, has_usage=question.has_usage)
        except BaseException:
            await answer.close()
            raise
        try:
            return await self._whole(request, form, answer)
        finally:
            await answer.close()

    async def _whole(self, request: Request, form: _Form, answer: _Answer) -> Response:
        text = ""
        while not await request.is_disconnected():
            event = await answer.next()
            text += event.get("piece", "")
            if "ended" in event:
                form.end(event["ended"])
                return _json(form.whole(text))
        return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it

    async def _begin(self, question: ReadRequest, request: Request) -> _Answer:
        """Wait for the turn of a request, for as long as its client does."""
        if self._waiting >= MAX_WAITING:
            raise ProblemError(
                f"{MAX_WAITING} requests wait already, and one is answered at a time; ask again later",
                429,
                code="rate_limit_exceeded",
            )
        self._waiting += 1
        try:
            async with asyncio.timeout(QUEUE_S):
                await self._take_turn(request)
        except TimeoutError as error:
            raise ProblemError(
                f"the answer before was not done within {QUEUE_S:g} s; ask again later", 429, code="rate_limit_exceeded"
            ) from error
        finally:
            self._waiting -= 1
        return _Answer(self, self._process.answer(question.request), self._turn.release)

    async def _take_turn(self, request: Request) -> None:
        turn = asyncio.ensure_future(self._turn.acquire())
        try:
            while not (await asyncio.wait((turn,), timeout=_LOOK_S))[0]:
                if await request.is_disconnected():
                    raise ProblemError("nobody reads the answer")
        except BaseException:
            if not turn.cancel():  # it was taken meanwhile
                self._turn.release()
            raise


class _Answer:
    """Events of an answer; it has the turn until it is closed."""

    def __init__(self, owner: Completions, events: Iterator[Mapping[str, Any]], release: Callable[[], object]) -> None:
        self._owner, self._events, self._release, self._is_closed = owner, events, release, False

    async def next(self) -> Mapping[str, Any]:
        """Return the next event."""
        try:
            return await run_in_threadpool(next, self._events)
        except RingTuneError as error:
            self._owner.lost = error
            raise ProblemError(str(error), 500) from error

    async def close(self) -> None:
        """End the answer, and give the turn to the next one."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with anyio.CancelScope(shield=True):
                await run_in_threadpool(self._events.close)  # type: ignore[attr-defined]
        except RingTuneError as error:
            self._owner.lost = error
        finally:
            self._release()


class _Form:
    """The answer in the form of the API.

    Attributes:
        num_prompt: tokens before the answer.
    """

    def __init__(self, name: str, *, is_chat: bool) -> None:
        self.is_chat = is_chat
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": answer_id, "created": int(time.time()), "model": name}
        self.num_prompt = self._num_tokens = 0
        self._reason: str | None = None

    def end(self, ended: Mapping[str, Any]) -> None:
        """Take the counts of an answer that has ended."""
        self._reason = "stop" if ended["why"] == "end" else "length"
        self._num_tokens = ended["tokens"]

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        total = self.num_prompt + self._num_tokens
        return {"prompt_tokens": self.num_prompt, "completion_tokens": self._num_tokens, "total_tokens": total}

    def whole(self, text: str) -> dict[str, Any]:
        """Return a whole answer."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {**self._head, "object": kind, "choices": [self._choice(content)], "usage": self.usage()}

    def chunk(self, text: str | None, **more: Any) -> dict[str, Any]:
        """Return a chunk with a piece of the text; an empty one ends it, None has no choice."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        content = {"delta": {"content": text} if text else {}} if self.is_chat else {"text": text}
        return {**self._head, "object": kind, "choices": [] if text is None else [self._choice(content)], **more}

    def opening(self, **more: Any) -> dict[str, Any]:
        """Return the chunk of a conversation before the first piece."""
        return self.chunk(None) | {"choices": [self._choice({"delta": {"role": "assistant", "content": ""}})], **more}

    def _choice(self, content: Mapping[str, Any]) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": self._reason}


class _Stream(StreamingResponse):
    """An answer as server-sent events; it ends when its reader leaves, or takes nothing for ``SEND_S``."""

    def __init__(self, form: _Form, answer: _Answer, *, has_usage: bool) -> None:
        self._form, self._answer, self._has_usage = form, answer, has_usage
        super().__init__(self._events(), media_type="text/event-stream", headers=_LOGGED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left_s = SEND_S

        async def in_time(message: Message) -> None:
            nonlocal left_s
            began_s = time.monotonic()
            async with asyncio.timeout(left_s):
                await send(message)
            left_s -= time.monotonic() - began_s

        try:
            with contextlib.suppress(TimeoutError):
                await super().__call__(scope, receive, in_time)
        finally:
            await self._answer.close()

    async def _events(self) -> AsyncIterator[str]:
        form, more = self._form, {"usage": None} if self._has_usage else {}
        if form.is_chat:
            yield _event(form.opening(**more))
        event: Mapping[str, Any] = {}
        try:
            while "ended" not in event:
                event = await self._answer.next()
                if piece := event.get("piece"):
                    yield _event(form.chunk(piece, **more))
        except ProblemError as error:
            yield _event(_error(error))
            return
        form.end(event["ended"])
        yield _event(form.chunk("", **more))
        if self._has_usage:
            yield _event(form.chunk(None, usage=form.usage()))
        yield "data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _json(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(value), status, headers={**_LOGGED, **(headers or {})}, media_type="application/json")


_KINDS: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error"}
_MORE: Final = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "5"}}


def _error(problem: ProblemError) -> dict[str, Any]:
    kind = _KINDS.get(problem.status, "invalid_request_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def _refused(problem: ProblemError) -> Response:
    return _json(_error(problem), problem.status, _MORE.get(problem.status))


def make_app(completions: Completions, guard: Guard) -> ASGIApp:
    """Make the application; a token of ``guard`` is asked for on loopback, too."""
    routes = [
        Route("/v1/models", completions.models, methods=["GET"]),
        Route("/v1/models/{name:path}", completions.model, methods=["GET"]),
        Route("/v1/chat/completions", completions.chat, methods=["POST"]),
        Route("/v1/completions", completions.text, methods=["POST"]),
    ]
    handlers: Any = {ProblemError: _on_problem, HTTPException: _on_exception, Exception: _on_defect}
    inside = Starlette(routes=routes, exception_handlers=handlers)

    async def outside(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = _refusal(Request(scope), guard)
            await (inside if refusal is None else _refused(refusal))(scope, receive, send)

    return outside


async def _on_problem(_: Request, problem: ProblemError) -> Response:
    return _refused(problem)


async def _on_exception(request: Request, error: HTTPException) -> Response:
    what = f"{request.method} {shown(request.url.path)} is not here; the API has /v1/models, /v1/chat/completions"
    return _refused(ProblemError(f"{what} and /v1/completions", error.status_code))


async def _on_defect(_: Request, error: Exception) -> Response:
    _LOG.error("a request could not be answered", exc_info=error)
    return _refused(ProblemError("the server has a defect, which is in its log; please report it", 500))


def _refusal(request: Request, guard: Guard) -> ProblemError | None:
    """Refuse a request of a foreign page, or without the token; None = accepted."""
    if (wrong := guard.refuse_host(request.headers.get("host"))) is not None:
        return ProblemError("this server is for this machine only: ask it by 127.0.0.1 or localhost", wrong.status)
    origin = request.headers.get("origin")
    if origin is not None and guard.refuse_host(origin.partition("://")[2]) is not None:
        return ProblemError("this server is for this machine only, and not for a page of another one", 403)
    if guard.token and not guard.has_token(request.headers.get("authorization") or ""):
        return ProblemError(
            "the token is missing or wrong: send 'Authorization: Bearer TOKEN', with the token that was printed when "
            "the server was started, or that of its --token file",
            401,
            code="invalid_api_key",
        )
    return None


class CompletionsServer:
    """The API, served in the context by a thread of its own.

    Args:
        bind: ``host:port``; port 0 = any free one.
        token: asked for, if not empty; beyond this machine it has to be.

    Raises:
        UsageError: ``bind`` is no address.
        ConnectionFailedError: the address can't be bound.
    """

    def __init__(self, process: Answering, name: str, bind: str, *, token: str = "") -> None:
        host, port = split_address(bind, option="--bind", example="127.0.0.1:8080")
        self._socket = bound(host, port, bind, what="the API", option="--bind")
        self.address = join_address(host, self._socket.getsockname()[1])
        self._completions = Completions(process, name)
        app = make_app(self._completions, Guard(is_loopback(self.address), token))
        self._server = http_server(app)
        self._thread = threading.Thread(target=self._run, name="completions", daemon=True)

    @property
    def lost(self) -> RingTuneError | None:
        """Error of the process that answers, once it has ended."""
        return self._completions.lost

    def __enter__(self) -> CompletionsServer:
        """Start to serve; raises ``ConnectionFailedError``."""
        self._thread.start()
        end_s = time.monotonic() + _START_S
        while not self._server.started:
            if time.monotonic() > end_s or not self._thread.is_alive():
                raise ConnectionFailedError(f"the API did not begin to listen at {self.address}; take another --bind")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        """End all answers, and close the socket."""
        self._server.should_exit = True
        self._thread.join(_END_S)
        self._socket.close()

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):  # by uvicorn, where it can't listen
            asyncio.run(self._server.serve(sockets=[self._socket]))
