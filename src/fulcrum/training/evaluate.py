"""The task's metrics: on public test records in the clear, on private held-out records as a noised, paid release.

Never called on training records. Without a budget for it, private held-out records are not scored at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fulcrum.data.records import Records, move_inputs_to_device, select_rows
from fulcrum.data.tasks import Task, merge_metric_sums
from fulcrum.privacy.evaluation import HELD_OUT_NAME, EvaluationPlan, HeldOutAccount, release_sums, sum_over_units
from fulcrum.privacy.ledger import Ledger, LedgerAccount, RunPlan
from fulcrum.privacy.scores import THRESHOLD_METRICS, ClassCells, ScoreForm, choose_threshold
from fulcrum.settings.schema import TaskSettings
from fulcrum.training.federation import Federation
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import ScoreFacts, mean_over_parties

EVALUATION_BATCH_SIZES = {"cpu": 250, "cuda": 2000}
"""Examples per batch; on a CPU few enough to fit the cache."""
MAX_CONFUSION_CLASSES = 100
"""Of more classes no confusion is counted."""
CONFUSION, THRESHOLDS = "\0confusion", "\0thresholds"
"""Names of further sums beside those of the metrics; no metric can have them."""
THRESHOLD_STEPS = 100
"""Thresholds that are tried on public records: every hundredth."""

MetricValues = dict[str, float]
MetricSums = dict[str, Tensor]


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name on all test records (empty without test records), and per party where test records name one.

    note: how the records were scored where they are private. facts: a baseline and the confusion.
    """

    metrics: MetricValues
    parties: dict[str, MetricValues] = field(default_factory=dict)
    note: str = ""
    facts: ScoreFacts = field(default_factory=ScoreFacts)

    @property
    def mean_over_parties(self) -> MetricValues:
        """Each metric's mean over the parties with equal weights; parties without a value (NaN) are left out."""
        return mean_over_parties(self.parties)


def evaluate_model(problem: TrainingProblem, params: Tensor, batch: int = 0) -> MetricValues:
    """The task's metrics, by name, of the model with weights `params` [d]; empty where there are no test records."""
    return evaluate_with_parties(problem, params, batch).metrics


def find_test_records(problem: TrainingProblem) -> Records | None:
    """The public test records, without parties' names where the records were split anew; None where there are none."""
    test, names = problem.dataset.test, problem.dataset.party_names
    if test is None or not len(test):
        return None
    train = problem.dataset.train
    if train is not None and train.party is not None and problem.partition.names != names:
        return dataclasses.replace(test, party=None)  # the file's parties do not train here
    return test


@torch.no_grad()
def evaluate_with_parties(
    problem: TrainingProblem, params: Tensor, batch: int = 0, confusion: bool = False
) -> Evaluation:
    """Both in one pass over the test records, `batch` records at a time (0: chosen by device)."""
    test = find_test_records(problem)
    if test is None:
        return Evaluation({})
    step = batch or EVALUATION_BATCH_SIZES.get(params.device.type, EVALUATION_BATCH_SIZES["cuda"])

    def find_outputs(rows: slice | Tensor) -> Tensor:
        inputs = move_inputs_to_device(select_rows(test.x, rows), params.device)
        return problem.gradient_recorder.outputs(params, inputs)

    counter = make_fact_counter(problem) if confusion else None
    pooled, parties = _sum_by_party(problem, test, step, find_outputs, params.device, counter)
    metrics = {name: results for name, (results, _) in parties.items()}
    facts = ScoreFacts(
        confusion=read_confusion(pooled),
        party_confusion={name: found for name, (_, found) in parties.items() if found},
        threshold=read_threshold(problem, pooled),
    )
    return Evaluation(problem.dataset.task.results(pooled), metrics, facts=facts)


@torch.no_grad()
def compute_public_baseline(problem: TrainingProblem) -> tuple[MetricValues, dict[str, MetricValues]]:
    """Metrics of the best constant prediction on the test records: pooled, and on each party's with its own constant.

    Empty where there are no test records, or the task knows no constant prediction.
    """
    test, task = find_test_records(problem), problem.dataset.task
    if test is None or task.constant is None:
        return {}, {}
    pooled = _score_constant(problem, test)
    if test.party is None:
        return pooled, {}
    names = problem.dataset.party_names
    return pooled, {
        names[k]: _score_constant(problem, test.take(test.party == k)) for k in torch.unique(test.party).tolist()
    }


def add_baseline(found: Evaluation, pooled: MetricValues, parties: dict[str, MetricValues]) -> Evaluation:
    """The evaluation with a baseline beside its metrics."""
    facts = dataclasses.replace(found.facts, baseline=pooled, party_baselines=parties)
    return dataclasses.replace(found, facts=facts)


