"""`fulcrum reproduce paper`: the paper's table under equal conditions, in one command that can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fulcrum.cli import view
from fulcrum.cli.options import Debug, Json, Quiet, help_without_command
from fulcrum.cli.study import (
    Backend,
    DataDir,
    Datasets,
    Epsilons,
    Experiments,
    Methods,
    ReportOnly,
    Seconds,
    Seeds,
    ShardOf,
    Workers,
    part_of,
    run_stage,
    say_unknown,
)

if TYPE_CHECKING:
    from fulcrum.study.job import Job

app = typer.Typer(help="Studies of papers, done again.")


@app.callback(invoke_without_command=True)
def _top(context: typer.Context) -> None:
    """Studies of papers, done again."""
    help_without_command(context)


@app.command("paper")
def paper(
    subset: Annotated[bool, typer.Option("--subset", help="One reduced cell, in about a minute on two cores.")] = False,
    datasets: Datasets = "",
    methods: Methods = "",
    epsilons: Epsilons = "",
    seeds: Seeds = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for results; default results/paper.")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Choose settings first, where none are chosen yet.")] = False,
    tune_at: Annotated[str, typer.Option("--tune-at", metavar="A,B", help="Tune at these epsilons only.")] = "",
    shard: ShardOf = "0/1",
    backend: Backend = "auto",
    workers: Workers = 0,
    seconds: Seconds = 0.0,
    data_dir: DataDir = "",
    report_only: ReportOnly = False,
    experiments: Experiments = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Reproduce the paper's table: all methods, data sets and epsilons; run it again to continue."""
    from fulcrum.study import backends, choosing, report, store
    from fulcrum.study import experiment as studies

    whole = studies.read_experiment(experiments)
    say_unknown(whole.unknown)
    experiment = (studies.subset(whole) if subset else whole).only(**part_of(datasets, methods, epsilons), seeds=seeds)
    folder = out or Path("results/subset" if subset else "results/paper")
    clock = backends.Clock(seconds)

    def run(jobs: list[Job]) -> bool:
        how = (folder, backend, data_dir, shard, clock, workers, quiet)
        return report_only or run_stage(jobs, *how) == 0

    if tune and not subset:
        at = part_of("", "", tune_at)["epsilons"]
        trials = [job for job in studies.tuning_jobs(experiment, at=at) if not studies.decided(whole, job)]
        if run(trials):
            made, lacking = choosing.choose(experiment, store.load(folder), at=at)
            whole = choosing.keep(whole, [c for c in made if not studies.decided(whole, c)])
            experiment = studies.with_choices(experiment, whole.choices)
            view.say(f"{len(made)} cells decided, {len(lacking)} lack trials", quiet)
        else:
            view.say("tuning is not finished; run the same command again to go on", quiet)
            return
    run(studies.paper_jobs(experiment))
    cells = report.write_table(folder, experiment, store.load(folder))
    if as_json:
        view.print_json([cell.to_json() for cell in cells if cell.values])
        return
    print((folder / "table.md").read_text(encoding="utf-8"))
    view.say(f"written to {folder}/: table.md, table.tex, table.json, table-cells.json, figures/", quiet)
