"""A data set as one frozen value, and the checks that every array passes before it becomes one."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fulcrum.errors import ConfigError, DataError
from fulcrum.rng import numpy_stream

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training records with their labels, and a public test set. n records, classes 0..classes-1.

    x [n, ...] float32, y [n] int64, x_test and y_test likewise. Values are scaled by public constants
    only, never by statistics of the records. person [n] int64: whose record it is (None: one person a
    record). party [n] int64: which party holds it, an index into party_names (None: not given).
    warnings: sentences a user must see. fingerprint: short hash of all of the above.
    """

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    person: Tensor | None = None
    party: Tensor | None = None
    party_names: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    fingerprint: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one record."""
        return tuple(self.x.shape[1:])


def from_arrays(
    x: Any,
    y: Any,
    x_test: Any,
    y_test: Any,
    *,
    person: Any = None,
    party: Any = None,
    name: str = "arrays",
    classes: int | None = None,
    party_names: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Dataset:
    """Check arrays (NumPy, torch or nested lists) and make a Dataset of them.

    x [n, ...] real numbers, finite; y [n] integers from 0; x_test, y_test the same for the public test
    set. person [n]: integers or strings, one per record. party [n]: integers or strings that name the
    party of each record; with party_names, indices into it. classes: the number of classes, where the
    labels do not show them all; otherwise the largest label plus one. Values are used as they are: scale
    them beforehand, by public constants. A DataError names the array and what would be right.
    """
    notes = list(warnings)
    train, test = _features("x", x, notes), _features("x_test", x_test, notes)
    labels, test_labels = _labels("y", y, len(train)), _labels("y_test", y_test, len(test))
    if train.shape[1:] != test.shape[1:]:
        raise DataError(
            f"x has records of shape {_shape(train.shape[1:])} but x_test of {_shape(test.shape[1:])}; "
            "they must be the same."
        )
    count = _classes(labels, test_labels, classes)
    persons = None if person is None else _codes("person", person, len(train))[0]
    parties, names = None, tuple(party_names)
    if party is not None:
        parties, names = _parties(party, len(train), names)
    elif names:
        raise DataError("party_names is given without party; add the party of each record.")
    data = Dataset(name, train, labels, test, test_labels, count, persons, parties, names, tuple(notes))
    return dataclasses.replace(data, fingerprint=fingerprint(data))


def recheck(data: Dataset, name: str) -> Dataset:
    """A Dataset that someone else's code made, checked like arrays."""
    return from_arrays(
        data.x,
        data.y,
        data.x_test,
        data.y_test,
        person=data.person,
        party=data.party,
        name=data.name or name,
        classes=data.classes,
        party_names=data.party_names,
        warnings=data.warnings,
    )


def fingerprint(data: Dataset) -> str:
    """16 hexadecimal digits that change when any record, label, id, party or class count does."""
    digest = hashlib.blake2b(f"{data.classes}|{data.party_names}".encode(), digest_size=8)
    for part in (data.x, data.y, data.x_test, data.y_test, data.person, data.party):
        if part is None:
            digest.update(b"none")
        else:
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


