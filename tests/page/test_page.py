"""What the page shows in a browser: true slices and losses, a lost node in red, what-ifs, a sentence a problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.web.streams import MemberStatus
from ringtune.v1 import control_pb2
from tests.page.conftest import Served, Shown
from tests.support.page_runs import MEASURED, RUN_ID, activity, beginning, metrics, progress, step_line, trained

Show = Callable[..., Shown]
RED = "rgb(207, 42, 37)"


def losses(shown: Shown) -> list[list[float]]:
    """The points that the browser draws."""
    found: list[list[float]] = shown.page.evaluate(
        "(({settled, open}) => [...settled, ...open])(ringtune.store.state.curves.loss)"
    )
    return found


def slices(shown: Shown) -> dict[str, list[int]]:
    """The blocks that the drawing has cells for, by node."""
    found: dict[str, list[int]] = shown.page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#ring .node')].map((node) => [node.dataset.node,"
        " [...node.querySelectorAll('.cell')].map((cell) => Number(cell.dataset.block))]))"
    )
    return found


def test_page_draws_the_true_slices_and_losses(served: Served, show: Show) -> None:
    """A cell for each block at its node, two colours by what trains, the curve's points as in the metrics."""
    shown = show(served.url)
    served.hear(*trained(5))
    shown.until("document.querySelector('#phase').textContent === 'done'")
    assert slices(shown) == {"a": [0, 1], "b": [2, 3]}
    colours = shown.page.evaluate(
        "[...document.querySelectorAll('#ring .cell')].map((cell) => cell.classList.contains('trained'))"
    )
    assert colours == [False, True, True, True], "at step 5 three blocks train"
    assert losses(shown) == [[step, 1.0 + 1.0 / step] for step in range(1, 6)]
    assert "5 / 8" in shown.page.inner_text("#tile-progress")
    assert shown.said == []


def test_page_draws_links_as_wide_as_their_traffic(served: Served, show: Show) -> None:
    """A hundred times the bytes are drawn wider; the same stands in the table."""
    shown = show(served.url)
    served.hear(*beginning(), metrics(step_line(1, bytes={"a>b": 100_000, "b>a": 50_000})))
    shown.until("document.querySelectorAll('#ring .link').length === 2")
    widths = {link: float(shown.page.get_attribute(f"[data-link='{link}']", "stroke-width")) for link in ("a>b", "b>a")}
    assert widths["a>b"] == pytest.approx(2 * widths["b>a"], rel=0.02)
    shown.page.click("#links-details summary")
    assert "97.7 KiB" in shown.page.inner_text("#links-table") or "98 KiB" in shown.page.inner_text("#links-table")


def test_page_shows_who_begins_and_who_waits(served: Served, show: Show) -> None:
    """The initiator is marked in the ring and in the table; a node says how long it waits."""
    shown = show(served.url)
    served.hear(*beginning(), progress(step_line(1)), activity(2))
    shown.until("document.querySelector('#ring .node.initiator')?.dataset.node === 'a'")
    shown.until("document.querySelector('#ring').textContent.includes('waits 25 %')")
    assert "initiator" in shown.page.inner_text("#nodes tr.initiator")
    assert "50 % / 25 % / 25 %" in shown.page.inner_text("#nodes")


def test_page_turns_a_lost_node_red(served: Served, show: Show) -> None:
    """As soon as the coordinator counts it as lost; the list of events says it, and so does the drawing's text."""
    served.members = {node: MemberStatus("running", 1 << 20, 1 << 30, "cpu") for node in ("a", "b")}
    shown = show(served.url)
    served.hear(*beginning())
    shown.until("document.querySelectorAll('#ring .node').length === 2")
    served.members["b"] = MemberStatus("lost", 1 << 20, 1 << 30, "cpu")
    shown.until("document.querySelector('#ring .node.lost')?.dataset.node === 'b'")
    shown.page.wait_for_timeout(600)  # the colour changes softly
    assert shown.page.evaluate("getComputedStyle(document.querySelector('#ring .lost .cell')).fill") == RED
    assert "node b is lost" in shown.page.inner_text("#events")
    assert "lost" in shown.page.inner_text("#nodes tr.lost")
    assert "lost" in shown.page.get_attribute("#ring .node.lost", "aria-label")
    shown.picture("lost-node")


