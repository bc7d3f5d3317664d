"""The cost of events: (epsilon, delta) by RDP or PLD, and the searches that turn a budget into a sigma.

An event records what happened; this file computes its cost, for the add-or-remove relation. `rdp.py` computes
the RDP of a step, this file converts it to epsilon, and tests compare both with Google's `dp_accounting`. PLD
comes from `dp_accounting`. The cost of a step depends only on its rate and sigma and is cached. Every epsilon
from this file is an upper bound: a numerical failure makes it larger, never smaller.

`dp_accounting` is imported on first use, so that only PLD needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fulcrum.errors import ConfigError
from fulcrum.privacy.events import Event, Gaussian, Unprotected
from fulcrum.privacy.rdp import compute_sampled_gaussian_rdp
from fulcrum.settings.registry import Registry

FloatVector = npt.NDArray[np.float64]


def _choose_renyi_orders() -> FloatVector:
    """Renyi orders: Google's up to 63, then closer together than Google's, for small epsilons."""
    low = [1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(11, 64)]
    orders = np.array([*low, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024], dtype=np.float64)
    orders.setflags(write=False)
    return orders


ORDERS: FloatVector = _choose_renyi_orders()
"""The Renyi orders [A] at which every `Spend` keeps its RDP."""

SIGMA_MIN, SIGMA_MAX = 0.01, 1e6
"""Search range of `calibrate_sigma`. Below 0.01 nothing is hidden; above 1e6 nothing is learned."""

SIGMA_FLOOR, SIGMA_CEILING = 1e-9, 1e9
"""Below the first a multiplier counts as no noise, above the second as the second: squares of others overflow."""

MAX_STEPS = 10**9
"""Upper limit of the search of `compute_max_steps`."""

# Upper bound on the rounding and truncation errors in the log moment of one step. It is added, so that
# errors cannot make a curve too low; a value below 0 would even give epsilon = 0.
_LOG_MOMENT_PAD = 1e-12


# --- RDP ----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def compute_step_rdp(rate: float, sigma: float) -> FloatVector:
    """RDP of one release at each of ORDERS [A], read-only; infinite where sigma = 0."""
    if not 0 < rate <= 1:
        raise ConfigError(f"rate = {rate!r} is not a sampling rate; it must be greater than 0 and at most 1.")
    if not 0 <= sigma < math.inf:
        raise ConfigError(f"sigma = {sigma!r} is not a noise multiplier; it must be a finite number of at least 0.")
    sigma = min(sigma, SIGMA_CEILING)  # less noise costs more: an upper bound
    if sigma < SIGMA_FLOOR:
        curve = np.full(len(ORDERS), np.inf)
    elif rate == 1:
        curve = ORDERS / (2 * sigma**2)
    else:
        curve = compute_sampled_gaussian_rdp(rate, sigma, ORDERS) + _LOG_MOMENT_PAD / (ORDERS - 1)
    curve.setflags(write=False)
    return curve


def compute_order_epsilons(rdp: FloatVector, delta: float) -> FloatVector:
    """The epsilon that RDP curves [..., A] prove at delta by each order alone: [..., A].

    At each order: the bound of Canonne, Kamath and Steinke (2020, proposition 12), or 0 where the total
    variation distance is already below delta (Bretagnolle and Huber).
    """
    bounds = np.where(delta**2 + np.expm1(-rdp) > 0, 0.0, rdp + compute_order_offsets(delta))
    positive: FloatVector = np.maximum(bounds, 0.0)
    return positive


def compute_order_offsets(delta: float) -> FloatVector:
    """What the conversion to epsilon adds to the RDP at each order: [A]."""
    offsets: FloatVector = np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)
    return offsets


def convert_rdp_to_epsilon(rdp: FloatVector, delta: float) -> FloatVector:
    """The smallest epsilon that RDP curves [..., A] prove at delta: [...]. For a plan that was fixed in advance.

    The best order depends on the curve, so it may not be chosen again after seeing releases; see
    `fulcrum.privacy.ledger.composition`.
    """
    best: FloatVector = compute_order_epsilons(rdp, delta).min(axis=-1)
    return best


# --- PLD ----------------------------------------------------------------------------------------

EventCounts = frozenset[tuple[tuple[float, float], int]]


def _estimate_loss_size(rate: float, sigma: float) -> tuple[float, float]:
    """The privacy loss of one step: its approximate standard deviation and its largest value."""
    largest = 10 / sigma + 0.5 / sigma**2
    return min(rate * math.sqrt(math.expm1(min(sigma**-2, 600.0))), largest), largest


def choose_pld_interval(parts: Sequence[tuple[float, float, int]]) -> float:
    """Grid width for the privacy loss: 1e-3, finer for steps that lose little, coarser for those that lose much.

    Any width gives an upper bound. At 1e-3 a step that loses 2e-4 is charged double; a tenth of the
    loss keeps the error near 0.1%. The coarse end bounds the arrays to half a million entries.
    """
    sizes = [(*_estimate_loss_size(rate, sigma), count) for rate, sigma, count in parts]
    fine = min(max(min(usual for usual, _, _ in sizes) / 10, 1e-5), 1e-3)
    mean = sum(count * min(usual**2 / 2, largest) for usual, largest, count in sizes)
    spread = 10 * math.sqrt(sum(count * usual**2 for usual, _, count in sizes))
    coarse = max(mean + spread, *(largest for _, largest, _ in sizes)) / 5e5
    return 1e-3 * float(2.0 ** math.ceil(math.log2(max(fine, coarse) / 1e-3)))


MAX_EXACT_PLD_KINDS, PLD_ROUNDING_RATIO = 16, 1.004
"""PLD composes up to KINDS different (rate, sigma) exactly. With more (a noise schedule) each sigma is rounded down
to a power of GRID: an upper bound, at most 0.4% above."""


def _round_event_counts(parts: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    if len(parts) <= MAX_EXACT_PLD_KINDS:
        return list(parts)
    merged: dict[tuple[float, float], int] = {}
    for rate, sigma, count in parts:
        power = math.floor(math.log(sigma, PLD_ROUNDING_RATIO))
        down = (
            rate,
            PLD_ROUNDING_RATIO**power if PLD_ROUNDING_RATIO**power <= sigma else PLD_ROUNDING_RATIO ** (power - 1),
        )
        merged[down] = merged.get(down, 0) + count
    return [(rate, sigma, count) for (rate, sigma), count in sorted(merged.items())]


@lru_cache(maxsize=128)
def _build_step_pld(rate: float, sigma: float, interval: float) -> Any:
    pld = importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    return pld.from_gaussian_mechanism(sigma, value_discretization_interval=interval, sampling_prob=rate)


@lru_cache(maxsize=128)
def _compose_steps_pld(rate: float, sigma: float, count: int, interval: float) -> Any:
    return _build_step_pld(rate, sigma, interval).self_compose(count)


@lru_cache(maxsize=4096)
def _compute_pld_epsilon(counts: EventCounts, delta: float) -> float:
    # k releases without sampling are one release at sigma / sqrt(k), exactly.
    whole = sum(count * sigma**-2 for (rate, sigma), count in counts if rate == 1.0)
    parts = _round_event_counts([(rate, sigma, count) for (rate, sigma), count in sorted(counts) if rate < 1.0])
    parts += [(1.0, whole**-0.5, 1)] if whole else []
    interval = choose_pld_interval(parts)
    with np.errstate(all="ignore"):  # overflows to infinity are meant
        # Most noise first: as the noise of a schedule falls over the rounds, what is composed stays a beginning.
        return float(_compose_parts_pld(tuple(sorted(parts, reverse=True)), interval).get_epsilon_for_delta(delta))


@lru_cache(maxsize=8)
def _compose_parts_pld(parts: tuple[tuple[float, float, int], ...], interval: float) -> Any:
    """The composition of parts (rate, sigma, count). One more round of a schedule is one composition, not all again."""
    last = _compose_steps_pld(*parts[-1], interval)
    return _compose_parts_pld(parts[:-1], interval).compose(last) if parts[1:] else last


# --- the running total --------------------------------------------------------------------------


@dataclass(frozen=True)
class Spend:
    """All releases so far. Start with `Spend.empty()`, add with `add_events`, read `epsilon`.

    counts: number of Gaussian releases per (rate, sigma). rdp: their composed RDP [A] at ORDERS, kept so that one
    more round is one addition. others: number of releases of every other event, with each event's count set to 1.
    """

    counts: Mapping[tuple[float, float], int]
    others: Mapping[Event, int]
    rdp: FloatVector = field(compare=False, repr=False)

    @staticmethod
    def empty() -> Spend:
        """Nothing released yet."""
        return Spend({}, {}, np.zeros(len(ORDERS)))

    def add_events(self, events: Iterable[Event], times: int = 1) -> Spend:
        """A new spend: this one and `events`, `times` times."""
        counts, others, rdp = dict(self.counts), dict(self.others), self.rdp
        for event in events:
            count = _check_whole_count(event.count) * times
            if count == 0:
                continue
            if not isinstance(event, Gaussian):
                one = event.with_count(1)
                others[one] = others.get(one, 0) + count
                continue
            pair = (float(event.rate), float(event.sigma))
            rdp = rdp + count * compute_step_rdp(*pair)
            counts[pair] = counts.get(pair, 0) + count
        return Spend(counts, others, rdp)

    def epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """Epsilon at `delta` of everything released so far; infinite if any release was unprotected."""
        return float(compute_epsilons([self], delta, accountant)[0])

    @property
    def num_unprotected(self) -> int:
        """Number of releases without noise."""
        return sum(count for event, count in self.others.items() if isinstance(event, Unprotected))

    @property
    def releases(self) -> int:
        """Number of released sums, with or without noise."""
        return sum(self.others.values()) + sum(self.counts.values())

    @property
    def events(self) -> tuple[Event, ...]:
        """The same total as events, one per kind."""
        noised = [Gaussian(rate, sigma, count) for (rate, sigma), count in sorted(self.counts.items())]
        return (*noised, *(event.with_count(count) for event, count in self.others.items()))

    @property
    def key(self) -> tuple[EventCounts, frozenset[tuple[Event, int]]]:
        """Equal for equal spends, and hashable."""
        return frozenset(self.counts.items()), frozenset(self.others.items())


def _check_whole_count(count: int) -> int:
    if isinstance(count, bool) or count != int(count) or count < 0:
        raise ConfigError(f"count = {count!r} is not a number of releases; it must be a whole number of at least 0.")
    return int(count)


# --- accountants --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accountant:
    """A way to turn spends into epsilons.

    epsilons(spends, delta): an upper bound on the epsilon of each spend [len(spends)], for spends of supported events.
    supports(event): whether the accountant can bound the event's cost; a spend with any other event has an infinite
    epsilon. summary: one line for users. software(): name of the software, for privacy statements.
    """

    name: str
    epsilons: Callable[[Sequence[Spend], float], FloatVector]
    supports: Callable[[Event], bool]
    summary: str = ""
    software: Callable[[], str] = lambda: "a package of its own"


ACCOUNTANTS = Registry[Accountant](
    "privacy.accountant", entry_points="fulcrum.accountants", kind=Accountant, noun="accountant"
)
"""Accountants by name. Add your own by `ACCOUNTANTS.add`, by entry point, or as package.module:accountant."""


def _compute_rdp_epsilons(spends: Sequence[Spend], delta: float) -> FloatVector:
    return convert_rdp_to_epsilon(np.stack([spend.rdp for spend in spends]), delta)


def _compute_pld_epsilons(spends: Sequence[Spend], delta: float) -> FloatVector:
    values = _compute_rdp_epsilons(spends, delta)
    for i, spend in enumerate(spends):
        # The Fourier transform of the composition is exact to about 1e-16 per step; where that is not
        # small against delta the RDP value, an upper bound too, stays.
        if spend.counts and min(s for _, s in spend.counts) > 0 and delta > 1e-13 * spend.releases:
            with contextlib.suppress(OverflowError, ZeroDivisionError):  # losses beyond float64: next to no noise
                values[i] = _compute_pld_epsilon(spend.key[0], delta)
    return values


def _is_gaussian_event(event: Event) -> bool:
    return isinstance(event, Gaussian)


RDP_ACCOUNTANT = Accountant(
    "rdp", _compute_rdp_epsilons, _is_gaussian_event, "Renyi differential privacy; composes fast", lambda: "fulcrum"
)
PLD_ACCOUNTANT = Accountant(
    "pld",
    _compute_pld_epsilons,
    _is_gaussian_event,
    "privacy loss distributions; about a tenth tighter than rdp, and slower",
    lambda: f"dp-accounting {importlib.metadata.version('dp-accounting')}",
)
for _accountant in (RDP_ACCOUNTANT, PLD_ACCOUNTANT):
    ACCOUNTANTS.add(_accountant.name, _accountant)


def reported_accountants(enforced: str) -> tuple[Accountant, ...]:
    """The accountants whose epsilons plans and statements show; the first one is the headline.

    RDP and PLD are always included, in this order, so that runs can be compared. Any other enforced accountant comes
    first.
    """
    chosen = ACCOUNTANTS.find(enforced)
    return (
        (RDP_ACCOUNTANT, PLD_ACCOUNTANT)
        if chosen in (RDP_ACCOUNTANT, PLD_ACCOUNTANT)
        else (chosen, RDP_ACCOUNTANT, PLD_ACCOUNTANT)
    )


def compute_epsilons(spends: Sequence[Spend], delta: float, accountant: str | Accountant = "rdp") -> FloatVector:
    """Epsilon of each spend: [len(spends)]; infinite where an event is not supported."""
    chosen = check_accounting_terms(delta, accountant)
    if not spends:
        return np.zeros(0)
    bounded = [all(map(chosen.supports, spend.events)) for spend in spends]
    found = np.full(len(spends), np.inf)
    if any(bounded):
        found[bounded] = chosen.epsilons([spend for spend, fits in zip(spends, bounded, strict=True) if fits], delta)
    return found


def compute_epsilon(events: Iterable[Event], delta: float, accountant: str = "rdp") -> float:
    """Epsilon at `delta` of all these events together; infinite if any event is `Unprotected`."""
    return Spend.empty().add_events(events).epsilon(delta, accountant)


def check_accounting_terms(delta: float, accountant: str | Accountant) -> Accountant:
    """The accountant; ConfigError if delta is out of range or the accountant is unknown."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta = {delta!r} is out of range; it must be greater than 0 and less than 1.")
    return accountant if isinstance(accountant, Accountant) else ACCOUNTANTS.find(accountant)


