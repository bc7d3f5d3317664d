"""The task's metrics: on public test records in the clear, on private held-out records as a noised, paid release.

Never called on training records. Without a budget for it, private held-out records are not scored at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fulcrum.data import Dataset
from fulcrum.data.records import Records, move_inputs_to_device, select_rows
from fulcrum.data.tasks import merge_metric_sums
from fulcrum.errors import ConfigError
from fulcrum.privacy.evaluation import (
    HELD_OUT_NAME,
    EvaluationPlan,
    HeldOutAccount,
    calibrate_evaluation,
    count_units_in_cells,
    estimate_metrics,
    make_score_cells,
    release_histogram,
)
from fulcrum.privacy.ledger import Ledger, LedgerAccount, RunPlan
from fulcrum.settings.derived import count_evaluations
from fulcrum.settings.schema import Settings, TaskSettings
from fulcrum.training.federation import Federation
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import mean_over_parties

EVALUATION_BATCH_SIZES = {"cpu": 250, "cuda": 2000}
"""Examples per batch; on a CPU few enough to fit the cache."""

MetricValues = dict[str, float]
MetricSums = dict[str, Tensor]


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name on all test records (empty without test records), and per party where test records name one.

    note: how the records were scored where they are private.
    """

    metrics: MetricValues
    parties: dict[str, MetricValues] = field(default_factory=dict)
    note: str = ""

    @property
    def mean_over_parties(self) -> MetricValues:
        """Each metric's mean over the parties with equal weights; parties without a value (NaN) are left out."""
        return mean_over_parties(self.parties)


def evaluate_model(problem: TrainingProblem, params: Tensor, batch: int = 0) -> MetricValues:
    """The task's metrics, by name, of the model with weights `params` [d]; empty where there are no test records."""
    return evaluate_with_parties(problem, params, batch).metrics


@torch.no_grad()
def evaluate_with_parties(problem: TrainingProblem, params: Tensor, batch: int = 0) -> Evaluation:
    """Both in one pass over the test records, `batch` records at a time (0: chosen by device)."""
    test, task, names = problem.dataset.test, problem.dataset.task, problem.dataset.party_names
    if test is None or not len(test):
        return Evaluation({})
    if (
        problem.dataset.train is not None
        and problem.dataset.train.party is not None
        and problem.partition.names != names
    ):
        test = dataclasses.replace(
            test, party=None
        )  # the records were split anew: the file's parties do not train here
    step = batch or EVALUATION_BATCH_SIZES.get(params.device.type, EVALUATION_BATCH_SIZES["cuda"])
    pooled: MetricSums | None = None
    of_party: MetricSums | None = None
    current, parties = -1, {}
    for party, sums in _iterate_party_sums(problem, params, test, step):
        if party != current and of_party is not None:
            parties[names[current]] = task.results(of_party)
            of_party = None
        current = party
        pooled = merge_metric_sums(pooled, sums)
        if party >= 0:  # one party's sums at a time, because the sums of a ranking metric are long
            of_party = merge_metric_sums(of_party, sums)
    if of_party is not None:
        parties[names[current]] = task.results(of_party)
    return Evaluation(task.results(pooled or {}), parties)


def _iterate_party_sums(
    problem: TrainingProblem, params: Tensor, test: Records, step: int
) -> Iterator[tuple[int, MetricSums]]:
    """(party, sums) in pieces of at most `step` records, party by party; party -1 where records name no party."""
    task, device = problem.dataset.task, params.device
    order = None if test.party is None else torch.argsort(test.party, stable=True)
    for start in range(0, len(test), step):
        rows = slice(start, start + step) if order is None else order[start : start + step]
        outputs = problem.gradient_recorder.outputs(params, move_inputs_to_device(select_rows(test.x, rows), device))
        targets = test.y[rows].to(device)
        if test.party is None:
            yield -1, task.sums(outputs, targets)
            continue
        members, counts = torch.unique_consecutive(test.party[rows], return_counts=True)
        own = zip(outputs.split(counts.tolist()), targets.split(counts.tolist()), strict=True)
        for party, piece in zip(members.tolist(), own, strict=True):
            yield party, task.sums(*piece)


# --- private held-out records ---------------------------------------------------------------------


def check_private_evaluation(settings: Settings, dataset: Dataset) -> None:
    """Raise ConfigError unless the settings say how scores of private held-out records are paid."""
    if settings.privacy.unit == "client":
        raise ConfigError(
            "data.validation with privacy.unit = 'client' would score a party's held-out records, and no noise here "
            "hides a whole party's; hand over x_test and y_test that everybody may see."
        )
    if settings.privacy.evaluation_epsilon is None:
        raise ConfigError(
            f"data.validation = {settings.data.validation:g} holds out private records of {dataset.name}, and scoring "
            "them is a release: set privacy.evaluation_epsilon, or hand over x_test and y_test that everybody may see."
        )
    make_score_cells(dataset.task, get_threshold(dataset))


def plan_evaluation(settings: Settings, dataset: Dataset) -> EvaluationPlan | None:
    """How private held-out records will be scored; None where there are none."""
    held, epsilon = dataset.held_out, settings.privacy.evaluation_epsilon
    if held is None or epsilon is None:
        return None
    releases, terms = count_evaluations(settings), settings.privacy
    return EvaluationPlan(
        epsilon=epsilon,
        delta=terms.delta,
        accountant=terms.accountant,
        sigma=calibrate_evaluation(epsilon, terms.delta, terms.accountant, releases),
        releases=releases,
        cells=make_score_cells(dataset.task, get_threshold(dataset)),
        accounts=list_held_out_accounts(dataset, held, terms.unit),
    )


