"""One round: train the participants, aggregate, step the server, adapt C."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fulcrum.clipping import ClipRule
from fulcrum.errors import BudgetError
from fulcrum.privacy.client_level import SERVER_CLIENT_ID
from fulcrum.privacy.events import Event, Gaussian
from fulcrum.privacy.pairwise.integers import sum_messages
from fulcrum.privacy.plan import Plan
from fulcrum.settings.derived import compute_learning_rate
from fulcrum.settings.schema import Train
from fulcrum.training.client_level import average_client_updates, draw_cohort, make_server_release
from fulcrum.training.combine import COMBINERS
from fulcrum.training.federation import Federation
from fulcrum.training.pairwise import add_message_terms, combine_messages
from fulcrum.training.problem import TrainingProblem
from fulcrum.training.server import (
    SERVERS,
    average_replies,
    combine_replies,
    compute_client_weights,
    compute_exact_weights,
    update_moving_average,
)
from fulcrum.training.snapshot import Snapshot
from fulcrum.types import Assignment, ClientReply, Released, RoundRequest, RuleState

PlayedRound = tuple[Snapshot, list[ClientReply], tuple[float, ...]]
"""After a round: the snapshot, the replies, and the C that the round used (one per group)."""
EventTuple = tuple[Event, ...]


def run_round(
    federation: Federation,
    snapshot: Snapshot,
    clients: Sequence[int],
    t: int,
    events: Mapping[int, EventTuple] | None = None,
    attempt: int = 0,
    pay_again: Callable[[Sequence[int]], set[int]] | None = None,
) -> PlayedRound:
    """Compute one round: train the clients, average, step the server, adapt C.

    events: the planned release of each client (`plan_round_events`); computed here where not given. attempt: number of
    times that this round was released before. pay_again: see `RoundRequest`.
    """
    settings, problem, plan = federation.settings, federation.problem, federation.plan
    lr = compute_learning_rate(settings.train, t)
    own = problem.rule.where == "client"
    states = tuple(snapshot.clients.get(k, snapshot.rule) if own else snapshot.rule for k in clients)
    C = tuple(torch.stack([state["C"] for state in states or (snapshot.rule,)]).mean(dim=0).tolist())
    if not clients:
        return advance_snapshot(federation, snapshot, t), [], C
    if plan.shares_noise and (len(clients) < plan.parties or federation.engine.remote):
        raise BudgetError(
            f"{len(clients)} of {plan.parties} parties take part in round {t + 1}, but they share one noise "
            "(privacy.aggregation): all of them must, on this machine."
        )

    events = plan_round_events(plan, clients, t) if events is None else events
    tasks = plan.assignments(clients, t, lr)
    if plan.is_pairwise:
        units = [plan.units(k) for k in clients]
        tasks = add_message_terms(
            tasks, units, compute_exact_weights(units, settings.train.weights).tolist(), problem.rule, snapshot.rule
        )
    request = RoundRequest(
        t,
        settings.train.rounds,
        snapshot.params,
        tasks,
        states,
        settings.train.weight_decay,
        attempt,
        plan.colluders,
        pay_again,
    )
    replies = list(federation.engine.run(request))
    if federation.engine.remote:  # a client that did not reply in time did not take part
        answered = {reply.client for reply in replies}
        tasks = tuple(task for task in tasks if task.client in answered)
        if not tasks:
            return advance_snapshot(federation, snapshot, t), [], C
    for reply, task in zip(replies, tasks, strict=True):
        _check_released_events(reply, events[task.client])

    clients = [task.client for task in tasks]
    weights = compute_client_weights([plan.units(k) for k in clients], settings.train.weights)
    if plan.is_pairwise:
        aggregate = combine_messages(replies, snapshot.params, lr, settings.train.weight_decay)
        extra = replies[0].extra
    else:
        aggregate, extra, weights = combine_replies(replies, weights, settings.train)
    steps, asked = (
        float(weights @ torch.tensor([float(count) for count in counts]))
        for counts in ([task.steps for task in tasks], [task.asked(t) for task in tasks])
    )
    noises = plan.compute_round_noises(clients, t)
    noise = compute_aggregate_noise(tasks, noises, weights, settings.train)
    released = Released(aggregate, extra, lr, steps, t, settings.train.rounds, noise, asked)

    participations = snapshot.participations.clone()
    participations[clients] += 1
    after = advance_snapshot(
        federation,
        snapshot,
        t,
        released,
        None if own else snapshot.rule,
        participations=participations,
        clients=_update_client_states(problem, snapshot, replies, released, tasks, noises) if own else {},
    )
    return after, replies, C


def run_client_level_round(
    federation: Federation,
    snapshot: Snapshot,
    clients: Sequence[int],
    t: int,
    events: Mapping[int, EventTuple] | None = None,
    attempt: int = 0,
) -> PlayedRound:
    """`run_round` for unit client: the participants are drawn in secret, and one noised mean is released.

    Each of `clients` has paid, whether drawn or not. A round without participants is noised and released
    like any other. The one reply is the server's.
    """
    settings, problem, plan = federation.settings, federation.problem, federation.plan
    assert plan.central is not None
    train, may = settings.train, set(clients)
    cohort = [k for k in draw_cohort(problem.randomness, t, plan.central, attempt) if k in may]
    tasks = tuple(plan.assignment(k, t, compute_learning_rate(train, t)) for k in cohort)
    # The parties do not clip: the C in their rule state is never reached.
    loose = {"C": torch.full((1,), torch.inf, device=problem.device)}
    request = RoundRequest(t, train.rounds, snapshot.params, tasks, (loose,) * len(tasks), train.weight_decay, attempt)
    updates = list(federation.engine.run(request)) if tasks else []

    events = plan_round_events(plan, clients, t) if events is None else events
    planned = {events[k] for k in clients}
    sigma = find_planned_sigma(planned)
    reply = average_client_updates(problem, plan.central, snapshot.rule, updates, t, train.rounds, sigma, attempt)
    for one in planned:
        _check_released_events(reply, one)

    released = make_server_release(reply, plan.central, sigma, t, train.rounds)
    return advance_snapshot(federation, snapshot, t, released, reply.state), [reply], tuple(reply.state["C"].tolist())


def advance_snapshot(
    federation: Federation,
    snapshot: Snapshot,
    t: int,
    released: Released | None = None,
    rule_state: RuleState | None = None,
    **changes: Any,
) -> Snapshot:
    """The federation after round t (from 0): the server's step, the moving average, the rule's new state.

    released: None without participants; the model then stays the same. rule_state: the state of a server rule, which
    adapts to the release; None where each client has its own state. changes: other fields of the snapshot.
    """
    train, rule = federation.settings.train, federation.problem.rule
    params, server, after = snapshot.params, snapshot.server, snapshot.rule
    course: dict[str, float] = {}
    if released is not None:
        update = released.aggregate if rule_state is None else rule.apply(rule_state, released)
        optimiser, C = SERVERS.find(train.server), (rule_state or snapshot.rule)["C"]
        change, server = optimiser.move(update, server, train, released, C)
        params = params + change
        if rule_state is not None:
            after = rule.adapt(rule_state, dataclasses.replace(released, moved=change))
        course = describe_course(rule, rule_state, released, change)
    averaged = update_moving_average(snapshot.averaged, params, train.ema, t)
    return dataclasses.replace(
        snapshot, round=t + 1, params=params, averaged=averaged, server=server, rule=after, course=course, **changes
    )


def describe_course(
    rule: ClipRule, state: RuleState | None, released: Released, change: torch.Tensor
) -> dict[str, float]:
    """`RoundResult.course`: "update", the length of the released update; "noise", the length expected of the noise in
    it; "move", how far the model moved; and what the rule saw. Numbers that are not finite are left out.

    state: of a server rule before it adapts; None where each client has its own, and only two numbers are known.
    """
    found = {"update": torch.linalg.vector_norm(released.aggregate), "move": torch.linalg.vector_norm(change)}
    if state is not None:
        # Coordinates have equal and independent noise, in units of eta N C (see `Released`).
        full = released.lr * released.steps * torch.linalg.vector_norm(state["C"])
        found["noise"] = full * released.noise * math.sqrt(released.aggregate.numel())
        found |= rule.course(state, released)
    numbers: list[float] = torch.stack([value.double() for value in found.values()]).tolist()  # one wait for a GPU
    return {name: number for name, number in zip(found, numbers, strict=True) if math.isfinite(number)}


def plan_round_events(plan: Plan, clients: Iterable[int], t: int) -> dict[int, EventTuple]:
    """What each client releases if it takes part in round t (from 0); computed once per group of parties."""
    of_group: dict[int, EventTuple] = {}
    found: dict[int, EventTuple] = {}
    for k in clients:
        group = int(plan.group_of[k])
        if group not in of_group:
            of_group[group] = plan.events(k, t)
        found[k] = of_group[group]
    return found


def find_planned_sigma(planned: Iterable[Sequence[Event]]) -> float:
    """The multiplier of the server's noise (unit client): the largest multiplier planned for any party."""
    return max(event.sigma if isinstance(event, Gaussian) else 0.0 for events in planned for event in events)


