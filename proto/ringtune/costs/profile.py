"""The profile: measurements and counts before planning, a record for each node and link; JSON with units in the keys.

The planner adds these times up, the simulator replays them. A *work* is what one timing covers; the time of an action
is put together from works in ``ringtune.costs.action_costs``. Times grow with the size of the micro-batch in padded
tokens (rows x tokens), linearly between two measured sizes. So does the time of a block with the share of its active
subnets, between a measured part of them and the whole; norms, adapters and masks take theirs whatever the share.
"""

from __future__ import annotations

import bisect
import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from ringtune.errors import InvalidInputError, PlanError
from ringtune.models.kept_inputs import KeptInput
from ringtune.schedule.course import AS_COMPUTED
from ringtune.schedule.run_shape import UserRows
from ringtune.storage.strict import Bounds, check_fields, read_dataclass, to_table

Amount = Annotated[int, Bounds(ge=0)]
Size = Annotated[int, Bounds(ge=1)]
Measured = Annotated[float, Bounds(ge=0, lt=math.inf)]


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFacts:
    """One kind of adapter in a block, with who has it; what is not here is as with the job's own kind.

    Attributes:
        config: as ``adapter.config``.
        users: who chose it.
        adapter_block_bytes: of its weights.
        adapter_block_factor_bytes: of rows and columns of these, which Adafactor keeps.
        pair_token_bytes: of what it gives a helper for each token.
        pair_rounded_token_bytes: of the same, rounded to 16 bits.
        pair_projected_token_bytes: of the same, with projections of inputs.
        more_activation_token_bytes: that a block keeps for its backward beyond those of the job's own kind, computed.
    """

    config: str
    users: tuple[str, ...]
    adapter_block_bytes: int
    adapter_block_factor_bytes: int
    pair_token_bytes: int
    pair_rounded_token_bytes: int
    pair_projected_token_bytes: int
    more_activation_token_bytes: float


class Work(enum.StrEnum):
    """The work that one timing covers; of one micro-batch unless said otherwise."""

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
    FORWARD_PART = "forward_part"  # as FORWARD, with the share of the block's subnets that the point says
    GRAPH_PART = "graph_part"  # so of the others
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
"""The work of a whole block, and the same with a part of its subnets."""

WHOLE_WORKS: Final = tuple(work for work in Work if work not in {*PART_OF.values(), Work.FIT})
"""All works but those of a part of a block, and that of helpers, which has an estimate where it was not measured."""

BLOCK_WORKS: Final = (Work.FORWARD, Work.GRAPH, Work.GRAPH_LOWEST, Work.BACKWARD)
"""Works with recorded times that include the work of messages at the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkTime:
    """The measured time of one work at one size.

    Attributes:
        work: a value of ``Work``.
        rows: of the micro-batch; 0 where the size does not matter.
        tokens: padded length of each row.
        median_s: after the burn-in, seconds; of recorded actions the mean, because batches differ.
        low_s: first quartile.
        high_s: third quartile.
        samples: how many timings.
        share: of the block's subnets that were active: below 1 exactly for the works of a part.
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
        """Refuse an unknown work, negative figures, no samples, and what does not belong together.

        Quartiles have to enclose the median, and the works of a part have to have a share above 0 and below 1.
        """
        if self.work not in set(Work):
            raise InvalidInputError(f"work {self.work!r} is not one of {', '.join(Work)}; measure anew")
        check_fields(self, where=self.work, error=InvalidInputError)
        if not self.low_s <= self.median_s <= self.high_s:
            raise InvalidInputError(
                f"{self.work}: quartiles {self.low_s} and {self.high_s} do not enclose the median {self.median_s}"
            )
        is_part = self.work in PART_OF.values()
        if not (0 < self.share < 1 if is_part else self.share == 1):
            wanted = "above 0 and below 1" if is_part else "1"
            raise InvalidInputError(f"{self.work}.share is {self.share}, it has to be {wanted}; measure anew")

    @property
    def size(self) -> int:
        """Padded tokens of the micro-batch."""
        return self.rows * self.tokens


