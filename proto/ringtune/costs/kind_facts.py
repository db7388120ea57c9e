"""The sizes of adapters that single users chose in place of the job's own kind (``offload.adapters``)."""

from __future__ import annotations

from dataclasses import dataclass


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
