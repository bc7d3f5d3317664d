"""What follows from settings alone: the number of local steps, the learning rate of a round."""

from __future__ import annotations

import math

from fulcrum.settings.schema import Train


def local_steps(train: Train) -> int:
    """N, the local steps of a round: as given, or from epochs and the sampling rate."""
    return train.steps if train.steps > 0 else max(1, round(train.epochs / train.rate))


def learning_rate(train: Train, t: int) -> float:
    """eta_t for round t (from 0)."""
    warm = min(1.0, (t + 1) / train.warmup) if train.warmup else 1.0
    progress = t / train.rounds
    shapes = {
        "constant": lambda: 1.0,
        "linear": lambda: 1.0 - progress,
        "cosine": lambda: 0.5 * (1.0 + math.cos(math.pi * progress)),
        "step": lambda: train.decay ** sum(t >= r for r in train.decay_rounds),
    }
    return train.lr * warm * shapes[train.schedule]()
