"""Errors that RingTune raises on purpose, each with its exit code and its gRPC status.

The tree::

    RingTuneError                exit 1   a run failed
    ├── DivergedError            exit 1   a loss or a weight is not finite any more: lower the learning rate
    ├── UsageError               exit 2   the command line makes no sense
    ├── ConnectionFailedError    exit 3   nobody answers, a port is busy, a bind is refused
    ├── PeerLostError            exit 4   a node died, hung, or missed its deadline
    │   └── DeadlineError        exit 4   an awaited message did not arrive in time
    ├── InvalidInputError        exit 5   job, data, model or plan is wrong
    │   ├── JobError                      a key of job.toml
    │   │   └── ContradictionError        two keys exclude each other by their meaning: no version could do both
    │   ├── DataError                     a data file, a column, a label
    │   ├── ModelError                    a model folder, a tensor, a family
    │   └── PlanError                     a plan that breaks a rule
    ├── CapacityError            exit 6   the plan does not fit: both numbers are in the message
    ├── IntegrityError           exit 7   a digest, a truncated file, a corrupt frame
    │   ├── DamagedError                  a source of weights sends something else than it promised
    │   └── FrameError                    a frame for another run, placement, step, shape or dtype
    ├── BusyError                exit 8   the coordinator already drives a run
    ├── StorageError             exit 9   a disk is full, a folder can't be written, a file is gone
    ├── TrustError               exit 3   a certificate is missing, expired, foreign, removed, or allows something else
    │   └── TokenError                    a join token is wrong, used or expired
    └── InterruptedRunError      exit 130 Ctrl-C

A message says what is wrong, where, and how to correct it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import ClassVar, Final, TypeVar

from ringtune.texts import printable

T = TypeVar("T")
_OURS: Final = ("ringtune", "edge", "coordinator", "sim")


class RingTuneError(Exception):
    """Base class of all errors; itself raised if a run failed.

    Attributes:
        exit_code: exit code of the ``ringtune`` command.
        status: name of the gRPC status that carries this error over the wire.
        peer: another node that may be its cause as well as the one that reports it: the other end of a broken link, or
            the sender of what can't be used; empty = none.
    """

    exit_code: ClassVar[int] = 1
    status: ClassVar[str] = "INTERNAL"
    peer = ""

    def __init__(self, *parts: object) -> None:
        """Build the message: escape controls and lone surrogates of other machines' texts, and bound its length."""
        super().__init__(*(printable(encodable(part)) if isinstance(part, str) else part for part in parts))


def encodable(text: str) -> str:
    """Escape lone surrogates (half an emoji, say), so that UTF-8 can encode the text."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class UsageError(RingTuneError):
    """The command line makes no sense."""

    exit_code = 2
    status = "INVALID_ARGUMENT"


class ConnectionFailedError(RingTuneError):
    """Nobody answers at an address, or an address can't be bound."""

    exit_code = 3
    status = "UNAVAILABLE"


class PeerLostError(RingTuneError):
    """A node died, hung, or was declared lost by its lease."""

    exit_code = 4
    status = "ABORTED"


class DeadlineError(PeerLostError):
    """An awaited message did not arrive in time; the text names message and sender."""

    status = "DEADLINE_EXCEEDED"


class InvalidInputError(RingTuneError):
    """An input of the user is wrong."""

    exit_code = 5
    status = "INVALID_ARGUMENT"


class JobError(InvalidInputError):
    """A key of ``job.toml`` is unknown, mistyped or out of range."""


class ContradictionError(JobError):
    """Two keys of a job exclude each other by their meaning: what one sets does not exist, or has two values."""


class DataError(InvalidInputError):
    """A data file, a column or a label is wrong."""


class ModelError(InvalidInputError):
    """A model folder, a tensor or a family is wrong or not supported."""


class PlanError(InvalidInputError):
    """A plan breaks a rule of the schedule."""


class CapacityError(RingTuneError):
    """A plan does not fit in the memory of the nodes."""

    exit_code = 6
    status = "RESOURCE_EXHAUSTED"


class IntegrityError(RingTuneError):
    """Bytes do not have the digest, length or form that was declared."""

    exit_code = 7
    status = "DATA_LOSS"


class DamagedError(IntegrityError):
    """A source of weights sends other bytes than its manifest declares; another source may send the right ones."""


class FrameError(IntegrityError):
    """A frame belongs to another run, placement, step, shape or dtype; it is refused, and the ring continues."""

    status = "FAILED_PRECONDITION"


class BusyError(RingTuneError):
    """The coordinator already drives a run, or a name is already taken."""

    exit_code = 8
    status = "ALREADY_EXISTS"


class StorageError(RingTuneError):
    """A disk is full, a folder can't be written, or a file is gone; the earlier content is intact."""

    exit_code = 9
    status = "RESOURCE_EXHAUSTED"


class TrustError(RingTuneError):
    """A certificate is missing, expired, foreign or removed, or does not allow the call."""

    exit_code = 3
    status = "PERMISSION_DENIED"


class TokenError(TrustError):
    """A join token is wrong, used or expired."""

    status = "UNAUTHENTICATED"


class DivergedError(RingTuneError):
    """A loss, a tensor or a weight is not finite any more."""


class InterruptedRunError(RingTuneError):
    """The user stopped the run."""

    exit_code = 130
    status = "CANCELLED"


def all_errors() -> tuple[type[RingTuneError], ...]:
    """Return every class of the tree, breadth first from the root, siblings sorted by name."""
    classes: list[type[RingTuneError]] = []
    queue: list[type[RingTuneError]] = [RingTuneError]
    while queue:
        cls = queue.pop(0)
        classes.append(cls)
        queue.extend(sorted(cls.__subclasses__(), key=lambda sub: sub.__name__))
    return tuple(classes)


def error_from_name(name: str, message: str) -> RingTuneError:
    """Rebuild an error from class name and message; an unknown name (of a newer party) gives the root class."""
    by_name = {cls.__name__: cls for cls in all_errors()}
    return by_name.get(name, RingTuneError)(message)


@contextmanager
def sent_by(peer: str) -> Iterator[None]:
    """Name the sender in errors of content that another node has sent."""
    try:
        yield
    except (IntegrityError, DivergedError) as error:
        error.peer = peer
        raise


def internal_error(error: BaseException, *, where: str = "") -> RingTuneError:
    """Describe an unforeseen error to another party by its class and its place in the code, one of a file by its name.

    Its message may contain a cell of a row, so it stays in the log of its process; only messages of ``OSError``,
    ``MemoryError`` and ``RuntimeError`` are included. ``where`` is put before the message, such as ``node a``.
    """
    begin = f"{where}: " if where else ""
    if isinstance(error, OSError) and error.filename is not None:
        return StorageError(
            f"{begin}can't use {error.filename}: {error.strerror}; check the file and its disk, and that no other "
            "program changes it meanwhile"
        )
    places = [f"{frame.f_globals.get('__name__', '?')}:{line}" for frame, line in walk_tb(error.__traceback__)]
    ours = [place for place in places if place.partition(".")[0] in _OURS]
    text = f": {error}" if isinstance(error, OSError | MemoryError | RuntimeError) else ""
    place = f" at {ours[-1]}" if ours else ""
    return RingTuneError(f"{begin}internal error, {type(error).__name__}{place}{text}; please report it, with its log")


def needed(value: T | None, problem: str) -> T:
    """Return a value that must not be None here; else raise ``PlanError`` with the message ``problem``."""
    if value is None:
        raise PlanError(problem)
    return value
