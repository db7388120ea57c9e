"""Wrong input of every kind: one error line, the stated exit code, nothing left; single keys are in tests of keys."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from tests.support.bad_input import ANSWER_S, BASE_JOB, Answer, Case, Place, Workshop, problems
from tests.support.cluster import TEMPLATE
from tests.support.processes import agents_below

PARTS = 8
PLAN = "plan job.toml --assume 2"
TRAIN = "train job.toml --local 1 --out out"
KILL_S = 0.8 * ANSWER_S
GOOD = "w1 w2,good\nw3 w4,bad\n" * 8
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 90868376\n"
INIT = "init --yes --data rows.csv --model model new.toml"
GONE = "r20200101-000000-00000000"
SWEEP = "what-if {run} --sweep *.compute=1,2"


def case(line: str, code: int, *says: str, **more: Any) -> Case:
    """Wrong input and what has to be said of it."""
    return Case(line, code, says, **more)


def writing(name: str, content: str | bytes) -> Callable[[Place], object]:
    """Write one file; ``model/`` is a folder of this case alone then."""

    def prepare(place: Place) -> None:
        if name.startswith("model/"):
            place.own_model()
        place.write(name, content)

    return prepare


def changing(old: str, new: str) -> Callable[[Place], object]:
    """Replace a text of the job."""
    assert old in BASE_JOB
    return writing("job.toml", BASE_JOB.replace(old, new))


JOBS: dict[str, tuple[str | bytes, str]] = {
    "a duplicate key": (BASE_JOB + "rounds = 2\n", "rounds"),
    "a backslash path": (BASE_JOB.replace('"model"', '"C:\\models\\mini"'), "backslash"),
    "a value without quotes": (BASE_JOB.replace('"model"', "model"), "line"),
    "JSON": ('{"model": {"path": "model"}}', "toml"),
    "a byte order mark before a wrong key": ("\ufeff" + BASE_JOB + "seeds = 3\n", "train.seeds"),
    "nothing": ("", "model"),
    "bytes": (bytes(range(256)), "utf-8"),
    "20 MB": (BASE_JOB + "#" * 20_000_000, "bytes"),
}
ADAPTERS = """
    lora[r=-3] lora[r=1000000000] lora[r=2.5] lora[rank=8] lora[alpha='x'] lora[attn_matrices=['z']]
    lora[attn_matrices='q'] lora[dropout=2] lora[composition_mode='minus'] lora[r=8,r=4] lora[leave_out=[99]]
    lora[init_weights='nothing'] seq_bn[reduction_factor=-2] seq_bn[reduction=8] seq_bn[non_linearity='none']
    seq_bn[scaling='big'] seq_bn[mh_adapter=1] seq_bn[output_adapter=False] seq_bn[cross_adapter=True]
    seq_bn[dropout=-1] seq_bn[is_parallel='yes'] loreft[r=0] loreft[layers=[99]] loreft[prefix_positions=-1]
    mtl_lora[n_up_projection=0] mlp[leave_out=[99]] seq_bn[reduction_factor=__import__('os').getpid()]
