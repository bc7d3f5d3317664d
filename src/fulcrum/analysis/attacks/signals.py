"""What a final model says of a record: one number, larger for records it fits better."""

from __future__ import annotations

import torch
from torch import Tensor

from fulcrum.data.records import move_inputs_to_device, select_rows
from fulcrum.data.tasks import Task
from fulcrum.models.layout import call_with_parameters
from fulcrum.training.problem import TrainingProblem

BLOCK = 4096
"""Records per forward pass."""


def measure_confidence(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """[n], float64: the logit of the true class's probability, log p / (1 - p); without classes minus the loss.

    outputs [n, O], targets [n]. From the logits, so that a probability near 1 loses no digits; the loss is
    log(1 + exp(-confidence)).
    """
    if not task.classes or task.sequence or task.outputs != task.classes:
        return -task.loss(outputs.float(), targets).double()
    logits = outputs.double()
    own = logits.gather(1, targets[:, None].long())
    rest = logits.scatter(1, targets[:, None].long(), -torch.inf)
    return own[:, 0] - torch.logsumexp(rest, dim=1)


@torch.no_grad()
def measure_models(problem: TrainingProblem, models: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Confidence [R, N] of models [R, d] in N training records of a problem's data set; float32 on the host.

    chosen [N]: their rows; None: all.
    """
    records, device = problem.dataset.records, problem.device
    records = records if chosen is None else records.take(chosen)
    found = torch.zeros((len(models), len(records)))
    problem.model.eval()
    for start in range(0, len(records), BLOCK):
        rows = slice(start, start + BLOCK)
        x, y = move_inputs_to_device(select_rows(records.x, rows), device), records.y[rows].to(device)
        for r, theta in enumerate(models):
            outputs = call_with_parameters(problem.model, problem.layout.unflatten(theta.to(device)), x)
            found[r, rows] = measure_confidence(problem.task, outputs, y).float().cpu()
    return found
