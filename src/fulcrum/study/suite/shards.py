"""The suite on a machine with torch, numpy and scipy alone: a small file there, the results of a study back.

    python -m fulcrum.study.suite.shards pack PACK.json --half set-aside --part bars      # here: noise is calibrated
    python -m fulcrum.study.suite.shards run PACK.json --out DIR --shard 0/12             # there, in as many processes
    fulcrum study merge DIR --into results/no-tuning                                      # here again

A pack holds one calibrated job per scenario and method, and the starts and seeds that it stands for. A shard holds whole
scenarios, so that each is rehearsed once; the dearest come first. Results are written as they come, and what has a
result in --out is not run again: the same command goes on after a crash or when --seconds are up.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fulcrum.study.backends import BackendOptions, TimeBudget, run_jobs
from fulcrum.study.job import StudyJob, job_from_json, parse_shard
from fulcrum.study.run_job import describe_machine, make_job_record
from fulcrum.study.store import ShardWriter, load_results

Pack = list[dict[str, Any]]
"""Entries {"scenario", "cost", "job": a calibrated job, "runs": [[cell, C0, lr, seed], ...]}."""
PARTS = ("bars", "rivals", "default")
"""What a pack holds: the grid with the default and its starts; the rivals; the default from its own start alone."""


def make_pack(half: str, part: str, seeds: int = 0) -> Pack:
    """The jobs of one half of the suite, calibrated. seeds: at most so many, 0: all."""
    from fulcrum.study.calibrate import calibrate_jobs
    from fulcrum.study.suite.jobs import list_scenario_jobs
    from fulcrum.study.suite.scenarios import read_suite, select_part

    suite = select_part(read_suite(), [half] if half else [], (), seeds)
    kept = {"bars": (suite.fixed, suite.default), "rivals": suite.rivals, "default": (suite.default,)}[part]
    pack: Pack = []
    for scenario in suite.scenarios:
        groups: dict[str, list[StudyJob]] = {}
        for job in list_scenario_jobs(suite, scenario):
            if job.row in kept and (part != "default" or job.cell.endswith("/C0=1,lr=1")):
                groups.setdefault(job.row, []).append(job)
        for jobs in groups.values():
            (base,) = calibrate_jobs(jobs[:1])
            runs = [[job.cell, job.settings.clip.C0, job.settings.train.lr, job.seed] for job in jobs]
            cost = estimate_cost(base, len(runs))
            pack.append({"scenario": scenario.name, "cost": round(cost), "job": base.to_json(), "runs": runs})
    return pack


def estimate_cost(job: StudyJob, runs: int) -> float:
    """About how long the runs take, in units that are the same for all scenarios."""
    train, own = job.settings.train, ":" in job.settings.model.name
    stacks = 1 + runs / 60
    rehearsal = 20 if job.settings.clip.rehearse else 0
    return (stacks + rehearsal) * (40 + min(train.rounds, 400)) * (1 + 0.25 * train.steps) * (2.5 if own else 1.0)


def expand_entry(entry: Mapping[str, Any]) -> list[StudyJob]:
    """The jobs that an entry stands for; their ids are those of the suite."""
    base = job_from_json(entry["job"])
    return [
        replace(
            base,
            cell=cell,
            settings=base.settings.replace(clip={"C0": C0}, train={"lr": lr}, run={"seed": seed}),
        )
        for cell, C0, lr, seed in entry["runs"]
    ]


def assign_scenarios(pack: Pack, index: int, count: int) -> list[str]:
    """The scenarios of one shard, the dearest first: each goes to the shard with the least to do."""
    costs: dict[str, float] = {}
    for entry in pack:
        costs[entry["scenario"]] = costs.get(entry["scenario"], 0.0) + entry["cost"]
    loads, mine = [0.0] * count, []
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        place = loads.index(min(loads))
        loads[place] += costs[name]
        if place == index:
            mine.append(name)
    return mine


def run_shard(pack: Pack, out: Path, shard: tuple[int, int], how: BackendOptions) -> int:
    """Run what has no result yet; returns how many jobs are left."""
    done = load_results(out) if out.is_dir() else {}
    machine = {**describe_machine(how.device), "backend": "stacked", "precision": how.precision}
    left = 0
    with ShardWriter(out, f"runs-{socket.gethostname()}-{shard[0]}of{shard[1]}") as writer:
        for name in assign_scenarios(pack, *shard):
            began = time.monotonic()
            for job, result in _run_scenario(pack, name, done, how):
                if result is None:
                    left += 1
                else:
                    writer.add(make_job_record(job, result, machine))
            how.say(f"{name}: {time.monotonic() - began:.0f} s")
    return left


def _run_scenario(
    pack: Pack, name: str, done: Mapping[str, Any], how: BackendOptions
) -> Iterator[tuple[StudyJob, Any]]:
    """The jobs of a scenario with their results; None for those that time or an error left undone."""
    for entry in pack:
        if entry["scenario"] != name:
            continue
        todo = {job.id: job for job in expand_entry(entry) if job.id not in done}
        try:
            if how.clock.remaining_seconds > 0:
                for job, result in run_jobs(list(todo.values()), "stacked", how):
                    del todo[job.id]
                    yield job, result
        except Exception as error:  # one method's failure must not cost the other scenarios
            how.say(f"FAILED {name} {entry['job']['row']}: {type(error).__name__}: {str(error)[:300]}")
        yield from ((job, None) for job in todo.values())


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns 0 when all is done, 3 when jobs are left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["pack", "run"])
    parser.add_argument("pack", type=Path)
    parser.add_argument("--half", default="", help="development, set-aside, or one scenario; default: all")
    parser.add_argument("--part", default="bars", choices=PARTS)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("shards"))
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--stack", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=0.0)
    words = parser.parse_args(argv)
    if words.what == "pack":
        pack = make_pack(words.half, words.part, words.seeds)
        words.pack.write_text(json.dumps(pack, default=str), encoding="utf-8")
        print(f"{len({e['scenario'] for e in pack})} scenarios, {sum(len(e['runs']) for e in pack)} runs")
        return 0
    clock = TimeBudget(words.seconds)

    def say(line: str) -> None:
        print(f"[{words.shard}] {line}", flush=True)

    how = BackendOptions(words.data_dir, words.device, words.stack, words.precision, 0, clock, say)
    shard = parse_shard(words.shard)
    left = run_shard(json.loads(words.pack.read_text(encoding="utf-8")), words.out, (shard.index, shard.count), how)
    say(f"{left} jobs left" if left else "all done")
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