""".split()  # noqa: SIM905
VALUES: dict[str, tuple[str, ...]] = {
    "train.microbatches": ("9",),
    "model.path": ('""', '" "', '"no-such-model"', '"train.csv"', '"bert-base-uncased"'),
    "data.train": ('"no-such.csv"', '"model"', '"train.txt.gz"'),
    "data.eval": ('"no-such.csv"', '"model"'),
    "data.text": ('""', '"label"'),
    "data.label": ('""', '"text"'),
    "data.labels": ('["a"]', '["a","a"]', '["good",""]'),
    "data.split": ('"even"', '"dirichlet:0"', '"dirichlet:x"', '"dirichlet:-1"', '"dirichlet:inf"'),
    "data.owners": ("3",),
    "adapter.config": tuple(map(json.dumps, ADAPTERS)),
    "unfreeze.at": ("[0]", "[3,2]", "[2,2]", '"soon"', "[-1]"),
    "privacy.private_blocks": ("99",),
    "operations.table": ('"none.json"', '"model"', '"train.csv"', '"{}"', '"a\\u0000b"', '"~nouser_x/t.json"'),
}
"""Values that no rule of a single key refuses."""


def job_cases() -> Iterator[Case]:
    """Files that are no job, and values that only the rest of the job, the model or the rows show to be wrong."""
    for content, says in JOBS.values():
        yield case(PLAN, 5, says, prepare=writing("job.toml", content))
    for key, values in VALUES.items():
        for value in values:
            yield case(f"{PLAN} --set {shlex.quote(f'{key}={value}')}", 5, key)
    yield case("plan none.toml --assume 2", 5, "none.toml")
    yield case("plan model --assume 2", 5, "model", "folder")
    yield case("plan train.csv --assume 2", 5, "train.csv", "ringtune init")
    yield case(f"{PLAN} --set train.seedx=1", 5, "train.seedx", "did you mean")
    yield case(f"{PLAN} --set train.seed=-1", 5, "train.seed")
    yield case(
        PLAN, 5, "train", "table", prepare=writing("job.toml", "train = 3\n" + BASE_JOB[: BASE_JOB.index("[tr")])
    )
    yield case(PLAN, 6, "train.batch_size", prepare=changing("batch_size = 8", "batch_size = 20000000"))
    yield case(
        PLAN, 3, "acme/none", "hf download acme/none", "name a folder", prepare=changing('"model"', '"acme/none"')
    )
    yield case(TRAIN, 5, "model.safetensors", "layer.1.attention.self.query.weight", "not finite",
               prepare=without_numbers, leaves="out")  # fmt: skip


def without_numbers(place: Place) -> None:
    """Write a model whose query weights in block 1 are NaN, and a job that scores by magnitude."""
    weights = place.own_model() / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("layer.1.attention.self.query.weight"))
    tensors[name] = np.full_like(tensors[name], np.nan)
    place.write("model/model.safetensors", save(tensors))
    place.write("job.toml", BASE_JOB + '[operations]\npolicy = "magnitude"\ncompute = 0.5\n')


ROWS: dict[str, tuple[str, str | bytes, tuple[str, ...]]] = {
    "nothing": ("train.csv", "", ("rows",)),
    "another column": ("train.csv", "sentence,label\n" + GOOD, ("text", "sentence")),
    "an open quote": ("train.csv", 'text,label\n"w1,good\nw2,bad\n', ("line",)),
    "half a UTF-16": ("train.csv", ("text,label\n" + GOOD).encode("utf-16")[:-1], ("utf-16",)),
    "no UTF-8": ("train.csv", "text,label\nw1 \xe9,good\n".encode() + b"\xe9,bad\n", ("utf-8", "line 3")),
    "zeros": ("train.csv", bytes(1000), ("line",)),
    "a cell of 20 MB": ("train.csv", "text,label\n" + "w1 " * 7_000_000 + ",good\nw2,bad\n", ("line 2", "characters")),
    "a list as label": ("train.jsonl", '{"text": "w1", "label": ["good"]}\n', ("line 1", "label")),
    "deep nesting": ("train.jsonl", "[" * 100_000 + "\n", ("line 1",)),
    "a prompt and its completion": ("train.jsonl", '{"prompt": "w1", "completion": "w2"}\n', ("text", "prompt")),
    "a text file": ("train.txt", "text,label\n" + GOOD, (".txt",)),
    "no parquet": ("train.parquet", "text,label\n" + GOOD, (".parquet",)),
    "no suffix": ("train", "text,label\n" + GOOD, ("suffix",)),
}


def row_cases() -> Iterator[Case]:
    """Rows that can't be read or do not fit; they are read before anything is started or written."""

    def training(name: str, content: str | bytes) -> Callable[[Place], object]:
        return lambda place: (place.write(name, content), changing("train.csv", name)(place))

    for name, content, words in ROWS.values():
        yield case(TRAIN, 5, *words, prepare=training(name, content))
    one = training("train.csv", "text,label\n" + "w1,good\n" * 7)
    yield case(TRAIN, 5, "class", prepare=one, leaves="out")
    for text, says, leaves in (
        ("text,label\nw1,good\nw2,neutral\n", "neutral", "out"),
        ("text,klass\nw1,good\n", "label", ""),
        ("text,label\n", "rows", ""),
    ):
        yield case(f"{TRAIN} --set data.eval=other.csv", 5, says, prepare=writing("other.csv", text), leaves=leaves)
    yield case(f"""{TRAIN} --set 'data.labels=["good","fine"]'""", 5, "bad", "data.labels", leaves="out")
    few = writing("train.csv", "text,label\nw1,good\n")
    yield case("train job.toml --local 2 --out out", 5, "rows", prepare=few, leaves="out")
    for text, says in (("text,label\n", "one line and no rows"), ("a,b\n1,2\n3,4\n", "can't tell what is")):
        yield case(INIT, 5, says, prepare=writing("rows.csv", text))


