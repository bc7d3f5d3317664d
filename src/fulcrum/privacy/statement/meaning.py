"""What an epsilon means, in sentences: for `fulcrum plan`, `fulcrum account`, the statement and the report.

Every number comes from `fulcrum.privacy.meaning`. The sentences name the unit, the relation (took part, or contributed
nothing) and who the attacker is, and say where they do not hold.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fulcrum.privacy.accounting import Spend, format_epsilon
from fulcrum.privacy.meaning import (
    FALSE_ALARMS,
    PRIORS,
    Promise,
    bound_correct_guesses,
    bound_posterior,
    bound_true_positives,
    format_share,
    list_roc_points,
    make_promise,
)
from fulcrum.privacy.plan import Plan
from fulcrum.privacy.statement.coverage import UNKNOWN, Coverage, CoveredRun

UNIT_WORDS = {
    "example": "one example",
    "person": "one person",
    "client": "one whole party",
}
"""By privacy unit: what took part, or contributed nothing."""
WATCHERS = {
    "plain": "a server that sees every update",
    "client": "whoever sees all models, not who joined",
    "ideal-secagg": "a server that sees sums only (assumed)",
    "pairwise": "a server and {colluders} colluding parties",
}
"""The attacker by aggregation, or by unit client: what follows "against". The statement has it at length."""
CALCULATOR = "whoever sees every noised sum"
"""The attacker of `fulcrum account`, which knows of no federation."""
WORTH_SENTENCES = {
    "yes": "",
    "simulation": (
        "SIMULATION: this does NOT hold here. The random numbers follow from a seed, and whoever knows or guesses it "
        "can subtract the noise."
    ),
    "assumed": (
        "ASSUMED: this does NOT hold here. Nothing hides single updates from the server; the secure aggregation is "
        "simulated."
    ),
    UNKNOWN: "NOT KNOWN: whether this holds is not on record for every run of the ledger.",
    "nominal": "NOMINAL: this does NOT hold. The rule sets C from private values, and what leaves may tell more.",
    "none": "NOT PRIVATE: nothing bounds what an attacker learns. Values leave without noise.",
}
"""By the statement's `guarantee`: why the sentences do not hold; "" where they do."""
SOURCES = {
    "epsilon": "Computed from (epsilon, delta) alone.",
    "pld": "Computed from the accountant's curve of all (epsilon, delta) of the releases (PLD).",
}
SHOWN_COLUMNS = 80


def find_watcher(unit: str, aggregation: str = "plain", colluders: int = 0) -> str:
    """The attacker, as it follows "against"."""
    return WATCHERS["client" if unit == "client" else aggregation].format(colluders=colluders)


def describe_meaning(promise: Promise, watcher: str, unit: str, worth: str = "yes") -> list[str]:
    """Sentences: beliefs, tests and guesses, and whether they hold. worth: as the statement's `guarantee`."""
    if worth == "none" or not promise.is_finite:
        return [WORTH_SENTENCES["none"]]
    beliefs, tests = (
        _join(format_share(bound(promise, at)) for at in given)
        for bound, given in ((bound_posterior, PRIORS), (bound_true_positives, FALSE_ALARMS))
    )
    unless = f" (but for a chance of {promise.exception:.3g})" if promise.exception else ""
    found = (
        f"Did {UNIT_WORDS.get(unit, 'one unit')} take part, or add nothing? Against {watcher}: "
        f"{_join(map(format_share, PRIORS))} sure before, at most {beliefs} sure after{unless}. A test finds at most "
        f"{tests} at {_join(map(format_share, FALSE_ALARMS))} false positives; at most "
        f"{format_share(bound_correct_guesses(promise))} of guesses are right (chance: 50%)."
    )
    return [found, WORTH_SENTENCES[worth]] if WORTH_SENTENCES.get(worth) else [found]


def wrap_meaning(sentences: Sequence[str], title: str = "in words", width: int = SHOWN_COLUMNS) -> list[str]:
    """The sentences as a block of lines of at most `width` columns, each sentence from a new line on."""
    first, *rest = sentences
    more = [textwrap.wrap(f"  {each}", width, subsequent_indent="  ") for each in rest]
    return sum(more, textwrap.wrap(f"{title}  {first}", width, subsequent_indent="  "))


