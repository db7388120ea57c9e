"""Invariants 1, 5 and 8 for every family of models, every task and every kind of adapter."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.model.families import MODULES
from edge.model.slice import BlockRunner
from ringtune.models.families import FAMILIES
from ringtune.schedule.actions import Action
from ringtune.schedule.turns import StepKind, items, turn_sequence
from sim.ring import RingResult, VirtualRing
from tests.support import reference
from tests.support.stock_plugged import SCORES_CAPPED, with_room
from tests.support.tiny_families import DECODERS, MODEL_TYPES
from tests.support.torch_ring import (
    Case,
    TorchCarrier,
    distance,
    make_carrier,
    reference_of,
    write_family_inputs,
)

Slices = tuple[tuple[str, int, int], ...]

SPLITS: dict[str, Slices] = {
    "one": (("a", 0, 4),),
    "two": (("b", 0, 1), ("a", 1, 4)),
    "three": (("a", 0, 2), ("c", 2, 3), ("d", 3, 4)),
    "owner-hosts-nothing": (("c", 0, 3), ("d", 3, 4)),
}
PAIRS = [(name, task) for name, family in FAMILIES.items() for task in family.tasks]
# every family and every task once: what blocks do is the family's, what a head does is the task's
ONCE = [(name, family.tasks[at % len(family.tasks)]) for at, (name, family) in enumerate(FAMILIES.items())]
# padding comes after a row's tokens, and a decoder never looks at what comes later
CASES = [pytest.param(*pair, marks=() if pair in ONCE else pytest.mark.thorough) for pair in PAIRS]
MASKED = [pair for pair in PAIRS if pair[0] != "vit" and pair[0] not in DECODERS]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that writes the inputs of a family and task once."""
    folder, written = tmp_path_factory.mktemp("inputs"), {}

    def write(model_type: str, task: str) -> Path:
        key = (model_type, task)
        if key not in written:
            written[key] = write_family_inputs(folder / "-".join(key), model_type, task)
        return written[key]

    return write


@functools.lru_cache(maxsize=128)
def run(case: Case, slices: Slices, *, seed: int = 0) -> tuple[RingResult, TorchCarrier]:
    """Run a case on the virtual ring with random delays; what was run once is not run again."""
    plan = case.plan(slices)
    carrier = make_carrier(case, plan)
    rng = random.Random(seed)

    def action_s(node: str, action: Action) -> float:
        return rng.random()

    def message_s(source: str, target: str, payload: str) -> float:
        return rng.choice([0.0, 0.1, 2.0]) * rng.random()

    result = VirtualRing(plan, action_s=action_s, message_s=message_s, carrier=carrier).run()
    assert result.finish is not None and result.finish.error == "", result.finish
    return result, carrier


