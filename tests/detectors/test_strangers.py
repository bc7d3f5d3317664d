"""`fulcrum check` on clients of strangers: mistakes beside other labels, records and numbers, and right ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fulcrum
from fulcrum.analysis.detectors.foreign import mistakes
from fulcrum.errors import InputError
from support import clients, stranger_clients

FAULTY = {
    "scaled_by_a_count": mistakes.STATISTICS,
    "stops_early": mistakes.NOISE,
    "tells_whether_it_stopped": mistakes.STATISTICS,
    "tells_in_words": mistakes.STATISTICS,
    "tells_a_jittered_loss": mistakes.STATISTICS,
    "overflows": mistakes.NO_CLIPPING,
    "makes_nan": mistakes.NO_NUMBERS,
    "samples_the_rare_class_more": mistakes.STATISTICS,
    "seeds_each_layer_alike": mistakes.NOISE,
    "noise_on_what_moves": mistakes.NOISE,
    "noise_once_per_epoch": mistakes.NOISE,
}
RIGHT = (
    "right_bfloat16",
    "right_frozen",
    "right_users",
    "right_numbers_beside",
    "right_local_steps",
    "right_weights_of_few",
)
TERMS: dict[str, dict[str, Any]] = {
    "noise_once_per_epoch": {"local_steps": 4},
    "right_local_steps": {"local_steps": 4},
    "right_weights_of_few": {"output": "params"},
}
QUICK = ("stops_early", "overflows", "seeds_each_layer_alike", "noise_on_what_moves")
QUICK_RIGHT = ("right_frozen", "right_local_steps", "right_numbers_beside")


def run_check(name: str, **terms: Any) -> Any:
    claims = {**clients.CLAIMS, **TERMS.get(name, {})}
    return fulcrum.check(getattr(stranger_clients, name), claims, **terms)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAULTY])
def test_a_mistake_of_a_stranger_is_told(name: str) -> None:
    result = run_check(name)
    assert FAULTY[name] in [mistake.what for mistake in result.mistakes], result.mistakes


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK_RIGHT else pytest.mark.slow) for n in RIGHT])
def test_a_right_client_of_a_stranger_is_told_none(name: str) -> None:
    result = run_check(name)
    assert result.ok, result.mistakes
    assert result.sigma == pytest.approx(1.0, rel=0.12)


def test_local_steps_must_be_said() -> None:
    """The noise of four steps is half as large beside four means: of one step it would be too little."""
    assert not fulcrum.check(stranger_clients.right_local_steps, clients.CLAIMS).ok


def test_rescaled_numbers_are_refused() -> None:
    """Adam's first step is a sign per coordinate: nothing can be measured, and a right client is not accused."""

    def adam(params: Any, data: Any, seed: int) -> Any:
        gradient = stranger_clients.release(data, seed)
        return -1e-3 * gradient / (np.abs(gradient) + 1e-8)

    with pytest.raises(InputError, match="rescales each coordinate"):
        fulcrum.check(adam, clients.CLAIMS, replays=100)


def test_a_start_that_cannot_be_measured_is_refused() -> None:
    def far(params: Any, data: Any, seed: int) -> Any:
        return 1 + stranger_clients.release(data, seed) / max(1e-3, 0.25 * len(data[0]))

    with pytest.raises(InputError, match="its noise is too large for that"):
        fulcrum.check(far, {**clients.CLAIMS, "output": "params"}, replays=100)


def make_script(data: Any, seed: int, normalises: bool) -> Any:
    """A script with a layer that keeps statistics of its records, or not, and Opacus's shape."""
    torch = pytest.importorskip("torch")
    x, y = torch.tensor(data[0]), torch.tensor(data[1])
    keeper = torch.nn.BatchNorm1d(x.shape[1], affine=False)
    model = torch.nn.Linear(x.shape[1], 2)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    if normalises:
        model.keeper = keeper
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(len(x), generator=generator) < 0.25

    class Optimizer:
        def zero_grad(self) -> None:
            model.zero_grad()

        def step(self) -> None:
            if normalises and len(x) > 1:
                keeper(x)
            with torch.no_grad():
                slopes = 0.5 - torch.eye(2)[y[chosen]]
                rows = torch.cat([(slopes[:, :, None] * x[chosen][:, None, :]).flatten(1), slopes], dim=1)
                total = (rows * (1 / rows.norm(dim=1).clamp_min(1e-12)).clamp(max=1)[:, None]).sum(dim=0)
                total = total + torch.randn(total.shape, generator=generator)
                model.weight -= 0.1 * total[: model.weight.numel()].view_as(model.weight)
                model.bias -= 0.1 * total[model.weight.numel() :]

    return model, Optimizer(), [(x[chosen], y[chosen])]


@pytest.mark.slow
@pytest.mark.parametrize("normalises", [True, False])
def test_buffers_are_part_of_what_is_released(normalises: bool) -> None:
    def make(data: Any, seed: int) -> Any:
        return make_script(data, seed, normalises)

    result = fulcrum.check(make, {**clients.CLAIMS, "kind": "opacus"}, replays=200)
    assert (mistakes.STATISTICS in [each.what for each in result.mistakes]) == normalises
    assert result.ok != normalises, result.mistakes
