"""Which ledger each party has paid from: a party that comes back with another one would have its budget twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fulcrum.errors import ConfigError, InputError
from fulcrum.privacy.ledger import LedgerHead
from fulcrum.runs import folder as record

FILE_NAME = "ledgers.json"
"""The file in the register that names each party's ledger."""


def head_to_table(head: LedgerHead) -> dict[str, Any]:
    """A ledger's head for a welcome: its random name, its number of rows, and the digest of the last."""
    return {"id": head.ledger, "rows": head.sequence, "digest": head.digest}


@dataclass(frozen=True)
class KnownLedger:
    """A ledger as a party last showed it."""

    id: str
    rows: int
    digest: str


def read_welcome_ledger(table: Any) -> KnownLedger | None:
    """The ledger in a welcome; None where it is not named properly."""
    if not isinstance(table, Mapping) or set(table) != {"id", "rows", "digest"}:
        return None
    id, rows, digest = table["id"], table["rows"], table["digest"]
    texts = all(isinstance(text, str) and len(text) <= 128 and text.isprintable() for text in (id, digest))
    if not (texts and id and isinstance(rows, int) and not isinstance(rows, bool) and 0 <= rows < 2**53):
        return None
    return KnownLedger(id, rows, digest)


class LedgerBook:
    """What is known of parties' ledgers: in memory, and in a file of the register that outlives the run."""

    def __init__(self, path: Path | None = None) -> None:
        """path: the file; None keeps it in memory only, as for simulations."""
        self.path = path
        self._known: dict[str, KnownLedger] = {}
        if path is not None and path.is_file():
            try:
                found = {name: read_welcome_ledger(row) for name, row in json.loads(path.read_bytes()).items()}
                self._known = {name: known for name, known in found.items() if known is not None}
                if len(self._known) < len(found):
                    raise ValueError
            except (OSError, ValueError, TypeError, AttributeError, RecursionError):
                raise ConfigError(
                    f"{path} cannot be read; it names each party's ledger, so bring a copy of it back."
                ) from None

    def find_problem(self, party: str, table: Any) -> str:
        """Why a party's ledger is not accepted; "" where it is. An accepted one is remembered."""
        shown, before = read_welcome_ledger(table), self._known.get(party)
        if shown is None:
            return "it does not say which ledger it pays from"
        if before is not None and shown.id != before.id:
            return (
                f"it pays from another ledger ({shown.id}) than before ({before.id}), so its budget would start anew; "
                f"it must bring the old one back{self._say_where(party)}"
            )
        if before is not None and shown.rows < before.rows:
            return f"its ledger was rolled back: it has {shown.rows} rows, and had {before.rows}"
        if before is not None and shown.rows == before.rows and shown.digest != before.digest:
            return "its ledger was rewritten: its last row is not the one that it had"
        if shown != before:
            self._known[party] = shown
            self._write()
        return ""

    def _say_where(self, party: str) -> str:
        if self.path is None:
            return ""
        return f", or, if it is lost, agree on terms that count what was spent and take {party} out of {self.path}"

    def _write(self) -> None:
        if self.path is None:
            return
        content = {name: asdict(known) for name, known in sorted(self._known.items())}
        try:
            record.write_file_atomically(self.path, record.to_json_text(content).encode())
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be written: {error.strerror}; the register must remember each party's ledger."
            ) from None
