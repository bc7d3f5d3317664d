"""A run's samples and noise are the same bits however it is stacked, and those of the reference engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fulcrum.engines.batched import run_many, runs
from fulcrum.engines.stacked import draws as draws_module
from fulcrum.engines.stacked import sampling, step
from fulcrum.engines.stacked import step as step_module
from fulcrum.engines.stacked import trainer as trainer_module
from fulcrum.engines.stacked.draws import RandomDraws
from fulcrum.engines.stacked.replay import GraphReplayer
from fulcrum.privacy import exact_noise, mechanism
from fulcrum.privacy.exact_noise import GridRelease, choose_grid
from fulcrum.rng import CipherRandomness, SecureRandomness, SeededRandomness, StreamKey
from fulcrum.runs import prepare
from fulcrum.settings.schema import Settings
from fulcrum.training.client import train_client
from fulcrum.training.federation import Federation
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import ClientReply, RoundRequest
from support.devices import NoHost
from support.federations import client_settings, play, toy_data, toy_problem, toy_settings, with_randomness
from support.rounds import request, stacked

DATA = toy_data()
Drawn = dict[tuple[str, StreamKey], torch.Tensor]
"""The numbers that a run used, by kind and name of their stream."""

# --- however stacked --------------------------------------------------------------------------------

PLAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SingleStepRounds": ("example", {"clip": {"rule": "quantile"}, "train": {"participation": 0.7, "rounds": 3}}),
    "JobRounds": ("example", {"clip": {"rule": "quantile"}, "train": {"steps": 2, "rounds": 2}}),
    "PerJobRounds": ("example", {"clip": {"rule": "moo-client"}, "train": {"steps": 2, "rounds": 2}}),
    "NoiseAtServer": ("client", {"clip": {"rule": "quantile"}, "train": {"steps": 2, "rounds": 2, "rate": 0.5}}),
}


def make_run(player: str, seed: int) -> Federation:
    """One of several runs: each has a seed, parties of uneven size and a learning rate of its own."""
    unit, shared = PLAYERS[player]
    own: dict[str, dict[str, Any]] = {
        "run": {"seed": seed},
        "data": {"partition": "quantity", "parties": 3 + seed % 3, "min_examples": 2},
        "train": {"lr": 0.1 + 0.1 * seed},
    }
    base: Settings = toy_settings() if unit == "example" else client_settings(3)
    return prepare(base.replace(**own).replace(**shared), DATA)


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who makes the numbers."""
    if request.param == "device":
        monkeypatch.setattr(sampling, "can_draw_on_device", lambda device, sources: True)
    return str(request.param)


class Watch:
    """Copies what is drawn, for each run. A sum of noise is kept under the name of its first stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: dict[str, Drawn] = {}
        uniforms, normals, sums = (
            getattr(RandomDraws, name) for name in ("fill_uniforms", "fill_normals", "sum_normals")
        )

        def fill_uniforms(draws: RandomDraws, buffer: torch.Tensor, streams: Any) -> Any:
            found = uniforms(draws, buffer, streams)
            for source, key, start, size in streams:
                self.keep(source, "uniform", key, buffer.view(-1)[start : start + size])
            return found

        def fill_normals(draws: RandomDraws, table: torch.Tensor, streams: Any) -> Any:
            found = normals(draws, table, streams)
            for stream in streams:
                self.keep(stream.source, "normal", stream.key, table[stream.row])
            return found

        def sum_normals(draws: RandomDraws, table: torch.Tensor, streams: Any) -> Any:
            found = sums(draws, table, streams)
            for stream in reversed(streams):
                self.keep(stream.source, "sum", stream.key[:2], table[stream.row])
            return found

        for replacement in (fill_uniforms, fill_normals, sum_normals):
            monkeypatch.setattr(RandomDraws, replacement.__name__, replacement)
        self.watch_programs(monkeypatch)

    def watch_programs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Programs that draw for themselves: from the rows of a table, which name the streams."""
        names: dict[bytes, list[Any]] = {}
        make, uniforms, normals = (
            trainer_module.make_padded_table,
            step_module.draw_uniform_rows,
            step_module.draw_normal_rows,
        )

        def make_padded_table(groups: Any, places: int) -> Any:
            table = make(groups, places)
            for rows, group in zip(table, groups, strict=True):
                for row, stream in zip(rows, group, strict=False):
                    names.setdefault(row.tobytes(), []).append(stream)
            return table

        def keep(kind: str, table: torch.Tensor, rows: torch.Tensor, sizes: list[int]) -> None:
            for row, numbers, size in zip(table, rows, sizes, strict=True):
                for stream in names.get(row.numpy().tobytes(), []):
                    self.keep(stream.source, kind, stream.key, numbers[:size])

        def draw_uniform_rows(table: torch.Tensor, sizes: torch.Tensor, width: int) -> Any:
            found = uniforms(table, sizes, width)
            assert bool((found.masked_fill(torch.arange(width) < sizes[:, None], 1) == 1).all())
            keep("uniform", table, found, sizes.tolist())
            return found

        def draw_normal_rows(table: torch.Tensor, count: int) -> Any:
            found = normals(table, count)
            keep("normal", table, found, [count] * len(found))
            return found

        monkeypatch.setattr(trainer_module, "make_padded_table", make_padded_table)
        monkeypatch.setattr(step_module, "draw_uniform_rows", draw_uniform_rows)
        monkeypatch.setattr(step_module, "draw_normal_rows", draw_normal_rows)

    def keep(self, source: CipherRandomness, kind: str, key: StreamKey, numbers: torch.Tensor) -> None:
        self.drawn.setdefault(source.run, {})[kind, key] = numbers.clone()

    def play(self, feds: list[Federation]) -> tuple[dict[str, Drawn], torch.Tensor]:
        """What each run drew, by its id, and the models [R, d]."""
        self.drawn = {}
        last = list(run_many(feds))[-1].averaged
        assert last is not None
        return self.drawn, last