def compute_aggregate_noise(
    tasks: Sequence[Assignment], noises: Sequence[float], weights: torch.Tensor, train: Train | None = None
) -> float:
    """Noise in one coordinate of the aggregate, in units of eta N C; see `Released`. Steps add in squares.

    noises: per client, the noise of one step's mean gradient, in units of C. train: how updates are combined; None: by
    their mean.
    """
    shares: list[float] = weights.tolist()
    if train is not None and train.combine != "mean":
        scales = [noise * math.sqrt(t.steps) for t, noise in zip(tasks, noises, strict=True)]
        found = COMBINERS.find(train.combine).noise(scales, shares, train.trim)
        return found / sum(w * t.steps for t, w in zip(tasks, shares, strict=True))
    each = [w * noise * math.sqrt(t.steps) for t, noise, w in zip(tasks, noises, shares, strict=True)]
    return math.hypot(*each) / sum(w * t.steps for t, w in zip(tasks, shares, strict=True))


def _update_client_states(
    problem: TrainingProblem,
    snapshot: Snapshot,
    replies: Sequence[ClientReply],
    released: Released,
    tasks: Sequence[Assignment],
    noises: Sequence[float],
) -> dict[int, RuleState]:
    """Each client's own rule state after the round, adapted to its own release if the rule adapts once per round."""
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


