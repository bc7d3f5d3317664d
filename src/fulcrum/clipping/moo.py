"""Multi-objective clipping: gradient descent on L_model(C) + kappa C, from released updates only.

This module has two rules. `moo-c` adapts C only; `moo`, the default, also chooses the step length.
Both are functions of releases and public settings: they cost no privacy.

**moo-c.** One step ahead, raising log C changes the loss by minus the part of the clipped update along
the descent direction, plus a penalty. The server cannot see the true descent direction, but it has an estimate
that is already paid for: the moving average of the updates released so far. With v its unit vector and D_t
the released aggregate of round t,

    A_t = <v_{t-1}, D_t> / (eta N C_t)

is the fraction of a fully clipped step along that direction. While A_t > kappa C_t, a larger C
would have gone further in a good direction, so C grows. When the updates no longer
align with earlier ones (overshooting, or noise), C shrinks:

    C_{t+1} = clamp(C_t exp(eta_C phi(A_t - kappa C_t)), C_min, C_max),   phi = sign or identity.

The projection on one direction has noise sigma/(q n), without the factor sqrt(d) of |D_t|.

**moo.** In that rule C does two jobs: it sets the length of the step (eta C) and the trade between
bias and noise. `moo` learns them separately, because each has its own signal. Write u_t = D_t/(eta N C)
for the release in units of C: a mean of clipped gradients of norm at most 1, plus noise of known
standard deviation nu in each of d coordinates. The server applies theta <- theta + s_t u_t.

  1. At the first step length s_0, the accumulated noise of all T rounds moves the weights by `balance` times R,
     the norm of random initial weights: s_0 = balance R / (nu sqrt(d T)). A local step is at most `reach` R,
     since with little noise the curvature of the loss is the limit (a single layer is exempt, and tolerates
     three times the noise). After that, the alignment A_t adapts s, as it adapts C
     in moo-c; s never exceeds s_0 by more than the factor `growth`. Neither eta nor C0 affects s.
  2. The search looks for the C at which the signal |u_t|^2 - nu^2 d (an unbiased estimate, since nu is public)
     stops rising as C falls: above the gradients' norms a larger C only shrinks u_t, below them it changes
     only the bias. C is divided by 3 while that helps or while there is no signal; then it is multiplied by 3
     until that hurts. A C that is too small costs little, since the noise is also in units of C. Where
     the noise hides the effect of C, C does not rise; where no round can show it, C does not fall to C_min.
  3. eta N C never exceeds s, so that several local steps do not move further than the server.

docs/moo.md has the derivation and the measurements.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch

from fulcrum.clipping.fixed import bound_C, clip_to_C, equal_shares, plain_view
from fulcrum.clipping.rule import ClipRule, ModelFacts
from fulcrum.settings.schema import Clip
from fulcrum.types import Released, RuleState

ALIGNMENT_FUNCTIONS = ("sign", "identity")
"""Allowed values of clip.phi, which maps the alignment to a step."""
MAX_LOG_STEP = 0.3
"""phi = identity changes log C by at most this per round."""


def init_moo_c(settings: Clip, shape: ModelFacts) -> RuleState:
    """C0 split over the groups, an empty memory, and the settings the update needs."""
    return {
        "C": equal_shares(settings.C0, shape.count),
        "memory": torch.zeros(shape.dim),
        "kappa": torch.tensor(settings.kappa),
        "eta_C": torch.tensor(settings.eta_C),
        "beta": torch.tensor(settings.beta),
        "sign": torch.tensor(settings.phi == ALIGNMENT_FUNCTIONS[0]),
        "C_min": torch.tensor(settings.C_min),
        "C_max": torch.tensor(settings.C_max),
    }


def compute_alignment(state: RuleState, released: Released) -> torch.Tensor:
    """Alignment A_t: the fraction of a fully clipped step along the remembered direction. 0 with no memory."""
    total = torch.linalg.vector_norm(state["C"])
    memory = state["memory"]
    length = torch.linalg.vector_norm(memory)
    along = torch.dot(memory, released.aggregate) / length.clamp_min(1e-30)
    return torch.where(length > 0, along / (released.lr * released.steps * total), 0.0)


def compute_log_step(state: RuleState, seen: torch.Tensor) -> torch.Tensor:
    """Change of log C (moo-c) or log s (moo) for this A_t: eta_C phi(A_t - kappa C_t).

    0 with no memory.
    """
    gain = seen - state["kappa"] * torch.linalg.vector_norm(state["C"])
    step = torch.where(
        state["sign"],
        state["eta_C"] * torch.sign(gain),
        (state["eta_C"] * gain).clamp(-MAX_LOG_STEP, MAX_LOG_STEP),
    )
    return torch.where(state["memory"].any(), step, torch.zeros_like(step))


def describe_objective(state: RuleState, released: Released) -> dict[str, torch.Tensor]:
    """The two parts of the objective's slope: alignment A_t, for a larger C, and the penalty kappa C_t against it."""
    penalty = state["kappa"] * torch.linalg.vector_norm(state["C"])
    return {"alignment": compute_alignment(state, released), "penalty": penalty}


