"""Census income over ten parties: a linear model on a declared table, epsilon 1 at every party (docs/adult.md).

    python examples/adult/run.py [--json] [--seeds 0 1 2 ...] [--reference] [--out FILE]

The data is UCI Adult (adult/adult.data.gz and adult.test.gz below a folder of FULCRUM_DATA); without it, a made-up
stand-in with the same columns.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fulcrum
from fulcrum.data import Dataset, Schema, make_table_dataset
from fulcrum.settings.files import read_settings
from fulcrum.study.repeats import find_example_file, parse_example_options, repeat, report

HERE = Path(__file__).parent
SEEDS = range(5)
NAMES = (
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"),
    *("race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income"),
)
RARE = 3.0
"""Factor on the one-hot columns of capital gains and losses: few people have them, and they decide (docs/adult.md)."""

Columns = dict[str, list[str]]


def read_census(file: Path) -> Columns:
    """The columns of adult.data or adult.test: no header, or one; labels of the test file end in a full stop."""
    with gzip.open(file, "rt", newline="") as opened:
        rows = [row for row in csv.reader(opened, skipinitialspace=True) if len(row) == len(NAMES)]
    rows = [row for row in rows if row[0].isdigit()]
    columns = {name: [row[place] for row in rows] for place, name in enumerate(NAMES)}
    return columns | {"income": [value.rstrip(".") for value in columns["income"]]}


def make_census(n: int, seed: int) -> Columns:
    """A stand-in with the same columns: income rises with age, schooling, hours, marriage and capital gains."""
    rng = np.random.default_rng(seed)
    schema = Schema.read(HERE / "adult.schema.toml").to_mapping()["columns"]
    found: dict[str, np.ndarray] = {
        "age": rng.integers(17, 80, n),
        "fnlwgt": rng.integers(10_000, 500_000, n),
        "education_num": rng.integers(1, 17, n),
        "capital_gain": np.where(rng.random(n) < 0.08, rng.integers(1000, 20_000, n), 0),
        "capital_loss": np.where(rng.random(n) < 0.05, rng.integers(1000, 3000, n), 0),
        "hours_per_week": rng.integers(10, 70, n),
    }
    for name in ("workclass", "education", "marital_status", "occupation", "relationship", "sex"):
        found[name] = rng.choice(schema[name]["categories"], n)
    found |= {"race": np.full(n, "White"), "native_country": np.full(n, "United-States")}
    married = found["marital_status"] == "Married-civ-spouse"
    score = 0.4 * (found["education_num"] - 10) + 0.04 * (found["age"] - 40) + 0.04 * (found["hours_per_week"] - 40)
    score = score + 2.5 * married + 3.0 * (found["capital_gain"] > 5000) - 1.5
    rich = rng.random(n) < 1 / (1 + np.exp(-1.5 * score))
    found["income"] = np.where(rich, ">50K", "<=50K")
    return {name: [str(value) for value in column] for name, column in found.items()}


def load_census(made_up: bool = False, size: int = 4000) -> tuple[Dataset, bool]:
    """Training and test records by the schema beside this file, and whether they are the real ones.

    size: training records of the stand-in.
    """
    files = [None if made_up else find_example_file("adult", f"adult.{part}.gz") for part in ("data", "test")]
    real = None not in files
    parts = [read_census(file) for file in files if file] if real else [make_census(size, 0), make_census(size // 2, 1)]
    schema = Schema.read(HERE / "adult.schema.toml")
    return make_table_dataset(parts[0], schema, test=parts[1], public=True, name="adult"), real


class ScaledLinear(nn.Module):
    """Logistic regression on inputs that are multiplied by public constants [width] first; it starts at 0."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", scale)
        self.linear = nn.Linear(len(scale), 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Records [n, width] -> logits [n, 1]."""
        found: Tensor = self.linear(x * self.scale)
        return found


def make_model(data: Dataset, factor: float = RARE) -> ScaledLinear:
    """The model for the schema's columns: those of capital gains and losses count more, but not "none" itself."""
    assert data.schema is not None
    names = data.schema.input_names
    rare = [name.startswith("capital") and not is_lowest_cut(name) for name in names]
    return ScaledLinear(torch.where(torch.tensor(rare), factor, 1.0))


def is_lowest_cut(name: str) -> bool:
    """Whether an input is the interval of people without a gain or loss."""
    return "<" in name


def train(data: Dataset, seed: int, reference: bool = False) -> fulcrum.Result:
    """One run with the settings beside this file."""
    settings = read_settings(HERE / "settings.toml", {"run.seed": seed, "run.reference": reference})
    return fulcrum.train(data, make_model(data), settings=settings)


def main() -> None:
    """Train once per seed and print the means."""
    options = parse_example_options(__doc__ or "", SEEDS)
    data, real = load_census(options.made_up, 800 if options.quick else 4000)
    repeats = repeat(lambda seed: train(data, seed, options.reference), options.seeds)
    report("adult", repeats, options, data="UCI Adult" if real else "made up")


if __name__ == "__main__":
    main()
