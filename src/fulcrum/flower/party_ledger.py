"""A party's own ledger: its account, and what each run is, said before the run's first release.

Nothing here comes from a coordinator but the run's id and the rule's name, which the terms allow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import torch

from fulcrum.data import Dataset
from fulcrum.data.fingerprints import KEY_MARK, compute_keyed_fingerprint, compute_unit_digests, name_record_key
from fulcrum.errors import BudgetError, ConfigError
from fulcrum.flower.party_data import population_fingerprint
from fulcrum.flower.party_training import PartyRunFacts
from fulcrum.flower.refusals import TermsRefusal
from fulcrum.flower.terms import PartyTerms
from fulcrum.privacy.ledger import KnownUnits, Ledger, RunPlan, RunRecord, make_seed_digest
from fulcrum.privacy.ledger.rows import MASKED_SUMS
from fulcrum.training.problem import TrainingProblem


def enroll_party(ledger: Ledger, terms: PartyTerms, dataset: Dataset) -> None:
    """Open the party's account, or find it again.

    Raises ConfigError where the records' key is another one than before: everybody would then seem to be new, with a
    budget of their own.
    """
    known = ledger.accounts().get(terms.party)
    population = f"{dataset.name}, {KEY_MARK}{name_record_key()}"
    if terms.aggregation == "pairwise":  # against another adversary: an account of its own
        population += MASKED_SUMS.format(terms.colluders)
    if known is not None and KEY_MARK not in known.population:
        # Of an earlier version, which stored the records' hash without a key; the account stays as it is.
        former = f"{dataset.name}, {population_fingerprint(dataset)}"
        population = former if known.population == former else population
    elif known is not None and known.population.partition(KEY_MARK)[2].partition(",")[0] != name_record_key():
        raise ConfigError(
            f"the key by which ledger {ledger.path} knows the records again is another one now; bring its file back "
            "(FULCRUM_KEY_FILE), since without it everybody would seem to be new and have a full budget."
        )
    ledger.enroll(
        terms.party,
        budget=terms.budget,
        delta=terms.delta,
        accountant=terms.accountant,
        unit=terms.unit,
        population=population,
    )
    if ledger.accounts()[terms.party].budget != terms.budget:
        ledger.change_budget(terms.party, terms.budget)


def register_party_run(
    ledger: Ledger, terms: PartyTerms, dataset: Dataset, facts: PartyRunFacts, problem: TrainingProblem
) -> KnownUnits:
    """Say in the ledger what a run is, the most that it will release, and whose records it uses.

    The same again changes nothing.

    Returns how many of the units the ledger knew before. Refuses a run's id that stands for another run, and a
    simulation whose seed another run had.
    """
    ledger.bring_to_current_format()  # its identity salts the seed's digest
    private = dataclasses.replace(dataset, public=False)  # a party's records are, whatever their source says
    unit = "person" if dataset.person is not None else "example"
    digests = compute_unit_digests(private, torch.arange(len(dataset.y)), unit)
    seed = None if facts.streams is None else facts.streams.seed
    record = RunRecord(
        id=facts.run,
        rule=facts.rule,
        sound=problem.rule.sound,
        private=problem.rule.private,
        randomness="secure" if seed is None else "seeded",
        arithmetic="proven" if problem.proven else "fast",
        aggregation=terms.aggregation,
        unit=terms.unit,
        seed_digest=make_seed_digest(seed, ledger.identity),
        data_digest=compute_keyed_fingerprint(private),
        settings_digest=_digest_terms(terms),
        simulation=seed is not None,
    )
    runs = ledger.runs()
    before = runs.get(facts.run)
    if before is not None and before != record:
        raise TermsRefusal("run")
    if seed is not None and any(
        each.seed_digest == record.seed_digest for name, each in runs.items() if name != facts.run
    ):
        raise TermsRefusal("seen-seed")
    known = ledger.find_known_units(terms.party, digests)
    try:
        ledger.register_units(facts.run, terms.party, digests)
        ledger.register_run(record, {terms.party: make_run_plan(terms)})
    except BudgetError as error:
        raise TermsRefusal("data" if known.elsewhere else "budget", str(error)) from error
    except ConfigError as error:
        raise TermsRefusal("run", str(error)) from error
    return known


def make_run_plan(terms: PartyTerms) -> RunPlan:
    """The most that one run releases, fixed with the terms."""
    return RunPlan(terms.planned_events, terms.run_delta or terms.delta)


LEFT_OUT_TERMS = ("party", "budget", "delta", "run_delta", "accountant", "coordinator", "peers", "pinned")
"""Terms that decide no release: they say what the account allows, and whose requests count."""


MASK_TERMS = ("aggregation", "colluders")
"""Terms newer than stored digests; without masks they are left out."""


def _digest_terms(terms: PartyTerms) -> str:
    """A digest of the terms that decide what a run releases."""
    table: dict[str, Any] = {
        name: value
        for name, value in dataclasses.asdict(terms).items()
        if name not in LEFT_OUT_TERMS and not (name in MASK_TERMS and terms.aggregation == "plain")
    }
    return hashlib.blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=16).hexdigest()
