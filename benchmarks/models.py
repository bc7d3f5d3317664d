"""One private step on the models people bring, beside the plain PyTorch step and Opacus: one command, one table.

    PYTHONPATH=src python benchmarks/models.py                                       # the four works, on a GPU if any
    PYTHONPATH=src python benchmarks/models.py --works all                           # and the reported ones
    PYTHONPATH=src python benchmarks/models.py --device cpu --scale 0.005 --repeat 1 # does it run at all?
    PYTHONPATH=src:.carry python benchmarks/models.py --profile --works vit-6x192 --methods fulcrum

First every private method is compared with float64 gradients on a few examples. Then the methods take turns, a step
each, in one process; seconds are medians after warm-up, ratios medians of the ratios to the plain step of the same
turn. gigabytes: on a GPU the peak of the allocator above what others hold; on a CPU the peak of a process of its own.
On a CPU the batch is a tenth. Writes bench-models.json and bench-models.md to --out (default: results); rows of
earlier runs with another work, device, precision or method are kept. A row that failed has null and a word.
How the cost grows with each size: model_growth.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from model_methods import CHECK_LR, METHODS, Method, Setup, compute_truth
from model_works import MAIN, REPORTED, WORKS, ModelWork

import fulcrum
from fulcrum.models.layout import ParameterLayout

Row = dict[str, Any]
PRECISIONS = ("float32", "tf32", "bf16")
TOLERANCE = {"float32": 1e-3, "tf32": 2e-2, "bf16": 1e-1}
"""Relative difference of the update to that of float64 gradients that is allowed; twice that of autograd's own
gradients at the same precision always is (a value near a kink, or ten layers of bf16)."""
SETS = {"main": MAIN, "reported": REPORTED, "all": MAIN | REPORTED}
DEFAULT_SCALE = {"cpu": 0.1, "cuda": 1.0}


def main() -> None:
    """Compare, time, weigh, report; after every work what was found is on disk."""
    asked = parse_arguments()
    warnings.filterwarnings("ignore", message="There is a performance drop")  # torch.func on an operation of its own
    device = torch.device(asked.device)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    works = [work.scaled(asked.scale) for work in select_works(asked.works)]
    if asked.weigh:
        weigh_here(Setup(works[0], device, asked.precisions[0]), asked.methods[0])
        return
    if asked.profile:
        for work in works:
            for precision in asked.precisions:
                for method in asked.methods:
                    profile(Setup(work, device, precision), method)
        return
    about = describe_here(asked, device)
    rows: list[Row] = []
    if asked.report:
        report(Path(asked.out), rows)
        return
    for work in works:
        for precision in asked.precisions:
            rows += [row | about for row in measure(asked, Setup(work, device, precision))]
            report(Path(asked.out), rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [*SETS, *WORKS]
    parser.add_argument("--works", nargs="+", default=["main"], choices=names, metavar="WORK", help=", ".join(names))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, help="default: all; on a CPU float32 and bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--scale", type=float, default=0.0, help="part of the batch (default 1; on a CPU 0.1)")
    parser.add_argument("--repeat", type=int, default=7, help="timed steps of each method")
    parser.add_argument("--warm", type=int, default=2, help="steps of each method before")
    parser.add_argument("--threads", type=int, default=0, help="threads of PyTorch (default: its own choice)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for the timed steps of one work")
    parser.add_argument("--no-memory", action="store_true", help="on a CPU: no process of its own for each method")
    parser.add_argument("--no-check", action="store_true", help="do not compare with float64 gradients")
    parser.add_argument("--profile", action="store_true", help="only print where the time of a step goes")
    parser.add_argument("--report", action="store_true", help="only write the table again")
    parser.add_argument("--weigh", action="store_true", help="only run the method and print its peak memory in bytes")
    parser.add_argument("--out", default="results", help="folder of bench-models.json and bench-models.md")
    asked = parser.parse_args()
    asked.scale = asked.scale or DEFAULT_SCALE[asked.device]
    asked.precisions = asked.precisions or [name for name in PRECISIONS if asked.device == "cuda" or name != "tf32"]
    return asked


def select_works(names: list[str]) -> list[ModelWork]:
    chosen: dict[str, ModelWork] = {}
    for name in names:
        chosen |= SETS.get(name) or {name: WORKS[name]}
    return list(chosen.values())


# --- one work at one precision ----------------------------------------------------------------------


def measure(asked: argparse.Namespace, setup: Setup) -> list[Row]:
    """One row per method. What fails has null and a word, and does not stop the others."""
    rows: dict[str, Row] = {
        name: {
            "work": setup.work.name,
            "device": setup.device.type,
            "precision": setup.precision,
            "method": name,
            "seconds": None,
            "ratio_to_plain": None,
            "gigabytes": None,
            "batch": setup.work.batch,
            "parties": setup.work.parties,
            "steps": setup.work.steps,
        }
        for name in asked.methods
    }
    if setup.precision == "tf32" and setup.device.type == "cpu":
        return [row | {"word": "a CPU has no tf32"} for row in rows.values()]
    with setup.arithmetic():
        if not asked.no_check:
            check(setup, rows)
        clock(asked, setup, rows)
    if setup.device.type == "cpu" and not asked.no_memory:
        for name, row in rows.items():
            if row["seconds"] is not None:
                row["gigabytes"] = weigh(asked, setup, name)
    for row in rows.values():
        say(row)
    return list(rows.values())


def check(setup: Setup, rows: dict[str, Row]) -> None:
    """Compares each private method's update with the one from float64 gradients, on a few examples, without noise."""
    model = setup.work.model()
    each = 2 if ParameterLayout.of(model).dim > 2e7 or setup.work.parties > 1 else 4
    parties = min(setup.work.parties, 4)
    work = dataclasses.replace(setup.work, batch=each * parties, parties=parties, steps=1)
    small = dataclasses.replace(setup, work=work, sigma=0.0, lr=CHECK_LR)
    truth = compute_truth(small)
    small = dataclasses.replace(small, clip=truth.clip)
    limit = max(TOLERANCE[setup.precision], 2 * truth.error)
    for name, row in rows.items():
        if name == "plain":
            continue
        try:
            method = METHODS[name](small)
            method.step(0)
            error = float((method.update().double() - truth.update).norm() / truth.update.norm())
        except Exception as problem:
            row["word"] = f"comparison failed: {name_problem(problem)}"
            continue
        row["error"] = error
        if not error < limit:
            row["word"] = f"wrong: differs from float64 gradients by {error:.1e}"
        elif setup.precision == "bf16" and error < 0.05 * truth.error:
            row["note"] = "computed in float32"
    free_memory()


