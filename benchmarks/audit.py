"""The audit of right code: many small runs, and one run with many canaries, at each epsilon.

    python benchmarks/audit.py many --epsilon 1.64 --runs 12000 --out results/audit      # about 3 minutes of one core
    python benchmarks/audit.py one --epsilon 1.64 --canaries 20000 --out results/audit   # about 2 minutes
    python benchmarks/audit.py summary --out results/audit

many   Independent federations of one party with one canary, stacked (`engines.batched.run_many`, whose rounds call the
       mechanism's own `apply_rule` and `add_noise` on the streams of the reference engine). The canary is a record: a
       feature that nobody else has, and a target far away, so that its gradient is longer than C and points along one
       coordinate. In half of the runs a record of zeros has its place, the neighbour by zero-out. The auditor sees the
       final model, whose coordinate is the sum of all releases along the direction. Bounds: noise-fit, with the family
       Poisson(q, sigma')^T assumed; Clopper-Pearson, which assumes nothing. --shard I/N runs a part; `many` reads
       all parts that lie in --out, and computes the bounds once all runs are there.
one    One federation of four parties on the CIFAR CNN (d = 131,466) with made-up records of CIFAR's shape. Gradient
       canaries in coordinates of their own (`engines/canaries.py`), seen in every release. Bound: one-run f-DP with the
       hypothesised curve Poisson(q, sigma')^T.
summary   summary.json: from the above and from planted.json and clean.json, which `benchmarks/detectors.py` writes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import gzip
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from fulcrum.analysis.audit.bounds import (  # noqa: E402
    LowerBound,
    bound_by_known_samples,
    bound_by_noise_fit,
    bound_by_one_run,
    bound_by_one_run_fdp,
    bound_by_thresholds,
    guess_by_scores,
    plan_guesses,
    score_likelihood,
)
from fulcrum.analysis.audit.curves import make_gaussian_family, make_poisson_family  # noqa: E402
from fulcrum.analysis.audit.in_run import add_canaries, collect_view, join_views  # noqa: E402
from fulcrum.data import Dataset, Partition, from_arrays  # noqa: E402
from fulcrum.engines.batched.runs import run_many  # noqa: E402
from fulcrum.privacy.accounting import compute_epsilon  # noqa: E402
from fulcrum.privacy.events import Gaussian  # noqa: E402
from fulcrum.rng import make_randomness  # noqa: E402
from fulcrum.runs.execution import execute  # noqa: E402
from fulcrum.runs.preparation import prepare_unrehearsed  # noqa: E402
from fulcrum.settings.files import parse_settings  # noqa: E402
from fulcrum.settings.schema import Settings  # noqa: E402
from fulcrum.training.federation import Federation  # noqa: E402
from fulcrum.training.problem import get_private_seed, identify_releases  # noqa: E402

EPSILONS = (1.64, 3.61, 6.38)
DELTA, CONFIDENCE = 1e-5, 0.95
PLAIN_UNITS, FEATURES, STACK = 8, 4, 1000
REACH = 1e6
"""The canary's input: its gradient is far longer than C, and points along its own feature."""


def make_settings(epsilon: float, rounds: int, rate: float, **more: Any) -> Settings:
    """Plain DP-SGD steps at this epsilon, accounted by PLD: what the noise really costs, with nothing to spare."""
    words = {
        "privacy.epsilon": epsilon,
        "privacy.delta": DELTA,
        "privacy.accountant": "pld",
        "train.rounds": rounds,
        "train.rate": rate,
        "train.lr": 0.1,
        "train.ema": 0.0,  # the final model is the sum of all releases
        "data.partition": "iid",
        "data.min_examples": 1,
        "run.evaluate_every": rounds,
        **more,
    }
    return parse_settings({}, words, "dp-sgd")


# --- many runs ------------------------------------------------------------------------------------


def make_tiny_data() -> Dataset:
    """Units of plain records, then the canary and the record of zeros that takes its place."""
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(PLAIN_UNITS + 2, FEATURES + 1)
    x[:PLAIN_UNITS, :FEATURES] = torch.randn(PLAIN_UNITS, FEATURES, generator=generator)
    y = torch.randn(PLAIN_UNITS + 2, 1, generator=generator)
    x[PLAIN_UNITS, FEATURES], y[PLAIN_UNITS] = REACH, -1000 * REACH  # no weight brings the prediction near it
    y[PLAIN_UNITS + 1] = 0
    return from_arrays(x, y, x[:2], y[:2], task="regression", public=True)


