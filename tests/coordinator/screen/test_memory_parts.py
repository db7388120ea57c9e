"""The words of a node's memory: each one that ``--explain`` prints is explained there, and in the glossary."""

from __future__ import annotations

import re
from pathlib import Path

from coordinator.planner.explaining.plan import explain
from coordinator.planner.make_plan import make_plan
from coordinator.screen.planned.plan_text import plan_text
from ringtune.costs.memory.terms import PART_WORDS, PARTS
from tests.support.fake_agents import NO_TIMES, facts, job

GLOSSARY = Path(__file__).parents[3] / "docs" / "glossary.md"


def test_explanation_has_a_legend_of_the_parts_that_it_prints() -> None:
    """Each part that a node has is explained once, and no other part."""
    made = make_plan(job(), {name: facts(name, **NO_TIMES) for name in "ab"})
    assert made.choice is not None
    why = explain(made.choice, relative=True)
    lines = plan_text(made.plan, made.memory, measured=False, num_steps=0, why=why)
    printed = {part for node, _ in made.memory.items() for part, size in made.memory[node].parts().items() if size}
    assert [line for line in lines if line.startswith("    ") and line.strip().partition(":")[0] in PARTS] == [
        f"    {part}: {words}" for part, words in PART_WORDS.items() if part in printed
    ]
    assert {"optimizer", "adapters", "buffers", "passing"} <= printed


def test_glossary_names_the_parts() -> None:
    """In their order, and no others."""
    entry = GLOSSARY.read_text(encoding="utf-8").partition("- **part** (of a node's memory):")[2].partition("\n- ")[0]
    assert tuple(re.findall(r"\*(\w+)\*", entry)) == PARTS
