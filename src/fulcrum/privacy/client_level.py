"""The trusted server's mechanism at client level, as public terms: rate, weights, divisor, sensitivity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fulcrum.settings.derived import WEIGHT_POWERS, compute_local_steps
from fulcrum.settings.registry import Registry
from fulcrum.settings.schema import Settings

SERVER_CLIENT_ID = -1
"""The `client` of the server's own reply."""
FEW_PARTIES = 100
"""A plan warns below this number of parties: noise that hides one party then also hides their common signal."""


@dataclass(frozen=True)
class MeanEstimator:
    """Turns a weighted sum of updates into their mean.

    divisor(terms, weight): the divisor of the sum, where `weight` is the total weight of the participants.
    sensitivity(terms): the largest change of the mean by one party, for a clipping norm of 1.
    words(terms): a description of the divisor, for the privacy statement.
    """

    divisor: Callable[[ClientLevelTerms, float], float]
    sensitivity: Callable[[ClientLevelTerms], float]
    words: Callable[[ClientLevelTerms], str] = lambda terms: f"divided as the estimator {terms.estimator!r} says"


@dataclass(frozen=True, eq=False)
class ClientLevelTerms:
    """The mechanism's public terms.

    rate: participation probability q_c. clients: number of parties K. weights [K], float64, each in (0, 1].
    total: their declared sum W. floor: q_c W_min. local_rate and local_steps: a party's own training, which
    has no privacy cost here.
    """

    rate: float
    weights: torch.Tensor
    total: float
    floor: float
    estimator: str
    local_rate: float
    local_steps: int

    @property
    def clients(self) -> int:
        """Number of parties K."""
        return len(self.weights)

    @property
    def cohort(self) -> float:
        """Expected number of participants q_c K."""
        return self.rate * self.clients

    @property
    def sensitivity(self) -> float:
        """The largest change of the released mean by one party, for a clipping norm of 1."""
        return ESTIMATORS.find(self.estimator).sensitivity(self)

    def divisor(self, weight: float) -> float:
        """The divisor of the sum for participants of this total weight."""
        return ESTIMATORS.find(self.estimator).divisor(self, weight)

    @property
    def describe_divisor(self) -> str:
        """A description of the divisor."""
        return ESTIMATORS.find(self.estimator).words(self)


ESTIMATORS = Registry[MeanEstimator](
    "client_level.estimator", entry_points="fulcrum.estimators", kind=MeanEstimator, noun="estimator"
)
"""Estimators by name. Add your own by `ESTIMATORS.add`, by entry point, or as package.module:estimator."""
ESTIMATORS.add(
    "fixed",
    MeanEstimator(
        divisor=lambda terms, weight: terms.rate * terms.total,
        sensitivity=lambda terms: 1 / (terms.rate * terms.total),
        words=lambda terms: f"divided by the expected weight q_c W = {terms.rate * terms.total:.6g}",
    ),
)
ESTIMATORS.add(
    "clipped",
    MeanEstimator(
        divisor=lambda terms, weight: max(terms.floor, weight),
        sensitivity=lambda terms: 2 / terms.floor,
        words=lambda terms: f"divided by the weight that took part, at least q_c W_min = {terms.floor:.6g}",
    ),
)


def has_trusted_server(settings: Settings) -> bool:
    """Whether the unit is the client: a trusted server then clips whole updates and adds the noise."""
    return settings.privacy.unit == "client"


def make_client_level_terms(settings: Settings, sizes: Any) -> ClientLevelTerms | None:
    """The mechanism for these settings and the parties' sizes n_k [K]; None where the unit is not the client."""
    if not has_trusted_server(settings):
        return None
    central, train = settings.client_level, settings.train
    weights = compute_party_weights(torch.as_tensor(sizes), train.weights, central.weight_cap)
    total = float(weights.sum())
    return ClientLevelTerms(
        rate=train.participation,
        weights=weights,
        total=total,
        floor=train.participation * total * central.min_weight,
        estimator=central.estimator,
        local_rate=train.rate,
        local_steps=compute_local_steps(train),
    )


def compute_party_weights(sizes: torch.Tensor, weights: str, cap: float = 0.0) -> torch.Tensor:
    """Weights w_k [K], float64, at most 1: min(n_k / cap, 1), its root, or equal. cap 0: the median size."""
    sizes = sizes.double()
    return torch.clamp(sizes / (cap or float(sizes.median())), max=1.0) ** WEIGHT_POWERS[weights]
