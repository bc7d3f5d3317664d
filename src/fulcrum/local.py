"""A client's local training, from top to bottom.

One local step: Poisson sample; gradient of each unit; clip; add up; noise; divide by the EXPECTED
batch; step. An empty sample still adds noise and still steps. A non-finite gradient counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from fulcrum.clip.rule import ClipRule, Shape, alone
from fulcrum.data import Dataset, Partition, Party, party_of, sample_units
from fulcrum.grads import Follower
from fulcrum.models import Layout
from fulcrum.noise import hold, hold_both, release, scales
from fulcrum.rng import Randomness
from fulcrum.types import Assignment, Bounds, ClientReply, Event, Released, RoundRequest, State, Stats, View


@dataclass(frozen=True)
class Problem:
    """What stays the same over all rounds and clients of a run: data, model, rule, randomness.

    groups: for each parameter tensor the group it is clipped in; empty when flat. workers: how many
    cores the parallel engine may use; 0 leaves it to PyTorch's number of threads.
    """

    dataset: Dataset
    partition: Partition
    model: nn.Module
    layout: Layout
    rule: ClipRule
    randomness: Randomness
    unit: str = "example"
    groups: tuple[int, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    diagnostics: bool = False
    precision: str = "float32"
    workers: int = 0

    @property
    def shape(self) -> Shape:
        """What the rule may know of the model."""
        return Shape(self.layout.dim, self.layout.sizes, self.groups)

    @cached_property
    def coordinates(self) -> torch.Tensor:
        """The group of each of the d coordinates, int64 [d]."""
        return coordinate_groups(self.layout, self.groups).to(self.device)

    def party(self, client: int) -> Party:
        """The client's records and units."""
        return party_of(self.dataset, self.partition, client, self.unit)


def train_client(
    problem: Problem, request: RoundRequest, task: Assignment, state: State, work: Work | None = None
) -> ClientReply:
    """Run one client's N local steps and return what leaves it: its update and the events behind it.

    `work` clips and adds up the gradients of a sample; by default it writes them all out (`by_matrix`).
    """
    work = work or by_matrix(Follower(problem.model, problem.layout))
    party = problem.party(task.client)
    theta = request.params
    batch = task.rate * party.units
    extras: list[torch.Tensor] = []
    events: list[Event] = []
    seen: list[dict[str, float]] = []

    for step in range(task.steps):
        key = (request.round, task.client, step)
        rows, slots, count = sample_units(problem.randomness, ("sample", *key), party, task.rate)
        view = problem.rule.view(state, request.round, request.rounds)
        terms = Terms(task.sigma, batch, task.lr)
        given = work(problem, Sample(theta, rows, slots, count), view, state, terms)
        state = given.state

        asked = task.asks(request.round, step)
        scale = scales(problem.rule, given.bounds, task.rate, task.sigma, batch, asked, task.shares)
        noisy, noisy_extra = release(given.sum, given.extra, scale, problem.randomness, key)
        gradient = (noisy if view.transform is None else view.transform.inverse(noisy)) / batch  # [d]
        change = -task.lr * (gradient + request.weight_decay * theta)
        theta = theta + change

        events.append(scale.event)
        extras.append(noisy_extra / batch)
        if problem.rule.when == "step":
            noise = alone(problem.rule.share, task.sigma, batch) / batch
            public = (task.lr, 1, request.round, request.rounds, noise, float(asked))
            state = problem.rule.adapt(state, Released(change, extras[-1], *public))
        if problem.diagnostics:
            seen.append(_look(given))

    return ClientReply(
        client=task.client,
        delta=theta - request.params,
        extra=torch.stack(extras).sum(dim=0) / max(1, task.asked(request.round)),
        events=tuple(events),
        state=state,
        diagnostics={name: sum(s[name] for s in seen) / len(seen) for name in (seen[0] if seen else ())},
    )