def adapt_moo_c(state: RuleState, released: Released) -> RuleState:
    """Move C along the alignment, then remember this round's release."""
    total = torch.linalg.vector_norm(state["C"])
    step = compute_log_step(state, compute_alignment(state, released))
    moved = torch.clamp(total * torch.exp(step), state["C_min"], state["C_max"])
    memory = state["beta"] * state["memory"] + (1 - state["beta"]) * released.aggregate
    return {**state, "C": state["C"] * (moved / total), "memory": memory}


MOO_C = ClipRule(
    name="moo-c",
    init=init_moo_c,
    view=plain_view,
    clip=clip_to_C,
    bounds=bound_C,
    adapt=adapt_moo_c,
    course=describe_objective,
    summary="C learned from the alignment of released updates; the learning rate stays yours",
    reference="Ranaweera et al.; sound form of this project",
)


# --- moo: step length and C apart ---------------------------------------------------------------

SINGLE_LAYER_NOISE_FACTOR = 3.0
"""Factor on `balance` for a model of one layer, which tolerates more noise."""
LONG_RUN_ROUNDS = 200
"""Runs of at least this many rounds can recover from first rounds that overshoot."""
WHITENED_NOISE_FACTOR = 0.5
"""Factor on `balance` for a network in whitened coordinates: noise also affects the directions in which features
hardly vary, and the same loss needs a shorter path."""
C_SEARCH_FACTOR = 3.0
"""Factor by which C falls or rises per round of the search."""
SIGNAL_CHANGE_RATIO = 1.5
"""A squared signal this many times the last one counts as a change."""
MIN_SIGNAL_DEVIATIONS = 3.0
"""A signal below this many standard deviations of the estimate counts as no signal."""
CLEAR_SIGNAL_RATIO = 2.0
"""C may rise on a comparison of two rounds only if the signal is this many times the signal threshold. At 6 standard
deviations, equal signals differ by `SIGNAL_CHANGE_RATIO` in one of twenty comparisons; at 3, in one of five."""
MAX_CLEAR_THRESHOLD = 0.2
"""If the threshold for a clear signal exceeds this (the maximum signal is 1), no round is informative about C."""
HIDDEN_SIGNAL_C_MIN_FACTOR = 10.0
"""In that case C stops at this many times C_min: below, well-classified examples weigh as much as others."""
SEARCH_DOWN, SEARCH_DONE, SEARCH_UP = -1, 0, 1
Number = TypeVar("Number", float, torch.Tensor)


def compute_signal_threshold(variance: Number, dim: int) -> Number:
    """Smallest detectable signal, where each of dim coordinates has noise of this variance."""
    root: float = (2 * dim) ** 0.5
    return MIN_SIGNAL_DEVIATIONS * variance * root


def compute_lowest_C(settings: Clip, shape: ModelFacts) -> float:
    """Lower limit of the search for C: C_min, or more where only noise would move C there."""
    if CLEAR_SIGNAL_RATIO * compute_signal_threshold(shape.noise**2, shape.dim) <= MAX_CLEAR_THRESHOLD:
        return settings.C_min
    return max(settings.C_min, min(HIDDEN_SIGNAL_C_MIN_FACTOR * settings.C_min, settings.C0))


def compute_max_first_step(settings: Clip, shape: ModelFacts) -> float:
    """The longest first step of a model of several layers, in units of R.

    With one step per round, all parties' first gradients point the same way. Pretrained weights are larger than random
    ones, so that a step changes the network's outputs more: the limit is then lower, unless the server's
    momentum already shortens the first steps. N local steps go N times as far in a run that is long enough to recover
    from first rounds that overshot; a shorter run starts with a lower limit.
    """
    one = min(1.0, 1 / (shape.larger * shape.first))
    several = shape.steps * min(1.0, (shape.rounds / LONG_RUN_ROUNDS) ** 0.5) if shape.steps > 1 else 0.0
    return settings.reach * max(one, several)


