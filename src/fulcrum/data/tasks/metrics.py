"""Metrics as sums that can be merged over batches, parties and devices. The results are computed once, at the end.

A metric maps the outputs and targets of n examples to a fixed number of sums over them, float64 [..., k].
Leading dimensions before n are separate runs. The sums of two batches add up; `result` turns sums into one number per
run. Ranking metrics (AUC, average precision) keep a histogram of scores in 65,536 bins, fine near 0 and
wider for larger scores: a pair of examples in the same bin counts as a tie, one half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.data.tasks.losses import LossFn, sum_token_log_likelihood
from fulcrum.errors import ConfigError
from fulcrum.settings.registry import Registry

MetricSumsFn = Callable[[Tensor, Tensor], Tensor]
"""outputs [..., n, (L,) O] and targets [..., n, (...)] -> sums over the n examples, float64 [..., k]."""


@dataclass(frozen=True)
class Metric:
    """One number about predictions.

    sums(outputs, targets) -> [..., k]: see above. result(sums [..., k]) -> [...]: NaN where the metric is undefined.
    higher_is_better: whether a search maximises it.
    """

    sums: MetricSumsFn
    result: Callable[[Tensor], Tensor]
    higher_is_better: bool = True


@dataclass(frozen=True)
class MetricContext:
    """What a metric may know about its task.

    outputs: number of model outputs O per prediction. target_dims: dimensions of one example's target (0: a number).
    loss: one loss per example. predict: outputs -> predictions, in the targets' own units. probabilities: outputs ->
    probabilities of the classes [..., classes] (two for binary classification) or, with several labels, of each
    label [..., O]; None where the targets are not classes. threshold: the lowest probability of a positive prediction.
    ignored: the target of a position that does not count. sequence: whether there is one prediction per position.
    """

    outputs: int
    target_dims: int
    loss: LossFn
    predict: Callable[[Tensor], Tensor]
    probabilities: Callable[[Tensor], Tensor] | None = None
    threshold: float = 0.5
    ignored: int = -100
    sequence: bool = False

    def get_probabilities(self, outputs: Tensor) -> Tensor:
        """The probabilities, for metrics that need them."""
        if self.probabilities is None:
            raise ConfigError("task.metrics names a metric of classes, and this task has none; choose rmse, mae or r2.")
        return self.probabilities(outputs)

    def require_classes(self, metric: str, single: bool = False) -> None:
        """Raises ConfigError if the targets are not classes, or (single) if an example has several."""
        if self.probabilities is None or (single and self.target_dims):
            raise ConfigError(f"task.metrics: {metric} is a metric of classes, and this task's targets are none.")

    def require_binary_targets(self, metric: str) -> None:
        """Raises ConfigError if the targets are not binary."""
        self.require_classes(metric)
        if not self.target_dims and max(2, self.outputs) != 2:
            raise ConfigError(f"task.metrics: {metric} is of yes and no; this task has {self.outputs} classes.")

    def get_positive_scores(self, outputs: Tensor) -> Tensor:
        """The score of the positive class for ranking, [..., n] or, with several labels, [..., n, O]."""
        if self.target_dims:
            return outputs
        return outputs[..., 0] if self.outputs == 1 else outputs[..., 1] - outputs[..., 0]

    def get_positive_probabilities(self, outputs: Tensor) -> Tensor:
        """The probability of the positive class, [..., n] or, with several labels, [..., n, O]."""
        chances = self.get_probabilities(outputs)
        return chances if self.target_dims else chances[..., 1]


MetricFactory = Callable[[MetricContext], Metric]
METRICS: Registry[MetricFactory] = Registry("task.metrics", noun="metric", entry_points="fulcrum.metrics")
"""Functions that make a metric for a task, by the metric's name. Your own metric: package.module:metric."""


def divide_sums(sums: Tensor) -> Tensor:
    """The first sum over the second; NaN where nothing was counted."""
    return sums[..., 0] / sums[..., 1]


