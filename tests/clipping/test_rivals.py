"""The rivals of a rule without tuning: HyFreeDP in a sound form, DP-MacAdam, DP-AdamBC and D-Adaptation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import fulcrum
from fulcrum.clipping import ModelFacts, find_rule
from fulcrum.clipping.hyfree import HYFREE, LOSS_SHARE
from fulcrum.clipping.macadam import BETA_1, MACADAM, update_moments
from fulcrum.clipping.rule import gradient_multiplier
from fulcrum.engines.batched import run_many
from fulcrum.engines.neighbours import build_replay_problem, replay_neighbours
from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.plan import make_plan
from fulcrum.runs import prepare
from fulcrum.settings.presets import METHODS
from fulcrum.settings.schema import Clip, Settings, Train
from fulcrum.training.loop import federate
from fulcrum.training.server import SERVERS, compute_update_noise
from fulcrum.types import Axes, Released, RuleState, View
from support.federations import toy_data, toy_model, toy_settings

RIVALS = ("hyfreedp", "dp-macadam", "dp-adambc", "d-adaptation")
FLAT = ModelFacts(2, (2,))


def released(extra: tuple[float, ...] = (), **more: Any) -> Released:
    words: dict[str, Any] = {
        "lr": 0.5,
        "steps": 1.0,
        "round": 1,
        "rounds": 10,
        "moved": torch.tensor([1.0, 0.0]),
        **more,
    }
    return Released(torch.tensor([0.5, 0.0]), torch.tensor(extra), **words)


# --- HyFreeDP -------------------------------------------------------------------------------------


def parabola(best: float, bend: float = 0.4) -> tuple[float, float, float]:
    """Losses before the last step, after it and as far behind, where the least loss is `best` steps away."""
    before, after, behind = (1.0 + bend / 2 * (c - best) ** 2 for c in (0.0, 1.0, -1.0))
    return before, after, behind


@pytest.mark.parametrize(("best", "factor"), [(1.0, 1.0), (1.5, 1.45), (0.7, 0.73), (9.0, 1.9), (0.1, 0.55)])
def test_the_step_goes_to_the_least_of_the_parabola_within_a_factor_of_two(best: float, factor: float) -> None:
    state = {**HYFREE.init(Clip(), FLAT), "moved": torch.tensor([1.0, 0.0])}
    after = HYFREE.adapt(state, released(parabola(best)))
    assert float(after["C"].norm()) == pytest.approx(factor, rel=1e-4)
    assert float(after["limit"]) == pytest.approx(parabola(best)[0], rel=1e-5)


def test_the_step_stays_without_a_valley_without_losses_and_before_the_first_step() -> None:
    first = HYFREE.init(Clip(), FLAT)
    moved = {**first, "moved": torch.tensor([1.0, 0.0])}
    hill, rising = parabola(1.5, bend=-0.4), parabola(-1.0)
    for state, what in (
        (moved, released(hill)),
        (moved, released(rising)),
        (moved, released((0.0, 0.0, 0.0), asked=0.0)),
        (first, released(parabola(2.0))),
    ):
        assert torch.equal(HYFREE.adapt(state, what)["C"], state["C"])
    assert not torch.equal(HYFREE.adapt(moved, released(parabola(2.0)))["C"], moved["C"])
    assert torch.equal(HYFREE.adapt(first, released(parabola(2.0)))["moved"], torch.tensor([1.0, 0.0]))


def plan_of(method: str, **train: Any) -> Any:
    parts = METHODS[method].parts["clip"]
    settings = Settings().replace(
        train={"rounds": 100, "rate": 0.05, **train}, clip=dict(parts), privacy={"epsilon": 3.0}
    )
    return make_plan(settings, 2, [500, 500], find_rule(settings.clip.rule))


@pytest.mark.parametrize("steps", [1, 3])
def test_probe_rounds_are_charged_as_one_release_of_gradient_and_losses(steps: int) -> None:
    """Every fifth round, in its first step: 20 of 100 rounds. Charging them as gradients alone would be too little."""
    plan, plain = plan_of("hyfreedp", steps=steps), plan_of("dp-sgd", steps=steps)
    sigma = plan.groups[0].sigma
    alone = gradient_multiplier(HYFREE.share, sigma, 25.0)
    total = 100 * steps
    true = Spend.empty().add_events((Gaussian(0.05, sigma, 20), Gaussian(0.05, alone, total - 20))).epsilon(1e-5)
    assert plan.compute_epsilon_at(100, 0) == pytest.approx(true, rel=1e-9)
    assert true == pytest.approx(3.0, rel=1e-3)
    too_little = Spend.empty().add_events((Gaussian(0.05, alone, total),)).epsilon(1e-5)
    assert too_little < 0.998 * true
    # The joint release: 1 / sigma^2 = 1 / sigma_g^2 + 3 / sigma_l^2, and sigma_g is about 1.01 times DP-SGD's.
    losses = sigma * math.sqrt(3 / LOSS_SHARE)
    assert (alone**-2 + 3 * losses**-2) ** -0.5 == pytest.approx(sigma, rel=1e-9)
    if steps == 1:
        assert alone / plain.groups[0].sigma == pytest.approx(1.01, abs=0.004)
    assert [bool(plan.groups[0].assignment(0, t, 1.0).asked(t)) for t in range(6)] == [True] + 4 * [False] + [True]


@pytest.mark.parametrize("engine", ["reference", "parallel", "stacked"])
@pytest.mark.parametrize("rule", ["hyfree", "macadam"])
def test_a_neighbour_moves_sums_and_losses_by_no_more_than_is_charged(engine: str, rule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = 3 * torch.randn(12, 6, generator=generator), torch.arange(12) % 3
    x[0] *= 1e3  # a loss far above the limit
    model = toy_model()
    problem = build_replay_problem(x, y, model, rule)
    state = dict(problem.rule.init(Clip(), problem.shape))
    for name in ("moved", "centre"):
        if name in state:
            state[name] = torch.randn(problem.layout.dim, generator=generator)
    rows = torch.arange(12)
    for target in (0, 5):
        replay = replay_neighbours(problem, engine, state, rows, target)
        assert 0 < replay.sum <= 1 + 1e-5
        assert replay.extra <= 1 + 1e-5
        assert rule != "hyfree" or replay.extra > 0.01
    loose = dataclasses.replace(
        problem.rule,
        bounds=lambda state: dataclasses.replace(problem.rule.bounds(state), C=state["C"] / 4),
        sound=False,
    )  # what is not sound is not held to its bounds: the check must see it
    wrong = replay_neighbours(dataclasses.replace(problem, rule=loose), engine, state, rows, 0)
    assert wrong.sum > 2


# --- DP-MacAdam -----------------------------------------------------------------------------------


def test_the_variance_of_releases_is_estimated_without_bias_and_a_plain_square_is_not() -> None:
    generator = torch.Generator().manual_seed(1)
    dim, rounds = 20_000, 6
    state: RuleState = MACADAM.init(Clip(), ModelFacts(dim, (dim,)))
    plain = torch.zeros(dim)
    for t in range(rounds):
        g = 2.0 + 0.5 * torch.randn(dim, generator=generator)
        now = Released(-0.5 * g, torch.zeros(0), 0.5, 1.0, t, rounds)
        moments = update_moments(state, now)
        plain = BETA_1 * plain + (1 - BETA_1) * (g - moments.mean).square()
        state = MACADAM.adapt(state, now)
    kappa = 2 * (BETA_1 - BETA_1**rounds) / (1 + BETA_1)
    assert float((state["s"] / kappa).mean()) == pytest.approx(0.25, rel=0.03)
    assert float((plain / kappa).mean()) < 0.2


def test_axes_centre_and_scale_each_gradient_and_the_mean_comes_back() -> None:
    axes = Axes(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 0.5]))
    gradients = torch.tensor([[3.0, 0.0], [1.0, -1.0]])
    assert axes.forward(gradients).tolist() == [[1.0, 2.0], [0.0, 0.0]]
    mean = View(axes=axes).restore_gradient(axes.forward(gradients).sum(dim=0), 2.0)
    assert mean.tolist() == [2.0, -0.5]


def test_a_coordinate_with_more_variance_gets_a_larger_bound() -> None:
    generator = torch.Generator().manual_seed(2)
    state: RuleState = MACADAM.init(Clip(), ModelFacts(4, (4,)))
    for t in range(40):
        g = torch.randn(4, generator=generator) * torch.tensor([5.0, 5.0, 0.1, 0.1])
        state = MACADAM.adapt(state, Released(-g, torch.zeros(0), 1.0, 1.0, t, 40, noise=0.01))
    assert float(state["scale"][:2].min()) > 1.5 * float(state["scale"][2:].max())


# --- server optimisers -----------------------------------------------------------------------------


def play_server(name: str, slope: float, noise: float, rounds: int, dim: int = 400) -> tuple[torch.Tensor, RuleState]:
    """The sum of changes over some rounds of a constant gradient with noise, at server_lr = 1."""
    generator = torch.Generator().manual_seed(0)
    optimiser, train = SERVERS.find(name), Train(server_beta2=0.999)
    state, total = optimiser.init(dim), torch.zeros(dim)
    for t in range(rounds):
        aggregate = -slope * torch.ones(dim) + noise * torch.randn(dim, generator=generator)
        now = Released(aggregate, torch.zeros(0), 1.0, 1.0, t, rounds, noise=noise / 2.0)
        change, state = optimiser.move(aggregate, state, train, now, torch.tensor([2.0]))
        total = total + change
    return total, state


def test_adam_bc_takes_full_steps_where_the_noise_hides_the_second_moment_from_adam() -> None:
    rounds = 300
    corrected, _ = play_server("adam-bc", 0.5, 1.0, rounds)
    plain, _ = play_server("adam", 0.5, 1.0, rounds)
    assert float(-corrected.mean()) / rounds == pytest.approx(1.0, abs=0.15)  # Adam of a constant gradient: steps of 1
    assert float(-plain.mean()) / rounds < 0.6
    quiet, _ = play_server("adam-bc", 0.5, 0.0, 20)
    assert torch.allclose(quiet, play_server("adam", 0.5, 0.0, 20)[0], rtol=0.01)


def test_the_noise_of_an_update_follows_the_length_to_which_a_rule_brought_it() -> None:
    now = Released(torch.tensor([3.0, 4.0]), torch.zeros(0), 0.5, 2.0, 0, 1, noise=0.1)
    assert float(compute_update_noise(now, 2 * now.aggregate, torch.tensor([4.0]))) == pytest.approx(0.8)
    silent = dataclasses.replace(now, noise=0.0)
    assert float(compute_update_noise(silent, now.aggregate, torch.tensor([math.inf]))) == 0.0


def test_d_adaptation_finds_the_distance_without_noise_and_fails_with_it() -> None:
    def descend(noise: float) -> float:
        generator = torch.Generator().manual_seed(0)
        optimiser, x, target = SERVERS.find("d-adaptation"), torch.zeros(100), torch.full((100,), 3.0)
        state = optimiser.init(100)
        for t in range(200):
            g = torch.sign(x - target) + noise * torch.randn(100, generator=generator)
            now = Released(-g, torch.zeros(0), 1.0, 1.0, t, 200)
            change, state = optimiser.move(-g, state, Train(), now, torch.ones(1))
            x = x + change
        return float(state["distance"]) / 30.0  # as a part of the true distance

    assert 0.5 < descend(0.0) < 1.05
    assert descend(30.0) < 0.01


# --- whole runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", RIVALS)
@pytest.mark.parametrize("steps", [1, 2])
def test_stacked_runs_equal_the_reference(method: str, steps: int) -> None:
    def make(engine: str, seed: int, lr: float, server: str) -> Any:
        parts = {name: dict(values) for name, values in METHODS[method].parts.items()}
        settings = toy_settings(
            **{**parts, "train": {"steps": steps, "lr": lr, "server": server, **parts.get("train", {})}}
        )
        return prepare(settings.replace(run={"seed": seed, "engine": engine}), toy_data())

    cells = [(0, 0.5, "momentum"), (1, 2.0, "momentum")]
    *_, last = run_many([make("auto", *cell) for cell in cells])
    for i, cell in enumerate(cells):
        *_, (result, _) = federate(make("reference", *cell))
        assert float(last.metrics["loss"][i]) == pytest.approx(result.metrics["loss"], rel=1e-4)
        assert last.C[i].tolist() == pytest.approx(result.C, rel=1e-4)


def test_what_cannot_work_together_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"clip\.rule = 'hyfree' asks the parties for losses"):
        fulcrum.train(toy_data(), method="hyfreedp", unit="client", sigma=1.0, rounds=1)
    for rule in ("macadam", "wav", "moo-client"):
        with pytest.raises(ConfigError, match=r"train\.server = 'adam-bc' needs one noise"):
            fulcrum.train(toy_data(), clip={"rule": rule}, train={"server": "adam-bc"}, sigma=1.0, rounds=1)
