"""`fulcrum tune` and `fulcrum pareto`: a search over settings, by Optuna."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import view
from fulcrum.cli.compare import explain_stop, parse_seeds
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption, with_settings
from fulcrum.cli.study_options import split_comma_list
from fulcrum.errors import ConfigError

if TYPE_CHECKING:
    from fulcrum.settings.schema import Settings
    from fulcrum.study.tuning import Choice, Range

MethodOption = Annotated[str, typer.Option("--method", help="The method whose settings are searched.")]
SearchOption = Annotated[
    list[str],
    typer.Option(
        "--search",
        metavar="SETTING=LOW:HIGH[:log]|A,B",
        help="A setting to search; repeat for more. Default: what the method's rule has.",
    ),
]
TrialsOption = Annotated[int, typer.Option("--trials", min=1, help="How many trials; those of before count.")]
SeedsOption = Annotated[str, typer.Option("--seeds", metavar="N|A,B", help="Seeds of each trial, whose mean counts.")]
BackendOption = Annotated[str, typer.Option("--backend", help="auto, sequential, processes, or stacked (GPU).")]
WorkersOption = Annotated[int, typer.Option("--processes", min=0, help="Processes to run in; 0: one per core.")]
MadeUpOption = Annotated[
    bool,
    typer.Option(
        "--made-up", help="Search on made-up records of the same shape, which costs private data nothing; then run it."
    ),
]
SecondsOption = Annotated[float, typer.Option("--seconds", help="Stop cleanly before this time is up; 0: no limit.")]


MADE_UP_FIELDS = ("source", "public", "partition", "parties")
"""Settings of [data] that a search on made-up records replaces."""


@with_settings
def tune(
    make_settings: Callable[..., Any],
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="Epsilon of every trial.")] = None,
    method: MethodOption = "moo",
    objectives: Annotated[
        str, typer.Option("--for", metavar="A,B", help="score; or score with rounds or bytes, for a front of both.")
    ] = "score",
    search: SearchOption = [],  # noqa: B006  # typer needs a list
    trials: TrialsOption = 30,
    seeds: SeedsOption = "1",
    selection: Annotated[
        str,
        typer.Option(
            "--selection",
            help="poisson, logarithmic or geometric: private selection, whose price stays within epsilon; --trials is "
            "then the mean of a random number.",
        ),
    ] = "",
    made_up: MadeUpOption = False,
    out: Annotated[Path, typer.Option("--out", help="Folder of the search; the same command goes on there.")] = Path(
        "tuning"
    ),
    backend: BackendOption = "auto",
    workers: WorkersOption = 0,
    seconds: SecondsOption = 0.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Search settings for the best score at a fixed epsilon, or for score against rounds or bytes."""
    fixed = {} if epsilon is None else {"privacy.epsilon": epsilon}
    names = split_comma_list(objectives)
    if "epsilon" in names:
        raise ConfigError("--for epsilon is what fulcrum pareto does; use that.")
    _search(make_settings, method, fixed, names, search, trials, seeds, selection, made_up, out, backend, workers,
            seconds, as_json, quiet)  # fmt: skip


