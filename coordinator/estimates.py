"""Facts about nodes that are not there: enough to plan a job before any device is bought or started.

Sizes come from the model folder's config and safetensors header, rows from counting the data files; speeds are
taken as equal, and what a forward keeps for backward is computed instead of measured.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coordinator.local import LocalSetup, node_name
from ringtune.batches import split_rows
from ringtune.errors import DataError, JobError
from ringtune.job import Job
from ringtune.memory import estimate_activation_block_bytes
from ringtune.model_files import model_facts
from ringtune.profile import NodeFacts

_DEFAULT_NODES = 2
_COUNTED_TASK = "sequence-classification"


def estimated_facts(job: Job, num_nodes: int, *, memory_bytes: int = 0) -> dict[str, NodeFacts]:
    """Facts of equal nodes, as ``--local N`` would start them.

    Args:
        job: names model and data.
        num_nodes: how many; 0 = as many as own data, or two.
        memory_bytes: budget of each; 0 = a share of this machine.

    Returns:
        Facts by node name.

    Raises:
        ModelError, DataError, JobError, CapacityError: as training would.
    """
    if job.model.task != _COUNTED_TASK:
        raise JobError(
            f"the rows of task {job.model.task} can't be counted without a node, only those of {_COUNTED_TASK}; "
            "give --coordinator"
        )
    num_nodes = num_nodes or job.data.owners or _DEFAULT_NODES
    available = num_nodes * memory_bytes if memory_bytes else None
    setup = LocalSetup.of(job, num_nodes, available_bytes=available, base_bytes=0 if memory_bytes else None)
    model = model_facts(job.model.path, job)
    rows = -(-job.train.batch_size // job.train.microbatches)
    activation_bytes = estimate_activation_block_bytes(
        model, rows=rows, tokens=job.train.max_length, dropout=job.train.dropout, dtype=job.model.dtype
    )
    labels = _labels(job.data.train, job)
    eval_labels = _labels(job.data.eval, job) if job.data.eval else []
    found: dict[str, NodeFacts] = {}
    for index in range(num_nodes):
        own, own_eval = _share(job, labels, eval_labels, index, setup.num_owners)
        name = node_name(index, num_nodes)
        found[name] = NodeFacts(
            node=name,
            train_rows=sum(own.values()),
            eval_rows=sum(own_eval.values()),
            labels=tuple(sorted(own)),
            eval_labels=tuple(sorted(own_eval)),
            memory_bytes=setup.memory_bytes,
            threads=setup.threads,
            device="cpu",
            block_forward_s=0.0,
            block_graph_s=0.0,
            block_backward_s=0.0,
            activation_block_bytes=activation_bytes,
            model=model,
        )
    return found


def _share(
    job: Job, labels: list[str], eval_labels: list[str], index: int, num_owners: int
) -> tuple[Counter[str], Counter[str]]:
    """How many rows of each class an owner has; nothing for a node that is none."""
    if index >= num_owners:
        return Counter(), Counter()
    mine = split_rows(
        len(labels),
        num_owners=num_owners,
        share=index,
        seed=job.train.seed,
        split=job.data.split,
        labels=labels,
    )
    first, last = (len(eval_labels) * part // num_owners for part in (index, index + 1))
    return Counter(labels[row] for row in mine), Counter(eval_labels[first:last])


def _labels(file: str, job: Job) -> list[str]:
    """The class name of every row of a csv or jsonl file, whose rows also have to have a text."""
    path, needed = Path(file), {"data.label": job.data.label}
    if job.model.task == "sequence-classification":
        needed = {"data.text": job.data.text, **needed}
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows}
    if path.suffix.lower() not in readers:
        raise DataError(f"{path} ends in {path.suffix!r}; rows are read from .csv or .jsonl")
    found = []
    try:
        for number, row in enumerate(readers[path.suffix.lower()](path), start=1):
            for key, name in needed.items():
                if row.get(name) is None:
                    known = ", ".join(map(str, row))
                    raise DataError(f"{path}, row {number} has no column {name!r}, but {known}; set {key}")
            found.append(str(row[job.data.label]))
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}; set data.train and data.eval") from error
    except (UnicodeDecodeError, ValueError, csv.Error) as error:
        raise DataError(f"{path} is not readable: {error}") from error
    if not found:
        raise DataError(f"{path} has no rows")
    return found


def _csv_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file)


def _jsonl_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for line in file:
            if line.strip():
                row = json.loads(line)
                yield row if isinstance(row, dict) else {}
