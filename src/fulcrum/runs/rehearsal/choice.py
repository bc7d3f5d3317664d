"""Coarse to fine: which candidates are played, and which one is chosen.

1. A ladder of step lengths at C = 1, factors of 4 apart, longer at the end where the best one is.
2. Around the best step a finer grid: three steps times three C. Around the best cell of that: steps that fall to zero,
   and moo's own adaptation with steps that stay and steps that fall; moo as it would be without a rehearsal, too.
3. The best few on further tasks.
4. Where batch or rounds had to shrink: the best of those once more, with a larger batch and without merging up to 200
   rounds, since a shrunken run may like another step than the real one. For heavy models this takes the place of 3.

What counts is the mean regret over tasks in points, smoothed over neighbouring step lengths: a place on a plateau is
worth more than the maximum of one noisy run. What made-up tasks cannot show has a price of one point (`PRICE`): a
tenfold C, a step that stays where it could fall, and a step other than moo's own where even the check shrank.
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
from fulcrum.runs.rehearsal.effort import CHECK_FINALISTS, CHECK_ROUNDS, CHECK_TASKS
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
FALLING_SCALES = (1.0, 2.0, 4.0)
"""First steps of candidates whose step falls to zero, as multiples of the best cell's: their mean is half of it."""
PRICE = 1.0
"""Points that a candidate must gain on made-up data for each of three things that made-up data cannot judge.

A tenfold C: real gradients may be smaller than made-up ones, and a C above them loses signal, where one below them
costs little. A step that stays: how hard the real task is no rehearsal knows, so the best step is known to a factor of
two or so; one that falls to zero passes through the right length in any case, where one that stays may be too long for
the last rounds. A departure from moo's own step where even the check is smaller than the real run (`compute_margin`).
"""
CLIFF = 5.0
"""The most that a neighbouring step counts as worse, in points."""


def list_tasks(count: int, first: int) -> list[tuple[Variation, int]]:
    """`count` tasks in turn, each with a seed of its own, from `first` on."""
    return [(VARIATIONS[i % len(VARIATIONS)], first + i) for i in range(count)]


