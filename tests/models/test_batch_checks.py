"""Models that notice who else is in a batch, or how many, are refused; those that merely look so are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulcrum.errors import ModelError
from fulcrum.models.checks import validate_model

PAIR = torch.linspace(-1, 1, 2 * 3 * 6).view(2, 3, 6)


class Model(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.run, self.layer, self.head = run, nn.Linear(6, 4), nn.Linear(4, 3)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def flat(x: Tensor) -> Tensor:
    return x.mean(dim=1)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "last": (lambda s, x: s.head(s.layer(flat(x)) + s.layer(flat(x))[-1:]), "'head' .* mixes the examples"),
    "first": (lambda s, x: s.head(s.layer(flat(x)) + s.layer(flat(x))[:1]), "'head' .* mixes the examples"),
    "mean": (lambda s, x: s.head(s.layer(flat(x)) - 1e-3 * s.layer(flat(x)).mean(0)), "mixes the examples"),
    "mean-of-all": (lambda s, x: s.head(s.layer(x.transpose(0, 1)).mean(1))[:2], "one example per row"),
    "size": (lambda s, x: s.head(s.layer(flat(x))) / len(x), "another size"),
    "squeeze": (lambda s, x: s.head(s.layer(flat(x)).squeeze()), "name dimensions in squeeze"),
    "one": (lambda s, x: s.head(s.layer(flat(x)))[[0, 1]] if len(x) < 3 else s.head(s.layer(flat(x))), "one example"),
    "noise": (lambda s, x: s.head(F.dropout(s.layer(flat(x)), 0.5)), "is random"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_who_notices_the_batch_is_refused(name: str) -> None:
    run, words = REFUSED[name]
    with pytest.raises(ModelError, match=words):
        validate_model(Model(run), PAIR)


class Routed(nn.Module):
    """Each example goes to one layer: rows of that layer are not those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        out = x.new_zeros(len(x), 4)
        out[chosen], out[~chosen] = self.one(x[chosen]), self.other(x[~chosen])
        return out


ALLOWED: dict[str, Callable[[], nn.Module]] = {
    "two-layers-of-states": lambda: Model(
        lambda s, x: s.head(s.rnn(x)[1].transpose(0, 1).flatten(1)), rnn=nn.GRU(6, 2, 2, batch_first=True)
    ),
    "two-steps-first": lambda: Model(
        lambda s, x: s.head(s.norm(s.layer(x[:, :2].transpose(0, 1))).mean(0)), norm=nn.LayerNorm(4)
    ),
    "one-by-one": lambda: Model(lambda s, x: torch.stack([s.head(s.layer(row.mean(dim=0))) for row in x])),
    "routed": lambda: Model(lambda s, x: s.head(s.routed(flat(x))), routed=Routed()),
    "jit": lambda: Model(lambda s, x: s.head(s.script(flat(x))), script=torch.jit.script(nn.Linear(6, 4))),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ALLOWED)
def test_rows_that_are_no_examples_are_none(name: str) -> None:
    """As many states or steps as examples in the trial: earlier they were taken for examples."""
    validate_model(ALLOWED[name](), PAIR)


def test_a_model_that_refuses_made_up_numbers_is_still_checked() -> None:
    def picky(s: Any, x: Tensor) -> Tensor:
        if float(x.max()) > 1.5:
            raise ValueError("no such number")
        h = s.layer(flat(x))
        return s.head(h - h.mean(0) * s.mixing)  # type: ignore[no-any-return]

    validate_model(Model(picky, mixing=0.0), PAIR)
    with pytest.raises(ModelError, match="mixes the examples"):
        validate_model(Model(picky, mixing=1.0), PAIR)


def share_memory() -> nn.Module:
    model = Model(lambda s, x: s.head(s.layer(flat(x))))
    model.head.bias = nn.Parameter(model.layer.bias.data[:3])
    return model


ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "double": (lambda: Model(lambda s, x: x).double(), "'layer.weight' has type float64.*model.float"),
    "half": (lambda: Model(lambda s, x: x).bfloat16(), "has type bfloat16"),
    "complex": (lambda: Model(lambda s, x: x, p=nn.Parameter(torch.zeros(2, dtype=torch.cfloat))), "view_as_complex"),
    "meta": (lambda: Model(lambda s, x: x).to("meta"), "no values"),
    "views": (share_memory, "'head.bias' and 'layer.bias' are views of the same memory"),
    "script": (lambda: torch.jit.script(nn.Linear(6, 3)), "torch.jit"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ODD)
def test_odd_parameters_are_refused(name: str) -> None:
    make, words = ODD[name]
    with pytest.raises(ModelError, match=words):
        validate_model(make(), PAIR)


def test_neighbours_in_memory_are_no_views() -> None:
    """As cuDNN arranges the weights of an LSTM."""
    model, memory = Model(lambda s, x: s.head(s.layer(flat(x)))), torch.randn(28)
    model.layer.weight, model.layer.bias = nn.Parameter(memory[:24].view(4, 6)), nn.Parameter(memory[24:])
    validate_model(model, PAIR)


def test_a_shared_parameter_is_no_view() -> None:
    model = Model(lambda s, x: s.head(s.again(torch.tanh(s.layer(flat(x))) @ s.layer.weight)), again=nn.Linear(6, 4))
    model.again.weight = model.layer.weight  # type: ignore[assignment, union-attr]
    validate_model(model, PAIR)
