"""What is held small: VeLoRA's projections, the cache of activations, frozen weights in few bits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ringtune.schedule.actions import Op
from ringtune.schedule.course import FROZEN_DTYPES, FrozenWeights
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.placement import ActivationCacheSettings, Helper
from ringtune.schedule.saved_activations import INITS, Velora
from ringtune.schedule.turns import StartPoint
from ringtune.schedule.units import Range
from tests.features.feature import ONE, PRIVATE, SPLITS, Feature, Run, Wanted, carry_out, inputs, on_one_node, planned
from tests.features.models import of_family
from tests.support import reference
from tests.support.gguf_models import write_base
from tests.support.literal_velora import every_layer, make_literal
from tests.support.operation_masks import mixed_table
from tests.support.operation_masks import one_process as masked
from tests.support.plans import changed
from tests.support.rounded import LORA, WAYS, write_rounded
from tests.support.tiny_families import MODEL_TYPES
from tests.support.torch_ring import Case, TorchCarrier, reference_of

ALL = (Range(0, 4),)

# ---- VeLoRA -------------------------------------------------------------------------------------------

ADAPTER_DOWN = Velora(blocks=ALL, layers=("adapter_down",), parts=8)
ADAPTERS_DOWN = [
    *((name, adapter) for name in ("bert", "llama") for adapter in ("seq_bn", "lora[r=4]", "seq_bn|lora[r=2]")),
    ("bert", "par_bn"),
    ("bert", "double_seq_bn"),
    ("gpt2", "lora[r=4]"),
    ("bert", "linear[alpha=0.5,attn_matrices=['q']]|lora[attn_matrices=['v']]"),
    ("gpt2", "mlp[hidden=8,intermediate_lora=True]"),
]


LORA_AT_ALL = "lora[r=4,attn_matrices=['q','v'],intermediate_lora=True,output_lora=True]"
SITES: list[tuple[str, str, tuple[str, ...], dict[str, Any]]] = [
    ("bert", LORA_AT_ALL, ("down",), {"parts": 8}),
    ("bert", LORA_AT_ALL, ("value", "down"), {"parts": 0, "values": 6}),
    ("bert", LORA_AT_ALL, ("query", "up"), {"parts": 8, "init": "running"}),
    ("llama", LORA_AT_ALL, ("value", "down"), {"parts": 8}),
    ("gpt2", "lora[r=4,attn_matrices=['q','v']]|linear[attn_matrices=['k']]", ("value",), {"parts": 8}),
    ("gpt2", "linear[output_lora=True]", ("value", "down"), {"parts": 0, "values": 5}),
]


@functools.lru_cache(maxsize=16)
def _literal(case: Case, velora: Velora) -> Wanted:
    plan = case.plan(ONE)  # type: ignore[arg-type]
    prepare = functools.partial(make_literal, velora=velora, seed=plan.course.seed)
    found = reference.train(case.job, plan, case.folder / "model", case.datasets(), prepare=prepare)
    return Wanted(tensors=found.adapter() | found.head(), losses=found.losses)


def literally(case: Case, run: Run) -> Wanted:
    """One process that computes the paper's formulas word by word."""
    assert run.plan.course.velora is not None
    return _literal(case, run.plan.course.velora)


def velora(name: str, model_type: str, projected: Velora, **more: Any) -> Feature:
    """VeLoRA in blocks that unfreeze, with an evaluation."""
    more.setdefault("adapter", "full")
    arguments = of_family(f"velora{name}", model_type, owners=("a", "b"), **more)
    return Feature(**arguments, plan=planned(velora=projected), reference=literally)


def with_masks(case: Case, run: Run) -> Wanted:
    """The paper's formulas where the inputs of other subnets than full ones are zeros."""
    return Wanted(tensors=masked(case, run.plan.course.velora))


