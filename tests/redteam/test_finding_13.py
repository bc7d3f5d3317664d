"""Finding 13: the run's folder held an unsalted hash of the private data, an exact test for guessed records.

At 243f1c8 run.json had `compute_dataset_fingerprint(data)`: whoever read it could try values of an unknown record until
the hash fitted. Now what is stored is keyed, and the key stays in a file of the user.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fulcrum.data import Dataset, from_arrays, load
from fulcrum.data.fingerprints import (
    KEY_BYTES,
    add_record_digests,
    compute_keyed_fingerprint,
    compute_record_digests,
    compute_unit_digests,
    find_key_file,
    is_same_data,
    read_record_key,
    select_held_out,
)
from fulcrum.errors import ConfigError
from fulcrum.runs import execute, prepare, resume
from fulcrum.settings.schema import Settings

QUICK = Settings().replace(
    data={"parties": 2, "min_examples": 2},
    model={"name": "linear"},
    train={"rounds": 2, "rate": 0.5},
    privacy={"sigma": 1.0},
    run={"device": "cpu"},
)


def patients(age: float = 40.0, **more: Any) -> Dataset:
    """Thirty known records and the age that somebody wants to know."""
    x = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    x[0, 0] = age
    return from_arrays(x, np.arange(30) % 2, classes=2, name="patients", **more)


def guess(stored: str) -> list[float]:
    """The attack: every age whose data set has the stored hash."""
    return [age for age in range(100) if patients(float(age)).fingerprint == stored]


def test_the_folder_of_a_run_does_not_confirm_a_guess(tmp_path: Path):
    made = prepare(QUICK, patients())
    execute(made, tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["data"]
    assert guess(stored) == []
    assert guess(patients().fingerprint) == [40.0], "the attack works on what 243f1c8 stored"
    whole = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    records = made.problem.dataset.records
    for secret in (made.problem.dataset.fingerprint, patients().fingerprint):
        assert secret.encode() not in whole
    for digest in compute_record_digests(records).numpy():
        assert bytes(digest) not in whole
        assert bytes(digest).hex().encode() not in whole


def test_the_owner_still_knows_the_data_again(tmp_path: Path):
    execute(prepare(QUICK, patients()), tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["data"]
    assert is_same_data(patients(), stored)
    assert not is_same_data(patients(41.0), stored)
    assert resume(tmp_path / "run", dataset=patients()).epsilon > 0


def with_key(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(folder / name / "record.key"))


def test_another_key_gives_other_fingerprints_units_and_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = []
    for name in ("one", "two", "one"):
        with_key(tmp_path, monkeypatch, name)
        data = patients()
        held = select_held_out(data, 0.5).tolist()
        found.append((compute_keyed_fingerprint(data), compute_unit_digests(data, torch.arange(30), "example"), held))
    assert found[0] == found[2]
    assert all(a != b for a, b in zip(found[0], found[1], strict=True))
    public = patients(public=True)
    assert compute_keyed_fingerprint(public) == public.fingerprint, "folders on public data stay portable"


def test_the_key_is_made_once_and_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with_key(tmp_path, monkeypatch, "new")
    key = read_record_key()
    file = find_key_file()
    assert (len(key), file.read_bytes()) == (KEY_BYTES, key)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(path.name for path in file.parent.iterdir()) == ["record.key"]
    code = "from fulcrum.data.fingerprints import read_record_key; print(read_record_key().hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == key.hex()
    monkeypatch.delenv("FULCRUM_KEY_FILE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert find_key_file() == tmp_path / "config" / "fulcrum" / "record.key"


def test_a_key_that_cannot_be_kept_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "file" / "record.key"))
    with pytest.raises(ConfigError, match="FULCRUM_KEY_FILE"):
        read_record_key()
    (tmp_path / "short.key").write_bytes(b"too short")
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "short.key"))
    with pytest.raises(ConfigError, match="holds 9 bytes and is no key of 32"):
        read_record_key()
    even = QUICK.replace(data={"partition": "iid"})
    assert prepare(even, patients()).plan.parties == 2, "nothing is stored here, so no key is needed"
    assert compute_keyed_fingerprint(load("digits")), "nor for public data"


def test_units_are_known_by_person_and_record_whatever_is_done_to_the_inputs():
    image = from_arrays(np.random.default_rng(1).integers(0, 9, size=(30, 4)), np.arange(30) % 2, classes=2)
    rows = torch.arange(30)
    as_loaded = add_record_digests(image)
    assert compute_unit_digests(as_loaded, rows, "example") == compute_unit_digests(image, rows, "example")
    floats = as_loaded.with_float_inputs()
    assert compute_unit_digests(floats, rows, "example") == compute_unit_digests(as_loaded, rows, "example")
    names = [f"id-{i % 5}" for i in range(30)]
    several = patients(person=np.array(names))
    assert len(compute_unit_digests(several, rows, "person")) == 5 * 16
    assert len(compute_unit_digests(several, rows, "example")) == 30 * 16


def test_sixty_thousand_records_take_about_a_second():
    x = torch.zeros(60_000, 784)
    x[:, 0] = torch.arange(60_000.0)
    data = from_arrays(x, torch.arange(60_000) % 10, classes=10)
    best = float("inf")
    for _ in range(2):
        began = time.process_time()
        digests = compute_unit_digests(data, torch.arange(60_000), "example")
        best = min(best, time.process_time() - began)
    assert len({digests[i : i + 16] for i in range(0, len(digests), 16)}) == 60_000
    assert best < 2.0, f"{best:.2f} s on {os.cpu_count()} cores"
