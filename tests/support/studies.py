"""Small studies for tests: experiments on the digits that end in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulcrum.study.experiment import Experiment, read_experiment
from fulcrum.study.job import StudyJob

PAPER = """
datasets = ["digits"]
epsilons = [8.0, 4.0]
seeds = [0, 1]
[settings.data]
parties = 2
[settings.train]
rounds = {rounds}
rate = 0.1
[settings.privacy]
delta = 1e-4
[[rows]]
name = "none"
label = "non-private"
set = {{ "train.lr" = 0.1 }}
[[rows]]
name = "dp-sgd"
label = "DP-SGD"
paper = "DP-SGD"
[[rows]]
name = "dp-fedavg"
label = "DP-FedAvg"
[[rows]]
name = "moo"
label = "MOO"
paper = "MOO"
[protocol]
C0 = 0.5
[parties]
counts = [1, 3]
rows = ["moo", "dp-sgd"]
seeds = 1
[subset]
dataset = "digits"
epsilon = 4.0
rounds = 2
without = ["dp-fedavg"]
"""

SEARCH = """
trials = 3
seed = 1
validation = 0.1
run_seed = 77
[space]
"train.lr" = { low = 0.1, high = 10.0 }
"clip.C0" = { low = 0.1, high = 10.0 }
"train.steps" = { choices = [1, 2] }
[rows.none]
drop = ["clip.C0"]
[rows.moo.space]
"clip.eta_C" = { low = 0.01, high = 0.1 }
"""

GRID = """
C0 = [0.1, 1.0]
lr = [0.5, 1.0]
default_lr = 1.0
epsilons = [4.0]
seeds = [0]
default = "moo"
fixed = "dp-sgd"
rules = ["dp-sgd", "moo"]
[settings.train]
rounds = 2
rate = 0.1
[settings.privacy]
delta = 1e-4
[datasets.digits.data]
parties = 2
"""


def experiments(folder: Path, rounds: int = 2) -> Path:
    """A folder like experiments/, over the digits."""
    place = folder / "experiments"
    place.mkdir(exist_ok=True)
    (place / "paper.toml").write_text(PAPER.format(rounds=rounds))
    (place / "search.toml").write_text(SEARCH)
    (place / "robustness.toml").write_text(GRID)
    return place


def small(folder: Path, rounds: int = 2) -> Experiment:
    """The experiment of that folder."""
    return read_experiment(experiments(folder, rounds))


def record(job: StudyJob, accuracy: float, **changes: Any) -> dict[str, Any]:
    """A finished run as the store keeps it, without training anything."""
    return {
        **job.to_json(),
        "seed": job.seed,
        "accuracy": accuracy,
        "loss": 1.0,
        "C": [[1, 1.0], [2, 2.0]],
        "curve": [[2, accuracy]],
        "notes": [],
        "machine": {"device": "cpu", "processor": "test", "cores": 1, "python": "3", "torch": "2"},
        "date": "2026-01-01T00:00:00+00:00",
        **changes,
    }