def make_runs(base: Federation, first: int, count: int) -> Iterator[tuple[bool, Federation]]:
    """Federations with their own coin, split and randomness: (canary in, federation)."""
    problem = base.problem
    for seed in range(first, first + count):
        settings = base.settings.replace(run={"seed": seed})
        included = bool(torch.rand((), generator=torch.Generator().manual_seed(seed)) < 0.5)
        rows = torch.arange(PLAIN_UNITS + 1)
        rows[-1] += int(not included)
        partition = Partition(rows, torch.tensor([0, len(rows)]))
        identity = identify_releases(settings, problem.dataset, partition, problem.model, problem.layout)
        randomness = make_randomness("seeded", get_private_seed(settings), identity)
        own = dataclasses.replace(problem, partition=partition, randomness=randomness)
        yield included, dataclasses.replace(base, settings=settings, problem=own)


def play_many(base: Federation, first: int, count: int) -> list[tuple[int, int, float]]:
    """(run, canary in, sum of all releases along its direction in units of C) of runs first .. first + count - 1."""
    rows: list[tuple[int, int, float]] = []
    place, sign = find_canary_coordinate(base)
    start = float(base.problem.layout.flatten(base.problem.model)[place])
    batch = float(base.plan.rates[0]) * base.plan.units(0)
    unit = base.settings.train.lr * base.settings.clip.C0 / batch
    for begin in range(first, first + count, STACK):
        pairs = list(make_runs(base, begin, min(STACK, first + count - begin)))
        final: Tensor | None = None
        for result in run_many([federation for _, federation in pairs]):
            final = result.averaged if result.averaged is not None else final
        assert final is not None
        sums = (final[:, place].double() - start) / unit * sign
        rows += [(begin + i, int(pairs[i][0]), float(sums[i])) for i in range(len(pairs))]
    return rows


def find_canary_coordinate(base: Federation) -> tuple[int, float]:
    """The parameter that only the canary moves, and the sign of the move."""
    layout, model = base.problem.layout, base.problem.model
    marked = {name: torch.zeros_like(value) for name, value in layout.unflatten(layout.flatten(model)).items()}
    weight = next(value for value in marked.values() if value.ndim == 2)
    weight[0, FEATURES] = 1.0
    flat = torch.cat([value.flatten() for value in marked.values()])
    # The loss is (prediction - target)^2 / 2 or so, the target far below: steps go down, with the input's sign.
    return int(flat.argmax()), -1.0


def run_many_shard(args: argparse.Namespace) -> None:
    """Play a shard, store it, and bound once all runs are there."""
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    settings = make_settings(args.epsilon, args.rounds, args.rate, **{"data.parties": 1, "clip.C0": 1.0})
    base = prepare_tiny(settings)
    part, parts = (int(word) for word in args.shard.split("/"))
    size = math.ceil(args.runs / parts)
    first, count = (part - 1) * size, min(size, args.runs - (part - 1) * size)
    began, cpu = time.perf_counter(), time.process_time()
    rows = play_many(base, first, count)
    name = out / f"many-{args.epsilon:g}-{part}of{parts}.csv.gz"
    write_rows(name, ("run", "included", "sum"), rows)
    print(f"{name}: {count} runs in {time.perf_counter() - began:.0f} s, {time.process_time() - cpu:.0f} s of CPU")
    bound_many(out, args.epsilon, base, args.runs, time.process_time() - cpu)


def prepare_tiny(settings: Settings) -> Federation:
    """The federation whose data, model and plan all runs share; its plan counts the canary's place."""
    data = make_tiny_data()
    federation = prepare_unrehearsed(settings, data)
    from fulcrum.data import count_units_per_party
    from fulcrum.privacy.plan import make_plan

    partition = Partition(torch.arange(PLAIN_UNITS + 1), torch.tensor([0, PLAIN_UNITS + 1]))
    units = count_units_per_party(federation.problem.dataset, partition, "example")
    plan = make_plan(federation.settings, partition, units, federation.problem.rule)
    return dataclasses.replace(federation, plan=plan)


