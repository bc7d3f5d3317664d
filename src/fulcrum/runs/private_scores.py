"""A finished model scored on a party's own private records, apart from the run: one noised, paid release per party.

Across machines a hospital keeps some of its units out of training (`fulcrum party --hold-out`), scores the finished
model on them here, with its own ledger and its own noise, and hands over the file; whoever has the files of all parties
adds them up. Nothing but the noised sums of `privacy.scores` leaves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fulcrum.data import Dataset, from_arrays
from fulcrum.data.fingerprints import (
    KEY_MARK,
    add_record_digests,
    compute_keyed_fingerprint,
    compute_unit_digests,
    name_record_key,
)
from fulcrum.data.held_out import hold_out_units
from fulcrum.data.records import select_rows
from fulcrum.errors import BudgetError, ConfigError, DataError, RunError
from fulcrum.models.build import is_built_in
from fulcrum.privacy.accounting import check_accounting_terms, format_epsilon
from fulcrum.privacy.evaluation import HELD_OUT_NAME, EvaluationPlan, calibrate_evaluation, release_sums, sum_over_units
from fulcrum.privacy.ledger import Ledger, LedgerAccount, RunPlan, RunRecord
from fulcrum.rng import SecureRandomness
from fulcrum.runs import folder as record
from fulcrum.runs.afterwards import BATCH, check_shapes, choose_task
from fulcrum.runs.stored_model import TrainedModel
from fulcrum.training.evaluate import summarise_releases
from fulcrum.training.held_out import find_score_form, list_held_out_accounts

SCORES_FORMAT = 1
"""Version of the files."""


def release_private_scores(
    trained: TrainedModel,
    dataset: Dataset,
    party: str,
    ledger: Path,
    fraction: float,
    epsilon: float,
    delta: float,
    accountant: str = "pld",
) -> dict[str, Any]:
    """Score a model on the units of a party's records that the keyed hash holds out; pays before anything is computed.

    dataset: the party's own records, with the run's task. fraction: as in training (`--hold-out`): the same units stay
    out. Returns what may leave: the noised sums, public terms, and the metrics that follow from them.
    """
    check_accounting_terms(delta, accountant)
    data = add_record_digests(dataclasses.replace(dataset, public=False))
    part = hold_out_units(data, fraction, 0)
    held = part.held_out
    assert held is not None
    unit = "person" if held.person is not None else "example"
    (account,) = list_held_out_accounts(part, dataclasses.replace(held, party=None), unit)
    name, run = f"{party}/{HELD_OUT_NAME}", uuid.uuid4().hex
    plan = EvaluationPlan(
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        sigma=calibrate_evaluation(epsilon, delta, accountant, 1),
        releases=1,
        form=find_score_form(part),
        accounts=(account,),
    )
    with Ledger.open(ledger) as opened:
        _reserve(opened, name, run, plan, unit, dataclasses.replace(part, train=held))
        measured = []
        for rows in torch.arange(len(held)).split(BATCH):
            measured.append(plan.form.measure(trained.outputs(select_rows(held.x, rows)), held.y[rows]))
        exact = sum_over_units(torch.cat(measured), account.unit_of, account.units)
        noised = release_sums(exact, plan.sigma, SecureRandomness(run), 0, 0, 0)
        digest = hashlib.blake2b(noised.contiguous().numpy().tobytes(), digest_size=16).hexdigest()
        opened.settle(run, 0, {name: digest})
    made: dict[str, Any] = {
        "format": SCORES_FORMAT,
        "party": party,
        "model": trained.sha256,
        "task": part.task.name,
        "unit": unit,
        "units": account.units,
        "epsilon": epsilon,
        "delta": delta,
        "sigma": plan.sigma,
        "sums": noised.tolist(),
        "note": plan.note,
    }
    return {**made, **merge_private_scores(trained, part, [made])}


def _reserve(ledger: Ledger, name: str, run: str, plan: EvaluationPlan, unit: str, held: Dataset) -> None:
    """Enroll the held-out units' account, register the run and reserve its one release."""
    ledger.bring_to_current_format()
    population = f"{held.name}, {KEY_MARK}{name_record_key()}"
    account = LedgerAccount(name, plan.epsilon, plan.delta, plan.accountant, unit, population)
    if name not in ledger.accounts():
        ledger.enroll_parties([account])
    digests = compute_unit_digests(held, torch.arange(len(held.y)), unit)
    if ledger.find_known_units(name, digests).elsewhere:
        raise ConfigError(
            f"some of the units that would be scored are on record in {ledger.path} under another name, so they were "
            "trained on; give --hold-out the fraction that the party kept out of training."
        )
    known = RunRecord(
        id=run,
        rule="scores",
        sound=True,
        private=True,
        randomness="secure",
        arithmetic="proven",
        aggregation="plain",
        unit=unit,
        seed_digest="",
        data_digest=compute_keyed_fingerprint(held),
        settings_digest=hashlib.blake2b(repr(plan.planned).encode(), digest_size=16).hexdigest(),
        simulation=False,
    )
    whole = RunPlan((plan.planned,), plan.delta)
    if not ledger.fits(name, run, whole):
        raise BudgetError(
            f"the budget of {name} in {ledger.path} does not allow epsilon {format_epsilon(plan.epsilon)} more; "
            "raise it: fulcrum "
            f"ledger {ledger.path} --party {name} --budget EPSILON"
        )
    ledger.register_units(run, name, digests)
    ledger.register_run(known, {name: whole})
    if not ledger.reserve(run, 0, {name: (plan.event,)})[name]:
        raise BudgetError(f"the budget of {name} in {ledger.path} is spent.")


