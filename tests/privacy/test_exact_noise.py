"""Releases are integers with exactly the probabilities of a rounded Gaussian; rounding is certified."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats as scistats

from fulcrum.privacy import exact_noise
from fulcrum.privacy.exact_noise import choose_grid, decide_in_high_precision, release_on_grid, round_with_margin
from fulcrum.rng import SecureRandomness, SeededRandomness
from fulcrum.rng.normals import bound_error, count_normal_words, words_to_normals


def chi_squared_p(integers: np.ndarray, x: float, scale: float, grid: float) -> float:
    """Against the exact probability of each integer n: the Gaussian's mass on ((n - 1/2) g, (n + 1/2) g)."""
    low, high = integers.min(), integers.max()
    edges = (np.arange(low, high) + 0.5) * grid
    mass = np.diff(np.concatenate([[0.0], scistats.norm.cdf(edges, loc=x, scale=scale), [1.0]]))
    counts = np.bincount(integers - low, minlength=len(mass)).astype(float)
    expected = mass * len(integers)
    # Cells with few expected draws are pooled: chi-squared needs at least five in each.
    order = np.argsort(expected)
    small = np.cumsum(expected[order]) < 25
    pooled = order[: small.sum() + 1]
    rest = np.setdiff1d(np.arange(len(mass)), pooled)
    seen, wanted = np.append(counts[rest], counts[pooled].sum()), np.append(expected[rest], expected[pooled].sum())
    return float(scistats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue)


