"""Public facts of the runs behind the grids in results/, for `fulcrum theory`: results/theory/facts.json.

    FULCRUM_DATA=... python benchmarks/theory_facts.py

It loads the data, for the sizes of the parties that a split gives. About two minutes.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from pathlib import Path
from typing import Any

from fulcrum.analysis.theory.prediction import RunFacts, collect_run_facts
from fulcrum.runs.folder import current_utc_time
from fulcrum.runs.preparation import prepare_unrehearsed
from fulcrum.settings.schema import Settings
from fulcrum.study.job import settings_from_json
from fulcrum.study.provenance import get_source_commit
from fulcrum.study.suite.jobs import make_scenario_settings
from fulcrum.study.suite.scenarios import read_suite

RESULTS = Path(__file__).resolve().parents[1] / "results"


def collect(settings: Settings) -> RunFacts:
    """The facts of a run with these settings."""
    federation = prepare_unrehearsed(settings.replace(clip={"rehearse": False}, run={"device": "cpu"}))
    return collect_run_facts(federation)


def list_robustness() -> dict[str, Settings]:
    """One cell's settings per grid of the robustness study."""
    found: dict[str, Settings] = {}
    with gzip.open(RESULTS / "robustness" / "robustness.jsonl.gz", "rt") as lines:
        for line in lines:
            row: dict[str, Any] = json.loads(line)
            name = f"robustness/{row['dataset']}-{row['epsilon']}"
            if row["row"] == "dp-sgd" and name not in found:
                found[name] = settings_from_json(row["settings"])
    return found


def main() -> None:
    suite = read_suite()
    asked = {
        f"no-tuning/{scenario.name}": make_scenario_settings(scenario, "dp-sgd")
        for scenario in suite.scenarios
        if "adam" not in scenario.name  # Adam's steps have no length that C and the learning rate decide
    }
    asked |= list_robustness()
    facts = {}
    for name, settings in asked.items():
        found = collect(settings)
        if math.isfinite(found.noise):
            facts[name] = dataclasses.asdict(found)
        print(name, found, flush=True)
    folder = RESULTS / "theory"
    folder.mkdir(exist_ok=True)
    (folder / "facts.json").write_text(
        json.dumps(
            {
                "command": "python benchmarks/theory_facts.py",
                "commit": get_source_commit(),
                "date": current_utc_time(),
                "facts": facts,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
