"""Tables from files, databases and frames: the same records whatever they are read from; larger than memory."""

import dataclasses
import gzip
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fulcrum
from fulcrum.data import load, make_table_dataset
from fulcrum.data.table import Schema
from fulcrum.data.table.describe import propose_schema
from fulcrum.data.table.pieces import choose_piece_rows
from fulcrum.data.table.reading import open_table
from fulcrum.errors import ConfigError, DataError
from fulcrum.settings.schema import Table, TaskSettings

SCHEMA = """
target = "sick"
[columns.age]
low = 0
high = 110
missing = "column"
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


def rows(n=60):
    """Rows of a table, as Python has them; some ages are missing."""
    return [
        {
            "patient_id": f"p{i // 2}",
            "hospital": "north" if i % 2 else "south",
            "age": None if i % 7 == 3 else 20 + i,
            "sex": "fmx"[i % 3],
            "visit": f"20{10 + i % 20}-03-01",
            "smoker": bool(i % 3),
            "sick": bool(i % 4),
        }
        for i in range(n)
    ]


def as_text(value):
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def write_csv(path, delimiter=",", given=None):
    given = given or rows()
    lines = [delimiter.join(given[0]), *(delimiter.join(map(as_text, row.values())) for row in given)]
    path.write_text("\n".join(lines) + "\n")
    return path


def columns(given):
    return {name: [row[name] for row in given] for name in given[0]}


def make_csv(folder):
    return write_csv(folder / "t.csv")


def make_tsv(folder):
    return write_csv(folder / "t.tsv", "\t")


def make_gzip(folder):
    (folder / "t.csv.gz").write_bytes(gzip.compress(make_csv(folder).read_bytes()))
    return folder / "t.csv.gz"


def make_json_lines(folder):
    (folder / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows()))
    return folder / "t.jsonl"


def make_parquet(folder):
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra `tables`")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table(columns(rows())), folder / "t.parquet", row_group_size=7)
    return folder / "t.parquet"


def make_feather(folder):
    arrow = pytest.importorskip("pyarrow", reason="Feather needs the extra `tables`")
    import pyarrow.feather

    pyarrow.feather.write_feather(arrow.table(columns(rows())), str(folder / "t.feather"))
    return folder / "t.feather"


def make_arrow_stream(folder):
    arrow = pytest.importorskip("pyarrow", reason="Arrow needs the extra `tables`")
    found = arrow.table(columns(rows()))
    with arrow.OSFile(str(folder / "t.arrow"), "wb") as sink, arrow.ipc.new_stream(sink, found.schema) as writer:
        writer.write_table(found)
    return folder / "t.arrow"


def fill_database(folder):
    with sqlite3.connect(folder / "t.db") as opened:
        opened.execute("CREATE TABLE visits (patient_id, hospital, age, sex, visit, smoker, sick)")
        opened.executemany("INSERT INTO visits VALUES (?, ?, ?, ?, ?, ?, ?)", [tuple(row.values()) for row in rows()])
    opened.close()
    return folder / "t.db"


FILES = (make_csv, make_tsv, make_gzip, make_json_lines, make_parquet, make_feather, make_arrow_stream)


@pytest.fixture
def schema():
    return Schema.from_toml(SCHEMA)


@pytest.fixture
def expected(schema):
    return make_table_dataset(rows(), schema, name="t")


def same(one, other):
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.y, other.y)
    assert one.person_names == other.person_names
    assert torch.equal(one.person, other.person)
    assert one.party_names == other.party_names
    assert torch.equal(one.party, other.party)


def test_rows_from_python(expected):
    assert expected.x.shape == (60, 7)
    assert expected.task.name == "binary"
    assert expected.party_names == ("north", "south")
    assert len(expected.person_names) == 30
    assert expected.schema.input_names[:2] == ["age", "age=missing"]
    assert expected.x[3, :2].tolist() == [0, 1]
    assert not expected.public


@pytest.mark.parametrize("make", FILES)
def test_files(make, tmp_path, expected):
    path = make(tmp_path)
    (tmp_path / "t.schema.toml").write_text(SCHEMA)
    same(load(str(path)), expected)
    elsewhere = tmp_path / "other.toml"
    elsewhere.write_text(SCHEMA)
    (tmp_path / "t.schema.toml").unlink()
    same(load(str(path), table=Table(schema=str(elsewhere))), expected)
    same(load(str(path), table=Table(schema="other.toml")), expected)  # beside the table


@pytest.mark.parametrize("make", FILES)
def test_damaged_files(make, tmp_path, schema):
    path = make(tmp_path)
    content = path.read_bytes()
    if make in (make_csv, make_tsv, make_json_lines):
        content = content[:200] + b"\xff\xfe" + content[200:]
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError) as caught:
        make_table_dataset(str(path), schema)
    assert str(path) in str(caught.value)
    path.write_bytes(b"")
    with pytest.raises(DataError):
        make_table_dataset(str(path), schema)


@pytest.mark.parametrize("driver", ["sqlite", "sqlite+pysqlite"])
def test_databases(driver, tmp_path, expected, monkeypatch):
    if driver != "sqlite":
        pytest.importorskip("sqlalchemy", reason="other databases need the extra `sql`")
    url = f"{driver}:///{fill_database(tmp_path)}"
    (tmp_path / "s.toml").write_text(SCHEMA)
    named = Table(schema=str(tmp_path / "s.toml"), query="visits")
    same(load(url, table=named), expected)
    chosen = "SELECT * FROM visits WHERE hospital = 'north'"
    assert load(url, table=Table(schema=str(tmp_path / "s.toml"), query=chosen)).party_names == ("north",)
    monkeypatch.setenv("MY_DATABASE", url)
    same(load("env:MY_DATABASE", table=named), expected)
    for source, query, words in (
        (url, "", "say which table with table.query"),
        (url, "nothing", "fails"),
        (url, "DROP TABLE visits", "neither the name of a table nor a SELECT"),
        (url, "SELECT * FROM visits; DROP TABLE visits", "fails"),
        ("env:NO_SUCH_NAME", "visits", "no URL of a database under NO_SUCH_NAME"),
        ("postgresql://me:secret@host/db", "visits", "holds a password"),
    ):
        with pytest.raises((ConfigError, DataError)) as caught:
            load(source, table=Table(schema=str(tmp_path / "s.toml"), query=query))
        assert words in str(caught.value)
        assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="holds a password"):  # also where no schema is declared
        load("postgresql://me:secret@host/db")
    same(load(url, table=named), expected)  # nothing was dropped


def make_pandas():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(rows())
    return frame.assign(visit=pandas.to_datetime(frame["visit"]))


def make_pandas_nullable():
    return make_pandas().convert_dtypes()


def make_polars():
    polars = pytest.importorskip("polars", reason="polars is not installed")
    return polars.DataFrame(rows())


def make_polars_lazy():
    return make_polars().lazy()


def make_arrow():
    return pytest.importorskip("pyarrow", reason="pyarrow is not installed").table(columns(rows()))


FRAMES = (make_pandas, make_pandas_nullable, make_polars, make_polars_lazy, make_arrow)


@pytest.mark.parametrize("make", FRAMES)
def test_frames(make, schema, expected):
    same(make_table_dataset(make(), schema), expected)


def test_ids_from_pandas(schema):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    given = rows()
    for i, row in enumerate(given):
        row["patient_id"] = 2**53 + 1 + i // 2
    big = make_table_dataset(pandas.DataFrame(given), schema)
    assert len(big.person_names) == 30
    rounded = pandas.DataFrame(given).astype({"patient_id": float})
    with pytest.raises(DataError, match="ids as decimal numbers, which are rounded"):
        make_table_dataset(rounded, schema)
    # As arrays, text ids of pandas are an array of objects.
    frame = pandas.DataFrame({"person": ["a", "b", "a"], "number": [1, 2, 1]})
    for name in frame:
        data = fulcrum.data.from_arrays(np.ones((3, 2)), [0, 1, 0], classes=2, person=frame[name].astype(object))
        assert data.person is not None
        assert len(data.person.unique()) == 2


def test_train_on_a_frame(tmp_path, monkeypatch, schema):
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "key"))
    given = columns(rows(80))
    words: dict[str, Any] = {"epsilon": 4.0, "rounds": 1, "run": {"engine": "reference"}}
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    with pytest.warns(UserWarning, match="only you see this") as told:
        result = fulcrum.train(data=pandas.DataFrame(given), schema=schema, out=tmp_path / "run", **words)
    assert any("of column 'sex'" in str(each.message) for each in told)
    assert result.summary["unit"] == "person"
    kept = Schema.read(tmp_path / "run" / "schema.toml")
    assert kept == schema
    assert kept.encode(given).shape == (80, 7)
    stored = "".join(file.read_text() for file in (tmp_path / "run").glob("*.[jm]*"))
    assert "only you" not in stored


def test_tasks(tmp_path):
    usual = {"age": {"low": 0, "high": 110, "missing": True}}
    given = {"age": [1, 2, 3, 4], "a": [0, 1, 1, 0], "b": ["yes", "no", "no", "no"], "c": ["x", "y", "z", "x"]}
    given["bmi"] = [20.5, 30, 25, 1000]
    for target, kinds, task, words in (
        ("a", {"kind": "yes-no"}, "auto", ("binary", 1)),
        ("a", {"kind": "yes-no"}, "classification", ("classification", 2)),
        ("c", {"kind": "category", "categories": ["x", "y", "z", "w"]}, "auto", ("classification", 4)),
        ("bmi", {"low": 10, "high": 60}, "auto", ("regression", 1)),
    ):
        schema = Schema.from_mapping({"target": target, "ignore": ["*"], "columns": {**usual, target: kinds}})
        data = make_table_dataset(given, schema, task=TaskSettings(name=task))
        assert (data.task.name, data.task.outputs) == words
        assert not data.inferred
    assert data.y.tolist() == [20.5, 30, 25, 60]  # clipped to the declared range, by which it is scaled
    assert data.task_settings is not None
    assert (data.task_settings.low, data.task_settings.high) == (10, 60)
    both = {"a": {"kind": "yes-no"}, "b": {"kind": "yes-no"}}
    several = Schema.from_mapping({"target": ["a", "b"], "ignore": ["*"], "columns": {**usual, **both}})
    labels = make_table_dataset(given, several)
    assert labels.task.name == "multilabel"
    assert labels.y.tolist() == [[0, 1], [1, 0], [1, 0], [0, 0]]
    mixed = Schema.from_mapping({"target": ["a", "bmi"], "columns": {**usual, **both, "bmi": {"low": 0, "high": 1}}})
    mixed = dataclasses.replace(mixed, ignore=("*",))
    with pytest.raises(ConfigError, match="different kinds"):
        make_table_dataset(given, mixed)


def test_a_public_test_table(tmp_path, schema):
    train, test = write_csv(tmp_path / "t.csv"), write_csv(tmp_path / "test.csv", given=rows(20))
    (tmp_path / "t.schema.toml").write_text(SCHEMA)
    data = load(str(train), table=Table(test="test.csv"))
    assert len(data.test_records) == 20
    assert data.test_records.party is not None
    # A coordinator: all rows are public records to evaluate on.
    seen = load(str(test), need=("test",), table=Table(schema=str(tmp_path / "t.schema.toml")))
    assert seen.train is None
    assert torch.equal(seen.x_test, data.x_test)
    with pytest.raises(ConfigError, match=r"table\.test = 'none\.csv' was not found"):
        load(str(train), table=Table(test="none.csv"))


def test_a_file_per_month(tmp_path, expected):
    write_csv(tmp_path / "v-01.csv", given=rows()[:25])
    write_csv(tmp_path / "v-02.csv", given=rows()[25:])
    (tmp_path / "s.toml").write_text(SCHEMA)
    columns = Table(schema=str(tmp_path / "s.toml"))
    same(load(str(tmp_path / "v-*.csv"), table=columns), expected)
    (tmp_path / "v-03.csv").write_text((tmp_path / "v-02.csv").read_text().replace("smoker", "smokes"))
    with pytest.raises(DataError, match=r"v-03\.csv has not the columns of .*v-01\.csv"):
        load(str(tmp_path / "v-*.csv"), table=columns)
    (tmp_path / "v-03.csv").write_text((tmp_path / "v-02.csv").read_text().replace(",45,", ",old,"))
    with pytest.raises(DataError, match=r"v-03\.csv: column 'age' holds no number in 1 cell \(first: line 2\)"):
        load(str(tmp_path / "v-*.csv"), table=columns)
    (tmp_path / "v[1].csv").write_text((tmp_path / "v-01.csv").read_text())  # a name, not a pattern
    assert len(load(str(tmp_path / "v[1].csv"), table=columns).x) == 25
    with pytest.raises(DataError, match="fits no file"):
        load(str(tmp_path / "w-*.csv"), table=columns)


def test_pieces_of_a_table_are_together_the_table(tmp_path, schema, monkeypatch, expected):
    monkeypatch.setattr("fulcrum.data.table.pieces.CELLS_PER_PIECE", 16)
    assert choose_piece_rows(7) == 16
    path = make_csv(tmp_path)
    source = open_table(str(path), schema)
    assert [len(piece) for piece in source.pieces()] == [16, 16, 16, 12]
    same(make_table_dataset(str(path), schema), expected)


CAPPED = """
import resource, sys
import torch
from fulcrum.data import Schema, make_table_dataset
path, limit = sys.argv[1], int(sys.argv[2])
schema = Schema.from_mapping({"target": "y", "columns": {
    **{f"c{i}": {"low": 0, "high": 1} for i in range(20)}, "y": {"kind": "yes-no"}}})
held = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()  # data and stack so far
resource.setrlimit(resource.RLIMIT_DATA, (held + limit, held + limit))
data = make_table_dataset(path, schema)
print(tuple(data.x.shape), float(data.x.mean()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="the cap on memory is Linux's")
def test_a_table_larger_than_memory(tmp_path):
    path, n = tmp_path / "big.csv", 60_000
    line = ",".join(["0.5"] * 20) + ",yes\n"
    with path.open("w") as file:
        file.write(",".join([*(f"c{i}" for i in range(20)), "y"]) + "\n")
        for _ in range(n // 1000):
            file.write(line * 1000)
    command = [sys.executable, "-c", CAPPED, str(path)]
    source = str(Path(fulcrum.__file__).parents[1])
    usual = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    encoded = n * 20 * 4
    cap = 6 * 1024 * 1024 + encoded // 2
    env = {**usual, "FULCRUM_TABLE_MEMORY": str(1024 * 1024), "FULCRUM_TABLE_CELLS": "20000"}
    done = subprocess.run([*command, str(cap)], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"({n}, 20) 0.0")
    # Read at once and kept in memory, it does not fit: the cap is a real one.
    env = {**usual, "FULCRUM_TABLE_CELLS": str(10**9)}
    done = subprocess.run([*command, str(cap)], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode != 0


def test_a_proposal_names_what_leaks(tmp_path):
    found = propose_schema(open_table(str(make_csv(tmp_path))))
    schema = found.schema
    assert (schema.person, schema.party, schema.target_names) == ("patient_id", "hospital", ["sick"])
    kinds = {column.name: column.kind for column in schema.columns}
    assert kinds == {"age": "number", "sex": "category", "visit": "date", "smoker": "yes-no"}
    age = schema.columns[0]
    assert (age.low, age.high, age.missing) == (20, 80, "column")
    assert {name: len(said) for name, said in found.leaks.items()} == {
        "age": 2,
        "sex": 1,
        "visit": 1,
        "smoker": 0,
        "sick": 0,
    }
    private, public = found.to_toml(public=False), found.to_toml(public=True)
    assert private.count("LEAKS if the table is private") == 4
    assert "LEAKS" not in public
    assert Schema.from_toml(public) == schema
    assert not Schema.from_toml(private).reviewed
    assert len(schema.encode(rows())) == 60


def test_a_proposal_leaves_out_ids_and_free_text(tmp_path):
    n = 200
    given = {
        "code": [f"x{i}" for i in range(n)],
        "note": [f"some text {i * i}" for i in range(n)],
        "empty": [""] * n,
        "town": [f"town {i % 80}" for i in range(n)],
        "grade": [i % 4 for i in range(n)],
    }
    found = propose_schema(open_table(given)).schema
    assert set(found.ignore) == {"code", "note", "empty"}
    assert found.columns[0].buckets == 32
    assert found.targets[0].categories == ("0", "1", "2", "3")
    number = propose_schema(open_table(given), numbers=True).schema.targets[0]
    assert (number.kind, number.low, number.high) == ("number", 0, 3)


def test_describe_on_the_command_line(tmp_path, capsys):
    from fulcrum.cli import main

    path = make_csv(tmp_path)
    assert main(["data", "describe", str(path)]) == 0
    said = capsys.readouterr()
    assert "if it is private they tell about people in it" in said.err
    assert "reviewed = false" in (tmp_path / "t.schema.toml").read_text()
    assert main(["data", "describe", str(path)]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err
    # Not silent in a pipe either.
    for more in (["--out", "-"], ["--json"]):
        assert main(["data", "describe", str(path), *more]) == 0
        said = capsys.readouterr()
        assert "warning:" in said.err
        assert said.out
    assert main(["data", "describe", str(path), "--public", "--out", str(tmp_path / "p.toml")]) == 0
    assert "warning" not in capsys.readouterr().err
    assert Schema.read(tmp_path / "p.toml").reviewed
