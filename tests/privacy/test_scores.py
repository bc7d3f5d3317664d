"""Scores of private held-out records of every task: bounded, close where the noise is small, beside a baseline."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fulcrum.data import Dataset, from_arrays
from fulcrum.data.tasks import Task, make_task
from fulcrum.errors import ConfigError
from fulcrum.privacy.evaluation import sum_over_units
from fulcrum.privacy.scores import ONE, ScoreForm, choose_threshold, make_score_form
from fulcrum.privacy.scores.form import find_integer_weight, fit_to_units, project_to_units
from fulcrum.runs import execute, prepare
from fulcrum.settings.schema import Settings, TaskSettings
from fulcrum.training.evaluate import compute_public_baseline, evaluate_round, evaluate_with_parties
from fulcrum.types import mean_over_parties

TASKS: dict[str, TaskSettings] = {
    "binary": TaskSettings("binary", threshold=0.4),
    "three": TaskSettings("classification", classes=3),
    "twelve": TaskSettings("classification", classes=12),
    "labels": TaskSettings("multilabel", classes=5, class_weights=(1.0, 2.0, 1.0, 3.0, 1.0)),
    "number": TaskSettings("regression", low=-2.0, high=6.0),
    "absolute": TaskSettings("regression", low=0.0, high=1.0, loss="absolute"),
    "numbers": TaskSettings("regression", low=-2.0, high=6.0),
    "tokens": TaskSettings("tokens", classes=7),
}
LENGTH = 6


def draw(name: str, n: int, generator: torch.Generator, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Outputs and targets of n records."""
    if name == "tokens":
        targets = torch.randint(0, 7, (n, LENGTH), generator=generator)
        targets[:, -1] = -100
        return spread * torch.randn(n, LENGTH, 7, generator=generator), targets
    if name in ("number", "absolute", "numbers"):
        count = 2 if name == "numbers" else 1
        low, high = TASKS[name].low or 0.0, TASKS[name].high or 0.0
        targets = low + (high - low) * torch.rand(n, count, generator=generator)
        return spread * torch.randn(n, count, generator=generator), targets if count > 1 else targets[:, 0]
    if name == "labels":
        outputs = spread * torch.randn(n, 5, generator=generator)
        return outputs, (outputs + torch.randn(n, 5, generator=generator) > 1).long()
    classes = {"binary": 2, "three": 3, "twelve": 12}[name]
    outputs = spread * torch.randn(n, 1 if classes == 2 else classes, generator=generator)
    return outputs, torch.randint(0, classes, (n,), generator=generator)


def make(name: str) -> tuple[Task, ScoreForm]:
    asked = TASKS[name]
    task = make_task(asked, [np.zeros((1, 2), dtype=np.float32)] if name == "numbers" else [])
    return task, make_score_form(task, asked, LENGTH)


@pytest.mark.parametrize("name", TASKS)
def test_a_unit_moves_the_sums_by_at_most_one_whatever_the_model_says(name: str):
    """Also with NaN, infinite and huge outputs, and targets outside the declared range."""
    _, form = make(name)
    generator = torch.Generator().manual_seed(1)
    largest, naive = 0.0, 0.0
    for trial in range(40):
        outputs, targets = draw(name, int(torch.randint(1, 9, (1,), generator=generator)), generator, 10.0**trial)
        if trial % 3 == 0:
            outputs.view(-1)[0] = (math.nan, math.inf, -math.inf)[trial % 9 // 3]
        if targets.dtype.is_floating_point and trial % 4 == 0:
            targets = targets * 1e6
        if trial % 2:  # the worst case: equal records
            outputs, targets = outputs[:1].expand_as(outputs), targets[:1].expand_as(targets)
        measured = form.measure(outputs, targets)
        assert measured.dtype == torch.int64
        squares = [sum(int(v) ** 2 for v in row) for row in measured]
        assert all(square <= ONE**2 for square in squares), "exactly, in whole numbers"
        largest = max(largest, float(sum_over_units(measured, torch.zeros(len(targets), dtype=torch.int64), 1).norm()))
        naive = max(naive, float((measured.double() / ONE).sum(dim=0).norm()))
    assert 0.3 < largest <= 1.0
    assert naive > 1.5, "adding records up in place of their mean is the wrong mechanism, and this test sees it"


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 20, 1000, 123457])
def test_integer_weights_fill_the_norm_and_no_more(parts: int):
    weight = find_integer_weight(parts)
    assert parts * weight**2 <= ONE**2 < parts * (weight + 1) ** 2


