"""Bytes of the things that a run holds: units, state, tensors, activations, operation tables, and rows of an owner.

A head with many logits computes them in chunks. Dropout masks of a recomputed block take one bit per value. The bytes
of an owner's rows and tokenizer follow from the sizes of its files.

A graph of a block with half of its subnets active keeps all but half of the subnets' activations. An estimate counts on
that only if it holds for every batch: with given tables, and with random choice under capacities. A run that gathers
scores keeps whole graphs in these passes, and the inputs of its linear layers.

Source: resident bytes of an agent before and after, measured with MiniLM's tokenizer (word pieces, 30,522 entries: 8.8
MiB), one of byte pairs (50,000 entries: 14.2 MiB), and 7,464 rows of texts (4.1 MiB; 2.1 MiB more once they were
encoded to 16 tokens each).
"""

from __future__ import annotations

import functools
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from ringtune.config.optimizers import state_bytes
from ringtune.costs.offload_costs import kinds_of_users, set_bytes
from ringtune.costs.profile import ModelFacts, NodeFacts
from ringtune.errors import DataError
from ringtune.job.job import Job
from ringtune.models.adapter_config import trains_own_weights
from ringtune.models.family import CHUNK, in_chunks
from ringtune.schedule.batches import num_batches
from ringtune.schedule.course import BFLOAT16, COLLABORATION, EXACT, NF4, TABLES_AT_ONCE, Course, dtype_of
from ringtune.schedule.operation_tables import FULL, Operations, Policy, ScoredWeights, block_row, pattern_of, share
from ringtune.schedule.saved_activations import VELORA
from ringtune.schedule.units import EMBEDDING
from ringtune.storage.arrow_files import arrow_files, is_arrow
from ringtune.techniques.frozen_weights import frozen_bytes, widened_bytes
from ringtune.techniques.offload import sent_pair_token_bytes
from ringtune.techniques.operations import choosers_of, limits_of

_HIDDEN_STATES: Final = 4
"""Hidden states with dropout masks, besides inputs of adapters: two, and two more where LoRA is on three matrices."""


def drawn_token_bytes(model: ModelFacts, max_length: int) -> float:
    """Upper bound of the bytes of a block's dropout masks per padded token.

    There is a value for every attention probability, for some hidden states, and for every input of an adapter module.

    Example: 12 heads, rows of 128 tokens, width 384 and a bottleneck are 1,536 + 5 * 384 values, 432 bytes.
    """
    adapters = sum(kept.width for kept in model.kept_inputs if kept.is_adapter)
    values = model.num_heads * max_length + _HIDDEN_STATES * model.hidden_size + adapters
    return model.repeats * values / 8


MAX_LOGIT_BYTES: Final = 16 << 20
"""Most bytes of the logits of a micro-batch; a head with more computes chunks of tokens of this size."""
_LOGIT_COPIES = 3


def logits_fit(num_tokens: int, token_logits: int, item_bytes: int) -> bool:
    """Whether a head may compute the logits of a micro-batch at once.

    Logits computed at once exist three times: as logits, probabilities, and gradient. Logits of a chunk are changed in
    place. ``token_logits`` are 0 if the head reads one token of a row.
    """
    return _LOGIT_COPIES * num_tokens * token_logits * item_bytes <= MAX_LOGIT_BYTES


def logits_peak_bytes(num_tokens: int, token_logits: int, item_bytes: int) -> int:
    """Upper bound of the bytes of logits of a micro-batch with at most ``num_tokens`` padded tokens.

    Logits that do not fit (``logits_fit``) are computed in chunks.
    """
    each = token_logits * item_bytes
    return min(_LOGIT_COPIES * num_tokens * each, max(MAX_LOGIT_BYTES, each))


def head_bytes(course: Course, model: ModelFacts, optimizer: str) -> tuple[int, int]:
    """Bytes of the head's weights, and of its optimizer state, with the classes of a run."""
    weights = model.head_bytes + model.head_class_bytes * len(course.labels)
    factors = model.head_factor_bytes + model.head_class_factor_bytes * len(course.labels)
    return weights, state_bytes(optimizer, weights, factors)


