"""A model in a GGUF file as the base of a run: what is read of it, how it is held, sent, and merged."""

from __future__ import annotations

import functools
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from coordinator.api.gguf import write_model
from coordinator.client.hub import model_folder
from edge.data.tokens import load_tokenizer
from edge.model.four_bit import WideningBuffer
from edge.model.frozen_weights import FrozenFiles, FrozenMatrix
from edge.model.gguf_blocks import GgufBlocks
from edge.model.merge import merge_run
from edge.model.tensor_files import SafetensorsFiles
from edge.weights.weight_cache import ModelCache
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.model_facts import model_facts
from ringtune.errors import ModelError
from ringtune.models.folder import base_tensors, read_config
from ringtune.models.gguf import folder_of_gguf, gguf_config, gguf_tensors, gguf_tokenizer
from ringtune.models.tokenizer import chat_templates
from ringtune.models.weights_by_digest import ModelSource, needed_files, needed_tensors
from ringtune.schedule.course import FrozenWeights
from tests.edge.model.test_gguf import LATER, LLAMA_3, SPECIAL, byte_level, of_pieces
from tests.support import hand_ring as ring
from tests.support.chat_models import write_tokenizer
from tests.support.gguf_models import K_TYPES, add_tokenizer, random_blocks, write_base, write_gguf
from tests.support.slice_memory import is_mapped
from tests.support.tiny_families import write_family
from tests.support.whole_models import ALL_MATRICES, lora_run

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3")
GGUF = FrozenWeights(dtype="gguf")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_TYPES])
def test_blocks_are_widened_as_by_the_package(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Bit by bit: whole, by parts, by single rows, and for a product."""
    monkeypatch.setattr("edge.model.gguf_blocks.CHUNK", 1024)  # two rows at once
    rng = np.random.default_rng(1)
    if kind in K_TYPES:
        data = random_blocks(kind, 7, 512, rng)
    else:
        data = gguf.quants.quantize(rng.normal(size=(7, 512)).astype(np.float32), gguf.GGMLQuantizationType[kind])
    wanted = torch.from_numpy(dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(7, 512).copy())
    held = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).reshape(7, -1).copy())
    matrix = GgufBlocks(kind=kind, packed=held, width=512, rows=(0, 7), columns=(0, 512))
    room = WideningBuffer()
    assert torch.equal(matrix.widen(slice(None), torch.float32, room), wanted)
    part = matrix.part(slice(1, 6), slice(100, 300)).part(slice(1, 4), slice(0, 150))
    assert part.shape == (3, 150) and part.view().shape == (3, 150)
    assert torch.equal(part.widen(slice(1, 3), torch.float32, room), wanted[3:5, 100:250])
    assert torch.equal(part.widen(slice(None), torch.bfloat16, room), wanted[2:5, 100:250].bfloat16())
    assert torch.equal(part.look_up(torch.tensor([[2, 0], [2, 2]])), wanted[[[4, 2], [4, 4]], 100:250])
    assert matrix.is_finite()
    held[3, {"Q6_K": slice(208, 210), "F32": slice(0, 4)}.get(kind, slice(0, 2))] = 255
    assert not matrix.is_finite()


def small(folder: Path, model_type: str, **config: Any) -> Path:
    """A tiny language model of a family whose rows are whole blocks of 32 numbers."""
    is_tied = model_type.startswith("gemma")
    values = {"intermediate_size": 64, "tie_word_embeddings": is_tied, **config}
    return write_family(folder, model_type, with_decoder=True, **values)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tensors_and_config_are_those_of_the_model(tmp_path: Path, model_type: str) -> None:
    """Of every family, in the names, shapes and order of transformers; what GGUF does not say has its default."""
    blocks, plain = write_base(small(tmp_path / "model", model_type), tmp_path, lambda name: "Q8_0")
    found, wanted = read_config(blocks), read_config(plain)
    assert found == wanted
    assert (
        base_tensors(blocks, found, with_decoder=True).keys() == base_tensors(plain, wanted, with_decoder=True).keys()
    )
    with SafetensorsFiles(blocks) as files:
        for name, value in load_file(plain / "model.safetensors").items():
            assert torch.equal(files.read(name, torch.float32), value)
            assert torch.equal(files.read(name, torch.bfloat16), value.bfloat16())
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/config.json").write_text(json.dumps(gguf_config(blocks / "model.gguf")))
    made = read_config(tmp_path / "alone")
    unsaid = {"initializer_range", "layer_types", "sliding_window_pattern", "max_window_layers", "pad_token_id"}
    unsaid |= {"use_sliding_window", "query_pre_attn_scalar", "rope_local_base_freq", "no_rope_layer_interval"}
    unsaid |= {"no_rope_layers", "head_dim"} | ({"sliding_window"} if "gemma" not in model_type else set())
    if model_type == "mistral":  # a Llama in GGUF
        assert made.pop("model_type") == "llama"
        unsaid |= {"model_type", "attention_bias", "mlp_bias", "rope_scaling"}
    assert {key: value for key, value in made.items() if key not in unsaid} == {
        key: value for key, value in wanted.items() if key not in unsaid
    }
    width = wanted.get("head_dim") or wanted["hidden_size"] // wanted["num_attention_heads"]
    assert (made.get("head_dim") or made["hidden_size"] // made["num_attention_heads"]) == width


WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")


def with_values(content: bytes, values: dict[str, bytes]) -> bytes:
    """A GGUF file with other types and values of these keys."""
    for key, value in values.items():
        at = content.index(key.encode()) + len(key)
        content = content[:at] + value + content[at + len(value) :]
    return content


def test_rope_factors_become_their_settings(tmp_path: Path) -> None:
    """Of Llama 3; factors that no settings give are refused."""
    scaling = {**LLAMA_3, "original_max_position_embeddings": 8192}
    folder = small(tmp_path / "model", "llama", rope_scaling=dict(scaling), max_position_embeddings=32768)
    write_tokenizer(folder)
    write_model(folder, tmp_path / "model.gguf", name="tiny")
    assert gguf_config(tmp_path / "model.gguf")["rope_scaling"] == scaling
    content = (tmp_path / "model.gguf").read_bytes()
    small(tmp_path / "model", "llama", rope_scaling=dict(LLAMA_3), max_position_embeddings=32768)
    write_tokenizer(folder)
    write_model(folder, tmp_path / "other.gguf", name="tiny")
    assert (tmp_path / "other.gguf").read_bytes() != content
    wide = {f"llama.{key}": struct.pack("<II", 4, 4_000_000_000) for key in WIDTHS}  # would take all memory
    no_base = {"llama.rope.freq_base": struct.pack("<If", 6, 0.0)}  # would be divided by
    files = [(tmp_path / "other.gguf").read_bytes(), with_values(content, wide), with_values(content, no_base)]
    for number, wrong in enumerate(files):
        (tmp_path / f"{number}.gguf").write_bytes(wrong)
        with pytest.raises(ModelError, match=r"rope_freqs.weight is not that of a Llama 3"):
            gguf_config(tmp_path / f"{number}.gguf")


ODD: dict[str, tuple[str, Any, str]] = {
    "experts": ("expert_count", 8, "llama.expert_count'?: not known, and may change numbers"),
    "part of a head": ("rope.dimension_count", 4, "llama.rope.dimension_count is 4, only 8"),
    "blocks that differ": ("feed_forward_length", [64, 32], "feed_forward_length has to be one int, but is a list"),
    "other scaling": ("rope.scaling.type", "longrope", "rope.scaling.type is 'longrope'"),
    "factor of attention": ("rope.scaling.attn_factor", 1.5, "llama.rope.scaling.attn_factor'?: not known"),
    "negative scaling": ("rope.scaling.factor", -2.0, "rope.scaling.factor is -2, it has to be above 0"),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_would_change_numbers_is_refused(tmp_path: Path, odd: str) -> None:
    """By its key."""
    key, value, reason = ODD[odd]

    def add(writer: gguf.GGUFWriter) -> None:
        kinds = {int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING, list: gguf.GGUFValueType.ARRAY}
        kinds[float] = gguf.GGUFValueType.FLOAT32
        writer.kv_data[0].pop(f"llama.{key}", None)
        writer.add_key_value(f"llama.{key}", value, kinds[type(value)])
        if odd == "other scaling":
            writer.add_float32("llama.rope.scaling.factor", 2.0)

    write_gguf(small(tmp_path / "model", "llama"), tmp_path / "model.gguf", lambda name: "Q8_0", more=add)
    with pytest.raises(ModelError, match=reason):
        gguf_config(tmp_path / "model.gguf")


def test_scaling_without_a_type_is_linear(tmp_path: Path) -> None:
    """As in llama.cpp; YaRN's values have to be numbers."""
    folder, path = small(tmp_path / "model", "llama"), tmp_path / "model.gguf"

    def write(**more: str) -> None:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_float32("llama.rope.scaling.factor", 2.0)
            for key, value in more.items():
                writer.add_string(f"llama.rope.scaling.{key}", value)

        write_gguf(folder, path, lambda name: "Q8_0", more=add)

    write()
    assert gguf_config(path)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    write(type="none")
    assert "rope_scaling" not in gguf_config(path)
    write(type="yarn", yarn_beta_fast="x")
    with pytest.raises(ModelError, match=r"yarn_beta_fast has to be one float, but is 'x'"):
        gguf_config(path)


def test_other_architectures_and_tensors_are_refused(tmp_path: Path) -> None:
    """By name, with what is known."""
    folder, path = small(tmp_path / "model", "llama"), tmp_path / "a.gguf"
    odd = np.zeros(2, np.float32)
    write_gguf(folder, path, lambda name: "Q8_0", more=lambda writer: writer.add_tensor("blk.0.x", odd))
    with pytest.raises(ModelError, match=r"tensor 'blk.0.x' has no place in a llama"):
        gguf_tensors(path)
    write_gguf(
        folder, tmp_path / "b.gguf", lambda name: "Q8_0", more=lambda writer: writer.add_uint16("split.count", 3)
    )
    with pytest.raises(ModelError, match=r"b.gguf is one of '3' parts; make one file with llama-gguf-split --merge"):
        folder_of_gguf(tmp_path / "b.gguf", tmp_path / "cache")
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(ModelError, match="of the architecture 'mamba'; as GGUF files llama, qwen2"):
        folder_of_gguf(path, tmp_path / "cache")


TEXTS = ("ab abba  b", "a's 123 ab\n\n b", "[x]own ab</s>", " \u00e9\U0001f600a", "")


@pytest.mark.parametrize(
    "made",
    [byte_level(), byte_level(LATER, ignore_merges=True), of_pieces()],
    ids=["words", "words of Llama 3", "pieces"],
)
def test_tokenizer_gives_the_tokens_of_the_one_that_was_written(tmp_path: Path, made: Tokenizer) -> None:
    """Also its special tokens and the chat template; a tokenizer beside the file takes its place."""
    folder = small(tmp_path / "model", "llama")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)
    is_of_pieces = "\u2581" in tokenizer.get_vocab()
    if not is_of_pieces:  # whose added tokens llama.cpp finds before a text is normalised
        tokenizer.add_tokens(["own"])
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    (tmp_path / "alone").mkdir()
    write_model(folder, tmp_path / "alone/my-model.gguf", name="tiny")
    there = folder_of_gguf(tmp_path / "alone/my-model.gguf", tmp_path / "cache")
    assert there.name == "my-model" and read_config(there)["hidden_size"] == 32
    found = load_tokenizer(there)
    for text in TEXTS:
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found(text, add_special_tokens=False)["input_ids"] == wanted
        assert found.decode(wanted) == tokenizer.decode(wanted) or is_of_pieces
    begins = found("ab")["input_ids"][:1] == [tokenizer.bos_token_id]
    assert begins is (tokenizer("ab", add_special_tokens=False)["input_ids"] != found("ab")["input_ids"])
    assert (found.bos_token, found.eos_token) == ("<s>", "</s>")
    assert chat_templates(there) == {"default": "{{ messages }}"}
    write_tokenizer(tmp_path / "alone")
    beside = load_tokenizer(folder_of_gguf(tmp_path / "alone", tmp_path / "other"))
    assert beside.get_vocab() == load_tokenizer(tmp_path / "alone").get_vocab() != found.get_vocab()


