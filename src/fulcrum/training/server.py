"""The server's side of a round: weighted means, server optimisers, the moving average of models.

All of it acts on released values, so none of it costs privacy. A server optimiser is a pair of
functions: `init(d) -> state`, `step(aggregate, state, settings) -> (change, state)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fulcrum.settings.derived import WEIGHT_POWERS
from fulcrum.settings.registry import Registry
from fulcrum.settings.schema import Train
from fulcrum.training.combine import COMBINERS
from fulcrum.types import ClientReply, RuleState


def compute_client_weights(units: Sequence[float], weights: str) -> torch.Tensor:
    """Weights [m] of the participants, with sum 1: proportional to declared sizes, to their roots, or equal.

    At example level participation is public, so dividing by the participants' total costs no privacy.
    """
    return compute_exact_weights(units, weights).float()


def compute_exact_weights(units: Sequence[float], weights: str) -> torch.Tensor:
    """`compute_client_weights` in float64."""
    sizes = torch.tensor(list(units), dtype=torch.float64)
    chosen = sizes ** WEIGHT_POWERS[weights]
    return chosen / chosen.sum()


def average_replies(replies: Sequence[ClientReply], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The released aggregate D_t [d] and the mean extra statistics [J]."""
    if len(replies) == 1:  # without a copy of a large model's update
        only, weight = replies[0], weights.to(replies[0].delta)
        return weight * only.delta, weight * only.extra
    delta = torch.stack([reply.delta for reply in replies])
    extra = torch.stack([reply.extra for reply in replies])
    weights = weights.to(delta)
    return weights @ delta, weights @ extra


def combine_replies(
    replies: Sequence[ClientReply], weights: torch.Tensor, train: Train
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The aggregate D_t [d] and the statistics [J] by `train.combine`, and the weights [m] with which parties count.

    The statistics are combined by themselves: an update that looks right says nothing about them.
    """
    if train.combine == "mean":
        return *average_replies(replies, weights), weights
    combine = COMBINERS.find(train.combine).combine
    found = combine(torch.stack([reply.delta for reply in replies]), weights, train.trim)
    extra = combine(torch.stack([reply.extra for reply in replies]), weights, train.trim)
    return found.values, extra.values, found.weights


@dataclass(frozen=True)
class ServerOptimiser:
    """Turns the aggregate into a change of the model. scales: the first change is server_lr times the aggregate."""

    init: Callable[[int], RuleState]
    step: Callable[[torch.Tensor, RuleState, Train], tuple[torch.Tensor, RuleState]]
    scales: bool = True


def _sgd_step(aggregate: torch.Tensor, state: RuleState, train: Train) -> tuple[torch.Tensor, RuleState]:
    return train.server_lr * aggregate, state


def _momentum_step(aggregate: torch.Tensor, state: RuleState, train: Train) -> tuple[torch.Tensor, RuleState]:
    velocity = train.server_momentum * state["velocity"].to(aggregate) + aggregate
    return train.server_lr * velocity, {"velocity": velocity}


def _adam_step(aggregate: torch.Tensor, state: RuleState, train: Train) -> tuple[torch.Tensor, RuleState]:
    count = state["count"].to(aggregate.device) + 1
    first = train.server_momentum * state["first"].to(aggregate) + (1 - train.server_momentum) * aggregate
    second = train.server_beta2 * state["second"].to(aggregate) + (1 - train.server_beta2) * aggregate.square()
    unbiased_first = first / (1 - train.server_momentum**count)
    unbiased_second = second / (1 - train.server_beta2**count)
    change = train.server_lr * unbiased_first / (unbiased_second.sqrt() + train.server_eps)
    return change, {"first": first, "second": second, "count": count}


SERVERS: Registry[ServerOptimiser] = Registry(
    "train.server", noun="server optimiser", entry_points="fulcrum.server_optimisers", kind=ServerOptimiser
)
"""Server optimisers by name. Your own: package.module:name, or an entry point of an installed package."""
SERVERS.add("sgd", ServerOptimiser(lambda d: {}, _sgd_step))
SERVERS.add("momentum", ServerOptimiser(lambda d: {"velocity": torch.zeros(d)}, _momentum_step))
SERVERS.add(
    "adam",
    ServerOptimiser(
        lambda d: {"first": torch.zeros(d), "second": torch.zeros(d), "count": torch.tensor(0)},
        _adam_step,
        scales=False,
    ),
)


def update_moving_average(averaged: torch.Tensor, params: torch.Tensor, decay: float, rounds_done: int) -> torch.Tensor:
    """The average of released models after `rounds_done` rounds.

    The decay starts small and rises to its setting, so that the initial weights soon have little weight.
    """
    if decay == 0:
        return params
    effective = min(decay, rounds_done / (rounds_done + 10.0))
    return effective * averaged + (1 - effective) * params
