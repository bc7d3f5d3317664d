"""Coarse to fine: which candidates are played, and which one is chosen.

1. A coarse grid over C and the length of a local step, in short runs on three made-up tasks.
2. Around its best cells a finer grid, with a step that stays, one that falls to zero, and moo's own adaptation from
   several first steps.
3. The best few on further tasks and seeds, beside moo as it would be without a rehearsal.

What counts is the mean regret over tasks, in percent of each task's best score, smoothed over neighbouring step
lengths: a place on a plateau is worth more than the maximum of one noisy run. moo as it is stays unless something else
is better by more than `MARGIN`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from fulcrum.data import Dataset
from fulcrum.data.made_up import VARIATIONS, Variation
from fulcrum.models.build import is_built_in
from fulcrum.runs.rehearsal.facts import RehearsalFacts
from fulcrum.runs.rehearsal.stage import Candidate, Scores, Stage

COARSE_C = (0.1, 1.0, 10.0)
COARSE_LENGTHS = tuple(4.0**k for k in range(-5, 4))
"""Lengths of one local step: learning rate times C."""
FINE_C = (10**-0.5, 1.0, 10**0.5)
FINE_LENGTHS = (0.5, 1.0, 2.0)
DEFAULT_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""First steps of moo, as multiples of its own."""
COARSE_CELLS = 3
FINALISTS = 6
MARGIN = 1.0
"""Percent of the best score by which a candidate must be better than moo as it is."""
ROUNDS = (40, 150)
"""The most rounds of the small runs, coarse and fine."""
FEWEST_ROUNDS = 15
WORK = 4e11
"""Multiplications that a rehearsal may take, about a minute of two cores: more rounds are merged where it would need
more."""
PASS_OVERHEAD = {"built-in": 2e6, "own": 2e7}
"""What a pass of one party costs besides its multiplications, in multiplications."""


def list_tasks(count: int, first: int) -> list[tuple[Variation, int]]:
    """`count` tasks in turn, each with a seed of its own, from `first` on."""
    return [(VARIATIONS[i % len(VARIATIONS)], first + i) for i in range(count)]


COARSE_TASKS, FINE_TASKS, FINAL_TASKS = list_tasks(3, 0), list_tasks(3, 10), list_tasks(6, 20)


@dataclass(frozen=True)
class Rehearsed:
    """The answer of a rehearsal. regrets: mean regret of the finalists in percent, by their description."""

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
    return Rehearsed(candidate, plain["digest"], plain.get("regrets", {}), plain.get("seconds", 0.0))


def rehearse(facts: RehearsalFacts, model: nn.Module | None = None, public: Dataset | None = None) -> Rehearsed:
    """Measure on made-up data what the facts decide. The same facts give the same answer on the same machine.

    model: the network itself, where no settings name it. public: the user's own public data set, in place of made-up
    ones.
    """
    return rehearse_on_stage(Stage(facts, model, public))


def rehearse_on_stage(stage: Stage) -> Rehearsed:
    """`rehearse` on a stage that is at hand, whose history then holds all that was played."""
    began, facts = time.monotonic(), stage.facts
    short, long = choose_rounds(facts)
    coarse = to_regrets(stage.play(list_coarse(facts.steps), short, COARSE_TASKS))
    cells = [candidate for candidate, _ in rank(coarse, weight=0.1)[:COARSE_CELLS]]
    played = stage.play(list_fine(cells, facts.default_step), long, FINE_TASKS)
    ranked = rank(to_regrets(played), weight=0.25)
    default = Candidate("moo", 1.0, facts.default_step)
    finalists = [default, *(candidate for candidate, _ in ranked[:FINALISTS] if candidate != default)]
    again = stage.play(finalists, long, FINAL_TASKS)
    last = {candidate: _mean(own.values()) for candidate, own in to_regrets(again).items()}
    # Smoothed regrets of the fine grid and those of the last tasks, each task counting once.
    smoothed, counts = dict(ranked), (len(FINE_TASKS), len(FINAL_TASKS))
    total = {c: (counts[0] * smoothed[c] + counts[1] * last[c]) / sum(counts) for c in finalists}
    best = min(finalists, key=lambda candidate: total[candidate])
    chosen = best if total[best] < total[default] - MARGIN else default
    regrets = {candidate.describe(): round(value, 2) for candidate, value in sorted(total.items(), key=_second)}
    return Rehearsed(chosen, facts.digest(), regrets, round(time.monotonic() - began, 1))