@with_settings
def pareto(
    make_settings: Callable[..., Any],
    epsilons: Annotated[
        str, typer.Option("--epsilons", metavar="LOW:HIGH", help="The range of epsilon that is searched.")
    ] = "0.5:8",
    method: MethodOption = "moo",
    search: SearchOption = [],  # noqa: B006  # typer needs a list
    trials: TrialsOption = 40,
    seeds: SeedsOption = "1",
    made_up: MadeUpOption = False,
    out: Annotated[Path, typer.Option("--out", help="Folder of the search; the same command goes on there.")] = Path(
        "pareto"
    ),
    backend: BackendOption = "auto",
    workers: WorkersOption = 0,
    seconds: SecondsOption = 0.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Search the front of privacy and utility: epsilon against the score, with its bend and a settings file for it."""
    from fulcrum.study.tuning import parse_space_option

    _, span = parse_space_option(f"privacy.epsilon={epsilons}:log")
    low = getattr(span, "low", 0.0)
    fixed = {"privacy.epsilon": low}
    goals, more = ["epsilon", "score"], {"privacy.epsilon": span}
    _search(make_settings, method, fixed, goals, search, trials, seeds, "", made_up, out, backend, workers, seconds,
            as_json, quiet, more)  # fmt: skip


def _search(
    make_settings: Callable[..., Any],
    method: str,
    fixed: dict[str, Any],
    names: Sequence[str],
    search: Sequence[str],
    trials: int,
    seeds: str,
    selection: str,
    made_up: bool,
    out: Path,
    backend: str,
    workers: int,
    seconds: float,
    as_json: bool,
    quiet: bool,
    more_space: dict[str, Range | Choice] | None = None,
) -> None:
    from fulcrum.analysis.report.files import write_page
    from fulcrum.analysis.report.tune_page import format_objective, make_tune_page, trials_to_csv
    from fulcrum.runs import folder as record
    from fulcrum.settings.files import dump_settings
    from fulcrum.settings.registry import suggest_nearest_names
    from fulcrum.study.backends import BackendOptions, TimeBudget
    from fulcrum.study.proposals import import_optuna
    from fulcrum.study.records import StudyScore
    from fulcrum.study.run_job import load_study_data
    from fulcrum.study.search_run import SELECTIONS, Search, plan_selection, run_search, sum_up
    from fulcrum.study.tuning import choose_space, find_objectives, parse_space_option, refuse_costly_space

    import_optuna()
    clock = TimeBudget(seconds)
    base: Settings = make_settings(method, fixed)
    if base.privacy.epsilon is None and base.privacy.sigma is None and base.clip.rule != "none":
        raise ConfigError("how private? Give --epsilon, or a settings file with privacy.epsilon.")
    own = {name: getattr(base.data, name) for name in MADE_UP_FIELDS}
    if made_up:
        from fulcrum.study.made_up import write_made_up_records

        fixed = {**fixed, **write_made_up_records(base, out)}
        base = make_settings(method, fixed)
    dataset = load_study_data(base)
    private = dataset.train is not None and not dataset.public
    space = {**choose_space(base, dict(parse_space_option(text) for text in search), names), **(more_space or {})}
    goals = find_objectives(names, StudyScore(dataset.task.score, dataset.task.higher_is_better))
    # Trials are judged on held-out records, so that the test records stay untouched; private ones would have to pay.
    held_out = {} if private or base.data.validation else {"data.validation": 0.1}
    plan = Search(
        make=lambda words: make_settings(method, {**fixed, **words}),
        space=space,
        objectives=tuple(goals),
        trials=trials,
        seeds=tuple(parse_seeds(seeds)),
        more=held_out,
        charged=private,
    )
    notes = []
    if private:
        notes.append(_check_charges(plan, base, dataset.name, selection))
    if selection:
        if selection not in SELECTIONS:
            raise ConfigError(
                f"--selection: {selection!r} is not known; {suggest_nearest_names(selection, SELECTIONS)}"
            )
        plan, note = _plan_selection(plan, selection, base, refuse_costly_space, plan_selection)
        notes.append(note)
    for note in notes:
        view.print_message(note, quiet)
    how = BackendOptions(base.data.dir, workers=workers, clock=clock, say=lambda line: view.print_message(line, quiet))
    with explain_stop(out):
        done = run_search(plan, out, backend, how, lambda line: view.print_message(line, quiet), base.run.seed)
    found = sum_up(done, goals)
    chosen = done[found.chosen]
    settings = plan.make({**chosen.values, "run.seed": base.run.seed})
    if made_up:  # what is recommended is for the user's own records
        settings = settings.replace(data=own)
        notes.append("Searched on made-up records: scores on yours will be others; what carries over are the settings.")
        view.print_message(notes[-1], quiet)
    text = dump_settings(settings)
    record.write_file_atomically(out / "recommended.toml", text.encode())
    record.write_file_atomically(out / "trials.csv", trials_to_csv(done, goals, found).encode())
    title = f"{method} on {dataset.name}: {' and '.join(each.name for each in goals)}"
    write_page(out / "report.html", make_tune_page(title, done, goals, found, text, notes))
    if as_json:
        front = [{"trial": done[i].number + 1, **done[i].objectives, "settings": done[i].values} for i in found.front]
        view.print_json({
            "folder": str(out), "trials": len(done), "front": front, "hypervolume": found.hypervolume,
            "recommended": {"trial": chosen.number + 1, **chosen.objectives, "settings": chosen.values},
        })  # fmt: skip
        return
    columns = ("trial", *(each.name for each in goals), *chosen.values)
    rows = [
        (f"{done[i].number + 1}{' <-' if i == found.chosen else ''}",
         *(format_objective(each, done[i]) for each in goals), *done[i].values.values())
        for i in found.front
    ]  # fmt: skip
    view.print_table(columns, rows, "the front" if len(goals) > 1 else "the best trial")
    if found.hypervolume is not None:
        view.print_line(f"hypervolume {found.hypervolume:.4g}; <- is the bend, which is recommended.")
    view.print_line(
        f"fulcrum run {shlex.quote(str(out / 'recommended.toml'))} runs it; {out / 'report.html'} shows it."
    )


def _check_charges(plan: Any, base: Settings, data: str, selection: str) -> str:
    """Refuse a search on private data that nothing is charged for; a sentence on what it costs at most."""
    from fulcrum.study.compare import check_charges
    from fulcrum.study.job import StudyJob
    from fulcrum.study.tuning import Range

    if selection:
        raise ConfigError(
            f"{data} is private, and --selection counts what somebody learns who sees the chosen model only; a "
            "federation's server sees every trial. Leave --selection out: then every trial is charged to --ledger."
        )
    span = plan.space.get("privacy.epsilon")
    worst = base.replace(privacy={"epsilon": span.high}) if isinstance(span, Range) else base
    one = StudyJob(worst, "tune", "", worst.data.source, worst.method, worst.privacy.epsilon)
    total = check_charges([one] * (plan.trials * len(plan.seeds)), data)
    return (
        f"{data} is private: every trial is charged to {base.run.ledger}, all of them together at most epsilon = "
        f"{view.format_epsilon(total)} for each party."
    )


def _plan_selection(
    plan: Any, kind: str, base: Settings, refuse: Callable[..., None], price: Callable[..., Any]
) -> Any:
    """The search with a random number of trials and more noise, and a sentence on its price."""
    import dataclasses

    refuse(plan.space)
    drawn, sigma = price(plan, kind, float(plan.trials), base.run.seed)
    if not drawn:
        raise ConfigError(
            "the private selection drew no trial at all, which is part of its price; in a simulation, use another "
            "run.seed."
        )
    epsilon = base.privacy.epsilon
    note = (
        f"private selection ({kind}, {plan.trials} trials on average): {drawn} trials were drawn, each with sigma = "
        f"{sigma:.4g}; somebody who sees the chosen model only learns at most epsilon = "
        f"{view.format_epsilon(epsilon)}. A server that "
        "sees every trial learns more."
    )
    changed = dataclasses.replace(plan, trials=drawn, random=True, sigma=sigma, epsilon=epsilon)
    return changed, note
