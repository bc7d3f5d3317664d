"""The tasks that Fulcrum knows, made from settings and targets: `make_task` makes every `Task`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fulcrum.data.tasks import losses
from fulcrum.data.tasks.arrays import (
    DTYPE_KIND_NAMES,
    AnyArray,
    check_class_range,
    check_whole_numbers,
    to_numpy_array,
)
from fulcrum.data.tasks.balance import balance_classes, balance_labels
from fulcrum.data.tasks.metrics import METRICS, Metric, MetricContext
from fulcrum.data.tasks.task import Task
from fulcrum.errors import ConfigError, DataError, ModelError
from fulcrum.settings.registry import Registry, find_nearest_name
from fulcrum.settings.schema import TaskSettings

TaskFactory = Callable[[TaskSettings, Sequence[AnyArray]], Task]
"""From settings and target arrays (training, test; any of them may be missing) to a task."""

TASKS: Registry[TaskFactory | Task] = Registry("task.name", noun="task", entry_points="fulcrum.tasks")
"""Tasks by name. Your own: package.module:task, a Task or a function (settings, targets) -> Task."""


def make_task(settings: TaskSettings, targets: Sequence[AnyArray]) -> Task:
    """The task that the settings name, for these target arrays; "auto" is classification."""
    made = TASKS.find("classification" if settings.name == "auto" else settings.name)
    if isinstance(made, Task):
        return _refuse_other_metrics(made, settings)
    task = made(settings, targets)
    if not isinstance(task, Task):
        raise ConfigError(f"task.name = {settings.name!r} gave a {type(task).__name__}, not a fulcrum Task.")
    return dataclasses.replace(task, options=dataclasses.astuple(settings))


def _refuse_other_metrics(task: Task, settings: TaskSettings) -> Task:
    """A ready-made task brings its own metrics and score: settings that name others are refused, not ignored."""
    wanted = [*settings.metrics, *([settings.score] if settings.score and settings.score != task.score else [])]
    missing = [name for name in wanted if name not in task.metrics]
    if missing:
        raise ConfigError(
            f"task.name = {settings.name!r} brings its own metrics ({', '.join(task.metrics)}), and {missing[0]!r} is "
            "not among them; add it to the task."
        )
    return dataclasses.replace(task, score=settings.score) if settings.score else task


def task_from_loss(
    loss: losses.LossFn,
    outputs: int = 1,
    *,
    name: str = "own",
    metrics: Mapping[str, Metric] | None = None,
    score: str = "loss",
    predict: Callable[[Tensor], Tensor] = lambda outputs: outputs,
    target_dims: int = 0,
    sequence: bool = False,
) -> Task:
    """Your own task from its loss: outputs [..., O] and targets -> one loss per example [...].

    The loss always sees outputs [B, O] (sequence: [B, L, O]). Gradients come from autograd. Targets are not changed:
    integers, or finite numbers as float32. metrics: by name, beside "loss". For more control, make a `Task`.
    """
    of_example = 2 if sequence else 1  # dimensions of one example's outputs

    def in_one_batch(found: Tensor, targets: Tensor) -> Tensor:
        leading = found.shape[: found.dim() - of_example]  # dimensions of runs and clients, before the examples
        if len(leading) == 1:
            return loss(found, targets)
        last = len(leading) - 1
        values = loss(found.flatten(0, last), targets.flatten(0, last))
        if values.numel() != math.prod(leading):
            raise ModelError(f"loss must give one value an example, but gave the shape {list(values.shape)}.")
        return values.view(leading)

    context = MetricContext(outputs, target_dims, in_one_batch, predict, sequence=sequence)
    chosen = {**(metrics or {}), "loss": METRICS.find("loss")(context)}

    def check(which: str, value: object) -> Tensor:
        array = to_numpy_array(which, value)
        if array.dtype.kind not in "biuf" or array.ndim < 1:
            raise DataError(
                f"{which} holds {DTYPE_KIND_NAMES.get(array.dtype.kind, str(array.dtype))}; targets must be numbers."
            )
        if array.dtype.kind in "biu":
            return torch.from_numpy(np.array(array, dtype=np.int64))
        numbers = torch.from_numpy(np.array(array, dtype=np.float32))
        if not bool(torch.isfinite(numbers).all()):
            raise DataError(f"{which} holds NaN or infinite values; every target must be a finite 32-bit number.")
        return numbers

    return Task(name, outputs, in_one_batch, chosen, score, predict, check, None, target_dims, sequence)


def choose_metrics(
    settings: TaskSettings, own: Sequence[str], score: str, context: MetricContext
) -> tuple[dict[str, Metric], str]:
    """The task's own metrics and those that the settings add, by name, and the name of the score."""
    names = dict.fromkeys([*own, *settings.metrics, "loss"])
    metrics = {name: METRICS.find(name)(context) for name in names}
    wrong = [name for name, metric in metrics.items() if not isinstance(metric, Metric)]
    if wrong:
        kind = type(metrics[wrong[0]]).__name__
        raise ConfigError(
            f"task.metrics: {wrong[0]!r} gave a {kind}; a metric's function must return a fulcrum Metric."
        )
    chosen = settings.score or score
    if chosen not in metrics:
        near = find_nearest_name(chosen, metrics)
        hint = f"did you mean {near!r}?" if near else f"choose one of {', '.join(metrics)}."
        raise ConfigError(f"task.score = {chosen!r} is not among this task's metrics; {hint}")
    return metrics, chosen


