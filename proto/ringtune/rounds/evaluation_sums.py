"""Add up an evaluation, which every owner with evaluation rows carries out in a turn of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ringtune.schedule.extent import Owner
from ringtune.schedule.turns.turns import Turn

Values = tuple[tuple[str, float], ...]


class EvaluationSums:
    """The figures of the evaluation that is under way."""

    def __init__(self) -> None:
        self._by_seq: dict[int, Values] = {}
        self._done: set[str] = set()

    def note(self, seq: int, values: Values) -> None:
        """Take the figures of one item."""
        self._by_seq[seq] = values

    def close(self, turn: Turn, owners: Iterable[Owner]) -> Values | None:
        """Note that a turn is closed; return the sums with the last owner's turn, else None.

        A run that is drained may stop between two owners: that evaluation is never logged, a resumed run repeats it.
        A fast owner may have reported of the next evaluation already; its values stay for that one.
        """
        self._done.add(turn.owner)
        if self._done != {each.node for each in owners if each.eval_rows}:
            return None
        mine = {seq: self._by_seq.pop(seq) for seq in sorted(self._by_seq) if seq < turn.end_seq}
        self._done = set()
        return _summed(mine)

    def forget(self) -> None:
        """Forget the evaluation that is under way: it is begun anew."""
        self._by_seq, self._done = {}, set()


def _summed(values: Mapping[int, Values]) -> Values:
    """Sum values by name, in the order of ``seq``: arrival must not change the last bits."""
    sums: dict[str, float] = {}
    for seq in sorted(values):
        for name, value in values[seq]:
            sums[name] = sums.get(name, 0.0) + value
    return tuple(sorted(sums.items()))
