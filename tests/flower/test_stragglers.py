"""Late parties rest and come back; refusals end the wait; folders and logs hold what happened."""

from __future__ import annotations

import json
import shutil
import time

import pytest

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum.errors import ConfigError, RunError
from fulcrum.flower.consent import make_consent_text
from fulcrum.flower.coordinator import WaitPolicy
from fulcrum.flower.stragglers import StragglerBook, StragglerPolicy
from fulcrum.privacy.ledger import Ledger
from support.flower import NAMES, Bus, serve, toy_federation, toy_settings, toy_terms


class StallingBus(Bus):
    """Messages to stalled parties stay on the way until they are stalled no longer."""

    def __init__(self, services, stalls_after_greeting=()):
        super().__init__(services)
        self.stalled: set[int] = set()
        self.later = set(stalls_after_greeting)

    def online(self):
        if len(self.sent) > len(self.services):  # all are greeted
            self.stalled |= self.later
        return super().online()

    def collect(self, ids):
        return super().collect({number for number in ids if self._open.get(number, (-1,))[0] not in self.stalled})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rounds_of(folder, k):
    """The rounds that party k has paid for in its own ledger, from 1."""
    with Ledger.open(folder / f"{NAMES[k]}.sqlite") as ledger:
        return [entry.round + 1 for entry in ledger.entries(NAMES[k])]


# --- the policy ---------------------------------------------------------------------------------


def test_a_late_party_rests_longer_each_time_and_one_answer_ends_it():
    book = StragglerBook(StragglerPolicy(max_rest=4))
    assert "rests until it answers a greeting, and at least until round 3" in book.note_miss(0, 0)
    assert book.select_awake([0, 1], 1, {}, 1) == [1], "it rests"
    assert book.select_awake([0, 1], 5, {}, 1) == [1], "no greeting was answered"
    assert book.select_awake([0, 1], 1, {0: time.monotonic()}, 1) == [1], "its rest is not over"
    assert book.select_awake([0, 1], 2, {0: time.monotonic()}, 1) == [0, 1]
    rests = []
    for t in (2, 10, 20, 30):
        book.note_miss(0, t)
        rests.append(book._late[0].until - t - 1)
    assert rests == [2, 4, 4, 4]
    assert book.note_answer(0)
    assert not book.note_answer(0)
    assert book.select_awake([0, 1], 21, {}, 1) == [0, 1]


def test_those_that_rest_are_asked_where_too_few_are_left():
    book = StragglerBook()
    book.note_miss(0, 0)
    assert book.select_awake([0, 1], 1, {}, 2) == [0, 1]


@pytest.mark.parametrize("wrong", [{"quorum": 0.0}, {"quorum": 1.5}, {"grace": -1.0}, {"max_rest": -1}])
def test_wrong_policies_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"--quorum|--grace"):
        StragglerPolicy(**wrong)


# --- a served run -------------------------------------------------------------------------------


def test_a_stalled_party_costs_one_deadline_and_returns_when_it_answers_again(tmp_path, monkeypatch):
    settings = toy_settings(12)
    policy = WaitPolicy(round_timeout=1.0, join_timeout=5.0, min_parties=2)
    seconds = []
    with toy_federation(tmp_path, settings) as plain:
        bus = StallingBus(plain.services)

        def on_round(result):
            seconds.append(result.seconds)
            bus.stalled = {0} if 1 <= result.round < 8 else set()

        serve(bus, settings, tmp_path / "run", monkeypatch, wait_policy=policy, on_round=on_round)
    assert seconds[1] > 0.9
    said = [line["what"] for line in lines(tmp_path / "run" / "parties.jsonl")]
    missed = [words for words in said if "in time" in words]
    assert len(missed) == 1, "one deadline; without a rest it would be rounds 2 to 8"
    paid = rounds_of(tmp_path, 0)
    assert paid[0] == 1
    assert paid[-1] == 12, "it came back"
    assert not set(paid) & {3, 4, 5, 6, 7, 8}
    said = [line["what"] for line in lines(tmp_path / "run" / "parties.jsonl") if line["party"] == "party-0"]
    assert any("did not answer round 2 in time: late once; it rests" in words for words in said)
    assert any("answers again; it is asked from round" in words for words in said)


@pytest.mark.slow
def test_a_quorum_ends_a_round_after_the_grace_period(tmp_path, monkeypatch):
    settings = toy_settings(2)
    seconds = []
    with toy_federation(tmp_path, settings) as plain:
        bus = StallingBus(plain.services, stalls_after_greeting={1})
        policy = WaitPolicy(30.0, 5.0, 1, quorum=0.6, grace=0.3, max_rest=0)
        on_round = lambda result: seconds.append(result.seconds)  # noqa: E731
        serve(bus, settings, tmp_path / "run", monkeypatch, wait_policy=policy, on_round=on_round)
    assert max(seconds) < 10
    assert rounds_of(tmp_path, 1) == []


def test_the_wait_ends_when_everybody_has_joined_or_refused(tmp_path, monkeypatch):
    settings = toy_settings(2)

    def terms(name):
        return toy_terms(settings, name, **({"rounds": 1} if name == "party-1" else {}))

    policy = WaitPolicy(5.0, 60.0, 2)
    began = time.monotonic()
    with toy_federation(tmp_path, settings, terms=terms) as bus:
        serve(bus, settings, tmp_path / "run", monkeypatch, wait_policy=policy)
        assert time.monotonic() - began < 30
        policy = WaitPolicy(5.0, 60.0, 3)
        with pytest.raises(
            RunError, match=r"only 2 of at least 3 parties joined \(party-1 does not take part: the round"
        ):
            serve(bus, settings, tmp_path / "other", monkeypatch, wait_policy=policy)
    assert time.monotonic() - began < 30
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    states = {row["party"]: row["state"] for row in status["parties"]}
    assert states == {"party-0": "online", "party-1": "refused", "party-2": "online"}
    assert "beyond the agreed number of rounds" in status["parties"][1]["why"]


