"""A table's schema: what columns declare, how cells become numbers, and that no record changes another's encoding."""

import dataclasses

import numpy as np
import pytest
import torch

from fulcrum.data.table import Schema, encode_table
from fulcrum.data.table.cells import Cells, parse_number, to_text
from fulcrum.data.table.growing import GrowingArray
from fulcrum.errors import ConfigError, DataError


def schema(**columns):
    """A schema with these columns and a yes-no target."""
    return Schema.from_mapping({"target": "sick", "columns": {**columns, "sick": {"kind": "yes-no"}}})


def encode(column, cells, **others):
    """The numbers of one column's cells, as rows."""
    return schema(c=column).encode({"c": cells, **others}).tolist()


def test_numbers_are_clipped_and_scaled_to_their_declared_range():
    number = {"low": 0, "high": 100}
    assert encode(number, ["0", "50", "100", "-7", "1e30", "inf"]) == [[-1], [0], [1], [-1], [1], [1]]
    assert encode(number, np.array([0, 50, 2**60])) == [[-1], [0], [1]]
    assert encode({**number, "center": 20, "spread": 10}, ["0", "30", "500"]) == [[-2], [1], [8]]
    logged = encode({**number, "log": True}, ["0", "100", "9.0498756211"])
    assert logged == [[-1], [1], pytest.approx([0.0], abs=1e-6)]
    assert encode({"cuts": [10, 20]}, ["5", "10", "19", "1e30"]) == [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]]


def test_minus_zero_is_zero():
    found = schema(c={"low": -1, "high": 1}).encode({"c": ["-0", "-0.0", "0"]})
    assert torch.signbit(found).tolist() == [[False]] * 3


