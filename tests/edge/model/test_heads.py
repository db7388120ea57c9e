"""The loss over a large vocabulary in chunks of tokens, against the one with all logits."""

from __future__ import annotations

import pytest
import torch

from edge.data.tokens import IGNORED, Batch
from edge.model import frozen_weights, heads
from edge.model.four_bit import WideningBuffer
from edge.model.frozen_weights import CompactMatrix, FrozenMatrix, RowScaled, round_to_int8
from edge.model.heads import HeadCounts, require_largest, task_of, text_logits, token_loss
from edge.model.prediction_heads import Head
from ringtune.costs.memory_sizes import MAX_LOGIT_BYTES
from ringtune.errors import DivergedError
from ringtune.models.family import CAUSAL_LM
from tests.support.live_bytes import LiveBytes

ROWS, TOKENS, WIDTH, VOCAB = 3, 40, 8, 97
EXACT = 1e-9


def head_of(weight_VD: torch.Tensor) -> Head:
    """A frozen decoder."""
    decoder = torch.nn.Linear(weight_VD.shape[1], weight_VD.shape[0], bias=False)
    decoder.weight = torch.nn.Parameter(weight_VD, requires_grad=False)
    return Head([decoder], {"head_type": "causal_lm"})


def a_batch(rows: int = ROWS, tokens: int = TOKENS, vocabulary: int = VOCAB) -> Batch:
    """Rows of which some end early."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[:, 0] = IGNORED
    labels[0, tokens // 2 :] = IGNORED
    return Batch(ids=ids, mask=(labels != IGNORED).long(), token_type_ids=torch.zeros_like(ids), labels=labels)


def computed(hidden_BTD: torch.Tensor, weight_VD: torch.Tensor, batch: Batch) -> tuple[HeadCounts, torch.Tensor]:
    """Loss, hits, and the gradient of the hidden state."""
    leaf = hidden_BTD.clone().requires_grad_(True)
    counts = task_of(CAUSAL_LM).run(head_of(weight_VD), leaf * 2.0, batch, {})
    torch.autograd.backward([counts.loss_sum / 7])
    assert leaf.grad is not None
    return counts, leaf.grad


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_give_the_loss_and_gradient_of_all_logits(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """In double precision both ways agree to 1e-9, with a chunk that divides nothing, one token, and one for all."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=generator)
    whole, whole_grad = computed(hidden, weight, a_batch())
    monkeypatch.setattr(heads, "logits_fit", lambda *_: False)
    monkeypatch.setattr(heads, "MAX_LOGIT_BYTES", chunk * VOCAB * 8)
    parts, parts_grad = computed(hidden, weight, a_batch())
    assert float(parts.loss_sum.detach()) == pytest.approx(float(whole.loss_sum.detach()), abs=EXACT)
    assert torch.allclose(parts_grad, whole_grad, rtol=0.0, atol=EXACT)
    assert (parts.num_targets, parts.more) == (whole.num_targets, whole.more)


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("cap", [0.0, 2.5])
@pytest.mark.parametrize("hidden_trains", [True, False])
def test_chunks_give_the_loss_and_gradients_of_autograd(chunk: int, cap: float, hidden_trains: bool) -> None:
    """Of hidden state, table and bias, in double precision, with capped logits or not; without a cap it is another."""
    generator = torch.Generator().manual_seed(2)
    hidden, table = (torch.randn(n, 4, dtype=torch.float64, generator=generator).mul_(3) for n in (9, 11))
    bias = torch.randn(11, dtype=torch.float64, generator=generator).requires_grad_(True)
    labels = torch.tensor([0, 5, IGNORED, 10, 3, 3, IGNORED, 1, 2])
    leaves = [hidden.requires_grad_(hidden_trains), table.requires_grad_(True), bias]
    got = token_loss(hidden, table, labels, chunk=chunk, cap=cap, bias_V=bias).loss_sum
    logits = hidden @ table.T + bias
    want, plain = (
        torch.nn.functional.cross_entropy(each, labels, ignore_index=IGNORED, reduction="sum")
        for each in (cap * torch.tanh(logits / cap) if cap else logits, logits)
    )
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    found, wanted = (torch.autograd.grad(2 * loss, trained) for loss in (got, want))
    assert float(got.detach()) == pytest.approx(float(want.detach()), abs=EXACT)
    assert all(torch.allclose(*pair, rtol=0.0, atol=EXACT) for pair in zip(found, wanted, strict=True))
    assert (abs(float(plain.detach() - got.detach())) > 1.0) is bool(cap)


