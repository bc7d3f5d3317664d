"""BatchNorm converted to norms of single examples, or frozen; and refused by name where nobody asked for either."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fulcrum.errors import ModelError
from fulcrum.models.checks import validate_model
from fulcrum.models.norms import choose_groups, convert_norms


def make_network(trained: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    if trained:
        norm = net[1]
        assert isinstance(norm, nn.BatchNorm2d)
        norm.running_mean = torch.randn(8)
        norm.running_var = torch.rand(8) + 0.5
        with torch.no_grad():
            norm.weight.uniform_(0.5, 2.0)
            norm.bias.normal_()
    return net


@pytest.mark.parametrize("how", ["group", "layer", "instance", "frozen"])
def test_a_converted_network_keeps_examples_apart(how: str) -> None:
    net = make_network()
    x = torch.rand(3, 3, 8, 8)
    with pytest.raises(ModelError, match=r"Layer '1' \(BatchNorm2d\) mixes.*model\.norm=group"):
        validate_model(net, x)
    made = convert_norms(net, how)
    validate_model(made, x)
    assert isinstance(net[1], nn.BatchNorm2d), "the network that was handed over stays as it is"
    assert net[1].training


def test_weights_are_carried_over_so_that_typical_examples_see_the_same_function() -> None:
    """An example whose channels have the running statistics gives what BatchNorm in eval mode gives."""
    norm = make_network()[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    x = torch.randn(1, 8, 400, 400)
    x = (x - x.mean(dim=(2, 3), keepdim=True)) / x.std(dim=(2, 3), keepdim=True)
    x = x * norm.running_var.sqrt().view(1, 8, 1, 1) + norm.running_mean.view(1, 8, 1, 1)
    made = convert_norms(nn.Sequential(norm), "group")
    wanted = copy.deepcopy(norm).eval()(x)
    torch.testing.assert_close(made(x), wanted, rtol=1e-2, atol=1e-2)
    naive = nn.GroupNorm(choose_groups(8), 8)
    with torch.no_grad():
        naive.weight.copy_(norm.weight)
        naive.bias.copy_(norm.bias)
    assert float((naive(x) - wanted).detach().abs().max()) > 0.5, "weights that are merely copied give another function"


def test_an_untrained_norm_keeps_its_weights_and_a_frozen_one_its_function() -> None:
    fresh = convert_norms(make_network(trained=False), "group").get_submodule("1")
    assert isinstance(fresh, nn.GroupNorm)
    torch.testing.assert_close(fresh.weight, torch.ones(8), rtol=1e-4, atol=1e-4)
    net, x = make_network(), torch.rand(2, 3, 8, 8)
    frozen = convert_norms(net, "frozen")
    assert torch.equal(frozen(x), net.eval()(x))
    assert not any(p.requires_grad for p in frozen.get_submodule("1").parameters())


@pytest.mark.parametrize(("channels", "groups"), [(64, 16), (512, 32), (8, 2), (7, 1), (3, 1), (100, 25)])
def test_groups_divide_the_channels(channels: int, groups: int) -> None:
    assert choose_groups(channels) == groups


def test_a_norm_of_its_own_kind_and_shared_layers() -> None:
    class Odd(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    with pytest.raises(ModelError, match=r"'0' \(Odd\) is a BatchNorm with a forward of its own"):
        convert_norms(nn.Sequential(Odd(4)), "group")
    with pytest.raises(ModelError, match=r"no running statistics to keep"):
        convert_norms(nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False)), "frozen")
    shared = nn.BatchNorm2d(4)
    made = convert_norms(nn.Sequential(shared, nn.ReLU(), shared), "group")
    assert made.get_submodule("0") is made.get_submodule("2")
    assert isinstance(made.get_submodule("0"), nn.GroupNorm)
    assert isinstance(convert_norms(nn.BatchNorm1d(4), "layer"), nn.GroupNorm)
