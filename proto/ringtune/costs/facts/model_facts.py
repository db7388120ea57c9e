"""The sizes of a model that planning counts with: of its folder, and of the job's adapters and head."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ringtune.costs.facts.full_sizes import with_full_parameters
from ringtune.costs.facts.job_subnets import check_subnets
from ringtune.costs.kind_facts import KindFacts
from ringtune.costs.memory.activations import estimate_activation_token_bytes
from ringtune.costs.memory.sizes import DTYPE_BYTES
from ringtune.costs.memory.units.unit_state import factor_numbers
from ringtune.costs.offload.pair_bytes import BFLOAT16, FLOAT32, VELORA, pair_token_bytes, pair_widths
from ringtune.costs.profile import ModelFacts
from ringtune.errors import JobError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.hift import check_group
from ringtune.jobs.parts.offload import check_fused
from ringtune.jobs.user_adapters import job_of_user, kinds_of
from ringtune.models.adapters.adapter_config import adapter_block_params, auxiliary_of, trains_own_weights
from ringtune.models.adapters.auxiliary_config import AuxiliaryConfig, in_block
from ringtune.models.adapters.kept_inputs import has_other_adapters, kept_inputs, lora_values
from ringtune.models.adapters.merge_support import places_of
from ringtune.models.adapters.offload_support import offload_refusal
from ringtune.models.consistency import check_files
from ringtune.models.families import FAMILIES, check_task
from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
    Dimensions,
    Shapes,
    Widths,
)
from ringtune.models.folder import base_tensors, model_dimensions, read_config
from ringtune.models.own_weights import own_weights
from ringtune.models.tensors import CONFIG_FILE, StoredTensor


def model_facts(folder: str | Path, job: Job, *, in_part: bool = False) -> ModelFacts:
    """Sizes of the model in ``folder`` with the job's adapters and head, in the job's compute dtype.

    Args:
        folder: the model folder.
        job: for task, adapter, dtype, longest text and private blocks.
        in_part: the folder lacks weights that other nodes have; weights count as next to nothing.

    Raises:
        ModelError: not a folder of a supported family or task, a tensor is missing or has another shape, or two of its
            files do not belong together.
        JobError: the job asks for longer texts or more private blocks than the model has.
        IntegrityError: a safetensors file is damaged.
    """
    config = read_config(folder)
    family, dimensions = FAMILIES[config["model_type"]], model_dimensions(config)
    check_job(job, config, where=str(Path(folder) / CONFIG_FILE))
    check_files(folder, config)
    tensors = {} if in_part else base_tensors(folder, config, with_decoder=job.model.task == CAUSAL_LM)
    item_bytes = DTYPE_BYTES[job.model.dtype]
    adapter_params = adapter_block_params(
        job.adapter.config,
        hidden_size=dimensions.hidden,
        widths=family.widths(config),
        num_blocks=dimensions.num_blocks,
    )
    weights = {name: math.prod(stored.shape) for name, stored in tensors.items()}
    in_block = sum(count for name, count in weights.items() if name.startswith(f"{family.block_prefix}0."))
    own = own_weights(family, config) if trains_own_weights(job.adapter.config) else {}
    auxiliary = auxiliary_of(job.adapter.config)
    trained = [own, *(_shapes_in_block(auxiliary, at, family.widths(config)) for at in range(dimensions.num_blocks))]
    own_params = sum(math.prod(shape) for shape in own.values())
    in_blocks, in_embedding = _frozen_matrices(tensors, family.block_prefix, own)
    outside = [name for name in weights if not name.startswith(family.block_prefix)]
    head = _head_sizes(job.model.task, dimensions, plugged=family.plugged)
    facts = ModelFacts(
        model_type=config["model_type"],
        num_blocks=dimensions.num_blocks,
        hidden_size=dimensions.hidden,
        intermediate_size=dimensions.inner,
        num_heads=dimensions.num_heads,
        vocab_size=dimensions.vocab,
        block_bytes=(1 if in_part else in_block - own_params) * item_bytes,
        embedding_bytes=(1 if in_part else sum(weights[name] for name in outside)) * item_bytes,
        head_bytes=head.params * item_bytes,
        head_class_bytes=head.class_params * item_bytes,
        head_token_logits=head.token_logits,
        head_class_token_logits=head.class_token_logits,
        inner_kept=dimensions.inner_kept,
        fixed_tokens=dimensions.longest if dimensions.fixed else 0,
        num_kv_heads=dimensions.kv_heads or dimensions.num_heads,
        kept_inputs=kept_inputs(family, config, job.adapter.config),
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
        largest_matrix_params=in_blocks.largest,
        attention_width=dimensions.attention or dimensions.hidden,
        more_kept_values=dimensions.more_kept,
        kept_scores=dimensions.kept_scores,
    )
    facts = _with_kinds(_with_pairs(facts, job, family.widths(config)), folder, job, family.widths(config))
    if in_part or not job.method.full_parameters:
        return facts
    return with_full_parameters(facts, family, tensors, task=job.model.task, item_bytes=item_bytes)


def _shapes_in_block(auxiliary: Iterable[AuxiliaryConfig], block: int, widths: Widths) -> Shapes:
    """The shapes of all tensors of the auxiliary models of a block."""
    return {name: shape for one in in_block(auxiliary, block) for name, shape in one.shapes(widths).items()}


def _with_pairs(facts: ModelFacts, job: Job, widths: Widths) -> ModelFacts:
    """Copy facts with the sizes of a block's pairs, of the block with most of them; none where no helper can fit."""
    config, dropout = job.adapter.config, job.train.dropout
    if offload_refusal(config, dropout=dropout, fused=widths.merged):
        return facts
    blocks = [
        pair_widths(config, at, hidden_size=facts.hidden_size, widths=widths, dropout=dropout)
        for at in range(facts.num_blocks)
    ]

    def most(wire: str) -> int:
        return max(pair_token_bytes(block, wire, value_bytes=DTYPE_BYTES[job.model.dtype]) for block in blocks)

    return dataclasses.replace(
        facts,
        pair_token_bytes=most(FLOAT32),
        pair_rounded_token_bytes=most(BFLOAT16),
        pair_projected_token_bytes=most(VELORA),
    )


