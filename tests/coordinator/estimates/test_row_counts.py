"""Rows of every task counted without a node, against what a node counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.commands.plan import app
from coordinator.estimates.facts import estimated_facts
from coordinator.estimates.row_counts import CHARACTERS_PER_TOKEN, count_rows, estimate_note
from ringtune.errors import DataError
from ringtune.jobs.job import Job, Model

np = pytest.importorskip("numpy")
tiny_data = pytest.importorskip("tests.support.tiny_data")
families = pytest.importorskip("tests.support.tiny_families")

OFF_AT_MOST = 1 / 3
GIB = 2**30


def make_job(task: str, folder: Path = Path("nowhere"), **more: object) -> Job:
    """A job of a task; keys have ``__`` instead of a dot."""
    return Job(model=Model(path=str(folder), task=task)).with_overrides(
        {"train.max_length": 16, **{key.replace("__", "."): value for key, value in more.items()}}
    )


def counted_by_a_node(job: Job, train: Path, evaluation: Path, *, share: int, num_owners: int) -> tuple[int, int]:
    """Examples as an owner's process counts them."""
    from edge.data.rows import OwnerDataset

    dataset = OwnerDataset.load(
        job, train, evaluation, share=share, num_owners=num_owners, tokenizer_folder=Path(job.model.path)
    )
    return dataset.train_rows, dataset.eval_rows


MODELS = {
    "sequence-classification": "bert",
    "regression": "bert",
    "token-classification": "bert",
    "question-answering": "bert",
    "causal-lm": "gpt2",
    "image-classification": "vit",
}


@pytest.mark.parametrize("task", MODELS)
def test_rows_of_every_task_are_those_of_a_node(tmp_path: Path, task: str) -> None:
    """Tables and images exactly, windows of questions within a third; in the shares that training would have."""
    folder = families.write_family(tmp_path / "model", MODELS[task])
    train, evaluation = (
        tiny_data.write_task_rows(tmp_path, task, name, rows, seed=rows) for name, rows in (("train", 31), ("eval", 13))
    )
    max_length = families.IMAGE_TOKENS if task == "image-classification" else 16
    job = make_job(task, folder, data__train=str(train), data__eval=str(evaluation), train__max_length=max_length)
    facts = estimated_facts(job, 2, memory_bytes=GIB)
    for share, node in enumerate(facts.values()):
        wanted = counted_by_a_node(job, train, evaluation, share=share, num_owners=2)
        if task == "question-answering":
            assert (node.train_rows, node.eval_rows) == pytest.approx(wanted, rel=OFF_AT_MOST)
            assert node.train_rows > 16, "more windows than questions"
        else:
            assert (node.train_rows, node.eval_rows) == wanted
        assert node.labels == tiny_data.labels_of(task)


def test_rows_of_users_are_those_of_a_node(tmp_path: Path) -> None:
    """The shares of a table are counted by user as an owner counts them."""
    from edge.data.rows import OwnerDataset

    folder = families.write_family(tmp_path / "model", "bert")
    path = tmp_path / "train.csv"
    path.write_text("text,label,who\n" + "".join(f"a b,{at % 2},u{at % 3}\n" for at in range(17)))
    users = {"offload__mode": "auto", "offload__users": "alone", "data__user": "who"}
    job = make_job("sequence-classification", folder, data__train=str(path), data__eval=str(path), **users)
    for share, node in enumerate(estimated_facts(job, 2, memory_bytes=GIB).values()):
        dataset = OwnerDataset.load(job, path, path, share=share, num_owners=2, tokenizer_folder=folder)
        assert node.users == dataset.users and len(node.users) == 3


def test_rows_of_plain_text_follow_from_its_characters(tmp_path: Path) -> None:
    """Blocks of max_length tokens; a rest of one token teaches nothing."""
    path = tmp_path / "text.txt"
    job = make_job("causal-lm")
    for tokens, blocks in ((2, 1), (16, 1), (17, 1), (18, 2), (160, 10)):
        path.write_text("é" * round(tokens * CHARACTERS_PER_TOKEN))
        assert len(count_rows(str(path), job).examples) == blocks


