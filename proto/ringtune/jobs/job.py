"""What the user asks for: ``job.toml`` as a value, read strictly and written back.

A job says what is wanted; it is the same on every node. What was decided is the plan's matter. Whatever is
misspelt, mistyped, out of range or not built yet is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from ringtune.errors import JobError
from ringtune.files.strict import check_keys, read_dataclass
from ringtune.jobs.job_text import parse_tables, read_job_text
from ringtune.jobs.misplaced import refuse_misplaced, refuse_unsupported
from ringtune.jobs.operations.checks import check_operations
from ringtune.jobs.operations.given_table import with_table_read
from ringtune.jobs.operations.settings import OperationsSettings
from ringtune.jobs.parts.cache import CacheSettings
from ringtune.jobs.parts.frozen import check_frozen
from ringtune.jobs.parts.hift import HiftSettings, check_full_parameters, with_adapter, without_default
from ringtune.jobs.parts.keep_best import check_keep_best
from ringtune.jobs.parts.memory import Memory, VeloraSettings, checked
from ringtune.jobs.parts.offload import OFF, OffloadSettings, check_offload
from ringtune.jobs.parts.placement import PlacementSettings, with_free_microbatches
from ringtune.jobs.parts.recovery import RecoverySettings
from ringtune.jobs.parts.unfreeze import Unfreeze
from ringtune.jobs.parts.users import check_user_column
from ringtune.jobs.sections import LENGTHS, Adapter, Data, Model, Privacy, Runtime, Train, Wire
from ringtune.models.family import CAUSAL_LM, CLASS_TASKS, NAMED_TASKS, PAIR_TASKS
from ringtune.models.hub import hub_id
from ringtune.schedule.helping.offload import JOINT
from ringtune.schedule.methods import Method, method_class, method_names
from ringtune.schedule.methods.hift import DISK
from ringtune.schedule.operations.choice import Policy
from ringtune.schedule.slice_policy import NONE, RECOMPUTE

__all__ = [
    "Adapter",
    "CacheSettings",
    "Data",
    "HiftSettings",
    "Job",
    "Memory",
    "Model",
    "OffloadSettings",
    "OperationsSettings",
    "PlacementSettings",
    "Privacy",
    "RecoverySettings",
    "Runtime",
    "Train",
    "Unfreeze",
    "VeloraSettings",
    "Wire",
    "load_job",
    "parse_job",
    "with_absolute_paths",
]

METHOD_SECTIONS = {"unfreeze": Unfreeze, "hift": HiftSettings}
"""Sections that only some methods have; each method names its own."""

_CLEARS = {
    **{f"train.{name}": tuple(other for other in LENGTHS if other != name) for name in LENGTHS},
    "data.eval": ("held_out",),
    "data.held_out": ("eval",),
    "unfreeze.every_steps": ("at", "patience_steps", "min_improvement"),
    "unfreeze.at": ("every_steps", "patience_steps", "min_improvement"),
    "operations.compute": ("full", "forward_only"),
    "operations.full": ("compute",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A whole ``job.toml``."""

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
    runtime: Runtime = field(default_factory=Runtime)

    def __post_init__(self) -> None:
        """Refuse settings of another method, and keys that the task has no use for."""
        self._check_method_sections()
        check_full_parameters(train=self.train, adapter=self.adapter, operations=self.operations, privacy=self.privacy)
        object.__setattr__(self, "velora", checked(self.memory, self.velora, self.adapter))
        check_operations(self.operations, adapter=self.adapter, train=self.train, privacy=self.privacy)
        check_frozen(self)
        self._check_offload()
        check_keep_best(train=self.train, offload=self.offload, recovery=self.recovery)
        check_user_column(self.data, self.offload, task=self.model.task)
        if self.train.sample_prompt and self.model.task != CAUSAL_LM:
            raise JobError(
                f"train.sample_prompt is for model.task = {CAUSAL_LM!r}, this job has {self.model.task!r}; remove it"
            )
        if self.data.labels and self.model.task not in NAMED_TASKS:
            raise JobError(f"data.labels has no meaning for model.task = {self.model.task!r}; remove it")
        if self.data.text_pair and self.model.task not in PAIR_TASKS:
            raise JobError(f"data.text_pair has no meaning for model.task = {self.model.task!r}; remove it")
        if self.data.split != "iid" and self.model.task not in CLASS_TASKS:
            raise JobError(
                f"data.split = {self.data.split!r} shares classes out, model.task = {self.model.task!r} has none; "
                "use 'iid'"
            )

    def _check_method_sections(self) -> None:
        """Fill in the settings of the job's method, and refuse those of another one."""
        section = method_class(self.train.method).section
        for name, make in METHOD_SECTIONS.items():
            if getattr(self, name) is None:
                if name == section:
                    object.__setattr__(self, name, make())
            elif name != section:
                owners = [method for method in method_names() if method_class(method).section == name]
                raise JobError(
                    f"[{name}] has settings of train.method = {' or '.join(map(repr, owners))}, but this job has "
                    f"train.method = {self.train.method!r}; remove the section or change the method"
                )

    def _check_offload(self) -> None:
        check_offload(
            self.offload,
            method=self.method,
            adapter=self.adapter,
            train=self.train,
            operations=self.operations,
            memory=self.memory,
            velora=self.velora,
        )

    @property
    def method(self) -> Method:
        """The training method with its settings."""
        kind = method_class(self.train.method)
        return kind.from_settings(getattr(self, kind.section) if kind.section else None, seed=self.train.seed)

    @property
    def keeps_state_on_disk(self) -> bool:
        """Whether nodes keep the optimizer state of inactive units on their disks."""
        return self.hift is not None and self.hift.state == DISK

    def to_tables(self) -> dict[str, dict[str, object]]:
        """Sections with their keys, defaults included; ``None`` values left out."""
        tables = dataclasses.asdict(self)
        return {
            name: {key: item for key, item in keys.items() if item is not None}
            for name, keys in tables.items()
            if keys is not None
        }

    def to_toml(self) -> str:
        """The resolved job as TOML; ``parse_job`` of it gives an equal job."""
        return tomli_w.dumps(self.to_tables())

    def with_overrides(self, overrides: Mapping[str, object]) -> Job:
        """Make a job with some values replaced.

        Args:
            overrides: dotted keys as in the file, e.g. ``{"train.seed": 1}``. Setting one of
                ``train.rounds``, ``train.epochs`` and ``train.max_steps`` clears the others; so does one form of
                ``unfreeze`` and of ``operations``. Another method leaves the settings of this one behind, and so does
                the policy standard and a given table; another optimizer leaves the momentum behind, and
                ``memory.activations`` without VeLoRA those of VeLoRA, ``offload.mode`` off the rest of its section, and
                it or ``offload.users`` joint the column of users. A number of micro-batches is then the job's own.

        Raises:
            JobError: unknown key, wrong type, out of range; the same rules as in the file.
        """
        tables = self.to_tables()
        wanted = overrides.get("train.method", self.train.method)
        section = method_class(wanted).section if wanted in method_names() else ""
        for name in METHOD_SECTIONS.keys() - {section}:
            tables.pop(name, None)
        tables["adapter"] = without_default(tables["adapter"], self.train.method)
        for name in overrides.keys() & _CLEARS.keys():
            for other in _CLEARS[name]:
                tables.get(name.partition(".")[0], {}).pop(other, None)
        if overrides.get("train.optimizer", "momentum") != "momentum":
            tables["train"].pop("momentum", None)
        if overrides.get("memory.activations") in (NONE, RECOMPUTE):
            tables.pop("velora", None)
        if overrides.get("offload.mode") == OFF:
            tables.pop("offload")
        if overrides.get("offload.mode") == OFF or overrides.get("offload.users") == JOINT:
            tables["data"].pop("user")
        if overrides.get("operations.policy") == Policy.STANDARD or overrides.get("operations.table"):
            tables["operations"] = {}
        if "train.microbatches" in overrides:
            tables["placement"].pop("microbatches")
        for name, value in overrides.items():
            section, _, key = name.partition(".")
            check_keys([section], [entry.name for entry in dataclasses.fields(Job)], where="", error=JobError)
            tables.setdefault(section, {})[key] = value
        return Job.from_tables(tables)

    @staticmethod
    def from_tables(tables: Mapping[str, object]) -> Job:
        """Build a job from sections as a TOML reader gives them.

        Raises:
            JobError: unknown key, wrong type, out of range, or not supported yet.
        """
        tables = with_free_microbatches(tables, Train().microbatches, Train().batch_size)
        refuse_unsupported(tables)
        refuse_misplaced(Job, tables)
        return read_dataclass(Job, with_adapter(tables), where="", error=JobError)


