"""A client's local training.

One local step: draw a Poisson sample, compute the gradient of each unit, clip, sum, add noise, divide by the
EXPECTED batch size, step. An empty sample also gets noise and a step. A non-finite gradient counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import torch

from fulcrum.clipping.rule import gradient_multiplier
from fulcrum.data import poisson_sample_units
from fulcrum.data.records import ModelInputs, move_inputs_to_device, select_rows
from fulcrum.gradients import GradientRecorder
from fulcrum.gradients.precision import use_matmul_precision
from fulcrum.models.prepared import add_example_keys, draws_keys
from fulcrum.privacy.events import Event
from fulcrum.privacy.mechanism import compute_charged_scale, release_with_noise
from fulcrum.privacy.pairwise.integers import round_to_message
from fulcrum.rng import StreamKey, name_stream
from fulcrum.training.clipped_sum import Contribution, compute_contribution
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import Assignment, ClientReply, Released, RoundRequest, RuleState, View


def train_client(
    problem: TrainingProblem, request: RoundRequest, task: Assignment, state: RuleState, work: StepFn | None = None
) -> ClientReply:
    """Run one client's N local steps and return its reply: the update and its privacy events.

    `work` clips and sums the gradients of a sample. Default: `make_materialised_step`, which stores all gradients.
    """
    work = work or make_materialised_step(problem.make_recorder())
    if task.message is not None:  # one step, masked: the update itself is the server's to make
        return release_held_sum(problem, hold_sum(problem, request, task, state, work), task)
    steps = run_local_steps(problem, request, task, state)
    answer: list[Contribution] = []
    while True:
        try:
            asked = steps.send(answer) if answer else next(steps)
        except StopIteration as end:
            reply: ClientReply = end.value
            return reply
        with use_matmul_precision(problem.precision, problem.device):
            answer = [work(problem, asked.sample, asked.view, asked.state, asked.terms)]


@dataclass(frozen=True)
class StepRequest:
    """What a local step asks for: the clipped sum of a sample, by the rule in this state, before noise."""

    sample: StepSample
    view: View
    state: RuleState
    terms: LocalStepTerms


def run_local_steps(
    problem: TrainingProblem, request: RoundRequest, task: Assignment, state: RuleState
) -> Generator[StepRequest, list[Contribution], ClientReply]:
    """One client's N local steps, which ask for each clipped sum and get it by `send`: clients may go side by side.

    It comes in a list of one, which is emptied, so that nobody holds the sum's memory while noise is added.
    """
    party = problem.party(task.client)
    theta = request.params
    batch = task.rate * party.units
    extras: list[torch.Tensor] = []
    events: list[Event] = []
    seen: list[dict[str, float]] = []

    for step in range(task.steps):
        key = name_stream("sample", request.round, task.client, step, attempt=request.attempt)
        rows, slots, count = poisson_sample_units(problem.randomness, key, party, task.rate)
        view = problem.rule.view(state, request.round, request.rounds)
        terms = LocalStepTerms(task.sigma, batch, task.lr)
        asked = task.asks_statistics(request.round, step)
        probes = view.probes if asked else None
        sample = StepSample(theta, rows, slots, count, _draw_mask_seed(problem, key), probes)
        answer = yield StepRequest(sample, view, state, terms)
        given = answer.pop()
        state = given.state

        scale = compute_charged_scale(
            problem.rule, given.bounds, task.rate, task.sigma, batch, asked, task.noise_parties
        )
        noisy, noisy_extra = release_with_noise(given.sum, given.extra, scale, problem.randomness, key[1:], True)
        given = replace(given, sum=given.sum.new_empty(0))  # a large model's memory
        # In place where values were made for this step: a large model's weights are seldom read and written.
        gradient = view.restore_gradient(noisy, batch)  # [d]
        if request.weight_decay:
            gradient.add_(request.weight_decay * theta)
        change = gradient.mul_(-task.lr)
        theta = theta + change if problem.rule.when == "step" else change.add_(theta)

        events.append(scale.event)
        extras.append(noisy_extra / batch)
        if problem.rule.when == "step":
            noise = gradient_multiplier(problem.rule.share, task.sigma, batch) / batch
            public = (task.lr, 1, request.round, request.rounds, noise, float(asked))
            state = problem.rule.adapt(state, Released(change, extras[-1], *public))
        if problem.diagnostics:
            seen.append(_collect_diagnostics(given))

    return ClientReply(
        client=task.client,
        delta=theta - request.params if theta is request.params else theta.sub_(request.params),
        extra=torch.stack(extras).sum(dim=0) / max(1, task.asked(request.round)),
        events=tuple(events),
        state=state,
        diagnostics={name: sum(s[name] for s in seen) / len(seen) for name in (seen[0] if seen else ())},
    )


@dataclass(frozen=True)
class HeldSum:
    """A party's clipped sum of one step that is not noised yet: it waits until the round's set is fixed. Private.

    place: (round, client, step) and the attempt, which name the noise's stream. batch: the expected batch size.
    """

    given: Contribution
    place: StreamKey
    batch: float


def hold_sum(
    problem: TrainingProblem, request: RoundRequest, task: Assignment, state: RuleState, work: StepFn
) -> HeldSum:
    """Sample, clip and sum the one step of a round with pairwise masks; nothing is released."""
    party = problem.party(task.client)
    batch = task.rate * party.units
    key = name_stream("sample", request.round, task.client, 0, attempt=request.attempt)
    rows, slots, count = poisson_sample_units(problem.randomness, key, party, task.rate)
    view = problem.rule.view(state, request.round, request.rounds)
    sample = StepSample(request.params, rows, slots, count, _draw_mask_seed(problem, key))
    with use_matmul_precision(problem.precision, problem.device):
        given = work(problem, sample, view, state, LocalStepTerms(task.sigma, batch, task.lr))
    return HeldSum(given, key[1:], batch)


def release_held_sum(problem: TrainingProblem, held: HeldSum, task: Assignment) -> ClientReply:
    """The party's integers, before masks. task: with the message's terms and this party's share of the noise."""
    assert task.message is not None
    given = held.given
    scale = compute_charged_scale(
        problem.rule, given.bounds, task.rate, task.sigma, held.batch, shares=task.noise_parties
    )
    message = round_to_message(given.sum, float(scale.sum), task.message, (problem.randomness, held.place))
    diagnostics = _collect_diagnostics(given) if problem.diagnostics else {}
    extra = given.extra.float()
    return ClientReply(task.client, message, extra, (scale.event,), given.state, diagnostics, task.message.grid)


