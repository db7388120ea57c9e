"""Whether a node has room for a heap in pieces."""

from __future__ import annotations

from ringtune.costs.memory_terms import MemoryEstimate, Term, has_room_for_heap
from tests.support.cases import cases


@cases(("budget", "has_room"), [(60 + 40 + 2 * 40, True), (60 + 40 + 2 * 40 - 1, False)])
def test_heap_of_pieces_needs_twice_the_activations_besides(budget: int, has_room: bool) -> None:
    """Weights stay where they are and leave no pieces."""
    needs = MemoryEstimate((Term("weights", "block", 6, 10), Term("activations", "graph", 4, 10)))
    assert has_room_for_heap(needs, budget) == has_room


def test_heap_of_a_node_without_activations_needs_nothing_besides() -> None:
    """An owner that hosts no block keeps no graph."""
    assert has_room_for_heap(MemoryEstimate((Term("weights", "embedding", 1, 10),)), 10)
