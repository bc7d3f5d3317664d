"""Masked sums across machines without a network: honest parties, and a server that tries to cheat them.

The server's whole view is the transcript: keys, nonces and messages. Each test says what it tries and what it is left
with.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import secrets
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra fulcrum[flower]")

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from fulcrum.errors import RunError
from fulcrum.flower.messages import BadMessage
from fulcrum.flower.pairwise.keys import KEY_PURPOSE, RunKey, SignedKey, _make_statement, signed_key_from_table
from fulcrum.flower.pairwise.manifest import (
    Manifest,
    ManifestRefusal,
    OwnPart,
    Participant,
    check_manifest,
    compute_tau,
    find_noise_parties,
    make_manifest,
    manifest_from_bytes,
    mask_message,
)
from fulcrum.flower.signing import sign_statement
from fulcrum.privacy.pairwise.integers import round_to_message, sum_messages
from fulcrum.rng import SeededRandomness

RUN, MODEL, M = "run-1", "digest of the weights", 400
SIGNING = {name: ec.generate_private_key(ec.SECP384R1()) for name in ("ann", "bob", "cat", "dan", "eve", "mal")}
PINS = {name: RunKey("", name, key).signed.fingerprint for name, key in SIGNING.items()}
SEEDS = {name: seed for seed, name in enumerate(SIGNING)}
HONEST = ("ann", "bob", "cat", "dan")


class Party:
    """An honest party: it keeps one pending nonce, and drops it when it has masked."""

    def __init__(self, name: str, peers: dict[str, str] | None = None, least: int = 1) -> None:
        self.name, self.least = name, least
        self.peers = {n: p for n, p in PINS.items() if n != name} if peers is None else peers
        self.key = RunKey(RUN, name, SIGNING[name])
        self.pending: Participant | None = None
        self.tries = 0
        self.sum = torch.linspace(-1, 1, M, dtype=torch.float64) * (1 + len(name))

    def ready(self) -> Participant:
        self.tries += 1
        weight, sigma, C = 0.05, 1.2, 1.0
        key = self.key.signed
        nonce, tau = secrets.token_hex(16), compute_tau(weight, C, sigma)
        self.pending = Participant(self.name, key.fingerprint, key.exchange, nonce, weight, 0.1, sigma, C, 50, tau)
        return self.pending

    def integers(self, manifest: Manifest) -> Tensor:
        terms, part = find_noise_parties(manifest, self.name)
        scale = 1.2 / part**0.5
        return round_to_message(self.sum, scale, terms, (SeededRandomness(SEEDS[self.name]), (0, 0, 0, self.tries)))

    def send(self, manifest: Manifest, keys: dict[str, SignedKey], round: int = 3) -> Tensor:
        if self.pending is None:
            raise ManifestRefusal("stale", "no nonce is pending.")
        check_manifest(manifest, OwnPart(RUN, round, MODEL, self.pending, self.least, self.peers), keys)
        self.pending = None
        return mask_message(manifest, self.key, self.integers(manifest))


def gather(parties: list[Party], attempt: int = 0, c: int = 1) -> tuple[Manifest, dict[str, SignedKey]]:
    lines = [party.ready() for party in parties]
    keys = {party.name: party.key.signed for party in parties}
    return make_manifest(RUN, 3, attempt, c, MODEL, lines), keys


def is_noise(values: Tensor) -> bool:
    """Whether integers look uniform on 32 bits: 2^30 from 0 on average, where a sum of integers is far less."""
    return float(values.double().abs().mean()) > 2**29


def make(names: tuple[str, ...] = HONEST) -> list[Party]:
    return [Party(name) for name in names]


# --- the honest case --------------------------------------------------------------------------------


def test_the_sum_of_all_messages_is_the_sum_of_the_integers_and_no_part_of_it_is() -> None:
    parties = make()
    manifest, keys = gather(parties)
    assert manifest_from_bytes(manifest.to_bytes()) == manifest
    messages = {party.name: party.send(manifest, keys) for party in parties}
    plain = {party.name: party.integers(manifest) for party in parties}
    assert torch.equal(sum_messages(messages.values()), sum_messages(plain.values()))
    for left_out in HONEST:
        some = [message for name, message in messages.items() if name != left_out]
        assert is_noise(sum_messages(some))
    assert all(is_noise(message) for message in messages.values())


def test_a_forgotten_key_makes_no_masks() -> None:
    party, other = make(("ann", "bob"))
    exchange = other.key.signed.exchange
    known = party.key.derive_mask_key(exchange, b"digest")  # the pair's secret is kept for the run, and no longer
    assert party.key.derive_mask_key(exchange, b"digest") == known != party.key.derive_mask_key(exchange, b"other")
    party.key.forget()
    assert not party.key._secrets
    with pytest.raises(RunError, match="forgotten"):
        party.key.derive_mask_key(exchange, b"digest")


# --- a malicious server -----------------------------------------------------------------------------


def test_swapped_keys_are_noticed() -> None:
    """The server puts its own X25519 key in a party's place, to know the masks."""
    parties = make()
    manifest, keys = gather(parties)
    own = RunKey(RUN, "bob", SIGNING["mal"])
    for stolen in (
        dataclasses.replace(keys["bob"], exchange=own.signed.exchange),  # bob's signature, another key
        own.signed,  # signed by the server's key, which is not bob's pin
        RunKey("run-0", "bob", SIGNING["bob"]).signed,  # bob's key of another run
        dataclasses.replace(RunKey(RUN, "cat", SIGNING["cat"]).signed, party="bob"),  # cat's, said to be bob's
    ):
        lines = [
            dataclasses.replace(each, exchange=stolen.exchange, fingerprint=stolen.fingerprint)
            if each.party == "bob"
            else each
            for each in manifest.participants
        ]
        fake = make_manifest(RUN, 3, 0, 1, MODEL, lines)
        with pytest.raises(ManifestRefusal) as refused:
            parties[0].send(fake, {**keys, "bob": stolen})
        assert refused.value.code in ("peers", "manifest")
    assert parties[0].send(manifest, keys) is not None


