"""Events and commands of a run that keeps its best result; see ``rounds.best_keeping``."""

from __future__ import annotations

from typing import NamedTuple


class CollectBest(NamedTuple):
    """Ask a node for what it trained up to ``step``, whose evaluation is the best so far; ``BestSent`` answers.

    ``number`` counts the requests; all other fields are those of ``Collect``.
    """

    node: str
    step: int
    number: int
    with_head: bool
    with_private: bool


class BestSent(NamedTuple):
    """A node has sent what it was asked for with this number."""

    node: str
    number: int


class LogBest(NamedTuple):
    """Log that every node has sent its part of the best result, which is that of ``step``."""

    step: int
    number: int
