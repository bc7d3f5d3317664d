"""The records that travel through Fulcrum. All are frozen; tensors in them are never written to.

Shapes: d parameters of the model, B examples of a batch, G groups of parameters that are clipped
separately (1 for flat clipping), J extra statistics that a rule releases beside the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch

from fulcrum.privacy.events import Event

RuleState = Mapping[str, torch.Tensor]
"""A rule's state: named tensors, so that it can be checkpointed and stacked. Holds at least the
clipping norms `C`, shape [G]."""


# --- how values show themselves -----------------------------------------------------------------

LONGEST_REPR, LONGEST_PART = 400, 60


def make_short_repr(value: Any) -> str:
    """The repr of a frozen dataclass in a line or two: tensors by their shapes, never by their values, which may be
    private; parts by their type; fields at their default and functions left out."""
    parts = []
    for each in fields(value):
        own = getattr(value, each.name)
        plain = each.default is not MISSING and (own is None or isinstance(own, bool | int | float | str | tuple))
        if each.repr and not (plain and type(own) is type(each.default) and own == each.default):
            shown = _shorten(own)
            parts += [f"{each.name}={shown}"] if shown else []
    text = f"{type(value).__name__}({', '.join(parts)})"
    return text if len(text) <= LONGEST_REPR else f"{text[: LONGEST_REPR - 5]}, ...)"


def _shorten(value: Any) -> str:
    """A part of a repr; "" for what is left out: functions, and empty tuples and mappings."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"<{'x'.join(map(str, value.shape)) or 'one number'}>"
    if isinstance(value, bool | int | float | str) or value is None:
        text = repr(value)
    elif isinstance(value, tuple | list | Mapping):
        simple = all(isinstance(part, bool | int | float | str) for part in [*value, *getattr(value, "values", list)()])
        text = repr(value) if simple else ""
        text = text if text and len(text) <= LONGEST_PART else f"<{len(value)} values>"
        return text if len(value) else ""
    else:
        return "" if callable(value) and not isinstance(value, torch.nn.Module) else f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST_PART else f"{text[: LONGEST_PART - 4]}...{text[-1]}"


# --- clipping: the inputs and outputs of a rule ---------------------------------------------


@dataclass(frozen=True)
class Transform:
    """An orthonormal change of basis for clipping and noise, such as a wavelet transform.

    forward maps gradients [B, d] to coefficients [B, m] (m >= d where it pads); inverse maps a noised
    sum [m] back to [d]. groups [m] is the group of each coefficient. forward is linear.

    The other fields are optional faster paths. norms: gradients [B, d] -> group norms [B, G], without storing the
    coefficients. own: sums [T, G, d], one per group -> coefficients [T, m], each from its own group's sum. haar: number
    of levels, if the groups are the levels (coarse to fine) of the orthonormal Haar transform of each row, zero-padded
    at its end; an engine may then compute the norms itself. 0: not Haar.
    """

    forward: Callable[[torch.Tensor], torch.Tensor]
    inverse: Callable[[torch.Tensor], torch.Tensor]
    groups: torch.Tensor
    norms: Callable[[torch.Tensor], torch.Tensor] | None = None
    own: Callable[[torch.Tensor], torch.Tensor] | None = None
    haar: int = 0


@dataclass(frozen=True)
class Axes:
    """Released coordinates in which gradients are clipped and noised: (g - centre) / scale, both [d], scale above 0."""

    centre: torch.Tensor
    scale: torch.Tensor

    def forward(self, gradients: torch.Tensor) -> torch.Tensor:
        """Gradients [..., d] in these coordinates."""
        return (gradients - self.centre) / self.scale

    def inverse(self, mean: torch.Tensor) -> torch.Tensor:
        """A noised mean [..., d] of what `forward` gave, back in the model's coordinates."""
        return mean * self.scale + self.centre


@dataclass(frozen=True)
class View:
    """What a rule needs to know of each example.

    transform: another domain in which gradients are clipped and noised (None for almost all rules).
    direction: a released vector [d]; the rule then gets its inner product with each gradient.
    losses: whether the rule needs each example's loss.
    axes: released coordinates in which gradients are clipped and noised. Not with transform.
    probes: released vectors [P, d]; in steps that release statistics the rule gets each example's loss at the weights
    plus each of them.
    """

    __repr__ = make_short_repr

    transform: Transform | None = None
    direction: torch.Tensor | None = None
    losses: bool = False
    axes: Axes | None = None
    probes: torch.Tensor | None = None

    @property
    def needs_gradients(self) -> bool:
        """Whether gradients must be written out: norms and sums of them in the model's coordinates are not enough."""
        return self.transform is not None or self.axes is not None

    def restore_gradient(self, noisy: torch.Tensor, batch: float | torch.Tensor) -> torch.Tensor:
        """The noised sum [m] over an expected batch as a mean gradient [d]. `noisy` may be overwritten."""
        if self.transform is not None:
            return self.transform.inverse(noisy) / batch
        mean = noisy.div_(batch)
        return mean if self.axes is None else self.axes.inverse(mean)


