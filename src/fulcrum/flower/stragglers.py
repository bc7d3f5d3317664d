"""Parties that do not answer in time: they rest, are greeted, and come back.

A party that misses a round's deadline costs that deadline once. It then rests: it is asked for no round, until it has
answered a greeting (which costs no privacy) and a number of rounds has passed that doubles with each further miss. A
round that it answers ends the count. Where too few other parties are left, those that rest are asked all the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fulcrum.errors import ConfigError


@dataclass(frozen=True)
class StragglerPolicy:
    """When a round stops waiting, and how long a late party rests.

    quorum: the share of the asked parties after whose answers a round waits only `grace` seconds more for the others;
    1: a round waits for everybody until its deadline. max_rest: the most rounds that a party rests after a miss; 0:
    late parties are asked in every round.
    """

    quorum: float = 1.0
    grace: float = 5.0
    max_rest: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.quorum <= 1:
            raise ConfigError(f"--quorum {self.quorum:g} must be above 0 and at most 1: a share of the asked parties.")
        if not (0 <= self.grace < math.inf and self.max_rest >= 0):
            raise ConfigError(
                f"--grace {self.grace:g} must be seconds, and --max-rest {self.max_rest} rounds, from 0 on."
            )

    def count_needed(self, asked: int) -> int:
        """The number of answers after which only `grace` seconds are left."""
        return math.ceil(self.quorum * asked)

    def compute_rest(self, misses: int) -> int:
        """Rounds to rest after so many misses in a row: 1, 2, 4, ... up to `max_rest`."""
        return min(self.max_rest, 1 << min(misses - 1, 30))


@dataclass
class _Straggler:
    misses: int = 0
    until: int = 0  # the first round (from 0) in which it may be asked again
    since: float = 0.0  # when it was late, on the monotonic clock
    resting: bool = False


@dataclass
class StragglerBook:
    """Who is late, since when, and until when each rests. Clients are numbers."""

    policy: StragglerPolicy = field(default_factory=StragglerPolicy)
    _late: dict[int, _Straggler] = field(default_factory=dict)

    def note_answer(self, client: int) -> bool:
        """The client answered a round. True if it had been late."""
        return self._late.pop(client, None) is not None

    def note_miss(self, client: int, round: int) -> str:
        """The client missed a round (from 0). Returns what follows from it, in words for the log."""
        known = self._late.setdefault(client, _Straggler())
        known.misses += 1
        known.since = time.monotonic()
        rest = self.policy.compute_rest(known.misses)
        known.until, known.resting = round + 1 + rest, rest > 0
        times = "once" if known.misses == 1 else f"{known.misses} times in a row"
        if not known.resting:
            return f"late {times}; it is asked again in the next round"
        return f"late {times}; it rests until it answers a greeting, and at least until round {known.until + 1}"

    def list_resting(self, clients: Collection[int]) -> list[int]:
        """Those of the clients that rest: to be greeted."""
        return [k for k in clients if k in self._late and self._late[k].resting]

    def select_awake(self, clients: Sequence[int], round: int, heard: dict[int, float], needed: int) -> list[int]:
        """The clients to ask in a round (from 0). heard: when each last answered a greeting. needed: the least number.

        A client comes back when its rest is over and it has answered a greeting since it was late.
        """
        for k in self.list_resting(clients):
            known = self._late[k]
            if round >= known.until and heard.get(k, -math.inf) > known.since:
                known.resting = False
        awake = [k for k in clients if not (k in self._late and self._late[k].resting)]
        return awake if len(awake) >= needed else list(clients)

    def describe(self, client: int) -> str:
        """The client's state in words; "" where it answers in time."""
        known = self._late.get(client)
        if known is None:
            return ""
        return f"late {known.misses} time(s) in a row{', rests' if known.resting else ', asked again'}"
