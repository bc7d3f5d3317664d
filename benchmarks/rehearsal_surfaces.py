"""How far does the best step depend on the data? The same candidates on made-up and on real data.

    python benchmarks/rehearsal_surfaces.py prepare JOBS.json                      # here: settings with their noise
    python benchmarks/rehearsal_surfaces.py run JOBS.json --out DIR --shard 0/4    # there: torch and numpy are enough
    python benchmarks/rehearsal_surfaces.py report results/no-tuning               # development.md from stored lines
    python benchmarks/rehearsal_surfaces.py take results/no-tuning SHARDS...       # the default's lines made anew first

Only the development half of `fulcrum study no-tuning` is run. Per scenario: a rehearsal on made-up data, then all
candidates of its fine grid on the real data, and with --grid the fixed grid and moo too. One line of JSON per run, as
they come.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fulcrum.engines.batched import run_many
from fulcrum.runs import derive_federation
from fulcrum.runs.rehearsal import Candidate, read_rehearsal_facts
from fulcrum.runs.rehearsal.choice import rank, rehearse_on_stage, to_regrets
from fulcrum.runs.rehearsal.stage import Stage
from fulcrum.settings.schema import Settings
from fulcrum.study.job import StudyJob, job_from_json
from fulcrum.study.run_job import DatasetCache, prepare_job
from fulcrum.training.federation import Federation

GRID = [(C, lr) for C in (0.01, 0.1, 1.0, 10.0, 100.0) for lr in (0.0625, 0.25, 1.0, 4.0, 16.0)]
STARTS = [(0.01, 0.0625), (0.01, 16.0), (100.0, 0.0625), (100.0, 16.0), (0.01, 1.0)]
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
REAL_CANDIDATES = 12
"""Candidates of the fine grid that are played on real data, those that are best on made-up data."""
Line = dict[str, Any]


def apply_grid(settings: Settings, row: str, words: Line) -> Settings:
    """The settings of one run of the grid, of moo with a scaled first step, or of moo from another start."""
    if row == "fixed":
        return settings.replace(clip={"rule": "fixed", "C0": words["C"]}, train={"lr": words["lr"]})
    if row == "start":
        return settings.replace(clip={"rule": "moo", "C0": words["C"]}, train={"lr": words["lr"]})
    clip, b = settings.clip, words["b"]
    return settings.replace(clip={"rule": "moo", "balance": b * clip.balance, "reach": b * clip.reach})


class Player:
    """Plays one scenario after the other."""

    def __init__(self, device: str, stack: int) -> None:
        self.device, self.stack = device, stack
        self.cache = DatasetCache()

    def play(self, job: StudyJob, grid: bool) -> Iterator[Line]:
        """The lines of one scenario."""
        seeds = range(6 if job.settings.train.rounds <= 50 else 4)
        if grid:
            yield from self._play_grid(job, "fixed", [{"C": C, "lr": lr} for C, lr in GRID], seeds)
            yield from self._play_grid(job, "moo", [{"b": b} for b in SCALES], seeds)
            yield from self._play_grid(job, "start", [{"C": C, "lr": lr} for C, lr in STARTS], (0, 1))
        facts = read_rehearsal_facts(self._prepare(job))
        stage = Stage(replace(facts, settings=facts.settings.replace(run={"device": self.device})))
        answer = rehearse_on_stage(stage)
        chosen = {"scenario": job.dataset, "row": "answer", **answer.to_json(), "effort": asdict(facts.effort)}
        rounds = min(facts.rounds, facts.effort.rounds)
        numbers = {"default_step": facts.default_step, "work": facts.work, "batch": facts.batch, "rounds": rounds}
        yield {**chosen, **numbers, "parties": facts.parties, "examples": facts.examples}
        for place, (length, scores) in enumerate(stage.history):
            for candidate, own in scores.items():
                line = {"scenario": job.dataset, "row": "made-up", "stage": place, "rounds": length}
                yield {**line, **asdict(candidate), "scores": {name: round(v, 2) for name, v in own.items()}}
        yield from self._play_real(job, list_for_real_data(stage, answer.candidate), seeds)

    def _play_grid(self, job: StudyJob, row: str, cells: Sequence[Line], seeds: Sequence[int]) -> Iterator[Line]:
        runs = [(words, seed) for words in cells for seed in seeds]
        made = [
            self._prepare(replace(job, settings=apply_grid(job.settings, row, words).replace(run={"seed": seed})))
            for words, seed in runs
        ]
        for (words, seed), found in zip(runs, self._train(made), strict=True):
            yield {"scenario": job.dataset, "data": "real", "row": row, **words, "seed": seed, **found}

    def _play_real(self, job: StudyJob, candidates: Sequence[Candidate], seeds: Sequence[int]) -> Iterator[Line]:
        runs = [(candidate, seed) for candidate in candidates for seed in seeds]
        made = []
        for candidate, seed in runs:
            base = self._prepare(replace(job, settings=job.settings.replace(run={"seed": seed})))
            made.append(derive_federation(base, candidate.apply(base.settings, job.settings.train.steps)))
        for (candidate, seed), found in zip(runs, self._train(made), strict=True):
            words = {"mode": candidate.mode, "C": candidate.C, "step": candidate.step}
            yield {"scenario": job.dataset, "data": "real", "row": "candidate", **words, "seed": seed, **found}

    def _prepare(self, job: StudyJob) -> Federation:
        return prepare_job(job, self.cache, self.device, "tf32")

    def _train(self, federations: Sequence[Federation]) -> Iterator[Line]:
        size, left = self.stack, list(federations)
        while left:
            chunk, began = left[:size], time.monotonic()
            try:
                last = None
                for last in run_many(chunk):  # noqa: B007
                    pass
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                size = max(1, size // 2)
                continue
            assert last is not None
            left = left[size:]
            share = round((time.monotonic() - began) / len(chunk), 4)
            for accuracy, loss in zip(last.accuracy.nan_to_num(nan=0.0).tolist(), last.loss.tolist(), strict=True):
                short = float(f"{loss:.4g}") if math.isfinite(loss) else None
                yield {"score": round(100 * accuracy, 3), "loss": short, "seconds": share}


def list_for_real_data(stage: Stage, chosen: Candidate) -> list[Candidate]:
    """The chosen candidate, the other finalists, and the next best of the fine grid."""
    fine: dict[Candidate, dict[str, float]] = {}
    for _, scores in stage.history[:-1]:
        if any(int(name.rpartition("-")[2]) >= 10 for name in next(iter(scores.values()))):
            fine |= scores
    ranked = [candidate for candidate, _ in rank(to_regrets(fine), 0.2)]
    return list(dict.fromkeys([chosen, *stage.history[-1][1], *ranked]))[:REAL_CANDIDATES]


def estimate_cost(job: StudyJob) -> float:
    """About how long a scenario takes: client steps, more where the model goes set by set."""
    train, data = job.settings.train, job.settings.data
    parties = data.parties * train.participation
    return (
        (60 + train.rounds)
        * (1 + 0.3 * train.steps)
        * (1 + 0.02 * parties)
        * (1 + 2 * (":" in job.settings.model.name))
    )


def assign_shard(jobs: Sequence[StudyJob], index: int, count: int) -> list[StudyJob]:
    """The scenarios of one shard: the dearest first, each to the shard with the least to do."""
    loads, mine = [0.0] * count, []
    for job in sorted(jobs, key=lambda job: (-estimate_cost(job), job.dataset)):
        place = loads.index(min(loads))
        loads[place] += estimate_cost(job)
        if place == index:
            mine.append(job)
    return mine


Scores = dict[Any, dict[int, float]]


def read_lines(folder: Path, name: str) -> Iterator[Line]:
    """All lines of development/NAME.jsonl.gz."""
    file = folder / "development" / f"{name}.jsonl.gz"
    yield from map(json.loads, gzip.decompress(file.read_bytes()).decode().splitlines())


def make_report(folder: Path) -> str:
    """A table of the development half: best fixed cell, moo with its formula, moo as it is."""
    from fulcrum.study.figures import IntervalRow, draw_intervals
    from fulcrum.study.stats import compute_mean_interval
    from fulcrum.study.suite.summary import score_best_cell  # needs pydantic, which `run` must not

    grid: dict[str, Scores] = {}
    formula: dict[str, dict[int, float]] = {}
    for line in read_lines(folder, "grid"):
        if line["data"] == "real" and line["row"] == "fixed":
            grid.setdefault(line["scenario"], {}).setdefault((line["C"], line["lr"]), {})[line["seed"]] = line["score"]
        elif line["data"] == "real" and line["row"] == "moo" and line["b"] == 1.0:
            formula.setdefault(line["scenario"], {})[line["seed"]] = line["score"]
    default: dict[str, dict[int, float]] = {}
    answers: dict[str, Line] = {}
    for line in read_lines(folder, "default"):
        if line["row"] == "answer":
            answers[line["scenario"]] = line
        else:
            default.setdefault(line["scenario"], {})[line["seed"]] = line["score"]
    rows, regrets, former, drawn = [], [], [], []
    missing = [name for name in grid if name not in default]
    for name, cells in grid.items():
        if name in missing:
            continue
        seeds = set.intersection(*(set(own) for own in cells.values()))
        fixed, _ = score_best_cell({cell: {s: own[s] for s in seeds} for cell, own in cells.items()})
        best, old, own = (mean(scores.values()) for scores in (fixed, formula[name], default[name]))
        half = math.hypot(*(compute_mean_interval(list(scores.values())).half for scores in (fixed, default[name])))
        drawn.append(IntervalRow(name, best - own, min(half, 10.0), {"moo-unrehearsed": best - old}))
        chosen = Candidate(**answers[name]["candidate"]).describe() if name in answers else "nothing rehearsed"
        regrets.append(best - own)
        former.append(best - old)
        rows.append(
            f"| {name} | {len(default[name])} | {best:.1f} | {old:.1f} | {best - old:+.1f} | {own:.1f} | "
            f"{best - own:+.1f} ± {half:.1f} | {chosen} |"
        )
    lines = [
        f"{what}: mean regret {mean(found):.2f}, largest {max(found):.1f}; within 1.5 points "
        f"{sum(r <= 1.5 for r in found)}, within 3 {sum(r <= 3 for r in found)} of {len(found)}."
        for what, found in (("moo", regrets), ("moo-unrehearsed", former))
    ]
    lines += [f"Not run: {', '.join(missing)}."] if missing else []
    drawn.sort(key=lambda row: -row.value)
    words = "points below the best of 25 fixed cells (C, learning rate); negative: ahead of it"
    picture = draw_intervals(drawn, "The development half", words, "moo", bar=1.5)
    (folder / "development" / "regrets.svg").write_text(picture, encoding="utf-8")
    head = "| scenario | seeds | best fixed | unrehearsed | regret | moo | regret | chosen |\n|" + "---|" * 8
    commits = ", ".join(sorted({line["commit"] for line in read_lines(folder, "default") if line.get("commit")}))
    title = REPORT_TITLE.format(commit=commits or FIRST_COMMIT, later="" if commits else CHANGED_SINCE)
    return "\n".join([title, "", *lines, "", head, *rows, ""])


def take_shards(folder: Path, shards: Sequence[Path]) -> int:
    """Write development/default.jsonl.gz from the results of `fulcrum.study.suite.shards run`; returns the runs.

    Scenarios that the shards do not have keep the runs that are there."""
    from fulcrum.study.store import load_results

    known: set[str] = set()
    found = sorted(load_results(shards).values(), key=lambda record: (record["dataset"], record["seed"]))
    again, file = {record["dataset"] for record in found}, folder / "development" / "default.jsonl.gz"
    stored = gzip.decompress(file.read_bytes()).decode().splitlines() if file.is_file() else []
    lines: list[Line] = [line for line in map(json.loads, stored) if line["scenario"] not in again]
    for record in found:
        name = record["dataset"]
        if name not in known and record.get("rehearsed"):
            known.add(name)
            lines.append({"scenario": name, "row": "answer", "candidate": record["rehearsed"]})
        score = 100 * record["metrics"][record["score"]]
        score = round(score, 3) if math.isfinite(score) else 0.0
        own = {"seed": record["seed"], "score": score, "seconds": record["seconds"], "commit": record["commit"]}
        lines.append({"scenario": name, "row": "default", **own})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_bytes(gzip.compress(text.encode(), mtime=0))
    return len(found)


REPORT_TITLE = """# The development half of the no-tuning suite

