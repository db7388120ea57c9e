"""Tokenizers with chat templates, and conversations for them.

The templates have the form of those that models are published with: ChatML (Qwen 2), Llama 3, Mistral with its
brackets, Gemma, which refuses a system message, and Qwen 3, which drops the thoughts of former answers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.support import tiny

SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "[INST]", "[/INST]")

LLAMA = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}<|end|>\n\n"
    "{{ message['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "[INST] {{ system + '\n\n' if system and loop.index0 == 1 else '' }}{{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for message in messages %}<|start|>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
QWEN_3 = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ message.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = None, *, pad: str = "<pad>", bos: bool = False) -> Path:
    """Write a byte-level tokenizer whose ids fit the table of the tiny models, with or without a begin token.

    Bytes beyond ASCII and some signs have no token, so that the vocabulary is small.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    signs = [*map(chr, range(33, 127)), "\u0120", "\u010a"]
    names = [*SPECIAL, *signs, "\u0120w", "\u0120w1", "ye", "yes"]
    merges = [("\u0120", "w"), ("\u0120w", "1"), ("y", "e"), ("ye", "s")]
    made = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=pad,
        additional_special_tokens=list(SPECIAL[3:]),
        chat_template=template,
    )
    assert len(names) <= len(tiny.vocabulary())
    tokenizer.save_pretrained(folder)
    return folder


def conversations(num_rows: int, *, seed: int = 0, system: bool = False) -> list[list[dict[str, str]]]:
    """Conversations of one to three answers, of 3 to some 60 tokens a row."""
    draws = random.Random(f"conversations/{seed}")
    rows = []
    for _ in range(num_rows):
        messages = [{"role": "system", "content": "be w1"}] if system and draws.random() < 0.5 else []
        for _ in range(draws.randint(1, 3)):
            for role in ("user", "assistant"):
                words = (draws.choice(("w1", "yes", "no", " w12", "a\nb")) for _ in range(draws.randint(1, 4)))
                messages.append({"role": role, "content": " ".join(words)})
        rows.append(messages)
    return rows


def plain_pairs(num_rows: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Prompts and completions; half of the rows have 3 tokens with the end of the text, the others some 60."""
    draws = random.Random(f"pairs/{seed}")
    letters = "abcdefgh"
    return [
        {
            "prompt": "".join(draws.choices(letters, k=20 if index % 2 else 1)),
            "completion": "".join(draws.choices(letters, k=draws.randint(35, 39) if index % 2 else 1)),
        }
        for index in range(num_rows)
    ]


def write_conversations(path: Path, rows: list[Any]) -> Path:
    """Write conversations as JSON lines with ``messages``; other rows as they are."""
    lines = [{"messages": row} if isinstance(row, list) else row for row in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
