"""Finding 11: `INSERT OR REPLACE` from an ordinary SQLite client rewrote rows of a ledger.

At 243f1c8 triggers refused UPDATE and DELETE, and REPLACE deletes without calling them: a party's spend could be made
smaller by one statement, and nothing showed. Now the statement is refused, every row is chained by hash, and a file
whose rows are not those that were written is refused when it is opened, with the first wrong row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fulcrum.errors import InputError
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import Ledger, LedgerHead, RunPlan, RunRecord
from fulcrum.privacy.ledger.chain import CHAINED_TABLES, EMPTY_DIGEST, compute_row_digest

TERMS = {"delta": 1e-5, "accountant": "rdp", "unit": "example", "population": "digits"}
CHEAP = '[["gaussian",0.05,100.0,1]]'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with rows in every table."""
    path = tmp_path / "ledger.sqlite"
    with Ledger.open(path) as ledger:
        for party in ("a", "b"):
            ledger.enroll(party, 5.0, **TERMS)  # type: ignore[arg-type]
        record = RunRecord("r", "moo", True, True, "seeded", "fast", "plain", "example", "s", "d", "t", True)
        ledger.register_run(record, dict.fromkeys("ab", RunPlan((Gaussian(0.05, 1.0, 9),), 1e-5)))
        ledger.register_all_units("r", {"a": b"a" * 32, "b": b"b" * 16})
        for t in range(3):
            ledger.reserve("r", t, {"a": [Gaussian(0.05, 1.0)], "b": [Gaussian(0.05, 1.0)]})
            ledger.settle("r", t, {"b": "x", "a": "y"})
    return path


