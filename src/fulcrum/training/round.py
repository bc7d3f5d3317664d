"""One round: train the participants, aggregate, step the server, move C."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence

import torch

from fulcrum.errors import BudgetError
from fulcrum.privacy.client_level import SERVER
from fulcrum.privacy.events import Event, Gaussian
from fulcrum.privacy.plan import Plan
from fulcrum.settings.derived import learning_rate
from fulcrum.settings.schema import Settings
from fulcrum.training.client_level import average, draw_cohort, released_of
from fulcrum.training.engine import Remote
from fulcrum.training.federation import Federation
from fulcrum.training.problem import Problem
from fulcrum.training.server import SERVERS, client_weights, moving_average, weighted_mean
from fulcrum.training.snapshot import Snapshot
from fulcrum.types import Assignment, ClientReply, Released, RoundRequest, State


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
        kind = event.with_count(1)
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
