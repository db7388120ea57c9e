"""Model folders that bitsandbytes has saved in 4 bits: read as they are, and refused by name where they are damaged."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save_file

from edge.model.four_bit import round_to_nf4
from edge.model.frozen_weights import FrozenFiles, FrozenMatrix
from edge.model.result import description_files
from edge.model.tensor_files import SafetensorsFiles
from edge.runtime.executor import NodeExecutor
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.model_facts import model_facts
from ringtune.errors import ModelError
from ringtune.models.folder import CONFIG_FILE, read_config
from ringtune.models.four_bit import BLOCK, check_quantization
from ringtune.models.weights_by_digest import ModelSource
from ringtune.schedule.course import FrozenWeights
from tests.support import hand_ring as ring
from tests.support import tiny
from tests.support.slice_memory import is_mapped

RECORDED = (
    "eNrtl3tsFEUcx7eUl0UNFSE9DbQe1Zr2KHe7996bvQDVVIHwCiiFpmx7d31QesVbLRRLrlEeKRpsqKR3xKgtAWkDSVul17t9hGAgkCsaCKlBiB"
    "YSQTCiBBSJAb/bFmzDolJM/EMu2ezMZ2a+M7/HzM3+NJLq+63T89lV3tLiEiG7whsQvJ4CvjCwil+jd67Te4S1lV69U/8iQ+sN+kAJr9aWmfIN"
    "eg8v8AV+ny/gFQJARoM5v8Zwl9Lq1/kKoWAVX3lvMdpivVvObDAZafsQxX8gZdJQUnUg5qBVscLbYn9nIaMl5KANJpPRPERouKuCDsSsfSYWPb"
    "j7VSno2WgtveEGQdUz0CaHdYjoMC1WdQw0bTUODupgicX2QQp2o0HDSnW4gWbMQzQ0YjlESiOUqoSqw2gkWEDgBW92YakQ4Cs8hWsFb6CgoMJn"
    "vqe8CRZpTcAYaIuRGZwr92sshkPDzmjk2/0u0mbT0rdD39ofkKJhrtGqBsRmHqIxnIDYzH06jEamadnqq/yLgFgcmhPAWIcR+6OGCk51M8x6JR"
    "yqViiqSkEnpTvuVximHKwEzAvGg+WD5YEtAVsENg9sNlguWA7YDDAC5lDMjBWMBpsOlgWWAZYOlgY2GUwHNhHsCbDHwcaBjVHi8UToUQrN/CZT"
    "1BU5Hr8oh0PnZJ/vtMwwJ8GOgR0CU8AiYG1gLWBNYDvAGmQz8y7YRjkUqkG7X+6OrwBfCJaDPhawDLAUsCSw65KZ+VracOmI9Ovzn0vFPlnqaY"
    "5Iub3tUmTKXilz+W4pHPpYSurZIa17crt0acF7Uv7WOqk7/jbq61F+TSJJxVLqhmUSRc2XeqtzpIPX7FJz5TRoPgO9SdBKkhZGbooT950Xe5q/"
    "FMOhLjF/a5OYumGLePBaiZjb6xQ9bKqYMnKS2B1/VKx9P1EsE6/GTsw9G2O/+SK2s1KKPTaiNSZsa4ydSd8Yqysvji3fOjM2rX1y7Pc9P0c/uL"
    "w7estbFeUuLI0Gy1zRAz9MiSb4E6JvnT3cNer8O13jeqZ2zU6NRjou10XMQVtk9Mz2zlujRnQ2PJW3v7N5wmfqfx7eFtSt4Da029DPjv52jLNj"
    "vAM6Dug5oOuEvhPzODGfE/M6Mb8T63BiPSzWxWJ9LNbJYr0s1s1i/SzsYGEPC7tY2OeCnS7Y64LdLtjvgh9c8IcLfnHBPy74yQV/ueA3tCcR+J"
    "HAnwR+JfAvgZ8J/E3gdwL/E8SBIB4EcUG5jiBOqG8niBtB/AjiSBBPgrgSxBd6MkG8oXmEIP7Quk6QDxzygkN+cMgTDvnCIW/AVoD5OeQT2EYO"
    "+QXegD47OOQdWAva28AiYArYIbBjYCfBToOdA7sIdoVDXoNTbuS5G/nuRt67kf9u7AM39gOYDmwyWBpYOlgGWBbYdDAazArmACNgM8BysHdzwW"
    "aDzQNbBLYELA8sH4wH84KVgJWD+cECYFVg1eq+RzmoPkqbg1aMK0crH9FH5blN9bLbQuTVa6KSmh+3bjSRc0fTuTMj3+SciXu5yM5ernXMeHfH"
    "BMfA+AN4MvHYuAfXusA9PI8enkcPz6P/83lEUa0tLWxrS2ZfHWWsl8I7Uz1fuIH2GOqKet6gjL1D4Z2Jd1Cu0vgZTvgafW8kruxZsL9s85zxs7"
    "J3PZul1a/01ZK1nzQXJfbm1ZLtx692Cq+05978EJ+F/fev/jtWml69XxrS9IXl/qKVgdJqlVnNAJ7bHQp95X5eMFnVXgOXsTR8yKXhdggy8C0y"
    "eDg+Ov5suCPTp6J+Ttxp6r/Goc2YbbfQFsZhtNKWGi1TxrTsqWrImb+NXuY9LF4LdIziXy7Q6rd406ZNc8qauF+Oe7/tCJ/66tOM/Sn/pr019W"
    "OTQ7WhZJ1ufHJIF9KhEEr+sfT40x7LvralYcuZyixx19RDs1IbG5MTHmnUbR6bXJsylgrWBlPqE77zfV9/44WF7JyXuBvlR8j6VdXh506fuise"
    "6h34P4+H1UxbbHYTwvEH7y5hLg=="
)
"""A file with three matrices of 4 x 40 numbers, saved by bitsandbytes 0.50.2: base64 of its bytes under zlib."""

WIDE = {
    "a.weight": "d30e44e194a8bcd8231316ca7012cfb5ff8c8403273e427504653aefc4cfa7bd",
    "b.weight": "0ad34789d74000dcc6a5d93cf6d9a1f4c27b48ed05dee5c9c2533310b87193c5",
    "c.weight": "00a20aa3d03de1d40dfcbbcad152f41deb1a85b3bf50628aad11220055b088db",
}
"""SHA-256 of what its ``dequantize_4bit`` makes of them in float32: NF4 with and without double quantisation, FP4."""

QUANTIZATION = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def recorded() -> dict[str, torch.Tensor]:
    """The tensors of the recorded file."""
    return load(zlib.decompress(base64.b64decode(RECORDED)))


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder with a file of these tensors alone."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sha256(tensor: torch.Tensor) -> str:
    """Hex digest of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def test_recorded_matrices_have_the_values_of_bitsandbytes(tmp_path: Path) -> None:
    """To the bit, in the type of the computation, and in 4 bits, where nothing is rounded again."""
    write(tmp_path, recorded())
    with FrozenFiles(tmp_path, FrozenWeights(dtype="nf4")) as files:
        for name, wanted in WIDE.items():
            whole = files.read(name, torch.float32)
            held = files.read_frozen(name, torch.float32, whole=True)
            assert isinstance(held, FrozenMatrix)
            assert sha256(whole) == sha256(held.wide()) == wanted
            assert held.held.numbers.held_bytes == 3 * (BLOCK // 2) + {"b.weight": 3 * 4}.get(name, 3 + 4)
            assert torch.equal(files.read(name, torch.bfloat16), whole.bfloat16())
            assert {start: piece.shape for start, piece in files.row_pieces(name)} == {0: (4, 40)}


def state(**changes: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    """Change keys of the description of the first matrix; None removes one."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        key = "a.weight.quant_state.bitsandbytes__nf4"
        values = json.loads(bytes(tensors[key].tolist())) | changes
        text = json.dumps({key: value for key, value in values.items() if value is not None}).encode()
        tensors[key] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())

    return change


def part(end: str, value: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], None]:
    """Change a tensor of the first matrix, or remove it."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"a.weight{end}"]
        if value is not None:
            tensors[f"a.weight{end}"] = value

    return change


STATE = ".quant_state.bitsandbytes__nf4"
DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "blocks of 128": (state(blocksize=128), "has blocksize '128', supported is 64"),
    "groups of 128": (state(nested_blocksize=128), "has nested_blocksize '128', supported is 256"),
    "another type inside": (state(quant_type="fp4"), "has quant_type 'fp4', supported is 'nf4'"),
    "no shape": (state(shape=None), "has shape None, which is not that of a matrix"),
    "a shape of text": (state(shape="4,40"), "has shape 4,40, which is not that of a matrix"),
    "a negative shape": (state(shape=[-4, -40]), "which is not that of a matrix"),
    "a huge shape": (state(shape=[1 << 30, 1 << 30]), "its shape means"),
    "a larger shape": (state(shape=[4, 41]), "has 80 U8 in a.weight, its shape means 82 U8"),
    "an offset that is not finite": (state(nested_offset=float("nan")), "has nested_offset 'nan'"),
    "an offset that is a list": (state(nested_offset=[0.5]), r"has nested_offset '\[0.5\]'"),
    "no JSON": (part(STATE, torch.tensor([123, 34], dtype=torch.uint8)), "has a description that is not JSON"),
    "deep JSON": (part(STATE, torch.full((4000,), 91, dtype=torch.uint8)), "has a description that is not JSON"),
    "a list": (part(STATE, torch.tensor([91, 93], dtype=torch.uint8)), "has a description that is no table"),
    "a long description": (part(STATE, torch.zeros(5000, dtype=torch.uint8)), "has a description of 5,000 bytes"),
    "truncated numbers": (part("", torch.zeros(79, 1, dtype=torch.uint8)), "has 79 U8 in a.weight, its shape means 80"),
    "numbers of another type": (part("", torch.zeros(80, 1)), "has 80 F32 in a.weight, its shape means 80 U8"),
    "no numbers": (part("", None), "lacks a.weight"),
    "no scales": (part(".absmax", None), "lacks a.weight.absmax"),
    "too few scales": (part(".absmax", torch.zeros(2, dtype=torch.uint8)), "has 2 U8 in a.weight.absmax"),
    "scales of groups that are not finite": (
        part(".nested_absmax", torch.tensor([torch.inf])),
        "has scales that are not finite",
    ),
    "levels that are not finite": (
        part(".nested_quant_map", torch.full((256,), torch.nan)),
        "has scales that are not finite",
    ),
    "another codebook": (part(".quant_map", torch.linspace(-1, 1, 16)), "has another codebook than its type"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_matrix_in_four_bits_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    """Before a number is read, where sizes tell it."""
    change, message = DAMAGES[damage]
    tensors = recorded()
    change(tensors)
    write(tmp_path, tensors)
    with pytest.raises(ModelError, match=message), FrozenFiles(tmp_path, FrozenWeights(dtype="nf4")) as files:
        files.read_frozen("a.weight", torch.float32, whole=True)


def test_matrix_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    """Its name has the type."""
    tensors = recorded()
    tensors["a.weight.quant_state.bitsandbytes__af4"] = tensors.pop("a.weight.quant_state.bitsandbytes__nf4")
    with pytest.raises(ModelError, match=r"4-bit tensor a\.weight is of type 'af4', known are nf4 and fp4"):
        SafetensorsFiles(write(tmp_path, tensors))


def test_families_with_transposed_matrices_are_refused() -> None:
    """GPT-2 has a row for each input, and bitsandbytes one for each output."""
    check_quantization(QUANTIZATION, where="config.json", inputs_first=False)
    with pytest.raises(ModelError, match="4-bit matrices of this family are saved transposed; give the plain weights"):
        check_quantization(QUANTIZATION, where="config.json", inputs_first=True)


def in_four_bits(folder: Path, target: Path, *, is_double: bool) -> Path:
    """A copy of a model folder whose linear layers are saved as bitsandbytes does."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / CONFIG_FILE).read_text())
    (target / CONFIG_FILE).write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    tensors = load_file(folder / "model.safetensors")
    like = recorded()
    for name, matrix in list(tensors.items()):
        if matrix.dim() != 2 or "embeddings" in name:
            continue
        held = round_to_nf4([(0, matrix.flatten().clone())], (matrix.shape[0], matrix.shape[1]))
        assert held.groups is not None
        values: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [*matrix.shape]}
        more = {"absmax": held.scales, "nested_absmax": held.groups, "nested_quant_map": held.levels.clone()}
        if is_double:
            values |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": held.offset}
        else:
            more = {"absmax": held.block_scales(0, len(held.scales))}
        text = np.frombuffer(json.dumps(values).encode(), np.uint8).copy()
        more |= {"quant_map": like["a.weight.quant_map"].clone(), STATE[1:]: torch.from_numpy(text)}
        tensors |= {name: held.packed[: matrix.numel() // 2].view(-1, 1).clone()}
        tensors |= {f"{name}.{end}": tensor for end, tensor in more.items()}
    return write(target, tensors)


@pytest.mark.parametrize("is_double", [True, False])
def test_node_holds_a_model_in_four_bits_as_it_is(tmp_path: Path, is_double: bool) -> None:
    """In the planned bytes; in float32 it is the model of the same values. A merged model has no quantizer."""
    plain = tiny.write_model(tmp_path / "plain")
    folder = in_four_bits(plain, tmp_path / "small", is_double=is_double)
    nodes = {}
    for name, path, frozen in (
        ("rounded here", plain, FrozenWeights(dtype="nf4")),
        ("as it is", folder, FrozenWeights(dtype="nf4")),
        ("widened", folder, None),
    ):
        job = ring.make_job(path, model__dtype="float32")
        datasets = ring.make_datasets(job, path, tmp_path, ("a",))
        plan = ring.make_plan(job, datasets, {"b": (0, 1), "c": (1, 4)}, frozen=frozen)
        node = NodeExecutor(plan, "c", job, path, datasets.get("c"))
        facts = model_facts(path, job)
        sizes = Sizes(plan.course, facts, optimizer="adamw", dtype="float32", activation_token_bytes=0)
        planned = 3 * (sizes.block_bytes + facts.adapter_block_bytes)
        assert 0 <= node.hosted_bytes - planned <= 3 * 6 * 4  # groups of six matrices are counted together
        block: Any = node._hosted.skeleton.blocks[2]
        assert is_mapped(block.output.dense.weight.data_ptr(), path) is (name == "as it is")
        nodes[name] = {
            at: value.wide() if isinstance(value, FrozenMatrix) else value.detach()
            for at, value in node._hosted.skeleton.blocks[2].named_parameters()
        }
    for values in nodes.values():
        assert values.keys() == nodes["widened"].keys()
        assert all(torch.equal(value, nodes["widened"][at]) for at, value in values.items())
    assert read_config(folder) == read_config(plain)
    owner = NodeExecutor(plan, "a", job, folder, datasets["a"])
    written = description_files(owner._hosted.skeleton, "sequence-classification", folder)[CONFIG_FILE]
    assert "quantization_config" not in json.loads(b"".join(written))
    with pytest.raises(ModelError, match="has 4 bits a number, which no other node can fetch"):
        ModelSource(folder)