# --- searches -----------------------------------------------------------------------------------


def combine_sigmas(sigma_a: float, sigma_b: float) -> float:
    """The multiplier of one release with the cost of two releases on the same sample: (a^-2 + b^-2)^(-1/2)."""
    return float((sigma_a**-2 + sigma_b**-2) ** -0.5)


def calibrate_sigma(
    planned: Callable[[float], Iterable[Event]],
    epsilon: float,
    delta: float,
    accountant: str = "rdp",
    tolerance: float = 1e-4,
) -> float:
    """The smallest sigma at which the planned events cost at most epsilon at delta.

    planned(sigma) lists every event of the run, with any rates and multipliers, provided that a larger
    sigma never costs more. The result is at most a factor 1 + tolerance above the smallest sigma, and
    epsilon(planned(result)) <= epsilon always holds. ConfigError if no sigma up to 1e6 is enough; 0.01
    if even less noise would be enough.
    """
    check_accounting_terms(delta, accountant)
    _check_epsilon(epsilon)

    def excess(sigma: float) -> float:
        """log(cost / epsilon), finite: at most 0 is safe."""
        cost = Spend.empty().add_events(planned(sigma)).epsilon(delta, accountant)
        size = math.log(min(max(cost, 1e-9), 1e9) / epsilon)
        # The sign comes from comparing the numbers, so that a caller who compares them gets the same answer.
        return max(size, 1e-15) if cost > epsilon else min(size, 0.0)

    low, high = 1.0, 1.0
    at_low = at_high = excess(1.0)
    while at_high > 0:
        if high >= SIGMA_MAX:
            cost = Spend.empty().add_events(planned(high)).epsilon(delta, accountant)
            raise ConfigError(
                f"epsilon = {format_epsilon(epsilon)} at delta = {delta:g} cannot be reached: even with sigma = "
                f"{high:g} the plan "
                f"costs {format_epsilon(cost)}; allow a larger epsilon, or fewer rounds or steps."
            )
        low, at_low = high, at_high
        high = min(2 * high, SIGMA_MAX)
        at_high = excess(high)
    while at_low <= 0:
        high, at_high = low, at_low
        if low <= SIGMA_MIN:
            return low
        low = max(low / 2, SIGMA_MIN)
        at_low = excess(low)
    return _bisect_sigma(excess, (low, at_low), (high, at_high), tolerance)


