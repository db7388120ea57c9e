"""Choose an operation table beside the run's thread, which stays free for leases, the status board and a Ctrl-C."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Sequence

from ringtune.errors import RingTuneError, internal_error
from ringtune.rounds import rounds
from ringtune.schedule.course import Course
from ringtune.schedule.operations.scores import BlockScores

_LOG = logging.getLogger(__name__)


def choose_beside(
    course: Course,
    step: int,
    scores: Sequence[BlockScores],
    put: Callable[[rounds.OperationsChosen | rounds.OperationsFailed], None],
) -> threading.Thread:
    """Begin to choose the table that holds from a step on, on a thread of its own.

    Args:
        course: of the run.
        step: at which the table begins to hold.
        scores: all that were gathered.
        put: takes the table or the failure, on that thread. The run's own deadline says how long it waits.
    """

    def work() -> None:
        try:
            # loads numpy, which no other part of the coordinator needs
            room = importlib.import_module("coordinator.planner.knapsacks.choose")
            put(rounds.OperationsChosen(step, room.choose_table(course, scores, step=step)))
        except RingTuneError as error:
            put(rounds.OperationsFailed(step, type(error).__name__, str(error)))
        except Exception as error:
            _LOG.exception("choosing operations failed by a bug")
            put(rounds.OperationsFailed(step, RingTuneError.__name__, str(internal_error(error))))

    thread = threading.Thread(target=work, name="choose", daemon=True)
    thread.start()
    return thread
