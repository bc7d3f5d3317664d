"""Tables in a database: sqlite:///FILE with the standard library, other URLs with SQLAlchemy. Read only, in pieces."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fulcrum.data.table.pieces import Piece, TableSource, check_column_names, choose_piece_rows
from fulcrum.errors import ConfigError, DataError

Rows = tuple[list[str], Iterator[Sequence[Any]]]
RunQuery = Callable[[str], contextlib.AbstractContextManager[Rows]]
"""A statement -> the names of its columns, and its rows; closed at the end."""


def open_database(url: str, query: str) -> TableSource:
    """What a query (or the name of a table) finds in a database."""
    where, full = _resolve_url(url)
    if not query:
        raise ConfigError(f"{where} is a database; say which table with table.query, a name or a SELECT statement.")
    statement = _make_statement(query)
    run = _open_sqlite(full) if full.startswith("sqlite:///") else _open_sqlalchemy(full, where)
    with run(statement) as (found, _):
        names = check_column_names(found, where)

    def pieces() -> Iterator[Piece]:
        size, start = choose_piece_rows(len(names)), 1
        with run(statement) as (_, rows):
            held: list[Sequence[Any]] = []
            for row in rows:
                held.append(row)
                if len(held) == size:
                    yield _make_piece(held, names, start)
                    start, held = start + len(held), []
            if held:
                yield _make_piece(held, names, start)

    return TableSource(where, names, pieces)


def _make_piece(held: list[Sequence[Any]], names: Sequence[str], start: int) -> Piece:
    return Piece({name: [row[at] for row in held] for at, name in enumerate(names)}, range(start, start + len(held)))


def _resolve_url(url: str) -> tuple[str, str]:
    """The URL as messages may show it, and the whole of it: settings are stored, so a password must not be in them."""
    if url.startswith("env:"):
        name = url.removeprefix("env:")
        full = os.environ.get(name, "")
        if "://" not in full:
            raise ConfigError(f"data.source = {url!r}: the environment has no URL of a database under {name}.")
        return url, full
    refuse_password(url)
    return url, url


def refuse_password(url: str) -> None:
    """ConfigError for a URL with a password: settings are stored, and messages show the source."""
    if "@" in url and urlsplit(url).password:
        raise ConfigError(
            "data.source holds a password, and settings are written to the run's folder; put the URL into an "
            "environment variable, and say --data env:NAME."
        )


def _make_statement(query: str) -> str:
    """A SELECT statement: as given, or of all columns of a table in the order that they have."""
    if re.match(r"\s*(select|with)\b", query, re.IGNORECASE):
        return query.strip().rstrip(";")
    if not re.fullmatch(r"\w+(\.\w+)*", query):
        raise ConfigError(f"table.query = {query!r} is neither the name of a table nor a SELECT statement.")
    quoted = ".".join(f'"{part}"' for part in query.split("."))
    return f"SELECT * FROM {quoted}"


def _open_sqlite(url: str) -> RunQuery:
    path = Path(url.removeprefix("sqlite:///"))
    if not path.is_file():
        raise DataError(f"there is no database {path}.")

    @contextlib.contextmanager
    def run(statement: str) -> Iterator[Rows]:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as opened:
            try:
                opened.execute("BEGIN")  # one state of the file for all pieces
                cursor = opened.execute(statement)
                yield [column[0] for column in cursor.description], iter(cursor)
            except sqlite3.Error as error:
                raise DataError(f"sqlite:///{path}: table.query fails ({error}).") from None

    return run


def _open_sqlalchemy(url: str, where: str) -> RunQuery:
    try:
        import sqlalchemy
    except ImportError:
        raise DataError(f"{where} needs SQLAlchemy; run `pip install 'fulcrum-fl[sql]'`.") from None
    try:
        engine = sqlalchemy.create_engine(url)
    except (sqlalchemy.exc.ArgumentError, ImportError) as error:
        raise DataError(f"{where} cannot be opened ({_first_line(error)}).") from None

    @contextlib.contextmanager
    def run(statement: str) -> Iterator[Rows]:
        try:
            with engine.connect().execution_options(stream_results=True) as opened:
                result = opened.execute(sqlalchemy.text(statement))
                yield list(result.keys()), (tuple(row) for part in result.partitions(1000) for row in part)
        except sqlalchemy.exc.SQLAlchemyError as error:
            raise DataError(f"{where}: the query fails ({_first_line(error)}).") from None
        finally:
            engine.dispose()

    return run


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
