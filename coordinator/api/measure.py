"""``ringtune.measure``: time the work of a job on the nodes, and the links between them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from coordinator.api.arguments import JobLike, for_python, job_here
from coordinator.api.output import choose_progress
from coordinator.api.train import local_ring, require_place
from coordinator.client.submit import Client
from coordinator.planner.given_plan import require_profile_place
from coordinator.run.requests import MeasureRequest
from coordinator.screen.progress import Progress
from coordinator.screen.tables import profile_text
from ringtune.costs.profile import Profile
from ringtune.storage.durable import check_writable, write_durably


@dataclass(frozen=True, slots=True, repr=False)
class Measurement:
    """The measured profile of nodes and links for a job."""

    profile: Profile

    def lines(self) -> list[str]:
        """Return tables of nodes and links for people."""
        return profile_text(self.profile)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``profile.json``."""
        return self.profile.to_json()

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a file for ``train(profile=...)`` and ``plan(profile=...)``; return its path.

        Raises:
            UsageError: something other than an earlier profile is there.
            StorageError: it can't be written.
        """
        require_profile_place(Path(path))
        write_durably(Path(path), (json.dumps(self.to_json(), indent=1) + "\n").encode())
        return Path(path)

    def __repr__(self) -> str:
        return "\n".join(self.lines())


@for_python
def measure(
    job: JobLike = None,
    *,
    local: int = 0,
    coordinator: str = "",
    save: str | PathLike[str] | None = None,
    progress: bool | Progress = True,
    links: bool = True,
    fresh: bool = False,
    busy: bool = True,
    rehearse: bool = True,
    nodes: int = 0,
    join_s: float = 60.0,
    insecure: bool = False,
    **keys: Any,
) -> Measurement:
    """Measure every kind of work of a job on the nodes, and the links; nodes cache their times.

    At the end the nodes train some steps together, which are discarded; the times are corrected to match a whole ring.

    Example: ``ringtune.measure("job.toml", local=3, save="profile.json")``.

    Args:
        job: a job file, or a mapping of its sections; None if all keys are given as keywords.
        local: number of nodes to start on this machine.
        coordinator: ``host:port`` of the coordinator with the nodes, in place of ``local``.
        save: file for the profile; only an earlier profile is replaced.
        progress: whether to show progress, or an object that shows it.
        links: measure the links too; without them there is no rehearsal.
        fresh: ignore cached times.
        busy: measure all nodes of one machine at once, as in a run; False = one after another.
        rehearse: end with some steps of the job.
        nodes: number of joined nodes to wait for; 0 = use those that have joined.
        join_s: seconds to wait for them.
        insecure: whether the coordinator may be on another machine without encryption.
        keys: keys of the job, ``train__rounds=5`` for ``train.rounds``; they take precedence over ``job``.

    Raises:
        RingTuneError: the job is invalid, the file can't be written, or nodes can't measure it.
    """
    require_place(local, coordinator, nodes)
    wanted = job_here(job, keys)
    if save is not None:
        require_profile_place(Path(save))
        check_writable(Path(save))
    with (
        progress if isinstance(progress, Progress) else choose_progress(progress) as shown,
        local_ring(wanted, local, shown) if local else Client(coordinator, insecure=insecure) as client,
    ):
        request = MeasureRequest(wanted, local or nodes, join_s, links, is_fresh=fresh, one_by_one=not busy)
        found = client.measure(request, progress=shown)
        if rehearse and links:
            found = client.rehearse(wanted, found, progress=shown, num_nodes=local or nodes, join_s=join_s)
    measured = Measurement(found)
    if save is not None:
        measured.save(save)
    return measured