def handed_over_bytes(course: Course, model: ModelFacts, optimizer: str) -> int:
    """Bytes of the head, and of an invertible adapter, with their optimizer state."""
    head, table = sum(head_bytes(course, model, optimizer)), model.embedding_train_bytes
    return head + table + state_bytes(optimizer, table, model.embedding_factor_bytes) if course.invertible else head


ROW_NUMBER_BYTES: Final = 8
"""Bytes of the index of a row, beside the row."""


def embedding_grad_bytes(model: ModelFacts, tokens: float) -> float:
    """Upper bound of the bytes of a message with the embedding's gradient of a batch with ``tokens`` padded tokens.

    Only the rows of the token table that a batch uses are sent, each with its index. A table that is tied to the head
    is sent whole. Example: 1,024 tokens of width 768 are 3.2 MB, the whole table of 30,522 rows 94 MB.
    """
    whole = model.embedding_train_bytes
    if model.is_tied or not model.token_table_bytes:
        return whole
    row_bytes = model.token_table_bytes / model.vocab_size + ROW_NUMBER_BYTES
    return min(whole, whole - model.token_table_bytes + tokens * row_bytes)


VOCABULARY_ENTRY_BYTES: Final = 300
ROW_BYTES: Final = 650
"""Bytes of a row's Python objects, besides characters and tokens."""

TOKEN_BYTES: Final = 8
"""Bytes of a token of an encoded row: its id and its type."""


def data_bytes(
    model: ModelFacts, files: tuple[Path, ...], *, num_owners: int, rows: int, max_length: int, packed_rows: int = 0
) -> int:
    """Bytes of an owner's encoded rows and of the tokenizer.

    ``files`` are shared evenly by ``num_owners``; ``rows`` are the owner's, for training and evaluation, or sequences
    of ``packed_rows``.
    """
    size_bytes = sum(map(held_bytes, files)) // max(1, num_owners) + (rows + packed_rows) * ROW_BYTES
    if model.fixed_tokens:
        return size_bytes
    size_bytes += sum(
        (_UNPACKED - 1) * held_bytes(file) for file in files if is_arrow(file) or file.suffix.lower() == ".zst"
    ) // max(1, num_owners)
    return size_bytes + VOCABULARY_ENTRY_BYTES * model.vocab_size + rows * max_length * TOKEN_BYTES


_UNPACKED: Final = 3
"""Bytes of text for one of Parquet or zstd: measured 1.6 (film reviews, snappy) to 3.1 (sources and pages, zstd)."""


def held_bytes(path: Path) -> int:
    """Bytes of the rows of a file in memory: its text, its encoded pictures, or its unpacked arrays.

    0 for a folder of images. Of Parquet, Arrow and zstd the packed bytes.
    """
    if is_arrow(path):
        try:
            return sum(file.stat().st_size for file in arrow_files(path))
        except (OSError, DataError):
            return 0  # whoever reads the rows says what is wrong
    if not path.is_file():
        return 0
    if path.suffix.lower() == ".npz":
        try:
            with zipfile.ZipFile(path) as archive:
                return sum(entry.file_size for entry in archive.infolist())
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
            return 0  # whoever reads the rows says what is wrong
    return path.stat().st_size


SCORE_WORK_BYTES: Final = 2 << 20
"""Work space for the scores of a gradient: chunks in float64."""

_SCORES_BYTES: Final = 200
_SCORE_BYTES: Final = 64
_NUMBER_BYTES: Final = 40
_MESSAGE_BYTES: Final = 700
"""Measured bytes of Python objects: a block's scores of a micro-batch, one score, one number in it, and a message."""

_ROW_BYTES: Final = 260
_BATCH_BYTES: Final = 400
"""Measured bytes of Python objects of a row and of a batch besides their codes: texts, tuples, entries of caches."""


