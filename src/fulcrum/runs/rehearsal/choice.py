"""Coarse to fine: which candidates are played, and which one is chosen.

1. A coarse grid over C and the step, in short runs on a few made-up tasks.
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
from fulcrum.training.server import SERVERS

COARSE_C = (0.1, 1.0, 10.0)
COARSE_SCALES = (1 / 16, 1 / 4, 1.0, 4.0, 16.0, 64.0)
"""Steps of the coarse grid, as multiples of the one that moo would take without a rehearsal."""
ADAM_SCALES = (4.0**-6, 4.0**-5, 4.0**-4, 4.0**-3)
"""Further multiples for server optimisers that do not scale with the update: they bear any length."""
FINE_C = (10**-0.5, 1.0, 10**0.5)
FINE_SCALES = (0.5, 1.0, 2.0)
DEFAULT_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""First steps of moo, as multiples of its own."""
COARSE_CELLS = 3
MARGIN = 1.0
"""Percent of the best score by which a candidate must be better than moo as it is."""


@dataclass(frozen=True)
class Effort:
    """How much is played: tasks of the three stages, finalists, and the most rounds of short and long small runs.

    A run of more rounds has several merged into one. On the development half of the no-tuning suite merging 500 rounds
    into 150 was harmless and 100 into 15 was not: steps that are several times longer hit the curvature of the loss,
    and too short a step was chosen. So a heavy model gets fewer tasks rather than fewer rounds.
    """

    coarse: int
    fine: int
    final: int
    finalists: int
    short: int
    long: int


EFFORTS = (
    Effort(coarse=4, fine=4, final=8, finalists=6, short=75, long=150),
    Effort(coarse=3, fine=3, final=6, finalists=6, short=75, long=150),
    Effort(coarse=2, fine=3, final=3, finalists=5, short=75, long=150),
    Effort(coarse=2, fine=2, final=2, finalists=4, short=60, long=100),
    Effort(coarse=1, fine=2, final=1, finalists=4, short=50, long=75),
)
"""From light models to heavy ones; the last one where none is cheap enough."""
WORK = 1.5e12
"""Multiplications that a rehearsal may take: about two minutes of two cores."""
PASS_OVERHEAD = {"built-in": 4e6, "own": 4e7}
"""What a pass of one party costs besides its own multiplications."""


def list_tasks(count: int, first: int) -> list[tuple[Variation, int]]:
    """`count` tasks in turn, each with a seed of its own, from `first` on."""
    return [(VARIATIONS[i % len(VARIATIONS)], first + i) for i in range(count)]


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
    effort = choose_effort(facts)
    short, long = (min(facts.rounds, most) for most in (effort.short, effort.long))
    coarse = to_regrets(stage.play(list_coarse(facts), short, list_tasks(effort.coarse, 0)))
    cells = [candidate for candidate, _ in rank(coarse, weight=0.1)[:COARSE_CELLS]]
    played = stage.play(list_fine(cells, facts.default_step, facts.rule), long, list_tasks(effort.fine, 10))
    ranked = rank(to_regrets(played), weight=0.2)
    default = Candidate("moo", 1.0, facts.default_step)
    finalists = [candidate for candidate, _ in ranked[: effort.finalists]]
    finalists += [default] if default in played and default not in finalists else []
    again = stage.play(finalists, long, list_tasks(effort.final, 20))
    last = {candidate: _mean(own.values()) for candidate, own in to_regrets(again).items()}
    # Smoothed regrets of the fine grid and those of the last tasks, each task counting once.
    smoothed, count = dict(ranked), effort.fine + effort.final
    total = {c: (effort.fine * smoothed[c] + effort.final * last[c]) / count for c in finalists}
    best = min(finalists, key=lambda candidate: total[candidate])
    chosen = default if default in total and total[best] > total[default] - MARGIN else best
    regrets = {candidate.describe(): round(value, 2) for candidate, value in sorted(total.items(), key=_second)}
    return Rehearsed(chosen, facts.digest(), regrets, round(time.monotonic() - began, 1))


def choose_effort(facts: RehearsalFacts) -> Effort:
    """The largest effort whose work is within `WORK`; the smallest where none is."""
    return next((effort for effort in EFFORTS if estimate_work(facts, effort) <= WORK), EFFORTS[-1])


def estimate_work(facts: RehearsalFacts, effort: Effort) -> float:
    """Multiplications of a rehearsal. A pass forward and backward with norms is about four forward passes."""
    overhead = PASS_OVERHEAD["built-in" if is_built_in(facts.settings.model) else "own"]
    of_round = facts.steps * (4 * facts.work * facts.batch + overhead * facts.parties)
    fine = COARSE_CELLS * 10 + len(DEFAULT_SCALES)
    long = fine * effort.fine + effort.finalists * effort.final
    short = len(list_coarse(facts)) * effort.coarse
    return of_round * (short * min(facts.rounds, effort.short) + long * min(facts.rounds, effort.long))


def list_coarse(facts: RehearsalFacts) -> list[Candidate]:
    """C x step, around moo's own step."""
    scales = COARSE_SCALES if SERVERS.find(facts.settings.train.server).scales else (*ADAM_SCALES, *COARSE_SCALES)
    return [Candidate("plain", C, facts.default_step * scale) for C in COARSE_C for scale in scales]


def list_fine(cells: Sequence[Candidate], default_step: float, rule: str = "moo") -> list[Candidate]:
    """Around the best coarse cells: finer lengths, other C, and for moo a falling step, one that follows the alignment,
    and its own from several first steps."""
    found: list[Candidate] = []
    for cell in cells:
        steps = [cell.step * factor for factor in FINE_SCALES]
        found += [Candidate("plain", cell.C, step) for step in steps]
        found += [Candidate("plain", cell.C * factor, cell.step) for factor in FINE_C if factor != 1.0]
        if rule != "moo":
            continue
        found += [Candidate("linear", cell.C, 2 * step) for step in steps]
        found += [Candidate("follow", cell.C, step) for step in steps[1:]]
    if rule == "moo":
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
