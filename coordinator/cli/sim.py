"""``ringtune sim``: predict seconds, idle shares, bytes and memory of a plan, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringtune import options


def simulate(
    plan: options.PlanFile,
    profile: options.ProfileFile = None,
    trace: options.Trace = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write prediction.json and trace.json (for Perfetto) there.")
    ] = None,
    seed: options.TraceSeed = 0,
    json: options.Json = False,
) -> None:
    """Predict training time, idle shares, bytes and memory of a plan from measured times.

    With the folder of a finished run its measured figures are shown too.
    """
    from coordinator.api import simulate as api
    from coordinator.api.arguments import typed

    prediction = typed(api.simulate)(plan, profile=profile, trace=trace, out=out, seed=seed)
    options.show({"event": "prediction", **prediction.to_json()}, prediction.lines(), as_json=json)
