"""The aggregator for NVIDIA FLARE, driven by FLARE's own FedAvg controller with sites in this process."""

from __future__ import annotations

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install nvflare")

import torch
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.workflows.fedavg import FedAvg

from fulcrum.errors import BudgetError
from fulcrum.integrations.flare import PrivateAggregator

SITES = ["site-1", "site-2", "site-3", "site-4"]
START = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}


class InProcess(FedAvg):
    """FLARE's controller without its network: each site answers at once."""

    def __init__(self, answer, **words) -> None:
        super().__init__(persistor_id="", model={name: value.numpy() for name, value in START.items()}, **words)
        self.answer, self.fl_ctx = answer, FLContext()
        self.seen: list[dict[str, torch.Tensor]] = []

    def sample_clients(self, num_clients=None):
        return SITES

    def send_model(self, task_name, targets, data, callback):
        for site in targets:
            callback(self.answer(site, data))

    def get_num_standing_tasks(self):
        return 0

    def event(self, event_type, *args):
        pass

    def fire_event_with_data(self, *args, **words):
        pass

    def save_model(self, model):
        self.seen.append({name: torch.as_tensor(value).clone() for name, value in model.params.items()})

    def info(self, message):
        pass


def answer(site: str, data: FLModel) -> FLModel:
    """New weights from some sites, differences from others."""
    change = {name: torch.full(value.shape, 0.1).numpy() for name, value in START.items()}
    if site == "site-2":
        return FLModel(params=change, params_type=ParamsType.DIFF, meta={"client_name": site}, metrics={"loss": 1.0})
    full = {name: data.params[name] + value for name, value in change.items()}
    return FLModel(params=full, params_type=ParamsType.FULL, meta={"client_name": site}, metrics={"loss": 1.0})


def test_flares_own_controller_with_a_private_aggregator(tmp_path):
    torch.save(START, tmp_path / "initial.pt")
    aggregator = PrivateAggregator(SITES, str(tmp_path / "initial.pt"), rounds=3, epsilon=8.0, seed=1)
    controller = InProcess(answer, num_clients=4, num_rounds=3, aggregator=aggregator)
    controller.run()
    assert aggregator.private_rounds.round == 3
    assert 7.9 < aggregator.private_rounds.epsilon <= 8.0
    assert len(controller.seen) == 3
    for name, value in aggregator.private_rounds.weights.items():
        assert torch.allclose(controller.seen[-1][name], value)
    assert "# Privacy statement" in aggregator.statement()
    with pytest.raises(BudgetError, match="all 3 planned rounds"):
        aggregator.reset_stats()


def test_differences_and_weights_count_alike():
    aggregator = PrivateAggregator(SITES, START, rounds=1, sigma=1e-6, method="dp-sgd", options={"C0": 10.0}, seed=1)
    InProcess(answer, num_clients=4, num_rounds=1, aggregator=aggregator).run()
    for value in aggregator.private_rounds.weights.values():
        assert torch.allclose(value, torch.full_like(value, 0.1), atol=1e-4)


def test_strangers_do_not_count():
    aggregator = PrivateAggregator(SITES, START, rounds=1, sigma=1e-6, method="dp-sgd", options={"C0": 10.0}, seed=1)
    aggregator.reset_stats()
    aggregator.accept_model(FLModel(params={"weight": START["weight"] + 9}, meta={"client_name": "site-1"}))
    aggregator.accept_model(FLModel(params={n: v + 9 for n, v in START.items()}, meta={"client_name": "nobody"}))
    found = aggregator.aggregate_model()
    assert all(abs(value).max() < 1e-3 for value in found.params.values())