def test_unpinned_peers_count_as_colluders() -> None:
    """The server invents parties, so that an honest one stands alone among them."""
    ann = Party("ann", peers={"bob": PINS["bob"]})
    for others, c, fine in (
        (("bob", "eve"), 1, True),  # one unknown, one covered
        (("bob", "eve", "mal"), 1, False),
        (("bob", "eve", "mal"), 2, True),
        (("eve",), 1, True),  # alone with one colluder: its own noise is whole
    ):
        parties = [ann, *make(others)]
        manifest, keys = gather(parties, c=c)
        if fine:
            ann.send(manifest, keys)
            continue
        with pytest.raises(ManifestRefusal, match="not pinned") as refused:
            ann.send(manifest, keys)
        assert refused.value.code == "peers"
    manifest, keys = gather([ann, *make(("eve",))], c=1)
    assert find_noise_parties(manifest, "ann")[1] == pytest.approx(1.0)


def sign_exchange(name: str, exchange: str) -> SignedKey:
    """A key of the run that a colluder signs for itself: it may sign anything."""
    signature = sign_statement(SIGNING[name], KEY_PURPOSE, _make_statement(RUN, name, exchange))
    own = RunKey(RUN, name, SIGNING[name]).signed
    return dataclasses.replace(own, exchange=exchange, signature=base64.b64encode(signature).decode())


def spell_with_capitals(exchange: str) -> str:
    return next(exchange.replace(x, x.upper()) for x in "abcdef" if x in exchange)  # none in one key of 1e13


@pytest.mark.parametrize("spell", [spell_with_capitals, lambda text: f"{text[:2]} {text[2:]}", lambda text: text])
def test_a_colluder_that_takes_a_partys_key_for_its_own_unmasks_nobody(spell: Callable[[str], str]) -> None:
    """ann colludes and names cat's X25519 key as hers, in another spelling. bob then has one mask with both: he would
    take it off for ann, who stands before him, and add it for cat, who stands after him. Nothing would be left of it.
    """
    bob, cat = make(("bob", "cat"))
    stolen = sign_exchange("ann", spell(cat.key.signed.exchange))
    line = dataclasses.replace(
        bob.ready(), party="ann", fingerprint=stolen.fingerprint, exchange=stolen.exchange, nonce=secrets.token_hex(16)
    )
    assert bob.pending is not None
    manifest = make_manifest(RUN, 3, 0, 1, MODEL, [line, bob.pending, cat.ready()])
    keys = {"ann": stolen, "bob": bob.key.signed, "cat": cat.key.signed}
    with pytest.raises(ManifestRefusal, match=r"one form|same exchange"):
        bob.send(manifest, keys)
    assert torch.equal(mask_message(manifest, bob.key, bob.integers(manifest)), bob.integers(manifest))  # bare
    if stolen.exchange != cat.key.signed.exchange:
        with pytest.raises(BadMessage, match="small letters"):  # no such key is taken from a message either
            signed_key_from_table(dataclasses.asdict(stolen))


