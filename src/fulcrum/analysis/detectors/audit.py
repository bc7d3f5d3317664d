"""Audit: canaries in orthogonal directions, each in half of the releases, and a lower bound on epsilon from guesses.

Every unit of the probe is a canary: its part in its own feature's weights is orthogonal to that of all others. Each is
in one of two halves; parties hold one half at a time and sample all of it, so a release at noise sigma must not tell
the halves apart better than the curve of the Gaussian mechanism allows. The threshold follows from the claim alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy import special

from fulcrum.analysis.audit.bounds import LowerBound, bound_by_rates, bound_rate_above, bound_rate_below
from fulcrum.analysis.detectors.findings import Reading
from fulcrum.analysis.detectors.probe import (
    FEATURES,
    HIDDEN,
    UNITS,
    Player,
    Probe,
    list_states,
    make_dataset,
    make_model,
    make_records,
)
from fulcrum.data import split
from fulcrum.engines import find_engine
from fulcrum.settings.schema import Data

NAME = "audit"
Floats = npt.NDArray[np.float64]
ROUNDS = 60
"""Releases of each half: up to 1,440 canaries that are in, as many that are not."""
LONG = 0.5
"""Canaries of less than this part of the largest squared length are left out."""


@dataclass(frozen=True)
class Canaries:
    """Scores of canaries that were in a release and of those that were not; sigma: the claimed noise of the sum."""

    present: Floats
    absent: Floats
    sigma: float

    @property
    def threshold(self) -> float:
        """Above it a canary is guessed to be in: a point where a claim of this noise has a few false alarms."""
        return 0.5 + 0.35 * self.sigma

    def count(self) -> tuple[int, int, int, int]:
        """Right and wrong guesses of "in": hits, canaries that were in, false alarms, those that were not."""
        hits, alarms = int((self.present >= self.threshold).sum()), int((self.absent >= self.threshold).sum())
        return hits, len(self.present), alarms, len(self.absent)


def measure_canaries(probe: Probe, party: int, seed: int = 0) -> Canaries:
    """Scores of a party's canaries over releases that hold one half of them, at the declared noise."""
    federation = probe.federation
    persons = federation.settings.privacy.unit == "person"
    records = make_records(make_model(), federation.plan.parties, persons)
    halves = np.random.default_rng(seed).permutation(UNITS) % 2
    own = probe.units[0][party][:, : FEATURES * HIDDEN].reshape(UNITS, HIDDEN, FEATURES)
    place = np.arange(UNITS)
    directions = own[place, :, place]  # [n, HIDDEN]: unit i in the weights of feature i
    weights = np.square(directions).sum(axis=1)
    # Short canaries tell less than the claim allows anyway; which ones are short is known before any release.
    long = weights >= LONG * weights.max()
    present, absent, sigma = [], [], 1.0
    for half in (0, 1):
        chosen = torch.tensor(halves[records["unit"].numpy()] == half)
        kept = {name: values[chosen] for name, values in records.items()}
        dataset = make_dataset(kept, kept["party"], persons)
        parts = split(dataset, Data(parties=federation.plan.parties, partition="given", min_examples=1), 0)
        problem = dataclasses.replace(federation.problem, dataset=dataset, partition=parts)
        made = dataclasses.replace(
            federation, problem=problem, engine=find_engine(federation.settings.run.engine, problem)
        )
        player = Player(made, list_states(federation))
        for t in range(ROUNDS):
            # Rounds that no other part of the probe plays, so that no two of them share their noise.
            task = dataclasses.replace(
                federation.plan.assignment(party, t % federation.settings.train.rounds, 1.0), rate=1.0
            )
            value, _, terms, _, _ = player.play(100_000 + half * ROUNDS + t, [task], 0)[0]
            sums = value[: FEATURES * HIDDEN].reshape(HIDDEN, FEATURES)
            scores = (sums[:, place].T * directions).sum(axis=1) / weights
            present.append(scores[long & (halves == half)])
            absent.append(scores[long & (halves != half)])
            sigma = float(terms.deviations[0])
    return Canaries(np.concatenate(present), np.concatenate(absent), sigma)


def allow_hits(alarm_rate: float, sigma: float) -> float:
    """The largest rate of hits that a Gaussian release of noise sigma allows at a rate of false alarms."""
    return float(special.ndtr(special.ndtri(alarm_rate) + 1 / sigma)) if 0 < alarm_rate < 1 else alarm_rate


def refute(canaries: Canaries) -> float:
    """The p-value of the claim: the smallest level at which limits of both rates contradict its curve."""
    hits, members, alarms, others = canaries.count()

    def contradicts(level: float) -> bool:
        low = bound_rate_below(hits, members, 1 - level / 2)
        return low > allow_hits(bound_rate_above(alarms, others, 1 - level / 2), canaries.sigma)

    if not contradicts(0.5):
        return 1.0
    low, high = -36.0, math.log(0.5)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if contradicts(math.exp(middle)) else (middle, high)
    return math.exp(high)


def bound(canaries: Canaries, delta: float, confidence: float = 0.95) -> LowerBound:
    """The lower bound on the epsilon of one release without sampling."""
    return bound_by_rates(*canaries.count(), delta=delta, confidence=confidence)


def read_audit(probe: Probe) -> Iterator[Reading]:
    """Whether canaries tell more than the claim allows."""
    rule = probe.federation.problem.rule
    view = rule.view(list_states(probe.federation)[0], 0, 1)
    if view.transform is not None:  # canaries of another basis are not orthogonal in these coordinates
        return
    for party, name in enumerate(probe.names[:1]):  # all parties run the same code, and canaries take many releases
        canaries = measure_canaries(probe, party)
        delta = probe.federation.plan.delta
        found = bound(canaries, delta)
        hits, members, alarms, others = canaries.count()
        yield Reading(
            NAME,
            "canaries",
            refute(canaries),
            f"{hits} of {members} canaries are recognised with {alarms} of {others} false alarms, more than sigma = "
            f"{canaries.sigma:.3g} allows; this alone shows epsilon of at least {found.epsilon:.3g} for one release",
            name,
        )
