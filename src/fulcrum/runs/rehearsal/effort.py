"""How much a rehearsal plays: as much as about two minutes of two cores allow, from light models to heavy ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """How much is played. ladder, fine, final: tasks of the three stages. finalists: candidates of the last one.

    batch: the largest expected batch. rounds: the most rounds; a longer run has several merged into one. On the
    development half of the no-tuning suite merging 1,000 rounds into 150 was harmless, and 100 into 15 was not: steps
    that are several times longer hit the curvature of the loss, and too short a step was chosen. A batch of 32 had the
    same effect. So a heavy model gets fewer tasks first.
    """

    ladder: int
    fine: int
    final: int
    finalists: int
    batch: int
    rounds: int


EFFORTS = (
    Effort(ladder=2, fine=3, final=4, finalists=6, batch=256, rounds=200),
    Effort(ladder=2, fine=3, final=3, finalists=6, batch=128, rounds=200),
    Effort(ladder=2, fine=2, final=3, finalists=5, batch=128, rounds=200),
    Effort(ladder=2, fine=2, final=2, finalists=4, batch=96, rounds=200),
    Effort(ladder=1, fine=2, final=2, finalists=4, batch=64, rounds=150),
    Effort(ladder=1, fine=1, final=2, finalists=4, batch=64, rounds=100),
)
"""From light models to heavy ones; the last one where none is cheap enough."""
WORK = 1.2e12
"""Multiplications that a rehearsal may take: about two minutes of two cores."""
PASS_OVERHEAD = {False: 2e7, True: 8e7}
"""What a pass of one party costs besides its own multiplications, by whether the model is the user's own."""
LADDER_RUNS, FINE_RUNS = 6, 19
"""Candidates of the first two stages."""
CHECK_TASKS, CHECK_ROUNDS, CHECK_FINALISTS = 3, 200, 4
"""Tasks of the check, its most rounds (none are merged up to there), and how many candidates play it, beside
moo as it is."""
HEAVY_FINAL = 2
"""Models with at most so many tasks in the last stage skip it where there is a check, which is closer to the run."""


@dataclass(frozen=True)
class Load:
    """What a small run costs. work: multiplications of one example's forward pass. own: the model is not built in."""

    work: float
    rounds: int
    steps: int
    parties: int
    own: bool


def choose_effort(load: Load) -> Effort:
    """The largest effort whose work is within `WORK`; the smallest where none is."""
    return next((effort for effort in EFFORTS if estimate_work(load, effort) <= WORK), EFFORTS[-1])


def estimate_work(load: Load, effort: Effort) -> float:
    """Multiplications of a rehearsal. A pass forward and backward with norms is about four forward passes."""
    of_round = load.steps * (4 * load.work * effort.batch + PASS_OVERHEAD[load.own] * load.parties)
    return of_round * min(load.rounds, effort.rounds) * count_runs(effort)


def estimate_check(load: Load, batch: int) -> float:
    """Multiplications of a check with such a batch."""
    of_round = load.steps * (4 * load.work * batch + PASS_OVERHEAD[load.own] * load.parties)
    return of_round * min(load.rounds, CHECK_ROUNDS) * (CHECK_FINALISTS + 1) * CHECK_TASKS


def count_runs(effort: Effort) -> int:
    """Small runs of a rehearsal, about: a ladder may grow."""
    return LADDER_RUNS * effort.ladder + FINE_RUNS * effort.fine + effort.finalists * effort.final
