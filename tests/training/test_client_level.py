"""Client level: what one party can change, who is drawn and who pays, and what must stay secret."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import kstest
from torch import nn

import fulcrum
from fulcrum.clipping import find_rule
from fulcrum.clipping.fixed import FIXED, NONE, equal_shares, plain_view, shrink
from fulcrum.clipping.median import MEDIAN
from fulcrum.clipping.rule import ClipRule, ModelFacts
from fulcrum.clipping.testing import check_rule
from fulcrum.engines.parallel import ParallelEngine
from fulcrum.engines.reference import ReferenceEngine
from fulcrum.engines.stacked import StackedEngine
from fulcrum.errors import BudgetError, ConfigError
from fulcrum.privacy import accounting
from fulcrum.privacy.client_level import ESTIMATORS, ClientLevelTerms, MeanEstimator, compute_party_weights
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import Ledger, composition
from fulcrum.rng import SecureRandomness, SeededRandomness
from fulcrum.runs import execute, prepare, resume
from fulcrum.runs import folder as record
from fulcrum.settings.schema import Clip
from fulcrum.training import client_level as central
from fulcrum.training.client_level import average_client_updates, draw_cohort
from fulcrum.training.federation import Federation
from fulcrum.training.loop import federate
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import Bounds, ClientReply, Released, RoundResult, RuleState, Stats
from support.federations import client_federation, client_settings, play, toy_data, toy_problem
from support.randomness import Silent

CHANCE = 1 / 3


def updates_of(deltas: torch.Tensor, clients: list[int]) -> list[ClientReply]:
    return [ClientReply(k, deltas[k], torch.zeros(0), (), {}) for k in clients]


def server(rule: ClipRule = FIXED, **changes: Any) -> TrainingProblem:
    """A problem as the server has it, without noise."""
    return toy_problem(rule, randomness=Silent(), unit="client", **changes)


def terms_of(weights: list[float], rate: float = 0.5, estimator: str = "fixed", floor: float = 1.0) -> ClientLevelTerms:
    total = sum(weights)
    w = torch.tensor(weights, dtype=torch.float64)
    return ClientLevelTerms(rate, w, total, rate * total * floor, estimator, 1.0, 1)


def mean_of(
    problem: TrainingProblem,
    terms: ClientLevelTerms,
    deltas: torch.Tensor,
    clients: list[int],
    state: RuleState | None = None,
) -> torch.Tensor:
    state = state or problem.rule.init(Clip(C0=1.5), problem.shape)
    return average_client_updates(problem, terms, state, updates_of(deltas, clients), 0, 5, 1.0).delta


# --- sensitivity, by neighbouring federations -----------------------------------------------------


def federations(dim: int) -> Iterator[torch.Tensor]:
    """Updates [K, d] of eight parties: ordinary, opposed at full length, and strange ones."""
    generator = torch.Generator().manual_seed(0)
    ordinary = torch.randn(8, dim, generator=generator)
    yield ordinary
    opposed = torch.full((8, dim), 1e3)
    opposed[0] *= -1  # all the others pull one way and this one the other: the worst case of a mean
    yield opposed
    strange = ordinary.clone()
    strange[0] = 1e18
    strange[1] = 0.0
    strange[2, 0] = torch.nan
    strange[3, -1] = torch.inf
    strange[4] = 3e38  # finite, but its norm is not
    strange[5] = 1e-30
    yield strange
    yield torch.zeros(8, dim)


def largest_change(problem: TrainingProblem, terms: ClientLevelTerms, C0: float = 1.5) -> float:
    """The most that leaving out one party moves the mean, over many cohorts."""
    state = problem.rule.init(Clip(C0=C0), problem.shape)
    found = 0.0
    cohorts = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], list(range(8)), [4, 0, 6], [5, 2, 1], [3, 4]]
    for deltas in federations(problem.layout.dim):
        for cohort in cohorts:
            whole = mean_of(problem, terms, deltas, cohort, state)
            assert bool(torch.isfinite(whole).all())
            for k in cohort:
                without = mean_of(problem, terms, deltas, [i for i in cohort if i != k], state)
                zeroed = deltas.clone()
                zeroed[k] = 0.0
                found = max(found, float((whole - without).norm()))
                if terms.estimator == "fixed":  # a party that is there with nothing equals one that is not there
                    torch.testing.assert_close(mean_of(problem, terms, zeroed, cohort, state), without)
    return found


class Scaled(nn.Module):
    """A linear model with one 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.inner = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


