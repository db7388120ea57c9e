"""Scores that nodes gather are those of one process with autograd, and gathering them changes nothing."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from edge.runtime.executor import NodeExecutor
from edge.techniques import operations
from ringtune.costs.memory_sizes import block_scores_bytes
from ringtune.models.families import FAMILIES
from ringtune.models.family import CAUSAL_LM, CLASSIFICATION
from ringtune.schedule.actions import Action
from ringtune.schedule.batches import BatchStream
from ringtune.schedule.course import FrozenWeights
from ringtune.schedule.operation_tables import BlockCapacity, BlockScores, Choice, Policy, Score
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StepKind, Turn, items, turn_sequence
from tests.support import hand_ring as ring
from tests.support import reference, tiny
from tests.support.plain_rows import Doubled
from tests.support.rounded import LORA, write_rounded
from tests.support.tiny_families import DECODERS, ENCODERS, GENERIC, MODEL_TYPES
from tests.support.torch_ring import TASKS, Case, family_writer, write_family_inputs

SPLITS = {
    "one": (("a", 0, 4),),
    "two": (("b", 0, 1), ("a", 1, 4)),
    "four": (("d", 0, 1), ("c", 1, 2), ("b", 2, 3), ("a", 3, 4)),
}
CAPACITY = BlockCapacity(full=3.0, forward_only=1.0, forward=1.0, backward=2.0)
ADAPTER = ".ringtune."
WAYS_OUT = ("output.dense", "out_lin", "lin2", "c_proj", "o_proj", "down_proj", "self_attn.dense", "fc2")
FIRST_SEQ = 10_000


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that writes the inputs of a family once."""
    return family_writer(tmp_path_factory.mktemp("inputs"))


def choice_of(
    backward: Score, forward: Score, subnets: int, policy: Policy = Policy.TWO_STAGE, scored: str = "base"
) -> Choice:
    """A choice that needs these scores."""
    return Choice(
        policy=policy,
        subnets=subnets,
        capacities=(CAPACITY,),
        backward_score=backward,
        forward_score=forward,
        scored_weights=scored,
    )


def make_ring(case: Case, slices: Any, choice: Choice | None) -> ring.HandRing:
    """Executors of a case whose run chooses its operations."""
    plan = case.plan(slices)
    plan = Plan.of(dataclasses.replace(plan.course, choice=choice), plan.placement)
    return ring.HandRing(plan, case.job, case.folder / "model", case.datasets())


def score_turn(plan: Plan, owner: str, *, index: int = 500, step: int = 0) -> Turn:
    """A turn over two batches of an owner, or over its only one."""
    rows = next(entry.train_rows for entry in plan.course.owners if entry.node == owner)
    return Turn(
        index=index,
        kind=StepKind.SCORE,
        owner=owner,
        round=0,
        first_seq=FIRST_SEQ + 100 * index,
        num_items=min(2, BatchStream(rows, 8, 0, owner).num_batches),
        first_step=step,
        first_batch=0,
    )


def score(hand: ring.HandRing, turn: Turn) -> list[BlockScores]:
    """Do a score turn, and take what every node gathered."""
    hand.run_turn(turn)
    for node in hand.nodes.values():
        node.forget_turn(turn.index)
    return sorted(entry for node in hand.nodes.values() for entry in node.take_scores(turn.index))


# ---- the reference ---------------------------------------------------------------------------------


def one_process(case: Case, plan: Plan, turn: Turn) -> list[BlockScores]:
    """The whole model, gradients of all weights, cut into equal parts by heads; once, whatever the slices."""
    key = repr((case, plan.course, turn))
    if key not in _REFERENCES:
        _REFERENCES[key] = scores_of_one_process(case, plan, turn)
    return _REFERENCES[key]


_REFERENCES: dict[str, list[BlockScores]] = {}


def scores_of_one_process(case: Case, plan: Plan, turn: Turn) -> list[BlockScores]:
    """Those of one course; nothing in them depends on who hosts what."""
    choice = plan.course.choice
    assert choice is not None
    model = reference.whole_model(case.job, plan, case.folder / "model").eval()
    own = reference.own_weights_of(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in own or ADAPTER in name)
    dataset = case.datasets()[turn.owner]
    stream = BatchStream(dataset.train_rows, 8, 0, turn.owner)
    found = []
    for item in items(plan.course, turn):
        for micro, loss in enumerate(losses(case, plan, model, item)):
            model.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            for block, module in model.iter_layers():
                if block in plan.course.trainable:
                    values = tuple(tuple(row) for row in values_of(module, choice, model.config))
                    found.append(BlockScores(turn.owner, stream.batch_id(item.batch), micro, block, values))
    return sorted(found)


