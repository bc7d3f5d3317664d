"""How held-out private records become bounded numbers that can be noised, and metrics again: one form per kind of task.

A form maps the model's outputs and the target of one record to integers [columns] whose L2 norm is at most `ONE`,
exactly. Their mean over a unit's records, divided by `ONE`, is what the unit adds to a release, so that taking the unit
away moves the release by at most 1. Everything else here is computed from the noised sums, the public number of units
and public settings.

| task | form | columns |
|---|---|---|
| classification, binary | `ClassCells` | counts of (label, prediction, bin of the score) |
| multilabel | `LabelCells` | the same of every label |
| regression | `ErrorSums` | absolute and squared errors, targets and their squares, clipped to task.low to task.high |
| tokens, next-token | `TokenSums` | counted tokens, right tokens, clipped negative log likelihood |
"""

from __future__ import annotations

import math

from fulcrum.data.tasks import Task
from fulcrum.errors import ConfigError
from fulcrum.privacy.scores.cells import CONFIDENCE_BINS, THRESHOLD_METRICS, ClassCells, LabelCells, choose_threshold
from fulcrum.privacy.scores.form import ONE, ScoreForm
from fulcrum.privacy.scores.sums import ErrorSums, TokenSums
from fulcrum.settings.schema import TaskSettings

__all__ = [
    "ONE",
    "THRESHOLD_METRICS",
    "ClassCells",
    "ErrorSums",
    "LabelCells",
    "ScoreForm",
    "TokenSums",
    "choose_threshold",
    "make_score_form",
]

BINARY_EDGES = (-6.0, -4.0, -2.5, -1.5, -0.8, -0.35, 0.0, 0.35, 0.8, 1.5, 2.5, 4.0, 6.0)
"""Edges between the bins of the positive class's score, as logits: finer where models are sure, since AUC ranks there.
The threshold is a further edge."""


def make_score_form(task: Task, settings: TaskSettings, length: int = 0) -> ScoreForm:
    """The form for a task with these settings; ConfigError for a task whose scores have no known bound.

    length: of the records' sequences, which is public.
    """
    if task.name == "regression":
        return _make_error_sums(task, settings)
    if task.sequence and task.name in ("tokens", "next-token"):
        return TokenSums(length, task.outputs, settings.ignored)
    if task.name == "multilabel":
        cells = ClassCells(2, _make_binary_edges(settings.threshold), settings.threshold)
        return LabelCells(task.outputs, cells, tuple(settings.class_weights))
    if not task.classes or task.sequence or task.target_dims:
        raise ConfigError(
            f"data.validation scores private records by bounded sums, and task {task.name!r} declares no bounds; hand "
            "over x_test and y_test that everybody may see, or leave data.validation at 0."
        )
    if task.classes > 2:
        return ClassCells(task.classes, tuple(k / CONFIDENCE_BINS for k in range(CONFIDENCE_BINS + 1)))
    threshold = settings.threshold if task.name == "binary" else 0.5
    return ClassCells(2, _make_binary_edges(threshold), threshold)


def _make_binary_edges(threshold: float) -> tuple[float, ...]:
    inner = {1 / (1 + math.exp(-edge)) for edge in BINARY_EDGES} | {threshold}
    return (0.0, *sorted(inner - {0.0, 1.0}), 1.0)


def _make_error_sums(task: Task, settings: TaskSettings) -> ErrorSums:
    low, high = settings.low, settings.high
    if low is None or high is None:
        raise ConfigError(
            "data.validation scores private targets by sums of clipped errors, and their range is not declared; set "
            "task.low and task.high from public knowledge, or hand over x_test and y_test that everybody may see."
        )
    if task.score not in ("rmse", "mae", "r2", "loss"):
        raise ConfigError(
            f"task.score = {task.score!r} cannot be computed from noised sums of private records; choose rmse, mae or "
            "r2."
        )
    scale = settings.scale or (high - low) / 2
    return ErrorSums(task.outputs, low, high, task.predict, settings.loss, scale)
