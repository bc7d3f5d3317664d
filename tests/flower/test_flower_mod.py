"""Other people's client functions: a strategy that is private for whole parties, and a mod that guards a loop."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fulcrum.errors import BudgetError, ConfigError
from fulcrum.flower.mod import PrivateMod
from fulcrum.flower.strategy import PrivateFedAvg

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WIDTH = 4


@pytest.fixture(autouse=True)
def _identity(monkeypatch):
    """What Flower's runtime sets in the process of an app."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 2))


def make_data(node: int, n: int = 80) -> TensorDataset:
    stream = torch.Generator().manual_seed(node)
    x = torch.randn(n, WIDTH, generator=stream)
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_message(arrays: ArrayRecord, node: int, number: int, kind: str = MessageType.TRAIN) -> Message:
    message = Message(RecordDict({"arrays": arrays, "config": ConfigRecord({})}), dst_node_id=node, message_type=kind)
    return address(message, node, number)


def address(message: Message, node: int, number: int) -> Message:
    """What Flower's server adds on the way."""
    old = message.metadata
    message.__dict__["_metadata"] = Metadata(
        run_id=1,
        message_id=str(number),
        src_node_id=1,
        dst_node_id=node,
        reply_to_message_id="",
        group_id=old.group_id,
        created_at=old.created_at,
        ttl=old.ttl,
        message_type=old.message_type,
    )
    return message


def make_context(node: int) -> Context:
    return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})


class MemoryGrid:
    """A grid whose nodes are functions in this process."""

    def __init__(self, app: ClientApp, nodes: int) -> None:
        self.app, self.nodes, self.sent = app, {100 + k: make_context(100 + k) for k in range(nodes)}, list[int]()

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, timeout=None):
        found = []
        for number, message in enumerate(messages):
            node = message.metadata.dst_node_id
            self.sent.append(node)
            addressed = address(
                Message(message.content, dst_node_id=node, message_type=message.metadata.message_type), node, number
            )
            found.append(self.app(addressed, self.nodes[node]))
        return found


# --- the strategy -----------------------------------------------------------------------------------


def plain_app(factor: float = 1.0) -> ClientApp:
    """An ordinary ClientApp that knows nothing of privacy."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = make_net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5 * factor)
        x, y = make_data(context.node_id).tensors
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": 80, "loss": 1.0})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    return app


def test_a_strategy_makes_any_client_function_private():
    grid = MemoryGrid(plain_app(), nodes=40)
    strategy = PrivateFedAvg(parties=40, rounds=6, epsilon=8.0, participation=0.5, seed=1)
    result = strategy.start(grid, initial_arrays=ArrayRecord(make_net().state_dict()), num_rounds=6)
    rounds = strategy.private_rounds
    assert rounds.round == 6
    assert 7.9 < rounds.epsilon <= 8.0
    assert 60 < len(grid.sent) < 180
    assert "client" in rounds.report()["unit"]
    assert "# Privacy statement" in strategy.statement()
    assert set(result.train_metrics_clientapp[1]) == {"epsilon", "C"}  # no metric of a client
    with pytest.raises(BudgetError, match="all 6 planned rounds"):
        strategy.configure_train(7, result.arrays, ConfigRecord({}), grid)


def test_one_party_moves_the_release_by_no_more_than_its_bound():
    """Without noise, the release with and without a party's huge update differs by C over the expected number."""
    found = []
    for factor in (1.0, 1e6):
        app = plain_app()
        small = app._registered_funcs["train.default"]
        large = plain_app(factor)._registered_funcs["train.default"]
        app._registered_funcs["train.default"] = lambda msg, context, one=small, other=large: (
            other if context.node_id == 100 else one
        )(msg, context)
        strategy = PrivateFedAvg(parties=5, rounds=1, sigma=1e-6, method="dp-sgd", options={"C0": 0.1}, seed=1)
        grid = MemoryGrid(app, nodes=5)
        result = strategy.start(grid, initial_arrays=ArrayRecord(make_net().state_dict()), num_rounds=1)
        found.append(torch.cat([value.flatten() for value in result.arrays.to_torch_state_dict().values()]))
    assert 0 < (found[0] - found[1]).norm() <= 2 * 0.1 / 5 + 1e-5


