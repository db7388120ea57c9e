"""``ringtune demo``: a real model, real sentences, four nodes on this machine, a few minutes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

NUM_NODES = 4

LOAD_LINES = """\
from adapters import AutoAdapterModel

model = AutoAdapterModel.from_pretrained({model})
model.load_adapter({adapter}, use_safetensors=True, set_active=True)"""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for sentences, job and run.")] = Path("ringtune-demo"),
    cache: Annotated[
        Path | None, typer.Option(help="Folder for fetched files; default: ringtune/demo in the user's cache.")
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=1, max=6, help="Local nodes, each with a share of the sentences.")
    ] = NUM_NODES,
) -> None:
    """Train MiniLM on film reviews, on four nodes of this machine."""
    from coordinator.commands.train import train
    from coordinator.demo.fetch import demo_cache
    from coordinator.demo.workspace import prepare

    typer.echo("bringing model and sentences into the cache (only the first time: 97 MB) ...")
    workspace = prepare(out, cache or demo_cache())
    typer.echo(f"{workspace.num_train} sentences to train on, {workspace.num_held_out} held out; job: {workspace.job}")
    train(workspace.job, local=nodes, out=workspace.run, replace=True)
    report = json.loads((workspace.run / "report.json").read_text(encoding="utf-8"))
    typer.echo(closing_lines(report, model=workspace.model, adapter=workspace.run / "adapter"))


def closing_lines(report: Mapping[str, object], *, model: Path, adapter: Path) -> str:
    """Write the demo's last lines: the accuracy, and plain AdapterHub code that loads the result."""
    evaluation = report["eval"]
    if not isinstance(evaluation, dict):
        raise TypeError(f"report.json has no evaluation: {evaluation!r}")
    code = LOAD_LINES.format(model=json.dumps(str(model)), adapter=json.dumps(str(adapter)))
    return (
        f"\naccuracy {evaluation['accuracy']:.4f} on {evaluation['count']} held-out sentences\n"
        f"the result is a normal AdapterHub adapter; this loads it, without ringtune:\n\n{code}\n"
    )
