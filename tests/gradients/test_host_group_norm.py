"""Group norm on a CPU, compiled and by PyTorch's operations: against autograd in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fulcrum.data.tasks import task_from_loss
from fulcrum.gradients import GradientRecorder, compiled, host_group_norm
from fulcrum.models.layout import ParameterLayout

TASK = task_from_loss(partial(F.cross_entropy, reduction="none"), 3)


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With compiled code where there is some, and without."""
    if request.param == "plain":
        monkeypatch.setenv("FULCRUM_COMPILE", "0")
    compiled.find_kernels.cache_clear()
    if request.param == "compiled" and compiled.find_kernels() is None:
        pytest.skip(f"there is no compiled code here: {compiled.compile_failures[-1]}")
    yield request.param
    compiled.find_kernels.cache_clear()


def images(count: int, channels: int, side: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(count, channels, side, side + 1, generator=torch.Generator().manual_seed(seed))
    return drawn.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("side", [3, 8, 33])
@pytest.mark.parametrize(("channels", "groups"), [(4, 2), (6, 6), (48, 3), (704, 1)])
@pytest.mark.parametrize(("affine", "last"), [(True, True), (False, True), (True, False)])
def test_output_and_all_gradients_equal_autograd(
    side: int, channels: int, groups: int, affine: bool, last: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not last and way == "plain":
        pytest.skip("channels first without compiled code go through PyTorch's group norm")
    monkeypatch.setattr(host_group_norm, "CACHED_NUMBERS", 2 * channels * side * (side + 1))
    given = images(5, channels, side) + 2
    x = (given if last else given.contiguous()).requires_grad_()
    g = images(5, channels, side, 1)
    weight, bias = (torch.linspace(-1, 2, channels), torch.linspace(1, 0, channels)) if affine else (None, None)
    found = host_group_norm.host_group_norm(x, groups, weight, bias, 1e-5)
    assert found is not None
    out, differentiate = found
    grads = differentiate(g)
    (slope,) = torch.autograd.grad(out, x, g)
    for i in range(len(x)):
        own = torch.ones(channels) if weight is None else weight
        level = torch.zeros(channels) if bias is None else bias
        leaves = [value.detach().double().requires_grad_() for value in (x[i : i + 1], own, level)]
        wanted = F.group_norm(leaves[0], groups, leaves[1], leaves[2], 1e-5)
        torch.testing.assert_close(out[i : i + 1].detach().double(), wanted.detach(), rtol=1e-4, atol=1e-4)
        exact = torch.autograd.grad(wanted, leaves, g[i : i + 1].double())
        for mine, right in zip((slope[i : i + 1], grads.weight[i], grads.bias[i]), exact, strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-3, atol=1e-3)


def test_other_formats_are_left_to_pytorch(way: str) -> None:
    x = images(2, 4, 5)
    for other in (x.double(), x[:, :, 0], x[:, :, ::2]):
        assert host_group_norm.host_group_norm(other, 2, None, None, 1e-5) is None
    first = host_group_norm.host_group_norm(x.contiguous(), 2, None, None, 1e-5)
    assert (first is None) == (way == "plain")


def test_a_second_backward_pass_and_a_wrong_weight_are_refused(way: str) -> None:
    x = images(2, 16, 5).requires_grad_()
    found = host_group_norm.host_group_norm(x, 2, None, None, 1e-5)
    assert found is not None
    torch.autograd.grad(found[0].sum(), x, retain_graph=True)
    if way == "compiled":
        with pytest.raises(RuntimeError, match="done before"):
            torch.autograd.grad(found[0].sum(), x)
        assert host_group_norm._run_compiled(x, 2, torch.ones(15), None, 1e-5) is None
        assert host_group_norm._run_compiled(x, 2, torch.ones(16), None, 1e-5) is not None


class Residual(nn.Module):
    """Convolutions of images of 32 x 32, whose format is changed, and of smaller ones."""

    def __init__(self, view: bool = False) -> None:
        super().__init__()
        self.view = view
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, padding=1)
        self.norm, self.other = nn.GroupNorm(4, 8), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.other(self.two(F.relu(self.norm(self.one(x))))))
        mean = h.view(len(h), 8, -1).mean(dim=2) if self.view else h.mean(dim=(2, 3))
        found: torch.Tensor = self.head(mean)
        return found


@pytest.mark.parametrize("view", [False, True])
def test_a_model_with_large_images_has_the_gradients_of_autograd(view: bool, way: str) -> None:
    """Also one that views its images as something else, which channels last does not allow."""
    torch.manual_seed(0)
    model = Residual(view)
    layout = ParameterLayout.of(model)
    x, y = torch.rand(6, 3, 32, 32), torch.randint(0, 3, (6,))
    tape = GradientRecorder(model, layout, TASK, "book")(layout.flatten(model), x, y)
    wide = Residual(view).double()
    layout.write(wide, layout.flatten(model).double())
    rows = []
    for i in range(len(x)):
        loss = F.cross_entropy(wide(x[i : i + 1].double()), y[i : i + 1])
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(wide.parameters()))]))
    truth = torch.stack(rows)
    torch.testing.assert_close(tape.matrix().double(), truth, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(tape.norms()[:, 0].double(), truth.norm(dim=1), rtol=1e-4, atol=0)
    factors = torch.linspace(0, 1, 6)[:, None]
    torch.testing.assert_close(
        tape.weighted_sum(factors).double(), factors[:, 0].double() @ truth, rtol=1e-3, atol=1e-5
    )
    assert not torch.allclose(tape.weighted_sum(factors).double(), factors.flip(0)[:, 0].double() @ truth, rtol=1e-3)
