"""Reader for CIFAR-10's batches, which are pickles, without running code from the pickle.

Two safeguards. First the pickle instructions are scanned without executing them, and any that
an array of bytes with its labels does not need is refused. Then it is unpickled with stand-ins in
place of the three NumPy names that such an array mentions; the stand-ins only build a byte
array of a checked size. No name is ever imported, so not even NumPy's own code runs.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fulcrum.data.tasks.arrays import AnyArray
from fulcrum.errors import DataError

MAX_BATCH_BYTES = 64 * 2**20  # a batch has 31 MB
CIFAR_CLASSES = 10

STRUCTURE_OPCODES = ("PROTO", "FRAME", "STOP", "MARK")
MEMO_OPCODES = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET")
VALUE_OPCODES = ("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1")
TEXT_OPCODES = (
    "BINSTRING",
    "SHORT_BINSTRING",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
)
TUPLE_OPCODES = ("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
CONTAINER_OPCODES = ("EMPTY_DICT", "EMPTY_LIST", "APPEND", "APPENDS", "SETITEM", "SETITEMS")
ARRAY_OPCODES = ("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD")
ALLOWED_OPCODES = frozenset(
    (
        *STRUCTURE_OPCODES,
        *MEMO_OPCODES,
        *VALUE_OPCODES,
        *TEXT_OPCODES,
        *TUPLE_OPCODES,
        *CONTAINER_OPCODES,
        *ARRAY_OPCODES,
    )
)
"""The pickle opcodes of a batch. All others are refused."""


def parse_cifar_batch(data: bytes, shape: tuple[int, ...], path: Path) -> tuple[AnyArray, AnyArray]:
    """(pixels [rows, 3072] uint8, labels [rows] uint8) of one batch; `shape` is (rows, 3072).

    Reads the original Python 2 pickles and those that today's Python and NumPy write with protocol 2 to
    4. Raises DataError naming the path for anything else: other names, other types, other shapes.
    """
    if len(data) > MAX_BATCH_BYTES:
        raise DataError(f"{path} is corrupt: it is larger than {MAX_BATCH_BYTES:,} bytes.")
    try:
        _check_opcodes(data)
        batch = _SafeUnpickler(io.BytesIO(data), shape).load()
    except Exception as error:  # a hostile pickle can make the standard library raise almost anything
        raise DataError(f"{path} is not a CIFAR-10 batch: {error}.") from error
    if not isinstance(batch, dict):
        raise DataError(f"{path} is not a CIFAR-10 batch: it holds a {type(batch).__name__} instead of a dictionary.")
    named = {key.encode() if isinstance(key, str) else key: value for key, value in batch.items()}
    pixels, labels = named.get(b"data"), named.get(b"labels")
    if not isinstance(pixels, _ByteArrayStandIn) or pixels.values is None:
        raise DataError(f"{path} is not a CIFAR-10 batch: it has no array called data.")
    if not isinstance(labels, list) or len(labels) != shape[0]:
        raise DataError(f"{path} is corrupt: it must have a list of {shape[0]:,} labels.")
    if not all(type(label) is int and 0 <= label < CIFAR_CLASSES for label in labels):
        raise DataError(f"{path} is corrupt: its labels must be integers in 0..{CIFAR_CLASSES - 1}.")
    return pixels.values, np.array(labels, dtype=np.uint8)


def _check_opcodes(data: bytes) -> None:
    """Scan the instructions without executing any; raise on the first that a batch does not need."""
    for seen, (instruction, argument, _) in enumerate(pickletools.genops(data)):
        if instruction.name not in ALLOWED_OPCODES:
            raise ValueError(f"the pickle instruction {instruction.name} has no place in it")
        # The C unpickler allocates its memo up to the largest slot named: a few bytes could ask for 64 GB.
        if instruction.name in ("PUT", "BINPUT", "LONG_BINPUT") and (not isinstance(argument, int) or argument > seen):
            raise ValueError(f"memory slot {argument} is out of order")
        if instruction.name == "GLOBAL":
            module, name = str(argument).split(" ", 1)
            _check_allowed_name(module, name)


class _ByteArrayStandIn:
    """Replaces `numpy.ndarray`: filled once, with bytes of exactly the expected shape."""

    __slots__ = ("shape", "values")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.values: AnyArray | None = None

    def __setstate__(self, state: object) -> None:
        if self.values is not None or not isinstance(state, tuple) or len(state) != 5:
            raise ValueError("the state of its array is malformed")
        version, shape, dtype, fortran, raw = state
        if version != 1 or not isinstance(dtype, _DtypeStandIn) or not isinstance(raw, bytes):
            raise ValueError("its array is not made of bytes")
        if shape != self.shape or len(raw) != math.prod(self.shape):
            raise ValueError(f"its array has shape {shape!r} in {len(raw):,} bytes instead of {self.shape}")
        self.values = np.frombuffer(raw, dtype=np.uint8).reshape(self.shape, order="F" if fortran else "C")


class _DtypeStandIn:
    """Replaces `numpy.dtype`: unsigned bytes, whatever its state says."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple):
            raise ValueError("the state of its dtype is malformed")


class _FunctionStandIn:
    """Replaces an allowed name in a pickle. It can be called; it has no attributes to change."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: object) -> None:
        raise ValueError("it tries to change a NumPy function")


def _make_dtype(code: object, *_: object) -> _DtypeStandIn:
    if code not in ("u1", b"u1"):
        raise ValueError(f"its array is of type {code!r} instead of bytes")
    return _DtypeStandIn()


def _refuse_ndarray_call(*_: object) -> None:
    raise ValueError("it tries to call numpy.ndarray")


# Original files say numpy.core; NumPy 2 writes numpy._core.
ALLOWED_NAMES = frozenset(
    {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    }
)


def _check_allowed_name(module: str, name: str) -> None:
    if (module, name) not in ALLOWED_NAMES:
        raise ValueError(f"it asks for {module}.{name}, which is not allowed")


class _SafeUnpickler(pickle.Unpickler):
    """Unpickles with stand-ins; never imports."""

    def __init__(self, file: io.BytesIO, shape: tuple[int, ...]) -> None:
        super().__init__(file, fix_imports=False, encoding="bytes")
        stand_ins: dict[str, Callable[..., Any]] = {
            "_reconstruct": lambda *_: _ByteArrayStandIn(shape),
            "ndarray": _refuse_ndarray_call,
            "dtype": _make_dtype,
        }
        self._names = {name: _FunctionStandIn(call) for name, call in stand_ins.items()}

    def find_class(self, module: str, name: str) -> Any:
        _check_allowed_name(module, name)
        return self._names[name]

    def persistent_load(self, key: object) -> Any:
        raise ValueError("it refers to something outside the file")
