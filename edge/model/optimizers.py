"""Optimizers, one for each unit, and the safetensors files of trained tensors with their optimizer state.

Updates of units are independent, in any order and at any step. Each parameter has its own count of updates, for the
bias correction: under HiFT the first update of unit 3 is at a later step than that of unit 2. A unit is inactive
between two updates, unless these are at consecutive steps; a ``StateStore`` keeps its state then, by default in memory.

AdamW, SGD, momentum and Adagrad use torch's ``fused`` kernel, which reads parameter, gradient and state once and copies
nothing; the other paths of torch copy one tensor or all (``foreach``). Adafactor has no such kernel, and is updated
tensor by tensor. On a CPU the kernel silently assumes contiguous tensors: so gradients are made contiguous, and other
parameters use the slow path. It does not raise the version counter by which autograd detects a graph of old values:
that is done here.

Measured with two threads: AdamW takes a quarter of the processor time of the path tensor by tensor, and differs from it
by rounding; one and several threads give the same bits.

A head at a hand-over and a shard of a checkpoint are such files; they differ in the names of their tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from edge.model.tensor_files import (
    DTYPE_NAMES,
    fill,
    is_finite,
    is_positive,
    kind_of,
    pieces_of,
    require_kind,
    torch_dtype,
)
from ringtune.config.optimizers import MOMENTUM, SIGNED, STEP, state_shapes
from ringtune.errors import IntegrityError, PlanError
from ringtune.job.job import Train
from ringtune.storage.tensor_files import TensorFile, TensorInfo, TensorPieces

State = dict[str, torch.Tensor]
"""Optimizer state as ``name/key``."""

Parameters = Mapping[str, torch.nn.Parameter]
_OTHER_NODE: Final = "repair the node that trained it, or go on without it"


class StateStore:
    """Keeps the optimizer state of inactive units. This one keeps none: their moments and counts start anew."""

    def load_state(self, unit: int, updated: Parameters) -> State | None:
        """Return the state before an update; None if the optimizer has it, or has to make it anew."""
        return None

    def parts(self, unit: int, updated: Parameters) -> Iterable[Parameters]:
        """Yield the parameters of an update in parts; a part is updated before the next is requested."""
        yield updated

    def evict_state(self, unit: int) -> bool:
        """Keep the state of an updated unit; True if the optimizer has to drop it."""
        return True

    def prefetch(self, units: Iterable[int]) -> None:
        """Start to read the state of units before their update."""

    def tensors(self, unit: int) -> dict[str, TensorPieces] | None:
        """Return the state of a unit; None if this store keeps none."""
        return None

    def make_room(self, unit: int, infos: Mapping[str, TensorInfo]) -> bool:
        """Make room for the state of a unit, in place of the kept state; False if this store keeps none."""
        return False

    def fill(self, unit: int, name: str, source: TensorPieces) -> None:
        """Fill a tensor of a unit's room; raises ``PlanError``."""
        raise PlanError(f"unit {unit} has no room for the state {name}: its optimizer keeps it")

    def close(self) -> None:
        """Drop all state."""


class MemoryStateStore(StateStore):
    """Leaves all state with the optimizers, in memory."""

    def evict_state(self, unit: int) -> bool:
        """Return False: the optimizer keeps the state."""
        return False


