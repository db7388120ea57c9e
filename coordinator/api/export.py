"""Export of a run's adapter or model: its folder with a model card, checked, and without paths of this machine.

The folder is written under a temporary name and renamed when complete, so a full disk leaves no incomplete folder.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from coordinator.api.gguf import LORA_NAME, MODEL_NAME, MODELFILE, check_model, modelfile, write_lora, write_model
from coordinator.api.model_card import Card, adapter_card, base_is_tower, gguf_card, peft_card, whole_model_card
from coordinator.api.text_process import LineProcess
from coordinator.client.saved_run import (
    SavedRun,
    adapter_of,
    as_of,
    check_can_merge,
    merge_into,
    read_run,
    read_run_file,
    require_user,
)
from ringtune.errors import IntegrityError, StorageError, UsageError
from ringtune.models.adapter_config import FULL, INVERTIBLE, INVERTIBLE_TENSORS, trains_own_weights
from ringtune.models.adapter_support import merge_refusal, peft_refusal
from ringtune.models.architecture_heads import architecture_head
from ringtune.models.auxiliary_models import AdapterDescription, described, is_of_library, own_tensors
from ringtune.models.conversations import BEGIN, named_template
from ringtune.models.families import family_named
from ringtune.models.family import FROZEN_HEAD_TASKS, NAMED_TASKS, BlockLayout
from ringtune.models.folder import (
    CONFIG_FILE,
    INDEX_FILE,
    base_tensors,
    id_of_folder,
    model_dimensions,
    read_config,
    read_headers,
)
from ringtune.models.gguf import folder_of_gguf
from ringtune.models.peft import PEFT_FILES, peft_files
from ringtune.models.result_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    AUXILIARY_CONFIG_FILE,
    BLOCKS_FILE,
    HEAD_CONFIG_FILE,
    HEAD_FILE,
    INTERFACE_FILE,
    model_result,
)
from ringtune.models.tokenizer import TEMPLATE_FILE, WHOLE_FILE
from ringtune.storage.durable import make_folder, rename_durably, write_pieces_durably
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.storage.strict import nearest, read_json
from ringtune.storage.tensor_files import TensorFile, read_safetensors_header

_STOPS_S: Final = 300.0
_BLOCK = re.compile(r"\.(\d+)\.")
_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def check_adapter(run: SavedRun, config: Mapping[str, Any], *, where: str) -> None:
    """Refuse an adapter with other tensors than config and plan say; raises ``IntegrityError``.

    ``config`` is the content of the file ``where``: ``adapter_config.json``, or ``adapter.json`` of auxiliary models.
    """
    tensors = read_safetensors_header(run.saved / "adapter.safetensors")
    facts = described(config, where=where) if where == AUXILIARY_CONFIG_FILE else None
    if facts is None and not (isinstance(config.get("config"), dict) and config.get("model_type")):
        raise IntegrityError("adapter_config.json does not describe an adapter; copy the run's folder again")
    _check_invertible(tensors, is_expected=run.plan.course.invertible)
    blocks: dict[int, set[str]] = {}
    for name in tensors:
        if f".{INVERTIBLE}." in name:
            continue
        match = _BLOCK.search(name)
        if match is None:
            raise IntegrityError(f"adapter.safetensors has {name}, which belongs to no block; train again")
        blocks.setdefault(int(match[1]), set()).add(name[match.end() :])
    num_blocks = run.plan.course.num_blocks
    if facts is None:
        layout, leaves_out = family_named(config["model_type"], where=where).layout, _leaves_blocks_out(config)
        for alike in _alike(blocks, layout):
            _check_alike(alike, num_blocks, leaves_out=leaves_out or layout.is_unlike)
    else:
        library = {
            block: {name for name in names if is_of_library(name, facts.name)} for block, names in blocks.items()
        }
        _check_own({block: names - library[block] for block, names in blocks.items()}, num_blocks, facts)
        if facts.library is not None:
            some = {block: names for block, names in library.items() if names}
            _check_alike(some, num_blocks, leaves_out=_leaves_blocks_out(facts.library))
    if not blocks or max(blocks) >= num_blocks:
        raise IntegrityError(
            f"adapter.safetensors has blocks {sorted(blocks)}, the model has {num_blocks}; it mixes runs"
        )


def _check_invertible(tensors: Iterable[str], *, is_expected: bool) -> None:
    saved = {name.partition(f".{INVERTIBLE}.")[2].partition(".")[2] for name in tensors if f".{INVERTIBLE}." in name}
    expected = set(INVERTIBLE_TENSORS if is_expected else ())
    if saved != expected:
        raise IntegrityError(
            f"adapter.safetensors has {len(saved)} tensors of an invertible adapter, the run has {len(expected)}; copy "
            "the run's folder again"
        )


def _alike(blocks: Mapping[int, set[str]], layout: BlockLayout) -> list[dict[int, set[str]]]:
    """Group the blocks of a family by their matrices, without the tensors of matrices that some of a group may lack."""
    instead = tuple(path for _, path in layout.instead)
    optional = tuple(f"{getattr(layout, role)}." for role in layout.optional)
    groups: dict[bool, dict[int, set[str]]] = {}
    for block, names in blocks.items():
        kept = {name for name in names if not name.startswith(optional)}
        groups.setdefault(any(name.startswith(instead) for name in names), {})[block] = kept
    return list(groups.values()) or [{}]


def _check_alike(blocks: Mapping[int, set[str]], num_blocks: int, *, leaves_out: bool) -> None:
    """Refuse adapters of the library if a block lacks tensors that others have."""
    expected = set().union(*blocks.values())
    for block in range(num_blocks):
        missing = sorted(expected - blocks.get(block, set()))
        if missing and not (block not in blocks and leaves_out):
            raise IntegrityError(
                f"adapter.safetensors lacks {missing[0]} of block {block}; copy the run's folder again"
            )
    if not expected:
        raise IntegrityError("adapter.safetensors lacks all tensors of the library's adapters; copy the folder again")


def _check_own(blocks: Mapping[int, set[str]], num_blocks: int, facts: AdapterDescription) -> None:
    """Refuse auxiliary models if a block has another number of tensors than their description says."""
    for block in range(num_blocks):
        count, expected = len(blocks.get(block, ())), own_tensors(facts.parts, block)
        if count != expected:
            raise IntegrityError(
                f"adapter.safetensors has {count} tensors of the auxiliary models of block {block}, {expected} are "
                f"described in {AUXILIARY_CONFIG_FILE}; copy the run's folder again"
            )


def _leaves_blocks_out(value: Any) -> bool:
    """Whether a configuration, or a part of it, is for some blocks only."""
    if isinstance(value, dict):
        named = any(isinstance(value.get(key), list) and value[key] for key in ("leave_out", "layers"))
        return named or any(_leaves_blocks_out(part) for part in value.values())
    return isinstance(value, list) and any(_leaves_blocks_out(part) for part in value)


def check_head(run: SavedRun, config: Mapping[str, Any]) -> None:
    """Refuse a head that is damaged or has other classes than the plan; ``config`` is that of ``head_config.json``.

    Raises ``IntegrityError``: a file is damaged, or the classes differ.
    """
    tensors = read_safetensors_header(run.saved / "model_head.safetensors")
    if run.job.model.task not in NAMED_TASKS:
        return
    described = config.get("config")
    ids = (described if isinstance(described, dict) else config).get("label2id")
    labels = run.plan.course.labels
    if ids != {label: index for index, label in enumerate(labels)}:
        raise IntegrityError(f"head_config.json has the classes {ids}, the run had {labels}; it mixes runs")
    if len(labels) not in {info.shape[0] for info in tensors.values() if info.shape}:
        raise IntegrityError(
            f"model_head.safetensors has no output of {len(labels)} classes; copy the run's folder again"
        )


def checked_id(base_model: str) -> str:
    """Return the id of a base model, ``name`` or ``owner/name``; raises ``UsageError``."""
    if not _MODEL_ID.fullmatch(base_model):
        raise UsageError(f"{base_model!r} is no model id; give one with --base-model NAME or OWNER/NAME")
    return base_model


def private_paths(run: SavedRun) -> tuple[str, ...]:
    """Return the paths that an export must not contain: of model, data, run and home."""
    data = run.job.data
    named = [run.job.model.path, data.train, data.eval]
    parents = [str(Path(path).parent) for path in named if path]
    folders = [str(run.folder.resolve()), str(Path.home())]
    paths = {path for path in (*named, *parents, *folders) if len(Path(path).parts) > 2 or path in named}
    return tuple(sorted(path for path in paths if path.startswith("/")))


def check_private(name: str, text: str, paths: Iterable[str]) -> None:
    """Refuse a text with one of these paths; raises ``IntegrityError``."""
    for path in paths:
        if path in text:
            raise IntegrityError(f"{name} names the local path {path}; remove it there and export again")


def model_contents(
    run: SavedRun, base_model: str, *, saved: Path | None = None, what: str = "all parameters"
) -> tuple[dict[str, Pieces], Card]:
    """Check the model; return the content of its files by name, and its card.

    ``base_model`` is the id of the model that it was trained from, empty = the name of its folder; ``saved`` = None:
    the run's own result; ``what`` names the trained part on the card.

    Raises:
        UsageError: ``base_model`` is no id.
        ModelError: a tensor is missing, or has another shape than the config says.
        IntegrityError: a file is damaged, or the model is not of this run.
    """
    saved = saved or run.saved
    config = read_run_file(saved / CONFIG_FILE)
    _check(run, saved, config)
    base_model = checked_id(base_model or id_of_folder(Path(run.job.model.path)))
    names = [CONFIG_FILE, *_weight_files(saved), *(name for name in model_result().more if (saved / name).is_file())]
    contents: dict[str, Pieces] = {name: FilePieces(saved / name) for name in names}
    if chosen := run.job.data.template:  # the model answers by the template that it has learned
        contents[TEMPLATE_FILE] = Pieces.of(_template_alone(saved, chosen).encode())
    digests = _digests(contents)
    return contents, whole_model_card(run, base_model=base_model, config=config, digests=digests, what=what)


def _template_alone(saved: Path, chosen: str) -> str:
    """Return a chat template for users who give it ``bos_token`` also where the tokenizer begins no text with it."""
    path, text = saved / WHOLE_FILE, named_template(saved, chosen)
    processor = (read_json(path) if path.is_file() else {}).get("post_processor") or {}
    steps = processor.get("processors", [processor])
    forms = (form for step in steps for form in step.values() if isinstance(form, list) and form)
    begins = any("SpecialToken" in form[0] for form in forms)
    return text if begins else text.replace(BEGIN, "")


def _check(run: SavedRun, saved: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model that lacks a tensor, or has other sizes or classes than the plan."""
    known = read_config(saved)
    base_tensors(saved, known)
    size, course = model_dimensions(known), run.plan.course
    if (size.num_blocks, size.hidden) != (course.num_blocks, course.hidden_size):
        raise IntegrityError(
            f"{CONFIG_FILE} has {size.num_blocks} blocks of width {size.hidden}, the run had {course.num_blocks} of "
            f"{course.hidden_size}; it mixes runs"
        )
    classes = {label: index for index, label in enumerate(course.labels)}
    if run.job.model.task in NAMED_TASKS and config.get("label2id") != classes and _head_classes(config) != classes:
        raise IntegrityError(f"{CONFIG_FILE} has the classes {config.get('label2id')}, the run had {course.labels}")


