"""Rows of which trl's ``SFTTrainer`` has recorded the labels: ``python -m tests.support.trl_labels``, where trl is.

Nothing here needs trl but the recording. A recorded row is its number of tokens and the half-open ranges of tokens that
are learned; the ids of all rows with a learned token are recorded as one digest. Rows are cut at ``MAX_LENGTH``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.chat_models import (
    GEMMA,
    LLAMA,
    MISTRAL,
    QWEN_3,
    conversations,
    plain_pairs,
    write_conversations,
    write_tokenizer,
)

RECORDED: Final = Path(__file__).with_suffix(".json")
MAX_LENGTH: Final = 56
NUM_ROWS: Final = 60
IGNORED: Final = -100

CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWERS: Final = {
    "chatml": (CHATML, "{{ message.content }}<|im_end|>\n"),
    "llama": (LLAMA, "{{ message['content'] | trim }}<|eot|>"),
    "mistral": (MISTRAL, " {{ message['content'] }}{{ eos_token }}"),
    "gemma": (GEMMA, "{{ message['content'] | trim }}<|end|>\n"),
    "qwen3": (QWEN_3, "{{ message.content }}<|im_end|>\n"),
}
"""Name -> a template, and what it writes for an answer."""


def marked(name: str) -> str:
    """The template of the same texts with marks around answers."""
    template, answer = ANSWERS[name]
    marks = f"{{% generation %}}{answer}{{% endgeneration %}}"
    by_role = f"{{% if message.role == 'assistant' %}}{marks}{{% else %}}{answer}{{% endif %}}"
    return template.replace(answer, marks if name == "mistral" else by_role)


class Case(NamedTuple):
    """Rows for one template."""

    rows: Sequence[Any]
    template: str | None = None
    bos: bool = False


def all_cases() -> dict[str, Case]:
    """Return all cases by name."""
    found = {}
    for name in ANSWERS:
        rows = conversations(NUM_ROWS, seed=3, system=name not in ("gemma", "mistral"))
        found[f"answers/{name}"] = Case(rows, marked(name))
        found[f"completions/{name}"] = Case(
            [{"prompt": row[:-1], "completion": row[-1:]} for row in rows], ANSWERS[name][0]
        )
    pairs = plain_pairs(NUM_ROWS, seed=3)
    for bos in (False, True):
        found[f"pairs/{bos:d}"] = Case(pairs, bos=bos)
        found[f"texts/{bos:d}"] = Case([{"text": row["prompt"] + row["completion"]} for row in pairs], bos=bos)
    return found


def write_case(case: Case, folder: Path) -> Path:
    """Write the tokenizer into a folder, and the rows beside it; return the file."""
    write_tokenizer(folder, case.template, bos=case.bos)
    return write_conversations(folder.with_suffix(".jsonl"), list(case.rows))


def recorded(ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return what is recorded of rows; the first token of a row is never learned, as nothing precedes it."""
    rows = []
    for of_row in labels:
        learned = [0, *(label != IGNORED for label in of_row[1:]), 0]
        rows.append([len(of_row), *(at for at in range(1, len(learned)) if learned[at] != learned[at - 1])])
    listed = json.dumps([list(own) for own, row in zip(ids, rows, strict=True) if len(row) > 1]).encode()
    return {"ids": hashlib.sha256(listed).hexdigest()[:32], "rows": rows}


def main() -> int:
    """Record every case."""
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: _of_trl(case, Path(folder) / name.replace("/", "-")) for name, case in all_cases().items()}
    versions = {name: version(name) for name in ("trl", "datasets", "transformers")}
    lines = [f"{json.dumps(name)}: {json.dumps(case, separators=(',', ':'))}" for name, case in cases.items()]
    body = ",\n".join([f'"versions": {json.dumps(versions)}', *lines])
    RECORDED.write_text(f"{{{body}}}\n", encoding="utf-8")
    return 0


def _of_trl(case: Case, folder: Path) -> dict[str, Any]:
    trl, datasets, transformers = map(importlib.import_module, ("trl", "datasets", "transformers"))
    file = write_case(case, folder)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes))
    settings = trl.SFTConfig(
        output_dir=str(folder),
        max_length=MAX_LENGTH,
        assistant_only_loss="{% generation %}" in (case.template or ""),
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = trl.SFTTrainer(
        model, settings, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    found = [trainer.data_collator([row]) for row in trainer.train_dataset]
    return recorded([row["input_ids"][0].tolist() for row in found], [row["labels"][0].tolist() for row in found])


if __name__ == "__main__":
    sys.exit(main())
