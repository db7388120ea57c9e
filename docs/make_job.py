"""Write the tables of ``docs/job.md`` from the code that reads a job: ``python -m docs.make_job``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ringtune.job.job_reference import KeyFacts, SectionFacts, describe_job
from ringtune.models.adapter_config import known_configurations, option_rules, other_names, refused_configurations
from ringtune.models.decoders import METHODS
from ringtune.models.families import DESCRIBED, GENERIC_ENCODERS
from ringtune.models.family import Family
from ringtune.models.generic_decoders import GENERIC
from ringtune.models.text_towers import TOWERS

_OLD = 4
PAGE = Path(__file__).parent / "job.md"
EXAMPLES = {
    "model.path": '"models/all-MiniLM-L6-v2"',
    "data.train": '"train.csv"',
    "data.eval": '"test.csv"',
    "data.held_out": "0.1",
    "data.labels": '["bad", "good"]',
    "data.split": '"dirichlet:0.5"',
    "data.owners": "2",
    "data.stride": "42",
    "adapter.config": '"seq_bn[reduction_factor=8]|lora[r=4]"',
    "adapter.from": '"last-month/adapter"',
    "train.momentum": "0.9",
    "train.lr_schedule": '"cosine"',
    "train.warmup_steps": "100",
    "train.warmup_share": "0.06",
    "train.weight_decay": "0.01",
    "train.dropout": "0.1",
    "train.rounds": "5",
    "train.epochs": "3",
    "train.max_steps": "300",
    "train.eval_every": "50",
    "train.patience_evals": "3",
    "train.keep_best": "true",
    "train.sample_prompt": '"Once upon a time"',
    "train.turns": '"rows"',
    "train.seed": "1",
    "generation.rows": "100",
    "generation.at_once": "8",
    "unfreeze.every_steps": "40",
    "unfreeze.at": "[40, 100, 160]",
    "unfreeze.patience_steps": "20",
    "unfreeze.min_improvement": "0.01",
    "hift.group_size": "2",
    "hift.always_active": '["head"]',
    "hift.state": '"disk"',
    "wire.dtype": '"bfloat16"',
    "privacy.private_blocks": "1",
    "operations.policy": '"two-stage"',
    "operations.heads": "2",
    "operations.by_slice": "true",
    "operations.compute": "0.6",
    "operations.full": "3",
    "operations.forward_only": "1",
    "operations.balance": "true",
    "operations.backward_score": '"taylor"',
    "operations.scores": '"adapter"',
    "operations.refresh_rounds": "5",
    "operations.table": '"before/operations.json"',
    "memory.activations": '"auto"',
    "offload.mode": '{ "pi-1" = "laptop" }',
    "offload.interval": "4",
    "offload.pairs": '"bfloat16"',
    "offload.projected": '"all"',
    "offload.users": '"alone"',
    "offload.adapters": '{ "anna" = "linear" }',
    "data.template": '"chatml"',
    "data.append_eos": "false",
    "train.loss_on": '"all"',
    "train.packing": "true",
    "train.compute": '"bfloat16"',
    "data.user": '"author"',
    "placement.replicas": '"never"',
    "placement.follow": '"auto"',
    "placement.replan": '"never"',
    "placement.microbatches": '"auto"',
    "recovery.copies": '"next"',
    "velora.layers": '["adapter_down:down"]',
    "velora.parts": "16",
    "velora.values": "32",
    "runtime.threads": "2",
    "runtime.record": "true",
}
"""Values for keys whose default shows little; the others are shown with their default."""

END = "<!-- end of what is written -->"


def filled(text: str, begin: str, content: str) -> str:
    """Replace what is between the comment ``begin`` and the next ``END``; raises ``ValueError`` without it."""
    before, after = text.split(f"{begin}\n\n")
    return f"{before}{begin}\n\n{content}\n{END}{after.partition(END)[2]}"


def example(key: KeyFacts) -> str:
    """A line of TOML that has the key."""
    return f"{key.name.partition('.')[2]} = {EXAMPLES.get(key.name, key.default)}"


def page() -> str:
    """The page with the present tables."""
    parts = {
        "keys": "\n".join(map(_section, describe_job())),
        "adapters": "\n".join([_configurations(), *map(_options, _kinds()), _refused()]),
        "plugged models": _plugged(),
        "generic encoders": table((*_TITLES, "adapters"), [row[:4] for row in _rows_of(GENERIC_ENCODERS)]),
        "generic decoders": table((*_TITLES, "adapters", "`train.packing`"), _rows_of(GENERIC)),
        "towers": table(
            ("`model_type`", "trains as"), [(_code(name), _code(tower.family)) for name, tower in TOWERS.items()]
        ),
    }
    text = PAGE.read_text(encoding="utf-8")
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


def _section(section: SectionFacts) -> str:
    rows = [
        (_code(key.name.partition(".")[2]), key.kind, _code(key.default), key.allowed, key.meaning, _code(example(key)))
        for key in section.keys
    ]
    titles = ("key", "type", "default", "allowed", "what it does", "example")
    return f"## [{section.name}]\n\n{section.meaning}\n\n{table(titles, rows)}"


def _kinds() -> list[str]:
    return list(dict.fromkeys(kind for kind, _ in known_configurations().values()))


def _configurations() -> str:
    older = other_names()
    rows = []
    for name, (kind, defaults) in known_configurations().items():
        aliases = ", ".join(_code(alias) for alias, stands_for in older.items() if stands_for == name)
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
            )
        )
    return rows


def _refused() -> str:
    rows = [(_code(name), reason) for name, reason in refused_configurations().items()]
    return f"### Configurations that are refused\n\n{table(('configuration', 'why'), rows)}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