def _head_classes(config: Mapping[str, Any]) -> object:
    heads = config.get("prediction_heads")
    classes = [head.get("label2id") for head in heads.values()] if isinstance(heads, dict) else []
    return classes[0] if classes else None


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the weight files, with their index if there is one."""
    files = {stored.path.name for stored in read_headers(folder).values()}
    return sorted(files) + ([INDEX_FILE] if len(files) > 1 or (folder / INDEX_FILE).is_file() else [])


_CARD = "README.md"


ADAPTER_HUB: Final = "adapterhub"
PEFT: Final = "peft"
MERGED: Final = "merged"
GGUF: Final = "gguf"
GGUF_LORA: Final = "gguf-lora"
FORMATS: Final = (ADAPTER_HUB, PEFT, MERGED, GGUF, GGUF_LORA)
"""Forms of an export: an adapter, a whole model with it, such a model for llama.cpp, or an adapter for that."""


class Exported(NamedTuple):
    """A written folder.

    Attributes:
        sha256: of every file, by name.
        library: that loads it, ``model_card.OURS`` where only a job begins with it.
    """

    sha256: dict[str, str]
    library: str


def export_run(
    folder: Path,
    target: Path,
    *,
    base_model: str = "",
    merge: bool = False,
    model: Path | None = None,
    user: str = "",
    form: str = ADAPTER_HUB,
) -> Exported:
    """Write the adapter or model of a run, with a model card, to ``target``.

    Args:
        folder: of the run.
        target: absent or empty.
        base_model: id of the base model, ``name`` or ``owner/name``; default: the name of its folder.
        merge: write a whole model with the adapter merged into its weights, instead of the adapter.
        model: folder of the base model for a merge or ``gguf-lora``; None = the run's own.
        user: of the adapters, if each user has their own; empty: see ``require_user``.
        form: one of ``FORMATS``; ``merged`` and ``gguf`` merge.

    Raises:
        UsageError: the run has no result, or no adapter; the target exists; ``base_model`` is no id; the adapter can't
            be merged, or is none of PEFT; the model is none of llama.cpp; or a user is missing or unknown.
        IntegrityError: the result is damaged, or contains a local path.
        StorageError: it can't be written.
    """
    run = read_run(folder)
    if trains_own_weights(run.job.adapter.config) and not run.result.is_model:
        raise UsageError(
            f"{run.folder} has no adapter to export: with adapter.config = {FULL!r} the blocks' own weights trained; "
            f"they are in {run.saved / BLOCKS_FILE}, load them with load_state_dict(..., strict=False)"
        )
    require_user(run, user)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already; choose another --out or remove it")
    if form not in FORMATS:
        raise UsageError(f"--format {form!r} is not known; {nearest(form, FORMATS)}")
    merge = merge or form == MERGED
    if merge and form in (PEFT, GGUF_LORA):
        raise UsageError(f"--merge writes a whole model and no adapter; leave --merge or --format {form} out")
    if form in (GGUF, GGUF_LORA) and run.job.model.task not in FROZEN_HEAD_TASKS:
        raise UsageError(
            f"{run.folder} is of the task {run.job.model.task}, GGUF is for language models; leave --format {form} out"
        )
    if form == GGUF_LORA:
        with adapter_of(run, user) as chosen:
            return _export_lora(chosen, target, base_model, model)
    if not merge and form != GGUF:
        if form == PEFT:
            _check_peft(run)
        make = model_contents if run.result.is_model else _peft_contents if form == PEFT else _adapter_contents
        with adapter_of(run, user) as chosen:
            return _write(chosen, *make(chosen, base_model), target, is_model=run.result.is_model)
    if not run.result.is_model:
        check_can_merge(run)
    return _export_merged(as_of(run, user), target, base_model, model, user, form)


def _export_merged(run: SavedRun, target: Path, base_model: str, model: Path | None, user: str, form: str) -> Exported:
    """Start a process that writes the merged model beside the target, and export that."""
    base = run.saved if run.result.is_model else folder_of_gguf(model or Path(run.job.model.path))
    if form == GGUF and base.is_dir():
        check_model(base)
    with _working_folder(target) as merged:
        what, saved = "all parameters", run.saved
        if not run.result.is_model:
            options = {"--model": str(model or ""), "--user": user}
            merge_into(run, merged, *(word for pair in options.items() if pair[1] for word in pair))
            what, saved = f"adapter configuration `{run.job.adapter.config}`, merged into the weights", merged
        if form == GGUF:
            contents, card = _gguf_contents(run, base_model, saved, merged / MODEL_NAME, what=what)
        else:
            contents, card = model_contents(run, base_model, saved=saved, what=what)
        return _write(run, contents, card, target, is_model=True)


def _gguf_contents(
    run: SavedRun, base_model: str, saved: Path, path: Path, *, what: str
) -> tuple[dict[str, Pieces], Card]:
    """Write a model as the GGUF file ``path``; return the content of all files by name, and the card."""
    _check(run, saved, read_run_file(saved / CONFIG_FILE))
    name, chosen = checked_id(base_model or id_of_folder(Path(run.job.model.path))), run.job.data.template
    template = named_template(saved, chosen) if chosen else ""
    write_model(saved, path, name=name, template=template)
    text = modelfile(f"./{MODEL_NAME}", stops=stop_texts(run, saved, path.parent))
    contents: dict[str, Pieces] = {MODEL_NAME: FilePieces(path), MODELFILE: Pieces.of(text.encode())}
    card = gguf_card(run, base_model=name, config=read_config(saved), what=what, digests=_digests(contents))
    return contents, card


def _export_lora(run: SavedRun, target: Path, base_model: str, model: Path | None) -> Exported:
    """Write the LoRA as GGUF beside the target, and export that."""
    _check_peft(run, GGUF_LORA)
    base = folder_of_gguf(model or Path(run.job.model.path))
    if not base.is_dir():
        raise UsageError(f"the base model {base} is not there; name its folder with --model")
    with _working_folder(target) as folder:
        files, _ = _peft_contents(run, base_model, in_tower=False)
        described, path = json.loads(bytes(files[ADAPTER_CONFIG_FILE])), folder / LORA_NAME
        write_lora(TensorFile(files[PEFT_FILES[0]], where=PEFT_FILES[0]), described, read_config(base), path)
        text = modelfile("./base.gguf", adapter=f"./{LORA_NAME}", stops=stop_texts(run, base, folder))
        contents: dict[str, Pieces] = {LORA_NAME: FilePieces(path), MODELFILE: Pieces.of(text.encode())}
        name, what = described["base_model_name_or_path"], f"adapter configuration `{run.job.adapter.config}`"
        card = gguf_card(run, base_model=name, config=read_config(base), what=what, digests=_digests(contents))
        return _write(run, contents, card, target, is_model=False)


def stop_texts(run: SavedRun, model: Path, folder: Path) -> list[str]:
    """Ask a process with the tokenizer of a model which texts end its answers; ``folder`` gets the process's log."""
    command = [sys.executable, "-P", "-m", "edge.runtime", "answer_ends", str(run.folder / "job.toml"), str(model)]
    late = f"the tokenizer of {model} has not said after {_STOPS_S:g} s what ends an answer; export again"
    with LineProcess("reading the tokenizer", command, folder / "log") as process:
        (line,) = process.lines(_STOPS_S, late)
    return list(line["stops"])


