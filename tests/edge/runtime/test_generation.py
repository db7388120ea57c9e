"""Texts that are written over the ring: equal to those of the library, on any split, and gone when they are done."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.runtime.executor import NodeExecutor
from edge.runtime.inference import Sampling, next_tokens
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.model_facts import model_facts
from ringtune.run_control import events as rd
from ringtune.run_control.evaluation import rouge_l
from ringtune.schedule.actions import Action
from tests.features.feature import PRIVATE, SPLITS, Feature, carry_out, inputs
from tests.features.models import loaded_merged, write_result
from tests.support.torch_ring import TorchCarrier

NEW_TOKENS = 7
AT_ONCE = 2


@dataclass
class Notes:
    """What a run leaves: folder beside which owners write, most bytes of keys and values and texts of them by node."""

    folder: Path = Path()
    kept_bytes: Counter[str] = field(default_factory=Counter)
    kept_texts: Counter[str] = field(default_factory=Counter)

    def prepare(self, carrier: TorchCarrier, folder: Path, start: object) -> None:
        """Let owners write, and look at what nodes keep after each action."""
        self.folder = folder
        for node, executor in carrier.executors.items():
            if executor.texts is not None:
                executor.texts.file = self.file(node)
            self._watch(node, executor)

    def _watch(self, node: str, executor: NodeExecutor) -> None:
        run = executor.run

        def watched(action: Action) -> Any:
            values, kept = run(action), executor.kept_keys
            starts = Counter(start for _, _, start in kept._kept)
            self.kept_bytes[node] = max(self.kept_bytes[node], kept.num_bytes)
            self.kept_texts[node] = max(self.kept_texts[node], *starts.values(), 0)
            return values

        executor.run = watched  # type: ignore[method-assign]

    def file(self, node: str) -> Path:
        """File of an owner's texts."""
        return self.folder.parent / f"{self.folder.name}-{node}.jsonl"


def of_chat(notes: Notes, model_type: str, *, splits: Any = SPLITS, more: str = "", **changes: Any) -> Feature:
    """Chat with two owners; three texts each, two at once."""
    generation = f"rows = 3\nmax_new_tokens = {NEW_TOKENS}\nat_once = {AT_ONCE}\n{more}"
    values = {"task": "chat", "adapter": "lora", "max_length": 57, "generation": generation, "eval_every": 0}
    values |= {"num_steps": 2, "checkpoint_every": 0}
    return Feature(
        name=f"generation/{model_type}",
        changes=values | changes,
        folder=lambda: inputs(model_type, "chat"),
        splits=splits,
        load=lambda case, folder: None,
        prepare=notes.prepare,
    )


def library_tokens(model: Any, ids: Sequence[int], how: Sampling, row: int) -> list[int]:
    """Greedy tokens of transformers; with a temperature those that are drawn by its logits."""
    found = torch.tensor([list(ids)])
    if not how.temperature:
        options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(found)}
        added: list[int] = model.generate(found, max_new_tokens=NEW_TOKENS, **options)[0, len(ids) :].tolist()
        return added

    def next_logits(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([list(ids)])).logits
        return logits[0, -1].float()

    return list(next_tokens(ids, next_logits, how, ends=[model.config.eos_token_id], longest=64, row=row))


@pytest.mark.parametrize(
    ("split", "model_type", "changes"),
    [
        ("one", "llama", {}),
        ("two", "gpt2", {}),
        ("three", "llama", {}),
        ("owner-hosts-nothing", "llama", {"more": "temperature = 1.5\nseed = 4"}),
        ("two", "llama", {"splits": PRIVATE, "private_blocks": 1}),
    ],
)
def test_texts_are_those_of_the_library(split: str, model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """On any split, beside the merged model, with ROUGE-L of the evaluation; keys and values are as many as planned."""
    from transformers import AutoTokenizer

    notes = Notes()
    feature = of_chat(notes, model_type, **changes)
    plan = feature.plan_on(split)
    run = carry_out(feature, plan)
    model = loaded_merged(feature.case, write_result(run, tmp_path / "result")).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(feature.case.folder / "model")
    how = Sampling(NEW_TOKENS, temperature=1.5, seed=4) if "more" in changes else Sampling(NEW_TOKENS)
    scores, numbers = list[float](), list[int]()
    for owner, dataset in feature.case.datasets().items():
        lines = [json.loads(line) for line in notes.file(owner).read_text().splitlines()]
        assert [line["number"] for line in lines] == list(range(3))
        for row, (line, prompt) in enumerate(zip(lines, dataset.prompts, strict=True)):
            wanted = tokenizer.decode(library_tokens(model, prompt.ids, how, row), skip_special_tokens=True)
            assert line["predicted"]["predicted"] == wanted
            numbers.append(line["predicted"]["tokens"])
            scores.append(rouge_l(wanted, prompt.answers))
    (evaluation,) = run.logged(rd.LogEvaluation)
    values = dict(evaluation.values)
    assert values["generated"] == values["judged_texts"] == len(scores) == 6
    assert values["rouge_l_sum"] == pytest.approx(sum(scores), abs=1e-12)
    assert values["new_tokens"] == sum(numbers) and sum(numbers) > 6
    facts = model_facts(feature.case.folder / "model", feature.case.job)
    sizes = Sizes(plan.course, facts, optimizer="adamw", dtype="float64", activation_token_bytes=1.0)
    for node in plan.nodes:
        blocks = plan.slice_of(node).num_blocks + plan.placement.private_blocks * (plan.owner(node) is not None)
        planned_bytes = AT_ONCE * blocks * sizes.sequence_bytes
        assert bool(blocks) == bool(notes.kept_bytes[node]) and notes.kept_bytes[node] <= planned_bytes
        assert notes.kept_texts[node] == (AT_ONCE if blocks else 0), "of two turns at once"
    assert set(run.live_bytes.values()) == {0}