def make_column_sum(dims: int, *columns: Tensor) -> Tensor:
    """Columns [..., n] with `dims` more dimensions added up over these and the examples: [..., k] float64."""
    return torch.stack([column.double().flatten(-1 - dims).sum(dim=-1) for column in columns], dim=-1)


# --- every task -----------------------------------------------------------------------------------


@METRICS.register("loss")
def make_mean_loss(task: MetricContext) -> Metric:
    """The mean training loss per example."""

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = task.loss(outputs, targets)
        return make_column_sum(0, losses, torch.ones_like(losses))

    return Metric(sums, divide_sums, higher_is_better=False)


# --- classes --------------------------------------------------------------------------------------


@METRICS.register("accuracy")
def make_accuracy(task: MetricContext) -> Metric:
    """The fraction of correct predictions: of examples; of labels where an example has several; of counted tokens."""

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        counted = targets != task.ignored
        return make_column_sum(task.target_dims, (task.predict(outputs) == targets) & counted, counted)

    return Metric(sums, divide_sums)


@METRICS.register("balanced_accuracy")
def make_balanced_accuracy(task: MetricContext) -> Metric:
    """The mean over classes of the fraction of correct predictions; classes without examples do not count."""
    task.require_classes("balanced_accuracy", single=True)
    classes = max(2, task.outputs)

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        right = (task.predict(outputs) == targets).double()
        of_class = targets.unsqueeze(-1) == torch.arange(classes, device=targets.device)  # [..., n, classes]
        hits = (of_class * right.unsqueeze(-1)).sum(dim=-2)
        return torch.cat([hits, of_class.double().sum(dim=-2)], dim=-1)

    def result(sums: Tensor) -> Tensor:
        hits, counts = sums[..., :classes], sums[..., classes:]
        seen = (counts > 0).double()
        return (hits / counts.clamp_min(1)).sum(dim=-1) / seen.sum(dim=-1)

    return Metric(sums, result)


@METRICS.register("log_loss")
def make_log_loss(task: MetricContext) -> Metric:
    """The mean negative log probability of the true class (natural logarithm, no class weights)."""
    task.require_classes("log_loss")

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        chances = task.get_probabilities(outputs).double().clamp(1e-15, 1.0)
        if task.target_dims:
            own = torch.where(targets > 0, chances, 1 - chances).clamp_min(1e-15)
        else:
            own = chances.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
        return make_column_sum(task.target_dims, -own.log(), torch.ones_like(own))

    return Metric(sums, divide_sums, higher_is_better=False)


@METRICS.register("brier")
def make_brier_score(task: MetricContext) -> Metric:
    """The mean squared error of the positive class's probability; with several classes, summed over the classes."""
    task.require_classes("brier")

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        if task.target_dims or max(2, task.outputs) == 2:
            error = (task.get_positive_probabilities(outputs).double() - targets.double()).square()
            return make_column_sum(task.target_dims, error, torch.ones_like(error))
        chances = task.get_probabilities(outputs).double()
        truth = targets.unsqueeze(-1) == torch.arange(chances.shape[-1], device=targets.device)
        error = (chances - truth.double()).square().sum(dim=-1)
        return make_column_sum(0, error, torch.ones_like(error))

    return Metric(sums, divide_sums, higher_is_better=False)


CALIBRATION_BINS = 15
"""Number of equal confidence bins, as in Guo et al. 2017."""


