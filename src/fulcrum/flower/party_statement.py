"""A party's own privacy statement, over all runs of its ledger."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import fulcrum
from fulcrum.clipping import RULES
from fulcrum.data import Dataset
from fulcrum.flower.terms import PartyTerms, find_allowed_rule, terms_to_settings
from fulcrum.privacy.ledger import Ledger, RunRecord
from fulcrum.privacy.plan import make_plan
from fulcrum.privacy.plan.text import infinity_to_text
from fulcrum.privacy.statement import AccountedRun, make_statement
from fulcrum.privacy.statement.text import PROPOSED_REHEARSAL_TEXT
from fulcrum.runs import folder as record
from fulcrum.runs.active_run import describe_covered_run
from fulcrum.training.problem import uses_proven_arithmetic


def make_party_statement(
    terms: PartyTerms, dataset: Dataset, units: int, ledger: Ledger, *, simulation: bool, finished: bool
) -> dict[str, Any]:
    """The contents of privacy.json for the party that agreed to the terms; units: its number of units n_k."""
    runs, entries = ledger.runs(), ledger.entries(terms.party)
    latest = entries[-1].run if entries else "none yet"
    # The run that was last: its rule, randomness and arithmetic are on record. Those of the others are covered too.
    last = runs.get(latest, RunRecord.unknown(latest))
    name = last.rule if last.rule in terms.rules or last.rule in RULES else terms.rules[0]
    rule = RULES[name] if name in RULES else find_allowed_rule(terms, name)
    settings = terms_to_settings(terms, name, simulation)
    plan = make_plan(settings, [terms.party], [units], rule, population=dataset.name)
    if terms.aggregation == "pairwise":
        plan = dataclasses.replace(
            plan, aggregation="pairwise", colluders=terms.colluders, peers=max(len(terms.peers), terms.colluders)
        )
    keys = [
        {"party": name, "fingerprint": pin, "pinned": terms.pinned or "no date"} for name, pin in terms.peers.items()
    ]
    known = last.is_known
    rounds = Counter(run for run, _ in {(entry.run, entry.round) for entry in entries})
    alone = {run: ledger.epsilon(terms.party, run) for run in rounds}
    accounted = AccountedRun(
        settings=settings,
        plan=plan,
        rule=rule,
        spent=ledger.get_spends(),
        costs=ledger.epsilons(),
        run_id=latest,
        scope="ledger",
        randomness_mode=last.randomness if known else "seeded" if simulation else "secure",
        dataset_name=f"{dataset.name} of {terms.party}",
        dataset_warnings=dataset.warnings,
        finished=finished,
        rounds_done=rounds[latest],
        rounds_in_scope=rounds.total(),
        run_costs={terms.party: alone.get(latest, 0.0)},
        per_run={run: {"rounds": rounds[run], "epsilon": infinity_to_text(alone[run])} for run in rounds},
        version=fulcrum.__version__,
        date=record.current_utc_time(),
        arithmetic=last.arithmetic if known else "proven" if uses_proven_arithmetic(settings) else "fast",
        simulation=simulation,
        others=tuple(map(describe_covered_run, runs.values())),
        peer_keys=tuple(keys),
        across_machines=True,
        composition=ledger.describe_composition(terms.party) if entries else "",
    )
    content = make_statement(accounted)
    if terms.rehearsed:
        content["rehearsal"] = PROPOSED_REHEARSAL_TEXT
    content["parties"][0]["budget"] = terms.budget
    content["total"] = {"runs": len(rounds), "rounds": rounds.total(), "budget": terms.budget}
    return content
