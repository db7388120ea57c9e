"""A job from what lies in a folder: which task, which columns, how many questions."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner, Result

from coordinator.cli.init_wizard import MAX_QUESTIONS, DefaultAnswers, TerminalPrompt, WizardOptions, WrittenJob, begin
from ringtune import cli
from ringtune.errors import DataError, IntegrityError, InvalidInputError, ModelError, UsageError
from ringtune.job.job import Job, load_job, parse_job
from ringtune.models.family import TASKS
from tests.contract.models.test_folder import write_cache
from tests.contract.test_hints import parse
from tests.support.model_folder import bert_shapes, safetensors_bytes, write_any_family, write_model

VIT = {
    "model_type": "vit",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 4,
    "patch_size": 2,
    "num_channels": 1,
}
TEXTS = [f"{'word ' * (5 + index)}{index}" for index in range(30)]
QUESTION = {"question": "who?", "context": "it was anna who came", "answers": {"text": ["anna"], "answer_start": [7]}}


class Scripted(DefaultAnswers):
    """Answers with what the test says, else with the default, and counts."""

    def __init__(self, **answers: str) -> None:
        self.answers, self.asked = answers, list[str]()

    def choose(self, question: str, default: str, choices: Sequence[str] = ()) -> str:
        """Answer by the question's first word."""
        self.asked.append(question)
        return self.answers.get(question.split()[0].lower(), default)

    def place(self, question: str, find: Callable[[], str]) -> str:
        """Take what is found."""
        self.asked.append(question)
        return find()


def made(folder: Path, ask: Scripted | None = None, **wishes: object) -> WrittenJob:
    """Begin in a folder with a small BERT."""
    write_model(folder / "model")
    return begin(WizardOptions(folder=folder, **wishes), ask or DefaultAnswers())  # type: ignore[arg-type]


def job_of(begun: WrittenJob) -> Job:
    """Read what was written."""
    return parse_job(begun.text, source="job")


