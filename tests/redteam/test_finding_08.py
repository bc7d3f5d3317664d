"""Finding 8: held-out private records were evaluated in the clear, every round, beside a statement of epsilon 4.

At 243f1c8 `data.validation` replaced the test set by training records, and `evaluate_with_parties` printed their exact
accuracy. Now scoring private records is a release: one noised histogram per evaluation, paid by the held-out units' own
account; without a budget for it the run is refused.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fulcrum.data import Dataset, from_arrays, holdout
from fulcrum.data.fingerprints import select_held_out
from fulcrum.data.held_out import hold_out_units
from fulcrum.data.tasks import Task, make_task
from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import compute_epsilon
from fulcrum.privacy.evaluation import calibrate_evaluation, release_sums, sum_over_units
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.scores import ClassCells, make_score_form
from fulcrum.rng import SeededRandomness
from fulcrum.runs import collect_ledger_warnings, execute, prepare
from fulcrum.settings.schema import Settings, TaskSettings
from fulcrum.training.evaluate import evaluate_round, evaluate_with_parties
from fulcrum.training.loop import federate

EPSILON = 3.0


def settings(**sections: dict[str, Any]) -> Settings:
    base = Settings().replace(
        data={"parties": 2, "min_examples": 2, "validation": 0.3},
        model={"name": "linear"},
        train={"rounds": 4, "rate": 0.5},
        privacy={"sigma": 1.0, "evaluation_epsilon": EPSILON},
        run={"device": "cpu", "evaluate_every": 2},
    )
    return base.replace(**sections)


def patients(n: int = 400, classes: int = 2, **more: Any) -> Dataset:
    rng = np.random.default_rng(0)
    y = np.arange(n) % classes
    x = rng.normal(size=(n, 4)).astype(np.float32) + 2.0 * np.eye(classes, 4, dtype=np.float32)[y]
    return from_arrays(x, y, name="patients", **{"classes": classes, **more})


# --- what a run does ------------------------------------------------------------------------------


def test_private_records_are_scored_only_where_that_is_paid():
    unpaid = {"privacy": {"evaluation_epsilon": None}}
    with pytest.raises(ConfigError, match=r"scoring them is a release: set privacy.evaluation_epsilon"):
        prepare(settings(**unpaid), patients())
    # What 243f1c8 did, still right for public data: exact scores of the held-out records.
    public = prepare(settings(**unpaid), patients(public=True))
    assert public.problem.dataset.test is not None
    assert public.evaluation is None


def test_nothing_in_the_clear_can_reach_the_held_out_records():
    made = prepare(settings(), patients())
    assert made.problem.dataset.test is None
    assert evaluate_with_parties(made.problem, made.problem.layout.flatten(made.problem.model)).metrics == {}


def test_the_held_out_units_pay_from_their_own_account_before_they_are_scored(tmp_path: Path):
    made = prepare(settings(run={"ledger": str(tmp_path / "kept.sqlite")}), patients())
    assert made.evaluation is not None
    result = execute(made)
    with Ledger.open(tmp_path / "kept.sqlite") as ledger:
        account = ledger.accounts()["held-out"]
        spent = ledger.spent("held-out")
        assert ledger.epsilon("held-out") <= EPSILON == account.budget
        assert spent.epsilon(made.plan.delta, "rdp") > 0.9 * EPSILON
        assert [entry.digest is not None for entry in ledger.entries("held-out")] == [True, True]
        assert ledger.entries("held-out")[0].events == (made.evaluation.event,)
    assert 0 <= result.metrics["accuracy"] <= 1
    assert result.summary["evaluated_on"] == "held-out private records, with noise"
    assert any("Scores are noised" in warning for warning in result.summary["warnings"])
    # All of that budget is spent: a second run's held-out records are not scored, and it says so beforehand.
    second = prepare(settings(privacy={"budget": 50.0}, run={"ledger": str(tmp_path / "kept.sqlite")}), patients())
    assert any("so they are not scored; raise it" in warning for warning in collect_ledger_warnings(second))
    again = list(federate(prepare(settings(), patients()), Ledger.open(tmp_path / "kept.sqlite"), "other"))
    assert all(not each.metrics for each, _ in again)
    assert "budget is spent" in again[-1][0].evaluation


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_evaluations_are_a_plan_that_the_ledger_knows_beforehand(accountant: str, tmp_path: Path):
    made = prepare(settings(privacy={"accountant": accountant}), patients())
    with Ledger.open(tmp_path / "kept.sqlite") as ledger:
        for each, _ in federate(made, ledger, "run"):
            assert each.round < 2 or ledger.has_plan("run", "held-out")
        assert 0.9 * EPSILON < ledger.epsilon("held-out") <= EPSILON


def test_each_named_party_scores_its_own_records():
    party = np.array(["north", "south"])[(np.arange(400) // 2) % 2]
    made = prepare(settings(), patients(party=party))
    assert made.evaluation is not None
    assert [account.name for account in made.evaluation.accounts] == ["north/held-out", "south/held-out"]
    result = execute(made)
    assert set(result.party_metrics) == {"north", "south"}


@pytest.mark.parametrize("classes", [2, 3])
def test_the_scores_are_close_where_the_budget_is_large(classes: int):
    made = prepare(settings(privacy={"evaluation_epsilon": 2000.0}), patients(4000, classes))
    problem = made.problem
    assert problem.dataset.held_out is not None
    open_ = dataclasses.replace(problem, dataset=dataclasses.replace(problem.dataset, test=problem.dataset.held_out))
    start = problem.layout.flatten(problem.model)
    for params in (start, 3 * start):  # scores that fill the bins: a histogram cannot rank within one
        exact, noised = evaluate_with_parties(open_, params).metrics, evaluate_round(made, params, 1).metrics
        for name in ("accuracy", "balanced_accuracy", *(("auc",) if classes == 2 else ())):
            assert noised[name] == pytest.approx(exact[name], abs=0.03), name
        assert noised["loss"] == pytest.approx(exact["loss"], rel=0.15)


def test_what_a_histogram_cannot_say_is_refused():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)).astype(np.float32), rng.normal(size=60).astype(np.float32)
    with pytest.raises(ConfigError, match=r"their range is not declared; set task.low and task.high"):
        prepare(settings(), from_arrays(x, y, task="regression"))
    with pytest.raises(ConfigError, match="no noise here hides a whole party"):
        prepare(settings(privacy={"unit": "client", "evaluation_epsilon": 1.0}), patients())
    with pytest.raises(ConfigError, match=r"data.validation = 0 holds none out"):
        prepare(settings(data={"validation": 0.0}), patients())


def test_records_handed_over_apart_count_as_public():
    rng = np.random.default_rng(1)
    data = patients(x_test=rng.normal(size=(50, 4)).astype(np.float32), y_test=np.arange(50) % 2)
    made = prepare(settings(data={"validation": 0.0}, privacy={"evaluation_epsilon": None}), data)
    assert made.problem.dataset.test is not None
    result = execute(made)
    assert result.metrics["accuracy"] * 50 == pytest.approx(round(result.metrics["accuracy"] * 50))


def test_test_records_that_train_are_noticed_and_not_written_down(tmp_path):
    """A test record is public: a statement that says that one trained is an exact test of membership."""
    whole = patients()
    plain = settings(data={"validation": 0.0}, privacy={"evaluation_epsilon": None})
    with pytest.warns(UserWarning, match="also training records"):
        twice = prepare(plain, patients(x_test=whole.x[:1], y_test=whole.y[:1]))
    apart = prepare(plain, patients(x_test=whole.x[:1] + 1, y_test=whole.y[:1]))
    assert twice.problem.dataset.warnings == apart.problem.dataset.warnings
    execute(twice, tmp_path / "run")
    for file in (tmp_path / "run").glob("*.*"):
        assert b"also training records" not in file.read_bytes(), file.name


def test_diagnostics_of_private_records_are_for_simulations():
    """A neighbour: clip fractions and losses of training records, without noise, in metrics.jsonl."""
    plain = settings(data={"validation": 0.0}, privacy={"evaluation_epsilon": None}, run={"diagnostics": True})
    with pytest.raises(ConfigError, match=r"run.diagnostics = true writes down"):
        prepare(plain, patients())
    assert prepare(plain, patients(public=True)).problem.diagnostics
    assert prepare(plain.replace(privacy={"randomness": "seeded"}), patients()).problem.diagnostics


def test_two_seeded_runs_that_differ_in_the_evaluations_share_no_noise():
    seeded = {"randomness": "seeded"}
    words = {
        tuple(prepare(settings(**change), patients()).problem.randomness.normal(("evaluation", 1, 0), 4).tolist())
        for change in (
            {"privacy": seeded | {"evaluation_epsilon": 1.0}},
            {"privacy": seeded | {"evaluation_epsilon": 2.0}},
            {"privacy": seeded | {"evaluation_epsilon": 1.0}, "run": {"evaluate_every": 1}},
        )
    }
    assert len(words) == 3


# --- who is held out ------------------------------------------------------------------------------


def sides(data: Dataset) -> dict[bytes, bool]:
    """Whether each record is held out, by the record's bytes."""
    held = select_held_out(data, 0.3)
    return {row.numpy().tobytes(): bool(out) for row, out in zip(data.x, held, strict=True)}