@dataclass(frozen=True)
class Sample:
    """One step's units at the weights theta [d]: rows [b] of the data set, the unit (0..count-1) of each row."""

    theta: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    count: int

    def records(self, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        """The sampled records, x [b, ...] and y [b]."""
        return problem.dataset.x[self.rows].to(problem.device), problem.dataset.y[self.rows].to(problem.device)


@dataclass(frozen=True)
class Terms:
    """A step's public numbers: noise multiplier, expected batch, learning rate."""

    sigma: float
    batch: float
    lr: float


Work = Callable[[Problem, Sample, View, State, Terms], "Contribution"]
"""From a sample, a rule's view and state and the step's terms to the clipped sum, before noise."""


def by_matrix(follow: Follower) -> Work:
    """The obvious way: every unit's gradient is written out, [B, d]."""

    def work(problem: Problem, sample: Sample, view: View, state: State, terms: Terms) -> Contribution:
        gradients, losses = unit_gradients(problem, follow, sample)
        return contribute(
            problem.rule, view, state, gradients, losses, problem.coordinates, terms.sigma, terms.batch, lr=terms.lr
        )

    return work


def unit_gradients(problem: Problem, follow: Follower, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient [B, d] and loss [B] of each sampled unit.

    For unit `person` a unit's gradient is the mean over that person's records, so that somebody with
    many records counts as much as somebody with one.
    """
    tape = follow(sample.theta, *sample.records(problem))
    gradients, losses = tape.matrix(), tape.losses
    if problem.unit == "example":
        return gradients, losses
    slots, count = sample.slots.to(problem.device), sample.count
    records = torch.bincount(slots, minlength=count).to(losses)  # [B]
    summed = gradients.new_zeros((count, gradients.shape[1])).index_add_(0, slots, gradients)
    return summed / records[:, None], losses.new_zeros(count).index_add_(0, slots, losses) / records


@dataclass(frozen=True)
class Contribution:
    """The clipped sum [m] and extra statistics [J] of a batch, before noise, and what bounds them.

    stats, factors [B, G] and losses [B] are what they were made from; never released.
    """

    sum: torch.Tensor
    extra: torch.Tensor
    bounds: Bounds
    state: State
    stats: Stats
    factors: torch.Tensor
    losses: torch.Tensor


def contribute(
    rule: ClipRule,
    view: View,
    state: State,
    gradients: torch.Tensor,
    losses: torch.Tensor,
    groups: torch.Tensor,
    sigma: float = 0.0,
    batch: float = 1.0,
    mask: torch.Tensor | None = None,
    lr: float = 1.0,
    weights: torch.Tensor | None = None,
) -> Contribution:
    """Clip each unit's gradient as the rule says and add up. No noise yet: the result must not leave.

    gradients [B, d], losses [B]; groups [d] is the group of each coordinate. Rows that are not finite,
    and rows where mask [B] is False (padding), count as zero. weights [B] in [0, 1] scale what each unit
    adds to the sum after clipping (client level); the extra statistics stay unweighted.
    """
    mask = torch.ones(len(gradients), dtype=torch.bool, device=gradients.device) if mask is None else mask
    counted = torch.isfinite(torch.linalg.vector_norm(gradients, dim=1)) & mask
    if not bool(counted.all()):
        gradients = torch.where(counted[:, None], gradients, torch.zeros_like(gradients))
    losses = torch.where(counted & torch.isfinite(losses), losses, torch.zeros_like(losses))
    where = groups if view.transform is None else view.transform.groups
    coefficients = gradients if view.transform is None else view.transform.forward(gradients)  # [B, m]
    stats = Stats(
        norms=group_norms(coefficients, where, len(state["C"])),
        mask=mask,
        dots=None if view.direction is None else gradients @ view.direction,
        losses=losses if view.losses else None,
        sigma=sigma,
        batch=batch,
        lr=lr,
    )
    factors, extra, bounds, state = judge(rule, stats, state, lambda f: weighted_sum(f, coefficients, where))
    scaled = factors if weights is None else factors * weights[:, None]
    return Contribution(weighted_sum(scaled, coefficients, where), extra, bounds, state, stats, factors, losses)


def judge(
    rule: ClipRule, stats: Stats, state: State, add_up: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, Bounds, State]:
    """What the rule makes of a batch: factors [B, G], the summed extra statistics, bounds, next state.

    The statistics are [J], or [J + m] where the rule asks for a second sum; add_up(factors [B, G]) -> [m]
    makes such a sum of the batch's gradients.
    """
    factors, extra, state = rule.clip(stats, state)  # [B, G], [B, J]
    extra = extra * stats.mask[:, None]
    bounds = rule.bounds(state)
    second = []
    if rule.second is not None:
        extra, again = hold_both(rule, extra, rule.second(stats, state), stats.norms, bounds)
        second = [add_up(again)]
    factors, extra = hold(rule, factors, extra, stats.norms, bounds)
    return factors, torch.cat([extra.sum(dim=0), *second]), bounds, state


def weighted_sum(factors: torch.Tensor, coefficients: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Sum over the rows of coefficients [B, m], each coordinate scaled by its group's factor [B, G]: [m]."""
    by_group = factors.T @ coefficients  # [G, m]: of each row only its own group's coordinates count
    return by_group.gather(0, where[None, :]).squeeze(0)


def coordinate_groups(layout: Layout, groups: tuple[int, ...]) -> torch.Tensor:
    """The group of each of the d coordinates, int64 [d]."""
    chosen = torch.tensor(groups or (0,) * len(layout.sizes))
    return torch.repeat_interleave(chosen, torch.tensor(layout.sizes))


def group_norms(coefficients: torch.Tensor, where: torch.Tensor, groups: int) -> torch.Tensor:
    """Euclidean norm of each row within each group: [B, m], [m] -> [B, G]."""
    if groups == 1:
        norms: torch.Tensor = torch.linalg.vector_norm(coefficients, dim=1, keepdim=True)
        return norms
    squares = coefficients.new_zeros((coefficients.shape[0], groups))
    return squares.index_add_(1, where, coefficients.square()).sqrt()


def _look(given: Contribution) -> dict[str, float]:
    """Non-private diagnostics of one step. For simulations only."""
    losses = given.losses
    if len(losses) == 0:
        return {"clipped": 0.0, "mean_norm": 0.0, "train_loss": 0.0, "batch": 0.0}
    return {
        "clipped": float((given.factors < 1).float().mean()),
        "mean_norm": float(torch.linalg.vector_norm(given.stats.norms, dim=1).mean()),
        "train_loss": float(losses.mean()),
        "batch": float(len(losses)),
    }
