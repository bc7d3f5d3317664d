"""Fingerprints of private data that may be stored: keyed, with the key staying with the data.

An unkeyed hash of records is an exact test for guessed records. Hence whatever is written down (run folders, ledgers)
is keyed by 32 random bytes in a file of the user: FULCRUM_KEY_FILE, else record.key in the user's configuration folder.
The file is made on first use. Whoever lacks it learns nothing from the fingerprints; whoever loses it loses the means
to know records again, and nothing else. Public data needs no key, so that run folders on it stay portable.

    compute_keyed_fingerprint(dataset)           # of the whole data set, for run.json
    compute_unit_digests(dataset, rows, unit)    # 16 bytes per unit, for a party's ledger
    select_held_out(dataset, 0.1)                # whether each record is held out: its unit's keyed hash alone decides
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fulcrum.data.dataset import Dataset
from fulcrum.data.records import Records, list_input_tensors
from fulcrum.errors import ConfigError, DataError

KEY_BYTES = 32
PUBLIC_KEY = b"public data needs no secret key."
"""In place of the user's key where data is public: the same everywhere."""
KEY_MARK = "records known by key "
"""In the population's name of a ledger's account: which key the digests of its records are made with."""
DIGEST_BYTES = 16
"""Bytes of one unit's digest."""


# --- the key ------------------------------------------------------------------------------------


def find_key_file() -> Path:
    """Where the key lies: FULCRUM_KEY_FILE, else record.key in the user's configuration folder."""
    named = os.environ.get("FULCRUM_KEY_FILE", "")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CONFIG_HOME", "")
    try:
        home = Path(base) if base and Path(base).is_absolute() else Path.home() / ".config"
    except RuntimeError as error:
        raise ConfigError("there is no home folder to keep the records' key in; set FULCRUM_KEY_FILE.") from error
    return home / "fulcrum" / "record.key"


def read_record_key() -> bytes:
    """The user's key of 32 bytes; made on first use, readable by the user alone."""
    return _read_key_at(str(find_key_file()))


@lru_cache(maxsize=8)
def _read_key_at(path: str) -> bytes:
    file = Path(path)
    try:
        if not file.exists():
            _create_key(file)
        key = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file}, the key of private records' fingerprints, cannot be read or made ({error.strerror or error}); "
            "name a file that can be written in FULCRUM_KEY_FILE."
        ) from error
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{file} holds {len(key)} bytes and is no key of {KEY_BYTES}; bring back the right file, or remove it "
            "(records are then not known again)."
        )
    return key


def _create_key(file: Path) -> None:
    """Write a new key whole or not at all; where another process was faster, its key stays."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".record-key-")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as draft:
            draft.write(os.urandom(KEY_BYTES))
            draft.flush()
            os.fsync(draft.fileno())
        try:
            os.link(name, file)  # unlike a rename, never replaces a key
        except FileExistsError:
            return
        except OSError:  # a file system without links
            if not file.exists():
                os.replace(name, file)
    finally:
        Path(name).unlink(missing_ok=True)


def name_record_key() -> str:
    """16 hexadecimal digits that tell one key from another; they say nothing else about it."""
    return _mac(b"fulcrum-key-name", b"").hex()[:16]


# --- whole data sets ----------------------------------------------------------------------------


def compute_keyed_fingerprint(dataset: Dataset) -> str:
    """What may be stored of a data set: public data's own fingerprint, a keyed hash of it where data is private."""
    if dataset.public:
        return dataset.fingerprint
    return _mac(b"fulcrum-dataset", dataset.fingerprint.encode()).hex()


def is_same_data(dataset: Dataset, stored: str) -> bool:
    """Whether a stored fingerprint is that of this data set; those of older run folders are without a key."""
    return stored in (compute_keyed_fingerprint(dataset), dataset.fingerprint)


def shares_records_with_test(dataset: Dataset) -> bool:
    """Whether a test record has the inputs of a training record, for data sets whose records have digests."""
    if dataset.train is None or dataset.test is None or dataset.test.digests is None:
        return False
    train, test = (set(_list_record_digests(part, torch.arange(len(part)))) for part in (dataset.train, dataset.test))
    return not train.isdisjoint(test)


# --- units --------------------------------------------------------------------------------------


def add_record_digests(dataset: Dataset) -> Dataset:
    """The data set with a digest of each record's inputs as loaded: features and types may change later.

    Targets are left out: the same people are known again when something else about them is predicted.
    """

    def added(records: Records | None) -> Records | None:
        if records is None or records.digests is not None:
            return records
        return dataclasses.replace(records, digests=compute_record_digests(records))

    return dataclasses.replace(dataset, train=added(dataset.train), test=added(dataset.test))


