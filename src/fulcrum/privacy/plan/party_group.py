"""Groups of parties with the same terms: their releases, largest cost, and noise.

Parties with the same rate, steps, participations, budget and past spend form a group, and sigma is calibrated once per
group: planning a million equal parties is as fast as planning one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fulcrum.clipping.fixed import FIXED
from fulcrum.clipping.rule import ClipRule, ShareFn, no_statistics_share
from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import Spend, calibrate_sigma, format_epsilon
from fulcrum.privacy.client_level import has_trusted_server
from fulcrum.privacy.events import Event, Gaussian, Unprotected
from fulcrum.privacy.mechanism import compute_planned_events
from fulcrum.privacy.schedule import compute_noise_factors
from fulcrum.settings.derived import compute_local_steps
from fulcrum.settings.schema import Settings
from fulcrum.types import Assignment, make_short_repr


@dataclass(frozen=True)
class PartyGroup:
    """Parties with the same terms, and their sigma.

    rate: sampling rate q. steps: number of local steps N per round. participations: the public cap on rounds. budget:
    epsilon of the run and of what was spent before it; None where sigma was given. spent: what was spent before the
    run. sigma: noise multiplier of the first round. factors: the noise schedule, one factor per round. rule: the
    clipping rule, which sets the share of the precision for its statistics. statistics_interval: every n-th step
    releases the rule's statistics. batch: the parties' expected batch size, where not every step releases statistics.
    noise_parties: number of parties that jointly add one noise vector.
    """

    __repr__ = make_short_repr

    rate: float
    steps: int
    participations: int
    budget: float | None
    spent: Spend
    sigma: float
    factors: tuple[float, ...] = (1.0,)
    rule: ClipRule = FIXED
    statistics_interval: int = 1
    batch: float = 1.0
    noise_parties: float = 1

    def assignment(self, k: int, t: int, lr: float) -> Assignment:
        """The task of party k of this group in round t (from 0)."""
        return Assignment(
            k, self.rate, self.sigma * self.factors[t], self.steps, lr, self.statistics_interval, self.noise_parties
        )

    @property
    def share(self) -> ShareFn:
        """The share of the precision for the rule's statistics."""
        return self.rule.share

    def compute_round_events(self, t: int = 0) -> tuple[Event, ...]:
        """The events of round t (from 0)."""
        return compute_planned_events(self.assignment(0, t, 1.0), self.rule, self.batch, t)

    def worst(self, rounds: int) -> tuple[Event, ...]:
        """The costliest events of a party in the first `rounds` rounds, within its cap.

        If the cap allows all rounds, these are the events of all rounds. Otherwise these are the least noisy
        steps, as many as the cap allows: whichever rounds the party takes part in, its i-th costliest step
        costs no more than the i-th of these.
        """
        taken = min(rounds, self.participations) * self.steps
        if self.sigma == 0 or not taken:
            return (Unprotected(taken),) if taken else ()
        alike = self.statistics_interval == 1 and len(set(self.factors[:rounds])) == 1
        counts: Counter[Event] = Counter()  # keys: events with count = 1
        for t in range(1 if alike else rounds):
            for event in self.compute_round_events(t):
                counts[event.with_count(1)] += taken if alike else event.count
        found = []
        for event in sorted(counts, key=_sort_key_by_noise):
            found.append(event.with_count(min(counts[event], taken)))
            taken -= found[-1].count
        return tuple(event for event in found if event.count)

    def epsilon(self, rounds: int, delta: float, accountant: str) -> float:
        """Epsilon after `rounds` rounds, with participations up to the cap, including the past spend."""
        return self.spent.add_events(self.worst(rounds)).epsilon(delta, accountant)

    def sigmas(self) -> tuple[float, float]:
        """The multipliers of the first and of the last round."""
        return self.sigma * self.factors[0], self.sigma * self.factors[-1]


def _sort_key_by_noise(event: Event) -> float:
    """Sort key for a group's events, which have one rate: the costliest first. Events without noise cost the most."""
    return event.sigma if isinstance(event, Gaussian) else 0.0


# --- settings and sizes -> groups ---------------------------------------------------------------


def compute_round_terms(settings: Settings) -> tuple[float, int]:
    """(rate, releases per round) of the accounted mechanism: the local steps, or the server's one release."""
    if has_trusted_server(settings):
        return settings.train.participation, 1
    return settings.train.rate, compute_local_steps(settings.train)


def make_common_terms(settings: Settings, rule: ClipRule) -> PartyGroup:
    """The terms that all parties share, before calibration: sigma is 0, and nothing was spent before."""
    privacy, train = settings.privacy, settings.train
    rate, steps = compute_round_terms(settings)
    return PartyGroup(
        rate=rate,
        steps=steps,
        participations=min(privacy.max_participations or train.rounds, train.rounds),
        budget=privacy.epsilon if rule.private else None,
        spent=Spend.empty(),
        sigma=0.0,
        factors=compute_noise_factors(privacy, train.rounds) if rule.private else (1.0,) * train.rounds,
        statistics_interval=_compute_statistics_interval(settings, rule),
        rule=rule,
    )


