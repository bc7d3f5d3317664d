"""Classes of unequal frequency: weights in the loss or a shift of the logits, from shares that are declared.

The shares come from public knowledge (the prevalence of a disease, a census): counting private labels would be a
release.
"""

from __future__ import annotations

import math

from fulcrum.errors import ConfigError
from fulcrum.settings.schema import TaskSettings

IMBALANCE_CHOICES = ("none", "weights", "logits")
"""The choices of task.imbalance."""
Balance = tuple[tuple[float, ...], tuple[float, ...]]
"""Weights in the loss and shifts of the logits; empty for 1 and 0 each."""


def balance_classes(settings: TaskSettings, classes: int) -> Balance:
    """Weights [classes] or shifts [classes] by which classes count as if they were equally frequent."""
    weights = check_class_weights(settings, classes)
    shares = check_class_balance(settings, classes, whole=True)
    if settings.imbalance == "none":
        return weights, ()
    if settings.imbalance == "logits":
        return weights, tuple(math.log(share) for share in shares)
    return _refuse_two_weights(settings, tuple(1 / (classes * share) for share in shares)), ()


def balance_labels(settings: TaskSettings, labels: int) -> Balance:
    """The same for several binary labels: weights of the positives, or shifts, one per label."""
    weights = check_class_weights(settings, labels)
    shares = check_class_balance(settings, labels, whole=False)
    if settings.imbalance == "none":
        return weights, ()
    if settings.imbalance == "logits":
        return weights, tuple(math.log(share / (1 - share)) for share in shares)
    return _refuse_two_weights(settings, tuple((1 - share) / share for share in shares)), ()


def _refuse_two_weights(settings: TaskSettings, weights: tuple[float, ...]) -> tuple[float, ...]:
    if settings.class_weights:
        raise ConfigError(
            "task.class_weights and task.imbalance = 'weights' both weigh the classes; leave one of them out."
        )
    return weights


def check_class_balance(settings: TaskSettings, count: int, whole: bool) -> tuple[float, ...]:
    """The declared shares, one per class (whole: that add up to 1) or label; empty where none are declared."""
    shares = settings.class_balance
    if not shares:
        if settings.imbalance != "none":
            raise ConfigError(
                f"task.imbalance = {settings.imbalance!r} needs task.class_balance, the share of each of the {count} "
                f"{'classes' if whole else 'labels'} as publicly known; it is never counted in private labels."
            )
        return ()
    if len(shares) != count:
        raise ConfigError(f"task.class_balance has {len(shares)} numbers; the task needs {count}.")
    if not all(0 < share < 1 for share in shares) or (whole and abs(sum(shares) - 1) > 0.01):
        rule = "shares between 0 and 1 that add up to 1" if whole else "shares between 0 and 1"
        raise ConfigError(f"task.class_balance = {list(shares)} must hold {rule}.")
    return tuple(float(share) for share in shares)


def check_class_weights(settings: TaskSettings, count: int) -> tuple[float, ...]:
    """The declared weights, one per class, each a finite number above 0; empty for 1 each."""
    weights = settings.class_weights
    if weights and len(weights) != count:
        raise ConfigError(f"task.class_weights has {len(weights)} numbers; the task needs {count}, one per class.")
    if not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(f"task.class_weights = {list(weights)} must hold finite numbers greater than 0.")
    return tuple(float(weight) for weight in weights)