def _draw_mask_seed(problem: TrainingProblem, key: StreamKey) -> int | None:
    """A step's seed for random layers, 64 bits from the run's private streams; None where the model has none."""
    if not draws_keys(problem.model):
        return None
    high, low = (problem.randomness.uniform(("dropout", *key[1:]), 2) * 2**32).long().tolist()
    return int((high << 32) | low) - 2**63


@dataclass(frozen=True)
class StepSample:
    """A step's sample, at weights theta [d]. rows [b] of the data set; slots [b]: unit (0..count-1) of each row.

    mask_seed: from which random layers (dropout) make the key of each record; None where the model has none. probes
    [P, d]: weights, less theta, at which the rule wants the units' losses; None in steps without them.
    """

    theta: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    count: int
    mask_seed: int | None = None
    probes: torch.Tensor | None = None

    def records(self, problem: TrainingProblem) -> tuple[ModelInputs, torch.Tensor]:
        """The sampled records: inputs x [b, ...] (a dict where the model has several inputs) and targets y [b, ...]."""
        records = problem.dataset.records
        x = move_inputs_to_device(select_rows(records.x, self.rows), problem.device)
        if self.mask_seed is not None:
            x = add_example_keys(x, self.mask_seed, self.rows)
        return x, records.y[self.rows].to(problem.device)


@dataclass(frozen=True)
class LocalStepTerms:
    """A step's public numbers: noise multiplier, expected batch size, learning rate."""

    sigma: float
    batch: float
    lr: float


StepFn = Callable[[TrainingProblem, StepSample, View, RuleState, LocalStepTerms], "Contribution"]
"""(problem, sample, rule's view, rule's state, step's terms) -> the clipped sum before noise."""


def make_materialised_step(follow: GradientRecorder) -> StepFn:
    """The straightforward step: it stores every unit's gradient, [B, d]."""

    def work(
        problem: TrainingProblem, sample: StepSample, view: View, state: RuleState, terms: LocalStepTerms
    ) -> Contribution:
        gradients, losses = compute_unit_gradients(problem, follow, sample)
        return compute_contribution(
            problem.rule,
            view,
            state,
            gradients,
            losses,
            problem.coordinates,
            terms.sigma,
            terms.batch,
            lr=terms.lr,
            proven=problem.proven,
            probes=compute_probe_losses(problem, follow, sample),
        )

    return work


def compute_probe_losses(problem: TrainingProblem, follow: GradientRecorder, sample: StepSample) -> torch.Tensor | None:
    """Loss of each sampled unit at the step's weights plus each probe: [count, P]; None where none are wanted.

    A person's loss is the mean of those of the person's records. A loss may be no finite number: the rule limits what
    it adds up.
    """
    if sample.probes is None:
        return None
    if not sample.count:
        return sample.theta.new_zeros((0, len(sample.probes)))
    x, y = sample.records(problem)
    pieces = follow.split(sample.theta, x, y)
    found = []
    for probe in sample.probes:
        weights = sample.theta + probe.to(sample.theta)
        found.append(torch.cat([follow.record_piece(weights, x, y, piece).losses for piece in pieces]))
    losses = torch.stack(found, dim=1)  # [b, P]
    if problem.unit == "example":
        return losses
    slots = sample.slots.to(problem.device)
    return add_by_unit(losses, slots, sample.count) / torch.bincount(slots, minlength=sample.count)[:, None]


def compute_unit_gradients(
    problem: TrainingProblem, follow: GradientRecorder, sample: StepSample
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient [B, d] and loss [B] of each sampled unit.

    For unit `person` the gradient is the mean over the person's records, so every person has the same weight.
    """
    tape = follow(sample.theta, *sample.records(problem))
    gradients, losses = tape.matrix(), tape.losses
    if problem.unit == "example":
        return gradients, losses
    slots, count = sample.slots.to(problem.device), sample.count
    records = torch.bincount(slots, minlength=count).to(losses)  # [B]
    return add_by_unit(gradients, slots, count) / records[:, None], add_by_unit(losses, slots, count) / records


def add_by_unit(values: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
    """Sums of the rows [b, ...] of each unit (slots [b], 0..count-1): [count, ...], each in the order of its rows.

    A unit's sum must not depend on the other units, not even in its last bits. `index_add_` of a GPU adds up in any
    order, so there each unit's first rows are added together, then its second ones, and so on.
    """
    total = values.new_zeros((count, *values.shape[1:]))
    if values.device.type == "cpu" or not len(values):
        return total.index_add_(0, slots, values)
    order = torch.argsort(slots, stable=True)
    sizes = torch.bincount(slots, minlength=count)
    first = sizes.cumsum(0) - sizes
    rank = torch.arange(len(slots), device=slots.device) - first[slots[order]]
    for r in range(int(sizes.max())):
        rows = order[rank == r]
        total[slots[rows]] += values[rows]  # at most one row of each unit
    return total


def _collect_diagnostics(given: Contribution) -> dict[str, float]:
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
