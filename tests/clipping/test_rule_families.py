"""Each family of rules against numbers worked out by hand, and against the traps that others fell into."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy import stats as scistats
from torch import nn
from torch.func import functional_call

from fulcrum.clipping import RULES, ModelFacts, find_rule
from fulcrum.clipping.fixed import FIXED, bound_C, clip_to_C
from fulcrum.clipping.moo import MOO_C
from fulcrum.clipping.moo_scalar import MOO_SCALAR
from fulcrum.clipping.rule import ClipRule, gradient_multiplier
from fulcrum.clipping.wav import WAV
from fulcrum.data import poisson_sample_units
from fulcrum.engines.stacked.core import MatrixTape, limit_group_imbalance
from fulcrum.gradients.haar import haar_level_norms, haar_transform, inverse_haar_transform
from fulcrum.privacy.accounting import combine_sigmas
from fulcrum.privacy.mechanism import compute_charged_scale
from fulcrum.rng import Randomness, SeededRandomness, StreamKey
from fulcrum.settings.schema import Clip
from fulcrum.training.clipped_sum import compute_contribution
from fulcrum.types import Released, RuleState, Stats
from support.events import as_gaussian
from support.federations import client_federation, one_client, play, toy_problem
from support.randomness import Silent

FLAT = ModelFacts(2, (2,))
SOUND = [name for name, rule in RULES.items() if rule.sound and rule.private]
QUANTILE, DYNAMIC, OSO, DC_SGD = (RULES[name] for name in ("quantile", "dynamic", "oso", "dc-sgd"))


def released(extra: Sequence[float] | torch.Tensor = (), D: list[float] | None = None, **more: Any) -> Released:
    """What adapt gets to see; by default in round 1 of 10, at eta = 0.5 and two steps."""
    defaults: dict[str, Any] = {"lr": 0.5, "steps": 2.0, "round": 1, "rounds": 10}
    return Released(torch.tensor(D or [0.0, 0.0]), torch.as_tensor(extra), **{**defaults, **more})


def seen(norms: list[float], **more: Any) -> Stats:
    """A batch with these norms, in one group."""
    return Stats(torch.tensor(norms)[:, None], torch.ones(len(norms), dtype=torch.bool), **more)


# --- one example through the whole local step, for every rule ------------------------------------


@dataclasses.dataclass(frozen=True)
class Without:
    """The neighbour's randomness: the first unit that was sampled is not."""

    base: Randomness
    rate: float
    mode: str = "recorded"

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        draws = self.base.uniform(key, count).clone()
        draws[int((draws < self.rate).int().argmax())] = 1.0
        return draws

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        return self.base.normal(key, count)


def _moved(rule: ClipRule, groups: str, scale: float) -> tuple[float, float, float, float]:
    """How far one example moves update and statistics of a client's step, and how far it may."""
    problem = toy_problem(rule)
    rows, _, _ = poisson_sample_units(problem.randomness, ("sample", 0, 0, 0), problem.party(0), 0.5)
    x = problem.dataset.x.clone()
    x[rows[0]] *= scale
    problem = dataclasses.replace(
        problem,
        dataset=problem.dataset.with_changes(x=x),
        groups=problem.layout.layers if groups == "layer" else (),
    )
    neighbour = dataclasses.replace(problem, randomness=Without(problem.randomness, 0.5))
    lr, batch = 0.5, 0.5 * problem.party(0).units
    with_, without = (one_client(each, C0=0.3, sigma=1.0) for each in (problem, neighbour))
    bounds = rule.bounds(rule.init(Clip(C0=0.3), problem.shape))
    delta, extra = with_.delta - without.delta, with_.extra - without.extra
    assert torch.isfinite(delta).all()
    assert torch.isfinite(extra).all()
    reach = float(torch.linalg.vector_norm(bounds.C)) * lr / batch
    return float(delta.norm()), reach, float(extra.norm()), float(bounds.extra) / batch


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e12, math.inf, math.nan])
@pytest.mark.parametrize("groups", ["flat", "layer"])
@pytest.mark.parametrize("rule", SOUND)
def test_neighbouring_data_sets_differ_by_at_most_the_bounds(rule: str, groups: str, scale: float) -> None:
    delta, reach, extra, allowed = _moved(RULES[rule], groups, scale)
    assert delta <= reach * (1 + 1e-4) + 1e-7
    assert extra <= allowed * (1 + 1e-4) + 1e-7