def choose_rounds(facts: RehearsalFacts) -> tuple[int, int]:
    """Rounds of the small runs, coarse and fine: those of the run, or fewer that stand for several each.

    A pass forward and backward with norms is about four forward passes.
    """
    runs = (
        len(COARSE_C) * len(COARSE_LENGTHS) * len(COARSE_TASKS),
        COARSE_CELLS * 9 * len(FINE_TASKS) + FINALISTS * len(FINAL_TASKS),
    )
    overhead = PASS_OVERHEAD["built-in" if is_built_in(facts.settings.model) else "own"]
    of_round = facts.steps * (4 * facts.work * facts.batch + overhead * facts.parties)
    wanted = [min(facts.rounds, most) for most in ROUNDS]
    part = min(1.0, WORK / sum(count * rounds * of_round for count, rounds in zip(runs, wanted, strict=True)))
    short, long = (max(min(rounds, FEWEST_ROUNDS), round(part * rounds)) for rounds in wanted)
    return short, long


def list_coarse(steps: int) -> list[Candidate]:
    """C x length of a local step."""
    return [Candidate("plain", C, length * steps) for C in COARSE_C for length in COARSE_LENGTHS]


def list_fine(cells: Sequence[Candidate], default_step: float) -> list[Candidate]:
    """Around the best coarse cells: finer lengths, other C, a falling step; and moo from several first steps."""
    found: list[Candidate] = []
    for cell in cells:
        steps = [cell.step * factor for factor in FINE_LENGTHS]
        found += [Candidate("plain", cell.C, step) for step in steps]
        found += [Candidate("plain", cell.C * factor, cell.step) for factor in FINE_C if factor != 1.0]
        found += [Candidate("linear", cell.C, 2 * step) for step in steps]
        found += [Candidate("follow", cell.C, step) for step in steps[1:]]
    found += [Candidate("moo", 1.0, default_step * scale) for scale in DEFAULT_SCALES]
    return list(dict.fromkeys(found))


def to_regrets(scores: Scores) -> Scores:
    """Distances to the best candidate of each task, in percent of the best: a hard task counts as much as an easy
    one."""
    tasks = next(iter(scores.values()))
    best = {task: max(own[task] for own in scores.values()) for task in tasks}
    return {
        candidate: {task: 100 * (best[task] - value) / max(abs(best[task]), 1e-9) for task, value in own.items()}
        for candidate, own in scores.items()
    }


def rank(regrets: Scores, weight: float) -> list[tuple[Candidate, float]]:
    """Candidates with their mean regrets, the best first; each neighbouring step length counts with `weight`."""
    means = {candidate: _mean(own.values()) for candidate, own in regrets.items()}
    lines: dict[tuple[str, float], list[Candidate]] = {}
    for candidate in means:
        lines.setdefault((candidate.mode, candidate.C), []).append(candidate)
    smoothed: dict[Candidate, float] = {}
    for line in lines.values():
        line.sort(key=lambda candidate: candidate.step)
        smoothed |= dict(zip(line, smooth([means[candidate] for candidate in line], weight), strict=True))
    return sorted(smoothed.items(), key=_second)


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Each value with its two neighbours, which have `weight` each; at an end the value stands for the missing one."""
    padded = [values[0], *values, values[-1]]
    return [weight * (padded[i] + padded[i + 2]) + (1 - 2 * weight) * padded[i + 1] for i in range(len(values))]


def _second(pair: tuple[Candidate, float]) -> float:
    return pair[1]


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
