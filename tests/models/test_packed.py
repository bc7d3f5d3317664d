"""Packed sequences: sequences of several lengths in one recurrent call, each example's gradient its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import fulcrum
from fulcrum.data import from_arrays
from fulcrum.gradients import GradientRecorder
from fulcrum.models.layout import ParameterLayout


class Reader(nn.Module):
    """Reads token ids up to their length, in both directions."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 5), nn.Linear(8, 3)
        self.cells = kind(5, 4, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.table(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        last = self.cells(packed)[1]
        hidden = last[0] if isinstance(last, tuple) else last
        out: Tensor = self.head(torch.cat([hidden[0], hidden[1]], dim=1))
        return out


def make_data() -> fulcrum.Dataset:
    torch.manual_seed(0)
    x = {"ids": torch.randint(0, 20, (24, 7)), "lengths": torch.randint(1, 8, (24,))}
    y = torch.randint(0, 3, (24,))
    return from_arrays(x, y, {name: value[:6] for name, value in x.items()}, y[:6], classes=3, public=True)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_gradients_are_those_of_each_example_alone(kind: type[nn.LSTM] | type[nn.GRU]) -> None:
    data = make_data()
    torch.manual_seed(1)
    model = Reader(kind)
    layout = ParameterLayout.of(model)
    x, y = {name: value[:5] for name, value in data.x.items()}, data.y[:5]
    found = GradientRecorder(model, layout, data.task)(layout.flatten(model), x, y).matrix()
    for row in range(5):
        part = slice(row, row + 1)
        loss = data.task.loss(model(**{name: value[part] for name, value in x.items()}), y[part]).sum()
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        torch.testing.assert_close(found[row], wanted, rtol=1e-4, atol=1e-6)


def test_a_model_with_packed_sequences_trains_the_same_in_both_engines() -> None:
    weights = []
    for engine in ("reference", "parallel"):
        torch.manual_seed(1)
        words = {"parties": 2, "epsilon": 8.0, "rounds": 1, "rate": 0.4, "partition": "iid", "engine": engine}
        weights.append(fulcrum.train(make_data(), Reader(nn.LSTM), **words).model.state_dict())  # type: ignore[arg-type]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-5)
