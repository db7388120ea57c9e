"""Planning without nodes: sizes from files, and rows of every task against those that a node counts."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import ringtune
from coordinator.api import train
from coordinator.api.arguments import parse_changes
from coordinator.api.estimates import CHARACTERS_PER_TOKEN, count_rows, estimate, estimate_note
from coordinator.api.plan import plan
from coordinator.cli.plan import plan as plan_command
from coordinator.planner.explain import explain
from coordinator.planner.given_plan import accept_plan, read_given_plan
from coordinator.planner.make_plan import make_plan
from coordinator.planner.planned import block_flop
from coordinator.screen.plan_text import plan_text, table_text
from ringtune import __version__
from ringtune.costs.memory_sizes import ROW_BYTES, TOKEN_BYTES
from ringtune.errors import DataError, ModelError, StorageError, UsageError
from ringtune.job import rows
from ringtune.job.job import Job, Model
from ringtune.storage.durable import claim
from ringtune.storage.tables import table_rows
from tests.support.fake_agents import MODEL, job
from tests.support.model_folder import write_any_family
from tests.support.plans import make_plan as plan_by_hand

app = typer.Typer()
app.command()(plan_command)

tiny = pytest.importorskip("tests.support.tiny")
Image = pytest.importorskip("PIL.Image")
safetensors = pytest.importorskip("safetensors.numpy")
GIB = 2**30


@pytest.fixture
def wanted(tmp_path: Path) -> Job:
    """A job on a tiny model with 21 rows to train on and 9 to evaluate on."""
    tiny.write_model(tmp_path / "model")
    train = tiny.write_rows(tmp_path / "train.csv", 21)
    evaluation = tiny.write_rows(tmp_path / "eval.csv", 9)
    return job(model__path=str(tmp_path / "model"), data__train=str(train), data__eval=str(evaluation))


def test_estimates_share_the_rows_like_training(wanted: Job, tmp_path: Path) -> None:
    """Two owners get all rows between them, sizes differing by one at most."""
    facts = estimate(wanted, 2, memory_bytes=GIB).facts
    assert sorted(node.train_rows for node in facts.values()) == [10, 11]
    assert sorted(node.eval_rows for node in facts.values()) == [4, 5]
    assert {node.memory_bytes for node in facts.values()} == {GIB}
    # A third of 21 rows is evaluated, the other 14 are trained on, both shared evenly; nobody has another's
    facts = estimate(wanted.with_overrides({"data.held_out": 1 / 3}), 2, memory_bytes=GIB).facts
    assert [(node.train_rows, node.eval_rows) for node in facts.values()] == [(7, 3), (7, 4)]
    # With one owner of three nodes, two host only
    facts = estimate(wanted.with_overrides({"data.owners": 1}), 3, memory_bytes=GIB).facts
    assert [node.train_rows for node in facts.values()] == [21, 0, 0]
    # Rows may be JSON lines; empty lines are no rows
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x", "label": "bad"}\n\n{"text": "y", "label": "good"}\n')
    facts = estimate(wanted.with_overrides({"data.train": str(path)}), 1, memory_bytes=GIB).facts
    assert facts["node-0"].train_rows == 2


def test_estimates_pack_rows_by_their_characters(wanted: Job, tmp_path: Path) -> None:
    """Of 40, 40 and 10 tokens, with sequences of 64: two; the note says that they are an estimate."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 64}
    path, model = tmp_path / "rows.jsonl", write_any_family(tmp_path / "gpt2", config)
    path.write_text("".join(json.dumps({"text": "x" * round(3.8 * count)}) + "\n" for count in (40, 40, 10)))
    for task in ("causal-lm", "chat"):
        if task == "chat":
            pairs = [{"prompt": "x" * 19, "completion": "y" * round(3.8 * count - 19)} for count in (40, 40, 10)]
            path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        changes = {
            "model.path": str(model),
            "model.task": task,
            "data.train": str(path),
            "data.eval": "",
            "train.max_length": 64,
        }
        found = []
        for packing, count in ((True, 2), (False, 3)):
            job = wanted.with_overrides({**changes, "train.packing": packing})
            found.append(estimate(job, 1, memory_bytes=GIB).facts["node-0"])
            assert found[-1].train_rows == count, task
            assert ("sequences of packed rows" in estimate_note(job)) is packing
        assert found[0].data_bytes - found[1].data_bytes == (2 + 3 - 3) * ROW_BYTES - 64 * TOKEN_BYTES


