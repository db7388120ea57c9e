"""Explain what hosts keep of rows that come again: what it spares, and what it costs in privacy."""

from __future__ import annotations

from ringtune.rounds.turns.expected_prefixes import ExpectedPrefixes, expect_prefixes
from ringtune.schedule.passage import ROUNDED
from ringtune.schedule.plan import Plan


def cache_lines(plan: Plan) -> list[str]:
    """Describe what hosts keep, and what that saves; nothing without a cache."""
    return [] if plan.placement.cache is None else [_saving(plan, expect_prefixes(plan))]


def _saving(plan: Plan, expected: ExpectedPrefixes) -> str:
    course = plan.course
    share = expected.blocks / max(1, expected.items * course.num_blocks)
    hosts = ", ".join(sorted(expected.kept)) or "no host"
    return (
        f"hidden states of rows that come again are kept at {hosts}: {expected.entering:,} of {expected.items:,} "
        f"batches enter where they were kept, which spares {share:.0%} of the forwards of blocks"
    )


def cache_price(plan: Plan) -> list[str]:
    """Say what it means that hosts keep hidden states; nothing without a cache, and with one node."""
    cache = plan.placement.cache
    if cache is None or len(plan.nodes) == 1:
        return []
    rounds = "; bfloat16 rounds them, so that the result depends on what was kept" if cache.dtype == ROUNDED else ""
    return [
        "until the run ends hosts keep hidden states of others' rows on their disks (cache.prefix = 'auto'), from "
        f"which much of the rows can be told{rounds}"
    ]