def _bisect_sigma(
    excess: Callable[[float], float], low: tuple[float, float], high: tuple[float, float], tolerance: float
) -> float:
    """The safe end of a bracket (unsafe low, safe high) narrowed to a ratio of 1 + tolerance.

    Secant steps on log excess against log sigma, each aimed a little past the root so that it replaces
    the farther end. After two steps that did not halve the bracket, one bisection step follows.
    """
    last, latest, slow = low, high, 0
    while high[0] > low[0] * (1 + tolerance):
        a, b = math.log(low[0]), math.log(high[0])
        fall = last[1] - latest[1]
        guess = math.log(latest[0]) + math.log(latest[0] / last[0]) * latest[1] / fall if fall else (a + b) / 2
        guess += (-0.4 if b - guess < guess - a else 0.4) * tolerance
        usable = slow < 2 and a < guess < b
        sigma = math.exp(guess if usable else (a + b) / 2)
        last, latest = latest, (sigma, excess(sigma))
        low, high = (low, latest) if latest[1] <= 0 else (latest, high)
        slow = 0 if math.log(high[0] / low[0]) <= 0.51 * (b - a) else slow + 1
    return high[0]


def compute_max_steps(rate: float, sigma: float, epsilon: float, delta: float, accountant: str = "rdp") -> int:
    """The largest number of releases at (rate, sigma) that costs at most epsilon at delta; 0 if none fits.

    Returns at most 1e9.
    """
    check_accounting_terms(delta, accountant)
    _check_epsilon(epsilon)

    def fits(count: int) -> bool:
        return Spend.empty().add_events([Gaussian(rate, sigma, count)]).epsilon(delta, accountant) <= epsilon

    return find_largest_count(fits, MAX_STEPS)


