"""Sweeps (many what-ifs at once): axes of values, their grid, and its cells on all cores or on a cluster.

A cell depends only on its own changes, and results are in the order of the grid, whatever the number of workers and the
backend. Workers get the plan and the profile from this process, through joblib.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import math
import re
import signal
import socket
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ringtune.errors import ConnectionFailedError, RingTuneError, UsageError
from ringtune.quantities import parse_rate
from sim.what_if import split_change

Cell = TypeVar("Cell")

BACKENDS = ("loky", "dask", "ray")
_MODULES = {"dask": "distributed", "ray": "ray"}
_PACKAGES = {"dask": "dask[distributed]", "ray": "ray"}
_DIGITS = 12
_ADDRESS = re.compile(r"(?:[a-z]+://)?(?P<host>[^:/]+):(?P<port>[0-9]+)")
_ANSWER_S = 10.0
MAX_CELLS = 10_000
"""A cell is a whole simulated run, of a hundredth of a second at least: more would take hours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One ``--change`` key with its values as text, in the order of the table."""

    key: str
    values: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """Parse ``KEY=0.25,0.5,1`` or ``KEY=0.25:2:8`` (first, last, count; evenly spaced; rates as ``10Mbit:1Gbit:5``).

    Raises ``UsageError``: another form, a value twice, or more than ``MAX_CELLS`` values.
    """
    key, listed = split_change(text)
    values: list[str] = []
    for part in listed.split(","):
        values += _range(text, part, parse_rate if key.endswith(".rate") else float) if ":" in part else [part.strip()]
    _check_size(len(values))
    if not all(values):
        raise UsageError(f"--sweep {text!r} has an empty value")
    if len(set(values)) != len(values):
        raise UsageError(f"--sweep {text!r} has a value twice")
    return Axis(key=key, values=tuple(values))


def _range(text: str, part: str, read: Callable[[str], float]) -> list[str]:
    pieces = part.split(":")
    try:
        first, last, count = read(pieces[0]), read(pieces[1]), int(pieces[2])
        if len(pieces) != 3 or count < 2 or not (math.isfinite(first) and math.isfinite(last)):
            raise ValueError(part)
    except (ValueError, IndexError) as error:
        raise UsageError(
            f"--sweep {text!r}: {part!r} is not FROM:TO:COUNT with two values at least, e.g. 0.25:2:8"
        ) from error
    _check_size(count)
    step = (last - first) / (count - 1)
    return [f"{first + index * step:.{_DIGITS}g}" for index in range(count)]


def _check_size(cells: int) -> None:
    if cells > MAX_CELLS:
        raise UsageError(
            f"the sweep has {cells:,} cells, at most {MAX_CELLS:,} are computed; give fewer values, or sweep in parts "
            "with --change for the others"
        )


def grid(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    """List the ``KEY=VALUE`` changes of every cell; the last axis varies fastest; raises ``UsageError``."""
    _check_size(math.prod(len(axis.values) for axis in axes))
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"--sweep {key} stands twice; give all its values at once: {key}=A,B")
    return list(itertools.product(*([f"{axis.key}={value}" for value in axis.values] for axis in axes)))


def each_cell(
    task: Callable[[tuple[str, ...]], Cell],
    cells: Sequence[tuple[str, ...]],
    *,
    jobs: int = -1,
    backend: str = "loky",
    cluster: str = "",
) -> Generator[Cell]:
    """Run ``task`` for every cell on this machine or a cluster, and yield the results in the order of ``cells``.

    If the iteration ends early, as by Ctrl-C, the workers end at once. A cluster returns all results together.

    Args:
        task: picklable, as are its results.
        cells: changes of each.
        jobs: workers of this machine; -1 = one for each core. A cluster uses all of its workers.
        backend: one of ``BACKENDS``.
        cluster: address of a Dask scheduler or a Ray cluster; empty = a local one for this sweep only.

    Raises:
        UsageError: unknown backend, wrong number of workers, or a package is not installed.
        ConnectionFailedError: nobody answers at the address.
        RingTuneError: a worker died.
    """
    check_workers(jobs, backend, cluster)
    if backend == "loky" and 1 in (jobs, len(cells)):
        yield from map(task, cells)
        return
    joblib = _import("joblib", "joblib")
    workers = min(jobs, len(cells)) if jobs > 0 else jobs
    with _backend(joblib, backend, workers, cluster):
        one_by_one = {"return_as": "generator"} if backend == "loky" else {}
        results = joblib.Parallel(n_jobs=workers, **one_by_one)(joblib.delayed(task)(cell) for cell in cells)
        with contextlib.ExitStack() as stack:
            if one_by_one:
                stack.callback(_close_quietly, results)
            for cell in results:  # noqa: UP028 - 'yield from' would close it by itself, with a warning
                yield cell


def _close_quietly(running: Generator[Cell]) -> None:
    """Stop the cells that are not done, without joblib's warning about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        running.close()


