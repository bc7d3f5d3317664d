"""Tables: a schema that is declared, files and frames that are read in pieces, and arrays for training.

    schema = Schema.read("patients.schema.toml")
    schema.encode("new-patients.csv")                 # [n, schema.width] float32, as the model was trained
    schema.decode_target(predictions)                 # in the table's own words
    make_table_dataset("patients.csv", schema)        # a Dataset

schema.py     Column and Schema: what is declared; TOML
kinds.py      number, category, yes-no, date: what each declares and becomes     dates.py, texts.py   dates; text
cells.py      cells of text, numbers or objects     pieces.py   a table as pieces of some thousand rows
reading.py    opens files, databases and frames     delimited.py CSV, TSV, JSON lines     columnar.py Parquet, Feather
encoding.py   pieces to arrays, and what the holder alone is told     growing.py   arrays larger than memory
describe.py   proposes a schema from public or made-up data
"""

from __future__ import annotations

from fulcrum.data.table.encoding import EncodedTable, encode_table
from fulcrum.data.table.kinds import KINDS, ColumnKind
from fulcrum.data.table.reading import TABLE_FILES, is_frame, open_table
from fulcrum.data.table.schema import SCHEMA_FILE, Column, Schema

__all__ = [
    "KINDS",
    "SCHEMA_FILE",
    "TABLE_FILES",
    "Column",
    "ColumnKind",
    "EncodedTable",
    "Schema",
    "encode_table",
    "is_frame",
    "open_table",
]
