"""The stacked engine on a GPU: equality first, then examples a second, achieved TFLOP/s, and how the cost grows.

    PYTHONPATH=src python benchmarks/gpu.py --out results            # under 6 minutes on an H200
    PYTHONPATH=src python benchmarks/gpu.py --profile --only profile # the top kernels
    PYTHONPATH=src python benchmarks/gpu.py --tiny --device cpu      # does it run at all?

Writes bench-gpu.json, a list of {work, method, precision, runs, examples_per_second, tflops, ...}, and bench-gpu.md.
Needs torch and numpy alone, and no data: images are random bytes of the right shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_work import SIGMA, Clock, ceilings, federation, flops, images, wide_cnn

from fulcrum.clipping import RULES
from fulcrum.engines.batched import run_many
from fulcrum.engines.batched.server import BatchedServer
from fulcrum.engines.batched.single_step import SingleStepRounds
from fulcrum.engines.reference import ReferenceEngine
from fulcrum.engines.stacked import StackedEngine, build_stacked_core
from fulcrum.rng import SecureRandomness, SeededRandomness
from fulcrum.training.round import run_round
from fulcrum.training.snapshot import make_first_snapshot
from fulcrum.types import Assignment, RoundRequest

Row = dict[str, Any]
PRECISIONS = ("float32", "tf32", "bf16")
TOLERANCE = 1e-3
"""Of a client's whole update, relative. Sums in another order differ by 1e-6; an activation that lies within rounding
of its kink adds 1e-4 in the deeper CNN (seen on an H200 with 30 examples a client; none with 128)."""


class Bench:
    """Sizes, the device, and what was found so far."""

    def __init__(self, tiny: bool, device: torch.device) -> None:
        self.tiny, self.device, self.clock = tiny, device, Clock(device)
        self.began = time.perf_counter()
        self.n = {"mnist": 400, "cifar": 120} if tiny else {"mnist": 60_000, "cifar": 50_000}
        self.data = {work: images(work, n, 50 if tiny else 10_000) for work, n in self.n.items()}
        self.rows: list[Row] = []
        self.peaks: dict[str, float] = {}

    def say(self, words: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {words}", flush=True)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.say("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


# --- is it right? ---------------------------------------------------------------------------------


def equality(bench: Bench) -> None:
    """The stacked engine against the reference on the CPU, on the same streams; and the error of each precision."""
    cpu = torch.device("cpu")
    for work in ("mnist", "cifar"):
        data = images(work, 60 if bench.tiny else 400, 10, seed=7)
        for rule in RULES:
            for steps in (1, 2):
                given: dict[str, Any] = {
                    "rule": rule,
                    "parties": 4,
                    "randomness": SeededRandomness(5),
                    "steps": steps,
                    "rate": 0.3,
                }
                slow = federation(data, f"{work}-cnn", cpu, engine="reference", **given)
                fast = federation(data, f"{work}-cnn", bench.device, **given)
                error = _compare(slow, fast)
                bench.add(work=work, method=f"equality {rule} N={steps}", error=error)
                if error > TOLERANCE:
                    raise SystemExit(f"{work} {rule}: the stacked engine differs from the reference by {error:.2e}")
    for work in ("mnist", "cifar"):
        data = images(work, 64 if bench.tiny else 512, 10, seed=8)
        for precision in PRECISIONS:
            given = {"rule": "fixed", "parties": 4, "rate": 1.0, "randomness": SeededRandomness(5)}
            slow = federation(data, f"{work}-cnn", cpu, engine="reference", **given)
            fast = federation(data, f"{work}-cnn", bench.device, precision=precision, **given)
            each = federation(
                data,
                f"{work}-cnn",
                bench.device,
                precision=precision,
                **{**given, "parties": len(data.y)},
                partition="iid",
            )
            bench.add(
                work=work, method="precision", precision=precision, error=_compare(slow, fast), largest=_largest(each)
            )


def _request(fed: Any, device: torch.device, sigma: float | None = None, C: float = 0.05) -> RoundRequest:
    problem, plan = fed.problem, fed.plan
    state = problem.rule.init(dataclasses.replace(fed.settings.clip, C0=C), problem.shape)
    state = {name: value.to(device) for name, value in state.items()}
    tasks = tuple(plan.assignment(k, 0, 0.5) for k in range(plan.parties))
    if sigma is not None:
        tasks = tuple(Assignment(t.client, t.rate, sigma, t.steps, t.lr) for t in tasks)
    return RoundRequest(3, 10, problem.layout.flatten(problem.model).to(device), tasks, (state,) * len(tasks), 0.0)


def _compare(slow: Any, fast: Any) -> float:
    """Largest relative error of a client's update, with tiny noise so that the gradient is what is compared."""
    one = list(ReferenceEngine(slow.problem).run(_request(slow, slow.problem.device, 1e-4)))
    two = list(fast.engine.run(_request(fast, fast.problem.device, 1e-4)))
    return max(float((a.delta - b.delta.cpu()).norm() / a.delta.norm()) for a, b in zip(one, two, strict=True))


