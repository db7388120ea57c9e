"""One process that runs everything and masks what an operation table leaves out, and the ring beside it.

The reference runs every block for every micro-batch. Where a table says "forward-only", a contribution is added without
its gradient; where it says "shortcut", it is not added. The contribution of a block is what it changes in its input;
that of a subnet is what its inputs give in the matrix behind the attention, and in the last of the feed-forward part.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ringtune.config.sections import learning_rate
from ringtune.models.families import LAYOUTS
from ringtune.run_control import events as rd
from ringtune.schedule.batches import BatchStream
from ringtune.schedule.operation_tables import FORWARD_ONLY, FULL, SHORTCUT, BatchOperations, Operations, pattern_of
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.turns import StepKind, items, turn_sequence
from tests.support.literal_velora import make_literal
from tests.support.recorded_ring import RecordedResult, RecordedRing
from tests.support.reference import (
    adapter_of,
    first_drawing,
    inputs_of,
    seed_units,
    targets_of,
    unpacked,
    update,
    whole_model,
)
from tests.support.tiny_families import DIVIDED, PLUGGED
from tests.support.torch_ring import Case, TorchCarrier, make_carrier

Slices = tuple[tuple[str, int, int], ...]
SPLITS: dict[str, Slices] = {
    "one": (("a", 0, 4),),
    "two": (("b", 0, 2), ("a", 2, 4)),
    "four": (("d", 0, 1), ("c", 1, 2), ("b", 2, 3), ("a", 3, 4)),
}
WAYS_OUT = {
    "bert": ("attention.output.dense", "output.dense"),
    "roberta": ("attention.output.dense", "output.dense"),
    "xlm-roberta": ("attention.output.dense", "output.dense"),
    "electra": ("attention.output.dense", "output.dense"),
    "distilbert": ("attention.out_lin", "ffn.lin2"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "mistral": ("self_attn.o_proj", "mlp.down_proj"),
    "vit": ("attention.output.dense", "output.dense"),
    **dict.fromkeys((*PLUGGED, *DIVIDED), ("self_attn.o_proj", "mlp.down_proj")),
    "nanochat": ("self_attn.o_proj", "mlp.fc2"),
    "phi": ("self_attn.dense", "mlp.fc2"),
    "starcoder2": ("self_attn.o_proj", "mlp.c_proj"),
}


class Masks:
    """Forwards in place of those of the blocks of a whole model, which do what the row of the micro-batch says.

    ``cuts`` cuts the gradient that VeLoRA's reconstruction gives to columns of other subnets than full ones; then each
    backward follows its forward.
    """

    def __init__(self, model: Any, subnets: int = 1, *, cuts: bool = False) -> None:
        self.row, self._subnets = "", subnets
        inputs_first = LAYOUTS[model.config.model_type].inputs_first
        for index, block in model.iter_layers():
            block.forward = functools.partial(self._block, index, block.forward)
            for name in WAYS_OUT[model.config.model_type] if subnets > 1 else ():
                module = block.get_submodule(name)
                module.forward = functools.partial(self._way_out, index, module.forward)
                for path, value in module.named_parameters() if cuts else ():
                    if value.requires_grad and path.endswith(("lora_A", "weight")):
                        is_turned = inputs_first and path.endswith("weight")
                        value.register_hook(functools.partial(self._of_full, index, 0 if is_turned else 1))

    def _block(self, index: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        pattern = pattern_of(self.row, index, self._subnets) or FULL
        if FULL in pattern:
            return forward(*args, **kwargs)
        with torch.no_grad():
            output = forward(*args, **kwargs)
            after = output[0] if isinstance(output, tuple) else output
            change = torch.zeros_like(hidden) if set(pattern) == {SHORTCUT} else after - hidden
        return (hidden + change, *output[1:]) if isinstance(output, tuple) else hidden + change

    def _parts(self, index: int, given: torch.Tensor, dimension: int) -> list[torch.Tensor]:
        """Ones at the inputs of full subnets, and at those of forward-only ones."""
        pattern = pattern_of(self.row, index, self._subnets)
        if FULL not in pattern:  # the whole block is without gradient then
            pattern = pattern.replace(FORWARD_ONLY, FULL)
        width = given.shape[dimension]
        ones = [torch.zeros(width, dtype=given.dtype) for _ in (FULL, FORWARD_ONLY)]
        for code, part in zip(pattern, torch.arange(width).tensor_split(self._subnets), strict=True):
            if code != SHORTCUT:
                ones[code == FORWARD_ONLY][part] = 1.0
        return ones

    def _of_full(self, index: int, dimension: int, grad: torch.Tensor) -> torch.Tensor:
        if not pattern_of(self.row, index, self._subnets):
            return grad
        ones = self._parts(index, grad, dimension)[0]
        return grad * (ones if dimension else ones[:, None])

    def _way_out(self, index: int, forward: Any, given: torch.Tensor) -> Any:
        """Full inputs with gradient, forward-only ones without, each by a multiplication with ones and zeros."""
        if not pattern_of(self.row, index, self._subnets):
            return forward(given)
        full, free = self._parts(index, given, -1)
        drawn = torch.get_rng_state()  # all have the same dropout

        def computed(inputs: torch.Tensor) -> Any:
            torch.set_rng_state(drawn)
            return forward(inputs)

        with torch.no_grad():
            rest = computed(given * free) - computed(torch.zeros_like(given))
        return computed(given * full) + rest


@functools.lru_cache(maxsize=64)
def one_process(case: Case, velora: Velora | None = None) -> dict[str, torch.Tensor]:
    """The whole model, all blocks run, the masks applied, one optimizer; once per case, whatever the slices."""
    plan = case.plan((("a", case.private_blocks, 4),))
    datasets, table = case.datasets(), case.operations or Operations()
    model = whole_model(case.job, plan, case.folder / "model").eval()
    if velora is not None:
        make_literal(model, velora, plan.course.seed)
    masks = Masks(model, table.subnets, cuts=velora is not None)
    generator_state, at = torch.get_rng_state(), seed_units(model, case.job)
    blocks = [list(block.parameters()) for _, block in model.iter_layers()]
    trained = [[value for value in block if value.requires_grad] for block in blocks]
    head = [] if model.active_head == "default" else list(model.heads[model.active_head].parameters())
    kind: Any = torch.optim.AdamW if case.optimizer == "adamw" else torch.optim.SGD
    invertible = [value for name, value in model.named_parameters() if ".invertible_adapters." in name]
    optimizer = kind([*itertools.chain(*trained), *head, *invertible], lr=1.0, weight_decay=case.weight_decay)
    rows_of = {(entry.owner, entry.batch_id, entry.of_pass): entry.rows for entry in table.batches}
    batch_ids = {name: BatchStream(data.train_rows, 8, 0, name) for name, data in datasets.items()}
    for item in train_items(plan):
        units = plan.course.method.trained(plan.course, item.step)
        lowest = units.blocks[0]
        for value in invertible:
            value.requires_grad_(units.has_embedding)
        model.heads[model.active_head].train()
        first_drawing(model).train(units.has_embedding)
        for index, parameters in enumerate(trained):
            for value in parameters:
                value.requires_grad_(index >= lowest)
        batch = datasets[item.owner].batch(plan.course, item)
        stream = batch_ids[item.owner]
        at_pass = item.batch // -(-stream.num_rows // 8) % table.passes
        table_rows = rows_of[item.owner, stream.batch_id(item.batch), at_pass]
        parts = {
            micro: unpacked(batch.rows(micro * 2, micro * 2 + 2))
            for micro in taking_part(table_rows, table.subnets, lowest)
        }
        all_targets = sum(targets_of(case.task, rows)[1] for rows in parts.values())
        for micro, rows in parts.items():
            masks.row = table_rows[micro]
            at.update(step=item.step, micro=micro)
            for index, block in model.iter_layers():  # a block that is forward-only as a whole draws nothing
                block.train(index >= lowest and FULL in pattern_of(masks.row, index, table.subnets))
            targets, count = targets_of(case.task, rows)
            loss = model(**inputs_of(model, rows), **targets).loss * (count / all_targets)
            if loss.requires_grad:  # none below a decoder that is frozen, where all subnets are forward-only
                loss.backward()
        update(optimizer, learning_rate(case.job.train, item.step, case.num_steps))
    torch.set_rng_state(generator_state)
    heads = {
        name: value for name, value in model.state_dict().items() if name.startswith(("heads.ringtune.", "score."))
    }
    return adapter_of(model) | heads


def taking_part(rows: Sequence[str], subnets: int, lowest: int) -> list[int]:
    """The micro-batches that are not passed by all blocks from ``lowest`` on; all where none else is left."""
    return [micro for micro, row in enumerate(rows) if row[lowest * subnets :].strip(SHORTCUT)] or list(
        range(len(rows))
    )


def train_items(plan: Plan) -> Iterator[Any]:
    """The train items of a plan, in order."""
    for turn in turn_sequence(plan.course):
        yield from (item for item in items(plan.course, turn) if item.kind is StepKind.TRAIN)


def mixed_table(seed: int, owners: tuple[str, ...], subnets: int) -> Operations:
    """Other operations for every micro-batch of every batch, every kind of block among them.

    Of each batch, one micro-batch passes blocks 0 and 1 by, and one has no full subnet anywhere.
    """
    rng = random.Random(seed)

    def row(*kinds: str) -> str:
        return "".join(_block(rng, rng.choice(kinds), subnets) for _ in range(4))

    entries = []
    for owner in owners:
        for batch_id in range(2):
            skipping = SHORTCUT * 2 * subnets + row("mixed")[2 * subnets :]
            rows = [skipping, row("free", "mixed free"), *(row("mixed", "mixed", *_KINDS) for _ in range(2))]
            rng.shuffle(rows)
            entries.append(BatchOperations(owner=owner, batch_id=batch_id, rows=tuple(rows)))
    return Operations(batches=tuple(entries), subnets=subnets)


_KINDS = {
    "full": FULL,
    "free": FORWARD_ONLY,
    "skipped": SHORTCUT,
    "mixed": FULL + FORWARD_ONLY + SHORTCUT,
    "mixed free": FORWARD_ONLY + SHORTCUT,
}


def _block(rng: random.Random, kind: str, subnets: int) -> str:
    return "".join(rng.choice(_KINDS[kind]) for _ in range(subnets))


def run(
    case: Case, plan: Plan, seed: int = 0, carrier: TorchCarrier | None = None
) -> tuple[RecordedResult, TorchCarrier]:
    """With any delays."""
    rng = random.Random(seed)
    carrier = carrier or make_carrier(case, plan, keep_messages=True)
    result = RecordedRing(
        plan,
        action_s=lambda node, action: rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 2.0]) * rng.random(),
        carrier=carrier,
    ).run()
    assert result.finish == rd.Finish("", ""), result.finish
    return result, carrier
