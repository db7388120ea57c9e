"""A trained chat model in a process of its own, behind ``ringtune chat`` and behind the API of completions."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from coordinator.api import text_process
from coordinator.api.text_process import TextProcess
from coordinator.client.saved_run import read_run
from coordinator.web.completions import Completions, make_app
from edge.runtime.text_process import TextModel
from ringtune.transport.page_access import Guard
from tests.support import chat_models
from tests.support.typed import run_alone
from tests.support.whole_models import lora_run


class Lent:
    """Stands in for the process that a command starts: one that runs already, as each takes seconds to begin."""

    def __init__(self, process: TextProcess, given: dict[str, Any]) -> None:
        assert given == {"model": None, "user": ""}
        self.ready, self.answer = process.ready, process.answer

    def __enter__(self) -> Lent:
        return self

    def __exit__(self, *_: object) -> None:
        return


def answered(model: TextModel, messages: list[dict[str, str]], **how: Any) -> str:
    """The answer of the model in this process."""
    events = model.events({"messages": messages, **how}, lambda: False)
    return "".join(event.get("piece", "") for event in events)


@pytest.mark.thorough
def test_process_of_a_run_answers_as_its_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line by line through a pipe, and by requests; the second answer knows of the first."""
    folder, _ = lora_run(tmp_path, "llama", "chat", "lora[r=2]")
    chat_models.write_tokenizer(tmp_path / "base", chat_models.MISTRAL)
    run = read_run(folder)
    model = TextModel(run.job, run.saved)
    with TextProcess(run) as process:
        monkeypatch.setattr(text_process, "TextProcess", lambda *_, **given: Lent(process, given))
        monkeypatch.setattr("sys.stdin", io.StringIO("yes w1\n\nno\n"))
        done = run_alone("chat", folder, "--max-new-tokens", 5, "--seed", 7, "--temperature", 0.9, "--json")
        found = [json.loads(line)["text"] for line in done.stdout.splitlines()]
        messages = [{"role": "user", "content": "yes w1"}]
        first = answered(model, messages, max_new_tokens=5, seed=7, temperature=0.9)
        messages += [{"role": "assistant", "content": first.strip()}, {"role": "user", "content": "no"}]
        assert (done.returncode, found[0]) == (0, first)
        assert found[1] == answered(model, messages, max_new_tokens=5, seed=8, temperature=0.9)
        assert "texts of at most 64 tokens, keys and values of at most 0.0 MiB" in done.stderr
        here = TestClient(make_app(Completions(process, "run"), Guard(is_local=True)), base_url="http://localhost")
        body = {"messages": messages, "max_tokens": 6, "temperature": 0.7, "seed": 3}
        (choice,) = here.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["message"]["content"] == answered(model, messages, max_new_tokens=6, seed=3, temperature=0.7)
        refused = here.post("/v1/chat/completions", json={"messages": [{"role": "king", "content": "x"}]})
        assert (refused.status_code, "unknown role" in refused.text) == (400, True)
