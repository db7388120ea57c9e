"""A text that goes on: the likeliest token or a draw, where it ends, and that it is the library's text."""

from __future__ import annotations

import io
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edge.data.tokens import load_tokenizer
from edge.runtime import inference
from edge.runtime.inference import (
    Sampling,
    WholeModel,
    ends_of_text,
    main,
    model_sampling,
    next_tokens,
    shares_of,
    unused_settings,
)
from ringtune.errors import ModelError
from ringtune.job.job import load_job
from tests.support import chat_models
from tests.support.tiny_families import DECODERS, write_family

JOB = """
[model]
path = "{model}"
task = "causal-lm"
[train]
method = "hift"
batch_size = 2
microbatches = 1
"""


def one_more(ids: Sequence[int]) -> torch.Tensor:
    """The likeliest token is the last one and one more; one of the others is nearly as likely."""
    logits = torch.full((10,), -50.0)
    logits[(ids[-1] + 1) % 10], logits[0] = 2.0, 1.0
    return logits


def tokens_of(ids: Sequence[int], next_logits: inference.NextLogits, how: Sampling, **limits: Any) -> list[int]:
    """All next tokens."""
    return list(next_tokens(ids, next_logits, how, **limits))


def test_generating_takes_the_likeliest_token_until_a_text_ends() -> None:
    """Greedy: 3 goes on with 4, 5, and 6 ends it; or the number of tokens does.

    The model never sees more tokens than it takes, and always the newest.
    """
    how = Sampling(max_new_tokens=5)
    assert tokens_of([3], one_more, how, ends=(6,), longest=9) == [4, 5]
    assert tokens_of([3], one_more, how, ends=(), longest=9) == [4, 5, 6, 7, 8]
    seen: list[list[int]] = []

    def look(ids: Sequence[int]) -> torch.Tensor:
        seen.append(list(ids))
        return one_more(ids)

    tokens_of([1, 2, 3, 4], look, Sampling(max_new_tokens=2), ends=(), longest=3)
    assert seen == [[2, 3, 4], [3, 4, 5]]


def test_generating_draws_by_seed_and_row() -> None:
    """The same seed and row draw the same, others draw others; draws are not all the likeliest."""
    warm = Sampling(max_new_tokens=40, temperature=1.0, seed=3)
    first, again = (tokens_of([3], one_more, warm, ends=(), longest=9, row=1) for _ in range(2))
    assert first == again
    assert first != tokens_of([3], one_more, warm, ends=(), longest=9, row=2)
    assert first != tokens_of([3], one_more, warm._replace(seed=4), ends=(), longest=9, row=1)
    assert first != tokens_of([3], one_more, warm._replace(temperature=0.0), ends=(), longest=9)


