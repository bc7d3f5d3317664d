"""Pinning the other parties' signing keys in a party's terms."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fulcrum.errors import ConfigError
from fulcrum.flower import keys
from fulcrum.flower.signing import fingerprint
from fulcrum.flower.terms import PartyTerms, validate_terms
from fulcrum.runs.folder import current_utc_time


def pin_peers(terms: PartyTerms, folder: Path) -> PartyTerms:
    """The terms with the fingerprints of all NAME.pub of a folder but the party's own, and today's date.

    The files must come from the other parties themselves: a coordinator that hands them over could hand over its own.
    """
    if terms.aggregation != "pairwise":
        raise ConfigError("--peers pins keys for pairwise masks; set privacy.aggregation = pairwise, or leave it out.")
    files = {path.stem: path for path in sorted(folder.glob("*.pub")) if path.stem != terms.party}
    if not files:
        raise ConfigError(f"{folder} holds no NAME.pub of another party; put the files there that they gave you.")
    pins = {name: fingerprint(keys.load_public_key(path)) for name, path in files.items()}
    return validate_terms(dataclasses.replace(terms, peers=pins, pinned=current_utc_time()[:10]))
