"""What a browser lacks of the page's state: the sections that changed, and the points that each curve has gained.

A browser has, in a ``Seen``, a version of each section and of each curve a generation with a number of points. A frame
is made from the state as it is when the browser can take one, so nothing is queued for it: one that falls behind gets
fewer frames, each of them complete, and whatever it missed is in the next one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.web.page_state import CURVES, SECTIONS, PageState
from coordinator.web.thin_curve import Point

SHOWN_CURVES: Final = tuple(name for name in CURVES if name != "seconds")
OF_ALL_RUNS: Final = ("members",)
_MOST_AHEAD: Final = 512


@dataclass(slots=True)
class Seen:
    """What one browser has.

    Attributes:
        run_id: the run that it shows.
        versions: of the sections.
        curves: generation and number of settled points of each curve, and its unsettled points.
    """

    run_id: str | None = None
    versions: dict[str, int] = field(default_factory=dict)
    curves: dict[str, tuple[int, int, str]] = field(default_factory=dict)


class Framer:
    """Makes frames of a state; each section is written once for all browsers.

    Args:
        state: to be shown; only one thread at a time may change or frame it.
        members: returns a version and the members of the coordinator as they are now.
    """

    def __init__(self, state: PageState, members: Callable[[], tuple[int, Mapping[str, Any]]]) -> None:
        self._state, self._members = state, members
        self._written: dict[str, tuple[int, str]] = {}

    def frame(self, seen: Seen) -> str:
        """Write what a browser lacks as a JSON object, and note that it has it; empty if it lacks nothing."""
        state, parts = self._state, []
        if seen.run_id != state.run_id:
            seen.run_id, seen.versions, seen.curves = state.run_id, {}, {}
            parts.append(f'"whole":{json.dumps(state.run_id)}')
        for name, version in self._versions():
            if seen.versions.get(name) != version:
                seen.versions[name] = version
                parts.append(f'"{name}":{self._text(name, version)}')
        curves = [text for name in SHOWN_CURVES if (text := self._curve(name, seen))]
        if curves:
            parts.append(f'"curves":{{{",".join(curves)}}}')
        return f"{{{','.join(parts)}}}" if parts else ""

    def _versions(self) -> list[tuple[str, int]]:
        return [
            *((name, self._state.versions[name]) for name in SECTIONS),
            *((name, self._members()[0]) for name in OF_ALL_RUNS),
        ]

    def _text(self, name: str, version: int) -> str:
        written = self._written.get(name)
        if written is None or written[0] != version:
            value = self._members()[1] if name in OF_ALL_RUNS else self._state.section(name)
            written = self._written[name] = (version, json.dumps(value, separators=(",", ":")))
        return written[1]

    def _curve(self, name: str, seen: Seen) -> str:
        curve = self._state.curves[name]
        generation, count, had = seen.curves.get(name, (-1, 0, ""))
        start = count if generation == curve.generation else 0
        settled, unsettled = curve.settled(start), curve.unsettled()
        if name in ("loss", "accuracy"):
            unsettled = [*unsettled, *self._ahead(("loss", "accuracy").index(name))]
        open_text = json.dumps(unsettled, separators=(",", ":"))
        if generation == curve.generation and not settled and open_text == had:
            return ""
        seen.curves[name] = (curve.generation, start + len(settled), open_text)
        return f'"{name}":{{"from":{start},"points":{json.dumps(settled, separators=(",", ":"))},"open":{open_text}}}'

    def _ahead(self, place: int) -> list[Point]:
        """Points of steps whose turn is not done; of very long turns not all."""
        last = self._state.curves["seconds"].last
        done = last.step if last else 0
        found = [
            Point(step, value)
            for step, values in sorted(self._state.ahead.items())
            if step > done and (value := values[place]) is not None
        ]
        return found[:: len(found) // _MOST_AHEAD + 1]
