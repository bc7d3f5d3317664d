"""One training repeated over seeds, and its means: for examples and reports.

repeats = repeat(lambda seed: fulcrum.train(data, seed=seed, epsilon=1.0), seeds=range(10))
repeats.mean("accuracy"), repeats.mean_over_parties("accuracy"), repeats.epsilon
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fulcrum
from fulcrum.runs import folder as record
from fulcrum.runs.result import Result
from fulcrum.study.provenance import get_source_commit


@dataclass(frozen=True)
class Repeats:
    """Results of the same training with several seeds. seconds: of all of them together."""

    seeds: tuple[int, ...]
    results: tuple[Result, ...]
    seconds: float = 0.0

    @property
    def epsilon(self) -> float:
        """The largest of any seed and party: each run's own, as for data that is used once."""
        return max(result.epsilon for result in self.results)

    @property
    def delta(self) -> float:
        """Common to all runs."""
        return self.results[0].delta

    def mean(self, metric: str) -> float:
        """The metric's mean over the seeds, on all scored records."""
        return compute_mean(result.metrics.get(metric, math.nan) for result in self.results)

    def mean_over_parties(self, metric: str) -> float:
        """The mean over the seeds of the mean over the parties; NaN where scored records name no party."""
        return compute_mean(result.mean_over_parties.get(metric, math.nan) for result in self.results)

    def deviation(self, metric: str, parties: bool = False) -> float:
        """The standard deviation over the seeds, of the value on all records or of the mean over the parties."""
        values = [(each.mean_over_parties if parties else each.metrics)[metric] for each in self.results]
        mean = compute_mean(values)
        return math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))

    def to_json(self) -> dict[str, Any]:
        """Plain values: epsilon, delta, every metric's mean over the seeds, baselines, the reference if there is one.

        `mean_over_parties` is that of the accuracy, or of the score where there is no accuracy.
        """
        first = self.results[0]
        score = str(first.summary["score"])
        main = "accuracy" if "accuracy" in first.metrics else score
        found: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta}
        found |= {name: self.mean(name) for name in dict.fromkeys([main, score, *first.metrics])}
        if first.party_metrics:
            found["mean_over_parties"] = self.mean_over_parties(main)
            found["parties"] = {
                party: compute_mean(result.party_metrics[party][main] for result in self.results)
                for party in first.party_metrics
            }
        found["deviation"] = self.deviation(main, parties=bool(first.party_metrics))
        if first.baseline:
            found["baseline"] = first.baseline.get(main)
        if first.facts.party_baselines:
            found["baseline_over_parties"] = first.facts.mean_baseline.get(main)
        if first.reference:
            found["without_privacy"] = compute_mean(each.reference["metrics"][main] for each in self.results)
            if first.party_metrics:
                found["without_privacy_over_parties"] = compute_mean(
                    each.reference["mean_over_parties"][main] for each in self.results
                )
        return {**found, "seeds": list(self.seeds), "seconds": round(self.seconds, 1)}


def compute_mean(values: Iterable[float]) -> float:
    """The mean of the values that are numbers; NaN where there is none."""
    known = [float(value) for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def repeat(train_once: Callable[[int], Result], seeds: Iterable[int]) -> Repeats:
    """Train once per seed."""
    began = time.perf_counter()
    chosen = tuple(seeds)
    return Repeats(chosen, tuple(train_once(seed) for seed in chosen), time.perf_counter() - began)


# --- examples as programs -------------------------------------------------------------------------


def parse_example_options(words: str, seeds: Iterable[int]) -> argparse.Namespace:
    """The options that every example takes: json, seeds, made_up, quick, reference, out."""
    parser = argparse.ArgumentParser(description=words.strip().splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds), help="seeds to average over")
    parser.add_argument("--made-up", action="store_true", help="train on the small made-up stand-in")
    parser.add_argument("--quick", action="store_true", help="little made-up data and few rounds: to see that it runs")
    parser.add_argument("--reference", action="store_true", help="train without privacy, too")
    parser.add_argument("--out", type=Path, help="write the result with its commit, command, hardware and date")
    options = parser.parse_args()
    options.made_up = options.made_up or options.quick
    return options


def report(name: str, repeats: Repeats, options: argparse.Namespace, **facts: Any) -> None:
    """Print what an example found, for people or as one line of JSON; with --out also to a file."""
    values = record.to_json_value({"example": name, **repeats.to_json(), **facts})
    if options.out:
        made: Mapping[str, Any] = {
            **values,
            "command": shlex.join(["python", *sys.argv]),
            "version": fulcrum.__version__,
            "commit": get_source_commit(),
            "hardware": record.describe_environment(torch.device("cpu")),
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(record.to_json_text(made))
    if options.json:
        print(json.dumps(values))
        return
    for key, value in values.items():
        print(f"{key:<30}{value:.4g}" if isinstance(value, float) else f"{key:<30}{value}")


def find_example_file(*parts: str) -> Path | None:
    """A file of real data below a folder of FULCRUM_DATA (a path list); None where there is none."""
    from fulcrum.data.sources.public.registry import search_folders

    for folder in search_folders(""):
        file = Path(folder).joinpath(*parts)
        if file.is_file():
            return file
    return None
