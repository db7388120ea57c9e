"""What a plan says of itself: who can read embeddings, and what is done at a step, also after a move."""

from __future__ import annotations

from coordinator.screen.planned.plan_text import plan_text, table_text
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
