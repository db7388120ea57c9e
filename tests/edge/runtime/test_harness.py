"""What lm-eval asks of a model, beside the plain library: likelihoods of continuations and texts, and answers.

lm-eval itself is a stand-in: a module that asks a model as its ``simple_evaluate`` does.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edge.model.heads import text_logits
from edge.runtime import inference
from edge.runtime.harness import HarnessModel, Likelihood, _windows, main
from ringtune.errors import DataError
from ringtune.job.job import load_job
from tests.support import chat_models
from tests.support.processes import source_environment
from tests.support.tiny_families import write_family

JOB = '[model]\npath = "{model}"\ntask = "causal-lm"\n[train]\nmethod = "hift"\n'
LONGEST = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, and a random Llama with a begin token."""
    made = tmp_path_factory.mktemp("harness")
    write_family(made / "base", "llama", num_blocks=2, with_decoder=True, max_position_embeddings=LONGEST)
    chat_models.write_tokenizer(made / "base", bos=True)
    (made / "job.toml").write_text(JOB.format(model=made / "base"), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> HarnessModel:
    """The model of the job."""
    return HarnessModel(load_job(folder / "job.toml"), folder / "base", lambda: None)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[list[int], list[int]], Likelihood]:
    """The likelihood of tokens behind others, by one forward of the library."""
    library = AutoModelForCausalLM.from_pretrained(str(folder / "base")).eval()

    def scored(before: list[int], ids: list[int]) -> Likelihood:
        with torch.no_grad():
            logits = library(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1].double()
        wanted = torch.tensor(ids)
        each = logits.log_softmax(-1)[range(len(ids)), wanted]
        return Likelihood(float(each.sum()), bool((logits.argmax(-1) == wanted).all()))

    return scored


def ask(*args: Any) -> Any:
    """A request."""
    return SimpleNamespace(args=args)


def test_continuations_have_the_likelihood_of_the_library(model: HarnessModel, folder: Path, plain: Any) -> None:
    """Choices of one question in a row; blanks before a continuation belong to it, and no context is a begin token."""
    encode = AutoTokenizer.from_pretrained(folder / "base")
    pairs = [("yes no", " w1"), ("yes no", " yes"), ("yes no  ", "w1"), ("", "no"), ("<s>ye", "s no")]
    found = model.loglikelihood([ask(*pair) for pair in pairs])
    for (context, continuation), one in zip(pairs, found, strict=True):
        before = encode(context.removeprefix("<s>").rstrip())["input_ids"] if context else [1]
        whole = encode(context.removeprefix("<s>") + continuation)["input_ids"]
        wanted = plain(before, whole[len(before) :])
        assert one.log == pytest.approx(wanted.log, rel=1e-5) and one.is_greedy == wanted.is_greedy
    likeliest = model.generate_until([ask("yes no", {"max_gen_toks": 1})])[0]
    assert model.loglikelihood([ask("yes no", likeliest)])[0].is_greedy
    assert not all(one.is_greedy for one in found)


