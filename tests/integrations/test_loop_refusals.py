"""What a private loop says to loops that would go wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fulcrum
from fulcrum.errors import ConfigError, ModelError
from fulcrum.integrations.loop import PrivateLoop
from fulcrum.models import convert_norms, validate_model


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=stream)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=40, shuffle=True)


def make_private(model: nn.Module) -> PrivateLoop[nn.Module, torch.optim.SGD]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fulcrum.private(model, optimizer, make_loader(), epsilon=3.0, seed=1)


class MixesMany(nn.Module):
    """Mixes examples only in batches of more than 20."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x - x.mean(0) if len(x) > 20 else x)
        return found


def test_a_model_that_mixes_in_batches_of_the_expected_size_is_refused() -> None:
    model, _, loader = make_private(MixesMany())
    x, _ = next(iter(loader))
    with pytest.raises(ModelError, match="mixes the examples"):
        model(x)


def test_a_model_in_a_private_loop_is_refused_until_it_is_closed() -> None:
    model = nn.Linear(6, 2)
    loop = make_private(model)
    with pytest.raises(ModelError, match="in a private loop already"):
        make_private(model)
    loop.privacy.close()
    _, optimizer, loader = make_private(model)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert loader.privacy.step == loader.privacy.steps


def test_a_group_that_is_added_later_is_refused_before_anything_is_paid() -> None:
    model, optimizer, loader = make_private(nn.Linear(6, 2))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ConfigError, match="another group"):
        optimizer.step()
    assert loader.privacy.epsilon == 0.0


def test_the_advice_for_batch_norm_works_in_a_loop() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with pytest.raises(ModelError, match=r"fulcrum\.models\.convert_norms\(model, 'group'\)"):
        make_private(model)
    make_private(convert_norms(model, "group"))


def test_a_run_refuses_a_model_that_mixes_only_many_examples() -> None:
    with pytest.raises(ModelError, match="another output for an example when the batch has another size"):
        validate_model(MixesMany(), torch.rand(3, 6))
