"""What a run has to equal: one process that trains the whole model with plain transformers, adapters and autograd.

Nothing of the slice code is used here; shared with it are only the batches (``OwnerDataset.batch``), the head's name
and the pure functions of the plan (turn sequence, what trains at which step, learning rate).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from edge.data.dataset import OwnerDataset
from edge.data.tokens import Batch
from edge.model.families.stored_names import use_stored_names
from ringtune.config.sections import learning_rate
from ringtune.job.job import Job
from ringtune.models.adapter_config import parse_adapter_config
from ringtune.models.families import FAMILIES
from ringtune.models.family import LANGUAGE_TASKS, Family
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StartPoint, StepKind, Turn, items, turn_sequence
from tests.support.stock_plugged import add_heads, encoder_loss, is_plugged, stock_model
from tests.support.tiny_families import DECODERS, ENCODERS, GENERIC, PLUGGED

NAME = "ringtune"
OF_LIBRARY = 4
"""Version of transformers that AdapterHub's library runs with."""


@dataclass(kw_only=True, slots=True)
class Trained:
    """The result of a reference run."""

    model: Any
    losses: list[float] = field(default_factory=list)
    evaluations: dict[int, tuple[float, int, int]] = field(default_factory=dict)

    def adapter(self) -> dict[str, torch.Tensor]:
        """Adapter tensors, named as in a saved ``adapter.safetensors``; or the own weights of the blocks that train."""
        return adapter_of(self.model)

    def head(self) -> dict[str, torch.Tensor]:
        """Head tensors, named as in a saved ``model_head.safetensors``; no pretrained decoder is."""
        if self.model.active_head == "default":
            return {}
        head = self.model.heads[self.model.active_head]
        if isinstance(head, torch.nn.ModuleDict):
            return {name.replace("/", "."): value.detach() for name, value in head.named_parameters()}
        prefix = getattr(self.model, "head_prefix", f"heads.{NAME}.")
        return {f"{prefix}{name}": value.detach() for name, value in head.named_parameters()}


