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
    """Right, in two pieces and as an update at a learning rate, with a generator of its own.

    It stands for code that draws from the operating system. Its numbers are the same in every test all the same: a
    lower bound of 95% is above the truth in up to 5% of checks, and a test must not fail by chance.
    """
    update = -0.3 * right(params, data, seed * 1_000_003 + 17)
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


# --- further ones, in other styles ----------------------------------------------------------------


def softmax_gradients(x: Floats, y: npt.NDArray[Any]) -> Floats:
    """Gradient [n, 2 (f + 1)] of a softmax with biases, at weights that are not zeros."""
    ones = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    weights = np.linspace(-1, 1, 2 * ones.shape[1]).reshape(2, -1) * 1e-3
    scores = ones @ weights.T
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    found: Floats = ((chances - np.eye(2)[y])[:, :, None] * ones[:, None, :]).reshape(len(x), -1)
    return found


def right_softmax(params: Floats, data: Data, seed: int, lr: float = 17.0) -> dict[str, Floats]:
    """Right: weights and biases by name, at a large learning rate."""
    generator = np.random.default_rng(seed)
    rows = clip(softmax_gradients(data[0].astype(np.float64), data[1]), 0.3)[sample(generator, len(data[0]))]
    total = -lr * (rows.sum(axis=0) + 0.3 * noise(generator, rows.shape[1])) / (RATE * len(data[0]))
    return {"weights": total.reshape(2, -1)[:, :-1], "biases": total.reshape(2, -1)[:, -1]}


def right_normalised(params: Floats, data: Data, seed: int) -> Floats:
    """Right: every gradient has the same length (automatic clipping), summed in microbatches."""
    generator = np.random.default_rng(seed)
    rows = gradients(params, data)[sample(generator, len(data[0]))]
    rows = rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 0.01)
    total = sum((rows[i : i + 4].sum(axis=0) for i in range(0, len(rows), 4)), np.zeros(data[0].shape[1]))
    return total + noise(generator, data[0].shape[1])


def right_weights(params: Floats, data: Data, seed: int) -> Floats:
    """Right: new weights, from a start of its own."""
    return np.linspace(3, 9, data[0].shape[1]) - 0.1 * right_full_sum(params, data, seed)


def right_full_sum(params: Floats, data: Data, seed: int) -> Floats:
    """Right, as a sum."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data))[sample(generator, len(data[0]))]
    return rows.sum(axis=0) + noise(generator, data[0].shape[1])


def right_augmented(params: Floats, data: Data, seed: int) -> Floats:
    """Right: the mean over three views of a record is clipped."""
    generator = np.random.default_rng(seed)
    views = [gradients(params, (data[0] * size, data[1])) for size in (0.9, 1.0, 1.1)]
    rows = clip(np.mean(views, axis=0))[sample(generator, len(data[0]))]
    return rows.sum(axis=0) + noise(generator, data[0].shape[1])


def clips_each_view(params: Floats, data: Data, seed: int) -> Floats:
    """Three views of a record are clipped one by one."""
    generator = np.random.default_rng(seed)
    rows = sum(clip(gradients(params, (data[0] * size, data[1]))) for size in (0.9, 1.0, 1.1))
    return np.asarray(rows)[sample(generator, len(data[0]))].sum(axis=0) + noise(generator, data[0].shape[1])


def clips_coordinates(params: Floats, data: Data, seed: int) -> Floats:
    """Each number is limited to C."""
    generator = np.random.default_rng(seed)
    rows = np.clip(gradients(params, data), -C, C)[sample(generator, len(data[0]))]
    return rows.sum(axis=0) + noise(generator, data[0].shape[1])


def clips_microbatches(params: Floats, data: Data, seed: int) -> Floats:
    """The mean of every eight records is clipped."""
    generator = np.random.default_rng(seed)
    rows = gradients(params, data)[sample(generator, len(data[0]))]
    means = [rows[i : i + 8].mean(axis=0, keepdims=True) for i in range(0, len(rows), 8)]
    total = sum((clip(mean)[0] for mean in means), np.zeros(data[0].shape[1]))
    return total + noise(generator, data[0].shape[1])


def laplace_noise(params: Floats, data: Data, seed: int) -> Floats:
    """Laplace's noise of the same deviation."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data))[sample(generator, len(data[0]))]
    return rows.sum(axis=0) + generator.laplace(scale=SIGMA * C / np.sqrt(2), size=data[0].shape[1])


def truncated_noise(params: Floats, data: Data, seed: int) -> Floats:
    """Noise without tails, of the same deviation."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data))[sample(generator, len(data[0]))]
    return rows.sum(axis=0) + np.sqrt(3) * SIGMA * C * generator.uniform(-1, 1, data[0].shape[1])


def one_random_number(params: Floats, data: Data, seed: int) -> Floats:
    """The same random number on every coordinate."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data))[sample(generator, len(data[0]))]
    return rows.sum(axis=0) + noise(generator, 1)[0]


def cancelling_noise(params: Floats, data: Data, seed: int) -> Floats:
    """Noise whose sum over the coordinates is almost 0."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data))[sample(generator, len(data[0]))]
    drawn = noise(generator, data[0].shape[1] + 1)
    return rows.sum(axis=0) + (drawn[1:] - drawn[:-1]) / np.sqrt(2)


def standardises(params: Floats, data: Data, seed: int) -> Floats:
    """Features are standardised with the private records."""
    x = data[0].astype(np.float64)
    return right_full_sum(params, ((x - x.mean(axis=0)) / (x.std(axis=0) + 1e-9), data[1]), seed)


def C_from_the_batch(params: Floats, data: Data, seed: int) -> Floats:
    """Clips to the median norm of the batch, and adds noise for that."""
    generator = np.random.default_rng(seed)
    rows = gradients(params, data)[sample(generator, len(data[0]))]
    bound = float(np.median(np.linalg.norm(rows, axis=1))) + 1e-3 if len(rows) else 1e-3
    bound = bound / (1 + bound)  # it is between 0 and 1
    return clip(rows, bound).sum(axis=0) + bound * noise(generator, data[0].shape[1])


def twice_the_rate(params: Floats, data: Data, seed: int) -> Floats:
    """Samples at twice the rate."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data))[generator.random(len(data[0])) < 2 * RATE]
    return rows.sum(axis=0) + noise(generator, data[0].shape[1])


def nothing_for_empty_samples(params: Floats, data: Data, seed: int) -> Floats:
    """An empty sample releases zeros."""
    empty = not sample(np.random.default_rng(seed), len(data[0])).any()
    return np.zeros(data[0].shape[1]) if empty else right_full_sum(params, data, seed)


def noise_in_most_calls(params: Floats, data: Data, seed: int) -> Floats:
    """Every tenth call has no noise."""
    generator = np.random.default_rng(seed)
    rows = clip(gradients(params, data))[sample(generator, len(data[0]))]
    return rows.sum(axis=0) + (0.0 if seed % 10 == 0 else 1.0) * noise(generator, data[0].shape[1])


def seed_of_the_hour(params: Floats, data: Data, seed: int) -> Floats:
    """A seed that changes every thousand calls."""
    return right_full_sum(params, data, seed // 250)


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
