"""A vision transformer and images in the shapes of the image example, at random: memory depends on shapes alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from docs.examples.fashion.prepare import CLASS_NAMES, OTHER_CLASSES
from docs.examples.fashion.pretrain import Recipe, config_of


def write_vit(folder: Path) -> Path:
    """Write the model of the image example with random weights."""
    from transformers import ViTForImageClassification

    config = config_of(Recipe(), num_labels=len(OTHER_CLASSES))
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


def write_images(path: Path, num_rows: int) -> Path:
    """Write random images of the example's size and classes."""
    drawn, side = np.random.default_rng(num_rows), Recipe().side
    labels = np.array(CLASS_NAMES)[np.array(OTHER_CLASSES)[np.arange(num_rows) % len(OTHER_CLASSES)]]
    np.savez(path, image=drawn.integers(0, 256, (num_rows, side, side), dtype=np.uint8), label=labels)
    return path
