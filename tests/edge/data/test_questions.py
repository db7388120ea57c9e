"""Questions: windows, targets, rows that can't be used, and scores by SQuAD's rules."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.data.dataset import OwnerDataset
from edge.data.examples import TextExamples
from edge.data.questions import LONGEST_ANSWER, AnswerScores, Questions, best_span, exact_match, f1, normalised
from edge.data.tokens import Batch
from ringtune.errors import DataError, ModelError
from ringtune.job.job import Job
from ringtune.schedule.turns import Item, StepKind
from tests.support import hand_ring as ring
from tests.support import tiny
from tests.support.tiny_data import make_questions, write_questions
from tests.support.tiny_families import write_family


def test_squad_scores_by_hand() -> None:
    """Case, punctuation, articles and spaces don't count; the best of several answers does."""
    for predicted, answers, exact, overlap in (
        ("The  Eiffel Tower!", ["eiffel tower"], 1.0, 1.0),
        ("a cat", ["the cat."], 1.0, 1.0),
        ("in Paris, France", ["Paris"], 0.0, 0.5),
        ("Paris France", ["Rome", "Paris in France"], 0.0, 0.8),
        ("yes yes no", ["yes no no"], 0.0, 2 / 3),
        ("", ["Paris"], 0.0, 0.0),
        ("the", ["Paris"], 0.0, 0.0),
        ("1,000", ["1000"], 1.0, 1.0),
        ("anteater", ["eater"], 0.0, 0.0),
    ):
        assert exact_match(predicted, answers) == exact, predicted
        assert f1(predicted, answers) == pytest.approx(overlap), predicted
    # as in the official script punctuation goes first, then articles, which are whole words
    assert normalised("An a-b theory, The END") == "ab theory end"


def test_best_span_ends_after_it_begins_and_is_short() -> None:
    """Large logits alone are not enough; of equal spans the first one is taken."""
    logits = torch.zeros(50, 2)
    logits[40, 0], logits[3, 1] = 5.0, 5.0
    score, first, last = best_span(logits)
    assert (score, first, last) == (5.0, 0, 3)
    logits[0, 0], logits[LONGEST_ANSWER - 1, 1], logits[LONGEST_ANSWER, 1] = 9.0, 7.0, 8.0
    assert best_span(logits)[1:] == (0, LONGEST_ANSWER - 1)
    assert best_span(torch.zeros(0, 2)) == (-float("inf"), 0, 0)


MAX_LENGTH = 16


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer pads on the left, where no batch is padded."""
    return write_family(tmp_path_factory.mktemp("model"), "bert", num_blocks=2, padding_side="left")


def make_job(model_folder: Path, **overrides: object) -> Job:
    """A question-answering job."""
    return ring.make_job(model_folder, model__task="question-answering", train__max_length=MAX_LENGTH, **overrides)


def load(model_folder: Path, path: Path, **overrides: object) -> tuple[TextExamples, AnswerScores]:
    """Everything that a file has."""
    source = Questions(make_job(model_folder, **overrides), model_folder)
    examples = source.examples(source.read(path).rows, ())
    assert isinstance(examples.scores, AnswerScores)
    return examples, examples.scores


def spans(batch: Batch) -> list[tuple[int, int]]:
    """Targets."""
    return [tuple(row) for row in batch.labels.tolist()]


def test_questions_windows_hold_the_answer_where_the_target_says(model_folder: Path, tmp_path: Path) -> None:
    """Decoding the target's tokens gives the answer; every answer is in one window at least; nothing is too long."""
    rows = make_questions(40, seed=3)
    examples, scores = load(model_folder, write_questions(tmp_path / "rows.jsonl", 40, seed=3))
    vocabulary = tiny.vocabulary()
    found = set()
    for first in range(0, len(examples), 8):
        chosen = range(first, min(first + 8, len(examples)))
        batch = examples.batch(chosen, {})
        assert batch.ids.shape[1] <= MAX_LENGTH
        for row, (start, stop) in enumerate(spans(batch)):
            window = scores._windows[chosen[row]]
            ids = batch.ids[row]
            if vocabulary[int(ids[start])] == "[CLS]":
                assert start == stop
                continue
            answer: Any = rows[window.question]["answer"]
            assert " ".join(vocabulary[int(token)] for token in ids[start : stop + 1]) == answer["text"][0]
            assert batch.token_type_ids[row, start] == 1
            found.add(window.question)
    assert found == set(range(40))
    assert len(examples) > 40


