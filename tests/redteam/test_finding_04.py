"""Finding 4: secure noise broke in float32. One release told a present target from an absent one.

At 243f1c8 a float64 draw was cast to float32, scaled and added in float32. The sum x + s N then lies on another set of
floats for x = C than for x = 0: some values occur for one of them only. Now x + s N is rounded to one public grid, the
same set of integers for every x.
"""

from __future__ import annotations

import torch

from fulcrum.privacy.exact_noise import choose_grid, release_on_grid
from fulcrum.rng import SecureRandomness

SIGMA, TRIALS = 7.3, 200_000


def reachable_in_float32(values: torch.Tensor, x: float) -> torch.Tensor:
    """Whether each value can be x + float32(sigma n) for a float32 n near it: the red team's test."""
    scale = torch.tensor(SIGMA)
    n = ((values.double() - x) / SIGMA).float()
    found = torch.zeros(len(values), dtype=torch.bool)
    for step in range(-8, 9):
        near = (n.view(torch.int32) + step).view(torch.float32)
        found |= (torch.tensor(x) + near * scale) == values
    return found


def test_the_old_release_gave_the_target_away() -> None:
    source = SecureRandomness()
    n = source.normal(("noise", 0), TRIALS).float()
    absent, present = n * torch.tensor(SIGMA), torch.tensor(1.0) + n * torch.tensor(SIGMA)
    accused = [float((~reachable_in_float32(values, 0.0)).double().mean()) for values in (absent, present)]
    assert accused[0] == 0
    assert accused[1] > 0.05  # values that x = 0 cannot give: each of them is proof


def test_both_neighbours_have_the_same_set_of_releases_now() -> None:
    """For any x the releases are exactly the multiples of g; no integer is impossible for one of the two."""
    grid = choose_grid(SIGMA)
    for x in (0.0, 1.0, 1 / 3, 1e-9, 12345.678):
        released = release_on_grid(
            torch.full((TRIALS,), x, dtype=torch.float64), SIGMA, SecureRandomness(), ("noise", 0)
        )
        assert released.grid == grid
        low = released.integers & 0xFF  # the low bits are uniform whatever x is: nothing is left to look at
        counts = torch.bincount(low, minlength=256).double()
        statistic = float(((counts - TRIALS / 256) ** 2 / (TRIALS / 256)).sum())
        assert statistic < 460  # 255 degrees of freedom: mean 255, standard deviation 23; above once in 1e13 times
    old = 1.0 + SecureRandomness().normal(("noise", 1), TRIALS).float() * torch.tensor(SIGMA)
    counts = torch.bincount((old.double() * 2.0**24).to(torch.int64) & 0xFF, minlength=256).double()
    assert float(((counts - TRIALS / 256) ** 2 / (TRIALS / 256)).sum()) > 460  # float32: the low bits are mostly zero