def losses(case: Case, plan: Plan, model: Any, item: Item) -> Iterator[torch.Tensor]:
    """The share of each micro-batch in the mean loss of its batch."""
    batch = case.datasets()[item.owner].batch(plan.course, item)
    _, all_targets = reference.targets_of(case.task, batch)
    first = 0
    for size in plan.course.microbatch_sizes(item.rows):
        rows = batch.rows(first, first + size)
        first += size
        targets, count = reference.targets_of(case.task, rows)
        yield reference.output_of(model, rows, targets).loss * (count / all_targets)


def values_of(module: Any, choice: Choice, config: Any) -> list[list[float]]:
    """For each score one number for each subnet; what belongs to the whole block is shared out evenly."""
    count, named = choice.subnets, list(module.named_parameters())
    shared: list[torch.nn.Parameter] = []
    if choice.scored_weights == "base":
        own = is_own_of_any if count == 1 and config.model_type in (*GENERIC, *ENCODERS) else is_own
        pairs = [parts_of(name, value, count, config) for name, value in named if own(name)]
    else:
        adapter = [(name, value) for name, value in named if ADAPTER in name]
        pairs = [lora_parts_of(name, value, count, config) for name, value in adapter if is_divided(name)]
        shared = [value for name, value in adapter if not is_divided(name)]
    formulas = {
        Score.FISHER: lambda w, g: (g * g).sum(),
        Score.WEIGHT_MAGNITUDE: lambda w, g: w.abs().sum(),
        Score.GRADIENT_MAGNITUDE: lambda w, g: g.abs().sum(),
        Score.TAYLOR: lambda w, g: (w * g).abs().sum(),
    }
    return [
        [
            sum(float(formulas[kind](*pair)) for parts in pairs for pair in parts[subnet])
            + sum(float(formulas[kind](value.detach(), value.grad)) for value in shared) / count
            for subnet in range(count)
        ]
        for kind in choice.scores
    ]


def is_own(name: str) -> bool:
    """Whether a tensor of a block belongs to subnets, as those of norms and of an activation do not."""
    if ADAPTER in name or "norm" in name.lower() or name.startswith("ln_") or "act_fn" in name:
        return False
    return not name.endswith(tuple(f"{way}.bias" for way in WAYS_OUT))


def is_own_of_any(name: str) -> bool:
    """Whether a tensor of a generic family's block is scored: all but those of adapters and a router's correction."""
    return ADAPTER not in name and not name.endswith("e_score_correction_bias")


def parts_of(name: str, value: Any, subnets: int, config: Any) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """For each subnet its parts of weight and gradient: equal parts of outputs, or of inputs of the ways out."""
    is_transposed = config.model_type == "gpt2" and value.dim() == 2
    dimension = int(name.rpartition(".")[0].endswith(WAYS_OUT)) ^ is_transposed if value.dim() == 2 else 0
    wholes = [(value.detach(), torch.zeros_like(value) if value.grad is None else value.grad)]  # an idle expert
    if "c_attn" in name and subnets > 1:
        wholes = list(zip(*(whole.chunk(3, dimension) for whole in wholes[0]), strict=True))
    cut = [[whole.tensor_split(subnets, dimension) for whole in pair] for pair in wholes]
    return [[(weight[subnet], gradient[subnet]) for weight, gradient in cut] for subnet in range(subnets)]


def is_divided(name: str) -> bool:
    """Whether a tensor of an adapter has parts for subnets: LoRA's B has outputs, and its A the inputs of ways out."""
    matrix, _, factor = name.partition(f".loras{ADAPTER}")
    return factor == ("lora_A" if matrix.endswith(WAYS_OUT) else "lora_B")


def lora_parts_of(name: str, value: Any, subnets: int, config: Any) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """For each subnet its parts of weight and gradient; a fused matrix has as many LoRAs as its B has thirds."""
    dimension, wholes = int(name.endswith("lora_A")), [(value.detach(), value.grad)]
    if "c_attn" in name:
        thirds = len(value) // config.hidden_size
        wholes = list(zip(*(whole.chunk(thirds, dimension) for whole in wholes[0]), strict=True))
    cut = [[whole.chunk(subnets, dimension) for whole in pair] for pair in wholes]
    return [[(weight[subnet], gradient[subnet]) for weight, gradient in cut] for subnet in range(subnets)]


