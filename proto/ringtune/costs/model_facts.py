"""Sizes of a model for planning, from its folder and from the job's adapters, subnets and head.

With ``adapter.config = "full"`` these weights of a block train, and are divided among its subnets: rows of query, key,
value and the feed-forward part's first matrices, columns of both output matrices. Norms and the biases of both output
matrices belong to no subnet and stay frozen. Of a generic family the whole block trains.

Source: D2FT, section III-A.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringtune.config.optimizers import factor_numbers
from ringtune.costs.full_parameters_costs import with_full_parameters
from ringtune.costs.memory_sizes import DTYPE_BYTES
from ringtune.costs.offload_costs import with_pairs
from ringtune.costs.profile import KindFacts, ModelFacts
from ringtune.errors import JobError
from ringtune.job.job import Job, job_of_user, kinds_of
from ringtune.models.adapter_config import (
    adapter_block_params,
    auxiliary_of,
    block_params,
    invertible_of,
    parse_adapter_config,
    trains_own_weights,
)
from ringtune.models.adapter_support import generic_refusal, places_of
from ringtune.models.architecture_heads import architecture_head
from ringtune.models.auxiliary_models import AuxiliaryConfig, in_block
from ringtune.models.families import FAMILIES, check_task
from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    LANGUAGE_TASKS,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
    Config,
    Dimensions,
    Family,
    Shapes,
    Widths,
    head_task,
    in_chunks,
)
from ringtune.models.folder import (
    CONFIG_FILE,
    NO_WEIGHTS,
    StoredTensor,
    base_name,
    base_tensors,
    check_files,
    model_dimensions,
    read_config,
    read_headers,
)
from ringtune.models.generic_decoders import NOT_ROUNDED, active_experts, buffer_bytes
from ringtune.models.kept_inputs import has_other_adapters, kept_inputs, lora_values
from ringtune.storage.gguf import GgufType
from ringtune.storage.strict import json_digest
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.base import Shape
from ringtune.techniques.compute import is_rounded
from ringtune.techniques.invertible_adapter import check_family


def own_weights(family: Family, config: Config) -> Shapes:
    """Shapes of a block's own weights that may train, by name inside the block.

    Example: ten tensors with 1,772,160 weights of a BERT of width 384 and inner width 1,536.
    """
    return {name: shape for name, shape in family.block_shapes(config).items() if family.trains(name)}


_TRAINED_NORMS = 4
"""Widths per token that norms of a generic family's block keep for their weights, at most; measured."""
_SCORED_NORMS = 5
_SCORED_WITH_EXPERTS = 8
"""The same beside adapters, where scores are of all weights; each expert of a token keeps its input, too; measured."""


def _stored_weights(folder: str | Path, family: Family, config: Config, num_blocks: int) -> Shapes:
    """Shapes of the own weights of a generic family's largest block in a folder, which may lack blocks.

    Files of DeepSeek V3 and GLM-4 MoE have one more block, which predicts further tokens and is not the model's.
    """
    blocks: dict[str, Shapes] = {str(block): {} for block in range(num_blocks)}
    left_out = family.unread(config)
    for stored_name, stored in read_headers(Path(folder)).items():
        name = base_name(stored_name, family)
        block, _, inside = name.removeprefix(family.block_prefix).partition(".")
        is_wanted = name.startswith(family.block_prefix) and block in blocks
        is_wanted = is_wanted and not name.endswith(NO_WEIGHTS) and not name.startswith(left_out)
        if is_wanted and family.trains(inside):
            blocks[block][inside] = stored.shape
    return max(blocks.values(), key=lambda shapes: sum(map(math.prod, shapes.values())))


