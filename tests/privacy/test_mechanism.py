"""The noise has the scale the event claims, from both sources, and hides an empty batch too."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scipy import stats as scistats

from fulcrum.clipping.fixed import FIXED, NONE, clip_to_C
from fulcrum.privacy.events import Gaussian, Unprotected
from fulcrum.privacy.mechanism import Scales, hold, release, scales
from fulcrum.rng import Randomness, Secure, Seeded
from fulcrum.types import Bounds

SIGMA, C = 1.5, 0.7


def _p_value(sample: torch.Tensor, sd: float) -> float:
    return float(scistats.kstest(sample.double().numpy(), scistats.norm(0, sd).cdf).pvalue)


def _noised(randomness: Randomness, d: int = 200_000) -> torch.Tensor:
    scale = scales(FIXED, Bounds(torch.tensor([C])), 0.1, SIGMA, 10.0)
    noisy, _ = release(torch.zeros(d), torch.zeros(0), scale, randomness, (0, 0, 0))
    return noisy


@pytest.mark.parametrize("randomness", [Seeded(1), Secure()], ids=["seeded", "secure"])
def test_noise_is_normal_with_the_stated_scale_and_no_other(randomness: Randomness) -> None:
    noise = _noised(randomness)
    assert _p_value(noise, SIGMA * C) > 1e-6
    for wrong in (2 / 3, 3 / 2, 1.05):
        assert _p_value(noise, SIGMA * C * wrong) < 1e-6, f"the test cannot tell {wrong} times the scale"


@pytest.mark.parametrize("randomness", [Seeded(1), Secure()], ids=["seeded", "secure"])
def test_uniform_numbers_sample_at_the_stated_rate(randomness: Randomness) -> None:
    draws = randomness.uniform(("sample", 0, 0, 0), 20_000)
    assert draws.dtype == torch.float64
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    assert scistats.kstest(draws.numpy(), "uniform").pvalue > 1e-6
    assert scistats.kstest((draws**1.1).numpy(), "uniform").pvalue < 1e-6


def test_streams_with_different_keys_are_unrelated_and_equal_keys_equal() -> None:
    randomness = Seeded(7)
    base = randomness.normal(("noise", 1, 2, 3), 5000)
    assert torch.equal(base, randomness.normal(("noise", 1, 2, 3), 5000))
    others = [("noise", 1, 2, 4), ("noise", 1, 3, 3), ("noise", 2, 2, 3), ("sample", 1, 2, 3), ("noise", 12, 3)]
    for key in others:
        other = randomness.normal(key, 5000)
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 0.08
    assert abs(float(torch.corrcoef(torch.stack([base, base]))[0, 1])) > 0.08  # what a repeated stream looks like
    assert not torch.equal(base, Seeded(8).normal(("noise", 1, 2, 3), 5000))


def test_secure_numbers_never_repeat_and_ignore_every_seed() -> None:
    torch.manual_seed(0)
    first = Secure().normal(("noise", 0, 0, 0), 100)
    torch.manual_seed(0)
    assert not torch.equal(first, Secure().normal(("noise", 0, 0, 0), 100))


def test_no_global_generator_is_touched() -> None:
    before = torch.random.get_rng_state()
    _noised(Seeded(1))
    _noised(Secure())
    assert torch.equal(before, torch.random.get_rng_state())


def test_extra_statistics_take_their_share_and_the_sum_pays_for_it() -> None:
    rule = dataclasses.replace(FIXED, share=lambda sigma, batch: 0.36)
    scale = scales(rule, Bounds(torch.tensor([3.0, 4.0]), extra=2.0), 0.1, SIGMA, 10.0)
    assert float(scale.sum) == pytest.approx(5.0 * SIGMA / 0.8)
    assert scale.extra == pytest.approx(2.0 * SIGMA / 0.6)
    assert scale.event == Gaussian(0.1, SIGMA)


def test_extra_statistics_without_a_share_are_never_released() -> None:
    scale = scales(FIXED, Bounds(torch.tensor([1.0]), extra=1.0), 0.1, SIGMA, 10.0)
    with pytest.raises(ValueError, match="no share"):
        release(torch.zeros(3), torch.zeros(1), scale, Seeded(0), (0, 0, 0))


def test_no_noise_is_called_by_its_name() -> None:
    assert scales(FIXED, Bounds(torch.tensor([1.0])), 0.1, 0.0, 10.0) == Scales(0.0, 0.0, Unprotected())
    assert scales(NONE, Bounds(torch.tensor([torch.inf])), 0.1, SIGMA, 10.0).event == Unprotected()


def test_the_mechanism_holds_a_lying_rule_to_its_own_bounds() -> None:
    norms = torch.tensor([[3.0], [0.5], [0.0]])
    honest = torch.tensor([[1 / 3], [1.0], [1.0]])
    bounds = Bounds(torch.tensor([1.0]), extra=0.5)
    extra = torch.tensor([[2.0], [0.5], [0.0]])
    factors, held = hold(FIXED, torch.ones_like(norms) * 9, extra, norms, bounds)
    assert float((factors * norms).max()) <= 1.0 + 1e-5
    assert float(held.abs().max()) <= 0.5 + 1e-5
    same, _ = hold(FIXED, honest, extra, norms, bounds)
    assert torch.equal(same, honest)
    assert clip_to_C is FIXED.clip
