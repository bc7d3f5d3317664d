"""A run as TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulcrum.runs.observers import Observer, RunInfo
from fulcrum.runs.trackers.packages import import_tracker
from fulcrum.runs.trackers.values import list_final_values, list_round_values, list_settings_sent
from fulcrum.types import RoundResult

if TYPE_CHECKING:
    from fulcrum.runs.result import Result


class TensorBoardTracker(Observer):
    """Writes event files for `tensorboard --logdir`.

    folder: default tensorboard/ in the run's folder, or tensorboard/RUN here where the run keeps none. A run that goes
    on continues its curves; rounds that are played again replace those of before.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = folder
        self._module = import_tracker("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._run: RunInfo | None = None
        self._writer: Any = None
        self._place: Path | None = None

    def started(self, run: RunInfo) -> None:
        """Note the run; the file begins with its first round, whose number says what it replaces."""
        self._run, self._writer = run, None
        default = run.folder / "tensorboard" if run.folder else Path("tensorboard") / run.id
        self._place = Path(self.folder) if self.folder is not None else default

    def round(self, result: RoundResult) -> None:
        """Write the round's numbers."""
        assert self._run is not None
        if self._writer is None:
            first = self._place is not None and not self._place.exists()
            self._writer = self._module.SummaryWriter(str(self._place), purge_step=None if first else result.round)
            rows = "".join(f"| {name} | {value} |\n" for name, value in list_settings_sent(self._run).items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", result.round)
        for name, value in list_round_values(self._run, result).items():
            self._writer.add_scalar(name, value, result.round)
        self._writer.flush()

    def ended(self, result: Result | None) -> None:
        """Close the file; a finished run adds what it ended with."""
        if self._writer is not None:
            if result is not None:
                rows = "".join(f"| {name} | {value} |\n" for name, value in list_final_values(result.summary).items())
                self._writer.add_text("result", f"| | |\n|---|---|\n{rows}", result.summary["rounds"])
            self._writer.close()
