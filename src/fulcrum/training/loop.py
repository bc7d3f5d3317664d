"""The loop over rounds: who takes part, reserve, train, aggregate, adapt C, settle, evaluate.

`federate` is a generator: each round is finished, paid and settled before it is yielded, and a run
can be resumed from the snapshot that is yielded with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from fulcrum.data.declared import refuse_without_ledger
from fulcrum.errors import RunError
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger import Ledger, LedgerAccount, RunPlan
from fulcrum.privacy.plan import Plan, find_affordable_rounds
from fulcrum.rng import SecureRandomness, SeededRandomness, numpy_generator
from fulcrum.settings.derived import get_evaluation_interval
from fulcrum.settings.schema import Settings
from fulcrum.training.evaluate import Evaluation, add_baseline, compute_public_baseline, evaluate_round
from fulcrum.training.federation import Federation
from fulcrum.training.problem import identify_releases
from fulcrum.training.round import (
    average_diagnostics,
    compute_reply_digests,
    plan_round_events,
    run_client_level_round,
    run_round,
)
from fulcrum.training.run_account import RunAccount
from fulcrum.training.snapshot import Snapshot, make_first_snapshot
from fulcrum.training.void_attempts import VoidAttempts, settle_lost_attempt
from fulcrum.types import RoundResult

MAX_PARTIES_WITH_EPSILON = 1000
"""The largest number of parties for which every round lists each party's epsilon."""


def federate(
    federation: Federation,
    ledger: Ledger | None = None,
    run: str = "",
    start: Snapshot | None = None,
) -> Iterator[tuple[RoundResult, Snapshot]]:
    """Train round by round. `start` continues a run whose rounds until then are in the ledger under the name `run`.

    Each round is reserved in the ledger before its computation and settled after it. The ledger alone determines what
    the parties have spent. The run ends early when fewer than `train.min_parties` parties have budget left; where the
    parties share one noise vector, it ends when any party's budget is spent.

    Without a ledger (studies on public data) there are no reservations, no budgets and no epsilons:
    `RoundResult.epsilon` is NaN and `epsilons` is empty. Private data is refused there.
    """
    if ledger is None:
        refuse_without_ledger(federation.problem.dataset)
    settings, problem, plan, engine = federation.settings, federation.problem, federation.plan, federation.engine
    play = run_client_level_round if plan.central else run_round
    check_randomness(federation, run)
    snapshot = start or make_first_snapshot(federation)
    account = RunAccount(ledger, run) if ledger else None
    exhausted: set[int] = set()
    baseline: tuple[dict[str, float], dict[str, dict[str, float]]] | None = None

    for t in range(snapshot.round, settings.train.rounds):
        began = time.perf_counter()
        clients = engine.list_reachable_clients(select_participants(federation, t, snapshot.participations, exhausted))
        exhausted |= engine.spent()
        events = plan_round_events(plan, clients, t)
        attempt = 0
        if ledger:
            # A round that repeats the same bytes costs nothing twice; any other repetition is a new attempt.
            if not engine.replays_rounds(problem.randomness.mode):
                if engine.remote and start is not None and t == start.round:
                    settle_lost_attempt(ledger, run, t, plan)
                attempt = ledger.count_settled_attempts(run, t)
            invited, clients = clients, reserve_round(ledger, run, t, plan, events, attempt)
            exhausted |= set(invited) - set(clients)
            if plan.parties - len(exhausted) < settings.train.min_parties:
                return
            if plan.shares_noise and len(clients) < plan.parties:
                return  # without this party's noise share the sum of the others would not be private
            if plan.is_pairwise and plan.parties - len(exhausted) <= plan.colluders:
                return  # those who are left might all collude, but for one whose sum would stand alone
            if plan.is_pairwise and len(clients) <= plan.colluders:
                clients = []

        if ledger and plan.is_pairwise and engine.remote:
            void = VoidAttempts(ledger, run, t, plan, {k: events[k] for k in clients})
            snapshot, replies, C = run_round(federation, snapshot, clients, t, events, attempt, void.pay_again)
            exhausted |= void.refused
            clients = [k for k in clients if k not in void.refused]
        else:
            snapshot, replies, C = play(federation, snapshot, clients, t, events, attempt)
        took_part = clients if plan.central else [reply.client for reply in replies]
        if ledger:
            ledger.settle(run, t, compute_reply_digests(plan, replies, clients, settings.train.weights))
        found = Evaluation({})
        if is_evaluation_round(settings, t):
            found = evaluate_round(federation, snapshot.averaged, t, ledger, run, attempt)
            if federation.evaluation is None:  # public test records have the same baseline in every round
                baseline = compute_public_baseline(problem) if baseline is None else baseline
                found = add_baseline(found, *baseline)
        if account:  # after the evaluation, which held-out private records pay for
            account.read_rounds_until(t + 1)
        yield (
            RoundResult(
                round=t + 1,
                rounds=settings.train.rounds,
                params=snapshot.params,
                averaged=snapshot.averaged,
                C=C,
                epsilon=account.largest if account else math.nan,
                epsilons=account.epsilons(plan) if account and plan.parties <= MAX_PARTIES_WITH_EPSILON else (),
                participants=None if plan.central else tuple(took_part),
                seconds=time.perf_counter() - began,
                metrics=found.metrics,
                party_metrics=found.parties,
                evaluation=found.note,
                facts=found.facts,
                course=snapshot.course,
                diagnostics=average_diagnostics(replies),
                out_of_budget=tuple(sorted(exhausted)) if plan.central else (),
            ),
            snapshot,
        )


