"""Result of a run, the folder of an adapter or of a whole model: each node's part, and its load at a node.

Every node saves the trained tensors of its blocks under their names in the whole model; the coordinator merges the
files without torch. The node with the newest head adds the head and the descriptions.

=================  ============================================  ======================================================
what trained       folder                                        loads with
=================  ============================================  ======================================================
adapters           AdapterHub's, with the library's configs      ``load_adapter(folder, use_safetensors=True,
                                                                 set_active=True)``, into an ``AutoAdapterModel`` where
                                                                 a head was trained, else into the pretrained model
auxiliary models   the same two files, also with the library's   ``edge.model.auxiliary.load_auxiliary``
                   adapters; ``adapter.json`` describes them
                   (``ringtune.models.auxiliary_models``)
blocks' own        ``blocks.safetensors`` in place of the        ``load_state_dict(tensors, strict=False)``, and the
weights            adapter                                       head with ``load_head``
all parameters     transformers', with config and tokenizer      ``from_pretrained``
=================  ============================================  ======================================================

Some heads of AdapterHub equal the head of a transformers architecture. Such a head is saved under the architecture's
names, so that ``AutoModelForSequenceClassification`` and its like load the whole result, and so does
``AutoAdapterModel``, which converts the names. Any other head keeps AdapterHub's names, which only ``AutoAdapterModel``
reads. In BERT the first of AdapterHub's two layers is the pooler of the base model. A plugged-in model has only the
architecture's head: ``load_adapter`` loads it with the adapters.

A whole model has embedding, head and untrained tensors (a pooler) from the node with the newest head; a tensor tied to
the token table is in no part.

At a load every node gets the whole folder and reads only the tensors that it would save itself, so a file can't change
a weight that does not train.

Source: transformers 4.57, the ``For...`` classes; adapters 1.3.0, ``head_utils.STATIC_TO_FLEX_HEAD_MAP`` and
``PredictionHeadLoader`` for a model with a static head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from edge.model.adapters import description, interface
from edge.model.auxiliary import deltas_of
from edge.model.prediction_heads import HEAD, head_config
from edge.model.skeleton import ADAPTER, Skeleton
from edge.model.tensor_files import SafetensorsFiles, fill, pieces_of, require_finite_values
from ringtune.errors import IntegrityError, ModelError
from ringtune.models.adapter_config import INVERTIBLE
from ringtune.models.architecture_heads import HEAD_PREFIX, architecture_head
from ringtune.models.auxiliary_models import describe, is_of_library
from ringtune.models.folder import (
    CONFIG_FILE,
    MODEL_SIDE_FILES,
    WEIGHTS_FILE,
    StoredTensor,
    base_name,
    read_headers,
    with_old_rope,
)
from ringtune.models.preprocessor import PREPROCESSOR_FILE
from ringtune.models.result_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    AUXILIARY_CONFIG_FILE,
    BLOCKS_FILE,
    HEAD_CONFIG_FILE,
    HEAD_FILE,
    INTERFACE_FILE,
    of_user,
)
from ringtune.models.text_towers import is_tower, text_values
from ringtune.models.tokenizer import SETTINGS_FILE, TEMPLATE_FILE, chat_templates, read_settings_table, template_files
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.storage.strict import MAX_GIVEN_BYTES
from ringtune.storage.tensor_files import TensorFile, TensorPieces, write_tensors
from ringtune.techniques.initial_adapter import head_problem

Tensors = dict[str, torch.Tensor]


def result_files(
    skeleton: Skeleton,
    task: str,
    folder: Path,
    *,
    without_blocks: Collection[int],
    with_head: bool,
    merged: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Pieces]:
    """Make this node's part of a run's result: of a whole model where all parameters train, else of an adapter folder.

    Tensors are read when a file is iterated. There is no file without a tensor, and none of a frozen head.

    ``skeleton`` has hosted blocks only, except ``without_blocks``. ``with_head``: also the head and the configs;
    with full parameters the embedding too. ``merged`` has merged adapters of hosted blocks, by block and name.
    Raises ``DivergedError`` for a weight of a whole model that is not finite.
    """
    if skeleton.full_parameters:
        tensors = model_tensors(skeleton, task, without_blocks=without_blocks, with_owner=with_head)
        require_finite_values(tensors, "the model")
        return model_files(skeleton, task, folder, tensors, with_owner=with_head)
    saved = saved_tensors(skeleton, without_blocks=without_blocks, with_head=with_head)
    if merged:
        prefix = _blocks_prefix(skeleton)
        saved.setdefault(ADAPTER_FILE, {}).update({f"{prefix}{name}": value for name, value in merged.items()})
    return _with_configs(skeleton, saved, with_head=with_head)


def users_files(
    skeleton: Skeleton,
    sets: Mapping[str, Tensors],
    *,
    without_blocks: Collection[int],
    with_head: bool,
    others: Mapping[str, Skeleton] = MappingProxyType({}),
) -> dict[str, Pieces]:
    """Make the files of a run in which each user has adapters of their own; tensors are read when a file is iterated.

    Args:
        skeleton: with hosted blocks only; its modules may have any set, or have been removed.
        sets: user -> tensors of hosted blocks, by block and name; also for users without a tensor here. Other tensors
            of hosted blocks, such as the adapters of private blocks, are in every user's file.
        without_blocks: hosted blocks to leave out.
        with_head: see ``result_files``.
        others: user with another kind of adapters -> the hosted blocks with that kind.

    Returns:
        Name to content: ``users/NAME/adapter.safetensors`` of each user, and the common files once. A user with another
        kind also has its description.

    Raises:
        DivergedError: a weight of a user is not finite.
        PlanError: a user's name is not allowed.
    """
    trained = saved_tensors(skeleton, without_blocks=without_blocks, with_head=with_head)
    common = trained.pop(ADAPTER_FILE, {})
    files = _with_configs(skeleton, trained, with_head=with_head)
    of_kind: dict[int, Tensors] = {id(skeleton): common}
    for user, tensors in sets.items():
        require_finite_values(tensors, f"user {user}")
        kind = others.get(user, skeleton)
        if id(kind) not in of_kind:
            saved = saved_tensors(kind, without_blocks=without_blocks, with_head=False)
            of_kind[id(kind)] = saved.get(ADAPTER_FILE, {})
        if by_name := _set_by_name(kind, of_kind[id(kind)], tensors, without_blocks):
            files[of_user(user, ADAPTER_FILE)] = _written(by_name)
        if with_head and user in others:
            files |= {of_user(user, name): content for name, content in _descriptions(kind).items()}
    return files


def _set_by_name(
    skeleton: Skeleton, common: Mapping[str, torch.Tensor], tensors: Tensors, without_blocks: Collection[int]
) -> Tensors:
    """Return a user's set and the tensors common to all users, by name in the whole model."""
    prefix, names = _blocks_prefix(skeleton), dict[int, str]()  # a file may have a parameter under a second name
    for index, block in enumerate(skeleton.blocks):
        names |= {value.data_ptr(): f"{index}.{name}" for name, value in block.named_parameters()}
    unwanted = tuple(f"{block}." for block in without_blocks)
    by_name = {name: tensors.get(names.get(value.data_ptr(), ""), value) for name, value in common.items()}
    return by_name | {f"{prefix}{name}": value for name, value in tensors.items() if not name.startswith(unwanted)}


