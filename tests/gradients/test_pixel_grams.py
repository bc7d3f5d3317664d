"""Products of patches from products of pixels, against the patches themselves."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from fulcrum.gradients.outer_products import ConvGrad, outer_squared_norms
from fulcrum.gradients.pixel_grams import list_phases, plan_pixel_products

SHAPES = [
    # image, kernel, stride, padding, dilation
    ((4, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((8, 6), (3, 3), (2, 2), (1, 1), (1, 1)),
    ((7, 9), (3, 2), (2, 3), (1, 0), (1, 1)),
    ((9, 8), (3, 3), (1, 2), (2, 2), (2, 1)),
    ((5, 5), (5, 5), (1, 1), (0, 0), (1, 1)),
    ((6, 6), (2, 2), (3, 3), (0, 0), (1, 1)),
    ((3, 3), (3, 3), (2, 2), (3, 3), (1, 1)),
]


def make_images(shape, channels=3, count=4):
    return torch.randn(count, channels, *shape, generator=torch.Generator().manual_seed(1))


def make_part(image, kernel, stride, padding, dilation, channels=3, outputs=2):
    a = make_images(image, channels)
    weight = torch.randn(outputs, channels, *kernel, generator=torch.Generator().manual_seed(2))
    out = F.conv2d(a, weight, None, stride, padding, dilation)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return ConvGrad(a, g, weight, stride, dilation, 1, padding)


@pytest.mark.parametrize(("image", "kernel", "stride", "padding", "dilation"), SHAPES)
@pytest.mark.parametrize("last", [False, True])
def test_the_gram_matrix_is_that_of_patches(image, kernel, stride, padding, dilation, last):
    a = make_images(image).double()
    if last:
        a = a.contiguous(memory_format=torch.channels_last)
    patches = F.unfold(a, kernel, dilation, padding, stride)  # [B, K, T]
    out = F.conv2d(a, a.new_zeros(1, 3, *kernel), None, stride, padding, dilation).shape[2:]
    plan = plan_pixel_products(image, kernel, tuple(out), stride, padding, dilation)
    assert plan is not None
    assert torch.allclose(plan.gram(a), patches.transpose(1, 2) @ patches, atol=1e-12)


def test_an_offset_less_is_seen():
    a = make_images((4, 4)).double()
    plan = plan_pixel_products((4, 4), (3, 3), (4, 4), (1, 1), (1, 1), (1, 1))
    assert plan is not None
    patches = F.unfold(a, (3, 3), 1, 1, 1)
    wrong = dataclasses.replace(plan, rows=tuple(dataclasses.replace(p, shifts=p.shifts[1:]) for p in plan.rows))
    assert not torch.allclose(wrong.gram(a), patches.transpose(1, 2) @ patches, rtol=1e-3)


@pytest.mark.parametrize(("image", "kernel", "stride", "padding", "dilation"), SHAPES)
def test_norms_are_those_of_written_gradients(image, kernel, stride, padding, dilation):
    part = make_part(image, kernel, stride, padding, dilation)
    wide = dataclasses.replace(part, a=part.a.double(), g=part.g.double(), weight=part.weight.double())
    truth = wide.rows().square().sum(dim=1)
    found = outer_squared_norms(part, fast=True)
    assert torch.allclose(found.values, truth, rtol=1e-5)
    assert bool((found.bounds >= truth).all())


def test_a_late_layer_takes_pixels_and_one_with_few_outputs_does_not():
    late = make_part((4, 4), (3, 3), (1, 1), (1, 1), (1, 1), channels=64, outputs=64)
    assert late.pixel_products is not None
    assert late.size.prefers_ghost_norms
    few = make_part((16, 16), (3, 3), (8, 8), (0, 0), (1, 1), channels=8)  # patches do not overlap
    assert few.pixel_products is None


def test_phases_of_a_stride_of_two():
    even, odd = sorted(list_phases(8, 3, 2, 1, 1), key=lambda phase: phase.first)
    assert (even.count, even.shifts) == (4, (0,))
    assert (odd.count, odd.shifts) == (4, (-1, 0))
