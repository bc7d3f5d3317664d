"""CSV, TSV and JSON lines, as they come: with a byte order mark, gzip, quoted line breaks, CRLF. Standard library only.

Every refusal is a sentence that names the line and never a cell's value: the file may be private.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from fulcrum.data.table.pieces import Piece, TableSource, check_column_names, choose_piece_rows
from fulcrum.data.table.schema import Schema
from fulcrum.errors import DataError

DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
MAX_CELL = 10_000_000
"""Characters in one cell: more is a quote that was never closed."""
MAGIC = {
    b"\x1f\x8b": "is compressed with gzip; name it so that it ends in .gz",
    b"PK\x03\x04": "is a zip archive or a spreadsheet; unpack it, or save it as CSV",
    b"PAR1": "is a Parquet file; name it so that it ends in .parquet",
    b"ARROW1": "is an Arrow file; name it so that it ends in .feather",
    b"\xff\xfe": 'is text in UTF-16; set table.encoding = "utf-16", or save it as UTF-8',
    b"\xfe\xff": 'is text in UTF-16; set table.encoding = "utf-16", or save it as UTF-8',
    b"SQLite format 3": "is an SQLite database; use sqlite:///PATH with table.query",
}
"""First bytes of files that are not what their name says."""


def open_delimited(path: Path, schema: Schema) -> TableSource:
    """A CSV or TSV file, perhaps with .gz after its ending; the delimiter by the ending, or `table.delimiter`."""
    ending = Path(path.name.lower().removesuffix(".gz")).suffix
    delimiter = schema.delimiter or DELIMITERS.get(ending, ",")
    with _opened(path, schema.encoding) as file:
        header = _read_header(path, csv.reader(file, delimiter=delimiter, strict=True), delimiter)

    def pieces() -> Iterator[Piece]:
        with _opened(path, schema.encoding) as file:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            next(rows)
            yield from _cut_rows(path, rows, header)

    return TableSource(str(path), header, pieces, "line")


def _read_header(path: Path, rows: Any, delimiter: str) -> tuple[str, ...]:
    with _sentences(path, rows):
        first = next(rows, None)
        while first is not None and not any(cell.strip() for cell in first):
            raise DataError(f"{path} starts with an empty line; its first line must name the columns.")
    if first is None:
        raise DataError(f"{path} is empty; its first line must name the columns.")
    names = [cell.strip() for cell in first]
    if len(names) == 1:
        others = [sign for sign in (",", ";", "\t", "|") if sign != delimiter and sign in names[0]]
        if others:
            shown = {"\t": "a tab"}.get(others[0], repr(others[0]))
            raise DataError(
                f"{path} has one column when it is cut at {delimiter!r}, and its first line holds {shown}: set "
                f"table.delimiter = {json.dumps(others[0])}."
            )
    if any(re.fullmatch(r"[+-]?\d+([.,]\d+)?([eE][+-]?\d+)?", name) for name in names):
        raise DataError(f"{path} names no columns: its first line holds numbers; add a line with the columns' names.")
    return check_column_names(names, str(path))


def _cut_rows(path: Path, rows: Any, header: Sequence[str]) -> Iterator[Piece]:
    size = choose_piece_rows(len(header))
    held: list[list[str]] = []
    numbers: list[int] = []
    with _sentences(path, rows):
        for row in rows:
            if not row:  # an empty line
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{path}: line {rows.line_num} has {len(row)} cells, and the first line names {len(header)} "
                    "columns; a cell that holds the delimiter must be in double quotes."
                )
            held.append(row)
            numbers.append(rows.line_num)
            if len(held) == size:
                yield _make_piece(held, numbers, header)
                held, numbers = [], []
    if held:
        yield _make_piece(held, numbers, header)


def _make_piece(held: list[list[str]], numbers: list[int], header: Sequence[str]) -> Piece:
    return Piece(dict(zip(header, map(list, zip(*held, strict=True)), strict=True)), numbers)


@contextlib.contextmanager
def _sentences(path: Path, rows: Any) -> Iterator[None]:
    """Errors of the csv module as one sentence, with the line."""
    try:
        yield
    except csv.Error as error:
        raise DataError(
            f"{path}: near line {rows.line_num} a quoted cell is not closed, or is followed by more text ({error}); "
            "write a quote inside a cell as two."
        ) from None


@contextlib.contextmanager
def _opened(path: Path, encoding: str) -> Iterator[IO[str]]:
    """The file as text, without a byte order mark; DataError where it is no text, or changes while it is read."""
    csv.field_size_limit(MAX_CELL)
    try:
        before = describe_file(path)
        with path.open("rb") as raw:
            start = raw.read(16)
            zipped = path.name.lower().endswith(".gz")
            _check_magic(path, start, encoding, zipped)
            raw.seek(0)
            binary: IO[bytes] = gzip.GzipFile(fileobj=raw) if zipped else raw  # type: ignore[assignment]
            known = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
            with io.TextIOWrapper(binary, encoding=known, newline="") as text:
                yield text
        check_unchanged(path, before)
    except UnicodeDecodeError as error:
        raise DataError(
            f'{path} is not text in {encoding} (byte {error.start} of a block); set table.encoding, such as "latin-1" '
            'or "cp1252", or save it as UTF-8.'
        ) from None
    except LookupError:
        raise DataError(f"table.encoding = {encoding!r} is not known; use utf-8, latin-1, cp1252 or utf-16.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{path} is no whole gzip file: it was cut short or damaged.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None


def _check_magic(path: Path, start: bytes, encoding: str, zipped: bool) -> None:
    for magic, words in MAGIC.items():
        fits = (zipped and magic == b"\x1f\x8b") or (encoding.lower().startswith("utf-16") and magic[:1] in b"\xff\xfe")
        if start.startswith(magic) and not fits:
            raise DataError(f"{path} {words}.")


def describe_file(path: Path) -> tuple[int, int, int]:
    """What changes when a file does: its size, time and place on the disk."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ino