def test_whether_a_unit_is_held_out_depends_on_that_unit_alone():
    whole = patients()
    before = sides(whole)
    assert 0.2 < np.mean(list(before.values())) < 0.4
    fewer = from_arrays(whole.x[1:], 1 - whole.y[1:], classes=2)
    assert sides(fewer).items() <= before.items(), "neither a missing record nor any label moves another record"
    # What 243f1c8 did: the seed's permutation of positions. Without one record, many others change sides.
    old = [holdout(from_arrays(whole.x[k:], whole.y[k:], classes=2), 0.3, 0).x_test for k in (0, 1)]
    one, two = ({row.numpy().tobytes() for row in part} for part in old)
    assert len(one - two) > 10


def test_a_person_is_on_one_side():
    person = np.arange(400) // 5
    part = hold_out_units(patients(person=person), 0.3, seed=0)
    assert part.held_out is not None
    assert part.held_out.person is not None
    assert part.person is not None
    assert not set(part.person.tolist()) & set(part.held_out.person.tolist())


# --- the mechanism --------------------------------------------------------------------------------


def classification(classes: int = 3) -> tuple[Task, ClassCells]:
    asked = TaskSettings("classification", classes=classes)
    task = make_task(asked, [])
    form = make_score_form(task, asked)
    assert isinstance(form, ClassCells)
    return task, form


