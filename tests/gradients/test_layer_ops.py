"""Single layers forward and back without autograd, against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fulcrum.gradients.layer_ops import AUTOGRAD_OP, find_layer_op
from fulcrum.models.builtin import TemperedSigmoid


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LAYERS = {
    "linear": (nn.Linear(6, 4), (5, 6)),
    "conv2d": (nn.Conv2d(3, 4, 3, padding=1), (5, 3, 6, 7)),
    "conv2d-strided": (nn.Conv2d(3, 4, (3, 4), stride=(1, 2), padding=(1, 0)), (5, 3, 6, 8)),
    "conv2d-same": (nn.Conv2d(2, 3, 3, padding="same"), (5, 2, 6, 6)),
    "conv1d": (nn.Conv1d(3, 4, 3, stride=2), (5, 3, 9)),
    "relu": (nn.ReLU(), (5, 7)),
    "relu-inplace": (nn.ReLU(inplace=True), (5, 7)),
    "elu-inplace": (nn.ELU(inplace=True), (5, 7)),
    "tanh": (nn.Tanh(), (5, 7)),
    "sigmoid": (nn.Sigmoid(), (5, 7)),
    "tempered": (TemperedSigmoid(1.7, 2.5, 0.4), (5, 7)),
    "identity": (nn.Identity(), (5, 7)),
    "flatten": (nn.Flatten(), (5, 2, 3, 4)),
    "flatten-some": (nn.Flatten(1, 2), (5, 2, 3, 4)),
    "max-pool-overlapping": (nn.MaxPool2d(2, stride=1), (5, 3, 6, 7)),
    "max-pool": (nn.MaxPool2d(2), (5, 3, 7, 6)),
    "max-pool-mixed-strides": (nn.MaxPool2d(2, stride=(1, 3)), (5, 3, 6, 9)),
    "max-pool-3": (nn.MaxPool2d(3, stride=2, padding=1), (5, 3, 7, 7)),
    "max-pool-ceil": (nn.MaxPool2d(2, ceil_mode=True), (5, 3, 7, 7)),
    "avg-pool": (nn.AvgPool2d(2), (5, 3, 6, 8)),
    "avg-pool-3": (nn.AvgPool2d((3, 2)), (5, 3, 6, 8)),
    "avg-pool-rest": (nn.AvgPool2d(2), (5, 3, 7, 8)),
    "avg-pool-divisor": (nn.AvgPool2d(2, divisor_override=3), (5, 3, 6, 8)),
    "avg-pool-padded": (nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False), (5, 3, 7, 7)),
    "mean": (nn.AdaptiveAvgPool2d(1), (5, 3, 4, 4)),
    "mean-pair": (nn.AdaptiveAvgPool2d((1, 1)), (5, 3, 4, 6)),
    "adaptive": (nn.AdaptiveAvgPool2d(2), (5, 3, 4, 4)),
    "group-norm": (nn.GroupNorm(2, 4), (5, 4, 3, 3)),
    "layer-norm": (nn.LayerNorm(6), (5, 4, 6)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_forward_and_back_equal_autograd(name: str, channels_last: bool) -> None:
    layer, shape = LAYERS[name]
    layer = layer.double()
    # Many equal values: which of them gets the gradient of a maximum is PyTorch's choice, and ours.
    x = draw(*shape).round()
    params = {key: value.detach() for key, value in layer.named_parameters()}
    if channels_last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    leaf = x.clone().requires_grad_()
    truth = layer(leaf * 1.0)
    g = draw(*truth.shape, seed=1)
    (wanted,) = torch.autograd.grad(truth, leaf, g)

    move = find_layer_op(layer, x)
    before = x.clone()
    out, memo = move.run(layer, x, params, False)
    torch.testing.assert_close(out, truth.detach())
    assert torch.equal(x, before)  # it was not ours to overwrite
    if move.output is not None:
        torch.testing.assert_close(move.output(layer, x, params), truth.detach())
    torch.testing.assert_close(move.back(layer, memo, params, g.clone()), wanted)


def test_max_pooling_by_pairs_keeps_what_is_not_finite() -> None:
    layer, x = nn.MaxPool2d(2, stride=1), draw(4, 2, 5, 5)
    x[0, 0, 2, 2], x[1, 1, 0, 0], x[2] = torch.nan, torch.inf, -torch.inf
    move = find_layer_op(layer, x)
    assert move.output is not None  # by pairs, not by the library
    assert torch.equal(torch.nan_to_num(move.output(layer, x, {})), torch.nan_to_num(layer(x)))


def test_a_gradient_that_shares_memory_is_not_overwritten() -> None:
    layer, x = nn.ReLU(), draw(3, 4)
    move = find_layer_op(layer, x)
    _, memo = move.run(layer, x, {}, False)
    wide = draw(3, 1, seed=1).expand(3, 4)
    before = wide.clone()
    found = move.back(layer, memo, {}, wide)
    assert torch.equal(wide, before)
    assert torch.equal(found, before * (x > 0))


def test_a_layer_nobody_wrote_out_goes_through_autograd() -> None:
    assert find_layer_op(nn.Softplus(), draw(2, 2)) is AUTOGRAD_OP
    assert find_layer_op(nn.ReLU(), draw(2, 2)) is not AUTOGRAD_OP
