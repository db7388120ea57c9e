"""GGUF files: read back by transformers' own reader, or by hand, they are the run's model and its LoRA."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from typer.testing import CliRunner

from coordinator.api import export
from coordinator.api.export import export_run, model_contents
from coordinator.api.gguf import gguf_refusal, modelfile, write_model
from coordinator.client.saved_run import read_run
from edge.model import merge
from edge.model.merge import merge_run
from edge.runtime import answer_ends
from edge.runtime.answer_ends import stop_texts
from ringtune import cli
from ringtune.errors import UsageError
from ringtune.job.job import Job, load_job
from ringtune.models.conversations import TEMPLATES
from ringtune.models.family import CAUSAL_LM, CHAT
from ringtune.models.folder import read_config, with_old_rope
from tests.support import chat_models
from tests.support import whole_models as whole
from tests.support.chat_models import write_tokenizer
from tests.support.tiny_families import write_family
from tests.support.typed import calling
from tests.support.whole_models import ALL_MATRICES, lora_run

LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA_2: dict[str, Any] = {"query_pre_attn_scalar": 12}
GEMMA_3: dict[str, Any] = {
    "query_pre_attn_scalar": 12,
    "layer_types": ["sliding_attention"] * 4,
    "rope_local_base_freq": 10000.0,
}
GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.25,
    "logits_scaling": 4.0,
}
SMOLLM_3: dict[str, Any] = {"no_rope_layers": [1, 1, 1, 0]}
SPECIAL: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
IDS = torch.tensor([[3, 5, 9, 20, 33]])


def merged(folder: Path, model_type: str, **changes: Any) -> Any:
    """Write a run, its merged model and that as GGUF into a folder; return the run's model."""
    run, skeleton = lora_run(folder, model_type, CAUSAL_LM, ALL_MATRICES, **changes)
    write_tokenizer(folder / "base", chat_models.QWEN_3)
    (folder / "merged").mkdir()
    merge_run(run, folder / "merged", model=None)
    write_model(folder / "merged", folder / "model.gguf", name="tiny")
    return whole.as_model(skeleton)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("gpt2", {}), ("llama", {}), ("qwen2", {}), ("qwen3", {}), ("gemma2", GEMMA_2), ("gemma3_text", GEMMA_3)],
)
def test_reader_of_transformers_finds_the_model_of_the_run(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    """Weights of the GGUF file in the base model's class give the run's logits; the base's own give others."""
    model = merged(tmp_path, model_type, **changes)
    with torch.no_grad():
        wanted = model(input_ids=IDS, attention_mask=torch.ones_like(IDS))["logits"]
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager").eval()
        assert float((base(input_ids=IDS).logits - wanted).abs().max()) > 1e-2
        read = load_gguf_checkpoint(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=base)
        missing = base.load_state_dict(read["tensors"], strict=False)
        assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys
        assert float((base(input_ids=IDS).logits - wanted).abs().max()) <= 1e-5 * max(1.0, float(wanted.abs().max()))
    config = with_old_rope(base.config.to_dict())
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "rope_theta"):
        assert with_old_rope(read["config"]).get(key, config.get(key)) == config.get(key)


@pytest.mark.parametrize(
    ("model_type", "changes", "tolerance"),
    [
        *((model_type, {}, 1e-5) for model_type in ("llama", "mistral", "qwen2", "qwen3")),
        ("smollm3", SMOLLM_3, 1e-5),
        *(("gpt2", {}, 1e-2), ("gemma", {}, 1e-2), ("gemma2", GEMMA_2, 1e-2), ("gemma3_text", GEMMA_3, 1e-2)),
    ],
)
def test_llama_cpp_computes_the_probabilities_of_the_run(
    tmp_path: Path, model_type: str, changes: dict[str, Any], tolerance: float
) -> None:
    """Of all tokens; the activation of GPT-2 and Gemma is from a table of 16 bits there."""
    llama_cpp = pytest.importorskip("xllamacpp", reason="llama.cpp is not there: pip install xllamacpp (a wheel)")
    model, ids = merged(tmp_path, model_type, **changes), IDS[:, :4]  # the smallest model has 5 positions
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=torch.ones_like(ids))["logits"][0, -1].log_softmax(-1)
    settings = llama_cpp.CommonParams()
    settings.model.path = str(tmp_path / "model.gguf")
    settings.warmup, settings.cpuparams.n_threads, settings.verbosity = False, 1, -1
    exactly = llama_cpp.ggml_type.GGML_TYPE_F32
    settings.cache_type_k, settings.cache_type_v = exactly, exactly
    settings.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    asked = {"prompt": ids[0].tolist(), "max_tokens": 1, "logprobs": len(wanted)}
    (answer,) = llama_cpp.Server(settings).handle_completions(asked)["choices"][0]["logprobs"]["content"]
    found = {token["id"]: token["logprob"] for token in answer["top_logprobs"]}
    assert max(abs(found[token] - value) for token, value in enumerate(wanted.tolist())) <= tolerance


