"""Training of the blocks' own weights: the ring gives what one process gives, and its result loads without us."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from ringtune.run_control import events as rd
from ringtune.schedule.turns import StartPoint, StepKind, items, turn_sequence
from tests.suites.test_families import SPLITS, Slices, collected, run
from tests.support import reference
from tests.support.family_inputs import TASKS, family_writer
from tests.support.resumed import holder_of, rebuilt, same_bits
from tests.support.resumed import run as run_plan
from tests.support.stale_reference import train_stale
from tests.support.tiny_families import MODEL_TYPES
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, reference_of


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that writes the inputs of a family once."""
    return family_writer(tmp_path_factory.mktemp("inputs"))


def full_case(inputs: Any, model_type: str, **changes: Any) -> Case:
    """Two owners in turn, a block more at each step until all train, evaluations."""
    values: dict[str, Any] = {"owners": ("a", "b"), "microbatches": 2, "num_steps": 5}
    values |= {"every_steps": 1, "local_iterations": 2, "eval_every": 3}
    return Case(folder=inputs(model_type), task=TASKS[model_type], adapter="full", **{**values, **changes})


def wanted(case: Case) -> dict[str, torch.Tensor]:
    """Own weights and head of one process."""
    trained = reference_of(case)
    return {**trained.adapter(), **trained.head()}


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("model_type", "split"),
    [(name, split) for name in MODEL_TYPES for split in ("two", "three")]
    + [("bert", split) for split in SPLITS if split not in ("two", "three")],
)
@pytest.mark.sampled(2)
def test_own_weights_in_a_ring_equal_one_process(inputs: Any, model_type: str, split: str) -> None:
    """Every family, any split: weights, head and losses, with blocks unfreezing on the way."""
    case = full_case(inputs, model_type)
    result, _ = run(case, SPLITS[split])
    assert distance(collected(case, SPLITS[split]), wanted(case)) < 1e-9
    steps = [entry for entry in result.logged if isinstance(entry, rd.LogStep) and entry.turn.kind is StepKind.TRAIN]
    losses = [dict(entry.values)["loss_sum"] / dict(entry.values)["count"] for entry in steps]
    assert losses == pytest.approx(reference_of(case).losses, rel=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "all", "optimizer": "sgd"},
        {"method": "single", "owners": ("a",)},
        {"private_blocks": 1},
        {"dropout": 0.2, "owners": ("a",), "eval_every": 0},
    ],
    ids=str,
)
def test_own_weights_with_other_settings_equal_one_process(inputs: Any, changes: dict[str, Any]) -> None:
    """Methods, private blocks and dropout."""
    case = full_case(inputs, "bert", **changes)
    split: Slices = (("a", 0, 4),)
    if changes.get("method") != "single":
        split = (("b", case.private_blocks, 2), ("a", 2, 4))
    assert distance(collected(case, split), wanted(case)) < 1e-9


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
@pytest.mark.sampled(1)
def test_own_weights_with_pipeadapter_equal_the_stale_reference(inputs: Any, model_type: str) -> None:
    """Versions of own weights are stored as versions of adapters are."""
    case = full_case(inputs, model_type, method="pipeadapter", num_steps=13, local_iterations=5, eval_every=0)
    slices = (("a", 0, 1), ("b", 1, 3), ("c", 3, 4))
    expected, _ = train_stale(case.job, case.plan(slices), case.folder / "model", case.datasets())
    assert distance(collected(case, slices), expected) < 1e-9
    figures = {node: executor.run_figures for node, executor in run(case, slices)[1].executors.items()}
    assert {node: found["peak_versions"] for node, found in figures.items()} == {"a": 3, "b": 2, "c": 1}


def test_own_weights_train_and_nothing_else_does(inputs: Any) -> None:
    """What trains has changed, norms and the biases of both ways out have not, and the file names the first only."""
    case = full_case(inputs, "bert", method="all")
    carrier = run(case, SPLITS["two"])[1]
    own = {name: value for name, value in collected(case, SPLITS["two"]).items() if not name.startswith("heads.")}
    base = load_file(case.folder / "model" / "model.safetensors")
    assert len(own) == 4 * 10
    assert all(not torch.equal(value.float(), base[name.removeprefix("bert.")]) for name, value in own.items())
    for executor in carrier.executors.values():
        for index, block in enumerate(executor._hosted.skeleton.blocks):
            for name, value in block.named_parameters():
                if f"bert.encoder.layer.{index}.{name}" not in own:
                    assert torch.equal(value.float(), base[f"encoder.layer.{index}.{name}"])


