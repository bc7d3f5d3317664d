"""The plan as a value: the terms of every party, what they cost, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fulcrum.privacy.accounting import epsilons, reported_accountants
from fulcrum.privacy.client_level import Terms
from fulcrum.privacy.events import Event
from fulcrum.privacy.plan import noise
from fulcrum.privacy.plan.noise import Noise
from fulcrum.privacy.plan.party_group import Group
from fulcrum.privacy.plan.text import (
    LISTED,
    PartyPlan,
    about_clients,
    about_party,
    about_rule,
    about_sharing,
    about_sizes,
    curve_rows,
    group_row,
    headline_keys,
    party_row,
)
from fulcrum.types import Assignment

AGGREGATIONS = ("plain", "ideal-secagg")
"""What privacy.aggregation may be: what the server is taken to see."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The terms of every party. Ask by party number k (0..parties-1).

    sizes [K] are the units n_k, group_of [K] the number of each party's group. delta, accountant, unit and the
    noise schedule's name are the run's; rounds is T. central: the server's mechanism where the unit is the
    client (sizes are then examples, and only make weights), else None. aggregation: what the server is taken to see.
    """

    name: Callable[[int], str]
    sizes: npt.NDArray[np.int64]
    group_of: npt.NDArray[np.int32]
    groups: tuple[Group, ...]
    rounds: int
    delta: float
    accountant: str
    unit: str
    population: str
    private: bool
    sound: bool
    C0: float
    participation: float
    weights: str
    total_budget: float | None = None
    schedule: str = "constant"
    central: Terms | None = None
    aggregation: str = "plain"

    @property
    def parties(self) -> int:
        """K."""
        return len(self.sizes)

    @property
    def trusted_server(self) -> bool:
        """Whether a trusted server clips whole updates and adds the noise: the unit is then the client."""
        return self.central is not None

    @property
    def server_terms(self) -> Terms:
        """The trusted server's mechanism; ask only where `trusted_server` is true."""
        if self.central is None:
            raise ValueError(f"a plan with unit {self.unit!r} has no trusted server")
        return self.central

    @property
    def shared(self) -> bool:
        """Whether the parties share one dose of noise, under an ideal secure aggregation that is assumed."""
        return self.aggregation == "ideal-secagg"

    @property
    def promised(self) -> float | None:
        """delta; None where the rule adds no noise, so that nothing is promised."""
        return self.delta if self.private else None

    def group(self, k: int) -> Group:
        """The group that party k belongs to."""
        return self.groups[int(self.group_of[k])]

    def units(self, k: int) -> int:
        """n_k: examples, or persons where the unit is the person; 1 where it is the client itself."""
        return 1 if self.trusted_server else int(self.sizes[k])

    def participations(self, k: int) -> int:
        """The most rounds that party k takes part in."""
        return self.group(k).participations

    def events(self, k: int, t: int = 0) -> tuple[Event, ...]:
        """What party k releases if it takes part in round t (from 0)."""
        return self.group(k).round_events(t)

    def assignment(self, k: int, t: int, lr: float) -> Assignment:
        """What party k is asked to do in round t (from 0) at learning rate lr."""
        if self.central:  # plain training: the server clips and adds the noise
            return Assignment(k, self.central.local_rate, 0.0, self.central.local_steps, lr)
        return self.group(k).assignment(k, t, lr)

    def terms(self, k: int) -> dict[str, Any]:
        """Party k's account in a ledger: the keywords of `Ledger.enroll` but its name."""
        return {
            "budget": self.total_budget if self.total_budget is not None else self.group(k).budget,
            "delta": self.delta,
            "accountant": self.accountant,
            "unit": self.unit,
            # Epsilons against different adversaries do not add up, so they have accounts of their own.
            "population": f"{self.population}, "
            + ("whole" if self.trusted_server else f"{self.units(k)} {self.unit}s")
            + (", seen in sums only (ideal secure aggregation)" if self.shared else ""),
        }

    @property
    def steady(self) -> bool:
        """Whether every round asks the same of a party: no noise schedule, and statistics with every step or none."""
        return self.schedule == "constant" and all(group.every == 1 for group in self.groups)

    def epsilon_at(self, round: int, k: int, accountant: str | None = None) -> float:
        """The largest epsilon that party k can have spent after `round` rounds (0: before the first)."""
        return self.group(k).epsilon(round, self.delta, accountant or self.accountant)

    def curve(self, k: int, points: int = 11, accountant: str | None = None) -> list[tuple[int, float]]:
        """(rounds done, epsilon) of party k, at about evenly spaced rounds from 0 to T."""
        rounds = sorted({round(self.rounds * i / max(points - 1, 1)) for i in range(points)})
        return [(t, self.epsilon_at(t, k, accountant)) for t in rounds]

    @cached_property
    def ends(self) -> tuple[dict[str, float], ...]:
        """Epsilon of each group at the end, by accountant: those of `reported_accountants`, the headline first."""
        reported = reported_accountants(self.accountant)
        spends = [group.spent.plus(group.worst(self.rounds)) for group in self.groups]
        by_name = {accountant.name: epsilons(spends, self.delta, accountant).tolist() for accountant in reported}
        return tuple({name: by_name[name][i] for name in by_name} for i in range(len(self.groups)))

    @property
    def largest_ends(self) -> dict[str, float]:
        """The largest epsilon of any party at the end, by accountant."""
        return {name: max(end[name] for end in self.ends) for name in self.ends[0]}

    @property
    def costliest(self) -> int:
        """The number of a party that can spend the most, by the headline's accountant first."""
        costs = [tuple(end.values()) for end in self.ends]
        return int((self.group_of == max(range(len(costs)), key=costs.__getitem__)).argmax())

    def party(self, k: int) -> PartyPlan:
        """Everything about party k."""
        group, n = self.group(k), self.units(k)
        batch = self.central.cohort if self.central else group.rate * n
        return PartyPlan(
            name=self.name(k),
            units=n,
            rate=group.rate,
            steps=group.steps,
            participations=group.participations,
            sigma=group.sigma,
            sigma_last=group.sigmas()[1],
            batch=batch,
            epsilons=self.ends[self.group_of[k]],
            budget=group.budget,
            warnings=() if self.trusted_server else tuple(about_party(self.promised, n, batch)),
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about the plan as a whole; parties are counted, not listed."""
        about = [*about_rule(self.private, self.sound), *(about_sharing(self.parties) if self.shared else ())]
        if self.central:
            along = self.noise_to_signal(1).direction
            return (*about, *about_clients(self.promised, self.parties, self.central.cohort, along))
        return (*about, *about_sizes(self.promised, self.sizes, self.rates * self.sizes, self.name, self.unit))

    @property
    def rates(self) -> npt.NDArray[np.float64]:
        """q of each party [K]."""
        return np.array([g.rate for g in self.groups])[self.group_of]

    @property
    def sigmas(self) -> npt.NDArray[np.float64]:
        """Noise multiplier of each party in the first round [K]."""
        return np.array([g.sigma for g in self.groups])[self.group_of]

    def step_noise(self, k: int, t: int = 0) -> float:
        """Noise of one step's mean gradient of party k along any direction, in units of C: sigma_t / (q n_k).

        sigma_t is the gradient's own: a paid rule's statistics take their share of the precision. Where K parties share
        the noise it is what party k adds, sigma_t / (sqrt(K) q n_k); of the aggregate that leaves sigma_t / (q n).
        """
        return noise.of_step(self.group(k), self.units(k), t)

    def noise_to_signal(self, dim: int, k: int | None = None, C: float | None = None) -> Noise:
        """How noisy a step of the first round is for a model of `dim` parameters: party k alone, or the aggregate.

        The aggregate averages over the parties with the run's weights; with client sampling, over the
        expected number of them. Where the unit is the client only the aggregate has noise, and k is
        ignored. C is clip.C0 unless given; it only scales coordinate and norm.
        """
        if self.central:
            direction = noise.of_server(self.groups, self.central)
        elif k is not None:
            direction = self.step_noise(k)
        else:
            direction = noise.of_aggregate(self.groups, self.group_of, self.sizes, self.weights, self.participation)
        return noise.in_all(direction, dim, self.C0 if C is None else C)

    def to_json(self, dim: int | None = None) -> dict[str, Any]:
        """For `fulcrum plan --json`: plain values, an infinite epsilon as the string "inf".

        Lists groups in full and the first 1000 parties; `noise` (party by party and aggregate) where
        the model's number of parameters is given.
        """
        members = np.bincount(self.group_of, minlength=len(self.groups)).tolist()
        before = [group.spent.epsilon(self.delta, self.accountant) for group in self.groups]
        listed = [self.party(i) for i in range(min(self.parties, LISTED))]
        result: dict[str, Any] = {
            **headline_keys(self.largest_ends),
            "delta": self.delta,
            "accountant": self.accountant,
            "unit": self.unit,
            "aggregation": self.aggregation,
            "rounds": self.rounds,
            "schedule": self.schedule,
            "private": self.private,
            "sound": self.sound,
            "parties_total": self.parties,
            "groups": [group_row(*row) for row in zip(self.groups, members, self.ends, before, strict=True)],
            "parties": [party_row(party) for party in listed],
            "curve": curve_rows(self.curve(self.costliest)),
            "warnings": list(self.warnings),
        }
        if dim is not None:
            result["noise"] = {
                "parameters": dim,
                "C": self.C0,
                "aggregate": vars(self.noise_to_signal(dim)),
                "parties": [vars(self.noise_to_signal(dim, i)) for i in range(len(listed))],
            }
        return result
