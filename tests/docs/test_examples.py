"""The examples: their jobs parse, and what their prepare scripts do to files is right on tiny ones."""

from __future__ import annotations

import gzip
import io
import json
import shlex
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.examples import prepare_parts
from docs.examples.chat.prepare import INSTRUCTION, read_rows
from docs.examples.chat.prepare import split as split_rows
from docs.examples.fashion.prepare import Labelled, of_classes, read_idx, write_npz
from docs.examples.fashion.pretrain import Recipe, pretrain
from docs.examples.prepare_parts import Package, digest, get, members
from docs.examples.shakespeare import stories15m
from docs.examples.shakespeare.prepare import split as split_texts
from docs.examples.squad.prepare import read_articles, rows_of
from docs.examples.squad.prepare import split as split_articles
from ringtune.errors import ConnectionFailedError, DataError, IntegrityError, ModelError
from ringtune.job.job import load_job
from tests.support.cases import cases

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/job.toml"))
TINY = stories15m.Header(width=8, inner=12, num_blocks=2, num_heads=2, num_kv_heads=1, vocab=264, context=16)


@cases("name", NAMES)
def test_example_job_parses_and_names_what_prepare_writes(name: str) -> None:
    """The strict parser takes it, and its paths lead to ``build/examples/NAME`` from where it lies."""
    job = load_job(EXAMPLES / name / "job.toml")
    prepared = (EXAMPLES.parents[1] / "build/examples" / name).resolve()
    assert {Path(path).parent for path in (job.model.path, job.data.train, job.data.eval)} == {prepared}
    for file in ("README.md", "prepare.py"):
        assert (EXAMPLES / name / file).is_file()


def test_examples_are_tasks_that_the_demo_has_not() -> None:
    """Each in a folder of its own."""
    tasks = {load_job(EXAMPLES / name / "job.toml").model.task for name in NAMES}
    assert tasks == {"chat", "causal-lm", "question-answering", "image-classification"}


# ---- packages ---------------------------------------------------------------------------------------