def _blocks_prefix(skeleton: Skeleton) -> str:
    return f"{skeleton.model.base_model_prefix}.{skeleton.layout.blocks_path}."


def _invertible_prefix(skeleton: Skeleton) -> str:
    return f"{skeleton.model.base_model_prefix}.{INVERTIBLE}."


def _hosted_prefixes(skeleton: Skeleton, *, is_owner: bool) -> tuple[str, ...]:
    """Return the prefixes of the tensors of hosted blocks, and at an owner of an invertible adapter."""
    prefix = _blocks_prefix(skeleton)
    hosted = tuple(f"{prefix}{index}." for index, block in enumerate(skeleton.blocks) if list(block.parameters()))
    return (*hosted, _invertible_prefix(skeleton)) if is_owner else hosted


def _with_configs(skeleton: Skeleton, tensors_of: Mapping[str, Tensors], *, with_head: bool) -> dict[str, Pieces]:
    """Write these tensors to files, and with the head the configs."""
    files = {name: _written(tensors) for name, tensors in tensors_of.items()}
    if with_head:
        files |= _descriptions(skeleton)
        if skeleton.layout.plugged and not skeleton.auxiliary and not skeleton.own_weights:
            files[INTERFACE_FILE] = Pieces.of(interface(skeleton.layout))  # a family without a class in AdapterHub
    if HEAD_FILE in files:
        files[HEAD_CONFIG_FILE] = Pieces.of(_head(skeleton)[1])
    return files


def _written(tensors: Mapping[str, torch.Tensor]) -> Pieces:
    return write_tensors({key: pieces_of(value) for key, value in tensors.items()}, metadata={"format": "pt"})


