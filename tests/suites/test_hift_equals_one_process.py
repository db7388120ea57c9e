"""HiFT on a ring gives what one process gives: every family, tied and untied, any order and size of groups.

The reference (``tests.support.hift_reference``) is plain transformers with one torch optimizer for each group.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from edge.runtime.executor import NodeExecutor
from ringtune.costs.memory_sizes import embedding_grad_bytes
from ringtune.costs.model_facts import model_facts
from ringtune.models.families import FAMILIES
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.turns import StartPoint, StepKind, items, turn_sequence
from ringtune.schedule.units import EMBEDDING, Range
from ringtune.schedule.versions import trained
from tests.suites.test_families import Slices, run
from tests.support import hift_reference as reference
from tests.support.literal_velora import every_layer, make_literal
from tests.support.plans import changed
from tests.support.resumed import rebuilt, same_bits
from tests.support.resumed import run as run_plan
from tests.support.tiny_families import MODEL_TYPES
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, write_family_inputs

ONE: Slices = (("a", 0, 4),)
TWO: Slices = (("b", 0, 1), ("a", 1, 4))
FOUR: Slices = (("d", 0, 1), ("c", 1, 2), ("b", 2, 3), ("a", 3, 4))
EMPTY_OWNER: Slices = (("b", 0, 3), ("c", 3, 4))
SPLITS = {"one": ONE, "two": TWO, "four": FOUR, "owner-hosts-nothing": EMPTY_OWNER}
TASKS = {name: family.tasks[-1] for name, family in FAMILIES.items()} | {"bert": "sequence-classification"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that writes the inputs of a family once."""
    folder, written = tmp_path_factory.mktemp("inputs"), {}

    def write(model_type: str, **config: Any) -> Path:
        key = "-".join([model_type, *map(str, config.values())])
        if key not in written:
            written[key] = write_family_inputs(folder / key, model_type, TASKS[model_type], **config)
        return written[key]

    return write


def hift_case(folder: Path, model_type: str, hift: str = "", **changes: Any) -> Case:
    """Nine steps of HiFT with an evaluation between: of 6 groups of one unit, half train in a second sweep too."""
    values: dict[str, Any] = {"owners": ("a",), "microbatches": 2, "num_steps": 9, "eval_every": 5}
    return Case(
        folder=folder, task=TASKS[model_type], method="hift", adapter="full", hift=hift, **{**values, **changes}
    )


@functools.lru_cache(maxsize=32)
def trained_plainly(case: Case) -> Any:
    """One process, whatever the slices."""
    return reference.train_hift(case.job, case.plan(ONE), case.folder / "model", case.datasets())


def trained_tensors(carrier: TorchCarrier) -> dict[str, torch.Tensor]:
    """Every tensor that trains; the copies of embedding and head at several owners are equal in every bit."""
    found: dict[str, torch.Tensor] = {}
    for executor in carrier.executors.values():
        hosted: Any = executor._hosted
        skeleton = hosted.skeleton
        prefix = skeleton.model.base_model_prefix
        blocks = hosted.blocks.parameters(executor._slice.start, executor._slice.stop)
        own = {f"{prefix}.{skeleton.layout.blocks_path}.{name}": value for name, value in blocks.items()}
        for name, value in hosted.owner.parameters.items() if hosted.owner else ():
            own[name if name.startswith(("heads.", "lm_head.")) else f"{prefix}.{name}"] = value
        for name, value in own.items():
            assert torch.equal(found.setdefault(name, value.detach()), value), f"copies of {name} differ"
    return found


def distance_to_reference(case: Case, slices: Slices, against: Case | None = None, seed: int = 0) -> float:
    """Run a case, and compare all parameters with those of the plain loop."""
    wanted = reference.tensors_of(trained_plainly(against or case).model)
    return distance(trained_tensors(run(case, slices, seed=seed)[1]), wanted)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.sampled(3)
def test_hift_of_every_family_equals_one_process(inputs: Any, model_type: str) -> None:
    """Weights, losses of every step and the evaluations between."""
    case = hift_case(inputs(model_type), model_type)
    assert distance_to_reference(case, TWO) < 1e-9
    result, wanted = run(case, TWO)[0], trained_plainly(case)
    steps = [entry for entry in result.logged if isinstance(entry, rd.LogStep) and entry.turn.kind is StepKind.TRAIN]
    losses = [dict(entry.values)["loss_sum"] / dict(entry.values)["count"] for entry in steps]
    assert losses == pytest.approx(wanted.losses, rel=1e-9)
    for entry in (entry for entry in result.logged if isinstance(entry, rd.LogEvaluation)):
        assert dict(entry.values)["loss_sum"] == pytest.approx(wanted.evaluations[entry.step][0], rel=1e-9)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.sampled(1)