def test_an_empty_folder_is_taken_and_a_full_one_is_refused_before_anybody_is_greeted(tmp_path, monkeypatch):
    settings = toy_settings(2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with toy_federation(tmp_path, settings) as bus:
        with pytest.raises(RunError, match="not empty"):
            serve(bus, settings, tmp_path / "full", monkeypatch)
        assert not bus.sent
        serve(bus, settings, tmp_path / "empty", monkeypatch)
        with pytest.raises(RunError, match="fulcrum serve --resume"):
            serve(bus, settings, tmp_path / "empty", monkeypatch)
    said = [line["what"] for line in lines(tmp_path / "empty" / "parties.jsonl")]
    assert sum("has joined" in words for words in said) == 3, "no join is lost"


def test_joins_are_on_disk_before_the_first_round_and_the_folder_can_be_used_again(tmp_path, monkeypatch):
    settings = toy_settings(2)
    policy = WaitPolicy(1.0, 0.3, 3)
    with toy_federation(tmp_path, settings) as bus:
        bus.away = {2}
        with pytest.raises(RunError, match="only 2 of at least 3"):
            serve(bus, settings, tmp_path / "run", monkeypatch, wait_policy=policy)
        said = [line["what"] for line in lines(tmp_path / "run" / "parties.jsonl")]
        assert sum("has joined" in words for words in said) == 2
        bus.away = set()
        serve(bus, settings, tmp_path / "run", monkeypatch, wait_policy=policy)
    said = [line["what"] for line in lines(tmp_path / "run" / "parties.jsonl")]
    assert sum("has joined" in words for words in said) == 5


def test_a_rolled_back_folder_with_other_participants_is_not_stuck(tmp_path, monkeypatch):
    """The folder is older than what the parties answered, and another party is missing: the requests differ."""
    settings = toy_settings(6, min_parties=2)
    policy = WaitPolicy(1.0, 1.0, 2)
    with toy_federation(tmp_path, settings) as bus:

        def on_round(result):
            if result.round == 2:
                shutil.copytree(tmp_path / "run", tmp_path / "copy")
            if result.round == 4:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            serve(bus, settings, tmp_path / "run", monkeypatch, wait_policy=policy, on_round=on_round)
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "copy", tmp_path / "run")
        bus.away = {2}  # round 3 now has another outcome, so round 4 is another request
        result = serve(bus, settings, tmp_path / "run", monkeypatch, resume=True)
    assert result.summary["status"] == "finished"
    said = [line["what"] for line in lines(tmp_path / "run" / "parties.jsonl")]
    assert any(
        words.startswith("round 4 passes without an update: party-0, party-1 answered it before") for words in said
    )
    for k in (0, 1):
        assert rounds_of(tmp_path, k) == [1, 2, 3, 4, 5, 6], "each round is paid once"


# --- consent ------------------------------------------------------------------------------------


def test_consent_names_the_number_of_the_unit_that_is_protected(tmp_path):
    import numpy as np

    from fulcrum.flower.party_data import count_units, load_party_data
    from fulcrum.settings.schema import TaskSettings

    persons = np.repeat([f"p{k}" for k in range(48)], 10)
    np.savez(tmp_path / "d.npz", x=np.zeros((480, 3), "f4"), y=np.arange(480) % 2, person=persons)
    data = load_party_data(str(tmp_path / "d.npz"), task=TaskSettings(name="classification", classes=2))
    for unit, number in (("person", 48), ("example", 480)):
        terms = toy_terms(toy_settings(), unit=unit)
        text = make_consent_text(terms, count_units(data, unit))
        assert f"with {number} {unit}s:" in text


# --- statements ---------------------------------------------------------------------------------


def test_after_two_runs_a_statement_counts_each_run_and_the_total(tmp_path, monkeypatch):
    settings = toy_settings(3)
    with toy_federation(tmp_path, settings, simulation=False) as bus:
        for name in ("one", "two"):
            serve(bus, settings, tmp_path / name, monkeypatch, simulation=False)
            bus.services[0].write_party_statement(tmp_path / name)
    first, second = (json.loads((tmp_path / name / "privacy.json").read_text()) for name in ("one", "two"))
    for content, runs in ((first, 1), (second, 2)):
        assert (content["run"]["rounds_done"], content["run"]["rounds"]) == (3, 3)
        assert content["total"] == {"runs": runs, "rounds": 3 * runs, "budget": 50.0}
        assert content["scope"]["run_epsilon"] <= content["planned"]["epsilon"] * (1 + 1e-9)
        assert sum(run["rounds"] for run in content["runs_covered"]) == 3 * runs
    assert second["epsilon"] > first["epsilon"] == first["scope"]["run_epsilon"]
    page = (tmp_path / "two" / "PRIVACY.md").read_text()
    assert "| rounds, this run | 3 of 3 |" in page
    assert "| runs and rounds, all runs | 2 run(s), 6 rounds |" in page
    assert "6 of 3" not in page