# --- classes --------------------------------------------------------------------------------------


@TASKS.register("classification")
def make_classification(settings: TaskSettings, targets: Sequence[AnyArray]) -> Task:
    """One of several classes: targets [n] are 0, 1, ..., classes - 1; one logit per class."""
    classes = count_classes(settings, targets)
    weights, shift = balance_classes(settings, classes)
    loss, slopes = losses.shift_logits(losses.make_cross_entropy(weights), shift)

    def predict(outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=-1)

    context = MetricContext(classes, 0, loss, predict, lambda o: o.float().softmax(dim=-1), settings.threshold)
    yes_and_no = ("auc", "average_precision", "f1") if classes == 2 else ()
    metrics, score = choose_metrics(settings, ("accuracy", "balanced_accuracy", *yes_and_no), "accuracy", context)

    def check(name: str, value: object) -> Tensor:
        labels = check_whole_numbers(name, value, 1)
        return check_class_range(name, labels, classes)

    def constant(labels: Tensor, counts: Tensor) -> Tensor:
        return count_classes_of(labels, counts, classes).log().float()

    return Task(
        "classification", classes, loss, metrics, score, predict, check, slopes, classes=classes, constant=constant
    )


@TASKS.register("binary")
def make_binary(settings: TaskSettings, targets: Sequence[AnyArray]) -> Task:
    """Binary classification: targets [n] are 0 or 1; one logit. class_weights: weights of 0 and of 1."""
    weights, shift = balance_classes(settings, 2)
    loss, slopes = losses.shift_logits(losses.make_binary_cross_entropy(weights), shift[1:] and (shift[1] - shift[0],))

    def chances(outputs: Tensor) -> Tensor:
        yes = torch.sigmoid(outputs[..., 0].float())
        return torch.stack([1 - yes, yes], dim=-1)

    def predict(outputs: Tensor) -> Tensor:
        return (torch.sigmoid(outputs[..., 0].float()) >= settings.threshold).long()

    context = MetricContext(1, 0, loss, predict, chances, settings.threshold)
    at_threshold = ("accuracy", "balanced_accuracy", "f1", "sensitivity", "specificity")
    own = (*at_threshold, "auc", "average_precision", "brier", "calibration_error", "log_loss")
    metrics, score = choose_metrics(settings, own, "auc", context)

    def check(name: str, value: object) -> Tensor:
        return check_class_range(name, check_whole_numbers(name, value, 1), 2)

    def constant(labels: Tensor, counts: Tensor) -> Tensor:
        yes = count_classes_of(labels, counts, 2)[1]
        below = settings.threshold - 1e-6  # the more frequent class is predicted, wherever the threshold is
        return torch.logit(yes.clamp_min(settings.threshold) if yes >= 0.5 else yes.clamp_max(below), 1e-6).float()[
            None
        ]

    return Task("binary", 1, loss, metrics, score, predict, check, slopes, classes=2, constant=constant)


