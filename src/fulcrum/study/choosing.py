"""Chooses settings from finished trials: the best of an equal number per method, on held-out data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fulcrum.study.experiment import Experiment, list_tuning_jobs
from fulcrum.study.job import StudyJob
from fulcrum.study.records import get_common_score, get_score_value
from fulcrum.study.search import ChosenSettings, find_best_trial, write_choices
from fulcrum.study.store import RunRecord

CHOSEN_FILE_NOTE = """Settings chosen for the tables; written by `fulcrum study choose`, from the trials of search.toml.
validation_score is that of one run on the held-out part of the training data, `trials` how many were
compared, `worst` the score of the worst of them. The test data played no part. Privacy spent on
trying is not in the table's epsilon."""


def choose_settings(
    experiment: Experiment,
    done: Mapping[str, RunRecord],
    protocol: bool = False,
    at: Sequence[float] = (),
    partial: bool = False,
) -> tuple[list[ChosenSettings], dict[str, int]]:
    """(the choice of every finished cell, how many trials each unfinished cell still lacks).

    A cell with missing trials gets no choice, so that every method has the same number; with `partial`
    the finished trials are used, and the choice records their number.
    """
    cells: dict[str, list[StudyJob]] = {}
    for job in list_tuning_jobs(experiment, protocol, at):
        cells.setdefault(job.cell, []).append(job)
    choices, lacking = [], {}
    for cell, jobs in cells.items():
        # Two trials of a method may be the same run; then both have its result.
        tried = [(job.trial or 0, get_score_value(done[job.id])) for job in jobs if job.id in done]
        score = get_common_score(done[job.id] for job in jobs if job.id in done)
        if len(tried) < len(jobs):
            lacking[cell] = len(jobs) - len(tried)
        if not tried or (len(tried) < len(jobs) and not partial):
            continue
        trial, value = find_best_trial(tried, score)
        first = jobs[0]
        words = experiment.search.make_row_trials(first.row, first.dataset, clipping=not protocol)[trial]
        choices.append(
            ChosenSettings(
                first.dataset,
                first.row,
                trial,
                trials=len(tried),
                validation_score=round(value, 5),
                epsilon=first.epsilon,
                protocol=protocol,
                settings=words,
                worst=round(score.worst(found for _, found in tried), 5),
                score=score.name,
            )
        )
    return choices, lacking


def save_choices(experiment: Experiment, new: Sequence[ChosenSettings]) -> Experiment:
    """The experiment with the new choices replacing old ones, written to chosen.toml."""

    def key(choice: ChosenSettings) -> tuple[object, ...]:
        return (choice.dataset, choice.epsilon, choice.row, choice.protocol)

    everything = {key(choice): choice for choice in [*experiment.choices, *new]}
    write_choices(experiment.chosen_path, everything.values(), CHOSEN_FILE_NOTE)
    return replace(experiment, choices=tuple(everything.values()))