class UnitOptimizers:
    """Optimizers of all units that train at a node, one each.

    Args:
        units: unit -> its parameters, by names that are unique over all units.

    Attributes:
        name: of the optimizer, as in the job.
        units: the parameters of each unit, by name.
    """

    def __init__(self, train: Train, units: Mapping[int, Parameters]) -> None:
        self.name = train.optimizer
        self.units: dict[int, Parameters] = {unit: dict(parameters) for unit, parameters in units.items() if parameters}
        self._optimizers = {
            unit: make_optimizer(train, list(parameters.values())) for unit, parameters in self.units.items()
        }
        self._unit_of = {name: unit for unit, parameters in self.units.items() for name in parameters}
        self._keeper: StateStore = MemoryStateStore()

    @property
    def held_bytes(self) -> int:
        """Bytes of the state in the optimizers, without that of the store; for tests and benchmarks."""
        return sum(value.nbytes for unit in self.units for value in self._held(unit).values())

    def keep_in(self, keeper: StateStore) -> None:
        """Set the store for inactive units, by default memory; no unit may have state yet."""
        self._keeper = keeper

    # ---- training ---------------------------------------------------------------------------------

    def update(self, units: Iterable[int], learning_rate: float) -> None:
        """Do one optimizer step of each of these units, of parameters that have a gradient, and free the gradients."""
        for unit in units:
            updated = {name: value for name, value in self.units.get(unit, {}).items() if value.grad is not None}
            if updated:
                state = self._keeper.load_state(unit, updated)
                if state is not None:
                    self._give(unit, state)
                begin_state(self.name, self._optimizers[unit], updated.values())
                for part in self._keeper.parts(unit, updated):
                    with only(self._optimizers[unit], part.values()):
                        apply_update(self._optimizers[unit], learning_rate)

    def evict_state(self, units: Iterable[int]) -> None:
        """Evict the state of these units until their next update."""
        for unit in units:
            if unit in self._optimizers and self._keeper.evict_state(unit):
                self._optimizers[unit].state.clear()

    def prefetch(self, units: Iterable[int]) -> None:
        """Start to read the state of units before their update."""
        self._keeper.prefetch(unit for unit in units if unit in self.units)

    def exchange(self, fresh: Mapping[int, torch.nn.Parameter]) -> None:
        """Replace parameters by new ones, by ``id`` of the old; state and counts stay."""
        for unit, optimizer in self._optimizers.items():
            self.units[unit] = {name: fresh.get(id(value), value) for name, value in self.units[unit].items()}
            for group in optimizer.param_groups:
                group["params"] = [fresh.get(id(parameter), parameter) for parameter in group["params"]]
            for parameter in list(optimizer.state):
                if id(parameter) in fresh:
                    optimizer.state[fresh[id(parameter)]] = optimizer.state.pop(parameter)

    def drop_state(self) -> None:
        """Free the state of all active units."""
        for optimizer in self._optimizers.values():
            optimizer.state.clear()

    def close(self) -> None:
        """Free all state, also that of the store."""
        self.drop_state()
        self._keeper.close()

    # ---- files ------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, TensorPieces]:
        """Return all state as ``name/key``, read when iterated; a parameter without updates has none."""
        state: dict[str, TensorPieces] = {}
        for unit in self.units:
            kept = self._keeper.tensors(unit)
            if kept is None:
                kept = {name: pieces_of(value) for name, value in self._held(unit).items()}
            state |= kept
        return state

    def make_room(self, infos: Mapping[str, TensorInfo]) -> None:
        """Make room for exactly the state ``infos``, as ``name/key``; a tensor of the same dtype and shape stays."""
        for unit in self.units:
            of_unit = {full: info for full, info in infos.items() if self._unit_of[full.rpartition("/")[0]] == unit}
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
        """Return moments and step counts of a unit in its optimizer; a parameter without updates has none.

        Example: AdamW after a step gives ``w/step``, ``w/exp_avg`` and ``w/exp_avg_sq`` for the parameter ``w``.
        """
        return {
            f"{name}/{key}": value
            for name, parameter in self.units[unit].items()
            for key, value in self._optimizers[unit].state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def _give(self, unit: int, state: State) -> None:
        optimizer = self._optimizers[unit]
        optimizer.state.clear()
        for full, value in state.items():
            name, _, key = full.rpartition("/")
            optimizer.state[self.units[unit][name]][key] = value

    def _room_in_memory(self, unit: int, infos: Mapping[str, TensorInfo]) -> State:
        before, room = self._held(unit), {}
        for full, info in infos.items():
            name = full.rpartition("/")[0]
            dtype, old = torch_dtype(info.dtype), before.get(full)
            if old is None or old.dtype != dtype or tuple(old.shape) != info.shape:
                old = torch.empty(info.shape, dtype=dtype, device=self.units[unit][name].device)
            room[full] = old
        return room


def make_optimizer(train: Train, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make torch's optimizer of a job, without state.

    ``step`` skips parameters without a gradient, so their state and counts start when they first train.
    """
    rate, decay = train.learning_rate, train.weight_decay
    is_plain = all(parameter.is_contiguous() for parameter in parameters)
    if train.optimizer == "adagrad":  # its kernel is written for processors alone
        is_plain = is_plain and all(parameter.device.type == "cpu" for parameter in parameters)
    path: dict[str, Any] = {"fused": True} if is_plain else {"foreach": False}
    match train.optimizer:
        case "sgd":
            return torch.optim.SGD(parameters, lr=rate, weight_decay=decay, **path)
        case "momentum":
            momentum = MOMENTUM if train.momentum is None else train.momentum
            return torch.optim.SGD(parameters, lr=rate, momentum=momentum, weight_decay=decay, **path)
        case "adagrad":
            adagrad = torch.optim.Adagrad(parameters, lr=rate, weight_decay=decay, **path)
            adagrad.state.clear()  # it makes its state at once
            return adagrad
        case "adafactor":
            return torch.optim.Adafactor(parameters, lr=rate, weight_decay=decay, foreach=False)
        case _:
            return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, **path)


def apply_update(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Do one optimizer step at this learning rate, and free the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        for parameter in group["params"]:
            if parameter.grad is not None and not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
    optimizer.step()
    updated = [value for group in optimizer.param_groups for value in group["params"] if value.grad is not None]
    torch.autograd.graph.increment_version(updated)
    optimizer.zero_grad(set_to_none=True)


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Restrict an optimizer to these parameters inside the context; the others keep state and gradients."""
    chosen, before = {id(parameter) for parameter in parameters}, [group["params"] for group in optimizer.param_groups]
    for group, known in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [parameter for parameter in known if id(parameter) in chosen]
    try:
        yield
    finally:
        for group, known in zip(optimizer.param_groups, before, strict=True):
            group["params"] = known


def begin_state(name: str, optimizer: torch.optim.Optimizer, updated: Iterable[torch.nn.Parameter]) -> None:
    """Set zero state for parameters without state.

    Torch would do it too, but the momentum kernel takes the first update of one parameter as the first of all.
    """
    for parameter in updated:
        if not optimizer.state.get(parameter):
            shapes = state_shapes(name, tuple(parameter.shape)).items()
            state = {
                key: torch.zeros(shape, dtype=state_dtype(key, parameter), device=parameter.device)
                for key, shape in shapes
            }
            if state:
                optimizer.state[parameter] = state


def state_dtype(key: str, parameter: torch.nn.Parameter) -> torch.dtype:
    """Return the dtype of a state tensor: float32 for a count, otherwise the parameter's."""
    return torch.float32 if key == STEP else parameter.dtype


class NamePrefixes(NamedTuple):
    """Name prefixes of trained tensors and of their optimizer state in a file."""

    value: str
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """Some tensors, with the optimizer state of those that train, as content of a file.

    Attributes:
        values: the tensors by name; filled in place.
        parameters: those that the optimizers update.
        where: names the file in errors.
        part: names this state's part of the node in errors.
    """

    values: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.nn.Parameter]
    optimizers: UnitOptimizers | None
    prefixes: NamePrefixes
    where: str
    part: str

    def tensors(self) -> dict[str, TensorPieces]:
        """Return every tensor by its name in a file; a parameter without updates has no optimizer state."""
        tensors = {f"{self.prefixes.value}{name}": pieces_of(value) for name, value in self.values.items()}
        if self.optimizers is not None:
            tensors |= {f"{self.prefixes.state}{name}": value for name, value in self.optimizers.tensors().items()}
        return tensors

    def check(self, file: TensorFile, *, besides: tuple[str, ...] = ()) -> None:
        """Refuse a file with other tensors than ``tensors()``, except ``besides``; raises ``IntegrityError``."""
        infos = {name: info for name, info in file.infos.items() if name not in besides}
        given, state = _named(infos, self.prefixes.value), _named(infos, self.prefixes.state)
        if given.keys() != self.values.keys() or len(given) + len(state) != len(infos):
            raise IntegrityError(
                f"{self.where} has the tensors {sorted(infos)[:3]}..., not those of this node's {self.part}"
            )
        for name, info in given.items():
            require_kind(name, info[:2], kind_of(self.values[name]), where=self.where)
        for name in dict.fromkeys(full.rpartition("/")[0] for full in state):
            self._check_state(name, state, file)

    def check_numbers(self, file: TensorFile) -> None:
        """Refuse weights that are not finite; raises ``IntegrityError``.

        Of a file of another node, which would end the training of this one, by a cause that looks like its own.
        """
        for name in file.infos:
            if name.startswith(self.prefixes.value) and not is_finite(file.tensor(name)):
                raise IntegrityError(f"{self.where} has {name} with numbers that are not finite; {_OTHER_NODE}")

    def load(self, file: TensorFile) -> None:
        """Replace tensors and optimizer state by those of a checked file; free its memory tensor by tensor."""
        prefixes = self.prefixes
        if self.optimizers is not None:
            self.optimizers.make_room(_named(file.infos, prefixes.state))
        for name in file.infos:
            if self.optimizers is not None and name.startswith(prefixes.state):
                self.optimizers.fill(name.removeprefix(prefixes.state), file.tensor(name))
            elif name.startswith(prefixes.value):
                fill(self.values[name.removeprefix(prefixes.value)], file.tensor(name))
            else:
                continue
            file.release_pages(name)

    def _check_state(self, name: str, state: Mapping[str, TensorInfo], file: TensorFile) -> None:
        """Refuse state of an unknown tensor, or other state than the optimizer's: its next update would fail."""
        parameter = self.parameters.get(name)
        if parameter is None or self.optimizers is None:
            raise IntegrityError(f"{self.where} has state of {name}, which does not train here")
        expected = state_shapes(self.optimizers.name, tuple(parameter.shape))
        given = {full.rpartition("/")[2] for full in state if full.rpartition("/")[0] == name}
        if given != expected.keys():
            raise IntegrityError(
                f"{self.where} has {', '.join(sorted(given))} of {name}, the optimizer keeps "
                f"{', '.join(sorted(expected)) or 'nothing'}; it is of another optimizer"
            )
        for key, shape in expected.items():
            info = state[f"{name}/{key}"]
            dtype = DTYPE_NAMES[state_dtype(key, parameter)]
            require_kind(f"{name}/{key}", info[:2], (dtype, shape), where=self.where)
            if key not in SIGNED and not is_positive(file.tensor(f"{self.prefixes.state}{name}/{key}")):
                raise IntegrityError(f"{self.where} has {name}/{key} below zero, or not a number; {_OTHER_NODE}")


def _named(infos: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorInfo]:
    """Select the tensors with this prefix, by the rest of their names."""
    return {name.removeprefix(prefix): info for name, info in infos.items() if name.startswith(prefix)}