WEIGHTS = {"equal": [1.0] * 8, "heavy and light": [1.0, 1.0, 1.0, 0.05, 0.4, 1.0, 0.01, 0.6], "light": [0.1] * 8}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("groups", [(), (0, 0, 1, 1)], ids=["flat", "layer"])
@pytest.mark.parametrize("estimator", ["fixed", "clipped"])
@pytest.mark.every(3)
def test_one_party_moves_the_mean_by_no_more_than_the_sensitivity(
    estimator: str, groups: tuple[int, ...], weights: list[float]
) -> None:
    problem = server(groups=groups)
    for rate, floor in ((0.5, 1.0), (0.25, 0.5), (1.0, 0.3)):
        terms = terms_of(weights, rate, estimator, floor)
        assert largest_change(problem, terms) <= 1.5 * terms.sensitivity * (1 + 1e-4)


def test_a_model_with_a_0d_parameter_is_clipped_like_any_other() -> None:
    for groups in ((), (0, 1, 1)):
        problem = server(model=Scaled(), groups=groups)
        assert problem.layout.sizes[0] == 1
        terms = terms_of([1.0] * 8)
        assert 1.5 * 0.9 < largest_change(problem, terms) / terms.sensitivity <= 1.5 * (1 + 1e-4)


WRONG = {
    "plain mean's sensitivity for a weighted mean": MeanEstimator(
        ESTIMATORS["fixed"].divisor, lambda terms: 1 / (terms.rate * terms.clients)
    ),
    "divides by the realised cohort": MeanEstimator(
        lambda terms, weight: max(weight, 1e-9), lambda terms: 1 / (terms.rate * terms.total)
    ),
    "half the sensitivity of the clipped denominator": MeanEstimator(
        ESTIMATORS["clipped"].divisor, lambda terms: 1 / terms.floor
    ),
}


@pytest.mark.parametrize("estimator", WRONG.values(), ids=WRONG.keys())
def test_wrong_sensitivities_are_rejected(estimator: MeanEstimator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ESTIMATORS._values, "wrong", estimator)
    terms = terms_of(WEIGHTS["heavy and light"], 0.5, "wrong")
    assert largest_change(server(), terms) > 1.5 * terms.sensitivity * 1.05


def test_the_clipped_denominator_where_the_total_crosses_its_floor() -> None:
    """Against the note's table: s others pull one way at full length, one party of weight w the other way."""
    problem = server()
    dim, m = problem.layout.dim, 3.0
    deltas = torch.zeros(12, dim)
    deltas[:, 0] = 100.0
    deltas[0, 0] = -100.0
    seen = []
    for others in range(8):
        for w in (0.25, 0.5, 1.0):
            terms = dataclasses.replace(terms_of([w] + [1.0] * 11, 0.25, "clipped"), floor=m)
            cohort = list(range(1, 1 + others))
            change = mean_of(problem, terms, deltas, [0, *cohort]) - mean_of(problem, terms, deltas, cohort)
            d, after = max(m, others), max(m, others + w)
            wanted = 1.5 * (w / after + others * (after - d) / (d * after))
            assert float(change.norm()) == pytest.approx(wanted, rel=1e-4, abs=1e-6)
            seen.append(wanted / 1.5)
    assert max(seen) == pytest.approx(2 / (m + 1))  # at s = m: nearly twice the fixed denominator's 1 / m
    assert 1 / m < max(seen) <= 2 / m


