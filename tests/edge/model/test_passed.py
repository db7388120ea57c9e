"""What blocks pass on besides a hidden state: widths from a config, and packed blocks that equal one loop of them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from edge.model.families.recorded import hidden_states, pack_embedding, run_block
from edge.techniques.micro_batches import MicroBatch, MicroBatches
from ringtune.costs.model_facts import check_job
from ringtune.errors import JobError, ModelError
from ringtune.models.families import FAMILIES
from ringtune.models.folder import read_config, select_tensors
from ringtune.models.passed_values import PassedValues, SharedKeys, gemma3n_passed, gemma4_passed
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from tests.support.plans import changed, make_plan
from tests.support.torch_ring import Case

WIDTH, TOKENS = 4, 3
FULL, WINDOW = "full_attention", "sliding_attention"
KINDS = (WINDOW, FULL, WINDOW, FULL, WINDOW)
HEADS = {WINDOW: (2, 3), FULL: (1, 5)}
"""Kind -> key-value heads, and width of a head."""


def passed_of(streams: int, inputs: int) -> PassedValues:
    """Five blocks, of which the last two read keys of blocks 1 and 2."""
    shared = (SharedKeys(FULL, 1, 3, 10), SharedKeys(WINDOW, 2, 4, 12))
    return PassedValues(num_blocks=5, hidden=streams * WIDTH, inputs=inputs, shared=shared)


class Block(nn.Module):
    """Adds keys, values and an input, each times a weight, to a hidden state; the last two blocks have no keys."""

    def __init__(self, at: int, inputs: int) -> None:
        super().__init__()
        self.layer_idx, self.config = at, SimpleNamespace(hidden_size=WIDTH)
        self.heads, width = HEADS[KINDS[at]]
        self.self_attn = SimpleNamespace(layer_type=KINDS[at], head_dim=width)
        self.makes = nn.Linear(WIDTH, 2 * self.heads * width, dtype=torch.float64) if at < 3 else None
        self.reads = nn.Linear(2 * self.heads * width, WIDTH, dtype=torch.float64)
        self.takes = nn.Linear(inputs, WIDTH, dtype=torch.float64) if inputs else None

    def forward(self, hidden: torch.Tensor, tables: str, own: Any, *, shared_kv_states: dict[str, Any]) -> torch.Tensor:
        """As a block of the library, with its arguments."""
        assert tables == "tables"
        first = hidden[0] if hidden.dim() == 4 else hidden
        if self.makes is not None:
            keys, values = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.makes(first).chunk(2, dim=-1)
            )
            shared_kv_states[self.self_attn.layer_type] = keys, values
        read = shared_kv_states[self.self_attn.layer_type]
        added: torch.Tensor = self.reads(torch.cat([part.transpose(1, 2).flatten(2) for part in read], dim=-1)).tanh()
        if self.takes is not None:
            added = added * self.takes(own)
        return hidden + (added.expand_as(hidden) if hidden.dim() == 4 else added)


def in_one_loop(blocks: list[Block], hidden: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The blocks as a library runs them: a dictionary of keys, and a list of inputs."""
    shared: dict[str, Any] = {}
    for at, block in enumerate(blocks):
        hidden = block(hidden, "tables", inputs[at] if inputs else None, shared_kv_states=shared)
    return hidden


@pytest.mark.parametrize("inputs", [0, 2])
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("cuts", [(), (1,), (2, 3), (1, 2, 3, 4)])
def test_packed_blocks_equal_one_loop(cuts: tuple[int, ...], streams: int, inputs: int) -> None:
    """On any number of hosts; gradients of keys that other hosts read come back to the block that made them."""
    torch.manual_seed(0)
    passed, blocks = passed_of(streams, inputs), [Block(at, inputs) for at in range(5)]
    shape = (2, TOKENS, WIDTH)
    hidden = torch.randn(*(() if streams == 1 else (streams,)), *shape, dtype=torch.float64)
    own = tuple(torch.randn(2, TOKENS, inputs, dtype=torch.float64) for _ in blocks) if inputs else ()
    wanted = in_one_loop(blocks, hidden, own)
    torch.autograd.backward((wanted**2).sum())
    gradients = [parameter.grad for block in blocks for parameter in block.parameters()]
    for block in blocks:
        block.zero_grad()

    packed, ends = pack_embedding(hidden, *own), list[tuple[torch.Tensor, torch.Tensor]]()
    for start, stop in zip((0, *cuts), (*cuts, 5), strict=True):
        entered = packed.detach().requires_grad_()
        packed = entered
        for at in range(start, stop):
            assert packed.shape[-1] == passed.entering[at]
            packed = run_block(passed, blocks[at], packed, "tables", None, shared_kv_states={})
        ends.append((entered, packed))
    assert packed.shape[-1] == passed.entering[5] == passed.hidden
    torch.testing.assert_close(hidden_states(passed, packed, WIDTH), wanted, rtol=0, atol=1e-12)
    gradient = 2 * packed.detach()
    for (entered, left), start in zip(reversed(ends), (*reversed(cuts), 0), strict=True):
        torch.autograd.backward(left, nn.functional.pad(gradient, (0, left.shape[-1] - gradient.shape[-1])))
        assert entered.grad is not None and not entered.grad[..., passed.returning[start] :].any()
        gradient = entered.grad[..., : passed.returning[start]]
    found = [parameter.grad for block in blocks for parameter in block.parameters()]
    for own_grad, grad in zip(found, gradients, strict=True):
        torch.testing.assert_close(own_grad, grad, rtol=0, atol=1e-12)