CONFIG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another family": ({"model_type": "t5"}, ("t5",)),
    "code": ({"auto_map": {"AutoModel": "evil.py"}}, ("auto_map",)),
    "hidden_size of another model": ({"hidden_size": 64}, ("shape",)),
    "more blocks than weights": ({"num_hidden_layers": 9}, ("config.json",)),
    "a million blocks": ({"num_hidden_layers": 1_000_000}, ("config.json", "1,000,000 blocks")),
    "a vocabulary of another size": ({"vocab_size": 77}, ("the embedding 77 rows", "vocab_size")),
    "dropout of text": ({"hidden_dropout_prob": "x"}, ("hidden_dropout_prob",)),
}
FILES: dict[str, tuple[str, str | bytes | None, int, tuple[str, ...]]] = {
    "no config": ("config.json", None, 5, ("config.json",)),
    "config that is no JSON": ("config.json", "{", 5, ("config.json", "json")),
    "a config that is a pointer": ("config.json", LFS, 5, ("git lfs pull",)),
    "no weights": ("model.safetensors", None, 5, ("safetensors",)),
    "weights that are a pointer": ("model.safetensors", LFS, 5, ("git lfs pull",)),
    "a header that is too long": ("model.safetensors", b"\xff" * 16, 7, ("model.safetensors",)),
    "weights that are a pickle": ("model.safetensors", b"\x80\x04\x95" + bytes(40), 7, ("model.safetensors",)),
}
TOKENIZER: dict[str, tuple[tuple[str, ...], str | None, tuple[str, ...]]] = {
    "none": (("tokenizer.json", "vocab.txt", "tokenizer_config.json"), None, ("tokenizer",)),
    "a pointer": (("tokenizer.json",), LFS, ("git lfs pull",)),
    "no JSON": (("tokenizer.json",), "{", ("tokenizer",)),
    "code": (("tokenizer_config.json",), '{"auto_map": {"AutoTokenizer": ["evil.py", null]}}', ("auto_map",)),
}


def model_cases() -> Iterator[Case]:
    """Model folders with files that are missing, damaged, pointers, of another family, or that name code."""

    def config(changes: dict[str, Any]) -> Callable[[Place], object]:
        def prepare(place: Place) -> None:
            path = place.own_model() / "config.json"
            place.write("model/config.json", json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes))

        return prepare

    def without(names: tuple[str, ...], content: str | bytes | None) -> Callable[[Place], object]:
        def prepare(place: Place) -> None:
            model = place.own_model()
            for name in names:
                (model / name).unlink(missing_ok=True)
            if content is not None:
                place.write(f"model/{names[0]}", content)

        return prepare

    def cut(place: Place) -> None:
        path = place.own_model() / "model.safetensors"
        place.write("model/model.safetensors", path.read_bytes()[:-1000])

    for changes, says in CONFIG.values():
        yield case(PLAN, 5, *says, prepare=config(changes))
    for name, content, code, says in FILES.values():
        yield case(PLAN, code, *says, prepare=without((name,), content))
    for names, text, says in TOKENIZER.values():
        yield case(TRAIN, 5, *says, prepare=without(names, text), leaves="out")
    yield case(PLAN, 7, "model.safetensors", prepare=cut)


