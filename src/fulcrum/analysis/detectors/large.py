"""Neighbour replay, large models: the noise of releases with ten thousand numbers, and with more than a million.

Large sums are noised in pieces and in place, by code that a small model never runs. The numbers are looked at in rows
of a few thousand, so that a piece with too little noise, or with that of another piece, shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from scipy import special
from torch import nn

from fulcrum.analysis.detectors import exact
from fulcrum.analysis.detectors.findings import Reading
from fulcrum.analysis.detectors.noise import describe_ratio
from fulcrum.analysis.detectors.probe import (
    CLASSES,
    EMPTY_RATE,
    FEATURES,
    make_dataset,
    make_model,
    make_records,
    read_reply,
)
from fulcrum.runs import prepare
from fulcrum.settings.schema import Settings
from fulcrum.training.snapshot import make_first_snapshot
from fulcrum.types import RoundRequest

NAME = "neighbour replay"
ROW = 2048
WIDTHS = (600, 40_000)
"""Of the hidden layer: a model whose sum is noised at once, and one whose sum is noised in pieces."""


def make_wide_model(width: int) -> nn.Module:
    """The probe's model with a hidden layer of another width; all weights are the same."""
    model = nn.Sequential(nn.Linear(FEATURES, width), nn.LeakyReLU(0.3), nn.Linear(width, CLASSES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    return model


def read_large_sums(settings: Settings) -> Iterator[Reading]:
    """Readings of one empty release of each of the large models."""
    for width in WIDTHS:
        yield from _read_sum(settings, width)


def _read_sum(settings: Settings, width: int) -> Iterator[Reading]:
    persons = settings.privacy.unit == "person"
    records = make_records(make_model(), 1, persons)
    changed = settings.replace(
        data={"source": "probe", "parties": 1, "partition": "auto", "min_examples": 1, "validation": 0.0},
        train={"rounds": 2, "steps": 1, "epochs": 0.0, "participation": 1.0},
        privacy={"evaluation_epsilon": None, "max_participations": 0, "budgets": {}},
        run={"ledger": "", "diagnostics": False},
    )
    federation = prepare(changed, make_dataset(records, records["party"], persons), make_wide_model(width))
    first = make_first_snapshot(federation)
    task = replace(federation.plan.assignment(0, 0, 1.0), rate=EMPTY_RATE)
    request = RoundRequest(0, 2, first.params, (task,), (first.rule,), settings.train.weight_decay)
    (reply,) = federation.engine.run(request)
    values, _, terms = read_reply(federation, 0, task, reply, first.params, first.rule)
    count = federation.problem.layout.dim
    noise = (values / np.where(terms.deviations > 0, terms.deviations, 1.0))[:count]
    rows = noise[: count // ROW * ROW].reshape(-1, ROW)
    sums = np.square(rows).sum(axis=1)
    judged = [exact.judge_variance(float(each), ROW) for each in sums]
    worst = int(np.argmin(judged))
    size = f"{count:,} parameters"
    where = f"parameters {worst * ROW} to {worst * ROW + ROW - 1} of a model with {size}"
    yield Reading(
        NAME,
        "noise of a large model",
        min(1.0, judged[worst] * len(judged)),
        f"the noise on {where} is {describe_ratio(float(sums[worst]), ROW)} what is declared",
    )
    yield Reading(
        NAME,
        "form of a large model's noise",
        min(1.0, 2 * min(exact.judge_distribution(special.ndtr(noise)), exact.judge_largest(noise))),
        f"the noise of a model with {size} is not normal with the declared deviation",
    )
    p, i, j = exact.judge_pairs(rows)
    yield Reading(
        NAME,
        "noise of pieces",
        p,
        f"the noise of a model with {size} repeats: parameters from {i * ROW} on have that of those from {j * ROW} on",
    )
