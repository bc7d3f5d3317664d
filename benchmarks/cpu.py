"""Private rounds on a CPU beside a plain, non-private PyTorch loop on the same work: one command, one table.

    make bench                                          # everything, in .venv-bench
    PYTHONPATH=src python benchmarks/cpu.py --quick     # does it run at all?
    PYTHONPATH=src python benchmarks/cpu.py --methods plain fulcrum --works mnist
    PYTHONPATH=src python benchmarks/cpu.py --works mnist-300 cifar-250 --methods plain fulcrum fulcrum-fast-secure \
        fulcrum-proven                                  # the paper's own batches

First the methods are compared: Fulcrum's fast engine with its reference on the same samples and noise, and every
method with Fulcrum where nothing is noised. Fulcrum has three rows: seeded (a simulation), secure with fast
arithmetic, and secure with proven arithmetic. Then they take turns, a round each, in one process; seconds are medians,
ratios medians of the ratios to the plain round of the same turn. Peak memory is that of a process of its own for each
method. Writes bench-cpu.json and bench-cpu.md to --out (default: results); rows of earlier runs with another work or
method are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_peers
import cpu_work
import torch
from cpu_work import FULL, QUICK, Round, Work

from fulcrum.training.problem import TrainingProblem


def run_mode(mode: str, made: TrainingProblem, work: Work) -> Round:
    """Fulcrum's fast engine in one of its modes."""
    return cpu_work.fulcrum(cpu_work.MODES[mode](made), work)


METHODS: dict[str, Callable[[TrainingProblem, Work], Round]] = {
    "plain": cpu_work.plain,
    **{name: functools.partial(run_mode, name) for name in cpu_work.MODES},
    "opacus-hooks": cpu_peers.hooks,
    "opacus-ghost": cpu_peers.ghost,
    "opacus-ew": cpu_peers.expanded_weights,
}


def main() -> None:
    """Check, time, weigh, report."""
    asked = arguments()
    works = QUICK if asked.quick else FULL
    cpu_peers.quiet()
    if asked.weigh:
        weigh_here(works[asked.works[0]], asked.methods[0], asked.rounds)
        return
    methods = [name for name in asked.methods if not name.startswith("opacus") or cpu_peers.installed()]
    rows: list[dict[str, Any]] = []
    for name in asked.works:
        check(works[name], methods)
        found = clock(works[name], methods, asked.rounds)
        for method in methods:
            rows.append({"work": name, "method": method, **found[method], "peak_rss_mb": weigh(asked, name, method)})
            say(rows[-1])
    missing = [name for name in asked.methods if name not in methods]
    report(Path(asked.out), rows, missing, asked.quick)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small work, few rounds: numbers mean nothing")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds of each method (default 9; quick: 2)")
    parser.add_argument("--works", nargs="+", default=list(FULL), choices=list(FULL))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", default="results", help="folder for bench-cpu.json and bench-cpu.md")
    parser.add_argument("--weigh", action="store_true", help="only run the method and print its peak memory in bytes")
    asked = parser.parse_args()
    asked.rounds = asked.rounds or (2 if asked.quick else 9)
    return asked


# --- is it the same work? -----------------------------------------------------------------------


def check(work: Work, methods: list[str]) -> None:
    """Stops unless Fulcrum equals its reference, and every private method equals Fulcrum but for the noise."""
    short = dataclasses.replace(work, parties=min(work.parties, 3), steps=min(work.steps, 3))
    made = cpu_work.problem(short)
    for name, mode in cpu_work.MODES.items():
        own = mode(made)  # one secret for both
        same(f"{name} and its reference", cpu_work.fulcrum(own, short)(0), cpu_work.fulcrum(own, short, "reference")(0))
    silent = dataclasses.replace(short, sigma=0.0)
    truth = cpu_work.fulcrum(made, silent)(0)
    for name in methods:
        if name not in ("plain", *cpu_work.MODES):
            same(f"{name} and fulcrum without noise", METHODS[name](made, silent)(0), truth)
    loose = cpu_work.fulcrum(cpu_work.problem(short, "none"), silent)(0)
    same("the plain loop and fulcrum without clipping", cpu_work.plain(made, silent)(0), loose)


def same(what: str, found: torch.Tensor, truth: torch.Tensor) -> None:
    error = float(torch.linalg.vector_norm(found - truth) / torch.linalg.vector_norm(truth))
    print(f"{what}: relative difference {error:.1e}", flush=True)
    if not error < 1e-4:
        sys.exit(f"{what} do not do the same work; nothing was timed.")


# --- time ---------------------------------------------------------------------------------------


