"""A training method: a value with a few pure functions of (extent, step).

A method says which units train at a step, how many updates a unit has had by then, how many items may be between a
unit's forward and its update, and which step the learning rate counts. Where backward stops, which version a forward
must see, what keeps a graph and how deep a run is are derived in ``schedule.versions`` and ``schedule.lowering``.

A method is one file with one frozen record, registered by its name. No other module compares that name.
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, TypeVar

from ringtune.errors import JobError, PlanError
from ringtune.schedule.placement import Slice
from ringtune.schedule.run_shape import Extent
from ringtune.schedule.units import Units
from ringtune.storage.strict import Bounds, OneOf, check_fields, read_dataclass, to_table

PATIENCE_STEPS: Final = 20
MIN_IMPROVEMENT: Final = 0.01
TURNS_AHEAD: Final = 2
"""Turns after which a turn's loss decides: turn t + 1 is granted already while turn t trains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """The rule by which a loss has stopped improving: settings of methods that let the run decide.

    Attributes:
        patience_steps: so many steps without improvement.
        min_improvement: how far the loss has to fall to count as improved, as a share of the best loss.
    """

    patience_steps: Annotated[int, Bounds(ge=1)] = PATIENCE_STEPS
    min_improvement: Annotated[float, Bounds(ge=0, lt=1)] = MIN_IMPROVEMENT

    def __post_init__(self) -> None:
        """Refuse a patience below one step, and an improvement outside ``[0, 1)``."""
        check_fields(self, where="", error=PlanError)


M = TypeVar("M", bound="type[Method]")

_METHODS: dict[str, type[Method]] = {}


class Method(abc.ABC):
    """A training method with its settings; subclasses are frozen dataclasses.

    Attributes:
        name: as in ``train.method``.
        max_hosts: most hosts that the method may have; 0 = any number.
        section: the section of ``job.toml`` with the method's settings; empty = the method has none.
        full_parameters: whether all parameters of embedding, blocks and head train, and there are no adapters.
    """

    name: ClassVar[str]
    max_hosts: ClassVar[int] = 0
    section: ClassVar[str] = ""
    full_parameters: ClassVar[bool] = False

    # ---- what trains ------------------------------------------------------------------------------

    @abc.abstractmethod
    def trained(self, extent: Extent, step: int) -> Units:
        """The units that are updated at ``step``; at least one, and none that stays frozen."""

    def reach(self, extent: Extent) -> Units:
        """Every unit that trains at some step of the run; by default the union over all steps."""
        kinds = {self.trained(extent, step) for step in range(extent.num_steps)}
        return Units.of(extent.num_blocks, itertools.chain.from_iterable(kinds))

    def updates(self, extent: Extent, unit: int, step: int) -> int:
        """How many updates ``unit`` has had when all steps before ``step`` are done.

        By default the steps that train the unit are counted.
        """
        return _counted(self, extent, unit)(step)

    @property
    def drops_state(self) -> bool:
        """Whether the optimizer state of a unit is forgotten after a step unless the next one trains the unit too."""
        return False

    def period(self, extent: Extent) -> int:
        """Steps after which what trains repeats itself; the steps of the run if it never does."""
        return extent.num_steps

    # ---- how stale a forward may be ---------------------------------------------------------------

    def in_flight(self, extent: Extent, unit: int) -> int:
        """How many train items may be between forward and update at ``unit``; with 1 no weight is ever stale."""
        return 1

    def in_flight_below(self, extent: Extent, hosts: int) -> int:
        """How many train items may be in flight at a host with ``hosts`` hosts up to the head, itself included.

        The planner asks this before a ring is chosen.
        """
        return 1

    def fitted(self, slices: Sequence[Slice]) -> Method:
        """The method as it is on a ring with these slices.

        Only a method whose result depends on the ring changes; it is the very object where nothing changes.
        """
        return self

    # ---- what else follows the steps --------------------------------------------------------------

    def rate_at(self, extent: Extent, step: int) -> tuple[int, int]:
        """The position of the learning rate: updates before that of ``step``, and updates of the whole schedule."""
        return step, extent.num_steps

    # ---- decisions that a run takes itself --------------------------------------------------------

    @property
    def patience(self) -> Patience | None:
        """The settings by which the run's losses decide to train more; None if the run decides nothing."""
        return None

    def decided(self, steps: tuple[int, ...]) -> Method:
        """The method in which the run's decisions are settled: more trains from each of these steps on.

        Raises:
            PlanError: it leaves nothing to the run.
        """
        raise PlanError(
            f"a turn says that more is trained from steps {list(steps)} on, but {self.name} decides nothing"
        )

    def soonest(self, extent: Extent) -> Method:
        """The method of the earliest decisions possible: no run of this method trains more at any step.

        Where nothing changes, as where the run decides nothing, this is the very object.
        """
        return self

    def expected(self) -> Method:
        """The method that a prediction assumes; another one than ``self`` only where the run decides."""
        return self

    # ---- from the job, to files and for people ----------------------------------------------------

    @classmethod
    def from_settings(cls, settings: Any, *, seed: int = 0) -> Method:
        """Make the method from the settings of its section; they are None if the job has no such section.

        Args:
            settings: of the section.
            seed: of the job.
        """
        return cls()

    def check(self, extent: Extent) -> None:  # noqa: B027 - most methods have nothing to refuse
        """Refuse settings that do not fit the extent.

        Raises:
            PlanError: settings do not fit; says which.
        """

    def changes(self, extent: Extent) -> tuple[int, ...]:
        """The steps at which more units begin to train; none where the run has still to decide them."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """Write the method's name and settings as a JSON-able table."""
        return {"name": self.name, **to_table(self)}

    @staticmethod
    def from_json(value: object, *, where: str = "method") -> Method:
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: an unknown method, or settings that it does not have.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise PlanError(f"{where} has to be a table with a name")
        settings = {key: item for key, item in value.items() if key != "name"}
        return read_dataclass(method_class(value["name"]), settings, where="method", error=PlanError)


def method(cls: M) -> M:
    """Register a method by its name."""
    _METHODS[cls.name] = cls
    return cls


def method_names() -> KeysView[str]:
    """Every known method, in the order of registration; a view, in which later methods appear too."""
    return _METHODS.keys()


def method_class(name: str, *, where: str = "method", error: type[PlanError | JobError] = PlanError) -> type[Method]:
    """The method class of a name.

    Raises:
        PlanError: there is none (or ``error``); names the nearest.
    """
    OneOf(method_names()).check(where, name, error)
    return _METHODS[name]


@functools.lru_cache(maxsize=4096)
def _counted(method: Method, extent: Extent, unit: int) -> Callable[[int], int]:
    """Make a counter of one unit's updates before a step; it remembers what it has counted."""
    counts = [0]

    def count(step: int) -> int:
        while len(counts) <= step:
            counts.append(counts[-1] + (unit in method.trained(extent, len(counts) - 1)))
        return counts[max(0, step)]

    return count
