"""What the theory says before training: which C and step, how many rounds, how wrong a fixed C would be.

A network is taken for a bowl (bowl.py) with r_0 = PATH R, where R is the norm of random weights of its layers, and
gradients of norm FIRST_NORM at the start. Everything else is public: noise, parameters, rounds, local steps, the
server's
optimiser. PATH stands for two things that a bowl has not: examples disagree, so that the mean of unit gradients is
short, and the way to a good network is not straight. Both constants were chosen on the development half of the
no-tuning suite (`score_against`), so only other grids test them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fulcrum.analysis.theory.bowl import Bowl, find_best_normalised, follow_fixed
from fulcrum.runs.preparation import prepare_unrehearsed
from fulcrum.training.federation import Federation, make_model_facts

PATH = 16.0
FIRST_NORM = 5.0
Cell = tuple[float, float]
"""(C, learning rate)."""


@dataclass(frozen=True)
class RunFacts:
    """Public facts of a run. dim: d. start: R. noise: nu of a round. rounds: T. steps: N local steps. boost: how many
    times an update is applied in all, by server momentum."""

    dim: int
    start: float
    noise: float
    rounds: int
    steps: int = 1
    boost: float = 1.0

    def bowl(self) -> Bowl:
        """The bowl that stands for the run: every local step is a round of its own, with the noise of one step."""
        distance = PATH * self.start
        noise = self.noise * math.sqrt(self.steps)
        return Bowl(FIRST_NORM / distance, self.dim, distance, noise, self.rounds * self.steps, self.start)


def predict_end(facts: RunFacts, C: float, lr: float) -> float:
    """Distance from the optimum after the run with a fixed (C, lr), in units of the first; lower is better."""
    bowl = facts.bowl()
    return follow_fixed(bowl, lr * C * facts.boost, C).end / bowl.distance


@dataclass(frozen=True)
class Advice:
    """What to expect. step: the best length of a local step for a C below the norms. end: distance left, of 1.

    wrong: distance left with the learning rate that is right for C = 1, and a C a hundred times smaller, and larger.
    """

    step: float
    end: float
    wrong: tuple[float, float]


def advise(facts: RunFacts) -> Advice:
    """The best step before training, and what a wrong fixed C would cost at the learning rate right for C = 1."""
    best = find_best_normalised(facts.bowl())
    lr = best.step / facts.boost
    wrong = (predict_end(facts, 0.01, lr), predict_end(facts, 100.0, lr))
    return Advice(best.step / facts.boost, best.end / facts.bowl().distance, wrong)


@dataclass(frozen=True)
class Agreement:
    """How a prediction orders the cells of one grid: Spearman's rank correlation with the scores, and the regret of the
    cell it puts first, in the scores' units."""

    name: str
    correlation: float
    regret: float


def score_against(name: str, facts: RunFacts, scores: Mapping[Cell, float]) -> Agreement:
    """Compare the prediction with measured scores of fixed (C, lr) cells; higher scores are better."""
    cells = list(scores)
    measured = [scores[cell] for cell in cells]
    predicted = [-predict_end(facts, *cell) for cell in cells]
    first = max(range(len(cells)), key=lambda i: predicted[i])
    return Agreement(name, correlate_ranks(measured, predicted), max(measured) - measured[first])


def correlate_ranks(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation, ties with their mean rank; 0 where one of them is constant."""
    a, b = _rank(one), _rank(other)
    middle = (len(a) - 1) / 2
    top = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    size = math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))
    return top / size if size > 0 else 0.0


def _rank(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop + 1 < len(order) and values[order[stop + 1]] == values[order[start]]:
            stop += 1
        for place in range(start, stop + 1):
            ranks[order[place]] = (start + stop) / 2
        start = stop + 1
    return ranks


def collect_run_facts(federation: Federation) -> RunFacts:
    """The public facts of a federation."""
    facts, train = make_model_facts(federation), federation.settings.train
    boost = train.server_lr / (1 - train.server_momentum) if train.server == "momentum" else 1.0
    return RunFacts(facts.dim, facts.start, facts.noise, train.rounds, max(1, round(facts.steps)), boost)


ROUND_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def compare_rounds(federation: Federation) -> list[dict[str, float]]:
    """What other numbers of rounds would leave of the way at the same epsilon. [] where sigma is set, not epsilon."""
    settings = federation.settings
    if settings.privacy.epsilon is None:
        return []
    found = []
    for factor in ROUND_FACTORS:
        rounds = max(1, round(factor * settings.train.rounds))
        other = prepare_unrehearsed(settings.replace(train={"rounds": rounds}), federation.problem.dataset)
        advice = advise(collect_run_facts(other))
        sigma = float(other.plan.sigmas[0])
        found.append({"rounds": rounds, "sigma": sigma, "step": advice.step, "end": advice.end})
    return found
