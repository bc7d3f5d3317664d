"""Tasks: what is predicted, its loss, its metrics. `Task` is a value; `make_task` makes one from settings.

losses.py   losses of single examples with closed-form gradients
metrics.py  metrics as mergeable sums, METRICS
task.py     the value
arrays.py   users' target arrays, checked
balance.py  classes of unequal frequency: declared shares -> weights or shifts of the logits
builtin.py  classification, binary, multilabel, regression, tokens, next-token; TASKS
"""

from __future__ import annotations

from fulcrum.data.tasks.builtin import TASKS, make_task, shift_tokens, task_from_loss
from fulcrum.data.tasks.metrics import METRICS, Metric, MetricContext
from fulcrum.data.tasks.task import Task, merge_metric_sums

__all__ = [
    "METRICS",
    "TASKS",
    "Metric",
    "MetricContext",
    "Task",
    "make_task",
    "merge_metric_sums",
    "shift_tokens",
    "task_from_loss",
]