def test_keys_that_make_the_same_secret_make_other_masks() -> None:
    """X25519 ignores the last bit of a key, so two keys can have one secret. The keys themselves are in the masks'."""
    bob, cat = make(("bob", "cat"))
    raw = bytearray.fromhex(cat.key.signed.exchange)
    raw[-1] |= 0x80
    masks = {bob.key.derive_mask_key(each, b"digest") for each in (cat.key.signed.exchange, raw.hex())}
    assert len(set(bob.key._secrets.values())) == 1
    assert len(masks) == 2


def test_fewer_colluders_than_a_party_wants_covered_are_refused() -> None:
    careful = Party("ann", least=2)
    manifest, keys = gather([careful, *make(HONEST[1:])], c=1)
    with pytest.raises(ManifestRefusal) as refused:
        careful.send(manifest, keys)
    assert refused.value.code == "colluders"


def test_a_replayed_manifest_is_refused() -> None:
    """The server sends a manifest again, to get two messages under the same masks."""
    parties = make()
    manifest, keys = gather(parties)
    first = parties[0].send(manifest, keys)
    with pytest.raises(ManifestRefusal) as refused:
        parties[0].send(manifest, keys)
    assert refused.value.code == "stale"
    parties[0].ready()  # asked again: another nonce is pending now
    with pytest.raises(ManifestRefusal, match="nonce") as refused:
        parties[0].send(manifest, keys)
    assert refused.value.code == "stale"
    # A party that took the stale manifest would be undone: two messages under the same masks differ by integers.
    parties[0].pending = manifest.participants[0]
    second = parties[0].send(manifest, keys)
    assert not is_noise(sum_messages([second, -first]))


def test_a_round_that_is_rolled_back_has_other_masks() -> None:
    """The server goes back to before a round and plays it again with the same parties."""
    parties = make()
    before, keys = gather(parties)
    first = [party.send(before, keys) for party in parties]
    after, keys = gather(parties, attempt=0)  # the server says it is the same attempt
    second = [party.send(after, keys) for party in parties]
    assert before.digest != after.digest
    for one, other in zip(first, second, strict=True):
        assert is_noise(sum_messages([one, -other]))
    mixed = [second[0], *first[1:]]  # nothing cancels across the two
    assert is_noise(sum_messages(mixed))


def test_two_views_do_not_cancel() -> None:
    """The server shows half of the parties another manifest: fewer participants, or another weight of its own line."""
    parties = make()
    manifest, keys = gather(parties)
    lines = [
        dataclasses.replace(each, weight=each.weight * 2, tau=each.tau * 2) if each.party == "dan" else each
        for each in manifest.participants
    ]
    other = make_manifest(RUN, 3, 0, 1, MODEL, lines)
    views = [manifest, manifest, other, manifest]
    messages = [party.send(view, keys) for party, view in zip(parties, views, strict=True)]
    assert is_noise(sum_messages(messages))
    assert is_noise(sum_messages([messages[0], messages[2]]))


def test_lying_about_who_is_missing_gains_nothing() -> None:
    """The server has all messages, says that one is missing, and gets a second set without that party."""
    parties = make()
    manifest, keys = gather(parties)
    first = {party.name: party.send(manifest, keys) for party in parties}
    again, keys = gather(parties[:3], attempt=1)
    second = {party.name: party.send(again, keys) for party in parties[:3]}
    plain = sum_messages([party.integers(again) for party in parties[:3]])
    assert torch.equal(sum_messages(second.values()), plain)  # the sum of three: paid for, with its own noise
    for name in second:
        assert is_noise(sum_messages([first[name], -second[name]]))  # no single party by difference
    # What is left of dan by taking one sum off the other carries the noise of both: more than either claims.
    totals = [sum_messages(each.values()).double() * view.grid for each, view in ((first, manifest), (second, again))]
    left = totals[0] - totals[1] - 0.05 * parties[3].sum
    need = manifest.participants[3].tau
    assert float(left.std()) == pytest.approx(need * (4 / 3 + 3 / 2) ** 0.5, rel=0.15)
    assert float(left.std()) > need


