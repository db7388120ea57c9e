"""Conversations as examples: which tokens are learned, for templates of several models, and what is left out."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.data import conversations as chats
from edge.data.conversations import BEYOND, UNSHOWN, Conversations
from edge.data.dataset import OwnerDataset
from edge.data.examples import PackedExamples, TextExamples
from edge.data.tokens import IGNORED, Batch, RowFaultError, load_tokenizer
from ringtune.errors import DataError, ModelError
from ringtune.job.job import Job, parse_job
from ringtune.models.conversations import TEMPLATES, fitting_template
from ringtune.models.tokenizer import chat_templates
from tests.support.chat_models import (
    GEMMA,
    LLAMA,
    MARKED,
    MISTRAL,
    QWEN_3,
    conversations,
    plain_pairs,
    write_conversations,
    write_tokenizer,
)
from tests.support.trl_labels import CHATML

pytestmark = pytest.mark.usefixtures("templates_in_process")

ROWS = conversations(12, system=True)


def job_of(folder: Path, *, max_length: int = 512, **data: Any) -> Job:
    """A job for chat."""
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in data.items())
    text = f'[model]\npath = "{folder}"\ntask = "chat"\n[data]\n{lines}[train]\nmax_length = {max_length}\n'
    return parse_job(text, source="test")


def examples_of(folder: Path, path: Path, **keys: Any) -> TextExamples:
    """All examples of a file."""
    source = Conversations(job_of(folder, **keys), folder)
    return source.examples(source.read(path).rows, ())


def learned(examples: TextExamples) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each example, without padding."""
    found = []
    for index in range(len(examples)):
        batch = examples.batch([index], {})
        found.append((batch.ids[0].tolist(), batch.labels[0].tolist()))
    return found


def by_prefixes(tokenizer: Any, messages: list[Any], learned_from: int = 0) -> list[tuple[list[int], list[int]]]:
    """The slow reference: transformers encodes each prefix, and an answer is what it adds to the one before it."""

    def ids_of(count: int, *, prompt: bool) -> list[int]:
        if not count:
            return []
        return list(tokenizer.apply_chat_template(messages[:count], add_generation_prompt=prompt, return_dict=False))

    whole = ids_of(len(messages), prompt=False)
    labels, alone = [IGNORED] * len(whole), []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < learned_from:
            continue
        before, after = ids_of(index, prompt=True), ids_of(index + 1, prompt=False)
        assert after[: len(before)] == before
        if whole[: len(after)] == after:
            labels[len(before) : len(after)] = after[len(before) :]
        else:
            alone.append((after, [IGNORED] * len(before) + after[len(before) :]))
    return [*([(whole, labels)] if set(labels) != {IGNORED} else []), *alone]


@pytest.mark.parametrize(
    ("template", "named"),
    [(LLAMA, None), (MISTRAL, None), (GEMMA, None), (QWEN_3, None), *((LLAMA, name) for name in TEMPLATES)],
    ids=["llama-3", "mistral", "gemma", "qwen-3", *TEMPLATES],
)
def test_labels_are_what_answers_add_to_the_text(template: str, named: str | None, tmp_path: Path) -> None:
    """Each answer with what ends it, in 12 conversations of each template; the begin token stands once.

    Also by the templates for models without one, in place of the model's own.
    """
    rows = conversations(12, seed=len(template), system=template != GEMMA)
    folder = write_tokenizer(tmp_path / "m", template, bos=True)
    source = Conversations(job_of(folder, template=named) if named else job_of(folder), folder)
    examples = source.examples(source.read(write_conversations(tmp_path / "rows.jsonl", rows)).rows, ())
    if named:
        source.tokenizer.chat_template = TEMPLATES[named]
        assert source.answer_end() == ("<|im_end|>" if named == "chatml" else "</s>")
    wanted = [by_prefixes(source.tokenizer, messages) for messages in rows]
    assert learned(examples) == [one for found in wanted for one in found]
    assert list(examples.of_rows) == [len(found) for found in wanted]
    assert max(examples.of_rows) == (3 if template == QWEN_3 else 1)
    assert all(ids.count(1) <= 1 for ids, _ in learned(examples))
    assert not named or all(ids[0] == 1 for ids, _ in learned(examples))
    assert examples.cut_rows == 0 and not examples.left_out


def test_loss_on_all_learns_every_token_but_the_first(tmp_path: Path) -> None:
    """The text is that of the template."""
    folder = write_tokenizer(tmp_path / "m", LLAMA)
    job = job_of(folder).with_overrides({"train.loss_on": "all"})
    source = Conversations(job, folder)
    found = source.examples(source.read(write_conversations(tmp_path / "rows.jsonl", ROWS)).rows, ())
    wanted = [source.tokenizer.apply_chat_template(messages, return_dict=False) for messages in ROWS]
    assert learned(found) == [(ids, [IGNORED, *ids[1:]]) for ids in wanted]


