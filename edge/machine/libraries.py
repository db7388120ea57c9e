"""Load the libraries that a run needs, and no others, while the agent is idle.

Two things make the first run of an agent slow and its slice look large. ``transformers`` loads whatever it finds
installed beside it (scikit-learn, scipy, torchvision, accelerate and others: seconds and tens of megabytes that no
slice uses), and the code of torch's kernels is read from the disk page by page when a kernel runs for the first time.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Final

from ringtune.errors import UsageError
from ringtune.hints import hint_to_install

NEEDED: Final = (
    "adapters.context",
    "adapters.heads",
    "adapters.loading",
    "adapters.wrappers.model",
    "safetensors.torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.processing_utils",
)
"""Modules that a run of any family imports."""

NEEDLESS: Final = ("accelerate", "flax", "librosa", "scipy", "sklearn", "soundfile", "tf", "torchvision")
"""Packages that ``transformers`` imports if they are installed, and embedding, blocks and head do not need."""

_FLAGS = "transformers.utils.import_utils"
_SIZE = 64


def require_libraries() -> None:
    """Refuse to go on where the extra ``node`` is not installed.

    Raises:
        UsageError: names what is missing and how it is installed.
    """
    wanted = [module for module in ("torch", "transformers", "adapters") if module not in sys.modules]
    missing = [module for module in wanted if find_spec(module) is None]
    if missing:
        raise UsageError(f"a node needs {', '.join(missing)}, not installed here: {hint_to_install('node')}")


def load_libraries() -> None:
    """Import the modules of a run, which takes half of the time of its preparation; build nothing yet."""
    _hide_needless()
    for module in NEEDED:
        importlib.import_module(module)
    from adapters import AutoAdapterModel  # noqa: F401 - a lazy module that has to be asked for


def _hide_needless() -> None:
    """Tell ``transformers`` that the packages ``NEEDLESS`` are not installed, before it loads a module that asks.

    Source: transformers 4.57, ``utils/import_utils.py``: ``is_NAME_available`` answers with ``_NAME_available``.
    """
    found = importlib.import_module(_FLAGS)
    for name in NEEDLESS:
        if getattr(found, f"_{name}_available", False):
            setattr(found, f"_{name}_available", False)


def touch_kernels() -> None:
    """Run each kind of work that a block does once on small zeros, so that its code is in memory.

    Its pages belong to the library's file: all processes share them, and the kernel drops them if memory is short.
    """
    import torch
    from torch.nn import functional

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        # 1. initial values of adapters
        weight = torch.nn.init.kaiming_uniform_(torch.empty(_SIZE, _SIZE))
        torch.nn.init.normal_(weight, std=0.02)
        weight.requires_grad_(True)
        # 2. a block: attention, feed-forward, adapter, norm
        rows = torch.zeros(4, _SIZE, _SIZE)
        mask = (torch.ones(4, _SIZE, dtype=torch.int64).sum(dim=1) > 0).to(rows.dtype).view(4, 1, 1, 1)
        heads = functional.linear(rows, weight, weight[0]).view(4, _SIZE, 4, _SIZE // 4).transpose(1, 2)
        heads = heads.repeat(1, 1, 1, 1) * 1.0
        seen = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask.expand(4, 4, _SIZE, _SIZE))
        inner = functional.gelu(functional.linear(seen.transpose(1, 2).reshape(rows.shape), weight))
        adapted = functional.silu(functional.relu(inner)) + torch.tanh(inner)
        normed = functional.layer_norm(adapted + rows, (_SIZE,))
        # 3. its way back
        torch.autograd.backward([normed], [rows])
