"""Heart disease at four hospitals: one linear model, a true epsilon of 1 at every hospital (docs/heart.md).

    python examples/heart/run.py [--json] [--seeds 0 1 2 ...] [--reference] [--out FILE]

The data is UCI Heart Disease with FLamby's features and split (heart/flamby-split.npz below a folder of FULCRUM_DATA);
without it, a made-up stand-in of the same shape.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fulcrum
from fulcrum.data import Dataset, from_arrays
from fulcrum.settings.files import read_settings
from fulcrum.study.repeats import find_example_file, parse_example_options, repeat, report

HERE = Path(__file__).parent
SEEDS = range(10)
SIZES = {"cleveland": (199, 104), "hungarian": (172, 89), "switzerland": (30, 16), "va": (85, 45)}
"""Training and test rows of each hospital, in FLamby's split and in the stand-in."""


def load_hospitals(made_up: bool = False) -> tuple[Dataset, bool]:
    """The four hospitals' records, and whether they are the real ones."""
    file = None if made_up else find_example_file("heart", "flamby-split.npz")
    if file is None:
        return make_hospitals(), False
    with np.load(file) as arrays:
        return make_dataset({name: arrays[name] for name in arrays.files}), True


def make_dataset(arrays: dict[str, np.ndarray]) -> Dataset:
    """The arrays as public records with their hospitals."""
    return from_arrays(
        *(arrays[name] for name in ("x", "y", "x_test", "y_test")),
        party=arrays["party"],
        party_test=arrays["party_test"],
        party_names=[str(name) for name in arrays["party_names"]],
        task="binary",
        public=True,
        name="heart",
    )


def make_hospitals(seed: int = 0) -> Dataset:
    """A stand-in: 13 features of which five decide, hospitals of the same sizes with more or fewer sick patients."""
    rng = np.random.default_rng(seed)
    direction = np.array([0.5, 0.8, 0.1, 0.1, 0.0, -0.7, 0.9, 0.8, 0.0, 0.0, 0.9, 0.1, 0.0])
    shift = {"cleveland": 0.0, "hungarian": -0.6, "switzerland": 2.5, "va": 1.2}
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("x", "y", "party", "x_test", "y_test", "party_test")}
    for number, (hospital, sizes) in enumerate(SIZES.items()):
        for size, end in zip(sizes, ("", "_test"), strict=True):
            x = rng.normal(size=(size, 13)).astype(np.float32)
            chance = 1 / (1 + np.exp(-1.5 * (x @ direction) - shift[hospital]))
            parts[f"x{end}"].append(x)
            parts[f"y{end}"].append((rng.random(size) < chance).astype(np.int64))
            parts[f"party{end}"].append(np.full(size, number))
    return make_dataset(
        {name: np.concatenate(found) for name, found in parts.items()} | {"party_names": np.array(list(SIZES))}
    )


def train(data: Dataset, seed: int, reference: bool = False) -> fulcrum.Result:
    """One run with the settings beside this file."""
    settings = read_settings(HERE / "settings.toml", {"run.seed": seed, "run.reference": reference})
    return fulcrum.train(data, settings=settings)


def main() -> None:
    """Train once per seed and print the means."""
    options = parse_example_options(__doc__ or "", SEEDS)
    data, real = load_hospitals(options.made_up)
    repeats = repeat(lambda seed: train(data, seed, options.reference), options.seeds)
    report("heart", repeats, options, data="UCI Heart Disease, FLamby's split" if real else "made up")


if __name__ == "__main__":
    main()
