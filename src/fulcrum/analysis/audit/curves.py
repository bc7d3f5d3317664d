"""Trade-off curves that an audit may hypothesise, and families of mechanisms that differ in their noise alone.

A trade-off curve says how many true positives an attacker can have at a rate of false positives. A curve here is the
inverse: `false_positives(t)` is the smallest rate of false positives at which a rate t of true positives is possible,
in both directions (with the record against without it, and the other way round). An upper bound on what leaks gives a
curve that is too low, and what such a curve refutes is refuted all the more.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr, ndtri

from fulcrum.privacy.accounting import choose_pld_interval, compute_epsilon
from fulcrum.privacy.events import Event, Gaussian

FloatVector = npt.NDArray[np.float64]
Curve = Callable[[float], float]
"""t -> the smallest rate of false positives at which a rate t of true positives is possible."""

SCALE_RANGE = (2.0**-6, 2.0**6)
"""Noise that an audit looks for, as a multiple of the noise that a family has at scale 1."""


@dataclass(frozen=True)
class NoiseFamily:
    """Mechanisms that differ in one number: their noise, `scale` times that of the claim.

    statement: the assumption in words, for reports. curve(scale): the trade-off curve. epsilon(scale, delta): what the
    mechanism costs. Both must leak less at a larger scale.
    """

    statement: str
    curve: Callable[[float], Curve]
    epsilon: Callable[[float, float], float]


# --- the Gaussian mechanism ---------------------------------------------------------------------


def compute_gaussian_delta(mu: float, epsilon: float) -> float:
    """Delta at `epsilon` of one Gaussian release without sampling whose noise is 1 / mu times what a unit can add."""
    if mu <= 0:
        return 0.0
    second = math.exp(min(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)), 0.0))
    return max(0.0, float(ndtr(mu / 2 - epsilon / mu)) - second)


def compute_gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon at `delta` of mu-Gaussian differential privacy, exact to about 1e-9."""
    if compute_gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while compute_gaussian_delta(mu, high) > delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_gaussian_delta(mu, middle) > delta else (low, middle)
    return low


def make_gaussian_family() -> NoiseFamily:
    """Gaussian differential privacy: scale is 1 / mu."""

    def curve(scale: float) -> Curve:
        return lambda t: float(ndtr(ndtri(t) - 1 / scale))

    return NoiseFamily(
        "the trade-off curve is that of one Gaussian release of all records (mu-GDP)",
        curve,
        lambda scale, delta: compute_gaussian_epsilon(1 / scale, delta),
    )


# --- Poisson sampling, composed -----------------------------------------------------------------


def scale_events(events: Iterable[Gaussian], scale: float) -> list[Gaussian]:
    """The events with `scale` times the noise."""
    return [Gaussian(event.rate, event.sigma * scale, event.count) for event in events]


def merge_events(events: Sequence[Gaussian]) -> tuple[Gaussian, ...]:
    """Equal releases as one event with their count."""
    counts: dict[tuple[float, float], int] = {}
    for event in events:
        pair = (event.rate, event.sigma)
        counts[pair] = counts.get(pair, 0) + event.count
    return tuple(Gaussian(rate, sigma, count) for (rate, sigma), count in counts.items())


MAX_KINDS, SIGMA_RATIO = 16, 1.02
"""Up to KINDS different releases are composed as they are. With more (a noise schedule) each multiplier is rounded down
to a power of RATIO: an upper bound on what leaks."""


def round_events(events: Sequence[Gaussian]) -> Sequence[Gaussian]:
    """The events, or few kinds of events that leak no less."""
    if len({(event.rate, event.sigma) for event in events}) <= MAX_KINDS:
        return events

    def down(sigma: float) -> float:
        rounded = SIGMA_RATIO ** math.floor(math.log(sigma, SIGMA_RATIO))
        return rounded if rounded <= sigma else rounded / SIGMA_RATIO

    return [Gaussian(event.rate, down(event.sigma), event.count) for event in events]


def compute_delta_curve(events: Sequence[Gaussian], epsilons: FloatVector) -> FloatVector:
    """Upper bounds on delta of the composed events at epsilons [n], the worse of adding and removing a unit: [n]."""
    pld = importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    parts = [(event.rate, event.sigma, event.count) for event in merge_events(round_events(events))]
    interval = choose_pld_interval(parts)
    total = None
    with np.errstate(all="ignore"):  # overflows to infinity are meant
        for rate, sigma, count in parts:
            step = pld.from_gaussian_mechanism(sigma, value_discretization_interval=interval, sampling_prob=rate)
            composed = step.self_compose(count)
            total = composed if total is None else total.compose(composed)
        assert total is not None, "a family needs at least one event"
        found: FloatVector = np.asarray(total.get_delta_for_epsilon(list(epsilons)), dtype=np.float64)
    return np.clip(found, 0.0, 1.0)


def make_curve(epsilons: FloatVector, deltas: FloatVector) -> Curve:
    """The curve of a mechanism that is (epsilon, delta)-private for each of these pairs [n], in both directions.

    Any set of pairs gives a sound curve: more pairs give a higher one.
    """
    down, up = np.exp(-epsilons), np.exp(epsilons)

    def false_positives(t: float) -> float:
        steep = float(((t - deltas) * down).max())
        flat = float((1 - deltas - up * (1 - t)).max())
        return max(0.0, steep, flat)

    return false_positives


def make_poisson_family(events: Sequence[Event]) -> NoiseFamily:
    """Poisson(q, scale * sigma)^T: the releases that the events state, with another noise multiplier.

    Events of several rates and multipliers are composed as they are; all multipliers are scaled together.
    """
    gaussian = merge_events([event for event in events if isinstance(event, Gaussian) and event.sigma > 0])
    if sum(event.count for event in gaussian) != sum(event.count for event in events) or not gaussian:
        raise ValueError("a family of Poisson-sampled Gaussian releases needs at least one such event, and no others")
    cached: dict[float, Curve] = {}

    def curve(scale: float) -> Curve:
        if scale not in cached:
            total = sum(event.count * event.rate**2 / (event.sigma * scale) ** 2 for event in gaussian)
            reach = min(20 + 15 * math.sqrt(total) + total, 120.0)
            epsilons = np.concatenate([np.linspace(0, 8, 241), np.linspace(8, max(reach, 9.0), 80)[1:]])
            cached[scale] = make_curve(epsilons, compute_delta_curve(scale_events(gaussian, scale), epsilons))
        return cached[scale]

    names = " and ".join(f"Poisson(q = {e.rate:g}, sigma')^{e.count}" for e in gaussian[:3])
    more = f" and {len(gaussian) - 3} more" if len(gaussian) > 3 else ""
    return NoiseFamily(
        f"the releases are {names}{more}: Poisson sampling and Gaussian noise, fresh each time, only its scale open",
        curve,
        lambda scale, delta: compute_epsilon(scale_events(gaussian, scale), delta, "pld"),
    )