def check_randomness(federation: Federation, run: str) -> None:
    """Raise RunError where the noise of this run would be that of another one.

    Secure randomness serves one run. Both kinds are bound to the settings, records and weights with which the
    federation was prepared; a federation in which they were replaced since would repeat noise at other settings.
    """
    problem = federation.problem
    source = problem.randomness
    if isinstance(source, SecureRandomness) and run:
        source.claim(run)
    if isinstance(source, SeededRandomness | SecureRandomness) and source.run:
        parts = (problem.dataset, problem.partition, problem.model, problem.layout)
        if source.run != identify_releases(federation.settings, *parts):
            raise RunError(
                "the federation's settings, records or weights were replaced after prepare, and its noise is bound to "
                "the former ones; prepare it again."
            )


def select_participants(
    federation: Federation, t: int, counts: Sequence[int] | torch.Tensor, excluded: Collection[int] = ()
) -> list[int]:
    """The parties that may take part in round t (from 0): invited by the public coin, below their cap, not excluded.

    counts [K]: the rounds each party took part in so far. At unit client all parties may take part, since the server
    draws the participants in secret. With pairwise masks nobody takes part where all participants might collude.
    """
    settings, plan = federation.settings, federation.plan
    asked = range(plan.parties) if plan.central else draw_invited_parties(settings, plan.parties, t)
    able = [k for k in asked if k not in excluded and int(counts[k]) < plan.participations(k)]
    return able if len(able) > plan.colluders or not plan.is_pairwise else []


def is_evaluation_round(settings: Settings, t: int) -> bool:
    """Whether the model is evaluated after round t (from 0): every `run.evaluate_every` rounds, and after the last."""
    return (t + 1) % get_evaluation_interval(settings) == 0 or t + 1 == settings.train.rounds


def draw_invited_parties(settings: Settings, parties: int, t: int) -> list[int]:
    """Draw the parties invited to round t, each with probability q_c. The coin is public: it amplifies nothing."""
    if settings.train.participation >= 1:
        return list(range(parties))
    # The gaps between invited parties are geometric, so the draws grow with the invited parties only.
    stream, chance = numpy_generator(settings.run.seed, "participation", t), settings.train.participation
    chosen: list[int] = []
    last = -1
    while last < parties:
        places = last + stream.geometric(chance, size=int(1.1 * chance * parties) + 20).cumsum()
        chosen += places[places < parties].tolist()
        last = int(places[-1])
    return chosen


def reserve_round(
    ledger: Ledger, run: str, t: int, plan: Plan, events: Mapping[int, tuple[Event, ...]], attempt: int
) -> list[int]:
    """Reserve the round's cost for every invited party; returns the parties whose budget allows it.

    events: what each invited party would release. attempt: 0 for a round that is released once, or repeats the same
    bytes (its outcome was lost in a crash); a round that was settled before and has new randomness is paid again.
    """
    ledger.enroll_parties(LedgerAccount(plan.name(k), **plan.terms(k)) for k in events)
    register_party_plans(ledger, run, plan, events)
    granted = ledger.reserve(run, t, {plan.name(k): planned for k, planned in events.items()}, attempt=attempt)
    return [k for k in events if granted[plan.name(k)]]


def register_party_plans(ledger: Ledger, run: str, plan: Plan, clients: Iterable[int]) -> None:
    """Register what these parties will release in this run at most, where that is not done: before a first release.

    The plan follows from the settings alone. Where it exceeds what is left of a party's account, the rounds that fit
    are planned, so that the party takes part until they are used up.
    """
    numbers = {plan.name(k): k for k in clients}
    known = ledger.list_planned_parties(run, numbers)
    plans: dict[str, RunPlan] = {}
    full: dict[str, RunPlan] = {}
    of_group: dict[int, RunPlan] = {}
    for party, k in numbers.items():
        if party in known:
            continue
        group = int(plan.group_of[k])
        if group not in of_group:
            of_group[group] = plan.make_run_plan(k)
        plans[party] = of_group[group]
        if plan.accountant != "rdp" and not ledger.fits(party, run, plans[party]):
            full[party] = plans[party]
            plans[party] = plan.make_run_plan(k, find_affordable_rounds(plan, k, ledger, run, party))
    chosen = {party: each for party, each in plans.items() if each.events}
    # Where nobody has room for one round, the refusal of the whole plan says why.
    ledger.register_plans(run, chosen if chosen or known else full)
