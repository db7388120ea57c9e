"""The pages of the site and README: links lead somewhere, every page is reached, drawings are what the script draws."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from docs.how import drawings
from tests.support.cases import cases

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "deploy/README.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
LONGEST_README = 200


def text_of(page: Path) -> str:
    """A page without its blocks and spans of code."""
    text = re.sub(r"^\s*```.*?^\s*```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as both GitHub and the site make them."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def broken(page: Path) -> Iterator[str]:
    """The links of a page that lead nowhere; those to other machines are not followed."""
    for target in LINK.findall(text_of(page)):
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        is_there = target.startswith(("http://", "https://")) or aim.exists()
        if not is_there or (anchor and aim.suffix == ".md" and anchor not in anchors(aim)):
            yield target


@cases("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    """The file is there, and has the heading."""
    assert list(broken(page)) == []


def unfinished(text: str) -> str:
    """The last line of a page that stops in the middle: of a block, or of a sentence; empty if it ends."""
    last = text.rstrip().rpartition("\n")[2].strip()
    is_open = len(re.findall(r"^\s*```", text, re.MULTILINE)) % 2
    ends = last.endswith((".", ".)", "!", "?", "|", "```", "-->")) or last.startswith(("#", "- ", "!["))
    return "" if ends and not is_open else last


@cases("page", PAGES)
def test_page_is_read_to_its_end(page: Path) -> None:
    """It ends with a sentence, a table or a block, and no block is left open."""
    assert unfinished(page.read_text(encoding="utf-8")) == ""


def test_page_check_sees_one_that_stops() -> None:
    """Negative control: the colon of a block that is missing, and a block without an end."""
    assert unfinished("# A\nEncrypted, as follows:\n") and unfinished("# A\nSo:\n```sh\nringtune\n")
    assert not unfinished("# A\nSo:\n```sh\nringtune\n```\n")


def test_start_pages_are_encrypted() -> None:
    """``--insecure`` is in a sentence at most, never in a line to be typed."""
    pages = [ROOT / "README.md", ROOT / "deploy/README.md", *sorted((DOCS / "start").glob("*.md"))]
    blocks = {page: re.findall(r"```.*?```", page.read_text(encoding="utf-8"), re.DOTALL) for page in pages}
    typed = {page.name: [line for block in found for line in block.splitlines()] for page, found in blocks.items()}
    assert [(name, line) for name, lines in typed.items() for line in lines if "--insecure" in line] == [
        ("README.md", "    ringtune train job.toml --coordinator {coordinator} --insecure --out run")  # a testbed's
    ]


def test_links_check_sees_a_broken_one(tmp_path: Path) -> None:
    """Negative control: a file that is gone, a heading that is gone; code is no link."""
    page = tmp_path / "page.md"
    page.write_text("# A b\n[x](gone.md) [y](#a-b) [z](page.md#c) `[v](w.md)`\n```\n[t](u.md)\n```\n")
    assert list(broken(page)) == ["gone.md", "page.md#c"]


def test_readme_is_read_in_five_minutes() -> None:
    """It has at most 200 lines, and leads to the site."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("\n") <= LONGEST_README
    assert "(docs/index.md)" in readme


def test_every_page_is_in_a_list_of_pages() -> None:
    """What no table of contents names nobody finds; the build refuses it too."""
    named: set[Path] = set()
    for page in PAGES:
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.splitlines():
                if line and not line.startswith(":"):
                    named |= set(page.parent.resolve().glob(f"{line}.md")) | {(page.parent / f"{line}.md").resolve()}
    assert {page for page in DOCS.rglob("*.md") if page.resolve() not in named} == {DOCS / "index.md"}
    assert [page for page in named if "*" not in page.name and not page.is_file()] == []


@cases("name", drawings.DRAWINGS)
def test_drawing_is_what_the_script_draws(name: str) -> None:
    """If this fails, a rule or the script has changed: run ``make docs``."""
    assert (DOCS / f"how/{name}.svg").read_text(encoding="utf-8") == drawings.DRAWINGS[name]()
