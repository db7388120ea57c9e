"""The text of a plan: who can read embeddings, what is done at a step, and the parts of a node's memory."""

from __future__ import annotations

import re
from pathlib import Path

from coordinator.planner.explain import explain
from coordinator.planner.make_plan import make_plan as make_plan_make_plan
from coordinator.screen.plan_text import plan_text, table_text
from ringtune.costs.memory_terms import PART_WORDS, PARTS
from tests.support.fake_agents import NO_TIMES, facts, job
from tests.support.moves import moving, slices_of
from tests.support.plans import changed, make_plan

ONE = make_plan([("a", 0, 2), ("b", 2, 4)], ["c"], num_blocks=4, num_steps=20, local_iterations=2, method="all")
READS = "can reconstruct the input text from the embeddings it receives; set privacy.private_blocks to make that harder"


def test_plan_names_all_who_can_tell_the_tokens() -> None:
    """Every host of the lowest blocks gets embeddings, in any placement of the run."""
    both = changed(ONE, slices=slices_of([("a", 0, 2), ("d", 0, 2), ("b", 2, 4)]))
    for plan, hosts in (
        (ONE, "node a"),
        (both, "each of the nodes a, d"),
        (moving(both, (3, [("b", 0, 4)])), "each of the nodes a, d, b"),
        (moving(ONE, (3, [("a", 0, 3), ("b", 3, 4)])), "node a"),
    ):
        assert f"privacy: {hosts} {READS}" in plan_text(plan, {}, num_steps=0, measured=True)


def test_table_is_that_of_the_placement_that_holds_at_its_step() -> None:
    """The run moves after step 6: from there on b hosts all blocks."""
    plan = moving(ONE, (3, [("b", 0, 4)]))
    before, after = (table_text(plan, at_step=step, num_steps=1) for step in (5, 6))
    assert "F5.0[0,2)" in before and "F6.0[0,4)" in after


GLOSSARY = Path(__file__).parents[3] / "docs" / "glossary.md"


def test_explanation_has_a_legend_of_the_parts_that_it_prints() -> None:
    """Each part that a node has is explained once, and no other part."""
    made = make_plan_make_plan(job(), {name: facts(name, **NO_TIMES) for name in "ab"})
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
