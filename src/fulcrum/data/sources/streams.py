"""Records one by one: torch data sets, and generators that yield (x, y) or dicts. Never more than a piece in memory.

def records():                                   # a generator function, or package.module:records
    for visit in ...:
        yield {"x": [...], "y": 1, "person": visit.patient, "party": "north"}
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fulcrum.data.arrays import from_arrays
from fulcrum.data.dataset import Dataset
from fulcrum.data.table.growing import GrowingArray
from fulcrum.data.tasks.arrays import to_numpy_array
from fulcrum.errors import DataError
from fulcrum.settings.schema import TaskSettings

RECORD_KEYS = ("x", "y", "person", "party")
ROWS_PER_PIECE = 1024


class _InputColumn:
    """One input of the records: of the type and shape of the first one."""

    def __init__(self, name: str, first: npt.NDArray[Any]) -> None:
        self.name, self.shape = name, first.shape
        whole = first.dtype.kind in "iu" and first.dtype.itemsize >= 4
        self.grown = GrowingArray(np.int64 if whole else np.float32, first.shape)
        self.held: list[npt.NDArray[Any]] = []

    def add(self, value: npt.NDArray[Any], number: int) -> None:
        if value.shape != self.shape:
            raise DataError(
                f"record {number}: {self.name} has shape {list(value.shape)}, and that of the first record "
                f"{list(self.shape)}; all must have the same."
            )
        self.held.append(value)
        if len(self.held) == ROWS_PER_PIECE:
            self.flush()

    def flush(self) -> None:
        if self.held:
            self.grown.append(np.stack(self.held))
            self.held = []

    def finish(self) -> Tensor:
        self.flush()
        return self.grown.finish()


def read_records(given: Iterable[Any], name: str, task: TaskSettings, public: bool) -> Dataset:
    """A Dataset of records that come one by one: (x, y), or dicts with x, y, person and party.

    x: a number array, tensor or list, or a dict of them for several inputs; all of one shape. Targets, persons and
    parties are held in memory, inputs in a temporary file where they are many.
    """
    inputs: dict[str, _InputColumn] = {}
    lists: dict[str, list[Any]] = {}
    with contextlib.ExitStack() as stack:
        for number, item in enumerate(given, start=1):
            found = _split_record(item, number, name)
            parts = found["x"] if isinstance(found["x"], Mapping) else {"": found["x"]}
            if not inputs:
                for key, value in parts.items():
                    inputs[str(key)] = _InputColumn(f"x[{key!r}]" if key else "x", _to_numbers(value, number, name))
                    stack.callback(inputs[str(key)].grown.close)
                lists = {key: [] for key in found if key != "x"}
            if set(map(str, parts)) != set(inputs) or set(found) - {"x"} != set(lists):
                raise DataError(f"{name}: record {number} has other parts than the first one.")
            for key, value in parts.items():
                inputs[str(key)].add(_to_numbers(value, number, name), number)
            for key, values in lists.items():
                values.append(_to_plain(found[key]))
        if not inputs:
            raise DataError(f"{name} has no records.")
        x = {key: column.finish() for key, column in inputs.items()}
    owners: dict[str, Any] = {key: np.asarray(lists[key]) for key in ("person", "party") if key in lists}
    return from_arrays(
        x[""] if set(x) == {""} else x,
        _stack_targets(lists["y"]) if "y" in lists else None,
        name=name,
        task=task,
        public=public,
        **owners,
    )


def _split_record(item: Any, number: int, name: str) -> dict[str, Any]:
    if isinstance(item, Mapping):
        unknown = [key for key in item if key not in RECORD_KEYS]
        if "x" not in item or unknown:
            raise DataError(
                f"{name}: record {number} is a dict with {', '.join(map(str, item))}; it must have x, and may have "
                "y, person and party (columns of a table need a schema)."
            )
        return dict(item)
    if isinstance(item, tuple | list) and len(item) == 2:
        return {"x": item[0], "y": item[1]}
    raise DataError(
        f"{name}: record {number} is a {type(item).__name__}; it must be (x, y), or a dict with x, y, person and party."
    )


def _to_numbers(value: Any, number: int, name: str) -> npt.NDArray[Any]:
    array = to_numpy_array("x", value)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{name}: x of record {number} is a {type(value).__name__}, not numbers; turn it into a tensor (torch data "
            "sets: with a transform)."
        )
    return array


def _to_plain(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _stack_targets(values: list[Any]) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:
        raise DataError("y has another shape in some records than in the first one.") from None


def list_torch_items(given: Any) -> Iterator[Any]:
    """The items of a torch data set, map-style by number, else as they come."""
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return (given[number] for number in range(len(given)))
    return iter(given)