def init_balanced_moo(settings: Clip, shape: ModelFacts) -> RuleState:
    """The first step length from public facts, and C0 limited to it."""
    full = shape.lr * shape.steps
    spread = shape.noise * (shape.dim * shape.rounds) ** 0.5
    # Without noise only the user's settings limit the step.
    step = full * settings.C0
    if spread > 0:
        deep = shape.depth > 1  # the loss of a single layer is convex, and no other layer amplifies its noise
        balance = settings.balance * (
            SINGLE_LAYER_NOISE_FACTOR if not deep else WHITENED_NOISE_FACTOR if shape.mixed else 1.0
        )
        step = shape.start * min(balance / spread, compute_max_first_step(settings, shape) if deep else math.inf)
    step = settings.step or step
    limit = settings.C0 if not settings.search else min(settings.C0, step / full)
    C = min(max(limit, settings.C_min), settings.C_max)
    return {
        **init_moo_c(settings, shape),
        "C": equal_shares(C, shape.count),
        "C_min": torch.tensor(compute_lowest_C(settings, shape) if settings.search else settings.C_min),
        "wish": torch.tensor(settings.C0),
        "step": torch.tensor(step),
        "longest": torch.tensor(step * settings.growth),
        "lr": torch.tensor(shape.lr),
        "phase": torch.tensor(SEARCH_DOWN if settings.search else SEARCH_DONE),
        "search": torch.tensor(settings.search),
        "signal": torch.tensor(0.0),
    }


def apply_balanced_moo(state: RuleState, released: Released) -> torch.Tensor:
    """The release at length s: s u_t, times the learning-rate schedule's current factor."""
    reach = state["lr"] * released.steps * torch.linalg.vector_norm(state["C"])
    return torch.mul(released.aggregate, state["step"] / reach)


def estimate_signal(state: RuleState, released: Released) -> tuple[torch.Tensor, torch.Tensor]:
    """(|u_t|^2 minus its noise, the smallest detectable signal)."""
    in_C = released.aggregate / (released.lr * released.steps * torch.linalg.vector_norm(state["C"]))
    variance = torch.as_tensor(released.noise) ** 2
    dim = released.aggregate.numel()
    return in_C.square().sum() - variance * dim, compute_signal_threshold(variance, dim)


def advance_C_search(state: RuleState, released: Released) -> RuleState:
    """One round of the search for C: the target C, the phase, and the signal to compare with."""
    now, floor = estimate_signal(state, released)
    last, phase = state["signal"], state["phase"]
    shows = now >= floor
    down_on = (phase == SEARCH_DOWN) & ((last == 0) | ~shows | (now > SIGNAL_CHANGE_RATIO * last))
    level = (phase == SEARCH_DOWN) & ~down_on
    # Only return to a C whose own signal was clear; otherwise the smaller C is safer.
    turn = level & (last >= CLEAR_SIGNAL_RATIO * floor)
    rest = level & ~turn
    up_on = (phase == SEARCH_UP) & shows & (now >= last / SIGNAL_CHANGE_RATIO)
    stop = (phase == SEARCH_UP) & ~up_on
    fall = down_on | rest | stop
    factor = torch.where(
        fall, 1 / C_SEARCH_FACTOR, torch.where(turn, C_SEARCH_FACTOR**2, torch.where(up_on, C_SEARCH_FACTOR, 1.0))
    )
    used = torch.linalg.vector_norm(state["C"])
    wish = torch.where(phase == SEARCH_DONE, state["wish"], used * factor)
    seen = torch.where(shows, torch.where(up_on, torch.maximum(now, last), now), torch.where(last > 0, last, floor))
    return {
        **state,
        "wish": wish.clamp(state["C_min"], state["C_max"]),
        "phase": torch.where(turn, SEARCH_UP, torch.where(stop | rest, SEARCH_DONE, phase)),
        "signal": torch.where(down_on | up_on, seen, last),
    }


def adapt_balanced_moo(state: RuleState, released: Released) -> RuleState:
    """Search C, adapt the step length by the alignment, remember the applied update."""
    found = advance_C_search(state, released)
    step = state["step"] * torch.exp(compute_log_step(state, compute_alignment(state, released)))
    step = torch.minimum(step, state["longest"])
    total = torch.linalg.vector_norm(state["C"])
    # Where C is not searched for, it was chosen together with the learning rate: it stays.
    limit = torch.where(state["search"], step / (state["lr"] * released.steps), torch.inf)
    C = torch.minimum(found["wish"], limit).clamp(state["C_min"], state["C_max"])
    memory = state["beta"] * state["memory"] + (1 - state["beta"]) * apply_balanced_moo(state, released)
    return {**found, "C": state["C"] * (C / total), "step": step, "memory": memory}


def describe_balanced_moo(state: RuleState, released: Released) -> dict[str, torch.Tensor]:
    """The parts of the objective, and the step length s that this round applied."""
    return {**describe_objective(state, released), "step": state["step"]}


MOO = ClipRule(
    name="moo",
    init=init_balanced_moo,
    view=plain_view,
    clip=clip_to_C,
    bounds=bound_C,
    adapt=adapt_balanced_moo,
    apply=apply_balanced_moo,
    course=describe_balanced_moo,
    summary="C and the step length learned from released updates",
    reference="Ranaweera et al.; sound form of this project",
)
