"""The round loop: who takes part, reserve, train, aggregate, adapt C, settle, evaluate.

`federate` is a generator: each round is finished, paid and settled before it is yielded, and the
snapshot that comes with it is all that is needed to go on from there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fulcrum.accounting import Spend
from fulcrum.aggregate import SERVERS, client_weights, moving_average, weighted_mean
from fulcrum.central import SERVER, average, draw_cohort, released_of
from fulcrum.clip.rule import Shape
from fulcrum.config import Settings, learning_rate, local_steps
from fulcrum.coordinates import moved
from fulcrum.engine import Engine, Remote
from fulcrum.errors import BudgetError
from fulcrum.evaluate import evaluate
from fulcrum.ledger import Account, Ledger
from fulcrum.local import Problem
from fulcrum.plan import Plan
from fulcrum.rng import numpy_stream
from fulcrum.types import Assignment, ClientReply, Event, Gaussian, Released, RoundRequest, RoundResult, State

EPSILONS = 1000
"""Federations of up to this many parties list every party's epsilon in every round."""


@dataclass(frozen=True)
class Federation:
    """A run that is ready to start: settings, problem, plan and engine, all consistent."""

    settings: Settings
    problem: Problem
    plan: Plan
    engine: Engine


@dataclass(frozen=True)
class Snapshot:
    """The federation between two rounds. `round` rounds are done; clients holds states of client rules.

    participations [K] counts the rounds each party took part in; zeros where that is secret (unit client).
    """

    round: int
    params: torch.Tensor
    averaged: torch.Tensor
    server: State
    rule: State
    participations: torch.Tensor
    clients: Mapping[int, State] = field(default_factory=dict)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Flat names for a safetensors file; `from_tensors` reads them back."""
        flat = {"params": self.params, "averaged": self.averaged, "participations": self.participations}
        flat |= {f"server.{name}": value for name, value in self.server.items()}
        flat |= {f"rule.{name}": value for name, value in self.rule.items()}
        for client, state in self.clients.items():
            flat |= {f"client.{client}.{name}": value for name, value in state.items()}
        # Tensors of a state may share memory, which safetensors refuses: each gets its own.
        return {name: value.detach().cpu().clone().contiguous() for name, value in flat.items()}

    @staticmethod
    def from_tensors(round: int, flat: Mapping[str, torch.Tensor], device: torch.device) -> Snapshot:
        """The snapshot after `round` rounds, on `device`."""
        clients: dict[int, dict[str, torch.Tensor]] = {}
        server: dict[str, torch.Tensor] = {}
        rule: dict[str, torch.Tensor] = {}
        for name, value in flat.items():
            kind, _, rest = name.partition(".")
            if kind == "server":
                server[rest] = value.to(device)
            elif kind == "rule":
                rule[rest] = value.to(device)
            elif kind == "client":
                client, _, field_name = rest.partition(".")
                clients.setdefault(int(client), {})[field_name] = value.to(device)
        params, averaged = flat["params"].to(device), flat["averaged"].to(device)
        return Snapshot(round, params, averaged, server, rule, flat["participations"], clients)


def first_snapshot(federation: Federation) -> Snapshot:
    """The federation before its first round: public initial weights, C0."""
    problem = federation.problem
    params = problem.layout.flatten(problem.model).to(problem.device)
    server = SERVERS[federation.settings.train.server].init(problem.layout.dim)
    rule = problem.rule.init(federation.settings.clip, public_shape(federation))
    participations = torch.zeros(problem.partition.parties, dtype=torch.int32)
    to_device = {name: value.to(problem.device) for name, value in rule.items()}
    return Snapshot(0, params, params, server, to_device, participations)


LEARNED = 1.5
"""Weights whose norm is this many times that of random ones were learned; below, it is chance and biases."""


def public_shape(federation: Federation) -> Shape:
    """What a rule may know when it starts: all of it is fixed by the settings and the public initial weights."""
    train, problem = federation.settings.train, federation.problem
    # Where the unit is the client its whole update is one step at learning rate 1.
    steps, lr = (1, 1.0) if federation.plan.central else (local_steps(train), train.lr)
    noise = federation.plan.noise_to_signal(problem.layout.dim).direction / steps**0.5
    usual = problem.layout.usual_norm
    left_out = moved(problem.model)  # biases that stand for a mean say nothing of how large the weights are
    weights = problem.layout.unflatten(problem.layout.flatten(problem.model))
    own = torch.cat([value.flatten() for name, value in weights.items() if name not in left_out])
    larger = float(torch.linalg.vector_norm(own)) / usual
    return dataclasses.replace(
        problem.shape,
        start=usual,
        larger=larger if larger > LEARNED else 1.0,
        first=train.server_lr if SERVERS[train.server].scales else 1.0,
        depth=problem.layout.depth,
        mixed=any(centre.mix is not None for centre in left_out.values()),
        noise=noise,
        rounds=train.rounds,
        lr=lr,
        steps=float(steps),
    )


def federate(
    federation: Federation,
    ledger: Ledger,
    run: str,
    start: Snapshot | None = None,
    history: Sequence[Sequence[int]] = (),
) -> Iterator[tuple[RoundResult, Snapshot]]:
    """Train round by round. `start` and `history` (who paid in the rounds done) continue a run.

    Ends early when fewer than `train.min_parties` parties have budget left, or any party's has run out where all of
    them share one noise. Each yielded round has
    been reserved in the ledger before anything was computed, and settled after.
    """
    settings, problem, plan = federation.settings, federation.problem, federation.plan
    train = settings.train
    snapshot = start or first_snapshot(federation)
    purse = Purse(plan, settings.privacy.delta, settings.privacy.accountant)
    for done, clients in enumerate(history):
        purse.pay(done, clients)
    exhausted: set[int] = set()

    for t in range(snapshot.round, train.rounds):
        began = time.perf_counter()
        asked = invite(settings, problem.partition.parties, t) if not plan.central else range(plan.parties)
        invited = [k for k in asked if k not in exhausted]
        invited = [k for k in invited if int(snapshot.participations[k]) < plan.participations(k)]
        mode = problem.randomness.mode
        if isinstance(federation.engine, Remote):
            # The parties keep the ledgers that count, and send a round's stored bytes again: this one mirrors them.
            invited, mode = federation.engine.present(invited), "stored"
            exhausted |= federation.engine.spent()
        granted = reserve(ledger, run, t, plan, invited, mode)
        exhausted |= set(invited) - set(granted)
        if problem.partition.parties - len(exhausted) < train.min_parties:
            return
        if plan.shared and len(granted) < plan.parties:
            return  # without its part of the noise the sum of the others would not be private

        snapshot, replies, C = (play_client_round if plan.central else play_round)(federation, snapshot, granted, t)
        ledger.settle(run, t, digests(plan, replies, granted, settings.train.weights))
        took_part = [reply.client for reply in replies] if isinstance(federation.engine, Remote) else granted
        purse.pay(t, took_part)

        accuracy, loss = None, None
        if (t + 1) % settings.run.evaluate_every == 0 or t + 1 == train.rounds:
            data = problem.dataset
            accuracy, loss = evaluate(problem.model, problem.layout, snapshot.averaged, data.x_test, data.y_test)
        result = RoundResult(
            round=t + 1,
            rounds=train.rounds,
            params=snapshot.params,
            averaged=snapshot.averaged,
            C=C,
            epsilon=purse.largest,
            epsilons=purse.listed(),
            participants=None if plan.central else tuple(took_part),
            seconds=time.perf_counter() - began,
            accuracy=accuracy,
            loss=loss,
            diagnostics=mean_diagnostics(replies),
            out_of_budget=tuple(sorted(exhausted)) if plan.central else (),
        )
        yield result, snapshot


def invite(settings: Settings, parties: int, t: int) -> list[int]:
    """Who is asked in round t: each party with probability q_c. The coin is public: it amplifies nothing."""
    if settings.train.participation >= 1:
        return list(range(parties))
    # The gaps between those who are drawn are geometric: nothing is drawn for the many who sit out.
    stream, chance = numpy_stream(settings.run.seed, "participation", t), settings.train.participation
    chosen: list[int] = []
    last = -1
    while last < parties:
        places = last + stream.geometric(chance, size=int(1.1 * chance * parties) + 20).cumsum()
        chosen += places[places < parties].tolist()
        last = int(places[-1])
    return chosen


def reserve(ledger: Ledger, run: str, t: int, plan: Plan, invited: Sequence[int], mode: str) -> list[int]:
    """Reserve the round's cost for every invited party; those whose budget it would pass sit out.

    A round that was settled before (its outcome lost in a crash) gives the same bytes again in a
    seeded run and costs nothing. With secure randomness it would give others: that is a new release,
    so it is paid as a new attempt.
    """
    wanted = {plan.name(k): plan.events(k, t) for k in invited}
    ledger.enroll_all(Account(plan.name(k), **plan.terms(k)) for k in invited)
    attempt = ledger.settled_attempts(run, t) if mode == "secure" else 0
    granted = ledger.reserve(run, t, wanted, attempt=attempt)
    return [k for k in invited if granted[plan.name(k)]]


def play_round(
    federation: Federation, snapshot: Snapshot, clients: Sequence[int], t: int
) -> tuple[Snapshot, list[ClientReply], tuple[float, ...]]:
    """One round's arithmetic: train the clients, average, step the server, move C. Returns the C it used."""
    settings, problem, plan = federation.settings, federation.problem, federation.plan
    lr = learning_rate(settings.train, t)
    own = problem.rule.where == "client"
    states = tuple(snapshot.clients.get(k, snapshot.rule) if own else snapshot.rule for k in clients)
    C = torch.stack([state["C"] for state in states or (snapshot.rule,)]).mean(dim=0)
    if not clients:
        return _skip(settings, snapshot, t), [], tuple(C.tolist())
    if plan.shared and (len(clients) < plan.parties or isinstance(federation.engine, Remote)):
        raise BudgetError(
            f"{len(clients)} of {plan.parties} parties take part in round {t + 1}, but they share one noise "
            "(privacy.aggregation): all of them must, on this machine."
        )

    tasks = tuple(plan.assignment(k, t, lr) for k in clients)
    request = RoundRequest(t, settings.train.rounds, snapshot.params, tasks, states, settings.train.weight_decay)
    replies = list(federation.engine.run(request))
    if isinstance(federation.engine, Remote):  # who did not answer in time did not take part
        clients = [reply.client for reply in replies]
        tasks = tuple(task for task in tasks if task.client in clients)
        if not clients:
            return _skip(settings, snapshot, t), [], tuple(C.tolist())
    for reply, task in zip(replies, tasks, strict=True):
        _check_events(reply, plan.events(task.client, t))

    weights = client_weights([plan.units(k) for k in clients], settings.train.weights)
    aggregate, extra = weighted_mean(replies, weights)
    steps, asked = (
        float(weights @ torch.tensor([float(count) for count in counts]))
        for counts in ([task.steps for task in tasks], [task.asked(t) for task in tasks])
    )
    noises = [plan.step_noise(k, t) for k in clients]
    noise = aggregate_noise(tasks, noises, weights)
    released = Released(aggregate, extra, lr, steps, t, settings.train.rounds, noise, asked)

    update = aggregate if own else problem.rule.apply(snapshot.rule, released)
    change, server = SERVERS[settings.train.server].step(update, snapshot.server, settings.train)
    params = snapshot.params + change
    participations = snapshot.participations.clone()
    participations[list(clients)] += 1
    return (
        Snapshot(
            round=t + 1,
            params=params,
            averaged=moving_average(snapshot.averaged, params, settings.train.ema, t),
            server=server,
            rule=snapshot.rule if own else problem.rule.adapt(snapshot.rule, released),
            participations=participations,
            clients=_client_states(problem, snapshot, replies, released, tasks, noises) if own else {},
        ),
        replies,
        tuple(C.tolist()),
    )


