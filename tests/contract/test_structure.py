"""The shape of the code, read from its imports: rooms are files, a folder is one room to those outside of it.

A room stands above all that it imports. So an import that runs upwards closes a circle, and there is none: neither
between the rooms of a folder, nor between folders.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.cases import cases

ROOT = Path(__file__).parents[2]
SOURCES = {"ringtune": ROOT / "proto" / "ringtune", **{name: ROOT / name for name in ("edge", "coordinator", "sim")}}
METHOD_NAMES = ("ringada", "all", "single", "pipeadapter")


@functools.cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name; generated code is one room."""
    found = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            if "v1" not in parts:
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str) -> Iterator[str]:
    """The modules that a module imports, also those for type checks only; a package stands for its ``__init__``."""
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in modules() or node.module in modules():
                    yield inner if inner in modules() else node.module


@functools.cache
def imports() -> dict[str, frozenset[str]]:
    """What each module imports."""
    return {name: frozenset(imported(name)) for name in modules()}


def folders() -> list[str]:
    """Every package, and the whole house."""
    return ["", *sorted({name.rpartition(".")[0] for name in modules() if "." in name})]


def room_of(module: str, folder: str) -> str:
    """The room of a folder in which a module lies; empty if it lies elsewhere or is the folder's own face."""
    rest = module.removeprefix(f"{folder}.") if folder else module
    return "" if folder and rest == module else rest.partition(".")[0]


def arrows(folder: str) -> dict[str, set[str]]:
    """Which room of a folder imports which."""
    found: dict[str, set[str]] = {}
    for module, targets in imports().items():
        room = room_of(module, folder)
        if room:
            found.setdefault(room, set()).update(room_of(target, folder) for target in targets)
            found[room] -= {"", room}
    return found


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Rooms that import each other in a loop; empty if there are none."""
    left = {room: set(targets) for room, targets in graph.items()}
    while True:
        ground = {room for room, targets in left.items() if not targets & left.keys()}
        if not ground:
            return sorted(left)
        left = {room: targets for room, targets in left.items() if room not in ground}


@cases("folder", folders())
def test_structure_has_no_circle(folder: str) -> None:
    """No rooms of a folder import each other in a loop, so no import runs upwards."""
    found = circle_in(arrows(folder))
    ties = {room: sorted(arrows(folder)[room] & set(found)) for room in found}
    assert not found, f"{folder or 'the house'}: {ties}"


def test_structure_check_sees_a_circle() -> None:
    """Negative control: a loop is found, and what merely leads to it is not a part of what stands below."""
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []


# ---- who knows the methods and the head ------------------------------------------------------------


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every comparison in a file, and every case of a match, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.match_case):
            yield node.pattern.lineno, ast.unparse(node.pattern)


def comparisons() -> Iterator[tuple[str, int, str]]:
    """(module, line, text) of all comparisons of the production code."""
    for name, path in modules().items():
        for line, text in compared(ast.parse(path.read_text(encoding="utf-8"))):
            yield name, line, text


def asks_which_method(text: str) -> bool:
    """Whether a comparison is with a method's name; two methods may be compared as the values that they are."""
    names = [name for name in METHOD_NAMES if re.search(rf"""['"]{name}['"]""", text)]
    by_name = names not in ([], ["all"]) or ("all" in names and "method" in text)
    return by_name or re.search(r"\btrain\.method\b|\bmethod\.name\b|\bmethod_name\b", text) is not None


def asks_for_the_head_by_a_number(text: str) -> bool:
    """Whether a comparison of a unit is with the number of blocks."""
    units = r"\b(unit|start|stop|block|boundary|lowest|index|at)\b"
    return re.search(rf"{units}.*[=!]= .*num_blocks$|num_blocks [=!]= .*{units}$", text) is not None


def test_structure_keeps_names_of_methods_in_the_methods() -> None:
    """Nobody else asks which method it is; they ask the method what it does."""
    found = [entry for entry in comparisons() if asks_which_method(entry[2])]
    assert [entry for entry in found if not entry[0].startswith("ringtune.schedule.methods")] == []


def test_structure_asks_for_the_head_by_its_name() -> None:
    """Whether a unit is the head is asked of the head's unit, not of the number of blocks."""
    assert [entry for entry in comparisons() if asks_for_the_head_by_a_number(entry[2])] == []


@cases(
    ("code", "is_found"),
    [
        ("plan.course.method.name == 'x'", True),
        ("kind == 'ringada'", True),
        ("match kind:\n    case 'single': pass", True),
        ("job.train.method == other", True),
        ("job.train.method in ('all', 'x')", True),
        ("layers != 'all'", False),
        ("method == self.method", False),
        ("course.method.in_flight(course, 1) > 1", False),
    ],
)
def test_structure_check_sees_a_name_of_a_method(code: str, is_found: bool) -> None:
    """Negative control of the search above."""
    assert any(asks_which_method(text) for _, text in compared(ast.parse(code))) is is_found


@cases(
    ("text", "is_found"),
    [
        ("action.start == num_blocks", True),
        ("unit != plan.course.num_blocks", True),
        ("course.num_blocks == stop", True),
        ("model.num_blocks != course.num_blocks", False),
        ("action.start == course.head", False),
    ],
)
def test_structure_check_sees_the_head_as_a_number(text: str, is_found: bool) -> None:
    """Negative control of the search above."""
    assert asks_for_the_head_by_a_number(text) is is_found
