"""The suite finds bugs that were written without regard to it: those of `support/further_bugs.py`."""

from __future__ import annotations

import pytest

from fulcrum.analysis.detectors.planted import BASE, PLANTED
from fulcrum.analysis.detectors.suite import run_suite
from support.further_bugs import FURTHER

FOUND_BY = {
    "ledger replay": {
        "ledger merges rounds",
        "another delta in the accountant",
        "half the rate in the ledger",
        "ledger rounds epsilon down",
        "cheap PLD",
    },
    "statement check": {"unit of another run", "epsilon of the cheapest party", "diagnostics told"},
}
"""Bugs of which this detector must be among those that find them; "neighbour replay" finds all others."""
QUICK = ("third party repeats the second's noise", "weights from data", "cheap PLD")


def check_found(name: str) -> None:
    bug = FURTHER[name]
    with bug.planted():
        report = run_suite(bug.settings)
    wanted = [detector for detector, names in FOUND_BY.items() if name in names] or ["neighbour replay"]
    assert set(wanted) <= set(report.detectors), (name, report.detectors)


@pytest.mark.parametrize("name", QUICK)
def test_a_further_bug_is_found(name: str) -> None:
    check_found(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FURTHER if name not in QUICK])
def test_every_further_bug_is_found(name: str) -> None:
    check_found(name)


def test_the_further_bugs_are_others() -> None:
    assert len(FURTHER) >= 25
    assert not set(FURTHER) & set(PLANTED)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["ideal-secagg", "pairwise"])
@pytest.mark.parametrize("seed", [1, 2])
def test_right_code_that_shares_noise_raises_no_alarm(aggregation: str, seed: int) -> None:
    report = run_suite(BASE.replace(privacy={"aggregation": aggregation}), seed=seed)
    # Keys of pairs may be the operating system's: below the suite's own level of 1e-5, a test must not fail by chance.
    assert report.smallest > 1e-10, report.alarms


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(
    "train",
    [
        {"participation": 0.5},
        {"weight_decay": 0.01},
        {"server": "adam"},
        {"ema": 0.9},
        {"combine": "median"},
        {"schedule": "cosine"},
    ],
)
def test_right_code_with_other_settings_raises_no_alarm(accountant: str, train: dict[str, object]) -> None:
    settings = BASE.replace(train=train, privacy={"accountant": accountant})
    assert not run_suite(settings, seed=3).alarms
