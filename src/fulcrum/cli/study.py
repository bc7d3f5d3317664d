"""`fulcrum study`: prepare jobs for other machines, merge their results, choose settings; the smaller studies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import view
from fulcrum.cli.failures import Interrupted
from fulcrum.cli.options import Debug, Json, Quiet, help_without_command
from fulcrum.errors import ConfigError

if TYPE_CHECKING:
    from fulcrum.study.backends import Clock
    from fulcrum.study.experiment import Experiment
    from fulcrum.study.job import Job

app = typer.Typer(help="Grids of runs: resumable, spread over machines, merged into tables.")

Datasets = Annotated[str, typer.Option("--datasets", metavar="A,B", help="Only these data sets.")]
Methods = Annotated[str, typer.Option("--methods", metavar="A,B", help="Only these rows of the table.")]
Epsilons = Annotated[str, typer.Option("--epsilons", metavar="A,B", help="Only these epsilons.")]
Seeds = Annotated[int, typer.Option("--seeds", min=0, help="Only the first so many seeds; 0: all.")]
Experiments = Annotated[
    Path | None, typer.Option("--experiments", help="Folder with paper.toml, search.toml and robustness.toml.")
]
Backend = Annotated[str, typer.Option("--backend", help="auto, sequential, processes, or stacked (GPU).")]
ShardOf = Annotated[str, typer.Option("--shard", help="i/n: run only part i of n, for several machines.")]
DataDir = Annotated[str, typer.Option("--data-dir", help="Folder that holds the data sets.")]
Seconds = Annotated[float, typer.Option("--seconds", help="Stop cleanly before this time is up; 0: no limit.")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Processes to run in; 0: one a core.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
ReportOnly = Annotated[bool, typer.Option("--report-only", help="Run nothing; write the outputs from what there is.")]


@app.callback(invoke_without_command=True)
def _top(context: typer.Context) -> None:
    """Grids of runs: resumable, spread over machines, merged into tables."""
    help_without_command(context)


def part_of(datasets: str, methods: str, epsilons: str) -> dict[str, Any]:
    """The lists that the options of a part of a study name; empty lists mean all."""
    try:
        numbers = [float(word) for word in _words(epsilons)]
    except ValueError:
        raise ConfigError(f"--epsilons {epsilons} is not a list of numbers; write for example 6.38,1.64.") from None
    return {"datasets": _words(datasets), "methods": _words(methods), "epsilons": numbers}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _paper(
    build: Callable[[Experiment], list[Job]], study: str = "paper"
) -> Callable[..., tuple[list[Job], tuple[str, ...]]]:
    def jobs(experiments: Path | None, **part: Any) -> tuple[list[Job], tuple[str, ...]]:
        from fulcrum.study.experiment import read_experiment

        experiment = read_experiment(experiments, study).only(**part)
        return build(experiment), experiment.unknown

    return jobs


def _stage(name: str, **words: Any) -> Callable[[Experiment], list[Job]]:
    def build(experiment: Experiment) -> list[Job]:
        from fulcrum.study import experiment as studies

        made: list[Job] = getattr(studies, name)(experiment, **words)
        return made

    return build


def _robustness(experiments: Path | None, **part: Any) -> tuple[list[Job], tuple[str, ...]]:
    from fulcrum.study.robustness import read_grid, robustness_jobs

    grid = read_grid(experiments, part["datasets"], part["methods"], part["epsilons"], part["seeds"])
    return robustness_jobs(grid), grid.unknown


STAGES: dict[str, Callable[..., tuple[list[Job], tuple[str, ...]]]] = {
    "paper-tune": _paper(_stage("tuning_jobs")),
    "paper": _paper(_stage("paper_jobs")),
    "protocol-tune": _paper(_stage("tuning_jobs", protocol=True)),
    "protocol": _paper(_stage("protocol_jobs")),
    "parties": _paper(_stage("parties_jobs")),
    "robustness": _robustness,
    "open-tune": _paper(_stage("tuning_jobs"), "open"),
    "open": _paper(_stage("paper_jobs"), "open"),
}
"""What `fulcrum study prepare` can prepare."""


@app.command("prepare")
def prepare(
    stage: Annotated[str, typer.Argument(metavar="STAGE", help=f"One of {', '.join(STAGES)}.")],
    datasets: Datasets = "",
    methods: Methods = "",
    epsilons: Epsilons = "",
    seeds: Seeds = 0,
    done: Annotated[
        list[Path], typer.Option("--done", help="Folder with finished runs to leave out; repeat for more.")
    ] = [Path("results/paper"), Path("results/robustness"), Path("results/open")],  # noqa: B006
    pack: Annotated[Path | None, typer.Option("--pack", help="Also write digits.npz into this folder.")] = None,
    experiments: Experiments = None,
    debug: Debug = False,
) -> None:
    """Print the jobs of a study as JSON, calibrated, for `python -m fulcrum.study.worker` on another machine."""
    from fulcrum.runs import folder as record
    from fulcrum.study.calibrate import calibrated
    from fulcrum.study.job import distinct
    from fulcrum.study.run_job import pack_digits
    from fulcrum.study.store import load, missing

    if stage not in STAGES:
        raise ConfigError(f"stage = {stage!r} is not known; choose one of {', '.join(STAGES)}.")
    jobs, unknown = STAGES[stage](experiments, seeds=seeds, **part_of(datasets, methods, epsilons))
    say_unknown(unknown)
    finished = load([folder for folder in done if folder.is_dir()])
    todo = missing(distinct(jobs), finished)
    view.say(f"{len(jobs)} jobs, {len(todo)} without a result")
    ready = [job.to_json() for job in calibrated(todo)]
    print(json.dumps(record.plain({"stage": stage, "date": record.now(), "jobs": ready}), separators=(",", ":")))
    if pack is not None:
        view.say(f"wrote {pack_digits(pack)}")


def say_unknown(unknown: tuple[str, ...]) -> None:
    """Name the methods that the files ask for and this version does not have."""
    if unknown:
        view.say(f"warning: {', '.join(unknown)} not built into this version; their rows stay empty.")


@app.command("merge")
def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders with *.jsonl from other machines.")],
    into: Annotated[Path | None, typer.Option("--into", help="Folder to merge into; default: the first DIR.")] = None,
    keep: Annotated[
        str, typer.Option("--keep", help="Where one job has two results: earliest or latest; default: an error.")
    ] = "",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Bring the results of several machines together; a run that lies there twice is kept once."""
    from fulcrum.study import store

    counts = store.merge(folders, into or folders[0], keep)
    if as_json:
        view.print_json(counts)
        return
    view.print_table(("study", "finished runs"), list(counts.items()))