def test_tokenizer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """With the remedy to put one beside the file."""
    folder = small(tmp_path / "model", "llama")
    words: dict[str, Any] = {"tokens": ["a"], "kinds": [1]}
    for more, reason in (
        ({"model": "t5", **words}, "of the kind 't5'"),
        ({"model": "gpt2", "pre": "odd", "merges": ["a b"], **words}, "divides texts as 'odd'"),
        ({"model": "gpt2", "pre": "qwen2", **words}, "has no list of merges"),
        ({"model": "llama", **words}, "has no scores"),
    ):
        path = tmp_path / "model.gguf"
        write_gguf(folder, path, lambda name: "Q8_0", more=functools.partial(add_tokenizer, **more))
        with pytest.raises(ModelError, match=f"{reason}.*put the model's tokenizer.json beside the file"):
            folder_of_gguf(path, tmp_path / "cache")


def test_numbers_of_no_token_name_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative ones, and those of tokens out of use; pieces with too many ways to make them are refused."""
    folder, path = small(tmp_path / "model", "llama"), tmp_path / "model.gguf"

    def add(writer: gguf.GGUFWriter) -> None:
        tokens = ["<unk>", "<s>", "a", "b", "ab"]
        add_tokenizer(writer, model="llama", tokens=tokens, kinds=[2, 5, 1, 1, 1], scores=[0.0] * 5)
        writer.add_bos_token_id(1)
        writer.add_add_bos_token(True)
        for name in ("eos", "unknown"):
            writer.add_int32(f"tokenizer.ggml.{name}_token_id", -9)

    write_gguf(folder, path, lambda name: "Q8_0", more=add)
    made = gguf_tokenizer(path)
    assert made["tokenizer.json"]["post_processor"] is made["tokenizer.json"]["model"]["unk_token"] is None
    assert not any(key.endswith("_token") for key in made["tokenizer_config.json"])
    assert "eos_token_id" not in gguf_config(path)
    monkeypatch.setattr("ringtune.models.gguf._MAX_MERGES", 0)
    with pytest.raises(ModelError, match="in more than 0 ways"):
        gguf_tokenizer(path)


def test_folder_of_a_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other paths stay; a GGUF file may have any name, and of several one has to be named."""
    monkeypatch.setattr("ringtune.models.gguf.user_cache_path", lambda name: tmp_path / "cache")
    folder = small(tmp_path / "model", "llama")
    write_tokenizer(folder)
    assert model_folder(str(folder)) == folder and model_folder(str(tmp_path / "nothing")) == tmp_path / "nothing"
    (tmp_path / "both").mkdir()
    write_model(folder, tmp_path / "both/a.gguf", name="tiny")
    first = model_folder(str(tmp_path / "both"))
    assert first == model_folder(str(tmp_path / "both")) and first.is_relative_to(tmp_path / "cache")
    assert first != model_folder(str(tmp_path / "both/a.gguf"))  # named after the file
    shutil.copy(tmp_path / "both/a.gguf", tmp_path / "both/b.gguf")
    for name in (".gguf", "tinygguf", "tiny.GGUF", "sha256-0123"):
        shutil.copy(tmp_path / "both/a.gguf", tmp_path / name)
        assert read_config(model_folder(str(tmp_path / name)))["model_type"] == "llama"
    with pytest.raises(ModelError, match=r"both has 2 GGUF files \(a.gguf, b.gguf\); name one of them"):
        model_folder(str(tmp_path / "both"))


