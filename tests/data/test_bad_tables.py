"""Bad tables: each is refused in one sentence that names the column or line and never a cell's value; exit code 2."""

import gzip
import os
import random
import threading

import pytest
import torch

from fulcrum.cli import main
from fulcrum.data import load
from fulcrum.data.table import Schema, delimited, encode_table
from fulcrum.errors import DataError
from fulcrum.settings.schema import Table

SCHEMA = """
target = "sick"
[columns.age]
low = 0
high = 110
[columns.sex]
kind = "category"
categories = ["f", "m"]
[columns.visit]
kind = "date"
low = 2000-01-01
high = 2030-12-31
[columns.smoker]
kind = "yes-no"
[columns.sick]
kind = "yes-no"
"""
HEADER = "patient_id,hospital,age,sex,visit,smoker,sick"
SECRET = "Q7xSecret"
"""What no message may show."""


def row(i, **changes):
    """A good row, with some cells changed."""
    cells = {
        "patient_id": f"p{i}",
        "hospital": "north" if i % 2 else "south",
        "age": str(20 + i),
        "sex": "fm"[i % 2],
        "visit": f"20{10 + i % 20}-03-0{1 + i % 9}",
        "smoker": "yes" if i % 3 else "no",
        "sick": "yes" if i % 4 else "no",
    }
    return ",".join({**cells, **changes}.values())


def table(changes=(), rows=40, header=HEADER, end="\n"):
    """A table of good rows in which some cells of the sixth are changed."""
    lines = [header, *(row(i, **(dict(changes) if i == 5 else {})) for i in range(rows))]
    return end.join(lines) + end


GOOD = table()
BAD = {
    "wrong delimiter": (GOOD.replace(",", ";"), 'table.delimiter = ";"'),
    "tabs in a csv": (GOOD.replace(",", "\t"), "table.delimiter"),
    "column renamed": (GOOD.replace("smoker", "smokes"), "no column 'smoker'"),
    "column in other case": (GOOD.replace("smoker", "Smoker"), "is it 'Smoker'?"),
    "column gone": ("\n".join(line.rpartition(",")[0] for line in GOOD.splitlines()), "no column 'sick'"),
    "column added": ("\n".join(f"{line},x" for line in GOOD.splitlines()), "does not name; declare it"),
    "two columns of one name": (GOOD.replace("smoker", "age", 1), "two columns called 'age'"),
    "no header": (GOOD.partition("\n")[2], "names no columns: its first line holds numbers"),
    "empty file": ("", "is empty"),
    "only line ends": ("\n\n", "starts with an empty line"),
    "header only": (HEADER + "\n", "no rows below its column names"),
    "NaN": (table({"age": "NaN"}), "column 'age' is empty in 1 cell (first: line 7); declare missing"),
    "text among numbers": (table({"age": SECRET}), "column 'age' holds no number in 1 cell (first: line 7)"),
    "thousands separator": (table({"age": '"1,020"'}), "decimal, thousands"),
    "decimal comma": (table({"age": '"20,5"'}), "decimal, thousands"),
    "a boolean as a number": (table({"age": "true"}), "holds no number"),
    "underscore": (table({"age": "1_0"}), "holds no number"),
    "percent": (table({"age": "5%"}), "holds no number"),
    "hexadecimal": (table({"age": "0x1F"}), "holds no number"),
    "another date format": (
        table({"visit": "03/04/2020"}),
        "holds no date in 1 cell (first: line 7); declare format",
    ),
    "a date as a number": (table({"visit": "20200304"}), "holds no date"),
    "no date at all": (table({"visit": "2020-02-30"}), "holds no date"),
    "target missing": (table({"sick": ""}), "it is the target"),
    "unknown target": (table({"sick": SECRET}), "column 'sick' is neither yes nor no in 1 cell (first: line 7)"),
    "person missing": (
        table({"patient_id": " "}),
        "says the person of each record, is empty in 1 cell",
    ),
    "party missing": (table({"hospital": ""}), "says the party of each record"),
    "ragged row": (table({"age": f"1,{SECRET}"}), "line 7 has 8 cells, and the first line names 7"),
    "short row": (GOOD + "p1,north\n", "line 42 has 2 cells"),
    "quote not closed": (table({"sex": '"f'}), "a quoted cell is not closed"),
    "text after a quote": (table({"sex": '"f"x'}), "followed by more text"),
    "latin-1": (table({"sex": "é"}).encode("latin-1"), 'table.encoding, such as "latin-1"'),
    "utf-16": (GOOD.encode("utf-16"), "UTF-16"),
    "gzip without its ending": (gzip.compress(GOOD.encode()), "compressed with gzip"),
    "a spreadsheet": (b"PK\x03\x04" + b"\0" * 50, "spreadsheet"),
    "a Parquet file": (b"PAR1" + b"\0" * 50, "Parquet"),
    "nothing but nulls": (b"\0" * 50, ""),
}