@pytest.mark.parametrize("rule", SOUND)
def test_the_neighbour_test_rejects_the_same_rule_without_clipping(rule: str) -> None:
    """Marked not sound, so that the mechanism does not hold it to its bounds."""
    honest = RULES[rule]
    careless = dataclasses.replace(
        honest,
        clip=lambda stats, state: (torch.ones_like(stats.norms), 9 * honest.clip(stats, state)[1], state),
        second=honest.second and (lambda stats, state: torch.ones_like(stats.norms)),
        sound=False,
    )
    delta, reach, extra, allowed = _moved(careless, "flat", 10.0)
    assert delta > reach * 1.01
    assert allowed == 0 or extra > allowed * 1.01 or rule == "moo-scalar"  # no direction yet in its first round


@pytest.mark.parametrize("rule", SOUND)
def test_a_model_of_one_scalar_is_clipped_by_every_rule(rule: str) -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 100.0 * x[:, :3] * self.scale

    problem = toy_problem(rule, model=Scalar())
    reply = one_client(problem, C0=0.01, lr=1.0)
    reach = float(torch.linalg.vector_norm(problem.rule.bounds(problem.rule.init(Clip(C0=0.01), problem.shape)).C))
    assert reply.delta.shape == (1,)
    assert 0 < abs(float(reply.delta)) <= reach * len(problem.dataset.x) / (0.5 * problem.party(0).units)


@pytest.mark.parametrize("groups", ["flat", "layer"])
@pytest.mark.parametrize("rule", RULES)
def test_without_noise_and_clipping_it_is_plain_sgd_and_with_them_it_is_not(rule: str, groups: str) -> None:
    """eta_C = 0 keeps C still; rules that normalise have no such limit."""
    if RULES[rule].normalises:
        assert rule in ("auto-s", "psac", "units-of-c", "median", "hyfree", "macadam")
        return
    problem = toy_problem(rule)
    problem = dataclasses.replace(problem, groups=problem.layout.layers if groups == "layer" else ())
    plain = one_client(toy_problem("none"), steps=2).delta
    torch.testing.assert_close(one_client(problem, C0=1e3, steps=2, eta_C=0.0).delta, plain, rtol=1e-3, atol=1e-5)
    if problem.rule.private:
        assert not torch.allclose(one_client(problem, C0=0.01, steps=2, eta_C=0.0).delta, plain, rtol=1e-2)
        assert not torch.allclose(one_client(problem, C0=1e3, steps=2, sigma=1.0, eta_C=0.0).delta, plain, rtol=1e-2)


# --- quantile -----------------------------------------------------------------------------------


def test_quantile_follows_a_trajectory_computed_by_hand() -> None:
    state = QUANTILE.init(Clip(C0=2.0, eta_C=0.2, gamma=0.5), FLAT)
    _, extra, _ = QUANTILE.clip(seen([1.0, 2.0, 2.1, 0.5]), state)
    assert extra.flatten().tolist() == [0.5, 0.5, -0.5, 0.5]  # |g| <= C counts as below
    state = QUANTILE.adapt(state, released([0.25]))  # b~ = 0.75: too many below, C shrinks
    assert float(state["C"]) == pytest.approx(2.0 * math.exp(-0.2 * 0.25))
    state = QUANTILE.adapt(state, released([-0.5]))  # b~ = 0: none below, C grows
    assert float(state["C"]) == pytest.approx(2.0 * math.exp(-0.2 * 0.25 + 0.2 * 0.5))
    same = QUANTILE.adapt(state, released([0.0], asked=0.0))  # nothing was released: C stays
    assert torch.equal(same["C"], state["C"])
    assert float(QUANTILE.adapt(state, released([-900.0]))["C"]) == pytest.approx(1e3)  # C_max