def read_scores(trained: TrainedModel, files: Sequence[Path]) -> list[dict[str, Any]]:
    """The parties' files; DataError where one is not readable or is of another model."""
    found: list[dict[str, Any]] = []
    for file in files:
        try:
            made = json.loads(file.read_text())
            complete = made["format"] == SCORES_FORMAT and all(isinstance(value, float) for value in made["sums"])
            complete = complete and isinstance(made["party"], str) and int(made["units"]) > 0
        except (OSError, ValueError, KeyError, TypeError):
            complete = False
        if not complete:
            raise DataError(f"{file} is not a file of scores; fulcrum score --out writes them.")
        if made["model"] != trained.sha256:
            raise RunError(f"{file} holds scores of another model than the one in {trained.folder}.")
        found.append(made)
    if len({made["party"] for made in found}) < len(found):
        raise DataError("two of the files are of the same party; each party is counted once.")
    return found


def fit_records(trained: TrainedModel, dataset: Dataset) -> Dataset:
    """A party's records as the model takes them; DataError where they do not have its shape."""
    fitted = dataset.with_float_inputs() if is_built_in(trained.settings.model) else dataset
    check_shapes(trained, fitted.records.x, fitted.name)
    return fitted


def make_blank_records(trained: TrainedModel) -> Dataset:
    """Two records of zeros with the run's task: to read files of scores without anybody's data."""
    settings, facts = choose_task(trained), trained.facts["task"]
    if trained.task is None or not isinstance(trained.inputs, tuple):
        raise RunError(
            f"the task of {trained.folder} came with its data; add the files up with the party's own records."
        )
    dims = int(trained.task.target_dims)
    y = torch.zeros((2, facts["outputs"]) if dims else (2,), dtype=torch.int64)
    y = y.float() if trained.task.name == "regression" else y
    return from_arrays(torch.zeros(2, *trained.inputs), y, task=settings, name="nobody")


def merge_private_scores(trained: TrainedModel, dataset: Dataset, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Metrics, baselines and confusion, per party and pooled, from the parties' noised sums.

    dataset: any records of the run's task; only its task is looked at.
    """
    form = find_score_form(dataset)
    if any(len(made["sums"]) != form.columns for made in found):
        raise DataError("the files hold scores of another task than the run's.")
    released = {made["party"]: (torch.tensor(made["sums"], dtype=torch.float64), int(made["units"])) for made in found}
    seen = summarise_releases(dataset.task, dataset.task_settings, form, released, named=True)
    made: dict[str, Any] = {
        "metrics": seen.metrics,
        "party_metrics": seen.parties,
        "mean_over_parties": seen.mean_over_parties,
        "score": dataset.task.score,
        "higher_is_better": dataset.task.higher_is_better,
        **record.make_fact_entries(seen.facts),
    }
    return made