def command_cases() -> Iterator[Case]:
    """Options that contradict each other or do not exist, bad addresses, and runs that do not end well."""
    table: tuple[tuple[str, int, tuple[str, ...]], ...] = (
        ("plan --no-such", 2, ("no such option", "--no-such")),
        ("eval", 2, ("missing argument",)),
        ("nodes --coordinator 127.0.0.1", 2, ("--coordinator", "host:port")),
        ("nodes --coordinator :7070", 2, ("--coordinator", "host:port")),
        ("trian job.toml", 2, ("no such command", "train")),
        ("train job.toml --out out --local -1", 2, ("--local",)),
        ("train job.toml --out out --local x", 2, ("--local",)),
        ("train job.toml --out out --local 100000", 6, ("--local",)),
        ("train job.toml --out out --local 1 --join-s -1", 2, ("--join-s",)),
        ("train job.toml --out out --local 1 --set train.seed", 2, ("=",)),
        ("train job.toml --out out --local 1 --resume", 2, ("out",)),
        ("train job.toml --out out --local 1 --profile no.json", 5, ("no.json", "ringtune measure")),
        ("train job.toml --out out --local 1 --profile train.csv", 5, ("train.csv", "ringtune measure")),
        ("train job.toml --out out --coordinator {node}", 3, ("node", "coordinator")),
        ("train job.toml --out out --coordinator 127.0.0.1:9", 3, ("127.0.0.1:9", "ringtune coordinator")),
        ("train job.toml --out out --coordinator {coordinator} --nodes 3 --join-s 0", 4, ("3 nodes", "0 have joined")),
        ("nodes --coordinator 192.0.2.1:7070", 2, ("--insecure",)),
        ("nodes --coordinator {node}", 3, ("node", "coordinator")),
        ("plan job.toml --assume -2", 2, ("--assume",)),
        ("plan job.toml --assume 10000000", 2, ("--assume",)),
        ("plan job.toml --assume 2 --memory much", 2, ("much",)),
        ("plan job.toml --assume 2 --memory 1KiB", 6, ("KiB",)),
        ("plan job.toml --assume 2 --microbatches 0", 2, ("microbatches",)),
        ("plan job.toml --assume 2 --microbatches x", 2, ("microbatches",)),
        ("plan job.toml --assume 2 --wire float8", 2, ("float8",)),
        ("plan job.toml --assume 2 --profile {run}/profile.json", 2, ("--assume", "profile")),
        ("measure job.toml --save p.json", 2, ("--local",)),
        ("measure job.toml --save p.json --local 0", 2, ("--local",)),
        ("coordinator --bind 0.0.0.0:0", 2, ("--insecure",)),
        ("coordinator --bind here", 2, ("--bind", "here")),
        ("coordinator --bind {coordinator}", 3, ("port",)),
        ("coordinator --lease 0", 2, ("--lease", "0.1")),
        ("node --coordinator 10.0.0.1:7000", 2, ("--insecure",)),
        ("node --coordinator {coordinator} --name 'A b'", 2, ("A b",)),
        ("node --coordinator {coordinator} --share 4/4", 2, ("--share", "4/4")),
        ("node --coordinator {coordinator} --memory x", 2, ("'x'", "size")),
        ("node --coordinator {coordinator} --device tpu", 2, ("--device", "tpu")),
        ("node --coordinator {coordinator} --data none.csv", 5, ("--data", "none.csv")),
        ("node --coordinator {coordinator} --model none", 5, ("--model", "none")),
        ("node --coordinator {coordinator} --threads -1", 2, ("--threads", "-1")),
    )  # fmt: skip
    yield from (case(line, code, *says) for line, code, says in table)
    yield case("node --coordinator 127.0.0.1:9 --join-s 0", 3, "127.0.0.1:9", is_process=True)
    diverging = "--set train.learning_rate=1000 --set train.weight_decay=10 --set train.rounds=20"
    yield case(f"{TRAIN} {diverging}", 1, "diverged at step", "train.learning_rate", leaves="out")
    killed = f"{TRAIN} --set train.rounds=10000"
    yield case(killed, 4, "node-0", "sigkill", "--resume", prepare=kill_soon, leaves="out")


