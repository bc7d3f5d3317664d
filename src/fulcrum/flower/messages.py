"""The messages between coordinator and parties: a small JSON header, and arrays in one safetensors body.

Nothing received is trusted: sizes are bounded before anything is parsed, a body cannot ask for more
memory than it has bytes, names, types and shapes must be exactly those expected, and every number
finite. What does not fit raises `BadMessage`, whose text never quotes private data.

Requests (coordinator to party): `hello`, `round`, `manifest`, `done`, `notice`. Replies: `welcome`, `ready`, `update`,
`noted`, `refused`. With pairwise masks a party answers `round` by `ready`, and `manifest` by its masked `update`.
Each request carries a nonce, and each reply repeats it, names the request's digest and is signed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fulcrum.errors import FulcrumError, InputError
from fulcrum.flower.array_coding import decode_arrays, encode_arrays
from fulcrum.models.layout import ParameterLayout
from fulcrum.models.whitening import compute_buffer_digest
from fulcrum.privacy.events import Event, Unprotected, events_from_json, events_to_json
from fulcrum.types import Assignment, RuleState

MESSAGE_VERSION = 5
"""Version of the messages; a message of another version is refused. 5: the coordinator signs its requests, and a
welcome names the party's ledger."""
MAX_HEADER_BYTES = 64 * 1024
"""Bytes of the longest header that is read."""
BODY_OVERHEAD_BYTES = 64 * 1024
"""Bytes that a body may have beyond its numbers: the table of names and shapes."""

ArraySpec = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Exactly which arrays a body must hold: name -> (type, shape)."""


class BadMessage(FulcrumError):
    """A message that is not what was agreed; the text says what is wrong in fixed words."""


class OtherVersion(BadMessage):
    """A message of another version."""


@dataclass(frozen=True)
class Envelope:
    """One message as bytes. `signature`: the coordinator's on a request (signing.py), a party's on a reply (keys).

    known_body_digest: SHA-256 of the body, where whoever made the body knows it; never from elsewhere.
    """

    header: bytes
    body: bytes = b""
    signature: bytes = b""
    known_body_digest: bytes = field(default=b"", repr=False, compare=False)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of header and body's SHA-256, in hexadecimal: what a signature covers and a reply refers to."""
        h = hashlib.sha256(b"fulcrum/2")
        h.update(len(self.header).to_bytes(8, "little"))
        h.update(self.header)
        h.update(self.known_body_digest or hashlib.sha256(self.body).digest())
        return h.hexdigest()

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.header) + len(self.body) + len(self.signature)


@dataclass(frozen=True)
class PackedBody:
    """A body that goes to several parties: made and hashed once."""

    content: bytes

    @cached_property
    def digest(self) -> bytes:
        """SHA-256."""
        return hashlib.sha256(self.content).digest()


