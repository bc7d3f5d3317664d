"""Values derived from settings alone: the number of local steps, the learning rate of a round."""

from __future__ import annotations

import math
from collections.abc import Callable

from fulcrum.settings.schema import Privacy, Settings, Train


def compute_local_steps(train: Train) -> int:
    """Number of local steps N per round: as given, or from epochs and the sampling rate."""
    return train.steps if train.steps > 0 else max(1, round(train.epochs / train.rate))


def get_evaluation_interval(settings: Settings) -> int:
    """Rounds between evaluations: `run.evaluate_every`; 0 is every round, or the last one alone where scores cost."""
    if settings.run.evaluate_every:
        return settings.run.evaluate_every
    return 1 if settings.privacy.evaluation_epsilon is None else settings.train.rounds


def count_evaluations(settings: Settings) -> int:
    """Rounds after which the model is evaluated: every so many rounds, and after the last."""
    whole, rest = divmod(settings.train.rounds, get_evaluation_interval(settings))
    return whole + (rest > 0)


WEIGHT_POWERS: dict[str, float] = {"examples": 1.0, "sqrt": 0.5, "uniform": 0.0}
"""The choices of train.weights: a party with n_k units has a weight in proportion to n_k to this power."""


def get_planned_unit(privacy: Privacy) -> str:
    """The unit of a plan without data: privacy.unit, where "auto" is example. With data, `prepare` has resolved it."""
    return "example" if privacy.unit == "auto" else privacy.unit


COST_FREE_SETTINGS: dict[str, tuple[str, ...]] = {
    "train": (
        *("lr", "schedule", "warmup", "decay_rounds", "decay", "weight_decay", "weights", "ema"),
        *("server", "server_lr", "server_momentum", "server_beta2", "server_eps", "combine", "trim"),
    ),
    "clip": (
        *("C0", "C_min", "C_max", "kappa", "balance", "growth", "reach", "rehearse", "rehearse_on", "step", "search"),
        *("eta_C", "beta", "phi", "rho_c", "shrink", "stability"),
    ),
}
"""Settings, by section, that do not affect the privacy cost of a release; all others are assumed to."""
DERIVABLE_SETTINGS: dict[str, tuple[str, ...]] = {
    section: tuple(name for name in names if name != "weights") for section, names in COST_FREE_SETTINGS.items()
}
"""Settings, by section, that change neither data, split, model nor plan."""

LR_SCHEDULES: dict[str, Callable[[Train, int], float]] = {
    "constant": lambda train, t: 1.0,
    "linear": lambda train, t: 1.0 - t / train.rounds,
    "cosine": lambda train, t: 0.5 * (1.0 + math.cos(math.pi * (t / train.rounds))),
    "step": lambda train, t: train.decay ** sum(t >= r for r in train.decay_rounds),
}
"""The choices of train.schedule: (training settings, round t) -> factor of the learning rate."""


def compute_learning_rate(train: Train, t: int) -> float:
    """Learning rate eta_t of round t (from 0)."""
    warm = min(1.0, (t + 1) / train.warmup) if train.warmup else 1.0
    return train.lr * warm * LR_SCHEDULES[train.schedule](train, t)
