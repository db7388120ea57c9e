"""``ringtune page``: show the run in a folder on a page."""

from __future__ import annotations

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def page(
    run: options.RunFolder,
    web: options.Web = "127.0.0.1:7080",
    web_token: options.WebToken = None,
    json: options.Json = False,
) -> None:
    """Show a finished run on a page until Ctrl-C; of a run that goes on, what its folder has so far.

    The page of a run that is under way comes with --web of 'ringtune train' or 'ringtune coordinator'.
    """
    import json as json_module
    import sys

    from coordinator.server.ending import Ending
    from coordinator.web.folder_feed import FolderFeed
    from coordinator.web.server import PageServer, require_web
    from coordinator.web.watching import Watching
    from ringtune.errors import InterruptedRunError

    require_web()
    feed = FolderFeed(run)
    with Ending() as ending, PageServer(Watching(feed=feed), web, token_file=web_token) as server:
        if json:
            typer.echo(json_module.dumps({"event": "page", "url": server.url}))
        else:
            for line in (*server.lines(), "Ctrl-C ends it"):
                typer.echo(line)
        sys.stdout.flush()  # who reads it from a pipe waits for the address
        while not ending.wait():
            pass
    if ending.by_ctrl_c:
        raise InterruptedRunError("stopped by Ctrl-C")