def coarse(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coarse grid, so that single integers have many draws."""
    monkeypatch.setattr(exact_noise, "GRID_BITS", bits)


@pytest.mark.parametrize("source", [SeededRandomness(11), SecureRandomness()], ids=["seeded", "secure"])
def test_a_million_integers_have_their_exact_probabilities(
    source: SeededRandomness | SecureRandomness, monkeypatch: pytest.MonkeyPatch
) -> None:
    coarse(3, monkeypatch)
    scale, x = 7.3, 0.4567
    released = release_on_grid(torch.full((1_000_000,), x), scale, source, ("noise", 0, 0, 0))
    assert released.grid == 0.5
    integers = released.integers.numpy()
    x32 = float(torch.tensor(x))
    # Secure draws are new ones each time: right ones fail once in 1e10 times. Wrong scales by 2% have p-values of
    # 1e-113 with a factor of 1e10 either way; by 1% it was 1e-19 and 1e5, so that one run in a thousand failed.
    assert chi_squared_p(integers, x32, scale, released.grid) > 1e-10
    for wrong_x, wrong_scale in ((x32 + 0.15, scale), (x32, scale * 1.02), (x32, scale * 0.98)):
        assert chi_squared_p(integers, wrong_x, wrong_scale, released.grid) < 1e-6
    truncated = np.trunc((x32 + source.normal(("noise", 0, 0, 0), 1_000_000).numpy() * scale) / released.grid)
    assert chi_squared_p(truncated.astype(np.int64), x32, scale, released.grid) < 1e-6  # a sampler that truncates
    halved = integers // 2 * 2
    assert chi_squared_p(halved, x32, scale, released.grid) < 1e-6  # a sampler that loses the last bit


def test_the_grid_is_a_power_of_two_that_follows_the_noise_alone() -> None:
    for scale in (1e-9, 0.3, 1.0, 1.999, 2.0, 7.3, 1e9):
        grid = choose_grid(scale)
        assert math.frexp(grid)[0] == 0.5
        assert 2**20 <= scale / grid < 2**21
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="finite scale"):
            choose_grid(wrong)


def exact_normal(first: int, second: int, sine: bool) -> mpmath.mpf:
    """The middle of what the words allow, by an independent library."""
    with mpmath.workdps(60):
        U = (mpmath.mpf(first % 2**64) + mpmath.mpf("0.5")) / mpmath.mpf(2) ** 64
        angle = mpmath.pi * (mpmath.mpf(second) + mpmath.mpf("0.5")) / mpmath.mpf(2) ** 63
        return mpmath.sqrt(-2 * mpmath.log(U)) * (mpmath.sin(angle) if sine else mpmath.cos(angle))


EXTREME_WORDS = (0, 1, 2, 1000, 2**20, 2**40, 2**62, 2**63 - 1, -(2**63), -(2**62), -(2**40), -1000, -2, -1)


def test_float64_normals_are_within_their_stated_error() -> None:
    random = SeededRandomness(2).words(("noise", 0), 400)
    first = torch.cat([random[:200], torch.tensor([w for w in EXTREME_WORDS for _ in EXTREME_WORDS])])
    second = torch.cat([random[200:], torch.tensor([w for _ in EXTREME_WORDS for w in EXTREME_WORDS])])
    draws = words_to_normals(torch.cat([first, second]), 2 * len(first))
    error = bound_error(draws.radius, draws.uniform)
    both = zip(draws.values.tolist(), torch.cat([error, error]).tolist(), strict=True)
    largest = 0.0
    for j, (value, bound) in enumerate(both):
        i = j % len(first)
        away = abs(mpmath.mpf(value) - exact_normal(int(first[i]), int(second[i]), j >= len(first)))
        assert away <= bound
        largest = max(largest, float(away / mpmath.mpf(2) ** -52)) if 1e-3 < abs(value) < 4 else largest
    assert largest > 0  # the bound is about something
    assert float(error[:200].median()) < 2.0**-40  # and is not so loose that everything would be in doubt


def test_certified_rounding_agrees_with_arbitrary_precision_on_all_coordinates() -> None:
    source, key, count, scale = SeededRandomness(3), ("noise", 0, 0, 0), 600, 0.73
    x = torch.randn(count, generator=torch.Generator().manual_seed(0)).double() * 10
    grid = choose_grid(scale)
    words = source.words(key, count_normal_words(count))
    integers, doubtful = round_with_margin(x, scale, grid, words_to_normals(words, count))
    assert not doubtful.any()  # a few in a million are
    half = count // 2
    for j in range(0, count, 3):
        exact = exact_normal(int(words[j % half]), int(words[half + j % half]), j >= half)
        with mpmath.workdps(60):
            wanted = int(mpmath.floor((mpmath.mpf(float(x[j])) + mpmath.mpf(scale) * exact) / grid + mpmath.mpf("0.5")))
        assert int(integers[j]) == wanted
        pair = (int(words[j % half]), int(words[half + j % half]))
        assert decide_in_high_precision(float(x[j]), scale, grid, pair, j >= half, further(5, 9)) == wanted


def further(first: int, second: int) -> Callable[[int], tuple[int, int]]:
    """Further bits that are always these two words."""
    return lambda extension: (first, second)


def test_coordinates_on_a_boundary_are_flagged_and_decided_by_further_bits() -> None:
    """x is chosen so that x + s N lies on a boundary up to float64's error: the further bits decide, both ways."""
    source, key, scale = SeededRandomness(4), ("noise", 0, 0, 0), 1.0
    grid = choose_grid(scale)
    words = source.words(key, 2)
    draws = words_to_normals(words, 2)
    pair = (int(words[0]), int(words[1]))
    exact = exact_normal(*pair, False)
    with mpmath.workdps(60):
        target = (mpmath.floor(exact / grid) + mpmath.mpf("0.5")) * grid - exact
    x = torch.tensor([float(target), 0.0], dtype=torch.float64)
    integers, doubtful = round_with_margin(x, scale, grid, draws)
    assert doubtful.tolist() == [True, False]
    ends = ((0, 0), (2**64 - 1, 2**64 - 1))
    low, high = (decide_in_high_precision(float(x[0]), scale, grid, pair, False, further(*bits)) for bits in ends)
    assert abs(low - high) <= 1
    found = {
        decide_in_high_precision(float(x[0]) + shift * 2.0**-60, scale, grid, pair, False, further(2**63, 2**63))
        for shift in (-8, 8)
    }
    assert len(found) == 2  # a shift far below float64's error is told apart
    released = release_on_grid(x, scale, source, key)
    assert int(released.integers[1]) == int(integers[1])
    assert int(released.integers[0]) in found


def test_further_bits_are_the_same_for_both_numbers_of_a_pair_and_only_for_them() -> None:
    read = exact_noise._read_further_words
    source, key = SeededRandomness(5), ("noise", 1, 2, 3)
    assert read(source, key, 7)(0) == read(source, key, 7)(0)
    others = {
        read(source, key, 7)(0),
        read(source, key, 7)(1),
        read(source, key, 8)(0),
        read(source, ("noise", 1, 2, 4), 7)(0),
    }
    assert len(others) == 4
    assert read(source, key, 7)(0) != tuple(w % 2**64 for w in source.words(key, 2).tolist())


def test_extreme_uniforms_give_finite_integers() -> None:
    grid = choose_grid(1.0)
    words = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63), 0, -1, 1, 2**63 - 1, -(2**63)])
    integers, doubtful = round_with_margin(torch.zeros(10, dtype=torch.float64), 1.0, grid, words_to_normals(words, 10))
    assert doubtful[0]  # 64 zero bits: only further bits know how far out it is
    for j in torch.nonzero(doubtful).flatten().tolist():
        pair = (int(words[j % 5]), int(words[5 + j % 5]))
        value = decide_in_high_precision(0.0, 1.0, grid, pair, j >= 5, further(12345, 67890))
        assert abs(value) * grid < 20
    assert float(integers.abs().max()) * grid < 20


def test_numbers_that_are_not_finite_count_as_zero() -> None:
    source, key = SeededRandomness(6), ("noise", 0)
    bad = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    assert torch.equal(
        release_on_grid(bad, 1.0, source, key).integers, release_on_grid(torch.zeros(4), 1.0, source, key).integers
    )


def test_decimal_precision_grows_with_the_bits() -> None:
    value, error = exact_noise._enclose_normal(2**127 + 12345, 2**126 + 999, 128, False)
    assert error < Decimal(2) ** -100
    assert abs(value) < 2
