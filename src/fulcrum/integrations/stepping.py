"""One step of a private loop: clipped sums of the batch's pieces, one release, the change of the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fulcrum.clipping.rule import gradient_multiplier
from fulcrum.errors import BudgetError, ModelError, RunError
from fulcrum.gradients.ghost import GhostTape
from fulcrum.gradients.tape import EmptyTape, GradientTape
from fulcrum.gradients.units import join_units
from fulcrum.integrations.account import LoopAccount
from fulcrum.integrations.loader import DrawnSample
from fulcrum.integrations.terms import LoopTerms
from fulcrum.privacy.bounds import FAST_SUM_MARGIN
from fulcrum.privacy.mechanism import compute_charged_scale, release_with_noise
from fulcrum.rng import name_stream
from fulcrum.training.client import add_by_unit
from fulcrum.training.clipped_sum import clip_batch, compute_contribution
from fulcrum.training.problem import assign_coordinate_groups
from fulcrum.types import Bounds, Released, RuleState, Stats

Penalty = Callable[[nn.Module], Tensor]
"""model -> a number of its weights alone, added to the loss without noise."""


@dataclass(frozen=True)
class StepSum:
    """The clipped sum of the units of a sample that were back-propagated so far. Never released without noise.

    rows: number of their records. sum [m], extra [J], bounds: None before the first.
    """

    rows: int = 0
    sum: Tensor | None = None
    extra: Tensor | None = None
    bounds: Bounds | None = None


def add_pass(
    terms: LoopTerms,
    state: RuleState,
    step: int,
    sample: DrawnSample,
    before: StepSum,
    tape: GradientTape,
    count: int,
    precision: str,
) -> StepSum:
    """Adds the next `count` records of the sample, whose gradients are on the tape.

    RunError where they cannot be the sample's: more than it has, or a part of a person's.
    """
    stop = before.rows + count
    if stop > len(sample.rows):
        raise RunError(
            "more examples were back-propagated than this step's sample has; take batches from the private loader, "
            "call optimizer.step() after each of them, and leave no batch out."
        )
    units = sample.slots[before.rows : stop]
    if not terms.party.apart and count:
        if stop < len(sample.slots) and int(sample.slots[stop]) == int(units[-1]):
            raise RunError(
                "a person's records were divided between two backward() calls; pass the loader's batches as they come, "
                "in their order."
            )
        units = units - units[0]
        joined = join_persons(tape, units, int(units[-1]) + 1)
        found = clip_tape(terms, state, step, joined, precision)
    else:
        found = clip_tape(terms, state, step, tape, precision)
    if before.sum is None or before.extra is None:
        return replace(found, rows=stop)
    assert found.sum is not None
    assert found.extra is not None
    return StepSum(stop, before.sum + found.sum, before.extra + found.extra, found.bounds)


@dataclass(frozen=True)
class RowsTape:
    """A tape of given gradients [U, d]: units whose gradients had to be written out."""

    rows: Tensor
    losses: Tensor


def join_persons(tape: GradientTape, slots: Tensor, count: int) -> GradientTape | RowsTape:
    """The tape of persons from that of their records, the mean over each person's; slots [b]: the person of each."""
    slots = slots.to(tape.losses.device)
    if isinstance(tape, GhostTape):
        joined = join_units(tape, slots, count)
        if joined.is_finite:
            return joined
    numbers = torch.bincount(slots, minlength=count).to(tape.losses)
    return RowsTape(
        add_by_unit(tape.matrix(), slots, count) / numbers[:, None], add_by_unit(tape.losses, slots, count) / numbers
    )


def clip_tape(terms: LoopTerms, state: RuleState, step: int, tape: GradientTape | RowsTape, precision: str) -> StepSum:
    """The clipped sum of a tape; its rows are counted by the caller."""
    rule = terms.rule
    view = rule.view(state, step, terms.steps)
    sigma = terms.plan.assignment(0, step, 1.0).sigma
    if isinstance(tape, RowsTape) or view.needs_gradients:
        rows = tape.rows if isinstance(tape, RowsTape) else tape.matrix()
        where = assign_coordinate_groups(terms.layout, terms.groups).to(rows.device)
        given = compute_contribution(rule, view, state, rows, tape.losses, where, sigma, terms.batch)
        return StepSum(0, given.sum, given.extra, given.bounds)
    table, losses = tape.norm_table(terms.groups), tape.losses
    stats = Stats(
        norms=table.norms,
        norm_bounds=table.bounds,
        lengths=table.lengths,
        margin=FAST_SUM_MARGIN[precision],
        mask=torch.ones(len(losses), dtype=torch.bool, device=losses.device),
        dots=None if view.direction is None else tape.dots(view.direction),
        losses=losses if view.losses else None,
        sigma=sigma,
        batch=terms.batch,
    )

    def add_up(factors: Tensor) -> Tensor:
        return tape.weighted_sum(factors, terms.groups)

    factors, extra, bounds, _ = clip_batch(rule, stats, state, add_up)
    return StepSum(0, add_up(factors), extra, bounds)


