"""What a party claims and what a coordinator proposes: bounded, remembered, shown escaped, and never run unasked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum.errors import ConfigError, RunError
from fulcrum.flower import keys
from fulcrum.flower.consent import make_consent_text
from fulcrum.flower.display import SHOWN_CHARACTERS, clean_message, show_value
from fulcrum.flower.known_ledgers import LedgerBook, head_to_table
from fulcrum.flower.messages import Envelope, pack_envelope, read_message_header
from fulcrum.flower.proposals import make_proposal
from fulcrum.flower.units import PartyInfo, find_wrong_claim, keep_plausible_parties, read_registered_units
from fulcrum.privacy.ledger import LedgerHead
from support.flower import NAMES, serve, toy_federation, toy_party, toy_settings, toy_terms

SETTINGS = toy_settings(2)


def claim(bus: Any, k: int, **fields: Any) -> None:
    """Party k signs a welcome with other fields than the true ones."""

    def lie(node: int, request: Envelope, reply: Envelope) -> Envelope:
        header = json.loads(reply.header)
        if node != k or header["kind"] != "welcome":
            return reply
        header.pop("v")
        return keys.sign_envelope(bus.services[k].key, pack_envelope({**header, **fields}))

    bus.tamper = lie


# --- 4: units -----------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [10**6, 10**15, 1, 0])
def test_an_unbelievable_number_of_units_keeps_its_party_out_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units: int
) -> None:
    monkeypatch.setattr("fulcrum.flower.units.LEAST_SHARE_OF_MEDIAN", 0.1)  # the toys have 40 units each
    said: list[str] = []
    with toy_federation(tmp_path, SETTINGS, simulation=False) as bus:
        claim(bus, 1, units=units)
        result = serve(bus, SETTINGS, tmp_path / "served", monkeypatch, simulation=False, said=said)
        assert bus.services[1].ledger.entries(NAMES[1]) == []
        assert len(bus.services[0].ledger.entries(NAMES[0])) == 2
    assert result.summary["rounds"] == 2
    assert any(words.startswith(f"{NAMES[1]}: does not take part") and str(units) in words for words in said)


def test_with_two_parties_left_too_few_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = toy_settings(2, min_parties=3)
    from fulcrum.flower.coordinator import WaitPolicy

    with toy_federation(tmp_path, settings, simulation=False) as bus:
        claim(bus, 1, units=10**6)
        with pytest.raises(RunError, match="only 2 of at least 3 parties can take part"):
            serve(
                bus, settings, tmp_path / "served", monkeypatch, simulation=False, wait_policy=WaitPolicy(1.0, 1.0, 3)
            )


def test_a_number_that_was_registered_counts(tmp_path: Path) -> None:
    keys.make_key_pair(tmp_path, "a", units=480)
    keys.make_key_pair(tmp_path, "b")
    assert set(keys.load_public_keys(tmp_path)) == {"a", "b"}
    registered = read_registered_units(tmp_path)
    assert registered == {"a": 480}
    assert find_wrong_claim("a", 480, registered) == find_wrong_claim("a", 400, registered) == ""
    assert "480 were registered" in find_wrong_claim("a", 481, registered)
    assert "480 were registered" in find_wrong_claim("a", 1, registered)
    assert find_wrong_claim("b", 481, registered) == ""
    said: list[tuple[str, str]] = []
    parties = (PartyInfo("a", 480), PartyInfo("b", 20), PartyInfo("c", 10_000))
    kept = keep_plausible_parties(parties, {"c": 10_000}, lambda *words: said.append(words))
    assert kept == parties, "its number is known: however large, it takes part"
    assert keep_plausible_parties(parties, {}, lambda *words: said.append(words)) == parties[:2]
    assert said[0][0] == "c"
    (tmp_path / "a.pub").write_text((tmp_path / "a.pub").read_text().strip() + " units=0\n")
    with pytest.raises(ConfigError, match="write one units=N"):
        read_registered_units(tmp_path)


# --- 5: ledgers ---------------------------------------------------------------------------------


def table(id: str = "one", rows: int = 5, digest: str = "ab") -> dict[str, Any]:
    return head_to_table(LedgerHead(id, rows, digest))


def test_another_ledger_of_the_same_party_is_noticed_also_by_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "ledgers.json"
    book = LedgerBook(path)
    assert book.find_problem("a", table()) == book.find_problem("a", table(rows=9, digest="cd")) == ""
    assert book.find_problem("b", table("two")) == ""
    again = LedgerBook(path)
    assert "pays from another ledger" in again.find_problem("a", table("other"))
    assert str(path) in again.find_problem("a", table("other"))
    assert "rolled back" in again.find_problem("a", table(rows=8))
    assert "rewritten" in again.find_problem("a", table(rows=9, digest="ef"))
    assert again.find_problem("a", table(rows=10, digest="gh")) == ""
    for wrong in (
        None,
        {},
        table(""),
        {**table(), "rows": True},
        {**table(), "rows": -1},
        {**table(), "id": "\x1b[2J"},
    ):
        assert again.find_problem("c", wrong) == "it does not say which ledger it pays from"
    path.write_text("[]")
    with pytest.raises(ConfigError, match="bring a copy of it back"):
        LedgerBook(path)


def test_a_party_that_comes_back_with_an_empty_ledger_takes_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding 5: the same key with a second ledger had its budget twice."""
    book = LedgerBook(tmp_path / "ledgers.json")
    monkeypatch.setattr("fulcrum.flower.run.open_ledger_book", lambda *given: book)
    with toy_federation(tmp_path, SETTINGS, simulation=False) as bus:
        serve(bus, SETTINGS, tmp_path / "first", monkeypatch, simulation=False)
    (tmp_path / f"{NAMES[0]}.sqlite").rename(tmp_path / "spent.sqlite")
    (tmp_path / f"{NAMES[0]}.sqlite.replies").unlink()
    said: list[str] = []
    with toy_federation(tmp_path, SETTINGS, simulation=False) as bus:
        serve(bus, SETTINGS, tmp_path / "second", monkeypatch, simulation=False, said=said)
        assert bus.services[0].ledger.entries(NAMES[0]) == []
        assert len(bus.services[1].ledger.entries(NAMES[1])) == 4
    assert any(words.startswith(f"{NAMES[0]}: does not take part: it pays from another ledger") for words in said)


