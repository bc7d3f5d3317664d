"""What a configuration will cost each party, and how noisy it will be, before anything is trained.

Parties that share rate, steps, participations, budget and past form a group, and sigma is calibrated
once a group: a million equal parties plan as fast as one. Client sampling (q_c) never lowers the cost
of an example or a person: the server sees who takes part, so every party is planned for its public cap
on participations. Where rounds cost differently (a noise schedule, statistics released now and then), the
cap is planned for the costliest of them. Where the unit is the client the server is trusted, q_c is the rate
of one release a round, every party is charged for all rounds, and one noise serves all: the strictest
budget sets it. Where an ideal secure aggregation is assumed (privacy.aggregation) the parties share one dose of noise,
and each is charged what the sum costs.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fulcrum.accounting import Spend, calibrate, most
from fulcrum.central import FEW, Terms, make_terms
from fulcrum.clip.rule import ClipRule, Shape, Share, alone, no_share
from fulcrum.config import Settings, local_steps
from fulcrum.errors import ConfigError
from fulcrum.group import Group
from fulcrum.ledger import Ledger
from fulcrum.schedule import factors
from fulcrum.types import Assignment, Event

LISTED = 1000
"""The most parties that `to_json` lists one by one."""
ASSUMED = (
    "ASSUMES AN IDEAL SECURE AGGREGATION, which is simulated and not implemented: epsilon holds only against a server "
    "that sees nothing but the sum over all {parties} parties, with no party colluding. Each adds 1/{parties} of the "
    "noise's variance, so a single update by itself is NOT private at this epsilon."
)


class Named(Protocol):
    """Parties that know their number and names, such as a `data.Partition`."""

    @property
    def parties(self) -> int: ...

    def name(self, k: int) -> str: ...


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


# --- making a plan ------------------------------------------------------------------------------


def make_plan(
    settings: Settings,
    names: Sequence[str] | Named | int,
    units: Any,
    rule: ClipRule,
    spent: Mapping[str, Spend] | None = None,
    population: str | None = None,
) -> Plan:
    """Plan a run. names: the parties' names, or their number (then party-0, party-1, ...). units [K]: n_k.

    With privacy.epsilon, sigma is the smallest that keeps each party within its budget over its cap on
    participations; with privacy.sigma, epsilon is what that costs. spent, by party, is what was
    released before this run and counts against the same budget; leave it out for "this run only".
    population says which data the parties hold, for the ledger; by default it is told from the settings.
    """
    privacy, train = settings.privacy, settings.train
    if rule.private and privacy.epsilon is None and privacy.sigma is None:
        raise ConfigError(
            f"rule {rule.name!r} is private and needs to know how private: give --epsilon (privacy.epsilon) "
            "or --sigma (privacy.sigma)."
        )
    count, name = _naming(names)
    sizes = _sizes(units, count)
    rate, steps = round_terms(settings)
    common = Group(
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
    keys: dict[Any, int] = {}
    groups: list[Group] = []
    group_of = np.zeros(count, dtype=np.int32)
    special = _special(privacy.budgets, spent or {}, count, name)
    by_size = common.every > 1 and _depends_on_batch(
        rule.share, train.rate * float(sizes.min()), train.rate * float(sizes.max())
    )
    if by_size:  # then parties of different sizes pay differently, and each size is a group
        special = {k: special.get(k, (None, None)) for k in range(count)}
    plain_left = len(special) < count
    for k, (budget, past) in ([(None, (None, None))] if plain_left else []) + list(special.items()):
        group = replace(common, budget=budget if budget and rule.private else common.budget, spent=past or common.spent)
        if by_size and k is not None:
            group = replace(group, batch=train.rate * float(sizes[k]))
        at = keys.setdefault((group.budget, group.spent.key, group.batch), len(groups))
        if at == len(groups):
            example = name(k) if k is not None else "every party" if not special else "most parties"
            groups.append(replace(group, sigma=_sigma(settings, rule, group, example)))
        if k is not None:
            group_of[k] = at
    if privacy.aggregation == "ideal-secagg":
        _check_sharing(settings, rule, groups)
        groups = [replace(groups[0], shares=count)]
    central = make_terms(settings, sizes)
    if central:  # one noise for all, so the party that needs most sets it
        loudest = max(group.sigma for group in groups)
        groups = [replace(group, sigma=loudest) for group in groups]
    return Plan(
        name=name,
        sizes=sizes,
        group_of=group_of,
        groups=tuple(groups),
        rounds=train.rounds,
        delta=privacy.delta,
        accountant=privacy.accountant,
        unit=privacy.unit,
        population=_population(settings) if population is None else population,
        private=rule.private,
        sound=rule.sound,
        C0=settings.clip.C0,
        participation=train.participation,
        weights=train.weights,
        total_budget=privacy.budget,
        central=central,
        schedule=privacy.noise_schedule if rule.private else "constant",
        aggregation=privacy.aggregation,
    )


def _check_sharing(settings: Settings, rule: ClipRule, groups: Sequence[Group]) -> None:
    """Refuse what one dose of noise over the parties' sum does not cover; `config.check` has looked at the settings."""
    view = rule.view(rule.init(settings.clip, Shape(2, (2,))), 0, settings.train.rounds)
    reasons = {
        "adds no noise, so there is none to share": not rule.private,
        "sets C from raw private values": not rule.sound,
        "keeps a C at each party, and shared noise needs a common one": rule.where != "server",
        "releases statistics beside the gradients": rule.share is not no_share,
        "clips in another basis and may reshape each party's own sum": view.transform is not None,
    }
    for reason, true in reasons.items():
        if true:
            raise ConfigError(
                f"clip.rule = {rule.name!r} {reason}; with privacy.aggregation = 'ideal-secagg' use moo or fixed."
            )
    if len(groups) > 1:
        raise ConfigError(
            "the parties have spent different amounts before, so each needs its own noise; privacy.aggregation = "
            "'ideal-secagg' shares one: use plain."
        )


