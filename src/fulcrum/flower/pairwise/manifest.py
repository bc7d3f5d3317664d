"""The manifest of a round: everything that its participants must agree on, and a party's checks of it.

The keys of the masks follow from the manifest's digest, so two parties that were shown different manifests have
different masks, which do not cancel. A party takes part in a manifest only if it holds the nonce that the party drew
for it, and draws a new one each time: no manifest can make it mask twice with one stream.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from fulcrum.flower.messages import BadMessage
from fulcrum.flower.pairwise.keys import EXCHANGE_PATTERN, RunKey, SignedKey
from fulcrum.privacy.pairwise.graph import list_neighbours
from fulcrum.privacy.pairwise.integers import add_keystreams, choose_shared_grid
from fulcrum.privacy.pairwise.shares import compute_own_variances
from fulcrum.types import MessageTerms

NOISE_REACH = 40.0
"""Standard deviations that the noise of a coordinate is given room for."""
MAX_PARTICIPANTS = 10_000
NONCE_BYTES = 16
SMALLEST, LARGEST = 1e-30, 1e30
"""Numbers of a manifest are between these, so that their squares and sums are finite and above 0."""


class ManifestRefusal(BadMessage):
    """A party does not take part in a manifest. code: manifest, stale, peers or colluders."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


@dataclass(frozen=True)
class Participant:
    """One participant's line of a manifest; all of it is public.

    fingerprint: of its signing key. exchange: its X25519 key of the run. nonce: drawn by it for this manifest. weight:
    a_k, its sum's weight in the mean over its expected batch. rate: q_k. sigma: its noise multiplier. C: the norm of
    its clipping bounds. units: n_k. tau: weight * C * sigma, what its units need of noise in the sum.
    """

    party: str
    fingerprint: str
    exchange: str
    nonce: str
    weight: float
    rate: float
    sigma: float
    C: float
    units: int
    tau: float


@dataclass(frozen=True)
class Manifest:
    """What the participants of one attempt at a round agree on. participants: in the order of their names.

    colluders: c. grid: what one unit of the integers stands for. bits: how many low bits of each are sent. model:
    digest of the weights and of the clipping state at which all have computed.
    """

    run: str
    round: int
    attempt: int
    colluders: int
    grid: float
    bits: int
    model: str
    participants: tuple[Participant, ...]

    def to_bytes(self) -> bytes:
        """The one form in which a manifest travels and is digested."""
        return self._content

    @cached_property
    def _content(self) -> bytes:
        # Made once: a participant compares it, digests it and reads it, and so does the coordinator for each of them.
        table = {name: getattr(self, name) for name in _HEAD_TYPES}
        table["participants"] = [{name: getattr(each, name) for name in _LINE_TYPES} for each in self.participants]
        return json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of `to_bytes`."""
        return hashlib.sha256(self._content).digest()

    def place(self, party: str) -> int:
        """Where a party stands among the participants; ManifestRefusal where it is not one of them."""
        for place, each in enumerate(self.participants):
            if each.party == party:
                return place
        raise ManifestRefusal("manifest", "the manifest does not name this party.")


_LINE_TYPES: dict[str, type] = {
    **dict.fromkeys(("party", "fingerprint", "exchange", "nonce"), str),
    **dict.fromkeys(("weight", "rate", "sigma", "C", "tau"), float),
    "units": int,
}
_HEAD_TYPES: dict[str, type] = {
    **dict.fromkeys(("run", "model"), str),
    **dict.fromkeys(("round", "attempt", "colluders", "bits"), int),
    "grid": float,
    "participants": list,
}


def manifest_from_bytes(content: bytes) -> Manifest:
    """The manifest in a message: every field of its type and range, and in the form that `to_bytes` writes."""
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        raise BadMessage("the manifest is not JSON.") from None
    _check_fields(table, _HEAD_TYPES)
    if not 1 <= len(table["participants"]) <= MAX_PARTICIPANTS:
        raise BadMessage("the manifest has no participants, or too many.")
    for line in table["participants"]:
        _check_fields(line, _LINE_TYPES)
    found = Manifest(**{**table, "participants": tuple(Participant(**line) for line in table["participants"])})
    if found.to_bytes() != content:
        raise BadMessage("the manifest is not in its one form.")
    return found


def _is_exactly(value: Any, kind: type) -> bool:
    """Whether a value is of this type and no other: True is no number, and 1 is not 1.0."""
    return type(value) is kind


def _check_fields(table: Any, types: Mapping[str, type]) -> None:
    if not isinstance(table, dict) or set(table) != set(types):
        raise BadMessage("the manifest has missing or unknown fields.")
    for name, kind in types.items():
        value = table[name]
        if not _is_exactly(value, kind):
            raise BadMessage(f"the manifest's {name} is not of the right type.")
        if kind is int and not 0 <= value < 2**31:
            raise BadMessage(f"the manifest's {name} is out of range.")
        if kind is float and not (SMALLEST <= value <= LARGEST):
            raise BadMessage(f"the manifest's {name} is out of range.")
        if kind is str and len(value) > 256:
            raise BadMessage(f"the manifest's {name} is too long.")


# --- what follows from a manifest -------------------------------------------------------------------


def compute_tau(weight: float, C: float, sigma: float) -> float:
    """What a participant's units need of noise in the sum of messages."""
    return weight * C * sigma


