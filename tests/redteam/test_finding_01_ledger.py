"""Finding 1, at the ledger: a private seed that a kept ledger has seen is refused, whatever else differs.

At 243f1c8 a ledger knew nothing of seeds: two runs with one seed and another C shared their noise, and it charged both
as if they were independent. Streams are keyed by the run now; the refusal is the second lock on the same door.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fulcrum.errors import ConfigError
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import Ledger, RunPlan, RunRecord, make_seed_digest

TERMS = {"delta": 1e-5, "accountant": "rdp", "unit": "example", "population": "digits"}


def record_of(ledger: Ledger, run: str, seed: int | None, **changes: object) -> RunRecord:
    digest = make_seed_digest(seed, ledger.identity)
    randomness = "secure" if seed is None else "seeded"
    made = RunRecord(
        run, "moo", True, True, randomness, "fast", "plain", "example", digest, "data", "settings", seed is not None
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def begin(ledger: Ledger, run: str) -> None:
    """A first release: it is what uses up a seed."""
    ledger.enroll("a", None, **TERMS)  # type: ignore[arg-type]
    ledger.reserve(run, 0, {"a": [Gaussian(0.1, 1.0)]})


def test_a_seed_that_another_run_had_is_refused_whatever_else_differs(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger") as ledger:
        first = record_of(ledger, "first", 7)
        ledger.register_run(first)
        begin(ledger, "first")
        ledger.register_run(first)  # to resume
        for changes in ({}, {"rule": "fixed"}, {"data_digest": "other"}, {"settings_digest": "other"}):
            with pytest.raises(ConfigError, match=r"private seed of this run was used by run first .* --private-seed"):
                ledger.register_run(record_of(ledger, "second", 7, **changes))
        ledger.register_run(record_of(ledger, "third", 8))  # the check is about the seed
        assert list(ledger.runs()) == ["first", "third"]
    with Ledger.open(tmp_path / "ledger") as again, pytest.raises(ConfigError, match="used by run first"):
        again.register_run(record_of(again, "second", 7))
    with Ledger.open(tmp_path / "other") as other:  # a digest says nothing to another ledger
        assert make_seed_digest(7, other.identity) != first.seed_digest
        other.register_run(record_of(other, "second", 7))


def test_secure_runs_have_no_seed_to_compare(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger") as ledger:
        for run in ("first", "second"):
            ledger.register_run(record_of(ledger, run, None))
        assert {record.seed_digest for record in ledger.runs().values()} == {""}


def test_a_run_is_what_it_was_registered_as(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger") as ledger:
        first = record_of(ledger, "first", 7)
        ledger.register_run(first)
        for name, value in (("randomness", "secure"), ("sound", False), ("rule", "none"), ("arithmetic", "proven")):
            with pytest.raises(ConfigError, match=f"run first is in the ledger with {name} = "):
                ledger.register_run(dataclasses.replace(first, **{name: value}))  # type: ignore[arg-type]
        assert ledger.runs()["first"] == first


def test_a_refused_run_registers_nothing(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger") as ledger:
        ledger.register_run(record_of(ledger, "first", 7))
        begin(ledger, "first")
        before = ledger.head()
        with pytest.raises(ConfigError, match="private seed"):
            ledger.register_run(record_of(ledger, "second", 7), {"a": RunPlan((Gaussian(0.1, 1.0),), 1e-5)})
        assert ledger.head() == before


def test_runs_that_nobody_registered_are_unknown_and_taken_for_the_worst(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger") as ledger:
        ledger.enroll("a", None, **TERMS)  # type: ignore[arg-type]
        ledger.reserve("old", 0, {"a": [Gaussian(0.1, 1.0)]})
        unknown = ledger.runs()["old"]
        assert not unknown.is_known
        assert (unknown.sound, unknown.private, unknown.randomness) == (False, False, "unknown")


def test_a_run_that_never_began_has_used_up_no_seed_and_two_cannot_both_begin(tmp_path: Path) -> None:
    """Someone whose first attempt was refused for its budget starts again with the same seed."""
    with Ledger.open(tmp_path / "ledger") as ledger, Ledger.open(tmp_path / "ledger") as other:
        for opened, run in ((ledger, "first"), (other, "second")):
            opened.register_run(record_of(opened, run, 7))
        begin(other, "second")
        begin(other, "second")
        before = ledger.head()
        with pytest.raises(ConfigError, match="was used by run second"):
            ledger.reserve("first", 0, {"a": [Gaussian(0.1, 1.0)]})
        assert ledger.head() == before
