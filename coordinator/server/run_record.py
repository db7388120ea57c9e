"""The record of a run: a small file beside its events, with what is needed to list, resume and drop it. Pure.

::

    running --> done           it has a result
            --> stopped        a user stopped it
            --> failed         it ended with an error
            --> interrupted    the coordinator ended before the run did

A run with a checkpoint can be resumed from any state but running and done.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ringtune.errors import IntegrityError, InterruptedRunError, InvalidInputError, UsageError
from ringtune.ids import check_node_name, check_run_id
from ringtune.storage.strict import parse_json, read_dataclass
from ringtune.texts import printable
from ringtune.v1 import control_pb2

STATES: Final = ("running", "done", "stopped", "failed", "interrupted")
_DAY_S = 86_400.0
_MAX_MESSAGE: Final = 600
_MAX_UNPLANNED: Final = 100
"""Most runs of one user that ended before a plan: any number of them could be made within minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """State of a run.

    Attributes:
        first_run: id under which nodes store its shards: its own, or that of the run that it resumes.
        submitted_by: ``user@host``; empty = not known.
        ended_unix_s: wall clock; 0 = it has not ended.
        num_steps: of the whole run; 0 = there is no plan yet.
        steps_done: reported optimizer steps, those of the resumed runs included.
        saved_step: of the newest checkpoint; -1 = none.
        kept_step: last step of the newest turn of which all nodes keep the end in memory; -1 = none.
        is_fetched: whether a user has all of its events.
        size_bytes: of its events on the disk.
        nodes: that take part or were inspected for it; empty before that.
        takes_up: the interrupted run that the coordinator resumes by this one; empty = a user submitted it.
        submission: random id, by which the submitter finds the run before it has the run's id.
        owner: user in the certificate of its submitter; empty = there was none, or this user was removed.
    """

    run_id: str
    first_run: str
    model: str
    method: str
    submitted_by: str
    started_unix_s: float
    state: str = "running"
    ended_unix_s: float = 0.0
    num_steps: int = 0
    steps_done: int = 0
    saved_step: int = -1
    kept_step: int = -1
    message: str = ""
    is_fetched: bool = False
    size_bytes: int = 0
    nodes: tuple[str, ...] = ()
    takes_up: str = ""
    submission: str = ""
    owner: str = ""

    def __post_init__(self) -> None:
        """Refuse ids that are unsafe in a path, and unknown states."""
        check_run_id(self.run_id)
        check_run_id(self.first_run)
        if self.takes_up:
            check_run_id(self.takes_up)
        for node in self.nodes:
            check_node_name(node)
        if self.state not in STATES:
            raise IntegrityError(f"run {self.run_id} has the state {self.state!r}, which is unknown")

    @property
    def has_books(self) -> bool:
        """Whether it has events to fetch: a run that ended before its plan has none."""
        return self.num_steps > 0

    @property
    def newest_step(self) -> int:
        """The last step from which a restarted coordinator may resume; -1 = none."""
        return max(self.saved_step, self.kept_step)

    @property
    def is_resumable(self) -> bool:
        """Whether a user can resume it: it has ended without a result and has a checkpoint."""
        return self.state in ("stopped", "failed", "interrupted") and self.saved_step >= 0

    def after(self, event: control_pb2.RunEvent, now_unix_s: float) -> RunRecord:
        """Return the record after one more event; itself if the event changes nothing."""
        match event.WhichOneof("event"):
            case "plan_json":
                return replace(self, num_steps=json.loads(event.plan_json)["course"]["num_steps"])
            case "members_json":
                return replace(self, nodes=tuple(json.loads(event.members_json)))
            case "resumed_json":
                resumed = json.loads(event.resumed_json)
                step = int(resumed["step"])
                saved_step = int(resumed.get("saved_step", step))
                return replace(self, steps_done=step, saved_step=saved_step, kept_step=step)
            case "step_json":
                step = json.loads(event.step_json)
                return replace(self, steps_done=max(self.steps_done, step["step"])) if step["kind"] == "train" else self
            case "checkpoint_json":
                return replace(self, saved_step=int(json.loads(event.checkpoint_json)["step"]))
            case "kept_turn_json":
                return replace(self, kept_step=int(json.loads(event.kept_turn_json)["step"]))
            case "failure":
                stopped = event.failure.error == InterruptedRunError.__name__
                return replace(
                    self,
                    state="stopped" if stopped else "failed",
                    message=printable(" ".join(event.failure.message.split()), most=_MAX_MESSAGE),
                    ended_unix_s=now_unix_s,
                )
            case "done":
                return replace(self, state="done", ended_unix_s=now_unix_s)
        return self

    def interrupted(self, ended_unix_s: float, message: str = "the coordinator ended before the run did") -> RunRecord:
        """Return the record of a running run as one interrupted at ``ended_unix_s``."""
        return replace(self, state="interrupted", message=message, ended_unix_s=ended_unix_s)

    def to_text(self) -> str:
        """Return the record as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def parse(text: str) -> RunRecord:
        """Read the text of ``to_text``; raises ``IntegrityError``."""
        try:
            return read_dataclass(RunRecord, parse_json(text), where="", error=InvalidInputError)
        except (ValueError, InvalidInputError, UsageError) as error:
            raise IntegrityError(f"the record of a run is damaged: {error}") from error


def in_order(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Sort runs by start, oldest first; ids give the order only to the second."""
    return sorted(records, key=lambda record: (record.started_unix_s, record.run_id))


