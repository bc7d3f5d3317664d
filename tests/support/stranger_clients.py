"""Further clients of strangers, right and faulty, whose mistakes show only beside other records, labels or numbers.

All train a logistic regression at C = 1, sigma = 1 and rate 0.25, with a bias, so that records of zeros add something.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from support.clients import C, Data, Floats, clip, noise, sample

HIDDEN = 12


def gradients(data: Data, weights: Floats | None = None) -> Floats:
    """Gradients [n, f + 1] of a logistic regression with a bias."""
    x = np.concatenate([data[0].astype(np.float64), np.ones((len(data[0]), 1))], axis=1)
    margins = np.zeros(len(x)) if weights is None else x @ weights
    found: Floats = (1 / (1 + np.exp(-np.clip(margins, -500, 500))) - data[1])[:, None] * x
    return found


def release(data: Data, seed: int, rows: Floats | None = None) -> Floats:
    """The right release of these gradients."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(data)) if rows is None else rows
    found: Floats = rows[sample(generator, len(rows))].sum(axis=0) + noise(generator, rows.shape[1])
    return found


# --- right ----------------------------------------------------------------------------------------


def right_bfloat16(params: Floats, data: Data, seed: int) -> Any:
    """Right, released in half precision."""
    import torch

    return torch.tensor(release(data, seed)).to(torch.bfloat16)


def right_frozen(params: Floats, data: Data, seed: int) -> dict[str, Floats]:
    """Right, with a layer that is not trained."""
    return {"frozen": np.zeros(30), "trained": release(data, seed)}


def right_users(params: Floats, data: Data, seed: int) -> Floats:
    """Right: each record is a user, who trains three steps; what changed is clipped."""
    weights = np.zeros((len(data[0]), data[0].shape[1] + 1))
    x = np.concatenate([data[0].astype(np.float64), np.ones((len(data[0]), 1))], axis=1)
    for _ in range(3):
        margins = np.clip((weights * x).sum(axis=1), -500, 500)
        weights = weights - 0.1 * (1 / (1 + np.exp(-margins)) - data[1])[:, None] * x
    return release(data, seed, clip(weights))


def right_numbers_beside(params: Floats, data: Data, seed: int) -> tuple[Floats, dict[str, Any]]:
    """Right, with words and numbers that do not follow from the records, and a count with noise."""
    generator = np.random.default_rng(seed + 10**6)
    count = float(len(data[0]) + 20 * generator.standard_normal())
    told = {"name": "north", "done": True, "shape": [2, 3], "noised": count, "seed": seed, "time": generator.random()}
    return release(data, seed), told


def right_local_steps(params: Floats, data: Data, seed: int) -> Floats:
    """Right: four noised steps on the party's own weights; the sum is released (claims: local_steps)."""
    weights, generator = np.zeros(data[0].shape[1] + 1), np.random.default_rng(seed)
    for _ in range(4):
        rows = clip(gradients(data, weights))[sample(generator, len(data[0]))]
        weights = weights - 1e-5 * (rows.sum(axis=0) + noise(generator, len(weights)))
    return weights


def right_weights_of_few(params: Floats, data: Data, seed: int) -> Floats:
    """Right: new weights; the divisor is at least 1, so the noise without records is far larger."""
    start = np.linspace(-3, 3, data[0].shape[1] + 1)
    return start - 0.5 * release(data, seed) / max(1.0, 0.25 * len(data[0]))


# --- faulty ---------------------------------------------------------------------------------------


def noise_once_per_epoch(params: Floats, data: Data, seed: int) -> Floats:
    """Four local steps, and noise for the first of them alone."""
    weights, generator = np.zeros(data[0].shape[1] + 1), np.random.default_rng(seed)
    for step in range(4):
        rows = clip(gradients(data, weights))[sample(generator, len(data[0]))]
        weights = weights - 1e-5 * (rows.sum(axis=0) + (step == 0) * noise(generator, len(weights)))
    return weights


