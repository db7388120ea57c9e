"""Tables as text: aligned columns, figures of each class, and profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.quantities import format_bytes, format_seconds
from ringtune.run_control.evaluation import MIN_ROWS
from ringtune.texts import one_line

MAX_CELL: Final = 200
"""Limit of a cell; texts from nodes may be longer."""


def table_lines(titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Write a line of titles and one for each row; ``left`` first columns are left-aligned, others right-aligned."""
    every = [tuple(titles), *(tuple(one_line(cell, most=MAX_CELL) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in every) for column in range(len(titles))]
    return ["  ".join(_cell(cell, widths[i], i < left) for i, cell in enumerate(row)).rstrip() for row in every]


def _cell(text: str, width: int, to_left: bool) -> str:
    return text.ljust(width) if to_left else text.rjust(width)


_MAX_ROWS: Final = 30
_MAX_COLUMNS: Final = 8


def class_lines(figures: Mapping[str, Any]) -> list[str]:
    """Write the tables of classes or tags, and of entities, of an evaluation; empty without counts."""
    return [*_class_table(figures), *_entity_table(figures)]


def _class_table(figures: Mapping[str, Any]) -> list[str]:
    """Write precision, recall, F1 and predicted counts of each class.

    Of more than 30 classes only those with the lowest F1 are written, of more than 8 no counts; ``report.json`` has
    all.
    """
    classes, confusion = figures.get("classes"), figures.get("confusion")
    if not classes or not confusion:
        return []
    labels: list[str] = confusion["labels"]
    shown = sorted(classes, key=lambda label: (classes[label]["f1"], labels.index(label)))[:_MAX_ROWS]
    predicted = labels if len(labels) <= _MAX_COLUMNS else []
    single, many, counted_as = ("tag", "tags", "words") if "words" in figures else ("class", "classes", "rows")
    titles = [single, counted_as, "precision", "recall", "F1", *(f"as {label}" for label in predicted)]
    rows = [
        [
            label,
            f"{classes[label]['rows']:,}",
            *(f"{classes[label][name]:.4f}" for name in ("precision", "recall", "f1")),
            *(f"{count:,}" for count in confusion["counts"][labels.index(label)][: len(predicted)]),
        ]
        for label in sorted(shown, key=labels.index)
    ]
    left = len(classes) - len(shown)
    more = [f"and {left} {many} with a higher F1; report.json has them"] if left else []
    if "matthews" in figures and "words" not in figures:
        more.append(f"Matthews correlation of true and predicted {many}: {figures['matthews']:.4f}")
    counted, rows_of_all = figures.get("counted_rows"), figures.get("count")
    if counted != rows_of_all:
        more.append(
            f"{many} are counted on {counted:,} of {rows_of_all:,} {counted_as}: an owner of fewer than {MIN_ROWS} "
            "evaluation rows sends no counts, which could tell its labels"
        )
    return [*(f"  {line}" for line in table_lines(titles, rows)), *more]


def _entity_table(figures: Mapping[str, Any]) -> list[str]:
    """Write precision, recall and F1 of each type of entities, and of all."""
    types = figures.get("entity_types")
    if not types:
        return []
    of_all = {name: figures[f"entity_{name}"] for name in ("precision", "recall", "f1")}
    whole = {**of_all, "entities": figures["entities"], "predicted": sum(kind["predicted"] for kind in types.values())}
    shown = [*sorted(types.items(), key=lambda item: -item[1]["entities"])[:_MAX_ROWS], ("all", whole)]
    rows = [
        [
            name,
            *(f"{entry[count]:,}" for count in ("entities", "predicted")),
            *(f"{entry[share]:.4f}" for share in ("precision", "recall", "f1")),
        ]
        for name, entry in shown
    ]
    titles = ["entity", "entities", "predicted", "precision", "recall", "F1"]
    return [f"  {line}" for line in table_lines(titles, rows)]


_NODE_TITLES = ("node", "forward", "with graph", "backward", "head", "budget", "threads", "hardware")
_LINK_TITLES = ("link", "rate", "quartiles", "latency")


def profile_text(profile: Profile) -> list[str]:
    """Write two tables: nodes with times of one block for the largest micro-batch, and links."""
    shape = profile.nodes[0].shape
    title = f"one block, {shape.rows} rows of up to {shape.tokens} tokens, {shape.adapter}, {shape.dtype}:"
    lines = [title, *_table(_NODE_TITLES, [_node(node) for node in profile.nodes])]
    if profile.links:
        lines += ["", *_table(_LINK_TITLES, [_link(link) for link in profile.links])]
    return lines


def _node(node: NodeFacts) -> tuple[str, ...]:
    head = max((point.median_s for point in node.work_times if point.work == "head"), default=0.0)
    return (
        node.node,
        _seconds(node.block_forward_s),
        _seconds(node.block_graph_s),
        _seconds(node.block_backward_s),
        _seconds(head),
        format_bytes(node.memory_bytes),
        str(node.threads),
        node.hardware,
    )


def _link(link: LinkFacts) -> tuple[str, ...]:
    low, high = (_rate(rate) for rate in (link.rate_low_bytes_per_s, link.rate_high_bytes_per_s))
    return (
        f"{link.source} -> {link.target}",
        _rate(link.rate_bytes_per_s),
        f"{low} to {high}",
        _seconds(link.latency_s),
    )


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(round(bytes_per_s))}/s"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in table_lines(titles, rows, left=len(titles))]
