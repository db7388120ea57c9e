"""Tags at the first token of each word, words that are cut, and counts that leave an owner of enough texts only."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from edge.data.dataset import OwnerDataset
from edge.data.examples import TextExamples, Values
from edge.data.tagged import TaggedTexts
from edge.data.tokens import IGNORED, NoTokenError
from ringtune.errors import DataError
from tests.support import hand_ring as ring
from tests.support import tiny
from tests.support.tiny_data import TAGS, make_tagged, write_tagged
from tests.support.tiny_families import write_family

LENGTH = 16
TARGETS = {name: index for index, name in enumerate(TAGS)}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer pads on the left, where no batch is padded."""
    return write_family(tmp_path_factory.mktemp("model"), "bert", num_blocks=2, padding_side="left")


def source_of(folder: Path, max_length: int = LENGTH) -> TaggedTexts:
    """How a job of token classification reads."""
    return TaggedTexts(ring.make_job(folder, model__task="token-classification", train__max_length=max_length), folder)


def examples_of(folder: Path, words: list[str], tags: list[str], max_length: int = LENGTH) -> TextExamples:
    """One text as an example."""
    return source_of(folder, max_length).examples([tuple(words)], [tuple(tags)])


def test_tags_stand_at_the_first_token_of_their_word(model_folder: Path) -> None:
    """Neither a second token of a word, nor padding, nor a special token has a target."""
    rows = make_tagged(12, seed=1)
    examples = source_of(model_folder, 64).examples(
        [tuple(row["words"]) for row in rows], [tuple(row["tags"]) for row in rows]
    )
    batch = examples.batch(range(12), TARGETS)
    for row, ids, labels in zip(rows, batch.ids, batch.labels, strict=True):
        places = labels != IGNORED
        firsts = [tiny.vocabulary()[int(token)] for token in ids[places]]
        assert firsts == [word.removesuffix("s") for word in row["words"]]
        assert [TAGS[index] for index in labels[places].tolist()] == row["tags"]
    assert int((batch.labels != IGNORED).sum()) < int(batch.mask.sum()) - 24


