"""An accelerator's work is waited for, a processor's is done already."""

from __future__ import annotations

import pytest
import torch

from edge.machine.settling import settle_of


def test_settling_waits_for_the_very_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second accelerator is synchronised, not the current one; a processor is not."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    settle_of(torch.device("cpu"))()
    assert waited == []
    settle_of(torch.device("cuda", 1))()
    assert waited == [torch.device("cuda", 1)]
