"""Gradients written out for another basis: straight into place, the norms of their Haar levels in one read.

The kernel runs on a GPU, or by triton's interpreter: TRITON_INTERPRET=1 pytest tests/engines/test_stacked_wav.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fulcrum.clipping.rule import ModelFacts
from fulcrum.clipping.wav import WAV
from fulcrum.data import from_arrays
from fulcrum.engines.reference import ReferenceEngine
from fulcrum.engines.stacked import StackedEngine
from fulcrum.engines.stacked.core import MatrixTape
from fulcrum.gradients.haar import haar_level_norms
from fulcrum.gradients.precision import use_matmul_precision
from fulcrum.gradients.stacked import fused
from fulcrum.gradients.stacked.layers import compile_model
from fulcrum.gradients.stacked.passes import ROW_ALIGNMENT, PassOptions, functional_pass, run_stacked_pass
from fulcrum.settings.schema import Clip
from fulcrum.types import Assignment, RoundRequest, Transform
from support.devices import DEVICE, INTERPRETED
from support.federations import toy_problem

interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")


def rows(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def levels_of(d: int) -> int:
    return (1 << (d - 1).bit_length()).bit_length()


def close(found: Tensor | None, wanted: Tensor) -> None:
    """To float32's rounding, over a hundred thousand numbers a row."""
    assert found is not None
    assert not fused.kernel_failures
    torch.testing.assert_close(found.double(), wanted.double(), rtol=3e-5, atol=5e-6)


# --- the kernel -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("d", [65, 100, 128, 2047, 2048, 2049, 4095, 26010, 131466])
def test_one_read_gives_the_norms_of_all_levels(d: int) -> None:
    x, count = rows(3, d, seed=d), levels_of(d)
    wanted = haar_level_norms(x.double(), count)
    close(fused.fused_haar_level_norms(x, count), wanted)
    found = fused.fused_haar_level_norms(x, count)
    assert found is not None
    assert not torch.allclose(found.flip(1).double(), wanted, rtol=1e-2), "coarse to fine, not the other way round"


@pytest.mark.gpu
@pytest.mark.parametrize("apart", [1, 6, 22])
def test_what_lies_between_rows_is_not_theirs(apart: int) -> None:
    """Rows that start a round number apart, and those that do not, with NaN in between."""
    d = 2090
    held = torch.full((4, d + apart), torch.nan, device=DEVICE)
    held[:, :d] = rows(4, d)
    close(fused.fused_haar_level_norms(held[:, :d], levels_of(d)), haar_level_norms(held[:, :d].double(), levels_of(d)))
    held[:, apart:] = rows(4, d)
    close(
        fused.fused_haar_level_norms(held[:, apart:], levels_of(d)),
        haar_level_norms(held[:, apart:].double(), levels_of(d)),
    )
    columns = rows(d, 4).T
    close(fused.fused_haar_level_norms(columns, levels_of(d)), haar_level_norms(columns.double(), levels_of(d)))


@pytest.mark.gpu
def test_fine_levels_of_a_huge_constant_row_are_not_lost_in_it() -> None:
    d = 5000
    x = 1000 + 1e-2 * rows(2, d)
    exact = haar_level_norms(x.double(), levels_of(d))
    found = fused.fused_haar_level_norms(x, levels_of(d))
    assert found is not None
    close(found[:, -1], exact[:, -1])
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=0)  # sums of 1000s are rounded on their way
    pairs = x.unflatten(1, (-1, 2))
    by_difference = (x.square().sum(dim=1) - 0.5 * pairs.sum(dim=2).square().sum(dim=1)).clamp_min(0).sqrt()
    assert not torch.allclose(by_difference.double(), exact[:, -1], rtol=1e-2), "energies would cancel"


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_alone(bad: float) -> None:
    d = 2500
    x = rows(6, d)
    for i, at in enumerate((0, 1, 2047, 2048, d - 1)):
        x[i, at] = bad
    found = fused.fused_haar_level_norms(x, levels_of(d))
    assert found is not None
    assert torch.isfinite(found.sum(dim=1)).tolist() == [False] * 5 + [True]


def test_what_the_kernel_does_not_take_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "can_use_kernels", lambda values: True)
    monkeypatch.setattr(fused, "launch_kernel", lambda *given: pytest.fail("a launch"))
    for d in (1, 2, 5, 64):
        assert fused.fused_haar_level_norms(torch.ones(3, d), levels_of(d)) is None
    assert fused.fused_haar_level_norms(torch.ones(3, 500, dtype=torch.float64), levels_of(500)) is None
    with pytest.raises(pytest.fail.Exception):
        fused.fused_haar_level_norms(torch.ones(3, 65), levels_of(65))


def test_no_row_is_read_beyond_what_is_stored() -> None:
    whole = torch.zeros(5, 112)
    assert fused._readable_row_length(whole[:, :100]) == 112
    assert fused._readable_row_length(whole[:, 12:]) == 100, "the last row ends where the memory does"
    assert fused._readable_row_length(whole[:4, 12:]) == 112
    assert fused._readable_row_length(whole) == 112
    assert fused._readable_row_length(torch.zeros(5, 100)) == 100


# --- how it is found ------------------------------------------------------------------------------


def haar_of(d: int, groups: tuple[int, ...] = ()) -> Transform:
    transform = WAV.view(WAV.init(Clip(C0=1.0), ModelFacts(d, (d - 7, 7), groups)), 0, 10).transform
    assert transform is not None
    return transform


