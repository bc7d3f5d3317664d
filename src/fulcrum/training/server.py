"""The server's side of a round: weighted means, server optimisers, the moving average of models.

All of it acts on released values, so none of it costs privacy. A server optimiser is a pair of
functions: `init(d) -> state`, `step(aggregate, state, settings) -> (change, state)`. One that `corrects` for the known
noise is given it too: `step(aggregate, state, settings, noise)`, the standard deviation in each coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fulcrum.settings.derived import WEIGHT_POWERS
from fulcrum.settings.registry import Registry
from fulcrum.settings.schema import Train
from fulcrum.training.combine import COMBINERS
from fulcrum.types import ClientReply, Released, RuleState


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
        if float(weight) == 1:
            return only.delta, only.extra
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
    """Turns the aggregate into a change of the model.

    scales: the first change is server_lr times the aggregate. corrects: `step` takes the standard deviation of the
    noise in one coordinate of the update as its fourth argument.
    """

    init: Callable[[int], RuleState]
    step: Callable[..., tuple[torch.Tensor, RuleState]]
    scales: bool = True
    corrects: bool = False

    def move(
        self, update: torch.Tensor, state: RuleState, train: Train, released: Released, C: torch.Tensor
    ) -> tuple[torch.Tensor, RuleState]:
        """The change of the weights [d] for the update [d] that a rule with clipping norms C [G] made of a release."""
        if not self.corrects:
            return self.step(update, state, train)
        return self.step(update, state, train, compute_update_noise(released, update, C))


def compute_update_noise(released: Released, update: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """Standard deviation of the noise in one coordinate of the update that a rule made of the release, C [G].

    Public: the release's own noise, times the length to which the rule brought it.
    """
    known = torch.as_tensor(released.noise * released.lr * released.steps, device=C.device)
    length = torch.linalg.vector_norm(released.aggregate).clamp_min(1e-30)
    noise = known * torch.linalg.vector_norm(C) * (torch.linalg.vector_norm(update) / length)
    return torch.where(known > 0, noise, torch.zeros_like(noise))  # without clipping C is infinite


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


NOISE_FLOOR = 0.1
"""adam-bc: least variance that is divided by, as a part of that of the noise; what is left after the correction may be
zero or negative."""


def _adam_bc_step(
    aggregate: torch.Tensor, state: RuleState, train: Train, noise: float | torch.Tensor
) -> tuple[torch.Tensor, RuleState]:
    """Adam with the known variance of the noise taken off its second moment (Tang et al. 2024, DP-AdamBC)."""
    count = state["count"].to(aggregate.device) + 1
    first = train.server_momentum * state["first"].to(aggregate) + (1 - train.server_momentum) * aggregate
    second = train.server_beta2 * state["second"].to(aggregate) + (1 - train.server_beta2) * aggregate.square()
    unbiased_first = first / (1 - train.server_momentum**count)
    unbiased_second = second / (1 - train.server_beta2**count)
    variance = torch.as_tensor(noise, device=aggregate.device).to(aggregate).square()
    left = torch.maximum(unbiased_second - variance, NOISE_FLOOR * variance).clamp_min(1e-30)
    return train.server_lr * unbiased_first / left.sqrt(), {"first": first, "second": second, "count": count}


FIRST_DISTANCE = 1e-6
"""d-adaptation: the first lower bound on the distance to a solution, as in its authors' code."""


def _d_adaptation_step(aggregate: torch.Tensor, state: RuleState, train: Train) -> tuple[torch.Tensor, RuleState]:
    """D-Adaptation of SGD (Defazio and Mishchenko 2023): the step is a lower bound d on the distance to a solution.

    With g = -aggregate: step = d / |g_0|; d <- max(d, 2 sum of step <g, s> / |s|), s the sum of the steps' gradients.
    """
    state = {name: value.to(aggregate.device) for name, value in state.items()}
    g = -aggregate
    first = torch.where(state["first"] > 0, state["first"], torch.linalg.vector_norm(g))
    step = state["distance"] / first.clamp_min(1e-30)
    along = state["along"] + step * torch.dot(g, state["sum"])
    total = state["sum"] + step * g
    bound = 2 * along / torch.linalg.vector_norm(total).clamp_min(1e-30)
    after = {"sum": total, "along": along, "first": first, "distance": torch.maximum(state["distance"], bound)}
    return -train.server_lr * step * g, after


def _make_moments(d: int) -> RuleState:
    return {"first": torch.zeros(d), "second": torch.zeros(d), "count": torch.tensor(0)}


def _start_d_adaptation(d: int) -> RuleState:
    numbers = {"along": 0.0, "first": 0.0, "distance": FIRST_DISTANCE}
    return {"sum": torch.zeros(d), **{name: torch.tensor(value) for name, value in numbers.items()}}


SERVERS: Registry[ServerOptimiser] = Registry(
    "train.server", noun="server optimiser", entry_points="fulcrum.server_optimisers", kind=ServerOptimiser
)
"""Server optimisers by name. Your own: package.module:name, or an entry point of an installed package."""
SERVERS.add("sgd", ServerOptimiser(lambda d: {}, _sgd_step))
SERVERS.add("momentum", ServerOptimiser(lambda d: {"velocity": torch.zeros(d)}, _momentum_step))
SERVERS.add("adam", ServerOptimiser(_make_moments, _adam_step, scales=False))
SERVERS.add("adam-bc", ServerOptimiser(_make_moments, _adam_bc_step, scales=False, corrects=True))
SERVERS.add("d-adaptation", ServerOptimiser(_start_d_adaptation, _d_adaptation_step, scales=False))


def update_moving_average(averaged: torch.Tensor, params: torch.Tensor, decay: float, rounds_done: int) -> torch.Tensor:
    """The average of released models after `rounds_done` rounds.

    The decay starts small and rises to its setting, so that the initial weights soon have little weight.
    """
    if decay == 0:
        return params
    effective = min(decay, rounds_done / (rounds_done + 10.0))
    return effective * averaged + (1 - effective) * params
