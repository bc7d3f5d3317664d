"""A party as a state machine: its ledger and its stored replies, with a crash between any two statements.

The party is the real one and draws secure noise, so that a round that is computed twice gives other bytes. Whatever
happens (crashes, replays, a second request for a round, files that are rolled back, a second process), at most one
answer to a round ever leaves, it was paid before, and nothing is paid twice.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="parties sign with keys: pip install 'fulcrum-fl[flower]'")
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.crashing import Crash, CrashPoint, crashing_connections
from support.flower import NAMES, toy_party, toy_request, toy_settings

from fulcrum.errors import ConfigError
from fulcrum.flower.messages import Envelope
from fulcrum.flower.party import PartyService
from fulcrum.flower.reply_store import ReplyStore
from fulcrum.privacy.ledger import Ledger

SETTINGS = toy_settings(rounds=3)
PARTY = NAMES[0]
rounds = st.integers(0, 2)
points = st.integers(1, 45)


class PartyMachine(RuleBasedStateMachine):
    """A party, all that ever left it, and copies of its files."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="party-"))
        (self.home / "disk").mkdir()
        self.point = CrashPoint(self.home / "disk")
        self.outer, self.inner = contextlib.ExitStack(), contextlib.ExitStack()
        self.outer.enter_context(crashing_connections(self.point))
        self.left: dict[int, Envelope] = {}
        self.answered: dict[int, str] = {}  # round -> digest of the request that was answered
        self.rolled_back = False
        self.copies: list[tuple[dict[str, bytes], int]] = []
        self.service: PartyService | None = None

    @initialize()
    def begin(self) -> None:
        self.start()

    def start(self) -> None:
        """The party's process starts; the one of before is gone."""
        self.point.disarm()
        self.inner.close()
        self.service = self.inner.enter_context(toy_party(self.point.folder, SETTINGS))

    @property
    def ledger_file(self) -> Path:
        return self.point.folder / f"{PARTY}.sqlite"

    def ask(self, t: int, crash: int | None, **changes: Any) -> None:
        """Send a request, and keep what leaves. A party that dies is started again."""
        assert self.service is not None
        request = toy_request(self.service, SETTINGS, t, **changes)
        if crash is not None:
            self.point.arm(crash)
        try:
            reply = self.service.answer(request)
        except Crash:
            self.start()
            return
        finally:
            self.point.disarm()
        header = json.loads(reply.header)
        if header["kind"] == "update":
            assert self.left.setdefault(t, reply) == reply, "two different answers to one round have left"
            self.answered[t] = request.digest
        elif not self.rolled_back:
            assert self.answered.get(t) != request.digest, "an answer that has left is not sent again"

    @rule(t=rounds)
    def answer(self, t: int) -> None:
        self.ask(t, None)

    @rule(t=rounds, crash=points)
    def answer_and_die(self, t: int, crash: int) -> None:
        self.ask(t, crash)

    @rule(t=rounds, crash=st.none() | points)
    def ask_for_something_else(self, t: int, crash: int | None) -> None:
        """The same round under another nonce: a new request, which is answered only where nothing was before."""
        self.ask(t, crash, nonce="1" * 32)

    @rule()
    def restart(self) -> None:
        self.start()

    @rule()
    def open_twice(self) -> None:
        """A second process on the same ledger is refused."""
        with pytest.raises(ConfigError, match="in use by another"), toy_party(self.point.folder, SETTINGS):
            pass

    @rule()
    def keep_a_copy(self) -> None:
        files = {file.name: file.read_bytes() for file in self.point.folder.glob(f"{PARTY}.sqlite*")}
        self.copies.append((files, len(self.left)))

    @rule(data=st.data())
    def roll_back_the_replies(self, data: st.DataObject) -> None:
        """Replies of before: what was released since is known to the ledger, and refused."""
        if self.copies:
            files, _ = data.draw(st.sampled_from(self.copies))
            self.inner.close()
            self.rolled_back = True
            name = f"{PARTY}.sqlite.replies"
            (self.point.folder / name).write_bytes(files.get(name, b""))
            self.start()

    @rule(data=st.data())
    def roll_back_the_ledger(self, data: st.DataObject) -> None:
        """A ledger of before is refused as soon as a reply has been stored since; then it is brought back."""
        stored = self.stored_head()
        if self.copies and stored is not None:
            files, _ = data.draw(st.sampled_from(self.copies))
            self.inner.close()
            now = self.ledger_file.read_bytes()
            self.ledger_file.write_bytes(files[self.ledger_file.name])
            with Ledger.open(self.ledger_file) as ledger:
                older = ledger.head().sequence < stored
            if older:
                with pytest.raises(ConfigError, match="this is not it"), toy_party(self.point.folder, SETTINGS):
                    pass
            self.ledger_file.write_bytes(now)
            self.start()

    def stored_head(self) -> int | None:
        assert self.service is not None
        head = self.service.replies.get_ledger_head()
        return None if head is None else head.sequence

    @invariant()
    def whatever_left_was_paid_once(self) -> None:
        if self.service is None or PARTY not in self.service.ledger.accounts():
            assert not self.left
            return
        entries = self.service.ledger.entries(PARTY)
        assert len({entry.round for entry in entries}) == len(entries)
        assert all(entry.attempt == 0 for entry in entries)
        assert {entry.round for entry in entries if entry.digest is not None} >= set(self.left)

    def teardown(self) -> None:
        self.point.disarm()
        self.inner.close()
        self.outer.close()
        shutil.rmtree(self.home)


QUICK = settings(
    max_examples=12,
    stateful_step_count=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(QUICK, max_examples=80, stateful_step_count=25, derandomize=False)


def test_a_party_answers_each_round_once_whatever_happens() -> None:
    run_state_machine_as_test(PartyMachine, settings=QUICK)


@pytest.mark.slow
def test_a_party_answers_each_round_once_in_long_histories() -> None:
    run_state_machine_as_test(PartyMachine, settings=LONG)


def _forgetful(self: ReplyStore, *given: Any, **named: Any) -> None:
    """Wrong: nothing is stored before it is sent."""


def _settled_first(self: PartyService, run: str, t: int, events: Any) -> None:
    """Wrong: a round that was released before is reserved and computed again."""
    self.ledger.reserve(run, t, {self.name: events}, attempt=0)


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [(ReplyStore, "put", _forgetful), (PartyService, "_reserve_round", _settled_first)],
)
def test_a_wrong_party_is_rejected(where: type, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, wrong)
    if where is PartyService:  # without its own check, only the ledger's refusal to settle twice is left
        monkeypatch.setattr(Ledger, "settle", lambda *given, **named: None)
    once = settings(QUICK, max_examples=100, phases=(Phase.generate,))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(PartyMachine, settings=once)