def pack_envelope(
    header: Mapping[str, Any], arrays: Mapping[str, Tensor] | None = None, body: PackedBody | None = None
) -> Envelope:
    """The same content always gives the same bytes, so that a repeated request can be recognised.

    body: in place of arrays, where it was packed before.
    """
    text = json.dumps({"v": MESSAGE_VERSION, **header}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if body is not None:
        return Envelope(text.encode(), body.content, known_body_digest=body.digest)
    return Envelope(text.encode(), encode_arrays(arrays or {}))


# --- headers ------------------------------------------------------------------------------------

TEXT_FIELD, SENTENCE_FIELD, ID_FIELD, WHOLE_FIELD, NUMBER_FIELD, FLAG_FIELD, LIST_FIELD, TABLE_FIELD = (
    "text",
    "sentence",
    "id",
    "whole",
    "number",
    "flag",
    "list",
    "table",
)
_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{0,64}")
"""Ids of runs and nonces: they go into ledgers, statements and logs."""
_FIELD_CHECKS: dict[str, Any] = {
    TEXT_FIELD: lambda v: isinstance(v, str) and len(v) <= 256,
    SENTENCE_FIELD: lambda v: isinstance(v, str) and len(v) <= 2000,
    ID_FIELD: lambda v: isinstance(v, str) and _ID_PATTERN.fullmatch(v) is not None,
    WHOLE_FIELD: lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63,
    NUMBER_FIELD: lambda v: isinstance(v, int | float) and not isinstance(v, bool) and -1e300 < v < 1e300,  # not NaN
    FLAG_FIELD: lambda v: isinstance(v, bool),
    LIST_FIELD: lambda v: isinstance(v, list) and len(v) <= 10_000,
    TABLE_FIELD: lambda v: isinstance(v, dict) and len(v) <= 100,
}
_COMMON_FIELDS = {"nonce": ID_FIELD, "run": ID_FIELD}
_REPLY_FIELDS = {**_COMMON_FIELDS, "party": TEXT_FIELD, "request": TEXT_FIELD}
HEADER_SCHEMAS: dict[str, dict[str, str]] = {
    "hello": {**_COMMON_FIELDS, "proposal": TABLE_FIELD},
    "round": {
        **_COMMON_FIELDS,
        **dict.fromkeys(("party", "rule", "groups", "unit", "model", "task"), TEXT_FIELD),
        **dict.fromkeys(("round", "rounds"), WHOLE_FIELD),
        "assignment": TABLE_FIELD,
        "weight_decay": NUMBER_FIELD,
        "simulation": TABLE_FIELD,
    },
    "done": {**_COMMON_FIELDS, "rounds": WHOLE_FIELD},
    "manifest": {
        **_COMMON_FIELDS,
        "party": TEXT_FIELD,
        **dict.fromkeys(("round", "manifest_bytes", "keys_bytes"), WHOLE_FIELD),
    },
    "ready": {**_REPLY_FIELDS, "round": WHOLE_FIELD, "fresh": ID_FIELD, "key": TABLE_FIELD},
    "notice": {**_COMMON_FIELDS, "text": SENTENCE_FIELD},
    "welcome": {
        **_REPLY_FIELDS,
        "units": WHOLE_FIELD,
        **dict.fromkeys(("model", "task", "randomness"), TEXT_FIELD),
        "shape": LIST_FIELD,
    },
    "update": {**_REPLY_FIELDS, "round": WHOLE_FIELD, "events": LIST_FIELD},
    "noted": _REPLY_FIELDS,
    "refused": {**_REPLY_FIELDS, "code": TEXT_FIELD},
}
"""Which fields each kind of message has: these, those of `OPTIONAL_FIELDS`, and no others."""
OPTIONAL_FIELDS: dict[str, dict[str, str]] = {
    "hello": {"party": TEXT_FIELD},
    "round": {"attempt": WHOLE_FIELD},
    "done": {"party": TEXT_FIELD},
    "notice": {"party": TEXT_FIELD},
    "welcome": {"ledger": TABLE_FIELD},
}
"""Fields that may be left out. party: whom a signed request is for. attempt: how often the round was asked for anew
with a new sample, from 0. ledger: the identity and length of the party's ledger."""


def read_message_header(envelope: Envelope, kinds: tuple[str, ...]) -> dict[str, Any]:
    """The header as a dictionary, every field of the right type; `kinds` lists what is acceptable here."""
    if len(envelope.header) > MAX_HEADER_BYTES:
        raise BadMessage("the header is too long.")
    try:
        header = json.loads(envelope.header, parse_constant=_refuse_json_constant)
    except (ValueError, RecursionError):
        raise BadMessage("the header is not JSON.") from None
    if not isinstance(header, dict):
        raise BadMessage("the header is not a table.")
    if (version := header.pop("v", None)) != MESSAGE_VERSION or isinstance(version, bool | float):
        raise OtherVersion(
            f"it is of another version than {MESSAGE_VERSION}; install the same version of Fulcrum at the coordinator "
            "and at every party."
        )
    kind = header.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise BadMessage("the message is of a kind that is not expected here.")
    wanted, optional = HEADER_SCHEMAS[kind], OPTIONAL_FIELDS.get(kind, {})
    if not set(wanted) <= set(header) <= set(wanted) | set(optional):
        raise BadMessage("the header has missing or unknown fields.")
    for name, sort in {**wanted, **optional}.items():
        if name in header and not _FIELD_CHECKS[sort](header[name]):
            raise BadMessage(f"the header's {name} is not of the right type or size.")
    return {"kind": kind, **header}


def _refuse_json_constant(text: str) -> float:
    raise ValueError(text)


# --- arrays -------------------------------------------------------------------------------------


def compute_max_body_bytes(wanted: ArraySpec) -> int:
    """The most bytes that a body with these arrays has."""
    return BODY_OVERHEAD_BYTES + sum(math.prod(shape) * dtype.itemsize for dtype, shape in wanted.values())


def read_message_arrays(envelope: Envelope, wanted: ArraySpec) -> dict[str, Tensor]:
    """The body's arrays: exactly the wanted names, types and shapes, every number finite."""
    if len(envelope.body) > compute_max_body_bytes(wanted):
        raise BadMessage("the body is larger than its arrays can be.")
    try:
        found = decode_arrays(envelope.body, wanted)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError):
        raise BadMessage("the body is not a readable set of arrays.") from None
    if set(found) != set(wanted):
        raise BadMessage("the body has missing or unknown arrays.")
    for name, (dtype, shape) in wanted.items():
        array = found[name]
        if array.dtype != dtype or tuple(array.shape) != shape:
            raise BadMessage(f"the array {name} is not of the right type or shape.")
        if array.is_floating_point() and not bool(torch.isfinite(array).all()):
            raise BadMessage(f"the array {name} holds numbers that are not finite.")
    return found


def make_state_spec(state: RuleState) -> ArraySpec:
    """The arrays of these entries of a clipping state, under their names in a message."""
    return {f"state.{name}": (value.dtype, tuple(value.shape)) for name, value in state.items()}


