"""From the answer of a rehearsal to the settings of the run."""

from __future__ import annotations

import dataclasses

from torch import nn

from fulcrum.clipping.fixed import FIXED
from fulcrum.clipping.moo import MOO
from fulcrum.data.made_up import can_make_up, read_data_facts
from fulcrum.runs.preparation import derive_federation
from fulcrum.runs.rehearsal.facts import read_rehearsal_facts
from fulcrum.runs.rehearsal.memory import recall_or_rehearse
from fulcrum.runs.rehearsal.public_set import fit_facts, load_public_set
from fulcrum.training.federation import Federation


def find_refusal(federation: Federation) -> str:
    """Why this run is not rehearsed; "" where it can be."""
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
    return ""


def apply_rehearsal(federation: Federation, model: nn.Module | None = None) -> Federation:
    """The federation with what a rehearsal chose: step, C0, learning rate, schedule, whether C is searched for.

    Unchanged where the settings ask for none (clip.rehearse), where the step is already known (clip.step: a run that
    goes on), and, with a warning, where a rehearsal is not possible. model: the network, where no settings name it.
    """
    clip = federation.settings.clip
    if not clip.rehearse or clip.step > 0:
        return federation
    refusal = find_refusal(federation)
    if refusal:
        return _add_warning(federation, f"clip.rehearse = true, but nothing was rehearsed: {refusal}.")
    public = load_public_set(federation)
    facts = fit_facts(read_rehearsal_facts(federation), public)
    answer = recall_or_rehearse(facts, model, public)
    return derive_federation(federation, answer.candidate.apply(federation.settings, facts.steps))


def _add_warning(federation: Federation, warning: str) -> Federation:
    problem = federation.problem
    dataset = dataclasses.replace(problem.dataset, warnings=(*problem.dataset.warnings, warning))
    return dataclasses.replace(federation, problem=dataclasses.replace(problem, dataset=dataset))