def test_end_of_an_answer_is_learned_where_it_pads_too(tmp_path: Path) -> None:
    """Padding is known by the mask, and the token that ends a text by its place."""
    folder = write_tokenizer(tmp_path / "m", MISTRAL, pad="</s>")
    batch = examples_of(folder, write_conversations(tmp_path / "rows.jsonl", ROWS)).batch(range(len(ROWS)), {})
    assert len(set(batch.mask.sum(-1).tolist())) > 1
    for ids, mask, labels, messages in zip(batch.ids, batch.mask, batch.labels, ROWS, strict=True):
        answers = sum(message["role"] == "assistant" for message in messages)
        assert int(((ids == 2) & (mask == 1)).sum()) == int((labels == 2).sum()) == answers
        assert bool((labels[mask == 0] == IGNORED).all())


def test_forms_of_rows_give_equal_examples(tmp_path: Path) -> None:
    """ShareGPT, Alpaca, prompts with completions and parts of text are the same messages; only the prompt differs."""
    folder = write_tokenizer(tmp_path / "m", LLAMA)
    question, answer = {"role": "user", "content": "w1\n\nno"}, {"role": "assistant", "content": "yes"}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "y"}, {"type": "text", "text": "es"}]}
    rows = [
        [question, answer],
        [question, parts],
        {"conversations": [{"from": "human", "value": "w1\n\nno"}, {"from": "gpt", "value": "yes"}]},
        {"prompt": [question], "completion": [answer]},
        {"instruction": "w1", "input": "no", "output": "yes"},
        {"instruction": "w1\n\nno", "input": "", "response": "yes"},
    ]
    found = [
        learned(examples_of(folder, write_conversations(tmp_path / f"{at}.jsonl", [row])))
        for at, row in enumerate(rows)
    ]
    assert all(one == found[0] for one in found[1:])
    former = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "no"}]
    row = {"prompt": [*former, question], "completion": [answer]}
    (only,) = learned(examples_of(folder, write_conversations(tmp_path / "prompt.jsonl", [row])))
    tokenizer = Conversations(job_of(folder), folder).tokenizer
    assert [only] == by_prefixes(tokenizer, [*former, question, answer], learned_from=3)


def test_rows_that_are_too_long_are_cut_and_counted(tmp_path: Path) -> None:
    """A row without any answer in its first tokens is left out; of another the tokens within are learned."""
    folder = write_tokenizer(tmp_path / "m", LLAMA)
    short, long = "yes", "no " * 60
    rows = [
        [{"role": "user", "content": short}, {"role": "assistant", "content": short}],
        [{"role": "user", "content": long}, {"role": "assistant", "content": short}],
        [{"role": "user", "content": short}, {"role": "assistant", "content": long}],
    ]
    path = write_conversations(tmp_path / "rows.jsonl", rows)
    whole, cut = learned(examples_of(folder, path)), examples_of(folder, path, max_length=64)
    assert learned(cut) == [whole[0], (whole[2][0][:64], whole[2][1][:64])]
    assert (list(cut.of_rows), cut.cut_rows, cut.left_out) == ([1, 0, 1], 1, {BEYOND: 1})
    dataset = OwnerDataset.load(job_of(folder, max_length=64), path, None, tokenizer_folder=folder)
    assert (dataset.train_rows, dataset.left_out, dataset.cut_rows) == (2, {BEYOND: 1}, 1)
    hidden = write_tokenizer(tmp_path / "hidden", "{{ messages | selectattr('role', 'equalto', 'user') | list }}")
    assert examples_of(hidden, path).left_out == {UNSHOWN: 3}
    with pytest.raises(DataError, match=r"none of its rows can be used \(rows whose .* raise train.max_length"):
        OwnerDataset.load(job_of(folder, max_length=16), path, None, tokenizer_folder=folder)


