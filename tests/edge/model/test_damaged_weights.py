"""Numbers of a model that are not finite, and tokens that it has no row for, are named: no learning rate would help."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from edge.data.tokens import Batch, check_ids
from edge.model.heads import task_of
from edge.model.owner import OwnerParts
from ringtune.errors import ModelError
from ringtune.job.job import Adapter, Job, Model
from tests.support.plain_rows import Ours
from tests.support.tiny_families import write_family
from tests.support.whole_models import built

_PLACES = {  # tensor -> what has to be named
    "model.layers.1.mlp.up_proj.weight": r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight",
    "model.norm.weight": r"tensor model\.norm\.weight",
    "lm_head.weight": r"tensor lm_head\.weight",
    "model.embed_tokens.weight": r"tensor (model\.)?embed_tokens\.weight",
}


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float32), (float("-inf"), torch.bfloat16)])
@pytest.mark.parametrize("place", _PLACES)
def test_number_of_a_frozen_weight_that_is_not_finite_is_named(
    tmp_path: Path, place: str, value: float, dtype: torch.dtype
) -> None:
    """With its tensor, before a loss is computed of it; a table that stays mapped when a batch has the row."""
    folder = write_family(tmp_path, "llama", num_blocks=2, with_decoder=True, tie_word_embeddings=False)
    tensors = {name: value.to(dtype) for name, value in load_file(folder / "model.safetensors").items()}
    tensors[place].view(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    job = Job(model=Model(path=str(folder), task="causal-lm"), adapter=Adapter(config="lora[r=2]"))
    with pytest.raises(ModelError, match=_PLACES[place]) as caught:
        _embed_all(folder, job)
    assert "learning_rate" not in str(caught.value) and "fetch it" in str(caught.value)


def _embed_all(folder: Path, job: Job) -> None:
    """Build the whole model as an owner has it, and embed every token."""
    skeleton = built(folder, job, range(2), labels=())
    owner = OwnerParts(skeleton, skeleton.model.head, task_of(job.model.task), job.train)
    rows = skeleton.model.config.vocab_size
    ids = torch.arange(rows)[None]
    owner.embed(Batch(ids=ids, mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids), labels=ids))


def test_token_without_a_row_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """A tokenizer may know tokens that the model has not, as long as no text has them."""
    ours = Ours(write_family(tmp_path, "gpt2", num_blocks=1), "causal-lm")
    rows = ours.config["vocab_size"]
    base = ours.base
    check_ids(ours.batch([[5, rows - 1]]).ids, base)
    with pytest.raises(ModelError, match=f"token {rows}, counted from 0, and the embedding of the model has {rows} r"):
        check_ids(ours.batch([[5, rows]]).ids, base)


def test_token_type_without_a_row_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """A tokenizer may tell the texts of a pair apart where the model does not."""
    ours = Ours(write_family(tmp_path, "bert", num_blocks=1, type_vocab_size=1), "sequence-classification")
    ids = torch.tensor([[5, 6]])
    check_ids(ids, ours.base, torch.tensor([[0, 0]]))
    with pytest.raises(ModelError, match=r"token type 1, counted from 0.*type_vocab_size = 1; take the tokenizer"):
        check_ids(ids, ours.base, torch.tensor([[0, 1]]))
