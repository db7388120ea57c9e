"""Check a model folder: a config of a supported family, tensors that fit it, and a tokenizer."""

from __future__ import annotations

from pathlib import Path

from edge.doctor.check import Check, failed, passed, warned
from ringtune.errors import RingTuneError
from ringtune.models.consistency import check_files
from ringtune.models.folder import base_tensors, model_dimensions, read_config
from ringtune.quantities import format_bytes

_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
_IMAGES = ("preprocessor_config.json",)


def check_model(folder: Path) -> list[Check]:
    """Check config, weights and tokenizer of a model folder, a line each; of weights only headers are read."""
    try:
        config = read_config(folder)
    except RingTuneError as error:
        return [failed("model config", str(error), "copy the folder again, or choose another model")]
    dimensions = model_dimensions(config)
    blocks = f"{dimensions.num_blocks} blocks of width {dimensions.hidden}"
    checks = [passed("model config", f"{config['model_type']}, {blocks}")]
    try:
        tensors = base_tensors(folder, config)
        total_bytes = sum(stored.info.nbytes for stored in tensors.values())
        checks.append(passed("model weights", f"{len(tensors)} tensors, {format_bytes(total_bytes)}"))
    except RingTuneError as error:
        checks.append(failed("model weights", str(error), "copy the folder again; all nodes need the same files"))
    try:
        check_files(folder, config)
    except RingTuneError as error:
        return [*checks, failed("model files", str(error), "copy or save the whole folder again")]
    return [*checks, _tokenizer(folder, has_tokens=dimensions.vocab > 0)]


def _tokenizer(folder: Path, *, has_tokens: bool) -> Check:
    wanted = _TOKENIZERS if has_tokens else _IMAGES
    present = [name for name in wanted if (folder / name).is_file()]
    if present:
        return passed("model tokenizer" if has_tokens else "model images", ", ".join(present))
    missing = "a tokenizer" if has_tokens else wanted[0]
    return warned("model files", f"{folder} has not {missing}", "owners of data need it: copy the whole folder")
