"""A learning rate for a cell, found on training records that are in none of its federations; no test record is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from fulcrum.analysis.attacks.cells import AttackCell
from fulcrum.analysis.attacks.pool import order_records
from fulcrum.analysis.attacks.shadows import make_pool_settings
from fulcrum.data import Dataset
from fulcrum.data.dataset import compute_dataset_fingerprint
from fulcrum.engines.batched import run_many
from fulcrum.errors import ConfigError
from fulcrum.runs import prepare_unrehearsed

SCORED_SHARE, MOST_SCORED = 0.2, 5000
"""Of the records outside of the pool, the part that candidates for a rate are scored on, and the most of them."""
LEAST_RECORDS = 50


def choose_lr(
    cell: AttackCell, dataset: Dataset, rates: Sequence[float], device: str = "auto"
) -> tuple[float, dict[str, float]]:
    """(the best of the rates, the accuracy of each), from one federation per rate, all with the cell's noise.

    They train on records outside of the cell's pool, as many as its federations have where there are enough, and are
    scored on others that are outside of it too. Only a rate travels from there to the attacked federations.
    """
    if not rates or min(rates) <= 0:
        raise ConfigError(f"learning rates {list(rates)} to choose from: give one or more above 0.")
    size, parties = cell.size, cell.settings.data.parties
    free = order_records(dataset, cell.seed)[parties * size.per_party :]
    scored = min(MOST_SCORED, int(SCORED_SHARE * len(free)))
    members = min(parties * (size.common + size.candidates // 2), len(free) - scored)
    if scored < LEAST_RECORDS:
        raise ConfigError(
            f"{cell.name}: {len(free)} records are outside of the pool, too few to choose a learning rate on; give "
            "one with --lr, or take a smaller pool."
        )
    rows = torch.from_numpy(free)
    part = dataclasses.replace(
        dataset, train=dataset.records.take(rows[scored : scored + members]), test=dataset.records.take(rows[:scored])
    )
    part = dataclasses.replace(part, fingerprint=compute_dataset_fingerprint(part))
    settings = make_pool_settings(cell, device)
    runs = [prepare_unrehearsed(settings.replace(train={"lr": rate}), part) for rate in rates]
    last = None
    for result in run_many(runs):
        last = result
    assert last is not None
    found = torch.nan_to_num(last.accuracy, nan=0.0).tolist()
    best = max(range(len(rates)), key=lambda i: found[i])
    return rates[best], {f"{rate:g}": round(value, 4) for rate, value in zip(rates, found, strict=True)}