def load_job(path: str | Path) -> Job:
    """Read a job file; its relative paths are relative to the file's folder and become absolute.

    Args:
        path: of the file.

    Raises:
        JobError: the file is not there, not TOML, or breaks a rule; names file and key.
    """
    path = Path(path)
    return with_absolute_paths(parse_job(read_job_text(path), source=str(path)), path.parent)


def parse_job(text: str, *, source: str) -> Job:
    """Read the text of a job file.

    Args:
        text: TOML.
        source: where it came from, for messages.

    Raises:
        JobError: not TOML, an unknown key, a wrong type, out of range, or not supported yet.
    """
    tables = parse_tables(text, source=source)
    try:
        return Job.from_tables(tables)
    except JobError as error:
        raise JobError(f"{source}: {error}") from error


def with_absolute_paths(job: Job, folder: Path) -> Job:
    """The job with ``model.path``, ``data.train`` and ``data.eval`` made absolute, relative to ``folder``.

    The id of a model on a hub stays as it is. ``operations.table`` is read, because a job is carried out where its file
    is not.
    """
    path = _absolute(job.model.path, folder)
    is_id = hub_id(job.model.path) is not None and not Path(path).exists()  # a folder that is called so wins
    model = job.model if is_id else dataclasses.replace(job.model, path=path)
    train, evaluate = _absolute(job.data.train, folder), _absolute(job.data.eval, folder)
    data = dataclasses.replace(job.data, train=train, eval=evaluate)
    return dataclasses.replace(job, model=model, data=data, operations=with_table_read(job.operations, folder))


def _absolute(path: str, folder: Path) -> str:
    return str((folder / Path(path).expanduser()).resolve()) if path else path