def test_templates_that_fail_name_row_and_remedy(tmp_path: Path) -> None:
    """A role that the template refuses, earlier messages that it rewrites, and a model without a template."""
    refusing = write_tokenizer(tmp_path / "gemma", GEMMA)
    rows = [ROWS[0][-2:], *[[{"role": "system", "content": "x"}, *ROWS[0][-2:]]] * 3]
    path = write_conversations(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        DataError, match=r"rows.jsonl, line 2: .*System role not supported; so do 2 more\); .* set data.template"
    ):
        OwnerDataset.load(job_of(refusing), path, None, tokenizer_folder=refusing)
    rewriting = write_tokenizer(tmp_path / "count", "{{ messages | length }}{{ messages[-1].content }}")
    with pytest.raises(RowFaultError, match="it rewrites earlier messages"):
        examples_of(rewriting, path)
    with_tools = {"messages": ROWS[0][-2:], "tools": [{"name": "add"}]}
    calls = [ROWS[0][-2], {"role": "assistant", "tool_calls": [{"name": "add"}]}]
    for row in (with_tools, calls):
        tools = write_conversations(tmp_path / "tools.jsonl", [row])
        with pytest.raises(RowFaultError, match="it has no form for tools"):
            examples_of(refusing, tools, template="chatml")
    none = write_tokenizer(tmp_path / "none")
    with pytest.raises(ModelError, match=r"has no chat template; set data.template to one of 'chatml', 'zephyr'"):
        examples_of(none, path)
    with pytest.raises(ModelError, match=r"the chat template can't be used .*unexpected"):
        examples_of(write_tokenizer(tmp_path / "bad", "{{ x "), path)


@pytest.mark.parametrize("ends", [True, False])
def test_template_that_init_proposes_is_taken(tmp_path: Path, ends: bool) -> None:
    """Of a tokenizer without ``<|im_end|>``; one that names no end of a text has none of the others."""
    path = write_conversations(tmp_path / "rows.jsonl", ROWS[:2])
    folder = write_tokenizer(tmp_path / "model")
    for file in folder.glob("*.json"):  # transformers 5 writes no special_tokens_map.json
        found = json.loads(file.read_text().replace("<|im_end|>", "<|im_fin|>"))
        if not ends:
            found.pop("eos_token", None)
        file.write_text(json.dumps(found))
    name, why = fitting_template(folder)
    assert (name, "names no eos_token" in why) == ("zephyr" if ends else "chatml", not ends)
    assert len(examples_of(folder, path, template=name)) == 2
    if not ends:
        with pytest.raises(ModelError, match=r"'zephyr' ends answers with the end-of-text token.* has none; name eos"):
            examples_of(folder, path, template="zephyr")
        for text in ("{", "[1]"):
            (folder / "special_tokens_map.json").write_text(text)
            with pytest.raises(ModelError, match=r"special_tokens_map\.json (is not JSON|has to be a table).*; fetch"):
                fitting_template(folder)


def test_templates_without_an_end_of_answers_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model would never end; any other template says nothing."""
    path = write_conversations(tmp_path / "rows.jsonl", ROWS[:2])
    endless = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    for template, told in ((LLAMA, False), (endless, True)):
        caplog.clear()
        examples_of(write_tokenizer(tmp_path / str(told), template), path)
        assert ("the model does not learn where to end" in caplog.text) is told


def test_tools_go_to_the_template_for_tools(tmp_path: Path) -> None:
    """Of several templates in a folder the one for tools is taken for rows that have some."""
    chatml = TEMPLATES["chatml"].partition("{% endif %}")[2]  # without what refuses tools
    folder = write_tokenizer(tmp_path / "m", chatml)
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].name }}" + chatml)
    plain = ROWS[0][-2:]
    path = write_conversations(tmp_path / "rows.jsonl", [plain, {"messages": plain, "tools": [{"name": "add"}]}])
    first, second = learned(examples_of(folder, path))
    source = Conversations(job_of(folder), folder)
    extra = source.tokenizer("add")["input_ids"]
    assert second == ([*extra, *first[0]], [IGNORED] * len(extra) + first[1])


def test_rows_are_rendered_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, with texts and tools among them; a conversation that is too much is named by its line."""
    folder = write_tokenizer(tmp_path / "m", CHATML)
    tools = [{"messages": row, "tools": [{"name": "add"}]} for row in ROWS[:3]]
    path = write_conversations(tmp_path / "rows.jsonl", [*ROWS[:1], *tools, *ROWS[1:2]])
    whole = learned(examples_of(folder, path))
    monkeypatch.setattr(chats, "_ROWS_AT_ONCE", 2)
    assert learned(examples_of(folder, path)) == whole
    large = [{"role": "user", "content": "a" * (1 << 22)}, {"role": "assistant", "content": "b"}]
    write_conversations(path, [*ROWS[:2], large, *ROWS[:2]])
    repeats = write_tokenizer(tmp_path / "r", "{% for m in messages %}{{ m.content * 9 }}{% endfor %}")
    with pytest.raises(DataError, match=r"rows.jsonl, line 3: .* \(it was stopped: .* write 32 MiB .*, of the first 4"):
        OwnerDataset.load(job_of(repeats), path, None, tokenizer_folder=repeats)


