"""How a block is divided into subnets: groups of whole key/value heads, each with its share of the feed-forward rows.

Example: 12 query heads over 6 key/value heads and a feed-forward width of 2048 in 3 subnets: each has 4 query heads, 2
key/value heads, and 683, 683 and 682 rows.

Source: D2FT, section III-A (one attention head and one sixth of the feed-forward network) and IV-B (coarser subnets).
"""

from __future__ import annotations

from dataclasses import dataclass

from ringtune.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class Subnets:
    """The subnets of one block.

    Attributes:
        heads: query heads of the block.
        kv_heads: key/value heads; ``heads`` where each query head has its own.
        inner: feed-forward rows, that is the inner width.
        count: subnets of the block.
    """

    heads: int
    kv_heads: int
    inner: int
    count: int

    def __post_init__(self) -> None:
        """Refuse a number of subnets that does not divide the key/value heads.

        Raises:
            PlanError: says which numbers do.
        """
        if not 1 <= self.count <= self.kv_heads or self.kv_heads % self.count:
            fitting = ", ".join(
                str(self.heads // count) for count in range(self.kv_heads, 0, -1) if not self.kv_heads % count
            )
            raise PlanError(
                f"{self.count} subnets do not divide {self.kv_heads} key/value heads evenly; "
                f"operations.heads can be {fitting}, or 0 for whole blocks"
            )

    @property
    def heads_each(self) -> int:
        """Query heads of one subnet."""
        return self.heads // self.count

    @property
    def kv_heads_each(self) -> int:
        """Key/value heads of one subnet."""
        return self.kv_heads // self.count

    def inner_range(self, subnet: int) -> tuple[int, int]:
        """The feed-forward rows [start, stop) of a subnet; the first subnets have one more where they do not divide."""
        small, extra = divmod(self.inner, self.count)
        start = subnet * small + min(subnet, extra)
        return start, start + small + (subnet < extra)


def subnets_of(*, heads: int, kv_heads: int, inner: int, heads_each: int) -> Subnets:
    """The subnets of blocks whose subnets have so many query heads; with 0 a whole block is one subnet.

    Raises:
        PlanError: so many heads do not divide the block, or would part the query heads of one key/value head.
    """
    if not heads_each:
        return Subnets(heads=heads, kv_heads=kv_heads, inner=inner, count=1)
    if heads_each < 0 or heads % heads_each:
        fitting = ", ".join(str(size) for size in range(heads // kv_heads, heads + 1) if _fits(heads, kv_heads, size))
        raise PlanError(
            f"operations.heads = {heads_each} does not divide the {heads} heads of a block; it can be {fitting}, or 0 "
            "for whole blocks"
        )
    if not _fits(heads, kv_heads, heads_each):
        raise PlanError(
            f"operations.heads = {heads_each} parts the {heads // kv_heads} query heads of one key/value head; take a "
            f"multiple of {heads // kv_heads} that divides {heads}"
        )
    return Subnets(heads=heads, kv_heads=kv_heads, inner=inner, count=heads // heads_each)


def _fits(heads: int, kv_heads: int, size: int) -> bool:
    return heads % size == 0 and size % (heads // kv_heads) == 0
