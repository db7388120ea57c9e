"""``offload.adapters``: the kind of adapter that each user chose, where users have adapters of their own.

A *kind* is an adapter configuration with the users who have it. The first one is the job's own ``adapter.config``, also
where no user has it: head, embedding and blocks are made with it. The others follow in the order of their first users::

    [adapter]                       kinds               users
    config = "lora"                 0  lora             ben, carl
    [offload]                       1  linear           anna, dora
    users = "alone"
    adapters = { anna = "linear", dora = "linear" }

Source: ColA, section 4.3 and Table 4 (Low Rank-Linear, Low Rank-MLP): users choose the architecture of their models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ringtune.errors import JobError
from ringtune.jobs.job import Job
from ringtune.models.adapters.adapter_config import parse_adapter_config
from ringtune.models.adapters.summed_adapters import sum_of_kinds

_MOST_NAMED = 20


class Kind(NamedTuple):
    """An adapter configuration with its users.

    Attributes:
        number: 0 = the job's own.
        config: as ``adapter.config``.
        users: who have it, in the order of the run's users.
    """

    number: int
    config: str
    users: tuple[str, ...]

    @property
    def prefix(self) -> str:
        """What comes before the names of this kind's pairs; nothing for the job's own kind."""
        return f"{self.number}/" if self.number else ""


def kinds_of(job: Job, users: Sequence[str]) -> tuple[Kind, ...]:
    """The kinds of adapters of a run; one, with all users, where nobody chose another.

    Args:
        job: of the run.
        users: with adapters of their own, in their order; none where all train the same.

    Raises:
        JobError: a user who chose is none of the run.
    """
    if not users or not job.offload.chosen_adapters:
        return (Kind(0, job.adapter.config, tuple(users)),)
    if odd := sorted(job.offload.chosen_adapters.keys() - set(users)):
        more = f" and {len(users) - _MOST_NAMED} more" if len(users) > _MOST_NAMED else ""
        raise JobError(
            f"offload.adapters.{odd[0]}: no user of this run has the name {odd[0]!r}; its users are "
            f"{', '.join(users[:_MOST_NAMED])}{more}"
        )
    found: list[tuple[str, list[str]]] = [(job.adapter.config, [])]
    for user in users:
        config = config_of(job, user)
        same = (own for known, own in found if parse_adapter_config(known) == parse_adapter_config(config))
        own = next(same, None)
        if own is None:
            found.append((config, own := []))
        own.append(user)
    return tuple(Kind(number, config, tuple(own)) for number, (config, own) in enumerate(found))


def config_of(job: Job, user: str) -> str:
    """The adapter configuration of a user."""
    return job.offload.chosen_adapters.get(user, job.adapter.config)


def job_of(job: Job, config: str) -> Job:
    """The job with another ``adapter.config``, as a user of another kind has it."""
    if config == job.adapter.config:
        return job
    return dataclasses.replace(job, adapter=dataclasses.replace(job.adapter, config=config))


def job_of_user(job: Job, user: str) -> Job:
    """The job with the ``adapter.config`` of one user, and with that of no other."""
    return _alone(job, config_of(job, user))


def job_of_sum(job: Job, users: Sequence[str]) -> Job:
    """The job with the ``adapter.config`` that the adapters of all users have when they are added up.

    Raises:
        UsageError: they do not add up.
    """
    return _alone(job, sum_of_kinds([config_of(job, user) for user in users]))


def _alone(job: Job, config: str) -> Job:
    return dataclasses.replace(job_of(job, config), offload=dataclasses.replace(job.offload, adapters=None))
