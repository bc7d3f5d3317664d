"""The kernels of the stacked engine equal its torch code, number by number. Without triton: that torch stands in.

They run on a GPU if there is one. Without, triton's interpreter runs them, in a process of its own, since it must be
told before triton is imported:

    TRITON_INTERPRET=1 python -m pytest tests/gradients/test_stacked_kernels.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulcrum.gradients.group_norm import fused_group_norm
from fulcrum.gradients.precision import use_matmul_precision
from fulcrum.gradients.stacked import fused
from fulcrum.gradients.stacked import geometry as geo
from fulcrum.gradients.stacked.geometry import SlidingWindow
from fulcrum.gradients.stacked.plain import (
    ACTIVATION_BUILDERS,
    ParameterlessLayer,
    build_avg_pool,
    build_global_pool,
    build_max_pool,
    fuse_relu_into_pools,
)
from support.devices import DEVICE

DTYPES = [torch.float32, torch.bfloat16]
CONVOLUTIONS = [
    SlidingWindow(28, 28, 1, (8, 8), (2, 2), (3, 3)),
    SlidingWindow(13, 13, 16, (4, 4), (2, 2)),
    SlidingWindow(8, 8, 3, (3, 3), (1, 1), (1, 1)),
    SlidingWindow(7, 5, 3, (3, 2), (2, 3), (1, 0)),
    SlidingWindow(9, 11, 5, (2, 3), (3, 1), (0, 2)),
    SlidingWindow(9, 8, 2, (3, 3), (1, 2), (2, 1), (2, 1)),
]
POOLS = [
    SlidingWindow(14, 14, 16, (2, 2), (1, 1)),
    SlidingWindow(8, 6, 3, (2, 2), (2, 2)),
    SlidingWindow(7, 9, 5, (2, 2), (2, 2)),
    SlidingWindow(7, 6, 3, (3, 2), (1, 2)),
    SlidingWindow(9, 9, 2, (2, 2), (3, 3)),
    SlidingWindow(4, 4, 7, (4, 4), (4, 4)),
]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0, ties: bool = False) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return ((drawn * 2).round() if ties else drawn).to(DEVICE, dtype)


def same(found: Tensor | None, wanted: Tensor, dtype: torch.dtype) -> None:
    """The bits of torch's float32 result, rounded once where the kernel writes bf16 (the interpreter rounds down)."""
    assert found is not None
    assert not fused.kernel_failures
    assert found.dtype == dtype
    single = 1e-6 if found.is_cuda else 0.0  # a GPU divides by the window's area to the last bit or two
    bound = single if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found.float(), wanted, rtol=bound, atol=single)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", CONVOLUTIONS)
def test_patches_and_their_transpose(window: SlidingWindow, dtype: torch.dtype) -> None:
    h = numbers(2, 3, window.height, window.width, window.channels, dtype=dtype)
    found = fused.fused_extract_patches(h, window)
    assert found is not None
    assert torch.equal(found, geo.extract_patches(h, window))
    g = numbers(2, 3, window.positions, window.size, dtype=dtype, seed=1)
    if window.dilation == (1, 1):
        same(fused.fused_fold_patches(g, window), geo.fold_patches(g.float(), window), dtype)
    else:
        assert fused.fused_fold_patches(g, window) is None