def kill_soon(place: Place) -> None:
    """Kill the node of a run of this process as soon as the run has a step."""

    def kill() -> None:
        deadline_s, metrics = time.monotonic() + KILL_S, place.folder / "out" / "metrics.jsonl"
        while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        agents_below(os.getpid())["node-0"].kill()

    threading.Thread(target=kill, name="kill-soon").start()


def run_cases() -> Iterator[Case]:
    """What is asked of a finished run, of half of one, and of places that nobody can write."""
    table: tuple[tuple[str, int, tuple[str, ...]], ...] = (
        ("sim job.toml", 2, ("job.toml", "plan")),
        ("what-if {run} --change node-0.speed=2", 5, ("speed",)),
        ("what-if {run} --change node-0.compute", 2, ("=",)),
        ("what-if {run} --change node-0.compute=nan", 5, ("compute",)),
        ("what-if {run} --change link.node-0.pi.rate=1e6", 5, ("pi", "node-1")),
        ("what-if {run} --change link.node-0.node-0.rate=1e6", 5, ("link.node-0.node-0",)),
        ("what-if {run} --change link.*.*.latency=-1", 5, ("latency",)),
        ("what-if {run} --drop node-0 --drop node-1", 5, ("--drop", "node-")),
        ("what-if {run} --add a --like b --replan job.toml", 5, ("--like", "node-0")),
        ("what-if {run} --sweep *.compute=1:2:100000 --sweep link.*.*.rate=1e6:2e6:100000", 2, ("cells",)),
        ("what-if {run} --sweep *.compute=", 2, ("compute",)),
        ("what-if {run} --sweep *.compute=a,b", 5, ("compute",)),
        (f"{SWEEP} --backend slurm", 2, ("slurm",)),
        (f"{SWEEP} --plot a.txt", 2, (".txt",)),
        ("what-if {run} --replan none.toml", 5, ("none.toml",)),
        ("eval none --data eval.csv", 2, ("none",)),
        ("eval {run} --data none.csv", 5, ("none.csv",)),
        ("eval {run} --data model", 5, ("model",)),
        ("export none --out given", 2, ("none",)),
        ("predict {run} --data eval.csv --max-new-tokens 9999", 2, ("--max-new-tokens", "4096")),
        ("page model", 2, ("plan.json", "--out")),
        (f"page {GONE} --coordinator 127.0.0.1:1", 3, ("answers",)),
        (f"page {GONE} --coordinator {{coordinator}}", 2, ("runs",)),
        ("eval half --data eval.csv", 5, ("half",)),
        ("export half --out given", 5, ("half",)),
        (TRAIN.replace("out out", "out taken"), 9, ("taken",)),
        (TRAIN.replace("out out", "out taken/run"), 9, ("taken",)),
        (TRAIN.replace("out out", "out /proc/run"), 9, ("/proc",)),
        (TRAIN.replace("out out", "out {run}"), 2, ("--replace",)),
        ("export {run} --out taken", 2, ("taken",)),
        ("export {run} --out /proc/given", 9, ("/proc",)),
        ("measure job.toml --local 1 --save /proc/p.json", 9, ("/proc",)),
        ("sim {run} --out /proc/sim", 9, ("/proc",)),
        ("sim {run} --out taken", 9, ("taken",)),
        (f"{SWEEP} --csv /proc/a.csv", 9, ("/proc",)),
        (f"{SWEEP} --csv model", 9, ("model",)),
    )  # fmt: skip
    yield from (case(line, code, *says, prepare=unfinished) for line, code, says in table)
    yield case(SWEEP, 2, "'joblib'", "pip install", without="joblib")
    neutral = writing("other.csv", "text,label\nw1,neutral\n")
    yield case("eval {run} --data other.csv", 5, "neutral", prepare=neutral)
    for mode, says in ((0o644, ("others may read token", "chmod 600")), (0o600, ("token",))):
        yield case("page {run} --web 0.0.0.0:0 --web-token token", 2, *says,
                   prepare=lambda place, mode=mode: place.write("token", "short").chmod(mode))  # fmt: skip
    for line, code, name in (
        ("sim copy", 7, "plan.json"),
        ("sim copy", 7, "profile.json"),
        ("eval copy --data eval.csv", 5, "job.toml"),
        ("eval copy --data eval.csv", 7, "adapter/adapter.safetensors"),
        ("export copy --out given", 7, "adapter/adapter_config.json"),
    ):
        yield case(line, code, name.split("/")[-1], prepare=half_of(name))


