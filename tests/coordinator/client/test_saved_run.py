"""Read a run's folder back, and make the job of an evaluation from it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.run_folder import read_metrics
from coordinator.client.saved_run import RunLocation, evaluation_job, read_report, read_run
from coordinator.run.planning import wire_problem
from ringtune.costs.memory_sizes import MemorySettings
from ringtune.errors import IntegrityError, InvalidInputError, RingTuneError, UsageError
from ringtune.schedule.course import FrozenWeights
from ringtune.techniques.activation_checkpointing import Memory
from tests.contract.test_hints import parse
from tests.support.plans import changed
from tests.support.saved_runs import LABELS, own_weights_instead, whole_model_instead, write_run


@pytest.mark.parametrize(
    ("name", "message", "kind"),
    [
        ("job.toml", "holds no run: job.toml is missing", UsageError),
        ("plan.json", "holds no run: plan.json is missing", UsageError),
        ("adapter/adapter.safetensors", "has no adapter: adapter/adapter.safetensors is missing", InvalidInputError),
        ("adapter/head_config.json", "has no adapter: adapter/head_config.json is missing", InvalidInputError),
    ],
)
def test_saved_run_without_an_adapter_is_refused(
    tmp_path: Path, name: str, message: str, kind: type[RingTuneError]
) -> None:
    """What is missing is named: another folder is a wrong command line, an unfinished run a wrong input."""
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    with pytest.raises(kind, match=message):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("report.json", {"wall_s": "b"}, "report.json is damaged: wall_s is the text 'b'"),
        ("report.json", {"wall_s": math.inf}, "report.json is damaged: wall_s is the number inf"),
        ("report.json", {"eval": [1]}, "report.json is damaged: eval is a list"),
        ("metrics.jsonl", {"step": 1}, "line 1 is no JSON object with a kind"),
        ("metrics.jsonl", {"kind": "train", "loss": 1.0}, "line 1 has no step"),
        ("metrics.jsonl", {"kind": "train", "step": 1, "loss": "a"}, "line 1 is damaged: loss is the text 'a'"),
        ("metrics.jsonl", {"kind": "train", "step": [1]}, "line 1 is damaged: step is a list"),
        ("metrics.jsonl", {"kind": "train", "step": 1, "bytes": ""}, "line 1 is damaged: bytes is the text ''"),
    ],
)
def test_damaged_figure_is_named(tmp_path: Path, name: str, content: object, message: str) -> None:
    """Where report and metrics are read, for the table, the plot, the page and the card of a model alike."""
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(json.dumps(content) + "\n")
    with pytest.raises(IntegrityError, match=re.escape(message)):
        read_report(folder) if name == "report.json" else read_metrics(folder)


def test_saved_run_of_own_weights_has_blocks_instead(tmp_path: Path) -> None:
    """It is whole without an adapter, and not without its blocks."""
    folder = write_run(tmp_path / "run")
    own_weights_instead(folder)
    assert read_run(folder).job.adapter.config == "full"
    (folder / "adapter/blocks.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"adapter/blocks\.safetensors is missing"):
        read_run(folder)


def test_saved_run_of_full_parameters_has_a_model(tmp_path: Path) -> None:
    """It is whole with a model folder, in one file or several; without weights it is not."""
    folder = write_run(tmp_path / "run")
    model = whole_model_instead(folder)
    assert read_run(folder).saved == model
    (model / "model.safetensors").rename(model / "model.safetensors.index.json")
    assert read_run(folder).saved == model
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidInputError, match=r"has no model: model/model\.safetensors is missing"):
        read_run(folder)


def test_evaluation_of_full_parameters_loads_all_of_them(tmp_path: Path) -> None:
    """The method stays, so that every node replaces every weight; of any other method only the adapter is known."""
    folder = write_run(tmp_path / "run")
    assert not evaluation_job(read_run(folder), None).method.full_parameters
    whole_model_instead(folder)
    job = evaluation_job(read_run(folder), None)
    assert job.method.full_parameters
    assert job.adapter.config == "full"


def test_evaluation_packs_no_rows(tmp_path: Path) -> None:
    """Evaluated rows never are; those for training would be encoded for nothing."""
    run = read_run(write_run(tmp_path / "run"))
    packed = run.job.with_overrides({"model.task": "causal-lm", "train.packing": True})
    course = dataclasses.replace(run.plan.course, labels=(), packed=True)
    run = dataclasses.replace(run, job=packed, plan=dataclasses.replace(run.plan, course=course))
    assert not evaluation_job(run, tmp_path / "rows.csv").train.packing


def test_evaluation_audits_nothing(tmp_path: Path) -> None:
    """Nodes need no memory for it, and builds that know no audit evaluate an audited run."""
    run = read_run(write_run(tmp_path / "run"))
    run = dataclasses.replace(run, job=run.job.with_overrides({"audit.share": 0.1, "recovery.copies": "next"}))
    job = evaluation_job(run, None)
    assert "[audit]" in wire_problem(run.job, run.plan, {"a": 4})
    assert "[audit]" not in wire_problem(job, run.plan, {"a": 4})
    assert not MemorySettings.of_job(job).audit


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (None, ", with the --local N or --coordinator that it was begun with"),
        ({"coordinator": "127.0.0.1:40123", "is_local": True, "local_nodes": 3}, " --local 3"),
        ({"coordinator": "127.0.0.1:7070", "is_local": False}, " --coordinator 127.0.0.1:7070"),
        ({"coordinator": "10.0.0.7:7070", "is_local": False}, " --coordinator 10.0.0.7:7070 --insecure"),
    ],
)
@pytest.mark.parametrize("is_saved", [True, False])
def test_saved_run_that_was_interrupted_says_how_to_go_on(
    tmp_path: Path, place: dict[str, Any] | None, where: str, is_saved: bool
) -> None:
    """From its newest checkpoint if there is one; else it has to be repeated; while it is under way, neither.

    The folder may tell where the run was driven, so the command can be typed as it stands.
    """
    folder = write_run(tmp_path / "run")
    (folder / "adapter/adapter.safetensors").unlink()
    if place is not None:
        location = RunLocation(run_id="r20260102-030405-00000000", pid=os.getpid(), **place)
        location.write(folder)
        with pytest.raises(InvalidInputError, match=f"is under way in process {os.getpid()}; wait for its end"):
            read_run(folder)
        dataclasses.replace(location, pid=1 << 22).write(folder)
    if is_saved:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints/step-6.json").write_text("{}")
    with pytest.raises(InvalidInputError) as refused:
        read_run(folder)
    told, _, line = str(refused.value).partition(" it: ")
    state, way = ("saved up to step 6", "resume") if is_saved else ("has no checkpoint yet", "replace")
    assert told.endswith(f"{state}; if it was stopped, {'resume' if is_saved else 'repeat'}")
    assert line == f"ringtune train {folder}/job.toml --out {folder} --{way}{where}"
    if place is not None:
        parse(line)


def test_saved_run_is_evaluated_by_one_owner_without_helpers(tmp_path: Path) -> None:
    """The nodes that evaluate are others than those that the job names."""
    run = read_run(write_run(tmp_path / "run"))
    job = run.job.with_overrides({"offload.mode": {"node-1": "laptop"}, "train.method": "all"})
    assert not evaluation_job(dataclasses.replace(run, job=job), None).offload.is_on
    # Without dropout VeLoRA that goes with dropout alone would be refused, and an evaluation keeps no activations
    job = run.job.with_overrides({"memory.activations": "velora", "velora.parts": 2, "train.dropout": 0.1})
    evaluated = evaluation_job(dataclasses.replace(run, job=job), None)
    assert (evaluated.memory, evaluated.velora, evaluated.train.dropout) == (Memory(), None, 0.0)
    # The file stands for all data, classes are those of the plan, and another model folder may be given
    made = evaluation_job(run, tmp_path / "rows.csv", model=tmp_path / "tiny")
    assert made.data.train == made.data.eval == str(tmp_path / "rows.csv")
    assert (made.data.labels, made.data.owners, made.data.split) == (LABELS, 0, "iid")
    assert made.model.path == str(tmp_path / "tiny")
    assert made.train.batch_size == run.job.train.batch_size


@pytest.mark.parametrize("frozen", [None, FrozenWeights(dtype="int8", native=True)])
def test_evaluation_holds_frozen_weights_as_the_run_did(tmp_path: Path, frozen: FrozenWeights | None) -> None:
    """What ``auto`` chose for the run is not chosen anew; how products are computed is the evaluating nodes' matter."""
    run = read_run(write_run(tmp_path / "run"))
    job = run.job.with_overrides({"runtime.frozen": "auto"})
    made = evaluation_job(dataclasses.replace(run, job=job, plan=changed(run.plan, frozen=frozen)), None)
    assert made.runtime.frozen == ("float32" if frozen is None else "int8")