def compute_record_digests(records: Records) -> Tensor:
    """A hash of each record's inputs [n, 16] uint8; without a key, so it must stay in memory."""
    parts = [
        part.detach().cpu().contiguous().flatten(1) if part.dim() > 1 else part.detach().cpu()[:, None]
        for part in list_input_tensors(records.x)
    ]
    rows = [memoryview(part.contiguous().numpy().view(np.uint8).reshape(-1)) for part in parts]  # type: ignore[arg-type]
    widths = [len(view) // max(1, len(part)) for view, part in zip(rows, parts, strict=True)]
    start = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"fulcrum-record")
    found = bytearray()
    for row in range(len(records)):
        mac = start.copy()
        for view, width in zip(rows, widths, strict=True):
            mac.update(view[row * width : (row + 1) * width])
        found += mac.digest()
    return torch.frombuffer(found, dtype=torch.uint8).view(-1, DIGEST_BYTES)


def compute_unit_digests(dataset: Dataset, rows: Tensor, unit: str) -> bytes:
    """16 bytes for each unit in these rows of the training records, by which a ledger knows it again; keyed.

    A person's is a hash of the person's id: it stays when records of the person come or go. An example's is a hash of
    its inputs. Equal examples are several units: the second one gets another digest than the first. The order says
    nothing about the rows.
    """
    records = dataset.records
    if unit == "person" and records.person is not None:
        names = _name_persons(dataset, torch.unique(records.person[rows]))
    else:
        names = _number_repeated(_list_record_digests(records, rows))
    return b"".join(sorted(_keyed_digests(b"fulcrum-unit", names)))


def compute_person_digest(person: str) -> bytes:
    """The 16 bytes by which ledgers know a person: of the id as the data has it, keyed."""
    return _keyed_digests(b"fulcrum-unit", [f"person:{person}".encode()])[0]


def compute_person_digests(ids: Iterable[object]) -> bytes:
    """16 bytes for each different person's id, as `compute_unit_digests` makes them for records that name persons."""
    names = [f"person:{each}".encode() for each in dict.fromkeys(ids)]
    return b"".join(sorted(_keyed_digests(b"fulcrum-unit", names)))


def select_held_out(dataset: Dataset, fraction: float) -> Tensor:
    """Whether each training record is held out [n] bool: decided by a keyed hash of its unit (person, else record).

    It depends on the unit alone: no other record, label or seed moves a unit to the other side, so each side is a
    data set of its own people. The same unit stays on its side from run to run.
    """
    draws, unit_of = _draw_per_unit(dataset, b"fulcrum-holdout")
    held: Tensor = torch.from_numpy(draws < np.uint64(int(fraction * 2.0**64)))[unit_of]
    if not held.any() or held.all():
        side = "all" if held.all() else "none"
        raise DataError(
            f"data.validation = {fraction:g} holds out {side} of the {len(held)} records of {dataset.name}; each unit "
            "is drawn on its own, so take a fraction that leaves several on both sides."
        )
    return held


def assign_hashed_parties(dataset: Dataset, parties: int) -> Tensor:
    """The party 0..parties-1 of each training record [n] int64, by a keyed hash of its unit (person, else record).

    It depends on the unit alone, so people who stay keep their party when records come or go.
    """
    draws, unit_of = _draw_per_unit(dataset, b"fulcrum-party")
    return torch.from_numpy((draws % np.uint64(parties)).astype(np.int64))[unit_of]


def _draw_per_unit(dataset: Dataset, purpose: bytes) -> tuple[npt.NDArray[np.uint64], Tensor]:
    """A number below 2^64 for each unit (person, else record), by a keyed hash, and the unit of each record [n]."""
    records = dataset.records
    if records.person is not None:
        persons, unit_of = torch.unique(records.person, return_inverse=True)
        names = _name_persons(dataset, persons)
    else:
        unit_of = torch.arange(len(records))
        names = _list_record_digests(records, unit_of)
    chances = b"".join(_keyed_digests(purpose, names, PUBLIC_KEY if dataset.public else None))
    return np.frombuffer(chances, dtype="<u8").reshape(-1, DIGEST_BYTES // 8)[:, 0], unit_of


def _name_persons(dataset: Dataset, persons: Tensor) -> list[bytes]:
    """What identifies each person in any file: the id as text, not its number within this one."""
    names = dataset.person_names
    return [f"person:{names[code] if names else code}".encode() for code in persons.tolist()]


def _list_record_digests(records: Records, rows: Tensor) -> list[bytes]:
    digests = records.digests if records.digests is not None else compute_record_digests(records)
    whole = digests[rows].contiguous().numpy().tobytes()
    return [whole[at : at + DIGEST_BYTES] for at in range(0, len(whole), DIGEST_BYTES)]


def _number_repeated(names: Iterable[bytes]) -> list[bytes]:
    """The names with a number after each repetition, so that equal ones stay as many as they are."""
    seen: dict[bytes, int] = {}
    found = []
    for name in names:
        count = seen.get(name, 0)
        seen[name] = count + 1
        found.append(name + count.to_bytes(8, "little") if count else name)
    return found


def _keyed_digests(purpose: bytes, names: Iterable[bytes], key: bytes | None = None) -> list[bytes]:
    start = hashlib.blake2b(key=key or read_record_key(), digest_size=DIGEST_BYTES, person=purpose[:16])
    found = []
    for name in names:
        mac = start.copy()
        mac.update(name)
        found.append(mac.digest())
    return found


def _mac(purpose: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, key=read_record_key(), digest_size=DIGEST_BYTES, person=purpose[:16]).digest()
