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
from coordinator.screen.progress import Progress
from coordinator.screen.tables import profile_text
from ringtune.costs.profile import Profile
from ringtune.storage.durable import check_writable, write_durably


@dataclass(frozen=True, slots=True, repr=False)
class Measurement:
    """What the nodes and their links take for the work of a job.

    Attributes:
        profile: of the nodes.
    """

    profile: Profile

    def lines(self) -> list[str]:
        """Write the tables of nodes and links for people."""
        return profile_text(self.profile)

    def to_json(self) -> dict[str, Any]:
        """Return what ``profile.json`` holds."""
        return self.profile.to_json()

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a file that ``train(profile=...)`` and ``plan(profile=...)`` take; return its path.

        Raises:
            UsageError: something else than an earlier profile is there.
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
    """Let the nodes time every kind of work of a job, and their links; a node remembers its part.

    In the end the nodes train some steps of the job together and throw away what they trained: the times are corrected
    by what a whole ring takes.

    Example: ``ringtune.measure("job.toml", local=3, save="profile.json")``.

    Args:
        job: a job file, a mapping of its sections, or nothing where keywords say it all.
        local: start so many nodes on this machine.
        coordinator: ``host:port`` of the one with the nodes to ask, in place of ``local``.
        save: write the profile there, over an earlier one only.
        progress: whether it is shown, or what shows it.
        links: whether the links are measured too; without them there is no rehearsal.
        fresh: measure anew what nodes remember.
        busy: nodes of one machine all at once, as they compute in a run; False = one after another.
        rehearse: end with some steps of the job.
        nodes: wait until so many nodes have joined the coordinator; 0 = take those that are there.
        join_s: how long to wait for them, in seconds.
        insecure: whether the coordinator may be on another machine, without encryption.
        keys: keys of the job, ``train__rounds=5`` for ``train.rounds``; they win over ``job``.

    Raises:
        RingTuneError: the job is wrong, the file can't be written, or nodes can't measure it.
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
        found = client.measure(
            wanted,
            progress=shown,
            num_nodes=local or nodes,
            join_s=join_s,
            with_links=links,
            is_fresh=fresh,
            one_by_one=not busy,
        )
        if rehearse and links:
            found = client.rehearse(wanted, found, progress=shown, num_nodes=local or nodes, join_s=join_s)
    measured = Measurement(found)
    if save is not None:
        measured.save(save)
    return measured
