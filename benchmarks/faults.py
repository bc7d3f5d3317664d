"""Faults: hundreds of runs that are struck, and what each of them lost. One command:

    PYTHONPATH=src python benchmarks/faults.py                   # 580 trials, about seven minutes on one core
    PYTHONPATH=src python benchmarks/faults.py --trials 52       # a few of each

kill -9 at a random line and at a random time, full disks, read-only folders, clocks that jump, memory that runs out,
damaged and exchanged checkpoints, ledgers and records, two processes on one run. After each trial a row says what was
lost, what the ledger says, and whether the resumed run equals the uninterrupted one bit for bit. Trials that are in
results/faults.json (same seed and commit) are not played again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]


def main(words: list[str] | None = None) -> int:
    """Play what is not in the file yet, write it, print a table; 1 where a trial failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=520)
    parser.add_argument("--messages", type=int, default=60, help="trials over the message layer, without a network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "faults.json")
    parser.add_argument("--work", type=Path, default=None, help="folder for the trials; failed ones stay there")
    given = parser.parse_args(words)

    import faults_child as child
    import faults_damage  # noqa: F401  registers its faults
    import faults_trials as trials
    import torch

    torch.set_num_threads(1)
    commit = read_commit()
    done = read_rows(given.out, given.seed, commit)
    names = list(trials.FAULTS)
    numbers = [n for n in range(given.trials) if n not in done and given.only in names[n % len(names)]]
    sent = [n for n in range(given.messages) if f"m{n}" not in done]
    out = given.out.absolute()
    with tempfile.TemporaryDirectory(prefix="faults-") as made:
        world = trials.World((given.work or Path(made)).absolute(), child.enter_own_mounts())
        if numbers or sent:
            world.prepare()
        for row in itertools.chain(
            trials.iterate_trials(world, numbers, given.seed), play_messages(world, sent, given.seed)
        ):
            done[row["trial"]] = row
            if row.get("ok") is False:
                print(f"trial {row['trial']}: {row['fault']} ({row['work']}, {row.get('point', '')}): {row['why']}")
            if len(done) % 20 == 0:
                write(out, given.seed, commit, done)
        write(out, given.seed, commit, done)
    print_table(list(done.values()))
    return int(any(row.get("ok") is False for row in done.values()))


def play_messages(world: Any, numbers: list[int], seed: int) -> Iterator[dict[str, Any]]:
    """The trials over the message layer; it needs the keys of the extra `flower`, and no Flower."""
    if not numbers:
        return
    import faults_messages as messages

    federation = messages.MessageWorld(world)
    federation.prepare()
    for number in numbers:
        yield messages.play_message_trial(federation, number, seed)


def read_commit() -> str:
    """The commit of this checkout, with a mark where files differ from it."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def read_rows(file: Path, seed: int, commit: str) -> dict[Any, dict[str, Any]]:
    """The rows of an earlier call for the same code and seed."""
    if not file.is_file():
        return {}
    found = json.loads(file.read_text())
    same = found.get("seed") == seed and found.get("commit") == commit
    return {row["trial"]: row for row in found["rows"]} if same else {}


def write(file: Path, seed: int, commit: str, rows: dict[Any, dict[str, Any]]) -> None:
    """Write the file: totals, then every row."""
    kept = [rows[number] for number in sorted(rows, key=str)]
    played = [row for row in kept if "skipped" not in row]
    content = {
        "trials": len(played),
        "failed": sum(row["ok"] is False for row in played),
        "equal_to_the_whole_run": sum(bool(row.get("equal")) for row in played),
        "skipped": len(kept) - len(played),
        "seed": seed,
        "commit": commit,
        "command": "PYTHONPATH=src python benchmarks/faults.py",
        "rows": kept,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(file)


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line per fault."""
    print(f"{'fault':29}{'trials':>8}{'killed':>8}{'refused':>9}{'equal':>7}{'failed':>8}{'skipped':>9}")
    for name in dict.fromkeys(row["fault"] for row in rows):
        mine = [row for row in rows if row["fault"] == name]
        count = Counter(
            played=sum("skipped" not in row for row in mine),
            killed=sum(row.get("exit") == -9 for row in mine),
            refused=sum(bool(row.get("refused")) or row.get("exit") == 2 for row in mine),
            equal=sum(bool(row.get("equal")) for row in mine),
            failed=sum(row.get("ok") is False for row in mine),
            skipped=sum("skipped" in row for row in mine),
        )
        print(
            f"{name:29}{count['played']:8}{count['killed']:8}{count['refused']:9}{count['equal']:7}{count['failed']:8}"
            f"{count['skipped']:9}"
        )


if __name__ == "__main__":
    sys.exit(main())