@pytest.mark.parametrize(("sigma", "batch"), [(1.0, 60.0), (2.0, 1000.0), (8.0, 100.0), (0.5, 1.0)])
def test_quantile_splits_the_precision_as_andrew_does(sigma: float, batch: float) -> None:
    sigma_b = max(batch / 20, 5 * sigma)
    scale = compute_charged_scale(QUANTILE, QUANTILE.bounds({"C": torch.tensor([3.0])}), 0.1, sigma, batch)
    assert scale.extra == pytest.approx(sigma_b)
    z_delta = (sigma**-2 - (2 * sigma_b) ** -2) ** -0.5
    assert float(scale.sum) == pytest.approx(3.0 * z_delta)
    assert z_delta < 1.0051 * sigma
    assert combine_sigmas(float(scale.sum) / 3.0, float(scale.extra) / 0.5) == pytest.approx(sigma)
    # with the sensitivity of a count that is not centred the pair would cost more than sigma
    assert combine_sigmas(float(scale.sum) / 3.0, float(scale.extra)) < sigma * (1 - 1e-4)


def _follow(rule: ClipRule, C0: float, sign: float, rounds: int = 120) -> float:
    """C after following norms whose median is e, without noise."""
    norms = torch.exp(1 + torch.randn(2000, generator=torch.Generator().manual_seed(0)))
    state = rule.init(Clip(C0=C0, eta_C=0.2), FLAT)
    for _ in range(rounds):
        _, extra, _ = rule.clip(Stats(norms[:, None], torch.ones(2000, dtype=torch.bool)), state)
        state = rule.adapt(state, released(sign * extra.mean(dim=0)))
    return float(state["C"])


@pytest.mark.parametrize("C0", [0.1, 30.0])
def test_quantile_finds_the_median_and_a_flipped_sign_runs_away(C0: float) -> None:
    assert _follow(QUANTILE, C0, 1.0) == pytest.approx(math.e, rel=0.05)
    runaway = _follow(QUANTILE, C0, -1.0)  # what Flower's adaptive clipping did
    assert runaway < 1e-2 or runaway > 900


def test_quantile_counts_against_the_expected_batch_and_noises_with_the_C_it_clipped_with() -> None:
    problem = toy_problem("quantile")
    rows, _, _ = poisson_sample_units(problem.randomness, ("sample", 0, 0, 0), problem.party(0), 0.5)
    batch = 0.5 * problem.party(0).units
    assert len(rows) != batch, "choose another seed: this sample cannot tell the two apart"
    assert float(one_client(problem, C0=1e3).extra) == pytest.approx(0.5 * len(rows) / batch)
    silent = one_client(problem, C0=2.0, rate=1e-9, sigma=1.0, lr=1e-9)
    noise = problem.randomness.normal(("noise", 0, 0, 0), problem.layout.dim).float()
    wanted = (
        -2.0 * gradient_multiplier(QUANTILE.share, 1.0, 1e-9 * problem.party(0).units) / problem.party(0).units * noise
    )
    torch.testing.assert_close(silent.delta, wanted, rtol=1e-3, atol=1e-7)


def test_quantile_by_layer_has_a_C_and_a_count_for_each() -> None:
    shape = ModelFacts(4, (2, 2), (0, 1))
    state = QUANTILE.init(Clip(C0=2.0, eta_C=0.2), shape)
    stats = Stats(torch.tensor([[1.0, 9.0]]), torch.ones(1, dtype=torch.bool))
    assert QUANTILE.clip(stats, state)[1].tolist() == [[0.5, -0.5]]
    assert QUANTILE.bounds(state).extra == pytest.approx(math.sqrt(2) / 2)
    low, high = QUANTILE.adapt(state, released([0.5, -0.5], [0.0] * 4))["C"].tolist()
    assert low / high == pytest.approx(math.exp(-0.2))


