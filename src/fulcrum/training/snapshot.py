"""The federation between two rounds, and its form in a checkpoint file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fulcrum.training.federation import Federation, make_model_facts
from fulcrum.training.server import SERVERS
from fulcrum.types import RuleState, make_short_repr


@dataclass(frozen=True)
class Snapshot:
    """The federation between two rounds, after `round` rounds. clients: states of client rules, by client.

    participations [K]: the number of rounds each party took part in; zeros where that is secret (unit client). course:
    numbers of the round that ended here, for observers (`RoundResult.course`); no checkpoint keeps it.
    """

    __repr__ = make_short_repr

    round: int
    params: torch.Tensor
    averaged: torch.Tensor
    server: RuleState
    rule: RuleState
    participations: torch.Tensor
    clients: Mapping[int, RuleState] = field(default_factory=dict)
    course: Mapping[str, float] = field(default_factory=dict)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Flat names for a safetensors file; `from_tensors` reads them back."""
        flat = {"params": self.params, "averaged": self.averaged, "participations": self.participations}
        flat |= {f"server.{name}": value for name, value in self.server.items()}
        flat |= {f"rule.{name}": value for name, value in self.rule.items()}
        for client, state in self.clients.items():
            flat |= {f"client.{client}.{name}": value for name, value in state.items()}
        # Tensors of a state may share memory, which safetensors refuses, so each is copied.
        return {name: value.detach().cpu().clone().contiguous() for name, value in flat.items()}

    @staticmethod
    def from_tensors(round: int, flat: Mapping[str, torch.Tensor], device: torch.device) -> Snapshot:
        """The snapshot after `round` rounds, on `device`."""
        clients: dict[int, dict[str, torch.Tensor]] = {}
        server: dict[str, torch.Tensor] = {}
        rule: dict[str, torch.Tensor] = {}
        for name, value in flat.items():
            kind, _, rest = name.partition(".")
            if kind == "server":
                server[rest] = value.to(device)
            elif kind == "rule":
                rule[rest] = value.to(device)
            elif kind == "client":
                client, _, field_name = rest.partition(".")
                clients.setdefault(int(client), {})[field_name] = value.to(device)
        params, averaged = flat["params"].to(device), flat["averaged"].to(device)
        return Snapshot(round, params, averaged, server, rule, flat["participations"], clients)


def make_first_snapshot(federation: Federation) -> Snapshot:
    """The federation before its first round: public initial weights, C0."""
    problem = federation.problem
    params = problem.layout.flatten(problem.model).to(problem.device)
    server = SERVERS.find(federation.settings.train.server).init(problem.layout.dim)
    rule = problem.rule.init(federation.settings.clip, make_model_facts(federation))
    participations = torch.zeros(problem.partition.parties, dtype=torch.int32)
    to_device = {name: value.to(problem.device) for name, value in rule.items()}
    return Snapshot(0, params, params, server, to_device, participations)
