"""Interface of a training method: a value with pure functions of (extent, step).

A method determines the units that train at a step, the number of updates of a unit by then, the number of items between
a unit's forward and its update, and the position of the learning rate. ``schedule.versions`` and ``schedule.lowering``
derive from it where backward stops, which version a forward must see, what keeps a graph and the depth.

A method is one module with one frozen dataclass, registered by its name. No other module compares that name.
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, TypeVar

from ringtune.errors import PlanError
from ringtune.schedule.placement import Slice
from ringtune.schedule.run_shape import Extent
from ringtune.schedule.units import Units
from ringtune.storage.strict import Bounds, OneOf, check_fields, read_dataclass, to_table

PATIENCE_STEPS: Final = 20
MIN_IMPROVEMENT: Final = 0.01
TURNS_AHEAD: Final = 2
"""Turns until a turn's loss takes effect, as turn t + 1 is granted already while turn t trains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Criterion for a loss that has stopped improving, for methods that let the run decide.

    Attributes:
        patience_steps: number of steps without improvement.
        min_improvement: fall of the loss that counts as an improvement, as a share of the best loss.
    """

    patience_steps: Annotated[int, Bounds(ge=1)] = PATIENCE_STEPS
    min_improvement: Annotated[float, Bounds(ge=0, lt=1)] = MIN_IMPROVEMENT

    def __post_init__(self) -> None:
        check_fields(self, where="", error=PlanError)


M = TypeVar("M", bound="type[Method]")

_METHODS: dict[str, type[Method]] = {}


class Method(abc.ABC):
    """A training method with its settings; subclasses are frozen dataclasses.

    Attributes:
        max_hosts: most hosts; 0 = any number.
        section: section of ``job.toml`` with the method's settings; empty = none.
        full_parameters: whether all parameters of embedding, blocks and head train, without adapters.
    """

    name: ClassVar[str]
    max_hosts: ClassVar[int] = 0
    section: ClassVar[str] = ""
    full_parameters: ClassVar[bool] = False

    # ---- trained units ----------------------------------------------------------------------------

    @abc.abstractmethod
    def trained(self, extent: Extent, step: int) -> Units:
        """Return the units that are updated at ``step``; at least one, and no frozen one."""

    def reach(self, extent: Extent) -> Units:
        """Return every unit that trains at some step of the run; by default the union over all steps."""
        kinds = {self.trained(extent, step) for step in range(extent.num_steps)}
        return Units.of(extent.num_blocks, itertools.chain.from_iterable(kinds))

    def updates(self, extent: Extent, unit: int, step: int) -> int:
        """Number of updates of ``unit`` before ``step``; by default the steps that train the unit are counted."""
        return _counted(self, extent, unit)(step)

    @property
    def drops_state(self) -> bool:
        """Whether the optimizer state of a unit is dropped after a step unless the next one trains the unit too."""
        return False

    def period(self, extent: Extent) -> int:
        """Number of steps after which the trained units repeat; the steps of the run if they never do."""
        return extent.num_steps

    # ---- staleness --------------------------------------------------------------------------------

    def in_flight(self, extent: Extent, unit: int) -> int:
        """Most train items between forward and update at ``unit``; 1 = no weight is ever stale."""
        return 1

    def in_flight_below(self, extent: Extent, hosts: int) -> int:
        """Most train items in flight at a host with ``hosts`` hosts up to the head, itself included.

        The planner uses it before a ring is chosen.
        """
        return 1

    def fitted(self, slices: Sequence[Slice]) -> Method:
        """Return the method for a ring with these slices; ``self`` unless its result depends on the ring."""
        return self

    # ---- learning rate ----------------------------------------------------------------------------

    def rate_at(self, extent: Extent, step: int) -> tuple[int, int]:
        """Position of the learning rate: updates before that of ``step``, and updates of the whole schedule."""
        return step, extent.num_steps

    # ---- decisions of the run ---------------------------------------------------------------------

    @property
    def patience(self) -> Patience | None:
        """Criterion by which the run's losses decide to train more; None if they decide nothing."""
        return None

    def decided(self, steps: tuple[int, ...]) -> Method:
        """Return the method with the run's decisions filled in; raises ``PlanError`` if it leaves nothing to the run.

        More trains from each of ``steps`` on.
        """
        raise PlanError(
            f"a turn says that more is trained from steps {list(steps)} on, but {self.name} decides nothing"
        )

    def soonest(self, extent: Extent) -> Method:
        """Return the method with the earliest possible decisions, so that no run of ``self`` trains more at any step.

        It is ``self`` if the run decides nothing.
        """
        return self

    def expected(self) -> Method:
        """Return the method that a prediction assumes; ``self`` if the run decides nothing."""
        return self

    # ---- settings, checks and files ---------------------------------------------------------------

    @classmethod
    def from_settings(cls, settings: Any, *, seed: int = 0) -> Method:
        """Make the method from its section of the job, which is None if the job lacks it, and the job's seed."""
        return cls()

    def check(self, extent: Extent) -> None:  # noqa: B027 - most methods have nothing to refuse
        """Refuse settings that do not fit the extent; raises ``PlanError``."""

    def changes(self, extent: Extent) -> tuple[int, ...]:
        """Return the steps at which more units begin to train; empty before the run has decided them."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """Write name and settings as a JSON-compatible table."""
        return {"name": self.name, **to_table(self)}

    @staticmethod
    def from_json(value: object, *, where: str = "method") -> Method:
        """Parse the table of ``to_json``; raises ``PlanError`` for an unknown method or setting."""
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise PlanError(f"{where} has to be a table with a name")
        settings = {key: item for key, item in value.items() if key != "name"}
        return read_dataclass(method_class(value["name"]), settings, where="method", error=PlanError)


def method(cls: M) -> M:
    """Register a method by its name."""
    _METHODS[cls.name] = cls
    return cls


def method_names() -> KeysView[str]:
    """Names of all methods in the order of registration, as a view that includes later ones."""
    return _METHODS.keys()


def method_class(name: str, *, where: str = "method") -> type[Method]:
    """Return the method class of a name; raises ``PlanError`` with the nearest name if there is none."""
    OneOf(method_names()).check(where, name, PlanError)
    return _METHODS[name]


@functools.lru_cache(maxsize=4096)
def _counted(method: Method, extent: Extent, unit: int) -> Callable[[int], int]:
    """Make a counter of one unit's updates before a step, with a cache."""
    counts = [0]

    def count(step: int) -> int:
        while len(counts) <= step:
            counts.append(counts[-1] + (unit in method.trained(extent, len(counts) - 1)))
        return counts[max(0, step)]

    return count