def chain_of(records: Mapping[str, RunRecord], run_id: str) -> tuple[RunRecord, ...]:
    """Return the runs that a run resumes, oldest first, and the run itself last."""
    last = records[run_id]
    family = in_order(record for record in records.values() if record.first_run == last.first_run)
    return tuple(family[: family.index(last) + 1])


def families_of(records: Iterable[RunRecord]) -> tuple[tuple[RunRecord, ...], ...]:
    """Return the chains of runs that resume each other, each oldest first."""
    families: dict[str, list[RunRecord]] = {}
    for record in in_order(records):
        families.setdefault(record.first_run, []).append(record)
    return tuple(map(tuple, families.values()))


def bytes_by_owner(families: Iterable[tuple[RunRecord, ...]]) -> Counter[str]:
    """Return the bytes of each user's runs; a chain is of the user of its first run."""
    stored_bytes = Counter[str]()
    for family in families:
        stored_bytes[family[0].owner] += sum(record.size_bytes for record in family)
    return stored_bytes


def exceeds_share(stored_bytes: Mapping[str, int], owner: str, keep_bytes: int) -> bool:
    """Whether all runs together exceed ``keep_bytes``, and those of ``owner`` an equal share of it.

    So one user can't fill the room of others, and all of it is for one user alone. Example: with ``keep_bytes`` = 10,
    ann with 12 and bob with 1 exceed it, and each has a share of 5, which ann exceeds.
    """
    return sum(stored_bytes.values()) > keep_bytes and stored_bytes[owner] * len(stored_bytes) > keep_bytes


def to_drop(
    records: Iterable[RunRecord],
    *,
    now_unix_s: float,
    keep_days: float,
    keep_bytes: int,
    keep_unfetched_days: float = math.inf,
    busy: Collection[str] = (),
) -> tuple[str, ...]:
    """Choose runs to delete, oldest first: old ones, and fetched ones of users that exceed their share.

    A run that ended before its plan counts as fetched, and of one user ``_MAX_UNPLANNED`` of them stay. Otherwise a
    chain of runs that resume each other is deleted as a whole. Runs that are being read (``busy``) stay.
    Example: with ``keep_days`` = 7, a run that was fetched and ended 8 days ago is deleted; one that was not fetched
    stays for ``keep_unfetched_days``, whatever ``keep_bytes``, the limit of all runs together.
    """
    records, unplanned = in_order(records), dict[str, list[str]]()
    for record in records:
        if not record.has_books and record.state != "running" and record.run_id not in busy:
            unplanned.setdefault(record.owner, []).append(record.run_id)
    dropped = [run_id for run_ids in unplanned.values() for run_id in run_ids[:-_MAX_UNPLANNED]]
    families = families_of(record for record in records if record.run_id not in dropped)
    left_bytes = bytes_by_owner(families)
    for family in sorted(families, key=lambda family: max(record.ended_unix_s for record in family)):
        names, owner = [record.run_id for record in family], family[0].owner
        if any(record.state == "running" for record in family) or set(names) & set(busy):
            continue
        is_fetched = all(record.is_fetched or not record.has_books for record in family)
        days = keep_days if is_fetched else keep_unfetched_days
        is_old = now_unix_s - max(record.ended_unix_s for record in family) > days * _DAY_S
        if is_old or (is_fetched and exceeds_share(left_bytes, owner, keep_bytes)):
            left_bytes[owner] -= sum(record.size_bytes for record in family)
            dropped += sorted(names)
    return tuple(dropped)
