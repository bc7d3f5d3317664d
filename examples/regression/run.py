"""A regression over five clinics: how far diabetes has progressed after a year (docs/example-regression.md).

    python examples/regression/run.py [--json] [--seeds 0 1 2 ...] [--reference] [--out FILE]

The data is scikit-learn's own diabetes set (442 patients), so nothing is downloaded. A regression has no accuracy: the
line of JSON has r2, rmse and mae, and null for it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fulcrum
from fulcrum.data import Dataset, from_arrays
from fulcrum.settings.files import read_settings
from fulcrum.study.repeats import parse_example_options, repeat, report

HERE = Path(__file__).parent
SEEDS = range(10)
SPREAD = 0.048
"""Standard deviation of each column as scikit-learn documents it: the sum of squares is 1, so it is 1/sqrt(442)."""
TEST_EVERY = 4
"""Every fourth patient is public and scored; the others train."""


def load_patients() -> Dataset:
    """Ten standardised columns and the measure after a year, 25 to 346."""
    try:
        from sklearn.datasets import load_diabetes
    except ImportError:
        raise SystemExit("this example's data comes with scikit-learn: pip install scikit-learn.") from None
    x, y = load_diabetes(return_X_y=True)
    x = np.clip(x / SPREAD, -3, 3).astype(np.float32)
    test = np.arange(len(y)) % TEST_EVERY == 0
    return from_arrays(
        *(x[~test], y[~test].astype(np.float32), x[test], y[test].astype(np.float32)),
        task="regression",
        public=True,
        name="diabetes",
    )


def train(data: Dataset, seed: int, reference: bool = False) -> fulcrum.Result:
    """One run with the settings beside this file."""
    settings = read_settings(HERE / "settings.toml", {"run.seed": seed, "run.reference": reference})
    return fulcrum.train(data, settings=settings)


def main() -> None:
    """Train once per seed and print the means."""
    options = parse_example_options(__doc__ or "", SEEDS)
    data = load_patients()
    repeats = repeat(lambda seed: train(data, seed, options.reference), options.seeds)
    report("regression", repeats, options, accuracy=None, data="scikit-learn's diabetes")


if __name__ == "__main__":
    main()