def _check_released_events(reply: ClientReply, planned: Sequence[Event]) -> None:
    """Stop the run with BudgetError if the released events differ from the reserved ones: that is a defect."""
    if _count_events(reply.events) != _count_events(planned):
        who = "the server" if reply.client == SERVER_CLIENT_ID else f"party {reply.client}"
        raise BudgetError(f"{who} released {reply.events}, but {tuple(planned)} was reserved: the run stops here.")


def _count_events(events: Sequence[Event]) -> dict[Event, int]:
    """How often each kind of event happened."""
    counts: dict[Event, int] = {}
    for event in events:
        kind = event.with_count(1)
        counts[kind] = counts.get(kind, 0) + event.count
    return counts


def compute_reply_digests(
    plan: Plan, replies: Sequence[ClientReply], paid: Sequence[int], weights: str = "examples"
) -> dict[str, str]:
    """The digest of the release for each party that paid, for its ledger.

    The release is the party's own reply, the server's mean (unit client), or the parties' sum (shared noise)."""
    if plan.central:
        return dict.fromkeys(map(plan.name, paid), compute_reply_digest(replies[0]))
    if plan.is_pairwise and replies:
        total = dataclasses.replace(replies[0], client=SERVER_CLIENT_ID, delta=sum_messages(r.delta for r in replies))
        return dict.fromkeys(map(plan.name, paid), compute_reply_digest(total))
    if plan.shares_noise and replies:
        delta, extra = average_replies(
            replies, compute_client_weights([plan.units(reply.client) for reply in replies], weights)
        )
        whole = dataclasses.replace(replies[0], client=SERVER_CLIENT_ID, delta=delta, extra=extra)
        return dict.fromkeys(map(plan.name, paid), compute_reply_digest(whole))
    return {plan.name(reply.client): compute_reply_digest(reply) for reply in replies}


def compute_reply_digest(reply: ClientReply) -> str:
    """A short fingerprint of the client's release, for the ledger."""
    h = hashlib.blake2b(digest_size=16)
    for tensor in (reply.delta, reply.extra):
        h.update(tensor.detach().cpu().numpy().tobytes())
    return h.hexdigest()


def average_diagnostics(replies: Sequence[ClientReply]) -> dict[str, float]:
    """Non-private diagnostics, averaged over the clients. Empty unless `run.diagnostics` is on."""
    names = replies[0].diagnostics if replies else ()
    return {name: sum(reply.diagnostics[name] for reply in replies) / len(replies) for name in names}
