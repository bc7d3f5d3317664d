"""Tables across machines: coordinator and parties see the same columns, and no cell of a party's table leaves it."""

from __future__ import annotations

import dataclasses
import json

import pytest

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum.flower import keys
from fulcrum.flower.messages import Envelope, pack_envelope, write_shape
from fulcrum.flower.party import open_party_service
from fulcrum.flower.party_data import load_party_data
from fulcrum.flower.prepare import load_public_data
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.flower.task_terms import declare_task, task_fingerprint
from fulcrum.settings.schema import Table
from support.flower import toy_settings

SECRET = "Q7xSecret"
SCHEMA = """
target = "sick"
[columns.age]
low = 0
high = 110
[columns.sex]
kind = "category"
categories = ["f", "m"]
[columns.sick]
kind = "yes-no"
"""


def write(path, **changes):
    """A party's table; `changes` to the cells of its sixth row."""
    lines = ["patient,age,sex,sick"]
    for i in range(30):
        cells = {"patient": f"p{i}", "age": str(20 + i), "sex": "fm"[i % 2], "sick": "yes" if i % 3 else "no"}
        lines.append(",".join({**cells, **(changes if i == 5 else {})}.values()))
    path.write_text("\n".join(lines))
    return str(path)


def test_a_party_and_the_coordinator_see_the_same_columns(tmp_path):
    (tmp_path / "s.toml").write_text(SCHEMA)
    columns = Table(schema=str(tmp_path / "s.toml"))
    public = load_public_data(write(tmp_path / "public.csv"), table=columns)
    assert public.train is None
    agreed = declare_task(public)
    own = load_party_data(write(tmp_path / "own.csv", sex=SECRET, age="500"), task=agreed, table=columns)
    assert own.test is None
    assert write_shape(own.shape) == write_shape(public.shape)
    assert task_fingerprint(own) == task_fingerprint(public)
    assert len(own.own_notes) == 2
    assert own.warnings == ()


def answer(folder, table, say):
    """The reply of a party with this table to the coordinator's first message."""
    (folder / "s.toml").write_text(SCHEMA)
    columns = Table(schema=str(folder / "s.toml"))
    agreed = declare_task(load_public_data(write(folder / "public.csv"), table=columns))
    proposal = make_proposal(dataclasses.replace(toy_settings(), task=agreed), 1, agreed)
    if not (folder / "keys" / "a").exists():
        keys.make_key_pair(folder / "keys", "a")
    with open_party_service(
        "a",
        lambda task: load_party_data(table, task=task, table=columns),
        folder / "keys" / "a",
        folder / "ledger.sqlite",
        accept_proposal("a", proposal, 50.0),
        folder / "terms.toml",
        say=say,
    ) as service:
        header = {"kind": "hello", "run": "r", "nonce": "0" * 32, "proposal": proposal}
        return service.answer(pack_envelope(header))


@pytest.mark.parametrize(
    "changes", [{"age": SECRET}, {"sick": SECRET}, {"sick": ""}, {"patient": ""}, {"age": f"1,{SECRET}"}]
)
def test_a_bad_table_says_nothing_to_the_coordinator(tmp_path, changes):
    said: list[str] = []
    reply = answer(tmp_path, write(tmp_path / "own.csv", **changes), said.append)
    assert isinstance(reply, Envelope)
    header = json.loads(reply.header)
    assert header["code"] == "data"
    sent = reply.header
    assert SECRET.encode() not in sent + reply.body
    assert b"line" not in sent + reply.body
    assert b"age" not in sent + reply.body
    assert "line 7" in said[-1]  # the party itself is told where
    assert SECRET not in "".join(said)


def test_odd_values_are_not_told_to_the_coordinator(tmp_path):
    plain = answer(tmp_path, write(tmp_path / "own.csv"), lambda words: None)
    odd = answer(tmp_path, write(tmp_path / "own.csv", age="1e30", sex=SECRET), lambda words: None)
    one, two = (json.loads(each.header) for each in (plain, odd))
    assert one["kind"] == two["kind"] == "welcome"
    assert {name: value for name, value in one.items() if name != "signature"} == {
        name: value for name, value in two.items() if name != "signature"
    }
