"""A theory of Fulcrum's own rule on the simplest loss with noise: a round bowl.

L(theta) = h |theta - theta*|^2 / 2 in d dimensions, and every example's gradient is that of L. With r the distance from
the optimum, the release in units of C is u = -alpha e + nu z, where e points away from the optimum,
alpha = min(1, h r / C) and z ~ N(0, I_d). The server applies theta <- theta + s u, so on average

    r^2 <- r^2 - 2 s alpha r + s^2 (alpha^2 + nu^2 d)                                                  (1)

**Why public facts decide the step.** Where C is below the gradients' norms alpha = 1, and (1) does not contain h: the
curvature, all that the data decides here, is gone. What is left are s, nu^2 d, T (public) and the first distance
r_0, the one private fact, which only sets the unit of s. With (1) summed over T rounds in which r changes little,
r_T^2 = (r_0 - s T)^2 + s^2 nu^2 d T, and the best fixed step is

    s* = r_0 / (T + nu^2 d)                                                                            (2)

**When they do not.** Where examples disagree, |mean of unit gradients| = alpha < 1 falls as the optimum comes near: how
hard the task is decides s* through alpha. With little noise and a C above the norms, (1) is r <- r (1 - s h / C): the
curvature limits the step to 2 C / h. A loss whose curvature differs between directions is limited by its largest one.

**The rule.** `moo` starts with s_0 = R min(balance / (nu sqrt(d T)), reach) and multiplies s by exp(+-eta_C) by the
sign of <v, u>, v the direction of its memory m. With p = <m, e r> and q = |m|^2 the averages obey, besides (1),

    p <- beta (p - s alpha p / r) + (1 - beta) (s^2 (alpha^2 + nu^2 d) - s alpha r)
    q <- beta^2 q - 2 beta (1 - beta) s alpha p / r + (1 - beta)^2 s^2 (alpha^2 + nu^2 d)
    log s <- log s + eta_C erf(-alpha p / (r sqrt(q) nu sqrt(2)))                                      (3)

and C is searched for by the rule's own code, on the expected signal alpha^2. s rests where releases no longer agree
with their past, p = 0, which is where (1) rests: r = s (1 + nu^2 d) / 2.

**Where it must fail.** log s moves by eta_C per round: a first step that is wrong by a factor f takes log(f) / eta_C
rounds to mend, so runs shorter than that keep it. And s never exceeds growth s_0: a run with
growth s_0 T < r_0 cannot arrive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fulcrum.clipping import find_rule
from fulcrum.clipping.moo import advance_C_search
from fulcrum.clipping.rule import ModelFacts
from fulcrum.settings.schema import Clip
from fulcrum.types import Released, RuleState


@dataclass(frozen=True)
class Bowl:
    """h: curvature. dim: d. distance: r_0. noise: nu. rounds: T. start: R, the norm of random weights."""

    curvature: float
    dim: int
    distance: float
    noise: float
    rounds: int
    start: float = 1.0

    @property
    def spread(self) -> float:
        """nu^2 d: the squared noise of a release in units of C."""
        return self.noise**2 * self.dim


@dataclass(frozen=True)
class Path:
    """Distances r_t, step lengths s_t and C_t over the rounds; distances has one entry more."""

    distances: tuple[float, ...]
    steps: tuple[float, ...]
    C: tuple[float, ...]

    @property
    def end(self) -> float:
        """r_T."""
        return self.distances[-1]


def move_distance(bowl: Bowl, distance: float, step: float, C: float) -> tuple[float, float]:
    """(r after one round by (1), alpha)."""
    alpha = min(1.0, bowl.curvature * distance / C)
    square = distance**2 - 2 * step * alpha * distance + step**2 * (alpha**2 + bowl.spread)
    return math.sqrt(max(square, 1e-30)), alpha


def follow_fixed(bowl: Bowl, step: float, C: float) -> Path:
    """A fixed C and step length: (1), integrated. DP-SGD with learning rate eta has step = eta C."""
    distances = [bowl.distance]
    for _ in range(bowl.rounds):
        distances.append(min(move_distance(bowl, distances[-1], step, C)[0], 1e12))
    return Path(tuple(distances), (step,) * bowl.rounds, (C,) * bowl.rounds)


def make_rule_state(bowl: Bowl, clip: Clip, lr: float = 1.0) -> RuleState:
    """The state with which `moo` starts on the bowl: a network of two layers with random weights."""
    facts = ModelFacts(
        bowl.dim, (bowl.dim,), start=bowl.start, depth=2, noise=bowl.noise, rounds=bowl.rounds, lr=lr, steps=1.0
    )
    return find_rule("moo").init(clip, facts)


def follow_rule(bowl: Bowl, clip: Clip | None = None) -> Path:
    """`moo` on the bowl by (1) and (3): averages only, no random number is drawn."""
    clip = clip or Clip(rule="moo")
    state = make_rule_state(bowl, clip)
    distance, p, q = bowl.distance, 0.0, 0.0
    distances, steps, Cs = [distance], [], []
    for t in range(bowl.rounds):
        C, step = float(state["C"].sum()), float(state["step"])
        after, alpha = move_distance(bowl, distance, step, C)
        steps.append(step)
        Cs.append(C)
        log_step = 0.0
        if q > 0:
            seen = -alpha * p / (distance * math.sqrt(q)) - clip.kappa * C
            log_step = clip.eta_C * math.erf(seen / (max(bowl.noise, 1e-12) * math.sqrt(2)))
        reached = step**2 * (alpha**2 + bowl.spread)
        along = -step * alpha * p / distance
        p = clip.beta * (p + along) + (1 - clip.beta) * (reached - step * alpha * distance)
        q = clip.beta**2 * q + 2 * clip.beta * (1 - clip.beta) * along + (1 - clip.beta) ** 2 * reached
        state = _search(bowl, state, alpha, t)
        longest = float(state["longest"])
        moved = min(step * math.exp(log_step), longest)
        limit = moved / float(state["lr"])
        wish = min(float(state["wish"]), limit)
        held = min(max(wish, float(state["C_min"])), float(state["C_max"]))
        state = {**state, "C": torch.tensor([held]), "step": torch.tensor(moved)}
        distance = after
        distances.append(distance)
    return Path(tuple(distances), tuple(steps), tuple(Cs))


def _search(bowl: Bowl, state: RuleState, alpha: float, t: int) -> RuleState:
    """The rule's search for C, seeing a release of the expected squared length alpha^2 + nu^2 d."""
    C = float(state["C"].sum())
    release = torch.zeros(bowl.dim)
    release[0] = float(state["lr"]) * C * math.sqrt(alpha**2 + bowl.spread)
    return advance_C_search(
        state, Released(release, torch.zeros(0), float(state["lr"]), 1.0, t, bowl.rounds, bowl.noise)
    )