@dataclass(frozen=True)
class SumMargin:
    """What the rounding of a sum is given of each unit's bound (`privacy.bounds.choose_sum_margin`).

    eta: relative reduction of the bound. spread K: a factor times A (`Stats.lengths`) is at most K times the bound.
    """

    eta: float = 0.0
    spread: float = math.inf


NO_MARGIN = SumMargin()


@dataclass(frozen=True)
class Stats:
    """The input of a rule: one row per unit (example, person or client). Never released.

    norms [B, G]; dots [B] or None; losses [B] or None; probes [B, P] or None, losses at other weights (`View.probes`;
    zeros in steps that release no statistics); mask [B] is False on padding.
    sigma: noise multiplier of this step. batch: its expected number of units. lr: its learning rate eta.

    The last three are no rule's business but that of `privacy.bounds`, which limits factors. norm_bounds [B, G],
    float64: at least the true norms, whatever the engine and its precision; None: the norms and what float32 may have
    rounded off. lengths [B, G], float64: A, what the norms would be if no products in a gradient cancelled; None: as
    norm_bounds. margin: what is set aside for the rounding of the sums.
    """

    __repr__ = make_short_repr

    norms: torch.Tensor
    mask: torch.Tensor
    dots: torch.Tensor | None = None
    losses: torch.Tensor | None = None
    probes: torch.Tensor | None = None
    sigma: float = 0.0
    batch: float = 1.0
    lr: float = 1.0
    norm_bounds: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    margin: SumMargin = NO_MARGIN


@dataclass(frozen=True)
class Bounds:
    """Bounds on one unit's contribution, after clipping.

    C [G]: the norm of the contribution in each group. extra: the Euclidean norm of its row of extra statistics,
    including a second sum (0 if the rule releases none). The bounds of T tasks are C [T, G] and extra [T].
    """

    C: torch.Tensor
    extra: float | torch.Tensor = 0.0


@dataclass(frozen=True)
class Released:
    """The input of `adapt`: released values and public settings, nothing else.

    aggregate [d]: the released update D_t before the server optimiser (for a client rule that adapts each
    step: the change of the weights in that step). extra [J]: the released statistics, weighted like the
    aggregate and divided by the expected batch size and the number of steps that released them. lr: learning rate
    eta_t. steps: number of local steps N. round: t, from 0. rounds: number of rounds T. noise: standard deviation of
    the noise in one coordinate of the aggregate, in units of the largest possible signal eta_t N C; public, since
    sigma, q and n_k are. asked: number of steps that released statistics; if 0, extra is zero and has no meaning. moved
    [d]: by how much the server changed the weights in this round; None where nobody but the caller's optimizer knows.
    """

    __repr__ = make_short_repr

    aggregate: torch.Tensor
    extra: torch.Tensor
    lr: float
    steps: float
    round: int
    rounds: int
    noise: float = 0.0
    asked: float = 1.0
    moved: torch.Tensor | None = None


# --- the round ------------------------------------------------------------------------------


@dataclass(frozen=True)
class MessageTerms:
    """How a party writes its clipped sum as a masked message (`privacy.pairwise.integers`); both numbers are public.

    weight: a_k, with which the sum enters the mean gradient: the party's weight over its expected batch. grid: g.
    """

    weight: float
    grid: float


