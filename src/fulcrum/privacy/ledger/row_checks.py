"""What a row of each table holds. A row of another form was not written by Fulcrum, whatever its digest says.

Whoever can write a ledger's file can make a chain that fits it. Such a file may say something wrong (only a head that
was kept elsewhere shows that), but it is read or refused in a sentence, and never ends the program.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from fulcrum.errors import InputError
from fulcrum.privacy.accounting import ORDERS
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger.rows import RunRecord, read_events_text
from fulcrum.privacy.ledger.units import UNIT_DIGEST_BYTES

MAX_SIGMA, MAX_COUNT = 1e100, 1 << 53
"""Beyond these, sums of releases are no longer exact, or overflow."""

Check = Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def _is_cost(value: Any) -> bool:
    """An epsilon, or nothing; it may be infinite."""
    return value is None or (_is_number(value) and value >= 0)


def _is_delta(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _is_order(value: Any) -> bool:
    return _is_number(value) and float(ORDERS[0]) <= value <= float(ORDERS[-1])


def _is_digest(value: Any) -> bool:
    return isinstance(value, bytes)


def _is_unit_list(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) % UNIT_DIGEST_BYTES == 0


def _is_events(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        events = read_events_text(value)
    except InputError:  # of a kind that a later version knows: refused when it is needed, and kept as it is
        return True
    return all(
        event.count <= MAX_COUNT
        and (not isinstance(event, Gaussian) or (0 < event.rate <= 1 and 0 <= event.sigma <= MAX_SIGMA))
        for event in events
    )


def _is_record(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return False
    kinds = get_type_hints(RunRecord)
    return (
        isinstance(found, dict)
        and set(found) == {field.name for field in dataclasses.fields(RunRecord)}
        and all(isinstance(entry, kinds[name]) for name, entry in found.items())
    )


_WHOLE, _TEXT, _TIME = _is_whole, _is_text, _is_number
ROW_CHECKS: dict[str, tuple[Check, ...]] = {
    "identity": (_WHOLE, _TEXT, _WHOLE, _TIME),
    "parties": (_WHOLE, _TEXT, _is_delta, _TEXT, _TEXT, _TEXT, _TIME),
    "budgets": (_WHOLE, _WHOLE, _is_cost, _TIME),
    "runs": (_WHOLE, _TEXT, _TEXT, _is_record, _TIME),
    "terms": (_WHOLE, _WHOLE, _TEXT, _is_order, _TIME),
    "plans": (_WHOLE, _WHOLE, _TEXT, _is_events, _is_delta, _is_cost, _TIME),
    "unit_sets": (_WHOLE, _is_digest, _is_unit_list, _TIME),
    "units": (_WHOLE, _TEXT, _TEXT, _WHOLE, _WHOLE, _TIME),
    "entries": (_WHOLE, _WHOLE, _TEXT, _WHOLE, _WHOLE, _is_events, _TIME),
    "settlements": (_WHOLE, _TEXT, _TIME),
}
"""Of each table, in the order of its columns, what may stand in a row."""


def is_row_right(table: str, row: Sequence[Any]) -> bool:
    """Whether a row has the form of its table."""
    checks = ROW_CHECKS.get(table, ())
    return len(row) == len(checks) and all(check(value) for check, value in zip(checks, row, strict=True))


def find_loose_reference(db: sqlite3.Connection) -> str:
    """A row that refers to a row that is not there, in words; "" where there is none."""
    loose = db.execute("PRAGMA foreign_key_check").fetchone()
    if loose is not None:
        return f"row {loose[1]} of {loose[0]} refers to a row of {loose[2]} that is not there"
    bare = db.execute("SELECT name FROM parties WHERE id NOT IN (SELECT party FROM budgets) LIMIT 1").fetchone()
    return "a party has no budget row" if bare is not None else ""


def refuse_wrong_row(path: object, table: str, row: Sequence[Any]) -> None:
    """InputError where a row does not have the form of its table."""
    if not is_row_right(table, row):
        number = row[0] if row else "?"
        raise InputError(
            f"ledger {path} is damaged: row {number} of {table} does not hold what such a row holds; restore it from a "
            "copy."
        )
