"""The page on the files of a run knows every kind of line that a run writes."""

from __future__ import annotations

import re

from tests.support.sources import ROOT


def test_page_names_every_kind_of_line() -> None:
    """Of metrics.jsonl."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "coordinator/run").rglob("*.py"))
    kinds = {kind for source in sources for kind in re.findall(r'"kind": "(\w+)"', source)}
    page = (ROOT / "docs/reference/files.md").read_text(encoding="utf-8")
    assert len(kinds) > 5
    assert kinds <= set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