# --- dynamic ------------------------------------------------------------------------------------


def test_dynamic_follows_its_public_schedule_whatever_is_released() -> None:
    state = DYNAMIC.init(Clip(C0=1.5, rho_c=0.3), FLAT)
    for t in range(5):
        assert float(state["C"]) == pytest.approx(1.5 * 0.3 ** (t / 5))
        state = DYNAMIC.adapt(state, released(D=[10.0**t, -1.0], round=t, rounds=5))


# --- normalising rules --------------------------------------------------------------------------


def test_normalising_rules_scale_as_their_formulas_say() -> None:
    norms = [0.0, 0.05, 3.0]
    auto, _, _ = RULES["auto-s"].clip(seen(norms), RULES["auto-s"].init(Clip(C0=2.0, stability=0.01), FLAT))
    assert auto.flatten().tolist() == pytest.approx([2 / 0.01, 2 / 0.06, 2 / 3.01])
    psac, _, _ = RULES["psac"].clip(seen(norms), RULES["psac"].init(Clip(C0=2.0, stability=0.1), FLAT))
    assert psac.flatten().tolist() == pytest.approx([2 / (n + 0.1 / (n + 0.1)) for n in norms])


def test_units_of_c_is_dp_sgd_divided_by_C_noise_and_all() -> None:
    fixed, units = (one_client(toy_problem(rule), C0=0.2, sigma=1.0).delta for rule in ("fixed", "units-of-c"))
    torch.testing.assert_close(units, fixed / 0.2)
    # and for small C it is auto-s: every gradient has norm 1
    tiny, auto = (one_client(toy_problem(r), C0=c).delta for r, c in (("units-of-c", 1e-5), ("auto-s", 1.0)))
    torch.testing.assert_close(tiny, auto, rtol=0.1, atol=2e-3)


# --- oso ----------------------------------------------------------------------------------------


def test_oso_follows_a_trajectory_computed_by_hand() -> None:
    state = OSO.init(Clip(C0=2.0, eta_C=0.05), FLAT)
    state = OSO.adapt(state, released([1.0, 0.0], [3.0, 0.0]))  # no r yet: C stays
    assert float(state["C"]) == pytest.approx(2.0)
    state = OSO.adapt(state, released([0.0, 1.0], [-0.7, 5.0]))  # the step went down r: s along r, C grows
    assert float(state["C"]) == pytest.approx(2.0 * math.exp(0.05))
    state = OSO.adapt(state, released([0.0, 1.0], [0.0, 0.1]))  # s against the new r: C shrinks
    assert float(state["C"]) == pytest.approx(2.0)
    quiet = OSO.adapt(state, released([0.0, 0.0], [0.0, 0.0], asked=0.0))
    assert torch.equal(quiet["r"], state["r"])  # nothing new was released


def test_the_second_sum_of_oso_is_the_derivative_of_the_clipped_sum_by_C() -> None:
    gradients = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).double()
    for groups in ((), (0, 1)):
        where = torch.repeat_interleave(torch.tensor(groups or (0, 0)), torch.tensor([8, 4]))
        start = OSO.init(Clip(C0=3.0), ModelFacts(12, (8, 4), groups))

        def at(C0: float, start: RuleState = start, where: torch.Tensor = where) -> Any:
            state = {**start, "C": start["C"].double() * C0 / 3.0, "r": start["r"].double()}
            view = OSO.view(state, 0, 10)
            return compute_contribution(OSO, view, state, gradients, torch.zeros(8).double(), where)

        difference = (at(3.0 + 1e-6).sum - at(3.0 - 1e-6).sum) / 2e-6
        assert difference.any()
        torch.testing.assert_close(at(3.0).extra, difference, rtol=1e-5, atol=1e-8)


def test_oso_pays_for_its_second_vector() -> None:
    scale = compute_charged_scale(OSO, OSO.bounds({"C": torch.tensor([2.0])}), 0.1, 1.5, 100.0)
    assert float(scale.sum) == pytest.approx(2.0 * 1.01 * 1.5)
    assert combine_sigmas(1.01 * 1.5, float(scale.extra)) == pytest.approx(1.5)


