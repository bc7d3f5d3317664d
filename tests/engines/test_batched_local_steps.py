"""Several runs of several local steps at once: each equals itself alone, and samples that did not fit come again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fulcrum.engines.batched import BatchedRoundResult, chunks, local_steps, run_many, runs
from fulcrum.engines.batched.chunks import (
    JobUnits,
    choose_chunk_layout,
    count_chunks,
    estimate_chunk_count,
    sample_into_chunks,
    sum_chunks_by_job,
)
from fulcrum.engines.batched.local_steps import JobRounds
from fulcrum.engines.batched.noise_at import NoiseAtParties
from fulcrum.engines.reference import ReferenceEngine
from fulcrum.engines.stacked import sampling
from fulcrum.engines.stacked.replay import GraphReplayer
from fulcrum.rng import RecordedRandomness, SeededRandomness
from fulcrum.runs import prepare
from fulcrum.training.federation import Federation
from fulcrum.types import RoundResult
from support.devices import NoHost
from support.federations import play, toy_data, toy_settings, with_randomness
from support.randomness import Once, Recorder
from support.rounds import last_model

DATA = toy_data()


def pair(steps: int, **shared: dict[str, Any]) -> list[Federation]:
    """Two runs that differ in seed, parties, rate, learning rate, sigma and server."""
    differ: tuple[tuple[int, float, float, float, float], ...] = ((3, 0.2, 0.5, 1.0, 1.0), (4, 0.5, 0.2, 2.0, 0.7))
    found = []
    for seed, (parties, rate, lr, sigma, server_lr) in enumerate(differ):
        own: dict[str, dict[str, Any]] = {
            "run": {"seed": seed},
            "data": {"parties": parties, "partition": "quantity"},
            "train": {"steps": steps, "rate": rate, "lr": lr, "server_lr": server_lr},
            "privacy": {"sigma": sigma},
        }
        settings = toy_settings(**own).replace(**shared)
        found.append(prepare(settings, DATA))
    return found


CASES: dict[str, dict[str, Any]] = {
    **{
        rule: {"clip": {"rule": rule}}
        for rule in ("none", "fixed", "moo", "moo-c", "dynamic", "quantile", "oso", "wav")
    },
    "tempered": {"model": {"name": "mlp", "hidden": (4,), "activation": "tempered"}},
    "statistics now and then": {"clip": {"rule": "quantile", "statistics_interval": 0.3}},
    "schedules": {
        "clip": {"rule": "moo", "groups": "layer"},
        "model": {"name": "mlp", "hidden": (4,)},
        "train": {"schedule": "cosine", "weight_decay": 0.1, "weights": "uniform", "server": "adam", "ema": 0.5},
        "privacy": {"noise_schedule": "growth", "rho_mu": 0.3},
    },
}


def never(server: Any) -> None:
    raise AssertionError("these runs were to be played by JobRounds")


def assert_as_alone(feds: list[Federation], rounds: list[BatchedRoundResult]) -> None:
    assert rounds[-1].averaged is not None
    for r, federation in enumerate(feds):
        alone = play(federation)
        for many, one in zip(rounds, alone, strict=True):
            assert many.participants[r] == one.participants
            assert many.C[r].tolist() == pytest.approx(one.C, rel=1e-4)
        # The rounding to the grid, which a stack leaves out, grows in what follows: in proportion to the model.
        size = max(1.0, float(alone[-1].averaged.abs().max()))
        torch.testing.assert_close(rounds[-1].averaged[r], alone[-1].averaged, rtol=1e-3, atol=1e-5 * size)


@pytest.mark.parametrize("limit", [0, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_each_run_equals_itself_alone(case: str, steps: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PerJobRounds", never)
    feds = pair(steps, **CASES[case])
    assert_as_alone(feds, list(run_many(feds, limit)))


PARTIAL: dict[str, dict[str, Any]] = {
    "some parties": {"train": {"participation": 0.4, "rounds": 8}},
    "rounds that nobody joins": {"train": {"participation": 0.1, "rounds": 8, "server": "momentum", "ema": 0.3}},
    "caps": {"privacy": {"max_participations": 2}},
    "statistics now and then": {
        "train": {"participation": 0.5},
        "clip": {"rule": "quantile", "statistics_interval": 0.3},
    },
    "another basis": {"train": {"participation": 0.5}, "clip": {"rule": "wav"}},
    "schedules": {
        "train": {"participation": 0.6, "weight_decay": 0.1, "weights": "uniform"},
        "privacy": {"noise_schedule": "growth", "rho_mu": 0.3},
    },
}


def recorded(feds: list[Federation]) -> tuple[list[Federation], list[list[RoundResult]]]:
    """The runs on what the reference engine drew and nothing else, and the rounds that it played."""
    replayed, alone = [], []
    for federation in feds:
        source = Recorder(federation.settings.run.seed + 100)
        problem = dataclasses.replace(federation.problem, randomness=source)
        alone.append(play(dataclasses.replace(federation, problem=problem, engine=ReferenceEngine(problem))))
        problem = dataclasses.replace(problem, randomness=RecordedRandomness(source.uniforms, source.normals))
        replayed.append(dataclasses.replace(federation, problem=problem))
    return replayed, alone


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("case", PARTIAL)
def test_some_parties_in_each_round_on_recorded_numbers(
    case: str, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who sit out draw nothing, weigh nothing and are not counted; also where jobs go in groups of two."""
    monkeypatch.setattr(runs, "PerJobRounds", never)
    feds, alone = recorded(pair(2, **PARTIAL[case]))
    if groups:
        monkeypatch.setitem(local_steps.JOB_WEIGHT_BYTES, "cpu", 4 * feds[0].problem.layout.dim * 2)
    rounds = list(run_many(feds))
    assert rounds[-1].averaged is not None
    for r, results in enumerate(alone):
        assert len({one.participants for one in results}) > 1
        for many, one in zip(rounds, results, strict=True):
            assert many.participants[r] == one.participants
            assert many.C[r].tolist() == pytest.approx(one.C, rel=1e-4)
        torch.testing.assert_close(rounds[-1].averaged[r], results[-1].averaged, rtol=1e-3, atol=1e-5)