def _descriptions(skeleton: Skeleton) -> dict[str, Pieces]:
    """Write the description of the adapter; nothing where the blocks' own weights train."""
    if skeleton.own_weights:
        return {}
    library = description(skeleton.parts, skeleton.base, skeleton.layout, name=ADAPTER) if skeleton.parts else b"null"
    if not skeleton.auxiliary:
        return {ADAPTER_CONFIG_FILE: Pieces.of(library)}
    described = describe(
        skeleton.auxiliary,
        name=ADAPTER,
        model_type=skeleton.layout.model_type,
        model_name=skeleton.model.config.name_or_path,
        library=json.loads(library),
    )
    return {AUXILIARY_CONFIG_FILE: _json(described)}


def saved_tensors(skeleton: Skeleton, *, without_blocks: Collection[int], with_head: bool) -> dict[str, Tensors]:
    """Return the tensors of each file, by name; see ``result_files``. An invertible adapter is with the head."""
    prefix = _blocks_prefix(skeleton)
    unwanted = tuple(f"{prefix}{block}." for block in without_blocks)
    whole = _own_tensors(skeleton) | _adapter(skeleton)
    unwanted += () if with_head else (_invertible_prefix(skeleton),)
    adapter = {name: value for name, value in whole.items() if not name.startswith(unwanted)}
    files = {BLOCKS_FILE if skeleton.own_weights else ADAPTER_FILE: adapter}
    if with_head:
        frozen = {value.data_ptr() for value in skeleton.model.head.parameters() if not value.requires_grad}
        files[HEAD_FILE] = {name: value for name, value in _head(skeleton)[0].items() if value.data_ptr() not in frozen}
    return {name: tensors for name, tensors in files.items() if tensors}


def _own_tensors(skeleton: Skeleton) -> Tensors:
    """Return the trained tensors of hosted blocks by name: of auxiliary models, or of own weights."""
    prefix, tensors = _blocks_prefix(skeleton), Tensors()
    for index, block in enumerate(skeleton.blocks):
        parameters = dict(block.named_parameters())
        if skeleton.auxiliary:
            names = [f"{path}.{name}" for path, delta in deltas_of(block) for name, _ in delta.named_parameters()]
        else:
            names = [name for name in skeleton.own_weights if name in parameters]
        tensors |= {f"{prefix}{index}.{name}": parameters[name].detach() for name in names}
    return tensors


def _adapter(skeleton: Skeleton) -> Tensors:
    """Return the tensors of AdapterHub's adapters here; those of a norm before a bottleneck have two names."""
    prefix = f"{skeleton.model.base_model_prefix}."
    named = {prefix + name: value for name, value in skeleton.base.state_dict().items()} if skeleton.parts else {}
    return {name: value for name, value in named.items() if is_of_library(name, ADAPTER)}


def _head(skeleton: Skeleton) -> tuple[Tensors, bytes]:
    """Return tensors and ``head_config.json`` of the head; of a plugged-in model by the names of its architecture."""
    tensors = {HEAD_PREFIX + name: value for name, value in skeleton.model.head.state_dict().items()}
    config = head_config(skeleton.model)
    form = skeleton.model.form_of(skeleton.model.head.config["head_type"]) if skeleton.layout.plugged else None
    if form is None:
        return tensors, config
    described = json.loads(config)
    options = described.pop("config") or {}
    described |= {"config": None, "name": None, "model_class": form.architecture}
    described |= {name: options[name] for name in ("label2id", "num_labels") if name in options}
    named = {form.named(name): value for name, value in tensors.items()}
    return named, json.dumps(described, indent=2, sort_keys=True).encode()


_LOCAL_KEYS: Final = ("_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file", "auto_map")
_REPLACED_KEYS: Final = (
    *("torch_dtype", "num_labels", "prediction_heads", "adapters", "id2label", "label2id", "quantization_config"),
)


def model_files(
    skeleton: Skeleton, task: str, folder: Path, trained: Mapping[str, torch.Tensor], *, with_owner: bool
) -> dict[str, Pieces]:
    """Make this node's part of the trained model's folder, by file name; tensors are read when a file is iterated.

    ``trained`` is of ``model_tensors``. With ``with_owner`` also untrained tensors, config and tokenizer.
    """
    tensors = {name: pieces_of(value) for name, value in trained.items()}
    files = description_files(skeleton, task, folder) if with_owner else {}
    if with_owner:
        tensors |= untouched_tensors(skeleton, folder, without=trained)
    return files | ({WEIGHTS_FILE: write_tensors(tensors, metadata={"format": "pt"})} if tensors else {})


