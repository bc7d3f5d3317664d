"""A run as an MLflow run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fulcrum.runs.observers import Observer, RunInfo
from fulcrum.runs.trackers.packages import import_tracker
from fulcrum.runs.trackers.values import list_final_values, list_round_values, list_settings_sent
from fulcrum.types import RoundResult

if TYPE_CHECKING:
    from fulcrum.runs.result import Result

RUN_TAG = "fulcrum.run"
"""The tag that holds the run's id: a run that goes on continues the MLflow run of this tag."""
MAX_VALUE_LENGTH = 500
ARTIFACTS = ("PRIVACY.md", "MODEL.md", "settings.toml", "summary.json")


class MlflowTracker(Observer):
    """Sends a run to MLflow: settings as parameters, rounds as metrics, the statement as an artifact at the end.

    uri: of the tracking server or folder; default MLFLOW_TRACKING_URI, or MLflow's own. experiment: its name.
    artifacts: whether files of the run's folder are sent at its end; of private data not those that hold the seed.
    """

    def __init__(self, uri: str | None = None, experiment: str = "fulcrum", artifacts: bool = True) -> None:
        self.experiment, self.artifacts = experiment, artifacts
        self._mlflow = import_tracker("mlflow", "mlflow", "mlflow")
        self._entities = import_tracker("mlflow.entities", "mlflow", "mlflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        self._run: RunInfo | None = None
        self._id = ""

    def started(self, run: RunInfo) -> None:
        """Begin an MLflow run, or go on with the one of this run's id."""
        self._run = run
        known = self._client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self.experiment)
        found = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        name = run.folder.name if run.folder else f"{run.settings.method}-{run.id[:8]}"
        made = self._client.create_run(experiment, run_name=name, tags={RUN_TAG: run.id, "fulcrum.score": run.score})
        self._id = made.info.run_id
        given = [
            self._entities.Param(name, str(value)[:MAX_VALUE_LENGTH]) for name, value in list_settings_sent(run).items()
        ]
        for start in range(0, len(given), 100):  # the most that one request may hold
            self._client.log_batch(self._id, params=given[start : start + 100])

    def round(self, result: RoundResult) -> None:
        """Send the round's numbers."""
        assert self._run is not None
        now = int(time.time() * 1000)
        values = list_round_values(self._run, result)
        metrics = [self._entities.Metric(_make_key(name), value, now, result.round) for name, value in values.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[start : start + 1000])

    def ended(self, result: Result | None) -> None:
        """End the MLflow run: finished, or killed where the run was interrupted."""
        assert self._run is not None
        if result is not None:
            for name, value in list_final_values(result.summary).items():
                self._client.set_tag(self._id, f"fulcrum.{name}", str(value))
            self._send_artifacts(result)
        self._client.set_terminated(self._id, "FINISHED" if result is not None else "KILLED")

    def _send_artifacts(self, result: Result) -> None:
        assert self._run is not None
        if not self.artifacts or result.folder is None:
            return
        kept = [name for name in ARTIFACTS if self._run.public or name not in ("settings.toml", "summary.json")]
        for name in kept:
            if (result.folder / name).is_file():
                self._client.log_artifact(self._id, str(result.folder / name))


def _make_key(name: str) -> str:
    """A name of letters, digits and signs that MLflow allows."""
    return "".join(sign if sign.isascii() and (sign.isalnum() or sign in "_-. /") else "_" for sign in name)[:250]