TOLERANCES = {"auc": 0.03, "average_precision": 0.08, "f1": 0.03, "perplexity": 0.2, "log_loss": 0.1, "loss": 0.12}


@pytest.mark.parametrize("name", TASKS)
def test_without_noise_the_metrics_are_those_of_the_records(name: str):
    task, form = make(name)
    # Errors and token losses within the clipping bounds; beyond them the sums are smaller by intent.
    spread = 0.3 if name in ("number", "absolute", "numbers", "tokens") else 1.0
    outputs, targets = draw(name, 3000, torch.Generator().manual_seed(2), spread)
    exact = task.results(task.sums(outputs, targets))
    sums = sum_over_units(form.measure(outputs, targets), torch.arange(3000), 3000)
    found = form.estimate(task, sums, 3000)
    for metric in ("accuracy", "balanced_accuracy", "sensitivity", "mae", "rmse", "r2", *TOLERANCES):
        if metric in exact:
            close = pytest.approx(
                exact[metric], abs=TOLERANCES.get(metric, 2e-3), rel=0.1 if name == "twelve" else 0.02
            )
            assert found[metric] == close, metric
    assert task.constant is not None
    constant = task.constant(targets, torch.ones(3000))
    shape = (3000, LENGTH, 7) if name == "tokens" else (3000, task.outputs)
    chance = task.results(task.sums(constant.expand(shape), targets))
    baseline = form.estimate_baseline(task, sums, 3000)
    for metric in ("accuracy", "rmse", "auc"):
        if metric in chance and name != "tokens":  # of tokens only a uniform guess is known
            assert baseline[metric] == pytest.approx(chance[metric], abs=2e-3), metric


def test_the_confusion_counts_what_was_taken_for_what():
    _, form = make("three")
    outputs, targets = draw("three", 500, torch.Generator().manual_seed(3))
    sums = sum_over_units(form.measure(outputs, targets), torch.arange(500), 500)
    table = torch.zeros(3, 3)
    for label, guess in zip(targets.tolist(), outputs.argmax(dim=-1).tolist(), strict=True):
        table[label, guess] += 1
    assert torch.tensor(form.count_confusion(sums, 500)).allclose(table, atol=1e-3)
    _, many = make("twelve")
    assert many.count_confusion(torch.zeros(many.columns), 10) == []
    _, labels = make("labels")
    outputs, targets = draw("labels", 500, torch.Generator().manual_seed(3))
    sums = sum_over_units(labels.measure(outputs, targets), torch.arange(500), 500)
    rows = torch.tensor(labels.count_confusion(sums, 500))
    assert rows.shape == (5, 4)
    assert rows[:, 2:].sum(dim=1).allclose(targets.sum(dim=0).float(), atol=1e-2), "FN and TP are the positives"