def two_steps(window: SlidingWindow, mean: bool, relu: bool, h: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Relu and pooling one after the other, by torch."""
    kept = torch.relu(h) if relu else h
    if mean:
        out, back = geo.avg_pool_forward(kept, window), geo.avg_pool_backward(g, window)
    else:
        out, which = geo.max_pool_forward(kept, window)
        back = geo.max_pool_backward(g, which, window)
    return out, torch.ops.aten.threshold_backward(back, kept, 0) if relu else back


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("window", POOLS)
def test_pooling(window: SlidingWindow, mean: bool, relu: bool, dtype: torch.dtype) -> None:
    for ties in (False, True):
        h = numbers(2, 3, window.height, window.width, window.channels, dtype=dtype, ties=ties)
        g = numbers(2, 3, *window.out, window.channels, dtype=dtype, seed=1)
        out, back = two_steps(window, mean, relu, h.float(), g.float())
        found = fused.fused_pool(h, window, mean, relu, None)
        assert found is not None
        same(found[0], out, dtype)
        same(fused.fused_pool_backward(g, found[1], window, mean, relu), back, dtype)
        bias = numbers(2, window.channels, dtype=dtype, seed=2, ties=ties)
        with_bias = fused.fused_pool(h, window, mean, relu, bias)
        assert with_bias is not None
        shifted = h.float() + bias.float()[:, None, None, None]
        same(with_bias[0], two_steps(window, mean, relu, shifted, g.float())[0], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("positions", "inputs", "outputs"), [(25, 256, 32), (16, 576, 128), (64, 90, 7), (2, 5, 3)])
def test_ghost_norms(positions: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("triton's interpreter multiplies the bit patterns of bf16")
    a = numbers(3, positions, inputs, dtype=dtype)
    g = numbers(3, positions, outputs, dtype=dtype, seed=1)
    with use_matmul_precision("tf32", DEVICE):
        found = fused.fused_ghost_squared_norms(a, g)
    assert found is not None
    wanted = torch.bmm(g.double().transpose(1, 2), a.double()).square().sum(dim=(1, 2))
    torch.testing.assert_close(found.values, wanted, rtol=1e-5, atol=0)
    assert bool((found.bounds >= wanted).all())
    lengths = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(dim=1)
    torch.testing.assert_close(found.lengths.sqrt(), lengths, rtol=1e-3, atol=0)
    assert bool((found.lengths.sqrt() >= lengths).all())
    assert fused.fused_ghost_squared_norms(a.repeat(1, 65, 1), g.repeat(1, 65, 1)) is None


@pytest.mark.gpu
def test_a_number_that_is_not_one_goes_through() -> None:
    window = POOLS[0]
    for mean in (False, True):
        h = numbers(1, 1, 14, 14, 16, dtype=torch.float32)
        h[0, 0, 3, 3, 2] = torch.nan
        found = fused.fused_pool(h, window, mean, True, None)
        assert found is not None
        assert torch.equal(found[0].isnan(), two_steps(window, mean, True, h, found[0])[0].isnan())
        assert int(found[0].isnan().sum()) == 4


@pytest.mark.parametrize(
    "taken", ["by torch", "by torch alone backwards", pytest.param("fused", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("window", POOLS)
def test_relu_goes_into_the_pooling(window: SlidingWindow, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if taken == "by torch":
        monkeypatch.setattr(fused, "can_use_kernels", lambda values: False)
    if taken == "by torch alone backwards":
        monkeypatch.setattr(fused, "fused_pool_backward", lambda *given: None)
    relu = ACTIVATION_BUILDERS[torch.nn.ReLU](torch.nn.ReLU())
    whole = window.kernel == (window.height, window.width)
    pools = [
        build_max_pool(window),
        build_global_pool(window.height, window.width, window.channels) if whole else build_avg_pool(window),
    ]
    for mean, pool in zip((False, True), pools, strict=True):
        (step,) = fuse_relu_into_pools([relu, pool])
        assert isinstance(step, ParameterlessLayer)
        assert step.name.startswith("relu+")
        h = numbers(2, 3, window.height, window.width, window.channels, dtype=torch.float32, ties=True)
        g = numbers(2, 3, *window.out, window.channels, dtype=torch.float32, seed=1)
        bias = numbers(2, window.channels, dtype=torch.float32, seed=2)
        out, note = step.forward(h, bias)
        wanted, back = two_steps(window, mean, True, h + bias[:, None, None, None], g)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(step.backward(g, note), back)


def test_a_kernel_that_does_not_compile_leaves_the_work_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "kernel_failures", [])
    monkeypatch.setattr(fused, "_triton_status", lambda: (True, True))
    monkeypatch.setattr(fused, "_window_constants", lambda window: {"no such argument": 1})
    h = numbers(1, 2, 14, 14, 16, dtype=torch.float32)
    assert fused.fused_pool(h, POOLS[0], False, True, None) is None
    assert len(fused.kernel_failures) == 1
    assert fused.kernel_failures[0].startswith("no fused kernels: pool_kernel: ")
    assert not fused.can_use_kernels(h)


GROUP_NORMS = [
    ((3, 8, 5, 7), 4),
    ((2, 6, 4, 4), 2),
    ((2, 64, 8, 8), 32),
    ((2, 96, 3, 3), 32),
    ((2, 12, 50), 3),
    ((2, 10, 2, 3, 4), 5),
    ((2, 7, 9, 9), 1),
    ((2, 40, 66, 66), 8),
    ((2, 16), 4),
]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("shape", "groups"), GROUP_NORMS)
def test_group_norm_with_gradients_per_example(
    shape: tuple[int, ...], groups: int, last: bool, dtype: torch.dtype
) -> None:
    """Against float64 autograd with a weight and a bias of its own for every example; means far from zero."""
    middle = 100 * numbers(*shape[:2], *[1] * (len(shape) - 2), dtype=torch.float32, seed=2)
    images = (3 * numbers(*shape, dtype=torch.float32) + middle).to(dtype)
    images = images.movedim(1, -1).contiguous().movedim(-1, 1) if last else images
    weight, bias = numbers(shape[1], dtype=torch.float32, seed=3), numbers(shape[1], dtype=torch.float32, seed=4)
    images.requires_grad_()
    found = fused_group_norm(images, groups, weight, bias, 1e-5)
    assert found is not None
    out, differentiate = found
    assert out.stride() == images.stride()
    wide = images.detach().double().requires_grad_()
    each = [value.double().expand(shape[:2]).clone().requires_grad_() for value in (weight, bias)]
    by_example = [value.view(*shape[:2], *[1] * (len(shape) - 2)) for value in each]
    wanted = torch.nn.functional.group_norm(wide, groups, eps=1e-5) * by_example[0] + by_example[1]
    g = numbers(*shape, dtype=torch.float32, seed=5)
    grads = []
    out.register_hook(lambda arrived: grads.append(differentiate(arrived)))
    out.backward(g)
    wanted.backward(g.double())
    assert images.grad is not None
    assert wide.grad is not None
    assert relative_error(out.detach(), wanted.detach()) < 1e-5
    assert relative_error(images.grad, wide.grad) < (1e-4 if dtype == torch.float32 else 1e-2)
    for part, truth in zip((grads[0].weight, grads[0].bias), each, strict=True):
        assert truth.grad is not None
        assert relative_error(part, truth.grad) < 1e-5
        assert relative_error(part.flip(0), truth.grad) > 0.1  # another example's gradients are not these
