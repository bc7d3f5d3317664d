"""`check`: anybody's client, replayed and compared with what it claims."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fulcrum.analysis.detectors.findings import LEVEL, Reading, Report, collect
from fulcrum.analysis.detectors.foreign.adapters import adapt
from fulcrum.analysis.detectors.foreign.claims import Claims, make_claims
from fulcrum.analysis.detectors.foreign.epsilons import bound_one_release, bound_training, price
from fulcrum.analysis.detectors.foreign.mistakes import (
    RATE,
    SHUFFLING,
    Measured,
    is_batch_clipped,
    is_measurable,
    measure_rate,
    measure_sigma,
    measure_sigma_error,
)
from fulcrum.analysis.detectors.foreign.readings import list_readings
from fulcrum.analysis.detectors.foreign.replay import (
    HUGE,
    LARGER,
    OUTLYING,
    Records,
    Replayer,
    Target,
    choose_targets,
    find_clear_columns,
    make_records,
    refuse_rescaled,
    refuse_weights,
    take_apart,
)
from fulcrum.errors import ConfigError, InputError
from fulcrum.settings.registry import import_named_attribute

REPLAYS = 600
FEWEST_REPLAYS = 100
HUGE_REPLAYS = 60


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    report: every reading, and the alarms among them. kind: how the client was called. calls: how often. sigma: the
    noise multiplier as measured, with its standard error. epsilon_measured: of all steps at that sigma. lower,
    lower_total: lower bounds on epsilon at 95% confidence, of one release (assuming nothing) and of all steps
    (assuming sampled Gaussian releases).
    """

    claims: Claims
    kind: str
    calls: int
    report: Report
    sigma: float
    sigma_error: float
    epsilon_claimed: float
    epsilon_measured: float
    lower: float
    lower_total: float

    @property
    def mistakes(self) -> tuple[Reading, ...]:
        """The mistakes, each kind once, in the order of the readings."""
        found: dict[str, Reading] = {}
        for each in self.report.alarms:
            found.setdefault(each.what, each)
        return tuple(found.values())

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.report.alarms

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "mistakes": [{"mistake": m.what, "detector": m.detector, "says": m.says, "p": m.p} for m in self.mistakes],
            "kind": self.kind,
            "calls": self.calls,
            "readings": len(self.report.readings),
            "level": self.report.level,
            "sigma": {"claimed": self.claims.sigma, "measured": self.sigma, "error": self.sigma_error},
            "epsilon": {
                "promised": self.claims.epsilon,
                "of_the_claimed_mechanism": self.epsilon_claimed,
                "of_the_measured_mechanism": self.epsilon_measured,
                "lower_bound_of_one_release": self.lower,
                "lower_bound_of_all_steps": self.lower_total,
            },
            "delta": self.claims.delta,
            "claims": asdict(self.claims),
        }


def check(
    client: Any, claims: Claims | Mapping[str, Any], replays: int = REPLAYS, level: float = LEVEL, seed: int = 1
) -> CheckResult:
    """Replay a client on neighbouring data sets and say which known mistakes it makes.

        result = fulcrum.check(client, claims={"sigma": 1.1, "rate": 0.1, "steps": 500, "epsilon": 3.0})
        result.mistakes, result.sigma, result.lower

    client: a function client(params, data, seed), a factory make(data, seed) of (model, optimizer, loader) or of a
    Flower client, or "package.module:name" of one. claims: what the code says that it does (`Claims`). replays: calls
    per data set, of which there are about ten. level: the chance of any alarm on code that does what it claims. seed:
    of the first call; each call has the next one.
    """
    stated = claims if isinstance(claims, Claims) else make_claims(claims)
    if not isinstance(replays, int) or replays < FEWEST_REPLAYS:
        raise ConfigError(f"replays = {replays!r}; it must be a whole number of at least {FEWEST_REPLAYS}.")
    target = import_named_attribute(client, f"client = {client!r}") if isinstance(client, str) else client
    kind, called = adapt(target, stated)
    replayer = Replayer(called, seed)
    measured = measure(replayer, stated, replays)
    report = collect(list_readings(measured), level)
    if not report.alarms and not is_measurable(measured):
        raise InputError(
            "copies of an extreme record do not move the client's releases, so nothing can be measured: give it more "
            "records (claims: examples), or records of its own (claims: data)."
        )
    sigma = measure_sigma(measured)
    shuffled = any(alarm.what == SHUFFLING for alarm in report.alarms)
    rate = measure_rate(measured) if any(alarm.what == RATE for alarm in report.alarms) else stated.rate
    if rate != stated.rate:
        sigma = sigma * rate / stated.rate
    return CheckResult(
        claims=stated,
        kind=kind,
        calls=replayer.calls,
        report=report,
        sigma=sigma,
        sigma_error=measure_sigma_error(measured),
        epsilon_claimed=price(stated, stated.sigma, stated.steps),
        epsilon_measured=price(stated, sigma, stated.steps, "shuffle" if shuffled else "", rate),
        lower=bound_one_release(measured).epsilon,
        lower_total=bound_training(measured),
    )