def group_parties(
    settings: Settings,
    rule: ClipRule,
    sizes: npt.NDArray[np.int64],
    name: Callable[[int], str],
    special: Mapping[int, tuple[float | None, Spend | None]],
) -> tuple[list[PartyGroup], npt.NDArray[np.int32]]:
    """The groups with their sigma, and the index of each party's group [K].

    sizes [K]: units n_k per party. special: (budget, past spend) of parties with their own, by party number.
    """
    common, rate, count = make_common_terms(settings, rule), settings.train.rate, len(sizes)
    # The noise of steps without statistics may depend on the batch size. If it does each size is a group.
    batches = rate * np.unique(sizes).astype(np.float64) if common.statistics_interval > 1 else np.ones(1)
    common = replace(common, batch=float(batches[0]))
    groups, group_of = _group_with_terms(settings, rule, common, count, name, special)
    if all(_releases_the_same(group, batches) for group in groups):
        return groups, group_of
    by_size = {k: special.get(k, (None, None)) for k in range(count)}
    return _group_with_terms(settings, rule, common, count, name, by_size, rate * sizes.astype(np.float64))


def _group_with_terms(
    settings: Settings,
    rule: ClipRule,
    common: PartyGroup,
    count: int,
    name: Callable[[int], str],
    special: Mapping[int, tuple[float | None, Spend | None]],
    batches: npt.NDArray[np.float64] | None = None,
) -> tuple[list[PartyGroup], npt.NDArray[np.int32]]:
    """`group_parties` with the common terms. batches [K]: each party's expected batch size; None: the common one."""
    numbers: dict[Any, int] = {}
    groups: list[PartyGroup] = []
    group_of = np.zeros(count, dtype=np.int32)

    def number(group: PartyGroup, who: str) -> int:
        at = numbers.setdefault((group.budget, group.spent.key, group.batch), len(groups))
        if at == len(groups):
            groups.append(replace(group, sigma=_choose_group_sigma(settings, rule, group, who)))
        return at

    if len(special) < count:  # the others are group 0
        number(common, "most parties" if special else "every party")
    for k, (budget, past) in special.items():
        own = replace(
            common,
            budget=budget if budget and rule.private else common.budget,
            spent=past or common.spent,
            batch=common.batch if batches is None else float(batches[k]),
        )
        group_of[k] = number(own, name(k))
    return groups, group_of


def _compute_statistics_interval(settings: Settings, rule: ClipRule) -> int:
    """Steps between two releases of the rule's statistics; at unit client the server releases them every round."""
    paid = rule.private and rule.share is not no_statistics_share and not has_trusted_server(settings)
    if paid and settings.clip.statistics_rounds:
        return settings.clip.statistics_rounds * compute_local_steps(settings.train)
    return max(1, round(settings.clip.statistics_interval / settings.train.rate)) if paid else 1


def _releases_the_same(group: PartyGroup, batches: npt.NDArray[np.float64]) -> bool:
    """Whether a party of any of these expected batch sizes releases the events of the group, at its noise."""
    if len(batches) == 1 or group.sigma == 0:
        return True
    sigmas = {group.sigma * factor for factor in group.factors}
    return all(
        group.share(sigma, float(batch)) == group.share(sigma, group.batch) for sigma in sigmas for batch in batches
    )


def _choose_group_sigma(settings: Settings, rule: ClipRule, group: PartyGroup, who: str) -> float:
    """The given multiplier, or the smallest one that keeps a group within its budget. who: name for error messages."""
    privacy = settings.privacy
    if not rule.private:
        return 0.0
    if group.budget is None:
        if privacy.sigma is None:
            raise ConfigError(
                f"rule {rule.name!r} is private and needs to know how private: give --epsilon (privacy.epsilon) "
                "or --sigma (privacy.sigma)."
            )
        return privacy.sigma

    def planned(sigma: float) -> tuple[Event, ...]:
        return (*group.spent.events, *replace(group, sigma=sigma).worst(len(group.factors)))

    before = group.spent.epsilon(privacy.delta, privacy.accountant)
    if before >= group.budget:
        raise ConfigError(
            f"{who} has spent epsilon = {format_epsilon(before)} of its budget {format_epsilon(group.budget)} "
            "already; raise the budget."
        )
    try:
        return calibrate_sigma(planned, group.budget, privacy.delta, privacy.accountant)
    except ConfigError as error:
        raise ConfigError(f"no sigma fits for {who}: {error}") from error