def test_the_strategy_refuses_another_number_of_nodes():
    strategy = PrivateFedAvg(parties=3, rounds=1, epsilon=8.0, seed=1)
    with pytest.raises(ConfigError, match="2 nodes are connected"):
        strategy.configure_train(1, ArrayRecord(make_net().state_dict()), ConfigRecord({}), MemoryGrid(plain_app(), 2))


# --- the mod ----------------------------------------------------------------------------------------


def private_app(mod: PrivateMod, trick: str = "") -> ClientApp:
    app = ClientApp(mods=[mod])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = make_net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        data = make_data(context.node_id)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if trick == "start":
            next(iter(model.parameters())).data.add_(1.0)
        if trick == "error":
            raise ValueError(f"the first record is {data.tensors[0][0].tolist()}")
        loader = DataLoader(data, batch_size=20, shuffle=True)
        if trick != "plain":
            model, optimizer, loader = mod.private(model, optimizer, loader)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if trick == "after":
            next(iter(model.parameters())).data.add_(data.tensors[0].mean())
        metrics = MetricRecord({"num-examples": len(data), "loss": 0.123})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.9})}), reply_to=msg)

    return app


def test_a_mod_lets_out_what_was_released_and_nothing_else(tmp_path):
    mod = PrivateMod(epsilon=4.0, rounds=3, ledger=tmp_path / "ledger.sqlite")
    app, context = private_app(mod), make_context(7)
    arrays = ArrayRecord(make_net().state_dict())
    spent = []
    for number in range(3):
        reply = app(make_message(arrays, 7, number), context)
        assert not reply.has_error(), reply.error
        metrics = reply.content["metrics"]
        assert set(metrics) == {"num-examples", "epsilon", "steps"}  # the loss stays inside
        assert metrics["steps"] == 4 * (number + 1)
        spent.append(metrics["epsilon"])
        before = torch.cat([value.flatten() for value in arrays.to_torch_state_dict().values()])
        arrays = reply.content["arrays"]
        assert not torch.equal(before, torch.cat([value.flatten() for value in arrays.to_torch_state_dict().values()]))
    assert 0 < spent[0] < spent[1] < spent[2] <= 4.0
    reply = app(make_message(arrays, 7, 4), context)
    assert reply.error.reason == "this party's privacy budget is spent."
    lost = copy.copy(context)
    lost.state = RecordDict()  # a node that forgot its state has no new budget
    assert app(make_message(arrays, 7, 5), lost).error.reason == "this party's privacy budget is spent."


@pytest.mark.parametrize(
    ("trick", "reason"),
    [
        ("plain", "did not train through mod.private"),
        ("start", "private loop refused"),
        ("after", "not those that the private loop released"),
        ("error", "the client function failed."),
    ],
)
def test_what_a_mod_refuses(trick, reason):
    app = private_app(PrivateMod(epsilon=4.0, rounds=3, seed=1), trick)
    reply = app(make_message(ArrayRecord(make_net().state_dict()), 7, 0), make_context(7))
    assert reply.has_error()
    assert reason in reply.error.reason
    assert "record" not in reply.error.reason or "loop" in reply.error.reason


def test_evaluations_stay_inside():
    arrays = ArrayRecord(make_net().state_dict())
    app = private_app(PrivateMod(epsilon=4.0, rounds=3, seed=1))
    assert app(make_message(arrays, 7, 0, MessageType.EVALUATE), make_context(7)).has_error()
    app = private_app(PrivateMod(epsilon=4.0, rounds=3, seed=1, evaluate=True))
    assert not app(make_message(arrays, 7, 0, MessageType.EVALUATE), make_context(7)).has_error()