def measure(replayer: Replayer, claims: Claims, replays: int) -> Measured:
    """Play every data set that the readings need."""
    records = make_records(claims)
    count = claims.records if not claims.data else max(claims.records, len(records.x))
    if claims.output == "params" and not claims.parameters:
        replayer.measure_start((records.x, records.y), replays)
    one, two = choose_targets(replayer, records, claims)
    first = replayer.play(records.copies(one.x, one.label, count), replays)
    second = replayer.play(records.copies(two.x, two.label, count), replays)
    if claims.output == "update":
        refuse_weights(first, second)
    refuse_rescaled(first)
    clear, frozen = find_clear_columns(first, second)
    kept = ~(clear | frozen)
    if frozen.any():
        replayer.freeze(frozen, first.finite[0])
    replayer.kept = kept
    first, second = first.keep(kept), second.keep(kept)
    larger = replayer.play(records.copies(LARGER * one.x, one.label, count), replays // 2)
    huge = replayer.play(records.copies(HUGE * one.x, one.label, count), HUGE_REPLAYS)
    other = records.relabel(one, two)
    relabelled = second if other is two else replayer.play(records.copies(other.x, other.label, count), replays // 2)
    shared = replayer.play(records.share(one, other, count), replays // 2)
    double = replayer.play(records.copies(one.x, one.label, 2 * count), replays)
    few = max(2, round(1 / claims.rate))
    small = replayer.play(records.copies(one.x, one.label, few), replays)
    mixed = records.mix(one, count)
    spoiled = mixed[0].copy(), mixed[1].copy()
    spoiled[0][0] = OUTLYING * two.x
    usual, with_outlier = replayer.play(mixed, replays // 2), replayer.play(spoiled, replays // 2)
    line = take_apart(first)
    zeros = records.copies(0 * one.x, one.label, count)
    with_one = zeros[0].copy(), zeros[1].copy()
    with_one[0][0] = one.x
    present = replayer.play(with_one, 2 * replays).vectors @ line.direction
    alone = replayer.play(zeros, 2 * replays)
    absent = alone.vectors @ line.direction
    found = Measured(
        claims=claims,
        count=count,
        first_sample=first,
        second_sample=second,
        first=line,
        second=take_apart(second),
        larger=take_apart(larger),
        double=take_apart(double),
        small=small,
        small_count=few,
        zeros=take_apart(alone),
        usual=usual,
        with_outlier=with_outlier,
        clear=int(clear.sum()),
        half_double=None,
        with_target=np.nan_to_num(present),
        without=np.nan_to_num(absent),
        zeros_sample=alone,
        relabelled_sample=relabelled,
        relabelled=take_apart(relabelled),
        shared=shared,
        huge=huge,
        thawed=replayer.thawed,
    )
    if not is_batch_clipped(found):
        return found
    half = find_half_way(replayer, records, one, found, count)
    return Measured(**{**vars(found), "half_double": half})


def find_half_way(replayer: Replayer, records: Records, one: Target, found: Measured, count: int) -> float | None:
    """A record whose copies move a release half as far as extreme ones; how far twice as many copies of it move one.

    In units of the extreme record: a clipped sum is at its bound with twice the copies (1), a clipped mean is not
    (0.5).
    """
    low, high = 1e-8, 1.0
    for _ in range(12):
        middle = math.sqrt(low * high)
        moved = _measure_move(replayer, records, one, middle, count, found)
        low, high = (middle, high) if moved < 0.5 else (low, middle)
    return _measure_move(replayer, records, one, math.sqrt(low * high), 2 * count, found)


def _measure_move(replayer: Replayer, records: Records, one: Target, size: float, count: int, found: Measured) -> float:
    rows = replayer.play(records.copies(size * one.x, one.label, count), 60).finite
    return float((rows @ found.first.direction).mean()) / found.first.mean if len(rows) else 0.0
