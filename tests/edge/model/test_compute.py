"""Which products of a block are in bfloat16, and that everything else is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edge.model.slice import BlockRunner
from ringtune.job.job import parse_job
from tests.support.tiny_families import write_family
from tests.support.whole_models import built

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the types of the factors of all products, those of backward too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_backward")
        if name in PRODUCTS:
            factors = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            self.dtypes.setdefault(name, set()).update(factor.dtype for factor in factors)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model_type", ["bert", "llama", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("adapter", ["lora[r=4]", "full"])
def test_products_of_a_block_are_in_bfloat16(tmp_path: Path, model_type: str, adapter: str) -> None:
    """Forward and backward; weights, their gradients and hidden states stay float32."""
    folder = write_family(tmp_path, model_type)
    text = f'[model]\npath = "{folder}"\n[adapter]\nconfig = "{adapter}"\n[data]\ntrain = "x"\n'
    found = {}
    hidden, mask = torch.randn(2, 5, 32), torch.ones(2, 5, dtype=torch.long)
    for compute in ("float32", "bfloat16"):
        skeleton = built(folder, parse_job(text, source="test"), [0])
        runner = BlockRunner(skeleton, dropout=0.0, seed=0, compute=compute)
        given = hidden.clone().requires_grad_()
        context = runner.context(given, mask)
        with Products() as products:
            out = runner.run(given, mask, context, 0, 1, train_at=(0, 0))
            out.square().sum().backward()  # type: ignore[no-untyped-call]
        trained = runner.parameters(0, 1)
        grads = [value.grad for value in trained.values()]
        assert grads and all(grad is not None and grad.dtype is torch.float32 for grad in grads)
        assert {value.dtype for value in trained.values()} == {out.dtype} == {torch.float32}
        assert products.dtypes and set().union(*products.dtypes.values()) == {getattr(torch, compute)}
        found[compute] = out.detach()
    distance = (found["bfloat16"] - found["float32"]).norm() / found["float32"].norm()
    assert 1e-5 < float(distance) < 2e-2
