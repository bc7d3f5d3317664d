"""A few thousand inputs of benchmarks/fuzz_readers.py; readers that are wrong in each way are found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fuzz_readers  # noqa: E402
from fuzz_inputs import mutate_bytes  # noqa: E402
from fuzz_reader import Reader  # noqa: E402

from fulcrum.errors import ConfigError, DataError, InputError  # noqa: E402


def play(tmp_path: Path, *words: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "fuzz_readers.py"), *words, "--out", str(tmp_path / "fuzz.json")],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "fuzz.json").read_text())


def test_every_reader_reads_or_refuses(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="parties sign with keys")
    found = play(tmp_path, "--inputs", "200", "--seed", "11")
    assert found["findings"] == 0
    names = {row["reader"] for row in found["readers"]}
    wanted = {"settings", "idx", "pickle", "npz", "table csv", "schema", "run checkpoint", "ledger", "message header"}
    assert wanted | {"message arrays", "terms", "proposal", "weights torch"} <= names
    refusing = [
        row for row in found["readers"] if row["reader"] != "run checkpoint"
    ]  # it passes over, and never refuses
    assert all(row.get("refused", 0) > 0 for row in refusing), "inputs that are never wrong would test nothing"


@pytest.mark.slow
def test_every_reader_reads_or_refuses_many(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="parties sign with keys")
    assert play(tmp_path, "--inputs", "12000", "--seed", "12")["findings"] == 0


# --- wrong readers are found ------------------------------------------------------------------------


def _raise(content: bytes, folder: Path) -> Any:
    return json.loads(content)["x"]


def _hang(content: bytes, folder: Path) -> Any:
    while True:
        pass


def _run(content: bytes, folder: Path) -> Any:
    return os.system("true")


def _grow(content: bytes, folder: Path) -> Any:
    return bytearray(4 << 30)


def _die(content: bytes, folder: Path) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("read", "what"),
    [(_raise, "Error at "), (_hang, "hang"), (_run, "code"), (_grow, "memory"), (_die, "died")],
)
def test_a_wrong_reader_is_found(read: Any, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_readers, "CPU_SECONDS", 0.2)
    reader = Reader("wrong", [b'{"x": 1}'], mutate_bytes, read, (DataError,))
    found: dict[int, str] = {}
    fuzz_readers.fuzz(reader, 1, 2, 0, tmp_path / "input", found.__setitem__)
    assert len(found) == 2
    assert all(any(word in result for word in what.split("|")) for result in found.values()), found


# --- what the fuzzing found ---------------------------------------------------------------------------


def test_a_proposal_names_no_accountant_that_would_have_to_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography", reason="parties sign with keys")
    from fulcrum.flower.proposals import accept_proposal, make_proposal
    from support.flower import toy_settings

    (tmp_path / "planted.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nmake = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    proposal = {**make_proposal(toy_settings(), 3), "accountant": "planted:make"}
    with pytest.raises(ConfigError, match="accountant of a proposal"):
        accept_proposal("a", proposal, look_up=False)
    assert not (tmp_path / "ran").exists()


def test_numbers_of_thousands_of_digits_are_a_mistake_in_the_file(tmp_path: Path) -> None:
    from fulcrum.data.table.schema import Schema
    from fulcrum.settings import files

    (tmp_path / "s.toml").write_text(f"[train]\nrounds = {'9' * 5000}\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        files.read_settings(tmp_path / "s.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        Schema.from_toml("x = " + "[" * 5000 + "]" * 5000)


def test_no_error_is_longer_than_a_screen() -> None:
    error = InputError("x" * 100_000)
    assert len(str(error)) < 1400
    assert str(InputError("short")) == "short"


def test_a_ledger_whose_rows_have_another_form_is_refused_although_its_chain_fits(tmp_path: Path) -> None:
    import sqlite3

    from fulcrum.privacy.ledger import Ledger
    from fulcrum.privacy.ledger.chain import CHAINED_TABLES, ChainEnd, append_table

    file = tmp_path / "ledger.sqlite"
    for column, value in (("delta", "text"), ("delta", 3.0), ("population", b"\xff")):
        file.unlink(missing_ok=True)
        with Ledger.open(file) as ledger:
            ledger.enroll("a", None, 1e-3, "rdp", "example", "toy")
        with sqlite3.connect(file) as db:
            for (trigger,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
                db.execute(f"DROP TRIGGER {trigger}")
            db.execute(f"UPDATE parties SET {column} = ?", (value,))
            db.execute("DELETE FROM chain")
            end = ChainEnd()
            for table in CHAINED_TABLES:
                end = append_table(db, end, table)
        db.close()
        with pytest.raises(InputError, match="row 1 of parties does not hold what such a row holds"):
            Ledger.open(file)