@METRICS.register("calibration_error")
def make_calibration_error(task: MetricContext) -> Metric:
    """Expected calibration error: distance of confidence and accuracy in 15 equal bins, weighted by their examples.

    With several classes, the confidence of the predicted class; for binary targets, the probability of the positive
    class is compared with its frequency.
    """
    task.require_classes("calibration_error")
    bins = CALIBRATION_BINS

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        if task.target_dims or max(2, task.outputs) == 2:
            confidence, right = task.get_positive_probabilities(outputs).double(), targets.double()
        else:
            confidence, guess = task.get_probabilities(outputs).double().max(dim=-1)
            right = (guess == targets).double()
        confidence, right = (value.flatten(-1 - task.target_dims) for value in (confidence, right))
        place = (confidence * bins).long().clamp(0, bins - 1)
        table = [value.new_zeros((*place.shape[:-1], bins)) for value in (confidence, confidence, right)]
        filled = [
            part.scatter_add(-1, place, value)
            for part, value in zip(table, (torch.ones_like(confidence), confidence, right), strict=True)
        ]
        return torch.cat(filled, dim=-1)

    def result(sums: Tensor) -> Tensor:
        counts, confidence, right = sums.unflatten(-1, (3, bins)).unbind(dim=-2)
        found: Tensor = (confidence - right).abs().sum(dim=-1) / counts.sum(dim=-1)
        return found

    return Metric(sums, result, higher_is_better=False)


# --- binary: ranking ------------------------------------------------------------------------------

SCORE_BINS = 2**16
FINE_SCORE, LARGEST_SCORE = 0.01, 1000.0
"""Bins are 4e-6 wide up to the first, and 0.04 percent of the score beyond it; scores above the second are ties."""


def assign_score_bins(scores: Tensor) -> Tensor:
    """The bin 0..65535 of each score, in the order of the scores; NaN is in the middle bin."""
    far = math.asinh(LARGEST_SCORE / FINE_SCORE)
    place = torch.asinh(scores.double() / FINE_SCORE) / far  # -1..1
    return ((place.nan_to_num(0.0) + 1) * (SCORE_BINS / 2)).clamp(0, SCORE_BINS - 1).long()


def compute_score_histogram(task: MetricContext, outputs: Tensor, targets: Tensor) -> Tensor:
    """Number of negative and of positive examples with a score in each bin: [..., labels, 2, SCORE_BINS]."""
    scores = task.get_positive_scores(outputs)
    if not task.target_dims:
        scores, targets = scores.unsqueeze(-1), targets.unsqueeze(-1)
    place = assign_score_bins(scores) + SCORE_BINS * (targets > 0).long()  # [..., n, labels]
    place = place.transpose(-1, -2)
    table = torch.zeros((*place.shape[:-1], 2 * SCORE_BINS), dtype=torch.float64, device=place.device)
    filled: Tensor = table.scatter_add(-1, place, torch.ones_like(place, dtype=torch.float64))
    return filled.view(*place.shape[:-1], 2, SCORE_BINS)


def make_ranking_metric(task: MetricContext, name: str, of_histogram: Callable[[Tensor, Tensor], Tensor]) -> Metric:
    """A metric of score histograms, (negative, positive) [..., bins] each -> [...]; with several labels, their mean.

    Labels without positive or without negative examples do not count.
    """
    task.require_binary_targets(name)

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        return compute_score_histogram(task, outputs, targets).flatten(-3)

    def result(sums: Tensor) -> Tensor:
        no, yes = sums.unflatten(-1, (-1, 2, SCORE_BINS)).unbind(dim=-2)  # [..., labels, bins] each
        return of_histogram(no, yes).nanmean(dim=-1)

    return Metric(sums, result)


@METRICS.register("auc")
def make_roc_auc(task: MetricContext) -> Metric:
    """The area under the ROC curve: how often a positive example has a higher score than a negative one."""

    def area(no: Tensor, yes: Tensor) -> Tensor:
        below = no.cumsum(dim=-1) - no
        return (yes * (below + 0.5 * no)).sum(dim=-1) / (yes.sum(dim=-1) * no.sum(dim=-1))

    return make_ranking_metric(task, "auc", area)


@METRICS.register("average_precision")
def make_average_precision(task: MetricContext) -> Metric:
    """The area under the precision-recall curve, as a sum of precision over steps of recall."""

    def area(no: Tensor, yes: Tensor) -> Tensor:
        found = yes.flip(-1).cumsum(dim=-1)
        flagged = found + no.flip(-1).cumsum(dim=-1)
        step = yes.flip(-1) / yes.sum(dim=-1, keepdim=True)
        defined = torch.where(no.sum(dim=-1) > 0, 1.0, torch.nan)
        return (found / flagged.clamp_min(1) * step).sum(dim=-1) * defined

    return make_ranking_metric(task, "average_precision", area)


