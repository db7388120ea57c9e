"""The micro-batches that are under way at a node: tensors are put in and taken out by their keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from edge.compute.micro_batches import MicroBatch
from ringtune.errors import PlanError
from ringtune.schedule.actions import Action, TensorKey
from ringtune.schedule.course import Course


class Flows:
    """The micro-batches of one node; what holds nothing any more is forgotten.

    Args:
        course: of the run; of what the head reads the rest does not travel, and has a gradient of zero.
        dtype: of the computation.
        device: of the computation.
    """

    def __init__(self, course: Course, *, dtype: torch.dtype, device: torch.device) -> None:
        self._course, self._dtype, self._device = course, dtype, device
        self._flows: dict[tuple[int, int], MicroBatch] = {}
        self._tokens: dict[tuple[int, int], int] = {}  # T of hidden states that were sent on, or entered the head here

    def begin(self, action: Action, flow: MicroBatch) -> None:
        """Note a micro-batch that begins at this node."""
        self._flows[action.seq, action.micro] = flow

    def of(self, action: Action) -> MicroBatch:
        """Return the micro-batch of an action.

        Raises:
            PlanError: nothing came for it.
        """
        flow = self._flows.get((action.seq, action.micro))
        if flow is None:
            raise PlanError(f"{action} comes before its input")
        return flow

    def drop_if_empty(self, action: Action) -> None:
        """Forget the micro-batch of an action if it holds nothing any more."""
        if self.of(action).is_empty:
            del self._flows[action.seq, action.micro]

    def forget(self, seqs: set[int]) -> None:
        """Forget the micro-batches of these items."""
        self._flows = {key: flow for key, flow in self._flows.items() if key[0] not in seqs}
        self._tokens = {key: tokens for key, tokens in self._tokens.items() if key[0] not in seqs}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that is held."""
        for flow in self._flows.values():
            yield from flow.tensors()

    def whole_grad(self, action: Action) -> torch.Tensor | None:
        """Return the gradient of a micro-batch for a backward; what the head did not read has one of zero, if it is."""
        grad = self.of(action).grad
        if self._course.top_tokens and action.stop == self._course.head:
            return grad
        missing = 0 if grad is None else self._tokens.get((action.seq, action.micro), 0) - grad.shape[1]
        return nn.functional.pad(grad, (0, 0, 0, missing)) if grad is not None and missing > 0 else grad

    def enter_head(self, action: Action) -> torch.Tensor:
        """Take a micro-batch's hidden state for the head, as another owner gets it: dense, of the tokens that travel.

        Kernels of an accelerator draw dropout by where a number lies in memory, so a view would get another mask.

        Raises:
            PlanError: nothing came for it.
        """
        flow = self.of(action)
        hidden = self._sent((action.seq, action.micro), self._course.head, flow.head_input(action))
        flow.drop_hidden()
        return hidden

    def _sent(self, at: tuple[int, int], boundary: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return what travels of a hidden state, contiguous, and note how many tokens it had for its gradient."""
        if self._course.head_tokens:
            self._tokens.setdefault(at, hidden.shape[1])  # what comes back for the head may have been cut on its way
        return self._cut(boundary, hidden)

    def _cut(self, boundary: int, tensor: torch.Tensor) -> torch.Tensor:
        sent = self._course.sent_tokens(boundary, tensor.shape[1])
        return tensor.contiguous() if sent == tensor.shape[1] else tensor[:, :sent].clone()

    def put(self, key: TensorKey, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Give a micro-batch the hidden state (B, T, D) or gradient that came for it.

        Args:
            key: which one it is.
            tensor: any float dtype, on the CPU; of what passes between last block and head the first tokens may be all.
            mask: (B, T) integers with a hidden state that enters a block; None with one that enters the head.
        """
        flow = self._flows.setdefault((key.seq, key.micro), MicroBatch())
        moved = tensor.to(device=self._device, dtype=self._dtype)
        if not key.is_hidden:
            flow.grad = moved
            return
        flow.drop_hidden()
        flow.hidden = moved
        flow.mask = None if mask is None else mask.to(device=self._device, dtype=torch.int64)

    def take(self, key: TensorKey) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hand a micro-batch's hidden state or gradient out for sending, and forget it.

        Returns:
            A tensor (B, T, D) on the CPU in the compute dtype, not written to afterwards, of which only the tokens
            that travel; and the mask (B, T) if it is a hidden state that enters a block, otherwise None.

        Raises:
            PlanError: there is none.
        """
        flow = self._flows.get((key.seq, key.micro))
        tensor = None if flow is None else flow.hidden if key.is_hidden else flow.grad
        if flow is None or tensor is None:
            raise PlanError(f"there is nothing to send as {key}")
        mask = None
        if key.is_hidden:
            mask = flow.mask if key.boundary < self._course.head else None
            tensor = self._sent((key.seq, key.micro), key.boundary, tensor)
            flow.drop_hidden()
        else:
            tensor = self._cut(key.boundary, tensor)
            flow.grad = None
        if flow.is_empty:
            del self._flows[key.seq, key.micro]
        return tensor.cpu(), None if mask is None else mask.cpu()