def test_draws_are_limited_as_the_library_limits_them() -> None:
    """To the likeliest tokens, by number and by probability together; at least one stays, at any temperature."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(1, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for temperature, top_k, top_p in ((0.7, 5, 1.0), (1.0, 40, 0.8), (2.0, 12, 0.6), (0.5, 1, 0.01)):
        wanted = TemperatureLogitsWarper(temperature)(None, logits)
        wanted = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, wanted)).softmax(-1)[0]
        torch.testing.assert_close(shares_of(logits[0], temperature, top_k, top_p), wanted)
    coldest = shares_of(logits[0], 1e-300, 0, 1.0)
    assert coldest.argmax() == logits.argmax() and float(coldest.max()) == 1.0


def test_model_says_how_its_tokens_are_drawn(tmp_path: Path) -> None:
    """Temperature where it asks for draws; numbers out of range are refused with their file."""
    path = tmp_path / "generation_config.json"
    assert model_sampling(tmp_path) == Sampling()
    path.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95}')
    assert model_sampling(tmp_path) == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    path.write_text('{"temperature": 0.6, "top_p": null}')
    assert model_sampling(tmp_path) == Sampling()
    for wrong in ('{"top_p": 2}', '{"top_k": 1.5}', '{"temperature": "hot"}', '{"top_k": -1}', '{"top_p": NaN}'):
        path.write_text(wrong)
        with pytest.raises(ModelError, match=r"generation_config.json: (top_|temp)"):
            model_sampling(tmp_path)


@pytest.mark.parametrize("model_type", DECODERS)
@pytest.mark.sampled(1)
def test_predicting_goes_on_as_the_library_does(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy text of a whole trained model, beside ``generate`` of the plain library on the same weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_family(tmp_path / "base", model_type, num_blocks=2, seed=0, with_decoder=True)
    trained = write_family(tmp_path / "trained", model_type, num_blocks=2, seed=1, with_decoder=True)
    (tmp_path / "job.toml").write_text(JOB.format(model=tmp_path / "base"), encoding="utf-8")
    texts = ["w1 w2 w3", "w40", "w7 w7 w8 w9 w10"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    words = [str(tmp_path / "job.toml"), str(trained), str(tmp_path / "rows.jsonl"), "--max-new-tokens", "6"]
    assert main(words, sys.stdout) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["row"] for line in lines] == [{"text": text} for text in texts]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(str(trained), attn_implementation="eager").eval(),
        AutoTokenizer.from_pretrained(trained),
    )
    for text, line in zip(texts, lines, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        wanted = model.generate(
            ids, max_new_tokens=6, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids)
        )
        added = tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)
        assert line["predicted"]["predicted"].split() == added.split()
        assert line["predicted"]["tokens"] <= 6


def test_answers_end_where_the_template_ends_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversation goes on behind its prompt in the template, up to the text that ends it: one token, or two."""
    folder = write_family(tmp_path / "base", "llama", num_blocks=2, with_decoder=True)
    chat_models.write_tokenizer(folder, chat_models.MISTRAL)
    (tmp_path / "job.toml").write_text(JOB.format(model=folder).replace("causal-lm", "chat"), encoding="utf-8")
    rows = [{"messages": row[:2]} for row in chat_models.conversations(12)]
    chat_models.write_conversations(tmp_path / "rows.jsonl", rows)
    words = [str(tmp_path / "job.toml"), str(folder), str(tmp_path / "rows.jsonl"), "--max-new-tokens", "6"]

    def answered() -> list[str]:
        assert main(words, sys.stdout) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["row"] for line in lines] == rows
        return [line["predicted"]["predicted"] for line in lines]

    tokenizer, whole = load_tokenizer(folder), WholeModel(load_job(tmp_path / "job.toml"), folder, ())
    prompts = [tokenizer.apply_chat_template(row["messages"][:-1], return_dict=False) for row in rows]
    greedy = Sampling(max_new_tokens=6)
    added = [tokens_of(ids, whole.next_logits, greedy, ends=(3,), longest=64) for ids in prompts]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in added]
    assert answered() == texts and any(len(text) > 3 for text in texts)
    longest = max(texts, key=len)
    for end in (longest[2], longest[2:4]):
        chat_models.write_tokenizer(folder, chat_models.MISTRAL.replace("eos_token", repr(end)))
        assert answered() == [text.partition(end)[0] for text in texts]


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2"])
def test_whole_model_gives_the_logits_of_the_library(model_type: str, tmp_path: Path) -> None:
    """Also where the model caps them, on which draws depend; after any other text, and then with the same bits."""
    from transformers import AutoModelForCausalLM

    folder = write_family(tmp_path / "base", model_type, seed=1, with_decoder=True)
    if model_type == "gemma2":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 0.05}))
    (tmp_path / "job.toml").write_text(JOB.format(model=folder), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager").eval()
    ids = [5, 9, 7, 7, 11]
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0, -1]
    whole = WholeModel(load_job(tmp_path / "job.toml"), folder, ())
    found = whole.next_logits(ids)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for other in (ids, ids[:3], [*ids, 12], [4]):
        whole.next_logits(other)
        torch.testing.assert_close(whole.next_logits(ids), wanted, rtol=1e-5, atol=1e-5)
        whole.forget()
        assert torch.equal(whole.next_logits(ids), found)


