"""The noise has the scale the event claims, from both sources, and hides an empty batch too."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scipy import stats as scistats

from fulcrum.clipping.fixed import FIXED, NONE, clip_to_C
from fulcrum.clipping.quantile import QUANTILE
from fulcrum.privacy.bounds import apply_rule, enforce_bounds
from fulcrum.privacy.events import Gaussian, Unprotected
from fulcrum.privacy.mechanism import (
    GAUSSIAN_MECHANISM,
    ChargedNoiseScale,
    NoiseMultipliers,
    NoiseScale,
    add_noise,
    compute_charged_scale,
    compute_planned_events,
    release_with_noise,
    scale_noise,
)
from fulcrum.rng import Randomness, SecureRandomness, SeededRandomness
from fulcrum.types import Assignment, Bounds, RuleState, Stats
from support.events import as_gaussian

SIGMA, C = 1.5, 0.7


def _p_value(sample: torch.Tensor, sd: float) -> float:
    return float(scistats.kstest(sample.double().numpy(), scistats.norm(0, sd).cdf).pvalue)


def _noised(randomness: Randomness, d: int = 200_000) -> torch.Tensor:
    scale = compute_charged_scale(FIXED, Bounds(torch.tensor([C])), 0.1, SIGMA, 10.0)
    noisy, _ = release_with_noise(torch.zeros(d), torch.zeros(0), scale, randomness, (0, 0, 0))
    return noisy


@pytest.mark.parametrize("randomness", [SeededRandomness(1), SecureRandomness()], ids=["seeded", "secure"])
def test_noise_is_normal_with_the_stated_scale_and_no_other(randomness: Randomness) -> None:
    noise = _noised(randomness)
    assert _p_value(noise, SIGMA * C) > 1e-10  # secure draws are new ones each time: this fails once in 1e10
    for wrong in (2 / 3, 3 / 2, 1.05):
        assert _p_value(noise, SIGMA * C * wrong) < 1e-6, f"the test cannot tell {wrong} times the scale"


@pytest.mark.parametrize("randomness", [SeededRandomness(1), SecureRandomness()], ids=["seeded", "secure"])
def test_uniform_numbers_sample_at_the_stated_rate(randomness: Randomness) -> None:
    draws = randomness.uniform(("sample", 0, 0, 0), 20_000)
    assert draws.dtype == torch.float64
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    assert scistats.kstest(draws.numpy(), "uniform").pvalue > 1e-10  # as above
    assert scistats.kstest((draws**1.2).numpy(), "uniform").pvalue < 1e-6  # 1e-80 as a rule


def test_streams_with_different_keys_are_unrelated_and_equal_keys_equal() -> None:
    randomness = SeededRandomness(7)
    base = randomness.normal(("noise", 1, 2, 3), 5000)
    assert torch.equal(base, randomness.normal(("noise", 1, 2, 3), 5000))
    others = [("noise", 1, 2, 4), ("noise", 1, 3, 3), ("noise", 2, 2, 3), ("sample", 1, 2, 3), ("noise", 12, 3)]
    for key in others:
        other = randomness.normal(key, 5000)
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 0.08
    assert abs(float(torch.corrcoef(torch.stack([base, base]))[0, 1])) > 0.08  # what a repeated stream looks like
    assert not torch.equal(base, SeededRandomness(8).normal(("noise", 1, 2, 3), 5000))


def test_secure_numbers_never_repeat_and_ignore_every_seed() -> None:
    torch.manual_seed(0)
    first = SecureRandomness().normal(("noise", 0, 0, 0), 100)
    torch.manual_seed(0)
    assert not torch.equal(first, SecureRandomness().normal(("noise", 0, 0, 0), 100))


def test_no_global_generator_is_touched() -> None:
    before = torch.random.get_rng_state()
    _noised(SeededRandomness(1))
    _noised(SecureRandomness())
    assert torch.equal(before, torch.random.get_rng_state())


def test_extra_statistics_take_their_share_and_the_sum_pays_for_it() -> None:
    rule = dataclasses.replace(FIXED, share=lambda sigma, batch: 0.36)
    scale = compute_charged_scale(rule, Bounds(torch.tensor([3.0, 4.0]), extra=2.0), 0.1, SIGMA, 10.0)
    assert float(scale.sum) == pytest.approx(5.0 * SIGMA / 0.8)
    assert scale.extra == pytest.approx(2.0 * SIGMA / 0.6)
    assert scale.event == Gaussian(0.1, SIGMA)


def test_extra_statistics_without_a_share_are_never_released() -> None:
    scale = compute_charged_scale(FIXED, Bounds(torch.tensor([1.0]), extra=1.0), 0.1, SIGMA, 10.0)
    with pytest.raises(ValueError, match="no share"):
        release_with_noise(torch.zeros(3), torch.zeros(1), scale, SeededRandomness(0), (0, 0, 0))


def test_no_noise_is_called_by_its_name() -> None:
    assert compute_charged_scale(FIXED, Bounds(torch.tensor([1.0])), 0.1, 0.0, 10.0) == ChargedNoiseScale(
        0.0, 0.0, event=Unprotected()
    )
    assert compute_charged_scale(NONE, Bounds(torch.tensor([torch.inf])), 0.1, SIGMA, 10.0).event == Unprotected()


def test_the_mechanism_holds_a_lying_rule_to_its_own_bounds() -> None:
    norms = torch.tensor([[3.0], [0.5], [0.0]])
    honest = torch.tensor([[1 / 3], [1.0], [1.0]])
    bounds = Bounds(torch.tensor([1.0]), extra=0.5)
    extra = torch.tensor([[2.0], [0.5], [0.0]])
    factors, held = enforce_bounds(FIXED, torch.ones_like(norms) * 9, extra, norms, bounds)
    assert float((factors * norms).max()) <= 1.0 + 1e-5
    assert float(held.abs().max()) <= 0.5 + 1e-5
    same, _ = enforce_bounds(FIXED, honest, extra, norms, bounds)
    assert bool((same.double() * norms.double() <= 1.0).all())  # float32's 1/3 times 3 is above 1
    torch.testing.assert_close(same, honest, rtol=2e-6, atol=0)
    assert clip_to_C is FIXED.clip


def _row_of(batch: int) -> Stats:
    return Stats(norms=torch.full((batch, 1), 4.0), mask=torch.arange(batch) < batch - 1)


def test_one_step_clips_masks_and_enforces_bounds_alone_and_under_vmap() -> None:
    def lying_clip(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
        return torch.ones_like(stats.norms), 7 * torch.ones_like(stats.norms), state

    rule = dataclasses.replace(FIXED, clip=lying_clip, bounds=lambda state: Bounds(state["C"], 0.5))
    stats = _row_of(3)
    alone = apply_rule(rule, stats, {"C": torch.tensor([2.0])})
    assert torch.allclose(alone.factors, torch.full((3, 1), 0.5))  # not the rule's 1.0
    assert torch.allclose(alone.extra, torch.tensor([[0.5], [0.5], [0.0]]))  # not 7, and 0 on padding
    assert alone.second_factors.shape == (3, 0)
    loose = apply_rule(dataclasses.replace(rule, sound=False), stats, {"C": torch.tensor([2.0])})
    assert float(loose.factors.max()) == 1.0  # the check above can tell

    def stacked(norms: torch.Tensor, C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decided = apply_rule(rule, Stats(norms=norms, mask=stats.mask), {"C": C})
        return decided.factors, decided.extra

    factors, extra = torch.func.vmap(stacked)(torch.stack([stats.norms] * 2), torch.tensor([[2.0], [1.0]]))
    assert torch.equal(factors[0], alone.factors)
    assert torch.equal(extra[0], alone.extra)
    assert torch.allclose(factors[1], torch.full((3, 1), 0.25))


def test_a_second_sum_and_the_statistics_keep_one_bound_together() -> None:
    rule = dataclasses.replace(
        FIXED,
        clip=lambda stats, state: (torch.ones_like(stats.norms) / 8, 3 * torch.ones_like(stats.norms), state),
        second=lambda stats, state: torch.ones_like(stats.norms),
        bounds=lambda state: Bounds(state["C"], 1.0),
    )
    stats = _row_of(2)
    decided = apply_rule(rule, stats, {"C": torch.tensor([1.0])})
    together = decided.extra.square().sum(dim=1) + (decided.second_factors * stats.norms).square().sum(dim=1)
    assert float(together.max()) <= 1.0 + 1e-5
    assert float(decided.second_factors.min()) > 0


def test_noise_of_many_tasks_is_the_noise_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    clipped, extra = torch.randn((3, 5), generator=generator), torch.randn((3, 2), generator=generator)
    normals = torch.randn((3, 5), generator=generator), torch.randn((3, 2), generator=generator)
    on_sum, on_extra = torch.tensor([0.5, 0.0, 3.0]), torch.tensor([0.1, 0.0, 1.0])
    together = NoiseScale(on_sum, on_extra, torch.tensor([1.0, 1.0, 0.0]))
    noisy, statistics, _ = add_noise(clipped, extra, together, normals, {})
    for i, asked in enumerate((True, True, False)):
        scale = NoiseScale(on_sum[i], on_extra[i], asked)
        own, own_extra, _ = add_noise(clipped[i], extra[i], scale, (normals[0][i], normals[1][i]), {})
        assert torch.equal(noisy[i], own)
        assert torch.equal(statistics[i], own_extra)
    assert torch.equal(noisy[1], clipped[1])
    assert not torch.equal(noisy[0], clipped[0])
    assert torch.equal(statistics[2], torch.zeros(2))  # not asked for


def test_an_infinite_bound_without_noise_stays_without_noise() -> None:
    bounds = Bounds(torch.tensor([[torch.inf], [2.0]]), torch.tensor([0.0, 1.0]))
    scale = scale_noise(bounds, NoiseMultipliers(torch.tensor([0.0, 1.5]), torch.tensor([0.0, 1.0])))
    assert torch.as_tensor(scale.sum).tolist() == pytest.approx([0.0, 3.0], rel=1e-9)
    assert GAUSSIAN_MECHANISM.scale(Bounds(torch.tensor([torch.inf])), NoiseMultipliers(0.0, 0.0), True).sum == 0.0


def test_a_mechanism_may_keep_a_state() -> None:
    def correlated(clipped, extra, scale, normals, state):  # type: ignore[no-untyped-def]
        noisy, extra, _ = add_noise(clipped, extra, scale, (normals[0] - state["last"], normals[1]), {})
        return noisy, extra, {"last": normals[0]}

    mechanism = dataclasses.replace(GAUSSIAN_MECHANISM, init=lambda dim: {"last": torch.zeros(dim)}, release=correlated)
    state, ones, none = mechanism.init(2), torch.ones(2), torch.zeros(0)
    first, _, state = mechanism.release(torch.zeros(2), none, NoiseScale(1.0, 0.0), (ones, None), state)
    second, _, _ = mechanism.release(torch.zeros(2), none, NoiseScale(1.0, 0.0), (ones, None), state)
    assert first.tolist() == [1.0, 1.0]
    assert second.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("every", [1, 3, 5])
@pytest.mark.parametrize("round", [0, 1, 2])
def test_what_is_planned_is_what_the_steps_release(every: int, round: int) -> None:
    task, batch = Assignment(0, 0.1, SIGMA, steps=4, lr=1.0, statistics_interval=every), 500.0
    events = [
        compute_charged_scale(
            QUANTILE, Bounds(torch.ones(1), 1.0), 0.1, SIGMA, batch, task.asks_statistics(round, step)
        ).event
        for step in range(4)
    ]
    planned = compute_planned_events(task, QUANTILE, batch, round)
    assert {(as_gaussian(e).sigma, e.count) for e in planned} == {
        (as_gaussian(e).sigma, events.count(e)) for e in events
    }
    if every > 1 and task.asked(round) < 4:  # another batch is another share: the plan must know the right one
        assert planned != compute_planned_events(task, QUANTILE, 1.0, round)


def test_planned_without_noise_is_unprotected() -> None:
    assert compute_planned_events(Assignment(0, 0.1, 0.0, 4, 1.0), FIXED, 32.0, 0) == (Unprotected(4),)
    assert compute_planned_events(Assignment(0, 0.1, SIGMA, 4, 1.0), NONE, 32.0, 0) == (Unprotected(4),)
    assert compute_planned_events(Assignment(0, 0.1, SIGMA, 4, 1.0), FIXED, 32.0, 0) == (Gaussian(0.1, SIGMA, 4),)