def test_estimates_read_each_file_once_before_a_local_run(
    wanted: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to be known of the rows comes with their counts."""
    paths = list[str]()

    def counted(path: Path, *more: Any, **options: Any) -> Any:
        paths.append(path.name)
        return table_rows(path, *more, **options)

    monkeypatch.setattr(rows, "table_rows", counted)
    monkeypatch.setattr(train, "_follow", lambda *_, **__: (tmp_path / "out").mkdir())
    ringtune.train(wanted, local=2, out=tmp_path / "out")
    assert paths == ["train.csv", "eval.csv"]


def test_estimates_tell_what_is_wrong_with_both_files_at_once(wanted: Job, tmp_path: Path) -> None:
    """Each with its own message."""
    for name in ("train.csv", "eval.csv"):
        (tmp_path / name).write_text("text,class\na,b\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"train\.csv has no column 'label'.*; .*eval\.csv has no column 'label'"):
        estimate(wanted, 2, memory_bytes=GIB)


def test_estimates_of_conversations_need_a_template(wanted: Job, tmp_path: Path) -> None:
    """The model's own or one that the job names; plain prompts with completions need none. Unused columns are told."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 64}
    write_any_family(tmp_path / "chat", config)
    given = {"model.path": str(tmp_path / "chat"), "model.task": "chat", "data.eval": ""}
    given |= {"data.train": str(tmp_path / "rows.json")}
    chat = wanted.with_overrides(given)
    answer = {"role": "assistant", "content": "yes"}
    for row, needs in (({"messages": [answer], "id": 1}, True), ({"prompt": "w1", "completion": "w2", "id": 1}, False)):
        (tmp_path / "rows.json").write_text(json.dumps([row] * 4))
        if needs:
            with pytest.raises(ModelError, match=r"has no chat template; set data.template to one of 'chatml'"):
                estimate(chat, 1, memory_bytes=GIB)
        job_here = chat.with_overrides({"data.template": "zephyr"}) if needs else chat
        found = estimate(job_here, 1, memory_bytes=GIB)
        assert found.facts["node-0"].train_rows == 4
        assert found.rows[:2] == ["chat: answers", "columns not used: 'id'"] and "has " in found.rows[2]


def test_plan_text_has_slices_memory_and_table(wanted: Job) -> None:
    """The text names every node once with its blocks and memory, what travels, and the actions of a step."""
    planned = make_plan(wanted, estimate(wanted, 2, memory_bytes=GIB).facts)
    why = explain(planned, relative=True)
    lines = plan_text(planned.plan, planned.memory, num_steps=1, measured=False, why=why)
    text = "\n".join(lines)
    assert re.search(r"^node-0  \[0, 2\) +1[01] +[0-9.]+ [KM]iB", text, re.MULTILINE)
    assert "weights" in text
    assert "can reconstruct the input text" in text
    assert "f0.0[0,1)" in text
    assert "U0[head]" in text
    assert "E embedding" in text and "B backward" in text and ">h12.0#2@b: the hidden state" in text


def test_plan_command_is_short_and_guesses_a_time(wanted: Job, tmp_path: Path) -> None:
    """One line for each node, one for the turns, a guess that says what it assumes, and no table unless asked for."""
    (tmp_path / "job.toml").write_text(wanted.to_toml())
    arguments = [str(tmp_path / "job.toml"), "--assume", "2", "--memory", "1GiB"]
    shown = CliRunner().invoke(app, arguments).stdout.splitlines()
    assert len(shown) <= 14 and all(len(line) < 200 for line in shown)
    assert [line.split()[0] for line in shown if line.startswith("node")] == ["node", "node-0", "node-1"]
    assert any(line.startswith("rough guess: ") and "if every node did 20 billion operations" in line for line in shown)
    assert "turns of 2 steps: node-0, then node-1, and again" in shown
    more = CliRunner().invoke(app, [*arguments, "--table"]).stdout
    assert "E0.0" in more and "E embedding" in more
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert found["predicted"]["by"] == "rough guess" and found["predicted"]["assumed_flop_per_s"] == 20e9
    # Without times a micro-batch of any size would count the same; one value is no choice
    refused = CliRunner().invoke(app, [*arguments, "--microbatches", "auto"])
    assert isinstance(refused.exception, UsageError) and "nothing was measured to choose by" in str(refused.exception)
    found = json.loads(CliRunner().invoke(app, [*arguments, "--microbatches", "4", "--json"]).output)
    assert found["plan"]["course"]["microbatches"] == 4


def test_plan_command_writes_a_plan_that_a_run_takes(wanted: Job, tmp_path: Path) -> None:
    """``--save`` holds the whole plan with version and model; a place that can't be written is exit 9 at once."""
    (tmp_path / "job.toml").write_text(wanted.to_toml())
    arguments = [str(tmp_path / "job.toml"), "--assume", "2", "--memory", "1GiB", "--save"]
    shown = CliRunner().invoke(app, [*arguments, str(tmp_path / "plan.json")])
    assert shown.output.splitlines()[-1] == f"the plan is in {tmp_path / 'plan.json'}"
    given = read_given_plan(tmp_path / "plan.json")
    facts = estimate(wanted, 2, memory_bytes=GIB).facts
    assert given.model_digest == facts["node-0"].model.digest
    assert accept_plan(given, wanted, facts).plan == make_plan(wanted, facts).plan
    refused = CliRunner().invoke(app, [*arguments, str(tmp_path)])
    assert isinstance(refused.exception, StorageError) and "it is a folder" in str(refused.exception)


def test_plan_refuses_a_model_without_a_tokenizer(wanted: Job, tmp_path: Path) -> None:
    """As training would, and with the same remedy."""
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    (tmp_path / "model/vocab.txt").unlink(missing_ok=True)
    with pytest.raises(ModelError, match=r"model has no tokenizer .*tokenizer\.save_pretrained\('"):
        plan(wanted, assume=2, memory="1GiB")


def test_plan_says_that_the_classifier_in_the_folder_is_not_used(wanted: Job, tmp_path: Path) -> None:
    """With its classes and those of the rows; of a folder without one nothing is said."""
    assert not any("classifier" in line for line in plan(wanted, assume=2, memory="1GiB").rows)
    weights = tmp_path / "model" / "model.safetensors"
    content = safetensors.load(weights.read_bytes())
    weights.write_bytes(safetensors.save({**content, "classifier.weight": np.zeros((3, 32), np.float32)}))
    found = plan(wanted, assume=2, memory="1GiB")
    line = (
        f"the classifier in {tmp_path / 'model'}, of 3 classes, is not used: a new one is trained for the 2 classes of "
        "the rows"
    )
    assert found.rows[-1] == line and any(line in shown for shown in found.lines())
    assert json.loads(found.text())["rows"][-1] == line


def test_plan_command_saves_over_a_plan_of_its_own_only(wanted: Job, tmp_path: Path) -> None:
    """Not over rows, a plan that was edited by hand, a run's plan, a link or what is no JSON; each stays as it is."""
    (tmp_path / "job.toml").write_text(wanted.to_toml())
    arguments = [str(tmp_path / "job.toml"), "--assume", "2", "--memory", "1GiB", "--save"]
    file, link, run = tmp_path / "plan.json", tmp_path / "link.json", tmp_path / "run"
    for _ in range(2):
        assert CliRunner().invoke(app, [*arguments, str(file)]).exit_code == 0
    written = json.loads(file.read_text())
    edited = {**written, "plan": {key: value for key, value in written["plan"].items() if key != "digest"}}
    link.symlink_to(file)
    claim(run, "run")
    (run / "plan.json").write_text(json.dumps(written))
    others = {"rows": '{"text": "a"}', "edited": json.dumps(edited), "list": "[]", "text": "my notes"}
    for name, content in others.items():
        (tmp_path / f"{name}.json").write_text(content)
    for path in (*(tmp_path / f"{name}.json" for name in others), link, run / "plan.json"):
        before = path.read_bytes()
        refused = CliRunner().invoke(app, [*arguments, str(path)])
        assert isinstance(refused.exception, UsageError) and "give a" in str(refused.exception)
        assert str(path) in str(refused.exception) and path.read_bytes() == before
    assert link.is_symlink()
    with pytest.raises(UsageError, match=r"text\.json is there already and is no plan as 'ringtune plan' saved it"):
        plan(wanted, assume=2, memory="1GiB").save(tmp_path / "text.json")


def test_block_flop_counts_weights_and_attention(wanted: Job) -> None:
    """Two rows of 8 tokens: 2 x 8 x (2 x 250 weights + 4 x 8 x 8)."""
    plan = plan_by_hand([("a", 0, 2), ("b", 2, 4)], ["a"], batch_size=4, microbatches=2, max_length=8)
    assert block_flop(plan, wanted, MODEL) == 2 * 8 * (2 * 250 + 4 * 8 * 8)
    # What trains of a block's own weights is not in its frozen bytes, but is multiplied all the same
    divided = dataclasses.replace(MODEL, block_bytes=400, adapter_block_bytes=600)
    own = wanted.with_overrides({"adapter.config": "full"})
    assert block_flop(plan, own, divided) == 2 * 8 * (2 * 250 + 4 * 8 * 8)


def test_plan_json_is_one_line_and_plan_text_says_how_stale_a_run_is(wanted: Job) -> None:
    """Machines get the whole plan with its digest, and the memory in bytes."""
    planned = plan(wanted, assume=2, memory="1GiB")
    assert "\n" not in planned.text()
    value = json.loads(planned.text())
    assert value == planned.to_json() and "note" not in value and "explanation" not in value
    assert value["version"] == __version__
    assert value["plan"]["digest"] == planned.plan.digest
    assert value["memory"]["node-0"]["total_bytes"] == planned.memory["node-0"].total_bytes
    explained = plan(wanted, assume=2, memory="1GiB", explain=True)
    assert explained.to_json() == json.loads(explained.text()) and "explanation" in explained.to_json()
    # Whoever plans a stale run is told by how many steps each host lags; other methods have no such line
    wanted = wanted.with_overrides({"train.method": "pipeadapter", "train.local_iterations": 8})
    stale = make_plan(wanted, estimate(wanted, 2, memory_bytes=GIB).facts)
    text = "\n".join(plan_text(stale.plan, stale.memory, num_steps=0, measured=False))
    assert "stale on purpose" in text
    assert "node-0 1, node-1 0" in text
    fresh = make_plan(wanted.with_overrides({"train.method": "all"}), estimate(wanted, 2, memory_bytes=GIB).facts)
    assert "stale" not in "\n".join(plan_text(fresh.plan, fresh.memory, num_steps=0, measured=False))


def test_plan_table_can_begin_at_any_step() -> None:
    """At a later step more blocks train."""
    plan = plan_by_hand([("a", 0, 2), ("b", 2, 4)], ["a"])
    assert "F0.0[3,4)" in table_text(plan, at_step=0, num_steps=1)
    assert "F6.0[2,4)" in table_text(plan, at_step=6, num_steps=1)
    with pytest.raises(UsageError, match=r"--at-step 8 is not in \[0, 8\)"):
        table_text(plan, at_step=8, num_steps=1)


def test_changes_are_read_like_the_job_file() -> None:
    """Numbers, lists and quoted strings as in TOML; other words are strings."""
    assert parse_changes(["train.seed=1", 'data.labels=["a", "b"]', "train.method=all", "model.path=a=b"]) == {
        "train.seed": 1,
        "data.labels": ["a", "b"],
        "train.method": "all",
        "model.path": "a=b",
    }
    for change in ("seed=1", "train.seed", "a.b.c=1"):
        with pytest.raises(UsageError, match=r"SECTION\.KEY=VALUE"):
            parse_changes([change])


np = pytest.importorskip("numpy")
tiny_data = pytest.importorskip("tests.support.tiny_data")
families = pytest.importorskip("tests.support.tiny_families")

OFF_AT_MOST = 1 / 3


def make_job(task: str, folder: Path = Path("nowhere"), **more: object) -> Job:
    """A job of a task; keys have ``__`` instead of a dot."""
    return Job(model=Model(path=str(folder), task=task)).with_overrides(
        {"train.max_length": 16, **{key.replace("__", "."): value for key, value in more.items()}}
    )


def counted_by_a_node(job: Job, train: Path, evaluation: Path, *, share: int, num_owners: int) -> tuple[int, int]:
    """Examples as an owner's process counts them."""
    from edge.data.dataset import OwnerDataset

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
    facts = estimate(job, 2, memory_bytes=GIB).facts
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
    from edge.data.dataset import OwnerDataset

    folder = families.write_family(tmp_path / "model", "bert")
    path = tmp_path / "train.csv"
    path.write_text("text,label,who\n" + "".join(f"a b,{at % 2},u{at % 3}\n" for at in range(17)))
    users = {"offload__mode": "auto", "offload__users": "alone", "data__user": "who"}
    job = make_job("sequence-classification", folder, data__train=str(path), data__eval=str(path), **users)
    for share, node in enumerate(estimate(job, 2, memory_bytes=GIB).facts.values()):
        dataset = OwnerDataset.load(job, path, path, share=share, num_owners=2, tokenizer_folder=folder)
        assert node.users == dataset.users and len(node.users) == 3


def test_rows_of_texts_are_blocks_and_windows(tmp_path: Path) -> None:
    """Blocks of max_length tokens; a rest of one token teaches nothing."""
    path = tmp_path / "text.txt"
    job = make_job("causal-lm")
    for tokens, blocks in ((2, 1), (16, 1), (17, 1), (18, 2), (160, 10)):
        path.write_text("é" * round(tokens * CHARACTERS_PER_TOKEN))
        assert len(count_rows(str(path), job).examples) == blocks
    # A node skips them too; an answer may be a text, a list, or a table
    answers = ["b", ["x", "c"], {"text": ["a"], "answer_start": [0]}, "x", [], {"text": []}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": "q", "context": "a b c", "answer": a}) + "\n" for a in answers))
    assert count_rows(str(path), make_job("question-answering")).examples == (1, 1, 1)
    # Windows of 16 tokens: 3 special ones, 3 of the question, 10 of the context, of which 5 overlap
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
        path.write_bytes(b"") if path.suffix in (".NPY", ".txt", ".md") else Image.new("L", (2, 2)).save(path)
    assert count_rows(str(tmp_path), make_job("image-classification")).labels == ("cat", "cat", "dog")
    (tmp_path / "dog" / "1.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"dog/1\.jpg is no readable picture"):
        count_rows(str(tmp_path), make_job("image-classification"))


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
        (lambda path: np.savez(path, image=np.zeros(2), label=np.array(["a", None], dtype=object)), "no readable npz"),
    ],
)
def test_rows_of_a_bad_archive_are_refused(tmp_path: Path, write: Callable[[Path], None], message: str) -> None:
    """Whatever is wrong with the file is told by its name."""
    path = tmp_path / "rows.npz"
    write(path)
    with pytest.raises(DataError, match=message) as caught:
        count_rows(str(path), make_job("image-classification"))
    assert str(path) in str(caught.value)


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
