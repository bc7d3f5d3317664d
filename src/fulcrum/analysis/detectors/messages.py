"""Neighbour replay, masks and scores: messages that must look uniform, and scores that must be noised."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from fulcrum.analysis.detectors import exact
from fulcrum.analysis.detectors.executed import Executed, Witness
from fulcrum.analysis.detectors.findings import Reading
from fulcrum.engines.reference import ReferenceEngine
from fulcrum.training.evaluate import evaluate_round

NAME = "neighbour replay"
WORD = 2.0**32
EVALUATIONS = 24


def read_masks(run: Executed) -> Iterator[Reading]:
    """Whether masked messages, and differences between any two of a party's, are uniform modulo 2^32."""
    engine = run.federation.engine
    carries = isinstance(engine, Witness) and isinstance(engine.inner, ReferenceEngine) and engine.inner.masks
    if not run.federation.plan.is_pairwise or not carries:  # other engines play all parties and leave masks out
        return
    by_party: dict[int, dict[int, npt.NDArray[np.float64]]] = {}
    for each in run.sent:
        by_party.setdefault(each.task.client, {})[each.round] = each.reply.delta.long().double().numpy() % WORD
    names = run.federation.plan
    for client, rounds in by_party.items():
        order = sorted(rounds)
        for t in order:
            yield Reading(
                NAME,
                "a masked message",
                exact.judge_distribution(rounds[t] / WORD),
                f"the message of round {t + 1} is not uniform, so its mask hides it badly",
                names.name(client),
            )
        for a in order:
            for b in order:
                if b < a:
                    gap = (rounds[a] - rounds[b]) % WORD
                    yield Reading(
                        NAME,
                        "two masked messages",
                        exact.judge_distribution(gap / WORD),
                        f"the messages of rounds {b + 1} and {a + 1} have the same masks: their difference is in clear",
                        names.name(client),
                    )


def read_scores(run: Executed) -> Iterator[Reading]:
    """Whether scores of private held-out records scatter as much as their declared noise, at one and the same model."""
    federation = run.federation
    plan = federation.evaluation
    if federation.settings.data.validation <= 0 or federation.problem.dataset.public:
        return
    params = federation.problem.layout.flatten(federation.problem.model).detach()
    with torch.no_grad():
        tables = [
            np.array(evaluate_round(federation, params, 1000 + t).facts.confusion, dtype=np.float64).ravel()
            for t in range(EVALUATIONS)
        ]
    if plan is None or not len(tables[0]):
        return
    cells = np.stack(tables)
    # The whole table is fitted to the known number of units; differences between cells keep their noise.
    contrast = cells - cells.mean(axis=1, keepdims=True)
    centred = contrast - contrast.mean(axis=0)
    bins = plan.form.columns / cells.shape[1]
    deviation = plan.sigma * np.sqrt(bins * len(plan.accounts))
    degrees = (len(cells) - 1) * (cells.shape[1] - 1)
    total = float(np.square(centred / deviation).sum())
    yield Reading(
        NAME,
        "noise of scores",
        exact.judge_variance_too_small(total, degrees),
        f"counts of private held-out records have {np.sqrt(total / degrees):.3g} times the declared noise",
    )
