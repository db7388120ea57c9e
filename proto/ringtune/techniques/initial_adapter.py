"""Begin from an adapter (``adapter.from`` of a job): the file of initial values, from folders of several kinds.

The submitter reads the folder and writes its tensors into one safetensors file, ``initial.safetensors``, with the names
of a run's result. ``adapter.sha256`` of the job and ``initial`` of the course are the digest of that file, so that
equal digests of plans mean equal values. The file goes to the coordinator with the request of the run, and nodes fetch
it by its digest. Each node fills its hosted blocks, helpers the blocks that they fit, and owners their head and
invertible adapter, when they build their part: at the beginning, in another placement, and after a resume, which then
loads what has been trained.

====================================  ==================================================================================
folder                                tensors
====================================  ==================================================================================
``--out`` of a run, or its result     as they are
AdapterHub's, also pickled            the adapter's name becomes ``ringtune``
PEFT's with LoRA                      ``X.lora_A.weight`` becomes ``X.loras.ringtune.lora_A``, and so ``lora_B``; the
                                      factor of the product is alpha / r in both. Where query, key and value are one
                                      matrix, AdapterHub has three A, which begin as PEFT's one;
                                      blocks without LoRA are ``leave_out`` of ``adapter.config``. Its head is taken
                                      over where ``head_config.json`` names its classes, as ``ringtune export`` does
====================================  ==================================================================================

The head is taken over if it is of the job's task and of the run's classes in their order. Otherwise it begins anew.

Source: RingAda, section IV (adapters of AdapterHub); adapters 1.3.0, ``adapter_config.json`` and ``head_config.json``;
PEFT 0.17, ``adapter_config.json`` and ``LoraLayer``: its scaling is alpha / r, with rslora alpha / sqrt(r).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ringtune.errors import IntegrityError, JobError, RingTuneError
from ringtune.models.adapter_config import (
    INVERTIBLE,
    INVERTIBLE_TENSORS,
    auxiliary_of,
    config_of_library,
    invertible_of,
    is_same_adapter,
    library_config,
    trains_own_weights,
)
from ringtune.models.architecture_heads import architecture_head
from ringtune.models.auxiliary_models import described
from ringtune.models.families import FAMILIES
from ringtune.models.family import (
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    LANGUAGE_TASKS,
    NAMED_TASKS,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
    Family,
)
from ringtune.models.folder import CONFIG_FILE, has_tower, read_config
from ringtune.models.peft import HEAD_MODULES, PEFT_FILES
from ringtune.models.result_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    ADAPTER_FOLDER,
    AUXILIARY_CONFIG_FILE,
    BLOCKS_FILE,
    HEAD_CONFIG_FILE,
    HEAD_FILE,
    MODEL_FOLDER,
    USERS_FOLDER,
)
from ringtune.schedule.course import COLLABORATION, Course
from ringtune.schedule.methods import method_class
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.storage.strict import read_json
from ringtune.storage.tensor_files import TensorFile, TensorPieces, is_finite, write_tensors
from ringtune.techniques.base import Technique

INITIAL_FILE: Final = "initial.safetensors"
"""The file in a run's folder and in a node's cache."""

MAX_INITIAL_BYTES: Final = 1 << 32
"""Most bytes that are accepted from another machine."""

_NAME: Final = "ringtune"
_ADAPTER_FILES: Final = (ADAPTER_FILE, "pytorch_adapter.bin")
_HEAD_FILES: Final = (HEAD_FILE, "pytorch_model_head.bin")
_HEAD: Final = "head"
_HEAD_TYPES: Final = {
    "classification": CLASSIFICATION,
    "tagging": TAGGING,
    "question_answering": QUESTION_ANSWERING,
    "image_classification": IMAGE_CLASSIFICATION,
}
_ARCHITECTURES: Final = {"ForSequenceClassification": CLASSIFICATION, "ForTokenClassification": TAGGING}

_FLOATS: Final = ("F64", "F32", "F16", "BF16")

Unpickle = Callable[[Sequence[Path]], Sequence[Pieces]]
"""Converts pickled files of tensors to safetensors, each to one."""


class Folder(NamedTuple):
    """The content of a folder with an adapter.

    Attributes:
        config: as ``adapter.config``; empty where it can't be written as one.
        tensors: of the adapter, by their names in a run's result.
        head: tensors of the head; empty = none that can be used.
        head_of: task and classes of the head.
    """

    config: str
    tensors: dict[str, TensorPieces]
    head: dict[str, TensorPieces]
    head_of: tuple[str, tuple[str, ...]] = ("", ())


class _Head(NamedTuple):
    """A head that a run can have, of a ``head_config.json``.

    Attributes:
        name: as its file's tensors have it.
        of: task and classes.
        is_of_library: it is AdapterHub's; else of a class of transformers.
    """

    name: str
    of: tuple[str, tuple[str, ...]]
    is_of_library: bool


def initial_values(job: Any, unpickle: Unpickle) -> Pieces:
    """Read ``adapter.from`` of a job, and return the file of initial values.

    ``unpickle`` is called for files that are not safetensors.
    """
    try:
        return _initial_values(job, unpickle)
    except RingTuneError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise _refused(
            job.adapter.from_, f"is damaged ({type(error).__name__}: {error}); copy the folder again"
        ) from error


def _initial_values(job: Any, unpickle: Unpickle) -> Pieces:
    folder, config = Path(job.adapter.from_), job.adapter.config
    if not folder.is_dir():
        raise _refused(folder, "is no folder; give the --out of a run, or a folder of AdapterHub or PEFT")
    folder = _result_in(folder)
    if (folder / AUXILIARY_CONFIG_FILE).is_file():
        files = _of_auxiliary(folder, config, unpickle)
    elif "peft_type" in (content := _object(folder / ADAPTER_CONFIG_FILE)):
        files = _of_peft(folder, content, Path(job.model.path), unpickle)
    else:
        files = _of_hub(folder, content, unpickle)
    if files.config and not is_same_adapter(files.config, config):
        raise _refused(
            folder, f"has the adapter {files.config!r}, the job says {config!r}; set adapter.config = {files.config!r}"
        )
    _check_invertible(folder, files, config)
    _check_model(folder, files, Path(job.model.path))
    for name, tensor in (files.tensors | files.head).items():
        if tensor.dtype not in _FLOATS:
            raise _refused(folder, f"has {name} of {tensor.dtype}; supported are {', '.join(_FLOATS)}")
        if not is_finite(tensor.data, tensor.dtype):
            raise _refused(folder, f"has {name}, which is not finite: its training diverged; take another one")
    metadata = {"format": "pt"}
    if files.head:
        metadata[_HEAD] = json.dumps(files.head_of)
    return write_tensors(files.tensors | files.head, metadata=metadata)


def with_digest(job: Any, sha256: str) -> Any:
    """Copy a job with the digest of its initial values; raises ``JobError``."""
    if job.adapter.sha256 not in ("", sha256):
        raise JobError(
            f"adapter.from = {job.adapter.from_} has values with the digest {sha256[:12]}, adapter.sha256 says "
            f"{job.adapter.sha256[:12]}; give the folder as it was, or remove adapter.sha256"
        )
    return dataclasses.replace(job, adapter=dataclasses.replace(job.adapter, sha256=sha256))


def head_problem(metadata: Mapping[str, str], task: str, labels: Sequence[str]) -> str:
    """Say why the head of a file of initial values does not fit a run; empty if it does."""
    if _HEAD not in metadata:
        return "it has no head that can be taken over"
    try:
        own_task, own_labels = json.loads(metadata[_HEAD])
        listed = ", ".join(own_labels)
    except (RecursionError, TypeError, ValueError) as error:
        raise IntegrityError(f"the head of adapter.from is of no task ({error}); copy the folder again") from error
    if own_task != task:
        return f"its head is for {own_task}, the run is {task}"
    if task in NAMED_TASKS and list(labels) != own_labels:
        return f"its head is for {listed}, the run has {', '.join(labels)}"
    return ""


def head_note(metadata: Mapping[str, str], task: str, labels: Sequence[str]) -> str:
    """Say whether the head of a run begins with the values of a file with this metadata; empty without a new head."""
    if task in LANGUAGE_TASKS:
        return ""
    problem = head_problem(metadata, task, labels)
    return f"adapter.from: {problem}; a new head trains" if problem else "adapter.from: the head begins from there too"


# ---- folders --------------------------------------------------------------------------------------------------


def _refused(folder: Path | str, problem: str) -> JobError:
    return JobError(f"adapter.from = {folder} {problem}")


def _result_in(folder: Path) -> Path:
    for model in (folder / MODEL_FOLDER, folder):
        if (model / CONFIG_FILE).is_file():
            raise _refused(folder, f"is a whole model; set model.path = {str(model)!r}, and remove adapter.from")
    if (folder / USERS_FOLDER).is_dir():
        names = sorted(path.name for path in (folder / USERS_FOLDER).iterdir())
        raise _refused(folder, f"has an adapter for each user; give one, such as {folder / USERS_FOLDER / names[0]}")
    inner = folder / ADAPTER_FOLDER if (folder / ADAPTER_FOLDER).is_dir() else folder
    if (inner / BLOCKS_FILE).is_file():
        raise _refused(
            folder,
            "has weights of the blocks themselves and no adapter; put them into a model folder, and give that "
            "as model.path",
        )
    if not any((inner / name).is_file() for name in (ADAPTER_CONFIG_FILE, AUXILIARY_CONFIG_FILE)):
        raise _refused(
            folder, f"has no {ADAPTER_CONFIG_FILE}; give the --out of a run, or a folder of AdapterHub or PEFT"
        )
    return inner


def _object(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise JobError(f"adapter.from: {path} can't be read ({error}); copy the folder again") from error
    if not isinstance(value, dict):
        raise JobError(f"adapter.from: {path} is no table; copy the folder again")
    return value


def _files(folder: Path, unpickle: Unpickle, *choices: Sequence[str]) -> list[TensorFile]:
    """Return one file for each choice, the first of its names that is there; all pickled ones go to one call."""
    paths = []
    for names in choices:
        path = next((path for path in map(folder.joinpath, names) if path.is_file()), None)
        if path is None:
            raise _refused(folder, f"has no {' or '.join(names)}; copy the folder again")
        paths.append(path)
    pickled = [path for path in paths if path.suffix != ".safetensors"]
    converted = dict(zip(pickled, unpickle(pickled), strict=True)) if pickled else {}
    return [TensorFile(converted[path] if path in converted else FilePieces(path), where=str(path)) for path in paths]


def _family(model_type: object, folder: Path) -> Family:
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise _refused(folder, f"is for a model of the type {model_type!r}; supported are {', '.join(FAMILIES)}")
    return family


def _of_auxiliary(folder: Path, config: str, unpickle: Unpickle) -> Folder:
    """Read a result with auxiliary models, whose tensors have the right names."""
    facts = described(_object(folder / AUXILIARY_CONFIG_FILE), where=str(folder / AUXILIARY_CONFIG_FILE))
    library = config_of_library(facts.library["config"]) if facts.library else ""
    ours = library_config(config)
    is_same = sorted(map(repr, facts.parts)) == sorted(map(repr, auxiliary_of(config))) and bool(library) == bool(ours)
    if not is_same or (library and not is_same_adapter(library, ours)):
        has = [f"{part.kind} (alpha {part.alpha:g}, at {', '.join(part.places)})" for part in facts.parts]
        has += [library] if library else []
        raise _refused(folder, f"has {' and '.join(has)}, the job says {config!r}; set adapter.config as there")
    family, head = _family(facts.model_type, folder), _head_of(folder)
    file, *files = _files(folder, unpickle, [ADAPTER_FILE], *([_HEAD_FILES] if head else []))
    return Folder("", _renamed(file, family, facts.name), *_with_head(files, head))


def _of_hub(folder: Path, content: Mapping[str, Any], unpickle: Unpickle) -> Folder:
    config, name = content.get("config"), content.get("name")
    if not isinstance(config, Mapping) or not isinstance(name, str):
        raise _refused(folder, f"has no config and name in {ADAPTER_CONFIG_FILE}; copy the folder again")
    family, head = _family(content.get("model_type"), folder), _head_of(folder)
    file, *files = _files(folder, unpickle, _ADAPTER_FILES, *([_HEAD_FILES] if head else []))
    try:
        text = config_of_library(config)
    except JobError as error:
        raise _refused(folder, f"can't be used: {error}") from error
    return Folder(text, _renamed(file, family, name), *_with_head(files, head))


def _renamed(file: TensorFile, family: Family, name: str) -> dict[str, TensorPieces]:
    """Return the tensors of a file with the adapter's name of a run, and with the prefix of the whole model."""
    pattern = re.compile(rf"\.((?:adapters|loras|refts)\.)?{re.escape(name)}\.")
    tensors = {pattern.sub(rf".\g<1>{_NAME}.", key, count=1): file.tensor(key) for key in file.infos}
    if len(tensors) < len(file.infos):
        raise JobError("adapter.from: two tensors have one name; the folder has several adapters, save one")
    return {key if key.startswith(family.prefix) else family.prefix + key: value for key, value in tensors.items()}