def state_to_arrays(state: RuleState) -> dict[str, Tensor]:
    """Entries of a clipping state under their names in a message."""
    return {f"state.{name}": value for name, value in state.items()}


def state_from_arrays(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a clipping state among received arrays."""
    return {name.removeprefix("state."): value for name, value in arrays.items() if name.startswith("state.")}


# --- simulations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulatedStreams:
    """Where a simulation's private randomness comes from: a seed that all share, and the id of the run's streams."""

    seed: int
    stream: str


_SIMULATION_FIELDS = {"seed": WHOLE_FIELD, "stream": ID_FIELD}


def simulation_to_table(streams: SimulatedStreams | None) -> dict[str, Any]:
    """For a header; an empty table outside of simulations, where every party draws its own randomness."""
    return {} if streams is None else dataclasses.asdict(streams)


def simulation_from_table(table: Mapping[str, Any]) -> SimulatedStreams | None:
    """The streams in a header; None for an empty table."""
    if not table:
        return None
    if set(table) != set(_SIMULATION_FIELDS):
        raise BadMessage("the simulation has missing or unknown fields.")
    if not all(_FIELD_CHECKS[sort](table[name]) for name, sort in _SIMULATION_FIELDS.items()):
        raise BadMessage("the simulation's seed or stream is not of the right type or size.")
    return SimulatedStreams(**table)


# --- assignments --------------------------------------------------------------------------------

_PYTHON_FIELD_KINDS: dict[Any, str] = {str: TEXT_FIELD, int: WHOLE_FIELD, float: NUMBER_FIELD, bool: FLAG_FIELD}


UNSENT_FIELDS = ("message",)
"""Fields of an `Assignment` that no request carries: a party makes them itself, from a manifest (`pairwise`)."""


def make_assignment_schema() -> Mapping[str, str]:
    """Name and type of every field of an `Assignment` that travels: those of the dataclass, and no others."""
    return _make_schema(Assignment)


@cache
def _make_schema(kind: type[Assignment]) -> Mapping[str, str]:
    hints = get_type_hints(kind)
    return MappingProxyType(
        {
            field.name: _PYTHON_FIELD_KINDS[hints[field.name]]
            for field in dataclasses.fields(kind)
            if field.name not in UNSENT_FIELDS
        }
    )


def assignment_to_table(task: Assignment) -> dict[str, Any]:
    """A whole assignment as plain values for a header."""
    return {name: value for name, value in dataclasses.asdict(task).items() if name not in UNSENT_FIELDS}


def assignment_from_table(table: Mapping[str, Any]) -> Assignment:
    """The assignment in a header: every field is there and of its type, and there are no others."""
    schema = make_assignment_schema()
    if set(table) != set(schema):
        raise BadMessage("the assignment has missing or unknown fields.")
    for name, kind in schema.items():
        if not _FIELD_CHECKS[kind](table[name]):
            raise BadMessage(f"the assignment's {name} is not of the right type or size.")
    values: dict[str, Any] = {
        name: float(table[name]) if kind == NUMBER_FIELD else table[name] for name, kind in schema.items()
    }
    return Assignment(**values)


# --- fingerprints and events ---------------------------------------------------------------------


def compute_model_fingerprint(model: nn.Module, layout: ParameterLayout) -> str:
    """16 hexadecimal digits that change when any parameter's name, shape or place does, or any buffer at all."""
    words: list[Any] = [[name, list(shape)] for name, shape in zip(layout.names, layout.shapes, strict=True)]
    held = compute_buffer_digest(model)
    words += [held] if held else []
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def write_shape(shape: Any) -> list[Any]:
    """The shape of one record's input for a header; [name, shape] of each where a record has several inputs."""
    if isinstance(shape, Mapping):
        return [[name, list(sides)] for name, sides in sorted(shape.items())]
    return list(shape)


def events_to_rows(events: Sequence[Event]) -> list[list[Any]]:
    """Events as JSON lists for a header; an unprotected release cannot be sent."""
    if any(isinstance(event, Unprotected) for event in events):
        raise BadMessage("an update without noise cannot be sent.")
    return events_to_json(events)


def events_from_rows(rows: list[Any]) -> tuple[Event, ...]:
    """The events in a header; BadMessage, in fixed words, for anything but events that happened at least once."""
    try:
        events = events_from_json(rows)
    except InputError:  # its text quotes what was received
        raise BadMessage("the events are not readable.") from None
    if not all(event.count >= 1 for event in events):
        raise BadMessage("the events are not readable.")
    return events


def events_agree(released: Sequence[Event], planned: Sequence[Event]) -> bool:
    """Whether the same events happened equally often, in whatever order and however they are counted together."""
    return _merge_event_counts(released) == _merge_event_counts(planned)


def _merge_event_counts(events: Sequence[Event]) -> Counter[Event]:
    counts: Counter[Event] = Counter()
    for event in events:
        counts[event.with_count(1)] += event.count
    return counts