def play_client_round(
    federation: Federation, snapshot: Snapshot, charged: Sequence[int], t: int
) -> tuple[Snapshot, list[ClientReply], tuple[float, ...]]:
    """As `play_round` where the unit is the client: who joins is drawn in secret, one noised mean is released.

    Everyone in `charged` may be drawn and has paid, drawn or not; a round that nobody joins is noised
    and released like any other. The one reply is the server's.
    """
    settings, problem, plan = federation.settings, federation.problem, federation.plan
    assert plan.central is not None
    train, may = settings.train, set(charged)
    cohort = [k for k in draw_cohort(problem.randomness, t, plan.central) if k in may]
    tasks = tuple(plan.assignment(k, t, learning_rate(train, t)) for k in cohort)
    # The parties clip nothing: what they carry as a rule's state is a C that is never reached.
    loose = {"C": torch.full((1,), torch.inf, device=problem.device)}
    request = RoundRequest(t, train.rounds, snapshot.params, tasks, (loose,) * len(tasks), train.weight_decay)
    updates = list(federation.engine.run(request)) if tasks else []

    planned = {plan.events(k, t) for k in charged}
    sigma = planned_sigma(planned)
    reply = average(problem, plan.central, snapshot.rule, updates, t, train.rounds, sigma)
    for events in planned:
        _check_events(reply, events)

    released = released_of(reply, plan.central, sigma, t, train.rounds)
    update = problem.rule.apply(reply.state, released)
    change, server = SERVERS[train.server].step(update, snapshot.server, train)
    params = snapshot.params + change
    after = dataclasses.replace(
        snapshot,
        round=t + 1,
        params=params,
        averaged=moving_average(snapshot.averaged, params, train.ema, t),
        server=server,
        rule=problem.rule.adapt(reply.state, released),
    )
    return after, [reply], tuple(reply.state["C"].tolist())