def _head_of(folder: Path) -> _Head | None:
    """Return the head of a folder; None without one that has a task of a run."""
    if not (folder / HEAD_CONFIG_FILE).is_file():
        return None
    content = _object(folder / HEAD_CONFIG_FILE)
    config = content.get("config") or content
    kind = str(config.get("head_type"))
    model_class = str(content.get("model_class"))
    by_class = (task for end, task in _ARCHITECTURES.items() if model_class.endswith(end))
    task = _HEAD_TYPES.get(kind) or next(by_class, "")
    labels = config.get("label2id") or {}
    names = sorted(labels, key=labels.__getitem__) if isinstance(labels, Mapping) else []
    if not task or (task in NAMED_TASKS and [labels[name] for name in names] != list(range(len(names)))):
        return None
    if task == CLASSIFICATION and len(names) == 1:
        task = REGRESSION
    of = (task, tuple(names) if task in NAMED_TASKS else ())
    return _Head(str(content.get("name")), of, bool(content.get("config")))


def _with_head(
    files: Sequence[TensorFile], head: _Head | None
) -> tuple[dict[str, TensorPieces], tuple[str, tuple[str, ...]]]:
    """Return the tensors of a head's file by their names of a run, and its task and classes; none without a head."""
    if head is None:
        return {}, ("", ())
    (file,), start = files, f"heads.{head.name}."
    tensors = {
        f"heads.{_NAME}.{key.removeprefix(start)}" if key.startswith(start) else key: file.tensor(key)
        for key in file.infos
    }
    return tensors, head.of


