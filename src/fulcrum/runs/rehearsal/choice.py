"""Coarse to fine: which candidates are played, and which one is chosen.

1. A ladder of step lengths at C = 1, factors of 4 apart, longer at the end where the best one is.
2. Around the best step a finer grid: three steps times three C, then a step that falls to zero, one that follows the
   alignment, and moo's own adaptation from several first steps.
3. The best few on further tasks and seeds, beside moo as it would be without a rehearsal.
4. Where batch or rounds had to shrink: the winner against moo as it is, with a larger batch and without merging up to
   200 rounds. A shrunken batch favours short steps, since sampling noise moves the weights along the directions in
   which the loss bends: where it alone shrank, only a step shorter than moo's own is checked, for a longer one has won
   in spite of it. Merged rounds err in both directions, so there every winner is checked.

What counts is the mean regret over tasks in points, smoothed over neighbouring step lengths: a place on a plateau is
worth more than the maximum of one noisy run. moo as it is stays unless something else is better by more than `MARGIN`,
in the small runs and in the check.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from fulcrum.data import Dataset
from fulcrum.data.made_up import VARIATIONS, Variation
from fulcrum.runs.rehearsal.effort import CHECK_ROUNDS, CHECK_TASKS
from fulcrum.runs.rehearsal.facts import RehearsalFacts
from fulcrum.runs.rehearsal.stage import Candidate, RehearsalLog, Scores, Stage
from fulcrum.training.server import SERVERS

LADDER_SCALES = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)
"""Steps of the ladder, as multiples of the one that moo would take without a rehearsal."""
ADAM_SCALES = (4.0**-6, 4.0**-5, 4.0**-4, 4.0**-3)
"""Further multiples for server optimisers that do not scale with the update: they bear any length."""
LADDER_FACTOR = 4.0
MOST_EXTENSIONS = 3
"""How often a ladder grows by one step at an end."""
FINE_C = (0.1, 0.3, 1.0)
"""C of the fine grid. At larger ones gradients that are smaller than made-up ones would drown in noise, and no scenario
of the development half wanted one: its best step at C = 1 was at most 1.2 points behind."""
FINE_SCALES = (0.5, 1.0, 2.0)
DEFAULT_SCALES = (0.5, 1.0, 2.0, 4.0)
"""First steps of moo, as multiples of its own."""
C_PRICE = 1.0
"""Points that a tenfold C must gain on made-up data. Real gradients may be smaller than made-up ones, and a C above
them loses signal, where one below them costs little: made-up data liked C = 1 by a point or two where digits lost one
with it."""
CLIFF = 5.0
"""The most that a neighbouring step counts as worse, in points."""
MARGIN = 1.0
"""Points by which a candidate must be better than moo as it is (percent, where a score is not in points)."""


def list_tasks(count: int, first: int) -> list[tuple[Variation, int]]:
    """`count` tasks in turn, each with a seed of its own, from `first` on."""
    return [(VARIATIONS[i % len(VARIATIONS)], first + i) for i in range(count)]


@dataclass(frozen=True)
class Rehearsed:
    """The answer of a rehearsal. regrets: mean regret of the finalists, by their description; the same of the check,
    where there was one."""

    candidate: Candidate
    digest: str
    regrets: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    check: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `rehearsed_from_json` reads them back."""
        return asdict(self)


def rehearsed_from_json(plain: dict[str, Any]) -> Rehearsed:
    """An answer from the values of `Rehearsed.to_json`."""
    candidate = Candidate(**plain["candidate"])
    known = {name: plain[name] for name in ("regrets", "seconds", "check") if name in plain}
    return Rehearsed(candidate, plain["digest"], **known)


def rehearse(
    facts: RehearsalFacts,
    model: nn.Module | None = None,
    public: Dataset | None = None,
    log: RehearsalLog | None = None,
) -> Rehearsed:
    """Measure on made-up data what the facts decide. The same facts give the same answer on the same machine.

    model: the network itself, where no settings name it. public: the user's own public data set, in place of made-up
    ones. log: scores that are known already, and who is told of the progress.
    """
    return rehearse_on_stage(Stage(facts, model, public, log=log or RehearsalLog()))


