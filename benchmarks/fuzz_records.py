"""Readers that are fuzzed: ledgers, stored replies, messages, proposals, terms, keys."""

from __future__ import annotations

import dataclasses
import json
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fuzz_inputs import mutate_bytes, mutate_json, mutate_safetensors, mutate_text
from fuzz_reader import Reader, of_file

from fulcrum.errors import BudgetError, ConfigError, FulcrumError, InputError, RunError

# --- ledgers ------------------------------------------------------------------------------------


def _mutate_rows(seed: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """By bytes; or rows changed by SQL, past the triggers, and sometimes with the chain made to fit."""
    if draw.random() < 0.5:
        return mutate_bytes(seed, draw, others)
    db = sqlite3.connect(":memory:")
    db.deserialize(seed)
    odd: list[Any] = [
        "",
        "x",
        b"\xff",
        None,
        -1,
        1 << 62,
        1e308,
        float("inf"),
        "[]",
        "[[1]]",
        "{}",
        '[["gaussian",2,0,-1]]',
    ]
    odd += ['[["gaussian",0.5,1.0,1]]', "[" * 5000, '{"id": 1}', '[["unprotected",9999999999999999999]]', b"x" * 100]
    tables = [
        "parties",
        "budgets",
        "entries",
        "settlements",
        "identity",
        "runs",
        "terms",
        "plans",
        "unit_sets",
        "units",
    ]
    for (trigger,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        db.execute(f"DROP TRIGGER {trigger}")
    for _ in range(draw.randint(1, 3)):
        table = draw.choice([*tables, "chain"])
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        try:
            db.execute(f"UPDATE OR REPLACE {table} SET {draw.choice(columns)} = ?", (draw.choice(odd),))
            if draw.random() < 0.1:
                db.execute(f"DELETE FROM {table}")
            if draw.random() < 0.1:
                db.execute(f"DROP TABLE {table}")
            if draw.random() < 0.1:
                db.execute(f"PRAGMA user_version = {draw.choice([0, 1, 2, 3, 4, 99])}")
        except sqlite3.Error:
            pass
    if draw.random() < 0.6:
        _chain_anew(db)
    db.commit()
    content = bytes(db.serialize())
    db.close()
    return content


def _chain_anew(db: sqlite3.Connection) -> None:
    """Make the chain fit the rows, as somebody does who can write the file."""
    from fulcrum.privacy.ledger.chain import CHAINED_TABLES, ChainEnd, append_table

    try:
        db.execute("DELETE FROM chain")
        end = ChainEnd()
        for table in CHAINED_TABLES:
            end = append_table(db, end, table)
    except sqlite3.Error:
        pass


def ledger_readers(home: Path) -> list[Reader]:
    """See `make_readers`."""
    from fulcrum.flower.messages import Envelope
    from fulcrum.flower.reply_store import ReplyStore
    from fulcrum.privacy.events import Gaussian
    from fulcrum.privacy.ledger import Ledger, RunPlan, RunRecord

    with Ledger.open(home / "l.sqlite") as ledger:
        for name, accountant in (("a", "rdp"), ("b", "pld")):
            ledger.enroll(name, 9.0, 1e-3, accountant, "example", "toy")
        record = dataclasses.replace(RunRecord.unknown("r"), rule="moo")
        ledger.register_units("r", "a", bytes(range(64)))
        events = (Gaussian(0.5, 1.5, 1),)
        ledger.register_run(record, {name: RunPlan((Gaussian(0.5, 1.5, 4),), 1e-4) for name in "ab"})
        for t in range(3):
            ledger.reserve("r", t, dict.fromkeys("ab", events))
            ledger.settle("r", t, {"a": "x"})
    with sqlite3.connect(home / "l.sqlite") as db:
        db.execute("PRAGMA page_size = 512")
        db.execute("VACUUM")
    db.close()
    store = ReplyStore(home / "r.sqlite")
    store.put("r", 0, "digest", Envelope(b"{}", b"body", b"signature"), b"state")
    store.close()

    def read_ledger(path: Path) -> Any:
        with Ledger.open(path) as ledger:
            ledger.head(), ledger.accounts(), ledger.runs(), ledger.costs(), ledger.list_run_costs()
            for name in ledger.accounts():
                ledger.entries(name), ledger.describe_composition(name), ledger.list_past_units(name)
            return ledger.reserve("r", 3, {"a": events})

    def read_replies(path: Path) -> Any:
        store = ReplyStore(path)
        try:
            return store.get("r", 0), store.get_state("r", 1), store.get_ledger_head()
        finally:
            store.close()

    errors = (InputError, BudgetError)
    return [
        Reader(
            "ledger", [(home / "l.sqlite").read_bytes()], _mutate_rows, of_file("l.sqlite", read_ledger), errors, 3.0
        ),
        Reader(
            "reply store", [(home / "r.sqlite").read_bytes()], mutate_bytes, of_file("r", read_replies), errors, 0.5
        ),
    ]


# --- messages, terms, keys ----------------------------------------------------------------------


def message_readers(home: Path) -> list[Reader]:
    """See `make_readers`."""
    from fulcrum.flower import messages
    from fulcrum.flower.proposals import accept_proposal, check_proposal, make_proposal
    from fulcrum.flower.refusals import TermsRefusal
    from fulcrum.flower.terms import read_terms_file, terms_to_toml
    from fulcrum.settings.schema import Clip, Model, Privacy, Settings, TaskSettings, Train
    from fulcrum.types import Assignment

    settings = Settings(
        method="moo",
        task=TaskSettings(classes=3),
        model=Model(name="linear"),
        train=Train(rounds=4, rate=0.2),
        clip=Clip(rule="moo"),
        privacy=Privacy(sigma=1.1, delta=1e-3),
    )
    proposal = make_proposal(settings, 3)
    agreed = accept_proposal("a", proposal, 50.0)
    task = messages.assignment_to_table(Assignment(client=0, rate=0.2, sigma=1.1, steps=1, lr=0.5))
    common = {"run": "r", "nonce": "0" * 32}
    values: dict[str, Any] = {"assignment": task, "simulation": {}, "proposal": proposal, "shape": [4]}
    values |= {"events": [["gaussian", 0.5, 1.5, 1]], "weight_decay": 0.0, **common}
    typical = {messages.WHOLE_FIELD: 1, messages.NUMBER_FIELD: 1.0, messages.FLAG_FIELD: True, messages.LIST_FIELD: []}
    typical |= {messages.TEXT_FIELD: "a", messages.ID_FIELD: "a", messages.TABLE_FIELD: {}}
    headers = []
    for kind, fields in messages.HEADER_SCHEMAS.items():
        own = {name: values.get(name, typical.get(sort, "a")) for name, sort in fields.items()}
        headers.append(messages.pack_envelope({"kind": kind, **own}).header)

    def read_header(content: bytes, folder: Path) -> Any:
        header = messages.read_message_header(messages.Envelope(content), tuple(messages.HEADER_SCHEMAS))
        if "assignment" in header:
            messages.assignment_from_table(header["assignment"])
            messages.simulation_from_table(header["simulation"])
        if "events" in header:
            messages.events_from_rows(header["events"])
        return header

    arrays = {"params": torch.arange(8.0), "state.C": torch.ones(1)}
    spec: Any = {"params": (torch.float32, (8,)), "state.C": (torch.float32, (1,))}

    def read_arrays(content: bytes, folder: Path) -> Any:
        return messages.read_message_arrays(messages.Envelope(b"{}", content), spec)

    def read_proposal(content: bytes, folder: Path) -> Any:
        # Through a message's header, as it arrives: what JSON cannot hold never gets this far.
        header = messages.pack_envelope({"kind": "hello", **common, "proposal": {}}).header
        whole = header.replace(b'"proposal":{}', b'"proposal":' + content)
        found = messages.read_message_header(messages.Envelope(whole), ("hello",))["proposal"]
        check_proposal(agreed, found)
        return accept_proposal("a", found, look_up=False)

    body = messages.pack_envelope({"kind": "done", **common, "rounds": 1}, arrays).body
    refusals = (messages.BadMessage, TermsRefusal, ConfigError, FulcrumError)
    return [
        Reader("message header", headers, mutate_json, read_header, (messages.BadMessage,), 2.0),
        Reader("message arrays", [body], _mutate_body, read_arrays, (messages.BadMessage,), 2.0),
        Reader("proposal", [json.dumps(proposal).encode()], mutate_json, read_proposal, refusals, 1.5),
        Reader(
            "terms",
            [terms_to_toml(agreed).encode()],
            mutate_text,
            of_file("t.toml", read_terms_file),
            (ConfigError,),
            1.5,
        ),
        *_key_readers(home),
    ]


def _mutate_body(seed: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """With its structure where a body is plain safetensors, by bytes where it is coded."""
    try:
        return mutate_safetensors(seed, draw, others)
    except (ValueError, IndexError):
        return mutate_bytes(seed, draw, others)


def _key_readers(home: Path) -> list[Reader]:
    from fulcrum.flower import keys

    private, public = keys.make_key_pair(home / "keys", "a")
    errors = (ConfigError,)
    return [
        Reader("private key", [private.read_bytes()], mutate_bytes, of_file("a", keys.load_private_key), errors, 0.3),
        Reader("public key", [public.read_bytes()], mutate_bytes, of_file("a.pub", keys.load_public_key), errors, 0.3),
    ]


def party_file_readers(home: Path) -> list[Reader]:
    """Files of parties' and coordinators' operators, and what arrives at a port; see `make_readers`."""
    from fulcrum.flower import keys, known_ledgers, signing
    from fulcrum.flower.messages import BadMessage, Envelope
    from fulcrum.flower.operations.key_changes import accept_rotation, rotate_key
    from fulcrum.flower.operations.party_file import read_party_file
    from fulcrum.flower.port.http import BadHead, read_head
    from fulcrum.flower.served_facts import read_served_facts

    seed = (
        b'server = "host:9092"\ndata = "d.npz"\nkey = "a"\nledger = "l.sqlite"\nterms = "terms.toml"\nca = "ca.crt"\n'
    )
    head = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: a\r\ncontent-length: 12\r\ncontent-type: a/b\r\n\r\n"
    book = json.dumps({"a": {"id": "f" * 32, "rows": 7, "digest": "0" * 64}}).encode()
    kept = {"secret": "00" * 32, "simulation": False, "parties": [{"name": "a", "units": 5}], "listen": "a:1"}
    kept |= {"wait_policy": {"round_timeout": 1.0, "join_timeout": 1.0, "min_parties": 1}, "keys": "keys"}
    served = json.dumps({"id": "r", "format": 2, "flower": kept}).encode()
    private, public = keys.make_key_pair(home / "rotated", "a")
    old = public.read_bytes()
    note = rotate_key(private)[0].read_bytes()
    ask = signing.derive_request_signer(b"s" * 32).sign(Envelope(b"{}", b"body"))

    def read_note(content: bytes, folder: Path) -> Any:
        (folder / "register").mkdir()
        (folder / "register" / "a.pub").write_bytes(old)
        (folder / "note.json").write_bytes(content)
        return accept_rotation(folder / "register", folder / "note.json")

    def read_book(path: Path) -> Any:
        return known_ledgers.LedgerBook(path).find_problem("a", {"id": "f" * 32, "rows": 8, "digest": "1" * 64})

    def read_seal(content: bytes, folder: Path) -> Any:
        return signing.read_signer(Envelope(b"{}", b"body", content))

    errors = (ConfigError, RunError)
    return [
        Reader("party file", [seed], mutate_text, of_file("party.toml", read_party_file), (ConfigError,)),
        Reader("served run", [served], mutate_json, of_file("run.json", lambda p: read_served_facts(p.parent)), errors),
        Reader("known ledgers", [book], mutate_json, of_file("ledgers.json", read_book), (ConfigError,), 0.5),
        Reader("rotation note", [note], mutate_json, read_note, (ConfigError,), 0.5),
        Reader("request head", [head], mutate_bytes, lambda content, folder: read_head(content), (BadHead,), 1.5),
        Reader("request signature", [ask.signature], mutate_bytes, read_seal, (BadMessage,), 0.5),
    ]