# --- dc-sgd -------------------------------------------------------------------------------------


def test_dc_sgd_puts_every_unit_in_one_bin_and_picks_the_C_of_least_error() -> None:
    state = DC_SGD.init(Clip(C0=2.0), ModelFacts(100, (100,)))
    _, rows, _ = DC_SGD.clip(seen([0.0, 0.41, 2.0, 7.9, 1e20]), state)
    assert rows.argmax(dim=1).tolist() == [0, 1, 5, 19, 19]  # bins of 0.2 C = 0.4, the last for all above
    assert rows.sum(dim=1).tolist() == [1.0] * 5
    # all norms in one bin around 1.1 C: least of (nu C')^2 d + (1.1 C - C')^2 is at 1.1 C / (1 + nu^2 d)
    one = torch.zeros(20)
    one[5] = 1.0
    for noise in (0.0, 0.05, 0.1):
        moved = DC_SGD.adapt(state, released(one, [0.0] * 100, noise=noise, steps=4.0))  # a step's is twice that
        assert float(moved["C"]) == pytest.approx(2 * 1.1 / (1 + 100 * (2 * noise) ** 2), rel=0.03)
    for quiet in (released(one, asked=0.0), released(-one)):  # not asked; or noise swallowed every count
        assert float(DC_SGD.adapt(state, quiet)["C"]) == 2.0


@pytest.mark.parametrize("sigma", [0.8, 1.2, 3.0])
def test_dc_sgd_noises_its_histogram_with_sigma_H(sigma: float) -> None:
    scale = compute_charged_scale(DC_SGD, DC_SGD.bounds({"C": torch.tensor([1.0])}), 0.1, sigma, 100.0)
    sigma_H = max(6.0, 5 * sigma)
    assert scale.extra == pytest.approx(sigma_H)
    assert float(scale.sum) == pytest.approx((sigma**-2 - sigma_H**-2) ** -0.5)