@dataclass(frozen=True)
class StepRelease:
    """What a step released: the mean gradient [d] with noise, and the rule's update and next state."""

    gradient: Tensor
    update: Tensor
    state: RuleState


def release_step(
    terms: LoopTerms,
    account: LoopAccount,
    state: RuleState,
    step: int,
    attempt: int,
    done: StepSum,
    device: torch.device,
) -> StepRelease:
    """Pays for a step, then adds the noise. Nothing of it is seen by anybody before it is paid and noted."""
    if done.sum is None or done.extra is None or done.bounds is None:
        nothing = EmptyTape(torch.zeros(1, device=device).expand(terms.layout.dim))
        done = clip_tape(terms, state, step, nothing, "float32")
    assert done.sum is not None
    assert done.extra is not None
    assert done.bounds is not None
    task, rule = terms.plan.assignment(0, step, 1.0), terms.rule
    planned = account.reserve(step, attempt)
    asked = task.asks_statistics(step, 0)
    scale = compute_charged_scale(rule, done.bounds, task.rate, task.sigma, terms.batch, asked)
    if planned != (scale.event,):
        raise BudgetError(
            f"step {step + 1} would release {scale.event}, and {planned} was reserved: the loop stops here."
        )
    key = name_stream("sample", step, 0, 0, attempt=attempt)[1:]
    noisy, extra = release_with_noise(done.sum, done.extra, scale, account.randomness, key)
    digest = hashlib.blake2b(digest_size=16)
    for value in (noisy, extra):
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    account.settle(step, digest.hexdigest(), attempt)
    view = rule.view(state, step, terms.steps)
    gradient = view.restore_gradient(noisy, terms.batch)
    noise = gradient_multiplier(rule.share, task.sigma, terms.batch) / terms.batch
    released = Released(-gradient, extra / terms.batch, 1.0, 1.0, step, terms.steps, noise, float(asked))
    return StepRelease(gradient, rule.apply(state, released), rule.adapt(state, released))


# --- the optimizer --------------------------------------------------------------------------------


def refuse_other_gradients(terms: LoopTerms, model: nn.Module) -> None:
    """ModelError where a parameter has a gradient that did not come through the recorded passes: it has no noise."""
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if parameter.grad is not None and parameter.requires_grad and bool(parameter.grad.any()):
            raise ModelError(
                f"parameter {name!r} has a gradient without noise: something used it outside of the model's own "
                "forward pass in training mode; call the model itself, freeze what is not trained, and give a penalty "
                "on weights as penalty=."
            )


def drop_gradients(model: nn.Module) -> None:
    """No parameter has a gradient, so that an optimizer's step changes nothing."""
    for parameter in model.parameters():
        parameter.grad = None


def hand_to_optimizer(
    terms: LoopTerms,
    model: nn.Module,
    optimizer: Optimizer,
    first_lrs: list[float],
    released: StepRelease,
    penalty: Penalty | None,
    reduction: str,
) -> None:
    """Sets what the optimizer's own step needs, or takes the step where the optimizer would spoil its length.

    Where the rule owns the step (moo), SGD gets the gradient that makes its step the rule's: a schedule is then a
    factor, and momentum is an average with the same total. Any other optimizer rescales what it is given, so the step
    is taken here. Where the learning rate is the user's, the optimizer gets the private mean gradient (the sum, if the
    loop's loss is a sum), and does what it does.
    """
    named = dict(model.named_parameters())
    extra = _compute_penalty(named, terms, penalty, model)
    chosen = -released.update if terms.owns_step else released.gradient * (terms.batch if reduction == "sum" else 1.0)
    given = {id(named[name]): value for name, value in terms.layout.unflatten(chosen).items()}
    sgd = isinstance(optimizer, SGD)
    for group, first in zip(optimizer.param_groups, first_lrs, strict=True):
        lr, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
        for parameter in group["params"]:
            if id(parameter) not in given:
                continue
            value, more = given[id(parameter)].to(parameter.dtype), extra.get(id(parameter))
            if not terms.owns_step:
                parameter.grad = value.clone() if more is None else value + more
            elif sgd:
                slower = (1 - float(group["momentum"])) / (1 - float(group["dampening"])) if group["momentum"] else 1.0
                value = value * (slower / first)
                parameter.grad = value if more is None else value + more
            else:
                with torch.no_grad():
                    parameter.mul_(1 - lr * decay).sub_(value * (lr / first))
                    if more is not None:
                        parameter.sub_(more * lr)


def _compute_penalty(
    named: dict[str, nn.Parameter], terms: LoopTerms, penalty: Penalty | None, model: nn.Module
) -> dict[int, Tensor]:
    """The gradient of the penalty in each parameter, by the parameter's id."""
    if penalty is None:
        return {}
    own = [named[name] for name in terms.layout.names]
    with torch.enable_grad():
        value = penalty(model)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ModelError("penalty must give one number, a tensor, from the model's weights.")
        found = torch.autograd.grad(value.reshape(()), own, allow_unused=True)
    return {id(p): g for p, g in zip(own, found, strict=True) if g is not None}
