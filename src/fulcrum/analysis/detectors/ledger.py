"""Ledger replay: what the ledger must hold, computed again from what left the parties."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fulcrum.analysis.detectors.executed import Executed, Sent
from fulcrum.analysis.detectors.findings import Reading, contradict
from fulcrum.analysis.detectors.second_opinion import Paid, price, price_at_least
from fulcrum.privacy.accounting import compute_epsilon
from fulcrum.privacy.evaluation import is_held_out_account
from fulcrum.privacy.events import Event, Gaussian
from fulcrum.privacy.ledger import Ledger, LedgerEntry

NAME = "ledger replay"


def count_events(events: Sequence[Event]) -> Paid:
    """Events as counts."""
    found: Paid = Counter()
    for event in events:
        if isinstance(event, Gaussian):
            found[event.rate, event.sigma] += event.count
    return found


def expect_events(run: Executed, sent: Sent) -> Paid:
    """What a reply costs, from the task that was carried out: each step once, those with statistics at sigma."""
    task, rule = sent.task, run.federation.problem.rule
    batch = task.rate * run.federation.problem.party(task.client).units
    asked = sum((sent.round * task.steps + step) % task.statistics_interval == 0 for step in range(task.steps))
    plain = task.sigma / math.sqrt(1 - rule.share(task.sigma, batch))
    found: Paid = Counter()
    found[task.rate, task.sigma] += asked
    found[task.rate, plain] += task.steps - asked
    return +found


def read_ledger(run: Executed) -> Iterator[Reading]:
    """All readings of a run's ledger."""
    with Ledger.open(run.folder / "ledger.sqlite") as ledger:
        entries = {name: ledger.entries(name) for name in ledger.accounts()}
        epsilons = ledger.epsilons(run.facts["run"]["id"])
    plan = run.federation.plan
    yield contradict(
        NAME, "the run itself", bool(run.refused), f"the run noticed it by itself and stopped: {run.refused}"
    )
    for k in range(plan.parties):
        name = plan.name(k)
        own = entries.get(name, [])
        expected = list_expected_rounds(run, k)
        yield from read_account(name, own, expected)
        if not plan.central and plan.aggregation == "plain":
            yield read_digests(name, own, [each for each in run.sent if each.task.client == k])
        total = sum((count for _, count in expected), Counter())
        # What is on record must be worth at least what was released; another accountant says how much that is.
        least = price(total, plan.delta) if plan.private else 0.0
        said = epsilons.get(name, 0.0)
        if plan.accountant != "rdp":
            least = price_at_least(total, plan.delta) if plan.private else 0.0
        yield contradict(
            NAME,
            "epsilon of an account",
            said < 0.999 * least - 1e-4,
            f"the ledger says epsilon = {said:.4g}, and what was released costs {least:.4g}",
            name,
        )
        yield from read_shown(run, k, price_at_least(total, plan.delta) if plan.private else 0.0)
    yield from read_evaluations(run, entries)
    yield from read_plan(run)


def read_shown(run: Executed, client: int, least: float) -> Iterator[Reading]:
    """Whether the epsilons of other accountants, which the statement shows beside, are possible.

    least: a lower bound on the epsilon of what a client released, whatever the accountant.
    """
    name = run.federation.plan.name(client)
    row: dict[str, Any] = next((row for row in run.facts["parties"] if row["name"] == name), {})
    for key, shown in row.items():
        if key.startswith("epsilon_") and isinstance(shown, int | float):
            yield contradict(
                NAME,
                "epsilons shown beside",
                float(shown) < 0.999 * least - 1e-4,
                f"the statement shows {key} = {float(shown):.4g}, and no accountant can go below {least:.4g}",
                name,
            )


def list_expected_rounds(run: Executed, client: int) -> list[tuple[int, Paid]]:
    """(round, cost) of each thing that left a client, or that the server released of it; a repetition counts once."""
    plan = run.federation.plan
    if plan.central:
        rounds = dict.fromkeys(result.round - 1 for result in run.results)
        return [(t, count_events(plan.events(client, t))) for t in rounds]
    found: dict[tuple[int, str], Paid] = {}
    for each in run.sent:
        if each.task.client == client:
            found[each.round, each.digest] = expect_events(run, each)
    return [(round, cost) for (round, _), cost in found.items()]


