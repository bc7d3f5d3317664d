"""`fulcrum status`: a coordinator's status.json or a party's, as a table that a person reads."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulcrum.errors import RunError
from fulcrum.flower.operations.coordinator_status import STATUS_FILE
from fulcrum.flower.operations.party_status import PARTY_STATUS_FILE
from fulcrum.privacy.accounting import format_epsilon

OLD_SECONDS = 60.0
"""A status that is older than this was written by a process that hangs or is gone."""


def read_status(folder: Path) -> dict[str, Any]:
    """The status in a run's folder, or in a party's (beside its ledger)."""
    place = folder.parent if folder.is_file() else folder
    for name in (STATUS_FILE, PARTY_STATUS_FILE):
        if (place / name).is_file():
            try:
                found = json.loads((place / name).read_text(encoding="utf-8"))
            except ValueError:
                raise RunError(f"{place / name} is damaged; it is written anew while the process runs.") from None
            if isinstance(found, dict):
                return {"file": str(place / name), **found}
    raise RunError(
        f"{place} holds no {STATUS_FILE}: it is no folder of fulcrum serve, nor one with a party's ledger; name one."
    )


def describe_process(status: Mapping[str, Any], now: datetime.datetime | None = None) -> str:
    """Whether the process that wrote the status still runs, and how old the status is."""
    now = now or datetime.datetime.now(datetime.UTC)
    try:
        written = datetime.datetime.fromisoformat(str(status["time"]))
        written = written if written.tzinfo else written.replace(tzinfo=datetime.UTC)
        age = (now - written).total_seconds()
    except (KeyError, ValueError):
        return "of unknown age"
    words = f"written {age:.0f} s ago"
    if status.get("host") == os.uname().nodename and not _runs(int(status.get("pid", 0))):
        return f"{words}, by a process that has ended"
    return words if age < OLD_SECONDS else f"{words}: the process hangs, or ended on another machine"


def _runs(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _format_spent(value: Any) -> str:
    return format_epsilon(value) if isinstance(value, int | float) else str(value)


def format_status(status: Mapping[str, Any]) -> list[str]:
    """The status as lines: the run, then one line per party, those that need somebody first."""
    if "parties" not in status:
        lines = [f"party {status.get('party')}: {describe_process(status)}"]
        return lines + [f"  {name}: {value}" for name, value in status.get("facts", {}).items()]
    last = status.get("last_round") or {}
    lines = [f"run {status.get('run')}: {describe_process(status)}"]
    if last:
        lines.append(
            f"round {last.get('round')} of {status.get('rounds')}, {last.get('seconds')} s, answered by "
            f"{len(last.get('parties_answered', ()))}; epsilon {_format_spent(last.get('epsilon'))}"
        )
    else:
        lines.append(f"before round 1 of {status.get('rounds')}; at least {status.get('needed')} parties are needed")
    order = {"refused": 0, "out of budget": 1, "late": 2, "offline": 3, "expected": 4, "online": 5}
    rows = sorted(status["parties"], key=lambda row: (order.get(row["state"], 9), row["party"]))
    width = max((len(row["party"]) for row in rows), default=5)
    for row in rows:
        why = f": {row['why']}" if row.get("why") else ""
        lines.append(f"  {row['party']:{width}}  {row['state']:13} since {row['since']}{why}")
    return lines
