"""Encode a hidden state to messages and decode it again, as the two ends of a link do."""

from __future__ import annotations

import torch

from edge.wire import frames, tensors
from ringtune.errors import FrameError
from ringtune.schedule.actions import Payload, TensorKey

_HELLO = frames.Hello(run_id="measure", placement_number=0, source="measured", digest="")


def encode(hidden: torch.Tensor, mask: torch.Tensor, dtype: str) -> list[bytes]:
    """Encode a hidden state with its mask to messages, as the sender's thread does."""
    encoded = tensors.encode(hidden, mask, dtype)
    header = frames.tensor_header(_HELLO, TensorKey(Payload.HIDDEN, 0, 0, 0), encoded)
    return list(frames.messages(header, encoded.parts))


def decode(messages: list[bytes], compute_dtype: torch.dtype) -> torch.Tensor:
    """Decode messages to the hidden state, as the receiver's thread does.

    Raises:
        FrameError: the messages are not one whole tensor.
    """
    assembler = frames.Assembler(lambda header: None, lambda header: None)
    for message in messages:
        fed = assembler.feed(message)
        if fed.error is not None:
            raise fed.error
        if fed.received is not None:
            header, payload, _ = fed.received
            dtype = frames.DTYPE_NAMES[header.dtype]
            hidden, _ = tensors.decode(
                payload,
                tuple(header.shape),
                dtype,
                header.mask_bytes,
                compute_dtype=compute_dtype,
                exponent=header.exponent,
            )
            return hidden
    raise FrameError("a measured tensor did not arrive whole; please report this")
