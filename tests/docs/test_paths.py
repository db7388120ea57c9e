"""Files and names that the pages on the code name are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.contract.test_glossary import definitions, exists
from tests.support.cases import cases
from tests.support.sources import ROOT

BUILT = ROOT / "docs/how/built.md"
PAGES = [BUILT, *sorted((ROOT / "docs/decisions").glob("*.md"))]
PATH = re.compile(r"(?:proto|edge|coordinator|sim|docs|tests|deploy)/[\w./-]*")
NAME = re.compile(r"(?:ringtune|edge|coordinator|sim)(?:\.\w+)+")
STEP = re.compile(r"^\| \d+ \| `([^`]+\.py)` \| (.+?) \|", re.MULTILINE)


def missing(text: str) -> Iterator[str]:
    """Paths, dotted names and benches between backticks that are not in the checkout."""
    for code in re.findall(r"`([^`\n]+)`", text):
        if PATH.fullmatch(code) and not (ROOT / code).exists():
            yield code
        if NAME.fullmatch(code) and not code.startswith("ringtune.api") and not exists(code):
            yield code
        bench = re.match(r"python -m (tests[\w.]+)", code)
        if bench and not (ROOT / f"{bench[1].replace('.', '/')}.py").is_file():
            yield code


def not_in_its_file(text: str) -> Iterator[str]:
    """Functions that the table of a step's way, or the reading path, names in a file that does not define them."""
    for path, names in STEP.findall(text):
        known = definitions(ROOT / path)
        yield from (f"{path}: {name}" for name in re.findall(r"`([\w.]+)`", names) if name not in known)


@cases("page", PAGES)
def test_what_a_page_names_is_there(page: Path) -> None:
    """Paths from the root of the checkout, dotted names, and benches."""
    assert list(missing(page.read_text(encoding="utf-8"))) == []


def test_every_decision_is_in_the_index_once_and_no_other() -> None:
    """By its number, with a link to its page."""
    index, *records = sorted((ROOT / "docs/decisions").glob("*.md"), reverse=True)
    rows = re.findall(r"^\| \[(\d{4})\]\((\1-[\w-]+\.md)\)", index.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(name for _, name in rows) == sorted(record.name for record in records)


def test_functions_of_the_way_are_in_their_files() -> None:
    """And the page says how many files the way has."""
    text = BUILT.read_text(encoding="utf-8")
    assert len(STEP.findall(text)) > 40
    assert list(not_in_its_file(text)) == []
    way = text.partition("## One step")[2].partition("\n## ")[0]
    assert f"**{len({path for path, _ in STEP.findall(way)})} files**" in way


def test_checks_see_what_is_gone() -> None:
    """Negative control: a path, a name, a bench and a function that are not there; others pass."""
    assert list(missing("`edge/gone.py` `ringtune.schedule.gone` `python -m tests.bench.gone` `edge/agent`")) == [
        "edge/gone.py",
        "ringtune.schedule.gone",
        "python -m tests.bench.gone",
    ]
    table = "| 1 | `edge/template.py` | `main`, `gone` |\n"
    assert list(not_in_its_file(table)) == ["edge/template.py: gone"]
