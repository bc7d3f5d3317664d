"""The records that travel through Fulcrum. All are frozen; tensors in them are never written to.

Shapes: d parameters of the model, B examples of a batch, G groups of parameters that are clipped
apart (1 for flat clipping), J extra statistics that a rule releases beside the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fulcrum.privacy.events import Event

RuleState = Mapping[str, torch.Tensor]
"""What a rule remembers: named tensors, so that it can be checkpointed and stacked. Holds at
least `C`, shape [G]."""


# --- clipping: what a rule sees and says ----------------------------------------------------


@dataclass(frozen=True)
class Transform:
    """An orthonormal change of basis for clipping and noise, such as a wavelet transform.

    forward maps gradients [B, d] to coefficients [B, m] (m >= d where it pads); inverse maps a noised
    sum [m] back to [d]. groups [m] names the group of every coefficient. forward is linear.

    The others are quicker ways, where there are any. norms: gradients [B, d] to the norms of their groups [B, G],
    without writing the coefficients out. own: sums [T, G, d], one for every group, to coefficients [T, m], each of its
    own group's sum. haar: how many levels, where norms are those of the levels of the orthonormal Haar transform of
    the rows as they lie, padded with zeros at their end, from coarse to fine; an engine may then take them by itself.
    """

    forward: Callable[[torch.Tensor], torch.Tensor]
    inverse: Callable[[torch.Tensor], torch.Tensor]
    groups: torch.Tensor
    norms: Callable[[torch.Tensor], torch.Tensor] | None = None
    own: Callable[[torch.Tensor], torch.Tensor] | None = None
    haar: int = 0


@dataclass(frozen=True)
class View:
    """What a rule needs to see of each example.

    transform: another domain in which gradients are clipped and noised (None for almost all rules).
    direction: a released vector [d]; the rule then gets its inner product with every gradient.
    losses: whether the rule wants each example's loss.
    """

    transform: Transform | None = None
    direction: torch.Tensor | None = None
    losses: bool = False


@dataclass(frozen=True)
class Stats:
    """What a rule gets to see: one row an example (or a person, or a client). Never released.

    norms [B, G]; dots [B] or None; losses [B] or None; mask [B] is False on padding.
    sigma is the noise multiplier of this step, batch the expected number of units in it, lr its
    learning rate eta.
    """

    norms: torch.Tensor
    mask: torch.Tensor
    dots: torch.Tensor | None = None
    losses: torch.Tensor | None = None
    sigma: float = 0.0
    batch: float = 1.0
    lr: float = 1.0


@dataclass(frozen=True)
class Bounds:
    """What one unit can change, after clipping.

    C [G]: the norm of its contribution in each group. extra: the Euclidean norm of its row of extra
    statistics (0 if the rule releases none), a second sum included. The bounds of T tasks are C [T, G] and extra [T].
    """

    C: torch.Tensor
    extra: float | torch.Tensor = 0.0


@dataclass(frozen=True)
class Released:
    """What `adapt` may look at: released values and public settings, nothing else.

    aggregate [d]: the released update D_t before the server optimiser (for a client rule that moves
    each step: the noised gradient times -eta). extra [J]: the released statistics, weighted like
    the aggregate and divided by the expected batch and the number of steps that released them. lr: eta_t;
    steps: N; round: t from 0; rounds: T. noise: standard deviation of the noise in one coordinate of the
    aggregate, in units of the largest possible signal eta_t N C; public, since sigma, q and n_k are.
    asked: how many of the steps released statistics; where it is 0, extra is zero and says nothing.
    """

    aggregate: torch.Tensor
    extra: torch.Tensor
    lr: float
    steps: float
    round: int
    rounds: int
    noise: float = 0.0
    asked: float = 1.0


# --- the round ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assignment:
    """What one client is asked to do in a round. All of it is public."""

    client: int
    rate: float
    """Poisson rate q."""
    sigma: float
    """Noise multiplier."""
    steps: int
    """N local steps."""
    lr: float
    """eta_t, the local learning rate of this round."""
    statistics_interval: int = 1
    """A paid rule's statistics go out with every so-manieth local step, counted over all rounds."""
    noise_parties: int = 1
    """Parties that make up one dose of noise: each adds 1/shares of its variance. The events are then those of the sum
    over all of them, and a single update is not private by itself."""

    def asks_statistics(self, round: int, step: int) -> bool:
        """Whether this step of a round (both from 0) releases the rule's statistics beside the gradient."""
        return (round * self.steps + step) % self.statistics_interval == 0

    def asked(self, round: int) -> int:
        """How many of the round's steps release the rule's statistics."""
        first, end = round * self.steps, (round + 1) * self.steps
        return -(-end // self.statistics_interval) + (-first // self.statistics_interval)


@dataclass(frozen=True)
class RoundRequest:
    """A round as an engine gets it: the model, who takes part, and each one's clipping state."""

    round: int
    rounds: int
    params: torch.Tensor
    assignments: tuple[Assignment, ...]
    states: tuple[RuleState, ...]
    weight_decay: float = 0.0


@dataclass(frozen=True)
class ClientReply:
    """What leaves a client: its update, the extra statistics, and the events that made them.

    delta [d] = theta_k - theta_t. extra [J], per expected unit and step. events are in the order of
    release. state is the client's clipping state after the round. diagnostics are NOT private: they
    exist in simulations only and no party sends them.
    """

    client: int
    delta: torch.Tensor
    extra: torch.Tensor
    events: tuple[Event, ...]
    state: RuleState
    diagnostics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundResult:
    """One finished round, as the user sees it.

    round counts from 1. params [d] is the released model after the server optimiser; averaged [d]
    the exponential moving average of it (the same tensor where averaging is off). C is a list of
    the clipping norm in use in this round (one a group; for client rules the mean over the
    participants). epsilon is the largest spent by any party so far, epsilons each party's (empty where
    there are more than 1000: ask the ledger). Without a ledger epsilon is NaN and epsilons is empty.
    metrics are on public test data, by name; empty in rounds without evaluation. party_metrics are those on
    each party's test records, by its name; empty where test records name no party. participants is None
    where who took part is secret (unit client); out_of_budget then names the parties that neither took
    part nor paid, because their budget is spent.
    """

    round: int
    rounds: int
    params: torch.Tensor
    averaged: torch.Tensor
    C: tuple[float, ...]
    epsilon: float
    epsilons: tuple[float, ...]
    participants: tuple[int, ...] | None
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    party_metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    out_of_budget: tuple[int, ...] = ()

    @property
    def mean_over_parties(self) -> dict[str, float]:
        """Each metric's mean over the parties, each counting the same; empty where test records name no party."""
        return mean_over_parties(self.party_metrics)

    @property
    def accuracy(self) -> float | None:
        """The metric of that name; None in rounds without evaluation, and for tasks that have no accuracy."""
        return self.metrics.get("accuracy")

    @property
    def loss(self) -> float | None:
        """The mean loss; None in rounds without evaluation."""
        return self.metrics.get("loss")


def mean_over_parties(parties: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over the parties that have a value of it, each counting the same; NaN where none has one.

    parties: metrics of each party by its name.
    """
    found: dict[str, float] = {}
    for name in next(iter(parties.values()), {}):
        values = [metrics[name] for metrics in parties.values() if not math.isnan(metrics[name])]
        found[name] = sum(values) / len(values) if values else math.nan
    return found
