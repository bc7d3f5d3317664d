"""Before a run: seconds, bytes and layers. What is said is what the run then does, and no private value is read."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fulcrum
from fulcrum import runs as api
from fulcrum.data import Dataset
from fulcrum.runs.forecast import layers, made_up, timing, traffic
from fulcrum.settings.schema import Settings
from fulcrum.training.engine import Engine
from fulcrum.training.federation import Federation
from fulcrum.training.round import run_client_level_round, run_round
from fulcrum.training.snapshot import make_first_snapshot
from fulcrum.types import RoundRequest
from support.federations import toy_data


def settings_of(**sections: dict[str, Any]) -> Settings:
    base = Settings().replace(
        data={"parties": 3, "partition": "iid", "min_examples": 1},
        model={"name": "linear"},
        train={"rounds": 5, "rate": 0.2},
        privacy={"sigma": 1.0, "delta": 1e-3},
        run={"device": "cpu"},
    )
    return base.replace(**sections)


class Reader(nn.Module):
    """Token numbers through a table of 7."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(dim=1))


def private_tokens(n: int = 60) -> Dataset:
    stream = np.random.default_rng(0)
    return fulcrum.data.from_arrays(
        stream.integers(0, 7, (n, 5)),
        stream.integers(0, 2, n),
        classes=2,
        person=np.arange(n) // 3,
        party=np.arange(n) % 2,
    )


# --- bytes --------------------------------------------------------------------------------------------


class Watched(Engine):
    """Counts the bytes of what goes into and comes out of an engine, for rules with one state for all parties."""

    def __init__(self, inner: Engine, moves: tuple[str, ...]) -> None:
        self.inner, self.moves, self.down, self.up, self.parties = inner, moves, 0, 0, 0

    def run(self, request: RoundRequest) -> Iterator[Any]:
        for state in request.states:
            moving = [state[name] for name in self.moves]
            self.down += sum(value.numel() * value.element_size() for value in (request.params, *moving))
        for reply in self.inner.run(request):
            self.parties += 1
            self.up += sum(value.numel() * value.element_size() for value in (reply.delta, reply.extra))
            yield reply


@pytest.mark.parametrize(
    "sections",
    [{}, {"clip": {"rule": "quantile"}}, {"train": {"participation": 0.4, "rounds": 30}}],
    ids=["moo", "quantile", "some-parties"],
)
def test_bytes_are_what_the_rounds_exchange(sections: dict[str, Any]) -> None:
    federation = api.prepare(settings_of(**sections), toy_data(90))
    said = traffic.estimate_traffic(federation)
    watched = Watched(federation.engine, federation.problem.rule.moves)
    api.execute(dataclasses.replace(federation, engine=watched))
    assert watched.parties == said.participations
    assert (watched.down, watched.up) == (said.down * watched.parties, said.up * watched.parties)
    assert said.total == watched.down + watched.up
    assert said.down_per_round == watched.down / federation.settings.train.rounds
    wrong = traffic.estimate_traffic(api.prepare(settings_of(**sections, model={"name": "mlp"}), toy_data(90)))
    assert wrong.down != said.down


def test_a_cap_on_participations_bounds_the_bytes() -> None:
    federation = api.prepare(settings_of(privacy={"max_participations": 2}), toy_data(90))
    assert traffic.count_participations(federation) == 3 * 2


def test_at_client_level_the_cohort_is_expected() -> None:
    central: dict[str, dict[str, Any]] = {
        "train": {"participation": 0.5},
        "privacy": {"unit": "client"},
        "clip": {"rule": "fixed"},
    }
    federation = api.prepare(settings_of(**central), toy_data(90))
    assert traffic.count_participations(federation) == 0.5 * 3 * 5


# --- seconds ------------------------------------------------------------------------------------------


class Sleeper(nn.Module):
    """A model whose pass takes a known time per record, far above that of everything else in a round."""

    seconds = 0.008
    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        Sleeper.seen += len(x)
        time.sleep(self.seconds * len(x))
        return self.layer(x)


def test_a_slow_model_is_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TIMED_SECONDS", 0.3)
    settings = settings_of(train={"rounds": 4, "steps": 2, "rate": 0.2}, run={"workers": 1, "evaluate_every": 4})
    data = toy_data(90)
    data = dataclasses.replace(data, test=data.test_records.take(torch.arange(10)))
    said = timing.estimate_time(api.prepare(settings, data, Sleeper()))
    least = 2 * 0.2 * 90 * Sleeper.seconds  # two steps, a fifth of all records each
    assert 0.75 * least < said.training < 1.6 * least  # one step would be half of it
    assert said.training <= said.per_round < said.training + 0.2
    assert said.total == pytest.approx(said.start + 4 * said.per_round + said.per_evaluation)
    assert 0.9 * 10 * Sleeper.seconds < said.per_evaluation < 3 * 10 * Sleeper.seconds
    assert (said.rounds, said.evaluations, said.engine) == (4, 1, "parallel")