def kind_of(name: str) -> str:
    """Types as in a file of mixed ones: the last matrix of block 3 is larger."""
    return "Q8_0" if name == "blk.3.ffn_down.weight" else "Q4_0"


def test_node_holds_the_blocks_of_the_file_in_planned_bytes(tmp_path: Path) -> None:
    """Of the largest block; an owner's table and decoder too. Rounding to other types is possible."""
    blocks, plain = write_base(small(tmp_path / "model", "llama"), tmp_path, kind_of)
    job = ring.make_job(blocks, model__dtype="float32", model__task="causal-lm", adapter__config="lora[r=2]")
    facts = model_facts(blocks, job)
    params = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64
    assert facts.gguf_block_bytes == (params - 32 * 64) // 32 * 18 + 32 * 64 // 32 * 34
    assert model_facts(plain, job).gguf_block_bytes == 0
    with FrozenFiles(blocks, GGUF) as files, FrozenFiles(plain, FrozenWeights(dtype="int8")) as others:
        held = files.read_frozen("model.layers.3.mlp.down_proj.weight", torch.float32, whole=True)
        assert isinstance(held, FrozenMatrix) and held.held.numbers.held_bytes == 32 * 2 * 34
        assert is_mapped(held.data_ptr(), blocks)
        with FrozenFiles(blocks, FrozenWeights(dtype="int8")) as again:
            name = "model.layers.3.self_attn.q_proj.weight"
            one, other = again.read_frozen(name, torch.float32), others.read_frozen(name, torch.float32)
            assert torch.equal(one.wide(), other.wide())  # type: ignore[attr-defined]
    course = ring.make_plan(job, ring.make_datasets(job, blocks, tmp_path, ("b",)), {"b": (0, 4)}, frozen=GGUF).course
    sizes = Sizes(course, facts, optimizer="adamw", dtype="float32", activation_token_bytes=0)
    assert sizes.block_bytes == facts.gguf_block_bytes + 2 * 32 * 4
    assert sizes.embedding_bytes == 2 * facts.vocab_size * 18 + 32 * 4