def test_per_layer_clipping_shares_the_norm_and_differs_from_flat() -> None:
    deltas = torch.ones(2, server().layout.dim)
    flat, layers = (mean_of(server(groups=g), terms_of([1.0, 1.0]), deltas, [0]) for g in ((), (0, 0, 1, 1)))
    assert 1.5 * (1 - 1e-5) <= float(flat.norm()) <= 1.5  # never above; below by the stated error of a norm
    assert float(layers.norm()) == pytest.approx(1.5)  # two layers at 1.5 / sqrt(2) each
    first = sum(server().layout.sizes[:2])
    assert float(layers[:first].norm()) == pytest.approx(1.5 / math.sqrt(2))
    assert not torch.allclose(flat, layers)


def test_the_mean_is_weighted_and_points_where_the_updates_point() -> None:
    deltas = torch.zeros(2, server().layout.dim)
    deltas[0, 0], deltas[1, 1] = 1.0, 0.5  # below S: not clipped
    fixed = mean_of(server(), terms_of([1.0, 0.5], rate=0.8), deltas, [0, 1])
    assert fixed[:2].tolist() == pytest.approx([1 / 1.2, 0.25 / 1.2])
    clipped = mean_of(server(), terms_of([1.0, 0.5], rate=0.8, estimator="clipped"), deltas, [0, 1])
    assert clipped[:2].tolist() == pytest.approx([1 / 1.5, 0.25 / 1.5])
    below = mean_of(server(), terms_of([1.0, 0.5], rate=0.8, estimator="clipped"), deltas, [1])
    assert float(below[1]) == pytest.approx(0.25 / 1.2)


def test_weights_are_capped_at_one() -> None:
    sizes = torch.tensor([10, 20, 40])
    assert compute_party_weights(sizes, "uniform").tolist() == [1, 1, 1]
    assert compute_party_weights(sizes, "examples", 40).tolist() == [0.25, 0.5, 1]
    assert compute_party_weights(sizes, "examples").tolist() == [0.5, 1, 1]  # the median size is the cap
    assert compute_party_weights(sizes, "examples", 1e6).sum() < 1e-3  # a cap far above the sizes only makes noise


# --- noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["fixed", "clipped"])
def test_the_noise_of_a_mean_has_z_times_its_sensitivity(estimator: str) -> None:
    terms = terms_of([1.0, 1.0, 0.5, 0.5], 0.5, estimator, 0.8)
    problem = toy_problem(FIXED, randomness=SeededRandomness(4), unit="client")
    state = problem.rule.init(Clip(C0=2.0), problem.shape)
    noise = torch.cat([average_client_updates(problem, terms, state, [], t, 99, 1.3).delta for t in range(60)])
    scale = 1.3 * 2.0 * (1 / 1.5 if estimator == "fixed" else 2 / 1.2)
    assert kstest(noise.numpy() / scale, "norm").pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert kstest(noise.numpy() / (wrong * scale), "norm").pvalue < 1e-6


def test_without_clipping_and_noise_it_is_plain_federated_averaging() -> None:
    sections: dict[str, Any] = {"train": {"participation": 1.0, "steps": 2, "weight_decay": 0.01}}
    mine = play(client_federation(clip={"rule": "none"}, **sections))[-1].params
    plain = play(client_federation(clip={"rule": "none"}, privacy={"unit": "example"}, **sections))[-1].params
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)
    clipped = play(client_federation(clip={"C0": 0.01}, **sections))[-1].params
    assert not torch.allclose(clipped, plain, rtol=1e-2, atol=1e-3)


