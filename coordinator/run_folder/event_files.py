"""The files that a run's events fill: jobs, plans, metrics, checkpoints and results in the run's folder."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.run_folder.folder import RunFolder
from ringtune.files.strict import read_object
from ringtune.rounds.checkpoint import CheckpointManifest
from ringtune.v1 import control_pb2


class EventFiles:
    """Writes what events tell into a folder.

    Args:
        folder: of the run.
        on_saved: called with run and step when the manifest of a checkpoint is on disk.
    """

    def __init__(self, folder: RunFolder, *, on_saved: Callable[[str, int], None]) -> None:
        self._folder = folder
        self._on_saved = on_saved
        self._run_id = ""

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Write one event.

        Raises:
            IntegrityError: the event is not readable.
            StorageError: no room.
        """
        folder = self._folder
        match event.WhichOneof("event"):
            case "run_id":
                self._run_id = event.run_id
            case "job_toml":
                folder.write_job(event.job_toml)
            case "profile_json":
                folder.write_json("profile.json", event.profile_json)
            case "plan_json":
                folder.write_json("plan.json", event.plan_json)
            case "report_json":
                folder.write_json("report.json", event.report_json)
            case "metrics_json":
                folder.add_metrics(event.metrics_json)
            case "file":
                folder.add_chunk(event.file)
            case "operations_json":
                folder.tables.add(event.operations_json)
            case "resumed_json":
                folder.go_back_to(int(read_object(event.resumed_json, "where the run goes on")["step"]))
            case "best_json":
                told = read_object(event.best_json, "the best result")
                folder.add_best(int(told["step"]), is_result=bool(told["is_result"]))
            case "checkpoint_json":
                manifest = CheckpointManifest.parse(event.checkpoint_json)
                folder.add_checkpoint(manifest)
                self._on_saved(self._run_id, manifest.step)
