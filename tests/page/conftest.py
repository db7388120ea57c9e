"""One Chromium for all tests of the page, and pages that are served for a test; nothing is collected without it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.web.server import PageServer
from coordinator.web.streams import MemberStatus, PageData
from tests.support import leaks
from tests.support.sources import ROOT

BROWSER = os.environ.get("RINGTUNE_BROWSER", "")
collect_ignore_glob = [] if BROWSER else ["test_*.py"]
PICTURES = ROOT / "build" / "page"
WAIT_S = 240.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser; its processes outlive single tests on purpose."""
    from playwright.sync_api import sync_playwright

    before = leaks.processes_below()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        leaks.KEPT.update(leaks.processes_below() - before)
        yield browser
        browser.close()


class Shown:
    """A page in the browser, with what it said and asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda line: self.said.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def picture(self, name: str, *, whole: bool = False) -> None:
        """Write a picture into build/page."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        (PICTURES / f"{name}.png").write_bytes(self.page.screenshot(full_page=whole))

    def until(self, script: str) -> None:
        """Wait until a script says yes; the page's policy forbids how playwright waits."""
        end_s = time.monotonic() + WAIT_S
        while not self.page.evaluate(script):
            assert time.monotonic() < end_s, f"waited {WAIT_S:g} s for {script}; the page said {self.said}"
            self.page.wait_for_timeout(50)


@pytest.fixture
def show(chromium: Any) -> Iterator[Callable[..., Shown]]:
    """Open an address in a browser of its own; what a page may not do fails the test."""
    with contextlib.ExitStack() as stack:
        shown: list[Shown] = []

        def opened(url: str, *, width: int = 1400, height: int = 1500, scheme: str = "light", **more: Any) -> Shown:
            context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **more)
            stack.callback(context.close)
            context.set_default_timeout(1000 * WAIT_S)
            shown.append(Shown(context.new_page()))
            leaks.KEPT.update(leaks.processes_below())
            shown[-1].page.goto(url)
            return shown[-1]

        yield opened
        leaks.KEPT.update(leaks.processes_below())


class Served:
    """A page that a test feeds."""

    def __init__(self, bind: str = "127.0.0.1:0", *, token_file: Path | None = None) -> None:
        self.members: dict[str, MemberStatus] = {}
        self.page_data = PageData(members=lambda: dict(self.members))
        self.server = PageServer(self.page_data, bind, token_file=token_file)

    @property
    def url(self) -> str:
        """Where it is."""
        return self.server.url

    def hear(self, *events: Any) -> None:
        """Let the page hear events."""
        for event in events:
            self.page_data.hear(event)


@pytest.fixture
def served() -> Iterator[Served]:
    """A page on loopback, without a run."""
    page = Served()
    with page.server:
        yield page
