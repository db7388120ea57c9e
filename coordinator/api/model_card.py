"""The model card of an exported adapter or model: content, training and use.

It contains no name of a machine or person, and no path: owners are counted.

Source: the metadata block of model cards, https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from coordinator.client.saved_run import SavedRun
from coordinator.run.run_text import rows_of
from ringtune.models.adapter_config import auxiliary_of, invertible_of, library_config, library_problem
from ringtune.models.decoders import WRITTEN_OUT
from ringtune.models.families import FAMILIES
from ringtune.models.family import CAUSAL_LM, PAIR_TASKS, REGRESSION
from ringtune.models.folder import CONFIG_FILE, OLD, has_tower, with_old_rope
from ringtune.models.peft import peft_class
from ringtune.models.result_files import HEAD_FILE, INTERFACE_FILE, has_trained_head
from ringtune.models.text_towers import LOADER, is_tower, text_values
from ringtune.models.tokenizer import read_settings_table
from ringtune.quantities import format_seconds
from ringtune.texts import inert

OURS: Final = "ringtune"
"""Library of an adapter that AdapterHub's does not load."""
_LOADING = """```python
from adapters import AutoAdapterModel

model = AutoAdapterModel.from_pretrained({base})
model.load_adapter("PATH_OF_THIS_FOLDER", use_safetensors=True, set_active=True)
```"""
_LOADING_WITH_OWN_HEAD = """```python
import adapters
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({base})
adapters.init(model)
model.load_adapter("PATH_OF_THIS_FOLDER", use_safetensors=True, set_active=True)
```

The head is the base model's own: it did not train, so it is not in this folder."""
_LOADING_BY_RINGTUNE = """```sh
ringtune train job.toml --local 1 --set "adapter.config={config}" --set adapter.from=PATH_OF_THIS_FOLDER
```

AdapterHub's library can't load this adapter: {problem}. A job may begin with it, and `ringtune predict` and `ringtune
eval` read the run that trained it."""
_NEEDS = "The lines need AdapterHub's library: `pip install 'adapters==1.3.*'`."
_INVERSE = (
    "The last hidden state goes to the head through the inverse of the invertible adapter, which "
    "`AutoModelForCausalLM` leaves out."
)
_LOADING_PLUGGED = """```python
import json

import adapters
from transformers import {loader}

with open("PATH_OF_THIS_FOLDER/adapter_interface.json") as file:
    interface = adapters.AdapterModelInterface(**json.load(file)["interface"])
model = {loader}.from_pretrained({base}{choices})
adapters.init(model, interface=interface)
model.load_adapter("PATH_OF_THIS_FOLDER", use_safetensors=True, set_active=True)
```

AdapterHub has no class for this model: the plug-in interface that this folder describes puts its adapters in.{what}"""
_OF_TOWER = (
    "The adapter is of the text part of {base}, a model of texts and pictures. `ringtune export --merge` writes that "
    "part with the adapter as a text model, `--format peft` a folder of PEFT for the whole model."
)
_NOT_PLUGGED = (
    "Some blocks of {base} have matrices that AdapterHub's plug-in interface has no names for. `ringtune export "
    "--merge` writes a whole model with the adapter, `--format peft` a folder of PEFT."
)
_OWN_HEAD = " The head is the base model's own: it did not train, so it is not in this folder."

_LOADING_AUXILIARY = """```python
from adapters import AutoAdapterModel
from edge.model.auxiliary import load_auxiliary

model = AutoAdapterModel.from_pretrained({base})
model.load_head("PATH_OF_THIS_FOLDER", use_safetensors=True)
load_auxiliary(model, "PATH_OF_THIS_FOLDER")
```

{what}"""
_LOADING_AUXILIARY_WITH_OWN_HEAD = """```python
from edge.model.auxiliary import load_auxiliary
from {source} import {loader}

model = {loader}.from_pretrained({base})
load_auxiliary(model, "PATH_OF_THIS_FOLDER")
```

The head is the base model's own: it did not train, so it is not in this folder. {what}"""
_READS_LAST = (
    "The head reads the last token of a text, whatever that token is. {library} finds it by the padding id of the "
    "tokenizer, so its logits are others for a text that has this id in it; give it texts without."
)
_SINCE_5 = (
    "The `config.json` of the base model was written by transformers 5; transformers 4 does not read its rotary "
    "positions. Load the base model with `{arguments}` there."
)
_TOWER_SINCE_5 = (
    "The `config.json` of the base model was written by transformers 5; transformers 4 does not read the rotary "
    "positions of its text part. Load the base model with `config=config` there, which is of "
    "`AutoConfig.from_pretrained({base})` after `config.text_config.update({moved})`."
)
_NEEDS_5 = "Transformers 4 has no `{model_type}`: install `transformers>=5`."
_AUXILIARY = (
    "`edge` is a package of RingTune. Beside each matrix with the input x stands a model g, and the matrix gives "
    "h + alpha * g(x); `adapter.json` says what g is, and the names in `adapter.safetensors` where."
)
_WITH_LIBRARY = (
    " The adapters of AdapterHub that were trained beside them are in the same two files, and `load_auxiliary` loads "
    "both; the library's own `load_adapter` can't read a part of this folder."
)