def holdout(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """Hold out a random part of the training records and evaluate on it in place of the test set.

    fraction in (0, 1) of the records, to the nearest record; whole persons where there are person ids
    (then at least that fraction). The original test set is dropped unseen, so that tuning never
    touches it. Same seed, same part.
    """
    if not 0.0 < fraction < 1.0:
        raise ConfigError(f"data.validation = {fraction!r} is out of range; it must lie between 0 and 1.")
    n = len(dataset.x)
    ids = np.arange(n) if dataset.person is None else np.unique(dataset.person.numpy(), return_inverse=True)[1]
    sizes = np.bincount(ids)  # records of each person
    if len(sizes) < 2:
        what = "example" if dataset.person is None else "person"
        raise DataError(f"{dataset.name} has a single {what}; holding out a part needs at least two.")
    order = numpy_stream(seed, "holdout").permutation(len(sizes))
    wanted = max(1, round(fraction * n))
    taken = 1 + int(np.searchsorted(np.cumsum(sizes[order]), wanted))
    held = np.zeros(len(sizes), dtype=bool)
    held[order[: min(taken, len(sizes) - 1)]] = True
    out = torch.from_numpy(held[ids])
    warning = f"{int(out.sum())} held-out records replace the test set; they are evaluated on without noise."
    kept = dataclasses.replace(
        dataset,
        x=dataset.x[~out],
        y=dataset.y[~out],
        x_test=dataset.x[out],
        y_test=dataset.y[out],
        person=None if dataset.person is None else dataset.person[~out],
        party=None if dataset.party is None else dataset.party[~out],
        warnings=(*dataset.warnings, warning),
    )
    return dataclasses.replace(kept, fingerprint=fingerprint(kept))


# --- checks of single arrays ------------------------------------------------------------------

KINDS = {"O": "Python objects", "U": "text", "S": "bytes", "c": "complex numbers", "V": "records"}


def _array(name: str, value: Any) -> Array:
    """A NumPy view or copy of what the user gave; tensors come to the CPU."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:  # ragged lists
        raise DataError(f"{name} is not an array: {error}.") from error


def _features(name: str, value: Any, notes: list[str]) -> Tensor:
    array = _array(name, value)
    if array.dtype.kind not in "biuf":
        held = KINDS.get(array.dtype.kind, str(array.dtype))
        raise DataError(f"{name} holds {held}; it must hold real numbers.")
    if array.ndim < 2:
        raise DataError(
            f"{name} has shape {_shape(array.shape)}; it must be [n, features] or [n, channels, height, width]."
        )
    if array.size == 0:
        raise DataError(f"{name} is empty (shape {_shape(array.shape)}); at least one record is needed.")
    if array.dtype == np.uint8:
        notes.append(
            f"{name} holds bytes 0..255 and is used unscaled; scale it by public constants, such as x / 127.5 - 1."
        )
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        tensor = value.detach().cpu()
    else:
        with np.errstate(over="ignore"):  # what overflows becomes infinite, and is refused below
            tensor = torch.from_numpy(np.array(array, dtype=np.float32, order="C"))
    # The sum is finite almost always when all values are, and costs no second array of the data's size.
    if not bool(torch.isfinite(tensor.sum())):
        bad = (~torch.isfinite(tensor.flatten(1))).any(dim=1).nonzero()
        if len(bad):
            raise DataError(
                f"{name} holds NaN or infinite values in {len(bad)} of {len(tensor)} records (first: record "
                f"{int(bad[0])}); every value must be a finite 32-bit number."
            )
    return tensor


def _labels(name: str, value: Any, n: int) -> Tensor:
    array = _array(name, value)
    if array.dtype.kind not in "biu":
        held = KINDS.get(array.dtype.kind, str(array.dtype))
        raise DataError(f"{name} holds {held}; labels must be integers 0..classes-1.")
    _length(name, array, n)
    return torch.from_numpy(np.array(array, dtype=np.int64))


def _length(name: str, array: Array, n: int) -> None:
    if array.ndim != 1:
        raise DataError(f"{name} has shape {_shape(array.shape)}; it must be one number a record, shape [{n}].")
    if len(array) != n:
        other = "x_test" if name.endswith("test") else "x"
        raise DataError(f"{name} has {len(array)} entries but {other} has {n} records; they must be equally many.")


def _classes(y: Tensor, y_test: Tensor, given: int | None) -> int:
    least, most = int(min(y.min(), y_test.min())), int(max(y.max(), y_test.max()))
    if least < 0:
        raise DataError(f"the labels hold {least}; they must be integers from 0 to classes - 1.")
    if given is not None:
        if given < 2:
            raise DataError(f"classes = {given}; at least 2 are needed.")
        if most >= given:
            raise DataError(f"the labels hold {most}; with classes = {given} they must lie in 0..{given - 1}.")
        return given
    if most == 0:
        raise DataError("all labels are 0; at least two classes are needed (or say how many with classes).")
    # A model with one output per id would not fit in memory; say so before it is built.
    if most >= max(1000, len(y) + len(y_test)):
        raise DataError(f"the labels go up to {most}, beyond the number of records; number the classes 0, 1, 2, ...")
    return most + 1


def _codes(name: str, value: Any, n: int) -> tuple[Tensor, Array]:
    """Ids as int64, and their distinct values in order. Integers stay as they are; text is numbered."""
    array = _array(name, value)
    if array.dtype.kind not in "biuUS":
        held = KINDS.get(array.dtype.kind, str(array.dtype))
        raise DataError(f"{name} holds {held}; it must hold integers or text, one a record.")
    _length(name, array, n)
    if array.dtype.kind in "US":
        values, codes = np.unique(array, return_inverse=True)
        return torch.from_numpy(codes.reshape(-1).astype(np.int64)), values
    return torch.from_numpy(np.array(array, dtype=np.int64)), np.unique(array)


def _parties(value: Any, n: int, names: tuple[str, ...]) -> tuple[Tensor, tuple[str, ...]]:
    codes, values = _codes("party", value, n)
    if names:
        if len(set(names)) < len(names):
            raise DataError("party_names repeats a name; each party needs its own.")
        if int(codes.min()) < 0 or int(codes.max()) >= len(names):
            raise DataError(f"party must hold indices 0..{len(names) - 1} into the {len(names)} party_names.")
        return codes, names
    if values.dtype.kind in "US":
        texts = tuple(v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in values.tolist())
        return codes, texts
    numbered = torch.from_numpy(np.unique(codes.numpy(), return_inverse=True)[1].reshape(-1).astype(np.int64))
    return numbered, tuple(f"party-{v}" for v in values.astype(np.int64).tolist())


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
