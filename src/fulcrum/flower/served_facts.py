"""What run.json keeps of a served run, checked before a coordinator goes on with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulcrum.errors import ConfigError, RunError
from fulcrum.flower.coordinator import WaitPolicy
from fulcrum.flower.registry import PartyInfo
from fulcrum.runs import folder as record

OPTION_KINDS: dict[str, tuple[type, ...]] = {
    "keys": (str,),
    "listen": (str,),
    "certificate": (str, type(None)),
    "private": (str, type(None)),
    "signing": (str, type(None)),
    "start": (str, type(None)),
    "insecure": (bool,),
    "simulation": (bool,),
}
"""The options of `fulcrum serve` that run.json keeps, and their types."""


def read_served_facts(folder: Path) -> dict[str, Any]:
    """The entries of run.json for `fulcrum serve --resume`; RunError where they are missing or damaged."""
    kept = record.load_run_json(folder, "run.json").get("flower")
    if kept is None:
        raise RunError(f"{folder} was not served to parties elsewhere; continue it with: fulcrum resume {folder}")
    if not (isinstance(kept, dict) and _is_right(kept)):
        raise RunError(f"{folder}/run.json was edited or damaged: its entries of the served run; restore it.")
    return kept


def _is_right(kept: Mapping[str, Any]) -> bool:
    try:
        parties = [PartyInfo(**party) for party in kept["parties"]]
        policy = WaitPolicy(**kept["wait_policy"])
        policy.stragglers  # noqa: B018  its own checks
        bytes.fromhex(kept["secret"])
    except (KeyError, TypeError, ValueError, ConfigError):
        return False
    numbers = all(isinstance(value, int | float) for value in dataclasses.asdict(policy).values())
    named = all(isinstance(party.name, str) and isinstance(party.units, int) for party in parties)
    options = all(isinstance(kept[name], kinds) for name, kinds in OPTION_KINDS.items() if name in kept)
    return bool(parties) and named and numbers and options and "simulation" in kept