def find_largest_count(fits: Callable[[int], bool], limit: int) -> int:
    """The largest count in 0..limit that fits. `fits` must be monotone; 0 always fits."""
    good, bad = 0, 1
    while bad <= limit and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, limit + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _check_epsilon(epsilon: float) -> None:
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"epsilon = {epsilon!r} is out of range; it must be a finite number greater than 0.")


LARGEST_WRITTEN_OUT = 1e12
"""Larger numbers are printed with an exponent."""


def format_epsilon(value: float, digits: int = 4) -> str:
    """An epsilon to `digits` digits, rounded up in decimal: what is printed is never less than what was spent."""
    if not math.isfinite(value):
        return "inf" if value > 0 else str(value)
    if value == int(value) and abs(value) < 10**digits:
        return str(int(value))
    if abs(value) >= LARGEST_WRITTEN_OUT:
        return f"{Decimal(repr(float(value))).normalize(Context(prec=digits, rounding=ROUND_CEILING)):e}"
    exact = Decimal(repr(float(value)))  # the shortest decimal that means this number: 0.1 prints as 0.1
    step = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    found = f"{exact.quantize(step, rounding=ROUND_CEILING):f}"
    return found.rstrip("0").rstrip(".") if "." in found else found


def describe_software(accountants: Iterable[Accountant] = (RDP_ACCOUNTANT, PLD_ACCOUNTANT)) -> str:
    """The software that computed the epsilons, for statements."""
    return ", ".join(f"{accountant.name.upper()} by {accountant.software()}" for accountant in accountants)
