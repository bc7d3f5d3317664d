"""Two objectives: which points nothing beats, how much they cover, and where the bend is."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]


def orient(points: Sequence[Point], lower_is_better: tuple[bool, bool]) -> list[Point]:
    """The points with both objectives to be minimised."""
    signs = tuple(1.0 if lower else -1.0 for lower in lower_is_better)
    return [(signs[0] * a, signs[1] * b) for a, b in points]


def find_front(points: Sequence[Point], lower_is_better: tuple[bool, bool]) -> list[int]:
    """The places of the points that no other point beats in one objective without losing in the other.

    By rising first objective (falling where higher is better). Of equal points the first; points that are not finite
    are never on the front.
    """
    turned = orient(points, lower_is_better)
    finite = [i for i, point in enumerate(turned) if all(map(math.isfinite, point))]
    front: list[int] = []
    best = math.inf
    for i in sorted(finite, key=lambda i: (turned[i], i)):
        if turned[i][1] < best:
            front.append(i)
            best = turned[i][1]
    return front


def compute_hypervolume(points: Sequence[Point], lower_is_better: tuple[bool, bool], reference: Point) -> float:
    """The area between the front and a reference point that every good point beats; 0 where none does."""
    turned = orient(points, lower_is_better)
    (corner,) = orient([reference], lower_is_better)
    area, last = 0.0, corner[1]
    for i in find_front(points, lower_is_better):
        a, b = turned[i]
        if a < corner[0] and b < last:
            area += (corner[0] - a) * (last - b)
            last = b
    return area


def find_knee(points: Sequence[Point], lower_is_better: tuple[bool, bool]) -> int | None:
    """The place of the front's bend: the point farthest from the line between its ends, both objectives scaled to one.

    Of a front of one or two points its first with the better second objective; None where there is none.
    """
    front = find_front(points, lower_is_better)
    if not front:
        return None
    if len(front) < 3:
        return front[-1]
    turned = orient(points, lower_is_better)
    (a0, b0), (a1, b1) = turned[front[0]], turned[front[-1]]

    def below_line(i: int) -> float:
        x, y = (turned[i][0] - a0) / (a1 - a0), (turned[i][1] - b1) / (b0 - b1)
        return 1 - x - y

    return max(front, key=below_line)
