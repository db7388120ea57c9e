"""The tree of errors: exit codes, wire statuses, and the drawing of it."""

from __future__ import annotations

import re

from ringtune import errors
from ringtune.errors import StorageError, all_errors, internal_error
from tests.support.cases import cases

# Every class with its parent, exit code and wire status: what users and peers rely on.
TREE = """
RingTuneError         Exception           1 INTERNAL
BusyError             RingTuneError       8 ALREADY_EXISTS
CapacityError         RingTuneError       6 RESOURCE_EXHAUSTED
ConnectionFailedError RingTuneError       3 UNAVAILABLE
DivergedError         RingTuneError       1 INTERNAL
IntegrityError        RingTuneError       7 DATA_LOSS
InterruptedRunError   RingTuneError     130 CANCELLED
InvalidInputError     RingTuneError       5 INVALID_ARGUMENT
PeerLostError         RingTuneError       4 ABORTED
StorageError          RingTuneError       9 RESOURCE_EXHAUSTED
TrustError            RingTuneError       3 PERMISSION_DENIED
UsageError            RingTuneError       2 INVALID_ARGUMENT
DamagedError          IntegrityError      7 DATA_LOSS
FrameError            IntegrityError      7 FAILED_PRECONDITION
DataError             InvalidInputError   5 INVALID_ARGUMENT
JobError              InvalidInputError   5 INVALID_ARGUMENT
ModelError            InvalidInputError   5 INVALID_ARGUMENT
PlanError             InvalidInputError   5 INVALID_ARGUMENT
DeadlineError         PeerLostError       4 DEADLINE_EXCEEDED
TokenError            TrustError          3 UNAUTHENTICATED
ContradictionError    JobError            5 INVALID_ARGUMENT
"""


def test_errors_have_the_documented_codes_and_statuses() -> None:
    """The whole tree, root first, with parent, exit code and status."""
    lines = [f"{e.__name__:<21} {e.__base__.__name__:<17} {e.exit_code:>3} {e.status}" for e in all_errors()]
    assert lines == TREE.strip().splitlines()


def test_errors_drawing_in_the_docstring_names_every_class_and_code() -> None:
    """The tree at the top of the module is complete, and its exit codes are the real ones."""
    drawn = re.findall(r"[ │├└─]*(\w+Error) +(?:exit (\d+))?", errors.__doc__ or "")
    assert {name for name, _ in drawn} == {cls.__name__ for cls in all_errors()}
    for name, code in drawn:
        if code:
            assert getattr(errors, name).exit_code == int(code)


@cases("kind", [ValueError, KeyError, IndexError, UnicodeError, TypeError, Exception])
def test_text_of_an_error_that_nobody_foresaw_is_told_to_nobody(kind: type[Exception]) -> None:
    """It may be a cell of a row."""
    error = internal_error(kind("Alice has measles"), where="node a")
    assert str(error) == f"node a: internal error, {kind.__name__}; please report it, with its log"


def test_error_of_a_file_that_nobody_foresaw_names_it() -> None:
    """It may be gone, or a folder by now: a matter of the user's disk, and no bug."""
    error = internal_error(FileNotFoundError(2, "No such file or directory", "model.safetensors"), where="node a")
    assert str(error).startswith("node a: can't use model.safetensors: No such file or directory; check the file")
    assert error.exit_code == StorageError.exit_code


@cases("error", [OSError(28, "No space left on device"), MemoryError("9 GB"), RuntimeError("shapes")])
def test_text_of_an_error_of_the_machine_is_told(error: Exception) -> None:
    """It has no row in it, and says what to look at."""
    assert str(error) in str(internal_error(error))
