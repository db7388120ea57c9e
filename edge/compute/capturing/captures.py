"""The captures of one host: one for each kind of adapters that users have there, and one where there is one kind.

Pairs of a kind are of the rows of its users. So each row's pair leaves once, whatever kinds there are, and names of
pairs tell the kind (``ringtune.jobs.user_adapters``): ``3.output.adapters.ringtune.x`` of the job's own,
``1/3.output.adapters.ringtune.x`` of the next.

Source: ColA, section 4.3 (users choose the architecture of their models).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from edge.compute.capturing.capture import Capture
from edge.compute.capturing.pairs import Pairs
from ringtune.jobs.user_adapters import Kind
from ringtune.schedule.whose_rows.users import RowsOfUser


class Captures:
    """Records the pairs of a host's offloaded blocks, of every kind.

    Args:
        kinds: of the run, each with its capture.
        by_kind: whether rows are run by kind. Otherwise, with merged adapters, all run together, and each kind is given
            its rows of what was recorded.
    """

    def __init__(self, kinds: Sequence[tuple[Kind, Capture]], *, by_kind: bool) -> None:
        self._kinds = tuple(kinds)
        self._of_user = {user: (kind, capture) for kind, capture in kinds for user in kind.users}
        self._by_kind = by_kind

    @property
    def inputs(self) -> dict[str, int]:
        """Values of a token of x, by the names of the pairs that have one of their own."""
        return {
            f"{kind.prefix}{name}": width for kind, capture in self._kinds for name, width in capture.inputs.items()
        }

    @property
    def with_signs(self) -> bool:
        """Whether pairs say which units of a ReLU are on."""
        return any(capture.with_signs for _, capture in self._kinds)

    @with_signs.setter
    def with_signs(self, wanted: bool) -> None:
        for _, capture in self._kinds:
            capture.with_signs = wanted

    @contextlib.contextmanager
    def recording(self, given: PairsByKind | None, rows: Sequence[RowsOfUser]) -> Iterator[PairsByKind]:
        """Record forwards with a graph while the context is open; see ``Capture.recording``.

        Args:
            given: of a micro-batch some of whose blocks were recorded before; None = new ones.
            rows: whose rows the micro-batch has; none where all users have one set.
        """
        pairs = given if given is not None else self._pairs(rows)
        with contextlib.ExitStack() as stack:
            for kind, capture in self._kinds:
                if kind.number in pairs.parts:
                    stack.enter_context(capture.recording(pairs.parts[kind.number].pairs))
            yield pairs

    def of_rows(self, user: str, positions: tuple[int, ...]) -> AbstractContextManager[None]:
        """Record a user's rows of a micro-batch by themselves while the context is open; nothing where nothing is."""
        return self._of_user[user][1].of_rows(positions)

    def _pairs(self, rows: Sequence[RowsOfUser]) -> PairsByKind:
        """Return empty pairs of the kinds that have rows."""
        found: dict[int, _Part] = {}
        for kind, capture in self._kinds:
            own = [position for user, positions in rows if user in kind.users for position in positions]
            if own or not rows:
                picked = sorted(own) if own and not self._by_kind and len(self._kinds) > 1 else None
                found[kind.number] = _Part(kind.prefix, capture.pairs(), picked)
        return PairsByKind(found)


class _Part:
    """The pairs of one kind, and which of the recorded rows are of its users; None = all of them."""

    __slots__ = ("pairs", "picked", "prefix")

    def __init__(self, prefix: str, pairs: Pairs, picked: Sequence[int] | None) -> None:
        self.prefix, self.pairs, self.picked = prefix, pairs, picked

    def take(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        found = self.pairs.take(start, stop)
        rows = None if self.picked is None else list(self.picked)
        return {f"{self.prefix}{name}": value if rows is None else value[rows] for name, value in found.items()}


class PairsByKind:
    """What was recorded of one micro-batch, by kind.

    Args:
        parts: of the kinds that have rows in it, by index.
    """

    def __init__(self, parts: Mapping[int, _Part]) -> None:
        self.parts = parts

    def take(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Hand out the pairs of blocks ``[start, stop)``, and drop them; see ``Pairs.take``.

        Returns:
            By name, those of a kind with its prefix; of each kind the rows of its users, in the order of the rows.
        """
        found: dict[str, torch.Tensor] = {}
        for part in self.parts.values():
            found |= part.take(start, stop)
        return found

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that is held."""
        for part in self.parts.values():
            yield from part.pairs.tensors()