def test_other_nodes_fetch_tensors_as_they_are(tmp_path: Path) -> None:
    """Each with the form of its rows in its type; a file that was cut or has other numbers is not the model."""
    blocks, _ = write_base(small(tmp_path / "model", "llama"), tmp_path, kind_of)
    source = ModelSource(blocks)
    cache = ModelCache(tmp_path / "cache", source.manifest, "tiny")
    config = read_config(blocks)
    tensors = needed_tensors(source.manifest, config, blocks=[1], is_owner=True, with_decoder=True)
    files = needed_files(source.manifest, is_owner=True)
    places = [*map(cache.file, files), *map(cache.tensor, tensors)]
    for place in places:
        for _, data in source.read([(place.sha256, 0)]):
            place.write(data, "test")
        place.finish()
    there, outline = cache.publish(files), cache.write_outline()
    job = ring.make_job(outline, model__dtype="float32", model__task="causal-lm")
    assert model_facts(outline, job) == model_facts(blocks, job.with_overrides({"model.path": str(blocks)}))
    with FrozenFiles(there, GGUF) as ours, FrozenFiles(blocks, GGUF) as theirs:
        for entry in tensors:
            one, other = (file.read_frozen(entry.name, torch.float32) for file in (ours, theirs))
            assert torch.equal(*(value.wide() if isinstance(value, FrozenMatrix) else value for value in (one, other)))
    assert {entry.dtype for entry in tensors} >= {"gguf:Q4_0:4", "gguf:Q4_0:2", "gguf:Q4_0", "gguf:F32"}