@pytest.mark.parametrize("adapter", ["lora", "seq_bn[use_gating=True]"])
def test_tokens_one_by_one_have_the_logits_of_the_whole_text(
    adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an adapter computes a token by those beside it: then no keys and values are kept."""

    def draw(skeleton: Any, *_: object, **__: object) -> None:
        with torch.no_grad():
            for name, value in skeleton.model.named_parameters():
                if ".ringtune." in name:
                    torch.manual_seed(zlib.crc32(name.encode()))
                    value.normal_(std=0.3)

    monkeypatch.setattr(inference, "load_saved", draw)
    folder = write_family(tmp_path / "base", "llama", num_blocks=2, with_decoder=True)
    job = JOB.replace('method = "hift"\n', "").format(model=folder) + f'[adapter]\nconfig = "{adapter}"\n'
    (tmp_path / "job.toml").write_text(job, encoding="utf-8")
    model, ids = WholeModel(load_job(tmp_path / "job.toml"), folder, ()), [5, 9, 7, 7, 11]
    found = [model.next_logits(ids[:count]) for count in range(1, 6)]
    for count, logits in enumerate(found, start=1):
        model.next_logits([6])  # nothing is in common with it
        torch.testing.assert_close(logits, model.next_logits(ids[:count]), rtol=1e-4, atol=1e-5)


def test_text_ends_where_generate_of_the_library_ends_it(tmp_path: Path) -> None:
    """By ``generation_config.json``, else by ``config.json``, else by the tokenizer."""
    from transformers import GenerationConfig

    folder = write_family(tmp_path, "llama", num_blocks=1, with_decoder=True)
    tokenizer, path = load_tokenizer(folder), folder / "generation_config.json"
    for ends in ({"eos_token_id": [7, 9]}, {"eos_token_id": 7}, {}):
        path.write_text(json.dumps(ends))
        wanted = GenerationConfig.from_pretrained(str(folder)).eos_token_id or 3  # of the tiny model's config.json
        assert ends_of_text(folder, tokenizer) == tuple(wanted if isinstance(wanted, list) else [wanted]), ends
    path.write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ModelError, match="eos_token_id is '</s>'"):
        ends_of_text(folder, tokenizer)
    for name in ("generation_config.json", "config.json"):
        (folder / name).unlink()
    assert ends_of_text(folder, SimpleNamespace(eos_token_id=5)) == (5,)
    assert ends_of_text(folder, SimpleNamespace(eos_token_id=None)) == ()


_CHOOSING = {
    **dict.fromkeys(("temperature", "typical_p", "epsilon_cutoff", "eta_cutoff", "min_p"), 0.5),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "diversity_penalty"), 1.5),
    **dict.fromkeys(("num_beams", "no_repeat_ngram_size", "max_length", "min_length", "max_new_tokens"), 7),
    **dict.fromkeys(("do_sample", "early_stopping", "renormalize_logits", "remove_invalid_values"), True),
    **{key: [5] for key in ("suppress_tokens", "begin_suppress_tokens", "stop_strings", "of_some_later_version")},
}
"""Key of ``generation_config.json`` that chooses tokens -> a value that is not the library's default."""


def test_settings_of_a_model_that_choose_tokens_are_told_if_they_are_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each alone by its name; the library's own values of all its keys say nothing, and nothing is said twice."""
    from transformers import GenerationConfig

    folder = write_family(tmp_path / "base", "gpt2", num_blocks=1, with_decoder=True)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(GenerationConfig(eos_token_id=[7], pad_token_id=0).to_dict()))
    assert unused_settings(folder) == ""
    for key, value in _CHOOSING.items():
        path.write_text(json.dumps({"eos_token_id": 7, "use_cache": False, key: value}))
        assert f"has {key} = {value!r}, not used here: --temperature" in unused_settings(folder)
    (tmp_path / "job.toml").write_text(JOB.format(model=folder), encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"text": "w1"}\n' * 3, encoding="utf-8")
    words, output = [str(tmp_path / "job.toml"), str(folder), str(tmp_path / "rows.jsonl")], io.StringIO()
    assert main([*words, "--max-new-tokens", "1"], output) == 0 and not capsys.readouterr().out
    lines = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [list(line) for line in lines] == [["told"], *[["row", "predicted"]] * 3]
    path.unlink()  # the library then takes them from config.json
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"temperature": 0.5}))
    assert unused_settings(folder).startswith("config.json of the model has temperature = 0.5, not")


def test_predicting_says_what_it_can_not_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the column, and the exit code of wrong data."""
    base = write_family(tmp_path / "base", "gpt2", with_decoder=True)
    (tmp_path / "job.toml").write_text(JOB.format(model=base), encoding="utf-8")
    (tmp_path / "rows.csv").write_text("words\nw1\n", encoding="utf-8")
    assert main([str(tmp_path / "job.toml"), str(base), str(tmp_path / "rows.csv")], sys.stdout) == 5
    told = capsys.readouterr().err
    assert "no column 'text'; it has the columns 'words'; set data.text" in told, "the rows are those of who predicts"


@pytest.mark.parametrize("task", ["causal-lm", "sequence-classification", "token-classification"])
def test_rows_that_are_cut_are_counted_over_all_batches(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three rows are longer than 8 tokens, one in each batch; a note says so behind the predictions."""
    folder = write_family(tmp_path / "base", "gpt2", num_blocks=1, with_decoder=True)
    labels = "" if task == "causal-lm" else '[data]\nlabels = ["x", "y"]\n'
    keys = JOB.format(model=folder).replace("causal-lm", task) + "max_length = 8\n" + labels
    (tmp_path / "job.toml").write_text(keys, encoding="utf-8")
    is_words, texts = task == "token-classification", ["w1 " * count for count in (12, 2, 9)]
    given = [{"words": text.split()} if is_words else {"text": text.strip()} for text in texts]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
    model = SimpleNamespace(
        longest=8,
        forget=lambda: None,
        next_logits=lambda ids: torch.eye(8)[5],
        predict=lambda batch: torch.zeros((*batch.ids.shape[: 1 + is_words], 2)),
    )
    monkeypatch.setattr(inference, "WholeModel", lambda *_: model)
    output = io.StringIO()
    words = [str(tmp_path / "job.toml"), str(folder), str(rows), "--max-new-tokens", "1"]
    assert main(words, output) == 0
    lines = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [line["row"] for line in lines[:-1]] == given
    assert lines[-1] == {"told": "2 of 3 rows are longer than a row may be and were cut"}