@dataclass(frozen=True)
class Rehearsed:
    """The answer of a rehearsal. regrets: mean regret of the last finalists with its prices, by their description."""

    candidate: Candidate
    digest: str
    regrets: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values; `rehearsed_from_json` reads them back."""
        return asdict(self)


def rehearsed_from_json(plain: dict[str, Any]) -> Rehearsed:
    """An answer from the values of `Rehearsed.to_json`."""
    candidate = Candidate(**plain["candidate"])
    known = {name: plain[name] for name in ("regrets", "seconds") if name in plain}
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
    tasks = list_tasks(effort.fine, 10)
    played = stage.play(list_fine(climb_ladder(stage, rounds)), rounds, tasks)
    if facts.rule == "moo":
        cell = rank(to_regrets(played, stage.in_points), weight=0.2)[0][0]
        played = {**played, **stage.play(list_moving(cell, facts), rounds, tasks)}
    ranked = rank(to_regrets(played, stage.in_points), weight=0.2)[: effort.finalists]
    total = {candidate: effort.fine * regret for candidate, regret in ranked}
    if facts.final_tasks:
        again = stage.play(list(total), rounds, list_tasks(facts.final_tasks, 20))
        total = _add_regrets(total, again, stage.in_points)
    count = effort.fine + facts.final_tasks
    best, stays = min(total, key=lambda candidate: total[candidate]), Candidate("moo", 1.0, facts.default_step)
    if facts.has_check:
        total = dict(sorted(total.items(), key=_second)[:CHECK_FINALISTS])
        again = play_check(stage, [*total, *([stays] if stays in played and stays not in total else [])])
        total, count = _add_regrets(total, again, stage.in_points), count + CHECK_TASKS
        best = min(total, key=lambda candidate: total[candidate])
        if stays in again and not wins_check(facts, best, stays, again, stage.in_points):
            best = stays
    took = round(time.monotonic() - began, 1)
    means = {candidate: regret / count for candidate, regret in total.items()}
    return Rehearsed(best, facts.digest(), _describe_all(means), took)


def wins_check(facts: RehearsalFacts, best: Candidate, stays: Candidate, scores: Scores, in_points: bool) -> bool:
    """Whether the best candidate may take the place of moo as it is, by their scores in the check.

    Where the check has the batch and the rounds of the real run, always. A batch that is smaller has sampling noise
    that the real one has not, and that favours short steps: one shorter than moo's own must be ahead by the margin.
    Merged rounds err in both directions, so there every step must be.
    """
    shorter = best.mean_step < stays.mean_step
    if best == stays or not (facts.merges_in_check or (facts.shrinks_in_check and shorter)):
        return True
    regrets = to_regrets({each: scores[each] for each in (best, stays)}, in_points)
    means = {each: _mean(own.values()) + price(each) for each, own in regrets.items()}
    return means[best] < means[stays] - compute_margin(facts.rounds / min(facts.rounds, CHECK_ROUNDS))


def compute_margin(merged: float) -> float:
    """Points by which a candidate must be ahead, where a round of the check stands for so many real ones.

    moo's own first step knows the horizon: 500 rounds of the MNIST CNN, merged into 150, wanted twice the step on
    made-up data, and lost 3 points on MNIST with it.
    """
    return PRICE * (2 * merged - 1)


def play_check(stage: Stage, candidates: Sequence[Candidate]) -> Scores:
    """Scores with a larger batch and without merged rounds, on tasks of their own."""
    larger = Stage(stage.facts.enlarge(), stage.model, stage.public, log=stage.log)
    scores = larger.play(candidates, min(stage.facts.rounds, CHECK_ROUNDS), list_tasks(CHECK_TASKS, 30))
    stage.history += larger.history
    return scores


def _add_regrets(total: dict[Candidate, float], scores: Scores, in_points: bool) -> dict[Candidate, float]:
    """The sums of regrets with those of further tasks, each task counting once."""
    regrets = to_regrets(scores, in_points)
    return {c: so_far + sum(value + price(c) for value in regrets[c].values()) for c, so_far in total.items()}


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


def list_fine(step: float) -> list[Candidate]:
    """Three steps times three C."""
    return [Candidate("plain", C, step * scale) for C in FINE_C for scale in FINE_SCALES]


def list_moving(cell: Candidate, facts: RehearsalFacts) -> list[Candidate]:
    """Around a plain cell: steps that fall to zero, moo's own adaptation, and both; and moo as it is."""
    found = [Candidate("linear", cell.C, cell.step * scale) for scale in FALLING_SCALES]
    found += [Candidate("fade", 1.0, cell.step * scale) for scale in FALLING_SCALES]
    found += [Candidate("moo", 1.0, cell.step * scale) for scale in FINE_SCALES]
    return list(dict.fromkeys([*found, Candidate("moo", 1.0, facts.default_step)]))


def to_regrets(scores: Scores, in_points: bool = True) -> Scores:
    """Distances to the best candidate of each task: in points, or else in percent of the best score."""
    tasks = next(iter(scores.values()))
    best = {task: max(own[task] for own in scores.values()) for task in tasks}
    unit = {task: 1.0 if in_points else max(abs(value), 1e-9) / 100 for task, value in best.items()}
    return {
        candidate: {task: (best[task] - value) / unit[task] for task, value in own.items()}
        for candidate, own in scores.items()
    }


def rank(regrets: Scores, weight: float) -> list[tuple[Candidate, float]]:
    """Candidates with their mean regrets, the best first; each neighbouring step length counts with `weight`."""
    means = {c: _mean(own.values()) + price(c) for c, own in regrets.items()}
    lines: dict[tuple[str, float], list[Candidate]] = {}
    for candidate in means:
        lines.setdefault((candidate.mode, candidate.C), []).append(candidate)
    smoothed: dict[Candidate, float] = {}
    for line in lines.values():
        line.sort(key=lambda candidate: candidate.step)
        smoothed |= dict(zip(line, smooth([means[candidate] for candidate in line], weight), strict=True))
    return sorted(smoothed.items(), key=_second)


def price(candidate: Candidate) -> float:
    """Points that a candidate's C costs, where it is not searched for, and a step that does not fall."""
    of_C = 0.0 if candidate.searches else PRICE * math.log10(candidate.C / min(FINE_C))
    return of_C + (0.0 if candidate.falls else PRICE)


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
