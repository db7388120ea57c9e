"""``ringtune demo``: train a real model on real sentences, with four nodes on this machine, in a few minutes."""

from __future__ import annotations

import json as json_module
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ringtune import options

NUM_NODES = 4
MAX_NODES = 6

LOAD_LINES = """\
from adapters import AutoAdapterModel

model = AutoAdapterModel.from_pretrained({model})
model.load_adapter({adapter}, use_safetensors=True, set_active=True)"""


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for sentences, job and run.")] = Path(
        "ringtune-demo"
    ),
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for downloaded files. Default: ringtune/demo in the user's cache."),
    ] = None,
    local: options.Local = NUM_NODES,
    web: options.Web = "",
    web_token: options.WebToken = None,
    json: options.Json = False,
) -> None:
    """Train MiniLM on film reviews, on four nodes of this machine."""
    from coordinator.api.output import make_progress
    from coordinator.cli.demo_files import demo_cache, is_cached, prepare
    from coordinator.cli.train import train
    from ringtune.errors import UsageError

    if not 1 <= local <= MAX_NODES:
        raise UsageError(f"--local {local}: the demo's model has {MAX_NODES} blocks, give 1 to {MAX_NODES} nodes")
    progress = make_progress(as_json=json, live=False)
    cache = cache or demo_cache()
    if not is_cached(cache):
        progress.note("bringing model and sentences into the cache (only the first time: 97 MB) ...")
    workspace = prepare(out, cache)
    counts = f"{workspace.num_train} sentences to train on, {workspace.num_held_out} held out"
    progress.note(f"{counts}; job: {workspace.job}")
    train(workspace.job, local=local, out=workspace.run, replace=True, web=web, web_token=web_token, json=json)
    report = json_module.loads((workspace.run / "report.json").read_text(encoding="utf-8"))
    adapter = workspace.run / "adapter"
    lines = [closing_lines(report, model=workspace.model, run=workspace.run)]
    options.show({"event": "demo", "adapter": str(adapter), "eval": report["eval"]}, lines, as_json=json)


def closing_lines(report: Mapping[str, Any], *, model: Path, run: Path) -> str:
    """Return the demo's last lines: the accuracy, a command that uses the result, and AdapterHub code that loads it."""
    evaluation = report["eval"]
    code = LOAD_LINES.format(model=json_module.dumps(str(model)), adapter=json_module.dumps(str(run / "adapter")))
    return (
        f"\naccuracy {evaluation['accuracy']:.4f} on {evaluation['count']} held-out sentences\n"
        f"ringtune predict {shlex.quote(str(run))} --data FILE names the class of each row of a file\n"
        "the result is a normal AdapterHub adapter; the library adapters loads it (pip install 'adapters==1.3.*'), "
        f"without ringtune:\n\n{code}\n"
    )
