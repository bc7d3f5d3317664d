"""What a client's releases cost: the promise beside the claimed mechanism, and lower bounds on epsilon."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fulcrum.analysis.audit.bounds import LowerBound, bound_by_noise_fit, bound_by_thresholds
from fulcrum.analysis.detectors.findings import Reading, contradict
from fulcrum.analysis.detectors.foreign.adapters import Floats
from fulcrum.analysis.detectors.foreign.claims import Claims
from fulcrum.analysis.detectors.foreign.mistakes import AUDIT, BUDGET, EPSILON, STATEMENT, Measured, is_batch_clipped
from fulcrum.privacy.accounting import compute_epsilon
from fulcrum.privacy.events import Gaussian


def price(claims: Claims, sigma: float, steps: int, sampling: str = "", rate: float | None = None) -> float:
    """Epsilon of so many releases at this sigma, by what the sampling is worth. rate: None: the claimed one.

    Shuffled batches and full ones have no amplification here: each record is in one release per pass over the data.
    """
    if sigma <= 0:
        return math.inf
    used = sampling or claims.sampling
    if used == "poisson":
        return compute_epsilon([Gaussian(rate or claims.rate, sigma, steps)], claims.delta)
    passes = steps if used == "full" else max(1, math.ceil(steps * claims.rate))
    return compute_epsilon([Gaussian(1.0, sigma, passes)], claims.delta)


def read_budget(found: Measured) -> Iterator[Reading]:
    """Whether the promised epsilon is that of all steps, by the claimed numbers alone."""
    claims = found.claims
    if claims.epsilon is None:
        return
    total, single = price(claims, claims.sigma, claims.steps), price(claims, claims.sigma, 1)
    short = claims.epsilon < 0.98 * total
    per_round = claims.epsilon >= 0.9 * single
    yield contradict(
        STATEMENT,
        BUDGET if per_round else EPSILON,
        short,
        f"epsilon = {claims.epsilon:g} is promised, and {claims.steps} steps at rate {claims.rate:g} and sigma "
        f"{claims.sigma:g} cost {total:.4g}"
        + (f"; one step costs {single:.4g}" if per_round and claims.steps > 1 else ""),
    )


def list_scores(found: Measured) -> tuple[Floats, np.ndarray]:
    """Scores with the target and without it in turn, and which is which."""
    count = min(len(found.with_target), len(found.without))
    scores = np.stack([found.with_target[:count], found.without[:count]], axis=1).ravel()
    included = np.tile([True, False], count)
    # Neighbouring places choose the threshold and are counted: mix them, by a seed that knows nothing of the scores.
    order = np.random.default_rng(0).permutation(len(scores))
    return scores[order], included[order]


def bound_one_release(found: Measured, confidence: float = 0.95) -> LowerBound:
    """A lower bound on the epsilon of one release, by Clopper and Pearson: it assumes nothing."""
    return bound_by_thresholds(*list_scores(found), delta=found.claims.delta, confidence=confidence)


def bound_training(found: Measured) -> float:
    """A lower bound on the epsilon of all steps with confidence 0.95, where releases are sampled Gaussian ones."""
    step = found.first.mean / found.batch
    if step <= 0 or is_batch_clipped(found) or found.claims.local_steps > 1 or found.claims.sampling != "poisson":
        return 0.0
    events = [Gaussian(found.claims.rate, found.claims.sigma, 1)]
    scores, included = list_scores(found)
    fitted = bound_by_noise_fit(scores[:, None] / step, included, events, found.claims.delta)
    scale = fitted.numbers.get("noise_at_most", math.inf)
    return price(found.claims, found.claims.sigma * scale, found.claims.steps) if scale < math.inf else 0.0


def read_audit(found: Measured) -> Iterator[Reading]:
    """Whether the lower bound alone refutes the promise."""
    claims = found.claims
    promised = math.inf if claims.epsilon is None else claims.epsilon
    if claims.epsilon is None:
        promised = price(claims, claims.sigma, claims.local_steps)
    surely = bound_one_release(found, 1 - 1e-8)
    yield Reading(
        AUDIT,
        EPSILON,
        1e-8 if surely.epsilon > promised else 1.0,
        f"one release alone has epsilon of at least {surely.epsilon:.3g}, and {promised:.3g} is promised",
    )
