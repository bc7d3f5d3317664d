"""The plan as a value: the terms of every party and their cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fulcrum.privacy.accounting import compute_epsilons, reported_accountants
from fulcrum.privacy.client_level import ClientLevelTerms
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger.rows import MASKED_SUMS, SUMS_ONLY, RunPlan
from fulcrum.privacy.pairwise.shares import compute_own_variances
from fulcrum.privacy.plan import noise
from fulcrum.privacy.plan.noise import PlannedNoise
from fulcrum.privacy.plan.party_group import PartyGroup
from fulcrum.privacy.plan.text import (
    MAX_PARTIES_LISTED,
    PartyPlan,
    make_curve_rows,
    make_group_row,
    make_headline_keys,
    make_party_row,
    warn_about_client_unit,
    warn_about_masks,
    warn_about_party,
    warn_about_party_sizes,
    warn_about_rule,
    warn_about_shared_noise,
)
from fulcrum.settings.derived import WEIGHT_POWERS
from fulcrum.types import Assignment, make_short_repr

AGGREGATIONS = ("plain", "ideal-secagg", "pairwise")
"""The choices of privacy.aggregation: what the server is assumed to see."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The terms of every party. Methods take the party number k (0..parties-1).

    sizes [K]: units n_k per party. group_of [K]: index of each party's group. delta, accountant, unit and the name of
    the noise schedule: of the run. rounds: number of rounds T. central: the server's mechanism at unit client (sizes
    are then examples, used for weights only), else None. aggregation: what the server is assumed to see. account_delta:
    delta over all runs of a kept ledger, where this run takes a part of it (privacy.budget_delta); None: the run's.
    colluders: with pairwise masks, how many of a round's participants may collude with the server. peers: where the
    plan is one party's own, how many others its messages are masked with.
    """

    __repr__ = make_short_repr

    name: Callable[[int], str]
    sizes: npt.NDArray[np.int64]
    group_of: npt.NDArray[np.int32]
    groups: tuple[PartyGroup, ...]
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
    central: ClientLevelTerms | None = None
    aggregation: str = "plain"
    account_delta: float | None = None
    colluders: int = 0
    peers: int = 0

    @property
    def parties(self) -> int:
        """Number of parties K."""
        return len(self.sizes)

    @property
    def has_trusted_server(self) -> bool:
        """Whether a trusted server clips whole updates and adds the noise (unit client)."""
        return self.central is not None

    @property
    def get_server_terms(self) -> ClientLevelTerms:
        """The trusted server's mechanism; call only if `has_trusted_server` is true."""
        if self.central is None:
            raise ValueError(f"a plan with unit {self.unit!r} has no trusted server")
        return self.central

    @property
    def shares_noise(self) -> bool:
        """Whether the parties share one noise vector, under an assumed ideal secure aggregation."""
        return self.aggregation == "ideal-secagg"

    @property
    def is_pairwise(self) -> bool:
        """Whether the parties' messages are masked in pairs, so that only their sum is seen."""
        return self.aggregation == "pairwise"

    @property
    def promised_delta(self) -> float | None:
        """delta; None where the rule adds no noise, so there is no guarantee."""
        return self.delta if self.private else None

    def group(self, k: int) -> PartyGroup:
        """The group that party k belongs to."""
        return self.groups[int(self.group_of[k])]

    def units(self, k: int) -> int:
        """Number of units n_k: examples, or persons at unit person; 1 at unit client."""
        return 1 if self.has_trusted_server else int(self.sizes[k])

    def participations(self, k: int) -> int:
        """The largest number of rounds that party k takes part in."""
        return self.group(k).participations

    def events(self, k: int, t: int = 0) -> tuple[Event, ...]:
        """The events of party k if it takes part in round t (from 0)."""
        return self.group(k).compute_round_events(t)

    def assignment(self, k: int, t: int, lr: float) -> Assignment:
        """The task of party k in round t (from 0) at learning rate lr."""
        if self.central:  # plain training: the server clips and adds the noise
            return Assignment(k, self.central.local_rate, 0.0, self.central.local_steps, lr)
        return self.group(k).assignment(k, t, lr)

    def assignments(self, clients: Sequence[int], t: int, lr: float) -> tuple[Assignment, ...]:
        """The tasks of the participants of round t (from 0). With pairwise masks each one's own noise depends on who
        else takes part (`privacy.pairwise.shares`)."""
        tasks = tuple(self.assignment(k, t, lr) for k in clients)
        if not self.is_pairwise or not tasks:
            return tasks
        parts = self._noise_parts(tuple(clients), t)
        return tuple(replace(task, noise_parties=part) for task, part in zip(tasks, parts, strict=True))

    def compute_round_noises(self, clients: Sequence[int], t: int = 0) -> list[float]:
        """The noise of one step's mean gradient of each participant, in units of C, as each adds it in round t."""
        each = [self.compute_step_noise(k, t) for k in clients]
        if not self.is_pairwise or not each:
            return each
        return [noise / math.sqrt(part) for noise, part in zip(each, self._noise_parts(tuple(clients), t), strict=True)]

    def compute_needs(self, clients: Sequence[int], t: int = 0) -> list[float]:
        """tau_k^2 of each participant: the variance its units need in the sum of messages, for C = 1."""
        heights = [self.units(k) ** WEIGHT_POWERS[self.weights] for k in clients]
        return [
            (height / sum(heights) * self.compute_step_noise(k, t)) ** 2
            for height, k in zip(heights, clients, strict=True)
        ]

    def _noise_parts(self, clients: tuple[int, ...], t: int) -> tuple[float, ...]:
        """tau_k^2 / s_k^2 of each participant; computed once for equal rounds."""
        key = (clients, 0 if self.steady else t)
        if key not in self._parts:
            needs = self.compute_needs(clients, t)
            own = compute_own_variances(needs, self.colluders)
            self._parts[key] = tuple(n / s if s else 1.0 for n, s in zip(needs, own, strict=True))
        return self._parts[key]

    @cached_property
    def _parts(self) -> dict[tuple[tuple[int, ...], int], tuple[float, ...]]:
        return {}

    def terms(self, k: int) -> dict[str, Any]:
        """Party k's account in a ledger: the keywords of `Ledger.enroll` except the name."""
        return {
            "budget": self.total_budget if self.total_budget is not None else self.group(k).budget,
            "delta": self.delta if self.account_delta is None else self.account_delta,
            "accountant": self.accountant,
            "unit": self.unit,
            # Epsilons against different adversaries do not add up, so each has its own account.
            "population": f"{self.population}, "
            + ("whole" if self.has_trusted_server else f"{self.units(k)} {self.unit}s")
            + (SUMS_ONLY if self.shares_noise else "")
            + (MASKED_SUMS.format(self.colluders) if self.is_pairwise else ""),
        }

    def make_run_plan(self, k: int, rounds: int | None = None) -> RunPlan:
        """The most that party k will release in this run, for `Ledger.register_plans`; in its first `rounds` rounds."""
        return RunPlan(self.group(k).worst(self.rounds if rounds is None else rounds), self.delta)

    @property
    def steady(self) -> bool:
        """Whether all rounds have the same terms: no noise schedule, and statistics with every step or none."""
        return self.schedule == "constant" and all(group.statistics_interval == 1 for group in self.groups)

    def compute_epsilon_at(self, round: int, k: int, accountant: str | None = None) -> float:
        """The largest epsilon that party k can have spent after `round` rounds (0: before the first)."""
        return self.group(k).epsilon(round, self.delta, accountant or self.accountant)

    def curve(self, k: int, points: int = 11, accountant: str | None = None) -> list[tuple[int, float]]:
        """(rounds done, epsilon) of party k, at roughly evenly spaced rounds from 0 to T."""
        rounds = sorted({round(self.rounds * i / max(points - 1, 1)) for i in range(points)})
        return [(t, self.compute_epsilon_at(t, k, accountant)) for t in rounds]

    @cached_property
    def ends(self) -> tuple[dict[str, float], ...]:
        """Epsilon of each group at the end, by accountant, in the order of `reported_accountants`."""
        reported = reported_accountants(self.accountant)
        spends = [group.spent.add_events(group.worst(self.rounds)) for group in self.groups]
        by_name = {
            accountant.name: compute_epsilons(spends, self.delta, accountant).tolist() for accountant in reported
        }
        return tuple({name: by_name[name][i] for name in by_name} for i in range(len(self.groups)))

    @property
    def largest_final_epsilons(self) -> dict[str, float]:
        """The largest epsilon of any party at the end, by accountant."""
        return {name: max(end[name] for end in self.ends) for name in self.ends[0]}

    @property
    def costliest_party(self) -> int:
        """The number of a party with the largest final epsilon; the headline accountant compares first."""
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
            warnings=() if self.has_trusted_server else tuple(warn_about_party(self.promised_delta, n, batch)),
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the whole plan; they give numbers of parties, not names."""
        about = [
            *warn_about_rule(self.private, self.sound),
            *(warn_about_shared_noise(self.parties) if self.shares_noise else ()),
            *(warn_about_masks(self.colluders) if self.is_pairwise else ()),
        ]
        if self.central:
            along = self.compute_noise_to_signal(1).direction
            return (*about, *warn_about_client_unit(self.promised_delta, self.parties, self.central.cohort, along))
        return (
            *about,
            *warn_about_party_sizes(self.promised_delta, self.sizes, self.rates * self.sizes, self.name, self.unit),
        )

    @property
    def rates(self) -> npt.NDArray[np.float64]:
        """Sampling rate q of each party [K]."""
        return np.array([g.rate for g in self.groups])[self.group_of]

    @property
    def sigmas(self) -> npt.NDArray[np.float64]:
        """Noise multiplier of each party in the first round [K]."""
        return np.array([g.sigma for g in self.groups])[self.group_of]

    def compute_step_noise(self, k: int, t: int = 0) -> float:
        """Noise of one step's mean gradient of party k along any direction, in units of C: sigma_t / (q n_k).

        sigma_t is the gradient's multiplier, after the share of the precision for the rule's statistics. Where K
        parties share the noise, party k adds sigma_t / (sqrt(K) q n_k), and the aggregate has sigma_t / (q n).
        """
        return noise.plan_step_noise(self.group(k), self.units(k), t)

    def compute_noise_to_signal(self, dim: int, k: int | None = None, C: float | None = None) -> PlannedNoise:
        """The noise of a step of the first round for a model of `dim` parameters: of party k, or of the aggregate.

        The aggregate averages over the parties with the run's weights; with client sampling, over the
        expected number of participants. At unit client only the aggregate has noise, and k is ignored.
        C is clip.C0 unless given; it only scales coordinate and norm.
        """
        if self.central:
            direction = noise.plan_server_noise(self.groups, self.central)
        elif k is not None:
            direction = self.compute_step_noise(k)
        else:
            direction = noise.plan_aggregate_noise(
                self.groups, self.group_of, self.sizes, self.weights, self.participation
            )
            direction *= self._plan_sharing()
        return noise.compute_total_noise(direction, dim, self.C0 if C is None else C)

    def _plan_sharing(self) -> float:
        """By what factor masks reduce the noise of the aggregate: 1 without; sqrt(sum s_k^2 / sum tau_k^2) with them,
        at the expected number of participants."""
        if not self.is_pairwise:
            return 1.0
        clients = range(max(self.colluders + 1, round(self.parties * self.participation)))
        needs = self.compute_needs(clients)
        return math.sqrt(sum(compute_own_variances(needs, self.colluders)) / sum(needs)) if sum(needs) else 1.0

    def to_json(self, dim: int | None = None) -> dict[str, Any]:
        """For `fulcrum plan --json`: plain values, an infinite epsilon as the string "inf".

        Lists all groups and the first 1000 parties; `noise` (per party and of the aggregate) if the
        model's number of parameters is given.
        """
        members = np.bincount(self.group_of, minlength=len(self.groups)).tolist()
        before = [group.spent.epsilon(self.delta, self.accountant) for group in self.groups]
        listed = [self.party(i) for i in range(min(self.parties, MAX_PARTIES_LISTED))]
        result: dict[str, Any] = {
            **make_headline_keys(self.largest_final_epsilons),
            "delta": self.delta,
            "accountant": self.accountant,
            "unit": self.unit,
            "aggregation": self.aggregation,
            **({"colluders": self.colluders} if self.is_pairwise else {}),
            "rounds": self.rounds,
            "schedule": self.schedule,
            "private": self.private,
            "sound": self.sound,
            "parties_total": self.parties,
            "groups": [make_group_row(*row) for row in zip(self.groups, members, self.ends, before, strict=True)],
            "parties": [make_party_row(party) for party in listed],
            "curve": make_curve_rows(self.curve(self.costliest_party)),
            "warnings": list(self.warnings),
        }
        if dim is not None:
            result["noise"] = {
                "parameters": dim,
                "C": self.C0,
                "aggregate": vars(self.compute_noise_to_signal(dim)),
                "parties": [vars(self.compute_noise_to_signal(dim, i)) for i in range(len(listed))],
            }
        return result
