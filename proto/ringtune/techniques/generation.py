"""Generation: ``[generation]`` of a job, texts that a language model writes at each evaluation, compared by ROUGE-L.

The model may be larger than any board. Blocks stay at their hosts; the owner of a prompt has embedding and head, and
chooses each token. A sequence is a micro-batch of one row. The first item of a turn passes the whole prompts, each
later one a token of each sequence; a host keeps keys and values of its blocks until the text or the turn ends::

    owner   E0 ------------------- H0 E1 ------------- H1 E2 ...     two hosts, one sequence
    a          f0 >                      f1 >
    b               f0 > (last token)         f1 >

So a host keeps those of at most ``at_once`` sequences of ``train.max_length`` + ``max_new_tokens`` tokens, and the plan
counts them; a run that only writes takes the longest prompt in place of ``train.max_length``, if nodes have the memory.
A longer prompt is cut at its beginning. A sequence that has ended passes as one token under a mask of
zeros, which no host computes; it costs a message a hop.

Texts and answers stay at the owner: it reports the sum of ROUGE-L over a turn's sequences, and their number, and keeps
the texts of its newest evaluation in a file of its own folder.

Source: Lin 2004, ROUGE; Pope et al. 2022, Efficiently Scaling Transformer Inference (keys and values where their block
is).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from ringtune.errors import JobError, PlanError
from ringtune.models.adapter_support import mixed_tokens
from ringtune.models.family import LANGUAGE_TASKS
from ringtune.schedule.course import JOINT, Course, Generation
from ringtune.schedule.plan import Plan
from ringtune.storage.strict import Bounds, check_fields
from ringtune.techniques.base import ANEW, Shape, Technique, Term

TEXTS: Final = "texts.jsonl"
"""File in an owner's folder with the texts of its newest evaluation."""

MAX_ROWS: Final = 1_000_000

ROUGE_SUM: Final = "rouge_l_sum"
GENERATED: Final = "generated"
JUDGED: Final = "judged_texts"
NEW_TOKENS: Final = "new_tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSettings:
    """``[generation]``: texts that a language model writes at each evaluation, compared with the answers by ROUGE-L.

    Attributes:
        rows: evaluation rows of each owner that are continued at each evaluation: the first ones that have an answer,
            for causal-lm in the column ``data.answer``. Their texts and answers stay at the owner.
        max_new_tokens: most tokens of a text.
        at_once: sequences whose keys and values hosts keep at the same time.
        temperature: at which tokens are drawn; 0 = always the likeliest.
        seed: of the draws.
        loss: whether an evaluation computes the loss too. false is what ``ringtune predict`` sets: then rows need no
            answer.
    """

    rows: Annotated[int, Bounds(ge=1, le=MAX_ROWS)] = 32
    max_new_tokens: Annotated[int, Bounds(ge=1, le=4096)] = 64
    at_once: Annotated[int, Bounds(ge=1, le=1024)] = 4
    temperature: Annotated[float, Bounds(ge=0, le=100)] = 0.0
    seed: Annotated[int, Bounds(ge=0, le=(1 << 31) - 1)] = 0
    loss: bool = True

    def __post_init__(self) -> None:
        check_fields(self, where="generation", error=JobError)


def check_job(job: Any) -> None:
    """Refuse texts of a model that writes none, and of users with adapters of their own; raises ``JobError``."""
    if job.generation is None:
        return
    if job.model.task not in LANGUAGE_TASKS:
        raise JobError(
            f"[generation] is for model.task = 'causal-lm' or 'chat', this job has {job.model.task!r}; remove it"
        )
    if job.offload.users != JOINT:
        raise JobError(
            f"[generation] writes with one adapter, and offload.users = {job.offload.users!r} gives each user another; "
            "remove one of them"
        )
    if problem := mixed_tokens(job.adapter.config):
        raise JobError(
            f"[generation] does not go with adapter.config = {job.adapter.config!r}: {problem}, and a text is computed "
            "token by token; remove the section, or use seq_bn or lora"
        )


def check_model(job: Any, shape: Shape) -> None:
    """Refuse texts that leave no room for a prompt in the model; raises ``JobError``."""
    longest = shape.dimensions.longest
    if job.generation is not None and job.generation.max_new_tokens >= longest:
        raise JobError(
            f"generation.max_new_tokens = {job.generation.max_new_tokens} leaves no room for a prompt: the model takes "
            f"{longest} tokens; lower it"
        )


def generation_of(job: Any) -> Generation | None:
    """Return what a course has of a job's settings; None without."""
    given = job.generation
    if given is None:
        return None
    return Generation(rows=given.rows, max_new_tokens=given.max_new_tokens, at_once=given.at_once, alone=not given.loss)


def courses(job: Any, course: Course, nodes: Sequence[Any]) -> tuple[Course, ...]:
    """Return the course, with the texts of the job; before it the one that takes the longest prompt whole."""
    if job.generation is None:
        return (course,)
    course, usual = dataclasses.replace(course, generation=generation_of(job)), job.train.max_length
    owners = {owner.node for owner in course.owners}
    longest = max((node.prompt_tokens for node in nodes if node.node in owners), default=0)
    if job.generation.loss or longest <= usual:
        return (course,)
    return tuple(dataclasses.replace(course, max_length=tokens) for tokens in (longest, usual))


def check_plan(job: Any, plan: Plan, _: Any) -> None:
    """Refuse a given plan with other texts than the job's; raises ``PlanError``."""
    if plan.course.generation != generation_of(job):
        raise PlanError(f"the plan has another [generation] than the job; {ANEW}")


def course_lines(course: Course) -> list[str]:
    """Say how many texts are written at each evaluation; nothing without."""
    texts = course.generation
    if texts is None:
        return []
    number = sum(min(texts.rows, owner.eval_rows) for owner in course.owners)
    return [
        f"{number:,} texts of at most {texts.max_new_tokens} tokens at each evaluation, {texts.at_once} at a time; "
        "'ringtune sim' counts them as that long"
    ]


def generation_figures(values: Mapping[str, float]) -> dict[str, Any]:
    """Compute the mean ROUGE-L of an evaluation's texts from the sums of all owners; empty without texts.

    A sum that no owner reports is 0.
    """
    if not values.get(GENERATED):
        return {}
    counts: dict[str, Any] = {name: int(values.get(name, 0.0)) for name in (GENERATED, NEW_TOKENS)}
    judged = values.get(JUDGED, 0.0)
    return {**counts, JUDGED: int(judged), "rouge_l": values.get(ROUGE_SUM, 0.0) / judged} if judged >= 1 else counts


def memory_terms(course: Course, share: Any, sizes: Any) -> Iterator[Term]:
    """Yield keys and values; one block's more, as they are copied to be longer by a token."""
    hosted = share.stop - share.start + (share.private_blocks if share.is_owner else 0)
    if course.generation is not None and hosted:
        kept = course.generation.at_once * hosted + 1
        yield Term("activations", "keys and values of a block for a text", kept, sizes.sequence_bytes)


TECHNIQUE: Final = Technique(
    name="generation",
    courses=courses,
    check_job=check_job,
    check_model=check_model,
    check_plan=check_plan,
    evaluation_sections={"generation": None},  # other rows need no answers
    memory_terms=memory_terms,
    course_lines=course_lines,
)
