"""The round loop: weights, server optimisers, what every party pays, and when it must stop."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fulcrum
from fulcrum.errors import BudgetError
from fulcrum.privacy import accounting
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import Ledger, composition
from fulcrum.settings.derived import compute_learning_rate
from fulcrum.settings.schema import Train
from fulcrum.training.engine import Engine
from fulcrum.training.loop import federate, is_evaluation_round, select_participants
from fulcrum.training.run_account import RunAccount
from fulcrum.training.server import SERVERS, average_replies, compute_client_weights, update_moving_average
from fulcrum.training.snapshot import Snapshot
from fulcrum.types import ClientReply, RoundRequest, RoundResult
from support.federations import play, toy_data, toy_federation


def named(result: RoundResult) -> tuple[int, ...]:
    """The participants of a round that tells who they were."""
    assert result.participants is not None
    return result.participants


def _reply(delta: list[float]) -> ClientReply:
    return ClientReply(0, torch.tensor(delta), torch.zeros(0), (), {})


def test_weights_follow_the_declared_sizes_of_those_who_took_part() -> None:
    assert compute_client_weights([30, 10], "examples").tolist() == pytest.approx([0.75, 0.25])
    assert compute_client_weights([30, 10], "uniform").tolist() == pytest.approx([0.5, 0.5])
    mean, _ = average_replies([_reply([4.0, 0.0]), _reply([0.0, 8.0])], torch.tensor([0.75, 0.25]))
    assert mean.tolist() == pytest.approx([3.0, 2.0])


def test_server_optimisers_follow_trajectories_computed_by_hand() -> None:
    train = Train(server_lr=0.5, server_momentum=0.5, server_beta2=0.9, server_eps=0.1)
    one, two = torch.tensor([2.0, -1.0]), torch.tensor([0.0, 1.0])
    change, state = SERVERS["sgd"].step(one, SERVERS["sgd"].init(2), train)
    assert change.tolist() == pytest.approx([1.0, -0.5])
    change, state = SERVERS["momentum"].step(one, SERVERS["momentum"].init(2), train)
    assert change.tolist() == pytest.approx([1.0, -0.5])
    change, state = SERVERS["momentum"].step(two, state, train)
    assert change.tolist() == pytest.approx([0.5, 0.25])
    change, state = SERVERS["adam"].step(one, SERVERS["adam"].init(2), train)
    assert change.tolist() == pytest.approx([0.5 * 2 / 2.1, -0.5 * 1 / 1.1])
    change, state = SERVERS["adam"].step(two, state, train)
    first = [0.5 * 1.0 / 0.75, (0.5 * -0.5 + 0.5) / 0.75]
    second = [0.9 * 0.4 / 0.19, (0.9 * 0.1 + 0.1) / 0.19]
    wanted = [0.5 * f / (math.sqrt(s) + 0.1) for f, s in zip(first, second, strict=True)]
    assert change.tolist() == pytest.approx(wanted)


def test_the_moving_average_forgets_the_start_and_is_the_model_itself_when_off() -> None:
    start, now = torch.zeros(1), torch.ones(1)
    assert update_moving_average(start, now, 0.0, 5) is now
    assert float(update_moving_average(start, now, 0.99, 0)) == 1.0
    assert float(update_moving_average(start, now, 0.5, 1000)) == pytest.approx(0.5)


@pytest.mark.parametrize("server", ["sgd", "momentum", "adam"])
def test_every_server_optimiser_and_the_average_run_to_the_end(server: str) -> None:
    results = play(toy_federation(train={"server": server, "server_lr": 0.1, "ema": 0.5}))
    assert len(results) == 6
    assert not torch.equal(results[-1].params, results[-1].averaged)
    assert torch.isfinite(results[-1].params).all()


def test_learning_rate_schedules() -> None:
    train = Train(rounds=10, lr=2.0)
    assert [compute_learning_rate(train, t) for t in (0, 9)] == [2.0, 2.0]
    linear = dataclasses.replace(train, schedule="linear")
    assert compute_learning_rate(linear, 5) == pytest.approx(1.0)
    cosine = dataclasses.replace(train, schedule="cosine", warmup=4)
    assert compute_learning_rate(cosine, 0) == pytest.approx(0.5)
    assert compute_learning_rate(cosine, 5) == pytest.approx(1.0)
    step = dataclasses.replace(train, schedule="step", decay_rounds=(3, 6), decay=0.1)
    assert [compute_learning_rate(step, t) for t in (2, 3, 6)] == pytest.approx([2.0, 0.2, 0.02])


def test_epsilon_grows_with_every_round_and_composes_all_of_them() -> None:
    results = play(toy_federation(train={"steps": 2}))
    epsilons = [r.epsilon for r in results]
    assert all(a < b for a, b in itertools.pairwise(epsilons))
    assert epsilons[-1] == pytest.approx(accounting.compute_epsilon([Gaussian(0.2, 1.0, 12)], 1e-5))
    assert epsilons[-1] > 1.2 * epsilons[0]  # an accountant made anew each round would report the first one for ever


def test_a_party_pays_for_the_rounds_it_took_part_in_and_sampling_parties_amplifies_nothing() -> None:
    federation = toy_federation(train={"participation": 0.5, "rounds": 12})
    results = play(federation)
    for k in range(3):
        times = sum(k in named(r) for r in results)
        assert 0 < times < 12
        # At the Renyi order that is the best one for the plan of 12 rounds: fixed before anybody saw a release.
        own, whole = (accounting.Spend.empty().add_events([Gaussian(0.2, 1.0, n)]) for n in (times, 12))
        order = composition.choose_order_for_plan(whole, 1e-5)
        assert results[-1].epsilons[k] == pytest.approx(composition.compute_epsilon_at_order(own, 1e-5, order))
        assert own.epsilon(1e-5) <= results[-1].epsilons[k] < whole.epsilon(1e-5)
    full, sampled = (
        toy_federation(train={"participation": q}, privacy={"sigma": None, "epsilon": 2.0}).plan.group(0).sigma
        for q in (1.0, 0.1)
    )
    assert sampled == full


def test_a_cap_on_participations_is_kept_and_lowers_the_noise() -> None:
    settings = {"privacy": {"sigma": None, "epsilon": 2.0, "max_participations": 2}}
    capped = toy_federation(**settings)
    results = play(capped)
    assert [len(named(r)) for r in results] == [3, 3, 0, 0, 0, 0]
    assert results[-1].epsilon <= 2.0
    assert capped.plan.group(0).sigma < toy_federation(privacy={"sigma": None, "epsilon": 2.0}).plan.group(0).sigma


def test_a_round_without_participants_changes_nothing_and_costs_nothing() -> None:
    results = play(toy_federation(train={"participation": 0.05, "rounds": 8}))
    empty = [i for i, r in enumerate(results) if not r.participants and i > 0]
    assert empty
    for i in empty:
        assert torch.equal(results[i].params, results[i - 1].params)
        assert results[i].epsilon == results[i - 1].epsilon


def test_the_run_stops_before_a_kept_budget_is_overspent(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    # Eight rounds at the Renyi order that six rounds need: the order stays, since the second run may follow a look.
    plan = accounting.Spend.empty().add_events([Gaussian(0.2, 1.0, 6)])
    order = composition.choose_order_for_plan(plan, 1e-5)
    budget = composition.compute_epsilon_at_order(plan.add_events([Gaussian(0.2, 1.0, 2)]), 1e-5, order)
    first = play(toy_federation(privacy={"budget": budget}), path, "first")
    second = play(toy_federation(privacy={"budget": budget}), path, "second")
    assert len(first) == 6
    assert len(second) == 2
    with Ledger.open(path) as ledger:
        for party in ledger.accounts():
            assert ledger.epsilon(party) == budget
            assert len(ledger.entries(party)) == 8
        assert play(toy_federation(privacy={"budget": budget}), path, "third") == []


def test_parties_with_a_smaller_budget_sit_out_while_the_others_go_on() -> None:
    federation = toy_federation(privacy={"sigma": None, "epsilon": 2.0, "budgets": {"party-1": 1.6}})
    results = play(federation)
    assert federation.plan.group(1).sigma > federation.plan.group(0).sigma
    assert results[-1].epsilons[1] <= 1.6
    assert results[-1].epsilons[0] == pytest.approx(2.0, rel=1e-3)
    cheap = dataclasses.replace(
        federation,
        plan=dataclasses.replace(
            federation.plan,
            groups=tuple(dataclasses.replace(g, sigma=federation.plan.group(0).sigma) for g in federation.plan.groups),
        ),
    )
    late = play(cheap)  # the same noise for all, so party-1's money runs out early
    assert late[-1].epsilons[1] <= 1.6
    assert len(late) == 6
    assert 1 in named(late[0])
    assert late[-1].participants == (0, 2)


class _Greedy(Engine):
    """An engine that takes one more step than it was asked to."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        more = tuple(dataclasses.replace(task, steps=task.steps + 1) for task in request.assignments)
        yield from self.inner.run(dataclasses.replace(request, assignments=more))


