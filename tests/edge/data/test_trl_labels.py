"""Labels are those that trl's ``SFTTrainer`` has given to the same rows, where they do not differ on purpose.

The recording is made by ``python -m tests.support.trl_labels``.

On purpose RingTune differs in this:

==============================  ===========================================  ==========================================
of                              trl                                          RingTune
==============================  ===========================================  ==========================================
a template without marks        refused (``assistant_only_loss``)            an answer is what it adds to the text
a template that shows answers   learned as the whole text shows them         an example of its own: what the model
otherwise once others follow                                                 sees when it gives the answer
prompt and completion that      the token of both is not learned             it is learned: it has characters of the
meet inside a token                                                          completion
a row without a learned token   stays, and adds nothing to the loss          is left out, and counted
==============================  ===========================================  ==========================================

The token that ends an answer is learned in both where the marks have it, and the begin token in neither.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge.data.conversations import Conversations
from edge.data.texts import Language
from ringtune.job.job import Job, parse_job
from tests.support.chat_models import write_conversations, write_tokenizer
from tests.support.trl_labels import ANSWERS, MAX_LENGTH, RECORDED, Case, all_cases, recorded, write_case

pytestmark = pytest.mark.usefixtures("templates_in_process")

CASES = all_cases()
OF_TRL: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))


def job_of(folder: Path, task: str) -> Job:
    """A job with the length of the recording."""
    ends = "[data]\nappend_eos = true\n" if task == "causal-lm" else ""  # as when a run begins
    text = f'[model]\npath = "{folder}"\ntask = "{task}"\n{ends}[train]\nmax_length = {MAX_LENGTH}\n'
    return parse_job(text, source="test")


def found_of(case: Case, folder: Path) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Ids and labels of each example, and the number of examples of each row."""
    path = write_case(case, folder)
    is_text = "text" in case.rows[0]
    source = (Language if is_text else Conversations)(job_of(folder, "causal-lm" if is_text else "chat"), folder)
    examples = source.examples(source.read(path).rows, ())
    batches = [examples.batch([index], {}) for index in range(len(examples))]
    ids, labels = ([getattr(batch, name)[0].tolist() for batch in batches] for name in ("ids", "labels"))
    return ids, labels, list(examples.of_rows)


@pytest.mark.parametrize("name", CASES)
def test_labels_are_those_of_trl(name: str, tmp_path: Path) -> None:
    """Ids and learned tokens of each row, of marked answers, completions, pairs of texts, and texts with their end."""
    ids, labels, of_rows = found_of(CASES[name], tmp_path / "m")
    wanted = OF_TRL[name]
    kept = [row for row in wanted["rows"] if len(row) > 1]
    assert of_rows == [int(len(row) > 1) for row in wanted["rows"]]
    assert recorded(ids, labels) == {"ids": wanted["ids"], "rows": kept}


def test_differences_on_purpose(tmp_path: Path) -> None:
    """The token in which prompt and completion meet, and former answers of a template that rewrites them."""
    folder = write_tokenizer(tmp_path / "m")
    source = Conversations(job_of(folder, "chat"), folder)
    path = write_conversations(tmp_path / "rows.jsonl", [{"prompt": "no ye", "completion": "s"}])
    batch = source.examples(source.read(path).rows, ()).batch([0], {})
    tokens = source.tokenizer.convert_ids_to_tokens(batch.labels[0][batch.labels[0] >= 0].tolist())
    whole = source.tokenizer("no yes")["input_ids"]
    assert len(source.tokenizer("no ye")["input_ids"]) == len(whole)  # so that trl learns the end alone
    assert tokens == [*source.tokenizer.convert_ids_to_tokens(whole[-1:]), "</s>"]

    rows = [row for row in CASES["answers/qwen3"].rows if len(row) > 4]
    _, _, of_rows = found_of(Case(rows, ANSWERS["qwen3"][0]), tmp_path / "qwen")
    assert rows and max(of_rows) > 1
