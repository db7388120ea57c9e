"""Techniques: what only a model, rows or the room of a node show; contradictions of a job are in the tests of jobs."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import load_file, save

from ringtune.schedule.operation_tables import BatchOperations, Operations
from tests.support.bad_input.case import BASE_JOB, PLAN, TRAIN, Case, Place

VELORA = '[memory]\nactivations = "velora"\n[velora]\n'


def cases() -> list[Case]:
    """All of them."""
    return [*_of_the_model(), *_memory(), _table(), _scores()]


def _job(name: str, keys: str, *says: str, code: int = 5, arguments: tuple[str, ...] = PLAN) -> Case:
    """A job with some sections more."""
    return Case(
        name=name,
        arguments=arguments,
        code=code,
        says=says,
        prepare=lambda place: place.write("job.toml", BASE_JOB + keys + "\n"),
    )


def _of_the_model() -> list[Case]:
    few = '[operations]\npolicy = "two-stage"\ncompute = 0.3'
    heads = '[operations]\npolicy = "two-stage"\ncompute = 0.5\nheads = 3'
    return [
        _job("operations: too little for one full", few, "operations.compute = 0.3", "nothing would train"),
        _job("operations: groups of 3 heads", heads, "operations.heads = 3", "model"),
        _job("hift: groups larger than the model", 'method = "hift"\n[hift]\ngroup_size = 99', "hift.group_size is 99"),
        _job("velora: more parts than values", VELORA + "parts = 33", "velora.parts is 33", "32 values"),
    ]


def _memory() -> list[Case]:
    memory = (*PLAN, "--memory")
    return [
        _job(
            "activations: auto would fit",
            'method = "all"',
            "needs",
            "memory.activations = 'auto' would fit",
            code=6,
            arguments=(*memory, "560KiB"),
        ),
        _job(
            "activations: auto does not fit either",
            '[memory]\nactivations = "auto"',
            "needs",
            "but has 300.0 KiB",
            code=6,
            arguments=(*memory, "300KiB"),
        ),
    ]


def _table() -> Case:
    """A table of another run: its owner is known once nodes have joined."""
    table = Operations(batches=(BatchOperations(owner="pi", batch_id=0, rows=("1", "1")),))

    def prepare(place: Place) -> None:
        place.write("operations.json", json.dumps(table.to_json()))
        place.write("job.toml", BASE_JOB + '[operations]\ntable = "operations.json"\n')

    return Case(
        name="operations: a table of another owner",
        arguments=TRAIN,
        code=5,
        says=("operations.table", "owner pi", "node-0"),
        prepare=prepare,
        leaves=("out",),
    )


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