def _with_kinds(facts: ModelFacts, folder: str | Path, job: Job, widths: Widths) -> ModelFacts:
    """Copy facts with the sizes of adapters that single users chose."""
    users = tuple(job.offload.chosen_adapters)
    others = [kind for kind in kinds_of(job, users)[1:] if kind.users]
    if not others:
        return facts
    base, kinds = computed_token_bytes(facts, job), []
    for kind in others:
        own_job = job_of_user(job, kind.users[0])
        own = model_facts(folder, own_job, in_part=True)
        kinds.append(
            KindFacts(
                config=kind.config,
                users=kind.users,
                adapter_block_bytes=own.adapter_block_bytes,
                adapter_block_factor_bytes=own.adapter_block_factor_bytes,
                pair_token_bytes=own.pair_token_bytes,
                pair_rounded_token_bytes=own.pair_rounded_token_bytes,
                pair_projected_token_bytes=own.pair_projected_token_bytes,
                more_activation_token_bytes=max(0.0, computed_token_bytes(own, own_job) - base),
            )
        )
    configs = [job.adapter.config, *(kind.config for kind in others)]
    places = {place for config in configs for place in places_of(config)}
    beside = sum(math.prod(getattr(widths, place)) for place in places)
    return dataclasses.replace(facts, kinds=tuple(kinds), beside_block_bytes=beside * DTYPE_BYTES[job.model.dtype])


class _Matrices(NamedTuple):
    """Numbers and rows of some matrices together, and numbers of the largest one."""

    params: int
    rows: int
    largest: int

    @staticmethod
    def of(shapes: Iterable[tuple[int, ...]]) -> _Matrices:
        """Count those of these shapes that are matrices."""
        found = [shape for shape in shapes if len(shape) == 2]
        sizes = [math.prod(shape) for shape in found]
        return _Matrices(sum(sizes), sum(shape[0] for shape in found), max(sizes, default=0))


