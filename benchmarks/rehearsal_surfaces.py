"""How far does the best step depend on the data? Surfaces over (C, learning rate) on real and on made-up data.

    python benchmarks/rehearsal_surfaces.py prepare JOBS.json                      # here: settings with their noise
    python benchmarks/rehearsal_surfaces.py run JOBS.json --out DIR --shard 0/4    # there: torch and numpy are enough

Only the development half of `fulcrum study no-tuning` is run. One line of JSON per run, as they come.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fulcrum.data.made_up import VARIATIONS, make_up_dataset, read_data_facts
from fulcrum.engines.batched import run_many
from fulcrum.settings.schema import Settings
from fulcrum.study.job import StudyJob, job_from_json
from fulcrum.study.run_job import DatasetCache, prepare_job

GRID = [(C, lr) for C in (0.01, 0.1, 1.0, 10.0, 100.0) for lr in (0.0625, 0.25, 1.0, 4.0, 16.0)]
STARTS = [(0.01, 0.0625), (0.01, 16.0), (100.0, 0.0625), (100.0, 16.0), (0.01, 1.0)]
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
Run = tuple[str, str, dict[str, Any], int]
"""Data (real, easy, hard), row (fixed, linear, moo, start), overrides, seed."""


def list_fixed(data: str, row: str, seeds: Sequence[int]) -> list[Run]:
    """The grid, with a constant or a falling learning rate."""
    return [(data, row, {"C": C, "lr": lr}, seed) for C, lr in GRID for seed in seeds]


def list_moo(data: str, seeds: Sequence[int]) -> list[Run]:
    """moo with its first step length scaled by b."""
    return [(data, "moo", {"b": b}, seed) for b in SCALES for seed in seeds]


def list_pass(number: int, rounds: int) -> list[Run]:
    """The runs of one pass over all scenarios; earlier passes tell more."""
    made_up = [how.name for how in VARIATIONS[:2]]
    if number == 0:
        runs = [*list_fixed("real", "fixed", (0, 1)), *list_moo("real", (0, 1))]
        return runs + [run for name in made_up for run in (*list_fixed(name, "fixed", (0,)), *list_moo(name, (0,)))]
    if number == 1:
        runs = [*list_fixed("real", "linear", (0, 1))]
        return runs + [run for name in made_up for run in list_fixed(name, "linear", (0,))]
    more = (2, 3, 4, 5) if rounds <= 50 else (2, 3)
    starts = [("real", "start", {"C": C, "lr": lr}, seed) for C, lr in STARTS for seed in (0, 1)]
    return [*list_fixed("real", "fixed", more), *list_moo("real", more), *starts]


def apply_overrides(settings: Settings, row: str, words: dict[str, Any]) -> Settings:
    """The settings of one run."""
    if row in ("fixed", "linear"):
        schedule = "constant" if row == "fixed" else "linear"
        return settings.replace(
            clip={"rule": "fixed", "C0": words["C"]}, train={"lr": words["lr"], "schedule": schedule}
        )
    if row == "start":
        return settings.replace(clip={"rule": "moo", "C0": words["C"]}, train={"lr": words["lr"]})
    clip = settings.clip
    b = words["b"]
    return settings.replace(clip={"rule": "moo", "balance": b * clip.balance, "reach": b * clip.reach})


class Player:
    """Runs lists of runs of one scenario in stacks."""

    def __init__(self, device: str, stack: int) -> None:
        self.device, self.stack = device, stack
        self.caches: dict[str, DatasetCache] = {}

    def _get_cache(self, job: StudyJob, data: str) -> DatasetCache:
        if data == "real":
            return self.caches.setdefault("real", DatasetCache())
        key = f"{job.dataset}/{data}"
        if key not in self.caches:
            real = prepare_job(job, self._get_cache(job, "real"), self.device)
            facts = read_data_facts(real.problem.dataset, real.problem.model)
            how = next(v for v in VARIATIONS if v.name == data)
            count = len(real.problem.dataset.records)
            made = make_up_dataset(facts, how, count, 2000, seed=7, device=self.device)
            cache = DatasetCache()
            cache._whole[job.settings.data.source, job.settings.data.public, job.settings.task] = made
            self.caches[key] = cache
        return self.caches[key]

    def play(self, job: StudyJob, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
        groups: dict[tuple[str, str], list[Run]] = {}
        for run in runs:
            groups.setdefault((run[0], "moo" if run[1] in ("moo", "start") else "fixed"), []).append(run)
        for (data, _), members in groups.items():
            cache, size = self._get_cache(job, data), self.stack
            while members:
                chunk, began = members[:size], time.monotonic()
                try:
                    found = self._play_stack(job, cache, chunk, data)
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    size = max(1, size // 2)
                    continue
                members = members[size:]
                share = (time.monotonic() - began) / len(chunk)
                for (_, row, words, seed), (accuracy, loss) in zip(chunk, found, strict=True):
                    yield {
                        "scenario": job.dataset,
                        "data": data,
                        "row": row,
                        **words,
                        "seed": seed,
                        "score": round(100 * accuracy, 3),
                        "loss": float(f"{loss:.4g}") if math.isfinite(loss) else None,
                        "seconds": round(share, 3),
                    }

    def _play_stack(
        self, job: StudyJob, cache: DatasetCache, chunk: Sequence[Run], data: str
    ) -> list[tuple[float, float]]:
        federations = []
        for _, row, words, seed in chunk:
            settings = apply_overrides(job.settings, row, words).replace(run={"seed": seed})
            if data != "real" and settings.data.partition == "given":
                settings = settings.replace(data={"partition": "iid"})
            federations.append(prepare_job(replace(job, settings=settings), cache, self.device, "tf32"))
        last = None
        for last in run_many(federations):  # noqa: B007
            pass
        assert last is not None
        accuracy = last.accuracy.nan_to_num(nan=0.0).tolist()
        return list(zip(accuracy, last.loss.tolist(), strict=True))


def estimate_cost(job: StudyJob) -> float:
    """Examples of one run, weighed by whether the model goes set by set."""
    train = job.settings.train
    return train.rounds * train.steps * (1 + 5 * (":" in job.settings.model.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["prepare", "run"])
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stack", type=int, default=128)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--only", default="", help="a scenario's name, for a trial")
    words = parser.parse_args()
    if words.what == "prepare":
        from fulcrum.study.calibrate import calibrate_jobs
        from fulcrum.study.suite.jobs import make_suite_job
        from fulcrum.study.suite.scenarios import read_suite

        suite = read_suite()
        mine = [s for s in suite.scenarios if s.name not in suite.set_aside]
        jobs = calibrate_jobs(make_suite_job(suite, scenario, suite.default, (1.0, 1.0), 0) for scenario in mine)
        words.jobs.write_text(json.dumps([job.to_json() for job in jobs], default=str))
        print(f"{len(jobs)} scenarios")
        return
    began, (index, count) = time.monotonic(), map(int, words.shard.split("/"))
    jobs = sorted((job_from_json(job) for job in json.loads(words.jobs.read_text())), key=estimate_cost)
    mine = [job for place, job in enumerate(jobs) if place % count == index and words.only in ("", job.dataset)]
    player = Player(words.device, words.stack)
    words.out.mkdir(parents=True, exist_ok=True)
    with (words.out / f"surfaces-{index}.jsonl").open("a") as file:
        for number in range(words.passes):
            for job in mine:
                if words.seconds and time.monotonic() - began > words.seconds:
                    print(f"shard {index}: time is up in pass {number} before {job.dataset}", flush=True)
                    return
                start, lines = time.monotonic(), 0
                try:
                    for line in player.play(job, list_pass(number, job.settings.train.rounds)):
                        file.write(json.dumps(line) + "\n")
                        lines += 1
                    file.flush()
                except Exception as error:
                    print(f"FAILED {job.dataset}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                took = time.monotonic() - start
                print(f"shard {index} pass {number} {job.dataset}: {lines} runs, {took:.1f} s", flush=True)
    print(f"shard {index}: all done after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
