"""`fulcrum study`: run a study by its name; prepare jobs for other machines, merge their results, choose settings."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fulcrum.cli import view
from fulcrum.cli.options import DebugOption, JsonOption, show_help_without_command
from fulcrum.cli.study_options import (
    DatasetsOption,
    EpsilonsOption,
    ExperimentsOption,
    MethodsOption,
    SeedsOption,
    StudyOptions,
    make_study_part,
    warn_unknown_methods,
    with_study_options,
)
from fulcrum.errors import ConfigError
from fulcrum.settings.registry import find_nearest_name

BUILT_IN_STUDIES: dict[str, str] = {
    "paper": "The paper's table under equal conditions; `fulcrum reproduce paper` can also tune.",
    "protocol": "The paper's own protocol as a further table: one shared C0 for all methods, nothing else of C tuned.",
    "parties": "The score over the number of parties, which the paper does not state, for moo and dp-sgd.",
    "robustness": "Every rule from every C0 and learning rate of a grid: does it need them tuned?",
    "no-tuning": "The default against the best fixed C and learning rate, over many federations.",
    "kept": "The rehearsed default beside the formula that it replaced: nothing may fall.",
    "zero-trials": "The paper's cells with nothing tuned on real data: settings from `fulcrum plan --advise`.",
    "pairwise": "Shared noise and masks that cancel: accuracy by how many parties may collude with the server.",
    "open": "The open track: the same privacy with fixed features, each party's own noise or one shared dose.",
}
"""What `fulcrum study --help` says of the studies that come with Fulcrum."""


def make_study_command(name: str, commands: tuple[str, ...] = ()) -> Callable[..., None]:
    """The command that runs the study of that name and prints its page.

    commands: command names to suggest if the name is not a study.
    """

    def run_study(options: StudyOptions) -> None:
        from fulcrum.study import store
        from fulcrum.study.backends import TimeBudget
        from fulcrum.study.studies import list_study_names, read_study, split_study_path

        near = find_nearest_name(name, commands)
        if near and split_study_path(name, None)[0] == name and name not in list_study_names(options.experiments):
            raise ConfigError(f"study {name} is neither a command nor a study; did you mean study {near}?")
        clock = TimeBudget(options.seconds)  # started before the jobs are made: the machine's limit includes that time
        study = read_study(name, options.experiments, options.part)
        warn_unknown_methods(study.unknown)
        folder = options.out or study.results
        options.run_missing_jobs(study.jobs(), folder, clock)
        study.write(folder, store.load_results(folder))
        print((folder / study.page).read_text(encoding="utf-8"))

    run_study.__doc__ = BUILT_IN_STUDIES.get(name, f"The study {name}.")
    return with_study_options(run_study)


class StudyGroup(TyperGroup):
    """A word that is no command is the name or path of a study: a user's own needs no registration."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, else the one that runs that study."""
        return super().get_command(ctx, cmd_name) or _make_own_study_command(cmd_name, tuple(self.commands))

    def list_commands(self, ctx: Any) -> list[str]:
        """For the help: the commands, and the studies of ./experiments."""
        from fulcrum.study.experiment import WORKING_FOLDER, list_study_files

        return list(dict.fromkeys([*super().list_commands(ctx), *list_study_files(WORKING_FOLDER)]))


@functools.cache
def _make_own_study_command(name: str, commands: tuple[str, ...]) -> Any:
    single = typer.Typer()
    single.command(name)(make_study_command(name, commands))
    return typer.main.get_command(single)


app = typer.Typer(cls=StudyGroup, help="Grids of runs: resumable, spread over machines, merged into tables.")


@app.callback(invoke_without_command=True)
def _show_help(context: typer.Context) -> None:
    """Grids of runs: resumable, spread over machines, merged into tables."""
    show_help_without_command(context)