def clock(asked: argparse.Namespace, setup: Setup, rows: dict[str, Row]) -> None:
    """Medians of steps that the methods take in turn; the plain step is always among them."""
    methods: dict[str, Method] = {}
    held: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for name in dict.fromkeys(["plain", *rows]):
        row = rows.get(name, {})
        if str(row.get("word", "")).startswith(("wrong", "comparison failed")):
            continue
        before = allocated(setup.device)
        method: Method | None = None
        try:
            method = METHODS[name](setup)
            held[name] = allocated(setup.device) - before
            for t in range(max(1, asked.warm)):
                _, peak = run_step(method, t, setup.device)
                peaks[name] = max(peaks.get(name, 0.0), peak)
        except Exception as problem:
            row["word"] = name_problem(problem)
            method = None
            free_memory()
            continue
        methods[name] = method
    taken: dict[str, list[float]] = {name: [] for name in methods}
    began = time.perf_counter()
    for t in range(asked.repeat):
        for name, playing in methods.items():
            seconds, peak = run_step(playing, asked.warm + t, setup.device)
            taken[name].append(seconds)
            peaks[name] = max(peaks[name], peak)
        if time.perf_counter() - began > asked.limit:
            break
    for name, played in methods.items():
        if name not in rows:
            continue
        row = rows[name]
        row["seconds"] = statistics.median(taken[name])
        row["repeats"] = len(taken[name])
        if "plain" in taken:
            row["ratio_to_plain"] = statistics.median(a / b for a, b in zip(taken[name], taken["plain"], strict=True))
        if setup.device.type == "cuda":
            row["gigabytes"] = (held[name] + peaks[name]) / 1e9
        if played.notes():
            row["note"] = "; ".join(filter(None, [row.get("note", ""), *played.notes()]))
    methods.clear()
    free_memory()


