"""The gradient of a unit goes to other owners with the same bits, and nothing else gets in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from edge.model import unit_grads
from edge.model.tensor_files import pieces_of
from edge.model.unit_grads import add_up_rows, collect_sparse, complete, grad_blob, load_grads, read_grads
from ringtune.errors import DivergedError, IntegrityError
from ringtune.storage.pieces import PIECE_BYTES, Pieces
from ringtune.storage.tensor_files import write_tensors

ROWS, WIDTH = 9, 3


def make_unit(seed: int = 0) -> dict[str, nn.Parameter]:
    """A table and a norm's bias."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "table": nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator)),
        "bias": nn.Parameter(torch.randn(WIDTH, generator=generator)),
    }


def trained_unit(tokens: list[list[int]]) -> dict[str, nn.Parameter]:
    """A unit with the sparse gradient of some micro-batches."""
    unit = make_unit()
    module = nn.Embedding(ROWS, WIDTH)
    module.weight = unit["table"]
    collect_sparse([module])
    for number, micro in enumerate(tokens):
        hidden = module(torch.tensor(micro)) * (number + 0.3) + unit["bias"]
        torch.autograd.backward([hidden.square().sum()])
    return unit


def of(**tensors: torch.Tensor) -> Pieces:
    """A file of these tensors; two underscores stand for a slash."""
    return write_tensors({name.replace("__", "/"): pieces_of(value) for name, value in tensors.items()})