def model_tensors(skeleton: Skeleton, task: str, *, without_blocks: Collection[int], with_owner: bool) -> Tensors:
    """Return every parameter and stored buffer of the model that this node saves, by its name in the file.

    With ``with_owner`` also the embedding, the modules after the last block, and the head.
    """
    prefix = f"{skeleton.model.base_model_prefix}."
    tensors: Tensors = {}
    for index, block in enumerate(skeleton.blocks):
        if index not in without_blocks:
            where = f"{prefix}{skeleton.layout.blocks_path}.{index}."
            tensors |= {where + name: value for name, value in block.state_dict().items()}
    if with_owner:
        paths = tuple(f"{path}." for path in skeleton.layout.owner_paths)
        around = (entry for entry in skeleton.base.named_parameters() if entry[0].startswith(paths))
        tensors |= {prefix + name: value.detach() for name, value in around}
        tensors |= _head_tensors(skeleton, task)
    return tensors


def _head_tensors(skeleton: Skeleton, task: str) -> Tensors:
    """Return the head's parameters by their names in the file, without the weight of a tied decoder."""
    form = architecture_head(skeleton.layout.model_type, task)
    head = skeleton.model.head
    decoder = head.get_output_embeddings()
    if decoder is not None:
        tied = decoder.weight.data_ptr() == skeleton.model.get_input_embeddings().weight.data_ptr()
        path = skeleton.layout.head
        return {
            f"{path}.{name}": value.detach()
            for name, value in decoder.named_parameters()
            if not (tied and name == "weight")
        }
    tensors: Tensors = {}
    for name, value in head.named_parameters():
        layer, _, rest = name.partition(".")
        tensors[f"{form.layers[layer]}.{rest}" if form else HEAD_PREFIX + name] = value.detach()
    return tensors


def untouched_tensors(skeleton: Skeleton, folder: Path, *, without: Collection[str]) -> dict[str, TensorPieces]:
    """Return stored tensors of the base model that no node hosts, such as a pooler, by name in the result.

    The folder may lack such tensors; names in ``without`` are left out.
    """
    layout, base = skeleton.layout, skeleton.base
    hosted = tuple(f"{path}." for path in (layout.blocks_path, *layout.owner_paths))
    children = tuple(f"{name}." for name, _ in base.named_children())
    untouched: dict[str, TensorPieces] = {}
    for stored_name, stored in read_headers(folder).items():
        inside = base_name(stored_name, layout)
        name = f"{skeleton.model.base_model_prefix}.{inside}"
        if inside.startswith(children) and not inside.startswith(hosted) and name not in without:
            untouched[name] = _as_stored(folder, stored_name, stored)
    return untouched


def _as_stored(folder: Path, name: str, stored: StoredTensor) -> TensorPieces:
    if stored.is_coded:
        with SafetensorsFiles(folder) as files:
            return pieces_of(files.read(name))
    info = stored.info
    return TensorPieces(info.dtype, info.shape, FilePieces(stored.path, info.offset, info.nbytes))


def description_files(skeleton: Skeleton, task: str, folder: Path) -> dict[str, Pieces]:
    """Return ``config.json`` of the result, and the files beside the weights, without local paths.

    Several chat templates stand in ``tokenizer_config.json``: a result has no folders.
    """
    values = read_settings_table(folder / CONFIG_FILE)
    text = with_old_rope(text_values(values, where=CONFIG_FILE))
    files = {CONFIG_FILE: _json(_config(skeleton, task, text))}
    for name in MODEL_SIDE_FILES:
        path = folder / name
        if path.is_file() and not (is_tower(values) and name == PREPROCESSOR_FILE):
            files[name] = _json(_without_local(read_settings_table(path))) if name in _WITH_PATHS else side_file(path)
    if template_files(folder):
        templates = [{"name": name, "template": text} for name, text in chat_templates(folder).items()]
        files.pop(TEMPLATE_FILE, None)
        saved = _without_local(read_settings_table(folder / SETTINGS_FILE))
        files[SETTINGS_FILE] = _json({**saved, "chat_template": templates})
    return files


def side_file(path: Path) -> FilePieces:
    """Return a file beside the weights; raises ``ModelError`` for one that no library would read."""
    if (size_bytes := path.stat().st_size) > MAX_GIVEN_BYTES:
        raise ModelError(
            f"{path} has {size_bytes:,} bytes, {MAX_GIVEN_BYTES:,} at most are copied; fetch the model again"
        )
    return FilePieces(path)


_WITH_PATHS: Final = ("generation_config.json", "preprocessor_config.json", "tokenizer_config.json")


