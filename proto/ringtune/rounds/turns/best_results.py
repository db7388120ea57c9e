"""Which step's result is wanted from the nodes, because its evaluation is the best one so far (``train.keep_best``).

Nothing is granted beyond that evaluation until every node has sent what it trained, so that what they send is just what
was evaluated. After the last turn nobody is asked: the results that are collected then are of the same step ::

    evaluation after step    10        20       30        40, the last one
    loss                     0.7       0.5      0.6       0.4
    sent                     step 10   step 20  -         with the end of the run
"""

from __future__ import annotations

from collections.abc import Iterable


class BestResults:
    """What the nodes of one run send of the best evaluation.

    Attributes:
        wanted: after which step that evaluation was; None = nothing is wanted.
        asked: nodes that were asked and have not sent all yet.
        num_asks: how often the nodes were asked; an answer to an older request counts for nothing.
    """

    def __init__(self) -> None:
        self.wanted: int | None = None
        self.asked: set[str] = set()
        self.num_asks = 0

    def ask(self, nodes: Iterable[str]) -> int:
        """Note that the nodes are asked; return the number of the request."""
        self.asked, self.num_asks = set(nodes), self.num_asks + 1
        return self.num_asks

    def answered(self, node: str, number: int) -> bool:
        """Take the answer of a node; return whether it was the last one that lacked."""
        if number != self.num_asks or node not in self.asked:
            return False
        self.asked.discard(node)
        return not self.asked

    def forget_asked(self) -> None:
        """Count on no answer any more: nodes have to be asked anew."""
        self.asked = set()