def test_a_round_that_nobody_joins_is_noised_released_and_charged() -> None:
    results = play(client_federation(3, train={"participation": 0.2, "rounds": 12}, run={"diagnostics": True}))
    pairs = list(itertools.pairwise(results))
    empty = [(before, after) for before, after in pairs if after.diagnostics["participants"] == 0]
    assert 3 < len(empty) < len(pairs)
    for before, after in empty:
        assert 0.3 < float((after.params - before.params).std()) * 0.2 * 3 < 3  # noise of about z C / (q_c K)
        assert after.epsilon > before.epsilon


def test_zero_and_broken_updates_do_not_stop_a_round() -> None:
    for reply in (torch.zeros(8), torch.full((8,), torch.nan), torch.full((8,), -torch.inf)):
        deltas = torch.stack([torch.nn.functional.pad(reply, (0, server().layout.dim - 8))] * 3)
        assert torch.equal(mean_of(server(), terms_of([1.0] * 3), deltas, [0, 1]), torch.zeros(deltas.shape[1]))


# --- who is drawn, who pays -----------------------------------------------------------------------


def test_the_draw_is_poisson_and_secret() -> None:
    terms = terms_of([1.0] * 2000, rate=0.3)
    one = [draw_cohort(SeededRandomness(1), t, terms) for t in range(20)]
    assert one == [draw_cohort(SeededRandomness(1), t, terms) for t in range(20)]  # what resuming relies on
    assert one != [draw_cohort(SeededRandomness(2), t, terms) for t in range(20)]
    assert draw_cohort(SecureRandomness(), 0, terms) != draw_cohort(SecureRandomness(), 0, terms)
    sizes = [len(cohort) for cohort in one]
    assert len(set(sizes)) > 5  # a fixed number a round would be another mechanism
    assert abs(sum(sizes) / 20 - 600) < 5 * math.sqrt(2000 * 0.3 * 0.7 / 20)


def test_the_draw_does_not_use_the_public_stream() -> None:
    """Two runs with the same public seed and different secret randomness draw different participants."""
    federation = client_federation(40, run={"diagnostics": True})
    other = dataclasses.replace(
        federation, problem=dataclasses.replace(federation.problem, randomness=SeededRandomness(99))
    )
    counts = [[r.diagnostics["participants"] for r in play(f)] for f in (federation, federation, other)]
    assert counts[0] == counts[1] != counts[2]


def test_everyone_is_charged_every_round_whether_drawn_or_not() -> None:
    federation = client_federation(5, train={"participation": 0.3, "rounds": 7})
    with Ledger.open(":memory:") as ledger:
        results = [result for result, _ in federate(federation, ledger, "r")]
        spent = accounting.compute_epsilon([Gaussian(0.3, 1.0, 7)], 1e-5)
        for k in range(5):
            entries = ledger.entries(federation.plan.name(k))
            assert [(e.round, e.events) for e in entries] == [(t, (Gaussian(0.3, 1.0, 1),)) for t in range(7)]
            assert len({e.digest for e in entries}) == 7
            assert ledger.epsilon(federation.plan.name(k)) == pytest.approx(spent)
        by_round = zip(*(ledger.entries(federation.plan.name(k)) for k in range(5)), strict=True)
        assert all(len({entry.digest for entry in entries}) == 1 for entries in by_round)  # one release for all
    assert results[-1].epsilons == pytest.approx([spent] * 5)
    assert spent < accounting.compute_epsilon([Gaussian(1.0, 1.0, 7)], 1e-5)  # the secret draw does amplify


def test_participants_are_in_no_result_and_no_file(tmp_path: Path) -> None:
    data = toy_data(30)
    for unit, told in (("client", False), ("example", True)):
        settings = client_settings(10, privacy={"unit": unit}, train={"rounds": 4})
        seen: list[RoundResult] = []
        execute(prepare(settings, data), tmp_path / unit, seen.append)
        assert all((r.participants is not None) == told for r in seen)
        lines = record.load_metrics(tmp_path / unit)
        assert all(("participants" in line) == told for line in lines)
        with closing(record.RunFolder.open(tmp_path / unit)) as folder:
            last = folder.load_last_snapshot(torch.device("cpu"))
        assert last is not None
        assert bool(last.participations.any()) == told
    summary = record.load_summary(tmp_path / "client")
    assert summary["unit"] == "client"
    assert len(summary["epsilons"]) == 10