def _largest(each: Any) -> float:
    """With one example a party and no noise, the largest clipped contribution in units of C: must not pass 1."""
    C, worst = 0.05, 0.0
    for reply in each.engine.run(_request(each, each.problem.device, 0.0, C)):
        worst = max(worst, float(reply.delta.norm()) / (0.5 * C))
    return worst


# --- how fast is it? ------------------------------------------------------------------------------


def pooled(feds: list[Any], rows_limit: int = 0, **how: Any) -> SingleStepRounds:
    """The engine of `run_many` for these runs, to be played by hand."""
    core, _ = build_stacked_core(feds[0].problem, rows_limit)
    assert core is not None
    core.how = dataclasses.replace(core.how, **how)
    return SingleStepRounds(BatchedServer(feds, core))


def round_time(bench: Bench, player: SingleStepRounds, rounds: int) -> float:
    """Seconds a round, the recording of the graph left out."""

    def play() -> None:
        player.server.t.zero_()
        for t in range(rounds):
            player.run_rounds(t)

    seconds = bench.clock.time(play, 3) / rounds
    if not player.settled():
        bench.say("  (a sum was not finite or a sample did not fit)")
    return seconds


def throughput(bench: Bench) -> None:
    """Examples a second through the private step and through the same engine without privacy."""
    sizes = {"mnist": (1, 4, 16, 64), "cifar": (1, 4, 16)} if not bench.tiny else {"mnist": (1, 2), "cifar": (1,)}
    for work, counts in sizes.items():
        for runs in counts:
            for precision in PRECISIONS:
                times = {}
                for rule in ("none", "fixed", "moo") if runs == counts[-1] else ("none", "moo"):
                    sigma = None if rule == "none" else SIGMA
                    feds = [
                        federation(bench.data[work], f"{work}-cnn", bench.device, rule, s, precision, sigma=sigma)
                        for s in range(runs)
                    ]
                    player = pooled(feds)
                    rounds = 1 if bench.tiny else max(2, min(40, 100 // runs))
                    times[rule] = round_time(bench, player, rounds)
                    _report(bench, work, rule, precision, runs, times, player)
                    del player, feds
                    _free(bench)


def _report(
    bench: Bench, work: str, rule: str, precision: str, runs: int, times: dict[str, float], player: SingleStepRounds
) -> None:
    expected = runs * 0.05 * len(bench.data[work].y)
    per = flops(player.core.program, rule != "none")  # type: ignore[arg-type]
    rate = expected / times[rule]
    row: Row = {"work": work, "method": rule, "precision": precision, "runs": runs}
    row |= {"seconds_per_round": times[rule], "examples_per_second": rate, "tflops": rate * per / 1e12}
    row["of_peak"] = row["tflops"] / bench.peaks[precision] if bench.peaks else 0.0
    if rule != "none":
        row["over_non_private"] = times[rule] / times["none"]
    row["gigabytes"] = bench.clock.memory()
    if player.replayer.notes:
        row["notes"] = "; ".join(player.replayer.notes)
    bench.add(**row)


def _free(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def single(bench: Bench) -> None:
    """One 200-round MNIST run, 10 parties, q 0.05, N 1, alone: the first time, and once the kernels are loaded."""
    rounds = 5 if bench.tiny else 200
    for precision in PRECISIONS[: 1 if bench.tiny else 3]:
        for every in (10_000, 1):
            fed = federation(bench.data["mnist"], "mnist-cnn", bench.device, "moo", 0, precision, rounds=rounds)
            fed = dataclasses.replace(fed, settings=fed.settings.replace(run={"evaluate_every": every}))
            times = []
            for _ in range(2):
                began = bench.clock.wait()
                last = list(run_many([fed]))[-1]
                times.append(bench.clock.wait() - began)
            kind = "evaluated once" if every > 1 else "evaluated each round"
            bench.add(
                work="mnist", method=f"{rounds} rounds, {kind}", precision=precision, runs=1, seconds=times[1],
                seconds_first=times[0], accuracy=float(last.accuracy[0]),
            )  # fmt: skip
    fed = federation(bench.data["mnist"], "mnist-cnn", bench.device, "moo", 0, rounds=rounds)
    for attempt in ("first", "warm"):
        snapshot = make_first_snapshot(fed)
        began = bench.clock.wait()
        for t in range(rounds):
            snapshot, _, _ = run_round(fed, snapshot, range(10), t)
        seconds = bench.clock.wait() - began
        bench.add(work="mnist", method=f"{rounds} rounds through federate's play_round, {attempt}", seconds=seconds)
    assert isinstance(fed.engine, StackedEngine)
    bench.say(f"  notes: {fed.engine.notes}")


MODES: dict[str, dict[str, bool]] = {
    "seeded": {"secure": False, "proven": False},
    "fast-secure": {"secure": True, "proven": False},
    "proven": {"secure": True, "proven": True},
}
"""A simulation; secure randomness with fast arithmetic; secure randomness with proven arithmetic."""


def modes(bench: Bench) -> None:
    """The paper's CNNs seeded, secure and proven beside each other, in one engine: equality first, then the ratio."""
    cpu = torch.device("cpu")
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("mnist", "q 0.05, N=1", {}),
        ("mnist", "batch 64, N=10", {"steps": 10, "rate": 64 / 6000, "partition": "iid"}),
        ("cifar", "q 0.05, N=1", {}),
        ("cifar", "batch 64, N=2", {"steps": 2, "rate": 64 / 5000, "partition": "iid"}),
    ]
    for work in ("mnist", "cifar"):
        data = images(work, 60 if bench.tiny else 400, 10, seed=7)
        for mode, how in MODES.items():
            source = SecureRandomness() if how["secure"] else SeededRandomness(5)  # one secret for both engines
            given: dict[str, Any] = {"rule": "fixed", "parties": 4, "randomness": source, "steps": 2, "rate": 0.3}
            given["proven"] = how["proven"]
            error = _compare(
                federation(data, f"{work}-cnn", cpu, engine="reference", **given),
                federation(data, f"{work}-cnn", bench.device, **given),
            )
            bench.add(work=work, method=f"equality {mode}", error=error)
            if error > TOLERANCE:
                raise SystemExit(f"{work} {mode}: the stacked engine differs from the reference by {error:.2e}")
    for work, kind, train in cases:
        seeded = 0.0
        for mode, how in MODES.items():
            source = SecureRandomness() if how["secure"] else SeededRandomness(0)
            fed = federation(
                bench.data[work], f"{work}-cnn", bench.device, "moo", randomness=source, proven=how["proven"], **train
            )
            snapshot = make_first_snapshot(fed)
            seconds = bench.clock.time(functools.partial(run_round, fed, snapshot, range(10), 0), 7, 2)
            seeded = seeded or seconds
            bench.add(
                work=work, method=f"{mode}, {kind}", precision="float32", seconds_per_round=seconds,
                ratio_to_seeded=seconds / seeded, gigabytes=bench.clock.memory(),
            )  # fmt: skip
            del fed
            _free(bench)


def growth(bench: Bench) -> None:
    """Cost as parties, local steps, examples and width grow."""
    clock, device = bench.clock, bench.device
    for parties in (10, 100) if bench.tiny else (10, 100, 1000, 10_000):
        take = min(1.0, 100 / parties)
        fed = federation(
            bench.data["mnist"], "mnist-cnn", device, "moo", parties=parties, partition="iid", participation=take,
            rate=min(1.0, 0.05 * max(1, parties // 100)),
        )  # fmt: skip
        snapshot, who = make_first_snapshot(fed), list(range(min(parties, 100)))
        seconds = clock.time(functools.partial(run_round, fed, snapshot, who, 0), 5, 2)
        units = sum(fed.plan.assignment(k, 0, 1.0).rate * fed.plan.units(k) for k in who)
        bench.add(
            work="mnist", method=f"{parties} parties, {len(who)} take part", seconds_per_round=seconds,
            examples_per_second=units / seconds, gigabytes=clock.memory(),
        )  # fmt: skip
    for work, steps, rate in (("mnist", 10, 64 / 6000), ("cifar", 2, 64 / 5000)):
        for precision in PRECISIONS[: 1 if bench.tiny else 3]:
            fed = federation(
                bench.data[work],
                f"{work}-cnn",
                device,
                "moo",
                precision=precision,
                partition="iid",
                steps=steps,
                rate=rate,
            )
            snapshot = make_first_snapshot(fed)
            seconds = clock.time(functools.partial(run_round, fed, snapshot, range(10), 0), 5, 2)
            batch = rate * len(bench.data[work].y) / 10
            bench.add(
                work=work, method=f"N={steps}, expected batch {batch:.0f}", precision=precision,
                seconds_per_round=seconds, examples_per_second=rate * len(bench.data[work].y) * steps / seconds,
            )  # fmt: skip
    for rate in (0.05, 0.2) if bench.tiny else (0.01, 0.05, 0.2, 1.0):
        fed = federation(bench.data["mnist"], "mnist-cnn", device, "moo", rate=rate)
        player = pooled([fed])
        seconds = round_time(bench, player, 1 if bench.tiny else 10)
        count = rate * len(bench.data["mnist"].y)
        bench.add(
            work="mnist", method=f"{count:.0f} examples a step", seconds_per_round=seconds,
            examples_per_second=count / seconds, gigabytes=clock.memory(),
        )  # fmt: skip
    for work in ("mnist", "cifar"):
        for width in (1, 2) if bench.tiny else (1, 2, 4):
            fed = federation(bench.data[work], wide_cnn(work, width), device, "moo", precision="tf32")
            player = pooled([fed])
            seconds = round_time(bench, player, 1 if bench.tiny else 5)
            count = 0.05 * len(bench.data[work].y)
            work_done = flops(player.core.program, True) * count / seconds / 1e12  # type: ignore[arg-type]
            bench.add(
                work=work, method=f"width x{width}, d={fed.problem.layout.dim}", precision="tf32",
                seconds_per_round=seconds, examples_per_second=count / seconds, tflops=work_done,
                gigabytes=clock.memory(),
            )  # fmt: skip
            del player
            _free(bench)


def tune(bench: Bench) -> None:
    """Variants of the same pass: the library's convolution or patches, smaller pieces, no CUDA graph."""
    for work in ("mnist", "cifar"):
        for precision in ("float32", "tf32", "bf16"):
            for native in (True, False):
                for limit in (64,) if bench.tiny else (0, 512):
                    fed = federation(bench.data[work], f"{work}-cnn", bench.device, "moo", precision=precision)
                    player = pooled([fed], limit, native=native)
                    seconds = round_time(bench, player, 1 if bench.tiny else 10)
                    bench.add(
                        work=work, method="variant", precision=precision, native=native, rows_limit=limit,
                        seconds_per_round=seconds, examples_per_second=0.05 * len(bench.data[work].y) / seconds,
                    )  # fmt: skip
                    del player
                    _free(bench)


def profile(bench: Bench) -> None:
    """The kernels that take the time."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if bench.device.type == "cuda" else [])
    cases = [("mnist", 1, "float32"), ("mnist", 16, "tf32"), ("cifar", 1, "tf32"), ("cifar", 4, "bf16")]
    for work, runs, precision in cases[: 1 if bench.tiny else 4]:
        feds = [federation(bench.data[work], f"{work}-cnn", bench.device, "moo", s, precision) for s in range(runs)]
        player = pooled(feds)
        seconds = round_time(bench, player, 2)
        with profile(activities=kinds) as prof:
            for t in range(3):
                player.run_rounds(t)
            bench.clock.wait()
        bench.say(f"profile {work} runs {runs} {precision}: {seconds * 1e3:.3f} ms a round; 3 rounds below")
        key = "self_cuda_time_total" if bench.device.type == "cuda" else "self_cpu_time_total"
        found = sorted(prof.key_averages(), key=lambda e: -_self_time(e, key))[:28]
        for event in found:
            bench.say(f"    {_self_time(event, key) / 3e3:8.4f} ms  x{event.count / 3:5.1f}  {event.key[:150]}")
        del player
        _free(bench)


def _self_time(event: Any, key: str) -> float:
    """Microseconds; the attribute's name differs between versions of PyTorch."""
    return float(getattr(event, key.replace("cuda", "device"), getattr(event, key, 0.0)))


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "equality": equality,
    "modes": modes,
    "single": single,
    "throughput": throughput,
    "growth": growth,
    "tune": tune,
    "profile": profile,
}


def markdown(bench: Bench, facts: Row) -> Iterator[str]:
    """The results as a page."""
    yield "# The stacked engine on a GPU\n"
    where = f"{facts['device']}, {facts['date']}, PyTorch {facts['torch']}"
    yield f"{where}. Made-up images of the right shape; {facts['seconds']:.0f} s in all."
    peaks = ", ".join(f"{name} {value:.1f}" for name, value in bench.peaks.items())
    yield f"A large matrix product in the same run, TFLOP/s (copy: TB/s): {peaks}.\n"
    names = list(dict.fromkeys(name for row in bench.rows for name in row))
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for row in bench.rows:
        cells = (row.get(name, "") for name in names)
        yield "| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results", help="folder for bench-gpu.json and bench-gpu.md")
    parser.add_argument("--tiny", action="store_true", help="a few examples: to see that it runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help=f"sections, with commas: {', '.join(SECTIONS)}")
    parser.add_argument("--profile", action="store_true", help="print the top kernels too")
    args = parser.parse_args()
    bench = Bench(args.tiny, torch.device(args.device))
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    bench.peaks = ceilings(bench.device, bench.clock, 256 if args.tiny else 8192)
    bench.say(f"{name}, torch {torch.__version__}; ceilings {bench.peaks}")
    wanted = [w for w in args.only.split(",") if w] or ["equality", "modes", "single", "throughput", "growth"]
    if args.profile and "profile" not in wanted:
        wanted.append("profile")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for section in wanted:
        bench.say(f"--- {section}")
        try:
            SECTIONS[section](bench)
        except Exception:  # the sections are independent: one that breaks must not cost the others
            bench.say(f"{section} FAILED:\n{traceback.format_exc()}")
            bench.rows.append({"method": f"{section} FAILED"})
        facts: dict[str, Any] = {"device": name, "torch": torch.__version__, "date": datetime.date.today().isoformat()}
        facts |= {"seconds": time.perf_counter() - bench.began, "ceilings": bench.peaks}
        rows = [{**row, "device": name, "date": facts["date"]} for row in bench.rows]
        (out / "bench-gpu.json").write_text(json.dumps([*rows, {"method": "facts", **facts}], indent=1))
        (out / "bench-gpu.md").write_text("\n".join(markdown(bench, facts)) + "\n")


if __name__ == "__main__":
    main()
