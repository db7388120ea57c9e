"""The coordinator as a source of weights: nodes of a run fetch from it if the job's model folder is here.

The agent has the same service; what is served, and the checks, are ``ringtune.weights.source``'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import grpc

from ringtune.errors import RingTuneError
from ringtune.jobs.job import Job
from ringtune.rpc.codec import status_of_error
from ringtune.v1 import weights_pb2, weights_pb2_grpc
from ringtune.weights.source import Offers

_LOG = logging.getLogger(__name__)


def model_folder(job: Job) -> Path | None:
    """The job's model folder; None if it is not on this machine."""
    folder = Path(job.model.path)
    return folder if folder.is_dir() else None


class WeightsServicer(weights_pb2_grpc.WeightsServicer):
    """Serves what ``offers`` has.

    Args:
        offers: the model of the run that is driven.
    """

    def __init__(self, offers: Offers) -> None:
        self._offers = offers

    def Manifest(  # noqa: N802
        self, request: weights_pb2.ManifestRequest, context: grpc.ServicerContext
    ) -> weights_pb2.ManifestReply:
        """What the model of a run consists of."""
        try:
            return self._offers.manifest(request)
        except Exception as error:
            _abort(context, error)

    def Fetch(  # noqa: N802
        self, request: weights_pb2.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[weights_pb2.FetchChunk]:
        """Contents by digest."""
        try:
            yield from self._offers.chunks(request)
        except Exception as error:
            _abort(context, error)


def _abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    if not isinstance(error, RingTuneError):
        _LOG.exception("serving weights failed by a bug")
    status = status_of_error(error)
    context.abort(grpc.StatusCode[status.name], status.details)
    raise AssertionError("abort raises")
