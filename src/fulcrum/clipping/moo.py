"""Multi-objective clipping: C descends L_model(C) + kappa C, seen through released updates only.

Two rules live here. `moo-c` moves C alone; `moo`, the default, also takes the step length off the
user's hands. Both are functions of releases and public settings: they cost no privacy.

**moo-c.** One step ahead, raising log C changes the loss by minus the part of the clipped update that
points downhill, plus a price. The server cannot see the true descent direction, but it has an estimate
it paid for already: the moving average of the updates released so far. With v its unit vector and D_t
the released aggregate of round t,

    A_t = <v_{t-1}, D_t> / (eta N C_t)

is the share of a fully clipped step that keeps going the same way. While A_t > kappa C_t a larger C
would have gone further in a direction that has proved right, so C grows; when the updates stop
agreeing with their past (overshooting, or noise), C shrinks:

    C_{t+1} = clamp(C_t exp(eta_C phi(A_t - kappa C_t)), C_min, C_max),   phi = sign or identity.

Projecting on one direction leaves noise sigma/(q n), without the sqrt(d) that |D_t| would carry.

**moo.** In that rule C does two jobs: it sets the length of the step (eta C) and the trade between
bias and noise. They are learned apart here, because each has its own signal. Write u_t = D_t/(eta N C)
for the release in units of C: a mean of clipped gradients of length at most 1, plus noise of a known
standard deviation nu in each of d coordinates. The server applies theta <- theta + s_t u_t.

  1. The step length s starts where the noise of all T rounds together would move the weights by
     `balance` times R, the norm that random weights of these layers have: s_0 = balance R / (nu sqrt(d T)),
     but a local step at no more than `reach` R, since with little noise the loss bends first (a single
     layer is exempt, and bears three times the noise). From there it moves by the alignment A_t, as C
     does in moo-c, and never exceeds s_0 by more than `growth`. Neither eta nor C0 is in it.
  2. C is searched where the signal |u_t|^2 - nu^2 d (an unbiased estimate, since nu is public) stops
     rising when C falls: above the gradients' norms a larger C only shrinks u_t, below them it changes
     nothing but the bias. C falls by 3 while that helps or while no signal shows; then rises by 3
     until it hurts. A C that ends too small costs little, as the noise is in units of C as well: where
     the noise hides whether C helps, C does not rise, and where no round can show it, C does not fall all the way.
  3. eta N C never exceeds s, so that several local steps do not run ahead of the server.

docs/moo.md derives it and shows what was measured.
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
"""What clip.phi may be: how the alignment becomes a step."""
MAX_LOG_STEP = 0.3
"""phi = identity moves log C by at most this a round."""


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
    """A_t: how much of a fully clipped step went along the remembered direction. 0 with no memory."""
    total = torch.linalg.vector_norm(state["C"])
    memory = state["memory"]
    length = torch.linalg.vector_norm(memory)
    along = torch.dot(memory, released.aggregate) / length.clamp_min(1e-30)
    return torch.where(length > 0, along / (released.lr * released.steps * total), 0.0)


def compute_log_step(state: RuleState, seen: torch.Tensor) -> torch.Tensor:
    """How far a round with this A_t moves the logarithm of what is learned: eta_C phi(A_t - kappa C_t).

    0 with no memory.
    """
    gain = seen - state["kappa"] * torch.linalg.vector_norm(state["C"])
    step = torch.where(
        state["sign"],
        state["eta_C"] * torch.sign(gain),
        (state["eta_C"] * gain).clamp(-MAX_LOG_STEP, MAX_LOG_STEP),
    )
    return torch.where(state["memory"].any(), step, torch.zeros_like(step))


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
    summary="C learned from the alignment of released updates; the learning rate stays yours",
    reference="Ranaweera et al.; sound form of this project",
)


# --- moo: step length and C apart ---------------------------------------------------------------

SINGLE_LAYER_NOISE_FACTOR = 3.0
"""How many times the noise that `balance` says a model of one layer bears."""
LONG_RUN_ROUNDS = 200
"""Runs of at least so many rounds can afford first rounds that overshoot."""
WHITENED_NOISE_FACTOR = 0.5
"""How many times the noise that `balance` says a network in whitened coordinates bears: noise reaches the directions in
which features hardly vary, and the same loss takes a shorter way."""
C_SEARCH_FACTOR = 3.0
"""C falls or rises by this in one round of the search."""
SIGNAL_CHANGE_RATIO = 1.5
"""A signal (in squares) this many times the last one is taken for a change."""
MIN_SIGNAL_DEVIATIONS = 3.0
"""Standard deviations of the estimate below which there is no signal."""
CLEAR_SIGNAL_RATIO = 2.0
"""How many times what it takes to show a signal must be before C may rise on a comparison of two rounds. At 6 standard
deviations equal signals look `BETTER` times apart in one of twenty comparisons; at 3, in one of five."""
MAX_CLEAR_THRESHOLD = 0.2
"""Where a signal must be larger than this to be clear (1 is the most there can be), no round says anything of C."""
HIDDEN_SIGNAL_C_MIN_FACTOR = 10.0
"""There C falls to so many times C_min and no further: below, examples that are told well count as much as others."""
SEARCH_DOWN, SEARCH_DONE, SEARCH_UP = -1, 0, 1
Number = TypeVar("Number", float, torch.Tensor)


def compute_signal_threshold(variance: Number, dim: int) -> Number:
    """What a signal must be to be told from none, where each of dim coordinates has noise of this variance."""
    root: float = (2 * dim) ** 0.5
    return MIN_SIGNAL_DEVIATIONS * variance * root


def compute_lowest_C(settings: Clip, shape: ModelFacts) -> float:
    """How far the search may take C down: to C_min, or less far where it would be noise alone that takes it there."""
    if CLEAR_SIGNAL_RATIO * compute_signal_threshold(shape.noise**2, shape.dim) <= MAX_CLEAR_THRESHOLD:
        return settings.C_min
    return max(settings.C_min, min(HIDDEN_SIGNAL_C_MIN_FACTOR * settings.C_min, settings.C0))


def compute_max_first_step(settings: Clip, shape: ModelFacts) -> float:
    """The longest first step of a model of several layers, in units of R.

    With one step a round all parties' first gradients point the same way, and weights that were learned, and so are
    larger than random ones, turn a step into a larger change of what the network computes: less, unless the server's
    momentum makes the first steps short anyway. N local steps go N times as far in a run that is long enough to get
    over first rounds that overshot; a shorter one starts with less.
    """
    one = min(1.0, 1 / (shape.larger * shape.first))
    several = shape.steps * min(1.0, (shape.rounds / LONG_RUN_ROUNDS) ** 0.5) if shape.steps > 1 else 0.0
    return settings.reach * max(one, several)


def init_balanced_moo(settings: Clip, shape: ModelFacts) -> RuleState:
    """The first step length from public facts, and C0 cut down to it."""
    full = shape.lr * shape.steps
    spread = shape.noise * (shape.dim * shape.rounds) ** 0.5
    # Without noise nothing limits the step but the user's own choice.
    step = full * settings.C0
    if spread > 0:
        deep = shape.depth > 1  # the loss of a single layer is convex, and no other layer amplifies its noise
        balance = settings.balance * (
            SINGLE_LAYER_NOISE_FACTOR if not deep else WHITENED_NOISE_FACTOR if shape.mixed else 1.0
        )
        step = shape.start * min(balance / spread, compute_max_first_step(settings, shape) if deep else math.inf)
    C = min(max(min(settings.C0, step / full), settings.C_min), settings.C_max)
    return {
        **init_moo_c(settings, shape),
        "C": equal_shares(C, shape.count),
        "C_min": torch.tensor(compute_lowest_C(settings, shape)),
        "wish": torch.tensor(settings.C0),
        "step": torch.tensor(step),
        "longest": torch.tensor(step * settings.growth),
        "lr": torch.tensor(shape.lr),
        "phase": torch.tensor(SEARCH_DOWN),
        "signal": torch.tensor(0.0),
    }


def apply_balanced_moo(state: RuleState, released: Released) -> torch.Tensor:
    """The release at length s: s u_t, times what a schedule has left of the learning rate."""
    reach = state["lr"] * released.steps * torch.linalg.vector_norm(state["C"])
    return torch.mul(released.aggregate, state["step"] / reach)


def estimate_signal(state: RuleState, released: Released) -> tuple[torch.Tensor, torch.Tensor]:
    """(|u_t|^2 less its noise, what it takes to be told from none)."""
    in_C = released.aggregate / (released.lr * released.steps * torch.linalg.vector_norm(state["C"]))
    variance = torch.as_tensor(released.noise) ** 2
    dim = released.aggregate.numel()
    return in_C.square().sum() - variance * dim, compute_signal_threshold(variance, dim)


def advance_C_search(state: RuleState, released: Released) -> RuleState:
    """One round of the search for C: the wished C, the phase, and the signal to compare with."""
    now, floor = estimate_signal(state, released)
    last, phase = state["signal"], state["phase"]
    shows = now >= floor
    down_on = (phase == SEARCH_DOWN) & ((last == 0) | ~shows | (now > SIGNAL_CHANGE_RATIO * last))
    level = (phase == SEARCH_DOWN) & ~down_on
    # Only a C whose own signal was clear may be returned to; else the smaller C is the safer side.
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
    """Search C, move the step length along the alignment, remember what was applied."""
    found = advance_C_search(state, released)
    step = state["step"] * torch.exp(compute_log_step(state, compute_alignment(state, released)))
    step = torch.minimum(step, state["longest"])
    total = torch.linalg.vector_norm(state["C"])
    C = torch.minimum(found["wish"], step / (state["lr"] * released.steps)).clamp(state["C_min"], state["C_max"])
    memory = state["beta"] * state["memory"] + (1 - state["beta"]) * apply_balanced_moo(state, released)
    return {**found, "C": state["C"] * (C / total), "step": step, "memory": memory}


MOO = ClipRule(
    name="moo",
    init=init_balanced_moo,
    view=plain_view,
    clip=clip_to_C,
    bounds=bound_C,
    adapt=adapt_balanced_moo,
    apply=apply_balanced_moo,
    summary="C and the step length learned from released updates",
    reference="Ranaweera et al.; sound form of this project",
)