def estimate_activation_token_bytes(
    model: ModelFacts,
    *,
    tokens: int,
    dropout: float,
    dtype: str = "float32",
    trains_own_weights: bool = False,
    auxiliary: Collection[AuxiliaryConfig] = (),
    lora_values: int | None = None,
    has_more: bool = False,
) -> float:
    """Estimate the bytes per padded token that one block keeps for its backward, where none were measured.

    The estimate is 5 to 8 % above the MiniLM block that it was fitted to (``Source``). For other families it is at most
    7 % too low or 33 % too high with a bottleneck, LoRA or own weights (``tests/edge/model/test_sizes.py``), and was up
    to 24 % too low with IA3, DoRA, MTL-LoRA or a gate beside LoRA.

    Values per token, in multiples of the hidden width unless stated:

    * queries, keys, values and attention output: 4, each of the width of all heads, as shared keys and values are
      repeated;
    * inputs of layer norms: 3; adapter: 2; feed-forward part: ``inner_kept * intermediate / hidden``;
    * all of it once for each application of a block that repeats;
    * ``more_kept_values`` of further norms, ``kept_scores`` of written-out attention, ``row_kept_values`` of a row,
      and ``chunk_kept_values`` of each token in whole chunks;
    * with dropout the attention probabilities three times, and 2 for masks;
    * with own weights: no adapter and one norm input less, but 3 for the inputs of query/key/value, attention output
      and first feed-forward matrix, and ``intermediate / hidden`` for that of the last matrix;
    * with auxiliary models or LoRA: their inputs, each tensor once, and values inside each; only 2 norm inputs without
      other adapters. LoRA with dropout keeps for each matrix the dropped input and a mask instead of the input.

    ``tokens`` are of the longest row. ``dropout`` above 0 disables the attention kernel that keeps no
    probabilities. ``lora_values`` are per token inside all LoRAs of the block, None without LoRA; ``has_more``:
    other adapters train beside LoRA and auxiliary models.

    Source: saved tensors of one MiniLM block at 16 x 128 tokens: 37.3 MiB without, 75.2 MiB with dropout
    (``tests/contract/costs/test_memory_estimate.py``).
    """
    inner_units = (model.inner_kept + trains_own_weights) * model.intermediate_size / model.hidden_size
    trained_units = 2.0 + 3.0 if trains_own_weights else 3.0 + 2.0
    if auxiliary or lora_values is not None:
        inputs = sum(kept.width for kept in model.kept_inputs if not kept.always_kept)
        values = inputs + (lora_values or 0) + sum(config.hidden_values for config in auxiliary)
        beside = (trained_units if has_more else 2) + values / model.hidden_size
        trained_units = beside if lora_values is None else max(trained_units, beside)
    dropped = dropout_token_bytes(model, tokens=tokens, dtype=dtype) if dropout > 0 else 0
    if lora_values is not None and dropout > 0:
        dropped += _lora_dropout_values(model) * DTYPE_BYTES[dtype]
    attention = 4 * (model.attention_width or model.hidden_size) + model.more_kept_values
    attention += model.kept_scores * model.num_heads * tokens
    of_rows = (model.row_kept_values + model.chunk_kept_values * in_chunks(tokens)) / tokens
    whole = (trained_units + inner_units) * model.hidden_size + attention + of_rows
    return model.repeats * (whole * DTYPE_BYTES[dtype] + dropped)


def _lora_dropout_values(model: ModelFacts) -> int:
    """Values per token that LoRA's dropout adds: for each matrix a dropped input and a mask, without the input.

    The input is kept if an auxiliary model reads it too.
    """
    inputs = (kept for kept in model.kept_inputs if kept.lora)
    return sum(kept.width * (2 * kept.lora - (kept.lora == kept.readers and not kept.always_kept)) for kept in inputs)


def dropout_token_bytes(model: ModelFacts, *, tokens: int, dtype: str = "float32") -> int:
    """Bytes per padded token of a block's graph that exist only with dropout.

    Without dropout the attention kernel is fused and keeps no probabilities. With it they are kept three times, as
    probabilities, mask and product, and masks of hidden states twice.

    Example: 12 heads, rows of 128 tokens and width 384 are 5,376 numbers, 21,504 bytes.
    """
    return (2 * model.hidden_size + 3 * model.num_heads * tokens) * DTYPE_BYTES[dtype]