@app.command("prepare")
def prepare(
    stage: Annotated[
        str,
        typer.Argument(
            metavar="STAGE", help=f"A study ({', '.join(BUILT_IN_STUDIES)}, or your own), or NAME-tune for its trials."
        ),
    ],
    datasets: DatasetsOption = "",
    methods: MethodsOption = "",
    epsilons: EpsilonsOption = "",
    seeds: SeedsOption = 0,
    done: Annotated[
        list[Path], typer.Option("--done", help="Folder with finished runs to leave out; repeat for more.")
    ] = [Path("results") / name for name in ("paper", "robustness", "open", "no-tuning", "pairwise")],  # noqa: B006
    pack: Annotated[
        Path | None, typer.Option("--pack", help="Also write digits.npz into this folder, for other programs.")
    ] = None,
    experiments: ExperimentsOption = None,
    debug: DebugOption = False,
) -> None:
    """Print the jobs of a study as JSON, calibrated, for `python -m fulcrum.study.worker` on another machine."""
    from fulcrum.runs import folder as record
    from fulcrum.study.calibrate import calibrate_jobs
    from fulcrum.study.job import drop_duplicate_jobs
    from fulcrum.study.run_job import write_digits_npz
    from fulcrum.study.store import find_missing_jobs, load_finished_ids
    from fulcrum.study.studies import list_stage_jobs

    jobs, unknown = list_stage_jobs(stage, experiments, make_study_part(datasets, methods, epsilons, seeds))
    warn_unknown_methods(unknown)
    todo = find_missing_jobs(drop_duplicate_jobs(jobs), load_finished_ids(done))
    view.print_message(f"{len(jobs)} jobs, {len(todo)} without a result")
    ready = [job.to_json() for job in calibrate_jobs(todo)]
    print(
        json.dumps(
            record.to_json_value({"stage": stage, "date": record.current_utc_time(), "jobs": ready}),
            separators=(",", ":"),
        )
    )
    if pack is not None:
        view.print_message(f"wrote {write_digits_npz(pack)}")


@app.command("merge")
def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders with *.jsonl from other machines.")],
    into: Annotated[Path | None, typer.Option("--into", help="Folder to merge into; default: the first DIR.")] = None,
    keep: Annotated[
        str, typer.Option("--keep", help="Where one job has two results: earliest or latest; default: an error.")
    ] = "",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Merge the results of several machines; a run that occurs twice is kept once."""
    from fulcrum.study import store

    counts = store.merge_results(folders, into or folders[0], keep)
    if as_json:
        view.print_json(counts)
        return
    view.print_table(("study", "finished runs"), list(counts.items()))


@app.command("choose")
def choose(
    datasets: DatasetsOption = "",
    methods: MethodsOption = "",
    epsilons: EpsilonsOption = "",
    results: Annotated[
        Path | None, typer.Option("--out", help="Folder with the finished trials; default results/STUDY.")
    ] = None,
    study: Annotated[str, typer.Option("--study", help="paper, open, or your own.")] = "paper",
    protocol: Annotated[bool, typer.Option("--protocol", help="For the paper's own protocol (one C0).")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Decide also where trials are missing.")] = False,
    experiments: ExperimentsOption = None,
    debug: DebugOption = False,
) -> None:
    """Choose each cell's settings from its finished trials, and write them to chosen.toml in experiments/."""
    from fulcrum.study import choosing, store
    from fulcrum.study.experiment import read_experiment
    from fulcrum.study.records import StudyScore
    from fulcrum.study.studies import split_study_path

    name, folder = split_study_path(study, experiments)
    experiment = read_experiment(folder, name)
    part = make_study_part(datasets, methods, epsilons)
    wanted = experiment.only(part.datasets, part.methods, part.epsilons)
    made, lacking = choosing.choose_settings(
        wanted, store.load_results(results or Path("results") / name), protocol, partial=partial
    )
    if made:
        choosing.save_choices(experiment, made)
    rows = [
        (
            c.dataset,
            "-" if c.epsilon is None else view.format_epsilon(c.epsilon),
            c.row,
            c.trial,
            c.trials,
            *map(StudyScore(c.score).text, (c.validation_score, c.worst)),
            c.settings,
        )
        for c in made
        if c.worst is not None  # always set for new choices
    ]
    view.print_table(("data", "epsilon", "row", "trial", "of", "validation", "worst trial", "settings"), rows)
    if lacking:
        view.print_message(f"{len(lacking)} cells lack {sum(lacking.values())} trials, such as {next(iter(lacking))}")


for _name in BUILT_IN_STUDIES:
    app.command(_name)(make_study_command(_name))