def write(folder, content, schema=SCHEMA, name="t.csv"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "t.schema.toml").write_text(schema)
    return path


def run(path, capsys, *more):
    """`fulcrum run` on a table: exit code and what it printed."""
    words = ["run", "--data", str(path), "--epsilon", "4", "--rounds", "1", "--out", str(path.parent / "out"), *more]
    code = main(words)
    return code, capsys.readouterr()


@pytest.fixture(autouse=True)
def _key(tmp_path, monkeypatch):
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "record.key"))


def test_the_good_table_trains(tmp_path, capsys):
    code, said = run(write(tmp_path, GOOD), capsys)
    assert code == 0, said.err
    assert (tmp_path / "out" / "schema.toml").is_file()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_refused_in_a_sentence(tmp_path, capsys, name):
    content, words = BAD[name]
    code, said = run(write(tmp_path, content), capsys)
    assert code == 2
    assert said.out == ""
    assert words in said.err
    assert said.err.startswith("error: ")
    assert said.err.rstrip().endswith((".", "?"))
    assert len(said.err.strip().splitlines()) == 1
    assert SECRET not in said.err
    assert not (tmp_path / "out").exists()  # nothing is left behind


HARMLESS = {
    "byte order mark": b"\xef\xbb\xbf" + GOOD.encode(),
    "CRLF": GOOD.replace("\n", "\r\n").encode(),
    "spaces around cells": GOOD.replace(",", " , ").encode(),
    "no line end at the end": GOOD.rstrip().encode(),
    "empty lines": GOOD.replace("\n", "\n\n").encode(),
    "quoted cells": "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in GOOD.splitlines()).encode(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_means_the_same_is_read_the_same(tmp_path, name):
    plain, other = write(tmp_path, GOOD), write(tmp_path, HARMLESS[name], name="o.csv")
    schema = Schema.from_toml(SCHEMA)
    one, two = (encode_table(schema, str(path)) for path in (plain, other))
    assert one.numbers is not None
    assert two.numbers is not None
    assert torch.equal(one.numbers, two.numbers)
    assert one.person_names == two.person_names
    assert one.party_names == two.party_names


def test_quoted_line_ends_stay_in_their_cell(tmp_path):
    text = table({"patient_id": '"a\nb, ""c"""'})
    found = encode_table(Schema.from_toml(SCHEMA), str(write(tmp_path, text)))
    assert 'a\nb, "c"' in found.person_names
    with pytest.raises(DataError, match="line 9"):  # lines of the file, not rows
        encode_table(Schema.from_toml(SCHEMA), str(write(tmp_path, text.replace("p6,", "p6,x,"))))


def test_values_outside_their_range_are_told_to_the_holder_alone(tmp_path, capsys):
    path = write(tmp_path, table({"age": "1e30", "sex": SECRET, "visit": "1900-01-01"}))
    code, said = run(path, capsys)
    assert code == 0
    for column in ("age", "sex", "visit"):
        assert f"only you see this: 1 of 40 values of column {column!r}" in said.err
    assert SECRET not in said.err + said.out
    for file in (tmp_path / "out").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"only you" not in content
            assert b"of 40 values" not in content
            assert SECRET.encode() not in content


def test_another_encoding_decimal_and_missing_word(tmp_path):
    text = table({"age": '"1.020,5"', "sex": "é"}).encode("latin-1")
    settings = Table(encoding="latin-1", decimal=",", thousands=".")
    assert load(str(write(tmp_path, text)), table=settings).x[5, 0] == 1.0
    gap = write(tmp_path, table({"age": "unknown"}))
    with pytest.raises(DataError, match="holds no number"):
        load(str(gap))
    columns = {"age": {"low": 0, "high": 110, "missing": "middle", "missing_values": ["unknown"]}}
    assert load(str(gap), table=Table(columns=columns)).x[5, 0] == 0.0


def test_ids_that_are_there_twice(tmp_path):
    text = GOOD.replace("patient_id", "visit_id").replace("p7,", "p3,")
    path = write(tmp_path, text)
    with pytest.raises(DataError, match=r"'visit_id' names a record that was there before \(line 9\)"):
        load(str(path), table=Table(record="visit_id"))
    assert load(str(write(tmp_path, GOOD)), table=Table(record="patient_id", person="none")).person is None


def test_a_party_with_one_class_is_told_so(tmp_path):
    lines = [line.replace(",no\n", ",yes\n") if "north" in line else line for line in GOOD.splitlines(keepends=True)]
    data = load(str(write(tmp_path, "".join(lines))))
    assert [note for note in data.own_notes if "party" in note] == [
        "all records of party 'north' have the same 'sick': it teaches no difference."
    ]
    assert not any("north" in note for note in data.warnings)


def test_a_million_categories(tmp_path):
    declared = SCHEMA.replace('["f", "m"]', str([f"c{i}" for i in range(20_000)]).replace("'", '"'))
    with pytest.raises(Exception, match="20,000 categories; at most"):
        load(str(write(tmp_path, GOOD, declared)))
    # Seen in the data and not declared, they are all the same "other": the table's width is that of the schema.
    lines = [HEADER, *(row(i, sex=f"s{i}") for i in range(3000))]
    data = load(str(write(tmp_path, "\n".join(lines))))
    assert data.x.shape == (3000, 6)
    assert "3,000 of 3,000 values of column 'sex'" in data.own_notes[1] or "3,000" in " ".join(data.own_notes)


def test_a_file_that_grows_while_it_is_read(tmp_path, monkeypatch):
    path = write(tmp_path, table(rows=2000))
    made, grown = delimited._make_piece, threading.Event()

    def grow(*given):
        if not grown.is_set():
            with path.open("a") as file:
                file.write(row(1) + "\n")
            grown.set()
        return made(*given)

    monkeypatch.setattr(delimited, "_make_piece", grow)
    with pytest.raises(DataError, match="changed while it was read"):
        load(str(path))
    assert len(load(str(path)).x) == 2001  # the next time it is complete


def test_a_file_that_cannot_be_read(tmp_path):
    path = write(tmp_path, gzip.compress(GOOD.encode())[:-20], name="t.csv.gz")
    with pytest.raises(DataError, match="cut short or damaged"):
        load(str(path))
    whole = write(tmp_path, gzip.compress(GOOD.encode()), name="t.csv.gz")
    assert len(load(str(whole)).x) == 40
    if os.getuid():
        whole.chmod(0)
        with pytest.raises(DataError, match="cannot be read"):
            load(str(whole))


def test_private_columns_must_be_declared(tmp_path, capsys):
    path = write(tmp_path, GOOD)
    (tmp_path / "t.schema.toml").unlink()
    code, said = run(path, capsys)
    assert code == 2
    assert "private, and its columns are not declared" in said.err
    code, said = run(path, capsys, "--set", "table.target=sick")
    assert code == 2
    code, said = run(path, capsys, "--set", "table.target=sick", "--public")
    assert code == 0
    assert "read off it" in said.err


def test_an_unreviewed_schema_is_refused_for_private_data(tmp_path, capsys):
    path = write(tmp_path, GOOD, "reviewed = false\n" + SCHEMA)
    code, said = run(path, capsys)
    assert code == 2
    assert "reviewed = true" in said.err
    code, _ = run(path, capsys, "--public")
    assert code == 0


PARTS = [b'"', b",", b"\n", b"\r", b"\0", b"\xff", b'""', b";", b"1e999", b"nan", b"\xe2\x80\xa8", b"9" * 400, b"inf"]


@pytest.mark.parametrize("seed", range(4))
def test_damaged_tables_are_read_or_refused_and_never_quoted(tmp_path, seed):
    rng = random.Random(seed)
    whole = table({"sex": SECRET}).encode()
    said = []
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(len(damaged))
            damage = rng.randrange(4)
            if damage == 0:
                damaged[at] = rng.randrange(256)
            elif damage == 1:
                del damaged[at : at + rng.choice([1, 3, 50])]
            elif damage == 2:
                damaged[at:at] = rng.choice(PARTS)
            else:
                damaged[at:at] = damaged[: rng.choice([2, 40, 300])]
        try:
            load(str(write(tmp_path, bytes(damaged))))
        except DataError as error:
            said.append(str(error))
    assert len(said) > 10
    for words in (SECRET, "\n", "the function failed"):
        assert not any(words in sentence for sentence in said)
