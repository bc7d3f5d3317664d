"""Runs the suite of detectors on planted bugs and on clean cases, and writes what it found.

    python benchmarks/detectors.py --planted --out results/audit
    python benchmarks/detectors.py --clean 500 --out results/audit

planted.json: one row per bug, with the detector that found it and why. clean.json: how many runs, how many alarms;
clean-runs.jsonl.gz: one row per run. A clean run that was interrupted goes on where it stopped. Exits with 1 where a
bug was missed or a clean run raised an alarm.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from fulcrum.analysis.detectors.cases import describe_case, list_cases  # noqa: E402
from fulcrum.analysis.detectors.findings import LEVEL, list_sentences  # noqa: E402
from fulcrum.analysis.detectors.planted import PLANTED  # noqa: E402
from fulcrum.analysis.detectors.suite import DETECTORS, run_suite  # noqa: E402

NAMED = 14
"""The first planted bugs are those that the project names; the others are further ones."""


def describe_origin(command: list[str], seconds: float) -> dict[str, Any]:
    """Where the numbers come from."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "commit": os.environ.get("FULCRUM_COMMIT", done.stdout.strip() or "unknown"),
        "command": " ".join(["python", "benchmarks/detectors.py", *command]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": f"{platform.processor() or platform.machine()}, one of {os.cpu_count()} cores",
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
        "level": LEVEL,
        "detectors": list(DETECTORS),
    }


def run_planted(seed: int) -> list[dict[str, Any]]:
    """The suite on every planted bug."""
    rows = []
    for number, (name, bug) in enumerate(PLANTED.items()):
        with bug.planted():
            report = run_suite(bug.settings, seed=seed)
        row = {
            "bug": name,
            "what": bug.what,
            "named": number < NAMED,
            "case": describe_case(bug.settings),
            "seed": seed,
            "found": bool(report.alarms),
            "detectors": list(report.detectors),
            "why": list_sentences(report.alarms),
            "readings": len(report.readings),
            "smallest_p_times_readings": report.smallest,
        }
        rows.append(row)
        print(f"{'found' if row['found'] else 'MISSED':7} {name:36} {', '.join(report.detectors)}", flush=True)
    return rows


def run_clean(count: int, path: Path) -> list[dict[str, Any]]:
    """The suite on clean cases; rows are kept as they come, and those that are there are not run again."""
    rows: list[dict[str, Any]] = []
    if path.is_file():
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    with path.open("a", encoding="utf-8") as file:
        for number, settings in list_cases(count - len(rows), start=len(rows)):
            began = time.process_time()
            report = run_suite(settings, seed=number)
            row = {
                "number": number,
                **describe_case(settings),
                "seed": number,
                "readings": len(report.readings),
                "alarms": [alarm.to_json() for alarm in report.alarms],
                "smallest_p_times_readings": report.smallest,
                "cpu_seconds": round(time.process_time() - began, 2),
            }
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if row["alarms"]:
                print(f"ALARM in case {number}: {row}", flush=True)
    return rows


def main() -> int:
    """Run, print, write, and say by the exit code whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", action="store_true", help="run the planted bugs")
    parser.add_argument("--clean", type=int, default=0, metavar="N", help="run N clean cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FULCRUM_KEY_FILE"] = str(Path(folder) / "record.key")
        if asked.planted:
            began = time.perf_counter()
            rows = run_planted(asked.seed)
            found = sum(row["found"] for row in rows)
            facts = {
                "planted": len(rows),
                "planted_found": found,
                "named": sum(row["named"] for row in rows),
                "named_found": sum(row["named"] and row["found"] for row in rows),
                **describe_origin(sys.argv[1:], time.perf_counter() - began),
                "seeds": [asked.seed],
                "bugs": rows,
            }
            (asked.out / "planted.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            print(f"{found} of {len(rows)} planted bugs were found")
            wrong += len(rows) - found
        if asked.clean:
            began = time.perf_counter()
            raw = asked.out / "clean-runs.jsonl"
            rows = run_clean(asked.clean, raw)
            alarms = sum(bool(row["alarms"]) for row in rows)
            counts = {
                name: dict(collections.Counter(str(row[name]) for row in rows))
                for name in ("rule", "engine", "unit", "epsilon", "randomness", "aggregation", "groups")
            }
            facts = {
                "clean_runs": len(rows),
                "false_alarms": alarms,
                **describe_origin(sys.argv[1:], time.perf_counter() - began),
                "cpu_seconds": round(sum(row["cpu_seconds"] for row in rows), 1),
                "readings": sum(row["readings"] for row in rows),
                "smallest_p_times_readings": min(row["smallest_p_times_readings"] for row in rows),
                "seeds": [0, len(rows) - 1],
                "cases": counts,
                "raw": "clean-runs.jsonl.gz",
            }
            (asked.out / "clean.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            with gzip.GzipFile(asked.out / "clean-runs.jsonl.gz", "wb", mtime=0) as file:
                file.write(raw.read_bytes())
            raw.unlink()
            print(f"{alarms} alarms in {len(rows)} clean runs")
            wrong += alarms
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
