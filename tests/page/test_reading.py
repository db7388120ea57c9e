"""Who can read the page: on a phone, in the dark, with the keyboard, with a screen reader; and with very many nodes."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable

import pytest

from ringtune.costs.profile import Profile
from tests.page.conftest import PICTURES, Served, Shown
from tests.support.fake_agents import facts
from tests.support.page_runs import activity, beginning, metrics, progress, trained
from tests.support.plans import make_plan

Show = Callable[..., Shown]
NODES = [f"node-{index:03}" for index in range(200)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1400])
def test_page_fits_any_width(served: Served, show: Show, width: int, scheme: str) -> None:
    """Nothing has to be scrolled sideways, and no text is smaller than ten pixels."""
    served.hear(*trained(8))
    shown = show(served.url, width=width, height=800, scheme=scheme)
    shown.until("document.querySelectorAll('#ring .node').length === 2")
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    smallest = shown.page.evaluate(
        "Math.min(...[...document.querySelectorAll('main *')].filter((one) => one.childElementCount === 0 &&"
        " one.textContent.trim() && one.getClientRects().length)"
        ".map((one) => parseFloat(getComputedStyle(one).fontSize)))"
    )
    assert smallest >= 10
    shown.picture(f"{scheme}-{width}", whole=True)


def test_page_is_used_with_the_keyboard(served: Served, show: Show) -> None:
    """Tab reaches the ring, the last step, the tables and the sliders in the order of the page; arrows move inside."""
    served.hear(*trained(8))
    shown = show(served.url)
    shown.until("document.querySelectorAll('#ring .node').length === 2")
    order = []
    for _ in range(24):
        shown.page.keyboard.press("Tab")
        here = "document.activeElement.id || document.activeElement.dataset.node || document.activeElement.tagName"
        order.append(shown.page.evaluate(here))
    wanted = ["a", "gantt", "wi-node", "wi-speed", "wi-micro", "events"]
    places = [order.index(name) for name in wanted]
    assert places == sorted(places)
    shown.page.locator("#ring .node").first.focus()
    shown.page.keyboard.press("ArrowRight")
    assert shown.page.evaluate("document.activeElement.dataset.node") == "b"
    shown.page.locator("#gantt").focus()
    shown.page.keyboard.press("End")
    assert "backward of blocks 0\u20131" in shown.page.inner_text("#gantt-here")


def test_page_says_the_same_in_words(served: Served, show: Show) -> None:
    """Each drawing has a name and a text; each node of the ring is a sentence; tables have the figures."""
    served.hear(*trained(8))
    shown = show(served.url)
    shown.until("document.querySelectorAll('#ring .node').length === 2")
    page = shown.page
    assert (
        page.get_by_role("img", name="a: blocks 0\u20131, 2 trained; busy 50 %, waiting 25 %, idle 25 %").count() == 1
    )
    assert page.get_by_role("progressbar", name="steps done").get_attribute("aria-valuenow") == "100"
    assert "Loss, smoothed: 1.5208 at step 1, 1.1586 at step 8." in page.inner_text("#curves-text")
    assert "Blocks were unfrozen at steps 1, 3, 5 and 7; all 4 train now." in page.inner_text("#curves-text")
    assert "5 actions of 2 nodes in 15 ms. 1 of them ran ahead, 20 ms before it" in page.inner_text("#gantt-text")
    assert "a computes longest, 67 % of the step; b waits 33 % of it, for a." in page.inner_text("#waits-text")
    for name in ("curves", "gantt", "links"):
        page.click(f"#{name}-details summary")
        page.wait_for_selector(f"#{name}-table tbody tr:nth-child(2)")
    assert "1.1250" in page.inner_text("#curves-table")


def test_page_moves_nothing_for_those_who_ask_for_that(served: Served, show: Show) -> None:
    """With reduced motion colours and widths change at once."""
    served.hear(*trained(4))
    shown = show(served.url, reduced_motion="reduce")
    shown.until("document.querySelectorAll('#ring .cell').length === 4")
    assert shown.page.evaluate("getComputedStyle(document.querySelector('#ring .cell')).transitionDuration") == "0s"


def test_page_stays_fluid_with_200_nodes_and_100_000_steps(served: Served, show: Show) -> None:
    """The server thins the curve, and the browser redraws what streams in without holding its frames up.

    The figures are in build/page/fluid.json. A redraw has a tenth of a second, which is generous for a busy machine.
    """
    plan = make_plan(
        [(node, at, at + 1) for at, node in enumerate(NODES)],
        NODES[:20],
        num_blocks=200,
        num_steps=100_000,
        every_steps=400,
    )
    links = {f"{one}>{two}": 1000 + index for index, (one, two) in enumerate(itertools.pairwise(NODES))}
    line = {"kind": "train", "round": 1, "initiator": NODES[0], "seconds": 0.1, "count": 4, "accuracy": 0.5}
    served.hear(*beginning(plan, measured=Profile(nodes=tuple(facts(node) for node in NODES))))
    for step in range(1, 100_001):
        sent = links if step % 500 == 0 else {}
        loss = 3.0 / (1 + step / 5000) + 0.2 * ((step * 7919) % 97) / 97
        served.hear(metrics({**line, "step": step, "depth": min(200, 1 + step // 400), "loss": loss, "bytes": sent}))
        if step % 20_000 == 0:
            while served.page_data.state.steps_done < step:
                time.sleep(0.05)
    served.hear(activity(100_000, NODES))
    shown = show(served.url)
    shown.until("document.querySelectorAll('#ring .node').length === 200")
    shown.until("ringtune.store.state.run.last?.step === 100000")
    points = shown.page.evaluate("Object.values(ringtune.store.state.curves.loss).flat().length")
    assert points <= 1025
    shown.page.evaluate(
        "ringtune.timings.length = 0; window.gaps = []; let last = performance.now(); const next = (now) => {"
        " window.gaps.push(now - last); last = now; requestAnimationFrame(next); }; requestAnimationFrame(next);"
    )
    for index in range(24):
        step = 100_001 + index
        served.hear(progress({**line, "step": step, "depth": 200, "loss": 0.3}), activity(step, NODES))
        served.hear(metrics({**line, "step": step, "depth": 200, "loss": 0.3, "bytes": links}))
        shown.page.wait_for_timeout(250)
    timings = sorted(shown.page.evaluate("ringtune.timings"))
    gaps = sorted(shown.page.evaluate("window.gaps"))
    found = {
        "redraws": len(timings),
        "redraw_median_ms": timings[len(timings) // 2],
        "redraw_most_ms": timings[-1],
        "frame_median_ms": gaps[len(gaps) // 2],
        "frame_p95_ms": gaps[int(len(gaps) * 0.95)],
        "points_of_curve": points,
        "elements": shown.page.evaluate("document.querySelectorAll('*').length"),
    }
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / "fluid.json").write_text(json.dumps(found, indent=1) + "\n")
    shown.picture("200-nodes")
    assert found["redraws"] >= 10
    assert found["redraw_median_ms"] < 100
    assert found["elements"] < 10_000
