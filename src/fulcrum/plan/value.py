"""The plan as a value: the terms of every party, what they cost, and how it is shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fulcrum.central import FEW, Terms
from fulcrum.clip.rule import alone, no_share
from fulcrum.group import Group
from fulcrum.types import Assignment, Event

LISTED = 1000
"""The most parties that `to_json` lists one by one."""
ASSUMED = (
    "ASSUMES AN IDEAL SECURE AGGREGATION, which is simulated and not implemented: epsilon holds only against a server "
    "that sees nothing but the sum over all {parties} parties, with no party colluding. Each adds 1/{parties} of the "
    "noise's variance, so a single update by itself is NOT private at this epsilon."
)


@dataclass(frozen=True)
class PartyPlan:
    """One party's terms. batch is the expected number of units in a step, q n_k; epsilons are at the end.

    sigma is the multiplier of the first round, sigma_last that of the last. budget is None where sigma was
    given. warnings are sentences for the user.
    """

    name: str
    units: int
    rate: float
    steps: int
    participations: int
    sigma: float
    sigma_last: float
    batch: float
    epsilon_rdp: float
    epsilon_pld: float
    budget: float | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Noise:
    """The noise in one local step's mean gradient (unit client: a round's mean update), beside the largest
    signal, whose norm is C.

    coordinate: standard deviation of each coordinate. norm: of the whole vector, C sigma sqrt(d) / (q n).
    ratio: norm / C. direction: the part along one fixed direction, relative to C: sigma / (q n).
    """

    coordinate: float
    norm: float
    ratio: float
    direction: float


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
    def shared(self) -> bool:
        """Whether the parties share one dose of noise, under an ideal secure aggregation that is assumed."""
        return self.aggregation == "ideal-secagg"

    def group(self, k: int) -> Group:
        """The group that party k belongs to."""
        return self.groups[int(self.group_of[k])]

    def units(self, k: int) -> int:
        """n_k: examples, or persons where the unit is the person; 1 where it is the client itself."""
        return 1 if self.central else int(self.sizes[k])

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
            + ("whole" if self.central else f"{self.units(k)} {self.unit}s")
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
    def ends(self) -> tuple[tuple[float, float], ...]:
        """(epsilon by RDP, epsilon by PLD) of each group at the end."""
        return tuple(
            (g.epsilon(self.rounds, self.delta, "rdp"), g.epsilon(self.rounds, self.delta, "pld")) for g in self.groups
        )

    def party(self, k: int) -> PartyPlan:
        """Everything about party k."""
        group, (rdp, pld), n = self.group(k), self.ends[self.group_of[k]], self.units(k)
        batch = self.central.cohort if self.central else group.rate * n
        warnings = []
        if not self.central and self.private and self.delta >= 1 / n:
            warnings.append(f"delta = {self.delta:g} is not below 1/n = 1/{n}; choose a smaller delta.")
        if not self.central and batch < 1:
            warnings.append(f"the expected batch is {group.rate * n:.2g}, below 1; choose a larger rate.")
        return PartyPlan(
            name=self.name(k),
            units=n,
            rate=group.rate,
            steps=group.steps,
            participations=group.participations,
            sigma=group.sigma,
            sigma_last=group.sigmas()[1],
            batch=batch,
            epsilon_rdp=rdp,
            epsilon_pld=pld,
            budget=group.budget,
            warnings=tuple(warnings),
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about the plan as a whole; parties are counted, not listed."""
        found = []
        if not self.private:
            found.append("The rule adds no noise: there is no privacy guarantee at all.")
        elif not self.sound:
            found.append(
                "NOT SOUND: the rule sets C from raw private values, so epsilon is nominal and guarantees nothing."
            )
        if self.shared:
            found.append(ASSUMED.format(parties=self.parties))
        if self.central:
            return (*found, *self._client_warnings(self.central))
        exposed = int((self.delta >= 1 / self.sizes).sum()) if self.private else 0
        if exposed:
            k = int(self.sizes.argmax())
            found.append(
                f"delta = {self.delta:g} is not below 1/n for {exposed} of {self.parties} parties (the largest, "
                f"{self.name(k)}, has {self.units(k)} {self.unit}s): choose delta below {1 / self.units(k):.2g}."
            )
        thin = int((self.rates * self.sizes < 1).sum())
        if thin:
            found.append(f"The expected batch is below 1 for {thin} of {self.parties} parties: choose a larger rate.")
        return tuple(found)

    def _client_warnings(self, central: Terms) -> list[str]:
        """Sentences about a plan whose unit is the client."""
        found = []
        if self.private and self.delta >= 1 / self.parties:
            found.append(
                f"delta = {self.delta:g} is not below 1/K for K = {self.parties} parties: choose delta below "
                f"{1 / self.parties:.2g}."
            )
        if self.private and self.parties < FEW:
            along = self.noise_to_signal(1).direction
            found.append(
                f"One epsilon hides a whole party among {self.parties}: in any direction the noise of a round is "
                f"{along:.2g} times the longest step the parties can take together, and little can be learned. Client "
                "level needs hundreds of parties; with few, protect examples (unit example)."
            )
        if central.cohort < 1:
            found.append(
                f"The expected number of participants is {central.cohort:.2g}, below 1: choose a larger participation."
            )
        return found

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
        group, batch = self.group(k), self.group(k).rate * self.units(k)
        return alone(group.share, group.sigma * group.factors[t], batch) / batch / math.sqrt(group.shares)

    def noise_to_signal(self, dim: int, k: int | None = None, C: float | None = None) -> Noise:
        """How noisy a step of the first round is for a model of `dim` parameters: party k alone, or the aggregate.

        The aggregate averages over the parties with the run's weights; with client sampling, over the
        expected number of them. Where the unit is the client only the aggregate has noise, and k is
        ignored. C is clip.C0 unless given; it only scales coordinate and norm.
        """
        if self.central:
            loudest, share = max(g.sigma for g in self.groups), self.groups[0].share
            direction = alone(share, loudest, self.central.cohort) * self.central.sensitivity
        elif k is not None:
            direction = self.step_noise(k)
        else:
            paid = self.groups[0].share is not no_share
            relative = self.sigmas / (self.rates * self.sizes) / math.sqrt(self.groups[0].shares)
            relative = np.array([self.step_noise(i) for i in range(self.parties)]) if paid else relative
            shares = self.sizes / self.sizes.sum() if self.weights == "examples" else 1 / self.parties
            direction = math.sqrt(float(((shares * relative) ** 2).sum()) / self.participation)
        reach = self.C0 if C is None else C
        ratio = direction * math.sqrt(dim)
        return Noise(coordinate=direction * reach, norm=ratio * reach, ratio=ratio, direction=direction)

    def to_json(self, dim: int | None = None) -> dict[str, Any]:
        """For `fulcrum plan --json`: plain values, an infinite epsilon as the string "inf".

        Lists groups in full and the first 1000 parties; `noise` (party by party and aggregate) where
        the model's number of parameters is given.
        """
        members = np.bincount(self.group_of, minlength=len(self.groups)).tolist()
        groups = [
            {
                "parties": count,
                "rate": g.rate,
                "steps": g.steps,
                "participations": g.participations,
                "sigma": g.sigma,
                "sigma_last": g.sigmas()[1],
                "statistics_every": g.every if g.share is not no_share else 0,
                "budget": g.budget,
                "spent_before": _plain(g.spent.epsilon(self.delta, self.accountant)),
                "epsilon_rdp": _plain(rdp),
                "epsilon_pld": _plain(pld),
            }
            for g, count, (rdp, pld) in zip(self.groups, members, self.ends, strict=True)
        ]
        costliest = max(range(len(self.groups)), key=lambda i: self.ends[i][0])
        k = int((self.group_of == costliest).argmax())
        listed = [self.party(i) for i in range(min(self.parties, LISTED))]
        result: dict[str, Any] = {
            "epsilon": _plain(self.ends[costliest][0]),
            "epsilon_pld": _plain(max(pld for _, pld in self.ends)),
            "delta": self.delta,
            "accountant": self.accountant,
            "unit": self.unit,
            "aggregation": self.aggregation,
            "rounds": self.rounds,
            "schedule": self.schedule,
            "private": self.private,
            "sound": self.sound,
            "parties_total": self.parties,
            "groups": groups,
            "parties": [
                {**vars(p), "epsilon_rdp": _plain(p.epsilon_rdp), "epsilon_pld": _plain(p.epsilon_pld)}
                | {"warnings": list(p.warnings)}
                for p in listed
            ],
            "curve": [{"round": t, "epsilon": _plain(e)} for t, e in self.curve(k)],
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


def _plain(value: float) -> float | str:
    return "inf" if math.isinf(value) else value
