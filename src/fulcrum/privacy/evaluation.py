"""Scores of private held-out records as a release: one noised vector of sums per evaluation and party.

Each held-out unit adds a vector of L2 norm at most 1 (`privacy.scores`: a cell of a histogram, or clipped errors), in
equal parts over a person's records. Taking the unit away (zero-out) moves the sums by at most 1 in L2 norm, so a
release with noise of standard deviation sigma in every number is `Gaussian(rate 1, sigma)`. The event is charged to the
held-out units' own account: they do not train, and the units that train are not scored. Accuracy, confusion, AUC,
calibration and errors are computed from the noised sums and the public number of units alone; class totals, too: a true
total beside them would be a second, unprotected release.

The number of evaluations is public and fixed in advance, and sigma is calibrated to `privacy.evaluation_epsilon` over
all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.privacy.accounting import calibrate_sigma, format_epsilon
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.exact_noise import release_on_grid
from fulcrum.privacy.scores import ONE, ScoreForm
from fulcrum.rng import CipherRandomness, Randomness, name_stream

HELD_OUT_NAME = "held-out"
"""The account of held-out units; of a named party, PARTY/held-out."""


def is_held_out_account(name: str) -> bool:
    """Whether an account of a ledger is that of held-out units."""
    return name.rpartition("/")[2] == HELD_OUT_NAME


@dataclass(frozen=True)
class HeldOutAccount:
    """The held-out units of one party. name: of their account in a ledger. party: its number, 0 where none is named.

    rows [m] int64: their records among the held-out ones. unit_of [m] int64: the unit of each. units: how many.
    """

    name: str
    party: int
    rows: Tensor
    unit_of: Tensor
    units: int


@dataclass(frozen=True)
class EvaluationPlan:
    """What evaluations will release, fixed in advance: `releases` vectors of sums, each with noise sigma.

    epsilon: what they cost a held-out unit at most, at delta. form: how records are scored.
    """

    epsilon: float
    delta: float
    accountant: str
    sigma: float
    releases: int
    form: ScoreForm
    accounts: tuple[HeldOutAccount, ...]

    @property
    def event(self) -> Gaussian:
        """What one evaluation releases of a unit."""
        return Gaussian(1.0, self.sigma, 1)

    @property
    def planned(self) -> Gaussian:
        """What the whole run releases of a unit, at most."""
        return Gaussian(1.0, self.sigma, self.releases)

    @property
    def units(self) -> int:
        """Held-out units of all parties."""
        return sum(account.units for account in self.accounts)

    @property
    def note(self) -> str:
        """How exact the scores are, in one sentence; it says nothing about the records."""
        name, error = self.form.estimate_error(self.sigma * math.sqrt(len(self.accounts)), self.units)
        times = f"{self.releases} evaluation{'s' if self.releases > 1 else ''} of {self.units} held-out units"
        advice = "; fewer evaluations (run.evaluate_every) have less noise" if self.releases > 1 else ""
        return (
            f"Scores are noised: {times} cost{'s' if self.releases == 1 else ''} them epsilon "
            f"{format_epsilon(self.epsilon)} in all, "
            f"and the noise moves {find_article(name)} {name} by about {error:.2g}{advice}."
        )


def find_article(name: str) -> str:
    """The indefinite article before a metric's name."""
    return "an" if name[:1] in "aeiou" or name.startswith(("r", "mae")) else "a"


def calibrate_evaluation(epsilon: float, delta: float, accountant: str, releases: int) -> float:
    """The smallest sigma at which so many releases cost at most epsilon at delta."""
    return calibrate_sigma(lambda sigma: [Gaussian(1.0, sigma, releases)], epsilon, delta, accountant)


def sum_over_units(measured: Tensor, unit_of: Tensor, units: int) -> Tensor:
    """The exact sums [columns] float64, to which each unit adds at most 1 in L2 norm, the mean over its records.

    measured [n, columns] int64: one row per record, of L2 norm at most `ONE`. Integers throughout, and shares are
    rounded towards 0: a unit's shares have norm at most 1, without rounding errors.
    """
    records = torch.bincount(unit_of, minlength=units).clamp_min(1)
    share = torch.div(measured.cpu(), records[unit_of].unsqueeze(-1), rounding_mode="trunc")
    return share.sum(dim=0).double() / ONE


def release_sums(exact: Tensor, sigma: float, randomness: Randomness, round: int, party: int, attempt: int) -> Tensor:
    """What leaves: the sums [columns] with noise of standard deviation sigma in each, on a public grid."""
    if not isinstance(randomness, CipherRandomness):
        raise TypeError(f"scores of private records need a cipher's noise, not {type(randomness).__name__}")
    key = name_stream("evaluation", round, party, attempt=attempt)
    return release_on_grid(exact, sigma, randomness, key).values


def describe_evaluation(plan: EvaluationPlan) -> Mapping[str, float | int | str]:
    """The public terms of the evaluations, for plans and statements."""
    return {
        "mechanism": plan.form.words,
        "sigma": plan.sigma,
        "releases": plan.releases,
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "accountant": plan.accountant,
        "columns": plan.form.columns,
        "units": plan.units,
    }