# ---- PEFT -------------------------------------------------------------------------------------------------------

_LETTERS: Final = {
    **dict.fromkeys(("query", "q_lin", "q_proj"), "q"),
    **dict.fromkeys(("key", "k_lin", "k_proj"), "k"),
    **dict.fromkeys(("value", "v_lin", "v_proj"), "v"),
}
_UP: Final = ("intermediate.dense", "lin1", "c_fc", "up_proj")
_DOWN: Final = ("output.dense", "lin2", "mlp.c_proj", "down_proj")
_NOT_LORA: Final = {
    "use_dora": "its DoRA has other names and shapes",
    "rank_pattern": "it has several ranks",
    "alpha_pattern": "it has several factors",
    "lora_bias": "it has biases",
    "trainable_token_indices": "it trains tokens",
    "target_parameters": "it has LoRA of single parameters",
    "layer_replication": "it has other blocks than its base",
    "alora_invocation_tokens": "it acts on some tokens only",
    "use_qalora": "it groups inputs",
}
_OF_PICTURES: Final = ".vision_"
"""In the names of a vision tower's blocks, whose matrices may be called as those of the text part."""
_FUSED: Final = "c_attn"
"""Query, key and value as one matrix: PEFT has one A for all three, AdapterHub one for each."""


def _of_peft(folder: Path, content: Mapping[str, Any], model: Path, unpickle: Unpickle) -> Folder:
    """Read a folder of PEFT; its head is taken over if ``head_config.json`` beside names its classes."""
    if content["peft_type"] != "LORA":
        raise _refused(folder, f"has peft_type {content['peft_type']!r}; only LORA of PEFT can be taken over")
    reasons = [why for key, why in _NOT_LORA.items() if content.get(key)]
    reasons += ["its biases train"] if content.get("bias", "none") != "none" else []
    reasons += [
        "it changed the base model when it began"
        for start in [content.get("init_lora_weights", True)]
        if start not in (True, False, None, "gaussian", "eva", "orthogonal")
    ]
    if reasons:
        raise _refused(folder, f"can't be taken over from PEFT: {reasons[0]}; merge it into its model and give that")
    if not (model / CONFIG_FILE).is_file():
        raise _refused(folder, f"is of PEFT and is read with the model's config, but {model} is not on this machine")
    base = read_config(model)
    family = FAMILIES[base["model_type"]]
    heads = (*HEAD_MODULES, *family.unused_paths)
    if others := sorted(set(content.get("modules_to_save") or ()) - set(heads)):
        raise _refused(folder, f"has a copy of the whole module {others[0]}; merge it into its model and give that")
    of_head = re.compile(rf"base_model\.model\.(?:{re.escape(family.prefix)})?(?:{'|'.join(heads)})\..+")
    pattern = re.compile(
        rf"(?:.*?\.)?{re.escape(family.block_prefix)}(?P<block>\d+)\.(?P<module>.+)"
        r"\.lora_(?P<half>[AB])\.(?:default\.)?weight"
    )
    in_tower = has_tower(model)
    tensors, head, modules, blocks = dict[str, TensorPieces](), dict[str, TensorPieces](), set[str](), set[int]()
    (file,) = _files(folder, unpickle, PEFT_FILES)
    for key in file.infos:
        if of_head.fullmatch(key):
            head[key.removeprefix("base_model.model.")] = file.tensor(key)
            continue
        if (match := pattern.fullmatch(key)) is None or (in_tower and _OF_PICTURES in key):
            raise _refused(folder, f"has {key}, which is no LoRA of a block; train it again without, or merge it")
        block, module, half = match.groups()
        modules.add(module)
        blocks.add(int(block))
        tensor, name = file.tensor(key), f"{family.prefix}{family.block_prefix}{block}.{module}"
        if (whole := f"{name}.loras.{_NAME}.lora_{half}") in tensors:
            raise _refused(folder, f"has {key} and another one for the same matrix; it has several adapters, save one")
        is_thirds = half == "A" and family.layout.is_merged and module.endswith(_FUSED)
        tensors[whole] = _thrice(tensor) if is_thirds else tensor
    if len(tensors) != 2 * len(modules) * len(blocks) and not family.layout.is_unlike:
        raise _refused(folder, "has LoRA beside other matrices in some blocks than in others; merge it into its model")
    left_out = sorted(set(range(family.dimensions(base).num_blocks)) - blocks)
    config = _peft_config(folder, content, family, modules, left_out)
    known = _head_of(folder)
    if known is None or not head:
        return Folder(config, tensors, *_with_head(_files(folder, unpickle, _HEAD_FILES) if known else [], known))
    form = architecture_head(family.model_type, known.of[0]) if known.is_of_library else None
    return Folder(
        config, tensors, {form.library_name(key) if form else key: value for key, value in head.items()}, known.of
    )


