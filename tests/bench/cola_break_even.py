"""Part ``break_even`` of ``make bench-cola``: from which rate of the links on a helper pays, predicted and measured.

The boards are those of ``tests.bench.cola_boards``. ``ringtune measure`` takes a profile of them once, with links of
1 Gbit/s. The simulator predicts from it how many times as fast a step with the helper is, for links of any rate; at
three rates the steps are timed without the helper and with it.

======================== ===================================================================== ====
break_even_bytes_per_s   from which rate of the helper's links on a step gets faster, predicted -
worst_prediction_error   |predicted / measured - 1| of the speed-ups at the three rates         -
======================== ===================================================================== ====
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

from ringtune.costs.profile import Profile
from sim.prediction import predict
from sim.what_ifs.break_even import break_even_bytes_per_s
from tests.bench.cola_boards import GIGABIT, Boards, Case, on_boards
from tests.bench.testbed_runs import read_profile, set_rate

CASE: Final = Case(4, 2)
MEASURED: Final = (GIGABIT, GIGABIT / 2, GIGABIT / 4)
CURVE: Final = (GIGABIT / 8, *reversed(MEASURED), 2 * GIGABIT, 4 * GIGABIT, 8 * GIGABIT)
"""Rates of all links, in bytes a second."""

Figures = dict[str, Any]


def measure(folder: Path) -> Figures:
    """Take a profile, predict the curve, and measure three points of it."""
    with on_boards(folder) as boards:
        path = folder / "profile.json"
        boards.ringtune("measure", str(boards.job(CASE, is_helped=True)), "--save", str(path), "--fresh")
        profile = read_profile(path)
        points = [_point(boards, profile, rate) for rate in MEASURED]
        even = break_even_bytes_per_s(boards.plan(CASE, is_helped=True), profile)
        curve = {f"{rate:.0f}": _predicted(boards, profile, rate)["speedup"] for rate in CURVE}
    return {
        "case": CASE.name,
        "curve": curve,
        "points": points,
        "figures": {
            "break_even_bytes_per_s": even,
            "worst_prediction_error": max(
                abs(point["predicted"]["speedup"] / point["speedup"] - 1) for point in points
            ),
        },
    }


def _point(boards: Boards, profile: Profile, rate: float) -> Figures:
    """Time a step both ways with links of a rate, beside what is predicted."""
    set_rate(boards.layout, rate)
    found, told = boards.pair(CASE), _predicted(boards, profile, rate)
    for name, value in found.items():
        print(f"{rate / 1e6:g} MB/s: {name} {value:.2f}, predicted {told[name]:.2f}", flush=True)  # noqa: T201
    return {"bytes_per_s": rate, **found, "predicted": told}


def _predicted(boards: Boards, profile: Profile, rate: float) -> dict[str, float]:
    links = tuple(
        dataclasses.replace(link, rate_bytes_per_s=rate, rate_low_bytes_per_s=0.0, rate_high_bytes_per_s=0.0)
        for link in profile.links
    )
    at_rate = dataclasses.replace(profile, links=links)
    alone_s, helped_s = (
        predict(boards.plan(CASE, is_helped=is_helped), at_rate).train_s / CASE.steps for is_helped in (False, True)
    )
    return {"alone_s": alone_s, "helped_s": helped_s, "speedup": alone_s / helped_s}


def missed(found: Figures) -> list[str]:
    """Nothing: the curve is told, and has no bound."""
    return []