def test_categories_have_an_other():
    category = {"kind": "category", "categories": ["a", "b", 3]}
    assert encode(category, ["b", " a ", "3", "3.0", "c"]) == [
        [0, 1, 0, 0],
        [1, 0, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]
    assert encode(category, [3, 3.0, np.int64(3)]) == [[0, 0, 1, 0]] * 3
    assert encode({"kind": "category", "categories": ["none", "some"]}, ["none", "some"]) == [[1, 0, 0], [0, 1, 0]]
    named = {"kind": "category", "categories": ["a", "other", "b"]}
    assert schema(c=named).input_names == ["c=a", "c=other", "c=b"]
    assert encode(named, ["b", "other", "zzz"]) == [[0, 0, 1], [0, 1, 0], [0, 1, 0]]
    assert encode({"kind": "category", "categories": ["True", "False"]}, [True, "False"]) == [[1, 0, 0], [0, 1, 0]]
    buckets = schema(c={"kind": "category", "buckets": 4}).encode({"c": ["x", "y", "x"]})
    assert buckets.shape == (3, 4)
    assert buckets.sum(1).tolist() == [1, 1, 1]
    assert torch.equal(buckets[0], buckets[2])


def test_answers_and_dates():
    assert encode({"kind": "yes-no"}, ["Yes", "FALSE", "1", "maybe"]) == [[1], [-1], [1], [0]]
    assert encode({"kind": "yes-no"}, [True, False]) == [[1], [-1]]
    own = {"kind": "yes-no", "yes": ["ja"], "no": ["nein"]}
    assert encode(own, ["Ja", "nein", "yes"]) == [[1], [-1], [0]]
    date = {"kind": "date", "low": "2020-01-01", "high": "2020-12-31"}
    found = schema(c=date).encode({"c": ["2020-01-01", "2020-07-02", "1999-01-01", "2030-01-01 10:00"]})
    assert found[:, 0].tolist() == pytest.approx([-1, 0, -1, 1], abs=1e-6)
    german = schema(c={**date, "format": ["%d.%m.%Y"], "becomes": ["month", "weekday", "year"]})
    assert german.input_names == ["c.month-sin", "c.month-cos", "c.weekday-sin", "c.weekday-cos", "c.year"]
    # January, and a Wednesday as the third day of the week.
    angle = 2 * np.pi * 2 / 7
    assert german.encode({"c": ["01.01.2020"]})[0].tolist() == pytest.approx(
        [0, 1, np.sin(angle), np.cos(angle), -1], abs=1e-6
    )
    days = np.array(["2020-07-02"], dtype="datetime64[ns]")
    assert encode(date, days) == encode(date, ["2020-07-02"])


def test_missing_cells():
    number = {"low": 0, "high": 10}
    with pytest.raises(DataError, match=r"column 'c' is empty in 2 cells \(first: row 2\)"):
        encode(number, ["1", "NA", None])
    assert encode({**number, "missing": True}, ["10", "", "?", float("nan")]) == [[1, 0], [0, 1], [0, 1], [0, 1]]
    assert encode({**number, "missing": "middle"}, ["10", ""]) == [[1], [0]]
    coded = {**number, "missing": True, "missing_values": ["-9"]}
    assert encode(coded, ["-9", "9"]) == [[0, 1], pytest.approx([0.8, 0])]
    assert encode(coded, np.array([-9, 10])) == [[0, 1], [1, 0]]
    category = {"kind": "category", "categories": ["a"], "missing": True}
    assert encode(category, ["a", "", "z"]) == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert encode({**category, "missing": "middle"}, ["a", ""]) == [[1, 0], [0, 1]]


def test_no_record_changes_how_another_is_encoded():
    found = schema(
        c={"low": 0, "high": 10, "missing": True},
        d={"kind": "category", "categories": ["a", "b"]},
        e={"kind": "date", "low": "2000-01-01", "high": "2030-01-01"},
    )
    rows = [{"c": "3", "d": "a", "e": "2010-05-05"}, {"c": "", "d": "q", "e": "1900-01-01"}]
    alone = torch.cat([found.encode([row]) for row in rows])
    assert torch.equal(found.encode(rows), alone)
    assert torch.equal(found.encode([rows[0], {"c": "1e30", "d": "b", "e": "2020-01-01"}])[:1], alone[:1])


def test_a_schema_survives_its_file():
    made = schema(
        **{
            "größe é\n": {"low": 0, "high": 1.5},
            "a.b": {"kind": "category", "categories": ['"quoted"', "\\", "\x7f"]},
            "visit": {"kind": "date", "low": "2000-01-01", "high": "2030-12-31", "becomes": ["month"]},
            "words": {"kind": "text", "buckets": 8},
        }
    )
    made = dataclasses.replace(made, ignore=("x",), delimiter=";", decimal=",", person="none")
    assert Schema.from_toml(made.to_toml()) == made
    assert Schema.from_mapping(made.to_mapping()) == made
    assert Schema.from_toml("[table]\n" + made.to_toml().replace("[columns.", "[table.columns.")) == made


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ({"low": 0}, "declares no range"),
        ({}, "never read off private data"),
        ({"low": 1, "high": 1}, "low below high"),
        ({"low": "a", "high": "b"}, "must be numbers"),
        ({"low": 0, "high": 1, "categories": ["a"]}, "'categories', which a number has not"),
        ({"low": 0, "hihg": 1}, "did you mean 'high'"),
        ({"kind": "nubmer"}, "did you mean 'number'"),
        ({"kind": "category"}, "declare its categories"),
        ({"kind": "category", "categories": ["a", "a"]}, "twice"),
        ({"kind": "category", "categories": [str(i) for i in range(100_000)]}, "100,000 categories"),
        ({"kind": "category", "categories": "a", "buckets": 3}, "declare its categories"),
        ({"kind": "date", "low": "2000-01-01"}, "two dates"),
        ({"kind": "date", "low": "2000-01-01", "high": "2001-01-01", "becomes": ["moon"]}, "'moon'"),
        ({"kind": "yes-no", "yes": ["no"]}, "both as yes and as no"),
        ({"cuts": [2, 1]}, "rising order"),
        ({"low": 0, "high": 1, "missing": "perhaps"}, "must be"),
        ({"low": 0, "high": 1, "log": 3}, "true or false"),
        ({"kind": "text"}, "tokenizer file"),
    ],
)
def test_wrong_columns_are_refused(column, words):
    with pytest.raises(ConfigError) as caught:
        schema(c=column)
    assert words in str(caught.value)
    assert "'c'" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "ill"}, "target 'ill' is not declared"),
        ({"targte": "sick"}, "did you mean 'target'"),
        ({"person": "c"}, "also declared as a column to learn from"),
        ({"decimal": ";"}, "decimal"),
        ({"delimiter": "ab"}, "one character"),
        ({"unlabelled": "keep"}, "refuse, drop"),
        ({"columns": {"c": 3}}, "[columns.age]"),
        ({"columns": {"sick": {"kind": "text", "buckets": 3}}}, "cannot be predicted"),
        ({"columns": {"sick": {"cuts": [1, 2]}}}, "cannot be predicted"),
    ],
)
def test_wrong_schemas_are_refused(changes, words):
    usual = {"target": "sick", "columns": {"c": {"low": 0, "high": 1}, "sick": {"kind": "yes-no"}}}
    assert Schema.from_mapping(usual).width == 1
    with pytest.raises(ConfigError) as caught:
        Schema.from_mapping({**usual, **changes})
    assert words in str(caught.value)


