"""Operation tables, of whole blocks and of subnets, given or chosen by scores; and stages of several hosts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

from ringtune.schedule.operation_tables import (
    SHORTCUT,
    BatchOperations,
    BlockScores,
    Operations,
    Score,
)
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, Turn
from ringtune.techniques.knapsacks import choose_table
from tests.features.feature import (
    FOUR,
    PRIVATE,
    SPLITS,
    TWO,
    Feature,
    Run,
    Wanted,
    inputs,
    on_one_node,
    one_process,
    planned,
)
from tests.features.memory import NATIVELY, in_bfloat16
from tests.features.models import of_family
from tests.support.choosing import make_choice
from tests.support.moves import Slices
from tests.support.operation_masks import Masks, mixed_table, taking_part
from tests.support.operation_masks import one_process as masked_process
from tests.support.rounded import LORA
from tests.support.stale_reference import StaleProcess
from tests.support.tiny_families import MODEL_TYPES, PLUGGED
from tests.support.torch_ring import Case, TorchCarrier

GROUPED = ("llama", "mistral", *PLUGGED)


def masked(case: Case, run: Run) -> Wanted:
    """One process that runs every block for every micro-batch, and masks what the table leaves out."""
    return Wanted(tensors=masked_process(case))


def random_table(seed: int, owners: tuple[str, ...], codes: str, passes: int = 1, num_batches: int = 4) -> Operations:
    """Other operations for every micro-batch of every batch and pass; no two rows of a batch are equal."""
    rng = random.Random(seed)
    rows = ["".join(row) for row in itertools.product(sorted(set(codes)), repeat=4)]
    weights = [functools.reduce(lambda product, code: product * codes.count(code), row, 1) for row in rows]
    entries = []
    for owner in owners:
        for batch_id, of_pass in itertools.product(range(num_batches), range(passes)):
            chosen: dict[str, None] = {}
            while len(chosen) < 4:
                chosen.setdefault(rng.choices(rows, weights)[0])
            entries.append(BatchOperations(owner=owner, batch_id=batch_id, rows=tuple(chosen), of_pass=of_pass))
    return Operations(batches=tuple(entries), passes=passes)


def with_idle(table: Operations) -> Operations:
    """The same table with a micro-batch of each batch that passes all blocks by."""
    batches = [
        dataclasses.replace(
            entry, rows=tuple(SHORTCUT * 4 if at == index % 4 else row for at, row in enumerate(entry.rows))
        )
        for index, entry in enumerate(table.batches)
    ]
    return dataclasses.replace(table, batches=tuple(batches))


TABLES = [
    Feature(
        name=f"table/{adapter}-{method}",
        changes={
            "adapter": adapter,
            "method": method,
            "microbatches": 4,
            "owners": ("a", "b"),
            "operations": random_table(3, ("a", "b"), "11123"),
        },
        reference=masked,
    )
    for adapter, method in [
        *((adapter, method) for adapter in ("seq_bn", "lora") for method in ("ringada", "all")),
        ("linear", "all"),
        ("full", "all"),
    ]
]


def with_invertible(name: str, model_type: str, task: str, **changes: Any) -> Feature:
    """A table beside an invertible adapter; micro-batches are forward-only or passed by at any block."""
    table = random_table(3, ("a", "b"), "12233", num_batches=2)
    values = {"adapter": "seq_bn_inv", "microbatches": 4, "num_steps": 6, "owners": ("a", "b"), "operations": table}
    return Feature(**of_family(f"table-invertible/{name}", model_type, task, **values, **changes), reference=masked)


TABLES += [
    with_invertible("all", "bert", "sequence-classification", method="all"),
    with_invertible("dropout", "bert", "sequence-classification", local_iterations=1, dropout=0.2),
    with_invertible("inverse", "gpt2", "causal-lm", method="all", checkpoint_every=4),
]
TABLES += [
    Feature(
        name="passes",
        changes={
            "method": "all",
            "microbatches": 4,
            "owners": ("a", "b"),
            "optimizer": "sgd",
            "operations": with_idle(random_table(3, ("a", "b"), "11123", passes=3)),
            "num_steps": 24,
            "checkpoint_every": 12,
        },
        reference=masked,
    )
]

# ---- subnets ------------------------------------------------------------------------------------------


def subnets(name: str, model_type: str, number: int, adapter: str, *, config: Any = (), **changes: Any) -> Feature:
    """Two steps of each of two owners, every batch with its own operations."""
    task = "image-classification" if model_type == "vit" else "sequence-classification"
    task, owners = changes.pop("task", task), changes.pop("owners", ("a", "b"))
    values = {
        "microbatches": 4,
        "method": "all",
        "owners": owners,
        "local_iterations": 1,
        "num_steps": 3,
        "eval_every": 0,
    }
    values |= {"checkpoint_every": 2, "operations": mixed_table(7, owners, number)}
    arguments = of_family(f"subnets{name}", model_type, task, config, adapter=adapter, **{**values, **changes})
    return Feature(**arguments, reference=masked)


class StaleWithMasks(StaleProcess):
    """PipeAdapter's rule written out, with masks."""

    def __post_init__(self) -> None:
        """Hook the model."""
        super().__post_init__()
        self._course = self.plan.course
        self._masks = Masks(self.model, self._course.subnets)

    def taking_part(self, item: Item, count: int) -> Sequence[int]:
        """Those that pass not all blocks by."""
        return taking_part(self._course.subnet_operations_of(item.owner, item.batch), self._course.subnets, 0)

    def begin(self, item: Item, micro: int) -> None:
        """Look the row of the micro-batch up."""
        self._masks.row = self._course.subnet_operations_of(item.owner, item.batch)[micro]


