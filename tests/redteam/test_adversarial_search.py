"""The adversarial search finds nothing in a fixed number of tries, and finds what is there to be found."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from fulcrum.gradients import outer_products
from fulcrum.gradients.rounding import SquaredNorms
from fulcrum.gradients.stacked import passes
from fulcrum.privacy import bounds
from support.scripts import load_script

CPU = torch.device("cpu")
TRIES = 700


def load_search() -> ModuleType:
    return load_script("benchmarks/adversarial_search.py")


@pytest.mark.slow
def test_the_search_finds_nothing() -> None:
    search = load_search()
    found = search.search(TRIES, CPU, seed=1)
    assert sum(worst.tries for worst in found.values()) == TRIES
    for cell in search.CELLS:
        assert 0.9 < found[cell.name].ratio <= cell.limit, (cell, found[cell.name])


def careless(inputs: torch.Tensor, grads: torch.Tensor) -> SquaredNorms:
    """Ghost norms as 243f1c8 had them in the stacked engine."""
    gram, other = torch.bmm(inputs.transpose(1, 2), inputs), torch.bmm(grads, grads.transpose(1, 2))
    squares = (gram * other).sum(dim=(1, 2)).double().clamp_min(0)
    return SquaredNorms(squares, squares, squares)


@pytest.mark.slow
def test_the_search_finds_norms_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    search = load_search()
    for module in (passes, outer_products):
        monkeypatch.setattr(module, "ghost_squared_norms", careless)
    cells = tuple(cell for cell in search.CELLS if cell.engine == "stacked" and cell.arithmetic == "proven")
    found = search.search(600, CPU, seed=1, cells=cells)
    assert max(worst.ratio for worst in found.values()) > 1.001  # rounding alone stays below 1


def test_the_search_finds_a_missing_clamp(monkeypatch: pytest.MonkeyPatch) -> None:
    search = load_search()

    def loose(factors: torch.Tensor, C: torch.Tensor, limits: Any, share: float = 1.0) -> torch.Tensor:
        return factors * 1.001

    cells = (search.Cell("parallel", "float32", "proven"),)
    assert search.search(12, CPU, seed=0, cells=cells)[cells[0].name].ratio <= 1
    monkeypatch.setattr(bounds, "limit_factors", loose)
    assert search.search(12, CPU, seed=0, cells=cells)[cells[0].name].ratio > 1