def read_by_hand(path: Path, heads: int, kv_heads: int, *, is_interleaved: bool, added: float) -> dict[str, np.ndarray]:
    """Tensors of a GGUF file as transformers has them: pairs of a head are taken apart one by one, norms less one."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = np.array(tensor.data)
        for name, count in (("attn_q.", heads), ("attn_k.", kv_heads)):
            if name in tensor.name and is_interleaved and not tensor.name.endswith("lora_a"):
                width = len(values) // count
                order = [
                    head * width + half + 2 * pair
                    for head in range(count)
                    for half in range(2)
                    for pair in range(width // 2)
                ]
                values = values[order]
        found[tensor.name] = values - added if "norm" in tensor.name else values
    return found


@pytest.mark.parametrize(
    ("model_type", "changes", "is_interleaved", "added"),
    [
        ("mistral", {}, True, 0.0),
        ("smollm3", SMOLLM_3, True, 0.0),
        ("granite", GRANITE, True, 0.0),
        ("gemma", {}, False, 1.0),
    ],
)
def test_values_are_those_of_the_merged_model(
    tmp_path: Path, model_type: str, changes: dict[str, Any], is_interleaved: bool, added: float
) -> None:
    """For the families that transformers' reader does not know."""
    merged(tmp_path, model_type, **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    config = model.config
    found = read_by_hand(
        tmp_path / "model.gguf",
        config.num_attention_heads,
        config.num_key_value_heads,
        is_interleaved=is_interleaved,
        added=added,
    )
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.up_proj": "ffn_up",
        "mlp.gate_proj": "ffn_gate",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    wanted = {"token_embd.weight": model.model.embed_tokens.weight, "output_norm.weight": model.model.norm.weight}
    for block, layer in enumerate(model.model.layers):
        wanted |= {f"blk.{block}.{new}.weight": layer.get_submodule(old).weight for old, new in names.items()}
    if not config.tie_word_embeddings:
        wanted["output.weight"] = model.lm_head.weight
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values.detach().numpy(), rtol=1e-6, atol=1e-6)


class AnsweredHere:
    """A ``LineProcess`` that calls the module of its command in this process."""

    def __init__(self, _: str, command: list[str], log: Path) -> None:
        assert command[3:5] == ["edge.runtime", "answer_ends"] and log.parent.is_dir()
        self._arguments = command[5:]

    def __enter__(self) -> AnsweredHere:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def lines(self, *_: object) -> list[dict[str, Any]]:
        """Return what the module writes."""
        output = io.StringIO()
        assert answer_ends.main(self._arguments, output) == 0
        return [json.loads(line) for line in output.getvalue().splitlines()]


