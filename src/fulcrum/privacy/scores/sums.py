"""Numbers and tokens as sums of clipped errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fulcrum.data.tasks import Task
from fulcrum.privacy.scores.form import ONE, Metrics, clamp_metric, find_integer_weight

TOKEN_LOSS_FACTOR = 2.0
"""A token's negative log likelihood is clipped to this many times that of a uniform guess."""


@dataclass(frozen=True)
class ErrorSums:
    """Sums of a regression, per target: absolute error, squared error, target, squared target.

    Errors are clipped to high - low and divided by it; targets lie in low to high and count from the middle, in units
    of half the range. All four are then at most 1.
    """

    targets: int
    low: float
    high: float
    predict: Callable[[Tensor], Tensor]
    loss: str = "squared"
    scale: float = 1.0

    @property
    def columns(self) -> int:
        """Four per target."""
        return 4 * self.targets

    @property
    def words(self) -> str:
        """What is released."""
        return f"sums of errors and targets, clipped to {self.low:g} to {self.high:g}, with Gaussian noise"

    @property
    def width(self) -> float:
        """The length of the declared range."""
        return self.high - self.low

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The four columns of every target, each a number from -1 to 1 times the same integer."""
        wanted = targets.double().reshape(len(targets), -1).clamp(self.low, self.high)
        found = self.predict(outputs).double().reshape(wanted.shape)
        error = ((found - wanted) / self.width).abs().nan_to_num(1.0).clamp(max=1.0)
        place = ((wanted - (self.low + self.high) / 2) / (self.width / 2)).nan_to_num(0.0).clamp(-1.0, 1.0)
        columns = torch.cat([error, error.square(), place, place.square()], dim=-1)
        return (columns * find_integer_weight(self.columns)).trunc().long()

    def _get_means(self, noised: Tensor, units: int) -> Tensor:
        """Means over the units [4, targets]: absolute error, squared error, target, squared target, all scaled."""
        share = find_integer_weight(self.columns) / ONE
        return noised.double().cpu().view(4, self.targets) / share / max(units, 1)

    def estimate(self, task: Task, noised: Tensor, units: int) -> Metrics:
        """rmse, mae, r2, and the loss where it is one of them."""
        if not units:
            return dict.fromkeys(task.metrics, math.nan)
        absolute, squared, mean, square = self._get_means(noised, units)
        return self._name(task, absolute.clamp(0, 1), squared.clamp(0, 1), square - mean.square())

    def estimate_baseline(self, task: Task, noised: Tensor, units: int) -> Metrics:
        """Of the noised mean target as every prediction: r2 is 0, rmse the targets' standard deviation.

        Where noise leaves no variance, nothing is said: an rmse of 0 would be one that no model reaches.
        """
        if not units:
            return {}
        _, _, mean, square = self._get_means(noised, units)
        variance = square - mean.square()
        spread = torch.where(variance > 0, variance, torch.nan)
        found = self._name(task, torch.full_like(spread, math.nan), spread / 4, spread)
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _name(self, task: Task, absolute: Tensor, squared: Tensor, spread: Tensor) -> Metrics:
        """Metrics by name, in the targets' own units. spread: the targets' variance in units of half the range."""
        enough = torch.where(spread > 0, spread / 4, torch.nan)
        mae, mse = float(absolute.mean()) * self.width, float(squared.mean()) * self.width**2
        known = {
            "mae": mae,
            "rmse": math.sqrt(mse) if mse >= 0 else math.nan,
            "r2": float((1 - squared / enough).clamp(max=1.0).mean()),
        }
        losses = {"squared": mse / 2 / self.scale**2, "absolute": mae / self.scale}
        known["loss"] = losses.get(self.loss, math.nan)
        return {name: clamp_metric(name, known.get(name, math.nan)) for name in task.metrics}

    def count_confusion(self, noised: Tensor, units: int) -> list[list[float]]:
        """Numbers have none."""
        return []

    def estimate_error(self, sigma: float, units: int) -> tuple[str, float]:
        """Of the mean absolute error, in the targets' own units."""
        return "mae", sigma * 2 * self.width / max(units, 1)


@dataclass(frozen=True)
class TokenSums:
    """Sums over the positions of a record of public length: counted tokens, right ones, negative log likelihood.

    Each is divided by the length, and the likelihood of a token clipped to `cap` and divided by it.
    """

    length: int
    vocabulary: int
    ignored: int

    @property
    def columns(self) -> int:
        """Three."""
        return 3

    @property
    def cap(self) -> float:
        """The largest negative log likelihood of a token that counts."""
        return TOKEN_LOSS_FACTOR * math.log(self.vocabulary)

    @property
    def words(self) -> str:
        """What is released."""
        return "sums of counted and right tokens and of their clipped log likelihood, with Gaussian noise"

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Three numbers from 0 to 1 times the same integer."""
        counted = (targets != self.ignored).double()
        right = ((outputs.argmax(dim=-1) == targets).double() * counted).sum(dim=-1)
        column = targets.masked_fill(counted == 0, 0).unsqueeze(-1)
        likelihood = F.log_softmax(outputs.float(), dim=-1).gather(-1, column).squeeze(-1).double()
        likelihood = likelihood.neg().nan_to_num(self.cap).clamp(0.0, self.cap)
        columns = torch.stack([counted.sum(dim=-1), right, (likelihood * counted).sum(dim=-1) / self.cap], dim=-1)
        return ((columns / self.length).clamp(0.0, 1.0) * find_integer_weight(self.columns)).trunc().long()

    def estimate(self, task: Task, noised: Tensor, units: int) -> Metrics:
        """accuracy and perplexity per counted token; the loss is the mean over tokens."""
        counted, right, loss = (noised.double().cpu() * (ONE / find_integer_weight(self.columns))).tolist()
        sure = counted * self.length >= 1
        mean = min(max(loss * self.cap / counted, 0.0), self.cap) if sure else math.nan
        known = {"accuracy": right / counted if sure else math.nan, "perplexity": math.exp(mean), "loss": mean}
        return {name: clamp_metric(name, known.get(name, math.nan)) for name in task.metrics}

    def estimate_baseline(self, task: Task, noised: Tensor, units: int) -> Metrics:
        """Of a uniform guess: how often each token occurs is not released."""
        known = {"accuracy": 1 / self.vocabulary, "perplexity": float(self.vocabulary)}
        return {**{name: known[name] for name in task.metrics if name in known}, "loss": math.log(self.vocabulary)}

    def count_confusion(self, noised: Tensor, units: int) -> list[list[float]]:
        """A vocabulary is too large for one."""
        return []

    def estimate_error(self, sigma: float, units: int) -> tuple[str, float]:
        """Of the fraction of right tokens, where all positions count."""
        return "accuracy", sigma * math.sqrt(3) / max(units, 1)