def _tar(files: Mapping[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _deb(files: Mapping[str, bytes]) -> bytes:
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": _tar(files, "w:xz")}
    package = b"!<arch>\n"
    for name, content in parts.items():
        package += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content
        package += b"\n" * (len(content) % 2)
    return package


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """A package of two wanted files and one that is not, as an archive in ``tmp_path/from``."""
    wanted = {"thing-1/data/a.txt": b"one", "thing-1/data/b.txt": b"two"}
    (tmp_path / "from").mkdir()
    (tmp_path / "from/thing-1.tgz").write_bytes(_tar({**wanted, "thing-1/setup.py": b"raise"}))
    for name, content in wanted.items():
        (tmp_path / "sum").mkdir(exist_ok=True)
        (tmp_path / "sum" / Path(name).name).write_bytes(content)
    sha256 = digest(sorted((tmp_path / "sum").iterdir()))
    return Package(
        tool="npm", name="thing", version="1", archive="thing-*.tgz", members=("thing-1/data/*.txt",), sha256=sha256
    )


def test_get_takes_pinned_files_out_of_an_archive_once(package: Package, tmp_path: Path) -> None:
    """Only the wanted ones; afterwards the archive is not needed."""
    found = get(package, tmp_path / "pieces", tmp_path / "from")
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["pieces/thing/a.txt", "pieces/thing/b.txt"]
    assert [path.read_bytes() for path in found] == [b"one", b"two"]
    assert get(package, tmp_path / "pieces", tmp_path / "nowhere") == found


def test_get_takes_files_that_are_unpacked_already(package: Package, tmp_path: Path) -> None:
    """From a folder with the files themselves."""
    found = get(package, tmp_path / "pieces", tmp_path / "sum")
    assert [path.read_bytes() for path in found] == [b"one", b"two"]


def test_get_fetches_again_what_was_changed(package: Package, tmp_path: Path) -> None:
    """A piece that is not what was pinned is not used."""
    get(package, tmp_path / "pieces", tmp_path / "from")[0].write_bytes(b"0ne")
    assert get(package, tmp_path / "pieces", tmp_path / "from")[0].read_bytes() == b"one"


def test_get_refuses_another_content(package: Package, tmp_path: Path) -> None:
    """Both digests are named, nothing is written."""
    (tmp_path / "from/thing-1.tgz").write_bytes(_tar({"thing-1/data/a.txt": b"one"}))
    with pytest.raises(IntegrityError, match=f"1 of the wanted files with digest .* expected {package.sha256}"):
        get(package, tmp_path / "pieces", tmp_path / "from")
    (tmp_path / "from/thing-1.tgz").write_bytes(b"\x1f\x8bno archive")
    with pytest.raises(IntegrityError, match=r"thing-1\.tgz can't be opened"):
        get(package, tmp_path / "pieces", tmp_path / "from")
    assert not (tmp_path / "pieces").exists()


def test_get_says_what_to_type_where_nothing_is_there(package: Package, tmp_path: Path) -> None:
    """A folder without the archive, or a machine without the tool."""
    with pytest.raises(ConnectionFailedError, match=r"has no thing-\*\.tgz; put it there with: npm pack .* thing@1"):
        get(package, tmp_path / "pieces", tmp_path / "nowhere")


@cases(("tool", "remedy"), [("npm", "install Node.js"), ("apt-get", "it comes with Debian")])
def test_get_without_the_tool_says_how_to_go_on(
    tool: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool, how to get it, and that the package may be fetched elsewhere."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    package = Package(tool=tool, name="thing", version="1", archive="thing*", members=("x",), sha256="0")
    with pytest.raises(
        ConnectionFailedError, match=f"{tool} is not on this machine; {remedy}.*name the folder with --from"
    ):
        get(package, tmp_path)


def test_members_reads_a_debian_package(tmp_path: Path) -> None:
    """The files in its data, whatever comes before them."""
    path = tmp_path / "thing_1_all.deb"
    path.write_bytes(_deb({"./usr/share/a.gz": b"one"}))
    assert list(members(path)) == [("./usr/share/a.gz", b"one")]
    path.write_bytes(b"!<arch>\n")
    with pytest.raises(ValueError, match=r"no data\.tar"):
        list(members(path))


def test_pip_is_given_the_digest_before_it_runs_anything(tmp_path: Path) -> None:
    """A source package is set up only if it is the one that is pinned."""
    package = Package(
        tool="pip", name="thing", version="1", archive="thing*", members=("x",), sha256="0", archive_sha256="ab"
    )
    assert "--require-hashes" in package.command(tmp_path)
    assert (tmp_path / "requirements.txt").read_text() == "thing==1 --hash=sha256:ab\n"


def test_main_prints_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And exits as the command does."""

    def fail(to: Path, source: Path | None) -> dict[str, Path]:
        raise ConnectionFailedError("no way; take a walk")

    assert prepare_parts.main("squad", fail, ["--to", str(tmp_path)]) == ConnectionFailedError.exit_code
    assert capsys.readouterr().err == "error: no way; take a walk\n"


def test_main_names_files_that_are_elsewhere_than_the_job_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed command works for another folder too; for the usual one it is the short one."""
    made = {"model.path": tmp_path / "model"}
    prepare_parts.main("squad", lambda to, source: made, ["--to", str(tmp_path)])
    words = ["--out", str(tmp_path / "run"), "--set", f"model.path={tmp_path / 'model'}"]
    assert capsys.readouterr().out.strip().endswith(shlex.join(words))
    prepare_parts.main("squad", lambda to, source: made, [])
    assert capsys.readouterr().out.strip().endswith("--local 3 --out build/examples/squad/run")


# ---- texts and questions ----------------------------------------------------------------------------


def test_texts_are_split_by_play_and_joined_by_name() -> None:
    """The held-out play is in one part only; line ends become those of this system."""
    texts = {"b.txt": "two\r\nlines  \r\n", "a.txt": "one\n", "held.txt": "apart"}
    assert split_texts(texts, "held.txt") == ("one\n\ntwo\nlines\n", "apart\n")
    with pytest.raises(DataError, match="x and other texts are needed, found a, b"):
        split_texts({"a": "", "b": ""}, "x")


def _articles(count: int) -> list[dict[str, Any]]:
    answers = [{"text": "blue", "answer_start": 7}, {"text": "blue", "answer_start": 7}]
    asked = [{"question": "Which colour?", "answers": answers}]
    return [
        {"title": f"t{index}", "paragraphs": [{"context": f"Sky {index} is blue", "qas": asked}]}
        for index in range(count)
    ]


def test_articles_are_split_by_title() -> None:
    """No article is in both parts, whatever the order of the file; another seed gives another split."""
    articles = _articles(20)
    train, held_out = split_articles(articles, num_held_out=5)
    titles = [{article["title"] for article in part} for part in (train, held_out)]
    assert [len(part) for part in titles] == [15, 5] and not titles[0] & titles[1]
    assert split_articles(articles[::-1], num_held_out=5) == (train, held_out)
    assert split_articles(articles, num_held_out=5, seed=1)[1] != held_out
    with pytest.raises(DataError, match="5 articles are too few"):
        split_articles(articles[:5], num_held_out=5)


def test_question_rows_keep_all_answers_with_their_places(tmp_path: Path) -> None:
    """As the question-answering reader takes them."""
    (row,) = rows_of(_articles(1))
    assert row == {
        "question": "Which colour?",
        "context": "Sky 0 is blue",
        "answer": {"text": ["blue", "blue"], "answer_start": [7, 7]},
    }
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(DataError, match="not in the form of SQuAD"):
        read_articles(tmp_path / "x.json")


def test_kinds_of_questions_become_answers_and_sentences_are_held_out_whole(tmp_path: Path) -> None:
    """Only a kind that is right is an answer; no sentence is in both parts, whatever the order of the file."""
    examples = [
        {"input": f"Sentence: {sentence}. \nQuestion: {question}? \nCategory: {kind}.", "target": [answer]}
        for sentence in "abcdef"
        for question, kind, answer in (
            ("How long", "Event Duration", "Yes."),
            ("Still", "Transient v. Stationary", "Yes."),
            ("How often", "Event Duration", "No."),
        )
    ]
    (tmp_path / "task.json").write_text(json.dumps({"examples": examples}))
    rows = read_rows(tmp_path / "task.json")
    assert rows[:2] == [
        {"instruction": INSTRUCTION, "input": "Sentence: a.\nQuestion: How long?", "output": "Event Duration"},
        {"instruction": INSTRUCTION, "input": "Sentence: a.\nQuestion: Still?", "output": "Transient v. Stationary"},
    ]
    assert len(rows) == 12
    train, held_out = split_rows(rows, num_held_out=2)
    sentences = [{row["input"].split("\n")[0] for row in part} for part in (train, held_out)]
    assert [len(part) for part in sentences] == [4, 2] and not sentences[0] & sentences[1]
    assert split_rows(rows[::-1], num_held_out=2)[1] == held_out[::-1]
    with pytest.raises(DataError, match="6 sentences are too few"):
        split_rows(rows, num_held_out=6)
    (tmp_path / "task.json").write_text("[]")
    with pytest.raises(DataError, match="not in the form of subtask 19"):
        read_rows(tmp_path / "task.json")


# ---- images -----------------------------------------------------------------------------------------


def test_idx_file_is_read_with_its_shape(tmp_path: Path) -> None:
    """Two zeros, type 8, the number of axes, their lengths, then the bytes."""
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\x03" + struct.pack(">3i", 2, 1, 3) + bytes(range(6))))
    assert read_idx(path).tolist() == [[[0, 1, 2]], [[3, 4, 5]]]


@cases(
    ("content", "message"),
    [
        (
            gzip.compress(b"\0\0\x08\x01" + struct.pack(">i", 3) + b"ab", mtime=0),
            r"says shape \(3,\) but has 2 numbers",
        ),
        (gzip.compress(b"\0\0\x0d\x01" + struct.pack(">i", 1) + b"abcd", mtime=0), "no idx file of bytes"),
        (gzip.compress(b"\0\0", mtime=0), "no idx file of bytes"),
        (b"plain", "no gzip file"),
    ],
)
def test_idx_file_of_another_form_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """Too short, of another type, or not compressed."""
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(path)


def test_classes_are_chosen_in_the_order_of_the_file() -> None:
    """Of each class the first few."""
    rows = Labelled(np.arange(6, dtype=np.uint8), np.array([3, 1, 3, 5, 1, 3], np.uint8))
    assert of_classes(rows, (1, 3)).images.tolist() == [0, 1, 2, 4, 5]
    assert of_classes(rows, (1, 3), most=1).labels.tolist() == [3, 1]


def test_npz_is_the_same_bytes_each_time_and_numpy_reads_it(tmp_path: Path) -> None:
    """There is no date in it."""
    arrays = {"image": np.zeros((2, 3), np.uint8), "label": np.array(["sandal", "bag"])}
    for name in ("a.npz", "b.npz"):
        write_npz(tmp_path / name, **arrays)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert b"\0\0\x21\0" in (tmp_path / "a.npz").read_bytes()  # 1980-01-01, 00:00
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        assert found["label"].tolist() == ["sandal", "bag"]


def test_pretraining_is_repeatable_and_done_once(tmp_path: Path) -> None:
    """The same recipe gives the same file; a second call trains nothing, another recipe or a damaged file does."""
    recipe = Recipe(width=8, inner=8, num_blocks=1, num_heads=2, side=4, patch=2, epochs=1, batch=4, threads=1)
    images, labels = np.arange(128, dtype=np.uint8).reshape(8, 4, 4), np.array([0, 1] * 4)
    assert pretrain(images, labels, tmp_path / "a", recipe=recipe)
    assert not pretrain(images, labels, tmp_path / "a", recipe=recipe)
    assert pretrain(images, labels, tmp_path / "b", recipe=recipe)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]
    (tmp_path / "a/model.safetensors").write_bytes(b"damaged")
    assert pretrain(images, labels, tmp_path / "a", recipe=recipe)


# ---- stories15M -------------------------------------------------------------------------------------


def _weights(header: stories15m.Header) -> dict[str, Any]:
    random = np.random.default_rng(0)
    weights = {name: random.normal(0, 0.4, shape).astype(np.float32) for name, shape in header.layout().items()}
    rates = 10000.0 ** -(np.arange(0, header.head_width, 2) / header.head_width)
    angles = np.outer(np.arange(header.context), rates)
    return {**weights, "cosines": np.cos(angles).astype(np.float32), "sines": np.sin(angles).astype(np.float32)}


def _llama2_file(header: stories15m.Header, weights: Mapping[str, Any]) -> bytes:
    words = [("<unk>", 0.0), ("\n<s>\n", 0.0), ("\n</s>\n", 0.0), *((f"<0x{byte:02X}>", 0.0) for byte in range(256))]
    words += [("a", -3.0), ("b", -4.0), ("ab", -1.0), (" ab", -2.0), (" ", -5.0)]
    data = struct.pack("<7i", *(getattr(header, name) for name in stories15m.Header.__dataclass_fields__))
    data += b"".join(weights[name].tobytes() for name in header.layout()) + struct.pack("<i", 3)
    return data + b"".join(struct.pack("<fi", score, len(text)) + text.encode() for text, score in words)


def _llama2_forward(header: stories15m.Header, weights: Mapping[str, Any], ids: list[int]) -> Any:
    """Logits of the last token, one position after the other, with neighbours turned: what ``run.c`` does."""

    def norm(x: Any, scale: Any) -> Any:
        return x / np.sqrt((x * x).mean() + 1e-5) * scale

    def turn(x: Any, position: int) -> Any:
        pairs, cosine, sine = (
            x.reshape(-1, header.head_width // 2, 2),
            *(weights[n][position] for n in ("cosines", "sines")),
        )
        even, odd = pairs[..., 0], pairs[..., 1]
        return np.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).reshape(-1, header.head_width)

    keys: list[list[Any]] = [[] for _ in range(header.num_blocks)]
    values: list[list[Any]] = [[] for _ in range(header.num_blocks)]
    x = np.zeros(header.width)
    for position, token in enumerate(ids):
        x = weights["table"][token]
        for block in range(header.num_blocks):
            h = norm(x, weights["attention_norm"][block])
            query = turn(weights["q"][block] @ h, position)
            keys[block].append(turn(weights["k"][block] @ h, position))
            values[block].append((weights["v"][block] @ h).reshape(-1, header.head_width))
            mixed = []
            for head in range(header.num_heads):
                own = head * header.num_kv_heads // header.num_heads
                scores = np.array([key[own] @ query[head] for key in keys[block]]) / np.sqrt(header.head_width)
                shares = np.exp(scores - scores.max())
                mixed.append(sum(s * v[own] for s, v in zip(shares / shares.sum(), values[block], strict=True)))
            x = x + weights["o"][block] @ np.concatenate(mixed)
            h = norm(x, weights["mlp_norm"][block])
            gate = weights["gate"][block] @ h
            x = x + weights["down"][block] @ (gate / (1 + np.exp(-gate)) * (weights["up"][block] @ h))
    return weights["table"] @ norm(x, weights["norm"])


def test_converted_stories_give_the_logits_of_llama2_c(tmp_path: Path) -> None:
    """What transformers makes of the folder, against a plain forward in llama2.c's own order of rotary pairs."""
    import torch
    from transformers import AutoModelForCausalLM

    weights, ids = _weights(TINY), [1, 259, 262, 5, 17]
    (tmp_path / "llama2.data").write_bytes(_llama2_file(TINY, weights))
    stories15m.convert(tmp_path / "llama2.data", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"), attn_implementation="eager").eval()
    with torch.no_grad():
        got = model(input_ids=torch.tensor([ids])).logits[0, -1].numpy()
    want = _llama2_forward(TINY, weights, ids)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def test_converted_tokenizer_joins_the_best_scored_pair_first(tmp_path: Path) -> None:
    """A space comes before the text, unknown letters become bytes, and what was cut can be put together again."""
    from transformers import AutoTokenizer

    (tmp_path / "llama2.data").write_bytes(_llama2_file(TINY, _weights(TINY)))
    stories15m.convert(tmp_path / "llama2.data", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "model"))
    ids = tokenizer("abcé")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[1:] == ["<0x63>", "<0xC3>", "<0xA9>"]
    assert ids[0] == 262
    assert tokenizer.decode(ids) == "abcé"


def test_pieces_that_join_are_ordered_by_score() -> None:
    """Best result first; the parts' places decide between cuts of one result."""
    pieces = [stories15m.Piece(f"<{index}>", 0.0) for index in range(259)]
    pieces += [stories15m.Piece(text, score) for text, score in (("a", 0), ("aa", -2), ("aaa", -1))]
    assert stories15m.merges_of(pieces) == [("a", "aa"), ("aa", "a"), ("a", "a")]


@cases(
    ("keep", "message"), [(10, "which are no sizes"), (500, "ends within 'table'"), (-3, "tokenizer ends after|ends")]
)
def test_stories_file_that_is_cut_is_refused(tmp_path: Path, keep: int, message: str) -> None:
    """Within the sizes, the weights, or the vocabulary."""
    data = _llama2_file(TINY, _weights(TINY))
    (tmp_path / "x").write_bytes(data[:keep] if keep > 0 else data[:-25])
    with pytest.raises(ModelError, match=message):
        stories15m.convert(tmp_path / "x", tmp_path / "model")
