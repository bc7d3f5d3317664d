"""What the tests of engines share."""

from __future__ import annotations

import pytest

from fulcrum.privacy import exact_noise


@pytest.fixture(autouse=True)
def fine_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid as fine as float32's rounding.

    Simulations of stacked runs leave out the rounding of a release to its grid. With this grid their results equal
    those of the reference engine to float32's rounding; `test_streams` looks at the grid as it is.
    """
    monkeypatch.setattr(exact_noise, "GRID_BITS", 26)