def rehearse_on_stage(stage: Stage) -> Rehearsed:
    """`rehearse` on a stage that is at hand, whose history then holds all that was played."""
    began, facts, effort = time.monotonic(), stage.facts, stage.facts.effort
    rounds = min(facts.rounds, effort.rounds)
    step = climb_ladder(stage, rounds)
    tasks = list_tasks(effort.fine, 10)
    played = stage.play(list_fine(step, facts), rounds, tasks)
    if facts.rule == "moo":
        cell = rank(to_regrets(played, stage.in_points), weight=0.2, mode="plain")[0][0]
        played = {**played, **stage.play(list_moving(cell), rounds, tasks)}
    ranked = rank(to_regrets(played, stage.in_points), weight=0.2)
    default = Candidate("moo", 1.0, facts.default_step)
    finalists = [candidate for candidate, _ in ranked[: effort.finalists]]
    finalists += [default] if default in played and default not in finalists else []
    again = stage.play(finalists, rounds, list_tasks(effort.final, 20))
    last = {c: _mean(own.values()) + price_C(c) for c, own in to_regrets(again, stage.in_points).items()}
    # Smoothed regrets of the fine grid and those of the last tasks, each task counting once.
    smoothed, count = dict(ranked), effort.fine + effort.final
    total = {c: (effort.fine * smoothed[c] + effort.final * last[c]) / count for c in finalists}
    best = min(finalists, key=lambda candidate: total[candidate])
    margin = compute_margin(facts.rounds / rounds)
    chosen = default if default in total and total[best] > total[default] - margin else best
    checked: dict[Candidate, float] = {}
    if default in total and chosen != default and needs_check(facts, chosen, default):
        checked = play_check(stage, chosen, default)
        margin = compute_margin(facts.rounds / min(facts.rounds, CHECK_ROUNDS))
        chosen = default if checked[chosen] > checked[default] - margin else chosen
    took = round(time.monotonic() - began, 1)
    return Rehearsed(chosen, facts.digest(), _describe_all(total), took, _describe_all(checked))


def needs_check(facts: RehearsalFacts, winner: Candidate, default: Candidate) -> bool:
    """Whether the way in which the small run differs from the real one may have made the winner win."""
    return facts.unmerges or (facts.has_check and winner.mean_step < default.mean_step)


def play_check(stage: Stage, winner: Candidate, default: Candidate) -> dict[Candidate, float]:
    """Mean regrets of the two with a larger batch and without merged rounds, on tasks of their own."""
    larger = Stage(stage.facts.enlarge(), stage.model, stage.public, log=stage.log)
    scores = larger.play([winner, default], min(stage.facts.rounds, CHECK_ROUNDS), list_tasks(CHECK_TASKS, 30))
    return {c: _mean(own.values()) + price_C(c) for c, own in to_regrets(scores, stage.in_points).items()}


def compute_margin(merged: float) -> float:
    """Points by which a candidate must be better than moo as it is, where a round of the small run stands for so many.

    A merged run is an approximation, and moo's own first step knows the horizon: 500 rounds of the MNIST CNN, merged
    into 150, wanted twice the step on made-up data, and lost 3 points on MNIST with it.
    """
    return MARGIN * (2 * merged - 1)


def climb_ladder(stage: Stage, rounds: int) -> float:
    """The best step length at C = 1 on a ladder that grows while its best step is at an end."""
    facts, tasks = stage.facts, list_tasks(stage.facts.effort.ladder, 0)
    scores = stage.play(list_ladder(facts), rounds, tasks)
    for _ in range(MOST_EXTENSIONS):
        best = rank(to_regrets(scores, stage.in_points), weight=0.1)[0][0].step
        steps = [candidate.step for candidate in scores]
        further = {max(steps): best * LADDER_FACTOR, min(steps): best / LADDER_FACTOR}
        if best not in further:
            break
        scores = {**scores, **stage.play([Candidate("plain", 1.0, further[best])], rounds, tasks)}
    return rank(to_regrets(scores, stage.in_points), weight=0.1)[0][0].step