def clock(work: Work, methods: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds a round, the ratio to the plain loop, and of Fulcrum's rows to the seeded one; methods take turns."""
    made = cpu_work.problem(work)
    needed = ["plain", *(["fulcrum"] if any(name in cpu_work.MODES for name in methods) else [])]
    plays = {name: METHODS[name](made, work) for name in dict.fromkeys([*needed, *methods])}
    seconds: dict[str, list[float]] = {name: [] for name in plays}
    for play in plays.values():
        play(0)  # warm: code is compiled, memory is taken
    for t in range(1, rounds + 1):
        for name, play in plays.items():
            began = time.perf_counter()
            play(t)
            seconds[name].append(time.perf_counter() - began)

    def ratio(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))

    return {
        name: {
            "seconds_per_round": statistics.median(taken),
            "ratio_to_plain": ratio(name, "plain"),
            **({"ratio_to_seeded": ratio(name, "fulcrum")} if name in cpu_work.MODES else {}),
        }
        for name, taken in seconds.items()
    }


# --- memory -------------------------------------------------------------------------------------


def weigh(asked: argparse.Namespace, work: str, method: str) -> float:
    """Peak resident memory in MB of a process that runs this method alone."""
    words = [sys.executable, __file__, "--weigh", "--works", work, "--methods", method, "--rounds", str(asked.rounds)]
    done = subprocess.run([*words, *(["--quick"] if asked.quick else [])], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{method} failed alone:\n{done.stderr}")
    return round(int(done.stdout.split()[-1]) / 2**20, 1)


def weigh_here(work: Work, method: str, rounds: int) -> None:
    """Run the method and print the peak of this process in bytes."""
    play = METHODS[method](cpu_work.problem(work), work)
    for t in range(min(rounds, 3)):
        play(t)
    print(peak_memory())


def peak_memory() -> int:
    """Bytes. Linux counts a parent's memory into `ru_maxrss`, but not into VmHWM; a Mac gives bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- report -------------------------------------------------------------------------------------


def say(row: dict[str, Any]) -> None:
    print(
        f"{row['work']:6} {row['method']:19} {row['seconds_per_round']:8.3f} s a round"
        f" {row['ratio_to_plain']:7.2f} x plain {row['peak_rss_mb']:8.0f} MB",
        flush=True,
    )


def hardware() -> dict[str, Any]:
    """Where and when the numbers were taken."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def merge(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These rows and those of earlier runs that they do not replace, by work and method."""
    old = json.loads(path.read_text()) if path.exists() else []
    every = {(row["work"], row["method"]): row for row in [*old, *rows]}
    order = {name: n for n, name in enumerate([*FULL, *METHODS])}
    return sorted(every.values(), key=lambda row: (order[row["work"]], order[row["method"]]))


def report(folder: Path, rows: list[dict[str, Any]], missing: list[str], quick: bool) -> None:
    """bench-cpu.json for programs, bench-cpu.md for people."""
    folder.mkdir(parents=True, exist_ok=True)
    where = hardware() | {"quick": quick}
    rows = merge(folder / "bench-cpu.json", [row | where for row in rows])
    (folder / "bench-cpu.json").write_text(json.dumps(rows, indent=2) + "\n")
    weights = {row["work"]: row["peak_rss_mb"] for row in rows if row["method"] == "plain"}
    lines = [
        "# CPU benchmark",
        "",
        f"{where['date']}, {where['processor']}, {where['cores']} cores, {where['threads']} threads, torch "
        f"{where['torch']}, Python {where['python']}." + (" QUICK: these numbers mean nothing." if quick else ""),
        "",
        "One round: 10 parties, Poisson samples of 64 expected examples, 10 local steps (MNIST CNN) or 2 (CIFAR CNN); "
        "mnist-300 and cifar-250: the paper's rate, one step. Clip, noise, average. "
        "The plain loop does the same without clipping and noise, with all threads.",
        "",
        "fulcrum: seeded randomness and fast arithmetic (a simulation). fulcrum-fast-secure: secure randomness, fast "
        "arithmetic. fulcrum-proven: secure randomness, proven arithmetic.",
        "",
        "| work | method | seconds per round | ratio to plain | to seeded | peak memory, MB | to plain | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = f"{row['peak_rss_mb'] / weights[row['work']]:.2f}" if row["work"] in weights else ""
        seeded = f"{row['ratio_to_seeded']:.2f}" if "ratio_to_seeded" in row else ""
        lines.append(
            f"| {row['work']} | {row['method']} | {row['seconds_per_round']:.3f} | {row['ratio_to_plain']:.2f} "
            f"| {seeded} | {row['peak_rss_mb']:.0f} | {share} | {row['date'][:16]} |"
        )
    lines += [
        "",
        *(f"* {name}: not installed." for name in missing if name not in {row["method"] for row in rows}),
        *(f"* {note}" for note in cpu_peers.NOTES.values()),
    ]
    (folder / "bench-cpu.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