def _frozen_matrices(
    tensors: Mapping[str, StoredTensor], block_prefix: str, own: Collection[str]
) -> tuple[_Matrices, _Matrices]:
    """Count the frozen matrices of one block, and those outside the blocks.

    Args:
        tensors: of the model, by name.
        block_prefix: how the names of all blocks begin.
        own: names inside a block of what trains.
    """
    first = f"{block_prefix}0."
    in_block = {name.removeprefix(first): stored for name, stored in tensors.items() if name.startswith(first)}
    outside = [stored.shape for name, stored in tensors.items() if not name.startswith(block_prefix)]
    return _Matrices.of(stored.shape for name, stored in in_block.items() if name not in own), _Matrices.of(outside)


def computed_token_bytes(model: ModelFacts, job: Job) -> float:
    """Compute what one block keeps for backward per padded token of a job's longest row, where nothing was measured."""
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
    """Refuse a job that asks for more than the model can do.

    Raises:
        ModelError: its family has no head for the task.
        JobError: longer texts, more private blocks, larger groups than it has, or subnets that do not divide heads.
    """
    family, dimensions = FAMILIES[config["model_type"]], model_dimensions(config)
    check_task(family, job.model.task, where=where)
    longest, asked = dimensions.longest, job.train.max_length
    if not dimensions.fixed and asked > longest:
        raise JobError(f"train.max_length is {asked}, the model takes {longest} tokens at most; lower it")
    if job.privacy.private_blocks >= dimensions.num_blocks:
        raise JobError(
            f"privacy.private_blocks is {job.privacy.private_blocks}, the model has {dimensions.num_blocks} blocks; "
            "leave at least one to train"
        )
    check_group(job.hift, dimensions.num_blocks)
    check_subnets(job, dimensions, where=where)
    check_fused(job.offload, adapter=job.adapter, train=job.train, fused=family.widths(config).merged)


class _HeadSizes(NamedTuple):
    """Trainable weights of a head, what each class adds, its logits for each token; rows and columns of the weights.

    Attributes:
        class_token_logits: what each class adds to the logits of a token.
    """

    params: int
    class_params: int
    token_logits: int
    factors: int
    class_factors: int
    class_token_logits: int = 0


def _head_sizes(task: str, dimensions: Dimensions, *, plugged: bool) -> _HeadSizes:
    """Count the weights of AdapterHub's default head for a task.

    A language model's head is frozen and counts as embedding. A family that is plugged in classifies by one matrix.
    """
    hidden, row = dimensions.hidden, dimensions.hidden + 1
    if plugged and task in (CLASSIFICATION, REGRESSION):
        one = _HeadSizes(0, hidden, 0, hidden, 1)
        return one if task == CLASSIFICATION else _HeadSizes(hidden, 0, 0, hidden + 1, 0)
    return {
        REGRESSION: _HeadSizes(hidden * row + row, 0, 0, 4 * hidden + 2, 0),
        CLASSIFICATION: _HeadSizes(hidden * row, row, 0, 4 * hidden, 2),
        IMAGE_CLASSIFICATION: _HeadSizes(0, row, 0, hidden, 2),
        TAGGING: _HeadSizes(0, row, 0, hidden, 2, 1),
        QUESTION_ANSWERING: _HeadSizes(2 * row, 0, 2, hidden + 4, 0),
        CAUSAL_LM: _HeadSizes(0, 0, dimensions.vocab, 0, 0),
    }[task]


def _digest(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str:
    """Digest config, names, types, shapes and samples, so that two trainings of one architecture differ.

    The number of files does not matter, only what is in them.
    """
    digest = hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode())
    for name, stored in sorted(tensors.items()):
        digest.update(json.dumps([name, stored.info.dtype, stored.shape]).encode())
        digest.update(stored.sample())
    return digest.hexdigest()