def test_page_shows_a_hostile_text_as_text(served: Served, show: Show) -> None:
    """What another machine says is never HTML; the policy would stop its script besides."""
    text = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    shown = show(served.url)
    served.hear(*beginning(), control_pb2.RunEvent(note=text))
    shown.until("document.querySelector('#events').textContent.includes('onerror')")
    assert shown.page.query_selector("#events img") is None
    assert "owned" not in shown.page.title()


def test_page_asks_nothing_of_anybody_else(served: Served, show: Show) -> None:
    """Every request goes to the page's own address, and nothing breaks its policy."""
    shown = show(served.url)
    served.hear(*trained(4))
    shown.until("ringtune.store.state.run.phase === 'done'")
    assert len(shown.asked) > 10
    assert [url for url in shown.asked if not url.startswith((served.url, "data:"))] == []
    assert shown.said == []


def test_page_asks_the_simulator(served: Served, show: Show) -> None:
    """A slider is moved: the predicted time stands beside the measured one, and a sentence says the change."""
    shown = show(served.url)
    served.hear(*beginning(measured=MEASURED), *(metrics(step_line(step)) for step in range(1, 9)))
    shown.until("document.querySelectorAll('#wi-node option').length === 2")
    slider = shown.page.get_by_role("slider", name="its speed")
    slider.focus()
    for _ in range(2):
        shown.page.keyboard.press("ArrowLeft")
    shown.until("document.querySelector('#wi-bars .row.after') !== null")
    text = shown.page.inner_text("#wi-bars")
    assert "measured" in text
    assert "4.0 s" in text
    assert "With a 50 % of it" in shown.page.inner_text("#wi-text")
    assert "longer" in shown.page.inner_text("#wi-text")


def test_page_of_a_run_that_is_gone_says_so(served: Served, show: Show) -> None:
    """With the run that there is, and how to see the other one."""
    served.hear(*trained(2))
    served.page_data.tick(0.0)
    shown = show(f"{served.url}?run=r20200101-000000-00000000")
    shown.page.wait_for_selector("#notice:not([hidden])")
    text = shown.page.inner_text("#notice")
    assert "is gone" in text
    assert RUN_ID in text


def test_page_elsewhere_asks_for_its_token(tmp_path: Path, show: Show) -> None:
    """A wrong one is one sentence; the right one opens the page, and stays in no address."""
    page = Served("0.0.0.0:0", token_file=tmp_path / "token")
    with page.server:
        page.hear(*trained(2))
        at = f"http://127.0.0.1:{page.server.address.rpartition(':')[2]}/"
        wrong = show(f"{at}#token=wrong")
        wrong.page.wait_for_selector("#notice:not([hidden])")
        assert "the token is wrong" in wrong.page.inner_text("#notice")
        wrong.page.get_by_label("Token of this page").fill((tmp_path / "token").read_text())
        wrong.page.get_by_role("button", name="Open").click()
        wrong.until("ringtune.store.state.run.phase === 'done'")
        right = show(f"{at}#token={(tmp_path / 'token').read_text()}")
        right.until("ringtune.store.state.run.phase === 'done'")
        assert "token" not in right.page.url


def test_page_whose_process_ends_keeps_the_last_state(show: Show) -> None:
    """And says that this is the end."""
    page = Served()
    with page.server:
        page.hear(*beginning(), metrics(step_line(1)))
        shown = show(page.url)
        shown.until("ringtune.store.state.curves.loss?.open.length === 1")
        page.hear(metrics(step_line(2)))
    shown.until("document.querySelector('#status').textContent.startsWith('ended')")
    assert losses(shown) == [[1, 2.0], [2, 1.5]]


def test_page_of_a_browser_that_fell_behind_says_so(served: Served, show: Show) -> None:
    """The number of updates that it did not get, and that what it shows is the newest state."""
    shown = show(served.url)
    served.hear(*beginning())
    shown.until("document.querySelectorAll('#ring .node').length === 2")
    frame: dict[str, Any] = {"skipped": 12, "run": {"id": RUN_ID, "phase": "training"}}
    shown.page.evaluate(f"ringtune.store.take({json.dumps(frame)})")
    shown.until("document.querySelector('#status').textContent.includes('fell behind: 12 updates')")