def collected(case: Case, slices: Slices, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Adapter and head of a run."""
    plan = case.plan(slices)
    holder = list(turn_sequence(plan.course))[-1].owner
    return run(case, slices, seed=seed)[1].collected(plan, holder)


def main_case(folder: Path, task: str) -> Case:
    """Two owners in turn, a block more at each step until all train, two evaluations."""
    values: dict[str, Any] = {"num_steps": 4, "every_steps": 1, "local_iterations": 2, "eval_every": 2}
    return Case(folder=folder, task=task, owners=("a", "b"), microbatches=3, **values)


def test_families_that_are_described_can_be_run_and_are_tested() -> None:
    """Three lists that have to name the same families; a shorter one has every family and every task."""
    assert set(MODEL_TYPES) == set(MODULES) == set(FAMILIES)
    assert {name for name, _ in ONCE} == set(FAMILIES)
    assert {task for _, task in ONCE} == {task for _, task in PAIRS}


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(("model_type", "task"), CASES)
def test_family_in_a_ring_equals_one_process(inputs: Any, model_type: str, task: str) -> None:
    """Invariant 1: two owners, unfreezing, evaluation; adapters, head, losses and counts are those of the library."""
    case, split = main_case(inputs(model_type, task), task), SPLITS["three"]
    result, carrier = run(case, split)
    plan, trained = case.plan(split), reference_of(case)
    holder = list(turn_sequence(plan.course))[-1].owner
    got, want = carrier.collected(plan, holder), {**trained.adapter(), **trained.head()}
    assert distance(got, want) < 1e-9
    steps = [entry for entry in result.logged if type(entry).__name__ == "LogStep" and entry.turn.kind == "train"]
    losses = [dict(entry.values)["loss_sum"] / dict(entry.values)["count"] for entry in steps]
    assert losses == pytest.approx(trained.losses, rel=1e-9)
    evaluations = [entry for entry in result.logged if type(entry).__name__ == "LogEvaluation"]
    assert len(evaluations) == 2
    for entry in evaluations:
        values = dict(entry.values)
        found = (values["loss_sum"], values["count"], values.get("correct", 0.0))
        assert found == pytest.approx(trained.evaluations[entry.step], rel=1e-9)


def write_result(carrier: TorchCarrier, holder: str, folder: Path) -> Path:
    """The AdapterHub folder of a run, merged as the coordinator does."""
    from safetensors.torch import load, save_file

    folder.mkdir()
    adapters: dict[str, torch.Tensor] = {}
    for node, executor in carrier.executors.items():
        for name, content in executor.adapter_files(with_head=node == holder).items():
            if name == "adapter.safetensors":
                adapters |= load(bytes(content))
            else:
                (folder / name).write_bytes(bytes(content))
    save_file(adapters, folder / "adapter.safetensors")
    return folder


@pytest.mark.promise("8 adapterhub folder")
@pytest.mark.parametrize(("model_type", "task"), CASES)
def test_family_result_loads_with_nothing_of_ours(inputs: Any, tmp_path: Path, model_type: str, task: str) -> None:
    """Invariant 8: load_adapter into the plain base model gives the logits of the trained whole model."""
    check_result_loads(main_case(inputs(model_type, task), task), SPLITS["three"], tmp_path)


def loaded_plainly(case: Case, folder: Path) -> Any:
    """The pretrained model with the result of a run, by the documented lines."""
    import adapters
    from transformers import AutoModelForCausalLM

    if (folder / "adapter.json").exists():
        return loaded_auxiliary(case, folder)
    if (folder / "adapter_interface.json").exists():
        return loaded_with_interface(case, folder)
    if case.task == "causal-lm":
        assert sorted(path.name for path in folder.iterdir()) == ["adapter.safetensors", "adapter_config.json"]
        plain = AutoModelForCausalLM.from_pretrained(str(case.folder / "model"))
        adapters.init(plain)
        plain.load_adapter(str(folder), use_safetensors=True, set_active=True)
        return plain
    plain = adapters.AutoAdapterModel.from_pretrained(str(case.folder / "model"))
    plain.load_adapter(str(folder), use_safetensors=True, set_active=True)
    assert plain.active_head == "ringtune"
    return plain


def loaded_with_interface(case: Case, folder: Path) -> Any:
    """The pretrained model of a family that is plugged in with the result of a run, by the documented lines."""
    import adapters
    import transformers
    from adapters import AdapterModelInterface

    interface = AdapterModelInterface(**json.loads((folder / "adapter_interface.json").read_text())["interface"])
    name, base = "AutoModelForCausalLM", str(case.folder / "model")
    choice: dict[str, Any] = {}
    if case.task != "causal-lm":
        name, choice = "AutoModelForSequenceClassification", {"num_labels": len(case.labels) or 1}
    if json.loads((case.folder / "model" / "config.json").read_text())["model_type"] in SCORES_CAPPED:
        choice["attn_implementation"] = "eager"
    plain = getattr(transformers, name).from_pretrained(base, **choice)
    adapters.init(plain, interface=interface)
    plain.load_adapter(str(folder), use_safetensors=True, set_active=True)
    return with_room(plain)


def loaded_auxiliary(case: Case, folder: Path) -> Any:
    """The pretrained model with auxiliary models, by the documented lines."""
    from adapters import AutoAdapterModel
    from transformers import AutoModelForCausalLM

    from edge.model.auxiliary import load_auxiliary

    assert not (folder / "adapter_config.json").exists()
    if case.task == "causal-lm":
        return load_auxiliary(AutoModelForCausalLM.from_pretrained(str(case.folder / "model")), folder)
    plain = AutoAdapterModel.from_pretrained(str(case.folder / "model"))
    plain.load_head(str(folder), use_safetensors=True)
    return load_auxiliary(plain, folder)


def loaded_merged(case: Case, folder: Path) -> Any:
    """A whole model of transformers: the pretrained one with the result of a run merged into it."""
    import transformers

    from edge.model.merge import merged_files

    merged = folder.with_name("merged")
    merged.mkdir()
    for name, content in merged_files(case.job, case.folder / "model", folder, case.labels).items():
        (merged / name).write_bytes(bytes(content))
    architecture = json.loads((merged / "config.json").read_text())["architectures"][0]
    plain = getattr(transformers, architecture).from_pretrained(str(merged))
    assert not any("ringtune" in name for name, _ in plain.named_parameters())
    return plain


def check_result_loads(
    case: Case, slices: Slices, tmp_path: Path, *, load: Callable[[Case, Path], Any] = loaded_plainly
) -> None:
    """Run a case, load its result with the library, and compare logits."""
    plan = case.plan(slices)
    _, carrier = run(case, slices)
    folder = write_result(carrier, list(turn_sequence(plan.course))[-1].owner, tmp_path / "result")
    plain = load(case, folder)
    plain.to(getattr(torch, case.dtype)).eval()
    turn = next(turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.EVALUATE)
    batch = case.datasets()["a"].batch(plan.course, items(plan.course, turn)[0])
    trained, untrained = reference_of(case).model, reference.whole_model(case.job, plan, case.folder / "model").eval()
    with torch.no_grad():
        got, want, before = (
            reference.outputs_of(model(**reference.inputs_of(model, batch))) for model in (plain, trained, untrained)
        )
    if case.task == "question-answering":  # padding has no share in the reference's answers
        got, want, before = (logits[batch.mask == 1] for logits in (got, want, before))
    assert float((got - want).abs().max()) <= 1e-5
    assert float((before - want).abs().max()) > 1e-3
    if case.labels and load is loaded_plainly:
        assert tuple(plain.get_labels()) == case.labels


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("model_type", "task", "split"),
    [(*pair, "one" if pair in ONCE else "owner-hosts-nothing") for pair in PAIRS],
)
@pytest.mark.sampled(2)
def test_family_with_dropout_in_a_ring_equals_one_process(inputs: Any, model_type: str, task: str, split: str) -> None:
    """Dropout of blocks, adapters and head is seeded per unit in every family."""
    case = Case(folder=inputs(model_type, task), task=task, dropout=0.2, microbatches=2, num_steps=4, every_steps=1)
    trained = reference_of(case)
    assert distance(collected(case, SPLITS[split]), {**trained.adapter(), **trained.head()}) < 1e-9


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize(("model_type", "task"), ONCE)
@pytest.mark.sampled(1)
def test_family_delays_never_change_a_bit(inputs: Any, model_type: str, task: str) -> None:
    """Invariant 5 in fp32."""
    case = Case(folder=inputs(model_type, task), task=task, dtype="float32", microbatches=3, num_steps=4, every_steps=1)
    first, other = (collected(case, SPLITS["three"], seed=seed) for seed in (0, 1))
    assert first.keys() == other.keys()
    assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(("model_type", "task"), [("llama", "causal-lm"), ("vit", "image-classification")])
def test_family_with_private_blocks_equals_one_process(inputs: Any, model_type: str, task: str) -> None:
    """Owners run frozen block 0 themselves, whatever the family."""
    case = Case(folder=inputs(model_type, task), task=task, private_blocks=1, owners=("a", "b"), num_steps=6)
    trained = reference_of(case)
    got = collected(case, (("b", 1, 2), ("a", 2, 4)))
    assert distance(got, {**trained.adapter(), **trained.head()}) < 1e-9


@pytest.mark.parametrize(("model_type", "task"), MASKED)
@pytest.mark.sampled(3)
def test_family_comparison_sees_a_lost_mask(
    inputs: Any, monkeypatch: pytest.MonkeyPatch, model_type: str, task: str
) -> None:
    """Negative control: nodes that take padding for tokens give another result, wherever padding can matter."""
    case = Case(folder=inputs(model_type, task), task=task, owners=("a", "b"), microbatches=3, num_steps=2)
    original = BlockRunner.context
    monkeypatch.setattr(
        BlockRunner, "context", lambda self, hidden, mask: original(self, hidden, torch.ones_like(mask))
    )
    trained = reference_of(case)
    assert distance(collected(case, SPLITS["two"]), {**trained.adapter(), **trained.head()}) > 1e-6
