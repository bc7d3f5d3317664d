"""A new run from an old run's model, over the same parties: `fulcrum serve --from RUN`.

The parties need nothing new: every round brings the weights, and their terms and ledgers hold for the new run, too.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fulcrum.errors import ConfigError
from fulcrum.models.checkpoints import WeightOrigin, read_origin
from fulcrum.runs import folder as record
from fulcrum.settings import files as settings_file
from fulcrum.settings.schema import Settings
from fulcrum.training.problem import TrainingProblem


def take_old_model(problem: TrainingProblem, settings: Settings, old: Path) -> WeightOrigin | None:
    """Put the model of the run in `old` into the problem: its moving average after its last checkpoint.

    Returns what was spent on it, for the coordinator's statement. ConfigError where it is another network.
    """
    facts = record.load_run_json(old, "run.json")
    before = settings_file.read_settings(old / "settings.toml")
    if before.model != settings.model or facts.get("parameters") != problem.layout.dim:
        raise ConfigError(
            f"--from {old} has another model than these settings: {facts.get('parameters')} parameters there, "
            f"{problem.layout.dim} here; copy [model] from {old / 'settings.toml'}."
        )
    snapshot = record.RunFolder(old, None).load_last_snapshot(torch.device("cpu"))  # type: ignore[arg-type]
    if snapshot is None:
        raise ConfigError(f"--from {old} has no readable checkpoint; name a run that finished at least one round.")
    problem.layout.write(problem.model, snapshot.averaged.to(problem.device))
    return read_origin(old)