28 scenarios on which the rehearsal was made: nothing here is a test of it. H200, tf32. Score in %. Best fixed: the best
of 25 (C, learning rate) cells, chosen on one half of its 2 to 6 seeds and scored on the other (grid at 6fed063). moo:
as the suite runs it (at {commit}), from the default start; other starts give the same run. ±: 95% half-width of the
difference, seeds not paired.{later}

What was learned on the way (development/rehearsal-1 and -2): choosing on made-up data of the real size by one seed and
two tasks was within 1.5 points on 25 of 28; a small run with batches of 32, no skew between parties and 100 rounds
merged into 15 chose steps that were too short (worst 35 points); with the run's own rounds, batches of 64 to 256 and
its skew it does not.
`python benchmarks/rehearsal_surfaces.py report results/no-tuning` made this page."""


FIRST_COMMIT = "2e707a5"
CHANGED_SINCE = """ After this run one thing changed: where rounds are merged, moo stays unless
something is better by more points, which keeps mnist-cnn-500x1 at moo's own step (column "unrehearsed")."""
"""Of lines that name no commit."""


def mean(values: Iterable[float]) -> float:
    """The mean; NaN of nothing."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["prepare", "run", "report", "take"])
    parser.add_argument("jobs", type=Path)
    parser.add_argument("shards", type=Path, nargs="*", help="for take: folders with results of the suite's shards")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stack", type=int, default=150)
    parser.add_argument("--grid", action="store_true", help="the fixed grid and moo on the real data too")
    parser.add_argument("--only", default="", help="a scenario's name, for a trial")
    words = parser.parse_args()
    if words.what == "prepare":
        from fulcrum.study.calibrate import calibrate_jobs
        from fulcrum.study.suite.jobs import make_suite_job
        from fulcrum.study.suite.scenarios import read_suite

        suite = read_suite()
        shown = [s for s in suite.scenarios if s.name not in suite.set_aside]
        jobs = calibrate_jobs(make_suite_job(suite, scenario, suite.default, (1.0, 1.0), 0) for scenario in shown)
        words.jobs.write_text(json.dumps([job.to_json() for job in jobs], default=str))
        print(f"{len(jobs)} scenarios")
        return
    if words.what == "take":
        print(f"{take_shards(words.jobs, words.shards)} runs of the default")
    if words.what in ("report", "take"):
        page = make_report(words.jobs)
        (words.jobs / "development.md").write_text(page, encoding="utf-8")
        print(page)
        return
    began, (index, count) = time.monotonic(), map(int, words.shard.split("/"))
    jobs = [job_from_json(job) for job in json.loads(words.jobs.read_text())]
    mine = [job for job in assign_shard(jobs, index, count) if words.only in ("", job.dataset)]
    player = Player(words.device, words.stack)
    words.out.mkdir(parents=True, exist_ok=True)
    with (words.out / f"surfaces-{index}.jsonl").open("a", buffering=1) as file:
        for job in mine:
            if words.seconds and time.monotonic() - began > words.seconds:
                print(f"shard {index}: time is up before {job.dataset}", flush=True)
                return
            start, lines = time.monotonic(), 0
            try:
                for line in player.play(job, words.grid):
                    file.write(json.dumps(line) + "\n")
                    lines += 1
            except Exception as error:
                print(f"FAILED {job.dataset}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            file.flush()
            took = time.monotonic() - start
            print(f"shard {index} {job.dataset}: {lines} lines, {took:.1f} s", flush=True)
    print(f"shard {index}: all done after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