def list_ladder(facts: RehearsalFacts) -> list[Candidate]:
    """Steps around moo's own at C = 1, a factor of 4 apart."""
    scales = LADDER_SCALES if SERVERS.find(facts.settings.train.server).scales else (*ADAM_SCALES, *LADDER_SCALES)
    return [Candidate("plain", 1.0, facts.default_step * scale) for scale in scales]


def list_fine(step: float, facts: RehearsalFacts) -> list[Candidate]:
    """Three steps times three C, and for moo its own adaptation from several first steps."""
    found = [Candidate("plain", C, step * scale) for C in FINE_C for scale in FINE_SCALES]
    if facts.rule == "moo":
        found += [Candidate("moo", 1.0, facts.default_step * scale) for scale in DEFAULT_SCALES]
    return list(dict.fromkeys(found))


def list_moving(cell: Candidate) -> list[Candidate]:
    """Around a plain cell: steps that fall to zero, and steps that follow the alignment."""
    falling = [Candidate("linear", cell.C, cell.step * scale) for scale in (1.0, 2.0, 4.0)]
    return [*falling, *(Candidate("follow", cell.C, cell.step * scale) for scale in (1.0, 2.0))]


def to_regrets(scores: Scores, in_points: bool = True) -> Scores:
    """Distances to the best candidate of each task: in points, or else in percent of the best score."""
    tasks = next(iter(scores.values()))
    best = {task: max(own[task] for own in scores.values()) for task in tasks}
    unit = {task: 1.0 if in_points else max(abs(value), 1e-9) / 100 for task, value in best.items()}
    return {
        candidate: {task: (best[task] - value) / unit[task] for task, value in own.items()}
        for candidate, own in scores.items()
    }


def rank(regrets: Scores, weight: float, mode: str = "") -> list[tuple[Candidate, float]]:
    """Candidates with their mean regrets, the best first; each neighbouring step length counts with `weight`.

    mode: only candidates of this one.
    """
    means = {c: _mean(own.values()) + price_C(c) for c, own in regrets.items() if mode in ("", c.mode)}
    lines: dict[tuple[str, float], list[Candidate]] = {}
    for candidate in means:
        lines.setdefault((candidate.mode, candidate.C), []).append(candidate)
    smoothed: dict[Candidate, float] = {}
    for line in lines.values():
        line.sort(key=lambda candidate: candidate.step)
        smoothed |= dict(zip(line, smooth([means[candidate] for candidate in line], weight), strict=True))
    return sorted(smoothed.items(), key=_second)


def price_C(candidate: Candidate) -> float:
    """Points that a candidate's C costs; moo searches for its own."""
    return 0.0 if candidate.mode == "moo" else C_PRICE * math.log10(candidate.C / min(FINE_C))


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Each value with its two neighbours, which have `weight` each.

    A neighbour that is worse by more than `CLIFF` counts as worse by that: in short runs with little noise the best
    step is often half of one that diverges. Beyond the longest step a cliff is assumed, below the shortest a plateau.
    """
    padded = [values[0], *values, values[-1] + CLIFF]
    return [
        (1 - 2 * weight) * own + weight * sum(min(padded[i + side], own + CLIFF) for side in (0, 2))
        for i, own in enumerate(values)
    ]


def _describe_all(regrets: dict[Candidate, float]) -> dict[str, float]:
    return {candidate.describe(): round(value, 2) for candidate, value in sorted(regrets.items(), key=_second)}


def _second(pair: tuple[Candidate, float]) -> float:
    return pair[1]


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
