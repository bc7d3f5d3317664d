"""A party's own view: connection, last round, what is spent; in log lines, metrics and party-status.json."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulcrum.flower.messages import MAX_HEADER_BYTES, Envelope
from fulcrum.flower.operations.monitor import Monitor
from fulcrum.flower.party import PartyService
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.runs import folder as record

PARTY_STATUS_FILE = "party-status.json"
REFRESH_SECONDS = 10.0
AnswerFn = Callable[[Envelope, bool], Envelope]


@dataclass
class PartyStatus:
    """Watches a party's service. folder: where party-status.json goes, beside the ledger. node: its `health` counts."""

    folder: Path
    service: PartyService
    monitor: Monitor
    node: Any = None
    _facts: dict[str, Any] = field(default_factory=dict)
    _connection: tuple[bool, str] | None = None
    _written: float = 0.0

    def __post_init__(self) -> None:
        self.monitor.ready = self._is_ready

    def attach(self, node: Any) -> None:
        """The node that carries requests to this party; its health is shown."""
        self.node = node

    def watch(self, answer: AnswerFn) -> AnswerFn:
        """The answer function, with a log line and metrics for every request."""

        def watched(request: Envelope, expired: bool) -> Envelope:
            asked = read_loosely(request)
            kind = str(asked.get("kind", "unknown"))
            what = f"round {asked.get('round', -1) + 1}" if kind == "round" else kind
            began = time.monotonic()
            with self.monitor.work_on(what):
                reply = answer(request, expired)
            self._note(kind, asked, read_loosely(reply), time.monotonic() - began)
            return reply

        return watched

    def _note(self, kind: str, asked: dict[str, Any], said: dict[str, Any], seconds: float) -> None:
        refused = said.get("code", "") if said.get("kind") == "refused" else ""
        self.monitor.add("fulcrum_party_requests_total", kind=kind if kind in ("hello", "round", "done") else "other")
        if refused:
            self.monitor.add("fulcrum_party_refusals_total", code=refused)
        self._facts["last request"] = f"{kind} at {record.current_utc_time()}" + (
            f", refused: {refused}" if refused else ""
        )
        spent: dict[str, Any] = {}
        if kind == "round":
            spent = {"round": asked.get("round", -1) + 1, "rounds": asked.get("rounds"), **self._measure_budget()}
            self._facts |= {"run": asked.get("run"), "last round": f"{spent['round']} of {spent['rounds']}"}
            self.monitor.set("fulcrum_party_round_seconds", seconds)
            self.monitor.set("fulcrum_party_round", spent["round"])
            self.monitor.add("fulcrum_party_rounds_total", 0.0 if refused else 1.0)
        self.monitor.event(
            kind, run=asked.get("run"), **spent, seconds=round(seconds, 3), **({"refused": refused} if refused else {})
        )
        self.refresh(force=True)

    def _measure_budget(self) -> dict[str, float]:
        terms = self.service.terms
        if terms is None or terms.party not in self.service.ledger.accounts():
            return {}
        epsilon = self.service.ledger.epsilon(terms.party)
        self._facts["epsilon"] = f"{format_epsilon(epsilon)} of {format_epsilon(terms.budget)}"
        self.monitor.set("fulcrum_party_epsilon", epsilon)
        self.monitor.set("fulcrum_party_budget", terms.budget)
        return {"epsilon": epsilon, "budget": terms.budget}

    def refresh(self, force: bool = False) -> None:
        """Update party-status.json and the metrics; a change of the connection is a line of the log."""
        self.monitor.beat()
        health = getattr(self.node, "health", None)
        if health is not None and (health.connected, health.cause) != self._connection:
            # Also where only the cause changed: a key that was revoked must not read as a broken line.
            self._connection, force = (health.connected, health.cause), True
            self.monitor.event("connection", connected=health.connected, cause=health.cause, words=health.words)
        if not force and time.monotonic() - self._written < REFRESH_SECONDS:
            return
        self._written = time.monotonic()
        if health is not None:
            state = "connected" if health.connected else f"NOT connected ({health.cause}): {health.words}"
            self._facts["connection"] = (
                f"{state}, since {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(health.since))}"
            )
            self.monitor.set("fulcrum_party_connected", float(health.connected))
            self.monitor.set("fulcrum_party_clock_ahead_seconds", health.clock_ahead)
        content = {
            "format": 1,
            "time": record.current_utc_time(),
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "party": self.service.name,
            "facts": self._facts,
        }
        with contextlib.suppress(OSError):  # a full disk must not end a party that only says how it is
            self.folder.mkdir(parents=True, exist_ok=True)
            record.write_file_atomically(self.folder / PARTY_STATUS_FILE, record.to_json_text(content).encode())

    def _is_ready(self) -> tuple[bool, str]:
        health = getattr(self.node, "health", None)
        if self.service.terms is None:
            return False, "no terms are agreed"
        if health is None:
            return False, "starting"
        return health.connected, "connected" if health.connected else f"{health.cause}: {health.words}"


def read_loosely(envelope: Envelope) -> dict[str, Any]:
    """What a header says, for a log; {} where it is not JSON. Nothing is decided by it."""
    if len(envelope.header) > MAX_HEADER_BYTES:
        return {}
    try:
        found = json.loads(envelope.header)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    whole = {name: found[name] for name in ("round", "rounds") if type(found.get(name)) is int}
    text = {
        name: "".join(c for c in found[name] if c.isprintable())[:64]
        for name in ("kind", "run", "code")
        if isinstance(found.get(name), str)
    }
    return {**text, **whole}