def run_step(method: Method, t: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a step, and the bytes that it took at its peak above what was held before (GPU; else 0)."""
    if device.type != "cuda":
        began = time.perf_counter()
        method.step(t)
        return time.perf_counter() - began, 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = allocated(device)
    began = time.perf_counter()
    method.step(t)
    torch.cuda.synchronize(device)
    return time.perf_counter() - began, torch.cuda.max_memory_allocated(device) - before


def allocated(device: torch.device) -> float:
    return float(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0.0


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def name_problem(problem: Exception) -> str:
    """A word for the table."""
    if isinstance(problem, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(problem, ModuleNotFoundError):
        return f"not installed: {problem.name}"
    if os.environ.get("BENCH_TRACE"):
        traceback.print_exception(problem)
    first = (str(problem).strip().splitlines() or [""])[0]
    return f"{type(problem).__name__}: {first[:160]}"


# --- memory on a CPU, and profiles --------------------------------------------------------------------


def weigh(asked: argparse.Namespace, setup: Setup, method: str) -> float | None:
    """Peak resident gigabytes of a process that runs this method alone."""
    words = [sys.executable, __file__, "--weigh", "--works", setup.work.name, "--methods", method, "--device", "cpu"]
    words += ["--precisions", setup.precision, "--scale", str(asked.scale), "--threads", str(torch.get_num_threads())]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return int(done.stdout.split()[-1]) / 1e9 if done.returncode == 0 else None


def weigh_here(setup: Setup, name: str) -> None:
    method = METHODS[name](setup)
    for t in range(2):
        method.step(t)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(int(line.split()[1]) * 1024)


def profile(setup: Setup, name: str, rows: int = 25) -> None:
    """Prints the operations of one step that take the most time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    gpu = setup.device.type == "cuda"
    with setup.arithmetic():
        method = METHODS[name](setup)
        for t in range(2):
            method.step(t)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        every = torch._C._profiler._ExperimentalConfig(
            profile_all_threads=True
        )  # clients train in threads of their own
        with record(activities=activities, experimental_config=every) as found:
            seconds, peak = run_step(method, 2, setup.device)
    print(f"{setup.work.name} {setup.precision} {name}: {1e3 * seconds:.1f} ms, {peak / 1e9:.2f} GB above what is held")
    print(found.key_averages().table("self_cuda_time_total" if gpu else "self_cpu_time_total", row_limit=rows))


# --- report -------------------------------------------------------------------------------------------


def say(row: Row) -> None:
    def number(name: str, form: str) -> str:
        return "-" if row.get(name) is None else format(row[name], form)

    print(
        f"{row['work']:34} {row['device']:4} {row['precision']:8} {row['method']:13} {number('seconds', '9.4f')} s "
        f"{number('ratio_to_plain', '6.2f')} x plain {number('gigabytes', '7.2f')} GB  error {number('error', '.1e')} "
        f"{row.get('word', '')} {row.get('note', '')}",
        flush=True,
    )


def describe_here(asked: argparse.Namespace, device: torch.device) -> Row:
    """Where, when and by which command the numbers were taken."""
    source = str(Path(fulcrum.__file__).parent)
    words = ["git", "-C", source, "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
        hardware = f"{model or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    try:
        from importlib.metadata import version

        opacus = version("opacus")
    except ImportError:
        opacus = "none"
    return {
        "scale": asked.scale,
        "commit": os.environ.get("BENCH_COMMIT") or done.stdout.strip() or "unknown",
        "command": f"python {shlex.join(sys.argv)}",
        "hardware": hardware,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": str(torch.__version__),
        "opacus": opacus,
    }


def report(folder: Path, rows: list[Row]) -> None:
    """bench-models.json for programs, bench-models.md for people."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench-models.json"
    merged = {identify(row): row for row in (json.loads(path.read_text()) if path.exists() else [])}
    merged |= {identify(row): row for row in rows}
    order = {name: i for i, name in enumerate(WORKS)}
    every = sorted(
        merged.values(),
        key=lambda row: (
            row["device"] != "cuda",
            order.get(row["work"], len(order)),
            PRECISIONS.index(row["precision"]),
            list(METHODS).index(row["method"]),
        ),
    )
    path.write_text(json.dumps(every, indent=1) + "\n")
    (folder / "bench-models.md").write_text(format_table(every))


def identify(row: Row) -> tuple[str, ...]:
    return row["work"], row["device"], row["precision"], row["method"]


def format_table(rows: list[Row]) -> str:
    lines = [
        "# One private step on the models people bring",
        "",
        "Milliseconds per step, the ratio to the plain PyTorch step of the same turn, and gigabytes at the peak with "
        "their ratio to plain. Noise and update are included; arithmetic is `fast`. `benchmarks/models.py` says how.",
    ]
    plain = {identify(row)[:3]: row for row in rows if row["method"] == "plain"}
    for device in ("cuda", "cpu"):
        mine = [row for row in rows if row["device"] == device]
        if not mine:
            continue
        hardware = sorted({f"{row['hardware']}, torch {row['torch']}, {row['commit']}" for row in mine})
        lines += ["", f"## {device}: {'; '.join(hardware)}", ""]
        lines += [
            "| work | batch | precision | method | ms | x plain | GB | x plain | error | |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in mine:
            base = plain.get(identify(row)[:3], {}).get("gigabytes")
            share = row["gigabytes"] / base if row["gigabytes"] and base else None
            cells = [
                *(str(row[name]) for name in ("work", "batch", "precision", "method")),
                _format(row["seconds"] and 1e3 * row["seconds"], ".1f"),
                _format(row["ratio_to_plain"], ".2f"),
                _format(row["gigabytes"], ".2f"),
                _format(share, ".2f"),
                _format(row.get("error"), ".0e"),
                "; ".join(filter(None, [row.get("word", ""), row.get("note", "")])).replace("|", "/"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _format(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    main()
