"""A party's own privacy statement, over all runs of its ledger."""

from __future__ import annotations

from typing import Any

import fulcrum
from fulcrum.data import Dataset
from fulcrum.flower.terms import PartyTerms, find_allowed_rule, terms_to_settings
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.plan import make_plan
from fulcrum.privacy.statement import AccountedRun, make_statement
from fulcrum.runs import folder as record


def make_party_statement(
    terms: PartyTerms, dataset: Dataset, units: int, ledger: Ledger, *, simulation: bool, finished: bool
) -> dict[str, Any]:
    """The contents of privacy.json for the party that agreed to the terms; units: its number of units n_k."""
    settings = terms_to_settings(terms)
    rule = find_allowed_rule(terms, terms.rules[0])
    plan = make_plan(settings, [terms.party], [units], rule, population=dataset.name)
    entries = ledger.entries(terms.party)
    accounted = AccountedRun(
        settings=settings,
        plan=plan,
        rule=rule,
        spent=ledger.get_spends(),
        run_id=entries[-1].run if entries else "none yet",
        scope="ledger",
        randomness_mode="seeded" if simulation else "secure",
        dataset_name=f"{dataset.name} of {terms.party}",
        dataset_warnings=dataset.warnings,
        finished=finished,
        rounds_done=len({(entry.run, entry.round) for entry in entries}),
        version=fulcrum.__version__,
        date=record.current_utc_time(),
    )
    content = make_statement(accounted)
    content["parties"][0]["budget"] = terms.budget
    return content