class WorkTable:
    """The measured points of one node, and times for any size.

    Args:
        points: of any works.
        where: for messages, e.g. ``node pi-3``.
    """

    def __init__(self, points: Iterable[WorkTime], *, where: str) -> None:
        self._where = where
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._shares: dict[str, float] = {}
        for point in points:
            self._shares[point.work] = point.share
            self._points.setdefault(point.work, []).append((point.size, point.median_s))
        for found in self._points.values():
            found.sort()

    def __contains__(self, work: str) -> bool:
        """Whether ``work`` was measured."""
        return work in self._points

    def seconds(self, work: str, size: float = 0.0) -> float:
        """Seconds that ``work`` takes for ``size`` padded tokens.

        Example: measured as 1 s at 100 tokens and 3 s at 200, a size of 150 takes 2 s, one of 300 takes 5 s.

        Between two measured sizes the time is linear, beyond the largest the line continues unless it falls. Below the
        smallest it continues too, but never below the smallest one's time scaled in proportion. A single point is
        scaled in proportion, if it has a size.

        Raises:
            PlanError: ``work`` was not measured.
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
        """Seconds of ``work`` that all subnets of a block take together: what it takes less without any of them.

        Example: 10 s with all subnets and 6 s with half of them are 8 s for the subnets, 2 s for all else. Where no
        part was measured, subnets take all the time. They take none where a part took longer than the whole.
        """
        whole_s, part = self.seconds(work, size), PART_OF.get(work, work)
        if part is work or part not in self._points:
            return whole_s
        found_s = (whole_s - self.seconds(part, size)) / (1 - self._shares[part])
        return min(whole_s, max(0.0, found_s))


SCHEMA: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Sizes of the base model with its adapters; the same on every node that has the same model.

    Bytes are in the compute dtype of the job, whatever the file stores.

    Attributes:
        model_type: of ``config.json``.
        num_blocks: transformer blocks.
        hidden_size: width of the hidden state.
        intermediate_size: width of the feed-forward part.
        num_heads: attention heads.
        vocab_size: rows of the token table; 0 without one.
        block_bytes: frozen weights of one block.
        embedding_bytes: embedding and what else only an owner holds of the base (pooler).
        head_bytes: the head without what grows with the number of classes.
        adapter_block_bytes: trainable weights of one block: an adapter's, or the block's own, which are not in
            ``block_bytes`` then.
        digest: SHA-256 over the config and the names, types and shapes of the tensors.
        head_class_bytes: what each class adds to the head.
        head_token_logits: numbers that the head computes for each token; 0 if it reads one token of a row.
        head_class_token_logits: what each class adds to them, where every word gets a class.
        inner_kept: tensors of width ``intermediate_size`` that a block keeps for backward.
        fixed_tokens: of every row, where all are alike (images); 0 = rows have lengths of their own, as texts.
        num_kv_heads: key/value heads; 0 = as many as ``num_heads``.
        block_matrix_params: numbers in the frozen matrices of one block, of ``block_bytes``.
        block_matrix_rows: rows of these matrices together.
        embedding_matrix_params: numbers in the frozen matrices that only an owner holds, of ``embedding_bytes``.
        embedding_matrix_rows: rows of these matrices together.
        largest_matrix_params: numbers of the largest frozen matrix of a block.
        adapter_block_factor_bytes: rows and columns of what trains in a block, which Adafactor keeps; 0 = not known.
        embedding_factor_bytes: the same of what ``embedding_bytes`` counts.
        head_factor_bytes: the same of the head without what grows with the number of classes.
        head_class_factor_bytes: what each class adds to that.
        kept_inputs: what a block keeps for its linear layers that train.
        embedding_train_bytes: of the embedding where all parameters train, which are not in ``embedding_bytes`` then.
        token_table_bytes: of these in the table of tokens; 0 = there is none, or it does not train.
        is_tied: whether that table is the decoder too.
        pair_token_bytes: of what a block's adapters give a helper for each token; 0 = not known, or no helper can fit.
        pair_rounded_token_bytes: of the same, rounded to 16 bits.
        pair_projected_token_bytes: of the same, with projections of inputs.
        kinds: of adapters that single users chose in place of the job's own.
        beside_block_bytes: of the matrices of a block beside which any kind stands; 0 where there is one kind.
        attention_width: of all heads together; 0 = ``hidden_size``.
        more_kept_values: of a token, that further norms of a block keep for backward besides the usual two.
        kept_scores: how often a block's attention keeps its scores without dropout.
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
    kinds: tuple[KindFacts, ...] = ()
    beside_block_bytes: Amount = 0
    attention_width: Amount = 0
    more_kept_values: Amount = 0
    kept_scores: Amount = 0

    def __post_init__(self) -> None:
        """Refuse a size below 1, and negative bytes and counts."""
        check_fields(self, where="model", error=InvalidInputError)
        if not (self.block_bytes or self.embedding_train_bytes):
            raise InvalidInputError("model.block_bytes is 0, it has to be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedShape:
    """The settings besides the model that timings of a node hold for: other values need other timings.

    Attributes:
        rows: of the micro-batch that was timed.
        tokens: of the longest row.
        task: of the job.
        adapter: configuration of the adapter.
        dtype: of the computation.
        wire_dtype: of what travels.
        optimizer: of the update.
        dropout: probability.
        subnets: of each block, a part of which was timed too; 1 = no part was. Times with parts are good for any.
        frozen: how frozen weights were held, as ``schedule.course.name_of`` says.
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

    @property
    def is_measured(self) -> bool:
        """Whether there are timings of this shape at all."""
        return self.rows > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFacts:
    """One directed link, as it was measured.

    Attributes:
        source: who sends.
        target: who receives.
        rate_bytes_per_s: of a long message.
        latency_s: of a short one, one way.
        rate_low_bytes_per_s: first quartile of the measurements; 0 = only one.
        rate_high_bytes_per_s: third quartile.
        send_cpu_s_per_byte: processor seconds that the source spends on each byte; 0 = not known.
        receive_cpu_s_per_byte: the same of the target.
        busy_source_s: how much longer a long message takes while the source computes, waiting for the processor.
        busy_target_s: the same when the target does.
        is_assumed: whether nobody measured it; see ``costs.links``.
    """

    source: str
    target: str
    rate_bytes_per_s: Annotated[float, Bounds(gt=0, lt=math.inf)]
    latency_s: Measured
    rate_low_bytes_per_s: Measured = 0.0
    rate_high_bytes_per_s: Measured = 0.0
    send_cpu_s_per_byte: Measured = 0.0
    receive_cpu_s_per_byte: Measured = 0.0
    busy_source_s: Measured = 0.0
    busy_target_s: Measured = 0.0
    is_assumed: bool = False

    def __post_init__(self) -> None:
        """Refuse a link of a node to itself, a rate that is not above 0, and negative figures."""
        name = f"link.{self.source}.{self.target}"
        if self.source == self.target:
            raise InvalidInputError(f"{name} joins a node with itself; leave it out")
        check_fields(self, where=name, error=InvalidInputError)

    def seconds(self, num_bytes: float) -> float:
        """Seconds that a message of so many bytes takes, from the first byte sent to the last one received.

        Example: 1 MB at 10 MB a second and a latency of 0.01 s takes 0.11 s.
        """
        return self.latency_s + num_bytes / self.rate_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedRows:
    """How many rows of a node's files are left out for one reason, in words without a cell of a row."""

    why: str
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """One node: its data (numbers and class names only), memory and speed.

    Attributes:
        node: its name.
        train_rows: rows it trains on; 0 = it is no owner.
        eval_rows: rows it evaluates on.
        labels: class names in its training rows, sorted.
        eval_labels: class names in its evaluation rows, sorted.
        users: whose rows these are, where the job names a column of users, sorted by name.
        memory_bytes: budget for a run.
        threads: compute threads.
        device: ``cpu`` or ``cuda``.
        block_forward_s: one block, one micro-batch at full length, without graph; seconds, 0 = not measured.
        block_graph_s: the same with graph.
        block_backward_s: its backward.
        activation_token_bytes: what a forward with graph keeps of one block for its backward, per padded token.
        model: sizes of the model.
        data_bytes: what its rows and their tokenizer take in memory; 0 = no rows, or not known.
        skipped_rows: rows of its files that are left out, for all reasons together.
        left_out: rows of its files that are left out, by why.
        cut_rows: rows that are longer than the longest row, of those that it encoded to know their lengths.
        hardware: processor and what it may use of it, as text; timings are used again only where it is equal.
        cpu_cores: processor seconds that it may use each second, whatever its threads; 0 = not known, enough.
        train_tokens: mean padded length of its training batches; 0 = not known, the longest is assumed.
        eval_tokens: the same of its evaluation batches.
        shape: what ``work_times`` were measured at.
        work_times: every measured point.
        has_messages: whether the times were recorded in a run, so that what messages took of them is in them.
        rested_s: what an action takes less after a rest, where a quota of processor time fills up meanwhile.
        handling_s: what every action takes besides its work; 0 = not measured.
        message_s_per_byte: what each byte that it sends or receives takes of its computing; 0 = not measured.
        lowest_token_bytes: as ``activation_token_bytes``, of the lowest block that trains; 0 = not measured, as others.
        fast_bfloat16: whether it multiplies bfloat16 faster than float32, by what processor and torch say.
        state_free_bytes: that a run may take on the disk of its folder (``--state``); None = it has none, or not known.
        state_disk: which disk that is; nodes that name the same one share its room; empty = not known.
        numerics: what the last bits of its results depend on, as text; see ``costs.measurement``; empty = not known.
        load: threads for each core of its machine that wanted to compute before it was timed; 0 = not known.
    """

    node: str
    train_rows: Amount
    eval_rows: Amount
    labels: tuple[str, ...]
    eval_labels: tuple[str, ...]
    memory_bytes: Amount
    threads: Annotated[int, Bounds(ge=1)]
    device: str
    block_forward_s: Measured
    block_graph_s: Measured
    block_backward_s: Measured
    activation_token_bytes: Measured
    model: ModelFacts
    data_bytes: Amount = 0
    skipped_rows: Amount = 0
    hardware: str = ""
    cpu_cores: Measured = 0.0
    train_tokens: Measured = 0.0
    eval_tokens: Measured = 0.0
    shape: TimedShape = TimedShape()
    work_times: tuple[WorkTime, ...] = ()
    has_messages: bool = False
    rested_s: Measured = 0.0
    handling_s: Measured = 0.0
    message_s_per_byte: Measured = 0.0
    lowest_token_bytes: Measured = 0.0
    fast_bfloat16: bool = False
    state_free_bytes: Annotated[int | None, Bounds(ge=0)] = None
    state_disk: str = ""
    users: tuple[UserRows, ...] = ()
    numerics: str = ""
    load: Measured = 0.0
    left_out: tuple[SkippedRows, ...] = ()
    cut_rows: Amount = 0

    def __post_init__(self) -> None:
        """Refuse negative figures, and fewer than one thread."""
        check_fields(self, where=self.node, error=InvalidInputError)

    def to_message(self) -> dict[str, Any]:
        """Write the node as a JSON-able table with its schema version."""
        return {"schema": SCHEMA, **to_table(self)}

    @staticmethod
    def from_message(value: Mapping[str, Any]) -> NodeFacts:
        """Read what ``to_message`` wrote.

        Raises:
            PlanError: another schema, a key is missing, unknown or mistyped.
        """
        return read_dataclass(NodeFacts, _fields_of(value), where="", error=PlanError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The facts of every node and link; the content of ``profile.json``.

    Attributes:
        nodes: in name order.
        links: every directed pair that was measured; none with nodes of one machine.
    """

    nodes: tuple[NodeFacts, ...]
    links: tuple[LinkFacts, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        """Refuse a node or link that stands twice, and a link of a node that the profile lacks."""
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

    @property
    def link_by_pair(self) -> dict[tuple[str, str], LinkFacts]:
        """Links by (source, target)."""
        return {(link.source, link.target): link for link in self.links}

    def to_json(self) -> dict[str, Any]:
        """Write the profile as a JSON-able table with its schema version."""
        return {
            "schema": self.schema,
            "nodes": [to_table(node) for node in self.nodes],
            "links": [to_table(link) for link in self.links],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Profile:
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: another schema, a key is missing, unknown or mistyped.
        """
        return read_dataclass(Profile, _fields_of(value), where="", error=PlanError)


def _fields_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a table beside its schema.

    Raises:
        PlanError: no table, or of another schema.
    """
    if not isinstance(value, Mapping):
        raise PlanError("a profile has to be a table; measure anew with 'ringtune measure'")
    if (schema := value.get("schema")) != SCHEMA:
        raise PlanError(f"profile schema {schema!r} is not {SCHEMA}; measure anew with 'ringtune measure'")
    return {key: item for key, item in value.items() if key != "schema"}
