"""From the answer of a rehearsal to the settings of the run."""

from __future__ import annotations

import dataclasses
import math

from torch import nn

from fulcrum.clipping.fixed import FIXED
from fulcrum.clipping.moo import MOO
from fulcrum.data.made_up import can_make_up, read_data_facts
from fulcrum.models.pretrain import ZERO_INIT_NAME
from fulcrum.runs.preparation import derive_federation
from fulcrum.runs.rehearsal.choice import Rehearsed
from fulcrum.runs.rehearsal.effort import WORK
from fulcrum.runs.rehearsal.facts import RehearsalFacts, find_default_step, read_rehearsal_facts
from fulcrum.runs.rehearsal.memory import ProgressFn, recall, recall_or_rehearse
from fulcrum.runs.rehearsal.public_set import fit_facts, load_public_set
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import Federation, make_model_facts


def find_refusal(federation: Federation, patient: bool = False) -> str:
    """Why this run is not rehearsed; "" where it can be. patient: however long it takes, or if the answer is known."""
    settings, problem = federation.settings, federation.problem
    if problem.rule not in (MOO, FIXED):
        return f"the rule is {problem.rule.name}"
    if federation.plan.central:
        return "the unit is the client"
    if not federation.plan.compute_noise_to_signal(1).direction:
        return "there is no noise"
    if settings.data.features != "none":
        return "features are computed from the data"
    if not settings.clip.rehearse_on and not can_make_up(read_data_facts(problem.dataset, problem.model)):
        return f"there is no made-up data for the task {problem.task.name!r}"
    if not settings.clip.rehearse_on and starts_from_learned_weights(federation):
        return "made-up data says little about weights that are learned already"
    minutes = 0.0 if patient else estimate_minutes(federation)
    if minutes > MOST_MINUTES and recall(_read_facts(federation).digest()) is None:
        return f"it would take about {minutes:.0f} minutes here (`fulcrum rehearse` takes them, and keeps the answer)"
    return ""


UNLEARNED_INITS = ("random", ZERO_INIT_NAME)
MOST_MINUTES = 10.0
"""The longest that a run waits for its rehearsal."""


def starts_from_learned_weights(federation: Federation) -> bool:
    """Whether the initial weights come from a file, from pretraining, or are much larger than random ones."""
    model = federation.settings.model
    if model.init not in UNLEARNED_INITS or model.name.startswith("transformers:"):
        return True
    return federation.model_given and make_model_facts(federation).larger > 1.0


def estimate_minutes(federation: Federation) -> float:
    """About how long a rehearsal takes on this machine."""
    per_minute = WORK / 2 if federation.problem.device.type == "cpu" else 20 * WORK
    return read_rehearsal_facts(federation).estimate_work() / per_minute


def _read_facts(federation: Federation) -> RehearsalFacts:
    """The facts of a run, with its public records where it has some."""
    return fit_facts(read_rehearsal_facts(federation), load_public_set(federation))


def wants_rehearsal(federation: Federation) -> bool:
    """Whether the settings ask for a rehearsal that is still to come."""
    return federation.settings.clip.rehearse and federation.settings.clip.step == 0


def describe_coming_rehearsal(federation: Federation) -> str:
    """One sentence for people where `apply_rehearsal` is about to take its time; else ""."""
    if not wants_rehearsal(federation) or find_refusal(federation):
        return ""
    if recall(_read_facts(federation).digest()) is not None:
        return ""
    return (
        "rehearsing on made-up records first, to find the step length at no privacy cost; the answer is kept, and "
        "--no-rehearsal leaves it out"
    )


def apply_rehearsal(
    federation: Federation, model: nn.Module | None = None, tell: ProgressFn | None = None
) -> Federation:
    """The federation with what a rehearsal chose: step, C0, learning rate, schedule, whether C is searched for.

    Unchanged where the settings ask for none (clip.rehearse), where the step is already known (clip.step: a run that
    goes on), and, with a warning, where a rehearsal is not possible. model: the network, where no settings name it.
    tell: called with the part that is done, 0 to 1, where it takes its time.
    """
    if not wants_rehearsal(federation):
        return federation
    refusal = find_refusal(federation)
    if refusal:
        return _add_warning(federation, f"nothing was rehearsed on made-up data (clip.rehearse): {refusal}.")
    public, facts = load_public_set(federation), _read_facts(federation)
    answer = recall_or_rehearse(facts, model, public, tell)
    chosen = derive_federation(federation, choose_settings(federation, facts, answer))
    return dataclasses.replace(chosen, rehearsed=answer.to_json())


def choose_settings(federation: Federation, facts: RehearsalFacts, answer: Rehearsed) -> Settings:
    """The settings of a run with the answer of its rehearsal."""
    candidate = answer.candidate
    if candidate.mode == "moo" and math.isclose(candidate.step, facts.default_step, rel_tol=1e-6):
        # moo as it is: its own first step for the run's exact noise, which the facts have rounded.
        exact = federation.plan.compute_noise_to_signal(facts.dim).direction
        candidate = dataclasses.replace(candidate, step=find_default_step(federation, exact))
    return candidate.apply(federation.settings, facts.steps)


def _add_warning(federation: Federation, warning: str) -> Federation:
    problem = federation.problem
    dataset = dataclasses.replace(problem.dataset, warnings=(*problem.dataset.warnings, warning))
    return dataclasses.replace(federation, problem=dataclasses.replace(problem, dataset=dataset))
