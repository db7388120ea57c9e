"""Texts to continue: rows, blocks of a plain text, targets, and a decoder that never travels."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from edge.data import prompts
from edge.data.dataset import OwnerDataset, RowsDigest
from edge.data.examples import TextExamples
from edge.data.prompts import PackedPrompts, PromptReader
from edge.data.texts import Language
from edge.data.tokens import IGNORED
from edge.runtime.executor import NodeExecutor
from ringtune.errors import ModelError
from ringtune.job.job import parse_job
from tests.support import chat_models, tiny
from tests.support import hand_ring as ring
from tests.support.tiny_families import write_family

LENGTH = 16


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model whose tokenizer pads on the left, where no batch is padded."""
    folder = tmp_path_factory.mktemp("model")
    return write_family(folder, "llama", num_blocks=2, padding_side="left", with_decoder=True)


def read(model_folder: Path, path: Path) -> TextExamples:
    """Everything that a file has."""
    source = Language(ring.make_job(model_folder, model__task="causal-lm", train__max_length=LENGTH), model_folder)
    return source.examples(source.read(path).rows, ())


def test_language_blocks_are_the_text(model_folder: Path, tmp_path: Path) -> None:
    """A plain text is cut every max_length tokens; nothing is lost, whatever the line breaks."""
    text = "\n".join(" ".join(tiny.words()[start : start + 7]) for start in range(0, 170, 7))
    path = tmp_path / "text.txt"
    path.write_text(text)
    examples = read(model_folder, path)
    batch = examples.batch(range(len(examples)), {})
    words = [tiny.vocabulary()[int(token)] for token in batch.ids[batch.mask == 1]]
    assert words == text.split()
    assert batch.mask.sum(-1).tolist()[:-1] == [LENGTH] * (len(examples) - 1)