def adapter_of(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of the adapter, or without one the own weights of all blocks that may train."""
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("heads.")}
    names = {name for name in state if f".{NAME}." in name} or own_weights_of(model)
    return {name: value for name, value in state.items() if name in names}


def own_weights_of(model: Any) -> set[str]:
    """The names of the blocks' own weights that train without an adapter: no norms, no biases of the two ways out.

    Of a generic family they are all; the bias that a router adds to choose is none of them.
    """
    home = {id(parameter) for _, block in model.iter_layers() for parameter in block.parameters()}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in home}
    if model.config.model_type in (*GENERIC, *ENCODERS):
        return {name for name in names if not name.endswith("e_score_correction_bias")}
    frozen = [name for name in names if any(part in name.lower() for part in ("norm", ".ln_"))]
    ways_out = ("output.dense", "out_lin", "lin2", "c_proj", "o_proj", "down_proj")
    frozen += [name for name in names if name.endswith(tuple(f"{way}.bias" for way in ways_out))]
    return names - set(frozen)


def whole_model(job: Job, plan: Plan, model_folder: Path, *, attention: str | None = None) -> Any:
    """The whole model before it trains, with adapter and head, in the job's dtype and with its dropout.

    A language model keeps the decoder that the library loads with it. Adapter and head have the values of
    ``adapter.from``, a folder of the library, if the job has it.
    """
    model = _new_model(job, plan, model_folder, attention=attention)
    if job.adapter.from_:
        _load(model, Path(job.adapter.from_))
    return model


def _load(model: Any, folder: Path) -> None:
    """Take over all tensors of a folder of the library, whatever the name of its adapter and head."""
    own_kind = folder / "adapter.json"
    name = json.loads((own_kind if own_kind.exists() else folder / "adapter_config.json").read_text())["name"]
    values: dict[str, torch.Tensor] = {}
    for stem in ("adapter", "model_head"):
        path, pickled = folder / f"{stem}.safetensors", folder / f"pytorch_{stem}.bin"
        values |= (
            load_file(path) if path.exists() else torch.load(pickled, weights_only=True) if pickled.exists() else {}
        )
    own = {key.replace(f".{name}.", f".{NAME}."): value for key, value in values.items()}
    odd = model.load_state_dict(own, strict=False)
    assert not odd.unexpected_keys and not any(f".{NAME}." in key for key in odd.missing_keys)


def _new_model(job: Job, plan: Plan, model_folder: Path, *, attention: str | None) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(model_folder))
    for key in [key for key, value in config.to_dict().items() if type(value) in (int, float) and _is_dropout(key)]:
        setattr(config, key, job.train.dropout)
    if config.model_type in GENERIC and FAMILIES[config.model_type].since > OF_LIBRARY:
        return lora_model(model_folder, job, config, NAME)
    from adapters import AdapterConfig, AutoAdapterModel

    choice = {} if attention is None else {"attn_implementation": attention}
    plugged, labels = is_plugged(config.model_type), tuple(plan.course.labels)
    if plugged:
        model = stock_model(model_folder, job.model.task, labels, config=config, attention=attention)
    else:
        model = AutoAdapterModel.from_pretrained(str(model_folder), config=config, **choice)
    torch.manual_seed(job.train.seed)
    own_kind, library = is_auxiliary(job.adapter.config), others_of(job.adapter.config)
    if library and library != "full":
        model.add_adapter(NAME, config=AdapterConfig.load(library).replace(dropout=job.train.dropout))
    if own_kind:
        add_plain_auxiliary(model, job, NAME)
    classes = {"num_labels": len(labels), "id2label": dict(enumerate(labels))}
    if plugged:
        add_heads(model, job.model.task, NAME)
    elif job.model.task == "sequence-classification":
        model.add_classification_head(NAME, **classes)
    elif job.model.task == "image-classification":
        model.add_image_classification_head(NAME, **classes)
    elif job.model.task == "regression":
        model.add_classification_head(NAME, num_labels=1)
    elif job.model.task == "token-classification":
        model.add_tagging_head(NAME, **classes)
    elif job.model.task == "question-answering":
        model.add_qa_head(NAME)
        _ignore_padding(model)
    else:
        assert model.active_head == "default"
    if job.method.full_parameters:
        return model.to(getattr(torch, job.model.dtype))
    if job.adapter.config == "full":
        own = own_weights_of(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in own or name.startswith(_new_head(model)))
        if model.config.model_type in ENCODERS:
            model.heads[NAME].requires_grad_(True)
        return model.to(getattr(torch, job.model.dtype))
    if own_kind:
        if library:
            model.train_adapter(NAME)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(f".{NAME}." in name or name.startswith(_new_head(model)))
        return model.to(getattr(torch, job.model.dtype))
    model.train_adapter(NAME)
    if model.config.model_type in ENCODERS:
        model.heads[NAME].requires_grad_(True)  # a pooler is inside the base model
    return model.to(getattr(torch, job.model.dtype))


def _ignore_padding(model: Any) -> None:
    """Give the padding of a row no share in the loss of its answer, as if the row was alone."""
    masks: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, args, given: masks.append(given["attention_mask"]), with_kwargs=True)
    model.heads[NAME][-1].register_forward_hook(
        lambda _, args, logits: logits.masked_fill(masks.pop()[..., None] == 0, torch.finfo(logits.dtype).min)
    )


def _new_head(model: Any) -> str:
    """How the tensors of a head begin that trains."""
    return "score." if is_plugged(model.config.model_type) else f"heads.{NAME}."


def _is_dropout(key: str) -> bool:
    return "dropout" in key or key.endswith("pdrop")


def inputs_of(model: Any, batch: Batch) -> dict[str, Any]:
    """What the library's model is called with."""
    if batch.pixels is not None:
        return {"pixel_values": batch.pixels.to(next(model.parameters()).dtype)}
    inputs: dict[str, Any] = {"input_ids": batch.ids, "attention_mask": batch.mask}
    types = getattr(model.config, "type_vocab_size", 0) > 1 and model.config.model_type in ENCODERS
    if model.config.model_type in ("bert", "electra") or types:
        inputs["token_type_ids"] = batch.token_type_ids
    if model.config.model_type in (*DECODERS, *GENERIC):
        inputs["use_cache"] = False
    return inputs


def output_of(model: Any, batch: Batch, targets: Mapping[str, torch.Tensor]) -> Any:
    """What the library's model gives, with its loss; that of an encoder's own class is computed here."""
    if model.config.model_type not in ENCODERS:
        return model(**inputs_of(model, batch), **targets)
    output = model(**inputs_of(model, batch))
    output.loss = encoder_loss(output, batch.mask, **targets)
    return output


def targets_of(task: str, batch: Batch) -> tuple[dict[str, torch.Tensor], int]:
    """The library's names for the targets, and how many count."""
    if task == "question-answering":
        start, stop = batch.labels.clone().unbind(-1)
        return {"start_positions": start, "end_positions": stop}, len(batch.labels)
    if task in LANGUAGE_TASKS:
        return {"labels": batch.labels}, int((batch.labels[:, 1:] != -100).sum())
    if task == "regression":
        return {"labels": batch.labels}, len(batch.labels)
    return {"labels": batch.labels}, int((batch.labels != -100).sum())


def outputs_of(output: Any) -> torch.Tensor:
    """All logits of a head as one tensor."""
    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    logits: torch.Tensor = output.logits
    return logits


def round_products(blocks: Iterable[Any]) -> None:
    """Let each block multiply in bfloat16, as torch's autocast does; its output is float32 again."""
    entered: list[torch.autocast] = []

    def begin(*_: Any) -> None:
        entered.append(torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
        entered[-1].__enter__()  # type: ignore[no-untyped-call]

    def end(_: Any, __: Any, found: Any) -> Any:
        entered.pop().__exit__(None, None, None)
        return (found[0].float(), *found[1:]) if isinstance(found, tuple) else found.float()

    for block in blocks:
        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end)


def train(
    job: Job,
    plan: Plan,
    model_folder: Path,
    datasets: Mapping[str, OwnerDataset],
    *,
    attention: str | None = None,
    prepare: Callable[[Any], None] | None = None,
    turns: Iterable[tuple[Plan, Turn]] | None = None,
) -> Trained:
    """Train the whole model on the very items of the plan's turn sequence."""
    generator_state = torch.get_rng_state()
    model = whole_model(job, plan, model_folder, attention=attention)
    if prepare is not None:
        prepare(model)
    elif job.train.compute == "bfloat16":
        round_products(block for _, block in model.iter_layers())
    for dataset in datasets.values():
        dataset.set_labels(plan.course.labels)
    result = Trained(model=model)
    at = seed_units(model, job)
    blocks = [block for _, block in model.iter_layers()]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapters = [[parameter for parameter in block.parameters() if parameter.requires_grad] for block in blocks]
    invertible = [value for name, value in model.named_parameters() if ".invertible_adapters." in name]
    optimizer = plain_optimizer(job, trainable)
    for holding, turn in turns or [(plan, turn) for turn in turn_sequence(plan.course)]:
        plan = holding
        if turn.kind is StepKind.CHECKPOINT:
            continue
        for item in items(plan.course, turn):
            if item.kind is StepKind.EVALUATE:
                evaluate(model, job, plan, item, datasets[item.owner], result)
                continue
            units = plan.course.method.trained(plan.course, item.step)
            rate = learning_rate(job.train, *plan.course.method.rate_at(plan.course, item.step))
            model.eval()
            model.heads[model.active_head].train()
            first_drawing(model).train(units.has_embedding)
            for parameter in invertible:
                parameter.requires_grad_(units.has_embedding)
            for index, parameters in enumerate(adapters):
                blocks[index].train(index >= units.lowest)
                for parameter in parameters:
                    parameter.requires_grad_(index in units)
            loss = backward(model, job, plan, item, datasets[item.owner], at)
            if not units.has_head:
                for parameter in model.heads[model.active_head].parameters():
                    parameter.grad = None
            update(optimizer, rate)
            result.losses.append(loss)
    model.eval()
    torch.set_rng_state(generator_state)
    return result


def turns_around(before: Plan, after: Plan, step: int) -> list[tuple[Plan, Turn]]:
    """The turns of one plan up to a step, with what is due there, and those of another from there on."""
    start = StartPoint.of(after.course, step=step)
    ended = (turn for turn in turn_sequence(before.course) if turn.end_step <= step and turn.first_step < step)
    following = turn_sequence(after.course, start=start)
    return [*((before, turn) for turn in ended), *((after, turn) for turn in following)]


def turns_as_written(plan: Plan, changes: Sequence[tuple[int, Plan]]) -> list[tuple[Plan, Turn]]:
    """The train turns of the undisturbed run without those of an owner that is away, in steps numbered without gaps.

    Each with the plan that holds then, for its rate; ``changes`` are the steps from which other plans hold. A turn
    counts if its owner is there when the one before it has ended.
    """
    found, holding, step = list[tuple[Plan, Turn]](), plan, 0
    left = [turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.TRAIN]
    for until, after in (*changes, (plan.course.num_steps, plan)):
        while left and step < until:
            turn, *left = left
            if holding.course.owner(turn.owner) is not None:
                found.append((holding, dataclasses.replace(turn, first_step=step)))
                step += turn.num_items
        holding = after
    return found


def backward(model: Any, job: Job, plan: Plan, item: Item, dataset: OwnerDataset, at: dict[str, int]) -> float:
    """The library's own mean loss of each micro-batch, weighted by its share of the targets."""
    batch, total = dataset.batch(plan.course, item), 0.0
    _, all_targets = targets_of(job.model.task, batch)
    for micro, rows in enumerate(map(unpacked, micro_batches(plan, item, batch))):
        at.update(step=item.step, micro=micro)
        targets, count = targets_of(job.model.task, rows)
        loss = output_of(model, rows, targets).loss * (count / all_targets)
        loss.backward()
        total += float(loss.detach())
    return total


def micro_batches(plan: Plan, item: Item, batch: Batch) -> list[Batch]:
    """The micro-batches of an item's batch."""
    ends = itertools.accumulate(plan.course.microbatch_sizes(item.rows), initial=0)
    return list(itertools.starmap(batch.rows, itertools.pairwise(ends)))


def update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Apply all gradients at a learning rate, and drop them."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def unpacked(batch: Batch) -> Batch:
    """Make each row of packed sequences a row of its own, padded; other batches stay as they are."""
    if batch.pixels is not None or int(batch.mask.max()) < 2:
        return batch
    cut = [
        (batch.ids[sequence, start:stop], batch.labels[sequence, start:stop])
        for sequence, mask in enumerate(batch.mask.tolist())
        for start, stop in itertools.pairwise(
            [0, *(place for place in range(1, len(mask)) if mask[place] != mask[place - 1]), len(mask)]
        )
        if mask[start]
    ]
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return Batch(
        ids=pad([ids for ids, _ in cut]),
        mask=pad([torch.ones_like(ids) for ids, _ in cut]),
        token_type_ids=pad([torch.zeros_like(ids) for ids, _ in cut]),
        labels=pad([labels for _, labels in cut], padding_value=-100),
    )


def evaluate(model: Any, job: Job, plan: Plan, item: Item, dataset: OwnerDataset, result: Trained) -> None:
    """Add the sums of one evaluation item to the result."""
    batch = dataset.batch(plan.course, item)
    model.eval()
    loss_sum, count, correct = result.evaluations.get(item.step, (0.0, 0, 0))
    with torch.no_grad():
        for rows in micro_batches(plan, item, batch):
            targets, found = targets_of(job.model.task, rows)
            output = output_of(model, rows, targets)
            loss_sum += float(output.loss) * found
            count += found
            if job.model.task in LANGUAGE_TASKS:
                correct += int((output.logits[:, :-1].argmax(-1) == rows.labels[:, 1:]).sum())
            elif job.model.task not in ("question-answering", "regression"):
                correct += int((output.logits.argmax(-1) == rows.labels).sum())
    result.evaluations[item.step] = (loss_sum, count, correct)


def first_drawing(model: Any) -> Any:
    """The module below the blocks that draws the embedding's dropout, or holds what does."""
    base = model.base_model
    names = (name for name in ("drop", "embeddings", "embed_tokens") if hasattr(base, name))
    return getattr(base, next(names, ""), None) or model.get_input_embeddings()


def seed_units(model: Any, job: Job) -> dict[str, int]:
    """Seed the generator before each block and the head; returns where (step, micro) are to be set.

    A block that is applied to its own output is seeded once.
    """
    at, last = {"step": 0, "micro": 0}, [""]

    def seeder(unit: str) -> Any:
        def seed(*_: Any) -> None:
            text = f"{job.train.seed}/{at['step']}/{at['micro']}/{unit}"
            if text == last[0]:
                return
            last[0], first = text, hashlib.sha256(text.encode()).digest()[:8]
            torch.default_generator.manual_seed(int.from_bytes(first, "little") & (2**63 - 1))

        return seed

    if job.train.dropout > 0:
        first_drawing(model).register_forward_pre_hook(seeder("embedding"), prepend=True)
        for index, block in model.iter_layers():
            block.register_forward_pre_hook(seeder(f"block.{index}"), prepend=True)
        head = model.heads[model.active_head]
        if isinstance(head, torch.nn.ModuleDict):  # of an architecture, which begins where its base model ends
            model.base_model.register_forward_hook(seeder("head"))
        else:
            head.register_forward_pre_hook(seeder("head"), prepend=True)
    return at


def plain_optimizer(job: Job, values: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Torch's own optimizer of a job, on its path for one tensor at a time; the rate is set at each step."""
    kinds: dict[str, Any] = {
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "momentum": functools.partial(torch.optim.SGD, momentum=job.train.momentum or 0.0),
        "adagrad": torch.optim.Adagrad,
        "adafactor": torch.optim.Adafactor,
    }
    made: torch.optim.Optimizer = kinds[job.train.optimizer](
        values, lr=1.0, weight_decay=job.train.weight_decay, foreach=False
    )
    return made


def lora_model(folder: Path, job: Job, config: Any, name: str) -> Any:
    """Load a language model and put LoRA of a job beside its matrices; each block draws in the order of its modules.

    With ``full`` the blocks themselves train.
    """
    from transformers import AutoModelForCausalLM

    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_pretrained(str(folder), config=config, dtype=torch.float32).requires_grad_(False)
    family = FAMILIES[config.model_type]
    blocks = model.base_model.get_submodule(family.blocks_path)
    model.iter_layers = lambda: enumerate(blocks)
    model.heads, model.active_head = {"default": model.lm_head}, "default"
    model.loss_function = lambda logits, labels, *_, **__: functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    if job.adapter.config == "full":
        _separate_experts(model, blocks, family)
        blocks.requires_grad_(True)
        return model.to(getattr(torch, job.model.dtype)).eval()
    (part,) = parse_adapter_config(job.adapter.config)
    options = part.whole
    layout, roles = family.layout, [_ROLES[letter] for letter in options["attn_matrices"]]
    paths = {path for role in roles for path in layout.matrices_of(role)}
    paths |= {layout.up} if options["intermediate_lora"] else set()
    paths |= {layout.down} if options["output_lora"] else set()
    torch.manual_seed(job.train.seed)
    for block in blocks:
        for path, module in list(block.named_modules()):
            if path in paths:
                _add(module, options, job.train.dropout, name)
    return model.to(getattr(torch, job.model.dtype)).eval()


def _separate_experts(model: Any, blocks: Any, family: Family) -> None:
    """Give experts that are stacked in memory the names and values that they have in files."""
    parts = [part for block in blocks for part in block.children() if hasattr(part, "experts")]
    stacked = [part.experts for part in parts]
    use_stored_names(model.base_model, family.model_type, family.blocks_path)
    for part, both in zip(parts, stacked, strict=True):
        for number, (gate_up, down) in enumerate(zip(both.gate_up_proj, both.down_proj, strict=True)):
            names = _GATE_UP_DOWN.get(family.model_type, ("gate_proj", "up_proj", "down_proj"))
            for name, value in zip(names, (*gate_up.chunk(2), down), strict=True):
                part.experts.get_submodule(f"{number}.{name}").weight.data = value.detach().clone()


_GATE_UP_DOWN = dict.fromkeys(("lfm2_moe", "minimax_m2"), ("w1", "w3", "w2"))
_ROLES = {"q": "query", "k": "key", "v": "value"}


def _add(matrix: Any, options: dict[str, Any], dropout: float, name: str) -> None:
    """Add alpha / r * B A x to the output of a matrix."""
    own: Any = nn.Module()
    own.lora_A = nn.Parameter(torch.empty(options["r"], matrix.in_features))
    own.lora_B = nn.Parameter(torch.zeros(matrix.out_features, options["r"]))
    if options.get("init_weights") == "bert":
        nn.init.normal_(own.lora_A, std=0.02)
        nn.init.normal_(own.lora_B, std=0.02)
    else:
        nn.init.kaiming_uniform_(own.lora_A, a=math.sqrt(5))
    own.lora_dropout, own.scaling = nn.Dropout(dropout), options["alpha"] / options["r"]
    own.forward = lambda x: own.scaling * (own.lora_dropout(x) @ own.lora_A.T @ own.lora_B.T)

    plain = matrix.forward
    matrix.loras = nn.ModuleDict({name: own})
    matrix.forward = lambda x: plain(x) + own(x)


# letter or option -> where the matrix is, in the names of each family
MATRICES: dict[str, dict[str, str]] = {
    "bert": {"q": "query", "k": "key", "v": "value", "intermediate": "intermediate.dense", "output": "output.dense"},
    "distilbert": {"q": "q_lin", "k": "k_lin", "v": "v_lin", "intermediate": "ffn.lin1", "output": "ffn.lin2"},
    "gpt2": {"qkv": "attn.c_attn", "intermediate": "mlp.c_fc", "output": "mlp.c_proj"},
    "llama": {"q": "q_proj", "k": "k_proj", "v": "v_proj", "intermediate": "mlp.down_proj", "output": "mlp.up_proj"},
    "qwen2": {"q": "q_proj", "k": "k_proj", "v": "v_proj", "intermediate": "mlp.up_proj", "output": "mlp.down_proj"},
}
ALIKE = dict.fromkeys(("roberta", "xlm-roberta", "electra", "vit"), "bert") | {"mistral": "llama"}
ALIKE |= dict.fromkeys(PLUGGED, "qwen2")
WORDS = {"q": "query", "k": "key", "v": "value"}


def is_auxiliary(config: str) -> bool:
    """Whether a configuration has one of our own kinds."""
    return any(text.strip().startswith(("linear", "mlp")) for text in config.split("|"))


def others_of(config: str) -> str:
    """What else a configuration has."""
    return "|".join(text for text in config.split("|") if not is_auxiliary(text))


class PlainDelta(nn.Module):
    """Either ``x W^T`` or ``relu(x V^T + b) U^T + c``."""

    def __init__(self, inputs: int, outputs: int, hidden: int, draw: Any) -> None:
        super().__init__()
        if not hidden:
            self.weight = nn.Parameter(torch.zeros(outputs, inputs))
            return
        self.down, self.up = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)
        with torch.no_grad():
            self.down.weight.copy_(draw("down.weight", (hidden, inputs), inputs))
            self.down.bias.copy_(draw("down.bias", (hidden,), inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The delta."""
        if hasattr(self, "down"):
            return self.up(self.down(x).clamp(min=0))  # type: ignore[no-any-return]
        return x @ self.weight.T


def add_plain_auxiliary(model: Any, job: Job, name: str) -> None:
    """Put a delta beside each chosen matrix of each block; torch's generator is left alone."""
    state = torch.get_rng_state()
    for text in job.adapter.config.split("|"):
        if is_auxiliary(text):
            _add_part(model, job, name, *parse_adapter_config(text)[0])
    torch.set_rng_state(state)


def _add_part(model: Any, job: Job, name: str, kind: str, given: dict[str, Any]) -> None:
    hidden = given.get("hidden", 128) if kind == "mlp" else 0
    letters = given.get("attn_matrices", ["q", "v"]) if given.get("selfattn_lora", True) else []
    wanted = [*letters, *(word for word in ("intermediate", "output") if given.get(f"{word}_lora"))]
    family = model.config.model_type
    matrices = MATRICES[ALIKE.get(family, family)]
    for index, block in model.iter_layers():
        if index in given.get("leave_out", []):
            continue
        for word in wanted:
            path, matrix = _find(block, matrices.get(word) or matrices["qkv"], word)
            rows, columns = matrix.weight.T.shape if family == "gpt2" else matrix.weight.shape
            is_fused = word not in matrices
            place = f"{path}.{name}" + (f".{WORDS[word]}" if is_fused else "")
            delta = PlainDelta(columns, rows // 3 if is_fused else rows, hidden, _drawer(job.train.seed, index, place))
            if not is_fused:
                matrix.add_module(name, delta)
            else:
                if not hasattr(matrix, name):
                    matrix.add_module(name, nn.ModuleDict())
                getattr(matrix, name)[WORDS[word]] = delta
            path_in = f"{name}.{WORDS[word]}" if is_fused else name
            third = "qkv".index(word) if is_fused else 0
            adding = _adding(path_in, given.get("alpha", 1.0), third, 3 if is_fused else 1)
            matrix.register_forward_hook(adding, prepend=True)  # before a bottleneck that is plugged in


def _find(block: nn.Module, end: str, word: str) -> tuple[str, Any]:
    """The one module of a block at this place; BERT has another ``output.dense`` behind its attention."""
    found = [
        (path, module)
        for path, module in block.named_modules()
        if f".{path}".endswith(f".{end}") and not (word == "output" and path.startswith("attention"))
    ]
    assert len(found) == 1, (end, found)
    return found[0]


def _drawer(seed: int, index: int, place: str) -> Any:
    def draw(name: str, shape: tuple[int, ...], inputs: int) -> torch.Tensor:
        digest = hashlib.sha256(f"{seed}/auxiliary/{index}/{place}.{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
        return torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)

    return draw


def _adding(delta: str, alpha: float, third: int, parts: int) -> Any:
    """The delta is looked up by its path, so that a copy of the matrix adds its own."""

    def add(matrix: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        chunks = list(output.chunk(parts, -1))
        chunks[third] = chunks[third] + alpha * matrix.get_submodule(delta)(args[0])
        return torch.cat(chunks, -1)

    return add