def histogram(cells: ClassCells, outputs: Tensor, targets: Tensor, unit_of: Tensor) -> Tensor:
    return sum_over_units(cells.measure(outputs, targets), unit_of, int(unit_of.max()) + 1)


@pytest.mark.parametrize("classes", [2, 3, 7, 12])
def test_one_unit_moves_the_histogram_by_at_most_one(classes: int):
    """Zero-out: the unit's records are gone. A person with many records, in cells of any kind, has weight 1 in all."""
    task, cells = classification(classes)
    generator = torch.Generator().manual_seed(0)
    moved, naive = 0.0, 0.0
    for trial in range(40):
        count = int(torch.randint(1, 30, (1,), generator=generator))
        outputs = 20 * torch.randn(count + 50, task.outputs, generator=generator)
        if trial % 2:
            outputs[:count] = outputs[0]  # all of the person's records in one cell: the worst case
        targets = torch.randint(0, classes, (count + 50,), generator=generator)
        if trial % 2:
            targets[:count] = targets[0]
        unit_of = torch.cat([torch.zeros(count, dtype=torch.int64), torch.arange(1, 51)])
        with_unit = histogram(cells, outputs, targets, unit_of)
        without = histogram(cells, outputs[count:], targets[count:], unit_of[count:] - 1)
        moved = max(moved, float((with_unit - without).norm()))
        records = torch.bincount(cells.locate(outputs, targets), minlength=cells.columns).double()
        others = torch.bincount(cells.locate(outputs[count:], targets[count:]), minlength=cells.columns).double()
        naive = max(naive, float((records - others).norm()))
    assert 0.99 < moved <= 1.0, "exactly: shares are integers, rounded down"
    assert naive > 5, "counting records in place of persons is the wrong mechanism, and this test sees it"