# --- wav ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 8, 64])
def test_haar_is_orthonormal_and_its_inverse_is_its_inverse(length: int) -> None:
    matrix = haar_transform(torch.eye(length, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(length, dtype=torch.float64))
    torch.testing.assert_close(inverse_haar_transform(matrix), torch.eye(length, dtype=torch.float64))


@pytest.mark.parametrize("dim", [1, 2, 5, 8, 13, 16])
def test_norms_of_levels_are_those_of_the_written_out_coefficients(dim: int) -> None:
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
    length = 1 << (dim - 1).bit_length()
    whole = haar_transform(torch.nn.functional.pad(x, (0, length - dim)))
    sizes = [1, *(1 << n for n in range(length.bit_length() - 1))]
    expected = torch.stack([part.norm(dim=1) for part in whole.split(sizes, dim=1)], dim=1)
    found = haar_level_norms(x, length.bit_length())
    torch.testing.assert_close(found, expected)
    if dim > 2:
        assert not torch.allclose(found.flip(1), expected), "coarse to fine, not the other way round"


def test_a_lopsided_gradient_adds_no_more_than_C_to_sums_in_the_other_basis() -> None:
    """Ten outputs on a constant picture: huge in coarse levels, next to nothing in fine ones."""
    d, C = 7850, 1.0
    shape = ModelFacts(d, (7840, 10))
    state = WAV.init(Clip(C0=C), shape)
    transform = WAV.view(state, 0, 10).transform
    assert transform is not None
    assert transform.norms is not None
    generator = torch.Generator().manual_seed(0)
    rows = 0.1 * torch.randn(51, d, generator=generator)
    outputs = torch.randn(10, generator=generator)
    rows[-1] = torch.cat([1e8 * outputs.repeat_interleave(784), outputs])
    norms = transform.norms(rows)[None]
    factors = (state["C"] / norms.clamp_min(1e-30)).clamp_max(1.0)

    def added(factors: torch.Tensor) -> float:
        """How far the last row moves the sum."""
        tape = MatrixTape(rows, torch.zeros(1, 51), torch.zeros(d, dtype=torch.int64), transform)
        without = factors.clone()
        without[0, -1] = 0
        return float((tape.weighted_sum(factors, 1) - tape.weighted_sum(without, 1)).norm())

    assert added(limit_group_imbalance(factors, norms)) <= 1.001 * C
    assert added(factors) > 2 * C, "rounding of the huge part stays behind in the small levels"
    usual = norms[:, :-1], factors[:, :-1]
    assert torch.equal(limit_group_imbalance(usual[1], usual[0]), usual[1])


def test_haar_of_four_numbers_by_hand() -> None:
    found = haar_transform(torch.tensor([4.0, 2.0, 5.0, 5.0]))
    assert found.tolist() == pytest.approx([8.0, -2.0, math.sqrt(2), 0.0])  # mean, coarse, fine, fine


@pytest.mark.parametrize("groups", [(), (0, 1), (0, 1, 0)])
def test_wav_goes_there_and_back_and_bounds_the_whole_by_C(groups: tuple[int, ...]) -> None:
    tensors = (7, 4, 3)[: max(2, len(groups))]
    shape = ModelFacts(sum(tensors), tensors, groups)
    state = WAV.init(Clip(C0=3.0), shape)
    assert float(torch.linalg.vector_norm(state["C"])) == pytest.approx(3.0)
    transform = WAV.view(state, 0, 10).transform
    assert transform is not None
    gradients = torch.randn(5, shape.dim, generator=torch.Generator().manual_seed(0))
    there = transform.forward(gradients)
    torch.testing.assert_close(there.norm(dim=1), gradients.norm(dim=1))
    torch.testing.assert_close(transform.inverse(there.sum(dim=0)), gradients.sum(dim=0), rtol=1e-4, atol=1e-5)
    assert len(transform.groups) == there.shape[1]
    assert int(transform.groups.max()) + 1 == len(state["C"])


def test_haar_with_one_group_is_dp_sgd_in_other_coordinates() -> None:
    """Clipping is the same exactly; noise that is the same in all directions stays so under a rotation."""

    def one_group(settings: Clip, shape: ModelFacts) -> RuleState:
        state = WAV.init(settings, shape)
        return {**state, "C": torch.tensor([settings.C0]), "level": torch.zeros_like(state["level"])}

    flat = dataclasses.replace(WAV, init=one_group, clip=clip_to_C, bounds=bound_C)
    for C0 in (0.05, 1e3):
        plain, turned = (one_client(toy_problem(rule), C0=C0, steps=3).delta for rule in (FIXED, flat))
        torch.testing.assert_close(turned, plain, rtol=1e-4, atol=1e-6)
    by_level = one_client(toy_problem(WAV), C0=0.05, steps=3).delta
    assert not torch.allclose(by_level, one_client(toy_problem(FIXED), C0=0.05, steps=3).delta, rtol=1e-2)

    silent: dict[str, Any] = {"rate": 1e-9, "sigma": 1.5, "C0": 2.0, "lr": 1e-9}
    problem = toy_problem(flat)
    noise = torch.cat(
        [
            one_client(dataclasses.replace(problem, randomness=SeededRandomness(seed)), **silent).delta
            for seed in range(40)
        ]
    )
    noise = noise * problem.party(0).units
    assert scistats.kstest(noise.numpy(), scistats.norm(0, 3.0).cdf).pvalue > 1e-4
    for wrong in (2.0, 4.5):
        assert scistats.kstest(noise.numpy(), scistats.norm(0, wrong).cdf).pvalue < 1e-6
    basis = WAV.view(WAV.init(Clip(), problem.shape), 0, 10).transform
    assert basis is not None
    columns = torch.stack([basis.inverse(row) for row in torch.eye(len(basis.groups))])  # [m, d]
    torch.testing.assert_close(columns.T @ columns, torch.eye(problem.layout.dim), rtol=1e-4, atol=1e-5)


def test_clipping_every_level_to_C_is_rejected_as_too_little_noise() -> None:
    greedy = dataclasses.replace(
        WAV,
        clip=lambda stats, state: (
            clip_to_C(stats, {"C": torch.linalg.vector_norm(state["C"])})[0],
            *_rest(stats, state),
        ),
        sound=False,
    )
    delta, reach, _, _ = _moved(greedy, "flat", 10.0)
    assert delta > 1.2 * reach


def _rest(stats: Stats, state: RuleState) -> tuple[torch.Tensor, RuleState]:
    return clip_to_C(stats, state)[1], state


def test_wav_shrinks_noise_and_keeps_a_strong_signal() -> None:
    shape = ModelFacts(1024, (1024,))
    signal = torch.zeros(1024)
    signal[:512] = 30.0  # one coarse coefficient and the mean
    noised = haar_transform(signal + torch.randn(1024, generator=torch.Generator().manual_seed(0)))
    errors = {}
    for shrink in (0.0, 2.0):
        transform = WAV.view(WAV.init(Clip(shrink=shrink), shape), 0, 10).transform
        assert transform is not None
        errors[shrink] = float((transform.inverse(noised) - signal).norm())
    assert errors[2.0] < 0.5 * errors[0.0]


# --- moo-client, moo-scalar ---------------------------------------------------------------------


def test_moo_client_is_moo_c_with_a_state_for_each_client() -> None:
    rule = find_rule("moo-client")
    assert (rule.where, rule.when, rule.adapt) == ("client", "round", MOO_C.adapt)


def test_moo_scalar_follows_a_trajectory_computed_by_hand() -> None:
    state = MOO_SCALAR.init(Clip(C0=2.0, eta_C=0.1, beta=0.5, kappa=0.01), FLAT)
    first = MOO_SCALAR.view(state, 0, 10).direction
    assert first is not None
    assert not first.any()
    state = MOO_SCALAR.adapt(state, released([0.9], [3.0, 0.0]))  # no memory yet: C stays
    assert float(state["C"]) == pytest.approx(2.0)
    direction = MOO_SCALAR.view(state, 1, 10).direction
    assert direction is not None
    assert direction.tolist() == pytest.approx([-1.0, 0.0])  # of gradients: against the update
    grown = MOO_SCALAR.adapt(state, released([0.03], [0.0, 0.0]))  # A = 0.03 > kappa C = 0.02
    assert float(grown["C"]) == pytest.approx(2.0 * math.exp(0.1))
    shrunk = MOO_SCALAR.adapt(state, released([0.01], [0.0, 0.0]))
    assert float(shrunk["C"]) == pytest.approx(2.0 * math.exp(-0.1))
    quiet = MOO_SCALAR.adapt(state, released([0.0], [1.0, 1.0], asked=0.0))
    assert torch.equal(quiet["C"], state["C"])
    assert not torch.equal(quiet["memory"], state["memory"])


def test_moo_scalar_sees_clipped_units_only_and_each_by_one_at_most() -> None:
    state = {**MOO_SCALAR.init(Clip(C0=1.0), FLAT), "memory": torch.tensor([-4.0, 0.0])}
    stats = dataclasses.replace(seen([0.5, 2.0, 5.0, 0.0]), dots=torch.tensor([0.5, 1.0, -5.0, 0.0]))
    _, extra, _ = MOO_SCALAR.clip(stats, state)
    assert extra.flatten().tolist() == pytest.approx([0.0, 0.5, -1.0, 0.0])


def _loss_after_a_step(C: float, noise: torch.Tensor) -> tuple[float, float, float]:
    """L(theta'(C)) on other data, its derivative by the formula, and the same with the sum's sign lost."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(12, 4, generator=generator).double(), torch.arange(12) % 3
    x_new, y_new = torch.randn(40, 4, generator=generator).double(), torch.arange(40) % 3
    names = [name for name, _ in model.named_parameters()]
    theta = 0.5 * torch.randn(len(noise), generator=generator).double()

    def loss(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pieces = flat.split([p.numel() for p in model.parameters()])
        shaped = {n: piece.view_as(p) for n, piece, p in zip(names, pieces, model.parameters(), strict=True)}
        return nn.functional.cross_entropy(functional_call(model, shaped, (x,)), y)

    gradients = torch.stack([torch.func.grad(loss)(theta, x[i : i + 1], y[i : i + 1]) for i in range(12)])  # [B, d]
    eta, sigma, B = 0.7, 1.3, 10.0
    norms = gradients.norm(dim=1)
    assert 0 < int((norms > C).sum()) < 12
    step = (gradients * (C / norms).clamp(max=1.0)[:, None]).sum(dim=0) + sigma * C * noise
    after = theta - eta / B * step
    slope = torch.func.grad(loss)(after, x_new, y_new)
    units = (gradients / norms[:, None])[norms > C].sum(dim=0)
    derivative = -eta / B * float(slope @ (units + sigma * noise))
    unclipped = -eta / B * float(slope @ ((gradients / norms[:, None]).sum(dim=0) + sigma * noise))
    return float(loss(after, x_new, y_new)), derivative, unclipped


def test_the_hypergradient_that_moo_scalar_rests_on_is_the_derivative_of_the_loss_by_C() -> None:
    size = sum(p.numel() for p in nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).parameters())
    noise = torch.randn(size, generator=torch.Generator().manual_seed(3)).double()
    h = 1e-6
    C = 1.4
    difference = (_loss_after_a_step(C + h, noise)[0] - _loss_after_a_step(C - h, noise)[0]) / (2 * h)
    _, derivative, unclipped = _loss_after_a_step(C, noise)
    assert derivative == pytest.approx(difference, rel=1e-6)
    # the same difference rejects a formula that counts unclipped units, and one with the other sign
    assert unclipped != pytest.approx(difference, rel=1e-3)
    assert -derivative != pytest.approx(difference, rel=1e-3)


# --- the same rules at client level -------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [name for name, r in RULES.items() if r.where == "server" and r.private and name != "hyfree"]
)
def test_rules_of_the_server_clip_whole_updates_too(rule: str) -> None:
    """The mechanism charges what it releases, or federate stops the run; statistics go out every round."""
    results = play(client_federation(clip={"rule": rule, "statistics_interval": 3.0, "C0": 0.1}, train={"rounds": 4}))
    assert len(results) == 4
    assert all(math.isfinite(result.epsilon) for result in results)
    assert all(0 < result.C[0] < math.inf for result in results)


def test_quantile_at_client_level_is_andrews_own() -> None:
    """Four parties, half of them expected: m = 2, sigma_b = max(m/20, 5 z), the count over those who came."""
    federation = client_federation(4, clip={"rule": "quantile", "C0": 1e-3, "eta_C": 0.2}, train={"rounds": 3})
    terms = federation.plan.central
    assert terms is not None
    scale = compute_charged_scale(QUANTILE, QUANTILE.bounds({"C": torch.tensor([2.0])}), 0.5, 1.0, terms.cohort)
    assert scale.extra == pytest.approx(5.0)
    quiet = dataclasses.replace(
        federation, problem=dataclasses.replace(federation.problem, randomness=Silent())
    )  # all four come, no noise: b~ = 4 (0 - 1/2) / 2 + 1/2 = -1/2, and C grows by exp(0.2 (1/2 + 1/2))
    C = [result.C[0] for result in play(quiet)]
    assert C[1] / C[0] == pytest.approx(math.exp(0.2))


def test_a_noise_schedule_moves_the_servers_noise() -> None:
    federation = client_federation(privacy={"sigma": 2.0, "unit": "client", "noise_schedule": "growth", "rho_mu": 0.5})
    events = [federation.plan.events(0, t) for t in range(6)]
    assert [as_gaussian(event[0]).sigma for event in events] == pytest.approx([2.0 * 0.5 ** (t / 6) for t in range(6)])
    results = play(federation)
    assert results[-1].epsilon == pytest.approx(federation.plan.compute_epsilon_at(6, 0))
