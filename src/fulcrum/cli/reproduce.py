"""`fulcrum reproduce paper`: the paper's table under equal conditions, in one command that can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fulcrum.cli import view
from fulcrum.cli.options import JsonOption, show_help_without_command
from fulcrum.cli.study_options import StudyOptions, parse_epsilon_list, with_study_options
from fulcrum.errors import DataError

if TYPE_CHECKING:
    from fulcrum.study.job import StudyJob

app = typer.Typer(help="Studies of papers, done again.")


@app.callback(invoke_without_command=True)
def _show_help(context: typer.Context) -> None:
    """Studies of papers, done again."""
    show_help_without_command(context)


@app.command("paper")
@with_study_options
def paper(
    options: StudyOptions,
    subset: Annotated[bool, typer.Option("--subset", help="One reduced cell, in about a minute on two cores.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Choose settings first, where none are chosen yet.")] = False,
    tune_at: Annotated[str, typer.Option("--tune-at", metavar="A,B", help="Tune at these epsilons only.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Reproduce the paper's table: all methods, data sets and epsilons; run it again to continue."""
    from fulcrum.study import backends, choosing, report, store
    from fulcrum.study import experiment as studies

    whole = studies.read_experiment(options.experiments)
    part = options.part
    experiment = studies.reduce_to_one_cell(whole, part.datasets) if subset else whole
    experiment = experiment.only(part.datasets, part.methods, part.epsilons, part.seeds)
    folder = options.out or Path("results/subset" if subset else "results/paper")
    clock = backends.TimeBudget(options.seconds)

    def finished(jobs: list[StudyJob]) -> bool:
        return options.run_missing_jobs(jobs, folder, clock) == 0

    if tune and not subset:
        at = parse_epsilon_list(tune_at)
        trials = [
            job for job in studies.list_tuning_jobs(experiment, at=at) if not studies.has_choice_for_cell(whole, job)
        ]
        if not finished(trials):
            view.print_message("tuning is not finished; run the same command again to go on", options.quiet)
            return
        made, lacking = choosing.choose_settings(experiment, store.load_results(folder), at=at)
        whole = choosing.save_choices(whole, [c for c in made if not studies.has_choice_for_cell(whole, c)])
        experiment = studies.replace_choices(experiment, whole.choices)
        view.print_message(f"{len(made)} cells decided, {len(lacking)} lack trials", options.quiet)
    try:
        options.run_missing_jobs(studies.list_paper_jobs(experiment), folder, clock)
    except DataError as error:
        stand_ins = [name for name in whole.subset.get("stand_ins", {}) if subset and name not in experiment.datasets]
        if not stand_ins:
            raise
        words = f"fulcrum reproduce paper --subset --datasets {stand_ins[0]}"
        raise DataError(f"{str(error).rstrip('.')}; or run `{words}`, which downloads nothing.") from error
    cells = report.write_table(folder, experiment, store.load_results(folder))
    if as_json:
        view.print_json([cell.to_json() for cell in cells if cell.values])
        return
    print((folder / "table.md").read_text(encoding="utf-8"))
    view.print_message(
        f"written to {folder}/: table.md, table.tex, table.json, table-cells.json, figures/", options.quiet
    )
