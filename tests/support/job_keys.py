"""Every key of a job with its type and its rules, and what a job says to a value of one."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ringtune.errors import JobError
from ringtune.job.job import Job, section_class
from ringtune.storage.strict import Rule, field_rules, key_of

BESIDES: Final[Mapping[str, Mapping[str, object]]] = {
    "train.batch_size": {"train.microbatches": 1},
    "train.microbatches": {"train.batch_size": 1 << 31},
    "train.patience_evals": {"train.eval_every": 10},
    "train.keep_best": {"train.eval_every": 10},
    "train.sample_prompt": {"model.task": "causal-lm"},
    "train.loss_on": {"model.task": "chat"},
    "train.packing": {"model.task": "chat"},
    "data.template": {"model.task": "chat"},
    **{
        f"generation.{name}": {"model.task": "chat"}
        for name in ("rows", "max_new_tokens", "at_once", "temperature", "seed", "loss")
    },
    "data.append_eos": {"model.task": "causal-lm"},
    "train.momentum": {"train.optimizer": "momentum"},
    "unfreeze.patience_steps": {"unfreeze.at": "auto"},
    "unfreeze.min_improvement": {"unfreeze.at": "auto"},
    **{f"hift.{name}": {"train.method": "hift"} for name in ("group_size", "order", "always_active", "state")},
    "operations.policy": {"operations.compute": 0.6},
    "operations.compute": {"operations.policy": "two-stage"},
    "operations.full": {"operations.policy": "two-stage"},
    "operations.forward_only": {"operations.policy": "two-stage", "operations.full": 0},
    **{f"offload.{name}": {"offload.mode": "auto"} for name in ("interval", "pairs")},
    "offload.users": {"offload.mode": "auto"},
    "offload.projected": {"offload.mode": "auto", "offload.pairs": "velora"},
    "offload.adapters": {"offload.mode": "auto", "offload.users": "alone"},
    "data.user": {"offload.mode": "auto", "offload.users": "alone"},
    **{f"velora.{name}": {"memory.activations": "velora"} for name in ("layers", "parts", "values", "init")},
    **{
        f"operations.{name}": {"operations.policy": "two-stage", "operations.compute": 0.6}
        for name in ("by_slice", "balance", "scores", "refresh_rounds")
    },
}
"""What else has to be in a job before a key may have other values than its default."""


class Key(NamedTuple):
    """One key of a job."""

    name: str
    kinds: tuple[Any, ...]
    rules: tuple[Rule, ...]


def _keys() -> dict[str, Key]:
    found = {}
    for section, hint in typing.get_type_hints(Job).items():
        cls = section_class(hint)
        hints, rules = typing.get_type_hints(cls), field_rules(cls)
        for field in dataclasses.fields(cls):
            whole = hints[field.name]
            is_union = type(None) in typing.get_args(whole) or typing.get_origin(whole) not in (None, tuple, dict)
            kinds = typing.get_args(whole) if is_union else (whole,)
            own = tuple(typing.get_origin(kind) or kind for kind in kinds)
            name = f"{section}.{key_of(field.name)}"
            found[name] = Key(name, own, rules.get(field.name, ()))
    return found


KEYS: Final = _keys()


def refusal(name: str, value: object) -> str:
    """Why a job can't have this value of a key; empty if it can."""
    tables: dict[str, dict[str, object]] = {"model": {"path": "model"}}
    for key, item in {**BESIDES.get(name, {}), name: value}.items():
        section, _, option = key.partition(".")
        tables.setdefault(section, {})[option] = item
    try:
        Job.from_tables(tables)
    except JobError as error:
        return str(error)
    return ""