VELORA_OF_SUBNETS: list[tuple[str, str, float, Velora]] = [
    *(("bert", "full", 0.0, every_layer("bert", parts=5, init=init)) for init in INITS),
    *((name, "full", 0.0, every_layer(name, parts=5)) for name in ("gpt2", "llama")),
    *((name, LORA, 0.2, ADAPTER_DOWN) for name in ("bert", "gpt2", "llama")),
    ("bert", "seq_bn", 0.0, ADAPTER_DOWN),
]
SKIPPING = Operations(
    batches=tuple(
        BatchOperations(owner=owner, batch_id=batch, rows=("3211", "1321", "1111", "2113"))
        for owner in ("a", "b")
        for batch in range(2)
    )
)
VELORA_BELOW = dataclasses.replace(ADAPTER_DOWN, blocks=(Range(0, 2),))
VELORA = [
    *(velora(f"/{name}", name, every_layer(name, parts=5)) for name in MODEL_TYPES),
    *(velora(f"-adapter/{name}-{adapter}", name, ADAPTER_DOWN, adapter=adapter) for name, adapter in ADAPTERS_DOWN),
    *(velora(f"/{init}", "bert", every_layer("bert", parts=5, init=init), dropout=0.1) for init in INITS),
    *(
        velora(f"-adapter/{init}", "bert", dataclasses.replace(ADAPTER_DOWN, init=init), adapter="lora[r=4]")
        for init in INITS
    ),
    *(
        velora(
            f"-site/{name}-{number}",
            name,
            Velora(blocks=ALL, layers=tuple(f"adapter_down:{layer}" for layer in layers), **sub_tokens),
            adapter=adapter,
        )
        for number, (name, adapter, layers, sub_tokens) in enumerate(SITES)
    ),
    *(
        Feature(
            **of_family(
                f"velora-subnets/{model_type}-{number}",
                model_type,
                "sequence-classification",
                adapter=adapter,
                method="all",
                microbatches=4,
                num_steps=3,
                eval_every=0,
                checkpoint_every=2,
                owners=("a", "b"),
                local_iterations=1,
                operations=mixed_table(7, ("a", "b"), 2),
                dropout=dropout,
            ),
            plan=planned(velora=projected),
            reference=with_masks,
        )
        for number, (model_type, adapter, dropout, projected) in enumerate(VELORA_OF_SUBNETS)
    ),
    dataclasses.replace(
        velora("-helpers/some-blocks", "bert", VELORA_BELOW, adapter="lora[r=4]", method="all"),
        plan=planned(velora=VELORA_BELOW, helpers=tuple(Helper(node="z", start=at, stop=at + 1) for at in (2, 3))),
    ),
    velora("/some-blocks", "bert", Velora(blocks=(Range(1, 2), Range(3, 4)), layers=("down",), parts=8)),
    Feature(
        **of_family(
            "velora/tables",
            "bert",
            adapter="full",
            microbatches=4,
            operations=SKIPPING,
            method="all",
            owners=("a", "b"),
        ),
        plan=planned(velora=every_layer("bert")),
        reference=on_one_node,
    ),
]
VELORA_IN_FLIGHT = [
    Feature(
        **of_family(
            f"velora/pipeadapter-{init}", "bert", adapter="full", method="pipeadapter", local_iterations=4, num_steps=8
        ),
        plan=planned(velora=every_layer("bert", init=init)),
    )
    for init in INITS[::2]
]
"""Without a reference: only other timings, checkpoints and blocks that run again are compared."""

# ---- the cache of activations -------------------------------------------------------------------------


def open_caches(carrier: TorchCarrier, folder: Path, start: StartPoint | None) -> None:
    """Keep hidden states in a folder of each node."""
    for node, executor in carrier.executors.items():
        for technique in executor.techniques.values():
            technique.open(folder / node, *(() if start is None else (start,)))


def without_cache(case: Case, run: Run) -> Wanted:
    """The same run without the cache."""
    plain = carry_out(run.feature, changed(run.plan, cache=None), seed=1)
    assert sum(action.op is Op.READ for actions in run.result.order.values() for action in actions) > 0
    return Wanted(tensors=plain.tensors, losses=plain.losses, evaluations=plain.evaluations)


CACHE_CASES: dict[str, dict[str, Any]] = {
    "ringada": {},
    "dropout": {"dropout": 0.2},
    "int8-wire": {"dtype": "float32", "wire": "int8", "dropout": 0.2},
    "bfloat16-wire": {"dtype": "float32", "wire": "bfloat16", "turns": "rows"},
    "three-micro-batches": {"microbatches": 3, "eval_every": 0, "owners": ("b", "d")},
    "private-blocks": {"private_blocks": 1, "dropout": 0.2},
    "packed": {"task": "causal-lm", "packing": True, "max_length": 40, "dropout": 0.2},
}
CACHE = [
    Feature(
        name=f"cache/{name}",
        folder=functools.partial(inputs, "llama", "causal-lm")
        if "packing" in changes
        else functools.partial(inputs, num_rows=13),  # one batch of each owner, that comes again in each turn
        changes={"num_steps": 12, "every_steps": 6, "eval_every": 8, "checkpoint_every": 8, **changes},
        splits=PRIVATE if "private_blocks" in changes else SPLITS,
        plan=planned(cache=ActivationCacheSettings(dtype=str(changes.get("dtype", "float64")))),
        prepare=open_caches,
        ring=lambda plan, carrier: {"items_ahead": 2},  # what is kept must be known when its next turn is granted
        reference=without_cache,
        bound=0.0,
    )
    for name, changes in CACHE_CASES.items()
]