def model_facts(folder: str | Path, job: Job, *, in_part: bool = False) -> ModelFacts:
    """Sizes of the model in ``folder`` with the job's adapters and head, in the job's compute dtype.

    The job says task, adapter, dtype, longest text and private blocks. With ``in_part`` the folder lacks weights
    that other nodes have; a block and the embedding then count one number each.

    Raises:
        ModelError: not a folder of a supported family or task, a tensor is missing or has another shape, or files are
            inconsistent.
        JobError: the job exceeds the model, see ``check_job``.
        IntegrityError: a safetensors file is damaged.
    """
    config = read_config(folder)
    family, dimensions = FAMILIES[config["model_type"]], model_dimensions(config)
    check_job(job, config, where=str(Path(folder) / CONFIG_FILE))
    check_files(folder, config)
    tensors = {} if in_part else base_tensors(folder, config, with_decoder=job.model.task in LANGUAGE_TASKS)
    item_bytes = DTYPE_BYTES[job.model.dtype]
    adapter_params = adapter_block_params(
        job.adapter.config,
        hidden_size=dimensions.hidden,
        widths=family.widths(config),
        num_blocks=dimensions.num_blocks,
    )
    widths = [family.widths(config)] * dimensions.num_blocks
    if family.generic and tensors:
        shapes = {name: stored.shape for name, stored in tensors.items()}
        widths = [family.stored_widths(shapes, block) for block in range(dimensions.num_blocks)]
        parts = parse_adapter_config(job.adapter.config)
        adapter_params = max(
            block_params(parts, block, dimensions.hidden, of_block, len(widths))
            for block, of_block in enumerate(widths)
        )
    passed = family.passed(config)
    weights = {name: math.prod(stored.shape) for name, stored in tensors.items()}
    largest = _largest_block(weights, family, dimensions.num_blocks)
    in_block = sum(count for name, count in weights.items() if name.startswith(largest))
    own_shapes: Shapes = {}
    if trains_own_weights(job.adapter.config):
        own_shapes = (
            _stored_weights(folder, family, config, dimensions.num_blocks)
            if family.generic
            else own_weights(family, config)
        )
    auxiliary = auxiliary_of(job.adapter.config)
    trained = [
        own_shapes,
        *(_shapes_in_block(auxiliary, at, family.widths(config)) for at in range(dimensions.num_blocks)),
    ]
    own_params = sum(math.prod(shape) for shape in own_shapes.values())
    shared = tuple(f"{path}." for path in family.shared_paths)
    in_blocks, in_embedding = _frozen_matrices(tensors, (family.block_prefix, *shared), largest, own_shapes)
    of_all = _Matrices.of(tensors[name].shape for name in weights if name.startswith(family.block_prefix))
    outside = [name for name in weights if not name.startswith((family.block_prefix, *shared))]
    head = _head_sizes(job.model.task, dimensions, family, config)
    gguf_bytes = _gguf_bytes(tensors, family.block_prefix)
    gguf_outside = gguf_bytes.pop("", 0)
    experts = active_experts(config) if family.generic else 0
    norms = _norm_values((name for name in weights if name.startswith(largest)), tensors, dimensions)
    facts = ModelFacts(
        model_type=config["model_type"],
        num_blocks=dimensions.num_blocks,
        hidden_size=dimensions.hidden,
        intermediate_size=dimensions.inner,
        num_heads=dimensions.num_heads,
        vocab_size=dimensions.vocab,
        block_bytes=(1 if in_part else in_block - own_params) * item_bytes + buffer_bytes(family.model_type, config),
        embedding_bytes=(1 if in_part else sum(weights[name] for name in outside)) * item_bytes,
        head_bytes=head.params * item_bytes,
        head_class_bytes=head.class_params * item_bytes,
        head_token_logits=head.token_logits,
        head_class_token_logits=head.class_token_logits,
        inner_kept=dimensions.inner_kept,
        fixed_tokens=dimensions.longest if dimensions.fixed else 0,
        num_kv_heads=dimensions.kv_heads or dimensions.num_heads,
        kept_inputs=kept_inputs(family, config, job.adapter.config),
        unlike_inputs=tuple(kept_inputs(family, config, job.adapter.config, of_block) for of_block in widths)
        if family.layout.is_unlike
        else (),
        adapter_block_bytes=(adapter_params + own_params) * item_bytes,
        adapter_block_factor_bytes=max(factor_numbers(shapes.values()) for shapes in trained) * item_bytes,
        embedding_factor_bytes=factor_numbers(tensors[name].shape for name in outside) * item_bytes,
        head_factor_bytes=head.factors * item_bytes,
        head_class_factor_bytes=head.class_factors * item_bytes,
        digest=_digest(config, tensors),
        block_matrix_params=in_blocks.params,
        block_matrix_rows=in_blocks.rows,
        embedding_matrix_params=in_embedding.params,
        embedding_matrix_rows=in_embedding.rows,
        largest_matrix_params=of_all.largest if family.generic else in_blocks.largest,
        attention_width=dimensions.attention or dimensions.hidden,
        more_kept_values=dimensions.more_kept
        + (max(_TRAINED_NORMS * dimensions.hidden, norms) if own_shapes and family.generic else 0),
        kept_scores=dimensions.kept_scores,
        more_scale_bytes=sum(
            stored.four_bit.more_bytes
            for name, stored in tensors.items()
            if stored.four_bit is not None and name.startswith(largest)
        ),
        gguf_block_bytes=max(gguf_bytes.values(), default=0),
        gguf_embedding_bytes=gguf_outside,
        shared_bytes=sum(weights[name] for name in weights if name.startswith(shared)) * item_bytes if shared else 0,
        row_kept_values=dimensions.row_kept,
        more_masks=dimensions.more_masks,
        repeats=dimensions.repeats,
        more_scored_values=_more_scored(experts, norms, dimensions.hidden) if family.generic else 0,
        scored_gradient_params=_largest_gradient(in_block if experts else 0, of_all.largest) if family.generic else 0,
        entering=() if passed is None else passed.entering,
        returning=() if passed is None else passed.returning,
        chunk_kept_values=dimensions.chunk_kept,
    )
    facts = _with_kinds(
        with_pairs(facts, job, widths, family, value_bytes=item_bytes),
        folder,
        job,
        widths,
        in_part=in_part or not family.generic,
    )
    facts = _with_invertible(facts, job, config, item_bytes=item_bytes)
    if in_part or not job.method.full_parameters:
        return facts
    return with_full_parameters(
        facts,
        family,
        tensors,
        block=own_shapes.values()
        if family.generic
        else [tensors[name].shape for name in tensors if name.startswith(largest)],
        task=job.model.task,
        buffer_bytes=buffer_bytes(family.model_type, config),
        item_bytes=item_bytes,
    )