def simulate_rule(bowl: Bowl, seed: int, clip: Clip | None = None) -> Path:
    """`moo` on the bowl by its own code, with noise drawn: what (1) and (3) average."""
    clip = clip or Clip(rule="moo")
    rule = find_rule("moo")
    state = make_rule_state(bowl, clip)
    generator = torch.Generator().manual_seed(seed)
    theta = torch.zeros(bowl.dim)
    theta[0] = bowl.distance  # theta* = 0
    distances, steps, Cs = [bowl.distance], [], []
    for t in range(bowl.rounds):
        C = float(state["C"].sum())
        gradient = bowl.curvature * theta
        length = float(torch.linalg.vector_norm(gradient))
        clipped = gradient * min(1.0, C / max(length, 1e-30))
        noise = bowl.noise * C * torch.randn(bowl.dim, generator=generator)
        released = Released(-clipped + noise, torch.zeros(0), 1.0, 1.0, t, bowl.rounds, bowl.noise)
        assert rule.apply is not None
        theta = theta + rule.apply(state, released)
        steps.append(float(state["step"]))
        Cs.append(C)
        state = rule.adapt(state, released)
        distances.append(float(torch.linalg.vector_norm(theta)))
    return Path(tuple(distances), tuple(steps), tuple(Cs))


# --- the best fixed step ----------------------------------------------------------------------------


def predict_best_step(distance: float, spread: float, rounds: int) -> float:
    """(2): s* for a C below the norms. distance: r_0. spread: nu^2 d."""
    return distance / (rounds + spread)


@dataclass(frozen=True)
class FixedCell:
    """A fixed C and step, and the distance at the end."""

    C: float
    step: float
    end: float


def find_best_fixed(bowl: Bowl, per_decade: int = 8) -> FixedCell:
    """The best fixed (C, step) on the bowl, by (1), over C from far below to far above the norms."""
    centre = predict_best_step(bowl.distance, bowl.spread, bowl.rounds)
    top = bowl.curvature * bowl.distance
    steps = [centre * 10 ** (k / per_decade) for k in range(-2 * per_decade, 2 * per_decade + 1)]
    cells = [
        FixedCell(C, s, follow_fixed(bowl, s, C).end)
        for C in [top * 10 ** (k / 2) for k in range(-6, 5)]
        for s in steps
    ]
    return min(cells, key=lambda cell: cell.end)


def find_best_normalised(bowl: Bowl, per_decade: int = 16) -> FixedCell:
    """The best fixed step where C is far below the norms throughout."""
    centre = predict_best_step(bowl.distance, bowl.spread, bowl.rounds)
    steps = [centre * 10 ** (k / per_decade) for k in range(-2 * per_decade, 2 * per_decade + 1)]
    cells = [FixedCell(1e-12, s, follow_fixed(bowl, s, 1e-12).end) for s in steps]
    return min(cells, key=lambda cell: cell.end)


def compute_rounds_to_mend(first: float, best: float, eta_C: float) -> float:
    """Rounds that the rule needs to come from a first step to the best one: |log(first / best)| / eta_C."""
    return abs(math.log(first / best)) / eta_C


def compare_curvatures(bowl: Bowl, curvatures: Sequence[float]) -> list[float]:
    """Best fixed steps of bowls that differ in curvature only, with C far below the norms: all the same."""
    return [
        find_best_normalised(Bowl(h, bowl.dim, bowl.distance, bowl.noise, bowl.rounds, bowl.start)).step
        for h in curvatures
    ]