@TASKS.register("multilabel")
def make_multilabel(settings: TaskSettings, targets: Sequence[AnyArray]) -> Task:
    """Several binary labels per example: targets [n, labels] are 0 or 1; one logit per label."""
    labels = settings.classes or next((array.shape[1] for array in targets if array.ndim == 2), 0)
    if not labels:
        shapes = ", ".join(str(list(array.shape)) for array in targets) or "none"
        raise DataError(f"task.name = 'multilabel' needs targets of shape [n, labels], and they are {shapes}.")
    weights, shift = balance_labels(settings, labels)
    loss, slopes = losses.shift_logits(losses.make_multilabel_cross_entropy(weights), shift)

    def predict(outputs: Tensor) -> Tensor:
        return (torch.sigmoid(outputs.float()) >= settings.threshold).long()

    context = MetricContext(labels, 1, loss, predict, lambda o: torch.sigmoid(o.float()), settings.threshold)
    metrics, score = choose_metrics(settings, ("accuracy", "auc", "f1", "log_loss"), "auc", context)

    def check(name: str, value: object) -> Tensor:
        answers = check_whole_numbers(name, value, 2)
        if answers.shape[1] != labels:
            raise DataError(f"{name} has {answers.shape[1]} labels per record; the task has {labels}.")
        return check_class_range(name, answers, 2)

    def constant(answers: Tensor, counts: Tensor) -> Tensor:
        return torch.logit((counts.double() @ answers.double()) / counts.sum().clamp_min(1e-12), 1e-6).float()

    return Task("multilabel", labels, loss, metrics, score, predict, check, slopes, target_dims=1, constant=constant)


def count_classes_of(labels: Tensor, counts: Tensor, classes: int) -> Tensor:
    """The share of each class [classes], float64, at least 1e-6; labels [n] count so many times [n]."""
    found = torch.zeros(classes, dtype=torch.float64).index_add_(0, labels.long().cpu(), counts.double().cpu())
    return (found / found.sum().clamp_min(1e-12)).clamp_min(1e-6)


def count_classes(settings: TaskSettings, targets: Sequence[AnyArray]) -> int:
    """The number of classes that the settings declare, else the largest label plus one."""
    if settings.classes:
        if settings.classes < 2:
            raise DataError(f"classes = {settings.classes}; at least 2 are needed.")
        return settings.classes
    labels = [check_whole_numbers("y", array, 1) for array in targets if array.size]
    most = max((int(array.max()) for array in labels), default=0)
    if min((int(array.min()) for array in labels), default=0) < 0:
        least = min(int(array.min()) for array in labels)
        raise DataError(f"the labels hold {least}; they must be integers from 0 to classes - 1.")
    if most == 0:
        raise DataError("all labels are 0; at least two classes are needed (or say how many with classes).")
    # A model with one output per id would not fit in memory; say so before it is built.
    if most >= max(1000, sum(map(len, labels))):
        raise DataError(f"the labels go up to {most}, beyond the number of records; number the classes 0, 1, 2, ...")
    return most + 1


# --- numbers --------------------------------------------------------------------------------------


