"""A signal classifier over six workshops: faults in the vibration of machines, by a 1-D CNN (docs/example-series.md).

    python examples/series/run.py [--json] [--seeds 0 1 2] [--reference] [--out FILE]

Made-up signals of 64 samples: a hum; with an imbalance a second, slower tone; with a bearing fault short knocks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

import fulcrum
from fulcrum.data import Dataset, from_arrays
from fulcrum.settings.files import read_settings
from fulcrum.study.repeats import parse_example_options, repeat, report

HERE = Path(__file__).parent
SEEDS = range(3)
LENGTH = 64
WORKSHOPS = ("one", "two", "three", "four", "five", "six")
CLASSES = ("normal", "imbalance", "bearing")


def make_signals(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signals [n, 1, 64], classes [n] and workshops [n]; workshops differ in the pitch of their machines' hum."""
    rng = np.random.default_rng(seed)
    workshop = np.arange(n) % len(WORKSHOPS)
    label = rng.choice(3, n, p=(0.5, 0.3, 0.2))
    time = np.arange(LENGTH)
    pitch = 0.9 + 0.1 * workshop + 0.05 * rng.normal(size=n)
    phase = rng.random((n, 3)) * 2 * np.pi
    signal = np.sin(pitch[:, None] * time + phase[:, :1]) + 0.5 * rng.normal(size=(n, LENGTH))
    signal += (label == 1)[:, None] * 0.9 * np.sin(0.25 * pitch[:, None] * time + phase[:, 1:2])
    knocks = ((time[None, :] + rng.integers(0, 12, n)[:, None]) % 12 == 0) * 2.5
    signal += (label == 2)[:, None] * knocks
    return np.clip(signal / 2, -3, 3).astype(np.float32)[:, None], label.astype(np.int64), workshop


def load_signals(n: int = 6000) -> Dataset:
    """Training and test signals with their workshops."""
    x, y, party = make_signals(n, 0)
    x_test, y_test, party_test = make_signals(n // 4, 1)
    return from_arrays(
        *(x, y, x_test, y_test),
        party=party,
        party_test=party_test,
        party_names=WORKSHOPS,
        classes=len(CLASSES),
        public=True,
        name="signals",
    )


def make_model() -> nn.Module:
    """A small 1-D CNN: two convolutions, the mean over time, a linear layer; 931 parameters."""
    return nn.Sequential(
        nn.Conv1d(1, 8, 9, stride=2, padding=4),
        nn.Tanh(),
        nn.Conv1d(8, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(64, len(CLASSES)),
    )


def train(data: Dataset, seed: int, reference: bool = False) -> fulcrum.Result:
    """One run with the settings beside this file; the seed also draws the initial weights."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model()
    settings = read_settings(HERE / "settings.toml", {"run.seed": seed, "run.reference": reference})
    return fulcrum.train(data, model, settings=settings)


def main() -> None:
    """Train once per seed and print the means."""
    options = parse_example_options(__doc__ or "", SEEDS)
    data = load_signals(600 if options.quick else 6000)
    repeats = repeat(lambda seed: train(data, seed, options.reference), options.seeds)
    report("series", repeats, options, data="made up")


if __name__ == "__main__":
    main()
