"""Others' releases: FILE.npz with the released vectors and the canaries, FILE.json with the claim (docs/audit.md).

FILE.npz, numbers only (nothing is unpickled):

    included     [m]           1 where the canary's coin says in, 0 where out
    releases     [T, d]        the released sums of T rounds, or [R, T, d] of R independent runs
    directions   [m, d]        what a canary adds to a sum when it is sampled, after clipping; norm at most C
      or coordinates [m] and values [m]: the same for directions with one entry each
    projections  [m, T]        in place of releases and directions: releases along each canary's direction, in units of
                               what it adds
    run          [m]           optional: the run of each canary, 0..R-1; default 0
    party        [m]           optional: the party of each canary; default 0
    sampled      [m, T]        optional: 1 where the canary was sampled, if that is known

FILE.json: {"format": "fulcrum-releases-1", "delta": 1e-5, "epsilon": 4.0, "rate": 0.1, "sigma": 1.2}, or in place of
rate and sigma "events": [["gaussian", rate, sigma, count], ...] in the order of the rounds. Optional: "parties", a list
of names; "steps", how many releases in turn were seen only as their sum, each with its part; "C".
"""

from __future__ import annotations

import dataclasses
import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fulcrum.analysis.audit.bounds import BoolVector, LowerBound, bound_by_thresholds, score_likelihood
from fulcrum.analysis.audit.curves import FloatVector
from fulcrum.analysis.audit.in_run import CanaryView, FamilyCache, make_entry
from fulcrum.analysis.audit.outcome import Audit, Measured, conclude
from fulcrum.engines.canary_files import RELEASE_ARRAYS, RELEASES_FORMAT
from fulcrum.errors import InputError
from fulcrum.privacy.accounting import compute_epsilon
from fulcrum.privacy.events import Gaussian, events_from_json

MAX_BYTES = 8 * 2**30
"""Bytes of all arrays of a file together, unpacked."""
MAX_CLAIM_BYTES = 2**20
MAX_PARTIES = 100_000
LARGEST = 1e50
"""Of a release along a canary's direction, in units of what the canary adds: squares must be numbers."""
LEAST_SIGMA = 1e-3
"""Less noise protects nobody, and the curves of a claim need some."""


@dataclass(frozen=True)
class Releases:
    """Others' releases, their canaries and the claim. projections [m, T]; run, party [m]; sampled [m, T] or None."""

    projections: FloatVector
    included: BoolVector
    run: npt.NDArray[np.int64]
    party: npt.NDArray[np.int64]
    sampled: FloatVector | None
    events: tuple[Gaussian, ...]
    epsilon: float
    delta: float
    parties: tuple[str, ...]
    steps: int = 1


def read_releases(path: Path | str) -> Releases:
    """Read FILE.npz and FILE.json beside it; InputError in one sentence where something does not fit."""
    path = Path(path)
    arrays = _read_arrays(path)
    claim = _read_claim(path.with_suffix(".json"))
    if "included" not in arrays:
        raise InputError(f"{path} has no array called included, the canaries' coins [m].")
    included = arrays["included"]
    if included.ndim != 1 or not np.isin(included, (0, 1)).all() or not len(included):
        raise InputError(f"{path}: included {included.shape} must be a vector of 0 and 1, one per canary.")
    m = len(included)
    run, party = (_read_numbers(arrays, name, m, path) for name in ("run", "party"))
    projections = arrays["projections"] if "projections" in arrays else _project(arrays, run, m, path)
    if projections.ndim != 2 or len(projections) != m or not projections.shape[1]:
        raise InputError(f"{path}: projections {projections.shape} must be [{m}, T], one row per canary.")
    if not np.isfinite(projections).all():
        raise InputError(f"{path}: a release is not a finite number.")
    if float(np.abs(projections).max()) > LARGEST:
        raise InputError(
            f"{path}: a release is more than {LARGEST:g} times what a canary adds; the directions must be what one "
            "adds to a sum."
        )
    sampled = arrays.get("sampled")
    if sampled is not None and (sampled.shape != projections.shape or not np.isin(sampled, (0, 1)).all()):
        raise InputError(f"{path}: sampled {sampled.shape} must be 0 and 1, {projections.shape} like the projections.")
    _check_lengths(arrays, claim, path)
    events, epsilon, delta = _parse_claim(claim, projections.shape[1], path.with_suffix(".json"))
    if int(party.max()) >= max(m, MAX_PARTIES):
        raise InputError(f"{path}: party {int(party.max())} is too large a number; parties are numbered from 0.")
    names = claim.get("parties") or [f"party-{k}" for k in range(int(party.max()) + 1)]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) <= party.max():
        raise InputError(
            f"{path.with_suffix('.json')}: parties must list a name for each of {party.max() + 1} parties."
        )
    return Releases(
        projections.astype(np.float64),
        included.astype(bool),
        run,
        party,
        None if sampled is None else sampled.astype(np.float64),
        events,
        epsilon,
        delta,
        tuple(names),
        _read_steps(claim, projections.shape[1], path.with_suffix(".json")),
    )


