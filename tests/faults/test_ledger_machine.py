"""The ledger as a state machine: a crash between any two statements, replays, rollback, two openers.

The model is a dictionary. After every step the file, read without Fulcrum, and both openers must say what it says.
Two wrong ledgers are rejected: one whose transactions are not atomic, one that does not see another process's rows.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fulcrum.errors import BudgetError, InputError
from fulcrum.privacy.events import Event, Gaussian
from fulcrum.privacy.ledger import Ledger, LedgerHead
from fulcrum.privacy.ledger.rows import read_events_text
from fulcrum.privacy.ledger.store import LedgerStore
from support.crashing import Crash, CrashPoint, crashing_connections

PARTIES, RUNS, BUDGET = ("rich", "poor"), ("first", "second"), 9.0
EVENTS = ((Gaussian(0.5, 1.1, 1),), (Gaussian(0.5, 1.1, 2),), (Gaussian(0.2, 0.9, 1), Gaussian(0.5, 2.0, 3)))
Key = tuple[str, str, int, int]

openers = st.integers(0, 1)
rounds = st.integers(0, 2)
attempts = st.integers(0, 1)
events = st.sampled_from(EVENTS)
runs = st.sampled_from(RUNS)
who = st.sets(st.sampled_from(PARTIES), min_size=1)
points = st.integers(1, 25)


class LedgerMachine(RuleBasedStateMachine):
    """Two openers of one file, and what it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="ledger-"))
        self.stack = contextlib.ExitStack()
        (self.home / "disk").mkdir()
        self.point = CrashPoint(self.home / "disk")
        self.stack.enter_context(crashing_connections(self.point))
        self.reserved: dict[Key, tuple[Event, ...]] = {}
        self.settled: dict[Key, str] = {}
        self.open: list[Ledger] = []
        self.heads: list[LedgerHead] = []
        self.copies: list[bytes] = []

    # --- the file ---------------------------------------------------------------------------------

    @property
    def file(self) -> Path:
        return self.point.folder / "ledger.sqlite"

    @initialize()
    def begin(self) -> None:
        self.reopen()
        for party in PARTIES:
            budget = BUDGET if party == "poor" else None
            self.open[0].enroll(party, budget, 1e-3, "rdp", "example", "toy")

    def reopen(self) -> None:
        for ledger in self.open:
            ledger.close()
        self.open = [Ledger.open(self.file), Ledger.open(self.file)]

    def rows(self) -> tuple[dict[Key, tuple[Event, ...]], dict[Key, str]]:
        """What the file holds, read without the ledger's own code."""
        self.point.disarm()
        with contextlib.closing(sqlite3.connect(self.file)) as db:
            found = db.execute(
                "SELECT p.name, e.run, e.round, e.attempt, e.events, s.digest FROM entries e"
                " JOIN parties p ON p.id = e.party LEFT JOIN settlements s ON s.entry = e.id"
            ).fetchall()
        reserved = {(p, run, t, a): read_events_text(text) for p, run, t, a, text, _ in found}
        return reserved, {(p, run, t, a): digest for p, run, t, a, _, digest in found if digest is not None}

    # --- changes ------------------------------------------------------------------------------------

    def change(self, call: Callable[[], Any], crash: int | None) -> bool:
        """Make a change; True where the process died of it. The file then holds all of it or nothing."""
        before = self.rows()
        if crash is not None:
            self.point.arm(crash)
        try:
            call()
        except Crash:
            self.reopen()
            after = self.rows()
            # Either nothing happened, or everything: the same change again makes no further difference.
            if after != before:
                call()
                assert self.rows() == after, "half of a change was on disk"
            self.reserved, self.settled = after
            return True
        finally:
            self.point.disarm()
        return False

    @rule(i=openers, run=runs, t=rounds, attempt=attempts, wanted=who, asked=events, crash=st.none() | points)
    def reserve(
        self, i: int, run: str, t: int, attempt: int, wanted: set[str], asked: tuple[Event, ...], crash: int | None
    ) -> None:
        keys = {party: (party, run, t, attempt) for party in wanted}
        other = any(self.reserved.get(key, asked) != asked for key in keys.values())
        granted: dict[str, bool] = {}

        def call() -> None:
            granted.update(self.open[i].reserve(run, t, dict.fromkeys(wanted, asked), attempt))

        if other:
            with pytest.raises(BudgetError, match="already reserved other events"):
                call()
            return
        if not self.change(call, crash):
            for party, key in keys.items():
                assert granted[party] or (party == "poor" and key not in self.reserved)
                if granted[party]:
                    self.reserved[key] = asked

    @rule(i=openers, run=runs, t=rounds, party=st.sampled_from(PARTIES), digest=st.sampled_from("xy"))
    def settle(self, i: int, run: str, t: int, party: str, digest: str) -> None:
        self._settle(i, run, t, party, digest, None)

    @rule(i=openers, run=runs, t=rounds, party=st.sampled_from(PARTIES), crash=points)
    def settle_and_die(self, i: int, run: str, t: int, party: str, crash: int) -> None:
        self._settle(i, run, t, party, "x", crash)

    def _settle(self, i: int, run: str, t: int, party: str, digest: str, crash: int | None) -> None:
        tried = [key for key in self.reserved if key[:3] == (party, run, t)]
        latest = max(tried, key=lambda key: key[3], default=None)

        def call() -> None:
            self.open[i].settle(run, t, {party: digest})

        if latest is None or self.settled.get(latest, digest) != digest:
            with pytest.raises(BudgetError):
                call()
        elif not self.change(call, crash):
            self.settled[latest] = digest

    @rule(i=openers)
    def replay_everything(self, i: int) -> None:
        """What is reserved is granted again and costs nothing; what is settled settles again."""
        spent = self.open[i].epsilons()
        for (party, run, t, attempt), asked in self.reserved.items():
            assert self.open[i].reserve(run, t, {party: asked}, attempt) == {party: True}
        for (party, run, t, attempt), digest in self.settled.items():
            self.open[i].settle(run, t, {party: digest}, attempt)
        assert self.open[i].epsilons() == spent

    # --- rollback -----------------------------------------------------------------------------------

    @rule(i=openers)
    def keep_a_copy(self, i: int) -> None:
        self.heads.append(self.open[i].head())
        self.copies.append(self.file.read_bytes())

    @rule()
    def roll_back(self) -> None:
        """Any older copy, opened by whoever knows the present head, is refused; the present file is not."""
        head, now = self.open[0].head(), self.file.read_bytes()
        for ledger in self.open:
            ledger.close()
        for known, copy in zip(self.heads, self.copies, strict=True):
            self.file.write_bytes(copy)
            with Ledger.open(self.file) as ledger:
                ledger.check_contains(known)
                if known != head:
                    with pytest.raises(InputError, match="rolled back"):
                        ledger.check_contains(head)
        self.file.write_bytes(now)
        self.open = [Ledger.open(self.file), Ledger.open(self.file)]
        for known in self.heads:
            self.open[1].check_contains(known)

    # --- what holds after every step -------------------------------------------------------------

    @invariant()
    def the_file_says_what_happened(self) -> None:
        if self.open:
            assert self.rows() == (self.reserved, self.settled)

    @invariant()
    def both_openers_say_so(self) -> None:
        for ledger in self.open:
            for party in PARTIES:
                own = {key: value for key, value in self.reserved.items() if key[0] == party}
                found = ledger.entries(party)
                assert {(party, e.run, e.round, e.attempt): e.events for e in found} == own
                assert {e.digest for e in found} == {self.settled.get(key) for key in own}
                assert sum(e.count for e in ledger.spent(party).events) == sum(
                    event.count for value in own.values() for event in value
                )
            assert ledger.epsilon("poor") <= BUDGET

    def teardown(self) -> None:
        for ledger in self.open:
            ledger.close()
        self.stack.close()
        shutil.rmtree(self.home)


