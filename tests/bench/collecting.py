"""What saving and collecting add to a node's memory: ``python -m tests.bench.collecting``.

Writes a random Llama of 1.1 billion parameters (22 blocks of width 2,048, 32,000 words, bfloat16, 2.2 GB) to a
temporary folder, trains LoRA on four local nodes with one owner, and prints for each node the highest resident memory
of every phase of the run, in MiB. ``--code DIR`` measures another state of the code with the same inputs. With
``--method hift`` all parameters train, and what is collected is the whole model in float32: with ``--blocks 4 --words
8000`` 0.8 GB. One more process is the coordinator's, which is the command's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

import psutil
import torch

from ringtune.models.result_files import RESULT_FOLDERS
from tests.support.tiny_data import write_task_rows
from tests.support.tiny_families import write_tokenizer

ROOT = Path(__file__).parents[2]
BLOCKS, WIDTH, INNER, WORDS, HEADS, KEY_HEADS = 22, 2048, 5632, 32_000, 32, 4
_POLL_S = 0.02
_JOB = """
[model]
path = "{model}"
task = "causal-lm"
[data]
train = "{rows}"
eval = "{rows}"
owners = 1
{adapter}
[train]
method = "{method}"
max_steps = {steps}
batch_size = 2
microbatches = 2
max_length = 16
checkpoint_every = 1
[runtime]
threads = 1
"""


def shapes(blocks: int, words: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a Llama with a decoder of its own."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, WIDTH)}
    keys = WIDTH // HEADS * KEY_HEADS
    inside = {
        **{f"self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qo"},
        **{f"self_attn.{name}_proj.weight": (keys, WIDTH) for name in "kv"},
        **{f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")},
        "mlp.down_proj.weight": (WIDTH, INNER),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    for block in range(blocks):
        found |= {f"model.layers.{block}.{name}": shape for name, shape in inside.items()}
    return found | {"model.norm.weight": (WIDTH,), "lm_head.weight": (words, WIDTH)}


def write_llama(folder: Path, *, blocks: int = BLOCKS, words: int = WORDS, shard_bytes: int = 400 << 20) -> Path:
    """Write the model in several files with an index, one shard in memory at a time."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    LlamaConfig(
        vocab_size=words,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=blocks,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{}]
    places: dict[str, str] = {}
    for name, shape in shapes(blocks, words).items():
        if sum(tensor.nbytes for tensor in files[-1].values()) > shard_bytes:
            save_file(files[-1], folder / f"model-{len(files):05}.safetensors", metadata={"format": "pt"})
            files[-1].clear()
            files.append({})
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
        files[-1][name] = (1 + 0.1 * drawn if len(shape) == 1 else drawn * 0.02).to(torch.bfloat16)
        places[name] = f"model-{len(files):05}.safetensors"
    save_file(files[-1], folder / f"model-{len(files):05}.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    write_tokenizer(folder, padding_side="right", with_types=False)
    return folder


class Watch:
    """Samples the resident memory of a process and every one below it, by phase of the run, until it ends.

    Args:
        process_id: of the process above all.
    """

    def __init__(self, process_id: int) -> None:
        self.phase = "starting"
        self.peaks: dict[int, dict[str, int]] = defaultdict(dict)
        self._above = process_id
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the sampling."""
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_POLL_S):
            try:
                above = psutil.Process(self._above)
                for child in (above, *above.children(recursive=True)):
                    own = self.peaks[child.pid]
                    own[self.phase] = max(own.get(self.phase, 0), child.memory_info().rss)
            except psutil.Error:
                continue


def measure(code: Path, job: Path, out: Path, nodes: int) -> dict[int, dict[str, int]]:
    """Train with the code in ``code``; return the highest resident bytes by process and phase."""
    arguments = [
        sys.executable,
        "-m",
        "ringtune.cli",
        "train",
        str(job),
        "--local",
        str(nodes),
        "--out",
        str(out),
        "--json",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{code / 'proto'}:{code}"}
    with subprocess.Popen(  # noqa: S603 - our own
        arguments, cwd=code, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        watch = Watch(process.pid)
        for line in process.stdout:
            event = json.loads(line)
            if event.get("event") == "state":
                watch.phase = str(event.get("state"))
            print(line[:200].rstrip(), file=sys.stderr, flush=True)  # noqa: T201
        watch.close()
    return dict(watch.peaks)


def main() -> None:
    """Measure one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--code", type=Path, default=ROOT, help="root of the code to measure")
    parser.add_argument("--model", type=Path, help="where the model is, or is written and stays")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--method", default="ringada", help="ringada with LoRA, or hift")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--words", type=int, default=WORDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ringtune-bench-") as name:
        folder = Path(name)
        model = options.model or folder / "model"
        if not (model / "config.json").is_file():
            write_llama(model, blocks=options.blocks, words=options.words)
        rows = write_task_rows(folder, "causal-lm", "rows", 24, seed=0)
        adapter = "" if options.method == "hift" else '[adapter]\nconfig = "lora"'
        values = {"model": model, "rows": rows, "steps": options.steps, "method": options.method, "adapter": adapter}
        (folder / "job.toml").write_text(_JOB.format(**values))
        peaks = measure(options.code, folder / "job.toml", folder / "run", options.nodes)
        found = folder / "run/report.json"
        report = json.loads(found.read_text()) if found.is_file() else {}
        results = (path for name in RESULT_FOLDERS for path in sorted((folder / "run" / name).glob("*")))
        sizes = {path.name: path.stat().st_size for path in results}
    for process_id, phases in peaks.items():
        mib = {phase: round(size / 2**20) for phase, size in phases.items()}
        print(json.dumps({"process": process_id, **mib}))  # noqa: T201
    print(json.dumps({"result_bytes": sizes, "nodes": report.get("nodes")}))  # noqa: T201


if __name__ == "__main__":
    main()