def _everybodys_weights(player: JobRounds) -> None:
    player.weight_of = player.weight_of * 0.9


def _the_round_before(player: JobRounds) -> None:
    player.party_of, player.weight_of = (
        v.roll(player.table.groups, dims=0) for v in (player.party_of, player.weight_of)
    )


def _neighbours_examples(player: JobRounds) -> None:
    player.parties = dataclasses.replace(player.parties, start=(player.parties.start - 1).clamp_min(0))


def _louder(player: JobRounds) -> None:
    assert isinstance(player.noise, NoiseAtParties)
    player.noise.noise_scale = player.noise.noise_scale * 1.02


def _statistics_of_each_step(player: JobRounds) -> None:
    assert isinstance(player.noise, NoiseAtParties)
    player.noise.statistics_interval = torch.ones_like(player.noise.statistics_interval)


@pytest.mark.parametrize(
    "mistake", [_everybodys_weights, _the_round_before, _neighbours_examples, _louder, _statistics_of_each_step]
)
def test_a_mistake_about_who_takes_part_is_noticed(
    mistake: Callable[[JobRounds], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    feds = pair(2, train={"participation": 0.5}, clip={"rule": "quantile", "statistics_interval": 1.0})
    assert_as_alone(feds, list(run_many(feds)))
    make = JobRounds.__init__

    def wrong(self: JobRounds, server: Any) -> None:
        make(self, server)
        mistake(self)

    monkeypatch.setattr(JobRounds, "__init__", wrong)
    with pytest.raises(AssertionError):
        assert_as_alone(feds, list(run_many(feds)))


@pytest.mark.parametrize("case", [*CASES, *PARTIAL])
def test_the_programs_can_be_recorded(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA graphs: they ask the host for nothing, and no value decides a shape."""

    def strictly(self: GraphReplayer, key: Any, program: Callable[[], None], changes: list[torch.Tensor]) -> None:
        with torch.no_grad(), NoHost():
            program()

    monkeypatch.setattr(runs, "PerJobRounds", never)
    monkeypatch.setattr(GraphReplayer, "run_in_place", strictly)
    next(run_many(pair(2, **(CASES | PARTIAL)[case])))


def test_a_wrong_term_of_one_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PerJobRounds", never)
    feds = [with_randomness(made, SeededRandomness(s)) for s, made in enumerate(pair(2))]
    assert_as_alone(feds, list(run_many(feds)))
    other = with_randomness(prepare(feds[1].settings.replace(privacy={"sigma": 2.1}), DATA), SeededRandomness(1))
    with pytest.raises(AssertionError):
        assert_as_alone(feds, list(run_many([feds[0], other])))


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"steps": 2}, "clip": {"rule": "moo-client"}},
        {"train": {"steps": 2}, "clip": {"rule": "median"}},
    ],
)
def test_other_runs_go_job_by_job(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PerJobRounds", never)
    with pytest.raises(AssertionError, match="JobRounds"):
        next(iter(run_many([prepare(toy_settings(**changes), DATA)])))


@pytest.mark.parametrize("steps", [1, 2])
def test_another_basis_for_a_model_that_torch_func_follows(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wave(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.inner(x))

    monkeypatch.setattr(runs, "PerJobRounds", never)
    feds = [prepare(toy_settings(clip={"rule": "wav"}, train={"steps": steps}), DATA, Wave())]
    assert_as_alone(feds, list(run_many(feds)))


def test_a_round_that_is_repeated_draws_nothing_twice() -> None:
    x = DATA.x.clone()
    x[7] = torch.nan  # this gradient counts as zero, which the first attempt does not know
    data = DATA.with_changes(x=x)
    feds = [prepare(toy_settings(train={"steps": 2, "rate": 0.9}), data)]
    source = Once(feds[0].problem.randomness, set())
    secret = [dataclasses.replace(feds[0], problem=dataclasses.replace(feds[0].problem, randomness=source))]
    assert_as_alone(feds, list(run_many(secret)))


# --- as on a GPU: numbers drawn on the device, rounds in bursts -----------------------------------------


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "can_draw_on_device", lambda device, sources: True)
    monkeypatch.setattr(runs, "PerJobRounds", never)


@pytest.mark.usefixtures("on_device")
def test_a_burst_in_which_a_sample_did_not_fit_is_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    feds = pair(3, clip={"rule": "moo"})
    roomy = last_model(feds)
    assert torch.equal(roomy, last_model(feds))
    monkeypatch.setattr(chunks, "CHUNK_MARGIN_DEVIATIONS", -10.0)
    torch.testing.assert_close(last_model(feds), roomy, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr("fulcrum.engines.batched.local_steps.JobRounds.settled", lambda self: True)
    assert not torch.allclose(last_model(feds), roomy, rtol=1e-2)


@pytest.mark.usefixtures("on_device")
def test_every_step_of_every_client_adds_its_own_noise() -> None:
    runs, lr, sigma, steps = 60, 0.5, 50.0, 3
    sections: dict[str, dict[str, Any]] = {
        "data": {"partition": "quantity"},
        "clip": {"rule": "fixed", "C0": 1.0},
        "train": {"lr": lr, "rounds": 1, "steps": steps},
        "privacy": {"sigma": sigma},
    }
    feds = [prepare(toy_settings(run={"seed": s}, **sections), DATA) for s in range(runs)]
    models, ratios = last_model(feds), []
    for federation, model in zip(feds, models, strict=True):
        start = federation.problem.layout.flatten(federation.problem.model)
        sizes = [federation.plan.units(k) for k in range(3)]
        # A client of n has noise sigma / (0.2 n) a step and weight n / 60.
        expected = lr * sigma * (3 * steps) ** 0.5 / (0.2 * sum(sizes))
        ratios.append(float((model - start).square().mean().sqrt()) / expected)
    found = sum(ratios) / runs
    assert found == pytest.approx(1.0, abs=0.05)  # 60 runs of 21 weights: 2% of standard error
    assert found * steps**0.5 != pytest.approx(1.0, abs=0.05)  # the noise of one step
    assert found * 3**0.5 != pytest.approx(1.0, abs=0.05)  # the noise of one client


@pytest.mark.usefixtures("on_device")
def test_a_run_that_overflows_does_not_touch_its_neighbours() -> None:
    calm = pair(2, clip={"rule": "none"}, privacy={"sigma": None})
    wild = prepare(calm[1].settings.replace(train={"lr": 1e30}), DATA)
    expected, found = last_model(calm), last_model([calm[0], wild])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found[1], expected[1])


# --- chunks ---------------------------------------------------------------------------------------------


def some_units(sizes: list[int], rates: list[float]) -> JobUnits:
    counts = torch.tensor(sizes)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    rows = torch.arange(len(owner)) + 1000
    return JobUnits(rows, owner, torch.tensor(rates, dtype=torch.float64)[owner], counts.cumsum(0) - 1)


@pytest.mark.parametrize("seed", range(5))
def test_chunks_hold_every_sample_once_and_in_order(seed: int) -> None:
    sizes, rates, length = [40, 1, 17, 90], [0.5, 0.01, 1.0, 0.3], 8
    units = some_units(sizes, rates)
    uniforms = torch.rand(sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    joined = [units.rows[(units.owner == j) & (uniforms < units.rate)].tolist() for j in range(4)]
    needed = int(count_chunks(torch.tensor([len(own) for own in joined]), length).sum())
    for spare in (0, 3):
        found = sample_into_chunks(units, uniforms, needed + spare, length)
        assert int(found.needed) == needed
        for j, own in enumerate(joined):
            mine = slice(int(found.starts[j]), int(found.starts[j + 1]))
            assert found.rows[mine][found.mask[mine]].tolist() == own
            assert set(found.owner[mine].tolist()) == {j}
        assert not bool(found.mask[needed:].any())
        counts = sum_chunks_by_job(found, found.mask.sum(dim=1, keepdim=True).float())
        assert counts.flatten().tolist() == [len(own) for own in joined]
    short = sample_into_chunks(units, uniforms, needed - 1, length)  # too few: said, and something is missing
    assert int(short.needed) == needed
    assert int(short.mask.sum()) < sum(map(len, joined))


def test_chunks_that_are_not_finite_spoil_their_own_job_only() -> None:
    units = some_units([8, 8], [1.0, 1.0])
    found = sample_into_chunks(units, torch.zeros(16, dtype=torch.float64), 2, 8)
    total = sum_chunks_by_job(found, torch.tensor([[1.0], [torch.inf]]))
    assert float(total[0]) == 1.0
    assert float(total[1]) == torch.inf
    assert sum_chunks_by_job(found, torch.zeros((2, 0))).shape == (2, 0)


def test_there_is_room_for_what_chance_brings_and_not_much_more() -> None:
    sizes, rates = [9000, 6000, 3000, 500] * 5, [0.05] * 20
    count, length = choose_chunk_layout(sizes, rates, 10**6, 16)
    draws = torch.distributions.Binomial(torch.tensor(sizes).double(), torch.tensor(0.05).double())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        needed = torch.stack([count_chunks(draws.sample().long(), length).sum() for _ in range(200)]).double()
    assert bool((needed <= count).all())
    assert count <= float(needed.mean() + 8 * needed.std())
    assert not bool((needed <= float(needed.mean())).all())  # room for the mean alone is too little
    rows = 0.05 * sum(sizes)
    assert count * length < 1.35 * rows
    assert 20 * sampling.compute_pad_size(9000, 0.05) > 2 * rows  # a row a job would be half empty
    assert estimate_chunk_count([7], [1.0], 8) == 1
    assert estimate_chunk_count([9], [1.0], 8) == 2