E2B: dict[str, Any] = {
    "num_hidden_layers": 35,
    "hidden_size": 1536,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_kv_shared_layers": 20,
    "layer_types": ([WINDOW] * 4 + [FULL]) * 7,
}


def test_widths_of_the_small_models() -> None:
    """Keys of blocks 13 (window) and 14 of Gemma 4 E2B are read up to blocks 33 and 34; inputs have 256 values."""
    passed = gemma4_passed(E2B)
    assert passed is not None
    assert passed.shared == (SharedKeys(FULL, 14, 34, 1024), SharedKeys(WINDOW, 13, 33, 512))
    assert passed.returning == (*[1536] * 14, 2048, *[3072] * 19, 2560, 1536)
    assert [passed.entering[at] for at in (0, 14, 20, 34, 35)] == [10496, 7424, 6912, 2816, 1536]
    alone = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    assert gemma4_passed({**E2B, **alone}) is None
    by_block = {"per_layer_config": {str(at): {"head_dim": 64} for at in range(4, 35, 5)}}
    found = gemma4_passed({**E2B, **by_block})
    assert found is not None and {keys.values for keys in found.shared} == {128, 512}
    e4b = gemma3n_passed({"num_hidden_layers": 35, "hidden_size": 2048})
    assert e4b.hidden == 4 * 2048 and e4b.entering[0] == 8192 + 35 * 256
    assert e4b.shared == (SharedKeys(FULL, 19, 34, 1024), SharedKeys(WINDOW, 18, 33, 1024))
    assert FAMILIES["gemma4_text"].unread(E2B)[:4] == tuple(
        f"layers.15.self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )


def test_keys_that_a_file_has_of_sharing_blocks_are_left_out() -> None:
    """Files of Gemma 3n have matrices of keys in blocks that read those of others; the tables of inputs are needed."""
    config: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 8, "num_kv_shared_layers": 1, "head_dim": 4}
    config |= {"hidden_size_per_layer_input": 2, "vocab_size_per_layer_input": 9, "layer_types": [WINDOW, FULL, WINDOW]}
    config |= {"model_type": "gemma3n_text", "vocab_size": 10, "num_attention_heads": 2, "tie_word_embeddings": True}
    names = [f"layers.{block}.self_attn.{name}.weight" for block in range(3) for name in ("q_proj", "k_proj", "v_norm")]
    shapes = dict.fromkeys(names, (8, 8)) | {
        "embed_tokens.weight": (10, 8),
        "embed_tokens_per_layer.weight": (9, 6),
        "per_layer_model_projection.weight": (6, 8),
        "altup_projections.0.weight": (8, 8),
    }
    given: dict[str, Any] = {"where": "model", "blocks": range(3), "is_owner": True, "with_decoder": False}
    left_out = {"layers.2.self_attn.k_proj.weight", "layers.2.self_attn.v_norm.weight"}
    assert {*select_tensors(shapes, config, **given)} == shapes.keys() - left_out
    with pytest.raises(ModelError, match=r"'embed_tokens_per_layer.weight' has shape \(9, 7\)"):
        select_tensors({**shapes, "embed_tokens_per_layer.weight": (9, 7)}, config, **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train.method": "hift", "adapter.config": "full"},
            "trains the embedding, and inputs of the blocks of this gemma4_text go",
        ),
        (
            {"operations.policy": "random", "operations.compute": 0.6, "operations.heads": 0},
            "passed by takes no input out of what goes on",
        ),
        ({"wire.dtype": "int8"}, "would round the inputs and keys of later blocks of this gemma4_text to zero"),
        ({"generation.rows": 1}, "behind which a gemma4_text can't compute a token"),
    ],
)
def test_what_needs_the_hidden_state_alone_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """By name, and only of models whose blocks read more."""
    more = {"model_type": "gemma4_text", "vocab_size": 10, "num_attention_heads": 8, "intermediate_size": 6144}
    job = Case(folder=tmp_path, task="causal-lm", adapter="lora", dtype="float32", method="all").job
    alone = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    for own in ({}, alone):
        (tmp_path / "config.json").write_text(json.dumps(E2B | more | own))
        config, changed_job = read_config(tmp_path), job.with_overrides(changes)
        with contextlib.nullcontext() if own else pytest.raises(JobError, match=message):
            check_job(changed_job, config)


def test_gradients_travel_without_inputs_of_blocks() -> None:
    """A gradient of 7 values is sent of 9 that entered, and has zeros for the other two before its backward."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], hidden_size=5)
    course = changed(plan, entering=(13, 11, 9, 9, 5), returning=(5, 5, 7, 7, 5)).course
    flows = MicroBatches(course, dtype=torch.float32, device=torch.device("cpu"))
    grad, key = torch.randn(2, 3, 9), TensorKey(Payload.GRAD, 0, 0, 2)
    flows.begin(Action(Op.BACKWARD, 0, 0, 2, 4), MicroBatch(grad=grad))
    copied, _ = flows.copy(key)
    sent, _ = flows.take(key)
    assert torch.equal(sent, grad[..., :7]) and torch.equal(copied, sent)
    flows.put(key, sent, None)
    whole = flows.whole_grad(Action(Op.BACKWARD, 0, 0, 0, 2))
    assert whole is not None and torch.equal(whole, nn.functional.pad(sent, (0, 2)))
