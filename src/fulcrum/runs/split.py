"""split.json: how the training records are spread over the parties, as far as that is public."""

from __future__ import annotations

from typing import Any

import torch

from fulcrum.training.federation import Federation

MAX_PARTIES_LISTED = 1000
"""The largest number of parties whose names and sizes are listed; as in PRIVACY.md."""
MAX_CLASSES_COUNTED = 100


def describe_split(federation: Federation) -> dict[str, Any]:
    """The content of split.json: the parties with their declared sizes, and the labels at each where data is public.

    parties: K. public: whether everybody may see the training records. names and units [K]: the plan's, which are
    public constants. labels [K][classes]: counts, of public records of a classification alone.
    """
    plan, dataset = federation.plan, federation.problem.dataset
    found: dict[str, Any] = {"parties": plan.parties, "public": dataset.public and dataset.train is not None}
    if plan.parties <= MAX_PARTIES_LISTED:
        found["names"] = [plan.name(k) for k in range(plan.parties)]
        found["units"] = [plan.units(k) for k in range(plan.parties)]
        labels = _count_labels(federation) if found["public"] else None
        if labels is not None:
            found["labels"] = labels
    return found


def _count_labels(federation: Federation) -> list[list[int]] | None:
    """How many records of each class each party holds [K][classes]; None where targets are no classes."""
    dataset, partition = federation.problem.dataset, federation.problem.partition
    classes, targets = dataset.task.classes, dataset.records.y
    if not 1 < classes <= MAX_CLASSES_COUNTED or targets.ndim != 1 or targets.is_floating_point():
        return None
    rows = [targets[partition.indices(k).to(targets.device)].long() for k in range(partition.parties)]
    return [torch.bincount(own[own >= 0], minlength=classes)[:classes].tolist() for own in rows]
