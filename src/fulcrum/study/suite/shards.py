"""The suite on a machine with torch, numpy and scipy alone: a small file there, the results of a study back.

    python -m fulcrum.study.suite.shards pack PACK.json --half set-aside --part bars      # here: noise is calibrated
    python -m fulcrum.study.suite.shards run PACK.json --out DIR --shard 0/12             # there, in as many processes
    fulcrum study merge DIR --into results/no-tuning                                      # here again

A pack holds one calibrated job per scenario and method, and the starts and seeds that it stands for. A shard holds
whole entries, so that each is rehearsed once; the dearest come first. Results are written as they come, and what has a
result in --out is not run again: the same command goes on after a crash or when --seconds are up.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulcrum.study.backends import BackendOptions, TimeBudget, run_jobs
from fulcrum.study.job import StudyJob, job_from_json, parse_shard
from fulcrum.study.provenance import MadeBy, describe_command, get_source_commit
from fulcrum.study.run_job import describe_machine, make_job_record
from fulcrum.study.store import ShardWriter, load_results

if TYPE_CHECKING:
    from fulcrum.study.suite.scenarios import Suite

Pack = list[dict[str, Any]]
"""Entries {"scenario", "cost", "job": a calibrated job, "runs": [[cell, C0, lr, seed], ...]}."""
PARTS: Mapping[str, Callable[[Suite], Sequence[str]]] = {
    "bars": lambda suite: (suite.fixed, suite.default),
    "rivals": lambda suite: suite.rivals,
    "grid": lambda suite: (suite.fixed,),
    "default": lambda suite: (suite.default,),
    "rehearsed": lambda suite: (suite.default, "dp-sgd-rehearsed"),
}
"""The methods of a pack. bars: the grid with the default and its starts. default, rehearsed: from the default start
alone; the latter with the rehearsed rival beside it."""
DEFAULT_START_PARTS = ("default", "rehearsed")


def make_pack(half: str, part: str, seeds: int = 0) -> Pack:
    """The jobs of a part of the suite, calibrated.

    half: words of `select_part` with commas between them; "": all. seeds: at most so many, 0: all.
    """
    from fulcrum.study.calibrate import calibrate_jobs
    from fulcrum.study.suite.jobs import list_scenario_jobs
    from fulcrum.study.suite.scenarios import read_suite, select_part

    suite = select_part(read_suite(), half.split(",") if half else [], (), seeds)
    kept, alone = PARTS[part](suite), part in DEFAULT_START_PARTS
    pack: Pack = []
    for scenario in suite.scenarios:
        groups: dict[str, list[StudyJob]] = {}
        for job in list_scenario_jobs(suite, scenario):
            if job.row in kept and (not alone or job.cell.endswith("/C0=1,lr=1")):
                groups.setdefault(job.row, []).append(job)
        for jobs in groups.values():
            (base,) = calibrate_jobs(jobs[:1])
            runs = [[job.cell, job.settings.clip.C0, job.settings.train.lr, job.seed] for job in jobs]
            # What is rehearsed stays together; other runs are cut into pieces that shards can share.
            piece = len(runs) if base.settings.clip.rehearse else MOST_RUNS
            for start in range(0, len(runs), piece):
                some = runs[start : start + piece]
                cost = estimate_cost(base, len(some))
                pack.append({"scenario": scenario.name, "cost": round(cost, 1), "job": base.to_json(), "runs": some})
    return pack


MOST_RUNS = 150
"""Runs of an entry that is not rehearsed: one stack."""
STEP_SECONDS = {"resnet": 10e-3, "attention": 6e-3, "mean_of_words": 4e-3, "layer_norm_mlp": 2e-3, "small_cnn": 2e-3}
"""Seconds of one local step of one run in a stack, by model, with a dozen processes on an H200; others take 0.5 to
1.5 ms. A step of a whole stack takes `STACK_SECONDS` at least."""
STACK_SECONDS = 0.03


def estimate_cost(job: StudyJob, runs: int) -> float:
    """About how many seconds an entry takes."""
    train, model = job.settings.train, job.settings.model.name.rpartition(":")[2]
    each = STEP_SECONDS.get(model, 1.5e-3 if "cnn" in model else 0.5e-3)
    rehearsal = 15 + 2500 * each + 0.1 * min(train.rounds, 250) if job.settings.clip.rehearse else 0
    return 3 + rehearsal + max(runs * each, STACK_SECONDS) * train.rounds * train.steps


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


def assign_entries(pack: Pack, index: int, count: int) -> Pack:
    """The entries of one shard, the dearest first: each goes to the shard with the least to do."""
    loads: list[float] = [0.0] * count
    mine: Pack = []
    for entry in sorted(pack, key=lambda entry: (-entry["cost"], entry["runs"][0])):
        place = loads.index(min(loads))
        loads[place] += entry["cost"]
        if place == index:
            mine.append(entry)
    return mine


def run_shard(pack: Pack, out: Path, shard: tuple[int, int], how: BackendOptions, made_by: MadeBy | None = None) -> int:
    """Run what has no result yet; returns how many jobs are left."""
    done = load_results(out) if out.is_dir() else {}
    machine = {**describe_machine(how.device), "backend": "stacked", "precision": how.precision}
    left = 0
    with ShardWriter(out, f"runs-{socket.gethostname()}-{shard[0]}of{shard[1]}") as writer:
        for entry in assign_entries(pack, *shard):
            began = time.monotonic()
            for job, result in _run_entry(entry, done, how):
                if result is None:
                    left += 1
                else:
                    writer.add(make_job_record(job, result, machine, made_by))
            took = time.monotonic() - began
            how.say(f"{entry['scenario']} {entry['job']['row']} {len(entry['runs'])}: {took:.0f} s of {entry['cost']}")
    return left


def _run_entry(
    entry: Mapping[str, Any], done: Mapping[str, Any], how: BackendOptions
) -> Iterator[tuple[StudyJob, Any]]:
    """The jobs of an entry with their results; None for those that time or an error left undone."""
    todo = {job.id: job for job in expand_entry(entry) if job.id not in done}
    try:
        if todo and how.clock.remaining_seconds > 0:
            for job, result in run_jobs(list(todo.values()), "stacked", how):
                del todo[job.id]
                yield job, result
    except Exception as error:  # one method's failure must not cost the other scenarios
        how.say(f"FAILED {entry['scenario']} {entry['job']['row']}: {type(error).__name__}: {str(error)[:300]}")
    yield from ((job, None) for job in todo.values())


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns 0 when all is done, 3 when jobs are left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["pack", "run"])
    parser.add_argument("pack", type=Path)
    parser.add_argument(
        "--half",
        default="",
        help="development, set-aside, first-look, second-look, or names, with commas; default: all",
    )
    parser.add_argument("--part", default="bars", choices=list(PARTS))
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("shards"))
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--stack", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--commit", default="", help="commit of the source, where there is no git to tell it")
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
    made_by = MadeBy(words.commit or get_source_commit(), describe_command("fulcrum.study.suite.shards", argv))
    pack = json.loads(words.pack.read_text(encoding="utf-8"))
    left = run_shard(pack, words.out, (shard.index, shard.count), how, made_by)
    say(f"{left} jobs left" if left else "all done")
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