def planned_sigma(planned: Iterable[Sequence[Event]]) -> float:
    """The multiplier of the server's one noise (unit client): the largest of what the parties were planned for."""
    return max(event.sigma if isinstance(event, Gaussian) else 0.0 for events in planned for event in events)


def aggregate_noise(tasks: Sequence[Assignment], noises: Sequence[float], weights: torch.Tensor) -> float:
    """Noise in one coordinate of the aggregate, in units of eta N C; see `Released`. Steps add in squares.

    noises: that of one step of each client's mean gradient, in units of C.
    """
    shares: list[float] = weights.tolist()
    each = [w * noise * math.sqrt(t.steps) for t, noise, w in zip(tasks, noises, shares, strict=True)]
    return math.hypot(*each) / sum(w * t.steps for t, w in zip(tasks, shares, strict=True))


def _skip(settings: Settings, snapshot: Snapshot, t: int) -> Snapshot:
    """Nobody took part: the model stands still, and nothing is paid."""
    averaged = moving_average(snapshot.averaged, snapshot.params, settings.train.ema, t)
    return dataclasses.replace(snapshot, round=t + 1, averaged=averaged)


def _client_states(
    problem: Problem,
    snapshot: Snapshot,
    replies: Sequence[ClientReply],
    released: Released,
    tasks: Sequence[Assignment],
    noises: Sequence[float],
) -> dict[int, State]:
    """Each client's own rule state after the round, moved by its own release where the rule moves a round."""
    states = dict(snapshot.clients)
    for reply, task, noise in zip(replies, tasks, noises, strict=True):
        own = dataclasses.replace(
            released,
            aggregate=reply.delta,
            extra=reply.extra,
            steps=float(task.steps),
            asked=float(task.asked(released.round)),
            noise=noise / math.sqrt(task.steps),
        )
        states[reply.client] = problem.rule.adapt(reply.state, own) if problem.rule.when == "round" else reply.state
    return states


