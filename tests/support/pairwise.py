"""Federations with masked sums on a bus, for tests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fulcrum.flower import keys
from fulcrum.flower.messages import Envelope
from fulcrum.flower.signing import fingerprint
from fulcrum.flower.terms import PartyTerms
from fulcrum.privacy.pairwise.integers import keep_low_bits, sum_messages
from fulcrum.settings.schema import Settings
from support.flower import NAMES, Bus, toy_federation, toy_settings, toy_terms


def masked_settings(rounds: int = 3, colluders: float = 1.0, **train: Any) -> Settings:
    settings = toy_settings(rounds, **train)
    return settings.replace(privacy={"aggregation": "pairwise", "colluders": colluders})


def pins(folder: Path, party: str, left_out: tuple[str, ...] = ()) -> dict[str, str]:
    found = {}
    for name in NAMES:
        if not (folder / "keys" / name).exists():
            keys.make_key_pair(folder / "keys", name)
        if name not in (party, *left_out):
            found[name] = fingerprint(keys.load_public_key(folder / "keys" / f"{name}.pub"))
    return found


@contextlib.contextmanager
def federation(folder: Path, settings: Settings, left_out: tuple[str, ...] = (), **changes: Any) -> Iterator[Bus]:
    """Three parties that have pinned each other, but for `left_out`."""

    def terms(name: str) -> PartyTerms:
        own = {"peers": pins(folder, name, left_out), "pinned": "2026-11-16", **changes.get("terms", {})}
        return toy_terms(settings, name, **own)

    with toy_federation(folder, settings, changes.get("simulation", True), terms) as bus:
        yield bus


def kind(envelope: Envelope) -> str:
    return str(json.loads(envelope.header)["kind"])


def size(messages: list[torch.Tensor]) -> float:
    """The largest absolute value of a sum of messages, below 2^21 where all masks cancel: the most that it can be.

    Masks come from the operating system's entropy. Where they do not cancel, the 21 numbers are uniform on 24 bits, and
    all of them are below 2^21 once in 4^21 = 4e12 times. (Their mean would be, once in 5e4.)
    """
    return float(keep_low_bits(sum_messages(messages), 24).double().abs().max())