def unfinished(place: Place) -> None:
    """Write the folder ``half`` of a run that did not end, and the file ``taken``."""
    place.write("taken", "a file")
    place.write("half/job.toml", BASE_JOB)
    for name in ("plan.json", "profile.json"):
        place.write(f"half/{name}", (place.run / name).read_bytes())


def half_of(name: str) -> Callable[[Place], object]:
    """Copy the run to the folder ``copy``, one file of it in half."""

    def prepare(place: Place) -> None:
        for path in place.run.rglob("*"):
            if path.is_file() and "logs" not in path.parts:
                place.write(f"copy/{path.relative_to(place.run)}", path.read_bytes())
        content = (place.folder / "copy" / name).read_bytes()
        end = content.index(b'"') + 2 if name == "job.toml" else len(content) // 2
        place.write(f"copy/{name}", content[:end])

    return prepare


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """A model, rows, a finished run, a coordinator and a node."""
    with Workshop(tmp_path_factory.mktemp("bad-input"), TEMPLATE.get()) as made:
        yield made


def test_case_that_the_parser_refuses_is_a_problem() -> None:
    """Negative control: a misspelt option gets the right exit code, and is noticed all the same."""
    line = "error: No such option: --lease-s (did you mean --lease?); see 'ringtune coordinator --help'"
    answer = Answer(code=2, output="", errors=line)
    (found,) = problems(case("coordinator --lease-s 0", 2, "--lease"), answer)
    assert found.startswith("the parser refuses it")
    assert not problems(case("coordinator --lease-s 0", 2, "no such option"), answer)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sampled(2)
def test_wrong_input_gets_its_answer(workshop: Workshop, part: int) -> None:
    """One line that begins with ``error:``, its words and exit code; no traceback, no file, no process."""
    found = []
    every = itertools.chain(job_cases(), row_cases(), model_cases(), command_cases(), run_cases())
    for wrong in itertools.islice(every, part, None, PARTS):
        assert wrong.says, "any error of the same exit code would do"
        answer = workshop.answer(wrong)
        if said := problems(wrong, answer):
            found.append((wrong.line, wrong.says, said, answer.code, answer.errors))
    assert not found


def test_right_job_is_no_bad_input(workshop: Workshop) -> None:
    """What all cases are a change of is itself planned without a complaint."""
    answer = workshop.answer(case(PLAN, 0))
    said = [line for line in answer.errors.splitlines() if not line.endswith(" ...")]  # what takes 2 s is told
    assert (answer.code, said, answer.left) == (0, [], ())
