"""The ledger: nobody overspends, nothing is forgotten, a crash loses nothing that was released."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulcrum.errors import BudgetError, ConfigError, InputError
from fulcrum.privacy.accounting import Spend, compute_epsilon, compute_max_steps
from fulcrum.privacy.events import EVENT_KINDS, Event, Gaussian, Unprotected
from fulcrum.privacy.ledger import Ledger, LedgerAccount, LedgerHead, RunPlan, RunRecord, store
from fulcrum.privacy.ledger.rows import read_events_text

DELTA = 1e-5
STEP = (Gaussian(0.05, 1.0),)
TERMS: dict[str, Any] = {"delta": DELTA, "accountant": "rdp", "unit": "example", "population": "digits"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger.open(path) as opened:
        opened.enroll("a", 2.0, **TERMS)
        opened.enroll("b", None, **TERMS)
        yield opened


def raw(path: Path) -> closing[sqlite3.Connection]:
    """The file as any other program would open it."""
    return closing(sqlite3.connect(path, isolation_level=None))


# --- accounts -----------------------------------------------------------------------------------


def test_enrolling_again_changes_nothing_and_other_terms_are_refused(ledger: Ledger, path: Path):
    ledger.enroll("a", 5.0, **TERMS)
    assert ledger.accounts()["a"] == LedgerAccount("a", 2.0, DELTA, "rdp", "example", "digits")
    for field, other in (("unit", "person"), ("delta", 1e-6), ("accountant", "pld"), ("population", "mnist")):
        with pytest.raises(ConfigError, match=f"party 'a' is in the ledger with {field} = "):
            ledger.enroll("a", 2.0, **{**TERMS, field: other})
    with Ledger.open(path) as again, pytest.raises(ConfigError, match="unit"):  # also when not in memory yet
        again.enroll("a", 2.0, **{**TERMS, "unit": "person"})


def test_one_refusal_enrolls_nobody(ledger: Ledger):
    with pytest.raises(ConfigError):
        ledger.enroll_parties(
            [LedgerAccount("new", 1.0, **TERMS), LedgerAccount("a", 1.0, **{**TERMS, "unit": "person"})]
        )
    assert set(ledger.accounts()) == {"a", "b"}
    ledger.enroll_parties([LedgerAccount("new", 1.0, **TERMS), LedgerAccount("new", 1.0, **TERMS)])
    assert set(ledger.accounts()) == {"a", "b", "new"}


@pytest.mark.parametrize("budget", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_budgets_are_refused(ledger: Ledger, budget: float):
    with pytest.raises(ConfigError, match="budget of party 'c'"):
        ledger.enroll("c", budget, **TERMS)
    with pytest.raises(ConfigError, match="budget of party 'a'"):
        ledger.change_budget("a", budget)


def test_a_budget_is_changed_only_on_purpose(ledger: Ledger, path: Path):
    assert ledger.reserve("r", 0, {"a": [Gaussian(1.0, 1.0)]}) == {"a": False}
    ledger.change_budget("a", 50.0)
    assert ledger.reserve("r", 0, {"a": [Gaussian(1.0, 1.0)]}) == {"a": True}
    with raw(path) as db:
        rows = db.execute("SELECT epsilon FROM budgets ORDER BY id").fetchall()
    assert rows == [(2.0,), (None,), (50.0,)]  # the former one stays on record


# --- reserve ------------------------------------------------------------------------------------


def test_hard_stop_before_the_budget_over_runs(path: Path):
    fit = compute_max_steps(*((STEP[0].rate, STEP[0].sigma)), 2.0, DELTA)
    granted = 0
    for run in ("first", "second"):  # a new process each: nothing may be forgotten in between
        with Ledger.open(path) as ledger:
            ledger.enroll("a", 2.0, **TERMS)
            granted += sum(ledger.reserve(run, t, {"a": STEP})["a"] for t in range(fit * 2 // 3))
    assert granted == fit > 5
    with Ledger.open(path) as ledger:
        assert ledger.epsilon("a") == pytest.approx(compute_epsilon([Gaussian(0.05, 1.0, fit)], DELTA))
        assert ledger.epsilon("a") <= 2.0 < compute_epsilon([Gaussian(0.05, 1.0, fit + 1)], DELTA)


def test_a_budget_that_is_met_exactly_is_granted(ledger: Ledger):
    ledger.enroll("exact", compute_epsilon(STEP, DELTA), **TERMS)
    ledger.enroll("short", compute_epsilon(STEP, DELTA) * (1 - 1e-8), **TERMS)
    assert ledger.reserve("r", 0, {"exact": STEP, "short": STEP}) == {"exact": True, "short": False}


def test_the_accountant_of_the_party_decides(ledger: Ledger):
    between = (
        compute_epsilon([Gaussian(0.05, 1.0, 50)], DELTA, "rdp")
        + compute_epsilon([Gaussian(0.05, 1.0, 50)], DELTA, "pld")
    ) / 2
    ledger.enroll("rdp", between, **TERMS)
    ledger.enroll("pld", between, **{**TERMS, "accountant": "pld"})
    wanted = (Gaussian(0.05, 1.0, 50),)
    ledger.register_plans("r", dict.fromkeys(("rdp", "pld"), RunPlan(wanted, DELTA)))
    assert ledger.reserve("r", 0, {"rdp": wanted, "pld": wanted}) == {"rdp": False, "pld": True}
    assert ledger.epsilons() == {
        "a": 0.0,
        "b": 0.0,
        "rdp": 0.0,
        "pld": pytest.approx(compute_epsilon(wanted, DELTA, "pld")),
    }


def test_without_a_budget_everything_is_recorded_and_nothing_refused(ledger: Ledger):
    assert ledger.reserve("r", 0, {"b": [Unprotected()], "a": [Unprotected()]}) == {"b": True, "a": False}
    assert ledger.epsilon("b") == float("inf")
    assert ledger.epsilon("a") == 0


def test_the_same_reservation_again_is_free(ledger: Ledger):
    assert ledger.reserve("r", 3, {"a": STEP}) == {"a": True}
    spent = ledger.spent("a")
    assert ledger.reserve("r", 3, {"a": STEP, "b": STEP}) == {"a": True, "b": True}
    assert ledger.spent("a") == spent == Spend.empty().add_events(STEP)
    with pytest.raises(BudgetError, match="already reserved other events for round 3 of run 'r'"):
        ledger.reserve("r", 3, {"a": [Gaussian(0.05, 2.0)]})
    assert ledger.spent("a") == spent


def test_again_is_free_even_when_the_budget_is_gone(ledger: Ledger):
    ledger.enroll("c", compute_epsilon(STEP, DELTA), **TERMS)
    assert ledger.reserve("r", 0, {"c": STEP})["c"]
    assert not ledger.reserve("r", 1, {"c": STEP})["c"]
    assert ledger.reserve("r", 0, {"c": STEP})["c"]


def test_another_attempt_is_paid_again(ledger: Ledger):
    ledger.reserve("r", 0, {"a": STEP})
    ledger.reserve("r", 0, {"a": STEP}, attempt=1)
    assert ledger.spent("a") == Spend.empty().add_events(STEP, 2)


def test_an_unknown_party_stops_the_whole_round(ledger: Ledger):
    with pytest.raises(InputError, match="party 'z' is not in the ledger"):
        ledger.reserve("r", 0, {"a": STEP, "z": STEP})
    assert ledger.spent("a") == Spend.empty()
    for ask in (ledger.spent, ledger.epsilon, ledger.entries):
        with pytest.raises(InputError, match="'z'"):
            ask("z")


def test_events_keep_every_digit(ledger: Ledger, path: Path):
    events: tuple[Event, ...] = (Gaussian(0.1 + 0.2, 2 / 3, 7), Unprotected(2))
    ledger.reserve("r", 0, {"b": events})
    with Ledger.open(path) as again:
        assert again.entries("b")[0].events == events
        assert again.spent("b") == Spend.empty().add_events(events)


def test_a_round_of_ten_thousand_is_one_transaction(ledger: Ledger):
    names = [f"p{k}" for k in range(10_000)]
    ledger.enroll_parties(LedgerAccount(name, 2.0, **TERMS) for name in names)
    statements: list[str] = []
    ledger._store.db.set_trace_callback(statements.append)
    assert all(ledger.reserve("r", 0, dict.fromkeys(names, STEP)).values())
    ledger.settle("r", 0, dict.fromkeys(names, "digest"))
    assert sum(text.startswith("COMMIT") for text in statements) == 2
    assert len({id(ledger.spent(name)) for name in names[:50]}) == 1  # equal pasts share one total


def test_two_open_ledgers_see_each_other(ledger: Ledger, path: Path):
    with Ledger.open(path) as other:
        ledger.reserve("r", 0, {"a": STEP})
        other.reserve("s", 0, {"a": STEP})
        ledger.reserve("r", 1, {"a": STEP})
        assert other.spent("a") == ledger.spent("a") == Spend.empty().add_events(STEP, 3)
        other.enroll("late", 1.0, **TERMS)
        assert "late" in ledger.accounts()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.integers(0, 3), st.integers(0, 1), st.booleans(), st.sampled_from([0.8, 1.5, 3])
        ),
        max_size=12,
    )
)
def test_any_order_of_calls_matches_a_plain_dictionary(asked: list[tuple[int, int, int, bool, float]]):
    """Two handles on one ledger against the obvious model: a dictionary of what is held, summed from scratch."""
    held: dict[tuple[int, int], tuple[Event, ...]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Ledger.open(f"{folder}/l") as first,
        Ledger.open(f"{folder}/l") as second,
    ):
        first.enroll("a", 2.0, **TERMS)
        for handle, round, attempt, repeat, sigma in asked:
            ledger, key = (first, second)[handle], (round, attempt)
            events = held[key] if repeat and key in held else (Gaussian(0.1, sigma, 2),)
            if key in held and held[key] != events:
                with pytest.raises(BudgetError):
                    ledger.reserve("r", round, {"a": events}, attempt)
                continue
            after = [event for other in {**held, key: events}.values() for event in other]
            fits = key in held or compute_epsilon(after, DELTA) <= 2.0
            assert ledger.reserve("r", round, {"a": events}, attempt) == {"a": fits}
            if fits:
                held[key] = events
        total = Spend.empty().add_events(e for events in held.values() for e in events)
        assert first.spent("a") == second.spent("a") == total


# --- settle -------------------------------------------------------------------------------------


def test_settling_twice_with_another_digest_needs_a_new_attempt(ledger: Ledger):
    ledger.reserve("r", 0, {"a": STEP})
    assert ledger.count_settled_attempts("r", 0) == 0
    ledger.settle("r", 0, {"a": "x"})
    ledger.settle("r", 0, {"a": "x"})
    assert ledger.count_settled_attempts("r", 0) == 1
    with pytest.raises(BudgetError, match="already released something else in round 0"):
        ledger.settle("r", 0, {"a": "y"})
    ledger.reserve("r", 0, {"a": STEP}, attempt=1)
    ledger.settle("r", 0, {"a": "y"})
    assert [(e.attempt, e.digest) for e in ledger.entries("a")] == [(0, "x"), (1, "y")]
    assert ledger.count_settled_attempts("r", 0) == 2


def test_settling_what_was_never_reserved_is_refused(ledger: Ledger):
    ledger.reserve("r", 0, {"a": STEP})
    with pytest.raises(BudgetError, match="party 'b' settles round 0 of run 'r', which it never reserved"):
        ledger.settle("r", 0, {"a": "x", "b": "x"})
    assert ledger.entries("a")[0].digest is None  # one transaction: all or none


def test_history_and_spends_sum_up_each_run(ledger: Ledger):
    for run, rounds in (("one", 3), ("two", 2)):
        ledger.register_plans(run, dict.fromkeys("ab", RunPlan((Gaussian(0.05, 1.0, rounds),), DELTA)))
        for t in range(rounds):
            ledger.reserve(run, t, {"a": STEP, "b": STEP})
    ledger.settle("one", 0, {"a": "x"})
    lines = {(line.party, line.run): line for line in ledger.list_run_costs()}
    assert set(lines) == {("a", "one"), ("a", "two"), ("b", "one"), ("b", "two")}
    line = lines["a", "one"]
    assert (line.first_round, line.last_round, line.reservations, line.settled, line.releases) == (0, 2, 3, 1, 3)
    assert line.epsilon == pytest.approx(compute_epsilon([Gaussian(0.05, 1.0, 3)], DELTA))
    assert ledger.get_spends("two") == {"a": Spend.empty().add_events(STEP, 2), "b": Spend.empty().add_events(STEP, 2)}
    assert ledger.get_spends()["a"] == Spend.empty().add_events(STEP, 5)


# --- the file -----------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["parties", "budgets", "entries", "settlements"])
def test_rows_can_only_be_added(ledger: Ledger, path: Path, table: str):
    ledger.reserve("r", 0, {"a": STEP})
    ledger.settle("r", 0, {"a": "x"})
    with raw(path) as db:
        column = db.execute(f"SELECT * FROM {table}").description[-1][0]
        for change in (f"DELETE FROM {table}", f"UPDATE {table} SET {column} = 0"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(change)


def test_what_is_not_a_ledger_is_refused_and_left_alone(tmp_path: Path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be taken for one " * 20)
    other = tmp_path / "other.sqlite"
    with raw(other) as db:
        db.execute("CREATE TABLE cats (name TEXT)")
    for file in (text, other):
        before = file.read_bytes()
        with pytest.raises(InputError, match="is not a Fulcrum ledger"):
            Ledger.open(file)
        assert file.read_bytes() == before
    for place in (tmp_path, tmp_path / "missing" / "ledger.sqlite"):
        with pytest.raises(InputError, match="cannot be opened"):
            Ledger.open(place)


def test_a_ledger_of_a_later_format_is_refused(ledger: Ledger, path: Path):
    with raw(path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(InputError, match="has format 99"):
        Ledger.open(path)


def write_older_file(path: Path, version: int) -> None:
    """A ledger as formats 1 and 2 had it, with parties a and b: no identity, no chain."""
    with raw(path) as db:
        for statement in store._split_statements(
            store._FIRST_TABLES + store._make_change_triggers(store._FIRST_TABLE_NAMES)
        ):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {store.SQLITE_APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {version}")
        for row, (name, budget) in enumerate((("a", 2.0), ("b", None)), start=1):
            db.execute("INSERT INTO parties VALUES (?, ?, ?, 'rdp', 'example', 'digits', 0)", (row, name, DELTA))
            db.execute("INSERT INTO budgets VALUES (?, ?, ?, 0)", (row, row, budget))


def test_a_ledger_of_format_1_is_read_and_continued(path: Path):
    """Rows of format 1 leave out the kinds of their events."""
    write_older_file(path, 1)
    with raw(path) as db:
        for round, text in enumerate(("[[0.05,1.0,1]]", "[[0.05,1.0,2],[0.1,3.5,1]]")):
            db.execute(
                "INSERT INTO entries (party, run, round, attempt, events, time) VALUES (1, 'r', ?, 0, ?, 0)",
                (round, text),
            )
    with Ledger.open(path) as old:
        assert old.spent("a") == Spend.empty().add_events([Gaussian(0.05, 1.0, 3), Gaussian(0.1, 3.5)])
        assert old.entries("a")[0].events == STEP
        assert old.reserve("r", 0, {"a": STEP}) == {"a": True}  # the same events, however they are written
        assert old.spent("a").releases == 4
        with pytest.raises(BudgetError, match="already reserved other events"):
            old.reserve("r", 0, {"a": (Gaussian(0.05, 1.1),)})
        assert format_of(path) == 1, "asking changes nothing"
        assert (old.identity, old.head()) == ("", LedgerHead("", 0, ""))
        assert old.reserve("r", 2, {"a": STEP, "b": (Unprotected(2),)}) == {"a": True, "b": True}
    assert format_of(path) == 3, "older software must not misread the new rows"
    with Ledger.open(path) as again:
        assert again.runs() == {"r": RunRecord.unknown("r")}
        assert len(again.identity) == 32
        assert again.head().sequence == 11  # identity, 2 parties, 2 budgets, 2 + 2 entries, 2 rules of composition
        assert again.spent("a").releases == 5
        assert again.entries("b")[0].events == (Unprotected(2),)


def format_of(path: Path) -> int:
    with raw(path) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


@dataclass(frozen=True)
class Correlated(Event):
    """A kind of event that no built-in accountant supports."""

    kind: ClassVar[str] = "correlated"
    bands: int
    count: int = 1

    def to_json(self) -> list[Any]:
        return [self.kind, self.bands, self.count]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Correlated:
        return cls(*values)


def test_a_later_kind_of_event_is_kept_as_it_is_and_costs_everything(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
):
    events = (*STEP, Correlated(4, 2))
    with monkeypatch.context() as known:
        known.setitem(EVENT_KINDS, "correlated", Correlated)
        assert ledger.reserve("r", 0, {"a": events, "b": events}) == {"a": False, "b": True}  # a has a budget
        assert ledger.entries("b")[0].events == events
        assert ledger.epsilon("b") == float("inf")
        with Ledger.open(path) as again:
            assert again.spent("b").events == events
    read_events_text.cache_clear()
    with Ledger.open(path) as older, pytest.raises(InputError, match="kind 'correlated' is not known"):
        older.get_spends()


def test_a_locked_ledger_is_waited_for_and_then_explained(ledger: Ledger, path: Path):
    with Ledger.open(path, wait=0.05) as waiting:
        ledger._store.db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(InputError, match="is in use by another process"):
            waiting.reserve("r", 0, {"a": STEP})
        ledger._store.db.execute("ROLLBACK")
        assert waiting.reserve("r", 0, {"a": STEP}) == {"a": True}


def test_a_full_disk_is_one_sentence_and_nothing_is_half_written(ledger: Ledger, path: Path):
    names = [f"p{k}" for k in range(500)]
    ledger.enroll_parties(LedgerAccount(name, 2.0, **TERMS) for name in names)
    (pages,) = ledger._store.db.execute("PRAGMA page_count").fetchone()
    ledger._store.db.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(InputError, match=r"^ledger .* the disk is full; free some space"):
        ledger.reserve("r", 0, dict.fromkeys(names, STEP))
    assert {spend.releases for spend in ledger.get_spends().values()} == {0}
    ledger._store.db.execute(f"PRAGMA max_page_count = {pages * 10}")
    assert all(ledger.reserve("r", 0, dict.fromkeys(names, STEP)).values())
    with Ledger.open(path) as again:
        assert again.get_spends() == ledger.get_spends()


def test_a_damaged_ledger_is_said_to_be_damaged(path: Path):
    with Ledger.open(path) as ledger:
        ledger.enroll_parties(LedgerAccount(f"p{k}", 2.0, **TERMS) for k in range(2000))
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged"), Ledger.open(path) as ledger:
        ledger.accounts()


# --- crashes and rivals -------------------------------------------------------------------------

SETUP = """
import os, random, signal, sys, time
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.events import Gaussian
TERMS = {"delta": 1e-5, "accountant": "rdp", "unit": "example", "population": "digits"}
path = sys.argv[1]
"""


def run_script(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SETUP + textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def uncovered(reported: Iterable[str], path: Path) -> list[str]:
    """Releases ("child round") that a process reported and the ledger does not know of."""
    with Ledger.open(path) as ledger:
        held = {f"{e.run} {e.round}" for name in ledger.accounts() for e in ledger.entries(name)}
    return [line for line in reported if line not in held]


KILLED = """
# A child reserves and then tells; it is killed at a random moment, or in the middle of SQLite's own work.
# At least 24 children; on a busy machine more, with longer lives, until enough of them told something.
order, patience = sys.argv[2], float(sys.argv[3])
with Ledger.open(path) as ledger:
    ledger.enroll("p0", None, **TERMS)
    ledger.reserve("before", 0, {"p0": [Gaussian(0.05, 1.0)] * 200})  # loads the accountant, once for all children
