"""What travels in a round: arrays between the server and each party, counted in bytes before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fulcrum.clipping.party_state import select_moving_entries
from fulcrum.training.clipped_sum import compute_contribution
from fulcrum.training.problem import TrainingProblem, assign_coordinate_groups
from fulcrum.types import RuleState


@dataclass(frozen=True)
class RoundTraffic:
    """Bytes per party and round: down to the party, up from it."""

    down: int
    up: int


def measure_array_traffic(problem: TrainingProblem, state: RuleState) -> RoundTraffic:
    """Bytes of the arrays alone, without any message around them. state: the rule's state at the start of a run.

    Down: the weights, and what moves of the rule's state. Up: the update, the rule's statistics, and C where each party
    has its own.
    """
    own, update = problem.rule.where == "client", 4 * problem.layout.dim  # float32
    moving = {} if own else select_moving_entries(problem.rule.moves, state)
    up = update + 4 * measure_statistics_width(problem, state) + (count_bytes([state["C"]]) if own else 0)
    return RoundTraffic(update + count_bytes(moving.values()), up)


def count_bytes(arrays: Iterable[torch.Tensor]) -> int:
    """Bytes of the arrays' numbers."""
    return sum(value.numel() * value.element_size() for value in arrays)


def measure_statistics_width(problem: TrainingProblem, state: RuleState) -> int:
    """The number of extra statistics J that the rule releases, measured on a batch without examples."""
    on_cpu: Mapping[str, torch.Tensor] = {name: value.cpu() for name, value in state.items()}
    nothing = torch.zeros((0, problem.layout.dim))
    groups = assign_coordinate_groups(problem.layout, problem.groups)
    view = problem.rule.view(on_cpu, 0, 1)
    return len(compute_contribution(problem.rule, view, on_cpu, nothing, torch.zeros(0), groups, 1.0, 1.0).extra)
