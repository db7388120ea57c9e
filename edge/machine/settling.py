"""Wait until a device has done what it was given: on an accelerator a call returns when its work is only queued.

Without that wait the time of an action would be the time to launch it, and the node would report as done, and send on,
what is still to be computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def settle_of(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until ``device`` has done its work; on a processor it does nothing.

    Source: PyTorch, CUDA semantics (asynchronous execution).
    """
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else _nothing


def _nothing() -> None:
    """Do nothing: the work is done when its call returns."""
