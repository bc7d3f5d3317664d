"""A learning problem as a value: what is predicted, its loss, its metrics, how targets are checked.

    task = make_task(settings.task, [y_train, y_test])
    losses, slopes = task.compute_losses_and_gradients(outputs, targets)
    task.results(task.sums(outputs, targets))     # {"auc": 0.93, "loss": 0.2}

No code outside this folder refers to a loss or a metric by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fulcrum.data.tasks.losses import LossFn, LossGradientFn, make_autograd_gradient
from fulcrum.data.tasks.metrics import Metric
from fulcrum.types import make_short_repr


@dataclass(frozen=True)
class Task:
    """What is predicted from a record.

    name: classification, binary, multilabel, regression, tokens, or your own. outputs: size O of the last dimension of
    the model's outputs. loss: outputs [..., O] and targets -> one loss per example [...]. slopes: the same losses
    with their gradient in the outputs, in closed form; None: by autograd. metrics: by name; "loss" is always included.
    score: the metric that searches and comparisons use. predict: outputs -> predictions in the targets' own units.
    check_targets: (name of the array, array) -> tensor of targets [n, ...]; DataError where they are not valid.
    target_dims: dimensions of one example's target: 0 for a number, 1 for several labels or a sequence. sequence:
    whether outputs have one prediction per position, [..., L, O]. classes: number of classes that a split by label may
    use; 0 where targets are not classes. notes: messages for the user. options: the settings of the task. constant:
    targets [n, ...] and how often each counts [n] -> outputs [(L,) O] of the best constant prediction, for a baseline;
    None where none is known.
    """

    __repr__ = make_short_repr

    name: str
    outputs: int
    loss: LossFn
    metrics: Mapping[str, Metric]
    score: str
    predict: Callable[[Tensor], Tensor]
    check_targets: Callable[[str, object], Tensor]
    slopes: LossGradientFn | None = None
    target_dims: int = 0
    sequence: bool = False
    classes: int = 0
    notes: tuple[str, ...] = ()
    options: tuple[object, ...] = ()
    constant: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger score is better."""
        return self.metrics[self.score].higher_is_better

    @property
    def output_dims(self) -> int:
        """Dimensions of one example's outputs: 1, or 2 for a sequence of predictions."""
        return 2 if self.sequence else 1

    def compute_losses_and_gradients(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """One loss per example [...], and its gradient in the outputs (as outputs)."""
        return (self.slopes or make_autograd_gradient(self.loss))(outputs, targets)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The sums of every metric over n examples, outputs [..., n, O]; those of two batches add up."""
        return {name: metric.sums(outputs, targets) for name, metric in self.metrics.items()}

    def results(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Every metric's number from the sums of one run."""
        return {name: float(metric.result(sums[name])) for name, metric in self.metrics.items()}

    def key(self) -> tuple[object, ...]:
        """Equal for tasks with the same training; runs must have equal keys to be stacked."""
        made_from = self.options or (id(self.loss),)
        shape = (self.name, self.outputs, self.target_dims, self.sequence, self.score)
        return (*shape, tuple(self.metrics), *made_from)


def merge_metric_sums(one: Mapping[str, Tensor] | None, other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of two batches together; None: nothing yet."""
    return dict(other) if one is None else {name: one[name] + other[name] for name in other}
