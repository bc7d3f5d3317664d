"""How the settings of the heart example were chosen: cross-validation within the training rows (docs/heart.md).

    python examples/heart/choose.py [--repeats 4] [--out FILE]

Test rows are never read. Each candidate is trained privately on four fifths of every hospital's training rows and
scored on the rest, by the mean accuracy over hospitals, which is what the example is judged by.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import run

import fulcrum
from fulcrum.data import Dataset
from fulcrum.runs import folder as record
from fulcrum.settings.files import read_settings
from fulcrum.study.provenance import get_source_commit

FOLDS = 5
CANDIDATES: dict[str, dict[str, Any]] = {
    f"{method}, {rounds} rounds, weights {weights}": {
        "method": method,
        "overrides": {"train.rounds": rounds, "train.weights": weights, "run.evaluate_every": rounds},
    }
    for method in ("dp-sgd", "auto-s", "moo")
    for rounds in (3, 5, 10)
    for weights in ("examples", "sqrt", "uniform")
}


def split_training_rows(data: Dataset, repeat: int) -> list[Dataset]:
    """The training rows as five data sets, each with another fifth of every hospital as its test rows."""
    rng = np.random.default_rng(repeat)
    assert data.party is not None
    party = data.party.numpy()
    fold = np.zeros(len(party), dtype=int)
    for hospital in range(len(data.party_names)):
        rows = np.flatnonzero(party == hospital)
        fold[rng.permutation(rows)] = np.arange(len(rows)) % FOLDS
    parts = []
    for number in range(FOLDS):
        kept, held = fold != number, fold == number
        arrays = {"x": data.x[kept], "y": data.y[kept], "x_test": data.x[held], "y_test": data.y[held]}
        arrays |= {"party": party[kept], "party_test": party[held], "party_names": np.array(data.party_names)}
        parts.append(run.make_dataset(arrays))
    return parts


def score(candidate: dict[str, Any], parts: list[Dataset]) -> tuple[float, float]:
    """Mean over the parts of the mean accuracy over hospitals, and its standard error."""
    found = []
    for seed, part in enumerate(parts):
        settings = read_settings(
            run.HERE / "settings.toml", {**candidate["overrides"], "run.seed": seed}, candidate["method"]
        )
        found.append(fulcrum.train(part, settings=settings).mean_over_parties["accuracy"])
    return float(np.mean(found)), float(np.std(found) / math.sqrt(len(found)))


def main() -> None:
    """Score all candidates and print them, best first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=4, help="how often the rows are split anew")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data, real = run.load_hospitals()
    parts = [part for repeat in range(options.repeats) for part in split_training_rows(data, repeat)]
    found = {name: score(candidate, parts) for name, candidate in CANDIDATES.items()}
    ranked = dict(sorted(found.items(), key=lambda item: -item[1][0]))
    for name, (mean, error) in ranked.items():
        print(f"{name:<40}{mean:.4f} +- {error:.4f}")
    if options.out:
        made = {"real": real, "splits": len(parts), "commit": get_source_commit(), "date": record.current_utc_time()}
        options.out.write_text(record.to_json_text({**made, "mean_over_parties": ranked}))


if __name__ == "__main__":
    main()