# --- binary: at a threshold -----------------------------------------------------------------------


def make_confusion_metric(
    task: MetricContext, name: str, of_counts: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> Metric:
    """A metric of the counts (true and false positives, true and false negatives), over all labels."""
    task.require_binary_targets(name)

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        said, true = task.get_positive_probabilities(outputs) >= task.threshold, targets > 0
        return make_column_sum(task.target_dims, said & true, said & ~true, ~said & ~true, ~said & true)

    def result(sums: Tensor) -> Tensor:
        return of_counts(*sums.unbind(dim=-1))

    return Metric(sums, result)


@METRICS.register("f1")
def make_f1_score(task: MetricContext) -> Metric:
    """The harmonic mean of precision and recall at the threshold."""
    return make_confusion_metric(task, "f1", lambda tp, fp, tn, fn: 2 * tp / (2 * tp + fp + fn))


@METRICS.register("sensitivity")
def make_sensitivity(task: MetricContext) -> Metric:
    """The fraction of positive examples predicted as positive at the threshold (recall, true-positive rate)."""
    return make_confusion_metric(task, "sensitivity", lambda tp, fp, tn, fn: tp / (tp + fn))


@METRICS.register("specificity")
def make_specificity(task: MetricContext) -> Metric:
    """The fraction of negative examples predicted as negative at the threshold (true-negative rate)."""
    return make_confusion_metric(task, "specificity", lambda tp, fp, tn, fn: tn / (tn + fp))


# --- numbers --------------------------------------------------------------------------------------


def make_error_metric(
    task: MetricContext, size: Callable[[Tensor], Tensor], result: Callable[[Tensor], Tensor]
) -> Metric:
    """A metric of the mean size of the error, in the targets' own units."""

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        error = size(task.predict(outputs).double() - targets.double())
        return make_column_sum(task.target_dims, error, torch.ones_like(error))

    return Metric(sums, lambda sums: result(divide_sums(sums)), higher_is_better=False)


@METRICS.register("rmse")
def make_rmse(task: MetricContext) -> Metric:
    """Root mean squared error, in the targets' own units; with several targets per example, over all of them."""
    return make_error_metric(task, torch.square, torch.sqrt)


@METRICS.register("mae")
def make_mae(task: MetricContext) -> Metric:
    """Mean absolute error, in the targets' own units."""
    return make_error_metric(task, torch.abs, lambda mean: mean)


@METRICS.register("r2")
def make_r_squared(task: MetricContext) -> Metric:
    """R squared: 1 - squared error / variance of the targets; the mean over the targets where there are several.

    NaN where a target does not vary.
    """

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        wanted, found = targets.double(), task.predict(outputs).double()
        if not task.target_dims:
            wanted, found = wanted.unsqueeze(-1), found.unsqueeze(-1)
        columns = ((found - wanted).square(), wanted, wanted.square(), torch.ones_like(wanted))
        return torch.cat([column.sum(dim=-2) for column in columns], dim=-1)  # [..., 4 * targets]

    def result(sums: Tensor) -> Tensor:
        error, total, squares, count = sums.unflatten(-1, (4, -1)).unbind(dim=-2)
        spread = squares - total.square() / count
        varies = spread > 1e-12 * squares
        return torch.where(varies, 1 - error / spread, torch.nan).mean(dim=-1)

    return Metric(sums, result)


# --- tokens ---------------------------------------------------------------------------------------


@METRICS.register("perplexity")
def make_perplexity(task: MetricContext) -> Metric:
    """exp of the mean negative log likelihood per counted token."""
    if not task.sequence:
        raise ConfigError("task.metrics: perplexity is of sequences of tokens, and this task has none.")

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        likelihood, count = sum_token_log_likelihood(outputs, targets, task.ignored)
        return make_column_sum(0, -likelihood, count)

    return Metric(sums, lambda sums: divide_sums(sums).exp(), higher_is_better=False)
