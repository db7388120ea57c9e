"""Write ``docs/how/combinations.md``: which methods and features go together: ``python -m docs.make_combinations``.

Each cell is found by a job with both: it is parsed, planned for two made-up nodes, and the plan is asked by the checks
that a run asks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import tomli_w

from coordinator.planner.draft import Draft
from coordinator.planner.limits import Effort
from coordinator.planner.make_plan import make_plan
from coordinator.planner.planned import Planned
from coordinator.planner.replicas import choose_replicas
from docs.make_job import filled, table
from ringtune.costs.model_facts import computed_token_bytes, model_facts
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import ContradictionError, RingTuneError
from ringtune.job.job import Job, parse_job
from ringtune.schedule.methods import method_names
from ringtune.schedule.migration import stay_reason, wait_reason
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.run_shape import UserRows
from ringtune.techniques.activation_checkpointing import SavingPolicy

PAGE: Final = Path(__file__).parent / "how" / "combinations.md"
_CONFIG: Final = {
    "model_type": "bert",
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
_BASE: Final[Mapping[str, object]] = {
    "model.path": "model",
    "data.train": "a.csv",
    "data.eval": "b.csv",
    "train.rounds": 8,
    "train.eval_every": 4,
    "train.batch_size": 8,
    "train.microbatches": 4,
    "train.max_length": 16,
    "train.local_iterations": 2,
    "unfreeze.every_steps": 16,
    "placement.replicas": "never",
    "recovery.copies": "none",
}
_OWNERS: Final = ("a", "b")
_HELPED: Final = {"a": "b", "b": "a"}
_CHOSEN: Final = {"operations.policy": "two-stage", "operations.full": 2, "operations.forward_only": 1}
_TABLE: Final = Operations(
    batches=tuple(BatchOperations(owner=name, batch_id=0, rows=("111",) * 3 + ("331",)) for name in _OWNERS)
)
Ask = Callable[[Planned, Job], str]
"""(plan, its job) -> why the plan does not have the feature; empty if it has."""


def _left_out(words: str) -> Ask:
    """Look for a setting that the planner left out, by words of its note."""
    return lambda planned, _: next((note for note in planned.left_out if words in note), "")


def _no_resume_elsewhere(planned: Planned, job: Job) -> str:
    return stay_reason(planned.plan.course, from_disks=True)


def _no_replicas(planned: Planned, job: Job) -> str:
    if not job.may_have_replicas:
        return "an audit compares the work of single hosts"
    profile = planned.profile or Profile(nodes=(), links=())
    plan = planned.plan
    draft = dataclasses.replace(Draft.of(plan), saving=SavingPolicy(job.memory.activations))
    why_not = choose_replicas(plan, [draft], profile, is_over=lambda: True)[1].why_not
    return "" if why_not in _NOT_TRIED else why_not


def _no_skip(planned: Planned, job: Job) -> str:
    return wait_reason(planned.plan.course, _OWNERS[0]) or _no_resume_elsewhere(planned, job)


_NOT_TRIED: Final = ("the time for planning was used up", "no node has memory for blocks of another one too")
_EFFORT: Final = Effort(evaluations=1, judged_actions=0, now_s=lambda: 0.0)


class Feature(NamedTuple):
    """A feature of jobs: its name, the keys that turn it on, and what asks the plan for it."""

    name: str
    keys: Mapping[str, object]
    why_not: Ask = lambda planned, job: ""


FEATURES: Final = (
    Feature("recovery: copies of trained blocks", {"recovery.copies": "next"}),
    Feature("recovery: a lost owner is left out", {"recovery.owners": "skip", "recovery.copies": "next"}, _no_skip),
    Feature("moves: replan, late joiners, slices that follow", {}, lambda planned, _: stay_reason(planned.plan.course)),
    Feature("resume on other nodes", {}, _no_resume_elsewhere),
    Feature("several hosts of the same blocks", {"placement.replicas": "auto"}, _no_replicas),
    Feature("activation cache", {"cache.prefix": "auto"}, _left_out("hidden states are not kept")),
    Feature("best evaluation is kept", {"train.keep_best": True}),
    Feature("operations chosen, of subnets", {**_CHOSEN, "operations.heads": 1}),
    Feature("operations chosen, of blocks", {**_CHOSEN, "operations.heads": 0}),
    Feature("operations chosen by scores of adapters", {**_CHOSEN, "operations.scores": "adapter"}),
    Feature("operations given", {"operations.table": json.dumps(_TABLE.to_json())}),
    Feature("helpers", {"offload.mode": _HELPED}),
    Feature("adapters of each user", {"offload.mode": _HELPED, "offload.users": "alone", "data.user": "user"}),
    Feature("frozen weights in int8", {"runtime.frozen": "int8"}, _left_out("scores of adapters")),
    Feature("private blocks", {"privacy.private_blocks": 1}),
    Feature("VeLoRA", {"memory.activations": "velora"}, _left_out("projects nothing")),
    Feature("recomputation", {"memory.activations": "recompute"}),
    Feature("number of micro-batches by the planner", {"placement.microbatches": "auto"}),
    Feature("unfreezing by the loss", {"unfreeze.every_steps": None, "unfreeze.at": "auto"}),
    Feature("dropout", {"train.dropout": 0.1}),
    Feature("lora", {"adapter.config": "lora"}),
    Feature("full: own weights of blocks", {"adapter.config": "full"}),
    Feature("invertible adapter", {"adapter.config": "seq_bn_inv"}),
    Feature("audit", {"audit.share": 0.02, "recovery.copies": "next"}),
    Feature("products in bfloat16", {"train.compute": "bfloat16"}),
)  # fmt: skip


class Found(NamedTuple):
    """Why a combination does not work, and how the number of its reason is marked; without a reason it works."""

    reason: str = ""
    mark: str = ""


_REFUSED: Final = "[{}]"
_CONTRADICTION: Final = "≠{}"
_LEFT_OUT: Final = "({})"


def tried(*features: Feature, method: str) -> Found | None:
    """Parse and plan a job with these features; None if they give one key two values."""
    keys = dict[str, object](_BASE) | {"train.method": method}
    if method != "ringada":
        del keys["unfreeze.every_steps"]
    given = dict[str, object]()
    for feature in features:
        if any(given.get(name, value) != value for name, value in feature.keys.items()):
            return None
        given |= feature.keys
    try:
        job = parse_job(_toml(keys | given), source="job.toml")
        planned = _planned(job)
        for feature in features:
            if reason := feature.why_not(planned, job):
                return Found(_first_words(reason), _LEFT_OUT)
    except ContradictionError as error:
        return Found(_first_words(str(error)), _CONTRADICTION)
    except RingTuneError as error:
        return Found(_first_words(str(error)), _REFUSED)
    return Found()


def _toml(keys: Mapping[str, object]) -> str:
    tables: dict[str, dict[str, object]] = {}
    for name, value in keys.items():
        section, _, key = name.partition(".")
        if value is not None:
            tables.setdefault(section, {})[key] = value
    return tomli_w.dumps(tables)


def _planned(job: Job) -> Planned:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
        model = model_facts(name, job, in_part=True)
    facts = {}
    for node in _OWNERS:
        users = (UserRows(name=f"user-{node}", train_rows=8, eval_rows=8),) if job.data.user else ()
        facts[node] = NodeFacts(
            node=node,
            train_rows=8,
            eval_rows=8,
            labels=("neg", "pos"),
            eval_labels=("neg", "pos"),
            users=users,
            memory_bytes=1 << 30,
            threads=1,
            device="cpu",
            block_forward_s=0.01,
            block_graph_s=0.011,
            block_backward_s=0.012,
            activation_token_bytes=round(computed_token_bytes(model, job)),
            model=model,
        )
    return make_plan(job, facts, effort=_EFFORT)


def _first_words(text: str) -> str:
    """The sentence of an error up to its remedy."""
    return text.removeprefix("job.toml: ").partition("; ")[0]


@functools.cache
def combinations() -> tuple[dict[tuple[str, str], Found | None], dict[tuple[str, str], Found | None]]:
    """Try each feature with each method, and each two features with the first method that takes both alone."""
    alone = {(feature.name, method): tried(feature, method=method) for feature in FEATURES for method in method_names()}
    pairs = dict[tuple[str, str], Found | None]()
    for first, second in itertools.combinations(FEATURES, 2):
        both = (
            method for method in method_names() if alone[first.name, method] == alone[second.name, method] == Found()
        )
        method = next(both, "")
        pairs[second.name, first.name] = tried(first, second, method=method) if method else None
    return alone, pairs


def page() -> str:
    """The whole page."""
    alone, pairs = combinations()
    reasons = dict.fromkeys(each for each in (*alone.values(), *pairs.values()) if each is not None and each.reason)
    numbers = {reason: at for at, reason in enumerate(reasons, start=1)}

    def cell(answer: Found | None) -> str:
        if answer is None:
            return "·"
        return answer.mark.format(numbers[answer]) if answer.reason else "+"

    by_method = [
        (f"{at}. {feature.name}", *(cell(alone[feature.name, method]) for method in method_names()))
        for at, feature in enumerate(FEATURES, start=1)
    ]
    by_feature = [
        (f"{at}. {feature.name}", *(cell(pairs[feature.name, other.name]) for other in FEATURES[: at - 1]))
        for at, feature in enumerate(FEATURES[1:], start=2)
    ]
    columns = len(FEATURES) - 1
    refused, left_out, excluded = (
        sum(reason.mark == mark for reason in reasons) for mark in (_REFUSED, _LEFT_OUT, _CONTRADICTION)
    )
    counts = f"{refused} refusals, {left_out} features that a run goes without, {excluded} contradictions."
    parts = {
        "methods": table(("", *method_names()), by_method),
        "features": table(
            ("", *map(str, range(1, columns + 1))), [(*row, *[""] * (columns + 1 - len(row))) for row in by_feature]
        ),
        "reasons": f"{counts}\n\n" + "".join(f"{at}. {reason.reason}.\n" for reason, at in numbers.items()),
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = filled(text, f"<!-- {name}, written by python -m docs.make_combinations -->", part)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