def assert_same_bits(one: Drawn, two: Drawn) -> None:
    assert one.keys() == two.keys()
    for key, numbers in one.items():
        assert torch.equal(numbers, two[key]), key


STACKS = ([0, 1, 2], [2, 0, 1], [4, 3, 0, 5])
"""Seeds of runs that share a stack with the run of seed 0."""


@pytest.mark.parametrize("player", PLAYERS)
def test_a_run_gets_the_same_bits_however_it_is_stacked(
    player: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "SeparateRuns", None)  # all of these are stacked
    watch = Watch(monkeypatch)
    feds = {seed: make_run(player, seed) for seed in range(6)}
    name = feds[0].problem.randomness.run  # type: ignore[attr-defined]
    drawn, alone = watch.play([feds[0]])
    assert list(drawn) == [name]
    assert {kind for kind, _ in drawn[name]} >= {"uniform"} | ({"sum"} if player == "SingleStepRounds" else {"normal"})
    for seeds in STACKS:
        several, models = watch.play([feds[seed] for seed in seeds])
        assert len(several) == len(seeds)
        assert_same_bits(drawn[name], several[name])
        torch.testing.assert_close(models[seeds.index(0)], alone[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError):
        assert_same_bits(drawn[name], several[feds[3].problem.randomness.run])  # type: ignore[attr-defined]


@pytest.mark.parametrize("player", PLAYERS)
def test_keys_that_depend_on_the_others_are_noticed(player: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before ChaCha20: on a GPU all runs of a stack had one generator, keyed by the seeds of all of them."""
    monkeypatch.setattr(sampling, "can_draw_on_device", lambda device, sources: True)
    right = draws_module.make_stream_table

    def wrong(streams: Any) -> Any:
        return right([stream._replace(source=streams[0].source) for stream in streams])

    monkeypatch.setattr(draws_module, "make_stream_table", wrong)
    watch = Watch(monkeypatch)
    one, two = make_run(player, 0), make_run(player, 1)
    name = one.problem.randomness.run  # type: ignore[attr-defined]
    alone = watch.play([one])[0][name]
    assert_same_bits(alone, watch.play([one, two])[0][name])  # the first is lucky
    with pytest.raises(AssertionError):
        assert_same_bits(alone, watch.play([two, one])[0][name])


@dataclasses.dataclass(frozen=True)
class Named(CipherRandomness):
    """A cipher that notes the streams that it was asked for."""

    asked: set[StreamKey] = dataclasses.field(default_factory=set)

    def locate_stream(self, key: StreamKey) -> tuple[bytes, tuple[int, int, int]]:
        self.asked.add(key)
        return super().locate_stream(key)


@pytest.mark.parametrize("player", PLAYERS)
def test_the_streams_are_those_of_the_reference_engine(player: str) -> None:
    made = make_run(player, 0)
    secret = SeededRandomness(0).secret
    made = dataclasses.replace(made, settings=made.settings.replace(run={"engine": "reference"}))
    alone, many = (Named(secret, "one run", asked=set()) for _ in range(2))
    play(with_randomness(made, alone))
    list(run_many([with_randomness(made, many)]))
    assert {key for key in alone.asked if "+" not in str(key[0])} == many.asked
    assert {key[0] for key in many.asked} >= {"sample", "noise"}


# --- the stacked engine in real use -----------------------------------------------------------------


def make_problem(randomness: CipherRandomness, rule: str = "fixed", **changes: Any) -> TrainingProblem:
    return toy_problem(rule, toy_data(90), 3, randomness=randomness, **changes)


class Releases:
    """Sums and integers of all releases, by the name of their stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[StreamKey, tuple[torch.Tensor, GridRelease]] = {}
        many = exact_noise.release_rows_on_grid

        def noted(clipped: torch.Tensor, scales: Any, streams: Any) -> list[GridRelease]:
            made = many(clipped, scales, streams)
            for row, own, (_, key) in zip(clipped, made, streams, strict=True):
                assert key not in self.found, "a stream releases once"
                self.found[key] = (row.double().clone(), own)
            return made

        monkeypatch.setattr(mechanism, "release_rows_on_grid", noted)

    def of(self, play: Any) -> tuple[list[ClientReply], dict[StreamKey, tuple[torch.Tensor, GridRelease]]]:
        self.found = {}
        return play(), self.found


def reference(problem: TrainingProblem, wanted: RoundRequest) -> list[ClientReply]:
    pairs = zip(wanted.assignments, wanted.states, strict=True)
    return [train_client(problem, wanted, task, state) for task, state in pairs]


def assert_same_releases(one: dict[StreamKey, Any], two: dict[StreamKey, Any]) -> None:
    """The same streams and grids, sums up to rounding, and integers that are equal where the sums are.

    Where the sums are not equal, the integers are as far apart as the sums.
    """
    assert one.keys() == two.keys()
    for key, (sums, made) in one.items():
        others, other = two[key]
        assert made.grid == other.grid
        torch.testing.assert_close(others, sums, rtol=1e-4, atol=1e-4)
        apart = (made.integers - other.integers).abs().double()
        assert bool((apart <= torch.ceil((sums - others).abs() / made.grid)).all()), key


@pytest.mark.parametrize("attempt", [0, 2])
@pytest.mark.parametrize("rule", ["fixed", "quantile", "wav"])
@pytest.mark.parametrize("steps", [1, 3])
def test_real_use_releases_the_integers_of_the_reference(
    steps: int, rule: str, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "add_noise_and_average", None)  # nothing is released in float32
    watch = Releases(monkeypatch)
    problem = make_problem(SecureRandomness(), rule)
    wanted = request(problem, steps, 1.0, attempt=attempt)
    expected, one = watch.of(lambda: reference(problem, wanted))
    found, two = watch.of(lambda: stacked(problem, wanted))
    assert len(one) == 3 * steps * (1 + (rule == "quantile"))
    assert all(key[4:] == ((attempt,) if attempt else ()) for key in one)
    assert_same_releases(one, two)
    for a, b in zip(expected, found, strict=True):
        assert a.events == b.events
        torch.testing.assert_close(b.delta, a.delta, rtol=1e-4, atol=1e-5)
    # Another attempt, and another secret, are other noise.
    _, later = watch.of(lambda: stacked(problem, dataclasses.replace(wanted, attempt=attempt + 1)))
    assert one.keys().isdisjoint(later)
    _, others = watch.of(lambda: stacked(make_problem(SecureRandomness(), rule), wanted))
    with pytest.raises(AssertionError):
        assert_same_releases(one, others)


def test_proven_arithmetic_releases_on_the_grid_and_simulation_is_half_a_step_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Releases(monkeypatch)
    source = SeededRandomness(4)
    proven, fast = make_problem(source, proven=True), make_problem(source)
    # No example is sampled, so that the release is noise alone and float32 sums round nothing.
    wanted = request(proven, 1, 1.0, weight_decay=0.0)
    tasks = tuple(dataclasses.replace(task, rate=1e-9) for task in wanted.assignments)
    wanted = dataclasses.replace(wanted, assignments=tasks, params=torch.zeros_like(wanted.params))
    exact, one = watch.of(lambda: stacked(proven, wanted))
    assert len(one) == 3
    simulated, none = watch.of(lambda: stacked(fast, wanted))
    assert not none
    for task, a, b in zip(tasks, exact, simulated, strict=True):
        grid = choose_grid(0.5) * task.lr / (1e-9 * 30)  # of the update: C0 = 0.5, sigma 1, 30 examples
        off = (a.delta - b.delta).abs().double() / grid
        rounding = a.delta.abs().double() * 2**-22 / grid  # float32's
        assert bool((off <= 0.5 + rounding).all())
        assert float(off.max()) > 0.1


@pytest.mark.parametrize("careful", [False, True])
def test_sums_that_do_not_fit_are_repeated_before_anything_is_released(
    careful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "can_draw_on_device", lambda device, sources: True)
    watch = Releases(monkeypatch)
    data = toy_data(90)
    if careful:
        x = data.x.clone()
        x[7] = torch.inf
        data = data.with_changes(x=x)
    problem = toy_problem("fixed", data, 3, randomness=SecureRandomness())
    wanted = request(problem, 2, 1.0)
    _, one = watch.of(lambda: reference(problem, wanted))
    monkeypatch.setattr(sampling, "PAD_DEVIATIONS", -4.0)
    _, two = watch.of(lambda: stacked(problem, wanted))
    assert_same_releases(one, two)


@pytest.mark.parametrize("doubtful", [False, True])
def test_releases_together_are_those_one_by_one(doubtful: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    margin = exact_noise.round_with_margin
    sources = [SecureRandomness(), SeededRandomness(3), SecureRandomness()]
    count = 41 if doubtful else 1001
    sums = torch.randn(3, count, generator=torch.Generator().manual_seed(0))
    sums[1, 5] = torch.nan
    scales, keys = [0.3, 7.0, 2.0**-30], [("noise", 4, k, 0) for k in range(3)]
    alone = [exact_noise.release_on_grid(sums[i], scales[i], sources[i], keys[i]) for i in range(3)]

    def unsure(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        integers, _ = margin(*given)
        return torch.zeros_like(integers), torch.ones_like(integers, dtype=torch.bool)

    if doubtful:  # nothing is certain at first: every number is decided in arbitrary precision
        monkeypatch.setattr(exact_noise, "round_with_margin", unsure)
    found = exact_noise.release_rows_on_grid(sums, scales, list(zip(sources, keys, strict=True)))
    for made, one in zip(found, alone, strict=True):
        assert made.grid == one.grid
        assert torch.equal(made.integers, one.integers)
    other = exact_noise.release_on_grid(sums[0], scales[0], sources[0], keys[1])
    assert not torch.equal(found[0].integers, other.integers)
    monkeypatch.setattr(exact_noise, "MAX_ROW_ELEMENTS", count)  # row by row
    again = exact_noise.release_rows_on_grid(sums, scales, list(zip(sources, keys, strict=True)))
    assert all(torch.equal(one.integers, two.integers) for one, two in zip(found, again, strict=True))


@pytest.mark.parametrize("rule", ["fixed", "quantile"])
def test_a_device_releases_the_same_integers(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Releases(monkeypatch)
    problem = make_problem(SecureRandomness(), rule)
    wanted = request(problem, 2, 1.0)
    _, one = watch.of(lambda: stacked(problem, wanted))
    monkeypatch.setattr(sampling, "can_draw_on_device", lambda device, sources: True)
    _, two = watch.of(lambda: stacked(problem, wanted))
    assert one.keys() == two.keys()
    for key, (sums, made) in one.items():
        if torch.equal(sums, two[key][0]):  # rows may be padded otherwise, where the host does not know the samples
            assert torch.equal(made.integers, two[key][1].integers)
    assert_same_releases(one, two)


def test_the_program_of_the_sums_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = []

    def strictly(self: GraphReplayer, key: Any, program: Any, inputs: Any, undo: Any = None) -> Any:
        programs.append(key[0])
        with torch.no_grad(), NoHost():
            return program(**inputs)

    monkeypatch.setattr(GraphReplayer, "run", strictly)
    problem = make_problem(SecureRandomness(), "quantile")
    stacked(problem, request(problem, 2, 1.0))
    assert programs == ["sums"] * len(programs)
    assert programs
