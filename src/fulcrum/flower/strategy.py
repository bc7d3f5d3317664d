"""A Flower strategy: anybody's client function, private for whole parties. The ServerApp is trusted and adds the noise.

    strategy = PrivateFedAvg(parties=50, rounds=30, epsilon=8.0, participation=0.3)
    strategy.start(grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=30)
    print(strategy.statement())

Clients need nothing: no mod, no Fulcrum. They answer with their new weights, as for FedAvg. Their train metrics and
evaluations are not private; `train_metrics` and evaluation are off unless they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fulcrum.errors import ConfigError, RunError
from fulcrum.integrations.central import PrivateRounds


class PrivateFedAvg(FedAvg):  # type: ignore[misc, unused-ignore]
    """Federated averaging with client-level privacy: updates are clipped by a rule, averaged, and noised.

    parties: number of nodes K, all of which must be connected before the first round; public. rounds: the number that
    the noise is chosen for; no more can be taken. participation: probability q_c with which a node is asked in a
    round, in secret. epsilon, delta, method, seed, ledger, options: as for `fulcrum.private`. evaluate: whether nodes
    are asked for evaluations, whose metrics are not private. Other words are FedAvg's.
    """

    def __init__(
        self,
        parties: int,
        rounds: int,
        *,
        epsilon: float | None = None,
        delta: float = 1e-5,
        sigma: float | None = None,
        participation: float = 1.0,
        method: str = "moo-c",
        seed: int | None = None,
        ledger: str | Path | None = None,
        name: str = "flower",
        evaluate: bool = False,
        options: dict[str, Any] | None = None,
        **words: Any,
    ) -> None:
        super().__init__(
            fraction_evaluate=1.0 if evaluate else 0.0,
            min_available_nodes=parties,
            min_train_nodes=1,
            min_evaluate_nodes=1 if evaluate else 0,
            **words,
        )
        self._terms: dict[str, Any] = {
            "parties": parties,
            "rounds": rounds,
            "epsilon": epsilon,
            "delta": delta,
            "sigma": sigma,
            "participation": participation,
            "method": method,
            "seed": seed,
            "ledger": ledger,
            "name": name,
            **(options or {}),
        }
        self._rounds: PrivateRounds | None = None
        self._nodes: list[int] = []

    @property
    def private_rounds(self) -> PrivateRounds:
        """The rounds: epsilon, C, the statement. RunError before the first one."""
        if self._rounds is None:
            raise RunError("the strategy has not begun its first round; start it.")
        return self._rounds

    def statement(self) -> str:
        """The privacy statement as the page PRIVACY.md."""
        return self.private_rounds.statement()

    def summary(self) -> None:
        """Nothing is logged: who takes part is secret."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Pay for the round, draw the nodes in secret, and ask them."""
        if self._rounds is None:
            self._rounds = PrivateRounds.open(arrays.to_torch_state_dict(), **self._terms)
        if not self._nodes:
            found = sorted(grid.get_node_ids())
            if len(found) != self._terms["parties"]:
                raise ConfigError(
                    f"{len(found)} nodes are connected, and the noise was planned for parties = "
                    f"{self._terms['parties']}; wait for all of them, or plan anew."
                )
            self._nodes = found
        cohort = self._rounds.begin()
        record = RecordDict(
            {
                self.arrayrecord_key: ArrayRecord(self._rounds.weights),
                self.configrecord_key: ConfigRecord({**config, "server-round": server_round}),
            }
        )
        return list(self._construct_messages(record, [self._nodes[k] for k in cohort], MessageType.TRAIN))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clip, average and noise the answers. A round without answers is released like any other."""
        rounds = self.private_rounds
        numbers = {node: k for k, node in enumerate(self._nodes)}
        before = rounds.weights
        updates: dict[int, dict[str, torch.Tensor]] = {}
        for reply in replies:
            if reply.has_error() or reply.metadata.src_node_id not in numbers:
                continue
            if len(reply.content.array_records) != 1:
                continue  # no weights, or several: as if it had not answered
            found = next(iter(reply.content.array_records.values())).to_torch_state_dict()
            if any(name not in found or found[name].shape != value.shape for name, value in before.items()):
                continue
            updates[numbers[reply.metadata.src_node_id]] = {
                name: found[name].float() - value for name, value in before.items() if value.is_floating_point()
            }
        return ArrayRecord(rounds.finish(updates)), MetricRecord({"epsilon": rounds.epsilon, "C": max(rounds.C)})