def test_an_engine_that_releases_more_than_was_reserved_is_stopped() -> None:
    federation = toy_federation()
    greedy = dataclasses.replace(federation, engine=_Greedy(federation.engine))
    with pytest.raises(BudgetError, match="was reserved"):
        play(greedy)


def test_the_ledger_covers_everything_that_was_released() -> None:
    federation = toy_federation(train={"participation": 0.6, "rounds": 10})
    with Ledger.open(":memory:") as ledger:
        for result, _ in federate(federation, ledger, "r"):
            for k in range(3):
                name = federation.plan.name(k)
                if name in ledger.accounts():
                    assert ledger.epsilon(name) >= result.epsilons[k] * (1 - 1e-12)
                else:
                    assert result.epsilons[k] == 0


def test_a_snapshot_survives_its_file_format() -> None:
    federation = toy_federation(train={"server": "adam"})
    with Ledger.open(":memory:") as ledger:
        *_, (_, snapshot) = federate(federation, ledger, "r")
    snapshot = dataclasses.replace(snapshot, clients={2: snapshot.rule})
    back = Snapshot.from_tensors(snapshot.round, snapshot.to_tensors(), torch.device("cpu"))
    assert torch.equal(back.params, snapshot.params)
    assert back.server.keys() == snapshot.server.keys()
    assert all(torch.equal(back.rule[name], snapshot.rule[name]) for name in snapshot.rule)
    assert all(torch.equal(back.clients[2][name], snapshot.rule[name]) for name in snapshot.rule)