_LOADING_PEFT = """```python
from peft import PeftModel
from transformers import {loader}

model = {loader}.from_pretrained({base}{choices})
model = PeftModel.from_pretrained(model, "PATH_OF_THIS_FOLDER")
```{what}"""
_HEAD_BESIDE = (
    "\n\nThe head that was trained is one of AdapterHub, and no class of transformers has it: PEFT loads the LoRA "
    "alone. `head_config.json` and `model_head.safetensors` have the head, for `load_head` of an `AutoAdapterModel`."
)

_LOADING_GGUF = """```sh
llama-cli -m model.gguf      # llama.cpp
ollama create NAME -f Modelfile
```

Values have the type that they were trained from; `llama-quantize` writes smaller ones."""
_LOADING_GGUF_LORA = """```sh
llama-cli -m base.gguf --lora lora.gguf      # llama.cpp
ollama create NAME -f Modelfile              # with base.gguf, the base model, beside it
```"""

_MODEL_LOADING = """```python
from {library} import {loader}

model = {loader}.from_pretrained("PATH_OF_THIS_FOLDER")
```"""


class Card(NamedTuple):
    """Text of a ``README.md``, and the library that loads what it describes."""

    text: str
    library: str


def adapter_card(run: SavedRun, *, base_model: str, adapter: Mapping[str, Any], digests: Mapping[str, str]) -> Card:
    """Return the card of an adapter.

    ``adapter`` is the content of the file that describes the adapter, ``digests`` the SHA-256 of the other files.
    """
    config, model_type = run.job.adapter.config, str(adapter.get("model_type", ""))
    has_head = has_trained_head(run.job.model.task)
    has_inverse = not has_head and invertible_of(config) is not None
    loading, library = _LOADING if has_head else _LOADING_WITH_OWN_HEAD, "adapters"
    loading = f"{_LOADING}\n\n{_OWN_HEAD.strip()}" if has_inverse else loading
    what = _AUXILIARY + (_WITH_LIBRARY if library_config(config) else "")
    choices, loader = "", "AutoAdapterModel" if has_inverse else "AutoModelForCausalLM"
    if auxiliary_of(config):
        loading = _LOADING_AUXILIARY if has_head else _LOADING_AUXILIARY_WITH_OWN_HEAD
        library = OURS
    source = "adapters" if has_inverse else "transformers"
    if INTERFACE_FILE in digests:
        loading, what = _LOADING_PLUGGED, "" if has_head else _OWN_HEAD
        loader = peft_class(model_type, run.job.model.task)[1] if has_head else loader
        choices = _choices(run, model_type)
        if base_is_tower(run) or FAMILIES[model_type].layout.is_unlike:
            loading, library = _OF_TOWER if base_is_tower(run) else _NOT_PLUGGED, OURS
    if problem := library_problem(config):
        loading, library = _LOADING_BY_RINGTUNE.format(problem=problem, config=config), OURS
    loading = loading.format(base=json.dumps(base_model), what=what, loader=loader, choices=choices, source=source)
    return _card(
        run,
        digests,
        base_model=base_model,
        model_type=model_type,
        library=library,
        title="Adapter for",
        what=f"adapter configuration `{config}`",
        loading=[
            loading,
            *_of_library(loading),
            *([_INVERSE] if has_inverse else []),
            *_of_transformers_5(run, base_model),
        ],
        fact=("library", adapter.get("version", "") if library == "adapters" else ""),
    )