def write_lines(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_gpt2(folder: Path) -> None:
    """A tiny language model that its config says is one."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 1024}
    write_any_family(folder, {**config, "architectures": ["GPT2LMHeadModel"]})


def test_begin_tells_questions_by_their_columns(tmp_path: Path) -> None:
    """Usual names in other capitals are known, and lists and tables are answers."""
    write_lines(tmp_path / "train.jsonl", [{**QUESTION, "ID": index} for index in range(3)])
    found = job_of(made(tmp_path))
    assert (found.model.task, found.data.question, found.data.answer) == ("question-answering", "question", "answers")
    assert found.data.held_out == 0.0  # too few rows to hold some out


@pytest.mark.parametrize("name", ["train.jsonl", "train.conll"])
def test_begin_tells_tags_by_lists_and_by_the_form_of_the_file(tmp_path: Path, name: str) -> None:
    """Columns of usual names that have lists, or a word a line; all tags are named, as a rare one may be held out."""
    if name.endswith("jsonl"):
        rows = [{"id": at, "tokens": ["Anna", "sings"], "ner_tags": ["B-PER", "O"]} for at in range(20)]
        write_lines(tmp_path / name, [*rows, {"id": 20, "tokens": ["Rome"], "ner_tags": ["B-LOC"]}])
    else:
        (tmp_path / name).write_text("Anna B-PER\nsings O\n\n" * 20 + "Rome B-LOC\n")
    begun = made(tmp_path, ask := Scripted())
    found = job_of(begun)
    assert (found.model.task, found.data.labels) == ("token-classification", ("B-LOC", "B-PER", "O"))
    wanted = ("tokens", "ner_tags") if name.endswith("jsonl") else ("words", "tags")
    assert (found.data.words, found.data.tags, found.data.held_out) == (*wanted, 0.1)
    assert f"{name} has 21 texts with 41 words and the tags B-LOC, B-PER, O" in begun.saw[0]
    assert len(ask.asked) <= MAX_QUESTIONS


def test_begin_tells_numbers_and_pairs_of_texts(tmp_path: Path) -> None:
    """Fractions are numbers to be learned; two usual names are a pair; whole numbers are classes unless said."""
    rows = [{"sentence1": text, "sentence2": text[::-1], "score": index / 7} for index, text in enumerate(TEXTS)]
    write_lines(tmp_path / "train.jsonl", rows)
    found = job_of(made(tmp_path, ask := Scripted()))
    assert (found.model.task, found.data.label) == ("regression", "score")
    assert (found.data.text, found.data.text_pair) == ("sentence1", "sentence2")
    assert len(ask.asked) <= MAX_QUESTIONS
    write_lines(tmp_path / "train.jsonl", [{"text": text, "stars": index % 5} for index, text in enumerate(TEXTS)])
    assert job_of(made(tmp_path)).model.task == "sequence-classification"
    found = job_of(made(tmp_path, task="regression", columns={"text": "text", "label": "stars"}))
    assert (found.model.task, found.data.text_pair, found.data.label) == ("regression", "", "stars")


def test_begin_refuses_more_tags_than_there_can_be(tmp_path: Path) -> None:
    """A column of words is none of tags."""
    write_lines(tmp_path / "train.jsonl", [{"words": [f"w{at}"], "tags": [f"t{at}"]} for at in range(1001)])
    with pytest.raises(DataError, match=r"line 1001: there are more than 1,000 tags; name the right column with"):
        made(tmp_path)


def test_begin_tells_classes_from_ids_and_texts_without_usual_names(tmp_path: Path) -> None:
    """What repeats is a class, the longest is the text; what differs in each row is neither."""
    write_lines(tmp_path / "r.jsonl", [{"nr": i, "said": text, "who": "ab"[i % 2]} for i, text in enumerate(TEXTS)])
    found = job_of(made(tmp_path)).data
    assert (found.text, found.label) == ("said", "who")


def test_begin_takes_the_file_for_evaluation_that_lies_beside(tmp_path: Path) -> None:
    """``train`` and ``test`` are told apart by their names, and nothing is held out."""
    for name in ("train.csv", "test.csv"):
        lines = ["text,label", *(f"{text},{index % 3}" for index, text in enumerate(TEXTS))]
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    found = job_of(made(tmp_path)).data
    assert (found.train, found.eval, found.held_out) == ("train.csv", "test.csv", 0.0)


def test_begin_learns_texts_alone_with_a_decoder_only(tmp_path: Path) -> None:
    """An encoder has no head for them, and the message has rows and heads."""
    write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    with pytest.raises(ModelError, match=r"columns 'text' .*that fits causal-lm, and a model of type 'bert' has heads"):
        made(tmp_path)
    write_gpt2(tmp_path / "gpt")
    found = begin(WizardOptions(folder=tmp_path, model=str(tmp_path / "gpt")), DefaultAnswers())
    assert (found.task, job_of(found).train.batch_size, job_of(found).adapter.config) == ("causal-lm", 2, "lora")
    assert found.chosen["adapter.config"].reason == "usual for language models; PEFT has it, and GGUF too"
    phi = {"model_type": "phi3", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    tensors = {"model.embed_tokens.weight": (20, 8), "model.layers.0.self_attn.qkv_proj.weight": (24, 8)}
    (tmp_path / "phi").mkdir()
    (tmp_path / "phi/config.json").write_text(json.dumps(phi))
    (tmp_path / "phi/tokenizer_config.json").write_text("{}")
    (tmp_path / "phi/model.safetensors").write_bytes(safetensors_bytes(tensors))
    found = begin(WizardOptions(folder=tmp_path, model=str(tmp_path / "phi")), DefaultAnswers())
    assert (job_of(found).adapter.config, found.task) == ("lora", "causal-lm")
    assert found.chosen["adapter.config"].reason == "usual for language models; PEFT has it"
    (tmp_path / "plain.txt").write_text("a line\n" * 900, encoding="utf-8")
    wishes = WizardOptions(folder=tmp_path, model=str(tmp_path / "gpt"), data=tmp_path / "plain.txt")
    assert begin(wishes, DefaultAnswers()).task == "causal-lm"


@pytest.mark.parametrize("form", ["npz", "folder"])
def test_begin_counts_images_and_their_classes(form: str, tmp_path: Path) -> None:
    """Arrays are told by their shapes; a folder has one for each class."""
    if form == "npz":
        np.savez(tmp_path / "rows.npz", pixels=np.zeros((6, 4, 4)), digit=np.arange(6) % 2)
    for index in range(6 if form == "folder" else 0):
        (tmp_path / "rows" / str(index % 2)).mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "rows" / str(index % 2) / f"{index}.npy", np.zeros((4, 4)))
    write_any_family(tmp_path / "m", VIT)
    found = begin(WizardOptions(folder=tmp_path), DefaultAnswers())
    assert found.task == "image-classification" and "6 images of 2 classes (0, 1)" in found.saw[0]
    assert [job_of(found).data.image, job_of(found).data.label] == (
        ["pixels", "digit"] if form == "npz" else ["image", "label"]
    )


def test_begin_finds_splits_classes_and_pictures_of_parquet(tmp_path: Path) -> None:
    """Shards are named by their split, in the folder or one below it; numbers of a ClassLabel are names."""
    label = {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": label}})}

    def write(path: Path, columns: dict[str, Any]) -> None:
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)

    texts = {"text": TEXTS, "label": [index % 2 for index in range(len(TEXTS))]}
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write(tmp_path / "data" / f"{name}.parquet", texts)
    begun = made(tmp_path)
    found = job_of(begun)
    assert (found.model.task, found.data.train, found.data.eval) == (
        "sequence-classification",
        "data/train",
        "data/test",
    )
    assert "data/train has 60 rows" in begun.saw[0] and "'label' (2 different values: neg, pos)" in begun.saw[0]
    assert not begun.problems

    (tmp_path / "pictures").mkdir()
    write_any_family(tmp_path / "pictures" / "model", VIT)
    pytest.importorskip("PIL.Image").new("L", (4, 4)).save(content := io.BytesIO(), "PNG")
    image = {"bytes": content.getvalue(), "path": "a.png"}
    write(tmp_path / "pictures" / "rows.parquet", {"img": [image] * 4, "label": [0, 1, 1, 0]})
    begun = begin(WizardOptions(folder=tmp_path / "pictures"), DefaultAnswers())
    found = job_of(begun)
    assert (found.model.task, found.data.image, found.data.label) == ("image-classification", "img", "label")
    assert "rows.parquet has 4 images of 2 classes (neg, pos)" in begun.saw[0]


def test_begin_asks_five_questions_at_most_and_takes_the_answers(tmp_path: Path) -> None:
    """Rows, model, task, columns and length, where all are open; an answer stands in the job."""
    write_lines(tmp_path / "rows.jsonl", [{"a": text, "b": text[::-1], "y": i % 2} for i, text in enumerate(TEXTS)])
    config = tmp_path / "model"
    ask = Scripted(columns="text=b label=y", how="quick")
    found = job_of(made(tmp_path, ask))
    assert len(ask.asked) == 4 and config.is_dir()
    assert (found.data.text, found.train.max_steps) == ("b", 40)
    write_gpt2(tmp_path / "gpt")
    ask = Scripted(what="causal-lm")
    found = job_of(
        begin(WizardOptions(folder=tmp_path / "none", data=tmp_path / "rows.jsonl", model=str(tmp_path / "gpt")), ask)
    )
    assert found.model.task == "causal-lm" and ask.asked[0] == "What shall be learned"
    assert len(ask.asked) + 2 == MAX_QUESTIONS  # rows and model were given


def test_init_proposes_no_more_nodes_than_there_are_rows(tmp_path: Path) -> None:
    """A single row has one owner: training would refuse two."""
    write_model(tmp_path / "model")
    (tmp_path / "train.csv").write_text("text,label\na fine film,pos\n")
    columns = ["--column", "text=text", "--column", "label=label"]
    words = ["init", str(tmp_path / "job.toml"), "--task", "sequence-classification", *columns]
    shown = CliRunner().invoke(cli.app, words).output
    assert "has 1 row and the columns" in shown and " epochs of 1 row\n" in shown
    assert "--assume 1\n" in shown and "--local 1 --out run\n" in shown


def test_begin_says_what_lies_there_where_it_finds_nothing(tmp_path: Path) -> None:
    """Names of what is there, and how rows are given; two files that could be rows are named too."""
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(DataError, match=r"looks like rows \(it has model, notes.md\); give --data FILE"):
        made(tmp_path)
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("text\n")
    with pytest.raises(DataError, match=r"several that could be rows \(a.csv, b.csv\); give one: --data FILE"):
        made(tmp_path)
    write_model(tmp_path / "models/other")
    with pytest.raises(ModelError, match=r"several that could be a model \(model, models/other\); give one"):
        begin(WizardOptions(folder=tmp_path, data=tmp_path / "a.csv"), DefaultAnswers())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"text,label\n", r"has one line and no rows \('text,label'\)"),
        (b"PK\x03\x04...", r"is a zip archive or a spreadsheet \(\.xlsx\) by its first bytes"),
        ("text,label\n\u00e9,\u00e9\n".encode() * 2 + b"\xe9,b\n", r"not UTF-8 \(line 5, byte 0xe9\), though 2 other"),
        (b"good film,pos\n" + b"bad film,neg\ngood one,pos\n" * 3, "looks like a row and not like names of columns"),
        (
            b"id,score\n1,0.5\n2,0.25\n",
            r"what is to be learned: .*'score' \(numbers with fractions, .*init looks for texts",
        ),
        (b'text,label\n"a,b\n', "a quote is opened and never closed"),
        (
            b"text,label\na,b,c\n",
            "line 2: the row has 3 cells, the header has 2 columns; put a text with commas in quotes",
        ),
    ],
)
def test_begin_says_what_it_saw_of_a_table_without_sense(content: bytes, message: str, tmp_path: Path) -> None:
    """One clear message each, of a kind that exits with 5."""
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(InvalidInputError, match=message) as caught:
        made(tmp_path)
    assert str(tmp_path / "rows.csv") in str(caught.value)


def test_begin_says_that_fractions_are_no_classes(tmp_path: Path) -> None:
    """With the task given, the message names the column and what would be a class."""
    write_lines(tmp_path / "rows.jsonl", [{"text": text, "score": i / 7} for i, text in enumerate(TEXTS)])
    with pytest.raises(DataError, match=r"'score' has fractions; put them into classes, learn the numbers with"):
        made(tmp_path, task="sequence-classification")


def test_questions_on_a_terminal_take_defaults_and_repeat_until_an_answer_fits() -> None:
    """An empty line is the default; what is no choice is asked again; where nothing is found a path is asked for."""
    app = typer.Typer()

    def nothing() -> str:
        raise DataError("nothing looks like rows")

    @app.command()
    def _ask() -> None:
        ask = TerminalPrompt()
        typer.echo([ask.choose("q", "a", ("a", "b")), ask.choose("q", "a", ("a", "b")), ask.place("p", nothing)])

    shown = CliRunner().invoke(app, [], input="\nc\nb\nrows.csv\n")
    assert shown.stdout.splitlines()[-1] == "['a', 'b', 'rows.csv']"
    assert "'c' is none of a, b" in shown.stderr and "nothing looks like rows" in shown.stderr


def test_begin_takes_a_model_of_a_hub_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has it; the job has the id, so that it is one on other machines too."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    write_cache(tmp_path / "cache")
    (tmp_path / "rows.csv").write_text("text,label\n" + "aaaa bbbb cccc,x\ncccc dddd eeee,y\n" * 4)
    found = begin(WizardOptions(folder=tmp_path, model="acme/mini-v2"), DefaultAnswers())
    assert job_of(found).model.path == "acme/mini-v2" and "acme/mini-v2: bert, 3 blocks" in found.saw[1]


def test_begin_refuses_a_model_with_damaged_weights_or_without_tokenizer(tmp_path: Path) -> None:
    """Before a job is written, which only a node would refuse."""
    (tmp_path / "rows.csv").write_text("text,label\n" + "aaaa bbbb cccc,x\ncccc dddd eeee,y\n" * 4)
    write_model(tmp_path / "model", weights=safetensors_bytes(bert_shapes())[:40])
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        begin(WizardOptions(folder=tmp_path), DefaultAnswers())
    write_model(tmp_path / "model")
    (tmp_path / "model/tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"model has no tokenizer .*tokenizer\.save_pretrained\('"):
        begin(WizardOptions(folder=tmp_path), DefaultAnswers())


@pytest.mark.parametrize(
    ("row", "form", "unused"),
    [
        ({"prompt": "q", "completion": "a"}, "prompts and completions as texts, which are learned as they are", ""),
        ({"instruction": "a", "input": "b", "output": "c", "n": 1}, "instructions and outputs (Alpaca)", "'n'"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "(messages)", ""),
        ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}, "(ShareGPT)", ""),
    ],
)
def test_begin_finds_conversations_and_says_their_form(
    tmp_path: Path, row: dict[str, object], form: str, unused: str
) -> None:
    """They are for chat alone; half of a row is learned only by the name of its column, and then refused."""
    write_lines(tmp_path / "train.jsonl", [row] * 30)
    write_gpt2(tmp_path / "gpt")
    wishes = WizardOptions(folder=tmp_path, model=str(tmp_path / "gpt"))
    found = begin(wishes, DefaultAnswers())
    told = "\n".join(found.saw)
    assert found.task == "chat" and f"has {form}" in told.replace("conversations ", "") and not found.problems
    assert (f"Columns not used: {unused}." in told) is bool(unused)
    job = job_of(found)
    assert (job.data.template, job.train.loss_on) == ("zephyr", "answers")
    assert job.train.max_length >= 40, "the template takes room too"
    assert found.chosen["data.template"].reason == "the model has no chat template of its own"
    (tmp_path / "gpt" / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert job_of(begin(wishes, DefaultAnswers())).data.template is None
    for task in ("causal-lm", "sequence-classification"):
        with pytest.raises(DataError, match=r"has .*, in the columns .*; set model\.task = 'chat'"):
            begin(dataclasses.replace(wishes, task=task), DefaultAnswers())
    half = {"text": next(iter(row))}
    if isinstance(row[half["text"]], str):
        with pytest.raises(DataError, match=r"and data.text = .* is a part of it.*set model\.task = 'chat'"):
            begin(dataclasses.replace(wishes, task="causal-lm", columns=half), DefaultAnswers())


def test_begin_refuses_preferences_with_the_remedy(tmp_path: Path) -> None:
    """Whatever task and columns are said."""
    write_lines(tmp_path / "train.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}] * 20)
    write_gpt2(tmp_path / "gpt")
    for task, columns in (("", None), ("chat", None), ("causal-lm", {"text": "prompt"})):
        wishes = WizardOptions(folder=tmp_path, model=str(tmp_path / "gpt"), task=task, columns=columns)
        with pytest.raises(DataError, match=r"has preferences .*DPO\) is not built; .* 'prompt' and 'completion'"):
            begin(wishes, DefaultAnswers())


@pytest.mark.parametrize(
    ("values", "task"),
    [
        ([float(at % 3) for at in range(30)], "sequence-classification"),
        ([f"{at % 2}.0" for at in range(30)], "sequence-classification"),
        ([at % 3 + 0.5 for at in range(30)], "regression"),
        ([1000.0 + at for at in range(30)], "regression"),
    ],
)
def test_begin_takes_whole_numbers_for_classes_however_they_are_written(
    tmp_path: Path, values: list[object], task: str
) -> None:
    """1.0 has no fraction; true fractions and many values are numbers. What was chosen is told with its reason."""
    write_lines(tmp_path / "r.jsonl", [{"text": text, "score": v} for text, v in zip(TEXTS, values, strict=True)])
    begun = made(tmp_path)
    assert begun.task == task and f"Task: {task}, by texts with " in "\n".join(begun.saw)
    reason = begun.chosen["data.label"].reason
    wanted = {"sequence-classification": "--task regression would", "regression": "its numbers"}
    assert wanted[task] in reason and begun.chosen["data.text"].reason == "by its name"


def test_begin_tells_what_is_not_used_odd_and_bad(tmp_path: Path) -> None:
    """Columns by name, the form of the file, classes that differ in blanks, and all bad rows as training says them."""
    rows = [f"{text};{('pos', 'neg', 'Pos ')[at % 3]};{at};für" for at, text in enumerate(TEXTS)]
    rows[3], rows[7] = ";pos;3;x", f"{TEXTS[7]};;7;x"
    (tmp_path / "r.csv").write_bytes("\n".join(["text;label;id;note", *rows]).encode("cp1252"))
    begun = made(tmp_path)
    told = "\n".join(begun.saw)
    for line in (
        "Columns not used: 'id', 'note'.",
        "is not UTF-8 (line 2, byte 0xfc) and is read as Windows-1252",
        "has semicolons (;) between its columns",
        "'Pos ' and 'pos' are different classes, though they differ in spaces or capitals only",
    ):
        assert line in told
    assert "column 'text' is empty in line 5; column 'label' is empty in line 9" in begun.problems
    assert job_of(begun).data.held_out == 0.1


@pytest.mark.parametrize("task", TASKS)
def test_init_writes_a_template_of_the_task(task: str, tmp_path: Path) -> None:
    """Nothing is looked at; what the user did not say has the defaults, but for the adapter of language models."""
    file = tmp_path / "mine.toml"
    options = ["--template", "--task", task, "--model", "m", "--data", "rows.csv", "--eval-data", "held.csv"]
    shown = CliRunner().invoke(cli.app, ["init", str(file), *options])
    assert shown.exit_code == 0, shown.output
    found = load_job(file)
    wanted = {"path": str(tmp_path / "m"), "task": task}, {"train": str(tmp_path / "rows.csv")}
    tables = {"model": wanted[0], "data": {**wanted[1], "eval": str(tmp_path / "held.csv")}}
    adapter = {"adapter": {"config": "lora"}} if task in ("causal-lm", "chat") else {}
    assert found == Job.from_tables({**tables, **adapter})
    lines = file.read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 120
    assert sum(line.startswith("#") for line in lines) > 10
    for line in shown.stdout.splitlines()[1:]:
        parse(line.strip())


def beside(tmp_path: Path, *options: str) -> Result:
    """Type init for a job file in a folder that has 40 rows and a model."""
    rows = [f"{'w' * (20 + index)},{index % 2}" for index in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,mood", *rows]), encoding="utf-8")
    write_model(tmp_path / "models/tiny")
    return CliRunner().invoke(cli.app, ["init", str(tmp_path / "job.toml"), *options])


def test_init_looks_at_what_lies_beside_the_file(tmp_path: Path) -> None:
    """Rows, columns and model are found, and what was seen is told; the job is one that training takes as it is."""
    shown = beside(tmp_path, "--yes")
    assert shown.exit_code == 0, shown.output
    job = load_job(tmp_path / "job.toml")
    assert (job.model.path, job.data.train) == (str(tmp_path / "models/tiny"), str(tmp_path / "rows.csv"))
    assert (job.model.task, job.data.text, job.data.label) == ("sequence-classification", "text", "mood")
    assert (job.data.held_out, job.train.max_length, job.unfreeze and job.unfreeze.every_steps) == (0.1, 32, 20)
    assert (job.train.eval_every, job.train.keep_best) == (10, True)
    assert "rows.csv has 40 rows and the columns 'text'" in shown.stdout
    assert "'mood' (2 different values: 0, 1)" in shown.stdout
    assert "  train.keep_best = true: " in shown.stdout
    assert " epochs of 36 rows\n" in shown.stdout, "4 of the 40 rows are held out"
    text = (tmp_path / "job.toml").read_text(encoding="utf-8")
    assert 'path = "models/tiny"' in text and 'train = "rows.csv"' in text
    assert "# Chosen: there is no file of rows to evaluate on." in text
    for line in shown.stdout.splitlines()[-2:]:
        parse(line.strip())


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        (["--data", "gone.csv"], DataError.exit_code, "gone.csv is not there"),
        (["--model", "gone"], ModelError.exit_code, "gone"),
        (["--task", "image-classification"], DataError.exit_code, "needs an npz file or a folder of images"),
        (["--task", "causal-lm"], ModelError.exit_code, "has heads for sequence-classification"),
        (["--column", "label=moood"], DataError.exit_code, "name one of them"),
        (["--column", "label"], UsageError.exit_code, "is not KEY=COLUMN"),
        (["--task", "causal-ml"], UsageError.exit_code, "did you mean 'causal-lm'?"),
        (["--template", "--column", "label=mood"], UsageError.exit_code, "looks at no rows"),
    ],
)
def test_init_says_what_it_can_not_use(typed: list[str], code: int, message: str, tmp_path: Path) -> None:
    """One message, and no file."""
    refused = beside(tmp_path, "--yes", *typed)
    assert refused.exit_code == code, refused.output
    assert message in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "job.toml").exists()


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    """A file that is there stays as it is."""
    file = tmp_path / "job.toml"
    file.write_text("mine", encoding="utf-8")
    refused = CliRunner().invoke(cli.app, ["init", str(file)])
    assert refused.exit_code == UsageError.exit_code
    assert "is there already" in refused.stderr
    assert file.read_text(encoding="utf-8") == "mine"


def test_init_tells_machines_where_the_file_is(tmp_path: Path) -> None:
    """One line of JSON, with what was chosen."""
    shown = beside(tmp_path, "--json")
    assert json.loads(shown.stdout)["file"] == str(tmp_path / "job.toml")
    assert json.loads(shown.stdout)["chosen"]["data.label"] == "mood"