def test_hift_of_any_split_equals_one_process(inputs: Any, split: str) -> None:
    """One, two and four nodes, and an owner that hosts no block."""
    assert distance_to_reference(hift_case(inputs("bert"), "bert"), SPLITS[split]) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    "hift",
    [
        "group_size = 2",
        "group_size = 4",
        'group_size = 4\norder = "top2down"',
        'order = "random"',
        'always_active = ["head"]\ngroup_size = 2',
        'always_active = ["embedding", "head"]',
        "group_size = 6",
        'group_size = 2\nalways_active = ["head"]\nstate = "drop"',
    ],
)
@pytest.mark.sampled(1)
def test_hift_of_any_groups_equals_one_process(inputs: Any, hift: str) -> None:
    """Six units in groups that divide them and that do not, in every order, with units always active."""
    assert distance_to_reference(hift_case(inputs("gpt2"), "gpt2", hift), TWO) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.sampled(2)
def test_hift_of_several_owners_equals_one_process(inputs: Any, split: str) -> None:
    """Gradients of embedding and head reach all owners; their copies are equal in every bit."""
    case = hift_case(inputs("bert"), "bert", owners=("b", "a", "e"), local_iterations=2)
    assert distance_to_reference(case, SPLITS[split], seed=1) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("model_type", "tied", "hift"),
    [
        ("gpt2", True, "group_size = 2"),
        ("gpt2", False, 'always_active = ["head"]'),
        ("llama", True, 'always_active = ["embedding", "head"]'),
        ("vit", False, 'group_size = 4\norder = "top2down"'),
        ("electra", False, 'order = "random"'),
    ],
)
@pytest.mark.sampled(1)
def test_hift_of_two_owners_of_other_families_equals_one_process(
    inputs: Any, model_type: str, tied: bool, hift: str
) -> None:
    """Tables as rows and whole, norms and positions; units that train at every step."""
    config = {"tie_word_embeddings": tied} if TASKS[model_type] == "causal-lm" else {}
    case = hift_case(inputs(model_type, **config), model_type, hift, owners=("a", "b"), local_iterations=2)
    assert distance_to_reference(case, FOUR) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.sampled(1)
def test_hift_of_a_decoder_tied_or_not_equals_one_process(inputs: Any, model_type: str, tied: bool) -> None:
    """A tied table is of the embedding and collects both gradients; one of its own is of the head."""
    folder = inputs(model_type, tie_word_embeddings=tied)
    case = hift_case(folder, model_type, "group_size = 2", microbatches=4)
    names = reference.tensors_of(trained_plainly(case).model)
    assert ("lm_head.weight" in names) is not tied
    assert distance_to_reference(case, TWO) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(("model_type", "split"), [("bert", "one"), ("gpt2", "four"), ("vit", "four")])
@pytest.mark.sampled(1)
def test_hift_with_dropout_equals_one_process(inputs: Any, model_type: str, split: str) -> None:
    """The embedding draws where it trains; every draw is seeded by step, micro-batch and unit."""
    case = hift_case(inputs(model_type), model_type, "group_size = 2", dropout=0.2, eval_every=0)
    assert distance_to_reference(case, SPLITS[split]) < 1e-9


@pytest.mark.parametrize(
    ("model_type", "owners", "slices", "hift"),
    [
        ("bert", ("a",), FOUR, ""),
        ("gpt2", ("a", "b"), TWO, 'group_size = 4\norder = "random"'),
        ("llama", ("a", "b"), EMPTY_OWNER, 'always_active = ["head"]'),
    ],
)
@pytest.mark.sampled(1)
def test_hift_resumed_in_mid_sweep_gives_the_bits_of_the_whole_run(
    inputs: Any, model_type: str, owners: tuple[str, ...], slices: Slices, hift: str
) -> None:
    """Shards hold every trained tensor with moments and counts; every owner's has its copies of embedding and head."""
    case = hift_case(inputs(model_type), model_type, hift, owners=owners, dropout=0.1, dtype="float32")
    case = dataclasses.replace(case, local_iterations=2, checkpoint_every=4, num_steps=12)
    plan = case.plan(slices)
    whole = make_carrier(case, plan)
    saved = [entry for entry in run_plan(plan, whole, 0).logged if isinstance(entry, rd.LogCheckpoint)]
    assert [entry.step for entry in saved] == [4, 8, 12]
    for checkpoint in saved[:2]:  # 6, 2 or 5 groups: step 4 is in the middle of a sweep, and step 8 is for 6 and 5
        carrier = rebuilt(case, plan, whole.shards[checkpoint.step], checkpoint)
        start = StartPoint.of(plan.course, step=checkpoint.step, holder=checkpoint.holder)
        assert run_plan(plan, carrier, 1, start=start).finish == rd.Finish("", "")
        assert same_bits(trained_tensors(carrier), trained_tensors(whole)), checkpoint
        assert carrier.shards[12] == whole.shards[12]


