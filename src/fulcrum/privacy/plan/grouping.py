"""Parties with the same terms as groups, and the noise that each group needs.

Parties that share rate, steps, participations, budget and past form a group, and sigma is calibrated once a group: a
million equal parties plan as fast as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fulcrum.clipping.rule import ClipRule, Share, no_share
from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import Spend, calibrate
from fulcrum.privacy.events import Event
from fulcrum.privacy.plan.party_group import Group
from fulcrum.privacy.schedule import factors
from fulcrum.settings.derived import local_steps
from fulcrum.settings.schema import Settings


def round_terms(settings: Settings) -> tuple[float, int]:
    """(rate, releases a round) of the mechanism that is accounted: the local steps, or the server's one release."""
    if settings.privacy.unit == "client":
        return settings.train.participation, 1
    return settings.train.rate, local_steps(settings.train)


def common_terms(settings: Settings, rule: ClipRule) -> Group:
    """The terms that all parties share, before any noise is chosen: sigma is 0, and nothing was spent before."""
    privacy, train = settings.privacy, settings.train
    rate, steps = round_terms(settings)
    return Group(
        rate=rate,
        steps=steps,
        participations=min(privacy.max_participations or train.rounds, train.rounds),
        budget=privacy.epsilon if rule.private else None,
        spent=Spend.none(),
        sigma=0.0,
        factors=factors(privacy, train.rounds) if rule.private else (1.0,) * train.rounds,
        every=_every(settings, rule),
        share=rule.share,
    )


def grouped(
    settings: Settings,
    rule: ClipRule,
    sizes: npt.NDArray[np.int64],
    name: Callable[[int], str],
    special: Mapping[int, tuple[float | None, Spend | None]],
) -> tuple[list[Group], npt.NDArray[np.int32]]:
    """The groups with their sigma, and the number of each party's group [K].

    sizes [K] are the units n_k. special: (budget, past) of parties that have one of their own, by number.
    """
    common, rate, count = common_terms(settings, rule), settings.train.rate, len(sizes)
    by_size = common.every > 1 and _depends_on_batch(rule.share, rate * float(sizes.min()), rate * float(sizes.max()))
    if by_size:  # then parties of different sizes pay differently, and each size is a group
        special = {k: special.get(k, (None, None)) for k in range(count)}
    numbers: dict[Any, int] = {}
    groups: list[Group] = []
    group_of = np.zeros(count, dtype=np.int32)

    def number(group: Group, who: str) -> int:
        at = numbers.setdefault((group.budget, group.spent.key, group.batch), len(groups))
        if at == len(groups):
            groups.append(replace(group, sigma=_sigma(settings, rule, group, who)))
        return at

    if len(special) < count:  # the others are group 0
        number(common, "most parties" if special else "every party")
    for k, (budget, past) in special.items():
        own = replace(
            common,
            budget=budget if budget and rule.private else common.budget,
            spent=past or common.spent,
            batch=rate * float(sizes[k]) if by_size else common.batch,
        )
        group_of[k] = number(own, name(k))
    return groups, group_of


def _every(settings: Settings, rule: ClipRule) -> int:
    """Steps between two releases of the rule's statistics; the server of unit client releases them every round."""
    paid = rule.private and rule.share is not no_share and settings.privacy.unit != "client"
    return max(1, round(settings.clip.refresh / settings.train.rate)) if paid else 1


def _depends_on_batch(share: Share, few: float, many: float) -> bool:
    """Whether parties with expected batches between these give their statistics different shares, at any noise."""
    return any(share(float(sigma), few) != share(float(sigma), many) for sigma in np.geomspace(0.05, 1000.0, 200))


def _sigma(settings: Settings, rule: ClipRule, group: Group, who: str) -> float:
    """The multiplier that was given, or the smallest that keeps a group within its budget; `who` is for errors."""
    privacy = settings.privacy
    if not rule.private:
        return 0.0
    if group.budget is None:
        assert privacy.sigma is not None  # make_plan has checked that one of the two is given
        return privacy.sigma

    def planned(sigma: float) -> tuple[Event, ...]:
        return (*group.spent.events, *replace(group, sigma=sigma).worst(len(group.factors)))

    before = group.spent.epsilon(privacy.delta, privacy.accountant)
    if before >= group.budget:
        raise ConfigError(
            f"{who} has spent epsilon = {before:.4g} of its budget {group.budget:g} already; raise the budget."
        )
    try:
        return calibrate(planned, group.budget, privacy.delta, privacy.accountant)
    except ConfigError as error:
        raise ConfigError(f"no sigma fits for {who}: {error}") from error