def test_train_and_rounds_from_python_take_objects_and_names() -> None:
    data = toy_data()
    names: dict[str, Any] = {"parties": 3, "partition": "iid", "rounds": 4, "rate": 0.2, "sigma": 1.0, "lr": 0.5}
    result = fulcrum.train(data, **names, seed=5)
    steps = list(fulcrum.rounds(data, **names, seed=5))
    assert result.accuracy == steps[-1].accuracy
    assert result.epsilon == steps[-1].epsilon
    assert result.epsilons == steps[-1].epsilons
    assert isinstance(result.model, torch.nn.Module)
    flat = torch.cat([p.flatten() for p in result.model.parameters()])
    assert torch.equal(flat, steps[-1].averaged)
    layer = torch.nn.Linear(6, 3)
    model, before = torch.nn.Sequential(layer), layer.weight.clone()
    own = fulcrum.train(data, model, **names)
    assert torch.equal(layer.weight, before), "the model that was given is the public start and stays as it is"
    assert not torch.equal(next(own.model.parameters()), before)


def test_without_a_ledger_the_rounds_are_the_same_and_no_epsilon_is_claimed() -> None:
    changes: dict[str, Any] = {"train": {"participation": 0.6, "rounds": 6}, "privacy": {"max_participations": 3}}
    paid = play(toy_federation(**changes))
    free = [result for result, _ in federate(toy_federation(**changes))]
    assert len(free) == len(paid) == 6
    for one, two in zip(free, paid, strict=True):
        assert torch.equal(one.params, two.params)
        assert (one.participants, one.metrics, one.C) == (two.participants, two.metrics, two.C)
        assert math.isnan(one.epsilon)
        assert not math.isnan(two.epsilon)
        assert one.epsilons == ()


def test_who_takes_part_is_invited_within_its_cap_and_not_excluded() -> None:
    federation = toy_federation(privacy={"max_participations": 2})
    assert select_participants(federation, 0, [0, 0, 0]) == [0, 1, 2]
    assert select_participants(federation, 0, [0, 2, 1]) == [0, 2]
    assert select_participants(federation, 0, torch.tensor([0, 2, 1]), {0}) == [2]


def test_the_last_round_is_always_evaluated() -> None:
    settings = toy_federation(train={"rounds": 5}, run={"evaluate_every": 2}).settings
    assert [t for t in range(5) if is_evaluation_round(settings, t)] == [1, 3, 4]


def test_what_was_spent_is_what_the_ledger_says_and_nothing_else() -> None:
    """Attempts that were paid again count again; rounds and runs that were not asked about do not."""
    step = [Gaussian(0.1, 2.0, 3)]
    with Ledger.open(":memory:") as ledger:
        for name in ("a", "b"):
            ledger.enroll(name, None, 1e-5, "rdp", "example", "toys")
        ledger.reserve("r", 0, {"a": step, "b": step})
        ledger.reserve("r", 0, {"a": step}, attempt=1)
        ledger.reserve("r", 1, {"b": step})
        ledger.reserve("other", 0, {"b": step})
        assert ledger.list_round_reservations("r", range(1, 2)) == [("b", tuple(step))]
        account = RunAccount(ledger, "r")
        account.read_rounds_until(1)
        one, two = ledger.epsilon("b", "other"), ledger.epsilon("a", "r")
        assert account.largest == two
        assert two >= accounting.compute_epsilon(step * 2, 1e-5)
        account.read_rounds_until(2)
        plan = toy_federation().plan
        named = dataclasses.replace(plan, name=["a", "b", "c"].__getitem__)
        assert account.epsilons(named) == (two, two, 0.0)
        assert two > one