def _config(skeleton: Skeleton, task: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base model's config with the head and dtype of the result."""
    config = {key: value for key, value in _without_local(base).items() if key not in _REPLACED_KEYS}
    form = architecture_head(skeleton.layout.model_type, task)
    head = dict(skeleton.model.head.config)
    labels = head.get("label2id")
    if labels:
        config |= {"id2label": {str(index): label for label, index in labels.items()}, "label2id": dict(labels)}
    config["architectures"] = [form.architecture if form else type(skeleton.base).__name__]
    if form is None:
        config["prediction_heads"] = {HEAD: head}
    parameter = next(skeleton.base.get_submodule(skeleton.layout.owner_paths[0]).parameters())
    return config | {"dtype": str(parameter.dtype).removeprefix("torch.")}


def _without_local(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _LOCAL_KEYS}


def _json(values: Mapping[str, Any]) -> Pieces:
    return Pieces.of((json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())


def load_saved(skeleton: Skeleton, task: str, folder: Path, *, with_head: bool) -> None:
    """Replace the initial values of trained tensors in hosted blocks, and ``with_head`` of the head, by saved ones.

    ``folder`` has the merged files of ``result_files``; of a whole model this node's part suffices. A frozen head in an
    old folder is not read. Raises ``IntegrityError`` for a damaged file, or other tensors than those of this model.
    """
    if skeleton.full_parameters:
        targets = model_tensors(skeleton, task, without_blocks=(), with_owner=with_head)
        _load(folder / WEIGHTS_FILE, targets, lambda name: name in targets)  # a model may have others, such as a pooler
        return
    anywhere = (_blocks_prefix(skeleton), _invertible_prefix(skeleton))
    hosted = _hosted_prefixes(skeleton, is_owner=with_head)
    saved = saved_tensors(skeleton, without_blocks=(), with_head=with_head)
    for name, targets in sorted(saved.items()):
        elsewhere = () if name == HEAD_FILE else anywhere
        _load(folder / name, targets, lambda name: name.startswith(hosted) or not name.startswith(elsewhere))  # noqa: B023


def load_initial(skeleton: Skeleton, path: Path, *, head_of: tuple[str, Sequence[str]] | None = None) -> None:
    """Replace the initial values of the adapters of hosted blocks by those of ``initial.safetensors``.

    ``head_of`` is task and classes of a run, at an owner: then also of an invertible adapter, and of the head if the
    file has one for them. Raises ``IntegrityError`` as ``load_saved``, and for numbers that are not finite here.
    """
    anywhere = (_blocks_prefix(skeleton), _invertible_prefix(skeleton))
    hosted = _hosted_prefixes(skeleton, is_owner=head_of is not None)
    file = TensorFile(FilePieces(path), where="adapter.from")
    with_head = head_of is not None and not head_problem(file.metadata, *head_of)
    saved = saved_tensors(skeleton, without_blocks=(), with_head=head_of is not None)
    heads = {name for name in file.infos if not name.startswith(anywhere)}
    names = {name for name in file.infos if name.startswith(hosted)} | (heads if with_head else set())
    targets = saved.get(ADAPTER_FILE, {}) | (saved.get(HEAD_FILE, {}) if with_head else {})
    _check_names("adapter.from", names, targets)
    _fill_all("adapter.from", file, targets)
    for name in sorted(targets):
        if not torch.isfinite(targets[name]).all():
            raise IntegrityError(f"adapter.from has {name} with numbers beyond {targets[name].dtype}; take another one")


def _load(path: Path, targets: Mapping[str, torch.Tensor], is_own: Callable[[str], bool]) -> None:
    """Read every target from a file; its tensors of this node have to be these."""
    file = TensorFile(FilePieces(path), where=path.name)
    _check_names(path.name, set(filter(is_own, file.infos)), targets)
    _fill_all(path.name, file, targets)


def _fill_all(where: str, file: TensorFile, targets: Mapping[str, torch.Tensor]) -> None:
    """Read all targets, after a check of all shapes."""
    for name in sorted(targets):
        shape, needed = file.infos[name].shape, tuple(targets[name].shape)
        if shape != needed:
            raise IntegrityError(
                f"{where} has {name} of shape {list(shape)}, this model needs {list(needed)}; it belongs "
                "to another adapter.config, model or number of classes"
            )
    for name in sorted(targets):
        fill(targets[name], file.tensor(name))


def _check_names(where: str, names: set[str], targets: Mapping[str, torch.Tensor]) -> None:
    missing, unknown = sorted(targets.keys() - names), sorted(names - targets.keys())
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which this model has not"
        raise IntegrityError(f"{where} {what}; it belongs to another adapter.config, model or task")
