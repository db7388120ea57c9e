"""One optimizer for each unit, with state by the names of parameters; that of inactive units may be kept elsewhere.

A unit's update changes nothing of another unit, so that units may be updated in any order, at any step. Each parameter
has its own count of updates, by which bias is corrected: under HiFT unit 3 has its first update at a later step than
unit 2, and yet it is its first.

A unit is inactive between an update and its next one, unless the very next step trains it again. What becomes of its
state meanwhile is a ``Keeper``'s matter: by default it stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from edge.model.optimizers.torch_optimizers import apply_update, begin_state, make_optimizer, only, state_tensors
from edge.model.tensor_bytes import fill, pieces_of, torch_dtype
from ringtune.errors import PlanError
from ringtune.files.safetensors_header import TensorInfo
from ringtune.files.safetensors_stream import TensorPieces
from ringtune.jobs.job import Train
from ringtune.jobs.optimizers import Shape, state_shapes

State = dict[str, torch.Tensor]
"""Tensors of state as ``name/key``."""

Parameters = Mapping[str, torch.nn.Parameter]


class Keeper(Protocol):
    """Keeps the state of inactive units, by unit."""

    def take_out(self, unit: int, updated: Parameters) -> State | None:
        """Return the state of a unit whose named parameters are about to be updated.

        None if the optimizer has it already, or makes it anew.
        """

    def parts(self, unit: int, updated: Parameters) -> Iterable[Parameters]:
        """Yield the parameters of an update in the parts in which it is done; a part is over when the next is asked."""

    def put_away(self, unit: int) -> bool:
        """Take the state of a unit that was updated; whether the optimizer has to let go of it."""

    def prefetch(self, units: Iterable[int]) -> None:
        """Begin to read the state of units that are updated soon, without waiting for it."""

    def tensors(self, unit: int) -> dict[str, TensorPieces] | None:
        """Return the state of a unit; None if this keeps none."""

    def make_room(self, unit: int, wanted: Mapping[str, TensorInfo]) -> bool:
        """Make room for the state of a unit in place of what is kept of it; False if this keeps none."""

    def fill(self, unit: int, name: str, source: TensorPieces) -> None:
        """Fill a tensor of the room of a unit."""

    def close(self) -> None:
        """Drop all that is kept."""


class Dropped:
    """Keeps nothing: the moments and counts of a unit begin anew when its turn comes round again."""

    def take_out(self, unit: int, updated: Parameters) -> State | None:
        """Return None: the optimizer makes the state anew, or has it, if the unit stayed active."""
        return None

    def parts(self, unit: int, updated: Parameters) -> Iterable[Parameters]:
        """Yield all parameters at once."""
        yield updated

    def put_away(self, unit: int) -> bool:
        """Let the state go."""
        return True

    def prefetch(self, units: Iterable[int]) -> None:
        """Do nothing: there is nothing to read."""

    def tensors(self, unit: int) -> dict[str, TensorPieces] | None:
        """Return None: only the optimizer has state, of active units."""
        return None

    def make_room(self, unit: int, wanted: Mapping[str, TensorInfo]) -> bool:
        """Return False: what is loaded is of active units."""
        return False

    def fill(self, unit: int, name: str, source: TensorPieces) -> None:
        """Refuse: there is no room.

        Raises:
            PlanError: always; state is filled in only where ``make_room`` made room.
        """
        raise PlanError(f"unit {unit} has no room for the state {name}: its optimizer keeps it")

    def close(self) -> None:
        """Do nothing."""


class InMemory(Dropped):
    """Leaves all state with the optimizers, in memory."""

    def put_away(self, unit: int) -> bool:
        """Keep the state where it is."""
        return False


class UnitOptimizers:
    """The optimizers of everything that trains at a node.

    Args:
        train: the job's optimizer.
        units: the parameters of each unit, by names that differ over all units.
        keeper: keeps the state of inactive units; by default it stays in memory.

    Attributes:
        name: of the optimizer, as in the job.
    """

    def __init__(self, train: Train, units: Mapping[int, Parameters], keeper: Keeper | None = None) -> None:
        self.name = train.optimizer
        self._units = {unit: dict(parameters) for unit, parameters in units.items() if parameters}
        self._optimizers = {
            unit: make_optimizer(train, list(parameters.values())) for unit, parameters in self._units.items()
        }
        self._unit_of = {name: unit for unit, parameters in self._units.items() for name in parameters}
        self._keeper: Keeper = keeper or InMemory()

    @property
    def held_bytes(self) -> int:
        """Bytes of the state that the optimizers hold, without what is kept elsewhere (for tests and benchmarks)."""
        return sum(value.nbytes for unit in self._units for value in self._held(unit).values())

    def keep_in(self, keeper: Keeper) -> None:
        """Keep the state of inactive units there from now on; no unit has state yet."""
        self._keeper = keeper

    @property
    def units(self) -> Mapping[int, Parameters]:
        """The parameters of each unit, by name."""
        return self._units

    # ---- training ---------------------------------------------------------------------------------

    def update(self, units: Iterable[int], learning_rate: float) -> None:
        """Do one optimizer step of each of these units, one after the other, and free its gradients.

        A parameter without a gradient is left alone. No gradient is changed.
        """
        for unit in units:
            updated = {name: value for name, value in self._units.get(unit, {}).items() if value.grad is not None}
            if updated:
                state = self._keeper.take_out(unit, updated)
                if state is not None:
                    self._give(unit, state)
                begin_state(self.name, self._optimizers[unit], updated.values())
                for part in self._keeper.parts(unit, updated):
                    with only(self._optimizers[unit], part.values()):
                        apply_update(self._optimizers[unit], learning_rate)

    def put_away(self, units: Iterable[int]) -> None:
        """Put the state of these units away until they are updated again."""
        for unit in units:
            if unit in self._optimizers and self._keeper.put_away(unit):
                self._optimizers[unit].state.clear()

    def prefetch(self, units: Iterable[int]) -> None:
        """Begin to read the state of units that are updated soon; no result depends on it."""
        self._keeper.prefetch(unit for unit in units if unit in self._units)

    def exchange(self, fresh: Mapping[int, torch.nn.Parameter]) -> None:
        """Go on with other tensors in place of some parameters, by their ``id``; state and counts stay."""
        for unit, optimizer in self._optimizers.items():
            self._units[unit] = {name: fresh.get(id(value), value) for name, value in self._units[unit].items()}
            for group in optimizer.param_groups:
                group["params"] = [fresh.get(id(parameter), parameter) for parameter in group["params"]]
            for parameter in list(optimizer.state):
                if id(parameter) in fresh:
                    optimizer.state[fresh[id(parameter)]] = optimizer.state.pop(parameter)

    def drop_state(self) -> None:
        """Free the moments and step counts of all active units."""
        for optimizer in self._optimizers.values():
            optimizer.state.clear()

    def close(self) -> None:
        """Free all state, wherever it is."""
        self.drop_state()
        self._keeper.close()

    # ---- files ------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, TensorPieces]:
        """Return all state as ``name/key``, read when it is gone through; a parameter never updated has none."""
        found: dict[str, TensorPieces] = {}
        for unit in self._units:
            kept = self._keeper.tensors(unit)
            if kept is None:
                kept = {name: pieces_of(value) for name, value in self._held(unit).items()}
            found |= kept
        return found

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Return the shapes of the state of an updated parameter of this shape, by key."""
        return state_shapes(self.name, shape)

    def make_room(self, wanted: Mapping[str, TensorInfo]) -> None:
        """Make room for the state that is named, to be filled; state that is not named is dropped.

        A tensor of the same type and shape stays.

        Args:
            wanted: as ``name/key``.
        """
        for unit in self._units:
            of_unit = {full: info for full, info in wanted.items() if self._unit_of[full.rpartition("/")[0]] == unit}
            if not self._keeper.make_room(unit, of_unit):
                self._give(unit, self._room_in_memory(unit, of_unit))
            else:
                self._optimizers[unit].state.clear()

    def fill(self, full: str, source: TensorPieces) -> None:
        """Fill one tensor of the room."""
        unit = self._unit_of[full.rpartition("/")[0]]
        held = self._held(unit).get(full)
        if held is not None:
            fill(held, source)
        else:
            self._keeper.fill(unit, full, source)

    # ---- one unit ---------------------------------------------------------------------------------

    def _held(self, unit: int) -> State:
        return state_tensors(self._optimizers[unit], self._units[unit])

    def _give(self, unit: int, state: State) -> None:
        """Give an optimizer this state in place of its own."""
        optimizer = self._optimizers[unit]
        optimizer.state.clear()
        for full, value in state.items():
            name, _, key = full.rpartition("/")
            optimizer.state[self._units[unit][name]][key] = value

    def _room_in_memory(self, unit: int, wanted: Mapping[str, TensorInfo]) -> State:
        before, room = self._held(unit), {}
        for full, info in wanted.items():
            name = full.rpartition("/")[0]
            dtype, old = torch_dtype(info.dtype), before.get(full)
            if old is None or old.dtype != dtype or tuple(old.shape) != info.shape:
                old = torch.empty(info.shape, dtype=dtype, device=self._units[unit][name].device)
            room[full] = old
        return room
