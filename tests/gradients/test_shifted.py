"""Convolutions on a CPU: gradients per example from shifted images equal those from patches, in all their uses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fulcrum.data.tasks import task_from_loss
from fulcrum.gradients import FEW_EXAMPLES, USUAL_EXAMPLES, GradientRecorder, outer_products
from fulcrum.gradients.outer_products import ConvGrad, WeightGradCost, materialise_grads
from fulcrum.gradients.param_grads import BlockedGrad, MaterialisedGrad
from fulcrum.models.layout import ParameterLayout

SHAPES = {
    "3x3": (5, 8, 5, (7, 6), (3, 3), (1, 1)),
    "wide-kernel": (2, 9, 4, (5, 8), (3, 2), (0, 1)),
    "5x5": (3, 8, 8, (6, 6), (5, 5), (2, 2)),
    "row": (1, 16, 3, (4, 4), (1, 3), (0, 0)),
    "one-pixel-out": (2, 8, 3, (3, 3), (3, 3), (0, 0)),
}


def make_conv(name: str, channels_last: bool = False) -> ConvGrad:
    count, c, o, size, kernel, padding = SHAPES[name]
    stream = torch.Generator().manual_seed(1)
    out = [n + 2 * p - k + 1 for n, p, k in zip(size, padding, kernel, strict=True)]
    a = torch.randn(count, c, *size, generator=stream, dtype=torch.float64)
    g = torch.randn(count, o, *out, generator=stream, dtype=torch.float64)
    if channels_last:
        a, g = (value.contiguous(memory_format=torch.channels_last) for value in (a, g))
    return ConvGrad(a, g, torch.empty(o, c, *kernel), (1, 1), (1, 1), 1, padding)


@pytest.mark.parametrize("scratch", [1, 2**20])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shifted_images_give_what_patches_give(
    name: str, channels_last: bool, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = make_conv(name, channels_last)
    monkeypatch.setitem(outer_products.SHIFTED_SCRATCH, "cpu", scratch)
    found = materialise_grads(part)
    assert isinstance(found, BlockedGrad)
    monkeypatch.setattr(outer_products, "SHIFTED_CHANNELS", 10**9)
    wanted = materialise_grads(part)
    assert isinstance(wanted, MaterialisedGrad)
    count, entries = len(part.g), part.weight.numel()
    factors, direction = torch.rand(count).double(), torch.randn(entries).double()
    for one, two in (
        (found.rows(), wanted.rows()),
        (found.slice(0, 1).rows(), wanted.slice(0, 1).rows()),
        (found.weighted_sum(factors), wanted.weighted_sum(factors)),
        (found.weighted_sum(factors, proven=True), wanted.weighted_sum(factors, proven=True)),
        (found.dots(direction), wanted.dots(direction)),
        (found.squared_norms().values, wanted.squared_norms().values),
        (found.squared_norms(fast=True).bounds, wanted.squared_norms(fast=True).bounds),
    ):
        torch.testing.assert_close(one, two)
    good = torch.arange(count) != 0
    torch.testing.assert_close(found.only(good).rows(), wanted.only(good).rows())
    with pytest.raises(AssertionError):  # the wrong case: another entry's place
        torch.testing.assert_close(found.rows().roll(1, dims=1), wanted.rows())


def test_other_convolutions_take_patches() -> None:
    part = make_conv("3x3")
    assert part.can_shift
    for changed in (
        ConvGrad(part.a, part.g, part.weight, (2, 2), (1, 1), 1, (1, 1)),
        ConvGrad(part.a, part.g, part.weight, (1, 1), (2, 2), 1, (1, 1)),
        ConvGrad(part.a.bfloat16(), part.g, part.weight, (1, 1), (1, 1), 1, (1, 1)),
        ConvGrad(part.a[:, :4], part.g, part.weight[:, :4], (1, 1), (1, 1), 1, (1, 1)),
    ):
        assert not changed.can_shift


def test_gradients_of_large_weights_are_not_kept_where_products_of_positions_are_cheaper() -> None:
    """With 128 tokens 256 x 1024 is written out; with 64, 192 x 768 is not; few positions never are."""
    like = torch.zeros(1)
    assert WeightGradCost.of(like, 1, 128, 256, 256).should_materialise
    assert WeightGradCost.of(like, 1, 128, 256, 1024).should_materialise
    assert not WeightGradCost.of(like, 1, 64, 192, 768).should_materialise
    assert WeightGradCost.of(like, 1, 256, 1152, 128).should_materialise
    assert not WeightGradCost.of(like, 1, 16, 576, 128).should_materialise


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(x + self.first(x))
        return out


@pytest.mark.parametrize(
    ("count", "pieces"),
    [(1, 1), (FEW_EXAMPLES - 1, 1), (FEW_EXAMPLES, 2), (51, 2), (102, 2), (2 * USUAL_EXAMPLES + 1, 4), (300, 8)],
)
def test_a_model_with_its_own_forward_goes_through_in_powers_of_two(count: int, pieces: int) -> None:
    """By shape alone: any number of workers has the same pieces, and two or four workers have as many each."""
    model = Residual()
    layout = ParameterLayout.of(model)
    recorder = GradientRecorder(model, layout, task_from_loss(partial(F.cross_entropy, reduction="none"), 3))
    x, y = torch.randn(count, 6), torch.zeros(count, dtype=torch.int64)
    found = recorder.split(layout.flatten(model), x, y)
    assert len(found) == pieces
    assert [piece.start for piece in found[1:]] == [piece.stop for piece in found[:-1]]
    assert (found[0].start, found[-1].stop) == (0, count)