def test_rows_of_questions_leave_those_without_an_answer(tmp_path: Path) -> None:
    """A node skips them too; an answer may be a text, a list, or a table."""
    answers = ["b", ["x", "c"], {"text": ["a"], "answer_start": [0]}, "x", [], {"text": []}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": "q", "context": "a b c", "answer": a}) + "\n" for a in answers))
    assert count_rows(str(path), make_job("question-answering")).examples == (1, 1, 1)


def test_rows_of_long_contexts_are_windows(tmp_path: Path) -> None:
    """Windows of 16 tokens: 3 special ones, 3 of the question, 10 of the context, of which 5 overlap."""
    path = tmp_path / "rows.jsonl"
    characters = [round(tokens * CHARACTERS_PER_TOKEN) for tokens in (3, 10, 11, 15, 16, 60)]
    question, *contexts = ("q" * count for count in characters)
    path.write_text(
        "".join(json.dumps({"question": question, "context": text, "answer": "q"}) + "\n" for text in contexts)
    )
    assert count_rows(str(path), make_job("question-answering")).examples == (1, 2, 2, 3, 11)


@pytest.mark.parametrize("kind", ["<U4", ">U4", "|u1", "<i8", ">i2", "<i4"])
def test_rows_of_images_know_every_type_of_label(tmp_path: Path, kind: str) -> None:
    """Names and whole numbers of any width and byte order, as numpy reads them."""
    labels = np.array([1, 0, 2, 1]).astype(kind)
    path = tmp_path / "rows.npz"
    np.savez_compressed(path, image=np.zeros((4, 2, 2), np.uint8), label=labels)
    assert count_rows(str(path), make_job("image-classification")).labels == tuple(map(str, labels.tolist()))


def test_rows_of_a_folder_of_images_are_its_files(tmp_path: Path) -> None:
    """A folder for each class; files that are no images do not count."""
    for name in ("cat/1.png", "cat/2.NPY", "dog/1.jpg", "dog/notes.txt", "readme.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert count_rows(str(tmp_path), make_job("image-classification")).labels == ("cat", "cat", "dog")


def torn(path: Path) -> None:
    """The first half of a good file."""
    np.savez(path, image=np.zeros((4, 2, 2)), label=np.zeros(4, int))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "can't read"),
        (lambda path: path.write_bytes(b"text"), "is no readable npz file"),
        (torn, "is no readable npz file"),
        (lambda path: np.savez(path, image=np.zeros((4, 2, 2))), "has no array 'label'; it has image; set data.label"),
        (lambda path: np.savez(path, image=np.zeros((4, 2)), label=np.zeros(4)), "labels are of type f"),
        (lambda path: np.savez(path, image=np.zeros((4, 2)), label=np.zeros((4, 1), int)), r"shape \[4, 1\]"),
        (lambda path: np.savez(path, image=np.zeros((4, 2)), label=np.zeros(3, int)), "and 3 labels"),
        (lambda path: np.savez(path, image=np.zeros((0, 2)), label=np.zeros(0, int)), "has no rows"),
    ],
)
def test_rows_of_a_bad_archive_are_refused(tmp_path: Path, write: Callable[[Path], None], message: str) -> None:
    """Whatever is wrong with the file is told by its name."""
    path = tmp_path / "rows.npz"
    write(path)
    with pytest.raises(DataError, match=message) as caught:
        count_rows(str(path), make_job("image-classification"))
    assert str(path) in str(caught.value)


def test_rows_refuse_pickled_labels(tmp_path: Path) -> None:
    """An array of objects is a pickle, which nothing here opens."""
    path = tmp_path / "rows.npz"
    np.savez(path, image=np.zeros((2, 2)), label=np.array(["a", None], dtype=object))
    with pytest.raises(DataError, match="is no readable npz file"):
        count_rows(str(path), make_job("image-classification"))


def test_note_says_what_is_an_estimate() -> None:
    """Windows and blocks are; rows of a table and images are counted."""
    assert "windows of the questions' contexts, at 3.8 characters" in estimate_note(make_job("question-answering"))
    assert "blocks of plain text" in estimate_note(make_job("causal-lm", data__train="a.txt"))
    for task, file in (("causal-lm", "a.jsonl"), ("image-classification", "a.npz"), ("sequence-classification", "a")):
        assert estimate_note(make_job(task, data__train=file)) == ""


def test_plan_command_says_that_rows_are_estimated(tmp_path: Path) -> None:
    """For people as a line, for machines as a key; the plan itself is complete."""
    folder = families.write_family(tmp_path / "model", "bert")
    rows = tiny_data.write_task_rows(tmp_path, "question-answering", "train", 20, seed=1)
    job = tmp_path / "job.toml"
    job.write_text(
        f'[model]\npath = "{folder}"\ntask = "question-answering"\n[data]\ntrain = "{rows}"\n[train]\nmax_length = 16\n'
    )
    arguments = [str(job), "--assume", "2", "--memory", "1GiB"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "rows are an estimate: windows" in shown.output
    value = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert value["note"].startswith("rows are an estimate")
    assert [owner["node"] for owner in value["plan"]["course"]["owners"]] == ["node-0", "node-1"]
