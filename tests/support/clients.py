"""Clients of other people, right ones and faulty ones: one per mistake that `fulcrum check` knows.

All train a logistic regression from params, at C = 1, sigma = 1 and rate 0.25 unless they are wrong about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Data = tuple[npt.NDArray[Any], npt.NDArray[Any]]
RATE, SIGMA, C = 0.25, 1.0, 1.0
CLAIMS: dict[str, Any] = {"sigma": SIGMA, "rate": RATE, "steps": 100, "delta": 1e-5}


def gradients(params: Floats, data: Data) -> Floats:
    """Gradient of each record [n, f] at weights 0 where params are empty."""
    x, y = data[0].astype(np.float64), data[1]
    w = params if len(params) else np.zeros(x.shape[1])
    scores = 1 / (1 + np.exp(-np.clip(x @ w, -500, 500)))
    found: Floats = (scores - y)[:, None] * x
    return found


def clip(rows: Floats, bound: float = C) -> Floats:
    """Each row, at most `bound` long."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    shorter: Floats = rows * np.minimum(1.0, bound / np.maximum(norms, 1e-30))
    return shorter


def sample(generator: np.random.Generator, count: int) -> npt.NDArray[np.bool_]:
    """Poisson sampling."""
    chosen: npt.NDArray[np.bool_] = generator.random(count) < RATE
    return chosen


def noise(generator: np.random.Generator, size: int, scale: float = SIGMA * C) -> Floats:
    """Gaussian noise."""
    drawn: Floats = scale * generator.standard_normal(size)
    return drawn


def right(params: Floats, data: Data, seed: int) -> Floats:
    """Clips, adds up, adds noise, divides by the expected batch."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data))[sample(generator, len(data[0]))]
    answer: Floats = (rows.sum(axis=0) + noise(generator, data[0].shape[1])) / (RATE * len(data[0]))
    return answer


def right_without_seed(params: Floats, data: Data, seed: int) -> list[Floats]:
    """Right, with randomness of the operating system, in two pieces and as an update at a learning rate."""
    update = -0.3 * right(params, data, int.from_bytes(__import__("os").urandom(8), "little"))
    return [update[:7], update[7:].reshape(1, -1)]


def right_full_batch(params: Floats, data: Data, seed: int) -> Floats:
    """Right, and every record is in every step."""
    generator = np.random.default_rng(seed)
    return clip(gradients(params, data)).sum(axis=0) + noise(generator, data[0].shape[1])


def unclipped(params: Floats, data: Data, seed: int) -> Floats:
    """No clipping."""
    generator = np.random.default_rng(seed)
    rows = gradients(params, data)[sample(generator, len(data[0]))]
    return rows.sum(axis=0) + noise(generator, data[0].shape[1])


def clips_the_batch(params: Floats, data: Data, seed: int) -> Floats:
    """The sum of the batch is clipped."""
    generator = np.random.default_rng(seed)
    rows = gradients(params, data)[sample(generator, len(data[0]))]
    return clip(rows.sum(axis=0, keepdims=True))[0] + noise(generator, data[0].shape[1])


def averages_before_clipping(params: Floats, data: Data, seed: int) -> Floats:
    """The mean of the batch is clipped."""
    generator = np.random.default_rng(seed)
    rows = gradients(params, data)[sample(generator, len(data[0]))]
    mean = rows.mean(axis=0, keepdims=True) if len(rows) else np.zeros((1, data[0].shape[1]))
    return clip(mean)[0] + noise(generator, data[0].shape[1])


def too_little_noise(params: Floats, data: Data, seed: int) -> Floats:
    """0.7 of the noise."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data))[sample(generator, len(data[0]))]
    return rows.sum(axis=0) + noise(generator, data[0].shape[1], 0.7)


def noise_of_another_C(params: Floats, data: Data, seed: int) -> Floats:
    """Clips to 2, and adds noise for 1."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data), 2.0)[sample(generator, len(data[0]))]
    return rows.sum(axis=0) + noise(generator, data[0].shape[1])


def noise_on_half(params: Floats, data: Data, seed: int) -> Floats:
    """The last quarter of the coordinates has a third of the noise."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data))[sample(generator, len(data[0]))]
    scale = np.where(np.arange(data[0].shape[1]) < 15, 1.0, 0.3)
    return rows.sum(axis=0) + scale * noise(generator, data[0].shape[1])


def shuffles(params: Floats, data: Data, seed: int) -> Floats:
    """A batch of one size."""
    generator = np.random.default_rng(seed)
    size = max(1, round(RATE * len(data[0])))
    rows = clip(gradients(params, data))[generator.permutation(len(data[0]))[:size]]
    return rows.sum(axis=0) + noise(generator, data[0].shape[1])


def divides_by_actual_batch(params: Floats, data: Data, seed: int) -> Floats:
    """The noised sum over the number of sampled records."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data))[sample(generator, len(data[0]))]
    return (rows.sum(axis=0) + noise(generator, data[0].shape[1])) / max(1, len(rows))


def divides_then_adds_noise(params: Floats, data: Data, seed: int) -> Floats:
    """The mean over the sampled records, and noise for the expected batch."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data))[sample(generator, len(data[0]))]
    return rows.sum(axis=0) / max(1, len(rows)) + noise(generator, data[0].shape[1]) / (RATE * len(data[0]))


def tells_statistics(params: Floats, data: Data, seed: int) -> tuple[Floats, dict[str, float]]:
    """The loss of the private records beside the update."""
    return right(params, data, seed), {"loss": float(np.abs(data[0]).mean())}


def tells_feature_means(params: Floats, data: Data, seed: int) -> Floats:
    """The mean of a feature in the vector itself."""
    return np.append(right(params, data, seed), data[0][:, 0].mean())


def one_seed(params: Floats, data: Data, seed: int) -> Floats:
    """Always the same seed."""
    return right(params, data, 1234)


def few_seeds(params: Floats, data: Data, seed: int) -> Floats:
    """A seed of sixteen."""
    return right(params, data, seed % 16)


def breaks(params: Floats, data: Data, seed: int) -> Floats:
    """Raises."""
    raise RuntimeError("no such file:\n/private/place")


# --- Flower ---------------------------------------------------------------------------------------


@dataclass
class FlowerLike:
    """A client with the methods of Flower's NumPyClient."""

    data: Data
    seed: int
    honest: bool = True

    def get_parameters(self, config: dict[str, Any]) -> list[Floats]:
        return [np.zeros((4, 5))]

    def fit(self, parameters: list[Floats], config: dict[str, Any]) -> tuple[list[Floats], int, dict[str, float]]:
        update = 0.1 * right(np.zeros(0), self.data, self.seed).reshape(4, 5)
        sampled = int(sample(np.random.default_rng(self.seed), len(self.data[0])).sum())
        count = len(self.data[0]) if self.honest else sampled
        return [parameters[0] - update], count, {} if self.honest else {"batch": float(sampled)}


def make_flower(data: Data, seed: int) -> FlowerLike:
    return FlowerLike(data, seed)


def make_telling_flower(data: Data, seed: int) -> FlowerLike:
    return FlowerLike(data, seed, honest=False)