@dataclass(frozen=True)
class Assignment:
    """One client's task in a round. All of it is public."""

    client: int
    rate: float
    """Poisson sampling rate q."""
    sigma: float
    """Noise multiplier."""
    steps: int
    """Number of local steps N."""
    lr: float
    """Local learning rate eta_t of this round."""
    statistics_interval: int = 1
    """n: every n-th local step, counted over all rounds, releases the rule's statistics."""
    noise_parties: float = 1
    """By how much less variance the party's own noise has than sigma asks for: it adds 1/noise_parties of it. Where it
    is not 1, the events are those of a sum over parties, and a single update is not private by itself."""
    message: MessageTerms | None = None
    """With pairwise masks: how the update is written as integers. None: as an update of its own."""

    def asks_statistics(self, round: int, step: int) -> bool:
        """Whether this step of a round (both from 0) releases the rule's statistics beside the gradient."""
        return (round * self.steps + step) % self.statistics_interval == 0

    def asked(self, round: int) -> int:
        """Number of steps of this round that release the rule's statistics."""
        first, end = round * self.steps, (round + 1) * self.steps
        return -(-end // self.statistics_interval) + (-first // self.statistics_interval)


@dataclass(frozen=True)
class RoundRequest:
    """A round, as input of an engine: the model, one assignment per participant, one clipping state per participant.

    attempt: 0, or the number of times that this round was released and paid before; its randomness is new each time.
    colluders: with pairwise masks, how many of the participants may collude. pay_again: with pairwise masks across
    machines, pays for another attempt after these clients may have sent a message in vain; returns who may go on.
    """

    __repr__ = make_short_repr

    round: int
    rounds: int
    params: torch.Tensor
    assignments: tuple[Assignment, ...]
    states: tuple[RuleState, ...]
    weight_decay: float = 0.0
    attempt: int = 0
    colluders: int = 0
    pay_again: Callable[[Sequence[int]], set[int]] | None = None


@dataclass(frozen=True)
class ClientReply:
    """What a client releases: its update, the extra statistics, and their privacy events.

    delta [d] = theta_k - theta_t; with pairwise masks the party's integers modulo 2^32 instead, int32 [d]. extra [J],
    per expected unit and step. events: in order of release.
    state: the client's clipping state after the round. diagnostics: NOT private; they exist in
    simulations only, and no party sends them. grid: what one unit of integers stands for; 0 where delta is an update.
    bits: how many low bits of each integer there are.
    """

    __repr__ = make_short_repr

    client: int
    delta: torch.Tensor
    extra: torch.Tensor
    events: tuple[Event, ...]
    state: RuleState
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    grid: float = 0.0
    bits: int = 32


@dataclass(frozen=True)
class ScoreFacts:
    """What a score means: the same metrics of the best constant prediction, and what was taken for what.

    baseline: metrics of predicting the more frequent class (for numbers the mean) for every scored record.
    party_baselines: the same on each party's records, by its name. confusion: counts [label][prediction], with several
    labels one row (TN, FP, FN, TP) per label; empty for numbers and tokens. party_confusion: of each party's records.
    threshold: where task.choose_threshold asks for one, its value, what it is best for, and how good it is on the
    records that it was chosen on. Of private records all of it follows from noised sums, so counts are not whole.
    """

    baseline: Mapping[str, float] = field(default_factory=dict)
    party_baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    confusion: Sequence[Sequence[float]] = ()
    party_confusion: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    threshold: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def mean_baseline(self) -> dict[str, float]:
        """Each metric's mean over the parties' baselines, with equal weights."""
        return mean_over_parties(self.party_baselines)


@dataclass(frozen=True)
class RoundResult:
    """One finished round, as the user sees it.

    round: counts from 1. params [d]: the released model after the server optimiser. averaged [d]: its exponential
    moving average (the same tensor where averaging is off). C: the clipping norms of this round, one per group (for
    client rules the mean over the participants). epsilon: the largest epsilon spent by any party so far. epsilons: one
    per party (empty for more than 1000 parties; the ledger has them). Without a ledger epsilon is NaN and epsilons is
    empty. metrics: by name, on public test data; empty in rounds without evaluation. party_metrics: by party name, on
    the party's test records; empty where test records name no party. participants: None where participation is secret
    (unit client); out_of_budget then lists the parties that neither took part nor paid, because their budget is spent.
    evaluation: how the metrics were made where the scored records are private; empty for public test data. facts: what
    the metrics mean: a baseline, the confusion. course: how the round went, from released values alone: lengths of the
    released update, of the noise expected in it and of the model's move, and what the rule saw (`ClipRule.course`).
    """

    __repr__ = make_short_repr

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
    evaluation: str = ""
    facts: ScoreFacts = field(default_factory=ScoreFacts)
    course: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean_over_parties(self) -> dict[str, float]:
        """Each metric's mean over the parties, with equal weights; empty where test records name no party."""
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
    """Each metric's mean over the parties that have a value, with equal weights; NaN where no party has one.

    parties: metrics by party name.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in parties.values() for name in metrics):
        known = (metrics.get(name, math.nan) for metrics in parties.values())
        values = [value for value in known if not math.isnan(value)]
        found[name] = sum(values) / len(values) if values else math.nan
    return found
