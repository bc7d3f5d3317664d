"""A round whose messages are masked in pairs: the terms of each message, the masks, and what the sum says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fulcrum.clipping.rule import ClipRule
from fulcrum.privacy.bounds import sanitise_bounds
from fulcrum.privacy.mechanism import compute_charged_scale
from fulcrum.privacy.pairwise.graph import list_neighbours
from fulcrum.privacy.pairwise.integers import add_masks, choose_shared_grid, draw_mask, read_sum, sum_messages
from fulcrum.rng import CipherRandomness, Randomness, name_stream
from fulcrum.types import Assignment, ClientReply, MessageTerms, RoundRequest, RuleState

NOISE_REACH = 40.0
"""Standard deviations that the noise of a coordinate is given room for."""


def add_message_terms(
    tasks: Sequence[Assignment], units: Sequence[int], weights: Sequence[float], rule: ClipRule, state: RuleState
) -> tuple[Assignment, ...]:
    """The tasks with the weight of each message and the round's grid. All of it follows from public numbers.

    units: n_k; weights: of the participants in the mean, with sum 1. state: the rule's, which all participants share.
    """
    bounds = sanitise_bounds(rule, rule.bounds(state))
    batches = [task.rate * count for task, count in zip(tasks, units, strict=True)]
    factors = [weight / batch for weight, batch in zip(weights, batches, strict=True)]
    scales = [
        float(compute_charged_scale(rule, bounds, task.rate, task.sigma, batch, shares=task.noise_parties).sum) * factor
        for task, batch, factor in zip(tasks, batches, factors, strict=True)
    ]
    # Every unit of every participant, pulling one coordinate the same way by all of its bound.
    largest = float(torch.linalg.vector_norm(bounds.C.double())) * math.fsum(
        factor * count for factor, count in zip(factors, units, strict=True)
    )
    grid = choose_shared_grid(scales, largest + NOISE_REACH * math.hypot(*scales))
    return tuple(
        dataclasses.replace(task, message=MessageTerms(factor, grid))
        for task, factor in zip(tasks, factors, strict=True)
    )


def mask_reply(randomness: Randomness, request: RoundRequest, reply: ClientReply, colluders: int) -> ClientReply:
    """The reply with its masks, of keys that follow from the run's randomness: one process plays all parties.

    Recorded randomness, for tests, has no keys: its messages stay as they are.
    """
    if not isinstance(randomness, CipherRandomness):
        return reply
    clients = [task.client for task in request.assignments]
    place = clients.index(reply.client)
    masks: list[tuple[bool, Tensor]] = []
    for other in list_neighbours(place, len(clients), colluders):
        pair = sorted((reply.client, clients[other]))
        stream = randomness.locate_stream(name_stream("mask", request.round, *pair, attempt=request.attempt))
        masks.append((place < other, draw_mask(*stream, len(reply.delta), reply.delta.device)))
    return dataclasses.replace(reply, delta=add_masks(reply.delta, masks))


def combine_messages(
    replies: Sequence[ClientReply], tasks: Sequence[Assignment], params: Tensor, lr: float, weight_decay: float
) -> Tensor:
    """The update [d] of the model that all participants' messages add up to.

    The sum is the noised mean gradient, on which the step and the weight decay act as at a party.
    """
    terms = tasks[0].message
    assert terms is not None
    gradient = read_sum(sum_messages(reply.delta for reply in replies), terms.grid).to(params)
    if weight_decay:
        gradient = gradient + weight_decay * params
    return -lr * gradient