def test_template_is_chosen_by_its_name(tmp_path: Path) -> None:
    """Names and texts are those of transformers, in files or in the settings; another name is refused."""
    named = {"default": LLAMA, "rag": QWEN_3, "tool_use": MARKED}
    folder = write_tokenizer(tmp_path / "m", LLAMA)
    (folder / "additional_chat_templates").mkdir()
    for name in ("rag", "tool_use"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(named[name])
    settings = tmp_path / "settings"
    settings.mkdir()
    shutil.copy(folder / "tokenizer.json", settings)
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    saved["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (settings / "tokenizer_config.json").write_text(json.dumps(saved))
    path = write_conversations(tmp_path / "rows.jsonl", ROWS[:3])
    for model in (folder, settings):
        assert chat_templates(model) == named == load_tokenizer(model).chat_template
        with pytest.raises(ModelError, match=r"has the templates 'default', 'rag', 'tool_use'; did you mean 'rag'\?"):
            examples_of(model, path, template="ragg")
    found = [learned(examples_of(folder, path, template=name)) for name in named]
    assert found[1] == learned(examples_of(write_tokenizer(tmp_path / "alone", QWEN_3), path))
    assert len({str(one) for one in found}) == len(named)


def test_padding_changes_no_label(tmp_path: Path) -> None:
    """A batch has the labels of its rows, padded with no target."""
    folder = write_tokenizer(tmp_path / "m", LLAMA)
    examples = examples_of(folder, write_conversations(tmp_path / "rows.jsonl", ROWS))
    batch = examples.batch(range(len(examples)), {})
    assert batch.ids.shape[1] == examples.width(range(len(examples)))
    alone = [labels + [IGNORED] * (batch.ids.shape[1] - len(labels)) for _, labels in learned(examples)]
    assert torch.equal(batch.labels, torch.tensor(alone))


def unpacked(data: Batch) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each row of packed sequences: where the mask has another value a row begins."""
    found = []
    for ids, mask, labels in zip(data.ids.tolist(), data.mask.tolist(), data.labels.tolist(), strict=True):
        for turn, group in itertools.groupby(range(len(mask)), key=lambda place: mask[place]):
            places = list(group)
            row = ([ids[place] for place in places], [labels[place] for place in places])
            if turn:
                found.append(row)
            else:
                assert set(row[1]) == {IGNORED}
    return found


@pytest.mark.parametrize(("max_length", "count"), [(8, 5), (64, 10)])
def test_packed_sequences_have_each_row_once(max_length: int, count: int, tmp_path: Path) -> None:
    """With its tokens and targets, cut rows and rows left out as without packing; evaluated rows are not packed."""
    folder = write_tokenizer(tmp_path / "m", LLAMA)
    path = write_conversations(tmp_path / "rows.jsonl", [*plain_pairs(20), {"prompt": "no " * 70, "completion": "a"}])
    job = job_of(folder, max_length=max_length)
    alone = Conversations(job, folder)
    rows = alone.examples(alone.read(path).rows, ())
    packed = job.with_overrides({"train.packing": True})
    data = OwnerDataset.load(packed, path, path, tokenizer_folder=folder)
    assert isinstance(data._train, PackedExamples)
    batch = data._train.batch(range(data.train_rows), {})
    assert sorted(unpacked(batch)) == sorted(learned(rows))
    assert batch.mask.shape[1] == data._train.width(range(data.train_rows)) <= max_length
    assert (int(batch.mask.max()), data.train_rows) == (2, count)
    assert rows.left_out.keys() == {BEYOND}
    assert data.left_out == {BEYOND: 2 * rows.left_out[BEYOND]}
    assert (data.cut_rows, data.eval_rows) == (2 * rows.cut_rows, len(rows))
    counted = data.packed_rows(4, 0, "a")
    assert counted is not None and counted.tokens == int((batch.mask > 0).sum())
    assert counted.rows == data.num_packed == len(rows)
    assert counted.row_tokens >= counted.tokens / counted.rows
    assert OwnerDataset.load(job, path, None, tokenizer_folder=folder).packed_rows(4, 0, "a") is None


def test_one_row_is_a_sequence_and_full_rows_are_alone(tmp_path: Path) -> None:
    """Masks are those of rows that are not packed."""
    folder = write_tokenizer(tmp_path / "m", LLAMA)
    for rows in (plain_pairs(1), [row for row in plain_pairs(8) if len(row["prompt"]) > 1]):
        path = write_conversations(tmp_path / "rows.jsonl", rows)
        job = job_of(folder, max_length=32).with_overrides({"train.packing": True})
        data = OwnerDataset.load(job, path, None, tokenizer_folder=folder)
        assert data.train_rows == len(rows)
        assert int(data._train.batch(range(len(rows)), {}).mask.max()) == 1