def test_long_texts_are_scored_in_windows(model: HarnessModel, folder: Path, plain: Any) -> None:
    """Each token once, the begin token too, as lm-eval does; a piece has as much before it as fits.

    Long contexts are cut at their beginning.
    """
    ids = list(range(10))
    assert [(list(a), list(b)) for a, b in _windows(ids, 99, 4)] == [
        ([99], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    text = "yes no abc " * 6
    ids = AutoTokenizer.from_pretrained(folder / "base")(text)["input_ids"]
    assert ids[0] == 1 and LONGEST < len(ids) < 3 * LONGEST
    wanted = sum(plain(list(before), list(piece)).log for before, piece in _windows(ids, 1, LONGEST))
    (found,) = model.loglikelihood_rolling([ask(text)])
    assert found == pytest.approx(wanted, rel=1e-5)
    (cut,) = model.loglikelihood([ask(text, "no")])
    whole = [1, *AutoTokenizer.from_pretrained(folder / "base")(text + "no", add_special_tokens=False)["input_ids"]]
    before = [1, *AutoTokenizer.from_pretrained(folder / "base")(text.rstrip(), add_special_tokens=False)["input_ids"]]
    last = whole[len(before) :]
    assert cut.log == pytest.approx(plain(before[-(LONGEST + 1 - len(last)) :], last).log, rel=1e-5)


def test_logits_of_a_long_text_are_made_in_parts(model: HarnessModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few tokens at a time; likelihoods, and whether all tokens are the likeliest, are those of one part."""

    def greedy(ids: list[int]) -> list[int]:
        while len(ids) < 13:
            ids = [*ids, int(model._model.next_logits(ids).argmax())]
        return ids

    likeliest = greedy([1])
    misses = greedy([1, likeliest[1] ^ 1]), [*likeliest[:-1], likeliest[-1] ^ 1], likeliest * 2
    each = [ids[1:24] for ids in (likeliest, *misses)]
    whole, sizes = [model._scored([1], ids) for ids in each], list[int]()

    def logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(hidden.shape[1])
        return text_logits(head, hidden)

    monkeypatch.setattr(inference, "_LOGITS_AT_ONCE", 5)
    monkeypatch.setattr(inference, "text_logits", logits)
    for ids, wanted in zip(each, whole, strict=True):
        one = model._scored([1], ids)
        assert one.log == pytest.approx(wanted.log, rel=1e-6) and one.is_greedy == wanted.is_greedy
    assert sizes == [5, 5, 2] * 3 + [5, 5, 5, 5, 3]
    assert [one.is_greedy for one in whole] == [True, False, False, False]


def test_answers_end_at_the_texts_of_a_task(model: HarnessModel) -> None:
    """Greedy unless a task draws, by each of lm-eval's names for their length; a context that leaves no room is cut."""
    (text,) = model.generate_until([ask("yes", {"until": [], "max_gen_toks": 12})])
    (again,) = model.generate_until([ask("yes", {"until": text[3:5], "max_gen_toks": 12})])
    assert again == text.partition(text[3:5])[0] and len(text) >= 5
    plain = {"do_sample": False, "temperature": 3.0, "max_gen_toks": None}
    alike = [{**plain, name: 12} for name in ("max_new_tokens", "max_tokens", "max_completion_tokens")]
    alike.append({"temperature": 3.0, "top_k": 1, "max_gen_toks": 12, "max_tokens": 1})
    assert model.generate_until([ask("yes", settings) for settings in alike]) == [text] * len(alike)
    drawn = model.generate_until([ask("yes", {"temperature": 3.0, "max_gen_toks": 12})] * 2)
    assert drawn[0] != drawn[1]
    assert model.generate_until([ask("yes no " * 30, {"max_gen_toks": 500})])


@pytest.mark.parametrize("template", [chat_models.MISTRAL, chat_models.MARKED])
def test_contexts_are_written_in_the_template_as_the_library_does(folder: Path, tmp_path: Path, template: str) -> None:
    """With the beginning of an answer, or going on with the last message, whose begin token is no second one."""
    base = shutil.copytree(folder / "base", tmp_path / "base")
    chat_models.write_tokenizer(base, template, bos=True)
    (tmp_path / "job.toml").write_text(JOB.format(model=base), encoding="utf-8")
    model = HarnessModel(load_job(tmp_path / "job.toml"), base, lambda: None, is_chat=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    for row in chat_models.conversations(6):
        for history, begins in ((row[:-1], True), (row, False)):
            found = model.apply_chat_template(history, add_generation_prompt=begins)
            assert found == tokenizer.apply_chat_template(
                history, tokenize=False, add_generation_prompt=begins, continue_final_message=not begins
            )
    assert model.chat_template(True) == template
    with pytest.raises(DataError, match="the chat template fails for a context"):
        HarnessModel(_refusing(tmp_path), base, lambda: None, is_chat=True).apply_chat_template(row[:1])


def _refusing(folder: Path) -> Any:
    """A job whose model has a template that refuses every conversation."""
    chat_models.write_tokenizer(folder / "base", "{{ raise_exception('no') }}")
    return load_job(folder / "job.toml")


def test_answer_is_decoded_alone(folder: Path, tmp_path: Path) -> None:
    """As lm-eval does: where the tokenizer drops the blank at the front of a text, an answer has none there."""
    base = shutil.copytree(folder / "base", tmp_path / "base")
    tokens = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    tokens["decoder"] = {"type": "Sequence", "decoders": [tokens["decoder"], {"type": "Fuse"}, strip]}
    (base / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    (tmp_path / "job.toml").write_text(JOB.format(model=base), encoding="utf-8")
    model = HarnessModel(load_job(tmp_path / "job.toml"), base, lambda: None)
    answer = [AutoTokenizer.from_pretrained(base).convert_tokens_to_ids("\u0120w1")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.runtime.harness.next_tokens", lambda *_, **__: iter(answer))
        assert model.generate_until([ask("yes", {})]) == ["w1"]


class _Base:
    """What stands for lm-eval's class of models."""

    def __init__(self) -> None:
        self.is_made = True


def stand_in(monkeypatch: pytest.MonkeyPatch, evaluate: Callable[..., Any]) -> None:
    """Let lm-eval be a module with this ``simple_evaluate``."""
    found: dict[str, Any] = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api.model", "lm_eval.tasks")}
    found["lm_eval"].simple_evaluate = evaluate
    found["lm_eval.api.model"].LM = _Base
    found["lm_eval.tasks"].TaskManager = SimpleNamespace
    for name, module in {**found, "lm_eval.api": ModuleType("lm_eval.api")}.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_figures_are_printed_behind_the_count_of_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line each; tasks of a folder are found, and read from there.

    Odd figures are numbers, nothing or short texts.
    """
    monkeypatch.chdir(Path.cwd())  # and back

    def evaluate(model: Any, tasks: list[str], task_manager: Any, log_samples: bool, apply_chat_template: bool) -> Any:
        assert not apply_chat_template
        assert _Base in type(model).__mro__ and model.is_made and (tasks, log_samples) == (["piqa", "mine"], False)
        assert task_manager.include_path == str(folder) and Path.cwd() == folder
        logs = [one.log for one in model.loglikelihood([ask("yes", " no"), ask("yes", " w1")])]
        odd = {"nan": math.nan, "huge": 10**400, "of_numpy": np.float32(0.5), "array": np.arange(3), 5: "\x1b[2J" * 99}
        piqa = {"alias": "piqa", "acc,none": logs[0] > logs[1], "sum,none": sum(logs)}
        return {"results": {"piqa": piqa, "mine": odd}}

    stand_in(monkeypatch, evaluate)
    output = io.StringIO()
    assert main([str(folder / "job.toml"), str(folder / "base"), "piqa,mine", str(folder)], output) == 0
    first, second, last = (json.loads(line) for line in output.getvalue().splitlines())
    assert (first, second) == ({"done": 1}, {"done": 2})
    assert list(last["tasks"]["piqa"]) == ["acc,none", "sum,none"] and last["tasks"]["piqa"]["sum,none"] < 0
    text = last["tasks"]["mine"].pop("5")
    assert text.isprintable() and len(text) < 999
    assert last["tasks"]["mine"] == {"nan": None, "huge": None, "of_numpy": 0.5, "array": "[0 1 2]"}


LOUD = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name in ("torch", "lm_eval"):
            print(name, "is imported", flush=True)
sys.meta_path.insert(0, Finder())
"""
LM_EVAL = """
import os, sys, types
def simple_evaluate(model, **_):
    print("a table", flush=True)
    os.system("echo a process below")
    return {"results": {"piqa": {"log": model.loglikelihood([types.SimpleNamespace(args=("yes", " no"))])[0].log}}}
api, model, tasks = (types.ModuleType("lm_eval." + name) for name in ("api", "api.model", "tasks"))
model.LM, tasks.TaskManager = object, types.SimpleNamespace
sys.modules |= {each.__name__: each for each in (api, model, tasks)}
"""


@pytest.mark.thorough
def test_process_writes_its_lines_alone(folder: Path, tmp_path: Path, model: HarnessModel) -> None:
    """What libraries print at their import and at a call, and what processes below print, is in the log."""
    (tmp_path / "sitecustomize.py").write_text(LOUD, encoding="utf-8")
    (tmp_path / "lm_eval.py").write_text(LM_EVAL, encoding="utf-8")
    environment = source_environment()
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))
    words = ["-P", "-m", "edge.runtime", "harness", folder / "job.toml", folder / "base", "piqa"]
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, *map(str, words)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    first, last = (json.loads(line) for line in done.stdout.splitlines())
    assert first == {"done": 1}
    wanted = model.loglikelihood([ask("yes", " no")])[0].log
    assert last["tasks"]["piqa"]["log"] == pytest.approx(wanted, rel=1e-5)
    told = [line for line in done.stderr.splitlines() if line.endswith(("imported", "table", "below"))]
    assert told == ["torch is imported", "lm_eval is imported", "a table", "a process below"]


def test_task_that_fails_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what lm-eval says, and where to look; also where its code ends the process, or has no figures."""

    def ask_for(temperature: float) -> Callable[..., Any]:
        return lambda model, **_: model.generate_until([ask("yes", {"temperature": temperature})])

    def fail(error: BaseException) -> Callable[..., Any]:
        def evaluate(**_: Any) -> Any:
            raise error

        return evaluate

    look = "; look whether it knows the tasks"
    for evaluate, told in (
        (fail(KeyError("no_task")), "lm-eval: KeyError: 'no_task'" + look),
        (fail(SystemExit(0)), "lm-eval: SystemExit: 0" + look),
        (lambda **_: {"results": {"mine": 5}}, "lm-eval: AttributeError: 'int' object"),
        (ask_for(-1.0), "a task draws with temperature -1; it has to be at least 0"),
    ):
        stand_in(monkeypatch, evaluate)
        assert main([str(folder / "job.toml"), str(folder / "base"), "no_task"], sys.stdout) == 5
        assert f"error: {told}" in capsys.readouterr().err
