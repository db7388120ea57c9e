"""What a gradient of embedding and head tells another owner: the claims of the plan's note and of decision 0037.

These tests are of what can be read, not of what should be: who may not know it trains with adapters.
"""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForSequenceClassification

from edge.model.unit_grads import collect_sparse, grad_blob, load_grads
from ringtune.storage.pieces import Pieces

WIDTH, VOCABULARY = 48, 60


def gradients(ids: list[list[int]], classes: list[int], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The gradients of some tensors as another owner has them after a step on these rows; tables as sparse rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=16,
            num_labels=4,
            pad_token_id=0,
        )
        model = BertForSequenceClassification(config).eval()
    collect_sparse([model.bert.embeddings])
    model(input_ids=torch.tensor(ids), labels=torch.tensor(classes)).loss.backward()
    unit = {name: model.get_parameter(name) for name in names}
    copy = {name: torch.nn.Parameter(torch.zeros_like(value)) for name, value in unit.items()}
    load_grads(Pieces.of(bytes(grad_blob(unit, ()))), copy, where="what came")
    return {name: value.grad for name, value in copy.items() if value.grad is not None}


WORDS, PLACES = "bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight"


def test_gradient_of_a_row_tells_its_text_in_order() -> None:
    """A word's row is the gradient of the sum at its place, and so is the place's row: the two are matched."""
    text = [2, 41, 17, 33, 9, 58, 3]
    found = gradients([text], [1], (WORDS, PLACES))
    words, places = found[WORDS].coalesce(), found[PLACES].coalesce()
    nearest = torch.cdist(places.values(), words.values()).argmin(dim=1)
    assert words.indices()[0][nearest].tolist() == text


def test_gradient_of_a_batch_tells_where_its_words_stood() -> None:
    """Each place's row is a sum of words' rows: fewer words than numbers in a row, and least squares give which."""
    texts = [[2, 41, 17, 33, 9, 3], [4, 20, 21, 22, 23, 5], [6, 50, 51, 52, 53, 7]]
    found = gradients(texts, [1, 0, 2], (WORDS, PLACES))
    words, places = found[WORDS].coalesce(), found[PLACES].to_dense()
    ids = words.indices()[0]
    shares = torch.linalg.lstsq(words.values().double().T, places[:6].double().T).solution.T
    for place in range(6):
        assert sorted(ids[shares[place] > 0.5].tolist()) == sorted(text[place] for text in texts)


def test_gradient_of_a_head_tells_the_classes_of_a_batch() -> None:
    """The bias has the predicted less the real share of each class; before training the former are nearly known."""
    texts = [[2, 41, 17, 3], [2, 20, 21, 3], [2, 50, 51, 3], [2, 33, 12, 3]]
    bias = gradients(texts, [1, 3, 1, 1], ("classifier.bias",))["classifier.bias"]
    assert (4 * (0.25 - bias)).round().tolist() == [0, 3, 0, 1]
