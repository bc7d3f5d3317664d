"""The statement's sentences: the guarantee, its assumptions, composition, and warnings."""

from __future__ import annotations

from collections.abc import Mapping

from fulcrum.clipping.rule import ClipRule
from fulcrum.models.pretrain import SYNTHETIC_INIT_NAME
from fulcrum.privacy.plan import Plan
from fulcrum.privacy.statement.units import find_unit_texts
from fulcrum.settings.schema import Settings

RANDOMNESS_TEXTS = {
    "secure": (
        "Sampling and noise come from the operating system's entropy; nothing can be replayed. The guarantee relies "
        "on that entropy."
    ),
    "seeded": (
        "Sampling and noise come from a seed. Whoever knows the seed can subtract the noise: epsilon holds only while "
        "the seed is secret. A run whose settings and seed are published is a simulation and protects nobody."
    ),
    "recorded": "Sampling and noise were replayed from a recording: this is a test and protects nobody.",
}
SCOPE_TEXTS = {
    "run": "This run only. Whatever else was released about the same data, before or after, adds to it.",
    "ledger": (
        "All runs on record in this ledger, this one included; a guarantee only if each of them used a sound rule. "
        "Whatever was released outside the ledger adds to it."
    ),
}


def guarantee_level(plan: Plan, rule: ClipRule) -> str:
    """Whether epsilon is a guarantee: "yes", "assumed", "nominal" or "none"."""
    if not rule.private:
        return "none"
    if not rule.sound:
        return "nominal"
    return "assumed" if plan.shares_noise else "yes"


def guarantee_sentence(plan: Plan, rule: ClipRule, epsilons: Mapping[str, float], mode: str) -> str:
    """The statement's main sentence. epsilons: the largest of any party, by accountant. mode: of the randomness."""
    if not rule.private:
        return "There is no privacy guarantee: the updates left the parties without noise."
    first, *others = epsilons
    beside = ", ".join(f"{epsilons[name]:.4g} by {name.upper()}" for name in others)
    numbers = f"epsilon = {epsilons[first]:.4g} ({first.upper()}; {beside}), delta = {plan.delta:g}"
    if not rule.sound:
        return (
            f"NOT A GUARANTEE. The rule {rule.name!r} sets the clipping norm from raw private values, so {numbers} is "
            "nominal: it is what the noise would give if C were public, and what was released may reveal more."
        )
    short = find_unit_texts(plan.unit).short
    if plan.shares_noise:
        return (
            f"UNDER AN ASSUMPTION ONLY: if the server saw nothing but the sum of all {plan.parties} parties' "
            f"updates, and no party colluded, each {short} would have {numbers}, while the seed is secret. That "
            "secure aggregation is SIMULATED: it is not implemented, and each single update is under-noised and not "
            "private by itself."
        )
    if mode != "secure":
        return f"Each {short} has {numbers}, only while the seed is secret (see Randomness)."
    return f"Each {short} has {numbers}."


def composition_sentence(plan: Plan, rule: ClipRule) -> list[str]:
    """How parties and records add up."""
    if not rule.private:
        return ["Nothing adds up: there is no guarantee for any record."]
    return list(find_unit_texts(plan.unit, plan.aggregation).adds_up)


def collect_warnings(settings: Settings, plan: Plan, rule: ClipRule, mode: str, finished: bool) -> list[str]:
    """Warnings about the plan, the settings and the progress of the run."""
    found = list(plan.warnings)
    if not finished:
        found.append("The run is not finished: this statement covers what has been reserved so far.")
    if mode != "secure" and rule.private:
        found.append(f"The randomness is {mode}: for real data use privacy.randomness = secure.")
    if settings.model.init not in ("random", SYNTHETIC_INIT_NAME):
        what = "weights" if settings.model.coordinates == "plain" else "weights and facts about layers"
        found.append(
            f"Training starts from the {what} in {settings.model.init}, which are taken to be public. If private data "
            "went into them, what that training cost adds to this epsilon."
        )
    if settings.run.precision != "float32" and settings.run.engine in ("auto", "stacked"):
        found.append(
            f"run.precision = {settings.run.precision} rounds matrix products: clipping keeps a margin that held in "
            "every test, but the bound on a contribution is proved for float32 only. For simulations."
        )
    if settings.run.diagnostics:
        found.append("Non-private diagnostics were on: keep them inside the party, or turn run.diagnostics off.")
    return found
