"""``ringtune serve``: the language model of a run behind the API of OpenAI, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringtune import options


def serve(
    folder: options.RunFolder,
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; beyond this machine a token is needed.")
    ] = "127.0.0.1:8080",
    token: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the token that requests need; made if it is not there. Default: none on this machine, a "
            "new one elsewhere.",
        ),
    ] = None,
    model: options.ModelFolder = None,
    user: options.User = "",
    json: options.Json = False,
) -> None:
    """Serve the language model of a run until Ctrl-C, as OpenAI's API has it, to try a result.

    One process on this machine answers one request at a time: /v1/chat/completions, /v1/completions and /v1/models,
    with streaming. What a request leaves open, such as the temperature, is as in the model's generation_config.json.
    """
    import json as json_module
    import sys
    from contextlib import ExitStack

    from coordinator.web.server import require_web
    from ringtune.errors import InterruptedRunError

    require_web("the API")

    from coordinator.api.text_process import TextProcess
    from coordinator.client.saved_run import read_run
    from coordinator.screen.progress import WaitNotice, reachable_address
    from coordinator.server.coordinator import ShutdownSignals
    from coordinator.web.completions import CompletionsServer
    from ringtune.transport.endpoints import is_loopback, machine_address
    from ringtune.transport.page_access import token_of

    secret = token_of(token) if token is not None or not is_loopback(bind) else ""
    process, name = TextProcess(read_run(folder), model=model, user=user), folder.resolve().name
    server = CompletionsServer(process, name, bind, token=secret)
    with ExitStack() as stack:
        with WaitNotice(f"loading the model of {folder}"):
            stack.enter_context(process)
        ending = stack.enter_context(ShutdownSignals())
        stack.enter_context(server)
        url = f"http://{reachable_address(server.address, machine_address() or 'localhost')}/v1"
        shown_token = {"token": secret} if secret and token is None else {}
        if json:
            options.echo(json_module.dumps({"event": "serving", "url": url, "model": name, **shown_token}))
        else:
            lines = [*process.ready.lines(), f"model {name!r} at {url}, one request at a time; Ctrl-C ends it"]
            lines += [f"token: {secret}"] if shown_token else []
            if not is_loopback(bind):
                lines.append("plain HTTP: who can listen on that network can read it; an SSH tunnel hides it")
            options.echo("\n".join(lines))
        sys.stdout.flush()  # a reader of the pipe waits for the address
        while not ending.wait():
            if server.lost is not None:
                raise server.lost
        if ending.by_ctrl_c:
            raise InterruptedRunError("stopped by Ctrl-C")