def test_lora_changes_each_matrix_as_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alpha over rank times B A; the outputs of query and key are in llama.cpp's order."""
    monkeypatch.setattr(export, "LineProcess", AnsweredHere)
    merged(tmp_path, "llama")
    export_run(tmp_path / "run", out := tmp_path / "out", form="gguf-lora")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    changed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    reader = gguf.GGUFReader(out / "lora.gguf")
    assert reader.fields["general.type"].contents() == "adapter"
    assert reader.fields["adapter.type"].contents() == "lora"
    alpha = reader.fields["adapter.lora.alpha"].contents()
    heads, kv_heads = base.config.num_attention_heads, base.config.num_key_value_heads
    found = read_by_hand(out / "lora.gguf", heads, kv_heads, is_interleaved=True, added=0.0)
    places = {
        "attn_q": "self_attn.q_proj",
        "attn_v": "self_attn.v_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    assert len(found) == 2 * 4 * len(places)
    for block in range(4):
        for new, old in places.items():
            down, up = (found[f"blk.{block}.{new}.weight.lora_{half}"] for half in "ab")
            before, after = (
                model.model.layers[block].get_submodule(old).weight.detach().numpy() for model in (base, changed)
            )
            np.testing.assert_allclose(alpha / len(down) * up @ down, after - before, rtol=1e-4, atol=1e-5)
    stops = ["<|im_start|>", "<|im_end|>"]  # token 3, which ends a text by config.json; and the end of an answer
    lines = [f'PARAMETER stop "{stop}"' for stop in stops]
    assert (out / "Modelfile").read_text().splitlines() == ["FROM ./base.gguf", "ADAPTER ./lora.gguf", *lines]


def test_facts_are_those_of_the_config(tmp_path: Path) -> None:
    """Sizes, the factors of Llama 3's positions, and a context that no window cuts."""
    write_family(tmp_path / "llama", "llama", with_decoder=True, rope_scaling=LLAMA_3)
    write_tokenizer(tmp_path / "llama")
    write_model(tmp_path / "llama", tmp_path / "llama.gguf", name="tiny")
    reader, config = gguf.GGUFReader(tmp_path / "llama.gguf"), read_config(tmp_path / "llama")
    factors = next(tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    made = transformers.AutoConfig.from_pretrained(tmp_path / "llama")
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(made)
    width = config["hidden_size"] // config["num_attention_heads"]
    plain = [config["rope_theta"] ** (-pair / width) for pair in range(0, width, 2)]
    np.testing.assert_allclose(
        [one / other for one, other in zip(plain, rotary.inv_freq, strict=True)], factors, rtol=1e-5
    )
    write_family(tmp_path / "mistral", "mistral", with_decoder=True, sliding_window=7)
    write_tokenizer(tmp_path / "mistral")
    write_model(tmp_path / "mistral", tmp_path / "mistral.gguf", name="tiny")
    fields = gguf.GGUFReader(tmp_path / "mistral.gguf").fields
    assert fields["general.architecture"].contents() == "llama"
    assert fields["llama.context_length"].contents() == 7
    assert fields["llama.block_count"].contents() == 4
    write_family(tmp_path / "granite", "granite", with_decoder=True, **GRANITE)
    write_tokenizer(tmp_path / "granite")
    write_model(tmp_path / "granite", tmp_path / "granite.gguf", name="tiny")
    fields = gguf.GGUFReader(tmp_path / "granite.gguf").fields
    names = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    assert [fields[f"granite.{name}"].contents() for name in names] == list(GRANITE.values())


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gpt2", {"activation_function": "relu"}, "llama.cpp has gelu_new there, the model relu"),
        ("gemma2", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar is 16"),
        ("gemma3_text", {**GEMMA_3, "rope_local_base_freq": 100.0}, "rope_local_base_freq is 100"),
        ("gemma3_text", {**GEMMA_3, "layer_types": ["full_attention"] * 4}, "in all layers but each 6th one"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "in every fourth layer"),
        ("qwen3", {"attention_bias": True}, "attention_bias adds vectors"),
        ("qwen2", {"rope_scaling": LLAMA_3}, "in Llama only, not in qwen2"),
        ("granite", {"rope_scaling": LLAMA_3}, "in Llama only, not in granite"),
        ("granite", {"residual_multiplier": 0.0}, "residual_multiplier is 0, which llama.cpp takes for none"),
        ("phi3", {}, "does not know llama.cpp's form of a phi3"),
    ],
)
def test_model_that_llama_cpp_computes_otherwise_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    """Each by what differs."""
    write_family(tmp_path, model_type, with_decoder=True, **changes)
    assert message in gguf_refusal(read_config(tmp_path))


def byte_level(*splits: Any, ignore_merges: bool = False, normalizer: Any = None) -> Tokenizer:
    """A byte-level tokenizer that splits a text so."""
    names = ["<s>", "</s>", "a", "b", "ab", "[x]"]
    vocabulary = {name: index for index, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b")], ignore_merges=ignore_merges))
    last = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=not any(isinstance(split, str) for split in splits)
    )
    steps = [pre_tokenizers.Split(Regex(split), "isolated") if isinstance(split, str) else split for split in splits]
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def of_pieces() -> Tokenizer:
    """A tokenizer as SentencePiece's: bytes for what has no token, and a space before the first word."""
    names = ["<unk>", "<s>", "</s>", "<0x61>", "\u2581", "a", "b", "ab", "\u2581ab", "rest"]
    vocabulary = {name: index for index, name in enumerate(names)}
    merges = [("a", "b"), ("\u2581", "ab")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token=names[0], byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return made


LATER = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


def tokenizer_fields(folder: Path, made: Tokenizer) -> dict[str, Any]:
    """What a GGUF file says of a tokenizer, by the last word of each key."""
    if not (folder / "config.json").is_file():
        write_family(folder, "llama", with_decoder=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)
    tokenizer.add_tokens(["own"])
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    write_model(folder, folder / "model.gguf", name="tiny")
    fields = gguf.GGUFReader(folder / "model.gguf").fields
    return {key.removeprefix("tokenizer."): field.contents() for key, field in fields.items() if "tokenizer." in key}


def test_byte_level_tokenizers_have_llama_cpps_name(tmp_path: Path) -> None:
    """Tokens by id, padded to the model's table; special, added and unused ones are told apart."""
    found = tokenizer_fields(tmp_path, byte_level())
    vocab = read_config(tmp_path)["vocab_size"]
    assert (found["ggml.model"], found["ggml.pre"], found["ggml.merges"]) == ("gpt2", "gpt-2", ["a b"])
    assert found["ggml.tokens"][:8] == ["<s>", "</s>", "a", "b", "ab", "[x]", "own", "[PAD7]"]
    assert len(found["ggml.tokens"]) == vocab
    kind = gguf.TokenType
    assert found["ggml.token_type"][:8] == [3, 3, 1, 1, 1, 1, int(kind.USER_DEFINED), int(kind.UNUSED)]
    assert (found["ggml.bos_token_id"], found["ggml.eos_token_id"]) == (0, 1)
    assert found["chat_template"] == "{{ messages }}"
    digits = pre_tokenizers.Digits(individual_digits=True)
    for made, name in (
        (byte_level(digits), "smollm"),
        (byte_level(LATER, ignore_merges=True), "llama-bpe"),
        (byte_level(LATER), "dbrx"),
        (byte_level(LATER.replace("{1,3}", ""), normalizer=normalizers.NFC()), "qwen2"),
    ):
        assert tokenizer_fields(tmp_path, made)["ggml.pre"] == name
    for odd, word in (
        (byte_level("x+"), "x+"),
        (byte_level(ignore_merges=True), "BPE"),
        (byte_level(normalizer=normalizers.Lowercase()), "Lowercase"),
        (Tokenizer(models.Unigram([("<s>", 0.0), ("</s>", 0.0), ("a", -1.0)], 0, True)), "Unigram"),
    ):
        with pytest.raises(UsageError, match=r"no tokenizer like .* use --format gguf-lora") as refused:
            tokenizer_fields(tmp_path, odd)
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("template", "named", "stops"),
    [
        (chat_models.LLAMA, None, ["</s>", "<|eot|>"]),
        (chat_models.MISTRAL, None, ["</s>"]),
        (chat_models.GEMMA, None, ["</s>", "<|end|>"]),
        (chat_models.QWEN_3, None, ["</s>", "<|im_end|>"]),
        (chat_models.GEMMA, "chatml", ["</s>", "<|im_end|>"]),
        (chat_models.GEMMA, "zephyr", ["</s>"]),
        (None, None, ["</s>"]),
    ],
)
def test_modelfile_stops_where_an_answer_ends(
    tmp_path: Path, template: str | None, named: str | None, stops: list[str]
) -> None:
    """At each end of a text of ``generation_config.json``, and at that of a turn by the template of model or job."""
    folder, job = (
        chat_models.write_tokenizer(tmp_path, template),
        Job.from_tables({"model": {"path": "m", "task": CHAT if named else CAUSAL_LM}, "data": {"train": "t"}}),
    )
    job = job.with_overrides({} if named is None else {"data.template": named})
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    assert stop_texts(job, folder) == stops
    lines = [f'PARAMETER stop "{stop}"' for stop in stops]
    assert modelfile("./a.gguf", stops=stops).splitlines() == ["FROM ./a.gguf", *lines]
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert set(stop_texts(job, folder)) == {*stops, "<|eot|>"}


def test_pieces_are_scored_by_the_merge_that_makes_them(tmp_path: Path) -> None:
    """An earlier merge has the higher score; bytes and the unknown token are told."""
    found = tokenizer_fields(tmp_path, of_pieces())
    assert found["ggml.model"] == "llama" and found["ggml.add_space_prefix"] is True
    scores = dict(zip(found["ggml.tokens"], found["ggml.scores"], strict=True))
    assert scores["ab"] == 0 and scores["\u2581ab"] == -1 and scores["rest"] == -2
    kinds = dict(zip(found["ggml.tokens"], found["ggml.token_type"], strict=True))
    assert [kinds[text] for text in ("<unk>", "<s>", "<0x61>", "a", "own")] == [2, 3, 6, 1, 4]


def test_command_writes_a_model_for_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three files with their digests; a card that says how it runs; the template that it learned; nothing else."""
    merging = SimpleNamespace(**vars(subprocess) | {"run": calling(merge)})
    monkeypatch.setattr("coordinator.client.saved_run.subprocess", merging)
    monkeypatch.setattr(export, "LineProcess", AnsweredHere)
    run, _ = lora_run(tmp_path, "llama", CAUSAL_LM, ALL_MATRICES)
    write_tokenizer(tmp_path / "base", "{{ messages }}")
    job = load_job(run / "job.toml").with_overrides({"model.task": CHAT, "data.template": "zephyr"})
    (run / "job.toml").write_text(job.to_toml())
    (tmp_path / "merged").mkdir()
    merge_run(run, tmp_path / "merged", model=None)
    contents, _ = model_contents(read_run(run), "acme/tiny", saved=tmp_path / "merged")
    write_tokenizer(tmp_path / "merged", bos=True)
    begun, _ = model_contents(read_run(run), "acme/tiny", saved=tmp_path / "merged")
    shutil.rmtree(tmp_path / "merged")
    out = tmp_path / "out"
    shown = CliRunner().invoke(cli.app, ["export", str(run), "--out", str(out), "--format", "gguf"])
    assert shown.exit_code == 0, shown.output
    assert sorted(path.name for path in out.iterdir()) == ["Modelfile", "README.md", "model.gguf"]
    assert "llama.cpp or Ollama" in shown.stdout.splitlines()[-1]
    assert (
        out / "Modelfile"
    ).read_text() == 'FROM ./model.gguf\nPARAMETER stop "<|im_start|>"\nPARAMETER stop "</s>"\n'
    template = gguf.GGUFReader(out / "model.gguf").fields["tokenizer.chat_template"].contents()
    assert "<|assistant|>" in template and "bos_token" not in template
    assert bytes(contents["chat_template.jinja"]).decode() == template
    assert bytes(begun["chat_template.jinja"]).decode() == TEMPLATES["zephyr"]
    card = (out / "README.md").read_text()
    assert "llama-cli -m model.gguf" in card and "library_name: gguf" in card
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in out.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "run"]


def test_missing_package_and_tokenizer_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it; and the file that is missing."""
    run, _ = lora_run(tmp_path, "llama", CAUSAL_LM, ALL_MATRICES)
    (tmp_path / "base/tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"has no tokenizer\.json, which GGUF needs"):
        write_model(tmp_path / "base", tmp_path / "model.gguf", name="tiny")
    monkeypatch.setattr(export, "merge_into", lambda *given, **more: pytest.fail("merged before it is refused"))
    with pytest.raises(UsageError, match=r"has no tokenizer\.json, which GGUF needs"):
        export_run(run, tmp_path / "out", form="gguf")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(UsageError, match=r"package 'gguf', .* in a checkout pip install '\.\[gguf\]'"):
        write_model(tmp_path / "base", tmp_path / "model.gguf", name="tiny")
    with pytest.raises(UsageError, match=r"package 'gguf', .* in a checkout pip install '\.\[gguf\]'"):
        export_run(run, tmp_path / "out", form="gguf-lora")
    assert not (tmp_path / "out").exists()
