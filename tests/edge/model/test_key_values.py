"""Tokens that follow others in a cache: the hidden states of a forward of all tokens, in bounded memory."""

from __future__ import annotations

import zlib
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.data.tokens import Batch
from edge.model.families.decoders import causal_context
from edge.model.frozen_weights import FrozenFiles
from edge.model.key_values import KeyValueCache, most_bytes
from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import DTYPES, BlockRunner, materialise
from ringtune.job.job import parse_job
from ringtune.models.families import FAMILIES
from ringtune.models.folder import model_dimensions, read_config
from ringtune.schedule.course import NF4, FrozenWeights
from tests.support.tiny_families import DECODERS, GENERIC, IN_FLOAT32, config_of, write_family

NUM_BLOCKS, NUM_TOKENS = 4, 16
KEEPING = {"hidden_size": 32, "num_hidden_layers": 4, "num_kv_shared_layers": 0}
"""A config in which each block keeps its own keys and values."""
PIECES = (7, 3, *[1] * 6)
LORA = "lora[attn_matrices=['q','k','v'],intermediate_lora=True]"


def hosted(
    folder: Path,
    adapter: str,
    start: int,
    stop: int,
    frozen: FrozenWeights | None = None,
    dtype: str = "float64",
    task: str = "causal-lm",
) -> Skeleton:
    """What a node hosts of a random model, with the embedding and with adapters of random values."""
    text = f'[model]\npath = "{folder}"\ntask = "{task}"\n[adapter]\nconfig = "{adapter}"\n[data]\ntrain = "x"\n'
    with torch.random.fork_rng(devices=[]), FrozenFiles(folder, frozen) as weights, torch.no_grad():
        skeleton = build_skeleton(folder, parse_job(text, source="test"))
        blocks, cpu = range(start, stop), torch.device("cpu")
        materialise(skeleton, weights, blocks=blocks, with_embedding=True, dtype=DTYPES[dtype], device=cpu)
        for name, value in skeleton.model.named_parameters():
            if ".ringtune." in name and value.requires_grad:
                torch.manual_seed(zlib.crc32(name.encode()))
                value.normal_(std=0.1)
    skeleton.model.eval()
    return skeleton


def forward(skeletons: list[Skeleton], ids_BT: torch.Tensor, caches: list[Any], first: int = 0) -> torch.Tensor:
    """The hidden state after all blocks; each skeleton has half of them."""
    ones = torch.ones_like(ids_BT)
    positions = torch.arange(first, first + ids_BT.shape[1]).expand(ids_BT.shape)
    batch = Batch(ids=ids_BT, mask=ones, token_type_ids=ones, labels=ones, positions=positions)
    with torch.no_grad():
        hidden = skeletons[0].family.embed(skeletons[0].base, batch)
        for number, (skeleton, cache) in enumerate(zip(skeletons, caches, strict=True)):
            runner, half = BlockRunner(skeleton, dropout=0.0, seed=0), NUM_BLOCKS // len(skeletons)
            context = runner.context(hidden, ones, cache)
            hidden = runner.run(hidden, ones, context, number * half, (number + 1) * half)
    return hidden


def ids_of(seed: int) -> torch.Tensor:
    """Two texts."""
    return torch.randint(4, 60, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("model_type", "adapter"),
    [
        *((model_type, LORA if index % 2 else "double_seq_bn") for index, model_type in enumerate(DECODERS)),
        *((model_type, "lora") for model_type in GENERIC if FAMILIES[model_type].takes_cache(KEEPING)),
        ("gpt2", "seq_bn_inv"),
        ("llama", "ia3"),
        ("llama", "par_bn|linear[attn_matrices=['q'],alpha=0.5]"),
        ("mistral", "mtl_lora"),
    ],
)
@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_tokens_behind_a_cache_are_those_of_a_whole_forward(model_type: str, adapter: str, tmp_path: Path) -> None:
    """On one host and on two, by pieces of 7, 3 and 1 tokens, of which the last are beyond each window."""
    more: dict[str, Any] = {"num_kv_shared_layers": 0} if FAMILIES[model_type].passed(KEEPING) else {}
    folder = write_family(tmp_path, model_type, num_blocks=NUM_BLOCKS, with_decoder=True, **more)
    dtype, bound = ("float32", 1e-4) if model_type in IN_FLOAT32 else ("float64", 1e-5)
    whole = [hosted(folder, adapter, 0, NUM_BLOCKS, dtype=dtype)]
    halves = [hosted(folder, adapter, 0, 2, dtype=dtype), hosted(folder, adapter, 2, NUM_BLOCKS, dtype=dtype)]
    ids = ids_of(0)
    wanted = forward(whole, ids, [None])
    for skeletons in (whole, halves):
        caches, first = [KeyValueCache(skeleton.base.config) for skeleton in skeletons], 0
        for count in PIECES:
            found = forward(skeletons, ids[:, first : first + count], caches, first)
            torch.testing.assert_close(found, wanted[:, first : first + count], rtol=bound, atol=bound)
            first += count
            assert {cache.num_tokens for cache in caches} == {first}


