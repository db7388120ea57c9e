"""``python -m edge.runtime answer_ends JOB MODEL``: print the texts that end an answer of a language model.

``ringtune export`` starts it as a process of its own for the ``Modelfile`` of a GGUF file, because commands run without
a tokenizer. It prints one line, ``{"stops": ["</s>", "<|im_end|>"]}``: what ends an answer in ``ringtune chat``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from edge.data.conversations import Conversations
from edge.data.detokenizer import Ends, ends_with
from edge.data.tokens import RowFaultError, load_tokenizer
from edge.runtime.inference import ends_of_text
from ringtune.errors import ModelError
from ringtune.job.job import Job, load_job
from ringtune.machine.process import exit_code_of
from ringtune.models.conversations import has_chat_template
from ringtune.models.family import CHAT


def main(arguments: Sequence[str], output: TextIO) -> int:
    """Print the texts for a job file and a model folder; return the exit code."""
    job_file, folder = map(Path, arguments)

    def write() -> None:
        output.write(json.dumps({"stops": stop_texts(load_job(job_file), folder)}) + "\n")
        output.flush()

    return exit_code_of(write)


def stop_texts(job: Job, folder: Path) -> list[str]:
    """Return the texts that end an answer of the model in ``folder``, each once; raises ``ModelError``."""
    source = conversations_of(job, folder)
    tokenizer = source.tokenizer if source is not None else load_tokenizer(folder)
    ends = answer_ends(folder, tokenizer, source)
    return list(dict.fromkeys((*map(str, tokenizer.convert_ids_to_tokens(ends.tokens)), *ends.stops)))


def conversations_of(job: Job, folder: Path) -> Conversations | None:
    """Return the chat template that a model answers by: the one of its job, or its own; None without any."""
    is_answering = job.model.task == CHAT or job.data.template is not None or has_chat_template(folder)
    return Conversations(job, folder) if is_answering else None


def answer_ends(folder: Path, tokenizer: object, source: Conversations | None) -> Ends:
    """Return what ends a text of the model, and an answer by its template; raises ``ModelError``."""
    ends = Ends(ends_of_text(folder, tokenizer))
    if source is None:
        return ends
    try:
        return ends_with(ends, tokenizer, source.answer_end())
    except RowFaultError as error:
        raise ModelError(f"{folder}: {error.what}") from error