def _check_events(reply: ClientReply, planned: Sequence[Event]) -> None:
    """What was released must be what was reserved; anything else is a defect that must not go on."""
    if _tally(reply.events) != _tally(planned):
        who = "the server" if reply.client == SERVER else f"party {reply.client}"
        raise BudgetError(f"{who} released {reply.events}, but {tuple(planned)} was reserved: the run stops here.")


def _tally(events: Sequence[Event]) -> dict[Event, int]:
    """How often each kind of event happened."""
    counts: dict[Event, int] = {}
    for event in events:
        kind = dataclasses.replace(event, count=1)
        counts[kind] = counts.get(kind, 0) + event.count
    return counts


def digests(
    plan: Plan, replies: Sequence[ClientReply], paid: Sequence[int], weights: str = "examples"
) -> dict[str, str]:
    """What each payer's ledger names as released: its own reply, or for all of them the server's mean (unit client)
    or the sum that is all the server sees (shared noise)."""
    if plan.central:
        return dict.fromkeys(map(plan.name, paid), digest(replies[0]))
    if plan.shared and replies:
        delta, extra = weighted_mean(replies, client_weights([plan.units(reply.client) for reply in replies], weights))
        whole = dataclasses.replace(replies[0], client=SERVER, delta=delta, extra=extra)
        return dict.fromkeys(map(plan.name, paid), digest(whole))
    return {plan.name(reply.client): digest(reply) for reply in replies}