def test_damaged_numbers_are_refused_by_name(tmp_path: Path) -> None:
    """Scales that are not finite."""
    blocks, _ = write_base(small(tmp_path / "model", "llama"), tmp_path, kind_of)
    stored = base_tensors(blocks, read_config(blocks))["layers.2.mlp.up_proj.weight"]
    with stored.path.open("r+b") as file:
        file.seek(stored.info.offset)
        file.write(b"\x00\x7c")
    with FrozenFiles(blocks, GGUF) as files, pytest.raises(ModelError, match="numbers that are not finite"):
        files.read_frozen("model.layers.2.mlp.up_proj.weight", torch.float32, whole=True)


def test_merged_model_is_that_on_the_widened_base(tmp_path: Path) -> None:
    """In float32, as a folder of safetensors."""
    run, _ = lora_run(tmp_path, "llama", "causal-lm", ALL_MATRICES, intermediate_size=64)
    write_tokenizer(tmp_path / "base")
    blocks, plain = write_base(tmp_path / "base", tmp_path / "bases", kind_of)
    merged = {}
    for name, base in (("blocks", blocks), ("plain", plain)):
        merge_run(run, tmp_path / name, model=base)
        merged[name] = load_file(tmp_path / name / "model.safetensors")
        assert not list((tmp_path / name).glob("*.gguf"))
    assert merged["blocks"].keys() == merged["plain"].keys()
    assert all(torch.equal(value, merged["plain"][key]) for key, value in merged["blocks"].items())
