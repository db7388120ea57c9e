"""Train a small vision transformer from nothing; a few minutes on two cores, with a fixed seed, and only once.

``recipe.json`` beside the weights says what they came from. If it is the same and the weights are those that were
written with it, nothing is trained.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ringtune.storage.durable import write_durably

Array = np.ndarray[Any, np.dtype[Any]]

_PIXELS = {"do_normalize": True, "image_mean": [0.5], "image_std": [0.5]}
_STEPS_A_LINE = 100


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What the model is, and how it is trained.

    Attributes:
        width: of the hidden state.
        inner: of the feed-forward part.
        num_blocks: transformer blocks.
        num_heads: attention heads.
        side: pixels of an image's side.
        patch: pixels of a patch's side.
        epochs: how often each image is seen.
        batch: images of one step.
        learning_rate: the peak, of AdamW; a tenth of the steps up to it, then down to 0.
        initial_std: of the first weights; the usual 0.02 is for models that are wider, this one learns slowly from it.
        seed: of weights and order.
        threads: compute threads; more or fewer may change the last bits.
    """

    width: int = 64
    inner: int = 128
    num_blocks: int = 6
    num_heads: int = 4
    side: int = 28
    patch: int = 4
    epochs: int = 2
    batch: int = 64
    learning_rate: float = 1e-3
    initial_std: float = 0.1
    seed: int = 0
    threads: int = 2


def pretrain(
    images: Array,
    labels: Array,
    folder: Path,
    *,
    recipe: Recipe | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> bool:
    """Train, unless the folder has the result already.

    Args:
        images: (N, side, side) uint8.
        labels: (N,), numbers from 0.
        folder: for the model.
        recipe: sizes and steps.
        say: gets lines of progress.

    Returns:
        Whether it was trained now.

    Raises:
        StorageError: the folder can't be written.
    """
    recipe = recipe or Recipe()
    data = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    described = {**dataclasses.asdict(recipe), "data_sha256": data}
    if _is_there(folder, described):
        say("the model is there already")
        return False
    say(f"training a vision transformer on {len(images):,} images, {recipe.epochs} epochs ...")
    with _threads_and_seed(recipe):
        config, weights = _train(images, labels, recipe, say)
    write_durably(folder / "model.safetensors", weights)
    write_durably(folder / "config.json", (config + "\n").encode())
    write_durably(folder / "preprocessor_config.json", (json.dumps(_PIXELS, indent=2) + "\n").encode())
    written = {**described, "model_sha256": hashlib.sha256(weights).hexdigest()}
    write_durably(folder / "recipe.json", (json.dumps(written, indent=2) + "\n").encode())
    return True


def _is_there(folder: Path, described: dict[str, object]) -> bool:
    try:
        written = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
        weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False
    return bool(written == {**described, "model_sha256": weights})


@contextmanager
def _threads_and_seed(recipe: Recipe) -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(recipe.threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            yield
    finally:
        torch.set_num_threads(threads)


def config_of(recipe: Recipe, *, num_labels: int) -> Any:
    """Make the configuration of the model."""
    from transformers import ViTConfig

    return ViTConfig(
        hidden_size=recipe.width,
        intermediate_size=recipe.inner,
        num_hidden_layers=recipe.num_blocks,
        num_attention_heads=recipe.num_heads,
        image_size=recipe.side,
        patch_size=recipe.patch,
        num_channels=1,
        initializer_range=recipe.initial_std,
        num_labels=num_labels,
        architectures=["ViTForImageClassification"],
    )


def _train(images: Array, labels: Array, recipe: Recipe, say: Callable[[str], None]) -> tuple[str, bytes]:
    """``config.json`` and ``model.safetensors``."""
    import torch
    from safetensors.torch import save
    from transformers import ViTForImageClassification

    config = config_of(recipe, num_labels=int(labels.max()) + 1)
    model = ViTForImageClassification(config).train()
    pixels, targets = torch.from_numpy(images.copy())[:, None], torch.from_numpy(labels.astype(np.int64))
    steps_an_epoch = len(images) // recipe.batch
    num_steps = max(1, recipe.epochs * steps_an_epoch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=num_steps + 1, pct_start=0.1, anneal_strategy="linear"
    )
    start_s, losses, correct = time.monotonic(), 0.0, 0
    for step in range(num_steps):
        if step % max(1, steps_an_epoch) == 0:
            order = torch.randperm(len(images))
        first = step % max(1, steps_an_epoch) * recipe.batch
        chosen = order[first : first + recipe.batch]
        output = model(pixel_values=(pixels[chosen].float() / 255 - 0.5) / 0.5, labels=targets[chosen])
        output.loss.backward()
        optimizer.step()
        rates.step()
        optimizer.zero_grad(set_to_none=True)
        losses += float(output.loss.detach())
        correct += int((output.logits.argmax(-1) == targets[chosen]).sum())
        if (step + 1) % _STEPS_A_LINE == 0:
            accuracy = correct / (_STEPS_A_LINE * recipe.batch)
            say(f"step {step + 1}/{num_steps}: loss {losses / _STEPS_A_LINE:.4f}, accuracy {accuracy:.4f}")
            losses, correct = 0.0, 0
    say(f"trained in {time.monotonic() - start_s:.0f} s")
    weights = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    return config.to_json_string(use_diff=True).strip(), bytes(save(weights, metadata={"format": "pt"}))