def round_terms(settings: Settings) -> tuple[float, int]:
    """(rate, releases a round) of the mechanism that is accounted: the local steps, or the server's one release."""
    if settings.privacy.unit == "client":
        return settings.train.participation, 1
    return settings.train.rate, local_steps(settings.train)


def _every(settings: Settings, rule: ClipRule) -> int:
    """Steps between two releases of the rule's statistics; the server of unit client releases them every round."""
    paid = rule.private and rule.share is not no_share and settings.privacy.unit != "client"
    return max(1, round(settings.clip.refresh / settings.train.rate)) if paid else 1


def _depends_on_batch(share: Share, few: float, many: float) -> bool:
    """Whether parties with expected batches between these give their statistics different shares, at any noise."""
    return any(share(float(sigma), few) != share(float(sigma), many) for sigma in np.geomspace(0.05, 1000.0, 200))


def _naming(names: Sequence[str] | Named | int) -> tuple[int, Callable[[int], str]]:
    if isinstance(names, int):
        return names, "party-{}".format
    if isinstance(names, Sequence):
        if len(set(names)) < len(names):
            raise ConfigError("two parties have the same name; each needs its own, since budgets are kept by name.")
        return len(names), names.__getitem__
    return names.parties, names.name


def _sizes(units: Any, count: int) -> npt.NDArray[np.int64]:
    sizes = np.asarray(units)
    if sizes.shape != (count,) or count == 0:
        raise ConfigError(f"units has shape {sizes.shape}; it must hold one number for each of {count} parties.")
    whole = sizes.astype(np.int64)
    if (whole != sizes).any() or (whole < 1).any():
        raise ConfigError("units holds a number that is not a whole number of at least 1; every party needs data.")
    return whole


def _special(
    budgets: Mapping[str, float], spent: Mapping[str, Spend], count: int, name: Callable[[int], str]
) -> dict[int, tuple[float | None, Spend | None]]:
    """Parties with a budget or a past of their own, by number."""
    past = {party: spend for party, spend in spent.items() if spend.releases}
    if not budgets and not past:
        return {}
    number = {name(k): k for k in range(count)}
    for party in budgets:
        if party not in number:
            near = difflib.get_close_matches(party, list(number)[:LISTED], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the parties are {name(0)!r} to {name(count - 1)!r}."
            raise ConfigError(f"privacy.budgets names party {party!r}, which is not there; {hint}")
    return {number[p]: (budgets.get(p), past.get(p)) for p in {**budgets, **past} if p in number}


def _sigma(settings: Settings, rule: ClipRule, group: Group, who: str) -> float:
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


def _population(settings: Settings) -> str:
    """Which data a party of that name holds: the same only for the same source, split and seed."""
    data = settings.data
    if data.partition == "given":
        split = "given parties"
    else:
        split = f"{data.partition} over {data.parties}, alpha {data.alpha:g}, shards {data.shards}"
        split += f", floor {data.min_examples}, seed {settings.run.seed}"
    held = f", {data.validation:g} held out" if data.validation else ""
    return f"{data.source}, {split}{held}"


def rounds_for_budget(
    settings: Settings, epsilon: float | None = None, sigma: float | None = None, spent: Spend | None = None
) -> int:
    """How many rounds of these settings' rate and steps fit into epsilon at sigma; 0 if not even one.

    epsilon and sigma are privacy.epsilon and privacy.sigma unless given here. A party may have spent
    something before. At most a million rounds are counted. Under a noise schedule other than constant the
    question is how many of its train.rounds rounds fit, from the first on.
    """
    privacy, train = settings.privacy, settings.train
    budget = privacy.epsilon if epsilon is None else epsilon
    multiplier = privacy.sigma if sigma is None else sigma
    if budget is None or multiplier is None:
        raise ConfigError("how many rounds fit depends on both: give an epsilon as budget and a sigma.")
    if not 0 < budget < math.inf:
        raise ConfigError(f"epsilon = {budget!r} is out of range; it must be a finite number greater than 0.")
    rate, steps = round_terms(settings)
    limit = 10**6 if privacy.noise_schedule == "constant" else train.rounds
    group = Group(
        rate=rate,
        steps=steps,
        participations=limit,
        budget=budget,
        spent=spent or Spend.none(),
        sigma=multiplier,
        factors=(1.0,) if privacy.noise_schedule == "constant" else factors(privacy, train.rounds),
    )
    return most(lambda rounds: group.epsilon(rounds, privacy.delta, privacy.accountant) <= budget, limit)


def affordable_rounds(plan: Plan, ledger: Ledger) -> dict[str, int]:
    """Rounds that each party of a kept ledger can still pay for, by name; those that can pay for all are left out."""
    accounts, spent = ledger.accounts(), ledger.spends()
    known: dict[tuple[Any, ...], int] = {}
    short: dict[str, int] = {}
    for k in range(plan.parties) if accounts else ():
        account = accounts.get(plan.name(k))
        if account is None or account.budget is None:
            continue
        past, budget, wanted = spent[account.name], account.budget, plan.participations(k)

        def fits(n: int, k: int = k, past: Spend = past, budget: float = budget) -> bool:
            return past.plus(plan.group(k).worst(n)).epsilon(plan.delta, plan.accountant) <= budget

        key = (int(plan.group_of[k]), past.key, budget)
        if key not in known:
            known[key] = most(fits, wanted)
        if known[key] < wanted:
            short[account.name] = known[key]
    return short