@TASKS.register("regression")
def make_regression(settings: TaskSettings, targets: Sequence[AnyArray]) -> Task:
    """Regression: finite targets [n] or [n, k]; one output per target. Public bounds and scale are settings."""
    shapes = [array.shape[1:] for array in targets]
    if any(len(shape) > 1 for shape in shapes):
        raise DataError("task.name = 'regression' needs targets of shape [n] or [n, k].")
    several = any(len(shape) == 1 for shape in shapes)
    count = next((shape[0] for shape in shapes if shape), 1) if several else settings.classes or 1
    low, high = settings.low, settings.high
    if (low is not None and high is not None and low >= high) or not all(
        bound is None or math.isfinite(bound) for bound in (low, high)
    ):
        raise ConfigError(f"task.low = {low} and task.high = {high} must be finite numbers, low below high.")
    scale, offset, notes = settings.scale, settings.offset, []
    if scale == 0 and low is not None and high is not None:
        scale, offset = (high - low) / 2, (high + low) / 2
    elif scale == 0:
        scale = 1.0
        notes.append(
            "The targets' size is not declared, so the model learns them as they are (task.scale = 1); declare "
            "task.low and task.high, or task.scale, from public knowledge."
        )
    loss, slopes = losses.make_regression_loss(settings.loss, scale, offset, settings.huber_width)

    def predict(outputs: Tensor) -> Tensor:
        found = outputs.float() * scale + offset
        return found if several else found.squeeze(-1)

    context = MetricContext(count, int(several), loss, predict)
    metrics, score = choose_metrics(settings, ("rmse", "mae", "r2"), "rmse", context)

    def check(name: str, value: object) -> Tensor:
        array = to_numpy_array(name, value)
        if array.dtype.kind not in "biuf":
            held = DTYPE_KIND_NAMES.get(array.dtype.kind, str(array.dtype))
            raise DataError(f"{name} holds {held}; the targets of a regression must be real numbers.")
        if array.ndim != 1 + several or (several and array.shape[1] != count):
            wanted = f"[n, {count}]" if several else "[n]"
            raise DataError(f"{name} has shape {list(array.shape)}; the targets must be {wanted}.")
        with np.errstate(over="ignore"):
            numbers = torch.from_numpy(np.array(array, dtype=np.float32))
        if not bool(torch.isfinite(numbers).all()):
            raise DataError(f"{name} holds NaN or infinite values; every target must be a finite 32-bit number.")
        return numbers.clamp(low, high) if low is not None or high is not None else numbers

    def constant(wanted: Tensor, counts: Tensor) -> Tensor:
        mean = counts.double() @ wanted.double().reshape(len(wanted), -1) / counts.sum().clamp_min(1e-12)
        return ((mean - offset) / scale).float()

    return Task(
        *("regression", count, loss, metrics, score, predict, check, slopes, int(several)),
        notes=tuple(notes),
        constant=constant,
    )


# --- tokens ---------------------------------------------------------------------------------------


@TASKS.register("tokens")
def make_token_task(settings: TaskSettings, targets: Sequence[AnyArray]) -> Task:
    """A token per position: targets [n, L] are 0, ..., vocabulary - 1, or `task.ignored`; outputs [n, L, vocabulary].

    task.classes declares the size of the vocabulary.
    """
    ignored, vocabulary = settings.ignored, settings.classes
    if not vocabulary:
        most = max((int(array.max()) for array in targets if array.size), default=0)
        vocabulary = most + 1
    if vocabulary < 2:
        raise DataError("the vocabulary has fewer than 2 tokens; declare its size with task.classes.")
    loss, slopes = losses.make_token_cross_entropy(ignored)

    def predict(outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=-1)

    context = MetricContext(vocabulary, 1, loss, predict, ignored=ignored, sequence=True)
    metrics, score = choose_metrics(settings, ("accuracy", "perplexity"), "perplexity", context)

    def check(name: str, value: object) -> Tensor:
        found = check_whole_numbers(name, value, 2)
        counted = found[found != ignored]
        if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= vocabulary):
            bad = int(counted.max()) if int(counted.max()) >= vocabulary else int(counted.min())
            raise DataError(f"{name} holds token {bad}; tokens must lie in 0..{vocabulary - 1}, or be {ignored}.")
        return found

    def constant(wanted: Tensor, counts: Tensor) -> Tensor:
        kept = wanted != ignored
        return count_classes_of(wanted[kept], counts[:, None].expand_as(wanted)[kept], vocabulary).log().float()

    return Task(
        *("tokens", vocabulary, loss, metrics, score, predict, check, slopes),
        target_dims=1,
        sequence=True,
        constant=constant,
    )


@TASKS.register("next-token")
def make_next_token(settings: TaskSettings, targets: Sequence[AnyArray]) -> Task:
    """The next token of a sequence x [n, L]: without given targets they are x shifted by one, the last ignored."""
    return make_token_task(settings, targets)


def shift_tokens(x: Tensor, ignored: int) -> Tensor:
    """Targets of a next-token task from its inputs [n, L]: the target of a position is the next token."""
    return torch.cat([x[:, 1:], torch.full_like(x[:, :1], ignored)], dim=1).long()
