"""The suite: every detector on one case, blind to what is wrong with it.

    report = run_suite(settings)
    report.alarms      # nothing, where the code is right: at most 1e-5 of all runs have one

A case is settings alone. The suite makes its own records, plays rounds with the engine, the rule and the plan of the
settings, and runs a whole federation with its ledger and its statement.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fulcrum.analysis.detectors import (
    audit,
    contributions,
    hostile,
    large,
    ledger,
    masked,
    messages,
    noise,
    probe,
    run_noise,
    same_releases,
    server_probe,
    statement,
)
from fulcrum.analysis.detectors.executed import Executed, execute_case
from fulcrum.analysis.detectors.findings import LEVEL, Reading, Report, collect
from fulcrum.analysis.detectors.probe import Probe
from fulcrum.errors import FulcrumError
from fulcrum.settings.schema import Settings


@dataclass
class Case:
    """What detectors look at: the settings, and what is measured under them when it is first asked for.

    seed: of the probe's random numbers, where the settings ask for seeded ones.
    """

    settings: Settings
    folder: Path
    seed: int = 0

    @cached_property
    def probe(self) -> Probe:
        """Rounds at fixed weights."""
        if self.settings.privacy.unit == "client":
            return server_probe.measure_server(self.settings, seed=self.seed)
        return probe.measure(self.settings, seed=self.seed)

    @cached_property
    def executed(self) -> Executed:
        """A whole run, stopped once and resumed."""
        changed = self.settings.replace(run={"seed": self.seed}, privacy={"seed": self.seed})
        return execute_case(changed, self.folder / "run")


Detector = Callable[[Case], Iterable[Reading]]


def replay_neighbours_and_noise(case: Case) -> Iterator[Reading]:
    """What releases show of single records, of sampling and of the noise."""
    if case.settings.privacy.aggregation != "pairwise":
        yield from contributions.read_probe_records(case.probe)
        yield from noise.read_probe_noise(case.probe)
        if case.settings.privacy.unit != "client":
            others = probe.measure_other_runs(case.settings)
            yield from noise.read_other_runs(others, case.probe.gradient, case.probe.names)
            yield from large.read_large_sums(case.settings)
    else:
        yield from masked.read_masked_records(case.settings)
    yield from hostile.read_hostile_records(case.settings)
    yield from run_noise.read_run_noise(case.executed)
    yield from run_noise.read_streams(case.executed)
    yield from same_releases.read_same_releases(case.executed, case.folder)
    yield from messages.read_masks(case.executed)
    yield from messages.read_scores(case.executed)


def audit_canaries(case: Case) -> Iterator[Reading]:
    """Lower bounds from canaries, beside what is claimed."""
    if case.settings.privacy.unit != "client" and case.settings.privacy.aggregation == "plain":
        yield from audit.read_audit(case.probe)


def replay_ledger(case: Case) -> Iterator[Reading]:
    """What the ledger must hold, computed again."""
    yield from ledger.read_ledger(case.executed)


def check_statement(case: Case) -> Iterator[Reading]:
    """PRIVACY.md and privacy.json beside the ledger, the plan and the settings."""
    yield from statement.read_statement(case.executed)


DETECTORS: Mapping[str, Detector] = {
    audit.NAME: audit_canaries,
    contributions.NAME: replay_neighbours_and_noise,
    ledger.NAME: replay_ledger,
    statement.NAME: check_statement,
}
"""Detectors by name."""


def run_suite(
    settings: Settings, seed: int = 0, level: float = LEVEL, detectors: Mapping[str, Detector] = DETECTORS
) -> Report:
    """Every detector on these settings. A run that stops by itself, because it noticed a fault, is an alarm too."""
    readings: list[Reading] = []
    with tempfile.TemporaryDirectory() as folder:
        case = Case(settings, Path(folder), seed)
        for name, detect in detectors.items():
            try:
                readings += detect(case)
            except FulcrumError as error:
                readings.append(Reading(name, "the run itself", 0.0, f"the run stopped by itself: {error}"))
    return collect(readings, level)