def check_equal(got: list[BlockScores], want: list[BlockScores], bound: float = 1e-9) -> None:
    """The same keys in the same order, and numbers within the bound."""
    assert [entry[:4] for entry in got] == [entry[:4] for entry in want]
    assert want
    for ours, theirs in zip(got, want, strict=True):
        for mine, yours in zip(ours.values, theirs.values, strict=True):
            assert mine == pytest.approx(yours, rel=bound, abs=0)
            assert min(yours) > 0


# ---- the tests -------------------------------------------------------------------------------------


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("model_type", "adapter", "split"),
    [(name, "seq_bn", "four" if at % 2 else "two") for at, name in enumerate(MODEL_TYPES)]
    + [(name, "full", "two") for name in MODEL_TYPES]
    + [("bert", "seq_bn", "four"), ("bert", "full", "one")],
)
@pytest.mark.sampled(1)
def test_scores_of_nodes_equal_one_process(inputs: Any, model_type: str, adapter: str, split: str) -> None:
    """Fisher and Taylor of every family in any split, also of blocks that RingAda does not train yet."""
    case = Case(folder=inputs(model_type), task=TASKS[model_type], adapter=adapter, owners=("a", "b"), microbatches=3)
    hand = make_ring(case, SPLITS[split], choice_of(Score.TAYLOR, Score.FISHER, 2))
    turn = score_turn(hand.plan, "b")
    check_equal(score(hand, turn), one_process(case, hand.plan, turn))


