"""Estimate the facts of nodes that do not exist yet, to plan a job before any device is bought.

Sizes come from the model folder's config and safetensors header, rows from the data files (``row_counts``); speeds
are taken as equal, and what a forward keeps for backward is computed instead of measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from coordinator.estimates.row_counts import RowCounts, count_rows, rows_text
from coordinator.submit.local.local_nodes import LocalSetup, node_name
from ringtune.costs.facts.model_facts import computed_token_bytes, model_facts
from ringtune.costs.memory.rows import data_bytes
from ringtune.costs.profile import LeftOut, NodeFacts
from ringtune.errors import DataError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.users import count_users
from ringtune.jobs.split import even_share, hold_out, split_rows

_DEFAULT_NODES = 2


class Estimated(NamedTuple):
    """What is known of nodes that do not exist yet.

    Attributes:
        facts: by node name.
        rows: what is to be said of the files of rows, a sentence each.
        notes: of these what a person has to know of how the files were read.
    """

    facts: dict[str, NodeFacts]
    rows: list[str]
    notes: list[str]


def estimated_facts(job: Job, num_nodes: int, *, memory_bytes: int = 0) -> dict[str, NodeFacts]:
    """The facts alone; see ``estimate``."""
    return estimate(job, num_nodes, memory_bytes=memory_bytes).facts


def estimate(job: Job, num_nodes: int, *, memory_bytes: int = 0) -> Estimated:
    """Estimate the facts of equal nodes, as ``--local N`` would start them.

    Args:
        job: names model and data.
        num_nodes: how many; 0 = as many as own data, or two.
        memory_bytes: budget of each; 0 = a share of this machine.

    Raises:
        ModelError, DataError, JobError, CapacityError: as training would.
    """
    num_nodes = num_nodes or job.data.owners or _DEFAULT_NODES
    available = num_nodes * memory_bytes if memory_bytes else None
    setup = LocalSetup.of(job, num_nodes, available_bytes=available, base_bytes=0 if memory_bytes else None)
    model = model_facts(job.model.path, job)
    token_bytes = computed_token_bytes(model, job)
    counted = _counted(job)
    train, held_out = _divided(counted, job)
    files = tuple(Path(file) for file in (job.data.train, job.data.eval) if file)
    found: dict[str, NodeFacts] = {}
    for index in range(num_nodes):
        own, own_eval = _share(job, train, held_out, index, setup.num_owners)
        left_out = _left_out(counted, index, setup.num_owners)
        name = node_name(index, num_nodes)
        found[name] = NodeFacts(
            node=name,
            train_rows=sum(own.examples),
            eval_rows=sum(own_eval.examples),
            users=count_users(own.by_user, own_eval.by_user),
            skipped_rows=sum(each.rows for each in left_out),
            left_out=left_out,
            labels=own.names,
            eval_labels=own_eval.names,
            memory_bytes=setup.memory_bytes,
            threads=setup.threads,
            device="cpu",
            block_forward_s=0.0,
            block_graph_s=0.0,
            block_backward_s=0.0,
            activation_token_bytes=token_bytes,
            model=model,
            data_bytes=data_bytes(
                model,
                files,
                num_owners=setup.num_owners,
                rows=sum(own.examples) + sum(own_eval.examples),
                max_length=job.train.max_length,
            )
            if own.examples
            else 0,
        )
    notes = list(dict.fromkeys(note for counts in counted for note in counts.notes))
    return Estimated(found, rows_text(counted, job), notes)


def _counted(job: Job) -> list[RowCounts]:
    """Count the rows of the job's files.

    Raises:
        DataError: as ``count_rows``, of both files at once.
    """
    counts, problems = [], list[str]()
    for file in filter(None, (job.data.train, job.data.eval)):
        try:
            counts.append(count_rows(file, job))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("; ".join(dict.fromkeys(problems)))
    return counts


def _left_out(counted: Sequence[RowCounts], index: int, num_owners: int) -> tuple[LeftOut, ...]:
    """A node's share of the rows that are left out."""
    if index >= num_owners:
        return ()
    total = sum((Counter(counts.left_out) for counts in counted), Counter[str]())
    shares = {why: len(even_share(rows, num_owners=num_owners, share=index)) for why, rows in sorted(total.items())}
    return tuple(LeftOut(why=why, rows=rows) for why, rows in shares.items())


def _divided(counted: Sequence[RowCounts], job: Job) -> tuple[RowCounts, RowCounts]:
    """Count the rows that are trained on, and those that are evaluated."""
    train = counted[0]
    if job.data.eval:
        return train, counted[1]
    kept, held_out = hold_out(len(train.examples), share=job.data.held_out, seed=job.train.seed)
    return train.taken(kept), train.taken(held_out)


def _share(job: Job, train: RowCounts, held_out: RowCounts, index: int, num_owners: int) -> tuple[RowCounts, RowCounts]:
    """Count the training and evaluation rows that a node would own; a node that is no owner has none."""
    if index >= num_owners:
        return RowCounts(examples=()), RowCounts(examples=())
    mine = split_rows(
        len(train.examples),
        num_owners=num_owners,
        share=index,
        seed=job.train.seed,
        split=job.data.split,
        labels=train.labels or None,
    )
    theirs = even_share(len(held_out.examples), num_owners=num_owners, share=index)
    return train.taken(mine), held_out.taken(theirs)