def get_threshold(dataset: Dataset) -> float:
    """The probability at which a record counts as positive."""
    return (dataset.task_settings or TaskSettings()).threshold


def list_held_out_accounts(dataset: Dataset, held: Records, unit: str) -> tuple[HeldOutAccount, ...]:
    """One account per named party, or one for all: whose records they are pays for their scores."""
    parties = [(0, HELD_OUT_NAME, torch.arange(len(held)))]
    if held.party is not None:
        parties = [
            (k, f"{name}/{HELD_OUT_NAME}", torch.nonzero(held.party == k).flatten())
            for k, name in enumerate(dataset.party_names)
        ]
    found = []
    for k, name, rows in parties:
        if not len(rows):
            continue
        if unit == "person" and held.person is not None:
            persons, unit_of = torch.unique(held.person[rows], return_inverse=True)
            found.append(HeldOutAccount(name, k, rows, unit_of, len(persons)))
        else:
            found.append(HeldOutAccount(name, k, rows, torch.arange(len(rows)), len(rows)))
    return tuple(found)


@torch.no_grad()
def evaluate_round(
    federation: Federation, params: Tensor, t: int, ledger: Ledger | None = None, run: str = "", attempt: int = 0
) -> Evaluation:
    """The metrics after round t (from 0): in the clear on public records, noised and paid on private held-out ones.

    The held-out units' accounts reserve the release before anything is scored; an account without budget is left out.
    """
    problem, plan = federation.problem, federation.evaluation
    if plan is None or problem.dataset.held_out is None:
        return evaluate_with_parties(problem, params)
    paying = {account.name for account in plan.accounts}
    if ledger is not None:
        paying = reserve_evaluation(federation, plan, ledger, run, t, attempt)
    released: dict[str, Tensor] = {}
    for account in plan.accounts:
        if account.name in paying:
            places = _locate_records(problem, params, plan, account)
            exact = count_units_in_cells(plan.cells, places, account.unit_of, account.units)
            released[account.name] = release_histogram(exact, plan.sigma, problem.randomness, t, account.party, attempt)
    if not released:
        first = plan.accounts[0].name
        raised = f"fulcrum ledger {ledger.path if ledger else 'LEDGER'} --party {first} --budget EPSILON"
        return Evaluation({}, note=f"The held-out units' budget is spent, so nothing was scored; raise it: {raised}")
    if ledger is not None:
        ledger.settle(run, t, {name: _digest(noised) for name, noised in released.items()})
    metrics = estimate_metrics(problem.task, plan.cells, torch.stack(list(released.values())).sum(dim=0))
    named = problem.dataset.held_out.party is not None
    parties = {
        name.removesuffix(f"/{HELD_OUT_NAME}"): estimate_metrics(problem.task, plan.cells, noised)
        for name, noised in released.items()
    }
    return Evaluation(metrics, parties if named else {}, plan.note)


def reserve_evaluation(
    federation: Federation, plan: EvaluationPlan, ledger: Ledger, run: str, t: int, attempt: int
) -> set[str]:
    """Reserve the evaluation after round t for every held-out account; returns those whose budget allows it.

    The plan of all evaluations is registered before the first one.
    """
    terms = federation.plan
    ledger.enroll_parties(
        LedgerAccount(
            name=account.name,
            budget=plan.epsilon,
            delta=plan.delta if terms.account_delta is None else terms.account_delta,
            accountant=plan.accountant,
            unit=terms.unit,
            population=f"{terms.population}, {account.units} {terms.unit}s",
        )
        for account in plan.accounts
    )
    names = [account.name for account in plan.accounts]
    known = ledger.list_planned_parties(run, names)
    whole = RunPlan((plan.planned,), plan.delta)
    new = [name for name in names if name not in known and ledger.fits(name, run, whole)]
    ledger.register_plans(run, dict.fromkeys(new, whole))
    able = [name for name in names if name in known or name in new]
    granted = ledger.reserve(run, t, dict.fromkeys(able, (plan.event,)), attempt=attempt)
    return {name for name in able if granted[name]}


def _locate_records(problem: TrainingProblem, params: Tensor, plan: EvaluationPlan, account: HeldOutAccount) -> Tensor:
    """The cell of each of an account's records [m]; nothing but the noised histogram may leave from it."""
    held = problem.dataset.held_out
    assert held is not None
    step = EVALUATION_BATCH_SIZES.get(params.device.type, EVALUATION_BATCH_SIZES["cuda"])
    found = []
    for rows in account.rows.split(step):
        inputs = move_inputs_to_device(select_rows(held.x, rows), params.device)
        outputs = problem.gradient_recorder.outputs(params, inputs)
        found.append(plan.cells.locate(outputs, held.y[rows].to(params.device)).cpu())
    return torch.cat(found)


def _digest(noised: Tensor) -> str:
    """A short fingerprint of a release, for the ledger."""
    return hashlib.blake2b(noised.contiguous().numpy().tobytes(), digest_size=16).hexdigest()
