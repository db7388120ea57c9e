"""Frames: what a browser lacks, and nothing else; however many it misses, it has the state in the end."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.web.frames import SHOWN_CURVES, Framer, Seen
from coordinator.web.page_state import SECTIONS, PageState
from tests.support.page_runs import beginning, metrics, progress, state_of, step_line, trained


class Browser:
    """Puts frames together as ``store.js`` does."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.sections: dict[str, Any] = {}
        self.curves: dict[str, list[list[float]]] = {}
        self._settled: dict[str, list[list[float]]] = {}

    def take(self, framer: Framer) -> str:
        """Take one frame."""
        text = framer.frame(self.seen)
        frame = json.loads(text) if text else {}
        if "whole" in frame:
            self.sections, self.curves, self._settled = {}, {}, {name: [] for name in SHOWN_CURVES}
        for name, part in frame.pop("curves", {}).items():
            self._settled[name] = [*self._settled[name][: part["from"]], *part["points"]]
            self.curves[name] = [*self._settled[name], *part["open"]]
        self.sections |= frame
        return text


def whole(state: PageState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sections and curves of a state as a browser that comes now gets them."""
    new = Browser()
    new.take(framer_of(state))
    return {name: new.sections[name] for name in SECTIONS}, new.curves


def framer_of(state: PageState) -> Framer:
    """Frames of a state without members."""
    return Framer(state, lambda: (1, {}))


def test_frames_of_nothing_new_are_empty() -> None:
    """A browser that has everything gets nothing."""
    framer, browser = framer_of(state_of(trained())), Browser()
    assert browser.take(framer)
    assert browser.take(framer) == ""


def test_frames_bring_only_what_changed() -> None:
    """A further step brings its figures and its point, not the plan and the curve so far."""
    state = state_of([*beginning(), *(metrics(step_line(step)) for step in (1, 2, 3))])
    framer, browser = framer_of(state), Browser()
    browser.take(framer)
    state.take(metrics(step_line(4)), None)
    frame = json.loads(browser.take(framer))
    assert set(frame) == {"run", "links", "curves"}
    assert frame["curves"]["loss"] == {"from": 2, "points": [[3, 1.0 + 1.0 / 3]], "open": [[4, 1.25]]}


def test_frames_show_steps_whose_turn_is_not_done_at_the_end_of_the_curve() -> None:
    """They are drawn at once, as the owner told them."""
    state = state_of([*beginning(), metrics(step_line(1)), progress(step_line(2)), progress(step_line(3))])
    browser = Browser()
    browser.take(framer_of(state))
    assert browser.curves["loss"] == [[1, 2.0], [2, 1.5], [3, 1.0 + 1.0 / 3]]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12))
def test_frames_missed_by_a_slow_browser_change_nothing(pauses: list[int]) -> None:
    """Whenever a browser takes a frame, it ends with the very state of one that comes at the end."""
    state, browser = PageState(), Browser()
    framer = framer_of(state)
    events = [*beginning(), *trained(6), metrics(step_line(7))]
    for pause in pauses:
        for event in events[:pause]:
            state.take(event, None)
        del events[:pause]
        browser.take(framer)
    assert ({name: browser.sections[name] for name in SECTIONS}, browser.curves) == whole(state)


def test_frames_of_members_come_with_their_version() -> None:
    """Who is there is known without any run."""
    members = {"a": ["idle", 1, 2, "cpu"]}
    version = [1]
    framer, browser = Framer(PageState(), lambda: (version[0], members)), Browser()
    browser.take(framer)
    assert browser.sections["members"] == members
    members["b"] = ["lost", 0, 2, "cpu"]
    assert browser.take(framer) == ""
    version[0] += 1
    browser.take(framer)
    assert browser.sections["members"]["b"][0] == "lost"