def stale_with_masks(case: Case, run: Run) -> Wanted:
    """Parts of a block wait for their backward while newer versions of it train."""
    done = StaleWithMasks(case.job, run.plan, case.folder / "model", case.datasets()).train()
    return Wanted(tensors=done.tensors(), losses=done.losses)


GENERIC_SUBNETS = (("apertus", "full"), ("phi", LORA), ("starcoder2", f"seq_bn|{LORA}"))
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8, "intermediate_size": 50}
SUBNETS = [
    *(
        subnets(f"/{word}-{name}", name, 2 if name in GROUPED else 4, config)
        for word, config in (("seq_bn", "seq_bn"), ("double_seq_bn", "double_seq_bn"), ("lora", LORA), ("full", "full"))
        for name in MODEL_TYPES
    ),
    *(
        subnets(f"/heads-{heads}-{word}", "llama", 6 // heads, config, config=SIX_HEADS)
        for heads in (1, 2, 3)
        for word, config in (("seq_bn", "seq_bn"), ("lora", LORA))
    ),
    *(
        subnets(f"-packed/{name}", name, 2, LORA, task="causal-lm", owners=("a",), packing=True)
        for name in ("gpt2", "mistral")
    ),
    subnets("/shared-heads", "mistral", 3, LORA, config=SIX_HEADS | {"num_key_value_heads": 3}),
    *(
        subnets(f"/{config}", "bert", 2, config)
        for config in ("par_bn", "seq_bn[use_gating=True,ln_before=True]", "seq_bn|lora[r=2]")
    ),
    *(
        subnets(f"/some-matrices-{name}", name, 4, "lora[r=4, attn_matrices=['q','v'], init_weights='bert']")
        for name in ("gpt2", "distilbert")
    ),
    *(
        subnets(f"-dropout/{name}-{word}", name, 2, config, dropout=0.2)
        for word, config in (("double_seq_bn", "double_seq_bn"), ("lora", LORA))
        for name in ("bert", "distilbert", "gpt2", "vit", "llama", "gemma2")
    ),
    *(
        subnets(f"/unfreezing-{adapter}", "bert", 4, adapter, method="ringada", every_steps=2, num_steps=7)
        for adapter in ("seq_bn", "full")
    ),
    *(subnets(f"-generic/{name}", name, 2, adapter, task="causal-lm") for name, adapter in GENERIC_SUBNETS),
]
SUBNETS_IN_FLIGHT = [
    dataclasses.replace(
        subnets(
            f"-in-flight/{name}",
            "bert",
            4,
            name,
            method="pipeadapter",
            num_steps=6,
            local_iterations=3,
            checkpoint_every=3,
        ),
        splits={"four": FOUR, "two": TWO},
        reference=stale_with_masks,
    )
    for name in ("seq_bn", "full")
]


def with_codes(case: Case, old: str, new: str) -> Case:
    """The same case with other codes in its table."""
    table = case.operations or Operations()
    batches = tuple(
        dataclasses.replace(entry, rows=tuple(row.replace(old, new) for row in entry.rows)) for entry in table.batches
    )
    return dataclasses.replace(case, operations=Operations(batches=batches, subnets=table.subnets))


# ---- tables that are chosen by scores -----------------------------------------------------------------


class RealScores:
    """Scores of the executors, and the tables that the coordinator would choose."""

    def __init__(self, plan: Plan, carrier: TorchCarrier) -> None:
        self._plan, self._carrier = plan, carrier

    def scores(self, part: Plan, node: str, turn: Turn) -> tuple[BlockScores, ...]:
        """What the node has gathered."""
        return self._carrier.executors[node].take_scores(turn.index)

    def table(self, step: int, scores: Sequence[BlockScores]) -> Operations:
        """What comes of it."""
        return choose_table(self._plan.course, scores, step=step)


TAYLOR = make_choice(subnets=2, refresh_steps=2, backward_score=Score.TAYLOR.value, forward_score=Score.FISHER.value)
CHOICES = [
    Feature(
        name=f"choice/{name}-{adapter}",
        folder=functools.partial(inputs, num_rows=29),  # two batches of each owner, the second of which is short
        changes={"adapter": adapter, "owners": ("a", "b"), "every_steps": 2, "microbatches": 4},
        splits={"four": (("d", 0, 1), ("a", 1, 2), ("b", 2, 3), ("c", 3, 4)), "two": (("a", 0, 1), ("b", 1, 4))},
        plan=planned(choice=choice),
        ring=lambda plan, carrier: {"chooser": RealScores(plan, carrier)},
        reference=on_one_node,
    )
    for name, choice, adapter in (
        ("two-stage", TAYLOR, "seq_bn"),
        ("two-stage", TAYLOR, "full"),
        ("two-stage", TAYLOR, "seq_bn_inv"),
        ("joint", make_choice("joint", subnets=4, backward_score=Score.GRADIENT_MAGNITUDE.value), "lora"),
        ("adapter-scores", dataclasses.replace(TAYLOR, scored_weights="adapter"), "lora"),
        ("adapter-scores", make_choice("joint", refresh_steps=2, scored_weights="adapter"), "seq_bn"),
        ("magnitude-gradient", make_choice("magnitude-gradient", subnets=4, refresh_steps=2), "full"),
        ("random", make_choice("random", subnets=2, refresh_steps=2), "seq_bn"),
    )
]
PRIVATE_TABLES = [
    dataclasses.replace(
        feature,
        name=f"operations-private/{feature.name.replace('/', '-')}",
        changes={**feature.changes, "private_blocks": 1},
        splits=PRIVATE,
    )
    for feature in (
        CHOICES[0],
        subnets("/heads", "bert", 4, "seq_bn"),
        subnets("/blocks", "bert", 1, "lora", method="ringada"),
        subnets("/own-weights", "bert", 2, "full"),
    )
]

SPLIT_SUBNETS = [dataclasses.replace(one, splits=SPLITS) for one in SUBNETS]
COMPUTE_OPERATIONS = [
    *in_bfloat16("operations", [*TABLES[::3], *SPLIT_SUBNETS[4::9], *CHOICES[::2]]),
    *in_bfloat16(
        "operations", [one for one in SPLIT_SUBNETS[6::9] if one.changes["adapter"] != "full"], frozen=NATIVELY
    ),
]

# ---- stages of several hosts --------------------------------------------------------------------------

STAGES: dict[str, Slices] = {
    "every-block": (("a", 0, 4, 1), ("b", 0, 4, 1)),
    "three": (("a", 0, 4, 1), ("b", 0, 4, 2), ("c", 0, 4, 1)),
    "two-stages": (("a", 0, 2, 1), ("b", 0, 2, 1), ("c", 2, 4, 1), ("d", 2, 4, 1)),
    "mixed": (("a", 0, 1), ("b", 1, 3, 2), ("c", 1, 3, 1), ("d", 3, 4, 1), ("e", 3, 4, 1), ("f", 3, 4, 1)),
}


def equal_copies(carrier: TorchCarrier, plan: Plan, holder: str) -> Any:
    """What the nodes send, if the hosts of each stage have the very bits of one another."""
    for stage in plan.placement.stages:
        digests = {carrier.executors[piece.node].copy_digest(piece.start, piece.stop) for piece in stage}
        assert len(digests) == 1, stage
    return carrier.collected(plan, holder)


def random_operations(seed: int) -> Operations:
    """Tables in which a host's micro-batches may have no gradient at all."""
    rng = random.Random(seed)
    batches = [
        BatchOperations(owner=owner, batch_id=batch, rows=tuple("".join(rng.choices("1233", k=4)) for _ in range(4)))
        for owner in ("a", "b")
        for batch in range(4)
    ]
    return Operations(batches=tuple(batches))


REPLICA_CASES: dict[str, dict[str, Any]] = {
    "ringada": {},
    "all": {"method": "all"},
    **{name: {"optimizer": name} for name in ("sgd", "momentum", "adafactor")},
    **{name: {"adapter": name} for name in ("lora", "double_seq_bn", "par_bn")},
    "dropout": {"dropout": 0.2},
    "private-blocks": {"private_blocks": 1},
    **{f"table-{seed}": {"operations": random_operations(seed)} for seed in range(3)},
}
REPLICAS = [
    Feature(
        name=f"replicas/{name}",
        changes={"microbatches": 4, "owners": ("a", "b"), **changes},
        splits={"every-block": (("a", 1, 4, 1), ("b", 1, 4, 1))} if "private_blocks" in changes else STAGES,
        tensors=equal_copies,
        reference=masked if "operations" in changes else one_process,
    )
    for name, changes in REPLICA_CASES.items()
]