def test_a_round_of_many_parties_is_few_transactions() -> None:
    federation = client_federation(1500, 1, train={"participation": 0.002, "rounds": 3})
    with Ledger.open(":memory:") as ledger:
        statements: list[str] = []
        ledger._store.db.set_trace_callback(statements.append)
        results = [result for result, _ in federate(federation, ledger, "r")]
        writes = sum(text.startswith("BEGIN IMMEDIATE") for text in statements)
        charged = ledger.epsilons()
    assert writes <= 2 + 2 * 3  # enrol and plan once; reserve and settle each round
    assert len(charged) == 1500
    assert set(charged.values()) == {results[-1].epsilon}


def test_a_release_that_was_not_reserved_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = client_federation()

    def quieter(problem: TrainingProblem, *arguments: Any) -> Any:
        terms, state, replies, t, rounds, sigma, _ = arguments
        return average_client_updates(problem, terms, state, replies, t, rounds, sigma / 2)

    monkeypatch.setattr("fulcrum.training.round.average_client_updates", quieter)
    with pytest.raises(BudgetError, match=r"the server released .* was reserved"):
        play(federation)


def test_the_run_stops_before_a_kept_budget_is_overspent(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    plan = accounting.Spend.empty().add_events([Gaussian(0.5, 1.0, 6)])  # its Renyi order stays for later runs
    order = composition.choose_order_for_plan(plan, 1e-5)
    budget = composition.compute_epsilon_at_order(plan.add_events([Gaussian(0.5, 1.0, 2)]), 1e-5, order)
    lengths = [len(play(client_federation(privacy={"budget": budget}), path, run)) for run in ("a", "b", "c")]
    assert lengths == [6, 2, 0]
    with Ledger.open(path) as ledger:
        assert all(epsilon <= budget for epsilon in ledger.epsilons().values())
    with pytest.raises(ConfigError, match="unit = 'client', not 'example'"):
        play(client_federation(privacy={"budget": budget, "unit": "example"}), path, "d")


def test_a_party_without_budget_leaves_the_draw_and_pays_no_more(tmp_path: Path) -> None:
    """And a run that is resumed after that knows it."""
    settings = client_settings(train={"rounds": 8, "participation": 0.9}, run={"checkpoint_every": 2})
    data = toy_data(18)
    poor = accounting.compute_epsilon([Gaussian(0.9, 1.0, 3)], 1e-5)

    def spoil(federation: Federation) -> Federation:
        account = federation.plan.terms
        poorer = {0: {**account(0), "budget": poor}}
        object.__setattr__(federation.plan, "terms", lambda k: poorer.get(k) or account(k))
        return federation

    results = play(spoil(prepare(settings, data)))
    assert [r.out_of_budget for r in results] == [()] * 3 + [(0,)] * 5
    assert results[-1].epsilons[0] == pytest.approx(poor)
    assert results[-1].epsilons[1] == pytest.approx(accounting.compute_epsilon([Gaussian(0.9, 1.0, 8)], 1e-5))

    folder = tmp_path / "run"
    execute(spoil(prepare(settings, data)), folder)
    whole = outcome(folder)
    for file in sorted((folder / "checkpoints").iterdir())[-1:]:
        file.unlink()
    resume(folder, dataset=data)
    assert outcome(folder) == whole


def test_an_engine_is_asked_for_plain_training() -> None:
    federation = client_federation(train={"participation": 1.0, "steps": 3, "rate": 0.4})
    assert isinstance(federation.engine, ReferenceEngine | StackedEngine | ParallelEngine)
    assert federation.engine.problem.rule is NONE
    task = federation.plan.assignment(2, 0, 0.1)
    assert (task.rate, task.sigma, task.steps) == (0.4, 0.0, 3)


# --- resuming -------------------------------------------------------------------------------------


def outcome(folder: Path) -> dict[str, Any]:
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in record.load_metrics(folder)]
    return {"lines": lines, "model": (folder / "model.safetensors").read_bytes()}


