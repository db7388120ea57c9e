"""``[offload]``: which hosts let other nodes fit their adapters (ColA), and what that does not go with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ringtune.errors import JobError, PlanError
from ringtune.jobs.operations.settings import OperationsSettings
from ringtune.jobs.parts.memory import Memory, VeloraSettings
from ringtune.jobs.sections import MOST_STEPS, Adapter, Train, check_choice
from ringtune.models.adapters.adapter_config import parse_adapter_config
from ringtune.models.adapters.offload_support import merged_refusal, offload_refusal
from ringtune.schedule.extent import Extent, check_user_name
from ringtune.schedule.helping.offload import ALONE, COLLABORATION, EXACT, IN_STEP, JOINT, PAIRS, USERS, Manner
from ringtune.schedule.methods import Method
from ringtune.schedule.slice_policy import BOTH, VELORA

OFF: Final = "off"
AUTO: Final = "auto"
MODES: Final = (OFF, AUTO)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSettings:
    """``[offload]``: whether other nodes fit the adapters of a host, from its pairs of inputs and output gradients.

    Attributes:
        mode: off = each host fits its own adapters; auto = the planner lets a node help where the step is predicted to
            be faster, or nothing fits otherwise; a table of host = helper, as in ``{"pi-1" = "laptop"}``, names them.
        interval: steps whose gradients a helper adds up for one update; above 1 the result is another one.
        pairs: how pairs travel: as they were computed, rounded to 16 bits, or with projections of inputs; all but
            float32 change the result.
        merged: whether hosts hold linear adapters inside the matrices beside them, so that their memory does not
            depend on the adapters; the result has the rounding of a matrix.
        overlap: whether a host goes on to the next step of its turn before its helper has updated; its adapters are one
            step behind then, and the result is another one.
        users: joint = all rows train one set of adapters; alone = each user's rows train a set of their own;
            collaboration = they do, and every row goes through the sum of all sets.
        adapters: adapter configurations of single users, as in ``{"anna" = "linear"}``, who have them in place of
            ``adapter.config``.
    """

    mode: str | dict[str, str] = field(default=OFF)
    interval: int = 1
    pairs: str = EXACT
    merged: bool = False
    overlap: bool = False
    users: str = JOINT
    adapters: dict[str, str] | None = None

    def __post_init__(self) -> None:
        """Refuse unknown words, an interval out of range, odd tables, and hosts that would help themselves."""
        if isinstance(self.mode, str):
            _check_mode(self.mode)
        else:
            _check_map(self.mode)
        if isinstance(self.interval, bool) or not 1 <= self.interval <= MOST_STEPS:
            edge = f"at most {MOST_STEPS:,}" if self.interval > MOST_STEPS else "at least 1"
            raise JobError(f"offload.interval is {self.interval}, it has to be {edge}")
        check_choice("offload.pairs", self.pairs, PAIRS)
        check_choice("offload.users", self.users, USERS)
        odd = [name for name, value in dataclasses.asdict(IN_STEP).items() if getattr(self, name) != value]
        if not self.is_on and odd:
            name = odd[0]
            raise JobError(
                f"offload.{name} = {getattr(self, name)!r} has no meaning with offload.mode = 'off'; set offload.mode, "
                "or remove it"
            )
        try:
            _ = self.manner
            for user in self.chosen_adapters:
                check_user_name(user)
        except PlanError as error:  # users whose adapters can't be merged, or have to be; a name that none may have
            raise JobError(str(error)) from error
        if self.adapters is not None and not self.adapters:
            raise JobError("offload.adapters is an empty table; name an adapter for a user, or remove it")
        if self.adapters and self.users == JOINT:
            raise JobError(
                f"offload.adapters has no meaning with offload.users = {JOINT!r}, where all users train the same "
                f"adapters; remove it, or set offload.users = {ALONE!r}"
            )

    @property
    def is_on(self) -> bool:
        """Whether any node may help another."""
        return self.mode != OFF

    @property
    def is_exact(self) -> bool:
        """Whether the result is that of a run without helpers."""
        return self.manner.is_exact

    @property
    def manner(self) -> Manner:
        """How helpers fit."""
        return Manner(
            interval=self.interval, pairs=self.pairs, merged=self.merged, overlap=self.overlap, users=self.users
        )

    @property
    def chosen_adapters(self) -> Mapping[str, str]:
        """The adapter configuration of each user who has another one than ``adapter.config``."""
        return self.adapters or {}

    @property
    def helpers(self) -> Mapping[str, str]:
        """The helper of each host that the job names; none with off and auto."""
        return {} if isinstance(self.mode, str) else self.mode


def check_offload(
    settings: OffloadSettings,
    *,
    method: Method,
    adapter: Adapter,
    train: Train,
    operations: OperationsSettings,
    memory: Memory,
    velora: VeloraSettings | None,
) -> None:
    """Refuse helpers where the rest of a job can't go with them.

    Raises:
        JobError: names both keys, and the remedy.
    """
    if not settings.is_on:
        return
    if problem := _problem(settings, method, adapter, train, operations, memory, velora):
        raise JobError(f"[offload] can't go with {problem}, or set offload.mode = 'off'")


def _problem(
    settings: OffloadSettings,
    method: Method,
    adapter: Adapter,
    train: Train,
    operations: OperationsSettings,
    memory: Memory,
    velora: VeloraSettings | None,
) -> str:
    name = f"train.method = {train.method!r}"
    if method.full_parameters:
        return f"{name}, which trains all parameters, and helpers fit adapters only; choose another method"
    probe = Extent(num_blocks=2, owners=(), num_steps=1, local_iterations=train.local_iterations)
    if method.in_flight_below(probe, 2) > 1:
        return (
            f"{name}, which keeps several versions of adapters, and a helper sends the newest only; choose 'ringada' "
            "or 'all'"
        )
    for where, config in _configs(settings, adapter).items():
        if problem := offload_refusal(config, dropout=train.dropout):
            return f"{where}: {problem}"
        if settings.merged and (problem := merged_refusal(config, dropout=train.dropout)):
            both = f" and offload.users = {ALONE!r}" if settings.users == COLLABORATION else ""
            of_user = f" ({where})" if settings.chosen_adapters else ""
            return f"offload.merged: {problem}{both}{of_user}"
    if operations.is_chosen:
        return (
            f"operations.policy = {operations.policy!r}, which chooses operations by scores of weights at their host; "
            "set operations.policy = 'standard', or give operations.table"
        )
    if memory.activations in (VELORA, BOTH) or velora is not None:
        return (
            "VeLoRA (memory.activations, [velora]), which is for weights that their host trains; keep one of them: "
            "offload.pairs = 'velora' projects what is sent"
        )
    return ""


def check_fused(settings: OffloadSettings, *, adapter: Adapter, train: Train, fused: bool) -> None:
    """Refuse adapters that a helper can't fit in a model whose query, key and value are one matrix.

    Raises:
        JobError: names the adapter, and the remedy.
    """
    if not settings.is_on:
        return
    for where, config in _configs(settings, adapter).items():
        if problem := offload_refusal(config, dropout=train.dropout, fused=fused):
            raise JobError(f"[offload] can't go with {where}: {problem}, or set offload.mode = 'off'")


def _configs(settings: OffloadSettings, adapter: Adapter) -> dict[str, str]:
    """The adapter configurations of a job, by what names them in messages.

    Raises:
        JobError: one of a user is not readable.
    """
    own = {f"offload.adapters.{user}": config for user, config in settings.chosen_adapters.items()}
    for where, config in own.items():
        try:
            parse_adapter_config(config)
        except JobError as error:
            raise JobError(f"{where}: {error}") from error
    return {"the adapter": adapter.config, **own}


def _check_mode(mode: str) -> None:
    try:
        check_choice("offload.mode", mode, MODES)
    except JobError as error:
        raise JobError(f"{error}; a table names helpers: offload.mode = {{{mode!r} = 'laptop'}}") from error


def _check_map(helpers: Mapping[str, str]) -> None:
    if not helpers:
        raise JobError("offload.mode is an empty table; name a helper for a host, or set offload.mode = 'off'")
    for host, helper in helpers.items():
        if not (host and helper):
            raise JobError("offload.mode has an empty name of a node; write host = helper, as 'pi-1' = 'laptop'")
        if host == helper:
            raise JobError(
                f"offload.mode.{host} = {helper!r}: a node can't help itself; name another one, or leave it out"
            )