def _thrice(tensor: TensorPieces) -> TensorPieces:
    rows, *rest = tensor.shape
    data = tensor.data
    whole = Pieces(3 * data.size_bytes, lambda: itertools.chain(data, data, data))
    return TensorPieces(tensor.dtype, (3 * rows, *rest), whole)


def _peft_config(
    folder: Path, content: Mapping[str, Any], family: Family, modules: Iterable[str], left_out: Sequence[int]
) -> str:
    """Write PEFT's configuration, without the blocks ``left_out``, as an ``adapter.config``."""
    rank, alpha = content.get("r"), content.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise _refused(folder, f"has r = {rank!r} and lora_alpha = {alpha!r} in {ADAPTER_CONFIG_FILE}; copy it again")
    letters, places = set[str](), set[str]()
    up, down = ("intermediate_lora", "output_lora")
    if family.prefix == "model." and not family.plugged:
        up, down = down, up  # the library's names in the Llama family, see models.family
    roles = {"query": "q", "key": "k", "value": "v", "up": "intermediate_lora", "down": "output_lora"}
    roles_by_name = {name: place for role, place in roles.items() for name in family.layout.matrices_of(role)}
    for module in sorted(modules):
        if family.generic and module in roles_by_name:
            (letters if roles_by_name[module] in "qkv" else places).add(roles_by_name[module])
        elif family.generic:
            raise _refused(
                folder, f"has LoRA beside {module}, where a {family.model_type} has none here; merge it into its model"
            )
        elif (last := module.rpartition(".")[2]) in _LETTERS:
            letters.add(_LETTERS[last])
        elif last == _FUSED:
            letters.update("qkv")
        elif module.endswith(_UP):
            places.add(up)
        elif module.endswith(_DOWN) and not module.startswith("attention."):
            places.add(down)
        else:
            raise _refused(
                folder, f"has LoRA beside {module}, where AdapterHub has none; train it again without, or merge it"
            )
    scale = alpha * math.sqrt(rank) if content.get("use_rslora") else alpha
    described = {"architecture": "lora", "r": rank, "alpha": int(scale) if scale == int(scale) else scale}
    described |= {"attn_matrices": sorted(letters, key="qkv".index)} if letters else {"selfattn_lora": False}
    described |= {"leave_out": list(left_out)} if left_out else {}
    return config_of_library(described | dict.fromkeys(places, True))