def test_targets_and_their_words():
    found = Schema.from_mapping(
        {"target": "t", "columns": {"c": {"low": 0, "high": 1}, "t": {"kind": "category", "categories": ["x", "y"]}}}
    )
    rows = {"c": ["0", "1"], "t": ["y", "x"]}
    assert found.encode_target(rows).tolist() == [1, 0]
    assert found.decode_target(torch.tensor([1, 0])) == ["y", "x"]
    several = Schema.from_mapping(
        {
            "target": ["a", "b"],
            "columns": {"c": {"low": 0, "high": 1}, "a": {"kind": "yes-no"}, "b": {"kind": "yes-no"}},
        }
    )
    assert several.encode_target({"c": ["0"], "a": ["yes"], "b": ["no"]}).tolist() == [[1, 0]]
    assert several.decode_target([[1, 0]]) == [["yes", "no"]]
    # A table to predict on has no target, and may have other columns.
    assert found.encode({"c": ["0"], "new": ["?"]}).tolist() == [[-1]]


def test_persons_and_parties_are_taken_from_the_data():
    found = schema(c={"low": 0, "high": 1})
    rows = {"c": [0, 1, 1], "sick": [0, 1, 0], "Patient_ID": ["b", "a", "b"], "hospital": [2, 1, 2]}
    table = encode_table(found, rows)
    assert table.person is not None
    assert [table.person_names[code] for code in table.person] == ["b", "a", "b"]
    assert table.party_names == ("1", "2")
    off = dataclasses.replace(found, person="none", party="none", ignore=("*",))
    assert encode_table(off, rows).person is None
    named = dataclasses.replace(found, person="hospital", party="none", ignore=("Patient_ID",))
    assert encode_table(named, rows).person_names == ("1", "2")


def test_a_target_that_is_missing_can_be_left_out():
    found = dataclasses.replace(schema(c={"low": 0, "high": 1}), unlabelled="drop")
    table = encode_table(found, {"c": [0, 1, 1], "sick": ["no", "", "yes"], "person": ["a", "b", "c"]})
    assert table.targets().tolist() == [0, 1]
    assert table.person_names == ("a", "c")
    assert table.person is not None
    assert table.person.tolist() == [0, 1]
    assert any("1 of 3 rows have no target" in note for note in table.notes)


def test_only_counts_are_told():
    found = schema(c={"low": 0, "high": 1, "missing": True}, d={"kind": "category", "categories": ["a"]})
    notes = encode_table(found, {"c": ["7", "", "0"], "d": ["a", "secret", "a"], "sick": [0, 1, 0]}).notes
    assert len(notes) == 3
    assert not any("secret" in note or "7" in note for note in notes)
    assert not encode_table(found, {"c": ["1"], "d": ["a"], "sick": [0]}).notes


def test_cells():
    assert to_text(3.0) == to_text("3.0") == to_text(" 3 ") == "3"
    assert to_text("007") == "007"
    assert to_text(2**60) == str(2**60)
    assert parse_number("1.234,5", ",", ".") == 1234.5
    assert np.isnan(parse_number("1,5", ".", ","))  # not a group of three digits
    assert parse_number("12,345", ".", ",") == 12345
    assert np.isnan(parse_number("1_000"))
    numbers, unreadable = Cells(["1", "1_000", "x", "NA"]).numbers()
    assert unreadable.tolist() == [False, True, True, False]
    assert numbers[0] == 1


def test_a_large_array_goes_to_a_file(monkeypatch):
    monkeypatch.setenv("FULCRUM_TABLE_MEMORY", "100")
    grown, parts = GrowingArray(np.float32, (3,)), [np.full((4, 3), i, np.float32) for i in range(5)]
    for part in parts:
        grown.append(part)
    assert grown.file is not None
    found = grown.finish()
    assert np.array_equal(found.numpy(), np.concatenate(parts))
    found[0] = 9.0  # may be written to
    small = GrowingArray(np.float32, (3,))
    small.append(parts[0])
    assert small.file is None
    assert torch.equal(small.finish(), torch.zeros(4, 3))