QUICK = settings(
    max_examples=20,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(QUICK, max_examples=150, stateful_step_count=25, derandomize=False)


def test_the_ledger_holds_under_crashes_replays_rollback_and_two_openers() -> None:
    run_state_machine_as_test(LedgerMachine, settings=QUICK)


@pytest.mark.slow
def test_the_ledger_holds_in_long_histories() -> None:
    run_state_machine_as_test(LedgerMachine, settings=LONG)


def test_a_crash_inside_a_transaction_leaves_a_journal_that_undoes_it(tmp_path: Path) -> None:
    """Otherwise the machine above would crash only where nothing has been written yet."""
    (tmp_path / "disk").mkdir()
    point = CrashPoint(tmp_path / "disk")
    with crashing_connections(point):
        for statement in range(1, 60):
            ledger = Ledger.open(point.folder / "ledger.sqlite")
            point.arm(statement)
            with contextlib.suppress(Crash):
                ledger.enroll(f"party {statement}", None, 1e-3, "rdp", "example", "x" * 9000)
            point.disarm()
            ledger.close()
    assert point.hot_journals


class HalfATransaction(LedgerStore):
    """Wrong: each row is on disk at once, so that a crash leaves some rows of a change."""

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[int]:
        numbers = []
        for row in rows:
            numbers += super().insert(table, columns, [row])
            self.db.execute("COMMIT")
            self._end = self._new_end or self._end
            self.db.execute("BEGIN IMMEDIATE")
        return numbers


class NoNewRows(LedgerStore):
    """Wrong: what another process has written is never read."""

    def _refresh(self) -> None:
        if len(self.accounts) < len(PARTIES):
            super()._refresh()


@pytest.mark.parametrize(
    ("wrong", "why"), [(HalfATransaction, "half of a change"), (NoNewRows, "append-only|assert|UNIQUE")]
)
def test_a_wrong_ledger_is_rejected(wrong: type[LedgerStore], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_wrong(path: str | Path, wait: float = 30.0) -> Ledger:
        store = LedgerStore.open(Path(path), wait)
        store.__class__ = wrong
        return Ledger(store)

    monkeypatch.setattr(Ledger, "open", staticmethod(open_wrong))
    once = settings(QUICK, max_examples=200, phases=(Phase.generate,))
    with pytest.raises((AssertionError, sqlite3.Error), match=why):
        run_state_machine_as_test(LedgerMachine, settings=once)
