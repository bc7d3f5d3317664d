"""The plan of scoring private held-out records: whether it is paid, in which form, and from which accounts."""

from __future__ import annotations

import torch

from fulcrum.data import Dataset
from fulcrum.data.records import Records
from fulcrum.errors import ConfigError
from fulcrum.privacy.evaluation import HELD_OUT_NAME, EvaluationPlan, HeldOutAccount, calibrate_evaluation
from fulcrum.privacy.scores import ScoreForm, make_score_form
from fulcrum.settings.derived import count_evaluations
from fulcrum.settings.schema import Settings, TaskSettings


def check_private_evaluation(settings: Settings, dataset: Dataset) -> None:
    """Raise ConfigError unless the settings say how scores of private held-out records are paid."""
    if settings.privacy.unit == "client":
        raise ConfigError(
            "data.validation with privacy.unit = 'client' would score a party's held-out records, and no noise here "
            "hides a whole party's; hand over x_test and y_test that everybody may see."
        )
    if settings.privacy.evaluation_epsilon is None:
        raise ConfigError(
            f"data.validation = {settings.data.validation:g} holds out private records of {dataset.name}, and scoring "
            "them is a release: set privacy.evaluation_epsilon, or hand over x_test and y_test that everybody may see."
        )
    find_score_form(dataset)


def find_score_form(dataset: Dataset) -> ScoreForm:
    """How this data set's task is scored; ConfigError where its scores have no known bound."""
    targets = dataset.sample.y
    length = int(targets.shape[1]) if dataset.task.sequence else 0
    return make_score_form(dataset.task, dataset.task_settings or TaskSettings(), length)


def plan_evaluation(settings: Settings, dataset: Dataset) -> EvaluationPlan | None:
    """How private held-out records will be scored; None where there are none."""
    held, epsilon = dataset.held_out, settings.privacy.evaluation_epsilon
    if held is None or epsilon is None:
        return None
    releases, terms = count_evaluations(settings), settings.privacy
    return EvaluationPlan(
        epsilon=epsilon,
        delta=terms.delta,
        accountant=terms.accountant,
        sigma=calibrate_evaluation(epsilon, terms.delta, terms.accountant, releases),
        releases=releases,
        form=find_score_form(dataset),
        accounts=list_held_out_accounts(dataset, held, terms.unit),
    )


def list_held_out_accounts(dataset: Dataset, held: Records, unit: str) -> tuple[HeldOutAccount, ...]:
    """One account per named party, or one for all: whose records they are pays for their scores."""
    parties = [(0, HELD_OUT_NAME, torch.arange(len(held)))]
    if held.party is not None:
        parties = [
            (k, f"{name}/{HELD_OUT_NAME}", torch.nonzero(held.party == k).flatten())
            for k, name in enumerate(dataset.party_names)
        ]
    found = []
    for k, name, rows in parties:
        if not len(rows):
            continue
        if unit == "person" and held.person is not None:
            persons, unit_of = torch.unique(held.person[rows], return_inverse=True)
            found.append(HeldOutAccount(name, k, rows, unit_of, len(persons)))
        else:
            found.append(HeldOutAccount(name, k, rows, torch.arange(len(rows)), len(rows)))
    return tuple(found)
