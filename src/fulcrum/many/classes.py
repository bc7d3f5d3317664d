"""Jobs of different sizes in a few classes, each with as many places as its largest sample is likely to need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CLASSES = 3
"""The most classes: each is a set of launches of its own, and small launches leave a GPU idle."""

WORTH = 0.03
"""The part of all rows that one more class must save."""


def split(pads: Sequence[int]) -> list[int]:
    """Where to cut jobs that are sorted by the places they need, so that few rows are empty: [0, ..., len(pads)].

    Every job of a class gets as many places as the last one. Of all cuts into at most `CLASSES` parts this is
    the one with the fewest rows, unless fewer parts do nearly as well (`WORTH`).
    """
    widths, first = np.unique(np.asarray(pads), return_index=True)
    ends = np.append(first[1:], len(pads))  # jobs up to and with each width
    starts = np.append(0, ends)  # jobs before a cut
    cost = starts[1:] * widths  # fewest rows for the jobs up to each width, in one class
    cuts = [[0, int(end)] for end in ends]
    best, rows = cuts[-1], int(cost[-1])
    for _ in range(1, min(CLASSES, len(widths))):
        before, known = np.append(0, cost), [[0], *cuts]
        cost, cuts = cost.copy(), []
        for j in range(len(widths)):
            found = before[: j + 1] + (starts[j + 1] - starts[: j + 1]) * widths[j]
            i = int(found.argmin())
            cost[j] = found[i]
            cuts.append([*known[i], int(ends[j])])
        if cost[-1] <= rows * (1 - WORTH):
            best, rows = cuts[-1], int(cost[-1])
    return best