reader, writer = os.pipe()
os.set_blocking(reader, False)
random.seed(7)
told, child, end = b"", -1, time.monotonic() + patience
while child < 23 or (told.count(b"\\n") <= 20 and time.monotonic() < end):
    child += 1
    pid = os.fork()
    if pid == 0:
        ledger = Ledger.open(path)
        ledger._store.db.execute("PRAGMA cache_size = 1")  # spill early, so that a kill leaves a half-written file
        if child % 2:
            left = random.Random(child).randrange(1, 400)
            def work():
                global left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            ledger._store.db.set_progress_handler(work, 20)
        for t in range(100000):
            if order == "tell first":
                os.write(writer, f"{child} {t}\\n".encode())
            ledger.reserve(str(child), t, {"p0": [Gaussian(0.05, 1.0)] * 200})
            if order == "reserve first":
                os.write(writer, f"{child} {t}\\n".encode())
    time.sleep(random.uniform(0.0, 0.12 * (1 + child // 24)))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    try:
        told += os.read(reader, 1 << 20)
    except BlockingIOError:  # this child told nothing
        pass
sys.stdout.write(told.decode())
"""


def test_kill_9_at_any_moment_leaves_every_release_covered(tmp_path: Path):
    told: dict[str, list[str]] = {}
    processes = {order: run_script(KILLED, tmp_path / order, order, 60) for order in ("reserve first", "tell first")}
    for order, process in processes.items():
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        told[order] = output.splitlines()
    right, wrong = told["reserve first"], told["tell first"]
    assert len(right) > 20
    assert uncovered(right, tmp_path / "reserve first") == []
    assert uncovered(wrong, tmp_path / "tell first")  # the check sees a party that releases before it reserves
    with Ledger.open(tmp_path / "reserve first") as ledger:
        assert ledger._store.db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert ledger.reserve("after", 0, {"p0": STEP}) == {"p0": True}


RIVAL = """
granted = 0
with Ledger.open(path) as ledger:
    ledger.enroll("a", 2.0, **TERMS)
    print("ready", flush=True)
    for t in range(1000):
        if not ledger.reserve(sys.argv[2], t, {"a": [Gaussian(0.05, 1.0)]})["a"]:
            break
        granted += 1
print(granted)
"""


def test_two_processes_together_never_overspend(path: Path):
    rivals = [run_script(RIVAL, path, name) for name in ("x", "y")]
    granted = [int(rival.communicate(timeout=120)[0].split()[1]) for rival in rivals]
    assert sum(granted) == compute_max_steps(0.05, 1.0, 2.0, DELTA)
    with Ledger.open(path) as ledger:
        assert ledger.epsilon("a") <= 2.0
        assert len(ledger.entries("a")) == sum(granted)


def test_the_reservations_of_one_round_are_those_of_the_party_the_run_and_the_round(ledger: Ledger):
    for run in ("one", "two"):
        for t in range(3):
            ledger.reserve(run, t, {"a": STEP, "b": STEP})
    ledger.settle("one", 1, {"b": "digest"})
    ledger.reserve("one", 1, {"b": STEP}, attempt=1)
    wanted = [entry for entry in ledger.entries("b") if (entry.run, entry.round) == ("one", 1)]
    assert ledger.list_round_entries("b", "one", 1) == wanted
    assert [entry.digest for entry in wanted] == ["digest", None]
    assert ledger.list_round_entries("b", "three", 1) == []
