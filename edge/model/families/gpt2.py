"""GPT-2: learned positions, a causal mask, and a last normalisation before the head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from edge.data.tokens import Batch


class CausalContext(NamedTuple):
    """Mask and positions of a decoder's block.

    Attributes:
        mask: (B, 1, T, T) causal, or None where the kernel makes it.
        positions: (B, T) position of each token.
        row_positions: (T,) the same for one row.
        rotary: cosine and sine (B, T, width of a head); None with learned positions.
    """

    mask: torch.Tensor | None
    positions: torch.Tensor
    row_positions: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor] | None


class Gpt2Family:
    """The ``FamilyForward`` of GPT-2."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Add word and position embeddings; positions count padding, as in the library."""
        positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        hidden: torch.Tensor = base.drop(base.wte(batch.ids) + base.wpe(positions[None]))
        return hidden

    def context(self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> CausalContext:
        """Build the causal mask as the library does."""
        return causal_context(base.config, hidden_BTD, mask_BT, window=False)

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one layer; only the hidden state of its tuple is used."""
        hidden: torch.Tensor = block(hidden_BTD, None, context.row_positions, context.mask, None, None)[0]
        return hidden

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Normalise the hidden state, and pick each row's last token for classification."""
        last = base.ln_f(hidden_BTD)
        return last, {"cls_output": last_token(last, batch.mask)}


def causal_context(config: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, *, window: bool) -> CausalContext:
    """Build mask and positions as the library's ``forward`` does; ``window`` limits attention to the last tokens."""
    rows, tokens, _ = hidden_BTD.shape
    positions_T = torch.arange(tokens, device=hidden_BTD.device)
    positions_BT = positions_T.expand(rows, tokens)
    make = _causal_mask if config._attn_implementation == "sdpa" else _causal_mask_of_library
    mask = make(config, hidden_BTD, mask_BT, positions_BT, window=window)
    return CausalContext(mask=mask, positions=positions_BT, row_positions=positions_T, rotary=None)


def _causal_mask(
    config: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, positions_BT: torch.Tensor, *, window: bool
) -> torch.Tensor | None:
    """Build the library's mask for sdpa attention in a hundredth of its time.

    Source: transformers 4.57, ``masking_utils.sdpa_mask_recent_torch``, which computes each cell with ``vmap``.
    """
    tokens = hidden_BTD.shape[1]
    keep_BT = mask_BT.to(dtype=torch.bool, device=hidden_BTD.device)
    if (not window or tokens < config.sliding_window) and bool(keep_BT.all()):
        return None
    ahead_TT = positions_BT[0][:, None] - positions_BT[0][None]
    seen_TT = (ahead_TT >= 0) & (ahead_TT < config.sliding_window) if window else ahead_TT >= 0
    return seen_TT & keep_BT[:, None, None, :]


def _causal_mask_of_library(
    config: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, positions_BT: torch.Tensor, *, window: bool
) -> torch.Tensor | None:
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    make = create_sliding_window_causal_mask if window else create_causal_mask
    mask: torch.Tensor | None = make(
        config=config,
        input_embeds=hidden_BTD,
        attention_mask=mask_BT,
        cache_position=positions_BT[0],
        past_key_values=None,
        position_ids=positions_BT,
    )
    return mask


def last_token(hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Pick the hidden state (B, D) of each row's rightmost token by the mask, whatever its id; token 0 of an empty row.

    AdapterHub and transformers find the token by the padding id, which is another token where a text contains this id.
    """
    rows_B = torch.arange(hidden_BTD.shape[0], device=hidden_BTD.device)
    places_T = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)
    return hidden_BTD[rows_B, (places_T * mask_BT.to(hidden_BTD.device)).argmax(-1)]


FAMILY = Gpt2Family()