def test_hift_drained_in_mid_sweep_goes_on_with_the_same_bits(inputs: Any) -> None:
    """Ctrl-C, with gradients of units on their way: the copies in all shards are those of one step."""
    case = hift_case(inputs("gpt2"), "gpt2", 'always_active = ["embedding"]', owners=("a", "b"), dtype="float32")
    case = dataclasses.replace(case, local_iterations=1, eval_every=0, num_steps=24)
    plan = case.plan(TWO)
    carrier = make_carrier(case, plan)
    stopped = run_plan(plan, carrier, 1, drain_at_s=10.0)
    (saved,) = [entry for entry in stopped.logged if isinstance(entry, rd.LogCheckpoint)]
    assert 0 < saved.step < case.num_steps and saved.step % 5  # of five groups
    carrier = rebuilt(case, plan, carrier.shards[saved.step], saved)
    start = StartPoint.of(plan.course, step=saved.step, holder=saved.holder)
    assert run_plan(plan, carrier, 2, start=start).finish == rd.Finish("", "")
    assert same_bits(trained_tensors(carrier), trained_tensors(run(case, TWO)[1]))


def test_hift_comparison_can_fail(inputs: Any) -> None:
    """Negative control: one step more, or another order, is far outside the bound."""
    case = hift_case(inputs("bert"), "bert")
    assert distance_to_reference(case, TWO, dataclasses.replace(case, num_steps=10)) > 1e-5
    assert distance_to_reference(case, TWO, dataclasses.replace(case, hift='order = "top2down"')) > 1e-5


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("seed", [1])
def test_hift_delays_never_change_a_bit(inputs: Any, seed: int) -> None:
    """Gradients of a tied table come from head and embedding in any order; their sum is the same."""
    folder = inputs("gpt2", tie_word_embeddings=True)
    case = hift_case(folder, "gpt2", "group_size = 2", dtype="float32", microbatches=4, dropout=0.1)
    first, other = (trained_tensors(run(case, FOUR, seed=number)[1]) for number in (0, seed))
    assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.promise("3 frozen means free")
@pytest.mark.parametrize(("model_type", "owners"), [("bert", ("a",)), ("gpt2", ("a", "b"))])
@pytest.mark.sampled(1)
def test_hift_holds_gradients_and_graphs_of_the_active_group_alone(
    inputs: Any, model_type: str, owners: tuple[str, ...]
) -> None:
    """After every action no other parameter has a gradient, and no graph is below the lowest unit that trains."""
    case = hift_case(inputs(model_type), model_type, 'group_size = 2\norder = "random"', owners=owners)
    plan = case.plan(FOUR)
    carrier = make_carrier(case, plan)
    by_seq = {item.seq: item for turn in turn_sequence(plan.course) for item in items(plan.course, turn)}
    carry_out = carrier.run
    graphs_of: set[tuple[int, int]] = set()

    def watched(node: str, action: Action) -> tuple[tuple[str, float], ...]:
        values, executor = carry_out(node, action), carrier.executors[node]
        units = trained(plan.course, by_seq[action.seq].kind, by_seq[action.seq].step)
        with_grads = units_with_gradients(executor)
        if with_grads and action.op in (Op.HEAD, Op.BACKWARD):
            assert all(unit in units for unit in with_grads), (action, with_grads)
        if action.op is Op.UPDATE:
            assert not with_grads & set(range(action.start, action.stop))
        for (seq, _), flow in executor._flows._flows.items():
            graphs_of.update((seq, unit) for start, stop in flow.graphs for unit in range(start, stop))
        return values

    carrier.run = watched  # type: ignore[method-assign]
    assert run_plan(plan, carrier, 3).finish == rd.Finish("", "")
    lowest = {seq: trained(plan.course, item.kind, item.step).lowest for seq, item in by_seq.items()}
    assert min(unit for _, unit in graphs_of) == EMBEDDING
    assert all(unit >= lowest[seq] for seq, unit in graphs_of)
    assert [executor.live_bytes() for executor in carrier.executors.values()] == [0] * 4


