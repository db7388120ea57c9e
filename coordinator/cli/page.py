"""``ringtune page``: serve a web page of a run's folder, or of a run that a coordinator stores."""

from __future__ import annotations

from typing import Annotated

import typer

from ringtune import options

_RUN = "Folder of a run, the --out of 'ringtune train'; or the id of a run that a coordinator stores."


def page(
    run: Annotated[str, typer.Argument(metavar="RUN", help=_RUN)],
    web: options.Web = "127.0.0.1:7080",
    web_token: options.WebToken = None,
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Show a finished run on a web page until Ctrl-C; for a run in progress, its history and live updates.

    The page of --web of 'ringtune train' and 'ringtune coordinator' also shows the actions of the last step.
    """
    import functools
    import sys
    from contextlib import ExitStack
    from pathlib import Path

    from coordinator.client.connection import Connection
    from coordinator.client.detached_runs import kept_record
    from coordinator.server.coordinator import ShutdownSignals
    from coordinator.web.feeds import FolderFeed, RunFeed
    from coordinator.web.server import PageServer, require_web
    from coordinator.web.streams import Feed, PageData
    from ringtune.errors import InterruptedRunError
    from ringtune.ids import RUN_ID

    require_web()
    with ExitStack() as stack:
        feed: Feed
        if RUN_ID.fullmatch(run) and not Path(run).exists():
            client = stack.enter_context(Connection(coordinator, insecure=insecure))
            run_id = kept_record(client, run).run_id
            follow = functools.partial(client.events, run_id, wait=True, whole=True, with_files=False)
            feed = stack.enter_context(RunFeed(follow))
        else:
            feed = FolderFeed(Path(run))
        ending = stack.enter_context(ShutdownSignals())
        server = stack.enter_context(PageServer(PageData(feed=feed), web, token_file=web_token))
        options.show({"event": "page", "url": server.url}, [*server.lines(), "Ctrl-C ends it"], as_json=json)
        sys.stdout.flush()  # a reader of the pipe waits for the address
        while not ending.wait():
            pass
        if ending.by_ctrl_c:
            raise InterruptedRunError("stopped by Ctrl-C")
