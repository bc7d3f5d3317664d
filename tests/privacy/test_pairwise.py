"""Shares of noise, grids, masks and their graph: each claim against brute force, and against a wrong form of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import compute_epsilon
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.pairwise import graph
from fulcrum.privacy.pairwise.graph import COMPLETE_UP_TO, can_be_cut_off, is_connected_without, list_neighbours
from fulcrum.privacy.pairwise.integers import (
    COARSEST,
    add_keystreams,
    add_masks,
    choose_shared_grid,
    draw_mask,
    keep_low_bits,
    pack_message,
    round_to_message,
    sum_messages,
    unpack_message,
    wrap,
)
from fulcrum.privacy.pairwise.persons import compose_two_parties, compute_pair_epsilon
from fulcrum.privacy.pairwise.shares import (
    compute_effective_sigmas,
    compute_own_variances,
    count_colluders,
    find_least_honest_variance,
)
from fulcrum.rng import SeededRandomness
from fulcrum.types import MessageTerms

Shares = Callable[[Sequence[float], int], Sequence[float]]


# --- how much noise each party adds -----------------------------------------------------------------


def lacking(shares: Shares, needs: Sequence[float], c: int) -> float:
    """By how much the worst honest sum lacks noise, over all honest parties and all sets of c colluders."""
    own, parties = shares(needs, c), range(len(needs))
    gaps = [
        needs[k] - sum(own[j] for j in parties if j not in colluding)
        for colluding in itertools.combinations(parties, c)
        for k in parties
        if k not in colluding
    ]
    return max(gaps) / max(needs)


def random_needs(seed: int) -> list[float]:
    generator = np.random.default_rng(seed)
    spread = generator.choice([0.0, 0.5, 3.0])
    needs: list[float] = np.exp(spread * generator.standard_normal(generator.integers(1, 8))).tolist()
    return needs


@pytest.mark.parametrize("seed", range(60))
def test_every_honest_set_has_enough_noise(seed: int) -> None:
    needs = random_needs(seed)
    for c in range(len(needs)):
        assert lacking(compute_own_variances, needs, c) <= 1e-12
        own = compute_own_variances(needs, c)
        assert sum(own) <= sum(needs) * (1 + 1e-8)  # never worse than each party's own noise
        for k in range(len(needs)):
            worst = min(
                sum(own[j] for j in range(len(needs)) if j not in colluding)
                for colluding in itertools.combinations([j for j in range(len(needs)) if j != k], c)
            )
            assert find_least_honest_variance(own, k, c) == pytest.approx(worst)


WRONG: dict[str, Shares] = {
    "over all parties in place of the honest ones": lambda needs, c: [sorted(needs)[-2] / len(needs)] * len(needs),
    "each its own need over H": lambda needs, c: [need / (len(needs) - c) for need in needs],
    "the largest adds no more than the others": lambda needs, c: [sorted(needs)[-2] / (len(needs) - c)] * len(needs),
    "the mean need": lambda needs, c: [sum(needs) / len(needs) / (len(needs) - c)] * len(needs),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shares_are_found(name: str) -> None:
    assert lacking(WRONG[name], [1.0, 2.0, 4.0, 9.0], 2) > 0.01


def test_no_smaller_total_would_do_for_up_to_half_of_the_parties() -> None:
    optimise = pytest.importorskip("scipy.optimize", reason="the least total comes from a linear program")
    for seed in range(12):
        needs = random_needs(seed)
        parties = range(len(needs))
        for c in range(len(needs) // 2 + 1):
            if c == len(needs):
                continue
            rows, limits = [], []
            for colluding in itertools.combinations(parties, c):
                honest = [j for j in parties if j not in colluding]
                rows.append([-1.0 if j in honest else 0.0 for j in parties])
                limits.append(-max(needs[k] for k in honest))
            least = optimise.linprog([1.0] * len(needs), A_ub=rows, b_ub=limits).fun
            assert sum(compute_own_variances(needs, c)) == pytest.approx(least, rel=1e-6)


def test_equal_parties_share_one_dose_among_the_honest() -> None:
    assert compute_own_variances([4.0] * 10, 1) == pytest.approx([4 / 9] * 10)
    assert sum(compute_own_variances([4.0] * 10, 1)) == pytest.approx(4 * 10 / 9)  # what `moo` is told
    assert compute_effective_sigmas([4.0] * 10, [2.0] * 10, [4 / 9] * 10, 1) == pytest.approx([2.0] * 10)
    assert compute_effective_sigmas([4.0] * 10, [2.0] * 10, [4 / 9] * 10, 9) == pytest.approx([2 / 3] * 10)


def test_colluders_are_a_count_or_a_fraction() -> None:
    assert [count_colluders(given, 10) for given in (0, 1, 5, 0.5, 0.31, 0.3)] == [0, 1, 5, 5, 4, 3]
    for given in (10, 0.95):
        with pytest.raises(ConfigError, match="leaves no honest party"):
            count_colluders(given, 10)


# --- the graph of masks -----------------------------------------------------------------------------


@pytest.mark.parametrize("c", [0, 1, 2, 3])
def test_masks_connect_the_honest_whichever_c_parties_collude(c: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "LEAST_REACH", 0)  # as few as the condition allows
    count = COMPLETE_UP_TO + 1
    assert not any(can_be_cut_off(gone, count, c) for gone in range(c + 1))
    assert can_be_cut_off(len(list_neighbours(0, count, c)), count, c)
    assert all(is_connected_without(gone, count, c) for gone in itertools.combinations(range(count), c))
    pairs = {(place, other) for place in range(count) for other in list_neighbours(place, count, c)}
    assert all((other, place) in pairs and place != other for place, other in pairs)
    assert len(list_neighbours(0, count, c)) == 2 * -(-(c + 1) // 2)  # few, not all
    # With as many colluders as a party has neighbours, it would stand alone: the condition is not idle.
    assert not is_connected_without(list_neighbours(0, count, c), count, c)


def test_up_to_sixteen_parties_every_pair_has_a_mask() -> None:
    assert list_neighbours(3, 10, 1) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert len(list_neighbours(0, 17, 1)) == 16
    assert (
        len(list_neighbours(0, 100, 1)) == 16
    )  # no fewer: with more than c colluders the promise must not end at once
    assert len(list_neighbours(0, 100, 50)) == 52
    assert [can_be_cut_off(gone, 100, 1) for gone in (1, 15, 16, 99)] == [False, False, True, True]
    assert not any(can_be_cut_off(gone, 16, 1) for gone in range(16))


# --- integers and masks -----------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 15, 2001])  # not a multiple of a block of the cipher
def test_masks_cancel_bit_for_bit_and_hide_until_they_do(m: int) -> None:
    count = 5
    numbers = torch.Generator().manual_seed(1)
    plain = [torch.randint(-(2**31), 2**31, (m,), generator=numbers).to(torch.int32) for _ in range(count)]
    masks = {
        (i, j): draw_mask(bytes([i * 16 + j]) * 32, (0, 0, 0), m) for i in range(count) for j in range(i + 1, count)
    }

    def masked(k: int) -> torch.Tensor:
        pairs = [(k < j, masks[min(k, j), max(k, j)]) for j in range(count) if j != k]
        return add_masks(plain[k], pairs)

    messages = [masked(k) for k in range(count)]
    streams = [(k < 2, bytes([min(k, 2) * 16 + max(k, 2)]) * 32) for k in range(count) if k != 2]
    assert torch.equal(add_keystreams(plain[2], [(not earlier, key) for earlier, key in streams]), messages[2])
    assert torch.equal(sum_messages(messages), sum_messages(plain))
    assert not torch.equal(sum_messages(messages[:4]), sum_messages(plain[:4]))
    assert all((message == own).double().mean() < 0.01 for message, own in zip(messages, plain, strict=True))
    # A sign error, or a pair that one side leaves out: nothing cancels.
    assert not torch.equal(
        sum_messages([add_masks(messages[0], [(True, masks[0, 1])]), *messages[1:]]), sum_messages(plain)
    )


def test_integers_wrap_at_32_bits() -> None:
    given = torch.tensor([0, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 + 5, -(2**40) - 1])
    assert wrap(given).tolist() == [0, 2**31 - 1, -(2**31), -(2**31), 2**31 - 1, 5, -1]
    assert sum_messages([torch.tensor([2**31 - 1], dtype=torch.int32)] * 3).tolist() == [2**31 - 3]


def test_low_bits_of_messages_add_up_to_the_low_bits_of_their_sum() -> None:
    numbers = torch.Generator().manual_seed(2)
    whole = [torch.randint(-(2**31), 2**31, (501,), generator=numbers).to(torch.int32) for _ in range(4)]
    small = torch.randint(-(2**23), 2**23, (501,), generator=numbers).to(torch.int32)
    last = sum_messages([small, *(-each for each in whole)])  # masks that cancel but for a small sum
    for bits in (24, 32):
        sent = [unpack_message(pack_message(each, bits), bits) for each in (*whole, last)]
        assert all(len(pack_message(each, bits)) == 501 * bits // 8 for each in whole)
        assert torch.equal(keep_low_bits(sum_messages(sent), bits), small)
    assert not torch.equal(sum_messages(sent[:-1]), small)


@pytest.mark.parametrize("reach", [0.0, 1.0, 1e3, 1e6, 1e9, 1e15])
def test_the_grid_is_a_power_of_two_within_its_limits(reach: float) -> None:
    for scales in ([1.0], [0.03, 7.0], [1e-9, 1e-8], [63.9, 64.0]):
        grid, bits = choose_shared_grid(scales, reach)
        assert math.frexp(grid)[0] == 0.5
        assert COARSEST <= min(scales) / grid < 2**21
        assert bits in (24, 32)
        if min(scales) / grid >= 2 * COARSEST or bits == 24:  # finer than it must be, or short: everything fits
            assert reach < 2 ** (bits - 1) * grid


@pytest.mark.parametrize("needs", [[1.0, 1e-58, 1e-58], [1e60, 1.0, 1.0], [1e-60, 1e-60, 1e60], [1e12, 1e8, 1.0, 1.0]])
def test_one_grid_serves_parties_whose_needs_are_far_apart(needs: list[float]) -> None:
    """Certified rounding needs s / g < 2^21 of every party, and step 2 of the proof s / g >= 16 of every party."""
    for c in range(len(needs)):
        scales = [math.sqrt(v) for v in compute_own_variances(needs, c)]
        for reach in (0.0, 40 * max(scales), 1e20 * max(scales)):
            g, _ = choose_shared_grid(scales, reach)
            assert all(COARSEST <= scale / g < 2**21 for scale in scales)
    with pytest.raises(ValueError, match="too far apart"):  # the shares as they were: no grid serves both
        choose_shared_grid([1.0, 1e-29], 50.0)


def test_a_message_is_the_rounded_weighted_noised_sum() -> None:
    x, weight, scale = torch.linspace(-3, 3, 999, dtype=torch.float64), 0.37, 2.0
    grid, _ = choose_shared_grid([weight * scale], 50.0)
    source = SeededRandomness(3)
    found = round_to_message(x, scale, MessageTerms(weight, grid), (source, (0, 4, 0)))
    noise = source.normal(("noise", 0, 4, 0), 999)
    torch.testing.assert_close(found.double() * grid, weight * (x + scale * noise), rtol=0, atol=grid)
    with pytest.raises(ValueError, match="too coarse"):
        round_to_message(x, scale, MessageTerms(weight, 8 * scale), (source, (0, 4, 0)))


def rounded_sum_law(x: Sequence[float], ratio: float) -> np.ndarray:
    """The law of the sum of round(x_k + ratio N_k), on the integers -200..200."""
    support, total = np.arange(-200, 201), np.zeros(401)
    total[200] = 1.0
    for value in x:
        edges = (np.arange(-200, 202) - 0.5 - value) / ratio
        steps = np.array([0.5 * math.erfc(-edge / math.sqrt(2)) for edge in edges])
        total = np.convolve(total, np.diff(steps))[200:601]
    assert len(support) == len(total)
    return total


def test_the_sum_of_rounded_values_is_a_function_of_the_sum_but_for_a_stated_distance() -> None:
    def distance(ratio: float) -> float:
        one, other = rounded_sum_law([0.0, 0.0], ratio), rounded_sum_law([0.5, -0.5], ratio)  # the same sum of x
        return float(np.abs(one - other).sum() / 2)

    def bound(ratio: float) -> float:
        return 2 * 2 * 2 * math.exp(-2 * math.pi**2 * ratio**2 * (1 - 1 / 2))  # two laws, each within 2 H exp(...)

    for ratio in (0.4, 0.6, 0.8, 1.0):
        assert 0.05 * bound(ratio) < distance(ratio) <= bound(ratio)
    assert distance(0.25) > 0.1  # so coarse a grid would tell who holds what
    assert -2 * math.pi**2 * COARSEST**2 / 2 < math.log(10) * -1000


# --- persons at two parties -------------------------------------------------------------------------


def test_a_person_at_two_parties_is_priced_by_the_mixture_of_shifts() -> None:
    pytest.importorskip("dp_accounting")
    whole = compute_pair_epsilon(Gaussian(1.0, 2.0, 1), Gaussian(1.0, 2.0, 1), 1e-5)
    assert whole == pytest.approx(compute_epsilon([Gaussian(1.0, 1.0, 1)], 1e-5, "pld"), rel=1e-3)
    event = Gaussian(0.1, 3.5, 50)
    alone, added = (compute_epsilon([Gaussian(0.1, 3.5, count)], 1e-5, "pld") for count in (50, 100))
    both = compute_pair_epsilon(event, event, 1e-5)
    assert both > 1.1 * added > 1.1 * alone  # epsilons of separate releases would say too little
    assert compute_pair_epsilon(event, Gaussian(0.1, 1e6, 50), 1e-5) == pytest.approx(alone, rel=0.02)
    epsilon, delta = compose_two_parties(alone, alone, 1e-5, 1e-5)
    assert (epsilon, delta) == pytest.approx((2 * alone, 1e-5 + math.exp(alone) * 1e-5))
    assert compose_two_parties(math.inf, 1.0, 1e-5, 1e-5)[0] == math.inf
    assert compute_pair_epsilon(Gaussian(0.2, 1e-3, 3), Gaussian(0.2, 1e-3, 3), 1e-5) == math.inf  # beyond numbers