def test_chunks_survive_logits_that_overflow_alone() -> None:
    """Large logits are brought down by their largest first, as the library's loss does."""
    hidden = torch.full((4, 2), 500.0, requires_grad=True)
    table, labels = torch.tensor([[1.0, 1.0], [0.5, 0.5], [-1.0, 0.0]]), torch.tensor([0, 1, 2, 0])
    found = token_loss(hidden, table, labels, chunk=3)
    wanted = torch.nn.functional.cross_entropy(hidden @ table.T, labels, reduction="sum")
    assert float(found.loss_sum.detach()) == pytest.approx(float(wanted.detach()))
    assert found.num_correct == 2
    torch.autograd.backward([found.loss_sum])
    assert hidden.grad is not None and bool(torch.isfinite(hidden.grad).all())


def test_chunks_without_targets_or_graph_move_nothing() -> None:
    """A micro-batch of padding alone counts nothing; in an evaluation there is nothing to go backward through."""
    hidden = torch.randn(5, 2, requires_grad=True)
    found = token_loss(hidden, torch.randn(3, 2), torch.full((5,), IGNORED), chunk=2)
    torch.autograd.backward([found.loss_sum])
    assert (float(found.loss_sum.detach()), found.num_correct) == (0.0, 0)
    assert hidden.grad is not None and not hidden.grad.any()
    with torch.no_grad():
        found = token_loss(hidden, torch.randn(3, 2), torch.tensor([0, 1, 2, 0, 1]), chunk=2)
    assert not found.loss_sum.requires_grad


@pytest.mark.parametrize("native", [None, False, True], ids=["plain", "widened", "native"])
def test_logits_of_a_large_vocabulary_are_never_there_at_once(
    monkeypatch: pytest.MonkeyPatch, native: bool | None
) -> None:
    """Of 4 x 128 tokens over 32,000 words (65 MB) no more lives at any moment than the bound says, and scales."""
    vocabulary, batch = 32_000, a_batch(4, 128, 32_000)
    hidden, weight = torch.randn(4, 128, WIDTH), torch.randn(vocabulary, WIDTH)
    if native is not None:
        numbers, scales = torch.empty(vocabulary, WIDTH, dtype=torch.int8), torch.empty(vocabulary, 1)
        round_to_int8(weight, numbers, scales)
        held = CompactMatrix(RowScaled(numbers=numbers, scales=scales), native=native, room=WideningBuffer())
        weight = FrozenMatrix.of(held)
        monkeypatch.setattr(frozen_weights, "MAX_WIDENED_BYTES", vocabulary * WIDTH // 8)
    with LiveBytes(is_counted=lambda made: vocabulary in made.shape and WIDTH not in made.shape) as seen:
        computed(hidden, weight, batch)
    assert MAX_LOGIT_BYTES // 2 < seen.peak_bytes <= MAX_LOGIT_BYTES + 8 * vocabulary


@pytest.mark.parametrize("value", [3e38, float("nan")])
def test_logits_that_overflow_choose_no_token(value: float) -> None:
    """A node may send a finite hidden state of any size; what is impossible (-inf) is no fault."""
    head, hidden = head_of(torch.ones(VOCAB, WIDTH)), torch.ones(1, 2, WIDTH)
    assert text_logits(head, hidden).tolist() == [[WIDTH] * VOCAB] * 2
    with pytest.raises(DivergedError, match=r"which predict nothing; set model.dtype = 'float32'"):
        text_logits(head, hidden * value)
    assert require_largest(torch.tensor([-torch.inf, 1.0])).argmax() == 1