# ---- frozen weights -----------------------------------------------------------------------------------

EXACT, AUTOCAST, NATIVE = 1e-6, 5e-6, 0.03
"""Relative distance after some steps of SGD: of equal products, of blocks that multiply in bfloat16 in one process too,
from which blocks that do not are 1e-5 away or more, and of products in bfloat16.
"""
FROZEN_ADAPTERS = {
    "bottleneck": "double_seq_bn",
    "lora": LORA,
    "ia3": "ia3",
    "mlp": "linear[attn_matrices=['q']]|mlp[hidden=8, attn_matrices=['v'], output_lora=True]",
}


@functools.cache
def rounded_folder(plain: Path, dtype: str, trained: tuple[str, ...]) -> Path:
    """The same inputs with weights that were rounded once, but those that train."""
    folder = plain.with_name(f"{plain.name}-{dtype}-{len(trained)}")
    write_rounded(plain / "model", folder / "model", dtype, trained=trained)
    for path in plain.glob("*.*"):
        (folder / path.name).symlink_to(path)
    return folder


def rounded_once(case: Case, run: Run, trained: tuple[str, ...] = ()) -> Wanted:
    """One process with plain transformers whose frozen weights were rounded once, with masks if there is a table."""
    assert case.frozen is not None
    plain = dataclasses.replace(case, folder=rounded_folder(case.folder, case.frozen.dtype, trained), frozen=None)
    if case.operations is not None:
        return Wanted(tensors=masked(plain))
    found = reference_of(plain)
    return Wanted(tensors=found.adapter() | found.head())


def frozen(name: str, model_type: str, way: FrozenWeights, *, bound: float = EXACT, **more: Any) -> Feature:
    """A few steps of SGD with unfreezing, in float32."""
    task = more.pop("task", "image-classification" if model_type == "vit" else "sequence-classification")
    config = more.pop("config", {})
    arguments = {key: more.pop(key) for key in ("plan", "reference", "splits") if key in more}
    values: dict[str, Any] = {"dtype": "float32", "optimizer": "sgd", "every_steps": 2, "eval_every": 0, **more}
    family = of_family(f"frozen{name}", model_type, task, config, frozen=way, **values)
    return Feature(**family | {"reference": rounded_once, "bound": bound} | arguments)


OWN_WEIGHTS = ("query.weight", "key.weight", "value.weight", "dense.weight")
FROZEN = [
    *(
        frozen(f"/{name}-{model_type}-{dtype}", model_type, FrozenWeights(dtype=dtype), adapter=FROZEN_ADAPTERS[name])
        for name, dtype, families in (
            ("bottleneck", "bfloat16", MODEL_TYPES),
            ("lora", "int8", MODEL_TYPES),
            ("ia3", "bfloat16", MODEL_TYPES),
            ("mlp", "int8", ("bert", "gpt2", "llama")),
            ("lora", "bfloat16", ("bert", "gpt2", "llama")),
            ("lora", "nf4", ("bert", "llama")),
            ("ia3", "nf4", ("gpt2",)),
            ("bottleneck", "nf4", ("vit",)),
        )
        for model_type in families
    ),
    *(
        frozen(f"-native/{model_type}-{dtype}", model_type, FrozenWeights(dtype=dtype, native=True), bound=NATIVE)
        for model_type in ("bert", "gpt2", "llama")
        for dtype in FROZEN_DTYPES
    ),
    *(
        frozen(
            f"-others/decoder-{model_type}-{dtype}-{tied}",
            model_type,
            FrozenWeights(dtype=dtype),
            task="causal-lm",
            config={"tie_word_embeddings": tied},
        )
        for model_type in ("gpt2", "llama")
        for tied in (True, False)
        for dtype in FROZEN_DTYPES
    ),
    frozen("-others/dora", "bert", FrozenWeights(dtype="int8"), adapter="lora[r=4, use_dora=True]"),
    frozen(
        "-others/own-weights",
        "bert",
        FrozenWeights(dtype="int8"),
        adapter="full",
        reference=functools.partial(rounded_once, trained=OWN_WEIGHTS),
    ),
    *(
        frozen(
            f"-others/subnets-{model_type}-{dtype}",
            model_type,
            FrozenWeights(dtype=dtype),
            bound=10 * EXACT,
            adapter=LORA,
            method="all",
            owners=("a", "b"),
            microbatches=4,
            operations=mixed_table(7, ("a", "b"), 2 if model_type == "llama" else 4),
        )
        for model_type in ("bert", "gpt2", "llama")
        for dtype in FROZEN_DTYPES
    ),
    frozen(
        "-others/dropout-and-private-blocks",
        "bert",
        FrozenWeights(dtype="bfloat16"),
        dropout=0.2,
        private_blocks=1,
        splits=PRIVATE,
    ),
    *(
        frozen(
            f"-others/velora-{adapter}",
            "bert",
            FrozenWeights(dtype="int8"),
            adapter=adapter,
            optimizer="adamw",
            every_steps=1,
            plan=planned(velora=dataclasses.replace(ADAPTER_DOWN, parts=4)),
            reference=lambda case, run: literally(
                dataclasses.replace(case, folder=rounded_folder(case.folder, "int8", ()), frozen=None), run
            ),
        )
        for adapter in ("seq_bn", "lora[r=4]")
    ),
]