def _read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_BYTES:
            raise InputError(
                f"{path} holds {size / 2**30:.1f} GiB; an audit reads at most {MAX_BYTES / 2**30:.0f} GiB."
            )
        with np.load(path, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files if name in RELEASE_ARRAYS}
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path} is not there; name an .npz file of releases (docs/audit.md).") from None
    except Exception as error:  # a damaged or hostile archive can make NumPy and zipfile raise almost anything
        raise InputError(f"{path} is not a readable .npz file of numbers: {type(error).__name__}.") from error
    for name, values in found.items():
        if values.dtype.kind not in "buif":
            raise InputError(f"{path}: {name} must hold numbers, not {values.dtype}.")
    return found


def _read_numbers(arrays: dict[str, npt.NDArray[Any]], name: str, count: int, path: Path) -> npt.NDArray[np.int64]:
    values = arrays.get(name, np.zeros(count, dtype=np.int64))
    if values.shape != (count,) or values.dtype.kind not in "ui" or (count and int(values.min()) < 0):
        raise InputError(f"{path}: {name} {values.shape} must be whole numbers from 0, one per canary.")
    return values.astype(np.int64)


def _project(arrays: dict[str, npt.NDArray[Any]], run: npt.NDArray[np.int64], m: int, path: Path) -> FloatVector:
    """Releases along the directions, in units of what a canary adds: [m, T]."""
    if "releases" not in arrays:
        raise InputError(f"{path} has neither projections [m, T] nor releases [T, d]; it needs one of them.")
    releases = arrays["releases"]
    releases = releases[None] if releases.ndim == 2 else releases
    if releases.ndim != 3 or len(releases) <= run.max(initial=0):
        raise InputError(f"{path}: releases {releases.shape} must be [T, d], or [R, T, d] for {run.max() + 1} runs.")
    dim = releases.shape[2]
    if "directions" in arrays:
        directions = arrays["directions"].astype(np.float64)
        if directions.shape != (m, dim):
            raise InputError(f"{path}: directions {directions.shape} must be [{m}, {dim}].")
        squares = (directions**2).sum(axis=1)
        found = np.stack([releases[r].astype(np.float64) @ v for r, v in zip(run, directions, strict=True)])
    else:
        if "coordinates" not in arrays or "values" not in arrays:
            raise InputError(f"{path} has releases without directions [m, d], or coordinates [m] with values [m].")
        places, values = arrays["coordinates"], arrays["values"].astype(np.float64)
        if places.shape != (m,) or values.shape != (m,) or places.dtype.kind not in "ui":
            raise InputError(f"{path}: coordinates {places.shape} and values {values.shape} must be [{m}] each.")
        if int(places.max()) >= dim or int(places.min()) < 0:
            raise InputError(f"{path}: a coordinate is not one of 0 to {dim - 1}.")
        squares = values**2
        found = releases[run, :, places].astype(np.float64) * values[:, None]
    if not (np.isfinite(squares) & (squares > 0)).all():
        raise InputError(f"{path}: a canary's direction has no length; it must be what the canary adds to a sum.")
    projected: FloatVector = found / squares[:, None]
    return projected


def _check_lengths(arrays: dict[str, npt.NDArray[Any]], claim: dict[str, Any], path: Path) -> None:
    """Refuse canaries that are longer than the claim's C: the claim says nothing about them."""
    if "C" not in claim:
        return
    C = _read_number(claim, "C", path.with_suffix(".json"), 0, math.inf)
    if "directions" in arrays:
        longest = float(np.linalg.norm(arrays["directions"].astype(np.float64), axis=1).max())
    else:
        longest = float(np.abs(arrays.get("values", np.zeros(1)).astype(np.float64)).max())
    if longest > C * (1 + 1e-3):
        raise InputError(f"{path}: a canary adds {longest:.4g}, more than C = {C:g} of the claim allows.")