def compute_scales(participants: Sequence[Participant], colluders: int) -> list[float]:
    """s_k of each participant: the standard deviation of its own noise, in the units of the sum."""
    return [math.sqrt(v) for v in compute_own_variances([each.tau**2 for each in participants], colluders)]


def compute_grid(participants: Sequence[Participant], colluders: int) -> tuple[float, int]:
    """The grid that follows from the participants' lines, and the number of bits that are sent."""
    scales = compute_scales(participants, colluders)
    largest = math.fsum(each.weight * each.C * each.units for each in participants)
    return choose_shared_grid(scales, largest + NOISE_REACH * math.hypot(*scales))


def make_manifest(
    run: str, round: int, attempt: int, colluders: int, model: str, participants: Sequence[Participant]
) -> Manifest:
    """The manifest of these participants, with the grid that follows from them."""
    ordered = tuple(sorted(participants, key=lambda each: each.party))
    return Manifest(run, round, attempt, colluders, *compute_grid(ordered, colluders), model, ordered)


def find_noise_parties(manifest: Manifest, party: str) -> tuple[MessageTerms, float]:
    """How a participant writes its message, and tau_k^2 / s_k^2: by how much less variance it adds itself."""
    place = manifest.place(party)
    own = manifest.participants[place]
    scale = compute_scales(manifest.participants, manifest.colluders)[place]
    return MessageTerms(own.weight, manifest.grid), (own.tau / scale) ** 2


# --- a party's checks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnPart:
    """What a party knows of its own part in a round, to compare with a manifest.

    line: its own line as it must be, its fresh nonce included. model: the digest of what it computed at. least: the
    fewest colluders that it wants covered. peers: fingerprints of the other parties' signing keys, pinned beforehand.
    """

    run: str
    round: int
    model: str
    line: Participant
    least: int
    peers: Mapping[str, str]


def check_manifest(manifest: Manifest, own: OwnPart, keys: Mapping[str, SignedKey]) -> int:
    """Refuse a manifest that this party must not mask for; returns how many of its peers are not pinned.

    keys: the X25519 keys of all participants, by party, as they were relayed.
    """
    if (manifest.run, manifest.round) != (own.run, own.round):
        raise ManifestRefusal("stale", "it is of another run or round.")
    names = [each.party for each in manifest.participants]
    if names != sorted(set(names)):
        raise ManifestRefusal("manifest", "participants are not in the order of their names, or named twice.")
    if not all(EXCHANGE_PATTERN.fullmatch(each.exchange) for each in manifest.participants):
        raise ManifestRefusal("manifest", "an X25519 key is not in its one form, so that two might be the same.")
    for field in ("fingerprint", "exchange", "nonce"):
        if max(Counter(getattr(each, field) for each in manifest.participants).values()) > 1:
            raise ManifestRefusal("manifest", f"two participants have the same {field}.")
    mine = manifest.participants[manifest.place(own.line.party)]
    if mine.nonce != own.line.nonce:
        raise ManifestRefusal("stale", "it does not hold the nonce that this party just drew.")
    if mine != own.line:
        raise ManifestRefusal("manifest", "this party's own line is not what it is.")
    if manifest.model != own.model:
        raise ManifestRefusal("manifest", "it is for other weights than those this party computed at.")
    if not own.least <= manifest.colluders < len(names):
        raise ManifestRefusal("colluders", f"it covers {manifest.colluders} colluders of {len(names)} participants.")
    for each in manifest.participants:
        if not math.isclose(each.tau, compute_tau(each.weight, each.C, each.sigma), rel_tol=1e-12):
            raise ManifestRefusal("manifest", "a participant's tau is not its weight times C times sigma.")
    unpinned = sum(_check_peer(each, own, keys) for each in manifest.participants if each is not mine)
    if unpinned > manifest.colluders:
        raise ManifestRefusal(
            "peers", f"{unpinned} participants are not pinned in the terms, and {manifest.colluders} are covered."
        )
    if (manifest.grid, manifest.bits) != compute_grid(manifest.participants, manifest.colluders):
        raise ManifestRefusal("manifest", "the grid is not the one that follows from the participants.")
    return unpinned


def _check_peer(each: Participant, own: OwnPart, keys: Mapping[str, SignedKey]) -> bool:
    """True where a peer is not pinned, so that it counts as a colluder; refuses a key that is not the peer's."""
    key = keys.get(each.party)
    if key is None or (key.party, key.exchange) != (each.party, each.exchange):
        raise ManifestRefusal("manifest", f"the key of {each.party} is missing or another one.")
    if key.fingerprint != each.fingerprint or not key.is_valid(own.run):
        raise ManifestRefusal("peers", f"the X25519 key of {each.party} is not signed with the key that it names.")
    pinned = own.peers.get(each.party)
    if pinned is not None and pinned != each.fingerprint:
        raise ManifestRefusal("peers", f"{each.party} has another signing key than the one pinned in the terms.")
    return pinned is None


# --- masks ------------------------------------------------------------------------------------------


def mask_message(manifest: Manifest, key: RunKey, integers: Tensor) -> Tensor:
    """The message int32 [m] of the party that holds `key`, from its integers before masks.

    Every mask's key is used for this one message: the manifest's digest is in it, and no digest comes twice.
    """
    place, digest = manifest.place(key.party), manifest.digest
    neighbours = list_neighbours(place, len(manifest.participants), manifest.colluders)
    lines = manifest.participants
    streams = ((place < other, key.derive_mask_key(lines[other].exchange, digest)) for other in neighbours)
    return add_keystreams(integers, streams)