@functools.cache
def gguf_inputs(model_type: str, kind: str, task: str) -> Path:
    """Inputs with a model in a GGUF file, beside the same with its values in float32."""
    of_float = inputs(model_type, task, intermediate_size=64)
    folder = of_float.with_name(f"{of_float.name}-{kind}")
    blocks, plain = write_base(of_float / "model", folder, lambda name: kind)
    for made in (blocks, plain):
        made.rename(made.with_name("moved"))
        made.mkdir()
        made.with_name("moved").rename(made / "model")
        for path in of_float.glob("*.*"):
            (made / path.name).symlink_to(path)
    return blocks


def widened(case: Case, run: Run) -> Wanted:
    """One process with plain transformers on the values of the GGUF file in float32."""
    found = reference_of(dataclasses.replace(case, folder=case.folder.with_name("plain"), frozen=None))
    return Wanted(tensors=found.adapter() | found.head(), losses=found.losses)


GGUF_BASES = [
    Feature(
        name=f"gguf/{model_type}-{kind}-{task}-{native}",
        folder=functools.partial(gguf_inputs, model_type, kind, task),
        changes={
            "task": task,
            "adapter": "lora[r=4]",
            "dtype": "float32",
            "optimizer": "sgd",
            "every_steps": 2,
            "eval_every": 0,
            "frozen": FrozenWeights(dtype="gguf", native=native),
        },
        reference=widened,
        bound=NATIVE if native else EXACT,
    )
    for model_type, kind, task, native in (
        ("llama", "Q4_0", "causal-lm", False),
        ("llama", "Q5_1", "sequence-classification", False),
        ("qwen3", "Q8_0", "causal-lm", False),
        ("gemma2", "Q4_1", "causal-lm", False),
        ("gemma3_text", "F16", "sequence-classification", False),
        ("smollm3", "BF16", "causal-lm", False),
        ("qwen2", "Q5_0", "causal-lm", True),
    )
]

SGD: dict[str, Any] = {"dtype": "float32", "optimizer": "sgd", "every_steps": 2, "eval_every": 0}
NATIVELY = FrozenWeights(dtype="bfloat16", native=True)
ROUNDED: list[tuple[str, str, dict[str, Any]]] = [
    ("bert", "sequence-classification", {"dropout": 0.2}),
    ("bert", "sequence-classification", {"adapter": "full"}),
    ("llama", "causal-lm", {"adapter": LORA, "frozen": NATIVELY}),
    ("gpt2", "causal-lm", {"adapter": "lora[r=4]", "packing": True, "max_length": 40}),
    ("gemma2", "causal-lm", {"adapter": "lora[r=4]"}),
    ("vit", "image-classification", {}),
    ("distilbert", "sequence-classification", {"adapter": "loreft"}),
    ("roberta", "sequence-classification", {"adapter": "ia3"}),
]
COMPUTE = [
    Feature(
        **of_family(f"compute/{model_type}-{number}", model_type, task, **SGD, compute="bfloat16", **more)
        | {"bound": NATIVE if task == "causal-lm" else AUTOCAST, "splits": SPLITS}
    )
    for number, (model_type, task, more) in enumerate(ROUNDED)
]


def in_bfloat16(name: str, features: Iterable[Feature], **more: Any) -> list[Feature]:
    """The features with products in bfloat16, which are near what they have to equal without."""
    return [
        dataclasses.replace(
            feature,
            name=f"compute-{name}/{feature.name.replace('/', '-')}",
            changes=feature.changes | SGD | {"compute": "bfloat16"} | more,
            bound=NATIVE,
        )
        for feature in features
    ]


COMPUTE += in_bfloat16("velora", [dataclasses.replace(one, splits=SPLITS) for one in VELORA[::4]])
FROZEN_WAYS = [
    frozen(
        f"-split/{model_type}-{way.dtype}-{way.native}",
        model_type,
        way,
        adapter=LORA,
        optimizer="adamw",
        dropout=0.2,
        splits=SPLITS,
    )
    for model_type in ("bert", "gpt2")
    for way in WAYS
]
"""Any split gives the same bits, also of products in bfloat16, which are near those of one process only."""
