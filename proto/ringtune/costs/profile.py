"""The profile: measurements of each node and link before planning; JSON with units in the keys.

The planner adds these times up, the simulator replays them. A *work* is the subject of one timing;
``ringtune.costs.action_costs`` composes the time of an action from works. Times grow with the size of the micro-batch
in padded tokens (rows x tokens), linearly between two measured sizes. The time of a block grows linearly with the share
of its active subnets, between a measured part and the whole; norms, adapters and masks do not depend on the share.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from ringtune.errors import InvalidInputError, PlanError
from ringtune.models.kept_inputs import KeptInput
from ringtune.schedule.course import AS_COMPUTED
from ringtune.schedule.run_shape import UserRows
from ringtune.storage.strict import LATER, Bounds, Longest, check_fields, read_dataclass, to_table

Amount = Annotated[int, Bounds(ge=0)]
Size = Annotated[int, Bounds(ge=1)]
Measured = Annotated[float, Bounds(ge=0, lt=1e18)]
MAX_ROWS: Final = 1 << 24
"""Most training or evaluation rows of a node: coordinator and nodes count through all of them, whatever a node says."""
SHORTEST_BLOCK_S: Final = 1e-6
"""Nothing runs a block in less: a call from Python alone takes as long."""
Rows = Annotated[int, Bounds(ge=0, le=MAX_ROWS, advice="give the node fewer rows")]
MAX_NAMES: Final = 1 << 16
"""Most classes or tags of a node, and users (ImageNet-21k has 21,843): the plan has them, and each node reads it."""
Few = Longest(MAX_NAMES, advice="leave out rows of rare ones")
Names = Annotated[tuple[str, ...], Few]
Word = Annotated[str, Longest(1000)]


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFacts:
    """Sizes of one kind of adapter in a block, chosen by single users; other sizes are those of the job's own kind.

    Attributes:
        config: in the form of ``adapter.config``.
        users: who chose it.
        adapter_block_bytes: of its weights.
        adapter_block_factor_bytes: of rows and columns of these, for Adafactor.
        pair_token_bytes: of its pairs for a helper, per token.
        pair_rounded_token_bytes: of the same, rounded to 16 bits.
        pair_projected_token_bytes: of the same, with projections of inputs.
        more_activation_token_bytes: kept by a block for its backward beyond the job's own kind, estimated.
        pair_vector_values: of the vectors for a block's pairs; 0 = no input is projected.
    """

    config: str
    users: tuple[str, ...]
    adapter_block_bytes: int
    adapter_block_factor_bytes: int
    pair_token_bytes: int
    pair_rounded_token_bytes: int
    pair_projected_token_bytes: int
    more_activation_token_bytes: float
    pair_vector_values: Annotated[int, LATER] = 0


class Work(enum.StrEnum):
    """Subject of one timing; for one micro-batch unless said otherwise."""

    EMBED = "embed"  # token ids to hidden state
    FORWARD = "forward"  # one block without graph
    GRAPH = "graph"  # one block with graph, with trainable blocks below it
    GRAPH_LOWEST = "graph_lowest"  # the lowest trainable block: its graph begins at its adapter
    BACKWARD = "backward"  # of a block with trainable blocks below it
    BACKWARD_LOWEST = "backward_lowest"  # of the lowest trainable block: no gradient for its input
    HEAD = "head"  # head, loss and the head's backward
    HEAD_FREE = "head_free"  # head and loss in an evaluation
    UPDATE = "update"  # optimizer step of one block, once a step
    UPDATE_HEAD = "update_head"  # optimizer step of the head, once a step
    ENCODE = "encode"  # a hidden state to the bytes of the wire
    DECODE = "decode"  # and back
    HAND_OVER = "hand_over"  # head and moments to bytes and back, once a turn
    SAVE = "save"  # a shard to the disk, once a checkpoint
    FIT = "fit"  # at a helper: the gradients of one block's adapters from its pairs
    FORWARD_PART = "forward_part"  # as FORWARD, with the share of the block's subnets in ``WorkTime.share``
    GRAPH_PART = "graph_part"  # likewise the others
    GRAPH_LOWEST_PART = "graph_lowest_part"
    BACKWARD_PART = "backward_part"
    BACKWARD_LOWEST_PART = "backward_lowest_part"


PART_OF: Final = {
    Work.FORWARD: Work.FORWARD_PART,
    Work.GRAPH: Work.GRAPH_PART,
    Work.GRAPH_LOWEST: Work.GRAPH_LOWEST_PART,
    Work.BACKWARD: Work.BACKWARD_PART,
    Work.BACKWARD_LOWEST: Work.BACKWARD_LOWEST_PART,
}
"""Work of a whole block -> the same work with a part of its subnets."""

WHOLE_WORKS: Final = tuple(work for work in Work if work not in {*PART_OF.values(), Work.FIT})
"""All works except those of a part of a block, and ``FIT``, which is estimated if it was not measured."""

BLOCK_WORKS: Final = (Work.FORWARD, Work.GRAPH, Work.GRAPH_LOWEST, Work.BACKWARD)
"""Works with recorded times that include the handling of messages at the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkTime:
    """Measured time of one work at one size.

    Attributes:
        rows: of the micro-batch; 0 where the size does not matter.
        tokens: padded length of each row.
        median_s: seconds, after the burn-in; of recorded actions the mean, because batches differ.
        share: of the block's subnets that were active: below 1 for works of a part, else 1.
    """

    work: str
    rows: Amount
    tokens: Amount
    median_s: Measured
    low_s: Measured
    high_s: Measured
    samples: Size
    share: float = 1.0

    def __post_init__(self) -> None:
        """Refuse an unknown work, negative figures, quartiles that do not enclose the median, and a wrong share."""
        if self.work not in set(Work):
            raise InvalidInputError(f"work {self.work!r} is not one of {', '.join(Work)}; measure anew")
        check_fields(self, where=self.work, error=InvalidInputError)
        if not self.low_s <= self.median_s <= self.high_s:
            raise InvalidInputError(
                f"{self.work}: quartiles {self.low_s} and {self.high_s} do not enclose the median {self.median_s}"
            )
        is_part = self.work in PART_OF.values()
        if not (0 < self.share < 1 if is_part else self.share == 1):
            needed = "above 0 and below 1" if is_part else "1"
            raise InvalidInputError(f"{self.work}.share is {self.share}, it has to be {needed}; measure anew")

    @property
    def size(self) -> int:
        """Padded tokens of the micro-batch."""
        return self.rows * self.tokens

    def scaled(self, ratio: float) -> WorkTime:
        """Multiply median and quartiles by ``ratio``."""
        return dataclasses.replace(
            self, median_s=ratio * self.median_s, low_s=ratio * self.low_s, high_s=ratio * self.high_s
        )


