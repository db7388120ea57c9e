"""Texts that are written over the ring: equal to those of the library, on any split, and gone when they are done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.data.prompts import Prompt
from ringtune.run_control import events as rd
from ringtune.run_control.evaluation import rouge_l
from tests.features.feature import PRIVATE, SPLITS, Feature, carry_out, inputs
from tests.features.models import loaded_merged, write_result
from tests.support.torch_ring import Case, TorchCarrier

NEW_TOKENS = 7


def written_by(folder: Path, node: str) -> Path:
    """File of an owner's texts."""
    return folder.parent / f"{folder.name}-{node}.jsonl"


def of_chat(split: str, model_type: str = "llama", **changes: Any) -> tuple[Feature, list[Path]]:
    """Chat with two owners, whose texts are written beside a folder; three of five sequences are of one owner."""
    folders: list[Path] = []

    def prepare(carrier: TorchCarrier, folder: Path, start: object) -> None:
        folders.append(folder)
        for node, executor in carrier.executors.items():
            if executor.texts is not None:
                executor.texts.file = written_by(folder, node)

    generation = f"rows = 3\nmax_new_tokens = {NEW_TOKENS}\nat_once = 2"
    feature = Feature(
        name=f"generation/{model_type}",
        changes={
            "task": "chat",
            "adapter": "lora",
            "max_length": 57,
            "generation": generation,
            "eval_every": 0,
            **changes,
        },
        folder=lambda: inputs(model_type, "chat"),
        splits=PRIVATE if changes.get("private_blocks") else SPLITS,
        load=lambda case, folder: None,
        prepare=prepare,
    )
    return feature, folders


def library_text(case: Case, model: Any, prompt: Prompt, dataset_reader: Any) -> str:
    """Greedy text of transformers."""
    ids = torch.tensor([list(prompt.ids)])
    found = model.generate(
        ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids)
    )
    return str(dataset_reader.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("split", ["one", "two", "three", "owner-hosts-nothing"])
def test_texts_are_those_of_the_library(split: str, tmp_path: Path) -> None:
    """Greedy tokens on any split beside ``generate`` on the merged model, and ROUGE-L of the evaluation."""
    from transformers import AutoTokenizer

    feature, folders = of_chat(split)
    run = carry_out(feature, feature.plan_on(split))
    (folder,) = folders
    model = loaded_merged(feature.case, write_result(run, tmp_path / "result")).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(feature.case.folder / "model")
    (evaluation,) = run.logged(rd.LogEvaluation)
    scores, numbers = list[float](), list[int]()
    for owner, dataset in feature.case.datasets().items():
        lines = [json.loads(line) for line in written_by(folder, owner).read_text().splitlines()]
        assert [line["number"] for line in lines] == list(range(3))
        for line, prompt in zip(lines, dataset.prompts, strict=True):
            wanted = library_text(feature.case, model, prompt, tokenizer)
            assert line["predicted"]["predicted"] == wanted
            numbers.append(line["predicted"]["tokens"])
            scores.append(rouge_l(wanted, prompt.answers))
    values = dict(evaluation.values)
    assert values["generated"] == values["judged_texts"] == len(scores) == 6
    assert values["rouge_l_sum"] == pytest.approx(sum(scores), abs=1e-12)
    assert values["new_tokens"] == sum(numbers) and len(set(numbers)) > 1, "none has ended before the others"
    assert set(run.live_bytes.values()) == {0}