def dense(unit: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The gradients as an optimizer gets them."""
    complete(unit, ())
    return {name: value.grad.clone() for name, value in unit.items() if value.grad is not None}


@pytest.mark.parametrize(("from_bytes", "times"), [(ROWS * WIDTH * 4, 1), (ROWS * WIDTH * 4 + 1, 0)])
def test_freed_memory_is_given_back_before_the_gradient_of_a_large_table_becomes_whole(
    from_bytes: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan counts on it: what the graphs of the step took is not resident beside it."""
    unit, were_sparse = trained_unit([[1, 4]]), []
    monkeypatch.setattr(unit_grads, "TABLE_GIVEN_BACK_BYTES", from_bytes)
    monkeypatch.setattr(unit_grads, "trim_heap", lambda: were_sparse.append(unit["table"].grad.is_sparse))
    complete(unit, ())
    assert were_sparse == [True] * times


def test_gradient_of_a_table_travels_as_its_rows_with_the_same_bits() -> None:
    """Only rows that a batch used are in the file; what the copy adds to its optimizer is equal in every bit."""
    unit, copy = trained_unit([[1, 4, 4], [4, 7, 1]]), make_unit()
    blob = Pieces.of(bytes(grad_blob(unit, ())))
    assert blob.size_bytes < 3 * (WIDTH * 4 + 8) + WIDTH * 4 + 512
    load_grads(blob, copy, where="it")
    ours, theirs = dense(unit), dense(copy)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ours["table"].abs().sum(dim=-1).nonzero().flatten().tolist() == [1, 4, 7]


def test_gradient_of_a_table_has_no_more_rows_than_the_table_after_a_micro_batch() -> None:
    """A word that comes in every micro-batch is one row; the sum is the one of all rows."""
    tokens = [[1, 4, 4, 1, 7, 7, 1, 4], [7, 4, 1, 1], [1, 1, 1, 4]]
    unit, bounded = trained_unit(tokens), make_unit()
    module = nn.Embedding(ROWS, WIDTH)
    module.weight = bounded["table"]
    collect_sparse([module])
    rows = []
    for number, micro in enumerate(tokens):
        hidden = module(torch.tensor(micro)) * (number + 0.3) + bounded["bias"]
        torch.autograd.backward([hidden.square().sum()])
        add_up_rows(bounded)
        rows.append(bounded["table"].grad._nnz())
    assert rows[:2] == [8, 3] and max(rows) <= ROWS  # 8 + 4 are more than the table's 9, and become 3
    assert unit["table"].grad._nnz() > ROWS
    ours, theirs = dense(bounded), dense(unit)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


@pytest.mark.parametrize("is_tied", [False, True])
def test_rows_of_equal_tokens_are_added_up_before_a_gradient_becomes_dense(
    is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator adds an uncoalesced gradient to a dense one in any order; the sums are the ones of before."""
    unit = trained_unit([[1, 4, 4, 4], [4, 7, 1, 1]])
    stand_in = nn.Parameter(unit["table"].detach())
    stand_in.grad = torch.zeros(ROWS, WIDTH)
    added: list[torch.Tensor] = []

    def watched(name: str) -> None:
        run = getattr(torch.Tensor, name)

        def look(*tensors: torch.Tensor) -> torch.Tensor:
            added.extend(tensor for tensor in tensors if tensor.is_sparse)
            done: torch.Tensor = run(*tensors)
            return done

        monkeypatch.setattr(torch.Tensor, name, look)

    watched("to_dense")
    watched("add_")
    own = unit["table"].grad
    assert own is not None and not own.is_coalesced()
    wanted = own.clone().to_dense()
    added.clear()
    complete(unit, [(unit["table"], stand_in)] if is_tied else ())
    assert [tensor.is_coalesced() for tensor in added] == [True]
    assert unit["table"].grad is not None and torch.equal(unit["table"].grad, wanted)


def test_gradient_of_a_tied_table_is_the_sum_of_both_and_travels_whole() -> None:
    """What the head collected on its stand-in is moved once, whether the gradient leaves first or not."""
    unit, copy = trained_unit([[2, 3]]), make_unit()
    own = unit["table"].grad
    assert own is not None
    own = own.to_dense()
    stand_in = nn.Parameter(unit["table"].detach())
    stand_in.grad = torch.ones(ROWS, WIDTH)
    load_grads(Pieces.of(bytes(grad_blob(unit, [(unit["table"], stand_in)]))), copy, where="it")
    assert stand_in.grad is None
    complete(unit, [(unit["table"], stand_in)])
    assert unit["table"].grad is not None and torch.equal(unit["table"].grad, own + 1.0)
    assert torch.equal(dense(copy)["table"], unit["table"].grad)


def test_gradient_on_its_way_is_not_changed_by_an_update() -> None:
    """The file may be read after the update of the unit, by a slow link."""
    unit, copy = trained_unit([[5, 0]]), make_unit()
    blob = grad_blob(unit, ())
    wanted = {name: value.clone() for name, value in dense(unit).items()}
    optimizer = torch.optim.AdamW(unit.values(), lr=0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    load_grads(Pieces.of(bytes(blob)), copy, where="it")
    found = dense(copy)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


TABLE, BIAS = torch.ones(ROWS, WIDTH), torch.ones(WIDTH)
REFUSED: dict[str, tuple[Callable[[], Pieces], str]] = {
    "no file": (lambda: Pieces.of(b"nothing of the kind"), "it"),
    "another tensor": (lambda: of(grad__bias=BIAS, grad__other=BIAS), "not those of its unit"),
    "another shape": (lambda: of(grad__bias=torch.ones(WIDTH + 1)), "expected"),
    "another type": (lambda: of(grad__bias=BIAS.double()), "expected"),
    "twice": (lambda: of(grad__table=TABLE, rows__table=torch.tensor([1]), values__table=TABLE[:1]), "twice"),
    "rows alone": (lambda: of(rows__table=torch.tensor([1])), "without values"),
    "row outside": (lambda: of(rows__table=torch.tensor([1, ROWS]), values__table=TABLE[:2]), "not ascending within 9"),
    "row below": (lambda: of(rows__table=torch.tensor([-1, 2]), values__table=TABLE[:2]), "not ascending within 9"),
    "row twice": (lambda: of(rows__table=torch.tensor([2, 2]), values__table=TABLE[:2]), "not ascending within 9"),
    "differences that overflow": (
        lambda: of(rows__table=torch.tensor([8, 5 - 2**63, -1, 8]), values__table=TABLE[:4]),
        "not ascending within 9",
    ),
    "a single row": (lambda: of(rows__table=torch.tensor(1), values__table=TABLE[0]), "expected"),
    "rows of a vector": (lambda: of(rows__bias=torch.tensor([1]), values__bias=BIAS[:1]), "not those of its unit"),
    "fewer values": (lambda: of(rows__table=torch.tensor([2, 3]), values__table=TABLE[:1]), "expected"),
    "rows of another type": (lambda: of(rows__table=torch.tensor([2.0]), values__table=TABLE[:1]), "I64"),
}


def test_gradient_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    """One clear error that names the file; the unit keeps what it had. No copy takes one that is not finite."""
    unit = make_unit()
    unit["bias"].grad = before = torch.zeros(WIDTH)
    for name, (make, said) in REFUSED.items():
        with pytest.raises(IntegrityError, match="it") as caught:
            load_grads(make(), unit, where="it")
        assert said in str(caught.value), name
        assert unit["bias"].grad is before and unit["table"].grad is None, name
    for bad in (torch.nan, torch.inf):
        with pytest.raises(DivergedError, match="bias"):
            load_grads(of(grad__bias=torch.tensor([1.0, bad, 2.0])), unit, where="it")
        assert unit["bias"].grad is before


def test_gradient_of_blocks_is_whole() -> None:
    """Sparse and whole gradients of two replicas have no sum in one of both orders."""
    blob = of(rows__table=torch.tensor([1]), values__table=TABLE[:1])
    with pytest.raises(IntegrityError, match="not those of its unit"):
        read_grads(blob, make_unit(), where="it")


def test_gradient_is_looked_at_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes a copy of what it is asked about: of a whole table it would be a second one beside the gradient."""
    values = 2 * PIECE_BYTES // 4
    blob = Pieces.of(bytes(of(grad__table=torch.ones(values, 1))))
    asked, is_finite = [], torch.isfinite

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor.nbytes)
        return is_finite(tensor)

    monkeypatch.setattr(torch, "isfinite", watched)
    load_grads(blob, {"table": nn.Parameter(torch.zeros(values, 1))}, where="it")
    assert 0 < max(asked) <= PIECE_BYTES
    assert sum(asked) == 4 * values