def _score_constant(problem: TrainingProblem, test: Records) -> MetricValues:
    """Metrics of the best constant prediction on these records."""
    task = problem.dataset.task
    assert task.constant is not None
    constant = task.constant(test.y, torch.ones(len(test)))
    shape = (*test.y.shape[1:], len(constant)) if task.sequence else constant.shape

    def find_outputs(rows: slice | Tensor) -> Tensor:
        return constant.expand(len(test.y[rows]), *shape)

    plain = dataclasses.replace(test, party=None)
    step = EVALUATION_BATCH_SIZES["cuda"]
    pooled, _ = _sum_by_party(problem, plain, step, find_outputs, torch.device("cpu"), None)
    return task.results(pooled)


OutputsOfRows = Callable[[slice | Tensor], Tensor]
FactCounter = Callable[[Tensor, Tensor], MetricSums]
Confusion = list[list[float]]


def _sum_by_party(
    problem: TrainingProblem,
    test: Records,
    step: int,
    find_outputs: OutputsOfRows,
    device: torch.device,
    counter: FactCounter | None,
) -> tuple[MetricSums, dict[str, tuple[MetricValues, Confusion]]]:
    """The sums of all metrics over all records; (metrics, confusion) of each party's records, by its name."""
    task, names = problem.dataset.task, problem.dataset.party_names
    pooled: MetricSums | None = None
    of_party: MetricSums | None = None
    current, parties = -1, {}

    def finish() -> None:
        if of_party is not None:
            parties[names[current]] = task.results(of_party), read_confusion(of_party)

    for party, sums in _iterate_party_sums(task, test, step, find_outputs, device, counter):
        if party != current:
            finish()
            of_party = None
        current = party
        pooled = merge_metric_sums(pooled, sums)
        if party >= 0:  # one party's sums at a time, because the sums of a ranking metric are long
            of_party = merge_metric_sums(of_party, sums)
    finish()
    return pooled or {}, parties


def _iterate_party_sums(
    task: Task,
    test: Records,
    step: int,
    find_outputs: OutputsOfRows,
    device: torch.device,
    counter: FactCounter | None,
) -> Iterator[tuple[int, MetricSums]]:
    """(party, sums) in pieces of at most `step` records, party by party; party -1 where records name no party."""
    order = None if test.party is None else torch.argsort(test.party, stable=True)

    def sum_piece(outputs: Tensor, targets: Tensor) -> MetricSums:
        return {**task.sums(outputs, targets), **(counter(outputs, targets) if counter else {})}

    for start in range(0, len(test), step):
        rows = slice(start, start + step) if order is None else order[start : start + step]
        outputs, targets = find_outputs(rows), test.y[rows].to(device)
        if test.party is None:
            yield -1, sum_piece(outputs, targets)
            continue
        members, counts = torch.unique_consecutive(test.party[rows], return_counts=True)
        own = zip(outputs.split(counts.tolist()), targets.split(counts.tolist()), strict=True)
        for party, piece in zip(members.tolist(), own, strict=True):
            yield party, sum_piece(*piece)


# --- confusion and thresholds on public records ---------------------------------------------------


def make_fact_counter(problem: TrainingProblem) -> FactCounter:
    """A function of outputs and targets -> counts that merge like a metric's sums: confusion, and per threshold."""
    task, wanted = problem.dataset.task, get_task_settings(problem).choose_threshold

    def count(outputs: Tensor, targets: Tensor) -> MetricSums:
        found: MetricSums = {}
        if task.name == "multilabel":
            pairs = 2 * targets.long() + task.predict(outputs)
            found[CONFUSION] = torch.stack([(pairs == k).sum(dim=0) for k in range(4)], dim=-1).double()
        elif 0 < task.classes <= MAX_CONFUSION_CLASSES and not task.target_dims and not task.sequence:
            places = targets.long() * task.classes + task.predict(outputs).long()
            table = torch.bincount(places, minlength=task.classes**2).double()
            found[CONFUSION] = table.view(task.classes, task.classes)
        if wanted in THRESHOLD_METRICS and task.name == "binary":
            place = (torch.sigmoid(outputs[:, 0].double()) * THRESHOLD_STEPS).long().clamp(0, THRESHOLD_STEPS - 1)
            table = torch.bincount(targets.long() * THRESHOLD_STEPS + place, minlength=2 * THRESHOLD_STEPS)
            found[THRESHOLDS] = table.double().view(2, THRESHOLD_STEPS)
        return found

    return count


def get_task_settings(problem: TrainingProblem) -> TaskSettings:
    """The settings that the problem's task was made with."""
    return problem.dataset.task_settings or TaskSettings()


def read_confusion(sums: Mapping[str, Tensor]) -> Confusion:
    """The counts as rows; empty where none were counted."""
    return sums[CONFUSION].tolist() if CONFUSION in sums else []


