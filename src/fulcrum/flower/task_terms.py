"""The task that coordinator and parties agree on: the settings that decide the loss, and their fingerprint.

Parties train and never evaluate, so what only judges predictions (metrics, score, threshold) is not agreed on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

from fulcrum.data import Dataset
from fulcrum.data.tasks import TASKS
from fulcrum.errors import ConfigError
from fulcrum.settings.schema import TaskSettings


def training_settings(settings: TaskSettings, classes: int = 0) -> TaskSettings:
    """The settings that decide the loss, with "auto" as classification; classes: the number where they name none."""
    name = "classification" if settings.name == "auto" else settings.name
    default = TaskSettings()
    known = 0 if name == "regression" else classes  # as in from_arrays: a regression has no classes to count
    return dataclasses.replace(
        settings,
        name=name,
        classes=settings.classes or known,
        metrics=default.metrics,
        score=default.score,
        threshold=default.threshold,
    )


class TaskNotDeclared(ConfigError):
    """A task leaves open what a party would have to count in its own labels."""


COUNTED_TASKS = frozenset({"classification", "multilabel", "tokens", "next-token"})
"""Tasks whose number of outputs would be counted in the targets if it were not declared."""


def check_declared(agreed: TaskSettings) -> None:
    """Raises TaskNotDeclared where a party would have to count the classes in its own labels, which are private."""
    if agreed.name in COUNTED_TASKS and agreed.classes < 1:
        raise TaskNotDeclared(
            f"terms: classes is not declared; say the number of classes (or tokens) of the {agreed.name} from public "
            "knowledge, as classes = N in the terms or --classes N: it is never counted in private labels."
        )


def declare_task(dataset: Dataset) -> TaskSettings:
    """The settings by which every party builds the data set's task, with the number of classes or outputs written out.

    Raises ConfigError where the data bring a task that no party can find by a name.
    """
    task, settings = dataset.task, dataset.task_settings
    if settings is not None and settings.name == "auto":
        settings = dataclasses.replace(settings, name=task.name)
    if settings is None or (":" not in settings.name and settings.name not in TASKS.names()):
        raise ConfigError(
            f"{dataset.name} brings a task of its own, {task.name!r}, which parties cannot build; set task.name = "
            "package.module:task, a task that every party has installed."
        )
    classes = task.classes or settings.classes or (task.outputs if task.outputs > 1 else 0)
    return training_settings(dataclasses.replace(settings, classes=classes))


def same_task(asked: TaskSettings, agreed: TaskSettings) -> bool:
    """Whether both decide the same loss; a number of classes that one side leaves open (0) fits any."""
    one, other = training_settings(asked), training_settings(agreed)
    left_open = not (one.classes and other.classes)
    return one == (dataclasses.replace(other, classes=one.classes) if left_open else other)


def task_fingerprint(dataset: Dataset) -> str:
    """16 hexadecimal digits that change when the loss, the number of outputs or the targets' dimensions do."""
    task = dataset.task
    words = [dataclasses.asdict(declare_task(dataset)), task.outputs, task.target_dims, task.sequence]
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:16]
