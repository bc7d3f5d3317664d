"""Neighbour replay: no unit moves a sum further than is charged, in every engine, rule, unit and precision."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulcrum.clipping import RULES, find_rule
from fulcrum.engines.neighbours import FAST_MARGIN, STEP_SUMS, build_replay_problem, replay_neighbours
from fulcrum.engines.reference import ReferenceEngine
from fulcrum.gradients.rounding import bound_roundings
from fulcrum.privacy import bounds
from fulcrum.privacy.bounds import choose_sum_margin
from fulcrum.settings.schema import Clip
from fulcrum.training.client_level import average_client_updates, make_local_problem
from fulcrum.types import ClientReply, SumMargin
from support.federations import client_federation, toy_problem
from support.rounds import assert_equal, request, stacked

SOUND = [name for name, rule in RULES.items() if rule.sound and rule.private]
UNITS = 16


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(98, 7), nn.Tanh(), nn.Linear(7, 3))
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 24, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)
    )


def records(n: int = UNITS) -> Tensor:
    """Images with ordinary, tiny, huge, constant and zero ones among them."""
    x = torch.randn(n, 2, 7, 7, generator=torch.Generator().manual_seed(1))
    x[0] *= 3.6e4
    x[1] *= 1e-20
    x[2] = 168.0
    x[3] = 0.0
    return x


def worst(problem: Any, engine: str, targets: range = range(6), C0: float = 0.05, **given: Any) -> float:
    state = problem.rule.init(Clip(C0=C0), problem.shape)
    rows = torch.arange(len(problem.dataset.y))
    return max(replay_neighbours(problem, engine, state, rows, target, **given).ratio for target in targets)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("rule", SOUND)
@pytest.mark.parametrize("engine", STEP_SUMS)
@pytest.mark.every(3)
def test_every_rule_in_every_engine(engine: str, rule: str, layers: bool, kind: str) -> None:
    for proven in (True, False):
        problem = build_replay_problem(
            records(), torch.arange(UNITS) % 3, network(kind), rule, layers=layers, proven=proven
        )
        assert worst(problem, engine) <= 1 + (0 if proven else FAST_MARGIN["float32"])


@pytest.mark.parametrize("precision", FAST_MARGIN)
@pytest.mark.parametrize("rule", ["fixed", "oso", "quantile"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_every_precision_of_the_stacked_engine(kind: str, rule: str, precision: str) -> None:
    for proven in (True, False):
        problem = build_replay_problem(
            records(), torch.arange(UNITS) % 3, network(kind), rule, precision=precision, proven=proven
        )
        assert worst(problem, "stacked") <= 1 + (0 if proven else FAST_MARGIN[precision])


@pytest.mark.every(3)
@pytest.mark.parametrize("rule", SOUND)
@pytest.mark.parametrize("engine", ["reference", "parallel"])
def test_a_person_of_several_records_is_one_unit(engine: str, rule: str) -> None:
    slots = torch.arange(UNITS) % 5
    for proven in (True, False):
        problem = build_replay_problem(
            records(), torch.arange(UNITS) % 3, network("cnn"), rule, unit="person", person=slots, proven=proven
        )
        found = worst(problem, engine, range(5), slots=slots)
        assert 0.5 < found <= 1 + (0 if proven else FAST_MARGIN["float32"])


@pytest.mark.parametrize("rule", ["fixed", "quantile", "oso"])
def test_a_client_moves_the_mean_by_no_more_than_is_charged(rule: str) -> None:
    federation = client_federation(6, clip={"rule": rule})
    problem = dataclasses.replace(federation.problem, proven=True)
    assert not make_local_problem(problem).proven  # parties train plainly; their updates are what is bounded
    assert federation.plan.central is not None
    terms = dataclasses.replace(federation.plan.central)
    state = problem.rule.init(Clip(C0=0.1), problem.shape)
    deltas = torch.randn(4, problem.layout.dim, generator=torch.Generator().manual_seed(0)) * 100

    def mean(present: list[int]) -> ClientReply:
        replies = [ClientReply(k, deltas[k], torch.zeros(0), (), state) for k in present]
        return average_client_updates(problem, terms, state, replies, 0, 6, 0.0)

    moved = (mean([0, 1, 2, 3]).delta - mean([0, 1, 2]).delta).norm()
    assert float(moved) <= 0.1 * terms.sensitivity * (1 + 1e-6)


def test_without_the_bound_the_replay_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = build_replay_problem(records(), torch.arange(UNITS) % 3, network("mlp"), "fixed", proven=True)
    rule = dataclasses.replace(
        problem.rule, clip=lambda stats, state: (2 * stats.norms.new_ones(stats.norms.shape), stats.norms[:, :0], state)
    )
    problem = dataclasses.replace(problem, rule=rule)
    for engine in STEP_SUMS:
        assert worst(problem, engine) <= 1
    monkeypatch.setattr(bounds, "limit_factors", lambda factors, *given: factors)
    for engine in STEP_SUMS:
        assert worst(problem, engine) > 10


# --- proven arithmetic ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [*SOUND, "median"])
@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_proven_sums_are_the_same_in_every_engine(rule: str, groups: str) -> None:
    problem = toy_problem(rule, parties=3, proven=True)
    problem = dataclasses.replace(problem, groups=problem.layout.layers if groups == "layer" else ())
    wanted = request(problem, 2, 1.0)
    replies = list(ReferenceEngine(problem).run(wanted))
    assert_equal(replies, stacked(problem, wanted))
    plain = list(ReferenceEngine(dataclasses.replace(problem, proven=False)).run(wanted))
    assert_equal(replies, plain)  # and next to those of fast arithmetic


def test_proven_sums_are_float64_from_the_gradients_on() -> None:
    x, y = records(300), torch.arange(300) % 3
    for engine in STEP_SUMS:
        sums = {}
        for proven in (True, False):
            problem = build_replay_problem(x, y, network("cnn"), find_rule("fixed"), proven=proven)
            state = problem.rule.init(Clip(C0=1e-3), problem.shape)
            step = _step(problem, 300)
            found = STEP_SUMS[engine](problem, step, state, torch.ones(300, dtype=torch.bool))
            sums[proven] = found.sum
        assert bool((sums[False] == sums[False].float()).all())
        assert not bool((sums[True] == sums[True].float()).all())
        torch.testing.assert_close(sums[True], sums[False], rtol=1e-4, atol=1e-7)


def _step(problem: Any, count: int) -> Any:
    from fulcrum.engines.neighbours import ReplayedStep
    from fulcrum.training.client import LocalStepTerms

    rows = torch.arange(count)
    theta = problem.layout.flatten(problem.model).detach()
    return ReplayedStep(theta, rows, rows, count, LocalStepTerms(1.0, float(count), 1.0))


@pytest.mark.parametrize("units", [1, 300, 1000, 100_000])
@pytest.mark.parametrize("positions", [1, 16, 784])
def test_the_margin_covers_the_rounding_of_two_sums(units: int, positions: int) -> None:
    margin = choose_sum_margin(units, positions)
    assert margin.eta >= 2 * bound_roundings(units * positions) * units * margin.spread
    assert units * positions > 10**6 or (margin.eta <= 2.0**-10 and margin.spread >= 64)
    assert 0 < margin.eta <= 0.5
    assert choose_sum_margin(10 * units, positions).eta >= margin.eta
    assert SumMargin().eta == 0


def test_a_unit_whose_products_cancel_is_reduced_and_not_let_through() -> None:
    stats = dataclasses.replace(
        _stats([[1.0], [1.0]]), lengths=torch.tensor([[1.0], [1e6]]).double(), margin=choose_sum_margin(300, 784)
    )
    decided = bounds.apply_rule(find_rule("fixed"), stats, {"C": torch.tensor([1.0])})
    reach = decided.factors.double() * stats.lengths
    assert float(decided.factors[0]) > 0.999
    assert float(reach[1]) <= stats.margin.spread
    assert float(decided.factors[1]) < 0.1


def _stats(norms: list[list[float]]) -> Any:
    from fulcrum.types import Stats

    return Stats(torch.tensor(norms), torch.ones(len(norms), dtype=torch.bool))


# --- numbers that do not depend on the batch --------------------------------------------------------


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_proven_numbers_of_an_example_do_not_depend_on_how_many_others_there_are(kind: str) -> None:
    """A unit that is not sampled is missing: the others' numbers must be the same bits in a batch of any size."""
    x, y = records(70), torch.arange(70) % 3
    problem = build_replay_problem(x, y, network(kind), "fixed", proven=True)
    theta = problem.layout.flatten(problem.model).detach()
    recorder = problem.make_recorder()
    whole = recorder(theta, x, y)
    for rows in (torch.arange(1), torch.arange(31), torch.arange(33), torch.arange(1, 70), torch.tensor([9, 4, 60, 5])):
        found = recorder(theta, x[rows], y[rows])
        assert torch.equal(found.matrix(), whole.matrix()[rows])
        for one, all_of_them in zip(found.norm_table(), whole.norm_table(), strict=True):
            assert torch.equal(one, all_of_them[rows])


def test_without_blocks_they_do() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 3))
    x, y = torch.rand(40, 1, 28, 28), torch.arange(40) % 3
    problem = build_replay_problem(x, y, model, "fixed")
    theta = problem.layout.flatten(model).detach()
    whole = problem.make_recorder()(theta, x, y).matrix()
    sizes = (1, 2, 3, 5, 8)
    plain = [problem.make_recorder()(theta, x[:n], y[:n]).matrix() for n in sizes]
    blocks = dataclasses.replace(problem, proven=True).make_recorder()
    fixed = [blocks(theta, x[:n], y[:n]).matrix() for n in sizes]
    assert all(torch.equal(found, blocks(theta, x, y).matrix()[:n]) for n, found in zip(sizes, fixed, strict=True))
    if all(torch.equal(found, whole[:n]) for n, found in zip(sizes, plain, strict=True)):
        pytest.skip("this machine's matrix products round alike in every shape")