@pytest.mark.parametrize("model_type", ["llama", "olmo", "ministral"])
def test_stretch_of_blocks_has_a_cache_of_its_own(model_type: str, tmp_path: Path) -> None:
    """Of a node with first and last block each one's cache has no tokens of the other, also for several at once."""
    folder = write_family(tmp_path, model_type, num_blocks=NUM_BLOCKS, with_decoder=True)
    model, ids = hosted(folder, "lora", 0, NUM_BLOCKS), ids_of(2)
    wanted, stretches, at = forward([model], ids, [None]), ((0, 1), (1, 3), (3, 4)), 0
    caches, runner = [KeyValueCache(model.base.config) for _ in stretches], BlockRunner(model, dropout=0.0, seed=0)
    for count in PIECES:
        some, ones = ids[:, at : at + count], torch.ones_like(ids[:, at : at + count])
        batch = Batch(ids=some, mask=ones, token_type_ids=ones, labels=ones, positions=None)
        with torch.no_grad():
            found = model.family.embed(model.base, batch)
            for (start, stop), cache in zip(stretches, caches, strict=True):
                found = runner.run(found, ones, runner.context(found, ones, cache), start, stop)
        torch.testing.assert_close(found, wanted[:, at : at + count], rtol=1e-5, atol=1e-5)
        at += count


def test_tokens_behind_a_cache_with_weights_in_four_bits(tmp_path: Path) -> None:
    """Products of one token and of many round the same numbers."""
    folder = write_family(tmp_path, "llama", num_blocks=NUM_BLOCKS, with_decoder=True)
    model, ids = [hosted(folder, LORA, 0, NUM_BLOCKS, FrozenWeights(dtype=NF4), "float32")], ids_of(0)
    cache = [KeyValueCache(model[0].base.config)]
    wanted = forward(model, ids, [None])
    found = [forward(model, ids[:, at : at + 1], cache, at) for at in range(NUM_TOKENS)]
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_bytes_are_those_that_are_told_and_a_text_is_shortened(model_type: str, tmp_path: Path) -> None:
    """A window of 5 keeps 4 tokens, and can not go back to those that it has forgotten."""
    folder = write_family(tmp_path, model_type, num_blocks=NUM_BLOCKS, with_decoder=True)
    model, dimensions = [hosted(folder, LORA, 0, NUM_BLOCKS)], model_dimensions(read_config(folder))
    config, ids = model[0].base.config, ids_of(1)
    cache = KeyValueCache(config)
    for at in range(NUM_TOKENS):
        forward(model, ids[:, at : at + 1], [cache], at)
    told = 2 * most_bytes(config, dimensions, NUM_TOKENS, torch.float64)  # two texts
    assert 0.99 * told < cache.num_bytes <= told + (0 if model_type == "llama" else told // 3)
    assert cache.keep(NUM_TOKENS + 1) == NUM_TOKENS
    left = cache.keep(9)
    assert left == cache.num_tokens == (9 if model_type == "llama" else 0)
    found = forward(model, ids[:, left:12], [cache], left)
    torch.testing.assert_close(found[:, -1], forward(model, ids, [None])[:, 11], rtol=1e-7, atol=1e-7)
    assert cache.keep(0) == cache.num_tokens == cache.num_bytes == 0


@pytest.mark.parametrize("tokens", [4, 5, 6, 9])
@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_causal_mask_of_a_window_is_that_of_the_library(model_type: str, tokens: int) -> None:
    """Rows shorter than a window of five tokens, as long, and longer; None where the kernel makes the mask."""
    from transformers.masking_utils import create_sliding_window_causal_mask as make

    config = config_of(model_type, num_blocks=2)
    config._attn_implementation = "sdpa"
    hidden = torch.zeros(3, tokens, 32)
    for mask in (torch.ones(3, tokens), torch.arange(tokens) >= torch.tensor([[tokens - 1], [1], [0]])):
        context = causal_context(config, hidden, mask, window=True)
        places = [context.row_positions] if "cache_position" in signature(make).parameters else []  # of 4.57
        wanted = make(config, hidden, mask, *places, None, context.positions)
        assert (context.mask is None) == (wanted is None)
        assert wanted is None or torch.equal(context.mask, wanted)  # type: ignore[arg-type]