class WorkTable:
    """Measured points of one node, interpolated for any size; ``where`` names the node in messages."""

    def __init__(self, points: Iterable[WorkTime], *, where: str) -> None:
        self._where = where
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._shares: dict[str, float] = {}
        for point in points:
            self._shares[point.work] = point.share
            self._points.setdefault(point.work, []).append((point.size, point.median_s))
        for curve in self._points.values():
            curve.sort()

    def __contains__(self, work: str) -> bool:
        return work in self._points

    def seconds(self, work: str, size: float = 0.0) -> float:
        """Seconds of ``work`` for ``size`` padded tokens; raises ``PlanError``.

        Example: measured as 1 s at 100 tokens and 3 s at 200, a size of 150 takes 2 s, one of 300 takes 5 s.

        Times are linear between two measured sizes. Beyond the largest the line continues unless it falls. Below the
        smallest it continues too, but not below the smallest one's time scaled in proportion. A single point is scaled
        in proportion, if it has a size.
        """
        points = self._points.get(work)
        if not points:
            raise PlanError(f"{self._where} has no measured time for '{work}'; measure anew with 'ringtune measure'")
        if len(points) == 1:
            at, value = points[0]
            return value * size / at if at else value
        right = min(max(1, bisect.bisect_left(points, (size, 0.0))), len(points) - 1)
        (left_size, left_s), (right_size, right_s) = points[right - 1], points[right]
        slope = (right_s - left_s) / (right_size - left_size) if right_size > left_size else 0.0
        line = left_s + slope * (size - left_size)
        if size > right_size:
            return max(line, right_s)  # of two noisy points the larger one may be the faster one
        return max(line, left_s * size / left_size if left_size and size < left_size else 0.0)

    def share_s(self, work: Work, size: float) -> float:
        """Seconds of ``work`` in all subnets of a block: the difference between all of them active and none.

        Example: 10 s with all subnets and 6 s with half of them are 8 s for the subnets and 2 s for the rest. If no
        part was measured, subnets take the whole time; if a part took longer than the whole, none.
        """
        whole_s, part = self.seconds(work, size), PART_OF.get(work, work)
        if part is work or part not in self._points:
            return whole_s
        found_s = (whole_s - self.seconds(part, size)) / (1 - self._shares[part])
        return min(whole_s, max(0.0, found_s))