def check_unchanged(path: Path, before: tuple[int, int, int]) -> None:
    """DataError where a file is not what it was before it was read: half of the rows would be those of before."""
    if describe_file(path) != before:
        raise DataError(
            f"{path} changed while it was read; wait until it is complete, or copy it and give the copy, so that all "
            "rows belong together."
        )


# --- JSON lines ---------------------------------------------------------------------------------


def open_json_lines(path: Path, schema: Schema) -> TableSource:
    """A file with one JSON object per line; the first one names the columns."""

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        with _opened(path, schema.encoding) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        found = json.loads(line)
                    except ValueError:
                        raise DataError(f"{path}: line {number} is no JSON.") from None
                    if not isinstance(found, dict):
                        raise DataError(f"{path}: line {number} is no JSON object.")
                    yield number, found

    first = next(objects(), None)
    if first is None:
        raise DataError(f"{path} is empty; each line must be a JSON object.")
    names = check_column_names([str(name) for name in first[1]], str(path))
    return TableSource(str(path), names, lambda: cut_mappings(objects(), names, str(path), "line"), "line")


def cut_mappings(
    rows: Iterator[tuple[int, Any]], names: Sequence[str], where: str, word: str = "row"
) -> Iterator[Piece]:
    """Pieces of rows that are dicts; a name that is not there is an empty cell."""
    size, known = choose_piece_rows(len(names)), set(names)
    held: list[Any] = []
    numbers: list[int] = []
    for number, row in rows:
        if not known.issuperset(row):
            raise DataError(f"{where}: {word} {number} has a column that the first one has not.")
        held.append(row)
        numbers.append(number)
        if len(held) == size:
            yield Piece({name: [each.get(name) for each in held] for name in names}, numbers)
            held, numbers = [], []
    if held:
        yield Piece({name: [each.get(name) for each in held] for name in names}, numbers)
