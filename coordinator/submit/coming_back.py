"""Go on following a run whose coordinator was away: it comes back, or the connection does.

::

    the stream of events breaks --> ask until the coordinator answers, for ``wait_s`` at most
        the run goes on, or is over     --> hear the events that are missing, and go on
        the run was interrupted         --> hear the events that are missing, then those of the run that takes it up
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from coordinator.kept_runs.record import RunRecord
from coordinator.kept_runs.taking_up import taken_up_by
from coordinator.run_folder.folder import RunFolder
from coordinator.submit.connection import Connection
from coordinator.submit.outcome import Outcome
from ringtune.errors import ConnectionFailedError
from ringtune.v1 import control_pb2


class Following:
    """Where the follower of a kept run stands; hears its events to know it.

    Args:
        client: of the coordinator.
        outcome: of the run, which hears all events.
        folder: of the run; None = nowhere.
        submission: by which the run is found where its id has not come.
        say: takes a line for the user.

    Attributes:
        is_left: whether the coordinator came back and does not go on with the run.
    """

    def __init__(
        self,
        client: Connection,
        outcome: Outcome,
        folder: RunFolder | None,
        *,
        submission: str,
        say: Callable[[str], None],
    ) -> None:
        self.is_left = False
        self._submission = submission
        self._client, self._outcome, self._folder, self._say = client, outcome, folder, say
        self._run_id = ""
        self._num_heard = 0

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Count an event if it is in the books of the run."""
        match event.WhichOneof("event"):
            case "kept":
                return
            case "run_id":
                self._run_id, self._num_heard = event.run_id, 0
        self._num_heard += 1

    @property
    def may_go_on(self) -> bool:
        """Whether the run may go on without its follower: it is kept, or nothing of it has come."""
        return not self._is_over() and (self._outcome.is_kept or not self._num_heard)

    def go_on(self, wait_s: float, hear: Callable[[Iterable[control_pb2.RunEvent]], object]) -> None:
        """Hear the rest of the run, however often the connection breaks.

        Args:
            wait_s: how long to wait for the coordinator each time, in seconds.
            hear: takes events until they end or the run is over.

        Raises:
            ConnectionFailedError: it did not come back in time, or does not go on with the run.
            RingTuneError: the run can't be followed there any more.
        """
        while not self._is_over():
            self._await(wait_s)
            try:
                self._run_id = self._run_id or self._find()
                if self._run_id in self._records():  # one that began anew as another may be dropped
                    events = self._client.events(self._run_id, wait=True, whole=False, with_files=True)
                    hear(itertools.islice(events, self._num_heard, None))
                records = self._records()
            except ConnectionFailedError:
                if self.is_left:
                    raise
                continue
            if not self._is_over():
                self._turn_to(taken_up_by(records, self._run_id))

    def _is_over(self) -> bool:
        return self._outcome.is_done or self._outcome.error is not None

    def _await(self, wait_s: float) -> None:
        address = self._client.address

        def say() -> None:
            self._say(f"coordinator {address} does not answer; waiting up to {wait_s:g} s until it does")

        if not self._client.await_answer(wait_s, on_silence=say):
            self._say(f"coordinator {address} answers again")

    def _records(self) -> dict[str, RunRecord]:
        return {record.run_id: record for record in self._client.runs()}

    def _find(self) -> str:
        """Find the run whose id has not come.

        Raises:
            ConnectionFailedError: the coordinator ended before it began.
        """
        for record in self._client.runs():
            if record.submission == self._submission:
                return record.run_id
        self.is_left = True
        raise ConnectionFailedError(f"coordinator {self._client.address} has not begun the run; submit it again")

    def _turn_to(self, after: RunRecord | None) -> None:
        if after is None:
            self.is_left = True
            raise ConnectionFailedError(
                f"coordinator {self._client.address} ended before run {self._run_id} did, and does not go on with it "
                "by itself: its first lines say why"
            )
        is_anew = after.first_run == after.run_id
        self._say(
            f"run {self._run_id} was interrupted when the coordinator ended; run {after.run_id} "
            + ("begins anew, as there was no checkpoint" if is_anew else "goes on from what its nodes have saved")
        )
        if is_anew and self._folder is not None:
            aside = self._folder.begin_anew()
            if aside is not None:
                self._say(f"what it had written until then is in {aside}")
        self._run_id, self._num_heard = after.run_id, 0
