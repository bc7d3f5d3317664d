"""The coordinator's view of its parties: who is online, late, refused, out of budget and why."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulcrum.flower.coordinator import FlowerEngine
from fulcrum.flower.operations.checks import count_days_left
from fulcrum.flower.operations.monitor import Monitor
from fulcrum.flower.registry import PartyRegistry
from fulcrum.runs import folder as record
from fulcrum.types import RoundResult

STATUS_FILE = "status.json"
PARTY_STATES = ("online", "late", "offline", "refused", "out of budget", "expected")
STATUS_SECONDS = 5.0
"""status.json is written at most this often between rounds, and after every round."""


@dataclass
class CoordinatorStatus:
    """Keeps status.json, the metrics and the log lines of one served run.

    parties: the names of all registered parties. engine is None until enough of them have joined. certificate: the
    server's; its days are counted.
    """

    folder: Path
    run: str
    registry: PartyRegistry
    parties: Sequence[str]
    monitor: Monitor
    rounds: int
    needed: int
    engine: FlowerEngine | None = None
    certificate: Path | None = None
    _since: dict[str, tuple[str, str]] = field(default_factory=dict)  # party -> state and when it began
    _last: dict[str, Any] = field(default_factory=dict)
    _written: float = 0.0

    def __post_init__(self) -> None:
        self.monitor.ready = self._is_ready

    def list_parties(self) -> list[dict[str, Any]]:
        """One row per party: name, state (PARTY_STATES), since, why, units, rounds."""
        online, presence = self.registry.transport.online(), self.registry.presence()
        numbers = {info.name: k for k, info in enumerate(self.engine.clients)} if self.engine else {}
        spent = self.engine.spent() if self.engine else set()
        rows = []
        for name in self.parties:
            k = numbers.get(name)
            late = self.engine.stragglers.describe(k) if self.engine and k is not None else ""
            here = self.registry.node_of.get(name) in online and name in self.registry.node_of
            if k is not None and k in spent:
                state, why = "out of budget", "its own ledger refused to go on"
            elif name in self.registry.refusals:
                state, why = "refused", self.registry.refusals[name]
            elif here:
                state, why = ("late", late) if late else ("online", "")
            elif name in self.registry.node_of or (name in presence and presence[name].last_seen):
                state, why = "offline", presence[name].words if name in presence else "its node is not connected"
            else:
                state, why = "expected", presence[name].words if name in presence else "it has not joined yet"
            before = self._since.get(name)
            if before is None or before[0] != state:
                self._since[name] = state, record.current_utc_time()
                if before is not None:
                    self.monitor.event("party", party=name, state=state, why=why)
            info = self.registry.parties.get(name)
            rows.append(
                {
                    "party": name,
                    "state": state,
                    "since": self._since[name][1],
                    "why": why,
                    "units": info.units if info else None,
                    "answered": self._last.get("answered", {}).get(name, 0),
                }
            )
        return rows

    def refresh(self, force: bool = False) -> None:
        """Update the metrics and status.json, at most every few seconds unless forced."""
        self.monitor.beat()
        if not force and time.monotonic() - self._written < STATUS_SECONDS:
            return
        self._written = time.monotonic()
        rows = self.list_parties()
        self.monitor.clear("fulcrum_party_state")
        for state in PARTY_STATES:
            self.monitor.set("fulcrum_parties", sum(row["state"] == state for row in rows), state=state)
        count: Callable[[], Mapping[str, int]] = getattr(self.registry.transport, "port_counts", dict)
        for name, value in count().items():
            self.monitor.set(f"fulcrum_port_{name}", value)
        if self.certificate is not None and (days := count_days_left(self.certificate)) is not None:
            self.monitor.set("fulcrum_certificate_days_left", days)
        for row in rows:
            self.monitor.set("fulcrum_party_state", 1.0, party=row["party"], state=row["state"])
        shown = {name: value for name, value in self._last.items() if name != "answered"}
        content = {
            "format": 1,
            "time": record.current_utc_time(),
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "run": self.run,
            "rounds": self.rounds,
            "needed": self.needed,
            "last_round": shown,
            "parties": rows,
        }
        with contextlib.suppress(OSError):  # a full disk ends a run elsewhere, where something would be lost
            record.write_file_atomically(self.folder / STATUS_FILE, record.to_json_text(content).encode())

    def note_round(self, result: RoundResult) -> None:
        """A round is finished: one log line, the metrics, status.json."""
        names = [info.name for info in self.engine.clients] if self.engine else []
        answered = [names[k] for k in result.participants or ()]
        counts: Mapping[str, int] = self._last.get("answered", {})
        score = {name: round(value, 6) for name, value in result.metrics.items()}
        line = {
            "round": result.round,
            "rounds": result.rounds,
            "seconds": round(result.seconds, 3),
            "parties_answered": answered,
            "epsilon": result.epsilon,
            "C": [float(f"{value:.6g}") for value in result.C],
            **score,
        }
        self._last = {**line, "answered": {name: counts.get(name, 0) + (name in answered) for name in names}}
        self.monitor.event("round", run=self.run, **line)
        for name, value in (
            ("fulcrum_round", result.round),
            ("fulcrum_rounds", result.rounds),
            ("fulcrum_round_seconds", result.seconds),
            ("fulcrum_epsilon", result.epsilon),
            ("fulcrum_round_answers", len(answered)),
        ):
            self.monitor.set(name, value)
        for name, value in result.metrics.items():
            self.monitor.set("fulcrum_score", value, metric=name)
        self.monitor.add("fulcrum_rounds_total")
        self.refresh(force=True)

    def _is_ready(self) -> tuple[bool, str]:
        here = sum(row["state"] in ("online", "late") for row in self.list_parties())
        return here >= self.needed, f"{here} of at least {self.needed} parties are online"