class SavedGraphs(NamedTuple):
    """Upper bounds of the graphs of one item, for each block.

    Attributes:
        micros: micro-batches with a graph of the block.
        shares: shares of the block's subnets in these graphs, summed over the micro-batches.
        begins: micro-batches with a graph that begins at the block, because the block below has none.
    """

    micros: tuple[int, ...]
    shares: tuple[float, ...]
    begins: tuple[int, ...]

    def inputs(self, start: int, stop: int, microbatches: int) -> int:
        """Upper bound of the inputs that graphs of blocks [start, stop) keep: one for each range with a graph.

        At most one of two adjacent blocks begins a graph.
        """
        if start >= stop:
            return 0
        count = self.micros[start] + sum(self.begins[start + 1 : stop])
        return min(count, microbatches * -(-(stop - start) // 2))


def score_token_bytes(model: ModelFacts, item_bytes: int) -> int:
    """Bytes per padded token and block that a graph keeps additionally where scores are gathered.

    A linear layer with a gradient of its weights keeps its input; where own weights train it does so in any pass.
    """
    attention = model.attention_width or model.hidden_size
    return (2 * model.hidden_size + attention + model.intermediate_size + model.more_scored_values) * item_bytes


def gathers_scores(course: Course) -> bool:
    """Whether a run has passes that gather scores, which build the whole graph of every block that may train."""
    return course.choice is not None and bool(course.choice.scores)


def needs_gradients(course: Course) -> bool:
    """Whether the scores of a run need gradients of the weights that are scored."""
    return course.choice is not None and any(score.needs_gradient for score in course.choice.scores)


def scores_adapters(course: Course) -> bool:
    """Whether the scores of a run are of its adapters, so that no gradient of a base weight is computed for them."""
    return course.choice is not None and course.choice.scored_weights == ScoredWeights.ADAPTER


@functools.lru_cache(maxsize=64)
def block_scores_bytes(course: Course) -> int:
    """Bytes of one block's scores for all batches, until they are reported; 0 if a run gathers none.

    A node holds them as numbers until the end of a turn, then as messages. Example: two scores of 6 subnets for 600
    batches of 4 micro-batches are 2.8 MB.
    """
    if course.choice is None:
        return 0
    scores, subnets = len(course.choice.scores), course.choice.subnets
    numbers = course.microbatches * (_SCORES_BYTES + scores * (_SCORE_BYTES + subnets * _NUMBER_BYTES))
    message = _MESSAGE_BYTES + 2 * course.microbatches * scores * subnets * 8
    batches = sum(course.num_scored(owner) for owner in course.owners)
    return batches * (numbers + message) if scores else 0


@functools.lru_cache(maxsize=64)
def kept_graphs(course: Course) -> SavedGraphs | None:
    """Upper bounds of the graphs of one item in any batch; None if they may be whole graphs of every block."""
    choice = course.choice
    if gathers_scores(course):
        return None
    if choice is not None and choice.tables:
        return _most([_of_table(course, given.operations) for given in choice.tables])
    if choice is not None:
        return _of_capacities(course) if choice.policy == Policy.RANDOM else None
    return _of_table(course, course.operations) if course.operations is not None else None


def _most(each: Sequence[SavedGraphs | None]) -> SavedGraphs | None:
    known = [kept for kept in each if kept is not None]
    if len(known) < len(each):
        return None

    def most(field: int) -> tuple[float, ...]:
        return tuple(map(max, zip(*(kept[field] for kept in known), strict=True)))

    return SavedGraphs(tuple(map(int, most(0))), most(1), tuple(map(int, most(2))))


def _of_table(course: Course, table: Operations) -> SavedGraphs | None:
    """Upper bounds over a table's batches; None if it leaves a batch out, which is all full."""
    batches = sum(num_batches(owner.train_rows, course.batch_size) for owner in course.owners)
    if len(table.batches) < batches * table.passes:
        return None
    return _most([_of_rows(rows, course.num_blocks, table.subnets) for rows in {each.rows for each in table.batches}])


def _of_rows(rows: tuple[str, ...], num_blocks: int, subnets: int) -> SavedGraphs:
    codes = [block_row(row, subnets) for row in rows]
    blocks = range(num_blocks)
    micros = tuple(sum(code[block] == FULL for code in codes) for block in blocks)
    shares = tuple(sum(share(pattern_of(row, block, subnets), FULL) for row in rows) for block in blocks)
    begins = tuple(
        sum(code[block] == FULL and (not block or code[block - 1] != FULL) for code in codes) for block in blocks
    )
    return SavedGraphs(micros, shares, begins)


def _of_capacities(course: Course) -> SavedGraphs:
    """Upper bounds from the capacities of each chooser, for any random choice; blocks without one are all full."""
    parts, subnets = course.microbatch_sizes(), course.subnets
    micros, shares = [len(parts)] * course.num_blocks, [float(len(parts))] * course.num_blocks
    for chooser in choosers_of(course):
        limits = limits_of(course, chooser, parts)
        most = min(len(parts), limits.full // min(limits.costs))
        for block in range(chooser.start, chooser.stop):
            if chooser.subnet == 0:
                micros[block], shares[block] = 0, 0.0
            micros[block] = most if subnets == 1 else len(parts) if most else micros[block]
            shares[block] += min(limits.full / max(limits.costs), most) / subnets
    return SavedGraphs(tuple(micros), tuple(shares), tuple(micros))


@functools.lru_cache(maxsize=64)
def tables_bytes(course: Course) -> int:
    """Upper bound of the bytes of operation tables on every node of a run; 0 without tables.

    A row is a text, and so are the cached operations of whole blocks in it. Example: 600 batches of 4 micro-batches, 12
    blocks and 6 subnets are 1.1 MB a table.
    """
    if not course.may_skip:
        return 0
    batches = sum(num_batches(owner.train_rows, course.batch_size) for owner in course.owners)
    row_bytes = _ROW_BYTES + course.num_blocks * (course.subnets + 1)
    return _num_tables(course) * _num_passes(course) * batches * (_BATCH_BYTES + course.microbatches * row_bytes)


def _num_passes(course: Course) -> int:
    """The passes of the largest table that a run may have."""
    choice, given = course.choice, [course.operations] if course.operations else []
    if choice is None:
        return max((table.passes for table in given), default=1)
    given += [table.operations for table in choice.tables]
    return max([choice.passes(course.microbatches), *(table.passes for table in given)])


def _num_tables(course: Course) -> int:
    choice = course.choice
    if choice is None:
        return 1
    if choice.tables:  # the plan has them all, and a grant brings each once more
        return len(choice.tables) + min(TABLES_AT_ONCE, len(choice.tables))
    every = choice.refresh_steps
    return min(TABLES_AT_ONCE, 1 + (course.num_steps // every if every else 0))


DTYPE_BYTES: Final = {"float32": 4, "float64": 8}

CONTEXT_BYTES: Final = 815 << 20
"""Bytes of a process on a CUDA device without tensors: context, code of kernels, work space of cuBLAS.

Measured on one NVIDIA H200 with torch 2.11.0+cu130 and driver 580: 527 MiB of context, 751 MiB once the kernels of a
transformer are loaded, and 64 MiB for cuBLAS. A smaller device may load less; no other one was measured.
"""


KEPT_KERNELS: Final = 16
"""Kernels of matrix products in bfloat16 that oneDNN keeps compiled for their shapes, on a processor."""

KERNEL_BYTES: Final = 640 << 10
"""Upper bound of the bytes of such a kernel: measured 0.3 MiB for matrices of width 2,048, 0.6 for width 384."""


class MemorySettings(NamedTuple):
    """Settings of a job, besides its course, on which the memory of its nodes depends.

    Attributes:
        dtype: of the computation.
        audit: share of the cells that are drawn in an audit; 0 = none is.
    """

    optimizer: str = "adamw"
    dtype: str = "float32"
    audit: float = 0.0

    @staticmethod
    def of_job(job: Job) -> MemorySettings:
        """Return the settings of a job."""
        return MemorySettings(job.train.optimizer, job.model.dtype, job.audit_share)


DEFAULT_SETTINGS: Final[MemorySettings] = MemorySettings()


class Sizes:
    """Bytes of the things that a run holds: units, their state, tensors and activations.

    Args:
        optimizer: one of ``ringtune.config.optimizers.OPTIMIZERS``.
        dtype: of the computation, a key of ``DTYPE_BYTES``.
        activation_token_bytes: kept by one block for its backward, per padded token; measured, or from
            ``estimate_activation_token_bytes``.
        lowest_token_bytes: as ``activation_token_bytes``, of the lowest block that trains; 0 = as other blocks.
        trains_own_weights: whether the blocks' own weights train instead of adapters.
        adapter: configuration; used where users have adapters of their own.
        device: ``cpu`` or ``cuda``.

    Attributes:
        context_bytes: of the device without tensors; 0 on a processor, where libraries are not in the budget.
        kernels_bytes: of compiled products in bfloat16 on a processor; 0 where products are in another type.
        helped: bytes of a block's adapters that a helper trains.
        shard_bytes: of a trained block with optimizer state, gradients that are added up over an interval, and the sum
            of users in collaboration.
        vectors_bytes: of VeLoRA's vectors of a block.
        snapshot_bytes: of a trained block in a snapshot or copy: both.
        sequence_bytes: of the keys and values of a block for a text that is written; 0 without ``Course.generation``.
        handed_over_bytes: of the head with its optimizer state, and with adapters of an invertible one.
    """

    def __init__(
        self,
        course: Course,
        model: ModelFacts,
        *,
        optimizer: str,
        dtype: str,
        activation_token_bytes: float,
        data_bytes: int = 0,
        lowest_token_bytes: float = 0.0,
        trains_own_weights: bool = False,
        has_dropout: bool = False,
        adapter: str = "",
        device: str = "cpu",
    ) -> None:
        self.context_bytes = CONTEXT_BYTES if device == "cuda" else 0
        is_native = course.compute == BFLOAT16 or (course.frozen is not None and course.frozen.native)
        self.kernels_bytes = KEPT_KERNELS * KERNEL_BYTES if is_native and device == "cpu" else 0
        if course.user_sets:
            activation_token_bytes += max((kind.more_activation_token_bytes for kind in model.kinds), default=0.0)
        self._item_bytes = DTYPE_BYTES[dtype]
        self._token_logits = model.head_token_logits + model.head_class_token_logits * len(course.labels)
        self._activation_token_bytes = activation_token_bytes
        self.lowest_token_bytes = min(lowest_token_bytes, activation_token_bytes)
        held = functools.partial(frozen_bytes, item_bytes=self._item_bytes, frozen=course.frozen)
        self.block_bytes = held(
            model.block_bytes,
            params=model.block_matrix_params,
            rows=model.block_matrix_rows,
            gguf_bytes=model.gguf_block_bytes,
        )
        self.embedding_bytes = held(
            model.embedding_bytes,
            params=model.embedding_matrix_params,
            rows=model.embedding_matrix_rows,
            in_blocks=False,
            gguf_bytes=model.gguf_embedding_bytes,
        )
        if dtype_of(course.frozen) == NF4:
            self.block_bytes += model.more_scale_bytes
        self.shared_bytes = model.shared_bytes
        self._largest_params = (model.largest_matrix_params, model.head_token_logits * model.hidden_size)
        self._frozen = course.frozen
        self.optimizer = optimizer
        self.adapter_bytes = model.adapter_block_bytes
        self.helped = set_bytes(course, model, adapter=adapter)
        self.head_bytes, self.head_state_bytes = head_bytes(course, model, optimizer)
        self.handed_over_bytes = handed_over_bytes(course, model, optimizer)
        self.adapter_state_bytes = state_bytes(optimizer, self.adapter_bytes, model.adapter_block_factor_bytes)
        kinds = kinds_of_users(model, course.user_sets)
        self.sets_state_bytes = sum(
            state_bytes(optimizer, kind.adapter_block_bytes, kind.adapter_block_factor_bytes) for kind in kinds
        )
        self.shard_bytes = (
            self.helped.held
            + self.sets_state_bytes
            + (self.helped.gradients if course.helper_settings.interval > 1 else 0)
            + (self.helped.sent if course.helper_settings.users == COLLABORATION else 0)
        )
        self.vectors_bytes = self._item_bytes * _vector_values(course, model)
        self.snapshot_bytes = self.shard_bytes + self.vectors_bytes
        self.token_bytes, self._hidden_size = course.widest * self._item_bytes, course.hidden_size
        self.data_bytes = data_bytes
        self._embedding_train_bytes = model.embedding_train_bytes
        self._embedding_state_bytes = state_bytes(optimizer, model.embedding_train_bytes, model.embedding_factor_bytes)
        batch_tokens = course.batch_size * course.max_length
        self._embedding_grad_bytes = math.ceil(embedding_grad_bytes(model, batch_tokens))
        self.is_tied = model.is_tied
        self._token_table_bytes = model.token_table_bytes or model.embedding_train_bytes
        micro_tokens = course.microbatch_sizes()[0] * course.max_length
        row_bytes = course.hidden_size * self._item_bytes
        max_rows = math.ceil(self._token_table_bytes / row_bytes) + micro_tokens
        # of a batch's rows in the embedding's gradient, at most: the table and one micro-batch
        self.embedding_rows_bytes = min(batch_tokens, max_rows) * (row_bytes + ROW_NUMBER_BYTES)
        inputs = score_token_bytes(model, self._item_bytes)
        self._passing_token_bytes = max(0.0, activation_token_bytes - inputs)
        self._drawn_token_bytes = drawn_token_bytes(model, course.max_length) if has_dropout else 0.0
        self._pair_token_bytes = sent_pair_token_bytes(model, EXACT)
        self._sent_pair_token_bytes = sent_pair_token_bytes(model, course.helper_settings.pairs)
        self._work_share = _work_share(model, course.max_length)
        self._has_mask, self._more_masks = not model.fixed_tokens, model.more_masks
        self._head = course.head
        # queries, keys, values, attention output and the feed-forward width: those of norms and adapters do not
        # depend on the share of active subnets; measured by tests/edge/model/test_pattern_sizes.py
        inner = (model.inner_kept + trains_own_weights) * model.intermediate_size
        in_subnets = (4 * (model.attention_width or model.hidden_size) + inner) * self._item_bytes
        self._subnet_token_bytes = min(in_subnets, activation_token_bytes)
        saved = projected_values(course, model, has_dropout=has_dropout)
        self._projected_token_bytes = [self._item_bytes * values for values in saved]
        keeps_inputs = trains_own_weights or scores_adapters(course)
        self._score_token_bytes = 0 if keeps_inputs else score_token_bytes(model, self._item_bytes)
        attention = max(3 * model.hidden_size, model.attention_width)  # query, key and value may be one tensor
        self.gradient_bytes = max(model.intermediate_size, attention) * model.hidden_size * self._item_bytes
        largest = min(self.adapter_bytes, self.gradient_bytes)
        of_base = max(self.gradient_bytes, model.scored_gradient_params * self._item_bytes)
        self.scored_gradient_bytes = largest if scores_adapters(course) else of_base
        self.tables_bytes = tables_bytes(course)
        self.sequence_bytes = 0
        if course.generation is not None:  # a block with a window keeps fewer
            heads = model.num_kv_heads or model.num_heads
            width = (model.attention_width or model.hidden_size) * heads // model.num_heads
            most_tokens = course.max_length + course.generation.max_new_tokens
            self.sequence_bytes = 2 * width * self._item_bytes * most_tokens

    @staticmethod
    def of_job(job: Job, course: Course, node: NodeFacts) -> Sizes:
        """Build the sizes of a job's run at one node from its facts."""
        return Sizes.at(course, node, MemorySettings.of_job(job))

    @staticmethod
    def at(course: Course, node: NodeFacts, settings: MemorySettings) -> Sizes:
        """Build the sizes of a run at one node from its facts."""
        return Sizes(
            course,
            node.model,
            optimizer=settings.optimizer,
            dtype=settings.dtype,
            activation_token_bytes=node.activation_token_bytes,
            data_bytes=node.data_bytes,
            lowest_token_bytes=node.lowest_token_bytes,
            trains_own_weights=trains_own_weights(node.shape.adapter),
            has_dropout=node.shape.dropout > 0,
            adapter=node.shape.adapter,
            device=node.device,
        )

    def trained_bytes(self, unit: int) -> int:
        """Bytes of the trained weights of a unit: adapter or own weights of a block, head, or embedding."""
        if unit == EMBEDDING:
            return self._embedding_train_bytes
        return self.head_bytes if unit == self._head else self.adapter_bytes

    def largest_tensor_bytes(self, unit: int) -> int:
        """Upper bound of the bytes of a trained tensor of a unit."""
        if unit == EMBEDDING:
            return self._token_table_bytes
        return self.head_bytes if unit == self._head else min(self.adapter_bytes, self.gradient_bytes)

    def unit_grad_bytes(self, unit: int) -> int:
        """Upper bound of the bytes of a message with the gradient of embedding or head."""
        return self._embedding_grad_bytes if unit == EMBEDDING else self.head_bytes

    @property
    def decoder_bytes(self) -> int:
        """Bytes of the matrix that computes logits of every token, such as a language model's decoder."""
        return self._largest_params[1] * self._item_bytes

    def widened_bytes(self, *, is_owner: bool) -> int:
        """Bytes of the buffer for a widened frozen matrix of a block, or of an owner's decoder."""
        largest = max(self._largest_params) if is_owner else self._largest_params[0]
        return widened_bytes(largest, item_bytes=self._item_bytes, frozen=self._frozen)

    def state_bytes(self, unit: int) -> int:
        """Bytes of the optimizer state of a unit: a block's adapter, the head, or the embedding."""
        if unit == EMBEDDING:
            return self._embedding_state_bytes
        return self.head_state_bytes if unit == self._head else self.adapter_state_bytes

    def largest_state_bytes(self, unit: int) -> int:
        """Upper bound of the bytes of optimizer state of one trained tensor of a unit."""
        return min(self.state_bytes(unit), state_bytes(self.optimizer, self.largest_tensor_bytes(unit)))

    def invertible_bytes(self, tokens: float) -> float:
        """Upper bound of the bytes that an invertible adapter keeps for its backward.

        These are its input, a half of its output and the output, and twice the widths of both bottlenecks, which
        together are less than its weights by the width of an embedding.
        """
        return tokens * (2.5 * self.token_bytes + 2 * self._embedding_train_bytes / self._hidden_size)

    def tensor_bytes(self, tokens: float) -> float:
        """Bytes of a hidden state or gradient of ``tokens`` padded tokens."""
        return tokens * self.token_bytes

    def run_again_bytes(self, tokens: float) -> float:
        """Bytes that a recomputed block keeps: its input, and its dropout masks."""
        return tokens * (self.token_bytes + self._drawn_token_bytes)

    def kept_bytes(self, tokens: float) -> float:
        """Bytes that one block keeps for its backward of ``tokens`` padded tokens."""
        return tokens * self._activation_token_bytes

    def work_bytes(self, tokens: float) -> float:
        """Bytes of work space of a block that runs, forward or backward, besides graphs that are kept."""
        return self.kept_bytes(tokens) * self._work_share

    def projected_bytes(self, tokens: float, block: int | None = None) -> float:
        """Bytes that a block keeps for its backward, with VeLoRA if it is set; None = the block that keeps most."""
        saved = self._projected_token_bytes
        of_block = min(saved) if block is None else saved[block]
        return max(0.0, self.kept_bytes(tokens) - tokens * of_block)

    def kept_passing_bytes(self, tokens: float) -> float:
        """Bytes that one block keeps for a backward without gradients of its weights: no inputs of linear layers."""
        return tokens * self._passing_token_bytes

    def kept_in_subnets_bytes(self, tokens: float) -> float:
        """The part of ``kept_bytes`` that belongs to subnets and scales with their active share."""
        return tokens * self._subnet_token_bytes

    def kept_for_scores_bytes(self, tokens: float) -> float:
        """Additional bytes that one block keeps while scores are gathered."""
        return tokens * self._score_token_bytes

    def pair_bytes(self, tokens: float) -> float:
        """Bytes of one block's pairs for a helper, in the dtype of the computation."""
        return tokens * self._pair_token_bytes

    def sent_pair_bytes(self, tokens: float) -> float:
        """Bytes of one block's pairs for a helper, as they are sent."""
        return tokens * self._sent_pair_token_bytes

    def mask_bytes(self, rows: int, max_length: int) -> int:
        """Bytes of the attention mask of a micro-batch: a number for every two tokens of a row; 0 for images.

        An encoder may have further ones, such as a bias for each head, and the normalised table of its positions.
        """
        numbers = rows * max_length**2 * (1 + self._more_masks)
        return numbers * self._item_bytes + self.shared_bytes if self._has_mask else 0

    def head_work_bytes(self, tokens: float) -> float:
        """Bytes of work space of the head: the hidden state with its gradient, and the logits."""
        logits = logits_peak_bytes(math.ceil(tokens), self._token_logits, self._item_bytes)
        return 2 * self.tensor_bytes(tokens) + logits


def _work_share(model: ModelFacts, max_length: int) -> float:
    """Upper bound of a block's work space, as a share of what it keeps for its backward.

    Of layers that share their weights one runs at a time. A gated delta net keeps many tensors of each chunk of tokens,
    and needs few at once, with a state of each row: 0.35 to 0.76 of them, and up to 0.97 in a row of one chunk
    (measured with heads of 32 to 128). Other blocks need up to 0.75, and are planned with 1.
    """
    share = 0.7 + 0.3 * CHUNK / in_chunks(max_length) if model.chunk_kept_values else 1.0
    return share / model.repeats


def _vector_values(course: Course, model: ModelFacts) -> int:
    """Values of VeLoRA's vectors for one block: a sub-token for each layer, or for each projected input of pairs.

    Example: two LoRA matrices that read 768 values in 32 parts have 2 vectors of 24.
    """
    velora, has_pairs = course.velora, course.helper_settings.pairs == VELORA
    of_pairs = model.pair_vector_values + sum(kind.pair_vector_values for kind in model.kinds) if has_pairs else 0
    if velora is None:
        return of_pairs
    of_layers = max(
        sum(sum(kept.chosen(velora.layers)) * velora.subtoken_size(kept.width) for kept in inputs)
        for inputs in model.block_inputs
    )
    return max(of_pairs, of_layers)  # a block has one or the other


def projected_values(course: Course, model: ModelFacts, *, has_dropout: bool) -> tuple[int, ...]:
    """Values per token that VeLoRA saves in each block; negative if others keep all inputs of its layers.

    Example: 3,072 inputs in 32 parts are 32 numbers, so 3,040 values less. Random vectors differ by layer: three layers
    that read 768 values keep 96.
    """
    velora = course.velora
    if velora is None:
        return (0,) * model.num_blocks
    saved = (
        sum(kept.saved_values(velora, has_dropout=has_dropout) for kept in inputs) for inputs in model.block_inputs
    )
    return of_blocks([model.repeats * values for values in saved], model.num_blocks)


_Number = TypeVar("_Number", int, float)


def of_blocks(values: Sequence[_Number], num_blocks: int) -> tuple[_Number, ...]:
    """Return a value for each block: those of ``ModelFacts.block_inputs``, or the least of them for all."""
    return tuple(values) if len(values) == num_blocks else (min(values),) * num_blocks