@contextmanager
def _working_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside the target, which is removed at the end; raises ``StorageError``."""
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        make_folder(target.parent)
        folder.mkdir()
        yield folder
    except OSError as error:
        raise StorageError(f"can't write {target}: {error.strerror}; choose another --out or make room") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(run: SavedRun, contents: Mapping[str, Pieces], card: Card, target: Path, *, is_model: bool) -> Exported:
    """Write files and card to a folder beside the target, check them, and rename the folder.

    Files that contain a path of this machine are refused.
    """
    contents = {**contents, _CARD: Pieces.of(card.text.encode(errors="replace"))}
    paths = private_paths(run)
    for name, content in contents.items():
        if not (is_model and name.endswith((".safetensors", ".gguf"))):  # weights of a model have no paths
            check_private(name, bytes(content).decode("utf-8", errors="replace"), paths)
    with _working_folder(target) as part:
        for name, content in contents.items():
            write_pieces_durably(part / name, content)
        digests = {name: FilePieces(part / name).sha256() for name in contents}
        if digests != _digests(contents):
            raise IntegrityError(f"{part} does not hold what was written; check the disk")
        if target.exists():
            target.rmdir()
        rename_durably(part, target)
    return Exported(digests, card.library)


def _check_peft(run: SavedRun, form: str = PEFT) -> None:
    config = run.job.adapter.config
    if run.result.is_model:
        raise UsageError(f"{run.folder} has a whole model and no adapter; leave --format {form} out")
    if problem := peft_refusal(config):
        merged = "--merge" if form == PEFT else f"--format {GGUF}"
        remedy = f"leave --format {form} out" if merge_refusal(config) else f"write a merged model with {merged}"
        raise UsageError(f"adapter.config = {config!r} can't be a folder of PEFT: {problem}; {remedy}")
    if form == PEFT and base_is_tower(run) and run.job.model.task not in FROZEN_HEAD_TASKS:
        raise UsageError(
            f"the base {Path(run.job.model.path).name} is a model of texts and pictures, which has no head for "
            f"{run.job.model.task}; write a text model with --merge"
        )


def _peft_contents(run: SavedRun, base_model: str, *, in_tower: bool | None = None) -> tuple[dict[str, Pieces], Card]:
    """Check the adapter; return the content of a PEFT folder by file name, and its card.

    ``in_tower``: whether it is for the whole model of texts and pictures; None = if the base is one.
    """
    in_tower = base_is_tower(run) if in_tower is None else in_tower
    contents, _ = _adapter_contents(run, base_model)
    config, task = json.loads(bytes(contents[ADAPTER_CONFIG_FILE])), run.job.model.task
    model_type, name = family_named(config["model_type"], where=ADAPTER_CONFIG_FILE).model_type, config["model_name"]
    head = TensorFile(contents[HEAD_FILE], where=HEAD_FILE) if HEAD_FILE in contents else None
    files = peft_files(
        TensorFile(contents[ADAPTER_FILE], where=ADAPTER_FILE),
        {key: head.tensor(key) for key in head.infos} if head else {},
        config=run.job.adapter.config,
        model_type=model_type,
        task=task,
        num_blocks=run.plan.course.num_blocks,
        base_model=name,
        in_tower=in_tower,
    )
    beside = (HEAD_CONFIG_FILE, *(() if architecture_head(model_type, task) else (HEAD_FILE,)))
    files |= {key: contents[key] for key in beside if key in contents}
    digests = _digests(files)
    return files, peft_card(run, base_model=name, model_type=model_type, digests=digests)


def _adapter_contents(run: SavedRun, base_model: str) -> tuple[dict[str, Pieces], Card]:
    """Check the adapter; return the content of its files by name, and its card."""
    names = (*run.result.files, *(name for name in run.result.more if (run.saved / name).is_file()))
    configs = {name: read_run_file(run.saved / name) for name in names if name.endswith(".json")}
    adapter = configs[names[0]]
    check_adapter(run, adapter, where=names[0])
    if "head_config.json" in configs:
        check_head(run, configs["head_config.json"])
    base_model = checked_id(base_model or str(adapter.get("model_name", "")))
    contents: dict[str, Pieces] = {name: FilePieces(run.saved / name) for name in names}
    for name, config in configs.items():
        if name != INTERFACE_FILE:
            text = json.dumps({**config, "model_name": base_model}, indent=2)
            contents[name] = Pieces.of(f"{text}\n".encode())
    digests = _digests(contents)
    return contents, adapter_card(run, base_model=base_model, adapter=adapter, digests=digests)


def _digests(contents: Mapping[str, Pieces]) -> dict[str, str]:
    return {name: content.sha256() for name, content in contents.items()}