def test_large_work_is_cut_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "STEP_SECONDS", 0.1)
    monkeypatch.setattr(timing, "TIMED_SECONDS", 0.01)
    data = dataclasses.replace(toy_data(270), test=None)
    federation = api.prepare(settings_of(train={"rounds": 4, "rate": 1.0}, run={"workers": 1}), data, Sleeper())
    Sleeper.seen = 0
    said = timing.estimate_time(federation)
    assert Sleeper.seen < 270  # less than a round
    assert 0.75 * 270 * Sleeper.seconds < said.training < 2 * 270 * Sleeper.seconds
    assert "of 3 parties" in said.timed
    assert said.timed.endswith("of 90 units each")


def test_what_a_step_takes_whatever_its_units_is_not_scaled() -> None:
    federation = api.prepare(settings_of(train={"rate": 1.0}), toy_data(270))
    trial = timing.StepTrial.of(made_up.make_up_federation(federation), federation.engine)
    small, part = timing.StepPart(1, 2.0), timing.StepPart(1, 8.0)
    found = trial.extrapolate(part, 0.5 + 0.1 * 8, (small, 0.5 + 0.1 * 2))
    assert found * 90 == pytest.approx(0.5 + 0.1 * 90)
    assert trial.extrapolate(part, 1.3, None) * 90 == pytest.approx(1.3 / 8 * 90)  # without a second point
    assert trial.extrapolate(part, 1.0, (small, 2.0)) > 0  # the smaller one was slower: noise