def test_the_public_total_takes_noise_away():
    noise = 5 * torch.randn(2000, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    exact = torch.arange(24.0, dtype=torch.float64)
    fitted = fit_to_units(exact + noise, int(exact.sum()))
    assert fitted.sum(dim=-1).allclose(exact.sum())
    half = (fitted - exact)[:, :12].sum(dim=-1).std()
    assert float(half) < 0.8 * float(noise[:, :12].sum(dim=-1).std())


def test_possible_counts_are_the_nearest_without_any_below_zero():
    noised = torch.tensor([[5.0, -3.0, 1.0], [2.0, 2.0, 2.0], [-1.0, -2.0, -9.0]], dtype=torch.float64)
    found = project_to_units(noised, 6)
    assert found.tolist() == [[5.0, 0.0, 1.0], [2.0, 2.0, 2.0], [3.5, 2.5, 0.0]]
    assert project_to_units(noised, 0).abs().max() == 0


def test_ratios_of_few_positives_agree_with_each_other_whatever_the_noise():
    asked = TaskSettings("binary")
    task = make_task(asked, [])
    form = make_score_form(task, asked)
    random = torch.Generator().manual_seed(5)
    targets = (torch.rand(200, generator=random) < 0.06).long()
    outputs = torch.randn(200, 1, generator=random) - 2 + 1.5 * targets[:, None]
    sums = sum_over_units(form.measure(outputs, targets), torch.arange(200), 200).double()
    exact = form.estimate(task, sums, 200)
    errors = []
    for _ in range(60):
        noised = sums + 3 * torch.randn(len(sums), generator=random, dtype=torch.float64)
        found = form.estimate(task, noised, 200)
        (no, wrong), (missed, yes) = form.count_confusion(noised, 200)
        assert min(no, wrong, missed, yes) >= 0
        assert no + wrong + missed + yes == pytest.approx(200)
        if missed + yes >= 1:
            assert found["sensitivity"] == pytest.approx(yes / (missed + yes))
            assert found["balanced_accuracy"] == pytest.approx((found["sensitivity"] + found["specificity"]) / 2)
            assert found["f1"] == pytest.approx(2 * yes / (2 * yes + missed + wrong))
        errors.append(found["auc"] - exact["auc"])
    assert torch.tensor(errors).square().mean().sqrt() < 0.2, "0.34 with counts below 0"


def test_a_constant_has_no_error_where_noise_leaves_no_variance():
    task, form = make("number")
    share = find_integer_weight(form.columns) / ONE
    means = torch.tensor([0.2, 0.1, 0.5, 0.2], dtype=torch.float64)  # squares below the square of the mean
    assert "rmse" not in form.estimate_baseline(task, means * share * 100, 100)
    assert form.estimate(task, means * share * 100, 100)["rmse"] > 0
    assert mean_over_parties({"a": {}, "b": {"rmse": 2.0}}) == {"rmse": 2.0}
    means[3] = 0.3
    assert form.estimate_baseline(task, means * share * 100, 100)["rmse"] > 0


def test_a_threshold_is_chosen_from_the_histogram():
    asked = TaskSettings("binary")
    task = make_task(asked, [])
    form = make_score_form(task, asked)
    score = torch.linspace(-4, 4, 800)
    targets = (score > -1.5).long()  # the right threshold is at the logit -1.5, which is an edge
    sums = sum_over_units(form.measure(score[:, None], targets), torch.arange(800), 800)
    value, best = choose_threshold(form.tabulate_thresholds(sums, 800), "accuracy")  # type: ignore[attr-defined]
    assert value == pytest.approx(1 / (1 + math.exp(1.5)))
    assert best == pytest.approx(1.0)


# --- in a run -------------------------------------------------------------------------------------


def settings(**sections: dict[str, Any]) -> Settings:
    return Settings().replace(
        data={"parties": 2, "min_examples": 2, "validation": 0.4},
        model={"name": "linear"},
        train={"rounds": 3, "rate": 0.5},
        privacy={"sigma": 1.0, "evaluation_epsilon": 2000.0},
        run={"device": "cpu"},
        **sections,
    )


def patients(name: str, **more: Any) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1500, 4)).astype(np.float32)
    if name == "labels":
        y: Any = (x[:, :3] + rng.normal(size=(1500, 3)) > 0.5).astype(int)
        return from_arrays(x, y, name="patients", task=TaskSettings("multilabel", classes=3), **more)
    if name == "number":
        y = (x[:, 0] + 0.1 * rng.normal(size=1500)).astype(np.float32)
        return from_arrays(x, y, name="patients", task=TaskSettings("regression", low=-3.0, high=3.0), **more)
    y = (x[:, 0] + rng.normal(size=1500) > 1).astype(int)
    return from_arrays(x, y, name="patients", task="binary", **more)