def peft_card(run: SavedRun, *, base_model: str, model_type: str, digests: Mapping[str, str]) -> Card:
    """Return the card of a folder of PEFT; arguments as ``adapter_card``."""
    what = "" if has_trained_head(run.job.model.task) else f"\n\n{_OWN_HEAD.strip()}"
    loading = _LOADING_PEFT.format(
        loader=LOADER if base_is_tower(run) else peft_class(model_type, run.job.model.task)[1],
        base=json.dumps(base_model),
        choices="" if HEAD_FILE in digests else _choices(run, model_type),
        what=_HEAD_BESIDE if HEAD_FILE in digests else what,
    )
    return _card(
        run,
        digests,
        base_model=base_model,
        model_type=model_type,
        library="peft",
        title="LoRA for",
        what=f"adapter configuration `{run.job.adapter.config}`",
        loading=[loading, *_of_transformers_5(run, base_model)],
        fact=("library", "peft"),
    )


def _choices(run: SavedRun, model_type: str) -> str:
    """Return the further arguments for loading a plugged-in model."""
    labels = run.plan.course.labels
    outputs = len(labels) or (1 if run.job.model.task == REGRESSION else 0)
    choices = [f"num_labels={outputs}"] if outputs else []
    choices += ['attn_implementation="eager"'] if model_type in WRITTEN_OUT else []
    return "".join(f", {choice}" for choice in choices)


def whole_model_card(
    run: SavedRun,
    *,
    base_model: str,
    config: Mapping[str, Any],
    digests: Mapping[str, str],
    what: str = "all parameters",
) -> Card:
    """Return the card of a whole model.

    ``config`` is the content of ``config.json``, ``digests`` the SHA-256 of the other files, ``what`` names the trained
    part.
    """
    library, loader = model_loader(config)
    loading = _MODEL_LOADING.format(library=library, loader=loader)
    return _card(
        run,
        digests,
        base_model=base_model,
        model_type=str(config.get("model_type", "")),
        library="transformers",
        title="Model trained from",
        what=what,
        loading=[loading, *_of_library(loading), *_needs_5(config)],
        fact=("architecture", _architecture(config)),
    )