def read_account(name: str, entries: Sequence[LedgerEntry], expected: Sequence[tuple[int, Paid]]) -> Iterator[Reading]:
    """Whether every round's releases are on record at what they cost."""
    paid: dict[int, Paid] = {}
    for entry in entries:
        paid.setdefault(entry.round, Counter()).update(count_events(entry.events))
    due: dict[int, Paid] = {}
    for round, cost in expected:
        due.setdefault(round, Counter()).update(cost)
    missing = [round + 1 for round in due if round not in paid]
    yield contradict(
        NAME,
        "rounds on record",
        bool(missing),
        f"round {missing[0] if missing else 0} was released, and the ledger has no entry for it",
        name,
    )
    short = [round for round in due if round in paid and not _covers(paid[round], due[round])]
    first = short[0] if short else 0
    yield contradict(
        NAME,
        "cost on record",
        bool(short),
        f"round {first + 1} is on record as {_tell(paid.get(first))}, and {_tell(due.get(first))} was released",
        name,
    )


def _covers(paid: Paid, due: Paid) -> bool:
    """Whether what was paid is at least what is due: as many releases, each at no more noise and no lower rate."""
    left = [pair for pair, count in paid.items() for _ in range(count)]
    for (rate, sigma), count in sorted(due.items()):
        for _ in range(count):
            fits = [pair for pair in left if pair[0] >= rate * (1 - 1e-9) and pair[1] <= sigma * (1 + 1e-9)]
            if not fits:
                return False
            left.remove(max(fits, key=lambda pair: pair[1]))
    return True


def _tell(paid: Paid | None) -> str:
    return ", ".join(f"{n} at rate {q:.4g} and sigma {s:.4g}" for (q, s), n in (paid or {}).items()) or "nothing"


def read_digests(name: str, entries: Sequence[LedgerEntry], sent: Sequence[Sent]) -> Reading:
    """Whether the digests on record are those of what left."""
    known = {(entry.round, entry.digest) for entry in entries}
    lost = [each.round + 1 for each in sent if (each.round, each.digest) not in known]
    return contradict(
        NAME,
        "digests on record",
        bool(lost),
        f"what left in round {lost[0] if lost else 0} is not what the ledger has a digest of",
        name,
    )


def read_evaluations(run: Executed, entries: dict[str, list[LedgerEntry]]) -> Iterator[Reading]:
    """Whether scores of private held-out records are noised, and paid by their own accounts."""
    dataset = run.federation.problem.dataset
    scored = [result for result in run.results if result.metrics]
    if dataset.public or run.federation.settings.data.validation <= 0:
        return
    held_out = {name: own for name, own in entries.items() if is_held_out_account(name)}
    for result in scored:
        paid = [name for name, own in held_out.items() if any(entry.round == result.round - 1 for entry in own)]
        yield contradict(
            NAME,
            "paid evaluations",
            not paid,
            f"held-out private records were scored after round {result.round}, and no account paid for it",
        )
    for result in scored:
        counts = [value for row in result.facts.confusion for value in row]
        whole = bool(counts) and all(abs(value - round(value)) < 1e-9 for value in counts)
        yield contradict(
            NAME,
            "noised evaluations",
            whole,
            f"the counts of private held-out records after round {result.round} are whole numbers: they have no noise",
        )


def read_plan(run: Executed) -> Iterator[Reading]:
    """Whether the planned noise keeps the promise of the settings."""
    plan, privacy = run.federation.plan, run.federation.settings.privacy
    if not plan.private:
        return
    for k in range(plan.parties):
        group = plan.group(k)
        total = sum((count_events(plan.events(k, t)) for t in range(plan.participations(k))), Counter())
        target = privacy.budgets.get(plan.name(k), privacy.epsilon)
        if target is not None:
            cost = (
                price(total, plan.delta)
                if plan.accountant == "rdp"
                else compute_epsilon([Gaussian(q, s, n) for (q, s), n in total.items()], plan.delta, plan.accountant)
            )
            yield contradict(
                NAME,
                "planned epsilon",
                cost > target * 1.001,
                f"the planned releases cost epsilon = {cost:.4g}, and {target:.4g} is promised",
                plan.name(k),
            )
        elif privacy.sigma is not None and privacy.aggregation == "plain":
            yield contradict(
                NAME,
                "planned sigma",
                group.sigma < privacy.sigma * (1 - 1e-9) and plan.schedule == "constant",
                f"the plan's sigma is {group.sigma:.4g}, and {privacy.sigma:.4g} is set",
                plan.name(k),
            )
        if not plan.central:
            done = [each for each in run.sent if each.task.client == k]
            allowed = {(q, s) for t in range(plan.participations(k)) for q, s in count_events(plan.events(k, t))}
            strange = [each for each in done if not set(expect_events(run, each)) <= allowed]
            first = strange[0].task if strange else None
            yield contradict(
                NAME,
                "tasks of the plan",
                bool(strange),
                f"a task has rate {first.rate if first else 0:.4g} and sigma {first.sigma if first else 0:.4g}, which "
                "the plan does not have",
                plan.name(k),
            )