def test_language_blocks_do_not_depend_on_pieces(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long text is encoded piece by piece, lines kept whole."""
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(tiny.words()[start : start + 5]) for start in range(0, 150, 5)))
    whole = read(model_folder, path)
    monkeypatch.setattr("edge.data.texts._PIECE_CHARACTERS", 60)
    pieces = read(model_folder, path)
    assert torch.equal(whole.batch(range(9), {}).ids, pieces.batch(range(9), {}).ids)


def test_prompts_of_a_share_are_kept_packed(model_folder: Path, tmp_path: Path) -> None:
    """They are those of the file in its order, with any columns, and rows are their newest tokens; in little memory."""
    rows = [{"text": " ".join(tiny.words()[: at % 30 + 1]), "answer": ["no", "ü\ud83d"], "n": at} for at in range(301)]
    rows[200] = {"text": "w1", "m": None}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job = ring.make_job(model_folder, model__task="causal-lm", train__max_length=LENGTH, generation__loss=False)
    every = list(PromptReader(job, model_folder).all(tmp_path / "rows.jsonl"))
    assert [dict(prompt.row) for prompt in every] == rows
    found = OwnerDataset.load(job, tmp_path / "rows.jsonl", None, share=1, num_owners=2, tokenizer_folder=model_folder)
    assert list(found.prompts) == every[150:]
    batch = found._train.batch(range(len(found.prompts)), {})
    assert [row[row != 0].tolist() for row in batch.ids] == [list(prompt.ids[-LENGTH:]) for prompt in every[150:]]
    digest = RowsDigest()
    digest.add(tuple(prompt.ids) for prompt in every[150:])
    assert found.digest("run") == digest.keyed("run")
    tracemalloc.start()
    packed = PackedPrompts(prompt._replace(ids=list(prompt.ids), row=dict(prompt.row)) for prompt in every)
    of_here = [tracemalloc.Filter(True, name) for name in (__file__, prompts.__file__)]  # and of no other thread
    used = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(of_here).traces)
    tracemalloc.stop()
    content = sum(4 * len(prompt.ids) + len(json.dumps(prompt[1:])) + 16 for prompt in every)
    assert len(packed) == len(every) and used < 1.6 * content


def test_language_rows_end_with_the_token_of_the_end(tmp_path: Path) -> None:
    """It is a target, once, also where it pads; a row that is cut has none, and jobs of before have none.

    The first token of a row is no target: packed rows follow another one.
    """
    folder = chat_models.write_tokenizer(tmp_path / "m", pad="</s>", bos=True)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("yes", "no no", "abcdefghi", "no</s>")))
    batches = {}
    for append in (True, False, None):
        data = "" if append is None else f"[data]\nappend_eos = {str(append).lower()}\n"
        text = f'[model]\npath = "{folder}"\ntask = "causal-lm"\n{data}[train]\nmax_length = 10\n'
        source = Language(parse_job(text, source="test"), folder)
        rows = source.read(path)
        assert bool(rows.notes) is (append is True)
        examples = source.examples(rows.rows, ())
        batches[append] = examples.batch(range(4), {})
        assert examples.cut_rows == (append is True)  # nine letters and the begin token leave no room
    with_end, without = batches[True], batches[None]
    assert torch.equal(without.ids, batches[False].ids)
    assert set(with_end.labels[:, 0].tolist()) == {IGNORED}
    assert with_end.mask.sum(-1).tolist() == [3, 7, 10, 4]
    assert without.mask.sum(-1).tolist() == [2, 6, 10, 4]
    assert (with_end.labels == 2).sum(-1).tolist() == [1, 1, 0, 1]
    (tmp_path / "text.txt").write_text("yes no")
    source = Language(parse_job(text, source="test").with_overrides({"data.append_eos": True}), folder)
    assert 2 not in source.examples(source.read(tmp_path / "text.txt").rows, ()).batch([0], {}).ids


def _owner(folder: Path, tmp_path: Path, **overrides: object) -> NodeExecutor:
    job = ring.make_job(folder, model__task="causal-lm", **overrides)
    datasets = ring.make_datasets(job, folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, {"a": (0, 1), "b": (1, 2)}, num_blocks=2, labels=())
    return NodeExecutor(plan, "a", job, folder, datasets["a"])


@pytest.mark.parametrize("tied", [True, False])
def test_language_decoder_is_no_part_of_what_trains(tmp_path: Path, tied: bool) -> None:
    """It is frozen and everywhere already: neither handed over nor saved, tied or not.

    Hosted bytes hold the token table, and a decoder only where it is another tensor.
    """
    folder = write_family(tmp_path / "model", "llama", num_blocks=2, with_decoder=True, tie_word_embeddings=tied)
    owner = _owner(folder, tmp_path)
    assert load(bytes(owner.head_blob())) == {}
    owner.load_head_blob(owner.head_blob())
    assert sorted(owner.adapter_files(with_head=True)) == ["adapter.safetensors", "adapter_config.json"]
    assert load(bytes(owner.shard({}, with_head=True))).keys() >= {"head"}
    stored = ("model.embed_tokens.weight", "lm_head.weight")[not tied]
    output = owner._hosted.skeleton.model.head.get_output_embeddings()
    assert output is not None
    decoder = output.weight
    want = load((folder / "model.safetensors").read_bytes())[stored]
    assert torch.equal(decoder.float().cpu(), want)
    assert not decoder.requires_grad
    assert (decoder is owner._hosted.skeleton.base.embed_tokens.weight) is tied
    table = len(tiny.vocabulary()) * 32 * 8
    classifier = ring.make_job(folder)
    datasets = ring.make_datasets(classifier, folder, tmp_path, ("a",))
    plan = ring.make_plan(classifier, datasets, {"a": (0, 1), "b": (1, 2)}, num_blocks=2)
    without = NodeExecutor(plan, "a", classifier, folder, datasets["a"])
    head = sum(value.nbytes for value in without._hosted.skeleton.model.heads.parameters())
    assert owner.hosted_bytes - (without.hosted_bytes - head) == (0 if tied else table)


def test_language_needs_a_decoder(tmp_path: Path) -> None:
    """A base model without one, and a family that has none."""
    folder = write_family(tmp_path / "base", "llama", num_blocks=2, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"no tensor lm_head\.weight"):
        _owner(folder, tmp_path)
    folder = write_family(tmp_path / "bert", "bert", num_blocks=2)
    with pytest.raises(ModelError, match=r"no head for model\.task = 'causal-lm'.*gpt2, llama, mistral"):
        _owner(folder, tmp_path)
