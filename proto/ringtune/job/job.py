"""``job.toml`` as a value: parsed strictly, written back, and the form of its result.

A job holds the user's settings and is the same on every node; decisions are in the plan. A key that is misspelt, of the
wrong type or range, in the wrong section, of another framework, or not supported is refused by name.

With ``offload.adapters`` users have adapters of different kinds. A *kind* is an adapter configuration with its users.
Kind 0 is ``adapter.config``, even if no user has it: head, embedding and blocks are built with it. The others follow in
the order of their first users::

    [adapter]                       kinds               users
    config = "lora"                 0  lora             ben, carl
    [offload]                       1  linear           anna, dora
    users = "alone"
    adapters = { anna = "linear", dora = "linear" }

Source: ColA, section 4.3 and Table 4 (Low Rank-Linear, Low Rank-MLP): users choose the architecture of their models.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import tomllib
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import tomli_w

from ringtune.config.sections import (
    ANSWERS,
    LENGTHS,
    NEVER,
    Adapter,
    Data,
    Model,
    PlacementSettings,
    Privacy,
    RecoverySettings,
    Runtime,
    Train,
    Unfreeze,
    Wire,
    with_free_microbatches,
)
from ringtune.errors import ContradictionError, JobError
from ringtune.models.adapter_config import parse_adapter_config
from ringtune.models.adapter_support import mixed_tokens, sum_of_kinds
from ringtune.models.family import (
    CAUSAL_LM,
    CHAT,
    CLASS_TASKS,
    LANGUAGE_TASKS,
    NAMED_TASKS,
    PAIR_TASKS,
    QUESTION_ANSWERING,
    REGRESSION,
)
from ringtune.models.folder import hub_id
from ringtune.models.result_files import Result, adapter_result, model_result
from ringtune.schedule.course import JOINT
from ringtune.schedule.methods import Method, method_class, method_names
from ringtune.schedule.methods.hift import DISK
from ringtune.schedule.operation_tables import Policy
from ringtune.schedule.saved_activations import VELORA
from ringtune.storage.strict import check_keys, key_of, read_dataclass, read_given
from ringtune.storage.tables import TABLE_SUFFIXES
from ringtune.storage.text_files import resolved
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.activation_cache import CacheSettings
from ringtune.techniques.activation_checkpointing import NONE, RECOMPUTE, Memory, VeloraSettings, checked
from ringtune.techniques.audit import AuditSettings
from ringtune.techniques.full_parameters import HiftSettings, with_adapter, without_default
from ringtune.techniques.generation import GenerationSettings
from ringtune.techniques.offload import OFF, OffloadSettings
from ringtune.techniques.operations import OperationsSettings, with_table_read
from ringtune.texts import listed

__all__ = [
    "Adapter",
    "Data",
    "Job",
    "Model",
    "OperationsSettings",
    "Privacy",
    "Runtime",
    "Train",
    "Unfreeze",
    "Wire",
    "load_job",
    "parse_job",
    "with_absolute_paths",
]

MAX_BYTES: Final = 4_000_000
"""Most bytes of a job file; every key takes some 2,000 bytes, operation tables more."""

_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)")
_KEY = re.compile(r"\s*(?:\[+\s*(?P<section>[^]]*)|(?P<key>[\w.\"'-]+)\s*=)")


def read_job_text(path: Path) -> str:
    """Read a job file; a UTF-8 byte order mark is dropped; raises ``JobError``."""
    try:
        if path.is_dir():
            raise JobError(f"{path} is a folder; give the job file in it, such as {path / 'job.toml'}")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise JobError(f"{path} has {size:,} bytes, a job file has at most {MAX_BYTES:,}; is it another file?")
        return read_given(path, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError(f"can't read the job file {path}: {reason}") from error


_MAX_PARTS: Final = 16
_LONG_KEY: Final = re.compile(
    r"""(?m)(?:^|[\[{,])[ \t]*+(?:(?:[\w-]++|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){%d}"""  # noqa: UP031 - braces
    % (_MAX_PARTS - 1)
)


def parse_tables(text: str, *, source: str) -> dict[str, Any]:
    """Parse TOML; ``source`` is its origin, for messages; raises ``JobError``."""
    if _LONG_KEY.search(text):  # the time of tomllib grows with the square of its parts
        raise JobError(f"{source}: not valid TOML: a key has {_MAX_PARTS} parts or more, joined by dots")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{source}: not valid TOML: {error}{_advice(text, str(error))}") from error
    except RecursionError as error:
        raise JobError(f"{source}: not valid TOML: it is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise JobError(f"{source}: not valid TOML: a number is too long") from error


def _advice(text: str, problem: str) -> str:
    """Return the remedy for a common mistake, given tomllib's message; empty if unknown."""
    place = _PLACE.search(problem)
    line = text.splitlines()[int(place[1]) - 1] if place and int(place[1]) <= len(text.splitlines()) else ""
    match = _KEY.match(line)
    name = (match["section"] or match["key"] or "").strip() if match else ""
    if problem.startswith(("Cannot overwrite a value", "Cannot declare", "Cannot mutate", "Cannot redefine")):
        return f"; {name or 'a key'} stands twice, keep one"
    if "Unescaped '\\'" in problem or ("\\" in line and "Invalid hex" in problem):
        return "; a backslash has a meaning in double quotes, write the path with / or in 'single quotes'"
    if "Invalid value" in problem and name:
        return f"; put the text behind {name} in quotes"
    return ""


_CLIP_KEYS = ("clip_norm", "max_grad_norm", "clip_grad_norm", "gradient_clipping")


@functools.cache
def sections_of(job: type[Any]) -> Mapping[str, frozenset[str]]:
    """Names of the keys of each section of a job's dataclass."""
    hints = typing.get_type_hints(job)
    return {
        field.name: frozenset(key_of(key.name) for key in dataclasses.fields(section_class(hints[field.name])))
        for field in dataclasses.fields(job)
    }


def section_class(hint: Any) -> Any:
    """Return a section's dataclass from the type of the job's field, which may be ``Section | None``."""
    return next(kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind))


def refuse_misplaced(tables: Mapping[str, object]) -> None:
    """Refuse a key of another section, or before all sections; raises ``JobError``; keys of no section pass."""
    sections = sections_of(typing.cast(Any, Job))
    odd = [(name, name) for name in tables if name not in sections]
    odd += [
        (f"{name}.{key}", str(key))
        for name, value in tables.items()
        if name in sections and isinstance(value, Mapping)
        for key in value
        if key not in sections[name]
    ]
    for full, key in odd:
        if homes := [f"[{section}]" for section, keys in sections.items() if key in keys]:
            raise JobError(f"unknown key {full!r}; {key} is a key of {' or '.join(homes)}, write it there")


_LOG = logging.getLogger(__name__)

METHOD_SECTIONS = {"unfreeze": Unfreeze, "hift": HiftSettings}
"""Sections of single methods, see ``Method.section``."""

_CLEARS = {
    **{f"train.{name}": tuple(other for other in LENGTHS if other != name) for name in LENGTHS},
    "data.eval": ("held_out",),
    "data.held_out": ("eval",),
    "unfreeze.every_steps": ("at", "patience_steps", "min_improvement"),
    "unfreeze.at": ("every_steps", "patience_steps", "min_improvement"),
    "operations.compute": ("full", "forward_only"),
    "operations.full": ("compute",),
    "velora.parts": ("values",),
    "velora.values": ("parts",),
    "adapter.from": ("sha256",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Content of ``job.toml``, with defaults filled in."""

    model: Model
    data: Data = field(default_factory=Data)
    adapter: Adapter = field(default_factory=Adapter)
    train: Train = field(default_factory=Train)
    unfreeze: Unfreeze | None = None
    hift: HiftSettings | None = None
    wire: Wire = field(default_factory=Wire)
    privacy: Privacy = field(default_factory=Privacy)
    operations: OperationsSettings = field(default_factory=OperationsSettings)
    memory: Memory = field(default_factory=Memory)
    velora: VeloraSettings | None = None
    offload: OffloadSettings = field(default_factory=OffloadSettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    audit: AuditSettings | None = None
    generation: GenerationSettings | None = None
    runtime: Runtime = field(default_factory=Runtime)

    def __post_init__(self) -> None:
        """Check settings across sections, and fill in the sections of method and technique."""
        self._check_method_sections()
        object.__setattr__(self, "velora", checked(self.memory, self.velora, self.adapter))
        for technique in TECHNIQUES:
            technique.check_job(self)
        if self.train.sample_prompt and self.model.task not in LANGUAGE_TASKS:
            raise JobError(
                "train.sample_prompt is for a language model (model.task = 'causal-lm' or 'chat'), this job has "
                f"{self.model.task!r}; remove it"
            )
        self._check_language_keys()
        self._check_best()
        if self.train.packing:
            self._check_packing()
        if self.data.labels and self.model.task not in NAMED_TASKS:
            raise JobError(f"data.labels has no meaning for model.task = {self.model.task!r}; remove it")
        if self.data.text_pair and self.model.task not in PAIR_TASKS:
            raise JobError(f"data.text_pair has no meaning for model.task = {self.model.task!r}; remove it")
        if self.data.split != "iid" and self.model.task not in CLASS_TASKS:
            raise JobError(
                f"data.split = {self.data.split!r} shares classes out, model.task = {self.model.task!r} has none; "
                "use 'iid'"
            )

    def _check_language_keys(self) -> None:
        """Fill in ``train.loss_on`` for the task chat; refuse it and its like for tasks where it has no meaning."""
        if self.model.task == CHAT and self.train.loss_on is None:
            object.__setattr__(self, "train", dataclasses.replace(self.train, loss_on=ANSWERS))
        given = {"train.loss_on": self.train.loss_on, "data.template": self.data.template}
        for task, keys in ((CHAT, given), (CAUSAL_LM, {"data.append_eos": self.data.append_eos})):
            for name, value in keys.items():
                if value is not None and self.model.task != task:
                    raise JobError(f"{name} is for model.task = {task!r}, this job has {self.model.task!r}; remove it")

    def _check_best(self) -> None:
        """Refuse a figure by which the best result is kept and that the evaluations do not have."""
        name, task = self.train.keep_best, self.model.task
        known = {
            "accuracy": task not in (REGRESSION, QUESTION_ANSWERING),
            **dict.fromkeys(("f1", "exact_match"), task == QUESTION_ANSWERING),
            "rouge_l": self.generation is not None,
            "mae": task == REGRESSION,
        }
        if isinstance(name, str) and not known[name]:
            has = ", ".join(["loss", *(each for each, is_known in known.items() if is_known)])
            raise JobError(f"train.keep_best = {name!r} is no figure of this job's evaluations, which have {has}")

    def _check_packing(self) -> None:
        """Refuse packed rows of other tasks, of several users, and with adapters that mix the tokens of a sequence."""
        if self.model.task not in LANGUAGE_TASKS:
            raise JobError(
                "train.packing = true is for model.task = 'causal-lm' or 'chat', where each token has its own target, "
                f"and this job has {self.model.task!r}; remove it"
            )
        if self.data.user:
            raise JobError(
                f"train.packing = true would put rows of several users (data.user = {self.data.user!r}) into one "
                "sequence; remove one of them"
            )
        for config in self.adapter_configs:
            if problem := mixed_tokens(config):
                raise JobError(
                    f"train.packing = true does not go with adapter.config = {config!r}: {problem}, and several rows "
                    "are in one sequence; remove train.packing, or use seq_bn or lora"
                )

    def _check_method_sections(self) -> None:
        """Fill in the section of the job's method, and refuse that of another method."""
        section = method_class(self.train.method).section
        for name, make in METHOD_SECTIONS.items():
            if getattr(self, name) is None:
                if name == section:
                    object.__setattr__(self, name, make())
            elif name != section:
                owners = [method for method in method_names() if method_class(method).section == name]
                raise ContradictionError(
                    f"[{name}] has settings of train.method = {' or '.join(map(repr, owners))}, but this job has "
                    f"train.method = {self.train.method!r}; remove the section or change the method"
                )

    @property
    def method(self) -> Method:
        """Training method with its settings."""
        kind = method_class(self.train.method)
        return kind.from_settings(getattr(self, kind.section) if kind.section else None, seed=self.train.seed)

    @property
    def may_have_replicas(self) -> bool:
        """Whether the planner may let several nodes host the same blocks; an audit compares single hosts."""
        return self.placement.replicas != NEVER and self.audit is None

    @property
    def needs_copies(self) -> bool:
        """Whether hosts have to keep the state of others."""
        return self.recovery.needs_copies or self.audit is not None

    @property
    def adapter_configs(self) -> tuple[str, ...]:
        """The adapter configurations: that of the job, then those of single users."""
        return (self.adapter.config, *self.offload.chosen_adapters.values())

    @property
    def audit_share(self) -> float:
        """Share of the work of hosts that is repeated; 0 without an audit."""
        return self.audit.share if self.audit is not None else 0.0

    @property
    def keeps_state_on_disk(self) -> bool:
        """Whether nodes keep the optimizer state of inactive units on their disks."""
        return self.hift is not None and self.hift.state == DISK

    @property
    def keeps_best_on_disk(self) -> bool:
        """Whether nodes keep the best result on their disks until the run ends, instead of sending models."""
        return bool(self.train.keep_best) and method_class(self.train.method).full_parameters

    def to_tables(self) -> dict[str, dict[str, object]]:
        """Return sections with their keys, defaults included, ``None`` values left out."""
        tables = dataclasses.asdict(self)
        return {
            name: {key_of(key): item for key, item in keys.items() if item is not None}
            for name, keys in tables.items()
            if keys is not None
        }

    def to_toml(self) -> str:
        """Write the job as TOML; ``parse_job`` of it gives an equal job."""
        return tomli_w.dumps(self.to_tables())

    def with_overrides(self, overrides: Mapping[str, object]) -> Job:
        """Replace values, such as ``{"train.seed": 1}``; settings that contradict a new value are dropped.

        One of ``train.rounds``, ``train.epochs`` and ``train.max_steps`` drops the others. So does each of the
        exclusive keys of ``data`` (``eval``, ``held_out``), ``unfreeze``, ``operations`` and ``velora``. Also dropped
        are

        * the section of the old method, with another ``train.method``;
        * the other keys of ``operations``, with policy standard or a table;
        * the momentum, with another optimizer;
        * ``[velora]``, with ``memory.activations`` of ``"none"`` or ``"recompute"``;
        * ``offload.projected``, with other ``offload.pairs`` than velora;
        * the rest of ``[offload]``, with ``offload.mode`` off; and ``data.user``, with this or ``offload.users`` joint;
        * ``placement.microbatches``, with a number of micro-batches.
        """
        return Job.from_tables(with_changes(self.to_tables(), overrides))

    @staticmethod
    def from_tables(tables: Mapping[str, object]) -> Job:
        """Build a job from the tables of a TOML file; raises ``JobError`` for a key that is unknown or not valid."""
        tables = with_free_microbatches(tables)
        train = tables.get("train")
        for key in train if isinstance(train, Mapping) else ():
            if key in _CLIP_KEYS:
                raise JobError(
                    f"train.{key} is not supported: clipping by the global norm needs a sum over the ring before each "
                    "update; remove it"
                )
        refuse_misplaced(tables)
        return read_dataclass(Job, with_adapter(tables), where="", error=JobError)


def with_changes(tables: Mapping[str, Any], overrides: Mapping[str, object]) -> dict[str, Any]:
    """Replace values in the tables of a job as ``Job.with_overrides`` says; the new tables are not checked."""
    names = [entry.name for entry in dataclasses.fields(Job)]
    for name in overrides:
        check_keys([name.partition(".")[0]], names, where="", error=JobError)
    changed = {name: dict(keys) if isinstance(keys, Mapping) else keys for name, keys in tables.items()}
    sections = {name: changed.setdefault(name, {}) for name in names if isinstance(changed.get(name, {}), dict)}
    clears = [(name.partition(".")[0], other) for name in overrides.keys() & _CLEARS.keys() for other in _CLEARS[name]]
    if overrides.get("train.optimizer", "momentum") != "momentum":
        clears.append(("train", "momentum"))
    if overrides.get("offload.pairs", VELORA) != VELORA:
        clears.append(("offload", "projected"))
    if overrides.get("offload.mode") == OFF or overrides.get("offload.users") == JOINT:
        clears.append(("data", "user"))
    if "train.microbatches" in overrides:
        clears.append(("placement", "microbatches"))
    for section, key in clears:
        sections.get(section, {}).pop(key, None)
    method = sections.get("train", {}).get("method", Train().method)
    dropped = {_section_of(method)} - {_section_of(overrides.get("train.method", method))}
    if overrides.get("memory.activations") in (NONE, RECOMPUTE):
        dropped.add("velora")
    if overrides.get("offload.mode") == OFF:
        dropped.add("offload")
    if overrides.get("operations.policy") == Policy.STANDARD or overrides.get("operations.table"):
        dropped.add("operations")
    for section in dropped & sections.keys():
        sections[section].clear()
    if "adapter" in sections:
        changed["adapter"] = sections["adapter"] = without_default(sections["adapter"], method)
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        if section in sections:
            sections[section][key] = value
    return {name: keys for name, keys in changed.items() if keys or name in tables.keys() - dropped}


def with_told_changes(tables: Mapping[str, Any], overrides: Mapping[str, object]) -> dict[str, Any]:
    """Replace values as ``with_changes``, and log which settings of the user that drops, but for alternatives."""
    changed, before = with_changes(tables, overrides), with_changes(tables, {})
    alternatives = {(name.partition(".")[0], other) for name in overrides for other in _CLEARS.get(name, ())}
    dropped = [
        f"{section}.{key}"
        for section, keys in before.items()
        if isinstance(keys, Mapping)
        for key in keys.keys() - changed.get(section, {}).keys()
        if (section, key) not in alternatives
    ]
    if dropped:
        changes = ", ".join(f"{name} = {value!r}" for name, value in overrides.items())
        _LOG.warning("with %s these settings of the job are dropped: %s", changes, ", ".join(sorted(dropped)))
    return changed


def _section_of(method: object) -> str:
    """Name of the section of a method's own settings; empty if it has none, or there is no such method."""
    return method_class(method).section if isinstance(method, str) and method in method_names() else ""


def load_job(path: str | Path, overrides: Mapping[str, object] | None = None) -> Job:
    """Read a job file; paths in it are relative to its folder and become absolute; raises ``JobError``.

    Args:
        path: of the file.
        overrides: replace values of the file before it is checked, as for ``Job.with_overrides``; their paths are
            relative to the current folder.
    """
    path, overrides = Path(path), overrides or {}
    try:
        tables = with_told_changes(parse_tables(read_job_text(path), source=str(path)), overrides)
    except JobError as error:
        if path.suffix.lower() not in TABLE_SUFFIXES or not path.is_file():
            raise
        remedy = "'ringtune init --data FILE' writes one for a file of rows"
        raise JobError(f"{path} is no job, it ends in {path.suffix} as rows do; {remedy}") from error
    try:
        job = Job.from_tables(tables)
    except JobError as error:
        if any(name in str(error) for name in overrides):
            raise
        raise type(error)(f"{path}: {error}") from error
    return with_absolute_paths(job, path.parent, here=overrides)


def parse_job(text: str, *, source: str) -> Job:
    """Parse the text of a job file; ``source`` is its origin, for messages; raises ``JobError``."""
    tables = parse_tables(text, source=source)
    try:
        return Job.from_tables(tables)
    except JobError as error:
        raise type(error)(f"{source}: {error}") from error


def with_absolute_paths(job: Job, folder: Path, *, here: Collection[str] = ()) -> Job:
    """Make the paths of model and data absolute, relative to ``folder``, and load ``operations.table``.

    The id of a model on a hub stays. The table is loaded because nodes do not have its file. Paths of the dotted keys
    ``here`` are relative to the current folder.
    """

    def at(key: str) -> Path:
        return Path.cwd() if key in here else folder

    path = _absolute(job.model.path, at("model.path"))
    is_id = hub_id(job.model.path) is not None and not Path(path).exists()  # a folder that is called so wins
    model = job.model if is_id else dataclasses.replace(job.model, path=path)
    train, evaluate = _absolute(job.data.train, at("data.train")), _absolute(job.data.eval, at("data.eval"))
    data = dataclasses.replace(job.data, train=train, eval=evaluate)
    adapter = dataclasses.replace(job.adapter, from_=_absolute(job.adapter.from_, at("adapter.from")))
    operations = with_table_read(job.operations, at("operations.table"))
    return dataclasses.replace(job, model=model, data=data, adapter=adapter, operations=operations)


def _absolute(path: str, folder: Path) -> str:
    return str(resolved(folder / Path(path).expanduser())) if path else path


_MAX_NAMED = 20


class AdapterKind(NamedTuple):
    """An adapter configuration with its users, in their order; number 0 is ``adapter.config`` of the job."""

    number: int
    config: str
    users: tuple[str, ...]

    @property
    def prefix(self) -> str:
        """Prefix of the names of this kind's pairs; empty for kind 0."""
        return f"{self.number}/" if self.number else ""


def kinds_of(job: Job, users: Sequence[str] | None = None) -> tuple[AdapterKind, ...]:
    """Group users, by default those that the job names, by adapter configuration; there is one kind if none differs."""
    users = tuple(job.offload.chosen_adapters) if users is None else users
    if not users or not job.offload.chosen_adapters:
        return (AdapterKind(0, job.adapter.config, tuple(users)),)
    if odd := sorted(job.offload.chosen_adapters.keys() - set(users)):
        raise JobError(
            f"offload.adapters.{odd[0]}: no user of this run has the name {odd[0]!r}; its users are "
            f"{listed(users, _MAX_NAMED)}"
        )
    kinds: list[tuple[str, list[str]]] = [(job.adapter.config, [])]
    for user in users:
        config = config_of(job, user)
        same = (of_kind for known, of_kind in kinds if parse_adapter_config(known) == parse_adapter_config(config))
        of_kind = next(same, None)
        if of_kind is None:
            kinds.append((config, of_kind := []))
        of_kind.append(user)
    return tuple(AdapterKind(number, config, tuple(of_kind)) for number, (config, of_kind) in enumerate(kinds))


def config_of(job: Job, user: str) -> str:
    """Return a user's adapter configuration."""
    return job.offload.chosen_adapters.get(user, job.adapter.config)


def job_of(job: Job, config: str) -> Job:
    """Return the job with another ``adapter.config``."""
    if config == job.adapter.config:
        return job
    return dataclasses.replace(job, adapter=dataclasses.replace(job.adapter, config=config))


def job_of_user(job: Job, user: str) -> Job:
    """Return the job with one user's ``adapter.config``, and without ``offload.adapters``."""
    return _alone(job, config_of(job, user))


def job_of_sum(job: Job, users: Sequence[str]) -> Job:
    """Return the job with the config of the sum of all users' adapters alone; raises ``UsageError`` without one."""
    return _alone(job, sum_of_kinds([config_of(job, user) for user in users]))


def _alone(job: Job, config: str) -> Job:
    return dataclasses.replace(job_of(job, config), offload=dataclasses.replace(job.offload, adapters=None))


def result_of(job: Job) -> Result:
    """Return the form of a run's result: a model where all parameters train, else adapter or own weights."""
    return model_result() if job.method.full_parameters else adapter_result(job.model.task, job.adapter.config)


def result_of_user(job: Job, user: str) -> Result:
    """Return the form of the result of a user with adapters of their own."""
    return adapter_result(job.model.task, config_of(job, user))
