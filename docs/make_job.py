"""Write the tables of ``docs/job.md`` from the code that reads a job: ``python -m docs.make_job``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ringtune.job.job_reference import SectionFacts, describe_job
from ringtune.models.adapter_config import CONFIGURATIONS, OTHER_NAMES, REFUSED, option_rules
from ringtune.models.decoders import METHODS
from ringtune.models.families import DESCRIBED, GENERIC_ENCODERS
from ringtune.models.family import Family
from ringtune.models.generic_decoders import GENERIC
from ringtune.models.text_towers import TOWERS

_OLD = 4
PAGE = Path(__file__).parent / "job.md"
END = "<!-- end of what is written -->"


def filled(text: str, begin: str, content: str) -> str:
    """Replace what is between the comment ``begin`` and the next ``END``; raises ``ValueError`` without it."""
    before, after = text.split(f"{begin}\n\n")
    return f"{before}{begin}\n\n{content}\n{END}{after.partition(END)[2]}"


def examples(text: str) -> dict[str, str]:
    """Lines of TOML by the names of keys: the last cells of rows, which are edited there, other than the default."""
    lines, section = {}, ""
    for line in text.splitlines():
        if titled := re.fullmatch(r"## \[(\w+)\]", line):
            section = titled[1]
        row = re.fullmatch(r"\| `(\w+)` \| .*? \| `?(.*?)`? \| .* \| `\1 = (.*)` \|", line)
        if row and row[3] != row[2]:
            lines[f"{section}.{row[1]}"] = f"{row[1]} = {row[3]}".replace("\\|", "|")
    return lines


def page() -> str:
    """The page with the present tables."""
    text = PAGE.read_text(encoding="utf-8")
    edited = examples(text)
    parts = {
        "keys": "\n".join(_section(section, edited) for section in describe_job()),
        "adapters": "\n".join([_configurations(), *map(_options, _kinds()), _refused()]),
        "plugged models": _plugged(),
        "generic encoders": table((*_TITLES, "adapters"), [row[:4] for row in _rows_of(GENERIC_ENCODERS)]),
        "generic decoders": table((*_TITLES, "adapters", "`train.packing`", "subnets"), _rows_of(GENERIC)),
        "towers": table(
            ("`model_type`", "trains as"), [(_code(name), _code(tower.family)) for name, tower in TOWERS.items()]
        ),
    }
    for name, part in parts.items():
        text = filled(text, f"<!-- {name}, written by python -m docs.make_job -->", part)
    return text


_TITLES = ("`model_type`", "query, key, value", "first and last matrix")


def table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Write a table of Markdown."""
    lines = [titles, ("---",) * len(titles), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _section(section: SectionFacts, edited: Mapping[str, str]) -> str:
    rows = []
    for key in section.keys:
        name = key.name.partition(".")[2]
        shown = edited.get(key.name, f"{name} = {key.default}")
        rows.append((_code(name), key.kind, _code(key.default), key.allowed, key.meaning, _code(shown)))
    titles = ("key", "type", "default", "allowed", "what it does", "example")
    return f"## [{section.name}]\n\n{section.meaning}\n\n{table(titles, rows)}"


def _kinds() -> list[str]:
    return list(dict.fromkeys(kind for kind, _ in CONFIGURATIONS.values()))


def _configurations() -> str:
    rows = []
    for name, (kind, defaults) in CONFIGURATIONS.items():
        aliases = ", ".join(_code(alias) for alias, stands_for in OTHER_NAMES.items() if stands_for == name)
        shown = ", ".join(f"{option}={value!r}" for option, value in defaults.items() if option in option_rules(kind))
        rows.append((_code(name), aliases, kind, _code(shown)))
    return table(
        ("configuration", "also called", "kind", "options that decide size and computation, with defaults"), rows
    )


def _options(kind: str) -> str:
    rows = [(_code(name), words) for name, words in option_rules(kind).items()]
    return f"### Options of the kind {kind}\n\n{table(('option', 'has to be'), rows)}"


def _plugged() -> str:
    names = ", ".join(_code(name) for name, family in DESCRIBED.items() if family.plugged)
    return table(("`model_type`", "kinds of configurations"), [(names, ", ".join(map(_code, METHODS)))])


def _rows_of(families: Iterable[Family]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for family in families:
        layout = family.layout
        roles = ("query", "key", "value")
        attention = dict.fromkeys(name for role in roles for name in layout.matrices_of(role))
        rest = [_code(name) for name in (layout.up, layout.down) if name]
        rows.append(
            (
                _code(family.model_type) + (f" (transformers {family.since})" if family.since > _OLD else ""),
                ", ".join(map(_code, attention)),
                ", ".join(rest) or "experts, frozen",
                ", ".join(family.methods),
                "yes" if family.packs else "",
                "yes" if family.divided else "",
            )
        )
    return rows


def _refused() -> str:
    rows = [(_code(name), reason) for name, reason in REFUSED.items()]
    return f"### Configurations that are refused\n\n{table(('configuration', 'why'), rows)}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