def digest(reply: ClientReply) -> str:
    """A short fingerprint of what left the client, for the ledger."""
    h = hashlib.blake2b(digest_size=16)
    for tensor in (reply.delta, reply.extra):
        h.update(tensor.detach().cpu().numpy().tobytes())
    return h.hexdigest()


def mean_diagnostics(replies: Sequence[ClientReply]) -> dict[str, float]:
    """Non-private diagnostics, averaged over the clients. Empty unless `run.diagnostics` is on."""
    names = replies[0].diagnostics if replies else ()
    return {name: sum(reply.diagnostics[name] for reply in replies) / len(replies) for name in names}


class Purse:
    """What each party has spent in this run, kept up to date at the cost of those who took part."""

    def __init__(self, plan: Plan, delta: float, accountant: str) -> None:
        self.plan, self.delta, self.accountant = plan, delta, accountant
        self.largest = 0.0
        # Parties with the same past share one Spend, and its epsilon is computed once.
        self._pasts: list[tuple[Spend, float]] = [(Spend.none(), 0.0)]
        self._past_of: dict[int, int] = {}
        self._next: dict[tuple[int, tuple[Event, ...]], int] = {}

    def pay(self, t: int, clients: Sequence[int]) -> None:
        """Add round t's events for the clients that took part."""
        for k in clients:
            past, events = self._past_of.get(k, 0), self.plan.events(k, t)
            if (past, events) not in self._next:
                spend = self._pasts[past][0].plus(events)
                self._pasts.append((spend, spend.epsilon(self.delta, self.accountant)))
                self._next[past, events] = len(self._pasts) - 1
            self._past_of[k] = self._next[past, events]
            self.largest = max(self.largest, self._pasts[self._past_of[k]][1])

    def listed(self) -> tuple[float, ...]:
        """Every party's epsilon so far; empty in a federation too large to list each round (`EPSILONS`)."""
        if self.plan.parties > EPSILONS:
            return ()
        return tuple(self._pasts[self._past_of.get(k, 0)][1] for k in range(self.plan.parties))
