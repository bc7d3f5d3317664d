"""A run as a Weights & Biases run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulcrum.runs.observers import Observer, RunInfo
from fulcrum.runs.trackers.packages import import_tracker
from fulcrum.runs.trackers.values import list_final_values, list_round_values, list_settings_sent
from fulcrum.types import RoundResult

if TYPE_CHECKING:
    from fulcrum.runs.result import Result


class WandbTracker(Observer):
    """Sends a run to Weights & Biases: settings as its config, rounds as its history.

    Offline by default: files in the folder wandb/, which `wandb sync` uploads; WANDB_MODE=online or mode="online"
    uploads at once. project: its name. folder: where the files go; default the run's folder, or here.
    """

    def __init__(self, project: str = "fulcrum", mode: str = "", folder: Path | str | None = None) -> None:
        self.project, self.folder = project, folder
        self.mode = mode or os.environ.get("WANDB_MODE", "offline")
        self._wandb = import_tracker("wandb", "wandb", "wandb")
        self._run: RunInfo | None = None
        self._made: Any = None

    def started(self, run: RunInfo) -> None:
        """Begin the run, or go on with the one of the same id."""
        self._run = run
        self._made = self._wandb.init(
            project=self.project,
            id=run.id,
            name=run.folder.name if run.folder else None,
            config=list_settings_sent(run),
            mode=self.mode,
            dir=str(self.folder or run.folder or Path.cwd()),
            resume="allow",
            settings=self._wandb.Settings(
                silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False
            ),
        )

    def round(self, result: RoundResult) -> None:
        """Send the round's numbers."""
        assert self._run is not None
        self._made.log(list_round_values(self._run, result), step=result.round)

    def ended(self, result: Result | None) -> None:
        """End the run; a finished one adds what it ended with to its summary."""
        if self._made is None:
            return
        if result is not None:
            self._made.summary.update(
                {f"final/{name}": value for name, value in list_final_values(result.summary).items()}
            )
        self._made.finish(exit_code=0 if result is not None else 1)
