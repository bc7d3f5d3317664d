"""The theory's quantities on a real federation: the objective at a round, PL and smoothness along the run.

All of them look at gradients in the clear, so the records must be public (named public sources, or data.public = true).
The run is trained again from its settings, which repeats a seeded run bit for bit, and stops at the rounds asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.analysis.theory.objective import LossOfWeights, PrivateRound
from fulcrum.analysis.theory.readings import Batch
from fulcrum.data.records import select_rows
from fulcrum.errors import ConfigError
from fulcrum.models.layout import call_with_parameters
from fulcrum.training.federation import Federation
from fulcrum.training.loop import federate
from fulcrum.training.server import compute_client_weights
from fulcrum.training.snapshot import Snapshot, make_first_snapshot

MAX_GRADIENT_ENTRIES = 60_000_000
"""Gradients of the units are held as one matrix: more entries than this, and a part of the units stands for all."""


@dataclass(frozen=True)
class Moment:
    """The federation after `round` rounds, as one private round sees it.

    step: what the next round does. loss: mean loss of the records used, of weights [r, d]. batch: their losses and
    norms. C: where the run's rule puts C for the next round. used, units: how many units stand for how many.
    """

    round: int
    step: PrivateRound
    loss: LossOfWeights
    batch: Batch
    C: float
    used: int
    units: int


def refuse_private_records(federation: Federation) -> None:
    """ConfigError where records are private, or a round is not one that the theory describes."""
    if not federation.problem.dataset.public:
        raise ConfigError(
            "fulcrum theory looks at gradients in the clear, which nothing pays for: use a public source, or set "
            "data.public = true if everybody may see the data."
        )
    if federation.plan.central is not None or federation.problem.unit != "example":
        raise ConfigError('fulcrum theory describes privacy.unit = "example"; set it.')


def replay(federation: Federation, rounds: Sequence[int]) -> Iterator[Snapshot]:
    """Train the federation again and yield its state after each of the rounds (0: before the first), in order."""
    wanted = sorted(set(rounds))
    if wanted and wanted[0] == 0:
        yield make_first_snapshot(federation)
        wanted = wanted[1:]
    if not wanted:
        return
    for result, snapshot in federate(federation):
        if result.round in wanted:
            yield snapshot
        if result.round >= wanted[-1]:
            return


def spread_rounds(rounds: int, count: int) -> list[int]:
    """`count` rounds from 0 to the last but one, closer together at the start, where training moves fastest."""
    last = max(rounds - 1, 0)
    return sorted({round(last * (i / max(count - 1, 1)) ** 2) for i in range(count)})


def look(federation: Federation, snapshot: Snapshot, seed: int = 0) -> Moment:
    """One private round from a snapshot: the units' gradients, weights, rates, noise, and a loss."""
    problem, plan, settings = federation.problem, federation.plan, federation.settings
    records, layout = problem.dataset.records, problem.layout
    total = int(plan.sizes.sum())
    share = min(1.0, MAX_GRADIENT_ENTRIES / (total * layout.dim))
    generator = torch.Generator().manual_seed(seed)
    client_weights = compute_client_weights([float(n) for n in plan.sizes], settings.train.weights).double()
    rows, weights, rates = [], [], []
    for k in range(plan.parties):
        index = problem.partition.indices(k)
        kept = max(1, round(share * len(index)))
        chosen = index[torch.randperm(len(index), generator=generator)[:kept]] if kept < len(index) else index
        rate = float(plan.rates[k])
        rows.append(chosen)
        weights.append(torch.full((len(chosen),), float(client_weights[k]) / (rate * len(chosen)), dtype=torch.float64))
        rates.append(torch.full((len(chosen),), rate, dtype=torch.float64))
    used = torch.cat(rows)
    x, y = select_rows(records.x, used), records.y[used]
    params = snapshot.params.detach()
    tape = problem.gradient_recorder(params, x, y)
    gradients = tape.matrix().double()
    losses = tape.losses.double()
    noise = plan.compute_noise_to_signal(layout.dim).direction
    C = float(torch.linalg.vector_norm(snapshot.rule["C"])) if "C" in snapshot.rule else settings.clip.C0
    step = PrivateRound(params.double(), gradients, torch.cat(weights), torch.cat(rates), noise, settings.train.lr)
    batch = Batch(losses, torch.linalg.vector_norm(gradients, dim=1), settings.train.lr)
    return Moment(snapshot.round, step, make_loss(federation, used), batch, C, len(used), total)


def make_loss(federation: Federation, rows: Tensor) -> LossOfWeights:
    """The mean loss of records as a function of weights [r, d], in the model's own precision, differentiable."""
    problem = federation.problem
    x, y = select_rows(problem.dataset.records.x, rows), problem.dataset.records.y[rows]

    def one(theta: Tensor) -> Tensor:
        outputs = call_with_parameters(problem.model, problem.layout.unflatten(theta), x)
        return problem.task.loss(outputs, y).mean()

    def losses(theta: Tensor) -> Tensor:
        return torch.stack([one(row.to(torch.float32)) for row in theta]).double()

    return losses


# --- PL and smoothness ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """Estimates at one round. loss: L. gradient: |grad L|. pl: |grad L|^2 / (2 (L - best)), an upper bound on mu.

    smoothness: largest eigenvalue of the Hessian by power iteration, a lower bound on M. lowest: the smallest
    eigenvalue, by power iteration on the shifted Hessian; below 0 the loss is not convex here.
    """

    round: int
    loss: float
    gradient: float
    pl: float
    smoothness: float
    lowest: float


def estimate_constants(moment: Moment, best: float, iterations: int = 20, seed: int = 0) -> Constants:
    """PL and smoothness at a moment. best: the least loss known (0 is valid for losses that are not negative)."""
    theta = moment.step.theta.clone().requires_grad_()
    value = moment.loss(theta[None])[0]
    (gradient,) = torch.autograd.grad(value, theta, create_graph=True)
    size = float(gradient.detach().square().sum())

    def times_hessian(v: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(gradient, theta, v, retain_graph=True)
        return found.detach()

    top = _find_eigenvalue(times_hessian, theta.detach(), iterations, seed)
    shifted = _find_eigenvalue(lambda v: times_hessian(v) - abs(top) * v, theta.detach(), iterations, seed + 1)
    gap = max(float(value.detach()) - best, 1e-12)
    return Constants(
        moment.round, float(value.detach()), math.sqrt(size), size / (2 * gap), abs(top), shifted + abs(top)
    )


def _find_eigenvalue(times: Callable[[Tensor], Tensor], like: Tensor, iterations: int, seed: int) -> float:
    """The eigenvalue of largest size of a symmetric map, by power iteration."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    value = 0.0
    for _ in range(iterations):
        v = v / torch.linalg.vector_norm(v).clamp_min(1e-300)
        found = times(v)
        value = float(v @ found)
        v = found
    return value