def units_with_gradients(executor: NodeExecutor) -> set[int]:
    """The units of which some parameter has a gradient at this node."""
    hosted, piece = executor._hosted, executor._slice
    units = {
        index: list(hosted.blocks.parameters(index, index + 1).values()) for index in range(piece.start, piece.stop)
    }
    if hosted.owner is not None:
        units |= {unit: list(values.values()) for unit, values in hosted.owner.units.items()}
        units[EMBEDDING] += hosted.owner._tied[1:] if hosted.owner._tied else ()
    return {unit for unit, values in units.items() if any(value.grad is not None for value in values)}


def test_hift_trains_tensors_of_its_own_and_not_the_files(inputs: Any) -> None:
    """In the type of the files too, in which a frozen table would be mapped: what trains is private and writable."""
    case = hift_case(inputs("gpt2"), "gpt2", "group_size = 6", dtype="float32", num_steps=2, eval_every=0)
    before = (case.folder / "model" / "model.safetensors").read_bytes()
    carrier = run(case, ONE)[1]
    assert (case.folder / "model" / "model.safetensors").read_bytes() == before
    owner = carrier.executors["a"]._hosted.owner
    assert owner is not None
    stored = load(before)
    for name, value in owner.units[EMBEDDING].items():
        assert not torch.equal(value, stored[f"transformer.{name}"]), f"{name} did not train"
    mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(case.folder) in line]
    ranges = [tuple(int(end, 16) for end in line.split("-")) for line in mapped]
    for name, value in owner.parameters.items():
        assert not any(start <= value.data_ptr() < stop for start, stop in ranges), f"{name} is mapped"


@pytest.mark.parametrize(("model_type", "tied"), [("bert", None), ("gpt2", True), ("llama", False), ("vit", None)])
@pytest.mark.sampled(2)
def test_hift_sends_gradients_of_the_planned_size(inputs: Any, model_type: str, tied: bool | None) -> None:
    """All of the head, of a tied table and of patches; of other tables at most the rows of a batch's padded tokens."""
    folder = inputs(model_type, **({} if tied is None else {"tie_word_embeddings": tied}))
    case = hift_case(folder, model_type, owners=("a", "b"), num_steps=6, eval_every=0)
    carrier = make_carrier(case, case.plan(TWO))
    take, sizes = carrier.take_parcel, {EMBEDDING: 0, 4: 0}

    def weighed(node: str, key: TensorKey) -> Any:
        content = take(node, key)
        sizes[key.boundary] = content.size_bytes
        return content

    carrier.take_parcel = weighed  # type: ignore[method-assign]
    assert run_plan(case.plan(TWO), carrier, 0).finish == rd.Finish("", "")
    facts, header_bytes = model_facts(folder / "model", case.job), 2048
    planned = embedding_grad_bytes(facts, 8 * 16)
    assert facts.head_bytes <= sizes[4] <= facts.head_bytes + header_bytes
    assert sizes[EMBEDDING] <= planned + header_bytes
    if facts.is_tied or model_type == "vit":
        assert sizes[EMBEDDING] >= (facts.token_table_bytes or planned)
    else:
        assert sizes[EMBEDDING] < facts.embedding_train_bytes


def test_hift_of_recomputed_blocks_gives_the_same_bits(inputs: Any) -> None:
    """Blocks that train and blocks that only pass gradients on are run again with the weights of their forward."""
    case = hift_case(inputs("gpt2"), "gpt2", "group_size = 2", owners=("a", "b"), dropout=0.1, dtype="float32")
    kept = trained_tensors(run(case, TWO)[1])
    plan = changed(case.plan(TWO), recompute=(Range(0, 1), Range(2, 4)))
    carrier = make_carrier(case, plan)
    assert run_plan(plan, carrier, 5).finish == rd.Finish("", "")
    assert same_bits(trained_tensors(carrier), kept)


@pytest.mark.promise("1 partition invariance")
def test_hift_with_velora_equals_the_formula(inputs: Any) -> None:
    """A layer's vector is of the first micro-batch at which its group trains; blocks of other groups keep nothing."""
    case = hift_case(inputs("bert"), "bert", "group_size = 2", owners=("a", "b"))
    velora = every_layer("bert", parts=5)
    plan = changed(case.plan(FOUR), velora=velora)
    carrier = make_carrier(case, plan)
    assert run_plan(plan, carrier, 2).finish == rd.Finish("", "")
    prepare = functools.partial(make_literal, velora=velora, seed=plan.course.seed)
    one = case.plan(ONE)
    wanted = reference.train_hift(case.job, one, case.folder / "model", case.datasets(), prepare=prepare)
    assert distance(trained_tensors(carrier), reference.tensors_of(wanted.model)) < 1e-9
    assert (
        distance_to_reference(case, FOUR)
        < 1e-9
        < distance(trained_tensors(carrier), trained_tensors(run(case, FOUR)[1]))
    )