class Stop(Exception):
    """Something that ends a run early."""


@pytest.mark.parametrize("rule", ["fixed", "median", "test_client_level:QUANTILE"])
def test_an_interrupted_run_ends_with_the_same_bits(rule: str, tmp_path: Path) -> None:
    data = toy_data(30)
    settings = client_settings(
        10, clip={"rule": rule}, train={"rounds": 9, "server": "adam", "ema": 0.5}, run={"checkpoint_every": 4}
    )
    execute(prepare(settings, data), tmp_path / "whole")

    def stop(result: RoundResult) -> None:
        if result.round == 6:
            raise Stop

    with pytest.raises(Stop):
        execute(prepare(settings, data), tmp_path / "cut", stop)
    (tmp_path / "cut" / "checkpoints" / "round-000006.safetensors").unlink()  # as after kill -9: back to round 4
    resume(tmp_path / "cut", dataset=data)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    with Ledger.open(tmp_path / "cut" / "ledger.sqlite") as cut, Ledger.open(tmp_path / "whole" / "ledger.sqlite") as w:
        assert cut.epsilons() == w.epsilons()
    execute(prepare(settings.replace(run={"seed": 1}), data), tmp_path / "other")
    assert outcome(tmp_path / "other") != outcome(tmp_path / "whole")


def test_a_secure_run_draws_anew_and_everyone_pays_again(tmp_path: Path) -> None:
    data, settings = toy_data(12), client_settings(4, privacy={"randomness": "secure"}, train={"rounds": 3})
    execute(prepare(settings, data), tmp_path / "run")
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    sorted((tmp_path / "run" / "checkpoints").iterdir())[-1].unlink()  # round 3 was released but not kept
    resume(tmp_path / "run", dataset=data)
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert [len(ledger.entries(name)) for name in ledger.accounts()] == [4] * 4
    assert (tmp_path / "run" / "model.safetensors").read_bytes() != before


# --- rules over updates ---------------------------------------------------------------------------


def _init_quantile(settings: Clip, shape: ModelFacts) -> RuleState:
    return {"C": equal_shares(settings.C0, shape.count), "eta_C": torch.tensor(0.2), "gamma": torch.tensor(0.5)}


