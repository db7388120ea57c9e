"""Class names that a person may have meant to be one: they differ in spaces or capitals only.

They stay two classes, because capitals may well matter (letters, say), but nobody shall find out from the result.
"""

from __future__ import annotations

from collections.abc import Iterable


def look_alikes(labels: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Group the names that are equal but for spaces and capitals: ``x``, `` x`` and ``y`` give one group, of two."""
    groups: dict[str, list[str]] = {}
    for label in sorted(labels):
        groups.setdefault(" ".join(label.casefold().split()), []).append(label)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def look_alike_lines(labels: Iterable[str]) -> list[str]:
    """Say which names differ in spaces or capitals only, a sentence for each group."""
    return [
        f"{' and '.join(map(repr, group))} are different classes, though they differ in spaces or capitals only; "
        "correct the rows?"
        for group in look_alikes(labels)
    ]
