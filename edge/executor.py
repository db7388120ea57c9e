"""Carry out the compute actions of one node with torch."""

from __future__ import annotations

from pathlib import Path

import torch

from edge.data.rows import OwnerDataset
from ringtune.job import Job
from ringtune.plan import Plan
from ringtune.schedule import Action
from ringtune.turns import Turn


class NodeExecutor:
    """What one node hosts in one run, and the actions on it.

    Not thread-safe: everything is called from one thread (torch's generator is global, and dropout uses it).

    Args:
        plan: the plan of the run.
        node: which node of it.
        job: what was asked.
        model_folder: config, weights and tokenizer of the base model.
        dataset: the node's own rows; needed exactly if the plan names it as an owner.
        device: torch device.

    Raises:
        ModelError: the folder is not what the plan needs, or the adapter configuration can't be split.
        DataError: an owner without data, or a class that the plan doesn't have.
    """

    def __init__(
        self,
        plan: Plan,
        node: str,
        job: Job,
        model_folder: Path,
        dataset: OwnerDataset | None,
        *,
        device: str = "cpu",
    ) -> None:
        raise NotImplementedError

    @property
    def hosted_bytes(self) -> int:
        """Bytes of weights, adapters and head that this node holds."""
        raise NotImplementedError

    def live_bytes(self) -> int:
        """Bytes of batches, hidden states, gradients and graphs that are held now (for tests)."""
        raise NotImplementedError

    def grant(self, turn: Turn) -> None:
        """Learn the items of a turn; has to come before any of their actions."""
        raise NotImplementedError

    def forget_turn(self, index: int) -> None:
        """Drop a turn's items; call it when the node has done all its actions of the turn."""
        raise NotImplementedError

    def run(self, action: Action) -> tuple[tuple[str, float], ...]:
        """Carry out one of E, f, F, H, B, U.

        Returns:
            Numbers for the report: an H gives ``loss_sum``, ``count`` and ``correct``; otherwise nothing.
        """
        raise NotImplementedError

    def put_tensor(self, payload: str, seq: int, micro: int, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Give a micro-batch the hidden state (B, T, D) or gradient that came for it.

        Args:
            payload: ``Payload.HIDDEN`` or ``Payload.GRAD``.
            seq: item.
            micro: micro-batch.
            tensor: any float dtype, on the CPU.
            mask: (B, T) integers with a hidden state that enters a block; None with one that enters the head.
        """
        raise NotImplementedError

    def take_tensor(self, payload: str, seq: int, micro: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hand a micro-batch's hidden state or gradient out for sending, and forget it.

        Returns:
            A tensor (B, T, D) on the CPU in the compute dtype, not written to afterwards; and the mask (B, T)
            if it is a hidden state that enters a block, otherwise None.
        """
        raise NotImplementedError

    def head_blob(self) -> bytes:
        """The head, its optimizer moments and step counts as one safetensors file."""
        raise NotImplementedError

    def load_head_blob(self, data: bytes) -> None:
        """Take over a head from ``head_blob``.

        Raises:
            IntegrityError: unreadable, or not a head of this run.
        """
        raise NotImplementedError

    def adapter_files(self, *, with_head: bool, with_private: bool = False) -> dict[str, bytes]:
        """This node's part of the AdapterHub folder.

        Args:
            with_head: also the head and both configs; ask the node that holds the newest head.
            with_private: also the adapters of the private blocks (never trained); ask one owner.

        Returns:
            Name to content: ``adapter.safetensors`` (unless it hosts nothing), and with the head
            ``adapter_config.json``, ``head_config.json`` and ``model_head.safetensors``.
        """
        raise NotImplementedError
