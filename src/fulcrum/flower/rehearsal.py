"""A coordinator rehearses before it proposes, from declared facts only; parties see the choice in their consent.

The noise of a run depends on how many units the parties hold. Before they join, that is known only where it is declared
(data.units). Without it moo takes its first step by a formula, and other rehearsed methods are refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fulcrum.clipping.moo import MOO
from fulcrum.engines import find_engine
from fulcrum.errors import ConfigError
from fulcrum.privacy.plan import make_plan
from fulcrum.runs.rehearsal import choose_settings, find_refusal, read_rehearsal_facts, recall_or_rehearse
from fulcrum.runs.rehearsal.public_set import fit_facts, load_public_set
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import Federation
from fulcrum.training.problem import TrainingProblem

Say = Callable[[str], None]


def list_declared_units(settings: Settings) -> list[int]:
    """Units that each party declares, one number per party; empty where data.units says nothing.

    ConfigError where their number is not that of the parties.
    """
    units, parties = list(settings.data.units), settings.data.parties
    if len(units) == 1:
        return units * parties
    if units and len(units) != parties:
        raise ConfigError(
            f"data.units has {len(units)} numbers for {parties} parties; give one per party, or one for all of them."
        )
    return units


SECONDS_BETWEEN_LINES = 10.0


def _say_now_and_then(say: Say) -> Callable[[float], None]:
    """A line on the progress every `SECONDS_BETWEEN_LINES`."""
    spoken = time.monotonic()

    def tell(part: float) -> None:
        nonlocal spoken
        if time.monotonic() - spoken >= SECONDS_BETWEEN_LINES:
            spoken = time.monotonic()
            say(f"rehearsing on made-up records before anything is proposed: {part:.0%}")

    return tell


def rehearse_before_proposing(settings: Settings, problem: TrainingProblem, say: Say) -> Settings:
    """The settings with what a rehearsal chose; unchanged where they ask for none or know the step already.

    problem: the coordinator's, with public records and no party's. say: gets one line on what was done.
    """
    if not settings.clip.rehearse or settings.clip.step > 0:
        return settings
    units = list_declared_units(settings)
    reason = "nobody declared how many units the parties hold (data.units)"
    if units:
        plan = make_plan(settings, len(units), units, problem.rule)
        federation = Federation(settings, problem, plan, find_engine("reference", problem))
        reason = find_refusal(federation)
        if not reason:
            public = load_public_set(federation)
            facts = fit_facts(read_rehearsal_facts(federation), public)
            answer = recall_or_rehearse(facts, public=public, tell=_say_now_and_then(say))
            say(f"rehearsed before proposing, on declared facts only: {answer.candidate.describe()}")
            return choose_settings(federation, facts, answer)
    if settings.clip.rule != MOO.name:
        raise ConfigError(
            f"clip.rehearse = true, but nothing can be rehearsed: {reason}; declare data.units, or serve with the "
            "settings that `fulcrum rehearse` prints."
        )
    say(f"nothing was rehearsed, for {reason}; moo takes its first step by a formula")
    return settings.replace(clip={"rehearse": False})
