"""Operations: budgets and counts, heads that do not divide, and tables of another plan."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
from safetensors.numpy import load_file, save

from ringtune.schedule.operation_tables import BatchOperations, Operations
from tests.support.bad_input.case import BASE_JOB, PLAN, TRAIN, Case, Place, job_case

CHOSEN = '[operations]\npolicy = "two-stage"\n'


def cases() -> list[Case]:
    """All of them."""
    return [*_budgets(), *_heads(), *_tables(), _scores()]


def _job(
    name: str,
    keys: str,
    *says: str,
    change: tuple[str, str] = ("rounds = 1", "rounds = 1"),
    arguments: tuple[str, ...] = TRAIN,
) -> Case:
    """A job that chooses operations with some keys; by default it is to be trained."""
    old, new = change
    text = BASE_JOB.replace(old, new) + CHOSEN + keys + "\n"
    return Case(
        name=f"operations: {name}",
        arguments=arguments,
        code=5,
        says=says,
        prepare=lambda place: place.write("job.toml", text),
    )


def _budgets() -> list[Case]:
    ia3 = ("[train]", '[adapter]\nconfig = "ia3"\n[train]')
    return [
        _job("nothing is said", "", "operations.compute", "operations.full"),
        _job("two budgets", "compute = 0.5\nfull = 1", "operations.compute", "operations.full", "keep one"),
        _job("more than all full", "full = 3", "operations.full is 3", "train.microbatches = 2"),
        _job("more than all", "full = 1\nforward_only = 2", "operations.forward_only is 3", "train.microbatches = 2"),
        _job(
            "nothing full", "full = 0\nforward_only = 2", "operations.full is 0", "nothing would train", arguments=PLAN
        ),
        _job(
            "too little for one full",
            "compute = 0.3",
            "operations.compute = 0.3",
            "nothing would train",
            arguments=PLAN,
        ),
        _job("ia3", "compute = 0.5", "adapter.config 'ia3'", "operations.heads", change=ia3),
        job_case("operations: a budget for standard", "[train]", "[operations]\ncompute = 0.6\n[train]", "standard"),
    ]


def _heads() -> list[Case]:
    return [
        _job(
            f"groups of {heads} heads",
            f"compute = 0.5\nheads = {heads}",
            f"operations.heads = {heads}",
            "model",
            arguments=PLAN,
        )
        for heads in (3, 99)
    ]


def _table(table: Operations) -> Callable[[Place], object]:
    """Write a job that is given a table."""

    def prepare(place: Place) -> None:
        place.write("operations.json", json.dumps(table.to_json()))
        place.write("job.toml", BASE_JOB + '[operations]\ntable = "operations.json"\n')

    return prepare


def _tables() -> list[Case]:
    def of(
        owner: str = "node-0", batch_id: int = 0, rows: tuple[str, ...] = ("1", "1"), subnets: int = 1
    ) -> Operations:
        return Operations(batches=(BatchOperations(owner=owner, batch_id=batch_id, rows=rows),), subnets=subnets)

    tables = {
        "another owner": (of(owner="pi"), ("owner pi", "node-0")),
        "another batch": (of(batch_id=999), ("batch 999",)),
        "more micro-batches": (of(rows=("1", "1", "1")), ("3 micro-batches",)),
        "more blocks": (of(rows=("1" * 99, "1" * 99)), ("row",)),
        "other subnets": (of(rows=("1" * 7, "1" * 7), subnets=7), ("7 subnets", "another model")),
    }
    return _files() + [
        Case(
            name=f"operations: a table of {name}",
            arguments=TRAIN if name == "another owner" else PLAN,
            code=5,
            says=("operations.table", *says),
            prepare=_table(table),
            leaves=("out",) if name == "another owner" else (),
        )
        for name, (table, says) in tables.items()
    ]


def _files() -> list[Case]:
    """Files that hold no table."""
    files = {
        "deep nesting": ("[" * 100_000, "is not JSON"),
        "no tables": ('{"schema": 1, "tables": []}', "no table"),
        "a plan": ('{"schema": 1, "course": {}, "placements": []}', "is a plan"),
    }
    return [
        Case(
            name=f"operations: a file with {name}",
            arguments=PLAN,
            code=5,
            says=("operations.table", says),
            prepare=_file(text),
        )
        for name, (text, says) in files.items()
    ]


def _file(text: str) -> Callable[[Place], object]:
    """Write a job that is given a file."""

    def prepare(place: Place) -> None:
        place.write("operations.json", text)
        place.write("job.toml", BASE_JOB + '[operations]\ntable = "operations.json"\n')

    return prepare


def _scores() -> Case:
    """Weights that are no numbers have no magnitude: they are refused before anything is scored."""
    return Case(
        name="operations: scores of weights that are no numbers",
        arguments=TRAIN,
        code=5,
        says=("model.safetensors", "layer.1.attention.self.query.weight", "not finite"),
        prepare=_without_numbers,
        leaves=("out",),
    )


def _without_numbers(place: Place) -> None:
    """Write a model whose query weights in block 1 are NaN, and a job that scores by magnitude."""
    weights = place.own_model() / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("layer.1.attention.self.query.weight"))
    tensors[name] = np.full_like(tensors[name], np.nan)
    place.write("model/model.safetensors", save(tensors))
    place.write("job.toml", BASE_JOB + '[operations]\npolicy = "magnitude"\ncompute = 0.5\n')