def _clip_quantile(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    whole = torch.linalg.vector_norm(stats.norms, dim=1)
    below = (whole <= torch.linalg.vector_norm(state["C"])).to(stats.norms) - 0.5
    return shrink(stats.norms, state["C"]), below[:, None] * stats.mask[:, None], state


def _adapt_quantile(state: RuleState, released: Released) -> RuleState:
    below = released.extra[0] + 0.5
    return {**state, "C": state["C"] * torch.exp(-state["eta_C"] * (below - state["gamma"]))}


QUANTILE = ClipRule(
    name="small-quantile",
    init=_init_quantile,
    view=plain_view,
    clip=_clip_quantile,
    bounds=lambda state: Bounds(state["C"], 0.5),
    adapt=_adapt_quantile,
    share=lambda sigma, batch: (sigma / (2 * max(batch / 20, 5 * sigma))) ** 2,
    cost="paid",
)
"""Andrew's rule as small as it gets: enough to see that a rule with statistics works on updates."""


def test_a_rule_with_statistics_moves_C_by_hand_computed_steps() -> None:
    problem, terms = server(QUANTILE), terms_of([1.0, 0.5, 0.5, 1.0], rate=0.5)  # q_c K = 2
    state = problem.rule.init(Clip(C0=1.0), problem.shape)
    deltas = torch.zeros(4, problem.layout.dim)
    deltas[:, 0] = torch.tensor([0.5, 0.8, 3.0, 0.1])
    reply = average_client_updates(problem, terms, state, updates_of(deltas, [0, 1, 2]), 0, 5, 1.0)
    assert reply.extra.tolist() == pytest.approx([(0.5 + 0.5 - 0.5) / 2])  # unweighted, over q_c K and not over 3
    moved = problem.rule.adapt(reply.state, central.make_server_release(reply, terms, 1.0, 0, 5))
    assert float(moved["C"]) == pytest.approx(math.exp(-0.2 * (0.25 + 0.5 - 0.5)))
    assert float(moved["C"]) < 1  # more than half lie below C, so C shrinks
    wanted = (0.5 + 0.5 * 0.8 + 0.5 * 1.0) / 1.5
    assert wanted * (1 - 1e-5) <= reply.delta[0].item() <= wanted + 1e-6  # a clipped norm is never above C
    assert reply.events == (Gaussian(0.5, 1.0, 1),)


@pytest.mark.slow
def test_statistics_and_mean_share_one_event() -> None:
    """z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2) on the mean, sigma_b on the count, as Andrew has it."""
    terms, z = terms_of([1.0] * 40, rate=0.5), 0.8
    problem = toy_problem(QUANTILE, randomness=SeededRandomness(2), unit="client")
    state = problem.rule.init(Clip(C0=2.0), problem.shape)
    replies = [average_client_updates(problem, terms, state, [], t, 99, z) for t in range(1500)]
    sigma_b = max(20 / 20, 5 * z)
    count_noise = torch.cat([reply.extra for reply in replies]) * 20
    mean_noise = torch.cat([reply.delta[:10] for reply in replies])
    z_delta = (z**-2 - (2 * sigma_b) ** -2) ** -0.5
    assert kstest(count_noise.numpy() / sigma_b, "norm").pvalue > 1e-3
    assert kstest(count_noise.numpy() / (1.5 * sigma_b), "norm").pvalue < 1e-6
    assert kstest(mean_noise.numpy() / (z_delta * 2.0 / 20), "norm").pvalue > 1e-3
    assert kstest(mean_noise.numpy() / (1.5 * z_delta * 2.0 / 20), "norm").pvalue < 1e-6


def test_the_rule_of_these_tests_keeps_the_contract() -> None:
    check_rule(QUANTILE)


def test_the_free_rule_moo_moves_C_on_updates_too() -> None:
    results = play(client_federation(40, clip={"rule": "moo", "C0": 0.1}, train={"rounds": 12}))
    C = [r.C[0] for r in results]
    assert len(set(C)) > 3
    assert C[-1] > 0.1  # far too small a start: released means keep pointing the same way


def test_the_median_follows_the_raw_norms() -> None:
    state = MEDIAN.init(Clip(C0=9.0), ModelFacts(2, (2,)))
    norms = torch.tensor([[1.0], [4.0], [2.0], [100.0], [7.0]])
    mask = torch.tensor([True, True, True, False, False])
    factors, _, after = MEDIAN.clip(Stats(norms, mask), state)
    assert after["C"].tolist() == [2.0]
    assert factors[:3, 0].tolist() == [1.0, 0.5, 1.0]
    even = Stats(norms, torch.tensor([True, True, True, False, True]))
    assert MEDIAN.clip(even, state)[2]["C"].tolist() == [3.0]
    nobody = Stats(norms[:0], mask[:0])
    assert MEDIAN.clip(nobody, state)[2]["C"].tolist() == [9.0]
    zeros = Stats(torch.zeros(3, 1), torch.ones(3, dtype=torch.bool))
    assert MEDIAN.clip(zeros, state)[2]["C"].tolist() == pytest.approx([1e-3])  # not a noise of zero
    two = MEDIAN.clip(
        Stats(torch.tensor([[1.0, 5.0]]), torch.tensor([True])), MEDIAN.init(Clip(), ModelFacts(2, (1, 1), (0, 1)))
    )
    assert two[2]["C"].tolist() == [1.0, 5.0]


def test_the_median_is_not_sound_and_says_so_everywhere(tmp_path: Path) -> None:
    """One party moves C itself, which nothing bounds; so epsilon is nominal in every place that shows it."""
    problem = server(MEDIAN)
    state = problem.rule.init(Clip(), problem.shape)
    deltas = torch.ones(3, problem.layout.dim) * torch.tensor([[1.0], [1.0], [1e4]])
    with_it, without = (
        average_client_updates(problem, terms_of([1.0] * 3), state, updates_of(deltas, who), 0, 5, 1.0).state["C"]
        for who in ([1, 2], [1])
    )
    assert float(with_it - without) > 100
    with pytest.raises(AssertionError, match="bounds say"):
        check_rule(dataclasses.replace(MEDIAN, sound=True, normalises=True))
    result = execute(client_federation(clip={"rule": "median"}), tmp_path / "run")
    assert not result.sound
    assert any("NOT SOUND" in warning for warning in result.summary["warnings"])
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["guarantee"] == "nominal"
    assert "NOMINAL" in (tmp_path / "run" / "PRIVACY.md").read_text()
    lines = record.load_metrics(tmp_path / "run")
    assert len({line["C"] for line in lines}) > 1
    assert all(line["C"] != 1.0 for line in lines[:1])  # the C that was used, not the one before


def test_rules_that_cannot_clip_updates_at_the_server_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(FIXED, name="own", where="client")
    view = dataclasses.replace(FIXED.view({}, 0, 1), losses=True)
    looking = dataclasses.replace(FIXED, name="looking", view=lambda state, t, rounds: view)
    for rule, words in ((own, "keeps a C at each party"), (looking, "looks at losses")):
        monkeypatch.setattr("fulcrum.runs.preparation.find_rule", lambda name, rule=rule: rule)
        with pytest.raises(ConfigError, match=words):
            client_federation()


# --- settings, presets, training ------------------------------------------------------------------


def test_settings_that_make_no_sense_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy.max_participations = 3 .* every party is charged for every round"):
        client_federation(privacy={"max_participations": 3})
    with pytest.raises(ConfigError, match=r"client_level\.estimator"):
        client_federation(client_level={"estimator": "mean"})
    with pytest.raises(ConfigError, match=r"client_level\.min_weight"):
        client_federation(client_level={"min_weight": 0.0})


@pytest.mark.parametrize("method", ["dp-fedavg", "median"])
def test_presets_protect_whole_parties(method: str) -> None:
    result = fulcrum.train(
        toy_data(40), method=method, parties=10, partition="iid", min_examples=2, rounds=3, epsilon=4.0
    )
    assert result.summary["unit"] == "client"
    assert result.settings.train.participation < 1
    assert result.epsilon <= 4.0
    assert result.sound == find_rule(result.settings.clip.rule).sound
    assert any("among 10" in warning for warning in result.summary["warnings"])


def test_a_0d_parameter_model_trains() -> None:
    settings = client_settings(20, clip={"groups": "layer"})
    results = list(fulcrum.rounds(toy_data(40), Scaled(), settings=settings))
    assert torch.isfinite(results[-1].params).all()
    assert len(results[-1].C) == 2


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["fixed", "clipped"])
def test_with_hundreds_of_parties_it_learns_and_with_ten_it_does_not(estimator: str) -> None:
    def accuracy(parties: int) -> float:
        found = []
        for seed in range(4):
            federation = client_federation(
                parties,
                2,
                train={"rounds": 15, "participation": 0.15, "steps": 2, "lr": 0.5},
                privacy={"sigma": None, "epsilon": 3.61, "seed": seed},
                client_level={"estimator": estimator},
            )
            found.append(float(execute(federation).accuracy))
        return sum(found) / len(found)

    assert accuracy(400) > CHANCE + 0.4
    assert accuracy(10) < accuracy(400) - 0.1