@pytest.mark.parametrize(
    ("model_type", "task"),
    [(name, CLASSIFICATION) for name in ("bert", "gpt2", "llama")] + [(name, CAUSAL_LM) for name in ("llama", "qwen3")],
)
@pytest.mark.sampled(1)
def test_scores_of_rows_with_the_padding_id_are_those_of_rows_alone(tmp_path: Path, model_type: str, task: str) -> None:
    """At the beginning, inside and at the end of texts, beside longer ones; in plain transformers without padding."""
    folder = write_family_inputs(tmp_path, model_type, task)
    texts = [
        "[PAD] w1 w2 [PAD] w3",
        "w4 w5 [PAD]",
        "w6",
        "[PAD] [PAD] w7",
        *(f"w{8 + at} [PAD] w9 w10" for at in range(4)),
    ]
    rows = [f"{text},{tiny.LABELS[at % 2]}" for at, text in enumerate(texts)]
    (folder / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n", encoding="utf-8")
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    case = Case(folder=folder, task=task, adapter="lora[r=4]", microbatches=2)
    hand = make_ring(case, SPLITS["two"], choice_of(Score.TAYLOR, Score.FISHER, 2))
    turn = score_turn(hand.plan, "a")
    with Doubled():
        got = score(hand, turn)
    check_equal(got, scores_of_rows_alone(case, hand.plan, turn))


def scores_of_rows_alone(case: Case, plan: Plan, turn: Turn) -> list[BlockScores]:
    """Each row of a micro-batch computed alone by eager transformers; an adapter that is new changes nothing."""
    is_lm, choice = case.task == CAUSAL_LM, plan.course.choice
    assert choice is not None
    loader = AutoModelForCausalLM if is_lm else AutoModel
    plain: Any = loader.from_pretrained(case.folder / "model", attn_implementation="eager").double().eval()
    head = None if is_lm else reference.whole_model(case.job, plan, case.folder / "model").eval().heads[reference.NAME]
    reads_last = plain.config.model_type in DECODERS
    dataset, found = case.datasets()[turn.owner], []
    for item in items(plan.course, turn):
        batch, first = dataset.batch(plan.course, item), 0
        ids = [batch.ids[row, batch.mask[row] == 1] for row in range(len(batch.mask))]
        assert any(0 in row for row in ids)
        all_targets = sum(len(row) - 1 for row in ids) if is_lm else len(ids)
        for micro, size in enumerate(plan.course.microbatch_sizes(item.rows)):
            plain.zero_grad(set_to_none=True)
            for row in range(first, first + size):
                with Doubled():
                    said = plain(input_ids=ids[row][None])[0]
                if head is None:
                    logits, targets = said[0, :-1], ids[row][1:]
                else:
                    more = {"cls_output": said[:, -1]} if reads_last else {}
                    logits, targets = head((said,), return_dict=False, **more)[0], batch.labels[row : row + 1]
                loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
                torch.autograd.backward(loss / all_targets)
            first += size
            for block, module in enumerate(
                plain.base_model.get_submodule(FAMILIES[plain.config.model_type].blocks_path)
            ):
                if block in plan.course.trainable:
                    values = tuple(tuple(each) for each in values_of(module, choice, plain.config))
                    batch_id = plan.course.batch_id(turn.owner, item.batch)
                    found.append(BlockScores(turn.owner, batch_id, micro, block, values))
    return sorted(found)


@pytest.mark.parametrize("kinds", [(Score.WEIGHT_MAGNITUDE, Score.GRADIENT_MAGNITUDE), (Score.TAYLOR, Score.FISHER)])
@pytest.mark.parametrize(
    ("adapter", "subnets"),
    [(adapter, subnets) for adapter in ("lora[r=4]", "double_seq_bn") for subnets in (1, 2, 4)] + [("ia3", 1)],
)
@pytest.mark.sampled(1)
def test_scores_of_all_kinds_equal_one_process(
    inputs: Any, monkeypatch: pytest.MonkeyPatch, adapter: str, subnets: int, kinds: tuple[Score, Score]
) -> None:
    """Any number of subnets and any adapter; a private block has none.

    Weights have more numbers than are reduced at a time, and the last chunk of them is short.
    """
    monkeypatch.setattr(operations, "_CHUNK", 96)
    case = Case(folder=inputs("bert"), adapter=adapter, microbatches=2, private_blocks=1)
    hand = make_ring(case, (("a", 1, 3), ("b", 3, 4)), choice_of(*kinds, subnets))
    turn = score_turn(hand.plan, "a", step=9)
    got = score(hand, turn)
    assert {entry.block for entry in got} == {1, 2, 3}
    check_equal(got, one_process(case, hand.plan, turn))


@pytest.mark.parametrize("kinds", [(Score.WEIGHT_MAGNITUDE, Score.GRADIENT_MAGNITUDE), (Score.TAYLOR, Score.FISHER)])
@pytest.mark.parametrize(
    ("model_type", "adapter", "subnets"),
    [
        ("bert", LORA, 4),
        ("bert", "seq_bn|lora[r=2, init_weights='bert']", 2),
        ("bert", "seq_bn[reduction_factor=2]", 2),
        ("bert", "ia3", 1),
        ("gpt2", LORA, 4),
        ("gpt2", "lora[r=2, attn_matrices=['q','v'], init_weights='bert']", 2),
        ("llama", LORA, 2),
        ("qwen3", LORA, 2),
        ("vit", LORA, 2),
    ],
)
@pytest.mark.sampled(3)
def test_scores_of_adapters_equal_one_process(
    inputs: Any, model_type: str, adapter: str, subnets: int, kinds: tuple[Score, Score]
) -> None:
    """Rows and columns of LoRA beside those of a subnet, and an even part of what belongs to the whole block."""
    case = Case(folder=inputs(model_type), task=TASKS[model_type], adapter=adapter, owners=("a", "b"), microbatches=2)
    hand = make_ring(case, SPLITS["two"], choice_of(*kinds, subnets, scored="adapter"))
    turn = score_turn(hand.plan, "b")
    check_equal(score(hand, turn), one_process(case, hand.plan, turn))


def test_scores_of_a_new_lora_are_of_one_factor(inputs: Any) -> None:
    """B is zero: Fisher is of B's gradient alone, weights are A's, in equal parts, and Taylor is zero.

    So is everything in a block without an adapter.
    """
    case = Case(folder=inputs("bert"), adapter="lora[r=4, leave_out=[0]]", microbatches=2)
    hand = make_ring(case, SPLITS["two"], choice_of(Score.TAYLOR, Score.FISHER, 2, scored="adapter"))
    for entry in score(hand, score_turn(hand.plan, "a")):
        taylor, fisher = entry.values
        assert taylor == (0, 0)
        assert (fisher == (0, 0)) is (entry.block == 0)
        assert entry.block == 0 or (fisher[0] != fisher[1] and min(fisher) > 0)
    choice = choice_of(Score.WEIGHT_MAGNITUDE, Score.WEIGHT_MAGNITUDE, 2, scored="adapter")
    hand = make_ring(case, SPLITS["one"], choice)
    parameters = hand.nodes["a"].part.trained
    for entry in score(hand, score_turn(hand.plan, "a")):
        factors = [
            value for name, value in parameters.items() if name.startswith(f"{entry.block}.") and "lora_A" in name
        ]
        each = sum(float(value.detach().abs().sum()) for value in factors) / 2
        assert entry.values[0] == pytest.approx((each, each), rel=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.sampled(1)
def test_scores_of_adapters_go_with_frozen_weights_in_a_small_type(inputs: Any, tmp_path: Path, dtype: str) -> None:
    """Fisher and Taylor of LoRA beside weights without gradients are those of one process with rounded weights."""
    folder = tmp_path / "rounded"
    case = Case(folder=inputs("bert"), adapter=LORA, microbatches=2, dtype="float32", frozen=FrozenWeights(dtype=dtype))
    hand = make_ring(case, SPLITS["two"], choice_of(Score.TAYLOR, Score.FISHER, 2, scored="adapter"))
    turn = score_turn(hand.plan, "a")
    write_rounded(case.folder / "model", folder / "model", dtype)
    for path in case.folder.glob("*.*"):
        (folder / path.name).symlink_to(path)
    plain = dataclasses.replace(case, folder=folder, frozen=None)
    check_equal(score(hand, turn), scores_of_one_process(plain, hand.plan, turn), bound=1e-3)


def test_scores_of_adapters_take_no_gradient_of_a_base_weight(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the adapter's tensors are watched, and the graph keeps no more than one of a training step."""
    case = Case(folder=inputs("bert"), adapter="seq_bn", method="all", microbatches=1)
    most: dict[str, int] = {}
    for scored in ("base", "adapter"):
        hand = make_ring(case, SPLITS["one"], choice_of(Score.TAYLOR, Score.FISHER, 2, scored=scored))
        most[scored] = kept_by(hand, score_turn(hand.plan, "a"), monkeypatch)
    trained = kept_by(hand, next(iter(turn_sequence(hand.plan.course))), monkeypatch)
    assert most["adapter"] == trained < most["base"]


def kept_by(hand: ring.HandRing, turn: Turn, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes that nodes hold before an action of a turn."""
    found, run = list[int](), NodeExecutor.run

    def watched(own: NodeExecutor, action: Action) -> Any:
        found.append(own.live_bytes())
        return run(own, action)

    with monkeypatch.context() as patch:
        patch.setattr(NodeExecutor, "run", watched)
        hand.run_turn(turn)
    return max(found)


@pytest.mark.parametrize("adapter", ["seq_bn", "full"])
@pytest.mark.parametrize("policy", [Policy.MAGNITUDE, Policy.MAGNITUDE_GRADIENT])
@pytest.mark.sampled(1)
def test_scores_are_those_that_the_policy_needs(inputs: Any, policy: Policy, adapter: str) -> None:
    """Weights alone, weights with gradients, or nothing; whatever the dropout of the training, of blocks and head."""
    case = Case(folder=inputs("bert"), adapter=adapter, microbatches=2, dropout=0.1)
    hand = make_ring(case, SPLITS["two"], choice_of(Score.TAYLOR, Score.FISHER, 1, policy))
    turn = score_turn(hand.plan, "a")
    check_equal(score(hand, turn), one_process(case, hand.plan, turn))
    random = make_ring(case, SPLITS["one"], choice_of(Score.TAYLOR, Score.FISHER, 1, Policy.RANDOM))
    assert score(random, score_turn(random.plan, "a")) == []


@pytest.mark.parametrize("kinds", [(Score.FISHER, Score.WEIGHT_MAGNITUDE), (Score.TAYLOR, Score.GRADIENT_MAGNITUDE)])
@pytest.mark.parametrize("subnets", [1, 4])
@pytest.mark.sampled(1)
def test_scores_take_at_most_what_is_counted(inputs: Any, kinds: tuple[Score, Score], subnets: int) -> None:
    """Until their turn ends they are numbers, as many as there are scores and subnets, and not one for each weight."""
    case = Case(folder=inputs("bert"), microbatches=4)
    hand = make_ring(case, SPLITS["one"], choice_of(*kinds, subnets))
    score(hand, score_turn(hand.plan, "a", index=500))  # what is looked up once is there then
    turn = score_turn(hand.plan, "a", index=501)
    tracemalloc.start()
    try:
        hand.run_turn(turn)
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, operations.__file__)])
        held = sum(trace.size for trace in snapshot.traces)
    finally:
        tracemalloc.stop()
    counted = len(hand.plan.course.trainable.blocks) * block_scores_bytes(hand.plan.course)
    assert 0.1 * counted < held <= counted


def left_at(node: NodeExecutor) -> list[Any]:
    """Everything of a node that a score turn must not touch: tensors by identity and value, flags, gradients."""
    hosted = node._hosted
    parameters = [(name, id(value), value.grad) for name, value in hosted.skeleton.model.named_parameters()]
    return [parameters, sorted(hosted.optimizers.tensors()), node.run_figures, node.live_bytes()]


@pytest.mark.parametrize("adapter", ["seq_bn", "lora", "full"])
@pytest.mark.parametrize("method", ["ringada", "pipeadapter"])
@pytest.mark.sampled(1)
def test_scores_change_no_bit_of_the_training(inputs: Any, method: str, adapter: str) -> None:
    """A run with score turns between its turns ends with the bits of one without, and nothing is left of them."""
    case = Case(
        folder=inputs("bert"),
        adapter=adapter,
        method=method,
        dtype="float32",
        dropout=0.1,
        owners=("a", "b"),
        num_steps=2,
        every_steps=1,
        local_iterations=1,
        microbatches=2,
    )
    choice = choice_of(Score.TAYLOR, Score.FISHER, 1)  # dropout is not drawn for a part of the heads
    plain = make_ring(case, SPLITS["two"], choice).train()
    scored = make_ring(case, SPLITS["two"], choice)
    for turn in turn_sequence(scored.plan.course):
        before = {name: left_at(node) for name, node in scored.nodes.items()}
        holder = scored.holder
        extra = score_turn(scored.plan, holder, index=500 + turn.index, step=turn.first_step)
        assert score(scored, extra)
        assert {name: left_at(node) for name, node in scored.nodes.items()} == before
        assert all(node.take_scores(extra.index) == () for node in scored.nodes.values())
        scored.run_turn(turn)
        for node in scored.nodes.values():
            node.forget_turn(turn.index)
    want = plain.tensors()
    assert all(torch.equal(value, want[name]) for name, value in scored.tensors().items())


def test_scores_hold_one_gradient_at_a_time(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight's gradient is gone before the next one is reduced."""
    case = Case(folder=inputs("bert"), adapter="seq_bn", microbatches=2)
    hand = make_ring(case, SPLITS["one"], choice_of(Score.TAYLOR, Score.FISHER, 2))
    tensors: list[torch.Tensor] = []
    original = operations._reducer

    def watched(*args: Any) -> Callable[[torch.Tensor], None]:
        reduce = original(*args)

        def hook(tensor: torch.Tensor) -> None:
            assert tensor.grad is not None
            assert all(other.grad is None for other in tensors)
            tensors.append(tensor)
            reduce(tensor)

        return hook

    monkeypatch.setattr(operations, "_reducer", watched)
    turn = score_turn(hand.plan, "a")
    assert len(score(hand, turn)) * 10 == len(tensors)
    assert all(tensor.grad is None for tensor in tensors)


def test_scores_are_read_once_for_each_backward(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number that is read from an accelerator waits for all its work: not one for each part of each weight."""
    case = Case(folder=inputs("bert"), microbatches=2)
    hand = make_ring(case, SPLITS["two"], choice_of(Score.TAYLOR, Score.FISHER, 4))
    turn = score_turn(hand.plan, "a")
    tolist = torch.Tensor.tolist
    reads: dict[str, set[int]] = {"reduce": set(), "_reduce": set()}

    def watch(of: Any, name: str) -> None:
        work = getattr(of, name)

        def watched(*arguments: Any) -> None:
            lists = [0]

            def count(tensor: torch.Tensor) -> Any:
                lists[0] += 1
                return tolist(tensor)

            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", count)
                for single in ("__float__", "item"):
                    patch.setattr(torch.Tensor, single, lambda tensor: pytest.fail("one number was read by itself"))
                work(*arguments)
            reads[name].add(lists[0])

        monkeypatch.setattr(of, name, watched)

    watch(operations.ScoreCollector, "reduce")
    watch(operations, "_reduce")
    assert score(hand, turn)
    assert reads == {"reduce": {1}, "_reduce": {0}}