def gguf_card(
    run: SavedRun, *, base_model: str, config: Mapping[str, Any], digests: Mapping[str, str], what: str
) -> Card:
    """Return the card of GGUF; arguments as ``whole_model_card``, ``config`` of the base model."""
    is_lora = "model.gguf" not in digests
    return _card(
        run,
        digests,
        base_model=base_model,
        model_type=str(config.get("model_type", "")),
        library="gguf",
        title="LoRA for" if is_lora else "Model trained from",
        what=what,
        loading=[_LOADING_GGUF_LORA if is_lora else _LOADING_GGUF],
        fact=("format", "gguf"),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    """Return the first class named in a model's ``config.json``, such as ``BertForSequenceClassification``."""
    return str(next(iter(config.get("architectures") or ("AutoModel",))))


def model_loader(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return package and class that load a whole model with its head."""
    has_heads = "prediction_heads" in config
    return ("adapters", "AutoAdapterModel") if has_heads else ("transformers", _architecture(config))


def _card(
    run: SavedRun,
    digests: Mapping[str, str],
    *,
    base_model: str,
    model_type: str,
    library: str,
    title: str,
    what: str,
    loading: Sequence[str],
    fact: tuple[str, object],
) -> Card:
    owners = len(run.plan.course.owners)
    parts = [
        _front_matter(base_model, library, model_type),
        f"# {title} {base_model}",
        f"Trained with RingTune: {run.job.model.task}, {what}, {owners} data owner{'s' * (owners != 1)}. Rows and "
        "labels stayed with their owners; hidden states passed between the nodes.",
        *loading,
        *_of_last_token(run, model_type),
        "## Training",
        _table(("", ""), _facts(run, fact)),
        "## Figures",
        _figures(run),
        "## Files",
        _table(("file", "SHA-256"), [(f"`{name}`", f"`{digest}`") for name, digest in sorted(digests.items())]),
    ]
    return Card("\n\n".join(parts) + "\n", library)


def _of_library(loading: str) -> list[str]:
    """Return what lines for loading need besides; empty where AdapterHub's library is not in them."""
    return [_NEEDS] if "import adapters" in loading or "from adapters" in loading else []


def base_is_tower(run: SavedRun) -> bool:
    """Whether a run's base model is the text part of one of texts and pictures; not if its folder is not here."""
    return has_tower(run.job.model.path)


def _of_transformers_5(run: SavedRun, base_model: str) -> list[str]:
    """Return how transformers 4 loads a base model with a config of version 5; empty if not needed or not here."""
    path = Path(run.job.model.path) / CONFIG_FILE
    values = read_settings_table(path)
    text = text_values(values, where=str(path))
    if needed := _needs_5(text):
        return needed
    if not text.get("rope_parameters"):
        return []
    names = family.aliases if (family := FAMILIES.get(str(text.get("model_type")))) else {}
    old = with_old_rope(text, where=path)
    moved = {names.get(key, key): value for key, value in old.items() if text.get(key) != value}
    if is_tower(values):
        return [_TOWER_SINCE_5.format(base=json.dumps(base_model), moved=moved)]
    return [_SINCE_5.format(arguments=", ".join(f"{key}={value!r}" for key, value in moved.items()))]


def _needs_5(config: Mapping[str, Any]) -> list[str]:
    """Say that transformers 4 has not the class of a text model; empty if it has."""
    family = FAMILIES.get(str(config.get("model_type")))
    has_class = family is None or family.since <= OLD
    return [] if has_class else [_NEEDS_5.format(model_type=config["model_type"])]


def _of_last_token(run: SavedRun, model_type: str) -> list[str]:
    """Return how a classifying decoder finds the token that its head reads; empty for other models."""
    family = FAMILIES.get(model_type)
    if family is None or CAUSAL_LM not in family.tasks or run.job.model.task not in PAIR_TASKS:
        return []
    return [_READS_LAST.format(library="transformers" if family.plugged else "AdapterHub")]


def _front_matter(base_model: str, library: str, model_type: str) -> str:
    tags = dict.fromkeys([library, model_type, "ringtune"])
    lines = ["---", f"base_model: {json.dumps(base_model)}", f"library_name: {library}", "tags:"]
    return "\n".join([*lines, *(f"- {json.dumps(tag)}" for tag in tags if tag), "---"])


def _facts(run: SavedRun, more: tuple[str, object]) -> list[tuple[str, object]]:
    plan, train = run.plan, run.job.train
    facts: list[tuple[str, object]] = [
        ("task", run.job.model.task),
        ("labels", ", ".join(plan.course.labels)),
        ("method", plan.course.method.name),
        *_settings(plan.course.method.name, plan.course.method),
        *_settings("velora", plan.course.velora),
        ("steps", run.report.get("steps", plan.course.num_steps)),
        ("batch size", plan.course.batch_size),
        ("longest input", f"{plan.course.max_length} tokens"),
        ("optimizer", f"{train.optimizer}, learning rate {train.learning_rate:g}, {train.lr_schedule}"),
        ("frozen weights", f"in {plan.course.frozen.dtype}" if plan.course.frozen else ""),
        ("seed", plan.course.seed),
        ("data owners", len(plan.course.owners)),
        ("users", run.user_share),
        ("hosts", len(plan.placement.slices)),
        ("whole run took", format_seconds(run.report["wall_s"]) if "wall_s" in run.report else ""),
        ("RingTune", run.report.get("version", "")),
        more,
    ]
    return [(name, value) for name, value in facts if value != ""]


def _settings(name: str, value: Any) -> list[tuple[str, object]]:
    """Return those settings of a method, or of VeLoRA, that are not off.

    Example: of HiFT ``hift, group size`` 1 and ``hift, order`` bottom2up.
    """
    rows: list[tuple[str, object]] = []
    for field in dataclasses.fields(value) if value is not None else ():
        setting, title = getattr(value, field.name), f"{name}, {field.name.replace('_', ' ')}"
        if dataclasses.is_dataclass(setting):
            rows += _settings(name, setting)
        elif setting:
            words = ", ".join(map(str, setting)) if isinstance(setting, tuple) else setting
            rows.append((title, "yes" if setting is True else words))
    return rows


def _figures(run: SavedRun) -> str:
    figures = run.report.get("eval", {})
    if not figures.get("count"):
        return "It was not evaluated while it was trained."
    plain = {name: value for name, value in figures.items() if not isinstance(value, dict)}
    of_all = rows_of(figures, "loss")
    rows = [
        (name if (of := rows_of(figures, name)) == of_all else f"{name} on {of}", "-" if value is None else value)
        for name, value in sorted(plain.items())
    ]
    return _table(("on the owners' evaluation rows", ""), rows)


def _table(titles: tuple[str, str], rows: list[tuple[str, object]]) -> str:
    lines = [titles, ("---", "---"), *rows]
    return "\n".join(f"| {_cell(left)} | {_cell(right)} |" for left, right in lines)


def _cell(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return inert(" ".join(text.replace("|", "\\|").split()))
