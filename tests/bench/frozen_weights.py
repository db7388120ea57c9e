"""Frozen weights in 16 and 8 bits: what they take, how long steps take, what they cost in accuracy, what they allow.

Part ``frozen`` of ``make bench-memory``. ``python -m tests.bench.frozen_weights bytes speed accuracy boards`` does its
parts, or some of them, alone; each writes into ``build/bench/frozen/PART.json``.

======== =============================================================================================================
part     what is measured
======== =============================================================================================================
bytes    what a node holds of the frozen blocks of a MiniLM and a Llama of 1.1 billion parameters, over float32
speed    forward and backward of two blocks at 64 and 1,024 tokens a micro-batch, over float32, natively and widened
accuracy the demo's model and sentences, three seeds: within 0.5 point (bfloat16) and 1 point (int8) of float32
boards   the Llama on four boards of 1,280 MiB, which hold it in bfloat16 and not in float32; one board is refused
======== =============================================================================================================
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from edge.machine.bfloat16 import multiplies_bfloat16_fast
from edge.machine.hardware import describe_hardware
from ringtune.schedule.frozen_weights import FROZEN_DTYPES, FrozenWeights
from tests.bench import frozen_accuracy, frozen_boards, frozen_speed

OUT: Final = Path("build/bench/frozen")
RATIO_BOUNDS: Final = {"bfloat16": 0.51, "int8": 0.27}
RATIO_NAMES: Final = {"bfloat16": "frozen_bf16_bytes_ratio", "int8": "frozen_int8_bytes_ratio"}

Figures = dict[str, Any]


def held_bytes(folder: Path) -> Figures:
    """Bytes of a node's two frozen blocks, adapters left out, by type and over float32."""
    found: Figures = {}
    ways = {"float32": None, **{dtype: FrozenWeights(dtype=dtype) for dtype in FROZEN_DTYPES}}
    for name, (model, adapter, width) in frozen_speed.write_models(folder).items():
        held = {}
        for dtype, way in ways.items():
            executor = frozen_speed.one_node(model, adapter, width, way, 64)
            held[dtype] = executor.hosted_bytes - sum(value.nbytes for value in executor.part.trained.values())
        found[name] = {"bytes": held, "ratio": {dtype: held[dtype] / held["float32"] for dtype in FROZEN_DTYPES}}
    return found


def speed(folder: Path) -> Figures:
    """Steps of blocks, with what the machine says of itself."""
    return {
        "hardware": describe_hardware(threads=1),
        "fast_bfloat16": multiplies_bfloat16_fast("cpu"),
        "models": frozen_speed.measure(folder),
    }


PARTS: Final[dict[str, Callable[[Path], Figures]]] = {
    "bytes": held_bytes,
    "speed": speed,
    "accuracy": lambda folder: frozen_accuracy.measure(),
    "boards": frozen_boards.measure,
}


def measure(folder: Path, parts: tuple[str, ...] = tuple(PARTS)) -> Figures:
    """Do some parts; each has a folder of its own."""
    OUT.mkdir(parents=True, exist_ok=True)
    found: Figures = {}
    for name in parts:
        own = folder / name
        own.mkdir()
        found[name] = PARTS[name](own)
        (OUT / f"{name}.json").write_text(json.dumps(found[name], indent=1) + "\n", encoding="utf-8")
        print(f"frozen {name} measured", flush=True)  # noqa: T201
    return {**found, "figures": figures_of(found)}


def figures_of(found: Figures) -> Figures:
    """The figures that are asked for by name: the largest share of bytes, and points of accuracy lost."""
    figures: Figures = {}
    if "bytes" in found:
        for dtype, name in RATIO_NAMES.items():
            figures[name] = max(one["ratio"][dtype] for one in found["bytes"].values())
    if "accuracy" in found:
        for dtype, lost in found["accuracy"]["below_float32"].items():
            figures[f"frozen_{dtype}_points_below_float32"] = 100 * lost
    return figures


def missed(found: Figures) -> list[str]:
    """What misses its bound."""
    misses = [
        f"{name} is {found['figures'][name]:.3f}, it has to be at most {RATIO_BOUNDS[dtype]}"
        for dtype, name in RATIO_NAMES.items()
        if found["figures"].get(name, 0.0) > RATIO_BOUNDS[dtype]
    ]
    misses += frozen_accuracy.missed(found["accuracy"]) if "accuracy" in found else []
    return misses + (frozen_boards.missed(found["boards"]) if "boards" in found else [])


def main() -> int:
    """Do the parts that are asked for, print their figures, and say what was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="parts-", dir=OUT) as folder:
        found = measure(Path(folder).resolve(), tuple(parser.parse_args().parts))
    misses = missed(found)
    print("\n".join([json.dumps(found["figures"], indent=1), *(f"MISSED {miss}" for miss in misses)]))  # noqa: T201
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
