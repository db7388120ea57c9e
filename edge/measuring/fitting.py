"""Time what a helper does with the pairs of one block, with the code of a run."""

from __future__ import annotations

from pathlib import Path

import torch

from edge.compute.capturing.sites import sites_of
from edge.compute.capturing.wire import from_file, to_file
from edge.compute.helping.auxiliary_models import AuxiliaryModels
from edge.measuring.laps import Cycle, Laps
from ringtune.costs.measured.measuring import Size
from ringtune.costs.work_times import Work
from ringtune.files.pieces import Pieces
from ringtune.jobs.job import Job
from ringtune.models.adapters.offload_support import offload_refusal
from ringtune.models.families import FAMILIES
from ringtune.models.folder import read_config


class Fitting:
    """The adapters of one block, ready to be fitted from random pairs.

    Args:
        folder: of the model; only its configuration is read.
        job: of the run.
        block: whose adapters.
        dtype: of the computation.
        device: of the computation.
    """

    def __init__(self, folder: Path, job: Job, block: int, dtype: torch.dtype, device: torch.device) -> None:
        self._models = AuxiliaryModels(folder, job, range(block, block + 1), dtype, device)
        self._sites = sites_of(self._models.skeleton, block)
        self._dtype, self._device = dtype, device

    @staticmethod
    def is_possible(folder: Path, job: Job) -> bool:
        """Whether a helper can fit the adapters of a job; full parameters have none."""
        config = read_config(folder)
        fused = FAMILIES[config["model_type"]].widths(config).merged
        return not job.method.full_parameters and not offload_refusal(
            job.adapter.config, dropout=job.train.dropout, fused=fused
        )

    def cycle(self, size: Size) -> Cycle:
        """Make the loop that reads pairs of a size as they come, and adds their gradients up."""
        data = self._pairs(size)

        def fit() -> None:
            self._models.fit(from_file(data, {}, where="the pairs", device=self._device))

        def cycle(laps: Laps) -> None:
            laps.lap(Work.FIT, fit)

        return cycle

    def _pairs(self, size: Size) -> Pieces:
        found: dict[str, torch.Tensor] = {}
        for site in self._sites:
            if site.source == site.name:
                found[f"{site.name}.x"] = torch.randn(size.rows, size.tokens, site.inputs, dtype=self._dtype)
            found[f"{site.name}.grad"] = torch.randn(size.rows, size.tokens, site.outputs, dtype=self._dtype)
        return to_file(found, {})