def edit(path: Path, *statements: str, triggers: bool = False) -> None:
    """What an ordinary client does; without triggers it has dropped them first."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        if not triggers:
            for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
                db.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            db.execute(statement)


@pytest.mark.parametrize("table", [*CHAINED_TABLES, "chain"])
def test_replacing_a_row_is_refused_by_the_file_itself(path: Path, table: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for form in ("INSERT OR REPLACE INTO", "REPLACE INTO"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(f"{form} {table} SELECT * FROM {table} LIMIT 1")
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):  # also under a new row number
            db.execute(f"REPLACE INTO entries SELECT 99, party, run, round, attempt, '{CHEAP}', time FROM entries")
    Ledger.open(path).close()


CHANGES: dict[str, tuple[str, str]] = {
    "cheaper events": (
        f"REPLACE INTO entries SELECT id, party, run, round, attempt, '{CHEAP}', time FROM entries WHERE id = 3",
        "row 3 of entries",
    ),
    "another budget": ("UPDATE budgets SET epsilon = 50 WHERE id = 1", "row 1 of budgets"),
    "another name": ("UPDATE parties SET name = 'z' WHERE id = 2", "row 2 of parties"),
    "a sound rule": ("UPDATE runs SET record = replace(record, '\"moo\"', '\"median\"')", "row 1 of runs"),
    "another seed": ("UPDATE runs SET seed_digest = 'u'", "row 1 of runs"),
    "a larger plan": ("UPDATE plans SET events = '[]' WHERE id = 2", "row 2 of plans"),
    "another order": ("UPDATE terms SET renyi_order = 2.0 WHERE id = 1", "row 1 of terms"),
    "other units": ("UPDATE unit_sets SET members = zeroblob(16) WHERE id = 2", "row 2 of unit_sets"),
    "another set": ("UPDATE units SET unit_set = 2 WHERE id = 1", "row 1 of units"),
    "another digest": ("UPDATE settlements SET digest = 'z' WHERE entry = 4", "row 4 of settlements"),
    "another identity": ("UPDATE identity SET value = 'mine'", "row 1 of identity"),
    "the last bit of a time": ("UPDATE entries SET time = time + 1e-6 WHERE id = 5", "row 5 of entries"),
    "a deleted reservation": ("DELETE FROM entries WHERE id = 6", "row 6 of entries"),
    "a deleted party": ("DELETE FROM parties WHERE id = 2", "row 2 of parties"),
    "a row without a link": ("INSERT INTO budgets VALUES (7, 1, 50, 0)", "row 7 of budgets is not in its chain"),
    "a link that is gone": ("DELETE FROM chain WHERE sequence = 5", "row 5 of its chain is missing"),
    "the last link gone": (
        "DELETE FROM chain WHERE sequence = (SELECT max(sequence) FROM chain)",
        "is not in its chain",
    ),
    "a changed link": ("UPDATE chain SET digest = zeroblob(32) WHERE sequence = 8", "number 8 of the chain"),
    "an earlier format": ("PRAGMA user_version = 2", "says format 2 and has the chain"),
    "no chain at all": ("DROP TABLE chain", "says format 3 and lacks the chain"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_refused_with_the_first_wrong_row(path: Path, change: str) -> None:
    statement, words = CHANGES[change]
    Ledger.open(path).close()
    edit(path, statement)
    with pytest.raises(InputError, match=f"was changed by something other than Fulcrum: .*{words}"):
        Ledger.open(path)


def test_dropping_triggers_alone_changes_no_row(path: Path) -> None:
    edit(path)
    with Ledger.open(path) as ledger:
        assert ledger.spent("a").releases == 3


def cut_tail(path: Path) -> None:
    """Remove the newest reservation and settlement with their links: a file that looks whole."""
    edit(
        path,
        "DELETE FROM settlements WHERE entry = 6",
        "DELETE FROM entries WHERE id = 6",
        "DELETE FROM chain WHERE (source, row) IN (('settlements', 6), ('entries', 6), ('settlements', 5))",
        "DELETE FROM settlements WHERE entry = 5",
    )


def rewrite(path: Path) -> None:
    """What the chain does not stop: someone who changes a row and computes all digests again."""
    edit(path, f"UPDATE entries SET events = '{CHEAP}' WHERE id = 1")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        digest = EMPTY_DIGEST
        for sequence, table, row in db.execute("SELECT sequence, source, row FROM chain ORDER BY sequence").fetchall():
            content = db.execute(f"SELECT * FROM {table} WHERE {CHAINED_TABLES[table]} = ?", (row,)).fetchone()
            digest = compute_row_digest(digest, table, content)
            db.execute("UPDATE chain SET digest = ? WHERE sequence = ?", (digest, sequence))


@pytest.mark.parametrize(
    ("attack", "words"), [(cut_tail, "was rolled back: it has"), (rewrite, "was rewritten: its row")]
)
def test_a_head_that_was_kept_tells_a_cut_and_a_rewritten_ledger_apart(
    path: Path, attack: Callable[[Path], None], words: str
) -> None:
    with Ledger.open(path) as ledger:
        head = ledger.head()
        ledger.check_contains(head)
    attack(path)
    with Ledger.open(path) as ledger, pytest.raises(InputError, match=words):  # it opens: the file alone shows nothing
        ledger.check_contains(head)


def test_a_head_tells_another_ledger_apart(path: Path, tmp_path: Path) -> None:
    with Ledger.open(path) as ledger, Ledger.open(tmp_path / "other") as other:
        for _ in range(30):  # a longer one
            other.enroll("a", 5.0, **TERMS)  # type: ignore[arg-type]
            other.change_budget("a", 5.0)
        with pytest.raises(InputError, match=r"is another ledger \(.*\) than the one that this run was charged to"):
            other.check_contains(ledger.head())
        other.check_contains(LedgerHead(other.identity, 0, ""))
        ledger.reserve("r", 5, {"a": [Gaussian(0.05, 1.0)]})
        ledger.check_contains(ledger.head())


def test_a_row_that_is_changed_while_the_ledger_is_open_is_seen(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.spent("a")
        rewrite(path)
        with pytest.raises(InputError, match="was changed from outside while it was open"):
            ledger.reserve("r", 5, {"a": [Gaussian(0.05, 1.0)]})


def test_what_another_process_adds_is_checked_too(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.spent("a")
        with Ledger.open(path) as other:
            other.reserve("r", 7, {"a": [Gaussian(0.05, 1.0)]})
        edit(path, f"UPDATE entries SET events = '{CHEAP}' WHERE round = 7")
        with pytest.raises(InputError, match="row 7 of entries"):
            ledger.spent("a")