@app.command("choose")
def choose(
    datasets: Datasets = "",
    methods: Methods = "",
    epsilons: Epsilons = "",
    results: Annotated[
        Path | None, typer.Option("--out", help="Folder with the finished trials; default results/STUDY.")
    ] = None,
    study: Annotated[str, typer.Option("--study", help="paper or open.")] = "paper",
    protocol: Annotated[bool, typer.Option("--protocol", help="For the paper's own protocol (one C0).")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Decide also where trials are missing.")] = False,
    experiments: Experiments = None,
    debug: Debug = False,
) -> None:
    """Choose each cell's settings from its finished trials, and write them to chosen.toml in experiments/."""
    from fulcrum.study import choosing, store
    from fulcrum.study.experiment import read_experiment

    experiment = read_experiment(experiments, study)
    part = experiment.only(**part_of(datasets, methods, epsilons))
    made, lacking = choosing.choose(part, store.load(results or Path("results") / study), protocol, partial=partial)
    if made:
        choosing.keep(experiment, made)
    rows = [
        (c.dataset, c.epsilon, c.row, c.trial, c.trials, 100 * c.validation_accuracy, 100 * c.worst, c.settings)
        for c in made
        if c.worst is not None  # always, of choices just made
    ]
    view.print_table(("data", "epsilon", "row", "trial", "of", "validation %", "worst trial %", "settings"), rows)
    if lacking:
        view.say(f"{len(lacking)} cells lack {sum(lacking.values())} trials, such as {next(iter(lacking))}")


def run_stage(
    jobs: list[Job], folder: Path, backend: str, data_dir: str, shard: str, clock: Clock, workers: int, quiet: bool
) -> int:
    """Run the jobs that have no result in the folder; returns how many of this shard are left."""
    from fulcrum.study import backends, worker
    from fulcrum.study.calibrate import calibrated
    from fulcrum.study.job import distinct, parse_shard
    from fulcrum.study.store import load, missing

    part = parse_shard(shard)
    every = distinct(jobs)
    todo = [job for job in missing(every, load(folder)) if part.holds(job)] if folder.is_dir() else every
    if not todo:
        return 0
    how = backends.How(data_dir, workers=workers, clock=clock, say=lambda line: view.say(line, quiet))
    try:
        return worker.work(calibrated(todo), folder, backend, how, part)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; finished runs are in {folder}, the same command goes on.") from None


@app.command("protocol")
def protocol(
    datasets: Datasets = "",
    methods: Methods = "",
    epsilons: Epsilons = "",
    seeds: Seeds = 0,
    out: Out = Path("results/paper"),
    shard: ShardOf = "0/1",
    backend: Backend = "auto",
    workers: Workers = 0,
    seconds: Seconds = 0.0,
    data_dir: DataDir = "",
    report_only: ReportOnly = False,
    experiments: Experiments = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The paper's own protocol as a further table: one shared C0 for all methods, nothing else of C tuned."""
    from fulcrum.study import report, store
    from fulcrum.study.backends import Clock
    from fulcrum.study.experiment import protocol_jobs, read_experiment

    experiment = read_experiment(experiments).only(**part_of(datasets, methods, epsilons), seeds=seeds)
    say_unknown(experiment.unknown)
    if not report_only:
        run_stage(protocol_jobs(experiment), out, backend, data_dir, shard, Clock(seconds), workers, quiet)
    report.write_table(out, experiment, store.load(out), "protocol")
    print((out / "protocol.md").read_text(encoding="utf-8"))


@app.command("parties")
def parties(
    datasets: Datasets = "",
    methods: Methods = "",
    epsilons: Epsilons = "",
    seeds: Seeds = 0,
    out: Out = Path("results/paper"),
    shard: ShardOf = "0/1",
    backend: Backend = "auto",
    workers: Workers = 0,
    seconds: Seconds = 0.0,
    data_dir: DataDir = "",
    report_only: ReportOnly = False,
    experiments: Experiments = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Accuracy over the number of parties, which the paper does not state, for moo and dp-sgd."""
    from fulcrum.study import report, store
    from fulcrum.study.backends import Clock
    from fulcrum.study.experiment import parties_jobs, read_experiment

    experiment = read_experiment(experiments).only(**part_of(datasets, methods, epsilons), seeds=seeds)
    say_unknown(experiment.unknown)
    if not report_only:
        run_stage(parties_jobs(experiment), out, backend, data_dir, shard, Clock(seconds), workers, quiet)
    report.write_parties(out, experiment, store.load(out))
    print((out / "parties.md").read_text(encoding="utf-8"))


@app.command("robustness")
def robustness(
    datasets: Datasets = "",
    methods: Methods = "",
    epsilons: Epsilons = "",
    seeds: Seeds = 0,
    out: Out = Path("results/robustness"),
    shard: ShardOf = "0/1",
    backend: Backend = "auto",
    workers: Workers = 0,
    seconds: Seconds = 0.0,
    data_dir: DataDir = "",
    report_only: ReportOnly = False,
    experiments: Experiments = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Every rule from every C0 and learning rate of a grid: does it need them tuned?"""
    from fulcrum.study import store
    from fulcrum.study.backends import Clock
    from fulcrum.study.robustness import read_grid, robustness_jobs
    from fulcrum.study.robustness_report import write_robustness

    part = part_of(datasets, methods, epsilons)
    grid = read_grid(experiments, part["datasets"], part["methods"], part["epsilons"], seeds)
    say_unknown(grid.unknown)
    if not report_only:
        run_stage(robustness_jobs(grid), out, backend, data_dir, shard, Clock(seconds), workers, quiet)
    write_robustness(out, grid, store.load(out))
    print((out / "summary.md").read_text(encoding="utf-8"))


@app.command("open")
def open_track(
    datasets: Datasets = "",
    methods: Methods = "",
    epsilons: Epsilons = "",
    seeds: Seeds = 0,
    out: Out = Path("results/open"),
    shard: ShardOf = "0/1",
    backend: Backend = "auto",
    workers: Workers = 0,
    seconds: Seconds = 0.0,
    data_dir: DataDir = "",
    report_only: ReportOnly = False,
    experiments: Experiments = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The open track: the same privacy with fixed scattering features, each party's own noise or one shared dose."""
    from fulcrum.study import report, store
    from fulcrum.study.backends import Clock
    from fulcrum.study.experiment import paper_jobs, read_experiment

    experiment = read_experiment(experiments, "open").only(**part_of(datasets, methods, epsilons), seeds=seeds)
    say_unknown(experiment.unknown)
    if not report_only:
        run_stage(paper_jobs(experiment), out, backend, data_dir, shard, Clock(seconds), workers, quiet)
    report.write_table(out, experiment, store.load(out))
    print((out / "table.md").read_text(encoding="utf-8"))
