"""HiFT: groups of units of all parameters train in turn."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import torch

from ringtune.config.optimizers import OPTIMIZERS
from ringtune.schedule.plan import Plan
from tests.features.feature import PRIVATE, Feature, Run, Tensors, Wanted, planned
from tests.features.models import of_family
from tests.support import hift_reference
from tests.support.literal_velora import every_layer, make_literal
from tests.support.tiny_families import MODEL_TYPES
from tests.support.torch_ring import TASKS, Case, TorchCarrier

NO_GRADIENT = "attention.self.key.bias"
"""The loss does not depend on it: its gradient is rounding, which Adafactor makes as large as any other."""
GROUPS = [
    "group_size = 2",
    "group_size = 4",
    'group_size = 4\norder = "top2down"',
    'order = "random"',
    'always_active = ["head"]\ngroup_size = 2',
    'always_active = ["embedding", "head"]',
    "group_size = 6",
    'group_size = 2\nalways_active = ["head"]\nstate = "drop"',
]


def all_parameters(carrier: TorchCarrier, plan: Plan, holder: str) -> Tensors:
    """Every tensor that trains; the copies of embedding and head at several owners are equal in every bit."""
    found: Tensors = {}
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


def with_gradient(carrier: TorchCarrier, plan: Plan, holder: str) -> Tensors:
    """Every tensor on which the loss depends."""
    return _with_gradient(all_parameters(carrier, plan, holder))


def _with_gradient(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if not name.endswith(NO_GRADIENT)}


@functools.lru_cache(maxsize=32)
def trained_plainly(case: Case, velora: Any = None) -> Wanted:
    """One process with one torch optimizer for each group, whatever the slices."""
    plan, more = case.plan((("a", case.private_blocks, 4),)), dict[str, Any]()
    if velora is not None:
        more["prepare"] = functools.partial(make_literal, velora=velora, seed=plan.course.seed)
    found = hift_reference.train_hift(case.job, plan, case.folder / "model", case.datasets(), **more)
    return Wanted(
        tensors=hift_reference.tensors_of(found.model), losses=found.losses, evaluations=dict(found.evaluations)
    )


def groupwise(case: Case, run: Run) -> Wanted:
    """One process that trains a group at a step, with VeLoRA's formulas if the run has it."""
    return trained_plainly(case, run.plan.course.velora)


def groupwise_with_gradient(case: Case, run: Run) -> Wanted:
    """The same of the tensors on which the loss depends."""
    found = groupwise(case, run)
    return dataclasses.replace(found, tensors=_with_gradient(found.tensors))


def without_private(case: Case, run: Run) -> Wanted:
    """The same without the blocks that owners run themselves, whose copies no node sends."""
    found = groupwise(case, run)
    private = re.compile(r".*\.(layer|h|layers)\.0\..*")
    return dataclasses.replace(found, tensors={k: v for k, v in found.tensors.items() if not private.fullmatch(k)})


def hift(name: str, model_type: str, lines: str = "", config: Any = (), **more: Any) -> Feature:
    """Of 6 groups of one unit, two train in a second sweep too; the checkpoint is in the middle of a sweep."""
    arguments = {key: more.pop(key) for key in ("plan", "tensors", "reference", "prepare") if key in more}
    values: dict[str, Any] = {
        "method": "hift",
        "adapter": "full",
        "hift": lines,
        "num_steps": 8,
        "eval_every": 4,
        "owners": ("a", "b"),
    }
    family = of_family(f"hift{name}", model_type, TASKS[model_type], config, **{**values, **more})
    return Feature(**family | {"tensors": all_parameters, "reference": groupwise} | arguments)


def on_disk(carrier: TorchCarrier, folder: Any, start: Any) -> None:
    """Keep the state of inactive units in a folder of each node."""
    for node, executor in carrier.executors.items():
        executor.inactive_state.keep_on_disk(folder / node, {"run": "run", "node": node})


TIED: list[tuple[str, bool, str]] = [
    ("gpt2", True, "group_size = 2"),
    ("gpt2", False, 'always_active = ["head"]'),
    ("llama", True, 'always_active = ["embedding", "head"]'),
    ("llama", False, "group_size = 2"),
]
PRIVATE_LINES = [("bert", 'order = "random"'), ("gpt2", "group_size = 2"), ("llama", 'always_active = ["head"]')]
HIFT = [
    *(hift(f"/{model_type}", model_type) for model_type in MODEL_TYPES),
    *(hift(f"-groups/{at}", "gpt2", lines) for at, lines in enumerate(GROUPS)),
    hift("-groups/vit", "vit", 'group_size = 4\norder = "top2down"'),
    hift("-groups/electra", "electra", 'order = "random"'),
    *(
        hift(f"-groups/{model_type}-{tied}", model_type, lines, {"tie_word_embeddings": tied}, microbatches=4)
        for model_type, tied, lines in TIED
    ),
    dataclasses.replace(
        hift("-compute/llama", "llama", compute="bfloat16", dtype="float32", optimizer="sgd"), bound=0.03
    ),
    hift("-packed/gpt2", "gpt2", "group_size = 2", packing=True, max_length=40),
    hift("/one-owner", "bert", owners=("a",)),
    *(
        dataclasses.replace(
            hift(f"-private/{at}", model_type, lines, private_blocks=1, reference=without_private), splits=PRIVATE
        )
        for at, (model_type, lines) in enumerate(PRIVATE_LINES)
    ),
    hift("/three-owners", "bert", owners=("b", "a", "e")),
    *(hift(f"/dropout-{name}", name, "group_size = 2", dropout=0.2) for name in ("bert", "gpt2", "vit")),
    hift("/velora", "bert", "group_size = 2", plan=planned(velora=every_layer("bert", parts=5))),
    *(
        hift(
            f"/state-on-disk-{name}",
            "bert",
            optimizer=name,
            prepare=on_disk,
            tensors=with_gradient if name == "adafactor" else all_parameters,
            reference=groupwise_with_gradient if name == "adafactor" else groupwise,
        )
        for name in OPTIMIZERS
    ),
]
