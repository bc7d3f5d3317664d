"""Several client-level runs at once: each equals itself alone on the reference engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fulcrum.data import Dataset
from fulcrum.engines.batched import BatchedRoundResult, chunks, local_steps, run_many, runs
from fulcrum.engines.batched.jobs import JobTable, draw_round_cohorts, make_job_table
from fulcrum.engines.batched.local_steps import JobRounds
from fulcrum.engines.batched.noise_at import NoiseAtServer
from fulcrum.engines.stacked import sampling
from fulcrum.engines.stacked.replay import GraphReplayer
from fulcrum.rng import SeededRandomness
from fulcrum.runs import prepare
from fulcrum.training.federation import Federation
from support.devices import NoHost
from support.federations import client_settings, play, toy_data
from support.randomness import Once
from support.rounds import last_model

DATA = toy_data()


def pair(data: Dataset = DATA, **shared: dict[str, Any]) -> list[Federation]:
    """Two runs that differ in seed, parties, participation, estimator, local rate, learning rate, sigma and server."""
    found = []
    for seed, (parties, q, estimator, rate, lr, sigma, server_lr) in enumerate(
        ((6, 0.5, "fixed", 0.5, 0.3, 0.7, 1.0), (9, 0.3, "clipped", 0.9, 0.2, 1.5, 0.7))
    ):
        own: dict[str, dict[str, Any]] = {
            "run": {"seed": seed, "engine": "reference"},
            "data": {"partition": "quantity", "min_examples": 2},
            "train": {"participation": q, "rate": rate, "lr": lr, "server_lr": server_lr, "weights": "examples"},
            "client_level": {"estimator": estimator, "weight_cap": 12.0},
            "privacy": {"unit": "client", "sigma": sigma},
        }
        found.append(prepare(client_settings(parties, **own).replace(**shared), data))
    return found


RULES = ("none", "fixed", "quantile", "moo", "moo-c", "moo-scalar", "dynamic", "oso", "auto-s", "units-of-c")

CASES: dict[str, dict[str, Any]] = {
    **{rule: {"clip": {"rule": rule}} for rule in RULES},
    **{
        f"{rule}, {estimator} divisor, {weights} weights": {
            "clip": {"rule": rule, "C0": 0.3},
            "client_level": {"estimator": estimator, "weight_cap": 12.0},
            "train": {"weights": weights},
        }
        for rule in ("fixed", "quantile")
        for estimator in ("fixed", "clipped")
        for weights in ("uniform", "examples")
    },
    "empty rounds": {"train": {"participation": 0.08, "rounds": 12}, "clip": {"rule": "quantile"}},
    "layers": {"clip": {"rule": "quantile", "groups": "layer"}, "model": {"name": "mlp", "hidden": (4,)}},
    "schedules": {
        "model": {"name": "mlp", "hidden": (4,)},
        "train": {"schedule": "cosine", "weight_decay": 0.1, "server": "adam", "ema": 0.5},
        "privacy": {"noise_schedule": "growth", "rho_mu": 0.3},
    },
}


def never(*args: Any) -> None:
    raise AssertionError("these runs were to be played by JobRounds")


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SeparateRuns", never)


def assert_as_alone(feds: list[Federation], rounds: list[BatchedRoundResult]) -> None:
    assert rounds[-1].averaged is not None
    for r, federation in enumerate(feds):
        alone = play(federation)
        for many, one in zip(rounds, alone, strict=True):
            assert many.participants[r] == tuple(range(federation.plan.parties))  # those who paid
            assert many.C[r].tolist() == pytest.approx(one.C, rel=1e-4)
            assert one.loss is not None
            assert float(many.loss[r]) == pytest.approx(one.loss, rel=1e-3)
        torch.testing.assert_close(rounds[-1].averaged[r], alone[-1].averaged, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("stacked")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(4)
def test_each_run_equals_itself_alone(case: str, steps: int) -> None:
    feds = [prepare(f.settings.replace(train={"steps": steps}), DATA) for f in pair(**CASES[case])]
    assert_as_alone(feds, list(run_many(feds)))


@pytest.mark.usefixtures("stacked")
@pytest.mark.parametrize("rule", ["quantile", "oso"])
def test_jobs_in_groups_and_examples_in_pieces_give_the_same(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feds = pair(clip={"rule": rule}, train={"steps": 2})
    monkeypatch.setitem(local_steps.JOB_WEIGHT_BYTES, "cpu", 4 * feds[0].problem.layout.dim * 2)
    assert table_of(feds, 6, 2)[0].groups > 2
    assert_as_alone(feds, list(run_many(feds, 5)))


def table_of(feds: list[Federation], rounds: int, allowed: int) -> tuple[JobTable, torch.Tensor]:
    drawn, divisor = draw_round_cohorts(feds, rounds)
    return make_job_table(feds, drawn, allowed), divisor


def test_the_table_is_who_was_drawn() -> None:
    feds = pair()
    table, divisor = table_of(feds, 6, 4)
    assert not table.steady
    for t in range(6):
        mine, own_weights = table.party.view(6, -1)[t], table.weight.view(6, -1)[t]
        assert bool((mine.diff() >= 0).all())
        for r, federation in enumerate(feds):
            assert federation.plan.central is not None
            terms, source = federation.plan.central, federation.problem.randomness
            drawn = torch.nonzero(source.uniform(("cohort", t), terms.clients) < terms.rate).flatten()
            here = table.parties.run[mine] == r
            assert (mine[here] - table.firsts[r]).tolist() == drawn.tolist()
            assert own_weights[here].tolist() == pytest.approx(terms.weights[drawn].tolist())
            assert float(divisor[t, r]) == pytest.approx(terms.divisor(float(terms.weights[drawn].sum())))
        assert table.groups_of[t] * table.jobs >= int((mine < table.firsts[-1]).sum())


def _server_noise(player: JobRounds) -> NoiseAtServer:
    assert isinstance(player.noise, NoiseAtServer)
    return player.noise


def _louder(player: JobRounds) -> None:
    noise = _server_noise(player)
    noise.noise_scale = noise.noise_scale * 1.02


def _unweighted(player: JobRounds) -> None:
    player.weight_of = (player.weight_of > 0).float()


def _by_those_who_came(player: JobRounds) -> None:
    noise = _server_noise(player)
    noise.cohort = noise.cohort + 1


def _other_divisor(player: JobRounds) -> None:
    noise = _server_noise(player)
    noise.divisor = noise.divisor * 1.02


def _others_examples(player: JobRounds) -> None:
    player.parties = dataclasses.replace(player.parties, start=(player.parties.start - 1).clamp_min(0))


@pytest.mark.usefixtures("stacked")
@pytest.mark.parametrize("mistake", [_louder, _unweighted, _by_those_who_came, _other_divisor, _others_examples])
def test_a_mistake_is_noticed(mistake: Callable[[JobRounds], None], monkeypatch: pytest.MonkeyPatch) -> None:
    make = JobRounds.__init__

    def wrong(self: JobRounds, server: Any) -> None:
        make(self, server)
        mistake(self)

    feds = pair(clip={"rule": "quantile"}, train={"steps": 2})
    assert_as_alone(feds, list(run_many(feds)))
    monkeypatch.setattr(JobRounds, "__init__", wrong)
    with pytest.raises(AssertionError):
        assert_as_alone(feds, list(run_many(feds)))


@pytest.mark.parametrize("rule", ["median", "wav"])
def test_rules_that_see_the_whole_cohort_or_another_basis_go_alone(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "JobRounds", never)
    federation = prepare(client_settings(clip={"rule": rule}), DATA)
    rounds, alone = list(run_many([federation])), play(federation)
    assert rounds[-1].averaged is not None
    assert torch.equal(rounds[-1].averaged[0], alone[-1].averaged)


@pytest.mark.usefixtures("stacked")
def test_a_model_without_a_program_of_its_own() -> None:
    class Wave(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.inner(x))

    feds = [prepare(f.settings, DATA, Wave()) for f in pair(clip={"rule": "quantile"})]
    assert_as_alone(feds, list(run_many(feds)))


@pytest.mark.usefixtures("stacked")
def test_a_round_that_is_repeated_draws_nothing_twice() -> None:
    x = DATA.x.clone()
    x[7] = torch.nan  # this gradient counts as zero, which the first attempt does not know
    feds = pair(DATA.with_changes(x=x), clip={"rule": "quantile"}, train={"steps": 2})
    sources = [Once(federation.problem.randomness, set()) for federation in feds]
    secret = [
        dataclasses.replace(federation, problem=dataclasses.replace(federation.problem, randomness=source))
        for federation, source in zip(feds, sources, strict=True)
    ]
    assert_as_alone(feds, list(run_many(secret)))


@pytest.mark.usefixtures("stacked")
def test_an_update_that_overflows_counts_as_zero() -> None:
    x = DATA.x.clone()
    x[7] = 1e12  # its party's update has a norm beyond float32, those of the others have not
    feds = pair(DATA.with_changes(x=x), clip={"rule": "quantile"}, train={"lr": 1e12, "rate": 1.0})
    assert_as_alone(feds, list(run_many(feds)))


# --- as on a GPU: numbers drawn on the device, rounds in bursts -----------------------------------------


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "can_draw_on_device", lambda device, sources: True)


@pytest.mark.usefixtures("stacked")
def test_a_burst_in_which_a_sample_did_not_fit_is_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    feds = pair(clip={"rule": "quantile"}, train={"steps": 3})
    roomy = last_model(feds)
    assert torch.equal(roomy, last_model(feds))
    monkeypatch.setattr(chunks, "CHUNK_MARGIN_DEVIATIONS", -100.0)
    torch.testing.assert_close(last_model(feds), roomy, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(JobRounds, "settled", lambda self: True)
    assert not torch.allclose(last_model(feds), roomy, rtol=1e-2)


@pytest.mark.usefixtures("stacked")
def test_the_servers_noise_is_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    runs, sigma = 60, 50.0
    train = {"rounds": 1, "participation": 0.5}
    feds = [
        prepare(client_settings(8, run={"seed": s}, train=train, privacy={"sigma": sigma}), DATA) for s in range(runs)
    ]
    models, ratios = last_model(feds), []
    for federation, model in zip(feds, models, strict=True):
        start = federation.problem.layout.flatten(federation.problem.model)
        ratios.append(float((model - start).square().mean().sqrt()) / (sigma / 4))  # C = 1 and q_c K = 4
    found = sum(ratios) / runs
    assert found == pytest.approx(1.0, abs=0.05)  # 60 runs of 21 weights: 2% of standard error
    assert found * 4 != pytest.approx(1.0, abs=0.05)  # the noise of the sum
    assert found / 2**0.5 != pytest.approx(1.0, abs=0.05)  # two draws of it


@pytest.mark.usefixtures("stacked")
def test_numbers_of_the_device_train_like_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the examples in a step: the mean of what 40 runs learn, and how far apart they are, stay as they are."""

    def learn(**train: float) -> tuple[float, float]:
        settings = [
            client_settings(
                6,
                run={"seed": 0},
                train={"rounds": 8, "steps": 2, "lr": 0.1, "rate": 0.5, **train},
                clip={"rule": "quantile"},
                privacy={"sigma": 0.1},
            )
            for _ in range(40)
        ]
        feds = []
        for s, own in enumerate(settings):
            federation = prepare(own, DATA)
            problem = dataclasses.replace(federation.problem, randomness=SeededRandomness(s))
            feds.append(dataclasses.replace(federation, problem=problem))
        models = last_model(feds)
        start = feds[0].problem.layout.flatten(feds[0].problem.model)
        return float((models.mean(dim=0) - start).norm()), float(models.std(dim=0).norm())

    length, spread = learn()
    pretend(monkeypatch)
    assert learn() == (pytest.approx(length, rel=0.05), pytest.approx(spread, rel=0.2))
    assert learn(lr=0.13)[0] != pytest.approx(length, rel=0.05)
    assert learn(rate=0.02)[1] != pytest.approx(spread, rel=0.2)


@pytest.mark.usefixtures("stacked")
@pytest.mark.parametrize("case", CASES)
def test_the_programs_can_be_recorded(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def strictly(self: GraphReplayer, key: Any, program: Callable[[], None], changes: list[torch.Tensor]) -> None:
        with torch.no_grad(), NoHost():
            program()

    monkeypatch.setattr(GraphReplayer, "run_in_place", strictly)
    next(run_many(pair(**CASES[case])))
    end = NoiseAtServer.end

    def asks(self: NoiseAtServer) -> None:
        float(self.bound[0])
        end(self)

    monkeypatch.setattr(NoiseAtServer, "end", asks)
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        next(run_many(pair(**CASES[case])))


@pytest.mark.usefixtures("stacked")
def test_a_run_that_overflows_does_not_touch_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    calm = pair(clip={"rule": "none"}, privacy={"sigma": None})
    for place in (0, 1):
        feds = list(calm)
        feds[place] = prepare(calm[place].settings.replace(train={"lr": 1e30}), DATA)
        expected, found = last_model(calm), last_model(feds)
        torch.testing.assert_close(found[1 - place], expected[1 - place], rtol=1e-4, atol=1e-6)
        assert not torch.allclose(found[place], expected[place])