def tape(gradients: Tensor, transform: Transform) -> MatrixTape:
    n, d = gradients.shape
    return MatrixTape(gradients, torch.zeros(1, n), torch.zeros(d, dtype=torch.int64), transform)


def test_norms_of_levels_are_the_kernels_where_it_gives_some(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    x[1, 5] = torch.nan
    wanted = haar_level_norms(x, 10).masked_fill(torch.tensor([[False], [True], [False]]), torch.inf)[None]
    asked: list[int] = []

    def twice(values: Tensor, count: int) -> Tensor:
        asked.append(count)
        return 2 * haar_level_norms(values, count)

    monkeypatch.setattr(fused, "fused_haar_level_norms", twice)
    torch.testing.assert_close(tape(x, haar_of(300)).norms(10), 2 * wanted)
    assert asked == [10]
    monkeypatch.setattr(fused, "fused_haar_level_norms", lambda values, count: None)
    torch.testing.assert_close(tape(x, haar_of(300)).norms(10), wanted)


def test_layers_laid_out_apart_are_no_levels_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "fused_haar_level_norms", lambda values, count: pytest.fail("asked"))
    apart = haar_of(300, (0, 1))
    assert (apart.haar, apart.norms, apart.own) == (0, None, None)
    groups = int(apart.groups.max()) + 1
    assert tape(torch.ones(3, 300), apart).norms(groups).shape == (1, 3, groups)


def test_a_kernel_that_fails_leaves_the_norms_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "can_use_kernels", lambda values: True)
    monkeypatch.setattr(fused, "launch_kernel", lambda *given: False)
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(tape(x, haar_of(300)).norms(10), haar_level_norms(x, 10)[None])


@pytest.mark.parametrize("d", [8, 9, 13, 300, 1024])
def test_sums_of_levels_are_those_of_all_coefficients(d: int) -> None:
    """Each group's own coefficients of its own sum, to the bit; and not another group's."""
    own = haar_of(d)
    assert own.own is not None
    generator = torch.Generator().manual_seed(d)
    x, factors = torch.randn(8, d, generator=generator), torch.rand(1, 8, own.haar, generator=generator)
    found = tape(x, own).weighted_sum(factors, 2)
    written = tape(x, dataclasses.replace(own, own=None))
    assert torch.equal(found, written.weighted_sum(factors, 2))
    assert not torch.allclose(found, written.weighted_sum(factors.flip(2), 2))


# --- gradients written out ------------------------------------------------------------------------

MODELS: dict[str, Callable[[], nn.Module]] = {
    "more filters than positions": lambda: nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.AvgPool2d(3), nn.Conv2d(5, 12, 2), nn.Flatten(), nn.Linear(12, 3)
    ),
    "one channel, whole image": lambda: nn.Sequential(
        nn.Conv2d(2, 1, 1), nn.Conv2d(1, 4, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
    ),
    "one number out": lambda: nn.Sequential(nn.Conv2d(2, 1, 6, bias=False), nn.Flatten(), nn.Linear(1, 3)),
}


@pytest.mark.parametrize("held", ["float32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_written_into_place(name: str, held: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 2, 6, 6, generator=generator), torch.arange(8) % 3
    problem = toy_problem(dataset=from_arrays(x, y, x, y), model=model)
    program, reason = compile_model(model, problem.layout, (2, 6, 6))
    assert program is not None, reason
    theta = problem.layout.flatten(model).repeat(2, 1)
    theta[1] *= 0.9  # two sets of weights, four examples each
    theta, x, both = theta.to(DEVICE), x.to(DEVICE), y.view(2, 4).to(DEVICE)
    with use_matmul_precision("float32", DEVICE):
        found = run_stacked_pass(
            program, theta, program.table(x).unflatten(0, (2, 4)), both, problem.dataset.task, PassOptions(held)
        ).matrix()
        wanted, _ = functional_pass(
            problem.model, problem.layout, theta, x.unflatten(0, (2, 4)), both, problem.dataset.task
        )
    bound = {"float32": 1e-5, "bf16": 2e-2}[held] * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound)
    assert not torch.allclose(found, wanted.roll(1, dims=1), rtol=0, atol=bound), "every number in its place"
    assert found.stride(0) % ROW_ALIGNMENT == 0
    assert found.stride(1) == 1


@pytest.mark.parametrize("taken", ["by torch", pytest.param("fused", marks=interpreted)])
def test_a_round_of_wav_equals_the_reference(taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if taken == "by torch":
        monkeypatch.setattr(fused, "can_use_kernels", lambda values: False)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(18, 2, 6, 6, generator=generator), torch.arange(18) % 3
    model = MODELS["more filters than positions"]()
    problem = toy_problem("wav", dataset=from_arrays(x, y, x, y), model=model)
    state = problem.rule.init(Clip(C0=0.5), problem.shape)
    tasks = tuple(Assignment(k, 0.9, 0.3, 2, 0.3) for k in range(2))
    wanted = RoundRequest(1, 10, problem.layout.flatten(model), tasks, (state,) * 2, 0.01)
    for one, two in zip(ReferenceEngine(problem).run(wanted), StackedEngine(problem).run(wanted), strict=True):
        bound = 2e-5 * float(one.delta.abs().max())
        torch.testing.assert_close(two.delta, one.delta, rtol=2e-5, atol=bound)
        assert not torch.allclose(two.delta, 1.001 * one.delta, rtol=2e-5, atol=bound)
