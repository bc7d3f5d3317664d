"""The arithmetic of membership attacks: ROC, intervals, calibration by shadows, bounds; each beside a slow truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fulcrum.analysis.attacks.calibrated import ATTACKS, leave_one_out_moments, lira, lira_offline, rmia
from fulcrum.analysis.attacks.limits import limit_by_accountant, limit_by_pair
from fulcrum.analysis.attacks.release_scores import solve_ridge
from fulcrum.analysis.attacks.roc import measure_roc
from fulcrum.analysis.attacks.signals import measure_confidence
from fulcrum.data.tasks.builtin import make_task
from fulcrum.errors import ConfigError
from fulcrum.privacy.events import Gaussian
from fulcrum.settings.schema import TaskSettings


def draw(shadows, records, shift, seed=0, spread=1.0):
    """Scores N(difficulty, spread^2), higher by `shift` for members."""
    rng = np.random.default_rng(seed)
    members = rng.random((shadows, records)) < 0.5
    difficulty = rng.normal(0, 3, records)
    return difficulty + spread * rng.normal(size=members.shape) + shift * members, members


def test_auc_counts_pairs_and_ties_count_half():
    rng = np.random.default_rng(1)
    scores, members = rng.integers(0, 5, (4, 30)).astype(float), rng.random((4, 30)) < 0.5
    inside, outside = scores[members], scores[~members]
    pairs = (inside[:, None] > outside).mean() + 0.5 * (inside[:, None] == outside).mean()
    assert measure_roc(scores, members, draws=2).auc.value == pytest.approx(pairs)


def test_tpr_at_a_rate_is_that_of_the_threshold():
    scores = np.arange(1000.0)[::-1].reshape(1, -1)
    members = np.zeros((1, 1000), dtype=bool)
    members[0, :50] = True  # the fifty highest
    members[0, 500:550] = True
    found = measure_roc(scores, members, draws=2)
    assert found.tpr[0.001].value == pytest.approx(0.5, abs=0.01)
    assert found.curve[0] == pytest.approx(0.5)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    truth = 0.5 * (1 + math.erf(0.5 / math.sqrt(2) / math.sqrt(2)))  # P(N(0.5, 2) > 0)
    covered = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        members = rng.random((12, 40)) < 0.5
        found = measure_roc(rng.normal(size=members.shape) + 0.5 * members, members, seed, draws=80).auc
        covered += found.low <= truth <= found.high
    assert covered >= 33


def test_a_curve_needs_both_sides_and_finite_scores():
    with pytest.raises(ConfigError, match="members and non-members"):
        measure_roc(np.zeros((1, 3)), np.ones((1, 3), dtype=bool))
    with pytest.raises(ConfigError, match="finite"):
        measure_roc(np.array([[1.0, np.nan]]), np.array([[True, False]]))


def test_moments_leave_the_target_out():
    scores, members = draw(9, 5, 1.0)
    count, mean, variance = leave_one_out_moments(scores, members)
    for s in range(9):
        for n in range(5):
            kept = [scores[r, n] for r in range(9) if r != s and members[r, n]]
            assert count[s, n] == len(kept)
            if len(kept) > 1:
                assert mean[s, n] == pytest.approx(np.mean(kept))
                assert variance[s, n] == pytest.approx(np.var(kept, ddof=1))


@pytest.mark.parametrize("shadows", [16, 80])
def test_calibrated_attacks_beat_the_threshold_where_records_differ(shadows):
    scores, members = draw(shadows, 60, 1.0)
    control = np.zeros(60, dtype=bool)
    areas = {}
    for name in ("threshold", "lira", "lira-offline"):
        areas[name] = measure_roc(ATTACKS[name](scores, members, control), members, draws=5).auc.value
    best = 0.5 * (1 + math.erf(1 / 2))  # the AUC of the true likelihood ratio of two normals one apart
    assert areas["threshold"] < 0.62
    assert best - 0.05 < areas["lira"] < best + 0.03
    assert best - 0.05 < areas["lira-offline"] < best + 0.03


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_where_scores_say_nothing_no_attack_finds_anything(attack):
    scores, members = draw(16, 400, 0.0)
    control = np.arange(400) % 4 == 0
    found = ATTACKS[attack](scores, members, control)
    area = measure_roc(found[:, ~control], members[:, ~control], draws=40).auc
    assert abs(area.value - 0.5) < 4 * area.error
    assert area.error < 0.03


def test_rmia_ranks_members_above_the_population():
    scores, members = draw(16, 400, 2.0)
    control = np.arange(400) % 4 == 0
    scores[:, control] -= 2.0 * members[:, control]  # controls are never members
    found = rmia(scores, members, control)
    assert measure_roc(found[:, ~control], members[:, ~control], draws=5).auc.value > 0.7
    area = measure_roc(found[:, control], members[:, control], draws=40).auc
    assert abs(area.value - 0.5) < 4 * area.error


def test_records_without_shadows_on_one_side_get_no_verdict():
    scores = np.array([[1.0], [2.0], [3.0], [9.0]])
    members = np.array([[True], [True], [True], [True]])
    assert (lira(scores, members, np.array([False])) == 0).all()
    assert (lira_offline(scores, members, np.array([False])) == 0).all()


def test_the_bound_of_a_pair():
    fpr = np.array([0.0, 0.001, 0.5, 1.0])
    found = limit_by_pair(1.0, 1e-5).tpr(fpr)
    assert found[0] == pytest.approx(1e-5)
    assert found[1] == pytest.approx(math.e * 0.001 + 1e-5)
    assert found[2] == pytest.approx(1 - math.exp(-1) * (0.5 - 1e-5))
    assert found[3] == 1
    assert limit_by_pair(1e-9, 0.0).auc == pytest.approx(0.5, abs=1e-6)


def test_the_accountants_curve_is_the_gaussian_mechanisms_own():
    """One release at sigma = 1 without sampling: TPR = Phi(Phi^-1(FPR) + 1), which the curve may pass by its grid."""
    fpr = torch.tensor([0.001, 0.01, 0.1, 0.5], dtype=torch.float64)
    truth = torch.special.ndtr(torch.special.ndtri(fpr) + 1).numpy()
    found = limit_by_accountant([Gaussian(1.0, 1.0)]).tpr(fpr.numpy())
    assert (found >= truth - 1e-9).all()
    assert (found <= 1.03 * truth + 1e-4).all()


def test_an_attack_on_noise_stays_below_its_bound_and_one_without_noise_passes_it():
    rng = np.random.default_rng(3)
    members = rng.random((40, 500)) < 0.5
    allowed = limit_by_accountant([Gaussian(1.0, 1.0)])
    for sigma, fine in ((1.0, True), (0.5, False)):  # planted: half of the noise
        scores = members + sigma * rng.normal(size=members.shape)
        assert (allowed.find_violations(measure_roc(scores, members, draws=40)) == []) == fine


def test_confidence_is_the_logit_of_the_true_class():
    task = make_task(TaskSettings(name="classification", classes=3), [np.array([0, 1, 2])])
    outputs, targets = torch.tensor([[2.0, 0.0, -1.0], [50.0, 0.0, 0.0]]), torch.tensor([0, 0])
    found = measure_confidence(task, outputs, targets)
    p = torch.softmax(outputs.double(), dim=1)[0, 0]
    assert float(found[0]) == pytest.approx(float(torch.log(p / (1 - p))))
    assert float(found[1]) == pytest.approx(50 - math.log(2))  # where p rounds to 1
    loss = task.loss(outputs, targets).double()
    torch.testing.assert_close(torch.nn.functional.softplus(-found), loss, rtol=1e-5, atol=1e-6)


def test_ridge_equals_a_direct_solution():
    torch.manual_seed(0)
    rows = torch.randn(3, 12, 40)
    gram, ridge, along = rows @ rows.transpose(1, 2), torch.tensor([[0.5], [1.0], [5.0]]), torch.randn(3, 12)
    whole = gram + ridge[:, :, None] * torch.eye(12)
    torch.testing.assert_close(
        solve_ridge(gram, ridge, along), torch.linalg.solve(whole, along[:, :, None])[:, :, 0], rtol=1e-3, atol=1e-4
    )