def read_threshold(problem: TrainingProblem, sums: Mapping[str, Tensor]) -> dict[str, float | str]:
    """The best threshold on public records; empty where none is asked for."""
    wanted = get_task_settings(problem).choose_threshold
    if wanted not in THRESHOLD_METRICS or THRESHOLDS not in sums:
        return {}
    table = sums[THRESHOLDS].cpu()
    below = table.cumsum(dim=-1)
    tables = [
        ((k + 1) / THRESHOLD_STEPS, torch.stack([below[:, k], table.sum(dim=-1) - below[:, k]], dim=-1))
        for k in range(THRESHOLD_STEPS - 1)
    ]
    return describe_threshold(*choose_threshold(tables, wanted), wanted)


def describe_threshold(value: float, best: float, metric: str) -> dict[str, float | str]:
    """A chosen threshold for summaries: its value, the metric that it is best for, and that metric there."""
    return {"value": value, "for": metric, metric: best}


# --- private held-out records ---------------------------------------------------------------------


@torch.no_grad()
def evaluate_round(
    federation: Federation, params: Tensor, t: int, ledger: Ledger | None = None, run: str = "", attempt: int = 0
) -> Evaluation:
    """The metrics after round t (from 0): in the clear on public records, noised and paid on private held-out ones.

    The held-out units' accounts reserve the release before anything is scored; an account without budget is left out.
    """
    problem, plan = federation.problem, federation.evaluation
    if plan is None or problem.dataset.held_out is None:
        return evaluate_with_parties(problem, params, confusion=True)
    paying = {account.name for account in plan.accounts}
    if ledger is not None:
        paying = reserve_evaluation(federation, plan, ledger, run, t, attempt)
    released: dict[str, tuple[Tensor, int]] = {}
    for account in plan.accounts:
        if account.name in paying:
            exact = sum_over_units(_measure_records(problem, params, plan, account), account.unit_of, account.units)
            noised = release_sums(exact, plan.sigma, problem.randomness, t, account.party, attempt)
            released[account.name] = noised, account.units
    if not released:
        first = plan.accounts[0].name
        raised = f"fulcrum ledger {ledger.path if ledger else 'LEDGER'} --party {first} --budget EPSILON"
        return Evaluation({}, note=f"The held-out units' budget is spent, so nothing was scored; raise it: {raised}")
    if ledger is not None:
        ledger.settle(run, t, {name: _digest(noised) for name, (noised, _) in released.items()})
    named = problem.dataset.held_out.party is not None
    by_party = {name.removesuffix(f"/{HELD_OUT_NAME}"): each for name, each in released.items()}
    return summarise_releases(problem.task, problem.dataset.task_settings, plan.form, by_party, named, plan.note)


def summarise_releases(
    task: Task,
    settings: TaskSettings | None,
    form: ScoreForm,
    released: Mapping[str, tuple[Tensor, int]],
    named: bool,
    note: str = "",
) -> Evaluation:
    """Metrics, baselines and confusion from noised sums and public numbers of units alone, by party and together.

    released: (noised sums [columns], units) by account. named: whether the accounts are those of parties; else there is
    one for all.
    """
    units = sum(count for _, count in released.values())
    whole = torch.stack([noised for noised, _ in released.values()]).sum(dim=0)
    parties = released if named else {}
    wanted = (settings or TaskSettings()).choose_threshold
    chosen: dict[str, float | str] = {}
    if wanted in THRESHOLD_METRICS and isinstance(form, ClassCells) and form.binary:
        chosen = describe_threshold(*choose_threshold(form.tabulate_thresholds(whole, units), wanted), wanted)
    facts = ScoreFacts(
        baseline=form.estimate_baseline(task, whole, units),
        party_baselines={name: form.estimate_baseline(task, *each) for name, each in parties.items()},
        confusion=form.count_confusion(whole, units),
        party_confusion={name: found for name, each in parties.items() if (found := form.count_confusion(*each))},
        threshold=chosen,
    )
    metrics = {name: form.estimate(task, *each) for name, each in parties.items()}
    return Evaluation(form.estimate(task, whole, units), metrics, note, facts)


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


def _measure_records(problem: TrainingProblem, params: Tensor, plan: EvaluationPlan, account: HeldOutAccount) -> Tensor:
    """The bounded scores of an account's records [m, columns]; nothing but their noised sums may leave from here."""
    held = problem.dataset.held_out
    assert held is not None
    step = EVALUATION_BATCH_SIZES.get(params.device.type, EVALUATION_BATCH_SIZES["cuda"])
    found = []
    for rows in account.rows.split(step):
        inputs = move_inputs_to_device(select_rows(held.x, rows), params.device)
        outputs = problem.gradient_recorder.outputs(params, inputs)
        found.append(plan.form.measure(outputs, held.y[rows].to(params.device)).cpu())
    return torch.cat(found)


def _digest(noised: Tensor) -> str:
    """A short fingerprint of a release, for the ledger."""
    return hashlib.blake2b(noised.contiguous().numpy().tobytes(), digest_size=16).hexdigest()