# --- 9: what is proposed ------------------------------------------------------------------------

NASTY = "\x1b[2J\x1b[1;1Hsafe\r\n\u202e\x07" + "x" * 5000


def test_a_proposal_is_shown_escaped_and_cut() -> None:
    terms = toy_terms(SETTINGS)
    honest = make_consent_text(terms, 40)
    assert "epsilon of at most" in honest
    model = dataclasses.replace(terms.model, name=NASTY, init=NASTY)
    for changed in (
        dataclasses.replace(terms, model=model),
        dataclasses.replace(terms, rules=(NASTY,)),
        dataclasses.replace(terms, groups=NASTY, unit=NASTY, arithmetic=NASTY, accountant=NASTY),
        dataclasses.replace(terms, task=dataclasses.replace(terms.task, name=NASTY, loss=NASTY)),
        dataclasses.replace(terms, clip=dataclasses.replace(terms.clip, phi=NASTY, options={"a": NASTY})),
    ):
        text = make_consent_text(changed, 40)
        assert all(line.isprintable() for line in text.split("\n")), "nothing moves the cursor or hides a line"
        assert len(text) < len(honest) + 6 * (SHOWN_CHARACTERS + 60)
        assert text.count("\n") <= honest.count("\n") + 1
        assert text.split("\n")[-1] == honest.split("\n")[-1] or "accountant" not in text


def test_text_is_shown_so_that_it_cannot_act() -> None:
    assert show_value("a\x1b[31mb") == "a\\x1b[31mb"
    assert show_value("\u202eb\u200b") == "\\u202eb\\u200b"
    assert show_value("é ü") == "é ü"
    assert show_value("x" * 500).startswith("x" * SHOWN_CHARACTERS + "... (500")
    assert clean_message("one\ntwo\x07\r") == "one\ntwo\\x07\\r"


def test_what_a_party_says_of_a_hostile_proposal_is_clean(tmp_path: Path) -> None:
    said: list[str] = []
    with toy_party(tmp_path, SETTINGS, terms=None, consent=lambda terms: False, say=said.append) as service:
        for field in ("unit", "accountant", "groups", "arithmetic"):
            proposal = {**make_proposal(SETTINGS, 3), field: "\x1b[2J" + "y" * 200}
            service.answer(pack_envelope({"kind": "hello", "run": "r", "nonce": "n", "proposal": proposal}))
    assert said
    assert all(words.isprintable() for words in said)


def put_places(value: Any, place: str) -> list[Any]:
    """The value with one text in it replaced by a place of code, for each text in it."""
    if isinstance(value, str):
        return [place]
    if isinstance(value, dict):
        return [{**value, name: each} for name, inside in value.items() for each in put_places(inside, place)]
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [[place], [*value, place]]
    return []


def test_nothing_that_is_proposed_is_imported_before_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text of a proposal, one after the other, names a module that writes a file when it is imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil_proposal.py").write_text(
        "from pathlib import Path\nPath('imported').write_text('x')\nthing = 1\n"
    )
    proposal = make_proposal(SETTINGS, 3)
    asked: list[str] = []

    def refuse(terms: Any) -> bool:
        asked.append(make_consent_text(terms, 40))
        return False

    tried = put_places(proposal, "evil_proposal:thing")
    assert len(tried) > 12
    for changed in tried:
        with toy_party(tmp_path, SETTINGS, terms=None, consent=refuse) as service:
            hello = pack_envelope({"kind": "hello", "run": "r", "nonce": "n", "proposal": changed})
            header = read_message_header(service.answer(hello), ("refused",))
            assert header["code"] in ("consent", "message", "task", "rule")
            assert not (tmp_path / "imported").exists(), changed
    assert any("CODE that runs here if you agree: evil_proposal:thing" in text for text in asked)
    with toy_party(tmp_path, SETTINGS, terms=None, consent=lambda terms: True) as service:  # the wrong case: agreed
        changed = {**proposal, "rules": ["evil_proposal:thing"]}
        service.answer(pack_envelope({"kind": "hello", "run": "r", "nonce": "n", "proposal": changed}))
    assert (tmp_path / "imported").exists()
