"""The glossary names what exists, and each of its words once."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.cases import cases

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
SOURCES = {"ringtune": ROOT / "proto", "edge": ROOT, "coordinator": ROOT, "sim": ROOT}
AGREED_ONLY = "Agreed, but not built yet"
# the words of the house; every one has its place in the glossary
WORDS = re.findall(
    r"[\w-]+",
    """
    course placement unit snapshot turn round step item leg boundary slice owner host helper
    plan method operation action op micro-batch ring credit grant head checkpoint shard profile trace span
    member agent coordinator template
    """,
)


class Entry(NamedTuple):
    """One word, with what stands beside it."""

    word: str
    group: str
    text: str

    @property
    def names(self) -> list[str]:
        """The dotted names of code in its text."""
        return [name for name in re.findall(r"`([\w.]+)`", self.text) if name.partition(".")[0] in SOURCES]


def entries() -> Iterator[Entry]:
    """All entries, in their order."""
    for group in GLOSSARY.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, body = group.partition("\n")
        for part in re.split(r"\n- ", body)[1:]:
            found = re.fullmatch(r"\*\*(.+?)\*\*( \(.+?\))?: (.+)", part.strip(), flags=re.DOTALL)
            assert found, f"{part!r} is no entry: it has to be '**word**: text'"
            yield Entry(found[1] + (found[2] or ""), title, found[3])


ENTRIES = list(entries())


@functools.cache
def definitions(path: Path) -> dict[str, ast.AST]:
    """What a module defines, by name; fields and methods of a class as ``Class.name``."""
    found: dict[str, ast.AST] = {}

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            names: list[str] = []
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{prefix}{node.name}.")
                names = [node.name]
            elif isinstance(node, ast.FunctionDef):
                names = [node.name]
            elif isinstance(node, ast.AnnAssign):
                names = [node.target.id] if isinstance(node.target, ast.Name) else []
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found.update((prefix + name, node) for name in names)

    add(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something that a module defines; nothing is imported."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        place = SOURCES[parts[0]].joinpath(*parts[:count])
        module = place / "__init__.py"  # a folder without it is left from another version, with compiled files only
        module = module if module.is_file() else place.with_suffix(".py")
        if module.is_file():
            return count == len(parts) or ".".join(parts[count:]) in definitions(module)
    return False


@cases("entry", ENTRIES)
def test_glossary_names_what_exists(entry: Entry) -> None:
    """A word says where it lives, and that is there; one that is only agreed says nothing."""
    assert bool(entry.names) == (entry.group != AGREED_ONLY)
    assert [name for name in entry.names if not exists(name)] == []


def test_glossary_has_its_words_in_order() -> None:
    """Each group is alphabetical, no word comes twice, and none of the agreed ones is missing."""
    words = [entry.word for entry in ENTRIES]
    assert len(set(words)) == len(words)
    assert set(WORDS) <= set(words)
    for group in {entry.group for entry in ENTRIES}:
        of_group = [entry.word for entry in ENTRIES if entry.group == group]
        assert of_group == sorted(of_group), group