def test_own_weights_resumed_give_the_bits_of_the_whole_run(inputs: Any) -> None:
    """Shards hold own weights with their moments; a run that goes on from them ends with the very bits."""
    case = full_case(inputs, "bert", checkpoint_every=4, dropout=0.1, dtype="float32")
    slices = SPLITS["three"]
    plan = case.plan(slices)
    whole = make_carrier(case, plan)
    result = run_plan(plan, whole, 0)
    last = whole.collected(plan, holder_of(plan, result))
    saved = [entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint)]
    assert len(saved) > 1
    start = StartPoint.of(plan.course, step=saved[0].step, holder=saved[0].holder)
    carrier = rebuilt(case, plan, whole.shards[saved[0].step], saved[0])
    rest = run_plan(plan, carrier, random.Random(1).randint(1, 99), start=start)
    assert rest.finish == rd.Finish("", "")
    assert same_bits(carrier.collected(plan, holder_of(plan, rest)), last)


def write_result(carrier: TorchCarrier, holder: str, folder: Path, *, with_private: bool) -> Path:
    """The result of a run, merged as the coordinator does."""
    folder.mkdir()
    blocks: dict[str, torch.Tensor] = {}
    for node, executor in carrier.executors.items():
        is_holder = node == holder
        files = executor.adapter_files(with_head=is_holder, with_private=is_holder and with_private)
        for name, content in files.items():
            if name == "blocks.safetensors":
                assert not blocks.keys() & load(bytes(content)).keys()
                blocks |= load(bytes(content))
            else:
                (folder / name).write_bytes(bytes(content))
    save_file(blocks, folder / "blocks.safetensors")
    return folder


def loaded_plainly(case: Case, folder: Path) -> Any:
    """The pretrained model with the result of a run, by the lines of docs/job.md."""
    tensors = load_file(folder / "blocks.safetensors")
    if case.task == "causal-lm":
        from transformers import AutoModelForCausalLM

        assert [path.name for path in folder.iterdir()] == ["blocks.safetensors"]
        plain = AutoModelForCausalLM.from_pretrained(str(case.folder / "model"))
    else:
        from adapters import AutoAdapterModel

        plain = AutoAdapterModel.from_pretrained(str(case.folder / "model"))
        plain.load_head(str(folder), use_safetensors=True)
        tensors |= load_file(folder / "model_head.safetensors")  # once more, as the library makes a head in float32
    plain = plain.to(getattr(torch, case.dtype)).eval()
    assert not plain.load_state_dict(tensors, strict=False).unexpected_keys
    return plain


@pytest.mark.parametrize(("model_type", "private"), [*((name, 0) for name in MODEL_TYPES), ("bert", 1), ("gpt2", 1)])
@pytest.mark.sampled(2)
def test_own_weights_load_with_nothing_of_ours(inputs: Any, tmp_path: Path, model_type: str, private: int) -> None:
    """load_state_dict into the plain base model, and load_head, give the predictions of the run's evaluation."""
    case = full_case(inputs, model_type, private_blocks=private)
    slices: Slices = (("b", private, 2), ("a", 2, 4))
    plan, (_, carrier) = case.plan(slices), run(case, slices)
    holder = list(turn_sequence(plan.course))[-1].owner
    plain = loaded_plainly(case, write_result(carrier, holder, tmp_path / "result", with_private=private > 0))
    turn = next(turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.EVALUATE)
    batch = case.datasets()["a"].batch(plan.course, items(plan.course, turn)[0])
    trained, untrained = reference_of(case).model, reference.whole_model(case.job, plan, case.folder / "model").eval()
    with torch.no_grad():
        got, want, before = (
            reference.outputs_of(model(**reference.inputs_of(model, batch))) for model in (plain, trained, untrained)
        )
    assert float((got - want).abs().max()) <= 1e-9
    assert float((before - want).abs().max()) > 1e-3


def test_own_weights_comparison_can_fail(inputs: Any) -> None:
    """Negative control: one step more or less is far outside the bound."""
    case = full_case(inputs, "bert")
    other = wanted(dataclasses.replace(case, num_steps=11))
    assert distance(wanted(case), other) > 1e-5
