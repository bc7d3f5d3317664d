"""How the settings of the adult example were chosen: on a fifth of the training rows (docs/adult.md).

    python examples/adult/choose.py [--seeds 0 1] [--out FILE]

The test file is never read for it. Each candidate is trained privately on four fifths of adult.data and scored on the
rest.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import run
import torch

import fulcrum
from fulcrum.data import Dataset
from fulcrum.runs import folder as record
from fulcrum.settings.files import read_settings
from fulcrum.study.provenance import get_source_commit

CANDIDATES: dict[str, tuple[float, dict[str, Any]]] = {
    f"factor {factor:g}, {rounds} rounds at rate {rate:g}": (
        factor,
        {"train.rounds": rounds, "train.rate": rate, "run.evaluate_every": rounds},
    )
    for factor in (1.0, 3.0)
    for rounds, rate in ((30, 1.0), (60, 1.0), (100, 0.2))
}


def hold_out_fifth(data: Dataset, seed: int = 0) -> Dataset:
    """The training rows alone: a fifth of them, drawn at random, in place of the test rows."""
    held = torch.zeros(len(data.y), dtype=torch.bool)
    held[np.random.default_rng(seed).permutation(len(data.y))[: len(data.y) // 5]] = True
    return dataclasses.replace(data, train=data.records.take(~held), test=data.records.take(held))


def main() -> None:
    """Score all candidates and print them, best first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    whole, real = run.load_census()
    part = hold_out_fifth(whole)
    found: dict[str, float] = {}
    for name, (factor, overrides) in CANDIDATES.items():
        scores = []
        for seed in options.seeds:
            settings = read_settings(run.HERE / "settings.toml", {**overrides, "run.seed": seed})
            result = fulcrum.train(part, run.make_model(part, factor), settings=settings)
            scores.append(result.metrics["accuracy"])
        found[name] = float(np.mean(scores))
    ranked = dict(sorted(found.items(), key=lambda item: -item[1]))
    for name, mean in ranked.items():
        print(f"{name:<40}{mean:.4f}")
    if options.out:
        made = {"real": real, "seeds": options.seeds, "commit": get_source_commit(), "date": record.current_utc_time()}
        options.out.write_text(record.to_json_text({**made, "accuracy": ranked}))


if __name__ == "__main__":
    main()