def scaled_by_a_count(params: Floats, data: Data, seed: int) -> Floats:
    """The whole update times the number of records of one class."""
    return release(data, seed) * (1 + float((data[1] == 1).sum()))


def stops_early(params: Floats, data: Data, seed: int) -> Floats:
    """No update, and no noise, where the private records have one label."""
    return release(data, seed) * float((data[1] == 1).any())


def tells_whether_it_stopped(params: Floats, data: Data, seed: int) -> tuple[Floats, dict[str, Any]]:
    """Says yes or no beside the update, by the records."""
    return release(data, seed), {"stopped": bool((data[1] == 1).all())}


def tells_in_words(params: Floats, data: Data, seed: int) -> tuple[Floats, dict[str, Any]]:
    """A log line, in a list, with a number of the records in it."""
    return release(data, seed), {"log": [f"share of ones {(data[1] == 1).mean():.3f}"]}


def tells_a_jittered_loss(params: Floats, data: Data, seed: int) -> tuple[Floats, dict[str, float]]:
    """A mean of the records, with a trace of randomness of augmentation."""
    jitter = 1e-6 * np.random.default_rng(seed + 10**6).standard_normal()
    return release(data, seed), {"loss": float(np.abs(data[0] @ np.linspace(0, 1, data[0].shape[1])).mean() + jitter)}


def overflows(params: Floats, data: Data, seed: int) -> Floats:
    """Norms in half precision: an infinite one leaves its gradient unclipped."""
    rows = gradients(data)
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.linalg.norm(rows, axis=1).astype(np.float16).astype(np.float64)
    factors = np.where(np.isfinite(norms), np.minimum(1.0, C / np.maximum(norms, 1e-30)), 1.0)
    return release(data, seed, rows * factors[:, None])


def makes_nan(params: Floats, data: Data, seed: int) -> Floats:
    """Clips in half precision: infinity times nothing is no number."""
    with np.errstate(over="ignore", invalid="ignore"):
        rows = gradients(data).astype(np.float16)
        norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
        rows = rows * np.minimum(1.0, C / np.maximum(norms, 1e-30))
    return release(data, seed, rows.astype(np.float64))


def samples_the_rare_class_more(params: Floats, data: Data, seed: int) -> Floats:
    """The rarer class is sampled three times as often."""
    rare = (data[1] == 1) == (2 * (data[1] == 1).sum() <= len(data[1]))
    generator = np.random.default_rng(seed)
    chosen = generator.random(len(data[1])) < np.where(rare, 0.75, 0.25)
    found: Floats = clip(gradients(data))[chosen].sum(axis=0) + noise(generator, data[0].shape[1] + 1)
    return found


def seeds_each_layer_alike(params: Floats, data: Data, seed: int) -> list[Floats]:
    """The generator starts anew for the second layer: its noise is the first's, beside many other numbers."""
    rows = gradients(data)
    rows = clip(np.concatenate([rows, rows[:, :HIDDEN], np.zeros((len(rows), 60))], axis=1))
    generator = np.random.default_rng(seed)
    total = rows[sample(generator, len(rows))].sum(axis=0)
    layers = np.split(total, [rows.shape[1] - 60 - HIDDEN])
    return [layer + noise(np.random.default_rng(seed + 10**6), len(layer)) for layer in layers]


def noise_on_what_moves(params: Floats, data: Data, seed: int) -> Floats:
    """A sparse layer: only entries whose gradient is not zero get noise."""
    padded = np.concatenate([np.maximum(data[0], 0), np.maximum(-data[0], 0)], axis=1)  # half of them are zeros
    rows = clip((0.5 - data[1])[:, None] * padded.astype(np.float64))
    generator = np.random.default_rng(seed)
    drawn = noise(generator, rows.shape[1])
    return rows[sample(generator, len(rows))].sum(axis=0) + drawn * (rows != 0).any(axis=0)
