"""Thousands of rounds: does memory or the cost of a round grow? In one process, and over the message layer.

    PYTHONPATH=src python benchmarks/long_run.py                        # 5,000 rounds in one process, about two minutes
    PYTHONPATH=src python benchmarks/long_run.py --messages             # the same over the message layer, three parties

Prints, per window of rounds: milliseconds of CPU per round, and the memory of the process. The last line compares the
last fifth of the rounds with the second fifth, and the exit code is 1 where either grew beyond the limits. Writes
results/long-run.json.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src"), str(ROOT / "tests")]

MAX_GROWTH_MB = 10.0
MAX_SLOWDOWN = 1.25


def read_memory_mb() -> float:
    """The memory of this process (resident set), in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


class Windows:
    """Seconds of CPU and memory after every so many rounds."""

    def __init__(self, every: int, say: Callable[[str], None] = print) -> None:
        self.every, self.say = every, say
        self.rows: list[dict[str, float]] = []
        self._began = time.process_time()

    def __call__(self, result: Any) -> None:
        """After a round."""
        if result.round % self.every == 0:
            gc.collect()
            took = (time.process_time() - self._began) / self.every
            self.rows.append({"round": result.round, "ms_per_round": 1e3 * took, "memory_mb": read_memory_mb()})
            self.say("round {round:6.0f}  {ms_per_round:8.2f} ms  {memory_mb:8.1f} MB".format(**self.rows[-1]))
            self._began = time.process_time()

    def compare(self) -> dict[str, float]:
        """The last fifth of the rounds against the second fifth."""
        fifth = max(1, len(self.rows) // 5)
        early, late = self.rows[fifth : 2 * fifth], self.rows[-fifth:]
        cost = [sorted(row["ms_per_round"] for row in part)[len(part) // 2] for part in (early, late)]
        grown = max(row["memory_mb"] for row in late) - max(row["memory_mb"] for row in early)
        return {"slowdown": cost[1] / cost[0], "memory_growth_mb": grown}


def run_here(rounds: int, home: Path, windows: Windows) -> None:
    """`fulcrum run` of a tiny model over two parties, into a folder with its ledger."""
    import fulcrum
    from support.federations import toy_data

    fulcrum.train(
        toy_data(60, public=False),
        out=home / "run",
        on_round=windows,
        parties=2,
        partition="iid",
        rounds=rounds,
        rate=0.2,
        sigma=2.0,
        model="linear",
        evaluate_every=50,
    )


def run_messages(rounds: int, home: Path, windows: Windows) -> None:
    """A coordinator and three parties with ledgers of their own; a dictionary carries the messages."""
    import pytest

    from support import flower as toy

    settings = toy.toy_settings(rounds=rounds).replace(run={"evaluate_every": 50})
    with pytest.MonkeyPatch.context() as patch, toy.toy_federation(home, settings) as bus:
        forget_messages(bus)
        toy.serve(bus, settings, home / "run", patch, on_round=windows)


def forget_messages(bus: Any) -> None:
    """The test's transport remembers all that was sent; a real one does not."""
    send = bus.send

    def send_and_forget(node: int, envelope: Any, *more: Any) -> Any:
        number = send(node, envelope, *more)
        bus.sent[-1] = (0, None)
        return number

    bus.send = send_and_forget


def main(words: list[str] | None = None) -> int:
    """Run, print, write; 1 where memory or the cost of a round grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--messages", action="store_true", help="over the message layer")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "long-run.json")
    given = parser.parse_args(words)

    import torch

    from faults import read_commit

    torch.set_num_threads(1)
    windows = Windows(max(1, given.rounds // 50))
    layer = "messages" if given.messages else "one process"
    with tempfile.TemporaryDirectory(prefix="long-") as home:
        (run_messages if given.messages else run_here)(given.rounds, Path(home), windows)
    found = windows.compare()
    grew = found["slowdown"] > MAX_SLOWDOWN or found["memory_growth_mb"] > MAX_GROWTH_MB
    print("slowdown {slowdown:.3f}  memory {memory_growth_mb:+.1f} MB".format(**found) + ("  GREW" if grew else ""))
    content: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(given.out.read_text())
    command = "PYTHONPATH=src python benchmarks/long_run.py" + (" --messages" if given.messages else "")
    content[layer] = {
        "rounds": given.rounds,
        **found,
        "commit": read_commit(),
        "command": command,
        "rows": windows.rows,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
