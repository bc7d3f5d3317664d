"""Which pairs of participants share a mask: all of them, or few that stay connected without any c of them.

The masks hide everything but the sum of those honest parties that masks connect. So the graph must stay connected
whichever c parties are taken away (the honest-neighbour condition). Participants stand on a circle, in the order of the
manifest, and each has a mask with its k nearest on either side, k = ceil((c + 1) / 2), and at least 8: with more than
c colluders the promise is weaker, and should not end at once. Take away c <= 2k - 1 of them: two that then follow one
another on the circle are still neighbours unless k or more that stood between them are gone, and that happens in one
place at most, since two would take 2k. So the others are a chain of neighbours: connected.
"""

from __future__ import annotations

from collections.abc import Collection

LEAST_REACH = 8
"""The fewest neighbours on either side. Only 2 * LEAST_REACH colluders or more can be all neighbours of one party."""
COMPLETE_UP_TO = 16
"""Up to so many participants every pair has a mask, which is connected whoever colludes."""


def list_neighbours(place: int, participants: int, colluders: int) -> list[int]:
    """The places (0..participants-1) whose masks the participant at `place` adds or takes off."""
    reach = max(-(-(colluders + 1) // 2), LEAST_REACH)
    if participants <= COMPLETE_UP_TO or 2 * reach >= participants - 1:
        return [other for other in range(participants) if other != place]
    return sorted({(place + step) % participants for step in range(-reach, reach + 1) if step})


def can_be_cut_off(gone: int, participants: int, colluders: int) -> bool:
    """Whether `gone` participants may be all neighbours of one of the others, so that its message stands alone.

    False up to `colluders`. In a graph of all pairs nobody is cut off while two are left.
    """
    neighbours = len(list_neighbours(0, participants, colluders))
    return neighbours < participants - 1 and gone >= neighbours


def is_connected_without(removed: Collection[int], participants: int, colluders: int) -> bool:
    """Whether the masks connect all participants but the removed ones."""
    left = set(range(participants)) - set(removed)
    if not left:
        return True
    reached, frontier = set(), [min(left)]
    while frontier:
        place = frontier.pop()
        if place not in reached:
            reached.add(place)
            frontier += [other for other in list_neighbours(place, participants, colluders) if other in left]
    return reached == left
