"""When each party was last heard of, since when it is offline, and why: what an operator sees."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

SILENT_SECONDS = 45.0
"""A party that has not been heard of for so long is offline. It asks for messages every ten seconds or so."""

CAUSES: dict[str, str] = {
    "": "",
    "never": "it has not connected yet",
    "silent": "nothing has been heard of it",
    "closed": "its connection has ended",
    "left": "it has signed off",
    "clock": "its clock is too far from this machine's",
    "key": "its key is not the registered one",
    "revoked": "its key has been revoked",
    "version": "its version of Fulcrum does not fit this one's",
}
"""Why a party is not there: code -> words."""


@dataclass(frozen=True)
class PartyPresence:
    """What the coordinator knows of one party's connection. Times in seconds since 1970."""

    name: str
    online: bool
    since: float
    """Since when it is online, or offline."""
    last_seen: float
    """When it was last heard of; 0.0: never."""
    cause: str = "never"
    """Why it is offline: a code of `CAUSES`; "" while it is online."""
    detail: str = ""
    """A sentence on the last thing that was wrong, such as how far its clock is off."""
    address: str = ""
    """Where it last connected from."""

    @property
    def words(self) -> str:
        """ "online since 11:02:13" or "offline since 11:02:13: nothing has been heard of it"."""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        if self.online:
            return f"online since {at}"
        said = self.detail or CAUSES.get(self.cause, self.cause)
        return f"offline since {at}{f': {said}' if said else ''}"


class PresenceBook:
    """Presence of every party, safe to use from several threads.

    How long ago something was is measured with a clock that nobody sets; times that are shown are of the wall's.
    """

    def __init__(
        self,
        names: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._wall, self._lock = clock, wall, threading.Lock()
        self._of: dict[str, PartyPresence] = {}
        self._heard: dict[str, float] = {}
        self._closed: dict[str, float] = {}
        self._notices: list[tuple[str, str]] = []
        self._noticed: dict[tuple[str, str], float] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """A party that is registered."""
        with self._lock:
            self._of.setdefault(name, PartyPresence(name, False, self._wall(), 0.0))

    def seen(self, name: str, address: str = "") -> None:
        """It has just been heard of."""
        now = self._wall()
        with self._lock:
            old = self._of[name]
            since = old.since if old.online else now
            self._of[name] = PartyPresence(name, True, since, now, "", "", address or old.address)
            self._heard[name] = self._clock()
            self._closed.pop(name, None)

    def connection_ended(self, name: str) -> None:
        """Its last connection has ended: it is offline unless it comes back within seconds."""
        with self._lock:
            self._closed[name] = self._clock()

    def left(self, name: str, cause: str = "left", detail: str = "") -> None:
        """It is offline, for a known cause."""
        with self._lock:
            old = self._of[name]
            since = self._wall() if old.online or old.cause == "never" else old.since
            self._of[name] = replace(old, online=False, since=since, cause=cause, detail=detail)
        if detail:
            self.note(name, cause, detail)

    def note(self, name: str, cause: str, detail: str) -> None:
        """Something is wrong with a party: to be said, but not again and again."""
        with self._lock:
            if self._clock() - self._noticed.get((name, cause), -NOTICE_SECONDS) >= NOTICE_SECONDS:
                self._noticed[name, cause] = self._clock()
                self._notices.append((name, detail))

    def take_notices(self) -> list[tuple[str, str]]:
        """Parties and what was wrong with them since the last call, also where it was over in a moment."""
        with self._lock:
            taken, self._notices = self._notices, []
        return taken

    def look(self) -> dict[str, PartyPresence]:
        """Every party as it is now."""
        now = self._clock()
        with self._lock:
            for name, old in self._of.items():
                if not old.online:
                    continue
                closed = self._closed.get(name)
                ago, cause = now - self._heard[name], ""
                if closed is not None and now - closed > CLOSED_SECONDS:
                    ago, cause = now - closed, "closed"
                elif ago > SILENT_SECONDS:
                    cause = "silent"
                if cause:
                    self._of[name] = replace(old, online=False, since=self._wall() - ago, cause=cause)
            return dict(self._of)


NOTICE_SECONDS = 600.0
"""The same thing about the same party is said once in so many seconds."""
CLOSED_SECONDS = 5.0
"""Seconds without any connection after which a party counts as offline: it may be behind a proxy that closes often."""