SCHEMA: Final = 3

_OF_BLOCKS: Final = ("block_forward_s", "block_graph_s", "block_backward_s")
_WHOLE_BLOCKS: Final = frozenset(PART_OF)
_OF_COMPUTING: Final = (*_OF_BLOCKS, "handling_s", "message_s_per_byte")
"""Fields of ``NodeFacts`` with times of its work, besides ``work_times``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Sizes of the base model with its adapters; equal on all nodes with the same model.

    Bytes are in the compute dtype of the job, not that of the file.

    Attributes:
        vocab_size: rows of the token table; 0 without one.
        block_bytes: frozen weights of one block.
        embedding_bytes: frozen weights that only an owner holds: embedding, pooler.
        head_bytes: the head without its part per class.
        adapter_block_bytes: trainable weights of one block: an adapter's, or the block's own, which are then not in
            ``block_bytes``.
        digest: SHA-256 over the config and the names, types, shapes and samples of the tensors.
        head_class_bytes: of the head, per class.
        head_token_logits: logits of the head per token; 0 if it reads one token of a row.
        head_class_token_logits: logits per token and class, where every word gets a class.
        inner_kept: tensors of width ``intermediate_size`` that a block keeps for backward.
        fixed_tokens: tokens of every row, if all are equally long (images); 0 = texts.
        num_kv_heads: key/value heads; 0 = ``num_heads``.
        block_matrix_params: numbers in the frozen matrices of one block, of ``block_bytes``.
        block_matrix_rows: rows of these matrices together.
        embedding_matrix_params: numbers in the frozen matrices that only an owner holds, of ``embedding_bytes``.
        embedding_matrix_rows: rows of these matrices together.
        largest_matrix_params: numbers of the largest frozen matrix of a block.
        adapter_block_factor_bytes: rows and columns of a block's trainable weights, for Adafactor; 0 = unknown.
        embedding_factor_bytes: the same for ``embedding_bytes``, or of an invertible adapter.
        head_factor_bytes: the same for ``head_bytes``.
        head_class_factor_bytes: the same for ``head_class_bytes``.
        kept_inputs: inputs of trained linear layers that a block keeps.
        embedding_train_bytes: the embedding where all parameters train; it is then not in ``embedding_bytes``. With
            adapters an invertible one.
        token_table_bytes: of these in the token table; 0 = there is none, or it does not train.
        is_tied: whether that table is the decoder too.
        pair_token_bytes: of a block's pairs for a helper, per token; 0 = unknown, or no helper can train the adapters.
        pair_rounded_token_bytes: of the same, rounded to 16 bits.
        pair_projected_token_bytes: of the same, with projections of inputs.
        pair_vector_values: of the vectors for a block's pairs; 0 = no input is projected.
        kinds: of adapters that single users chose instead of the job's own.
        beside_block_bytes: matrices of a block that any kind adds to; 0 with one kind.
        attention_width: width of all heads together; 0 = ``hidden_size``.
        more_kept_values: values per token that norms of a block keep, besides those of the usual two norms.
        kept_scores: number of score tensors that a block's attention keeps without dropout.
        more_scale_bytes: of a block's matrices that the folder has in 4 bits, scales above those of double
            quantisation.
        gguf_block_bytes: frozen matrices of the largest block as they are in the model's GGUF file; 0 = there is none.
        gguf_embedding_bytes: the same of the matrices that only an owner holds.
        shared_bytes: frozen weights outside the blocks that every host holds, such as relative positions.
        row_kept_values: values that a block keeps for each row, whatever its length.
        more_masks: numbers for every two tokens of a row that all blocks read, besides those of the mask.
        repeats: how often a block is applied to its own output.
        more_scored_values: values per token that a graph keeps for gradients of norms and experts, where scores are of
            all weights of a block.
        unlike_inputs: kept inputs of each block, where blocks have unlike matrices; empty: all are alike.
        scored_gradient_params: numbers of the largest gradient of a block's weights then.
        entering: values of a token that enter each block and the head; empty = ``hidden_size`` everywhere.
        returning: the first ones of these, which have a gradient.
        chunk_kept_values: values that a block keeps for each token of a row that is padded to whole chunks.
    """

    model_type: str
    num_blocks: Size
    hidden_size: Size
    intermediate_size: Size
    num_heads: Size
    vocab_size: Amount
    block_bytes: Amount
    embedding_bytes: Amount
    head_bytes: Amount
    adapter_block_bytes: Amount
    digest: str
    head_class_bytes: Amount = 0
    head_token_logits: Amount = 0
    head_class_token_logits: Amount = 0
    inner_kept: Size = 1
    fixed_tokens: Amount = 0
    num_kv_heads: Amount = 0
    block_matrix_params: Amount = 0
    block_matrix_rows: Amount = 0
    embedding_matrix_params: Amount = 0
    embedding_matrix_rows: Amount = 0
    largest_matrix_params: Amount = 0
    adapter_block_factor_bytes: Amount = 0
    embedding_factor_bytes: Amount = 0
    head_factor_bytes: Amount = 0
    head_class_factor_bytes: Amount = 0
    kept_inputs: tuple[KeptInput, ...] = ()
    embedding_train_bytes: Amount = 0
    token_table_bytes: Amount = 0
    is_tied: bool = False
    pair_token_bytes: Amount = 0
    pair_rounded_token_bytes: Amount = 0
    pair_projected_token_bytes: Amount = 0
    pair_vector_values: Annotated[Amount, LATER] = 0
    kinds: tuple[KindFacts, ...] = ()
    beside_block_bytes: Amount = 0
    attention_width: Amount = 0
    more_kept_values: Amount = 0
    kept_scores: Amount = 0
    more_scale_bytes: Annotated[Amount, LATER] = 0
    gguf_block_bytes: Annotated[Amount, LATER] = 0
    gguf_embedding_bytes: Annotated[Amount, LATER] = 0
    shared_bytes: Annotated[Amount, LATER] = 0
    row_kept_values: Annotated[Amount, LATER] = 0
    more_masks: Annotated[Amount, LATER] = 0
    repeats: Annotated[Size, LATER] = 1
    more_scored_values: Annotated[Amount, LATER] = 0
    scored_gradient_params: Annotated[Amount, LATER] = 0
    entering: Annotated[tuple[Size, ...], LATER] = ()
    returning: Annotated[tuple[Size, ...], LATER] = ()
    chunk_kept_values: Annotated[Amount, LATER] = 0
    unlike_inputs: Annotated[tuple[tuple[KeptInput, ...], ...], LATER] = ()

    @property
    def block_inputs(self) -> tuple[tuple[KeptInput, ...], ...]:
        """Kept inputs of each block; of one where all are alike."""
        return self.unlike_inputs or (self.kept_inputs,)

    @property
    def all_inputs(self) -> tuple[KeptInput, ...]:
        """Kept inputs of every kind of block, one kind after the other."""
        return sum(dict.fromkeys(self.block_inputs), ())

    def __post_init__(self) -> None:
        """Refuse a size below 1, and negative bytes and counts."""
        check_fields(self, where="model", error=InvalidInputError)
        if not (self.block_bytes or self.adapter_block_bytes):
            raise InvalidInputError("model.block_bytes is 0, it has to be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedShape:
    """Settings besides the model on which timings of a node depend.

    Attributes:
        subnets: of each block, a part of which was timed too; 1 = no part was timed.
        frozen: format of frozen weights, see ``schedule.course.name_of``.
        compute: number type of products.
    """

    rows: int = 0
    tokens: int = 0
    task: str = ""
    adapter: str = ""
    dtype: str = ""
    wire_dtype: str = ""
    optimizer: str = ""
    dropout: float = 0.0
    subnets: int = 1
    frozen: str = AS_COMPUTED
    compute: Annotated[str, LATER] = AS_COMPUTED

    @property
    def is_measured(self) -> bool:
        """Whether there are timings of this shape."""
        return self.rows > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFacts:
    """Measurements of one directed link.

    Attributes:
        rate_bytes_per_s: of a long message.
        latency_s: of a short message, one way.
        rate_low_bytes_per_s: first quartile of the measurements; 0 = only one.
        rate_high_bytes_per_s: third quartile.
        send_cpu_s_per_byte: processor seconds of the source per byte; 0 = unknown.
        receive_cpu_s_per_byte: processor seconds of the target per byte; 0 = unknown.
        busy_source_s: additional seconds of a long message while the source computes, waiting for the processor.
        busy_target_s: the same while the target computes.
        is_assumed: whether it was not measured; see ``costs.links``.
    """

    source: str
    target: str
    rate_bytes_per_s: Annotated[float, Bounds(ge=1, lt=math.inf)]
    latency_s: Measured
    rate_low_bytes_per_s: Measured = 0.0
    rate_high_bytes_per_s: Measured = 0.0
    send_cpu_s_per_byte: Measured = 0.0
    receive_cpu_s_per_byte: Measured = 0.0
    busy_source_s: Measured = 0.0
    busy_target_s: Measured = 0.0
    is_assumed: bool = False

    def __post_init__(self) -> None:
        """Refuse a link of a node to itself, a rate below 1, and negative figures."""
        name = f"link.{self.source}.{self.target}"
        if self.source == self.target:
            raise InvalidInputError(f"{name} joins a node with itself; leave it out")
        check_fields(self, where=name, error=InvalidInputError)

    def seconds(self, num_bytes: float) -> float:
        """Seconds of a message from the first byte sent to the last one received.

        Example: 1 MB at 10 MB per second and a latency of 0.01 s takes 0.11 s.
        """
        return self.latency_s + num_bytes / self.rate_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedRows:
    """Number of rows of a node's files that are left out for one reason; the reason quotes no cell."""

    why: str
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """The training rows of a node behind its packed sequences.

    Attributes:
        rows: number of them.
        tokens: of all rows together.
        row_tokens: mean padded length of batches of rows that are not packed.
    """

    rows: Amount
    tokens: Amount
    row_tokens: Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """One node: its data (numbers and class names only), memory and speed.

    Attributes:
        train_rows: rows for training, or sequences of packed rows; 0 = not an owner.
        eval_rows: rows for evaluation.
        labels: class names in its training rows, sorted.
        eval_labels: class names in its evaluation rows, sorted.
        users: of these rows, if the job names a column of users, sorted by name.
        memory_bytes: budget for a run.
        block_forward_s: one block, one micro-batch at full length, without graph; seconds, 0 = not measured.
        block_graph_s: the same with graph.
        block_backward_s: its backward.
        activation_token_bytes: kept by one block for its backward, per padded token.
        data_bytes: of its rows and tokenizer in memory; 0 = no rows, or unknown.
        skipped_rows: rows of its files that are left out, for all reasons together.
        left_out: rows of its files that are left out, by reason.
        cut_rows: rows longer than ``train.max_length``, of those that were encoded to measure lengths.
        hardware: processor and its limits, as text; timings are reused only where it is equal.
        cpu_cores: processor seconds per second that all its threads may use; 0 = unknown, enough.
        train_tokens: mean padded length of its training batches; 0 = unknown, ``train.max_length`` is assumed.
        eval_tokens: the same of its evaluation batches.
        shape: at which ``work_times`` were measured.
        has_messages: whether the times were recorded in a run, so that they include the handling of messages.
        rested_s: how much shorter an action is after idle time in which a quota of processor time was refilled.
        handling_s: overhead of every action; 0 = not measured.
        message_s_per_byte: seconds of its computation lost per byte sent or received; 0 = not measured.
        lowest_token_bytes: as ``activation_token_bytes``, of the lowest block that trains; 0 = not measured, as others.
        fast_bfloat16: whether it multiplies bfloat16 faster than float32, by processor and torch version.
        state_free_bytes: free for a run on the disk of its folder (``--state``); None = no folder, or unknown.
        state_disk: id of that disk; nodes with the same one share its space; empty = unknown.
        numerics: hardware and software that determine the last bits of results; see ``costs.measurement``; empty =
            unknown.
        load: runnable threads per core of its machine before it was timed; 0 = unknown.
        rack: board or switch that it shares with other nodes, from its start or its address; empty = unknown.
        packed: its training rows, where ``train.packing`` is set and they were counted.
        prompt_tokens: of its longest prompt, at most what the model reads before an answer; 0 unless a job only writes.
    """

    node: str
    train_rows: Rows
    eval_rows: Rows
    labels: Names
    eval_labels: Names
    memory_bytes: Amount
    threads: Annotated[int, Bounds(ge=1)]
    device: Word
    block_forward_s: Measured
    block_graph_s: Measured
    block_backward_s: Measured
    activation_token_bytes: Measured
    model: ModelFacts
    data_bytes: Amount = 0
    skipped_rows: Amount = 0
    hardware: Word = ""
    cpu_cores: Measured = 0.0
    train_tokens: Measured = 0.0
    eval_tokens: Measured = 0.0
    shape: TimedShape = TimedShape()
    work_times: Annotated[tuple[WorkTime, ...], Longest(MAX_NAMES)] = ()
    has_messages: bool = False
    rested_s: Measured = 0.0
    handling_s: Measured = 0.0
    message_s_per_byte: Measured = 0.0
    lowest_token_bytes: Measured = 0.0
    fast_bfloat16: bool = False
    state_free_bytes: Annotated[int | None, Bounds(ge=0)] = None
    state_disk: Word = ""
    users: Annotated[tuple[UserRows, ...], Few] = ()
    numerics: Word = ""
    load: Measured = 0.0
    left_out: Annotated[tuple[SkippedRows, ...], Longest(MAX_NAMES)] = ()
    cut_rows: Amount = 0
    rack: Annotated[Word, LATER] = ""
    packed: Annotated[PackedRows | None, LATER] = None
    prompt_tokens: Annotated[Amount, LATER] = 0

    def __post_init__(self) -> None:
        check_fields(self, where=self.node, error=InvalidInputError)

    def check_times(self) -> None:
        """Refuse times of blocks that no hardware has; raises ``InvalidInputError``."""
        times = {name: getattr(self, name) for name in _OF_BLOCKS}
        times |= {
            f"{each.work} of {each.size} tokens": each.median_s
            for each in self.work_times
            if each.work in _WHOLE_BLOCKS
        }
        for name, seconds in times.items():
            if seconds < SHORTEST_BLOCK_S:
                raise InvalidInputError(
                    f"{name} took {seconds:g} s for a block, which can't be less than {SHORTEST_BLOCK_S:g} s; measure "
                    "anew, or leave the node out"
                )

    def at_pace(self, factor: float) -> NodeFacts:
        """Multiply all times of the node's work by ``factor``.

        ``rested_s`` stays: it belongs to the quota of processor time, not to the processor.
        """
        times = {name: factor * getattr(self, name) for name in _OF_COMPUTING}
        return dataclasses.replace(self, **times, work_times=tuple(time.scaled(factor) for time in self.work_times))

    def to_message(self) -> dict[str, Any]:
        """Write the node as a JSON-compatible table with its schema version."""
        return {"schema": SCHEMA, **to_table(self)}

    @staticmethod
    def from_message(value: Mapping[str, Any]) -> NodeFacts:
        """Parse the table of ``to_message``; raises ``PlanError`` if it is another schema or not valid."""
        return read_dataclass(NodeFacts, _fields_of(value), where="", error=PlanError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Facts of every node and link; the content of ``profile.json``.

    Attributes:
        links: measured directed pairs; empty with nodes of one machine.
    """

    nodes: tuple[NodeFacts, ...]
    links: tuple[LinkFacts, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        """Refuse duplicate nodes or links, and a link of a node that the profile lacks."""
        names = [node.node for node in self.nodes]
        if len(set(names)) != len(names):
            raise InvalidInputError(f"the profile has a node twice: {', '.join(sorted(names))}")
        pairs = [(link.source, link.target) for link in self.links]
        if len(set(pairs)) != len(pairs):
            raise InvalidInputError("the profile has a link twice; measure anew with 'ringtune measure'")
        for pair in pairs:
            for name in sorted(set(pair) - set(names)):
                raise InvalidInputError(f"link {pair[0]} -> {pair[1]} names node {name}, which the profile lacks")

    @property
    def by_name(self) -> dict[str, NodeFacts]:
        """Nodes by name."""
        return {node.node: node for node in self.nodes}

    def without(self, names: Collection[str]) -> Profile:
        """Return the profile of the other nodes, and of the links between them."""
        return Profile(
            nodes=tuple(node for node in self.nodes if node.node not in names),
            links=tuple(link for link in self.links if link.source not in names and link.target not in names),
        )

    @property
    def link_by_pair(self) -> dict[tuple[str, str], LinkFacts]:
        """Links by (source, target)."""
        return {(link.source, link.target): link for link in self.links}

    def to_json(self) -> dict[str, Any]:
        """Write the profile as a JSON-compatible table with its schema version."""
        return {
            "schema": self.schema,
            "nodes": [to_table(node) for node in self.nodes],
            "links": [to_table(link) for link in self.links],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Profile:
        """Parse the table of ``to_json``; raises ``PlanError`` if it is another schema or not valid."""
        return read_dataclass(Profile, _fields_of(value), where="", error=PlanError)


def _fields_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a table besides its schema; raises ``PlanError`` if it is another one."""
    if not isinstance(value, Mapping):
        raise PlanError("a profile has to be a table; measure anew with 'ringtune measure'")
    if (schema := value.get("schema")) != SCHEMA:
        raise PlanError(f"profile schema {schema!r} is not {SCHEMA}; measure anew with 'ringtune measure'")
    return {key: item for key, item in value.items() if key != "schema"}