def variance_fits(sigma: float, claimed: float, draws: int = 2000) -> bool:
    """Whether the noise of a release has at least the claimed variance, by a chi-squared test at five deviations."""
    source = SeededRandomness(1, "evaluation test")
    exact = torch.arange(10.0, dtype=torch.float64)
    found = torch.stack([release_sums(exact, sigma, source, t, 0, 0) for t in range(draws)]) - exact
    count = found.numel()
    return float(found.square().sum()) / claimed**2 > count - 5 * math.sqrt(2 * count)


def test_the_noise_is_what_the_event_says():
    assert variance_fits(2.5, 2.5)
    assert not variance_fits(2.35, 2.5), "noise that is 6% too small is noticed"


@pytest.mark.parametrize("releases", [1, 20])
def test_sigma_is_calibrated_over_all_evaluations_of_the_run(releases: int):
    sigma = calibrate_evaluation(EPSILON, 1e-5, "rdp", releases)
    assert 0.98 * EPSILON < compute_epsilon([Gaussian(1.0, sigma, releases)], 1e-5) <= EPSILON
    if releases > 1:
        once = calibrate_evaluation(EPSILON, 1e-5, "rdp", 1)
        assert compute_epsilon([Gaussian(1.0, once, releases)], 1e-5) > 2 * EPSILON, "paying once is too little"


def balanced_accuracy(noised: Tensor, cells: ClassCells, totals: Tensor) -> float:
    """The wrong computation: noised hits over true class totals; NaN where a class has nobody."""
    hits = noised.view(cells.shape).sum(dim=2).diagonal()
    return float((hits / totals).mean())


def test_class_totals_are_noised_too():
    """Somebody is the only one of a class. Dividing by true totals tells whether they are there, in every trial."""
    task, cells = classification(3)
    outputs = torch.eye(3)[torch.arange(61) % 2] * 3
    targets = torch.arange(61) % 2
    targets[60] = 2  # the target: the only record of class 2
    there = histogram(cells, outputs, targets, torch.arange(61))
    away = histogram(cells, outputs[:60], targets[:60], torch.arange(60))
    sigma, source = calibrate_evaluation(0.5, 1e-5, "rdp", 1), SeededRandomness(2, "totals")

    def accused(exact: Tensor, right: bool, offset: int) -> float:
        """How often an observer of balanced accuracy says that the target is there."""
        totals = exact.view(3, -1).sum(dim=1)
        found = []
        for t in range(300):
            noised = release_sums(exact, sigma, source, t + offset, 0, 0)
            value = cells.estimate(task, noised, 61)["balanced_accuracy"] if right else None
            value = balanced_accuracy(noised, cells, totals) if value is None else value
            found.append(math.isfinite(value))
        return float(np.mean(found))

    assert abs(accused(there, True, 0) - accused(away, True, 1000)) < 0.2
    assert accused(there, False, 2000) - accused(away, False, 3000) == 1.0


def test_metrics_stay_in_their_range_and_say_nothing_where_there_is_only_noise():
    task, cells = classification(2)
    for t in range(50):
        noised = release_sums(torch.zeros(cells.columns), 50.0, SeededRandomness(3), t, 0, 0)
        for name, value in cells.estimate(task, noised, 5).items():
            assert math.isnan(value) or (value >= 0 and (name == "loss" or value <= 1)), name
    nobody = torch.zeros(cells.columns)
    assert all(math.isnan(value) for value in cells.estimate(task, nobody, 0).values())


def test_the_threshold_of_a_binary_task_is_an_edge():
    asked = TaskSettings("binary", threshold=0.33)
    task = make_task(asked, [])
    cells = make_score_form(task, asked)
    assert isinstance(cells, ClassCells)
    outputs = torch.logit(torch.tensor([[0.32], [0.34], [0.34], [0.9]]))
    targets = torch.tensor([0, 0, 1, 1])
    exact = histogram(cells, outputs, targets, torch.arange(4))
    assert cells.estimate(task, exact, 4)["accuracy"] == pytest.approx(0.75)