def test_words_beyond_the_longest_row_are_left_out_and_counted(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of ten words of two tokens, seven begin within 16 tokens with two special ones."""
    with caplog.at_level(logging.WARNING):
        examples = examples_of(model_folder, ["w1s"] * 10, ["O"] * 10)
    assert examples.cut_rows == 1 and examples.width([0]) == LENGTH
    assert int((examples.batch([0], TARGETS).labels != IGNORED).sum()) == 7
    assert "3 of 10 words are left out: they are beyond train.max_length = 16 tokens" in caplog.text


def test_words_without_a_token_are_refused_where_nothing_is_left(model_folder: Path) -> None:
    """A control character is no token; beside other words it is one more that is left out."""
    beside = examples_of(model_folder, ["\x01", "w1"], ["O", "O"])
    batch = beside.batch([0], TARGETS)
    assert beside.scores is not None and beside.scores.add(batch, batch.labels, 0) == (("cut_words", 1.0),)
    with pytest.raises(NoTokenError, match="a text of 1 words has no token"):
        examples_of(model_folder, ["\x01"], ["O"])


def scored(folder: Path, num_rows: int, *, off: int = 0) -> list[Values]:
    """Score all texts in batches of 4; the prediction is the tag itself, or one that is some further."""
    rows = make_tagged(num_rows, seed=2)
    examples = source_of(folder, 64).examples(
        [tuple(row["words"]) for row in rows], [tuple(row["tags"]) for row in rows]
    )
    found, scores = [], examples.scores
    assert scores is not None
    for first in range(0, num_rows, 4):
        batch = examples.batch(range(first, min(first + 4, num_rows)), TARGETS)
        found.append(scores.add(batch, (batch.labels.clamp(min=0) + off) % len(TAGS), 0))
    return found


def test_counts_of_tags_and_entities_come_with_the_last_text(model_folder: Path) -> None:
    """Before it nothing is told; right predictions are right entities."""
    rows = make_tagged(12, seed=2)
    *before, last = scored(model_folder, 12)
    assert before == [(), ()]
    values, tags = dict(last), [tag for row in rows for tag in row["tags"]]
    for index, name in enumerate(TAGS):
        assert values[f"class:{index}:{index}"] == tags.count(name)
    entities = float(tags.count("B-ODD"))
    assert [values[f"entity:0:{kind}"] for kind in ("true", "predicted", "right")] == [entities] * 3
    assert values["cut_words"] == 0.0
    other = dict(scored(model_folder, 12, off=1)[-1])
    assert other["entity:0:true"] == entities and other.get("entity:0:right", 0.0) < entities


def test_counts_of_few_texts_stay_with_their_owner(model_folder: Path) -> None:
    """The count of a single text would be its tags."""
    assert scored(model_folder, 9)[-1] == (("cut_words", 0.0),)


def test_dataset_knows_the_names_of_its_tags(model_folder: Path, tmp_path: Path) -> None:
    """Those of training and evaluation apart, each once; a tag outside those of the run is refused."""
    job = ring.make_job(model_folder, model__task="token-classification", train__max_length=LENGTH)
    train, evaluation = write_tagged(tmp_path / "train.jsonl", 9, seed=1), tmp_path / "eval.conll"
    evaluation.write_text("w1 NEW\nw2 O\n")
    data = OwnerDataset.load(job, train, evaluation, tokenizer_folder=model_folder)
    assert (data.labels, data.eval_labels) == (TAGS, ("NEW", "O"))
    with pytest.raises(DataError, match="'NEW', the run has B-ODD, I-ODD, O; add"):
        data.set_labels(TAGS)


def test_users_of_tagged_texts_are_a_column(model_folder: Path, tmp_path: Path) -> None:
    """JSON lines have one; a CoNLL file has no columns by name."""
    job = ring.make_job(
        model_folder, model__task="token-classification", offload__mode="auto", offload__users="alone", data__user="who"
    )
    path = tmp_path / "rows.jsonl"
    rows = [{**row, "who": f"u{at % 2}"} for at, row in enumerate(make_tagged(5, seed=1))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = TaggedTexts(job, model_folder)
    assert source.read(path).users == ("u0", "u1", "u0", "u1", "u0")
    (tmp_path / "rows.conll").write_text("w1 O\n")
    with pytest.raises(DataError, match=r"without columns, so data\.user = 'who' can't say whose a row is"):
        source.read(tmp_path / "rows.conll")


@pytest.mark.parametrize(
    ("kind", "in_sequence"),
    [
        ("GPT2TokenizerFast", False),
        ("RobertaTokenizerFast", False),
        ("DebertaTokenizer", False),
        ("PreTrainedTokenizerFast", False),
        ("GPT2TokenizerFast", True),
        ("PreTrainedTokenizerFast", True),
    ],
)
def test_words_of_a_tokenizer_that_joins_blanks_have_one_before_each(
    tmp_path: Path, kind: str, in_sequence: bool
) -> None:
    """GPT-2, RoBERTa, DeBERTa and ModernBERT write a word within a text with the blank before it.

    So is each word that comes alone; also where the text is divided in another way first.
    """
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    write_family(tmp_path, "gpt2", num_blocks=1)
    trained = ByteLevelBPETokenizer()
    specials = ["<s>", "</s>", "<pad>", "<unk>", "<mask>"]
    trained.train_from_iterator([" ".join(tiny.words())] * 3, vocab_size=400, special_tokens=specials)
    (tmp_path / "vocab.txt").unlink()
    trained.save_model(str(tmp_path))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).unlink(missing_ok=True)  # of the other tokenizer
    made_as = kind if kind.startswith(("GPT2", "Roberta")) else "GPT2TokenizerFast"
    tokenizer = getattr(transformers, made_as).from_pretrained(str(tmp_path), model_max_length=64)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path)
    if made_as != kind:
        settings = tmp_path / "tokenizer_config.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "tokenizer_class": kind}))
    if in_sequence:
        path = tmp_path / "tokenizer.json"
        whole = json.loads(path.read_text())
        first = {"type": "Digits", "individual_digits": True}
        whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [first, whole["pre_tokenizer"]]}
        path.write_text(json.dumps(whole))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    row = source_of(tmp_path, 64).encode(["w11", "w12"])
    plain = tokenizer(" w11 w12", add_special_tokens=False)["input_ids"]
    specials_before = 1 if kind.startswith("Roberta") else 0
    assert list(row.tokens.ids)[specials_before : specials_before + len(plain)] == plain
    assert list(row.words) == [0, 1] and torch.tensor(row.starts).diff().tolist() == [len(plain) // 2]