def _check_invertible(folder: Path, initial: Folder, config: str) -> None:
    """Refuse an invertible adapter without some of its tensors, or tensors of one that the configuration lacks."""
    ends = [name.partition(f"{INVERTIBLE}.{_NAME}.")[2] for name in initial.tensors if f"{INVERTIBLE}." in name]
    needed = [] if invertible_of(config) is None else sorted(INVERTIBLE_TENSORS)
    if sorted(ends) != needed:
        raise _refused(
            folder,
            f"has {len(ends)} tensors of an invertible adapter, adapter.config = {config!r} needs {len(needed)}; copy "
            "the folder again",
        )


def _check_model(folder: Path, initial: Folder, model: Path) -> None:
    """Refuse blocks that the model does not have, if the model's folder is on this machine."""
    if not (model / CONFIG_FILE).is_file():
        return
    config = read_config(model)
    family = FAMILIES[config["model_type"]]
    start, blocks = f"{family.prefix}{family.block_prefix}", family.dimensions(config).num_blocks
    for name in initial.tensors:
        if name.startswith(f"{family.prefix}{INVERTIBLE}."):
            continue
        number = name.removeprefix(start).partition(".")[0]
        if not name.startswith(start) or not number.isdecimal() or int(number) >= blocks:
            raise _refused(
                folder,
                f"has {name}, the model {model.name} has {blocks} blocks {start}0 to {start}{blocks - 1}; take the "
                "adapter of this model",
            )