def make_meaning(promise: Promise, watcher: str, unit: str, worth: str) -> dict[str, Any]:
    """The value of `meaning` in privacy.json: {holds, attacker, source, text, beliefs, tests, guess, roc}.

    beliefs: [{prior, posterior}], with `exception`, the probability of the cases that they leave out; tests:
    [{false_positives, true_positives}]; guess: how often a guess between two equally likely worlds is right; roc:
    [[false positives, true positives]], corners of a line that no attacker's ROC curve rises above.
    """
    text = describe_meaning(promise, watcher, unit, worth)
    if worth == "none" or not promise.is_finite:
        return {"holds": False, "text": text}
    return {
        "holds": worth == "yes",
        "attacker": watcher,
        "source": promise.source,
        "text": text,
        "exception": promise.exception,
        "beliefs": [{"prior": prior, "posterior": bound_posterior(promise, prior)} for prior in PRIORS],
        "tests": [
            {"false_positives": rate, "true_positives": bound_true_positives(promise, rate)} for rate in FALSE_ALARMS
        ],
        "guess": bound_correct_guesses(promise),
        "roc": [list(point) for point in list_roc_points(promise)],
    }


def make_planned_promise(plan: Plan) -> Promise:
    """What the plan promises if it is carried out: the costliest party's."""
    end = max(next(iter(each.values())) for each in plan.ends)
    fresh = all(not group.spent.releases for group in plan.groups)  # else runs add up, and there is one pair alone
    spends = [Spend.empty().add_events(group.worst(plan.rounds)) for group in plan.groups] if fresh else []
    return make_promise(end, plan.delta, spends)


def describe_plan_meaning(plan: Plan, randomness: str) -> dict[str, Any]:
    """`make_meaning` of a plan. randomness: "secure", "seeded" or "recorded"."""
    run = CoveredRun(
        "plan",
        sound=plan.sound,
        private=plan.private,
        randomness=randomness,
        arithmetic="fast",
        simulation=randomness != "secure",
    )
    worth = Coverage((run,)).level(plan.shares_noise)
    watcher = find_watcher(plan.unit, plan.aggregation, plan.colluders)
    return make_meaning(make_planned_promise(plan), watcher, plan.unit, worth)


def write_meaning(facts: Mapping[str, Any]) -> list[str]:
    """The lines of PRIVACY.md on what its epsilon means, without a heading."""
    told = facts["meaning"]
    if "beliefs" not in told:
        return [*told["text"], ""]
    factor = math.exp(min(float(facts["epsilon"]), 700.0))
    times = format_epsilon(factor, 3) if factor < 1e6 else f"{1.05 * factor:.1e}"
    what = UNIT_WORDS.get(facts["unit"], "one unit")
    rows = [
        *(
            (f"{format_share(each['prior'])} sure beforehand", each["posterior"], "sure afterwards")
            for each in told["beliefs"]
        ),
        *(
            (
                f"test with {format_share(each['false_positives'])} false positives",
                each["true_positives"],
                "of members found",
            )
            for each in told["tests"]
        ),
        ("guess, right by chance 50% of the time", told["guess"], "right"),
    ]
    unless = f", but for a probability of {told['exception']:.3g}" if told["exception"] else ""
    notes = [
        *told["text"][1:],
        f"In one world {what} took part; in the other it contributed nothing. Nothing that the attacker sees is more "
        f"than {times} times as likely in one world as in the other (e to the power of epsilon), up to delta.",
        f"The table has what the best possible attacker can reach. Beliefs hold{unless}. {SOURCES[told['source']]}",
    ]
    table = [f"| {given} | at most {format_share(bound)} {then} |" for given, bound, then in rows]
    return [*(line for each in notes for line in (each, "")), "| attacker | |", "|---|---|", *table, ""]


def _join(words: Iterable[str]) -> str:
    return ", ".join(words)