@pytest.mark.parametrize("stride", [0, 2])
def test_questions_windows_overlap_by_the_stride(model_folder: Path, tmp_path: Path, stride: int) -> None:
    """Neighbouring windows share so many tokens, and together they have the whole context."""
    rows = make_questions(30, seed=4)
    _, scores = load(model_folder, write_questions(tmp_path / "rows.jsonl", 30, seed=4), data__stride=stride)
    for question, row in enumerate(rows):
        windows = [window for window in scores._windows if window.question == question]
        words: set[int] = set()
        for window in windows:
            words |= set(window.starts)
        context = str(row["context"])
        assert words == {at for at in range(len(context)) if at == 0 or context[at - 1] == " "}
        for left, right in itertools.pairwise(windows):
            assert len(set(left.starts) & set(right.starts)) == (stride or MAX_LENGTH // 3)


def test_questions_cut_a_question_that_is_too_long(model_folder: Path, tmp_path: Path) -> None:
    """Half of a window at least is left to the context."""
    words = " ".join(tiny.words()[:40])
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": words, "context": words, "answer": "w20 w21"}))
    _, scores = load(model_folder, path)
    assert {len(window.tokens.ids) for window in scores._windows[:-1]} == {MAX_LENGTH}
    assert any(window.target != (0, 0) for window in scores._windows)


def test_questions_without_their_answer_are_counted(model_folder: Path, tmp_path: Path) -> None:
    """Answers that do not occur in the context are skipped, and the dataset says how many."""
    good, path = {"question": "w1", "context": "w4 w5", "answer": "w5"}, tmp_path / "rows.jsonl"
    answers: tuple[tuple[object, bool], ...] = (
        ("w2", True),
        (["w9", "w3"], True),
        ({"text": ["w3"], "answer_start": [9]}, True),
        ({"text": ["w3"], "answer_start": [4]}, True),  # not there, but elsewhere
        ({"text": "w3", "answer_start": 9}, True),
        ("w9", False),
        ("", False),
        (" ", False),
        ([], False),
    )
    for answer, usable in answers:
        rows = [good, {"question": "w1", "context": "w1 w2 w8 w3", "answer": answer}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = OwnerDataset.load(make_job(model_folder), path, path, tokenizer_folder=model_folder)
        assert dataset.train_rows == dataset.eval_rows == 1 + usable, answer
        assert sum(dataset.left_out.values()) == 2 * (not usable), answer
        assert dataset.labels == ()


def test_questions_errors_say_where(model_folder: Path, tmp_path: Path) -> None:
    """Wrong columns are the file's fault and named; too short windows and tokenizers without offsets are refused."""
    row: dict[str, Any] = {"question": "w1", "context": "w2"}
    for more, message in (
        ({}, "has no column 'answer'; it has the columns 'question'"),
        ({"question": 1, "answer": "w2"}, "column 'question' is not text"),
        ({"answer": 3}, "column 'answer' is no answer"),
        ({"answer": ["w9"] * 4097}, "column 'answer' has more than 4,096 answers"),
        ({"answer": {"text": ["w2"], "answer_start": []}}, "no answer_start for"),
        ({"answer": {"text": ["w2"], "answer_start": ["0"]}}, "no answer_start for"),
        (
            {"answer": "w3"},
            "has no rows that can be used: 1 row is left out: questions whose answer is not in their context",
        ),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps({**row, **more}))
        with pytest.raises(DataError, match=message):
            load(model_folder, tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"train\.max_length is 15"):
        Questions(make_job(model_folder).with_overrides({"train.max_length": 15}), model_folder)
    path = write_questions(tmp_path / "rows.jsonl", 3, seed=1)
    with pytest.raises(ModelError, match="no tokenizer"):
        OwnerDataset.load(make_job(model_folder), path, None, tokenizer_folder=tmp_path)


def test_questions_come_from_csv_too(model_folder: Path, tmp_path: Path) -> None:
    """A column with the answer's text, under any name."""
    path = tmp_path / "rows.csv"
    path.write_text("q,c,a\nw1,w2 w3 w4,w3 w4\n")
    columns = {"data__question": "q", "data__context": "c", "data__answer": "a"}
    examples, _ = load(model_folder, path, **columns)
    batch = examples.batch([0], {})
    assert spans(batch) == [(4, 5)]


def _logits(scores: AnswerScores, batch: Batch, wanted: dict[int, tuple[str, float]]) -> torch.Tensor:
    """Logits that point at a text in each window that has it, with a score."""
    logits = torch.full((*batch.ids.shape, 2), -5.0)
    assert batch.examples is not None
    for row, index in enumerate(batch.examples.tolist()):
        window = scores._windows[index]
        text, score = wanted[window.question]
        context = scores._questions[window.question].context
        at = context.find(text)
        shift = window.first
        for token, (start, stop) in enumerate(zip(window.starts, window.stops, strict=True)):
            if start == at:
                logits[row, shift + token, 0] = score
            if stop == at + len(text):
                logits[row, shift + token, 1] = score
        logits[row, 0] = 50.0  # what is not context never counts
    return logits


@pytest.mark.parametrize("order", [1, -1])
def test_questions_are_judged_when_all_their_windows_are_in(model_folder: Path, tmp_path: Path, order: int) -> None:
    """Windows may come in any order and micro-batch; each question counts once, with the best span of its windows."""
    examples, scores = load(model_folder, write_questions(tmp_path / "rows.jsonl", 12, seed=5))
    right = {index: (scores._questions[index].answers[0], 5.0) for index in range(12)}
    wrong_first = scores._questions[0].context.split()[0]
    assert wrong_first not in right[0][0]
    right[0] = (wrong_first, 5.0)
    totals: dict[str, float] = {}
    for first in list(range(0, len(examples), 3))[::order]:
        batch = examples.batch(range(first, min(first + 3, len(examples))), {})
        for name, value in scores.add(batch, _logits(scores, batch, right), 7):
            totals[name] = totals.get(name, 0.0) + value
    assert (totals["questions"], totals["exact_sum"]) == (12, 11)
    assert 11 <= totals["f1_sum"] < 12
    assert not scores._open


def test_questions_half_done_evaluations_do_not_leak(model_folder: Path, tmp_path: Path) -> None:
    """A new run begins without what an interrupted one left; two evaluations don't mix."""
    examples, scores = load(model_folder, write_questions(tmp_path / "rows.jsonl", 12, seed=5))
    long = next(index for index, count in enumerate(examples.of_rows) if count > 1)
    first = next(index for index, window in enumerate(scores._windows) if window.question == long)
    batch = examples.batch([first], {})
    wanted = {long: (scores._questions[long].answers[0], 1.0)}
    for key in (1, 2):
        assert dict(scores.add(batch, _logits(scores, batch, wanted), key))["questions"] == 0
    assert len(scores._open) == 2
    dataset = OwnerDataset(examples, examples)
    dataset.set_labels(())
    assert not scores._open


def test_questions_shares_keep_a_question_together(model_folder: Path, tmp_path: Path) -> None:
    """Owners get questions, not windows."""
    path = write_questions(tmp_path / "rows.jsonl", 20, seed=6)
    job = make_job(model_folder)
    whole = OwnerDataset.load(job, path, path, tokenizer_folder=model_folder)
    parts = [
        OwnerDataset.load(job, path, path, share=share, num_owners=3, tokenizer_folder=model_folder)
        for share in range(3)
    ]
    assert sum(part.train_rows for part in parts) == whole.train_rows > 20
    assert sum(part.eval_rows for part in parts) == whole.eval_rows
    questions: list[str] = []
    for part in parts:
        examples: Any = part._train
        questions += [row.context for row in examples.scores._questions]
    assert sorted(questions) == sorted(str(row["context"]) for row in make_questions(20, seed=6))


def test_questions_evaluation_of_a_run_is_scored_by_question(model_folder: Path, tmp_path: Path) -> None:
    """The executor reports what the dataset judges, for evaluations only."""
    path = write_questions(tmp_path / "rows.jsonl", 9, seed=7)
    job = make_job(model_folder, train__max_steps=1, train__microbatches=2)
    dataset = OwnerDataset.load(job, path, path, tokenizer_folder=model_folder)
    plan = ring.make_plan(job, {"a": dataset}, {"b": (0, 2)}, num_blocks=2, labels=())
    hand = ring.HandRing(plan, job, model_folder, {"a": dataset}).train()
    assert hand.values[1]["questions"] == 9
    assert 0 <= hand.values[1]["exact_sum"] <= hand.values[1]["f1_sum"] <= 9
    assert hand.values[1]["count"] == dataset.eval_rows
    empty = Item(seq=0, kind=StepKind.EVALUATE, step=0, owner="a", batch=0, rows=1, turn=0)
    with pytest.raises(DataError, match="without evaluation rows"):
        OwnerDataset.load(job, path, None, tokenizer_folder=model_folder).batch(plan.course, empty)
