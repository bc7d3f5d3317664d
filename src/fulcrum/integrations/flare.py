"""NVIDIA FLARE: an aggregator that makes any client private as a whole site. The FLARE server is trusted.

    aggregator = PrivateAggregator(sites=["site-1", "site-2", ...], model="initial.pt", rounds=30, epsilon=8.0)
    controller = FedAvg(num_clients=len(sites), num_rounds=30, aggregator=aggregator)

All sites are asked in every round (FLARE's own sampling is not secret, so it would not lower the noise). Client code
needs nothing: it sends new weights or differences, as for FedAvg. Its metrics are not private, and are dropped. For
records within a site, use `fulcrum.private` in the client's own loop (docs/own-loop.md): its Poisson loader, its
ledger on the site's disk, and its state in a file.

Needs nvflare 2.9 (`pip install nvflare`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from torch import Tensor

from fulcrum.errors import ConfigError
from fulcrum.integrations.central import PrivateRounds


class PrivateAggregator(ModelAggregator):  # type: ignore[misc, unused-ignore]
    """Clips each site's update by a rule, averages, adds noise; `statement()` is the run's privacy statement.

    sites: names of all sites, which are the parties. model: the public initial weights: a state_dict, or a file of
    one. rounds: the number that the noise is chosen for; no more can be taken. epsilon, delta, sigma, method, seed,
    ledger, options: as for `fulcrum.private`.
    """

    def __init__(
        self,
        sites: Sequence[str],
        model: Mapping[str, Any] | str,
        rounds: int,
        epsilon: float | None = None,
        delta: float = 1e-5,
        sigma: float | None = None,
        method: str = "moo-c",
        seed: int | None = None,
        ledger: str | None = None,
        name: str = "flare",
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if len(set(sites)) != len(sites) or not sites:
            raise ConfigError("sites must name every site once; budgets are kept for each of them.")
        weights = torch.load(Path(model), weights_only=True) if isinstance(model, str) else model
        self._numbers = {site: k for k, site in enumerate(sites)}
        self._updates: dict[int, dict[str, Tensor]] = {}
        self.private_rounds = PrivateRounds.open(
            weights,
            len(sites),
            rounds=rounds,
            epsilon=epsilon,
            delta=delta,
            sigma=sigma,
            method=method,
            seed=seed,
            ledger=ledger,
            name=name,
            **(options or {}),
        )

    def reset_stats(self) -> None:
        """A new round: it is paid for before any site's answer is looked at. BudgetError where it is not affordable."""
        self._updates = {}
        self.private_rounds.begin()

    def accept_model(self, model: FLModel) -> None:
        """One site's answer. An answer of a site that is not in `sites`, or of other shapes, does not count."""
        number = self._numbers.get(str((model.meta or {}).get("client_name", "")))
        before = self.private_rounds.weights
        if number is None or not isinstance(model.params, Mapping):
            return
        found = {name: torch.as_tensor(value) for name, value in model.params.items() if name in before}
        if any(name not in found or found[name].shape != value.shape for name, value in before.items()):
            return
        full = model.params_type != ParamsType.DIFF
        self._updates[number] = {
            name: found[name].float() - (value if full else 0.0)
            for name, value in before.items()
            if value.is_floating_point()
        }

    def aggregate_model(self) -> FLModel:
        """The released weights; without the sites' metrics."""
        weights = self.private_rounds.finish(self._updates)
        self._updates = {}
        return FLModel(
            params={name: value.numpy() for name, value in weights.items()},
            params_type=ParamsType.FULL,
            meta={"epsilon": self.private_rounds.epsilon},
        )

    def statement(self) -> str:
        """The privacy statement as the page PRIVACY.md."""
        return self.private_rounds.statement()