def test_the_dry_run_leaves_the_run_as_it_was() -> None:
    federation = api.prepare(settings_of(), toy_data(90))
    again = api.prepare(settings_of(), toy_data(90))
    before = {name: value.clone() for name, value in federation.problem.model.state_dict().items()}
    timing.estimate_time(federation)
    for name, value in federation.problem.model.state_dict().items():
        assert torch.equal(value, before[name])
    timed, untimed = (api.execute(each) for each in (federation, again))
    for one, other in zip(timed.model.state_dict().values(), untimed.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


CASES: dict[str, dict[str, Any]] = {
    "person": {"privacy": {"unit": "person"}, "train": {"rate": 0.3}},
    "client": {"privacy": {"unit": "client"}, "clip": {"rule": "fixed"}, "train": {"participation": 0.5}},
    "shared-noise": {"privacy": {"aggregation": "ideal-secagg"}},
    "wavelets": {"clip": {"rule": "wav"}},
    "own-C": {"clip": {"rule": "oso"}},
    "no-noise": {"clip": {"rule": "none"}},
    "reference": {"run": {"engine": "reference"}},
    "stacked": {"run": {"engine": "stacked"}},
    "one-round": {"train": {"rounds": 1}},
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_run_is_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TIMED_SECONDS", 0.02)
    data = toy_data(90, person=np.arange(90) // 3) if name == "person" else toy_data(90)
    forecast = api.make_forecast(api.prepare(settings_of(**CASES[name]), data))
    assert forecast.untimed == ""
    assert forecast.time is not None
    assert 0 < forecast.time.training < forecast.time.per_round < 5
    assert forecast.layers
    json.dumps(forecast.to_json(), allow_nan=False)


class Tagger(nn.Module):
    """One prediction per token."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.table, self.scan, self.head = nn.Embedding(7, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.scan(self.table(x))[0])
        return found


def make_task_data(task: str) -> tuple[Dataset, nn.Module]:
    """Private records of a task, and a model for them."""
    stream = np.random.default_rng(1)
    rows, x, tokens = 40, stream.random((40, 6), dtype=np.float32), stream.integers(0, 7, (40, 5))
    party = np.arange(rows) % 2
    made: dict[str, tuple[Any, Any, dict[str, Any], nn.Module]] = {
        "classification": (x, stream.integers(0, 3, rows), {"classes": 3}, nn.Linear(6, 3)),
        "binary": (x, stream.integers(0, 2, rows), {}, nn.Linear(6, 1)),
        "multilabel": (x, stream.integers(0, 2, (rows, 4)), {}, nn.Linear(6, 4)),
        "regression": (x, stream.random(rows), {}, nn.Linear(6, 1)),
        "tokens": (tokens, stream.integers(0, 3, (rows, 5)), {"classes": 3}, Tagger(3)),
        "next-token": (tokens, None, {"classes": 7}, Tagger(7)),
    }
    inputs, targets, more, model = made[task]
    return fulcrum.data.from_arrays(inputs, targets, task=task, party=party, **more), model


@pytest.mark.parametrize("task", ["classification", "binary", "multilabel", "regression", "tokens", "next-token"])
def test_every_task_is_timed_on_made_up_records(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TIMED_SECONDS", 0.02)
    data, model = make_task_data(task)
    assert not data.public
    federation = api.prepare(settings_of(data={"partition": "auto", "parties": 2}), data, model)
    forecast = api.make_forecast(federation)
    assert (forecast.untimed, forecast.time is not None) == ("", True)
    assert sum(row.parameters for row in forecast.layers) == federation.problem.layout.dim


def test_many_parties_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_PARTIES", 2)
    monkeypatch.setattr(timing, "TIMED_SECONDS", 0.02)
    federation = api.prepare(settings_of(), toy_data(90))
    engine = timing.ReplyEngine(federation, make_reply(federation))
    assert list(engine.list_reachable_clients([0, 1, 2])) == [0, 1]
    assert engine.scale == 1.5
    assert timing.estimate_time(federation).total > 0


def make_reply(federation: Federation) -> Any:
    snapshot = make_first_snapshot(federation)
    play = run_client_level_round if federation.plan.central else run_round
    return play(federation, snapshot, [0], 0)[1][0]


# --- private values -------------------------------------------------------------------------------------


class Poisoned(Exception):
    pass


def poison(value: Tensor) -> Tensor:
    """A tensor of the same shape and type of which no value can be read."""

    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name in ("__get__", "dim", "is_floating_point", "size", "numel", "__len__", "element_size"):
                return super().__torch_function__(func, types, args, kwargs or {})
            raise Poisoned(name)

    return value.as_subclass(Refusing)


@pytest.mark.parametrize("unit", ["example", "person"])
def test_no_private_value_is_read(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TIMED_SECONDS", 0.02)
    federation = api.prepare(
        settings_of(privacy={"unit": unit}, data={"partition": "auto", "parties": 2}), private_tokens(), Reader()
    )
    problem = federation.problem
    held: Any = problem.dataset.records
    unreadable = dataclasses.replace(held, x=poison(held.x), y=poison(held.y), person=poison(held.person))
    closed = dataclasses.replace(
        federation,
        problem=dataclasses.replace(problem, dataset=dataclasses.replace(problem.dataset, train=unreadable)),
    )
    forecast = api.make_forecast(closed)
    assert (forecast.untimed, forecast.time is not None) == ("", True)
    with pytest.raises(Poisoned):  # the test itself: what it forbids is noticed
        made_up.make_up_records(unreadable, 4, problem.model, public=True)


def test_made_up_records_are_valid_and_alike() -> None:
    data = private_tokens()
    federation = api.prepare(
        settings_of(privacy={"unit": "person"}, data={"partition": "auto", "parties": 2}), data, Reader()
    )
    dry = made_up.make_up_federation(federation)
    for k in range(2):
        own, like = federation.problem.party(k), dry.problem.party(k)
        assert (len(own.index), own.units) == (len(like.index), like.units)
    records: Any = made_up.make_up_records(data.records, 50, Reader(), public=False)
    assert records.x.shape[1:] == data.x.shape[1:]
    assert 0 <= int(records.x.min()) < int(records.x.max()) < 7
    assert not torch.equal(records.x[:50], data.x[:50])


def test_a_model_that_fails_on_made_up_records_is_not_timed() -> None:
    class Picky(Reader):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) and bool((x[:, 0] != 6).any()):
                raise ValueError("a text begins with token 6")
            return super().forward(x)

    data = private_tokens()
    data.x[:, 0] = 6
    federation = api.prepare(settings_of(data={"partition": "auto", "parties": 2}), data, Picky())
    forecast = api.make_forecast(federation)
    assert (forecast.time, forecast.layers) == (None, ())
    assert forecast.untimed == "the model failed on made-up records: a text begins with token 6"


# --- Python and layers ------------------------------------------------------------------------------------


def test_from_python_with_the_words_of_train() -> None:
    forecast = fulcrum.plan(data="digits", parties=5, epsilon=4.0, rounds=50, timing=False)
    assert forecast.privacy.parties == 5
    assert forecast.time is None
    assert forecast.untimed == "not asked for"
    assert [row.way for row in forecast.layers] == ["ghost"]
    assert forecast.to_json()["layers"][0]["path"] == "book"


def test_the_step_of_the_largest_party_is_weighed() -> None:
    federation = api.prepare(settings_of(data={"partition": "quantity", "parties": 3}), toy_data(90))
    rows, batch = layers.list_layers(federation), layers.count_step_records(federation)
    assert batch == pytest.approx(0.2 * int(federation.plan.sizes.max()))
    assert rows[0].flop_plain == pytest.approx(2 * 2 * 6 * 3 * batch)
