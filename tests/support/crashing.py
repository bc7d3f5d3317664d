"""SQLite files that a process leaves behind when it dies between any two statements."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Crash(BaseException):
    """The process dies here. Whatever runs after it runs in a process that no longer exists."""


class CrashPoint:
    """Dies before statement number `left`, counted over all connections; None: never.

    The folder is copied at that moment: this is what the disk holds after kill -9. What the dying process does to its
    own files afterwards (rolling back, closing) happens to the folder of before, which nobody looks at again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.copies = folder, 0
        self.left: int | None = None
        self.hot_journals = 0

    def arm(self, statements: int) -> None:
        """Die before the statement of this number, from 1."""
        self.left = statements

    def disarm(self) -> None:
        """Live on."""
        self.left = None

    def step(self) -> None:
        """Called before each statement."""
        if self.left is None:
            return
        self.left -= 1
        if self.left <= 0:
            self.left = None
            self.copies += 1
            after = self.folder.with_name(f"{self.folder.name.partition('-after-')[0]}-after-{self.copies}")
            shutil.copytree(self.folder, after)
            self.hot_journals += any(file.stat().st_size > 512 for file in after.glob("*-journal"))
            self.folder = after
            raise Crash


@contextmanager
def crashing_connections(point: CrashPoint) -> Iterator[None]:
    """Every connection that is opened inside counts its statements at `point`.

    Its cache holds almost nothing, so that pages of an unfinished transaction reach the disk early: a copy then has
    half of a transaction in the file and the journal beside it that undoes this.
    """

    class Counted(sqlite3.Connection):
        def execute(self, *given: Any) -> sqlite3.Cursor:
            point.step()
            return super().execute(*given)

        def executemany(self, *given: Any) -> sqlite3.Cursor:
            point.step()
            return super().executemany(*given)

    connect = sqlite3.connect

    def counted(*given: Any, **named: Any) -> sqlite3.Connection:
        db = connect(*given, **{"factory": Counted, **named})
        sqlite3.Connection.execute(db, "PRAGMA cache_size = 1")
        return db

    sqlite3.connect = counted  # type: ignore[assignment]
    try:
        yield
    finally:
        sqlite3.connect = connect