def _more_scored(experts: int, norms: int, hidden: int) -> int:
    """Return the values per token of norms, of which ``norms`` is counted, and of the inputs of a token's experts."""
    return max((_SCORED_WITH_EXPERTS if experts else _SCORED_NORMS) * hidden, norms) + experts * hidden


def _norm_values(names: Iterable[str], tensors: Mapping[str, StoredTensor], dimensions: Dimensions) -> int:
    """Return the values per token that norms of a block keep for their weights: their width, of heads all together."""
    values = 0
    for name in names:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            values += dimensions.attention or dimensions.hidden
        elif tensors[name].shape == (dimensions.hidden,) and not name.endswith("bias"):
            values += dimensions.hidden
    return values


def _largest_gradient(of_experts: int, largest: int) -> int:
    """Return the numbers of the largest gradient of a block with ``of_experts`` numbers, nearly all in experts.

    Transformers 5 has the first two matrices of all experts in one tensor, and adds its gradient up from one as large
    for each expert.
    """
    return max(4 * of_experts // 3, largest)


def _largest_block(weights: Mapping[str, int], family: Family, num_blocks: int) -> str:
    """Return the prefix of the names of the block with most weights, the first of equal ones."""
    sizes = dict.fromkeys((f"{family.block_prefix}{block}." for block in range(num_blocks)), 0)
    for name, count in weights.items():
        block = name.removeprefix(family.block_prefix).partition(".")[0]
        if name.startswith(family.block_prefix):
            sizes[f"{family.block_prefix}{block}."] += count
    return max(sizes, key=sizes.__getitem__)


def _with_invertible(facts: ModelFacts, job: Job, config: Mapping[str, Any], *, item_bytes: int) -> ModelFacts:
    adapter = invertible_of(job.adapter.config)
    if adapter is None:
        return facts
    shapes = adapter.shapes(int(config.get("embedding_size") or facts.hidden_size)).values()
    return dataclasses.replace(
        facts,
        embedding_train_bytes=sum(map(math.prod, shapes)) * item_bytes,
        embedding_factor_bytes=factor_numbers(shapes) * item_bytes,
    )


def _shapes_in_block(auxiliary: Iterable[AuxiliaryConfig], block: int, widths: Widths) -> Shapes:
    return {name: shape for model in in_block(auxiliary, block) for name, shape in model.shapes(widths).items()}


def _with_kinds(
    facts: ModelFacts, folder: str | Path, job: Job, widths: Sequence[Widths], *, in_part: bool
) -> ModelFacts:
    others = [kind for kind in kinds_of(job)[1:] if kind.users]
    if not others:
        return facts
    base, kinds = computed_token_bytes(facts, job), []
    for kind in others:
        own_job = job_of_user(job, kind.users[0])
        facts_of_kind = model_facts(folder, own_job, in_part=in_part)
        kinds.append(
            KindFacts(
                config=kind.config,
                users=kind.users,
                adapter_block_bytes=facts_of_kind.adapter_block_bytes,
                adapter_block_factor_bytes=facts_of_kind.adapter_block_factor_bytes,
                pair_token_bytes=facts_of_kind.pair_token_bytes,
                pair_rounded_token_bytes=facts_of_kind.pair_rounded_token_bytes,
                pair_projected_token_bytes=facts_of_kind.pair_projected_token_bytes,
                more_activation_token_bytes=max(0.0, computed_token_bytes(facts_of_kind, own_job) - base),
                pair_vector_values=facts_of_kind.pair_vector_values,
            )
        )
    configs = [job.adapter.config, *(kind.config for kind in others)]
    places = {place for config in configs for place in places_of(config)}
    beside = max(sum(math.prod(getattr(pair, place)) for place in places) for pair in widths)
    return dataclasses.replace(facts, kinds=tuple(kinds), beside_block_bytes=beside * DTYPE_BYTES[job.model.dtype])


class _Matrices(NamedTuple):
    """Numbers and rows of some matrices together, and numbers of the largest one."""

    params: int
    rows: int
    largest: int

    @staticmethod
    def of(shapes: Iterable[tuple[int, ...]]) -> _Matrices:
        """Count the matrices among these shapes."""
        matrices = [shape for shape in shapes if len(shape) == 2]
        sizes = [math.prod(shape) for shape in matrices]
        return _Matrices(sum(sizes), sum(shape[0] for shape in matrices), max(sizes, default=0))


def _frozen_matrices(
    tensors: Mapping[str, StoredTensor], not_outside: tuple[str, ...], block: str, names: Collection[str]
) -> tuple[_Matrices, _Matrices]:
    """Count the frozen matrices of one block, without those in ``names``, and those of an owner alone.

    ``block`` is the prefix of the names of that block, ``not_outside`` are those of what others have.
    """
    in_block = {name.removeprefix(block): stored for name, stored in tensors.items() if name.startswith(block)}
    outside = [stored.shape for name, stored in tensors.items() if not name.startswith(not_outside)]
    return _Matrices.of(stored.shape for name, stored in in_block.items() if name not in names), _Matrices.of(outside)


def _gguf_bytes(tensors: Mapping[str, StoredTensor], block_prefix: str) -> dict[str, int]:
    """Return the bytes of matrices of a GGUF file, by the number of the model's block; empty = outside of blocks."""
    sizes: dict[str, int] = {}
    for name, stored in tensors.items():
        if GgufType.of(stored.info.dtype) is not None and len(stored.shape) == 2:
            is_inside = name.startswith(block_prefix)
            block = name.removeprefix(block_prefix).partition(".")[0] if is_inside else ""
            sizes[block] = sizes.get(block, 0) + stored.info.nbytes
    return sizes


def computed_token_bytes(model: ModelFacts, job: Job) -> float:
    """Estimate the bytes per padded token of a job's longest row that one block keeps for its backward."""
    return estimate_activation_token_bytes(
        model,
        tokens=model.fixed_tokens or job.train.max_length,
        dropout=job.train.dropout,
        dtype=job.model.dtype,
        trains_own_weights=trains_own_weights(job.adapter.config),
        auxiliary=auxiliary_of(job.adapter.config),
        lora_values=lora_values(job.adapter.config),
        has_more=has_other_adapters(job.adapter.config),
    )


def check_job(job: Job, config: Mapping[str, Any], *, where: str = CONFIG_FILE) -> None:
    """Refuse a job that the model can't do; raises ``ModelError`` or ``JobError``."""
    family, dimensions = FAMILIES[config["model_type"]], model_dimensions(config)
    check_task(family, job.model.task, where=where)
    if family.generic:
        _check_generic(job, family, config, where)
    longest, length = dimensions.longest, job.train.max_length
    if not dimensions.fixed and length > longest:
        raise JobError(f"train.max_length is {length}, the model takes {longest} tokens at most; lower it")
    if job.privacy.private_blocks >= dimensions.num_blocks:
        raise JobError(
            f"privacy.private_blocks is {job.privacy.private_blocks}, the model has {dimensions.num_blocks} blocks; "
            "leave at least one to train"
        )
    check_family(job.adapter.config, family, dimensions)
    shape = Shape(family, dimensions, family.widths(config), where, family.passed(config) is not None)
    for technique in TECHNIQUES:
        technique.check_model(job, shape)


def _check_generic(job: Job, family: Family, config: Config, where: str) -> None:
    """Refuse what needs more of a family than its own forward; raises ``JobError``."""
    for adapter in job.adapter_configs:
        if problem := generic_refusal(family, adapter):
            raise JobError(f"{where}: adapter.config = {adapter!r}: {problem}")
    if job.train.packing and not family.packs:
        raise JobError(
            f"{where}: train.packing = true would let a row of a {family.model_type} attend to others of its "
            "sequence; remove train.packing"
        )
    if is_rounded(job) and family.model_type in NOT_ROUNDED:
        raise JobError(
            f"{where}: train.compute = 'bfloat16' is refused: a {family.model_type} joins numbers of two types, which "
            "torch can't; remove train.compute"
        )
    if job.generation is not None and not family.takes_cache(config):
        raise JobError(
            f"{where}: [generation] keeps keys and values, behind which a {family.model_type} can't compute a token; "
            "remove the section"
        )
    if family.passed(config) is not None and job.wire.dtype == "int8":
        raise JobError(
            f"{where}: wire.dtype = 'int8' has one scale for all that a token takes along, so that large hidden states "
            f"would round the inputs and keys of later blocks of this {family.model_type} to zero; set it to bfloat16"
        )


class _HeadSizes(NamedTuple):
    """Trainable weights, logits per token, and Adafactor's rows and columns of a head; ``class_*`` per class."""

    params: int
    class_params: int
    token_logits: int
    factors: int
    class_factors: int
    class_token_logits: int = 0


def _head_sizes(task: str, dimensions: Dimensions, family: Family, config: Config) -> _HeadSizes:
    """Sizes of AdapterHub's default head for a task, which an encoder's own has too unless it has a norm.

    A language model's head is frozen and counts as embedding. A plugged decoder classifies by one matrix.
    """
    hidden, row = dimensions.hidden, dimensions.hidden + 1
    form = architecture_head(family.model_type, task)
    if form is not None and form.has_norm:
        biases = hidden * (bool(config["classifier_bias"]) + bool(config["norm_bias"]))
        before, factors = hidden * hidden + hidden + biases, 3 * hidden + biases
        return {
            REGRESSION: _HeadSizes(before + row, 0, 0, factors + hidden + 2, 0),
            CLASSIFICATION: _HeadSizes(before, row, 0, factors + hidden, 2),
            TAGGING: _HeadSizes(before, row, 0, factors + hidden, 2, 1),
            QUESTION_ANSWERING: _HeadSizes(before + 2 * row, 0, 2, factors + hidden + 4, 0),
        }[task]
    if family.plugged and CAUSAL_LM in family.tasks and task in (CLASSIFICATION, REGRESSION):
        first = _HeadSizes(0, hidden, 0, hidden, 1)
        return first if task == CLASSIFICATION else _HeadSizes(hidden, 0, 0, hidden + 1, 0)
    return {
        REGRESSION: _HeadSizes(hidden * row + row, 0, 0, 4 * hidden + 2, 0),
        CLASSIFICATION: _HeadSizes(hidden * row, row, 0, 4 * hidden, 2),
        IMAGE_CLASSIFICATION: _HeadSizes(0, row, 0, hidden, 2),
        TAGGING: _HeadSizes(0, row, 0, hidden, 2, 1),
        QUESTION_ANSWERING: _HeadSizes(2 * row, 0, 2, hidden + 4, 0),
        CAUSAL_LM: _HeadSizes(0, 0, dimensions.vocab, 0, 0),
    }[head_task(task)]


def _digest(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str:
    """Digest config, and names, types, shapes and all bytes of tensors; the division into files does not matter."""
    rows = [[name, stored.info.dtype, stored.shape, stored.sha256] for name, stored in sorted(tensors.items())]
    return json_digest([dict(config), rows])