def bound_many(out: Path, epsilon: float, base: Federation, runs: int, cpu: float) -> None:
    """The bounds of all shards that lie in the folder, if they are all runs."""
    found = [row for file in sorted(out.glob(f"many-{epsilon:g}-*.csv.gz")) for row in read_rows(file)]
    table = np.array(sorted({int(row[0]): row for row in found}.values()), dtype=np.float64)
    if len(table) < runs:
        print(f"{len(table)} of {runs} runs are there")
        return
    included, sums = table[:, 1] > 0, table[:, 2]
    events = [Gaussian(float(base.plan.rates[0]), float(base.plan.sigmas[0]), base.settings.train.rounds)]
    rounds = base.settings.train.rounds
    spread = np.repeat(sums[:, None] / rounds, rounds, axis=1)
    fit = bound_by_noise_fit(spread, included, events, DELTA, CONFIDENCE)
    plain = bound_by_thresholds(sums, included, DELTA, CONFIDENCE)
    write_json(
        out / f"many-{epsilon:g}.json",
        {
            **describe_claim(epsilon, events),
            "runs": len(table),
            "parties": 1,
            "canaries_per_party": 1,
            "units": PLAIN_UNITS + 1,
            "parameters": base.problem.layout.dim,
            "cpu_seconds_of_last_shard": round(cpu, 1),
            "noise_fit": describe_bound(fit, epsilon),
            "clopper_pearson": describe_bound(plain, epsilon),
        },
    )


# --- one run --------------------------------------------------------------------------------------