# ---- the technique ------------------------------------------------------------------------------------------------


def check_job(job: Any) -> None:
    """Refuse initial values where nothing of the kind trains, or where they would count several times."""
    if not job.adapter.from_:
        return
    if trains_own_weights(job.adapter.config) or method_class(job.train.method).full_parameters:
        raise JobError(
            f"adapter.from = {job.adapter.from_!r} and adapter.config = {job.adapter.config!r} can't go together: the "
            "model's own weights train; give the folder of a trained model as model.path"
        )
    if job.offload.chosen_adapters:
        raise JobError(
            "adapter.from and offload.adapters can't go together: the values are of one kind of adapters; leave one out"
        )
    if job.offload.users == COLLABORATION:
        raise JobError(
            "adapter.from and offload.users = 'collaboration' can't go together: the sum of all users' adapters would "
            "have the values once for each user; set offload.users = 'joint' or 'alone'"
        )


def courses(job: Any, course: Course, nodes: Sequence[Any]) -> tuple[Course]:
    """Return the course with the digest of the initial values; raises ``JobError``."""
    if job.adapter.from_ and not job.adapter.sha256:
        raise JobError(f"adapter.from = {job.adapter.from_!r} was not read; train with 'ringtune train', which does")
    return (dataclasses.replace(course, initial=job.adapter.sha256),)


def course_lines(course: Course) -> list[str]:
    """Name the initial values; nothing where they are new."""
    return [f"adapters begin from adapter.from, digest {course.initial[:12]}"] if course.initial else []


TECHNIQUE: Final[Technique] = Technique(
    name="initial_adapter",
    later_keys={"adapter.from": "", "adapter.sha256": ""},
    unused_keys=lambda job: ("adapter.from",),  # its digest says all
    check_job=check_job,
    courses=courses,
    course_lines=course_lines,
)