def check_workers(jobs: int, backend: str, cluster: str) -> None:
    """Refuse unknown backends and wrong numbers of workers."""
    if backend not in BACKENDS:
        raise UsageError(f"--backend {backend!r} is not one of {', '.join(BACKENDS)}")
    if jobs == 0 or jobs < -1:
        raise UsageError(f"--jobs {jobs} has to be at least 1, or -1 for all cores")
    if cluster and backend == "loky":
        raise UsageError("--cluster is for --backend dask and ray")


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C in a worker: the parent process ends the workers, and each would print its own error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _loky(joblib: Any) -> Iterator[None]:
    """Use joblib's own processes in the context; they end with it, at once if it ends early."""
    is_done = False
    try:
        with joblib.parallel_config("loky", inner_max_num_threads=1, initializer=_ignore_interrupts):
            yield
        is_done = True
    except importlib.import_module("joblib.externals.loky.process_executor").TerminatedWorkerError as error:
        raise RingTuneError(
            "a worker of the sweep was ended from outside, perhaps because memory ran out; give fewer with --jobs"
        ) from error
    finally:  # its processes would wait for more work
        loky = importlib.import_module("joblib.externals.loky")
        loky.get_reusable_executor().shutdown(wait=True, kill_workers=not is_done)


@contextmanager
def _backend(joblib: Any, backend: str, workers: int, cluster: str) -> Iterator[None]:
    """Use a joblib backend, with its cluster, in the context."""
    if backend == "loky":
        with _loky(joblib):
            yield
        return
    module = _import(_MODULES[backend], _PACKAGES[backend])
    if backend == "dask":
        logging.getLogger("distributed").setLevel(logging.WARNING)
        local = {"n_workers": workers if workers > 0 else None, "threads_per_worker": 1, "dashboard_address": ":0"}
        with (
            _connected(backend, cluster, lambda: module.Client(cluster) if cluster else module.Client(**local)),
            joblib.parallel_config("dask"),
        ):
            yield
        return
    importlib.import_module("ray.util.joblib").register_ray()
    started: dict[str, Any] = {"address": cluster} if cluster else {"num_cpus": workers if workers > 0 else None}
    try:
        _connected(backend, cluster, lambda: module.init(log_to_driver=False, **started))
        with joblib.parallel_config("ray"):
            yield
    finally:
        module.shutdown()


def _connected(backend: str, cluster: str, connect: Callable[[], Any]) -> Any:
    try:
        address = _ADDRESS.fullmatch(cluster)
        if address:  # Ray itself would try for minutes
            socket.create_connection((address["host"], int(address["port"])), timeout=_ANSWER_S).close()
        return connect()
    except (OSError, OverflowError) as error:
        where = f"the {backend} cluster at {cluster}" if cluster else f"a {backend} cluster on this machine"
        raise ConnectionFailedError(f"can't use {where}: {error}; start it, or see --cluster") from error


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"this sweep needs the package {package!r}; pip install '{package}', or give --backend loky --jobs 1"
        ) from error
