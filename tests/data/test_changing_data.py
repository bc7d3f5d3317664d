"""Data that changes: a new month's records, people who withdraw, and what that means for each person's total."""

import json

import pytest

from fulcrum.cli import main
from fulcrum.data import load
from fulcrum.data.withdrawn import leave_out_withdrawn, read_withdrawn
from fulcrum.errors import ConfigError, DataError
from fulcrum.privacy.ledger import Ledger
from fulcrum.settings.schema import Table

SCHEMA = """
target = "sick"
[columns.age]
low = 0
high = 110
[columns.sick]
kind = "yes-no"
"""


def write_month(path, people, party=None):
    lines = ["patient,hospital,age,sick"]
    for i in people:
        where = party or ("north" if i % 2 else "south")
        lines += [f"p{i},{where},{20 + i % 50},{'yes' if i % 3 else 'no'}"] * 2
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(SCHEMA)
    write_month(tmp_path / "v-01.csv", range(40))
    return tmp_path


def call(capsys, *words):
    code = main([*words])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said


DATA = ("--data", "v-*.csv", "--schema", "s.toml", "--ledger", "l.sqlite")
RUN = ("run", *DATA, "--epsilon", "1", "--rounds", "1", "--set", "privacy.budget=5", "--set", "run.engine=reference")


def groups(capsys, *more):
    """(party, who) -> (persons, runs, epsilon)."""
    found = json.loads(call(capsys, "data", "changes", *DATA, "--json", *more).out)
    assert found["unit"] == "person"
    return {(row["party"], row["who"]): (row["count"], row["runs"], row["epsilon"]) for row in found["groups"]}, found


def test_a_new_month_and_a_withdrawn_consent(folder, capsys):
    call(capsys, *RUN, "--out", "one")
    write_month(folder / "v-02.csv", range(30, 60))
    (folder / "gone.txt").write_text("patient\np1\np2\nnobody\n")
    before, found = groups(capsys, "--withdrawn", "gone.txt", "--person", "p1")
    assert before["north", "stay"] == (19, 1, pytest.approx(1, rel=1e-3))
    assert before["north", "new"] == (10, 0, 0)
    assert before["north", "gone"] == (1, 1, pytest.approx(1, rel=1e-3))
    (person,) = found["person"]
    assert (person["party"], person["runs"]) == ("north", 1)
    said = call(capsys, *RUN, "--withdrawn", "gone.txt", "--out", "two").err
    assert "2 withdrawn persons with 4 records were left out" in said
    assert "Further lines of the list (1) name nobody who has records here." in said
    assert "19 units stay and keep what was spent on them, 10 are new, 1 are gone" in said
    after, found = groups(capsys, "--withdrawn", "gone.txt", "--person", "p1")
    # Those who came with the second month have spent one run, those who stayed two, and who withdrew still one.
    with Ledger.open(folder / "l.sqlite") as ledger:
        twice = ledger.epsilon("north")
    assert twice > 1.01
    assert after["north", "gone"] == (1, 1, pytest.approx(1, rel=1e-3))
    assert found["person"][0]["epsilon"] == pytest.approx(1, rel=1e-3)
    rows = [(row["count"], row["runs"], row["epsilon"]) for row in found["groups"] if row["who"] == "stay"]
    assert (19, 2, pytest.approx(twice)) in rows
    assert (10, 1, pytest.approx(1, rel=1e-3)) in rows
    # Whoever comes back brings the total along: the most that any present person has spent does not fall.
    back, _ = groups(capsys)
    assert ("north", "gone") not in back
    said = call(capsys, "data", "changes", *DATA, "--person", "p1").out
    assert "'p1' was in 1 run" in said
    assert "is in no run" in call(capsys, "data", "changes", *DATA, "--person", "p999").out


def test_nothing_of_a_person_is_stored(folder, capsys):
    (folder / "gone.txt").write_text("p1\np3\n")
    call(capsys, *RUN, "--withdrawn", "gone.txt", "--out", "one")
    for file in (folder / "one").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"withdrawn persons" not in content
            assert b"p3" not in content or file.suffix == ".sqlite"


def test_withdrawn_ids(folder):
    (folder / "gone.csv").write_bytes(b"\xef\xbb\xbfpatient_id,when\r\n7.0,2024\r\n\r\n p8 ,2024\r\n")
    assert read_withdrawn(folder / "gone.csv") == {"7", "p8"}
    data = load("v-01.csv", table=Table(schema="s.toml"))
    (folder / "some.txt").write_text("p0\np5\n")
    kept = leave_out_withdrawn(data, "some.txt")
    assert len(kept.records) == 76
    assert kept.person_names == tuple(name for name in data.person_names if name not in ("p0", "p5"))
    assert kept.person is not None
    assert kept.person.max() == 37
    assert kept.fingerprint != data.fingerprint
    for record in range(len(kept.records)):
        assert kept.person_names[kept.person[record]] in data.person_names
    (folder / "all.txt").write_text("\n".join(f"p{i}" for i in range(40)))
    with pytest.raises(DataError, match="leaves no records"):
        leave_out_withdrawn(data, "all.txt")
    (folder / "north.txt").write_text("\n".join(f"p{i}" for i in range(1, 40, 2)))
    with pytest.raises(DataError, match="no records of party 'north'"):
        leave_out_withdrawn(data, "north.txt")
    with pytest.raises(ConfigError, match="cannot be read"):
        leave_out_withdrawn(data, "none.txt")


def test_withdrawal_needs_persons(folder, capsys):
    (folder / "gone.txt").write_text("p1\n")
    words = [*RUN, "--withdrawn", "gone.txt", "--set", "table.person=none", "--set", 'table.ignore=["*"]']
    assert main(words) == 2
    assert "does not say whose record each is" in capsys.readouterr().err


def test_changes_need_a_ledger_and_its_key(folder, capsys, monkeypatch):
    assert main(["data", "changes", "--data", "v-*.csv", "--schema", "s.toml"]) == 2
    assert "give --ledger FILE" in capsys.readouterr().err
    call(capsys, *RUN, "--out", "one")
    assert main(["data", "changes", *DATA, "--public"]) == 2
    assert "declared public" in capsys.readouterr().err
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(folder / "other"))
    assert main(["data", "changes", *DATA]) == 2
    assert "bring its file back" in capsys.readouterr().err
