"""Timings of a node for a job: measured, or read from a cache in its folder, so that a second start takes seconds.

::

    STATE/profile.json    {"schema": 4, "entries": {KEY: ENTRY}}
    ENTRY                 {"budget_s", "at_unix_s", "activation_token_bytes", "rested_s", "handling_s", "work_times",
                           "lowest_token_bytes"}

The key is a digest of the known causes of a timing: model, processor and threads, shape of the job, batch and classes,
number of neighbours timed at the same time, version of torch. The newest 16 entries stay, and hold for
``LONGEST_AGE_S``, because of unknown causes (a fan, a power supply, other programs). An unreadable file gives a
warning, and a new measurement.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edge.checkpoint.state_folder import CACHE_FILE
from edge.data.dataset import OwnerDataset
from edge.profiler.timing import CpuClock, MeasuredWork, Timer, TimingRequest, window_of
from edge.profiler.works import Bench
from ringtune.costs.profile import Measured, ModelFacts, TimedShape, Work, WorkTime
from ringtune.errors import InvalidInputError, StorageError
from ringtune.job.job import Job
from ringtune.machine.resources import cpu_quota
from ringtune.storage.durable import write_durably
from ringtune.storage.strict import check_fields, parse_json, read_dataclass, to_table

_LOG = logging.getLogger(__name__)


def timings(
    job: Job,
    model: ModelFacts,
    dataset: OwnerDataset | None,
    *,
    shape: TimedShape,
    device: str,
    hardware: str,
    state: Path | None,
    timing: TimingRequest,
    memory_bytes: int,
    data_bytes: int = 0,
) -> MeasuredWork:
    """Time every kind of work at this node, or return the timings of an earlier measurement.

    Without ``dataset`` the node is no owner; without ``state``, its folder, there is no cache, and saving is not timed.
    ``memory_bytes`` limit the measurement, rows and tokenizer (``data_bytes``) included. ``shape``, of the job at this
    node, and ``hardware``, processor and the share of it that may be used, are part of the cache's key.

    Raises:
        ModelError: the model folder can't be used.
        JobError: the adapter configuration can't be split.
        CapacityError: one block with micro-batches of the job's size does not fit here.
    """
    key = cache_key(
        model=model.digest,
        hardware=hardware,
        shape=shape,
        batch=(job.train.batch_size, job.train.microbatches),
        classes=len({*job.data.labels, *dataset.labels}) if dataset else -1,
        neighbours=timing.neighbours,
        torch=torch.__version__,
    )
    cache = ProfileCache(state) if state is not None else None
    measured = cache.find(key, budget_s=timing.budget_s) if cache and not timing.is_fresh else None
    if measured is not None:
        return measured
    started_s = time.monotonic()
    folder = Path(job.model.path)
    bench = Bench(
        folder,
        job,
        dataset,
        model=model,
        memory_bytes=memory_bytes,
        data_bytes=data_bytes,
        device=device,
        subnets=shape.subnets,
        frozen=timing.frozen,
    )
    quota = cpu_quota()
    cpu = CpuClock.of(quota, torch.get_num_threads()) if device == "cpu" else None
    timer = Timer(window_s=window_of(quota), settle=bench.settle(), cpu=cpu)
    measured = bench.measure(timer, budget_s=timing.budget_s, disk=state)
    _LOG.info("measured %d points in %.1f s", len(measured.work_times), time.monotonic() - started_s)
    if cache is not None:
        cache.put(key, measured, budget_s=timing.budget_s)
    return measured


def full_size_s(measured: MeasuredWork, work: Work) -> float:
    """Median seconds of a work at the largest measured size; 0 if it was not measured."""
    points = [point for point in measured.work_times if point.work == work]
    return max(points, key=lambda point: point.size).median_s if points else 0.0


SCHEMA = 4
KEPT_ENTRIES = 16
LONGEST_AGE_S = 7 * 24 * 3600.0


def cache_key(**parts: object) -> str:
    """Hex digest of ``parts``, the known causes of a timing."""
    text = json.dumps({name: repr(value) for name, value in parts.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """Timings with their budget and time; see ``MeasuredWork``."""

    budget_s: float
    at_unix_s: float
    activation_token_bytes: Measured
    rested_s: float
    handling_s: float
    lowest_token_bytes: float = 0.0
    work_times: tuple[WorkTime, ...]

    def __post_init__(self) -> None:
        """Refuse bytes that are negative."""
        check_fields(self, where="", error=InvalidInputError)

    @property
    def measured(self) -> MeasuredWork:
        """The timings."""
        return MeasuredWork(**{name: getattr(self, name) for name in MeasuredWork._fields})


class ProfileCache:
    """The cached timings of one node, in ``state``.

    Args:
        clock: wall clock, seconds since 1970. An entry from the future counts as too old: the clock was set back.
    """

    def __init__(self, state: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = state / CACHE_FILE
        self._clock = clock

    def find(self, key: str, *, budget_s: float) -> MeasuredWork | None:
        """Return timings under ``key`` of at least this budget and at most ``LONGEST_AGE_S`` old, or None."""
        entry = self._entries().get(key)
        if entry is None:
            return None
        try:
            kept = read_dataclass(_Entry, entry, where="", error=InvalidInputError)
        except InvalidInputError as error:
            _LOG.warning("%s: what was measured earlier is not readable (%s); it is measured again", self.path, error)
            return None
        is_young = 0 <= self._clock() - kept.at_unix_s <= LONGEST_AGE_S
        return kept.measured if is_young and kept.budget_s >= budget_s else None

    def put(self, key: str, measured: MeasuredWork, *, budget_s: float) -> None:
        """Store timings under ``key`` and keep the newest ``KEPT_ENTRIES``; a failed write gives only a warning."""
        entries = self._entries()
        entries.pop(key, None)
        entries[key] = to_table(_Entry(budget_s=budget_s, at_unix_s=self._clock(), **measured._asdict()))
        newest = dict(list(entries.items())[-KEPT_ENTRIES:])
        try:
            write_durably(self.path, json.dumps({"schema": SCHEMA, "entries": newest}, indent=1).encode())
        except StorageError as error:
            _LOG.warning("what was measured is not remembered: %s", error)

    def _entries(self) -> dict[str, dict[str, Any]]:
        try:
            value = parse_json(self.path.read_bytes())
            if value["schema"] != SCHEMA:
                return {}
            return {str(key): dict(entry) for key, entry in value["entries"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _LOG.warning("%s is not readable (%s: %s); it is measured again", self.path, type(error).__name__, error)
            return {}