@pytest.mark.parametrize("name", ["binary", "labels", "number"])
def test_every_task_scores_its_private_records_once_at_the_end(name: str):
    party = np.array(["north", "south", "south"])[np.arange(1500) % 3]
    made = prepare(settings(), patients(name, party=party))
    assert made.evaluation is not None
    assert made.evaluation.releases == 1, "run.evaluate_every asks for more"
    result = execute(made)
    assert set(result.party_metrics) == {"north", "south"} == set(result.facts.party_baselines)
    held = made.problem.dataset.held_out
    assert held is not None
    open_ = dataclasses.replace(made.problem, dataset=dataclasses.replace(made.problem.dataset, test=held))
    weights = (0.2 if name == "number" else 2) * made.problem.layout.flatten(made.problem.model)
    exact, noised = evaluate_with_parties(open_, weights), evaluate_round(made, weights, 2)
    chance, of_parties = compute_public_baseline(open_)
    for metric in ("accuracy", "auc", "rmse", "mae", "r2"):
        if metric in exact.metrics:
            assert noised.metrics[metric] == pytest.approx(exact.metrics[metric], abs=0.04), metric
            for party_name in ("north", "south"):
                close = pytest.approx(exact.parties[party_name][metric], abs=0.06)
                assert noised.parties[party_name][metric] == close, metric
    main = "rmse" if name == "number" else "accuracy"
    assert noised.facts.baseline[main] == pytest.approx(chance[main], abs=0.02)
    assert noised.facts.party_baselines["north"][main] == pytest.approx(of_parties["north"][main], abs=0.03)


def test_a_score_that_sums_cannot_tell_is_refused():
    asked = TaskSettings("regression", low=0.0, high=1.0, metrics=("tests.support.metrics:worst",), score="rmse")
    task = make_task(TaskSettings("regression", low=0.0, high=1.0), [])
    with pytest.raises(ConfigError, match=r"task.score = 'other' cannot be computed from noised sums"):
        make_score_form(dataclasses.replace(task, score="other"), asked)
    with pytest.raises(ConfigError, match="declares no bounds"):
        make_score_form(dataclasses.replace(task, name="own"), asked)


def test_scores_stand_beside_a_baseline_and_the_reference(tmp_path: Any):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)).astype(np.float32)
    y = (x[:, 0] > 0.8).astype(int)
    data = from_arrays(x[:200], y[:200], x[200:], y[200:], task="binary", public=True, name="made")
    plain = Settings().replace(
        data={"parties": 2},
        model={"name": "linear", "init": "zeros"},
        task={"name": "binary", "choose_threshold": "f1"},
        train={"rounds": 4, "rate": 0.5},
        privacy={"epsilon": 2.0},
        run={"reference": True, "device": "cpu"},
    )
    result = execute(prepare(plain, data), tmp_path / "run")
    share = max(np.mean(y[200:]), 1 - np.mean(y[200:]))
    assert result.baseline["accuracy"] == pytest.approx(share)
    assert result.baseline["auc"] == 0.5
    assert np.array(result.facts.confusion).sum() == 100
    assert result.reference["metrics"]["auc"] > result.metrics["auc"] - 0.05
    assert result.facts.threshold["for"] == "f1"
    assert {"baseline", "confusion", "reference", "threshold"} <= set(result.summary)
    with pytest.raises(ConfigError, match=r"run.reference = true would train without privacy on"):
        prepare(plain, dataclasses.replace(data, public=False))