def test_what_is_wrong_with_a_manifest_is_refused() -> None:
    parties = make()
    manifest, keys = gather(parties)
    ann = parties[0]

    def changed(who: str, **values: Any) -> Manifest:
        lines = [dataclasses.replace(p, **values) if p.party == who else p for p in manifest.participants]
        return dataclasses.replace(manifest, participants=tuple(lines))

    wrong = {
        "grid": dataclasses.replace(manifest, grid=manifest.grid * 2),
        "other weights": dataclasses.replace(manifest, model="another"),
        "own line": changed("ann", sigma=0.6, tau=compute_tau(0.05, 1.0, 0.6)),
        "tau": changed("bob", tau=manifest.participants[1].tau / 2),
        "order": dataclasses.replace(manifest, participants=manifest.participants[::-1]),
        "twice": dataclasses.replace(manifest, participants=(*manifest.participants, manifest.participants[-1])),
        "not named": dataclasses.replace(manifest, participants=manifest.participants[1:]),
        "same nonce": changed("bob", nonce=manifest.participants[0].nonce),
        "all collude": dataclasses.replace(manifest, colluders=4),
        "round": dataclasses.replace(manifest, round=4),
        "run": dataclasses.replace(manifest, run="run-2"),
    }
    for what, fake in wrong.items():
        with pytest.raises(ManifestRefusal):
            ann.send(fake, keys)
        assert ann.pending is not None, what
    with pytest.raises(ManifestRefusal):
        ann.send(manifest, {name: key for name, key in keys.items() if name != "bob"})
    ann.send(manifest, keys)


def test_messages_that_are_no_manifest_or_key_are_refused() -> None:
    manifest, keys = gather(make())
    table = json.loads(manifest.to_bytes())
    for content in (
        b"",
        b"[]",
        json.dumps(table).encode(),  # the same values in another form have another digest
        json.dumps({**table, "more": 1}, sort_keys=True, separators=(",", ":")).encode(),
        json.dumps({**table, "colluders": True}, sort_keys=True, separators=(",", ":")).encode(),
        json.dumps({**table, "grid": -1.0}, sort_keys=True, separators=(",", ":")).encode(),
        json.dumps({**table, "participants": []}, sort_keys=True, separators=(",", ":")).encode(),
    ):
        with pytest.raises(BadMessage):
            manifest_from_bytes(content)
    good = dataclasses.asdict(keys["ann"])
    assert signed_key_from_table(good) == keys["ann"]
    for bad in ({}, {**good, "exchange": "00"}, {**good, "signing": "x"}, {**good, "signature": 3}, {**good, "x": ""}):
        with pytest.raises(BadMessage):
            signed_key_from_table(bad)
    with pytest.raises(BadMessage, match="no secret"):
        make(("ann",))[0].key.derive_mask_key("00" * 32, b"digest")


def test_a_hundred_participants_with_few_masks_each() -> None:
    signing = SIGNING["ann"]
    lines, keys = [], []
    for k in range(100):
        key = RunKey(RUN, f"p{k:03}", signing)
        keys.append(key)
        lines.append(Participant(key.party, f"f{k}", key.signed.exchange, f"{k:032x}", 0.01, 0.1, 1.0, 1.0, 10, 0.01))
    manifest = make_manifest(RUN, 0, 0, 3, MODEL, lines)
    plain = [torch.full((64,), k, dtype=torch.int32) for k in range(100)]
    messages = [mask_message(manifest, key, own) for key, own in zip(keys, plain, strict=True)]
    assert torch.equal(sum_messages(messages), sum_messages(plain))
    assert is_noise(sum_messages(messages[:99]))


def test_a_changed_manifest_has_its_own_bytes_and_digest() -> None:
    """Bytes and digest are kept with a manifest: a copy with one field changed must not inherit them."""
    manifest, _ = gather(make())
    before = manifest.to_bytes(), manifest.digest
    changed = dataclasses.replace(manifest, attempt=manifest.attempt + 1)
    assert changed.to_bytes() != before[0]
    assert changed.digest != before[1]
    assert json.loads(before[0]) == json.loads(json.dumps(dataclasses.asdict(manifest)))
    assert manifest_from_bytes(before[0]) == manifest
