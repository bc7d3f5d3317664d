"""What `fulcrum plan` says that layers cost: compared with what torch counts in a real step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fulcrum.data.tasks import Task
from fulcrum.gradients import GradientRecorder, compiled, costs
from fulcrum.gradients.costs import CostTerms, LayerCost, measure_layer_costs, merge_like_layers
from fulcrum.gradients.stacked.layers import compile_model
from fulcrum.models.layout import ParameterLayout
from support.gradients import CLASSIFY

BATCH = 6


class Residual(nn.Module):
    """A model of its own: a convolution, a norm, tokens of a linear layer, a residual sum."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.mix = nn.Linear(8, 8)
        self.wide = nn.Linear(8, 64)
        self.head = nn.Linear(64, 3)
        self.mix.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.relu(self.norm(self.stem(x))).flatten(2).transpose(1, 2)[:, :4]
        tokens = tokens + self.mix(tokens)
        return self.head(F.relu(self.wide(tokens)).mean(dim=1))


def plain_sequence() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(), nn.Linear(8 * 4, 3))


MODELS = {"own": Residual, "sequence": plain_sequence}
SHAPES = {"own": (3, 8, 8), "sequence": (3, 7, 7)}


def batch_of(name: str) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, *SHAPES[name], generator=stream), torch.zeros(BATCH, dtype=torch.int64)


def count_private(model: nn.Module, x: Tensor, y: Tensor, task: Task = CLASSIFY) -> float:
    """FLOP that torch counts in a private step: the pass, the norms, the clipped sum."""
    layout = ParameterLayout.of(model)
    recorder, own = GradientRecorder(model, layout, task), layout.flatten(model)
    recorder.settle(own, x, y)
    with FlopCounterMode(display=False) as counter:
        tape = recorder.record_once(own, x, y, fast=True)
        factors = tape.norms().clamp(max=1)
        tape.sum_parts(tape.parts, factors, (), False)
    return counter.get_total_flops()


def count_plain(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        CLASSIFY.loss(model(x), y).sum().backward()
    return counter.get_total_flops()


@pytest.fixture
def _no_compiled_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch counts its own operations only."""
    monkeypatch.setenv("FULCRUM_COMPILE", "0")
    compiled.find_kernels.cache_clear()
    yield
    compiled.find_kernels.cache_clear()


@pytest.mark.usefixtures("_no_compiled_code")
@pytest.mark.parametrize("name", MODELS)
def test_layers_cost_what_torch_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = MODELS[name](), batch_of(name)
    rows = measure_layer_costs(model, CLASSIFY, x, y, CostTerms(BATCH))
    assert sum(row.flop_plain for row in rows) == count_plain(model, x, y)
    private = count_private(model, x, y)
    assert sum(row.flop_private for row in rows) == pytest.approx(private, rel=0.03)
    assert {row.way for row in rows} == {"direct", "ghost"}
    assert all(row.bytes_private >= row.bytes_plain > 0 for row in rows)

    # Wrong case: as if the gradients that are written took the ghost way.
    for function in ("list_uses", "list_sequence_uses"):
        written = getattr(costs, function)
        monkeypatch.setattr(
            costs,
            function,
            lambda *a, written=written: tuple(dataclasses.replace(use, materialised=False) for use in written(*a)),
        )
    monkeypatch.setattr(costs.WeightGradCost, "prefers_ghost_norms", True)
    wrong = measure_layer_costs(model, CLASSIFY, x, y, CostTerms(BATCH))
    assert sum(row.flop_private for row in wrong) > 1.2 * private


def rows_by_name(rows: tuple[LayerCost, ...]) -> dict[str, LayerCost]:
    return {row.layer: row for row in rows}


def test_a_frozen_layer_costs_no_gradient() -> None:
    x, y = batch_of("own")
    model = Residual(frozen=True)
    rows = rows_by_name(measure_layer_costs(model, CLASSIFY, x, y, CostTerms(BATCH)))
    trained = rows_by_name(measure_layer_costs(Residual(), CLASSIFY, x, y, CostTerms(BATCH)))
    assert rows["mix"].way == "frozen"
    assert rows["mix"].flop_plain == rows["mix"].flop_private == pytest.approx(trained["mix"].flop_plain * 2 / 3)
    assert sum(row.flop_plain for row in rows.values()) == count_plain(model, x, y)


def test_an_unknown_use_runs_twice_alone_and_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 4)])  # a container that is never called
            self.p, self.head = nn.Parameter(torch.ones(4, 4)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cdist(self.layers[0](x), self.p))

    model, x, y = Odd(), torch.randn(BATCH, 6), torch.zeros(BATCH, dtype=torch.int64)
    rows = measure_layer_costs(model, CLASSIFY, x, y, CostTerms(BATCH))
    (row,) = [row for row in rows if row.way == "vmap"]
    assert row.parameters == 16
    assert row.because == "no rule for cdist: this call alone, under torch.func"
    assert row.flop_private == row.flop_plain + 4 * 16 * BATCH  # not the model around it
    assert sum(row.flop_plain for row in rows) == count_plain(model, x, y)
    assert {row.way for row in rows} == {"ghost", "vmap"}


def test_whatever_is_written_out_is_said_and_weighed() -> None:
    x, y = batch_of("own")
    model = Residual()
    rows = measure_layer_costs(model, CLASSIFY, x, y, CostTerms(100, written_out="the rule needs them"))
    assert {row.way for row in rows} == {"direct"}
    held = sum(row.bytes_private - row.bytes_plain for row in rows)
    assert held == 4 * 100 * ParameterLayout.of(model).dim
    assert all("the rule needs them" in row.because for row in rows)


def test_units_of_several_records_have_the_positions_of_all_of_them() -> None:
    x, y = batch_of("own")
    one, five = (
        rows_by_name(measure_layer_costs(Residual(), CLASSIFY, x, y, CostTerms(100, records_per_unit=r)))
        for r in (1, 5)
    )
    assert "1 position," in one["head"].because
    assert "5 positions" in five["head"].because
    assert one["head"].flop_plain == five["head"].flop_plain
    assert five["head"].flop_private > one["head"].flop_private


def test_the_stacked_engine_has_its_own_ways() -> None:
    model, (x, y) = plain_sequence(), batch_of("sequence")
    program, _ = compile_model(model, ParameterLayout.of(model), SHAPES["sequence"])
    assert program is not None
    rows = measure_layer_costs(model, CLASSIFY, x, y, CostTerms(BATCH, program=program))
    ghost = {step.weight: step.ghost for step in program.steps if isinstance(step, costs.StackedSite)}
    assert [row.way == "ghost" for row in rows] == list(ghost.values())
    assert sum(row.flop_plain for row in rows) == count_plain(model, x, y)


def test_layers_of_one_kind_are_one_line() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)), nn.Linear(4, 3))
    rows = measure_layer_costs(model, CLASSIFY, torch.randn(2, 4), torch.zeros(2, dtype=torch.int64), CostTerms(2))
    merged = merge_like_layers(rows)
    assert [len(row.names) for row in merged] == [1, 4, 1]  # the first passes no gradient on
    assert merged[1].names == ("1", "2", "3", "4")


@pytest.mark.parametrize(("value", "text"), [(12, "12"), (999.9, "1k"), (1234, "1.23k"), (5.6e9, "5.6G")])
def test_counts_are_short(value: float, text: str) -> None:
    assert costs.format_count(value) == text