def _read_claim(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CLAIM_BYTES:
            raise InputError(f"{path} is longer than {MAX_CLAIM_BYTES} bytes; it must be a short JSON object.")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InputError(f"{path} is not there; the claim stands beside the .npz file (docs/audit.md).") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {type(error).__name__}.") from error
    if not isinstance(found, dict) or found.get("format") != RELEASES_FORMAT:
        raise InputError(f'{path} must be a JSON object with "format": "{RELEASES_FORMAT}".')
    return found


def _parse_claim(claim: dict[str, Any], rounds: int, path: Path) -> tuple[tuple[Gaussian, ...], float, float]:
    """The events of T releases in order, epsilon and delta."""
    delta = _read_number(claim, "delta", path, 0, 1)
    if "events" in claim:
        listed = events_from_json(claim["events"])
        if not all(isinstance(event, Gaussian) for event in listed):
            raise InputError(f'{path}: events must be Gaussian releases, ["gaussian", rate, sigma, count].')
        events = tuple(
            e.with_count(1) for e in listed if isinstance(e, Gaussian) for _ in range(min(e.count, rounds + 1))
        )
    else:
        rate, sigma = _read_number(claim, "rate", path, 0, 1, closed=True), _read_number(claim, "sigma", path, 0, 1e6)
        events = (Gaussian(rate, sigma),) * rounds
    if any(event.sigma < LEAST_SIGMA for event in events):
        raise InputError(f"{path}: sigma = {min(e.sigma for e in events):g} must be at least {LEAST_SIGMA:g}.")
    if len(events) != rounds:
        raise InputError(f"{path} claims {len(events)} releases, and the .npz file holds {rounds}.")
    if "epsilon" in claim:
        return events, _read_number(claim, "epsilon", path, 0, math.inf), delta
    return events, compute_epsilon(events, delta, "pld"), delta


def _read_steps(claim: dict[str, Any], rounds: int, path: Path) -> int:
    steps = claim.get("steps", 1)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1 or rounds % steps:
        raise InputError(f"{path}: steps = {steps!r} must be a whole number that divides the {rounds} releases.")
    return steps


def _read_number(claim: dict[str, Any], name: str, path: Path, low: float, high: float, closed: bool = False) -> float:
    value = claim.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{path}: {name} = {value!r} must be a number.")
    if not (low < value < high or (closed and value == high)):
        raise InputError(
            f"{path}: {name} = {value!r} must be above {low:g} and {'at most' if closed else 'below'} {high:g}."
        )
    return float(value)


# --- the audit ------------------------------------------------------------------------------------


def audit_releases(releases: Releases, confidence: float = 0.95) -> Audit:
    """Bounds of every party of the file; Clopper-Pearson too where each run has one canary of the party."""
    families = FamilyCache()
    entries = []
    for k in np.unique(releases.party):
        entries.append(_make_entry(releases, releases.party == k, releases.parties[int(k)], families))
    notes = ["a bound far below the claim says nothing; a bound above it is a contradiction"]
    if releases.sampled is None:
        notes.append("in which releases a canary was sampled is not known, so known-samples is left out")
    parties = conclude(entries, confidence)
    facts = {"canaries": len(releases.included), "runs": len(np.unique(releases.run)), "releases": len(releases.events)}
    view = "white-box: the released vectors of the file, along the canaries' directions"
    return Audit(view, "releases", releases.delta, confidence, tuple(parties), notes=tuple(notes), facts=facts)


def _make_entry(releases: Releases, chosen: BoolVector, name: str, families: FamilyCache) -> Measured:
    # A file may list all canaries that are in before the others, or in turn. Equal scores are ordered by place and
    # halves are taken by place, so places must know nothing of the coins: they are mixed, by a seed of their own.
    mine = np.random.default_rng(20251).permutation(np.flatnonzero(chosen))
    projections, included = releases.projections[mine], releases.included[mine]
    sampled = None if releases.sampled is None else releases.sampled[mine]
    view = CanaryView(projections, sampled, included, releases.events, releases.steps)
    entry = make_entry(name, releases.epsilon, view, releases.delta, families)
    own_run = len(np.unique(releases.run[mine])) == len(mine) > 1

    def bound(confidence: float) -> tuple[LowerBound, ...]:
        found = entry.bound(confidence)
        if not own_run:
            return found
        scores = score_likelihood(projections, releases.events)
        return (*found, bound_by_thresholds(scores, included, releases.delta, confidence))

    return dataclasses.replace(entry, bound=bound)
