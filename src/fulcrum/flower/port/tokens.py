"""Rates: so many per second, and a burst."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Allows `rate` things per second, and `burst` at once after a pause. For one thread."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst, self._clock = rate, max(1.0, burst), clock
        self._tokens, self._at = self.burst, clock()

    def take(self) -> float:
        """Take one; returns the seconds to wait before using it, 0.0 where there is no need to."""
        now = self._clock()
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
        self._at = now
        self._tokens -= 1.0
        return 0.0 if self._tokens >= 0 else -self._tokens / self.rate
