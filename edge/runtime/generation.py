"""Texts that a language model of the ring writes: sequences at their owner, keys and values at the hosts.

``ringtune.techniques.generation`` has the rules. A sequence is a micro-batch of one row in every item of its turn. Its
owner embeds the prompt, then each token that its head has chosen; a host gives its blocks the keys and values that they
kept. What a node keeps of a text goes with its last token, or with the turn: the prompts of the next turn may follow
before this one is done.

T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from edge.data.detokenizer import Detokenizer, Ends, ends_with
from edge.data.prompts import Prompt, PromptReader
from edge.data.tokens import Batch
from edge.model.key_values import KeyValueCache
from edge.runtime.inference import Sampling, choose, ends_of_text, model_sampling, seeded, text_batch
from ringtune.errors import PlanError
from ringtune.job.job import Job
from ringtune.models.folder import model_dimensions, read_config
from ringtune.run_control.evaluation import rouge_l
from ringtune.schedule.actions import Action
from ringtune.schedule.course import Course, Generation
from ringtune.schedule.turns import Item, follows_token
from ringtune.storage.durable import storage_errors
from ringtune.techniques.generation import GENERATED, JUDGED, NEW_TOKENS, ROUGE_SUM

Values = tuple[tuple[str, float], ...]


class KeptKeys:
    """Keys and values at one host, of the sequences of open turns."""

    def __init__(self, config: Any, generation: Generation | None) -> None:
        self._config, self._generation = config, generation
        self._kept: dict[tuple[int, int, int], KeyValueCache] = {}

    def of(self, item: Item, action: Action) -> KeyValueCache:
        """Return those of a sequence for the blocks from the action's on; empty before its first item.

        An owner with private blocks may compute two stretches of blocks, each with its own. In the last item they are
        the caller's alone.
        """
        cache = self.drop(item, action) or KeyValueCache(self._config)
        if self._generation is not None and not self._generation.is_last(item.batch):
            self._kept[item.turn, action.micro, action.start] = cache
        return cache

    def drop(self, item: Item, action: Action) -> KeyValueCache | None:
        """Drop those of a sequence for the blocks from the action's on, and return them, if there are any."""
        return self._kept.pop((item.turn, action.micro, action.start), None)

    def forget(self, turn: int) -> None:
        """Drop those of a turn."""
        self._kept = {key: cache for key, cache in self._kept.items() if key[0] != turn}

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(cache.num_bytes for cache in self._kept.values())


class OpenText:
    """A text under way.

    Args:
        longest: most tokens of the prompt, which is cut at its beginning.

    Attributes:
        pending: tokens that are embedded next.
        before: number of tokens before them.
        said: text of them.
        has_ended: whether no token follows.
    """

    def __init__(
        self, prompt: Prompt, longest: int, draws: torch.Generator, pieces: Detokenizer, ends: Collection[int]
    ) -> None:
        self.prompt, self.draws = prompt, draws
        self.is_cut = len(prompt.ids) > longest
        self.pending, self.before = list(prompt.ids[-longest:]), 0
        self.num_tokens, self.said, self.has_ended = 0, "", False
        self._pieces, self._ends = pieces, ends

    def take(self, token: int) -> None:
        """Go on with a token, or end with it."""
        if token in self._ends:
            self.has_ended = True
            return
        self.before += len(self.pending)
        self.pending = [token]
        self.num_tokens += 1
        self.said += self._pieces.add(token)
        self.has_ended = self._pieces.is_ended

    def close(self) -> str:
        """Return the whole text; no token follows."""
        self.has_ended = True
        self.said += self._pieces.end()
        return self.said


class TextWriter:
    """The sequences of one owner.

    Args:
        prompts: of this owner, in the order of its sequences; it may have fewer than the plan has sequences.

    Attributes:
        file: where texts are written; None = nowhere.
    """

    def __init__(
        self, course: Course, generation: Generation, job: Job, folder: Path, prompts: Sequence[Prompt]
    ) -> None:
        self._course, self._generation, self._prompts = course, generation, prompts
        given, reader = job.generation, PromptReader(job, folder)
        if given is None:
            raise PlanError("the plan has [generation] and the job has not; plan anew")
        limits = model_sampling(folder)
        self._how = Sampling(temperature=given.temperature, seed=given.seed, top_k=limits.top_k, top_p=limits.top_p)
        longest = model_dimensions(read_config(folder)).longest - generation.max_new_tokens
        self._longest = min(course.max_length, longest)
        self._tokenizer = reader.tokenizer
        self._ends = Ends(ends_of_text(folder, self._tokenizer))
        self._answer_ends = ends_with(self._ends, self._tokenizer, reader.answer_end())
        self._open: dict[tuple[int, int], OpenText] = {}
        self.file: Path | None = None

    def batch(self, item: Item, micro: int) -> Batch | None:
        """Return the tokens (1, T) of a sequence that are embedded now; None if it has ended."""
        text = self._text(item, micro)
        if text is None or text.has_ended:
            return None
        return text_batch(text.pending, text.before)

    def chosen(self, item: Item, micro: int, next_logits: Callable[[], torch.Tensor]) -> Values:
        """Choose the next token of a sequence by the logits (V); after its last one return numbers for the report."""
        text = self._text(item, micro)
        if text is None:
            return ()
        if not text.has_ended:
            how = self._how
            text.take(choose(next_logits(), how.temperature, text.draws, top_k=how.top_k, top_p=how.top_p))
        return self._close(self._number(item, micro), text) if self._generation.is_last(item.batch) else ()

    def forget(self, turn: int) -> None:
        """Drop the texts of a turn."""
        self._open = {key: text for key, text in self._open.items() if key[0] != turn}

    def _text(self, item: Item, micro: int) -> OpenText | None:
        key = (item.turn, micro)
        if key not in self._open:
            number = self._number(item, micro)
            if number >= len(self._prompts):
                return None
            if follows_token(self._course, item):
                raise PlanError(f"text {number} of turn {item.turn} goes on before it has begun")
            prompt = self._prompts[number]
            ends = self._answer_ends if prompt.is_conversation else self._ends
            pieces = Detokenizer(self._tokenizer, prompt.ids, ends.stops)
            self._open[key] = OpenText(prompt, self._longest, seeded(self._how.seed, number), pieces, ends.tokens)
        return self._open[key]

    def _number(self, item: Item, micro: int) -> int:
        return item.batch // self._generation.max_new_tokens * self._generation.at_once + micro

    def _close(self, number: int, text: OpenText) -> Values:
        """Compare a text that is complete with its answers, and write it to the owner's file."""
        said, prompt = text.close(), text.prompt
        if self.file is not None:
            predicted = {"predicted": said, "tokens": text.num_tokens}
            line = {"number": number, "row": dict(prompt.row), "predicted": predicted, "is_cut": text.is_cut}
            with storage_errors(self.file), self.file.open("a" if number else "w", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        values = {GENERATED: 1.0, NEW_TOKENS: float(text.num_tokens)}
        if prompt.answers:
            values |= {JUDGED: 1.0, ROUGE_SUM: rouge_l(said, prompt.answers)}
        return tuple(values.items())