def run_one(args: argparse.Namespace) -> None:
    """One audited run on the CIFAR CNN."""
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(args.seed)
    records = args.parties * args.units
    x = torch.randn(records, 3, 32, 32, generator=generator)
    y = torch.randint(0, 10, (records,), generator=generator)
    data = from_arrays(x, y, x[:8], y[:8], classes=10, public=True)
    more = {"data.parties": args.parties, "model.name": args.model, "run.seed": args.seed, "clip.rehearse": False}
    settings = make_settings(args.epsilon, args.rounds, args.rate, **more)
    began, cpu = time.perf_counter(), time.process_time()
    audited = add_canaries(prepare_unrehearsed(settings, data), args.canaries // args.parties)
    result = execute(audited.federation)
    owner, included = audited.canaries.party.numpy(), audited.canaries.included.numpy()
    views = [collect_view(audited.engine.seen, k, owner == k, included[owner == k]) for k in range(args.parties)]
    view = join_views(views)
    scores = score_likelihood(view.projections, view.events)
    guesses = guess_by_scores(scores, view.included, plan_guesses(len(scores), view.events, CONFIDENCE))
    fdp = bound_by_one_run_fdp(guesses, make_poisson_family(view.events), DELTA, CONFIDENCE)
    assert view.sampled is not None
    known = bound_by_known_samples(view.projections, view.sampled, view.included, view.events, DELTA, CONFIDENCE)
    rows = [(int(owner[i]), int(view.included[i]), float(scores[i])) for i in range(len(scores))]
    write_rows(out / f"one-{args.epsilon:g}-seed{args.seed}.csv.gz", ("party", "included", "score"), rows)
    claimed = max(result.epsilons)
    write_json(
        out / f"one-{args.epsilon:g}-seed{args.seed}.json",
        {
            **describe_claim(claimed, [Gaussian(view.events[0].rate, view.events[0].sigma, len(view.events))]),
            "parties": args.parties,
            "canaries": len(scores),
            "units_per_party": int(audited.federation.plan.units(0)),
            "model": args.model,
            "parameters": audited.federation.problem.layout.dim,
            "seed": args.seed,
            "seconds": round(time.perf_counter() - began, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "one_run_fdp": describe_bound(fdp, claimed),
            "one_run_fdp_gaussian_curve": describe_bound(
                bound_by_one_run_fdp(guesses, make_gaussian_family(), DELTA, CONFIDENCE), claimed
            ),
            "one_run": describe_bound(bound_by_one_run(guesses, DELTA, CONFIDENCE), claimed),
            "noise_fit": describe_bound(
                bound_by_noise_fit(view.projections, view.included, view.events, DELTA, CONFIDENCE), claimed
            ),
            "known_samples": describe_bound(known, claimed),
        },
    )


# --- files ----------------------------------------------------------------------------------------


def describe_claim(claimed: float, events: Sequence[Gaussian]) -> dict[str, Any]:
    """The claim, and what other accountants say of the same noise."""
    return {
        "claimed_epsilon": claimed,
        "delta": DELTA,
        "confidence": CONFIDENCE,
        "accountant": "pld",
        "epsilon_by_rdp": compute_epsilon(events, DELTA, "rdp"),
        "family": f"Poisson(q = {events[0].rate:g}, sigma')^{sum(event.count for event in events)}",
        "sigma": events[0].sigma,
    }


def describe_bound(bound: LowerBound, claimed: float) -> dict[str, Any]:
    """A bound beside the claim."""
    return {
        "epsilon": bound.epsilon,
        "over_claimed": bound.epsilon / claimed,
        "assumes": bound.assumes,
        "numbers": dict(bound.numbers),
    }


def write_rows(path: Path, names: Sequence[str], rows: Sequence[Sequence[float]]) -> None:
    """A table as CSV, gzipped, the same bytes for the same rows."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
        lines = [",".join(names)] + [",".join(f"{value:.7g}" for value in row) for row in rows]
        packed.write(("\n".join(lines) + "\n").encode())


def read_rows(path: Path) -> list[tuple[float, ...]]:
    """The rows of such a table."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        reader = csv.reader(file)
        next(reader)
        return [tuple(float(value) for value in row) for row in reader]


def write_json(path: Path, value: dict[str, Any]) -> None:
    """With the commit, the command and the machine."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    told = {
        **value,
        "commit": commit.stdout.strip(),
        "command": f"python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()},
    }
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def summarise(args: argparse.Namespace) -> None:
    """results/audit/summary.json from what lies in the folder."""
    out: Path = args.out
    many = [json.loads(path.read_text()) for path in sorted(out.glob("many-*.json"))]
    one = [json.loads(path.read_text()) for path in sorted(out.glob("one-*.json"))]
    found: dict[str, Any] = {}
    for path in (out / "planted.json", out / "clean.json"):
        found |= json.loads(path.read_text()) if path.is_file() else {}
    counts = {name: found.get(name) for name in ("planted", "planted_found", "clean_runs", "false_alarms")}
    by_epsilon = {
        f"{each['claimed_epsilon']:g}": {
            "runs": each["runs"],
            "noise_fit_over_claimed": each["noise_fit"]["over_claimed"],
            "noise_fit_over_epsilon_by_rdp": each["noise_fit"]["epsilon"] / each["epsilon_by_rdp"],
            "clopper_pearson_over_claimed": each["clopper_pearson"]["over_claimed"],
            "family": each["family"],
        }
        for each in many
    }
    ratios: dict[str, list[float]] = {}
    for each in one:
        ratios.setdefault(f"{each['claimed_epsilon']:.3g}", []).append(each["one_run_fdp"]["over_claimed"])
    medians = {name: float(np.median(values)) for name, values in ratios.items()}
    write_json(
        out / "summary.json",
        {
            **counts,
            "lower_over_claimed": min((each["noise_fit"]["over_claimed"] for each in many), default=None),
            "one_run_over_claimed": min((min(values) for values in ratios.values()), default=None),
            "one_run_over_claimed_median": min(medians.values(), default=None),
            "clopper_pearson_over_claimed": min(
                (each["clopper_pearson"]["over_claimed"] for each in many), default=None
            ),
            "confidence": CONFIDENCE,
            "delta": DELTA,
            "many_runs": by_epsilon,
            "one_run": {name: {"median": medians[name], "seeds": values} for name, values in ratios.items()},
            "canaries": one[0]["canaries"] if one else None,
            "parameters": one[0]["parameters"] if one else None,
            "commands": sorted({each["command"] for each in (*many, *one)}),
            "detectors": found.get("detectors"),
            "found_by": {row["bug"]: row["detectors"] for row in found.get("bugs", ())},
        },
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    many = parts.add_parser("many")
    many.add_argument("--epsilon", type=float, required=True)
    many.add_argument("--runs", type=int, default=12_000)
    many.add_argument("--rounds", type=int, default=8)
    many.add_argument("--rate", type=float, default=0.5)
    many.add_argument("--shard", default="1/1")
    many.set_defaults(do=run_many_shard)
    one = parts.add_parser("one")
    one.add_argument("--epsilon", type=float, required=True)
    one.add_argument("--canaries", type=int, default=20_000)
    one.add_argument("--parties", type=int, default=4)
    one.add_argument("--units", type=int, default=20, help="plain records per party")
    one.add_argument("--rounds", type=int, default=32)
    one.add_argument("--rate", type=float, default=0.5)
    one.add_argument("--model", default="cifar-cnn")
    one.add_argument("--seed", type=int, default=0)
    one.set_defaults(do=run_one)
    parts.add_parser("summary").set_defaults(do=summarise)
    for each in parts.choices.values():
        each.add_argument("--out", type=Path, default=ROOT / "results" / "audit")
    return parser.parse_args(argv)


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = parse_arguments()
    arguments.do(arguments)
